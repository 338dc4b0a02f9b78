"""FedGCDR (NeurIPS 2024), compact: users of several domains carry noised vectors of one domain into another.

A user attends to itself, to its items and to friends, layer by layer.

Shape legend: B users of a batch, V neighbours (padded), S friends, L layers, D dims, N clients, U users of a client
(its own, then the public ones of its catalogue), I items of the largest catalogue, V items of a user (padded), S
sources, P pairs, G customers, F = L D.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedecider.baselines.fitting import Excluded, draw_outside, outside_of, pointwise_loss
from fedecider.baselines.sasrec import is_event, pack
from fedecider.bounds import Depth, Epochs, Float, Negatives, NotNegative, OneOrMore, Positive, Width, dataclass
from fedecider.evaluation.protocols import train_part
from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.privacy import PrivacyConfig, epsilon
from fedecider.federation.streams import stream
from fedecider.federation.wire import take_row
from fedecider.id_based.clients import Client, IdClients
from fedecider.id_based.methods import Method
from fedecider.search_space import OneOf, Real, Space, Whole


def user_layers(
    user_BD: Tensor,
    item_BVD: Tensor,
    is_item_BV: Tensor,
    attention_LD: Tensor,
    friend_BLSD: Tensor | None = None,
    is_friend_BS: Tensor | None = None,
) -> Tensor:
    """Vectors of the users after each layer (B, L, D).

    ``e_u <- sum_v a_v e_v`` over v in {u, items of u, friends}, ``a = softmax_v(a . e_v)``. The paper's logit is
    ``a_1 . e_u + a_2 . e_v``; the first term is the same for all v and cancels, so that it is left out.
    """
    state_BD, found = user_BD, []
    for layer, query_D in enumerate(attention_LD):
        parts, known = [state_BD[:, None], item_BVD], [is_item_BV.new_ones(len(user_BD), 1), is_item_BV]
        if friend_BLSD is not None and is_friend_BS is not None:
            parts, known = [*parts, friend_BLSD[:, layer]], [*known, is_friend_BS]
        neighbour_BVD = torch.cat(parts, 1)
        logit_BV = (neighbour_BVD @ query_D).masked_fill(~torch.cat(known, 1), -torch.inf)
        weight_BV = logit_BV.softmax(1)
        state_BD = (weight_BV[:, :, None] * neighbour_BVD).sum(1)
        found.append(state_BD)
    return torch.stack(found, 1)


def mapped(mlp: Tree, friend_BLSD: Tensor) -> Tensor:
    """``MLP_S`` of every source S, d -> 2 d -> d / 2 -> d with tanh in between; same shape."""
    state = friend_BLSD
    for number in (1, 2, 3):
        state = torch.einsum("blsd,sde->blse", state, mlp[f"weight_{number}"]) + mlp[f"bias_{number}"]
        state = state.tanh() if number < 3 else state
    return state


def mapping_loss(target_BLD: Tensor, mapped_BLSD: Tensor, is_friend_BS: Tensor) -> Tensor:
    """``l_m``, the mean over users of ``sum_{S, l} |x_T^l - MLP_S(x_S^l)|^2``; a user's friends are its sources."""
    square_BLS = (target_BLD[:, :, None] - mapped_BLSD).square().sum(-1)
    return (square_BLS * is_friend_BS[:, None]).sum((1, 2)).mean()


def similarity_loss(target_BLD: Tensor, mapped_BLSD: Tensor, is_friend_BS: Tensor) -> Tensor:
    """``l_s``, the mean over users of ``sum_l |x_T^l - sum_S sim_S m_S^l / sum_S sim_S|^2`` with ``m_S = MLP_S(x_S)``.

    ``sim_S`` is the cosine of ``x_T`` and ``m_S``, a constant; those below 0 count as 0, and a user without a source of
    positive cosine has no such term.
    """
    cosine_BLS = functional.cosine_similarity(target_BLD[:, :, None], mapped_BLSD, dim=-1).detach()
    weight_BLS = cosine_BLS.clamp(min=0.0) * is_friend_BS[:, None]
    total_BL = weight_BLS.sum(-1)
    mean_BLD = (weight_BLS[..., None] * mapped_BLSD).sum(2) / total_BL.clamp(min=1e-8)[..., None]
    return ((target_BLD - mean_BLD).square().sum(-1) * (total_BL > 1e-8)).sum(1).mean()


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
        """What the users' sources passed on, mapped; None in the phase without friends."""
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


