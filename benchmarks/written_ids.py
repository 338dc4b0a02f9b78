"""Beauty on a CPU, with models that write IDs of several tokens: T5 and decoder, with and without a dense head.

    python benchmarks/written_ids.py --data data/beauty --work runs/written_ids [--seed 0] [--rows T5]

Data: Amazon 2014, 5-core, prepared as for benchmarks/public_bar.py. 2,000 users are the clients' and tested on their
last event, seen items dropped; the train parts (all but the last two events) of all others are the public pool, from
which alone the backbones learn. Settings: benchmarks/configs/written_ids.yaml, and what a row changes in it. Four
companies share the 2,000 users out, and share the student; a company ranks its own users. CPU minutes of a backbone
are those of stage 1. One JSON a row in --work: what is there is not run again; a row that was killed goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import provenance
import torch
from public_bar import BUDGETS, T5, companies, shown, task_of

import fedecider
from fedecider.cross_silo.base_stages import begin, distill_stage, kept_step, pretrain_stage
from fedecider.cross_silo.command_line import make_settings
from fedecider.cross_silo.item_ids import load_ids
from fedecider.cross_silo.settings import Settings
from fedecider.data.domain import Domain
from fedecider.data.store import load_domains
from fedecider.engine.command_line import data_options
from fedecider.engine.track import track_named
from fedecider.evaluation.metrics import catalogue_positions, mean_metrics
from fedecider.evaluation.protocols import held_out, histories
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.record import read_json, write_json
from fedecider.running.command import run
from fedecider.running.settings_files import load_config
from idgen.backbone import load_backbone
from idgen.decode import constrained_beam_search, item_positions
from idgen.item_ids import ItemIds
from idgen.item_scores import catalogue_scores, written_log_probs
from idgen.ranking import RankingContext, eval_users, rank_task
from idgen.samples import encode_histories
from idgen.tasks import Task
from idgen.tokenizer import load_tokenizer

HERE = Path(__file__).resolve().parent
CONFIG, PAGE = HERE / "configs" / "written_ids.yaml", HERE / "results" / "written_ids.md"
DOMAIN = "beauty"
CPU = torch.device("cpu")
SPLITS = ("valid", "test")
DECODER = {
    "pretrain.backbone.kind": "decoder",
    "pretrain.samples.templates": "history",
    # as in configs/domains.yaml
    "pretrain.train.learning_rate": 1e-4,
    "pretrain.train.table_lr_multiplier": 20.0,
    "pretrain.train.batch_size": 128,
}
START, TEACHER = "T5, before its first step", "T5"
HALF = ", half depth"
READINGS = ", two readings"
DENSE_DECODER, DENSE_T5 = "decoder, keyword IDs, dense head", "T5, dense head"
BACKBONES: dict[str, dict[str, Any]] = {
    "decoder, keyword IDs": {
        **DECODER,
        "pretrain.samples.max_history": 10,
        "pretrain.samples.max_source_tokens": 64,
        "pretrain.train.max_steps": 1600,
    },
    DENSE_DECODER: {
        **DECODER,
        "pretrain.samples.dense_head": True,
        "pretrain.samples.max_history": 10,
        "pretrain.samples.max_source_tokens": 64,
        "pretrain.train.max_steps": 1600,
    },
    "decoder, IDs of one token": {
        **DECODER,
        "pretrain.ids": "item",
        "pretrain.samples.max_history": 20,
        "pretrain.samples.max_source_tokens": 24,
        "pretrain.train.max_steps": 1200,
    },
    DENSE_T5: {
        "pretrain.samples.dense_head": True,
        "pretrain.samples.max_source_tokens": 44,
        "pretrain.train.learning_rate": 1e-4,
        "pretrain.train.table_lr_multiplier": 20.0,
        "pretrain.train.max_steps": 1600,
    },
}
"""Row -> options. Fewer CPU minutes than the T5's."""
BACKBONES |= {name + part: BACKBONES[name] for name in (DENSE_T5, DENSE_DECODER) for part in (HALF, READINGS)}
METHODS = {
    "four companies: alone": "local",
    "four companies: FedAvg": "fedavg",
    "four companies: fedecider": "fedecider",
}
ROWS = [START, TEACHER, TEACHER + HALF, *METHODS, *BACKBONES]


