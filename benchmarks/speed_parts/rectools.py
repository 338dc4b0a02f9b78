"""Beside RecTools' SASRec: what a CPU minute of training brings on full Beauty, whole catalogue, seen items dropped.

Shape legend: E events, U users, K items of a list.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.evaluation.metrics import NOT_RANKED, mean_metrics
from fedecider.evaluation.protocols import train_part
from speed_parts.cost import BENCHMARKS, QUIET

CONFIG = BENCHMARKS / "configs" / "amazon_decoder.yaml"
SEED = 0
MARKS = (2, 5, 15)
LOOKS = (2, 5, 10, 15)
"""CPU minutes of training after which a side is looked at; ours also before and after each of its first epochs."""
PUBLISHED, FIRST = 0.0531, 0.040
"""ndcg@10 that transformer_benchmark gives for SASRec with sampled softmax on Beauty, and one that is far from it."""
COMMON = {"lr": 0.001, "batch_size": 128, "session_max_len": 50, "n_blocks": 1, "n_heads": 1, "dropout_rate": 0.2}
SAMPLED = {"loss": "sampled_softmax", "n_negatives": 256}
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("ours", {}),
    "sampled": ("RecTools, sampled softmax", {**COMMON, **SAMPLED, "n_factors": 256, "epochs": 200}),
    "full": ("RecTools, full softmax", {**COMMON, "loss": "softmax", "n_factors": 256, "epochs": 200}),
    "sampled_64": ("RecTools, sampled softmax, width 64", {**COMMON, **SAMPLED, "n_factors": 64, "epochs": 200}),
}
"""Name -> title and settings of the peer's model."""


class Look(NamedTuple):
    minutes: float
    epochs: float
    valid: float
    test: float
    """ndcg@10 of all users."""


def everybody(data: str) -> Domain:
    """All users of Beauty as one client; the public ones are there too, with their train parts, as a public pool."""
    from fedecider.data.store import load_domains

    (beauty,) = load_domains(Path(data) / "beauty").values()
    clients, public = beauty.clients.arrays(), beauty.public.arrays()
    rows = [list(row) for events in (public, clients) for row in events.sequences]
    parts = [(f"{user}-train", list(train_part(row))) for user, row in zip(public.users, public.sequences, strict=True)]
    pool = [part for part in parts if len(part[1]) >= 3]
    return Domain(
        name="beauty",
        catalogue=beauty.catalogue,
        clients=Events([*public.users, *clients.users], rows, None),
        public=Events([user for user, _ in pool], [row for _, row in pool], None) if pool else NO_EVENTS,
        card={},
    )


def train_ours(folder: Path, cache: str) -> None:
    """From item texts: pre-training and distillation, which count, then one epoch after the other as a client's."""
    from fedecider.cross_silo.command_line import parse_settings
    from fedecider.cross_silo.prepare import build_base_artifacts, make_recommender
    from fedecider.methods.local_training import train_locally
    from fedecider.running.launch import start

    words = f"--config {CONFIG} --domains beauty --data {folder.parent}/data --method local --local_epochs 1"
    words += f" --seed {SEED} --num_eval_users 0 --cache {folder}/cache --output {folder}/runs"
    settings = parse_settings([*words.split(), "--ensemble", "{kind: none}"])
    link_vectors(folder / "cache", cache)
    with start(1) as launch:
        began = time.process_time()
        models = make_recommender(settings, build_base_artifacts(settings.run, launch), launch.device)
        pair = models.start
        before = spent = time.process_time() - began

        def look(round: int, pair: dict[str, Any]) -> None:
            held_out = {split: models.model(0, pair).positions(split).numpy() for split in ("valid", "test")}
            found: dict[str, Any] = {"minutes": spent / 60, "epochs": float(round), "before": before / 60, **held_out}
            np.savez(folder / f"look-{round:06d}.npz", **found)

        looks, round = list(LOOKS), 0
        look(round, pair)
        while looks:
            round += 1
            began = time.process_time()
            pair = train_locally(models, 0, round, pair).pair
            epoch = time.process_time() - began
            spent += epoch
            if round <= 3 or spent + epoch >= 60 * looks[0]:  # the last epoch that ends before the mark
                look(round, pair)
            looks = [look for look in looks if 60 * look > spent + epoch]


