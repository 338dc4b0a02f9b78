"""The page of a run of the cross-device track: what this track adds to the page of every run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedecider.engine.page import Parts, ReportConfig, write_run_page
from fedecider.engine.result import RunResult
from fedecider.evaluation.protocols import get_protocol
from fedecider.report.answer import Evidence, canary_alarm, sings
from fedecider.report.conclusion import conclusion
from fedecider.report.groups import BUCKET_METRICS, INTERVALS, group_rows, span
from fedecider.report.page import Conclusion, PageTable, Section
from fedecider.report.tables import CANARY

SIMPLE = ("popularity",)
"""Rows of a run that need no training."""


def report(config: ReportConfig) -> Path:
    """The page of a finished run, made again (`fedecider.engine.page.ReportConfig`)."""
    if config.data or config.analyses:
        raise ValueError(
            f"got --data or --analyses for {config.run}, a run of the cross-device track, expected none: leave it out"
        )
    return run_page(Path(config.run), RunResult.read(config.run))


def run_page(root: Path, result: RunResult) -> Path:
    """Write ``report.html`` into the output directory ``root``; errors as `fedecider.engine.page.write_run_page`."""

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
    if protocol.drop_seen and not protocol.leaks and CANARY in test and sings(test[CANARY]["hit@10"], chance):
        alarms.append(canary_alarm(metrics["dataset"], test[CANARY]["hit@10"], chance))
    if not result.settings["run"]["federation"]:
        alarms.append("federation was off: every client trained alone.")
    return Evidence(
        subject=result.reported,
        rows=test,
        simple=SIMPLE,
        protocol=protocol.name,
        scope=result.clients[0],
        tests=metrics.get("comparisons", ()),  # runs of before have none
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
