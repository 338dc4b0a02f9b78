"""Sampled against full softmax, and a round of two large shops.

Shape legend: I items, U customers, D width.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from idgen import candidates
from idgen.tasks import build_task

CONFIG = Path(__file__).parents[1] / "configs" / "amazon_decoder.yaml"

# Drawn shops.

ITEMS_A_TOPIC, IN_TOPIC, ZIPF = 100, 0.7, 0.8


def drawn_shop(name: str, num_users: int, num_items: int, num_public: int, seed: int) -> Domain:
    """Customers with five to forty events, eight on average; 70 % are of one topic of 100 items, the others of any
    item, each in proportion to how popular an item is."""
    rng = np.random.default_rng(seed)
    popular_I = rng.permutation((np.arange(num_items) + 1.0) ** -ZIPF)
    num_topics = max(1, num_items // ITEMS_A_TOPIC)
    sum_I = np.concatenate([[0.0], popular_I.cumsum()])
    edge_T = np.append(np.arange(num_topics) * ITEMS_A_TOPIC, num_items)
    length_U = np.minimum(4 + rng.geometric(0.25, num_users + num_public), 40)
    topic_U = rng.integers(num_topics, size=len(length_U))
    user_E = np.repeat(np.arange(len(length_U)), length_U)
    inside_E = rng.random(len(user_E)) < IN_TOPIC
    low_E = np.where(inside_E, sum_I[edge_T[topic_U[user_E]]], 0.0)
    high_E = np.where(inside_E, sum_I[edge_T[topic_U[user_E] + 1]], sum_I[-1])
    item_E = np.searchsorted(sum_I, low_E + rng.random(len(user_E)) * (high_E - low_E), side="right") - 1
    sequences = [part.tolist() for part in np.split(np.minimum(item_E, num_items - 1), length_U.cumsum()[:-1])]
    keys = [f"{name}-{user:06d}" for user in range(len(length_U))]
    titles = [f"kind{item // ITEMS_A_TOPIC} make{item % 7} model{item}" for item in range(num_items)]
    return Domain(
        name=name,
        catalogue=Catalogue(
            name,
            keys=[f"{name}-{item:06d}" for item in range(num_items)],
            titles=titles,
            texts=[f"title: {title}" for title in titles],
        ),
        clients=Events(keys[num_public:], sequences[num_public:], None),
        public=Events(keys[:num_public], sequences[:num_public], None),
        card={},
    )


# Sampled against full softmax.

DOMAINS, SEEDS, ROUNDS = ("beauty", "toys"), (0, 1, 2), 3
KINDS = {"full": None, "512 uniform": 512, "1,024 uniform": 1024}
SIZES = (3_000, 6_000, 12_000, 24_000, 48_000, 96_000)
NUM_STEPS, WIDTH, BATCH, MAX_TOKENS = 8, 256, 128, 24


@contextmanager
def softmax(kind: str) -> Iterator[None]:
    """Inside, every catalogue is compared with as a whole, or is sampled with so many uniform items a batch."""
    before, num_uniform = (candidates.SAMPLED_ABOVE, candidates.NUM_UNIFORM), KINDS[kind]
    candidates.SAMPLED_ABOVE = sys.maxsize if num_uniform is None else 0
    candidates.NUM_UNIFORM = num_uniform or 0
    try:
        yield
    finally:
        candidates.SAMPLED_ABOVE, candidates.NUM_UNIFORM = before


def trained(data: str, work: str, job: tuple[str, int, str]) -> dict[str, Any]:
    """ndcg@10 on all test items after every round, CPU seconds of a step and of pre-training; kept in ``work``."""
    domain, seed, kind = job
    folder = Path(work) / "sampled" / f"{domain}-{seed}-{KINDS[kind]}"
    if (folder / "found.json").is_file():
        return json.loads((folder / "found.json").read_text())
    from fedecider.cross_silo.command_line import parse_settings
    from fedecider.cross_silo.prepare import build_base_artifacts, make_recommender
    from fedecider.evaluation.metrics import user_metrics
    from fedecider.methods.local_training import train_locally
    from fedecider.running.launch import start

    folder.mkdir(parents=True, exist_ok=True)
    for vectors in (Path(work) / "sampled").glob("text-vectors-*"):
        if not (folder / vectors.name).exists():
            (folder / vectors.name).symlink_to(vectors.resolve())
    words = f"--config {CONFIG} --domains {domain} --data {data}/{domain} --method local --local_epochs 1 --seed {seed}"
    words += f" --num_eval_users 0 --hyperparameter_candidates [] --cache {folder} --output {folder}/runs"
    settings = parse_settings(words.split())
    with start(1) as launch, softmax(kind):
        began = time.process_time()
        artifacts = build_base_artifacts(settings.run, launch)
        prepared = time.process_time() - began
        models = make_recommender(settings, artifacts, launch.device)
        pair = models.start
        ndcg, steps, began = [], 0, time.process_time()
        for round in range(1, ROUNDS + 1):
            (pair, _), log = train_locally(models, 0, round, pair)
            steps += log["steps"]
            ndcg.append(float(user_metrics(models.model(0, pair).positions("test"))["ndcg@10"].mean()))
    found = {"ndcg": ndcg, "prepare_s": prepared, "steps": steps, "device": launch.device.type}
    (folder / "found.json").write_text(json.dumps(found))
    return found


def drawn_client(num_items: int) -> Any:
    """A client of drawn customers whose items start anywhere, with the adapter of the table of the configuration."""
    from fedecider.methods.client_models import client_models
    from fedecider.methods.config import LocalTraining
    from fedecider.models.adapters import attach_lora
    from fedecider.models.client_model import Base
    from fedecider.models.config import LoraSettings
    from idgen.backbones.small_decoder import build_small_decoder
    from idgen.config import SampleConfig
    from idgen.item_ids import ItemIds
    from idgen.tokenizer import train_tokenizer

    shop = drawn_shop("shop", (NUM_STEPS + 2) * BATCH, num_items, 0, 0)
    tokenizer = train_tokenizer(shop.item_texts[:100], 300)
    first = len(tokenizer)
    ids = ItemIds(shop.item_keys, [[first + item] for item in range(num_items)], {})
    config = SampleConfig(templates="history", max_history=20, max_source_tokens=MAX_TOKENS, item_dropout=0.2)
    task = build_task(shop, shop.clients, ids, tokenizer, config, True)
    vector_ID = torch.randn(first + num_items, WIDTH, generator=torch.Generator().manual_seed(0))
    model = build_small_decoder(
        torch.nn.functional.normalize(vector_ID, dim=1),
        num_layers=1,
        num_heads=2,
        d_ff=4 * WIDTH,
        max_tokens=MAX_TOKENS,
        padding=int(tokenizer.pad_token_id),
    )
    adapted = attach_lora(model, LoraSettings(WIDTH, ("table",)))
    training = LocalTraining(
        local_epochs=1, batch_size=BATCH, learning_rate=1e-4, schedule="cosine", output_lr_multiplier=20.0
    )
    return client_models(Base(adapted, tokenizer), [task], training, seed=0)


def step_seconds(num_items: int, kind: str) -> float:
    """CPU seconds of a step of local training on one thread."""
    from fedecider.methods.local_training import train_locally

    torch.set_num_threads(1)
    with softmax(kind):
        models = drawn_client(num_items)
        (client,) = models.clients
        few = client._replace(batches=lambda drawn: islice(client.batches(drawn), 2))
        train_locally(models._replace(clients=[few]), 0, 1, models.start)  # warm
        began = time.process_time()
        log = train_locally(models, 0, 1, models.start).log
        return (time.process_time() - began) / log["steps"]


def check_equal() -> None:
    """All items drawn are the full softmax."""
    from fedecider.models.adapters import Adapters
    from idgen.losses import sequence_loss

    with softmax("512 uniform"):
        models = drawn_client(400)
        (client,), start = models.clients, Adapters(models.start)
        batch = next(iter(client.batches(torch.Generator().manual_seed(0))))
        drawn = client.sample(batch, torch.Generator().manual_seed(1))
        model = models.base.holding(start)
        full, sampled = (float(sequence_loss(model, one).detach()) for one in (batch, drawn))
    assert len(drawn["catalogue"]) == 400
    assert abs(full - sampled) < 1e-5, (full, sampled)


def part_sampled(args: argparse.Namespace) -> str:
    from fedecider.data.store import load_domains
    from fedecider.models.item_texts import encoded_texts

    check_equal()
    for domain in DOMAINS:  # once for all
        encoded_texts(load_domains(Path(args.data) / domain), "auto", f"{args.work}/sampled")
    jobs = [(domain, seed, kind) for domain in DOMAINS for seed in SEEDS for kind in KINDS]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(jobs, pool.map(partial(trained, args.data, args.work), jobs), strict=True))
    lines = [
        f"ndcg@10 on all test items after {ROUNDS} rounds of one epoch, mean of seeds {', '.join(map(str, SEEDS))} and",
        "their range; every softmax of pre-training and local training is over all items, or over the targets of a",
        "batch and so many uniform items. What is sampled also moves the table by rows, without a first moment.",
        f"Trained on: {', '.join(sorted({one['device'] for one in found.values()}))}.",
        "",
        "| softmax | " + " | ".join(f"{domain} | against full" for domain in DOMAINS) + " |",
        "| --- |" + " ---: | ---: |" * len(DOMAINS),
    ]
    for kind in KINDS:
        cells = []
        for domain in DOMAINS:
            values, full = ([found[domain, seed, one]["ndcg"][-1] for seed in SEEDS] for one in (kind, "full"))
            cells.append(f"{np.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
            cells.append(f"{100 * (np.mean(values) / np.mean(full) - 1):+.1f} %")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += [
        "",
        f"CPU milliseconds of a step of local training, one thread, {BATCH} drawn customers, width {WIDTH}, one layer,",
        f"{candidates.NUM_UNIFORM} uniform items:",
        "",
        "| items | full | sampled | ratio |",
        "| ---: | ---: | ---: | ---: |",
    ]
    ours = next(kind for kind, number in KINDS.items() if number == candidates.NUM_UNIFORM)
    for size in SIZES:
        full, sampled = (step_seconds(size, kind) for kind in ("full", ours))
        lines.append(f"| {size:,} | {1000 * full:.0f} | {1000 * sampled:.0f} | {full / sampled:.1f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


# A round of two large shops.

SHOPS, SHOP_USERS, SHOP_ITEMS, SHOP_PUBLIC, TEXT_WIDTH = ("east", "west"), 98_000, 17_000, 300, 384


def draw_shops(work: str) -> None:
    """In a process of its own, whose memory is not that of the round."""
    from fedecider.data.store import save_domains

    folder = Path(work) / "two_shops" / "data"
    if not folder.is_dir():
        shops = [drawn_shop(name, SHOP_USERS, SHOP_ITEMS, SHOP_PUBLIC, seed) for seed, name in enumerate(SHOPS)]
        save_domains({shop.name: shop for shop in shops}, folder)


def drawn_vectors(texts: Sequence[str], on_step: Any = None) -> torch.Tensor:
    """Unit vectors in place of an encoder's: a direction for each kind that a title names, and something of its own."""
    kind_N = torch.tensor([int(text.partition("kind")[2].split()[0]) for text in texts])
    drawn = torch.Generator().manual_seed(0)
    kind_KD = torch.randn(int(kind_N.max()) + 1, TEXT_WIDTH, generator=drawn)
    vector_ND = kind_KD[kind_N] + torch.randn(len(texts), TEXT_WIDTH, generator=drawn)
    return torch.nn.functional.normalize(vector_ND, dim=1)


