"""``report.html`` of a run of the cross-device track: read from its JSON files alone, so that it can be made again.

Shape legend: R rounds, U users (= clients).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from embedding_fr.methods import METHODS
from embedding_fr.setup import EmbeddingSettings, Setup, user_positions
from fedecider.baselines.counts import popularity
from fedecider.data.interactions import Interactions
from fedecider.engine.page import Parts, write_run_page
from fedecider.engine.result import RunResult
from fedecider.evaluation.canary import memoriser
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.protocols import Protocol, chance_hit, few_candidates, get_protocol
from fedecider.evaluation.statistics import Comparison, compare_table
from fedecider.federation.cohort import hidden_share
from fedecider.federation.privacy import privacy_report
from fedecider.federation.record import (
    capped_clients,
    non_finite_uploads,
    read_records,
    sum_notes,
    upload_notes,
    write_json,
    write_text,
)
from fedecider.federation.state import RunState
from fedecider.federation.streams import stream
from fedecider.report.analyses import (
    BUCKET_METRICS,
    activity_table,
    median_seconds,
    participations,
    popularity_table,
    total_bytes,
)
from fedecider.report.analysis_sections import INTERVALS, group_rows, span
from fedecider.report.conclusion import Evidence, conclusion
from fedecider.report.page import Conclusion, PageTable, Section
from fedecider.report.tables import (
    CANARY,
    COMPARED,
    ResultRow,
    ResultTable,
    caption,
    comparisons_data,
    markdown_table,
    result_rows,
    rich_table,
    rows_data,
    variant_labels,
)
from fedecider.running.launch import Launch
from fedecider.running.progress import console, log_line, stage, write_seconds
from fedecider.running.run_folder import RunFolder

# ``report.html`` of a run of the cross-device track: read from its JSON files alone, so that it can be made again.

SIMPLE = ("popularity",)
"""Rows of a run that need no training."""


def report(config: Any) -> Path:
    """The page of a finished run, made again (`fedecider.engine.page.ReportConfig`)."""
    if config.data or config.analyses:
        raise ValueError(
            f"got --data or --analyses for {config.run}, a run of the cross-device track, expected none: leave it out"
        )
    return run_page(Path(config.run), RunResult.read(config.run))


def run_page(root: Path, result: RunResult) -> Path:
    """Write ``report.html`` into the run folder ``root``; errors as `fedecider.engine.page.write_run_page`."""

    def parts(result: RunResult) -> Parts:
        privacy = f"Privacy: {result.metrics['privacy']}."
        return Parts(run_conclusion(result), [privacy], middle=[_groups(result.metrics)])

    return write_run_page(root, result, parts)


def run_conclusion(result: RunResult) -> Conclusion:
    """The first words of the page of a run."""
    return conclusion(run_evidence(result), [_about(result.metrics)])


def run_evidence(result: RunResult) -> Evidence:
    """What a run says about its reported entry beside popularity."""
    metrics, protocol, chance = result.metrics, get_protocol(result.protocol), result.metrics["chance_hit@10"]
    alarms, test = [], result.test
    if protocol.drop_seen and not protocol.leaks and CANARY in test and test[CANARY]["hit@10"]["low"] > chance:
        alarms.append("The memoriser, which knows nothing about items, is above chance: by luck, or there is a leak.")
    if not result.settings["run"]["federation"]:
        alarms.append("Federation was off: every client trained alone.")
    alarms.append(
        "Of the simple rules popularity alone stands beside it; co-occurrence, item-kNN, EASE and others stand in a "
        "leaderboard, and are often better."
    )
    return Evidence(
        subject=result.reported,
        rows=test,
        simple=SIMPLE,
        protocol=protocol.name,
        tests=metrics.get("comparisons", ()),  # runs of before have none
        valid=result.valid_means("hit@10"),
        num_clients=metrics["num_users"],
        chance=chance,
        alarms=alarms,
    )


def _about(metrics: Mapping[str, Any]) -> str:
    return (
        f"What was run: the method {metrics['method']} on {metrics['dataset']}, {metrics['num_users']:,} users, each a "
        f"client, over {metrics['num_items']:,} items, in {metrics['last_round']} rounds; round "
        f"{metrics['best_round']} is the best one on validation items."
    )


def _groups(metrics: Mapping[str, Any]) -> Section:
    users, items = [], []
    for number, group in enumerate(metrics["activity"], 1):
        users += group_rows([str(number), span(group["train_events"])], group["num_users"], group)
    for name, group in metrics["popularity"].items():
        items += group_rows([name, span(group["train_count"])], group["num_cases"], group)
    tables = [
        PageTable(["group", "train events", "users", "row", *BUCKET_METRICS], users, "Users, 1: fewest train events"),
        PageTable(
            ["group", "train count of the item", "test cases", "row", *BUCKET_METRICS],
            items,
            "Test cases by their item",
        ),
    ]
    return Section("Groups of users and items", [INTERVALS], tables)


# What a finished run of the cross-device track leaves behind: metrics with intervals, canary, curve, bytes, seconds.

MANY_TIES = 0.1
"""Share of neighbouring events at the same time from which on a method that uses order says so."""
LAST = ", last round"
Rows = dict[str, Tensor]
"""Label -> (U,) positions."""


def write_embedding_results(
    settings: EmbeddingSettings,
    setup: Setup,
    interactions: Interactions,
    state: RunState,
    folder: RunFolder,
    launch: Launch,
) -> None:
    """Read the test set once, for the round that the protocol reports, and write every file but the record."""
    protocol = get_protocol(settings.run.protocol)
    methods, valid_methods = (method_positions(setup, state, protocol, split, launch) for split in ("test", "valid"))
    if not launch.is_main:
        return
    baselines, valid_baselines = (
        baseline_positions(settings, setup, interactions, split, protocol) for split in ("test", "valid")
    )
    rows = _result_rows(interactions.name, methods, baselines)
    valid_rows = _result_rows(interactions.name, valid_methods, valid_baselines)
    records = read_records(folder.rounds)
    table = ResultTable(rows, protocol, _notes(settings, setup, interactions, state, records))
    content: dict[str, Any] = {
        "protocol": protocol.name,
        "stamp": caption(table)[0],
        "method": setup.method.name,
        "dataset": interactions.name,
        "num_users": interactions.num_users,
        "num_items": interactions.num_items,
        "chance_hit@10": chance_hit(interactions.sequences, interactions.num_items, "test", protocol),
        "reported": rows[0].label,
        "best_round": state.best_round,
        "last_round": state.round,
        "best_valid_ndcg@10": state.best_score,
        "num_eval_users": sum(len(block.clients) for block in setup.validated),
        "privacy": privacy_text(settings, interactions.num_users),
        "test": rows_data(rows, interactions.name),
        **group_tables(interactions, {**methods, **baselines}),
        "valid": rows_data(valid_rows, interactions.name),
        "round_seconds": median_seconds(records),
        "bytes": total_bytes(records),
        "non_finite_uploads": non_finite_uploads(records),
        "capped_clients": capped_clients(records),
        "comparisons": comparisons_data(paired_tests(rows[0].label, interactions.name, {**methods, **baselines})),
    }
    write_json(folder.metrics, content)
    write_per_user(
        folder.per_user,
        (
            UserPositions(interactions.name, interactions.users, "test", label, _round_of(label, state), position_U)
            for label, position_U in {**methods, **baselines}.items()
        ),
    )
    write_seconds(folder.metrics)
    with stage("report"):
        _write_page(folder)
    title = f"Test of {setup.method.name} on {interactions.name}"
    console.print(rich_table(table, title=title))
    write_text(folder.results, markdown_table(table, title=title))  # last: a run whose table stands there is finished
    log_line(f"run: {folder.root}")


def method_positions(setup: Setup, state: RunState, protocol: Protocol, split: str, launch: Launch) -> Rows:
    """Every variant under the round that the protocol reports; where that is the last one, the best round beside it."""
    rows: Rows = {}
    for variant, name in variant_labels(setup.method.name, setup.method.variants).items():
        label = name
        if protocol.selection == "last":
            positions = user_positions(setup, state, variant, split, last=True, processes=launch.processes)
            rows[f"{name}{LAST}"] = positions
            label = f"{name}, best validation round"
        rows[label] = user_positions(setup, state, variant, split, processes=launch.processes)
    return rows


def baseline_positions(
    settings: EmbeddingSettings, setup: Setup, interactions: Interactions, split: str, protocol: Protocol
) -> Rows:
    """Popularity and the memoriser, which saw as many rounds and negatives as the method; same candidates."""
    sequences, num_items = interactions.sequences, interactions.num_items
    candidates = {name: tensor.cpu() for name, tensor in setup.population.candidates.items()} or None
    return {
        "popularity": popularity(sequences, num_items, split, protocol, candidates=candidates),
        CANARY: memoriser(
            sequences,
            num_items,
            split,
            protocol,
            generator=stream(settings.run.seed, CANARY),
            num_rounds=settings.run.num_rounds,
            num_negatives=settings.training.num_negatives,
            candidates=candidates,
        ),
    }


def group_tables(interactions: Interactions, rows: Rows) -> dict[str, Any]:
    """``activity``: five equal groups of users by train events; ``popularity``: test cases by the train events of the
    held-out item. Per group its size, span and each row's metrics with intervals."""
    domains = {interactions.name: interactions}
    positions = {label: {interactions.name: position_U} for label, position_U in rows.items()}
    return {
        "activity": activity_table(domains, positions)["domains"][interactions.name],
        "popularity": popularity_table(domains, positions, ("shares",))["shares"][interactions.name],
    }


