"""Federated methods of IDs alone (FedGCDR, FedDCSR, FedHCDR): what sharing customers' vectors brings two companies.

    python scripts/prepare_data.py --source packed --raw <amazon2014-p5> --domains beauty,toys --k_core 0 \
        --public_users_per_domain 0 --output data/whole
    python benchmarks/id_methods.py --data data/whole --work runs/id_methods [--customers 600]

Two companies have all customers in common and no item: Beauty's skin care and its hair care, and Beauty beside Toys.
Every customer has three events at each of the two at least; the last one is the test item, the one before it the
validation item, seen items dropped, the whole catalogue of the company ranked.

First the headroom, on validation items: what the events of the other company add where one party holds all of them.
Then the methods on skin care and hair care, each tuned alike, with and without what they send.

What --work holds is not computed again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from provenance import heading
from speed import put_section
from torch import Tensor

from fedecider.baselines import ease, sasrec
from fedecider.baselines.counts import heuristic_positions, popularity_scores, text_votes
from fedecider.baselines.fitting import train_matrix
from fedecider.comparison.cells import kept_cell
from fedecider.comparison.compare import Cell, Entry, Row, Shared, fill, positions_of
from fedecider.comparison.search import search_of, setting_text
from fedecider.data.card import make_card
from fedecider.data.domain import Domain
from fedecider.data.near_texts import nearest_texts, unit_vectors
from fedecider.data.store import load_domains
from fedecider.evaluation.metrics import MACRO, user_metrics
from fedecider.evaluation.protocols import MIN_EVENTS, STRICT, rank_held_out, train_part
from fedecider.evaluation.statistics import Comparison, compare_table, holm, table_intervals
from fedecider.federation.streams import derive_seed
from fedecider.id_based import METHODS
from fedecider.id_based.fedgcdr import FedgcdrConfig
from fedecider.id_based.run import table_row
from fedecider.models.item_texts import encoded_texts
from fedecider.running.command import run
from fedecider.running.plain import as_plain
from fedecider.search_space import Setting

PAGE = Path(__file__).with_name("results") / "id_methods.md"
TITLE = "Customers in common"
NEAR, FAR = "skin care and hair care", "beauty and toys"
PARTS = {"skin": "skin care", "hair": "hair care"}
"""Companies of the near pair -> the second word of their items' categories."""
POPULARITY, TEXT_AND_COUNTS = "popularity", "text neighbours + counts"
HEURISTICS = ("decayed co-occurrence", "text neighbours", TEXT_AND_COUNTS)
EASE, EASE_BOTH = "EASE, each company alone", "EASE, all events in one place"
OTHER_ONLY, POOLED = "the other company's events alone", "SASRec, all events in one place"
HEADROOM = 1500
"""Customers, at most."""
REGULARISATION = 100.0
"""Of EASE; 20 to 400 differ by .004 at most (validation ndcg@10)."""
METRIC, METRICS = "ndcg@10", ("hit@10", "ndcg@10")
GROUPS = {"1 or 2": (1, 2), "3 to 5": (3, 5), "6 or more": (6, 10**9)}
"""Customers by the events of their train part at the company."""

# Data: two companies with all their customers in common.


class Pair(NamedTuple):
    """Two companies, and in which order a customer bought at both."""

    domains: dict[str, Domain]
    first_U: list[list[str]]
    """Of each customer the company of each event, oldest first."""


def pair(data: Path, name: str, customers: int) -> Pair:
    """The pair with so many customers, drawn at random among those who have enough events at both."""
    if name == FAR:  # no event has a time, so those of the other company are put first
        domains = dict(load_domains(data, ["beauty", "toys"]))
        names = {}
    else:
        (whole,) = load_domains(data, ["beauty"]).values()
        names = of_categories(whole)
        domains = {part: part_of(whole, part, names) for part in PARTS}
    both = sorted(set.intersection(*(set(domain.clients.users) for domain in domains.values())))
    rng = np.random.default_rng(derive_seed(0, "customers in common"))
    some = sorted(rng.permutation(both)[:customers].tolist())
    found = {part: with_customers(domain, some) for part, domain in domains.items()}
    if not names:
        return Pair(found, [])
    place = {user: number for number, user in enumerate(whole.clients.users)}
    return Pair(found, [[names[item] for item in whole.clients.sequences[place[u]] if item in names] for u in some])


