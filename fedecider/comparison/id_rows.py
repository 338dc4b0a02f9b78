"""Rows of a comparison that are federated without a language model: ID-based methods on the same events and clients.

They are trained here, once a setting and seed, and kept; the rounds and the wire are those of the methods beside which
they stand, so their bytes and seconds enter the same table of costs.

Shape legend: S seeds, U users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedecider.data.domain import Domain
from fedecider.federation.record import Recorder, read_json, read_records, write_json
from fedecider.id_based import METHODS
from fedecider.id_based.config import IdRunConfig, IdSettings
from fedecider.id_based.run import train_rounds
from fedecider.running.progress import say
from fedecider.running.stages import as_plain, cached_stage
from fedecider.tuning import search


class IdRow(NamedTuple):
    """One row, from its runs with all seeds."""

    position_SU: dict[str, Tensor]
    """By domain, of the test items."""
    records: list[list[dict]]
    """Of the rounds of each seed."""
    best_rounds: list[int]


def id_row(
    method: str, domains: Mapping[str, Domain], protocol: str, seeds: int, tune: int, cache: Path, device: str = "cpu"
) -> IdRow:
    """A method with seeds 0, 1, ..., chosen as a row of the table is: of ``tune`` settings of its search the one with
    the best validation ndcg@10 at seed 0.

    Raises:
        ValueError: no setting could be trained.
    """
    entry = METHODS[method]

    def folder(setting: dict, seed: int) -> Path:
        run = IdRunConfig(method=method, protocol=protocol, seed=seed, patience=entry.patience)
        return _trained(IdSettings(run, replace(entry.config(), **setting)), domains, cache, device)

    start = search.search_of([entry.config()], entry.space, entry.grid, 0)
    tried = search.tune(start, tune, lambda setting: read_json(folder(setting, 0) / "info.json")["valid"], method)
    best = search.best_of(tried)
    if best is None:
        raise ValueError(f"no setting of {method} could be trained")
    folders = [folder(tried[best].setting, seed) for seed in range(seeds)]
    places = [load_file(one / "positions.safetensors") for one in folders]
    return IdRow(
        {name: torch.stack([of_seed[name] for of_seed in places]) for name in domains},
        [read_records(one / "rounds.jsonl") for one in folders],
        [read_json(one / "info.json")["best_round"] for one in folders],
    )


def _trained(settings: IdSettings, domains: Mapping[str, Domain], cache: Path, device: str) -> Path:
    method = settings.run.method

    def build(folder: Path) -> None:
        recorder = Recorder(folder / "rounds.jsonl")
        trained = train_rounds(settings, domains, torch.device(device), recorder=recorder)
        reported = next(iter(trained.positions("test").values()))
        save_file(reported, folder / "positions.safetensors")
        state = trained.state
        write_json(folder / "info.json", {"valid": state.best_score, "best_round": state.best_round})

    inputs = {
        "run": as_plain(settings.run),
        "method": as_plain(settings.method),
        "data": [(name, domain.content_hash()) for name, domain in domains.items()],
        "device": device,
    }
    stage = cached_stage(cache, method, inputs, build)
    if not stage.reused:
        info = read_json(stage.folder / "info.json")
        say(f"{method}, seed {settings.run.seed}: validation ndcg@10 {info['valid']:.4f} in round {info['best_round']}")
    return stage.folder
