"""The leaderboard: every method and baseline of the cross-device track on one data set, under every protocol.

Cells with training negatives from outside the train items serve ``strict`` and ``strict/sampled99`` alike, where both
are asked for together; their round and their settings are chosen by the validation ndcg@10 in the whole catalogue.

Shape legend: U users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from embedding_fr.attributes import attribute_digest, has_attributes
from embedding_fr.blocks import build_population
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS
from embedding_fr.methods.entry import space_of
from embedding_fr.setup import EmbeddingRunConfig, EmbeddingSettings, set_up, train, user_positions
from fedecider.baselines import BASELINES
from fedecider.baselines.fitting import Pooled, validation_ndcg
from fedecider.bounds import NotNegative, OneOrMore, Threads, ZeroOrMore, dataclass
from fedecider.comparison.cells import kept_cell
from fedecider.comparison.compare import Cell, Course, Entry, Plan, Positions, Table, TrackRows, Words
from fedecider.comparison.search import ONE_SETTING, Search, search_of, setting_text
from fedecider.data.interactions import Interactions, InteractionsConfig, load_interactions
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import chance_hit, get_protocol, rank_held_out
from fedecider.federation.callbacks import Round, RoundCallback
from fedecider.federation.config import DevicePrivacyConfig
from fedecider.report.costs import median_seconds, participations, total_bytes
from fedecider.report.tables import CANARY, COMPARED
from fedecider.running.options import from_plain
from fedecider.running.plain import as_plain
from fedecider.running.run_folder import check_output
from fedecider.running.settings_files import load_yaml
from fedecider.search_space import Setting

LOCAL = "/local"
"""``fedmf/local`` is FedMF with federation off."""
CODE = "/code"
"""``pfedrec/code`` is PFedRec as its authors' public code does it; tuned like every row, with its settings first."""
SIMPLE = ("popularity", "last_item_cooccurrence", "decayed_cooccurrence")
"""Rows that need no training."""
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
            drawn ones (docs/compare.md); 1 takes the first one, which for a federated method is the paper's. Under the
            protocols paper and isolated99 nothing is tuned.
        settings: A file of settings by row, such as the settings.yaml that a table writes. Rows that it names are not
            searched: they run with these, but under paper and isolated99. If empty, every row is searched.
        num_rounds: The largest number of rounds of a federated method.
        patience: A federated run stops after so many turns of a client (rounds, where all take part) without a better
            validation score; 0 runs all rounds, as is always done under paper and isolated99.
        output: The folder of the table and of the runs it is made of; if empty, one below runs/.
        num_threads: The number of CPU threads; 0 leaves the choice to torch.
        memory_gb: The memory for the work of one block of clients, as in a single run; 0 takes what suits the machine.
        only_cells: If true, runs are made but no table is written, for several processes that share a folder.
    """

    methods: str = "all"
    protocol: str = "strict,strict/sampled99"
    seeds: OneOrMore = 3
    tune: OneOrMore = 3
    settings: str = ""
    num_rounds: OneOrMore = 100
    patience: ZeroOrMore = 15
    output: str = ""
    num_threads: Threads = 0
    memory_gb: NotNegative = 0.0
    only_cells: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.method_names if kind_of(name) is None]
        if unknown or not self.method_names:
            raise ValueError(
                f"got methods {unknown or self.methods!r}, expected all or some of {', '.join(all_methods())}, or of a "
                "federated one NAME/local (not where a server makes the model) or NAME/code (where the public code "
                "differs from the paper)"
            )
        for name in self.protocol_names:
            get_protocol(name)
        if not self.protocol_names:
            raise ValueError("got no protocol, expected one or more, such as strict,strict/sampled99")

    @property
    def method_names(self) -> list[str]:
        given = [name.strip() for name in self.methods.split(",") if name.strip()]
        return list(dict.fromkeys(one for name in given for one in (all_methods() if name == "all" else [name])))

    @property
    def protocol_names(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in self.protocol.split(",") if name.strip()))


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


class Board(NamedTuple):
    """What all cells of a table have in common."""

    config: LeaderboardConfig
    data: InteractionsConfig
    interactions: Interactions
    root: Path
    given: Mapping[str, Setting] = {}
    """Row -> settings from ``config.settings``."""


class Line(NamedTuple):
    """A method under protocols that share their cells."""

    method: str
    group: Sequence[str]

    @property
    def as_published(self) -> bool:
        """Whether nothing is chosen: the papers' settings, all rounds, and the last one reported."""
        return get_protocol(self.group[0]).selection == "last"

    @property
    def validated_under(self) -> str:
        """The protocol of the validation figure: the whole catalogue, or that of the papers' candidates."""
        return self.group[0] if self.as_published else "strict"

    def settings(self, board: Board, protocol: str, setting: Setting, seed: int) -> EmbeddingSettings:
        patience = 0 if self.as_published else min(board.config.patience, board.config.num_rounds)
        return run_settings(board.config, board.data, self.method, protocol, setting, seed, patience)


