"""Cost of a training step over K fused directions against a plain PEFT LoRA step of the same own rank.

Run: python benchmarks/fusion.py [--output FILE.md]; its table is a section of benchmarks/results/speed.md
Outputs and gradients first have to equal those of PEFT's own concatenated adapter (``add_weighted_adapter`` with
``combination_type="cat"``). Then whole training steps (forward, backward, clipping, AdamW) are timed in turn, so that
a busy machine slows all paths alike, and the peak memory of each path is read in a process of its own. Weights and
inputs are random. Targets: K = 3 at most 1.25 times the plain step, K = 8 at most 1.5 times, memory at most 1.2 times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.running.command import run

os.environ.setdefault("OMP_NUM_THREADS", "1")

import provenance
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from fedecider.federation.method import Tree
from fedecider.models.adapters import (
    Adapters,
    LoraSettings,
    adapter_parameters,
    adapter_shapes,
    attach_lora,
    client_order,
    fusion,
    put,
)
from fedecider.models.fused_linear import fused_layers

RANK = 8
TARGETS = ["q", "k", "v", "o"]


class Size(NamedTuple):
    """A T5 and the batches it is trained on."""

    vocab_size: int
    d_model: int
    num_heads: int
    d_kv: int
    d_ff: int
    num_layers: int
    batch_size: int
    source: int = 128
    target: int = 16


SIZES = {
    "small": Size(4_000, 128, 4, 32, 512, 2, 64),
    "t5-small half": Size(32_128, 512, 8, 64, 2048, 3, 16),
}


class Path_(NamedTuple):
    """One way to do a step: the model, what it trains, and a step over a batch."""

    model: nn.Module
    parameters: list[nn.Parameter]


def backbone(size: Size) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=size.vocab_size,
        d_model=size.d_model,
        num_heads=size.num_heads,
        d_kv=size.d_kv,
        d_ff=size.d_ff,
        num_layers=size.num_layers,
        num_decoder_layers=size.num_layers,
        dropout_rate=0.0,
        decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
    )
    return T5ForConditionalGeneration(config)


def random_batch(size: Size) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (size.batch_size, size.source)
    return {
        "input_ids": torch.randint(3, size.vocab_size, shape, generator=generator),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": torch.randint(3, size.vocab_size, (size.batch_size, size.target), generator=generator),
    }


def random_directions(model: nn.Module, num_clients: int) -> Tree:
    generator = torch.Generator().manual_seed(2)
    tree: Tree = {}
    for name, shape in adapter_shapes(model).items():
        tree[f"{name}.lora_a"] = torch.randn(num_clients, shape.rank, shape.in_features, generator=generator)
        tree[f"{name}.lora_b"] = torch.randn(num_clients, shape.out_features, shape.rank, generator=generator)
    return {key: 0.02 * tensor for key, tensor in tree.items()}


def stock(size: Size, rank: int = RANK) -> Path_:
    """PEFT's own LoRA layers."""
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS, task_type="SEQ_2_SEQ_LM")
    model = get_peft_model(backbone(size), config)
    return Path_(model, [parameter for parameter in model.parameters() if parameter.requires_grad])


def plain(size: Size) -> Path_:
    model = attach_lora(backbone(size), LoraSettings(RANK))
    put(model, Adapters({key: tensor[0] for key, tensor in random_directions(model, 1).items()}))
    return Path_(model, adapter_parameters(model))


