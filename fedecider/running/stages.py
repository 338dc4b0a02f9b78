"""Stages of the pipeline, cached by the content of their inputs: settings, data and models, but not our code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.federation.checksums import SUMS_FILE, check_sums, write_sums

FORMAT = 1
"""Raise it when the same settings begin to give another result, so that older stages are not reused."""


class Stage(NamedTuple):
    """A finished stage: its folder, and whether it was found instead of built."""

    folder: Path
    reused: bool


def content_key(inputs: Any) -> str:
    """16 hex digits that depend on every value in ``inputs`` (dataclasses, dicts, lists, scalars)."""
    text = json.dumps(as_plain(inputs), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_plain(value: Any) -> Any:
    """Configs as nested dicts, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): as_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def cached_stage(cache: Path, name: str, inputs: dict[str, Any], build: Callable[[Path], None]) -> Stage:
    """``cache/<name>-<key>``, built by ``build(folder)`` unless it is there already.

    ``build`` fills a scratch folder that is renamed when it returns, so a killed build leaves nothing that could be
    mistaken for a result. ``inputs.json`` in the folder says what the key stands for. A folder without it, or without
    checksums, was made by nobody or by an older version and is replaced. Every reuse compares the SHA-256 sums of all
    files: one to three seconds per gigabyte, so less than one for a t5-small.

    Raises:
        ValueError: a file of the stage is not the one that was written.
    """
    folder = cache / f"{name}-{_key(inputs)}"
    if _is_complete(folder):
        _check(folder)
        return Stage(folder, True)
    scratch = cache / f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    scratch.mkdir(parents=True)
    try:
        build(scratch)
        noted = as_plain({"format": FORMAT, **inputs})
        (scratch / "inputs.json").write_text(json.dumps(noted, indent=1, default=str) + "\n")
        write_sums(scratch)
        _put(scratch, folder)
        shutil.rmtree(begun_folder(cache, name, inputs), ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Stage(folder, False)


def begun_folder(cache: Path, name: str, inputs: dict[str, Any]) -> Path:
    """Where a build of `cached_stage` may leave what the next build of the same stage goes on with after a kill.

    Whoever writes into it makes it. It is removed when the stage is there.
    """
    return cache / f".{name}-{_key(inputs)}.begun"


def _key(inputs: dict[str, Any]) -> str:
    return content_key({"format": FORMAT, **inputs})


def _is_complete(folder: Path) -> bool:
    return (folder / "inputs.json").is_file() and (folder / SUMS_FILE).is_file()


def _check(folder: Path) -> None:
    try:
        check_sums(folder)
    except ValueError as error:
        raise ValueError(f"{error}. Remove the folder {folder}, and the stage is built again") from error


def _put(scratch: Path, folder: Path) -> None:
    """Give ``scratch`` its name, unless another run was faster; what is incomplete makes room."""
    try:
        os.replace(scratch, folder)
    except OSError:
        if _is_complete(folder):
            _check(folder)
            return
        doomed = scratch.with_suffix(".old")
        os.replace(folder, doomed)
        os.replace(scratch, folder)
        shutil.rmtree(doomed)


def file_digest(folder: Path) -> str:
    """Digest over names and bytes of every file below ``folder`` (a model given as a local path)."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(folder)).encode())
        with path.open("rb") as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
    return digest.hexdigest()[:16]
