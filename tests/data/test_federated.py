"""Companies' tables become one object: names, guessed columns, notes, folders, Hugging Face data sets."""

import os

import datasets
import pandas as pd
import pytest

import fedecider
from fedecider.data import open_prepared

TITLES = [f"Thing {number}" for number in range(6)]


def events(first, count, **names):
    """Customer u bought items u, u + 1, u + 2."""
    names = {"user": "customer_id", "item": "SKU", "time": "bought_at", **names}
    return [
        {names["user"]: user, names["item"]: f"s{(user + step) % 6}", names["time"]: 100 * user + step}
        for user in range(first, first + count)
        for step in range(3)
    ]


def products(**names):
    names = {"item": "sku", "title": "title", **names}
    return [{names["item"]: f"s{number}", names["title"]: title} for number, title in enumerate(TITLES)]


@pytest.fixture
def companies():
    return fedecider.from_events({"north": events(0, 8), "south": events(5, 9)}, products(), public={"south": [7, 8]})


def test_companies_share_one_catalogue(companies):
    assert companies.names == list(companies) == ["north", "south"]
    assert {domain.catalogue.name for domain in companies.values()} == {"shop"}
    assert companies["north"].clients.users == [f"north:{user}" for user in range(8)]
    assert len(companies["south"].clients.users) == 7
    assert companies["north"].public == companies["south"].public
    assert companies["north"].public.users == ["south:7", "south:8"]
    assert "events of north: user is column 'customer_id', item is column 'SKU', time is column 'bought_at'" in (
        companies.notes
    )
    assert "2 of 17 customers are public" in companies.notes


def test_one_table_with_a_column_gives_the_same(companies):
    rows = [{**row, "seller": "north"} for row in events(0, 8)] + [{**row, "seller": "south"} for row in events(5, 9)]
    found = fedecider.from_events(rows, products(), company="seller", public={"south": [7, 8]})
    assert {name: one.content_hash() for name, one in found.items()} == {
        name: one.content_hash() for name, one in companies.items()
    }


def test_companies_with_catalogues_of_their_own():
    names = {"user": "buyer", "item": "article", "time": "date"}
    things = {"south": products(item="id", title="name"), "north": products()}
    found = fedecider.from_events({"south": events(0, 5, **names), "north": events(0, 6)}, things)
    assert found.names == ["south", "north"]
    assert [domain.catalogue.name for domain in found.values()] == ["shop", "shop"]
    assert found["south"].clients.users[0] == "south:0"
    assert "items of south: item is column 'id', title is column 'name'" in found.notes


def test_texts_may_stand_in_the_events():
    rows = [{**row, "title": TITLES[int(row["SKU"][1:])]} for row in events(0, 9)]
    rows[20]["title"] = "another"  # the first one counts
    found = fedecider.from_events(rows)["shop"]
    assert found.content_hash() == fedecider.from_events(events(0, 9), products())["shop"].content_hash()
    both = fedecider.from_events({"a": rows, "b": datasets.Dataset.from_list(rows).to_iterable_dataset()})
    assert both["a"].titles == both["b"].titles == TITLES


def test_saved_and_opened(companies, tmp_path):
    assert companies.save(tmp_path / "data") == tmp_path / "data"
    back = open_prepared(tmp_path / "data")
    assert {name: one.content_hash() for name, one in back.items()} == {
        name: one.content_hash() for name, one in companies.items()
    }
    assert back.notes == companies.notes
    assert back.card.equals(companies.card)
    assert companies.card.loc["south"].tolist() == [6, 7, 21, 2, 6]


def test_plain_load_dataset_opens_what_was_saved(companies, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    folder, cache = str(companies.save(tmp_path / "data")), str(tmp_path / "cache")
    found = datasets.load_dataset(folder, cache_dir=cache)
    made = companies.to_datasets()
    assert {name: rows.to_list() for name, rows in found.items()} == {
        name: made[name].to_list() for name in ("clients", "public")
    }
    south = datasets.load_dataset(folder, "south", cache_dir=cache)
    assert south["clients"]["user"][:] == companies["south"].clients.users
    assert south["clients"][0]["items"] == companies["south"].clients.sequences[0]
    items = datasets.load_dataset(folder, "items", split="train", cache_dir=cache)
    assert items.to_list() == made["items"].to_list()
    assert items[7] == {"domain": "south", "item": 1, "key": "s1", "title": "Thing 1", "text": "title: thing 1"}


def test_a_readme_of_somebody_else_is_left_alone(companies, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    companies.save(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


ROWS = events(0, 6)
BAD = {
    "two columns could be it": (
        [{**row, "user": 1} for row in ROWS],
        products(),
        {},
        "'customer_id' and 'user' could both be the user: user='customer_id' (--user)",
    ),
    "no column is called so": (
        [{"who": 1, "sku": "s1"}],
        products(),
        {},
        "got events with the columns who, sku; none is called as the user usually is: user=",
    ),
    "no company": ({}, products(), {}, "events by company of no company"),
    "an odd company": ({"a/b": ROWS}, products(), {}, "got the company 'a/b', expected"),
    "the mean of all": (
        {"north": ROWS, "Macro": ROWS},
        products(),
        {},
        "'Macro', expected another name, such as Macro-shop",
    ),
    "items of others": ({"a": ROWS, "b": ROWS}, {"a": products()}, {}, "got items of a and events of a, b"),
    "items by company alone": (ROWS, {"a": products()}, {}, "got items by company with one table of events"),
    "two ways": ({"a": ROWS}, products(), {"company": "x"}, "got a domain or company column beside events by company"),
    "silos": ({"a": ROWS}, products(), {"silos": 2}, "got silos 2 beside companies"),
    "a company called as the catalogue": ({"shop": ROWS}, products(), {}, "expected another name="),
    "an output": (ROWS, products(), {"output": "x"}, "write the result with .save(folder)"),
    "a row of another kind": (
        [*ROWS[:4], {**ROWS[4], "SKU": 7}, *ROWS[5:]],
        products(),
        {},
        "mixed or too large values (7 in row 5, column 'SKU')",
    ),
    "a frame of mixed kinds": (
        pd.DataFrame([*ROWS[:4], {**ROWS[4], "SKU": 7}]),
        products(),
        {},
        "mixed or too large values (7 in row 5, column 'SKU')",
    ),
    "an item twice": (
        ROWS,
        [*products(), {"sku": "s1", "title": "other"}],
        {},
        "duplicate item key 's1' in row 7 of the items (column 'sku'), with other texts than in row 2",
    ),
    "a gap": (
        {"a": ROWS, "b": [*ROWS, {**ROWS[0], "SKU": None}]},
        products(),
        {},
        "got no item in row 19 of the events of b (column 'SKU')",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_told_in_a_sentence(case):
    rows, things, words, expected = BAD[case]
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        fedecider.from_events(rows, things, **words)
    assert expected in str(error.value)
