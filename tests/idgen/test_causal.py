"""Decoder-only backbones: beams that share a prompt against one row a beam, labels against a plain loss."""

import pytest
import torch
from tiny_causal import FAMILIES, tiny_causal

from idgen.backbones import causal

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
    state = causal.start(model, PROMPTS, MASK)
    nothing = torch.zeros(2, 1, dtype=torch.long)
    hidden_BKD, state = causal.step(model, state, nothing, nothing, 0)
    for user, prompt in enumerate(prompts):
        assert torch.allclose(hidden_BKD[user, 0], plain_hidden(model, prompt), atol=1e-5)
    first = torch.tensor([[4, 6, 11], [2, 30, 4]])
    hidden_BKD, state = causal.step(model, state, first, torch.zeros_like(first), 1)
    for user, prompt in enumerate(prompts):
        for beam in range(3):
            expected = plain_hidden(model, [*prompt, int(first[user, beam])])
            assert torch.allclose(hidden_BKD[user, beam], expected, atol=1e-5)
    parent = torch.tensor([[2, 0], [1, 1]])
    second = torch.tensor([[9, 13], [21, 5]])
    hidden_BKD, state = causal.step(model, state, second, parent, 2)
    parent_3 = torch.tensor([[1, 0, 1], [0, 1, 1]])
    third = torch.tensor([[33, 2, 5], [17, 17, 6]])
    hidden_3, state = causal.step(model, state, third, parent_3, 3)
    for user, prompt in enumerate(prompts):
        for beam in range(2):
            path = [int(first[user, parent[user, beam]]), int(second[user, beam])]
            assert torch.allclose(hidden_BKD[user, beam], plain_hidden(model, [*prompt, *path]), atol=1e-5)
        for beam in range(3):
            before = int(parent_3[user, beam])
            path = [int(first[user, parent[user, before]]), int(second[user, before]), int(third[user, beam])]
            assert torch.allclose(hidden_3[user, beam], plain_hidden(model, [*prompt, *path]), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_predicted_by_the_position_before(family):
    model = tiny_causal(family)
    target_BT = torch.tensor([[11, 1, -100], [20, 21, 1]])
    batch = causal.labelled(PROMPTS, MASK, target_BT, padding=0)
    assert batch["input_ids"].tolist() == [[5, 9, 12, 7, 11, 1], [8, 3, 20, 21, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100, -100, 11, 1], [-100, -100, 20, 21, 1, -100]]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1] * 5 + [0]]
    counts = batch["labels"] != -100
    logit_RV = causal.token_logits(model, causal.target_states(model, batch)[counts])
    loss = torch.nn.functional.cross_entropy(logit_RV, batch["labels"][counts])
    plain = model(**batch).loss  # transformers shifts the labels by itself
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-6)
