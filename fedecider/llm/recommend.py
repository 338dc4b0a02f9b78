"""Recommendations from a finished run, with nothing but transformers, peft and the files of the run folder.

>>> loaded = load("runs/demo", "crime")
>>> for item in recommend(loaded, ["The Silent Harbour", "The Last Ledger"], k=10): print(item.title, item.score)
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel

from fedecider.llm.item_texts import PROJECTION_FILE
from fedecider.llm.manifest import verify_manifest
from fedecider.llm.model_scores import model_scores
from fedecider.llm.new_items import TEXT_FOLDER, NewItem, NewTexts, add_items
from fedecider.llm.run_record import read_llm_run
from fedecider.lora.export import ITEM_FILE, ItemTable, load_adapter, read_item_ids
from fedecider.memory.contexts import new_contexts
from fedecider.memory.memory import Memory, ModelScores, rank
from fedecider.memory.store import load_memory
from fedecider.running.cli import from_plain
from fedecider.running.damage import damage_names, read_object
from fedecider.running.launch import checked_device
from fedecider.running.run_folder import RunFolder
from idgen.backbone import load_backbone
from idgen.candidates import with_prior
from idgen.decode import constrained_beam_search
from idgen.draws import SampleConfig
from idgen.item_ids import ItemIds
from idgen.keywords import KeywordConfig
from idgen.ranking import RankingConfig
from idgen.samples import Task, catalogue_task, encode_histories
from idgen.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RecommendConfig:
    """Recommendation: from which run, and for which history.

    Args:
        run: The run folder that scripts/federate.py printed.
        domain: The domain whose adapter and catalogue are used.
        history: The titles or item keys of that domain, oldest first, separated by " | ".
        new_items: A file with items that came after the training, .csv or .jsonl with key, title and text; they are
            recommended by their texts alone, and may stand in the history.
        k: The number of recommendations.
        device: The device, cpu or cuda.
        memory: If true, and the run folder holds the client's private memory, rank with it; else, or with new items,
            which it never counted, with the model alone.
    """

    run: str
    domain: str
    history: str
    new_items: str = ""
    k: int = 10
    device: str = "cpu"
    memory: bool = True


class Loaded(NamedTuple):
    """One domain's recommender, ready to use."""

    model: PeftModel
    task: Task
    items: ItemTable
    alpha_share: dict[str, float]
    """Each domain's share of the absolute fusion weights; empty for methods without."""
    num_beams: int
    length_penalty: float
    memory: Memory | None = None
    scores: ModelScores | None = None
    """What the memory asks of the model."""


class Recommendation(NamedTuple):
    key: str
    title: str
    score: float
    """Log-probability: of the item's ID, over length ** length_penalty; with a memory, of the item in the mixture."""


