"""Beam search over a trie against that of a checkout of before, and K directions against one."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration

from fedecider.data.store import load_domains
from fedecider.models.adapters import adapter_shapes, attach_lora, fusion, initial_adapters, put
from fedecider.models.config import LoraSettings
from idgen.backbone import build_backbone
from idgen.backbone_training import train_backbone
from idgen.config import BackboneConfig, BackboneTraining, SampleConfig
from idgen.decode import constrained_beam_search
from idgen.item_ids import keyword_item_ids
from idgen.prompts import prompt_texts
from idgen.samples import eval_batches
from idgen.tasks import build_task
from idgen.tokenizer import train_tokenizer
from idgen.training import Execution
from idgen.trie import Trie

BEAMS, BATCH, STEPS, TURNS = (20, 50), 64, 120, 2
DIRECTIONS = (1, 8)

SEARCH = """
import sys, time, torch
from transformers import T5Config, T5ForConditionalGeneration
from idgen.decode import constrained_beam_search
from idgen.trie import Trie
torch.set_num_threads(1)
given, output = sys.argv[1:3]
made, found = torch.load(given), {}
model = T5ForConditionalGeneration(T5Config(**made["config"]))
model.load_state_dict(made["state"])
trie = Trie.build(made["ids"], made["end"])
for beams in made["beams"]:
    constrained_beam_search(model, *made["prompts"][0], trie, beams)
    start = time.process_time()
    answers = [constrained_beam_search(model, *prompt, trie, beams) for prompt in made["prompts"]]
    found[beams] = time.process_time() - start, answers
torch.save(found, output)
"""
"""Runs in either tree, whose searches have one signature."""


def small_t5(data: str, domain: str) -> dict[str, Any]:
    """A T5 after a few steps, IDs of keywords, and two batches of prompts."""
    catalogue = load_domains(data, [domain])[domain]
    tokenizer = train_tokenizer([*catalogue.item_texts, *prompt_texts("compact", [domain])], 4096)
    ids = keyword_item_ids(catalogue.item_keys, catalogue.item_texts, tokenizer)
    samples = SampleConfig(templates="compact", max_history=10, max_source_tokens=64, item_dropout=0.2, pairs=True)
    task = build_task(catalogue, catalogue.clients, ids, tokenizer, samples, True)
    model = build_backbone(BackboneConfig(d_model=128, num_layers=2), tokenizer)
    train_backbone(model, task, BackboneTraining(learning_rate=2e-3, batch_size=BATCH, max_steps=STEPS), Execution(0))
    users = torch.linspace(0, len(task.sequences) - 1, 2 * BATCH).long()
    prompts = [(input_ids, mask) for _, input_ids, mask, _ in eval_batches(task, "test", BATCH, users)]
    return {
        "config": model.config.to_dict(),
        "state": model.state_dict(),
        "ids": ids.token_ids,
        "end": task.trie.eos_token_id,
        "prompts": prompts,
        "beams": BEAMS,
    }


def searched(tree: Path, given: Path, output: Path) -> dict[int, tuple[float, list[Any]]]:
    """Beams -> CPU seconds and answers of the searches of ``tree``."""
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    words = [sys.executable, "-c", SEARCH, str(given), str(output)]
    subprocess.run(words, cwd=tree, env={**os.environ, **threads, "PYTHONPATH": str(tree)}, check=True)
    return torch.load(output)


def check_answers(before: list[Any], now: list[Any]) -> None:
    """The same items in the same places; scores to the rounding of sums of float32."""
    for (item_BK, score_BK), (new_item_BK, new_score_BK) in zip(before, now, strict=True):
        assert torch.equal(item_BK, new_item_BK)
        torch.testing.assert_close(new_score_BK, score_BK, atol=1e-5, rtol=1e-5)


def directions_seconds(made: dict[str, Any], num_directions: int) -> float:
    """CPU seconds of one batch under a fusion of K directions, none of them zero; the shorter of two."""
    model = T5ForConditionalGeneration(T5Config(**made["config"]))
    model.load_state_dict(made["state"])
    adapted = attach_lora(model, LoraSettings())
    one = initial_adapters(adapter_shapes(adapted), 0)
    generator = torch.Generator().manual_seed(0)
    stacked = {
        key: torch.stack([0.01 * torch.randn(tensor.shape, generator=generator) for _ in range(num_directions)])
        for key, tensor in one.items()
    }
    put(adapted, fusion(stacked, 0, torch.full((num_directions,), 1.0 / num_directions)))
    trie, times = Trie.build(made["ids"], made["end"]), []
    for _ in range(TURNS):
        start = time.process_time()
        input_ids, mask = made["prompts"][0]
        constrained_beam_search(adapted, input_ids, mask, trie, BEAMS[0])
        times.append(time.process_time() - start)
    return min(times)


def part_decode(args: argparse.Namespace) -> str:
    """Searches against those of ``--base``, and what K directions cost."""
    torch.set_num_threads(1)
    made, here = small_t5(args.data, args.domain), Path(__file__).resolve().parents[2]
    found: dict[str, list[dict[int, tuple[float, list[Any]]]]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(made, Path(folder) / "made.pt")
        for _ in range(TURNS):  # in turns: the machine is not the same at all times
            for side, tree in (("before", Path(args.base).resolve()), ("now", here)):
                found[side].append(searched(tree, Path(folder) / "made.pt", Path(folder) / "found.pt"))
    lines = ["| beams | CPU s before | now | ratio |", "|---:|---:|---:|---:|"]
    for beams in BEAMS:
        check_answers(found["before"][0][beams][1], found["now"][0][beams][1])
        before, now = (min(turn[beams][0] for turn in found[side]) for side in ("before", "now"))
        lines.append(f"| {beams} | {before:.2f} | {now:.2f} | {now / before:.2f} |")
    lines += ["", "| directions | CPU s a batch | ratio |", "|---:|---:|---:|"]
    seconds = {count: directions_seconds(made, count) for count in DIRECTIONS}
    lines += [f"| {count} | {one:.2f} | {one / seconds[DIRECTIONS[0]]:.2f} |" for count, one in seconds.items()]
    said = (
        f"{args.domain}: {len(made['ids'])} items, IDs of keywords, {len(made['prompts'])} batches of {BATCH} users, "
        f"T5 of 2 + 2 layers, 128 wide, after {STEPS} steps; one thread, least of {TURNS} turns; before: 29f5bd6."
    )
    return "\n".join([said, "", *lines])
