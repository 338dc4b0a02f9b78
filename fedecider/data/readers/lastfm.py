"""HetRec 2011 Last.fm (Cantador et al., RecSys 2011): who tagged, or who listened to, which artist.

``user_taggedartists.dat`` (userID artistID tagID day month year): a row is one tag, so a pair of user and artist
repeats; its time is the day, and a day before 1970 (the original holds four) is no known time.
``user_artists.dat`` (userID artistID weight): listening counts, at most 50 artists a user, no times.
Titles from ``artists.dat``. The folder holds one domain, whose name is free.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from pathlib import Path

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.readers.lines import BadLines, find_file, find_optional, finite_number, read_csv
from fedecider.data.readers.table import (
    Catalogue,
    EventTable,
    ItemFields,
    RawDomain,
    ReadOptions,
    clean,
    collect_items,
    keep_rating,
    no_ratings,
    no_texts,
)

_EPOCH = date(1970, 1, 1).toordinal()
_ORIGINAL = "the original tab-separated file"


def read_tags(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """One event for each tag that a user gave to an artist; user keys carry the domain name."""
    tags = find_file(raw, ["user_taggedartists.dat"], "Last.fm tags")
    no_ratings(tags, options)
    bad = BadLines(tags, options.max_bad_lines)
    table = EventTable()
    columns = ("userID", "artistID", "day", "month", "year")
    for user, artist, time in read_csv(tags, columns, _tag_row, bad, "\t", quoting=False, expected=_ORIGINAL):
        table.add(f"{domain}-{user}", artist, time)
    return _with_artists(raw, table, tags, bad, options)


def read_plays(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """One event for each artist a user listened to, in file order; ``min_rating`` is the fewest plays."""
    plays = find_file(raw, ["user_artists.dat"], "Last.fm listening counts")
    bad = BadLines(plays, options.max_bad_lines)
    table = EventTable()
    columns = ("userID", "artistID", "weight")
    for user, artist, weight in read_csv(plays, columns, _play_row, bad, "\t", quoting=False, expected=_ORIGINAL):
        if keep_rating(weight, options):
            table.add(f"{domain}-{user}", artist)
        else:
            table.skip("rating below min_rating")
    return _with_artists(raw, table, plays, bad, options)


def _with_artists(raw: Path, table: EventTable, events: Path, bad: BadLines, options: ReadOptions) -> RawDomain:
    names = ["artists.dat"]
    artists = find_file(raw, names, "Last.fm artists") if options.texts_required else find_optional(raw, names)
    if artists is None:
        return RawDomain(table.build(), no_texts, [events], [bad])
    bad_artists = BadLines(artists, options.max_bad_lines)

    def read_catalogue(wanted: Collection[str]) -> Catalogue:
        rows = read_csv(artists, ("id", "name"), _artist_row, bad_artists, "\t", quoting=False, expected=_ORIGINAL)
        return collect_items(rows, wanted, options, artists)

    return RawDomain(table.build(), read_catalogue, [events, artists], [bad, bad_artists])


def _tag_row(row: dict[str, str]) -> tuple[str, str, int]:
    days = date(int(row["year"]), int(row["month"]), int(row["day"])).toordinal() - _EPOCH
    return str(int(row["userID"])), str(int(row["artistID"])), days * 86_400 if days >= 0 else UNKNOWN_TIME


def _play_row(row: dict[str, str]) -> tuple[str, str, float]:
    return str(int(row["userID"])), str(int(row["artistID"])), finite_number(row["weight"], "weight")


def _artist_row(row: dict[str, str]) -> tuple[str, ItemFields]:
    return str(int(row["id"])), {"title": clean(row["name"])}
