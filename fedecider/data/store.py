"""Prepared domains on disk: one folder per domain, Parquet tables and a data card.

``datasets.load_dataset(folder)`` gives the users of all domains (splits ``clients`` and ``public``),
``load_dataset(folder, "crime")`` those of one, and ``load_dataset(folder, "items", split="train")`` the item texts.

Beside a table of many events stand its numbers once more, as they are in memory: these are mapped, not read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from fedecider.data.catalogue import Catalogue, NewItem
from fedecider.data.domain import Domain, Events, check_public_disjoint
from fedecider.data.sellers import with_shared_catalogues
from fedecider.evaluation.sequences import SequenceArray
from fedecider.scratch import remove, remove_left, scratch_name

CARD_FILE = "card.json"
USERS = ("clients", "public")
TABLES = ("items", *USERS)
UNSOLD_FILE = "unsold.parquet"
"""Items that nobody has bought yet, where there are some."""
ROOT_MARK = "Domains prepared by FeDecider"
"""The heading of the ``README.md`` beside the domains: one without it is somebody else's."""
ROWS_OF_A_CHUNK = 1 << 20
"""Users whose lists share one array of Arrow, which has at most 2^31 numbers."""
MIN_VALUES, VALUES_PER_BYTE = 1 << 20, 64
"""Values that a table may claim: so many, and so many more for every byte of its file."""


def save_domain(domain: Domain, folder: str | Path) -> Path:
    """Write ``domain`` to ``folder/<name>`` (tables, card.json, README.md); nothing half-written is ever visible.

    An earlier prepared domain in the same place is replaced; ``ValueError`` when the place holds something else.
    """
    return save_domains({domain.name: domain}, folder)[domain.name]


def save_domains(domains: Mapping[str, Domain], folder: str | Path) -> dict[str, Path]:
    """Write every domain to ``folder/<name>``, all of them before the first one is put in place; name -> its folder.

    Raises:
        ValueError: no mapping of domains, or a place that holds something else than a prepared domain.
    """
    check_folder(folder)
    if folder is None or not isinstance(domains, Mapping):
        kind = type(domains).__name__
        raise ValueError(f"got {kind} for the folder {folder!r}, expected a mapping of domains by name, and a folder")
    root = Path(folder)
    targets = {name: root / name for name in domains}
    for target in targets.values():
        _check_replaceable(target)
    root.mkdir(parents=True, exist_ok=True)
    remove_left(root)
    work = scratch_name(root / "domains")
    try:
        for name, domain in domains.items():
            _write(domain, work / name)
        for name, target in targets.items():
            _put_in_place(work / name, target)
        _write_root(root, work)
    finally:
        remove(work)
    return targets


def check_folder(output: str | Path | None) -> None:
    """``ValueError`` where domains cannot be saved in ``output`` since it is a file, or no path."""
    if output is not None and not isinstance(output, str | os.PathLike):
        raise ValueError(f"got the output {output!r}, expected the path of a folder")
    if output is not None and Path(output).exists() and not Path(output).is_dir():
        raise ValueError(f"got the output {output}, which is a file, expected a folder, or a free place for one")


def load_domains(folder: str | Path, names: Iterable[str] | None = None) -> dict[str, Domain]:
    """The prepared domains ``names`` (default: all) under ``folder``, in that order.

    A name with a ``*`` stands for all that fit: ``movies_tv.*`` for the silos ``movies_tv.1``, ``movies_tv.2``, ...

    Errors: ``ValueError`` when one is missing, damaged (checksum) or asked for twice, a client is public in another
    domain, or silos do not belong together.
    """
    root = Path(folder)
    found = sorted(path.parent.name for path in root.glob(f"*/{CARD_FILE}")) if root.is_dir() else []
    found.sort(key=_by_number)
    wanted = found if names is None else [name for pattern in names for name in _fitting(pattern, found)]
    missing = [name for name in wanted if name not in found]
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"got domains {wanted}, expected each once")
    if missing or not wanted:
        raise ValueError(
            f"no prepared data for {missing or 'any domain'} in {root}; found {found} (see --domains). "
            f"Own tables: fedecider import EVENTS --output {root}; public data: python scripts/prepare_data.py "
            f"--domains {','.join(missing) or 'NAME'} --output {root} (see --help)"
        )
    domains = {name: _read(root / name) for name in wanted}
    check_public_disjoint(domains)
    return with_shared_catalogues(domains)


