"""An ensemble on disk: ``ensemble.safetensors`` and ``ensemble.json`` in one folder of its own, marked private.

``ensemble.json`` says whose catalogue it is (SHA-256 of the item keys). It holds counts of real users: neither file
belongs into anything that is pushed or shared. The manifest of the run has the checksums of both.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from safetensors.numpy import load_file, save_file

from fedecider.federation.record import write_json
from fedecider.models.config import SOURCES
from fedecider.models.counts import Counts
from fedecider.models.ensemble import Ensemble, Weights
from fedecider.models.features import FEATURES, MODEL, Knowledge
from fedecider.running.damage import check_tensors, damage_names, read_object
from fedecider.scratch import aside

TENSOR_FILE, SETTINGS_FILE = "ensemble.safetensors", "ensemble.json"
PRIVATE = "counts of real users: for this client alone. Do not push, publish or share this folder"
FIELDS = {"private": str, "catalogue": str, "sources": list, "num_new": int, "weights": dict}
MATRICES = ("pair", "next")
TENSORS = {
    **{f"{name}_{part}": np.int64 for name in MATRICES for part in ("start", "item", "count")},
    "event_count": np.int64,
    "item_vectors": np.float32,
}


def save_ensemble(ensemble: Ensemble, item_keys: Sequence[str], folder: Path) -> Path:
    """Write both files into ``folder``, the settings last; returns it. The same ensemble gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    counts = ensemble.knowledge.counts
    values: dict[str, np.ndarray] = {"event_count": counts.event_I, "item_vectors": ensemble.knowledge.unit_ID}
    for name, count_II in zip(MATRICES, (counts.pair_II, counts.next_II), strict=True):
        count_II = count_II.copy()
        count_II.sum_duplicates()
        count_II.eliminate_zeros()
        values |= {f"{name}_start": count_II.indptr, f"{name}_item": count_II.indices, f"{name}_count": count_II.data}
    tensors = {name: np.ascontiguousarray(values[name], dtype) for name, dtype in TENSORS.items()}
    with aside(folder / TENSOR_FILE) as scratch:
        save_file(tensors, scratch)
    content = {
        "private": PRIVATE,
        "catalogue": catalogue_hash(item_keys),
        "sources": list(ensemble.sources),
        "num_new": ensemble.knowledge.num_new,
        "weights": {name: weights_data(getattr(ensemble, name)) for name in ("alone", "beside_model")},
    }
    write_json(folder / SETTINGS_FILE, content)
    return folder


def load_ensemble(folder: Path, item_keys: Sequence[str]) -> Ensemble:
    """The ensemble in ``folder``.

    Raises:
        ValueError: a file is missing or damaged, or is of another catalogue; the message names it.
    """
    path, tensor_path = folder / SETTINGS_FILE, folder / TENSOR_FILE
    content = read_object(path, FIELDS)
    if content["catalogue"] != catalogue_hash(item_keys):
        raise ValueError(
            f"got an ensemble of another catalogue in {folder}, expected that of these {len(item_keys)} items. Give "
            "the ensemble that was written with this run"
        )
    check_tensors(tensor_path)
    with damage_names(tensor_path):
        counts, unit_ID = _checked(load_file(tensor_path), len(item_keys))
    with damage_names(path):
        alone, beside = (content["weights"][name] for name in ("alone", "beside_model"))
        sources = tuple(name for name in SOURCES if name in content["sources"])
        knowledge = Knowledge(counts, unit_ID, content["num_new"])
        ensemble = Ensemble(knowledge, _weights(alone), None if beside is None else _weights(beside), sources)
        if MODEL in ensemble.alone.value or not 0 <= knowledge.num_new <= len(item_keys):
            raise ValueError("weights of a model in an ensemble without one, or more new items than there are")
    return ensemble


def weights_data(weights: Weights | None) -> dict[str, Any] | None:
    """Weights as plain data."""
    return None if weights is None else {**weights._asdict(), "constant": list(weights.constant)}


def _weights(data: Mapping[str, Any]) -> Weights:
    value, error = ({str(name): float(number) for name, number in data[part].items()} for part in ("value", "error"))
    if not set(error) <= set(value) or not set(value) <= set(FEATURES):
        raise ValueError(f"weights of {', '.join(value)}, not of {', '.join(FEATURES)}")
    if not all(map(math.isfinite, (*value.values(), *error.values()))):
        raise ValueError("weights that are no finite numbers")
    return Weights(value, error, tuple(map(str, data["constant"])), int(data["num_customers"]))


def catalogue_hash(item_keys: Sequence[str]) -> str:
    """SHA-256 of the item keys in their order: what item numbers mean."""
    return hashlib.sha256(json.dumps(list(item_keys)).encode()).hexdigest()


def _checked(tensors: dict[str, np.ndarray], num_items: int) -> tuple[Counts, np.ndarray]:
    wrong = [name for name, dtype in TENSORS.items() if tensors[name].dtype != dtype]
    event_I, unit_ID = tensors["event_count"], tensors["item_vectors"]
    if wrong or event_I.shape != (num_items,) or unit_ID.shape[:1] != (num_items,) or unit_ID.ndim != 2:
        raise ValueError(f"tensors of other shapes or types than those of {num_items} items")
    if (event_I < 0).any() or not np.isfinite(unit_ID).all():
        raise ValueError("counts below 0, or item vectors that are no finite numbers")
    pair_II, next_II = (_matrix(tensors, name, num_items) for name in MATRICES)
    return Counts(pair_II, next_II, event_I), unit_ID


def _matrix(tensors: Mapping[str, np.ndarray], name: str, num_items: int) -> scipy.sparse.csr_array:
    start, item, count = (tensors[f"{name}_{part}"] for part in ("start", "item", "count"))
    if start.shape != (num_items + 1,) or item.shape != count.shape:
        raise ValueError(f"counts of other shapes than those of {num_items} items")
    if start[0] != 0 or start[-1] != len(item) or (np.diff(start) < 0).any():
        raise ValueError("rows that do not follow each other")
    if len(item) and (item.min() < 0 or item.max() >= num_items or count.min() < 0):
        raise ValueError("counts below 0, or of items outside the catalogue")
    return scipy.sparse.csr_array((count, item, start), shape=(num_items, num_items))
