"""The page of an output directory made of hand-written files: what it says, what it warns of, what it refuses."""

import csv
import io
import json
import re
import runpy
from pathlib import Path
from urllib.parse import unquote

import pytest
from run_toys import CONFIG, METRICS, RECORD, REPORTED, ROUNDS, card, domain, intervals, write_run

import fedecider as fd
from fedecider.cross_silo.conclusion import canary_alarms, run_conclusion, run_evidence
from fedecider.cross_silo.page import run_page
from fedecider.cross_silo.warnings import run_warnings
from fedecider.engine.page import write_diverged
from fedecider.engine.result import RunResult

REPORT = Path(__file__).resolve().parents[2] / "scripts" / "report.py"


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "toy")


def body(folder) -> str:
    page = run_page(folder.root, RunResult.read(folder.root))
    return page.read_text(encoding="utf-8").partition("<body>")[2]


def result(record=RECORD, metrics=METRICS, rounds=ROUNDS, cards=None) -> RunResult:
    return RunResult(record, metrics, rounds, rounds, cards=cards or {})


def test_the_page_says_what_the_files_say(folder):
    text = body(folder)
    assert "fedecider on crime, comics; round 2 of 3, the best on validation" in text
    assert '19.1 <span class="interval">[17.1, 22.1]</span><span class="bar"' in text
    assert "memoriser (leakage probe)" in text
    assert "its hit@10 is 4.0, that of random scores 5.0" in text
    of_companies = ["31.2", "7.0"], ["11.0", "6.2"], ["4.0", "4.0"]  # hit@10 of crime and comics, one scale in the page
    assert all("".join(f'<td class="number">{mean}</td>' for mean in means) in text for means in of_companies)
    assert text.count("Plotly.newPlot(") == 3  # the answer, validation, fusion weights (once)
    cost = ["crime", "2", "3,100", "20"]
    assert f'<th scope="row">{cost[0]}</th>' + "".join(f'<td class="number">{c}</td>' for c in cost[1:]) in text
    assert '<td class="number">4.00</td><td class="number">12.00</td>' in text  # train_s: median and sum of 2, 4, 6
    for said in ("50% of the clients", "c0ffee", "aa11", "1,234", "12.5%", "vocab_<wbr>size", "77"):
        assert said in text
    titles = re.findall(r'<h2 id="section-\d+">([^<]*)</h2>', text)
    assert titles[:5] == ["Summary", "Examples", "Results", "Convergence", "Fusion weights"]
    assert titles[-3:] == ["What was run", "Where it comes from", "All settings"]


def test_what_is_handed_over_is_what_the_verdict_is_about():
    both = {
        "fedecider + ensemble": intervals(0.25),
        "ensemble without a model": intervals(0.2),
        "zero-shot student": intervals(0.1),
    }
    rows = {REPORTED: intervals(0.3), **both, "text neighbours + counts": intervals(0.28)}
    valid = {label: {"hit@10": {"mean": 0.5}} for label in rows}
    crime = {**domain(0.3, 0.2), "test": rows, "valid": valid}
    metrics = {**METRICS, "domains": {"crime": crime}}
    del metrics["macro"]
    evidence = run_evidence(result({**RECORD, "config": {**CONFIG, "ranking": {"num_eval_users": 40}}}, metrics))
    assert evidence.subject == "fedecider + ensemble"
    assert list(evidence.beside) == [REPORTED, "ensemble without a model"]
    assert evidence.before_rounds == {"zero-shot student": "the starting model, before any round"}
    assert evidence.domains == {}
    assert evidence.alarms == []
    assert not evidence.planted
    said = run_conclusion(result(RECORD, metrics, ROUNDS[:1]))
    assert "crime trained with fedecider in 1 round." in said.paragraphs[-1]
    sample = {**RECORD, "config": {**CONFIG, "run": {**CONFIG["run"], "data": ""}}}
    assert run_evidence(result(sample, metrics)).planted


