"""Settings among which validation items choose before the first round, and runs that stop when nothing gets better."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
import yaml
from small_runs import decoder_settings

from fedecider.cli.main import main
from fedecider.cross_silo import hyperparameter_selection
from fedecider.cross_silo.command_line import parse_settings, recorded_settings
from fedecider.cross_silo.privacy import check_privacy
from fedecider.deployment.llm import check_deployable
from fedecider.evaluation.per_user import read_per_user
from fedecider.federation.record import read_json, read_records

pytestmark = pytest.mark.whole

LAYERS = {"lora_targets": "table,attention", "learning_rate": 1e-3, "output_lr_multiplier": 2.0}
WRECKS = {"lora_targets": "table", "learning_rate": 0.3}
"""Leaves nothing of the student in a round."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small settings that learn, and others that do not; stages are shared."""
    folder = tmp_path_factory.mktemp("selection")
    content = {**decoder_settings(), "domains": "crime,comics", "ensemble": {"kind": "none"}, "update_scales": "1"}
    content |= {"num_eval_users": 0, "teacher_row": False, "local_epochs": 2, **LAYERS}
    for name, settings in (("learns", content), ("wrecks", {**content, **WRECKS})):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def run(config: str, name: str, *words: str, others: list[dict] | None = None) -> Path:
        words = (*words, *(() if others is None else ("--hyperparameter_candidates", json.dumps(others))))
        root = Path("runs") / name
        if not root.exists():
            assert main(["federate", "--config", f"{config}.yaml", "--output", str(root), *words]) == 0
        return root

    return run


def places(root: Path) -> list:
    return [
        (row.domain, row.split, row.variant, row.position_U.tolist())
        for row in read_per_user(root / "per_user.parquet")
    ]


def test_what_is_clearly_better_is_taken_and_nothing_else_changes(run):
    taken = run("wrecks", "taken", others=[LAYERS])
    found = read_json(taken / "hyperparameter_selection.json")
    assert found["taken"] == LAYERS
    assert [one["changes"] for one in found["tried"]] == [{}, LAYERS]
    assert found["tried"][1]["valid"] > found["tried"][0]["valid"]
    assert places(taken) == places(run("learns", "plain"))
    assert "lora_targets table,attention" in (taken / "results.md").read_text()
    assert "q_proj" in read_json(taken / "adapters" / "crime" / "adapter_config.json")["target_modules"]
    settings = recorded_settings(taken)
    assert (settings.run.lora_targets, settings.training.learning_rate) == ("table,attention", 1e-3)
    assert read_json(taken / "run.json")["config"]["run"]["lora_targets"] == "table"  # as it was asked for


def test_what_is_no_better_changes_nothing(run):
    kept = run("learns", "kept", others=[WRECKS])
    assert read_json(kept / "hyperparameter_selection.json")["taken"] == {}
    assert places(kept) == places(run("learns", "plain"))
    assert not (run("learns", "plain") / "hyperparameter_selection.json").exists()
    assert recorded_settings(kept).training.learning_rate == 1e-3


def test_each_is_judged_by_its_better_round_alone(run):
    tried = read_json(run("wrecks", "taken", others=[LAYERS]) / "hyperparameter_selection.json")["tried"]
    best = []
    for one, config in zip(tried, ("wrecks", "learns"), strict=True):
        alone = run(config, f"{config}-alone", "--method", "local", "--num_rounds", "2")
        records = read_records(alone / "rounds.jsonl")
        scores = [fmean(log["score"] for log in record["clients"]) for record in records]
        assert one["valid"] == pytest.approx(max(scores), abs=1e-9)
        best.append(scores.index(max(scores)))
    assert 1 in best, "else the first round alone would do"


def test_the_round_that_is_best_for_all_counts_though_a_later_one_is_worse(monkeypatch):
    """Places by round and client: the first round has ndcg@10 1 and 1 / log2(3), the second 0 and 1."""
    places = {(1, "a"): 0.0, (1, "b"): 1.0, (2, "a"): 50.0, (2, "b"): 0.0}

    def train(models, client, number, pair):
        return SimpleNamespace(pair=number, finite=True)

    def model(client, pair):
        return SimpleNamespace(positions=lambda split: torch.full((2,), places[pair, "ab"[client]]))

    models = SimpleNamespace(num_clients=2, names=["a", "b"], start=0, model=model)
    monkeypatch.setattr(hyperparameter_selection, "make_recommender", lambda *parts: models)
    monkeypatch.setattr(hyperparameter_selection, "train_locally", train)
    settings, launch = SimpleNamespace(run=SimpleNamespace(method="fedavg")), SimpleNamespace(device="cpu")
    found = hyperparameter_selection._gains(settings, None, launch, lambda: None)
    assert found == {"a": [1.0, 1.0], "b": [pytest.approx(0.63093, abs=1e-5)] * 2}


