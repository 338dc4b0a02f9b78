"""Next month: a company's new events into its ensemble and, if asked, its adapter, tested before they are in force.

Counts are whole numbers, so that the users' old ones are taken off and the new ones put on exactly. The weights are
fitted again, from where they are, on the newest basket of every customer, behind counts that do not hold it. The
adapter is trained on from where it is, by the customers with new events. The newest basket of each of these is held out
until the old and the new have ranked it. What is written is another version of the run.
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
from fedecider.data.frames import events_of
from fedecider.evaluation.metrics import user_metrics
from fedecider.evaluation.protocols import NUM_HELD_OUT, held_out, histories, is_repeat, targets
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import stream
from fedecider.lifecycle.warm_start import Scores, loaded_scores, ranked_by, train_on
from fedecider.models.counts import Counts, count_events, without
from fedecider.models.ensemble import (
    MAX_CUSTOMERS,
    Ensemble,
    ModelScores,
    Weights,
    choices_of,
    fit_weights,
    positions,
)
from fedecider.models.ensemble_files import load_ensemble, save_ensemble
from fedecider.models.item_table import lengthen, read_item_ids
from fedecider.models.later_rows import add_rows, with_rows
from fedecider.models.lists import (
    HISTORIES_FILE,
    Histories,
    counted_histories,
    knows_baskets,
    ordered_events,
    save_histories,
)
from fedecider.models.new_items import (
    Later,
    add_to,
    encoded_items,
    load_unsold,
    read_new_items,
    save_unsold,
    takes_new_items,
)
from fedecider.models.source import Place, Source, find_source
from fedecider.models.versions import add_version, changing, home_of, write_copy
from fedecider.running.machine import checked_device
from fedecider.running.manifest import note_changed
from fedecider.running.progress import log_line
from fedecider.running.run_folder import RunFolder, check_output
from idgen.tokenizer import load_tokenizer

MOST_TESTED = 500
"""Customers of the test, drawn once."""
LARGEST_LOSS = 2.0
"""Standard errors by which the updated ensemble may be behind the old one."""


class NewEvents(NamedTuple):
    """What a table of new events holds that can be counted."""

    items: dict[str, list[int]]
    """Customer -> numbers of the items, oldest first."""
    baskets: dict[str, list[int]]
    """The basket of each of these events: 1, 2, ..., some of which may be left out."""
    last_time: dict[str, int]
    num_rows: int
    num_known: int
    """Events at or before the customer's last one: counted before."""
    num_unknown: int
    """Events of items that the catalogue does not have."""
    unknown: list[str]
    """These items, the most frequent first."""


class Tested(NamedTuple):
    """The newest basket of each customer with new events, ranked by the old and by the updated ensemble without its
    model; neither has counted it or was fitted on it."""

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
    """The adapter before and after it was trained on, each beside the updated ensemble of `Tested`."""

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
    weights: tuple[Weights, Weights]
    """Those that decide, beside the model where there is one: before, and after."""
    num_new_items: int = 0
    """Of which there are events now."""
    num_unsold: int = 0
    """Items that nobody has bought yet."""
    takes_none: str = ""
    """Why the run cannot have new items, where events of some were left out."""
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
            "exported alone has no counts"
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
    least = min(int(others.event_I.min()), *(int(part.data.min(initial=0)) for part in others[:2]))
    nobody_else = ensemble.sources == ("own",)
    if least < 0 or (nobody_else and (others.event_I.any() or others.pair_II.nnz or others.next_II.nnz)):
        raise ValueError(
            f"got histories that are not those in the counts of {name}, expected the run's own data (--data)"
        )
    return Counted(source, source.run, place, keys, ensemble, before, others)


def with_counts(ensemble: Ensemble, counts: Counts) -> Ensemble:
    """The ensemble with other counts, and the same weights."""
    return ensemble._replace(knowledge=ensemble.knowledge._replace(counts=counts))


def deciding(ensemble: Ensemble) -> Weights:
    """The weights beside the model, or without one where there is none."""
    return ensemble.beside_model or ensemble.alone


