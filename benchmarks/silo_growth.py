"""What K silos cost, for a mean and for directions: bytes, seconds of the server and of a training step, memory.

    python benchmarks/silo_growth.py [--sizes 10,40,160] [--output FILE]

A small decoder over one catalogue that all silos share, with adapters of rank 16 on every layer and the table.
Adapters are random: nothing here depends on what they hold. Bytes are those of ``fedecider.federation.wire``. Seconds
are medians of five, sizes in turn, so that a busy machine slows all of them alike. The last column is a fit of the
sizes, ``a + b K``, from which the plan for 1,000 silos in docs/scale.md is calculated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedecider.running.command import run

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import provenance
import torch

from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Download, Tree, Upload
from fedecider.federation.wire import measure, tensor_bytes
from fedecider.models.adapters import (
    Adapters,
    LoraSettings,
    adapter_shapes,
    attach_lora,
    fusion,
    initial_adapters,
    num_scalars,
    put,
    stack_trees,
)
from fedecider.models.directions import compact, normalise
from idgen.backbones.small_decoder import build_small_decoder
from idgen.losses import sequence_loss
from idgen.trie import IGNORED_LABEL

ITEMS, WIDTH, RANK, REPEATS = 4_000, 128, 16, 5


def median_seconds(
    sizes: Sequence[int], work: Callable[[int], object], before: Callable[[int], object] = lambda size: None
) -> dict[int, float]:
    """Size -> median seconds of ``work``, sizes in turn after one unmeasured pass."""
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(REPEATS + 1):
        for size in sizes:
            before(size)
            started = time.perf_counter()
            work(size)
            if repeat:
                seconds[size].append(time.perf_counter() - started)
    return {size: statistics.median(values) for size, values in seconds.items()}


def line_through(values: dict[int, float]) -> str:
    """``a + b K`` by least squares."""
    slope, start = np.polyfit(list(values), list(values.values()), 1)
    return f"{start:.3g} + {slope:.3g} K"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,40,160", help="numbers of silos, separated by commas")
    parser.add_argument("--output", default="", help="the Markdown file; if empty, it is printed alone")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    generator = torch.Generator().manual_seed(0)
    table_VD = torch.randn(ITEMS, WIDTH, generator=generator)
    model = build_small_decoder(table_VD, num_layers=2, num_heads=2, d_ff=512, max_tokens=32, padding=0)
    model = attach_lora(model, LoraSettings(RANK, ("attention", "feed_forward", "table")))
    start = initial_adapters(adapter_shapes(model), 0)
    pair = {name: 0.01 * torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
    upload = Upload(torch.zeros(1, dtype=torch.long), torch.ones(1), stack_trees([pair]))
    stacks: dict[int, Tree] = {size: normalise(stack_trees([pair] * size)).tree for size in sizes}

    def mean(size: int) -> None:
        weighted_mean((upload for _ in range(size)), fallback=start)

    def directions(size: int) -> None:
        for _ in range(size):
            normalise(upload.tensors)

    item_BS = torch.randint(3, ITEMS, (64, 20), generator=generator)
    labels_BS = torch.cat([torch.full((64, 1), IGNORED_LABEL), item_BS[:, 1:]], 1)
    batch = {"input_ids": item_BS, "attention_mask": torch.ones_like(item_BS), "row_labels": labels_BS}

    def adapters_of(size: int) -> Adapters:
        return fusion(stacks[size], 0, torch.ones(size)) if size else Adapters(pair)

    def load(size: int) -> None:
        put(model, adapters_of(size))

    def step(size: int) -> None:
        sequence_loss(model, batch).backward()

    down = {size: measure(Download(stacks[size]), upload)[0].bytes_down / 1e6 for size in sizes}
    one = measure(Download(start), upload)[0]
    held = {size: sum(map(tensor_bytes, stacks[size].values())) / 1e6 for size in sizes}

    def simulated(size: int) -> float:
        """MB of a client's row of the state: its direction, its own pair, and the whole update at the least rank."""
        factors = compact(adapters_of(size).factors())
        return (2 * one.bytes_up + sum(map(tensor_bytes, factors.values()))) / 1e6

    mean_s, unit_s = median_seconds(sizes, mean), median_seconds(sizes, directions)
    step_s = median_seconds([0, *sizes], step, before=load)
    plain = step_s.pop(0)
    rows: list[tuple[str, dict[int, float]]] = [
        ("mean: MB down and up, a client and round", dict.fromkeys(sizes, one.bytes_up / 1e6)),
        ("directions: MB down, a client and round", down),
        ("directions: MB that a client holds", held),
        ("directions: MB of a client in a simulation", {size: simulated(size) for size in sizes}),
        ("mean: server, seconds a round", mean_s),
        ("directions: server, seconds a round", unit_s),
        ("directions: a client's training step, times that of plain LoRA", {k: s / plain for k, s in step_s.items()}),
    ]
    lines = [
        "# What K silos cost",
        "",
        *provenance.heading("silo_growth.py", torch.get_num_threads()),
        f"- Shape: {ITEMS} items, width {WIDTH}, 2 layers, rank {RANK}: {num_scalars(start):,} scalars an adapter",
        "",
        "| | " + " | ".join(f"K = {size}" for size in sizes) + " | fit |",
        "|---|" + "---:|" * (len(sizes) + 1),
        *(
            f"| {name} | " + " | ".join(f"{values[size]:.3g}" for size in sizes) + f" | {line_through(values)} |"
            for name, values in rows
        ),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    sys.exit(run(main))
