"""Settings of a method, searched on validation items: fedecider tune --method fedmf --dataset ml-100k --trials 20."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedecider.comparison.tune import TuneConfig, tune
from fedecider.engine.command_line import read_command
from fedecider.running.command import run

DESCRIPTION = """Search the settings of a method on validation items; the test items are not looked at. Options are
those of federate: one on the command line stays as it is, a file of --config gives the start of the search."""


def given(words: Sequence[str]) -> list[str]:
    """Names of the options on the command line."""
    return [word[2:].partition("=")[0] for word in words if word.startswith("--")]


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)

    def work() -> None:
        command = read_command(words, DESCRIPTION, TuneConfig)
        settings = command.settings(words)

        from fedecider.running.launch import start  # after the options: --help does without

        with start(settings.run.num_threads) as launch:
            tune(command.track, settings, command.own, given(words), launch)

    return run(work)
