"""Runs of ID-based methods: their settings, their rounds, and what is written at the end.

Shape legend: U users of a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.bounds import OneOrMore, Seed, ShareAbove0, Threads, ZeroOrMore, dataclass
from fedecider.comparison.cells import KeptCell, kept_cell
from fedecider.comparison.compare import Cell, Course, Entry, Shared, TrackRows, course_of
from fedecider.comparison.search import search_of
from fedecider.data.domain import Domain, clients_of
from fedecider.data.protocol import chosen_protocol, under
from fedecider.data.sellers import once_each
from fedecider.data.store import load_domains
from fedecider.engine.finish import finish, per_user_records
from fedecider.engine.page import Parts, ReportConfig, write_run_page
from fedecider.engine.result import RunResult
from fedecider.engine.run import Experiment, Rounds, train
from fedecider.evaluation.metrics import metrics_per_client
from fedecider.evaluation.protocols import AUTO, get_protocol
from fedecider.evaluation.statistics import shared_persons
from fedecider.federation.callbacks import recording
from fedecider.federation.channel import Channel
from fedecider.federation.method import FederatedMethod
from fedecider.federation.processes import Processes
from fedecider.federation.record import (
    Recorder,
    capped_clients,
    non_finite_uploads,
    read_records,
    upload_notes,
)
from fedecider.federation.rounds import Clients, RoundSettings, evaluate_variants
from fedecider.federation.state import RunState
from fedecider.id_based import METHODS
from fedecider.id_based.clients import IdClients, id_clients
from fedecider.report.costs import median_seconds, participations, total_bytes
from fedecider.report.tables import (
    result_rows,
    rows_data,
    shown_domains,
    variant_labels,
)
from fedecider.running.damage import damage_names
from fedecider.running.launch import Launch
from fedecider.running.options import Schema, field_names, from_plain, merged, nested
from fedecider.running.plain import as_plain
from fedecider.running.progress import log_line
from fedecider.running.run_folder import RunFolder, check_output, read_run
from fedecider.search_space import Setting


@dataclass(frozen=True)
class IdRunConfig:
    """Further settings of a federated run without a language model.

    Args:
        method: The federated method.
        domains: The prepared domains or silos that are clients, separated by commas; movies_tv.* stands for all silos
            of movies_tv. If empty, all in data.
        data: The folder of prepared domains.
        output: The output directory; if empty, one is made below runs/.
        seed: The seed from which every random draw of the run is derived.
        num_rounds: The number of rounds of local training and exchange.
        patience: Stops after patience / participation rounds without a better validation ndcg@10; 0 runs all rounds.
        participation: The share of the clients that take part in a round.
        protocol: The evaluation protocol: strict, or strict/keep_seen; auto is strict, with a warning where customers
            buy again.
        num_threads: The number of CPU threads; 0 leaves the choice to torch.
        resume: If true, the stopped run in output goes on.
    """

    method: str = "fedsasrec"
    domains: str = ""
    data: str = ""
    output: str = ""
    seed: Seed = 0
    num_rounds: OneOrMore = 30
    patience: ZeroOrMore = 0
    participation: ShareAbove0 = 1.0
    protocol: str = "auto"
    num_threads: Threads = 0
    resume: bool = False

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"got method {self.method!r}, expected one of {', '.join(METHODS)}")
        if self.protocol != AUTO and (get_protocol(self.protocol).num_sampled or get_protocol(self.protocol).baskets):
            raise ValueError(
                f"got protocol {self.protocol!r}, expected one of whole catalogues and single events, such as strict: "
                f"{self.method} knows no baskets"
            )
        if self.resume and not self.output:
            raise ValueError("got resume without output, expected the folder of the run: --output runs/<name>")

    @property
    def domain_names(self) -> list[str] | None:
        """None for all that are there."""
        return [name.strip() for name in self.domains.split(",") if name.strip()] or None


class IdSettings(NamedTuple):
    """All settings of one run."""

    run: IdRunConfig
    method: Any
    """The method's own frozen dataclass."""

    def as_record(self) -> dict[str, Any]:
        """By block."""
        return {name: as_plain(value) for name, value in self._asdict().items()}


COMMON = ("method", "domains", "data", "output", "num_rounds", "seed", "num_threads", "resume")
"""What ``--help`` shows, with the first options of the method."""
OWN_SHOWN = 10


