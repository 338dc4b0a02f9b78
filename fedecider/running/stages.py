"""Stages of the pipeline, cached by the content of their inputs: settings, data and models, but not our code."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.federation.checksums import SUMS_FILE, check_sums, write_sums
from fedecider.running.plain import as_plain, content_key
from fedecider.running.run_folder import check_output
from fedecider.scratch import aside, remove, scratch_name

FORMAT = 2
"""Raise it when the same settings begin to give another result, so that older stages are not reused."""


class Stage(NamedTuple):
    """A finished stage: its folder, and whether it was found instead of built."""

    folder: Path
    reused: bool


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
    check_output(cache)
    with aside(folder, put=_put) as scratch:
        scratch.mkdir(parents=True)
        build(scratch)
        noted = as_plain({"format": FORMAT, **inputs})
        (scratch / "inputs.json").write_text(json.dumps(noted, indent=1, default=str) + "\n")
        write_sums(scratch)
    remove(begun_folder(cache, name, inputs))
    return Stage(folder, False)


def only_stage(cache: Path, name: str) -> Stage:
    """The one stage ``name`` in the cache of a project: its key may name folders that this machine does not have.

    Raises:
        ValueError: there is none, or there are several.
    """
    found = sorted(cache.glob(f"{name}-*"))
    if len(found) != 1:
        raise ValueError(f"got {len(found)} stages {name} in {cache}, expected one: copy the project anew")
    return Stage(found[0], True)


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
        doomed = scratch_name(folder)
        os.replace(folder, doomed)
        os.replace(scratch, folder)
        remove(doomed)


def file_digest(folder: Path) -> str:
    """Digest over names and bytes of every file below ``folder`` (a model given as a local path)."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(folder)).encode())
        with path.open("rb") as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                digest.update(chunk)
    return digest.hexdigest()[:16]
