"""Masked uploads look uniform and sum to the exact sum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedecider.federation.secure_sum import decode, encode, mask, mask_partners, secure_sum

COHORT = [7, 2, 40, 3, 11, 25, 1]


def values(low=-50, high=900, shape=(5, 3)):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(low, high, (len(COHORT), *shape), generator=generator)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("num_neighbours", [None, 2, 4, 6])
def test_the_sum_is_exact_and_no_part_of_it_is(bits, num_neighbours):
    value, clients = values(), torch.tensor(COHORT)
    sent = mask(value, clients, COHORT, 3, 1, bits=bits, num_neighbours=num_neighbours)
    assert sent.dtype == {32: torch.int32, 64: torch.int64}[bits]
    opened = secure_sum([sent[:2], sent[2:3], sent[3:]], len(COHORT))
    assert opened.dtype == torch.int64
    assert torch.equal(opened, value.sum(0))
    assert sent[:-1].long().sum(0).abs().min() > 1000  # without the last client the masks are still there


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.permutations(range(100)).map(lambda p: p[:n]),
            st.lists(st.integers(-(2**31 // 8), 2**31 // 8), min_size=n, max_size=n),
        )
    ),
    st.integers(0, 2**40),
)
@settings(max_examples=30, deadline=None)
def test_any_cohort_of_any_size_sums_exactly(case, seed):
    cohort, numbers = case
    value = torch.tensor(numbers)[:, None]
    sent = mask(value, torch.tensor(cohort), cohort, seed, 2, bits=64)
    assert secure_sum([sent], len(cohort)).item() == sum(numbers)


@pytest.mark.parametrize("bits", [32, 64])
def test_one_upload_is_uniform_whatever_its_value(bits):
    count = 64_000
    zero = mask(torch.zeros(1, count, dtype=torch.int64), torch.tensor([3]), COHORT, 0, 1, bits=bits)[0]
    for byte in range(bits // 8):
        seen = torch.bincount((zero >> (8 * byte)).long() & 255, minlength=256).double()
        chi_square = ((seen - count / 256) ** 2 / (count / 256)).sum()  # mean 255, standard deviation sqrt(510)
        assert abs(chi_square - 255) < 5 * 510**0.5, f"byte {byte}"
    value = torch.arange(count)[None]
    same_masks = mask(value, torch.tensor([3]), COHORT, 0, 1, bits=bits)[0]
    assert torch.equal(same_masks - zero, value[0].to(zero.dtype))  # the value is added, and nothing else changes
    correlation = torch.corrcoef(torch.stack([same_masks.double(), value[0].double()]))[0, 1]
    assert abs(correlation) < 5 / count**0.5
    others = [
        mask(torch.zeros(1, count, dtype=torch.int64), torch.tensor([client]), COHORT, seed, round, bits=bits)[0]
        for client, seed, round in [(7, 0, 1), (3, 1, 1), (3, 0, 2)]
    ]
    table = torch.corrcoef(torch.stack([zero, *others]).double()) - torch.eye(4)
    # client 7 shares one of its six masks with client 3, with the other sign; modulo 2^bits that leaves no correlation
    assert table.abs().max() < 5 / count**0.5


def test_an_upload_does_not_depend_on_the_block():
    value, clients = values(), torch.tensor(COHORT)
    sent = mask(value, clients, COHORT, 3, 1, num_neighbours=4)
    alone = mask(value[4:5], clients[4:5], sorted(COHORT), 3, 1, num_neighbours=4)
    assert torch.equal(sent[4:5], alone)


def test_partners_are_mutual_and_change_with_the_round():
    cohort = list(range(0, 60, 2))
    partners = mask_partners(cohort, cohort, 0, 1, 4)
    assert all(len(set(others)) == 4 and client not in others for client, others in partners.items())
    assert all(client in partners[other] for client, others in partners.items() for other in others)
    assert partners != mask_partners(cohort, cohort, 0, 2, 4)
    assert mask_partners([11], COHORT, 0, 1) == {11: [1, 2, 3, 7, 25, 40]}
    assert mask_partners([8, 4], cohort, 0, 1, 4) == {client: partners[client] for client in (8, 4)}


def test_a_missing_client_is_told():
    sent = mask(values(), torch.tensor(COHORT), COHORT, 3, 1)
    with pytest.raises(ValueError, match="uploads of 6 clients, expected all 7"):
        secure_sum([sent[:6]], len(COHORT))
    with pytest.raises(ValueError, match="uploads of 0 clients"):
        secure_sum([], len(COHORT))


def test_bad_input_is_told():
    value, clients = values(), torch.tensor(COHORT)
    with pytest.raises(ValueError, match="bits 16"):
        mask(value, clients, COHORT, 3, 1, bits=16)
    with pytest.raises(ValueError, match="float32"):
        mask(value.float(), clients, COHORT, 3, 1)
    with pytest.raises(ValueError, match=r"below 2\^31"):
        mask(value * 2**20, clients, COHORT, 3, 1, bits=32)
    with pytest.raises(ValueError, match=r"below 2\^63"):
        mask(torch.tensor([[5]] * 6 + [[-(2**63)]]), clients, COHORT, 3, 1)
    with pytest.raises(ValueError, match=r"clients \[99\] from outside"):
        mask(value[:1], torch.tensor([99]), COHORT, 3, 1)
    with pytest.raises(ValueError, match="num_neighbours 3"):
        mask(value, clients, COHORT, 3, 1, num_neighbours=3)
    with pytest.raises(ValueError, match="each client once"):
        mask(value, clients, [*COHORT, 7], 3, 1)


def test_fixed_point_hand_numbers():
    value = torch.tensor([0.5, -1.25, 3.0, 0.3])
    encoded = encode(value, 4)
    assert encoded.tolist() == [8, -20, 48, 5]
    assert decode(encoded, 4).tolist() == [0.5, -1.25, 3.0, 0.3125]
    sent = mask(encode(torch.tensor([[0.5], [-2.75]]), 12), torch.tensor([0, 1]), [0, 1], 0, 1, bits=32)
    assert decode(secure_sum([sent], 2), 12).item() == -2.25
