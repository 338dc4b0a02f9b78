"""The whole table of the embedding track: every method and baseline, every protocol, equal tuning, several seeds.

Each run is a cell that is kept by its content, so a table that was stopped goes on where it was, and several processes
may fill it together. Cells with training negatives from outside the train items serve ``strict`` and
``strict/sampled99`` alike, where both are asked for together; their round and their settings are chosen by the
validation ndcg@10 in the whole catalogue.

Shape legend: S seeds, U users.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embedding_fr.blocks import build_population
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS
from embedding_fr.setup import EmbeddingRunConfig, EmbeddingSettings, set_up, train, user_positions
from fedecider.baselines import BASELINES
from fedecider.baselines.fitting import validation_ndcg
from fedecider.bounds import NotNegative, OneOrMore, Threads, ZeroOrMore, check
from fedecider.data.interactions import Interactions
from fedecider.data.rating_sets import InteractionsConfig
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol, rank_held_out
from fedecider.federation.privacy import PrivacyConfig
from fedecider.federation.record import read_json, write_json
from fedecider.report.costs import median_seconds, participations, total_bytes
from fedecider.report.rows import CANARY
from fedecider.running.cli import from_plain
from fedecider.running.progress import say
from fedecider.running.stages import as_plain, cached_stage
from fedecider.tuning.search import Search, best_of, check_budget, search_of, tune

LOCAL = "/local"
"""``fedmf/local`` is FedMF with federation off."""
CODE = "/code"
"""``pfedrec/code`` is PFedRec as its authors' public code does it, which is not tuned."""
Kind = Literal["federated", "local", "central"]


@dataclass(frozen=True)
class LeaderboardConfig:
    """The table: what it holds.

    Args:
        methods: The names of methods and baselines, separated by commas, or all. NAME/local is a method with federation
            off, NAME/code does what the authors' public code does.
        protocol: The names of evaluation protocols, separated by commas. Those with the same training negatives share
            their runs; a later table finds them again only if it asks for the same ones of those.
        seeds: The number of runs of every row, with the seeds 0, 1, ...
        tune: The number of settings of each method that are tried on validation with seed 0: those of its grid, then
            drawn ones (docs/tune.md); 1 takes the first one, which for a federated method is the paper's. Under the
            protocol paper nothing is tuned.
        num_rounds: The largest number of rounds of a federated method.
        patience: A federated run stops after so many rounds without a better validation score; 0 runs all rounds. Under
            the protocol paper, which reports the last round, all rounds are run.
        output: The folder of the table and of the runs it is made of; if empty, one below runs/.
        num_threads: The number of CPU threads; 0 leaves the choice to torch.
        memory_gb: The memory for the work of one block of clients, as in a single run; 0 takes what suits the machine.
        only_cells: If true, runs are made but no table is written, for several processes that share a folder.
    """

    methods: str = "all"
    protocol: str = "strict,strict/sampled99"
    seeds: OneOrMore = 3
    tune: OneOrMore = 3
    num_rounds: OneOrMore = 100
    patience: ZeroOrMore = 15
    output: str = ""
    num_threads: Threads = 0
    memory_gb: NotNegative = 0.0
    only_cells: bool = False

    def __post_init__(self) -> None:
        check(self)
        unknown = [name for name in self.method_names if kind_of(name) is None]
        if unknown or not self.method_names:
            raise ValueError(
                f"got methods {unknown or self.methods!r}, expected all or some of {', '.join(all_methods())}, or "
                "NAME/local of a federated one"
            )
        for name in self.protocol_names:
            get_protocol(name)
        if not self.protocol_names:
            raise ValueError("got no protocol, expected one or more, such as strict,strict/sampled99")

    @property
    def method_names(self) -> list[str]:
        given = [name.strip() for name in self.methods.split(",") if name.strip()]
        return all_methods() if self.methods == "all" else list(dict.fromkeys(given))

    @property
    def protocol_names(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in self.protocol.split(",") if name.strip()))


class Cell(NamedTuple):
    """One run: what it scored on validation, and where its test positions lie."""

    folder: Path
    info: dict[str, Any]
    """``valid`` ndcg@10 of the reported model, and for federated runs best round, curve, seconds, bytes."""

    def positions(self, protocol: str) -> Tensor:
        """(U,) test positions of the reported model."""
        return load_file(self.folder / "positions.safetensors")[protocol]


class BoardRow(NamedTuple):
    """One row of the table."""

    method: str
    kind: Kind
    protocol: str
    setting: dict[str, Any]
    cells: list[Cell]

    def positions(self) -> Tensor:
        """(S, U) test positions."""
        return torch.stack([cell.positions(self.protocol) for cell in self.cells])


def all_methods() -> list[str]:
    """What ``all`` stands for: centralised baselines, federated methods (not the plug-ins), two with federation off."""
    plain = [name for name in METHODS if not METHODS.problem(name) and not METHODS[name].plug_in]
    return [*BASELINES, *plain, f"fedmf{LOCAL}", f"pfedrec{LOCAL}"]


