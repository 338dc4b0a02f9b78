"""The field's public bar: Amazon 2014 (5-core), leave last out, the whole catalogue ranked, every user tested.

    python benchmarks/public_bar.py --datasets beauty,toys,sports --seeds 3 --data data --work runs/public_bar

Data, each in a folder of its own below --data, here data/beauty (the 5-core files of 2014):
    python scripts/prepare_data.py --source packed --raw <amazon2014-p5> --domains beauty --k_core 0 \\
      --public_users_per_domain 300 --output data/beauty

A cell is a row of the page on one data set with one seed. One JSON a cell in --work: what is there is not run again.
--cells and --minutes end after so much; a cell that was killed goes on from the checkpoints of its stages and rounds.
--rows takes the rows whose names begin so. --budget gpu, the default where there is one, has larger models, sized for
ten minutes a cell at most. The page benchmarks/results/public_bar.md is written after every cell; what stands there
under "Older measurements" stays.

Every user is tested on the last event, the users of the pool too: of everybody all but the last two events are trained
on. Stages learn from the pool, rounds from the clients. Pool of the four companies on the decoder: the public users of
the prepared data; of all other rows: everyone but --budget's clients. A company ranks its own users and its part of the
pool. Rounds are chosen on validation items with seen items dropped; an ensemble learns its weights on validation items
with seen items kept, and has them under both protocols.

Shape legend: U all users, first the clients, then the public users of the prepared data.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import provenance
import torch
from torch import Tensor

import fedecider
from fedecider.baselines.counts import TEXT_AND_COUNTS, heuristic_positions, text_votes
from fedecider.bounds import Diverged
from fedecider.cross_silo.base_stages import distill_stage, pretrain_stage
from fedecider.cross_silo.command_line import make_settings, recorded_settings
from fedecider.cross_silo.item_ids import load_ids
from fedecider.cross_silo.prepare import load_data
from fedecider.cross_silo.settings import Settings
from fedecider.data.card import make_card
from fedecider.data.domain import Domain, Events
from fedecider.data.near_texts import nearest_texts, unit_vectors
from fedecider.data.silos import share_out
from fedecider.data.store import load_domains
from fedecider.engine.command_line import data_options
from fedecider.engine.track import track_named
from fedecider.evaluation.metrics import NOT_RANKED, catalogue_positions, mean_metrics
from fedecider.evaluation.protocols import MIN_EVENTS, NUM_HELD_OUT, get_protocol, held_out, histories, history
from fedecider.evaluation.statistics import compare_table, holm, verdict
from fedecider.federation.record import read_json, write_json
from fedecider.federation.streams import derive_seed
from fedecider.models.client_model import model_scores
from fedecider.models.ensemble import Ensemble, ModelScores, positions
from fedecider.models.ensemble_files import load_ensemble
from fedecider.models.export import load_adapter
from fedecider.models.item_table import read_item_ids
from fedecider.models.item_texts import encoded_texts
from fedecider.running.command import run
from fedecider.running.run_folder import RunFolder
from fedecider.running.settings_files import load_config
from idgen.backbone import load_backbone
from idgen.decode import constrained_beam_search, item_positions
from idgen.item_ids import ItemIds
from idgen.precision import autocast
from idgen.ranking import RankingContext, catalogue_blocks
from idgen.samples import eval_batches
from idgen.tasks import Task, build_task
from idgen.tokenizer import load_tokenizer

HERE = Path(__file__).resolve().parent
PAGE = HERE / "results" / "public_bar.md"
OLDER = "## Older measurements"
PROTOCOLS = {"strict": "strict", "keep_seen": "strict/keep_seen"}
K = 10
"""Later places are kept as this one: hit@10 and ndcg@10 are all that is read."""
UNTESTED = -1.0
NUM_WORDS = 8
"""Of a text at random."""
Places = dict[str, Tensor]
"""protocol -> (U,) float64 places; `UNTESTED` where the row does not rank the user."""


# Rows: a configuration of ours, what is changed in it, and who has which users.


class Base(NamedTuple):
    config: Path
    options: Mapping[str, Any]
    num_companies: int = 1
    has_texts: bool = True
    """Else the text of every item is words at random, so that its vector starts anywhere."""
    has_large_pool: bool = True
    """Everyone but some users; else the public users of the prepared data."""


class Row(NamedTuple):
    kind: str
    """counts; teacher or student, the backbone before and after its depth is halved; else the method of a run."""
    base: Base | None = None
    is_ensemble: bool = False


LARGE_POOL = {"num_rounds": 2, "local_epochs": 2, "hyperparameter_candidates": [], "teacher_row": False}
DECODER = Base(HERE.parent / "configs" / "domains.yaml", LARGE_POOL)
IDS_ALONE = DECODER._replace(
    options={
        **LARGE_POOL,
        "ensemble.kind": "none",
        "pretrain.samples.synthetic_share": 0.0,  # these go along texts
        "pretrain.train.learning_rate": 1e-3,  # the layers have no rule to keep
        "pretrain.train.table_lr_multiplier": 1.0,
    },
    has_texts=False,
)
T5 = Base(
    HERE / "configs" / "amazon_t5.yaml",
    {"pretrain.ids": "keywords", "num_rounds": 2, "local_epochs": 1, "lora_rank": 16, "teacher_row": False},
    num_companies=4,
)
COMPANIES = Base(
    HERE.parent / "configs" / "companies.yaml",
    {
        "ensemble.kind": "none",
        # what is chosen for such data where nobody chose (fedecider.cross_silo.auto)
        "hyperparameter_candidates": [],
        "num_rounds": 10,
        "output_lr_multiplier": 60.0,
        "lr_decay_per_round": 0.9,
    },
    num_companies=4,
    has_large_pool=False,
)
ALONE = "alone"
METHODS = {ALONE: "local", "exact mean": "flora", "fedecider": "fedecider", "FedAvg": "fedavg"}
ROWS: dict[str, Row] = {
    TEXT_AND_COUNTS: Row("counts"),
    "decoder": Row("teacher", DECODER),
    "decoder, half depth": Row("student", DECODER),
    "decoder, half depth + ensemble": Row("local", DECODER, is_ensemble=True),
    "decoder of IDs alone": Row("teacher", IDS_ALONE),
    "T5, keyword IDs": Row("teacher", T5),
    "T5, keyword IDs, half depth": Row("student", T5),
    **{f"four companies, decoder: {name}": Row(method, COMPANIES) for name, method in METHODS.items()},
    "four companies, decoder: pooled": Row("centralised", COMPANIES),
    **{f"four companies, T5: {name}": Row(method, T5) for name, method in METHODS.items()},
}
PAIRS = [
    ("decoder", TEXT_AND_COUNTS),
    ("decoder, half depth + ensemble", TEXT_AND_COUNTS),
    ("decoder, half depth + ensemble", "decoder"),
    ("decoder", "decoder of IDs alone"),
    ("decoder", "T5, keyword IDs"),
    ("T5, keyword IDs", TEXT_AND_COUNTS),
    ("T5, keyword IDs, half depth", "T5, keyword IDs"),
    ("four companies, decoder: exact mean", "four companies, decoder: alone"),
    ("four companies, decoder: fedecider", "four companies, decoder: alone"),
    ("four companies, decoder: FedAvg", "four companies, decoder: alone"),
    ("four companies, decoder: FedAvg", "four companies, decoder: exact mean"),
    ("four companies, decoder: FedAvg", "four companies, decoder: pooled"),
    ("four companies, T5: exact mean", "four companies, T5: alone"),
    ("four companies, T5: fedecider", "four companies, T5: alone"),
    ("four companies, T5: FedAvg", "four companies, T5: alone"),
]


class Budget(NamedTuple):
    clients: int
    """Users who are not in a large pool."""
    company_users: int
    """Of each of four companies on the decoder; 0 deals out all clients of the prepared data."""
    decoder: Mapping[str, Any]
    """Options of every row on a decoder."""
    large_pool: Mapping[str, Any]
    """And of those with a large pool."""
    t5: Mapping[str, Any]


BUDGETS = {
    "cpu": Budget(2000, 1500, {}, {"pretrain.train.max_steps": 960, "distill.epochs": 1}, {}),
    "gpu": Budget(
        2000,
        0,
        {"pretrain.backbone.num_layers": 4, "eval_batch_size": 1024},
        {"pretrain.train.max_steps": 1600},
        {
            "pretrain.backbone.d_model": 256,
            "pretrain.backbone.num_layers": 4,
            "pretrain.train.learning_rate": 1e-3,
            "pretrain.train.max_steps": 6000,
            "distill.epochs": 3,
            "num_beams": 50,
            "eval_batch_size": 256,
        },
    ),
}


def options_of(base: Base, budget: Budget, device: torch.device) -> dict[str, Any]:
    """All that is changed in the configuration of ``base``, by dotted name."""
    sizes = budget.t5 if base is T5 else {**budget.decoder, **(budget.large_pool if base.has_large_pool else {})}
    precision = {"precision": "bf16"}
    return {"protocol": PROTOCOLS["strict"], **base.options, **sizes, **(precision if device.type == "cuda" else {})}


# What others published, R@10 and N@10 with seen items dropped; None where it was not published.

PUBLISHED: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "KERec, no venue found: README of its repository": {
        "beauty": (0.1050, 0.0623),
        "sports": (0.0643, 0.0369),
        "toys": (0.1154, 0.0701),
    },
    "FADE, Qwen3-Embedding 0.6B + LoRA: draft that nobody refereed (repLLaMA4Rec)": {
        "beauty": (0.1088, 0.0616),
        "sports": (0.0684, 0.0371),
        "toys": (0.1273, 0.0722),
    },
    "WEARec, AAAI 2026: logs of its repository": {"beauty": (0.1041, 0.0614), "sports": (0.0631, 0.0367)},
    "BSARec, AAAI 2024: paper": {"beauty": (0.1008, 0.0611), "sports": (0.0612, None), "toys": (0.1081, 0.0679)},
    "ICSRec, WSDM 2024: README of its repository": {
        "beauty": (0.0959, 0.0578),
        "sports": (0.0565, 0.0335),
        "toys": (0.1055, 0.0657),
    },
    "SASRec + sampled softmax: eSASRec, RecSys 2025 (blondered/transformer_benchmark)": {
        "beauty": (0.0921, 0.0531),
        "sports": (0.0569, 0.0314),
        "toys": (0.0970, 0.0580),
    },
    "eSASRec, RecSys 2025 (blondered/transformer_benchmark)": {
        "beauty": (0.0928, 0.0523),
        "sports": (0.0560, 0.0323),
        "toys": (0.0939, 0.0538),
    },
    "ActionPiece: paper": {"beauty": (0.0775, 0.0424), "sports": (0.0500, 0.0264)},
    "TIGER: paper": {"beauty": (0.0648, 0.0384), "sports": (0.0400, 0.0225), "toys": (0.0712, 0.0432)},
}
PUBLISHED_KEPT: dict[str, dict[str, float]] = {
    "TASTE, CIKM 2023: paper": {"beauty": 0.0517, "sports": 0.0338, "toys": 0.0640},
}
"""N@10 with seen items kept."""
ABOUT_PUBLISHED = (
    "Of the published ones BSARec, ICSRec and WEARec set the scores of seen items to 0, not to minus infinity; FADE on "
    "Beauty has an N@10 of .0390 with seen items kept. Not here: tables of RecBole's sequential models, which keep "
    "seen items, and IDGenRec, whose code makes the user's ID from the target too (issue 1 of its repository). Nobody "
    "was found who published a federated system on these whole data sets under this protocol."
)


# Who has which users.


def everyone(domain: Domain) -> Events:
    """All users of the prepared data: (U,) clients and public ones."""
    parts = (domain.clients, domain.public)
    sequences = [sequence for part in parts for sequence in part.sequences]
    return Events([user for part in parts for user in part.users], sequences, None)


def companies(domain: Domain, base: Base, budget: Budget, seed: int) -> dict[str, Domain]:
    """The clients of a row, one or four of one catalogue, with the train parts of their pool as public users.

    A user with fewer than five events is in no pool: less would be left than a user must have.
    """
    users, num_own = everyone(domain), len(domain.clients.users)
    rng = np.random.default_rng(derive_seed(seed, "public bar", domain.name))
    if base.has_large_pool:
        own, pool = np.split(rng.permutation(len(users.users)), [budget.clients])
    else:
        own = rng.permutation(num_own)[: budget.company_users * base.num_companies or None]
        pool = np.arange(num_own, len(users.users))
    long = [place for place in sorted(pool) if len(users.sequences[place]) >= MIN_EVENTS + NUM_HELD_OUT]
    public = users.take(long).arrays()
    found = replace(
        domain,
        catalogue=domain.catalogue if base.has_texts else replace(domain.catalogue, texts=random_texts(domain)),
        clients=users.take(sorted(own)),
        public=Events(public.users, public.sequences.without_last(NUM_HELD_OUT), None),
        card={},
    )
    found.card.update(make_card(found))
    one = {domain.name: found}
    return one if base.num_companies == 1 else share_out(one, base.num_companies, None, seed)


def random_texts(domain: Domain) -> list[str]:
    """Words of the catalogue at random: a text encoder makes vectors of them that say nothing of the item.

    The same for every seed, whose runs share the vectors.
    """
    words = np.array(sorted({word for text in domain.item_texts for word in text.split()}))
    rng = np.random.default_rng(derive_seed(0, "random texts", domain.name))
    return [" ".join(row) for row in rng.choice(words, (len(domain.item_texts), NUM_WORDS))]


def ranked_by(domain: Domain, clients: Mapping[str, Domain]) -> dict[str, list[int]]:
    """Client -> the places in (U,) of the users that it ranks: its own, and of the pool every one in its turn."""
    place_of = {user: place for place, user in enumerate(everyone(domain).users)}
    names, pool = list(clients), next(iter(clients.values())).public.users
    return {
        name: [place_of[user] for user in [*clients[name].clients.users, *pool[number :: len(names)]]]
        for number, name in enumerate(names)
    }


# Cells.


class Cell(NamedTuple):
    domain: Domain
    row: Row
    seed: int
    budget: Budget
    device: torch.device
    work: Path
    """Where stages are kept."""
    output: Path
    """The run folder, where the row is one."""

    @property
    def cache(self) -> Path:
        return self.work / "cache"


def places(cell: Cell) -> tuple[Places, list[int], int]:
    """Places of the held-out items, the clients among the users, and the number of users in the pool."""
    if cell.row.base is None:
        return counted(cell), [], 0
    clients = companies(cell.domain, cell.row.base, cell.budget, cell.seed)
    options = options_of(cell.row.base, cell.budget, cell.device)
    of_row = backbone_places if cell.row.kind in ("teacher", "student") else run_places
    place_of = {user: place for place, user in enumerate(everyone(cell.domain).users)}
    own = sorted(place_of[user] for client in clients.values() for user in client.clients.users)
    pool = next(iter(clients.values())).public.users
    return of_row(cell, clients, options), own, len(pool)


def counted(cell: Cell) -> Places:
    """Text neighbours + counts of all train parts."""
    domain = cell.domain
    encoder = options_of(DECODER, cell.budget, cell.device).get("pretrain.text_encoder", "auto")
    vectors = encoded_texts({domain.name: domain}, encoder, str(cell.cache))[domain.name]
    votes = text_votes(nearest_texts(unit_vectors(vectors.numpy()), device=cell.device))
    asked = (everyone(domain).sequences, len(domain.item_keys), ("test",), votes)
    return {
        name: heuristic_positions(*asked, drop_seen=get_protocol(full).drop_seen)["test"][TEXT_AND_COUNTS]
        for name, full in PROTOCOLS.items()
    }


def backbone_places(cell: Cell, clients: Mapping[str, Domain], options: Mapping[str, Any]) -> Places:
    """Of the backbone that all clients share; it has learned from the pool alone."""
    assert cell.row.base is not None
    given = {**data_options(track_named("llm"), clients, cell.cache), "cache": str(cell.cache), "seed": cell.seed}
    settings = make_settings({**given, **options}, load_config(cell.row.base.config))
    torch.set_num_threads(settings.run.num_threads or torch.get_num_threads())
    domains = load_data(settings.run)
    first = pretrain_stage(settings.run, domains, cell.device, quiet=True)
    kept = first if cell.row.kind == "teacher" else distill_stage(settings.run, first, domains, cell.device, quiet=True)
    tokenizer = load_tokenizer(kept.folder / "backbone")
    model = load_backbone(kept.folder / "backbone", tokenizer).to(cell.device)  # type: ignore[arg-type]
    ids = load_ids(first.folder, domains, settings.run.pretrain, synthetic_of=())[next(iter(domains))].items
    task = task_of(cell.domain, everyone(cell.domain), ids, tokenizer, settings)
    return rank(model, task, settings, cell.device)


def run_places(cell: Cell, clients: Mapping[str, Domain], options: Mapping[str, Any]) -> Places:
    """Of the clients' models after the rounds, each for the users that it ranks."""
    assert cell.row.base is not None
    folder = RunFolder(cell.output)
    if not folder.metrics.is_file():
        fedecider.federate(
            clients,
            cell.row.kind,
            config=cell.row.base.config,
            output=folder.root,
            resume=True,
            progress=False,
            cache=str(cell.cache),
            seed=cell.seed,
            **options,
        )
    settings, users = recorded_settings(folder.root), everyone(cell.domain)
    found = {name: torch.full((len(users.users),), UNTESTED, dtype=torch.float64) for name in PROTOCOLS}
    tokenizer = load_tokenizer(folder.backbone)
    for client, own in ranked_by(cell.domain, clients).items():
        adapter = folder.adapters / client
        table, base = read_item_ids(adapter), load_backbone(folder.backbone, tokenizer)
        model = load_adapter(base, adapter).to(cell.device).eval()
        ids = ItemIds(list(table.id_texts), [list(tokens) for tokens in table.token_ids], {})
        task = task_of(cell.domain, users.take(own), ids, tokenizer, settings)
        if cell.row.is_ensemble:
            whole = load_ensemble(folder.private / client, cell.domain.item_keys)
            context = RankingContext(settings.ranking, True, settings.training.precision, cell.device)
            ranked = rank_ensemble(whole, model_scores(model, task, context), users.take(own))
        else:
            ranked = rank(model, task, settings, cell.device)
        for name, position_N in ranked.items():
            found[name][own] = position_N
    return {name: position_U for name, position_U in found.items() if bool((position_U != UNTESTED).any())}


