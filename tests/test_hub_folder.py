"""A folder in the layout of the hub serves as backbone and as ID generator, through the script and a paper config.

The tokenizer is a `T5Tokenizer` with 100 extra tokens, as that of t5-small, and the embeddings are padded beyond it.
"""

import json
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration, T5Tokenizer

from fedecider.data.sample import sample_domains
from idgen import alternating, id_generator, soft_ids
from idgen.decode import constrained_beam_search
from idgen.prompts import prompt_texts
from idgen.tokenizer import clean_words, train_tokenizer
from idgen.trie import Trie

REPOSITORY = Path(__file__).resolve().parents[1]
PADDING_ROWS = 28  # t5-small: 32,128 rows for 32,100 tokens


def save_like_the_hub(folder: Path, seed: int) -> int:
    """A tiny T5 and its tokenizer in ``folder``; the number of tokens."""
    (domain,) = sample_domains(("crime",)).values()
    trained = train_tokenizer([*domain.item_texts, *prompt_texts("natural", ["crime"])], 700)
    pieces = json.loads(trained.backend_tokenizer.to_str())["model"]["vocab"]
    tokenizer = T5Tokenizer(vocab=[(piece, score) for piece, score in pieces], extra_ids=100)
    torch.manual_seed(seed)
    start = {"decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=len(tokenizer) + PADDING_ROWS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, **start
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def pretrain(*words: str) -> int:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "pretrain.py"))
    try:
        return script["main"](["--config", str(REPOSITORY / "configs" / "pretrained_t5.yaml"), *words])
    except SystemExit as stop:
        return int(stop.code)


CHEAP = (
    *("--domains", "crime", "--num_threads", "1"),
    *("--pretrain.samples.max_history", "3", "--pretrain.samples.max_source_tokens", "128"),
    *("--pretrain.alternating_phases", "1", "--pretrain.train.epochs", "1"),
    *("--pretrain.train.batch_size", "256"),
)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    for module in (id_generator, soft_ids):
        monkeypatch.setattr(module, "MAX_TEXT_TOKENS", 24)
    monkeypatch.setattr(alternating, "GENERATOR_BATCH", 256)


@pytest.mark.slow
def test_a_saved_folder_is_backbone_and_id_generator(tmp_path, capsys, monkeypatch):
    num_tokens = save_like_the_hub(tmp_path / "backbone", 0)
    assert save_like_the_hub(tmp_path / "tags", 1) == num_tokens
    monkeypatch.chdir(tmp_path)
    words = ("--pretrain.backbone.name_or_path", "backbone", "--pretrain.id_generator", "tags", *CHEAP)
    code = pretrain(*words)
    assert code == 0, capsys.readouterr().err
    (stage,) = (tmp_path / ".cache").glob("pretrain-*")

    model = AutoModelForSeq2SeqLM.from_pretrained(stage / "backbone").eval()
    tokenizer = AutoTokenizer.from_pretrained(stage / "backbone")
    assert len(tokenizer) == num_tokens == model.config.vocab_size
    assert (model.config.d_model, model.config.num_layers) == (16, 2)
    start = T5ForConditionalGeneration.from_pretrained(tmp_path / "backbone")
    moved = [
        not torch.equal(value, start.state_dict()[name][: len(value)]) for name, value in model.state_dict().items()
    ]
    assert all(moved)

    ids = json.loads((stage / "ids" / "crime.json").read_text())
    tokens = ids["items"]["token_ids"]
    assert len({tuple(one) for one in tokens}) == len(tokens) == len(ids["item_keys"])
    for text, one in zip(ids["items"]["texts"], tokens, strict=True):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == one
        assert " ".join(clean_words(text)) == text
    report = json.loads((stage / "report.json").read_text())
    assert [turn["trained"] for turn in report["alternating"]] == ["backbone", "ids", "backbone"]
    prompt = tokenizer("what comes after " + ids["items"]["texts"][0], return_tensors="pt")
    trie = Trie.build(tokens, tokenizer.eos_token_id)
    items, _ = constrained_beam_search(model, prompt["input_ids"], prompt["attention_mask"], trie, 5)
    assert len(set(items[0].tolist())) == 5

    assert pretrain(*words) == 0
    assert "reused" in capsys.readouterr().out
    models = json.loads((stage / "inputs.json").read_text())["models"]
    assert set(models) == {"backbone", "tags"}
    assert len({*models, *models.values()}) == 4  # the cache goes by the content of the folders, not by their names


@pytest.mark.parametrize("missing", ["backbone", "tags"])
def test_a_folder_that_is_not_there_is_one_line(tmp_path, missing, capsys, monkeypatch):
    save_like_the_hub(tmp_path / ("tags" if missing == "backbone" else "backbone"), 0)
    monkeypatch.chdir(tmp_path)
    words = ("--pretrain.backbone.name_or_path", "./backbone", "--pretrain.id_generator", "./tags")
    assert pretrain(*words, *CHEAP) == 2
    error = capsys.readouterr().err
    assert f"./{missing}" in error
    assert "Traceback" not in error
