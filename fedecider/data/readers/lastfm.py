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
from fedecider.data.readers.files import RawFile, find_file, find_optional
from fedecider.data.readers.lines import finite_number, read_csv
from fedecider.data.readers.table import (
    BELOW_RATING,
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
    tags = options.file(find_file(raw, ["user_taggedartists.dat"], "Last.fm tags"))
    no_ratings(tags.path, options)
    table = EventTable()
    columns = ("userID", "artistID", "day", "month", "year")
    for user, artist, time in read_csv(tags, columns, _tag_row, "\t", quoting=False, expected=_ORIGINAL):
        table.add(f"{domain}-{user}", artist, time)
    return _with_artists(raw, table, tags, options)


def read_plays(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """One event for each artist a user listened to, in file order; ``min_rating`` is the fewest plays."""
    plays = options.file(find_file(raw, ["user_artists.dat"], "Last.fm listening counts"))
    table = EventTable()
    columns = ("userID", "artistID", "weight")
    for user, artist, weight in read_csv(plays, columns, _play_row, "\t", quoting=False, expected=_ORIGINAL):
        if keep_rating(weight, options):
            table.add(f"{domain}-{user}", artist)
        else:
            table.skip(BELOW_RATING)
    return _with_artists(raw, table, plays, options)


def _with_artists(raw: Path, table: EventTable, events: RawFile, options: ReadOptions) -> RawDomain:
    names = ["artists.dat"]
    path = find_file(raw, names, "Last.fm artists") if options.texts_required else find_optional(raw, names)
    if path is None:
        return RawDomain(table.build(), no_texts, [events])
    artists = options.file(path)

    def read_catalogue(wanted: Collection[str]) -> Catalogue:
        rows = read_csv(artists, ("id", "name"), _artist_row, "\t", quoting=False, expected=_ORIGINAL)
        return collect_items(rows, wanted, options, artists.path)

    return RawDomain(table.build(), read_catalogue, [events, artists])


def _tag_row(row: dict[str, str]) -> tuple[str, str, int]:
    days = date(int(row["year"]), int(row["month"]), int(row["day"])).toordinal() - _EPOCH
    return str(int(row["userID"])), str(int(row["artistID"])), days * 86_400 if days >= 0 else UNKNOWN_TIME


def _play_row(row: dict[str, str]) -> tuple[str, str, float]:
    return str(int(row["userID"])), str(int(row["artistID"])), finite_number(row["weight"], "weight")


def _artist_row(row: dict[str, str]) -> tuple[str, ItemFields]:
    return str(int(row["id"])), {"title": clean(row["name"])}
