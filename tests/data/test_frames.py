"""Own tables of events and items become prepared domains, whatever holds them."""

import re
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import datasets
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.parquet
import pytest

from fedecider.data import from_events
from fedecider.data.frames import events_of
from fedecider.data.store import load_domains

SETTINGS = {"k_core": 0, "public": 0.3}
START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def events(num_users=12, **more):
    """User u bought items u, u + 1, u + 2, newest first in the table."""
    rows = [
        {"customer": 100 + user, "sku": f"0{(user + step) % 6}", "when": START + timedelta(hours=step)}
        for user in range(num_users)
        for step in (2, 1, 0)
    ]
    return [{**row, **more} for row in rows]


def items(**more):
    return [{"sku": f"0{number}", "title": f"Thing <b>{number}</b>", "price": number, **more} for number in range(6)]


NAMES = {"user": "customer", "item": "sku", "time": "when"}
FORMS = {
    "lists": lambda rows, _: rows,
    "pandas": lambda rows, _: pd.DataFrame(rows),
    "pyarrow": lambda rows, _: pa.Table.from_pylist(rows),
    "datasets": lambda rows, _: datasets.Dataset.from_list(rows),
    "streams": lambda rows, _: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    "polars": lambda rows, _: polars.DataFrame(rows),
}


def parquet(rows, folder):
    path = folder / f"{'when' in rows[0]}.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def text(rows, folder, mark=","):
    path = folder / f"{'when' in rows[0]}.{'csv' if mark == ',' else 'tsv'}"
    pd.DataFrame(rows).to_csv(path, sep=mark, index=False)
    return str(path)


FORMS |= {"parquet": parquet, "csv": text, "tsv": lambda rows, folder: text(rows, folder, "\t")}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_domain(form, tmp_path):
    make = FORMS[form]
    found = from_events(make(events(), tmp_path), make(items(), tmp_path), **NAMES, **SETTINGS)["shop"]
    expected = from_events(events(), items(), **NAMES, **SETTINGS)["shop"]
    assert found.content_hash() == expected.content_hash()
    assert found.item_keys == [f"0{number}" for number in range(6)]  # as they are written
    assert found.titles[3] == "Thing 3"
    assert "price" not in found.item_texts[0]  # off by default, as for every reader
    everyone = {**dict(zip(found.clients.users, found.clients.sequences, strict=True))}
    everyone |= dict(zip(found.public.users, found.public.sequences, strict=True))
    assert everyone["104"] == [4, 5, 0]  # oldest first, by the times
    assert 0 < len(found.public.users) < 12


def test_three_lines_are_enough(tmp_path):
    domains = from_events(events(), items(), **NAMES, users_per_domain=6, silos=2)
    assert domains.save(tmp_path / "data") == tmp_path / "data"
    assert list(domains) == ["shop.1", "shop.2"]
    loaded = load_domains(tmp_path / "data")
    assert {name: one.content_hash() for name, one in loaded.items()} == {
        name: one.content_hash() for name, one in domains.items()
    }


def test_a_column_of_domains_shares_the_tables_out():
    rows = events(area="b") + events(area="a")
    things = items(area="a") + items(area="b")
    found = from_events(rows, things, **NAMES, domain="area", **SETTINGS)
    assert list(found) == ["a", "b"]
    alone = from_events(events(), items(), name="a", **NAMES, **SETTINGS)["a"]
    assert found["a"].content_hash() == alone.content_hash()


def test_without_times_the_rows_give_the_order():
    found = from_events(events(), items(), user="customer", item="sku", time="none", **SETTINGS)["shop"]
    users = dict(zip(found.clients.users, found.clients.sequences, strict=True))
    assert users[min(users)] == [(int(min(users)) - 100 + step) % 6 for step in (2, 1, 0)]
    assert found.clients.timestamps is None


