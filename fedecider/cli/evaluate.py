"""Evaluate the adapters of a finished run again, as plain peft loads them: python scripts/evaluate.py --run runs/x."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedecider.cross_silo.command_line import recorded_settings
from fedecider.lifecycle.evaluate import EvaluateConfig, verify
from fedecider.running.command import run
from fedecider.running.launch import start
from fedecider.running.options import parse
from fedecider.running.progress import console

DESCRIPTION = """Load backbone and adapters of a run with transformers and peft alone, rank the held-out items again and
compare with metrics.json; exit code 2 when a test metric differs by more than --tolerance."""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(DESCRIPTION, argv, EvaluateConfig)
        settings = recorded_settings(Path(config.run), config.data)
        with start(settings.run.num_threads) as launch:
            results = verify(Path(config.run), settings, config.split, launch.device)
        names = ("hit@5", "hit@10", "ndcg@5", "ndcg@10")
        table = Table(title=f"{config.split} metrics of {config.run} ({settings.run.protocol})", show_edge=False)
        for column in ("domain, row", *names, "largest difference"):
            table.add_column(column)
        for result in results:
            difference = f"{result.largest_difference:.1e}" if result.recorded else "-"
            numbers = (f"{result.metrics[name]:.4f}" for name in names)
            table.add_row(f"{result.domain} {result.row}".strip(), *numbers, difference)
        console.print(table)
        worst = max(results, key=lambda result: result.largest_difference)
        if worst.largest_difference > config.tolerance:
            raise ValueError(
                f"the {worst.row or 'adapter'} of {worst.domain} gives metrics that differ by "
                f"{worst.largest_difference:.1e} from "
                f"metrics.json, expected at most {config.tolerance:.0e}. Export again, or compare on equal hardware"
            )

    return run(work)
