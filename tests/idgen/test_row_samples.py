"""Samples for decoder-only models: rows whose items are all targets, IDs without an end token, synthetic histories."""

import numpy as np
import pytest
import torch
from tiny_tasks import make_domain, make_ids, make_tokenizer

from idgen.config import SampleConfig
from idgen.events import event_table, window_ends
from idgen.item_ids import ItemIds
from idgen.samples import encode_histories, eval_batches, num_batches, num_samples, train_batches
from idgen.synthetic import nearest_items
from idgen.tasks import build_task

DOMAIN = make_domain()
TOKENIZER = make_tokenizer([DOMAIN])
NUM_ITEMS = len(DOMAIN.item_keys)
ONE_TOKEN = ItemIds([str(i) for i in range(NUM_ITEMS)], [[10 + i] for i in range(NUM_ITEMS)], {})
EVERY = {"templates": "history", "max_source_tokens": 200}


def task_of(item_ids=ONE_TOKEN, neighbours=None, hold_out=True, **settings):
    config = SampleConfig(**{**EVERY, "max_history": 4, **settings})
    return build_task(DOMAIN, DOMAIN.clients, item_ids, TOKENIZER, config, hold_out, neighbours)


def rows_of(task, seed=0):
    found = []
    for batch in train_batches(task, 3, torch.Generator().manual_seed(seed)):
        for tokens, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["row_labels"], strict=True):
            assert bool((mask.diff() <= 0).all())
            found.append((tokens[mask > 0].tolist(), labels[mask > 0].tolist()))
            assert bool((labels[mask == 0] == -100).all())
    return found


def test_every_event_with_a_history_is_a_target_once():
    targets = []
    for tokens, labels in rows_of(task_of()):
        assert len(tokens) <= 5  # four items before the last target
        assert labels == [-100, *tokens[1:]]
        targets += labels[1:]
    expected = [10 + item for sequence in DOMAIN.clients.sequences for item in sequence[1:-2]]
    assert sorted(targets) == sorted(expected)


@pytest.mark.parametrize(("lengths", "longest"), [([9, 3, 6], 4), ([30], 4), ([8, 8], 1), ([3, 20], 50)])
def test_windows_cover_the_training_parts(lengths, longest):
    events = event_table([list(range(n)) for n in lengths], True)
    covered = []
    free = np.zeros(len(events.item_E), np.int64)
    for end in window_ends(events, longest, free, 0):
        first = max(int(events.first_E[end]), end - longest)
        covered += range(first + 1, end + 1)
    expected = [
        start + place
        for start, n in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True)
        for place in range(1, n - 2)
    ]
    assert sorted(covered) == expected


@pytest.mark.parametrize("room", [9, 12, 30])
def test_windows_hold_what_fits(room):
    cost = np.array([3, 4, 2, 4, 4, 1, 2, 4, 3, 3, 4, 2])
    events = event_table([list(range(7)), list(range(5))], False)
    targets = []
    for end in window_ends(events, 3, cost, room):
        first = end
        while first > events.first_E[end] and end - first < 3 and cost[first - 1 : end + 1].sum() <= room:
            first -= 1
        assert first < end
        targets += range(first + 1, end + 1)
    assert targets == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11]


def test_no_target_is_lost_where_rows_are_short():
    ids = make_ids(DOMAIN, TOKENIZER)
    longest = max(map(len, ids.token_ids)) + 1
    found = sum(
        labels.count(TOKENIZER.eos_token_id) for _, labels in rows_of(task_of(ids, max_source_tokens=2 * longest))
    )
    assert found == sum(len(sequence) - 3 for sequence in DOMAIN.clients.sequences)
    with pytest.raises(ValueError, match="with two items needs up to"):
        task_of(ids, max_source_tokens=2 * longest - 1)


def test_rows_are_the_users_own_items_in_order():
    parts = [[10 + item for item in sequence[:-2]] for sequence in DOMAIN.clients.sequences]
    for tokens, _ in rows_of(task_of()):
        assert any(tokens == part[i : i + len(tokens)] for part in parts for i in range(len(part)))
    dropped = rows_of(task_of(item_dropout=0.5))
    assert sum(len(tokens) for tokens, _ in dropped) < sum(len(tokens) for tokens, _ in rows_of(task_of()))


