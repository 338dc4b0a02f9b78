"""Elastic merging as a plug-in, one user at a time: any reference method whose client merges before it trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.merging import Merging
from embedding_fr.methods.fedmf import FedmfConfig
from embedding_fr.methods.fedncf import FedncfConfig
from embedding_fr.methods.fedrap import FedrapConfig
from embedding_fr.methods.gpfedrec import GpfedrecConfig
from embedding_fr.methods.pfedrec import PfedrecConfig
from embedding_fr.testing.fedem import merge
from embedding_fr.testing.fedmf import fedmf
from embedding_fr.testing.fedncf import fedncf, ncf_scores
from embedding_fr.testing.fedrap import fedrap
from embedding_fr.testing.gpfedrec import gpfedrec
from embedding_fr.testing.loop import Reference, User, bce, parameters, step
from embedding_fr.testing.pfedrec import pfedrec
from fedecider.federation.method import Tree

Scores = Callable[[Tree, Tensor, Tensor], Tensor]
"""A client's tensors, rows of the merged table (B, D), item numbers (B,) -> logits (B,)."""


def elastic(
    reference: Reference, scores: Scores, training: EmbeddingTraining, merging: Merging, table: str = "item_table"
) -> Reference:
    """The adapter's epochs come first, then ``reference`` trains on the merged table."""

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        own = dict(own)
        last_ID, sent_ID = own.pop("last_table"), received[table]
        adapter = parameters({"adapter": own.pop("adapter")} if merging.learns else {})
        frozen = {**received, **own}
        if merging.learns:
            optimiser = torch.optim.Adam(adapter.values(), merging.adapter_learning_rate or training.learning_rate)
            for epoch in range(training.local_epochs):
                for item_B, label_B in user.batches(epoch):
                    merged_ID = merge(merging, adapter, last_ID, sent_ID)
                    step(optimiser, bce(scores(frozen, merged_ID[item_B], item_B), label_B))
        merged_ID = merge(merging, adapter, last_ID, sent_ID).detach()
        upload, mine = reference.client(user, {**received, table: merged_ID}, own)
        mine = {name: mine[name] for name in own}  # nothing for views of the method without merging
        return upload, {**mine, **adapter, "last_table": upload[table].detach().clone()}

    return reference._replace(client=client)


def fedmf_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> Reference:
    inner = fedmf(federation, training, FedmfConfig())
    return elastic(inner, lambda own, row_BD, item_B: row_BD @ own["user"], training, config)


def fedncf_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> Reference:
    inner = fedncf(federation, training, FedncfConfig())
    return elastic(inner, lambda own, row_BD, item_B: ncf_scores(_network(own), own["user"], row_BD), training, config)


def pfedrec_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> Reference:
    inner = pfedrec(federation, training, PfedrecConfig())

    def scores(own: Tree, row_BD: Tensor, item_B: Tensor) -> Tensor:
        return (row_BD @ own["scorer.0.weight"] + own["scorer.0.bias"])[:, 0]

    return elastic(inner, scores, training, config)


def gpfedrec_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> Reference:
    inner = gpfedrec(federation, training, GpfedrecConfig())
    return elastic(inner, lambda own, row_BD, item_B: ncf_scores(_network(own), own["user"], row_BD), training, config)


def fedrap_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> Reference:
    inner = fedrap(federation, training, FedrapConfig())

    def scores(own: Tree, row_BD: Tensor, item_B: Tensor) -> Tensor:
        return (row_BD + own["personal_table"][item_B]) @ own["user"]

    return elastic(inner, scores, training, config, table="common_table")


def _network(own: Tree) -> Tree:
    return {name: tensor for name, tensor in own.items() if name.startswith("scorer.")}
