"""Decoder-only backbones: beams that share a prompt against one row a beam, rows against prompts with targets."""

import pytest
import torch
from tiny_causal import FAMILIES, tiny_causal

from idgen.backbones.causal import Causal, rows

CAUSAL = Causal()
PROMPTS = torch.tensor([[5, 9, 12, 7], [8, 3, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def plain_hidden(model, tokens):
    """Hidden state at the last of these tokens, in a row of its own without padding."""
    return model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0, -1]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_beams_are_rows_of_their_own(family):
    model = tiny_causal(family)
    prompts = [row[mask > 0].tolist() for row, mask in zip(PROMPTS, MASK, strict=True)]
    state = CAUSAL.start(model, PROMPTS, MASK)
    nothing = torch.zeros(2, 1, dtype=torch.long)
    hidden_BKD, state = CAUSAL.step(model, state, nothing, nothing, 0)
    for user, prompt in enumerate(prompts):
        assert torch.allclose(hidden_BKD[user, 0], plain_hidden(model, prompt), atol=1e-5)
    first = torch.tensor([[4, 6, 11], [2, 30, 4]])
    hidden_BKD, state = CAUSAL.step(model, state, first, torch.zeros_like(first), 1)
    for user, prompt in enumerate(prompts):
        for beam in range(3):
            expected = plain_hidden(model, [*prompt, int(first[user, beam])])
            assert torch.allclose(hidden_BKD[user, beam], expected, atol=1e-5)
    parent = torch.tensor([[2, 0], [1, 1]])
    second = torch.tensor([[9, 13], [21, 5]])
    hidden_BKD, state = CAUSAL.step(model, state, second, parent, 2)
    parent_3 = torch.tensor([[1, 0, 1], [0, 1, 1]])
    third = torch.tensor([[33, 2, 5], [17, 17, 6]])
    hidden_3, state = CAUSAL.step(model, state, third, parent_3, 3)
    for user, prompt in enumerate(prompts):
        for beam in range(2):
            path = [int(first[user, parent[user, beam]]), int(second[user, beam])]
            assert torch.allclose(hidden_BKD[user, beam], plain_hidden(model, [*prompt, *path]), atol=1e-5)
        for beam in range(3):
            before = int(parent_3[user, beam])
            path = [int(first[user, parent[user, before]]), int(second[user, before]), int(third[user, beam])]
            assert torch.allclose(hidden_3[user, beam], plain_hidden(model, [*prompt, *path]), atol=1e-5)


def test_a_prompt_and_its_target_are_one_row():
    target_BT = torch.tensor([[11, 1, -100], [20, 21, 1]])
    row = rows({"input_ids": PROMPTS, "attention_mask": MASK, "labels": target_BT})
    assert row["input_ids"].tolist() == [[5, 9, 12, 7, 11, 1], [8, 3, 20, 21, 1, 0]]
    assert row["labels"].tolist() == [[-100, -100, -100, -100, 11, 1], [-100, -100, 20, 21, 1, -100]]
    assert row["attention_mask"].tolist() == [[1] * 6, [1] * 5 + [0]]
    same = rows({"input_ids": row["input_ids"], "attention_mask": row["attention_mask"], "row_labels": row["labels"]})
    assert all(torch.equal(same[name], row[name]) for name in row)