def privacy_text(settings: EmbeddingSettings, num_clients: int) -> str:
    """What is guaranteed about one client's uploads over the run."""
    if not settings.run.federation:
        return "nothing leaves a client"
    entry = METHODS[settings.run.method]
    if entry.guarantee is not None:
        return entry.guarantee(settings.method)
    seen = entry.chooses_cohort(settings.method) or settings.run.secure_sum
    share = hidden_share(num_clients, settings.run.participation, seen)
    num_rounds = min(settings.run.num_rounds, entry.upload_rounds or settings.run.num_rounds)
    report = privacy_report(settings.privacy, num_rounds, share)
    return f"{report}; the server sees sums of the uploads alone" if settings.run.secure_sum else report


def paired_tests(reported: str, name: str, positions: Rows) -> list[Comparison]:
    """The reported row against the rows that need no training."""
    per_row = {label: {name: position_U} for label, position_U in positions.items()}
    return compare_table(per_row, stream(0, "comparisons"), COMPARED, [(reported, simple) for simple in SIMPLE])


def _result_rows(name: str, methods: Rows, baselines: Rows) -> list[ResultRow]:
    def of_domain(rows: Rows) -> dict[str, dict[str, Tensor]]:
        return {label: {name: position_U} for label, position_U in rows.items()}

    return result_rows(of_domain(methods), of_domain(baselines))


