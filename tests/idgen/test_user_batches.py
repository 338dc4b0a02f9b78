"""Samples user by user: each one's own, all of them, and nobody else's."""

import pytest
import torch
from test_row_samples import DOMAIN, NUM_ITEMS, rows_of, task_of
from tiny_tasks import make_task, make_tokenizer

from idgen.config import SampleConfig
from idgen.samples import train_batches
from idgen.synthetic import nearest_items
from idgen.user_batches import samples_by_user, user_batches

TOKENIZER = make_tokenizer([DOMAIN])


def batches_of(task, users, seed=0):
    samples = samples_by_user(task)
    return list(user_batches(task, [samples[user] for user in users], torch.Generator().manual_seed(seed)))


def test_rows_of_users_are_those_of_an_epoch_without_synthetic_ones():
    near = nearest_items(torch.randn(NUM_ITEMS, 6, generator=torch.Generator().manual_seed(0)))
    task = task_of(neighbours=near, synthetic_share=0.4)
    trained = [user for user, sequence in enumerate(DOMAIN.clients.sequences) if len(sequence) > 3]
    batches = batches_of(task, range(len(trained)))
    assert len(batches) == len(samples_by_user(task)) == len(trained) == 3
    rows = []
    for user, batch in zip(trained, batches, strict=True):
        own = [10 + item for item in DOMAIN.clients.sequences[user][:-2]]
        targets = []
        for tokens, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["row_labels"], strict=True):
            row = tokens[mask > 0].tolist()
            assert any(own[start : start + len(row)] == row for start in range(len(own)))  # a stretch of the own ones
            assert labels[mask > 0].tolist() == [-100, *row[1:]]
            targets += row[1:]
            rows.append((row, [-100, *row[1:]]))
        assert sorted(targets) == sorted(own[1:])
    assert sorted(rows) == sorted(rows_of(task_of()))


def test_one_user_alone_has_the_batch_that_it_has_among_others():
    task = task_of()
    alone, among = batches_of(task, [2])[0], batches_of(task, [0, 2])[1]
    assert all(torch.equal(alone[name], among[name]) for name in alone)
    assert batches_of(task, []) == []


def test_prompts_with_a_single_target():
    task = make_task(DOMAIN, TOKENIZER, SampleConfig(templates="compact"))
    batches = batches_of(task, range(3))
    assert [len(batch["labels"]) for batch in batches] == [1, 6, 24]  # 4, 9, 27 events: all but the first and two
    whole = [row for batch in train_batches(task, 100, torch.Generator()) for row in batch["labels"].tolist()]
    assert sum(map(len, (batch["labels"] for batch in batches))) == len(whole)


def test_samples_of_several_users_are_refused():
    task = make_task(DOMAIN, TOKENIZER, SampleConfig(templates="compact", pairs=True))
    with pytest.raises(ValueError, match="pairs"):
        samples_by_user(task)
