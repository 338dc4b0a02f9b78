"""The code blocks of docs/new_method.md, made to exist as the files that their headings name."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parents[1] / "docs" / "new_method.md"


def blocks(language: str) -> dict[str, str]:
    """File named by a heading -> the one block of this language below it."""
    sections = re.split(r"^#+ ", PAGE.read_text(), flags=re.M)
    named = [(re.match(r"\d\. .*: `([^`]+)`\n", section), section) for section in sections]
    found = {}
    for heading, section in named:
        code = re.findall(rf"^```{language}\n(.*?)^```$", section, flags=re.M | re.S)
        if heading and code:
            (found[heading.group(1)],) = code
    return found


def install(monkeypatch, folder: Path, path: str) -> ModuleType:
    """The module of the file ``path``, written below ``folder`` from its block, and importable until the test ends."""
    name = path.removesuffix(".py").replace("/", ".")
    package = importlib.import_module(name.rpartition(".")[0])
    file = folder / path
    file.parent.mkdir(parents=True)
    file.write_text(blocks("python")[path])
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(file.parent)])
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]  # remembered as absent, so that it leaves with the test
    monkeypatch.setattr(package, file.stem, None, raising=False)
    return importlib.import_module(name)


def documented_entry(path: str, name: str) -> object:
    """What the block of the package ``path`` puts into ``METHODS`` under ``name``; ``...`` stands for the others."""
    package = importlib.import_module(path.removesuffix("/__init__.py").replace("/", "."))
    code = blocks("python")[path]
    assert "    ...\n" in code
    scope = {**vars(package), "PRESENT": package.METHODS}
    exec(compile(code.replace("    ...\n", "    **PRESENT,\n"), path, "exec"), scope)
    assert set(scope["METHODS"]) == {*package.METHODS, name}
    return scope["METHODS"][name]


def run_tests(path: str) -> int:
    """Run every test of the block of a test file; how many there were."""
    scope: dict = {"__name__": Path(path).stem}
    exec(compile(blocks("python")[path], path, "exec"), scope)
    tests = [value for name, value in scope.items() if name.startswith("test_")]
    for test in tests:
        test()
    return len(tests)
