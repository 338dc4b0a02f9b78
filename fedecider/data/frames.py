"""Own data in one line: tables of events and items, wherever they are, become prepared domains.

>>> data = from_events({"north": "north.parquet", "south": "south.parquet"}, "products.csv")
>>> data = from_events(orders, products, user="customer", item="sku", time="bought_at", public="consents")
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.data.baskets import with_orders
from fedecider.data.columns import bare, candidates, find_columns, role_of, text_columns
from fedecider.data.consent import Consent
from fedecider.data.constant_words import CARD, in_words
from fedecider.data.domain import Domain
from fedecider.data.dropped import Dropped
from fedecider.data.events import Purchases, Reading, Source, cleaned, event_source, item_records, listed
from fedecider.data.federated import FederatedData
from fedecider.data.import_report import ImportReport
from fedecider.data.keys import how_keys_differ
from fedecider.data.mapping import FILES, TableOptions, is_mapping, read_mapping
from fedecider.data.matching import unmatched
from fedecider.data.names import check_name
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
from fedecider.data.sample import PLANTED
from fedecider.data.sample import SOURCE as SAMPLE
from fedecider.data.sellers import once_each
from fedecider.data.silos import share_by
from fedecider.data.tables import Question, Table, open_table

DEFAULTS = {"k_core": 0, "missing_text": "drop"}
"""Of own data, which are small, everybody with enough events to be split is kept."""


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
    given = {name: options.pop(name) for name in TableOptions.__dataclass_fields__ if name in options}
    events, items, said = _said(events, items)
    asked = TableOptions(**{**(said.get("", {})), **given})
    settings = {**DEFAULTS, **options}
    _check_settings(settings, asked)
    report = report or ImportReport()
    reading = report.reading = Reading(skip=asked.bad_rows == "skip")
    notes = reading.notes
    sources = _sources(events, items, asked, settings)
    options_of = {one: TableOptions(**{**said.get(one, {}), **given}) for one in ("", *sources.companies)}
    with _proposing(report, events, items):
        givens, things = _opened(sources, options_of, reading)
    if report.mapping is not None:
        report.mapping.update(_found(givens[0], things[0]))
    records: dict[str, list[tuple[str, ItemFields]]] = {}
    duplicates = settings.get("duplicate_items", "error")
    for one in things:
        records.update(item_records(one, reading, duplicates, items is None))
    purchases = Purchases(reading, settings.get("min_rating"), [key for own in records.values() for key, _ in own])
    with _proposing(report, events, items):
        for one in givens:
            purchases.add(one)
    raw = {}
    for name, table in purchases.by_domain().items():
        raw[name], odd = with_orders(table, givens[0].columns.get("order", ""), "order" in givens[0].guessed)
        reading.first += odd
    report.add_events(raw)
    consent = _consent(
        asked,
        purchases.public if "consents" in givens[0].columns else None,
        raw,
        sources,
        settings.get("seed", 0),
        reading.first,
    )
    pool = {one.strip() for one in settings.get("public_domains", "").split(",") if one.strip()}
    if pool - set(raw):
        raise ValueError(f"got public_domains {sorted(pool - set(raw))}, expected some of {', '.join(sorted(raw))}")
    config = PrepareConfig(source="packed", raw="", domains=_order(raw, pool, sources), **settings)
    if sources.companies and not sources.shared:
        config = replace(config, catalogue=config.catalogue or _matched(asked.name, records, reading))
        unlike = unlike_keys({one: [key for key, _ in own] for one, own in records.items()})
        notes += [unlike] if unlike else []
    has_texts = any(any(text.values()) for own in records.values() for _, text in own)
    hints = _compare_keys(raw, records, report) if sources.items else {}
    if not has_texts:
        config = replace(config, missing_text="keep")
        reading.first.append(
            "no item has a text: keys stand in the place of titles, which tell a model nothing (--texts title=...)"
        )

    def read(_: Path, one: str, options: ReadOptions) -> RawDomain:
        tables = [table for table in (*givens, *things) if asked.domain or table.domain == one]
        files = {path: RawFile(path, 0) for table in tables for path in table.table.paths}
        texts_of = records.get(one, [])
        found = RawDomain(raw[one], lambda wanted: _wanted(texts_of, wanted, options), list(files.values()))
        return found._replace(hint=hints.get(one, ""))

    share = partial(share_by, company_of=company_of) if sources.shared else None
    domains = prepare_domains(config, read=read, share=share, consent=consent)
    report.add_domains(domains)
    notes += _facts(domains)
    if same := unmatched(domains):
        reading.first.append(f"{same}: match them before training (fedecider match)")
    for domain in domains.values():
        planted = all(key.startswith(PLANTED) for key in domain.own_keys)
        domain.card["settings"]["source"] = SAMPLE if planted else "tables"
        domain.card["notes"] = [*report.first, *notes]
        domain.card["bad_rows"] = {what: dict(counts) for what, counts in reading.bad.items()}
    return FederatedData(domains, [*report.first, *notes], report)


def company_of(user: str) -> str:
    """The company in front of a key."""
    return user.partition(":")[0]


def key_within_company(user: str) -> str:
    """The key behind the company, as it was given."""
    return user.partition(":")[2]


def _said(events: Any, items: Any) -> tuple[Any, Any, dict[str, dict[str, Any]]]:
    """Tables in the place of mapping files, and what these say, by company."""
    if _is_by_name(events):
        mappings = {one: read_mapping(table) for one, table in events.items() if is_mapping(table)}
        said = {
            one: {name: value for name, value in mapping.items() if name not in FILES}
            for one, mapping in mappings.items()
        }
        own = {one: mapping.get("items") for one, mapping in mappings.items()}
        events = {one: mappings[one].get("events") if one in mappings else table for one, table in events.items()}
        if items is None and any(own.values()):
            items = next(iter(own.values())) if len(set(own.values())) == 1 else own
        return events, items, said
    if not is_mapping(events):
        return events, items, {}
    mapping = read_mapping(events)
    if "events" not in mapping:
        raise ValueError(f"got the mapping {events} without events, expected the table: events: orders.csv")
    said = {"": {name: value for name, value in mapping.items() if name not in FILES}}
    return mapping["events"], mapping.get("items") if items is None else items, said


@contextmanager
def _proposing(report: ImportReport, events: Any, items: Any) -> Iterator[None]:
    """A question about a table goes to the mapping file that is wanted, with its proposal."""
    if report.mapping is None:
        yield
        return
    tables = (("events", events), ("items", items))
    report.mapping.update({name: str(table) for name, table in tables if isinstance(table, str | Path)})
    try:
        yield
    except Question as question:
        report.mapping.update(question.proposal)
        raise


def _opened(
    sources: _Sources, options_of: Mapping[str, TableOptions], reading: Reading
) -> tuple[list[Source], list[Source]]:
    """The tables of events and of items with their columns; without the latter the events in their place."""
    items = [open_table(one.table, one.what, options_of[one.company].item_form) for one in sources.items]
    tables = [open_table(one.table, one.what, options_of[one.company].event_form) for one in sources.events]
    public = options_of[""].public
    is_column = isinstance(public, str) and all(public in table.column_names for table in tables)
    givens = []
    columns = {name for table in tables for name in table.column_names}
    for number, (one, table) in enumerate(zip(sources.events, tables, strict=True)):
        of_items = items[min(number, len(items) - 1)].column_names if items else ()
        consents = public if is_column else ""
        options = options_of[one.company]
        elsewhere = columns.difference(table.column_names)  # one table may have a column of states, another none
        keep = {name: values for name, values in options.counted.items() if name not in elsewhere}
        options = replace(options, keep=keep)
        givens.append(event_source(table, options, one.domain, one.company, consents, of_items))
    return givens, _item_tables(sources, items, givens, reading)


def _found(source: Source, things: Source) -> dict[str, Any]:
    """What was found of one company's tables, for a mapping file."""
    texts = {name: their for name, their in things.columns.items() if name not in ("item", "domain")}
    columns = {name: their for name, their in source.columns.items() if name not in ("consents", "clock")}
    if "clock" in source.columns:
        columns["time"] = f"{columns['time']}+{source.columns['clock']}"
    said = {name: value for name, value in vars(source.options).items() if name not in ("name", "public") and value}
    key = things.columns["item"]
    return {**said, **columns, "items_key": key if key != columns["item"] else None, "texts": texts}


