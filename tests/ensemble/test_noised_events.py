"""Events with noise, which hide customers: bound, noise, its guarantee, and that nothing else of counts is sent."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy
from ensemble_toys import NUM_ITEMS
from test_sources import SHOPS, same

from fedecider.cross_silo import ensembles
from fedecider.evaluation.protocols import train_parts
from fedecider.federation.config import PrivacyConfig
from fedecider.federation.privacy import epsilon
from fedecider.federation.streams import stream
from fedecider.methods.config import UserPrivacy
from fedecider.models.config import EnsembleConfig
from fedecider.models.counts import UNIT, count_events, no_counts
from fedecider.models.ensemble import Weights
from fedecider.models.noised_events import EVENTS_NORM, bounded_events, noised_events, others_events

OTHERS = EnsembleConfig(kind="logit", sources="others")
BOOKS = ("books.1", "books.2", "books.3")


def test_customers_within_the_bound_count_as_they_are_and_others_are_scaled():
    """Norms: sqrt(1 + 1) of the first; 5 of the second, so two fifths; none of the third."""
    assert EVENTS_NORM == 2.0
    assert bounded_events([[0, 1], [1, 1, 1, 2, 2, 2, 2], []], 4).tolist() == pytest.approx([1.0, 2.2, 1.6, 0.0])


@pytest.mark.parametrize("history", [[3] * 1000, list(range(500)) * 2, [0, 1, 2] + [7] * 40, [4]])
def test_one_customer_moves_what_is_sent_by_the_bound_at_most(history):
    before = [[0, 0, 1], [2, 7], [5] * 9]
    moved_I = [noised_events(parts, 500, 1.5, stream(3, "n")).event_I for parts in (before, [*before, history])]
    assert 1.0 - 1e-9 <= np.linalg.norm((moved_I[1] - moved_I[0]) * UNIT) <= EVENTS_NORM + 500**0.5 * UNIT


def test_the_noise_has_its_size_on_every_item_and_is_drawn_anew():
    parts = [[0, 1, 1]] * 40
    first_I, again_I, other_I = (
        noised_events(parts, 20_000, 3.0, draws).event_I * UNIT for draws in (stream(1, "n"), stream(1, "n"), None)
    )
    noise_I = first_I - bounded_events(parts, 20_000)
    assert noise_I.std() == pytest.approx(3.0 * EVENTS_NORM, rel=0.03)
    assert abs(noise_I.mean()) < 5 * 6.0 / 20_000**0.5
    assert (first_I == again_I).all()
    assert (first_I != other_I).mean() > 0.99


@pytest.mark.parametrize("noise_scale", [0.6, 1.9, 5.0])
def test_epsilon_of_the_sum_holds_and_is_near_the_least_there_is(noise_scale):
    """Balle and Wang (2018), Theorem 8: the delta of a Gaussian mechanism at an epsilon, exactly."""
    delta = 1e-4
    found = epsilon(PrivacyConfig(1.0, noise_scale, delta, "sum"), 0, 0.25, "poisson", 1)
    mu, cdf = 1.0 / noise_scale, scipy.stats.norm.cdf

    def least(value):
        return cdf(mu / 2 - value / mu) - math.exp(value) * cdf(-mu / 2 - value / mu)

    exact = scipy.optimize.brentq(lambda value: least(value) - delta, 0.0, 100.0)
    assert exact <= found <= 1.15 * exact + 0.02


def test_faint_items_share_what_they_have_and_all_is_scaled_by_what_the_bound_took():
    """Noise of two others: 1 * 2 * sqrt(2); above twice that, 5.66, a sum counts. Of own events, 16 and 2, the bound
    leaves 2 and 2: 4.5 times as much."""
    own = [[0] * 16, [1, 2]]
    sum_I = np.rint(np.array([40.0, 5.0, -1.0, 2.0]) / UNIT)
    assert others_events(sum_I, 2, 1.0, own).event_I.tolist() == [180, 9, 9, 9]
    assert others_events(-sum_I, 2, 1.0, own).event_I.tolist() == [0, 0, 0, 0]
    assert others_events(sum_I, 2, 1.0, []).event_I.tolist() == [40, 2, 2, 2]


def test_a_run_that_hides_customers_sends_events_with_noise_and_no_pairs():
    exact, traffic = ensembles.client_counts(SHOPS, OTHERS, 1)
    hidden, of_hidden = ensembles.client_counts(SHOPS, OTHERS, 1, users=UserPrivacy(0.1, 0.5))
    bounded, _ = ensembles.client_counts(SHOPS, OTHERS, 1, users=UserPrivacy(0.1))
    for name in BOOKS:
        assert hidden[name].pair_II.nnz == bounded[name].pair_II.nnz == 0 < exact[name].pair_II.nnz
        sent = [train_parts(SHOPS[other].clients.sequences) for other in BOOKS if other != name]
        sum_I = sum(bounded_events(parts, exact[name].num_items) for parts in sent)
        own = train_parts(SHOPS[name].clients.sequences)
        expected = others_events(np.rint(sum_I / UNIT), 2, 0.0, own)
        assert bounded[name].event_I == pytest.approx(expected.event_I, abs=1)
        assert (hidden[name].event_I != bounded[name].event_I).any()
        assert of_hidden[name]["up"] < traffic[name]["up"]
    assert same(hidden["games.1"], exact["games.1"])


def test_own_counts_have_no_noise():
    sources = replace(OTHERS, sources="own")
    found, _ = ensembles.client_counts(SHOPS, sources, 1, users=UserPrivacy(0.1, 0.5))
    own = train_parts(SHOPS["books.1"].clients.sequences)
    assert same(found["books.1"], count_events(own, len(SHOPS["books.1"].item_keys)))


class Stop(Exception):
    pass


def test_ensembles_of_a_run_count_as_its_customers_are_hidden_and_then_exchange_no_weights(monkeypatch):
    """Exact counts and weights beside an epsilon would be silent."""
    hidden, asked = UserPrivacy(0.1, 0.5), []

    def counts(domains, config, seed, others=None, users=None):
        asked.append(users)
        return dict.fromkeys(domains, no_counts(NUM_ITEMS)), {}

    def stop(*_):
        raise Stop

    def meaned(every, seed):
        asked.append("weights")
        return {}, {"up": 1, "down": 1}

    replaced = {"client_counts": counts, "choices_for": lambda *_: None, "ranked": stop, "securely_meaned": meaned}
    for name, function in replaced.items():
        monkeypatch.setattr(ensembles, name, function)
    monkeypatch.setattr(ensembles.ensemble, "fit_weights", lambda *_: Weights({}, {}))
    for users in (hidden, UserPrivacy()):
        run, training = SimpleNamespace(ensemble=OTHERS, seed=1), SimpleNamespace(user_privacy=users)
        settings, texts = SimpleNamespace(run=run, training=training), dict.fromkeys(SHOPS, SimpleNamespace(unit_ID=0))
        fitting = ensembles.Fitting(settings, SimpleNamespace(domains=SHOPS), texts)
        with pytest.raises(Stop):
            ensembles.every_ensemble(fitting, "fedavg", lambda name: None)
    assert list(dict.fromkeys(asked)) == [hidden, UserPrivacy(), "weights"]
