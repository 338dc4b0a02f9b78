"""One command for everything: fedecider COMMAND [options]."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fedecider.running.command import run

COMMANDS = {
    "prepare": "read the original files of a data set and write prepared domains",
    "import": "read own tables of events and items, say what came in and what did not, and write prepared domains",
    "overlap": "what companies have in common before they join, from item keys under a keyed hash",
    "match": "which items of companies are the same goods under other names, as a table to be corrected",
    "pretrain": "stage 1 alone: tokenizer, item IDs and backbone from the public pools",
    "distill": "stage 2 alone: the student of half depth",
    "federate": "train together, with any method of both tracks",
    "evaluate": "rank the held-out items again, with what was exported",
    "compare": "methods x seeds x domains of the cross-silo track in one table",
    "leaderboard": "every method of the cross-device track on one data set",
    "without": "who gains from whom: a finished run again without each company",
    "audit": "what the server or another client can infer from what it sees",
    "deploy": "the same run between machines",
    "recommend": "next items for a history",
    "update": "put a company's new events into its ensemble and adapter, tested before they are in force; go back",
    "fedmd": "learn from companies whose backbones differ, by what they recommend for public histories",
    "forget": "take customers out of a company's counts and histories, and say what still remembers them",
    "serve": "a finished run as an HTTP service, with a page",
    "report": "the page of a finished run, made again",
    "sample": "write the tables of four planted shops, to try federate --events with",
    "doctor": "what is installed, which devices and data are there, and what is missing",
    "completion": "print a script that completes commands and options in bash or zsh",
}
"""Command -> what it does; each is the ``main`` of the module of that name beside this one."""


def usage() -> str:
    lines = [f"  {name:<12} {text}" for name, text in COMMANDS.items()]
    return "usage: fedecider COMMAND [options]; fedecider COMMAND --help\n\n" + "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes are those of `fedecider.running.options`."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    command, *options = words
    if command not in COMMANDS:
        return run(lambda: _unknown(command))
    sys.argv = [f"fedecider {command}", *options]  # what help texts call the program
    modules: list[Any] = []
    code = run(lambda: modules.append(import_module(f"fedecider.cli.{command}")))  # what it needs may not fit
    return code or int(modules[0].main(options))


def _unknown(command: str) -> None:
    raise ValueError(f"got the command {command!r}, expected one of {', '.join(COMMANDS)}")


if __name__ == "__main__":
    sys.exit(main())
