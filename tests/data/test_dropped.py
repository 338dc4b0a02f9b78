"""What is left out is counted by reason, in every reader and filter, told in one line and kept in the card."""

from __future__ import annotations

import json

import pytest

from fedecider.data.dropped import Size
from fedecider.data.interactions import InteractionsConfig, load_interactions
from fedecider.data.prepare import PrepareConfig, prepare
from fedecider.data.readers import SOURCES, ReadOptions

RATED = ReadOptions(min_rating=3)
LOW = {"rating below min_rating": {"events": 1}}


# A good event, one that is left out on purpose, a blank line and a bad line, in the layout of each source.
FILES = {
    "filmtrust": ({"ratings.txt": ["1 1 4", "1 2 2", " ", "1 x 4"]}, RATED, LOW),
    "amazon_ratings": ({"ratings.dat": ["A,B,4,9", "A,C,2,9", "", "A,C"]}, RATED, LOW),
    "lists": (
        {"train.txt": ["0 1", "1", "", "2 x"], "val.txt": ["0 7"]},
        ReadOptions(),
        {"users listed without items": {"lines": 1}, "not read: val.txt": {"files": 1}},
    ),
    "movielens": (
        {"u.data": ["1\t1\t4\t9", "1\t2\t2\t9", "", "1"], "movies.csv": ["movieId,title,genres"]},
        RATED,
        LOW,
    ),
    "goodbooks": (
        {"ratings.csv": ["user_id,book_id,rating", "1,1,4", "1,2,2", "", "x,1,4"], "books.csv": ["book_id"]},
        RATED,
        LOW,
    ),
    "lastfm_plays": (
        {"user_artists.dat": ["userID\tartistID\tweight", "1\t1\t4", "1\t2\t2", "", "1"], "artists.dat": ["id\tname"]},
        RATED,
        LOW,
    ),
    "lastfm_tags": (
        {
            "user_taggedartists.dat": ["userID\tartistID\tday\tmonth\tyear", "1\t1\t1\t1\t2009", "", "1"],
            "artists.dat": ["id\tname"],
        },
        ReadOptions(),
        {},
    ),
    "amazon": (
        {
            "D_5.json": [
                {"reviewerID": "A", "asin": "B", "overall": 4, "unixReviewTime": 9},
                {"reviewerID": "A", "asin": "C", "overall": 2, "unixReviewTime": 9},
                "",
                "{",
            ],
            "meta_D.json": [{"asin": "B"}],
        },
        RATED,
        LOW,
    ),
    "goodreads": (
        {
            "goodreads_interactions_d.json": [
                {"user_id": "u", "book_id": "1", "is_read": read, "rating": rating, "date_added": date}
                for read, rating, date in (
                    (True, 4, "Sat Nov 30 14:18:37 -0800 2013"),
                    (True, 2, "Sat Nov 30 14:18:37 -0800 2013"),
                    (False, 0, "Sat Nov 30 14:18:37 -0800 2013"),
                    (True, 4, "today"),
                )
            ]
            + [""],
            "goodreads_books_d.json": [{"book_id": "1"}],
        },
        RATED,
        {**LOW, "neither read nor rated": {"events": 1}},
    ),
    "packed": (
        {
            "interactions.csv": [
                "domain,user,pos,item,rating,timestamp",
                *("d,u,0,1,4,", "d,u,1,2,2,", "e,u,0,1,4,", "", "d,,2,1,4,"),
            ],
            "items.jsonl": [{"domain": "d", "item": 1, "title": "T"}],
        },
        RATED,
        {**LOW, "rows of other domains": {"lines": 1}},
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_reader_counts_what_it_leaves_out(write, tmp_path, source):
    files, options, expected = FILES[source]
    for name, lines in files.items():
        write(name, lines)
    raw = SOURCES[source](tmp_path, "d", options)
    assert raw.events.size() == Size(1, 1, 1)
    assert raw.dropped().plain() == {"unreadable lines": {"lines": 1}, "blank lines": {"lines": 1}, **expected}


def test_sequences_of_other_domains_and_without_items(write, tmp_path):
    write("items.jsonl", [{"domain": "d", "item": 1, "title": "T"}])
    write("sequences.tsv", ["domain\tuser\titems", "d\tu\t1 1", "d\tv\t", "e\tu\t1"])
    raw = SOURCES["packed"](tmp_path, "d", ReadOptions())
    assert raw.events.size() == Size(1, 1, 2)
    assert raw.dropped().counts["users listed without items"] == {"lines": 1}
    assert raw.dropped().counts["rows of other domains"] == {"lines": 1}


def test_preparation_adds_up_by_hand(write, tmp_path, capsys):
    items = {"a": [1, 2, 3, 4, 4], "b": [1, 2, 3, 9], "c": [1, 2, 3, 4], "d": [4, 3, 2, 1], "e": [1, 2, 7]}
    events = [(user, item, pos) for user, row in items.items() for pos, item in enumerate(row)]
    rows = [f"games,{user},{pos},{item},," for user, item, pos in events]
    write("interactions.csv", ["domain,user,pos,item,rating,timestamp", *rows, "games,x", ""])
    titled = [{"domain": "games", "item": item, "title": f"T{item}"} for item in (1, 2, 3, 4, 7, 8)]
    write("items.jsonl", titled)
    output = str(tmp_path / "out")
    # Items 7 and 9 have one event: without them e has two. The users are five, of which two and one are chosen.
    chosen = {"users_per_domain": 2, "public_users_per_domain": 1, "max_length": 3, "repeats": "first"}
    config = PrepareConfig("packed", str(tmp_path), "games", output, k_core=2, **chosen)
    domain = prepare(config)["games"]
    lost = domain.card["dropped"]
    not_chosen, too_long = "users chosen neither as clients nor for the public pool", "older events beyond max_length"
    assert {reason: lost[reason] for reason in list(lost)[:-2]} == {
        "unreadable lines": {"lines": 1},
        "blank lines": {"lines": 1},
        "texts of items without events": {"records": 2},
        "repeated texts of an item": {"records": 0},
        "below k_core or min_length": {"users": 1, "items": 2, "events": 4},
        "repeats": {"users": 0, "items": 0, "events": 1},
    }
    assert list(lost)[-2:] == [not_chosen, too_long]
    assert (lost[not_chosen]["users"], lost[too_long]["users"]) == (1, 0)
    raw = domain.card["raw"]
    for unit, left in domain.size()._asdict().items():
        assert raw[unit] - sum(counts.get(unit, 0) for counts in lost.values()) == left
    assert domain.size().users == 3
    assert json.loads((tmp_path / "out" / "games" / "card.json").read_text())["dropped"] == lost
    printed = capsys.readouterr().out
    assert "games: left out: unreadable lines (1 line); blank lines (1 line); texts of items without events" in printed
    assert "below k_core or min_length (1 user, 2 items, 4 events); repeats (1 event); users chosen" in printed


def test_bad_lines_of_the_titles_are_counted(write, tmp_path):
    write("u.data", [f"{u}\t{i}\t4\t{i}" for u in (1, 2) for i in (7, 8, 9)])
    write("movies.dat", ["7::Seven (1995)::Drama", "8::Eight", "", "9"])
    data = load_interactions(InteractionsConfig("mine", "movielens", str(tmp_path)))
    assert data.card["raw"]["bad_lines"]["count"] == 2
    assert data.card["dropped"]["unreadable lines"] == {"lines": 2}
    assert data.card["dropped"]["blank lines"] == {"lines": 1}