def kind_of(name: str) -> Kind | None:
    """Which kind of row a name stands for; None when it is not known."""
    if name.endswith(LOCAL):
        entry = METHODS.get(name.removesuffix(LOCAL))
        return "local" if entry and not entry.needs_server(entry.config()) else None
    if name.endswith(CODE):
        entry = METHODS.get(name.removesuffix(CODE))
        return "federated" if entry and entry.code else None
    return "central" if name in BASELINES else "federated" if name in METHODS else None


def fill(
    config: LeaderboardConfig, data: InteractionsConfig, interactions: Interactions, root: Path
) -> Iterator[BoardRow]:
    """Run what is missing and yield the rows, method by method.

    Raises:
        ValueError: the data do not allow a protocol, told before anything is trained; or no row could be made.
    """
    for name in config.protocol_names:
        build_population(interactions.sequences, interactions.num_items, get_protocol(name), seed=0)
    groups = protocol_groups(config.protocol_names)
    tuned_under = [group for group in groups if not get_protocol(group[0]).leaks]  # as _tuned has it
    for method in config.method_names:
        for group in tuned_under:
            check_budget(_search(config, data, method, group), config.tune)
    empty = True
    for method in config.method_names:
        for group in groups:
            try:
                setting = _tuned(config, data, interactions, root, method, group)
                cells = [
                    _cell(config, data, interactions, root, method, group, setting, seed)
                    for seed in range(config.seeds)
                ]
            except ValueError as error:  # such as a run that diverged: the other rows are worth having
                say(f"{method} is left out of {'+'.join(group)}: {error}")
                continue
            empty = False
            for protocol in group:
                yield BoardRow(method, kind_of(method) or "central", protocol, setting, cells)
    if empty:
        raise ValueError(
            f"got no row from {', '.join(config.method_names)}, expected one at least: see the messages above"
        )


def protocol_groups(names: Sequence[str]) -> list[list[str]]:
    """Protocols that share their training, and with it their runs: those whose negatives come from the same pool."""
    groups: dict[tuple, list[str]] = {}
    for name in names:
        protocol = get_protocol(name)
        groups.setdefault((protocol.negatives_avoid, protocol.selection), []).append(name)
    return list(groups.values())


def _tuned(
    config: LeaderboardConfig,
    data: InteractionsConfig,
    interactions: Interactions,
    root: Path,
    method: str,
    group: Sequence[str],
) -> dict[str, Any]:
    """The setting with the best validation ndcg@10 at seed 0 among ``tune`` trials of the method's search."""
    leaks = get_protocol(group[0]).leaks
    if leaks and kind_of(method) != "central":
        return {}
    search = _search(config, data, method, group)
    if leaks:
        return search.firsts[0]

    def score(setting: dict[str, Any]) -> float:
        return _cell(config, data, interactions, root, method, group, setting, 0).info["valid"]

    tried = tune(search, config.tune, score, method)
    best = best_of(tried)
    if best is None:
        raise ValueError(f"no setting of {method} could be trained on {interactions.name}: see the messages above")
    return tried[best].setting


def _search(config: LeaderboardConfig, data: InteractionsConfig, method: str, group: Sequence[str]) -> Search:
    if method == CANARY:  # nothing to tune: it sees as many rounds as the methods
        return Search({}, {}, ({"num_rounds": config.num_rounds},), 0)
    if method.endswith(CODE):
        return Search({}, {}, ({},), 0)
    if method in BASELINES:
        baseline = BASELINES[method]
        return search_of([baseline.config()], baseline.space, baseline.grid, 0)
    entry = METHODS[method.removesuffix(LOCAL)]
    whole = run_settings(config, data, method, group[0], {}, 0, _patience(config, group))
    return search_of(whole, entry.space, entry.grid, 0)


def _cell(
    config: LeaderboardConfig,
    data: InteractionsConfig,
    interactions: Interactions,
    root: Path,
    method: str,
    group: Sequence[str],
    setting: dict[str, Any],
    seed: int,
) -> Cell:
    """The run from the folder of cells, made when it is not there.

    It holds the test positions too, so that the trial that wins need not be run again; those of other trials are never
    read.
    """
    inputs = {
        "method": method,
        "seed": seed,
        "data": interactions.content_hash(),
        "negatives_avoid": get_protocol(group[0]).negatives_avoid,
        **_resolved(config, data, method, group, setting, seed),
    }
    protocols = sorted(group)

    def build(folder: Path) -> None:
        started = time.perf_counter()
        if method not in BASELINES:
            info, positions = _federated(config, data, interactions, method, protocols, setting, seed)
        else:
            info, positions = _central(interactions, method, protocols, setting, seed)
        save_file(positions, folder / "positions.safetensors")
        write_json(folder / "info.json", {**info, "total_s": time.perf_counter() - started})

    stage = cached_stage(root / "cells", method.replace("/", "-"), {**inputs, "protocols": protocols}, build)
    cell = Cell(stage.folder, read_json(stage.folder / "info.json"))
    if not stage.reused:
        text = f"{method} {setting or 'first setting'}, {'+'.join(group)}, seed {seed}: validation ndcg@10"
        say(f"{text} {cell.info['valid']:.4f}, {cell.info['total_s']:.0f} s")
    return cell


