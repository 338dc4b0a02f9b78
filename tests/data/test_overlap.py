"""What companies have in common: by keys, by texts, under a keyed hash, and the sentences about it."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace

import numpy as np
import pytest

from fedecider.cli.main import main
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.overlap import (
    common_items,
    event_counts,
    item_marks,
    marks_from,
    marks_of,
    overlap_of,
    overlap_of_marks,
    overlap_sentences,
    own_sentence,
    unlike_keys,
    unlike_marks,
)
from fedecider.data.sellers import with_shared_catalogues
from fedecider.data.store import save_domains

SECRET = b"0123456789abcdef" * 2


def company(name: str, keys: list[str], sequences: list[list[int]], texts: list[str] | None = None) -> Domain:
    users = [f"{name}-{number}" for number in range(len(sequences))]
    return Domain(
        name,
        Catalogue(name, keys, keys, texts or [f"title: {key}" for key in keys]),
        Events(users, sequences, None),
        NO_EVENTS,
        {},
    )


# north: a b c d, south: b d e; the last two events of a user are held out and are not counted
NORTH = company("north", ["a", "b", "c", "d"], [[1, 1, 3, 0, 2], [2, 1, 0, 0]])
SOUTH = company("south", ["b", "d", "e"], [[2, 0, 1, 1], [2, 2, 1, 1, 1]])
EAST = company("east", ["x", "y"], [[0, 1, 0], [1, 0, 1]])
THREE = {"north": NORTH, "south": SOUTH, "east": EAST}


def in_one_catalogue(companies):
    """Who sell parts of it."""
    parts = {name: replace(one, catalogue=replace(one.catalogue, name="ean")) for name, one in companies.items()}
    return with_shared_catalogues(parts)


def test_pairs_by_hand():
    found = overlap_of(THREE)
    assert (found.by, found.names, found.apart, found.nothing) == ("keys", ["north", "south", "east"], ["east"], False)
    pair, *others = found.pairs
    assert event_counts(NORTH).tolist() == [0, 3, 1, 1]
    assert (pair.first, pair.second, pair.num_items) == ("north", "south", 2)
    assert pair.item_shares == pytest.approx((2 / 4, 2 / 3))
    assert pair.event_share == pytest.approx((4 / 5, 2 / 5))
    assert [(one.num_items, one.item_shares, one.event_share) for one in others] == [(0, (0.0, 0.0), (0.0, 0.0))] * 2
    assert common_items(NORTH.item_keys, SOUTH.item_keys).tolist() == [[1, 0], [3, 1]]


def test_parts_of_one_catalogue_have_numbers_of_their_own():
    """As companies that say nothing of their keys, pair by pair; silos of it are still compared once."""
    parts = in_one_catalogue(THREE)
    assert overlap_of(parts) == overlap_of(THREE)
    twin = replace(parts["south"], name="twin")
    assert overlap_of({"south": parts["south"], "twin": twin}).pairs[0].num_items == 3


def test_an_equal_text_is_no_common_item_of_parts_of_one_catalogue():
    sold = {"one": ["a", "b"], "two": ["c", "d"]}
    apart = {name: company(name, keys, [[0, 1, 0]] * 2, ["a lamp", "a chair"]) for name, keys in sold.items()}
    parts = in_one_catalogue(apart)
    found = [(one.by, one.nothing) for one in (overlap_of(apart), overlap_of(parts))]
    assert found == [("texts", False), ("keys", True)]


def test_sentences():
    found = overlap_of(THREE)
    assert overlap_sentences(found, only_items=True, has_pool=True) == [
        "north shares 50 % of its items (80 % of its sales) with south, south 67 % of its items (40 % of its sales): "
        "joining can help.",
        "east shares none: joining rarely helps, and only through public users.",
    ]
    assert overlap_sentences(found, only_items=False, has_pool=False)[1] == (
        "east shares none: joining rarely helps, and only through shared model layers."
    )
    apart = overlap_of({"north": NORTH, "east": EAST})
    assert apart.nothing
    assert overlap_sentences(apart, True, False) == ["north and east have no common items: joining cannot help."]
    assert overlap_sentences(overlap_of({"north": NORTH}), True, True) == []
    three = {name: company(name, NORTH.item_keys, [[0, 1, 2], [1, 2, 3]]) for name in ("north", "west", "east")}
    assert overlap_sentences(overlap_of(three), True, True) == [
        "north, west and east sell the same items: joining can help."
    ]
    six = {f"shop.{n}": company(f"shop.{n}", NORTH.item_keys, [[0, 1, 2], [1, 2, 3]]) for n in range(6)}
    assert overlap_sentences(overlap_of(six), True, True) == ["6 companies sell the same items: joining can help."]


def test_texts_are_asked_where_no_key_is_common_and_those_of_two_items_match_nobody():
    other = company(
        "other", ["k", "l", "m", "n"], [[0, 1, 2], [3, 0, 1]], ["title: b", "Title:  D", "title: c", "title: c"]
    )
    found = overlap_of({"north": NORTH, "other": other})
    assert found.by == "texts"
    assert common_items(item_marks(NORTH, "texts"), item_marks(other, "texts")).tolist() == [[1, 0], [3, 1]]
    assert (
        "north shares 50 % of its items (80 % of its sales) with other by their texts, other 50 %"
        in overlap_sentences(found, True, True)[0]
    )
    assert overlap_of({"north": NORTH, "other": other}, by="keys").nothing


def test_a_keyed_hash_finds_the_same_items_and_shows_no_key():
    marks = item_marks(NORTH, secret=b"agreed")
    assert marks[0] == hmac.new(b"agreed", b"a", hashlib.sha256).hexdigest()
    assert np.array_equal(
        common_items(marks, item_marks(SOUTH, secret=b"agreed")), common_items(NORTH.item_keys, SOUTH.item_keys)
    )
    assert common_items(marks, item_marks(SOUTH, secret=b"another")).size == 0
    assert overlap_of(THREE, secret=b"agreed") == overlap_of(THREE)


def test_files_of_marks_hold_neither_keys_nor_events_nor_an_order():
    shown = {name: marks_of(one, b"agreed") for name, one in THREE.items()}
    text = json.dumps(shown["north"].plain())
    assert sorted(shown["north"].by["keys"]) == shown["north"].plain()["keys"] != shown["north"].by["keys"]
    assert all(key not in json.loads(text)["keys"] for key in NORTH.item_keys)
    read = {name: marks_from(json.loads(json.dumps(one.plain())), name) for name, one in shown.items()}
    whole, told = overlap_of(THREE), overlap_of_marks(read)
    assert [pair[:4] for pair in told.pairs] == [pair[:4] for pair in whole.pairs]
    assert {pair.event_share for pair in told.pairs} == {(None, None)}
    assert overlap_sentences(told, False, False)[0] == (
        "north shares 50 % of its items with south, south 67 % of its items: joining can help."
    )
    own = overlap_of_marks({"north": shown["north"], "south": read["south"], "east": read["east"]})
    assert own.pairs[0].event_share == (pytest.approx(4 / 5), None)
    assert overlap_sentences(own, False, False)[0].startswith(
        "north shares 50 % of its items (80 % of its sales) with south, south 67 % of its items"
    )
    assert own_sentence(own, "north", True, True) == (
        "north shares 50 % of its items (80 % of its sales) with south; none with east: joining can help."
    )
    assert own_sentence(own, "east", True, True) == (
        "east shares no item with north or south: joining rarely helps, and only through public users."
    )
    with pytest.raises(ValueError, match="got marks of north and of south under two secrets"):
        overlap_of_marks({"north": shown["north"], "south": marks_of(SOUTH, b"another")})


def test_keys_without_their_leading_zero_are_said():
    """Companies that tables of two programs came from; what differs in one company alone says nothing."""
    west = company("west", ["0401", "0402", "077", "77"], [[0, 1, 2], [1, 0, 3]])
    south = company("south", ["401", "402.0", "77", "9"], [[0, 1, 2], [1, 0, 3]])
    keys = {one.name: one.item_keys for one in (west, south, EAST)}
    told = unlike_keys(keys)
    assert ": 2 of west and south (0401 and 401). Where they are the same ones, write them alike" in told
    assert unlike_keys({"north": NORTH.item_keys, "east": EAST.item_keys, "west": keys["west"]}) == ""
    assert unlike_keys({"a": [f"{key}" for key in range(300)], "b": ["00", *"123456"]})[-100:].endswith("import again.")
    assert unlike_keys({"a": [f"{key}" for key in range(300)], "b": ["00", *map(str, range(1, 200))]}) == ""  # one
    shown = {one.name: marks_from(marks_of(one, b"agreed").plain(), one.name) for one in (south, EAST)}
    west_marks = marks_of(replace(west, catalogue=replace(west.catalogue, keys=["0401", "0402", "77", "x"])), b"agreed")
    assert ": 2 of west and south. Where" in unlike_marks({"west": west_marks, **shown})
    assert unlike_marks(shown) == ""


def test_two_companies_compare_files_before_they_show_a_key(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for one in THREE.values():
        save_domains({one.name: one}, one.name)
    secret = tmp_path / "secret.txt"
    secret.write_bytes(b"%s\r\n" % SECRET)
    for one in THREE:
        assert main(["overlap", "--data", one, "--secret_file", "secret.txt", "--output", f"{one}.json"]) == 0
    assert main(["overlap", "north.json", "east.json"]) == 0
    assert "north and east have no common items" in capsys.readouterr().out
    secret.write_bytes(b"\xef\xbb\xbf%s" % SECRET)  # as another editor writes it
    assert main(["overlap", "south.json", "--data", "north", "--secret_file", "secret.txt"]) == 0
    assert "north shares 50 % of its items (80 % of its sales) with south: joining can help." in capsys.readouterr().out


def test_companies_of_one_folder_are_compared_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_domains(THREE, "data")
    assert main(["overlap", "--data", "data"]) == 0
    said = capsys.readouterr().out
    assert "south with north: joining" not in said
    assert "south 67 % of its items (40 % of its sales)" in " ".join(said.split())
    row = next(line.split() for line in said.splitlines() if line.split()[:3] == ["south", "│", "north"])
    assert row[4:9:2] == ["2", "66.7%", "40.0%"]


def test_a_file_of_something_else_is_not_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_domains({"north": NORTH}, "data")
    (tmp_path / "secret.txt").write_bytes(SECRET)
    orders = tmp_path / "orders.json"
    orders.write_text('{"user": 1, "item": 2}')
    words = ["overlap", "--data", "data", "--secret_file", "secret.txt", "--output"]
    assert main([*words, "orders.json"]) == 2
    assert "got the output orders.json, which holds something else" in capsys.readouterr().err
    assert orders.read_text() == '{"user": 1, "item": 2}'
    assert [main([*words, "north.json"]), main([*words, "north.json"])] == [0, 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["north.json"], "got 1 companies"),
        (["north.json", "north.json"], "two companies called north"),
        (["north.json", "south.json"], "under two secrets"),
        (["north.json", "other.json"], "got other.json, which has no marks of items"),
        (["--data", "data", "--company", "north", "--secret_file", "short.txt"], "secret of 5 bytes"),
        (["--data", "data", "--company", "north", "--secret_file", "plain.txt"], "60 bytes, 3 of them different"),
        (["--data", "data", "--output", "a.json"], "one of --data and --secret_file"),
        (["--data", "data", "--secret_file", "secret.txt", "--output", "a.json"], "got 2 companies in data"),
        (["--data", "data", "--company", "north", "--secret_file", "secret.txt", "--output", "a"], "ends in .json"),
        (["north.json", "--output", "a.json"], "got --output"),
    ],
)
def test_bad_marks_are_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_domains({"north": NORTH, "south": SOUTH}, "data")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "secret.txt").write_bytes(SECRET)
    (tmp_path / "plain.txt").write_text("abcabc" * 10)
    for one, secret in ((NORTH, b"one"), (SOUTH, b"two")):
        (tmp_path / f"{one.name}.json").write_text(json.dumps(marks_of(one, secret).plain()))
    (tmp_path / "other.json").write_text('{"format": 1, "secret": "x", "keys": ["a"], "texts": []}')
    before = set(tmp_path.iterdir())
    assert main(["overlap", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert set(tmp_path.iterdir()) == before
