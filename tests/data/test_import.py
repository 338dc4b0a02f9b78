"""Own files in the shapes that people have: `tests/cases`, layouts of public data, and the command that reads them."""

import gzip
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

from fedecider import from_events
from fedecider.cli.main import main
from fedecider.data import open_prepared

CASES = Path(__file__).resolve().parents[1] / "cases"
EXPECTED = json.loads((CASES / "formats" / "expected.json").read_text())
COMMANDS = {
    "amazon2023": "All_Beauty.jsonl --items meta_All_Beauty.jsonl",
    "yelp": "yelp_academic_dataset_review.json --items yelp_academic_dataset_business.json",
    "steam": "steam_reviews.json.gz --items steam_games.json.gz",
    "mind": "behaviors.tsv --items news.tsv",
    "bookcrossing": "BX-Book-Ratings.csv --items BX-Books.csv --encoding latin-1",
    "retail2": "online_retail_II.csv --bad_rows skip",
    "hm": "transactions_train.csv --items articles.csv",
}
"""Layout -> what follows ``fedecider import`` in its folder, as docs/data.md has it."""


def counts(domain):
    size = domain.size()
    return {"users": size.users, "items": size.items, "events": size.events}


def notes(data):
    return "\n".join(data.notes)


@pytest.mark.parametrize("layout", EXPECTED)
def test_public_layouts_come_in_with_one_command(layout, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(CASES / "formats" / layout)
    assert main(["import", *COMMANDS[layout].split(), "--company", layout, "--output", str(tmp_path / "data")]) == 0
    domain = open_prepared(tmp_path / "data")[layout]
    assert counts(domain) == EXPECTED[layout]
    said = capsys.readouterr().out
    assert f"came in: {EXPECTED[layout]['users']} users" in said
    titles = dict(zip(domain.item_keys, domain.titles, strict=True))
    assert {
        "amazon2023": lambda: titles["B000000000"] == "Quiet Lantern One",
        "yelp": lambda: titles["_b-000"] == "Quiet Lantern One",
        "steam": lambda: titles["70000"] == "Quiet Lantern One",
        "mind": lambda: (
            titles["N0"] == '"Quiet Lantern One" is the name, says one' and titles["N7"].startswith('The 7"')
        ),
        "bookcrossing": lambda: (
            titles["0034545104"] == "Quiet Lantern One : café über"
            and titles["0034545109X"] == 'A "quoted"; title with a semicolon'
            and titles["0034545110"] == "Peter & Paul"
        ),
        "retail2": lambda: titles["85022"] == "QUIET VELVET THREE" and titles["85006"].endswith('7"" SIZE'),
        "hm": lambda: titles["0100000000"] == "Quiet Lantern One",
    }[layout]()
    texts = dict(zip(domain.item_keys, domain.item_texts, strict=True))
    if layout == "amazon2023":
        assert texts["B000000001"].startswith("title: quiet lantern two; brand: acme; categories: beauty, hair")
    if layout == "hm":
        assert "; description: jersey top, with" in texts["0100000000"]


def test_quotes_in_a_file_with_tabs_are_letters():
    data = from_events(CASES / "plays_stray_quotes.tsv", item="track", texts={"title": "track", "author": "artist"})
    assert counts(data["shop"]) == {"users": 6, "items": 6, "events": 30}
    assert '"Song 3' in data["shop"].item_keys
    assert "quotes are letters" in notes(data)
    by_artist = from_events(CASES / "plays_stray_quotes.tsv", item="artist", texts={"title": "artist"})["shop"]
    assert counts(by_artist) == {"users": 6, "items": 5, "events": 30}


def test_tenths_of_a_second_order_events_and_tell_copies_apart(tmp_path):
    rows = pd.read_csv(CASES / "events_subsecond.csv", dtype=str)
    domain = from_events(CASES / "events_subsecond.csv", CASES / "items.csv")["shop"]
    assert domain.clients.sequences[0] == [0, 1, 2, 3]
    assert domain.card["clients"]["tied_last_two_share"] == domain.card["clients"]["tied_neighbours_share"] == 0.0
    backwards = from_events(rows[::-1], CASES / "items.csv", time="t")["shop"]
    assert backwards.content_hash() == domain.content_hash()
    later = [{**row, "t": f"{float(row['t']) + 0.5}"} for row in rows.to_dict("records")]
    both = pd.concat([rows, pd.DataFrame(later)])
    assert from_events(both, CASES / "items.csv")["shop"].card["raw"]["exact_duplicate_events"] == 0
    twice = from_events(pd.concat([rows, rows]), CASES / "items.csv")["shop"].card
    assert twice["raw"]["exact_duplicate_events"] == len(rows)
    assert twice["clients"]["tied_last_two_share"] == 1.0
    seconds = from_events(rows.assign(t=rows.t.str.split(".").str[0]), CASES / "items.csv")["shop"]
    assert seconds.card["clients"]["tied_last_two_share"] == 1.0


def test_numbers_of_eight_digits_are_days():
    data = from_events(CASES / "events_yyyymmdd.csv", CASES / "items.csv")
    times = data["shop"].clients.timestamps[0]
    assert [str(pd.Timestamp(one, unit="s"))[:10] for one in times] == [
        "2020-01-15",
        "2020-02-15",
        "2020-03-15",
        "2020-04-15",
    ]
    assert "column 't': times are read as %Y%m%d" in notes(data)


def test_milliseconds_are_taken_with_a_note(tmp_path):
    data = from_events(CASES / "events_ms.csv", CASES / "items.csv")
    assert data["shop"].clients.timestamps[0] == [1_600_000_000 + step for step in range(4)]
    assert "column 't': numbers are milliseconds since 1970" in notes(data)
    frame = pd.read_csv(CASES / "events_ms.csv")
    for factor, unit in ((1, "ms"), (1000, "us"), (10**6, "ns")):
        found = from_events(frame.assign(t=frame.t * factor), CASES / "items.csv")["shop"]
        assert found.content_hash() == data["shop"].content_hash(), unit
        named = from_events(frame.assign(t=frame.t * factor), CASES / "items.csv", time_format=unit)["shop"]
        assert named.content_hash() == data["shop"].content_hash(), unit


def test_dates_with_slashes_need_their_format():
    with pytest.raises(ValueError, match=r"time_format='%m/%d/%Y %H:%M' or time_format='%d/%m/%Y %H:%M'"):
        from_events(CASES / "events_slash_dates.csv", CASES / "items.csv")
    found = from_events(CASES / "events_slash_dates.csv", CASES / "items.csv", time_format="%m/%d/%Y %H:%M")["shop"]
    assert found.clients.timestamps[0][0] == int(pd.Timestamp("2010-12-01 08:10").timestamp())


def test_one_time_before_1970_is_one_bad_row():
    with pytest.raises(ValueError, match=r"got the time '-57600' in row 6 .* from 1990 to tomorrow \(bad_rows='skip'"):
        from_events(CASES / "events_one_negative.csv", CASES / "items.csv")
    data = from_events(CASES / "events_one_negative.csv", CASES / "items.csv", bad_rows="skip")
    assert data["shop"].clients.num_events == 47
    assert data["shop"].card["bad_rows"] == {"events": {"a time outside 1990 to tomorrow": 1}}
    assert "events: 1 bad rows: a time outside 1990 to tomorrow (1)" in str(data.report)


def test_lost_zeros_are_named():
    with pytest.raises(
        ValueError, match=r"no key in common; the tables write keys differently \(0001 and 1: leading zeros\)"
    ):
        from_events(CASES / "events_leading_zeros.csv", CASES / "items_leading_zeros_lost.csv")


def test_keys_that_lack_in_part_are_said_with_the_reason():
    rows = pd.read_csv(CASES / "events_ms.csv")
    items = pd.read_csv(CASES / "items.csv").replace({"i0": "I0"})
    with pytest.raises(ValueError, match=r"1 of 6 items without text, such as 'i0'.*\(i0 and I0: letter case\)"):
        from_events(rows, items, missing_text="error")
    data = from_events(rows, items)
    assert data.notes[0].startswith("1 of 6 items of the events have no row in items, such as 'i0'")
    assert "(i0 and I0: letter case)" in str(data.report)
    assert data["shop"].item_keys == ["i1", "i2", "i3", "i4", "i5"]


def test_latin_1_is_read_with_a_line_of_it_first():
    data = from_events(CASES / "events_ms.csv", CASES / "items_latin1.csv")
    assert data["shop"].titles[0] == "Café 0"
    assert "is read as cp1252 (line 2: 'i0,Café 0')" in data.notes[0]
    data = from_events(CASES / "events_ms.csv", CASES / "items_latin1.csv", encoding="latin-1")
    assert data["shop"].titles[0] == "Café 0"


def test_upper_and_lower_case_tell_titles_apart():
    from fedecider.models.item_search import Items

    domain = from_events(CASES / "case_events.csv", CASES / "case_items.csv")["shop"]
    items = Items(domain.item_keys, domain.titles)
    for title in ("IT", "It", "US", "Us"):
        found = items.resolve(title)
        assert domain.titles[found.number] == title
    assert "2 items have the title 'it'" in items.resolve("it").note
    assert domain.titles[items.resolve("alpha").number] == "Alpha"


def test_reviews_of_2023_are_read_as_they_are():
    data = from_events(CASES / "reviews_2023.jsonl", CASES / "items.csv")
    assert counts(data["shop"]) == {"users": 12, "items": 6, "events": 48}
    assert "item is column 'parent_asin'" in notes(data)
    with pytest.raises(ValueError, match=r"got reviews .* without a table of items"):
        from_events(CASES / "reviews_2023.jsonl")


ROWS = [
    {"user": f"u{user}", "item": f"0{(user + step) % 7}", "time": 1_600_000_000 + step}
    for user in range(9)
    for step in range(4)
]
THINGS = [
    {"item": f"0{number}", "title": f'Thing, {number}; "new"', "maker": "Acme" if number else "Bolt"}
    for number in range(7)
]


def written(rows, path, **how):
    frame = pd.DataFrame(rows)
    frame.to_csv(path, index=False, **how)
    return path


def as_jsonl(rows, path):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def as_gzip(rows, path):
    with gzip.open(path, "wt") as file:
        pd.DataFrame(rows).to_csv(file, index=False)
    return path


def as_parts(rows, path):
    path.mkdir()
    pa.parquet.write_table(pa.Table.from_pylist(rows[:3]), path / "part-0.parquet")
    pa.parquet.write_table(pa.Table.from_pylist(rows[3:]), path / "part-1.parquet")
    (path / "_SUCCESS").write_text("")
    return path


def as_csv_parts(rows, path):
    path.mkdir()
    written(rows[:3], path / "a.csv")
    as_gzip(rows[3:], path / "b.csv.gz")
    return path


FORMS = {
    "csv": lambda rows, path: written(rows, path / "t.csv"),
    "semicolons": lambda rows, path: written(rows, path / "t.csv", sep=";"),
    "pipes": lambda rows, path: written(rows, path / "t.txt", sep="|"),
    "tabs": lambda rows, path: written(rows, path / "t.tsv", sep="\t", quoting=3),
    "quoted tabs": lambda rows, path: written(rows, path / "t.tsv", sep="\t", quoting=1),
    "backslashes": lambda rows, path: written(rows, path / "t.csv", doublequote=False, escapechar="\\"),
    "mark": lambda rows, path: written(rows, path / "t.csv", encoding="utf-8-sig"),
    "utf-16": lambda rows, path: written(rows, path / "t.csv", encoding="utf-16"),
    "jsonl": lambda rows, path: as_jsonl(rows, path / "t.jsonl"),
    "json list": lambda rows, path: Path(path / "t.json").write_text(json.dumps(rows)) and path / "t.json",
    "gzip": lambda rows, path: as_gzip(rows, path / "t.csv.gz"),
    "folder": lambda rows, path: as_parts(rows, path / "t"),
    "folder of text": lambda rows, path: as_csv_parts(rows, path / "t"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_file_is_the_same(form, tmp_path):
    for one in ("events", "items"):
        (tmp_path / one).mkdir()
    events, items = FORMS[form](ROWS, tmp_path / "events"), FORMS[form](THINGS, tmp_path / "items")
    found = from_events(events, items)["shop"]
    assert found.content_hash() == from_events(ROWS, THINGS)["shop"].content_hash()
    assert found.titles[3] == 'Thing, 3; "new"'
    assert found.item_texts[3].endswith("brand: acme")


def test_files_without_a_line_of_names(tmp_path):
    events, items = (written(rows, tmp_path / f"{len(rows)}.csv", header=False) for rows in (ROWS, THINGS))
    with pytest.raises(ValueError, match=r"header='user,item,\.\.\.'"):
        from_events(events, items)
    found = from_events(events, items, header="user,item,time", items_header="item,title,maker")["shop"]
    assert found.content_hash() == from_events(ROWS, THINGS)["shop"].content_hash()


def test_rows_inside_quotes_are_not_lost_silently(tmp_path):
    """A quote that is never closed takes rows into a field, and no row may be lost without a word."""
    lines = [f"u{n // 4},0{n % 7},{1_600_000_000 + n},{chr(34) if n in (9, 21) else ''}note" for n in range(36)]
    (tmp_path / "t.csv").write_text("\n".join(["user,item,time,note", *lines]))
    data = from_events(tmp_path / "t.csv", THINGS)
    assert data["shop"].clients.num_events == 36
    assert "quotes are letters: as quotes 27 of 36 lines" in notes(data)
    with pytest.raises(ValueError, match=r"line 11 of t\.csv has a quote that does not end its field"):
        from_events(tmp_path / "t.csv", THINGS, quoting=True)
    whole = from_events(tmp_path / "t.csv", THINGS, quoting=False)
    assert whole["shop"].content_hash() == data["shop"].content_hash()
    assert "no rows of their own" not in notes(whole)


def test_rows_of_another_width_are_bad_rows(tmp_path):
    path = written(ROWS, tmp_path / "t.csv")
    path.write_text(path.read_text() + "u1,02\nu1,,1600000009\n")
    with pytest.raises(ValueError, match=r"line 38 of t\.csv has too few fields"):
        from_events(path, THINGS)
    data = from_events(path, THINGS, bad_rows="skip")
    assert data["shop"].clients.num_events == 36
    assert data["shop"].card["bad_rows"] == {"events": {"not in the file's form": 1, "no item": 1}}
    path = as_jsonl(ROWS, tmp_path / "t.jsonl")
    path.write_text(path.read_text() + "\n[1]\n{broken\n")
    with pytest.raises(ValueError, match=r"record 37 of t\.jsonl is no JSON object \(2 such rows\)"):
        from_events(path, THINGS)
    assert from_events(path, THINGS, bad_rows="skip").report.num_bad == 2


def test_returns_are_no_events(tmp_path):
    rows = [{**row, "qty": -1 if number % 9 == 8 else 2} for number, row in enumerate(ROWS)]
    data = from_events(rows, THINGS)
    assert data["shop"].clients.num_events == 32
    assert data["shop"].card["dropped"]["returns, and the purchases that they take back"] == {"events": 4}
    assert from_events(rows, THINGS, quantity="")["shop"].clients.num_events == 36


def command(*words):
    return main(["import", *map(str, words)])


def test_a_report_comes_before_anything_is_written(tmp_path, capsys):
    rows = [
        *ROWS,
        *({"user": "u1" * n, "item": "1" * (1 - n), "time": 1_600_000_000} for n in (1, 2, 3, 0, 4, 5, 0, 6)),
    ]
    events, items = written(rows, tmp_path / "orders.csv"), written(THINGS, tmp_path / "products.csv")
    out = tmp_path / "data"
    assert command(events, "--items", items, "--company", "shop", "--output", out) == 2
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == ["WARNING: 18% of the 44 rows of events did not come in", "items: 7 rows"]
    assert "note: events: 2 of 44 rows have no customer ('blank' 2 in column 'user'): left out" in said.out
    assert "error: got 6 bad rows, the first one: got no item in row 37 of the events" in said.err
    assert not out.exists()
    assert command(events, "--items", items, "--bad_rows", "skip", "--output", out, "--dry_run", "true") == 0
    assert not out.exists()
    assert command(events, "--items", items, "--bad_rows", "skip", "--output", out) == 0
    assert (
        open_prepared(out)["orders"].content_hash() == from_events(ROWS, THINGS, name="orders")["orders"].content_hash()
    )
    assert "orders: came in: 9 users, 7 items, 36 events" in capsys.readouterr().out


def test_companies_by_name(tmp_path, capsys):
    north, south = (written(ROWS, tmp_path / f"{one}.csv") for one in ("a", "b"))
    items = written(THINGS, tmp_path / "products.csv")
    words = (north, south, "--items", items, "--company", "north,south", "--output", tmp_path / "data", "--k_core", 2)
    assert command(*words) == 0
    found = open_prepared(tmp_path / "data")
    assert list(found) == ["north", "south"]
    assert found["north"].clients.users[0] == "north:u0"
    assert command(north, south, "--items", items, "--company", "north") == 2
    assert "expected a different name for each table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.csv", b"", "empty"),
        ("t.csv", b"PK\x03\x04rest", "is a zip archive"),
        ("t.csv", b"user,item\n\x00\x01\x02,1\n", "zero bytes"),
        ("t.jsonl", b"\n\n", "empty file"),
        ("t.json", b"[1, 2]", "without a JSON object"),
        ("t.csv.gz", b"\x1f\x8b\x08\x00broken", "truncated or damaged gzip file"),
        ("t.xlsx", b"", "expected one whose name ends with"),
        ("t.csv", b"user,item\n" + b"a,b\n" * 400_000 + b"\x81\x8d\x90,b\n", "not UTF-8"),
    ],
)
def test_files_that_are_none_are_told(name, content, expected, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        from_events(tmp_path / name, THINGS)
    assert expected in str(error.value)


def test_an_export_that_names_customer_and_time_on_the_first_line_of_an_order(tmp_path, capsys):
    """Equal to the same table with all cells filled; an order without a customer is left out, and said."""
    lines = ["Name,Email,Created at,Lineitem sku,Lineitem name,Lineitem quantity"]
    whole = list(lines)
    for order in range(12):
        about = f"u{order % 4}@x.example,2024-02-{order + 1:02d}"
        for item in range(3):
            sku = f"s{(order + item) % 5}"
            whole.append(f"#{order},{about},{sku},Thing {sku},1")
            lines.append(f"#{order},{about if item == 0 else ','},{sku},Thing {sku},1")
    (tmp_path / "orders.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "whole.csv").write_text("\n".join(whole) + "\n")
    carried = from_events(str(tmp_path / "orders.csv"), order="Name")
    expected = from_events(str(tmp_path / "whole.csv"))
    assert {name: one.content_hash() for name, one in carried.items()} == {
        name: one.content_hash() for name, one in expected.items()
    }
    in_memory = from_events(pd.read_csv(tmp_path / "orders.csv"), order="Name")
    assert in_memory["shop"].content_hash() == expected["shop"].content_hash()
    words = ["import", str(tmp_path / "orders.csv"), "--company", "shop", "--output", str(tmp_path / "data")]
    assert main(words) == 0  # a shop's export, whose orders are in Name
    assert open_prepared(tmp_path / "data")["shop"].content_hash() == expected["shop"].content_hash()
    (tmp_path / "orders.csv").write_text("\n".join([*lines, "#99,,,s1,Thing s1,1"]) + "\n")
    assert main([*words, "--order", "Name", "--dry_run", "true"]) == 0
    assert "events: 1 of 37 rows have no customer ('blank' 1 in column 'Email')" in capsys.readouterr().out


def test_orders_inside_one_object_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [{"sku": f"s{n}", "title": f"Thing {n}", "quantity": 1} for n in range(4)]
    orders = [
        {"customer": {"id": f"c{n % 3}"}, "created_at": f"2024-01-{n + 1:02d}T09:00:00Z", "line_items": lines[n % 2 :]}
        for n in range(9)
    ]
    (tmp_path / "dump.json").write_text(json.dumps({"orders": orders}, indent=1))
    data = from_events("dump.json")
    assert data["shop"].clients.num_events == sum(len(one["line_items"]) for one in orders) == 32
    assert data["shop"].item_keys == ["s0", "s1", "s2", "s3"]


def test_baskets_in_a_column_are_read(tmp_path, monkeypatch):
    """As an analytics service exports them."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "event_timestamp": (1_700_000_000 + 60 * row) * 10**6,
            "user_pseudo_id": f"{row % 3}.7",
            "items": [
                {"item_id": f"S{(row + n) % 5}", "item_name": f"Thing {(row + n) % 5}"} for n in range(1 + row % 2)
            ],
        }
        for row in range(12)
    ]
    Path("ga4.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"expected 'item_id' \(perhaps 'items\.item_id'\)"):
        from_events("ga4.jsonl", user="user_pseudo_id", item="item_id")
    data = from_events("ga4.jsonl")
    assert data["shop"].clients.num_events == sum(len(row["items"]) for row in rows) == 18
    assert data["shop"].titles[0].startswith("Thing ")


SOLD = [(f"u{user}", f"{user * 3 + step}", 4 - step) for user in range(4) for step in (2, 0, 1)]
"""User, item and the day of an event; rows are not in the order of the days."""


def sold(write):
    return [write(user, item, day) for user, item, day in SOLD]


@pytest.mark.parametrize(
    ("column", "value"),
    [("purchased", "{day:02d}/20/2026 08:50 PM"), ("wann", "{day}.1.2026"), ("sold_ms", "176{day}800000000")],
)
def test_times_under_a_name_of_their_own_are_never_left_out_silently(column, value):
    rows = sold(lambda user, item, day: {"user": user, "item": item, "title": item, column: value.format(day=day)})
    with pytest.raises(ValueError, match=f"'{column}' holds times .* expected the column's name: time='{column}'"):
        from_events(rows)
    found = from_events(rows, time="none")["shop"]
    assert found.clients.timestamps is None
    numbers = [{**row, column: 10_000 + place} for place, row in enumerate(rows)]  # of receipts, say
    assert from_events(numbers)["shop"].clients.timestamps is None


def test_fields_of_an_object_inside_a_line_are_columns(tmp_path):
    lines = sold(
        lambda user, item, day: {
            "customer": {"id": user, "country": None},
            "item": {"ean": item, "title": f"thing {item}", "seller": {"name": "x"}},
            "ordered_at": f"2026-01-0{day}",
        }
    )
    (tmp_path / "orders.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = from_events(tmp_path / "orders.jsonl")
    assert "user is column 'customer.id', item is column 'item.ean'" in notes(data)
    assert "unused columns: customer.country, item.seller.name" in notes(data)
    found = data["shop"]
    u0 = found.clients.sequences[found.clients.users.index("u0")]
    assert [found.item_keys[one] for one in u0] == ["2", "1", "0"]
    assert found.titles[found.item_keys.index("2")] == "thing 2"


def test_companies_that_are_imported_one_by_one_are_matched_by_key(tmp_path, capsys):
    for name, more in (("north", 0), ("south", 4)):
        lines = sold(lambda user, item, day, more=more: f"{user},{int(item) + more},2026-01-0{day}")
        (tmp_path / f"{name}.csv").write_text("\n".join(["user,item,date", *lines]))
        titles = [f"{key},thing {key} of {name}" for key in range(20)]
        (tmp_path / f"{name}_items.csv").write_text("\n".join(["item,title", *titles]))
        files = [str(tmp_path / f"{name}.csv"), "--items", str(tmp_path / f"{name}_items.csv")]
        assert main(["import", *files, "--catalogue", "ean", "--output", str(tmp_path / "data")]) == 0
    data = open_prepared(tmp_path / "data")
    assert {one.catalogue.name for one in data.values()} == {"ean"}
    assert data["south"].clients.users[0].startswith("south:")  # u0 of both are two customers
    items = f"{tmp_path}/north_items.csv,{tmp_path}/south_items.csv"
    both = [str(tmp_path / "north.csv"), str(tmp_path / "south.csv"), "--items", items]
    assert main(["import", *both, "--output", str(tmp_path / "both")]) == 0
    assert {one.catalogue.name for one in open_prepared(tmp_path / "both").values()} == {"shop"}
    assert main(["import", *both[:2], "--items", f"{items},x.csv", "--output", str(tmp_path / "none")]) == 2
    assert "got 3 tables of items and 2 of events" in capsys.readouterr().err