@pytest.mark.parametrize(
    "written",
    [
        lambda time: time.timestamp(),
        lambda time: int(time.timestamp()),
        lambda time: time.replace(tzinfo=None),  # UTC where no zone is named
        lambda time: time.astimezone(timezone(timedelta(hours=9))),
        lambda time: time.isoformat(),
    ],
)
def test_times_of_every_kind_are_the_same_moments(written):
    rows = [{**row, "when": written(row["when"])} for row in events()]
    found = from_events(rows, items(), **NAMES, **SETTINGS)["shop"]
    assert found.content_hash() == from_events(events(), items(), **NAMES, **SETTINGS)["shop"].content_hash()


@pytest.mark.parametrize("written", [lambda time: time, lambda time: time.timestamp(), lambda time: time.isoformat()])
def test_events_within_a_second_are_in_order(written):
    """Also of a table that is newest first, as exports are."""
    rows = [{**row, "when": START + timedelta(milliseconds=number)} for number, row in enumerate(events())]
    found = from_events(
        [{**row, "when": written(row["when"])} for row in reversed(rows)], items(), **NAMES, **SETTINGS
    )["shop"]
    hours = [{**row, "when": START + timedelta(hours=number)} for number, row in enumerate(events())]
    expected = from_events(hours, items(), **NAMES, **SETTINGS)["shop"]
    assert found.clients.users == expected.clients.users
    assert found.clients.sequences == expected.clients.sequences
    assert len({time for times in found.clients.timestamps for time in times}) == 1  # whole seconds


@pytest.mark.parametrize(
    "value",
    [True, False, Decimal("1.5"), "1e9", "1_600_000_000", "nan", 1e300, "", None, b"x", [1]],
)
def test_other_columns_may_hold_anything(value):
    """Columns that nobody named are looked at, so that one of times is not passed over."""
    untimed = [{name: row[name] for name in row if name != "when"} for row in events()]
    rows = pa.Table.from_pylist([{**row, "gift": value, "gift_time": value} for row in untimed])
    found = from_events(rows, items(), user="customer", item="sku", **SETTINGS)["shop"]
    assert (
        found.content_hash()
        == from_events(untimed, items(), user="customer", item="sku", **SETTINGS)["shop"].content_hash()
    )


def test_ratings_and_texts_by_name():
    rows = [{**row, "stars": 5 if row["sku"] != "03" else 1} for row in events()]
    things = [{**row, "label": row.pop("title")} for row in items()]
    named = {**NAMES, "rating": "stars", "texts": {"title": "label"}}
    found = from_events(rows, things, **named, **SETTINGS, min_rating=3.0)["shop"]
    assert "03" not in found.item_keys
    assert found.item_texts[0] == "title: thing 0"
    assert found.card["dropped"]


def test_duplicate_events_are_kept_or_dropped_as_everywhere():
    twice = events() + events()
    kept = from_events(twice, items(), **NAMES, **SETTINGS)["shop"]
    first = from_events(twice, items(), **NAMES, **SETTINGS, repeats="first")["shop"]
    assert first.content_hash() == from_events(events(), items(), **NAMES, **SETTINGS)["shop"].content_hash()
    assert kept.clients.num_events == 2 * first.clients.num_events


