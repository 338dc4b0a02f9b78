"""Runs in which something goes wrong, from the command line."""

import json
import runpy
from pathlib import Path

import pytest
import yaml
from slow import slow

from fedecider.federation.secure_rounds import SecureSums
from fedecider.testing.faults import Fault, faulty_runs

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]


def federate(*words: str) -> int:
    return runpy.run_path(str(REPOSITORY / "scripts" / "federate.py"))["main"](list(words))


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    content = yaml.safe_load((REPOSITORY / "configs" / "demo_causal.yaml").read_text())
    content |= {"num_rounds": 3, "local_epochs": 1, "num_eval_users": 40, "lora_rank": 2}
    content |= {"ensemble": {"kind": "none"}}
    content["pretrain"] |= {"text_encoder": "tfidf"}
    content["pretrain"]["backbone"] |= {"d_model": 16}
    content["pretrain"]["train"] |= {"max_steps": 4}
    content["distill"] |= {"epochs": 1}
    (folder / "toy.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.mark.slow
def test_faults_are_in_the_records(playground, monkeypatch):
    monkeypatch.chdir(playground)
    with faulty_runs([Fault(1, "away", 1, 2), Fault(2, "late", 3)]):
        assert federate("--config", "toy.yaml", "--output", "runs/faulty") == 0
    records = [json.loads(line) for line in Path("runs/faulty/rounds.jsonl").read_text().splitlines()]
    away = {"client": 1, "reason": "away"}
    late = {"client": 2, "reason": "came after round 3 was closed"}
    assert [record["refused_uploads"] for record in records] == [[away], [away], [late]]
    assert [len(record["clients"]) for record in records] == [2, 2, 3]


@pytest.mark.slow
def test_a_secure_sum_survives_a_straggler_and_counts_its_messages(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    words = ("--config", "toy.yaml", "--method", "fedavg", "--num_rounds", "1", "--secure_sum", "true")
    with faulty_runs([Fault(1, "late", 1, 1)]):
        assert federate(*words, "--output", "runs/late") == 0
    (record,) = [json.loads(line) for line in Path("runs/late/rounds.jsonl").read_text().splitlines()]
    assert [one["reason"] for one in record["refused_uploads"]] == ["came after round 1 was closed"]
    assert len(record["clients"]) == 3
    capsys.readouterr()
    (group, *_) = json.loads(Path("runs/late/communication.json").read_text())["tensors"]["1"]
    assert group["up"]["secure:keys"] == 96
    monkeypatch.setattr(SecureSums.__new__, "__defaults__", (0.9, None, {}))
    with faulty_runs([Fault(1, "late", 1, 1)]):
        assert federate(*words, "--output", "runs/few") == 2
    assert "2 of 3 uploads for the secure aggregation of round 1, expected 3 at least" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--faults", "away.yaml"), "faults"),
        (("--robust_mean", "median"), "takes no mean over clients"),
        (("--secure_sum", "true"), "got secure_sum with fedecider, whose server takes no mean over clients"),
        (("--secure_sum", "true", "--robust_mean", "median", "--method", "fedavg"), "secure aggregation shows none"),
    ],
)
def test_bad_settings_are_told_and_nothing_is_left(words, message, playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    assert federate("--config", "toy.yaml", *words, "--output", "runs/bad") == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/bad").exists()


@pytest.mark.slow
def test_a_robust_mean_gives_another_model(playground, monkeypatch):
    monkeypatch.chdir(playground)
    words = ("--config", "toy.yaml", "--method", "fedavg", "--num_rounds", "1")
    scores = []
    for kind in ("mean", "median"):
        assert federate(*words, "--robust_mean", kind, "--output", f"runs/{kind}") == 0
        scores.append(json.loads(Path(f"runs/{kind}/rounds.jsonl").read_text())["clients"][0]["loss"])
        adapter = Path(f"runs/{kind}/adapters/crime/adapter_model.safetensors").read_bytes()
        scores.append(adapter)
    assert scores[0] == scores[2]  # the same training
    assert scores[1] != scores[3]  # another mean of it


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    """Twelve users over twenty items, keys that look like numbers."""
    folder = tmp_path_factory.mktemp("ratings")
    rows = [
        f"{10 + user},i{(user * 3 + step * (1 + user % 3)) % 20},5,{step}" for user in range(12) for step in range(5)
    ]
    (folder / "ratings.dat").write_text("\n".join(rows) + "\n")
    return folder


def embedding(ratings, *words):
    data = ["--dataset", "toy", "--source", "amazon_ratings", "--raw", str(ratings)]
    small = ["--min_user_events", "1", "--min_item_events", "1", "--embedding_size", "4", "--num_rounds", "2"]
    return federate("--method", "fedmf", *data, *small, *words)


def test_faults_of_users_are_in_the_records(ratings, tmp_path):
    output = tmp_path / "run"
    with faulty_runs([Fault(3, "away", 1, 1), Fault(4, "late", 2)]):
        assert embedding(ratings, "--output", str(output), "--local_epochs", "1") == 0
    records = [json.loads(line) for line in (output / "rounds.jsonl").read_text().splitlines()]
    late = {"client": 4, "reason": "came after round 2 was closed"}
    assert [record["refused_uploads"] for record in records] == [[{"client": 3, "reason": "away"}], [late]]
    assert [record["clients"][0]["clients"] for record in records] == [11, 12]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--robust_mean", "median", "--federation", "false"), "takes no mean over clients"),
        (("--robust_mean", "middle"), "robust_mean"),
        (("--robust_mean", "median", "--secure_sum", "true"), "secure aggregation shows none"),
        (("--robust_mean", "median", "--embedding_size", "65536", "--num_negatives", "9"), ""),
    ],
)
def test_bad_settings_of_the_cross_device_track_leave_nothing(words, message, ratings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ratings)
    if not message:
        monkeypatch.setattr("embedding_fr.setup.device_bytes", lambda device: 80_000_000)
        message = "GB of this machine"
    assert embedding(ratings, *words, "--output", str(tmp_path / "run")) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_robust_mean_of_the_embedding_track_gives_another_model(ratings, tmp_path):
    scores = []
    for kind in ("mean", "trimmed_mean"):
        assert embedding(ratings, "--robust_mean", kind, "--output", str(tmp_path / kind)) == 0
        rounds = (tmp_path / kind / "rounds.jsonl").read_text().splitlines()
        scores.append([json.loads(line)["clients"][0]["loss"] for line in rounds])
    assert scores[0][0] == scores[1][0]  # the same training
    assert scores[0][1] != scores[1][1]  # from another mean of it


