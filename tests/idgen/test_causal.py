"""Decoder-only backbones: beams that share a prompt against one row a beam, rows against prompts with targets."""

import pytest
import torch
from exact_scores import score_catalogue
from tiny_causal import FAMILIES, tiny_causal

from distill.pairing import build_student
from idgen.backbones.causal import Causal, rows
from idgen.decode import constrained_beam_search
from idgen.trie import Trie

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


def tiny_with_windows(window, num_layers=4):
    """Qwen2 whose second half of layers sees a window."""
    windows = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": num_layers // 2}
    return tiny_causal("qwen2", num_hidden_layers=num_layers, **windows)


def test_the_search_goes_through_layers_with_a_sliding_window():
    """A row fits into the window; what all beams have read does not."""
    model, trie = tiny_with_windows(9), Trie.build([[3, 4, 9], [3, 4, 7], [7, 8, 3], [12, 5, 5], [13, 2, 9]], 1)
    item_BK, score_BK = constrained_beam_search(model, PROMPTS, MASK, trie, 5)
    best_BK, order_BK = score_catalogue(model, PROMPTS, MASK, trie).sort(1, descending=True)
    assert item_BK.tolist() == order_BK.tolist()
    assert torch.allclose(score_BK, best_BK, atol=1e-4)


@torch.no_grad()
def test_kept_layers_keep_their_kind_of_attention():
    teacher = tiny_with_windows(3)
    assert teacher.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    student = build_student(teacher)
    assert student.config.layer_types == ["full_attention", "sliding_attention"]
    tokens, calls = torch.arange(2, 12)[None], {}
    for name, layer in (("teacher", teacher.model.layers[2]), ("student", student.model.layers[1])):
        layer.register_forward_hook(lambda _, __, output, name=name: calls.update({name: output}))
    for layer in (*teacher.model.layers[:2], student.model.layers[0]):  # let everything through
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    student.model(input_ids=tokens, use_cache=False)
    teacher.model(input_ids=tokens, use_cache=False)
    assert torch.allclose(calls["teacher"], calls["student"], atol=1e-5)


def test_a_prompt_and_its_target_are_one_row():
    target_BT = torch.tensor([[11, 1, -100], [20, 21, 1]])
    row = rows({"input_ids": PROMPTS, "attention_mask": MASK, "labels": target_BT})
    assert row["input_ids"].tolist() == [[5, 9, 12, 7, 11, 1], [8, 3, 20, 21, 1, 0]]
    assert row["labels"].tolist() == [[-100, -100, -100, -100, 11, 1], [-100, -100, 20, 21, 1, -100]]
    assert row["attention_mask"].tolist() == [[1] * 6, [1] * 5 + [0]]
    same = rows({"input_ids": row["input_ids"], "attention_mask": row["attention_mask"], "row_labels": row["labels"]})
    assert all(torch.equal(same[name], row[name]) for name in row)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_row_is_scored_from_left_to_right_and_alone(family):
    """Every token of a row from those before it: whatever is changed at or behind a place, its prediction stays."""
    model = tiny_causal(family)
    token_BW = torch.tensor([[5, 9, 12, 7, 31, 2], [8, 3, 20, 1, 0, 0], [22, 14, 17, 4, 6, 0]])
    length_B = torch.tensor([6, 4, 5])
    mask_BW = (torch.arange(6) < length_B[:, None]).long()
    label_BW = token_BW.masked_fill(mask_BW == 0, -100)
    label_BW[:, 0] = -100
    label_BW[2, 1:4] = -100  # a synthetic history: its last item alone is a target

    def logits(tokens, labels=label_BW, mask=mask_BW):
        hidden_RD, target_R = CAUSAL.predictions(
            model, {"input_ids": tokens, "attention_mask": mask, "row_labels": labels}
        )
        return CAUSAL.token_logits(model, hidden_RD), target_R

    before_RV, target_R = logits(token_BW)
    assert target_R.tolist() == [9, 12, 7, 31, 2, 3, 20, 1, 6]
    places = (label_BW != -100).nonzero().tolist()
    for row, first in places:
        token, label = token_BW.clone(), label_BW.clone()
        token[row, first:] = (token[row, first:] + 13) % 40  # padding too
        label[row, first:] = torch.where(label[row, first:] == -100, -100, token[row, first:])
        moved_R = (logits(token, label)[0] - before_RV).abs().amax(1)
        behind_R = torch.tensor([user == row and place > first for user, place in places])
        assert not behind_R.any() or float(moved_R[behind_R].min()) > 1e-2
        assert float(moved_R[~behind_R].max()) < 1e-5
    for row, length in enumerate(length_B):
        cut = (slice(row, row + 1), slice(length))
        alone_RV, _ = logits(token_BW[cut], label_BW[cut], mask_BW[cut])
        mine_R = torch.tensor([user == row for user, _ in places])
        assert torch.allclose(alone_RV, before_RV[mine_R], atol=1e-4)
