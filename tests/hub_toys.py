"""A hub that is a folder of this machine, in the layout of the local cache of huggingface_hub."""

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub


class FolderHub:
    """What `push_to_hub` asks of an HfApi: uploads go straight into the cache, from which names are read offline."""

    def __init__(self, cache: Path, monkeypatch) -> None:
        self.cache, self.repositories = cache, {}
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))

    def create_repo(self, repo_id, *, repo_type, private, exist_ok):
        assert repo_type == "model"
        assert exist_ok or repo_id not in self.repositories
        self.repositories.setdefault(repo_id, SimpleNamespace(private=private))

    def model_info(self, repo_id):
        return self.repositories[repo_id]

    def upload_folder(self, *, repo_id, folder_path, repo_type, commit_message):
        assert repo_id in self.repositories
        assert commit_message
        commit = hashlib.sha1(repo_id.encode()).hexdigest()
        place = self.cache / f"models--{repo_id.replace('/', '--')}"
        shutil.copytree(folder_path, place / "snapshots" / commit)
        (place / "refs").mkdir()
        (place / "refs" / "main").write_text(commit)
        return SimpleNamespace(oid=commit)
