"""Speed and memory of decoder-only backbones against the plain way: decoding and training.

    python benchmarks/decoder_speed.py [--sizes small,smollm2] [--output benchmarks/results/DATE-decoder-speed.md]

Decoding: `constrained_beam_search` against ``generate(prefix_allowed_tokens_fn)`` of transformers. Training: one pass
that trains every item of a history, plain and with gradient checkpointing, against one pass for every target.
Both first have to give the same items and the same loss. Every timing runs in a process of its own, whose largest
resident memory is given; weights, inputs and catalogue are random. Full and half depth.

Shapes: B users, K beams, V vocabulary.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import provenance
import torch
from decode import EOS, DictTrie, assert_equal_results
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from distill.pairing import build_student
from fedecider.running.options import run
from idgen.backbones.family import TokenBatch, evaluating, num_targets
from idgen.decode import constrained_beam_search
from idgen.training import checkpointed, sequence_loss
from idgen.trie import IGNORED_LABEL, Trie

SIZES: dict[str, dict[str, int]] = {
    "small": {"vocab_size": 12_700, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 2},
    "smollm2": {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3},
}  # fmt: skip
HEADING = 12
ITEM_TOKENS = (2, 8)


class Case(NamedTuple):
    """What a process of its own measures."""

    size: str
    half: bool
    job: str
    num_users: int
    num_beams: int
    num_items: int
    num_history: int
    precision: str


def model_of(case: Case) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[case.size], tie_word_embeddings=True, pad_token_id=0, eos_token_id=EOS)
    model = LlamaForCausalLM(config)
    return build_student(model) if case.half else model


def catalogue(case: Case) -> list[list[int]]:
    """IDs of 2 to 8 tokens whose first token is one of 500; one token each for the small model."""
    rng, vocab_size = random.Random(0), SIZES[case.size]["vocab_size"]
    if case.size == "small":
        return [[token] for token in rng.sample(range(3, vocab_size), case.num_items)]
    ids: set[tuple[int, ...]] = set()
    while len(ids) < case.num_items:
        rest = (rng.randrange(3, vocab_size) for _ in range(rng.randrange(ITEM_TOKENS[0], ITEM_TOKENS[1] + 1) - 1))
        ids.add((rng.randrange(3, 503), *rest))
    return [list(tokens) for tokens in sorted(ids)]


def rows_of(case: Case, ids: list[list[int]]) -> list[list[list[int]]]:
    """For each user a heading and the closed IDs of a history of 2 to ``num_history`` items."""
    rng = random.Random(1)
    heading = [rng.randrange(3, 500) for _ in range(HEADING)]
    end = [] if case.size == "small" else [EOS]
    lengths = [rng.randrange(2, case.num_history + 1) for _ in range(case.num_users)]
    chosen = [[rng.choice(ids) for _ in range(length)] for length in lengths]
    return [[heading if end else [], *([*tokens, *end] for tokens in history)] for history in chosen]


def padded(rows: list[list[int]], fill: int = 0, left: bool = False) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor(
        [[fill] * (longest - len(row)) + row if left else row + [fill] * (longest - len(row)) for row in rows]
    )


def every_target(rows: list[list[list[int]]]) -> TokenBatch:
    flat = [[token for part in row for token in part] for row in rows]
    given = [len(row[0]) + len(row[1]) for row in rows]
    labels = [[IGNORED_LABEL] * number + row[number:] for number, row in zip(given, flat, strict=True)]
    return {
        "input_ids": padded(flat),
        "attention_mask": padded([[1] * len(row) for row in flat]),
        "row_labels": padded(labels, IGNORED_LABEL),
    }


def one_target(rows: list[list[list[int]]]) -> list[TokenBatch]:
    """A batch for every place of the histories: prompts up to there, and one target each."""
    batches = []
    for place in range(2, max(map(len, rows))):
        there = [row for row in rows if len(row) > place]
        prompts = [[token for part in row[:place] for token in part] for row in there]
        batches.append(
            {
                "input_ids": padded(prompts),
                "attention_mask": padded([[1] * len(prompt) for prompt in prompts]),
                "labels": padded([row[place] for row in there], IGNORED_LABEL),
            }
        )
    return batches


def decoding(case: Case, model: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    ids = catalogue(case)
    end = None if case.size == "small" else EOS
    prompts = [[token for part in row for token in part] for row in rows_of(case, ids)]
    trie, dicts = Trie.build(ids, end), DictTrie(ids if end else [])
    if case.job == "own search":
        inputs, mask = padded(prompts), padded([[1] * len(prompt) for prompt in prompts])
        return lambda: constrained_beam_search(model, inputs, mask, trie, case.num_beams)
    inputs, mask = padded(prompts, left=True), padded([[1] * len(prompt) for prompt in prompts], left=True)
    first, item_of = inputs.shape[1], {tuple(tokens): item for item, tokens in enumerate(ids)}

    def generate() -> tuple[Tensor, Tensor]:
        allowed = [tokens[0] for tokens in ids]
        output = model.generate(
            input_ids=inputs,
            attention_mask=mask,
            num_beams=case.num_beams,
            num_return_sequences=case.num_beams,
            max_new_tokens=trie.max_length,
            length_penalty=0.0,
            early_stopping="never",
            eos_token_id=end,
            return_dict_in_generate=True,
            output_scores=True,
            prefix_allowed_tokens_fn=lambda _, row: dicts.allowed(0, row[first - 1 :]) if end else allowed,
        )
        rows = [row[first:] for row in output.sequences.tolist()]
        items = [item_of[tuple(row[: row.index(EOS)] if end else row)] for row in rows]
        shape = (len(inputs), case.num_beams)
        return torch.tensor(items).view(shape), output.sequences_scores.view(shape)

    return generate


def training(case: Case, model: Any) -> tuple[Callable[[], float], int]:
    """A step over all users that returns the summed loss, and the number of target tokens."""
    rows = rows_of(case, catalogue(case))
    whole = every_target(rows)
    targets = num_targets(whole)
    batches = one_target(rows) if case.job == "one target a pass" else [whole]

    def step() -> float:
        model.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            with checkpointed(model, case.job == "gradient checkpointing"):
                with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
                    loss = sequence_loss(model, batch) * num_targets(batch)
                loss.backward()
            total += float(loss.detach())
        return total

    return step, targets


def timed(case: Case) -> tuple[float, float, int]:
    """CPU seconds, largest resident memory in MiB, and target tokens of one call, after a first one."""
    torch.set_num_threads(1)
    model, targets = model_of(case), 0
    call: Callable[[], Any]
    if case.job in DECODING:
        model = model.eval().to(torch.bfloat16 if case.precision == "bf16" else torch.float32)
        call = decoding(case, model)
    else:
        call, targets = training(case, model.train())
    with evaluating(model) if case.job in DECODING else torch.enable_grad():
        call()
        started = time.process_time()
        call()
        seconds = time.process_time() - started
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, targets


DECODING = ("generate, prefix_allowed_tokens_fn", "own search")
TRAINING = ("one target a pass", "every target", "gradient checkpointing")


def assert_equal(case: Case) -> None:
    """Both searches find the same items, all ways to train have the same loss; in fp32."""
    case = case._replace(precision="fp32", num_users=3, num_history=4)
    model = model_of(case).eval()
    with evaluating(model):
        plain, own = (decoding(case._replace(job=job), model)() for job in DECODING)
        assert_equal_results(own, plain)
    losses = [training(case._replace(job=job), model)[0]() for job in TRAINING]
    torch.testing.assert_close(torch.tensor(losses), torch.full((len(losses),), losses[0]), rtol=1e-4, atol=1e-3)


def measure(args: argparse.Namespace, size: str) -> list[str]:
    lines = []
    shared = {"num_items": args.items, "num_history": args.history, "precision": args.precision}
    for half in (False, True):
        case = Case(size, half, "", args.users, args.beams, **shared)
        assert_equal(case)
        for jobs in (DECODING, TRAINING):
            found = {}
            for job in jobs:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    found[job] = pool.apply(timed, (case._replace(job=job),))
            base = found[jobs[0]][0]
            for job, (seconds, memory, targets) in found.items():
                rate = f"{args.users / seconds:.2f}"
                tokens = f"{targets / seconds:.0f}" if targets else ""
                lines.append(
                    f"| {size} | {'half' if half else 'full'} | {job} | {seconds:.2f} | {rate} | {tokens} "
                    f"| {base / seconds:.1f} | {memory:.0f} |"
                )
                print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="small,smollm2")
    parser.add_argument("--users", type=int, default=8, help="users of a batch")
    parser.add_argument("--beams", type=int, default=10)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--history", type=int, default=10, help="items of the longest history")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Speed of decoder-only backbones",
        "",
        *provenance.heading("decoder_speed.py", 1),
        "",
        "Equal items and equal losses were asserted first, in fp32. CPU seconds of one call after a first one, one "
        "thread, at --precision; users a second in decoding, histories a second in training; memory: the largest of "
        "the process, libraries (about 400 MiB) included.",
        "",
        "| size | depth | what | CPU s | users a second | target tokens a second | times faster | MiB |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for size in args.sizes.split(","):
        lines += measure(args, size)
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
