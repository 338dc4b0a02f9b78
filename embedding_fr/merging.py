"""Elastic merging: a client merges the item table that it receives with its own last one (FedEM, equations 9 to 11).

``Q_m = Q_l + rho (Q_g - Q_l)``: Q_g is received, Q_l is the table that the client uploaded last, and rho in (0, 1)
comes from the client's adapter, a small network on ``[Q_g - Q_l, Q_l]`` that never leaves it. Every row of the table
changes, also those that no example touches, so uploads are whole tables; local steps and adapters work on the touched
rows, and the whole table is merged once a round.

Shape legend: N clients of the run, C clients of a block, A active clients of a step, B examples, I items, R touched
rows, D dims, F = 2 D features of an item, P parameters of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.examples import ExampleBatch
from embedding_fr.local_training import Logits, Objective, dot_logits, train_batches
from embedding_fr.mlp import layer_sizes, mlp, start_mlp
from embedding_fr.optimisers import Optimiser, fresh_state
from embedding_fr.stacked import inner_products, set_rows, take
from embedding_fr.tables import personal_table
from fedecider.bounds import NotNegative, Share, dataclass
from fedecider.federation.method import Tree

LAST = "last_table"
"""Local state (N, I, D): the table that a client uploaded last, without the noise that may have been added to it."""
ADAPTER = "adapter"
"""Local state (N, P)."""
PRODUCTS = ("kept_score", "effect")
"""(C, R) of the user embedding with the rows without the merge, and with Q_g - Q_l."""


@dataclass(frozen=True)
class Merging:
    """How a client merges.

    Args:
        scheme: How tables are merged: EM has a weight for each item, DM one weight for the client, SM the same fixed
            weight for all.
        rho: The fixed weight of SM; 1 takes the received table, 0 keeps the own one.
        adapter_layers: The widths of the adapter's hidden layers, with commas. The paper writes input and output too:
            its [32, 16, 8, 1] at D = 16 is 16,8; Figure 6 has none, 16, 32,16,8 and 64,32,16,8 beside it.
        adapter_learning_rate: The learning rate of the adapter. If not given, learning_rate is taken; 0 keeps the
            adapter as it started.
    """

    scheme: Literal["EM", "DM", "SM"] = "EM"
    rho: Share = 0.5
    adapter_layers: str = "16,8"
    adapter_learning_rate: NotNegative | None = None

    def __post_init__(self) -> None:
        layer_sizes(self.adapter_layers)

    @property
    def learns(self) -> bool:
        return self.scheme != "SM"

    def adapter_rate(self, training: EmbeddingTraining) -> float:
        """The learning rate of the adapter."""
        return training.learning_rate if self.adapter_learning_rate is None else self.adapter_learning_rate

    def sizes(self, embedding_size: int) -> tuple[int, ...]:
        """Widths of the adapter from input to output."""
        return 2 * embedding_size, *layer_sizes(self.adapter_layers), 1


class Scorer(NamedTuple):
    """What merging must know of a method to train adapters through its loss."""

    logits: Logits
    table: str = "item_table"
    """The item table that travels and is merged."""
    local_tables: tuple[str, ...] = ()
    """Local tensors (N, I, ...) that the logits read by item, too."""


class Merge(NamedTuple):
    """One round's merge of a block; what is by rows holds the touched ones."""

    merging: Merging
    optimiser: Optimiser
    last_CID: Tensor
    received_CID: Tensor
    difference_CRD: Tensor
    """Q_g - Q_l."""
    feature: Tensor
    """What the adapters see: (C, R, F) for EM, (C, 1, F) for DM."""
    step_CRD: Tensor
    """rho (Q_g - Q_l) as the table that is trained holds it now."""
    adapter: Tree
    """ADAPTER, or nothing for SM."""
    state: Tree


def start_merging(merging: Merging, start_ID: Tensor, federation: Federation) -> Tree:
    """Local tensors of merging: everybody's last table is the common start, every client draws its own adapter."""
    tree = {LAST: personal_table(start_ID, federation.num_clients, federation.table_bytes)}
    if not merging.learns:
        return tree
    drawn = start_mlp(federation, ADAPTER, merging.sizes(start_ID.shape[1]), federation.num_clients)
    return {**tree, ADAPTER: torch.cat([tensor.flatten(1) for tensor in drawn.values()], 1)}


def adapter_layers(adapter_CP: Tensor, sizes: Sequence[int]) -> Tree:
    """Variants of the flat adapters as the layers of :mod:`embedding_fr.mlp`; flat, since an optimiser steps one tensor
    faster than six."""
    tree, start = {}, 0
    for layer, (size_in, size_out) in enumerate(pairwise(sizes)):
        end = start + size_in * size_out
        tree[f"{ADAPTER}.{layer}.weight"] = adapter_CP[:, start:end].unflatten(1, (size_in, size_out))
        tree[f"{ADAPTER}.{layer}.bias"] = adapter_CP[:, end : end + size_out]
        start = end + size_out
    return tree


