"""The page of a run folder made of hand-written files: what it says, what it warns of, what it refuses."""

import json
import re
import runpy
from pathlib import Path

import pytest

from fedecider.llm import run_report
from fedecider.llm.run_page import interval_bars, page_colours, read_files, run_page
from fedecider.llm.run_report import ReportConfig, cached_user_texts, finish_report
from fedecider.llm.run_warnings import run_warnings
from fedecider.llm.run_words import GLOSSARY, opening
from fedecider.report.figures import COLOURS, DOMAIN_COLOURS
from fedecider.report.page import Section
from fedecider.running.run_folder import RunFolder

REPORT = Path(__file__).resolve().parents[2] / "scripts" / "report.py"
REPORTED = "fedecider (post_broadcast)"
HOSTILE = "<script>alert('a title')</script>"


def intervals(mean, low=None, high=None):
    names = [f"{kind}@{k}" for kind in ("hit", "ndcg", "mrr") for k in (5, 10, 20)]
    return {
        name: {"mean": mean, "low": mean - 0.02 if low is None else low, "high": high or mean + 0.03} for name in names
    }


def domain(model, popularity, canary=0.04):
    test = {REPORTED: intervals(model), "popularity": intervals(popularity), "memoriser": intervals(canary)}
    return {"num_users": 9, "num_items": 7, "chance_hit@10": 0.05, "test": test}


METRICS = {
    "protocol": "strict",
    "method": "fedecider",
    "reported": REPORTED,
    "best_round": 2,
    "best_valid_ndcg@10": 0.25,
    "num_beams": 20,
    "length_penalty": 0.0,
    "domains": {"crime": domain(0.3125, 0.11), "comics": domain(0.07, 0.0625)},
    "macro": {"test": {REPORTED: intervals(0.19125), "popularity": intervals(0.08625)}},
}
CONFIG = {
    "run": {
        "domains": "crime,comics",
        "data": "/home/someone/prepared",
        "output": "",
        "cache": ".cache",
        "participation": 0.5,
        "lora_rank": 4,
        "seed": 11,
        "pretrain": {"vocab_size": 77},
    },
    "training": {"local_epochs": 2, "learning_rate": 0.003},
    "ranking": {"num_beams": 20},
    "method": {"alpha_init": 2.0},
}
RECORD = {
    "config": CONFIG,
    "protocol": "strict",
    "data": {"crime": "aa11", "comics": "bb22"},
    "python": "3.11.0",
    "versions": {"torch": "2.9.0"},
    "machine": {"system": "Linux"},
    "commit": "c0ffee",
    "command": "federate.py --data /home/someone/prepared",
}


def round_record(number, finite=True, num_untrained=0):
    valid = {"post_broadcast": [{"ndcg@10": 0.1 * number}, {"ndcg@10": 0.4 - 0.1 * number}]}
    clients = [{"client": 0, "finite": finite}, {"client": 1, "finite": True, "num_untrained": num_untrained}]
    return {
        "round": number,
        "valid": valid,
        "clients": clients,
        "train_s": 2.0 * number,
        "wall_s": 3.0,
        "evaluate_s": 1.0,
    }


ROUNDS = [round_record(1, num_untrained=3), round_record(2, finite=False), round_record(3, num_untrained=1)]


def card(**clients):
    events = {"users": 9, "events": 1234, "length": {"mean": 5.25}, "timestamps": "known", "tied_last_two_share": 0.0}
    return {"items": {"count": 7}, "clients": {**events, **clients}, "public": {"users": 40}}


