"""PFCR (TheWebConf 2024): companies without a common customer or item share vectors of codes of their item texts.

Shape legend: C clients of a block, N clients, R items of all catalogues, I items of a catalogue, E width of the text
encoder, M codes of an item, W rows of the code table, B users of a batch, L events, D dims, P prompts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedecider.baselines.sasrec import Sasrec, make_optimizer, run_epoch, scores
from fedecider.bounds import OneOrMore, dataclass
from fedecider.data.encoders import load_encoder
from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import derive_seed
from fedecider.federation.wire import take_row
from fedecider.id_based.clients import IdClients
from fedecider.id_based.fedsasrec import SequenceConfig
from fedecider.id_based.methods import Method
from fedecider.id_based.trees import moved, padded_tables, parameters_of, stacked
from fedecider.search_space import OneOf, Real, Space, Whole

GRID: tuple[dict[str, Any], ...] = ({}, {"share": "all"}, {"learning_rate": 1e-3}, {"dropout": 0.5})
SPACE: Space = {
    "share": OneOf(("codes", "all")),
    "num_codes": OneOf((8, 16, 32)),
    "num_centroids": OneOf((32, 64, 256)),
    "local_epochs": Whole(1, 5),
    "learning_rate": Real(0.0003, 0.01, log=True),
    "dropout": Real(0.0, 0.7),
}
CODES, MODEL, ITEMS = "code_WD", "model.", "own.item_ID"
PROMPTED = ("own.", "prompt_PD", "attention.", "mix.", "mix_norm.")
"""What the second stage adds; it trains these and the codes."""


@dataclass(frozen=True)
class PfcrConfig(SequenceConfig):
    """Settings of PFCR.

    Args:
        share: What is averaged. codes: the code table; all: the layers that read a history of codes as well; nothing:
            every client trains alone.
        federated_rounds: The rounds of the first stage; in all later ones a client tunes alone, and nothing is sent.
        text_encoder: The encoder of item texts: auto (which is minilm), minilm, tfidf, or a sentence-transformers
            folder or hub name.
        num_codes: The number of codes of an item.
        num_centroids: The number of values of a code.
        num_prompts: The number of prompt vectors of a client.
    """

    share: Literal["codes", "all", "nothing"] = "codes"
    federated_rounds: OneOrMore = 20
    text_encoder: str = "auto"
    num_codes: OneOrMore = 32
    num_centroids: OneOrMore = 64
    num_prompts: OneOrMore = 64


def code_groups(variance_E: Tensor, num_codes: int) -> list[list[int]]:
    """``num_codes`` groups of equally many directions, with about equal products of their variances.

    The directions, largest variance first, go one by one to the group with room whose product is smallest (the
    parametric solution of optimised product quantisation, Ge et al., TPAMI 2014); a remainder is left out.
    """
    size = len(variance_E) // num_codes
    groups: list[list[int]] = [[] for _ in range(num_codes)]
    log_E, sum_M = variance_E.clamp(min=1e-12).log(), [0.0] * num_codes
    for direction in variance_E.argsort(descending=True, stable=True)[: size * num_codes].tolist():
        group = min((number for number in range(num_codes) if len(groups[number]) < size), key=sum_M.__getitem__)
        groups[group].append(direction)
        sum_M[group] += float(log_E[direction]) - float(log_E.min())
    return groups


def text_codes(vector_RE: Tensor, num_codes: int, num_centroids: int, seed: int) -> Tensor:
    """(R, M) int64: of every item the rows of its codes in a table of ``M num_centroids`` rows; near texts share some.

    Vectors are turned to their principal directions, which are split by `code_groups`; in each group k-means gives the
    code. There are at most E codes.
    """
    from sklearn.cluster import KMeans  # a second of imports, for this method alone

    vector_RE = vector_RE.double() - vector_RE.double().mean(0)
    variance_E, basis_EE = torch.linalg.eigh(vector_RE.T @ vector_RE / len(vector_RE))
    turned_RE, found = vector_RE @ basis_EE, []
    for number, group in enumerate(code_groups(variance_E, min(num_codes, len(variance_E)))):
        part = turned_RE[:, group].numpy()
        num_distinct = len(torch.unique(turned_RE[:, group].round(decimals=9), dim=0))
        means = KMeans(min(num_centroids, num_distinct), n_init=1, random_state=seed % 2**32)
        found.append(torch.from_numpy(means.fit(part).labels_).long() + number * num_centroids)
    return torch.stack(found, 1)


@lru_cache(maxsize=1)
def encoded(encoder: str, texts: tuple[str, ...]) -> Tensor:
    """(R, E) vectors of length 1; a process encodes the same texts once."""
    return functional.normalize(load_encoder(encoder).encode(texts), dim=1)


class Pfcr(Sasrec):
    """SASRec whose item table is the mean of the codes' vectors; with ``prompted`` an ID encoder and prompts join in.

    ``item_ID`` is made anew from ``code_WD`` in every call; :meth:`pull` hands its gradient down before a step.
    """

    def __init__(self, code_IM: Tensor, num_rows: int, prompted: bool, config: PfcrConfig) -> None:
        super().__init__(1, config.model)
        del self.item_ID
        size = config.embedding_size
        self.code_IM, self.prompted = code_IM, prompted
        self.code_WD = nn.Parameter(0.02 * code_IM.shape[1] ** 0.5 * torch.randn(num_rows, size))
        self.prompt_PD = nn.Parameter(nn.init.xavier_uniform_(torch.empty(config.num_prompts, size)))
        self.attention = nn.MultiheadAttention(size, config.num_heads, batch_first=True)
        self.mix, self.mix_norm = nn.Linear(3 * size, size), nn.LayerNorm(size)
        self.own = Sasrec(len(code_IM), config.model)  # last: what is drawn before it is alike for all catalogues
        self.renew()

    def renew(self) -> None:
        self.table_ID = functional.embedding_bag(self.code_IM, self.code_WD, mode="mean")
        self.item_ID = self.table_ID.detach().requires_grad_()  # type: ignore[assignment]

    def pull(self, *_: Any) -> None:
        self.table_ID.backward(self.item_ID.grad)

    def forward(self, item_BL: Tensor, length_B: Tensor, dropout: float = 0.0) -> Tensor:
        """States (B, L, D) as those of SASRec."""
        self.renew()
        content_BLD = super().forward(item_BL, length_B, dropout)
        if not self.prompted:
            return content_BLD
        query = content_BLD.flatten(0, 1)[None]
        prompt = self.attention(query, self.prompt_PD[None], self.prompt_PD[None], need_weights=False)[0]
        parts = [prompt.view_as(content_BLD), self.own(item_BL, length_B, dropout), content_BLD]
        return functional.dropout(self.mix_norm(self.mix(torch.cat(parts, -1))), dropout)


def pfcr(clients: IdClients, config: PfcrConfig) -> FederatedMethod:
    """Texts become codes, items the mean of their codes' vectors, and the vectors of codes are averaged over clients.

    ``e_i = 1/M sum_m T[m, c_im]``, c by `text_codes` of all catalogues together, and ``p(i | history) = softmax_i(e_i .
    SASRec(e of the history))``. In rounds up to ``federated_rounds`` client k trains T and its layers, and sends
    ``T_k``: ``T <- sum_k n_k T_k / sum_k n_k`` with n_k its number of training sequences. Then each client tunes alone,
    with the layers above frozen: the state becomes ``norm(W [a, s', s])`` with s that of the codes, s' of a SASRec of
    item IDs, and a the attention of s to P prompts. It trains T, s', prompts and W.

    Per round of the first stage ``4 M num_centroids D`` bytes go up, and as many down (share all: and the layers). Who
    computes the codes reads the item texts of all companies. A row of T that changes is a code of the company's
    catalogue; the server sees by how much. No vector is of a customer or of one item.

    Variants: ``global`` (the mean of T; reported) and ``local`` (as the client ended its training).

    Source: Guo et al., arXiv 2401.14678, abstract and public code. Differs from the code: clients send T, trained with
    Adam, in the place of a sum of gradients, for one plain step of which 0.001 is the rate; no quantisation and
    randomised response (the wire's own protections apply); dot products in the place of cosines over 0.07; all
    positions are trained on; parametric rotation; the norm behind W is its own; Adam starts anew in every round.

    Raises:
        ValueError: a catalogue without texts, one client that is to share, or no train part of two events.
    """
    without = [client.name for client in clients if not client.items.has_texts]
    if without:
        raise ValueError(
            f"got {', '.join(without)} without item texts, expected a title or text for each item: pfcr makes codes of "
            "texts. Prepare the data with texts, or take fedsasrec"
        )
    if clients.num_clients < 2 and config.share != "nothing":
        raise ValueError(
            f"got the company {clients.clients[0].name} alone with share {config.share}, expected two or more: name "
            "further domains, or set share to nothing"
        )
    once = clients.first_of_catalogue()
    texts = tuple(text for client in once for text in client.items.texts)
    code_RM = text_codes(encoded(config.text_encoder, texts), config.num_codes, config.num_centroids, clients.seed)
    data = [client.packed(config.max_length) for client in clients]
    rounds = _Rounds(clients, config, code_RM.to(clients.device), data)
    return FederatedMethod(
        "pfcr",
        rounds.init,
        rounds.broadcast,
        rounds.client_update,
        lambda round, server, uploads: {**server, **weighted_mean(uploads, fallback=server)},
        rounds.positions,
        ("local",) if config.share == "nothing" else ("global", "local"),
        upload_like=lambda round, server: server if round <= config.federated_rounds else {},
        takes_mean=True,
        bounds_norms=True,
    )


class _Rounds(NamedTuple):
    """The parts of the method."""

    clients: IdClients
    config: PfcrConfig
    code_RM: Tensor
    data: list[tuple[Tensor, Tensor]]
    """Of each client: packed sequences and their lengths."""

    def shared(self, model: Tree) -> Tree:
        """What travels of a model."""
        if self.config.share == "nothing":
            return {}
        layers = {name: one for name, one in model.items() if not name.startswith(PROMPTED)}
        return layers if self.config.share == "all" else {CODES: model[CODES]}

    def start(self, number: int, prompted: bool = False) -> Pfcr:
        code_IM = self.code_RM[self.clients.clients[number].rows]
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(self.clients.seed, "init"))
            num_rows = self.code_RM.shape[1] * self.config.num_centroids
            return Pfcr(code_IM, num_rows, prompted, self.config).to(self.clients.device)

    def init(self) -> tuple[Tree, Tree]:
        models = [parameters_of(self.start(number)) for number in range(self.clients.num_clients)]
        own = stacked([padded_tables(model, (ITEMS,), self.clients.most_items) for model in models])
        local = {MODEL + name: tensor for name, tensor in own.items()}
        local["prompted"] = torch.zeros(self.clients.num_clients, dtype=torch.bool)
        return self.shared(models[0]), moved(local, self.clients.device)

    def broadcast(self, round: int, server: Tree, numbers: Tensor) -> Download:
        return Download(server if round <= self.config.federated_rounds + 1 else {})

    def model_of(self, own: Tree, received: Tree, number: int, prompted: bool) -> Pfcr:
        """A client's model with what it received."""
        model = self.start(number, prompted)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(received.get(name, own[MODEL + name])[: len(parameter)])
        model.renew()
        return model

    def client_update(self, round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        numbers = block.clients.tolist()
        done = [self.train(download, take_row(own, row), number, round) for row, number in enumerate(numbers)]
        sent, new, logs = zip(*done, strict=True)
        weight_C = torch.tensor([float(len(self.data[number][1])) for number in numbers])
        return Upload(block.clients, weight_C, stacked(sent)), stacked(new), list(logs)

    def train(self, download: Download, before: Tree, number: int, round: int) -> tuple[Tree, Tree, dict[str, Any]]:
        """What a client sends, its new own row, and its log; it keeps what it had where training was not finite."""
        config, clients, prompted = self.config, self.clients, round > self.config.federated_rounds
        received = {} if before["prompted"] else download.shared
        model = self.model_of(before, received, number, prompted)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == CODES or name.startswith(PROMPTED) is prompted)
        optimizer = make_optimizer(model, config.model)
        optimizer.register_step_pre_hook(model.pull)
        item_SL, length_S = (tensor.to(clients.device) for tensor in self.data[number])
        loss = 0.0
        for epoch in range((round - 1) * config.local_epochs, round * config.local_epochs):
            seed = clients.seed_of(number)
            loss = run_epoch(model, optimizer, item_SL, length_S, config.model, seed=seed, epoch=epoch)
        trained = parameters_of(model)
        kept = {MODEL + name: tensor for name, tensor in trained.items()}
        after = padded_tables(kept, (ITEMS,), clients.most_items)
        after["prompted"] = torch.full_like(before["prompted"], prompted)
        finite = all(bool(tensor.isfinite().all()) for tensor in after.values())
        sent = {} if prompted else self.shared(trained)
        return sent, after if finite else before, {"loss": loss, "finite": finite}

    def positions(self, variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        positions = []
        for row, number in enumerate(block.clients.tolist()):
            mine = take_row(own, row)
            prompted = bool(mine["prompted"])
            received = {} if prompted or variant == "local" else download.shared
            model = self.model_of(mine, received, number, prompted)
            positions.append(
                self.clients.rank(number, scores(model, self.clients.clients[number].sequences, split), split)
            )
        return positions


METHOD = Method(PfcrConfig, pfcr, GRID, SPACE, patience=0)
