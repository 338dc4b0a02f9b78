"""Secure sums: masked uploads look uniform and sum exactly; keys agree; any t shares recover a secret, t - 1 none."""

import itertools
import secrets
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.federation import secure_sum as protocol
from fedecider.federation.secure_rounds import simulated
from fedecider.federation.secure_sum import (
    PRIME,
    SHARE_BYTES,
    agree,
    announce,
    decode,
    encode,
    join,
    keystream,
    new_pair,
    public_of,
    random_coefficients,
    recover,
    rules_for,
    seal,
    seeded,
    split,
    unseal,
)

COHORT = (1, 2, 3, 7, 11, 25, 40)


LENGTH = 15


def values(low=-50, high=900, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(low, high, (len(COHORT), length), generator=generator)
    return dict(zip(COHORT, drawn, strict=True))


def parties(cohort=COHORT, seed=3, round=1, **options):
    return simulated(tuple(cohort), seed, "test", round, **options)


def total_of(found, value, survivors):
    return sum(found.send(client, value[client]) for client in survivors)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("num_neighbours", [None, 4])
@pytest.mark.parametrize("gone", [(), (7,), (1, 40)], ids=str)
def test_the_sum_of_who_delivered_is_exact_and_no_part_of_it_is(bits, num_neighbours, gone):
    """None, one, and of seven clients with threshold 5 the most that may drop out."""
    value, found = values(), parties(bits=bits, num_neighbours=num_neighbours, threshold=0.6)
    assert found.rules.least == 5
    survivors = [client for client in COHORT if client not in gone]
    total_L = total_of(found, value, survivors)
    assert total_L.dtype == {32: torch.int32, 64: torch.int64}[bits]
    opened = found.open(total_L, survivors)
    assert opened.dtype == torch.int64
    assert torch.equal(opened, sum(value[client] for client in survivors))
    expected = sum(value[client] for client in survivors).to(total_L.dtype)
    assert (total_L - expected).abs().min() > 1000  # before the unmasking every number is hidden


def test_one_dropout_too_many_leaves_the_sum_closed():
    value, found = values(), parties()
    survivors = COHORT[:4]
    with pytest.raises(ValueError, match=r"4 of 7 uploads for the secure aggregation of test 1, expected 5 at least"):
        found.open(total_of(found, value, survivors), survivors)
    near = parties(num_neighbours=2)  # enough in all, but all holders of one client's secret are neighbours of it
    lonely = COHORT[0]
    left = [client for client in COHORT if client not in near.rules.neighbours[lonely]]
    with pytest.raises(ValueError, match=r"got 1 shares of client 1, expected 2 at least"):
        near.open(total_of(near, value, left), left)


@given(
    st.integers(2, 7).flatmap(
        lambda n: st.tuples(
            st.permutations(range(100)).map(lambda p: sorted(p[:n])),
            st.lists(st.integers(-(2**31), 2**31), min_size=n, max_size=n),
            st.integers(-(-6 * n // 10), n),
        )
    ),
    st.integers(0, 2**40),
    st.randoms(),
)
@settings(max_examples=25, deadline=None)
def test_any_cohort_of_any_size_sums_exactly(case, seed, order):
    cohort, numbers, left = case
    found = parties(cohort, seed)
    survivors = order.sample(cohort, left)
    value = {client: torch.tensor([number]) for client, number in zip(cohort, numbers, strict=True)}
    opened = found.open(total_of(found, value, survivors), survivors)
    assert opened.item() == sum(int(value[client]) for client in survivors)


def chi_square(bytes_L):
    count = len(bytes_L)
    seen = torch.bincount(bytes_L.long(), minlength=256).double()
    return float(((seen - count / 256) ** 2 / (count / 256)).sum())


@pytest.mark.parametrize("bits", [32, 64])
def test_what_the_server_sees_of_one_client_is_uniform_whatever_its_value(bits):
    count = 64_000
    zero = {client: torch.zeros(count, dtype=torch.int64) for client in COHORT}
    seen = {}
    for name, value in {"nothing": zero[3], "something": torch.arange(count) % 1000}.items():
        seen[name] = parties(seed=len(name), bits=bits).send(3, value)
        for byte in range(bits // 8):
            off = abs(chi_square((seen[name] >> (8 * byte)) & 255) - 255)  # mean 255, standard deviation sqrt(510)
            assert off < 5 * 510**0.5, f"byte {byte} of {name}"
    scaled = {name: sent.double() for name, sent in seen.items()}
    bound = 1.95 * (2 / count) ** 0.5  # Kolmogorov and Smirnov, both samples alike: 0.1 %
    edges = torch.linspace(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1), 4001, dtype=torch.float64)
    counts = [torch.searchsorted(sent.sort().values, edges).double() / count for sent in scaled.values()]
    assert float((counts[0] - counts[1]).abs().max()) < bound
    table = torch.stack([*scaled.values(), (torch.arange(count) % 1000).double()])
    assert (torch.corrcoef(table) - torch.eye(3)).abs().max() < 5 / count**0.5
    same_masks = parties(seed=len("nothing"), bits=bits).send(3, torch.arange(count) % 1000)
    assert torch.equal(same_masks - seen["nothing"], (torch.arange(count) % 1000).to(same_masks.dtype))


def test_other_clients_rounds_and_seeds_have_other_masks():
    zero = torch.zeros(64_000, dtype=torch.int64)
    seen = [
        parties(seed=seed, round=round).send(client, zero)
        for client, seed, round in [(3, 0, 1), (7, 0, 1), (3, 1, 1), (3, 0, 2)]
    ]
    table = torch.corrcoef(torch.stack(seen).double()) - torch.eye(4)
    assert table.abs().max() < 5 / len(zero) ** 0.5
    again = parties(seed=0).send(3, zero)
    assert torch.equal(again, seen[0])
    assert not torch.equal(parties(seed=0).send(3, zero, part=1), again)


def test_numbers_that_one_client_does_not_send_stay_zero_and_the_others_sum():
    marks = {client: torch.arange(LENGTH) % 3 != client % 3 for client in COHORT}
    value = {client: number * marks[client] for client, number in values().items()}
    found, survivors = parties(), COHORT[:-1]
    sent = {client: found.send(client, value[client], sends=marks.__getitem__) for client in survivors}
    for client, sent_L in sent.items():
        assert (sent_L[~marks[client]] == 0).all()
        assert (sent_L[marks[client]].abs() > 1000).all()
    opened = found.open(sum(sent.values()), survivors, sends=marks.__getitem__)
    assert torch.equal(opened, sum(value[client] for client in survivors))


def test_neighbours_are_mutual_and_change_with_the_round():
    cohort = list(range(0, 60, 2))
    near = rules_for(cohort, 0, "test", 1, num_neighbours=4).neighbours
    assert all(len(set(others)) == 4 and client not in others for client, others in near.items())
    assert all(client in near[other] for client, others in near.items() for other in others)
    assert near != rules_for(cohort, 0, "test", 2, num_neighbours=4).neighbours
    assert rules_for(COHORT, 0, "test", 1).neighbours[11] == (1, 2, 3, 7, 25, 40)


def test_a_client_never_gives_both_secrets_of_one_client_away():
    found = parties()
    everyone, without_7 = list(COHORT), [client for client in COHORT if client != 7]
    told, member = protocol.reveal(found.rules, found.members[3], without_7)
    assert 7 in told.keys
    assert set(told.seeds) == set(without_7)
    assert not set(told.seeds) & set(told.keys)
    with pytest.raises(ValueError, match="never gives both secrets of one client away"):
        protocol.reveal(found.rules, member, everyone)
    assert protocol.reveal(found.rules, member, without_7)[0] == told  # the same question again is no harm
    for survivors, reason in (
        (COHORT[:2], "expected 5 at least"),
        ([*without_7, 99], "strangers"),
        ([client for client in COHORT if client != 3], "without client 3"),
    ):
        with pytest.raises(ValueError, match=reason):
            protocol.reveal(found.rules, found.members[3], survivors)


def test_wrong_shares_are_seen_and_the_sum_stays_closed():
    found, survivors = parties(), [client for client in COHORT if client != 7]
    answers = [protocol.reveal(found.rules, found.members[client], survivors)[0] for client in survivors]
    protocol.recovered(found.rules, found.keys, survivors, answers)
    seeds = answers[0]._replace(seeds={**answers[0].seeds, 11: answers[0].seeds[11] + 1})
    with pytest.raises(ValueError, match=r"clients \[11\] that do not give"):
        protocol.recovered(found.rules, found.keys, survivors, [seeds, *answers[1:]])
    keys = answers[0]._replace(keys={7: answers[0].keys[7] ^ 2})
    with pytest.raises(ValueError, match=r"clients \[7\] that do not give"):
        protocol.recovered(found.rules, found.keys, survivors, [keys, *answers[1:]])


def test_shares_that_were_changed_on_their_way_are_refused():
    rules, source = rules_for([0, 1, 2], 0, "test", 1), seeded(0, "test")
    members = {client: join(client, source) for client in range(3)}
    keys = {client: announce(member) for client, member in members.items()}
    sealed, _ = protocol.share(rules, members[0], keys, source)
    assert protocol.receive(rules, members[1], keys, {0: sealed[1]}).held.keys() == {0}
    assert [len(message) for message in sealed.values()] == [82, 82]
    tampered = sealed[1][:-1] + bytes([sealed[1][-1] ^ 1])
    for message in (tampered, sealed[2], b""):
        with pytest.raises(ValueError, match="shares of client 0 for client 1"):
            protocol.receive(rules, members[1], keys, {0: message})
    with pytest.raises(ValueError, match="client 9 at client 1"):
        protocol.receive(rules, members[1], keys, {9: sealed[1]})


def test_who_announces_keys_and_sends_no_shares_is_left_out_by_all():
    """In a deployment: gone between steps 1 and 2. Secrets are the operating system's."""
    rules = rules_for([0, 1, 2, 3], 0, "test", 1, threshold=0.7)
    members = {client: join(client, secrets.token_bytes) for client in rules.cohort}
    keys = {client: announce(member) for client, member in members.items()}
    sealed = {}
    for client in (0, 1, 3):
        sealed[client], members[client] = protocol.share(rules, members[client], keys, secrets.token_bytes)
    there = {client: keys[client] for client in sealed}
    for client in there:
        near = {sender: messages[client] for sender, messages in sealed.items() if sender != client}
        members[client] = protocol.receive(rules, members[client], there, near)
    value = {client: torch.tensor([10**client, -5]) for client in there}
    total_L = sum(protocol.masked(rules, members[client], there, value[client]) for client in there)
    answers = [protocol.reveal(rules, members[client], [0, 1, 3])[0] for client in there]
    found = protocol.recovered(rules, there, [0, 1, 3], answers)
    assert protocol.unmask(rules, there, found, total_L).tolist() == [1011, -15]


def test_bad_input_is_told():
    value = torch.tensor([5, -(2**40)])
    with pytest.raises(ValueError, match="bits 16"):
        rules_for(COHORT, 0, "test", 1, bits=16)
    with pytest.raises(ValueError, match="one is no sum"):
        rules_for([4], 0, "test", 1)
    with pytest.raises(ValueError, match="two different clients"):
        rules_for([4, 4], 0, "test", 1)
    with pytest.raises(ValueError, match=r"threshold 0\.5, expected above"):
        rules_for(COHORT, 0, "test", 1, threshold=0.5)
    with pytest.raises(ValueError, match="num_neighbours 3"):
        rules_for(COHORT, 0, "test", 1, num_neighbours=3)
    with pytest.raises(ValueError, match="float32"):
        parties().send(3, value.float())
    with pytest.raises(ValueError, match=r"below 2\^31"):
        parties(bits=32).send(3, value)
    with pytest.raises(ValueError, match=r"below 2\^63"):
        parties().send(3, torch.tensor([-(2**63)]))
    rules, member = rules_for(COHORT, 0, "test", 1), join(3, secrets.token_bytes)
    with pytest.raises(ValueError, match="keys of 1 neighbours of client 3, expected 4"):
        protocol.share(rules, member, {1: announce(join(1, secrets.token_bytes))}, secrets.token_bytes)


def test_fixed_point_hand_numbers():
    value = torch.tensor([0.5, -1.25, 3.0, 0.3])
    encoded = encode(value, 4)
    assert encoded.tolist() == [8, -20, 48, 5]
    assert decode(encoded, 4).tolist() == [0.5, -1.25, 3.0, 0.3125]
    found = parties((0, 1), bits=32)
    total_L = found.send(0, encode(torch.tensor([0.5]), 12)) + found.send(1, encode(torch.tensor([-2.75]), 12))
    assert decode(found.open(total_L, [0, 1]), 12).item() == -2.25


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
