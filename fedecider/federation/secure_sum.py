"""Secure aggregation by pairwise masks: the server learns a sum and, of each upload, nothing.

A simulation of the one-round core of Bonawitz et al. (CCS 2017): every two clients share a secret; one adds the numbers
that a generator makes of it, the other subtracts them, in whole numbers modulo 2^32 or 2^64. A single upload is uniform
noise, and the masks cancel in the sum to the last bit.

Differs from the paper: the secrets come from the run's seed instead of a key exchange, and the generator (SFC64) is
fast, not cryptographic, so this shows results, bytes and time, and hides nothing from who knows the seed. No recovery
of dropouts: when one client of the cohort is missing the sum cannot be opened, and the round must be repeated without
it. The server is honest but curious, and learns what two sums over different cohorts tell by their difference.

Shape legend: C clients of a block, L numbers of an upload.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedecider.federation.streams import derive_seed, stream

Bits = Literal[32, 64]
_DTYPES = {32: torch.int32, 64: torch.int64}


def mask(
    value: Tensor,
    clients: Tensor,
    cohort: Sequence[int],
    seed: int,
    round: int,
    *,
    bits: Bits = 64,
    num_neighbours: int | None = None,
) -> Tensor:
    """What each client sends: ``value_c + sum_{d > c} m_cd - sum_{d < c} m_dc mod 2^bits`` over its neighbours d.

    ``value`` int64 (C, ...) of the ``clients`` (C,) of this block; ``cohort`` names all clients of the round. Returns
    int32 or int64 in the shape of ``value``, of which ``bits / 8`` bytes a number travel; the result for a client does
    not depend on the block. ``num_neighbours`` None shares a mask with every other client, as in the paper (time C N L
    for N clients of the cohort); k even shares it with k of them, on a random circle drawn for each round (time C k L;
    Bell et al., CCS 2020): an upload is then open to a server that colludes with all k.

    Raises:
        ValueError: a sum could leave the range of signed ``bits``, a client outside the cohort, an odd k.
    """
    if bits not in _DTYPES:
        raise ValueError(f"got bits {bits}, expected 32 or 64")
    if value.dtype != torch.int64:
        raise ValueError(f"got values of {value.dtype}, expected int64: see encode")
    largest = max(-int(value.min()), int(value.max())) if value.numel() else 0
    if largest * len(cohort) >= 2 ** (bits - 1):
        raise ValueError(
            f"got values up to {largest} of {len(cohort)} clients, expected a sum below 2^{bits - 1}: "
            "use bits=64 or fewer fraction bits"
        )
    masked = value.cpu().to(_DTYPES[bits], copy=True)
    partners = mask_partners(clients.tolist(), cohort, seed, round, num_neighbours)
    for row, (client, others) in enumerate(partners.items()):
        for other in others:
            pair_seed = derive_seed(seed, "mask", round, min(client, other), max(client, other))
            drawn = _uniform(masked[row].numel(), bits, pair_seed).view(masked[row].shape)
            if client < other:
                masked[row] += drawn
            else:
                masked[row] -= drawn
    return masked


def secure_sum(parts: Iterable[Tensor], cohort_size: int) -> Tensor:
    """The exact sum of the values of a whole cohort, int64 (...), from its masked uploads (C, ...), block by block.

    Raises:
        ValueError: more or fewer uploads than the cohort has clients: the masks of the others are still in the sum.
    """
    total: Tensor | None = None
    count = 0
    for part in parts:
        count += len(part)
        summed = part.sum(0, dtype=part.dtype)  # wraps: that is the modulus
        total = summed if total is None else total + summed
    if total is None or count != cohort_size:
        raise ValueError(
            f"got uploads of {count} clients, expected all {cohort_size} of the cohort: masks of missing clients do "
            "not cancel; repeat the round without them"
        )
    return total.to(torch.int64)


def mask_partners(
    clients: Sequence[int], cohort: Sequence[int], seed: int, round: int, num_neighbours: int | None = None
) -> dict[int, list[int]]:
    """Client -> the clients it shares a mask with; mutual, drawn anew in every round."""
    members = sorted(set(cohort))
    strangers = sorted(set(clients).difference(members))
    if len(members) != len(cohort) or strangers:
        raise ValueError(
            f"got {len(cohort)} clients in the cohort, {len(members)} of them distinct, and clients {strangers[:10]} "
            "from outside it, expected each client once and no others"
        )
    if num_neighbours is None or num_neighbours >= len(members) - 1:
        return {client: [other for other in members if other != client] for client in clients}
    if num_neighbours < 2 or num_neighbours % 2:
        raise ValueError(f"got num_neighbours {num_neighbours}, expected an even number from 2 up, or None for all")
    order = torch.randperm(len(members), generator=stream(seed, "mask_circle", round)).tolist()
    circle = [members[position] for position in order]
    place = {client: position for position, client in enumerate(circle)}
    steps = [step for half in range(1, num_neighbours // 2 + 1) for step in (half, -half)]
    return {client: [circle[(place[client] + step) % len(circle)] for step in steps] for client in clients}


def encode(value: Tensor, fraction_bits: int) -> Tensor:
    """Fixed point: ``round(value * 2^fraction_bits)`` as int64, off by at most 2^-(fraction_bits + 1)."""
    return (value.double() * 2.0**fraction_bits).round().to(torch.int64)


def decode(value: Tensor, fraction_bits: int) -> Tensor:
    """Float64 of a fixed-point number or of a sum of them."""
    return value.double() / 2.0**fraction_bits


def _uniform(count: int, bits: Bits, seed: int) -> Tensor:
    """``count`` uniform numbers of all ``bits`` bits, int32 or int64."""
    words = np.random.SFC64(seed).random_raw(-(-count * bits // 64))
    return torch.from_numpy(np.asarray(words).view(np.int32 if bits == 32 else np.int64)[:count])
