"""What the card of a saved recommender says of its run: figures with intervals, the data, what users were promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedecider.data.domain import Domain
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.llm.memories import MEMORY_ROW, with_memory
from fedecider.llm.setup import Settings
from fedecider.report.rows import ResultRow, rows_data

COMPARED = ("text neighbours + counts", "popularity")
"""Simple rules that the card shows beside the adapter."""


def run_facts(
    settings: Settings,
    method: str,
    clients: Sequence[str],
    domain: Domain,
    round: int,
    rows: Sequence[ResultRow],
    promised: Mapping[str, Any],
) -> dict[str, Any]:
    """The facts of one domain, plain values: ``method``, ``clients``, ``protocol``, ``round``, ``lora_rank``, ``seed``,
    ``num_users`` and ``rows`` (of the test items; row -> metric -> ``mean``, ``low``, ``high``), ``export`` (metrics of
    an adapter that was cut down, else null), ``privacy`` (sentences) and ``data`` (counts of the data card, or null).

    ``rows``: the reported one first. ``promised``: `fedecider.llm.privacy.privacy_data`.
    """
    wanted = (rows[0].label, with_memory(method), MEMORY_ROW, *COMPARED)
    return {
        "method": method,
        "clients": list(clients),
        "protocol": stamp(get_protocol(settings.run.protocol)),
        "round": round,
        "lora_rank": settings.run.lora_rank,
        "seed": settings.run.seed,
        "num_users": len(domain.clients.sequences),
        "rows": rows_data([row for label in wanted for row in rows if row.label == label], domain.name),
        "export": None,
        "privacy": [entry["text"] for entry in promised.values()],
        "data": _counts(domain.card),
    }


def data_lines(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The table of the card."""
    clients, public = data["clients"], data["public"]
    return [
        ("source", str(data["source"])),
        ("items", str(data["items"])),
        ("users of the client", f"{clients['users']}, {clients['events']} events"),
        (
            "public users, on whom the backbone was trained",
            f"{public['users']}, {public['events']} events" if public["users"] else "none",
        ),
        ("split", str(data["split"])),
    ]


def privacy_lines(facts: Mapping[str, Any], domain: str, memory_inside: bool) -> list[str]:
    """What the adapter has seen, what bounds what it tells of users, and what the folder holds of them."""
    method, others = facts["method"], [name for name in facts["clients"] if name != domain]
    if method == "centralised":
        seen = f"It was trained on the events of all clients together: {', '.join(facts['clients'])}."
    else:
        users = f"the {facts['num_users']} users of `{domain}`"
        seen = f"It was trained on events of {users}; the last two of each were held out."
    lines = [seen]
    if method not in ("centralised", "local") and others:
        lines.append(
            f"What the clients {', '.join(others)} sent in the rounds is part of it, and may be read off it: updates, "
            "no events."
        )
    lines += facts["privacy"] or [
        "Differential privacy was not used: there is no bound (epsilon) on what the adapter tells of a single user."
    ]
    lines.append(
        "The client's private memory is inside (`memory/`): it holds counts of real users. Do not share this folder."
        if memory_inside
        else "The client's private memory, counts of real users, is not in this folder."
    )
    return [*lines, "`item_ids.json` holds the keys and titles of the whole catalogue, and nothing of users."]


def _counts(card: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the card of a model says of its data; None where the data card has no counts, as that of published data."""
    if not {"clients", "public", "items", "split"} <= card.keys():
        return None
    groups = {name: {field: int(card[name][field]) for field in ("users", "events")} for name in ("clients", "public")}
    source = card.get("settings", {}).get("source", "prepared data")
    return {"source": source, "items": int(card["items"]["count"]), "split": str(card["split"]), **groups}
