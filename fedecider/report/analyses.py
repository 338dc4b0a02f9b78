"""The numbers behind the analyses of a run: pure functions of positions, counts, texts' vectors and round records.

They re-create figures 4, 6 and 7 and tables 6 and 9 of the FeDecider paper and add what it leaves out.

Shape legend: K clients (domains), M adapted modules, R rounds, U users of a domain, N texts, D dimensions, I items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, permutations
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from fedecider.data.domain import Domain
from fedecider.data.encoders import Encoder
from fedecider.data.interactions import Interactions
from fedecider.evaluation.metrics import NO_ITEM, activity_buckets, popularity_groups, user_metrics
from fedecider.evaluation.protocols import held_out, train_parts
from fedecider.evaluation.statistics import bootstrap_intervals
from fedecider.federation.streams import stream
from fedecider.report.costs import NEAR, near_round

NUM_BUCKETS = 5
BUCKET_METRICS = ("hit@5", "ndcg@5")
NUM_NEWEST = 10
"""Train titles that stand for a user without a textual ID."""
MAX_TEXTS = 256
"""Texts encoded per domain."""
MAX_PERMUTED = 7
"""Clients up to which all orders are tried: 7! = 5,040."""
SHARE_GROUPS = ("bottom 20 %", "middle 60 %", "top 20 %")
PAPER_GROUPS = ("inactive (bottom 2 % of items)", "active")
BYTES_PER_SCALAR = 4

RowPositions = Mapping[str, Mapping[str, Tensor]]
"""Label of a row -> domain -> (U,) test positions, users in the domain's order."""


# ---- distances between domains -------------------------------------------------------------------------------------


def newest_titles(domain: Domain, num: int = NUM_NEWEST) -> list[str]:
    """One text per client user: the titles of the newest ``num`` TRAIN events, newest first; held-out items never."""
    return [
        "; ".join(domain.titles[item] for item in reversed(part[-num:]))
        for part in train_parts(domain.clients.sequences)
    ]


def sample_texts(texts: Sequence[str], limit: int, generator: torch.Generator) -> list[str]:
    """At most ``limit`` of ``texts``, drawn without replacement, in their order."""
    if len(texts) <= limit:
        return list(texts)
    return [texts[place] for place in torch.randperm(len(texts), generator=generator)[:limit].sort().values.tolist()]


def domain_distances(texts: Mapping[str, Sequence[str]], encoder: Encoder) -> Tensor:
    """(K, K) float64: 1 - cosine between the domains' mean text vectors (FeDecider, Fig. 4; encoder: see there)."""
    empty = [name for name, group in texts.items() if not group]
    if empty:
        raise ValueError(f"got no text for {empty}, expected at least one per domain")
    place = {text: number for number, text in enumerate(dict.fromkeys(chain.from_iterable(texts.values())))}
    vector_ND = encoder.encode(list(place))[[place[text] for group in texts.values() for text in group]]
    mean_KD = torch.stack([part.mean(0) for part in vector_ND.split([len(group) for group in texts.values()])])
    unit_KD = mean_KD / mean_KD.norm(dim=1, keepdim=True).clamp(min=1e-12)
    distance_KK = (1.0 - unit_KD @ unit_KD.T).clamp(min=0.0).fill_diagonal_(0.0)
    return (distance_KK + distance_KK.T) / 2  # equal to the last bit, or rounding would break ties between ranks


def distance_correlation(alpha_KK: Tensor, distance_KK: Tensor) -> dict[str, Any]:
    """Spearman correlation of the off-diagonal fusion weights with the distances: per row, and pooled over all.

    ``p_value``: share of all K! ways to rename the clients in the distance matrix whose pooled correlation is at least
    as large in absolute value (Mantel, 1967; entries of a matrix are not independent, so the usual p-value does not
    hold). None where it is not defined: K < 2, constant entries, or K above ``MAX_PERMUTED`` for the p-value.
    """
    size = len(alpha_KK)
    off_KK = ~torch.eye(size, dtype=torch.bool)
    rows = [_spearman(alpha_KK[i][off_KK[i]], distance_KK[i][off_KK[i]]) for i in range(size)]
    alpha, distance = alpha_KK[off_KK].double(), distance_KK[off_KK].double()
    pooled = _spearman(alpha, distance)
    p_value = None if pooled is None or size > MAX_PERMUTED else _mantel(alpha, distance_KK, off_KK, abs(pooled))
    return {"rows": rows, "pooled": pooled, "p_value": p_value, "num_entries": len(alpha)}


