"""Training examples of a block: positives, fresh negatives, the rows of the item table they touch, and their order.

Every draw is a counter-based stream of (seed, purpose, round, client): nothing depends on who shares the block.

Shape legend: C clients of a block, A active clients of a step or avoided items, T train items, B = T (1 + negatives)
examples, R touched rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedding_fr import compiled
from embedding_fr.blocks import Federation, UserData
from embedding_fr.config import EmbeddingTraining
from fedecider.federation.method import Block
from fedecider.federation.streams import below, client_keys, counter_draws


class Examples(NamedTuple):
    """One round's examples: client c has ``num_positive_C[c]`` positives first, then its negatives, then padding."""

    item_CB: Tensor
    """(C, B) int64 item numbers; ``num_items`` where padded."""
    num_positive_C: Tensor
    count_C: Tensor
    """(C,) int64 real examples, falling."""
    key_C: Tensor
    """Streams of the shuffles."""


class ExampleBatch(NamedTuple):
    """One local step of the first ``active`` clients of a block; the others have no batch left."""

    active: int
    item_AB: Tensor
    """Row numbers in the clients' tables."""
    label_AB: Tensor
    weight_AB: Tensor
    """1 / (examples of the client in this batch), 0 where padded: weighted sums are means."""
    last_A: Tensor | None = None
    """(A,) bool: whose last epoch this batch belongs to; None where it is nobody's."""


class RoundExamples(NamedTuple):
    """What a block trains on in a round, and which rows of an item table that takes."""

    examples: Examples
    row_CR: Tensor
    """Item number of each row of the clients' tables; -1 pads."""
    place_CB: Tensor
    """Row of each example in its client's table."""

    def on_whole_tables(self, num_items: int) -> RoundExamples:
        """The same where clients hold whole tables: the row is the item's number."""
        return self._replace(place_CB=self.examples.item_CB.clamp(max=num_items - 1))  # padding has weight 0: any row


def round_examples(federation: Federation, training: EmbeddingTraining, block: Block, round: int) -> RoundExamples:
    """:func:`draw_examples` of a block and :func:`touched_rows`; compiled on a CPU, with the same numbers."""
    negatives, num_items = training.num_negatives, federation.num_items
    if compiled.takes(block.data.train_CT):
        return _compiled_examples(block, num_items, negatives, federation.seed, round)
    examples = draw_examples(block.data, block.clients, num_items, negatives, federation.seed, round)
    return RoundExamples(examples, *touched_rows(examples.item_CB, num_items))


def _compiled_examples(block: Block, num_items: int, num_negatives: int, seed: int, round: int) -> RoundExamples:
    from embedding_fr.compiled import draws  # Numba: half a second that only training needs

    data = block.data
    check_pool(data, block.clients, num_items, num_negatives)
    num_columns = data.train_CT.shape[1] * (1 + num_negatives)
    count_C, key_C = data.num_train_C * (1 + num_negatives), client_keys(block.clients, seed, "negatives", round)
    item_CB, row_CB, place_CB = torch.empty(3, len(count_C), num_columns, dtype=torch.int64)
    known = draws.Known(
        data.train_CT.numpy(), data.num_train_C.numpy(), data.avoid_CA.numpy(), data.num_avoid_C.numpy()
    )
    draws.draw_items(known, key_C.numpy(), count_C.numpy(), num_items, item_CB.numpy())
    key_CB = np.sort((item_CB.numpy() << 32) | np.arange(num_columns), axis=1)
    num_rows = draws.number_rows(key_CB, num_items, row_CB.numpy(), place_CB.numpy())
    examples = Examples(item_CB, data.num_train_C, count_C, client_keys(block.clients, seed, "order", round))
    return RoundExamples(examples, row_CB[:, :num_rows].contiguous(), place_CB)


def draw_examples(
    data: UserData, clients: Tensor, num_items: int, num_negatives: int, seed: int, round: int
) -> Examples:
    """Train items and ``num_negatives`` uniform negatives for each, outside ``data.avoid_CA``, redrawn per round.

    Raises ``ValueError`` when more negatives are asked for than there are items to draw from.
    """
    check_pool(data, clients, num_items, num_negatives)
    client_C, num_pool_C = clients.to(data.train_CT.device), num_items - data.num_avoid_C
    num_positive_C = data.num_train_C
    num_columns = data.train_CT.shape[1] * (1 + num_negatives)
    draw_CB = counter_draws(client_keys(client_C, seed, "negatives", round), num_columns)
    negative_CB = complement(data.avoid_CA, below(draw_CB, num_pool_C[:, None]))
    column_B = torch.arange(num_columns, device=client_C.device)
    train_CB = torch.nn.functional.pad(data.train_CT, (0, num_columns - data.train_CT.shape[1]), value=num_items)
    # Draw number b is the negative in column b, so that padding moves no draw.
    item_CB = torch.where(column_B < num_positive_C[:, None], train_CB, negative_CB)
    count_C = num_positive_C * (1 + num_negatives)
    item_CB = item_CB.masked_fill(column_B >= count_C[:, None], num_items)
    return Examples(item_CB, num_positive_C, count_C, client_keys(client_C, seed, "order", round))


def check_pool(data: UserData, clients: Tensor, num_items: int, num_negatives: int) -> None:
    """``ValueError`` when more negatives are asked for than a client has items to draw from."""
    num_pool_C = num_items - data.num_avoid_C
    if num_negatives > int(num_pool_C.min()):
        raise ValueError(
            f"got num_negatives {num_negatives}, expected at most {int(num_pool_C.min())}: client "
            f"{int(clients[int(num_pool_C.argmin())])} has no more items that may be negatives"
        )