def refitted(now: Counted, sequences: SequenceArray, model: ModelScores | None) -> Ensemble:
    """The ensemble with counts of ``sequences``, and its weights fitted again as a run fits them.

    They are fitted on the newest basket of every customer, or of a draw of many, behind counts that hold none of these;
    the prior are the weights in force. Without ``model`` those beside it stay.
    """

    def counting(rows: SequenceArray) -> Ensemble:
        return with_counts(now.ensemble, now.others.plus(count_events(rows, len(now.keys))))

    draw = stream(0, "update weights", now.place.domain)
    chosen = np.flatnonzero(sequences.num_baskets_U > 1)
    chosen = chosen[torch.randperm(len(chosen), generator=draw)[:MAX_CUSTOMERS].sort().values.numpy()]
    rows = sequences.take(chosen)
    asked = (histories(rows, "test"), targets(rows, "test"))
    with torch.no_grad():
        choices = choices_of(counting(sequences.without_last(1)).knowledge, *asked, model, draw)
    alone, beside = fit_weights(choices, False, now.ensemble.alone.value), now.ensemble.beside_model
    if model is not None and beside is not None:
        beside = fit_weights(choices, True, beside.value)
    return counting(sequences)._replace(alone=alone, beside_model=beside)


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
        output: Another output directory to write; if empty, a new version of the run, in force from then on.
        data: Where the data of a run that was never updated are now; if empty, where the run found them.
        force: Write even where the updated ensemble ranks the newest events worse than the old one.
        epochs: Of training over the customers with new events. The adapter is taken where it ranks their held-out
            events better than the old one does (ndcg@10); else the old one stays.
        new_items: A file of items that came after the training, as for `Recommender.add_items`; those that the
            catalogue has already are left out. They get IDs by their texts, and their events are counted; those without
            an event are kept, and recommended by their texts.
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
        later = later_items(now, new_items)
        is_sold = sold(later, events, how)
        bought, unsold = (later.take(np.flatnonzero(part).tolist()) for part in (is_sold, ~is_sold))
        if bought.items:
            now, old_ensemble = with_new_items(now, bought, Path(scratch) / "longer")
        before, num_items = now.histories, len(now.keys)
        new = new_events(events, before, name, how, knows_baskets(now.run))
        if not new.items:
            raise ValueError(
                f"got {new.num_rows:,} events of which none is new ({new.num_known:,} are not newer than the "
                f"customer's last one, {new.num_unknown:,} have items that the catalogue does not have), expected some"
                f"{'; name the texts of these items: --new_items FILE' if new.num_unknown else ''}"
            )
        _refuse_repeated(before, new)
        after, kept = merged(before, new), merged(before, new, without_last=True)
        ranked = _ranked(after, new, now.place)
        tested = refitted(now, kept.sequences, None)
        test = _test(old_ensemble, tested, ranked, now.place.inference.drop_seen)
        weights = (deciding(old_ensemble),) * 2
        num_new = (num_items - num_old, len(unsold.items))
        found = Updated(None, new, len(after.customers) - len(before.customers), test, weights, *num_new)
        if new.num_unknown:
            found = found._replace(takes_none=takes_new_items(now.place, read_item_ids(now.place.adapter)))
        if test.is_worse and not force:
            return found
        adapter = Path(scratch) / "adapter"
        is_longer_U = (kept.sequences.num_baskets_U > 1) & np.array([one in new.items for one in kept.customers])
        longer = kept.sequences.take(is_longer_U)
        trained = _train(now, tested, longer, ranked, epochs, where, adapter) if epochs else None
        place = now.place
        if trained is not None and trained.is_better:
            place = place._replace(adapter=adapter)
        model = None if old_ensemble.beside_model is None else loaded_scores(now.source, place, where)
        whole = refitted(now, after.sequences, model)
        found = found._replace(trained=trained, weights=(deciding(old_ensemble), deciding(whole)))

        def change(folder: RunFolder) -> None:
            put_private(folder, name, whole, now.keys, after, unsold)
            if place.adapter in (adapter, Path(scratch) / "longer"):
                shutil.rmtree(folder.adapters / name)
                shutil.copytree(place.adapter, folder.adapters / name)
                note_changed(folder.root, [folder.adapters / name])

        if output:
            write_copy(now.run.root, target, change)
            return found._replace(folder=target)
        with changing(home):
            if find_source(run).run != now.run:
                raise ValueError(f"got {run}, of which another version came into force meanwhile. Update it again")
            return found._replace(folder=home, version=add_version(home, now.run.root, _in_short(found, name), change))


