"""What joining is worth: companies alone, joined and pooled; what they share, how unequal and how wrong they are.

    python benchmarks/joining.py --data data --work runs/joining [--parts companies,overlap] [--seeds 3] [--minutes 60]

Data, each prepared in a folder of its own below --data, as for benchmarks/public_bar.py and configs/amazon_t5.yaml:
beauty and toys (Amazon 2014), amazon_cpu with video_games and office (Amazon 2018). Of the part "nobody public" also
taste0, taste1, ...: companies c0 to c3 of 500 video_games customers each, two of one taste and two of another, with one
catalogue and nobody public. Of the part "natural" also chains and chains_raw (benchmarks/natural_companies.py). Data
that are not there are left out.

Settings: configs/companies.yaml with what SETTINGS says. A company is dealt customers at random; the 300 public users
of a data set teach one backbone, with seed 0, for all its cells: a seed deals the companies out and trains them. Every
company is trained alone beside the rounds. Joined and pooled companies add up counts, alone a company has its own.
Every customer is tested on the last event, seen items dropped, the whole catalogue ranked.

A cell is a federation with one seed. One JSON a cell in --work: what is there is not run again. --cells and --minutes
end after so much; --only takes the cells whose keys begin so, and writes no page. benchmarks/results/joining.md is
written at the end (--cells 0: of what is there); what benchmarks/fedmd.py wrote there stays, and "Older measurements".
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from html import unescape
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import natural_companies
import numpy as np
import provenance
import torch
from safetensors.torch import load_file

import fedecider
from fedecider.cross_silo.base_stages import distill_stage, pretrain_stage
from fedecider.cross_silo.command_line import make_settings
from fedecider.cross_silo.ended import Ended
from fedecider.cross_silo.ended import ended as ended_run
from fedecider.cross_silo.ensembles import Fitting, System
from fedecider.cross_silo.entries import ItemTexts, item_texts_of
from fedecider.cross_silo.exchange import added_by
from fedecider.cross_silo.federate import check_federation, prepare_rounds, shared_out
from fedecider.cross_silo.item_ids import ITEM_VECTORS, DomainIds, load_ids
from fedecider.cross_silo.joining import (
    as_trained,
    checked_events,
    chosen_systems,
    leaving,
    local_system,
    may_choose,
    overlap_data,
    system_of,
)
from fedecider.cross_silo.prepare import BaseArtifacts
from fedecider.cross_silo.reported import chosen_scale
from fedecider.cross_silo.settings import Settings
from fedecider.data.card import make_card
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.near_texts import unit_vectors
from fedecider.data.silos import share_by, share_out
from fedecider.data.store import load_domains
from fedecider.engine.run import train
from fedecider.evaluation.metrics import MACRO, user_metrics
from fedecider.evaluation.protocols import MIN_EVENTS
from fedecider.evaluation.statistics import ONE_SIDED, Comparison, clearly_above, compare_table, shared_persons
from fedecider.federation.callbacks import RoundCallback
from fedecider.federation.record import read_json, write_json
from fedecider.federation.streams import derive_seed
from fedecider.methods import METHODS
from fedecider.models.client_model import ClientModel
from fedecider.models.item_texts import encoded_texts
from fedecider.report.joining import of_one_item, unlike_ones
from fedecider.running.command import run
from fedecider.running.launch import start
from fedecider.running.options import read_words
from fedecider.running.stages import Stage
from fedecider.testing.faults import Fault, faulty_runs
from idgen.item_ids import ItemIds
from idgen.synthetic import nearest_items

HERE = Path(__file__).resolve().parent
PAGE = HERE / "results" / "joining.md"
OLDER = "## Older measurements"
OTHERS = "## Companies with different backbones"
"""The section that benchmarks/fedmd.py writes, before the older measurements."""
CONFIG = HERE.parent / "configs" / "companies.yaml"
SETTINGS: dict[str, Any] = {
    # what is chosen for such data where nobody chose (fedecider.cross_silo.auto), in fewer rounds
    "hyperparameter_candidates": [],
    "num_rounds": 6,
    "local_epochs": 2,
    "patience": 0,
    "output_lr_multiplier": 60.0,
    "lr_decay_per_round": 0.9,
    "update_scales": "0,0.5,1",
}
FOLDERS = {"beauty": "beauty", "toys": "toys", "video_games": "amazon_cpu", "office": "amazon_cpu", "journey": "chains"}
"""Data set -> folder below --data."""
PUBLIC_USERS = 300
COMPANIES, CUSTOMERS = 4, 500
CPU = torch.device("cpu")
K = 10
METRICS = ("hit@10", "ndcg@10")
ENSEMBLE = " + ensemble"
ALONE, JOINED, KEPT, POOLED = "alone", "joined", "kept", "pooled"


# Data: whom a data set's customers are dealt to.


def whole_domain(name: str, data: Path) -> Domain:
    """A data set with 300 public users, whoever is public in the prepared data; all others are clients. Nobody is
    public beside companies by taste."""
    if name == natural_companies.JOURNEY:
        return natural_companies.journey(data)
    if name not in FOLDERS:
        return by_taste(name, data)
    (domain,) = load_domains(data / FOLDERS[name], [name]).values()
    parts = (domain.clients.arrays(), domain.public.arrays())
    users = [user for part in parts for user in part.users]
    everyone = Events(users, [list(items) for part in parts for items in part.sequences], None)
    public = len(domain.clients.users) + np.arange(len(domain.public.users))[:PUBLIC_USERS]
    own = np.setdiff1d(np.arange(len(users)), public)
    return with_card(replace(domain, clients=everyone.take(own), public=everyone.take(public), card={}))


def by_taste(name: str, data: Path) -> Domain:
    """Customers of four companies by taste as one domain; which company has one is in front of the user."""
    first, *others = companies = list(load_domains(data / name, TASTE).values())
    assert all(one.item_keys == first.item_keys for one in others), f"{data / name}: companies with other catalogues"
    parts = [company.clients.arrays() for company in companies]
    users = [user for part in parts for user in part.users]
    everyone = Events(users, [list(items) for part in parts for items in part.sequences], None)
    return with_card(replace(first, name=name, clients=everyone, public=NO_EVENTS, card={}))


def with_card(domain: Domain, **facts: Any) -> Domain:
    return replace(domain, card={**make_card(domain), **facts})


def some(domain: Domain, num_users: int, seed: int) -> Domain:
    """So many of the clients, drawn at random."""
    rng = np.random.default_rng(derive_seed(seed, "joining", domain.name))
    chosen = rng.permutation(len(domain.clients.users))[:num_users]
    return with_card(replace(domain, clients=domain.clients.take(sorted(chosen)), card={}))


Load = Callable[[str], Domain]
"""Name of a data set -> its whole domain."""


def four(domain: Domain, seed: int, load: Load, overlap: float = 1.0) -> dict[str, Domain]:
    """Four companies of 500 customers; below an ``overlap`` of 1 with so much of the catalogue in common."""
    whole = some(domain, COMPANIES * CUSTOMERS, seed)
    return share_out({domain.name: whole}, COMPANIES, None, seed, overlap)


def alike(domain: Domain, seed: int, load: Load) -> dict[str, Domain]:
    """The four companies of `by_taste`."""
    return share_by({domain.name: domain}, lambda user: user.partition(":")[0])


def dealt(domain: Domain, seed: int, load: Load, sizes: Mapping[str, int]) -> dict[str, Domain]:
    """Companies of so many customers each."""
    whole = some(domain, sum(sizes.values()), seed)
    names = [name for name, size in sizes.items() for _ in range(size)]
    rng = np.random.default_rng(derive_seed(seed, "joining sizes", domain.name))
    owner = dict(zip(rng.permutation(whole.clients.users).tolist(), names, strict=True))
    return share_by({domain.name: whole}, owner.__getitem__)


def halves(domain: Domain, seed: int, load: Load, same: bool) -> dict[str, Domain]:
    """Two pairs of companies that sell the same items. Of its customers' events the first one of a pair has every
    other one; the second one has the rest of the same customers' (``same``), or such a rest of other customers."""
    long = np.flatnonzero(domain.clients.arrays().sequences.length_U >= 2 * MIN_EVENTS)
    many = with_card(replace(domain, clients=domain.clients.take(long), card={}))
    groups = dealt(many, seed, load, {f"{which}.{pair}": CUSTOMERS for pair in (1, 2) for which in (FIRST_ONE, OTHER)})
    found = {}
    for name, company in groups.items():
        which, _, pair = name.partition(".")
        clients = groups[f"{FIRST_ONE}.{pair}"].clients if same else company.clients
        rows = [list(row)[which == OTHER :: 2] for row in clients.sequences]
        events = Events(clients.users, rows, None)
        found[name] = with_card(replace(company, clients=events, card={}), silo=company.card["silo"])
    return found


