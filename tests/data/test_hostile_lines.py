"""Numbers out of range, half characters, stray quotes: a line is counted as bad, never a crash or a lost row."""

from __future__ import annotations

import pytest

from fedecider.data.prepare import PrepareConfig, prepare
from fedecider.data.readers import SOURCES, ReadOptions
from fedecider.data.readers.reading import clean, finite_number, text_field, unix_time, whole_number
from fedecider.data.store import load_domains

OPTIONS = ReadOptions()
HUGE = 10**30


def num_events(raw):
    return len(raw.events.user_E)


def test_amazon_numbers_out_of_range(write, tmp_path):
    good = '{"reviewerID": "A", "asin": "B1", "overall": 5, "unixReviewTime": 7}'
    broken = [
        good.replace("7}", "1e400}"),
        good.replace("7}", "NaN}"),
        good.replace("7}", f"{HUGE}}}"),
        good.replace("5,", "1e999,"),
        good.replace("5,", f"{10**400},"),
        good.replace('"A"', '"A\\ud800"'),
    ]
    write("Books_5.json.gz", [*broken, good])
    write(
        "meta_Books.json.gz",
        [
            # A numeric character reference of 5,000 digits, which html.unescape refuses.
            {"asin": "B1", "title": f"&#{'9' * 5000};"},
            {"asin": "B1", "title": "One"},
        ],
    )
    raw = SOURCES["amazon"](tmp_path, "books", OPTIONS)
    assert num_events(raw) == 1
    assert raw.files[0].bad_lines[0] == "Books_5.json.gz:1: timestamp inf is not in Unix seconds"
    assert raw.files[0].bad_lines[3] == "Books_5.json.gz:4: overall is inf, expected a finite number"
    assert "halves of a character" in raw.files[0].bad_lines[5]
    assert raw.files[0].num_bad == 6
    assert raw.read_catalogue({"B1"}).items["B1"]["title"] == "One"
    assert raw.files[1].num_bad == 1


def test_bounds():
    assert [whole_number(value, "n") for value in (7, "-7", 2.0, 2**63 - 1)] == [7, -7, 2, 2**63 - 1]
    for value in (2**63, -(2**63) - 1, 2.5, float("inf"), float("nan"), "x", None):
        with pytest.raises(ValueError, match=r"n is .*, expected a whole number"):
            whole_number(value, "n")
    for value in ("nan", "-inf", 10**400, "x", None):
        with pytest.raises(ValueError, match=r"n is .*, expected a finite number"):
            finite_number(value, "n")
    assert unix_time(2**33 - 1) == 2**33 - 1
    for value in (2**33, -1, float("inf"), float("nan"), HUGE):
        with pytest.raises(ValueError, match="not in Unix seconds"):
            unix_time(value)


def test_half_characters():
    assert clean("a\ud800b \udfffc") == "ab c"
    assert clean("\ud83d\ude00 d\u00e9j\u00e0") == "\U0001f600 d\u00e9j\u00e0"  # two halves are one character
    assert text_field({"user": "\U0001f600"}, "user") == "\U0001f600"
    with pytest.raises(ValueError, match=r"field 'user' is 'u.udc00', expected a text"):
        text_field({"user": "u\udc00"}, "user")


def test_half_characters_do_not_stop_the_save(packed, write, tmp_path):
    folder = packed({"games": {f"u{u}": [(item, 100 + item) for item in range(4)] for u in range(5)}})
    items = [{"domain": "games", "item": item, "title": f"T{item}\ud83d", "keywords": ["\udc00x"]} for item in range(4)]
    write("items.jsonl.gz", items)
    output = str(tmp_path / "out")
    prepare(PrepareConfig(source="packed", raw=str(folder), domains="games", k_core=0, output=output))
    domain = load_domains(output)["games"]
    assert domain.titles == ["T0", "T1", "T2", "T3"]
    assert domain.item_texts[1] == "title: t1; keywords: x"


def test_a_stray_quote_costs_one_line(write, tmp_path):
    write("ratings.csv", ["userId,movieId,rating,timestamp", "1,1,5,5"])
    titles = ['1,"Open (1990),Drama', '2,"Net, The (1995)",Action', '3,Half a 7" (2000),"Drama', '4,12" (2001),Drama']
    write("movies.csv", ["movieId,title,genres", *titles, '5,"A ""B""",Drama', '6,"x"y,Drama', "7,Last,Drama"])
    raw = SOURCES["movielens"](tmp_path, "films", OPTIONS)
    items = raw.read_catalogue(set("1234567")).items
    assert {key: fields["title"] for key, fields in items.items()} == {
        "2": "Net, The (1995)",
        "4": '12" (2001)',
        "5": 'A "B"',
        "7": "Last",
    }
    assert [example.split(": ")[0] for example in raw.files[1].bad_lines] == [f"movies.csv:{n}" for n in (2, 4, 7)]
    assert all(": quotes: " in example for example in raw.files[1].bad_lines)


def test_quotes_in_a_tab_separated_file_are_characters(write, tmp_path):
    write("items.jsonl", [{"domain": "toys", "item": item, "title": f"T{item}"} for item in (1, 2, 3)])
    write("sequences.tsv", ["domain\tuser\titems", 'toys\t"a\t3 1', "toys\tb\t2", 'toys\tc"\t1', f"toys\td\t{HUGE}"])
    raw = SOURCES["packed"](tmp_path, "toys", OPTIONS)
    assert raw.events.users == ['"a', "b", 'c"']
    assert num_events(raw) == 4
    assert raw.files[0].num_bad == 1