def task_of(domain: Domain, users: Events, ids: ItemIds, tokenizer: Any, settings: Settings) -> Task:
    """The held-out items of any users, whoever trained on the others."""
    return build_task(domain, users, ids, tokenizer, settings.run.pretrain.samples, True)


def rank(model: Any, task: Task, settings: Settings, device: torch.device) -> Places:
    """Under every protocol; scores and beams, which do not depend on it, are asked for once."""
    trie, ranking, precision = task.trie.to(device), settings.ranking, settings.training.precision
    context = RankingContext(ranking, precision=precision, device=device)
    found = {name: torch.empty(len(task.sequences), dtype=torch.float64) for name in PROTOCOLS}

    def seen_by(user_B: Tensor) -> dict[str, list[Sequence[int]]]:
        seen: list[Sequence[int]] = [history(task.sequences[user], "test") for user in user_B.tolist()]
        drops = {name: get_protocol(full).drop_seen for name, full in PROTOCOLS.items()}
        return {name: seen if drop else [[] for _ in seen] for name, drop in drops.items()}

    if trie.has_own_tokens:
        for block in catalogue_blocks(model, task, "test", None, context):
            for name, seen in seen_by(block.user_B).items():
                found[name][block.user_B] = catalogue_positions(block.score_BI, block.target_B, seen)
        return found
    for user_B, input_ids, attention_mask, target_B in eval_batches(task, "test", ranking.eval_batch_size):
        prompt = (input_ids.to(device), attention_mask.to(device))
        with autocast(device, precision):
            item_BK, _ = constrained_beam_search(model, *prompt, trie, num_beams=ranking.num_beams)
        for name, seen in seen_by(user_B).items():
            found[name][user_B] = item_positions(item_BK.cpu(), target_B, seen).double()
    return found


