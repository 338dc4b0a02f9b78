"""A script for bash or zsh that completes commands and options: fedecider completion bash > FILE."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Sequence
from importlib import import_module

from fedecider.cli.deploy import COMMANDS as DEPLOYED
from fedecider.running.options import run

DESCRIPTION = """Print a script that completes commands and options. Keep it where the shell looks for one:
fedecider completion bash > ~/.local/share/bash-completion/completions/fedecider"""
VARIANTS: dict[str, Sequence[Sequence[str]]] = {
    "federate": ((), ("--method", "fedmf")),
    "tune": ((), ("--method", "fedmf")),
    "deploy": tuple((command,) for command in DEPLOYED),
}
"""Command -> words that bring other options."""
SCRIPT = """_fedecider() {{
  local command="${{COMP_WORDS[1]}}" word="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{commands}" -- "$word")); return; fi
  if [ "$COMP_CWORD" -eq 2 ]; then case "$command" in
    deploy) COMPREPLY=($(compgen -W "{deployed}" -- "$word")); return ;;
    completion) COMPREPLY=($(compgen -W "bash zsh" -- "$word")); return ;;
  esac; fi
  case "$word" in -*) ;; *) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
  case "$command" in
{cases}
  esac
}}
complete -o filenames -F _fedecider fedecider
"""


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        parser = argparse.ArgumentParser(prog="fedecider completion", description=DESCRIPTION, exit_on_error=False)
        parser.add_argument("shell", choices=("bash", "zsh"))
        try:
            shell = parser.parse_args(argv).shell
        except argparse.ArgumentError as error:
            raise ValueError(f"{error}. Give bash or zsh") from error
        print(script(shell), end="")

    return run(work)


def script(shell: str) -> str:
    """What the shell reads; zsh runs functions of bash."""
    from fedecider.cli.main import COMMANDS

    cases = "\n".join(
        f'    {name}) COMPREPLY=($(compgen -W "{" ".join(found)}" -- "$word")) ;;'
        for name in COMMANDS
        if (found := options_of(name))
    )
    bridge = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return bridge + SCRIPT.format(commands=" ".join(COMMANDS), deployed=" ".join(DEPLOYED), cases=cases)


def options_of(command: str) -> list[str]:
    """The options that the help of a command names, in its order."""
    if command == "completion":
        return []
    work, found = import_module(f"fedecider.cli.{command}").main, io.StringIO()
    for words in VARIANTS.get(command, ((),)):
        quiet = contextlib.redirect_stderr(io.StringIO())  # a command whose extra is not installed has no options
        with contextlib.redirect_stdout(found), quiet, contextlib.suppress(SystemExit):
            work([*words, "--help_all"])
    return list(dict.fromkeys(re.findall(r"(?m)^\s+(?:-h, )?(--[a-z][\w.]*)", found.getvalue())))
