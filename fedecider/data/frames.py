"""Own data in one line: tables of events and items, wherever they are, become prepared domains.

>>> data = from_events({"north": "north.parquet", "south": "south.parquet"}, "products.csv")
>>> data = from_events(orders, products, user="customer", item="sku", time="bought_at", public="consents")
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.data.baskets import with_orders
from fedecider.data.consent import Consent
from fedecider.data.domain import Domain
from fedecider.data.dropped import Dropped
from fedecider.data.federated import FederatedData
from fedecider.data.given import (
    NAME,
    Consents,
    Given,
    Reading,
    company_of,
    event_tables,
    item_records,
    key_within_company,
    keys_of,
    needed_column,
    plain_keys,
    text_columns,
    time_like_columns,
    usual_column,
)
from fedecider.data.import_report import ImportReport, how_keys_differ
from fedecider.data.overlap import unlike_keys
from fedecider.data.prepare import NOT_CHOSEN, PrepareConfig, prepare_domains
from fedecider.data.readers.reading import (
    ItemFields,
    ItemRecords,
    RawDomain,
    RawEvents,
    RawFile,
    ReadOptions,
    collect_items,
)
from fedecider.data.sellers import once_each
from fedecider.data.silos import share_by
from fedecider.data.table_files import FileOptions, TableFile
from fedecider.data.times import checked_clock

NO_TIMES = "none"
"""In the place of a column of times: there is none."""
DEFAULTS = {"k_core": 0}
"""Of own data, which are small, everybody with enough events to be split is kept."""


@dataclass(frozen=True)
class TableOptions:
    """How own tables are read. What is not given is guessed, and every guess is a note.

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
    """The column of times: Unix seconds, or dates and times (UTC where they name no zone); milliseconds and days as
    numbers (20260131) are known by their size. Where no column is called so, rows are oldest first, and a column of
    another name that holds times is an error, unless this is ``none``."""
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
    quantity: str | None = None
    """The column of quantities: rows of 0 or less are returns, no events. "": none."""
    order: str | None = None
    """The column of order numbers: a customer's events of one number are one basket. Where an export writes customer
    and time on the first line of an order alone, blank ones on its further lines are those of the line before. None: a
    customer's events of one time are one basket."""
    time_format: str | None = None
    """What times mean: ``s``, ``ms``, ``us`` or ``ns`` since 1970, or a format of `datetime.strptime`, such as
    ``%d/%m/%Y %H:%M``."""
    bad_rows: str = "error"
    """What a row without a key or with an unreadable time is: ``error``, or ``skip`` leaves it out and counts it."""
    delimiter: str | None = None
    """Of text files: ``,``, ``;``, tab or any character."""
    encoding: str | None = None
    """Of text files, such as ``latin-1``. None: UTF-8, or UTF-16 with a mark of order."""
    quoting: bool | None = None
    """Of text files: whether quotes hold fields together. None: in files with tabs they are letters."""
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

    def form(self, header: Sequence[str] | str) -> FileOptions:
        """How files are written."""
        return FileOptions(self.delimiter, self.encoding, self.quoting, _names(header))


COLUMNS = ("user", "item", "time", "rating", "domain", "company", "quantity", "order")
"""Columns of events."""


