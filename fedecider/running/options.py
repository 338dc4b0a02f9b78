"""Settings from a command line, a YAML file or Python: all of them are mappings, checked and built once, here.

An option is a field of a dataclass of `fedecider.bounds`; a dot stands for a block, ``pretrain.train.epochs``.
"""

from __future__ import annotations

import csv
import sys
from argparse import SUPPRESS, ArgumentParser, HelpFormatter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from fedecider.bounds import sentence
from fedecider.running.settings_files import load_config, parse_yaml

HELP, HELP_ALL, PRINT_CONFIG = ("-h", "--help"), "--help_all", "--print_config"
FLAGS = (*HELP, HELP_ALL, PRINT_CONFIG)
TYPES = {str: "TEXT", int: "INT", float: "NUMBER", bool: "{true,false}", dict: "BLOCK", tuple: "LIST"}


class Option(NamedTuple):
    """A setting as help has it."""

    name: str
    hint: Any
    default: Any
    """`dataclasses.MISSING` where it has to be given."""
    text: str

    @property
    def values(self) -> str:
        """Its type, or the values that it takes."""
        return _values(self.hint)


class Schema(NamedTuple):
    """What a command takes."""

    classes: Mapping[str, type]
    """Block of the settings -> its dataclass; fields of all of them are options side by side."""
    common: Sequence[str] = ()
    """Options that ``--help`` shows, in this order; all of them where there is none."""
    defaults: Mapping[str, Any] = {}
    """Where they are not those of the classes."""
    texts: Mapping[str, str] = {}
    """Help texts in place of those of the classes."""
    hidden: Collection[str] = ()
    """Options that help does not offer: they are refused, or follow from others."""

    def options(self) -> list[Option]:
        """What is offered, common ones first. Raises as `build` for two fields of one name."""
        self._check_owners()
        found = [
            one._replace(default=self.defaults.get(one.name, one.default), text=self.texts.get(one.name, one.text))
            for config_class in self.classes.values()
            for one in options_of(config_class)
            if one.name not in self.hidden
        ]
        order = {name: place for place, name in enumerate(self.common)}
        return sorted(found, key=lambda option: order.get(option.name, len(order)))

    def build(self, values: Mapping[str, Any], source: str = "") -> dict[str, Any]:
        """Block -> its checked settings, from one mapping of options.

        Raises:
            ValueError: a name that no block has, a value that cannot be, or two blocks that have a field of the same
                name, such as one of a method from outside.
        """
        self._check_owners()
        _check_names(values, [name for one in self.classes.values() for name in names_of(one)], source)
        values = merged(self.defaults, values)
        return {
            block: from_plain(one, {name: values[name] for name in field_names(one) if name in values})
            for block, one in self.classes.items()
        }

    def _check_owners(self) -> None:
        owners: dict[str, type] = {}
        for config_class in self.classes.values():
            for name in field_names(config_class):
                if owners.setdefault(name, config_class) is not config_class:
                    raise ValueError(
                        f"got the setting {name} in {config_class.__name__}, expected another name: "
                        f"{owners[name].__name__} has it already"
                    )


def options_of(config_class: type, prefix: str = "") -> Iterator[Option]:
    """The settings of a dataclass, those of its blocks among them."""
    texts, hints = _texts(config_class), _hints(config_class)
    for field in fields(config_class):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if is_dataclass(hint):
            yield from options_of(hint, f"{name}.")  # type: ignore[arg-type]
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        yield Option(name, hint, default, texts.get(field.name, ""))


