"""SASRec: a hand number, plain loops, causality, padding, a pattern that needs the order, and what may train it."""

import math

import pytest
import torch
from torch.nn import functional

from fedecider.baselines import sasrec
from fedecider.baselines.fitting import Pooled
from fedecider.baselines.sasrec import Sasrec, SasrecConfig, backward_next_items, fit, pack, scores, train
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import PROTOCOLS, rank_held_out

SMALL = {"embedding_size": 8, "max_length": 6, "batch_size": 4, "num_epochs": 2}
SEQUENCES = [[0, 3, 5, 1, 7, 2], [4, 2, 6, 0, 1], [8, 1, 0, 2, 5, 3, 4, 6, 7], [5, 4, 3]]
USERS = torch.arange(4)


def small_model(**changes):
    torch.manual_seed(5)
    model = Sasrec(9, SasrecConfig(**{**SMALL, "num_layers": 2, "num_heads": 2, **changes}))
    for parameter in model.parameters():  # far from the small start, so that every part matters
        torch.nn.init.normal_(parameter, std=0.7)
    return model


def counting(num_users, num_items=30, length=9):
    """Users count up or down by one, so that the last item alone does not tell the next one."""
    steps = [1 if user % 2 else -1 for user in range(num_users)]
    return [[(7 * user + step * event) % num_items for event in range(length)] for user, step in enumerate(steps)]


def test_position_counts_from_the_newest_event_by_hand():
    config = SasrecConfig(embedding_size=2, num_layers=1, num_heads=1, max_length=3)
    model = Sasrec(3, config)
    with torch.no_grad():
        model.item_ID.copy_(torch.tensor([[0.1, 0.0], [2.0, 5.0], [-1.0, 0.5]]))
        model.position_LD.copy_(torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, -9.0]]))
        for parameter in model.blocks.parameters():
            parameter.zero_()
    # item 0 at place 0: sqrt(2) (0.1, 0) + (0, 1), normalised (-1, 1); at place 1 (0.14, 0), normalised (1, -1)
    state_LD = model(torch.tensor([[0, 0, 2]]), torch.tensor([2]))[0, :2]
    torch.testing.assert_close(state_LD, torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), rtol=2e-3, atol=0)
    logit_I = model.catalogue(torch.tensor([[0, 0, 2]]), torch.tensor([2]))[0]
    torch.testing.assert_close(logit_I, torch.tensor([-0.1, 3.0, 1.5]), rtol=1e-3, atol=0)


