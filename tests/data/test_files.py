"""Files that are not what a reader expects are refused by name, in one message; large ones tell how far they are."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile

import pytest

from fedecider.data.interactions import InteractionsConfig, load_interactions
from fedecider.data.readers import SOURCES, ReadOptions, layouts
from fedecider.data.readers.reading import find_optional

TEXT = "".join(f"u{u},{i},5,7\n" for u in range(3) for i in range(4))


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("ratings.dat", content)
    return buffer.getvalue()


def load(folder):
    return load_interactions(InteractionsConfig("shop", "amazon_ratings", str(folder)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TEXT.encode("utf-16-le"), "with zero bytes"),
        (bytes(100), "with zero bytes"),
        (zipped(TEXT.encode()), "is a zip archive"),
        (bz2.compress(TEXT.encode()), "is a bzip2 file"),
        (lzma.compress(TEXT.encode()), "is an xz file"),
        (gzip.compress(gzip.compress(TEXT.encode())), "is compressed with gzip twice"),
        (gzip.compress(TEXT.encode())[:-9], "a truncated or damaged gzip file"),
        (gzip.compress(TEXT.encode())[:5], "a truncated or damaged gzip file"),
        (gzip.compress(TEXT.encode())[:-8] + bytes(8), "a truncated or damaged gzip file"),
        (b"", "the empty file"),
        (b"\xef\xbb\xbf", "the empty file"),
        (b"\xef\xbb\xbf\n \n", "the empty file"),
    ],
    ids=range(12),
)
def test_refused_with_the_name_of_the_file(tmp_path, content, words):
    (tmp_path / "ratings.dat").write_bytes(content)
    with pytest.raises(ValueError, match=r"ratings\.dat") as caught:
        load(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [TEXT.encode(), b"\xef\xbb\xbf" + TEXT.encode(), gzip.compress(TEXT.encode()), TEXT.encode("utf-16")],
    ids=["plain", "mark", "gzip", "utf-16"],  # a name made of the bytes would hold the time of the compression
)
def test_text_with_or_without_a_mark(tmp_path, content):
    (tmp_path / "ratings.dat").write_bytes(content)
    assert load(tmp_path).users == ["u0", "u1", "u2"]


def test_a_header_that_names_a_column_twice(write, tmp_path):
    write("movies.csv", ["movieId,title,genres"])
    write("ratings.csv", ["userId,movieId,rating,timestamp,movieId", "1,1,4,9,9"])
    with pytest.raises(
        ValueError, match=r"ratings\.csv: header .* has more than one column \['movieId'\]; expected each once"
    ):
        SOURCES["movielens"](tmp_path, "films", ReadOptions())
    # Columns without a name are nobody's; many tools write them.
    write("ratings.csv", ["userId,movieId,rating,timestamp,,", "1,2,4,9,7,8"])
    assert SOURCES["movielens"](tmp_path, "films", ReadOptions()).events.items == ["2"]


def test_folders_in_the_place_of_files(tmp_path):
    (tmp_path / "ratings.dat").mkdir()
    with pytest.raises(ValueError, match=r"ratings\.dat is a folder; expected a file"):
        load(tmp_path)
    (tmp_path / "ratings.dat.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert load(tmp_path).num_users == 3
    (tmp_path / "Valid.txt").mkdir()
    with pytest.raises(ValueError, match=r"Valid\.txt is a folder"):
        find_optional(tmp_path, ["valid.txt"])
    with pytest.raises(ValueError, match=r"raw folder .*ratings\.dat\.gz is a file; expected the folder with"):
        SOURCES["amazon_ratings"](tmp_path / "ratings.dat.gz", "shop", ReadOptions())


@pytest.mark.parametrize("name", ["ratings.dat", "ratings.dat.gz"])
def test_reading_tells_how_far_it_is(write, monkeypatch, tmp_path, name):
    monkeypatch.setattr(layouts, "BATCH", 2048)
    write(name, [f"u{number},i,5,7" for number in range(9000)])
    clock = iter(range(0, 400, 2))
    monkeypatch.setattr(layouts.time, "monotonic", lambda: next(clock))
    shown: list[str] = []
    raw = SOURCES["amazon_ratings"](tmp_path, "shop", ReadOptions(log=shown.append))
    assert len(raw.events.user_E) == 9000
    # Looked at after 2, 4, 6 seconds: then the five are over.
    assert shown[0] == f"{name}: 6,144 lines read (68% of the file)"
