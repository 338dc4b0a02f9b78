"""The page of a comparison from hand-written runs: its verdict, its examples, its differences, its files."""

import csv
import io
import json
import re
from urllib.parse import unquote

import pytest
import torch

from fedecider.baselines.counts import UNTRAINED
from fedecider.comparison.compare import Cell, Cost, Entry, Plan, Results, Row, Table, Words
from fedecider.comparison.page import write_table
from fedecider.comparison.search import Tried
from fedecider.cross_silo.comparison import CompareConfig, _examples
from fedecider.cross_silo.entries import STUDENT
from fedecider.cross_silo.sasrec_entries import SASREC
from fedecider.evaluation.statistics import Comparison, Interval
from fedecider.report.tables import ResultRow

METRICS = ("hit@5", "hit@10", "ndcg@5", "ndcg@10")
MEANS = {"ours": 0.2, "local": 0.22, "popularity": 0.1, "sasrec": 0.15, "memoriser": 0.01}


def result(label, mean):
    values = {name: Interval(mean, mean - 0.02, mean + 1 / 30) for name in METRICS}
    return ResultRow(label, dict.fromkeys(("crime", "comics", "macro"), values))


def comparison(first, second, mean, p_holm, domain="macro", metric="hit@10"):
    return Comparison(domain, metric, first, second, Interval(mean, mean - 0.05, mean + 0.05), p_holm, p_holm, 0.25)


def row(tmp_path, label, kind, method):
    """Two seeds; the run of the first one has examples."""
    cells = []
    for seed in range(2):
        folder = tmp_path / f"{label}-{seed}"
        folder.mkdir()
        example = {
            "history": ["Old"],
            "num_history": 1,
            "held_out": "Wanted",
            "position": seed,
            "recommended": [{"title": f"From {label}", "held_out": False}],
        }
        (folder / "examples.json").write_text(json.dumps({"crime": [example] * 4}))
        places = {"crime": torch.tensor([0.0, 50.0]), "comics": torch.tensor([0.0, 9.0])}
        hits = {label: 0.2 + 0.1 * seed, "popularity": 0.35}
        cells.append(Cell({label: 0.3}, lambda places=places: {"strict": {label: places}}, folder=folder, hits=hits))
    entry = Entry(label, method, kind, ["strict"], lambda setting, seed: cells[seed])
    return Row(entry, {}, [Tried({}, 0.3)], cells)


@pytest.fixture
def table(tmp_path):
    rows = [row(tmp_path, "ours", "federated", "fedecider"), row(tmp_path, "local", "local", "local")]
    words = Words(
        lambda table: ["Data: two domains"],
        {"strict": {"crime": 0.03, "comics": 0.03}},
        True,
        UNTRAINED,
        ("federated", "local"),
        {SASREC: "SASRec of one domain"},
        before=(STUDENT,),
        sections=lambda table, chosen: _examples(
            CompareConfig(rows={"ours": {"method": "fedecider"}}, seeds=1), table, chosen
        ),
    )
    users = {"crime": ["a", "b"], "comics": ["c", "d"]}
    plan = Plan(
        "compare", tmp_path / "table", [one.entry for one in rows], ["strict"], users, 2, against=["ours"], words=words
    )
    plan.root.mkdir()
    kinds = dict(zip(MEANS, ("federated", "local", "baseline", "baseline", "baseline"), strict=True))
    results = Results(
        rows=[result(label, mean) for label, mean in MEANS.items()],
        variants=[],
        tests=[
            comparison("ours", "local", -0.02, 0.4),
            comparison("ours", "popularity", 0.1, 0.01),
            comparison("ours", "popularity", -0.1, 0.01, domain="crime"),
            comparison("ours", "sasrec", 0.05, 0.02),
        ],
        kinds=kinds,
        entries={one.entry.label: one for one in rows},
        valid={"ours": 0.3, "local": 0.2},
        costs={label: Cost(1 / 3, 1000.0, 2000.0, [2, 3], [3, 3], [1, 1]) for label in ("ours", "local")},
        curves={"ours": [[1, 0.25], [2, 0.3]], "local": [[1, 0.1], [2, 0.2]]},
        further={},
        missing=["fedem"],
    )
    return Table(plan, rows, {"strict": results})


def changed(table, **changes):
    return table._replace(results={"strict": table.results["strict"]._replace(**changes)})


def page(table) -> str:
    """The page without the explanations of its words."""
    paths = {path.suffix: path for path in write_table(table, ["Commit of the table: none"])}
    text = paths[".html"].read_text(encoding="utf-8")
    return re.sub(r"<span class=\"tip\".*?</span>|</?dfn[^>]*>", "", text)


def test_the_page(table):
    text = page(table)
    titles = re.findall(r'<h2 id="section-\d+">([^<]*)</h2>', text)
    assert titles[:6] == [
        "Summary",
        "Examples",
        "Protocol strict",
        "Convergence",
        "What it costs",
        "What was compared",
    ]
    assert "Recommendation</h2>" in text
    top = text.partition("<body>")[2].partition("<details")[0]
    assert [top.count(f"<{tag}") for tag in ("figure ", "table>")] == [1, 1]
    assert re.findall(r"<td[^>]*>(ours|local|popularity|sasrec)<", top) == ["ours", "local", "popularity", "sasrec"]
    assert "ours is the one with the best validation ndcg@10." in text
    assert "<td>From ours</td><td>From local</td>" in text
    assert "next purchase “Wanted”, ours: rank 1; local: rank 1" in text  # both of seed 0
    assert "2 of 3 comparisons are distinguishable." in text
    assert text.count("Left out, since a run failed: fedem.") == 1
    assert '<th scope="row">ours</th><td>popularity</td><td>hit@10</td><td class="number">0.1000 <span' in text
    links = re.findall(r'download="([^"]*)" href="data:text/csv;charset=utf-8,([^"]*)"', text)
    files = {name: list(csv.DictReader(io.StringIO(unquote(data)))) for name, data in links}
    assert list(files) == ["results-strict.csv", "tests-strict.csv", "validation.csv", "costs.csv"]
    ours = next(line for line in files["results-strict.csv"] if (line["row"], line["domain"]) == ("ours", "crime"))
    assert float(ours["hit@10_high"]) == 0.2 + 1 / 30
    assert len(files["results-strict.csv"]) == len(MEANS) * 3
    assert len(files["tests-strict.csv"]) == 4
    assert float(files["costs.csv"][0]["seconds"]) == 1 / 3
    assert files["validation.csv"][1] == {"protocol": "strict", "row": "ours", "round": "2", "ndcg@10": "0.3"}
    written = (table.plan.root / "compare.md").read_text()
    assert "| ours | federated | 0.2000 [0.1800, 0.2333] |" in written
    assert "Wanted" not in written, "histories of people are on the page alone"


def test_deleted_examples_and_a_table_without_tests_are_no_error(table):
    for one in table.rows:
        (one.cells[0].folder / "examples.json").unlink()
    assert "Examples" not in page(table)
    text = page(changed(table, tests=[]))
    assert "tests-strict.csv" not in text