def from_events(events: Any, items: Any = None, *, report: ImportReport | None = None, **options: Any) -> FederatedData:
    """Prepared domains from own tables: domain name -> domain, with notes on what was guessed and left out.

    A table is a pandas or polars frame, a pyarrow table, a Hugging Face `Dataset` or `IterableDataset`, a list of
    dicts, or the path of a file: .parquet, .csv, .tsv, .txt, .jsonl or .json (an object a line), plain or .gz, or a
    folder of such parts. Files are streamed.

    Args:
        events: A table with a row for each event, oldest first where there are no times; or a dict company -> table,
            each company a client of the federation with customers of its own, who are called ``north:17``.
        items: A table with a row for each item. With several companies, one table is their common catalogue, and a dict
            company -> table gives each its own, whose items are matched by key where equal keys mostly have the same
            texts. None: the texts are in ``events``.
        report: Takes what was read and what was not, also where an error ends it. None: ``data.report`` alone.
        options: Fields of `TableOptions`, such as ``user``, ``item``, ``time``, ``company``, ``public`` and ``texts``,
            and of `PrepareConfig`, such as ``k_core`` (here 0), ``users_per_domain``, ``keep_split``, ``seed`` and
            ``catalogue``, which has items of companies matched by key whatever their texts say.

    Raises:
        ValueError: a table, a column or a value that cannot be read, with row and column; or too little is left.
    """
    asked = TableOptions(**{name: options.pop(name) for name in TableOptions.__dataclass_fields__ if name in options})
    settings = {**DEFAULTS, **options}
    _check_settings(settings, asked)
    report = report or ImportReport()
    reading = report.reading = Reading(skip=asked.bad_rows == "skip")
    notes = reading.notes
    sources = _opened_sources(_sources(events, items, asked, settings), asked, notes)
    consents = Consents() if _is_column(asked.public, sources) else None
    columns = {what: getattr(asked, what) for what in COLUMNS}
    columns["consents"] = asked.public if consents else None
    givens = [_with_columns(one, columns, notes) for one in sources.events]
    things = _item_tables(sources, givens, asked, notes)
    tables = event_tables(givens, settings.get("min_rating"), consents, reading)
    raw = {}
    for name, table in tables.items():
        raw[name], odd = with_orders(table.build(), asked.order or "")
        report.odd += odd
    notes += report.odd
    report.add_events(raw)
    consent = _consent(asked, consents, raw, sources, settings.get("seed", 0), notes)
    pool = {one.strip() for one in settings.get("public_domains", "").split(",") if one.strip()}
    if pool - set(raw):
        raise ValueError(f"got public_domains {sorted(pool - set(raw))}, expected some of {', '.join(sorted(raw))}")
    config = PrepareConfig(source="packed", raw="", domains=_order(raw, pool, sources), **settings)
    records: dict[str, list[tuple[str, ItemFields]]] = {}
    for one in things:
        records.update(item_records(one, config.duplicate_items, items is None, reading))
    if sources.companies and not sources.shared:
        config = replace(config, catalogue=config.catalogue or _matched(asked.name, records, notes))
        unlike = unlike_keys({one: [key for key, _ in own] for one, own in records.items()})
        notes += [unlike] if unlike else []
    hints = _compare_keys(raw, records, bool(asked.domain), report)

    def read(_: Path, one: str, options: ReadOptions) -> RawDomain:
        tables = [table for table in (*givens, *things) if asked.domain or table.domain == one]
        files = {path: RawFile(path, 0) for table in tables for path in table.paths}
        texts_of = records.get(one, [])
        found = RawDomain(raw[one], lambda wanted: _wanted(texts_of, wanted, options), list(files.values()))
        return found._replace(hint=hints.get(one, ""))

    share = partial(share_by, company_of=company_of) if sources.shared else None
    domains = prepare_domains(config, read=read, share=share, consent=consent)
    report.add_domains(domains)
    notes += _facts(domains)
    for domain in domains.values():
        domain.card["settings"]["source"] = "tables"
        domain.card["notes"] = list(notes)
        domain.card["bad_rows"] = {what: dict(counts) for what, counts in reading.bad.items()}
    return FederatedData(domains, notes, report)


def _opened_sources(sources: _Sources, asked: TableOptions, notes: list[str]) -> _Sources:
    """The tables with their files read so far, and what their times mean."""
    events = [_opened(one, asked.form(asked.header), notes) for one in sources.events]
    if asked.time_format:
        events = [one._replace(clock=checked_clock(asked.time_format)) for one in events]
    items = [_opened(one, asked.form(asked.items_header), notes) for one in sources.items]
    return sources._replace(events=events, items=items)


