"""Finished runs beside each other: hand-written positions, runs of several tracks, what cannot be compared."""

import json

import pandas as pd
import pytest
import torch

import fedecider as fd
from fedecider.comparison.runs import compare_runs
from fedecider.data.sample import sample_domains
from fedecider.evaluation.per_user import UserPositions, write_per_user

USERS = {"north": [f"n{user}" for user in range(40)], "south": ["n0", *(f"s{user}" for user in range(9))]}


def run(root, seed, first, users=USERS, protocol="strict", data="a"):
    """A finished run; ``first``: client -> number of its users whose item stands first."""
    folder = root / f"run-{len(list(root.iterdir()))}"
    folder.mkdir()
    record = {"config": {"run": {"seed": seed}}, "data": {**dict.fromkeys(users, data), "text encoder": str(seed)}}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "metrics.json").write_text(json.dumps({"reported": "mine (own)", "protocol": protocol}))
    places = {name: torch.where(torch.arange(len(users[name])) < first[name], 0, 50) for name in users}
    variants = {"mine (own)": places, "popularity": {name: torch.zeros(len(users[name])) for name in users}}
    write_per_user(
        folder / "per_user.parquet",
        [UserPositions(n, users[n], "test", variant, 1, p) for variant, of in variants.items() for n, p in of.items()],
    )
    (folder / "rounds.jsonl").touch()
    (folder / "results.md").touch()
    return folder


def test_means_over_seeds_and_clients_with_tests_against_the_first_label(tmp_path):
    found = compare_runs(
        {
            "alone": [run(tmp_path, 0, {"north": 4, "south": 2}), run(tmp_path, 1, {"north": 8, "south": 4})],
            "joined": [run(tmp_path, 0, {"north": 30, "south": 9}), run(tmp_path, 1, {"north": 32, "south": 9})],
            "same": [run(tmp_path, 0, {"north": 4, "south": 2}), run(tmp_path, 1, {"north": 8, "south": 4})],
        }
    )
    table = found.table
    assert list(table.index) == ["alone", "joined", "same"]
    assert set(table["seeds"]) == {2}
    assert table.loc["alone", "hit@10"] == pytest.approx((0.15 + 0.3) / 2)
    assert table.loc["joined", "ndcg@10"] == pytest.approx((31 / 40 + 0.9) / 2)
    assert table.loc["joined", "hit@10_low"] < table.loc["joined", "hit@10"] < table.loc["joined", "hit@10_high"]
    assert pd.isna(table.loc["alone", "hit@10_p_holm"])
    assert table.loc["joined", "hit@10_p_holm"] < 0.05
    assert table.loc["same", "hit@10_p_holm"] == 1
    assert found.per_client.loc[("joined", "south"), "hit@10"] == pytest.approx(0.9)
    assert list(found.tests["second"]) == ["joined", "joined", "same", "same"]
    assert set(found.tests["first"]) == {"alone"}
    gained = found.tests.set_index(["second", "metric"]).loc[("joined", "hit@10")]
    assert gained["difference"] == pytest.approx(table.loc["joined", "hit@10"] - table.loc["alone", "hit@10"])
    assert gained["low"] < gained["difference"] < gained["high"]
    assert "who is a user of several clients counts once" in found.caption
    assert "protocol: strict" in found._repr_html_()
    root = found.save(tmp_path / "saved")
    assert pd.read_csv(root / "table.csv", index_col="label").equals(table)
    assert {path.name for path in root.iterdir()} == {"table.csv", "per_client.csv", "tests.csv", "table.html"}


def test_one_label_alone_has_no_tests(tmp_path):
    found = compare_runs({"alone": [run(tmp_path, 0, {"north": 4}, {"north": USERS["north"]})]})
    assert found.table.loc["alone", "hit@10"] == pytest.approx(0.1)
    assert found.tests.empty


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"protocol": "strict/keep_seen"}, "got other protocol in .*run-1"),
        ({"data": "b"}, "got other data in .*run-1"),
        ({"users": {**USERS, "south": USERS["south"][::-1]}}, "got other users in .*run-1"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(tmp_path, other, message):
    hits = {"north": 4, "south": 2}
    with pytest.raises(ValueError, match=message):
        compare_runs({"one": [run(tmp_path, 0, hits)], "two": [run(tmp_path, 0, hits, **other)]})


def test_what_is_no_set_of_finished_runs_is_refused(tmp_path):
    one, two = run(tmp_path, 0, {"north": 4, "south": 2}), run(tmp_path, 1, {"north": 4, "south": 2})
    with pytest.raises(ValueError, match="one at least for each label"):
        compare_runs({"one": [one], "two": []})
    with pytest.raises(ValueError, match="expected the same seeds for every label"):
        compare_runs({"one": [one, two], "two": [two]})
    with pytest.raises(ValueError, match="twice, expected each once"):
        compare_runs({"one": [one, one]})
    with pytest.raises(FileNotFoundError, match="no run in"):
        compare_runs({"one": [tmp_path / "nowhere"]})
    (two / "results.md").unlink()
    with pytest.raises(ValueError, match="did not finish"):
        compare_runs({"one": [one], "two": [two]})


TWO_ROUNDS = {"num_rounds": 2, "local_epochs": 1}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two methods with two seeds in a folder, and the data."""
    root = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        data = fd.FederatedData(sample_domains(["crime"]))
        yield root, data, fd.compare(["fedmf", "fedncf"], data, seeds=2, output="runs", **TWO_ROUNDS)


def times(root):
    return {path: path.stat().st_mtime_ns for path in root.glob("runs/*/*/metrics.json")}


def test_finished_runs_of_the_same_settings_and_data_are_taken(compared):
    root, data, first = compared
    before = times(root)
    again = fd.compare(["fedmf", "fedncf"], data, seeds=2, output="runs", progress=False, **TWO_ROUNDS)
    assert again.table.equals(first.table)
    assert times(root) == before
    assert len(before) == 4


@pytest.mark.parametrize(
    ("methods", "settings", "domain", "named"),
    [
        (["fedmf", "fedncf"], {"num_rounds": 3}, "crime", "num_rounds"),
        (["fedmf", "fedncf"], {"learning_rate": 0.123}, "crime", "learning_rate"),
        (["fedmf", "fedncf"], {}, "comics", "data"),
        (["fednear", "fedmf"], {"num_rounds": 1}, "crime", "num_rounds"),
    ],
)
def test_runs_of_other_settings_or_data_are_refused_and_kept(compared, methods, settings, domain, named):
    root, data, _ = compared
    before = times(root)
    other = data if domain == "crime" else fd.FederatedData(sample_domains([domain]))
    with pytest.raises(ValueError, match=rf"runs/fedmf/0 .*{named}"):
        fd.compare(methods, other, seeds=2, output="runs", **{**TWO_ROUNDS, **settings})
    assert times(root) == before
    assert not (root / "runs" / "fednear").exists()


def test_a_further_method_and_seed_join_the_finished_runs(compared):
    root, data, first = compared
    before = times(root)
    found = fd.compare(["fedmf", "fedncf", "fednear"], data, seeds=2, output="runs", **TWO_ROUNDS)
    assert found.table.loc[["fedmf", "fedncf"], "ndcg@10"].equals(first.table["ndcg@10"])
    assert {path: times(root)[path] for path in before} == before
