"""Runs whose item IDs end with tokens of their own: from the command line to what plain peft makes of it."""

import json

import pytest
import torch
from peft import PeftModel
from small_runs import decoder_settings, finished
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedecider.cli.main import main
from fedecider.models.recommender import Recommender
from idgen.trie import Trie

pytestmark = pytest.mark.whole

RUNS = ("whole", "t5")
TABLE = "attention,feed_forward,table"
T5_PROMPTS = ("--pretrain.samples.templates", "compact", "--pretrain.train.table_lr_multiplier", "20")
T5_OPTIONS = {
    "pretrain.backbone.kind": "t5",
    "pretrain.samples.max_source_tokens": "120",
    "lora_targets": "attention,feed_forward",
    "ensemble.kind": "none",
    "output": "runs/t5",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with small settings and two finished runs of two domains: of a decoder, ``runs/whole``, and of a T5."""
    settings = decoder_settings()
    settings |= {"domains": "crime,comics", "lora_targets": TABLE}
    settings["pretrain"] |= {"text_encoder": "minilm", "ids": "keywords"}
    settings["pretrain"]["samples"] |= {"dense_head": True, "max_source_tokens": 60}
    folder = finished(tmp_path_factory.mktemp("dense"), settings)
    options = [part for name, value in T5_OPTIONS.items() for part in (f"--{name}", value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["federate", "--config", "toy.yaml", *T5_PROMPTS, *options]) == 0
    return folder


def plain(run):
    tokenizer = AutoTokenizer.from_pretrained(run / "backbone")
    model = AutoModelForCausalLM.from_pretrained(run / "backbone")
    return tokenizer, PeftModel.from_pretrained(model, str(run / "adapters" / "crime")).eval()


@pytest.mark.parametrize("run", RUNS)
def test_it_starts_as_text_neighbours_do(folder, run):
    metrics = json.loads((folder / "runs" / run / "metrics.json").read_text())
    for domain in metrics["domains"].values():
        rows = {row: values["ndcg@10"]["mean"] for row, values in domain["test"].items()}
        assert rows["zero-shot student"] > 0.5 * rows["text neighbours"]


def test_plain_peft_ranks_and_writes(folder):
    """The program of the model card: all items at once, and one item word by word."""
    run = folder / "runs" / "whole"
    tokenizer, model = plain(run)
    items = json.loads((run / "adapters" / "crime" / "item_ids.json").read_text())["items"]
    read, ids = list(items)[:3], [entry["tokens"] for entry in items.values()]
    prompt_1S = tokenizer(" ".join(items[key]["id"] for key in read), return_tensors="pt", add_special_tokens=False)
    assert prompt_1S["input_ids"][0].tolist() == [token for key in read for token in items[key]["tokens"]]
    with torch.no_grad():
        logit_V = model(input_ids=prompt_1S["input_ids"]).logits[0, -1]
    score = dict(zip(items, logit_V[[tokens[-1] for tokens in ids]].log_softmax(-1).tolist(), strict=True))
    best = [key for key in sorted(score, key=lambda key: -score[key]) if key not in read][:5]
    ranked = Recommender.from_pretrained(run, "crime", ensemble=False).recommend(read, k=5)
    assert [item.key for item in ranked] == best
    assert [item.score for item in ranked] == pytest.approx([score[key] for key in best], abs=1e-4)

    trie, length = Trie.build(ids, None), prompt_1S["input_ids"].shape[1]

    def may_follow(_, token_S):
        node = trie.walk(token_S[None, length:])
        return trie.children(node).token_C.tolist() or [tokenizer.eos_token_id]

    out_1S = model.generate(
        **prompt_1S, max_new_tokens=trie.max_length, num_beams=1, do_sample=False, prefix_allowed_tokens_fn=may_follow
    )
    written = [token for token in out_1S[0, length:].tolist() if token != tokenizer.eos_token_id]
    assert written in ids
    assert "each its item's own" in (run / "adapters" / "crime" / "README.md").read_text()


@pytest.mark.parametrize("run", RUNS)
def test_a_later_item_ranks_by_its_text(folder, run):
    run = folder / "runs" / run
    old = Recommender.from_pretrained(run, "crime", ensemble=False)
    number, title = len(old.items.keys), old.items.titles[7]
    texts = [
        {"key": "later", "title": "A Later Book", "text": f"title: {title}"},
        {"key": "other", "title": "Another", "text": "title: no word of these books: xylophones"},
    ]
    loaded = Recommender.from_pretrained(run, "crime", ensemble=False, new_items=texts)
    num_tokens = len(old.model.get_input_embeddings().weight)
    assert [loaded.task.item_ids.token_ids[place][-1] for place in (number, number + 1)] == [num_tokens, num_tokens + 1]
    ranked = [item.key for item in loaded.recommend([title], k=number)]
    assert ranked.index("later") < ranked.index("other")
    assert ranked.index("later") < 5
    before = [item.key for item in old.recommend([title], k=20)]
    assert [key for key in ranked if key not in ("later", "other")][:20] == before


BAD_INPUT = {
    "IDs of one token": (("--pretrain.ids", "item"), "expected IDs of several tokens"),
    "a start that knows no texts": (
        ("--pretrain.backbone.kind", "t5", "--pretrain.backbone.embedding_init", "random", *T5_PROMPTS),
        "embedding_init random, expected text",
    ),
    "alternating phases": (("--pretrain.ids", "generator", "--pretrain.alternating_phases", "1"), "alternating phases"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_code_2(folder, case, capsys, monkeypatch):
    words, expected = BAD_INPUT[case]
    monkeypatch.chdir(folder)
    assert main(["federate", "--config", "toy.yaml", *words, "--output", "bad"]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert expected in error[0]
    assert not (folder / "bad").exists()
