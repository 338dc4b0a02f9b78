"""Federated SASRec: FedAvg (McMahan et al., 2017) of a sequence model over silos and domains.

The model is that of the centralised row (:mod:`fedecider.baselines.sasrec`), so that the two differ in nothing but the
federation: one client alone is centralised SASRec, bit for bit.

Shape legend: C clients of a block, N clients, K sets of layers, R items of all catalogues, I items of the largest
catalogue, D dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from fedecider.id_based.moments import moments, restore
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
class FedsasrecConfig:
    """Settings of federated SASRec.

    Args:
        share: What is averaged. catalogue: layers and item tables over the silos of one catalogue; all: layers over all
            clients, item tables over the silos of a catalogue; layers: layers alone, over all clients, and every client
            keeps its item table; nothing: every client trains alone.
        weighting: How clients weigh in the mean: uniform alike, examples by their training sequences.
        moments: Adam's moments of a client: kept from round to round, as training in one place does, or fresh.
        local_epochs: The number of passes over a client's sequences in a round.
        embedding_size: The width of items, positions and states.
        num_layers: The number of blocks of attention and feed-forward.
        num_heads: The number of attention heads, a divisor of embedding_size.
        max_length: The newest events of a history that the model reads.
        dropout: The share of inputs, attention weights and block outputs that is set to 0 in training.
        learning_rate: The learning rate of Adam.
        batch_size: The number of sequences of a step.
        weight_decay: The decoupled decay of all parameters; 0 is Adam.
    """

    share: Share = "catalogue"
    weighting: Literal["uniform", "examples"] = "examples"
    moments: Literal["kept", "fresh"] = "kept"
    local_epochs: Epochs = 2
    embedding_size: Width = 64
    num_layers: Depth = 2
    num_heads: Depth = 2
    max_length: Width = 50
    dropout: ShareBelow1 = 0.3
    learning_rate: Positive = 3e-3
    batch_size: OneOrMore = 64
    weight_decay: NotNegative = 0.0

    def __post_init__(self) -> None:
        self.model  # noqa: B018 (refuses what the model cannot be)

    @property
    def model(self) -> SasrecConfig:
        """The settings of the same model in one place."""
        names = SasrecConfig.__dataclass_fields__.keys() & self.__dataclass_fields__.keys()
        return SasrecConfig(**{name: getattr(self, name) for name in names})


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
    told = SHARED[config.share]
    data = [client.packed(config.max_length) for client in clients]
    starts = [
        _parameters(start_model(client.num_items, config.model, clients.seed))
        for client in clients.first_of_catalogue()
    ]
    layer_names = [name for name in starts[0] if name != ITEMS]
    num_sets = clients.num_catalogues if told.by_catalogue else 1
    local = MODEL + "{}"

    def init() -> tuple[Tree, Tree]:
        server: Tree = {}
        if told.layers:
            server |= {name: torch.stack([start[name] for start in starts[:num_sets]]) for name in layer_names}
        if told.items:
            server[ITEMS] = torch.cat([start[ITEMS] for start in starts])
        own = {
            name: torch.stack([_padded(first[name], name) for first in map(_start_of, clients.clients)])
            for name in starts[0]
        }
        kept = {local.format(name): tensor for name, tensor in own.items()}
        if config.moments == "kept":
            for moment in ("first", "second"):
                kept |= {f"{moment}.{name}": torch.zeros_like(tensor) for name, tensor in own.items()}
            kept["steps"] = torch.zeros(clients.num_clients, dtype=torch.float32)
        move = lambda tree: {name: tensor.to(clients.device) for name, tensor in tree.items()}  # noqa: E731
        return move(server), move(kept)

    def _start_of(client: Client) -> Tree:
        return {**starts[client.catalogue if told.by_catalogue else 0], ITEMS: starts[client.catalogue][ITEMS]}

    def _padded(tensor: Tensor, name: str) -> Tensor:
        """As long as the largest catalogue, where it is a table."""
        if not name.endswith(ITEMS):
            return tensor
        return torch.cat([tensor, tensor.new_zeros(clients.most_items - len(tensor), tensor.shape[1])])

    def marks(numbers: Tensor) -> Tree:
        """Rows that each client gets and sends."""
        found: Tree = {}
        if told.layers and num_sets > 1:
            set_C = torch.tensor([clients.clients[number].catalogue for number in numbers.tolist()])
            found |= dict.fromkeys(layer_names, torch.nn.functional.one_hot(set_C, num_sets).bool())
        if told.items:
            found[ITEMS] = clients.marked_rows(numbers)
        return found

    def broadcast(round: int, server: Tree, numbers: Tensor) -> Download:
        return Download(server, sent_rows=marks(numbers))

    def known(download: Download, own: Tree, row: int, number: int) -> Tree:
        """The parameters that a client starts from: what it was sent, and its own for the rest."""
        client = clients.clients[number]
        found = {name: own[local.format(name)][row] for name in starts[0]}
        found[ITEMS] = found[ITEMS][: client.num_items]
        if told.layers:
            place = client.catalogue if told.by_catalogue else 0
            found |= {name: download.shared[name][place] for name in layer_names}
        if told.items:
            found[ITEMS] = download.shared[ITEMS][client.rows]
        return found

    def loaded(parameters: Tree, number: int) -> Sasrec:
        with torch.random.fork_rng():
            model = Sasrec(clients.clients[number].num_items, config.model).to(clients.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(parameters[name])
        return model

    def train(download: Download, own: Tree, row: int, number: int, round: int) -> tuple[Tree, Tree, dict[str, Any]]:
        """What a client sends, its new own row, and its log; it keeps what it had where training was not finite."""
        model, before = loaded(known(download, own, row, number), number), take_row(own, row)
        optimizer = make_optimizer(model, config.model)
        if config.moments == "kept" and before["steps"] > 0:
            restore(optimizer, model, before)
        item_SL, length_S = (tensor.to(clients.device) for tensor in data[number])
        loss = 0.0
        for epoch in range((round - 1) * config.local_epochs, round * config.local_epochs):
            seed = clients.seed_of(number)
            loss = run_epoch(model, optimizer, item_SL, length_S, config.model, seed=seed, epoch=epoch)
        trained = _parameters(model)
        kept = {local.format(name): tensor for name, tensor in trained.items()}
        if config.moments == "kept":
            kept |= moments(optimizer, model)
        after = {name: _padded(tensor, name) for name, tensor in kept.items()}
        finite = all(bool(tensor.isfinite().all()) for tensor in after.values())
        return upload_of_one(trained, number), after if finite else before, {"loss": loss, "finite": finite}

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        numbers = block.clients.tolist()
        done = [train(download, own, row, number, round) for row, number in enumerate(numbers)]
        sent, new, logs = zip(*done, strict=True)
        weight_C = torch.tensor([float(len(data[n][1])) if config.weighting == "examples" else 1.0 for n in numbers])
        upload = Upload(block.clients, weight_C, _stacked(sent), sent_rows=marks(block.clients))
        return upload, _stacked(new), list(logs)

    def upload_of_one(trained: Tree, number: int) -> Tree:
        client, found = clients.clients[number], {}
        if told.layers:
            place = client.catalogue if told.by_catalogue else 0
            for name in layer_names:
                found[name] = trained[name].new_zeros(num_sets, *trained[name].shape)
                found[name][place] = trained[name]
        if told.items:
            found[ITEMS] = trained[ITEMS].new_zeros(clients.num_rows, trained[ITEMS].shape[1])
            found[ITEMS][client.rows] = trained[ITEMS]
        return found

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return weighted_mean(uploads, fallback=server)

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        places = []
        for row, number in enumerate(block.clients.tolist()):
            client = clients.clients[number]
            if variant == "global":
                parameters = known(download, own, row, number)
            else:
                parameters = {name: own[local.format(name)][row] for name in starts[0]}
                parameters[ITEMS] = parameters[ITEMS][: client.num_items]
            model = loaded(parameters, number)
            places.append(clients.rank(number, scores(model, client.sequences, split), split))
        return places

    return FederatedMethod(
        "fedsasrec",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        ("local",) if config.share == "nothing" else ("global", "local"),
        upload_like=lambda round, server: server,
        takes_mean=True,
        bounds_norms=True,
    )


def _parameters(model: Sasrec) -> Tree:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _stacked(trees: Sequence[Tree]) -> Tree:
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


METHOD = Method(FedsasrecConfig, fedsasrec, GRID, SPACE)
