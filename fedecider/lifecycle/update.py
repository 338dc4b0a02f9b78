"""Next month: a company's new events into its ensemble and, if asked, its adapter, tested before they are in force.

Counts are whole numbers, so that the users' old ones are taken off and the new ones put on exactly; the weights of the
mixture stay. The adapter is trained on from where it is, by the customers with new events. The last new event of each
customer is held out until the old and the new have ranked it. What is written is another version of the run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedecider.bounds import Diverged
from fedecider.cross_silo.command_line import recorded_settings
from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.filtering import compress, order_events
from fedecider.data.frames import events_file
from fedecider.evaluation.protocols import NUM_HELD_OUT
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import stream
from fedecider.lifecycle.warm_start import Scores, ranked_by, train_on
from fedecider.models.counts import Counts, count_events, without
from fedecider.models.ensemble import Ensemble, positions
from fedecider.models.ensemble_files import load_ensemble, save_ensemble
from fedecider.models.folders import replace_in_manifest
from fedecider.models.item_table import lengthen, read_item_ids
from fedecider.models.lists import (
    HISTORIES_FILE,
    Histories,
    build_events,
    counted_histories,
    refuse_others,
    save_histories,
)
from fedecider.models.source import Place, Source, find_source
from fedecider.models.versions import add_version, changing, home_of, write_copy
from fedecider.running.machine import checked_device
from fedecider.running.run_folder import RunFolder, check_output
from idgen.tokenizer import load_tokenizer

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


class Trained(NamedTuple):
    """The adapter before and after it was trained on, each beside the updated counts without the held-out events."""

    num_customers: int
    old: Scores
    new: Scores | None
    """None: the training diverged."""

    @property
    def is_better(self) -> bool:
        return self.new is not None and self.new.ndcg > self.old.ndcg


class Updated(NamedTuple):
    """What an update did."""

    folder: Path | None
    """None where nothing was written: the test was failed."""
    events: NewEvents
    num_new_customers: int
    test: Tested
    num_new_items: int = 0
    trained: Trained | None = None
    version: int = 0
    """Of the run; 0 where another folder, or nothing, was written."""


class Counted(NamedTuple):
    """A company's ensemble, and whose events are in its counts."""

    source: Source
    run: RunFolder
    place: Place
    keys: list[str]
    ensemble: Ensemble
    histories: Histories
    others: Counts
    """What else the ensemble counts: public users, other companies."""


def counted(run: str | Path, company: str | None, data: str = "") -> Counted:
    """What a run, in the version in force, counts of a company.

    Raises:
        ValueError: the run has no ensemble that counts the company's own events, or ``data`` are not those counted.
        FileNotFoundError: there is no such run or company.
    """
    source = find_source(run)
    name = source.choose(company)
    place = source.place(name)
    if source.run is None:
        raise ValueError(
            f"got {run} without run.json, expected the folder of a run, or what a site of a deployment has: what was "
            "handed over alone has no counts"
        )
    if place.ensemble is None:
        raise ValueError(f"got {run} without an ensemble of {name}, expected one in private/{name}: counts are updated")
    keys = list(read_item_ids(place.adapter).keys)
    ensemble = load_ensemble(place.ensemble, keys)
    if "own" not in ensemble.sources:
        raise ValueError(f"got an ensemble of {name} without own counts, expected one with sources own")
    before = counted_histories(source.run, name, data)
    if list(before.item_keys) != keys:
        raise ValueError(f"got histories of another catalogue than that of {run}, expected the run's own data (--data)")
    others = without(ensemble.knowledge.counts, count_events(counted_part(before), len(keys)))
    least = min(int(others.event_I.min()), int(others.pair_II.data.min(initial=0)))
    nobody_else = ensemble.sources == ("own",)
    if least < 0 or (nobody_else and (others.event_I.any() or others.pair_II.nnz)):
        raise ValueError(
            f"got histories that are not those in the counts of {name}, expected the run's own data (--data)"
        )
    return Counted(source, source.run, place, keys, ensemble, before, others)


def with_counts(ensemble: Ensemble, counts: Counts) -> Ensemble:
    """The ensemble with other counts, and the same weights."""
    return ensemble._replace(knowledge=ensemble.knowledge._replace(counts=counts))


def counted_part(histories: Histories) -> SequenceArray:
    """What of histories the counts hold."""
    sequences = SequenceArray.of(histories.sequences)
    return sequences if histories.is_counted_whole else sequences.without_last(NUM_HELD_OUT)


