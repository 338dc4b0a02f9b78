"""What is written when the rounds of a run are over, from its result: files, table, page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from fedecider.baselines.counts import UNTRAINED
from fedecider.engine.result import CARDS_FILE, EXAMPLES_FILE, RunResult
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.protocols import get_protocol
from fedecider.evaluation.statistics import Interval
from fedecider.federation.record import write_json, write_text
from fedecider.report.tables import CANARY, ResultRow, ResultTable, markdown_table, rich_table
from fedecider.running.progress import console, log_line, stage, stage_seconds
from fedecider.running.run_folder import RunFolder


def per_user_records(
    positions: Mapping[str, Mapping[str, Tensor]], users: Mapping[str, Sequence[str]], round_of: Callable[[str], int]
) -> Iterator[UserPositions]:
    """Test positions, entry -> client -> (U,), as `RunResult.per_user` gives them; ``round_of``: of an entry."""
    for entry, per_client in positions.items():
        for client, position_U in per_client.items():
            yield UserPositions(client, users[client], "test", entry, round_of(entry), position_U)


def write(result: RunResult, folder: RunFolder) -> None:
    """The files of a result, but for the page and the table."""
    write_json(folder.metrics, result.metrics)
    write_per_user(folder.per_user, result.per_user())
    further = {
        folder.communication: result.communication,
        folder.fusion_weights: result.fusion_weights,
        folder.root / EXAMPLES_FILE: result.examples,
        folder.root / CARDS_FILE: result.cards,
    }
    for path, content in further.items():
        if content:
            write_json(path, content)


def finish(
    result: RunResult,
    folder: RunFolder,
    title: str,
    notes: Sequence[str],
    page: Callable[[Path, RunResult], Path],
) -> None:
    """Write everything, and print the table.

    Args:
        result: What came of the run.
        folder: Where it is written.
        title: Of the table.
        notes: What must be said under it.
        page: Writes the page into the folder.
    """
    seconds = stage_seconds()
    result = replace(result, metrics={**result.metrics, **({"seconds": seconds} if seconds else {})})
    write(result, folder)
    write_page_and_table(result, folder, title, notes, page)
    console.print(rich_table(result_table(result, notes), title=title))
    log_line(f"run: {folder.root}")


def write_page_and_table(
    result: RunResult, folder: RunFolder, title: str, notes: Sequence[str], page: Callable[[Path, RunResult], Path]
) -> None:
    """What people read of a run; arguments as those of `finish`."""
    with stage("report"):
        try:
            log_line(f"report: {page(folder.root, result)}")
        except Exception as error:  # hours of training must not end in an error of their page, which can be made again
            log_line(f"no report of {folder.root}: {error}")
    table = markdown_table(result_table(result, notes), title=title)
    write_text(folder.results, table)  # last: a run whose table stands there is finished


def result_table(result: RunResult, notes: Sequence[str]) -> ResultTable:
    """The figures of the test items."""
    baselines = {*UNTRAINED, *result.metrics.get("baselines", ())}

    def row(entry: str) -> ResultRow:
        values = {
            client: {metric: Interval(**value) for metric, value in splits["test"][entry].items()}
            for client, splits in result.figures.items()
        }
        kind = "canary" if entry == CANARY else "baseline" if entry in baselines else "method"
        return ResultRow(entry, values, kind)

    return ResultTable([row(entry) for entry in result.test], get_protocol(result.protocol), notes)
