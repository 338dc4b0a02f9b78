"""Texts that stand for items and users: assigned in stage 1, once a catalogue, kept in its folder, and what is trained
on them: the public tasks and those of the clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fedecider.cross_silo.settings import PretrainConfig
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain
from fedecider.data.sellers import by_catalogue
from fedecider.federation.record import write_json
from fedecider.models.item_texts import rows_of
from fedecider.running.damage import damage_names, read_object
from fedecider.running.progress import progress
from idgen.id_generator import IDGenerator, make_item_ids
from idgen.item_ids import ItemIds, phrase_item_ids, with_item_words
from idgen.semantic_ids import semantic_item_ids
from idgen.synthetic import Neighbours, nearest_items
from idgen.tasks import Task, build_task

ITEM_VECTORS = "item_vectors.safetensors"


class DomainIds(NamedTuple):
    """Texts that stand for the items of a domain or of a whole catalogue, and which items have near texts.

    Silos of one catalogue share them; of a domain that has a part of its catalogue, ``items`` are those of the
    catalogue.
    """

    items: ItemIds
    neighbours: Neighbours | None = None
    """For synthetic histories; None without them."""


class Given(NamedTuple):
    """What is fixed of IDs before they are assigned, by catalogue; empty where nothing is."""

    id_texts: Mapping[str, list[str]] = {}
    """Whole IDs."""
    own: Mapping[str, list[str]] = {}
    """The last words of IDs, each a token of its own item (`idgen.item_ids.item_words`)."""


def assign_ids(
    settings: PretrainConfig,
    domains: Mapping[str, Domain],
    tokenizer: PreTrainedTokenizerBase,
    generator: IDGenerator | None,
    given: Given,
    near: Mapping[str, Neighbours],
    quiet: bool,
) -> dict[str, DomainIds]:
    """The IDs of every domain and catalogue; ``near`` by domain and catalogue, empty where there are none."""
    ids = {
        name: _item_ids(settings, sellers.catalogue, tokenizer, generator, given.id_texts.get(name), quiet)
        for name, sellers in by_catalogue(domains).items()
    }
    ids |= {name: with_item_words(ids[name], words, tokenizer) for name, words in given.own.items()}
    return _by_name(domains, ids, near)


def _by_name(
    domains: Mapping[str, Domain], ids: Mapping[str, ItemIds], near: Mapping[str, Neighbours]
) -> dict[str, DomainIds]:
    """Those of the catalogues, and of every domain its rows of them."""
    rows = {name: _rows_of(ids[domain.catalogue.name], domain) for name, domain in domains.items()}
    return {name: DomainIds(items, near.get(name)) for name, items in {**ids, **rows}.items()}


def _rows_of(ids: ItemIds, domain: Domain) -> ItemIds:
    """Of a catalogue's IDs those of the items that ``domain`` sells; the report stays that of all."""
    if not domain.is_part:
        return ids
    numbers = domain.catalogue_number_I.tolist()
    return ItemIds([ids.texts[item] for item in numbers], [ids.token_ids[item] for item in numbers], ids.report)


def neighbours_of(
    vectors: Mapping[str, Tensor], domains: Mapping[str, Domain], names: Collection[str] | None = None
) -> dict[str, Neighbours]:
    """Catalogue, and domain -> the near items among its own; ``vectors`` by catalogue.

    ``names``: of which domains, and of the catalogues that they sell all of; None for all.
    """
    near: dict[str, Neighbours] = {}
    for name, sellers in by_catalogue(domains).items():
        wanted = [domain for domain in sellers.domains.values() if names is None or domain.name in names]
        if names is None or not all(domain.is_part for domain in wanted):
            near[name] = nearest_items(vectors[name])
        for domain in wanted:
            near[domain.name] = nearest_items(rows_of(vectors[name], domain)) if domain.is_part else near[name]
    return near


def _item_ids(
    settings: PretrainConfig,
    catalogue: Catalogue,
    tokenizer: PreTrainedTokenizerBase,
    generator: IDGenerator | None,
    id_texts: list[str] | None,
    quiet: bool,
) -> ItemIds:
    if id_texts is not None:
        make = semantic_item_ids if settings.ids == "semantic" else phrase_item_ids
        return make(catalogue.keys, id_texts, tokenizer, item_texts=catalogue.texts)
    with progress(f"item IDs of {catalogue.name}", not quiet and generator is not None) as on_step:
        writer = generator if settings.ids == "generator" else None
        return make_item_ids(catalogue.keys, catalogue.texts, tokenizer, writer, settings.words, on_step)


def save_ids(folder: Path, domains: Mapping[str, Domain], ids: Mapping[str, DomainIds]) -> None:
    """Write ``folder/ids/<catalogue>.json``."""
    (folder / "ids").mkdir()
    for name, sellers in by_catalogue(domains).items():
        content = {"item_keys": sellers.catalogue.keys, "items": ids[name].items._asdict()}
        write_json(folder / "ids" / f"{name}.json", content)


def load_ids(
    folder: Path, domains: Mapping[str, Domain], config: PretrainConfig, synthetic_of: Collection[str] | None = None
) -> dict[str, DomainIds]:
    """IDs of every domain and catalogue, neighbours too where ``config`` asks for synthetic histories.

    ``synthetic_of``: the domains whose synthetic histories are drawn, all by default; others go without neighbours.

    Raises:
        ValueError: they were assigned to another catalogue, or a file is damaged.
    """
    ids = {name: _load_texts(folder, sellers.catalogue) for name, sellers in by_catalogue(domains).items()}
    if config.samples.synthetic_share == 0.0 or (synthetic_of is not None and not synthetic_of):
        return _by_name(domains, ids, {})
    with damage_names(folder / ITEM_VECTORS):
        return _by_name(domains, ids, neighbours_of(load_file(folder / ITEM_VECTORS), domains, synthetic_of))


def _load_texts(folder: Path, catalogue: Catalogue) -> ItemIds:
    path = folder / "ids" / f"{catalogue.name}.json"
    content = read_object(path)
    if content.get("item_keys") != catalogue.keys:
        raise ValueError(
            f"got item IDs of another catalogue for {catalogue.name} in {folder}, expected the one of the data "
            f"({len(catalogue.keys)} items). Run scripts/pretrain.py on these data"
        )
    with damage_names(path):
        return _checked_ids(content["items"], len(catalogue.keys))


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
    tasks = []
    for name, sellers in by_catalogue(domains).items():
        whole = sellers.whole
        tasks.append(
            build_task(whole, whole.public, ids[name].items, tokenizer, config.samples, False, ids[name].neighbours)
        )
    return tasks


def client_tasks(
    domains: Mapping[str, Domain],
    ids: Mapping[str, DomainIds],
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainConfig,
) -> list[Task]:
    """Tasks of the clients, in client order; the last two events of every user are held out.

    Domains without client users, which are those of an out-of-domain pool, are no clients.
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
