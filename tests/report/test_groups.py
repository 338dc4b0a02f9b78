"""Groups of users and items by hand, and as sections of a page: tables of equal width, figures with titles."""

import math

import pytest
import torch
from analysis_toys import toy_domains, toy_run

from fedecider.cross_silo.page import _in_order
from fedecider.engine.result import RunResult
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.report.groups import (
    activity_section,
    activity_table,
    popularity_section,
    popularity_table,
    train_counts,
)


def positions(crime, comics):
    return {"crime": torch.tensor(crime), "comics": torch.tensor(comics)}


def test_buckets_hold_users_by_train_events_then_key():
    rows = {
        "model": positions([0, 7, 1, 2, 30, NOT_RANKED], [0, 0, 0, 0]),
        "other": positions([0, 0, 9, 9, 9, 9], [0, 9, 9, 0]),
    }
    found = activity_table(toy_domains(), rows)
    crime = found["domains"]["crime"]  # events u0 1, u1 2, u2 1, u3 3, u4 4, u5 1 -> u0 u2 | u5 | u1 | u3 | u4
    assert [bucket["num_users"] for bucket in crime] == [2, 1, 1, 1, 1]
    assert [bucket["train_events"] for bucket in crime] == [[1, 1], [1, 1], [2, 2], [3, 3], [4, 4]]
    hits = [bucket["lines"]["model"]["hit@5"]["mean"] for bucket in crime]
    assert hits == [1.0, 0.0, 0.0, 1.0, 0.0]
    ndcg = crime[0]["lines"]["model"]["ndcg@5"]
    assert ndcg["mean"] == pytest.approx((1 + 1 / math.log2(3)) / 2)  # positions 0 and 1
    assert (ndcg["low"], ndcg["high"]) == (0.0, 1.0)  # two users say little
    assert len(found["domains"]["comics"]) == 4  # no more groups than users
    # crime: model above in buckets 0 and 3, other in 2, two ties; comics: model in users 1 and 2, two ties
    assert found["wins"] == {"model": 4, "other": 1}
    assert found["ties"] == 4


def test_popularity_groups_follow_the_train_counts_of_the_clients():
    domains = toy_domains()
    assert train_counts(domains["crime"]).tolist() == [6, 4, 2, 0]
    found = popularity_table(domains, {"model": positions([0, 9, 0, 9, 0, 9], [0, 0, 0, 0])})
    # targets of u0..u5: d(0) b(4) c(2) b(4) a(6) d(0); sorted: u0 u5 | u2 | u1 | u3 | u4
    shares = found["crime"]
    assert [group["num_cases"] for group in shares.values()] == [2, 3, 1]
    assert [group["train_count"] for group in shares.values()] == [[0, 0], [2, 4], [6, 6]]
    means = [group["lines"]["model"]["hit@5"]["mean"] for group in shares.values()]
    assert means == pytest.approx([0.5, 1 / 3, 1.0])
    assert [group["num_cases"] for group in found["comics"].values()] == [0, 0, 0]  # four users have no fifths
    assert found["comics"]["bottom 20 %"]["train_count"] is None
    assert found["comics"]["bottom 20 %"]["lines"]["model"] == {"hit@5": None, "ndcg@5": None}


def test_positions_stand_in_the_order_of_the_domain(tmp_path):
    result = RunResult.read(toy_run(tmp_path / "run").root)
    places = _in_order(result, "fedecider (fused)", toy_domains())
    # the file holds users in another order than the domain: u0 (position 0) and u2 (4) make the first bucket
    first = activity_table(toy_domains(), {"model": places})["domains"]["crime"][0]["lines"]["model"]
    assert first["ndcg@5"]["mean"] == pytest.approx((1 + 1 / math.log2(6)) / 2)


def test_sections_have_words_tables_and_figures():
    rows = {
        "model": positions([0, 7, 1, 2, 30, NOT_RANKED], [0, 0, 0, 0]),
        "other": positions([0, 0, 9, 9, 9, 9], [0, 9, 9, 0]),
    }
    users, items = activity_section(toy_domains(), rows), popularity_section(toy_domains(), rows)
    assert "model 4, other 1; equal: 4" in users.paragraphs[1]
    assert users.tables[0].rows[0][:5] == ["crime", "1", "1", "2", "model"]
    assert [len(table.rows) for table in (*users.tables, *items.tables)] == [18, 12]
    for one in (users, items):
        for table in one.tables:
            assert all(len(row) == len(table.header) for row in table.rows)
            assert all(isinstance(cell, str) for row in table.rows for cell in row)
        for figure in one.figures:
            assert figure.layout.title.text
            figure.to_json()
