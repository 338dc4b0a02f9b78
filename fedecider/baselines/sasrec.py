"""Self-attentive sequential recommendation (Kang and McAuley, ICDM 2018) with a softmax over the whole catalogue.

The one centralised baseline that knows the order of events and learns: what sequential recommenders of its size
reach. There are no training negatives, so a protocol whose negatives leak the held-out items changes nothing here.

Shape legend: S training sequences, B sequences of a batch, L events (right-padded), T targets (no padding), I items,
D dims, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedecider.baselines.fitting import Pooled, fit_epochs
from fedecider.bounds import Depth, NotNegative, OneOrMore, Positive, ShareBelow1, Width, dataclass
from fedecider.evaluation.protocols import ScoreUsers, Sequences, histories, train_parts
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import derive_seed, stream
from fedecider.search_space import OneOf, Real, Space, Whole

GRID: tuple[dict, ...] = (
    {},
    {"dropout": 0.5},
    {"max_length": 200},
    {"learning_rate": 1e-3, "num_epochs": 120},
    {"embedding_size": 128, "dropout": 0.5},
    {"num_layers": 1},
    {"weight_decay": 0.1},
    {"embedding_size": 32, "num_heads": 1},
)
SPACE: Space = {
    "embedding_size": OneOf((32, 64, 128)),
    "num_layers": Whole(1, 3),
    "max_length": OneOf((20, 50, 100, 200)),
    "dropout": Real(0.0, 0.7),
    "learning_rate": Real(0.0003, 0.01, log=True),
    "weight_decay": OneOf((0.0, 0.01, 0.1)),
}
LOGITS_PER_CHUNK = 2**19
"""Logits of the softmax held at once: 2 MB stay in cache (twice as fast as a batch at once), and memory is bounded."""


@dataclass(frozen=True)
class SasrecConfig:
    """Settings of SASRec.

    Args:
        embedding_size: dims of items, positions and states.
        num_layers: blocks of attention and feed-forward.
        num_heads: attention heads, a divisor of ``embedding_size``.
        max_length: newest events of a history that the model reads.
        dropout: share of inputs, attention weights and block outputs set to 0 in training.
        learning_rate: of Adam.
        num_epochs: passes over the training sequences at most.
        batch_size: sequences of a step.
        weight_decay: decoupled (AdamW) decay of all parameters; 0 is Adam.
        validate_every: epochs between two validations.
        patience: validations without a better figure before training stops.
    """

    embedding_size: Width = 64
    num_layers: Depth = 2
    num_heads: Depth = 2
    max_length: Width = 50
    dropout: ShareBelow1 = 0.3
    learning_rate: Positive = 3e-3
    num_epochs: OneOrMore = 60
    batch_size: OneOrMore = 64
    weight_decay: NotNegative = 0.0
    validate_every: OneOrMore = 2
    patience: OneOrMore = 3

    def __post_init__(self) -> None:
        if self.embedding_size % self.num_heads:
            raise ValueError(
                f"got num_heads {self.num_heads}, expected a divisor of embedding_size {self.embedding_size}"
            )


class Block(nn.Module):
    """``y = x + attention(norm(x))``, then ``y + feed_forward(norm(y))``; a position sees itself and older ones."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.query_key_value, self.mixed = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.feed = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))

    def forward(self, state_BLD: Tensor, dropout: float) -> Tensor:
        num, length, _ = state_BLD.shape
        packed = self.query_key_value(self.attention_norm(state_BLD)).view(num, length, 3, self.num_heads, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4)  # (B, H, L, D / H) each
        read = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        read_BLD = self.mixed(read.transpose(1, 2).reshape(num, length, -1))
        state_BLD = state_BLD + functional.dropout(read_BLD, dropout)
        return state_BLD + functional.dropout(self.feed(self.feed_norm(state_BLD)), dropout)


