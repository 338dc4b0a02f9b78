"""Texts that stand for items and users: assigned in stage 1, once a catalogue, kept in its folder, and what is trained
on them: the public tasks and those of the clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedecider.cross_silo.settings import PretrainConfig
from fedecider.data.domain import Domain, Events, by_catalogue, is_part, numbers_in, with_unions
from fedecider.evaluation.protocols import NUM_HELD_OUT
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.record import write_json
from fedecider.running.progress import progress
from fedecider.running.run_folder import damage_names, read_object
from idgen.id_generator import IDGenerator, make_item_ids
from idgen.item_ids import ItemIds, phrase_item_ids, user_texts
from idgen.samples import Neighbours, Task, build_task, nearest_items
from idgen.semantic_ids import semantic_item_ids

ID_GROUPS = ("items", "clients", "public")
ITEM_VECTORS = "item_vectors.safetensors"


class DomainIds(NamedTuple):
    """Texts that stand for the items and users of one domain, and which items have near texts.

    Silos of one catalogue have all in common but ``clients``; of a domain that has a part of its catalogue, ``items``
    are those of the catalogue, and ``public`` is left to it.
    """

    items: ItemIds
    clients: ItemIds | None
    """One per client user; None without user wording, and where there are no such users."""
    public: ItemIds | None
    neighbours: Neighbours | None = None
    """For synthetic histories; None without them."""


def assign_ids(
    settings: PretrainConfig,
    domains: Mapping[str, Domain],
    tokenizer: PreTrainedTokenizerBase,
    generator: IDGenerator | None,
    id_texts: Mapping[str, list[str]],
    near: Mapping[str, Neighbours],
    quiet: bool,
) -> dict[str, DomainIds]:
    """The IDs of every domain, and of unions of their catalogues (`with_unions`); ``id_texts``, which are fixed, by
    catalogue, and ``near`` by domain, empty where there are none.

    Users are described by their training parts, public users by all their events.
    """

    def users(items: ItemIds, events: Events, sequences: Sequence[list[int]]) -> ItemIds | None:
        generate = None if generator is None else generator.candidates
        if not sequences or settings.samples.user_wording == "none":
            return None
        return user_texts(events.users, sequences, items, tokenizer, generate)

    wholes, shared = by_catalogue(domains), {}
    for name, whole in wholes.items():
        items = _item_ids(settings, whole, tokenizer, generator, id_texts.get(name), quiet)
        shared[name] = DomainIds(items, None, users(items, whole.public, whole.public.sequences))
    found = {}
    for name, domain in with_unions(domains).items():
        whole, own = wholes[domain.catalogue], shared[domain.catalogue]
        if is_part(domain, whole):
            own = DomainIds(_some_of(own.items, numbers_in(domain, whole)), None, None)
        parts = SequenceArray.of(domain.clients.sequences).without_last(NUM_HELD_OUT)
        found[name] = own._replace(clients=users(own.items, domain.clients, parts), neighbours=near.get(name))
    return found


def _some_of(ids: ItemIds, numbers: Iterable[int]) -> ItemIds:
    """Those of the items with these numbers; the report stays that of all."""
    numbers = list(numbers)
    return ItemIds([ids.texts[one] for one in numbers], [ids.token_ids[one] for one in numbers], ids.report)


def neighbours_of(
    vectors: Mapping[str, Tensor], domains: Mapping[str, Domain], names: Collection[str] | None = None
) -> dict[str, Neighbours]:
    """Domain -> the near items among its own, and union of a catalogue -> those of all; once where items are the same.

    ``vectors`` by catalogue; ``names``: of which domains, and of silos with the same items; None for all, unions too.
    """
    wholes, found = by_catalogue(domains), {}
    near: dict[str, Neighbours] = {}
    asked = {one.catalogue for name, one in domains.items() if names is None or name in names}
    for name, domain in (with_unions(domains) if names is None else domains).items():
        catalogue, whole = domain.catalogue, wholes[domain.catalogue]
        if is_part(domain, whole):
            if names is None or name in names:
                found[name] = nearest_items(vectors[catalogue][torch.from_numpy(numbers_in(domain, whole))])
        elif catalogue in asked:
            near[catalogue] = near.get(catalogue) or nearest_items(vectors[catalogue])
            found[name] = near[catalogue]
    return found


def _item_ids(
    settings: PretrainConfig,
    domain: Domain,
    tokenizer: PreTrainedTokenizerBase,
    generator: IDGenerator | None,
    id_texts: list[str] | None,
    quiet: bool,
) -> ItemIds:
    if id_texts is not None:
        make = semantic_item_ids if settings.ids == "semantic" else phrase_item_ids
        return make(domain.item_keys, id_texts, tokenizer, item_texts=domain.item_texts)
    with progress(f"item IDs of {domain.catalogue}", not quiet and generator is not None) as on_step:
        writer = generator if settings.ids == "generator" else None
        return make_item_ids(domain.item_keys, domain.item_texts, tokenizer, writer, settings.words, on_step)


def save_ids(folder: Path, domains: Mapping[str, Domain], ids: Mapping[str, DomainIds]) -> None:
    """Write ``folder/ids/<domain>.json``."""
    (folder / "ids").mkdir()
    for name, domain in with_unions(domains).items():
        groups = zip(ID_GROUPS, (ids[name].items, ids[name].clients, ids[name].public), strict=True)
        content = {group: None if value is None else value._asdict() for group, value in groups}
        write_json(folder / "ids" / f"{name}.json", {"item_keys": domain.item_keys, **content})


def load_ids(
    folder: Path, domains: Mapping[str, Domain], config: PretrainConfig, walks_of: Collection[str] | None = None
) -> dict[str, DomainIds]:
    """IDs of every domain and union, neighbours too where ``config`` asks for synthetic histories; those of a catalogue
    are worked out once. ``walks_of``: the domains whose walks are drawn, all by default; others go without neighbours.

    Raises:
        ValueError: they were assigned to another catalogue, or a file is damaged.
    """
    found = {name: _load_texts(folder, domain) for name, domain in with_unions(domains).items()}
    if config.samples.walk_share == 0.0 or (walks_of is not None and not walks_of):
        return found
    with damage_names(folder / ITEM_VECTORS):
        near = neighbours_of(load_file(folder / ITEM_VECTORS), domains, walks_of)
    return {name: one._replace(neighbours=near.get(name)) for name, one in found.items()}


def _load_texts(folder: Path, domain: Domain) -> DomainIds:
    path = folder / "ids" / f"{domain.name}.json"
    content = read_object(path)
    if content.get("item_keys") != domain.item_keys:
        raise ValueError(
            f"got item IDs of another catalogue for {domain.name} in {folder}, expected the one of the data "
            f"({len(domain.item_keys)} items). Run scripts/pretrain.py on these data"
        )
    with damage_names(path):
        sizes = (len(domain.item_keys), len(domain.clients.users), len(domain.public.users))
        items, clients, public = (
            None if content[group] is None else _checked_ids(content[group], size)
            for group, size in zip(ID_GROUPS, sizes, strict=True)
        )
        if items is None:
            raise ValueError("no item IDs")
    return DomainIds(items, clients, public)


def _checked_ids(values: Mapping[str, Any], size: int) -> ItemIds:
    found = ItemIds(**values)
    texts = all(isinstance(text, str) for text in found.texts)
    tokens = all(type(token) is int and token >= 0 for tokens in found.token_ids for token in tokens)
    if not (texts and tokens and len(found.texts) == len(found.token_ids) == size):
        raise ValueError(f"expected {size} texts with their tokens, numbers from 0 on")
    return found


def public_tasks(
    domains: Mapping[str, Domain],
    ids: Mapping[str, DomainIds],
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainConfig,
) -> list[Task]:
    """Training tasks of the public pools, one per catalogue; every event of a public user may be a target.

    Catalogues without public users have synthetic histories alone.
    """
    _check_tokens(ids, tokenizer)
    return [
        build_task(
            domain,
            domain.public,
            ids[domain.name].items,
            tokenizer,
            config.samples,
            False,
            ids[domain.name].public,
            ids[domain.name].neighbours,
        )
        for domain in by_catalogue(domains).values()
    ]


def client_tasks(
    domains: Mapping[str, Domain],
    ids: Mapping[str, DomainIds],
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainConfig,
) -> list[Task]:
    """Tasks of the clients, in client order; the last two events of every user are held out.

    Domains without client users, which are those of a foreign pool, are no clients.
    """
    _check_tokens(ids, tokenizer)
    return [
        build_task(
            domain,
            domain.clients,
            ids[name].items,
            tokenizer,
            config.samples,
            True,
            ids[name].clients,
            ids[name].neighbours,
        )
        for name, domain in domains.items()
        if domain.clients.users
    ]


def _check_tokens(ids: Mapping[str, DomainIds], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse IDs of another tokenizer: their tokens would be looked up beyond the embedding table."""
    for name, one in ids.items():
        groups = [group for group in (one.items, one.clients, one.public) if group is not None]
        largest = max((max(tokens, default=0) for group in groups for tokens in group.token_ids), default=0)
        if largest >= len(tokenizer):
            raise ValueError(
                f"got token {largest} in ids/{name}.json of the pre-training stage, expected at most "
                f"{len(tokenizer) - 1}: the file is damaged, or of another tokenizer. Delete the stage in --cache"
            )