def dealt_by_category(domain: Domain, seed: int, load: Load, alpha: float) -> dict[str, Domain]:
    return natural_companies.by_category(domain, seed, alpha)


FIRST_ONE, OTHER = "first", "other"


def with_wrong(domain: Domain, seed: int, load: Load, kind: str) -> dict[str, Domain]:
    """Four companies of which the last one has events that are ``WRONG[kind]``; without ``kind`` it is not there."""
    companies = four(domain, seed, load)
    *honest, last = companies
    if not kind:
        return {name: companies[name] for name in honest}
    company = companies[last]
    rng = np.random.default_rng(derive_seed(seed, "wrong", kind))
    items = WRONG[kind](list(map(list, company.clients.sequences)), domain, load, rng)
    events = Events(company.clients.users, items, None)
    facts = {"silo": company.card["silo"]}
    return {**companies, last: with_card(replace(company, clients=events, card={}), **facts)}


Sequences = list[list[int]]


def mixed_up(items: Sequences, domain: Domain, load: Load, rng: np.random.Generator) -> Sequences:
    """Every item under the number of another one."""
    new = rng.permutation(len(domain.item_keys))
    return [new[row].tolist() for row in items]


def bots(items: Sequences, domain: Domain, load: Load, rng: np.random.Generator) -> Sequences:
    """As many events, of any items."""
    return [rng.integers(len(domain.item_keys), size=len(row)).tolist() for row in items]


def foreign(items: Sequences, domain: Domain, load: Load, rng: np.random.Generator) -> Sequences:
    """What customers of another data set bought, its best-selling item as the best-selling one here, and so on."""
    other = load(FOREIGN)
    here, there = (np.argsort(-popularity(one), kind="stable") for one in (domain, other))
    new = np.empty(len(there), np.int64)
    new[there] = here[np.arange(len(there)) % len(here)]
    users = rng.choice(len(other.clients.users), len(items), replace=False)
    return [new[list(other.clients.sequences[user])].tolist() for user in users]


def one_item(items: Sequences, domain: Domain, load: Load, rng: np.random.Generator) -> Sequences:
    """Nine events of ten are of the best-selling item. (All of them: it is refused before training.)"""
    best = int(popularity(domain).argmax())
    return [[best if rng.random() < ONE_ITEM_SHARE else item for item in row] for row in items]


def popularity(domain: Domain) -> np.ndarray:
    """(I,) events of the clients."""
    return np.bincount(domain.clients.arrays().sequences.value_E, minlength=len(domain.item_keys))


FOREIGN = "office"
ONE_ITEM_SHARE = 0.9
WRONG: dict[str, Callable[[Sequences, Domain, Load, np.random.Generator], Sequences]] = {
    "item numbers mixed up": mixed_up,
    "bots": bots,
    "events of another domain": foreign,
    "one item": one_item,
}


# Cells.


class Cell(NamedTuple):
    """One federation with one seed."""

    part: str
    row: str
    data: str
    seed: int
    companies: Callable[[Domain, int, Load], dict[str, Domain]]
    """Whole domain, seed, and for other data sets a loader -> the companies by name."""
    method: str = "fedavg"
    options: Mapping[str, Any] = {}
    counts: Callable[[str], bool] = bool
    """Which companies, by their names, are read."""
    away: Callable[[str], bool] = lambda name: False
    """Which take part in no round, and get what came of them."""

    @property
    def key(self) -> str:
        return re.sub(r"[^\w.-]+", "_", f"{self.part}-{self.data}-{self.row}-{self.seed}")


NOBODY = "nobody public"
NOBODY_DATA = ("video_games", "beauty")
TASTE = ("c0", "c1", "c2", "c3")
RANDOM, BY_TASTE = "at random", "by taste"


def nobody_cells(seed: int) -> list[Cell]:
    cells = [Cell(NOBODY, f"{data} {RANDOM}", data, seed, four) for data in NOBODY_DATA]
    return [cells[0], Cell(NOBODY, f"{cells[0].data} {BY_TASTE}", f"taste{seed}", seed, alike), *cells[1:]]


NATURAL = "natural"
JOURNEY = natural_companies.JOURNEY
REGION, PRICE, START = "region", "price level", "one starts late"
ALPHAS = (0.1, 0.5)


def categories(alpha: float) -> str:
    return f"categories, Dirichlet({alpha:g})"


WORDS = ", IDs of words"
WRITTEN: dict[str, Any] = {
    "pretrain.ids": "keywords",
    "pretrain.samples.dense_head": True,
    "pretrain.samples.max_source_tokens": 64,
}
"""Of kinds that end with `WORDS`; the others' IDs are one token each."""
KINDS: dict[str, tuple[str, Callable[[Domain, int, Load], dict[str, Domain]]]] = {
    RANDOM: ("video_games", four),
    BY_TASTE: ("taste", alike),
    **{categories(alpha): ("beauty", partial(dealt_by_category, alpha=alpha)) for alpha in ALPHAS},
    REGION: (JOURNEY, natural_companies.by_region),
    PRICE: (JOURNEY, natural_companies.by_price),
    START: (JOURNEY, natural_companies.by_start),
    RANDOM + WORDS: ("video_games", four),
    BY_TASTE + WORDS: ("taste", alike),
}
"""Kind of companies -> data set, by taste one a seed, and who its companies are."""
SIDE_BY_SIDE = ("fedavg", "fedecider", "flora", "pfedavg", "ditto")
"""The first one's cell has what companies have alone, too."""
COUNTS = "counts"
MANY_EVENTS = {"local_epochs": 1}
"""Of the Complete Journey: an epoch of its events takes three times as long as of the others'."""


def natural_cells(seed: int) -> list[Cell]:
    cells = []
    for method in SIDE_BY_SIDE:
        for kind, (data, companies) in KINDS.items():
            data = f"{data}{seed}" if kind.startswith(BY_TASTE) else data
            options = {"precision": "bf16", **({} if method == SIDE_BY_SIDE[0] else {"local_row": "off"})}
            options |= MANY_EVENTS if data == JOURNEY else {}
            options |= WRITTEN if kind.endswith(WORDS) else {}
            cells.append(Cell(NATURAL, f"{kind}, {method}", data, seed, companies, method, options))
    return cells


