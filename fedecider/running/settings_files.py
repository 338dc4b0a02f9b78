"""YAML files of settings that somebody else may have written: where they lie, and what of YAML they may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next(
    (folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if (folder / "demo.yaml").is_file()),
    PACKAGE / "configs",
)
"""Files of settings that come with the package: inside it where it is installed, beside it in a checkout."""
MAX_CHARACTERS = 100_000
"""Many times the longest file of settings here; what is longer is something else."""
MAX_DEPTH = 40


class Chosen(NamedTuple):
    """Settings that were chosen for data, as a file would have them; empty where nothing was."""

    settings: Mapping[str, Any] = {}
    reasons: Sequence[str] = ()
    """A line for each choice."""


NOTHING_CHOSEN = Chosen()


class _Loader(yaml.SafeLoader):
    """Without aliases, a few of which can stand for terabytes, and without names that stand twice in a block."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("expected no aliases (*name): write out what they stand for")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"expected at most {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if str(key.value) in lines:
                raise ValueError(
                    f"got {key.value} twice, in lines {lines[str(key.value)]} and {line}, expected it once"
                )
            lines[str(key.value)] = line
        return super().construct_mapping(node, deep)


def settings_file(path: str | Path) -> Path:
    """``path``, or the file of that name that comes with the package: configs/demo.yaml is there in every folder."""
    own = CONFIGS.parent / path
    return own if Path(path).parts[:1] == ("configs",) and not Path(path).exists() and own.is_file() else Path(path)


def load_yaml(path: Path) -> Any:
    """The content of a YAML file, which may be one of the package (:func:`settings_file`).

    Raises:
        ValueError: it cannot be read as text, or `parse_yaml` refuses it.
    """
    path = settings_file(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"got {path}, which is not UTF-8 text ({error}), expected YAML. Save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}), expected a YAML file of settings") from error
    return parse_yaml(text, str(path))


def load_config(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file, by name.

    Raises:
        ValueError: as `load_yaml`, or the file holds something else.
    """
    content = load_yaml(Path(path))
    if not isinstance(content, dict):
        raise ValueError(f"got {content!r:.60} in {path}, expected settings, such as num_rounds: 5")
    if "config" in content:
        raise ValueError(f"got config in {path}, expected it on the command line only: a file cannot name another one")
    return content


def parse_yaml(text: str, source: str) -> Any:
    """What ``text`` says as YAML.

    Raises:
        ValueError: no YAML, longer or deeper than any file of settings, with aliases, or something is named twice; the
            message names ``source``.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"got {source} with {len(text):,} characters, expected at most {MAX_CHARACTERS:,} of settings")
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"cannot read {source} as YAML: {error}") from error


def write_settings(path: Path, settings: Mapping[str, Any], reasons: Sequence[str] = ()) -> None:
    """A YAML file that ``--config`` reads; ``reasons`` stand in it as comments."""
    comments = "".join(f"# {line}\n" for line in reasons)
    path.write_text(comments + yaml.safe_dump(dict(settings), sort_keys=False, width=120), encoding="utf-8")
