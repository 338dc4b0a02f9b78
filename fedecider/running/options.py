"""From YAML files, command lines and plain values to frozen settings and an exit code.

0: done. 2: bad input, or work that did not fit into the memory, told in one line on stderr (what was got, what was
expected, what to do). 130: interrupted.
Set FEDECIDER_TRACEBACK=1 to see where an input error was raised.
"""

from __future__ import annotations

import csv
import errno
import os
import sys
import warnings
from argparse import SUPPRESS, Action
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, DefaultHelpFormatter, set_parsing_settings
from safetensors import SafetensorError

from fedecider.bounds import Diverged, is_out_of_memory

# Reading YAML that somebody else wrote: its size, its nesting and what its aliases expand to are limited.

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = next(
    (folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if (folder / "demo.yaml").is_file()),
    PACKAGE / "configs",
)
"""Files of settings that come with the package: inside it where it is installed, beside it in a checkout."""
MAX_CHARACTERS = 100_000
"""Many times the longest file of settings here; what is longer is something else."""
MAX_VALUES = 20_000
"""Scalars, lists and blocks, an alias counted as all that it stands for."""
MAX_DEPTH = 40

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def settings_file(path: str | Path) -> Path:
    """``path``, or the file of that name that comes with the package: configs/demo.yaml is there in every folder."""
    own = CONFIGS.parent / path
    return own if Path(path).parts[:1] == ("configs",) and not Path(path).exists() and own.is_file() else Path(path)


def load_yaml(path: Path) -> Any:
    """The content of a YAML file, which may be one of the package (:func:`settings_file`).

    Raises:
        ValueError: it cannot be read as text, is no YAML, is larger than any file of settings, or names
            something twice.
    """
    path = settings_file(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"got {path}, which is not UTF-8 text ({error}), expected YAML. Save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}), expected a YAML file of settings") from error
    return _parsed(text, str(path))


def _parsed(text: str, source: str) -> Any:
    """What ``text`` says as YAML; the same errors as `load_yaml`."""
    check_yaml_size(text, source)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        twice = _named_twice(node)
        content = None if node is None or twice else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{source} is no YAML: {error}") from error
    finally:
        loader.dispose()
    if twice:
        name, first, second = twice
        raise ValueError(f"got {name} twice in {source}, in lines {first} and {second}, expected it once")
    return content


def _named_twice(top: yaml.Node | None) -> tuple[str, int, int] | None:
    """A name that stands twice in one block, with the blocks around it, and both of its lines.

    YAML forbids it, but PyYAML takes the last one. Names that come by ``<<`` are no part of a block.
    """
    waiting, seen = [(top, "")], set()
    while waiting:
        node, prefix = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
            continue
        seen.add(id(node))  # an alias is the same node
        if isinstance(node, yaml.SequenceNode):
            waiting += [(one, prefix) for one in node.value]
            continue
        line_of: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in line_of:
                    return f"{prefix}{key.value}", line_of[name], line
                line_of[name] = line
            around = f"{key.value}." if isinstance(key, yaml.ScalarNode) else ""
            waiting.append((value, f"{prefix}{around}"))
    return None


