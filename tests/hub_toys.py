"""A hub that is a folder of this machine, in the layout of the local cache of huggingface_hub."""

import hashlib
import shutil
from fnmatch import fnmatch
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

    def upload_folder(self, *, repo_id, folder_path, repo_type, commit_message, delete_patterns=()):
        """Files beside those of ``folder_path`` stay, but those that a pattern names."""
        assert repo_id in self.repositories
        assert commit_message
        commit = hashlib.sha1(repo_id.encode()).hexdigest()
        place = self.cache / f"models--{repo_id.replace('/', '--')}"
        snapshot = place / "snapshots" / commit
        for path in [path for path in snapshot.rglob("*") if path.is_file()]:
            if any(fnmatch(path.relative_to(snapshot).as_posix(), pattern) for pattern in delete_patterns):
                path.unlink()
        for path in sorted(snapshot.rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()  # git knows files alone
        shutil.copytree(folder_path, snapshot, dirs_exist_ok=True)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(commit)
        return SimpleNamespace(oid=commit)