SHARES = (0.0, 0.25, 0.5, 0.75)
"""Of the items that all companies sell; at 1 stand the companies of the part before."""
DATASETS = ("beauty", "toys", "video_games")


def companies_cells(seed: int) -> list[Cell]:
    cells = [Cell("companies", JOINED, data, seed, four) for data in DATASETS]
    pooled = {"local_row": "off"}
    return cells + [Cell("companies", POOLED, data, seed, four, "centralised", pooled) for data in DATASETS]


def overlap_cells(seed: int) -> list[Cell]:
    shares = [(f"{100 * share:.0f} %", partial(four, overlap=share)) for share in SHARES]
    return [Cell("overlap", name, "beauty", seed, companies) for name, companies in shares]


UNEQUAL = "video_games"
LARGE = {"large": 5000, **{f"small.{number}": 150 for number in (1, 2, 3)}}
"""As `HUGE`; no data set with few items has so many customers."""
NEWCOMERS = {f"new.{number:02}": 50 for number in range(10)}
"""Ten at once, for one of 50 customers says nothing by itself; none of them trains anything."""
HUGE_DATA = "toys"
HUGE = {"large": 10_000, **{f"small.{number}": 300 for number in (1, 2, 3)}}
HUGE_ALONE, HUGE_JOINED = "10,000 alone", "10,000 by examples"
"""Two cells, each of half the time, with one seed."""
WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "equal": ("fedavg", {"weighting": "uniform"}),
    "by examples": ("fedavg", {"weighting": "examples"}),
    "learned (fedecider)": ("fedecider", {}),
}
NEW_ALONE, NEW_JOINED = "newcomers alone", "newcomers"


def is_new(name: str) -> bool:
    return name in NEWCOMERS


def unequal_cells(seed: int) -> list[Cell]:
    sizes = partial(dealt, sizes=LARGE)
    cells = [Cell("unequal", row, UNEQUAL, seed, sizes, *how) for row, how in WEIGHTS.items()]
    old = {f"old.{number}": CUSTOMERS for number in range(1, COMPANIES + 1)}
    everyone = partial(dealt, sizes={**old, **NEWCOMERS})
    off = {"local_row": "off"}
    huge = partial(dealt, sizes=HUGE)
    if seed == 0:
        options = {**off, "weighting": "examples"}
        cells += [
            Cell("unequal", HUGE_JOINED, HUGE_DATA, seed, huge, "fedavg", options),
            Cell("unequal", HUGE_ALONE, HUGE_DATA, seed, huge, "local", off),
        ]
    return [
        *cells,
        Cell("unequal", NEW_JOINED, UNEQUAL, seed, everyone, "fedavg", off, is_new, is_new),
        Cell("unequal", NEW_ALONE, UNEQUAL, seed, partial(newcomers_alone, sizes={**old, **NEWCOMERS}), "local", off),
    ]


def newcomers_alone(domain: Domain, seed: int, load: Load, sizes: Mapping[str, int]) -> dict[str, Domain]:
    return {name: one for name, one in dealt(domain, seed, load, sizes).items() if is_new(name)}


WRONG_DATA = "video_games"
WITHOUT = "without it"
DEFENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "mean": ("fedavg", {}),
    "median": ("fedavg", {"robust_mean": "median"}),
    "norms bounded": ("fedavg", {"robust_mean": "norm_clip"}),
    "learned weights (fedecider)": ("fedecider", {}),
}


def wrong_cells(seed: int) -> list[Cell]:
    def cell(row: str, kind: str, method: str, options: Mapping[str, Any]) -> Cell:
        companies = partial(with_wrong, kind=kind)
        return Cell("wrong", row, WRONG_DATA, seed, companies, method, options, is_honest)

    cells = [cell(WITHOUT, "", "fedavg", {})]
    return cells + [cell(f"{kind}, {name}", kind, *how) for kind in WRONG for name, how in DEFENCES.items()]


def named_cells(seed: int) -> list[Cell]:
    """Whom warnings name, on every data set: nothing is trained for that."""
    kinds = {WITHOUT: "", **{kind: kind for kind in WRONG}}
    return [
        Cell("named", row, data, seed, partial(with_wrong, kind=kind), counts=is_honest)
        for data in DATASETS
        for row, kind in kinds.items()
    ]


def is_honest(name: str) -> bool:
    return not name.endswith(f".{COMPANIES}")


COMMON_DATA = "video_games"
COMMON = {"items": False, "items and customers": True}


def common_cells(seed: int) -> list[Cell]:
    return [
        Cell("common", row, COMMON_DATA, seed, partial(halves, same=same), counts=is_first)
        for row, same in COMMON.items()
    ]


def is_first(name: str) -> bool:
    return name.startswith(FIRST_ONE)


DEPARTMENTS = ("video_games", "office", "toys")
QUICK: dict[str, Any] = {
    "num_rounds": 1,
    "lora_rank": 64,
    "pretrain.text_encoder": "tfidf",
    "pretrain.backbone.d_model": 64,
    "pretrain.train.max_steps": 10,
}
"""Of the departments, of which words are wanted and no figures."""


def departments_cells(seed: int) -> list[Cell]:
    return [Cell("departments", "said", DEPARTMENTS[0], seed, four, "fedecider", QUICK)] if seed == 0 else []


PARTS: dict[str, Callable[[int], list[Cell]]] = {
    NATURAL: natural_cells,
    "companies": companies_cells,
    NOBODY: nobody_cells,
    "overlap": overlap_cells,
    "unequal": unequal_cells,
    "wrong": wrong_cells,
    "named": named_cells,
    "departments": departments_cells,
    "common": common_cells,
}
FIRST = ("companies", "overlap", "wrong")
"""Parts whose seed 0 comes before all else."""


def cells_of(parts: Sequence[str], seeds: int) -> list[Cell]:
    """In the order in which they are worth their time."""
    ordered = [(part, 0) for part in FIRST] + [(part, 0) for part in PARTS if part not in FIRST]
    ordered += [(part, seed) for seed in range(1, seeds) for part in PARTS]
    return [cell for part, seed in ordered if part in parts for cell in PARTS[part](seed)]


# Measuring.


class Shared(NamedTuple):
    """What all cells of a data set start from."""

    whole: Domain
    pretrained: Stage
    distilled: Stage
    ids: DomainIds
    texts: dict[str, ItemTexts]
    """Of the whole catalogue, once a cell has asked: near texts take longer than the training of a small company."""


def settings_of(clients: Mapping[str, Domain], cell: Cell, cache: Path, output: Path) -> Settings:
    protocol = "next_basket" if cell.data == JOURNEY else "strict"
    words = [f"--config={CONFIG}", f"--method={cell.method}", f"--output={output}", f"--cache={cache}"]
    words += [
        f"--seed={cell.seed}",
        f"--domains={','.join(clients)}",
        f"--protocol={protocol}",
    ]
    given = read_words(words)
    return make_settings({**given.options, **SETTINGS, **cell.options}, given.config)


def stage_options(cell: Cell) -> dict[str, Any]:
    """Options of stage 1."""
    return {name: value for name, value in cell.options.items() if name.startswith("pretrain.")}