def _is_column(public: Any, sources: _Sources) -> bool:
    return isinstance(public, str) and all(public in one.column_names for one in sources.events)


HOW = ("user", "item", "time", "quantity", "order", "time_format", "delimiter", "encoding")
"""What may be said of a file of events for companies that are known already."""


def events_file(path: str | Path, how: Mapping[str, str] | None = None) -> Given:
    """A file of events with its columns: those of usual names, or as ``how`` says, by the names of `HOW`.

    Raises:
        ValueError: the file cannot be read, has no such columns, or ``how`` has other names.
    """
    how = dict(how or {})
    if odd := sorted(set(how) - set(HOW)):
        raise ValueError(f"got {odd[0]!r} of the columns, expected some of {', '.join(HOW)}, such as user=customer")
    given = _opened(Given("events", path, {}), FileOptions(how.get("delimiter"), how.get("encoding")), [])
    if form := how.get("time_format"):
        given = given._replace(clock=checked_clock(form))
    return _with_columns(given, {name: how.get(name) for name in HOW[:5]}, [])


def _names(header: Sequence[str] | str) -> tuple[str, ...]:
    names = [one.strip() for one in (header.split(",") if isinstance(header, str) else header)]
    if any(names) and (len(set(names)) < len(names) or not all(names)):
        raise ValueError(f"got the header {header!r}, expected a different name for each column")
    return tuple(names) if any(names) else ()


def _opened(given: Given, options: FileOptions, notes: list[str]) -> Given:
    """``given`` with its file, if it is one: what is guessed of it goes to ``notes``."""
    if not isinstance(given.table, str | Path):
        return given
    return given._replace(table=TableFile(Path(given.table), given.what, options, notes))


def _compare_keys(
    raw: Mapping[str, RawEvents], catalogues: Mapping[str, Any], by_domain: bool, report: ImportReport
) -> dict[str, str]:
    """Domain -> how its two tables write keys, where events have items that the catalogue does not have.

    Raises:
        ValueError: they have no key in common.
    """
    hints = {}
    for name, events in raw.items():
        known = {key for key, _ in catalogues.get(name, [])}
        missing = [key for key in events.items if key not in known]
        if not missing:
            continue
        hints[name] = how_keys_differ(missing, known)
        in_words = f" of {name}" if len(raw) > 1 else ""
        if len(missing) == len(events.items):
            raise ValueError(
                f"got {len(missing)} items{in_words} in the events and {len(known)} in the table of items, with no key "
                f"in common; {hints[name] or f'such as {min(missing)!r} and {min(known, default=None)!r}'}, expected "
                "the same keys in both"
            )
        report.add_missing(f"{len(missing):,} of {len(events.items):,} items{in_words}", min(missing), hints[name])
    return hints


class _Sources(NamedTuple):
    """The tables, without the names of their columns."""

    events: list[Given]
    items: list[Given]
    """One for all, one for each of the events, or none where texts are in the events."""
    companies: list[str]
    """In the order in which they were given; empty where they have no tables of their own."""
    shared: bool
    """Whether companies share one catalogue."""


def _check_settings(settings: Mapping[str, Any], asked: TableOptions) -> None:
    for option in ("source", "raw", "domains"):
        if option in settings:
            raise ValueError(f"got the setting {option}, expected the tables, and a name or a domain column")
    if "output" in settings:
        raise ValueError("got the setting output, expected none: write the result with .save(folder)")
    if "public_share" in settings:
        raise ValueError(f"got the setting public_share, expected public={settings['public_share']}")
    unknown = sorted(set(settings) - set(PrepareConfig.__dataclass_fields__))
    if unknown:
        raise ValueError(
            f"got the options {', '.join(unknown)}, expected fields of TableOptions, such as user, or of "
            "PrepareConfig, such as k_core"
        )
    if settings.get("min_rating") is not None and not asked.rating:
        raise ValueError("got min_rating without a rating column, expected rating='...': the column it looks at")
    if asked.public is not None and settings.get("users_per_domain") is not None:
        raise ValueError(
            "got public beside users_per_domain, which samples private users and makes all others public, expected one"
        )