def of_categories(whole: Domain) -> dict[int, str]:
    """Item number -> company, of the items that one of the two sells."""
    part = {category: name for name, category in PARTS.items()}
    second = [text.rpartition("categories: ")[2].split(", ")[1:2] for text in whole.item_texts]
    return {item: part[words[0]] for item, words in enumerate(second) if words and words[0] in part}


def part_of(whole: Domain, part: str, names: Mapping[int, str]) -> Domain:
    """A company that sells the items of one category, with the customers who have enough events there."""
    sold = [item for item in range(len(whole.item_keys)) if names.get(item) == part]
    number_I = np.full(len(whole.item_keys), -1)
    number_I[sold] = np.arange(len(sold))
    clients = whole.clients.renumbered(number_I)
    enough = [place for place, row in enumerate(clients.sequences) if len(row) >= MIN_EVENTS]
    return replace(
        whole, name=part, catalogue=whole.catalogue.part(part, sold), clients=clients.take(enough), unsold=(), card={}
    )


def with_customers(domain: Domain, users: Sequence[str]) -> Domain:
    place = {user: number for number, user in enumerate(domain.clients.users)}
    found = replace(domain, clients=domain.clients.take([place[user] for user in users]), card={})
    return replace(found, card=make_card(found))


# Headroom: the events of both companies in one place.


class Settings(NamedTuple):
    work: Path
    pair: Pair
    tune: int = 1

    @property
    def shared(self) -> Shared:
        return Shared(self.pair.domains, "strict", self.tune, self.work / "cache", "cpu")


Positions = dict[str, Tensor]
"""Company -> (U,) or (S, U) positions."""
Ranked = dict[str, Positions]
"""By split."""


