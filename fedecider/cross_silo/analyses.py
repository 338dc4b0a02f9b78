"""The analyses of the paper for one finished run, on demand: distances, groups of users and items, traffic, updates.

They re-create figures 4 to 7 and tables 6 and 9 of the FeDecider paper and need the data of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fedecider.cross_silo.ensembles import LOCAL
from fedecider.cross_silo.entries import STUDENT
from fedecider.data.domain import Domain
from fedecider.data.encoders import load_encoder
from fedecider.engine.result import RunResult
from fedecider.federation.streams import stream
from fedecider.methods import METHODS
from fedecider.methods.rows import travelling_shapes
from fedecider.models.adapters import AdapterShape
from fedecider.models.item_table import WEIGHTS_FILE
from fedecider.report import analyses
from fedecider.running.run_folder import RunFolder


def run_analysis(
    root: Path, domains: Mapping[str, Domain], encoder: str = "auto", compare: Path | None = None
) -> dict[str, Any]:
    """Every number of the analyses; parts that do not apply to the method are None.

    Args:
        root: The folder of a finished run.
        domains: The run's domains in client order.
        encoder: See `fedecider.data.encoders.load_encoder`.
        compare: Another run on the same users whose reported entry stands beside; None: the student without adapters.

    Raises:
        ValueError: the domains are not those of the run, or ``compare`` ranked other users.
    """
    result, names = RunResult.read(root), list(domains)
    METHODS.check_recorded(dict(result.settings), str(RunFolder(root).record))
    if names != result.clients:
        raise ValueError(f"got domains {names}, expected those of the run in its order: {result.clients}")
    positions = _positions(result, domains, None if compare is None else RunResult.read(compare), compare)
    shapes = run_shapes(RunFolder(root), names[0], result.settings["run"]["lora_rank"])
    common = result.communication.get("common_rows", [])  # runs of before sent whole tables

    def scalars(client: int, round: int) -> tuple[int, int]:
        own, peers = travelling_shapes(shapes, common, client, len(names))
        method = LOCAL if result.method == LOCAL else result.settings["run"]["method"]
        return METHODS[method].scalars(own, peers, round)

    records, selected = result.rounds, result.best_round
    chosen = next((record for record in records if record["round"] == selected), None)
    if chosen is None:
        raise ValueError(f"got no record of the selected round {selected} in {root}, expected one")
    alpha = result.fusion_weights or None
    return {
        "reported": result.reported,
        "lines": list(positions),
        "domains": names,
        "best_round": selected,
        "alpha": alpha,
        "distances": _distances(domains, encoder, _selected_alpha(alpha, selected)),
        "activity": analyses.activity_table(domains, positions),
        "popularity": analyses.popularity_table(domains, positions),
        "traffic": analyses.traffic_table(records, names, scalars),
        "timing": analyses.timing(records, names),
        "rounds": [{key: record[key] for key in ("round", "score", "train_s")} for record in records],
        "modules": list(shapes),
        "norms": analyses.logged_rows(chosen, "norms", len(names)),
        "cosine": analyses.logged_rows(chosen, "cosine", len(names)),
        "shock": analyses.boundary_shock(records, names),
    }


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


def _distances(domains: Mapping[str, Domain], encoder: str, alpha_KK: Tensor | None) -> dict[str, Any] | None:
    """Item and user distances with their correlation to alpha; None for a single domain, or where there is no alpha."""
    if len(domains) < 2 or alpha_KK is None:
        return None
    loaded = load_encoder(encoder)
    found: dict[str, Any] = {"encoder": loaded.name, "num_texts": {}, "alpha": alpha_KK}
    for kind in ("item", "user"):
        drawn = {}
        for name, domain in domains.items():
            texts = domain.item_texts if kind == "item" else analyses.newest_titles(domain)
            same = domain.catalogue.name if kind == "item" else name  # silos of a catalogue draw the same items
            drawn[name] = analyses.sample_texts(texts, analyses.MAX_TEXTS, stream(0, "analysis", kind, same))
        distance_KK = analyses.domain_distances(drawn, loaded)
        found["num_texts"][kind] = {name: len(texts) for name, texts in drawn.items()}
        found[f"{kind}_distance"] = distance_KK
        found[f"{kind}_correlation"] = analyses.distance_correlation(alpha_KK, distance_KK)
    return found


def _selected_alpha(alpha: Mapping[str, Any] | None, selected: int) -> Tensor | None:
    if alpha is None:
        return None
    return torch.tensor(alpha["alpha"][alpha["rounds"].index(selected)], dtype=torch.float64)


def _positions(
    result: RunResult, domains: Mapping[str, Domain], other: RunResult | None, place: Path | None
) -> dict[str, dict[str, Tensor]]:
    """The reported entry and one to compare it with: entry -> domain -> (U,) positions in the domain's order."""
    entries = {result.reported: (result, result.reported)}
    if other is not None:
        label = other.reported if other.reported != result.reported else f"{other.reported} of {Path(str(place)).name}"
        entries[label] = (other, other.reported)
    elif STUDENT in result.positions:
        entries[STUDENT] = (result, STUDENT)
    return {
        label: {name: _in_order(*source, name, domain.clients.users) for name, domain in domains.items()}
        for label, source in entries.items()
    }


def _in_order(result: RunResult, entry: str, client: str, users: Sequence[str]) -> Tensor:
    """Positions in the order of ``users``: files of two runs may hold them in other orders."""
    place = {user: number for number, user in enumerate(result.users.get(client, ()))}
    if set(place) != set(users):
        raise ValueError(
            f"got test positions of other users for {entry} than the {len(users)} of the domain {client}; expected "
            "runs on the same prepared data"
        )
    return result.positions[entry][client][torch.tensor([place[user] for user in users])]
