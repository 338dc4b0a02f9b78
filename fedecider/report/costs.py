"""What rounds cost, summed up from their records: bytes, seconds, and how soon validation comes near its best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

WAYS = ("down", "up")
NEAR = 0.01
"""So near to the best validation score counts as there."""


def message_bytes(group: Mapping[str, Any], way: str) -> int:
    """Bytes of the message of each client of a ``traffic`` group, header included."""
    return sum(group[way].values()) + group[f"header_{way}"]


def total_bytes(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes of all clients over all rounds, per direction."""
    return {way: sum(len(group["clients"]) * message_bytes(group, way) for group in _groups(records)) for way in WAYS}


def mean_bytes(record: Mapping[str, Any], way: str) -> float:
    """Mean over clients of the bytes of one round."""
    return total_bytes([record])[way] / participations([record])


def cost_of_joining(records: Sequence[Mapping[str, Any]], names: Sequence[str], asked: Sequence[str]) -> dict[str, Any]:
    """Seconds of CPU of the joint training and of that of clients alone beside it, and bytes by way: sums over rounds,
    means over the clients in ``asked``; None for what the logs of clients, ``names``, do not tell."""
    logs = [log for record in records for log in record["clients"] if names[log["client"]] in asked]
    found: dict[str, Any] = {"num_rounds": len(records), "joined_cpu_s": None, "local_cpu_s": None}
    if logs and all("local" in log for log in logs):
        found["joined_cpu_s"] = math.fsum(log["cpu_s"] for log in logs) / len(asked)
        found["local_cpu_s"] = math.fsum(log["local"]["cpu_s"] for log in logs) / len(asked)
    groups = [group for record in records for group in record.get("traffic", [])]
    num_messages = [sum(names[one] in asked for one in group["clients"]) for group in groups]
    for way in WAYS:
        total = sum(num * message_bytes(one, way) for num, one in zip(num_messages, groups, strict=True))
        found[way] = total / len(asked) if groups else None
    return found


def participations(records: Sequence[Mapping[str, Any]]) -> int:
    """Clients that took part, counted once in every round."""
    return sum(len(group["clients"]) for group in _groups(records))


def median_seconds(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over rounds: local training of all clients, the round without validation; of those validated, that."""
    validated = [record["evaluate_s"] for record in records if record.get("score", 0.0) is not None]
    return {name: median(record[name] for record in records) for name in ("train_s", "wall_s")} | {
        "evaluate_s": median(validated)
    }


def near_round(records: Sequence[Mapping[str, Any]], tolerance: float = NEAR) -> int:
    """The first round whose score is at least (1 - tolerance) times the best."""
    best = max(record["score"] for record in records)
    return next(record["round"] for record in records if record["score"] >= (1.0 - tolerance) * best)


def _groups(records: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (group for record in records for group in record["traffic"])
