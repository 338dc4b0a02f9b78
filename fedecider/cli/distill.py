"""Stage 2 alone: the student of half depth. Takes the options of scripts/federate.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.prepare import build_base_artifacts
from fedecider.running.command import run
from fedecider.running.launch import start

DESCRIPTION = """Distil the backbone of scripts/pretrain.py (run first where it is missing) to half its depth and keep
the student in --cache, where scripts/federate.py finds it when it is called with the same settings."""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        settings = parse_settings(sys.argv[1:] if argv is None else argv, DESCRIPTION)
        with start(settings.run.num_threads) as launch:
            build_base_artifacts(settings.run, launch)

    return run(work)
