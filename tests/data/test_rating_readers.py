"""Readers of rating files without texts, and of Last.fm, on small files in the original layout; values by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedecider.data.prepare import PrepareConfig
from fedecider.data.readers import SOURCES, WITHOUT_TEXTS, ReadOptions

OPTIONS = ReadOptions()
DAY = 86_400


def events_of(raw):
    """(user, item, time) in file order."""
    e = raw.events
    return [
        (e.users[u], e.items[i], t)
        for u, i, t in zip(e.user_E.tolist(), e.item_E.tolist(), e.time_E.tolist(), strict=True)
    ]


TAGS = [
    "userID\tartistID\ttagID\tday\tmonth\tyear\r",
    "2\t52\t13\t2\t1\t1970\r",
    "2\t52\t15\t3\t1\t1970\r",
    "3\t51\t13\t1\t9\t1956\r",
    "3\t52\t13\t31\t2\t2009\r",  # no such day
    "x\t52\t13\t1\t1\t2009\r",
    "3\t52\t13\t1\t1\r",
]
ARTISTS = ["id\tname\turl\tpictureURL", '51\t"Weird Al" Yankovic\thttp://a\thttp://b', "52\tBj\u00f6rk\t\t"]


def test_lastfm_tags(write, tmp_path):
    write("user_taggedartists.dat.gz", TAGS)
    write("artists.dat.gz", ARTISTS)
    raw = SOURCES["lastfm_tags"](tmp_path, "music", OPTIONS)
    # One event a tag; the year 1956 is a time that is not known, not a lost event.
    assert events_of(raw) == [("music-2", "52", DAY), ("music-2", "52", 2 * DAY), ("music-3", "51", -1)]
    places = [example.split(": ")[0] for example in raw.files[0].bad_lines]
    assert places == [f"user_taggedartists.dat.gz:{line}" for line in (5, 6, 7)]
    titles = {key: fields["title"] for key, fields in raw.read_catalogue({"51", "52", "99"}).items.items()}
    assert titles == {"51": '"Weird Al" Yankovic', "52": "Bj\u00f6rk"}
    with pytest.raises(ValueError, match=r"no ratings.*min_rating is 3"):
        SOURCES["lastfm_tags"](tmp_path, "music", ReadOptions(min_rating=3))


def test_lastfm_plays(write, tmp_path):
    write("user_artists.dat", ["userID\tartistID\tweight", "2\t51\t13883", "2\t52\t7", "2\t53\tmany"])
    write("user_taggedartists.dat", TAGS)
    write("artists.dat", ARTISTS)
    raw = SOURCES["lastfm_plays"](tmp_path, "music", ReadOptions(min_rating=8))
    assert events_of(raw) == [("music-2", "51", -1)]
    assert raw.events.dropped.counts == {"rating below min_rating": {"events": 1}}
    assert raw.files[0].bad_lines == ["user_artists.dat:4: no rating in '2\\t53\\tmany'"]


@pytest.mark.parametrize("name", ["ratings.txt", "ratings.dat"])
def test_filmtrust(write, tmp_path, name):
    write(name, ["1 1 2", "1 1 2", "3  14\t0.5", "3 b 4", "3 15 4 9", "", "3 15 nan", "12 2 3.5"])
    raw = SOURCES["filmtrust"](tmp_path, "films", ReadOptions(min_rating=1))
    assert events_of(raw) == [("films-1", "1", -1), ("films-1", "1", -1), ("films-12", "2", -1)]
    assert raw.events.dropped.counts == {"rating below min_rating": {"events": 1}}
    assert [example.split(": ")[0] for example in raw.files[0].bad_lines] == [f"{name}:{n}" for n in (4, 5, 7)]
    with pytest.raises(ValueError, match=rf"more than 2 bad lines, the last one at {name}:7"):
        SOURCES["filmtrust"](tmp_path, "films", ReadOptions(max_bad_lines=2))


def test_amazon_ratings(write, tmp_path):
    write("ratings.dat.gz", ["A1,B0,5.0,1198195200", "A1,B1,2.0,1281052800", ",B1,2.0,9", "A1;B0;5;7", "A1,B0,5,1e3"])
    raw = SOURCES["amazon_ratings"](tmp_path, "video", ReadOptions(min_rating=2.5))
    assert events_of(raw) == [("A1", "B0", 1198195200)]
    assert raw.events.dropped.counts == {"rating below min_rating": {"events": 1}}
    assert raw.files[0].num_bad == 3
    assert raw.files[0].bad_lines[0] == "ratings.dat.gz:3: no user in ',B1,2.0,9'"


def test_lists(write, tmp_path):
    write("train.txt", ["0 5 3", "1", "2 x", "1 4"])
    raw = SOURCES["lists"](tmp_path, "shop", OPTIONS)
    assert events_of(raw) == [("shop-0", "5", -1), ("shop-0", "3", -1), ("shop-1", "4", -1)]
    assert raw.files[0].bad_lines[0].startswith("train.txt:3: ")
    write("test.txt", ["1 9", "0 1 2"])
    raw = SOURCES["lists"](tmp_path, "shop", OPTIONS)
    of_user_0 = [item for user, item, _ in events_of(raw) if user == "shop-0"]
    assert of_user_0 == ["5", "3", "1", "2"]
    assert [file.path.name for file in raw.files] == ["train.txt", "test.txt"]
    write("valid.txt.gz", ["0 7", "3 8"])
    raw = SOURCES["lists"](tmp_path, "shop", OPTIONS)
    of_user_0 = [item for user, item, _ in events_of(raw) if user == "shop-0"]
    assert of_user_0 == ["5", "3", "7", "1", "2"]  # the validation items come between those of training and test
    assert raw.events.users == ["shop-0", "shop-1", "shop-3"]
    assert [file.path.name for file in raw.files] == ["train.txt", "valid.txt.gz", "test.txt"]
    with pytest.raises(ValueError, match="no ratings"):
        SOURCES["lists"](tmp_path, "shop", ReadOptions(min_rating=1))


@pytest.mark.parametrize("source", sorted(WITHOUT_TEXTS))
def test_sources_without_texts_are_not_for_text_models(tmp_path, source):
    with pytest.raises(ValueError, match=source):
        PrepareConfig(source, str(tmp_path), "one")


@pytest.mark.data
@pytest.mark.parametrize(
    ("source", "folder", "users", "items", "events"),
    [
        ("lastfm_tags", "hetrec2011-lastfm-2k", 1892, 12523, 186478),
        ("lastfm_plays", "hetrec2011-lastfm-2k", 1892, 17632, 92834),
        ("amazon_ratings", "amazon-instant-video", 8072, 11830, 63836),
    ],
)
def test_real_files(data_root, source, folder, users, items, events):
    raw = SOURCES[source](data_root / folder, "d", ReadOptions(max_bad_lines=0))
    assert (len(raw.events.users), len(raw.events.items), len(raw.events.user_E)) == (users, items, events)
    if source == "lastfm_tags":
        assert np.count_nonzero(raw.events.time_E == -1) == 4  # 1956 and 1957
