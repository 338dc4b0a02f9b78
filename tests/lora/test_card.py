"""The model card: what it says, and that its program gives the items of our own search."""

import ast
import dataclasses
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from hub_toys import FolderHub
from peft import PeftModel
from tiny_causal import byte_level_tokenizer, tiny_causal

from fedecider.models.adapters import LoraSettings, attach_lora, read_pair
from fedecider.models.export import Card, PromptLayout, SavedBase, export_adapter, program, prompt_layout
from fedecider.models.item_table import LOCAL_BACKBONE, ItemTable, read_item_ids
from fedecider.models.publish import put_in_front
from idgen.backbone import build_backbone, load_backbone
from idgen.config import TITLE_WORDS, BackboneConfig, SampleConfig
from idgen.decode import constrained_beam_search
from idgen.item_ids import keyword_item_ids, phrase_item_ids, unique_phrases
from idgen.ranking_config import RankingConfig
from idgen.samples import encode_histories
from idgen.tasks import catalogue_task
from idgen.tokenizer import load_tokenizer, train_tokenizer

PROMPT = PromptLayout(
    "so far the user has picked", "and next", ";", 1, 7, 512, 20, "AutoModelForSeq2SeqLM", False
)._replace(longest_id=30, prompt_end=1)
CARD = Card(
    method="fedecider",
    domain="crime",
    prompt=PROMPT,
    alpha={"crime": 1.5, "comics": -0.5, "children": 2.0},
    metrics={"ndcg@10": 0.123456},
    protocol="leave-last-out, full catalogue",
    details={"round": 5},
)
TITLES = [
    f"The {colour} {thing}" for colour in ("Red", "Blue", "Grey", "Amber") for thing in ("Lantern", "Heir", "Inn")
]
TITLES = [*TITLES, 'It\'s "quoted"', "Émile", *(f"Volume {number}" for number in range(20))]
LAYOUTS = {
    "as in the demo": SampleConfig(templates="compact", max_history=3, max_source_tokens=64),
    "oldest first": SampleConfig(templates="natural", max_history=4),
    "too long for all of it": SampleConfig(templates="compact", max_history=6, max_source_tokens=22),
    "shorter in use": SampleConfig(templates="natural", max_history=6, pairs=True),
}


HISTORY = SampleConfig(templates="history", max_history=4, max_source_tokens=24)
LIST = {"templates": "list", "max_source_tokens": 64}
CASES = {
    **{f"t5, {name}": ("t5", samples) for name, samples in LAYOUTS.items()},
    "t5, IDs of one token": ("t5, one token", LAYOUTS["as in the demo"]),
    "decoder, a sentence": ("llama", LAYOUTS["shorter in use"]),
    "decoder, closed item IDs": ("llama", HISTORY),
    "decoder, IDs of one token": ("one token", HISTORY),
    "decoder, a list with newlines": ("bytes", dataclasses.replace(HISTORY, **LIST)),
}


@cache
def run_folder(kind):
    """A backbone laid out as in a run folder, and the tokenizer and item IDs of the adapters."""
    root = Path(tempfile.mkdtemp())
    keys, texts = [f"k{number:02d}" for number in range(len(TITLES))], [f"title: {title}" for title in TITLES]
    if "one token" in kind:
        phrases = unique_phrases({"crime": keys}, {"crime": texts}, TITLE_WORDS)["crime"]
        tokenizer = train_tokenizer(texts, 300, phrases)
        ids = phrase_item_ids(keys, phrases, tokenizer)
    elif kind == "bytes":
        byte_level_tokenizer(texts).save_pretrained(root / "bytes")
        tokenizer = load_tokenizer(root / "bytes")
        ids = keyword_item_ids(keys, texts, tokenizer)
    else:
        tokenizer = train_tokenizer(texts, 300)
        ids = keyword_item_ids(keys, texts, tokenizer)
    if "t5" in kind:
        sizes = BackboneConfig(d_model=16, num_layers=1)
        backbone = build_backbone(sizes, tokenizer, 1)
        torch.nn.init.normal_(backbone.shared.weight, generator=torch.Generator().manual_seed(2))
    else:
        backbone = tiny_causal(vocab_size=len(tokenizer), max_position_embeddings=600)
    backbone.save_pretrained(root / "backbone")
    tokenizer.save_pretrained(root / "backbone")
    return root, tokenizer, ids


