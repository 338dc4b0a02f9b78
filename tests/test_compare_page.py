"""The page of a comparison from hand-written runs: its verdict, its examples, its differences, its files."""

import csv
import io
import json
import re
from urllib.parse import unquote

import pytest

from fedecider.evaluation.statistics import Comparison, Interval
from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.comparison import Collected, CompareConfig, Cost, RowRuns, Run
from fedecider.experiment.comparison_page import chosen_row, comparison_evidence, comparison_opening, write_page_of
from fedecider.report.tables import ResultRow
from fedecider.report.verdict import opening
from fedecider.running.run_folder import RunFolder

METRICS = ("hit@5", "hit@10", "ndcg@5", "ndcg@10")
MEANS = {"ours": 0.2, "local": 0.22, "popularity": 0.1, "sasrec": 0.15, "memoriser": 0.01}


def result(label, mean):
    kind = "method" if label in ("ours", "local") else "canary" if label == "memoriser" else "baseline"
    values = {name: Interval(mean, mean - 0.02, mean + 1 / 30) for name in METRICS}
    return ResultRow(label, dict.fromkeys(("crime", "comics", "macro"), values), kind)


def comparison(first, second, mean, p_holm, domain="macro", metric="hit@10"):
    return Comparison(domain, metric, first, second, Interval(mean, mean - 0.05, mean + 0.05), p_holm, p_holm, 0.25)


@pytest.fixture
def collected():
    return Collected(
        rows=[result(label, mean) for label, mean in MEANS.items()],
        views=[],
        comparisons=[
            comparison("ours", "local", -0.02, 0.4),
            comparison("ours", "popularity", 0.1, 0.01),
            comparison("ours", "popularity", -0.1, 0.01, domain="crime"),
            comparison("ours", "sasrec", 0.05, 0.02),
        ],
        costs={label: Cost(1 / 3, 1000.0, 2000.0, [2, 3], [1, 1]) for label in ("ours", "local")},
        valid={"ours": 0.3, "local": 0.2},
        curves={"ours": [[1, 0.25], [2, 0.3]], "local": [[1, 0.1], [2, 0.2]]},
        positions={},
        notes=["2 seeds"],
    )


@pytest.fixture
def methods(tmp_path):
    """Two rows with two seeds each; their runs are on prepared data."""
    found = []
    for label, method in (("ours", "fedecider"), ("local", "local")):
        runs = []
        for seed in range(2):
            folder = RunFolder(tmp_path / f"{label}-{seed}")
            folder.root.mkdir()
            test = {"memoriser": {"hit@10": {"mean": 0.01, "low": 0.0, "high": 0.02}}}
            valid = {
                f"{method} (own)": {"hit@10": {"mean": 0.2 + 0.1 * seed}},
                "popularity": {"hit@10": {"mean": 0.35}},
            }
            domain = {"chance_hit@10": 0.03, "test": test, "valid": valid}
            content = {
                "protocol": "strict",
                "reported": f"{method} (own)",
                "domains": {"crime": domain, "comics": domain},
            }
            folder.metrics.write_text(json.dumps(content))
            example = {
                "history": ["Old"],
                "num_history": 1,
                "held_out": "Wanted",
                "position": seed,
                "recommended": [{"title": f"From {label}", "held_out": False}],
            }
            (folder.root / "examples.json").write_text(json.dumps({"crime": [example] * 4}))
            settings = parse_settings("", ["--data", str(tmp_path), "--domains", "crime,comics", "--method", method])
            runs.append(Run(label, seed, {}, settings, folder))
        found.append(RowRuns(label, method, {}, [{"options": {}, "valid": 0.3}], runs))
    return found


@pytest.fixture
def config(tmp_path):
    rows = {"ours": {"method": "fedecider"}, "local": {}}
    return CompareConfig(rows=rows, seeds=2, against=["ours"], data=str(tmp_path), output=str(tmp_path / "table"))


def test_the_verdict_is_about_the_row_that_validation_chose(config, methods, collected):
    evidence = comparison_evidence(config, methods, collected, "ours")
    assert evidence.subject == chosen_row(methods, collected) == "ours"
    assert evidence.valid == {"ours": pytest.approx(0.25), "popularity": pytest.approx(0.35)}
    assert {one["domain"] for one in evidence.tests} == {"macro"}
    assert list(evidence.domains) == ["crime", "comics"]
    assert not evidence.planted
    said = opening(evidence)
    assert said.answer == "Perhaps: it is better than popularity, the best simple rule, with reservations."
    assert "+10.0 of 100 users [+5.0, +15.0] is more than chance" in said.paragraphs[1]
    assert said.paragraphs[-1] == (
        "Beside it: the same training without any exchange, 22.0 (not distinguishable, p = 0.4); SASRec of one domain, "
        "15.0 (less, p = 0.02)."
    )
    assert [line.partition(":")[0] for line in said.reservations] == [
        "ours was chosen on validation items; on test items local has more",
        "2 seeds",
        "Not tested",
        "It is not distinguishable from the same training without any exchange (local)",
        "Validation and test disagree",
    ]
    turned = collected._replace(valid={"ours": 0.1, "local": 0.2})
    assert chosen_row(methods, turned) == "local"
    assert comparison_evidence(config, methods, turned, "local").alarms == []