def test_states_equal_attention_written_out():
    model, items = small_model(), [3, 8, 0, 5]
    x = [model.item_ID[item] * math.sqrt(8) + model.position_LD[3 - n] for n, item in enumerate(items)]
    for block in model.blocks:
        rows = [block.query_key_value(block.attention_norm(row)).view(3, 2, 4) for row in x]  # what, head, dim
        read = []
        for n, row in enumerate(rows):
            heads = []
            for head in range(2):
                weight = torch.stack([row[0, head] @ older[1, head] / 2 for older in rows[: n + 1]]).softmax(0)
                heads.append(sum(w * older[2, head] for w, older in zip(weight, rows[: n + 1], strict=True)))
            read.append(x[n] + block.mixed(torch.cat(heads)))
        x = [row + block.feed(block.feed_norm(row)) for row in read]
    found_LD = model(torch.tensor([items]), torch.tensor([4]))[0]
    torch.testing.assert_close(found_LD, torch.stack([model.norm(row) for row in x]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_later_events_do_not_change_earlier_states(dropout):
    model, states = small_model(), []
    for items in ([3, 8, 0, 5, 1], [3, 8, 0, 7, 1]):
        torch.manual_seed(1)  # the same dropout
        states.append(model(torch.tensor([items]), torch.tensor([5]), dropout)[0])
    same = torch.isclose(*states, atol=1e-6).all(1)
    assert same.tolist() == [True, True, True, False, False]


def test_padding_is_without_effect_on_scores_and_gradients():
    model, parts = small_model(), [[3, 8], [0, 5, 1, 2, 7, 4], [6]]
    together = model.catalogue(*pack(parts, 6))
    alone = torch.cat([model.catalogue(*pack([part], 6)) for part in parts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    item_BL, length_B = pack(parts, 6)
    gradients = []
    for padding in (0, 8):
        model.zero_grad()
        filled_BL = torch.where(sasrec.is_event(item_BL, length_B), item_BL, padding)
        backward_next_items(model, filled_BL, length_B, 0.0)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.equal(*gradients)


def test_loss_and_gradients_in_chunks_equal_one_cross_entropy(monkeypatch):
    model, parts = small_model(), [[3, 8, 8], [0, 5, 1, 2, 7, 4], [6, 1]]
    monkeypatch.setattr(sasrec, "LOGITS_PER_CHUNK", 30)  # 3 of 8 targets at a time
    loss = backward_next_items(model, *pack(parts, 6), 0.0)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    item_BL, length_B = pack([part[:-1] for part in parts], 6)
    state_BLD = model(item_BL, length_B)
    states = torch.cat([state_BLD[row, : len(part) - 1] for row, part in enumerate(parts)])
    targets = torch.tensor([item for part in parts for item in part[1:]])
    expected = functional.cross_entropy(states @ model.item_ID.T, targets)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()], rtol=1e-3, atol=1e-5)


def test_train_parts_and_whole_public_sequences_are_learnt_from_the_newest_events():
    extra = [[7], [6, 5], [0, 1, 2, 3, 4, 5]]
    item_SL, length_S = sasrec.training_sequences(SEQUENCES, 9, extra, 4)
    rows = [row[:length].tolist() for row, length in zip(item_SL, length_S, strict=True)]
    assert rows == [[0, 3, 5, 1], [4, 2, 6], [0, 2, 5, 3, 4], [6, 5], [1, 2, 3, 4, 5]]


def test_learns_a_pattern_that_needs_two_events():
    sequences = counting(60)
    config = SasrecConfig(embedding_size=16, dropout=0.1, learning_rate=0.01, batch_size=30, num_epochs=60)
    model = train(Pooled(sequences, 30), config)
    for split in ("valid", "test"):
        positions = rank_held_out(scores(model, sequences, split), sequences, 30, split)
        assert mean_metrics(positions, (1,))["hit@1"] > 0.95


def test_held_out_items_do_not_train_and_the_validation_item_is_context_of_the_test():
    config = SasrecConfig(**SMALL)
    changed = [[*SEQUENCES[0][:-2], 8, 6], *SEQUENCES[1:]]
    one, other = (train(Pooled(sequences, 9, seed=3), config) for sequences in (SEQUENCES, changed))
    assert torch.equal(one.item_ID, other.item_ID)
    assert torch.equal(scores(one, SEQUENCES)(USERS), scores(other, changed)(USERS))
    test = [scores(one, sequences, "test")(USERS) for sequences in (SEQUENCES, changed)]
    assert test[0].eq(test[1]).all(1).tolist() == [False, True, True, True]
    last = [[*sequence[:-1], 0] for sequence in SEQUENCES]
    assert torch.equal(test[0], scores(one, last, "test")(USERS))
    seen = train(Pooled([[*SEQUENCES[0][:-3], 8, 7, 2], *SEQUENCES[1:]], 9, seed=3), config)  # a train event does
    assert not torch.equal(one.item_ID, seen.item_ID)


def test_scores_depend_on_the_seed_and_not_on_the_protocol_or_the_callers_generator():
    config = SasrecConfig(**SMALL)
    first = fit(Pooled(SEQUENCES, 9, seed=3), config)(USERS)
    torch.manual_seed(99)
    expected = torch.rand(1)
    torch.manual_seed(99)
    again = fit(Pooled(SEQUENCES, 9, PROTOCOLS["paper"], 3), config)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, again(USERS))
    torch.testing.assert_close(again(torch.tensor([3, 1])), first[[3, 1]], rtol=1e-4, atol=1e-6)
    assert not torch.equal(first, fit(Pooled(SEQUENCES, 9, seed=4), config)(USERS))


def test_a_start_from_vectors_is_trained_on():
    start_ID = torch.nn.functional.normalize(torch.randn(9, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    config = SasrecConfig(**{**SMALL, "embedding_size": 8, "num_epochs": 1, "learning_rate": 1e-9})
    still = train(Pooled(SEQUENCES, 9, seed=3), config, start_ID=start_ID)
    torch.testing.assert_close(still.item_ID.data, start_ID, rtol=0, atol=1e-5)
    plain = train(Pooled(SEQUENCES, 9, seed=3), config)
    torch.testing.assert_close(still.position_LD, plain.position_LD, rtol=0, atol=1e-6)  # all else starts as it did
    config = SasrecConfig(**{**SMALL, "embedding_size": 8})
    moved = train(Pooled(SEQUENCES, 9, seed=3), config, start_ID=start_ID)
    assert (moved.item_ID - start_ID).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"got item vectors of the shape \(9, 7\), expected \(9, 8\)"):
        train(Pooled(SEQUENCES, 9, seed=3), config, start_ID=start_ID[:, :7])


def test_the_best_validated_epoch_is_kept_and_patience_ends_training():
    figures = iter([0.1, 0.6, 0.5, 0.2, 0.9])
    calls = []

    def valid(score):
        calls.append(score(USERS))
        return next(figures)

    changes = {**SMALL, "num_epochs": 9, "validate_every": 2, "patience": 2}
    score = fit(Pooled(SEQUENCES, 9, seed=3, valid=valid), SasrecConfig(**changes))
    assert len(calls) == 4  # after epochs 2, 4, 6, 8
    after_4 = fit(Pooled(SEQUENCES, 9, seed=3), SasrecConfig(**{**changes, "num_epochs": 4}))
    assert torch.equal(score(USERS), after_4(USERS))
    assert not torch.equal(score(USERS), calls[-1])
    odd = SasrecConfig(**{**changes, "num_epochs": 3})  # the last turn is short
    once = SasrecConfig(**{**changes, "num_epochs": 3, "validate_every": 1})
    assert torch.equal(*(fit(Pooled(SEQUENCES, 9, seed=3), c)(USERS) for c in (odd, once)))
