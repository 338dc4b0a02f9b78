"""Federated SASRec: FedAvg (McMahan et al., 2017) of a sequence model over silos and domains.

The model is that of the centralised row (:mod:`fedecider.baselines.sasrec`), so that the two differ in nothing but the
federation: one client alone is centralised SASRec, bit for bit.

Shape legend: C clients of a block, N clients, K sets of layers, R items of all catalogues, I items of the largest
catalogue, D dims.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedecider.baselines.sasrec import Sasrec, SasrecConfig, make_optimizer, run_epoch, scores, start_model
from fedecider.bounds import Depth, Epochs, NotNegative, OneOrMore, Positive, ShareBelow1, Width, dataclass
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.id_based.clients import Client, IdClients
from fedecider.id_based.methods import Method
from fedecider.id_based.trees import moments, moved, padded_tables, parameters_of, restore, stacked
from fedecider.search_space import OneOf, Real, Space, Whole

Share = Literal["catalogue", "all", "layers", "nothing"]

GRID: tuple[dict[str, Any], ...] = (
    {},
    {"share": "all"},
    {"dropout": 0.5},
    {"moments": "fresh"},
    {"local_epochs": 1},
    {"learning_rate": 1e-3},
)
SPACE: Space = {
    "share": OneOf(("all", "catalogue", "layers")),
    "moments": OneOf(("kept", "fresh")),
    "local_epochs": Whole(1, 5),
    "learning_rate": Real(0.0003, 0.01, log=True),
    "dropout": Real(0.0, 0.7),
    "embedding_size": OneOf((32, 64, 128)),
}
ITEMS, MODEL = "item_ID", "own."


@dataclass(frozen=True)
class SequenceConfig:
    """Settings that methods share whose clients train a SASRec.

    Args:
        local_epochs: The number of passes over a client's sequences in a round.
        embedding_size: The width of items, positions and states.
        num_layers: The number of blocks of attention and feed-forward.
        num_heads: The number of attention heads, a divisor of embedding_size.
        max_length: The newest events of a history that the model reads.
        dropout: The share of inputs, attention weights and block outputs that is set to 0 in training.
        learning_rate: The learning rate of Adam.
        batch_size: The number of sequences of a step.
    """

    local_epochs: Epochs = 2
    embedding_size: Width = 64
    num_layers: Depth = 2
    num_heads: Depth = 2
    max_length: Width = 50
    dropout: ShareBelow1 = 0.3
    learning_rate: Positive = 3e-3
    batch_size: OneOrMore = 64

    def __post_init__(self) -> None:
        self.model  # noqa: B018 (refuses what the model cannot be)

    @property
    def model(self) -> SasrecConfig:
        """The settings of the same model in one place."""
        names = SasrecConfig.__dataclass_fields__.keys() & self.__dataclass_fields__.keys()
        return SasrecConfig(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class FedsasrecConfig(SequenceConfig):
    """Settings of federated SASRec.

    Args:
        share: What is averaged. catalogue: layers and item tables over the silos of one catalogue; all: layers over all
            clients, item tables over the silos of a catalogue; layers: layers alone, over all clients, and every client
            keeps its item table; nothing: every client trains alone.
        weighting: How clients weigh in the mean: uniform alike, examples by their training sequences.
        moments: Adam's moments of a client: kept from round to round, as training in one place does, or fresh.
        weight_decay: The decoupled decay of all parameters; 0 is Adam.
    """

    share: Share = "catalogue"
    weighting: Literal["uniform", "examples"] = "examples"
    moments: Literal["kept", "fresh"] = "kept"
    weight_decay: NotNegative = 0.0


class Shared(NamedTuple):
    """What travels under a value of ``share``."""

    layers: bool
    items: bool
    by_catalogue: bool
    """Whether every catalogue has layers of its own."""


SHARED = {
    "catalogue": Shared(True, True, True),
    "all": Shared(True, True, False),
    "layers": Shared(True, False, False),
    "nothing": Shared(False, False, True),
}


def fedsasrec(clients: IdClients, config: FedsasrecConfig) -> FederatedMethod:
    """``theta <- sum_i n_i theta_i / sum_i n_i`` over the clients that hold a parameter, ``theta_i`` trained from it.

    All catalogues lie in one table of R rows; a client receives, trains and sends the rows of its own catalogue, so the
    mean of a row is over those who hold it. Layers are (K, ...): one set for all, or one a catalogue. Variants:
    ``global`` (after the aggregation, reported) and ``local`` (as the client ended its training). A client trains on
    its own users' train parts and on the public users of its catalogue, as the centralised row does. ``n_i`` counts
    both.

    Source: the model is SASRec (Kang and McAuley, ICDM 2018), with the deviations of the centralised row; the
    federation is FedAvg. Differs: clients step with Adam, whose moments they keep; rows are averaged over holders.
    """
    starts = [
        parameters_of(start_model(client.num_items, config.model, clients.seed))
        for client in clients.first_of_catalogue()
    ]
    data = [client.packed(config.max_length) for client in clients]
    rounds = _Rounds(clients, config, SHARED[config.share], starts, data)
    return FederatedMethod(
        "fedsasrec",
        rounds.init,
        rounds.broadcast,
        rounds.client_update,
        lambda round, server, uploads: weighted_mean(uploads, fallback=server),
        rounds.positions,
        ("local",) if config.share == "nothing" else ("global", "local"),
        upload_like=lambda round, server: server,
        takes_mean=True,
        bounds_norms=True,
    )


class _Rounds(NamedTuple):
    """The parts of the method."""

    clients: IdClients
    config: FedsasrecConfig
    shared: Shared
    starts: list[Tree]
    """Of each catalogue."""
    data: list[tuple[Tensor, Tensor]]
    """Of each client: packed sequences and their lengths."""

    @property
    def layer_names(self) -> list[str]:
        return [name for name in self.starts[0] if name != ITEMS]

    @property
    def num_sets(self) -> int:
        """Sets of layers."""
        return self.clients.num_catalogues if self.shared.by_catalogue else 1

    def set_of(self, client: Client) -> int:
        return client.catalogue if self.shared.by_catalogue else 0

    def init(self) -> tuple[Tree, Tree]:
        server: Tree = {}
        if self.shared.layers:
            sets = self.starts[: self.num_sets]
            server |= {name: torch.stack([start[name] for start in sets]) for name in self.layer_names}
        if self.shared.items:
            server[ITEMS] = torch.cat([start[ITEMS] for start in self.starts])
        first = [
            {**self.starts[self.set_of(client)], ITEMS: self.starts[client.catalogue][ITEMS]} for client in self.clients
        ]
        own = stacked([self.padded(start) for start in first])
        local = {MODEL + name: tensor for name, tensor in own.items()}
        if self.config.moments == "kept":
            for moment in ("first", "second"):
                local |= {f"{moment}.{name}": torch.zeros_like(tensor) for name, tensor in own.items()}
            local["steps"] = torch.zeros(self.clients.num_clients, dtype=torch.float32)
        return moved(server, self.clients.device), moved(local, self.clients.device)

    def padded(self, tree: Tree) -> Tree:
        """With item tables as long as the largest catalogue."""
        return padded_tables(tree, (ITEMS,), self.clients.most_items)

    def sent_rows(self, numbers: Tensor) -> Tree:
        """Rows that each client gets and sends."""
        marks: Tree = {}
        if self.shared.layers and self.num_sets > 1:
            set_C = torch.tensor([self.clients.clients[number].catalogue for number in numbers.tolist()])
            marks |= dict.fromkeys(self.layer_names, torch.nn.functional.one_hot(set_C, self.num_sets).bool())
        if self.shared.items:
            marks[ITEMS] = self.clients.marked_rows(numbers)
        return marks

    def broadcast(self, round: int, server: Tree, numbers: Tensor) -> Download:
        return Download(server, sent_rows=self.sent_rows(numbers))

    def own_parameters(self, own: Tree, number: int) -> Tree:
        parameters = {name: own[MODEL + name] for name in self.starts[0]}
        parameters[ITEMS] = parameters[ITEMS][: self.clients.clients[number].num_items]
        return parameters

    def received_parameters(self, download: Download, own: Tree, number: int) -> Tree:
        """The parameters that a client starts from: what it was sent, and its own for the rest."""
        client, parameters = self.clients.clients[number], self.own_parameters(own, number)
        if self.shared.layers:
            parameters |= {name: download.shared[name][self.set_of(client)] for name in self.layer_names}
        if self.shared.items:
            parameters[ITEMS] = download.shared[ITEMS][client.rows]
        return parameters

    def model_with(self, parameters: Tree, number: int) -> Sasrec:
        with torch.random.fork_rng():
            model = Sasrec(self.clients.clients[number].num_items, self.config.model).to(self.clients.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(parameters[name])
        return model

    def client_update(self, round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        numbers = block.clients.tolist()
        done = [self.train(download, take_row(own, row), number, round) for row, number in enumerate(numbers)]
        sent, new, logs = zip(*done, strict=True)
        by_examples = self.config.weighting == "examples"
        weight_C = torch.tensor([float(len(self.data[number][1])) if by_examples else 1.0 for number in numbers])
        upload = Upload(block.clients, weight_C, stacked(sent), sent_rows=self.sent_rows(block.clients))
        return upload, stacked(new), list(logs)

    def train(self, download: Download, before: Tree, number: int, round: int) -> tuple[Tree, Tree, dict[str, Any]]:
        """What a client sends, its new own row, and its log; it keeps what it had where training was not finite."""
        config, clients = self.config, self.clients
        model = self.model_with(self.received_parameters(download, before, number), number)
        optimizer = make_optimizer(model, config.model)
        if config.moments == "kept" and before["steps"] > 0:
            restore(optimizer, model, before)
        item_SL, length_S = (tensor.to(clients.device) for tensor in self.data[number])
        loss = 0.0
        for epoch in range((round - 1) * config.local_epochs, round * config.local_epochs):
            seed = clients.seed_of(number)
            loss = run_epoch(model, optimizer, item_SL, length_S, config.model, seed=seed, epoch=epoch)
        trained = parameters_of(model)
        kept = {MODEL + name: tensor for name, tensor in trained.items()}
        if config.moments == "kept":
            kept |= moments(optimizer, model)
        after = self.padded(kept)
        finite = all(bool(tensor.isfinite().all()) for tensor in after.values())
        return self.sent_by(trained, number), after if finite else before, {"loss": loss, "finite": finite}

    def sent_by(self, trained: Tree, number: int) -> Tree:
        client, tensors = self.clients.clients[number], {}
        if self.shared.layers:
            for name in self.layer_names:
                tensors[name] = trained[name].new_zeros(self.num_sets, *trained[name].shape)
                tensors[name][self.set_of(client)] = trained[name]
        if self.shared.items:
            tensors[ITEMS] = trained[ITEMS].new_zeros(self.clients.num_rows, trained[ITEMS].shape[1])
            tensors[ITEMS][client.rows] = trained[ITEMS]
        return tensors

    def positions(self, variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        positions = []
        for row, number in enumerate(block.clients.tolist()):
            mine = take_row(own, row)
            parameters = (
                self.received_parameters(download, mine, number)
                if variant == "global"
                else self.own_parameters(mine, number)
            )
            score = scores(self.model_with(parameters, number), self.clients.clients[number].sequences, split)
            positions.append(self.clients.rank(number, score, split))
        return positions


METHOD = Method(FedsasrecConfig, fedsasrec, GRID, SPACE)