def rank_ensemble(whole: Ensemble, model: ModelScores, users: Events) -> Places:
    """Under every protocol, with the same weights: of an item bought before they say how much it is worth."""
    assert whole.beside_model is not None
    sequences, near = users.arrays().sequences, nearest_texts(whole.knowledge.unit_ID)
    asked = (histories(sequences, "test"), held_out(sequences, "test"), model, [whole.beside_model])
    (place,) = positions(whole.knowledge, *asked, drop_seen=False, near=near)
    return {"strict": place.new.nan_to_num(nan=NOT_RANKED), "keep_seen": place.whole}


def measured(cell: Cell) -> dict[str, Any]:
    """A cell as it is kept: places by protocol, which users are clients, what it took."""
    started, cpu = time.perf_counter(), time.process_time()
    facts: dict[str, Any]
    try:
        found, own, num_pool = places(cell)
        kept = {name: position_U.clamp(max=K).tolist() for name, position_U in found.items()}
        facts = {"places": kept, "clients": own, "pool": num_pool}
    except Diverged as error:
        facts = {"places": {}, "ended": str(error)}
    on_gpu = cell.device.type == "cuda"
    machine = torch.cuda.get_device_name(cell.device) if on_gpu else provenance.processor()
    taken_s = time.perf_counter() - started if on_gpu else time.process_time() - cpu
    return {**facts, "minutes": taken_s / 60, "machine": machine}