def test_a_federation_that_does_harm_is_not_switched_on(config, methods, collected):
    worse = collected._replace(comparisons=[comparison("ours", "local", -0.02, 0.01), *collected.comparisons[1:]])
    said = opening(comparison_evidence(config, methods, worse, "ours"))
    assert said.answer == ("No: the same training without any exchange (local) is better, so the federation does harm.")
    student = result("zero-shot student", 0.4)
    spoilt = collected._replace(rows=[*collected.rows, student])
    assert opening(comparison_evidence(config, methods, spoilt, "ours")).answer == (
        "No: the shared model before the rounds (zero-shot student) is better, so the training does harm."
    )


def test_nobody_is_asked_to_switch_on_what_pools_all_data(config, methods, collected):
    """It stands beside what one could switch on, however good it is."""
    pooled = RowRuns("ours", "centralised", {}, [], methods[0].runs)
    assert chosen_row([pooled, methods[1]], collected) == "local"
    evidence = comparison_evidence(config, [pooled, methods[1]], collected, "local")
    assert evidence.beside["ours"] == "all data in one place"
    assert chosen_row([pooled], collected) is None
    assert comparison_opening(config, [pooled], collected) is None
    (about,) = [
        text for text in comparison_opening(config, [pooled, methods[1]], collected).paragraphs if "What" in text
    ]
    assert about.endswith("the best validation ndcg@10, methods that pool all data left out.")
    text = page(config, [pooled], collected._replace(valid={"ours": 0.3}, curves={}, costs={}))
    assert "Would one" not in text


def page(config, methods, collected) -> str:
    """The page without the explanations of its words."""
    text = write_page_of(config, methods, collected, {"crime": None, "comics": None}).read_text(encoding="utf-8")
    return re.sub(r"<span class=\"tip\".*?</span>|</?dfn[^>]*>", "", text)


def test_the_page(config, methods, collected):
    text = page(config, methods, collected)
    titles = re.findall(r'<h2 id="section-\d+">([^<]*)</h2>', text)
    assert titles[:3] == ["Examples", "Test results", "Differences"]
    assert titles[-2:] == ["More examples", "Glossary"]
    assert "Would one switch ours on?" in text
    assert "What was compared: 2 methods with 2 seeds each. ours is the one with the best validation ndcg@10." in text
    assert "<td>From ours</td><td>From local</td>" in text
    assert "took “Wanted” next: ours: found at place 1; local: found at place 1" in text  # both of seed 0
    assert "2 of 3 comparisons are distinguishable." in text
    assert '<th scope="row">ours</th><td>popularity</td><td>hit@10</td><td class="number">0.1000 ' in text
    captions = re.findall(r"<caption><span>([^<]*)</span>", text)
    assert captions[3:6] == ["mean over domains", "crime", "comics"]
    links = re.findall(r'download="([^"]*)" href="data:text/csv;charset=utf-8,([^"]*)"', text)
    files = {name: list(csv.DictReader(io.StringIO(unquote(data)))) for name, data in links}
    assert list(files) == ["results.csv", "tests.csv", "validation.csv", "costs.csv"]
    assert {float(row["high"]) - float(row["mean"]) for row in files["results.csv"]} == {
        mean + 1 / 30 - mean for mean in MEANS.values()
    }
    assert len(files["results.csv"]) == len(MEANS) * 3 * len(METRICS)
    assert len(files["tests.csv"]) == 4
    assert float(files["costs.csv"][0]["train_s"]) == 1 / 3
    assert files["validation.csv"][1] == {"row": "ours", "round": "2", "ndcg@10": "0.3"}


def test_deleted_examples_and_a_single_row_are_no_error(config, methods, collected):
    for row in methods:
        (row.runs[0].folder.root / "examples.json").unlink()
    text = page(config, methods, collected)
    assert "Examples" not in text
    untested = collected._replace(comparisons=[])
    text = page(config, methods, untested)
    assert "No paired test of these two was made" in text
    assert "tests.csv" not in text
