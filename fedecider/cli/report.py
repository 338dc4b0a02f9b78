"""The page of a finished run, made again: python scripts/report.py --run runs/x."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embedding_fr.results import embedding_run_page
from fedecider.experiment.run_page import ReportConfig, report
from fedecider.id_based import METHODS as ID_METHODS
from fedecider.running.options import build_parser, parse, run
from fedecider.running.run_folder import RunFolder, read_run

DESCRIPTION = """Write report.html into the folder of a finished run: a verdict in plain words, examples, results with
intervals, convergence, analyses, costs, data and settings in one file that needs no network. Examples and analyses are
those of the LLM track; --data and --encoder are for them."""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(build_parser(DESCRIPTION, ReportConfig), argv, ReportConfig)
        folder = RunFolder(Path(config.run))
        config_of = read_run(folder.root)["config"]
        if config_of["run"].get("method") in ID_METHODS:
            raise ValueError(f"got {folder.root}, a run of an ID-based method, which has no page: see {folder.results}")
        if "ranking" in config_of:
            page = report(config)
        elif config.data:
            raise ValueError(f"got --data for {config.run}, a run of the embedding track, expected none: leave it out")
        else:
            page = embedding_run_page(folder)
        print(f"written: {page}")

    return run(work)