def test_numbers_to_download_are_those_of_the_files(folder):
    tests = [
        {
            "domain": "macro",
            "metric": "hit@10",
            "first": REPORTED,
            "second": "popularity",
            "difference": {"mean": 0.10500000000000001, "low": 0.1, "high": 0.2},
            "p_value": 1 / 3,
            "p_holm": None,
            "effect_size": 0.5,
        }
    ]
    changed = {**json.loads(json.dumps(METRICS)), "comparisons": tests}
    changed["domains"]["crime"]["valid"] = {REPORTED: {"ndcg@10": {"mean": 1 / 7, "low": None, "high": 0.5}}}
    folder.metrics.write_text(json.dumps(changed))
    files = saved(body(folder))
    assert list(files) == ["results.csv", "tests.csv", "validation.csv", "bytes.csv", "seconds.csv"]
    rows = list(csv.DictReader(io.StringIO(files["results.csv"])))
    test = {(row["client"], row["entry"], row["metric"]): row for row in rows if row["split"] == "test"}
    assert len(test) == 9 * (3 + 3 + 2)
    for name, scope in (*METRICS["domains"].items(), ("macro", METRICS["macro"])):
        for label, values in scope["test"].items():
            for metric, value in values.items():
                found = test[name, label, metric]
                assert {end: float(found[end]) for end in value} == value  # to the last bit
    valid = [row for row in rows if row["split"] == "valid"]
    assert valid == [
        {
            "client": "crime",
            "split": "valid",
            "entry": REPORTED,
            "metric": "ndcg@10",
            "mean": str(1 / 7),
            "low": "",
            "high": "0.5",
        }
    ]
    assert files["tests.csv"].splitlines()[1].split(",")[4:] == [
        "0.10500000000000001",
        "0.1",
        "0.2",
        str(1 / 3),
        "",
        "0.5",
    ]
    assert f"fused,comics,3,{0.4 - 0.1 * 3}" in files["validation.csv"].splitlines()
    assert "1,comics,200,20" in files["bytes.csv"].splitlines()
    assert "2,4.0,3.0,1.0" in files["seconds.csv"].splitlines()


def saved(text: str) -> dict[str, str]:
    """Name -> text of every file that a page holds."""
    links = re.findall(r'<a download="([^"]*)" href="data:text/csv;charset=utf-8,([^"]*)"', text)
    return {name: unquote(address) for name, address in links}


def test_examples_mark_the_held_out_item_and_are_escaped(folder):
    text = body(folder)
    assert "crime, customer 1: next purchase “Wanted”, rank 2" in text
    assert "crime, customer 2: next purchase “Wanted”, not recommended" in text
    assert '<th scope="row">1</th><td>Old</td><td>Other</td>' in text
    assert "<td>✓ Wanted</td>" in text
    assert "bought (and 4 before)" in text
    assert text.index("Old</td>") < text.index('id="section-3"')  # before the tables
    assert "&lt;script&gt;alert(&#x27;a title&#x27;)" in text
    assert "<script>alert" not in text


def test_paths_stay_in_the_run_folder(folder):
    assert "someone" not in body(folder)


def test_the_page_is_the_same_every_time_and_does_without_optional_files(folder):
    assert body(folder) == body(folder)
    for name in ("examples.json", "data_cards.json", "fusion_weights.json"):
        (folder.root / name).unlink()
    text = body(folder)
    assert "Examples" not in text
    assert text.count("Plotly.newPlot(") == 2


def test_warnings_name_what_is_wrong():
    cards = {"crime": card(tied_last_two_share=0.125, repeated_test_item_share=0.5), "comics": card()}
    cards["comics"]["public"]["users"] = 0
    expected = [
        ("crime", "refused in round 2;"),
        ("comics", "1 adapted modules"),  # the newest count, not the one of round 1
        ("crime", "have the same time (crime 12.5%)"),
        ("crime", "50.0% of the users had their test item before"),
        ("comics", "group of public users is empty"),
    ]
    found = run_warnings(result(cards=cards))
    both = {name: card(tied_last_two_share=0.25) for name in METRICS["domains"]}
    (tied,) = run_warnings(result(rounds=[], cards=both))
    assert "some customers' last two purchases have the same time (crime 25.0%, comics 25.0%)" in tied
    for said, (name, words) in zip(found, expected, strict=True):
        assert name in said
        assert words in said


