"""What the trained centralised baselines share: train pairs, negatives, batches, epochs, the choice of the best one.

The rank of a draw inside the complement is drawn and turned into an item, so nothing is rejected and nothing is
enumerated: the r-th item outside of e_0 < e_1 < ... is ``r + #{j: e_j - j <= r}``.

Shape legend: U users, I items, E distinct (user, item) pairs, E excluded (user, item) pairs, N draws (any shape), E
distinct train pairs, B positives of a batch, N = 1 + num_negatives (column 0 is the positive).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedecider.baselines.baskets import item_sets
from fedecider.bounds import Negatives, NotNegative, OneOrMore, Positive, Width, dataclass
from fedecider.evaluation import protocols
from fedecider.evaluation.metrics import mean_metrics
from fedecider.federation.streams import stream


def distinct_pairs(parts: protocols.Sequences, num_items: int) -> tuple[Tensor, Tensor]:
    """User and item of each distinct pair in ``parts``, int64 (E,) each, sorted by user, then by item."""
    item_E = np.fromiter((item for part in parts for item in part), dtype=np.int64)
    user_E = np.repeat(np.arange(len(parts), dtype=np.int64), [len(part) for part in parts])
    key_E = torch.from_numpy(np.unique(user_E * num_items + item_E))
    return key_E // num_items, key_E % num_items


def train_pairs(sequences: protocols.Sequences, num_items: int) -> tuple[Tensor, Tensor]:
    """:func:`distinct_pairs` of the train parts, that is of everything but each user's last two events or baskets."""
    return distinct_pairs(protocols.train_parts(sequences), num_items)


def train_matrix(sequences: protocols.Sequences, num_items: int) -> scipy.sparse.csr_array:
    """Sparse (U, I), float64: 1 where the item is in the user's train part. Repeated events count once."""
    return item_sets(protocols.train_parts(sequences), num_items)


class Excluded(NamedTuple):
    """Excluded items of all users, flat, ready for :func:`items_outside`."""

    key_E: Tensor
    """``user * (I + 1) + e_j - j``, ascending, int64."""
    start_U: Tensor
    """Where a user's keys begin, int64."""
    pool_U: Tensor
    """How many items are left, int64."""
    num_items: int


def run_candidates(
    sequences: protocols.Sequences, num_items: int, protocol: protocols.Protocol, seed: int
) -> dict[str, Tensor]:
    """The sampled candidates of a run with this seed, by split (`sampled_candidates`); none where all are ranked."""
    if protocol.num_sampled is None:
        return {}
    return protocols.sampled_candidates(sequences, num_items, stream(seed, "candidates"), protocol.num_sampled)


def excluded_items(sequences: protocols.Sequences, num_items: int, protocol: protocols.Protocol, seed: int) -> Excluded:
    """Items that are never negatives in a run with this seed (`no_negatives`).

    ``ValueError`` when a user has no item left.
    """
    candidates = avoided_candidates(sequences, num_items, protocol, seed)
    return outside_of(protocols.no_negatives(sequences, protocol, candidates), num_items)


def avoided_candidates(
    sequences: protocols.Sequences, num_items: int, protocol: protocols.Protocol, seed: int
) -> dict[str, Tensor]:
    """Those of `run_candidates` that are no negatives; none where the protocol does not ask."""
    return run_candidates(sequences, num_items, protocol, seed) if protocol.negatives_avoid == "candidates" else {}


def outside_of(parts: protocols.Sequences, num_items: int) -> Excluded:
    """The items of ``parts``, row by row, are never negatives. ``ValueError`` when a user has no item left."""
    user_E, item_E = distinct_pairs(parts, num_items)
    count_U = torch.bincount(user_E, minlength=len(parts))
    if len(count_U) and int(count_U.max()) >= num_items:
        raise ValueError(f"got a user with no item left of {num_items} to use as a negative, expected one at least")
    start_U = count_U.cumsum(0) - count_U
    place_E = torch.arange(len(user_E)) - start_U[user_E]
    return Excluded(user_E * (num_items + 1) + item_E - place_E, start_U, num_items - count_U, num_items)


def items_outside(excluded: Excluded, user_N: Tensor, rank_N: Tensor) -> Tensor:
    """The ``rank_N``-th item (from 0, ascending) outside of the excluded items of ``user_N``, int64, same shape."""
    key_N = user_N * (excluded.num_items + 1) + rank_N
    return rank_N + torch.searchsorted(excluded.key_E, key_N, right=True) - excluded.start_U[user_N]