def settings_of(clients: Mapping[str, Domain], options: Mapping[str, Any], work: Path, seed: int) -> Settings:
    cache = work / "cache"
    given = {**data_options(track_named("llm"), clients, cache), "cache": str(cache), "seed": seed}
    settings = make_settings({"protocol": "strict", **given, **options}, load_config(CONFIG))
    torch.set_num_threads(settings.run.num_threads or torch.get_num_threads())
    return settings


def ranked(model: Any, domain: Domain, ids: ItemIds, tokenizer: Any, settings: Settings) -> dict[str, float]:
    task = task_of(domain, domain.clients, ids, tokenizer, settings)
    context = RankingContext(settings.ranking, precision=settings.training.precision)
    return mean_metrics(rank_task(model, task, "test", None, context), (10,))


def backbone_row(name: str, domain: Domain, clients: Mapping[str, Domain], settings: Settings) -> dict[str, Any]:
    """A backbone before or after stage 1, or of half depth, on the users of all clients together."""
    if name == START:
        made = begin(settings.run, clients, CPU)
        return ranked(made.model, domain, made.ids[next(iter(clients))].items, made.tokenizer, settings)
    started = time.process_time()
    first = kept = pretrain_stage(settings.run, clients, CPU)
    told = kept_step(first)
    if name.endswith(HALF):
        started, told = time.process_time(), ""
        kept = distill_stage(settings.run, first, clients, CPU)
    minutes = (time.process_time() - started) / 60
    tokenizer = load_tokenizer(kept.folder / "backbone")
    model = load_backbone(kept.folder / "backbone", tokenizer)
    ids = load_ids(first.folder, clients, settings.run.pretrain)[next(iter(clients))].items
    if name.endswith(READINGS):
        return two_readings(model, task_of(domain, domain.clients, ids, tokenizer, settings))
    return {**ranked(model, domain, ids, tokenizer, settings), "minutes": minutes, "told": told}


NUM_EXACT = 100
"""Customers of each split whose items are all scored by what the model writes."""
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
"""Of the log-probability that an ID is written, beside that of its own token."""


def two_readings(model: Any, task: Task) -> dict[str, Any]:
    """Reading -> metrics of the same test customers, seen items dropped, and CPU seconds a customer."""
    users = {split: eval_users(task, "valid", NUM_EXACT, torch.Generator().manual_seed(0)) for split in SPLITS}
    dense, written, target, seen = {}, {}, {}, {}
    seconds = {"exact": 0.0, "dense": 0.0, "beams": 0.0}
    beams = []
    for split in SPLITS:
        rows = SequenceArray.of(task.sequences).take(users[split])
        past = list(map(list, histories(rows, split)))
        target[split], seen[split] = held_out(rows, split), past
        dense_parts, written_parts = [], []
        for start in range(0, len(past), 20):
            part = past[start : start + 20]
            prompts = encode_histories(task, part)
            begun = time.process_time()
            dense_parts += [torch.log_softmax(block, 1) for _, block in catalogue_scores(model, *prompts, task.trie)]
            middle = time.process_time()
            written_parts.append(written_log_probs(model, *prompts, task.trie).float())
            end = time.process_time()
            seconds["dense"] += middle - begun
            seconds["exact"] += end - middle
            if split == "test":
                item_BK, _ = constrained_beam_search(model, *prompts, task.trie, 20)
                beams.append(item_positions(item_BK, target[split][start : start + 20], part))
                seconds["beams"] += 2 * (time.process_time() - end)
        dense[split], written[split] = torch.cat(dense_parts), torch.cat(written_parts)

    def metrics(split: str, weight: float | None) -> dict[str, float]:
        score = written[split] if weight is None else dense[split] + weight * written[split]
        return mean_metrics(catalogue_positions(score, target[split], seen[split]), (10,))

    best = max(WEIGHTS, key=lambda weight: metrics("valid", weight)["ndcg@10"])
    found = {
        "what it writes, beams of 20": mean_metrics(torch.cat(beams), (10,)),
        "what it writes, exact": metrics("test", None),
        "the dense head": metrics("test", 0.0),
        f"both, writing with weight {best:g} (by validation)": metrics("test", best),
    }
    return {"readings": found, "seconds": {name: one / (2 * NUM_EXACT) for name, one in seconds.items()}}