def changed(**changes):
    return {**METRICS, **changes}


QUIET = [{"round": 1, "clients": []}]


def test_histories_that_fill_the_beams_are_said():
    """Beams are searched before what a user has had is dropped."""
    cards = {"crime": card(length={"mean": 160.9, "median": 93.0}), "comics": card(length={"mean": 8.5, "median": 6.0})}
    (found,) = run_warnings(result(rounds=QUIET, cards=cards))
    assert found.startswith("crime: half of the users have 93 events or more")
    assert "among the 20 beams" in found
    assert "give num_beams 103 or more" in found
    assert run_warnings(result(RECORD, changed(num_beams=103), QUIET, cards)) == []
    assert run_warnings(result(RECORD, changed(num_beams=None), QUIET, cards)) == []  # every item is scored
    assert run_warnings(result(RECORD, changed(protocol="strict/keep_seen"), QUIET, cards)) == []


def test_a_leak_and_an_unclear_origin_are_said():
    leaking = run_warnings(result(RECORD, changed(protocol="paper"), QUIET))
    assert leaking[0] == "paper protocol: LEAKS the held-out item; the memoriser scores hit@10 0.040"
    above = changed(domains={"crime": domain(0.2, 0.25, canary=0.5)})
    (alarm,) = canary_alarms(result(metrics=above))
    assert "crime: the leakage probe, which learns nothing, is above chance" in alarm
    assert (
        canary_alarms(result(metrics={**above, "protocol": "strict/keep_seen"})) == []
    )  # it knows what the user had before
    assert run_evidence(result(metrics=above)).alarms == [alarm]
    rounds = [*QUIET, {"round": 3, "clients": []}]
    (last,) = run_warnings(result(RECORD, changed(best_round=3), rounds))
    assert last.startswith("the last round is the best on validation")
    unknown = run_warnings(result(rounds=QUIET, cards={"crime": card(timestamps="unknown", tied_last_two_share=None)}))
    assert ["no event has a time" in line for line in unknown] == [True]


def call(*words) -> int:
    try:
        return runpy.run_path(str(REPORT))["main"](list(words))
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_script_works_without_data_and_refuses_bad_input(folder, tmp_path, capsys):
    assert call("--run", str(folder.root)) == 0
    assert "written: " in capsys.readouterr().out
    cases = {
        "no run in": ("--run", str(tmp_path)),
        "no prepared data": ("--run", str(folder.root), "--analyses", "true", "--data", "nowhere"),
    }
    for expected, words in cases.items():
        assert call(*words) == 2
        assert expected in capsys.readouterr().err
    broken = {
        "do not fit together": ("metrics.json", json.dumps({**METRICS, "reported": "other"})),
        "got a damaged": ("metrics.json", "{"),
    }
    for expected, (name, content) in broken.items():
        (folder.root / name).write_text(content)
        assert call("--run", str(folder.root)) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert "Traceback" not in error
    (folder.root / "run.json").write_text(json.dumps({"config": {"run": {}, "training": {}}, "data": {}}))
    assert call("--run", str(folder.root), "--data", "somewhere") == 2
    assert "--data" in capsys.readouterr().err
    (folder.root / "run.json").write_text(json.dumps(RECORD))
    write_diverged(folder, "fedavg", "got no usable upload in round 2", [])
    assert call("--run", str(folder.root)) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "a run that diverged (got no usable upload in round 2), expected a finished one" in told
    with pytest.raises(ValueError, match="a run that diverged"):
        fd.load(folder.root)
    (folder.root / "metrics.json").unlink()
    assert call("--run", str(folder.root)) == 2
    assert "did not finish" in capsys.readouterr().err