def later_items(now: Counted, path: str) -> Later:
    """The items without an event that a company has, and those of a file that its catalogue does not have.

    Raises:
        ValueError: the file cannot be read, an item has no text, or the run does not keep what IDs and vectors of later
            items need.
    """
    assert now.place.ensemble is not None
    given = read_new_items(Path(path)) if path else []
    known = {*now.keys, *(item.key for item in given)}
    unsold = load_unsold(now.place.ensemble)
    unsold = unsold.take([number for number, item in enumerate(unsold.items) if item.key not in known])
    items = [item for item in given if item.key not in set(now.keys)]
    if not items:
        return unsold
    added = encoded_items(now.place, read_item_ids(now.place.adapter), items)
    assert unsold.text_NE is not None
    assert added.text_NE is not None
    text_NE = torch.cat([unsold.text_NE, added.text_NE]) if unsold.items else added.text_NE
    return Later([*unsold.items, *items], text_NE)


def sold(later: Later, events: str | Path, how: Mapping[str, str] | None) -> np.ndarray:
    """bool (N,): of which of the items a table has an event."""
    keys = set(ordered_events(events_of(events, how).events, False)[0].items) if later.items else set()
    return np.array([item.key in keys for item in later.items], bool)


def with_new_items(now: Counted, items: Later, folder: Path) -> tuple[Counted, Ensemble]:
    """A company with more items, which nobody had yet; and the ensemble in which features that count have nothing to
    say of them, as before their events were known.

    ``folder``: where the adapter is written with the longer table of items, and their rows where every ID is one token.
    """
    table, adapter = read_item_ids(now.place.adapter), now.place.adapter
    tokenizer = with_rows(None, load_tokenizer(now.place.backbone), adapter, table)
    longer = add_to(now.place, None, tokenizer, table, items, now.ensemble)
    assert longer.ensemble is not None
    shutil.copytree(adapter, folder)
    lengthen(folder, longer.table)
    if longer.row_ND is not None:
        add_rows(folder, longer.row_ND)
    keys = list(longer.table.keys)
    return now._replace(
        place=now.place._replace(adapter=folder),
        keys=keys,
        ensemble=longer.ensemble._replace(knowledge=longer.ensemble.knowledge._replace(num_new=0)),
        histories=now.histories._replace(item_keys=keys),
        others=now.others.with_items(len(items.items)),
    ), longer.ensemble


def put_private(
    folder: RunFolder,
    name: str,
    ensemble: Ensemble,
    keys: Sequence[str],
    histories: Histories,
    unsold: Later | None = None,
) -> None:
    """Another private part of one company, in a copy of a run: its files are new ones. ``unsold``: None keeps them."""
    private = folder.private / name
    unsold = load_unsold(private) if unsold is None else unsold
    shutil.rmtree(private, ignore_errors=True)
    save_ensemble(ensemble, keys, private)
    save_histories(histories, private / HISTORIES_FILE)
    save_unsold(unsold, private)
    note_changed(folder.root, [private])


def _in_short(found: Updated, name: str) -> str:
    num_new = sum(map(len, found.events.items.values()))
    trained = found.trained is not None and found.trained.is_better
    return f"{num_new:,} new events of {name} in its counts{' and its adapter' if trained else ''}"


def new_events(
    path: str | Path, before: Histories, company: str, how: Mapping[str, str] | None = None, baskets: bool = False
) -> NewEvents:
    """The events of a table that can be counted, in ``baskets`` or by themselves; customers are called as before,
    ``17`` or ``north:17``."""
    raw, said, _ = events_of(path, how, company)
    for text in said:
        log_line(text)
    ordered, rows = ordered_events(raw, baskets)
    basket_E = np.repeat(rows.num_baskets_U, rows.length_U) - rows.num_after_E
    number_of = {key: number for number, key in enumerate(before.item_keys)}
    number_I = np.array([number_of.get(key, -1) for key in ordered.items], np.int64)
    known = set(before.customers)
    prefix = before.prefix(company)
    items: dict[str, list[int]] = {}
    basket_of: dict[str, list[int]] = {}
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
            items[customer], basket_of[customer] = item_E[kept_E].tolist(), basket_E[part][kept_E].tolist()
            if (newest := int(time_E[kept_E].max())) != UNKNOWN_TIME:
                last[customer] = max(newest, old)
    gone_I = (
        np.bincount(np.concatenate(unknown_E), minlength=len(ordered.items)) if unknown_E else np.zeros(0, np.int64)
    )
    order = np.argsort(-gone_I, kind="stable")
    unknown = [ordered.items[item] for item in order.tolist() if gone_I[item]]
    return NewEvents(items, basket_of, last, len(ordered.item_E), num_known, int(gone_I.sum()), unknown)


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
    """Histories with the new events behind the old ones, or all of them but the newest basket; customers without old
    ones follow."""
    added = {customer: list(zip(new.items[customer], new.baskets[customer], strict=True)) for customer in new.items}
    if without_last:
        added = {customer: [one for one in pairs if one[1] < pairs[-1][1]] for customer, pairs in added.items()}
    known = set(before.customers)
    others = [customer for customer in sorted(added) if customer not in known and added[customer]]
    old = before.sequences
    baskets = SequenceArray(old.start_U, -old.num_after_E)
    rows = [
        [*zip(items, numbers, strict=True), *added.get(customer, ())]
        for customer, items, numbers in zip(before.customers, old, baskets, strict=True)
    ]
    rows += [added[customer] for customer in others]
    sequences = SequenceArray.of([[item for item, _ in pairs] for pairs in rows])
    sequences = sequences.with_baskets(np.array([basket for pairs in rows for _, basket in pairs], np.int64))
    last_time = {**before.last_time, **new.last_time}
    return Histories([*before.customers, *others], before.item_keys, sequences, last_time, True)


