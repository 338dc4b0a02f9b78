"""The federated run: shared foundation, rounds, selection on validation, one reading of the test set, hand-over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fedecider.data.domain import Domain, by_catalogue, clients_of
from fedecider.evaluation.metrics import metrics_per_client
from fedecider.experiment.alternatives import check_limits, check_uploads, keep, settle
from fedecider.experiment.prepare import Foundation, Settings, build_foundation, load_data, make_recommender
from fedecider.experiment.results import check_privacy, check_shared_noise, privacy_data, write_results
from fedecider.experiment.settings import RunConfig
from fedecider.federation.aggregate import with_robust_mean
from fedecider.federation.faults import Fault, read_faults, scenario
from fedecider.federation.method import Block, FederatedMethod
from fedecider.federation.parties import cohort_size
from fedecider.federation.privacy import protector
from fedecider.federation.record import Recorder
from fedecider.federation.rounds import ONE_BY_ONE, Gathering, OnClients, RoundSettings, run_rounds
from fedecider.federation.secure_rounds import SecureSums, bare_rows, securely_summed_rounds
from fedecider.federation.state import RunState
from fedecider.methods import METHODS
from fedecider.methods.recommender import ClientModels
from fedecider.models.item_texts import TEXT_ENCODER, encoder_digest
from fedecider.running.launch import Launch, checked_run, opened_together, round_recorder, round_teller, track_results
from fedecider.running.options import load_yaml
from fedecider.running.progress import round_progress
from fedecider.running.run_folder import RunFolder, content_key, fingerprint


def carries_update(name: str) -> bool:
    """Whether a tensor of adapters has the sign and size of their update: of the two factors the second one."""
    return name.endswith("lora_b")


class Prepared(NamedTuple):
    """What the rounds of one run are made of."""

    method: FederatedMethod
    blocks: Sequence[Block]
    recommender: ClientModels
    gathering: Gathering


def check_federation(settings: Settings, domains: Mapping[str, Domain]) -> tuple[dict[str, str], list[Fault]]:
    """Hashes of the data, and the faults that are played; what cannot be run is told before any work.

    Raises:
        ValueError: a setting that does not suit the data or another setting.
        ImportError: an epsilon that needs the package dp-accounting.
    """
    config, clients = settings.run, clients_of(domains)
    check_limits(settings, clients)
    check_privacy(settings)
    privacy_data(settings, len(clients))  # what cannot be accounted for is told before any work
    check_uploads(settings, len(clients))
    hashes = {name: domain.content_hash() for name, domain in domains.items()}
    faults = read_faults(load_yaml(Path(config.faults)), list(clients), config.faults) if config.faults else []
    return {**hashes, **beside_data(config)}, faults


def beside_data(config: RunConfig) -> dict[str, str]:
    """What decides a run beside its settings and data: what reads the item texts here, and what a scenario says."""
    found = {TEXT_ENCODER: encoder_digest(config.pretrain.text_encoder)}
    return {**found, "faults": content_key(load_yaml(Path(config.faults)))} if config.faults else found


def prepare_rounds(settings: Settings, foundation: Foundation, launch: Launch) -> Prepared:
    """The student with fresh adapters, and the method around it."""
    config = settings.run
    recommender = make_recommender(settings, foundation, launch.device, launch.deepspeed, processes=launch.processes)
    method = with_robust_mean(METHODS[config.method].build(recommender, settings.method), config.robust_mean)
    check_shared_noise(config.privacy, method, recommender)
    size = recommender.num_clients if METHODS[config.method].pooled else 1
    blocks = [Block(clients, None) for clients in torch.arange(recommender.num_clients).split(size)]
    return Prepared(method, blocks, recommender, _gathering(settings, method, recommender, launch))


def run_federation(
    settings: Settings,
    prepared: Prepared,
    launch: Launch,
    *,
    recorder: Recorder,
    checkpoints: Path,
    key: str,
    resume: bool,
    faults: Sequence[Fault],
    on_round: Callable[[dict], None],
    on_clients: OnClients,
) -> RunState:
    """All rounds; each one is scored on the validation items, and the test items are not looked at.

    ``key`` is the fingerprint that checkpoints carry.
    """
    config = settings.run
    goes_wrong = scenario(faults, config.seed, carries_update)
    return run_rounds(
        prepared.method,
        prepared.blocks,
        RoundSettings(config.num_rounds, config.seed, config.participation, fingerprint=key, patience=config.patience),
        metrics_per_client,
        recorder=recorder,
        checkpoints=checkpoints,
        resume=resume,
        protect=protector(prepared.method, config.privacy, config.seed),
        attend=goes_wrong.attend,
        deliver=goes_wrong.deliver,
        gathering=prepared.gathering,
        processes=launch.processes,
        on_round=on_round,
        on_clients=on_clients,
    )


def shared_out(settings: Settings, launch: Launch, clients: Collection[str]) -> Launch:
    """The processes share out the clients of a round, or their data where there are more processes than that.

    Users who are drawn and bounded one by one, and DeepSpeed, want a client in one process.
    """
    alone = settings.training.user_privacy.on or launch.deepspeed is not None
    idle = launch.processes.count > cohort_size(len(clients), settings.run.participation)
    return launch.placed("data" if idle and not alone else "clients")


def federate(settings: Settings, launch: Launch) -> Path:
    """Run everything and return the run folder; see ``docs/run_folder.md`` for what it holds."""
    settings = launch.from_main(settings)  # processes that measured for themselves may have settled on other precisions
    config = settings.run
    domains = load_data(config)
    hashes, faults = check_federation(settings, domains)
    root, record = checked_run(settings.as_record(), hashes, list(by_catalogue(clients_of(domains))))
    launch.accelerator.wait_for_everyone()  # else a slow process would find the folder that the first one opens
    foundation = build_foundation(config, launch)
    settled = settle(settings, foundation, launch, RunFolder(root) if config.resume else None)
    settings, launch = settled.settings, shared_out(settled.settings, launch, foundation.domains)
    prepared = prepare_rounds(settings, foundation, launch)
    with opened_together(root, record, launch) as folder:
        if launch.is_main:
            keep(settled, folder)
        with round_progress(config.num_rounds, launch.is_main) as on_clients:
            state = run_federation(
                settings,
                prepared,
                launch,
                recorder=round_recorder(folder, launch, config.tracker, record, prepared.recommender.names),
                checkpoints=folder.checkpoints,
                key=fingerprint(record),
                resume=config.resume,
                faults=faults,
                on_round=round_teller(launch, config.num_rounds),
                on_clients=on_clients,
            )
        write_results(
            settings, prepared.method, prepared.blocks, prepared.recommender, foundation, state, folder, launch
        )
        track_results(folder, launch, state.round)
    return root


def _gathering(settings: Settings, method: FederatedMethod, recommender: ClientModels, launch: Launch) -> Gathering:
    """How uploads reach the server: one by one, or as secure sums; of what a sum does not hide it warns."""
    config = settings.run
    if not config.secure_sum:
        return ONE_BY_ONE
    sums = SecureSums(config.seed, own_rows=recommender.own_rows)
    gathering = securely_summed_rounds(method, sums)
    if launch.is_main:
        for sentence in bare_rows(recommender.own_rows):
            print(f"warning: {sentence}", file=sys.stderr)
    return gathering
