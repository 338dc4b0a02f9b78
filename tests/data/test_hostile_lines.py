"""Numbers out of range, half characters, stray quotes: a line is counted as bad, never a crash or a lost row."""

from __future__ import annotations

from fedecider.data.prepare import PrepareConfig, prepare
from fedecider.data.readers import SOURCES, ReadOptions
from fedecider.data.readers.reading import clean
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
    reasons = [example.split(" in ")[0] for example in raw.files[0].bad_lines]
    wrong = ["time", "time", "time", "rating", "rating", "JSON object"]
    assert reasons == [f"Books_5.json.gz:{number}: no {name}" for number, name in enumerate(wrong, 1)]
    assert raw.files[0].num_bad == 6
    assert raw.read_catalogue({"B1"}).items["B1"]["title"] == "One"
    assert raw.files[1].num_bad == 1


def test_bounds(write, tmp_path):
    good = [f"A,B{place},{rating},{time}" for place, (rating, time) in enumerate([("-1e3", 0), (" 4", 2**33 - 1)])]
    times = ["-1", f"{2**33}", "inf", "nan", "x", "", "7.5", "1e3", f"{HUGE}"]
    bad = [*(f"A,B,4,{time}" for time in times), *(f"A,B,{rating},7" for rating in ("nan", "-inf", "1e400", "x", ""))]
    write("ratings.dat", [*good, *bad])
    raw = SOURCES["amazon_ratings"](tmp_path, "books", OPTIONS)
    assert raw.events.time_E.tolist() == [0, 2**33 - 1]
    assert raw.files[0].num_bad == len(bad)
    write("u.data", [f"1\t{item}\t5\t7" for item in (2**63 - 1, " 7 ", 2**63, 2.5, "x", "", "0x10", "-3")])
    assert SOURCES["movielens"](tmp_path, "films", OPTIONS._replace(texts_required=False)).events.items == [
        str(2**63 - 1),
        "7",
        "-3",
    ]


def test_half_characters():
    assert clean("a\ud800b \udfffc") == "ab c"
    assert clean("\ud83d\ude00 d\u00e9j\u00e0") == "\U0001f600 d\u00e9j\u00e0"  # two halves are one character


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
    assert all(": not 3 columns in " in example for example in raw.files[1].bad_lines)


def test_quotes_in_a_tab_separated_file_are_characters(write, tmp_path):
    write("items.jsonl", [{"domain": "toys", "item": item, "title": f"T{item}"} for item in (1, 2, 3)])
    write("sequences.tsv", ["domain\tuser\titems", 'toys\t"a\t3 1', "toys\tb\t2", 'toys\tc"\t1', f"toys\td\t{HUGE}"])
    raw = SOURCES["packed"](tmp_path, "toys", OPTIONS)
    assert raw.events.users == ['"a', "b", 'c"']
    assert num_events(raw) == 4
    assert raw.files[0].num_bad == 1