def evidence_note(num_clients: int) -> str:
    """What correlations over this many clients can show, in a sentence or three."""
    others, orders = num_clients - 1, math.factorial(num_clients)
    if num_clients < 3:
        return f"With {num_clients} clients a row has {max(others, 0)} off-diagonal entries: no order to correlate."
    rows = (
        "so a row's coefficient is -1 or +1 and either comes up by chance half of the time"
        if others == 2
        else f"so a row's order comes up by chance with probability 1/{math.factorial(others)}"
    )
    return (
        f"With {num_clients} clients a row has {others} off-diagonal entries, {rows}. The pooled coefficient has "
        f"{num_clients * others} entries but only {num_clients * others // 2} different distances, and renaming the "
        f"clients in every way gives {orders} cases, so no p-value can be below 1/{orders} = {1 / orders:.3g}. "
        + ("This is too little to support a claim; it only says which way the weights lean." if orders <= 24 else "")
    ).strip()


def _spearman(first: Tensor, second: Tensor) -> float | None:
    if len(first) < 2 or not bool(torch.isfinite(torch.stack([first.double(), second.double()])).all()):
        return None
    if len(first.unique()) < 2 or len(second.unique()) < 2:
        return None
    return float(scipy.stats.spearmanr(first.numpy(), second.numpy()).statistic)


def _mantel(alpha: Tensor, distance_KK: Tensor, off_KK: Tensor, observed: float) -> float:
    """Renaming permutes the entries, so their ranks are taken once and permuted with them."""
    rank = torch.from_numpy(scipy.stats.rankdata(alpha.numpy()))
    rank_KK = torch.zeros_like(distance_KK, dtype=torch.float64)
    rank_KK[off_KK] = torch.from_numpy(scipy.stats.rankdata(distance_KK[off_KK].numpy()))
    names = [list(order) for order in permutations(range(len(distance_KK)))]
    found = [abs(_pearson(rank, rank_KK[order][:, order][off_KK])) for order in names]
    return sum(value >= observed - 1e-9 for value in found) / len(found)


def _pearson(first: Tensor, second: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first, second]))[0, 1])


# ---- groups of users and of items ----------------------------------------------------------------------------------


def activity_table(domains: Mapping[str, Domain | Interactions], positions: RowPositions) -> dict[str, Any]:
    """Domain -> five equal groups of users by train events (ties by user key), each row's metrics with intervals.

    Per bucket: ``num_users``, ``train_events`` [least, most], ``lines``: row -> metric -> interval. Fewer groups when
    a domain has fewer than five users. ``wins``: row -> buckets (of all domains) in which its hit@5 is strictly
    above every other row's; ``ties``: the remaining buckets (FeDecider, Fig. 6).
    """
    tables: dict[str, Any] = {}
    for name, domain in domains.items():
        counts = train_parts(domain.clients.sequences).length_U.tolist()
        num_buckets = min(NUM_BUCKETS, len(counts))
        bucket_U = activity_buckets(counts, domain.clients.users, num_buckets)
        count_U = torch.tensor(counts)
        tables[name] = [
            {
                "num_users": int((bucket_U == bucket).sum()),
                "train_events": _span(count_U[bucket_U == bucket]),
                "lines": _group_metrics(positions, name, bucket_U == bucket, f"activity {bucket}"),
            }
            for bucket in range(num_buckets)
        ]
    buckets = [bucket["lines"] for table in tables.values() for bucket in table]
    wins = {label: sum(_is_best(label, rows) for rows in buckets) for label in positions}
    return {"domains": tables, "wins": wins, "ties": len(buckets) - sum(wins.values())}


