"""A million drawn customers on one machine: CPU seconds and memory of every stage against the number of customers.

Each stage is a process of its own that leaves ``WORK/<size>/<stage>.json``; one that is there is not run again.

Shape legend: E events, U customers, I items, B customers of a batch, K items of a list.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SCRIPT = Path(__file__).parents[1] / "speed.py"

# A million customers on one machine.

SIZES = "10000,30000,100000,300000,1000000"
CUSTOMERS_AN_ITEM, EVENTS_A_CUSTOMER = 10, 20
ITEMS_A_TOPIC, IN_TOPIC, ZIPF = 100, 0.7, 0.8
CHUNK = 100_000
"""Customers that are drawn, and ranked, at a time."""
NUM_VALID, NUM_RESULTS, LIST = 10_000, 100_000, 10
D_MODEL, BATCH = 64, 128
NAME = "shop"


def draw_events(num_users: int, sum_I: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Customer and item of every event, oldest first; ``sum_I`` (I + 1,) running sums of how popular items are.

    A customer likes one topic of 100 items, from which 70 % of the events are, and the others are from the whole
    catalogue, each time in proportion to popularity. No item comes twice.
    """
    num_items = len(sum_I) - 1
    wanted_U = np.clip(rng.lognormal(np.log(1.08 * EVENTS_A_CUSTOMER), 0.6, num_users), 5, 200).astype(np.int64)
    user_E = np.repeat(np.arange(num_users), wanted_U)
    first_E = rng.integers(num_items // ITEMS_A_TOPIC, size=num_users)[user_E] * ITEMS_A_TOPIC
    inside_E = rng.random(len(user_E)) < IN_TOPIC
    low_E = np.where(inside_E, sum_I[first_E], 0.0)
    high_E = np.where(inside_E, sum_I[first_E + ITEMS_A_TOPIC], sum_I[-1])
    drawn_E = low_E + rng.random(len(user_E)) * (high_E - low_E)
    item_E = np.minimum(np.searchsorted(sum_I, drawn_E, side="right") - 1, num_items - 1)
    _, kept_E = np.unique(user_E * num_items + item_E, return_index=True)
    kept_E.sort()
    return user_E[kept_E], item_E[kept_E]


def make(folder: Path, size: int) -> dict[str, Any]:
    """Parquet files of events and of items with titles that name their topic."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, num_items, num_events = np.random.default_rng(0), max(1000, size // CUSTOMERS_AN_ITEM), 0
    sum_I = np.concatenate([[0.0], rng.permutation((np.arange(num_items) + 1.0) ** -ZIPF).cumsum()])
    keys_I = pa.array([f"i{item:06d}" for item in range(num_items)])
    schema = pa.schema({"user": pa.string(), "item": pa.string(), "time": pa.int64()})
    with pq.ParquetWriter(folder / "events.parquet", schema) as file:
        for first in range(0, size, CHUNK):
            keys_U = pa.array([f"c{user:07d}" for user in range(first, min(first + CHUNK, size))])
            user_E, item_E = draw_events(len(keys_U), sum_I, rng)
            time_E = 1_600_000_000 + np.arange(len(user_E))
            columns = [keys_U.take(pa.array(user_E)), keys_I.take(pa.array(item_E)), pa.array(time_E)]
            file.write_table(pa.table(columns, schema=schema))
            num_events += len(user_E)
    shades = rng.integers(500, size=num_items)
    titles = [f"kind{n // ITEMS_A_TOPIC} make{n % 7} shade{shades[n]} model{n}" for n in range(num_items)]
    pq.write_table(pa.table({"item": keys_I, "title": titles}), folder / "items.parquet")
    return {"events": num_events, "items": num_items}


def prepare(folder: Path, size: int) -> dict[str, Any]:
    """The files as a prepared folder."""
    from fedecider.data import from_events

    data = from_events(
        str(folder / "events.parquet"), str(folder / "items.parquet"), name=NAME, user="user", item="item", time="time"
    )
    data.save(folder / "prepared")
    return {"customers": len(data[NAME].clients.users)}


def load(folder: Path, size: int) -> dict[str, Any]:
    """The prepared folder, read and hashed."""
    domain = read(folder)
    return {"hash": domain.content_hash(), "events": domain.clients.num_events}


def count(folder: Path, size: int) -> dict[str, Any]:
    """What a client counts of its customers' training parts."""
    from fedecider.models.counts import count_events

    domain = read(folder)
    counts = count_events(domain.clients.arrays().sequences.without_last(2), len(domain.item_keys))
    return {"pairs": int(counts.pair_II.nnz), "successors": int(counts.next_II.nnz)}


def texts(folder: Path, size: int) -> dict[str, Any]:
    """Item IDs of one token, their tokenizer, and the table of a decoder that starts from item texts."""
    from safetensors.torch import save_file

    from fedecider.data.encoders import tfidf_vectors
    from idgen.backbone import build_backbone
    from idgen.config import TITLE_WORDS, BackboneConfig
    from idgen.item_ids import phrase_item_ids, unique_phrases
    from idgen.prompts import prompt_texts
    from idgen.text_vectors import text_projection
    from idgen.tokenizer import train_tokenizer

    domain = read(folder)
    (phrases,) = unique_phrases({NAME: domain.item_keys}, {NAME: domain.item_texts}, TITLE_WORDS).values()
    tokenizer = train_tokenizer([*domain.item_texts, *prompt_texts("history", [NAME])], 0, phrases)
    ids = phrase_item_ids(domain.item_keys, phrases, tokenizer)
    encoded = {NAME: tfidf_vectors(domain.item_texts)}
    vector_ID = text_projection(encoded, D_MODEL).rows(NAME, encoded[NAME])
    save_file({NAME: vector_ID.contiguous()}, folder / "vectors.safetensors")
    tokenizer.save_pretrained(str(folder / "model"))
    (folder / "ids.json").write_text(json.dumps(ids._asdict()))
    config = BackboneConfig(kind="decoder", embedding_init="text", d_model=D_MODEL, num_layers=2)
    model = build_backbone(config, tokenizer, 0, [client_task(folder, domain)], {NAME: vector_ID}, False)
    model.save_pretrained(folder / "model")
    return {"tokens": len(tokenizer)}


def epoch(folder: Path, size: int) -> dict[str, Any]:
    """One pass of training over all customers' training parts."""
    from idgen.backbone_training import train_backbone
    from idgen.config import BackboneTraining
    from idgen.samples import num_batches
    from idgen.training import Execution

    model, task = load_model(folder), client_task(folder, read(folder))
    config = BackboneTraining(batch_size=BATCH, learning_rate=1e-3, epochs=1)
    log = train_backbone(model, [task], config, Execution(0))
    model.save_pretrained(folder / "trained")
    return {"steps": num_batches([task], BATCH), "loss": log[-1]["loss"]}


def validation(folder: Path, size: int) -> dict[str, Any]:
    """Places of the validation items of 10,000 customers."""
    return places(folder, size, "valid", NUM_VALID)


def results(folder: Path, size: int) -> dict[str, Any]:
    """Places of the test items of 100,000 customers, by the model."""
    return places(folder, size, "test", NUM_RESULTS)


def rules(folder: Path, size: int) -> dict[str, Any]:
    """Places of the same customers' test items by every rule, counted on all customers' training parts."""
    from safetensors.torch import load_file

    from fedecider.baselines.counts import DECAYED, TEXT_AND_COUNTS, heuristic_positions, text_votes
    from fedecider.data.near_texts import nearest_texts, unit_vectors
    from fedecider.evaluation.metrics import mean_metrics
    from fedecider.evaluation.protocols import NUM_HELD_OUT

    sequences = read(folder).clients.arrays().sequences
    vector_ID = load_file(folder / "vectors.safetensors")[NAME]
    text = text_votes(nearest_texts(unit_vectors(vector_ID.numpy())))
    is_asked_U = np.zeros(len(sequences), bool)
    is_asked_U[asked_users(len(sequences), NUM_RESULTS)] = True
    others = sequences.take(~is_asked_U).without_last(NUM_HELD_OUT)
    found = heuristic_positions(sequences.take(is_asked_U), len(vector_ID), ["test"], text, extra=others)["test"]
    ndcg = {row: mean_metrics(found[row])["ndcg@10"] for row in (DECAYED, TEXT_AND_COUNTS)}
    return {"customers": int(is_asked_U.sum()), "ndcg@10": ndcg}


def asked_users(num_users: int, most: int) -> np.ndarray:
    """At most so many customers, evenly among all."""
    return np.linspace(0, num_users - 1, min(most, num_users)).astype(np.int64)


def places(folder: Path, size: int, split: str, most: int) -> dict[str, Any]:
    import torch

    from fedecider.evaluation.metrics import mean_metrics
    from idgen.ranking import RankingContext, rank_task

    model, task = load_model(folder, "trained"), client_task(folder, read(folder))
    num_users = len(task.sequences)
    users = torch.from_numpy(asked_users(num_users, most))
    position_U = rank_task(model, task, split, users, RankingContext())
    return {"customers": len(users), "ndcg@10": mean_metrics(position_U)["ndcg@10"]}


def lists(folder: Path, size: int) -> dict[str, Any]:
    """Ten items for every customer, none of which they had."""
    import torch

    from idgen.decode import constrained_beam_search
    from idgen.samples import eval_batches

    domain = read(folder)
    model, task = load_model(folder, "trained"), client_task(folder, domain)
    sequences = domain.clients.arrays().sequences
    most = int(sequences.length_U.max()) + LIST
    list_UK = np.full((len(sequences), LIST), -1, np.int32)
    for first in range(0, len(sequences), CHUNK):
        users = torch.arange(first, min(first + CHUNK, len(sequences)))
        for user_B, input_ids, attention_mask, _ in eval_batches(task, "test", 256, users):
            item_BM, _ = constrained_beam_search(model, input_ids, attention_mask, task.trie, num_beams=most)
            seen = sequences.take(user_B).without_last(1)
            is_seen_BI = np.zeros((len(user_B), len(domain.item_keys)), bool)
            is_seen_BI[seen.row_E, seen.value_E] = True
            item_BM = item_BM.numpy()
            new_BM = ~np.take_along_axis(is_seen_BI, item_BM, 1)
            best_BK = np.argsort(~new_BM, axis=1, kind="stable")[:, :LIST]
            list_UK[user_B.numpy()] = np.take_along_axis(item_BM, best_BK, 1)
    np.save(folder / "lists.npy", list_UK)
    assert (list_UK >= 0).all()
    return {"lists": len(list_UK), "hit@10": float((list_UK == sequences.last()[:, None]).any(1).mean())}


STAGES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    stage.__name__: stage for stage in (make, prepare, load, count, texts, epoch, validation, results, rules, lists)
}


