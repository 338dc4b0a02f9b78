"""The pipeline with a decoder-only backbone: the demo's settings made small, from the command line to the hand-over."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from fedecider.models.recommender import Recommender

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
DEMO = REPOSITORY / "configs" / "demo_causal.yaml"


def main(script: str, *words: str) -> int:
    try:
        return runpy.run_path(str(REPOSITORY / "scripts" / f"{script}.py"))["main"](list(words))
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    """A folder with small settings and one finished run, ``runs/whole``."""
    folder = tmp_path_factory.mktemp("decoder")
    content = yaml.safe_load(DEMO.read_text())
    content |= {"num_rounds": 2, "local_epochs": 1, "num_eval_users": 40, "lora_rank": 2}
    content |= {"lora_targets": "attention,feed_forward,table", "ensemble": {"kind": "none"}}
    content["pretrain"] |= {"text_encoder": "tfidf"}
    content["pretrain"]["backbone"] |= {"d_model": 32}
    content["pretrain"]["train"] |= {"max_steps": 10}
    content["distill"] |= {"epochs": 1}
    (folder / "toy.yaml").write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main("federate", "--config", "toy.yaml", "--output", "runs/whole") == 0
    return folder


def test_it_starts_as_text_neighbours_do_and_leaves_everything_behind(playground):
    run = playground / "runs" / "whole"
    metrics = json.loads((run / "metrics.json").read_text())
    for domain in metrics["domains"].values():
        rows = {row: values["ndcg@10"]["mean"] for row, values in domain["test"].items()}
        assert rows["zero-shot student"] > 0.6 * rows["text neighbours"]
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"}
    for name in metrics["domains"]:
        config = json.loads((run / "adapters" / name / "adapter_config.json").read_text())
        assert config["task_type"] == "CAUSAL_LM"
        assert sorted(config["target_modules"]) == sorted(layers)
    assert json.loads((run / "backbone" / "config.json").read_text())["num_hidden_layers"] == 1


def test_plain_peft_gives_the_scores_of_our_search(playground):
    run = playground / "runs" / "whole"
    loaded = Recommender.from_pretrained(run, "crime")
    titles = [loaded.items.titles[item] for item in (0, 1, 2)]
    ranked = loaded.recommend(titles, k=5)
    model = AutoModelForCausalLM.from_pretrained(run / "backbone")
    model = PeftModel.from_pretrained(model, str(run / "adapters" / "crime")).eval()
    tokens = [loaded.task.item_ids.token_ids[item][0] for item in (0, 1, 2)]
    with torch.no_grad():
        logit_V = model(input_ids=torch.tensor([tokens])).logits[0, -1]
    keys = list(loaded.items.keys)
    score_I = logit_V[[tokens[0] for tokens in loaded.task.item_ids.token_ids]].log_softmax(-1)  # among the items
    own = dict(zip(keys, score_I.tolist(), strict=True))
    best = [key for key in sorted(keys, key=lambda key: -own[key]) if keys.index(key) not in (0, 1, 2)]
    assert [item.key for item in ranked] == best[:5]
    assert [item.score for item in ranked] == pytest.approx([own[item.key] for item in ranked], abs=1e-4)


def test_evaluate_confirms_the_metrics(playground, monkeypatch):
    monkeypatch.chdir(playground)
    assert main("evaluate", "--run", "runs/whole") == 0


@pytest.mark.slow
def test_without_any_share_of_its_update_a_client_is_the_student(playground, monkeypatch):
    monkeypatch.chdir(playground)
    words = ("--update_scales", "0", "--teacher_row", "false", "--output", "runs/student")
    assert main("federate", "--config", "toy.yaml", *words) == 0
    run = playground / "runs" / "student"
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["update_scales"] == dict.fromkeys(metrics["domains"], 0.0)
    whole = json.loads((playground / "runs" / "whole" / "metrics.json").read_text())["domains"]["crime"]["test"]
    assert whole.keys() - metrics["domains"]["crime"]["test"].keys() == {"zero-shot teacher"}
    for domain in metrics["domains"].values():
        assert domain["test"][metrics["reported"]] == domain["test"]["zero-shot student"]
        assert domain["test"]["fedecider (local)"] != domain["test"]["zero-shot student"]
    assert main("evaluate", "--run", "runs/student") == 0
    assert "share of the trained update, by validation items: crime 0, comics 0" in (run / "results.md").read_text()
    assert "share of the trained update" in (run / "adapters" / "crime" / "README.md").read_text()


@pytest.mark.slow
def test_absent_clients_and_a_tracker(playground, monkeypatch):
    monkeypatch.chdir(playground)
    words = ("--config", "toy.yaml", "--participation", "0.5", "--tracker", "tensorboard")
    assert main("federate", *words, "--output", "runs/partly") == 0
    run = playground / "runs" / "partly"
    assert torch.tensor(json.loads((run / "fusion_weights.json").read_text())["alpha"]).shape == (2, 3, 3)
    per_round = json.loads((run / "communication.json").read_text())["rounds"]
    assert [len(entry["clients"]) for entry in per_round] == [2, 2]
    (curves,) = (run / "trackers" / "tensorboard" / "fedecider").glob("events.out.tfevents*")
    scalars = EventAccumulator(str(curves)).Reload()
    assert [event.step for event in scalars.Scalars("valid/local/comics/ndcg_at_10")] == [1, 2]
    test = json.loads((run / "metrics.json").read_text())["domains"]["comics"]["test"]["zero-shot student"]
    (event,) = scalars.Scalars("test/zero-shot_student/comics/ndcg_at_10")
    assert (event.step, event.value) == (2, pytest.approx(test["ndcg@10"]["mean"]))
    assert "test/fedecider_local/macro/hit_at_10" in scalars.Tags()["scalars"]


def test_the_same_settings_find_the_stages_again(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    words = ("--config", "toy.yaml", "--num_rounds", "1", "--method", "local", "--output", "runs/local")
    assert main("federate", *words, "--verbose", "true") == 0
    assert capsys.readouterr().out.count("reused") == 2
    texts = list((playground / ".cache").glob("text-vectors-*"))
    assert len(texts) == 1


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_metrics(playground, monkeypatch):
    """One whose process is killed does so in the tests of the pipeline."""
    monkeypatch.chdir(playground)
    words = ("--config", "toy.yaml", "--output", "runs/killed")
    killed = playground / "runs" / "killed"

    def stop(record):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedecider.engine.run.round_logger", lambda launch, num_rounds: stop)
        assert main("federate", *words) == 130
    assert not (killed / "metrics.json").exists()
    assert (killed / "checkpoints" / "round_00001").is_dir()
    assert main("federate", *words, "--resume", "true") == 0
    whole = json.loads((playground / "runs" / "whole" / "metrics.json").read_text())
    assert json.loads((killed / "metrics.json").read_text()) == whole


@pytest.mark.slow
@pytest.mark.parametrize("clients", ["crime,comics,children", "crime"])
def test_two_processes_give_what_one_gives(clients, playground, monkeypatch):
    """Each has clients of its own, or where there is one client its part of the data."""
    monkeypatch.chdir(playground)
    alone, output = (playground / "runs" / f"{count} on {clients}" for count in ("one", "two"))
    assert main("federate", "--config", "toy.yaml", "--domains", clients, "--output", str(alone)) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    words = ["--config", "toy.yaml", "--domains", clients, "--output", str(output)]
    command = [*launch, str(REPOSITORY / "scripts" / "federate.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=playground, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    runs = (alone, output)
    one, two = (json.loads((run / "metrics.json").read_text()) for run in runs)
    if clients != "crime":
        assert one == two
        return
    for domain, found in one["domains"].items():  # sums of two halves round otherwise: an item or two may change places
        for row, metrics in found["test"].items():
            assert metrics["hit@10"]["mean"] == pytest.approx(
                two["domains"][domain]["test"][row]["hit@10"]["mean"], abs=0.01
            )
        pairs = [load_file(run / "adapters" / domain / "adapter_model.safetensors") for run in runs]
        for name, tensor in pairs[0].items():
            torch.testing.assert_close(tensor, pairs[1][name], atol=1e-4, rtol=1e-3)


BAD_INPUT = {
    "a start without texts": (("--pretrain.backbone.embedding_init", "random"), "embedding_init random, expected text"),
    "a width that does not fit": (("--pretrain.backbone.d_model", "46"), "multiple of 4"),
    "a width beyond the texts": (("--pretrain.backbone.d_model", "4096"), "span no more dimensions"),
    "a T5 with rows": (
        ("--pretrain.backbone.kind", "t5", "--pretrain.train.table_lr_multiplier", "1"),
        "templates history with a T5",
    ),
    "alternating phases": (("--pretrain.alternating_phases", "1"), "alternating phases with a decoder"),
    "an encoder that is not there": (("--pretrain.text_encoder", "no/such/folder"), "no/such/folder"),
    "layers of a T5": (("--lora_targets", "q,k"), "['k', 'q']"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_code_2(playground, case, capsys, monkeypatch):
    words, expected = BAD_INPUT[case]
    before = sorted(playground.rglob("*"))
    monkeypatch.chdir(playground)
    assert main("federate", "--config", "toy.yaml", *words) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "Traceback" not in error
    assert sorted(playground.rglob("*")) == before
