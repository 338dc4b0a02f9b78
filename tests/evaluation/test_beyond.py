"""Coverage and long tail of lists, by hand."""

import numpy as np
import torch
from scipy import sparse

from fedecider.baselines.counts import POPULARITY, Votes, heuristic_lists, heuristic_positions
from fedecider.cross_silo.lists import beyond_data
from fedecider.evaluation import beyond
from fedecider.evaluation.beyond import first_ten, list_figures


def test_coverage_and_long_tail_by_hand():
    # of ten items the two with the most events, 7 and 3, are no long tail
    count_I = torch.tensor([0.0, 1, 2, 9, 0, 0, 3, 20, 0, 4])
    lists = torch.tensor([[7, 3, 0], [7, 9, 0], [3, 1, -1]])
    assert list_figures(lists, count_I) == {"coverage": 5 / 10, "long_tail": 4 / 8}


def test_so_many_customers_of_every_row(monkeypatch):
    monkeypatch.setattr(beyond, "NUM_LISTED", 1)
    assert list_figures(torch.tensor([[0], [1]]), torch.tensor([5.0, 1, 1, 1, 1])) == {"coverage": 0.2, "long_tail": 0}


def test_first_ten_leave_out_what_is_no_candidate():
    score_BI = torch.arange(12.0).expand(2, 12).clone()
    score_BI[1, 3:] = -torch.inf
    assert first_ten(score_BI).tolist() == [[*range(11, 1, -1)], [2, 1, 0, *[-1] * 7]]


def test_lists_of_rules_are_those_of_the_test_item():
    rows, ten = [[0, 1, 0, 2], [3, 0, 1, 0]], {}
    no_texts = Votes(sparse.csr_array((4, 4)), np.zeros(4))
    heuristic_positions(rows, 4, ["valid", "test"], no_texts, ten=ten)
    assert ten[POPULARITY].tolist() == [[3, 2, -1, -1], [2, -1, -1, -1]]  # events: 0 twice, 1 and 3 once
    ten.clear()
    heuristic_lists(rows, 4, ["valid", "test"], no_texts, ten=ten)
    assert [one[0] for one in ten[POPULARITY].tolist()] == [0, 0]


def test_the_best_rule_stands_beside_and_means_are_over_companies():
    ten = {"ours": {"a": torch.tensor([[0]]), "b": torch.tensor([[0, 1]])}, "x": {}, "y": {}}
    for rule in ("x", "y"):
        ten[rule] = {"a": torch.tensor([[1]]), "b": torch.tensor([[1]])}
    places = {
        rule: {"a": torch.tensor([place]), "b": torch.tensor([place])} for rule, place in (("x", 5.0), ("y", 2.0))
    }
    sold = {"a": torch.tensor([2.0, 1, 0, 0, 0]), "b": torch.tensor([2.0, 1])}
    found = beyond_data(ten, places, sold)
    assert list(found) == ["ours", "y"]
    assert found["ours"]["macro"]["coverage"] == (0.2 + 1.0) / 2
    assert found["y"]["a"]["long_tail"] == 1.0