def complement(avoid_CA: Tensor, draw_CB: Tensor) -> Tensor:
    """The ``draw``-th smallest item outside the avoided ones: uniform draws give uniform items of the complement.

    ``avoid_CA`` ascending, padded with numbers above every item; ``draw_CB`` in 0 .. (items - avoided) - 1. The j-th
    avoided item e_j has e_j - j allowed items below it, so draw r stands after all e_j with e_j - j <= r.
    """
    below_CA = avoid_CA - torch.arange(avoid_CA.shape[1], device=avoid_CA.device)
    # A padded entry could fall below a real draw after the subtraction, so padding is lifted out of reach.
    below_CA = torch.cummax(below_CA, 1).values
    return draw_CB + torch.searchsorted(below_CA, draw_CB, right=True)


def touched_rows(item_CB: Tensor, num_items: int) -> tuple[Tensor, Tensor]:
    """The distinct items of each client, (C, R) padded with -1, and each example's place among them, (C, B).

    A table of these rows is all that local steps can change: a row that no example touches has zero gradient, and with
    fresh moments Adam leaves it where it is.
    """
    place_B = torch.arange(item_CB.shape[1], device=item_CB.device)
    sorted_CB = sort_rows((item_CB << 32) | place_B)
    item_sorted, place = sorted_CB >> 32, sorted_CB & 0xFFFFFFFF
    is_new = torch.ones_like(item_sorted)
    is_new[:, 1:] = item_sorted[:, 1:] != item_sorted[:, :-1]
    row = is_new.cumsum(1) - 1
    row_CR = torch.full((len(item_CB), int(row.max()) + 1), -1, device=item_CB.device)
    row_CR.scatter_(1, row, torch.where(item_sorted == num_items, -1, item_sorted))
    return row_CR, torch.empty_like(place).scatter_(1, place, row)


def epoch_batches(examples: Examples, place_CB: Tensor, batch_size: int, epochs: range) -> Iterator[ExampleBatch]:
    """The shuffled batches of these epochs; ``place_CB`` says which table row each example uses.

    A client goes from one epoch to the next without waiting for those who have more batches, so clients that step
    together have done equally many steps. Legend here: E epochs, K steps of the largest client, B examples of a batch.
    """
    num_clients, num_columns = place_CB.shape
    num_epochs, device = len(epochs), place_CB.device
    item_CEX = place_CB.new_empty(num_clients, num_epochs, num_columns)
    label_CEX = torch.empty(item_CEX.shape, device=device)
    for number, epoch in enumerate(epochs):
        # Padded examples stand at the end of an order, and a short batch reads on into what comes next: the next epoch
        # or client. Both have weight 0, and their places are rows of every table of the block.
        order_CX = shuffled(examples, epoch)
        item_CEX[:, number] = place_CB.gather(1, order_CX)
        label_CEX[:, number] = order_CX < examples.num_positive_C[:, None]
    item_F, label_F = item_CEX.view(-1), label_CEX.view(-1)
    steps_C = -(-examples.count_C // batch_size)  # of one epoch
    step_K1 = torch.arange(int(steps_C[0]) * num_epochs, device=device)[:, None]
    epoch_KC, start_KC = (step_K1 // steps_C).clamp(max=num_epochs - 1), step_K1 % steps_C * batch_size
    left_KC1 = (examples.count_C - start_KC).clamp(max=batch_size)[:, :, None]
    first_C = torch.arange(num_clients, device=device) * num_epochs
    first_KC1 = ((first_C + epoch_KC) * num_columns + start_KC)[:, :, None]
    share_KC1 = 1.0 / left_KC1.to(label_F.dtype)
    last_KC = step_K1 >= steps_C * (num_epochs - 1)
    width_K = torch.where(step_K1 < steps_C * num_epochs, left_KC1[:, :, 0], 0).amax(1).tolist()
    column_X = torch.arange(num_columns, device=device)
    steps, active = steps_C.tolist(), num_clients
    for step in range(steps[0] * num_epochs):
        while steps[active - 1] * num_epochs <= step:
            active -= 1
        column_B = column_X[: width_K[step]]
        index_AB = (first_KC1[step, :active] + column_B).clamp_(max=len(item_F) - 1)
        yield ExampleBatch(
            active,
            item_F[index_AB],
            label_F[index_AB],
            (column_B < left_KC1[step, :active]) * share_KC1[step, :active],
            last_KC[step, :active] if step >= steps[active - 1] * (num_epochs - 1) else None,
        )


def sort_rows(value_CB: Tensor) -> Tensor:
    """Ascending values of each row; NumPy's vectorised sort is 15 times faster than torch's on a CPU."""
    if value_CB.device.type == "cpu":
        return torch.from_numpy(np.sort(value_CB.numpy(), axis=1))
    return value_CB.sort(1).values


def shuffled(examples: Examples, epoch: int) -> Tensor:
    """(C, B) a uniform order of the real examples of each client, padded ones last."""
    from embedding_fr.compiled import draws

    num_columns = examples.item_CB.shape[1]
    column_B = torch.arange(num_columns, device=examples.item_CB.device)
    key_CB = (counter_draws(examples.key_C, num_columns, epoch << 32) >> 1 & ~draws.COLUMN) | column_B
    padded_CB = column_B >= examples.count_C[:, None]
    return sort_rows(key_CB | (padded_CB.to(torch.int64) << 62)) & draws.COLUMN
