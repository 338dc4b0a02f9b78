"""The whole pipeline on the embedded sample with toy sizes: run, hand-over, resume after a kill, bad input."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from fedecider.evaluation.per_user import read_per_user
from fedecider.models.recommender import Recommender
from fedecider.running.manifest import write_manifest
from idgen.samples import empty_prompt, encode_histories

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
SETTINGS = {
    "num_rounds": 3,
    "num_threads": 1,
    "local_epochs": 1,
    "batch_size": 256,
    "lora_rank": 4,
    "num_beams": 20,
    "num_eval_users": 40,
    "eval_batch_size": 40,
    "pretrain": {
        "ids": "keywords",
        "samples": {"templates": "compact", "max_history": 3, "max_source_tokens": 64},
        "backbone": {"d_model": 32, "num_layers": 2},
        "train": {"max_steps": 60, "learning_rate": 3e-3, "batch_size": 64},
    },
    "distill": {"epochs": 1, "batch_size": 256},
}


def command(script: str, *words: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / "scripts" / f"{script}.py"), *words]


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    """A folder with the toy settings and one finished run, ``runs/whole``."""
    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "toy.yaml").write_text(yaml.safe_dump(SETTINGS))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.chdir(folder)
        assert main("federate", "--config", "toy.yaml", "--output", "runs/whole") == 0
    (folder / "stdout.txt").write_text(printed.getvalue())
    return folder


def test_a_run_leaves_everything_behind(playground):
    run = playground / "runs" / "whole"
    for name in ("run.json", "rounds.jsonl", "metrics.json", "per_user.parquet", "fusion_weights.json"):
        assert (run / name).is_file(), name
    num_rounds = len((run / "rounds.jsonl").read_text().splitlines())
    assert num_rounds > 1
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"round_{num_rounds:05d}"]
    metrics = json.loads((run / "metrics.json").read_text())
    assert set(metrics["domains"]) == {"crime", "comics", "children"}
    crime = metrics["domains"]["crime"]["test"]
    reported = crime[metrics["reported"]]
    assert {"hit@5", "ndcg@10", "mrr@20"} <= set(reported)
    assert reported["hit@10"]["low"] <= reported["hit@10"]["mean"] <= reported["hit@10"]["high"]
    for split in ("valid", "test"):
        rows = metrics["domains"]["crime"][split]
        assert {metrics["reported"], "popularity", "memoriser", "last-item co-occurrence"} <= set(rows)
        assert rows["text neighbours + counts"]["hit@10"]["mean"] > rows["popularity"]["hit@10"]["mean"]
        assert rows["text neighbours"]["hit@10"]["low"] > metrics["domains"]["crime"]["chance_hit@10"]
        assert rows["popularity"]["hit@10"]["low"] <= rows["popularity"]["hit@10"]["mean"]
    weights = json.loads((run / "fusion_weights.json").read_text())
    assert torch.tensor(weights["alpha"]).shape == (3, 3, 3)
    assert (torch.tensor(weights["alpha"])[-1] != 2).all()
    variants = {one.variant for one in read_per_user(run / "per_user.parquet")}
    assert variants == set(crime)
    printed = (playground / "stdout.txt").read_text()
    assert "strict" in printed
    page = re.sub(r'<span class="tip".*?</span>|</?dfn[^>]*>', "", (run / "report.html").read_text())
    for text in ((run / "results.md").read_text(), page):
        assert f"{metrics['text_encoder']} embeddings of item texts" in " ".join(text.split())


def test_bytes_follow_the_formula(playground):
    content = json.loads((playground / "runs" / "whole" / "communication.json").read_text())
    payload = 4 * content["adapter_scalars"]
    last = content["tensors"]["3"][0]
    assert sum(last["up"].values()) == payload
    assert sum(last["down"].values()) == 3 * payload
    first = content["tensors"]["1"][0]
    assert sum(first["down"].values()) == payload


def score_in_the_catalogue(logits_TV, target, token_ids):
    """The log-probability of an ID among those of the catalogue: at each step among the tokens that one of them has."""
    score, ids = 0.0, [[*tokens, target[-1]] for tokens in token_ids]
    for place, token in enumerate(target):
        allowed = sorted({one[place] for one in ids if one[:place] == target[:place] and len(one) > place})
        score += float(logits_TV[place, allowed].log_softmax(-1)[allowed.index(token)])
    return score


def test_plain_peft_reproduces_the_recommendations(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    run = playground / "runs" / "whole"
    table = json.loads((run / "adapters" / "crime" / "item_ids.json").read_text())["items"]
    titles = [entry["title"] for entry in table.values()]
    words = ("--run", "runs/whole", "--domain", "crime", "--history", " | ".join(titles[:2]), "--k", "5")
    assert main("recommend", *words) == 0
    printed = capsys.readouterr().out
    assert "share of each domain's direction" in printed
    tokenizer = AutoTokenizer.from_pretrained(run / "backbone")
    model = PeftModel.from_pretrained(
        AutoModelForSeq2SeqLM.from_pretrained(run / "backbone"), str(run / "adapters" / "crime")
    ).eval()
    loaded = Recommender.from_pretrained(run, "crime")
    ranked = loaded.recommend(titles[:2], k=5)
    assert ranked[0].title[:20] in printed
    input_ids, attention_mask = encode_histories(loaded.task, [[0, 1]])
    for item in ranked:
        target = torch.tensor([[*table[item.key]["tokens"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(input_ids=input_ids, attention_mask=attention_mask, labels=target).logits
        score = score_in_the_catalogue(logits[0], target[0].tolist(), loaded.task.item_ids.token_ids)
        assert score == pytest.approx(item.score, abs=1e-3)


def test_many_histories_get_what_each_gets_alone_and_an_empty_one_what_is_likely(playground):
    """With IDs of several tokens, where the number of beams counts: it is that of each history."""
    rec = Recommender.from_pretrained(playground / "runs" / "whole", "crime")
    titles = rec.items.titles
    asked = [[titles[(5 * row + 3 * place) % 60] for place in range(row)] for row in range(14)]
    together, alone = rec.recommend(asked, k=10), [rec.recommend(history, k=10) for history in asked]
    for one, other in zip(together, alone, strict=True):
        assert [item.key for item in one] == [item.key for item in other]
        assert [item.score for item in one] == pytest.approx([item.score for item in other], abs=1e-4)
        assert len(one) == 10
        assert not one[0].features
    assert together[0].notes == ("no history was given: the items that the model finds likely whoever asks",)
    input_ids, attention_mask = empty_prompt(rec.task)
    best = rec.task.item_ids.token_ids[rec.items.keys.index(together[0][0].key)]
    labels = torch.tensor([[*best, rec.tokenizer.eos_token_id]])
    with torch.no_grad():
        logits = rec.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).logits
    score = score_in_the_catalogue(logits[0], labels[0].tolist(), rec.task.item_ids.token_ids)
    assert together[0][0].score == pytest.approx(score, abs=1e-3)


def test_evaluate_confirms_the_metrics(playground, monkeypatch):
    monkeypatch.chdir(playground)
    assert main("evaluate", "--run", "runs/whole") == 0


@pytest.mark.slow
def test_kill_and_resume_gives_the_same_metrics(playground, monkeypatch):
    monkeypatch.chdir(playground)
    words = ("--config", "toy.yaml", "--output", "runs/killed")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command("federate", *words), cwd=playground, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    checkpoint = playground / "runs" / "killed" / "checkpoints" / "round_00001"
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)  # during round 2
    process.wait()
    assert not (playground / "runs" / "killed" / "metrics.json").exists()
    assert main("federate", *words, "--resume", "true") == 0
    whole, killed = (
        json.loads((playground / "runs" / name / "metrics.json").read_text()) for name in ("whole", "killed")
    )
    assert set(whole.pop("seconds")) >= {"load", "prepare", "rounds", "results", "report"}
    killed.pop("seconds")
    assert whole == killed


def main(script: str, *words: str) -> int:
    """A script in this process: starting Python for every call would take most of the suite's time."""
    try:
        return runpy.run_path(str(REPOSITORY / "scripts" / f"{script}.py"))["main"](list(words))
    except SystemExit as stop:
        return int(stop.code or 0)


