"""How a company's tables are read: options in Python and on the command line, or a mapping file that a person corrects.

>>> options = read_mapping("north.yaml")  # events: orders.csv, user: Kundennr, time: Belegdatum, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from fedecider.data.purchases import parsed_keep
from fedecider.data.tables import FileForm

NO_TIMES = "none"
"""In the place of a column of times: there is none."""
FILES = ("events", "items")
"""Of a mapping file, beside fields of `TableOptions`: the tables, from the folder of the mapping."""
IN_A_MAPPING = (
    "user",
    "item",
    "time",
    "time_format",
    "order",
    "quantity",
    "keep",
    "nobody",
    "rating",
    "company",
    "domain",
    "public",
    "items_key",
    "texts",
    "delimiter",
    "encoding",
    "quoting",
    "header",
    "items_header",
)
"""What a mapping file may say, in the order in which a proposal says it."""


@dataclass(frozen=True)
class TableOptions:
    """How own tables are read. What is not given is found, and everything that was found is told.

    Raises:
        ValueError: a name, texts or a rule for bad rows that cannot be.
    """

    name: str = "shop"
    """What the only domain, or the catalogue that companies share or have parts of, is called."""
    user: str | None = None
    """The column of customers' keys; as text, so that 7 and "7" are one customer."""
    item: str | None = None
    """The column of items' keys."""
    time: str | None = None
    """The column of times, or two of them, ``day+clock``. Units since 1970, days as numbers and dates in many forms are
    known by most of their values; UTC where they name no zone. Where no column is called so, rows are oldest first, and
    a column of another name that holds times is an error, unless this is ``none``."""
    rating: str | None = None
    """The column of ratings, which ``min_rating`` looks at."""
    domain: str | None = None
    """The column, in both tables, that shares them out into several domains. A customer with the same key in two of
    them is one person."""
    company: str | None = None
    """The column of ``events`` that says whose customer a user is, as if each company had a table of its own."""
    public: Any = None
    """Who is public: everybody may see their events, and the backbone learns from them. None: nobody. A number: this
    share of customers, chosen by a hash of ``seed`` and key. The name of a column of ``events``: customers whose rows
    say true. Else customers' keys: a list, set or series, a table or a path; a dict company -> keys where companies use
    the same keys."""
    texts: Mapping[str, str] | None = None
    """Text field (title, author, brand, series, categories, genres, keywords, description, ...) -> its column."""
    items_key: str | None = None
    """The column of keys in the table of items, where it is called otherwise than in the events."""
    quantity: str | None = None
    """The column of quantities: a row of less than 0 is a return, which takes back the purchase of the same customer,
    item and order, or else the nearest earlier one; a row of 0 is no event. "": none."""
    order: str | None = None
    """The column of order numbers: a customer's events of one number are one basket, and lines of an order without
    customer and time have those of its others. "": none; then a customer's events of one time are one basket."""
    keep: Mapping[str, Sequence[str]] | str | None = None
    """Column -> the values of rows that count: {"status": ["paid", "shipped"]}, or ``status=paid,shipped``; ``*``: all.
    """
    nobody: Sequence[str] | str | None = None
    """Keys that are no customers. None: NULL, guest and the like, and any key with a share of events that no person
    has."""
    time_format: str | None = None
    """What times mean: ``s``, ``ms``, ``us`` or ``ns`` since 1970, ``serial`` (a spreadsheet's days), ``order``, or a
    format of `datetime.strptime`, such as ``%d/%m/%Y %H:%M``."""
    bad_rows: str = "error"
    """What a row without an item or with an unreadable time is: ``error``, or ``skip`` leaves it out and counts it."""
    delimiter: str | None = None
    """Of text files: ``,``, ``;``, tab or any character."""
    encoding: str | None = None
    """Of text files, such as ``latin-1``. None: UTF-8, UTF-16 with a mark of order, or cp1252, which is said."""
    quoting: bool | None = None
    """Of text files: whether quotes hold fields together. None: in files with tabs they are letters, and in others
    where every line is a row then alone."""
    header: Sequence[str] | str = ()
    """Names of the columns of ``events``, a file without a line of names."""
    items_header: Sequence[str] | str = ()
    """The same of ``items``."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"got the name {self.name!r}, expected a text, such as name='shop'")
        object.__setattr__(self, "name", self.name.strip())
        if self.texts is not None and not isinstance(self.texts, Mapping):
            raise ValueError(
                f"got texts {self.texts!r}, expected fields and their columns, such as texts={{'title': 'label'}}"
            )
        if self.bad_rows not in ("error", "skip"):
            raise ValueError(f"got bad_rows {self.bad_rows!r}, expected error or skip")
        keep = parsed_keep(self.keep) if isinstance(self.keep, str) else self.keep or {}
        if not isinstance(keep, Mapping):
            raise ValueError(f"got keep {keep!r}, expected columns and the values that count: {{'status': ['paid']}}")
        listed = {
            name: [values] if isinstance(values, str) else [str(one) for one in values] for name, values in keep.items()
        }
        object.__setattr__(self, "keep", listed)
        known = {"none": None, "true": True, "false": False}
        if (quoting := str(self.quoting).lower()) not in known:
            raise ValueError(f"got quoting {self.quoting!r}, expected true or false")
        object.__setattr__(self, "quoting", known[quoting])
        if isinstance(self.nobody, str):
            object.__setattr__(self, "nobody", [one.strip() for one in self.nobody.split(",")])

    @property
    def counted(self) -> dict[str, list[str]]:
        """``keep`` as columns and lists of values."""
        return cast(dict[str, list[str]], self.keep)

    @property
    def event_form(self) -> FileForm:
        """How the file of events is written."""
        return FileForm(self.delimiter, self.encoding, self.quoting, _names(self.header))

    @property
    def item_form(self) -> FileForm:
        """How the file of items is written."""
        return FileForm(self.delimiter, self.encoding, self.quoting, _names(self.items_header))


def _names(header: Sequence[str] | str) -> tuple[str, ...]:
    names = [one.strip() for one in (header.split(",") if isinstance(header, str) else header)]
    if any(names) and (len(set(names)) < len(names) or not all(names)):
        raise ValueError(f"got the header {header!r}, expected a different name for each column")
    return tuple(names) if any(names) else ()


def is_mapping(table: Any) -> bool:
    """Whether this is the path of a mapping file."""
    return isinstance(table, str | Path) and Path(table).suffix.lower() in (".yaml", ".yml")


def read_mapping(path: str | Path) -> dict[str, Any]:
    """What a mapping file says: ``events`` and ``items`` as paths, and fields of `TableOptions`.

    Raises:
        ValueError: it is no such file.
    """
    try:
        said = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read the mapping {path} ({' '.join(str(error).split())[:200]})") from error
    known = (*FILES, *IN_A_MAPPING)
    odd = sorted(set(map(str, said)) - set(known)) if isinstance(said, dict) else [type(said).__name__]
    if odd:
        raise ValueError(
            f"got {odd[0]!r} in the mapping {path}, expected some of {', '.join(known)}: fedecider import "
            "--write_mapping proposes one"
        )
    said = {name: value for name, value in said.items() if value is not None}
    for name in FILES:
        if name in said:
            said[name] = str(Path(path).parent / str(said[name]))
    return said


def columns_from(text: str) -> dict[str, Any]:
    """``user=customer,time_format=%d.%m.%Y`` or the path of a mapping file -> fields of `TableOptions`."""
    if is_mapping(text.strip()):
        return {name: value for name, value in read_mapping(text.strip()).items() if name not in FILES}
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    odd = [name for name, equals, value in pairs if not equals or not value.strip()]
    if odd:
        raise ValueError(
            f"got {odd[0]!r} of the columns, expected name=column, such as user=customer,item=sku, or a mapping"
        )
    return {name.strip(): value.strip() for name, _, value in pairs}


def write_mapping(path: Path, said: Mapping[str, Any]) -> None:
    """A proposal for a person to correct; nothing that is there is replaced.

    Raises:
        ValueError: there is such a file.
    """
    if path.exists():
        raise ValueError(
            f"got the mapping {path}, which is there already, expected a new name: move it away, or use it"
        )
    known = {name: said[name] for name in (*FILES, *IN_A_MAPPING) if said.get(name) not in (None, "", (), {}, [])}
    text = (
        "# How the tables of this company are read: what was found. Correct what is wrong, delete what is not needed.\n"
        f"# Then: fedecider import {path.name}\n"
    )
    path.write_text(text + yaml.safe_dump(known, sort_keys=False, allow_unicode=True), encoding="utf-8")