def popularity_table(
    domains: Mapping[str, Domain | Interactions], positions: RowPositions, kinds: Sequence[str] = ("shares", "paper")
) -> dict[str, Any]:
    """Domain -> groups of test cases by the training frequency of their target, each row's metrics with intervals.

    The frequency counts the train events of the domain's client users and nothing else. ``shares``: the test cases are
    sorted by frequency (ties by item key, then user key) and cut at 20 % and 80 %. ``paper`` (FeDecider, Fig. 7): the
    distinct targets of all domains together are sorted in the same way and the bottom 2 % are inactive. Both with
    ``num_cases`` and ``train_count`` [least, most]. ``warnings`` name empty groups; their values are None. ``kinds``:
    which of the two are wanted.
    Differs from the paper: the tie rule is ours, it has none.
    """
    counts = {name: train_counts(domain) for name, domain in domains.items()}
    held = {name: held_out(domain.clients.sequences, "test") for name, domain in domains.items()}
    is_case = {name: target_U != NO_ITEM for name, target_U in held.items()}  # of a basket every item is one
    targets = {name: target_U[is_case[name]] for name, target_U in held.items()}
    positions = {label: {name: one[is_case[name]] for name, one in of.items()} for label, of in positions.items()}
    inactive = _inactive(domains, counts, targets)
    result: dict[str, Any] = {**{kind: {} for kind in kinds}, "warnings": []}
    for name, domain in domains.items():
        count_U = counts[name][targets[name]]
        users = [domain.clients.users[row] for row in is_case[name].nonzero()[:, 0].tolist()]
        cases = [
            f"{domain.item_keys[item]}\x1f{user}" for item, user in zip(targets[name].tolist(), users, strict=True)
        ]
        if len(cases) >= NUM_BUCKETS:
            fifth_U = activity_buckets(count_U, cases, NUM_BUCKETS)
            masks = {SHARE_GROUPS[0]: fifth_U == 0, SHARE_GROUPS[1]: (fifth_U > 0) & (fifth_U < 4)}
            masks[SHARE_GROUPS[2]] = fifth_U == 4
        else:
            masks = {group: torch.zeros(len(cases), dtype=torch.bool) for group in SHARE_GROUPS}
        paper = dict(zip(PAPER_GROUPS, (inactive[name], ~inactive[name]), strict=True))
        tables = {"shares": masks, "paper": paper}
        for kind, groups in ((kind, tables[kind]) for kind in kinds):
            result[kind][name] = {
                group: {
                    "num_cases": int(mask_U.sum()),
                    "train_count": _span(count_U[mask_U]),
                    "lines": _group_metrics(positions, name, mask_U, group),
                }
                for group, mask_U in groups.items()
            }
            empty = [group for group, mask_U in groups.items() if not mask_U.any()]
            result["warnings"] += [f"{name} has no test case in the group {group}" for group in empty]
    return result


def train_counts(domain: Domain | Interactions) -> Tensor:
    """(I,) int64: how often each item occurs in the train parts of the client users."""
    events = train_parts(domain.clients.sequences).value_E.astype(np.int64)
    return torch.bincount(torch.from_numpy(events), minlength=len(domain.item_keys))


