"""Lists for many customers: where their histories are, what may be recommended, and the file of the lists."""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedecider.data.domain import UNKNOWN_TIME, Domain
from fedecider.data.filtering import Sequences, chosen_events, compress, order_events, take
from fedecider.data.frames import events_of, keyed_table
from fedecider.data.protocol import under
from fedecider.data.readers.reading import RawEvents
from fedecider.data.sample import sample_domains
from fedecider.data.store import load_domains
from fedecider.evaluation.protocols import LAST_MONTH, NEXT_BASKET, STRICT, get_protocol
from fedecider.evaluation.sequences import SequenceArray
from fedecider.models.histories import Entry
from fedecider.models.item_table import read_item_ids
from fedecider.models.source import find_source
from fedecider.running.damage import damaged
from fedecider.running.run_folder import RunFolder, check_file, read_run
from fedecider.scratch import aside

HISTORIES_FILE = "histories.parquet"
"""In a company's private folder, where an update left them."""
COUNTED, WHOLE, TRAIN_PARTS = b"counted", b"whole", b"train parts"
"""In the metadata of that file: which part of the histories the counts hold."""
PARQUET, JSONL, CSV = ".parquet", ".jsonl", ".csv"
FIELDS = ("customer", "items", "scores", "note")
CSV_FIELDS = ("customer", "rank", "item", "title", "score", "note")
ROWS_AT_ONCE = 10_000
"""Lists that are written together."""


class Histories(NamedTuple):
    """Customers of one company and what they had, oldest first; lists are made when they are asked for."""

    customers: list[str]
    item_keys: list[str]
    sequences: SequenceArray
    """Item numbers of each customer, in baskets where the protocol of the run knows them."""
    last_time: dict[str, int]
    """Unix seconds of the last event, where it is known."""
    is_counted_whole: bool
    """Whether the counts of the ensemble hold all of it, as after an update; else all but the held-out events."""
    num_public: int = 0
    """Customers whose events are public: they are the pool that all companies start from, and not among these."""
    said: tuple[str, ...] = ()
    """What has to be said of the table that was read."""

    def prefix(self, company: str) -> str:
        """What stands in front of a customer's key, ``north:``, where companies share a catalogue; else nothing.

        With several catalogues the company is ``books.north``, and its customers are called ``north:17`` all the same.
        """
        owner, colon, _ = (self.customers[0] if self.customers else "").partition(":")
        prefix = f"{owner}:" if colon and f".{company}".endswith(f".{owner}") else ""
        return prefix if all(one.startswith(prefix) for one in self.customers) else ""

    def of(self, wanted: Collection[str] | None, company: str) -> Iterator[tuple[str, list[Entry]]]:
        """Customer -> keys of its items, those of one basket in a list; of all customers, or of those ``wanted``, in
        their order.

        A customer is called ``17``, as its company does; ``north:17`` names the same one. Who is not there is new, and
        has an empty history.
        """
        prefix = self.prefix(company)
        place_of = {customer.removeprefix(prefix): place for place, customer in enumerate(self.customers)}
        for customer in place_of if wanted is None else wanted:
            place = place_of.get(customer, place_of.get(customer.removeprefix(prefix)))
            called = customer if customer in place_of else customer.removeprefix(prefix)
            yield called, [] if place is None else self._entries(place)

    def _entries(self, place: int) -> list[Entry]:
        row = self.sequences[place : place + 1]
        keys = [self.item_keys[item] for item in row[0]]
        if row.basket_E is None:
            return list(keys)
        pairs = groupby(zip(row.basket_E.tolist(), keys, strict=True), key=itemgetter(0))
        return [[key for _, key in basket] for _, basket in pairs]

    def split(self, customers: Collection[str]) -> tuple[Histories, Histories]:
        """Some customers, and all others."""

        def part(inside: bool) -> Histories:
            places = [place for place, one in enumerate(self.customers) if (one in customers) == inside]
            kept = [self.customers[place] for place in places]
            last = {one: self.last_time[one] for one in kept if one in self.last_time}
            return self._replace(customers=kept, sequences=self.sequences.take(places), last_time=last)

        return part(True), part(False)