def _fitting(pattern: str, found: Sequence[str]) -> list[str]:
    return [name for name in found if fnmatchcase(name, pattern)] or [pattern] if "*" in pattern else [pattern]


def _by_number(name: str) -> list[int | str]:
    """Sorts ``movies.10`` behind ``movies.9``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def file_sha256(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _check_replaceable(target: Path) -> None:
    if target.exists() and not (target / CARD_FILE).is_file() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(
            f"{target} exists and is no prepared domain (no {CARD_FILE}); expected a free place. "
            "Choose another --output or remove it."
        )


def _put_in_place(source: Path, target: Path) -> None:
    if not target.exists():
        os.replace(source, target)
        return
    old = source.with_name(source.name + ".old")
    os.replace(target, old)
    try:
        os.replace(source, target)
    except OSError:
        os.replace(old, target)
        raise


def _write(domain: Domain, folder: Path) -> None:
    import pyarrow as pa  # only where tables are read or written: --help does without
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    for name, table in domain_tables(domain).items():
        path = folder / f"{name}.parquet"
        if table.num_rows:
            pq.write_table(table, path, compression="zstd")
        else:  # write_table would make an empty row group, which `datasets` cannot read
            pq.ParquetWriter(path, table.schema, compression="zstd").close()
    if domain.unsold:
        rows = pa.table(dict(zip(NewItem._fields, map(list, zip(*domain.unsold, strict=True)), strict=True)))
        pq.write_table(rows, folder / UNSOLD_FILE, compression="zstd")
    files = [*(f"{name}.parquet" for name in TABLES), *([UNSOLD_FILE] if domain.unsold else [])]
    card = {
        **domain.card,
        **({"catalogue": domain.catalogue.name} if domain.catalogue.name != domain.name else {}),
        "content_hash": domain.content_hash(),
        "tables_sha256": {name: file_sha256(folder / name) for name in files},
    }
    text = json.dumps(card, indent=2, sort_keys=True)
    (folder / CARD_FILE).write_text(text + "\n", encoding="utf-8")
    # From the text, so that a card written, loaded and written again gives the same bytes.
    (folder / "README.md").write_text(_readme(domain, json.loads(text)), encoding="utf-8")


def domain_tables(domain: Domain) -> dict[str, Any]:
    """The pyarrow tables ``items``, ``clients`` and ``public`` of a domain, each with a column of its name."""
    import pyarrow as pa

    items = pa.table(
        {
            "domain": pa.array([domain.name] * len(domain.item_keys), pa.string()),
            "item": pa.array(range(len(domain.item_keys)), pa.int32()),
            "key": pa.array(domain.item_keys, pa.string()),
            "title": pa.array(domain.titles, pa.string()),
            "text": pa.array(domain.item_texts, pa.string()),
            **({} if domain.items.own_keys is None else {"own_key": pa.array(domain.own_keys, pa.string())}),
        }
    )
    events = {name: _events_table(domain.name, getattr(domain, name)) for name in USERS}
    return {"items": items, **events}


def _events_table(name: str, events: Events) -> Any:
    import pyarrow as pa

    users, sequences, times = events.arrays()
    lists = {"items": (sequences, pa.int32()), "timestamps": (times, pa.int64())}
    if baskets := sequences.baskets:
        lists["baskets"] = (baskets, pa.int32())
    return pa.table(
        {
            "domain": pa.array([name] * len(users), pa.string()),
            "user": pa.array(users, pa.string()),
            **{column: _arrow_lists(rows, kind, len(users)) for column, (rows, kind) in lists.items()},
        }
    )


def _arrow_lists(rows: SequenceArray | None, kind: Any, num_rows: int) -> Any:
    """A column of lists over the memory of ``rows`` where they have the type ``kind``; None: of nothing."""
    import pyarrow as pa

    if rows is None:
        return pa.nulls(num_rows, pa.list_(kind))
    parts = [rows[first : first + ROWS_OF_A_CHUNK] for first in range(0, len(rows), ROWS_OF_A_CHUNK)]
    chunks = [
        pa.ListArray.from_arrays(pa.array(part.start_U, pa.int32()), pa.array(part.value_E, kind)) for part in parts
    ]
    return pa.chunked_array(chunks, pa.list_(kind))


def _read(folder: Path) -> Domain:
    card = _read_card(folder / CARD_FILE)
    unsold = [UNSOLD_FILE] if UNSOLD_FILE in card["tables_sha256"] else []
    for file in (*(f"{name}.parquet" for name in TABLES), *unsold):
        path = folder / file
        if not path.is_file() or file_sha256(path) != card["tables_sha256"].get(path.name):
            raise ValueError(f"{path} is missing or does not match its checksum in {CARD_FILE}. Prepare it again.")
    items = _read_table(folder / "items.parquet", NewItem._fields, ("own_key",)).to_pydict()
    new = _read_table(folder / UNSOLD_FILE, NewItem._fields).to_pylist() if unsold else []
    return Domain(
        name=folder.name,
        catalogue=Catalogue(card.get("catalogue", "") or folder.name, *items.values()),
        clients=_read_events(folder / "clients.parquet"),
        public=_read_events(folder / "public.parquet"),
        card=card,
        unsold=tuple(NewItem(*row.values()) for row in new),
    )


def _read_card(path: Path) -> dict[str, Any]:
    """The data card; ``ValueError`` unless it is an object with the checksums of the tables."""
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Prepare this domain again.") from error
    is_card = isinstance(card, dict) and isinstance(card.get("tables_sha256"), dict)
    blocks = is_card and all(isinstance(card.get(name, {}), dict) for name in ("raw", "settings"))
    if not blocks or not isinstance(card.get("catalogue", ""), str):
        raise ValueError(
            f"{path} is no data card; expected an object with the checksums of the tables (tables_sha256). "
            "Prepare this domain again."
        )
    return card


def _read_table(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> Any:
    """Named columns of a Parquet file; ``ValueError`` when it is none or lacks one that is not ``optional``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_size(path, file.metadata)
            table = file.read()
            table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no readable Parquet file ({error}). Prepare this domain again.") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ValueError(f"{path} has columns {table.column_names} but not {missing}. Prepare this domain again.")
    wanted = [*columns, *(name for name in optional if name in table.column_names)]
    for name in wanted:
        _check_column(path, name, table.column(name))
    return table.select(wanted)


