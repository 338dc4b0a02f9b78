"""Constrained beam search: catalogue IDs only, exact with enough beams, equal to HF generate, batch-invariant."""

from __future__ import annotations

import copy
import random
from itertools import product

import peft
import pytest
import torch
from exact_scores import allowed_tokens, score_catalogue
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_t5 import VOCAB, ragged_inputs, tiny_t5

from fedecider.evaluation.metrics import NOT_RANKED
from idgen import decode
from idgen.backbones.t5 import T5
from idgen.decode import constrained_beam_search, item_positions, stable_topk
from idgen.trie import Trie

EOS = 1
MODEL = tiny_t5()


def random_ids(count: int, seed: int = 0, longest: int = 5, first: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    ids: set[tuple[int, ...]] = set()
    while len(ids) < count:
        ids.add((rng.randrange(3, first), *(rng.randrange(3, VOCAB) for _ in range(rng.randrange(longest)))))
    return [list(tokens) for tokens in sorted(ids, key=lambda tokens: rng.random())]


def exact_ranking(model, inputs, mask, trie):
    score, item = score_catalogue(model, inputs, mask, trie).sort(dim=1, descending=True, stable=True)
    return item, score


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(3, 8), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12, unique=True),
    st.integers(0, 4),
)
def test_with_enough_beams_the_ranking_is_exhaustive_scoring(ids, surplus):
    trie = Trie.build(ids, EOS)  # many of these catalogues hold prefix IDs
    inputs, mask = ragged_inputs([6, 2, 4])
    num_beams = len(ids) + surplus
    item_BK, score_BK = constrained_beam_search(MODEL, inputs, mask, trie, num_beams)
    exact_item, exact_score = exact_ranking(MODEL, inputs, mask, trie)
    assert item_BK.shape == score_BK.shape == (3, num_beams)
    assert (item_BK[:, len(ids) :] == -1).all()
    assert (score_BK[:, len(ids) :] == -torch.inf).all()
    torch.testing.assert_close(score_BK[:, : len(ids)], exact_score, atol=2e-5, rtol=1e-5)
    gaps = (exact_score[:, :-1] - exact_score[:, 1:]) if len(ids) > 1 else torch.ones(1)
    if gaps.min() > 1e-4:
        assert torch.equal(item_BK[:, : len(ids)], exact_item)
    else:
        assert torch.equal(item_BK[:, : len(ids)].sort(1).values, exact_item.sort(1).values)


@pytest.mark.parametrize("surplus", [-30, 0, 3])
def test_ids_of_one_token_are_the_best_of_one_softmax(surplus, monkeypatch):
    monkeypatch.setattr(decode, "CACHED_LOGITS", 100)  # one user at a time
    tokens = list(range(3, VOCAB))
    random.Random(0).shuffle(tokens)
    trie = Trie.build([[token] for token in tokens], None)
    inputs, mask = ragged_inputs([6, 2, 4])
    exact = score_catalogue(MODEL, inputs, mask, trie)
    item_BK, score_BK = constrained_beam_search(MODEL, inputs, mask, trie, len(tokens) + surplus)
    wanted_score, wanted = exact.sort(dim=1, descending=True, stable=True)
    known = min(len(tokens), len(tokens) + surplus)
    assert torch.equal(item_BK[:, :known], wanted[:, :known])
    torch.testing.assert_close(score_BK[:, :known], wanted_score[:, :known], atol=2e-5, rtol=1e-5)
    assert (item_BK[:, known:] == -1).all()
    assert (score_BK[:, known:] == -torch.inf).all()


def test_equal_scores_of_one_token_ids_stand_in_the_order_of_items():
    model = tiny_t5()
    with torch.no_grad():
        model.shared.weight.zero_()
    trie = Trie.build([[9], [4], [7], [3]], None)
    inputs, mask = ragged_inputs([3])
    assert constrained_beam_search(model, inputs, mask, trie, 3)[0].tolist() == [[0, 1, 2]]


def test_one_item_catalogue():
    inputs, mask = ragged_inputs([3, 5])
    item_BK, score_BK = constrained_beam_search(MODEL, inputs, mask, Trie.build([[7, 4]], EOS), 3)
    assert item_BK.tolist() == [[0, -1, -1], [0, -1, -1]]
    assert torch.isfinite(score_BK[:, 0]).all()
    assert (score_BK[:, 1:] == -torch.inf).all()


