"""A company's adapter trained on from where it is, by its own events alone: files in, files out.

The adapter of a export is one LoRA pair a layer, directions of others folded in with their weights. All of it is
trained, by the run's settings of local training, for as many epochs as are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from fedecider.bounds import Diverged
from fedecider.cross_silo.settings import Settings
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import held_out, histories
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.method import Tree
from fedecider.methods.client_models import ClientModels, client_models
from fedecider.methods.local_training import train_locally
from fedecider.models.adapters import attach_lora
from fedecider.models.client_model import Base
from fedecider.models.config import LoraSettings
from fedecider.models.ensemble import Ensemble, ModelScores, positions
from fedecider.models.export import save_peft_folder
from fedecider.models.folders import read_inference_config, write_inference_config
from fedecider.models.item_table import CONFIG_FILE, WEIGHTS_FILE, read_item_ids, write_items
from fedecider.models.later_rows import folded, with_rows, with_zeros
from fedecider.models.loaded import adapted
from fedecider.models.source import Place, Source
from fedecider.models.tied_table import HEAD, adapted_embeddings
from idgen.backbone import load_backbone
from idgen.backbones.families import family_of
from idgen.events import event_table
from idgen.item_ids import ItemIds
from idgen.ranking import RankingContext
from idgen.tasks import catalogue_task
from idgen.tokenizer import load_tokenizer

CARD = "README.md"


class Scores(NamedTuple):
    """How an ensemble beside a model ranks what is held out."""

    hit: float
    """hit@10."""
    ndcg: float
    """ndcg@10."""


def train_on(
    place: Place,
    sequences: SequenceArray,
    settings: Settings,
    epochs: int,
    device: torch.device,
    folder: Path,
    before: Callable[[ClientModels, Tree], Tree] | None = None,
) -> None:
    """Train the adapter of ``place`` on every event of ``sequences`` behind those before it; written into ``folder``.

    ``before``: another training that comes first.

    Raises:
        ValueError: the run hides single users, whose guarantee another training would break.
        Diverged: the training did.
    """
    if settings.training.user_privacy.on:
        raise ValueError(
            "got a run with user_privacy, expected one without: training on would spend more than the epsilon that "
            "was said. Leave --epochs out, or run the federation again"
        )
    table, asked = read_item_ids(place.adapter), read_inference_config(place.adapter)
    tokenizer = load_tokenizer(place.backbone)
    backbone = load_backbone(place.backbone, tokenizer, asked.quantize, device)
    tokenizer = with_rows(backbone, tokenizer, place.adapter, table)
    model = attach_lora(backbone, _lora_of(place.adapter))
    ids = ItemIds(list(table.id_texts), [list(tokens) for tokens in table.token_ids], {})
    samples = replace(asked.samples, synthetic_share=0.0)  # synthetic histories are for what no customer has shown yet
    task = catalogue_task(table.catalogue or place.domain, ids, tokenizer, samples)
    base = Base(
        model,
        tokenizer,
        RankingContext(asked.ranking, device=device),
        checkpointing=settings.run.recomputes_activations,
    )
    tasks = [task._replace(name=place.domain, train=event_table(sequences, False), sequences=sequences)]
    models = client_models(base, tasks, replace(settings.training, local_epochs=epochs), settings.run.seed)
    start = with_zeros(_factors(place.adapter), place.adapter)
    trained = train_locally(models, 0, 1, start if before is None else before(models, start))
    if not trained.finite:
        raise Diverged(str(trained.log.get("diverged", "weights that are no finite numbers")))
    folder.mkdir()
    base_name = json.loads((place.adapter / CONFIG_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"]
    tables = adapted_embeddings(model.get_base_model())
    pair = folded(trained.pair, place.adapter, folder, bool(tables))
    save_peft_folder(pair, folder, base_name, family_of(model).task_type, tables)
    write_items(folder, table, task.trie.eos_token_id)
    told = f"trained on by {len(sequences):,} customers after that; the figures are those from before"
    write_inference_config(asked, folder)
    if (place.adapter / CARD).is_file():
        card = (place.adapter / CARD).read_text(encoding="utf-8")
        note = f"\n\nThe adapter was {told}.\n"
        (folder / CARD).write_text(card.removesuffix(note) + note if note in card else card + note, encoding="utf-8")


def loaded_scores(source: Source, place: Place, device: torch.device) -> ModelScores:
    """What an ensemble asks of the model of ``place``, as it is loaded to be asked."""
    tokenizer = load_tokenizer(place.backbone)
    base = load_backbone(place.backbone, tokenizer, place.inference.quantize, device)
    return adapted(base, tokenizer, source, place, read_item_ids(place.adapter), device, False).scores


def ranked_by(
    source: Source, place: Place, ensemble: Ensemble, sequences: SequenceArray, device: torch.device
) -> Scores:
    """How ``ensemble`` beside the adapter of ``place`` ranks the last basket of every row behind those before it."""
    assert ensemble.beside_model is not None
    asked = (histories(sequences, "test"), held_out(sequences, "test"), loaded_scores(source, place, device))
    with torch.no_grad():
        (places,) = positions(ensemble.knowledge, *asked, [ensemble.beside_model], place.inference.drop_seen)
    means = mean_metrics(places.whole)
    return Scores(means["hit@10"], means["ndcg@10"])


def _factors(adapter: Path) -> Tree:
    """The pairs of an adapter's file, as `fedecider.models.export.save_peft_folder` writes them."""
    start, names = "base_model.model.", {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
    return {
        key.removeprefix(start).removesuffix(end) + ours: tensor
        for key, tensor in load_file(adapter / WEIGHTS_FILE).items()
        for end, ours in names.items()
        if key.endswith(end)
    }


def _lora_of(adapter: Path) -> LoraSettings:
    """Which layers of a backbone have an adapter there; the output stands for the table where that is adapted too."""
    state = load_file(adapter / WEIGHTS_FILE)
    has_table = any(key.endswith("lora_embedding_A") for key in state)
    factors = _factors(adapter)
    ends = {name.rsplit(".", 2)[-2] for name in factors}
    if has_table:
        ends = (ends - {HEAD}) | {"table"}
    rank = next(tensor.shape[0] for name, tensor in factors.items() if name.endswith("lora_a"))
    return LoraSettings(rank, tuple(sorted(ends)))