# The page.

Found = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""Data set, row and seed -> a finished cell."""


def page(found: Found, datasets: Sequence[str], seeds: int, budget: str) -> list[str]:
    lines = ["# The public bar", "", *__doc__.split("\n\n")[4].splitlines(), ""]
    lines += [
        f"Budget `{budget}`. Means over the seeds that are there, N@10 of each behind them. R is the hit rate, N ndcg; "
        "*kept*: seen items are candidates too. *Clients*: N@10 of the users outside the pool. The ensemble stands "
        "beside the model after two rounds of the clients. Minutes: of the processor, or of the clock where a GPU did "
        "it; what a cell before it has built is not counted again.",
        "",
        f"Sizes, beside what the configurations and the script say: `{json.dumps(BUDGETS[budget]._asdict())}`",
        "",
    ]
    for dataset in [one for one in datasets if any(key[0] == one for key in found)]:
        lines += [f"## {dataset.capitalize()}", ""]
        lines += ["| row | pool | tested | R@10 | N@10 | seeds | kept R@10 | kept N@10 | clients N@10 | minutes |"]
        lines += ["|---|---:|---:|---:|---:|---|---:|---:|---:|---:|"]
        for row in ROWS:
            cells = [found[key] for seed in range(seeds) if (key := (dataset, row, seed)) in found]
            lines.append(f"| {row} | {' | '.join(row_cells(cells))} |")
        lines += [
            f"| *{label}* | - | all | {shown(of[dataset][0])} | {shown(of[dataset][1])} | | | | | |"
            for label, of in PUBLISHED.items()
            if dataset in of
        ]
        lines += [
            f"| *{label}* | - | all | - | - | | - | {shown(of[dataset])} | | |"
            for label, of in PUBLISHED_KEPT.items()
            if dataset in of
        ]
        lines += ["", *tests(found, dataset, seeds)]
    machines = sorted({f"{one['machine']} at {one['commit']}" for one in found.values()})
    return [*lines, ABOUT_PUBLISHED, "", f"- Cells: {'; '.join(machines)}"]


def row_cells(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Pool, users and figures of a row's cells, one a seed."""
    done = [one for one in cells if one["places"]]
    if not done:
        return [cells[0]["ended"].partition(":")[0] if cells else "not run", *[""] * 8]
    strict = [scores(one, "strict") for one in done]
    kept = [scores(one, "keep_seen") for one in done if "keep_seen" in one["places"]]
    own = [scores(one, "strict", one["clients"]) for one in done if one["clients"] and one["pool"]]
    return [
        f"{done[0]['pool']:,}" if done[0]["pool"] else "-",
        f"{sum(place != UNTESTED for place in done[0]['places']['strict']):,}",
        *means(strict),
        " ".join(shown(one[1]) for one in strict),
        *(means(kept) if kept else ["-", "-"]),
        means(own)[1] if own else "-",
        f"{fmean(one['minutes'] for one in done):.1f}",
    ]


