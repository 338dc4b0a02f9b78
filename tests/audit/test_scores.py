"""Areas, rates and intervals by hand; which attack is reported."""

import pytest
import torch

from fedecider.audit.separation import Scored, auc, chosen_on_others, interval_over_users, true_positives
from fedecider.federation.streams import stream


def scored(member, other):
    return Scored(torch.tensor(member, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))


def test_auc_by_hand():
    # 3 beats 2, 1 and ties with 3; 1 ties with 1: (2.5 + 0.5) of 6 pairs
    assert auc(scored([3, 1], [2, 1, 3])) == pytest.approx(3.0 / 6)
    assert auc(scored([5, 4], [1, 2, 3])) == 1.0
    assert auc(scored([0], [1, 2])) == 0.0
    assert auc(scored([7, 7], [7])) == 0.5


def test_a_rate_lets_only_its_share_of_others_pass():
    others = list(range(200))
    assert true_positives(scored([197.5, 196.5, 10], others)) == pytest.approx(1 / 3)  # 198 and 199 may pass
    assert true_positives(scored([197.5, 196.5, 10], others), 0.05) == pytest.approx(2 / 3)
    assert true_positives(scored([5, 5], [5, 5])) == 0.0  # ties are not above


def test_the_interval_is_about_the_mean_over_clients_and_grows_with_fewer_users():
    generator = torch.Generator().manual_seed(3)

    def client(size):
        return Scored(torch.randn(size, generator=generator) + 1.0, torch.randn(size, generator=generator))

    large = interval_over_users(auc, [client(400), client(400)], stream(0, "a"), 200)
    small = interval_over_users(auc, [client(20), client(20)], stream(0, "a"), 200)
    assert large.low < 0.76 < large.high  # Phi(1 / sqrt 2) = 0.760
    assert large.high - large.low < 0.5 * (small.high - small.low)


def test_an_attack_is_chosen_where_it_is_not_reported():
    value_AC = torch.tensor([[0.5, 0.5, 0.5, 0.5], [1.0, 0.2, 0.2, 0.3]])
    assert chosen_on_others(value_AC, torch.arange(4)).tolist() == [0, 0, 0, 0]
    assert chosen_on_others(value_AC, torch.tensor([0, 0, 1, 1])).tolist() == [0, 0, 1, 1]  # 0.25 and 0.6 elsewhere
    assert chosen_on_others(value_AC, torch.zeros(4, dtype=torch.int64)).tolist() == [0, 0, 0, 0]
