"""FedRecGEL, one user at a time: as in the paper, and as in its public code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.fedrecgel import FedrecgelConfig
from embedding_fr.testing.fedncf import ncf_scores
from embedding_fr.testing.loop import Reference, User, bce, mean_of, parameters
from fedecider.federation.method import Tree


def fedrecgel(federation: Federation, training: EmbeddingTraining, config: FedrecgelConfig) -> Reference:
    """Each side takes its gradient where a step of its radius along its own gradient leads."""
    return _code(training, config) if config.variant == "code" else _paper(training, config)


def _paper(training: EmbeddingTraining, config: FedrecgelConfig) -> Reference:
    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        theta = parameters({**received, **own})
        rate = {"item_table": training.item_rate}
        groups = [{"params": [theta[name]], "lr": rate.get(name, training.learning_rate)} for name in theta]
        optimiser = torch.optim.Adam(groups, weight_decay=training.weight_decay)
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):

                def loss(theta: Tree, item_B: Tensor = item_B, label_B: Tensor = label_B) -> Tensor:
                    return bce(ncf_scores(theta, theta["user"], theta["item_table"][item_B]), label_B)

                for name, gradient in _sharp_gradients(loss, theta, received, own, config).items():
                    theta[name].grad = gradient
                optimiser.step()
        return {name: theta[name] for name in received}, {name: theta[name] for name in own}

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        return mean_of(server, uploads, weights)

    return Reference(client, server)


def _code(training: EmbeddingTraining, config: FedrecgelConfig) -> Reference:
    def client(user: User, received: Tree, own: Tree) -> tuple[Tree, Tree]:
        private = {name: own[name] for name in ("user", "user_mlp")}
        theta = parameters({**received, **private})

        def loss(theta: Tree) -> Tensor:
            return torch.stack([bce(_neumf(theta, item_B), label_B) for item_B, label_B in user.batches(0)]).sum()

        gradient = _sharp_gradients(loss, theta, received, private, config)
        upload = {f"{name}.gradient": gradient[name] for name in received}
        return upload, _adam(own, {name: gradient[name] for name in private}, training.learning_rate)

    def server(
        round: int, server: Tree, clients: Sequence[int], uploads: Sequence[Tree], weights: Sequence[float]
    ) -> Tree:
        mean = mean_of(server, uploads, [1.0] * len(uploads))
        gradient = {name.removesuffix(".gradient"): value for name, value in mean.items()}
        return _adam(server, gradient, config.server_learning_rate)

    def download(server: Tree, client: int) -> Tree:
        return {name: tensor for name, tensor in server.items() if not name.endswith((".mean", ".square", ".steps"))}

    return Reference(client, server, download)


def _sharp_gradients(
    loss: Callable[[Tree], Tensor], theta: Tree, shared: Tree, private: Tree, config: FedrecgelConfig
) -> Tree:
    """For each side the gradient at the point to which its own plain gradient leads, the other side unmoved."""
    plain = dict(zip(theta, torch.autograd.grad(loss(theta), list(theta.values())), strict=True))
    sharp: Tree = {}
    for side, radius in ((private, config.private_radius), (shared, config.shared_radius)):
        norm = torch.sqrt(torch.stack([(plain[name] ** 2).sum() for name in side]).sum())
        moved = parameters({name: (theta[name] + radius * plain[name] / norm).detach() for name in side})
        sharp.update(zip(side, torch.autograd.grad(loss({**theta, **moved}), list(moved.values())), strict=True))
    return sharp


def _adam(tree: Tree, gradient: Tree, rate: float) -> Tree:
    """A step of the tensors in ``gradient``, whose moments stand beside them in ``tree``."""
    new = {name: tensor.clone() for name, tensor in tree.items()}
    for name, value in gradient.items():
        steps = new[f"{name}.steps"].add_(1.0)
        mean = new[f"{name}.mean"].mul_(0.9).add_(0.1 * value)
        square = new[f"{name}.square"].mul_(0.999).add_(0.001 * value**2)
        mean, square = mean.view_as(value) / (1.0 - 0.9**steps), square.view_as(value) / (1.0 - 0.999**steps)
        new[name] -= rate * mean / (torch.sqrt(square) + 1e-8)
    return new


def _neumf(theta: Tree, item_B: Tensor) -> Tensor:
    product_BD = theta["item_table"][item_B] * theta["user"]
    user_BF = theta["user_mlp"].expand(len(item_B), -1)
    hidden = torch.cat([user_BF, theta["item_table_mlp"][item_B]], 1)
    for layer in range(3):
        hidden = torch.relu(hidden @ theta[f"tower.{layer}.weight"] + theta[f"tower.{layer}.bias"])
    output = torch.cat([product_BD, hidden], 1) @ theta["output.0.weight"] + theta["output.0.bias"]
    return output[:, 0]
