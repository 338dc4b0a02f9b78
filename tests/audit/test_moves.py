"""The attacks on moved rows where a leak is planted, where there is none, and in between."""

import pytest
import torch

from fedecider.audit.item_attack import ATTACKS, against_mean, along_main_direction, move_scores
from fedecider.audit.separation import Scored, auc

NUM_CLIENTS, NUM_ITEMS, SIZE = 12, 120, 6


def planted(noise, negatives=4, seed=0):
    """Moves of own items along a client's vector and of negatives against it, and which items are own."""
    generator = torch.Generator().manual_seed(seed)
    own_CI = torch.zeros(NUM_CLIENTS, NUM_ITEMS, dtype=torch.bool)
    move_CID = torch.zeros(NUM_CLIENTS, NUM_ITEMS, SIZE)
    for client in range(NUM_CLIENTS):
        vector_D = torch.randn(SIZE, generator=generator)
        order = torch.randperm(NUM_ITEMS, generator=generator)
        count = 8 + client  # of unequal size
        own_CI[client, order[:count]] = True
        move_CID[client, order[:count]] = 0.6 * vector_D
        move_CID[client, order[count : count * (1 + negatives)]] = -0.5 * vector_D
    return move_CID + noise * torch.randn(move_CID.shape, generator=generator), own_CI


def mean_auc(score_CI, own_CI):
    values = [auc(Scored(score[own], score[~own])) for score, own in zip(score_CI, own_CI, strict=True)]
    return sum(values) / len(values)


def by_attack(noise):
    move_CID, own_CI = planted(noise)
    return {name: mean_auc(score_CI, own_CI) for name, score_CI in zip(ATTACKS, move_scores(move_CID), strict=True)}


def test_a_planted_leak_is_found():
    found = by_attack(0.0)
    assert found["along the main direction"] == 1.0
    assert found["against the mean direction"] == 1.0
    assert found["along the main direction, less the others' mean"] > 0.95
    assert 0.6 < found["moved at all"] < 0.9  # negatives moved as well
    assert found["size of the move"] > found["moved at all"]


def test_moves_that_do_not_depend_on_the_data_tell_nothing():
    own_CI = planted(0.0)[1]
    move_CID = torch.randn(NUM_CLIENTS, NUM_ITEMS, SIZE, generator=torch.Generator().manual_seed(9))
    found = {name: mean_auc(score_CI, own_CI) for name, score_CI in zip(ATTACKS, move_scores(move_CID), strict=True)}
    assert all(value == pytest.approx(0.5, abs=0.06) for value in found.values()), found


def test_more_noise_hides_more():
    falling = [by_attack(noise)["against the mean direction"] for noise in (0.0, 0.5, 2.0, 8.0)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] - falling[-1] > 0.3


def test_the_sign_of_a_direction_does_not_matter_and_the_size_of_a_round_does_not_either():
    move_CID, _ = planted(0.1)
    for attack in (along_main_direction, against_mean):
        torch.testing.assert_close(attack(7.0 * move_CID), attack(move_CID), rtol=1e-4, atol=1e-5)
    one_ID = torch.tensor([[[2.0, 0.0], [-1.0, 0.0], [-1.5, 0.0], [0.0, 0.0]]])
    assert along_main_direction(one_ID)[0].tolist() == pytest.approx([1.0, -0.5, -0.75, 0.0])
    assert against_mean(one_ID)[0].tolist() == pytest.approx([1.0, -0.5, -0.75, 0.0])


def test_what_all_clients_do_alike_is_taken_away():
    move_CID, own_CI = planted(0.0)
    common_ID = 5.0 * torch.randn(NUM_ITEMS, SIZE, generator=torch.Generator().manual_seed(4))
    scores = dict(zip(ATTACKS, move_scores(move_CID + common_ID), strict=True))
    name = "along the main direction"
    assert mean_auc(scores[f"{name}, less the others' mean"], own_CI) > mean_auc(scores[name], own_CI) + 0.2
