"""The page of a finished run, made again: python scripts/report.py --run runs/x."""

from __future__ import annotations

from collections.abc import Sequence

from fedecider.llm.run_report import ReportConfig, report
from fedecider.running.cli import build_parser, parse, run

DESCRIPTION = """Write report.html into the folder of a finished run of the LLM track: results with intervals,
convergence, fusion weights, analyses, costs, examples, data and settings in one file that needs no network."""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(build_parser(DESCRIPTION, ReportConfig), argv, ReportConfig)
        print(f"written: {report(config)}")

    return run(work)
