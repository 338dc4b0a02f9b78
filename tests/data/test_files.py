"""Files that are not what a reader expects are refused by name, in one message; large ones tell how far they are."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile

import pytest

from fedecider.data.interactions import InteractionsConfig, load_interactions
from fedecider.data.readers import SOURCES, ReadOptions, reading
from fedecider.data.readers.reading import RawFile, find_optional

TEXT = "user,item\n" + "".join(f"u{u},{i}\n" for u in range(3) for i in range(4))


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("shop.csv", content)
    return buffer.getvalue()


def load(folder):
    return load_interactions(InteractionsConfig("shop", "csv", str(folder)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TEXT.encode("utf-16"), "is UTF-16 text; expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8 shop.csv"),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), "is UTF-16 text"),
        (gzip.compress(TEXT.encode("utf-16")), "is UTF-16 text"),
        (TEXT.encode("utf-16-le"), "is no text, or UTF-16"),
        (bytes(100), "is no text, or UTF-16"),
        (zipped(TEXT.encode()), "is a zip archive; expected text, plain or gzip. Unpack it first."),
        (bz2.compress(TEXT.encode()), "is a bzip2 file"),
        (lzma.compress(TEXT.encode()), "is an xz file"),
        (gzip.compress(gzip.compress(TEXT.encode())), "is compressed with gzip twice"),
        (gzip.compress(TEXT.encode())[:-9], "is a truncated gzip file"),
        (gzip.compress(TEXT.encode())[:5], "is a truncated gzip file"),
        (gzip.compress(TEXT.encode())[:-8] + bytes(8), "is a damaged gzip file"),
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\xef\xbb\xbf\n \n", "is empty"),
    ],
    ids=range(15),
)
def test_refused_with_the_name_of_the_file(tmp_path, content, words):
    (tmp_path / "shop.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"shop\.csv is ") as caught:
        load(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [TEXT.encode(), b"\xef\xbb\xbf" + TEXT.encode(), gzip.compress(TEXT.encode())],
    ids=["plain", "mark", "gzip"],  # a name made of the bytes would hold the time of the compression
)
def test_utf_8_with_or_without_a_mark(tmp_path, content):
    (tmp_path / "shop.csv").write_bytes(content)
    assert load(tmp_path).users == ["u0", "u1", "u2"]


def test_a_header_that_names_a_column_twice(write, tmp_path):
    write("shop.csv", ["user,item,item,", "a,1,9,"])
    with pytest.raises(
        ValueError, match=r"shop\.csv: header .* has more than one column \['item'\]; expected each name"
    ):
        load(tmp_path)
    # Columns without a name are nobody's; many tools write them.
    write("shop.csv", ["user,item,,", *(f"{user},{item},7,8" for user in "ab" for item in (1, 2, 3))])
    assert load(tmp_path).item_keys == ["1", "2", "3"]


def test_folders_in_the_place_of_files(tmp_path):
    (tmp_path / "shop.csv").mkdir()
    with pytest.raises(ValueError, match=r"shop\.csv is a folder; expected a file"):
        load(tmp_path)
    (tmp_path / "shop.csv.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert load(tmp_path).num_users == 3
    (tmp_path / "Valid.txt").mkdir()
    with pytest.raises(ValueError, match=r"Valid\.txt is a folder"):
        find_optional(tmp_path, ["valid.txt"])
    with pytest.raises(ValueError, match=r"raw folder .*shop\.csv\.gz is a file; expected the folder with"):
        SOURCES["csv"](tmp_path / "shop.csv.gz", "shop", ReadOptions())


@pytest.mark.parametrize("name", ["large.txt", "large.txt.gz"])
def test_reading_tells_how_far_it_is(write, monkeypatch, name):
    path = write(name, [f"line {number}" for number in range(3 * reading._LOOK_EVERY)])
    clock = iter(range(0, 100, 4))
    monkeypatch.setattr(reading.time, "monotonic", lambda: next(clock))
    told: list[str] = []
    assert sum(1 for _ in RawFile(path, 0, told.append).lines()) == 3 * reading._LOOK_EVERY
    # Looked at 4, 8 and 12 seconds: after 8 the five seconds are over.
    assert len(told) == 1
    assert told[0].startswith(f"{name}: 32,768 lines read (")
    share = int(told[0].split("(")[1].split("%")[0])
    assert 60 <= share <= (75 if name == "large.txt" else 100)