def plan(config: LeaderboardConfig, data: InteractionsConfig) -> Plan:
    """The table.

    Raises:
        ValueError: the data do not allow a protocol.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    if config.output:
        check_output(Path(config.output))
    given = _given(config, data)
    interactions = load_interactions(data)
    sequences, num_items = interactions.sequences, interactions.num_items
    for name in config.protocol_names:
        build_population(sequences, num_items, get_protocol(name), seed=0)
    root = Path(config.output or f"runs/leaderboard-{interactions.name}")
    board = Board(config, data, interactions, root, given)
    groups = protocol_groups(config.protocol_names)
    shown = config.methods != "all" or has_attributes(interactions)  # all: no rows whose attributes the items lack
    rows = [name for name in config.method_names if shown or name not in METHODS or not METHODS[name].attributes]
    chance = {
        name: {interactions.name: chance_hit(sequences, num_items, "test", get_protocol(name))}
        for name in config.protocol_names
    }
    return Plan(
        "leaderboard",
        board.root,
        [_entry(board, Line(method, group)) for method in rows for group in groups],
        config.protocol_names,
        {interactions.name: interactions.users},
        config.seeds,
        against=None,
        writes=not config.only_cells,
        words=Words(partial(_heading, board), chance, False, SIMPLE),
    )


def _given(config: LeaderboardConfig, data: InteractionsConfig) -> dict[str, Setting]:
    """Row -> settings of the file ``config.settings``, of the rows that are asked for.

    Raises:
        ValueError: the file cannot be read or names other rows than there are; a row has no such settings.
    """
    if not config.settings:
        return {}
    content = load_yaml(Path(config.settings))
    if not isinstance(content, dict) or not all(isinstance(setting, dict) for setting in content.values()):
        raise ValueError(
            f"got {config.settings}, expected rows with their settings, such as fedmf: {{local_epochs: 1}}"
        )
    if unknown := [str(name) for name in content if kind_of(str(name)) is None]:
        raise ValueError(
            f"got settings of {', '.join(unknown)} in {config.settings}, expected rows of the leaderboard: "
            + ", ".join(all_methods())
        )
    for name in set(config.method_names) & set(content):
        try:
            if name in BASELINES:
                from_plain(BASELINES[name].config, content[name])
            else:
                run_settings(config, data, name, "strict", content[name], 0, 0)
        except ValueError as error:
            raise ValueError(f"{config.settings}, {name}: {error}") from error
    return {name: content[name] for name in config.method_names if name in content}


def protocol_groups(names: Sequence[str]) -> list[list[str]]:
    """Protocols that share their training, and with it their runs: those whose negatives come from the same pool."""
    groups: dict[tuple, list[str]] = {}
    for name in names:
        protocol = get_protocol(name)
        groups.setdefault((protocol.negatives_avoid, protocol.selection), []).append(name)
    return list(groups.values())


def _entry(board: Board, line: Line) -> Entry:
    search, budget = _search(board, line), 1 if line.as_published else board.config.tune
    method, kind = line.method, kind_of(line.method) or "central"
    if line.as_published and kind != "central":
        search = ONE_SETTING  # the paper's
    elif method in board.given:
        search, budget = Search({}, {}, (board.given[method],)), 1
    run, name = partial(_cell, board, line), method.removesuffix(LOCAL)
    return Entry(method, name, kind, list(line.group), run, search, budget, partial(_said, method))


def _search(board: Board, line: Line) -> Search:
    method = line.method
    if method == CANARY:  # nothing to tune: it sees as many rounds as the methods
        return Search({}, {}, ({"num_rounds": board.config.num_rounds},))
    if method in BASELINES:
        baseline = BASELINES[method]
        return search_of([baseline.config()], baseline.space, baseline.grid)
    entry = METHODS[method.removesuffix(LOCAL).removesuffix(CODE)]
    code = method.endswith(CODE)
    grid = [one for one in entry.grid if (one.get("variant") == "code") == code]
    return search_of(line.settings(board, line.group[0], {}, 0), space_of(entry, code), grid)


def _said(method: str, setting: Setting) -> str:
    """A setting in words."""
    if method.endswith(CODE):
        return setting_text(as_plain(setting)) if setting else "public code's"
    entry = METHODS.get(method.removesuffix(LOCAL))
    return setting_text(as_plain(setting)) if setting else "paper's" if entry and entry.published else "default"


def _cell(board: Board, line: Line, setting: Setting, seed: int) -> Cell:
    """The run from the folder of cells, made when it is not there.

    It holds the test positions too, so that the trial that wins need not be run again; those of other trials are never
    read.
    """
    method, name, protocols = line.method, board.interactions.name, sorted(line.group)
    inputs = {
        "method": method,
        "seed": seed,
        "data": board.interactions.content_hash(),
        "negatives_avoid": get_protocol(line.group[0]).negatives_avoid,
        **_resolved(board, line, setting, seed),
        "protocols": protocols,
    }
    train_cell = _central if method in BASELINES else _federated
    kept = kept_cell(
        board.root / "cells",
        method.replace("/", "-"),
        inputs,
        lambda folder: train_cell(board, Line(method, protocols), setting, seed),
        f"{method} {setting or 'first setting'}, {'+'.join(line.group)}, seed {seed}",
    )
    info = kept.info

    def positions() -> dict[str, dict[str, Positions]]:
        return {protocol: {method: {name: position_U}} for protocol, position_U in kept.positions().items()}

    further = {
        f"{metric}, {title}": info[name][metric]
        for name, title in (("best_round_test", "best round"), ("best_test_round", "best test round"))
        for metric in COMPARED
        if name in info
    }
    course = partial(_course, info) if "curve" in info else None
    return Cell({method: info["valid"]}, positions, course, kept.folder, further)


def _course(info: Mapping[str, Any]) -> Course:
    num = info["participations"]
    up, down = ((info["bytes"][way], num) for way in ("up", "down"))
    return Course(info["curve"], info["best_round"], info["last_round"], (info["seconds"]["wall_s"], 1), up, down)


def _resolved(board: Board, line: Line, setting: Setting, seed: int) -> dict[str, Any]:
    """Every setting that decides a result, defaults included: a cell made with other defaults is another cell."""
    if line.method in BASELINES:
        return {"setting": as_plain(from_plain(BASELINES[line.method].config, dict(setting)))}
    whole = line.settings(board, line.group[0], setting, seed)
    run = {name: getattr(whole.run, name) for name in ("num_rounds", "patience", "participation", "federation")}
    values = {**run, **as_plain(whole.training), "method": as_plain(whole.method)}
    if METHODS[whole.run.method].attributes:
        values["attributes"] = attribute_digest(board.interactions, whole.method)
    return {"setting": values, **METHODS.as_record(whole.run.method)}


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
        DevicePrivacyConfig(),
        from_plain(entry.config, values),
    )


def _federated(board: Board, line: Line, setting: Setting, seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Where nothing is chosen the round that is best on test items is kept beside, which public codes report."""
    interactions, last = board.interactions, line.as_published
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = line.settings(board, line.validated_under, setting, seed)
    setup = set_up(settings, interactions, device)
    records: list[dict] = []
    on_test: list[dict[str, float]] = []
    variant = setup.method.variants[0]

    def round_ended(round: Round) -> None:
        records.append(round.record)
        if last:
            on_test.append(mean_metrics(user_positions(setup, round.state, variant, "test", last=True), (10,)))

    state = train(settings, setup, [RoundCallback(round_ended)])
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
    for protocol in line.group:
        counted = set_up(settings, interactions, device, protocol)
        positions[protocol] = user_positions(counted, state, variant, "test", last=last)
        if last:
            best = user_positions(counted, state, variant, "test")
            info["best_round_test"] = mean_metrics(best, (10,))
            info["best_test_round"] = max(on_test, key=lambda metrics: metrics["ndcg@10"])
    return info, positions


