"""A recommender in a folder that stands for itself, in the layout of model hubs, and its way to a hub.

``adapter_config.json``, ``adapter_model.safetensors``, ``item_ids.json``, ``recommender.json`` and ``README.md`` (the
card) lie in the folder itself, the backbone in ``backbone/``; ``handover.json`` has the checksums. The client's private
memory is left out unless it is asked for by name; then it lies in ``memory/``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedecider.llm.item_texts import PROJECTION_FILE
from fedecider.llm.manifest import MANIFEST_FILE, write_manifest
from fedecider.llm.new_items import TEXT_FOLDER
from fedecider.llm.pretrained_folder import (
    ADAPTER_FILES,
    BACKBONE_FOLDER,
    HUB_NAME,
    MEMORY_FOLDER,
    Place,
    verify_place,
)
from fedecider.llm.prompt_layout import prompt_layout
from fedecider.llm.recipe import RECIPE_FILE, write_recipe
from fedecider.llm.run_facts import data_lines, privacy_lines
from fedecider.lora.card import INNER_BACKBONE, Card, model_card
from fedecider.lora.item_table import CONFIG_FILE, ITEM_FILE, WEIGHTS_FILE, read_item_ids
from fedecider.memory.store import SETTINGS_FILE, TENSOR_FILE, load_memory
from fedecider.running.damage import damage_names
from fedecider.running.run_folder import RunFolder, check_output
from idgen.samples import Task

CARD_FILE = "README.md"
MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES: tuple[str, ...] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
TOKENIZER_FILES += ("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model")
"""Of a backbone's folder nothing else is copied."""
OWN_FILES = (*ADAPTER_FILES, CARD_FILE, MANIFEST_FILE, f"{BACKBONE_FOLDER}/*", f"{MEMORY_FOLDER}/*")
"""What an upload puts into a repository, and what of an earlier one it takes out."""
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

    ``run``: the run that the recommender is of, if it is of one. ``titles``: examples for its program.
    ``published_name``: the name under which hubs will know the folder, which its card gives as the place of the
    backbone. It is written beside its place and renamed at the end, so a part of it never appears under its name.

    Raises:
        ValueError: ``folder`` is not empty or nothing may be written there, a memory is wanted where there is none, a
            name is none of a hub, or a file was changed after it was loaded.
    """
    _check(folder, place, include_memory, backbone_name)
    folder = folder.resolve()
    verify_place(place, run)  # else the checksums of the new folder would be those of other files than were loaded
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
        write_recipe(place.recipe, scratch)
        table = read_item_ids(scratch)
        parts = [scratch / name for name in ADAPTER_FILES]
        if not backbone_name:
            parts.append(_copied(place.backbone, scratch / BACKBONE_FOLDER))
        if include_memory and place.memory is not None:
            load_memory(place.memory, table.keys)  # it may have been changed too
            (scratch / MEMORY_FOLDER).mkdir(mode=0o700)
            for name in (SETTINGS_FILE, TENSOR_FILE):
                shutil.copyfile(place.memory / name, scratch / MEMORY_FOLDER / name)
                (scratch / MEMORY_FOLDER / name).chmod(0o600)
            parts.append(scratch / MEMORY_FOLDER)
        with damage_names(place.adapter / RECIPE_FILE):
            card = _card(place, model, task, include_memory, license)
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
    Files of an earlier upload that the folder does not have are removed; the history of the repository keeps them.

    Raises:
        ValueError: no name of a hub, a memory for a repository that is not private, or ``private`` and the repository
            is there and public.
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
        if private and not api.model_info(repo_id).private:  # it was there already
            public = f"got the public {repo_id}, expected a private one. Make it private, or name private=False"
            raise ValueError(refusal if include_memory else public)
        named = {"repo_id": repo_id, "repo_type": "model", "commit_message": message}
        return api.upload_folder(folder_path=folder, delete_patterns=list(OWN_FILES), **named)


def _check(folder: Path, place: Place, include_memory: bool, backbone_name: str) -> None:
    check_output(folder)
    if folder.resolve() == Path.cwd():
        raise ValueError(f"got the folder {folder}, where the program works, expected a new one. Name one inside it")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"got the folder {folder}, which is not empty, expected a new one. Choose another name")
    if include_memory and place.memory is None:
        raise ValueError(
            f"got include_memory for {place.domain}, which has no memory, expected one. Leave include_memory out"
        )
    if backbone_name and not HUB_NAME.fullmatch(backbone_name):
        raise ValueError(f"got the backbone_name {backbone_name!r}, expected a name of the hub such as someone/books")


def _copied(backbone: Path, target: Path) -> Path:
    """The files of a backbone that are read, with what gives later items their place; returns ``target``."""
    target.mkdir()
    for pattern in (*MODEL_FILES, *TOKENIZER_FILES):
        for path in sorted(backbone.glob(pattern)):
            shutil.copyfile(path, target / path.name)
    projection = Path(TEXT_FOLDER) / PROJECTION_FILE
    if (backbone / projection).is_file():
        (target / TEXT_FOLDER).mkdir()
        shutil.copyfile(backbone / projection, target / projection)
    return target


def _card(place: Place, model: Any, task: Task, include_memory: bool, license: str) -> Card:
    domain, recipe, facts = place.domain, place.recipe, place.recipe.facts
    details: dict[str, Any] = {name: facts[name] for name in ("round", "lora_rank", "seed")}
    if recipe.quantize != "none":
        details["base while training and measuring"] = recipe.quantize
    return Card(
        method=facts["method"],
        domain=domain,
        prompt=prompt_layout(task, recipe.ranking, model, task.name),
        alpha=recipe.alpha,
        metrics=facts["export"] or {},
        protocol=_protocol(facts),
        license=license,
        details=details,
        intervals=facts["rows"],
        data=data_lines(facts["data"]) if facts["data"] else (),
        privacy=privacy_lines(facts, domain, include_memory),
    )


def _protocol(facts: Mapping[str, Any]) -> str:
    text = f"{facts['protocol']}; {facts['num_users']} users of the client"
    if facts["export"]:
        text += ". The adapter was cut down to a lower rank: the second table is of what is in this folder"
    return text + ". Rows with a memory need the client's private memory."
