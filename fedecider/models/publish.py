"""The way of an exported folder to a model hub: which base its adapters name, where hubs look for it, the upload."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedecider.models.item_table import CONFIG_FILE
from fedecider.models.source import ADAPTER_FILES, BACKBONE_FOLDER, HUB_NAME
from fedecider.running.manifest import MANIFEST_FILE

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
OWN_FILES = (*ADAPTER_FILES, *MODEL_FILES, *TOKENIZER_FILES, CARD_FILE, MANIFEST_FILE)
OWN_FILES += (f"{BACKBONE_FOLDER}/*", "ensemble/*", "adapters/*")
"""What an upload puts into a repository, and what of an earlier one it takes out."""


def name_base(folder: Path, name: str) -> None:
    """Let the adapters of a copy of a run name ``name`` as their base, in place of the folder beside them."""
    adapters = [path for path in sorted((folder / "adapters").iterdir()) if (path / CONFIG_FILE).is_file()]
    for adapter in adapters:
        config = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8"))
        text = json.dumps({**config, "base_model_name_or_path": name}, indent=2, sort_keys=True)
        (adapter / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def put_in_front(folder: Path) -> None:
    """Put the files of ``backbone/`` into the folder itself too, where peft and transformers look for the base of an
    adapter that names this repository. A hub, and its local cache, keep both as one file."""
    for pattern in (*MODEL_FILES, *TOKENIZER_FILES):
        for path in sorted((folder / BACKBONE_FOLDER).glob(pattern)):
            shutil.copyfile(path, folder / path.name)


def push_folder(save: Callable[[Path], Path], api: Any, repo_id: str, private: bool, message: str) -> Any:
    """Write a folder with ``save(folder)`` and upload it; returns what ``api.upload_folder`` does.

    ``api``: an ``HfApi`` of huggingface_hub, or what has its ``create_repo``, ``model_info`` and ``upload_folder``.
    Files of an earlier upload that the folder does not have are removed; the history of the repository keeps them.

    Raises:
        ValueError: no name of a hub, or ``private`` and the repository is there and public.
    """
    if not HUB_NAME.fullmatch(repo_id):
        raise ValueError(f"got the hub name {repo_id!r}, expected one such as someone/books")
    with tempfile.TemporaryDirectory() as place:
        folder = save(Path(place) / "model")
        api.create_repo(repo_id, repo_type="model", private=private, exist_ok=True)
        if private and not api.model_info(repo_id).private:  # it was there already
            raise ValueError(
                f"got the public {repo_id}, expected a private one. Make it private, or name private=False"
            )
        named = {"repo_id": repo_id, "repo_type": "model", "commit_message": message}
        return api.upload_folder(folder_path=folder, delete_patterns=list(OWN_FILES), **named)
