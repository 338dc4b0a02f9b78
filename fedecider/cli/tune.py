"""Settings of a method, searched on validation items: fedecider tune --method fedmf --dataset ml-100k --trials 20."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedecider.cli.federate import chosen_track
from fedecider.comparison.tuning import TuneConfig, tune
from fedecider.running.options import run

DESCRIPTION = """Search the settings of a method on validation items; the test items are not looked at. Options are
those of federate: one on the command line stays as it is, a file of --config gives the start of the search."""


def given(words: Sequence[str]) -> list[str]:
    """Names of the options on the command line."""
    return [word[2:].partition("=")[0] for word in words if word.startswith("--")]


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)

    def work() -> None:
        track = chosen_track(words)
        settings, (config,) = track.part("parse")(DESCRIPTION, words, TuneConfig)

        from fedecider.running.launch import start  # after the options: --help does without

        with start(settings.run.num_threads) as launch:
            tune(track, settings, config, given(words), launch)

    return run(work)
