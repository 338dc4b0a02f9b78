"""Seconds of training against ndcg@10: what a backbone makes of public events, and of all clients' events pooled.

    python benchmarks/learning_curves.py --data <prepared> --rows decoder,t5,t5_text,sasrec --events public \
      --minutes 5 --folder curves [--output benchmarks/results/DATE-learning-curves.md]

One model for all domains (SASRec: one a domain). ``public`` trains on item texts and public users, ``pooled`` also on
the train parts of all clients, which no federation could beat and no silo could do. Seconds are CPU seconds of forward,
backward and optimiser (of SASRec: of whole epochs). Every curve is a file below --folder that a later call takes up, so
that a long table can be made in pieces. Rows are files of ``benchmarks/configs`` with the changes below. Validation
items choose the point whose test metrics are shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import heading
from torch import Tensor

from fedecider.baselines import sasrec
from fedecider.baselines.counts import decayed_cooccurrence, text_and_count_scores, text_neighbour_scores
from fedecider.data.domain import Domain
from fedecider.data.store import load_domains
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol, rank_held_out
from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.prepare import Settings, begin, client_tasks
from fedecider.federation.record import read_json, write_json
from fedecider.federation.streams import derive_seed, stream
from fedecider.models.item_texts import encoded_texts
from fedecider.running.options import run
from idgen.ranking import eval_users, rank_task
from idgen.samples import Task, num_batches, train_batches
from idgen.training import (
    CLIP_NORM,
    STAGE_ONE_COURSE,
    epoch_generator,
    learning_rate_factor,
    make_optimizer,
    parameter_groups,
    sequence_loss,
)

CONFIGS = Path(__file__).resolve().parent / "configs"
ROWS: dict[str, tuple[str, list[str]]] = {
    "decoder": ("amazon_decoder.yaml", []),
    "t5": ("amazon_t5.yaml", []),
    "t5_text": (
        "amazon_t5.yaml",
        ["--pretrain.backbone.embedding_init", "text", "--pretrain.samples.walk_share", "0.5"],
    ),
}
METRICS = ("hit@10", "ndcg@10")
Scores = dict[str, float]


def settings_of(row: str, args: argparse.Namespace) -> Settings:
    file, changes = ROWS[row]
    words = ["--config", str(CONFIGS / file), "--data", args.data, "--domains", args.domains, "--cache", args.cache]
    return parse_settings(
        "", [*words, "--seed", str(args.seed), "--pretrain.text_encoder", args.encoder, *changes, *args.set]
    )


def macro(found: Sequence[Mapping[str, float]]) -> Scores:
    return {metric: float(np.mean([one[metric] for one in found])) for metric in METRICS}


def evaluated(model: Any, tasks: Sequence[Task], settings: Settings, split: str, num_users: int) -> Scores:
    """Mean over domains; of a sample of the users on validation, of all on test."""
    protocol, device = get_protocol(settings.run.protocol), torch.device("cpu")
    found = []
    for task in tasks:
        users = eval_users(task, split, num_users, stream(settings.run.seed, "eval_users", task.name))
        position_U = rank_task(
            model, task, task.trie, split, users, settings.ranking, protocol.drop_seen, "fp32", device
        )
        found.append(mean_metrics(position_U, (10,)))
    return macro(found)


def backbone_curve(row: str, args: argparse.Namespace, domains: Mapping[str, Domain]) -> Iterator[dict[str, Any]]:
    """Points from the start until the seconds are spent. The learning rate follows the seconds, not the steps."""
    settings = settings_of(row, args)
    made = begin(settings.run, domains, torch.device("cpu"))
    clients = client_tasks(domains, made.ids, made.tokenizer, settings.run.pretrain)
    tasks = [*made.tasks, *clients] if args.events == "pooled" else made.tasks
    model, config, budget = made.model, settings.run.pretrain.train, 60.0 * args.minutes
    groups = parameter_groups(model, config.learning_rate, STAGE_ONE_COURSE, config.table_lr_multiplier)
    optimiser = make_optimizer(groups, config.learning_rate, STAGE_ONE_COURSE)
    spent, step, due = 0.0, 0, 0.0
    seed = derive_seed(settings.run.seed, "learning curve")
    torch.manual_seed(seed)
    while True:
        for batch in batches_of(tasks, config.batch_size, seed, step):
            if spent >= due or spent >= budget:
                point = {"step": step, "seconds": spent}
                for split in ("valid", "test"):
                    point[split] = evaluated(model, clients, settings, split, args.valid_users)
                yield point
                due = spent + budget / args.points
            if spent >= budget:
                return
            model.train()
            started = time.process_time()
            done = min(spent / budget, 1.0)
            factor = learning_rate_factor(int(done * 1000), 1000, STAGE_ONE_COURSE)
            for group in optimiser.param_groups:
                group["lr"] = group["full_lr"] * factor
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
                loss = sequence_loss(model, batch)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimiser.step()
            model.eval()
            spent, step = spent + time.process_time() - started, step + 1


def batches_of(tasks: Sequence[Task], batch_size: int, seed: int, step: int) -> Iterator[dict[str, Tensor]]:
    epoch = step // num_batches(tasks, batch_size)
    return train_batches(tasks, batch_size, epoch_generator(seed, epoch))


def sasrec_curve(args: argparse.Namespace, domains: Mapping[str, Domain]) -> Iterator[dict[str, Any]]:
    """A model of its own for every domain, all with equal shares of the seconds, which are added up."""
    budget = 60.0 * args.minutes / len(domains)
    curves = [list(_sasrec_of(domain, args, budget)) for domain in domains.values()]
    for points in zip(*curves, strict=True):
        sums = {name: sum(point[name] for point in points) for name in ("step", "seconds")}
        yield {**sums, **{split: macro([point[split] for point in points]) for split in ("valid", "test")}}


def _sasrec_of(domain: Domain, args: argparse.Namespace, budget: float) -> Iterator[dict[str, Any]]:
    config = sasrec.SasrecConfig()
    clients, num_items = domain.clients.sequences, len(domain.item_keys)
    trained = clients if args.events == "pooled" else []
    item_SL, length_S = sasrec.training_sequences(trained, num_items, domain.public.sequences, config.max_length)
    torch.manual_seed(derive_seed(args.seed, "sasrec", domain.name))
    model = sasrec.Sasrec(num_items, config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)
    spent, step = 0.0, 0
    for number in range(args.points + 1):
        while spent < number * budget / args.points:
            started = time.process_time()
            for row_B in torch.randperm(len(item_SL)).split(config.batch_size):
                length_B = length_S[row_B]
                optimiser.zero_grad()
                rows_BL = item_SL[row_B, : int(length_B.max())]
                sasrec.backward_next_items(model, rows_BL, length_B, config.dropout)
                optimiser.step()
                step += 1
            spent += time.process_time() - started
        scores = {split: sasrec.scores(model, clients, split) for split in ("valid", "test")}
        found = {
            split: mean_metrics(rank_held_out(score, clients, num_items, split), (10,))
            for split, score in scores.items()
        }
        yield {"step": step, "seconds": spent, **found}


def baselines(args: argparse.Namespace, domains: Mapping[str, Domain]) -> dict[str, Scores]:
    """Rules without training, on the test items; counts see the public pool and the clients' train parts."""
    encoded = encoded_texts(domains, args.encoder, args.cache)
    text, counts, both = [], [], []
    for name, domain in domains.items():
        vector_IE = encoded[name]
        clients, public, num_items = domain.clients.sequences, domain.public.sequences, len(domain.item_keys)
        score = text_neighbour_scores(vector_IE, clients, "test")
        text.append(mean_metrics(rank_held_out(score, clients, num_items, "test"), (10,)))
        counts.append(mean_metrics(decayed_cooccurrence(clients, num_items, "test", extra=public), (10,)))
        score = text_and_count_scores(vector_IE, clients, "test", public)
        both.append(mean_metrics(rank_held_out(score, clients, num_items, "test"), (10,)))
    return {
        "text neighbours": macro(text),
        "decayed co-occurrence": macro(counts),
        "text neighbours + counts": macro(both),
    }


