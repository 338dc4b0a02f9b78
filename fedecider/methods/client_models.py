"""What every method of the cross-silo track works with: the shared base, the clients, and how they train.

Shape legend: C tokens of a catalogue, U users of a client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.federation.method import Block, Download, Tree, Upload
from fedecider.federation.processes import Processes
from fedecider.federation.wire import download_of, take_row
from fedecider.methods.config import LocalTraining, Weighting
from fedecider.methods.rows import Rows, rows_at_home, rows_of_clients
from fedecider.models.adapters import Adapters, Shapes, adapter_shapes, initial_adapters, stack_trees, with_prefix
from fedecider.models.client_model import Base, Client, ClientModel, client_of
from idgen.tasks import Task


class ClientModels(NamedTuple):
    """One base that serves all clients in turn, and what each of them has."""

    base: Base
    clients: Sequence[Client]
    training: LocalTraining
    seed: int
    rows: Rows = Rows()
    protected: bool = False
    """Whether uploads are bounded and noised when the method has made them."""
    patience: int = 0
    """A client that trains alone stops after so many rounds without a better own validation; 0: never."""
    secret: bool = False
    """Whether draws that privacy rests on come from the operating system instead of ``seed``: in a deployment."""

    @property
    def names(self) -> list[str]:
        """Of the clients, in client order."""
        return [client.name for client in self.clients]

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    @property
    def shapes(self) -> Shapes:
        """Of the adapters of every client."""
        return adapter_shapes(self.base.model)

    @property
    def start(self) -> Tree:
        """The common start of all clients, which changes nothing of the base."""
        return initial_adapters(self.shapes, self.seed)

    def model(self, client: int, pair: Tree | Adapters) -> ClientModel:
        """The model of a client with these adapters."""
        adapters = pair if isinstance(pair, Adapters) else Adapters(pair)
        return ClientModel(self.base, self.clients[client], adapters)

    def student(self, name: str) -> ClientModel:
        """The shared student without any adapter, as a client asks it."""
        return self.model(self.names.index(name), self.start)

    def by_itself(self) -> ClientModels:
        """The same, for what one process does while the others do not."""
        return self._replace(base=self.base._replace(processes=Processes()))


def client_models(base: Base, tasks: Sequence[Task], training: LocalTraining, seed: int) -> ClientModels:
    """The clients of ``idgen`` tasks over ``base``; its model comes from ``attach_lora`` and is moved to its device.

    They are ranked with the precision in which they train.
    """
    base.model.to(base.device)
    together = base.processes if base.processes.within_a_client else Processes()
    base = base._replace(processes=together, context=base.context._replace(precision=training.precision))
    dense = all(task.trie.has_own_tokens for task in tasks)
    clients = [client_of(base, task, seed, training.batch_size, dense) for task in tasks]
    if any(client.sample is not None for client in clients):  # then all of them train by rows
        clients = [client._replace(sample=client.sample or (lambda batch, generator: batch)) for client in clients]
    shapes = adapter_shapes(base.model)
    rows = Rows(rows_of_clients(shapes, tasks), rows_at_home(shapes, tasks)) if dense else Rows()
    return ClientModels(base, clients, training, seed, rows)


Update = tuple[Tree, Tree, dict[str, Any]]
"""What a client sends, its new own row, its log."""
TrainClient = Callable[[int, Download, Tree, int], Update]
"""round, download as the client has it, its own row, client -> its update."""
MakesModel = Callable[[str, Download, Tree, int], ClientModel]
"""variant, download as the client has it, its own row, client -> its model."""


def own_state(models: ClientModels, start: Tree) -> Tree:
    """``own.*``: the same start for every client."""
    return with_prefix(stack_trees([start] * models.num_clients), "own")


def client_updates(
    models: ClientModels, train: TrainClient, weighting: Weighting = "uniform"
) -> Callable[[int, Download, Tree, Block], tuple[Upload, Tree, list[dict]]]:
    """The ``client_update`` of a method that trains the clients of a block one after the other.

    With uniform ``weighting`` the number of samples stays with the client.
    """

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        clients = block.clients.tolist()
        updates = [
            train(round, download_of(download, row), take_row(own, row), client) for row, client in enumerate(clients)
        ]
        sent, rows, logs = zip(*updates, strict=True)
        counted = weighting == "examples"
        weight_C = torch.tensor([float(models.clients[client].num_examples) if counted else 1.0 for client in clients])
        return Upload(block.clients, weight_C, stack_trees(sent)), stack_trees(rows), list(logs)

    return client_update


def client_positions(
    client_model: MakesModel,
) -> Callable[[str, Download, Tree, Block, str], list[Tensor]]:
    """The ``positions`` of a method by the models that it makes."""

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        return [
            client_model(variant, download_of(download, row), take_row(own, row), client).positions(split)
            for row, client in enumerate(block.clients.tolist())
        ]

    return positions
