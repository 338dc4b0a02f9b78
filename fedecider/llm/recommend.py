"""Recommendations from a finished run, with nothing but transformers, peft and the files of the run folder.

>>> loaded = load("runs/demo", "crime")
>>> for item in recommend(loaded, ["The Silent Harbour", "The Last Ledger"], k=10): print(item.title, item.score)
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel

from fedecider.federation.record import read_json
from fedecider.lora.export import ItemTable, read_item_ids
from fedecider.running.run_folder import RunFolder, read_run
from idgen.backbone import load_backbone
from idgen.decode import constrained_beam_search
from idgen.draws import SampleConfig
from idgen.item_ids import ItemIds
from idgen.samples import Task, catalogue_task, encode_histories
from idgen.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RecommendConfig:
    """Recommendation: from which run, and for which history.

    Args:
        run: The run folder that scripts/federate.py printed.
        domain: The domain whose adapter and catalogue are used.
        history: The titles or item keys of that domain, oldest first, separated by " | ".
        k: The number of recommendations.
        device: The device, cpu or cuda.
    """

    run: str
    domain: str
    history: str
    k: int = 10
    device: str = "cpu"


class Loaded(NamedTuple):
    """One domain's recommender, ready to use."""

    model: PeftModel
    task: Task
    items: ItemTable
    alpha_share: dict[str, float]
    """Each domain's share of the absolute fusion weights; empty for methods without."""
    num_beams: int
    length_penalty: float


class Recommendation(NamedTuple):
    key: str
    title: str
    score: float
    """Log-probability of the item's ID, over length ** length_penalty."""


def load(run: str | Path, domain: str, device: str | torch.device = "cpu") -> Loaded:
    """Backbone, adapter and items of one domain of a run.

    Raises:
        FileNotFoundError: there is no such run or domain.
        ValueError: the item table, the adapter and the backbone do not belong together.
    """
    folder, record = RunFolder(Path(run)), read_run(Path(run))
    adapter = folder.adapters / domain
    if not adapter.is_dir():
        found = sorted(path.name for path in folder.adapters.glob("*") if path.is_dir())
        raise FileNotFoundError(f"no adapter for domain {domain!r} in {run}; found {found}. Give one of these")
    items = read_item_ids(adapter)
    tokenizer = load_tokenizer(folder.backbone)
    backbone = load_backbone(folder.backbone, tokenizer)
    try:
        model = PeftModel.from_pretrained(backbone, str(adapter)).to(device).eval()
    except RuntimeError as error:
        raise ValueError(
            f"the adapter of {domain!r} does not fit the backbone in {folder.backbone} "
            f"({str(error).strip().splitlines()[-1].strip()}); expected the one of the same run. Copy both together"
        ) from error
    item_ids = ItemIds(list(items.id_texts), [list(tokens) for tokens in items.token_ids], {})
    config = record["config"]
    return Loaded(
        model=model,
        task=catalogue_task(domain, item_ids, tokenizer, SampleConfig(**config["run"]["pretrain"]["samples"])),
        items=items,
        alpha_share=_alpha_share(folder, domain),
        num_beams=config["ranking"]["num_beams"],
        length_penalty=config["ranking"]["length_penalty"],
    )


def recommend(loaded: Loaded, history: Sequence[str], k: int = 10, drop_seen: bool = True) -> list[Recommendation]:
    """The k best next items for a reading history of titles or item keys, oldest first.

    Raises:
        ValueError: an unknown title, or k below 1.
    """
    if k < 1:
        raise ValueError(f"got k {k}, expected at least 1")
    seen = [find_item(loaded.items, entry) for entry in history]
    input_ids, attention_mask = encode_histories(loaded.task, [seen])
    device = next(loaded.model.parameters()).device
    num_beams = min(max(loaded.num_beams, k + len(set(seen))), len(loaded.items.keys))
    item_BK, score_BK = constrained_beam_search(
        loaded.model,
        input_ids.to(device),
        attention_mask.to(device),
        loaded.task.trie.to(device),
        num_beams=num_beams,
        length_penalty=loaded.length_penalty,
    )
    ranked = [
        Recommendation(loaded.items.keys[item], loaded.items.titles[item], score)
        for item, score in zip(item_BK[0].tolist(), score_BK[0].tolist(), strict=True)
        if item >= 0 and not (drop_seen and item in seen)
    ]
    return ranked[:k]


def find_item(items: ItemTable, entry: str) -> int:
    """Item number of a title (letter case ignored) or of an item key.

    Raises:
        ValueError: neither; the message names the closest titles.
    """
    wanted = entry.strip()
    if wanted in items.keys:
        return list(items.keys).index(wanted)
    titles = [title.lower() for title in items.titles]
    if wanted.lower() in titles:
        return titles.index(wanted.lower())
    close = difflib.get_close_matches(wanted.lower(), titles, n=3, cutoff=0.3)
    near = [items.titles[titles.index(title)] for title in close]
    raise ValueError(
        f"got title {wanted!r}, expected one of the {len(items.titles)} titles or item keys in item_ids.json; "
        f"the closest are {near}"
    )


def _alpha_share(folder: RunFolder, domain: str) -> dict[str, float]:
    if not folder.fusion_weights.is_file():
        return {}
    content, best = read_json(folder.fusion_weights), read_json(folder.metrics)["best_round"]
    alpha_K = content["alpha"][content["rounds"].index(best)][content["domains"].index(domain)]
    total = sum(map(abs, alpha_K)) or 1.0
    return {name: abs(alpha) / total for name, alpha in zip(content["domains"], alpha_K, strict=True)}