def schema_of(method: str) -> Schema:
    """The options of a run with this method.

    Raises:
        ValueError: the method is not known, or cannot be used.
    """
    config = METHODS[method].config
    return Schema(
        {"run": IdRunConfig, "method": config},
        (*COMMON, *field_names(config)[:OWN_SHOWN]),
        texts={"method": f"The federated method: {', '.join(METHODS)}."},
    )


def make_settings(options: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> IdSettings:
    """Settings of one run from options and from the content of a file, over which they win.

    Raises:
        ValueError: an option of another track, or a setting that cannot be.
    """
    values = merged(config or {}, nested(options))
    settings = IdSettings(**schema_of(str(values.get("method", IdRunConfig.method))).build(values))
    if settings.run.output:
        check_output(Path(settings.run.output))
    return settings


def recorded_settings(run: Path, data: str = "") -> IdSettings:
    """The settings in ``run.json`` of an output directory; ``data`` replaces the place of the prepared domains."""
    path, config = RunFolder(run).record, read_run(run)["config"]
    with damage_names(path):
        own = {**config["run"], "resume": False, **({"data": data} if data else {})}
        settings = from_plain(IdRunConfig, own, f"run in {path}")
        return IdSettings(settings, from_plain(METHODS[settings.method].config, config["method"], f"method in {path}"))


def page(config: ReportConfig) -> Path:
    """The page of a finished run, made again."""
    return run_page(Path(config.run), RunResult.read(config.run))


def run_page(root: Path, result: RunResult) -> Path:
    """Write ``report.html`` into the output directory ``root``; errors as `fedecider.engine.page.write_run_page`."""
    return write_run_page(root, result, lambda result: Parts())


Positions = dict[str, dict[str, Tensor]]
"""Label of a variant -> client -> (U,) positions."""


class Trained(NamedTuple):
    """What came of the rounds."""

    method: FederatedMethod
    clients: IdClients
    state: RunState

    def positions(self, split: str) -> Positions:
        """Of every variant in the best round, the reported one first."""
        method, state = self.method, self.state
        found = evaluate_variants(method, state.best, method.variants, split, self.clients.blocks())
        names = [client.name for client in self.clients]
        labels = variant_labels(method.name, method.variants)
        return {label: dict(zip(names, found[variant], strict=True)) for variant, label in labels.items()}


def load(settings: IdSettings, launch: Launch) -> Experiment:
    """The data of a run, and everything checked that can be before the method is built.

    Raises:
        ValueError: a setting or the data cannot be, or several processes were started.
    """
    settings, domains = _decided(settings, launch)
    return experiment_on(domains, settings)


def _decided(settings: IdSettings, launch: Launch) -> tuple[IdSettings, dict[str, Domain]]:
    """Settings with the protocol of these data, and the data."""
    run = settings.run
    if launch.processes.count > 1:
        raise ValueError(f"got {launch.processes.count} processes for {run.method}, expected one: its models are small")
    if not run.data:
        raise ValueError(f"got {run.method} without data, expected a folder of prepared domains: --data data/NAME")
    domains = load_domains(run.data, run.domain_names)
    protocol, why = chosen_protocol(run.protocol, domains, f"{run.method} knows no baskets")
    for line in why:
        log_line(line)
    return settings._replace(run=replace(run, protocol=protocol)), under(protocol, domains)[0]


def experiment_on(domains: Mapping[str, Domain], settings: IdSettings) -> Experiment:
    """A run on these data."""
    run = settings.run
    METHODS[run.method].check(run.num_rounds, run.patience, run.participation, settings.method)
    empty = [name for name in domains if name not in clients_of(domains)]
    if empty:
        raise ValueError(f"got domains {empty} without client users, expected some: leave them out of --domains")
    hashes = {name: domain.content_hash() for name, domain in domains.items()}

    def prepare(launch: Launch, resumed: RunFolder | None) -> Rounds:
        clients, rounds = rounds_of(settings, domains, launch.device)
        method = rounds.method

        def finish(state: RunState, folder: RunFolder) -> None:
            _write(settings, Trained(method, clients, state), domains, folder)

        return rounds._replace(finish=finish)

    return Experiment(settings, hashes, list(once_each(domains)), prepare)


def rounds_of(settings: IdSettings, domains: Mapping[str, Domain], device: torch.device) -> tuple[IdClients, Rounds]:
    """The clients, and the rounds over them with nothing written after them."""
    run = settings.run
    clients = id_clients(domains, run.seed, get_protocol(run.protocol), device)
    method = METHODS[run.method].build(clients, settings.method)
    rounds = Rounds(
        method,
        Clients(clients.blocks(), metrics_per_client, [client.name for client in clients]),
        RoundSettings(run.num_rounds, run.seed, run.participation, patience=run.patience),
        Channel(),
        Processes(),
    )
    return clients, rounds


def train_rounds(
    settings: IdSettings, domains: Mapping[str, Domain], device: torch.device, recorder: Recorder | None = None
) -> Trained:
    """All rounds in this process, with nothing written but the records."""
    clients, rounds = rounds_of(settings, domains, device)
    return Trained(rounds.method, clients, train(rounds, [recording(recorder)] if recorder else []))


def table_row(name: str, shared: Shared) -> Entry:
    """A method as a row beside others over prepared domains, its runs kept in the cache."""
    entry = METHODS[name]
    run = IdRunConfig(method=name, protocol=shared.protocol, patience=entry.patience)

    def cell(setting: Setting, seed: int) -> Cell:
        kept = _kept(IdSettings(replace(run, seed=seed), replace(entry.config(), **setting)), shared)

        def course() -> Course:
            return course_of(read_records(kept.folder / "rounds.jsonl"), kept.info["best_round"])

        return Cell(
            {name: kept.info["valid"]}, lambda: {shared.protocol: {name: kept.positions()}}, course, kept.folder
        )

    search = search_of([entry.config()], entry.space, entry.grid)
    return Entry(name, name, "baseline", [shared.protocol], cell, search, shared.tune)


def _kept(settings: IdSettings, shared: Shared) -> KeptCell:
    def trained(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        records = Recorder(folder / "rounds.jsonl")
        done = train_rounds(settings, shared.domains, torch.device(shared.device), recorder=records)
        reported = next(iter(done.positions("test").values()))
        return {"valid": done.state.best_score, "best_round": done.state.best_round}, reported

    inputs = {
        "run": as_plain(settings.run),
        "method": as_plain(settings.method),
        "data": [(name, domain.content_hash()) for name, domain in shared.domains.items()],
        "device": shared.device,
    }
    method = settings.run.method
    return kept_cell(shared.cache, method, inputs, trained, f"{method}, seed {settings.run.seed}")


TABLE = TrackRows(guest=table_row)
"""The track's part in tables."""


def _write(settings: IdSettings, trained: Trained, domains: Mapping[str, Domain], folder: RunFolder) -> None:
    """Read the test set once, and write every file but the record."""
    records, state = read_records(folder.rounds), trained.state
    result = evaluate(trained, domains, read_run(folder.root), records)
    time, size = result.metrics["round_seconds"], result.metrics["bytes"]
    each = {way: size[way] // participations(records) for way in size}
    notes = [
        f"round {state.best_round} of {state.round} has the best validation ndcg@10 ({state.best_score:.4f}) of "
        f"{trained.method.variants[0]}",
        f"{time['wall_s']:.2f} s a round (median); per client and round {each['up']:,} bytes up, {each['down']:,} down",
        *upload_notes(records, [client.name for client in trained.clients]),
    ]
    finish(result, folder, f"Test of {settings.run.method}, round {state.best_round}", notes, run_page)


def evaluate(
    trained: Trained,
    domains: Mapping[str, Domain],
    record: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> RunResult:
    """What came of the run."""
    state, run = trained.state, record["config"]["run"]
    users = {name: domain.clients.users for name, domain in domains.items()}
    positions = {split: trained.positions(split) for split in ("test", "valid")}
    rows = {split: result_rows(positions[split], persons=shared_persons(users)) for split in positions}
    metrics = {
        "protocol": run["protocol"],
        "method": run["method"],
        "reported": rows["test"][0].label,
        "best_round": state.best_round,
        "last_round": state.round,
        "best_valid_ndcg@10": state.best_score,
        **{split: {name: rows_data(rows[split], name) for name in shown_domains(rows[split])} for split in rows},
        "round_seconds": median_seconds(records),
        "bytes": total_bytes(records),
        "non_finite_uploads": non_finite_uploads(records),
        "capped_clients": capped_clients(records),
    }
    per_user = list(per_user_records(positions["test"], users, lambda entry: state.best_round))
    return RunResult(record, metrics, records, records, lambda: per_user)
