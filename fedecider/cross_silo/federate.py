"""A run of the cross-silo track for the engine: shared base artifacts, rounds over domains, results and export."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedecider.baselines.own import check_own
from fedecider.cross_silo.command_line import recorded_settings
from fedecider.cross_silo.continued import continued, going_on
from fedecider.cross_silo.ended import ended
from fedecider.cross_silo.ensembles import reserved_labels
from fedecider.cross_silo.feasibility import check_limits, check_uploads
from fedecider.cross_silo.hyperparameter_selection import keep, select
from fedecider.cross_silo.joining import ALONE, as_trained, check_matched, overlap_data, trains_alone
from fedecider.cross_silo.prepare import BaseArtifacts, build_base_artifacts, decided, make_recommender
from fedecider.cross_silo.privacy import check_privacy, check_shared_noise, privacy_data
from fedecider.cross_silo.results import write_results
from fedecider.cross_silo.settings import RunConfig, Settings
from fedecider.data.domain import Domain, clients_of
from fedecider.data.sellers import by_catalogue
from fedecider.engine.run import Experiment, Rounds, kept_data
from fedecider.evaluation.metrics import metrics_per_client
from fedecider.federation.aggregate import with_robust_mean
from fedecider.federation.channel import ONE_BY_ONE, AggregationBackend, Channel
from fedecider.federation.cohort import cohort_size
from fedecider.federation.method import Block, FederatedMethod
from fedecider.federation.privacy import protector
from fedecider.federation.rounds import Clients, RoundSettings
from fedecider.federation.secure_rounds import securely_summed_rounds
from fedecider.federation.state import RunState
from fedecider.methods import METHODS
from fedecider.methods.beside import beside
from fedecider.methods.client_models import ClientModels
from fedecider.methods.rows import Rows, secure_sums
from fedecider.models.item_texts import TEXT_ENCODER, encoder_digest
from fedecider.running.launch import Launch
from fedecider.running.plain import as_plain, content_key
from fedecider.running.progress import log_line, stage
from fedecider.running.run_folder import PLACES, RunFolder


def load(settings: Settings, launch: Launch) -> Experiment:
    """The data of a run, and everything checked that can be before the stages are built."""
    run, domains, why = decided(settings.run)
    settings = settings._replace(run=run)
    if why and launch.is_main:
        log_line("; ".join(why))
    if not settings.run.start_from:
        return experiment_on(domains, build_base_artifacts, settings, why=why)
    with launch.accelerator.main_process_first():
        domains, artifacts, state = continued(settings, domains)
        data = kept_data(domains, Path(settings.run.cache))
    settings = settings._replace(run=replace(settings.run, data=str(data)))
    experiment = experiment_on(domains, artifacts, settings, state, why)
    key = content_key({"state": state.records, "round": state.best_round})
    return experiment._replace(hashes={**experiment.hashes, "start": key})


def experiment_on(
    domains: Mapping[str, Domain],
    artifacts: Callable[[RunConfig, Launch], BaseArtifacts],
    settings: Settings,
    state: RunState | None = None,
    why: Sequence[str] = (),
) -> Experiment:
    """A run on these data; ``artifacts`` gives the stages that it shares with others, ``state`` a start, ``why`` its
    protocol was taken."""
    hashes = check_federation(settings, domains)
    check_matched(settings, clients_of(domains))
    check_own(clients_of(domains), reserved_labels(settings.run.method))
    names, overlap = list(by_catalogue(clients_of(domains))), overlap_data(settings, domains)
    prepare = partial(_prepare, settings, artifacts, overlap, state)
    return Experiment(settings, hashes, names, prepare, {"overlap": overlap, "why_protocol": list(why)})


def file_settings(settings: Settings) -> dict[str, Any]:
    """What a file of ``--config`` says for a run with these settings; the method's own stand in its block."""
    own = {settings.run.method: values} if (values := as_plain(settings.method)) else {}
    run = as_plain(settings.run)
    for stage_training in (run["pretrain"]["train"], run["distill"]):
        del stage_training["precision"]  # that of all
    return {**run, **as_plain(settings.training), **as_plain(settings.ranking), **own}


