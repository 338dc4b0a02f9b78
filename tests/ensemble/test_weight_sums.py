"""The mean of all clients' weights, by hand, and as a secure sum gives it."""

import pytest
import torch

from fedecider.models.ensemble import Weights
from fedecider.models.features import FEATURES
from fedecider.models.weight_sums import NUM_NUMBERS, mean_weights, securely_meaned, weight_numbers

NORTH = Weights({"model": 0.5, "text": -1.25, "bought before": 3.0}, {}, num_customers=100)
SOUTH = Weights({"model": 1.5, "text": 0.75}, {}, ("bought before",), num_customers=300)
NOBODY = Weights(dict.fromkeys(FEATURES, 9.0), {}, num_customers=0)


def test_a_client_sends_customers_times_weight_in_fixed_point_and_customers():
    sent_L, place = weight_numbers(SOUTH).tolist(), FEATURES.index("text")
    assert len(sent_L) == NUM_NUMBERS == 2 * len(FEATURES)
    assert sent_L[place] == 225 * 2**20
    assert sent_L[len(FEATURES) + place] == 300
    left_out = FEATURES.index("bought before")
    assert (sent_L[left_out], sent_L[len(FEATURES) + left_out]) == (0, 0)


def test_the_mean_weighs_clients_by_their_customers():
    """(100 * .5 + 300 * 1.5) / 400, (-125 + 225) / 400; a feature that only north has is north's."""
    prior, traffic = securely_meaned([NORTH, SOUTH, NOBODY], seed=3)
    assert prior == {"model": 1.25, "text": 0.25, "bought before": 3.0}
    assert prior == mean_weights(sum(map(weight_numbers, (NORTH, SOUTH, NOBODY))), 3)
    assert traffic["up"] > 8 * NUM_NUMBERS < traffic["down"]


def test_a_sum_that_no_weights_have_is_refused():
    good_L = weight_numbers(NORTH)
    mean_weights(good_L, 1)
    for place, value in ((0, 2**50), (0, -(2**50)), (len(FEATURES), -1), (len(FEATURES), 10**6)):
        with pytest.raises(ValueError, match="got no sum of the weights of 1 clients"):
            mean_weights(good_L.index_put((torch.tensor(place),), torch.tensor(value)), 1)
