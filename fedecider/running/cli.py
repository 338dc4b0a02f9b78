"""From a command line to frozen configs and an exit code; all scripts go through ``run``.

0: done. 2: bad input, or work that did not fit into the memory, told in one line on stderr (what was got, what was
expected, what to do). 130: interrupted.
Set FEDECIDER_TRACEBACK=1 to see where an input error was raised.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, set_parsing_settings
from safetensors import SafetensorError

from fedecider.bounds import is_out_of_memory
from fedecider.running.help import HelpFormatter, arrange
from fedecider.running.yaml_file import check_yaml_size, load_yaml, settings_file

set_parsing_settings(docstring_parse_attribute_docstrings=True)

INPUT_ERRORS = (ValueError, OSError, EOFError, ImportError, SafetensorError)


def build_parser(
    description: str,
    *config_classes: type,
    default_config: Path | None = None,
    common: Sequence[str] = (),
    texts: Mapping[str, str] = {},
) -> ArgumentParser:
    """A parser whose options are the fields of ``config_classes``, plus ``--config`` and ``--print_config``.

    ``common`` names the options that ``--help`` shows first; ``texts`` replaces help texts, by option. To read the
    classes' docstrings takes a tenth of a second, so this is done once a process; what is returned is the caller's own.

    Raises:
        ValueError: two classes have a field of the same name, such as one of a method from outside.
    """
    parser = deepcopy(_parser(description, config_classes, default_config, tuple(common), tuple(texts.items())))
    parser.prog = Path(sys.argv[0]).name  # of this call, not of the first one
    return parser


@lru_cache(maxsize=64)
def _parser(
    description: str,
    config_classes: tuple[type, ...],
    default_config: Path | None,
    common: tuple[str, ...],
    texts: tuple[tuple[str, str], ...],
) -> ArgumentParser:
    owners: dict[str, type] = {}
    for config_class in config_classes:
        for name in config_class.__dataclass_fields__:  # type: ignore[attr-defined]
            if owners.setdefault(name, config_class) is not config_class:
                raise ValueError(
                    f"got the setting {name} in {config_class.__name__}, expected another name: "
                    f"{owners[name].__name__} has it already"
                )
    parser = ArgumentParser(
        description=description,
        usage="%(prog)s [--config FILE] [--OPTION VALUE ...]",
        default_config_files=[str(default_config)] if default_config else [],
        parser_mode="yaml",
        exit_on_error=False,
        allow_abbrev=False,  # peek would not see a shortened option
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--config",
        action=ActionConfigFile,
        help="A YAML file of settings; configs/demo.yaml and its like come with the package. Later options win.",
    )
    for config_class in config_classes:
        parser.add_class_arguments(config_class, as_group=True)
    arrange(parser, common, dict(texts))
    return parser


def parse(parser: ArgumentParser, argv: Sequence[str] | None, *config_classes: type) -> list[Any]:
    """Parsed and checked instances of ``config_classes``.

    Raises:
        ValueError: an unknown key or a bad value, on the command line or in the file of ``--config``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for word in words:
        check_yaml_size(word, "an argument")
    if sum(word.partition("=")[0] == "--config" for word in words) > 1:
        raise ValueError("got --config twice, expected one file; options on the command line change single settings")
    config = peek(words, "config")
    if config:
        check_config(Path(config), *config_classes)
        place = words.index("--config") + 1 if "--config" in words else words.index(f"--config={config}")
        words[place] = words[place].replace(config, str(settings_file(config)))
    with _one_line_errors():
        values = parser.parse_args(words)
        return [_instance(parser, values, config_class) for config_class in config_classes]


def check_config(path: Path, *config_classes: type) -> None:
    """Refuse what jsonargparse would drop or stumble over in a file of settings: a block or a value that is none.

    Raises:
        ValueError: the file is no YAML with names and values, or a field of ``config_classes`` in it has no value, or
            one that is no block where a block is expected.
    """
    content = load_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"got {path} with {_short(content)}, expected settings, such as num_rounds: 5")
    if "config" in content:
        raise ValueError(f"got config in {path}, expected it on the command line only: a file cannot name another one")
    for config_class in config_classes:
        check_blocks(content, config_class, str(path))