def test_a_choice_is_kept_for_other_methods_and_pooled_data_has_its_own(run, monkeypatch):
    run("wrecks", "taken", others=[LAYERS])
    trained: list[tuple[str, ...]] = []
    train = hyperparameter_selection.train_locally

    def counted(models, *args, **options):
        trained.append(tuple(models.names))
        return train(models, *args, **options)

    monkeypatch.setattr(hyperparameter_selection, "train_locally", counted)
    local = run("wrecks", "local", "--method", "local", others=[LAYERS])
    assert trained == []
    pooled = run("wrecks", "centralised", "--method", "centralised", others=[LAYERS])
    assert trained == [("pooled",)] * 2 * hyperparameter_selection.ROUNDS
    assert read_json(local / "hyperparameter_selection.json") == read_json(
        Path("runs/taken/hyperparameter_selection.json")
    )
    own, others = (read_json(root / "hyperparameter_selection.json")["tried"] for root in (pooled, Path("runs/taken")))
    assert [one["changes"] for one in own] == [one["changes"] for one in others]
    assert [one["valid"] for one in own] != [one["valid"] for one in others]


def test_a_run_stops_when_nothing_gets_better(run):
    stopped = run("learns", "stopped", "--learning_rate", "1e-9", "--num_rounds", "5", "--patience", "2")
    assert [record["round"] for record in read_records(stopped / "rounds.jsonl")] == [1, 2, 3]
    assert read_json(stopped / "metrics.json")["best_round"] == 1
    assert "round 1 of 3 has the best" in (stopped / "results.md").read_text()


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([{"lora_rank": 4}], "['lora_rank'] in hyperparameter_candidates"),
        ([{}], "nothing in hyperparameter_candidates"),
        ([{"learning_rate": -1}], "learning_rate"),
        (
            [{"lora_targets": "attention", "output_lr_multiplier": 2}],
            "got output_lr_multiplier 2.0 with lora_targets attention",
        ),
        ([{"lora_targets": ""}], "got no LoRA targets"),
        ([{"lora_targets": "query"}], "query"),
        ("3", "hyperparameter_candidates"),
    ],
)
def test_bad_candidates_are_told_before_any_work(others, words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    asked = [
        "federate",
        "--config",
        "learns.yaml",
        "--output",
        "runs/bad",
        "--hyperparameter_candidates",
        json.dumps(others),
    ]
    assert main(asked) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs/bad").exists()


def test_what_may_not_choose(folder, monkeypatch):
    """Users who are hidden choose nothing, and a deployment has adapters of one shape from the start."""
    monkeypatch.chdir(folder)
    words = ["--config", "learns.yaml", "--method", "fedavg", "--hyperparameter_candidates", json.dumps([WRECKS])]
    with pytest.raises(ValueError, match="got hyperparameter_candidates, expected none in a deployment"):
        check_deployable(parse_settings(words))
    with pytest.raises(ValueError, match="got user_privacy with hyperparameter_candidates"):
        check_privacy(parse_settings([*words, "--user_privacy.clip", "1"]))


def test_a_run_that_goes_on_keeps_its_choice_though_the_cache_has_lost_it(run, tmp_path, monkeypatch, capsys):
    taken = run("wrecks", "taken", others=[LAYERS])
    moved = shutil.copytree(".cache", tmp_path / "moved", ignore=shutil.ignore_patterns("selection-*"))
    monkeypatch.setattr(hyperparameter_selection, "train_locally", lambda *_: pytest.fail("tried again"))
    before, root = (taken / "hyperparameter_selection.json").read_bytes(), shutil.copytree(taken, tmp_path / "again")
    words = ["--config", "wrecks.yaml", "--output", str(root), "--cache", str(moved), "--resume", "true"]
    words += ["--hyperparameter_candidates", json.dumps([LAYERS])]
    assert main(["federate", *words]) == 0
    assert (root / "hyperparameter_selection.json").read_bytes() == before
    assert places(root) == places(taken)
    (root / "hyperparameter_selection.json").write_text('{"taken": {"learning_rate": 9.0}, "tried": []}')
    assert main(["federate", *words]) == 2
    assert "hyperparameter_selection.json" in capsys.readouterr().err


def test_a_run_without_its_choice_is_refused_in_one_sentence(run, tmp_path, capsys):
    folder = shutil.copytree(run("wrecks", "taken", others=[LAYERS]), tmp_path / "copy")
    for damage in ("{", None):
        if damage is None:
            (folder / "hyperparameter_selection.json").unlink()
        else:
            (folder / "hyperparameter_selection.json").write_text(damage)
        assert main(["evaluate", "--run", str(folder)]) == 2
        assert "hyperparameter_selection.json" in capsys.readouterr().err
