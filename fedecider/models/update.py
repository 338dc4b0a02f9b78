"""Next month: a company's new events into the counts of its hybrid, tested before they take the place of the old ones.

Counts are whole numbers, so that the users' old ones are taken off and the new ones put on exactly. The model and the
weights of the mixture stay. What is written is another run folder; the old one is the way back.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.filtering import compress, order_events
from fedecider.data.given import Given, needed_column
from fedecider.evaluation.protocols import NUM_HELD_OUT
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import stream
from fedecider.models.counts import Contexts, Counts, count_events, without
from fedecider.models.hybrid import Hybrid, load_hybrid, positions, save_hybrid
from fedecider.models.item_table import read_item_ids
from fedecider.models.lists import HISTORIES_FILE, Histories, build_events, histories_of, save_histories
from fedecider.models.source import find_source
from fedecider.running.run_folder import RunFolder, check_output

MOST_TESTED = 500
"""Customers of the test, drawn once."""
LARGEST_LOSS = 2.0
"""Standard errors by which the updated counts may be behind the old ones."""


class NewEvents(NamedTuple):
    """What a table of new events holds that can be counted."""

    items: dict[str, list[int]]
    """Customer -> numbers of the items, oldest first."""
    last_time: dict[str, int]
    num_rows: int
    num_known: int
    """Events at or before the customer's last one: counted before."""
    num_unknown: int
    """Events of items that the catalogue does not have."""
    unknown: list[str]
    """These items, the most frequent first."""


class Tested(NamedTuple):
    """The last new event of each customer, ranked by the old and by the updated counts, which do not hold it."""

    num_customers: int
    old: float
    new: float
    """hit@10."""
    error: float
    """The standard error of their difference."""

    @property
    def is_worse(self) -> bool:
        return self.new < self.old - LARGEST_LOSS * self.error


class Updated(NamedTuple):
    """What an update did."""

    folder: Path | None
    """None where nothing was written: the test was failed."""
    events: NewEvents
    num_new_customers: int
    test: Tested


def update_counts(
    run: str, company: str | None, events: str, output: str, data: str = "", force: bool = False
) -> Updated:
    """Put a company's new events into the counts of its hybrid, and write ``output``, a run folder like ``run``.

    Args:
        events: A table of events, of customers who are known or new.
        data: Prepared data with the histories that are counted now; if empty, those of the run.
        force: Write even where the updated counts rank the newest events worse than the old ones.

    Raises:
        ValueError: the run has no hybrid that counts the company's own events, a table cannot be read, or nothing new
            is in it.
        FileNotFoundError: there is no such run or company.
    """
    target = Path(output)
    check_output(target)
    if target.exists():
        raise ValueError(f"got the output {target}, which is there already, expected a new folder: the old run stays")
    source = find_source(run)
    name = source.choose(company)
    place = source.place(name)
    if source.run is None or place.hybrid is None:
        raise ValueError(f"got {run} without a hybrid of {name}, expected one in private/{name}: counts are updated")
    keys = read_item_ids(place.adapter).keys
    hybrid = load_hybrid(place.hybrid, keys)
    if "own" not in hybrid.config.source_names:
        raise ValueError(f"got a hybrid of {name} without own counts, expected one with sources own")
    before = histories_of(run, name, data)
    if list(before.item_keys) != list(keys):
        raise ValueError(f"got histories of another catalogue than that of {run}, expected the run's own data (--data)")
    new = new_events(events, before, name)
    if not new.items:
        raise ValueError(
            f"got {new.num_rows:,} events of which none is new ({new.num_known:,} are not newer than the customer's "
            f"last one, {new.num_unknown:,} have items that the catalogue does not have), expected some"
        )
    _refuse_repeated(before, new)
    counted = SequenceArray.of(before.sequences)
    if not before.is_counted_whole:
        counted = counted.without_last(NUM_HELD_OUT)
    others = without(hybrid.counts, count_events(counted, len(keys)))
    if others.event_I.min() < 0:
        raise ValueError(
            f"got histories that are not those in the counts of {name}, expected the run's own data (--data)"
        )
    after = merged(before, new)
    test = _test(hybrid, others, before, new, len(keys), name)
    found = Updated(None, new, len(after.customers) - len(before.customers), test)
    if test.is_worse and not force:
        return found
    whole = others.plus(count_events(after.sequences, len(keys)))
    _write(source.run, name, hybrid._replace(counts=whole), keys, after, target)
    return found._replace(folder=target)


