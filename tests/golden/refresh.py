"""What ``fedecider federate`` offers, written down: ``python tests/golden/refresh.py`` after an option has changed.

Writes ``tests/golden/federate_options.txt`` (name, default without a configuration, values; one option a line) and
``docs/settings.md`` (the same with help texts).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN, PAGE = REPOSITORY / "tests" / "golden" / "federate_options.txt", REPOSITORY / "docs" / "settings.md"
HEAD = """# Settings of `fedecider federate`

Every option, with what it is without a configuration file and in one sentence; `fedecider federate --help_all` says
more. Options are keys of YAML files too; a dot stands for a block (`pretrain.train.epochs` is
`pretrain: {train: {epochs: ...}}`). This page is written by `python tests/golden/refresh.py`.
"""
TITLES = {
    "fedecider": "Domains are clients, with a language model: `--method fedecider`",
    "fedmf": "Users are clients: `--method fedmf`",
    "fedsasrec": "Domains are clients, item IDs alone: `--method fedsasrec`",
}
"""One method of every track -> how the page calls it."""


class Row(NamedTuple):
    """An option."""

    name: str
    default: str
    values: str
    text: str


def options(method: str) -> list[Row]:
    """What ``method`` offers, in the order of ``--help_all``."""
    from fedecider.cli.federate import OwnTables
    from fedecider.engine.track import track_of

    schema = track_of(method).part("schema")(method)
    found = schema._replace(classes={**schema.classes, "own": OwnTables}).options()
    return [Row(one.name, _shown(one.default), one.values, one.text) for one in found]


def _shown(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def golden() -> str:
    """The surface of the command line, one option a line, by method."""
    parts = []
    for method in TITLES:
        lines = [f"{one.name} = {one.default} : {one.values}" for one in options(method)]
        parts.append("\n".join([f"[{method}] {len(lines)} options", *lines]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """``docs/settings.md``: an option that means the same in an earlier part is only named again."""
    parts, seen = [HEAD], set[tuple[str, str]]()
    for method, title in TITLES.items():
        rows, again = ["| option | default | values | what it is |", "|---|---|---|---|"], []
        for one in options(method):
            text = re.split(r"(?<=\.) +(?=[A-Z0-9\"])", one.text)[0]  # the first sentence
            choices = "" if one.default and one.values in ("str", "int", "float") else one.values
            cells = [f"`{one.name}`", f"`{one.default}`" if one.default else "", choices, text]
            if (one.name, one.text) in seen:
                again.append(" ".join(cells[:2]).strip())
            else:
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            seen.add((one.name, one.text))
        above = f"\nAs above, with its default: {', '.join(again)}.\n" if again else ""
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n" + above)
    return "\n".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    GOLDEN.write_text(golden(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