def shared_of(cell: Cell, load: Load, cache: Path) -> Shared:
    """The backbone of a data set, trained on its public users with seed 0; no company's customers teach it."""
    whole = load(cell.data)
    if cell.part in (NOBODY, NATURAL):
        whole = with_card(replace(whole, public=NO_EVENTS, card={}))
    few = some(whole, CUSTOMERS, 0)  # the distillation report ranks some
    settings = settings_of(
        {cell.data: few}, cell._replace(seed=0, method="local", options=stage_options(cell)), cache, cache
    )
    torch.set_num_threads(settings.run.num_threads or torch.get_num_threads())
    pretrained = pretrain_stage(settings.run, {cell.data: few}, CPU)
    distilled = distill_stage(settings.run, pretrained, {cell.data: few}, CPU)
    ids = load_ids(pretrained.folder, {cell.data: few}, settings.run.pretrain)[cell.data]
    return Shared(whole, pretrained, distilled, ids, {})


def texts_of(shared: Shared, ended: Ended) -> Mapping[str, ItemTexts]:
    """Company -> the texts of its items."""
    domains, name = ended.artifacts.domains, shared.whole.name
    if any(domain.is_part for domain in domains.values()):
        return item_texts_of(ended.settings, ended.artifacts)
    if name not in shared.texts:
        shared.texts[name] = next(iter(item_texts_of(ended.settings, ended.artifacts).values()))
    return dict.fromkeys(domains, shared.texts[name])


def artifacts_of(shared: Shared, clients: Mapping[str, Domain]) -> BaseArtifacts:
    """What the companies of a cell start from: the items of each have the IDs of the whole catalogue."""
    found, items = {}, shared.ids.items
    for client, domain in clients.items():
        found[client] = shared.ids
        if domain.is_part:
            number_I = domain.catalogue_number_I
            texts, tokens = ([of[item] for item in number_I] for of in (items.texts, items.token_ids))
            vector_ID = load_file(shared.pretrained.folder / ITEM_VECTORS)[shared.whole.name]
            near = nearest_items(vector_ID[torch.from_numpy(number_I)])
            found[client] = DomainIds(ItemIds(texts, tokens, items.report), near)
    return BaseArtifacts(clients, found, shared.pretrained, shared.distilled, clients)


def trained(
    cell: Cell, shared: Shared, clients: Mapping[str, Domain], work: Path, curve: list[float] | None = None
) -> Ended:
    """These companies after their rounds, as a run of `fedecider.federate` has them; nothing is handed over. ``curve``
    gets the validation ndcg@10 of every round."""
    curve = [] if curve is None else curve
    settings = settings_of(clients, cell, work / "cache", work / "run")
    check_federation(settings, clients)
    artifacts = artifacts_of(shared, clients)
    settings = as_trained(settings, overlap_data(settings, clients)["nothing"])
    launch = shared_out(settings, start(settings.run.num_threads), clients)
    models, rounds = prepare_rounds(settings, artifacts, launch)
    away = [Fault(number, "away") for number, name in enumerate(clients) if cell.away(name)]
    with faulty_runs(away):
        state = train(rounds, [RoundCallback(lambda round: curve.append(round.record["score"]))])
    return ended_run(settings, models, rounds, artifacts, state)


class Measured(NamedTuple):
    """What companies have after their rounds."""

    systems: dict[str, System]
    """Row -> models, each with its ensemble."""
    keeps: dict[str, str]
    added: dict[str, dict[str, float]]
    """Company -> company -> size of what the second adds to the first one's model, where a method weighs."""
    scales: dict[str, float]
    """Company -> of its update in the joined model."""


def ranked(ended: Ended, texts: Mapping[str, ItemTexts]) -> Measured:
    """The same choices on validation items as in `fedecider.cross_silo.results`, without rules, pages and files."""
    settings, names = ended.settings, list(ended.artifacts.domains)
    scales = {name: chosen_scale(settings, ended.joined(name)) for name in names}

    def model_of(name: str) -> ClientModel:
        return ended.joined(name).scaled(scales[name])

    fuses = bool(METHODS[settings.run.method].fusion_weights)
    fitting = Fitting(settings, ended.artifacts, texts)
    added = added_by(ended.models, model_of, names) if fuses else {}
    joined = system_of(fitting, ended.method.name, model_of, names)
    own = {"centralised": POOLED, "local": ALONE}.get(ended.method.name, JOINED)
    if ended.alone is None:
        return Measured({own: joined}, {}, added, scales)
    alone = local_system(fitting, ended.alone)
    systems, keeps = {JOINED: joined, ALONE: alone}, dict.fromkeys(names, "joined")
    if fitting.shares:
        systems[COUNTS] = system_of(fitting, COUNTS, alone.model_of, names)
    if may_choose(settings) and leaving(joined, alone):
        kept, systems[KEPT] = chosen_systems(fitting, joined, alone)
        keeps = dict(kept)
    return Measured(systems, keeps, added, scales)


def measured(cell: Cell, shared: Shared, load: Load, work: Path) -> dict[str, Any]:
    """A cell as it is kept: row -> company -> places of its customers' last events, and what the run says."""
    started = time.process_time()
    clients = cell.companies(shared.whole, cell.seed, load)
    curve: list[float] = []
    ended = trained(cell, shared, clients, work, curve)
    trained_s = time.process_time() - started
    systems, keeps, added, scales = ranked(ended, texts_of(shared, ended))
    ranks = {
        f"{row}{after}": of
        for row, system in systems.items()
        for after, of in (("", system.model), (ENSEMBLE, system.whole))
    }
    places = {row: {name: capped(place_U) for name, place_U in of["test"].items()} for row, of in ranks.items()}
    fuses = bool(METHODS[ended.settings.run.method].fusion_weights)
    return {
        "users": {name: list(domain.clients.users) for name, domain in clients.items()},
        "places": places,
        "honest": [name for name in clients if cell.counts(name)],
        "keeps": keeps,
        "added": added,
        "scales": scales,
        "alpha": [fusion_of(ended.joined(name)) for name in clients] if fuses else [],
        "valid": {row: mean(of["valid"], "ndcg@10") for row, of in ranks.items()},
        "curve": curve,
        "round": ended.rounds.best_round,
        "num_items": len(shared.whole.item_keys),
        "events": sum(domain.clients.num_events for domain in clients.values()),
        "settings": SETTINGS,
        "trained_minutes": trained_s / 60,
        "minutes": (time.process_time() - started) / 60,
        "machine": provenance.processor(),
    }


def fusion_of(model: ClientModel) -> list[float]:
    """(K,) its fusion weights."""
    assert model.adapters is not None
    assert model.adapters.peers is not None
    return model.adapters.peers.alpha.tolist()


def departments(cell: Cell, load: Load, work: Path) -> dict[str, Any]:
    """What is said of three departments without a common item, from tables of events, before training and after."""
    started, output = time.process_time(), work / "run"
    shutil.rmtree(output, ignore_errors=True)
    domains = {name: some(load(name), CUSTOMERS, cell.seed) for name in DEPARTMENTS}
    sold = Counter(key for domain in domains.values() for key in domain.item_keys)
    events, items = {}, {}
    for name, domain in domains.items():
        rows = zip(domain.clients.users, domain.clients.sequences, strict=True)
        named = [(user, domain.item_keys[item]) for user, row in rows for item in row]
        events[name] = [{"user": user, "item": key} for user, key in named if sold[key] == 1]
        title = dict(zip(domain.item_keys, domain.titles, strict=True))
        keys = sorted({event["item"] for event in events[name]})
        items[name] = [{"item": key, "title": title[key] or key} for key in keys]
    data = fedecider.from_events(events, items=items)
    asked = {**SETTINGS, **cell.options, "cache": str(work / "cache"), "seed": cell.seed}
    result = fedecider.federate(data, cell.method, config=CONFIG, output=output, progress=False, **asked)
    said, page_of_run = result.record["overlap"]["sentences"], result.report().read_text(encoding="utf-8")
    facts = {
        "before": said,
        "asked": cell.method,
        "method": result.raw["method"],
        "verdict": result.verdict.splitlines(),
        "on_page": all(sentence in unescape(page_of_run) for sentence in said),
        "weights": not result.fusion_weights.empty,
        "users": {},
        "places": {},
        "honest": [],
        "keeps": {},
        "settings": SETTINGS,
    }
    shutil.rmtree(output)
    return {**facts, "minutes": (time.process_time() - started) / 60, "machine": provenance.processor()}