def update(
    run: str | Path,
    company: str | None,
    events: str | Path,
    output: str | Path = "",
    *,
    data: str = "",
    force: bool = False,
    epochs: int = 0,
    device: str = "cpu",
    new_items: str = "",
    how: Mapping[str, str] | None = None,
) -> Updated:
    """Put a company's new events into its ensemble, and into its adapter where ``epochs`` of them are trained.

    Args:
        events: A table of events, of customers who are known or new.
        output: Another run folder to write; if empty, a new version of the run, in force from then on.
        data: Where the data of a run that was never updated are now; if empty, where the run found them.
        force: Write even where the updated counts rank the newest events worse than the old ones.
        epochs: Of training over the customers with new events. The adapter is taken where it ranks their held-out
            events better than the old one does (ndcg@10); else the old one stays.
        new_items: A file of items that came after the training, as for `Recommender.add_items`; those that the
            catalogue has already are left out. They get IDs by their texts, and their events are counted.
        how: How the table of events is read: columns, ``time_format`` and the like, as `from_events` takes them.

    Raises:
        ValueError: the run has no ensemble that counts the company's own events, ``data`` are not those counted, a
            table cannot be read, or nothing new is in it.
        FileNotFoundError: there is no such run or company.
    """
    target, where = Path(output), checked_device(device)
    if output:
        check_output(target)
        if target.exists():
            raise ValueError(f"got the output {target}, which is there already, expected a new folder")
    now = counted(run, company, data)
    home, name, old_ensemble, num_old = home_of(now.run.root), now.place.domain, now.ensemble, len(now.keys)
    with tempfile.TemporaryDirectory() as scratch:
        if new_items:
            now, old_ensemble = with_new_items(now, new_items, Path(scratch) / "longer")
        before, num_items = now.histories, len(now.keys)
        new = new_events(events, before, name, how)
        if not new.items:
            raise ValueError(
                f"got {new.num_rows:,} events of which none is new ({new.num_known:,} are not newer than the "
                f"customer's last one, {new.num_unknown:,} have items that the catalogue does not have), expected some"
            )
        _refuse_repeated(before, new)
        after, kept = merged(before, new), merged(before, new, without_last=True)
        held_out = _held_out(kept, new, name)
        tested = with_counts(now.ensemble, now.others.plus(count_events(kept.sequences, num_items)))
        test = _test(old_ensemble, tested, *held_out)
        found = Updated(None, new, len(after.customers) - len(before.customers), test, num_items - num_old)
        if test.is_worse and not force:
            return found
        whole = with_counts(now.ensemble, now.others.plus(count_events(after.sequences, num_items)))
        adapter = Path(scratch) / "adapter"
        rows = zip(kept.customers, kept.sequences, strict=True)
        longer = [items for customer, items in rows if customer in new.items and len(items) > 1]
        trained = _train(now, tested, longer, held_out, epochs, where, adapter) if epochs else None

        def change(folder: RunFolder) -> None:
            put_private(folder, name, whole, now.keys, after)
            taken = adapter if trained is not None and trained.is_better else now.place.adapter
            if taken in (adapter, Path(scratch) / "longer"):
                shutil.rmtree(folder.adapters / name)
                shutil.copytree(taken, folder.adapters / name)
                replace_in_manifest(folder.root, folder.adapters / name)

        found = found._replace(trained=trained)
        if output:
            write_copy(now.run.root, target, change)
            return found._replace(folder=target)
        with changing(home):
            if find_source(run).run != now.run:
                raise ValueError(f"got {run}, of which another version came into force meanwhile. Update it again")
            return found._replace(folder=home, version=add_version(home, now.run.root, _in_short(found, name), change))


def with_new_items(now: Counted, path: str, folder: Path) -> tuple[Counted, Ensemble]:
    """A company with the items of a file that its catalogue does not have, which nobody had yet; and the ensemble in
    which experts that count abstain from them, as before their events were known.

    ``folder``: where the adapter is written with the longer table of items. No weight changes.

    Raises:
        ValueError: the file cannot be read, an item has no text, the run does not keep what IDs and vectors of later
            items need, or every ID is one token, of which the backbone would need another row.
    """
    from fedecider.models.new_items import add_to, as_new_item, read_new_items  # models are read for new items alone

    table, known = read_item_ids(now.place.adapter), set(now.keys)
    items = [as_new_item(one) for one in read_new_items(Path(path)) if one.key not in known]
    if not items:
        return now, now.ensemble
    if all(len(tokens) == 1 for tokens in table.token_ids):
        raise ValueError(
            f"got {len(items):,} new items for a run whose IDs are one token each, expected one with pretrain.ids "
            "generator, keywords or semantic: a new token would need a row of the backbone, which all companies share. "
            "Give --new_items to recommend and serve, which know them by their texts, or federate anew"
        )
    longer = add_to(now.place, None, load_tokenizer(now.place.backbone), table, items, now.ensemble)
    assert longer.ensemble is not None
    shutil.copytree(now.place.adapter, folder)
    lengthen(folder, longer.table)
    keys = list(longer.table.keys)
    return now._replace(
        place=now.place._replace(adapter=folder),
        keys=keys,
        ensemble=longer.ensemble._replace(knowledge=longer.ensemble.knowledge._replace(num_new=0)),
        histories=now.histories._replace(item_keys=keys),
        others=now.others.with_items(len(items)),
    ), longer.ensemble


def put_private(folder: RunFolder, name: str, ensemble: Ensemble, keys: Sequence[str], histories: Histories) -> None:
    """Another private part of one company, in a copy of a run: its files are new ones."""
    private = folder.private / name
    shutil.rmtree(private, ignore_errors=True)
    save_ensemble(ensemble, keys, private)
    save_histories(histories, private / HISTORIES_FILE)


