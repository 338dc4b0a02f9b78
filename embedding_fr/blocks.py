"""Clients packed into blocks: sorted by size, padded and masked; and the ranking of their held-out items.

Shape legend: N clients of the run, C clients of a block, T train items of the largest client, A avoided items,
E events, I items, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.baselines.fitting import run_candidates
from fedecider.evaluation.metrics import positions_from_scores
from fedecider.evaluation.protocols import LAST_MONTH, Protocol, check_sequences, held_out, no_negatives, train_part
from fedecider.federation.method import Block

CPU_BLOCK_BYTES = 12 << 20
"""Working set of a block on a CPU: what stays in the caches is several times faster than what does not."""


class Federation(NamedTuple):
    """What a method may know of the run: sizes, the protocol, the seed. No interaction."""

    num_clients: int
    num_items: int
    seed: int
    protocol: Protocol
    device: torch.device
    table_bytes: int = 1 << 62
    """Budget for personal tables: larger ones are kept in memory-mapped files."""
    attribute_IA: Tensor | None = None
    """(I, A) what the server knows of the items, for methods that ask for it (`embedding_fr.methods.Method`)."""


class UserData(NamedTuple):
    """The private data of the clients of one block; padded entries hold the item number ``num_items``."""

    train_CT: Tensor
    """(C, T) int64 train items, oldest first."""
    num_train_C: Tensor
    """(C,) int64, falling: the largest client comes first."""
    avoid_CA: Tensor
    """(C, A) int64 items that are never training negatives, ascending."""
    num_avoid_C: Tensor
    valid_C: Tensor
    test_C: Tensor
    candidates: dict[str, Tensor]
    """split -> (C, K) sampled candidates, the held-out item first; empty when the whole catalogue is ranked."""


class Population(NamedTuple):
    """The private data of all clients as flat arrays, from which any cohort is packed without a Python loop."""

    num_items: int
    protocol: Protocol
    train_E: Tensor
    train_start_N: Tensor
    """(N + 1,) client n owns ``train_E[start[n]:start[n + 1]]``."""
    avoid_E: Tensor
    avoid_start_N: Tensor
    valid_N: Tensor
    test_N: Tensor
    candidates: dict[str, Tensor]

    @property
    def num_clients(self) -> int:
        return len(self.valid_N)

    @property
    def num_train_N(self) -> Tensor:
        return self.train_start_N.diff()


def build_population(
    sequences: Sequence[Sequence[int]],
    num_items: int,
    protocol: Protocol,
    seed: int,
    device: torch.device | str = "cpu",
) -> Population:
    """Split every history into train, valid and test, and fix the candidates of the protocol.

    Raises:
        ValueError: a user has fewer than 3 events, an item twice, or leaves no item to sample as a negative.
    """
    if protocol.name.startswith(LAST_MONTH.name):
        raise ValueError(
            f"got protocol {protocol.name}, expected another one in the cross-device track, which holds out one item "
            "of every user: give --protocol strict"
        )
    check_sequences(sequences, num_items)
    candidates = run_candidates(sequences, num_items, protocol, seed)
    avoided = no_negatives(sequences, protocol, candidates)
    for user, (sequence, avoid) in enumerate(zip(sequences, avoided, strict=True)):
        if len(set(sequence)) != len(sequence):
            raise ValueError(f"got an item twice for user {user}, expected each pair once: prepare with repeats first")
        if len(avoid) >= num_items:
            raise ValueError(
                f"got user {user} with no item left of {num_items} to use as a negative, expected one at least: take "
                "another protocol, or users with fewer items"
            )
    train_E, train_start_N = _flat([train_part(sequence) for sequence in sequences])
    avoid_E, avoid_start_N = _flat(avoided)
    valid_N, test_N = held_out(sequences, "valid"), held_out(sequences, "test")
    return Population(
        num_items,
        protocol,
        train_E.to(device),
        train_start_N.to(device),
        avoid_E.to(device),
        avoid_start_N.to(device),
        valid_N.to(device),
        test_N.to(device),
        {split: candidate_NK.to(device) for split, candidate_NK in candidates.items()},
    )


def block_packer(population: Population, client_bytes: Callable[[int], int], budget: int) -> Callable[..., list[Block]]:
    """``pack(clients) -> blocks``: clients by falling size, each block within ``budget`` bytes (at least one client).

    ``client_bytes`` gives the working set of a client with that many train items, padding included since the first
    client of a block is its largest. Results do not depend on the budget.
    """
    num_train = population.num_train_N.tolist()

    def pack(clients: Sequence[int]) -> list[Block]:
        if not len(clients):
            raise ValueError("got an empty cohort, expected at least one client: raise participation")
        order = sorted(clients, key=lambda client: (-num_train[client], client))
        blocks, start = [], 0
        while start < len(order):
            size = max(1, budget // client_bytes(num_train[order[start]]))
            blocks.append(make_block(population, order[start : start + size]))
            start += size
        return blocks

    return pack


def make_block(population: Population, clients: Sequence[int]) -> Block:
    """The block of these clients, who must come in falling order of size."""
    device = population.train_E.device
    client_C = torch.tensor(list(clients), dtype=torch.int64, device=device)
    train_CT, num_train_C = _padded(population.train_E, population.train_start_N, client_C, population.num_items)
    avoid_CA, num_avoid_C = _padded(population.avoid_E, population.avoid_start_N, client_C, population.num_items)
    assert bool((num_train_C.diff() <= 0).all()), "the largest client of a block comes first"
    data = UserData(
        train_CT,
        num_train_C,
        avoid_CA,
        num_avoid_C,
        population.valid_N[client_C],
        population.test_N[client_C],
        {split: candidate_NK[client_C] for split, candidate_NK in population.candidates.items()},
    )
    return Block(client_C.cpu(), data)


def rank_users(score_CI: Tensor, data: UserData, split: str, protocol: Protocol) -> list[Tensor]:
    """Per client the (1,) float64 position of its held-out item, from scores of the whole catalogue.

    Seen items (for test the validation item too) sink below every candidate when the protocol drops them. Raises
    ``ValueError`` for NaN scores.
    """
    target_C = data.valid_C if split == "valid" else data.test_C
    if protocol.num_sampled is not None:
        sampled_CK = score_CI.gather(1, data.candidates[split])
        return list(positions_from_scores(sampled_CK, torch.zeros_like(target_C)).cpu()[:, None])
    seen_CT = data.train_CT if split == "valid" else torch.cat([data.train_CT, data.valid_C[:, None]], 1)
    seen_CT = seen_CT if protocol.drop_seen else seen_CT[:, :0]
    if score_CI.device.type == "cpu" and score_CI.dtype in (torch.float32, torch.float64):
        position_C = positions_compiled(score_CI, target_C, seen_CT)
        if position_C is not None:
            return list(position_C[:, None])
    return list(positions_stacked(score_CI, target_C, seen_CT).cpu()[:, None])


def positions_compiled(score_CI: Tensor, target_C: Tensor, seen_CT: Tensor) -> Tensor | None:
    """:func:`positions_stacked` in one pass over the scores, 50 times as fast; None where a score is NaN."""
    from embedding_fr.compiled.counts import count_scores  # Numba: half a second that --help does without

    count_CK = torch.empty(len(score_CI), 3, dtype=torch.int64)
    count_scores(score_CI.contiguous().numpy(), target_C.numpy(), seen_CT.numpy(), count_CK.numpy())
    above_C, equal_C, invalid_C = count_CK.double().unbind(1)
    return None if bool(invalid_C.any()) else above_C + 0.5 * (equal_C - 1.0)


def positions_stacked(score_CI: Tensor, target_C: Tensor, seen_CT: Tensor) -> Tensor:
    """(C,) places of the targets when the items ``seen_CT`` (``num_items`` pads) come last; ties share their places."""
    lowest_C1 = score_CI.new_full((len(score_CI), 1), -torch.inf)
    padded = torch.cat([score_CI, lowest_C1], 1).scatter(1, seen_CT, -torch.inf)
    return positions_from_scores(padded[:, :-1], target_C)


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([0, *map(len, lists)])
    return torch.tensor([item for items in lists for item in items], dtype=torch.int64), lengths.cumsum(0)


def _padded(value_E: Tensor, start_N: Tensor, client_C: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    first_C, count_C = start_N[client_C], start_N[client_C + 1] - start_N[client_C]
    place_T = torch.arange(int(count_C.max()), device=value_E.device)
    real_CT = place_T < count_C[:, None]
    index_CT = (first_C[:, None] + place_T).clamp(max=len(value_E) - 1)
    return torch.where(real_CT, value_E[index_CT], pad), count_C
