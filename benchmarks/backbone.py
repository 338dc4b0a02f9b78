"""What makes a small T5 from scratch generalise: variants of one config, compared on the clients' validation items.

Every variant changes benchmarks/configs/amazon_t5.yaml in the way its row says, at an equal number of training samples.
Finished variants are reused from --cache, so an interrupted call goes on where it stopped. The test set is not read.

    PYTHONPATH=. python benchmarks/backbone.py --data data/amazon_cpu --max_steps 400 --output FILE.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import provenance
import torch

from fedecider.baselines.counts import COUNTS
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol
from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.prepare import Settings, client_tasks, load_data, load_ids, pretrain_stage
from fedecider.federation.record import read_json
from fedecider.running.options import run
from idgen.backbone import load_backbone
from idgen.ranking import rank_task
from idgen.tokenizer import load_tokenizer

WORDS = ["--pretrain.ids", "keywords"]
RANDOM = ["--pretrain.backbone.embedding_init", "random"]
VARIANTS = {
    "as configured": [],
    "random embeddings": RANDOM,
    "IDs of title words": WORDS,
    "IDs of title words, random embeddings": [*WORDS, *RANDOM],
    "no crops, item dropout or pairs": ["--pretrain.samples.pairs", "false", "--pretrain.samples.item_dropout", "0"],
    "learning rate 1e-3": ["--pretrain.train.learning_rate", "1e-3"],
    "natural prompts": ["--pretrain.samples.templates", "natural"],
}
METRICS = ("hit@10", "ndcg@10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(Path(__file__).resolve().parent / "configs" / "amazon_t5.yaml"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--cache", default=".cache")
    parser.add_argument("--max_steps", type=int, default=400, help="training steps of every variant")
    parser.add_argument("--only", default="", help="names of variants, separated by ';' (default: all)")
    parser.add_argument("--output", type=Path, required=True)
    words = parser.parse_args()
    names = words.only.split(";") if words.only else list(VARIANTS)
    common = ["--config", words.config, "--data", words.data, "--cache", words.cache]
    common += ["--pretrain.train.max_steps", str(words.max_steps)]
    settings = parse_settings("", common)
    torch.set_num_threads(settings.run.num_threads or torch.get_num_threads())
    lines = [*header(words, settings), *baseline_rows(settings)]
    for name in names:
        lines.append(row(name, parse_settings("", [*common, *VARIANTS[name]])))
        words.output.write_text("\n".join(lines) + "\n")
        print(lines[-1], flush=True)


def header(words: argparse.Namespace, settings: Settings) -> list[str]:
    domains = settings.run.domain_names
    return [
        "# A small T5 from scratch: what makes it generalise",
        "",
        *provenance.heading("backbone.py", torch.get_num_threads()),
        f"- Backbone before distillation, validation items of all client users, protocol {settings.run.protocol}; seed "
        f"{settings.run.seed}; {words.max_steps} steps of {settings.run.pretrain.train.batch_size} samples a variant",
        "- Cells: hit@10 / ndcg@10",
        "",
        f"| variant | {' | '.join(domains)} | training loss, nats a token | samples a second |",
        "|---|" + "---:|" * (len(domains) + 2),
    ]


def baseline_rows(settings: Settings) -> list[str]:
    protocol = get_protocol(settings.run.protocol)
    rows = []
    for name, count in COUNTS.items():
        cells = []
        for domain in load_data(settings.run).values():
            sequences, extra = domain.clients.sequences, domain.public.sequences
            cells.append(cell(mean_metrics(count(sequences, len(domain.item_keys), "valid", protocol, extra=extra))))
        rows.append(f"| *{name}* | {' | '.join(cells)} | | |")
    return rows


def row(name: str, settings: Settings) -> str:
    """Train (or reuse) one variant and rank the validation items of every client user."""
    domains, device = load_data(settings.run), torch.device("cpu")
    stage = pretrain_stage(settings.run, domains, device, quiet=True)
    tokenizer = load_tokenizer(stage.folder / "backbone")
    model = load_backbone(stage.folder / "backbone", tokenizer)
    ids = load_ids(stage.folder, domains, settings.run.pretrain)
    drop_seen = get_protocol(settings.run.protocol).drop_seen
    cells = []
    for task in client_tasks(domains, ids, tokenizer, settings.run.pretrain):
        positions = rank_task(model, task, task.trie, "valid", None, settings.ranking, drop_seen, "fp32", device)
        cells.append(cell(mean_metrics(positions)))
    last = read_json(stage.folder / "report.json")["backbone"][-1]
    return f"| {name} | {' | '.join(cells)} | {last['loss']:.2f} | {last['samples_per_s']:.0f} |"


def cell(metrics: dict[str, float]) -> str:
    return " / ".join(f"{metrics[name]:.3f}" for name in METRICS)


if __name__ == "__main__":
    sys.exit(run(main))