def _sources(events: Any, items: Any, asked: TableOptions, settings: Mapping[str, Any]) -> _Sources:
    name, company = asked.name, asked.company
    if not _is_by_name(events):
        if _is_by_name(items):
            raise ValueError("got items by company with one table of events, expected events by company too")
        if company and settings.get("silos", 1) != 1:
            raise ValueError(f"got silos {settings['silos']} beside a company column, which shares users out already")
        given = [] if items is None else [Given("items", items, {}, name)]
        return _Sources([Given("events", events, {}, name)], given, [], bool(company))
    companies = list(events)
    odd = [one for one in companies if not isinstance(one, str) or not NAME.fullmatch(one)]
    if odd or not companies:
        raise ValueError(
            f"got {odd[0] if odd else 'no company'!r} as the name of a company, expected letters, digits, '_', '-' and "
            "'.' only (it names a folder)"
        )
    if asked.domain or company:
        raise ValueError("got a domain or company column beside events by company, expected one of them")
    own = items is None or _is_by_name(items)
    if _is_by_name(items) and set(items) != set(companies):
        raise ValueError(f"got items of {', '.join(items)} and events of {', '.join(companies)}, expected the same")
    if not own and settings.get("silos", 1) != 1:
        raise ValueError(f"got silos {settings['silos']} beside companies, which share users out already")
    if not own and name in companies:
        raise ValueError(f"got a company and the catalogue of all called {name!r}, expected another name='...'")
    tables = [Given(f"events of {one}", events[one], {}, one if own else name, one) for one in companies]
    if items is None:
        return _Sources(tables, [], companies, shared=False)
    if own:
        things = [Given(f"items of {one}", items[one], {}, one) for one in companies]
        return _Sources(tables, things, companies, shared=False)
    return _Sources(tables, [Given("items", items, {}, name)], companies, shared=True)


SAME_TEXT = 0.5
"""Words that two texts have in common, of all words in them, from which on they are of one item."""
SAME_ITEMS = 0.9
"""Share of keys in common that have such texts, from which on keys of two companies are of one kind, like barcodes."""


def _matched(name: str, catalogues: Mapping[str, list[tuple[str, ItemFields]]], notes: list[str]) -> str:
    """The catalogue of companies with tables of their own: ``name`` where equal keys are the same items; else none."""
    words = {one: {key: _words(fields) for key, fields in records} for one, records in catalogues.items()}
    alike: list[str] = []
    odd: list[str] = []
    for one, other in combinations(words, 2):
        common = words[one].keys() & words[other].keys()
        same = sum(_are_same(words[one][key], words[other][key]) for key in common)
        if common:
            (alike if same >= SAME_ITEMS * len(common) else odd).append(f"{one} and {other} {len(common):,}")
    if odd:
        notes.append(
            f"keys in common, but not their texts: {'; '.join(odd)}. They are taken for different items; where they "
            "are the same ones, say what keys are (catalogue='ean')"
        )
    elif alike:
        notes.append(f"items matched by key, which have the same texts: {'; '.join(alike)}")
    if alike and not odd and name in catalogues:
        raise ValueError(f"got a company and the catalogue of all called {name!r}, expected another name='...'")
    return name if alike and not odd else ""


def _words(fields: ItemFields) -> frozenset[str]:
    return frozenset(" ".join(fields.values()).lower().split())


def _are_same(one: frozenset[str], other: frozenset[str]) -> bool:
    return bool(one) and len(one & other) >= SAME_TEXT * len(one | other)  # no text says nothing