HOW = tuple(
    name for name in TableOptions.__dataclass_fields__ if name not in ("name", "public", "items_header", "texts")
)
"""What may be said of a file of events for companies that are known already."""


class KnownCompany(NamedTuple):
    """Events of a company whose items and customers are known."""

    events: RawEvents
    said: list[str]
    """What has to be said of them, in sentences."""
    paths: list[Path]
    """The files that were read."""


def events_of(table: Any, how: Mapping[str, Any] | None = None, company: str = "") -> KnownCompany:
    """The events of one table for a company that is known already, and what has to be said of them.

    Args:
        table: As `from_events` takes it; or a mapping file, which names it.
        how: Fields of `TableOptions`: columns and the form of the file; else what they usually are.
        company: Whose they are: rows of a column ``company`` have to be its.

    Raises:
        ValueError: it cannot be read, has no such columns, ``how`` has other names, or rows are another company's.
    """
    said = dict(how or {})
    if odd := sorted(set(said) - set(TableOptions.__dataclass_fields__)):
        raise ValueError(f"got {odd[0]!r} of the columns, expected some of {', '.join(HOW)}, such as user=customer")
    table, _, mapping = _said(table, None)
    options = TableOptions(**{**mapping.get("", {}), **said})
    opened = open_table(table, "events", options.event_form)
    if company:
        _refuse_others(opened, company)
    source, reading = event_source(opened, options), Reading(skip=True)
    purchases = Purchases(reading)
    purchases.add(source)
    if options.bad_rows == "error":
        reading.refuse_bad()
    (raw,) = purchases.by_domain().values()
    raw, odd_orders = with_orders(raw, source.columns.get("order", ""), "order" in source.guessed)
    return KnownCompany(raw, [*reading.first, *reading.bad_in_words(), *odd_orders], opened.paths)


