"""Own tables -> prepared domains, with a report: fedecider import orders.csv --items products.csv --company shop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fedecider.bounds import dataclass
from fedecider.running.command import run
from fedecider.running.options import pairs_of, parse, with_leading
from fedecider.running.run_folder import check_output

DESCRIPTION = (
    "Read own tables of events and items (csv, tsv, jsonl, Parquet, plain or gzip, or folders of parts), say what came "
    "in and what did not, and write a prepared folder per company. Usage: fedecider import orders.csv --items "
    "products.csv --company shop; or with a mapping file of each company, which --write_mapping proposes: fedecider "
    "import north.yaml,south.yaml. Python: fedecider.from_events, with the same names."
)


@dataclass(frozen=True)
class ImportConfig:
    """Import: which tables, how they are written, and what is kept.

    Args:
        events: The tables of events, one row each, before all options or here: orders.csv, or north.csv,south.csv, a
            company each; or mapping files, north.yaml, which say how a company's tables are read.
        items: The table of items, one row each, or one of each company, separated by commas, in the order of events;
            if empty, their texts are in events.
        company: What the company is called, or several, separated by commas, in the order of their tables; if empty,
            as the files.
        output: The folder to write to; each company becomes a sub-folder.
        user: The column of customers' keys, if its name is not usual.
        item: The column of items' keys, if its name is not usual.
        time: The column of times, or two, day+clock, if its name is not usual; none, where rows are oldest first.
        rating: The column of ratings, which min_rating looks at.
        domain: The column, in both tables, that shares them out into several domains.
        quantity: The column of quantities, if its name is not usual; below 0 is a return, which takes back a purchase.
        order: The column of order numbers, if its name is not usual: a customer's events of one number are one basket,
            and lines of an order without customer and time have those of its others.
        keep: The rows that count, by a column's values: status=paid,shipped, or several columns with semicolons.
        nobody: Keys that are no customers, separated by commas; if empty, guest, NULL and the like.
        items_key: The column of keys in items, if it is called otherwise than in events.
        texts: The columns of texts, title=label,brand=maker, if their names are not usual.
        public: The customers whose events everybody may see: a share, a column that says true, or a file of keys; if
            empty, nobody.
        delimiter: The character between fields of text files, or comma, semicolon, tab or pipe; if empty, guessed.
        encoding: The encoding of text files, such as latin-1; if empty, UTF-8.
        quoting: Whether quotes hold fields together; if not given, in all files but those with tabs.
        time_format: What times mean: s, ms, us or ns since 1970, serial (a spreadsheet's days), order, or a format such
            as %d/%m/%Y; if empty, found by the values.
        header: Names of the columns of events, separated by commas, where the file has no line of names.
        items_header: The same of items.
        bad_rows: What rows without an item or with an unreadable time are: an error, once all of them are counted, or
            left out (skip).
        missing_text: What items without any text are: dropped with their events, which is said, an error, or kept,
            known by their keys alone.
        duplicate_items: What an item key in two rows with other texts is: an error, or the first one is kept.
        repeats: What becomes of events with an item that the customer had before: they are kept, or only the first is.
        min_rating: Events with a lower rating are dropped. If not given, all are kept.
        k_core: Customers and items with fewer events than this are dropped, until none is left; 0 drops none.
        min_length: Customers with fewer events are dropped; leave-last-out needs 3.
        catalogue: What keys of items are, such as ean, where companies that are imported one by one sell the same items
            under the same keys: the same word at each of them.
        keep_split: The folder of an earlier import: who was public there stays public, who was private private.
        seed: The seed of the share of public customers.
        write_mapping: The file to write what was found to, for a person to correct: nothing else is written then.
        dry_run: If true, the report alone: nothing is written.
    """

    events: str
    items: str = ""
    company: str = ""
    output: str = "data"
    user: str = ""
    item: str = ""
    time: str = ""
    rating: str = ""
    domain: str = ""
    quantity: str = ""
    order: str = ""
    keep: str = ""
    nobody: str = ""
    items_key: str = ""
    texts: str = ""
    public: str = ""
    delimiter: str = ""
    encoding: str = ""
    quoting: bool | None = None
    time_format: str = ""
    header: str = ""
    items_header: str = ""
    bad_rows: Literal["error", "skip"] = "error"
    missing_text: Literal["drop", "error", "keep"] = "drop"
    duplicate_items: Literal["error", "first"] = "error"
    repeats: Literal["keep", "first"] = "keep"
    min_rating: float | None = None
    k_core: int = 0
    min_length: int = 3
    catalogue: str = ""
    keep_split: str = ""
    seed: int = 0
    write_mapping: str = ""
    dry_run: bool = False


OF_THE_COMMAND = ("events", "items", "company", "output", "public", "texts", "bad_rows", "write_mapping", "dry_run")
"""Options that `from_events` does not take as they are."""


def main(argv: Sequence[str] | None = None) -> int:
    words = with_leading(argv, "events")

    def work() -> None:
        (config,) = parse(DESCRIPTION, words, ImportConfig)
        import_tables(config)

    return run(work)


def import_tables(config: ImportConfig) -> None:
    """Read, report, and unless it is only a try, write.

    Raises:
        ValueError: a table that cannot be read, bad rows that may not be left out, or too little is left.
    """
    check_output(Path(config.output))
    from fedecider.data.frames import from_events
    from fedecider.data.import_report import ImportReport
    from fedecider.data.mapping import write_mapping
    from fedecider.data.tables import Question

    report = ImportReport(mapping={} if config.write_mapping else None)
    options = {name: value for name, value in vars(config).items() if name not in OF_THE_COMMAND and value != ""}
    texts, public = pairs_of(config.texts, "texts", "title=label,brand=maker"), who_is_public(config.public)
    options |= {name: value for name, value in (("texts", texts), ("public", public)) if value}
    options["bad_rows"] = "skip"
    try:
        data = from_events(**_tables(config), **options, report=report)
    except Question as question:
        if report.mapping is None:
            raise
        report.reading.first.insert(0, f"to be decided, as proposed in the mapping or otherwise: {question}")
    finally:
        told = report.lines()
        for line in [*told, *(f"note: {note}" for note in report.reading.notes if note not in told)]:
            print(line, flush=True)
        if report.mapping:
            write_mapping(Path(config.write_mapping), report.mapping)
            print(f"written to {config.write_mapping}: correct it, then fedecider import {config.write_mapping}")
    if config.write_mapping:
        return
    if config.bad_rows == "error":
        report.reading.refuse_bad()
    if config.dry_run:
        print("a dry run: nothing was written")
        return
    print(f"written to {data.save(config.output)}")


def who_is_public(text: str) -> float | str | None:
    """A share, a column or file of keys, or nobody."""
    return float(text) if text.replace(".", "", 1).isdecimal() else text or None


def _tables(config: ImportConfig) -> dict[str, Any]:
    """``events``, ``items`` and ``name`` of `from_events`."""
    from fedecider.data.names import check_name

    paths = [one.strip() for one in config.events.split(",") if one.strip()]
    names = [one.strip() for one in config.company.split(",") if one.strip()] or [_stem(one) for one in paths]
    if not paths or len(names) != len(paths) or len(set(names)) < len(names):
        raise ValueError(
            f"got the tables {', '.join(paths) or 'none'} and the companies {', '.join(names) or 'none'}, expected a "
            "different name for each table: --company north,south"
        )
    for one in names:
        check_name(one, rename="name it with --company")
    items = [one.strip() for one in config.items.split(",") if one.strip()]
    if len(items) > 1 and len(items) != len(paths):
        raise ValueError(
            f"got {len(items)} tables of items and {len(paths)} of events, expected one for all, or one "
            "for each company"
        )
    by_company = len(items) > 1 or bool(items and config.catalogue)
    if len(paths) == 1 and not config.catalogue:
        return {"events": paths[0], "items": config.items or None, "name": names[0]}
    things = dict(zip(names, items * (len(names) if len(items) == 1 else 1), strict=True)) if by_company else None
    return {"events": dict(zip(names, paths, strict=True)), "items": things or config.items or None}


def _stem(path: str) -> str:
    """The name of a file without its endings."""
    return Path(path).name.partition(".")[0]
