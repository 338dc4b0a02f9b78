"""Rows of a comparison that are not federated, on the same events: public pool and the clients' train parts.

SASRec is trained once a domain and seed and kept; counting baselines and zero-shot backbones stand in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedecider.baselines.fitting import validation_ndcg
from fedecider.baselines.sasrec import GRID, SasrecConfig, scores, train
from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol, rank_held_out
from fedecider.federation.record import read_json, write_json
from fedecider.llm.baselines import COUNTS, STUDENT, TEACHER
from fedecider.report.rows import CANARY
from fedecider.running.progress import say
from fedecider.running.stages import as_plain, cached_stage

BASELINES = (TEACHER, STUDENT, *COUNTS, "sasrec", CANARY)
"""All but ``sasrec`` are views in ``per_user.parquet`` of every run."""


def sasrec(
    domains: Mapping[str, Domain], protocol: str, seeds: int, tune: int, cache: Path, device: str = "cpu"
) -> dict[str, Tensor]:
    """domain -> (S, U) test positions of SASRec with seeds 0, 1, ...

    Chosen like a row of the table: the one of its first ``tune`` settings with the best validation ndcg@10 at seed 0,
    mean over domains.
    """

    def folders(setting: dict, seed: int) -> dict[str, Path]:
        return {name: _trained(domain, protocol, setting, seed, cache, device) for name, domain in domains.items()}

    best = max(GRID[:tune], key=lambda setting: sum(_valid(folder) for folder in folders(setting, 0).values()))
    per_seed = [folders(best, seed) for seed in range(seeds)]
    return {
        name: torch.stack([load_file(one[name] / "positions.safetensors")["test"] for one in per_seed])
        for name in domains
    }


def _valid(folder: Path) -> float:
    return read_json(folder / "info.json")["valid"]


def _trained(domain: Domain, protocol: str, setting: dict, seed: int, cache: Path, device: str) -> Path:
    config = SasrecConfig(**setting)
    sequences, num_items = domain.clients.sequences, len(domain.item_keys)

    def build(folder: Path) -> None:
        valid, public = validation_ndcg(sequences, num_items), domain.public.sequences
        model = train(sequences, num_items, config, seed=seed, device=device, valid=valid, extra=public)
        ranked = {
            split: rank_held_out(scores(model, sequences, split), sequences, num_items, split, get_protocol(protocol))
            for split in ("valid", "test")
        }
        save_file(ranked, folder / "positions.safetensors")
        write_json(folder / "info.json", {"valid": mean_metrics(ranked["valid"], (10,))["ndcg@10"]})

    inputs = {
        "config": as_plain(config),
        "seed": seed,
        "protocol": protocol,
        "data": domain.content_hash(),
        "device": device,
    }
    stage = cached_stage(cache, f"sasrec-{domain.name}", inputs, build)
    if not stage.reused:
        say(f"sasrec, {domain.name}, seed {seed}: validation ndcg@10 {_valid(stage.folder):.4f}")
    return stage.folder
