"""Beauty on a CPU, with models that write IDs of several tokens: T5 and decoder, with and without a dense head.

    python benchmarks/written_ids.py --data data/beauty --work runs/written_ids [--seed 0] [--rows T5]

Data: Amazon 2014, 5-core, prepared as for benchmarks/public_bar.py. 2,000 users are the clients' and tested on their
last event, seen items dropped; the train parts (all but the last two events) of all others are the public pool, from
which alone the backbones learn; a seed draws other users. Settings: benchmarks/configs/written_ids.yaml, and what a row
changes in it. Four companies share the 2,000 users out, and share the student; a company ranks its own users. CPU
minutes of a backbone are those of stage 1. One JSON a row in --work: what is there is not run again; a row that was
killed goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import provenance
import torch
from public_bar import BUDGETS, T5, companies, everyone, shown, task_of
from written_readings import ABOUT, NUM_CUSTOMERS, cold_places, readings, readings_table

import fedecider
from fedecider.cross_silo.base_stages import begin, distill_stage, kept_step, pretrain_stage
from fedecider.cross_silo.command_line import make_settings
from fedecider.cross_silo.item_ids import load_ids
from fedecider.cross_silo.settings import Settings
from fedecider.data.card import make_card
from fedecider.data.domain import Domain, Events
from fedecider.data.near_texts import unit_vectors
from fedecider.data.store import load_domains
from fedecider.engine.command_line import data_options
from fedecider.engine.track import track_named
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import NUM_HELD_OUT
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.record import read_json, write_json
from fedecider.models.counts import count_events
from fedecider.models.features import Knowledge
from fedecider.models.item_texts import encoded_texts
from fedecider.running.command import run
from fedecider.running.settings_files import load_config
from idgen.backbone import load_backbone
from idgen.item_ids import ItemIds
from idgen.ranking import RankingContext, rank_task
from idgen.tokenizer import load_tokenizer

HERE = Path(__file__).resolve().parent
CONFIG, PAGE = HERE / "configs" / "written_ids.yaml", HERE / "results" / "written_ids.md"
DOMAIN = "beauty"
CPU = torch.device("cpu")
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
READINGS = ", readings"
COLD = ", cold items"
COLD_SHARE = 0.1
"""Of the items, which the public users' histories lack."""
ONE_TOKEN = "decoder, IDs of one token"
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
    ONE_TOKEN: {
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
BACKBONES |= {name + HALF: BACKBONES[name] for name in (DENSE_T5, DENSE_DECODER)}
BACKBONES |= {name + READINGS: BACKBONES[name] for name in (DENSE_T5, DENSE_DECODER, ONE_TOKEN)}
BACKBONES |= {DENSE_DECODER + COLD: BACKBONES[DENSE_DECODER]}
METHODS = {
    "four companies: alone": "local",
    "four companies: FedAvg": "fedavg",
    "four companies: fedecider": "fedecider",
}
MOST_SEEDS = 3
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


def cold_row(name: str, whole: Domain, clients: Mapping[str, Domain], settings: Settings) -> dict[str, Any]:
    """A backbone that never met some of the items, and everybody who bought one of them last."""
    domain = next(iter(clients.values()))
    draw_I = torch.rand(len(domain.item_keys), generator=torch.Generator().manual_seed(settings.run.seed)).numpy()
    is_cold_I = draw_I < COLD_SHARE
    number_I = np.where(is_cold_I, -1, np.arange(len(is_cold_I)))
    public = domain.public.renumbered(number_I)
    clients = {one: replace(client, public=public, card={}) for one, client in clients.items()}
    for client in clients.values():
        client.card.update(make_card(client))
    kept = pretrain_stage(settings.run, clients, CPU)
    tokenizer = load_tokenizer(kept.folder / "backbone")
    ids = load_ids(kept.folder, clients, settings.run.pretrain)[next(iter(clients))].items
    rows = everyone(whole).arrays().sequences
    last_I = rows.value_E[rows.num_after_E == 0]
    tasks = {}
    for group, is_asked_U in (("cold", is_cold_I[last_I]), ("warm", ~is_cold_I[last_I])):
        asked = rows.take(np.flatnonzero(is_asked_U))
        asked = asked.keep(~is_cold_I[asked.value_E] | (asked.num_after_E == 0))
        asked = asked.take(np.flatnonzero(asked.length_U > NUM_HELD_OUT)[: NUM_CUSTOMERS["test"]])
        users = Events([str(row) for row in range(len(asked))], asked, None)
        tasks[group] = task_of(domain, users, ids, tokenizer, settings)
    row_VD = begin(settings.run, clients, CPU).model.get_input_embeddings().weight.detach()
    row_ID = row_VD[tasks["cold"].trie.last_token_I]  # what a later item gets (fedecider.models.new_items)
    model, known = load_backbone(kept.folder / "backbone", tokenizer), knowledge_of(domain, settings)
    return {"cold": cold_places(model, tasks, known, torch.from_numpy(is_cold_I), row_ID)}


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
        task = task_of(domain, domain.clients, ids, tokenizer, settings)
        return readings(model, task, knowledge_of(domain, settings))
    return {**ranked(model, domain, ids, tokenizer, settings), "minutes": minutes, "told": told}


def knowledge_of(domain: Domain, settings: Settings) -> Knowledge:
    """Counts of the train parts of everybody, and the texts."""
    parts = [*SequenceArray.of(domain.clients.sequences).without_last(NUM_HELD_OUT), *domain.public.sequences]
    vectors = encoded_texts({domain.name: domain}, settings.run.pretrain.text_encoder, settings.run.cache)[domain.name]
    return Knowledge(count_events(parts, len(domain.item_keys)), unit_vectors(vectors.numpy()))


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


def file_of(work: Path, seed: int, name: str) -> Path:
    return work / f"{seed}-{name}.json".replace(" ", "_")


Found = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""Row -> seed -> what its run kept."""


def found_in(work: Path) -> Found:
    files = {name: {seed: file_of(work, seed, name) for seed in range(MOST_SEEDS)} for name in ROWS}
    return {name: {seed: read_json(one) for seed, one in of.items() if one.is_file()} for name, of in files.items()}


def mean_of(runs: Mapping[int, Mapping[str, Any]], metric: str) -> float:
    return fmean(one[metric] for one in runs.values())


def table(found: Found) -> list[str]:
    lines = ["| row | R@10 | N@10 | N@10 of seeds 0, 1, 2 | CPU minutes | of seed 0 |", "|---|---:|---:|---|---:|---|"]
    for name, runs in found.items():
        if name.endswith((READINGS, COLD)) or not runs:
            continue
        each = " ".join(shown(one["ndcg@10"]) for one in runs.values())
        timed = {seed: one for seed, one in runs.items() if "minutes" in one}
        minutes = f"{mean_of(timed, 'minutes'):.1f}" if timed else "-"
        cells = [shown(mean_of(runs, "hit@10")), shown(mean_of(runs, "ndcg@10")), each, minutes]
        lines.append(f"| {name} | {' | '.join(cells)} | {runs.get(0, {}).get('told', '')} |")
    missing = [name for name, runs in found.items() if not runs]
    return [*lines, "", f"Not run: {'; '.join(missing)}."] if missing else lines


COLD_COLUMNS = {"cold": "next item never met", "among": "among those never met", "warm": "next item of the others"}


def cold_table(runs: Mapping[int, Mapping[str, Any]]) -> list[str]:
    one = next(iter(runs.values()))["cold"]
    lines = [
        "## Items that were never met\n",
        f"{DENSE_DECODER}, trained without {one['items']:,} of the items, a tenth, whose texts are known; "
        f"{one['customers']} customers whose next purchase is one of them and as many others, R@10 / N@10 among all "
        "items, and among those never met. As trained, their rows of the dense head have only been pushed away; items "
        "that come later get rows of their texts.\n",
        f"| reading | {' | '.join(COLD_COLUMNS.values())} |",
        "|---|---:|---:|---:|",
    ]
    for reading, of in one.items():
        if isinstance(of, Mapping):
            cells = [f"{shown(of[c]['hit@10'])} / {shown(of[c]['ndcg@10'])}" if c in of else "-" for c in COLD_COLUMNS]
            lines.append(f"| {'text neighbours' if reading == 'text' else reading} | {' | '.join(cells)} |")
    return lines


def page(found: Found) -> list[str]:
    lines = ["# Beauty: models that write IDs of several tokens", "", *__doc__.split("\n\n")[2].splitlines(), ""]
    lines += [*table(found), "", "## What a model writes, its dense head, and both", "", *ABOUT.splitlines()]
    for name, runs in found.items():
        if runs and name.endswith(READINGS):
            lines += ["", f"### {name.removesuffix(READINGS)}", "", *readings_table(runs)]
        elif runs and name.endswith(COLD):
            lines += ["", *cold_table(runs)]
    commits = sorted({one["commit"].partition(" ")[0] for runs in found.values() for one in runs.values()})
    return [*lines, "", f"- Rows at {', '.join(commits)}", *provenance.heading("written_ids.py", 1)]


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
    for name in ROWS:
        path = file_of(args.work, args.seed, name)
        if path.is_file() or not any(name.startswith(start) for start in args.rows.split(";")):
            continue
        print(name, flush=True)
        settings = settings_of(clients, BACKBONES.get(name, {}), args.work, args.seed)
        if name in METHODS:
            row = run_row(METHODS[name], clients, settings, path.with_suffix(""))
        elif name.endswith(COLD):
            row = cold_row(name, whole, clients, settings)
        else:
            row = backbone_row(name, domain, clients, settings)
        write_json(path, {**row, "commit": commit})
    PAGE.write_text("\n".join(page(found_in(args.work))) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