def fused(size: Size, num_clients: int) -> Path_:
    model = attach_lora(backbone(size), LoraSettings(RANK))
    directions = random_directions(model, num_clients)
    alpha = put(model, fusion(directions, num_clients // 2, torch.full((num_clients,), 2.0)))
    return Path_(model, [*adapter_parameters(model), alpha])


PATHS: dict[str, Callable[[Size], Path_]] = {
    "PEFT LoRA": stock,
    "own layer, plain": plain,
    "own layer, K = 3": lambda size: fused(size, 3),
    "own layer, K = 8": lambda size: fused(size, 8),
    "PEFT LoRA of rank 3 r, all trained": lambda size: stock(size, 3 * RANK),
}


def step(path: Path_, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    optimizer.zero_grad(set_to_none=True)
    path.model(**batch).loss.backward()
    nn.utils.clip_grad_norm_(path.parameters, 1.0)
    optimizer.step()


def optimizer_of(path: Path_) -> torch.optim.Optimizer:
    return torch.optim.AdamW(path.parameters, lr=1e-3, weight_decay=0.0, fused=True)


def assert_equal(size: Size, num_clients: int) -> None:
    """Logits, own gradients and weight gradients against PEFT's concatenation of all K adapters."""
    batch, own = random_batch(size._replace(batch_size=4)), num_clients // 2
    model = attach_lora(backbone(size), LoraSettings(RANK))
    directions = random_directions(model, num_clients)
    alpha_K = torch.linspace(-1.5, 2.0, num_clients)
    alpha = put(model, fusion(directions, own, alpha_K))
    output = model(**batch)
    output.loss.backward()

    other: Any = stock(size).model
    names = [f"client{client}" for client in range(num_clients)]
    for client, name in enumerate(names):
        other.add_adapter(name, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="SEQ_2_SEQ_LM"))
        _copy(other, name, {key: tensor[client] for key, tensor in directions.items()})
    other.add_weighted_adapter(names, alpha_K.tolist(), "cat", combination_type="cat")
    other.set_adapter("cat")
    wanted = other(**batch)
    wanted.loss.backward()
    torch.testing.assert_close(output.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    alpha_grad = torch.zeros(num_clients)
    rows = slice(own * RANK, (own + 1) * RANK)
    for name, layer in fused_layers(model).items():
        cat = other.get_base_model().get_submodule(name)
        grad_a, grad_b = cat.lora_A["cat"].weight.grad, cat.lora_B["cat"].weight.grad
        own_a, own_b = layer.own_pair()
        # PEFT folds the weights into A: A_cat = [alpha_j A_j], B_cat = [B_j]
        _assert_close(own_a.grad, alpha_K[own] * grad_a[rows])
        _assert_close(own_b.grad, grad_b[:, rows])
        products = (grad_a * directions[f"{name}.lora_a"].flatten(0, 1)).sum(1)
        alpha_grad += products.view(num_clients, RANK).sum(1)
    assert alpha.grad is not None
    _assert_close(client_order(alpha.grad, own), alpha_grad)


def _assert_close(found: Tensor | None, wanted: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()) + 1e-8)


@torch.no_grad()
def _copy(model: Any, adapter: str, tree: Tree) -> None:
    base = model.get_base_model()
    for key, tensor in tree.items():
        name, factor = key.rsplit(".", 1)
        layer = base.get_submodule(name)
        {"lora_a": layer.lora_A, "lora_b": layer.lora_B}[factor][adapter].weight.copy_(tensor)


def time_steps(size: Size, repeats: int) -> dict[str, list[float]]:
    """Seconds of every timed step, the paths taking turns; the first round is thrown away."""
    batch, seconds = random_batch(size), {name: [] for name in PATHS}
    ready = {name: make(size) for name, make in PATHS.items()}
    optimizers = {name: optimizer_of(path) for name, path in ready.items()}
    for repeat in range(repeats + 1):
        for name, path in ready.items():
            started = time.perf_counter()
            step(path, optimizers[name], batch)
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def peak_memory(size_name: str, path_name: str) -> float:
    """MiB that three steps need beyond the process with the model in memory, in a process of their own."""
    command = [sys.executable, __file__, "--probe", size_name, path_name]
    found = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    return min(float(output.split()[-1]) for output in found)


def probe(size_name: str, path_name: str) -> None:
    size = SIZES[size_name]
    path, batch = PATHS[path_name](size), random_batch(size)
    optimizer = optimizer_of(path)
    before = _status("VmRSS")
    for _ in range(3):
        step(path, optimizer, batch)
    print((_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    """Kilobytes from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measure(size_name: str, repeats: int) -> list[str]:
    size = SIZES[size_name]
    for num_clients in (3, 8):
        assert_equal(size, num_clients)
    seconds = time_steps(size, repeats)
    peak_mib = {name: peak_memory(size_name, name) for name in PATHS}
    base_s, base_mib = seconds["PEFT LoRA"], peak_mib["PEFT LoRA"]
    lines = []
    for name, path_s in seconds.items():
        ratio = statistics.median(mine / other for mine, other in zip(path_s, base_s, strict=True))
        mib = peak_mib[name]
        lines.append(
            f"| {size_name} | {name} | {1000 * min(path_s):.1f} | {1000 * statistics.median(path_s):.1f} "
            f"| {min(path_s) / min(base_s):.3f} | {ratio:.3f} | {mib:.0f} | {mib / base_mib:.3f} |"
        )
    return lines


def heading(repeats: int) -> list[str]:
    sizes = {name: size._asdict() for name, size in SIZES.items()}
    return [
        "# Fusion of K directions in training",
        "",
        *provenance.heading("fusion.py", torch.get_num_threads()),
        f"- Models and batches: {json.dumps(sizes)}; fp32, LoRA rank {RANK} on q, k, v, o, {repeats} timed steps",
        "",
        "Logits and gradients of K = 3 and K = 8 were first asserted equal to PEFT's concatenated adapter. A step is",
        "forward, backward, clipping and AdamW; the paths take turns. Ratios are to PEFT LoRA: of the fastest steps,",
        "and the median over turns. Memory is what three steps add to the process at its peak, the lower of two runs.",
        "",
        "| model | path | fastest, ms | median, ms | ratio of fastest | median ratio | peak memory, MiB | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=12, help="timed steps of every path")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="models to measure")
    parser.add_argument("--probe", nargs=2, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=None, help="Markdown file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.probe:
        probe(*arguments.probe)
        return
    lines = heading(arguments.repeats)
    for name in arguments.sizes:
        lines += measure(name, arguments.repeats)
    print("\n".join(lines))
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
