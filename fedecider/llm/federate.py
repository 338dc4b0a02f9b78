"""The federated run: shared foundation, rounds, selection on validation, one reading of the test set, hand-over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fedecider.evaluation.metrics import CUTOFFS, metrics_per_client
from fedecider.federation.method import Block, FederatedMethod
from fedecider.federation.record import Recorder
from fedecider.federation.rounds import RoundSettings, run_rounds
from fedecider.federation.state import RunState
from fedecider.llm.limits import check_limits
from fedecider.llm.results import write_results
from fedecider.llm.setup import Settings, build_foundation, load_data, make_recommender
from fedecider.methods import METHODS
from fedecider.methods.recommender import Recommender
from fedecider.running.launch import Launch
from fedecider.running.progress import console, round_progress
from fedecider.running.run_folder import RunFolder, check_run, default_name, fingerprint, opened_run, provenance


def federate(settings: Settings, launch: Launch) -> Path:
    """Run everything and return the run folder; see ``docs/run_folder.md`` for what it holds."""
    config = settings.run
    if settings.ranking.num_beams < max(CUTOFFS):
        least = max(CUTOFFS)
        raise ValueError(
            f"got num_beams {settings.ranking.num_beams}, expected at least {least}: hit@{least} is reported"
        )
    domains = load_data(config)
    check_limits(settings, domains)
    record = {
        "config": settings.as_record(),
        "protocol": config.protocol,
        "data": {name: domain.content_hash() for name, domain in domains.items()},
        **provenance(),
    }
    root = Path(config.output) if config.output else Path("runs") / default_name(config.method, config.domain_names)
    check_run(root, record, config.resume)
    launch.accelerator.wait_for_everyone()  # else a slow process would find the folder that the first one opens
    foundation = build_foundation(config, launch)
    recommender = make_recommender(settings, foundation, launch.device)
    method = METHODS[config.method].build(recommender, settings.method)
    size = recommender.num_clients if METHODS[config.method].pooled else 1
    blocks = [Block(clients, None) for clients in torch.arange(recommender.num_clients).split(size)]
    with opened_run(root, record, config.resume, writes=launch.is_main) as folder:
        launch.accelerator.wait_for_everyone()
        state = _rounds(settings, method, blocks, recommender, folder, launch, fingerprint(record))
        write_results(settings, method, blocks, recommender, foundation, state, folder, launch)
        launch.accelerator.wait_for_everyone()
    return root


def _rounds(
    settings: Settings,
    method: FederatedMethod,
    blocks: list[Block],
    recommender: Recommender,
    folder: RunFolder,
    launch: Launch,
    key: str,
) -> RunState:
    config = settings.run
    if config.tracker:
        launch.accelerator.init_trackers("fedecider", config={"method": config.method, "seed": config.seed})

    def track(record: dict, step: int) -> None:
        launch.accelerator.log({f"valid/{name}": value for name, value in _flat(record, recommender.names)}, step=step)

    def show(record: dict) -> None:
        if launch.is_main:
            scores = ", ".join(f"{view} {_mean(clients):.4f}" for view, clients in record["valid"].items())
            losses = " ".join(f"{client['loss']:.4g}" for client in record["clients"])
            seconds = f"train {record['train_s']:.1f} s, evaluate {record['evaluate_s']:.1f} s"
            line = f"round {record['round']}/{config.num_rounds}: valid ndcg@10 {scores} | loss {losses} | {seconds}"
            console.print(line, highlight=False, soft_wrap=True)

    with round_progress(config.num_rounds, launch.is_main) as on_clients:
        return run_rounds(
            method,
            blocks,
            RoundSettings(config.num_rounds, config.seed, config.participation, fingerprint=key),
            metrics_per_client,
            recorder=Recorder(folder.rounds if launch.is_main else None, track if config.tracker else None),
            checkpoints=folder.checkpoints,
            resume=config.resume,
            processes=launch.processes,
            on_round=show,
            on_clients=on_clients,
        )


def _mean(clients: list[dict[str, float]]) -> float:
    return sum(client["ndcg@10"] for client in clients) / len(clients)


def _flat(record: dict, names: Any) -> list[tuple[str, float]]:
    return [
        (f"{view}/{name}/{metric}", value)
        for view, clients in record["valid"].items()
        for name, metrics in zip(names, clients, strict=True)
        for metric, value in metrics.items()
    ]