@pytest.fixture
def folder(tmp_path):
    """A finished run of two domains and three rounds."""
    root = tmp_path / "toy"
    root.mkdir()
    sizes = [{"crime": {"down": 100, "up": 10}, "comics": {"down": 200, "up": 20}}, {"crime": {"down": 3000, "up": 10}}]
    example = {
        "history": ["Old", HOSTILE],
        "num_history": 6,
        "held_out": "Wanted",
        "position": 1,
        "recommended": [{"title": "Other", "held_out": False}, {"title": "Wanted", "held_out": True}],
    }
    content = {
        "run.json": RECORD,
        "metrics.json": METRICS,
        "communication.json": {
            "unit": "bytes",
            "adapter_scalars": 5,
            "rounds": [{"round": n, "clients": clients} for n, clients in enumerate(sizes, 1)],
        },
        "fusion_weights.json": {
            "domains": ["crime", "comics"],
            "rounds": [1, 2, 3],
            "alpha": [[[2.0, 2.0], [2.0, 2.0]], [[1.5, -0.25], [0.75, None]], [[1.0, 1.0], [1.0, 1.0]]],
        },
        "data_cards.json": {"crime": card(tied_last_two_share=0.125), "comics": card()},
        "examples.json": {"crime": [example, {**example, "position": None, "recommended": []}]},
    }
    for name, value in content.items():
        (root / name).write_text(json.dumps(value))
    (root / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in ROUNDS))
    return RunFolder(root)


def body(folder) -> str:
    return run_page(folder).read_text(encoding="utf-8").partition("<body>")[2]


def test_the_page_says_what_the_files_say(folder):
    text = body(folder)
    assert "fedecider on crime, comics; round 2 of 3, chosen on validation" in text
    assert '0.3125 <span class="interval">[0.2925, 0.3425]</span>' in text
    assert "memoriser (canary)" in text
    assert "macro (mean over domains)" in text
    assert text.count("Plotly.newPlot(") == 3  # intervals, validation, fusion weights (once)
    cost = ["crime", "2", "100", "10", "3,000", "10", "3,100", "20"]
    assert f'<th scope="row">{cost[0]}</th>' + "".join(f'<td class="number">{c}</td>' for c in cost[1:]) in text
    assert '<td class="number">4.00</td><td class="number">12.00</td>' in text  # train_s: median and sum of 2, 4, 6
    for said in ("50% of the clients", "c0ffee", "aa11", "1,234", "12.5%", "vocab_<wbr>size", "77"):
        assert said in text
    titles = re.findall(r'<h2 id="section-\d+">([^<]*)</h2>', text)
    assert text.index("macro (mean over domains)</caption>") < text.index(
        "crime</caption>"
    )  # the shortest answer first
    assert titles[:3] == ["Results", "Convergence", "Fusion weights"]
    assert titles[-4:] == ["What was run", "Where it comes from", "All settings", "Glossary"]


def test_the_page_opens_with_what_came_out_in_plain_words(folder):
    text = body(folder)
    first = text[text.index('class="opening"') : text.index('id="warnings"')]
    assert "The method fedecider trained a recommender for each of 2 domains (crime, comics)" in first
    assert "in 3 rounds" in first
    assert "For 19.1% of the users, mean over domains," in first
    assert "guessing would find it for 5.0%" in first
    assert (
        "It is better than what needs no training (ndcg@10, mean over domains: 0.1913 against 0.0862 of popularity"
        in first
    )


@pytest.mark.parametrize(
    ("model", "count", "said"),
    [
        (
            0.30,
            0.20,
            "It is better than what needs no training (ndcg@10: 0.3000 against 0.2000 of popularity, the best of these "
            "rows); the 95 % intervals do not overlap.",
        ),
        (
            0.30,
            0.29,
            "It is better than what needs no training (ndcg@10: 0.3000 against 0.2900 of popularity, the best of these "
            "rows); but the 95 % intervals overlap, so it may be chance.",
        ),
        (
            0.10,
            0.20,
            "It is not better than what needs no training (ndcg@10: 0.1000 against 0.2000 of popularity, the best of "
            "these rows); the 95 % intervals do not overlap.",
        ),
    ],
)
def test_the_opening_says_whether_the_training_was_worth_it(model, count, said):
    metrics = {**METRICS, "domains": {"crime": domain(model, count)}}
    del metrics["macro"]
    assert opening(metrics, 1)[-1] == said
    assert "the domain crime in 1 round." in opening(metrics, 1)[0]
    for words in ("hit@10", "ndcg@10", "baseline", "canary", "fusion weights"):
        assert any(words in term for term, _ in GLOSSARY)