def _ranked(after: Histories, new: NewEvents, place: Place) -> SequenceArray:
    """Some customers with new events and others before these."""
    return drawn_to_rank(after.sequences.take(np.array([one in new.items for one in after.customers])), place)


def drawn_to_rank(rows: SequenceArray, place: Place) -> SequenceArray:
    """Some of the histories whose last basket can be ranked behind those before it."""
    rows = rows.take(rows.num_baskets_U > 1)
    if place.inference.drop_seen:  # an item of the history is no candidate
        rows = rows.take(~is_repeat(rows, "test").numpy())
    order = torch.randperm(len(rows), generator=stream(0, "update", place.domain))[:MOST_TESTED]
    return rows.take(order.sort().values.numpy())


def _test(old: Ensemble, new: Ensemble, rows: SequenceArray, drop_seen: bool) -> Tested:
    if not len(rows):
        return Tested(0, 0.0, 0.0, 0.0)
    asked = (histories(rows, "test"), held_out(rows, "test"), None)
    places = [positions(one.knowledge, *asked, [one.alone], drop_seen)[0].whole for one in (old, new)]
    hits = [user_metrics(place)["hit@10"] for place in places]
    difference_U = hits[1] - hits[0]
    error = float(difference_U.std(correction=0)) / len(difference_U) ** 0.5
    return Tested(len(rows), float(hits[0].mean()), float(hits[1].mean()), error)


def _train(
    now: Counted,
    tested: Ensemble,
    sequences: SequenceArray,
    ranked: SequenceArray,
    epochs: int,
    device: torch.device,
    folder: Path,
) -> Trained:
    """Train the adapter on by ``sequences``; the old one and the files of the new one rank the last basket of
    ``ranked``.

    Raises:
        ValueError: no customer has two events to train on and a third one to rank.
    """
    if not len(sequences) or not len(ranked):
        raise ValueError(
            f"got --epochs {epochs} and no customer of {now.place.domain} with two events or baskets before a new one, "
            "expected some: nothing can be trained or tested. Leave --epochs out"
        )
    old = ranked_by(now.source, now.place, tested, ranked, device)
    try:
        train_on(now.place, sequences, recorded_settings(now.run.root), epochs, device, folder)
    except Diverged:
        return Trained(len(sequences), old, None)
    new_place = now.place._replace(adapter=folder)
    return Trained(len(sequences), old, ranked_by(now.source, new_place, tested, ranked, device))


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
            f"have, such as {shown}"
        )
    if done.num_new_items:
        lines.append(f"{done.num_new_items:,} new items have an ID by their text, and their events are counted")
    if done.num_unsold:
        lines.append(f"{done.num_unsold:,} items that nobody has bought yet are recommended by their texts")
    if test.num_customers:
        lines.append(
            f"the newest events of {test.num_customers:,} customers, ensemble without its model: hit@10 "
            f"{test.old:.4f} by the old one, {test.new:.4f} by the updated one (standard error {test.error:.4f})"
        )
    else:
        lines.append("no customer's newest events can be ranked: the update is not tested")
    if (trained := done.trained) is not None:
        lines.append(_training_in_words(trained))
    if done.folder is not None:
        before, after = done.weights
        parts = (f"{name} {before.value.get(name, 0.0):+.2f} to {theta:+.2f}" for name, theta in after.value.items())
        lines.append(f"weights fitted again on {after.num_customers:,} customers: {', '.join(parts)}")
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