def _in_short(found: Updated, name: str) -> str:
    num_new = sum(map(len, found.events.items.values()))
    trained = found.trained is not None and found.trained.is_better
    return f"{num_new:,} new events of {name} in its counts{' and its adapter' if trained else ''}"


def new_events(path: str | Path, before: Histories, company: str, how: Mapping[str, str] | None = None) -> NewEvents:
    """The events of a table that can be counted; customers are called as before, ``17`` or ``north:17``."""
    given = events_file(path, how)
    refuse_others(given, company)
    raw = build_events(given)
    ordered = order_events(compress(raw, raw.item_E >= 0))
    number_of = {key: number for number, key in enumerate(before.item_keys)}
    number_I = np.array([number_of.get(key, -1) for key in ordered.items], np.int64)
    known = set(before.customers)
    prefix = before.prefix(company)
    items: dict[str, list[int]] = {}
    last: dict[str, int] = {}
    num_known, unknown_E = 0, []
    for place, user in enumerate(ordered.users):
        customer = user if user in known or not prefix else f"{prefix}{user.removeprefix(prefix)}"
        if customer in items:
            raise ValueError(f"got the customer {customer} by two keys, expected one: write {user} everywhere")
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


def _held_out(kept: Histories, new: NewEvents, name: str) -> tuple[list[list[int]], list[int]]:
    """Histories of some customers without their last new event, and that event."""
    place_of = {customer: place for place, customer in enumerate(kept.customers)}
    found = []
    for customer, items in sorted(new.items.items()):
        history = kept.sequences[place_of[customer]] if customer in place_of else []
        if history and items[-1] not in history:  # an item of the history is no candidate
            found.append((history, items[-1]))
    order = torch.randperm(len(found), generator=stream(0, "update", name))[:MOST_TESTED].tolist()
    chosen = [found[place] for place in sorted(order)]
    return [history for history, _ in chosen], [target for _, target in chosen]


def _test(old: Ensemble, new: Ensemble, histories: list[list[int]], targets: list[int]) -> Tested:
    """By the ensemble without its model, in which counts alone have changed."""
    if not targets:
        return Tested(0, 0.0, 0.0, 0.0)
    asked = (SequenceArray.of(histories), torch.tensor(targets))
    hits = [
        (positions(ensemble.knowledge, *asked, None, [ensemble.alone], True)[0].whole < 10).double()
        for ensemble in (old, new)
    ]
    difference_U = hits[1] - hits[0]
    error = float(difference_U.std(correction=0)) / len(difference_U) ** 0.5
    return Tested(len(targets), float(hits[0].mean()), float(hits[1].mean()), error)


def _train(
    now: Counted,
    tested: Ensemble,
    histories: Sequence[list[int]],
    held_out: tuple[list[list[int]], list[int]],
    epochs: int,
    device: torch.device,
    folder: Path,
) -> Trained:
    """Train the adapter on by ``histories``, and rank what is held out by the old one and by the files of the new one.

    Raises:
        ValueError: no customer has two events to train on and a third one to rank.
    """
    if not histories or not held_out[1]:
        raise ValueError(
            f"got --epochs {epochs} and no customer of {now.place.domain} with two events before a new one, expected "
            "some: nothing can be trained or tested. Leave --epochs out"
        )
    old = ranked_by(now.source, now.place, tested, *held_out, device)
    try:
        train_on(now.place, SequenceArray.of(histories), recorded_settings(now.run.root), epochs, device, folder)
    except Diverged:
        return Trained(len(histories), old, None)
    new_place = now.place._replace(adapter=folder)
    return Trained(len(histories), old, ranked_by(now.source, new_place, tested, *held_out, device))


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
            f"have, such as {shown}; with their texts in --new_items they are counted"
        )
    if done.num_new_items:
        lines.append(f"{done.num_new_items:,} new items have an ID by their text, and are recommended from now on")
    if test.num_customers:
        lines.append(
            f"the last new event of {test.num_customers:,} customers, ensemble without its model: hit@10 "
            f"{test.old:.4f} by the old counts, {test.new:.4f} by the updated ones (standard error {test.error:.4f})"
        )
    else:
        lines.append("no customer's last new event can be ranked: the update is not tested")
    if (trained := done.trained) is not None:
        lines.append(_training_in_words(trained))
    return lines


def _training_in_words(trained: Trained) -> str:
    begun = f"the adapter was trained on by {trained.num_customers:,} customers"
    if trained.new is None:
        return f"{begun} and diverged: the old one stays"
    taken = "the new one is taken" if trained.is_better else "the old one stays"
    return (
        f"{begun}; ensemble beside its model: ndcg@10 {trained.old.ndcg:.4f} with the old one, {trained.new.ndcg:.4f} "
        f"with the new one (hit@10 {trained.old.hit:.4f}, {trained.new.hit:.4f}): {taken}"
    )
