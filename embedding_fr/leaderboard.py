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
from fedecider.data.interactions import Interactions, InteractionsConfig
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.protocols import Protocol, chance_hit, get_protocol, rank_held_out, stamp
from fedecider.evaluation.statistics import Comparison, compare_table, distinguishable_winners
from fedecider.experiment.tuning import Search, best_of, check_budget, search_of
from fedecider.experiment.tuning import search_settings as tune
from fedecider.federation.privacy import PrivacyConfig
from fedecider.federation.record import read_json, write_json, write_text
from fedecider.federation.streams import stream
from fedecider.report.analyses import median_seconds, participations, total_bytes
from fedecider.report.figures import convergence_curves
from fedecider.report.page import Download, Opening, PageTable, Section, write_page
from fedecider.report.tables import (
    CANARY,
    COMPARED,
    ResultRow,
    comparisons_csv,
    comparisons_data,
    csv_text,
    interval_text,
    markdown_grid,
    number_text,
    result_rows,
)
from fedecider.report.verdict import WITHOUT_EXCHANGE, Evidence, opening
from fedecider.running.options import from_plain
from fedecider.running.progress import say
from fedecider.running.run_folder import as_plain, cached_stage

# The whole table of the embedding track: every method and baseline, every protocol, equal tuning, several seeds.

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


# ``leaderboard.html``: the leaderboard as one self-contained page, with the same verdict as the page of a run.

