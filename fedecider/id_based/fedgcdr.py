"""FedGCDR (NeurIPS 2024), compact: users of several domains carry noised vectors of one domain into another.

Shape legend: N clients, U users of a client (its own, then the public ones of its catalogue), G persons, I items of the
largest catalogue, L layers, D dims, B users of a batch, V items of a user (padded), S sources, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedecider.baselines.fitting import pointwise_loss
from fedecider.baselines.negatives import Excluded, draw_outside, outside_of
from fedecider.baselines.sasrec import is_event, pack
from fedecider.bounds import Depth, Epochs, Negatives, NotNegative, OneOrMore, Positive, Width, above, check
from fedecider.evaluation.split import train_part
from fedecider.federation.aggregate import finite_clients
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.privacy import PrivacyConfig, epsilon
from fedecider.federation.streams import stream
from fedecider.federation.wire import take_row
from fedecider.id_based.clients import Client, IdClients
from fedecider.id_based.star_graph import mapped, mapping_loss, similarity_loss, user_layers
from fedecider.tuning.space import OneOf, Real, Space, Whole

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
SOURCE, TARGET, TUNING = range(3)
"""Phases of a client."""


@dataclass(frozen=True)
class FedgcdrConfig:
    """Settings of FedGCDR.

    Args:
        source_rounds: The rounds in which every domain trains its own model; in the last one vectors are handed over.
        target_rounds: The rounds after that in which every domain trains its model with friends; all later rounds tune
            users and items.
        friends: Whose vectors a domain hands over: all sends noise for persons it does not know as well, which hides
            whom it knows; known sends none for them; with none nothing is handed over, and every domain trains alone.
        noise: The noise on what is handed over: accounted has the stated epsilon for one person's vectors in full;
            paper has the published size, which is less; none adds nothing and hides nothing.
        epsilon: The epsilon of the noise.
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
    delta: Annotated[float, above(0, below=1)] = 1e-5
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
        check(self)
        if self.embedding_size % 2:
            raise ValueError(f"got embedding_size {self.embedding_size}, expected an even number: a layer halves it")

    @property
    def noise_std(self) -> float:
        """Of every number that is handed over; the vectors of one layer have length 1 at most."""
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


class Histories(NamedTuple):
    """What a client trains on."""

    item_UV: Tensor
    """int64, right-padded."""
    length_U: Tensor
    excluded: Excluded


