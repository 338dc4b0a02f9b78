"""How ``--help`` looks: what people set first, then titled groups; a value's type where the value goes."""

from __future__ import annotations

from argparse import SUPPRESS, Action
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter

TYPES = {"str": "TEXT", "int": "INT", "float": "NUMBER", "dict": "BLOCK"}


class HelpFormatter(DefaultHelpFormatter):
    """``--seed INT  What it is. (default: 0)``; nothing is said of a default that is empty."""

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        name = (self._get_type_str(action) or "").removesuffix(" | null")
        return TYPES.get(name) or super()._get_default_metavar_for_optional(action)

    def _get_help_string(self, action: Action) -> str:
        if not hasattr(action, "_typehint") or action.default == SUPPRESS:
            return super()._get_help_string(action)
        return f"{action.help or ''} (default: %(default)s)"

    def _expand_help(self, action: Action) -> str:
        text = super()._expand_help(action)
        for empty in (" (default: )", " (default: null)"):
            text = text.removesuffix(empty)
        return text


def arrange(parser: ArgumentParser, common: Sequence[str], texts: Mapping[str, str]) -> None:
    """Put the options ``common`` into the first group, in this order, and give options of ``texts`` that help text.

    Groups of argparse hold their options in private lists; there is no other way to move one.
    """
    options = parser._optionals
    first = parser.add_argument_group("What people set")
    found = {}
    for group in parser._action_groups:
        for action in list(group._group_actions):
            action.help = texts.get(action.dest, action.help)
            if action.dest in common:
                found[action.dest] = action
                group._group_actions.remove(action)
    first._group_actions.extend(found[name] for name in common if name in found)
    options.title = "All commands"
    last: list[Any] = [
        options,
        *(group for group in parser._action_groups if group.title == "default config file locations"),
    ]
    others: list[Any] = [group for group in parser._action_groups if group not in (first, *last)]
    parser._action_groups = [first, *others, *last]