def _refuse_others(table: Table, company: str) -> None:
    """A table that says whose customer each one is has to be of one company: equal keys are two persons in two."""
    for name in [name for name in table.column_names if bare(name) == "company"]:
        table.load({"company": name})
        known = [one for (one,) in table.query("SELECT DISTINCT company FROM rows ORDER BY company")]
        if others := [one for one in known if not f".{company}".endswith(f".{one}")]:
            raise ValueError(
                f"got events of the company {others[0]} in {table.paths[0] if table.paths else 'the table'}, expected "
                f"those of {company} alone: equal customer keys of two companies are two persons. Leave its rows out, "
                "or the column where it means something else"
            )


def _compare_keys(raw: Mapping[str, RawEvents], catalogues: Mapping[str, Any], report: ImportReport) -> dict[str, str]:
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


class _Given(NamedTuple):
    """A table that is not opened yet."""

    what: str
    table: Any
    domain: str
    company: str = ""


class _Sources(NamedTuple):
    """The tables, without the names of their columns."""

    events: list[_Given]
    items: list[_Given]
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
    check_name(name, "catalogue")
    if not _is_by_name(events):
        if _is_by_name(items):
            raise ValueError("got items by company with one table of events, expected events by company too")
        if company and settings.get("silos", 1) != 1:
            raise ValueError(f"got silos {settings['silos']} beside a company column, which shares users out already")
        given = [] if items is None else [_Given("items", items, name)]
        return _Sources([_Given("events", events, name)], given, [], bool(company))
    companies = list(events)
    if not companies:
        raise ValueError("got events by company of no company, expected a table of each: {'north': orders, ...}")
    for one in companies:
        check_name(one)
    if asked.domain or company:
        raise ValueError("got a domain or company column beside events by company, expected one of them")
    own = items is None or _is_by_name(items)
    if _is_by_name(items) and set(items) != set(companies):
        raise ValueError(f"got items of {', '.join(items)} and events of {', '.join(companies)}, expected the same")
    if not own and settings.get("silos", 1) != 1:
        raise ValueError(f"got silos {settings['silos']} beside companies, which share users out already")
    if not own and name in companies:
        raise ValueError(f"got a company and the catalogue of all called {name!r}, expected another name='...'")
    tables = [_Given(f"events of {one}", events[one], one if own else name, one) for one in companies]
    if items is None:
        return _Sources(tables, [], companies, shared=False)
    if own:
        things = [_Given(f"items of {one}", items[one], one, one) for one in companies]
        return _Sources(tables, things, companies, shared=False)
    return _Sources(tables, [_Given("items", items, name)], companies, shared=True)


