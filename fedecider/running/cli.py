"""From a command line to frozen configs and an exit code; all scripts go through ``run``.

0: done. 2: bad input, told in one line (what was got, what was expected, what to do). 130: interrupted.
Set FEDECIDER_TRACEBACK=1 to see where an input error was raised.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings
from safetensors import SafetensorError

from fedecider.running.help import HelpFormatter, arrange

set_parsing_settings(docstring_parse_attribute_docstrings=True)

REPOSITORY = Path(__file__).resolve().parents[2]


def build_parser(
    description: str,
    *config_classes: type,
    default_config: Path | None = None,
    common: Sequence[str] = (),
    texts: Mapping[str, str] = {},
) -> ArgumentParser:
    """A parser whose options are the fields of ``config_classes``, plus ``--config`` and ``--print_config``.

    ``common`` names the options that ``--help`` shows first; ``texts`` replaces help texts, by option.
    """
    parser = ArgumentParser(
        description=description,
        usage="%(prog)s [--config FILE] [--OPTION VALUE ...]",
        default_config_files=[str(default_config)] if default_config else [],
        parser_mode="yaml",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--config", action=ActionConfigFile, help="A YAML file of settings. Options that come after it win."
    )
    for config_class in config_classes:
        parser.add_class_arguments(config_class, as_group=True)
    arrange(parser, common, texts)
    return parser


def parse(parser: ArgumentParser, argv: Sequence[str] | None, *config_classes: type) -> list[Any]:
    """Parsed and checked instances of ``config_classes``; exits with code 2 on an unknown key or a bad value."""
    values = parser.parse_args(None if argv is None else list(argv))
    return [_instance(parser, values, config_class) for config_class in config_classes]


def _instance(parser: ArgumentParser, values: Any, config_class: type) -> Any:
    values = parser.instantiate_classes(values)
    return config_class(**{name: values[name] for name in config_class.__dataclass_fields__})  # type: ignore[attr-defined]


def from_plain(config_class: type, values: dict[str, Any]) -> Any:
    """A checked ``config_class`` from nested plain values, such as those that ``run.json`` keeps."""
    parser = ArgumentParser()
    parser.add_class_arguments(config_class)
    return _instance(parser, parser.parse_object(values), config_class)


def peek(argv: Sequence[str], name: str, default: str = "") -> str:
    """The value that ``--name`` will have: from the words, else from the YAML file of ``--config``, else ``default``.

    For options that decide which other options there are.
    """
    for position in reversed(range(len(argv))):
        option, equals, value = argv[position].partition("=")
        if option == f"--{name}":
            return value if equals else argv[position + 1] if position + 1 < len(argv) else default
    config = peek(argv, "config") if name != "config" else ""
    if config and Path(config).is_file():
        content = load_yaml(Path(config))
        if isinstance(content, dict) and name in content:
            return str(content[name])
    return default


def load_yaml(path: Path) -> Any:
    """The content of a YAML file. ``ValueError`` when it is none."""
    try:
        return yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error


def run(function: Callable[[], Any]) -> int:
    """Call ``function`` and turn input errors into one line on stderr and exit code 2."""
    _quiet_libraries()
    try:
        function()
    except (ValueError, OSError, EOFError, ImportError, SafetensorError) as error:
        if os.environ.get("FEDECIDER_TRACEBACK") == "1":
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; a run goes on with --resume true", file=sys.stderr)
        return 130
    return 0


def _quiet_libraries() -> None:
    """No bars for loading files of a few megabytes, and no warning that only a library's authors can act on."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read by transformers when it is imported
    if "transformers" in sys.modules:  # importing it takes seconds, and the embedding track does without
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
