"""What is bought again and what is new, apart: how well each kind of list holds its own part of the next basket.

"repeats": the list of items that a customer had before, and the held-out items that are such; "new items": the list of
all others. Each stands beside the best heuristic baseline of its kind (A Next Basket Recommendation Reality Check, Li
et al., 2023, reports repetition and exploration apart; it ranks both in one list, we rank each in a list of its own).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedecider.baselines.counts import NEW, REPEATED, UNTRAINED
from fedecider.cross_silo.entries import Positions
from fedecider.evaluation.beyond import list_figures
from fedecider.evaluation.metrics import MACRO, macro_mean, mean_metrics
from fedecider.evaluation.statistics import compare_table, of_one_run
from fedecider.models.ensemble import Places
from fedecider.report.tables import compared_by, comparisons_data

LISTS = (REPEATED, NEW)
Lists = Mapping[str, Mapping[str, Positions]]
"""List -> entry -> client -> places of the test items of its part, NaN for all others."""


def lists_of(places: Mapping[str, Mapping[str, Places]], rules: Lists) -> dict[str, dict[str, Positions]]:
    """The lists of ensembles (entry -> client -> places) and of rules."""
    part_of = {REPEATED: "again", NEW: "new"}
    return {
        name: {
            **{
                entry: {client: getattr(place, part_of[name]) for client, place in of_clients.items()}
                for entry, of_clients in places.items()
            },
            **rules[name],
        }
        for name in LISTS
    }


def lists_data(lists: Lists, entries: Sequence[str]) -> dict[str, Any]:
    """What stands in ``metrics.json`` under ``lists``.

    ``entries``: those of ensembles, the handed-over one first. Each list has its means by client over the customers
    with an item of its part, where there are some, the best rule by ndcg@10 alone of all rules, and paired tests of the
    first entry against the others and that rule.
    """
    data = {}
    for name, of_list in lists.items():
        shown = {entry: _of_part(of_list[entry]) for entry in (*entries, *UNTRAINED) if entry in of_list}
        if not any(shown.values()):
            continue
        values = {entry: _figures(positions) for entry, positions in shown.items()}
        rules = [entry for entry in values if entry not in entries]
        best = max(rules, key=lambda entry: values[entry][MACRO]["ndcg@10"])
        kept = [*(entry for entry in entries if entry in values), best]
        compared = {entry: shown[entry] for entry in kept}
        tests = compare_table(
            of_one_run(compared),
            compared_by(of_one_run(compared)),
            [(kept[0], entry) for entry in kept[1:]],
            each_domain=False,
        )
        data[name] = {
            "best_rule": best,
            "num_customers": {client: len(places) for client, places in shown[best].items()},
            "values": {entry: values[entry] for entry in kept},
            "tests": comparisons_data(tests),
        }
    return data


def beyond_data(
    ten_of: Mapping[str, Mapping[str, Tensor]], rules: Mapping[str, Positions], sold: Mapping[str, Tensor]
) -> dict[str, dict[str, dict[str, float]]]:
    """What stands in ``metrics.json`` under ``beyond``: entry -> client, and their mean -> `list_figures`.

    ``ten_of``: entry -> client -> lists; of the ``rules`` (their test positions) the one with the best ndcg@10 alone.
    ``sold``: client -> train events of each item.
    """
    mean = {label: _figures(of)[MACRO]["ndcg@10"] for label, of in rules.items() if label in ten_of}
    best = max(mean, key=lambda label: mean[label])
    found = {}
    for entry in [entry for entry in ten_of if entry not in mean or entry == best]:
        clients = {client: list_figures(item_UK, sold[client]) for client, item_UK in ten_of[entry].items()}
        found[entry] = {**clients, MACRO: macro_mean(clients)}
    return found


def _figures(positions: Positions) -> dict[str, dict[str, float]]:
    means = {client: mean_metrics(place) for client, place in positions.items()}
    return {**means, MACRO: macro_mean(means)}


def _of_part(positions: Positions) -> dict[str, Tensor]:
    """The customers with an item of the part, of clients with some; items of the other part are moved behind theirs."""
    parts = {}
    for client, place in positions.items():
        if place.ndim == 1:
            parts[client] = place[~place.isnan()]
        else:
            parts[client] = place[~place.isnan().all(1)].sort(1).values
    return {client: place for client, place in parts.items() if len(place)}


def list_sentence(name: str, of_list: Mapping[str, Any]) -> str:
    """The handed-over list against the others, by the first metric."""
    first, subject = of_list["tests"][0]["metric"], next(iter(of_list["values"]))
    parts = [f"{name.capitalize()}: {subject} has {first} {100 * of_list['values'][subject][MACRO][first]:.1f}"]
    for test in of_list["tests"]:
        if test["metric"] == first:
            mean, low, high = (100 * test["difference"][end] for end in ("mean", "low", "high"))
            beyond = "" if test["difference"]["low"] > 0 or test["difference"]["high"] < 0 else ", which may be chance"
            parts.append(f"{mean:+.1f} points [{low:+.1f}, {high:+.1f}]{beyond} against {test['second']}")
    return "; ".join(parts) + "."
