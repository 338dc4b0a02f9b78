"""CentRAP: its loss by hand, its degenerate cases, and a structure that it must find."""

import math

import pytest
import torch

from fedecider.baselines.centrap import AdditiveTables, CentrapConfig, centrap_loss, fit
from fedecider.baselines.fitting import Pooled, validation_ndcg

SETTINGS = {"embedding_size": 8, "learning_rate": 3e-2, "num_epochs": 12, "batch_size": 60, "num_negatives": 2}


def checkerboard(num_users=24, num_items=12):
    """Every user likes the items of their parity, in an order of their own."""
    liked = [[item for item in range(num_items) if item % 2 == user % 2] for user in range(num_users)]
    return [
        items[turn % 6 :] + items[: turn % 6] for turn, items in ((user // 2, liked[user]) for user in range(num_users))
    ]


def test_the_loss_by_hand():
    """User 1: rows C (1, 2), (0, -1) and D (0.5, 0), (1, 1), so logits -0.5 and 1; D - C (-0.5, -2) and (1, 2)."""
    model = AdditiveTables(2, 3, 2, torch.Generator())
    with torch.no_grad():
        model.user_UD[1] = torch.tensor([1.0, -1.0])
        model.common_ID[:2] = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
        model.personal.weight[3:5] = torch.tensor([[0.5, 0.0], [1.0, 1.0]])
    config = CentrapConfig(distance_weight=0.5, sparsity_weight=0.3, weight_decay=0.25)
    loss = centrap_loss(model, torch.tensor([1]), torch.tensor([[0, 1]]), config, epoch=4)
    fit = (math.log1p(math.exp(0.5)) + math.log1p(math.exp(1.0))) / 2
    extra = math.tanh(0.5) * (0.3 * (1 + 2 + 0 + 1) / 4 - 0.5 * (0.25 + 4 + 1 + 4) / 4)
    assert loss.item() == pytest.approx(fit + extra + 0.25 * 2, abs=1e-6)


def test_only_rows_of_the_batch_have_gradients():
    model = AdditiveTables(2, 3, 4, torch.Generator().manual_seed(1))
    centrap_loss(model, torch.tensor([1]), torch.tensor([[0, 2]]), CentrapConfig(), epoch=0).backward()
    rows = model.personal.weight.grad.coalesce().indices()[0].tolist()
    assert rows == [3, 5]
    assert (model.common_ID.grad.abs().sum(1) > 0).tolist() == [True, False, True]


def test_it_finds_the_checkerboard():
    sequences = checkerboard()
    valid = validation_ndcg(sequences, 12)
    score = fit(Pooled(sequences, 12, valid=valid), CentrapConfig(**SETTINGS))
    assert valid(score) > 0.75  # the two held-out items share the first two places; chance is 0.34