def scores(one: Mapping[str, Any], protocol: str, users: Sequence[int] | None = None) -> tuple[float, float]:
    """hit@10 and ndcg@10 of the users that were tested, or of some."""
    position_U = torch.tensor(one["places"][protocol], dtype=torch.float64)
    position_U = position_U if users is None else position_U[list(users)]
    metrics = mean_metrics(position_U[position_U != UNTESTED], (K,))
    return metrics[f"hit@{K}"], metrics[f"ndcg@{K}"]


def means(pairs: Sequence[tuple[float, float]]) -> list[str]:
    return [shown(fmean(values)) for values in zip(*pairs, strict=True)]


def shown(value: float | None) -> str:
    """Four digits, as the field writes them."""
    return "-" if value is None else f"{value:.4f}".removeprefix("0")


def tests(found: Found, dataset: str, seeds: int) -> list[str]:
    """Paired tests over the users that both rows ranked, of the first seed that both have; Holm over the data set."""
    compared = []
    for pair in PAIRS:
        both = [[found.get((dataset, row, seed if ROWS[row].base else 0)) for row in pair] for seed in range(seeds)]
        whole = [cells for cells in both if all(one and one["places"] for one in cells)]
        if whole:
            place_2U = torch.tensor([one["places"]["strict"] for one in whole[0] if one], dtype=torch.float64)
            place_2N = place_2U[:, (place_2U != UNTESTED).all(0)]
            rows = {row: {dataset: place_N} for row, place_N in zip(pair, place_2N, strict=True)}
            compared += compare_table(rows, (f"ndcg@{K}",))
    if not compared:
        return []
    adjusted = holm([one.p_value for one in compared])
    found_lines = [verdict(one._replace(p_holm=p_holm)) for one, p_holm in zip(compared, adjusted, strict=True)]
    intro = "Paired t tests over users, one seed, seen items dropped, Holm over this data set:"
    return [intro, "", *(f"- {line}" for line in found_lines), ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="beauty,toys,sports")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument("--rows", default="", help="beginnings of the rows to run, separated by ';' (default: all)")
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="folder with a folder of prepared data for each"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/public_bar"), help="cells, runs and cache")
    parser.add_argument("--budget", choices=list(BUDGETS), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cells", type=int, default=sys.maxsize, help="end after so many new cells")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after so many minutes")
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    device, started, left = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic(), args.cells
    datasets, budget = args.datasets.split(","), BUDGETS[args.budget]
    files = {
        (dataset, name, seed): args.work / args.budget / f"{dataset}-{seed}-{name}.json".replace(" ", "_")
        for seed in range(args.seeds)
        for name, row in ROWS.items()
        for dataset in datasets
        if row.base or not seed  # counts have no seed
    }
    domains: dict[str, Domain] = {}
    commit = provenance.git_commit()  # of what is loaded, whatever is committed meanwhile
    (args.work / args.budget).mkdir(parents=True, exist_ok=True)
    found = {key: read_json(path) for key, path in files.items() if path.is_file()}
    for key, path in files.items():
        dataset, name, seed = key
        if key in found or not any(name.startswith(start) for start in args.rows.split(";")):
            continue
        if left <= 0 or time.monotonic() - started > 60 * args.minutes:
            break
        if dataset not in domains:
            domains |= load_domains(args.data / dataset, [dataset])
        print(f"{dataset}, seed {seed}: {name}", flush=True)
        cell = Cell(domains[dataset], ROWS[name], seed, budget, device, args.work, path.with_suffix(""))
        found[key] = {**measured(cell), "commit": commit}
        write_json(path, found[key])
        left -= 1
        write_page(args, found, datasets)
    write_page(args, found, datasets)


def write_page(args: argparse.Namespace, found: Found, datasets: Sequence[str]) -> None:
    before = args.output.read_text(encoding="utf-8") if args.output.is_file() else ""
    older = ["", OLDER + before.partition(OLDER)[2].rstrip()] if OLDER in before else []
    lines = page(found, datasets, args.seeds, args.budget)
    heading = provenance.heading("public_bar.py", torch.get_num_threads())
    args.output.write_text("\n".join([*lines, *heading, *older]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run(main))