def named(cell: Cell, load: Load, work: Path) -> dict[str, Any]:
    """Which companies a run would warn of by their events."""
    started, whole = time.process_time(), load(cell.data)
    clients = cell.companies(whole, cell.seed, load)
    run = settings_of(clients, cell, work / "cache", work / "run").run
    vector_ID = encoded_texts({cell.data: whole}, run.pretrain.text_encoder, run.cache)[cell.data]
    events = checked_events(clients, dict.fromkeys(clients, unit_vectors(vector_ID.numpy())))
    return {
        "events": events,
        "by texts": unlike_ones(events),
        "by one item": of_one_item(events),
        "users": {},
        "places": {},
        "honest": [name for name in clients if cell.counts(name)],
        "keeps": {},
        "settings": SETTINGS,
        "minutes": (time.process_time() - started) / 60,
        "machine": provenance.processor(),
    }


UNTRAINED = {"departments": departments, "named": named}
"""Parts of which words are wanted and no figures."""


def capped(position_U: torch.Tensor) -> list[Any]:
    """Places as whole numbers, of baskets a list each; later ones than ten are kept as ten: hit@10 and ndcg@10 are all
    that is read."""
    if position_U.ndim == 2:
        return [capped(row_T[~row_T.isnan()]) for row_T in position_U]
    return [int(place) for place in position_U.clamp(max=K)]


def uncapped(places: Sequence[Any]) -> torch.Tensor:
    """What `capped` has kept: (U,), of baskets (U, T) with NaN behind the last one."""
    if isinstance(places[0], list):
        return torch.nested.nested_tensor([torch.tensor(row).double() for row in places]).to_padded_tensor(math.nan)
    return torch.tensor(places).double()


# Reading cells.

Cells = Sequence[Mapping[str, Any]]
"""The same row, one cell a seed."""
Places = dict[str, torch.Tensor]
"""Seed and company -> places of its customers."""


def places_of(cells: Cells, row: str, names: str = "") -> Places:
    """Of the companies that are read, and whose name begins so; a row of what companies keep is there only where one
    does not keep the joined model."""
    found = {}
    for seed, cell in enumerate(cells):
        of_row = cell["places"].get(row) or cell["places"].get(row.replace(KEPT, JOINED), {})
        read = [name for name in cell["honest"] if name in of_row and name.startswith(names)]
        found |= {f"{seed}/{name}": uncapped(of_row[name]) for name in read}
    return found


def users_of(cells: Cells) -> dict[str, list[str]]:
    return {f"{seed}/{name}": cell["users"][name] for seed, cell in enumerate(cells) for name in cell["honest"]}


def mean(places: Places, metric: str) -> float:
    """Mean over companies and seeds."""
    return fmean(float(user_metrics(position_U)[metric].double().mean()) for position_U in places.values())


def over_seeds(places: Places, users: Mapping[str, list[str]]) -> Places:
    """Companies (S, U) where they have the same customers with every seed, else those of each seed by themselves."""
    companies: dict[str, list[str]] = {}
    for name in places:
        companies.setdefault(name.partition("/")[2], []).append(name)
    every = list(companies.values())
    if any(len(names) != len(every[0]) or users[name] != users[names[0]] for names in every for name in names):
        return {name: position_U[None] for name, position_U in places.items()}
    return {names[0]: torch.stack([places[name] for name in names]) for names in every}


def compared(first: Places, second: Places, users: Mapping[str, list[str]]) -> dict[str, Comparison]:
    """Metric -> first minus second, paired over customers (and seeds: `over_seeds`); mean over companies and seeds."""
    rows = {"first": over_seeds(first, users), "second": over_seeds(second, users)}
    persons = shared_persons({name: users[name] for name in rows["first"]})
    found = compare_table(rows, METRICS, persons=persons, each_domain=False)
    return {one.metric: one for one in found if len(rows["first"]) == 1 or one.domain == MACRO}


def figures(cells: Cells, row: str) -> str:
    places = places_of(cells, row)
    return " | ".join(shown(mean(places, metric)) for metric in METRICS) if places else "- | -"


def shown(value: float, signed: bool = False) -> str:
    """Four digits, as the field writes them."""
    return f"{value:+.4f}".replace("0.", ".", 1) if signed else f"{value:.4f}".removeprefix("0")


def in_words(cells: Cells, first: str, second: str, others: Cells | None = None, names: str = "") -> str:
    """``first`` minus ``second`` (of ``others``): customers of 100, ndcg@10 with its interval, p."""
    places, users, theirs = places_of(cells, first, names), users_of(cells), users_of(others or cells)
    assert all(users[name] == theirs[name] for name in places), "other customers: a seed is missing in one of both rows"
    one = compared(places, places_of(others or cells, second, names), users)
    ndcg = one["ndcg@10"]
    low, high = (shown(bound, True) for bound in ndcg.difference[1:])
    customers = f"{100 * one['hit@10'].difference.mean:+.2f}"
    return f"{customers} | {shown(ndcg.difference.mean, True)} [{low}, {high}] | {ndcg.p_value:.2g}"


# The page.

Found = Mapping[str, Mapping[str, Any]]
"""Key of a cell -> what it found."""
BESIDE = {"": "without", ENSEMBLE: "with"}


def of_row(found: Found, cells: Sequence[Cell], row: str, data: str) -> Cells:
    """The cells of a row that are there, by seed."""
    asked = [cell.key for cell in cells if cell.row == row and cell.data == data]
    return [found[key] for key in asked if key in found]


def companies_page(found: Found, cells: Sequence[Cell]) -> list[str]:
    lines = ["## Four companies with one catalogue", "", f"{COMPANIES} companies of {CUSTOMERS} customers.", ""]
    lines += [
        f"| data | items | ensemble | {' | '.join(f'{row} hit@10 | ndcg@10' for row in (ALONE, JOINED, POOLED))} | "
    ]
    lines[-1] += "seeds | minutes |"
    lines += ["|---|---:|---|" + "---:|" * 8]
    tests = [COMPARED, COMPARED_LINE]
    for data in DATASETS:
        joined, pooled = (of_row(found, cells, row, data) for row in (JOINED, POOLED))
        if not joined:
            continue
        tests += compared_rows(data, joined)
        for after, beside in BESIDE.items():
            values = [figures(joined, f"{row}{after}") for row in (ALONE, JOINED)] + [figures(pooled, POOLED + after)]
            minutes = fmean(one["minutes"] for one in joined)
            size = f"{joined[0]['num_items']:,}"
            lines.append(f"| {data} | {size} | {beside} | {' | '.join(values)} | {len(joined)} | {minutes:.1f} |")
            if both := min(len(joined), len(pooled)):
                words = in_words(joined[:both], JOINED + after, POOLED + after, pooled[:both])
                tests.append(f"| {data} | {beside} | joined - pooled | {words} |")
    return [*lines, "", *tests, ""]


