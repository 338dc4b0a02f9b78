"""Texts that stand for items and users: assigned in stage 1, once per catalogue, and read again by all that follows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from fedecider.data.domain import Domain, Events, by_catalogue
from fedecider.evaluation.split import train_part
from fedecider.federation.record import write_json
from fedecider.llm.config import PretrainConfig
from fedecider.running.damage import damage_names, read_object
from fedecider.running.progress import progress
from idgen.id_generator import IDGenerator, make_item_ids
from idgen.item_ids import ItemIds, user_texts
from idgen.phrases import phrase_item_ids
from idgen.walks import Neighbours, nearest_items

ID_GROUPS = ("items", "clients", "public")
ITEM_VECTORS = "item_vectors.safetensors"


class DomainIds(NamedTuple):
    """Texts that stand for the items and users of one domain, and which items have near texts.

    Silos of one catalogue have all in common but ``clients``.
    """

    items: ItemIds
    clients: ItemIds | None
    """One per client user; None without user wording, and where there are no such users."""
    public: ItemIds | None
    neighbours: Neighbours | None = None
    """For catalogue walks; None without them."""


def assign_ids(
    settings: PretrainConfig,
    domains: Mapping[str, Domain],
    tokenizer: PreTrainedTokenizerBase,
    generator: IDGenerator | None,
    phrases: Mapping[str, list[str]],
    near: Mapping[str, Neighbours],
    quiet: bool,
) -> dict[str, DomainIds]:
    """The IDs of every domain; ``phrases`` and ``near`` by catalogue, empty where there are none.

    Users are described by their training parts, public users by all their events.
    """

    def users(domain: Domain, events: Events, sequences: list[list[int]]) -> ItemIds | None:
        wording, items = settings.samples.user_wording, shared[domain.catalogue].items
        generate = None if generator is None else generator.candidates
        if not sequences:
            return None
        return user_texts(wording, events.users, sequences, items, tokenizer, generate, settings.id_limits)

    shared: dict[str, DomainIds] = {}
    for name, domain in by_catalogue(domains).items():
        items = _item_ids(settings, domain, tokenizer, generator, phrases.get(name), quiet)
        shared[name] = DomainIds(items, None, None, near.get(name))
        public = users(domain, domain.public, domain.public.sequences)
        shared[name] = shared[name]._replace(public=public)
    return {
        name: shared[domain.catalogue]._replace(
            clients=users(domain, domain.clients, [list(train_part(items)) for items in domain.clients.sequences])
        )
        for name, domain in domains.items()
    }


def _item_ids(
    settings: PretrainConfig,
    domain: Domain,
    tokenizer: PreTrainedTokenizerBase,
    generator: IDGenerator | None,
    phrases: list[str] | None,
    quiet: bool,
) -> ItemIds:
    if phrases is not None:
        return phrase_item_ids(domain.item_keys, phrases, tokenizer, settings.id_limits)
    with progress(f"item IDs of {domain.catalogue}", not quiet and generator is not None) as on_step:
        return make_item_ids(
            domain.item_keys,
            domain.item_texts,
            tokenizer,
            settings.id_source,
            generator,
            settings.keywords,
            settings.id_limits,
            on_step,
        )


def save_ids(folder: Path, domains: Mapping[str, Domain], ids: Mapping[str, DomainIds]) -> None:
    """Write ``folder/ids/<domain>.json``."""
    (folder / "ids").mkdir()
    for name, one in ids.items():
        groups = zip(ID_GROUPS, (one.items, one.clients, one.public), strict=True)
        content = {group: None if value is None else value._asdict() for group, value in groups}
        write_json(folder / "ids" / f"{name}.json", {"item_keys": domains[name].item_keys, **content})


def load_ids(
    foundation: Path, domains: Mapping[str, Domain], config: PretrainConfig, walks_of: Collection[str] | None = None
) -> dict[str, DomainIds]:
    """IDs of every domain, with its neighbours where ``config`` asks for catalogue walks; those of a catalogue are
    worked out once. ``walks_of``: the domains whose walks are drawn, all by default; others go without neighbours.

    Raises:
        ValueError: they were assigned to another catalogue, or a file is damaged.
    """
    found = {name: _load_texts(foundation, domain) for name, domain in domains.items()}
    if config.samples.walk_share == 0.0:
        return found
    asked = [domain.catalogue for name, domain in domains.items() if walks_of is None or name in walks_of]
    near = _load_neighbours(foundation / ITEM_VECTORS, dict.fromkeys(asked))
    return {name: one._replace(neighbours=near.get(domains[name].catalogue)) for name, one in found.items()}


def _load_neighbours(path: Path, catalogues: Collection[str]) -> dict[str, Neighbours]:
    if not catalogues:
        return {}
    with damage_names(path):
        vectors = load_file(path)
        return {name: nearest_items(vectors[name]) for name in catalogues}


def _load_texts(foundation: Path, domain: Domain) -> DomainIds:
    path = foundation / "ids" / f"{domain.name}.json"
    content = read_object(path)
    if content.get("item_keys") != domain.item_keys:
        raise ValueError(
            f"got item IDs of another catalogue for {domain.name} in {foundation}, expected the one of the data "
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
