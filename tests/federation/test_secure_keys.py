"""Keys agree on both sides, and what is sealed opens for its receiver alone."""

import secrets

import pytest

from fedecider.federation.secure_sum import agree, keystream, new_pair, public_of, seal, seeded, unseal


def test_both_sides_agree_for_one_label_alone():
    one, other, third = (new_pair(secrets.token_bytes) for _ in range(3))
    key = agree(one.private, other.public, b"round 1")
    assert key == agree(other.private, one.public, b"round 1")
    assert len({key, agree(one.private, other.public, b"round 2"), agree(one.private, third.public, b"round 1")}) == 3


def test_numbers_of_the_standards():
    # RFC 7748, 5.2: one iteration of k = u = 9; RFC 8439, A.1, test vector 1
    assert public_of(bytes([9]) + bytes(31)).hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    words = keystream(bytes(32), 2, 64)
    assert words.numpy().tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    assert keystream(bytes(32), 4, 32).numpy().tobytes() == words.numpy().tobytes()


@pytest.mark.parametrize("public", [bytes(32), b"short"], ids=["of small order", "none"])
def test_public_keys_that_would_give_the_secret_away_are_refused(public):
    with pytest.raises(ValueError, match="as a public key"):
        agree(new_pair(secrets.token_bytes).private, public, b"label")


def test_a_sealed_message_opens_unchanged_for_its_receiver_alone():
    key, plain = secrets.token_bytes(32), secrets.token_bytes(66)
    sealed = seal(key, plain, b"1 to 2")
    assert unseal(key, sealed, b"1 to 2") == plain
    assert len(sealed) == 66 + 16
    changed = bytes([sealed[0] ^ 1]) + sealed[1:]
    for wrong in ((key, changed, b"1 to 2"), (key, sealed, b"1 to 3"), (secrets.token_bytes(32), sealed, b"1 to 2")):
        with pytest.raises(ValueError, match="does not open"):
            unseal(*wrong)


def test_a_seeded_source_repeats_and_never_draws_the_same_twice():
    one, again, other = seeded(3, "secure", 1), seeded(3, "secure", 1), seeded(3, "secure", 2)
    drawn = [one(32) for _ in range(3)]
    assert drawn == [again(32) for _ in range(3)]
    assert len({*drawn, other(32)}) == 4