def test_text_neighbours_are_among_what_a_model_is_held_to(folder):
    crime = domain(0.30, 0.20)
    crime["test"]["text neighbours + counts"] = intervals(0.40)
    metrics = {**METRICS, "domains": {"crime": crime}, "text_encoder": "TF-IDF + SVD"}
    del metrics["macro"]
    assert "0.3000 against 0.4000 of text neighbours + counts" in opening(metrics, 1)[-1]
    said = "crime: text neighbours + counts has a higher test ndcg@10 (0.4000) than the model (0.3000)"
    assert said in run_warnings(RECORD, metrics, QUIET, {})
    assert "as vectors of" not in body(folder)  # runs of before
    folder.metrics.write_text(json.dumps({**METRICS, "text_encoder": "TF-IDF <SVD>"}))
    assert "Text neighbours: item texts as vectors of TF-IDF &lt;SVD&gt;." in body(folder)


def test_one_thing_has_one_colour_on_the_page(folder):
    files = read_files(folder)
    files = files._replace(rounds=[{"valid": {"post_broadcast": [], "pre_upload": []}}])
    colours = page_colours(files)
    labels = list(METRICS["domains"]["crime"]["test"])
    assert len({colours[label] for label in labels}) == len(labels)
    assert colours["post_broadcast"] == colours[REPORTED]
    assert not set(DOMAIN_COLOURS) & set(COLOURS)
    bars = {bar.name: bar.marker.color for bar in interval_bars(files.metrics).figure.data}
    assert list(bars.values()) == list(DOMAIN_COLOURS[:2])


def test_examples_mark_the_held_out_item_and_are_escaped(folder):
    text = body(folder)
    assert "crime, reader 1: the held-out item is at place 2" in text
    assert "crime, reader 2: the held-out item is not among the returned items" in text
    assert '<th scope="row">2 ✓</th><td>Wanted</td>' in text
    assert '<th scope="row">1</th><td>Other</td>' in text
    assert "(4 older)" in text
    assert "&lt;script&gt;alert(&#x27;a title&#x27;)" in text
    assert "<script>alert" not in text


def test_paths_stay_in_the_run_folder(folder):
    assert "someone" not in body(folder)


def test_the_page_is_the_same_every_time_and_does_without_optional_files(folder):
    first = run_page(folder).read_bytes()
    assert run_page(folder).read_bytes() == first
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
        ("crime", "12.5%"),
        ("crime", "50.0% of the users had their test item before"),
        ("comics", "group of public users is empty"),
    ]
    found = run_warnings(RECORD, METRICS, ROUNDS, cards)
    for said, (name, words) in zip(found, expected, strict=True):
        assert said.startswith(f"{name}: ")
        assert words in said


def changed(**changes):
    return {**METRICS, **changes}


QUIET = [{"round": 1, "clients": []}]


def test_a_leak_a_beaten_model_and_an_unclear_origin_are_said():
    leaking = run_warnings(RECORD, changed(protocol="paper"), QUIET, {})
    assert leaking[0] == "paper protocol: LEAKS the held-out item; the memoriser scores hit@10 0.040"
    above = changed(domains={"crime": domain(0.2, 0.25, canary=0.5)})
    found = run_warnings({**RECORD, "commit": None}, above, QUIET, {})
    assert "crime: the memoriser, which knows nothing about items, is above chance" in found[0]
    assert "popularity has a higher test ndcg@10 (0.2500) than the model (0.2000)" in found[1]
    assert "commit is not known" in found[2]
    dirty = run_warnings(
        {**RECORD, "commit": "c0ffee-dirty"}, changed(best_round=3), [*QUIET, {"round": 3, "clients": []}], {}
    )
    assert [line.partition(":")[0] for line in dirty] == [
        "the last round is the best on validation",
        "the code differed from its commit",
    ]
    unknown = run_warnings(RECORD, METRICS, QUIET, {"crime": card(timestamps="unknown", tied_last_two_share=None)})
    assert ["no event has a time" in line for line in unknown] == [True]


