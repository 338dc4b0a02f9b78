"""FedDCSR (SDM 2024), compact: what a user likes everywhere is learnt together, what it likes in one domain there.

Two variational encoders of a history: one is averaged, one is a domain's own.

Shape legend: I items of a catalogue, B sequences of a batch, L events (right-padded), P pairs, K that differ, D dims,
N clients, C clients of a block, G customers, R reference rows (one per customer), S training
sequences, T targets (no padding).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedecider.baselines.sasrec import Block as AttentionBlock
from fedecider.baselines.sasrec import is_event, pack, softmax_gradient
from fedecider.bounds import Depth, Epochs, NotNegative, OneOrMore, Positive, ShareBelow1, Width, dataclass
from fedecider.evaluation.protocols import ScoreUsers, history, train_part
from fedecider.federation.aggregate import finite_clients, weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import derive_seed, stream
from fedecider.federation.wire import take_row
from fedecider.id_based.clients import Client, IdClients
from fedecider.id_based.methods import Method
from fedecider.id_based.trees import moments, moved, padded_tables, parameters_of, restore, stacked
from fedecider.search_space import OneOf, Real, Space, Whole

MARGIN = 0.3
"""Between the two outputs of the discriminator."""


class Shape(NamedTuple):
    """Sizes of the model, named as in :class:`fedecider.id_based.feddcsr.FeddcsrConfig`."""

    embedding_size: int
    num_layers: int
    num_heads: int
    max_length: int


class Gaussian(NamedTuple):
    """Independent normal distributions."""

    mean: Tensor
    log_variance: Tensor

    def drawn(self, sampled: bool) -> Tensor:
        """``mean + sigma eps`` from the global generator, or the mean."""
        if not sampled:
            return self.mean
        return self.mean + torch.exp(0.5 * self.log_variance) * torch.randn_like(self.mean)

    def at(self, index: Any) -> Gaussian:
        return Gaussian(self.mean[index], self.log_variance[index])


def divergence(one: Gaussian) -> Tensor:
    """KL from the standard normal distribution, ``sum (mu^2 + s^2 - 1 - ln s^2) / 2`` over the last dimension."""
    return 0.5 * (one.mean.square() + one.log_variance.exp() - 1.0 - one.log_variance).sum(-1)


def pull(near_B: Tensor, far_B: Tensor, has_B: Tensor) -> Tensor:
    """``mean relu(0.3 - sigmoid(near) + sigmoid(far))`` over the marked users; 0 where none is marked."""
    loss_B = (MARGIN - near_B.sigmoid() + far_B.sigmoid()).relu()
    return (loss_B * has_B).sum() / has_B.sum().clamp(min=1)


def contrast(one_BD: Tensor, other_BD: Tensor) -> Tensor:
    """``-log softmax`` of the cosine of a user's two views among those to the other users' second ones, the mean."""
    cosine_BB = functional.normalize(one_BD, dim=1) @ functional.normalize(other_BD, dim=1).T
    return functional.cross_entropy(cosine_BB, torch.arange(len(one_BD), device=one_BD.device))


class Stack(nn.Module):
    """Causal self-attention blocks, then a norm; those of SASRec."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.embedding_size
        self.blocks = nn.ModuleList(AttentionBlock(size, shape.num_heads) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(size)

    def forward(self, state_BLD: Tensor, dropout: float) -> Tensor:
        for block in self.blocks:
            state_BLD = block(state_BLD, dropout)
        return self.norm(state_BLD)


class Encoder(nn.Module):
    """A distribution at each position of a history."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.mean, self.log_variance = Stack(shape), Stack(shape)

    def forward(self, state_BLD: Tensor, dropout: float) -> Gaussian:
        return Gaussian(self.mean(state_BLD, dropout), self.log_variance(state_BLD, dropout))


class Input(nn.Module):
    """Item vectors after the graph layer, with positions counted from the newest event."""

    def __init__(self, num_items: int, shape: Shape) -> None:
        super().__init__()
        size = shape.embedding_size
        self.item_ID = nn.Parameter(0.02 * torch.randn(num_items, size))
        self.bias_D = nn.Parameter(torch.zeros(size))
        self.position_LD = nn.Parameter(0.02 * torch.randn(shape.max_length, size))
        self.norm = nn.LayerNorm(size)

    def forward(self, graph_II: Tensor, item_BL: Tensor, length_B: Tensor, dropout: float) -> Tensor:
        """``norm(sqrt(D) (x + (x + A x + b) / 2) + position)`` (B, L, D), ``A`` (I, I) sparse."""
        layer_ID = 0.5 * (self.item_ID + torch.sparse.mm(graph_II, self.item_ID) + self.bias_D)
        place_BL = (length_B[:, None] - 1 - torch.arange(item_BL.shape[1], device=item_BL.device)).clamp(min=0)
        vector_BLD = functional.embedding(item_BL, self.item_ID + layer_ID) * self.item_ID.shape[1] ** 0.5
        return functional.dropout(self.norm(vector_BLD + self.position_LD[place_BL]), dropout)


class Dcsr(nn.Module):
    """The model of one domain."""

    def __init__(self, num_items: int, shape: Shape) -> None:
        super().__init__()
        size = shape.embedding_size
        self.shared_encoder, self.exclusive_encoder = Encoder(shape), Encoder(shape)
        self.discriminator = nn.Sequential(nn.Linear(2 * size, size), nn.ReLU(), nn.Linear(size, 1))
        self.shared_input, self.exclusive_input = Input(num_items, shape), Input(num_items, shape)
        self.output = nn.Linear(size, num_items)

    def shared(self, graph_II: Tensor, item_BL: Tensor, length_B: Tensor, dropout: float = 0.0) -> Gaussian:
        return self.shared_encoder(self.shared_input(graph_II, item_BL, length_B, dropout), dropout)

    def exclusive(self, graph_II: Tensor, item_BL: Tensor, length_B: Tensor, dropout: float = 0.0) -> Gaussian:
        return self.exclusive_encoder(self.exclusive_input(graph_II, item_BL, length_B, dropout), dropout)

    def told_apart(self, one_BD: Tensor, reference_BD: Tensor) -> Tensor:
        """(B,) logits of the discriminator: whether a representation goes with a global one."""
        return self.discriminator(torch.cat([one_BD, reference_BD], 1))[:, 0]

    @torch.no_grad()
    def catalogue(self, graph_II: Tensor, item_BL: Tensor, length_B: Tensor) -> Tensor:
        """Logits (B, I) after the newest event from the means; 0 for all where the history is empty."""
        last = last_event(length_B)
        asked = (graph_II, item_BL, length_B)
        logit_BI = self.output(self.shared(*asked).mean[last] + self.exclusive(*asked).mean[last])
        return logit_BI * (length_B > 0)[:, None]


def last_event(length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the newest event of each history in (B, L, ...); of an empty one the first place."""
    return torch.arange(len(length_B), device=length_B.device), (length_B - 1).clamp(min=0)


def shuffled(item_BL: Tensor, length_B: Tensor) -> Tensor:
    """Each history in another order, from the global generator; padding stays at the end."""
    key_BL = torch.rand(item_BL.shape, device=item_BL.device).masked_fill(~is_event(item_BL, length_B), 2.0)
    return item_BL.gather(1, key_BL.argsort(1))


def successors(sequences: Sequence[Sequence[int]], num_items: int) -> Tensor:
    """(I, I) sparse: how often an item follows another one in ``sequences``, as shares of the rows that have any."""
    pairs = [pair for items in sequences for pair in pairwise(items)]
    place_2P = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T
    counted = torch.sparse_coo_tensor(place_2P, torch.ones(len(pairs)), (num_items, num_items), check_invariants=True)
    counted = counted.coalesce()
    row_K = counted.indices()[0]
    total_I = torch.zeros(num_items).index_add_(0, row_K, counted.values())
    return torch.sparse_coo_tensor(
        counted.indices(), counted.values() / total_I[row_K], counted.shape, is_coalesced=True, check_invariants=True
    )


GRID: tuple[dict[str, Any], ...] = (
    {},
    {"learning_rate": 3e-3},
    {"sampled": False},
    {"dropout": 0.5},
    {"kl_cap": 0.001},
    {"pull_weight": 2.0},
    {"contrast_weight": 0.1},
)
SPACE: Space = {
    "learning_rate": Real(0.0003, 0.01, log=True),
    "dropout": Real(0.0, 0.7),
    "sampled": OneOf((True, False)),
    "kl_cap": Real(0.0001, 1.0, log=True),
    "pull_weight": Real(0.01, 3.0, log=True),
    "contrast_weight": Real(0.01, 3.0, log=True),
    "embedding_size": OneOf((32, 64, 128)),
    "local_epochs": Whole(1, 5),
}
ENCODER, OWN, USERS, KNOWN = "shared_encoder.", "own.", "user_shared", "known"
TABLES = ("shared_input.item_ID", "exclusive_input.item_ID", "output.weight", "output.bias")
"""Parameters with a row per item of the catalogue."""
KL_STEPS = 10_000
"""Steps after which the KL terms have weight 1, were there no cap."""


@dataclass(frozen=True)
class FeddcsrConfig:
    """Settings of FedDCSR.

    Args:
        share: What travels: all is the shared encoder and the users' shared representations; with nothing every domain
            trains alone.
        pull_weight: The weight of the term that draws shared representations to the users' global ones and leaves
            exclusive ones away from them; with 0 no representation is sent.
        contrast_weight: The weight of the contrast between users' exclusive representations.
        kl_cap: The largest weight of the KL terms, which grows by 1/10000 with every step of a client.
        sampled: If true, representations are drawn from their distributions in training; if false, they are the means.
        local_epochs: The number of passes over a client's sequences in a round.
        embedding_size: The width of items, positions and representations.
        num_layers: The number of blocks of attention and feed-forward in each of the four stacks.
        num_heads: The number of attention heads, a divisor of embedding_size.
        max_length: The newest events of a history that the model reads.
        dropout: The share of inputs, attention weights and block outputs that is set to 0 in training.
        learning_rate: The learning rate of Adam.
        batch_size: The number of sequences of a step.
    """

    share: Literal["all", "nothing"] = "all"
    pull_weight: NotNegative = 0.5
    contrast_weight: NotNegative = 1.0
    kl_cap: NotNegative = 0.01
    sampled: bool = True
    local_epochs: Epochs = 3
    embedding_size: Width = 64
    num_layers: Depth = 1
    num_heads: Depth = 2
    max_length: Width = 50
    dropout: ShareBelow1 = 0.3
    learning_rate: Positive = 1e-3
    batch_size: OneOrMore = 64

    def __post_init__(self) -> None:
        if self.embedding_size % self.num_heads:
            raise ValueError(
                f"got num_heads {self.num_heads}, expected a divisor of embedding_size {self.embedding_size}"
            )

    @property
    def shape(self) -> Shape:
        return Shape(self.embedding_size, self.num_layers, self.num_heads, self.max_length)

    @property
    def sends_users(self) -> bool:
        return self.share == "all" and self.pull_weight > 0.0


class Histories(NamedTuple):
    """What a client trains on; inputs are all events but the last, targets all but the first."""

    item_SL: Tensor
    length_S: Tensor
    customer_S: Tensor
    """int64, -1 for public users."""
    graph_II: Tensor


class References(NamedTuple):
    """Global representations as a client got them."""

    vector_RD: Tensor
    known_R: Tensor


def feddcsr(clients: IdClients, config: FeddcsrConfig) -> FederatedMethod:
    """Histories are encoded twice, ``z_s`` by an encoder that is averaged, ``z_e`` by one that stays; both predict.

    ``CE(z_s + z_e) + CE(z_e) + kappa (KL_s + KL_e) + pull_weight h(D(z_s, g), D(z_e', g)) + contrast_weight NCE(z_e,
    z_e of the shuffled history)``, ``z ~ N(mu, sigma^2)`` at each position, ``h`` of :func:`pull` and NCE of
    :func:`contrast` at the last one, ``z_e'`` a second draw, ``g`` the user's global representation. After its training
    a client sends the encoder and ``z_s = mu_s`` of its own users' training inputs; the server takes ``sum_i n_i x_i /
    sum_i n_i`` of encoders and, customer by customer over the domains that have them, of ``z_s``. A client gets the
    rows of its own users that are there, and a truth value for each. Scores are those of ``mu_s + mu_e`` over the
    catalogue.

    The server sees the weights of each encoder and, in the clear, a vector for each user of each domain, so it learns
    who is where; a domain gets means, from which, of two domains, it can subtract its own part. There is no noise.

    Source: Zhang et al., SDM 2024: abstract and public code, read. Differs: ``g`` is a user's own; the code
    (``variant code``) averages row b of the last batch of every domain. ``D`` reads the last position instead of all;
    sent vectors are means without dropout; means over events leave out padding; items of silos of one catalogue are
    not averaged; public users are trained on and have no ``g``.
    """
    data = [_histories(client, config, clients.device) for client in clients]
    starts = [
        parameters_of(_start_model(client.num_items, config.shape, clients.seed))
        for client in clients.first_of_catalogue()
    ]
    rounds = _Rounds(clients, config, data, starts)
    return FederatedMethod(
        "feddcsr",
        rounds.init,
        rounds.broadcast,
        rounds.client_update,
        rounds.server_aggregate,
        rounds.positions,
        ("global", "local") if rounds.federated else ("local",),
        upload_like=lambda round, server: {name: tensor for name, tensor in server.items() if name != KNOWN},
        takes_mean=True,
        bounds_norms=True,
    )


class _Rounds(NamedTuple):
    """The parts of the method."""

    clients: IdClients
    config: FeddcsrConfig
    data: list[Histories]
    starts: list[Tree]
    """Of each catalogue."""

    @property
    def federated(self) -> bool:
        return self.config.share == "all"

    @property
    def encoder_names(self) -> list[str]:
        return [name for name in self.starts[0] if name.startswith(ENCODER)]

    @property
    def num_references(self) -> int:
        return self.clients.num_customers

    def init(self) -> tuple[Tree, Tree]:
        server = {name: self.starts[0][name] for name in self.encoder_names} if self.federated else {}
        if self.config.sends_users:
            server[USERS] = torch.zeros(self.num_references, self.config.embedding_size)
            server[KNOWN] = torch.zeros(self.num_references, dtype=torch.bool)
        own = stacked([self.padded(self.starts[client.catalogue]) for client in self.clients])
        local: Tree = {"steps": torch.zeros(self.clients.num_clients, dtype=torch.float32)}
        for name, tensor in own.items():
            local[OWN + name] = tensor
            local |= {f"{moment}.{name}": torch.zeros_like(tensor) for moment in ("first", "second")}
        return moved(server, self.clients.device), moved(local, self.clients.device)

    def padded(self, tree: Tree) -> Tree:
        """With tables as long as the largest catalogue."""
        return padded_tables(tree, TABLES, self.clients.most_items)

    def visible_rows(self, numbers: Tensor) -> Tensor:
        """(C, R) bool: of which rows a client may know."""
        visible_CR = torch.zeros(len(numbers), self.num_references, dtype=torch.bool)
        for place, number in enumerate(numbers.tolist()):
            customer_S = self.data[number].customer_S
            visible_CR[place, customer_S[customer_S >= 0]] = True
        return visible_CR

    def broadcast(self, round: int, server: Tree, numbers: Tensor) -> Download:
        if not self.config.sends_users:
            return Download(server)
        visible_CR = self.visible_rows(numbers)
        return Download(server, sent_rows={USERS: visible_CR & server[KNOWN].cpu(), KNOWN: visible_CR})

    def references(self, download: Download, row: int) -> References | None:
        if not self.config.sends_users:
            return None
        return References(download.shared[USERS], download.sent_rows[USERS][row].to(self.clients.device))

    def model_with(self, own: Tree, number: int, shared: Tree) -> Dcsr:
        """The model of a client's own row, with the encoder of ``shared`` where it is there."""
        with torch.random.fork_rng():
            model = Dcsr(self.clients.clients[number].num_items, self.config.shape).to(self.clients.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(shared[name] if name in shared else own[OWN + name][: len(parameter)])
        return model

    def client_update(self, round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        numbers = block.clients.tolist()
        done = [self.train(download, take_row(own, row), row, number, round) for row, number in enumerate(numbers)]
        sent, marks, new, logs = zip(*done, strict=True)
        weight_C = torch.tensor([float(len(self.data[number].length_S)) for number in numbers])
        rows = {USERS: torch.stack(marks)} if self.config.sends_users else {}
        return Upload(block.clients, weight_C, stacked(sent), sent_rows=rows), stacked(new), list(logs)

    def train(
        self, download: Download, before: Tree, row: int, number: int, round: int
    ) -> tuple[Tree, Tensor, Tree, dict]:
        """The encoder and users (R, D) that a client sends, the marks of these, its new own row and its log."""
        config = self.config
        model, known = self.model_with(before, number, download.shared), self.references(download, row)
        optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), fused=True)
        if before["steps"] > 0:
            restore(optimizer, model, before)
        step, row_B = int(before["steps"]), torch.zeros(0, dtype=torch.int64)
        losses: list[Tensor] = []
        for epoch in range((round - 1) * config.local_epochs, round * config.local_epochs):
            losses = []
            with torch.random.fork_rng():  # neither layers nor draws on a device take a generator
                torch.manual_seed(derive_seed(self.clients.seed_of(number), "draws", epoch))
                for row_B in self.batches(number, epoch):
                    optimizer.zero_grad()
                    kl_weight = min(config.kl_cap, step / KL_STEPS)
                    losses.append(backward_batch(model, self.data[number], row_B, known, config, kl_weight))
                    optimizer.step()
                    step += 1
        trained = parameters_of(model)
        tensors, mark_R = {name: trained[name] for name in self.encoder_names} if self.federated else {}, torch.zeros(0)
        if config.sends_users:
            tensors[USERS], mark_R = self.represented(model, number)
        new = self.padded({OWN + name: tensor for name, tensor in trained.items()} | moments(optimizer, model))
        finite = all(bool(tensor.isfinite().all()) for tensor in new.values())
        log = {"loss": float(torch.stack(losses).mean()), "finite": finite}
        return tensors, mark_R, new if finite else before, log

    def batches(self, number: int, epoch: int) -> Iterator[Tensor]:
        generator = stream(self.clients.seed_of(number), "order", epoch)
        yield from torch.randperm(len(self.data[number].length_S), generator=generator).split(self.config.batch_size)

    def represented(self, model: Dcsr, number: int) -> tuple[Tensor, Tensor]:
        """(R, D) what a client sends of its users, 0 elsewhere, and (R,) where it has sent something."""
        data, size = self.data[number], self.config.batch_size
        row_S = (data.customer_S >= 0).nonzero()[:, 0]
        place_S = data.customer_S[row_S]
        vector_RD = torch.zeros(self.num_references, self.config.embedding_size, device=self.clients.device)
        mark_R = torch.zeros(self.num_references, dtype=torch.bool)
        mark_R[place_S] = True
        with torch.no_grad():
            for row_B, place_B in zip(row_S.split(size), place_S.split(size), strict=True):
                item_BL, length_B = _inputs(data, row_B)
                vector_RD[place_B] = model.shared(data.graph_II, item_BL, length_B).mean[last_event(length_B)]
        return vector_RD, mark_R

    def server_aggregate(self, round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        if not self.config.sends_users:
            return weighted_mean(uploads, fallback=server)
        known_R = server[KNOWN].clone()

        def noted() -> Iterator[Upload]:
            for upload in uploads:
                known_R.logical_or_(upload.sent_rows[USERS][finite_clients(upload)].any(0).to(known_R.device))
                yield upload

        return {**weighted_mean(noted(), fallback=server), KNOWN: known_R}

    def positions(self, variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        positions = []
        for row, number in enumerate(block.clients.tolist()):
            model = self.model_with(take_row(own, row), number, download.shared if variant == "global" else {})
            client, graph_II = self.clients.clients[number], self.data[number].graph_II
            positions.append(
                self.clients.rank(number, _scores(model, graph_II, client, self.config.max_length, split), split)
            )
        return positions


def backward_batch(
    model: Dcsr, data: Histories, row_B: Tensor, known: References | None, config: FeddcsrConfig, kl_weight: float
) -> Tensor:
    """Add the gradients of the loss of a batch; returns it."""
    item_BL, length_B = _inputs(data, row_B)
    target_BL = data.item_SL[row_B, 1 : item_BL.shape[1] + 1]
    event_BL, last = is_event(item_BL, length_B), last_event(length_B)
    shared = model.shared(data.graph_II, item_BL, length_B, config.dropout)
    exclusive = model.exclusive(data.graph_II, item_BL, length_B, config.dropout)
    shared_BLD, exclusive_BLD = shared.drawn(config.sampled), exclusive.drawn(config.sampled)
    other = model.exclusive(data.graph_II, shuffled(item_BL, length_B), length_B, config.dropout).at(last)
    rest = config.contrast_weight * contrast(exclusive_BLD[last], other.drawn(config.sampled))
    rest = rest + kl_weight * (divergence(shared.at(event_BL)) + divergence(exclusive.at(event_BL))).mean()
    reference_BD, has_B = _of_batch(data, row_B, known, config)
    near_B = model.told_apart(shared_BLD[last], reference_BD)
    far_B = model.told_apart(exclusive.at(last).drawn(config.sampled), reference_BD)
    rest = rest + config.pull_weight * pull(near_B, far_B, has_B)
    exclusive_TD, target_T = exclusive_BLD[event_BL], target_BL[event_BL]
    both_TD = shared_BLD[event_BL] + exclusive_TD
    asked = (target_T, model.output.weight, model.output.bias)
    of_both, both_gradient = softmax_gradient(both_TD, *asked)
    of_exclusive, exclusive_gradient = softmax_gradient(exclusive_TD, *asked)
    torch.autograd.backward([both_TD, exclusive_TD, rest], [both_gradient, exclusive_gradient, None])
    return of_both + of_exclusive + rest.detach()


def _of_batch(data: Histories, row_B: Tensor, known: References | None, config: FeddcsrConfig) -> tuple[Tensor, Tensor]:
    """Global representations (B, D) of a batch, 0 where there are none, and where there are some (B,)."""
    device = data.item_SL.device
    if known is None:
        return torch.zeros(len(row_B), config.embedding_size, device=device), torch.zeros(len(row_B), device=device) > 0
    place_B = data.customer_S[row_B].to(device)
    has_B = (place_B >= 0) & known.known_R[place_B.clamp(min=0)]
    return known.vector_RD[place_B.clamp(min=0)] * has_B[:, None], has_B


def _histories(client: Client, config: FeddcsrConfig, device: torch.device) -> Histories:
    item_SL, length_S = client.packed(config.max_length)
    parts = [list(part) for part in (*map(train_part, client.sequences), *client.public)]
    of_clients = [int(customer) for customer, part in zip(client.customer_U, parts, strict=False) if len(part) > 1]
    customer_S = torch.full((len(length_S),), -1)
    customer_S[: len(of_clients)] = torch.tensor(of_clients, dtype=torch.int64)
    graph_II = successors(parts, client.num_items).to(device)
    return Histories(item_SL.to(device), length_S.to(device), customer_S, graph_II)


def _inputs(data: Histories, row_B: Tensor) -> tuple[Tensor, Tensor]:
    length_B = data.length_S[row_B] - 1
    return data.item_SL[row_B, : int(length_B.max())], length_B


def _scores(model: Dcsr, graph_II: Tensor, client: Client, max_length: int, split: str) -> ScoreUsers:
    """Scores after the history that is known when the held-out item of ``split`` is asked for."""

    def score(user_B: Tensor) -> Tensor:
        histories = [history(client.sequences[user], split) for user in user_B.tolist()]
        item_BL, length_B = pack(histories, max_length)
        return model.catalogue(graph_II, item_BL.to(graph_II.device), length_B.to(graph_II.device))

    return score


def _start_model(num_items: int, shape: Shape, seed: int) -> Dcsr:
    with torch.random.fork_rng():  # layers take no generator
        torch.manual_seed(derive_seed(seed, "init"))
        return Dcsr(num_items, shape)


METHOD = Method(FeddcsrConfig, feddcsr, GRID, SPACE)