def check_yaml_size(text: str, source: str) -> None:
    """Refuse ``text`` that would become huge when it is parsed; text that is no YAML passes.

    Nothing is built: a few hundred characters of nested aliases can stand for terabytes.

    Raises:
        ValueError: too long, too deep, or too many values; the message names ``source``.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"got {source} with {len(text):,} characters, expected at most {MAX_CHARACTERS:,} of settings")
    size_of: dict[str, int] = {}
    open_values: list[tuple[str | None, int]] = [(None, 0)]

    def add(anchor: str | None, size: int) -> None:
        if anchor is not None:
            size_of[anchor] = size
        parent, total = open_values[-1]
        open_values[-1] = (parent, total + size)

    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent):
                add(
                    None, size_of.get(event.anchor or "", MAX_VALUES + 1)
                )  # unknown: the alias stands inside its own anchor
            elif isinstance(event, yaml.ScalarEvent):
                add(event.anchor, 1)
            elif isinstance(event, yaml.CollectionStartEvent):
                open_values.append((event.anchor, 1))
            elif isinstance(event, yaml.CollectionEndEvent):
                add(*open_values.pop())
            if len(open_values) > MAX_DEPTH or open_values[-1][1] > MAX_VALUES:
                raise ValueError(
                    f"got {source} with more than {MAX_VALUES:,} values (aliases counted as what they stand for) or "
                    f"{MAX_DEPTH} levels, expected a file of settings. Write it without aliases"
                )
    except yaml.YAMLError:
        return


def write_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """A YAML file that ``--config`` reads."""
    path.write_text(yaml.safe_dump(dict(settings), sort_keys=False, width=120), encoding="utf-8")


# How ``--help`` looks: what people set first, then titled groups; a value's type where the value goes.

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


FIRST, LAST = "What people set", "All commands"
HELP_ALL = "--help_all"


def arrange(
    parser: ArgumentParser, common: Sequence[str], texts: Mapping[str, str], refused: Collection[str] = ()
) -> None:
    """Put the options ``common`` into the first group, in this order, give options of ``texts`` that help text, and do
    not offer those that are ``refused``.

    Groups of argparse hold their options in private lists; there is no other way to move one.
    """
    options = parser._optionals
    first = parser.add_argument_group(FIRST)
    found = {}
    for group in parser._action_groups:
        for action in list(group._group_actions):
            action.help = SUPPRESS if action.dest in refused else texts.get(action.dest, action.help)
            if action.dest in common:
                found[action.dest] = action
                group._group_actions.remove(action)
    first._group_actions.extend(found[name] for name in common if name in found)
    options.title = LAST
    last: list[Any] = [
        options,
        *(group for group in parser._action_groups if group.title == "default config file locations"),
    ]
    others: list[Any] = [group for group in parser._action_groups if group not in (first, *last)]
    parser._action_groups = [first, *others, *last]


def show_what_people_set(parser: ArgumentParser) -> None:
    """Let ``--help`` show the first group alone, where there is one; ``--help_all`` shows the others. For a parser that
    does nothing else: settings are made from their groups.
    """
    first = parser._action_groups[0]
    if first._group_actions:
        parser._action_groups = [group for group in parser._action_groups if group.title in (FIRST, LAST)]
        parser.epilog = f"All options: {HELP_ALL}"


# From a command line to frozen configs and an exit code; all scripts go through ``run``.

set_parsing_settings(docstring_parse_attribute_docstrings=True)

INPUT_ERRORS = (ValueError, OSError, EOFError, ImportError, SafetensorError)


def pairs_of(text: str, option: str, example: str) -> dict[str, str]:
    """``title=label,brand=maker`` as a mapping. ``ValueError`` for what has no such form."""
    found = {}
    for pair in filter(None, text.split(",")):
        what, _, column = (part.strip() for part in pair.partition("="))
        if not what or not column:
            raise ValueError(f"got --{option} {text}, expected names and columns, such as {example}")
        found[what] = column
    return found


def keys_of(text: str, option: str) -> list[str]:
    """``17,"Smith, J"`` as a list, as a line of a CSV file is read. ``ValueError`` where quotes do not close."""
    try:
        (keys,) = csv.reader([text], skipinitialspace=True, strict=True)
    except (csv.Error, ValueError) as error:
        raise ValueError(
            f"got --{option} {text!r:.100} ({error}), expected keys separated by commas, on one line; one with a comma "
            """stands in quotes, such as '"Smith, J",17'"""
        ) from error
    return [key.strip() for key in keys if key.strip()]


def with_leading(argv: Sequence[str] | None, name: str) -> list[str]:
    """The words of a command, those before all options as the option ``name``, separated by commas."""
    words = list(sys.argv[1:] if argv is None else argv)
    leading = list(takewhile(lambda word: not word.startswith("-"), words))
    return [f"--{name}={','.join(leading)}", *words[len(leading) :]] if leading else words


def build_parser(
    description: str,
    *config_classes: type,
    default_config: Path | None = None,
    common: Sequence[str] = (),
    texts: Mapping[str, str] = {},
    refused: Collection[str] = (),
) -> ArgumentParser:
    """A parser whose options are the fields of ``config_classes``, plus ``--config`` and ``--print_config``.

    ``common`` names the options that ``--help`` shows, the others come with ``--help_all``; ``texts`` replaces help
    texts, by option; those that are ``refused`` anyway are in no help. To read the classes' docstrings takes a tenth of
    a second, so this is done once a process; what is returned is the caller's own.

    Raises:
        ValueError: two classes have a field of the same name, such as one of a method from outside.
    """
    key = (tuple(common), tuple(texts.items()), tuple(refused))
    parser = deepcopy(_parser(description, config_classes, default_config, *key))
    parser.prog = Path(sys.argv[0]).name  # of this call, not of the first one
    return parser


@lru_cache(maxsize=64)
def _parser(
    description: str,
    config_classes: tuple[type, ...],
    default_config: Path | None,
    common: tuple[str, ...],
    texts: tuple[tuple[str, str], ...],
    refused: tuple[str, ...],
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
    arrange(parser, common, dict(texts), refused)
    return parser


def parse(parser: ArgumentParser, argv: Sequence[str] | None, *config_classes: type) -> list[Any]:
    """Parsed and checked instances of ``config_classes``.

    Raises:
        ValueError: an unknown key or a bad value, on the command line or in the file of ``--config``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for word in words:
        check_yaml_size(word, "an argument")
    if HELP_ALL in words:
        words = ["--help" if word == HELP_ALL else word for word in words]
    elif {"-h", "--help"} & set(words):
        show_what_people_set(parser)
    _check_words(parser, words)
    if sum(word.partition("=")[0] == "--config" for word in words) > 1:
        raise ValueError("got --config twice, expected one file; options on the command line change single settings")
    config = peek(words, "config")
    if config:
        check_config(Path(config), *config_classes)
        check_names(parser, load_yaml(Path(config)), config)
        place = words.index("--config") + 1 if "--config" in words else words.index(f"--config={config}")
        words[place] = words[place].replace(config, str(settings_file(config)))
    with _one_line_errors():
        values = parser.parse_args(words)
        return [_instance(parser, values, config_class) for config_class in config_classes]