def nobody_page(found: Found, cells: Sequence[Cell]) -> list[str]:
    lines = ["## Nobody public", ""]
    lines += [
        f"{COMPANIES} companies of {CUSTOMERS} customers, and no public user: texts of items and what is made of them "
        "teach the backbone. By taste: two companies have customers of one taste, two of another.",
        "",
        f"| data | ensemble | {' | '.join(f'{row} hit@10 | ndcg@10' for row in (ALONE, JOINED))} | seeds |",
        "|---|---|" + "---:|" * 5,
    ]
    tests = [COMPARED, COMPARED_LINE]
    for row in rows_in(cells):
        these = [found[cell.key] for cell in cells if cell.row == row and cell.key in found]
        if these:
            for after, beside in BESIDE.items():
                values = " | ".join(figures(these, own + after) for own in (ALONE, JOINED))
                lines.append(f"| {row} | {beside} | {values} | {len(these)} |")
            tests += compared_rows(row, these)
    return [*lines, "", *tests, ""]


WHAT_WAS_TRIED = (
    "Weights that start from `c_ij / sum_k c_ik^2`, as before, gave the own update 3.5 times the weight of another; "
    "validation ndcg@10 fell from round 3 on (at random, seed 0: .0691 to .0628), since an update holds what it has "
    "memorised of its own customers. Trained at a hundred times the rate (alpha_learning_rate .1) they went to 1.9 for "
    "the own update and .25 for others (.0649 to .0361): training items cannot say what holds for other customers. "
    "They now start from what directions have in common (`start_weights`); at the paper's rate training moves them by "
    ".01 a round.",
    "A larger step of the server (FedOpt with SGD) brings FedAvg in three rounds near to six, not to them: with step 2 "
    "validation ndcg@10 after three rounds was .0742 and .0597 at random, .0742 and .0720 by taste (seeds 0 and 1; six "
    "rounds with step 1: .0749, .0630, .0752, .0742); momentum .9 diverged, Adam and a round 1 from counts were not "
    "tried. It is left out: FeDecider with the weights above has .0761 at random (seed 0), .0788 and .0792 by taste "
    "after three rounds.",
)
"""Validation figures of trials that no cell keeps."""
SYSTEMS: dict[str, tuple[str, str]] = {
    ALONE: (SIDE_BY_SIDE[0], ALONE),
    COUNTS: (SIDE_BY_SIDE[0], COUNTS),
    **{method: (method, JOINED) for method in SIDE_BY_SIDE},
}
"""Line of the table -> method of its cell, row in it."""


def natural_page(found: Found, cells: Sequence[Cell]) -> list[str]:
    def of_kind(kind: str, method: str) -> dict[int, Mapping[str, Any]]:
        row = f"{kind}, {method}"
        return {cell.seed: found[cell.key] for cell in cells if cell.row == row and cell.key in found}

    def words(kind: str, line: str, than: str, after: str) -> tuple[str, int]:
        """Of 100 customers, ndcg@10 with its interval, p; and of how many seeds."""
        (method, row), (other, second) = SYSTEMS[line], SYSTEMS[than]
        first, others = of_kind(kind, method), of_kind(kind, other)
        seeds = sorted(first.keys() & others.keys())
        pair = [[of[seed] for seed in seeds] for of in (first, others)]
        return (in_words(pair[0], row + after, second + after, pair[1]) if seeds else ""), len(seeds)

    table = [
        "| companies | system | ensemble | hit@10 | ndcg@10 | minus fedavg: of 100 | ndcg@10 | p | "
        "minus alone: of 100 | ndcg@10 | p | seeds |",
        "|---|---|---|---:|---:|---:|---|---:|---:|---|---:|---:|",
    ]
    for kind in KINDS:
        for line, (method, row) in SYSTEMS.items():
            of = list(of_kind(kind, method).values())
            for after, beside in BESIDE.items() if of else ():
                if line == COUNTS and not after:
                    continue  # its model is that of alone
                less = [
                    "| | " if line == than else words(kind, line, than, after)[0] for than in (SIDE_BY_SIDE[0], ALONE)
                ]
                start = f"| {kind} | {line} | {beside} | {figures(of, row + after)}"
                table.append(f"{start} | {' | '.join(less)} | {len(of)} |")
    answers, wins, not_paid = [], [], []
    for kind in KINDS:
        if of_kind(kind, SIDE_BY_SIDE[0]) and not above_zero(words(kind, SIDE_BY_SIDE[0], ALONE, "")[0]):
            not_paid.append(kind)
        wins += [kind] if above_zero(words(kind, LEARNED, SIDE_BY_SIDE[0], "")[0]) else []
        said = [
            f"{beside} an ensemble {text.split(' | ')[1]}, p {text.split(' | ')[2]}"
            for after, beside in BESIDE.items()
            if (text := words(kind, LEARNED, SIDE_BY_SIDE[0], after)[0])
        ]
        if said:
            seeds = words(kind, LEARNED, SIDE_BY_SIDE[0], "")[1]
            answers.append(f"- {kind} ({seeds} seed{'s' if seeds > 1 else ''}): {'; '.join(said)}.")
    weights = [
        f"- {kind}: {'; '.join(' '.join(f'{one:.2f}' for one in row) for row in of[0]['alpha'])}"
        for kind in KINDS
        if 0 in (of := of_kind(kind, LEARNED))
    ]
    return [
        "## Natural companies",
        "",
        f"Learned weights (fedecider) are above the mean (fedavg) by more than chance: {'; '.join(wins) or 'nowhere'}. "
        f"Joining (fedavg) is not above alone by more than chance: {'; '.join(not_paid) or 'nowhere'}. Without "
        f"figures: {'; '.join(kind for kind in KINDS if not of_kind(kind, SIDE_BY_SIDE[0])) or 'no kind'}. "
        "fedecider - fedavg, test ndcg@10:",
        "",
        *answers,
        "",
        f"{COMPANIES} companies of {CUSTOMERS} customers at most, one catalogue, nobody public, bf16; alone and counts "
        "are of fedavg's runs. By taste: two pairs of alike companies. Region, price level, one starts late: the "
        "Complete Journey's chains, quarters of its households by price, and a chain whose data begin in July "
        "(benchmarks/natural_companies.py); next basket, one local epoch. IDs of words: keyword IDs with a dense head; "
        "others are one token each.",
        "",
        *table,
        "",
        "Fusion weights of the reported round, seed 0, a company's row after the other:",
        "",
        *weights,
        "",
        *(line for text in WHAT_WAS_TRIED for line in (text, "")),
    ]


LEARNED = "fedecider"


def above_zero(words: str) -> bool:
    """Whether the interval of `in_words` lies above zero."""
    return "[+" in words


def compared_rows(data: str, cells: Cells) -> list[str]:
    """Joined against alone, and with an ensemble against without."""
    rows = [(beside, "joined - alone", JOINED + after, ALONE + after) for after, beside in BESIDE.items()]
    rows += [(row, "with - without", row + ENSEMBLE, row) for row in (ALONE, JOINED)]
    return [f"| {data} | {beside} | {what} | {in_words(cells, row, than)} |" for beside, what, row, than in rows]


COMPARED = "| data | ensemble | compared | of 100 customers | ndcg@10 | p |"
COMPARED_LINE = "|---|---|---|---:|---|---:|"


