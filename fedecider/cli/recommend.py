"""Next items for a history of titles: python scripts/recommend.py --run runs/x --domain crime --history "A | B"."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from fedecider.bounds import dataclass
from fedecider.models.answers import Answer, Repeats, check_k
from fedecider.models.source import popular_items
from fedecider.running.command import run
from fedecider.running.machine import checked_device
from fedecider.running.options import keys_of, parse
from fedecider.running.progress import console, log_line

DESCRIPTION = "Recommend with the adapter of one domain of a finished run."
SMALLEST = 0.005
"""Of what a feature adds that is printed."""


@dataclass(frozen=True)
class RecommendConfig:
    """Recommendation: from which run, and for which history.

    Args:
        run: The output directory that scripts/federate.py printed, an exported folder, or the name of one on
            the hub.
        domain: The domain whose adapter and catalogue are used; may be left out where there is only one.
        company: The same, where domains are companies.
        history: The titles or item keys of that domain, oldest first, separated by " | "; left out, the most popular
            items.
        similar: A title or item key in place of a history: the items whose texts are nearest to it.
        new_items: A file with items that came after the training, .csv or .jsonl with key, title and text; they are
            recommended by their texts alone, and may stand in the history.
        all: If true, a list for every customer of the company, written to output.
        customers: Customers by their keys, separated by commas, in place of a history; who has none gets what is
            popular. A key with a comma stands in quotes: '"Smith, J",17'.
        data: The folder of prepared data with the customers' histories; if empty, that of the run.
        events: A table of events with the customers' histories, in place of data.
        columns: How events is read, as import takes it: a mapping file, or user=customer,time_format=%d.%m.%Y.
        output: The file of the lists, .parquet or .jsonl, a row for each customer, or .csv, one for each customer and
            item.
        exclude: Items that are not recommended: a table with a column of item keys, or keys separated by " | ".
        candidates: The items that alone may be recommended, as exclude.
        stock: A table of items and how many are left; items with none, or that are not there, are not recommended.
        unknown: What an item of a customer's history is that the catalogue does not have: the list is refused, with its
            reason, or the item is left out (skip).
        repeats: What becomes of items that the history holds: the ensemble's weights decide (learned: what next), they
            are left out (drop: something new), or nothing else comes (only: buy again).
        k: The number of recommendations.
        device: The device, cpu or cuda.
        ensemble: If true, and the output directory holds the client's ensemble, rank with it; else with the model
        alone. json: If true, print one JSON object instead of a table.
    """

    run: str
    domain: str = ""
    company: str = ""
    history: str = ""
    similar: str = ""
    new_items: str = ""
    all: bool = False
    customers: str = ""
    data: str = ""
    events: str = ""
    columns: str = ""
    output: str = ""
    exclude: str = ""
    candidates: str = ""
    stock: str = ""
    unknown: Literal["refuse", "skip"] = "refuse"
    repeats: Repeats = "learned"
    k: int = 10
    device: str = "cpu"
    ensemble: bool = True
    json: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if "--all" in words and (words[words.index("--all") + 1 :] or ["--"])[0].startswith("--"):
        words[words.index("--all")] = "--all=true"

    def work() -> None:
        (config,) = parse(DESCRIPTION, words, RecommendConfig)
        if config.company and config.domain not in ("", config.company):
            raise ValueError(f"got the company {config.company} and the domain {config.domain}, expected one of them")
        config = replace(config, domain=config.domain or config.company)
        if config.similar and (config.all or config.customers or config.history):
            raise ValueError("got --similar with customers or a history, expected one of them")
        if config.all or config.customers:
            _many(config)
            return
        beside = [name for name in ("data", "events", "columns", "output") if getattr(config, name)]
        if beside:
            raise ValueError(f"got --{beside[0]} without customers, expected --all, or --customers K1,K2")
        titles = [title.strip() for title in config.history.split(" | ") if title.strip()]
        if config.history and not titles:
            raise ValueError(
                f"got an empty history {config.history!r}, expected titles or item keys, oldest first: "
                '"title A | title B"; leave --history out for the most popular items'
            )
        checked_device(config.device)
        filters = (config.exclude, config.candidates, config.stock)
        simple = config.ensemble and not titles and config.repeats != "only"
        simple = simple and not (config.new_items or config.similar or any(filters))
        found = popular_items(config.run, config.domain or None, config.k) if simple else None
        domain, answer = _by_model(config, titles) if found is None else found
        if config.json:
            print(json.dumps({"domain": domain, **answer.to_dict()}, ensure_ascii=False))
        else:
            _show(answer, f"Like {answer.history[0].title}" if config.similar else f"Next for a customer in {domain}")

    return run(work)


def _by_model(config: RecommendConfig, titles: Sequence[str]) -> tuple[str, Answer]:
    """The domain and what its model says of a history; the libraries of models are imported here alone."""
    recommender, filters = _recommender(config)
    if config.similar:
        return recommender.domain, recommender.similar(config.similar, config.k, **filters)
    return recommender.domain, recommender.recommend(list(titles), config.k, config.repeats, **filters)


def _recommender(config: RecommendConfig) -> tuple[Any, dict[str, Any]]:
    """It, and what filters it is asked with; which of their keys are no items is said first."""
    from fedecider.models.new_items import read_new_items
    from fedecider.models.recommender import Recommender

    filters = _filters(config)
    new_items = read_new_items(Path(config.new_items)) if config.new_items else []
    found = Recommender.from_pretrained(
        config.run, config.domain or None, device=config.device, ensemble=config.ensemble, new_items=new_items
    )
    if filters and config.output:
        from fedecider.models.allowed_items import allowed_items

        allowed = allowed_items(found.items, **filters)
        for note in () if allowed is None else allowed.notes:
            log_line(note)
    return found, filters


def _filters(config: RecommendConfig) -> dict[str, Any]:
    if not (config.exclude or config.candidates or config.stock):
        return {}
    from fedecider.models.lists import keys_in, stock_in  # tables are read for filters alone

    filters = {"exclude": config.exclude, "candidates": config.candidates}
    return {name: keys_in(text, name) for name, text in filters.items()} | {"stock": stock_in(config.stock)}


def _many(config: RecommendConfig) -> None:
    """Lists of many customers, into a file, or of some on the screen.

    Raises:
        ValueError: options that do not go together, a customer that is none, or data that cannot be read.
    """
    if config.history or (config.all and config.customers):
        raise ValueError("got several of --all, --customers and --history, expected one of them")
    if config.all and not config.output:
        raise ValueError("got --all without --output, expected the file of the lists, such as --output lists.csv")
    if config.columns and not config.events:
        raise ValueError("got --columns without --events, expected the table that it is about")
    if config.data and config.events:
        raise ValueError("got --data and --events, expected one of them: where the histories are")
    checked_device(config.device)
    check_k(config.k)
    from fedecider.data.mapping import columns_from
    from fedecider.models.lists import check_lists_file, histories_of, write_lists
    from fedecider.models.source import find_source

    if config.output:
        check_lists_file(Path(config.output))
    company = find_source(config.run).choose(config.domain or None)
    wanted = None if config.all else keys_of(config.customers, "customers")
    how = columns_from(config.columns)
    found = histories_of(config.run, company, config.data, config.events, how)
    for text in () if config.json else found.said:
        log_line(text)
    pairs: Iterable[tuple[str, list[Any]]] = found.of(wanted, company)
    if wanted is not None:
        pairs = known = list(pairs)
        new = [customer for customer, items in known if not items]
        if new and not config.json:
            log_line(
                f"{len(new):,} of {len(known):,} customers have no history here, such as {new[0]}: they count as new"
            )
    recommender, filters = _recommender(config)
    lists = recommender.recommend_many(pairs, config.k, config.repeats, unknown=config.unknown, **filters)
    if config.output:
        done = write_lists(lists, Path(config.output))
        rate = done.num_lists / max(done.seconds, 1e-9)
        log_line(f"{done.num_lists:,} lists in {done.seconds:.1f} s ({rate:,.0f} a second): {config.output}")
        if done.num_empty:
            log_line(f"{done.num_empty:,} customers have no list, such as {done.example}")
        if config.all and found.num_public:
            log_line(
                f"{found.num_public:,} public customers are not among them: they are the pool that all companies start "
                "from. --events with their events makes lists for them"
            )
        return
    for one in lists:
        if config.json:
            answer = {} if one.answer is None else one.answer.to_dict()
            print(json.dumps({"customer": one.customer, "error": one.error, **answer}, ensure_ascii=False))
        elif one.answer is None:
            log_line(f"{one.customer}: {one.error}")
        else:
            _show(one.answer, f"Next for {one.customer} of {company}")


def _show(answer: Answer, heading: str) -> None:
    for note in answer.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    table = Table(title=escape(heading), show_edge=False)
    for column in ("", "title", "score", "key"):
        table.add_column(column)
    for place, item in enumerate(answer, 1):
        table.add_row(str(place), escape(item.title), f"{item.score:.3f}", escape(item.key))
    console.print(table)
    for place, item in enumerate(answer, 1):
        if len(item.features) > 1:
            ordered = sorted(item.features.items(), key=lambda added: -abs(added[1]))
            parts = ", ".join(f"{name} {value:+.2f}" for name, value in ordered if abs(value) >= SMALLEST)
            console.print(f"score of {place}: {parts}", highlight=False, markup=False)
    if answer.alpha:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in answer.alpha.items())
        console.print(f"share of each domain's direction: {shares}", highlight=False, markup=False)
