"""Texts that stand for items and users: assigned in stage 1, once a catalogue, kept in its folder, and what is trained
on them: the public tasks and those of the clients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedecider.cross_silo.settings import PretrainConfig
from fedecider.data.domain import Domain, by_catalogue, is_part, numbers_in, with_unions
from fedecider.federation.record import write_json
from fedecider.running.progress import progress
from fedecider.running.run_folder import damage_names, read_object
from idgen.id_generator import IDGenerator, make_item_ids
from idgen.item_ids import ItemIds, phrase_item_ids
from idgen.samples import Neighbours, Task, build_task, nearest_items
from idgen.semantic_ids import semantic_item_ids

ITEM_VECTORS = "item_vectors.safetensors"


class DomainIds(NamedTuple):
    """Texts that stand for the items of one domain, and which items have near texts; silos of one catalogue share them.

    Of a domain that has a part of its catalogue, ``items`` are those of the catalogue.
    """

    items: ItemIds
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
    """
    wholes = by_catalogue(domains)
    shared = {
        name: _item_ids(settings, whole, tokenizer, generator, id_texts.get(name), quiet)
        for name, whole in wholes.items()
    }
    ids = {}
    for name, domain in with_unions(domains).items():
        whole, items = wholes[domain.catalogue], shared[domain.catalogue]
        if is_part(domain, whole):
            items = _some_of(items, numbers_in(domain, whole))
        ids[name] = DomainIds(items, near.get(name))
    return ids


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
        content = {"item_keys": domain.item_keys, "items": ids[name].items._asdict()}
        write_json(folder / "ids" / f"{name}.json", content)


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
        return DomainIds(_checked_ids(content["items"], len(domain.item_keys)))


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
            ids[name].neighbours,
        )
        for name, domain in domains.items()
        if domain.clients.users
    ]


def _check_tokens(ids: Mapping[str, DomainIds], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse IDs of another tokenizer: their tokens would be looked up beyond the embedding table."""
    for name, one in ids.items():
        largest = max((max(tokens, default=0) for tokens in one.items.token_ids), default=0)
        if largest >= len(tokenizer):
            raise ValueError(
                f"got token {largest} in ids/{name}.json of the pre-training stage, expected at most "
                f"{len(tokenizer) - 1}: the file is damaged, or of another tokenizer. Delete the stage in --cache"
            )
