"""The weights of all clients: a mean over their customers, of which a secure sum tells the sum alone.

A client sends customers times weight for each feature, in units of 2^-20, and customers; zeros for what it left out.

Shape legend: F features, L = 2 F numbers that a client sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedecider.federation.secure_rounds import protocol_bytes, simulated
from fedecider.federation.secure_sum import decode, encode
from fedecider.models.ensemble import BOUND, MAX_CUSTOMERS, Weights
from fedecider.models.features import FEATURES

FRACTION_BITS = 20
NUM_NUMBERS = 2 * len(FEATURES)


def weight_numbers(weights: Weights) -> Tensor:
    """What a client sends, int64 (L,)."""
    number = weights.num_customers
    value_F = torch.tensor([weights.value.get(name, 0.0) for name in FEATURES], dtype=torch.float64)
    number_F = torch.tensor([number if name in weights.value else 0 for name in FEATURES])
    return torch.cat([encode(number * value_F, FRACTION_BITS), number_F])


def mean_weights(total_L: Tensor, num_clients: int) -> dict[str, float]:
    """Feature -> mean, from a sum over so many clients; features that all of them left out are not in it.

    Raises:
        ValueError: no sum of weights gives these numbers.
    """
    value_F, number_F = total_L.split(len(FEATURES))
    bound_F = BOUND * number_F + decode(torch.tensor(num_clients), FRACTION_BITS)  # a rounding of each
    is_good_F = (number_F >= 0) & (number_F <= num_clients * MAX_CUSTOMERS)
    is_good_F &= decode(value_F, FRACTION_BITS).abs() <= bound_F
    if not bool(is_good_F.all()):
        raise ValueError(f"got no sum of the weights of {num_clients} clients, expected {NUM_NUMBERS} numbers of one")
    sums = zip(FEATURES, decode(value_F, FRACTION_BITS).tolist(), number_F.tolist(), strict=True)
    return {name: value / number for name, value, number in sums if number}


def securely_meaned(every: Sequence[Weights], seed: int) -> tuple[dict[str, float], dict[str, int]]:
    """The mean over clients as a simulated secure sum gives it, and bytes down and up of each of them."""
    clients = range(len(every))
    parties = simulated(tuple(clients), seed, "weights", 0)
    total_L = sum(parties.send(client, weight_numbers(weights)) for client, weights in enumerate(every))
    assert isinstance(total_L, Tensor)
    down, up = (8 * NUM_NUMBERS + sum(sizes.values()) for sizes in protocol_bytes(parties.rules, 0))
    return mean_weights(parties.open(total_L, clients), len(every)), {"down": down, "up": up}
