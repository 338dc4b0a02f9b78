"""A column that says the same of every item changes nothing: it is left out of all texts, which is said."""

import random

import pytest

from fedecider import from_events
from fedecider.data.constant_words import constant_words, without_constant
from fedecider.data.sites import own_users, publish
from fedecider.data.store import load_domains

WORDS = ["red", "blue", "old", "new", "fast", "slow", "large", "small", "dark", "bright"]
ITEMS = [{"sku": f"i{n:02}", "title": f"{WORDS[n % 10]} game {WORDS[n // 10]}"} for n in range(30)]
DRAW = random.Random(3)
ROWS = [
    {"user": u, "sku": f"i{item:02}", "time": place}
    for u in range(40)
    for place, item in enumerate(DRAW.sample(range(28), 5))
]


def with_column(value, items=ITEMS):
    return [{**one, "category": value(n) if callable(value) else value} for n, one in enumerate(items)]


def test_the_same_orders_with_and_without_a_constant_column_are_the_same_data(tmp_path):
    plain, worded = from_events(ROWS, ITEMS), from_events(ROWS, with_column("Video games"))
    assert worded["shop"].content_hash() == plain["shop"].content_hash()
    assert worded["shop"].unsold == plain["shop"].unsold
    assert len(plain["shop"].unsold) == 2
    assert "shop: left out of all texts, as every item has it: video games (categories)" in worded.notes
    assert not any("left out of all texts" in one for one in plain.notes)
    worded.save(tmp_path)
    assert load_domains(tmp_path)["shop"].card["constant_words"] == {"categories": ["video", "games"]}


def test_what_is_not_the_same_of_all_stays():
    part = from_events(ROWS, with_column(lambda n: f"Video games, {('PS4', 'Xbox')[n % 2]}"))["shop"]
    assert part.item_texts[:2] == ["title: red game red; categories: ps4", "title: blue game red; categories: xbox"]
    rest = from_events(ROWS, with_column(lambda n: "Books" if n == 29 else "Video games"))["shop"]
    assert rest.item_texts[0] == "title: red game red; categories: video games", "an unsold item has another"


def test_companies_each_leave_out_their_own_word():
    """In one catalogue the common item would else have the word of the first of them alone."""
    things = {"north": with_column("Spiele"), "south": with_column("Jeux")}
    worded = from_events({"north": ROWS, "south": ROWS}, things, catalogue="ean")
    plain = from_events({"north": ROWS, "south": ROWS}, {"north": ITEMS, "south": ITEMS}, catalogue="ean")
    for name in ("north", "south"):
        assert worded[name].content_hash() == plain[name].content_hash()


def test_sites_have_the_words_of_what_is_published(tmp_path):
    items = with_column("Video games")
    columns = {"user": "user", "item": "sku", "time": "time"}
    publish(None, items, tmp_path / "public", companies=["north", "south"], **columns)
    own = own_users(ROWS, tmp_path / "public", "shop.north", **columns)
    assert own.item_texts[0] == "title: red game red"
    assert own.card["constant_words"] == {"categories": ["video", "games"]}


def test_words_of_later_items_are_left_out_where_they_stand():
    words = constant_words(["title: a; category: video games, ps4", "title: b; category: xbox video games"])
    assert words == {"category": ["video", "games"]}
    assert without_constant("title: video games; category: video games, switch", words) == (
        "title: video games; category: switch"
    )
    assert without_constant("category: video games", words) == "category: video games", "nothing else is known"
    assert constant_words(["title: a; brand: x"]) == {}
    assert constant_words(["brand: x", "title: a; brand: x"]) == {}, "the first would be empty"
    assert constant_words(["title: x", "title: x"]) == {}, "a title is what an item is called"


@pytest.mark.parametrize("texts", [[], ["", ""], ["keys"] * 3])
def test_texts_without_fields_have_none(texts):
    assert constant_words(texts) == {}