def histories_of(
    run: str, company: str, data: str = "", events: str = "", how: Mapping[str, str] | None = None
) -> Histories:
    """The histories of a company's customers: of a table of ``events``, of prepared ``data``, or of the run's data.

    ``how``: how the table is read (`events_of`).

    Raises:
        ValueError: there is none, or it cannot be read.
        FileNotFoundError: there is no such run.
    """
    folder = find_source(run).run
    if events:
        raw, said, _ = events_of(events, how, company)
        found, sequences = ordered_events(raw, knows_baskets(folder))
        return Histories(found.users, found.items, sequences, {}, False, said=tuple(said))
    if folder is not None and not data and (kept := folder.private / company / HISTORIES_FILE).is_file():
        return _kept_histories(kept, read_item_ids(folder.adapters / company).keys)
    return _histories(_domain(folder, run, company, data), company)


def counted_histories(folder: RunFolder, company: str, data: str = "") -> Histories:
    """The histories that the counts of a company's ensemble hold, and no others.

    ``data``: where the run's own data are now, where the run was never updated.

    Raises:
        ValueError: they cannot be read, or ``data`` are others than those that were counted.
    """
    if (kept := folder.private / company / HISTORIES_FILE).is_file():
        if data:
            raise ValueError(
                f"got --data {data} for a run that keeps what it has counted in {kept}, expected none: leave --data out"
            )
        return _kept_histories(kept, read_item_ids(folder.adapters / company).keys)
    if read_run(folder.root).get("protocol", STRICT.name).startswith(LAST_MONTH.name):
        raise ValueError(
            f"got {folder.root}, whose protocol {LAST_MONTH.name} held out what was bought last, expected a run of "
            f"another one to update: train with --protocol {NEXT_BASKET.name}"
        )
    domain = _domain(folder, str(folder.root), company, data)
    known = read_run(folder.root)["data"].get(company)  # a deployed site records its project in its place
    if known is not None and domain.content_hash() != known:
        raise ValueError(
            f"got other data of {company} than those that {folder.root} was made of, expected the same: their events "
            "are in the counts. Name them with --data"
        )
    return _histories(domain, company)


def _domain(folder: RunFolder | None, run: str, company: str, data: str) -> Domain:
    """The prepared domain in ``data``, or in the run's data."""
    protocol = _protocol(folder)
    if data:
        return under(protocol, load_domains(data, [company]))[0][company]
    if folder is None:
        raise ValueError(f"got {run}, which knows no customers, expected where they are: --data or --events")
    config = read_run(folder.root)["config"]["run"]
    where = str(config.get("data") or "")
    if where and not Path(where).is_dir():
        raise ValueError(f"got the run's data {where}, which is no folder from here, expected it: name it with --data")
    domains = load_domains(where, [company]) if where else sample_domains([company])
    return under(protocol, domains)[0][company]


def _protocol(folder: RunFolder | None) -> str:
    """How histories are read: as in the run; where the calendar cuts them there, in baskets to their end."""
    name = str(read_run(folder.root).get("protocol", STRICT.name)) if folder else STRICT.name
    return name if get_protocol(name).first_day is None else NEXT_BASKET.name


def knows_baskets(folder: RunFolder | None) -> bool:
    """Whether events of one order or time are one basket in a run."""
    return get_protocol(_protocol(folder)).baskets


def _histories(domain: Domain, company: str) -> Histories:
    if not domain.clients.users:
        raise ValueError(f"got no customers of {company}, expected some: they are where its own events are (--data)")
    users, sequences, times = domain.clients.arrays()
    last = {} if times is None else dict(zip(users, times.last().tolist(), strict=True))
    known = {user: at for user, at in last.items() if at != UNKNOWN_TIME}
    return Histories(users, domain.own_keys, sequences, known, False, len(domain.public.users))


def ordered_events(raw: RawEvents, baskets: bool) -> tuple[Sequences, SequenceArray]:
    """The events of a table by customer, oldest first, and the items of each customer; in ``baskets`` of one order or
    time, where an item counts once in each, or by themselves."""
    found = order_events(compress(raw, raw.item_E >= 0))
    if not baskets or not found.users:
        return found, SequenceArray(found.start_U, found.item_E)
    rows = chosen_events(found, np.ones(len(found.users), bool), None).sequences
    kept_E = rows.is_first_in_basket_E
    return take(found, kept_E), rows.keep(kept_E)