def _is_by_name(tables: Any) -> bool:
    """Whether these are several tables by name; the splits of a Hugging Face data set are not."""
    return isinstance(tables, Mapping) and not hasattr(tables, "with_format")


def _with_columns(given: Given, columns: Mapping[str, str | None], notes: list[str]) -> Given:
    """``given`` with the columns that are asked for, and those of users, items and times that have usual names."""
    found = {what: their for what, their in columns.items() if their and (what, their) != ("time", NO_TIMES)}
    guessed = {what: needed_column(given, what) for what in ("user", "item") if what not in found}
    if columns["quantity"] is None and (their := usual_column(given, "quantity")):
        guessed["quantity"] = their
    if "time" not in found:
        is_none = columns["time"] == NO_TIMES
        if not is_none and (their := usual_column(given, "time")):
            guessed["time"] = their
        elif not is_none and (like := time_like_columns(given, {*found.values(), *guessed.values()})):
            name, example = next(iter(like.items()))
            raise ValueError(
                f"got {given.what} without a column that is called as times usually are, but {name!r} holds times "
                f"({example}), expected the column's name: time={name!r} (--time), or time={NO_TIMES!r} where it is "
                "not the time of the event and rows are oldest first"
            )
        else:
            notes.append(f"{given.what}: no column of times, rows are taken as oldest first")
    if guessed:
        notes.append(f"{given.what}: {_listed(guessed)}")
    read = {**found, **guessed}
    for one, other in combinations([what for what in read if what != "consents"], 2):
        if read[one] == read[other]:
            raise ValueError(
                f"got the column {read[one]!r} of the {given.what} as {one} and as {other}, expected a column for each"
            )
    return given._replace(columns=read)