class Sasrec(nn.Module):
    """States of right-padded histories; the logit of an item is the state times its row of the item table."""

    def __init__(self, num_items: int, config: SasrecConfig) -> None:
        super().__init__()
        size = config.embedding_size
        self.item_ID = nn.Parameter(0.02 * torch.randn(num_items, size))
        self.position_LD = nn.Parameter(0.02 * torch.randn(config.max_length, size))
        self.blocks = nn.ModuleList(Block(size, config.num_heads) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(size)

    def forward(self, item_BL: Tensor, length_B: Tensor, dropout: float = 0.0) -> Tensor:
        """States (B, L, D) of the first ``length_B`` events of each row; what stands at padding has no meaning.

        Positions count from the newest event (0), so that the place from which a history is continued is a trained
        one however long the history is. Padding is newer than every event: causal attention never reads it.
        """
        place_BL = (length_B[:, None] - 1 - torch.arange(item_BL.shape[1], device=item_BL.device)).clamp(min=0)
        scale = self.item_ID.shape[1] ** 0.5
        state_BLD = functional.embedding(item_BL, self.item_ID) * scale + self.position_LD[place_BL]
        state_BLD = functional.dropout(state_BLD, dropout)
        for block in self.blocks:
            state_BLD = block(state_BLD, dropout)
        return self.norm(state_BLD)

    @torch.no_grad()
    def catalogue(self, item_BL: Tensor, length_B: Tensor) -> Tensor:
        """Logits of all items after the newest event, (B, I); 0 for all where the history is empty."""
        row_B = torch.arange(len(length_B), device=item_BL.device)
        state_BD = self(item_BL, length_B)[row_B, (length_B - 1).clamp(min=0)]
        return (state_BD * (length_B > 0)[:, None]) @ self.item_ID.T


def pack(parts: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
    """The newest ``width`` items of each part, right-padded with 0, int64 (B, L), and their numbers, int64 (B,)."""
    newest = [list(part)[-width:] for part in parts]
    length_B = torch.tensor([len(part) for part in newest], dtype=torch.int64)
    item_BL = torch.zeros(len(newest), max([1, *length_B.tolist()]), dtype=torch.int64)
    item_BL[is_event(item_BL, length_B)] = torch.tensor([item for part in newest for item in part], dtype=torch.int64)
    return item_BL, length_B


def is_event(item_BL: Tensor, length_B: Tensor) -> Tensor:
    """False at padding, bool (B, L)."""
    return torch.arange(item_BL.shape[1], device=item_BL.device) < length_B[:, None]


def training_sequences(
    sequences: Sequences, num_items: int, extra: Sequences, max_length: int
) -> tuple[Tensor, Tensor]:
    """Train parts and whole public sequences of two events and more, packed: up to ``max_length`` inputs, a target.

    ``ValueError`` when nothing is left or an item is not in the catalogue.
    """
    parts = [part for part in (*train_parts(sequences), *extra) if len(part) > 1]
    if not parts:
        raise ValueError(
            "got no train part of two events, expected at least one: a user of four events, or a public one of two"
        )
    item_SL, length_S = pack(parts, max_length + 1)
    if item_SL.min() < 0 or item_SL.max() >= num_items:
        raise ValueError(
            f"got item numbers {int(item_SL.min())} to {int(item_SL.max())}, expected 0 to {num_items - 1}"
        )
    return item_SL, length_S


def softmax_gradient(
    state_TD: Tensor, target_T: Tensor, item_ID: Tensor, bias_I: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The mean of ``-log softmax(item_ID state + bias)[target]``, and its gradient by the states, (T, D).

    Gradients of ``item_ID`` and the bias are added to them at once: the logits are made, used and dropped chunk by
    chunk.
    """
    leaf_TD = state_TD.detach().requires_grad_()
    per_chunk = 2**26 if item_ID.is_cuda else LOGITS_PER_CHUNK
    num_rows = max(1, per_chunk // len(item_ID))
    total = torch.zeros((), device=leaf_TD.device)
    for part_TD, part_T in zip(leaf_TD.split(num_rows), target_T.split(num_rows), strict=True):
        logit_TI = functional.linear(part_TD, item_ID, bias_I)
        loss = functional.cross_entropy(logit_TI, part_T, reduction="sum") / len(target_T)
        loss.backward()
        total += loss.detach()
    return total, leaf_TD.grad


def backward_next_items(model: Sasrec, item_BL: Tensor, length_B: Tensor, dropout: float) -> Tensor:
    """Add the gradients of the mean of ``-log softmax(state . item_ID)[next item]`` over all targets; returns it."""
    input_BL, length_B = item_BL[:, :-1], length_B - 1
    event_BL = is_event(input_BL, length_B)
    state_TD, target_T = model(input_BL, length_B, dropout)[event_BL], item_BL[:, 1:][event_BL]
    total, gradient_TD = softmax_gradient(state_TD, target_T, model.item_ID)
    state_TD.backward(gradient_TD)
    return total


def start_model(num_items: int, config: SasrecConfig, seed: int, start_ID: Tensor | None = None) -> Sasrec:
    """The model before any training, on the CPU; ``start_ID`` as in :func:`train`."""
    with torch.random.fork_rng():  # layers take no generator
        torch.manual_seed(derive_seed(seed, "init"))
        model = Sasrec(num_items, config)
    if start_ID is not None:
        if start_ID.shape != model.item_ID.shape:
            raise ValueError(
                f"got item vectors of the shape {tuple(start_ID.shape)}, expected {tuple(model.item_ID.shape)}: "
                "one row per item, as wide as embedding_size"
            )
        model.item_ID.data.copy_(start_ID)
    return model


def make_optimizer(model: Sasrec, config: SasrecConfig) -> torch.optim.AdamW:
    """AdamW over all parameters."""
    rate, decay = config.learning_rate, config.weight_decay
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, fused=True)


def run_epoch(
    model: Sasrec,
    optimizer: torch.optim.Optimizer,
    item_SL: Tensor,
    length_S: Tensor,
    config: SasrecConfig,
    *,
    seed: int,
    epoch: int,
) -> float:
    """One pass over packed sequences (:func:`training_sequences`); the mean loss of its steps.

    Order and dropout depend on the seed and the epoch number only.
    """
    order_S = torch.randperm(len(item_SL), generator=stream(seed, "order", epoch)).to(item_SL.device)
    losses = []
    with torch.random.fork_rng():  # nor does dropout take a generator
        torch.manual_seed(derive_seed(seed, "dropout", epoch))
        for row_B in order_S.split(config.batch_size):
            length_B = length_S[row_B]
            optimizer.zero_grad()
            losses.append(backward_next_items(model, item_SL[row_B, : int(length_B.max())], length_B, config.dropout))
            optimizer.step()
    return float(torch.stack(losses).mean())


def train(data: Pooled, config: SasrecConfig, extra: Sequences = (), start_ID: Tensor | None = None) -> Sasrec:
    """The model trained on the train parts of the histories and on all events of the public ``extra``.

    ``valid`` chooses the epoch. Order, dropout and initial values depend on the seed and the epoch number only.
    ``start_ID``: what the item table starts from instead of noise, one row of length 1 per item, and is
    trained on. Length 1 is better on validation than 0.5 and than the length of noise (three Amazon domains, texts).
    ``ValueError`` when it has not the shape of the table.
    """
    sequences, num_items, _, seed, device, valid = data
    item_SL, length_S = (
        packed.to(device) for packed in training_sequences(sequences, num_items, extra, config.max_length)
    )
    model = start_model(num_items, config, seed, start_ID).to(device)
    optimizer = make_optimizer(model, config)

    def run_turn(turn: int) -> None:  # what is an epoch to fit_epochs: the epochs between two validations
        for epoch in range(config.num_epochs)[turn * config.validate_every :][: config.validate_every]:
            run_epoch(model, optimizer, item_SL, length_S, config, seed=seed, epoch=epoch)

    num_turns = -(-config.num_epochs // config.validate_every)
    fit_epochs(model, run_turn, scores(model, sequences), valid, num_turns, config.patience)
    return model


def scores(model: Sasrec, sequences: Sequences, split: str = "valid") -> ScoreUsers:
    """Scores after the history that is known when the held-out item of ``split`` is asked for.

    That is the train part, and for ``test`` the validation item as well. A user without history ties all items at 0.
    """
    device, width, rows = model.item_ID.device, len(model.position_LD), SequenceArray.of(sequences)

    def score(user_B: Tensor) -> Tensor:
        item_BL, length_B = pack(list(histories(rows.take(user_B), split)), width)
        return model.catalogue(item_BL.to(device), length_B.to(device))

    return score


def fit(data: Pooled, config: SasrecConfig) -> ScoreUsers:
    """Adam on the softmax cross-entropy of every next item, scored after the TRAIN part for both splits.

    So do the rows beside which it stands (:mod:`fedecider.baselines.fitted_counts`); where the validation item is known
    by the time of the test, as to the rows of :mod:`fedecider.baselines.counts`, take :func:`train` and :func:`scores`
    with ``split="test"``. ``protocol`` has no effect: there are no negatives.

    Differs from the paper: cross-entropy over the catalogue instead of binary cross-entropy against one negative;
    keys and values are normalised as the queries are; no dropout inside the feed-forward layer; two heads by default.
    """
    return scores(train(data, config), data.sequences)