def overlap_page(found: Found, cells: Sequence[Cell]) -> list[str]:
    lines = ["## Catalogues that overlap in part", ""]
    lines += [
        f"Beauty: {COMPANIES} companies of {CUSTOMERS} customers, a share of the items sold by all, each other item "
        "by one of them; events of items that a company does not sell are gone, and customers with fewer than three.",
        "",
        "| sold by all | customers | events | ensemble | alone ndcg@10 | joined ndcg@10 | of 100 customers | "
        "joined - alone, ndcg@10 | p | seeds |",
        "|---|---:|---:|---|---:|---:|---:|---|---:|---:|",
    ]
    own = {row: of_row(found, cells, row, "beauty") for row in (f"{100 * share:.0f} %" for share in SHARES)}
    own["100 %"] = of_row(found, companies_cells_of(cells), JOINED, "beauty")
    for row, these in own.items():
        if not these:
            continue
        customers = fmean(sum(map(len, one["users"].values())) for one in these)
        events = fmean(one["events"] for one in these)
        for after, beside in BESIDE.items():
            start = f"| {row} | {customers:,.0f} | {events:,.0f} | {beside}"
            alone = shown(mean(places_of(these, ALONE + after), "ndcg@10"))
            if not places_of(these, JOINED + after):
                lines.append(f"{start} | {alone} | trained alone | 0 | exactly 0 | - | {len(these)} |")
                continue
            joined = shown(mean(places_of(these, JOINED + after), "ndcg@10"))
            words = in_words(these, JOINED + after, ALONE + after)
            lines.append(f"{start} | {alone} | {joined} | {words} | {len(these)} |")
    return [*lines, ""]


def companies_cells_of(cells: Sequence[Cell]) -> list[Cell]:
    """The companies of part 1 with the seeds of these cells."""
    return [one for seed in sorted({cell.seed for cell in cells}) for one in companies_cells(seed)]


def unequal_page(found: Found, cells: Sequence[Cell]) -> list[str]:
    lines = ["## One large company and three small ones", ""]
    lines += [
        f"{UNEQUAL}: one company of {LARGE['large']:,} customers, three of {LARGE['small.1']}. {len(NEWCOMERS)} "
        f"newcomers of {NEWCOMERS['new.00']} customers come when {COMPANIES} companies of {CUSTOMERS} are done: they "
        "take the trained model, each the share of its update that its own validation customers like best, and train "
        "nothing; alone they train as long as the others did.",
        "",
        "| weights | companies | ensemble | alone ndcg@10 | joined ndcg@10 | of 100 customers | joined - alone, "
        "ndcg@10 | p | seeds |",
        "|---|---|---|---:|---:|---:|---|---:|---:|",
    ]
    rows = [(row, names, row, UNEQUAL) for row in WEIGHTS for names in ("large", "small")]
    rows += [(HUGE_JOINED, names, HUGE_ALONE, HUGE_DATA) for names in ("large", "small")]
    rows += [(NEW_JOINED, "new", NEW_ALONE, UNEQUAL)]
    for row, names, other, data in rows:
        joined, alone = (of_row(found, cells, one, data) for one in (row, other))
        both = min(len(joined), len(alone))
        for after, beside in BESIDE.items() if both else ():
            first, second = JOINED + after, ALONE + after
            figures = [
                shown(mean(places_of(of[:both], one, names), "ndcg@10"))
                for of, one in ((alone, second), (joined, first))
            ]
            words = in_words(joined[:both], first, second, alone[:both], names)
            weights = {HUGE_JOINED: "by examples", NEW_JOINED: "equal"}.get(row, row)
            who = f"{weights} | {names}{' of 10,000 or 300' if row == HUGE_JOINED else ''}"
            lines.append(f"| {who} | {beside} | {' | '.join(figures)} | {words} | {both} |")
    return [*lines, ""]


def wrong_page(found: Found, cells: Sequence[Cell]) -> list[str]:
    without = of_row(found, cells, WITHOUT, WRONG_DATA)
    if not without:
        return []
    lines = ["## One of four companies is wrong", ""]
    lines += [
        f"{WRONG_DATA}: the three others, of {CUSTOMERS} customers; ndcg@10. *Of without*: what they have when joined, "
        "as a share of what they have when joined without the wrong one. *Kept*: what they chose. *Below*: how many of "
        "them are below alone by more than noise, joined and kept. *Share*: of the updates in the others' models, "
        "that of the wrong one (equal would be 25 %). Nothing bounds counts, which are added up.",
        "",
        "| wrong | mean | ensemble | alone | joined | of without | kept | below | share | seeds |",
        "|---|---|---|---:|---:|---:|---:|---|---:|---:|",
    ]
    rows = [(WITHOUT, "", "")] + [(f"{kind}, {name}", kind, name) for kind in WRONG for name in DEFENCES]
    for row, kind, name in rows:
        these = of_row(found, cells, row, WRONG_DATA)
        for after, beside in BESIDE.items() if these else ():
            alone, joined, kept = (mean(places_of(these, one + after), "ndcg@10") for one in (ALONE, JOINED, KEPT))
            whole = mean(places_of(without[: len(these)], JOINED + after), "ndcg@10")
            below = [below_alone(these, after, one)[1] for one in (JOINED, KEPT)]
            figures = f"{shown(alone)} | {shown(joined)} | {100 * joined / whole:.0f} % | {shown(kept)}"
            told = f"{below[0]}, {below[1]} of {3 * len(these)} | {share_of_wrong(these)}"
            lines.append(f"| {kind or WITHOUT} | {name} | {beside} | {figures} | {told} | {len(these)} |")
    return [*lines, ""]


def share_of_wrong(cells: Cells) -> str:
    """Of what is added to the models of companies that are read, the part of those that are not."""
    found = []
    for cell in cells:
        for size_of in (cell["added"][name] for name in cell["honest"] if name in cell["added"]):
            others = sum(size for name, size in size_of.items() if name not in cell["honest"])
            found.append(others / max(sum(size_of.values()), 1e-12))
    return f"{100 * fmean(found):.0f} %" if found else "-"


def named_page(found: Found, cells: Sequence[Cell]) -> list[str]:
    lines = ["### Named by a warning", ""]
    lines += [
        f"{', '.join(DATASETS)}, before anything is trained: wrong companies that are named, by texts of items in a "
        "row and by events on one item; and sound ones that are.",
        "",
        "| wrong | by texts | by one item | sound: by texts | by one item | seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows_in(cells):
        these = [cell for data in DATASETS for cell in of_row(found, cells, row, data)]
        told = [count_named(these, how, sound) for sound in (False, True) for how in NAMED_BY]
        if these:
            lines.append(f"| {row} | {' | '.join(told)} | {len(these) // len(DATASETS)} |")
    return [*lines, ""]


NAMED_BY = ("by texts", "by one item")


def count_named(cells: Cells, how: str, sound: bool) -> str:
    """So many of the sound companies, or of the others, are named."""
    count = sum((name in cell["honest"]) == sound for cell in cells for name in cell[how])
    asked = sum((name in cell["honest"]) == sound for cell in cells for name in cell["events"])
    return f"{count} of {asked}" if asked else "-"


def departments_page(found: Found, cells: Sequence[Cell]) -> list[str]:
    (cell,) = [found[one.key] for one in cells if one.key in found]
    return [
        "## Departments without a common item",
        "",
        f"`from_events` on {CUSTOMERS} customers each of {', '.join(DEPARTMENTS)}, without the items that two of them "
        f"sell; asked for `{cell['asked']}`.",
        "",
        *(f"- Before training: {sentence}" for sentence in cell["before"]),
        f"- Trained: `{cell['method']}`. Weights drawn: {'some' if cell['weights'] else 'none'}. On the page: "
        f"{'the same words' if cell['on_page'] else 'nothing of it'}.",
        *(f"- The verdict: {line}" for line in cell["verdict"][:4]),
        "",
    ]


def common_page(found: Found, cells: Sequence[Cell]) -> list[str]:
    lines = ["## Customers in common", ""]
    lines += [
        f"{COMMON_DATA}: four companies of {CUSTOMERS} customers, each with every other event of theirs; two of them "
        "are read. In the second row the two others have the other events of the same customers, in the first such "
        "events of other customers. Nobody links customers. Companies with customers in common and no item are trained "
        "alone.",
        "",
        "| in common | ensemble | alone ndcg@10 | joined ndcg@10 | of 100 customers | joined - alone, ndcg@10 | p | "
        "seeds |",
        "|---|---|---:|---:|---:|---|---:|---:|",
    ]
    apart, same = (of_row(found, cells, row, COMMON_DATA) for row in COMMON)
    for row, these in zip(COMMON, (apart, same), strict=True):
        for after, beside in BESIDE.items() if these else ():
            values = [shown(mean(places_of(these, one + after), "ndcg@10")) for one in (ALONE, JOINED)]
            words = in_words(these, JOINED + after, ALONE + after)
            lines.append(f"| {row} | {beside} | {' | '.join(values)} | {words} | {len(these)} |")
    both = min(len(apart), len(same))
    for after, beside in BESIDE.items() if both else ():
        words = in_words(same[:both], JOINED + after, JOINED + after, apart[:both])
        lines.append(f"| the second row less the first, joined | {beside} | | | {words} | {both} |")
    return [*lines, ""]


def rows_in(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.row for cell in cells))


