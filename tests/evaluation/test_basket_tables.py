"""Positions of baskets in files, intervals, tests and words: what a table of a run in baskets says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedecider.evaluation.metrics import NOT_RANKED, mean_metrics, user_metrics
from fedecider.evaluation.per_user import UserPositions, mean_table, read_per_user, write_per_user
from fedecider.evaluation.protocols import NEXT_BASKET, STRICT
from fedecider.evaluation.statistics import compare_table, of_one_run, table_intervals
from fedecider.report.answer import Evidence
from fedecider.report.conclusion import conclusion
from fedecider.report.tables import ResultTable, compared_by, comparisons_data, markdown_table, result_rows, rows_data

NAN = math.nan


def baskets(seed, num_users=40, best=30):
    """Positions of one to three items a user."""
    rng = np.random.default_rng(seed)
    place_UT = rng.integers(0, best, (num_users, 3)).astype(float)
    place_UT[rng.random((num_users, 3)) < 0.3] = NAN
    place_UT[:, 0] = rng.integers(0, best, num_users)
    place_UT[0, 0] = NOT_RANKED
    return torch.from_numpy(place_UT)


def test_a_file_keeps_a_place_for_every_item_of_a_basket(tmp_path):
    records = [
        UserPositions(
            "north", ["a", "b"], "test", "model", 3, torch.tensor([[0, NOT_RANKED], [4.5, NAN]], dtype=torch.float64)
        ),
        UserPositions("south", ["c"], "test", "model", 3, torch.tensor([[2.0, 9.0, 1.0]], dtype=torch.float64)),
    ]
    write_per_user(tmp_path / "p.parquet", records)
    back = read_per_user(tmp_path / "p.parquet")
    for one, other in zip(records, back, strict=True):
        assert one[:5] == tuple(other[:5])
        assert torch.equal(one.position_U.nan_to_num(-1), other.position_U.nan_to_num(-1))
    assert mean_table(back)[0]["recall@10"] == 0.75
    assert mean_table(back)[2]["recall@5"] == pytest.approx((0.75 + 2 / 3) / 2)


def test_intervals_and_tests_of_baskets_are_those_of_their_metrics():
    one, other = {"n": baskets(0), "s": baskets(1, 25)}, {"n": baskets(2, best=90), "s": baskets(3, 25, 90)}
    rows = of_one_run({"good": one, "poor": other})
    found = table_intervals({"": rows["good"]})[""]
    assert found["n"]["recall@10"].mean == pytest.approx(mean_metrics(one["n"])["recall@10"])
    macro = (mean_metrics(one["n"])["recall@10"] + mean_metrics(one["s"])["recall@10"]) / 2
    assert found["macro"]["recall@10"].mean == pytest.approx(macro)
    assert found["n"]["recall@10"].low < found["n"]["recall@10"].mean < found["n"]["recall@10"].high
    tests = compare_table(rows, compared_by(of_one_run({"good": one, "poor": other})))
    assert {test.metric for test in tests} == {"recall@10", "ndcg@10"}
    first = next(test for test in tests if (test.domain, test.metric) == ("n", "recall@10"))
    difference = user_metrics(one["n"])["recall@10"] - user_metrics(other["n"])["recall@10"]
    assert first.difference.mean == pytest.approx(float(difference.mean()))
    two_seeds = {label: {name: torch.cat([of, of]) for name, of in row.items()} for label, row in rows.items()}
    again = table_intervals({"": two_seeds["good"]})[""]
    assert again["n"]["recall@10"].mean == pytest.approx(found["n"]["recall@10"].mean)


def test_tables_and_words_speak_of_the_items_of_a_basket():
    positions = {"fedavg": {"n": baskets(0, 200, 15)}, "popularity": {"n": baskets(2, 200, 300)}}
    rows = result_rows(of_one_run(positions))
    text = markdown_table(ResultTable(rows, NEXT_BASKET))
    assert "| recall@5 | recall@10 | ndcg@5 | ndcg@10 | hit@10 |" in text
    assert "next_basket (whole catalogue, items seen by the user kept)" in text
    tests = compare_table(of_one_run(positions), compared_by(of_one_run(positions)))
    values = rows_data(rows, "n")
    evidence = Evidence("fedavg", values, ["popularity"], NEXT_BASKET.name, "n", comparisons_data(tests), chance=0.02)
    said = conclusion(evidence)
    recall = 100 * values["fedavg"]["recall@10"]["mean"]
    assert f"Of 100 items of the next baskets {recall:.1f} are in the top ten" in said.answer.lines[1]
    assert "guessing of 2.0" in said.answer.lines[1]
    assert said.table.header[2] == "recall@10"
    assert list(said.answer.doubts) == []
    users = " ".join([*said.answer.lines, *said.paragraphs, *said.table.header, said.table.caption])
    assert "users" not in users
    joined = evidence._replace(alone="popularity", simple=(), customers={"n": 200, "s": 100}, rows=values)
    assert "alone, of 100 items of the next baskets" in conclusion(joined).answer.lines[1]
    assert STRICT.drop_seen
