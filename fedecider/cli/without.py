"""Who gains from whom: fedecider without --run runs/x."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedecider.bounds import dataclass
from fedecider.running.command import run
from fedecider.running.options import parse
from fedecider.running.progress import log_line
from fedecider.running.run_folder import check_output, read_run

DESCRIPTION = (
    "Who gains from whom: run the rounds of a finished run again without one company, for each company or those that "
    "are named, from the stages of the run, and compare what the others have then with what they have in the run. It "
    "takes the rounds of the run for each. What is done is kept in metrics.json, and the page of the run made again."
)


@dataclass(frozen=True)
class WithoutConfig:
    """Without: which run, and whom to leave out.

    Args:
        run: The output directory.
        company: The companies that are left out, one after the other, separated by commas; if empty, each.
        data: The folder of prepared data, when it is not where the run found it.
    """

    run: str
    company: str = ""
    data: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(DESCRIPTION, argv, WithoutConfig)
        record = read_run(Path(config.run))["config"]["run"]
        check_output(Path(config.run))
        from fedecider.cross_silo.page import report  # after the options: --help does without
        from fedecider.cross_silo.without import leave_out
        from fedecider.engine.page import ReportConfig
        from fedecider.report.joining import without_sentences
        from fedecider.running.launch import start

        companies = [one.strip() for one in config.company.split(",") if one.strip()]
        with start(int(record.get("num_threads", 0))) as launch:
            losses = leave_out(config.run, companies, launch, config.data)
        page = report(ReportConfig(config.run, data=config.data))
        for sentence in without_sentences(losses):
            log_line(sentence)
        log_line(f"report: {page}")

    return run(work)