def two_shops(work: str) -> dict[str, Any]:
    from fedecider.cross_silo.command_line import parse_settings
    from fedecider.cross_silo.federate import prepare_rounds
    from fedecider.cross_silo.prepare import build_base_artifacts
    from fedecider.data.encoders import Encoder
    from fedecider.engine.run import train
    from fedecider.federation.callbacks import collecting
    from fedecider.models import item_texts
    from fedecider.running.launch import start

    folder, item_texts.load_encoder = Path(work) / "two_shops", lambda name: Encoder("drawn", drawn_vectors)
    words = f"--config {CONFIG} --domains {','.join(SHOPS)} --data {folder}/data --method fedecider --num_rounds 1"
    words += f" --local_epochs 1 --local_row off --hyperparameter_candidates [] --cache {folder}/cache"
    with start(1) as launch:
        settings, began = parse_settings([*words.split(), "--output", f"{folder}/runs"]), time.process_time()
        artifacts = build_base_artifacts(settings.run, launch)
        prepared, records = time.process_time() - began, []
        _, rounds = prepare_rounds(settings, artifacts, launch)
        began = time.process_time()
        train(rounds, [collecting(records)])
        spent = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"round_s": spent, "prepare_s": prepared, "peak": peak, "record": records[0], "device": launch.device.type}


def part_two_shops(args: argparse.Namespace) -> str:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        pool.submit(draw_shops, args.work).result()
        found = pool.submit(two_shops, args.work).result()
    return "\n".join(
        [
            f"Two shops of {SHOP_USERS:,} drawn customers and {SHOP_ITEMS:,} items each, `configs/{CONFIG.name}`,",
            f"method fedecider, one local epoch, one thread, on {found['device']}.",
            "",
            "| | measured | wanted |",
            "| --- | ---: | ---: |",
            f"| a round, training and validation, CPU seconds | {found['round_s']:.0f} | 180 |",
            f"| peak of memory of the process, GB | {found['peak'] / 1e9:.2f} | 2.5 |",
            f"| before it: reading, pre-training, distillation, CPU seconds | {found['prepare_s']:.0f} | |",
        ]
    )
