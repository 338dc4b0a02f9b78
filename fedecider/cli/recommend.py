"""Next items for a history of titles: python scripts/recommend.py --run runs/x --domain crime --history "A | B"."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedecider.models.histories import Answer
from fedecider.models.source import popular_items
from fedecider.running.machine import checked_device
from fedecider.running.options import build_parser, parse, run
from fedecider.running.progress import console

DESCRIPTION = "Recommend with the adapter of one domain of a finished run."
SMALLEST_SHARE = 0.005
"""Of an expert that is printed."""


@dataclass(frozen=True)
class RecommendConfig:
    """Recommendation: from which run, and for which history.

    Args:
        run: The run folder that scripts/federate.py printed, a folder that save_pretrained wrote, or the name of one on
            the hub.
        domain: The domain whose adapter and catalogue are used; may be left out where there is only one.
        history: The titles or item keys of that domain, oldest first, separated by " | "; left out, the most popular
            items.
        new_items: A file with items that came after the training, .csv or .jsonl with key, title and text; they are
            recommended by their texts alone, and may stand in the history.
        k: The number of recommendations.
        device: The device, cpu or cuda.
        hybrid: If true, and the run folder holds the private part of the client's hybrid, rank with it; else with the
            model alone.
        json: If true, print one JSON object instead of a table.
    """

    run: str
    domain: str = ""
    history: str = ""
    new_items: str = ""
    k: int = 10
    device: str = "cpu"
    hybrid: bool = True
    json: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        (config,) = parse(build_parser(DESCRIPTION, RecommendConfig), argv, RecommendConfig)
        titles = [title.strip() for title in config.history.split(" | ") if title.strip()]
        if config.history and not titles:
            raise ValueError(
                f"got an empty history {config.history!r}, expected titles or item keys, oldest first: "
                '"title A | title B"; leave --history out for the most popular items'
            )
        checked_device(config.device)
        simple = config.hybrid and not titles and not config.new_items
        found = popular_items(config.run, config.domain or None, config.k) if simple else None
        domain, answer = _by_model(config, titles) if found is None else found
        if config.json:
            print(json.dumps({"domain": domain, **answer.to_dict()}, ensure_ascii=False))
        else:
            _show(answer, domain)

    return run(work)


def _by_model(config: RecommendConfig, titles: Sequence[str]) -> tuple[str, Answer]:
    """The domain and what its model says of a history; the libraries of models are imported here alone."""
    from fedecider.models.loaded import read_new_items
    from fedecider.models.recommender import Recommender

    new_items = read_new_items(Path(config.new_items)) if config.new_items else []
    recommender = Recommender.from_pretrained(
        config.run, config.domain or None, device=config.device, hybrid=config.hybrid, new_items=new_items
    )
    return recommender.domain, recommender.recommend(list(titles), config.k)


def _show(answer: Answer, domain: str) -> None:
    table = Table(title=f"Next for a reader in {escape(domain)}", show_edge=False)
    for column in ("", "title", "score", "key"):
        table.add_column(column)
    for place, item in enumerate(answer, 1):
        table.add_row(str(place), escape(item.title), f"{item.score:.3f}", escape(item.key))
    console.print(table)
    for place, item in enumerate(answer, 1):
        if len(item.experts) > 1:
            ordered = sorted(item.experts.items(), key=lambda share: -share[1])
            shares = ", ".join(f"{name} {share:.0%}" for name, share in ordered if share >= SMALLEST_SHARE)
            console.print(f"probability of {place}: {shares}", highlight=False, markup=False)
    if answer.alpha:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in answer.alpha.items())
        console.print(f"share of each domain's direction: {shares}", highlight=False, markup=False)
    for note in answer.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
