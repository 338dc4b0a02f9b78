"""Tables as shops really export them (`tests/cases/shops`, and others of these kinds): each with its right value."""

import json
from pathlib import Path

import datasets
import pandas as pd
import pytest
import yaml

from fedecider import from_events
from fedecider.cli.main import main
from fedecider.data import open_prepared
from fedecider.data.frames import events_of
from fedecider.data.mapping import columns_from
from fedecider.models.lists import keys_in

SHOPS = Path(__file__).resolve().parents[1] / "cases" / "shops"
SAME = {f"c{user}": [f"p{(3 * user + step) % 10}" for step in (0, 3, 0, 1, 6)] for user in range(12)}
"""What every customer of the invented shops bought, oldest first."""


def bought(data, name="shop"):
    """Customer -> keys, oldest first."""
    domain = data[name]
    found = {}
    for group in (domain.clients, domain.public):
        for user, items in zip(group.users, group.sequences, strict=True):
            found[user] = [domain.item_keys[item] for item in items]
    return found


def notes(data):
    return "\n".join(data.notes)


def read(folder, events, items="products.csv", **options):
    return from_events(SHOPS / folder / events, SHOPS / folder / items if items else None, **options)


def without(places):
    """``SAME`` without some events: (customer, place)."""
    return {user: [key for place, key in enumerate(keys) if (user, place) not in places] for user, keys in SAME.items()}


def test_sessions_are_customers_where_these_are_na():
    data = read("01-diginetica", "train-item-views.csv")
    assert data.notes[0].startswith("events: 40 of 60 rows have no customer ('NA' 40 in column 'user_id'): left out")
    assert "customers may be in 'session_id': user='session_id'" in data.notes[0]
    assert len(bought(data)) == 4
    by_session = bought(read("01-diginetica", "train-item-views.csv", user="session_id", time="eventdate+timeframe"))
    assert len(by_session) == 12
    assert by_session["1"] == ["1000", "1003", "1000", "1001", "1006"]
    days = read("01-diginetica", "train-item-views.csv", user="session_id")
    assert "'timeframe' may tell the order within a day" in notes(days)


@pytest.mark.parametrize(
    ("file", "key"),
    {
        "NULL": "NULL",
        "None": "None",
        "backslashN": r"\N",
        "dash": "-",
        "guest": "guest",
        "minus1": "-1",
        "nan": "nan",
        "notset": "(not set)",
        "zero": "0",
    }.items(),
)
def test_customers_that_are_none(file, key):
    data = read("02-null-like-customers", f"orders_{file}.csv")
    assert bought(data) == {user: SAME[user] for user in sorted(SAME) if int(user[1:]) % 2 == 0}
    assert data.notes[0] == f"events: 30 of 60 rows have no customer ({key!r} 30 in column 'customer_id'): left out"
    assert data["shop"].card["dropped"]["rows without a customer"] == {"events": 30}


@pytest.mark.parametrize("file", ["feb31", "initial", "open_end", "zero"])
def test_a_day_that_is_none_is_one_bad_row(file):
    with pytest.raises(ValueError, match=r"in row 11 of the events \(column 'date'\)"):
        read("03-sap-initial-date", f"vbap_{file}.csv")
    data = read("03-sap-initial-date", f"vbap_{file}.csv", bad_rows="skip")
    assert bought(data) == without({("c2", 0)})
    assert data.report.num_bad == 1
    assert "2021-03-01 to 2021-05-03" in str(data.report)


@pytest.mark.parametrize("file", ["ddmmyyyy", "excel_serial", "mmddyyyy", "yymmdd", "yyyymmddhhmm", "yyyymmddhhmmss"])
def test_dates_written_as_other_numbers(file):
    data = read("04-dates-as-other-numbers", f"{file}.csv")
    assert bought(data) == SAME
    assert "2020-10-25 to 2021-02-05" in str(data.report)


def test_days_without_a_year_are_refused():
    with pytest.raises(ValueError, match="days without a year, expected one: put the year in front"):
        read("04-dates-as-other-numbers", "mmdd_tmall.csv")