def test_interval_bars_draw_means_and_bounds():
    metrics = {"domains": {"crime": {"test": {"a": intervals(0.3, 0.1, 0.7), "b": intervals(0.2)}}}}
    bar = interval_bars(metrics).figure.data[0]
    assert list(bar.x) == [0.3, 0.2]
    assert list(bar.error_x.array) == pytest.approx([0.4, 0.03])
    assert list(bar.error_x.arrayminus) == pytest.approx([0.2, 0.02])


def test_user_texts_come_from_the_stage_that_fits(tmp_path):
    record = {"config": {"run": {"pretrain": {"x": 1}, "seed": 2, "cache": str(tmp_path)}}, "data": {"crime": "aa"}}
    for name, seed in (("pretrain-1", 3), ("pretrain-2", 2)):
        (tmp_path / name / "ids").mkdir(parents=True)
        inputs = {"pretrain": {"x": 1}, "seed": seed, "domains": [["crime", "aa"]]}
        (tmp_path / name / "inputs.json").write_text(json.dumps(inputs))
        (tmp_path / name / "ids" / "crime.json").write_text(json.dumps({"clients": {"texts": [name]}}))
    assert cached_user_texts(record) == {"crime": ["pretrain-2"]}
    assert cached_user_texts({**record, "data": {"crime": "other"}}) == {}


def test_the_end_of_a_run_survives_analyses_that_fail(folder, capsys):
    path = finish_report(folder, {}, {}, {}, "tfidf")
    assert "the analyses could not be made" in path.read_text(encoding="utf-8")
    assert "report without analyses: got domains []" in " ".join(capsys.readouterr().out.split())


def test_saved_analyses_are_shown_where_the_data_are_gone(folder, monkeypatch):
    (folder.root / "analysis.json").write_text('{"kept": 3}')
    monkeypatch.setattr(run_report, "sections_of", lambda analysis, colours: [Section(f"Kept {analysis['kept']}")])
    text = run_report.report(ReportConfig(str(folder.root))).read_text(encoding="utf-8")
    assert "Kept 3</h2>" in text
    assert "no analyses" not in text


def call(*words) -> int:
    try:
        return runpy.run_path(str(REPORT))["main"](list(words))
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_script_works_without_data_and_refuses_bad_input(folder, tmp_path, capsys):
    assert call("--run", str(folder.root)) == 0
    assert "written: " in capsys.readouterr().out
    assert "no analyses: the data of the run are not where they were" in (folder.root / "report.html").read_text()
    cases = {
        "no run in": ("--run", str(tmp_path)),
        "no prepared data": ("--run", str(folder.root), "--data", "nowhere"),
    }
    for expected, words in cases.items():
        assert call(*words) == 2
        assert expected in capsys.readouterr().err
    broken = {
        "do not fit together": ("metrics.json", json.dumps({**METRICS, "reported": "other"})),
        "got a damaged": ("metrics.json", "{"),
        "embedding track": ("run.json", json.dumps({"config": {"run": {}}, "data": {}})),
    }
    for expected, (name, content) in broken.items():
        (folder.root / name).write_text(content)
        assert call("--run", str(folder.root)) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert "Traceback" not in error
    (folder.root / "run.json").write_text(json.dumps(RECORD))
    (folder.root / "metrics.json").unlink()
    assert call("--run", str(folder.root)) == 2
    assert "did not finish" in capsys.readouterr().err