def _resolved(
    config: LeaderboardConfig,
    data: InteractionsConfig,
    method: str,
    group: Sequence[str],
    setting: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    """Every setting that decides a result, defaults included: a cell made with other defaults is another cell."""
    if method in BASELINES:
        return {"setting": as_plain(from_plain(BASELINES[method].config, dict(setting)))}
    whole = run_settings(config, data, method, group[0], setting, seed, _patience(config, group))
    run = {name: getattr(whole.run, name) for name in ("num_rounds", "patience", "participation", "federation")}
    setting = {**run, **as_plain(whole.training), "method": as_plain(whole.method)}
    return {"setting": setting, **METHODS.as_record(whole.run.method)}


def _patience(config: LeaderboardConfig, group: Sequence[str]) -> int:
    return 0 if get_protocol(group[0]).selection == "last" else config.patience


def run_settings(
    config: LeaderboardConfig,
    data: InteractionsConfig,
    method: str,
    protocol: str,
    setting: Mapping[str, Any],
    seed: int,
    patience: int,
) -> EmbeddingSettings:
    """The settings of one federated run: the paper's, overruled by ``setting``."""
    name = method.removesuffix(LOCAL).removesuffix(CODE)
    entry = METHODS[name]
    values = {**entry.defaults, **((entry.code or {}) if method.endswith(CODE) else {}), **setting}
    run = {key: values.pop(key) for key in list(values) if key in EmbeddingRunConfig.__dataclass_fields__}
    training = {key: values.pop(key) for key in list(values) if key in EmbeddingTraining.__dataclass_fields__}
    run |= {"method": name, "protocol": protocol, "seed": seed, "federation": not method.endswith(LOCAL)}
    run |= {"num_rounds": run.get("num_rounds", config.num_rounds), "patience": patience}
    return EmbeddingSettings(
        EmbeddingRunConfig(**run, memory_gb=config.memory_gb),
        data,
        EmbeddingTraining(**training),
        PrivacyConfig(),
        from_plain(entry.config, values),
    )


def _federated(
    config: LeaderboardConfig,
    data: InteractionsConfig,
    interactions: Interactions,
    method: str,
    protocols: Sequence[str],
    setting: Mapping[str, Any],
    seed: int,
) -> tuple[dict[str, Any], dict[str, Tensor]]:

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patience = _patience(config, protocols)
    settings = run_settings(config, data, method, _validated_under(protocols), setting, seed, patience)
    setup = set_up(settings, interactions, device)
    records: list[dict] = []
    state = train(settings, setup, on_round=records.append)
    view = setup.method.views[0]
    last = get_protocol(protocols[0]).selection == "last"
    info = {
        "valid": records[-1]["score"] if last else state.best_score,  # of the reported round
        "best_round": state.best_round,
        "last_round": state.round,
        "curve": [[record["round"], record["score"]] for record in records],
        "seconds": median_seconds(records),
        "bytes": total_bytes(records),
        "participations": participations(records),
    }
    positions: dict[str, Tensor] = {}
    for protocol in protocols:
        counted = set_up(settings, interactions, device, protocol)
        positions[protocol] = user_positions(counted, state, view, "test", last=last)
        if last:
            best = user_positions(counted, state, view, "test")
            info["best_round_test"] = mean_metrics(best, (10,))
    return info, positions


def _central(
    interactions: Interactions,
    method: str,
    protocols: Sequence[str],
    setting: Mapping[str, Any],
    seed: int,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A centralised baseline; each protocol ranks the same scores. Trained ones choose their epoch by validation."""
    sequences, num_items = interactions.sequences, interactions.num_items
    entry = BASELINES[method]
    score = entry.fit(
        sequences,
        num_items,
        get_protocol(protocols[0]),
        from_plain(entry.config, dict(setting)),
        seed=seed,
        device="cuda" if torch.cuda.is_available() else "cpu",
        valid=validation_ndcg(sequences, num_items),
    )

    def ranked(name: str, split: str) -> Tensor:
        protocol = get_protocol(name)
        candidates = build_population(sequences, num_items, protocol, seed).candidates or None
        return rank_held_out(score, sequences, num_items, split, protocol, candidates=candidates)

    valid = mean_metrics(ranked(_validated_under(protocols), "valid"), (10,))["ndcg@10"]
    return {"valid": valid}, {name: ranked(name, "test") for name in protocols}


def _validated_under(protocols: Sequence[str]) -> str:
    """The protocol of the validation figure of a group: the whole catalogue, or the one that leaks."""
    return protocols[0] if get_protocol(protocols[0]).leaks else "strict"


def settings_text(row: BoardRow) -> str:
    """The chosen setting in words."""
    setting = ", ".join(f"{name} {value}" for name, value in as_plain(row.setting).items())
    if row.method.endswith(CODE):
        return "public code's"
    entry = METHODS.get(row.method.removesuffix(LOCAL))
    return setting or ("paper's" if entry and entry.published else "default")
