"""What clients exchanged over the rounds: whose directions each takes, and the bytes of every message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedecider.cross_silo.ended import Ended
from fedecider.cross_silo.entries import ModelOf
from fedecider.methods import METHODS
from fedecider.methods.client_models import ClientModels
from fedecider.methods.rows import common_rows, travelling_rows
from fedecider.models.adapters import num_scalars
from fedecider.models.directions import EPSILON
from fedecider.report.costs import WAYS, message_bytes, total_bytes

Records = Sequence[Mapping[str, Any]]


def added_by(models: ClientModels, model_of: ModelOf, names: Iterable[str]) -> dict[str, dict[str, float]]:
    """Client i -> client j -> norm of what the direction of j adds to the model of i. It is 0 for a direction of zeros,
    whatever its weight: weights alone would say that such a client contributes."""
    found = {}
    for name in names:
        adapters = model_of(name).adapters
        assert adapters is not None
        found[name] = dict(zip(models.names, adapters.slot_norms().tolist(), strict=True))
    return found


def fusion_weights(run: Ended, added: Mapping[str, Mapping[str, float]], records: Records) -> dict[str, Any]:
    """``fusion_weights.json``: ``alpha`` (R, K, K) after every round, ``shares`` (K, K) of what is added."""
    field, names = METHODS[run.settings.run.method].fusion_weights, run.models.names
    alpha_RKK = _logged(records, run.method.init()[1][field], field)
    norm_KK = torch.tensor([[added[client][other] for other in names] for client in names], dtype=torch.float64)
    silent_KK = norm_KK == 0.0  # of a direction of zeros its weight says nothing
    return {
        "domains": names,
        "rounds": [record["round"] for record in records],
        "shares": norm_KK / norm_KK.sum(1, keepdim=True).clamp(min=EPSILON),
        "alpha": alpha_RKK.masked_fill(silent_KK, 0.0),
    }


def _logged(records: Records, start_KK: Tensor, field: str) -> Tensor:
    """(R, K, K) what clients logged under ``field`` after every round; a client that was absent keeps what it had."""
    current_KK, over_rounds = start_KK.clone(), []
    for record in records:
        for client in record["clients"]:
            current_KK[client["client"]] = torch.tensor(client[field])
        over_rounds.append(current_KK.clone())
    return torch.stack(over_rounds)


def communication(records: Records, models: ClientModels, takes_mean: bool) -> dict[str, Any]:
    """Bytes per round, client and direction, with the payload of every tensor; P scalars make one adapter."""
    per_round = []
    for record in records:
        clients = {}
        for group in record["traffic"]:
            sizes = {way: message_bytes(group, way) for way in WAYS}
            clients.update({models.names[client]: sizes for client in group["clients"]})
        per_round.append({"round": record["round"], "clients": clients})
    return {
        "unit": "bytes of one safetensors message per client, round and direction",
        "adapter_scalars": num_scalars(models.start),
        "common_rows": common_rows(travelling_rows(models.rows, takes_mean).in_messages),
        "total": total_bytes(records),
        "rounds": per_round,
        "tensors": {str(record["round"]): record["traffic"] for record in (records[0], records[-1])},
    }
