"""FedHCDR (ECML-PKDD 2024), compact: what is common to a user's domains passes a low-pass filter and is averaged.

A domain is a hypergraph of users and items.

An item is the hyperedge of all its users, and a user that of all its items.

Shape legend: R nodes, S hyperedges, E distinct (node, hyperedge) pairs, D dims, K steps of a walk, C nodes of a chunk,
N clients, U users of a client (its own, then the public ones of its catalogue), G customers, I items of the largest
catalogue, E distinct (user, item) pairs, B pairs of a batch, M = 1 + num_negatives (column 0 is the positive).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedecider.baselines.fitting import Excluded, distinct_pairs, draw_outside, outside_of
from fedecider.bounds import Epochs, Negatives, NotNegative, OneOrMore, Positive, ShareBelow1, Width, dataclass
from fedecider.evaluation.protocols import train_part
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import stream
from fedecider.federation.wire import take_row
from fedecider.id_based.clients import Client, IdClients
from fedecider.id_based.methods import Method
from fedecider.search_space import OneOf, Real, Space, Whole

CHUNK = 512
"""Nodes whose walks are followed at once."""


class Graph(NamedTuple):
    """``A = G G^T - diag``, R x R, never formed; ``G = D^-1/2 H sqrt(P / D_S)`` with ``P_s = 1 - D_s / sum D``."""

    gain_RS: Tensor
    """Sparse, as its transpose is."""
    gain_SR: Tensor
    diagonal_R: Tensor

    def spread(self, value_RD: Tensor) -> Tensor:
        """``A value``."""
        spread_RD: Tensor = self.gain_RS @ (self.gain_SR @ value_RD)
        return spread_RD - self.diagonal_R[:, None] * value_RD


def hypergraph(node_E: Tensor, edge_E: Tensor, shape: tuple[int, int], device: torch.device) -> Graph:
    """The graph of R nodes and S hyperedges whose entries of H are given, with a diagonal of zero."""
    degree_R, degree_S = (torch.bincount(one_E, minlength=n) for one_E, n in zip((node_E, edge_E), shape, strict=True))
    share_S = 1.0 - degree_S / max(1, len(edge_E))
    square_E = (share_S[edge_E] / degree_S[edge_E] / degree_R[node_E]).to(device)
    entry_2E = torch.stack([node_E, edge_E]).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "beta state": products with a dense matrix are tested here
        gain_RS = torch.sparse_coo_tensor(entry_2E, square_E.sqrt(), shape).to_sparse_csr()
        gain_SR = torch.sparse_coo_tensor(entry_2E.flip(0), square_E.sqrt(), shape[::-1]).to_sparse_csr()
    diagonal_R = torch.zeros(shape[0], device=device).index_add(0, entry_2E[0], square_E)
    return Graph(gain_RS, gain_SR, diagonal_R)


def return_probabilities(graph: Graph, steps: int) -> Tensor:
    """``diag(M^k)`` for k = 1 to ``steps`` (R, K), with ``M = D^-1 (K - diag K)``, that is of ``A^k``.

    A is symmetric: ``(A^(i + j))_uu = (A^i e_u) . (A^j e_u)``, so half the steps are taken.
    """
    num = len(graph.diagonal_R)
    found_RK = graph.diagonal_R.new_zeros(num, steps + 1)
    for node_C in torch.arange(num, device=found_RK.device).split(CHUNK):
        state_RC = functional.one_hot(node_C, num).T.to(found_RK)
        for step in range(1, steps + 1, 2):
            before_RC, state_RC = state_RC, graph.spread(state_RC)
            found_RK[node_C, step - 1] = (before_RC * state_RC).sum(0)
            found_RK[node_C, step] = state_RC.square().sum(0)
    return found_RK[:, :steps]


def filtered(part: Tree, graph: Graph, start_RD: Tensor, sign: float, dropout: Tensor | None = None) -> Tensor:
    """``(X + sign (A Y + beta Y) + Y + b) / 2`` with ``Y = X W``; sign 1 passes what neighbours share, -1 the rest."""
    mixed_RD = (start_RD if dropout is None else start_RD * dropout) @ part["weight"]
    passed_RD = sign * (graph.spread(mixed_RD) + part["beta"] * mixed_RD) + mixed_RD + part["bias"]
    return (start_RD + passed_RD) / 2.0


GRID: tuple[dict[str, Any], ...] = (
    {},
    {"learning_rate": 0.003},
    {"transfer_weight": 0.3, "contrast_weight": 0.3},
    {"embedding_size": 64},
    {"share": "filter"},
)
SPACE: Space = {
    "learning_rate": Real(0.001, 0.03, log=True),
    "embedding_size": OneOf((16, 32, 64, 128)),
    "transfer_weight": Real(0.03, 3.0, log=True),
    "contrast_weight": Real(0.03, 3.0, log=True),
    "share": OneOf(("all", "filter")),
    "local_epochs": Whole(1, 5),
}
SIGN = {"high": -1.0, "low": 1.0}
"""Parts of the model: high, what a domain has alone, and low, what is shared."""
VARIANTS = {"both": ("high", "low"), "shared": ("low",), "exclusive": ("high",)}
MODEL, SHARED = "model.", "low.user_filter."


@dataclass(frozen=True)
class FedhcdrConfig:
    """Settings of FedHCDR.

    Args:
        share: What is averaged. all: the low-pass filter of users and the shared vectors of the customers; filter: the
            filter alone; nothing: every domain trains alone.
        transfer_weight: The weight of the loss that brings a user's own and shared vectors together.
        contrast_weight: The weight of the loss that tells shared vectors from those of a graph with dropped edges.
        margin: The margin of the transfer loss, in differences of probabilities.
        drop_share: The share of (user, item) pairs that this other graph lacks, drawn once.
        walk_steps: The number of return probabilities that stand for a user in the shared part.
        embedding_size: The width of users and items.
        dropout: The share of a filter's inputs that is set to 0 in training.
        init_std: The standard deviation of the normal start values of tables.
        learning_rate: The learning rate of Adam.
        local_epochs: The number of passes over a client's pairs in a round.
        batch_size: The number of pairs of a step.
        num_negatives: The number of negatives that are drawn for each positive, anew in every pass.
    """

    share: Literal["all", "filter", "nothing"] = "all"
    transfer_weight: NotNegative = 1.0
    contrast_weight: NotNegative = 1.0
    margin: NotNegative = 0.3
    drop_share: ShareBelow1 = 0.05
    walk_steps: Width = 16
    embedding_size: Width = 32
    dropout: ShareBelow1 = 0.3
    init_std: NotNegative = 0.1
    learning_rate: Positive = 0.01
    local_epochs: Epochs = 3
    batch_size: OneOrMore = 1024
    num_negatives: Negatives = 4


def dots(first: Tensor, second: Tensor) -> Tensor:
    """f over the last dimension: the dot product."""
    return (first * second).sum(-1)


def score_parts(parts: Iterable[tuple[Tensor, Tensor]], user_B: Tensor) -> Tensor:
    """Sum over parts, users (U, D) and items (I, D) of each, of the scores of some users (B, I)."""
    scores = [user_UD[user_B.to(user_UD.device)] @ item_ID.T for user_UD, item_ID in parts]
    return torch.stack(scores).sum(0)


def rating_loss(logit_BM: Tensor) -> Tensor:
    """``-log s(f(u, v)) - mean over negatives of log s(-f(u, v-))``, mean over pairs; column 0 is the positive."""
    return (functional.softplus(-logit_BM[:, 0]) + functional.softplus(logit_BM[:, 1:]).mean(1)).mean()


def transfer_loss(logit_B: Tensor, other_B: Tensor, margin: float) -> Tensor:
    """Mean of ``relu(margin - s(x) + s(y))``; 0 where there is no pair."""
    return (margin - logit_B.sigmoid() + other_B.sigmoid()).clamp(min=0.0).sum() / max(1, len(logit_B))


def contrast_loss(user_UD: Tensor, changed_UD: Tensor) -> Tensor:
    """Cross-entropies of ``f(z, u)`` as 1, ``f(z, u~)`` as 0, ``f(z, u)`` as 1 and ``f(z~, u)`` as 0, means over users.

    z is the mean over users, ~ what the graph with dropped edges gives.
    """
    mean_UD, changed_mean_UD = (one_UD.mean(0).expand_as(one_UD) for one_UD in (user_UD, changed_UD))
    right_U = dots(mean_UD, user_UD)
    wrong_U = dots(mean_UD, changed_UD), dots(changed_mean_UD, user_UD)
    return 2.0 * functional.softplus(-right_U).mean() + sum(functional.softplus(one_U).mean() for one_U in wrong_U)


class Silo(NamedTuple):
    """What a client trains on."""

    user_E: Tensor
    item_E: Tensor
    excluded: Excluded
    num_users: int
    num_items: int
    users: Graph
    items: Graph
    thinned: Graph
    """Of users, with dropped edges."""
    walk_UK: Tensor


def silo(client: Client, config: FedhcdrConfig, seed: int, device: torch.device) -> Silo:
    """Hypergraphs of the own users' train parts and of all events of the public users."""
    parts = [*(list(train_part(sequence)) for sequence in client.sequences), *map(list, client.public)]
    shape = len(parts), client.num_items
    user_E, item_E = distinct_pairs(parts, client.num_items)
    kept_E = torch.rand(len(user_E), generator=stream(seed, "dropped edges")) >= config.drop_share
    users = hypergraph(user_E, item_E, shape, device)
    items = hypergraph(item_E, user_E, shape[::-1], device)
    thinned = hypergraph(user_E[kept_E], item_E[kept_E], shape, device)
    walk_UK = return_probabilities(users, config.walk_steps)
    return Silo(user_E, item_E, outside_of(parts, client.num_items), *shape, users, items, thinned, walk_UK)