@pytest.mark.parametrize("items", [None, "products.csv", "products_stray.csv"])
def test_no_line_is_swallowed_by_a_quote(items):
    data = read("06-stray-quote-csv", "orders.csv", items)
    assert bought(data) == SAME
    assert "as quotes 51 of 60 lines of orders.csv were inside them" in notes(data)
    if items == "products_stray.csv":
        assert data["shop"].titles[3:5] == ['"Delta lamp number 3', "Ember lamp number 4"]


@pytest.mark.parametrize("items", [None, "products.csv", "products_ok.csv"])
def test_keys_that_a_spreadsheet_has_rounded_are_refused(items):
    with pytest.raises(ValueError, match=r"'4.00638E\+12' .*in scientific notation: digits are lost"):
        read("07-excel-scientific-ean", "orders.csv", items)


@pytest.mark.parametrize("file", ["orders_export_1.csv", "orders_mails_alike.csv"])
def test_orders_of_a_shop_system(file):
    with pytest.raises(ValueError, match=r"'Financial Status' holds paid .*; 'Cancelled at' holds blank"):
        read("09-shopify-orders", file, None)
    data = read("09-shopify-orders", file, None, keep="Cancelled at=", bad_rows="skip")
    assert "52 events, 12 customers, 9 items" in str(data.report)
    assert "events: 2 of 60 rows have no customer ('blank' 2 in column 'Email')" in notes(data)
    assert data["shop"].card["bad_rows"] == {"events": {"no item": 5}}
    assert set(bought(data)) < {f"c{user}@example.org" for user in range(12)}


def test_lists_inside_records():
    assert bought(read("10-nested-sessions", "ga4.jsonl", None, keep={"event_name": ["purchase"]})) == {
        f"{user[1:]}.99": keys for user, keys in SAME.items()
    }
    with pytest.raises(ValueError, match="user='session' \\(--user\\)"):
        read("10-nested-sessions", "otto.jsonl", None)
    with pytest.raises(ValueError, match=r"'events.type' holds clicks \(60\): --keep events.type=\*"):
        read("10-nested-sessions", "otto.jsonl", None, user="session")
    assert bought(read("10-nested-sessions", "otto.jsonl", None, user="session", keep="events.type=*")) == {
        user[1:]: [f"10{key[1:]}" for key in keys] for user, keys in SAME.items()
    }


def test_a_customer_of_one_order_is_no_person():
    data = read("12-customer-id-per-order", "orders.csv")
    assert bought(data) == {f"person{user[1:]}": keys for user, keys in SAME.items()}
    frame = pd.read_csv(SHOPS / "12-customer-id-per-order" / "orders.csv")
    frame, items = frame.rename(columns={"customer_unique_id": "person_hash"}), "12-customer-id-per-order/products.csv"
    with pytest.raises(ValueError, match=r"is this key new in every order\?; customers may be in 'person_hash'"):
        from_events(frame, SHOPS / items)
    assert bought(from_events(frame, SHOPS / items, user="person_hash")) == bought(data)


@pytest.mark.parametrize("items", [None, "products.csv"])
def test_several_items_in_one_cell_are_an_event_each(items):
    data = read("14-items-in-one-cell", "orders.csv", items)
    assert {user: sorted(keys) for user, keys in bought(data).items()} == {
        user: sorted(keys) for user, keys in SAME.items()
    }
    assert "24 cells of column 'sku' hold several keys, such as 'p0, p3'" in notes(data)
    assert data["shop"].titles[3] == "Delta lamp number 3"


@pytest.mark.parametrize("file", ["binary", "decimal38", "float_user_tz", "null_user", "uint64_dict_date32"])
def test_types_of_warehouses(file):
    found = bought(read("20-parquet-types", f"{file}.parquet"))
    assert list(found.values()) == [SAME[f"c{user}"] for user in _order_of(found)]
    assert len(found) == (11 if file == "null_user" else 12)
    if file == "decimal38":
        assert len({key[-2:] for key in found}) == 12  # digits beyond 2^53 are kept


def _order_of(found):
    """The numbers of customers by what they bought last."""
    first = {tuple(keys): int(user[1:]) for user, keys in SAME.items()}
    numbers = []
    for keys in found.values():
        same = [number for other, number in first.items() if list(other) == keys]
        numbers += same[:1]
    return numbers


