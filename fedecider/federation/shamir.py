"""Secrets shared so that any t holders together have them and t - 1 know nothing (Shamir, CACM 1979).

A secret is a number of the field of ``prime``, the value at 0 of a random polynomial of degree t - 1; a share is its
value at the place of a holder. Differs from the paper: nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

PRIME = 2**256 + 297
"""The smallest prime above 2^256: 32 bytes are a number of its field."""
SHARE_BYTES = 33

Source = Callable[[int], bytes]
"""How many random bytes -> as many of them: ``secrets.token_bytes``, or a stream of a run's seed in a simulation."""


def split(secret: int, places: Sequence[int], coefficients: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """Place -> share ``secret + c_1 x + ... + c_(t-1) x^(t-1) mod prime``, for t - 1 random ``coefficients``.

    Raises:
        ValueError: places that are not different numbers from 1 to ``prime`` - 1, or fewer than t of them.
    """
    if len(set(places)) != len(places) or not all(0 < place < prime for place in places):
        raise ValueError(f"got the places {list(places)[:10]}, expected different numbers from 1 on: 0 is the secret")
    if len(places) <= len(coefficients):
        raise ValueError(f"got {len(places)} holders, expected the {len(coefficients) + 1} that a secret takes")
    shares = {}
    for place in places:
        value = 0
        for coefficient in reversed((secret, *coefficients)):  # Horner
            value = (value * place + coefficient) % prime
        shares[place] = value
    return shares


def recover(shares: Mapping[int, int], threshold: int, prime: int = PRIME) -> int:
    """The secret, from ``threshold`` or more shares by place; the first ones by place are taken (Lagrange at 0).

    Raises:
        ValueError: fewer shares than ``threshold``.
    """
    if len(shares) < threshold:
        raise ValueError(f"got {len(shares)} shares of a secret, expected {threshold} at least: fewer tell nothing")
    places = sorted(shares)[:threshold]
    secret = 0
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above = above * other % prime
                below = below * (other - place) % prime
        secret += shares[place] * above * pow(below, -1, prime)
    return secret % prime


def random_coefficients(threshold: int, source: Source) -> list[int]:
    """``threshold - 1`` numbers of the field of `PRIME`, uniform up to 2^-128."""
    return [int.from_bytes(source(48), "big") % PRIME for _ in range(threshold - 1)]
