"""What a run hands to the clients' recommenders: the backbone, an adapter with its card for each, its private part."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedecider.cross_silo.ended import Ended, Outcome
from fedecider.cross_silo.ensembles import KEPT, save_ensembles
from fedecider.cross_silo.prepare import BaseArtifacts
from fedecider.cross_silo.settings import Settings
from fedecider.data.catalogue import NewItem
from fedecider.data.constant_words import CARD
from fedecider.data.domain import Domain
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.models.export import Card, SavedBase, prompt_layout
from fedecider.models.folders import (
    InferenceConfig,
    inference_config_of_run,
    write_inference_config,
)
from fedecider.models.item_table import LOCAL_BACKBONE, ItemTable, read_item_ids
from fedecider.models.item_texts import (
    CODEBOOK_FILE,
    PROJECTION_FILE,
    encoded_catalogues,
    encoder_digest,
    save_projection,
)
from fedecider.models.new_items import (
    GENERATOR_FOLDER,
    TEXT_FOLDER,
    Later,
    encoded_items,
    save_unsold,
    takes_new_items,
)
from fedecider.models.source import Place
from fedecider.report.joining import KEPT_WORDS
from fedecider.running.progress import log_line
from fedecider.running.run_folder import RunFolder
from idgen.text_vectors import means_alone

BASES = {"none": "full precision", "nf4": "4 bits (nf4)", "int8": "8 bits (int8)"}
"""Format of the frozen layers -> the card's words for it."""


def export(run: Ended, outcome: Outcome, folder: RunFolder) -> None:
    """Write backbone and adapters in Hugging Face layout, each adapter reloaded and compared.

    Every client's private part of the ensemble goes into its own folder.
    """
    settings, artifacts = run.settings, run.artifacts
    if outcome.kept.ensembles is not None:
        save_ensembles(outcome.kept.ensembles, artifacts.domains, folder)
    shutil.rmtree(folder.backbone, ignore_errors=True)  # of an earlier export, perhaps with files of other origin
    shutil.copytree(artifacts.distilled.folder / "backbone", folder.backbone)
    _export_later_ids(settings, artifacts, folder.backbone)
    folder.adapters.mkdir(exist_ok=True)
    for name, domain in artifacts.domains.items():
        _export_client(run, outcome, name, domain, folder)
    _save_unsold(run, folder)


def _export_client(run: Ended, outcome: Outcome, name: str, domain: Domain, folder: RunFolder) -> None:
    settings, pretrain, model = run.settings, run.settings.run.pretrain, outcome.kept.model_of(name)
    items, catalogue = run.artifacts.ids[name].items, "" if domain.catalogue.name == name else domain.catalogue.name
    alpha = dict(outcome.added.get(name, {})) if outcome.keeps[name] == "joined" else {}
    test = outcome.result.figures[name]["test"]
    kept = test.get(KEPT, test[outcome.result.reported])
    model.save(
        folder.adapters / name,
        SavedBase(folder.backbone, LOCAL_BACKBONE),
        ItemTable(domain.own_keys, domain.titles, items.texts, items.token_ids, catalogue),
        Card(
            method=run.method.name,
            domain=name,
            prompt=prompt_layout(model.client.task, settings.ranking, domain.catalogue.name),
            alpha=alpha,
            metrics={metric: value["mean"] for metric, value in kept.items()},
            protocol=stamp(get_protocol(settings.run.protocol)),
            details=_details(run, outcome, name),
        ),
    )
    titles, encoder = pretrain.words.as_written, pretrain.text_encoder
    read = (pretrain.samples, settings.ranking, pretrain.ids, titles, encoder, settings.run.quantize)
    drop_seen = get_protocol(settings.run.protocol).drop_seen
    constant = domain.card.get(CARD, {})
    write_inference_config(InferenceConfig(name, *read, drop_seen, alpha, constant), folder.adapters / name)


def _save_unsold(run: Ended, folder: RunFolder) -> None:
    """What nobody has bought yet, with the vectors of its texts, into every company's private part of the ensemble."""
    encoded: dict[Sequence[NewItem], Later] = {}  # companies may share a catalogue
    said: dict[str, list[str]] = {}
    for name, domain in run.artifacts.domains.items():
        if not domain.unsold:
            continue
        adapter, private = folder.adapters / name, folder.private / name
        place = Place(name, adapter, folder.backbone, private, inference_config_of_run(folder, adapter))
        table, what = read_item_ids(adapter), f"{name} {len(domain.unsold):,}"
        why = takes_new_items(place, table)
        if not private.is_dir() or place.inference.ids == "generator":
            why = "expected an ensemble, and IDs that no ID generator writes"
        if why:
            said.setdefault(f"cannot be recommended ({why})", []).append(what)
            continue
        if domain.unsold not in encoded:
            encoded[domain.unsold] = encoded_items(place, table, domain.unsold)
        save_unsold(encoded[domain.unsold], private)
        said.setdefault("can be recommended as new items", []).append(what)
    for how, products in said.items():
        log_line(f"products that nobody has bought yet {how}: {', '.join(products)}")


def _details(run: Ended, outcome: Outcome, name: str) -> dict[str, Any]:
    """Further entries of the card's settings."""
    config, keeps, scale = run.settings.run, outcome.keeps[name], outcome.scales[name]
    details: dict[str, Any] = {
        "round": run.rounds.best_round,
        "lora_rank": config.lora_rank,
        "seed": config.seed,
        "base while training and measuring": BASES[config.quantize],
    }
    if keeps != "joined":
        details["model"] = KEPT_WORDS[keeps]
    elif scale != 1.0:
        details["share of the trained update"] = f"{scale:g}"
    if "table" in config.lora_settings.targets:
        details["merging"] = "only into a base whose output was given a table of its own: peft would merge it twice"
    return details


def _export_later_ids(settings: Settings, artifacts: BaseArtifacts, backbone: Path) -> None:
    """What gives items that come later their IDs, and their vectors in the table and in the ensemble."""
    made, texts, pretrain = artifacts.pretrained.folder, backbone / TEXT_FOLDER, settings.run.pretrain
    for path in (made / PROJECTION_FILE, made / CODEBOOK_FILE):
        if path.is_file():
            texts.mkdir(exist_ok=True)
            shutil.copy(path, texts)
    if settings.run.ensemble.kind != "none" and not (texts / PROJECTION_FILE).is_file():
        encoded = encoded_catalogues(artifacts.everyone, pretrain.text_encoder, settings.run.cache)
        texts.mkdir(exist_ok=True)
        save_projection(texts / PROJECTION_FILE, means_alone(encoded), encoder_digest(pretrain.text_encoder))
    if pretrain.ids == "generator":
        shutil.copytree(made / GENERATOR_FOLDER, backbone / GENERATOR_FOLDER)
