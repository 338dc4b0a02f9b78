"""Training of one client in FedGCDR, phase by phase.

Shape legend: N clients, U users of a client (its own, then the public ones of its catalogue), I items of the largest
catalogue, L layers, D dims, B users of a batch, V items of a user (padded), S sources, P pairs.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.baselines.fitting import pointwise_loss
from fedecider.baselines.negatives import Excluded, draw_outside, outside_of
from fedecider.baselines.sasrec import is_event, pack
from fedecider.evaluation.split import train_part
from fedecider.federation.method import Tree
from fedecider.federation.streams import stream
from fedecider.id_based.clients import Client, IdClients
from fedecider.id_based.star_graph import mapped, mapping_loss, similarity_loss, user_layers

SOURCE, TARGET, TUNING = range(3)
"""Phases of a client."""
Friends = tuple[Tensor, Tensor]
"""Mapped vectors of the sources of some users (B, L, S, D), and which of them there are (B, S)."""


class StarSettings(typing.Protocol):
    """What training asks of the settings of FedGCDR."""

    @property
    def mapping_weight(self) -> float: ...
    @property
    def similarity_weight(self) -> float: ...
    @property
    def embedding_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def tuning_rate(self) -> float: ...
    @property
    def local_epochs(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def num_negatives(self) -> int: ...


class Histories(NamedTuple):
    """What a client trains on."""

    item_UV: Tensor
    """int64, right-padded."""
    length_U: Tensor
    excluded: Excluded

    def items_of(self, user_B: Tensor) -> tuple[Tensor, Tensor]:
        """Items of some users (B, V), and False at padding, where ``user_B`` is."""
        length_B = self.length_U[user_B.cpu()]
        item_BV = self.item_UV[user_B.cpu()][:, : int(length_B.max())]
        return item_BV.to(user_B.device), is_event(item_BV, length_B).to(user_B.device)


def histories(client: Client) -> Histories:
    """Train parts of its own users, then whole public histories."""
    parts = [*(list(train_part(sequence)) for sequence in client.sequences), *map(list, client.public)]
    item_UV, length_U = pack(parts, max(map(len, parts)))
    return Histories(item_UV, length_U, outside_of(parts, client.num_items))


class StarTraining(NamedTuple):
    """All clients' training. ``own`` is a client's row of the local tree, ``model`` what is trained in a phase."""

    clients: IdClients
    config: StarSettings
    data: list[Histories]

    @property
    def most_users(self) -> int:
        """Of one client, public ones included: the length of its table of users."""
        return max(len(one.length_U) for one in self.data)

    def train(self, own: Tree, number: int, round: int, phase: int) -> tuple[Tree, dict[str, Any]]:
        """The own row after a round of a phase, and its log; as before where a number is not finite."""
        if phase == TUNING and int(own["phase"]) != TUNING:
            user_UD = self.final_users(own, number, TARGET)
            padding = own["tuned.user"].new_zeros(self.most_users - len(user_UD), self.config.embedding_size)
            own = {**own, "tuned.user": torch.cat([user_UD, padding])}
        trained = {name: tensor.clone().requires_grad_() for name, tensor in model_of(own, phase).items()}
        if phase == TUNING:
            trained = {"item": trained["item"], "user": own["tuned.user"].clone().requires_grad_()}
        rate = self.config.tuning_rate if phase == TUNING else self.config.learning_rate
        optimizer = torch.optim.Adam(trained.values(), lr=rate)
        losses = [
            _step(optimizer, self.loss(own, number, user_B, phase, trained, generator))
            for user_B, generator in self.batches(number, round)
        ]
        new = dict(own)
        for name, tensor in trained.items():
            new["tuned.user" if phase == TUNING and name == "user" else _prefix(phase) + name] = tensor.detach()
        new["phase"] = torch.full_like(own["phase"], phase)
        finite = all(bool(tensor.isfinite().all()) for tensor in new.values())
        return (new if finite else own), {"loss": sum(losses) / len(losses), "finite": finite}

    def batches(self, number: int, round: int) -> Iterator[tuple[Tensor, torch.Generator]]:
        """Users of each step of a round, and what its negatives are drawn with."""
        seed, num_users = self.clients.seed_of(number), len(self.data[number].length_U)
        for epoch in range(self.config.local_epochs):
            order_U = torch.randperm(num_users, generator=stream(seed, "order", round, epoch))
            generator = stream(seed, "negatives", round, epoch)
            for user_B in order_U.split(self.config.batch_size):
                yield user_B.to(self.clients.device), generator

    def loss(
        self, own: Tree, number: int, user_B: Tensor, phase: int, model: Tree, generator: torch.Generator
    ) -> Tensor:
        """Cross-entropy of the users' items against negatives, and with friends their two distances."""
        config, data = self.config, self.data[number]
        item_BV, is_item_BV = data.items_of(user_B)
        row_P, column_P = is_item_BV.nonzero(as_tuple=True)
        asked_PN = user_B[row_P, None].expand(-1, config.num_negatives).cpu()
        negative_PN = draw_outside(data.excluded, asked_PN, generator).to(user_B.device)
        item_PN = torch.cat([item_BV[row_P, column_P][:, None], negative_PN], 1)
        extra = torch.zeros((), device=user_B.device)
        if phase == TUNING:
            user_BD = model["user"][user_B]
        else:
            friends = self.friends_of(own, user_B, phase, model)
            vector_BLD = self.layers(number, user_B, model, friends)
            user_BD = vector_BLD[:, -1]
            if friends is not None:
                extra = config.mapping_weight / 2.0 * mapping_loss(vector_BLD, *friends)
                extra = extra + config.similarity_weight / 2.0 * similarity_loss(vector_BLD, *friends)
        logit_PN = (user_BD[row_P][:, None] * model["item"][item_PN]).sum(-1)
        return pointwise_loss(logit_PN) + extra

    def friends_of(self, own: Tree, user_B: Tensor, phase: int, model: Tree) -> Friends | None:
        """What the users' sources handed over, mapped; None in the phase without friends."""
        if phase == SOURCE:
            return None
        shape = self.clients.num_clients, len(user_B), self.config.num_layers, self.config.embedding_size
        friend_BLSD = own["friend"][:, user_B].view(shape).permute(1, 2, 0, 3)
        return mapped(model, friend_BLSD), own["is_friend"][:, user_B].T

    def layers(self, number: int, user_B: Tensor, model: Tree, friends: Friends | None) -> Tensor:
        """User vectors after each layer (B, L, D)."""
        item_BV, is_item_BV = self.data[number].items_of(user_B)
        asked = (model["user"][user_B], model["item"][item_BV], is_item_BV, model["attention"])
        return user_layers(*asked, *(friends or ()))

    def final_users(self, own: Tree, number: int, phase: int) -> Tensor:
        """(U, D) vectors of the client's own and public users that the score takes."""
        user_U = torch.arange(len(self.data[number].length_U), device=self.clients.device)
        if phase == TUNING:
            return own["tuned.user"][user_U]
        model = model_of(own, phase)
        with torch.no_grad():
            parts = [
                self.layers(number, user_B, model, self.friends_of(own, user_B, phase, model))[:, -1]
                for user_B in user_U.split(self.config.batch_size)
            ]
        return torch.cat(parts)


def model_of(own: Tree, phase: int) -> Tree:
    """The model of a phase in a client's row; tuning goes on with the items of the target's."""
    prefix = _prefix(phase)
    return {name.removeprefix(prefix): tensor for name, tensor in own.items() if name.startswith(prefix)}


def _prefix(phase: int) -> str:
    return "source." if phase == SOURCE else "target."


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())
