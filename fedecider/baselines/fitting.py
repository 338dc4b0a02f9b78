"""What the trained centralised baselines share: batches with fresh negatives, the epochs, the choice of the best one.

Shape legend: U users, I items, E distinct train pairs, B positives of a batch, N = 1 + num_negatives (column 0 is the
positive).
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedecider.baselines.interactions import train_pairs
from fedecider.baselines.negatives import draw_outside, excluded_items
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import STRICT, Protocol, ScoreUsers, Sequences, rank_held_out
from fedecider.federation.streams import stream

Valid = Callable[[ScoreUsers], float]
"""Scores -> a figure of the validation items, larger is better."""
Batches = Callable[[int], Iterator[tuple[Tensor, Tensor]]]
"""Epoch number -> users (B,) and items (B, N), int64, batch by batch."""


class BaselineTraining(typing.Protocol):
    """Settings that every trained baseline has. ``batch_size`` counts samples, positives and negatives together."""

    @property
    def embedding_size(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def num_epochs(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def num_negatives(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def patience(self) -> int: ...


def validation_ndcg(sequences: Sequences, num_items: int, protocol: Protocol = STRICT) -> Valid:
    """ndcg@10 of the validation items in the whole catalogue; the test items are not read.

    The figure by which the trained baselines choose their epoch and a leaderboard the settings.
    """
    return lambda score: mean_metrics(rank_held_out(score, sequences, num_items, "valid", protocol), (10,))["ndcg@10"]


def training_batches(
    sequences: Sequences,
    num_items: int,
    protocol: Protocol,
    config: BaselineTraining,
    *,
    seed: int,
    device: str = "cpu",
) -> Batches:
    """Every distinct train pair once an epoch, in random order, with ``num_negatives`` negatives drawn anew.

    Order and negatives depend on the seed and the epoch number only. ``ValueError`` when there is no train pair.
    """
    user_E, item_E = train_pairs(sequences, num_items)
    if len(user_E) == 0:
        raise ValueError("got no train event, expected at least one: check that the data hold users")
    excluded = excluded_items(sequences, num_items, protocol)
    num_positives = max(1, config.batch_size // (1 + config.num_negatives))

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order_E = torch.randperm(len(user_E), generator=stream(seed, "order", epoch))
        asked_EN = user_E[order_E, None].expand(-1, config.num_negatives)
        drawn_EN = draw_outside(excluded, asked_EN, stream(seed, "negatives", epoch))
        item_EN = torch.cat([item_E[order_E, None], drawn_EN], 1).to(device)
        yield from zip(user_E[order_E].to(device).split(num_positives), item_EN.split(num_positives), strict=True)

    return batches


def fit_epochs(
    model: nn.Module, run_epoch: Callable[[int], None], score: ScoreUsers, config: BaselineTraining, valid: Valid | None
) -> None:
    """Run the epochs and leave in ``model`` the parameters of the epoch that ``valid`` likes best.

    Stops after ``patience`` epochs without a better figure. Without ``valid``: the parameters of the last epoch, and
    no held-out item is looked at.
    """
    best, best_epoch, kept = -math.inf, 0, {}
    for epoch in range(config.num_epochs):
        run_epoch(epoch)
        if valid is None:
            continue
        figure = valid(score)
        if figure > best:
            best, best_epoch = figure, epoch
            kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        elif epoch - best_epoch >= config.patience:
            break
    if kept:
        model.load_state_dict(kept)


def pointwise_loss(logit_BN: Tensor) -> Tensor:
    """Mean binary cross-entropy; column 0 is the positive."""
    label_BN = torch.zeros_like(logit_BN)
    label_BN[:, 0] = 1.0
    return functional.binary_cross_entropy_with_logits(logit_BN, label_BN)


def pairwise_loss(logit_BN: Tensor) -> Tensor:
    """Mean BPR loss (Rendle et al., 2009): ``-log sigmoid(positive - negative)`` over all negatives."""
    return functional.softplus(logit_BN[:, 1:] - logit_BN[:, :1]).mean()


def square_norms(user_BD: Tensor, item_BND: Tensor) -> Tensor:
    """Mean squared norm of a user's row plus that of an item's row in the batch: what ``weight_decay`` weighs.

    Only rows in the batch shrink, so frequent users and items shrink more; decay of all rows at every step, as
    optimisers do it, drives rare items to zero and was far worse on ML-100K.
    """
    return user_BD.square().sum(-1).mean() + item_BND.square().sum(-1).mean()