def fedhcdr(clients: IdClients, config: FedhcdrConfig) -> FederatedMethod:
    """Every domain learns exclusive vectors by high-pass and shared ones by low-pass filters of its hypergraph.

    High part: own tables of users and items. Low part: an own item table, and ``diag(M^k)`` through a linear layer for
    users, which means the same in all domains. Both: rating loss of their own; a step of the high part, then one of the
    low. Transfer: ``h(f(u_e, g_u), f(u'_e, g_u))`` in the high part with the mean shared vectors g of the last round,
    ``h(f(u_s, u_e), f(u'_s, u_e))`` in the low one with a constant u_e. Score: ``f(u_e, v_e) + f(u_s, v_s)``.

    A round sends the low-pass filter of users and ``u_s`` of the own users: ``4 (D^2 + D + 1 + U D)`` bytes up, and as
    many down. The server averages, weighted by numbers of train pairs; a customer's vector over its domains.
    So a customer needs one key in all domains. This protects little: the server sees which customers a domain has and a
    vector of each, and of two domains each can subtract its own vectors from the mean. Public users are trained on, and
    nothing of them is sent.

    Variants: ``both``, ``shared`` and ``exclusive`` parts, with the filter as the client ended its training.

    Source: the public code (the paper's abstract; its text was not at hand). Differs from it:

    - Scores are dot products. Its linear layer on ``[u, v]`` ranks alike for all users.
    - The code scores ``f(u_e + u_s, v_e + v_s)``. For linear f that is the sum over the parts and a constant. Here the
      sum is taken: no loss trains products of one part's users with the other's items.
    - The diagonal is zero; dropped edges are pairs of H, not of A; ``u_s`` is sent without dropout.
    - Adam starts anew in every round; negatives are drawn anew.
    """
    silos = [silo(one, config, clients.seed_of(number), clients.device) for number, one in enumerate(clients.clients)]
    rounds = _Rounds(clients, config, silos)
    return FederatedMethod(
        "fedhcdr",
        rounds.init,
        rounds.broadcast,
        rounds.client_update,
        lambda round, server, uploads: weighted_mean(uploads, fallback=server),
        rounds.positions,
        tuple(VARIANTS),
        upload_like=lambda round, server: server,
        takes_mean=True,
        bounds_norms=True,
    )