def names_of(config_class: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings of a dataclass, and of its blocks."""
    for name, hint in _hints(config_class).items():
        yield f"{prefix}{name}"
        if is_dataclass(hint):
            yield from names_of(hint, f"{prefix}{name}.")  # type: ignore[arg-type]


def field_names(config_class: type) -> list[str]:
    """Names of the settings of a dataclass, a block being one."""
    return [field.name for field in fields(config_class)]


@cache
def _hints(config_class: type) -> dict[str, Any]:
    hints = get_type_hints(config_class, include_extras=True)
    return {name: hints[name] for name in field_names(config_class)}


def _texts(config_class: type) -> dict[str, str]:
    """Field -> what the docstrings of the class and of those that it comes from say of it."""
    from docstring_parser import parse_from_object  # for help alone

    classes = [one for one in reversed(config_class.__mro__) if is_dataclass(one) and one.__doc__]
    parsed = [parse_from_object(one).params for one in classes]
    return {param.arg_name: " ".join((param.description or "").split()) for params in parsed for param in params}


# From mappings to settings.


def merged(*values: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping, in which later ones win, block by block."""
    found: dict[str, Any] = {}
    for one in values:
        for name, value in one.items():
            old = found.get(name)
            found[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``, over a block that came as a text."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        first, dot, rest = name.partition(".")
        if dot and isinstance(found.get(first), str):
            found[first] = parse_yaml(found[first], first)
        found = merged(found, {first: nested({rest: value}) if dot else value})
    return found


def from_plain(config_class: type, values: Any, source: str = "") -> Any:
    """A checked ``config_class`` from nested plain values, such as those that ``run.json`` keeps.

    Raises:
        ValueError: they are not settings of that class; the message has the name of the first that is none, and
            ``source``.
    """
    where = f"{source}: " if source else ""
    try:
        return _adapter(config_class).validate_python(_read(config_class, values, source))
    except ValidationError as error:
        raise ValueError(f"{where}{sentence(error, config_class)}") from error


@cache
def _adapter(config_class: type) -> TypeAdapter[Any]:
    return TypeAdapter(config_class)


def _read(config_class: type, values: Any, source: str, prefix: str = "") -> dict[str, Any]:
    """``values`` with blocks that came as texts of a command line; every name is known."""
    values = _from_text(values, prefix or source)
    if not isinstance(values, Mapping):
        name = prefix.rstrip(".") or source or "settings"
        raise ValueError(f"got {name} {values!r:.60}, expected a block of settings")
    names = list(names_of(config_class))
    _check_names(values, names, source, prefix)
    found: dict[str, Any] = {}
    for name, value in values.items():
        hint = _hints(config_class)[name]
        if is_dataclass(hint) and not is_dataclass(value):
            found[name] = _read(hint, value, source, f"{prefix}{name}.")  # type: ignore[arg-type]
        elif value == "null" and NoneType in get_args(hint):
            found[name] = None
        else:
            found[name] = _from_text(value, f"{prefix}{name}") if _plain_type(hint) in (tuple, dict) else value
    return found


def typed(config_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, as a command line may have them, with numbers and truth values in place of their texts; what is no
    setting of the class, or cannot be one, stays."""
    found = dict(values)
    for name, hint in _hints(config_class).items():
        if name in values and is_dataclass(hint):
            block = _from_text(values[name], name)
            found[name] = typed(hint, block) if isinstance(block, Mapping) else block  # type: ignore[arg-type]
        elif name in values:
            with suppress(ValidationError):
                found[name] = TypeAdapter(hint).validate_python(values[name])
    return found


def _from_text(value: Any, source: str) -> Any:
    return parse_yaml(value, source) if isinstance(value, str) else value


def _check_names(values: Mapping[Any, Any], names: Collection[str], source: str, prefix: str = "") -> None:
    """``ValueError`` for a name that is none of ``names``, with the nearest one."""
    for name in values:
        if name not in names or "." in str(name):
            near = nearest(str(name), names)
            hint = f": did you mean {prefix}{near}?" if near else "."
            where = f" in {source}" if source else ""
            raise ValueError(f"got {prefix}{name}{where}, which is no option{hint} All options: {HELP_ALL}")


def nearest(name: str, names: Collection[str]) -> str:
    """What ``name`` may mean: the nearest of ``names``, else one so called in another block, else nothing."""
    found = get_close_matches(name, sorted(names), 1, 0.7)
    found = found or sorted(one for one in names if one.rpartition(".")[2] == name.rpartition(".")[2])
    return found[0] if found else ""


# The words of a command line.


class Given(NamedTuple):
    """What a command line says, before it is known what it may say."""

    options: dict[str, Any]
    """Option -> its text, blocks as mappings."""
    config: dict[str, Any] | None
    """The settings in the file of ``--config``, if there is one."""

    def get(self, name: str, default: str = "") -> str:
        """The text that an option will have; for options that decide which others there are."""
        return str({**(self.config or {}), **self.options}.get(name, default))

    @property
    def values(self) -> dict[str, Any]:
        """Options over the file."""
        return merged(self.config or {}, self.options)


def read_words(words: Sequence[str]) -> Given:
    """The words of a command: ``--a.b 3`` or ``--a.b=3``, and ``--config FILE``.

    Raises:
        ValueError: a word that is no option, an option without a value, or two files.
    """
    options: dict[str, Any] = {}
    waiting = [word for word in words if word not in FLAGS]
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or not name.strip("-"):
            raise ValueError(f"got {word!r:.100}, expected options: --NAME VALUE. All options: {HELP_ALL}")
        if not equals and (not waiting or waiting[0].startswith("--")):
            raise ValueError(f"got {name} without a value, expected one: {name} VALUE")
        value = value if equals else waiting.pop(0)
        if name == "--config" and "config" in options:
            raise ValueError("got --config twice, expected one file; other options change single settings")
        options[name.removeprefix("--")] = value
    file = options.pop("config", None)
    return Given(nested(options), load_config(file) if file is not None else None)


def asks_for_help(words: Collection[str]) -> bool:
    """Whether help is wanted and no work."""
    return bool({*HELP, HELP_ALL} & set(words))


def parse(
    description: str,
    argv: Sequence[str] | None,
    *classes: type,
    common: Sequence[str] = (),
    texts: Mapping[str, str] = {},
) -> list[Any]:
    """Settings of a command that has nothing to do with methods: an instance of each of ``classes``.

    ``SystemExit`` where help is wanted, or the settings alone.

    Raises:
        ValueError: an unknown name or a bad value, on the command line or in the file of ``--config``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    schema = Schema({one.__name__: one for one in classes}, common, texts=texts)
    if asks_for_help(words):
        show_help(description, schema, words)
    blocks = list(schema.build(read_words(words).values).values())
    if PRINT_CONFIG in words:
        show_config(blocks)
    return blocks


def show_config(blocks: Sequence[Any]) -> None:
    """Print settings as a file of ``--config`` has them, and end."""
    values = {name: value for block in blocks for name, value in asdict(block).items()}
    print(yaml.safe_dump(values, sort_keys=False, width=120), end="")
    raise SystemExit(0)


def with_leading(argv: Sequence[str] | None, name: str) -> list[str]:
    """The words of a command, those before all options as the option ``name``, separated by commas."""
    words = list(sys.argv[1:] if argv is None else argv)
    leading = list(takewhile(lambda word: not word.startswith("-"), words))
    return [f"--{name}={','.join(leading)}", *words[len(leading) :]] if leading else words


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


# Help.


class Help(SystemExit):
    """The end of a command whose help was wanted."""

    def __init__(self, schema: Schema) -> None:
        super().__init__(0)
        self.schema = schema
        """What help was about."""


def show_help(description: str, schema: Schema, words: Collection[str]) -> None:
    """Print what ``--help`` or ``--help_all`` is to show, and end."""
    build_parser(description, schema, HELP_ALL in words or not schema.common).print_help()
    raise Help(schema)


def build_parser(description: str, schema: Schema, all_options: bool = True) -> ArgumentParser:
    """The parser that help and shell completion are made from: common options first, then one group a block."""
    parser = ArgumentParser(
        prog=Path(sys.argv[0]).name,
        description=description,
        usage="%(prog)s [--config FILE] [--OPTION VALUE ...]",
        epilog=None if all_options else f"All options: {HELP_ALL}",
        add_help=False,
        formatter_class=lambda prog: HelpFormatter(prog, max_help_position=24, width=100),
    )
    owner = {name: one for one in schema.classes.values() for name in field_names(one)}
    groups: dict[str, Any] = {}
    for option in schema.options():
        is_common = option.name in schema.common
        if not (is_common or all_options):
            continue
        title = _title(owner[option.name.partition(".")[0]])
        title = "What people set" if is_common else title
        groups[title] = groups.get(title) or parser.add_argument_group(title)
        text = option.text if option.default in (MISSING, None, "") else f"{option.text} (default: {_shown(option)})"
        groups[title].add_argument(f"--{option.name}", metavar=_metavar(option.hint), help=text.replace("%", "%%"))
    last = parser.add_argument_group("All commands")
    groups.get("What people set", last).add_argument(
        "--config",
        metavar="FILE",
        help="A YAML file of settings; configs/demo.yaml and its like come with the package. Options win over it.",
    )
    for flag, text in ((HELP_ALL, "Show all options."), (PRINT_CONFIG, "Print the settings and do nothing.")):
        last.add_argument(flag, action="store_true", help=text)
    last.add_argument(*HELP, action="store_true", help="Show what people set." if schema.common else SUPPRESS)
    return parser


def _title(config_class: type) -> str:
    return (config_class.__doc__ or "").strip().partition("\n")[0]


def _shown(option: Option) -> str:
    return str(option.default).lower() if isinstance(option.default, bool) else str(option.default)


def _metavar(hint: Any) -> str:
    plain = _plain_type(hint)
    if get_origin(plain) is Literal:
        return f"{{{','.join(map(str, get_args(plain)))}}}"
    return TYPES.get(plain, "VALUE")


def _plain_type(hint: Any) -> Any:
    """The type behind bounds and behind what may also be None; ``tuple`` and ``dict`` without their entries."""
    if get_origin(hint) is Annotated:
        return _plain_type(get_args(hint)[0])
    inner = [one for one in get_args(hint) if one is not NoneType]
    if NoneType in get_args(hint) and len(inner) == 1:
        return _plain_type(inner[0])
    return get_origin(hint) if get_origin(hint) in (tuple, dict) else hint


def _values(hint: Any) -> str:
    plain = _plain_type(hint)
    if get_origin(plain) is Literal:
        return "|".join(map(str, get_args(plain)))
    if plain is bool:
        return "false|true"
    if get_args(plain):  # a choice of types
        return "|".join(_values(one) for one in get_args(plain))
    return plain.__name__