def load(
    run: str | Path,
    domain: str,
    device: str | torch.device = "cpu",
    memory: bool = True,
    new_items: Sequence[NewItem] = (),
) -> Loaded:
    """Backbone, adapter and items of one domain of a run, and with ``memory`` its private memory where there is one.

    ``new_items`` come behind the others (`fedecider.llm.new_items`); the memory, which never counted one of them, is
    left out then.

    Raises:
        FileNotFoundError: there is no such run or domain.
        ValueError: a file was changed after the export or is damaged, the parts do not belong together, there is no
            such device, or new items cannot be added.
    """
    folder, record = RunFolder(Path(run)), read_llm_run(Path(run))
    device = checked_device(device)
    found = sorted(path.name for path in folder.adapters.glob("*") if path.is_dir())
    if domain not in found:
        raise FileNotFoundError(f"no adapter for domain {domain!r} in {run}; found {found}. Give one of these")
    adapter = folder.adapters / domain
    verify_manifest(folder.root, [folder.backbone, adapter])
    with damage_names(folder.record):
        pretrain, ranking = record["config"]["run"]["pretrain"], record["config"]["ranking"]
        quantize = record["config"]["run"].get("quantize", "none")  # runs before there was the choice
        samples, keywords, encoder = pretrain["samples"], pretrain["keywords"], pretrain.get("text_encoder", "auto")
    sample_config = from_plain(SampleConfig, samples, f"samples in {folder.record}")
    ranking_config = from_plain(RankingConfig, ranking, f"ranking in {folder.record}")
    items = read_item_ids(adapter)
    tokenizer = load_tokenizer(folder.backbone)
    base = load_backbone(folder.backbone, tokenizer, quantize, device)
    model = load_adapter(base, adapter).to(device).eval()
    if new_items:
        keyword_config = from_plain(KeywordConfig, keywords, f"keywords in {folder.record}")
        texts = NewTexts(folder.backbone / TEXT_FOLDER / PROJECTION_FILE, encoder, keyword_config)
        tokenizer, items = add_items(model, tokenizer, items, items.catalogue or domain, new_items, texts)
    with damage_names(adapter / ITEM_FILE):
        item_ids = checked_ids(items, len(tokenizer))
        task = catalogue_task(items.catalogue or domain, item_ids, tokenizer, sample_config)
    with model.disable_adapter():  # the student, whose prior counts for every client
        task = with_prior(task, model, ranking_config.prior_weight, device)
    private = folder.private / domain
    kept = load_memory(private, items.keys) if memory and not new_items and private.is_dir() else None
    return Loaded(
        model=model,
        task=task,
        items=items,
        alpha_share=_alpha_share(folder, domain),
        num_beams=ranking_config.num_beams,
        length_penalty=ranking_config.length_penalty,
        memory=kept,
        scores=model_scores(model, task, ranking_config, "fp32", device),
    )


def checked_ids(items: ItemTable, num_tokens: int) -> ItemIds:
    """The item IDs of a hand-over. ``ValueError`` when one of them has a token that the tokenizer does not have."""
    largest = max(token for tokens in items.token_ids for token in tokens)
    if largest >= num_tokens:
        raise ValueError(f"token {largest} of a tokenizer with {num_tokens} tokens")
    return ItemIds(list(items.id_texts), [list(tokens) for tokens in items.token_ids], {})


def recommend(loaded: Loaded, history: Sequence[str], k: int = 10, drop_seen: bool = True) -> list[Recommendation]:
    """The k best next items for a reading history of titles or item keys, oldest first.

    A memory leaves out seen items whatever ``drop_seen`` is.

    Raises:
        ValueError: no title, an unknown one, or k below 1.
    """
    if k < 1:
        raise ValueError(f"got k {k}, expected at least 1")
    if not history:
        raise ValueError('got an empty history, expected titles or item keys, oldest first: "title A | title B"')
    seen = [find_item(loaded.items, entry) for entry in history]
    if loaded.memory is not None:
        return _with_memory(loaded, loaded.memory, seen, k)
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


def _with_memory(loaded: Loaded, memory: Memory, seen: Sequence[int], k: int) -> list[Recommendation]:
    (ranked,) = rank(memory, new_contexts([seen]), loaded.scores)
    found = zip(ranked.item_BM[0].tolist(), ranked.prob_BM[0].tolist(), strict=True)
    best = sorted((-prob, item) for item, prob in found if prob > 0.0)[:k]
    keys, titles = loaded.items.keys, loaded.items.titles
    return [Recommendation(keys[item], titles[item], math.log(-negative)) for negative, item in best]


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
    metrics, content = read_object(folder.metrics), read_object(folder.fusion_weights)
    with damage_names(folder.metrics):
        best = int(metrics["best_round"])
    with damage_names(folder.fusion_weights):
        names = [str(name) for name in content["domains"]]
        alpha_K = content["alpha"][content["rounds"].index(best)][names.index(domain)]
        total = sum(map(abs, alpha_K)) or 1.0
        shares = {name: abs(alpha) / total for name, alpha in zip(names, alpha_K, strict=True)}
        if not math.isfinite(total):
            raise ValueError("weights that are no finite numbers")
    return shares
