"""Speed of constrained decoding against the ``prefix_allowed_tokens_fn`` path of Hugging Face ``generate``.

Run: python benchmarks/decode.py [--output FILE.md]; its table is a section of benchmarks/results/speed.md
Both paths first have to give the same items in the same order (score ties apart); then they are timed on one thread:
the mask of a decode step alone, and whole searches. Weights, inputs and catalogue are random.

Shapes: B users, K beams, R = B x K rows, V vocabulary, T steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.running.command import run

os.environ.setdefault("OMP_NUM_THREADS", "1")

import provenance
import torch
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor, T5Config, T5ForConditionalGeneration

from idgen.decode import constrained_beam_search, evaluating
from idgen.trie import Trie

EOS = 1
MODELS = {  # vocabulary, width, feed-forward, layers, heads
    "small from scratch, 4k vocabulary": (4_000, 128, 512, 4, 4),
    "t5-small size, 32k vocabulary": (32_128, 512, 2048, 6, 8),
}


class DictTrie:
    """The usual prefix tree of nested dicts, walked for every row of every step."""

    def __init__(self, ids: list[list[int]]) -> None:
        self.root: dict[int, Any] = {}
        for tokens in ids:
            node = self.root
            for token in [*tokens, EOS]:
                node = node.setdefault(token, {})

    def allowed(self, batch_id: int, written: Tensor) -> list[int]:
        node = self.root
        for token in written.tolist()[1:]:
            node = node.get(token)
            if node is None:
                return [EOS]
        return list(node) or [EOS]


class Setting(NamedTuple):
    model: Any
    ids: list[list[int]]
    trie: Trie
    inputs_BS: Tensor
    mask_BS: Tensor
    num_beams: int


def make_setting(name: str, num_items: int, num_users: int, num_beams: int, input_length: int) -> Setting:
    """Random weights, IDs of 2 to 5 tokens whose first token is one of 500, inputs of unequal length."""
    vocab_size, d_model, d_ff, num_layers, num_heads = MODELS[name]
    torch.manual_seed(0)
    settings: dict[str, Any] = {"decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=vocab_size,
            d_model=d_model,
            d_kv=d_model // num_heads,
            d_ff=d_ff,
            num_layers=num_layers,
            num_heads=num_heads,
            **settings,
        )
    ).eval()
    rng = random.Random(0)
    ids: set[tuple[int, ...]] = set()
    while len(ids) < num_items:
        ids.add((rng.randrange(3, 503), *(rng.randrange(3, vocab_size) for _ in range(rng.randrange(1, 5)))))
    catalogue = [list(tokens) for tokens in sorted(ids)]
    lengths_B = torch.tensor([rng.randrange(input_length // 2, input_length + 1) for _ in range(num_users)])
    mask_BS = (torch.arange(input_length) < lengths_B[:, None]).long()
    inputs_BS = torch.randint(3, vocab_size, mask_BS.shape) * mask_BS
    return Setting(model, catalogue, Trie.build(catalogue, EOS), inputs_BS, mask_BS, num_beams)


def hugging_face(setting: Setting, **constraint: Any) -> tuple[Tensor, Tensor]:
    """(items (B, K), scores (B, K)) of ``generate`` under a constraint given as its keyword argument."""
    output = setting.model.generate(
        input_ids=setting.inputs_BS,
        attention_mask=setting.mask_BS,
        num_beams=setting.num_beams,
        num_return_sequences=setting.num_beams,
        max_length=50,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
        **constraint,
    )
    item_of = {tuple(tokens): item for item, tokens in enumerate(setting.ids)}
    items = [item_of[tuple(row[1 : row.index(EOS)])] for row in output.sequences.tolist()]
    shape = (len(setting.inputs_BS), setting.num_beams)
    return torch.tensor(items).view(shape), output.sequences_scores.view(shape)


def assert_equal_results(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> int:
    """Same scores place by place, same items up to ties; the number of places where tied items are exchanged."""
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-4, rtol=1e-5)
    exchanged = ours[0] != theirs[0]
    for user, place in exchanged.nonzero().tolist():
        tied = (ours[1][user] - ours[1][user, place]).abs() < 1e-4
        assert int(tied.sum()) > 1, f"user {user}: different items at place {place} without a tie"
    return int(exchanged.sum())


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Shortest of some calls, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def mask_seconds(setting: Setting, repeats: int) -> dict[str, float]:
    """Mean seconds per decode step of the mask alone, on the prefixes that the search meets, for each path.

    ``own search`` is what stands in its place there: the scores of the children of the running beams. What follows
    in each path is not counted: the best of these few, or the best of K x V masked scores.
    """
    items_BK, _ = constrained_beam_search(
        setting.model, setting.inputs_BS, setting.mask_BS, setting.trie, setting.num_beams
    )
    labels = setting.trie.label_IT[items_BK.flatten()].clamp(min=0)
    rows_RT = torch.cat([torch.zeros(len(labels), 1, dtype=torch.long), labels], 1)
    score_RV = torch.log_softmax(torch.randn(len(labels), setting.model.config.vocab_size), -1)
    stock: Any = PrefixConstrainedLogitsProcessor(DictTrie(setting.ids).allowed, setting.num_beams)
    totals = dict.fromkeys(("prefix_allowed_tokens_fn", "own search"), 0.0)
    steps = range(1, setting.trie.max_length)
    for step in steps:
        prefix_RT = rows_RT[:, :step]
        node_R = setting.trie.walk(prefix_RT[:, 1:]).clamp(min=0)
        totals["prefix_allowed_tokens_fn"] += seconds(lambda prefix=prefix_RT: stock(prefix, score_RV), repeats)
        totals["own search"] += seconds(lambda node=node_R: candidates(setting, node, score_RV), repeats)
    return {name: total / len(steps) for name, total in totals.items()}


def candidates(setting: Setting, node_R: Tensor, score_RV: Tensor) -> Tensor:
    """Scores of the children of all beams, as the search collects them instead of masking the others."""
    child = setting.trie.children(node_R)
    return score_RV[child.row_C, child.token_C]


def measure(name: str, arguments: argparse.Namespace) -> list[str]:
    setting = make_setting(name, arguments.items, arguments.users, arguments.beams, arguments.input_length)

    def ours() -> tuple[Tensor, Tensor]:
        return constrained_beam_search(
            setting.model, setting.inputs_BS, setting.mask_BS, setting.trie, setting.num_beams
        )

    def stock() -> tuple[Tensor, Tensor]:
        return hugging_face(setting, prefix_allowed_tokens_fn=DictTrie(setting.ids).allowed)

    with evaluating(setting.model):
        found = ours()
        exchanged = assert_equal_results(found, stock())
        print(f"{name}: equal results ({exchanged} exchanged ties)")
        mask = mask_seconds(setting, arguments.repeats)
        whole = {
            "prefix_allowed_tokens_fn": seconds(stock, arguments.repeats),
            "own search": seconds(ours, arguments.repeats),
        }
    base_mask, base_whole = mask["prefix_allowed_tokens_fn"], whole["prefix_allowed_tokens_fn"]
    return [
        f"| {name} | {path} | {1000 * mask[path]:.2f} | {base_mask / mask[path]:.1f} | {whole[path]:.3f} "
        f"| {arguments.users / whole[path]:.1f} | {base_whole / whole[path]:.1f} |"
        for path in whole
    ]


def heading(arguments: argparse.Namespace) -> list[str]:
    setting = {name: value for name, value in vars(arguments).items() if name != "output"}
    return [
        "# Constrained decoding",
        "",
        *provenance.heading("decode.py", torch.get_num_threads()),
        f"- Setting: {json.dumps(setting)}, random weights, IDs of 2 to 5 tokens, length_penalty 0",
        "",
        "Equal results were asserted first. The mask column is the mean over the decode steps, on the same prefixes; "
        "for the own search it is what it does instead of masking (collecting the scores of the beams' children).",
        "",
        "| model | path | mask, ms a step | times faster | whole search, s | users a second | times faster |",
        "|---|---|---|---|---|---|---|",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=5000, help="catalogue size")
    parser.add_argument("--users", type=int, default=32, help="users decoded together")
    parser.add_argument("--beams", type=int, default=10, help="beams a user")
    parser.add_argument("--input_length", type=int, default=128, help="tokens of the longest input")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls; the shortest counts")
    parser.add_argument("--output", type=Path, default=None, help="Markdown file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = heading(arguments)
    for name in MODELS:
        lines += measure(name, arguments)
    print("\n".join(lines))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