GRID: tuple[dict[str, Any], ...] = (
    {},
    {"learning_rate": 0.03},
    {"embedding_size": 32},
    {"learning_rate": 0.003},
    {"similarity_weight": 0.1, "mapping_weight": 0.1},
)
SPACE: Space = {
    "learning_rate": Real(0.001, 0.1, log=True),
    "embedding_size": OneOf((8, 16, 32, 64)),
    "mapping_weight": Real(0.001, 1.0, log=True),
    "similarity_weight": Real(0.001, 1.0, log=True),
    "local_epochs": Whole(1, 5),
}


@dataclass(frozen=True)
class FedgcdrConfig:
    """Settings of FedGCDR.

    Args:
        source_rounds: The rounds in which every domain trains its own model; in the last one vectors are passed on.
        target_rounds: The rounds after that in which every domain trains its model with friends; all later rounds tune
            users and items.
        friends: Whose vectors a domain hands over: all sends noise for customers it does not know as well, which hides
            whom it knows; known sends none for them; with none nothing is passed on, and every domain trains alone.
        noise: The noise on what is passed on: accounted has the stated epsilon for one customer's vectors in full;
            paper has the published size, which is less; none adds nothing and hides nothing.
        epsilon: The epsilon of the noise, for one customer's vectors in one domain, the domain's model taken as given:
            not for events, which also enter items and so the vectors of others; those of several domains add up.
        delta: The delta of the noise.
        mapping_weight: The weight of the distance between a user and the mapped vectors of its sources.
        similarity_weight: The weight of the distance between a user and their mean.
        embedding_size: The width of users and items.
        num_layers: The number of layers of attention.
        init_std: The standard deviation of the normal start values.
        learning_rate: The learning rate of Adam.
        tuning_rate: The learning rate of Adam in the rounds that tune.
        local_epochs: The number of passes over a client's users in a round.
        batch_size: The number of users of a step.
        num_negatives: The number of negatives that are drawn for each positive, anew in every pass.
    """

    source_rounds: OneOrMore = 12
    target_rounds: OneOrMore = 12
    friends: Literal["all", "known", "none"] = "all"
    noise: Literal["accounted", "paper", "none"] = "accounted"
    epsilon: Positive = 8.0
    delta: Annotated[Float, Field(gt=0, lt=1)] = 1e-5
    mapping_weight: NotNegative = 0.01
    similarity_weight: NotNegative = 0.01
    embedding_size: Width = 16
    num_layers: Depth = 2
    init_std: NotNegative = 0.1
    learning_rate: Positive = 0.01
    tuning_rate: Positive = 0.005
    local_epochs: Epochs = 3
    batch_size: OneOrMore = 256
    num_negatives: Negatives = 4

    def __post_init__(self) -> None:
        if self.embedding_size % 2:
            raise ValueError(f"got embedding_size {self.embedding_size}, expected an even number: a layer halves it")

    @property
    def noise_std(self) -> float:
        """Of every number that is passed on; the vectors of one layer have length 1 at most."""
        if self.noise == "none":
            return 0.0
        if self.noise == "paper":
            return float((2.0 * torch.tensor(1.25 / self.delta, dtype=torch.float64).log()).sqrt()) / self.epsilon
        return noise_for(self.epsilon, self.delta) * 2.0 * self.num_layers**0.5


@cache
def noise_for(wanted: float, delta: float) -> float:
    """Noise per unit of sensitivity with which one Gaussian release is (``wanted``, ``delta``)-private, to 1e-6.

    By bisection of `fedecider.federation.privacy.epsilon`. ``ValueError`` where 1e6 is not enough.
    """
    low, high = 1e-3, 1e6

    def value(scale: float) -> float:
        return epsilon(PrivacyConfig(clip=1.0, noise_scale=scale, delta=delta), 1)

    if value(high) > wanted:
        raise ValueError(f"got epsilon {wanted} at delta {delta}, expected more: no noise of sensible size gives it")
    while high / low > 1.0 + 1e-6:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if value(middle) <= wanted else (middle, high)
    return high


def check_rounds(num_rounds: int, patience: int, participation: float, config: FedgcdrConfig) -> None:
    """``ValueError`` where a domain would not pass on, or nobody would use what is passed on."""
    if config.friends == "none":
        return
    if participation < 1.0:
        raise ValueError(
            f"got fedgcdr with participation {participation}, expected 1: every domain hands over in one and the same "
            "round, and a domain that is absent then never would"
        )
    if patience:
        raise ValueError(
            f"got fedgcdr with patience {patience}, expected 0: the rounds before and behind the handing over are "
            "stages of one schedule, and what begins anew has no better validation score at first"
        )
    if num_rounds <= config.source_rounds:
        raise ValueError(
            f"got num_rounds {num_rounds} with source_rounds {config.source_rounds}, expected more: no round would use "
            "what is passed on"
        )


