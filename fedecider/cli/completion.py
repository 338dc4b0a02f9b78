"""A script that completes commands and options in a shell (extra completion): fedecider completion bash > FILE."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence
from importlib import import_module

from fedecider.cli.deploy import COMMANDS as DEPLOYED
from fedecider.running.command import run
from fedecider.running.options import HELP_ALL, Help

DESCRIPTION = """Print a script that completes commands and options. Keep it where the shell looks for one:
fedecider completion bash > ~/.local/share/bash-completion/completions/fedecider"""
SHELLS = ("bash", "zsh", "tcsh")
VARIANTS = {"federate": ((), ("--method", "fedmf"))}
"""Command -> words that bring other options."""
CHOICES = {"deploy": tuple(DEPLOYED), "completion": SHELLS}
"""Command -> the words that it takes in front."""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        parser = argparse.ArgumentParser(prog="fedecider completion", description=DESCRIPTION, exit_on_error=False)
        parser.add_argument("shell", choices=SHELLS)
        try:
            shell = parser.parse_args(argv).shell
        except argparse.ArgumentError as error:
            raise ValueError(f"{error}. Give one of {', '.join(SHELLS)}") from error
        try:
            import shtab
        except ImportError as error:
            raise ImportError("completion needs shtab, which is not installed: pip install '.[completion]'") from error
        print(shtab.complete(all_commands(), shell))

    return run(work)


def all_commands() -> argparse.ArgumentParser:
    """One parser with every command and its options."""
    from fedecider.cli.main import COMMANDS

    whole = argparse.ArgumentParser(prog="fedecider")
    commands = whole.add_subparsers(metavar="COMMAND")
    for name, text in COMMANDS.items():
        one = commands.add_parser(name, help=text)
        if name in CHOICES:
            one.add_argument("word", choices=CHOICES[name])
        else:
            for option, values in options_of(name).items():
                one.add_argument(f"--{option}", choices=values or None)
    return whole


def options_of(command: str) -> dict[str, list[str]]:
    """The options that the help of a command is about, with the values of those that take one of a few."""
    found: dict[str, list[str]] = {"config": []}
    for words in VARIANTS.get(command, ((),)):
        quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        try:
            with quiet[0], quiet[1]:  # a command whose extra is not installed has no options
                import_module(f"fedecider.cli.{command}").main([*words, HELP_ALL])
        except Help as shown:
            for option in shown.schema.options():
                found[option.name] = option.values.split("|") if "|" in option.values else []
    return found