def _check_words(parser: ArgumentParser, words: Sequence[str]) -> None:
    """``ValueError`` for an option that there is not, or a name that there is not in an option's block."""
    options = _options(parser)
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").removesuffix("+")
        if not option.startswith("--") or not name:
            continue
        if name not in options and not _inside_a_value(name, options):
            nearest = _nearest(name, options)
            hint = f"; the nearest is --{nearest}" if nearest else ""
            raise ValueError(f"no option of this command is called {option}{hint}. All options: {HELP_ALL}")
        text = (value if equals else following).lstrip()
        if text.startswith(("{", "[{")):
            content = _parsed(text, f"the value of {option}")
            if any(one.startswith(f"{name}.") for one in options):
                check_names(parser, content, option, f"{name}.")


def check_names(parser: ArgumentParser, content: Any, source: str, prefix: str = "") -> None:
    """Refuse a name in ``content``, a block of ``source``, that is no option of ``parser``.

    Raises:
        ValueError: the message has the name, ``source`` and the nearest name that there is.
    """
    options = _options(parser)
    for name, value in content.items() if isinstance(content, dict) else ():
        full = f"{prefix}{name}"
        if full not in options and not _inside_a_value(full, options):
            nearest = _nearest(full, options)
            hint = f"; the nearest is {nearest}" if nearest else ""
            raise ValueError(f"got {full} in {source}, expected the name of an option{hint}. All options: {HELP_ALL}")
        if any(one.startswith(f"{full}.") for one in options):
            check_names(parser, value, source, f"{full}.")


