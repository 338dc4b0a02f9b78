"""Rows of a cross-silo table that need no run: SASRec, ALS and BPR of every domain, baselines of packages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedecider.baselines import BASELINES
from fedecider.baselines.fitting import Pooled, validation_ndcg
from fedecider.baselines.own import own_positions
from fedecider.baselines.sasrec import GRID, SPACE, SasrecConfig, scores, train
from fedecider.comparison.cells import KeptCell, kept_cell
from fedecider.comparison.compare import Cell, Entry, Positions, Shared
from fedecider.comparison.search import search_of
from fedecider.data.domain import Domain
from fedecider.data.sellers import once_each
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import ScoreUsers, get_protocol, rank_held_out
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.item_texts import encoded_texts, encoder_digest
from fedecider.running.plain import as_plain
from fedecider.search_space import Setting
from idgen.text_vectors import item_vectors

SASREC, SASREC_TEXT = "sasrec", "sasrec + text start"
FACTORS = ("als", "bpr")
"""Matrix factorisations of one domain (`fedecider.baselines`): a vector a user, so that a validation item helps with no
test item."""


def own_baseline(shared: Shared, label: str) -> Entry:
    """A baseline that an installed package brings; it is ranked anew for every table."""

    @cache
    def ranked() -> dict[str, Positions]:
        places: dict[str, Positions] = {"valid": {}, "test": {}}
        for name, domain in shared.domains.items():
            for split, of_label in own_positions(domain, list(places), get_protocol(shared.protocol), [label]).items():
                places[split][name] = of_label[label]
        return places

    def run(setting: Setting, seed: int) -> Cell:
        valid = fmean(mean_metrics(one, (10,))["ndcg@10"] for one in ranked()["valid"].values())
        return Cell({label: valid}, lambda: {shared.protocol: {label: ranked()["test"]}})

    return Entry(label, label, "baseline", [shared.protocol], run)


class TextStart(NamedTuple):
    """What an item table starts from."""

    vector_ID: Tensor
    """Rows of length 1."""
    source: list[str]
    """What decides them: the encoder and all catalogues."""


def sasrec(shared: Shared, text_encoder: str | None = None) -> Entry:
    """SASRec of every domain. With a ``text_encoder`` the item tables start from the vectors of its item texts, cut
    down to their width as those of a backbone are (`idgen.text_vectors`), and are trained on."""
    label = SASREC if text_encoder is None else SASREC_TEXT

    @cache
    def starts(width: int) -> dict[str, TextStart]:
        return {} if text_encoder is None else _text_starts(shared, text_encoder, width)

    def fitted(config: SasrecConfig, domain: Domain, data: Pooled) -> Scores:
        start = starts(config.embedding_size).get(domain.name)
        model = train(data, config, domain.public.sequences, None if start is None else start.vector_ID)
        return lambda split: scores(model, domain.clients.sequences, split)

    def source(config: SasrecConfig) -> dict[str, list[str]]:
        start_of = starts(config.embedding_size)
        return {"start": next(iter(start_of.values())).source} if start_of else {}

    run = partial(_run, shared, label, lambda setting: SasrecConfig(**setting), Fitted(fitted, source))
    search = search_of([SasrecConfig()], SPACE, GRID)
    return Entry(label, SASREC, "baseline", [shared.protocol], run, search, shared.tune)


def _text_starts(shared: Shared, encoder: str, width: int) -> dict[str, TextStart]:
    """By domain; the texts of a small catalogue may span fewer dimensions than the table has."""
    domains = shared.domains
    encoded = encoded_texts(domains, encoder, str(shared.cache))
    once = {catalogue: encoded[domain.name] for catalogue, domain in once_each(domains).items()}
    vectors = item_vectors(once, width, zero_fill=True)
    source = [encoder_digest(encoder), *(domain.content_hash() for domain in domains.values())]
    return {name: TextStart(vectors[domain.items.name], source) for name, domain in domains.items()}


def factors(shared: Shared, name: str) -> Entry:
    """ALS or BPR of every domain, from its clients' train parts and those of its public users."""
    baseline = BASELINES[name]

    def fitted(config: Any, domain: Domain, data: Pooled) -> Scores:
        both = [SequenceArray.of(events.sequences) for events in (domain.clients, domain.public)]  # clients come first
        lengths, items = (np.concatenate([getattr(one, part) for one in both]) for part in ("length_U", "value_E"))
        in_baskets = any(one.basket_E is not None for one in both)
        from_end_E = np.concatenate([-1 - one.num_after_E for one in both]) if in_baskets else None
        everyone = SequenceArray.of_lengths(lengths, items, from_end_E)
        score = baseline.fit(data._replace(sequences=everyone), config)
        return lambda split: score

    run = partial(_run, shared, name, lambda setting: baseline.config(**setting), Fitted(fitted))
    search = search_of([baseline.config()], baseline.space, baseline.grid)
    return Entry(name, name, "baseline", [shared.protocol], run, search, shared.tune)


Scores = Callable[[str], ScoreUsers]
"""Of a split."""


class Fitted(NamedTuple):
    """How a row is trained."""

    fit: Callable[[Any, Domain, Pooled], Scores]
    """config, domain, its clients -> scores."""
    source: Callable[[Any], dict[str, Any]] = lambda config: {}
    """What decides it beside config and data."""


def _run(
    shared: Shared, label: str, config_of: Callable[[Setting], Any], fitted: Fitted, setting: Setting, seed: int
) -> Cell:
    config = config_of(setting)
    cells = {name: _cell(shared, label, domain, config, fitted, seed) for name, domain in shared.domains.items()}

    def positions() -> dict[str, dict[str, Positions]]:
        return {shared.protocol: {label: {name: cell.positions()["test"] for name, cell in cells.items()}}}

    return Cell({label: fmean(cell.info["valid"] for cell in cells.values())}, positions)


def _cell(shared: Shared, label: str, domain: Domain, config: Any, fitted: Fitted, seed: int) -> KeptCell:
    sequences, num_items = domain.clients.sequences, len(domain.item_keys)
    protocol, device = get_protocol(shared.protocol), shared.device

    def trained(folder: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
        valid = validation_ndcg(sequences, num_items, protocol)
        scores = fitted.fit(config, domain, Pooled(sequences, num_items, protocol, seed, device, valid))
        ranked = {
            split: rank_held_out(scores(split), sequences, num_items, split, protocol) for split in ("valid", "test")
        }
        return {"valid": mean_metrics(ranked["valid"], (10,))["ndcg@10"]}, ranked

    inputs = {
        "config": as_plain(config),
        "seed": seed,
        "protocol of epochs and ranks": shared.protocol,
        "data": domain.content_hash(),
        "device": device,
        **fitted.source(config),
    }
    method = label.partition(" ")[0]
    return kept_cell(shared.cache, f"{method}-{domain.name}", inputs, trained, f"{label}, {domain.name}, seed {seed}")