def short_run(folder: Path, method: str, *words: str) -> None:
    common = ("--config", "toy.yaml", "--num_rounds", "2", "--method", method, "--output", f"runs/{method}")
    assert main("federate", *common, *words) == 0
    metrics = json.loads((folder / "runs" / method / "metrics.json").read_text())
    assert metrics["reported"].startswith(method)
    assert (folder / "runs" / method / "adapters" / "comics" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_absent_clients(playground, monkeypatch):
    monkeypatch.chdir(playground)
    partly = ("--participation", "0.5", "--tracker", "tensorboard")
    short_run(playground, "fedecider", *partly)
    weights = json.loads((playground / "runs" / "fedecider" / "fusion_weights.json").read_text())
    assert torch.tensor(weights["alpha"]).shape == (2, 3, 3)
    assert list((playground / "runs" / "fedecider").rglob("events.out.tfevents*"))
    per_round = json.loads((playground / "runs" / "fedecider" / "communication.json").read_text())["rounds"]
    assert [len(entry["clients"]) for entry in per_round] == [2, 2]


def test_recommending_from_the_wrong_pieces(playground, monkeypatch, capsys):
    monkeypatch.chdir(playground)
    run = ("--run", "runs/whole", "--domain", "crime", "--history")
    broken = playground / "runs" / "broken"
    shutil.copytree(playground / "runs" / "whole", broken)
    swapped = broken / "adapters" / "crime" / "item_ids.json"
    shutil.copy(broken / "adapters" / "comics" / "item_ids.json", swapped)
    small = T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(small).save_pretrained(broken / "backbone")
    write_manifest(broken)  # else the checksums tell first
    cases = {
        "closest are": (*run, "No Such Title Anywhere"),
        "got k 0": (*run, "x", "--k", "0"),
        "no adapter for domain 'horror'": ("--run", "runs/whole", "--domain", "horror", "--history", "x"),
        "no run in": ("--run", "runs/nothing", "--domain", "crime", "--history", "x"),
        "pair of one export": ("--run", "runs/broken", "--domain", "crime", "--history", "x"),
        "token embeddings": ("--run", "runs/broken", "--domain", "comics", "--history", "x"),
    }
    for expected, words in cases.items():
        assert main("recommend", *words) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert "Traceback" not in error


BAD_INPUT = {
    "unknown domain": (("--domains", "crime,horror"), "horror"),
    "one domain twice": (("--domains", "crime,crime"), "different names"),
    "rank 0": (("--lora_rank", "0"), "lora_rank 0"),
    "negative rounds": (("--num_rounds", "-1"), "num_rounds -1"),
    "unknown key": (("--lora_ranks", "4"), "lora_ranks"),
    "unknown method": (("--method", "fedmagic"), "fedmagic"),
    "another method's option": (("--method", "fedavg", "--alpha_init", "1"), "alpha_init"),
    "no data folder": (("--data", "nowhere"), "nowhere"),
    "resume without a run": (("--output", "runs/none", "--resume", "true"), "runs/none"),
    "resume of another configuration": (("--output", "runs/whole", "--resume", "true", "--seed", "5"), "seed"),
    "a run that exists": (("--output", "runs/whole"), "--resume"),
    "too few beams": (("--num_beams", "10"), "num_beams 10"),
    "a backbone that is not there": (("--pretrain.backbone.name_or_path", "no/such/folder"), "no/such/folder"),
    "sampled candidates": (("--protocol", "strict/sampled99"), "strict"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_code_2(playground, case, capsys, monkeypatch):
    words, expected = BAD_INPUT[case]
    before = sorted(playground.rglob("*"))
    monkeypatch.chdir(playground)
    code = main("federate", "--config", "toy.yaml", *words)
    captured = capsys.readouterr()
    assert code == 2
    assert expected in captured.err
    assert "Traceback" not in captured.err
    assert sorted(playground.rglob("*")) == before