def _check_size(path: Path, metadata: Any) -> None:
    """Refuse a file that claims to hold far more values than bytes: a few bytes can stand for any number of them."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    claimed = sum(group.column(number).num_values for group in groups for number in range(group.num_columns))
    most = MIN_VALUES + VALUES_PER_BYTE * path.stat().st_size
    if not 0 <= claimed <= most:
        raise ValueError(f"{path} has {claimed:,} values, expected at most {most:,}. Prepare this domain again.")


def _check_column(path: Path, name: str, column: Any) -> None:
    """Refuse other types than those that were written, and values that are missing but in a column of times."""
    import pyarrow as pa

    wanted = "lists of whole numbers" if name in ("items", "timestamps", "baskets") else "texts"
    if name == "timestamps" and column.null_count == len(column):
        return
    if wanted == "texts":
        good = pa.types.is_string(column.type) and not column.null_count
    else:
        good = pa.types.is_list(column.type) and pa.types.is_integer(column.type.value_type)
        good = good and not column.null_count and not any(chunk.flatten().null_count for chunk in column.chunks)
    if not good:
        raise ValueError(
            f"{path} has {name} of {column.type}, expected {wanted}, all there. Prepare this domain again."
        )


def _read_events(path: Path) -> Events:
    """The events of a table as arrays over Arrow's memory: no list of numbers is made."""
    table = _read_table(path, ("user", "items", "timestamps"), ("baskets",))
    times = table.column("timestamps")
    known = len(times) > 0 and not times.null_count
    users = table.column("user").to_pylist()
    sequences = _numbers(table.column("items"))
    if "baskets" in table.column_names:
        baskets = _numbers(table.column("baskets"))
        if not np.array_equal(baskets.start_U, sequences.start_U):
            raise ValueError(f"{path} has other numbers of baskets than of items. Prepare this domain again.")
        sequences = SequenceArray(sequences.start_U, sequences.value_E, basket_E=baskets.value_E)
    return Events(users, sequences, _numbers(times) if known else None)