def weights_of(merging: Merging, adapter_CP: Tensor, feature_CBF: Tensor) -> Tensor:
    """(C, B, 1) rho of each row of features: ReLU between the layers, sigmoid at the end (equation 9)."""
    sizes = merging.sizes(feature_CBF.shape[2] // 2)
    return torch.sigmoid(mlp(adapter_layers(adapter_CP, sizes), ADAPTER, feature_CBF))


def features(merging: Merging, last_CID: Tensor, received_CID: Tensor) -> Tensor:
    """(C, I, F) ``[Q_g - Q_l, Q_l]`` of each item; for DM its mean over all items, (C, 1, F).

    Ours: the paper does not say how the adapter of DM comes to one number.
    """
    if merging.scheme == "DM":
        last_CID, received_CID = last_CID.mean(1, keepdim=True), received_CID.mean(1, keepdim=True)
    return torch.cat([received_CID - last_CID, last_CID], 2)


def merged_table(merging: Merging, own: Tree, received_CID: Tensor) -> tuple[Tensor, Tensor]:
    """(C, I, D) ``Q_l + rho (Q_g - Q_l)`` with the clients' adapters (equation 10), and (C,) the mean of rho."""
    last_CID = own[LAST].to(received_CID.device)
    rho = last_CID.new_full((len(last_CID), 1, 1), merging.rho)
    if merging.learns:
        rho = weights_of(merging, own[ADAPTER], features(merging, last_CID, received_CID))
    return torch.addcmul(last_CID, rho, received_CID - last_CID), rho.mean((1, 2))


def open_merge(
    merging: Merging,
    training: EmbeddingTraining,
    own: Tree,
    received_CID: Tensor,
    received_CRD: Tensor,
    row_CR: Tensor,
) -> tuple[Merge, Tensor]:
    """The merge before its first epoch, and the rows (C, R, D) that the table holds then: Q_l, or for SM the merge."""
    last_CID = own[LAST].to(received_CID.device)
    last_CRD = take(last_CID, row_CR.clamp(min=0))
    difference_CRD = received_CRD - last_CRD
    # DM looks at the whole table: the mean of the touched rows would depend on this round's negatives.
    seen = (last_CID, received_CID) if merging.scheme == "DM" else (last_CRD, received_CRD)
    adapter = {ADAPTER: own[ADAPTER].clone()} if merging.learns else {}
    rate = merging.adapter_rate(training)
    optimiser = Optimiser("adam", dict.fromkeys(adapter, rate), training.weight_decay)
    step_CRD = torch.zeros_like(last_CRD) if merging.learns else merging.rho * difference_CRD
    feature, state = features(merging, *seen), fresh_state(optimiser, adapter)
    merge = Merge(merging, optimiser, last_CID, received_CID, difference_CRD, feature, step_CRD, adapter, state)
    return merge, last_CRD + step_CRD


def merge_epochs(merge: Merge, scorer: Scorer, params: Tree, batches: Iterable[ExampleBatch]) -> Merge:
    """Steps of the adapters, everything else frozen (equation 11); then the table in ``params`` takes the new
    merge, and keeps what local steps have added to it.

    The loss is the mean cross-entropy of the method's own logits.
    """
    if not merge.merging.learns:
        return merge
    kept_CRD = params[scorer.table] - merge.step_CRD
    seen = {**params, "feature": merge.feature, "kept": kept_CRD, "difference": merge.difference_CRD, **merge.adapter}
    objective = Objective(merged_logits(merge.merging, scorer))
    if scorer.logits is dot_logits:
        products = (inner_products(table, params["user"]) for table in (kept_CRD, merge.difference_CRD))
        seen |= dict(zip(PRODUCTS, products, strict=True))
    train_batches(objective, seen, batches, merge.optimiser, merge.state, measure=False)
    step_CRD = weights_of(merge.merging, merge.adapter[ADAPTER], merge.feature) * merge.difference_CRD
    params[scorer.table] = kept_CRD + step_CRD
    return merge._replace(step_CRD=step_CRD)


def close_merge(merge: Merge, row_CR: Tensor, trained_CRD: Tensor) -> tuple[Tensor, Tree, Tensor]:
    """The client's new table (C, I, D), its new local tensors of merging, and (C,) the mean of rho.

    Rows that no example touched hold the last merge, the others ``trained_CRD``.
    """
    own = {LAST: merge.last_CID, **merge.adapter}
    whole_CID, rho_C = merged_table(merge.merging, own, merge.received_CID)
    set_rows(whole_CID, row_CR, trained_CRD)
    return whole_CID, {**own, LAST: whole_CID}, rho_C


def merged_logits(merging: Merging, scorer: Scorer) -> Logits:
    """The method's logits with the merged rows of a batch as the table: what adapters are trained through."""

    def of_batch(params: Tree, item: Tensor | None) -> Tensor:
        feature = params["feature"] if merging.scheme == "DM" else take(params["feature"], item)
        rho = weights_of(merging, params[ADAPTER], feature)
        if scorer.logits is dot_logits:  # of a row only its two products with the user embedding are gathered
            kept_CB, effect_CB = (params[name] if item is None else params[name].gather(1, item) for name in PRODUCTS)
            return torch.addcmul(kept_CB, rho[:, :, 0], effect_CB)
        merged_CBD = take(params["kept"], item) + rho * take(params["difference"], item)
        others = {name: take(params[name], item) for name in scorer.local_tables}
        return scorer.logits({**params, **others, scorer.table: merged_CBD}, None)

    return of_batch