def new_events(path: str, before: Histories, company: str) -> NewEvents:
    """The events of a table that can be counted; customers are called as before, ``17`` or ``north:17``."""
    given = Given("events", path, {})
    columns = {what: needed_column(given, what) for what in ("user", "item")}
    raw = build_events(given, columns)
    ordered = order_events(compress(raw, raw.item_E >= 0))
    number_of = {key: number for number, key in enumerate(before.item_keys)}
    number_I = np.array([number_of.get(key, -1) for key in ordered.items], np.int64)
    known = set(before.customers)
    prefix = f"{company}:" if any(one.startswith(f"{company}:") for one in before.customers[:1]) else ""
    items: dict[str, list[int]] = {}
    last: dict[str, int] = {}
    num_known, unknown_E = 0, []
    for place, user in enumerate(ordered.users):
        customer = user if user in known or not prefix else f"{prefix}{user.removeprefix(prefix)}"
        part = slice(int(ordered.start_U[place]), int(ordered.start_U[place + 1]))
        item_E, time_E = number_I[ordered.item_E[part]], ordered.time_E[part]
        old = before.last_time.get(customer, UNKNOWN_TIME)
        is_old_E = (time_E <= old) & (time_E != UNKNOWN_TIME) & (old != UNKNOWN_TIME)
        num_known += int(is_old_E.sum())
        unknown_E.append(ordered.item_E[part][(item_E < 0) & ~is_old_E])
        kept_E = (item_E >= 0) & ~is_old_E
        if kept_E.any():
            items[customer] = item_E[kept_E].tolist()
            if (newest := int(time_E[kept_E].max())) != UNKNOWN_TIME:
                last[customer] = max(newest, old)
    gone_I = (
        np.bincount(np.concatenate(unknown_E), minlength=len(ordered.items)) if unknown_E else np.zeros(0, np.int64)
    )
    order = np.argsort(-gone_I, kind="stable")
    unknown = [ordered.items[item] for item in order.tolist() if gone_I[item]]
    return NewEvents(items, last, len(raw.item_E), num_known, int(gone_I.sum()), unknown)


def _refuse_repeated(before: Histories, new: NewEvents) -> None:
    """Without times a table that was counted before cannot be told by its dates, but by what it would repeat.

    Raises:
        ValueError: it ends every one of these histories already.
    """
    untimed = {customer: items for customer, items in new.items.items() if customer not in new.last_time}
    old = {one: items for one, items in zip(before.customers, before.sequences, strict=True) if one in untimed}
    if untimed and all(list(old.get(one, ()))[-len(items) :] == items for one, items in untimed.items()):
        raise ValueError(
            f"got events without times of {len(untimed):,} customers whose histories end with just these, expected "
            "events that are not counted yet"
        )


def merged(before: Histories, new: NewEvents, without_last: bool = False) -> Histories:
    """Histories with the new events behind the old ones; customers without old ones follow."""
    cut = {customer: items[:-1] if without_last else items for customer, items in new.items.items()}
    known = set(before.customers)
    others = [customer for customer in sorted(cut) if customer not in known and cut[customer]]
    sequences = [
        [*items, *cut.get(customer, ())] for customer, items in zip(before.customers, before.sequences, strict=True)
    ]
    sequences += [cut[customer] for customer in others]
    last_time = {**before.last_time, **new.last_time}
    return Histories([*before.customers, *others], before.item_keys, SequenceArray.of(sequences), last_time, True)


def _test(hybrid: Hybrid, others: Counts, before: Histories, new: NewEvents, num_items: int, name: str) -> Tested:
    """By the hybrid without its model, in which counts alone have changed."""
    kept = merged(before, new, without_last=True)
    place_of = {customer: place for place, customer in enumerate(kept.customers)}
    asked = []
    for customer, items in sorted(new.items.items()):
        history = kept.sequences[place_of[customer]] if customer in place_of else []
        if history and items[-1] not in history:  # an item of the history is no candidate
            asked.append((history, items[-1]))
    if not asked:
        return Tested(0, 0.0, 0.0, 0.0)
    order = torch.randperm(len(asked), generator=stream(0, "update", name))[:MOST_TESTED].tolist()
    histories, targets = zip(*(asked[place] for place in sorted(order)), strict=True)
    contexts = Contexts([list(one) for one in histories], list(targets), [[] for _ in histories])
    updated = hybrid._replace(counts=others.plus(count_events(kept.sequences, num_items)))
    hits = [(positions(one, contexts, None) < 10).double() for one in (hybrid, updated)]
    difference_U = hits[1] - hits[0]
    error = float(difference_U.std(correction=0)) / len(difference_U) ** 0.5
    return Tested(len(targets), float(hits[0].mean()), float(hits[1].mean()), error)


def _write(run: RunFolder, name: str, hybrid: Hybrid, keys: Sequence[str], histories: Histories, target: Path) -> None:
    """The run with another private part of one company; it gets its name when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        shutil.copytree(run.root, scratch, ignore=shutil.ignore_patterns(".lock", "checkpoints"))
        folder = RunFolder(scratch).private / name
        save_hybrid(hybrid, keys, folder)
        save_histories(histories, folder / HISTORIES_FILE)
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def in_words(done: Updated, company: str) -> list[str]:
    """What an update did, line by line."""
    events, test = done.events, done.test
    num_new = sum(map(len, events.items.values()))
    lines = [
        f"{company}: {num_new:,} new events of {len(events.items):,} customers, {done.num_new_customers:,} of them new"
    ]
    if events.num_known:
        lines.append(f"left out: {events.num_known:,} events that are not newer than the customer's last one")
    if events.num_unknown:
        shown = ", ".join(events.unknown[:3])
        lines.append(
            f"left out: {events.num_unknown:,} events of {len(events.unknown):,} items that the catalogue does not "
            f"have, such as {shown}; recommend them by their texts: --new_items of recommend and serve"
        )
    if test.num_customers:
        lines.append(
            f"the last new event of {test.num_customers:,} customers, hybrid without its model: hit@10 {test.old:.4f} "
            f"by the old counts, {test.new:.4f} by the updated ones (standard error {test.error:.4f})"
        )
    else:
        lines.append("no customer's last new event can be ranked: the update is not tested")
    return lines