def test_exact_scores_by_hand():
    """Log-softmax values along the forced sequence, among the tokens that may follow: 3 or 9, then 5 or 6, then the
    end."""
    inputs, mask = ragged_inputs([4])
    labels = torch.tensor([[9, 5, EOS]])
    logit_TV = MODEL(input_ids=inputs, attention_mask=mask, labels=labels).logits[0]
    wanted = torch.log_softmax(logit_TV[0, [3, 9]], 0)[1] + torch.log_softmax(logit_TV[1, [5, 6]], 0)[0]
    trie = Trie.build([[3], [9, 5], [9, 6]], EOS)
    assert score_catalogue(MODEL, inputs, mask, trie)[0, 1].item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("scaled", [True, False])
def test_equals_hugging_face_generate(scaled):
    model = MODEL if scaled else tiny_t5(3, tie_word_embeddings=False, feed_forward_proj="gated-gelu")
    assert model.config.scale_decoder_outputs is scaled
    ids = random_ids(60)
    trie = Trie.build(ids, EOS)
    inputs, mask = ragged_inputs([9, 3, 6, 1])
    item_BK, score_BK = constrained_beam_search(model, inputs, mask, trie, 5)
    assert not any(module.training for module in model.modules())
    output = model.generate(
        input_ids=inputs,
        attention_mask=mask,
        num_beams=5,
        num_return_sequences=5,
        max_length=20,
        renormalize_logits=True,
        length_penalty=0.0,
        early_stopping="never",  # the exact stopping rule
        prefix_allowed_tokens_fn=lambda _, prefix: allowed_tokens(trie, prefix[1:]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    item_of = {tuple(tokens): item for item, tokens in enumerate(ids)}
    written = [item_of[tuple(row[1 : row.index(EOS)])] for row in output.sequences.tolist()]
    assert item_BK.flatten().tolist() == written
    torch.testing.assert_close(score_BK.flatten(), output.sequences_scores, atol=1e-5, rtol=1e-5)
    assert len(set(item_BK[0].tolist())) == 5


def test_batch_size_and_padding_do_not_matter():
    trie = Trie.build(random_ids(50, seed=1), EOS)
    lengths = [7, 2, 11, 4, 1]
    inputs, mask = ragged_inputs(lengths)
    item_BK, score_BK = constrained_beam_search(MODEL, inputs, mask, trie, 6)
    for user, length in enumerate(lengths):
        rows = slice(user, user + 1)
        item_1K, score_1K = constrained_beam_search(MODEL, inputs[rows, :length], mask[rows, :length], trie, 6)
        assert item_1K[0].tolist() == item_BK[user].tolist()
        torch.testing.assert_close(score_1K[0], score_BK[user], atol=1e-5, rtol=1e-5)
    exact = score_catalogue(MODEL, inputs, mask, trie)
    alone = score_catalogue(MODEL, inputs[3:4, :4], mask[3:4, :4], trie)
    torch.testing.assert_close(exact[3:4], alone, atol=1e-5, rtol=1e-5)


def test_limited_logits_at_a_time_change_nothing(monkeypatch):
    trie = Trie.build(random_ids(50, seed=2), EOS)
    inputs, mask = ragged_inputs([5, 3, 8])
    expected = constrained_beam_search(MODEL, inputs, mask, trie, 4)
    monkeypatch.setattr(decode, "MAX_LOGITS", 3 * VOCAB)
    item_BK, score_BK = constrained_beam_search(MODEL, inputs, mask, trie, 4)
    assert torch.equal(item_BK, expected[0])
    torch.testing.assert_close(score_BK, expected[1], atol=1e-5, rtol=1e-5)


def test_tokens_that_no_beam_descends_from_are_dropped(monkeypatch):
    """Three beams over long IDs: kept tokens stay below all that were read, and nothing of the answer depends on it."""
    ids = [list(tokens) for tokens in product((3, 4, 5, 6), (7, 8), (9, 4), (10, 3))]  # a choice at every token
    trie, (inputs, mask) = Trie.build(ids, EOS), ragged_inputs([5, 3, 8])
    kept, step = [], T5.step

    def spied(self, model, state, *given):
        hidden, state = step(self, model, state, *given)
        kept.append(state.depth_BN.shape[1])
        return hidden, state

    monkeypatch.setattr(T5, "step", spied)
    item_BK, score_BK = constrained_beam_search(MODEL, inputs, mask, trie, 3)
    assert kept[-1] < 1 + 3 * (len(kept) - 1)
    exact_BI = score_catalogue(MODEL, inputs, mask, trie)
    torch.testing.assert_close(score_BK, exact_BI.gather(1, item_BK), atol=2e-5, rtol=1e-5)


def test_equal_scores_come_in_item_order_in_any_batch():
    model = tiny_t5()
    for parameter in model.parameters():
        parameter.data.zero_()
    ids = [[9], [4], [7], [3], [8]]
    inputs, mask = ragged_inputs([3, 5])
    item_BK, score_BK = constrained_beam_search(model, inputs, mask, Trie.build(ids, EOS), 5)
    assert item_BK.tolist() == [[0, 1, 2, 3, 4]] * 2
    torch.testing.assert_close(score_BK, torch.full((2, 5), -torch.tensor(5.0).log().item()))
    few, _ = constrained_beam_search(model, inputs, mask, Trie.build(ids, EOS), 2)
    assert few.tolist() == [[1, 3]] * 2  # all tie in step 0: the lower tokens (3 and 4) stay, then item order


def test_stable_topk_keeps_the_order_of_equals():
    score = torch.tensor([[1.0, 3.0, 3.0, -torch.inf, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0, 5.0, 6.0]])
    top, place = stable_topk(score, 3)
    assert place.tolist() == [[1, 2, 4], [5, 0, 1]]
    assert top.tolist() == [[3.0, 3.0, 3.0], [6.0, 5.0, 5.0]]
    assert stable_topk(score, 9)[0].shape == (2, 6)


def test_peft_wrapped_models_decode_with_their_adapter_and_keep_their_mode():
    wrapped = peft.get_peft_model(
        tiny_t5(), peft.LoraConfig(r=2, target_modules=["q", "k", "v", "o"], task_type="SEQ_2_SEQ_LM")
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    wrapped.train()
    trie = Trie.build(random_ids(6, seed=3), EOS)
    inputs, mask = ragged_inputs([4, 6])
    item_BK, score_BK = constrained_beam_search(wrapped, inputs, mask, trie, 6)
    assert all(module.training for module in wrapped.modules())
    exact_item, exact_score = exact_ranking(wrapped, inputs, mask, trie)
    assert torch.equal(item_BK, exact_item)
    torch.testing.assert_close(score_BK, exact_score, atol=2e-5, rtol=1e-5)
    plain = score_catalogue(MODEL, inputs, mask, trie)
    assert (plain - score_catalogue(wrapped, inputs, mask, trie)).abs().max() > 1e-2


def test_positions_by_hand():
    items = torch.tensor([[4, 7, 2, -1], [4, 7, 2, 9], [1, 2, 3, 4]])
    target = torch.tensor([2, 9, 8])
    assert item_positions(items, target).tolist() == [2, 3, NOT_RANKED]
    assert item_positions(items, target, [[4], [4, 2], [1]]).tolist() == [1, 1, NOT_RANKED]
    seen = [[4], [4, 9, 2], [1]]  # a target the user had before is no candidate
    assert item_positions(items, target, seen).tolist() == [1, NOT_RANKED, NOT_RANKED]
    with pytest.raises(ValueError, match="3 users, 2 targets"):
        item_positions(items, target[:2])


def test_a_diverged_model_is_an_error_not_a_bad_rank():
    broken = copy.deepcopy(MODEL)
    with torch.no_grad():
        broken.shared.weight[3, 0] = float("nan")
    inputs, mask = ragged_inputs([3])
    with pytest.raises(ValueError, match="not numbers"):
        constrained_beam_search(broken, inputs, mask, Trie.build([[3, 4], [5]], EOS), 2)


def test_bad_settings_are_refused():
    inputs, mask = ragged_inputs([2])
    with pytest.raises(ValueError, match="num_beams is 0"):
        constrained_beam_search(MODEL, inputs, mask, Trie.build([[3]], EOS), num_beams=0)
    with pytest.raises(ValueError, match="got a Linear"):
        constrained_beam_search(torch.nn.Linear(2, 2), inputs, mask, Trie.build([[3]], EOS), 2)
