"""Every method, baseline and protocol on one data set: python scripts/leaderboard.py --dataset ml-100k."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedecider.cli.compare import made_table
from fedecider.engine.track import track_named
from fedecider.running.command import run

DESCRIPTION = """Run and rank all methods of the cross-device track on one data set, with equal tuning budgets on
validation, several seeds, intervals and paired tests. Runs are kept, so a stopped table goes on where it was."""

COMMON = ("dataset", "source", "raw", "output", "methods", "protocol", "seeds", "tune", "num_rounds")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    return run(lambda: made_table(track_named("embedding"), DESCRIPTION, "leaderboard", words, COMMON))