def _central(board: Board, line: Line, setting: Setting, seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A centralised baseline; each protocol ranks the same scores. Trained ones choose their epoch by validation."""
    entry, sequences, num_items = BASELINES[line.method], board.interactions.sequences, board.interactions.num_items
    device, valid = "cuda" if torch.cuda.is_available() else "cpu", validation_ndcg(sequences, num_items)
    pooled = Pooled(sequences, num_items, get_protocol(line.group[0]), seed, device, valid)
    score = entry.fit(pooled, from_plain(entry.config, dict(setting)))

    def ranked(name: str, split: str) -> Tensor:
        protocol = get_protocol(name)
        candidates = build_population(sequences, num_items, protocol, seed).candidates or None
        return rank_held_out(score, sequences, num_items, split, protocol, candidates=candidates)

    valid_metrics = mean_metrics(ranked(line.validated_under, "valid"), (10,))
    return {"valid": valid_metrics["ndcg@10"]}, {name: ranked(name, "test") for name in line.group}


def _heading(board: Board, table: Table) -> list[str]:
    one, config = board.interactions, board.config
    named = f"; those of {', '.join(board.given)} from {Path(config.settings).name}" if board.given else ""
    stopped = f", stopped after {config.patience} without a better validation score" if config.patience else ""
    last = [name for name in config.protocol_names if get_protocol(name).selection == "last"]
    untuned = f"; under {' and '.join(last)} the settings of the papers or public codes, and all rounds" if last else ""
    return [
        f"Data: {one.name}, {one.num_users:,} users, {one.num_items:,} items, {one.num_events:,} events; order of a "
        f"user's events, the last of which is the test item: {one.card['order']}",
        f"Settings: the best of at most {config.tune} by validation ndcg@10 (whole catalogue, seed 0){named}; "
        f"federated runs of at most {config.num_rounds} rounds{stopped}{untuned}",
        "Defaults of the centralised baselines and of our own methods were found on validation items of ML-100K; the "
        "papers' methods begin with their papers' settings",
        "Against the best: paired t test over users and seeds on ndcg@10, Holm over all pairs, the canary apart",
    ]


def _texts() -> dict[str, str]:
    """Help texts that name what is installed."""
    code = [f"{name}{CODE}" for name in METHODS if not METHODS.problem(name) and METHODS[name].code]
    return {
        "methods": "The names of methods and baselines, separated by commas. NAME/local is a method with federation "
        f"off, NAME/code does what the authors' public code does. all: {', '.join(all_methods())}. Besides: "
        f"{', '.join(code)}."
    }


TABLE = TrackRows((LeaderboardConfig, InteractionsConfig), plan, texts=_texts)
"""The track's part in tables."""
