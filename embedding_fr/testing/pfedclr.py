"""PFedCLR and its variants, one user at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.pfedclr import PfedclrConfig
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters, step
from fedecider.federation.method import Tree


def pfedclr(federation: Federation, training: EmbeddingTraining, config: PfedclrConfig) -> Reference:
    """Step 1 trains the table and uploads it, step 2 trains the user embedding and the buffer on the frozen table."""
    beta = training.learning_rate if config.buffer_learning_rate is None else config.buffer_learning_rate
    rates = {"user": training.learning_rate, "item_table": training.item_rate}

    def buffer(theta: Tree) -> Tensor:
        return theta["buffer_a"] @ theta["buffer_b"] if config.variant == "clr" else theta["buffer"]

    def local_epochs(user: User, first: int, theta: Tree, names: Sequence[str], table: Callable[[], Tensor]) -> None:
        groups = [{"params": [theta[name]], "lr": rates.get(name, beta)} for name in names]
        optimiser = torch.optim.Adam(groups, weight_decay=training.weight_decay)
        for epoch in range(first, first + training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                step(optimiser, bce(table()[item_B] @ theta["user"], label_B))

    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**received, **own})
        names = [name for name in theta if name not in ("item_table", "personal_table")]
        if config.variant == "af":
            names.append("item_table")
            local_epochs(user, 0, theta, names, lambda: theta["item_table"] + buffer(theta))
        else:
            local_epochs(user, 0, theta, ["item_table"], lambda: theta["item_table"])
            frozen = theta["item_table"].detach()
            local_epochs(user, training.local_epochs, theta, names, lambda: frozen + buffer(theta))
        upload = {"item_table": theta["item_table"]}
        return upload, {**{name: theta[name] for name in own}, "personal_table": theta["item_table"]}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        return mean_of(server, uploads, weights)

    return Reference(client, server)