def curve(row: str, args: argparse.Namespace, domains: Mapping[str, Domain]) -> list[dict[str, Any]]:
    """The points of a row, measured or read."""
    path = Path(args.folder) / f"{row}-{args.events}-{args.minutes:g}min-seed{args.seed}{args.label}.json"
    if not path.is_file():
        points = []
        for point in sasrec_curve(args, domains) if row == "sasrec" else backbone_curve(row, args, domains):
            points.append(point)
            print(row, json.dumps(point), flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, points)
    return read_json(path)


def table(args: argparse.Namespace, domains: Mapping[str, Domain]) -> list[str]:
    """The lines of the result file."""
    lines = ["| row | step | CPU s | valid ndcg@10 | test hit@10 | test ndcg@10 |", "|---|---:|---:|---:|---:|---:|"]
    for label, scores in baselines(args, domains).items():
        lines.append(f"| *{label}* | | | | {scores['hit@10']:.4f} | {scores['ndcg@10']:.4f} |")
    for row in args.rows.split(","):
        points = curve(row, args, domains)
        best = max(range(len(points)), key=lambda number: points[number]["valid"]["ndcg@10"])
        for number, point in enumerate(points):
            test, mark = point["test"], " (chosen)" if number == best else ""
            lines.append(
                f"| {row}{mark} | {point['step']} | {point['seconds']:.0f} | {point['valid']['ndcg@10']:.4f} "
                f"| {test['hit@10']:.4f} | {test['ndcg@10']:.4f} |"
            )
    return lines


def sizes_of(domains: Mapping[str, Domain]) -> str:
    return "; ".join(
        f"{name}: {len(domain.clients.users):,} clients, {len(domain.public.users):,} public, "
        f"{len(domain.item_keys):,} items"
        for name, domain in domains.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--domains", default="movies_tv,cds_vinyl,video_games")
    parser.add_argument("--rows", default="decoder,t5,t5_text,sasrec")
    parser.add_argument("--events", choices=("public", "pooled"), default="public")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--valid_users", type=int, default=600)
    parser.add_argument("--encoder", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=".cache/curves")
    parser.add_argument("--cache", default=".cache")
    parser.add_argument("--label", default="", help="added to the names of curve files, with other settings")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="further settings of the backbone rows")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    domains = load_domains(args.data, args.domains.split(","))
    lines = [
        "# Learning curves of backbones",
        "",
        *heading("learning_curves.py", args.threads),
        f"- Data: {sizes_of(domains)}",
        "",
    ]
    lines += [f"Events: {args.events}. Macro mean over the domains, protocol strict, whole catalogue.", ""]
    text = "\n".join([*lines, *table(args, domains)]) + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    sys.exit(run(main))