def run_row(method: str, clients: Mapping[str, Domain], settings: Settings, output: Path) -> dict[str, Any]:
    """Four companies after their rounds: the macro mean of each one's model on its own users."""
    started = time.process_time()
    options = {"cache": settings.run.cache, "seed": settings.run.seed}
    result = fedecider.federate(clients, method, config=CONFIG, output=output, resume=True, progress=False, **options)
    found = read_json(output / "metrics.json")
    of_row = found["macro"]["test"][found["reported"]]
    scores = {name: of_row[name]["mean"] for name in ("hit@10", "ndcg@10")}
    shares = ", ".join(f"{share:g}" for share in found.get("update_scales", {}).values())
    rounds = f"round {found['best_round']} of {result.rounds['round'].max()}; shares of the updates {shares}"
    return {**scores, "minutes": (time.process_time() - started) / 60, "told": rounds}


def others(work: Path, seed: int) -> list[str]:
    """Lines of a table of the rows that other seeds have; each tests other users."""
    lines = ["## Other seeds", "", "Each tests other users.", "", "| seed | row | R@10 | N@10 | CPU minutes |"]
    lines.append("|---:|---|---:|---:|---:|")
    for other in sorted(number for number in range(10) if number != seed):
        for name in ROWS:
            path = file_of(work, other, name)
            if path.is_file():
                one = read_json(path)
                cells = (name, shown(one["hit@10"]), shown(one["ndcg@10"]), f"{one['minutes']:.1f}")
                lines.append(f"| {other} | {' | '.join(cells)} |")
    return lines if len(lines) > len(("title", "", "words", "", "header", "rule")) else []


def file_of(work: Path, seed: int, name: str) -> Path:
    return work / f"{seed}-{name}.json".replace(" ", "_")


def page(found: Mapping[str, Mapping[str, Any]], seed: int, work: Path) -> list[str]:
    lines = ["# Beauty: models that write IDs of several tokens", "", *__doc__.split("\n\n")[2].splitlines(), ""]
    lines += ["| row | R@10 | N@10 | CPU minutes | |", "|---|---:|---:|---:|---|"]
    for name, one in found.items():
        if name.endswith(READINGS):
            continue
        minutes = f"{one['minutes']:.1f}" if "minutes" in one else "-"
        lines.append(
            f"| {name} | {shown(one['hit@10'])} | {shown(one['ndcg@10'])} | {minutes} | {one.get('told', '')} |"
        )
    if missing := [name for name in ROWS if name not in found]:
        lines += ["", f"Not run: {'; '.join(missing)}."]
    for name, one in found.items():
        if not name.endswith(READINGS):
            continue
        lines += [
            "",
            f"## {name}",
            "",
            f"{NUM_EXACT} test customers.",
            "",
            "| reading | R@10 | N@10 |",
            "|---|---:|---:|",
        ]
        lines += [
            f"| {reading} | {shown(of['hit@10'])} | {shown(of['ndcg@10'])} |" for reading, of in one["readings"].items()
        ]
        cost = ", ".join(f"{name} {seconds:.3f}" for name, seconds in one["seconds"].items())
        lines += ["", f"CPU seconds a customer: {cost}."]
    lines += ["", *others(work, seed)]
    lines += ["", f"Seed {seed}. The rows change: `{json.dumps(BACKBONES)}`", ""]
    commits = sorted({one["commit"] for one in found.values()})
    return [*lines, f"- Rows at {', '.join(commits)}", *provenance.heading("written_ids.py", 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/beauty"))
    parser.add_argument("--work", type=Path, default=Path("runs/written_ids"), help="rows, runs and cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", default="", help="beginnings of the rows to run, separated by ';' (default: all)")
    args = parser.parse_args()
    commit, (whole,) = provenance.git_commit(), load_domains(args.data, [DOMAIN]).values()
    pool = T5._replace(num_companies=1)
    (domain,) = companies(whole, pool, BUDGETS["cpu"], args.seed).values()
    clients = companies(whole, T5, BUDGETS["cpu"], args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    files = {name: file_of(args.work, args.seed, name) for name in ROWS}
    for name, path in files.items():
        if path.is_file() or not any(name.startswith(start) for start in args.rows.split(";")):
            continue
        print(name, flush=True)
        settings = settings_of(clients, BACKBONES.get(name, {}), args.work, args.seed)
        if name in METHODS:
            row = run_row(METHODS[name], clients, settings, path.with_suffix(""))
        else:
            row = backbone_row(name, domain, clients, settings)
        write_json(path, {**row, "commit": commit})
    found = {name: read_json(path) for name, path in files.items() if path.is_file()}
    PAGE.write_text("\n".join(page(found, args.seed, args.work)) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
