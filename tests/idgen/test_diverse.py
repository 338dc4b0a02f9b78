"""Diverse beam search: greedy without a penalty, hand-computed choices with one, lengths respected."""

from __future__ import annotations

import pytest
import torch
from tiny_t5 import ragged_inputs, tiny_t5

from idgen.decode import evaluating
from idgen.diverse import _choose, diverse_beam_search

MODEL = tiny_t5(2)
PAD, EOS = 0, 1


def written(row: torch.Tensor) -> list[int]:
    return [token for token in row.tolist() if token != PAD]


def reference(model, inputs, mask, groups, penalty, min_length, max_length):
    """One input, one group and one step at a time through the model's own forward pass, without caches."""
    sequences, scores = [[PAD] for _ in range(groups)], [0.0] * groups
    for step in range(max_length - 1):
        chosen: list[int] = []
        for group in range(groups):
            if sequences[group][-1] == EOS:
                continue
            with evaluating(model):
                logit_V = model(
                    input_ids=inputs, attention_mask=mask, decoder_input_ids=torch.tensor([sequences[group]])
                ).logits[0, -1]
            score_V = torch.log_softmax(logit_V, -1)
            score_V[PAD] = -torch.inf
            if step + 1 < min_length:
                score_V[EOS] = -torch.inf
            for token in chosen:
                score_V[token] -= penalty
            token = int(score_V.argmax())
            chosen.append(token)
            scores[group] += float(score_V[token])
            sequences[group].append(token)
    ranked = sorted(
        ((score / (len(sequence) - 1), sequence[1:]) for score, sequence in zip(scores, sequences, strict=True)),
        key=lambda pair: -pair[0],
    )
    return [sequence for _, sequence in ranked], [score for score, _ in ranked]


@pytest.mark.parametrize(("penalty", "min_length", "max_length"), [(0.7, 1, 6), (3.0, 4, 8), (0.0, 1, 5)])
def test_equals_the_reference_in_any_batch(penalty, min_length, max_length):
    lengths = [5, 2, 8]
    inputs, mask = ragged_inputs(lengths)
    beams = diverse_beam_search(MODEL, inputs, mask, 4, penalty, min_length, max_length)
    for row, length in enumerate(lengths):
        texts, scores = reference(
            MODEL, inputs[row : row + 1, :length], mask[row : row + 1, :length], 4, penalty, min_length, max_length
        )
        assert [written(tokens) for tokens in beams.token_BGT[row]] == texts
        torch.testing.assert_close(beams.score_BG[row], torch.tensor(scores), atol=1e-5, rtol=1e-5)


def test_one_group_without_penalty_is_hugging_face_greedy():
    inputs, mask = ragged_inputs([5, 2, 8, 3])
    ours = diverse_beam_search(MODEL, inputs, mask, 1, 0.0, min_length=3, max_length=9)
    theirs = MODEL.generate(
        input_ids=inputs,
        attention_mask=mask,
        num_beams=1,
        do_sample=False,
        min_length=3,
        max_length=9,
        suppress_tokens=[PAD],
    )
    assert [written(row) for row in ours.token_BGT[:, 0]] == [written(row[1:]) for row in theirs]


def test_a_large_penalty_makes_all_first_tokens_different():
    inputs, mask = ragged_inputs([4, 7])
    beams = diverse_beam_search(MODEL, inputs, mask, 10, 1e4, 1, 6)
    for row in beams.token_BGT:
        assert len(set(row[:, 0].tolist())) == 10
    plain = diverse_beam_search(MODEL, inputs, mask, 10, 0.0, 1, 6)
    assert all(len(set(map(tuple, row.tolist()))) == 1 for row in plain.token_BGT)
    assert (beams.score_BG[:, :-1] >= beams.score_BG[:, 1:]).all()


def test_choices_and_scores_by_hand():
    log_prob = torch.tensor([[[-0.2, -1.0, -3.0]] * 4])
    none = torch.zeros(1, 4, dtype=torch.bool)
    token, gain = _choose(log_prob, none, 0.5)
    assert token.tolist() == [[0, 0, 1, 0]]  # -0.2 | -0.7 | -1.2 against -1.0 | -1.2 against -1.5
    torch.testing.assert_close(gain, torch.tensor([[-0.2, -0.7, -1.0, -1.2]]))
    ended_first = torch.tensor([[True, False, False, False]])
    token, gain = _choose(log_prob, ended_first, 0.5)
    torch.testing.assert_close(gain[:, 1:], torch.tensor([[-0.2, -0.7, -1.0]]))  # an ended group does not count


def test_lengths():
    inputs, mask = ragged_inputs([4, 7])
    long = diverse_beam_search(MODEL, inputs, mask, 5, 1.0, min_length=6, max_length=9)
    for row in long.token_BGT.flatten(0, 1):
        tokens = written(row)
        assert EOS not in tokens[:5]
        assert 6 <= len(tokens) <= 8
    with pytest.raises(ValueError, match="num_groups is 0"):
        diverse_beam_search(MODEL, inputs, mask, 0)
