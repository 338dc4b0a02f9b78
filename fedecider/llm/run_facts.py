"""What the card of a saved recommender says of its run: figures with intervals, the data, what users were promised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedecider.llm.memories import MEMORY_ROW, with_memory
from fedecider.llm.run_page import CARDS_FILE
from fedecider.llm.run_record import read_llm_run
from fedecider.running.damage import damage_names, read_object
from fedecider.running.run_folder import RunFolder

COMPARED = ("text neighbours + counts", "popularity")
"""Simple rules that the card shows beside the adapter."""


def run_facts(run: RunFolder, domain: str) -> dict[str, Any]:
    """The facts of one domain, plain values: ``method``, ``clients``, ``protocol``, ``round``, ``lora_rank``, ``seed``,
    ``num_users`` and ``rows`` (of the test items; row -> metric -> ``mean``, ``low``, ``high``), ``export`` (metrics of
    an adapter that was cut down, else null), ``privacy`` (sentences) and ``data`` (counts of the data card, or null).

    Raises:
        ValueError: a file of the run is missing or damaged; the message names it.
    """
    record, metrics = read_llm_run(run.root), read_object(run.metrics)
    with damage_names(run.record):
        config = record["config"]["run"]
        settings = {"lora_rank": int(config["lora_rank"]), "seed": int(config["seed"])}
    with damage_names(run.metrics):
        method, found = str(metrics["method"]), metrics["domains"][domain]
        wanted = (str(metrics["reported"]), with_memory(method), MEMORY_ROW, *COMPARED)
        return {
            "method": method,
            "clients": list(metrics["domains"]),
            "protocol": str(metrics["stamp"]),
            "round": int(metrics["best_round"]),
            **settings,
            "num_users": int(found["num_users"]),
            "rows": {row: found["test"][row] for row in wanted if row in found["test"]},
            "export": found.get("export", {}).get("test"),
            "privacy": [entry["text"] for entry in metrics.get("privacy", {}).values()],
            "data": _counts(run.root / CARDS_FILE, domain),
        }


def data_lines(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The table of the card."""
    clients, public = data["clients"], data["public"]
    return [
        ("source", str(data["source"])),
        ("items", str(data["items"])),
        ("users of the client", f"{clients['users']}, {clients['events']} events"),
        ("public users, on whom the backbone was trained", f"{public['users']}, {public['events']} events"),
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


def _counts(path: Path, domain: str) -> dict[str, Any] | None:
    """Counts of the data card; None where there is none, as at a site of a deployment."""
    if not path.is_file():
        return None
    cards = read_object(path)
    with damage_names(path):
        card = cards[domain]
        groups = {
            name: {field: int(card[name][field]) for field in ("users", "events")} for name in ("clients", "public")
        }
        source = card.get("settings", {}).get("source", "prepared data")
        return {"source": source, "items": int(card["items"]["count"]), "split": str(card["split"]), **groups}