def draw_outside(excluded: Excluded, user_N: Tensor, generator: torch.Generator) -> Tensor:
    """One negative per entry of ``user_N``, independent, int64 (the remainder's bias is below 1e-14)."""
    rank_N = torch.randint(2**62, user_N.shape, generator=generator) % excluded.pool_U[user_N]
    return items_outside(excluded, user_N, rank_N)


Valid = Callable[[protocols.ScoreUsers], float]
"""Scores -> a figure of the validation items, larger is better."""


class Pooled(NamedTuple):
    """What a baseline is fitted on: the data of all clients, which one party holds."""

    sequences: protocols.Sequences
    """Whole histories, the last two events held out."""
    num_items: int
    protocol: protocols.Protocol = protocols.STRICT
    seed: int = 0
    device: str = "cpu"
    valid: Valid | None = None
    """Chooses the epoch; see :func:`validation_ndcg`."""


Batches = Callable[[int], Iterator[tuple[Tensor, Tensor]]]
"""Epoch number -> users (B,) and items (B, N), int64, batch by batch."""


@dataclass(frozen=True)
class PairTraining:
    """Settings of a baseline that is trained on pairs of a user and an item.

    Args:
        embedding_size: dims of the user and item embeddings.
        learning_rate: of Adam.
        num_epochs: passes over the train pairs at most.
        batch_size: samples of a step, negatives included.
        num_negatives: negatives per positive, drawn anew each epoch.
        weight_decay: weight of the squared norms of the embeddings in the batch.
        patience: epochs without a better validation figure before training stops.
    """

    embedding_size: Width = 32
    learning_rate: Positive = 3e-3
    num_epochs: OneOrMore = 60
    batch_size: OneOrMore = 4096
    num_negatives: Negatives = 4
    weight_decay: NotNegative = 0.0
    patience: OneOrMore = 8


def validation_ndcg(
    sequences: protocols.Sequences, num_items: int, protocol: protocols.Protocol = protocols.STRICT
) -> Valid:
    """ndcg@10 of the validation items in the whole catalogue; the test items are not read.

    The figure by which the trained baselines choose their epoch and a leaderboard the settings.
    """
    return lambda score: mean_metrics(protocols.rank_held_out(score, sequences, num_items, "valid", protocol), (10,))[
        "ndcg@10"
    ]


def training_batches(data: Pooled, config: PairTraining) -> Batches:
    """Every distinct train pair once an epoch, in random order, with ``num_negatives`` negatives drawn anew.

    Order and negatives depend on the seed and the epoch number only. ``ValueError`` when there is no train pair.
    """
    sequences, num_items, protocol, seed, device, _ = data
    user_E, item_E = train_pairs(sequences, num_items)
    if len(user_E) == 0:
        raise ValueError("got no train event, expected at least one: check that the data hold users")
    excluded = excluded_items(sequences, num_items, protocol, seed)
    num_positives = max(1, config.batch_size // (1 + config.num_negatives))

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order_E = torch.randperm(len(user_E), generator=stream(seed, "order", epoch))
        asked_EN = user_E[order_E, None].expand(-1, config.num_negatives)
        drawn_EN = draw_outside(excluded, asked_EN, stream(seed, "negatives", epoch))
        item_EN = torch.cat([item_E[order_E, None], drawn_EN], 1).to(device)
        yield from zip(user_E[order_E].to(device).split(num_positives), item_EN.split(num_positives), strict=True)

    return batches


def fit_epochs(
    model: nn.Module,
    run_epoch: Callable[[int], None],
    score: protocols.ScoreUsers,
    valid: Valid | None,
    num_epochs: int,
    patience: int,
) -> None:
    """Run the epochs and leave in ``model`` the parameters of the epoch that ``valid`` likes best.

    Stops after ``patience`` epochs without a better figure. Without ``valid``: the parameters of the last epoch, and
    no held-out item is looked at.
    """
    best, best_epoch, kept = -math.inf, 0, {}
    for epoch in range(num_epochs):
        run_epoch(epoch)
        if valid is None:
            continue
        figure = valid(score)
        if figure > best:
            best, best_epoch = figure, epoch
            kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        elif epoch - best_epoch >= patience:
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
