"""A frozen base in fp32, nf4 and int8: size, seconds of a LoRA step, and how far logits and directions are from fp32's.

Run: PYTHONPATH=. python benchmarks/quantized.py --backbone FOLDER --output benchmarks/results/DATE-quantised-bases.md
The backbone is a decoder-only folder with its tokenizer; needs bitsandbytes. Every format runs in a process of its own,
trains the same adapters from the same start on the same item texts, and asserts first that an evaluation came before
the first step, that every factor B then got a gradient, and that the loss falls.

Shapes: B texts, W tokens, V vocabulary, M modules.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import provenance
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fedecider.data.sample import sample_domains
from fedecider.models.adapters import (
    LoraSettings,
    adapter_shapes,
    attach_lora,
    initial_adapters,
    load_plain,
    module_names,
    named_factors,
    read_adapters,
)
from fedecider.models.export import load_adapter, save_peft_folder
from fedecider.running.options import run
from idgen.backbone import load_backbone
from idgen.backbones.families import unwrap
from idgen.tokenizer import load_tokenizer
from idgen.training import sequence_loss

FORMATS = {"fp32": "none", "nf4": "nf4", "int8": "int8"}


def stored_bytes(model: nn.Module) -> int:
    """Of all weights, tied ones once, with the scales of quantised ones."""
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    total = sum(tensor.nbytes for tensor in tensors.values())
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            total += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
        scale = getattr(getattr(module, "weight", None), "SCB", None)
        total += 0 if scale is None else scale.nbytes
    return total


def texts(tokenizer: Any, count: int) -> dict[str, Tensor]:
    """A batch of item texts of the embedded sample, every token a target."""
    (domain,) = sample_domains(["crime"]).values()
    rows = tokenizer(domain.item_texts[:count], padding=True, truncation=True, max_length=48, return_tensors="pt")
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    labels[:, 0] = -100
    return {**{name: rows[name] for name in ("input_ids", "attention_mask")}, "row_labels": labels}


def measure(backbone: Path, format: str, steps: int, folder: Path) -> None:
    """Everything of one format into ``folder``."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(backbone)
    started = time.perf_counter()
    base = load_backbone(backbone, tokenizer, FORMATS[format])  # type: ignore[arg-type]
    load_s, size = time.perf_counter() - started, stored_bytes(base)
    model = attach_lora(base, LoraSettings(8, ("attention", "feed_forward")))
    load_plain(model, initial_adapters(adapter_shapes(model), 0))
    batch = texts(tokenizer, 4)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logit_BWV = unwrap(model.eval())(**inputs).logits[batch["attention_mask"] != 0]
    named = named_factors(model.train())
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3, weight_decay=0.0)
    losses, seconds = [], []
    for step in range(steps):
        started = time.perf_counter()
        loss = sequence_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert all(bool(factor.grad.any()) for name, factor in named.items() if name.endswith("lora_b"))
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
    tree, peak = read_adapters(model), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with torch.no_grad():
        end = float(sequence_loss(model.eval(), batch))
    save_file({"logits": logit_BWV.contiguous(), **tree}, folder / f"{format}.safetensors")
    save_peft_folder(tree, folder, str(backbone), "CAUSAL_LM")
    on_fp32 = load_adapter(AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32), folder).eval()
    with torch.no_grad():
        moved = float(sequence_loss(on_fp32, batch))
    result = {
        "peak": peak,
        "size": size,
        "load_s": load_s,
        "step_s": sorted(seconds[1:])[len(seconds[1:]) // 2],
        "losses": losses,
        "end": end,
        "on_fp32": moved,
    }
    (folder / f"{format}.json").write_text(json.dumps(result))


def distances(exact: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """Of logits: relative, and share of equal first tokens; of updates ``B A``: cosines, and ratios of norms."""
    logit_BWV, other_BWV = exact["logits"], found["logits"]
    names = module_names({name: tensor for name, tensor in exact.items() if name != "logits"})
    update, other = ([one[f"{n}.lora_b"] @ one[f"{n}.lora_a"] for n in names] for one in (exact, found))
    pairs = list(zip(update, other, strict=True))
    cosine_M = torch.stack([torch.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in pairs])
    ratio_M = torch.stack([b.norm() / a.norm() for a, b in pairs])
    return {
        "relative": float((other_BWV - logit_BWV).norm() / logit_BWV.norm()),
        "first": float((logit_BWV.argmax(1) == other_BWV.argmax(1)).float().mean()),
        "cosine": float(cosine_M.mean()),
        "least_cosine": float(cosine_M.min()),
        "ratio": float(ratio_M.mean()),
    }


def table(folder: Path, formats: list[str]) -> list[str]:
    lines = [
        "| base | weights, MB | peak, MB | loading, s | LoRA step, s | loss, first and last step | loss afterwards, on "
        "this base and on fp32 | logits, relative distance | same first token | directions, mean (least) cosine | "
        "norms, ratio |",
        "|---|---:|---:|---:|---:|---|---|---:|---:|---|---:|",
    ]
    exact = load_file(folder / "fp32.safetensors")
    for format in formats:
        one = json.loads((folder / f"{format}.json").read_text())
        away = distances(exact, load_file(folder / f"{format}.safetensors"))
        cells = (
            format,
            f"{one['size'] / 1e6:.1f}",
            f"{one['peak'] / 1e6:.0f}",
            f"{one['load_s']:.1f}",
            f"{one['step_s']:.2f}",
            f"{one['losses'][0]:.4f}, {one['losses'][-1]:.4f}",
            f"{one['end']:.4f}, {one['on_fp32']:.4f}",
            f"{away['relative']:.4f}",
            f"{away['first']:.3f}",
            f"{away['cosine']:.4f} ({away['least_cosine']:.4f})",
            f"{away['ratio']:.4f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", type=Path, required=True, help="folder of a decoder-only model")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path, default=None, help="Markdown file to write; it must not exist yet")
    parser.add_argument("--one", nargs=2, default=None, metavar=("FORMAT", "FOLDER"), help="for its own processes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.one:
        measure(arguments.backbone, arguments.one[0], arguments.steps, Path(arguments.one[1]))
        return
    package = f"- bitsandbytes {importlib.metadata.version('bitsandbytes')}"
    lines = ["# Quantised bases", "", *provenance.heading("quantized.py", 1), package, ""]
    with tempfile.TemporaryDirectory() as folder:
        for format in FORMATS:
            subprocess.run([sys.executable, *sys.argv, "--one", format, folder], check=True)
        lines += table(Path(folder), list(FORMATS))
    print("\n".join(lines))
    if arguments.output is not None:
        with arguments.output.open("x") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
