"""Readers of public layouts, each a map in ``layouts.yaml``: files, how a line is cut, and what its columns are for us.

DuckDB reads a file, so that gigabytes stay outside of Python. Every line is a row: no layout has line breaks in its
fields, and so a stray quote costs one line. A line that is no row is counted as bad, with its number and the reason.
"""

from __future__ import annotations

import csv
import json
import time
from ast import literal_eval
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import duckdb
import numpy as np
import yaml
from duckdb.func import SPECIAL

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.dropped import Dropped
from fedecider.data.readers import reading
from fedecider.data.readers.reading import ItemFields, ItemRecords, RawDomain, RawEvents, RawFile, ReadOptions, clean
from fedecider.data.tables import FileForm, Table, literal, open_table, quoted

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS = (*reading.DEFAULT_TEXT_FIELDS, *reading.OTHER_TEXT_FIELDS)
IN_LINES = ("rows of other domains", "users listed without items")
"""Reasons that are counted in lines, others in events."""
BATCH = 100_000
MACROS = f"""
CREATE TEMP MACRO filled(x) AS nullif(x, '');
CREATE TEMP MACRO whole(x) AS CASE WHEN regexp_full_match(x, ' *[+-]?[0-9]+ *') THEN TRY_CAST(x AS BIGINT) END;
CREATE TEMP MACRO id(x) AS CAST(whole(x) AS VARCHAR);
CREATE TEMP MACRO ids(x) AS CASE WHEN list_bool_and(list_transform(x, lambda one: whole(one) IS NOT NULL))
    IS DISTINCT FROM false THEN list_transform(x, lambda one: id(one)) END;
CREATE TEMP MACRO words(x) AS list_filter(regexp_split_to_array(x, '\\s+'), lambda one: one <> '');
CREATE TEMP MACRO number(x) AS CASE WHEN isfinite(TRY_CAST(x AS DOUBLE)) THEN TRY_CAST(x AS DOUBLE) END;
CREATE TEMP MACRO seconds(x) AS CASE WHEN x >= 0 AND x < {reading.MAX_TIME} THEN CAST(x AS BIGINT) END;
CREATE TEMP MACRO known(x) AS CASE WHEN x < 0 THEN {UNKNOWN_TIME} ELSE seconds(x) END;
CREATE TEMP MACRO texts(x, path) AS CASE WHEN json_type(x, path) = 'ARRAY' THEN json_extract_string(x, path || '[*]')
    WHEN json_type(x, path) <> 'NULL' THEN [json_extract_string(x, path)] ELSE [] END;
CREATE TEMP MACRO fields(x) AS list_transform(regexp_extract_all(',' || x, ',("(?:[^"]|"")*"|[^",][^,]*|)', 1),
    lambda one: CASE WHEN starts_with(one, '"') THEN replace(one[2:-2], '""', '"') ELSE one END);
CREATE TEMP MACRO csv_cut(x) AS CASE WHEN NOT contains(x, '"') THEN string_split(x, ',')
    WHEN regexp_full_match(',' || x, '(,("([^"]|"")*"|[^",][^,]*|))*') THEN fields(x) END;
"""
_STATES = (
    "to-read currently-reading read favorites favourites owned owned-books books-i-own i-own kindle ebook ebooks "
    "library my-books my-library default all-time-favorites did-not-finish dnf abandoned wish-list to-buy re-read "
    "reviewed own book-club audiobook audiobooks audio favorite-books maybe home-library"
)
STATE_SHELVES = frozenset(_STATES.split())
"""Shelves of book readers that say what was done with a book, not what it is about."""
NUM_SHELVES = 5


class Layout(NamedTuple):
    """The form of one kind of file, as ``layouts.yaml`` explains."""

    files: Sequence[str]
    cut: str
    columns: Mapping[str, str]
    header: Sequence[str] = ()
    is_named: bool = False
    """Whether the first line has the names of the columns."""
    left_out: Mapping[str, str] = {}
    lookups: Mapping[str, Sequence[str]] = {}