def fedgcdr(clients: IdClients, config: FedgcdrConfig) -> FederatedMethod:
    """Three phases, told apart by the round: every domain alone; every domain with friends; users and items tuned.

    1. ``e_u^l`` by :func:`user_layers` over u and its items, score ``e_u^L . q_i``, binary cross-entropy.
    2. In round ``source_rounds`` a domain sends ``x_u = clip(e_u^l, 1) + noise`` of every customer and layer, once.
       Each other domain fetches those of its own users once, maps them (:func:`mapped`) and takes them for neighbours:
       loss ``BCE + mapping_weight / 2 l_m + similarity_weight / 2 l_s``. This model starts anew.
    3. ``e_u^L`` becomes a table of its own; it and ``q_i`` are tuned by the cross-entropy of their dot product.

    Source: Yang et al., NeurIPS 2024, and the public code, read. Differs: a domain is a client, so that phases 1 and 3
    are local training and noised vectors pass a server, where the paper's stay on a user's device; every domain is
    source and target at once; noise is drawn once, and ``noise accounted`` has the size that its epsilon asks for where
    one customer's vectors are replaced by others (all layers, sensitivity ``2 sqrt(L)``), the paper's is
    ``sqrt(2 ln(1.25 / delta)) / epsilon``; negatives lie outside the train items; users start from normal values, and
    Adam anew in every round. Public users of the catalogue are trained on and hand nothing over.
    """
    rounds = _Rounds(clients, config, StarTraining(clients, config, [histories(client) for client in clients]))
    return FederatedMethod(
        "fedgcdr",
        rounds.init,
        rounds.broadcast,
        rounds.client_update,
        rounds.server_aggregate,
        rounds.positions,
        ("model",),
        upload_like=rounds.upload_like,
    )