def _options(parser: ArgumentParser) -> set[str]:
    return {name.lstrip("-") for name in parser._option_string_actions}


def _inside_a_value(name: str, options: Set[str]) -> bool:
    """Whether ``name`` is inside an option that has no options of its own, such as a dictionary: its type decides."""
    around = next((one for one in _around(name) if one in options), "")
    return bool(around) and not any(one.startswith(f"{around}.") for one in options)


def _around(name: str) -> Iterator[str]:
    """a.b.c -> a.b, a."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _nearest(name: str, options: Set[str]) -> str:
    """What ``name`` may mean: the nearest option of the same block, else of all, else one so called elsewhere; or
    nothing."""
    block, _, last = name.rpartition(".")
    in_block = {one.rpartition(".")[2]: one for one in options if one.rpartition(".")[0] == block}
    found = [in_block[one] for one in get_close_matches(last, in_block, 1, 0.7)]
    found = found or get_close_matches(name, sorted(options), 1, 0.8)
    found = found or sorted(one for one in options if one.rpartition(".")[2] == last)
    return found[0] if found else ""


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
            continue  # told by check_names
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
        raise ValueError(f"{str(error).rstrip('.')}. All options: {HELP_ALL}") from error


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
    check_names(parser, values, source)
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
    """Call ``function`` and turn input errors and a full memory into one line on stderr and exit code 2.

    1 for a run that diverged, which its settings do not show."""
    _quiet_libraries()
    try:
        function()
    except (*INPUT_ERRORS, MemoryError, RuntimeError) as error:
        full = is_out_of_memory(error)
        if os.environ.get("FEDECIDER_TRACEBACK") == "1" or not (full or isinstance(error, INPUT_ERRORS)):
            raise
        text = _of_system(error) if isinstance(error, OSError) and error.errno else str(error) or type(error).__name__
        print(f"error: {_out_of_memory(text) if full else _one_line(text)}", file=sys.stderr)
        return 1 if isinstance(error, Diverged) else 2
    except KeyboardInterrupt as error:
        print(f"interrupted{f'; {error}' if str(error) else ''}", file=sys.stderr)
        return 130
    return 0


ADVICE = {
    **dict.fromkeys(
        (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)),
        "expected room. Make some, and start again (a run that was begun: --resume true)",
    ),
    errno.EACCES: "expected a place that this user may read and write. Choose another one, or change its rights",
    errno.EPERM: "expected a place that this user may read and write. Choose another one, or change its rights",
    errno.EROFS: "expected a place that may be written. Choose another one, or copy the folder to where it may be",
    errno.ENOTDIR: "expected a folder. Choose another place, or remove the file",
    errno.EEXIST: "expected a free place. Choose another one, or remove the file",
    errno.EISDIR: "expected a file. Choose another one",
    errno.ENOENT: "expected it to be there. Check the path",
    errno.EPIPE: "expected somebody to read the output",
}
"""What to do about an error of the system."""


def _of_system(error: OSError) -> str:
    """``got a full disk``, in the system's words, with the file and what to do."""
    place = f" for {error.filename}" if error.filename else ""
    told = (error.strerror or str(error)).lower()
    advice = ADVICE.get(error.errno or 0)
    return f"got {told!r}{place}, {advice}" if advice and error.strerror else str(error)


def _out_of_memory(text: str) -> str:
    return (
        f"out of memory ({_one_line(text, 200)}), expected work that fits. Take fewer items or users, or lower "
        "batch_size or embedding_size; of a language model also pretrain.train.batch_size, "
        "pretrain.samples.max_source_tokens, eval_batch_size or num_beams"
    )


def _one_line(text: str, length: int = 1000) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]} ..."


def _quiet_libraries() -> None:
    """No bars for loading files of a few megabytes, and no warning that only a library's authors can act on."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read by transformers when it is imported
    if "transformers" in sys.modules:  # importing it takes seconds, and the cross-device track does without
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