class Source(NamedTuple):
    """The files of one kind of data set."""

    events: list[Layout]
    """The first of which there is a file."""
    items: list[Layout]
    joined: dict[str, Layout]
    """Files that turn keys into words; read where they are there."""
    later: Sequence[str] = ()
    """More files of events, which come after the first one."""
    own_users: bool = False
    """Whether a user key, a small number, is another user in another data set: the domain's name is put before it."""
    stems: Mapping[str, str] = {}
    """Short names of domains -> what the files call them."""
    prefix: str = ""
    """Of the files that show which domains there are."""


def read_layouts() -> dict[str, Source]:
    """All public layouts by name."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        name: Source(
            **{key: value for key, value in one.items() if key not in ("events", "items", "joined")},
            events=[Layout(**layout) for layout in one["events"]],
            items=[Layout(**layout) for layout in one.get("items", ())],
            joined={key: Layout(**layout) for key, layout in one.get("joined", {}).items()},
        )
        for name, one in content.items()
    }


class Opened(NamedTuple):
    """A file of one layout, for one domain."""

    file: RawFile
    layout: Layout
    domain: str
    options: ReadOptions

    def batches(self, dropped: Dropped) -> Iterator[pa.RecordBatch]:
        """The rows in our columns; a line that is none is counted, and so is a row that is left out."""
        import pyarrow.compute as pc  # only where it is used: --help does without

        file, left_out = self.file, dict(self.layout.left_out)
        table = self._table()
        if self.options.min_rating is not None and "rating" in self.layout.columns:
            left_out[reading.BELOW_RATING] = f"rating < {float(self.options.min_rating)!r}"
        shape = "no JSON object" if self.layout.cut == "JSON" else f"not {len(self.layout.header)} columns"
        shown = time.monotonic()
        for batch in self._stream(table, self._sql(table, left_out)):
            for entry in batch.column("why").value_counts().to_pylist():
                if entry["values"] == "blank":
                    file.num_blank += entry["counts"]
                elif entry["values"] in left_out:
                    unit = "lines" if entry["values"] in IN_LINES else "events"
                    dropped.add(entry["values"], **{unit: entry["counts"]})
            is_bad = pc.fill_null(pc.starts_with(batch.column("why"), "!"), False)
            for row in batch.select(["number", "why", "start"]).filter(is_bad).to_pylist():
                why = shape if row["why"] == "!shape" else f"no {row['why'][1:]}"
                file.add_bad_line(row["number"], f"{why} in {row['start']!r}")
            if file.log and len(batch) and time.monotonic() - shown >= reading.LOG_EVERY_S:
                shown, number = time.monotonic(), batch.column("number")[-1].as_py()
                share = number / max(1, table.parts[0].num_lines)
                file.log(f"{file.path.name}: {number:,} lines read ({share:.0%} of the file)")
            yield batch.filter(pc.is_null(batch.column("why")))
        rejected = "SELECT line, any_value(error_type) FROM reject_errors GROUP BY line ORDER BY line"
        for number, why in table.query(rejected):
            file.add_bad_line(number, why.lower())

    def _table(self) -> Table:
        """The lines of the file as a table of one column."""
        encoding = "utf-8" if self.layout.cut == "JSON" else None
        table = open_table(self.file.path, "raw data", FileForm("\x1f", encoding, False, ("line",)))
        table.connection.execute(MACROS)
        table.connection.execute("SET VARIABLE domain = ?", [self.domain])
        table.connection.create_function("mended", _mended, ["VARCHAR"], "VARCHAR", null_handling=SPECIAL)
        return table

    def _stream(self, table: Table, sql: str) -> Iterator[pa.RecordBatch]:
        try:
            yield from table.connection.sql(sql).to_arrow_reader(BATCH)
        except (duckdb.Error, OSError) as error:
            text = " ".join(str(error).split())[:300]
            raise ValueError(f"cannot read {self.file.path} ({text}), expected its original form") from error

    def _sql(self, table: Table, left_out: Mapping[str, str]) -> str:
        """Each line in our columns, with why it is no row: ! and what is wrong, or why it is left out."""
        layout, names, skip = self.layout, list(self.layout.header), 0
        lines = f"SELECT row_number() OVER () AS number, line FROM ({table.parts[0].select({'line': 'line'})})"
        cuts = {"words": "words(line)", "CSV": "csv_cut(line)"}
        cut = cuts.get(layout.cut, f"string_split(line, {literal(layout.cut)})")
        if layout.cut == "JSON":
            otherwise = "" if "user" in layout.columns else "ELSE mended(line) "
            lines = f"SELECT *, CASE WHEN json_valid(line) THEN line {otherwise}END AS json FROM ({lines})"
            cut = f"json_extract_string(json, {[f'$.{name}' for name in names]})"
        elif layout.is_named:
            first = table.parts[0].select({"line": "line"}, sampled=True)
            rows = table.query(f"SELECT row_number() OVER (), line FROM ({first}) LIMIT 1000")
            skip, line = next((number, line) for number, line in rows if line and not line.isspace())
            names = self._names(line)
        theirs = [name.removesuffix("?") for name in layout.header]
        columns = {"time": str(UNKNOWN_TIME), **layout.columns}
        if layout.cut == "JSON":  # a text that may be a list
            listed = [
                name for name, sql in columns.items() if name in TEXTS and sql.isidentifier() and sql not in theirs
            ]
            columns |= {name: f"texts(json, '$.{columns[name]}')" for name in listed}
        of_theirs = [
            f"{f'cut[{names.index(name) + 1}]' if name in names else 'NULL'} AS {quoted(name)}" for name in theirs
        ]
        of_ours = [f"{sql} AS {quoted(name)}" for name, sql in columns.items()]
        cases = ["trim(coalesce(line, ''), ' \t') = '' THEN 'blank'"]
        cases += [f"len(cut) IS DISTINCT FROM {len(names)} THEN '!shape'"] if names else []
        cases += [f"{quoted(name)} IS NULL THEN {literal('!' + name)}" for name in columns if name not in TEXTS]
        cases += [f"{sql} THEN {literal(reason)}" for reason, sql in left_out.items()]
        return (
            f"SELECT number, {', '.join(map(quoted, columns))}, CASE WHEN {' WHEN '.join(cases)} END AS why, "
            f"CASE WHEN starts_with(why, '!') THEN left(line, 80) END AS start FROM "
            f"(SELECT number, line, cut, {', '.join(of_ours)} FROM (SELECT {', '.join(['*', *of_theirs])} FROM "
            f"(SELECT *, {cut} AS cut FROM ({lines}))) WHERE number > {skip})"
        )

    def _names(self, line: str) -> list[str]:
        """The names in a line; ``ValueError`` where one that is read is missing or stands twice."""
        layout = self.layout
        names = next(csv.reader([line])) if layout.cut == "CSV" else line.split(layout.cut)
        missing = [name for name in layout.header if name not in names and not name.endswith("?")]
        if missing:
            raise ValueError(f"{self.file.path}: header {names} has no column {missing}; expected the original file.")
        twice = [name for name in layout.header if names.count(name) > 1]
        if twice:
            raise ValueError(f"{self.file.path}: header {names} has more than one column {twice}; expected each once.")
        return names


def _mended(line: str) -> str | None:
    """JSON of a line that is a Python dict, as Amazon's of 2014, or has half of a character; None: it is neither."""
    try:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = literal_eval(line.strip())
        text = json.dumps(record, ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "ignore") if isinstance(record, dict) else None


