"""Packages from outside: the example of this repository, and invented ones that are in some way out of order."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from embedding_fr.methods import METHODS as EMBEDDING
from fedecider.federation.registry import outside_methods
from fedecider.methods import METHODS as LLM

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLE = REPOSITORY / "examples" / "fedecider-interpolated"


def install_example(folder: Path) -> Path:
    """``folder/site`` with the example package as pip installs it; nothing is fetched, and nothing else changes."""
    source, site = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    words = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(site), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", "install", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


def write_package(
    site: Path,
    name: str,
    module: str = "",
    llm: Mapping[str, str] = {},
    embedding: Mapping[str, str] = {},
    baselines: Mapping[str, str] = {},
) -> None:
    """An installed distribution of version 1.0 with entry points ``name -> module:attribute`` and one module."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    groups = {"fedecider.methods": llm, "fedecider.embedding_methods": embedding, "fedecider.baselines": baselines}
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
    (site / f"{name.replace('-', '_')}.py").write_text(module)


def look_again(folder: Path) -> None:
    """Forget what was found and what was imported from below ``folder``, as a new process would."""
    outside_methods.cache_clear()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
    for registry in (LLM, EMBEDDING):
        registry._loaded.clear()


def use(monkeypatch, site: Path) -> None:
    """Let this process find the packages in ``site`` until the test ends, which then calls :func:`look_again`."""
    monkeypatch.syspath_prepend(str(site))
    look_again(site)