def check_blocks(content: Mapping[Any, Any], config_class: type, source: str, prefix: str = "") -> None:
    """Every field of ``config_class`` that ``content`` has must have a value, and a block where it is a dataclass."""
    hints = get_type_hints(config_class)
    for name, value in content.items():
        if not isinstance(name, str):
            raise ValueError(f"got the name {name!r} in {source}, expected text")
        hint, full = hints.get(name.partition(".")[0]), f"{prefix}{name}"
        if hint is None:
            continue  # jsonargparse tells which names are not known
        if "." in name:
            raise ValueError(f"got {full} in {source}, expected a block: {name.partition('.')[0]}: {{...}}")
        if isinstance(hint, type) and is_dataclass(hint):
            if not isinstance(value, dict):
                raise ValueError(
                    f"got {full} {_short(value)} in {source}, expected a block of settings, or leave it out"
                )
            check_blocks(value, hint, source, f"{full}.")
        elif value is None and type(None) not in get_args(hint):
            raise ValueError(f"got {full} without a value in {source}, expected one, or leave it out")


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What jsonargparse complains about, as a ``ValueError``."""
    try:
        yield
    except (ArgumentError, OverflowError) as error:  # the second one where a whole number is too large for a float
        raise ValueError(f"{str(error).rstrip('.')}. All options: --help") from error


def _instance(parser: ArgumentParser, values: Any, config_class: type) -> Any:
    values = parser.instantiate_classes(values)
    return config_class(**{name: values[name] for name in field_names(config_class)})


def field_names(config_class: type) -> list[str]:
    """Names of the options of a dataclass of settings."""
    return list(config_class.__dataclass_fields__)  # type: ignore[attr-defined]


def from_plain(config_class: type, values: Any, source: str = "the settings") -> Any:
    """A checked ``config_class`` from nested plain values, such as those that ``run.json`` keeps.

    Raises:
        ValueError: they are not settings of that class; the message names ``source``.
    """
    if not isinstance(values, dict):
        raise ValueError(f"got {_short(values)} in {source}, expected a block of settings")
    check_blocks(values, config_class, source)
    parser = _plain_parser(config_class)
    try:
        with _one_line_errors():
            return _instance(parser, parser.parse_object(values), config_class)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


@cache
def _plain_parser(config_class: type) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(config_class)
    return parser


def peek(argv: Sequence[str], name: str, default: str = "") -> str:
    """The value that ``--name`` will have: from the words, else from the YAML file of ``--config``, else ``default``.

    For options that decide which other options there are.
    """
    for position in reversed(range(len(argv))):
        option, equals, value = argv[position].partition("=")
        if option == f"--{name}":
            return value if equals else argv[position + 1] if position + 1 < len(argv) else default
    config = peek(argv, "config") if name != "config" else ""
    if config and settings_file(config).is_file():
        content = load_yaml(Path(config))
        if isinstance(content, dict) and name in content:
            return str(content[name])
    return default


def run(function: Callable[[], Any]) -> int:
    """Call ``function`` and turn input errors and a full memory into one line on stderr and exit code 2."""
    _quiet_libraries()
    try:
        function()
    except (*INPUT_ERRORS, MemoryError, RuntimeError) as error:
        full = is_out_of_memory(error)
        if os.environ.get("FEDECIDER_TRACEBACK") == "1" or not (full or isinstance(error, INPUT_ERRORS)):
            raise
        text = str(error) or type(error).__name__
        print(f"error: {_out_of_memory(text) if full else _one_line(text)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; a run goes on with --resume true", file=sys.stderr)
        return 130
    return 0


def _out_of_memory(text: str) -> str:
    return (
        f"out of memory ({_one_line(text, 200)}), expected work that fits. Lower batch_size; of a language model also "
        "pretrain.train.batch_size, pretrain.samples.max_source_tokens, eval_batch_size or num_beams"
    )


def _one_line(text: str, length: int = 1000) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]} ..."


def _quiet_libraries() -> None:
    """No bars for loading files of a few megabytes, and no warning that only a library's authors can act on."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read by transformers when it is imported
    if "transformers" in sys.modules:  # importing it takes seconds, and the embedding track does without
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
