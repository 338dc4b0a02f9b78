"""What is installed, which devices and data are there, what is missing and how to get it: fedecider doctor."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Table

from fedecider.engine.track import taken_name, tracks
from fedecider.running.command import run

DESCRIPTION = "Say what is installed, which devices and data are there, what is missing and how to get it."
EXTRAS = {
    "deploy": "runs between machines on NVIDIA FLARE",
    "dp": "guarantees of integer sums and of Laplace noise",
    "track": "settings, curves and results in TensorBoard, MLflow, W&B and trackio",
    "tune": "settings drawn by compare and leaderboard",
    "gpu": "quantised bases and DeepSpeed",
    "serve": "a finished run as an HTTP service",
}
"""Extra -> what it is for."""


class Finding(NamedTuple):
    what: str
    found: str
    missing: str = ""
    """What to do about it; empty where all is well."""
    needed: bool = False
    """Whether nothing works without it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 where something that is needed is missing."""

    def work() -> None:
        parser = argparse.ArgumentParser(prog="fedecider doctor", description=DESCRIPTION, exit_on_error=False)
        _, unknown = parser.parse_known_args(argv)
        if unknown:
            raise ValueError(f"got {unknown[0]}, expected no options")
        findings = list(examined())
        table = Table(show_edge=False, show_header=False)
        for one in findings:
            table.add_row(*map(escape, (one.what, one.found, one.missing)))
        from fedecider.running.progress import console

        console.print(table)
        broken = [f"{one.what}: {one.found}" for one in findings if one.needed and one.missing]
        if broken:
            raise ValueError(f"got {'; '.join(broken)}, expected what it needs: pip install .")

    return run(work)


def examined() -> Iterator[Finding]:
    """Everything that is looked at, in the order of the table."""
    yield Finding("fedecider", _version("fedecider") or "not installed, runs from its folder")
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    wanted = [Requirement(text) for text in requires("fedecider") or ()] if _version("fedecider") else []
    for one in wanted:
        if one.marker is None:
            yield _package(one, needed=True)
    yield from _devices()
    for extra, purpose in EXTRAS.items():
        packages = [one for one in wanted if one.marker is not None and one.marker.evaluate({"extra": extra})]
        lacking = [one.name for one in packages if _package(one).missing]
        found = f"lacks {', '.join(lacking)}" if lacking else "installed" if packages else "not known"
        yield Finding(f"extra {extra}", found, f"for {purpose}: pip install '.[{extra}]'" if lacking else "")
    yield from _methods()
    yield from _data()


def _package(wanted: Requirement, needed: bool = False) -> Finding:
    found = _version(wanted.name)
    if found is not None and wanted.specifier.contains(found, prereleases=True):
        return Finding(wanted.name, found)
    return Finding(wanted.name, found or "not installed", f"pip install '{wanted.name}{wanted.specifier}'", needed)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    import psutil
    import torch

    from idgen.precision import bf16_speedup, fastest, in_words

    gigabytes = psutil.virtual_memory().total / 1e9
    yield Finding("processor", f"{torch.get_num_threads()} threads, {gigabytes:.0f} GB of memory")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            yield Finding(f"cuda:{number}", torch.cuda.get_device_name(number))
    else:
        yield Finding("cuda", "none: everything runs on the processor")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    yield Finding("precision auto", f"{fastest(kind)}: bf16 is {in_words(bf16_speedup(kind))} than fp32 here")


def _methods() -> Iterator[Finding]:
    """Methods that installed packages bring, and why one of them cannot be used."""
    for track in tracks():
        if track.method_names == list(track.methods.built_in):
            continue  # what is built in takes seconds to import
        registry = track.methods
        for name in registry.outside:
            found = f"{registry.package(name)}, of {track.title}"
            yield Finding(f"method {name}", found, registry.problem(name) or taken_name(name))


def _data() -> Iterator[Finding]:
    from fedecider.data.interactions import data_root

    yield Finding("sample", "embedded: fedecider federate --domains crime,comics,children")
    root = data_root()
    sets = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    missing = "" if sets else "set FEDECIDER_DATA to the folder of the data sets you fetched (docs/data.md)"
    yield Finding("data sets", f"{', '.join(sets)}" if sets else "none found", missing)
    hub = "offline" if os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true") else "online"
    yield Finding("hugging face hub", hub)
    cache = Path(".cache")
    stages = sorted(path.name for path in cache.iterdir() if path.is_dir()) if cache.is_dir() else []
    yield Finding("kept stages here", f"{len(stages)} in {cache}" if stages else "none")