def export(kind, layout):
    """The adapter, exported with its card under the prompt layout."""
    root, tokenizer, ids = run_folder(kind)
    model = attach_lora(load_backbone(root / "backbone", tokenizer), LoraSettings(rank=2))
    for number, weight in enumerate(value for name, value in model.named_parameters() if "lora_B" in name):
        torch.nn.init.normal_(weight, std=0.5, generator=torch.Generator().manual_seed(number))
    row = torch.tensor([[5, 6, 1]])
    export_adapter(
        model,
        read_pair(model),
        root / "adapters" / "crime",
        SavedBase(root / "backbone", LOCAL_BACKBONE),
        ItemTable([f"k{number:02d}" for number in range(len(TITLES))], TITLES, ids.texts, ids.token_ids),
        CARD._replace(prompt=layout),
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row},
    )
    return root / "adapters" / "crime"


def program_of(card: str) -> str:
    (program,) = re.findall(r"```python\n(.*?)```", card, re.S)
    return program


@pytest.mark.parametrize("case", CASES)
def test_the_program_gives_the_items_of_our_search(case, tmp_path, monkeypatch, capsys):
    kind, samples = CASES[case]
    root, tokenizer, ids = run_folder(kind)
    task = catalogue_task("crime", ids, tokenizer, samples)
    assert (task.trie.eos_token_id is None) == ("one token" in kind)
    ranking = RankingConfig(num_beams=20)
    backbone = load_backbone(root / "backbone", tokenizer)
    layout = prompt_layout(task, ranking, backbone, "crime")
    adapter = export(kind, layout)
    card = (adapter / "README.md").read_text()
    assert (", then the closing token, " in card) == (layout.prompt_end is not None) == (kind != "one token")
    assert read_item_ids(adapter).token_ids == ids.token_ids
    model = PeftModel.from_pretrained(backbone, str(adapter)).eval()
    history = [3, 20, 12, 3, 0, 31, 8]
    found, _ = constrained_beam_search(model, *encode_histories(task, [history]), task.trie, 20)
    expected = [TITLES[item] for item in found[0].tolist() if item not in history][:10]
    assert len(expected) == 10

    (tmp_path / "next_items.py").write_text(program_of(card), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["next_items.py", str(adapter), *(TITLES[number] for number in history)])
    runpy.run_path("next_items.py")
    assert capsys.readouterr().out.splitlines() == [f"{place}\t{title}" for place, title in enumerate(expected, 1)]


ONE_LINE = """
import sys, torch
from transformers import AutoModelForSeq2SeqLM
from peft import AutoPeftModelForSeq2SeqLM, PeftModel
folder = sys.argv[1]
asked = {"input_ids": torch.tensor([[5, 6, 1]]), "decoder_input_ids": torch.tensor([[0, 7]])}
backbone = AutoModelForSeq2SeqLM.from_pretrained(f"{folder}/backbone")
plain = backbone(**asked).logits
expected = PeftModel.from_pretrained(backbone, folder)(**asked).logits
found = AutoPeftModelForSeq2SeqLM.from_pretrained("us/t5")(**asked).logits
assert torch.equal(found, expected) and not torch.allclose(found, plain)
"""


def test_a_t5_with_its_base_inside_opens_by_one_line_of_peft(tmp_path, monkeypatch):
    folder = Path(shutil.copytree(export("t5", PROMPT), tmp_path / "saved"))
    shutil.copytree(run_folder("t5")[0] / "backbone", folder / "backbone")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "us/t5"}))
    put_in_front(folder)
    hub = FolderHub(tmp_path / "cache", monkeypatch)
    hub.create_repo("us/t5", repo_type="model", private=True, exist_ok=True)
    hub.upload_folder(repo_id="us/t5", folder_path=folder, repo_type="model", commit_message="x")
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", ONE_LINE, str(folder)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_program_imports_nothing_of_ours():
    for prompt, most in ((PROMPT, 30), (PROMPT._replace(end_token=None, longest_id=1), 17)):
        tree = ast.parse(program(prompt, "us/books", False, ("a", "b")))
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {
            node.module if isinstance(node, ast.ImportFrom) else one.name for node in named for one in node.names
        }
        assert modules == {"json", "sys", "torch", "peft", "transformers"}
        assert len(ast.unparse(tree).splitlines()) <= most