def test_ids_of_several_tokens_are_closed_in_rows_and_prompts():
    ids, end = make_ids(DOMAIN, TOKENIZER), TOKENIZER.eos_token_id
    task = task_of(ids)
    assert task.trie.eos_token_id == end
    for tokens, labels in rows_of(task):
        assert tokens[-1] == end
        first = tokens.index(end) + 1
        assert labels == [-100] * first + tokens[first:]
    prompt, mask = encode_histories(task, [[2, 0]])
    assert prompt[0].tolist() == [*ids.token_ids[2], end, *ids.token_ids[0], end]
    assert bool(mask.all())


def test_a_prompt_of_one_token_ids_is_the_history_alone():
    task = task_of()
    assert task.trie.eos_token_id is None
    assert task.trie.max_length == 1
    for user_B, ids_BS, mask_BS, target_B in eval_batches(task, "test", 3):
        for user, tokens, mask, target in zip(user_B.tolist(), ids_BS, mask_BS, target_B.tolist(), strict=True):
            sequence = DOMAIN.clients.sequences[user]
            assert tokens[mask > 0].tolist() == [10 + item for item in sequence[:-1]][-4:]
            assert target == sequence[-1]


def near_items(random_share=0.0):
    vectors = torch.nn.functional.normalize(
        torch.randn(NUM_ITEMS, 6, generator=torch.Generator().manual_seed(0)), dim=1
    )
    return nearest_items(vectors, count=2)


LAST = {"templates": "compact", "max_source_tokens": 64}


@pytest.mark.parametrize("kind", [EVERY, LAST], ids=["every", "last"])
def test_synthetic_histories_come_on_top_and_have_one_target(kind):
    near = near_items()
    plain = task_of(**kind)
    task = task_of(neighbours=near, **kind, synthetic_share=0.75)
    assert num_samples(task) == 4 * num_samples(plain)
    batches = list(train_batches([task], 3, torch.Generator().manual_seed(1)))
    assert len(batches) == num_batches(task, 3)
    if kind is LAST:
        assert sum(len(batch["labels"]) for batch in batches) == num_samples(task)
        return
    rows = rows_of(task, seed=1)
    of_users = {tuple(tokens) for tokens, _ in rows_of(plain)}
    from_texts = [(tokens, labels) for tokens, labels in rows if tuple(tokens) not in of_users]
    assert len(from_texts) > len(rows) / 2
    for tokens, labels in from_texts:
        assert labels == [-100] * (len(tokens) - 1) + tokens[-1:]
    near_target = [token - 10 in near.item_IK[tokens[-1] - 10] for tokens, _ in from_texts for token in tokens[:-1]]
    assert np.mean(near_target) > 0.6  # a quarter of the items are any items


def test_synthetic_histories_read_no_interaction():
    """Other users, the same catalogue: the synthetic histories of the same seed stay what they were."""
    near = near_items()

    def found(sequences):
        domain = DOMAIN.__class__(**{**vars(DOMAIN), "clients": DOMAIN.clients._replace(sequences=sequences)})
        config = SampleConfig(**{**EVERY, "max_history": 4, "synthetic_share": 0.5})
        task = build_task(domain, domain.clients, ONE_TOKEN, TOKENIZER, config, True, near)
        rows = rows_of(task)
        return sorted(tokens for tokens, labels in rows if labels[-1] != -100 and set(labels[:-1]) == {-100})

    old = DOMAIN.clients.sequences
    new = [[(item + 1) % NUM_ITEMS for item in sequence] for sequence in old]
    synthetic_old = [row for row in found(old) if row not in [[10 + i for i in s[:2]] for s in old]]
    synthetic_new = [row for row in found(new) if row not in [[10 + i for i in s[:2]] for s in new]]
    assert synthetic_old == synthetic_new
