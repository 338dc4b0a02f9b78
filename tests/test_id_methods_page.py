"""What two companies with customers in common could gain (benchmarks/id_methods.py): EASE and histories of both."""

from pathlib import Path

import id_methods
import numpy as np
import pytest
import torch

from fedecider.data.domain import NO_EVENTS, Catalogue, Domain, Events

USERS = ["ann", "bob", "eve"]


def company(name, rows, num_items):
    keys = [f"{name}{number}" for number in range(num_items)]
    return Domain(name, Catalogue(name, keys, keys, keys), Events(USERS, rows, None), NO_EVENTS, {})


@pytest.fixture
def settings(tmp_path):
    """Ann bought at hair first, then at skin, then at both in turn."""
    skin = company("skin", [[0, 1, 2, 3], [1, 2, 0], [3, 0, 1]], 4)
    hair = company("hair", [[2, 0, 1], [0, 1, 2, 1], [1, 2, 0]], 3)
    order = ["hair", "skin", "skin", "hair", "skin", "hair", "skin"]
    orders = [order, ["skin", "skin", "skin", *["hair"] * 4], ["hair"] * 3 + ["skin"] * 3]
    return id_methods.Settings(Path(tmp_path), id_methods.Pair({"skin": skin, "hair": hair}, orders))


def test_a_history_of_both_has_no_held_out_event_of_the_other_company_and_nothing_later(settings):
    both = id_methods.merged(settings.pair)
    assert (both.offset, both.num_items) == ({"skin": 0, "hair": 4}, 7)
    assert both.train_U == [[6, 0, 1], [1, 4, 5], [5, 3]]
    assert both.history_U["skin", "valid"][0] == [6, 0, 1]
    assert both.history_U["skin", "test"][0] == [6, 0, 1, 2]
    assert both.history_U["skin", "valid"][1] == [1]  # bob came to hair later
    assert both.history_U["hair", "test"][1] == [1, 4, 5, 6]


def test_without_times_the_other_company_comes_first(settings):
    both = id_methods.merged(settings.pair._replace(first_U=[]))
    assert both.history_U["skin", "valid"][1] == [4, 5, 1]
    assert both.history_U["hair", "valid"][1] == [1, 4, 5]


def test_ease_of_both_companies_reads_the_other_and_ranks_its_own_items(settings, monkeypatch):
    """By the inverse of the Gram matrix of all seven items."""
    seen = {}
    monkeypatch.setattr(id_methods, "rank_all", lambda domains, score: seen.setdefault("score", score))
    monkeypatch.setattr(id_methods, "REGULARISATION", 2.0)
    id_methods.ridge(settings, 1.0, 0.5)
    found_UI = seen["score"]("skin", "valid")(torch.arange(3)).numpy()
    skin_UI = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]], float)
    hair_UI = np.array([[0, 0, 1], [1, 1, 0], [0, 1, 0]], float)
    both_UI = np.concatenate([skin_UI, 0.5 * hair_UI], 1)
    inverse_II = np.linalg.inv(both_UI.T @ both_UI + 2.0 * np.eye(7))
    weight_II = np.eye(7) - inverse_II / inverse_II.diagonal()
    assert found_UI == pytest.approx((both_UI @ weight_II)[:, :4])
    assert not np.allclose(found_UI, (skin_UI @ weight_II[:4, :4]))


def test_from_the_other_company_alone_a_customer_does_not_teach_what_is_predicted_for_it(settings, monkeypatch):
    """Each customer by a regression on the two others."""
    seen = {}
    monkeypatch.setattr(id_methods, "rank_all", lambda domains, score: seen.setdefault("score", score))
    monkeypatch.setattr(id_methods, "REGULARISATION", 2.0)
    id_methods.ridge(settings, 0.0, 1.0)
    found_UI = seen["score"]("skin", "valid")(torch.arange(3)).numpy()
    skin_UI = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]], float)
    hair_UI = np.array([[0, 0, 1], [1, 1, 0], [0, 1, 0]], float)
    for user in range(3):
        others = [other for other in range(3) if other != user]
        gram_II = hair_UI[others].T @ hair_UI[others] + 2.0 * np.eye(3)
        expected_I = hair_UI[user] @ np.linalg.solve(gram_II, hair_UI[others].T @ skin_UI[others])
        assert found_UI[user] == pytest.approx(expected_I)