SIMPLE = ("popularity", "last_item_cooccurrence", "decayed_cooccurrence")
"""Rows that need no training."""
Curves = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""Panel -> method -> [[round, validation ndcg@10], ...]."""


def write_leaderboard_page(
    config: LeaderboardConfig, content: Mapping[str, Any], notes: Sequence[str], curves: Curves, csv: str, path: Path
) -> Path:
    """Write the page of ``content``, which ``leaderboard.json`` holds; ``csv`` is the text of ``leaderboard.csv``."""
    rows = {
        name: [row for row in content["rows"] if row["protocol"] == name]
        for name in dict.fromkeys(content["comparisons"])
    }
    missing = content["missing"]
    sections = [_section(name, own, content["comparisons"][name], missing[name]) for name, own in rows.items() if own]
    if curves:
        points = ([*place, *point] for place, points in _named(curves) for point in points)
        file = Download("validation.csv", csv_text(["panel", "method", "round", "ndcg@10"], points))
        sections.append(Section("Convergence", figures=[convergence_curves(curves)], downloads=[file]))
    sections.append(Section("How it was made", notes, downloads=[Download("leaderboard.csv", csv)]))
    title = f"Leaderboard: {content['dataset']}"
    subtitle = f"{', '.join(rows)}; {config.seeds} seed{'s' if config.seeds > 1 else ''}"
    return write_page(path, title, subtitle, sections, opening=_opening(content, rows))


def _named(curves: Curves) -> list[tuple[tuple[str, str], Sequence[Sequence[float]]]]:
    return [((panel, method), points) for panel, of_panel in curves.items() for method, points in of_panel.items()]


def _opening(content: Mapping[str, Any], rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Opening | None:
    """About the federated row that is best on validation, under the strictest protocol; None where there is none."""
    found = [name for name in sorted(rows, key=_strictness) if any(row["kind"] == "federated" for row in rows[name])]
    if not found:
        return None
    name = found[0]
    chosen = max((row for row in rows[name] if row["kind"] == "federated"), key=lambda row: row["valid_ndcg@10"])
    about = (
        f"What was compared: {len(rows[name])} rows under the protocol {name}. {chosen['method']} is the federated one "
        "with the best validation ndcg@10."
    )
    return opening(board_evidence(content, rows[name], chosen), [about])


def _strictness(name: str) -> tuple[bool, bool, bool]:
    protocol = get_protocol(name)
    return protocol.leaks, protocol.num_sampled is not None, not protocol.drop_seen


def board_evidence(
    content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]
) -> Evidence:
    """What the rows of one protocol say about ``chosen``."""
    name, subject = chosen["protocol"], chosen["method"]
    central = [row for row in rows if row["kind"] == "central" and row["method"] not in (*SIMPLE, CANARY)]
    beside = {}
    if central:
        best = max(central, key=lambda row: row["valid_ndcg@10"])["method"]
        beside[best] = f"{best} with all data in one place"
    alone = {row["method"]: row["method"].removesuffix(LOCAL) for row in rows if row["kind"] == "local"}
    protocol, chance = get_protocol(name), content["chance_hit@10"][name]
    canary = [row["hit@10"]["low"] for row in rows if row["method"] == CANARY]
    alarms = [
        "The memoriser, which knows nothing about items, is above chance: by luck, or there is a leak."
        for low in canary
        if low > chance and protocol.drop_seen and not protocol.leaks
    ]
    federated = [row for row in rows if row["kind"] == "federated"]
    top = max(federated, key=lambda row: row["hit@10"]["mean"])
    if top is not chosen:
        alarms.append(
            f"{subject} was chosen on validation items; on test items {top['method']} has more: "
            f"{100 * top['hit@10']['mean']:.1f} against {100 * chosen['hit@10']['mean']:.1f} of 100 users."
        )
    return Evidence(
        subject=subject,
        rows={row["method"]: {metric: row[metric] for metric in COMPARED} for row in rows},
        simple=SIMPLE,
        protocol=name,
        tests=content["comparisons"][name],
        beside=beside,
        without_exchange={
            label: WITHOUT_EXCHANGE if method == subject else f"{method} without any exchange"
            for label, method in alone.items()
        },
        num_seeds=chosen["seeds"],
        num_clients=content["num_users"],
        chance=chance,
        alarms=alarms,
    )


def left_out(missing: Sequence[str]) -> list[str]:
    """Which rows a table lacks, as paragraphs: of what was asked for."""
    return [f"Left out, since a run failed: {', '.join(missing)}."] if missing else []


def _section(
    name: str, rows: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]], missing: Sequence[str]
) -> Section:
    canary = next((row["hit@10"]["mean"] for row in rows if row["method"] == CANARY), None)
    cells = [
        [
            row["method"],
            row["kind"],
            *(interval_text(row[metric], 3) for metric in COMPARED),
            row["against_best"],
            row["setting"],
        ]
        for row in rows
    ]
    header = ("row", "kind", *COMPARED, "against the best", "setting")
    files = [Download(f"tests-{name.replace('/', '-')}.csv", comparisons_csv(tests))] if tests else []
    said = [stamp(get_protocol(name), canary), *left_out(missing)]
    return Section(f"Protocol {name}", said, [PageTable(header, cells)], downloads=files)


# The leaderboard as Markdown, CSV, JSON and a page: one row per method and protocol.

METRICS = (*COMPARED, "hit@5", "ndcg@5", "hit@20")
BEST_ROUND = "hit@10 / ndcg@10, best validation round"


def write_leaderboard(
    config: LeaderboardConfig, interactions: Interactions, board: Sequence[BoardRow], root: Path, heading: Sequence[str]
) -> Path:
    """Write ``leaderboard.md``, ``.csv``, ``.json``, ``.html`` and ``per_user.parquet``; -> the Markdown."""
    per_protocol = {name: [row for row in board if row.protocol == name] for name in config.protocol_names}
    sections, rows, pairs, missing = [], [], {}, {}
    for name, own in per_protocol.items():
        protocol = get_protocol(name)
        measured = result_rows({row.method: {interactions.name: row.positions()} for row in own}) if own else []
        table = [_row_data(row, found, interactions) for row, found in zip(own, measured, strict=True)]
        comparisons = compare(interactions, own)
        pairs[name] = comparisons_data(comparisons)
        best = _best(table)
        for row in table:
            row["against_best"] = _against(row["method"], best, comparisons)
        table.sort(key=lambda row: -row["ndcg@10"]["mean"])
        winners = set() if protocol.leaks else distinguishable_winners(comparisons)
        missing[name] = [method for method in config.method_names if method not in {row.method for row in own}]
        sections.append(_markdown(protocol, table, winners, interactions, missing[name]))
        rows += table
    csv = _csv(rows)
    write_text(root / "leaderboard.csv", csv)
    sequences, num_items = interactions.sequences, interactions.num_items
    content = {
        "dataset": interactions.name,
        "card": interactions.card,
        "num_users": interactions.num_users,
        "chance_hit@10": {name: chance_hit(sequences, num_items, "test", get_protocol(name)) for name in per_protocol},
        "rows": rows,
        "comparisons": pairs,
        "missing": missing,
    }
    write_json(root / "leaderboard.json", content)
    write_per_user(root / "per_user.parquet", _records(interactions, board))
    path = root / "leaderboard.md"
    card = _card(interactions, config)
    notes = [line.removeprefix("- ").replace("`", "") for line in [*heading, *card]]
    write_leaderboard_page(config, content, notes, _curves(board), csv, root / "leaderboard.html")
    write_text(path, "\n".join([f"# Leaderboard: {interactions.name}", "", *heading, *card, "", *sections]))
    return path


def compare(interactions: Interactions, board: Sequence[BoardRow]) -> list[Comparison]:
    """All paired comparisons of one protocol, Holm-corrected together; the canary is left out."""
    positions = {row.method: {interactions.name: row.positions()} for row in board if row.method != CANARY}
    if len(positions) < 2:
        return []
    return compare_table(positions, stream(0, "comparisons"), COMPARED, num_permutations=20_000)


def _row_data(board: BoardRow, measured: ResultRow, interactions: Interactions) -> dict[str, Any]:
    intervals = measured.values[interactions.name]
    infos = [cell.info for cell in board.cells]
    row: dict[str, Any] = {
        "method": board.method,
        "kind": board.kind,
        "protocol": board.protocol,
        "setting": settings_text(board),
        "seeds": len(board.cells),
        "valid_ndcg@10": sum(info["valid"] for info in infos) / len(infos),
    }
    row |= {name: intervals[name]._asdict() for name in METRICS}
    if "seconds" in infos[0]:
        row["round"] = [info["best_round"] for info in infos]
        row["rounds_run"] = [info["last_round"] for info in infos]
        row["seconds_per_round"] = sum(info["seconds"]["wall_s"] for info in infos) / len(infos)
        if all("participations" in info for info in infos):
            sent = sum(info["bytes"]["up"] for info in infos)
            row["bytes_up_per_client_and_round"] = sent / sum(info["participations"] for info in infos)
    if "best_round_test" in infos[0]:
        for name in COMPARED:
            row[f"{name}, best round"] = sum(info["best_round_test"][name] for info in infos) / len(infos)
    return row


def _best(table: Sequence[Mapping[str, Any]]) -> str:
    compared = [row for row in table if row["method"] != CANARY]
    return max(compared, key=lambda row: row["ndcg@10"]["mean"])["method"] if compared else CANARY


def _against(method: str, best: str, comparisons: Sequence[Comparison]) -> str:
    """The verdict on ndcg@10 against the best row of the table."""
    if method == CANARY:
        return "canary"
    if method == best:
        return "best"
    for c in comparisons:
        if c.metric == "ndcg@10" and {c.first, c.second} == {method, best}:
            return "below" if c.distinguishable() else "not distinguishable"
    raise AssertionError(f"{method} was not compared with {best}")


def _markdown(
    protocol: Protocol,
    table: Sequence[Mapping[str, Any]],
    winners: set[tuple[str, str, str]],
    interactions: Interactions,
    missing: Sequence[str],
) -> str:
    canary = next((row["hit@10"]["mean"] for row in table if row["method"] == CANARY), None)
    chance = chance_hit(interactions.sequences, interactions.num_items, "test", protocol)
    last = protocol.selection == "last"
    columns = ["method", "kind", *COMPARED, "hit@5", "hit@20", "against best", "setting", "round", "s / round"]
    extra = [BEST_ROUND] if last else []
    right = {*COMPARED, "hit@5", "hit@20", "s / round", BEST_ROUND}
    grid = markdown_grid([*columns, *extra], [_cells(row, interactions.name, winners, last) for row in table], right)
    said = f"{stamp(protocol, canary)}; chance hit@10 {chance:.3f}"
    return "\n".join([f"## Protocol `{protocol.name}`", "", said, "", *grid, "", *left_out(missing)])


def _cells(row: Mapping[str, Any], dataset: str, winners: set[tuple[str, str, str]], last: bool) -> list[str]:
    bold = [(dataset, name, row["method"]) in winners for name in COMPARED]
    cells = [row["method"], row["kind"]]
    cells += [interval_text(row[name], 3, strong) for name, strong in zip(COMPARED, bold, strict=True)]
    cells += [number_text(row[name]["mean"], 3) for name in ("hit@5", "hit@20")]
    cells += [row["against_best"], row["setting"]]
    rounds = row["rounds_run" if last else "round"] if "round" in row else []
    cells += [", ".join(map(str, rounds)) or "-", number_text(row.get("seconds_per_round"), 3)]
    if last:
        names = [f"{name}, best round" for name in COMPARED]
        cells += [" / ".join(number_text(row[name], 3) for name in names) if names[0] in row else "-"]
    return cells


def _card(interactions: Interactions, config: LeaderboardConfig) -> list[str]:
    stopped = f"stopped after {config.patience} without a better validation score (not under `paper`)"
    tuned = f"the best of at most {config.tune} settings by validation ndcg@10 (whole catalogue, seed 0)"
    return [
        f"- Data: {interactions.num_users:,} users, {interactions.num_items:,} items, "
        f"{interactions.num_events:,} events",
        f"- {config.seeds} seed(s); settings: {tuned}, under `paper` those of the papers; federated runs of at most "
        f"{config.num_rounds} rounds" + (f", {stopped}" if config.patience else ""),
        "- Defaults of the centralised baselines and of our own methods were found on validation items of ML-100K; the "
        "papers' methods begin with their papers' settings. Seconds were measured while other runs were going on",
        "- Brackets: 95 % cluster bootstrap over users and seeds. Against best: paired permutation test over users on "
        "ndcg@10, Holm-corrected over all pairs of the table but those with the canary; bold: distinguishably above "
        "every other row but the canary, never under a protocol that leaks",
    ]


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ["method", "kind", "protocol", "setting", "seeds", "valid_ndcg@10", "against_best", "seconds_per_round"]
    header = [*names, *(f"{name}{part}" for name in METRICS for part in ("", "_low", "_high"))]
    cells = (
        [
            *(row.get(name, "") for name in names),
            *(row[name][part] for name in METRICS for part in ("mean", "low", "high")),
        ]
        for row in rows
    )
    return csv_text(header, cells)


def _records(interactions: Interactions, board: Sequence[BoardRow]) -> list[UserPositions]:
    return [
        UserPositions(
            interactions.name,
            interactions.users,
            "test",
            f"{row.method}, {row.protocol}, seed {seed}",
            cell.info.get("last_round" if get_protocol(row.protocol).selection == "last" else "best_round", 0),
            cell.positions(row.protocol),
        )
        for row in board
        for seed, cell in enumerate(row.cells)
    ]


def _curves(board: Sequence[BoardRow]) -> dict[str, dict[str, list]]:
    curves: dict[str, dict[str, list]] = {}
    for row in board:
        if "curve" in row.cells[0].info and len(row.cells[0].info["curve"]) > 1:
            panel = "paper" if get_protocol(row.protocol).leaks else "strict"
            curves.setdefault(panel, {})[row.method] = row.cells[0].info["curve"]
    return curves
