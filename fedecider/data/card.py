"""The data card: what a prepared domain holds and what is odd about it, in numbers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from fedecider.data.domain import UNKNOWN_TIME, Domain, Events
from fedecider.evaluation.protocols import history, target, train_part


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
) -> dict[str, Any]:
    """Counts, lengths, ties, repeats and provenance of one domain, ready for JSON."""
    groups = (domain.clients, domain.public)
    used = {item for events in groups for sequence in events.sequences for item in sequence}
    card: dict[str, Any] = {
        "name": domain.name,
        "items": {
            "count": len(domain.item_keys),
            "unused": len(domain.item_keys) - len(used),
            "repeated_titles": sum(n - 1 for n in Counter(domain.titles).values()),
            "mean_text_chars": statistics.fmean(map(len, domain.item_texts)),
        },
        "clients": describe(domain.clients),
        "public": describe(domain.public),
        "split": "leave-last-out: the last event is the test item, the last but one the validation item",
    }
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
    lengths = sorted(map(len, events.sequences))
    if not lengths:
        return {"users": 0, "events": 0, "timestamps": "none", "tied_last_two_share": None}
    repeated = sum(len(sequence) - len(set(sequence)) for sequence in events.sequences)
    repeated_test = sum(target(sequence, "test") in history(sequence, "test") for sequence in events.sequences)
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
        **_describe_time(events),
    }


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
    """Ties and the global timeline. A share counts only users whose times it needs are known.

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
    times = [time for sequence in events.timestamps for time in sequence if time != UNKNOWN_TIME]
    last_two = [s[-2:] for s in events.timestamps if UNKNOWN_TIME not in s[-2:]]
    tests = [time for s in events.timestamps if (time := target(s, "test")) != UNKNOWN_TIME]
    known = [pair for s in events.timestamps for pair in pairwise(s) if UNKNOWN_TIME not in pair]
    trained = [time for s in events.timestamps for time in train_part(s) if time != UNKNOWN_TIME]
    newest = max(trained, default=None)
    total = sum(map(len, events.timestamps))
    return {
        "timestamps": "known" if len(times) == total else "partly unknown",
        "known_time_share": len(times) / total,
        "first_time": min(times, default=None),
        "last_time": max(times, default=None),
        "users_with_known_last_two": len(last_two),
        "tied_last_two_share": sum(a == b for a, b in last_two) / len(last_two) if last_two else None,
        "tied_neighbours_share": sum(a == b for a, b in known) / len(known) if known else None,
        "test_before_last_train_share": (
            sum(test < newest for test in tests) / len(tests) if tests and newest is not None else None
        ),
    }