@pytest.mark.parametrize(
    ("file", "num_bad"), [("iso_with_2099", 3), ("iso_with_epoch", 3), ("ms_with_seconds", 6), ("seconds_with_zero", 3)]
)
def test_times_that_cannot_be_are_bad_rows(file, num_bad):
    with pytest.raises(ValueError, match=f"expected a time from 1990 to tomorrow \\({num_bad} such rows\\)"):
        read("22-mixed-units-and-zero", f"{file}.csv")
    data = read("22-mixed-units-and-zero", f"{file}.csv", bad_rows="skip")
    assert data.report.num_bad == num_bad
    found = bought(data)
    assert len(found) == 12
    assert sum(map(len, found.values())) == 60 - num_bad
    for user, keys in found.items():
        rest = iter(SAME[user])
        assert all(key in rest for key in keys), user  # in the same order


def test_kinds_of_events_are_asked_about():
    with pytest.raises(ValueError, match=r"view \(120\), cart \(60\), purchase \(60\): --keep event_type=purchase"):
        read("24-event-types", "2019-Oct.csv", None)
    data = read("24-event-types", "2019-Oct.csv", None, keep="event_type=purchase")
    assert bought(data) == {user[1:]: keys for user, keys in SAME.items()}
    assert data.notes[0].startswith("WARNING: events: no title among the texts (brand, categories)")


def test_cancelled_orders_are_asked_about():
    with pytest.raises(ValueError, match=r"complete \(56\), canceled \(4\): --keep status=complete; 'cancelled_at'"):
        read("25-cancelled-orders", "orders.csv")
    by_status = bought(read("25-cancelled-orders", "orders.csv", keep={"status": ["complete"]}))
    assert sum(map(len, by_status.values())) == 56
    assert by_status["c0"] == ["p0", "p3", "p0", "p1"]
    assert bought(read("25-cancelled-orders", "orders.csv", keep="cancelled_at=")) == by_status
    with pytest.raises(ValueError, match="got keep status='paid', which no row of the events has"):
        read("25-cancelled-orders", "orders.csv", keep="status=paid")


def test_titles_and_keys_of_products_under_other_names(capsys):
    data = read("title_ignored", "orders.csv", "items.csv")
    assert data["shop"].titles == ["Mario Party 8", "Bloodborne", "Metal Gear Solid"]
    frame = pd.read_csv(SHOPS / "item_key_two_names" / "orders.csv", dtype=str)
    frame = pd.concat([frame, frame.assign(customer="2")])
    for key in (None, "EAN"):
        found = from_events(frame, SHOPS / "item_key_two_names" / "items.csv", items_key=key)["shop"]
        assert dict(zip(found.item_keys, found.titles, strict=True))["0002"] == "Bloodborne"


def test_returns_take_back_what_they_return():
    data = read("returns", "orders.csv", "items.csv")
    assert bought(data)["1"] == ["a", "b", "c"]
    assert data["shop"].card["dropped"]["returns, and the purchases that they take back"] == {"events": 2}
    rows = [
        {"customer": user, "sku": sku, "time": f"2024-01-{day:02d}", "qty": qty, "order_no": order}
        for user in "uv"
        for sku, day, qty, order in (
            ("a", 1, 2, "o1"), ("b", 2, 1, "o2"), ("a", 3, 1, "o3"), ("c", 4, 1, "o4"), ("d", 4, 0, "o4"),
            ("a", 5, -2, "o1"), ("b", 1, -1, "o9"), ("e", 6, 1, "o6"),
        )
    ]  # fmt: skip
    for row in rows[:8]:
        row["qty"] = "-1" if row["qty"] == -2 else row["qty"]
    found = bought(from_events(pd.DataFrame(rows).astype(str), [{"sku": key, "title": f"t {key}"} for key in "abcde"]))
    assert found == {"u": ["a", "b", "a", "c", "e"], "v": ["b", "a", "c", "e"]}


# Others of these kinds