def link_vectors(folder: Path, cache: str) -> None:
    """Text vectors that were encoded before, where there are some."""
    folder.mkdir(parents=True, exist_ok=True)
    for vectors in Path(cache).glob("text*") if cache else ():
        if not (folder / vectors.name).exists():
            (folder / vectors.name).symlink_to(vectors.resolve())


def train_peer(python: str, side: str, folder: Path) -> None:
    asked = {
        "data": str(folder.parent.resolve() / "sequences.npz"),
        "folder": str(folder.resolve()),
        "looks": LOOKS,
        "seed": SEED,
        "model": SIDES[side][1],
    }
    # read from standard input: beside the script, ``rectools`` is our module
    script = Path(__file__).with_name("rectools_side.py").read_text()
    environment = {**os.environ, **QUIET, "PYTHONPATH": ""}
    python = str(Path(python).absolute())  # not resolved: an environment is known by the place of its Python
    done = subprocess.run([python, "-", json.dumps(asked)], input=script, text=True, cwd=folder, env=environment)
    if done.returncode:
        raise RuntimeError(f"{side}: RecTools ended with {done.returncode}, see above")


def looks_of(folder: Path, target: dict[str, np.ndarray]) -> list[Look]:
    """What a side has kept, its positions or its lists, as metrics; kept as ``found.json`` too."""
    found: list[Look] = []
    for path in sorted(folder.glob("look-*.npz")):
        kept = np.load(path)
        ndcg = {}
        for split in ("valid", "test"):
            value = kept[split]
            if value.ndim == 2:
                hit_UK = value == target[split][:, None]
                value = np.where(hit_UK.any(1), hit_UK.argmax(1), NOT_RANKED)
            assert len(value) == len(target[split]), (len(value), len(target[split]))
            ndcg[split] = mean_metrics(torch.from_numpy(value))["ndcg@10"]
        found.append(Look(float(kept["minutes"]), float(kept["epochs"]), ndcg["valid"], ndcg["test"]))
    if found:
        (folder / "found.json").write_text(json.dumps([look._asdict() for look in found]))
    return found


def at(looks: list[Look], minutes: float, slack: float) -> str:
    """ndcg@10 of the test items under the weights that were best on validation items until then."""
    if looks[-1].minutes < 0.9 * minutes:
        return "not reached"
    known = [look for look in looks if look.minutes <= minutes + slack]
    return f"{max(known, key=lambda look: look.valid).test:.4f}" if known else "no model yet"


def passed(looks: list[Look], value: float) -> str:
    minutes = next((look.minutes for look in looks if look.test >= value), None)
    return f"not in {looks[-1].minutes:.1f}" if minutes is None else f"{minutes:.1f}"


def part_rectools(args: argparse.Namespace) -> str:
    from fedecider.data.store import save_domains

    work = Path(args.work) / "rectools"
    work.mkdir(parents=True, exist_ok=True)
    domain = everybody(args.data)
    rows = domain.clients.arrays().sequences
    if not (work / "sequences.npz").is_file():
        save_domains({"beauty": domain}, work / "data")
        np.savez(work / "sequences.npz", start_U=rows.start_U, item_E=rows.value_E)
    end_U = rows.start_U[1:]
    target = {"valid": np.asarray(rows.value_E)[end_U - 2], "test": np.asarray(rows.value_E)[end_U - 1]}
    for side in [side for side in args.sides.split(",") if side]:
        folder = work / side
        if any(folder.glob("look-*.npz")):
            continue  # run before
        folder.mkdir(exist_ok=True)
        if side == "ours":
            train_ours(folder, args.vectors)
        else:
            train_peer(args.peer, side, folder)
    return page(args, work, rows.value_E, end_U, target)