def save_histories(histories: Histories, path: Path) -> None:
    """Keep histories in a company's private folder, for the next update and for lists."""
    import pyarrow as pa  # only where it is written: --help does without
    import pyarrow.parquet

    sequences = histories.sequences
    columns = {
        "customer": histories.customers,
        "items": pa.LargeListArray.from_arrays(sequences.start_U, pa.array(sequences.value_E, pa.int64())),
        "last_time": pa.array([histories.last_time.get(one) for one in histories.customers], pa.int64()),
    }
    if baskets := sequences.baskets:
        columns["baskets"] = pa.LargeListArray.from_arrays(baskets.start_U, pa.array(baskets.value_E, pa.int64()))
    counted = WHOLE if histories.is_counted_whole else TRAIN_PARTS
    pa.parquet.write_table(pa.table(columns).replace_schema_metadata({COUNTED: counted}), path)


def _kept_histories(path: Path, item_keys: Sequence[str]) -> Histories:
    """What `save_histories` wrote. ``ValueError`` for a damaged file."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        table = pa.parquet.read_table(path).combine_chunks()
        customers, times = (table.column(name).to_pylist() for name in ("customer", "last_time"))
        sequences = SequenceArray.of(table.column("items").to_pylist())
        if "baskets" in table.column_names:
            baskets = SequenceArray.of(table.column("baskets").to_pylist())
            if not np.array_equal(baskets.start_U, sequences.start_U):
                raise TypeError("baskets of other events than there are")
            sequences = sequences.with_baskets(baskets.value_E)
        is_whole = (table.schema.metadata or {}).get(COUNTED, WHOLE) == WHOLE
    except (pa.ArrowException, KeyError, OSError, TypeError) as error:
        raise damaged(path, error) from error
    if len(sequences.value_E) and not 0 <= sequences.value_E.min() <= sequences.value_E.max() < len(item_keys):
        raise damaged(path, "items outside the catalogue")
    last = {one: at for one, at in zip(customers, times, strict=True) if at is not None}
    return Histories(customers, list(item_keys), sequences, last, is_whole)


TABLE_SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".json", ".jsonl", ".gz")
"""Of names that are files and no item keys."""


def keys_in(text: str, what: str) -> list[str] | None:
    """Item keys of a table with a column of items, or of a text with `` | `` between them; None for an empty one.

    Raises:
        ValueError: the table cannot be read.
    """
    if not text:
        return None
    if not Path(text).is_file():
        if Path(text).suffix in TABLE_SUFFIXES:
            raise ValueError(f"got {what} {text}, which is no file, expected a table of item keys, or keys with ' | '")
        return [one.strip() for one in text.split(" | ") if one.strip()]
    return keyed_table(text, what)[0]


STOCK = ("stock", "instock", "quantity", "qty", "available", "count", "left")
"""What a column of numbers in stock is called."""


def stock_in(path: str) -> dict[str, float] | None:
    """Item -> how many are left, of a table with a column of items and one of numbers; None for an empty path.

    Raises:
        ValueError: the table cannot be read, an item stands twice, or a number is none.
    """
    if not path:
        return None
    keys, counts = keyed_table(path, "stock", beside=STOCK)
    found: dict[str, float] = {}
    for row, (key, count) in enumerate(zip(keys, counts, strict=True), 1):
        if key in found:
            raise ValueError(f"got the item {key!r} twice in the stock {path}, in row {row} again, expected it once")
        try:
            found[key] = float(count or "")
        except (TypeError, ValueError) as error:
            raise ValueError(f"got the stock {count!r} in row {row} of {path}, expected a number") from error
    return found


PICTURES = ("picture", "image", "imageurl", "pictureurl", "url", "thumbnail", "thumb", "img")
"""What a column of addresses of pictures is called."""


def pictures_in(path: str) -> dict[str, str]:
    """Item -> address of its picture, of a table with a column of items and one of addresses; {} for an empty path.

    Items without an address are left out.

    Raises:
        ValueError: the table cannot be read, or an address is not of the web.
    """
    if not path:
        return {}
    keys, addresses = keyed_table(path, "pictures", beside=PICTURES)
    found: dict[str, str] = {}
    for row, (key, one) in enumerate(zip(keys, addresses, strict=True), 1):
        text = (one or "").strip()
        if text and not re.fullmatch(r"https?://[A-Za-z0-9.-]+(:[0-9]+)?/[^\s\"'<>\\]*", text):
            raise ValueError(f"got the picture {text[:80]!r} in row {row} of {path}, expected https://HOST/...")
        if text:
            found[key] = text
    return found


class Written(NamedTuple):
    """What came of a batch."""

    num_lists: int
    num_empty: int
    """Customers without a list."""
    example: str
    """Why the first of them has none."""
    seconds: float


def check_lists_file(path: Path) -> None:
    """See, before any work, that lists can be written there.

    Raises:
        ValueError: another kind of file, a place where nothing may be written, or a file that holds no such lists.
    """
    if path.suffix not in _WRITERS:
        raise ValueError(f"got the output {path}, expected a file that ends with {', '.join(_WRITERS)}")
    check_file(path, _has_lists)


def _has_lists(path: Path) -> bool:
    """Whether `write_lists` wrote this file."""
    if path.suffix == PARQUET:
        import pyarrow.parquet

        return tuple(pyarrow.parquet.read_schema(path).names) == FIELDS
    with path.open(encoding="utf-8") as file:
        first = file.readline().strip()
    return tuple(first.split(",") if path.suffix == CSV else dict(json.loads(first))) in (CSV_FIELDS, FIELDS)


def write_lists(lists: Iterable[Any], path: Path) -> Written:
    """A row for each customer: ``customer``, ``items`` and ``scores`` (the best first) and ``note``.

    In a .csv a row for each customer and item: ``customer``, ``rank`` from 1 on, ``item``, ``title``, ``score``,
    ``note``; a customer without a list has one row, without an item.

    ``lists``: as `fedecider.models.recommender.Recommender.recommend_many` gives them; they are written while the next
    ones are made, and the file gets its name at the end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    begun, num_lists, num_empty, example = time.perf_counter(), 0, 0, ""
    with aside(path) as scratch, _WRITERS[path.suffix](scratch) as add:
        for one in lists:
            num_lists += 1
            note = one.error or "; ".join(one.answer.notes)
            items = [] if one.answer is None else one.answer.items
            if not items:
                num_empty, example = num_empty + 1, example or f"{one.customer}: {note}"
            add(one.customer, items, note)
    return Written(num_lists, num_empty, example, time.perf_counter() - begun)


