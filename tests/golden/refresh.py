"""What ``fedecider federate`` offers, written down: ``python tests/golden/refresh.py`` after an option has changed.

Writes ``tests/golden/federate_options.txt`` (name, default without a configuration, values; one option a line) and
``docs/settings.md`` (the same with help texts).
"""

from __future__ import annotations

import re
import sys
from argparse import SUPPRESS
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN, PAGE = REPOSITORY / "tests" / "golden" / "federate_options.txt", REPOSITORY / "docs" / "settings.md"
METHODS = {"fedecider": ("--data", "x"), "fedmf": (), "fedsasrec": ()}
"""One method of every track -> words without which a configuration would change defaults."""
PARSES = ("fedecider.cross_silo.command_line", "embedding_fr.commands", "fedecider.id_based.run")
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


class Option(NamedTuple):
    name: str
    default: str
    values: str
    text: str


class _Stop(Exception):
    pass


def options(method: str) -> list[Option]:
    """What the parser of ``method`` offers, in the order of ``--help_all``."""
    from fedecider.cli.federate import OwnTables, chosen_track, describe

    parsers: list[Any] = []

    def stop(parser: Any, *_: Any) -> None:
        parsers.append(parser)
        raise _Stop

    words = ["--method", method, *METHODS.get(method, ())]
    track = chosen_track(words)
    for module in PARSES:
        __import__(module)
    patches = [patch(f"{module}.parse", stop) for module in PARSES]
    for one in patches:
        one.start()
    try:
        track.part("parse")(describe(track), words, OwnTables)
    except _Stop:
        pass
    finally:
        for one in patches:
            one.stop()
    return list(_offered(parsers[0]))


def _offered(parser: Any) -> Iterator[Option]:
    for group in parser._action_groups:
        for action in group._group_actions:
            if hasattr(action, "_typehint") and action.help != SUPPRESS:
                default = parser.get_default(action.dest)
                shown = str(default).lower() if isinstance(default, bool) else str(default)
                text = " ".join(re.sub(r"%\(default\)s", "", action.help or "").split())
                yield Option(action.dest, shown, _values(action._typehint), text)


def _values(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if hint is bool:
        return "false|true"
    if hasattr(hint, "__metadata__"):
        return _values(hint.__origin__)
    inner = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) is not None and len(inner) == 1 and get_origin(hint) not in (list, tuple):
        return _values(inner[0])
    return re.sub(r"\b(\w+\.)+", "", getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint))


def golden() -> str:
    """The surface of the command line, one option a line, by method."""
    parts = []
    for method in METHODS:
        lines = [f"{one.name} = {one.default} : {one.values}" for one in options(method)]
        parts.append("\n".join([f"[{method}] {len(lines)} options", *lines]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """``docs/settings.md``: an option that means the same in an earlier part is only named again."""
    parts, told = [HEAD], set[tuple[str, str]]()
    for method, title in TITLES.items():
        rows, again = ["| option | default | values | what it is |", "|---|---|---|---|"], []
        for one in options(method):
            text = re.split(r"(?<=\.) +(?=[A-Z0-9\"])", one.text)[0]  # the first sentence
            cells = [f"`{one.name}`", f"`{one.default}`" if one.default else "", one.values, text]
            if (one.name, one.text) in told:
                again.append(" ".join(cells[:2]).strip())
            else:
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            told.add((one.name, one.text))
        above = f"\nAs above, with its default: {', '.join(again)}.\n" if again else ""
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n" + above)
    return "\n".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    GOLDEN.write_text(golden(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
