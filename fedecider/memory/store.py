"""A memory on disk: ``memory.safetensors`` and ``memory.json`` in one folder of its own, marked private.

``memory.json`` says whose catalogue it is (SHA-256 of the item keys) and what the tensors must be (their SHA-256). It
holds counts of real users: neither file belongs into anything that is pushed or shared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from safetensors.numpy import load_file, save_file

from fedecider.federation.record import write_json
from fedecider.memory.config import MemoryConfig
from fedecider.memory.counts import Counts
from fedecider.memory.memory import ALONE, BESIDE_MODEL, Memory
from fedecider.memory.mixture import Mixture
from fedecider.running.damage import check_tensors, damage_names, read_object

TENSOR_FILE, SETTINGS_FILE = "memory.safetensors", "memory.json"
PRIVATE = "counts of real users: for this client alone. Do not push, publish or share this folder"
FIELDS = {"private": str, "catalogue": str, "sha256": str, "config": dict, "mixtures": dict}
TENSORS = {
    "pair_start": np.int64,
    "pair_item": np.int64,
    "pair_count": np.int64,
    "event_count": np.int64,
    "item_vectors": np.float32,
}


def save_memory(memory: Memory, item_keys: Sequence[str], folder: Path) -> Path:
    """Write both files into ``folder``, the settings last; returns it. The same memory gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    pair_II = memory.counts.pair_II.copy()
    pair_II.sum_duplicates()
    pair_II.eliminate_zeros()
    values = (pair_II.indptr, pair_II.indices, pair_II.data, memory.counts.event_I, memory.unit_ID)
    tensors = {name: np.ascontiguousarray(v, TENSORS[name]) for name, v in zip(TENSORS, values, strict=True)}
    save_file(tensors, folder / TENSOR_FILE)
    mixtures = {"alone": memory.alone, "beside_model": memory.beside_model}
    content = {
        "private": PRIVATE,
        "catalogue": catalogue_hash(item_keys),
        "sha256": hashlib.sha256((folder / TENSOR_FILE).read_bytes()).hexdigest(),
        "config": asdict(memory.config),
        "mixtures": {name: None if one is None else mixture_data(one) for name, one in mixtures.items()},
    }
    write_json(folder / SETTINGS_FILE, content)
    return folder


def load_memory(folder: Path, item_keys: Sequence[str]) -> Memory:
    """The memory in ``folder``.

    Raises:
        ValueError: a file is missing or damaged, was changed, or is of another catalogue; the message names it.
    """
    path, tensor_path = folder / SETTINGS_FILE, folder / TENSOR_FILE
    content = read_object(path, FIELDS)
    if content["catalogue"] != catalogue_hash(item_keys):
        raise ValueError(
            f"got a memory of another catalogue in {folder}, expected that of these {len(item_keys)} items. Give the "
            "memory that was written with this run"
        )
    check_tensors(tensor_path)
    if hashlib.sha256(tensor_path.read_bytes()).hexdigest() != content["sha256"]:
        raise ValueError(
            f"{tensor_path} was changed since it was written, expected it unchanged. Copy both files again"
        )
    with damage_names(tensor_path):
        counts, unit_ID = _checked(load_file(tensor_path), len(item_keys))
    with damage_names(path):
        config = MemoryConfig(**content["config"])
        alone, beside = (content["mixtures"][name] for name in ("alone", "beside_model"))
        mixture = None if beside is None else _mixture(beside, config, BESIDE_MODEL)
        return Memory(counts, unit_ID, _mixture(alone, config, (ALONE,)), mixture, config)


def catalogue_hash(item_keys: Sequence[str]) -> str:
    """SHA-256 of the item keys in their order: what item numbers mean."""
    return hashlib.sha256(json.dumps(list(item_keys)).encode()).hexdigest()


def mixture_data(mixture: Mixture) -> dict[str, Any]:
    """A mixture as plain values."""
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in mixture._asdict().items()}


def _checked(tensors: dict[str, np.ndarray], num_items: int) -> tuple[Counts, np.ndarray]:
    start, item, count, event_I, unit_ID = (tensors[name] for name in TENSORS)
    wrong = [name for name, kind in TENSORS.items() if tensors[name].dtype != kind]
    shapes = (start.shape, event_I.shape, item.shape, unit_ID.shape[:1])
    if wrong or shapes != ((num_items + 1,), (num_items,), count.shape, (num_items,)) or unit_ID.ndim != 2:
        raise ValueError(f"tensors of other shapes or types than those of {num_items} items")
    if start[0] != 0 or start[-1] != len(item) or (np.diff(start) < 0).any():
        raise ValueError("rows that do not follow each other")
    inside = len(item) == 0 or (item.min() >= 0 and item.max() < num_items)
    if not inside or (count < 0).any() or (event_I < 0).any():
        raise ValueError("counts below 0, or of items outside the catalogue")
    if not np.isfinite(unit_ID).all():
        raise ValueError("item vectors that are no finite numbers")
    return Counts(scipy.sparse.csr_array((count, item, start), shape=(num_items, num_items)), event_I), unit_ID


def _mixture(data: dict[str, Any], config: MemoryConfig, known: Sequence[tuple[str, ...]]) -> Mixture:
    """``known``: the experts that it may have."""
    experts = tuple(str(name) for name in data["experts"])
    if experts not in known:
        raise ValueError(f"weights of the experts {', '.join(experts)}, not of {' or '.join(map(', '.join, known))}")
    cut_Q, weight_QE, mean_E = (np.array(data[name], np.float64) for name in ("cut_Q", "weight_QE", "mean_E"))
    shapes = ((config.num_buckets - 1,), (config.num_buckets, len(experts)), (len(experts),))
    if (cut_Q.shape, weight_QE.shape, mean_E.shape) != shapes:
        raise ValueError(f"weights that do not fit {len(experts)} experts and {config.num_buckets} buckets")
    whole = np.abs(np.vstack([weight_QE, mean_E]).sum(1) - 1.0).max() < 1e-6 and weight_QE.min() >= 0
    if not whole or not np.isfinite(cut_Q).all():
        raise ValueError("weights that are no shares of 1")
    if (np.diff(cut_Q) < 0).any():
        raise ValueError("cuts that do not rise")
    likelihood, number = float(data["log_likelihood"]), int(data["num_contexts"])
    return Mixture(experts, cut_Q, weight_QE, mean_E, likelihood, number)