TITLES = "key;title\n" + "".join(f"k{number};Lamp {number} of brass\n" for number in range(7))
PLAIN = [
    (f"u{user}", f"k{(2 * user + 3 * step) % 7}", f"2021-0{step + 1}-1{user % 9}")
    for user in range(8)
    for step in range(4)
]
RIGHT = {f"u{user}": [f"k{(2 * user + 3 * step) % 7}" for step in range(4)] for user in range(8)}


def written(tmp_path, text, name="t.csv"):
    (tmp_path / name).write_text(text)
    (tmp_path / "items.csv").write_text(TITLES)
    return tmp_path / name, tmp_path / "items.csv"


def lines(names, write, mark=","):
    rows = [mark.join(write(user, key, day)) for user, key, day in reversed(PLAIN)]
    return "\n".join([mark.join(names), *rows]) + "\n"


def german(user, key, day):
    return user, key, ".".join(reversed(day.split("-")))


FORMS = {
    "sep=": "sep=;\n" + lines(("user", "item", "date"), lambda *row: row, ";"),
    "lines above": "Export of orders\nfrom 1.1.2021 to 31.12.2021\n\n" + lines(
        ("user", "item", "date"), lambda *row: row, ";"),
    "decimal commas": lines(("user", "item", "date", "qty"), lambda *row: (*row, "1,000"), ";"),
    "date and clock": lines(("user", "item", "date", "uhrzeit"), lambda *row: (*row, "09:30")),
    "UTC": lines(("user", "item", "event_time"), lambda user, key, day: (user, key, f"{day} 10:11:12 UTC")),
    "zones": lines(("user", "item", "created_at"), lambda user, key, day: (user, key, f"{day} 10:11:12 -0500")),
    "mail's dates": lines(("user", "item", "date"), lambda user, key, day: (
        user, key, pd.Timestamp(day).strftime("%a, %d %b %Y 10:11:12 +0000")), ";"),
    "Oracle": lines(("user", "item", "date"), lambda user, key, day: (
        user, key, pd.Timestamp(day).strftime("%d-%b-%y 10.11.12.000000 PM").upper())),
    "Magento": lines(("user", "item", "created_at"), lambda user, key, day: (
        user, key, pd.Timestamp(day).strftime("%b %-d, %Y 10:11:12 AM")), ";"),
    "formulas": lines(("user", "item", "date"), lambda user, key, day: (user, f'="{key}"', day), ";"),
    "blanks": lines(("user", "item", "date"), lambda user, key, day: (f" {user} ", f"{key} ", f" {day}")),
    "German": lines(("Kundennr", "Artikelnummer", "Belegdatum"), german, ";"),
    "French": lines(("code_client", "ref_article", "date_commande"), german, ";"),
    "Spanish": lines(("cliente", "codigo_producto", "fecha_pedido"), german, ";"),
    "Italian": lines(("codice_cliente", "codice_articolo", "data_ordine"), german, ";"),
    "Dutch": lines(("klantnummer", "artikelnummer", "besteldatum"), german, ";"),
    "a grocer's": lines(("household_id", "basket_id", "product_id", "quantity", "transaction_timestamp"),
        lambda user, key, day: (user, f"b{user}{day}", key, "1", f"{day}T10:11:12Z")),
    "one customer of many events": lines(("user", "item", "date"), lambda *row: row) + "".join(
        f"4711,k{number % 7},2021-01-0{1 + number % 9}\n" for number in range(60)),
    "negative prices": lines(("user", "item", "date", "discount"), lambda *row: (*row, f"-{row[2][-2:]}.50")),
    "a status in German": lines(("user", "item", "date", "Status"), lambda *row: (*row, "bezahlt"))
    + "u1,k1,2021-09-01,storniert\n",
    "a status in French": lines(("user", "item", "date", "statut"), lambda *row: (*row, "payé"))
    + "u1,k1,2021-09-01,remboursé\n",
    "a flag": lines(("user", "item", "date", "is_cancelled"), lambda *row: (*row, "false")) + "u1,k1,2021-09-01,true\n",
}  # fmt: skip
SETTINGS = {
    "a status in German": {"keep": "Status=bezahlt"},
    "a status in French": {"keep": "statut=payé"},
    "a flag": {"keep": "is_cancelled=false"},
}
SAID = {
    "lines above": "lines above the line of names are passed over",
    "date and clock": "times are columns 'date' and 'uhrzeit' together",
    "one customer of many events": "60 of 92 rows have no customer ('4711' 60 in column 'user')",
    "a status in German": "rows that do not count (keep) (1 event)",
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_the_same_orders(form, tmp_path):
    paths = written(tmp_path, FORMS[form])
    if form in SETTINGS:
        with pytest.raises(ValueError, match="may say which rows are purchases"):
            from_events(*paths)
    data = from_events(*paths, **SETTINGS.get(form, {}))
    assert bought(data) == RIGHT
    assert "2021-01-10 to 2021-04-17" in str(data.report)
    assert data["shop"].titles[2] == "Lamp 2 of brass"
    assert SAID.get(form, "") in str(data.report) + notes(data)
    assert data.report.num_bad == 0


REFUSED = {
    "german words": lines(
        ("Kunde", "Artikel", "Datum"), lambda user, key, day: (user, key, f"{day[8:]}. April 2021"), ";"
    ),
    "weeks": lines(("user", "item", "date"), lambda user, key, day: (user, key, f"2021-W{day[6]}0")),
    "another mark": lines(("user", "item", "date"), lambda *row: row, "^"),
    "kinds of documents": lines(("user", "item", "date", "Belegart"), lambda *row: (*row, "RE"))
    + "u1,k1,2021-09-01,GS\n",
    "a line of sums": lines(("user", "item", "date"), lambda *row: row) + "Total,,\n",
    "names again": 2 * lines(("user", "item", "date"), lambda *row: row),
}
WHY = {
    "german words": "times such as '17. April 2021' in the column 'Datum', of which most can be read in no known form",
    "weeks": "times such as '2021-W40' in the column 'date'",
    "another mark": "delimiter='...' (--delimiter)",
    "kinds of documents": "'Belegart' holds RE (32), GS (1)",
    "a line of sums": "got no item in row 33",
    "names again": "got the time 'date' in row 33",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_rule_can_read_is_said_and_not_passed_over(case, tmp_path):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        from_events(*written(tmp_path, REFUSED[case]))
    assert WHY[case] in str(error.value)


FIRST = {
    "no times": (
        lines(("user", "item", "month"), lambda *row: (*row[:2], row[2][:7])),
        "no column of times, rows are taken",
    ),
    "an amount": (
        lines(("user", "item", "date", "amount"), lambda *row: (*row, "9.90")) + "u1,k1,2021-09-01,-9.90\n",
        "column 'amount' has 1 negative numbers and is not used",
    ),
    "a large customer": (
        lines(("email", "item", "date"), lambda user, key, day: (f"{user}@x.example", key, day))
        + "".join(f"noreply@x.example,k{number % 7},2021-01-{number % 28 + 1:02d}\n" for number in range(30)),
        "48% of all events are of the customer 'noreply@x.example'",
    ),
}


@pytest.mark.parametrize("case", FIRST)
def test_what_may_be_wrong_is_said_first(case, tmp_path):
    text, expected = FIRST[case]
    assert expected in from_events(*written(tmp_path, text)).report.lines()[0]


def test_umlauts_and_signs_behind_a_number(tmp_path):
    text = lines(("Käufer", "Artikel", "Datum", "Stückzahl", "Preis"), lambda *row: (*german(*row), "2", "9,90 €"), ";")
    path, items = written(tmp_path, "")
    path.write_bytes((text + "u1;k5;01.09.2021;2-;9,90 €\n").encode("cp1252"))
    data = from_events(path, items)
    back = list(RIGHT["u1"])
    back.remove("k5")
    assert bought(data) == {**RIGHT, "u1": back}
    assert data.notes[0].startswith("events: t.csv is not UTF-8 and is read as cp1252 (line 1: 'Käufer;")


def orders(name="item", **more):
    return [{"user": user, name: key, "date": day, **more} for user, key, day in PLAIN]


THINGS = [{"item": f"k{number}", "title": f"Lamp {number} of brass"} for number in range(7)]


def test_of_rows_of_one_time_the_lower_is_the_earlier_where_newest_come_first():
    rows = [{**row, "date": row["date"][:8] + "01"} for row in orders()]
    ties = [{**row, "date": "2021-03-01"} for row in rows if row["date"] > "2021-02-28"]
    rows = [row for row in rows if row["date"] < "2021-02-28"] + ties
    assert bought(from_events(rows[::-1], THINGS)) == bought(from_events(rows, THINGS)) == RIGHT
    assert "rows are newest first" in notes(from_events(rows[::-1], THINGS))


def isbn_10(number):
    digits = f"34112{number:04d}"
    check = sum(place * int(digit) for place, digit in enumerate(digits, 1)) % 11
    return digits + ("X" if check == 10 else str(check))


KEYS = {
    "ISBN-10": (lambda n: f"97834112{n:04d}7", isbn_10, "ISBN-10 and ISBN-13"),
    "dashes": (lambda n: f"AB-{n}-{n}9", lambda n: f"AB{n}{n}9", "dashes and blanks"),
    "zeros": (lambda n: f"00{n + 10}", lambda n: f"{n + 10}", "leading zeros"),
    "a prefix": (lambda n: f"SKU{n + 10}", lambda n: f"{n + 10}", "a prefix"),
}


@pytest.mark.parametrize("case", KEYS)
def test_two_tables_that_write_keys_differently_are_named(case):
    ours, theirs, why = KEYS[case]
    rows = [{**row, "item": ours(int(row["item"][1:]))} for row in orders()]
    things = [{"item": theirs(number), "title": f"Lamp {number}"} for number in range(7)]
    with pytest.raises(ValueError, match=f"no key in common; the tables write keys differently .*: {why}"):
        from_events(rows, things)


def test_keys_of_one_table_that_differ_by_case_or_dashes_alone_are_said():
    rows = [{**row, "item": row["item"].upper() if row["user"] == "u3" else row["item"]} for row in orders()]
    things = [*THINGS, *({**row, "item": row["item"].upper()} for row in THINGS)]
    data = from_events(rows, things)
    assert any("differ from others by letter case, dashes or blanks alone (K0 and k0)" in one for one in data.notes[:2])
    assert bought(data)["u3"] == [key.upper() for key in RIGHT["u3"]]  # nothing is changed


def test_numbers_that_floats_have_rounded_are_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    whole = [{**row, "item": 2**53 + int(row["item"][1:])} for row in orders()]
    things = [{"item": str(2**53 + number), "title": f"Lamp {number}"} for number in range(7)]
    path.write_text("\n".join(map(json.dumps, whole)))
    assert from_events(path, things)["shop"].item_keys == [one["item"] for one in things]
    path.write_text("\n".join(json.dumps({**row, "item": float(row["item"])}) for row in whole))
    for table in (path, pd.DataFrame(whole).astype({"item": float})):
        with pytest.raises(ValueError, match=r"a float beyond 2\^53|text or a whole number"):
            from_events(table, things)
    path.write_text("\n".join(json.dumps({**row, "item": float(row["item"][1:])}) for row in orders()))
    small = from_events(path, [{"item": str(number), "title": f"Lamp {number}"} for number in range(7)])["shop"]
    assert small.item_keys == list("0123456")


def test_classes_of_a_data_set_are_their_names():
    rows = [{**row, "item": int(row["item"][1:])} for row in orders()]
    features = {"user": datasets.Value("string"), "date": datasets.Value("string")}
    features["item"] = datasets.ClassLabel(names=[f"k{number}" for number in range(7)])
    table = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    assert bought(from_events(table, THINGS)) == bought(from_events(table.to_iterable_dataset(), THINGS)) == RIGHT


def test_two_columns_of_one_role_are_asked_about_with_all_that_lacks():
    rows = [{**row, "client": row["user"], "what": row["thing"]} for row in orders("thing")]
    with pytest.raises(ValueError, match=r"'user' and 'client' could both be the user.*the item usually is") as error:
        from_events(rows, THINGS)
    assert "--user" in str(error.value)
    assert "--item" in str(error.value)
    assert bought(from_events(rows, THINGS, user="client", item="thing")) == RIGHT
    with pytest.raises(ValueError, match="expected 'a', 'b', 'c' among them"):
        from_events(rows, THINGS, user="a", item="b", time="c")


def test_the_items_column_is_not_proposed_as_the_customers():
    rows = [{"who": f"p{n % 5}", "Art.-Nr.": f"a{n % 9}", "date": f"2024-02-{1 + n % 28:02}"} for n in range(45)]
    with pytest.raises(ValueError, match="none is called as the user usually is: user='who'"):
        from_events(rows)
    known = from_events([{"Kd.-Nr." if name == "who" else name: value for name, value in row.items()} for row in rows])
    assert sorted(known["shop"].clients.users) == ["p0", "p1", "p2", "p3", "p4"]


def test_negative_numbers_in_a_column_that_is_not_used_are_said():
    rows = [{**row, "menge_neu": f"{-1 if place % 9 == 8 else 2}.{place}"} for place, row in enumerate(orders())]
    data = from_events(rows, THINGS)
    assert "column 'menge_neu' has 3 negative numbers and is not used" in data.notes[0]


def test_order_numbers_share_lines_that_stand_apart():
    rows = [{**row, "order_id": f"{row['user']}-{row['date']}"} for row in orders()]
    rows += [{**row, "item": "k0" if row["item"] != "k0" else "k1", "user": None, "date": None} for row in rows]
    data = from_events(rows, THINGS)["shop"]
    assert data.clients.num_events == 64
    assert {user: len(keys) for user, keys in bought({"shop": data}).items()} == dict.fromkeys(RIGHT, 8)


def mapping(path, capsys):
    """The mapping that is proposed of some tables, and what is said."""
    events, items = written(path.parent, path.with_suffix(".csv").read_text(), path.with_suffix(".csv").name)
    words = ["import", str(events), "--items", str(items), "--write_mapping", str(path), "--dry_run", "true"]
    return main(words), capsys.readouterr()


def test_a_mapping_is_proposed_corrected_and_used_everywhere(tmp_path, capsys):
    north, south = tmp_path / "north.yaml", tmp_path / "south.yaml"
    names = ("Kundennr", "Artikelnummer", "Belegdatum", "Vorgang", "Notiz")
    kinds = lines(names, lambda *row: (*german(*row), "Verkauf", "x"), ";") + "u1;k1;1.9.2021;Storno;x\n"
    north.with_suffix(".csv").write_text(kinds)
    south.with_suffix(".csv").write_text(lines(("buyer", "sku", "date"), lambda *row: row))
    said = mapping(north, capsys)[1]
    proposed = yaml.safe_load(north.read_text())
    assert (proposed["user"], proposed["item"], proposed["time"]) == ("Kundennr", "Artikelnummer", "Belegdatum")
    assert proposed["keep"] == {"Vorgang": ["Verkauf"]}
    assert "which rows are purchases" in said.out + said.err
    assert mapping(north, capsys)[0] == 2  # nothing that is there is replaced
    assert mapping(south, capsys)[0] == 0
    assert main(["import", f"{north},{south}", "--output", str(tmp_path / "data")]) == 0
    both = open_prepared(tmp_path / "data")
    for name in ("north", "south"):
        assert bought(both, name) == {f"{name}:{user}": keys for user, keys in RIGHT.items()}
    assert bought(from_events(north)) == RIGHT
    assert bought(from_events(north, nobody=["u1"])) == {user: RIGHT[user] for user in RIGHT if user != "u1"}
    assert keys_in(str(north), "candidates") == [f"k{number}" for number in range(7)]
    assert sorted(events_of(north).events.users) == sorted(RIGHT)
    assert events_of(north.with_suffix(".csv"), columns_from(str(north))).events.size().events == 32
    north.write_text(north.read_text().replace("Kundennr", "Kunde"))
    assert main(["import", str(north), "--output", str(tmp_path / "none")]) == 2
    assert "expected 'Kunde' (perhaps 'Kundennr') among them" in " ".join(capsys.readouterr().err.split())
    north.write_text("usr: Kundennr\n")
    assert main(["import", str(north)]) == 2
    assert "got 'usr' in the mapping" in " ".join(capsys.readouterr().err.split())
