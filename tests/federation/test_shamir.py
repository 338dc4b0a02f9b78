"""Threshold shares: any t recover the secret, t - 1 leave every secret equally likely."""

import itertools
import secrets
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.federation.secure_sum import PRIME, SHARE_BYTES, random_coefficients, recover, seeded, split


@given(
    st.integers(0, 2**256 - 1),
    st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.integers(0, 2**32),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_any_t_shares_give_the_secret_back(secret, sizes, seed, order):
    count, threshold = sizes
    places = order.sample(range(1, 10**6), count)
    shares = split(secret, places, random_coefficients(threshold, seeded(seed, "shares")))
    assert all(value.bit_length() <= 8 * SHARE_BYTES for value in shares.values())
    chosen = order.sample(places, threshold)
    assert recover({place: shares[place] for place in chosen}, threshold) == secret
    assert recover(shares, threshold) == secret


@given(st.integers(0, 12), st.integers(2, 3), st.randoms())
@settings(max_examples=20, deadline=None)
def test_one_share_less_says_nothing_at_all(secret, threshold, order):
    """Over a field of 13 numbers: what t - 1 holders see is seen equally often with every secret."""
    holders = order.sample(range(1, 13), threshold)
    variants = {
        other: Counter(
            tuple(list(split(other, holders, coefficients, prime=13).values())[:-1])
            for coefficients in itertools.product(range(13), repeat=threshold - 1)
        )
        for other in range(13)
    }
    assert len(variants[secret]) == 13 ** (threshold - 1)
    assert all(variant == variants[secret] for variant in variants.values())
    full = {tuple(split(secret, holders, c, 13).values()) for c in itertools.product(range(13), repeat=threshold - 1)}
    other = {
        tuple(split(secret + 1, holders, c, 13).values()) for c in itertools.product(range(13), repeat=threshold - 1)
    }
    assert not full & other  # while all t of them say everything


def test_hand_numbers():
    shares = split(7, [1, 2, 5], [3, 2], prime=11)  # 7 + 3 x + 2 x^2
    assert shares == {1: 1, 2: 10, 5: 6}
    assert recover(shares, 3, prime=11) == 7
    assert recover({1: 1, 2: 10}, 2, prime=11) != 7  # a line through two points of the parabola


def test_the_field_holds_32_bytes_and_is_one():
    assert PRIME > 2**256
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 65537))
    assert len(random_coefficients(4, secrets.token_bytes)) == 3
