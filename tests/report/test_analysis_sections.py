"""Sections of the analyses: every part that applies, none that does not, tables of equal width."""

import pytest
from analysis_toys import toy_domains, toy_run

from fedecider.cross_silo.analyses import run_analysis
from fedecider.report.analysis_sections import sections_of

TITLES = [
    "How alike the domains are",
    "Active and less active users",
    "Frequent and rare items",
    "What the broadcast does to a client's model",
    "The updates of round 2",
    "Measured traffic",
    "Time and convergence",
]


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    return run_analysis(toy_run(tmp_path_factory.mktemp("toy") / "run").root, toy_domains(), "tfidf")


def section(analysis, title):
    return next(one for one in sections_of(analysis) if one.title == title)


def test_every_part_of_a_run_with_fusion_weights(analysis):
    sections = sections_of(analysis)
    assert [one.title for one in sections] == TITLES
    for one in sections:
        assert one.paragraphs
        assert all(isinstance(text, str) and text for text in one.paragraphs)
        for table in one.tables:
            assert table.rows
            assert all(len(row) == len(table.header) for row in table.rows)
            assert all(isinstance(cell, str) for row in table.rows for cell in row)
        for figure in one.figures:
            assert figure.layout.title.text
            figure.to_json()


def test_parts_that_do_not_apply_are_left_out(tmp_path):
    sections = sections_of(run_analysis(toy_run(tmp_path / "run", method="fedavg").root, toy_domains(), "tfidf"))
    expected = [TITLES[place] for place in (1, 2, 5, 6)]  # without weights nothing to compare distances with
    assert [one.title for one in sections] == expected


def test_traffic_joins_equal_rounds_and_says_when_the_formula_fails(analysis):
    one = section(analysis, TITLES[5])
    # P = 2 * (3 + 5 + 4 + 4) = 32 scalars: 128 bytes up, 128 and then 256 down
    assert one.tables[0].rows[0] == ["1", "crime, comics", "128", "128", "96", "128", "128", "88"]
    assert one.tables[0].rows[1] == ["2", "crime, comics", "256", "256", "96", "128", "128", "88"]
    assert "equal in every round" in one.paragraphs[0]
    first = {**analysis["traffic"][0], "formula_up": 64, "equal": False}
    broken = section({**analysis, "traffic": [first, {**first, "round": 2}]}, TITLES[5])
    assert "differ in 2 of 2 entries" in broken.paragraphs[0]
    assert [row[0] for row in broken.tables[0].rows] == ["1 to 2"]


def test_shock_and_time_are_those_of_the_records(analysis):
    shock = section(analysis, TITLES[3])
    assert shock.tables[0].rows[1] == ["2", "0.200 → 0.250 (+0.050)", "0.210 → 0.260 (+0.050)"]
    rows = section(analysis, TITLES[6]).tables[0].rows
    assert rows == [["crime", "1.00"], ["comics", "2.00"], ["all clients", "3.00"]]
