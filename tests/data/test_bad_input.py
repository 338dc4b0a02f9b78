"""Damaged and wrong input: one message that says what was got, what was expected and what to do."""

from __future__ import annotations

import gzip
import logging
import random

import pytest

from fedecider.data.prepare import PrepareConfig, prepare, prepare_domains
from fedecider.data.readers import SOURCES, ReadOptions

THREE = {f"u{u}": [(item, 100 * item + u) for item in range(4)] for u in range(5)}


def config(folder, **settings):
    given = {"source": "packed", "raw": str(folder), "domains": "games", "k_core": 0, "output": str(folder / "out")}
    return PrepareConfig(**{**given, **settings})


def test_truncated_gzip(packed):
    users = {f"{random.Random(u).random()}": [(item, 1000 + item) for item in range(9)] for u in range(3000)}
    folder = packed({"games": users})
    path = folder / "interactions.csv.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"interactions\.csv\.gz, a truncated or damaged gzip file"):
        prepare(config(folder))
    assert not (folder / "out").exists()


def test_damaged_gzip(packed):
    folder = packed({"games": THREE})
    path = folder / "interactions.csv.gz"
    content = bytearray(path.read_bytes())
    content[-6] ^= 255  # the checksum at the end
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="damaged gzip"):
        prepare(config(folder))


# mtime fixed: a test's name is made from the bytes, and must be the same in every test process.
@pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0), gzip.compress(b"\n\n", mtime=0)])
def test_empty_file(packed, content):
    folder = packed({"games": THREE})
    (folder / "interactions.csv.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"the empty file .*interactions\.csv\.gz"):
        prepare(config(folder))


def test_missing_file_and_folder(packed, tmp_path):
    folder = packed({"games": THREE})
    (folder / "interactions.csv.gz").unlink()
    with pytest.raises(ValueError, match=r"expected interactions\.csv or sequences\.tsv .*found items\.jsonl\.gz"):
        prepare(config(folder))
    with pytest.raises(ValueError, match="does not exist"):
        prepare(config(tmp_path / "nowhere"))


def test_bad_lines_up_to_the_limit(write, tmp_path, caplog):
    good = [f"{user}::{item}::5::{item}" for user in range(3) for item in range(1, 4)]
    write("ratings.dat", ["nonsense", *good, "1::2", "1::2::x::4"])
    write("movies.dat", [f"{item}::Film {item}::Drama" for item in range(1, 4)])
    settings = {"source": "movielens", "domains": "films", "k_core": 0, "public_share": 0}
    with caplog.at_level(logging.WARNING):
        domains = prepare_domains(config(tmp_path, max_bad_lines=3, **settings))
    assert [record.args[0].split(": ")[0] for record in caplog.records] == [
        "ratings.dat:1",
        "ratings.dat:11",
        "ratings.dat:12",
    ]
    assert domains["films"].card["raw"]["bad_lines"]["count"] == 3
    with pytest.raises(ValueError, match=r"more than 2 bad lines, the last one at ratings\.dat:12: .*max_bad_lines"):
        prepare_domains(config(tmp_path, max_bad_lines=2, **settings))


def test_items_without_text(packed):
    folder = packed({"games": THREE}, skip_items=(2,))
    with pytest.raises(ValueError, match=r"1 of 4 items without text, such as 'games:2'.*--missing_text drop"):
        prepare(config(folder))
    domain = prepare_domains(config(folder, missing_text="drop", public_share=0))["games"]
    assert domain.item_keys == ["games:0", "games:1", "games:3"]
    assert domain.clients.sequences == [[0, 1, 2]] * 5
    assert domain.card["dropped"]["items without text"] == {"users": 0, "items": 1, "events": 5}


def test_duplicate_item_keys(packed, write, tmp_path):
    folder = packed({"games": THREE})
    items = [{"domain": "games", "item": i, "title": f"T{i}"} for i in (0, 1, 2, 3, 1)]
    write("items.jsonl.gz", [*items[:4], {**items[4], "title": "Other"}])
    with pytest.raises(ValueError, match=r"duplicate item key '1' .'T1' and 'Other'.*expected each item once"):
        prepare(config(folder))
    domain = prepare_domains(config(folder, duplicate_items="first"))["games"]
    assert domain.titles[1] == "T1"
    assert domain.card["items"]["repeated_different"] == 1
    # The same text twice is counted.
    write("csv/ratings.csv", ["userId,movieId,rating,timestamp", "1,1,5,5"])
    write("csv/movies.csv", ["movieId,title,genres", "1,A,Drama", "1,A,Drama"])
    records = SOURCES["movielens"](tmp_path / "csv", "films", ReadOptions()).read_catalogue({"1"})
    assert (records.num_same, records.num_different) == (1, 0)


def test_missing_column(packed, write):
    folder = packed({"games": THREE})
    write("interactions.csv.gz", ["domain,user,item", "games,a,1"])
    with pytest.raises(ValueError, match=r"has no column \['pos', 'rating', 'timestamp'\]"):
        prepare(config(folder))


@pytest.mark.parametrize("source", ["packed", "amazon", "goodreads"])
def test_unknown_domain(packed, source):
    folder = packed({"games": THREE})
    with pytest.raises(ValueError, match=r"unknown domain 'cooking'.*(games|crime|electronics)"):
        prepare(config(folder, source=source, domains="cooking"))


def test_too_few_users_or_items(packed):
    one_user = packed({"games": {"u": [(i, i) for i in range(5)]}})
    with pytest.raises(ValueError, match=r"'games' has 1 user\(s\) and 5 item\(s\)"):
        prepare(config(one_user))
    one_item = packed({"games": {f"u{u}": [(7, i) for i in range(5)] for u in range(5)}})
    with pytest.raises(ValueError, match=r"has 5 user\(s\) and 1 item\(s\)"):
        prepare(config(one_item))
    nothing_left = packed({"games": THREE})
    with pytest.raises(ValueError, match=r"0 user\(s\).*raw: 20 events, 5 users, 4 items.*Lower k_core \(6\)"):
        prepare(config(nothing_left, k_core=6))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"source": "netflix"}, "source .*netflix"),
        ({"k_core": -1}, "k_core -1"),
        ({"min_length": 2}, "min_length 2"),
        ({"max_length": 2}, "max_length 2"),
        ({"users_per_domain": 1}, "users_per_domain 1"),
        ({"public_share": 1.0}, "public_share 1.0"),
        ({"text_fields": ("colour",)}, r"text_fields \['colour'\]; expected some of"),
        ({"domains": ""}, r"domains \[\]; expected one or more"),
        ({"domains": "a,a"}, "expected one or more different names"),
        ({"domains": "../a"}, "domain '../a', expected"),
        ({"source": "movielens", "domains": "a,b"}, "holds one domain"),
    ],
)
def test_settings(tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **settings)
