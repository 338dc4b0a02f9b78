"""Stage 1 alone: tokenizer, item IDs and backbone from the public pools. Takes the options of scripts/federate.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedecider.cross_silo.base_stages import pretrain_stage
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.prepare import decided
from fedecider.running.command import run
from fedecider.running.launch import start
from fedecider.running.progress import console

DESCRIPTION = """Train tokenizer, ID generator and backbone on the public pools and keep them in --cache, where
scripts/distill_student.py and scripts/federate.py find them when they are called with the same settings."""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        settings = parse_settings(sys.argv[1:] if argv is None else argv, DESCRIPTION)
        with start(settings.run.num_threads) as launch:
            with launch.accelerator.main_process_first():
                config, domains, _ = decided(settings.run)
                stage = pretrain_stage(config, domains, launch.device, quiet=not launch.is_main)
            if launch.is_main:
                console.print(f"{'reused' if stage.reused else 'built'} {stage.folder}", highlight=False)

    return run(work)
