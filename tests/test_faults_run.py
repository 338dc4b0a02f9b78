"""A run with a scenario of faults, from the command line."""

import json
import runpy
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]


def federate(*words: str) -> int:
    return runpy.run_path(str(REPOSITORY / "scripts" / "federate.py"))["main"](list(words))


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    content = yaml.safe_load((REPOSITORY / "configs" / "demo_causal.yaml").read_text())
    content |= {"num_rounds": 3, "local_epochs": 1, "num_eval_users": 40, "lora_rank": 2, "encoder": "tfidf"}
    content |= {"memory": {"kind": "none"}}
    content["pretrain"] |= {"text_encoder": "tfidf"}
    content["pretrain"]["backbone"] |= {"d_model": 16, "d_ff": 32}
    content["pretrain"]["train"] |= {"max_steps": 4}
    content["distill"] |= {"epochs": 1}
    (folder / "toy.yaml").write_text(yaml.safe_dump(content))
    (folder / "bad.yaml").write_text("faults: [{client: nobody, kind: away}]\n")
    return folder


def test_a_scenario_is_played_told_and_part_of_the_run(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    scenario = str(REPOSITORY / "configs" / "scenarios" / "absences.yaml")
    assert federate("--config", "toy.yaml", "--faults", scenario, "--output", "runs/faulty") == 0
    records = [json.loads(line) for line in Path("runs/faulty/rounds.jsonl").read_text().splitlines()]
    away = {"client": 1, "reason": "away"}
    late = {"client": 2, "reason": "came after round 3 was closed"}
    assert [record["refused_uploads"] for record in records] == [[away], [away], [late]]
    assert [len(record["clients"]) for record in records] == [2, 2, 3]
    (playground / "other.yaml").write_text("faults: [{client: crime, kind: nan}]\n")
    words = ("--config", "toy.yaml", "--faults", "other.yaml", "--output", "runs/faulty", "--resume", "true")
    assert federate(*words) == 2
    assert "another configuration" in capsys.readouterr().err


def test_a_secure_sum_survives_a_straggler_and_counts_its_messages(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    (playground / "late.yaml").write_text("faults: [{client: comics, kind: late, rounds: 1}]\n")
    words = ("--config", "toy.yaml", "--method", "fedavg", "--num_rounds", "1", "--faults", "late.yaml")
    assert federate(*words, "--secure_sum", "true", "--output", "runs/late") == 0
    (record,) = [json.loads(line) for line in Path("runs/late/rounds.jsonl").read_text().splitlines()]
    assert [one["reason"] for one in record["refused_uploads"]] == ["came after round 1 was closed"]
    assert len(record["clients"]) == 3
    capsys.readouterr()
    (group, *_) = json.loads(Path("runs/late/communication.json").read_text())["tensors"]["1"]
    assert group["up"]["secure:keys"] == 96
    words = ("--config", "toy.yaml", "--method", "fedavg", "--secure_sum", "true", "--secure_threshold", "0.9")
    assert federate(*words, "--faults", "late.yaml", "--output", "runs/few") == 2
    assert "2 of 3 uploads for the secure sum of round 1, expected 3 at least" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--faults", "bad.yaml"), "expected one of crime, comics, children"),
        (("--faults", "nowhere.yaml"), "nowhere.yaml"),
        (("--robust_mean", "median"), "takes no mean over clients"),
        (("--secure_sum", "true"), "got secure_sum with fedecider, whose server takes no mean over clients"),
        (("--secure_sum", "true", "--robust_mean", "median", "--method", "fedavg"), "a secure sum shows none"),
    ],
)
def test_bad_scenarios_are_told_and_nothing_is_left(words, message, playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    assert federate("--config", "toy.yaml", *words, "--output", "runs/bad") == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/bad").exists()


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