PAGES: dict[str, Callable[[Found, Sequence[Cell]], list[str]]] = {
    NATURAL: natural_page,
    "companies": companies_page,
    NOBODY: nobody_page,
    "overlap": overlap_page,
    "unequal": unequal_page,
    "wrong": wrong_page,
    "named": named_page,
    "departments": departments_page,
    "common": common_page,
}


def below_alone(cells: Cells, after: str, row: str) -> tuple[int, int]:
    """Companies, and those that are below alone by more than noise (one-sided paired test at 95 %, ndcg@10)."""
    below = total = 0
    for cell in cells:
        own, alone = places_of([cell], row + after), places_of([cell], ALONE + after)
        for name in own.keys() & alone.keys():
            first, second = (user_metrics(one[name])["ndcg@10"].double().numpy() for one in (alone, own))
            total += 1
            below += clearly_above([first], [second], ONE_SIDED)
    return total, below


def choice_page(found: Found, seeds: int) -> list[str]:
    lines = ["## Nobody worse than alone", ""]
    lines += [
        "Companies that are below alone by more than noise, by a one-sided paired test at 95 % over their customers' "
        "ndcg@10 (by chance one in twenty would be). *Kept* is what each company chose by its own validation "
        "customers; who hides customers by noise may not choose.",
        "",
        "| part | ensemble | companies | below alone, joined | below alone, kept |",
        "|---|---|---:|---:|---:|",
    ]
    keys = {part: [cell.key for cell in cells_of([part], seeds)] for part in PARTS}
    of_part = {part: [found[key] for key in of if key in found] for part, of in keys.items()}
    for part, cells in {**of_part, "all": list(found.values())}.items():
        for after, beside in BESIDE.items():
            (total, joined), (_, kept) = (below_alone(cells, after, row) for row in (JOINED, KEPT))
            lines += [f"| {part} | {beside} | {total} | {joined} | {kept} |"] if total else []
    chosen = [keeps for cell in found.values() for name, keeps in cell["keeps"].items() if name in cell["honest"]]
    counts = ", ".join(f"{chosen.count(kind)} {words}" for kind, words in KEEPS.items())
    return [*lines, "", f"They keep: {counts}.", ""]


KEEPS = {"joined": "the joined model", "half": "the mean of both", "local": "their own"}


def page(found: Found, parts: Sequence[str], seeds: int) -> list[str]:
    """Lines of the page but its foot and the older measurements."""
    lines = ["# What joining is worth", "", *__doc__.split("\n\n")[3].splitlines(), ""]
    lines += [
        "Mean over companies and seeds; brackets are 95 % intervals, p of paired t tests over customers, each counted "
        "once, and over seeds where companies have the same customers with every seed; where these are drawn anew, "
        "intervals say nothing of training. *Of 100 customers*: how many more find their next purchase among ten. "
        f"Minutes: of CPU. SETTINGS: `{json.dumps(SETTINGS)}`",
        "",
    ]
    for part in parts:
        cells = cells_of([part], seeds)
        if any(cell.key in found for cell in cells) and part in PAGES:
            lines += PAGES[part](found, cells)
    if found:
        lines += choice_page(found, seeds)
        machines = sorted({f"{one['machine']} at {one['commit']}" for one in found.values()})
        minutes = sum(one["minutes"] for one in found.values())
        lines += [f"- Cells: {len(found)}, {minutes:.0f} CPU minutes; {'; '.join(machines)}"]
    return lines


def write_page(output: Path, found: Found, seeds: int) -> None:
    before = output.read_text(encoding="utf-8") if output.is_file() else ""
    first = OTHERS if OTHERS in before else OLDER
    older = first + before.partition(first)[2] if first in before else ""
    heading = provenance.heading("joining.py", torch.get_num_threads())
    text = "\n".join([*page(found, list(PARTS), seeds), *heading])
    output.write_text(f"{text}\n\n{older}" if older else f"{text}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--work", type=Path, default=Path("runs/joining"), help="cells and cache")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument("--only", default="", help="beginnings of the cells to run, separated by ',' (default: all)")
    parser.add_argument("--cells", type=int, default=sys.maxsize, help="end after so many new cells")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no cell after so many minutes")
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        raise ValueError(f"got parts {sorted(unknown)}, expected some of {', '.join(PARTS)}")
    started, left, commit = time.monotonic(), args.cells, provenance.git_commit()
    args.work.mkdir(parents=True, exist_ok=True)
    every = cells_of(list(PARTS), args.seeds)
    found = {cell.key: read_json(path) for cell in every if (path := args.work / f"{cell.key}.json").is_file()}
    found = {key: one for key, one in found.items() if one.get("settings") == SETTINGS}  # else it is measured again
    load, shared = cache(partial(whole_domain, data=args.data)), dict[tuple[str, bool, str], Shared]()
    for cell in cells_of(args.parts.split(","), args.seeds):
        if cell.key in found or not cell.key.startswith(tuple(args.only.split(","))):
            continue
        if not (args.data / FOLDERS.get(cell.data, cell.data)).is_dir():
            print(f"{cell.key}: left out, no {args.data / FOLDERS.get(cell.data, cell.data)}", flush=True)
            continue
        if left <= 0 or time.monotonic() - started > 60 * args.minutes:
            break
        print(cell.key, flush=True)
        if cell.part in UNTRAINED:
            facts = UNTRAINED[cell.part](cell, load, args.work)
        else:
            base = (cell.data, cell.part in (NOBODY, NATURAL), json.dumps(stage_options(cell)))
            if base not in shared:
                shared[base] = shared_of(cell, load, args.work / "cache")
            facts = measured(cell, shared[base], load, args.work)
        found[cell.key] = {**facts, "commit": commit}
        write_json(args.work / f"{cell.key}.json", found[cell.key])
        left -= 1
    if not args.only:
        write_page(args.output, found, args.seeds)


if __name__ == "__main__":
    sys.exit(run(main))
