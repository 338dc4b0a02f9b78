"""All analyses of one finished run as plain data: what ``analysis.json`` holds and the report's sections are made of.

Shape legend: K clients (domains), M adapted modules, R rounds, U users of a domain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fedecider.data.domain import Domain
from fedecider.data.encoders import load_encoder
from fedecider.evaluation.per_user import UserPositions, read_per_user
from fedecider.federation.record import plain, read_json, read_records
from fedecider.federation.streams import stream
from fedecider.llm.baselines import STUDENT
from fedecider.lora.adapters import AdapterShape
from fedecider.lora.item_table import WEIGHTS_FILE
from fedecider.methods import METHODS
from fedecider.methods.own_rows import travelling_shapes
from fedecider.report.analyses import (
    MAX_TEXTS,
    activity_table,
    boundary_shock,
    distance_correlation,
    domain_distances,
    logged_rows,
    newest_titles,
    popularity_table,
    sample_texts,
    timing,
    traffic_table,
)
from fedecider.running.run_folder import RunFolder, read_run

TEXTUAL_IDS, NEWEST_TITLES = "textual user IDs", "joined titles of the newest train items"


def run_analysis(
    folder: RunFolder,
    domains: Mapping[str, Domain],
    user_texts: Mapping[str, Sequence[str]],
    encoder: str = "auto",
    compare: RunFolder | None = None,
    max_texts: int = MAX_TEXTS,
) -> dict[str, Any]:
    """Every number of the analyses as strict JSON data; parts that do not apply to the method are None.

    Args:
        folder: A finished run.
        domains: The run's domains in client order.
        user_texts: Domain -> textual IDs of its client users; titles stand in for all when a domain has none.
        encoder: See ``encoders.load_encoder``.
        compare: Another run on the same users whose reported row stands beside; None: the student without adapters.
        max_texts: Texts encoded per domain.

    Raises:
        ValueError: the domains are not those of the run, or ``compare`` ranked other users.
    """
    metrics, record, records = read_json(folder.metrics), read_run(folder.root), read_records(folder.rounds)
    METHODS.check_recorded(record["config"], str(folder.record))
    names, selected = list(domains), metrics["best_round"]
    if names != list(metrics["domains"]):
        raise ValueError(f"got domains {names}, expected those of the run in its order: {list(metrics['domains'])}")
    positions = _positions(folder, domains, metrics["reported"], compare)
    shapes = run_shapes(folder, names[0], record["config"]["run"]["lora_rank"])
    common = read_json(folder.communication).get("common_rows", [])  # runs of before sent whole tables

    def scalars(client: int, round: int) -> tuple[int, int]:
        own, peers = travelling_shapes(shapes, common, client, len(names))
        return METHODS[record["config"]["run"]["method"]].scalars(own, peers, round)

    chosen = next((entry for entry in records if entry["round"] == selected), None)
    if chosen is None:
        raise ValueError(f"got no record of the selected round {selected} in {folder.rounds}, expected one")
    alpha = read_json(folder.fusion_weights) if folder.fusion_weights.is_file() else None
    analysis = {
        "method": metrics["method"],
        "reported": metrics["reported"],
        "lines": list(positions),
        "domains": names,
        "best_round": selected,
        "alpha": alpha,
        "distances": _distances(domains, user_texts, encoder, max_texts, _selected_alpha(alpha, selected)),
        "activity": activity_table(domains, positions),
        "popularity": popularity_table(domains, positions),
        "traffic": traffic_table(records, names, scalars),
        "timing": timing(records, names),
        "rounds": [{key: entry[key] for key in ("round", "score", "train_s")} for entry in records],
        "modules": list(shapes),
        "norms": logged_rows(chosen, "norms", len(names)),
        "cosine": logged_rows(chosen, "cosine", len(names)),
        "shock": boundary_shock(records, names),
    }
    return plain(analysis)


def run_shapes(folder: RunFolder, domain: str, rank: int) -> dict[str, AdapterShape]:
    """Adapted modules with their sizes, sorted, from the header of an exported adapter.

    The exported rank may be K r; ``rank`` is the one of a single client's pair.
    """
    shapes = {}
    ending = ".lora_A.weight"
    with safe_open(str(folder.adapters / domain / WEIGHTS_FILE), "pt") as file:
        for key in file.keys():  # noqa: SIM118  # no mapping
            if key.endswith(ending):
                module = key.removesuffix(ending)
                in_features = file.get_slice(key).get_shape()[1]
                out_features = file.get_slice(f"{module}.lora_B.weight").get_shape()[0]
                name = module.removeprefix("base_model.model.")
                shapes[name] = AdapterShape(rank, in_features, out_features)
    return dict(sorted(shapes.items()))


def _distances(
    domains: Mapping[str, Domain],
    user_texts: Mapping[str, Sequence[str]],
    encoder: str,
    max_texts: int,
    alpha_KK: Tensor | None,
) -> dict[str, Any] | None:
    """Item and user distances with their correlation to alpha; None for a single domain."""
    if len(domains) < 2:
        return None
    named = all(user_texts.get(name) for name in domains)  # one kind of text for all, or the kinds would be compared
    users = {name: user_texts[name] if named else newest_titles(domain) for name, domain in domains.items()}
    items = {name: domain.item_texts for name, domain in domains.items()}
    loaded = load_encoder(encoder)
    found: dict[str, Any] = {
        "encoder": loaded.name,
        "users": TEXTUAL_IDS if named else NEWEST_TITLES,
        "num_texts": {},
        "alpha": alpha_KK,
    }
    own = {"item": {name: domain.catalogue for name, domain in domains.items()}, "user": {name: name for name in users}}
    for kind, texts in (("item", items), ("user", users)):
        streams = {name: stream(0, "analysis", kind, own[kind][name]) for name in texts}  # silos draw the same items
        drawn = {name: sample_texts(all, max_texts, streams[name]) for name, all in texts.items()}
        distance_KK = domain_distances(drawn, loaded)
        found["num_texts"][kind] = {name: len(group) for name, group in drawn.items()}
        found[f"{kind}_distance"] = distance_KK
        found[f"{kind}_correlation"] = None if alpha_KK is None else distance_correlation(alpha_KK, distance_KK)
    return found


def _selected_alpha(alpha: Mapping[str, Any] | None, selected: int) -> Tensor | None:
    if alpha is None:
        return None
    return torch.tensor(alpha["alpha"][alpha["rounds"].index(selected)], dtype=torch.float64)


def _positions(
    folder: RunFolder, domains: Mapping[str, Domain], reported: str, compare: RunFolder | None
) -> dict[str, dict[str, Tensor]]:
    """The reported row and one to compare it with: label -> domain -> (U,) test positions in the domain's order."""
    own = _test_rows(folder.per_user)
    rows = {reported: own[reported]}
    if compare is not None:
        other = read_json(compare.metrics)["reported"]
        label = other if other != reported else f"{other} of {Path(compare.root).name}"
        rows[label] = _test_rows(compare.per_user)[other]
    elif STUDENT in own:
        rows[STUDENT] = own[STUDENT]
    return {
        label: {name: _in_order(found.get(name), domain.clients.users, label) for name, domain in domains.items()}
        for label, found in rows.items()
    }


def _test_rows(path: Path) -> dict[str, dict[str, UserPositions]]:
    rows: dict[str, dict[str, UserPositions]] = {}
    for record in read_per_user(path):
        if record.split == "test":
            rows.setdefault(record.view, {})[record.domain] = record
    return rows


def _in_order(record: UserPositions | None, users: Sequence[str], label: str) -> Tensor:
    """Positions in the order of ``users``: files of two runs may hold them in other orders."""
    place = {} if record is None else {user: number for number, user in enumerate(record.users)}
    if record is None or set(place) != set(users):
        raise ValueError(
            f"got test positions of other users for {label} than the {len(users)} of the domain; "
            "expected runs on the same prepared data"
        )
    return record.position_U[torch.tensor([place[user] for user in users])]
