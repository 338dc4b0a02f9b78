"""A whole table of federated runs: python scripts/compare.py --config benchmarks/configs/compare/amazon_t5.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedecider.data.domain import clients_of
from fedecider.experiment.comparison import CompareConfig, collect, fill, locked, plan
from fedecider.experiment.comparison_page import write_page_of, write_table
from fedecider.experiment.prepare import load_data
from fedecider.running.options import build_parser, parse, run
from fedecider.running.run_folder import git_commit

DESCRIPTION = """Methods x seeds x domains of the LLM track in one table, with equal tuning budgets on validation,
intervals and paired tests. Runs are kept: a stopped table goes on where it was, and several processes may share it."""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(build_parser(DESCRIPTION, CompareConfig), argv, CompareConfig)
        planned = plan(config)
        rows = fill(config, planned)
        if not rows:
            raise ValueError(
                f"got no row whose runs all finished, expected one at least: see {config.output}/runs/*.log"
            )
        data = load_data(rows[0].runs[0].settings.run)
        domains = clients_of(data)
        collected = collect(config, rows, domains)
        sizes = (
            f"{name}: {len(d.clients.users):,} clients, {len(d.public.users):,} public, {len(d.item_keys):,} items"
            for name, d in data.items()
        )
        heading = [f"- Commit of the table: {git_commit()}", f"- Data: {'; '.join(sizes)}"]
        with locked(Path(config.output) / "table.lock"):  # several processes may fill one table, and end together
            for path in write_table(config, rows, collected, heading):
                print(f"written: {path}")
            print(f"written: {write_page_of(config, rows, collected, domains)}")

    return run(work)
