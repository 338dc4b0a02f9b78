"""The per-user round loop of every reference method: full tables, ``torch.optim``, one client at a time.

It shares with the batched runtime only a client's data, its random draws and the start values.

Shape legend: B examples of a batch, I items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from embedding_fr.blocks import Federation, Population, make_block
from embedding_fr.config import EmbeddingTraining
from embedding_fr.examples import Examples, draw_examples, shuffled
from fedecider.federation.cohort import choose_cohort
from fedecider.federation.method import FederatedMethod, Tree
from fedecider.federation.wire import take_row


class User(NamedTuple):
    """One client in one round: its number and its shuffled mini-batches."""

    client: int
    round: int
    num_train: int
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    """epoch -> (items (B,), labels (B,)) of each mini-batch."""
    train_items: Tensor
    examples: Examples
    """What the mini-batches are made of: positives first, then negatives."""


class Reference(NamedTuple):
    """A method as two plain functions."""

    client: Callable[[User, Tree, Tree], tuple[Tree, Tree]]
    """user, what the client received, its own tensors -> upload, new own tensors."""
    server: Callable[[int, Tree, Sequence[int], Sequence[Tree], Sequence[float]], Tree]
    """round, server tensors, clients, their uploads, their train items -> new server tensors."""
    download: Callable[[Tree, int], Tree] = lambda server, client: server
    """server tensors, client -> what this client receives."""


def run_reference(
    method: FederatedMethod,
    reference: Reference,
    federation: Federation,
    training: EmbeddingTraining,
    population: Population,
    num_rounds: int,
    participation: float = 1.0,
) -> tuple[Tree, Tree]:
    """Server and local trees after ``num_rounds`` rounds, from the start values of ``method``."""
    users = partial(make_user, federation, training, population)
    server, local = method.init()
    local = {name: tensor.clone() for name, tensor in local.items()}
    for round in range(1, num_rounds + 1):
        cohort = sorted(choose_cohort(method, server, federation.num_clients, participation, federation.seed, round))
        uploads, weights = reference_clients(reference, users, round, cohort, server, local)
        server = reference.server(round, server, cohort, uploads, weights)
    return server, local


def reference_clients(
    reference: Reference,
    users: Callable[[int, int], User],
    round: int,
    cohort: Sequence[int],
    server: Tree,
    local: Tree,
) -> tuple[list[Tree], list[float]]:
    """Uploads and train items of the cohort in one round; ``local`` is written in place. ``users``: client, round."""
    uploads, weights = [], []
    for client in cohort:
        user = users(client, round)
        upload, own = reference.client(user, reference.download(server, client), take_row(local, client))
        for name, tensor in own.items():
            local[name][client] = tensor.detach()
        uploads.append({name: tensor.detach().clone() for name, tensor in upload.items()})
        weights.append(float(user.num_train))
    return uploads, weights


def make_user(
    federation: Federation, training: EmbeddingTraining, population: Population, client: int, round: int
) -> User:
    """A client's data and draws in one round; the draws are the streams that the batched runtime uses."""
    block = make_block(population, [client])
    data = block.data
    examples: Examples = draw_examples(
        data, block.clients, federation.num_items, training.num_negatives, federation.seed, round
    )

    item_B, count = examples.item_CB[0], int(examples.count_C[0])

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen_B in shuffled(examples, epoch)[0, :count].split(training.batch_size):
            yield item_B[chosen_B], (chosen_B < examples.num_positive_C[0]).to(torch.get_default_dtype())

    return User(client, round, int(data.num_train_C[0]), batches, data.train_CT[0], examples)


def bce(logit_B: Tensor, label_B: Tensor) -> Tensor:
    """Mean binary cross-entropy of a mini-batch."""
    return binary_cross_entropy_with_logits(logit_B, label_B)


def parameters(tensors: Tree) -> Tree:
    """Trainable copies."""
    return {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}


def step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of a plain optimiser."""
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def mean_of(server: Tree, uploads: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """``sum_u w_u x_u / sum_u w_u`` per tensor."""
    mean = {name: torch.zeros_like(tensor) for name, tensor in uploads[0].items()}
    for weight, upload in zip(weights, uploads, strict=True):
        for name, tensor in upload.items():
            mean[name] += weight / sum(weights) * tensor
    return mean
