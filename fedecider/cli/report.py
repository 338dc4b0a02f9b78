"""The page of a finished run, made again: python scripts/report.py --run runs/x."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedecider.engine.page import ReportConfig
from fedecider.engine.track import track_of_config
from fedecider.running.command import run
from fedecider.running.options import parse
from fedecider.running.run_folder import check_output, read_run

DESCRIPTION = """Write report.html into the folder of a finished run: a verdict in plain words, examples, results with
intervals, convergence, costs, data and settings in one file that needs no network. Examples, --analyses and its --data
are for runs of the cross-silo track."""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(DESCRIPTION, argv, ReportConfig)
        track = track_of_config(read_run(Path(config.run))["config"])
        check_output(Path(config.run))
        print(f"written: {track.part('page')(config)}")

    return run(work)
