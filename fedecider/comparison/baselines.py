"""Rows of a comparison without a language model of their own, on the same events: public pool and train parts.

SASRec is trained once a domain and seed and kept; rows without training and zero-shot backbones stand in every run.

Shape legend: S seeds, U users, I items, D dims of the item table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedecider.baselines.fitting import validation_ndcg
from fedecider.baselines.sasrec import GRID, SPACE, SasrecConfig, scores, train
from fedecider.data.domain import Domain, by_catalogue
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol, rank_held_out
from fedecider.federation.record import read_json, write_json
from fedecider.id_based import METHODS as ID_METHODS
from fedecider.llm.baselines import STUDENT, TEACHER, UNTRAINED
from fedecider.llm.item_texts import encoded_texts, encoder_digest
from fedecider.llm.memories import MEMORY_ROW, OWN_MEMORY_ROW
from fedecider.report.rows import CANARY
from fedecider.running.progress import say
from fedecider.running.stages import as_plain, cached_stage
from fedecider.tuning import search
from idgen.text_vectors import item_vectors

SASREC, SASREC_TEXT = "sasrec", "sasrec + text start"
WITHOUT_ROUNDS = (TEACHER, STUDENT, *UNTRAINED, MEMORY_ROW, SASREC, SASREC_TEXT, CANARY)
"""All but the two of SASRec are views in ``per_user.parquet`` of every run; a memory of every run that has one."""
BASELINES = (*WITHOUT_ROUNDS, OWN_MEMORY_ROW, *ID_METHODS)
"""Besides, what a company alone has of counts and texts, where there are siblings, and ID-based methods
(`fedecider.comparison.id_rows`)."""


class TextStart(NamedTuple):
    """What an item table starts from."""

    vector_ID: Tensor
    """Rows of length 1."""
    source: list[str]
    """What decides them: the encoder and all catalogues."""


def sasrec(
    domains: Mapping[str, Domain],
    protocol: str,
    seeds: int,
    tune: int,
    cache: Path,
    device: str = "cpu",
    text_encoder: str | None = None,
) -> dict[str, Tensor]:
    """domain -> (S, U) test positions of SASRec with seeds 0, 1, ...

    Chosen like a row of the table: of ``tune`` settings of its search the one with the best validation ndcg@10 at seed
    0, mean over domains. With a ``text_encoder`` the item tables start from the vectors of its item texts, cut down to
    their width as those of a backbone are (`idgen.text_vectors`), and are trained on.
    """

    def folders(setting: dict, seed: int) -> dict[str, Path]:
        config = SasrecConfig(**setting)
        starts = {} if text_encoder is None else _text_starts(domains, text_encoder, cache, config.embedding_size)
        return {
            name: _trained(domain, protocol, config, seed, cache, device, starts.get(name))
            for name, domain in domains.items()
        }

    def score(setting: dict) -> float:
        found = [_valid(folder) for folder in folders(setting, 0).values()]
        return sum(found) / len(found)

    tried = search.tune(search.search_of([SasrecConfig()], SPACE, GRID, 0), tune, score, SASREC)
    best = search.best_of(tried)
    if best is None:
        raise ValueError(f"no setting of {SASREC} could be trained")
    per_seed = [folders(tried[best].setting, seed) for seed in range(seeds)]
    return {
        name: torch.stack([load_file(one[name] / "positions.safetensors")["test"] for one in per_seed])
        for name in domains
    }


def _valid(folder: Path) -> float:
    return read_json(folder / "info.json")["valid"]


def _text_starts(domains: Mapping[str, Domain], encoder: str, cache: Path, width: int) -> dict[str, TextStart]:
    """By domain; the texts of a small catalogue may span fewer dimensions than the table has."""
    encoded = encoded_texts(domains, encoder, str(cache))
    once = {catalogue: encoded[domain.name] for catalogue, domain in by_catalogue(domains).items()}
    vectors = item_vectors(once, width, zero_fill=True)
    source = [encoder_digest(encoder), *(domain.content_hash() for domain in domains.values())]
    return {name: TextStart(vectors[domain.catalogue], source) for name, domain in domains.items()}


def _trained(
    domain: Domain,
    protocol: str,
    config: SasrecConfig,
    seed: int,
    cache: Path,
    device: str,
    start: TextStart | None,
) -> Path:
    sequences, num_items = domain.clients.sequences, len(domain.item_keys)

    def build(folder: Path) -> None:
        ranking, public = get_protocol(protocol), domain.public.sequences
        valid = validation_ndcg(sequences, num_items, ranking)
        start_ID = None if start is None else start.vector_ID
        model = train(
            sequences, num_items, config, seed=seed, device=device, valid=valid, extra=public, start_ID=start_ID
        )
        ranked = {
            split: rank_held_out(scores(model, sequences, split), sequences, num_items, split, ranking)
            for split in ("valid", "test")
        }
        save_file(ranked, folder / "positions.safetensors")
        write_json(folder / "info.json", {"valid": mean_metrics(ranked["valid"], (10,))["ndcg@10"]})

    inputs = {
        "config": as_plain(config),
        "seed": seed,
        "protocol of epochs and ranks": protocol,
        "data": domain.content_hash(),
        "device": device,
        **({} if start is None else {"start": start.source}),
    }
    stage = cached_stage(cache, f"sasrec-{domain.name}", inputs, build)
    if not stage.reused:
        label = SASREC if start is None else SASREC_TEXT
        say(f"{label}, {domain.name}, seed {seed}: validation ndcg@10 {_valid(stage.folder):.4f}")
    return stage.folder
