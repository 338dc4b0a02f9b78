"""Runs with ensembles: rows, files, the page, the same numbers again, bad input; IDs of one and of many tokens."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
from slow import slow
from small_runs import SMALL, finished
from test_pipeline import SETTINGS

from fedecider.evaluation.per_user import read_per_user
from fedecider.evaluation.statistics import table_intervals
from fedecider.models.ensemble_files import SETTINGS_FILE, TENSOR_FILE, load_ensemble
from fedecider.models.features import FEATURES
from fedecider.models.recommender import Recommender

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]


def main(script: str, *words: str) -> int:
    try:
        return runpy.run_path(str(REPOSITORY / "scripts" / f"{script}.py"))["main"](list(words))
    except SystemExit as stop:
        return int(stop.code or 0)


def t5_settings() -> dict:
    pretrain = {**SETTINGS["pretrain"], "text_encoder": "tfidf"}
    return {**SETTINGS, **SMALL, "pretrain": pretrain, "ensemble": {"kind": "logit"}}


@pytest.fixture(scope="module", params=["decoder", slow("t5")])
def playground(request, tmp_path_factory):
    """A folder with small settings and one finished run with ensembles, ``runs/whole``."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "t5":
        return finished(folder, t5_settings())
    return Path(shutil.copytree(request.getfixturevalue("decoder_run"), folder, dirs_exist_ok=True))


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def read_json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_weights_and_files(playground):
    run = playground / "runs" / "whole"
    metrics = read(run / "metrics.json")
    variants = {(one.variant, one.domain) for one in read_per_user(run / "per_user.parquet")}
    for name, domain in metrics["domains"].items():
        for split in ("valid", "test"):
            assert {"fedecider + ensemble", "ensemble without a model", metrics["reported"]} <= set(domain[split])
        assert (
            domain["test"]["ensemble without a model"]["ndcg@10"]["mean"]
            > domain["test"]["popularity"]["ndcg@10"]["mean"]
        )
        assert {("ensemble without a model", name), ("fedecider + ensemble", name)} <= variants
        weights = metrics["ensemble"][name]
        for part, features in (("beside_model", FEATURES), ("alone", FEATURES[1:])):
            assert {*weights[part]["value"], *weights[part]["constant"]} == set(features)
            assert weights[part]["num_customers"] == 240
            assert all(error > 0 for error in weights[part]["error"].values())
        kept = load_ensemble(run / "private" / name, Recommender.from_pretrained(run, name).items.keys)
        assert weights["beside_model"]["value"] == kept.beside_model.value
        assert sorted(path.name for path in (run / "private" / name).iterdir()) == [SETTINGS_FILE, TENSOR_FILE]
    assert metrics["reported"] == "fedecider (fused)"
    traffic = read(run / "communication.json")["ensemble"]  # of weights alone: every catalogue has one client
    assert set(traffic) == set(metrics["domains"])
    assert all(0 < size < 1000 for sizes in traffic.values() for size in sizes.values())
    manifest = read(run / "manifest.json")
    private = {f"private/{name}/{file}" for name in metrics["domains"] for file in (SETTINGS_FILE, TENSOR_FILE)}
    assert {*manifest["customers"]} == {*private, "per_user.parquet", "examples.json", "report.html"}
    simple = {"popularity", "last-item co-occurrence", "decayed co-occurrence", "text neighbours"}
    simple |= {"text neighbours + counts", "item-kNN", "EASE"}
    tests = metrics["comparisons"]
    assert {one["first"] for one in tests} == {"fedecider + ensemble"}
    assert {one["second"] for one in tests} == {
        *simple,
        "ensemble without a model",
        "local + ensemble",
        metrics["reported"],
        "zero-shot student",
    }
    rows = metrics["macro"]["test"]
    for one in (one for one in tests if one["domain"] == "macro"):
        means = (rows[one[place]][one["metric"]]["mean"] for place in ("first", "second"))
        assert one["difference"]["mean"] == pytest.approx(next(means) - next(means))
        assert 0 < one["p_value"] <= one["p_holm"] <= 1
    page = (run / "report.html").read_text()
    section = page[page.index("Ensemble weights") :]
    name, weights = next(iter(metrics["ensemble"].items()))
    theta, error = (weights["beside_model"][part]["text"] for part in ("value", "error"))
    assert f"{theta:.2f} ± {error:.2f}" in section
    assert name in section


def test_intervals_of_the_mean_over_domains_take_a_reader_of_two_domains_as_one(playground):
    run = playground / "runs" / "whole"
    metrics, found = read(run / "metrics.json"), read_per_user(run / "per_user.parquet")
    row = metrics["reported"]
    users = {one.domain: one.users for one in found if one.variant == row}
    assert len(set().union(*users.values())) < sum(map(len, users.values()))
    positions = {one.domain: one.position_U for one in found if one.variant == row}
    by_person, by_user = (
        table_intervals({"": positions}, persons=persons)[""]["macro"]["hit@10"]._asdict() for persons in (users, None)
    )
    assert metrics["macro"]["test"][row]["hit@10"] == pytest.approx(by_person)
    assert by_person != pytest.approx(by_user)