@pytest.mark.parametrize("method", ["fedavg", slow("fedecider"), slow("local"), slow("flora")])
def test_a_run_of_which_nobody_is_left_has_no_figures_and_says_so_everywhere(method, playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    output = Path("runs") / f"diverged_{method}"
    words = ("--config", "toy.yaml", "--method", method, "--learning_rate", "1e30", "--output", str(output))
    assert federate(*words) == 1
    told = capsys.readouterr()
    assert "crime in round" in told.out + told.err or "crime in 1" in told.out + told.err
    assert "got no usable upload in round 1 (of crime, comics, children: diverged at step" in " ".join(told.err.split())
    assert "diverged at step" in told.err
    assert "learning_rate 1e+30: the loss is" in told.err
    metrics = json.loads((output / "metrics.json").read_text())
    assert "the training has diverged" in metrics["diverged"]
    assert "test" not in json.dumps(metrics)
    assert {one["client"] for one in metrics["left_out"]} == {0, 1, 2}
    page = (output / "report.html").read_text()
    assert "the training has diverged" in page
    assert "crime in round 1" in page
    assert not (output / "results.md").exists()


@pytest.mark.parametrize(("block", "step"), [("pretrain.train", 4), ("distill", None)])
def test_a_stage_that_diverges_ends_the_run_and_is_not_kept(block, step, playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    words = ("--config", "toy.yaml", "--cache", f"cache_{block}", f"--{block}.learning_rate", "1e30")
    assert federate(*words, "--output", "runs/stage") == 1
    told = capsys.readouterr().err
    assert f"diverged at step {step or ''}" in told
    assert "learning_rate 1e+30: the loss is" in told
    kept = {folder.name.partition("-")[0] for folder in Path(f"cache_{block}").iterdir()}
    assert kept <= ({"pretrain"} if block == "distill" else set()) | {"texts", "text"}
    assert not Path("runs/stage").exists()


def test_one_company_of_numbers_that_are_none_is_named_and_the_run_goes_on(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    words = ("--config", "toy.yaml", "--method", "fedavg", "--num_rounds", "2")
    with faulty_runs([Fault(0, "scale", factor=1e30), Fault(1, "scale", 2)]):
        assert federate(*words, "--output", "runs/huge") == 0
    metrics = json.loads(Path("runs/huge/metrics.json").read_text())
    assert [(one["round"], one["client"]) for one in metrics["non_finite_uploads"]] == [(1, 0), (2, 0)]
    for text in (
        capsys.readouterr().out,
        Path("runs/huge/results.md").read_text(),
        Path("runs/huge/report.html").read_text(),
    ):
        assert "too large: crime in " in " ".join(text.split())