def _inactive(
    domains: Mapping[str, Domain | Interactions], counts: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Domain -> (U,) bool; the catalogues are laid end to end, so equal keys of two domains stay two items."""
    keys = [f"{key}\x1f{name}" for name, domain in domains.items() for key in domain.item_keys]
    pooled, offset = [], 0
    for name, domain in domains.items():
        pooled.append(targets[name] + offset)
        offset += len(domain.item_keys)
    mask = popularity_groups(torch.cat(pooled), torch.cat(list(counts.values())), keys)
    return dict(zip(domains, mask.split([len(target) for target in pooled]), strict=True))


def _group_metrics(positions: RowPositions, domain: str, mask_U: Tensor, group: str) -> dict[str, Any]:
    """Row -> metric -> interval over the users in ``mask_U``; None where there are none."""
    if not mask_U.any():
        return {label: dict.fromkeys(BUCKET_METRICS) for label in positions}
    values = {
        (label, metric): value_U[mask_U]
        for label, per_domain in positions.items()
        for metric, value_U in user_metrics(per_domain[domain], (5,)).items()
        if metric in BUCKET_METRICS
    }
    intervals = bootstrap_intervals(values, stream(0, "bootstrap", domain, group))  # all rows are resampled alike
    return {label: {metric: intervals[label, metric]._asdict() for metric in BUCKET_METRICS} for label in positions}


def _is_best(label: str, rows: Mapping[str, Any]) -> bool:
    means = {name: metrics["hit@5"]["mean"] for name, metrics in rows.items()}
    return all(means[label] > mean for name, mean in means.items() if name != label)


def _span(count_U: Tensor) -> list[int] | None:
    return [int(count_U.min()), int(count_U.max())] if len(count_U) else None


# ---- rounds --------------------------------------------------------------------------------------------------------


def traffic_table(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], scalars: Callable[[int, int], tuple[int, int]]
) -> list[dict[str, Any]]:
    """One entry per round and group of clients with equal traffic: payload bytes, the formula's, and the header.

    ``scalars``: client, round -> scalars down and up by the method's formula, 4 bytes each (FeDecider, Table 6).
    """
    table = []
    for record in records:
        for group in record["traffic"]:
            formula = dict(zip(("down", "up"), scalars(group["clients"][0], record["round"]), strict=True))
            entry: dict[str, Any] = {
                "round": record["round"],
                "clients": [names[client] for client in group["clients"]],
            }
            for way in ("down", "up"):
                entry[way] = sum(group[way].values())
                entry[f"formula_{way}"] = BYTES_PER_SCALAR * formula[way]
                entry[f"header_{way}"] = group[f"header_{way}"]
            entry["equal"] = all(entry[way] == entry[f"formula_{way}"] for way in ("down", "up"))
            table.append(entry)
    return table


def timing(records: Sequence[Mapping[str, Any]], names: Sequence[str], tolerance: float = NEAR) -> dict[str, Any]:
    """Mean local training seconds a round, and how soon validation comes near its best (FeDecider, Table 9).

    ``train_s``: mean over rounds of all clients together; ``client_s``: domain -> mean over the rounds it took part in.
    ``near_round``: first round whose score is at least (1 - tolerance) times the best; ``best_round``: the earliest of
    the best.
    """
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for record in records:
        for client in record["clients"]:
            if "seconds" in client:
                seconds[names[client["client"]]].append(client["seconds"])
    best = max(record["score"] for record in records)
    return {
        "train_s": math.fsum(record["train_s"] for record in records) / len(records),
        "client_s": {name: math.fsum(found) / len(found) if found else None for name, found in seconds.items()},
        "best_score": best,
        "best_round": next(record["round"] for record in records if record["score"] == best),
        "near_round": near_round(records, tolerance),
        "tolerance": tolerance,
    }


def logged_rows(record: Mapping[str, Any], key: str, num_clients: int) -> list[list[float] | None] | None:
    """The list that each client logged under ``key`` in one round, in client order; None when no client did.

    A client that was absent, or whose update was refused, has None in its row.
    """
    found = {client["client"]: client.get(key) for client in record["clients"]}
    rows = [found.get(client) for client in range(num_clients)]
    return rows if any(row is not None for row in rows) else None


def boundary_shock(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], metric: str = "ndcg@10"
) -> dict[str, Any] | None:
    """Validation ``metric`` before the upload and after the broadcast: variant -> domain -> one value per round.

    ``change``: domain -> after minus before. None for methods without these two variants. The
    broadcast resets norms that training had adapted to, and the final model is the one after it.
    """
    variants = ("pre_upload", "post_broadcast")
    if any(variant not in record["valid"] for record in records for variant in variants):
        return None
    scores = {
        variant: {name: [record["valid"][variant][k][metric] for record in records] for k, name in enumerate(names)}
        for variant in variants
    }
    before, after = (scores[variant] for variant in variants)
    change = {name: [late - early for early, late in zip(before[name], after[name], strict=True)] for name in names}
    return {"metric": metric, "rounds": [record["round"] for record in records], "scores": scores, "change": change}