def _listed(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{what} is column {their!r}" for what, their in columns.items())


def _item_tables(sources: _Sources, givens: Sequence[Given], asked: TableOptions, notes: list[str]) -> list[Given]:
    """The tables of items, or those of events in their place, with their columns."""
    of_domain = {"domain": asked.domain} if asked.domain else {}
    found = []
    for number, things in enumerate(sources.items or givens):
        names, key = things.column_names, givens[number].columns["item"]
        chosen = key if key in names or asked.item else (usual_column(things, "item") or _item_number(things))
        others = [chosen] if sources.items else list(givens[number].columns.values())
        fields = text_columns(things, asked.texts, others, of_events=not sources.items)
        guessed = {what: their for what, their in {"item": chosen, **fields}.items() if their not in (what, key)}
        if guessed and asked.texts is None and sources.items:
            notes.append(f"{things.what}: {_listed(guessed)}")
        what = things.what if sources.items else f"{things.what}, as items"
        found.append(things._replace(what=what, columns={"item": chosen, **of_domain, **fields}))
        used = {*found[-1].columns.values()} | (set() if sources.items else {*givens[number].columns.values()})
        _note_unused(things, used, notes)
    if sources.items:
        for given in givens:
            _note_unused(given, set(given.columns.values()), notes)
    return found


def _note_unused(given: Given, used: Collection[str], notes: list[str]) -> None:
    if unused := [one for one in given.column_names if one not in used]:
        notes.append(f"{given.what}: unused columns: {', '.join(unused)[:300]}")


def _item_number(things: Given) -> str:
    return "id" if "id" in things.column_names else needed_column(things, "item")


def _consent(
    asked: TableOptions,
    consents: Consents | None,
    raw: Mapping[str, RawEvents],
    sources: _Sources,
    seed: int,
    notes: list[str],
) -> Consent:
    public, by_company, nobody = asked.public, bool(sources.companies or asked.company), Consent(seed=seed)
    if by_company:
        nobody = nobody._replace(plain_key=key_within_company)
    if public is None:
        return nobody
    if isinstance(public, int | float):
        if isinstance(public, bool) or not 0.0 <= public < 1.0:
            raise ValueError(f"got public {public}, expected a share of customers, at least 0 and below 1")
        return nobody._replace(share=float(public))
    if consents is not None:
        return nobody._replace(named=consents.public)
    known = {key for events in raw.values() for key in events.users}
    if _is_by_name(public):
        if not by_company:
            raise ValueError("got public by company without companies, expected the keys of customers")
        wanted = [f"{one}:{key}" for one, keys in public.items() for key in _keys(keys, asked.user)]
    else:
        wanted = _with_companies(_keys(public, asked.user), known) if by_company else _keys(public, asked.user)
    missing = sorted(set(wanted) - known)
    if wanted and len(missing) == len(set(wanted)):
        raise ValueError(
            f"got {len(missing)} public customers such as {missing[0]!r}, of whom none has an event, expected keys as "
            f"in the events, such as {min(known, default='')!r}"
        )
    if missing:
        notes.append(f"{len(missing)} of {len(set(wanted))} public customers have no event, such as {missing[0]!r}")
    return nobody._replace(named=frozenset(wanted))


def _with_companies(keys: Sequence[str], known: Collection[str]) -> list[str]:
    """``17`` as ``north:17``, where north alone has a customer of this key."""
    full = defaultdict(list)
    for one in known:
        full[key_within_company(one)].append(one)
    for key in keys:
        if key not in known and len(full[key]) > 1:
            raise ValueError(
                f"got the public customer {key!r}, who may be {' or '.join(sorted(full[key]))}, expected one of these: "
                "two companies' customers of the same key are two persons. Give a dict company -> keys"
            )
    return [full[key][0] if key not in known and full[key] else key for key in keys]


def _keys(public: Any, user: str | None) -> list[str]:
    """The customers' keys in a collection, a table or a file."""
    is_list = any(hasattr(public, name) for name in ("tolist", "to_list"))  # an array or a series
    is_list |= isinstance(public, Collection) and not isinstance(public, str | Mapping)
    is_table = isinstance(public, list) and bool(public) and isinstance(public[0], Mapping)
    is_table |= hasattr(public, "columns") or hasattr(public, "column_names")
    if is_list and not is_table:
        return plain_keys(public, "public customers")
    given = Given("public customers", public, {})
    if isinstance(public, str) and not Path(public).suffix:
        raise ValueError(
            f"got public {public!r}, which is no column of the events (of every company), expected one of their "
            "columns, a file of customers' keys, the keys themselves, or a share"
        )
    names = given.column_names
    column = user if user in names else names[0] if len(names) == 1 else needed_column(given, "user")
    return keys_of(given._replace(columns={"user": column}))


def _order(raw: Mapping[str, Any], pool: Collection[str], sources: _Sources) -> list[str]:
    """The domains of the clients: companies as they were given, others by name."""
    return [one for one in (sources.companies if not sources.shared else None) or sorted(raw) if one not in pool]


def _facts(domains: Mapping[str, Domain]) -> list[str]:
    """What was left out, and who is public."""
    facts, catalogues = [], once_each(domains)
    for name, domain in catalogues.items():
        lost = {why: counts for why, counts in domain.card["dropped"].items() if why != NOT_CHOSEN}
        if any(any(counts.values()) for counts in lost.values()):
            facts.append(f"{name}: {Dropped(lost)}")
    num_public = len({user for domain in domains.values() for user in domain.public.users})
    num_private = len({user for domain in domains.values() for user in domain.clients.users})
    if num_public:
        return [*facts, f"{num_public:,} of {num_public + num_private:,} customers are public"]
    return [
        *facts,
        "nobody is public: the backbone learns from item texts and from histories drawn along them "
        "(pretrain.samples.synthetic_share above 0)",
    ]


def _wanted(records: list[tuple[str, ItemFields]], wanted: Collection[str], options: ReadOptions) -> ItemRecords:
    return collect_items(records, wanted, options, Path("items"), allow_same=True, keep_unused=True)
