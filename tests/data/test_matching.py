"""The same goods under other names: numbers, nearest titles, tables of pairs, hashes, who is asked before training."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from itertools import combinations

import pytest

from fedecider.cli.main import main
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.matching import (
    Pair,
    agree,
    common_names,
    goods_from,
    goods_of,
    match,
    match_pairs,
    matches,
    named,
    numbers_of,
    read_pairs,
    shown,
    unmatched,
    wilson,
    write_pairs,
)
from fedecider.data.overlap import overlap_of
from fedecider.data.sample import sample_domains
from fedecider.data.store import load_domains, save_domains

SECRET = b"0123456789abcdef" * 2


def company(name, titles, sequences=((0, 1, 0), (1, 0, 1))):
    """``titles``: key -> title."""
    keys = sorted(titles)
    users = [f"{name}-{number}" for number in range(len(sequences))]
    items = Catalogue(name, keys, [titles[key] for key in keys], [f"title: {titles[key].lower()}" for key in keys])
    return Domain(name, items, Events(users, [list(one) for one in sequences], None), NO_EVENTS, {})


NORTH = company(
    "north",
    {
        "n1": "Spring water sparkling 6 x 0.5 l",
        "n2": "Spring water sparkling 0.25 l",
        "n3": "Toshiba DVD player SD-V296 black",
        "n4": "Garden chair of oak",
    },
    ((3, 0, 2, 1), (0, 0, 3)),
)
SOUTH = company(
    "south",
    {
        "s1": "Sparkling spring water, 6x500ml",
        "s2": "Black DVD-player by Toshiba (SDV296)",
        "s3": "Toshiba DVD player SD-V396 black",
        "s4": "Paint brush",
    },
    ((1, 0, 3), (2, 2, 1, 0)),
)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Cola 500 ml", "Cola 250 ml", False),
        ("Cola 0,5 l", "Cola 500ml", True),
        ("Eggs 12", "Eggs 6", False),
        ("Eggs 12 pack", "Eggs, pack of 6", False),
        ("Water 6 x 500 ml", "Water 12x500ml", False),
        ("Water 6 x 500 ml", "Water 500 ml", True),  # who does not say how many says nothing against it
        ("Flour 1 kg", "Flour 1000 g", True),
        ("Camera DSC-W120", "Camera DSCW120/B", True),
        ("Camera DSC-W120", "Camera DSC-W130", False),
        ("FIFA 16 PlayStation 4", "PlayStation 4 FIFA 17", False),
        ("Pad for PS4", "Pad for PS3", False),
        ("Rope 5 m", "Rope 5 kg", True),
        ('TV 40" 8 W', "TV 40 inch series 7", True),
    ],
)
def test_sizes_numbers_and_models_agree(one, other, same):
    assert agree(numbers_of(one), numbers_of(other)) is same
    assert agree(numbers_of(other), numbers_of(one)) is same


def test_numbers_by_hand():
    found = numbers_of("6 x 0.5 l, SD-V296 and 12 cl")
    assert found.sizes == {"": {"6"}, "l": {"0.5", "0.12"}}
    assert found.models == {"sdv296"}
    assert found.parts == {"sdv2", "dv29", "v296", "sdv29", "dv296", "sdv296"}


def keys_of(found, first=NORTH, second=SOUTH):
    return [(first.own_keys[i], second.own_keys[j], by) for i, j, _, by in found]


def test_nearest_titles_whose_numbers_agree_are_pairs():
    goods = goods_of(NORTH), goods_of(SOUTH)
    assert keys_of(matches(*goods)) == [("n1", "s1", "title"), ("n3", "s2", "title")]
    assert keys_of(matches(*goods, pack_sizes=False)) == [("n2", "s1", "title"), ("n3", "s2", "title")]
    assert keys_of(matches(*goods, min_score=0.99)) == []
    back = matches(goods[1], goods[0])
    assert sorted((j, i, round(score, 5)) for i, j, score, _ in back) == [
        (i, j, round(score, 5)) for i, j, score, _ in matches(*goods)
    ]


def test_a_score_is_the_cosine_of_weighted_ngrams():
    """A word of two letters has six n-grams, with the spaces around it: those of ab are in two of four titles."""
    one, other = company("a", {"1": "ab", "2": "cd"}), company("b", {"3": "ab ef", "4": "xyz"})
    ((i, j, score, _),) = matches(goods_of(one), goods_of(other), min_score=0.1)
    idf = 1 + math.log(5 / 3), 1 + math.log(5 / 2)
    assert (i, j) == (0, 0)
    assert score == pytest.approx(idf[0] / (idf[0] ** 2 + idf[1] ** 2) ** 0.5, rel=1e-5)


def test_of_two_equally_near_items_neither_is_taken():
    twice = company("twice", {"1": "Garden chair of oak", "2": "Garden chair of oak", "3": "Lamp of brass"})
    assert keys_of(matches(goods_of(NORTH), goods_of(twice)), NORTH, twice) == []
    only = company("only", {"1": "Garden chair of oak", "3": "Lamp of brass"})
    assert keys_of(matches(goods_of(NORTH), goods_of(only)), NORTH, only) == [("n4", "1", "title")]


def test_equal_keys_count_where_their_titles_are_alike_and_numbers_of_ones_own_do_not():
    words = ["oak chair", "brass lamp", "wool carpet", "steel knife"]
    ean = company("ean", {f"0{number}.0": word for number, word in enumerate(words, 40)})
    other = company("other", {f"{number}": f"{word} new" for number, word in enumerate(words, 40)})
    turned = company("turned", {f"{number}": word for number, word in enumerate(words[::-1], 40)})
    found = matches(goods_of(ean), goods_of(other))
    assert [(i, j, by) for i, j, _, by in found] == [(place, place, "key") for place in range(4)]
    found = matches(goods_of(ean), goods_of(turned))
    assert [(i, j, by) for i, j, _, by in found] == [(place, 3 - place, "title") for place in range(4)]


def test_hashed_items_have_the_same_pairs_and_show_no_title():
    plain = match_pairs({"north": goods_of(NORTH), "south": goods_of(SOUTH)})
    files = {one.name: json.dumps(shown(goods_of(one, SECRET))) for one in (NORTH, SOUTH)}
    assert not any(word in text for word in ("water", "wat", "n1", "sdv296") for text in files.values())
    goods = {name: goods_from(json.loads(text), name) for name, text in files.items()}
    pairs = match_pairs(goods)
    assert sorted(pair.score for pair in pairs) == sorted(pair.score for pair in plain)
    other = {**goods, "south": goods_of(SOUTH, SECRET[::-1] + b"x")}
    assert match_pairs(other) == []


def pair(company, key, other, other_key, score=0.9, right=""):
    return Pair(company, key, "", other, other_key, "", score, "title", "", right)


def test_pairs_of_three_companies_become_one_name_and_never_join_two_items_of_one():
    keys = {"a": ["1", "2"], "b": ["1", "9"], "c": ["5", "7"]}
    rows = [pair("b", "1", "c", "5", 0.8), pair("a", "2", "b", "1", 0.9), pair("a", "1", "c", "5", 0.7)]
    names, left_out = common_names(keys, rows)
    assert names == {"a": ["a:1", "a:2"], "b": ["a:2", "b:9"], "c": ["a:2", "c:7"]}
    assert left_out == 1
    names, left_out = common_names(keys, [rows[0], rows[1]._replace(right="no"), rows[2]])
    assert names == {"a": ["a:1", "a:2"], "b": ["a:1", "b:9"], "c": ["a:1", "c:7"]}
    assert left_out == 0


def test_matched_companies_share_items_and_keep_their_own_keys(tmp_path):
    data = match({"north": NORTH, "south": SOUTH})
    assert overlap_of(data).pairs[0].num_items == 2
    assert data["north"].catalogue is data["south"].catalogue
    assert len(data["north"].catalogue.keys) == 6
    data.save(tmp_path / "matched")
    for name, domain in load_domains(tmp_path / "matched").items():
        before = {"north": NORTH, "south": SOUTH}[name]
        rows = [[domain.own_keys[item] for item in row] for row in domain.clients.sequences]
        assert rows == [[before.item_keys[item] for item in row] for row in before.clients.sequences]
        titles = dict(zip(domain.own_keys, domain.titles, strict=True))
        assert titles == dict(zip(before.item_keys, before.titles, strict=True))
        assert domain.content_hash() == data[name].content_hash() != before.content_hash()
    again = match(load_domains(tmp_path / "matched"))  # by its own keys, as before
    assert again["south"].items.content_key == data["south"].items.content_key


def test_precision_has_an_interval():
    assert wilson(45, 50) == (pytest.approx(0.786, abs=5e-4), pytest.approx(0.957, abs=5e-4))
    assert wilson(0, 0) == (0.0, 1.0)


def test_who_sells_the_same_goods_is_asked_and_who_sells_others_is_not():
    words = ["oak", "brass", "wool", "steel", "glass", "paper", "stone"]
    things = [f"{one} {other} {what}" for one, other in combinations(words, 2) for what in ("chair", "lamp")]
    one = company("one", {f"a{number:03}": f"The {thing}" for number, thing in enumerate(things)})
    other = company("other", {f"b{number:03}": thing.title() for number, thing in enumerate(things[::-1])})
    assert unmatched({"one": one, "other": other}).startswith("42 of 42 items of other seem to be sold by one too")
    matched = match({"one": one, "other": other})
    assert unmatched(matched) == ""
    assert unmatched(sample_domains(["crime", "comics", "children"], 0)) == ""


@pytest.fixture
def shops(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_domains({"north": NORTH}, "north")
    save_domains({"south": SOUTH}, "south")
    (tmp_path / "secret.txt").write_bytes(SECRET)
    return tmp_path


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_from_two_folders_to_a_corrected_table_to_matched_data(shops, capsys):
    assert main(["match", "north", "south", "--output", "pairs.csv"]) == 0
    rows = rows_of(shops / "pairs.csv")
    assert [(row["key"], row["other_key"], row["sample"]) for row in rows] == [("n1", "s1", "x"), ("n3", "s2", "x")]
    assert "precision: not known" in capsys.readouterr().out
    text = (shops / "pairs.csv").read_text().replace(",x,", ",x,yes", 1)[:-2] + ",no\n"
    (shops / "pairs.csv").write_text("\ufeff" + text)
    corrected = read_pairs(shops / "pairs.csv")
    assert [one.right for one in corrected] == ["yes", "no"]
    assert main(["match", "north", "south", "--pairs", "pairs.csv", "--output", "matched"]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 labelled pairs are right, 50% [9%, 91%]" in said
    assert overlap_of(load_domains("matched")).pairs[0].num_items == 1
    assert main(["match", "north", "south", "--output", "matched"]) == 0  # its own kind is replaced


def test_companies_that_show_no_title_get_the_same_matched_data(shops):
    words = ["--secret_file", "secret.txt", "--output"]
    for name in ("north", "south"):
        assert main(["match", name, *words, f"{name}.json"]) == 0
    assert main(["match", "north.json", "south.json", "--output", "pairs.csv"]) == 0
    for name in ("north", "south"):
        assert main(["match", name, "--pairs", "pairs.csv", *words, "matched"]) == 0
    domains = load_domains("matched")
    assert overlap_of(domains).pairs[0].num_items == 2
    assert sorted(domains["south"].own_keys) == ["s1", "s2", "s3", "s4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got no data"),
        (["north"], "expected two companies"),
        (["north", "north"], "got two companies called north"),
        (["north", "south", "--output", "orders.csv"], "got the output orders.csv, which holds something else"),
        (["north", "south", "--output", "north"], "got the output north, which holds other data of north"),
        (["north", "south", "--pairs", "orders.csv", "--output", "m"], "got orders.csv without company, key"),
        (["north", "south", "--pairs", "no.csv", "--output", "m"], "got no.csv"),
        (["north", "south", "--pairs", "odd.csv", "--output", "m"], "got a pair with n9 of north"),
        (["north", "south", "--pairs", "maybe.csv", "--output", "m"], "in row 2 of maybe.csv"),
        (["north", "--output", "north.json"], "expected one and --secret_file"),
        (["north", "--secret_file", "secret.txt", "--output", "orders.json"], "got orders.json"),
        (["north.json", "south"], "and --secret_file where files are beside folders"),
        (["orders.json", "south", "--secret_file", "secret.txt"], "got orders.json"),
        (["north", "south", "--min_score", "2"], "min_score"),
    ],
)
def test_bad_matches_are_one_line(words, message, shops, capsys):
    (shops / "orders.csv").write_text("user,item\n1,2\n")
    (shops / "orders.json").write_text('{"user": 1}')
    (shops / "north.json").write_text(json.dumps(shown(goods_of(NORTH, SECRET))))
    write_pairs([pair("north", "n9", "south", "s1")], shops / "odd.csv")
    write_pairs([pair("north", "n1", "south", "s1", right="perhaps")], shops / "maybe.csv")
    before = {path: path.read_bytes() for path in shops.rglob("*") if path.is_file()}
    assert main(["match", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert {path: path.read_bytes() for path in shops.rglob("*") if path.is_file()} == before


def test_keys_that_lost_their_zeros_in_another_program_are_known(tmp_path):
    zeros = replace(NORTH, catalogue=replace(NORTH.catalogue, keys=["001", "002", "003", "004"]))
    path = tmp_path / "pairs.csv"
    path.write_text("company;key;other;other_key\nnorth;1;south;s1\n")
    data = match({"north": zeros, "south": SOUTH}, path)
    assert overlap_of(data).pairs[0].num_items == 1
    assert named({"south": SOUTH}, {"south": ["d", "c", "b", "a"]})["south"].own_keys == ["s4", "s3", "s2", "s1"]
