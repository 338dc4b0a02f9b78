"""The data card: what a prepared domain holds and what is odd about it, in numbers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedecider.data.domain import UNKNOWN_TIME, Domain, Events
from fedecider.evaluation.protocols import MIN_EVENTS, NUM_HELD_OUT, is_repeat
from fedecider.evaluation.sequences import SequenceArray


class RawSummary(NamedTuple):
    """What was read before any filter."""

    files: dict[str, str]
    """File name -> SHA-256."""
    events: int
    users: int
    items: int
    bad_lines: dict[str, Any]
    """count, and the first examples as file:line: why."""
    exact_duplicate_events: int
    """Events (after k-core) that repeat user, item and time of another one."""


def make_card(
    domain: Domain,
    raw: RawSummary | None = None,
    catalogue_records: Mapping[str, int] | None = None,
    dropped: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    by_order: bool | None = None,
) -> dict[str, Any]:
    """Counts, lengths, ties, repeats and provenance of one domain, ready for JSON."""
    is_used_I = np.zeros(len(domain.item_keys), bool)
    for events in (domain.clients, domain.public):
        is_used_I[events.arrays().sequences.value_E] = True
    card: dict[str, Any] = {
        "name": domain.name,
        "items": {
            "count": len(domain.item_keys),
            "unused": int((~is_used_I).sum()),
            "repeated_titles": sum(n - 1 for n in Counter(domain.titles).values()),
            "mean_text_chars": statistics.fmean(map(len, domain.item_texts)),
        },
        "clients": describe(domain.clients),
        "public": describe(domain.public),
        "split": "leave-last-out: the last event is the test item, the last but one the validation item",
    }
    if by_order is not None and any("baskets" in card[group] for group in ("clients", "public")):
        card["baskets"] = "by order number" if by_order else "by time"
    if raw is not None:
        card["raw"] = raw._asdict()
    if dropped is not None:
        card["dropped"] = dict(dropped)
    if catalogue_records is not None:
        card["items"].update(catalogue_records)
    if settings is not None:
        card["settings"] = dict(settings)
    return card


def describe(events: Events) -> dict[str, Any]:
    """Counts, lengths, ties in time and repeats of one group of users; shares are None where nothing can be said."""
    in_baskets = events.arrays().sequences
    sequences = in_baskets.with_baskets(None)
    lengths = np.sort(sequences.length_U).tolist()
    if not lengths:
        return {"users": 0, "events": 0, "timestamps": "none", "tied_last_two_share": None}
    repeated = int(sequences.num_repeats_U.sum())
    repeated_test = int(is_repeat(sequences, "test").sum())
    return {
        "users": len(lengths),
        "events": sum(lengths),
        "length": {
            "min": lengths[0],
            "mean": sum(lengths) / len(lengths),
            "median": statistics.median(lengths),
            "max": lengths[-1],
        },
        "repeated_event_share": repeated / sum(lengths),
        "repeated_test_item_share": repeated_test / len(lengths),
        **({} if in_baskets.basket_E is None else {"baskets": _describe_baskets(in_baskets)}),
        **_describe_time(events),
    }


def _describe_baskets(sequences: SequenceArray) -> dict[str, Any]:
    num_baskets_U = sequences.num_baskets_U
    count = int(num_baskets_U.sum())
    few = int((num_baskets_U < MIN_EVENTS).sum())
    return {"count": count, "mean_events": len(sequences.value_E) / count, "users_with_too_few": few}


def baskets_in_words(domain: Domain) -> list[str]:
    """The baskets of a domain's clients in a line; none where every event is a basket of its own."""
    of_clients = domain.card["clients"].get("baskets")
    if not of_clients:
        return []
    few = of_clients["users_with_too_few"]
    counts = f"{of_clients['count']:,} baskets {domain.card['baskets']}, {of_clients['mean_events']:.1f} events in each"
    too_few = f"; {few:,} of the customers have fewer than {MIN_EVENTS}, whom the protocol next_basket leaves out"
    return [f"{counts}{too_few if few else ''}"]


def overlaps(domains: Mapping[str, Domain]) -> dict[str, dict[str, dict[str, int]]]:
    """For each domain and each other one: the users (clients and public, by key) and items (by key) they share."""
    users = {name: {*domain.clients.users, *domain.public.users} for name, domain in domains.items()}
    items = {name: set(domain.item_keys) for name, domain in domains.items()}
    return {
        a: {b: {"users": len(users[a] & users[b]), "items": len(items[a] & items[b])} for b in domains if b != a}
        for a in domains
    }


def summary(domains: Mapping[str, Domain]) -> str:
    """A short table of counts, one row a domain."""
    header = ("domain", "items", "clients", "events", "public", "events", "bad lines", "tied last two")
    rows: list[tuple[str, ...]] = [header]
    for name, domain in domains.items():
        card = domain.card
        tied = card["clients"]["tied_last_two_share"]
        bad_lines = str(card["raw"]["bad_lines"]["count"]) if "raw" in card else "-"
        counts = [len(domain.item_keys)]
        for group in (domain.clients, domain.public):
            counts += [len(group.users), group.num_events]
        cells = [f"{count:,}" for count in counts]
        rows.append((name, *cells, bad_lines, "unknown" if tied is None else f"{tied:.1%}"))
    widths = [max(len(row[c]) for row in rows) for c in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _describe_time(events: Events) -> dict[str, Any]:
    """Ties, at the resolution that the source has, and the global timeline. A share counts only users whose times it
    needs are known.

    ``tied_neighbours_share``: neighbouring events of a user with the same time, whose order is that of the file.
    ``test_before_last_train_share``: users whose test event is older than the newest training event of the group, so
    that a model has seen others' later events (leave-last-out ignores the global timeline).
    """
    if events.timestamps is None:
        return {
            "timestamps": "unknown",
            "known_time_share": 0.0,
            "tied_last_two_share": None,
            "tied_neighbours_share": None,
            "test_before_last_train_share": None,
        }
    times = SequenceArray.of(events.timestamps)
    known_E = times.value_E != UNKNOWN_TIME
    known_times = times.value_E[known_E]
    exact = times if times.fine_E is None else SequenceArray(times.start_U, times.fine_E)
    last_U, before_U = times.last(), times.last(1)
    last_two_U = (last_U != UNKNOWN_TIME) & (before_U != UNKNOWN_TIME)
    tests = last_U[last_U != UNKNOWN_TIME]
    is_pair_E = known_E[1:] & known_E[:-1]
    is_pair_E[times.start_U[1:-1] - 1] = False  # the last event of a user and the first one of the next
    tied_E = (exact.value_E[1:] == exact.value_E[:-1]) & is_pair_E
    trained = times.without_last(NUM_HELD_OUT).value_E
    trained = trained[trained != UNKNOWN_TIME]
    return {
        "timestamps": "known" if known_E.all() else "partly unknown",
        "known_time_share": len(known_times) / len(known_E),
        "first_time": int(known_times.min()) if len(known_times) else None,
        "last_time": int(known_times.max()) if len(known_times) else None,
        "users_with_known_last_two": int(last_two_U.sum()),
        "tied_last_two_share": _share(exact.last() == exact.last(1), last_two_U),
        "tied_neighbours_share": int(tied_E.sum()) / int(is_pair_E.sum()) if is_pair_E.any() else None,
        "test_before_last_train_share": (
            int((tests < trained.max()).sum()) / len(tests) if len(tests) and len(trained) else None
        ),
    }


def _share(true_U: np.ndarray, of_U: np.ndarray) -> float | None:
    return int((true_U & of_U).sum()) / int(of_U.sum()) if of_U.any() else None