GAPS = pd.DataFrame(events())
TWICE = pa.table([["a"], ["b"], [1], ["c"]], names=["customer", "sku", "when", "sku"])
WIDE = [{**row, "customer": float(2**53 + row["customer"])} for row in events()]
BAD = {
    "keys that floats cannot tell apart": (WIDE, items(), {}, "expected text or a whole number"),
    "a name twice": (TWICE, items(), {}, "two columns 'sku'"),
    "an unknown file": ("events.xlsx", items(), {}, "expected one whose name ends with .parquet, .csv or .tsv"),
    "no such pool": (events(), items(), {"public_domains": "b"}, "got public_domains ['b']"),
    "no such column": (events(), items(), {"user": "client"}, "got events with the columns customer, sku, when, expec"),
    "an item that is None": ([{**events()[0], "sku": None}], items(), {}, "got no item in row 1 of the events"),
    "one column as user and as item": (
        events(),
        items(),
        {"user": "sku"},
        "got the column 'sku' of the events as user",
    ),
    "a truth as time": (
        [{**row, "when": True} for row in events()],
        items(),
        {},
        "times such as 'true' in the column 'when'",
    ),
    "no time": (
        [*events()[:3], {**events()[3], "when": None}],
        items(),
        {},
        "got no time in row 4 of the events (column 'when'), expected one in every row: leave such rows out",
    ),
    "a word as time": (
        [{**row, "when": "soon"} for row in events()],
        items(),
        {},
        "times such as 'soon' in the column 'when'",
    ),
    "no events": (pd.DataFrame(events()).iloc[:0], items(), {}, "got no events"),
    "a number as table": (7, items(), {}, "got int as events"),
    "a missing file": ("nowhere.parquet", items(), {}, "there is no file nowhere.parquet with the events"),
    "milliseconds among seconds": (
        [{**row, "when": 1_600_000_000 * (1000 if number == 7 else 1)} for number, row in enumerate(events())],
        items(),
        {},
        "got the time '1600000000000' in row 8 of the events (column 'when'), expected a time from 1990 to tomorrow",
    ),
    "no format of times": (events(), items(), {"time_format": "days"}, "got the time_format 'days', expected s, ms,"),
    "no rule for quotes": (events(), items(), {"quoting": "maybe"}, "got quoting 'maybe', expected true or false"),
    "no rule for bad rows": (events(), items(), {"bad_rows": "drop"}, "got bad_rows 'drop', expected error or skip"),
    "a setting that is none": (events(), items(), {"kcore": 3}, "got the options kcore"),
    "a threshold without ratings": (events(), items(), {"min_rating": 3.0}, "got min_rating without a rating column"),
    "an item without text": (
        events(),
        items()[1:],
        {"missing_text": "error"},
        "1 of 6 items without text, such as '00'",
    ),
    "one item twice": (events(), [*items(), {"sku": "01", "title": "other"}], {}, "duplicate item key '01'"),
    "one user": (events(1), items(), {}, "expected at least 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_told_in_a_sentence(case):
    rows, things, words, expected = BAD[case]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        from_events(rows, things, **{**NAMES, **SETTINGS, **words})
    assert expected in str(error.value)


def test_items_without_any_text_are_known_by_their_keys():
    data = from_events(events(), [{"sku": "01"}], **NAMES, **SETTINGS)
    assert data["shop"].item_keys == [f"0{number}" for number in range(6)]
    assert "no item has a text: keys stand in the place of titles" in "".join(data.notes)
    assert "5 of 6 items of the events have no row in items, such as '00'" in "".join(data.notes)


def test_the_lines_of_the_documents_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"customer": "customer", "sku": "sku", "when": "bought_at"}
    orders = [{names[column]: value for column, value in row.items()} for row in events(60) * 2]
    orders = [{**row, "seller": "north" if row["customer"] % 2 else "south"} for row in orders]
    pa.parquet.write_table(pa.Table.from_pylist(orders), "orders.parquet")
    pd.DataFrame([{"sku": row["sku"], "label": row["title"]} for row in items()]).to_csv("products.csv", index=False)
    text = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "from_events" in block]
    found: dict = {"pd": pd}
    for name in ("north", "south"):
        rows = [row for row in orders if row["seller"] == name]
        pa.parquet.write_table(pa.Table.from_pylist(rows), f"{name}.parquet")
    for block in blocks:
        exec(block, found)
    assert load_domains("data/shop")["shop"].content_hash() == found["data"]["shop"].content_hash()
    assert list(found["column"]) == list(found["companies"])
    assert list(load_domains("data/shops")) == list(found["companies"]) == ["north", "south"]


def test_bad_rows_of_a_known_company_are_all_counted_and_said():
    """As an import does it; for `update`, `recommend` and the sites of a deployment."""
    rows = [{"user": f"u{n % 3}", "item": f"k{n}", "date": f"2024-02-{1 + n:02}"} for n in range(20)]
    rows[4]["item"], rows[7]["date"], rows[9]["date"] = None, "soon", "later"
    with pytest.raises(ValueError, match=r"got 3 bad rows, the first one: .*; nothing was written"):
        events_of(rows)
    known = events_of(rows, {"bad_rows": "skip"})
    assert known.events.size().events == 17
    (said,) = [text for text in known.said if "bad rows" in text]
    assert said.startswith("events: 3 bad rows: ")
    assert "(2)" in said
