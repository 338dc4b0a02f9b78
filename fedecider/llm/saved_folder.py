"""A recommender in a folder that stands for itself, in the layout of model hubs, and its way to a hub.

``adapter_config.json``, ``adapter_model.safetensors``, ``item_ids.json``, ``recommender.json`` and ``README.md`` (the
card) lie in the folder itself, the backbone in ``backbone/``; ``handover.json`` has the checksums. The client's private
memory is left out unless it is asked for by name; then it lies in ``memory/``.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedecider.llm.manifest import write_manifest
from fedecider.llm.pretrained_folder import (
    ADAPTER_FILES,
    BACKBONE_FOLDER,
    HUB_NAME,
    MEMORY_FOLDER,
    READ_FILES,
    Place,
)
from fedecider.llm.prompt_layout import prompt_layout
from fedecider.llm.recipe import RECIPE_FILE, write_recipe
from fedecider.llm.run_facts import data_lines, privacy_lines, run_facts
from fedecider.lora.card import INNER_BACKBONE, Card, model_card
from fedecider.lora.export import CONFIG_FILE, ITEM_FILE, WEIGHTS_FILE
from fedecider.memory.store import SETTINGS_FILE, TENSOR_FILE
from fedecider.running.damage import damage_names
from fedecider.running.run_folder import RunFolder, check_output
from idgen.samples import Task

CARD_FILE = "README.md"
assert INNER_BACKBONE == BACKBONE_FOLDER


def save_folder(
    place: Place,
    run: RunFolder | None,
    model: Any,
    task: Task,
    titles: tuple[str, ...],
    folder: Path,
    *,
    include_memory: bool,
    backbone_name: str,
    published_name: str,
    license: str,
) -> Path:
    """Write a folder that `fedecider.llm.recommender.Recommender.from_pretrained` reads; returns it.

    ``run``: where the facts of the card are, if the recommender is of a run. ``titles``: examples for its program.
    ``published_name``: the name under which hubs will know the folder, which its card gives as the place of the
    backbone. It is written beside its place and renamed at the end, so a part of it never appears under its name.

    Raises:
        ValueError: ``folder`` is not empty or nothing may be written there, a memory is wanted where there is none, or
            a name is none of a hub.
    """
    _check(folder, place, include_memory, backbone_name)
    facts = place.recipe.facts or (run_facts(run, place.domain) if run is not None else {})
    base = backbone_name or INNER_BACKBONE
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        for name in (WEIGHTS_FILE, ITEM_FILE):
            shutil.copyfile(place.adapter / name, scratch / name)
        config = json.loads((place.adapter / CONFIG_FILE).read_text(encoding="utf-8"))
        text = json.dumps({**config, "base_model_name_or_path": base}, indent=2, sort_keys=True)
        (scratch / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        write_recipe(place.recipe._replace(facts=facts), scratch)
        parts = [scratch / name for name in ADAPTER_FILES]
        if not backbone_name:
            parts.append(_copied(place.backbone, scratch / BACKBONE_FOLDER))
        if include_memory and place.memory is not None:
            (scratch / MEMORY_FOLDER).mkdir()
            for name in (SETTINGS_FILE, TENSOR_FILE):
                shutil.copyfile(place.memory / name, scratch / MEMORY_FOLDER / name)
            parts.append(scratch / MEMORY_FOLDER)
        with damage_names(place.adapter / RECIPE_FILE if run is None else run.metrics):
            card = _card(place, facts, model, task, include_memory, license)
            text = model_card(card, base, titles, backbone_name or published_name)
        (scratch / CARD_FILE).write_text(text, encoding="utf-8")
        write_manifest(scratch, parts)
        if folder.exists():
            folder.rmdir()
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def push_folder(save: Any, api: Any, repo_id: str, private: bool, include_memory: bool, message: str) -> Any:
    """Write a folder with ``save(folder)`` and upload it; returns what ``api.upload_folder`` does.

    ``api``: an ``HfApi`` of huggingface_hub, or what has its ``create_repo``, ``model_info`` and ``upload_folder``.

    Raises:
        ValueError: no name of a hub, or a memory for a repository that is not private.
    """
    refusal = (
        f"got include_memory for the public {repo_id}, expected a private one: a memory holds counts of real users"
    )
    if not HUB_NAME.fullmatch(repo_id):
        raise ValueError(f"got the hub name {repo_id!r}, expected one such as someone/books")
    if include_memory and not private:
        raise ValueError(refusal)
    with tempfile.TemporaryDirectory() as place:
        folder = save(Path(place) / "model")
        api.create_repo(repo_id, repo_type="model", private=private, exist_ok=True)
        if include_memory and not api.model_info(repo_id).private:  # it was there already
            raise ValueError(refusal)
        return api.upload_folder(repo_id=repo_id, folder_path=folder, repo_type="model", commit_message=message)


def _check(folder: Path, place: Place, include_memory: bool, backbone_name: str) -> None:
    check_output(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"got the folder {folder}, which is not empty, expected a new one. Choose another name")
    if include_memory and place.memory is None:
        raise ValueError(
            f"got include_memory for {place.domain}, which has no memory, expected one. Leave include_memory out"
        )
    if backbone_name and not HUB_NAME.fullmatch(backbone_name):
        raise ValueError(f"got the backbone_name {backbone_name!r}, expected a name of the hub such as someone/books")


def _copied(backbone: Path, target: Path) -> Path:
    """The files of a backbone that are read, with those of the texts of its items."""

    def others(folder: str, names: list[str]) -> list[str]:
        wanted = {name for pattern in READ_FILES for name in fnmatch.filter(names, pattern)}
        return [n for n in names if n.startswith(".") or (n not in wanted and not (Path(folder) / n).is_dir())]

    return Path(shutil.copytree(backbone, target, ignore=others))


def _card(place: Place, facts: Mapping[str, Any], model: Any, task: Task, include_memory: bool, license: str) -> Card:
    domain, recipe = place.domain, place.recipe
    privacy = privacy_lines(facts, domain, include_memory) if facts else []
    details: dict[str, Any] = {name: facts[name] for name in ("round", "lora_rank", "seed") if name in facts}
    if recipe.quantize != "none":
        details["base while training and measuring"] = recipe.quantize
    return Card(
        method=facts.get("method", "fedecider"),
        domain=domain,
        prompt=prompt_layout(task, recipe.ranking, model, task.name),
        alpha=recipe.alpha,
        metrics=facts.get("export") or {},
        protocol=_protocol(facts),
        license=license,
        details=details,
        intervals=facts.get("rows", {}),
        data=data_lines(facts["data"]) if facts.get("data") else (),
        privacy=privacy,
    )


def _protocol(facts: Mapping[str, Any]) -> str:
    if not facts:
        return "Nothing is known of how it was measured."
    text = f"{facts['protocol']}; {facts['num_users']} users of the client"
    if facts["export"]:
        text += ". The adapter was cut down to a lower rank: the second table is of what is in this folder"
    return text + ". Rows with a memory need the client's private memory."
