"""Four kinds of item IDs on the same backbone and budget, and what the IDs of each are like.

Backbone before distillation, ndcg@10 of test items of client users, protocol of the configuration. Rates are chosen
kind by kind: every one of RATES trains for a fifth of the steps, the one with the best ndcg@10 of held-out items of
public users trains for all. One JSON a cell below --work, named by all of its settings: an interrupted call goes on
where it stopped. --reports writes the IDs alone and trains no backbone. --alternating compares IDs of the generator
that stay with IDs that learn along (IDGenRec's alternating training, `idgen.alternating`), and writes that section.

    python benchmarks/item_ids.py --data data/beauty_pool:beauty --data data/amazon_cpu:video_games
    python benchmarks/item_ids.py --data sample:crime --data data/beauty:beauty --reports
    python benchmarks/item_ids.py --data data/amazon_cpu:video_games --alternating
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import provenance
import torch
from speed import put_section

from fedecider.cross_silo.base_stages import begin, pretrain_stage
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.item_ids import client_tasks, load_ids
from fedecider.cross_silo.prepare import Stage, load_data
from fedecider.cross_silo.settings import PretrainConfig, Settings
from fedecider.data.card import make_card
from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import get_protocol
from fedecider.federation.record import read_json, write_json
from fedecider.federation.streams import stream
from fedecider.running.command import run
from fedecider.running.plain import content_key
from idgen.backbone import load_backbone
from idgen.ranking import RankingContext, eval_users, rank_task
from idgen.tokenizer import load_tokenizer

KINDS: Sequence[str] = get_args(get_type_hints(PretrainConfig)["ids"])
HERE = Path(__file__).resolve().parent
RATES = ((2e-3, 1.0), (2e-3, 5.0), (5e-4, 20.0))
"""Learning rate, and how many times it the table of tokens learns with."""
REPORT = {
    "num_items": "items",
    "own_word_share": "words from the item's text",
    "repeat_share": "IDs with a word twice",
    "num_collisions": "collisions before",
    "num_collisions_left": "after",
    "num_suffixes": "suffixes",
    "mean_words": "words",
    "max_words": "most",
    "mean_tokens": "tokens",
    "max_tokens": "most",
    "category_share": "of a category with one first word",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, help="FOLDER:DOMAIN, or sample:DOMAIN; repeatable")
    parser.add_argument("--config", default=str(HERE / "configs" / "written_ids.yaml"))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--max_steps", type=int, default=300, help="training steps of every backbone")
    parser.add_argument("--num_users", type=int, default=500, help="client users whose test items are ranked")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reports", action="store_true", help="IDs alone, of --kinds")
    parser.add_argument("--alternating", action="store_true", help="IDs that stay beside IDs that learn along")
    parser.add_argument("--work", type=Path, default=Path("runs/item_ids"), help="cells and cache")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "item_ids.md")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    asked = settings_of(args, args.data[0], args.kinds.split(",")[0], args.max_steps, RATES[0]).run.num_threads
    torch.set_num_threads(asked or torch.get_num_threads())
    foot = provenance.heading("item_ids.py", torch.get_num_threads())  # once: the page itself is a change of the tree
    if args.alternating:
        put_section(args.output, ALTERNATING, "\n".join([alternating_section(args), "", *foot]))
        return
    for place in args.data:
        for kind in args.kinds.split(","):
            found[place, kind] = cell(args, place, kind)
            args.output.write_text("\n".join([*page(args, found), "", *foot]) + "\n")


ALTERNATING = "IDs that stay and IDs that learn along"
NUM_PUBLIC, EPOCHS = 1000, 8
"""Of the section on alternating training: public users, and epochs of the backbone in all of its turns."""
PHASES = (0, 1)


def alternating_section(args: argparse.Namespace) -> str:
    """Each number of turns of the generator, with as many epochs of the backbone in all."""
    lines = [
        f"{NUM_PUBLIC:,} public users, {EPOCHS} epochs of the backbone in all its turns; between them the generator",
        f"has one epoch through the frozen backbone. Test items of all client users, seed {args.seed}. One seed: no "
        "difference is claimed.",
        "",
        "| data | turns of the generator | ndcg@10 | IDs that a turn changed | CPU minutes |",
        "|---|---:|---:|---|---:|",
    ]
    for place in args.data:
        for phases in PHASES:
            one = alternating_cell(args, place, phases)
            changed = ", ".join(f"{turn['ids_changed']:,}" for turn in one["turns"] if "ids_changed" in turn)
            cells = [str(phases), f"{one['ndcg@10']:.4f}", changed or "-", f"{one['minutes']:.1f}"]
            lines.append(f"| {label(place)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def alternating_cell(args: argparse.Namespace, place: str, phases: int) -> dict[str, Any]:
    epochs = ["--pretrain.train.epochs", str(EPOCHS // (phases + 1)), "--pretrain.alternating_phases", str(phases)]
    settings = settings_of(args, place, "generator", 0, RATES[1], epochs)
    path = args.work / f"alternating-{phases}-{cell_name(args, settings)}"
    if path.is_file():
        return read_json(path)
    (name, domain), *_ = load_data(settings.run).items()
    domains = {name: replace(domain, public=domain.public.take(range(NUM_PUBLIC)), card={})}
    domains[name].card.update(make_card(domains[name]))
    started = time.process_time()
    stage = pretrain_stage(settings.run, domains, torch.device("cpu"))
    content: dict[str, Any] = {"minutes": (time.process_time() - started) / 60}
    content |= {"turns": read_json(stage.folder / "report.json").get("alternating", [])}
    content |= ranked(args, settings, stage, domains, len(domain.clients.users))
    write_json(path, content)
    return content


def settings_of(
    args: argparse.Namespace,
    place: str,
    kind: str,
    max_steps: int,
    rates: tuple[float, float],
    more: Sequence[str] = (),
) -> Settings:
    folder, _, domain = place.rpartition(":")
    words = ["--config", args.config, "--domains", domain, "--data", "" if folder == "sample" else folder]
    words += ["--pretrain.ids", kind, "--pretrain.train.max_steps", str(max_steps), "--seed", str(args.seed)]
    words += [f"--pretrain.train.learning_rate={rates[0]}", f"--pretrain.train.table_lr_multiplier={rates[1]}"]
    words += ["--pretrain.backbone.embedding_init", "random"] if args.reports else []  # it stays untrained
    return parse_settings(["--protocol", "strict", *words, *more, "--cache", str(args.work / "cache")])


def cell(args: argparse.Namespace, place: str, kind: str) -> dict[str, Any]:
    """The report of the IDs, and unless --reports the score of their backbone; read where it is there already."""
    settings, device = settings_of(args, place, kind, args.max_steps, RATES[0]), torch.device("cpu")
    path = args.work / cell_name(args, settings)
    if path.is_file():
        return read_json(path)
    domains, domain = load_data(settings.run), settings.run.domains
    if args.reports:
        report = {"report": begin(settings.run, domains, device).ids[domain].items.report}
        write_json(path, report)
        return report
    tried = {}
    for rates in RATES:
        short = pretrain_stage(settings_of(args, place, kind, args.max_steps // 5, rates).run, domains, device)
        tried[rates] = validated(short)
    rates = max(tried, key=lambda one: tried[one])
    settings = settings_of(args, place, kind, args.max_steps, rates)
    started = time.process_time()
    stage = pretrain_stage(settings.run, domains, device)
    content: dict[str, Any] = {
        "minutes": (time.process_time() - started) / 60,
        "rates": rates,
        "tried": list(tried.items()),
    }
    content |= ranked(args, settings, stage, domains, args.num_users)
    content |= {"validation": validated(stage)}
    write_json(path, content)
    return content


def ranked(
    args: argparse.Namespace, settings: Settings, stage: Stage, domains: Mapping[str, Domain], num_users: int
) -> dict[str, Any]:
    """The test items of client users, by the backbone of a stage."""
    (domain,) = domains
    tokenizer = load_tokenizer(stage.folder / "backbone")
    model = load_backbone(stage.folder / "backbone", tokenizer)
    ids = load_ids(stage.folder, domains, settings.run.pretrain)
    (task,) = client_tasks(domains, ids, tokenizer, settings.run.pretrain)
    drawn = stream(args.seed, "eval_users", domain)
    users = eval_users(task, "valid", num_users, drawn)  # asked for test items, it takes all users
    drop_seen = get_protocol(settings.run.protocol).drop_seen
    positions = rank_task(model, task, "test", users, RankingContext(settings.ranking, drop_seen))
    ndcg = mean_metrics(positions, (10,))["ndcg@10"]
    return {
        "report": ids[domain].items.report,
        "ndcg@10": ndcg,
        "num_users": len(positions),
        "commit": provenance.git_commit(),
    }


def validated(stage: Stage) -> float:
    """ndcg@10 of the last items of public users at the step that stage 1 kept."""
    found = read_json(stage.folder / "report.json")["backbone"][-1].get("validation")
    if found is None:  # too few public users, or steps: the first rates are taken
        return 0.0
    return float(found["ndcg@10"][str(found["kept"])])


def cell_name(args: argparse.Namespace, settings: Settings) -> str:
    """Other settings, of the command line or of --config, have another name."""
    pretrain, asked = settings.run.pretrain, "ids" if args.reports else args.num_users
    data = Path(settings.run.data or "sample").name
    return f"{data}-{settings.run.domains}-{pretrain.ids}-{content_key([settings.as_record(), asked])}.json"


def page(args: argparse.Namespace, found: Mapping[tuple[str, str], dict[str, Any]]) -> list[str]:
    lines = ["# Kinds of item IDs", ""]
    if not args.reports:
        lines += [
            f"A T5 (benchmarks/configs/{Path(args.config).name}), {args.max_steps} steps, seed {args.seed}: ndcg@10 of "
            "the test items of client users. Rates are chosen by validation of public users, the same ones for every "
            "kind; CPU minutes are those of the last training.",
            "",
            "| data | " + " | ".join(args.kinds.split(",")) + " |",
            "|---|" + "---:|" * len(args.kinds.split(",")),
        ]
        for place in args.data:
            row = [found.get((place, kind), {}) for kind in args.kinds.split(",")]
            cells = [f"{one['ndcg@10']:.4f}" if one else "" for one in row]
            lines.append(f"| {label(place)} | {' | '.join(cells)} |")
            cells = [f"{one['validation']:.4f}" if one else "" for one in row]
            lines.append(f"| validation of public users | {' | '.join(cells)} |")
            cells = ["{:g}, x {:g}".format(*one["rates"]) if one else "" for one in row]
            lines.append(f"| learning rate, of the token table | {' | '.join(cells)} |")
            cells = [f"{one['minutes']:.1f}" if one else "" for one in row]
            lines.append(f"| CPU minutes | {' | '.join(cells)} |")
        lines.append("")
    lines += ["## What the IDs are like", "", "| data | kind | " + " | ".join(REPORT.values()) + " |"]
    lines.append("|---|---|" + "---:|" * len(REPORT))
    for (place, kind), one in found.items():
        lines.append(f"| {label(place)} | {kind} | {' | '.join(text(key, one['report'][key]) for key in REPORT)} |")
    for (place, kind), one in found.items():
        lines += ["", f"## {label(place)}, {kind}", "", "| title | ID |", "|---|---|"]
        lines += [f"| {title.replace('|', '/')} | {written} |" for title, written in one["report"]["examples"]]
    return lines


def label(place: str) -> str:
    """The folder's name and the domain: no path of a machine."""
    folder, _, domain = place.rpartition(":")
    return f"{Path(folder).name}: {domain}"


def text(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key.endswith("_share"):
        return f"{value:.1%}"
    return f"{value:.1f}" if key.startswith("mean_") else f"{value:,}"


if __name__ == "__main__":
    sys.exit(run(main))
