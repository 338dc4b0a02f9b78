"""The same run between machines: python scripts/deploy.py, whose commands are below."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fedecider.running.command import run

COMMANDS = {
    "publish": "prepare the catalogue and public users of companies that sell the same items, from tables",
    "provision": "make the project folder that all parties share, and a startup kit with certificates for each",
    "prepare": "prepare a site's own users from a table, with the catalogue and public users of the project",
    "simulate": "run every party as a process of this machine; options of federate.py",
    "start": "become the server or a site: start with a startup kit and a file that says where things lie",
    "submit": "start the rounds, or go on with them, as the administrator",
    "status": "show who is connected and what runs, as the administrator",
    "collect": "print the table and the bytes of a finished run, on the server's machine",
}


def usage() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "usage: deploy.py COMMAND [options]; deploy.py COMMAND --help; see docs/deploy.md\n\n" + "\n".join(lines)


def work_of(words: Sequence[str]) -> Callable[[], None]:
    """What a command line asks for.

    Raises:
        ValueError: the command is not known.
    """
    command, *options = words
    if command not in COMMANDS:
        raise ValueError(f"got the command {command!r}, expected one of {', '.join(COMMANDS)}")
    from fedecider.deployment import commands  # after what is wrong in a word

    work: Callable[[Sequence[str]], None] = getattr(commands, command)
    return lambda: work(options)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    return run(lambda: work_of(words)())
