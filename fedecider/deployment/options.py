"""Options of the commands of scripts/deploy.py that are no settings of a run."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any


class Parser(ArgumentParser):
    """Wrong options are told as every other bad input."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message}. All options: deploy.py {self.prog.split()[-1]} --help")


def parser_of(command: str, text: str, **more: Any) -> ArgumentParser:
    """For the options of ``command``, without abbreviations."""
    return Parser(prog=f"deploy.py {command}", description=text, allow_abbrev=False, **more)