class _Rounds(NamedTuple):
    """The parts of the method. ``model`` is a client's model, as long as its own users and items."""

    clients: IdClients
    config: FedhcdrConfig
    silos: list[Silo]

    def init(self) -> tuple[Tree, Tree]:
        """All clients start alike: their users and items differ in meaning, and the filter is one."""
        size, most_users = self.config.embedding_size, max(one.num_users for one in self.silos)
        tables = {"high.user": most_users, "high.item": self.clients.most_items, "low.item": self.clients.most_items}
        shapes: dict[str, tuple[tuple[int, ...], float]] = {
            name: ((rows, size), self.config.init_std) for name, rows in tables.items()
        }
        shapes["low.walks.weight"] = (self.config.walk_steps, size), self.config.walk_steps**-0.5
        for name in ("high.user", "high.item", "low.user", "low.item"):
            shapes[f"{name}_filter.weight"] = (size, size), size**-0.5
        model = {
            name: std * torch.randn(*shape, generator=stream(self.clients.seed, "init", name))
            for name, (shape, std) in shapes.items()
        }
        for name in [name for name in model if name.endswith(".weight")]:
            model[name.replace("weight", "bias")] = torch.zeros(size)
            if "filter" in name:
                model[name.replace("weight", "beta")] = torch.ones(())
        model = {name: tensor.to(self.clients.device) for name, tensor in model.items()}
        num = self.clients.num_clients
        local = {MODEL + name: tensor.expand(num, *tensor.shape).clone() for name, tensor in model.items()}
        return self.shared(model, torch.zeros(self.clients.num_customers, size, device=self.clients.device)), local

    def shared(self, model: Tree, customer_GD: Tensor) -> Tree:
        """What travels."""
        if self.config.share == "nothing":
            return {}
        found = {name: tensor for name, tensor in model.items() if name.startswith(SHARED)}
        return found if self.config.share == "filter" else {**found, "customer": customer_GD}

    def marks(self, numbers: Tensor) -> Tree:
        """Persons of each client, (C, G)."""
        if self.config.share != "all":
            return {}
        mark_CG = torch.zeros(len(numbers), self.clients.num_customers, dtype=torch.bool)
        for place, number in enumerate(numbers.tolist()):
            mark_CG[place, self.clients.clients[number].customer_U] = True
        return {"customer": mark_CG}

    def broadcast(self, round: int, server: Tree, numbers: Tensor) -> Download:
        return Download(server, sent_rows=self.marks(numbers))

    def model_of(self, own: Tree, number: int) -> Tree:
        model = {name.removeprefix(MODEL): tensor for name, tensor in own.items()}
        rows = {"high.user": self.silos[number].num_users}
        rows |= dict.fromkeys(("high.item", "low.item"), self.silos[number].num_items)
        return {name: tensor[: rows[name]] if name in rows else tensor for name, tensor in model.items()}

    def client_update(
        self, round: int, download: Download, own: Tree, block: Block
    ) -> tuple[Upload, Tree, list[dict[str, Any]]]:
        rows, sent, logs = [], [], []
        for row, number in enumerate(block.clients.tolist()):
            before, customer_U = take_row(own, row), self.clients.clients[number].customer_U
            filters = {name: tensor for name, tensor in download.shared.items() if name.startswith(SHARED)}
            start = {**self.model_of(before, number), **filters}
            known_UD = download.shared["customer"][customer_U] if self.config.share == "all" else None
            model, log = self.train(start, known_UD, number, round)
            new = {name: tensor.clone() for name, tensor in before.items()}
            for name, tensor in model.items():
                if tensor.dim():
                    new[MODEL + name][: len(tensor)] = tensor
                else:
                    new[MODEL + name] = tensor
            customer_GD = torch.zeros(
                self.clients.num_customers, self.config.embedding_size, device=self.clients.device
            )
            customer_GD[customer_U] = self.vectors(model, number, "low")[0][: len(customer_U)]
            rows.append(new if log["finite"] else before)
            sent.append(self.shared(model, customer_GD))
            logs.append(log)
        weight_C = torch.tensor([float(len(self.silos[number].user_E)) for number in block.clients.tolist()])
        stacked = [{name: torch.stack([one[name] for one in found]) for name in found[0]} for found in (sent, rows)]
        return Upload(block.clients, weight_C, stacked[0], sent_rows=self.marks(block.clients)), stacked[1], logs

    def train(
        self, model: Tree, known_UD: Tensor | None, number: int, round: int
    ) -> tuple[Tree, dict[str, float | bool]]:
        """The model after a round, and its log; ``known_UD``: own users' means over domains, 0 where there is none."""
        trained = {name: tensor.clone().requires_grad_() for name, tensor in model.items()}
        optimizers = {
            kind: torch.optim.Adam(
                [tensor for name, tensor in trained.items() if name.startswith((kind, "scorer."))],
                lr=self.config.learning_rate,
            )
            for kind in SIGN
        }
        losses: dict[str, list[float]] = {kind: [] for kind in SIGN}
        for user_B, item_BM, draws in self.batches(number, round):
            loss, exclusive_UD = self.high_loss(trained, number, user_B, item_BM, known_UD, draws)
            losses["high"].append(_step(optimizers["high"], loss))
            loss = self.low_loss(trained, number, user_B, item_BM, exclusive_UD, draws)
            losses["low"].append(_step(optimizers["low"], loss))
        found = {name: tensor.detach() for name, tensor in trained.items()}
        finite = all(bool(tensor.isfinite().all()) for tensor in found.values())
        return found, {**{f"{kind}_loss": sum(one) / len(one) for kind, one in losses.items()}, "finite": finite}

    def batches(self, number: int, round: int) -> Iterator[tuple[Tensor, Tensor, torch.Generator]]:
        """Users (B,), items (B, M) and what else is drawn with, step by step."""
        one, seed = self.silos[number], self.clients.seed_of(number)
        for epoch in range(self.config.local_epochs):
            order_E = torch.randperm(len(one.user_E), generator=stream(seed, "order", round, epoch))
            asked_EN = one.user_E[order_E, None].expand(-1, self.config.num_negatives)
            negative_EN = draw_outside(one.excluded, asked_EN, stream(seed, "negatives", round, epoch))
            item_EM = torch.cat([one.item_E[order_E, None], negative_EN], 1)
            draws = stream(seed, "dropout and other users", round, epoch)
            for place_B in torch.arange(len(order_E)).split(self.config.batch_size):
                user_B = one.user_E[order_E[place_B]]
                yield user_B.to(self.clients.device), item_EM[place_B].to(self.clients.device), draws

    def high_loss(
        self, model: Tree, number: int, user_B: Tensor, item_BM: Tensor, known_UD: Tensor | None, draws: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The loss of the high part, and its users, a constant."""
        user_UD, item_ID = self.vectors(model, number, "high", draws)
        loss = rating_loss(dots(user_UD[user_B][:, None], item_ID[item_BM]))
        if known_UD is not None and self.config.transfer_weight:
            asked_B = user_B[user_B < len(known_UD)]
            asked_B = asked_B[known_UD[asked_B].any(1)]
            known_BD, other_BD = known_UD[asked_B], user_UD[_others(asked_B, len(user_UD), draws)]
            logits = dots(user_UD[asked_B], known_BD), dots(other_BD, known_BD)
            loss = loss + self.config.transfer_weight * transfer_loss(*logits, self.config.margin)
        return loss, user_UD.detach()

    def low_loss(
        self, model: Tree, number: int, user_B: Tensor, item_BM: Tensor, exclusive_UD: Tensor, draws: torch.Generator
    ) -> Tensor:
        """The loss of the low part."""
        user_UD, item_ID = self.vectors(model, number, "low", draws)
        loss = rating_loss(dots(user_UD[user_B][:, None], item_ID[item_BM]))
        if self.config.transfer_weight:
            own_BD, other_BD = exclusive_UD[user_B], user_UD[_others(user_B, len(user_UD), draws)]
            logits = dots(user_UD[user_B], own_BD), dots(other_BD, own_BD)
            loss = loss + self.config.transfer_weight * transfer_loss(*logits, self.config.margin)
        if self.config.contrast_weight:
            changed_UD = self.users(model, number, "low", draws, self.silos[number].thinned)
            loss = loss + self.config.contrast_weight * contrast_loss(user_UD, changed_UD)
        return loss

    def vectors(
        self, model: Tree, number: int, kind: str, draws: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Users (U, D) and items (I, D) of a part; with ``draws`` as in training, that is with dropout."""
        item_ID = model[f"{kind}.item"]
        mask_ID = _mask(item_ID, self.config.dropout, draws)
        found_ID = filtered(_part(model, f"{kind}.item"), self.silos[number].items, item_ID, SIGN[kind], mask_ID)
        return self.users(model, number, kind, draws, self.silos[number].users), found_ID

    def users(self, model: Tree, number: int, kind: str, draws: torch.Generator | None, graph: Graph) -> Tensor:
        if kind == "high":
            user_UD = model["high.user"]
        else:
            user_UD = self.silos[number].walk_UK @ model["low.walks.weight"] + model["low.walks.bias"]
        return filtered(
            _part(model, f"{kind}.user"), graph, user_UD, SIGN[kind], _mask(user_UD, self.config.dropout, draws)
        )

    def positions(self, variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        places = []
        for row, number in enumerate(block.clients.tolist()):
            model = self.model_of(take_row(own, row), number)
            parts = [self.vectors(model, number, kind) for kind in VARIANTS[variant]]
            places.append(self.clients.rank(number, partial(score_parts, parts), split))
        return places


def _part(model: Tree, name: str) -> Tree:
    """A filter's own tensors."""
    return {what: model[f"{name}_filter.{what}"] for what in ("weight", "bias", "beta")}


def _mask(like: Tensor, share: float, draws: torch.Generator | None) -> Tensor | None:
    """Factors of dropout; none without ``draws``."""
    if draws is None or not share:
        return None
    return ((torch.rand(like.shape, generator=draws) >= share) / (1.0 - share)).to(like)


def _others(user_B: Tensor, num_users: int, draws: torch.Generator) -> Tensor:
    """One random user for each of a batch, drawn uniformly; it may be the same one."""
    return torch.randint(num_users, user_B.shape, generator=draws).to(user_B.device)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


METHOD = Method(FedhcdrConfig, fedhcdr, GRID, SPACE)