def fedgcdr(clients: IdClients, config: FedgcdrConfig) -> FederatedMethod:
    """Three phases, told apart by the round: every domain alone; every domain with friends; users and items tuned.

    1. ``e_u^l`` by :func:`user_layers` over u and its items, score ``e_u^L . q_i``, binary cross-entropy.
    2. In round ``source_rounds`` a domain sends ``x_u = clip(e_u^l, 1) + noise`` of every person and layer, once. Each
       other domain fetches, once, those of its own users, maps them (:func:`mapped`) and takes them for neighbours:
       loss ``BCE + mapping_weight / 2 l_m + similarity_weight / 2 l_s``. This model starts anew.
    3. ``e_u^L`` becomes a table of its own; it and ``q_i`` are tuned by the cross-entropy of their dot product.

    Source: Yang et al., NeurIPS 2024, and the public code, read. Differs: a domain is a client, so that phases 1 and 3
    are local training and noised vectors pass a server, where the paper's stay on a user's device; every domain is
    source and target at once; noise is drawn once, and ``noise accounted`` has the size that its epsilon asks for where
    one person's vectors are replaced by others (all layers, sensitivity ``2 sqrt(L)``), the paper's is
    ``sqrt(2 ln(1.25 / delta)) / epsilon``; negatives lie outside the train items; users start from normal values, and
    Adam anew in every round. Public users of the catalogue are trained on and hand nothing over.
    """
    hands_over = config.friends != "none"
    num, num_layers, size = clients.num_clients, config.num_layers, config.embedding_size
    data = [_histories(client) for client in clients]
    most_users = max(len(one.length_U) for one in data)
    width = num_layers * size

    def start() -> Tree:
        """One model; alike for all clients but for their users and items, which differ in meaning."""
        shapes = {"user": (most_users, size), "item": (clients.most_items, size), "attention": (num_layers, size)}
        found = {
            name: config.init_std * torch.randn(*shape, generator=stream(clients.seed, "init", name))
            for name, shape in shapes.items()
        }
        return found

    def start_mlp() -> Tree:
        found: Tree = {}
        sizes = (size, 2 * size, size // 2, size)
        for number, (wide, deep) in enumerate(pairwise(sizes), 1):
            noise = torch.randn(wide, deep, generator=stream(clients.seed, "init", "mlp", number))
            found[f"weight_{number}"] = (noise / wide**0.5).expand(num, wide, deep).clone()
            found[f"bias_{number}"] = torch.zeros(num, deep)
        return found

    def init() -> tuple[Tree, Tree]:
        model = start()
        own = {
            **{f"source.{name}": tensor for name, tensor in model.items()},
            **{f"target.{name}": tensor for name, tensor in {**model, **start_mlp()}.items()},
            "tuned.user": model["user"],
            "friend": torch.zeros(num, most_users, width),
            "is_friend": torch.zeros(num, most_users, dtype=torch.bool),
            "phase": torch.zeros((), dtype=torch.int64),
        }
        server = {
            "knowledge": torch.zeros(num, clients.num_persons, width),
            "known": torch.zeros(num, clients.num_persons, dtype=torch.bool),
            "served": torch.zeros(num, dtype=torch.bool),
        }
        local = {name: tensor.expand(num, *tensor.shape).clone() for name, tensor in own.items()}
        return _moved(server, clients.device), _moved(local, clients.device)

    def broadcast(round: int, server: Tree, numbers: Tensor) -> Download:
        """After the hand-over, once: vectors of the client's own users, and whether there are any."""
        if round <= config.source_rounds or not hands_over:
            return Download({})
        known_NG = server["known"].cpu()
        asked_CNG = torch.zeros(len(numbers), num, clients.num_persons, dtype=torch.bool)
        for place, number in enumerate(numbers.tolist()):
            if not server["served"][number]:
                asked_CNG[place, :, clients.clients[number].person_U] = True
                asked_CNG[place, number] = False
        shared = {name: server[name] for name in ("knowledge", "known")}
        return Download(shared, sent_rows={"knowledge": asked_CNG & known_NG, "known": asked_CNG})

    def befriended(download: Download, row: int, number: int, own: Tree) -> Tree:
        """The own row with what came of the other domains, where anything did."""
        if not download.shared or not download.sent_rows["known"][row].any():
            return own
        person_U = clients.clients[number].person_U
        others_N = torch.arange(num) != number
        friend_NUF = torch.zeros_like(own["friend"])
        is_friend_NU = torch.zeros_like(own["is_friend"])
        is_friend_NU[:, : len(person_U)] = download.shared["known"][:, person_U]
        is_friend_NU &= others_N[:, None].to(is_friend_NU.device)
        friend_NUF[:, : len(person_U)] = download.shared["knowledge"][:, person_U]
        return {**own, "friend": friend_NUF * is_friend_NU[..., None], "is_friend": is_friend_NU}

    def friends_of(own: Tree, user_B: Tensor, phase: int, model: Tree) -> tuple[Tensor, Tensor] | None:
        """Mapped vectors of the users' sources (B, L, S, D), and which of them there are (B, S)."""
        if phase == SOURCE:
            return None
        friend_BLSD = own["friend"][:, user_B].view(num, len(user_B), num_layers, size).permute(1, 2, 0, 3)
        return mapped(model, friend_BLSD), own["is_friend"][:, user_B].T

    def layers(number: int, user_B: Tensor, model: Tree, friends: tuple[Tensor, Tensor] | None) -> Tensor:
        """User vectors after each layer (B, L, D)."""
        item_BV, is_item_BV = _items_of(data[number], user_B, clients.device)
        asked = (model["user"][user_B], model["item"][item_BV], is_item_BV, model["attention"])
        return user_layers(*asked, *(friends or ()))

    def final_users(own: Tree, number: int, phase: int) -> Tensor:
        """(U, D) vectors of the client's own and public users that the score takes."""
        user_U = torch.arange(len(data[number].length_U), device=clients.device)
        if phase == TUNING:
            return own["tuned.user"][user_U]
        model = model_of(own, phase)
        with torch.no_grad():
            parts = [
                layers(number, user_B, model, friends_of(own, user_B, phase, model))[:, -1]
                for user_B in user_U.split(config.batch_size)
            ]
        return torch.cat(parts)

    def model_of(own: Tree, phase: int) -> Tree:
        prefix = "source." if phase == SOURCE else "target."
        return {name.removeprefix(prefix): tensor for name, tensor in own.items() if name.startswith(prefix)}

    def train(own: Tree, number: int, round: int, phase: int) -> tuple[Tree, dict[str, Any]]:
        """The own row after a round of a phase, and its log."""
        if phase == TUNING and int(own["phase"]) != TUNING:
            user_UD = final_users(own, number, TARGET)
            padding = own["tuned.user"].new_zeros(most_users - len(user_UD), size)
            own = {**own, "tuned.user": torch.cat([user_UD, padding])}
        prefix = "source." if phase == SOURCE else "target."
        model = model_of(own, phase)
        trained = {name: tensor.clone().requires_grad_() for name, tensor in model.items()}
        if phase == TUNING:
            trained = {"item": trained["item"], "user": own["tuned.user"].clone().requires_grad_()}
        rate = config.tuning_rate if phase == TUNING else config.learning_rate
        optimizer = torch.optim.Adam(trained.values(), lr=rate)
        losses = [
            _step(optimizer, loss_of(own, number, user_B, phase, trained, generator))
            for user_B, generator in batches(number, round)
        ]
        new = dict(own)
        for name, tensor in trained.items():
            new["tuned.user" if phase == TUNING and name == "user" else prefix + name] = tensor.detach()
        new["phase"] = torch.full_like(own["phase"], phase)
        finite = all(bool(tensor.isfinite().all()) for tensor in new.values())
        return (new if finite else own), {"loss": sum(losses) / len(losses), "finite": finite}

    def batches(number: int, round: int) -> Iterable[tuple[Tensor, torch.Generator]]:
        seed, num_users = clients.seed_of(number), len(data[number].length_U)
        for epoch in range(config.local_epochs):
            order_U = torch.randperm(num_users, generator=stream(seed, "order", round, epoch))
            generator = stream(seed, "negatives", round, epoch)
            for user_B in order_U.split(config.batch_size):
                yield user_B.to(clients.device), generator

    def loss_of(own: Tree, number: int, user_B: Tensor, phase: int, model: Tree, generator: torch.Generator) -> Tensor:
        item_BV, is_item_BV = _items_of(data[number], user_B, clients.device)
        row_P, column_P = is_item_BV.nonzero(as_tuple=True)
        asked_PN = user_B[row_P, None].expand(-1, config.num_negatives).cpu()
        negative_PN = draw_outside(data[number].excluded, asked_PN, generator).to(clients.device)
        item_PN = torch.cat([item_BV[row_P, column_P][:, None], negative_PN], 1)
        extra = torch.zeros((), device=clients.device)
        if phase == TUNING:
            user_BD = model["user"][user_B]
        else:
            friends = friends_of(own, user_B, phase, model)
            vector_BLD = layers(number, user_B, model, friends)
            user_BD = vector_BLD[:, -1]
            if friends is not None:
                extra = config.mapping_weight / 2.0 * mapping_loss(vector_BLD, *friends)
                extra = extra + config.similarity_weight / 2.0 * similarity_loss(vector_BLD, *friends)
        logit_PN = (user_BD[row_P][:, None] * model["item"][item_PN]).sum(-1)
        return pointwise_loss(logit_PN) + extra

    def handed_over(own: Tree, number: int) -> tuple[Tensor, Tensor]:
        """(G, L D) clipped and noised vectors, and (G,) for whom there are any."""
        client = clients.clients[number]
        known_G = torch.zeros(clients.num_persons, dtype=torch.bool)
        known_G[client.person_U] = True
        clean_GLD = torch.zeros(clients.num_persons, num_layers, size, device=clients.device)
        user_U = torch.arange(len(client.sequences), device=clients.device)
        with torch.no_grad():
            for user_B in user_U.split(config.batch_size):
                vector_BLD = layers(number, user_B, model_of(own, SOURCE), None)
                length = vector_BLD.norm(dim=-1, keepdim=True).clamp(min=1.0)
                clean_GLD[client.person_U[user_B.cpu()]] = vector_BLD / length
        generator = stream(clients.seed_of(number), "hand-over")
        noise_GLD = torch.randn(clean_GLD.shape, generator=generator).to(clean_GLD)
        sent_G = torch.ones_like(known_G) if config.friends == "all" else known_G
        vector_GF = (clean_GLD + config.noise_std * noise_GLD).flatten(1)
        return vector_GF * sent_G.to(vector_GF.device)[:, None], sent_G

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        phase = SOURCE + (round > config.source_rounds) + (round > config.source_rounds + config.target_rounds)
        rows, logs, sent = [], [], []
        for row, number in enumerate(block.clients.tolist()):
            new, log = train(befriended(download, row, number, take_row(own, row)), number, round, phase)
            rows.append(new)
            logs.append({**log, "phase": phase})
            if round == config.source_rounds and hands_over:
                sent.append(handed_over(new, number))
        tensors, marks = {}, {}
        if sent:
            tensors["knowledge"] = torch.stack([vector_GF for vector_GF, _ in sent])
            marks["knowledge"] = torch.stack([sent_G for _, sent_G in sent])
        upload = Upload(block.clients, torch.ones(len(rows)), tensors, sent_rows=marks)
        return upload, {name: torch.stack([one[name] for one in rows]) for name in rows[0]}, logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        new = {name: tensor.clone() for name, tensor in server.items()}
        for upload in uploads:
            kept_C = finite_clients(upload)
            numbers = upload.clients[kept_C]
            if round == config.source_rounds and hands_over:
                new["knowledge"][numbers] = upload.tensors["knowledge"][kept_C.to(clients.device)]
                new["known"][numbers] = upload.sent_rows["knowledge"][kept_C].to(clients.device)
            if round > config.source_rounds:
                new["served"][numbers] = True
        return new

    def positions(view: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        places = []
        for row, number in enumerate(block.clients.tolist()):
            one, client = take_row(own, row), clients.clients[number]
            phase = int(one["phase"])
            item_ID = model_of(one, phase)["item"][: client.num_items]
            score = partial(_dot_products, final_users(one, number, phase), item_ID)
            places.append(clients.rank(number, score, split))
        return places

    def upload_like(round: int, server: Tree) -> Tree:
        return {"knowledge": server["knowledge"][0]} if round == config.source_rounds and hands_over else {}

    return FederatedMethod(
        "fedgcdr", init, broadcast, client_update, server_aggregate, positions, ("model",), upload_like=upload_like
    )


def _dot_products(user_UD: Tensor, item_ID: Tensor, user_B: Tensor) -> Tensor:
    return user_UD[user_B.to(user_UD.device)] @ item_ID.T


def _histories(client: Client) -> Histories:
    parts = [*(list(train_part(sequence)) for sequence in client.sequences), *map(list, client.public)]
    item_UV, length_U = pack(parts, max(map(len, parts)))
    return Histories(item_UV, length_U, outside_of(parts, client.num_items))


def _items_of(data: Histories, user_B: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Items of some users (B, V), and False at padding."""
    length_B = data.length_U[user_B.cpu()]
    item_BV = data.item_UV[user_B.cpu()][:, : int(length_B.max())]
    return item_BV.to(device), is_event(item_BV, length_B).to(device)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _moved(tree: Tree, device: torch.device) -> Tree:
    return {name: tensor.to(device) for name, tensor in tree.items()}