def read(folder: Path) -> Any:
    from fedecider.data.store import load_domains

    return load_domains(folder / "prepared")[NAME]


def load_model(folder: Path, name: str = "model") -> Any:
    from idgen.backbone import load_backbone
    from idgen.tokenizer import load_tokenizer

    return load_backbone(folder / name, load_tokenizer(folder / "model"))


def client_task(folder: Path, domain: Any) -> Any:
    from idgen.config import SampleConfig
    from idgen.item_ids import ItemIds
    from idgen.tasks import build_task
    from idgen.tokenizer import load_tokenizer

    ids = ItemIds(**json.loads((folder / "ids.json").read_text()))
    samples = SampleConfig(templates="history", max_history=20, max_source_tokens=24)
    return build_task(domain, domain.clients, ids, load_tokenizer(folder / "model"), samples, True)


IMPORTED = (
    "fedecider.data",
    "fedecider.data.encoders",
    "fedecider.models.counts",
    "idgen.backbone",
    "sklearn.decomposition",
)
"""What takes seconds to import at every size, and would make exponents look smaller."""


class Cost(NamedTuple):
    """Of one stage at one size."""

    cpu_s: float
    peak: float
    """Bytes of the process at most, its libraries among them."""
    facts: dict[str, Any]


def cost_of(folder: Path, size: int, stage: str) -> Cost | None:
    """What a stage has cost, once it was run; None where it failed, which is told."""
    path = folder / str(size) / f"{stage}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, str(SCRIPT), "--stage", stage, "--sizes", str(size), "--work", str(folder)]
        if subprocess.run(words, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode:
            return None
    return Cost(**json.loads(path.read_text()))


def run_stage(folder: Path, size: int, stage: str) -> None:
    """Run a stage in this process, and leave what it cost."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for module in IMPORTED:
        importlib.import_module(module)
    began = time.process_time()
    facts = STAGES[stage](folder / str(size), size)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cost = Cost(time.process_time() - began, peak, facts)
    (folder / str(size) / f"{stage}.json").write_text(json.dumps(cost._asdict(), indent=1))


def exponent(costs: dict[int, float]) -> float:
    """Slope of log seconds over log customers, by least squares."""
    return float(np.polyfit(np.log(list(costs)), np.log(list(costs.values())), 1)[0])


def part_million(args: argparse.Namespace) -> str:
    """CPU seconds and memory of every stage against the number of customers."""
    sizes, folder = [int(size) for size in (args.sizes or SIZES).split(",")], Path(args.work)
    found: dict[str, dict[int, Cost]] = {stage: {} for stage in STAGES}
    for size in sizes:
        for stage in STAGES:
            cost = cost_of(folder, size, stage)
            if cost is None:
                break  # later stages need it
            found[stage][size] = cost
            print(f"{size:,} {stage}: {cost.cpu_s:.1f} s, {cost.peak / 1e9:.2f} GB {cost.facts}", flush=True)
    lines = [
        f"One process a stage, {os.environ.get('OMP_NUM_THREADS', '1')} thread; CPU seconds without imports and, in",
        "brackets, GB at most with all libraries. Customers are drawn: twenty events each, a tenth as many items.",
        "Exponent: the slope of log seconds over log customers. Validation is of",
        f"{NUM_VALID:,} customers and results of {NUM_RESULTS:,} at most: beyond these, work grows with the items.",
        "",
        "| stage | " + " | ".join(f"{size:,}" for size in sizes) + " | exponent |",
        "| --- | " + "---: | " * (len(sizes) + 1),
    ]
    for stage, costs in found.items():
        cells = [f"{costs[one].cpu_s:.1f} ({costs[one].peak / 1e9:.1f})" if one in costs else "-" for one in sizes]
        seconds = {size: cost.cpu_s for size, cost in costs.items()}
        slope = f"{exponent(seconds):.2f}" if len(seconds) > 1 else "-"
        lines.append(f"| {stage} | {' | '.join(cells)} | {slope} |")
    return "\n".join(lines)