def page(args: argparse.Namespace, work: Path, item_E: np.ndarray, end_U: np.ndarray, target: dict) -> str:
    found = {side: looks for side in SIDES if (looks := looks_of(work / side, target))}
    held_out = np.zeros(len(item_E), bool)
    held_out[end_U - 1] = held_out[end_U - 2] = True
    cold = np.isin(target["test"], np.asarray(item_E)[~held_out], invert=True).sum()
    first = min((work / "ours").glob("look-*.npz"), default=None)
    before = float(np.load(first)["before"]) if first else 0.0
    peer = "(version not known)"
    if args.peer:
        asked = "from importlib.metadata import version as v; print(v('rectools'), 'on torch', v('torch'))"
        peer = subprocess.run([args.peer, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    lines = [
        f"Full Beauty: {len(end_U):,} users, {len(target['test']):,} test items among the whole catalogue, seen items",
        "dropped; the last event is the test item, the last but one the validation item, all before them trains. One",
        f"thread a side, CPU minutes of training alone, seed {SEED}; both sides' lists go through the same function.",
        f"RecTools {peer}, settings of blondered/transformer_benchmark",
        "(`configs/paper/loo/s3_vanilla.yaml`: width 256, 1 block, 1 head, 50 events, dropout 0.2, 256 negatives a",
        "position; rate 0.001, batch 128), without deterministic algorithms and validation, which cost it time. The",
        "README there names width 64 for Beauty: `--sides sampled_64`.",
        "",
        f"Ours: `configs/{CONFIG.name}`, its decoder from item texts, all users as one client of method local, one",
        "epoch after the other, full softmax, which is what it takes by itself up to 15,000 items; pre-training on the",
        f"train parts of 300 of the users and distillation count ({before:.1f} minutes, no epoch). The figure at a",
        "mark is that of the weights that were best on validation items among those looked at until then: after",
        f"{', '.join(map(str, LOOKS))} minutes or oftener; ours at the last end of an epoch before them, and after",
        f"epochs 0 to 3. The test items of {cold} users are in nobody's train part; RecTools cannot name them, and",
        "they count as missed. A side that was stopped before a mark has not reached it.",
        "",
        f"Item texts become vectors once for all runs of a catalogue, about {args.text_seconds:.0f} CPU seconds for",
        "Beauty: apart in the first row, counted in the second. The last columns are CPU minutes until a look at which",
        f"ndcg@10 had passed {FIRST:.3f}, and {PUBLISHED}, which is published for SASRec with sampled softmax.",
        "",
        f"| | CPU s an epoch | {' | '.join(f'after {mark} min' for mark in MARKS)} | minutes trained | epochs |"
        f" past {FIRST:.3f} | past {PUBLISHED} |",
        "| --- |" + " ---: |" * (len(MARKS) + 5),
    ]
    for side, looks in found.items():
        last, spent = looks[-1], looks[-1].minutes - (before if side == "ours" else 0.0)
        epoch, trained = f"{60 * spent / last.epochs:.0f}", f"{last.minutes:.1f} | {last.epochs:.1f}"
        later = [look._replace(minutes=look.minutes + args.text_seconds / 60) for look in looks]
        rows = [(SIDES[side][0], looks)] + [("ours, with text vectors", later)] * (side == "ours")
        for title, seen in rows:
            slack = 0.0 if side == "ours" else 0.2  # the peer's lists come with the first step behind a mark
            ndcg = " | ".join(at(seen, mark, slack) for mark in MARKS)
            past = " | ".join(passed(seen, value) for value in (FIRST, PUBLISHED))
            lines.append(f"| {title} | {epoch} | {ndcg} | {trained} | {past} |")
    return "\n".join(lines)
