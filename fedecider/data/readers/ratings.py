"""Readers of rating files: MovieLens, goodbooks-10k, Last.fm, FilmTrust, Amazon ratings, lists of items, and any csv.

Of HetRec 2011 Last.fm (Cantador et al., RecSys 2011): who tagged, or who listened to, which artist.

``user_taggedartists.dat`` (userID artistID tagID day month year): a row is one tag, so a pair of user and artist
repeats; its time is the day, and a day before 1970 (the original holds four) is no known time.
``user_artists.dat`` (userID artistID weight): listening counts, at most 50 artists a user, no times.
Titles from ``artists.dat``. The folder holds one domain, whose name is free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import date
from functools import partial
from pathlib import Path

from fedecider.data.domain import UNKNOWN_TIME
from fedecider.data.readers import reading

_GENRES = (  # in the order of the flags of u.item
    "unknown|Action|Adventure|Animation|Children's|Comedy|Crime|Documentary|Drama|Fantasy|"
    "Film-Noir|Horror|Musical|Mystery|Romance|Sci-Fi|Thriller|War|Western"
)
GENRES_100K = tuple(_GENRES.split("|"))

Rating = tuple[str, str, float, int, int]
"""user, item, rating, time, order."""


def read_movielens(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """MovieLens: ml-100k (``u.data``, ``u.item``), ml-1m, ml-10m (``ratings.dat``, ``movies.dat``), later ones (csv).

    Every rating is an event unless ``min_rating`` is set. The folder holds one domain, whose name is free. User keys
    carry the domain name (they are small numbers). Read too: ``ratings_ordered.csv`` (user, movie, rating, order), for
    a release whose times are lost but whose order is known.
    """
    names = ["u.data", "ratings.dat", "ratings.csv", "ratings_ordered.csv"]
    ratings = options.file(reading.find_file(raw, names, "MovieLens ratings"))
    names = ["u.item", "movies.dat", "movies.csv"]
    path = (
        reading.find_file(raw, names, "MovieLens movies")
        if options.texts_required
        else reading.find_optional(raw, names)
    )
    movies = None if path is None else options.file(path)

    ordered = ratings.path.name.lower().startswith("ratings_ordered")
    table = reading.EventTable(with_order=ordered)
    for user, item, rating, time, order in _movielens_ratings(ratings):
        if reading.keep_rating(rating, options):
            table.add(f"{domain}-{user}", item, time, order)
        else:
            table.skip(reading.BELOW_RATING)

    def read_catalogue(wanted: Collection[str]) -> reading.ItemRecords:
        if movies is None:
            return reading.no_texts(wanted)
        return reading.collect_items(_movies(movies), wanted, options, movies.path)

    return reading.RawDomain(table.build(), read_catalogue, [ratings] if movies is None else [ratings, movies])


def _movielens_ratings(file: reading.RawFile) -> Iterable[Rating]:
    name = file.path.name.lower()
    if name.startswith("u.data"):
        return reading.read_records(file, partial(_movielens_rating_line, separator="\t"))
    if name.startswith("ratings.dat"):
        return reading.read_records(file, partial(_movielens_rating_line, separator="::"))
    if name.startswith("ratings_ordered"):
        return reading.read_csv(file, ("user", "movie", "rating", "order"), _movielens_ordered_row)
    return reading.read_csv(file, ("userId", "movieId", "rating", "timestamp"), _movielens_rating_row)


def _movielens_rating_line(line: bytes, separator: str) -> Rating:
    user, item, rating, time = reading.decode(line).rstrip("\r\n").split(separator)
    return str(int(user)), str(int(item)), reading.finite_number(rating, "rating"), reading.unix_time(time), 0


def _movielens_rating_row(row: dict[str, str]) -> Rating:
    user, item, rating = (
        str(int(row["userId"])),
        str(int(row["movieId"])),
        reading.finite_number(row["rating"], "rating"),
    )
    return user, item, rating, reading.unix_time(row["timestamp"]), 0


def _movielens_ordered_row(row: dict[str, str]) -> Rating:
    user, item, rating = str(int(row["user"])), str(int(row["movie"])), reading.finite_number(row["rating"], "rating")
    return user, item, rating, UNKNOWN_TIME, reading.whole_number(row["order"], "order")


def _movies(file: reading.RawFile) -> Iterator[tuple[str, reading.ItemFields]]:
    name = file.path.name.lower()
    if name.startswith("u.item"):
        return reading.read_records(file, _movie_100k)
    if name.startswith("movies.dat"):
        return reading.read_records(file, _movie_line)
    return reading.read_csv(file, ("movieId", "title", "genres"), _movie_row)


def _movie_100k(line: bytes) -> tuple[str, reading.ItemFields]:
    parts = reading.decode(line).rstrip("\r\n").split("|")
    if len(parts) != 5 + len(GENRES_100K):
        raise ValueError(f"{len(parts)} columns, expected {5 + len(GENRES_100K)}")
    genres = [genre for genre, flag in zip(GENRES_100K[1:], parts[6:], strict=True) if flag == "1"]
    return str(int(parts[0])), _movielens_fields(parts[1], genres)


def _movie_line(line: bytes) -> tuple[str, reading.ItemFields]:
    item, title, genres = reading.decode(line).rstrip("\r\n").split("::")
    return str(int(item)), _movielens_fields(title, genres.split("|"))


def _movie_row(row: dict[str, str]) -> tuple[str, reading.ItemFields]:
    return str(int(row["movieId"])), _movielens_fields(row["title"], row["genres"].split("|"))


def _movielens_fields(title: str, genres: list[str]) -> reading.ItemFields:
    return {"title": reading.clean(title), "genres": reading.clean([g for g in genres if g != "(no genres listed)"])}


def read_goodbooks(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """goodbooks-10k: ``ratings.csv`` (in the order of time, without times), ``books.csv``, and where present the tags.

    Every rating is an event unless ``min_rating`` is set. The folder holds one domain, whose name is free. Files of the
    repository's ``samples`` folder serve where the full ones lack.
    """
    samples = raw / "samples"
    folder = (
        raw
        if reading.find_optional(raw, ["ratings.csv"]) or not reading.find_optional(samples, ["ratings.csv"])
        else samples
    )
    ratings = options.file(reading.find_file(folder, ["ratings.csv"], "goodbooks-10k ratings"))
    books = options.file(reading.find_file(raw, ["books.csv"], "goodbooks-10k books"))
    tags, book_tags = reading.find_optional(raw, ["tags.csv"]), reading.find_optional(folder, ["book_tags.csv"])
    tag_files = [options.file(tags), options.file(book_tags)] if tags and book_tags else []

    table = reading.EventTable()
    for user, item, rating in reading.read_csv(ratings, ("user_id", "book_id", "rating"), _goodbooks_rating_row):
        if reading.keep_rating(rating, options):
            table.add(f"{domain}-{user}", item)
        else:
            table.skip(reading.BELOW_RATING)

    def read_catalogue(wanted: Collection[str]) -> reading.ItemRecords:
        shelves = _shelves(tag_files)

        def records() -> Iterator[tuple[str, reading.ItemFields]]:
            for key, goodreads_id, fields in reading.read_csv(books, ("book_id", "title", "authors"), _book_row):
                yield key, {**fields, "shelves": reading.clean(shelves.get(goodreads_id, []))}

        return reading.collect_items(records(), wanted, options, books.path)

    return reading.RawDomain(table.build(), read_catalogue, [ratings, books, *tag_files])


def _goodbooks_rating_row(row: dict[str, str]) -> tuple[str, str, float]:
    return str(int(row["user_id"])), str(int(row["book_id"])), reading.finite_number(row["rating"], "rating")


def _book_row(row: dict[str, str]) -> tuple[str, str, reading.ItemFields]:
    year = row.get("original_publication_year", "")
    fields = {
        "title": reading.clean(row["title"] or row.get("original_title", "")),
        "author": reading.clean(row["authors"]),
        "year": str(int(reading.finite_number(year, "original_publication_year"))) if year else "",
    }
    return str(int(row["book_id"])), row.get("goodreads_book_id", ""), fields


def _goodbooks_tag_row(row: dict[str, str]) -> tuple[str, str]:
    return row["tag_id"], row["tag_name"]


def _book_tag_row(row: dict[str, str]) -> tuple[str, str, int]:
    return row["goodreads_book_id"], row["tag_id"], reading.whole_number(row["count"], "count")


def _shelves(files: list[reading.RawFile]) -> dict[str, list[str]]:
    """Goodreads book id -> the names of its most used topical tags."""
    if not files:
        return {}
    names = dict(reading.read_csv(files[0], ("tag_id", "tag_name"), _goodbooks_tag_row))
    counted: dict[str, list[tuple[int, str]]] = {}
    for book, tag, count in reading.read_csv(files[1], ("goodreads_book_id", "tag_id", "count"), _book_tag_row):
        name = names.get(tag, "")
        if name and name not in reading.STATE_SHELVES:
            counted.setdefault(book, []).append((-count, name.replace("-", " ")))
    return {book: [name for _, name in sorted(tags)[: reading.NUM_SHELVES]] for book, tags in counted.items()}


_EPOCH = date(1970, 1, 1).toordinal()
_ORIGINAL = "the original tab-separated file"


def read_lastfm_tags(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """One event for each tag that a user gave to an artist; user keys carry the domain name."""
    tags = options.file(reading.find_file(raw, ["user_taggedartists.dat"], "Last.fm tags"))
    reading.no_ratings(tags.path, options)
    table = reading.EventTable()
    columns = ("userID", "artistID", "day", "month", "year")
    for user, artist, time in reading.read_csv(tags, columns, _lastfm_tag_row, "\t", quoting=False, expected=_ORIGINAL):
        table.add(f"{domain}-{user}", artist, time)
    return _with_artists(raw, table, tags, options)


def read_lastfm_plays(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """One event for each artist a user listened to, in file order; ``min_rating`` is the fewest plays."""
    plays = options.file(reading.find_file(raw, ["user_artists.dat"], "Last.fm listening counts"))
    table = reading.EventTable()
    columns = ("userID", "artistID", "weight")
    for user, artist, weight in reading.read_csv(plays, columns, _play_row, "\t", quoting=False, expected=_ORIGINAL):
        if reading.keep_rating(weight, options):
            table.add(f"{domain}-{user}", artist)
        else:
            table.skip(reading.BELOW_RATING)
    return _with_artists(raw, table, plays, options)


def _with_artists(
    raw: Path, table: reading.EventTable, events: reading.RawFile, options: reading.ReadOptions
) -> reading.RawDomain:
    names = ["artists.dat"]
    path = (
        reading.find_file(raw, names, "Last.fm artists")
        if options.texts_required
        else reading.find_optional(raw, names)
    )
    if path is None:
        return reading.RawDomain(table.build(), reading.no_texts, [events])
    artists = options.file(path)

    def read_catalogue(wanted: Collection[str]) -> reading.ItemRecords:
        rows = reading.read_csv(artists, ("id", "name"), _artist_row, "\t", quoting=False, expected=_ORIGINAL)
        return reading.collect_items(rows, wanted, options, artists.path)

    return reading.RawDomain(table.build(), read_catalogue, [events, artists])


def _lastfm_tag_row(row: dict[str, str]) -> tuple[str, str, int]:
    days = date(int(row["year"]), int(row["month"]), int(row["day"])).toordinal() - _EPOCH
    return str(int(row["userID"])), str(int(row["artistID"])), days * 86_400 if days >= 0 else UNKNOWN_TIME


def _play_row(row: dict[str, str]) -> tuple[str, str, float]:
    return str(int(row["userID"])), str(int(row["artistID"])), reading.finite_number(row["weight"], "weight")


def _artist_row(row: dict[str, str]) -> tuple[str, reading.ItemFields]:
    return str(int(row["id"])), {"title": reading.clean(row["name"])}


def read_filmtrust(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """FilmTrust (Guo, Zhang and Yorke-Smith, IJCAI 2013): ``ratings.txt`` or ``.dat``, lines ``user item rating``.

    No times (the order is that of the file) and no texts. Every rating is an event unless ``min_rating`` is set. The
    folder holds one domain, whose name is free. User keys carry the domain name (they are small numbers).
    """
    ratings = options.file(reading.find_file(raw, ["ratings.txt", "ratings.dat"], "FilmTrust ratings"))
    table = reading.EventTable()
    for user, item, rating in reading.read_records(ratings, _filmtrust_rating_line):
        if reading.keep_rating(rating, options):
            table.add(f"{domain}-{user}", item)
        else:
            table.skip(reading.BELOW_RATING)
    return reading.RawDomain(table.build(), reading.no_texts, [ratings])


def _filmtrust_rating_line(line: bytes) -> tuple[str, str, float]:
    user, item, rating = line.split()
    return str(int(user)), str(int(item)), reading.finite_number(rating.decode("ascii"), "rating")


def read_amazon_ratings(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """Amazon ratings without reviews: ``ratings.dat``, lines ``reviewerID,asin,rating,timestamp``, no header, no texts.

    Every rating is an event unless ``min_rating`` is set; times are Unix seconds of whole days. The folder holds one
    domain, whose name is free. A reviewer is the same user in every domain.
    """
    ratings = options.file(reading.find_file(raw, ["ratings.dat"], f"Amazon ratings of {domain!r}"))
    table = reading.EventTable()
    for user, item, rating, time in reading.read_records(ratings, _amazon_ratings_rating_line):
        if reading.keep_rating(rating, options):
            table.add(user, item, time)
        else:
            table.skip(reading.BELOW_RATING)
    return reading.RawDomain(table.build(), reading.no_texts, [ratings])


def _amazon_ratings_rating_line(line: bytes) -> tuple[str, str, float, int]:
    user, item, rating, time = reading.decode(line).strip().split(",")
    if not (user and item):
        raise ValueError("no user or no item")
    return user, item, reading.finite_number(rating, "rating"), reading.unix_time(time)


def read_lists(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """One user a line, ``user item item ...``: ``train.txt``, and where present ``valid.txt`` and ``test.txt``.

    The form of LightGCN's data sets. A user's items of ``valid.txt`` come after those of ``train.txt``, and those of
    ``test.txt`` last. No times, no ratings, no texts; the order is that of the lines, and many files of this form are
    sorted by item, so that a user's last item is not the newest. The folder holds one domain, whose name is free. User
    keys carry the domain name (they are small numbers).
    """
    train = reading.find_file(raw, ["train.txt"], "item lists")
    reading.no_ratings(train, options)
    later = [reading.find_optional(raw, [name]) for name in ("valid.txt", "test.txt")]
    files = [options.file(path) for path in (train, *later) if path is not None]
    table = reading.EventTable()
    for file in files:
        for user, items in reading.read_records(file, _list_line):
            if not items:
                table.dropped.add(reading.NO_ITEMS, lines=1)
            for item in items:
                table.add(f"{domain}-{user}", item)
    for name in _other_texts(raw, {file.path for file in files}):
        table.dropped.add(f"not read: {name}", files=1)
    return reading.RawDomain(table.build(), reading.no_texts, files)


def _other_texts(raw: Path, read: set[Path]) -> list[str]:
    """Files that may be lists under a name that is not known, such as ``val.txt``."""
    others = [path for path in sorted(raw.iterdir()) if path.is_file() and path not in read]
    return [path.name for path in others if path.name.lower().endswith((".txt", ".txt.gz"))]


def _list_line(line: bytes) -> tuple[str, list[str]]:
    user, *items = [str(int(number)) for number in line.split()]
    return user, items


def read_csv_columns(raw: Path, domain: str, options: reading.ReadOptions) -> reading.RawDomain:
    """Any table with a header, ``<domain>.csv`` (commas) or ``<domain>.tsv`` (tabs); the options name its columns.

    Users and items are any texts, a user the same in every domain. Every row is an event unless ``min_rating`` is set.
    A time column (Unix seconds) gives the order, without one the file does. No texts.
    """
    path = reading.find_file(raw, [f"{domain}.csv", f"{domain}.tsv"], f"table of {domain!r}")
    columns = options.columns
    if not columns.rating:
        reading.no_ratings(path, options)

    def parse(row: dict[str, str]) -> tuple[str, str, float | None, int, int]:
        user, item = row[columns.user], row[columns.item]
        if not (user and item):
            raise ValueError("no user or no item")
        rating = reading.finite_number(row[columns.rating], "rating") if columns.rating else None
        # By way of a float, for the many tables that write whole seconds as 881250949.0.
        time, order = reading.moment(_seconds(row[columns.time])) if columns.time else (UNKNOWN_TIME, 0)
        return user, item, rating, time, order

    file = options.file(path)
    delimiter = "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else ","
    named = [name for name in columns if name]
    expected = (
        "the columns that the settings name, between commas (.csv) or tabs (.tsv). Give --user_column and "
        "--item_column, and where wanted --rating_column and --time_column"
    )
    table = reading.EventTable(with_order=bool(columns.time))
    for user, item, rating, time, order in reading.read_csv(file, named, parse, delimiter, expected=expected):
        if rating is None or reading.keep_rating(rating, options):
            table.add(user, item, time, order)
        else:
            table.skip(reading.BELOW_RATING)
    return reading.RawDomain(table.build(), reading.no_texts, [file])


def _seconds(text: str) -> float:
    """``ValueError`` for a date in words."""
    try:
        return reading.finite_number(text, "time")
    except ValueError as error:
        raise ValueError(f"time is {text!r}, expected Unix seconds, such as 1617235200") from error
