"""Next items for a history of titles: python scripts/recommend.py --run runs/x --domain crime --history "A | B"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedecider.llm.new_items import read_new_items
from fedecider.llm.recommend import RecommendConfig, load, recommend
from fedecider.running.cli import build_parser, parse, run
from fedecider.running.progress import console

DESCRIPTION = "Recommend with the adapter of one domain of a finished run."


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(build_parser(DESCRIPTION, RecommendConfig), argv, RecommendConfig)
        new_items = read_new_items(Path(config.new_items)) if config.new_items else []
        loaded = load(config.run, config.domain, config.device, config.memory, new_items)
        titles = [title.strip() for title in config.history.split("|") if title.strip()]
        table = Table(title=f"Next for a reader in {config.domain}", show_edge=False)
        for column in ("", "title", "score", "key"):
            table.add_column(column)
        for place, item in enumerate(recommend(loaded, titles, config.k), 1):
            table.add_row(str(place), item.title, f"{item.score:.3f}", item.key)
        console.print(table)
        if loaded.alpha_share:
            shares = ", ".join(f"{name} {share:.1%}" for name, share in loaded.alpha_share.items())
            console.print(f"share of each domain's direction: {shares}", highlight=False)

    return run(work)