def _round_of(label: str, state: RunState) -> int:
    return state.round if label.endswith(LAST) else state.best_round


def order_warning(method: str, interactions: Interactions) -> list[str]:
    """What a reader must know where ``method`` uses an order of events that the data do not give."""
    if not METHODS[method].uses_order or interactions.card["order"] == "the source's own order":
        return []
    tied = interactions.card["tied_neighbours_share"]
    if tied is None:
        return [f"warning: the data have no times; events are in the order of the file, and {method} uses order"]
    if tied < MANY_TIES:
        return []
    return [
        f"warning: {tied:.0%} of neighbouring events of a user have the same time; their order is the file's, and "
        f"{method} uses order"
    ]


def _notes(
    settings: EmbeddingSettings, setup: Setup, interactions: Interactions, state: RunState, records: Sequence[dict]
) -> list[str]:
    time, size, clients = median_seconds(records), total_bytes(records), participations(records)
    federation = [] if settings.run.federation else ["federation is off: every client trained alone"]
    broken = upload_notes(records)
    sampled = sum(len(block.clients) for block in setup.validated)
    if sampled < setup.population.num_clients:
        federation.append(f"rounds are chosen by {sampled:,} users, drawn once; the test takes all")
    if settings.run.eval_every > 1:
        federation.append(f"every {settings.run.eval_every} rounds are validated, and the last one")
    return [
        *order_warning(settings.run.method, interactions),
        *few_candidates(
            {
                interactions.name: chance_hit(
                    interactions.sequences, interactions.num_items, "test", get_protocol(settings.run.protocol)
                )
            }
        ),
        *federation,
        *broken,
        *sum_notes(settings.run.secure_sum, settings.privacy.clips),
        f"round {state.best_round} of {state.round} has the best validation ndcg@10 ({state.best_score:.4f}) of "
        f"{setup.method.variants[0]}",
        f"{time['wall_s']:.2f} s a round (median), {time['evaluate_s']:.2f} s for its validation; per client and round "
        f"{size['up'] // clients:,} bytes up, {size['down'] // clients:,} down",
        f"privacy: {privacy_text(settings, setup.population.num_clients)}",
    ]


def _write_page(folder: RunFolder) -> None:
    """Hours of training must not end in an error of their page; scripts/report.py says what was wrong."""
    try:
        log_line(f"report: {run_page(folder.root, RunResult.read(folder.root))}")
    except Exception as error:
        log_line(f"no report: {error}")
