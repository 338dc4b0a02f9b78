"""The federated run: shared foundation, rounds, selection on validation, one reading of the test set, hand-over."""

from __future__ import annotations

from pathlib import Path

import torch

from fedecider.evaluation.metrics import CUTOFFS, metrics_per_client
from fedecider.federation.method import Block
from fedecider.federation.rounds import RoundSettings, run_rounds
from fedecider.llm.results import write_results
from fedecider.llm.setup import Settings, build_foundation, load_data, make_recommender
from fedecider.methods import METHODS
from fedecider.running.launch import Launch
from fedecider.running.run_folder import fingerprint
from fedecider.running.tracking import checked_run, open_together, round_recorder, round_teller


def federate(settings: Settings, launch: Launch) -> Path:
    """Run everything and return the run folder; see ``docs/run_folder.md`` for what it holds."""
    config = settings.run
    if settings.ranking.num_beams < max(CUTOFFS):
        least = max(CUTOFFS)
        raise ValueError(
            f"got num_beams {settings.ranking.num_beams}, expected at least {least}: hit@{least} is reported"
        )
    domains = load_data(config)
    hashes = {name: domain.content_hash() for name, domain in domains.items()}
    root, record = checked_run(settings.as_record(), hashes, config.domain_names)
    foundation = build_foundation(config, launch)
    recommender = make_recommender(settings, foundation, launch.device)
    folder = open_together(root, record, launch)
    method = METHODS[config.method].build(recommender, settings.method)
    size = recommender.num_clients if METHODS[config.method].pooled else 1
    blocks = [Block(clients, None) for clients in torch.arange(recommender.num_clients).split(size)]
    state = run_rounds(
        method,
        blocks,
        RoundSettings(config.num_rounds, config.seed, config.participation, fingerprint=fingerprint(record)),
        metrics_per_client,
        recorder=round_recorder(
            folder, launch, config.tracker, {"method": config.method, "seed": config.seed}, recommender.names
        ),
        checkpoints=folder.checkpoints,
        resume=config.resume,
        processes=launch.processes,
        on_round=round_teller(launch, config.num_rounds),
    )
    write_results(settings, method, blocks, recommender, foundation, state, folder, launch)
    launch.accelerator.wait_for_everyone()
    return root
