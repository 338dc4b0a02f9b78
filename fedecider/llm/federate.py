"""The federated run: shared foundation, rounds, selection on validation, one reading of the test set, hand-over."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from fedecider.data.domain import by_catalogue, clients_of
from fedecider.evaluation.metrics import CUTOFFS, metrics_per_client
from fedecider.federation.aggregate import with_robust_mean
from fedecider.federation.faults import read_faults, scenario
from fedecider.federation.method import Block, FederatedMethod
from fedecider.federation.privacy import protector
from fedecider.federation.rounds import ONE_BY_ONE, Gathering, RoundSettings, run_rounds
from fedecider.federation.secure_rounds import SecureSums, bare_rows, securely_summed_rounds
from fedecider.llm.limits import check_limits
from fedecider.llm.privacy import check_privacy, check_shared_noise
from fedecider.llm.results import write_results
from fedecider.llm.setup import Settings, build_foundation, load_data, make_recommender
from fedecider.methods import METHODS
from fedecider.methods.recommender import ClientModels
from fedecider.running.launch import Launch
from fedecider.running.progress import round_progress
from fedecider.running.run_folder import fingerprint
from fedecider.running.stages import content_key
from fedecider.running.tracking import checked_run, opened_together, round_recorder, round_teller
from fedecider.running.yaml_file import load_yaml


def carries_update(name: str) -> bool:
    """Whether a tensor of adapters has the sign and size of their update: of the two factors the second one."""
    return name.endswith("lora_b")


def federate(settings: Settings, launch: Launch) -> Path:
    """Run everything and return the run folder; see ``docs/run_folder.md`` for what it holds."""
    config = settings.run
    if settings.ranking.num_beams < max(CUTOFFS):
        least = max(CUTOFFS)
        raise ValueError(
            f"got num_beams {settings.ranking.num_beams}, expected at least {least}: hit@{least} is reported"
        )
    domains = load_data(config)
    clients = clients_of(domains)
    check_limits(settings, clients)
    check_privacy(settings)
    hashes = {name: domain.content_hash() for name, domain in domains.items()}
    faults = read_faults(load_yaml(Path(config.faults)), list(clients), config.faults) if config.faults else []
    if faults:
        hashes["faults"] = content_key(faults)
    root, record = checked_run(settings.as_record(), hashes, list(by_catalogue(clients)))
    launch.accelerator.wait_for_everyone()  # else a slow process would find the folder that the first one opens
    foundation = build_foundation(config, launch)
    launch = launch._replace(processes=replace(launch.processes, placement=config.placement))
    recommender = make_recommender(settings, foundation, launch.device, launch.deepspeed, processes=launch.processes)
    method = with_robust_mean(METHODS[config.method].build(recommender, settings.method), config.robust_mean)
    check_shared_noise(config.privacy, method, recommender)
    gathering = _gathering(settings, method, recommender, launch)
    goes_wrong = scenario(faults, config.seed, carries_update)
    size = recommender.num_clients if METHODS[config.method].pooled else 1
    blocks = [Block(clients, None) for clients in torch.arange(recommender.num_clients).split(size)]
    with opened_together(root, record, launch) as folder:
        tracked = {"method": config.method, "seed": config.seed}
        with round_progress(config.num_rounds, launch.is_main) as on_clients:
            state = run_rounds(
                method,
                blocks,
                RoundSettings(config.num_rounds, config.seed, config.participation, fingerprint=fingerprint(record)),
                metrics_per_client,
                recorder=round_recorder(folder, launch, config.tracker, tracked, recommender.names),
                checkpoints=folder.checkpoints,
                resume=config.resume,
                protect=protector(method, config.privacy, config.seed),
                attend=goes_wrong.attend,
                deliver=goes_wrong.deliver,
                gathering=gathering,
                processes=launch.processes,
                on_round=round_teller(launch, config.num_rounds),
                on_clients=on_clients,
            )
        write_results(settings, method, blocks, recommender, foundation, state, folder, launch)
    return root


def _gathering(settings: Settings, method: FederatedMethod, recommender: ClientModels, launch: Launch) -> Gathering:
    """How uploads reach the server: one by one, or as secure sums; of what a sum does not hide it warns."""
    config = settings.run
    if not config.secure_sum:
        return ONE_BY_ONE
    sums = SecureSums(config.seed, config.secure_threshold, own_rows=recommender.own_rows)
    gathering = securely_summed_rounds(method, sums)
    if launch.is_main:
        for sentence in bare_rows(recommender.own_rows):
            print(f"warning: {sentence}", file=sys.stderr)
    return gathering
