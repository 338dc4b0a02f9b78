"""MovieLens: ml-100k (``u.data``, ``u.item``), ml-1m, ml-10m (``ratings.dat``, ``movies.dat``), later releases (csv).

Every rating is an event unless ``min_rating`` is set. The folder holds one domain, whose name is free. Read too:
``ratings_ordered.csv`` (user, movie, rating, order), for a release whose times are lost but whose order is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.readers.files import RawFile, find_file, find_optional
from fedecider.data.readers.lines import decode, finite_number, read_csv, read_records, whole_number
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
    no_texts,
    unix_time,
)

_GENRES = (  # in the order of the flags of u.item
    "unknown|Action|Adventure|Animation|Children's|Comedy|Crime|Documentary|Drama|Fantasy|"
    "Film-Noir|Horror|Musical|Mystery|Romance|Sci-Fi|Thriller|War|Western"
)
GENRES_100K = tuple(_GENRES.split("|"))

Rating = tuple[str, str, float, int, int]
"""user, item, rating, time, order."""


def read(raw: Path, domain: str, options: ReadOptions) -> RawDomain:
    """The ratings and movies of the release in ``raw``; user keys carry the domain name (they are small numbers)."""
    names = ["u.data", "ratings.dat", "ratings.csv", "ratings_ordered.csv"]
    ratings = options.file(find_file(raw, names, "MovieLens ratings"))
    names = ["u.item", "movies.dat", "movies.csv"]
    path = find_file(raw, names, "MovieLens movies") if options.texts_required else find_optional(raw, names)
    movies = None if path is None else options.file(path)

    ordered = ratings.path.name.lower().startswith("ratings_ordered")
    table = EventTable(with_order=ordered)
    for user, item, rating, time, order in _ratings(ratings):
        if keep_rating(rating, options):
            table.add(f"{domain}-{user}", item, time, order)
        else:
            table.skip(BELOW_RATING)

    def read_catalogue(wanted: Collection[str]) -> Catalogue:
        if movies is None:
            return no_texts(wanted)
        return collect_items(_movies(movies), wanted, options, movies.path)

    return RawDomain(table.build(), read_catalogue, [ratings] if movies is None else [ratings, movies])


def _ratings(file: RawFile) -> Iterable[Rating]:
    name = file.path.name.lower()
    if name.startswith("u.data"):
        return read_records(file, partial(_rating_line, separator="\t"))
    if name.startswith("ratings.dat"):
        return read_records(file, partial(_rating_line, separator="::"))
    if name.startswith("ratings_ordered"):
        return read_csv(file, ("user", "movie", "rating", "order"), _ordered_row)
    return read_csv(file, ("userId", "movieId", "rating", "timestamp"), _rating_row)


def _rating_line(line: bytes, separator: str) -> Rating:
    user, item, rating, time = decode(line).rstrip("\r\n").split(separator)
    return str(int(user)), str(int(item)), finite_number(rating, "rating"), unix_time(time), 0


def _rating_row(row: dict[str, str]) -> Rating:
    user, item, rating = str(int(row["userId"])), str(int(row["movieId"])), finite_number(row["rating"], "rating")
    return user, item, rating, unix_time(row["timestamp"]), 0


def _ordered_row(row: dict[str, str]) -> Rating:
    user, item, rating = str(int(row["user"])), str(int(row["movie"])), finite_number(row["rating"], "rating")
    return user, item, rating, UNKNOWN_TIME, whole_number(row["order"], "order")


def _movies(file: RawFile) -> Iterator[tuple[str, ItemFields]]:
    name = file.path.name.lower()
    if name.startswith("u.item"):
        return read_records(file, _movie_100k)
    if name.startswith("movies.dat"):
        return read_records(file, _movie_line)
    return read_csv(file, ("movieId", "title", "genres"), _movie_row)


def _movie_100k(line: bytes) -> tuple[str, ItemFields]:
    parts = decode(line).rstrip("\r\n").split("|")
    if len(parts) != 5 + len(GENRES_100K):
        raise ValueError(f"{len(parts)} columns, expected {5 + len(GENRES_100K)}")
    genres = [genre for genre, flag in zip(GENRES_100K[1:], parts[6:], strict=True) if flag == "1"]
    return str(int(parts[0])), _fields(parts[1], genres)


def _movie_line(line: bytes) -> tuple[str, ItemFields]:
    item, title, genres = decode(line).rstrip("\r\n").split("::")
    return str(int(item)), _fields(title, genres.split("|"))


def _movie_row(row: dict[str, str]) -> tuple[str, ItemFields]:
    return str(int(row["movieId"])), _fields(row["title"], row["genres"].split("|"))


def _fields(title: str, genres: list[str]) -> ItemFields:
    return {"title": clean(title), "genres": clean([g for g in genres if g != "(no genres listed)"])}