def read(name: str, raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """The events of one domain of the kind of data set ``name`` in the folder ``raw``, and its items.

    Raises:
        ValueError: a file is missing, is not in its original form, or has more bad lines than are allowed.
    """
    source = LAYOUTS[name]
    stem = _stem(source, raw, domain)

    def opened(layouts: Sequence[Layout], folder: Path, what: str = "") -> Opened | None:
        """The first file that is there; ``ValueError`` where there is none of ``what``."""
        layout_of = {file.replace("*", stem): layout for layout in layouts for file in layout.files}
        find = reading.find_file if what and layouts else reading.find_optional
        path = find(folder, layout_of, *([what] if what and layouts else []))
        if path is None:
            return None
        names = (path.name.lower(), path.name.lower().removesuffix(".gz"))
        layout = next(layout for file, layout in layout_of.items() if file.lower() in names)
        return Opened(options.file(path), layout, domain, options)

    folder = raw if opened(source.events, raw) or not opened(source.events, raw / "samples") else raw / "samples"
    events = opened(source.events, folder, f"events of {domain!r}")
    assert events
    later = [path for file in source.later if (path := reading.find_optional(raw, [file]))]
    files = [events, *(events._replace(file=options.file(path)) for path in later)]
    items = opened(source.items, raw, f"texts of {domain!r}" if options.texts_required else "")
    joined = {key: opened([one], folder) or opened([one], raw) for key, one in source.joined.items()}
    extras = {key: one for key, one in joined.items() if one}
    if "rating" not in events.layout.columns:
        reading.no_ratings(events.file.path, options)
    raw_events = _read_events(files)
    if source.later:  # lists under a name that is not known, such as val.txt
        known = {one.file.path for one in files}
        for path in sorted(path for path in raw.iterdir() if path.is_file() and path not in known):
            if path.name.lower().endswith((".txt", ".txt.gz")):
                raw_events.dropped.add(f"not read: {path.name}", files=1)
    if source.own_users:
        raw_events = raw_events._replace(users=[f"{domain}-{user}" for user in raw_events.users])
    if name == "packed":
        assert items
        raw_events = _with_keys(raw_events, items)

    def read_catalogue(wanted: Collection[str]) -> ItemRecords:
        if items is None:
            return reading.no_texts(wanted)
        words = {key: _values(one) for key, one in extras.items()}
        return reading.collect_items(_read_texts(items, words, wanted), wanted, options, items.file.path)

    others = [items, *extras.values()] if items else []
    return RawDomain(raw_events, read_catalogue, [one.file for one in (*files, *others)])


def _stem(source: Source, raw: Path, domain: str) -> str:
    """The domain's part of the names of files."""
    stem = source.stems.get(domain.lower(), domain.replace(" ", "_"))
    if source.prefix and domain.lower() not in source.stems and raw.is_dir():
        names = sorted(path.name for path in raw.iterdir() if path.name.lower().startswith(source.prefix))
        found = [name[len(source.prefix) :].split(".")[0] for name in names]
        if stem.lower() not in [name.lower() for name in found]:
            raise ValueError(
                f"unknown domain {domain!r}; expected one of {sorted(source.stems)} or the * of a file "
                f"{source.prefix}*.json in {raw} (found {found or 'none'})."
            )
    return stem


def _read_events(files: Sequence[Opened]) -> RawEvents:
    """Events in the order of the lines; 16 bytes an event, 24 with an order, and one key per user and item."""
    import pyarrow as pa  # only where it is used: --help does without
    import pyarrow.compute as pc  # only where it is used: --help does without

    users: dict[str, int] = {}
    items: dict[str, int] = {}
    parts: list[list[np.ndarray]] = []
    dropped, min_rating = Dropped(), files[0].options.min_rating
    for one in files:
        for batch in one.batches(dropped):
            if min_rating is not None and np.isnan(batch.column("rating").to_numpy()).any():
                raise ValueError(
                    f"{one.file.path}: min_rating is {min_rating}, but events of {one.domain!r} have no rating. "
                    "Leave min_rating out."
                )
            item_E, row_E = batch.column("item"), np.arange(len(batch))
            if pa.types.is_list(item_E.type):
                row_E, item_E = pc.list_parent_indices(item_E).to_numpy(), pc.list_flatten(item_E)
            rest = [batch.column(name).to_numpy()[row_E] for name in ("time", "order") if name in batch.schema.names]
            parts.append([_numbers(batch.column("user"), users)[row_E], _numbers(item_E, items), *rest])
    columns = list(zip(*parts, strict=True)) or [(np.zeros(0, np.int32),)] * 3
    parts.clear()  # a column's pieces are freed once it is whole
    user_E, item_E, time_E, *order_E = [np.concatenate(columns.pop(0)) for _ in range(len(columns))]
    return RawEvents(list(users), list(items), user_E, item_E, time_E, order_E[0] if order_E else None, dropped)


def _numbers(keys: pa.Array, known: dict[str, int]) -> np.ndarray:
    """(E,) int32: the number of each key, in the order of their first events."""
    coded = keys.dictionary_encode()
    places = [known.setdefault(key, len(known)) for key in coded.dictionary.to_pylist()]
    return np.array(places, np.int32)[coded.indices.to_numpy()]


def _with_keys(events: RawEvents, items: Opened) -> RawEvents:
    """Events of packed files with the items' keys in the place of their numbers, which are unique within a domain."""
    items = items._replace(file=items.options.file(items.file.path))  # its bad lines count when the texts are read
    rows = [row for batch in items.batches(Dropped()) for row in batch.to_pylist()]
    if not rows:
        every = items._replace(layout=items.layout._replace(left_out={}))
        domains = sorted({key for batch in every.batches(Dropped()) for key in batch.column("domain").to_pylist()})
        raise ValueError(f"unknown domain {items.domain!r}: {items.file.path} holds {domains}. Check --domains.")
    texts = ((row["place"], {"title": clean(row["title"]), "key": row["item"]}) for row in rows)
    records = reading.collect_items(texts, {row["place"] for row in rows}, items.options, items.file.path)
    known: dict[str, int] = {}
    keys = [records.items.get(one, {}).get("key", f"{items.domain}:{one}") for one in events.items]
    places = [known.setdefault(key, len(known)) for key in keys]
    return events._replace(items=list(known), item_E=np.array(places, np.int32)[events.item_E])


def _values(file: Opened) -> dict[str, list[str]]:
    """Key -> its values, in their order."""
    rows = [row for batch in file.batches(Dropped()) for row in batch.to_pylist()]
    values: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["order"]) if "order" in file.layout.columns else rows:
        values.setdefault(row["item"], []).append(row["value"])
    return values


def _read_texts(
    items: Opened, words: Mapping[str, Mapping[str, list[str]]], wanted: Collection[str]
) -> Iterator[tuple[str, ItemFields]]:
    """Key and texts of the wanted items, only the key of others."""
    names = [name for name in TEXTS if name in items.layout.columns]
    for batch in items.batches(Dropped()):
        for row in batch.to_pylist():
            texts = {name: row[name] for name in names if row["item"] in wanted}
            for name in texts.keys() & items.layout.lookups.keys():
                for lookup in items.layout.lookups[name]:
                    texts[name] = [word for key in texts[name] or () for word in words.get(lookup, {}).get(key, ())]
            if texts.get("shelves"):
                shelves = [shelf for shelf in texts["shelves"] if shelf and shelf not in STATE_SHELVES][:NUM_SHELVES]
                texts["shelves"] = [shelf.replace("-", " ") for shelf in shelves]
            try:
                fields = {name: clean(text) for name, text in texts.items()}
            except ValueError as error:  # html.unescape refuses a number of 5,000 digits
                items.file.add_bad_line(row["number"], str(error)[:160])
            else:
                yield row["item"], fields


LAYOUTS = read_layouts()
