"""Samples of events in baskets: whose order says nothing, and of which no held-out one is read or asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_tasks import make_domain, make_ids, make_tokenizer

from fedecider.data.domain import Events
from fedecider.evaluation.metrics import NO_ITEM
from fedecider.evaluation.sequences import SequenceArray
from idgen.candidates import _times_asked
from idgen.config import SampleConfig
from idgen.decode import item_positions
from idgen.events import event_table, is_target, merge_events, next_basket, shuffled, window_ends, without_last_targets
from idgen.item_ids import ItemIds
from idgen.samples import eval_batches, num_batches, train_batches
from idgen.synthetic import nearest_items
from idgen.tasks import build_task

WHOLE = make_domain(num_items=40)
TOKENIZER = make_tokenizer([WHOLE])
ONE_TOKEN = ItemIds([str(i) for i in range(40)], [[50 + i] for i in range(40)], {})
BASKETS = [[[0, 1, 2], [3], [4, 5], [6, 7], [8, 9]], [[10], [11, 12], [13], [14]], [[15, 16], [17], [18, 19]]]
"""Every event has an item of its own, so that a token tells its event."""


def rows_of(users):
    rows = SequenceArray.of([[item for basket in baskets for item in basket] for baskets in users])
    return rows.with_baskets(np.array([n for baskets in users for n, basket in enumerate(baskets) for _ in basket]))


EVENTS = Events(["u", "v", "w"], rows_of(BASKETS), None)
DOMAIN = replace(WHOLE, clients=EVENTS)
BASKET_OF = {item: (user, n) for user, of in enumerate(BASKETS) for n, basket in enumerate(of) for item in basket}
HELD_OUT = {item for baskets in BASKETS for basket in baskets[-2:] for item in basket}


def task_of(item_ids=ONE_TOKEN, **settings):
    config = SampleConfig(**{"templates": "history", "max_source_tokens": 200, "max_history": 20, **settings})
    near = nearest_items(torch.eye(40)) if settings.get("synthetic_share") else None
    return build_task(DOMAIN, EVENTS, item_ids, TOKENIZER, config, True, near)


def batches_of(task, seed=0):
    return list(train_batches(task, 3, torch.Generator().manual_seed(seed)))


def test_every_place_of_a_row_asks_for_a_random_item_of_the_next_basket():
    asked, orders = {}, set()
    for seed in range(60):
        for batch in batches_of(task_of(), seed):
            for tokens, labels in zip(batch["input_ids"].tolist(), batch["row_labels"].tolist(), strict=True):
                items = [token - 50 for token in tokens if token >= 50]
                orders.add(tuple(items))
                assert not HELD_OUT & set(items)
                for before, label in zip(items, labels[1:], strict=False):
                    if label != -100:
                        asked.setdefault(before, set()).add(label - 50)
                assert labels[0] == -100
    # of u three baskets are trained on, of v two, of w the first one, which has none behind it
    assert asked == {0: {3}, 1: {3}, 2: {3}, 3: {4, 5}, 10: {11, 12}}
    assert {order[:3] for order in orders if len(order) == 6} == {
        (a, b, c) for a in range(3) for b in range(3) for c in range(3) if len({a, b, c}) == 3
    }


def test_rows_of_long_ids_ask_for_what_a_basket_begins_with():
    ids = make_ids(WHOLE, TOKENIZER)
    task, found = task_of(ids, templates="list"), set()
    item_of = {tuple(tokens): item for item, tokens in enumerate(ids.token_ids)}
    end = task.parts.segments.token_F[task.parts.segments.start_G[task.parts.end_K[0]]]
    for seed in range(40):
        for batch in batches_of(task, seed):
            for tokens, labels in zip(batch["input_ids"].tolist(), batch["row_labels"].tolist(), strict=True):
                assert all(label in (-100, token) for token, label in zip(tokens, labels, strict=True))
                ids_asked, now = [], []
                for label in labels:
                    if label == end:
                        ids_asked.append(item_of[tuple(now)])
                        now = []
                    elif label != -100:
                        now.append(label)
                assert not now
                found.update(ids_asked)
    assert found == {3, 4, 5, 11, 12}


def test_a_sample_with_one_target_reads_what_lies_before_its_basket():
    task, found = task_of(templates="compact", max_source_tokens=400), {}
    for seed in range(20):
        for batch in batches_of(task, seed):
            for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
                found.setdefault(labels[0] - 50, set()).add(frozenset(t - 50 for t in tokens if 50 <= t < 90))
    assert set(found) == {3, 4, 5, 11, 12}
    words = frozenset.intersection(*(one for of in found.values() for one in of))
    assert {item: {one - words for one in of} for item, of in found.items()} == {
        3: {frozenset({0, 1, 2})},
        4: {frozenset({0, 1, 2, 3})},
        5: {frozenset({0, 1, 2, 3})},
        11: {frozenset({10})},
        12: {frozenset({10})},
    }


@pytest.mark.parametrize(("split", "num_after"), [("valid", 1), ("test", 0)])
def test_what_is_ranked_is_a_whole_basket_behind_all_before_it(split, num_after):
    found = {}
    for user_B, input_ids, mask, target_BT in eval_batches(task_of(), split, 2):
        for user, tokens, is_token, target in zip(user_B, input_ids, mask, target_BT, strict=True):
            items = [token - 50 for token in tokens[is_token > 0].tolist() if token >= 50]
            found[int(user)] = items, [item for item in target.tolist() if item != NO_ITEM]
    for user, baskets in enumerate(BASKETS):
        before = baskets[: len(baskets) - 1 - num_after]
        assert found[user] == ([item for basket in before for item in basket], baskets[-1 - num_after])


def test_synthetic_histories_stand_beside_baskets():
    num_synthetic = 0
    for batch in batches_of(task_of(synthetic_share=0.5)):
        for tokens, labels in zip(batch["input_ids"].tolist(), batch["row_labels"].tolist(), strict=True):
            asked = [label for label in labels if label != -100]
            assert asked
            num_synthetic += len(asked) == 1 and asked[0] == [token for token in tokens if token >= 50][-1]
    assert num_synthetic


def test_tables_of_baskets_and_of_single_events_merge():
    rng = np.random.default_rng(0)
    single = event_table([[1, 2, 3], [4, 5, 6, 7]], False)
    merged = merge_events([single, event_table(EVENTS.sequences, True)])
    assert merged.basket_first_E[:7].tolist() == list(range(7))
    assert merged.basket_end_E[:7].tolist() == list(range(1, 8))
    assert merged.item_E[np.flatnonzero(is_target(merged))].tolist() == [2, 3, 5, 6, 7, 3, 4, 5, 11, 12]
    assert next_basket(merged, np.array([0, 2, 7, 8]), rng).tolist() == [1, -1, 10, 10]
    again = shuffled(merged, rng)
    assert again.item_E[:7].tolist() == single.item_E.tolist()
    assert sorted(again.item_E[7:10].tolist()) == [0, 1, 2]
    assert shuffled(single, rng) is single
    cut = without_last_targets(event_table(EVENTS.sequences, True), [0])
    assert cut.item_E[np.flatnonzero(is_target(cut))].tolist() == [3, 11, 12]


def test_windows_without_anything_to_ask_for_are_left_out():
    events = event_table(rows_of([[[0], [1, 2, 3, 4, 5, 6], [7], [8]], [[9, 10], [11], [12]]]), True)
    one = np.ones(len(events.item_E), np.int64)
    assert window_ends(events, 2, one, 99).tolist() == [2]
    assert window_ends(events, 2, 2 * one, 99).tolist() == [2]
    assert num_batches(task_of(), 1) == 2


def test_how_often_items_are_asked_for():
    events = event_table(EVENTS.sequences, True)
    target_N = np.flatnonzero(is_target(events))
    assert events.item_E[target_N].tolist() == [3, 4, 5, 11, 12]
    assert _times_asked(events, target_N).tolist() == [3, 0.5, 0.5, 0.5, 0.5]


def test_places_of_baskets_in_lists():
    lists, targets = torch.tensor([[5, 3, 1, -1], [2, 4, 0, 1]]), torch.tensor([[1, 9, 5], [4, NO_ITEM, NO_ITEM]])
    found = item_positions(lists, targets).nan_to_num(-1).tolist()
    assert found == [[2, 2**31 - 1, 0], [1, -1, -1]]
    found = item_positions(lists, targets, [[3], [2]]).nan_to_num(-1).tolist()
    assert found == [[1, 2**31 - 1, 0], [0, -1, -1]]