SAME_TEXT = 0.5
"""Words that two texts have in common, of all words in them, from which on they are of one item."""
SAME_ITEMS = 0.9
"""Share of keys in common that have such texts, from which on keys of two companies are of one kind, like barcodes."""


def _matched(name: str, catalogues: Mapping[str, list[tuple[str, ItemFields]]], reading: Reading) -> str:
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
        reading.first.append(
            f"keys in common, but not their texts: {'; '.join(odd)}. They are taken for different items; where they "
            "are the same ones, say what keys are (catalogue='ean')"
        )
    elif alike:
        reading.notes.append(f"items matched by key, which have the same texts: {'; '.join(alike)}")
    if alike and not odd and name in catalogues:
        raise ValueError(f"got a company and the catalogue of all called {name!r}, expected another name='...'")
    return name if alike and not odd else ""


def _words(fields: ItemFields) -> frozenset[str]:
    """Of the title, since categories are in each company's own language; without a title of all its texts."""
    return frozenset((fields.get("title") or " ".join(fields.values())).lower().split())


def _are_same(one: frozenset[str], other: frozenset[str]) -> bool:
    return bool(one) and len(one & other) >= SAME_TEXT * len(one | other)  # no text says nothing


def _is_by_name(tables: Any) -> bool:
    """Whether these are several tables by name; the splits of a Hugging Face data set are not."""
    return isinstance(tables, Mapping) and not hasattr(tables, "with_format")


def _item_tables(sources: _Sources, items: Sequence[Table], givens: Sequence[Source], reading: Reading) -> list[Source]:
    """The tables of items, or those of events in their place, with their columns."""
    found = []
    for number, source in enumerate(givens):
        if sources.items and number >= len(sources.items):
            break
        given = sources.items[number] if sources.items else None
        options, table = source.options, items[number] if given else source.table
        key = source.columns["item"]
        chosen = options.items_key or (key if key in table.column_names else _items_key(table, source))
        used = [chosen] if given else list(source.columns.values())
        fields, said = text_columns(table, options.texts, chosen, used, of_events=not given)
        reading.first += said
        guessed = {what: their for what, their in {"item": chosen, **fields}.items() if their not in (what, key)}
        if guessed and options.texts is None and given:
            reading.notes.append(f"{table.what}: {listed(guessed)}")
        of_domain = {"domain": options.domain} if options.domain else {}
        domain = given.domain if given else source.domain
        found.append(Source(table, options, {"item": chosen, **of_domain, **fields}, domain, source.company))
        _note_unused(table.what, table.column_names, {*used, *fields.values(), *of_domain.values()}, reading.notes)
    if sources.items:
        for source in givens:
            used = [*source.columns.values(), *source.options.counted]
            _note_unused(source.what, source.table.column_names, set(used), reading.notes)
    return found


def _items_key(table: Any, source: Source) -> str:
    """The column of a table of items that holds the keys of the events: by its name, else by its values."""
    named = candidates(table, "item") + [name for name in table.column_names if name.lower() == "id"]
    sample = set(source.table.sample(1000).get(source.columns["item"], []))
    values = table.sample()
    common = {name: len(sample & set(values.get(name, ()))) for name in dict.fromkeys([*named, *table.column_names])}
    best = max(common, key=lambda name: (common[name], name in named), default="")
    if common.get(best):
        return best
    if named:
        return named[0]
    raise ValueError(
        f"got {table.what} with the columns {', '.join(table.column_names)[:300]}, of which none is called as items' "
        f"keys are or holds keys of the events, such as {min(sample, default='')!r}, expected one: items_key='...' "
        "(--items_key)"
    )