def _numbers(column: Any) -> SequenceArray:
    """A column of lists without gaps; of one chunk, the numbers stay where Arrow has them."""
    value_parts = [chunk.flatten().to_numpy() for chunk in column.chunks]
    length_parts = [np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]
    if len(value_parts) == 1:
        return SequenceArray.of_lengths(length_parts[0], value_parts[0])
    none = np.zeros(0, np.int64)
    return SequenceArray.of_lengths(np.concatenate([none, *length_parts]), np.concatenate(value_parts or [none]))


def _readme(domain: Domain, card: Mapping[str, Any]) -> str:
    tables = [name for name in TABLES if name == "items" or getattr(domain, name).users]
    configs = "\n".join(f"- config_name: {name}\n  data_files: {name}.parquet" for name in tables)
    rows = "\n".join(f"| {label} | {_cell(value)} |" for label, value in flat(card) if label != "notes")
    notes = "\nNotes on the tables that it was made of:\n\n" if card.get("notes") else ""
    notes += "".join(f"- {note}\n" for note in card.get("notes", []))
    is_cut = "silo" in card and "same_catalogue" not in card["silo"]
    silo, catalogue = "", domain.catalogue.name
    if catalogue != domain.name and (is_cut or "catalogue" in card.get("settings", {})):
        silo = (
            f"\nIts item keys are those of `{catalogue}`: another domain of that catalogue has the same item "
            "under the same key.\n"
        )
    elif catalogue != domain.name:
        silo = (
            f"\nA silo: one of several companies with the items and public users of `{catalogue}`. No client "
            "user is one of another silo's.\n"
        )
    return f"""---
pretty_name: {json.dumps(domain.name)}
configs:
{configs}
---

# {domain.name}

Prepared by FeDecider for sequential recommendation. `items`: domain, item number, key, title and item text.
`clients` and `public`: one user a row, item numbers oldest first, timestamps in Unix seconds (-1: not known, null: no
times in this group), and where events come in baskets the basket of each, counted from 0. The last item of a user is
the test item, the last but one the validation item; with protocol next_basket the items of the last two baskets are.
The terms of the raw data apply to this copy as well.
{silo}
```python
datasets.load_dataset("path/to/{domain.name}", "clients", split="train")
```

| what | value |
| --- | --- |
{rows}
{notes}"""


def _write_root(root: Path, work: Path) -> None:
    """``root/README.md`` by which ``datasets`` finds all prepared domains in ``root``; another's is left as it is."""
    path = root / "README.md"
    if path.exists() and ROOT_MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    names = sorted((one.parent.name for one in root.glob(f"*/{CARD_FILE}")), key=_by_number)
    groups = {name: [split for split in USERS if _has_rows(root / name / f"{split}.parquet")] for name in names}
    configs = _splits("default", "*", [split for split in USERS if any(split in found for found in groups.values())])
    for name in names:
        configs += _splits(name, name, groups[name]) if name not in ("default", "items") else ""
    text = f"""---
configs:
{configs}- config_name: items
  data_files: "*/items.parquet"
---

# {ROOT_MARK}

Domains: {", ".join(f"[{name}]({name}/README.md)" for name in names)}.

```python
datasets.load_dataset("path/to/{root.resolve().name}")  # users of all domains, splits clients and public
datasets.load_dataset("path/to/{root.resolve().name}", {json.dumps(names[0])})  # of one domain
datasets.load_dataset("path/to/{root.resolve().name}", "items", split="train")
```
"""
    written = work / "README.md"
    work.mkdir(exist_ok=True)
    written.write_text(text, encoding="utf-8")
    os.replace(written, path)


def _splits(config: str, of: str, splits: Sequence[str]) -> str:
    """The header's lines for one configuration; a split without rows cannot be loaded and is left out."""
    paths = [f"  - split: {split}\n    path: {json.dumps(f'{of}/{split}.parquet')}\n" for split in splits]
    return f"- config_name: {json.dumps(config)}\n  data_files:\n{''.join(paths)}" if paths else ""


def _has_rows(path: Path) -> bool:
    """Whether a table has rows; whoever loads it reports one that cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return bool(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException):
        return False


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, inner in value.items():
        label = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            yield from flat(inner, label + ".")
        else:
            yield label, inner


def _cell(value: Any) -> str:
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())