class _Rounds(NamedTuple):
    """The parts of the method."""

    clients: IdClients
    config: FedgcdrConfig
    training: StarTraining

    @property
    def hands_over(self) -> bool:
        return self.config.friends != "none"

    def init(self) -> tuple[Tree, Tree]:
        num, width = self.clients.num_clients, self.config.num_layers * self.config.embedding_size
        model = self.start()
        own = {
            **{f"source.{name}": tensor for name, tensor in model.items()},
            **{f"target.{name}": tensor for name, tensor in {**model, **self.start_mlp()}.items()},
            "tuned.user": model["user"],
            "friend": torch.zeros(num, self.training.most_users, width),
            "is_friend": torch.zeros(num, self.training.most_users, dtype=torch.bool),
            "phase": torch.zeros((), dtype=torch.int64),
        }
        server = {
            "knowledge": torch.zeros(num, self.clients.num_customers, width),
            "known": torch.zeros(num, self.clients.num_customers, dtype=torch.bool),
            "served": torch.zeros(num, dtype=torch.bool),
        }
        local = {name: tensor.expand(num, *tensor.shape).clone() for name, tensor in own.items()}
        return _moved(server, self.clients.device), _moved(local, self.clients.device)

    def start(self) -> Tree:
        """One model; alike for all clients but for their users and items, which differ in meaning."""
        size = self.config.embedding_size
        shapes = {
            "user": (self.training.most_users, size),
            "item": (self.clients.most_items, size),
            "attention": (self.config.num_layers, size),
        }
        return {
            name: self.config.init_std * torch.randn(*shape, generator=stream(self.clients.seed, "init", name))
            for name, shape in shapes.items()
        }

    def start_mlp(self) -> Tree:
        """``MLP_S`` for each source."""
        found: Tree = {}
        num, size = self.clients.num_clients, self.config.embedding_size
        for number, (wide, deep) in enumerate(pairwise((size, 2 * size, size // 2, size)), 1):
            noise = torch.randn(wide, deep, generator=stream(self.clients.seed, "init", "mlp", number))
            found[f"weight_{number}"] = (noise / wide**0.5).expand(num, wide, deep).clone()
            found[f"bias_{number}"] = torch.zeros(num, deep)
        return found

    def broadcast(self, round: int, server: Tree, numbers: Tensor) -> Download:
        """After the hand-over, once: vectors of the client's own users, and whether there are any."""
        if round <= self.config.source_rounds or not self.hands_over:
            return Download({})
        known_NG = server["known"].cpu()
        asked_CNG = torch.zeros(len(numbers), *known_NG.shape, dtype=torch.bool)
        for place, number in enumerate(numbers.tolist()):
            if not server["served"][number]:
                asked_CNG[place, :, self.clients.clients[number].customer_U] = True
                asked_CNG[place, number] = False
        shared = {name: server[name] for name in ("knowledge", "known")}
        return Download(shared, sent_rows={"knowledge": asked_CNG & known_NG, "known": asked_CNG})

    def befriended(self, download: Download, row: int, number: int, own: Tree) -> Tree:
        """The own row with what came of the other domains, where anything did."""
        if not download.shared or not download.sent_rows["known"][row].any():
            return own
        customer_U = self.clients.clients[number].customer_U
        others_N = torch.arange(self.clients.num_clients) != number
        friend_NUF = torch.zeros_like(own["friend"])
        is_friend_NU = torch.zeros_like(own["is_friend"])
        is_friend_NU[:, : len(customer_U)] = download.shared["known"][:, customer_U]
        is_friend_NU &= others_N[:, None].to(is_friend_NU.device)
        friend_NUF[:, : len(customer_U)] = download.shared["knowledge"][:, customer_U]
        return {**own, "friend": friend_NUF * is_friend_NU[..., None], "is_friend": is_friend_NU}

    def handed_over(self, own: Tree, number: int) -> tuple[Tensor, Tensor]:
        """(G, L D) clipped and noised vectors, and (G,) for whom there are any."""
        client, num_customers = self.clients.clients[number], self.clients.num_customers
        known_G = torch.zeros(num_customers, dtype=torch.bool)
        known_G[client.customer_U] = True
        shape = num_customers, self.config.num_layers, self.config.embedding_size
        clean_GLD = torch.zeros(shape, device=self.clients.device)
        user_U = torch.arange(len(client.sequences), device=self.clients.device)
        with torch.no_grad():
            for user_B in user_U.split(self.config.batch_size):
                vector_BLD = self.training.layers(number, user_B, model_of(own, SOURCE), None)
                length = vector_BLD.norm(dim=-1, keepdim=True).clamp(min=1.0)
                clean_GLD[client.customer_U[user_B.cpu()]] = vector_BLD / length
        generator = stream(self.clients.seed_of(number), "hand-over")
        noise_GLD = torch.randn(clean_GLD.shape, generator=generator).to(clean_GLD)
        sent_G = torch.ones_like(known_G) if self.config.friends == "all" else known_G
        vector_GF = (clean_GLD + self.config.noise_std * noise_GLD).flatten(1)
        return vector_GF * sent_G.to(vector_GF.device)[:, None], sent_G

    def client_update(self, round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        tuning_from = self.config.source_rounds + self.config.target_rounds
        phase = SOURCE + (round > self.config.source_rounds) + (round > tuning_from)
        rows, logs, sent = [], [], []
        for row, number in enumerate(block.clients.tolist()):
            before = self.befriended(download, row, number, take_row(own, row))
            new, log = self.training.train(before, number, round, phase)
            rows.append(new)
            logs.append({**log, "phase": phase})
            if self.is_hand_over(round):
                sent.append(self.handed_over(new, number))
        tensors, marks = {}, {}
        if sent:
            tensors["knowledge"] = torch.stack([vector_GF for vector_GF, _ in sent])
            marks["knowledge"] = torch.stack([sent_G for _, sent_G in sent])
        upload = Upload(block.clients, torch.ones(len(rows)), tensors, sent_rows=marks)
        return upload, {name: torch.stack([one[name] for one in rows]) for name in rows[0]}, logs

    def is_hand_over(self, round: int) -> bool:
        return round == self.config.source_rounds and self.hands_over

    def server_aggregate(self, round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        new = {name: tensor.clone() for name, tensor in server.items()}
        for upload in uploads:
            kept_C = finite_clients(upload)
            numbers = upload.clients[kept_C]
            if self.is_hand_over(round):
                new["knowledge"][numbers] = upload.tensors["knowledge"][kept_C.to(self.clients.device)]
                new["known"][numbers] = upload.sent_rows["knowledge"][kept_C].to(self.clients.device)
            if round > self.config.source_rounds:
                new["served"][numbers] = True
        return new

    def positions(self, variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        places = []
        for row, number in enumerate(block.clients.tolist()):
            one, client = take_row(own, row), self.clients.clients[number]
            phase = int(one["phase"])
            item_ID = model_of(one, phase)["item"][: client.num_items]
            score = partial(_dot_products, self.training.final_users(one, number, phase), item_ID)
            places.append(self.clients.rank(number, score, split))
        return places

    def upload_like(self, round: int, server: Tree) -> Tree:
        return {"knowledge": server["knowledge"][0]} if self.is_hand_over(round) else {}


def _dot_products(user_UD: Tensor, item_ID: Tensor, user_B: Tensor) -> Tensor:
    return user_UD[user_B.to(user_UD.device)] @ item_ID.T


def _moved(tree: Tree, device: torch.device) -> Tree:
    return {name: tensor.to(device) for name, tensor in tree.items()}


METHOD = Method(FedgcdrConfig, fedgcdr, GRID, SPACE, patience=0, check=check_rounds)