def _note_unused(what: str, names: Sequence[str], used: Collection[str], notes: list[str]) -> None:
    if unused := [name for name in dict.fromkeys(names) if name not in used]:
        notes.append(f"{what}: unused columns: {', '.join(unused)[:300]}")


def _consent(
    asked: TableOptions,
    consents: Mapping[str, bool] | None,
    raw: Mapping[str, RawEvents],
    sources: _Sources,
    seed: int,
    first: list[str],
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
        return nobody._replace(named=frozenset(user for user, is_public in consents.items() if is_public))
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
        first.append(f"{len(missing)} of {len(set(wanted))} public customers have no event, such as {missing[0]!r}")
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
    if isinstance(public, str) and not Path(public).suffix:
        raise ValueError(
            f"got public {public!r}, which is no column of the events (of every company), expected one of their "
            "columns, a file of customers' keys, the keys themselves, or a share"
        )
    return keyed_table(public, "public customers", "user", user)[0]


def plain_keys(values: Any, what: str) -> list[str]:
    """Keys from a list, set, array or series as texts. ``ValueError`` for one that is none."""
    tolist = getattr(values, "tolist", None) or getattr(values, "to_list", None)
    found = list(tolist() if tolist else values)
    if odd := [value for value in found if not isinstance(value, str | int | float) or isinstance(value, bool)]:
        raise ValueError(f"got {odd[0]!r} among the {what}, expected text or whole numbers")
    texts = [str(int(value)) if isinstance(value, float) and value == int(value) else str(value) for value in found]
    return keyed_table([{"user": text} for text in texts], what, "user")[0] if texts else []


def keyed_table(
    table: Any, what: str, role: str = "item", column: str | None = None, beside: Collection[str] = ()
) -> tuple[list[str], list[str | None]]:
    """The keys in a table or a file, in its order, and the values of a column ``beside`` them.

    Args:
        table: As `from_events` takes it; of a mapping file its items.
        what: What it holds, for messages.
        role: ``item`` or ``user``: whose keys are looked for, by the names that such columns usually have.
        column: The column of keys, where it is known and there.
        beside: What the other column may be called, in small letters; empty: none.

    Raises:
        ValueError: there is no such column, or a row without a key.
    """
    options = TableOptions()
    if is_mapping(table):
        said = read_mapping(table)
        table, column = said.pop("items", said.get("events")), said.get("items_key") or said.get("item")
        options = TableOptions(**{name: value for name, value in said.items() if name not in FILES})
    opened = open_table(table, what, options.item_form)
    names = opened.column_names
    if column not in names:
        alone = names[0] if len(names) == 1 else "key" if "key" in names and role == "item" else None
        column = alone or find_columns(opened, {role: None}).by_role[role]
    other = next((name for plain in beside for name in names if bare(name) == plain), None)
    if beside and other is None:
        raise ValueError(
            f"got the {what} {table} with the columns {', '.join(names)}, expected one beside the keys called "
            f"{', '.join(beside)}"
        )
    opened.load({"key": column, **({"other": other} if other else {})})
    rows = opened.query(
        f"SELECT {cleaned('key', opened.kind)}, {'other' if other else 'NULL'} FROM rows ORDER BY rowid"
    )
    keys = [key for key, _ in rows]
    if None in keys:
        raise ValueError(
            f"got no {role} in row {keys.index(None) + 1} of the {what} (column {column!r}), expected one in every row"
        )
    if len(names) == 1 and opened.paths and role_of(column) != role and column != "key":
        keys = [column, *keys]  # its name may be a key: better one unknown key than one that is passed over
    return keys, [value for _, value in rows]


def _order(raw: Mapping[str, Any], pool: Collection[str], sources: _Sources) -> list[str]:
    """The domains of the clients: companies as they were given, others by name."""
    return [one for one in (sources.companies if not sources.shared else None) or sorted(raw) if one not in pool]


def _facts(domains: Mapping[str, Domain]) -> list[str]:
    """What was left out, and who is public."""
    facts, catalogues = [], once_each(domains)
    for name, domain in catalogues.items():
        if constant := domain.card.get(CARD):
            facts.append(f"{name}: left out of all texts, as every item has it: {in_words(constant)}")
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
    return collect_items(records, wanted, options, Path("items"), keep_unused=True)