def settings_of(run: str) -> dict[str, Any]:
    """The settings of a finished run as a file of ``--config`` says them, but for where things lie."""
    content = file_settings(recorded_settings(Path(run)))
    return {name: value for name, value in content.items() if name not in (*PLACES, "start_from")}


def _prepare(
    given: Settings,
    build: Callable[[RunConfig, Launch], BaseArtifacts],
    overlap: Mapping[str, Any],
    state: RunState | None,
    launch: Launch,
    resumed: RunFolder | None,
) -> Rounds:
    for sentence in overlap["sentences"] if launch.is_main else []:
        log_line(sentence)
    artifacts = build(given.run, launch)
    with stage("selection"):
        selected = select(given, artifacts, launch, resumed)
    settings = as_trained(selected.settings, overlap["nothing"])
    if settings.run.method != given.run.method and launch.is_main:
        log_line(ALONE)
    launch = shared_out(settings, launch, artifacts.domains)
    models, rounds = prepare_rounds(settings, artifacts, launch, state)

    def finish(state: RunState, folder: RunFolder) -> None:
        write_results(ended(settings, models, rounds, artifacts, state), folder, launch)

    return rounds._replace(finish=finish, opened=partial(keep, selected))


def check_federation(settings: Settings, domains: Mapping[str, Domain]) -> dict[str, str]:
    """Hashes of what decides a run beside its settings; what cannot be run is told before any work.

    Raises:
        ValueError: a setting that does not suit the data or another setting.
        ImportError: an epsilon that needs the package dp-accounting.
    """
    config, clients = settings.run, clients_of(domains)
    check_limits(settings, clients)
    check_privacy(settings)
    if config.seeds > 1 and (config.privacy.noise_scale or settings.training.user_privacy.on):
        raise ValueError(
            f"got seeds {config.seeds} with noise that hides what is sent, expected 1: every training run spends the "
            "epsilon again"
        )
    privacy_data(settings, len(clients))  # what cannot be accounted for is told before any work
    check_uploads(settings, len(clients))
    hashes = {name: domain.content_hash() for name, domain in domains.items()}
    return {**hashes, **beside_data(config)}


def beside_data(config: RunConfig) -> dict[str, str]:
    """Hash of the text encoder as installed here, which decides a run too. A resumed run must find it unchanged."""
    return {TEXT_ENCODER: encoder_digest(config.pretrain.text_encoder)}


def prepare_rounds(
    settings: Settings, artifacts: BaseArtifacts, launch: Launch, state: RunState | None = None
) -> tuple[ClientModels, Rounds]:
    """The student with fresh adapters, and the rounds around it, with nothing written after them; they go on from
    ``state``."""
    config = settings.run
    models = make_recommender(settings, artifacts, launch.device, launch)
    method = with_robust_mean(METHODS[config.method].build(models, settings.method), config.robust_mean)
    check_shared_noise(config.privacy, method, models.rows)
    aggregation = _aggregation(settings, method, models.rows)
    if trains_alone(settings, models.num_clients):
        method = beside(method, models)
    if state is not None:
        method = going_on(method, state)
    size = models.num_clients if METHODS[config.method].pooled else 1
    blocks = [Block(clients, None) for clients in torch.arange(models.num_clients).split(size)]
    return models, Rounds(
        method,
        Clients(blocks, metrics_per_client, models.names),
        RoundSettings(config.num_rounds, config.seed, config.participation, patience=config.patience),
        Channel(protect=protector(method, config.privacy, config.seed), aggregation=aggregation),
        launch.processes,
    )


def shared_out(settings: Settings, launch: Launch, clients: Collection[str]) -> Launch:
    """The processes share out the clients of a round, or their data where there are more processes than that.

    Users who are drawn and bounded one by one, and DeepSpeed, want a client in one process.
    """
    alone = settings.training.user_privacy.on or launch.deepspeed is not None
    idle = launch.processes.count > cohort_size(len(clients), settings.run.participation)
    return launch.placed("data" if idle and not alone else "clients")


def _aggregation(settings: Settings, method: FederatedMethod, rows: Rows) -> AggregationBackend:
    """How uploads reach the server: one by one, or as secure sums."""
    config = settings.run
    if not config.secure_sum:
        return ONE_BY_ONE
    return securely_summed_rounds(method, secure_sums(rows, method.takes_mean, config.participation, config.seed))