def read_lists(path: str | Path) -> dict[str, tuple[list[str], list[float]]]:
    """Customer -> item keys and scores, of a .parquet file that `write_lists` wrote.

    Raises:
        ValueError: it is missing or damaged, or names a customer, or an item of one list, twice.
    """
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
        found = {row["customer"]: (row["items"], row["scores"]) for row in rows}
        broken = any(
            len(items) != len(scores) or len({*items}) < len(items) or None in scores
            for items, scores in found.values()
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise damaged(Path(path), error) from error
    if len(found) < len(rows) or broken:
        raise damaged(Path(path), "a customer or an item stands there twice, or a score is missing")
    return found


Add = Callable[[str, Sequence[Any], str], None]
"""Customer, items, note: writes one list."""


@contextmanager
def _parquet(path: Path) -> Iterator[Add]:
    import pyarrow as pa  # only where it is written: --help does without
    import pyarrow.parquet

    types = (pa.string(), pa.list_(pa.string()), pa.list_(pa.float32()), pa.string())
    schema = pa.schema(list(zip(FIELDS, types, strict=True)))
    rows: list[dict[str, Any]] = []
    with pa.parquet.ParquetWriter(path, schema) as writer:

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(rows, schema))
            rows.clear()

        def add(customer: str, items: Sequence[Any], note: str) -> None:
            rows.append(_row(customer, items, note))
            if len(rows) >= ROWS_AT_ONCE:
                flush()

        yield add
        flush()


@contextmanager
def _lines(path: Path) -> Iterator[Add]:
    with path.open("w", encoding="utf-8", newline="") as file:
        yield lambda customer, items, note: print(
            json.dumps(_row(customer, items, note), ensure_ascii=False), file=file
        )


@contextmanager
def _csv(path: Path) -> Iterator[Add]:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_FIELDS)

        def add(customer: str, items: Sequence[Any], note: str) -> None:
            rows: list[Any] = [
                (customer, rank, one.key, one.title, one.score, note) for rank, one in enumerate(items, 1)
            ]
            writer.writerows(rows or [(customer, "", "", "", "", note)])

        yield add


def _row(customer: str, items: Sequence[Any], note: str) -> dict[str, Any]:
    return dict(zip(FIELDS, (customer, [one.key for one in items], [one.score for one in items], note), strict=True))


_WRITERS: Mapping[str, Callable[[Path], AbstractContextManager[Add]]] = {PARQUET: _parquet, JSONL: _lines, CSV: _csv}