def kept(settings: Settings, label: str, inputs: Mapping[str, Any], ranked: Callable[[], Ranked]) -> Ranked:
    """What ``ranked`` finds, computed once."""

    def train(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        places = ranked()
        flat = {f"{split}.{name}": one for split, of_split in places.items() for name, one in of_split.items()}
        return {"valid": ndcg(places["valid"])}, flat

    hashes = [(name, domain.content_hash()) for name, domain in settings.pair.domains.items()]
    words = {**inputs, "row": label, "data": hashes, "order": settings.pair.first_U}
    cell = kept_cell(settings.work / "cache", label.split(",")[0].replace(" ", "-"), words, train, label)
    flat = cell.positions()
    return {split: {name: flat[f"{split}.{name}"] for name in settings.pair.domains} for split in ("valid", "test")}


def ndcg(positions: Mapping[str, Tensor]) -> float:
    return fmean(float(user_metrics(one.flatten())[METRIC].mean()) for one in positions.values())


def rank_all(domains: Mapping[str, Domain], score: Callable[[str, str], Any]) -> Ranked:
    """``score``: company, split -> scores of its users."""
    return {
        split: {
            name: rank_held_out(score(name, split), domain.clients.sequences, len(domain.item_keys), split, STRICT)
            for name, domain in domains.items()
        }
        for split in ("valid", "test")
    }


def ridge(settings: Settings, own: float, other: float) -> Ranked:
    """EASE of the items of a company on the train events of both, those of the other company weighted by ``other``.

    Without ``own`` events, a ridge regression of a customer's own events Y on those at the other company X, the
    customer left out: (H Y - h Y) / (1 - h) with H = X X^T (X X^T + lambda)^-1 and its diagonal h.
    """
    domains, scores = settings.pair.domains, {}
    matrix = {name: train_matrix(one.clients.sequences, len(one.item_keys)) for name, one in domains.items()}
    for name, own_UI in matrix.items():
        (partner_UJ,) = (one for partner, one in matrix.items() if partner != name)
        if own:
            both_UI = scipy.sparse.csr_array(scipy.sparse.hstack([own_UI, other * partner_UJ]))
            scores[name] = ease.scores_of(both_UI, REGULARISATION)(both_UI)[:, : own_UI.shape[1]]
        else:
            gram_UU = (partner_UJ @ partner_UJ.T).toarray()
            hat_UU = gram_UU @ np.linalg.inv(gram_UU + REGULARISATION * np.eye(len(gram_UU)))
            left_U1 = hat_UU.diagonal()[:, None]
            scores[name] = (hat_UU @ own_UI - left_U1 * own_UI.toarray()) / (1.0 - left_U1)
    return rank_all(domains, lambda name, split: lambda user_B: torch.from_numpy(scores[name][user_B.numpy()]))


class Merged(NamedTuple):
    """Both companies as one, which has all events of a customer in one history."""

    offset: dict[str, int]
    num_items: int
    train_U: list[list[int]]
    history_U: dict[tuple[str, str], list[list[int]]]
    """Company, split -> what came before the held-out event, without held-out events of the other company."""


def merged(pair: Pair) -> Merged:
    names = list(pair.domains)
    offset = {names[0]: 0, names[1]: len(pair.domains[names[0]].item_keys)}
    total = sum(len(domain.item_keys) for domain in pair.domains.values())
    rows = {name: [list(row) for row in domain.clients.sequences] for name, domain in pair.domains.items()}
    train_U, history_U = [], {(name, split): [] for name in names for split in ("valid", "test")}
    for user in range(len(rows[names[0]])):
        own = {name: rows[name][user] for name in names}
        orders = {}
        for name in names:
            (other,) = (one for one in names if one != name)
            orders[name] = (
                pair.first_U[user] if pair.first_U else [*[other] * len(own[other]), *[name] * len(own[name])]
            )
        train_U.append(_until(own, orders[names[0]], offset, {name: len(own[name]) - 2 for name in names}, ""))
        for name in names:
            for split, held in (("valid", 2), ("test", 1)):
                most = {one: len(own[one]) - (held if one == name else 2) for one in names}
                history_U[name, split].append(_until(own, orders[name], offset, most, name))
    return Merged(offset, total, train_U, history_U)


def _until(
    own: Mapping[str, list[int]], order: Sequence[str], offset: Mapping[str, int], most: Mapping[str, int], stop: str
) -> list[int]:
    """Items in their order, ``most`` of each company, and nothing after the last of these of the company ``stop``."""
    done = dict.fromkeys(own, 0)
    found = []
    for name in order:
        if stop and done[stop] == most[stop] and name == stop:
            break
        if done[name] < most[name]:
            found.append(offset[name] + own[name][done[name]])
        done[name] += 1
    return found


def pooled_sasrec(settings: Settings, setting: Setting, seed: int) -> Ranked:
    """SASRec on both companies' events, one history a customer; a company ranks its own items."""
    config = sasrec.SasrecConfig(**{**LENGTH, **setting})

    def ranked() -> Ranked:
        both, domains = merged(settings.pair), settings.pair.domains
        tail = [[*part, 0, 0] for part in both.train_U]  # train parts are what is before the last two

        def score(model: sasrec.Sasrec, name: str, split: str) -> Any:
            own = slice(both.offset[name], both.offset[name] + len(domains[name].item_keys))

            def of(user_B: Tensor) -> Tensor:
                rows = [both.history_U[name, split][user] for user in user_B.tolist()]
                return model.catalogue(*sasrec.pack(rows, config.max_length))[:, own]

            return of

        best: tuple[float, Ranked] = (-1.0, {})
        item_SL, length_S = sasrec.training_sequences(tail, both.num_items, (), config.max_length)
        model = sasrec.start_model(both.num_items, config, seed)
        optimizer, bad = sasrec.make_optimizer(model, config), 0
        for epoch in range(config.num_epochs):
            sasrec.run_epoch(model, optimizer, item_SL, length_S, config, seed=seed, epoch=epoch)
            if epoch % config.validate_every == config.validate_every - 1:
                places = rank_all(domains, partial(score, model))
                value, bad = ndcg(places["valid"]), bad + 1
                if value > best[0]:
                    best, bad = (value, places), 0
                if bad == config.patience:
                    break
        return best[1]

    return kept(settings, POOLED, {"config": as_plain(config), "seed": seed}, ranked)


def rule_rows(settings: Settings) -> dict[str, Ranked]:
    """Counts and texts of each company."""

    def heuristics() -> dict[str, Ranked]:
        domains = settings.pair.domains
        vectors = encoded_texts(domains, "minilm", str(settings.work / "cache"))
        found: dict[str, Ranked] = {}
        for name, domain in domains.items():
            votes = text_votes(nearest_texts(unit_vectors(vectors[name].numpy())))
            sequences, num_items = domain.clients.sequences, len(domain.item_keys)
            for split, rows in heuristic_positions(sequences, num_items, ("valid", "test"), votes).items():
                for label in HEURISTICS:
                    found.setdefault(label, {}).setdefault(split, {})[name] = rows[label]
        return found

    made = cache(heuristics)
    return {label: kept(settings, label, {}, lambda label=label: made()[label]) for label in HEURISTICS}


def closed_rows(settings: Settings) -> dict[str, Ranked]:
    """Popularity, and rows in closed form of the events of one company and of both."""

    def popular() -> Ranked:
        domains = settings.pair.domains
        scores = {n: popularity_scores(one.clients.sequences, len(one.item_keys)) for n, one in domains.items()}
        return rank_all(domains, lambda name, split: scores[name])

    rows = {POPULARITY: kept(settings, POPULARITY, {}, popular)}
    for label, own, others in ((EASE, 1.0, (0.0,)), (EASE_BOTH, 1.0, (0.3, 1.0)), (OTHER_ONLY, 0.0, (1.0,))):
        tried = [kept(settings, label, {"other": other}, partial(ridge, settings, own, other)) for other in others]
        rows[label] = max(tried, key=lambda one: ndcg(one["valid"]))
    return rows


# Methods.


class Line(NamedTuple):
    """A method under some settings of its own."""

    label: str
    method: str
    fixed: Mapping[str, Any]
    tuned_as: str = ""
    """The label of the row whose other settings it has; empty: it is tuned itself."""


ALONE = ", nothing sent"
SASREC = "SASRec, each company alone"
LENGTH = {"max_length": 16}
"""That of FedDCSR's public code, for SASRec as well."""
STEPS = {"batch_size": 128, "learning_rate": 3e-3}
"""Of FedDCSR: fewer and larger than its defaults, for the cost."""
LINES = (
    Line(SASREC, "fedsasrec", {"share": "nothing", **LENGTH}),
    Line("FedDCSR", "feddcsr", {"share": "all", **LENGTH, **STEPS}),
    Line(f"FedDCSR{ALONE}", "feddcsr", {"share": "nothing", **LENGTH, **STEPS}, "FedDCSR"),
    Line("FedHCDR", "fedhcdr", {"share": "all"}),
    Line(f"FedHCDR{ALONE}", "fedhcdr", {"share": "nothing"}, "FedHCDR"),
    Line("FedGCDR", "fedgcdr", {"friends": "known", "noise": "accounted"}),
    Line("FedGCDR, no noise", "fedgcdr", {"friends": "known", "noise": "none"}, "FedGCDR"),
    Line(f"FedGCDR{ALONE}", "fedgcdr", {"friends": "none"}, "FedGCDR"),
)


def line_entry(settings: Settings, line: Line) -> Entry:
    """The row of a line, tuned over all settings that the line does not fix."""
    row, fixed, label = table_row(line.method, settings.shared), line.fixed, line.label
    method = METHODS[line.method]
    grid = [setting for setting in method.grid if not set(setting) & set(fixed)]
    space = {name: values for name, values in method.space.items() if name not in fixed}

    def cell(setting: Setting, seed: int) -> Cell:
        found = row.run({**fixed, **setting}, seed)
        places = found.positions
        return found._replace(
            valid={label: found.valid[line.method]},
            positions=lambda: {"strict": {label: places()["strict"][line.method]}},
        )

    search = search_of([replace(method.config(), **line.fixed)], space, grid)
    return Entry(line.label, line.method, "federated", ["strict"], cell, search, settings.tune)


def line_rows(settings: Settings, seeds: int) -> dict[str, Row]:
    """Every line with its cells."""
    rows: dict[str, Row] = {}
    for line in LINES:
        entry = line_entry(settings, line)
        if line.tuned_as:
            setting = rows[line.tuned_as].setting
            rows[line.label] = Row(entry, setting, [], [entry.run(setting, seed) for seed in range(seeds)])
        else:
            (rows[line.label],) = fill([entry], seeds)
    return rows


# The page.


def page(args: argparse.Namespace, settings: Settings, rows: Mapping[str, Row]) -> str:
    test = test_positions(settings, rows, args.seeds)
    domains = settings.pair.domains
    users = {name: domain.clients.users for name, domain in domains.items()}
    tests = compare_table(test, METRICS, PAIRS, persons=users, each_domain=False)
    by = {(one.first, one.second): one for one in tests if one.metric == METRIC}
    headroom_lines, new = headroom(args)
    parts = [
        opening(test, by, new),
        "",
        *headroom_lines,
        "",
        "### Methods",
        "",
        f"Skin care and hair care, {len(users['skin']):,} customers of both, test items, seeds 0 to {args.seeds - 1}. "
        f"Brackets: 95 % intervals over customers and seeds. Settings: the best of {args.tune} on validation items "
        "with seed 0 for each method; a row with nothing sent, or without noise, has the settings that are best "
        "with what is sent, which favours sending. SASRec and FedDCSR read 16 events; FedDCSR has batches of 128 and a "
        "learning rate of .003, for the cost. Best round: of 30 at most, by validation, for each seed. With so few "
        "customers a gain of less than about .003 does not show.",
        "",
        *method_table(test, rows, users),
        "",
        "First minus second. Holm's correction is over both metrics of the table.",
        "",
        "| first | second | hit@10 | ndcg@10 | p (Holm), ndcg@10 |",
        "|---|---|---:|---|---:|",
    ]
    hits = {(one.first, one.second): one for one in tests if one.metric != METRIC}
    parts += [
        f"| {one.first} | {one.second} | {hits[pair].difference.mean:+.4f} | {difference(one)} | {one.p_holm:.2g} |"
        for pair, one in by.items()
    ]
    return "\n".join([*parts, "", *whom(test, domains), "", *causes(settings, test, rows)])


METHODS_SENT = ("FedDCSR", "FedHCDR", "FedGCDR")
PAIRS = (
    (POOLED, SASREC),
    (EASE_BOTH, EASE),
    *((label, f"{label}{ALONE}") for label in METHODS_SENT),
    ("FedGCDR, no noise", f"FedGCDR{ALONE}"),
    *((label, SASREC) for label in METHODS_SENT),
    *((label, TEXT_AND_COUNTS) for label in METHODS_SENT),
)


def test_positions(settings: Settings, rows: Mapping[str, Row], seeds: int) -> dict[str, Positions]:
    """Row -> company -> (S, U)."""
    fixed = {**rule_rows(settings), **closed_rows(settings)}
    ranked = {label: [one["test"]] * seeds for label, one in fixed.items() if label != OTHER_ONLY}
    chosen = {name: value for name, value in rows[SASREC].setting.items() if name != "local_epochs"}
    ranked[POOLED] = [pooled_sasrec(settings, chosen, seed)["test"] for seed in range(seeds)]
    names = list(settings.pair.domains)
    found = {label: {n: torch.stack([one[n] for one in places]) for n in names} for label, places in ranked.items()}
    for label, row in rows.items():
        places = positions_of(row, "strict")[label]
        found[label] = {name: places[name] for name in names}
    return found


def difference(one: Comparison) -> str:
    return f"{one.difference.mean:+.4f} [{one.difference.low:+.4f}, {one.difference.high:+.4f}]"


def method_table(
    test: Mapping[str, Positions], rows: Mapping[str, Row], users: Mapping[str, Sequence[str]]
) -> list[str]:
    intervals = table_intervals(test, (10,), persons=users)
    lines = [
        "| row | hit@10 | ndcg@10 | skin care | hair care | settings | best round | kB up a round |",
        "|---|---:|---|---:|---:|---|---|---:|",
    ]
    for label in sorted(test, key=lambda label: -intervals[label][MACRO][METRIC].mean):
        of = intervals[label]
        mean = of[MACRO][METRIC]
        cells = [f"{of[name][METRIC].mean:.4f}" for name in users]
        words = ["", "", ""]
        if label in rows:
            courses = [cell.course() for cell in rows[label].cells]
            best = " ".join(str(course.best_round) for course in courses)
            sent = fmean(course.up[0] / course.up[1] for course in courses) / 1000
            words = [setting_text(rows[label].setting), best, f"{sent:,.0f}"]
        lines.append(
            f"| {label} | {of[MACRO]['hit@10'].mean:.4f} | {mean.mean:.4f} [{mean.low:.4f}, {mean.high:.4f}] | "
            f"{' | '.join([*cells, *words])} |"
        )
    return lines


def whom(test: Mapping[str, Positions], domains: Mapping[str, Domain]) -> list[str]:
    """Differences by how much a company knows of a customer."""
    lines = [
        "### For whom",
        "",
        "The same differences in ndcg@10 by a customer's purchases in the train part at the company. Holm's correction "
        "is over the table.",
        "",
        "| first | second | purchases | customers of a company | ndcg@10, second | difference | p (Holm) |",
        "|---|---|---|---:|---:|---|---:|",
    ]
    pairs = [
        pair
        for pair in PAIRS
        if pair[1] not in (TEXT_AND_COUNTS,) and not (pair[0] in METHODS_SENT and pair[1] == SASREC)
    ]
    values, persons, counts = {}, {}, {}
    for group, (low, high) in GROUPS.items():
        for name, domain in domains.items():
            is_in_U = torch.tensor([low <= len(train_part(row)) <= high for row in domain.clients.sequences])
            scope = f"{group}, {name}"
            persons[scope] = [u for u, is_in in zip(domain.clients.users, is_in_U.tolist(), strict=True) if is_in]
            counts[group] = counts.get(group, 0) + len(persons[scope])
            for label, places in test.items():
                values.setdefault(group, {}).setdefault(label, {})[scope] = places[name][:, is_in_U]
    tests = []
    for group, rows in values.items():
        own = {scope: persons[scope] for scope in next(iter(rows.values()))}
        tests += [(group, one) for one in compare_table(rows, (METRIC,), pairs, persons=own, each_domain=False)]
    adjusted = holm([one.p_value for _, one in tests])
    for pair in pairs:
        for (group, one), p in zip(tests, adjusted, strict=True):
            if (one.first, one.second) == pair:
                level = ndcg(values[group][pair[1]])
                lines.append(
                    f"| {one.first} | {one.second} | {group} | {counts[group]:,} | {level:.4f} | {difference(one)} | "
                    f"{p:.2g} |"
                )
    return lines


def headroom(args: argparse.Namespace) -> tuple[list[str], dict[str, Comparison]]:
    """What the other company's events add where one party has all, on validation items; and by pair of companies, what
    they add to popularity alone."""
    lines = [
        "### Headroom",
        "",
        f"Validation items, {HEADROOM:,} customers in common, one party with all events. EASE: the items of one "
        "company from the events at it, or at both. The other company's events alone: ridge regression of purchases "
        "here on those there, as for somebody who is new here; the customer is left out of the fit. The weight of the "
        "other company's events, 0.3 or 1, is the best on these same items.",
        "",
        "| companies | customers | row | hit@10 | ndcg@10 | minus | difference, ndcg@10 |",
        "|---|---:|---|---:|---:|---|---|",
    ]
    new: dict[str, Comparison] = {}
    for name in (NEAR, FAR):
        settings = Settings(args.work, pair(args.data, name, HEADROOM))
        users = {part: domain.clients.users for part, domain in settings.pair.domains.items()}
        rows = {label: one["valid"] for label, one in closed_rows(settings).items()}
        tests = compare_table(
            rows, (METRIC,), [(EASE_BOTH, EASE), (OTHER_ONLY, POPULARITY)], persons=users, each_domain=False
        )
        new[name] = next(one for one in tests if one.first == OTHER_ONLY)
        for label in (POPULARITY, OTHER_ONLY, EASE, EASE_BOTH):
            of = [user_metrics(one) for one in rows[label].values()]
            hit, value = (fmean(float(one[metric].mean()) for one in of) for metric in METRICS)
            against = next(((one.second, difference(one)) for one in tests if one.first == label), ("", ""))
            num = len(next(iter(users.values())))
            lines.append(f"| {name} | {num:,} | {label} | {hit:.4f} | {value:.4f} | {' | '.join(against)} |")
    return lines, new


def opening(
    test: Mapping[str, Positions], by: Mapping[tuple[str, str], Comparison], new: Mapping[str, Comparison]
) -> str:
    """What to do, in three sentences."""

    def said(first: str, second: str) -> str:
        one = by[first, second]
        return f"{difference(one)}, p {one.p_holm:.2g}"

    sent = [by[label, f"{label}{ALONE}"] for label in METHODS_SENT]
    better = [one.first for one in sent if one.distinguishable() and one.difference.mean > 0]
    best = max(METHODS_SENT, key=lambda label: ndcg(test[label]))
    answer = (
        f"Customers in common are worth sharing vectors of with {' and '.join(better)} alone"
        if better
        else "Do not send customers' vectors: no method is significantly better than itself with nothing sent"
    )
    return (
        f"{answer} (test ndcg@10, Holm: {'; '.join(f'{one.first} {said(one.first, one.second)}' for one in sent)}). "
        f"Even one party with all events of both companies gains only {said(POOLED, SASREC)} over each company alone "
        f"by SASRec and {said(EASE_BOTH, EASE)} by EASE; who may gain are customers without a purchase here: those at "
        f"the other company add {difference(new[NEAR])} to popularity ({NEAR}), {difference(new[FAR])} ({FAR}), "
        "validation. "
        f"Use the order of each company's own purchases first: SASRec of each company alone has ndcg@10 "
        f"{ndcg(test[SASREC]):.4f}, text neighbours + counts, which need no training, "
        f"{ndcg(test[TEXT_AND_COUNTS]):.4f}, "
        f"the best of the three methods ({best}) {ndcg(test[best]):.4f}."
    )


def causes(settings: Settings, test: Mapping[str, Positions], rows: Mapping[str, Row]) -> list[str]:
    """Why three methods are where they are."""
    lengths = [len(train_part(row)) for one in settings.pair.domains.values() for row in one.clients.sequences]
    sending = FedgcdrConfig().source_rounds
    later = {
        label: fmean(
            max(value for round, value in cell.course().curve if round > sending) for cell in rows[label].cells
        )
        for label in ("FedGCDR", "FedGCDR, no noise", f"FedGCDR{ALONE}")
    }
    return [
        "### Causes",
        "",
        "- **Order decides, and two of the methods do not read it.** FedHCDR and FedGCDR see a customer's items as a "
        f"set. So does EASE, in closed form: {ndcg(test[EASE]):.4f}. Decayed co-occurrence reads the order, is not "
        f"trained, and has {ndcg(test['decayed co-occurrence']):.4f}; SASRec {ndcg(test[SASREC]):.4f}.",
        f"- **A vector for each customer has little to learn from**: a train part has {median(lengths):g} purchases "
        "(median). More negatives do not help: FedHCDR with 32 in place of 4 has .0342 in place of .0334 on validation "
        "items (tried once: 1,500 customers, seed 0).",
        f"- **FedGCDR's noise is larger than its vectors**: epsilon 8 for one customer asks for a "
        f"standard deviation of {FedgcdrConfig().noise_std:.2f} in each of 16 numbers, the vectors have length 1 at "
        "most (the paper adds "
        f"{FedgcdrConfig(noise='paper').noise_std:.2f}). Best round after the vectors were sent, validation ndcg@10, "
        f"mean over seeds: {later['FedGCDR']:.4f} with noise, {later['FedGCDR, no noise']:.4f} without, "
        f"{later[f'FedGCDR{ALONE}']:.4f} with nothing sent. Where the best round is {sending} or earlier, validation "
        "chose the model from before anything was sent.",
        f"- FedDCSR reads the order and has {ndcg(test['FedDCSR']):.4f}, below SASRec. It differs by an output "
        "matrix beside the item table (SASRec's is the table), two encoders, and further losses; which of them costs "
        "what was not measured.",
        "- Left out: rows with a language model (cost); FedHCDR's public scorer, which ranks alike for everybody "
        "(docs/papers.md).",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/whole"))
    parser.add_argument("--work", type=Path, default=Path("runs/id_methods"))
    parser.add_argument("--customers", type=int, default=600, help="of the methods")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tune", type=int, default=2, help="settings tried for each method")
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    first_lines = heading("id_methods.py", 1)
    settings = Settings(args.work, pair(args.data, NEAR, args.customers), args.tune)
    body = page(args, settings, line_rows(settings, args.seeds))
    if not args.output.is_file():
        args.output.write_text("# ID-based methods\n")
    put_section(args.output, TITLE, "\n".join([body, "", *first_lines]))


if __name__ == "__main__":
    sys.exit(run(main))