def test_evaluate_confirms_every_row(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    assert main("evaluate", "--run", "runs/whole", "--tolerance", "1e-12") == 0
    assert capsys.readouterr().out.count("ensemble") >= 6  # two rows of each client
    assert main("evaluate", "--run", "runs/whole", "--split", "valid") == 0


def test_evaluate_sees_another_ensemble(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    shutil.copytree("runs/whole", "runs/other")
    path = Path("runs/other/private/crime") / SETTINGS_FILE
    content = read(path)
    content["weights"]["alone"]["value"]["text"] = 5.0
    path.write_text(json.dumps(content))
    assert main("evaluate", "--run", "runs/other") == 2
    assert "ensemble.json was changed, expected it as it was written" in capsys.readouterr().err


def test_recommendations_are_those_of_the_ensemble_while_it_is_there(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    loaded = Recommender.from_pretrained("runs/whole", "crime")
    titles = [loaded.items.titles[item] for item in (3, 9)]
    mixed = loaded.recommend(titles, k=6)
    assert len({item.key for item in mixed}) == 6
    assert not {item.title for item in mixed} & set(titles)
    assert [item.score for item in mixed] == sorted((item.score for item in mixed), reverse=True)
    model = Recommender.from_pretrained("runs/whole", "crime", ensemble=False)
    alone = model.recommend(titles, k=6)
    assert [item.key for item in alone] != [item.key for item in mixed]
    words = ("--run", "runs/whole", "--domain", "crime", "--history", " | ".join(titles))
    assert main("recommend", *words) == 0
    assert mixed[0].title[:20] in capsys.readouterr().out
    shutil.copytree("runs/whole", "runs/shared", ignore=shutil.ignore_patterns("private"))
    with pytest.raises(ValueError, match=r"private/crime/ensemble\.json is missing"):
        Recommender.from_pretrained("runs/shared", "crime")
    assert Recommender.from_pretrained("runs/shared", "crime", ensemble=False).recommend(titles, k=6) == alone
    assert main("evaluate", "--run", "runs/shared") == 0


@pytest.mark.slow
def test_an_ensemble_changes_no_other_row(playground, monkeypatch):
    """All customers train, with an ensemble and without."""
    monkeypatch.chdir(playground)
    words = ("--config", "toy.yaml", "--ensemble.kind", "none", "--output", "runs/plain")
    assert main("federate", *words) == 0
    whole, plain = (read(Path("runs") / name / "metrics.json") for name in ("whole", "plain"))
    assert "ensemble" not in plain
    assert not Path("runs/plain/private").exists()
    for name, domain in plain["domains"].items():
        for split in ("valid", "test"):
            rows = whole["domains"][name][split]
            assert {row: rows[row] for row in domain[split]} == domain[split]
            assert {row for row in set(rows) - set(domain[split]) if "ensemble" not in row} == set()


def test_a_run_that_ended_before_its_ensembles_has_the_same_ones(playground, monkeypatch):
    monkeypatch.chdir(playground)
    shutil.copytree("runs/whole", "runs/resumed")
    for gone in ("metrics.json", "report.html", "per_user.parquet"):
        (Path("runs/resumed") / gone).unlink()
    shutil.rmtree("runs/resumed/private")
    assert main("federate", "--config", "toy.yaml", "--output", "runs/resumed", "--resume", "true") == 0
    whole, again = (read(Path("runs") / name / "metrics.json") for name in ("whole", "resumed"))
    assert again["ensemble"] == whole["ensemble"]
    assert again["domains"] == whole["domains"]
    for path in sorted(Path("runs/whole/private").rglob("*.*")):
        other = Path("runs/resumed/private") / path.relative_to("runs/whole/private")
        assert other.read_bytes() == path.read_bytes()


BAD_INPUT = {
    "an unknown kind": (("--ensemble.kind", "knn"), "ensemble.kind"),
    "no sources": (("--ensemble.sources", ""), "expected some of own, public, others"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_code_2(playground, case, capsys, monkeypatch):
    words, expected = BAD_INPUT[case]
    monkeypatch.chdir(playground)
    assert main("federate", "--config", "toy.yaml", *words) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error


def test_a_damaged_ensemble_is_named(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    shutil.copytree("runs/whole", "runs/damaged")
    (Path("runs/damaged/private/crime") / TENSOR_FILE).write_bytes(b"nothing")
    assert main("recommend", "--run", "runs/damaged", "--domain", "crime", "--history", "x") == 2
    assert TENSOR_FILE in capsys.readouterr().err
    keys = list(Recommender.from_pretrained("runs/whole", "comics").items.keys)
    with pytest.raises(ValueError, match="another catalogue"):
        load_ensemble(Path("runs/whole/private/crime"), keys)
