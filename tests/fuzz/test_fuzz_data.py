"""Raw and prepared data: truncated, bit-flipped, of wrong types, huge; names that point elsewhere."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import PATHS, SCALARS, damaged, fixed, told, with_other_value
from hypothesis import given
from hypothesis import strategies as st

from fedecider.data.interactions import InteractionsConfig, load_interactions
from fedecider.data.prepare import PrepareConfig, prepare
from fedecider.data.readers import SOURCES, ReadOptions
from fedecider.data.store import file_sha256, load_domains

REPOSITORY = Path(__file__).resolve().parents[2]
USERS = {f"u{user}": [(user * 3 + step) % 7 for step in range(4)] for user in range(6)}
ITEMS = [{"domain": "games", "item": item, "asin": f"B{item}", "title": f"Title {item}"} for item in range(7)]
RAW = {
    "items.jsonl": "".join(json.dumps(item) + "\n" for item in ITEMS).encode(),
    "interactions.csv": (
        "domain,user,pos,item,rating,timestamp\n"
        + "".join(f"games,{u},{p},{i},4,{100 + p}\n" for u, items in USERS.items() for p, i in enumerate(items))
    ).encode(),
}
TABLE = b"".join(f"{u},i{i},5,{p}\n".encode() for u, items in USERS.items() for p, i in enumerate(items))
AMAZON = b"".join(
    json.dumps({"reviewerID": u, "asin": f"B{i}", "overall": 5.0, "unixReviewTime": 100 + p}).encode() + b"\n"
    for u, items in USERS.items()
    for p, i in enumerate(items)
)
OPTIONS = ReadOptions(max_bad_lines=3)


def write_raw(folder: Path, content=RAW) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in content.items():
        (folder / name).write_bytes(text)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    raw = write_raw(folder / "raw")
    prepare(PrepareConfig(source="packed", raw=str(raw), domains="games", k_core=0, output=str(folder / "data")))
    return folder / "data"


@given(st.sampled_from(sorted(RAW)), st.booleans(), st.data())
@fixed(66)
def test_packed_files(tmp_path, name, zipped, data):
    folder = write_raw(tmp_path / "raw")
    content = gzip.compress(RAW[name]) if zipped else RAW[name]
    (folder / name).write_bytes(data.draw(damaged(content)))
    found = told(lambda: SOURCES["packed"](folder, "games", OPTIONS))
    if found is not None:
        told(lambda: found.read_catalogue({"B1", "B2"}))
        assert len(found.events.user_E) <= 24 * 2


@given(st.sampled_from(["user", "item", "time", "pos", "rating", "domain"]), SCALARS)
@fixed(50)
def test_packed_values(tmp_path, name, value):
    folder = write_raw(tmp_path / "raw")
    item = {**ITEMS[0], "item" if name == "item" else "title": value}
    with (folder / "items.jsonl").open("a") as file:
        file.write(json.dumps(item) + "\n")
    columns = ("domain", "user", "pos", "item", "rating", "time")
    row = dict(zip(columns, ("games", "u1", "9", "1", "4", "7"), strict=True)) | {
        name: str(value) if value != 10**400 else "9" * 400
    }
    with (folder / "interactions.csv").open("ab") as file:
        file.write((",".join(row.values()) + "\n").encode("utf-8", "surrogatepass"))
    found = told(lambda: SOURCES["packed"](folder, "games", OPTIONS))
    if found is not None:
        told(lambda: found.read_catalogue({"B1", "B2"}))


@given(damaged(TABLE))
@fixed(50)
def test_tables_of_ratings(tmp_path, blob):
    (tmp_path / "ratings.dat").write_bytes(blob)
    words = {"dataset": "toy", "source": "amazon_ratings", "raw": str(tmp_path)}
    told(lambda: load_interactions(InteractionsConfig(**words), log=lambda text: None))


@given(damaged(AMAZON))
@fixed(50)
def test_files_of_reviews(tmp_path, blob):
    (tmp_path / "Games_5.json").write_bytes(blob)
    (tmp_path / "meta_Games.json").write_bytes(b"".join(json.dumps(item).encode() + b"\n" for item in ITEMS))
    found = told(lambda: SOURCES["amazon"](tmp_path, "games", OPTIONS))
    if found is not None:
        told(lambda: found.read_catalogue({"B1", "B2"}))


def change(prepared: Path, name: str, content: bytes, work) -> None:
    """``work`` with one prepared file changed, and with a card that knows its checksum."""
    path, card = prepared / "games" / name, prepared / "games" / "card.json"
    before, card_before = path.read_bytes(), card.read_bytes()
    try:
        path.write_bytes(content)
        if name != "card.json":
            values = json.loads(card_before)
            values["tables_sha256"][name] = file_sha256(path)
            card.write_text(json.dumps(values))
        work()
    finally:
        path.write_bytes(before)
        card.write_bytes(card_before)


def load(prepared: Path) -> None:
    found = told(lambda: load_domains(prepared, ["games"]))
    if found is not None:
        domain = found["games"]
        assert all(isinstance(title, str) for title in domain.titles)
        assert all(0 <= item < len(domain.item_keys) for items in domain.clients.sequences for item in items)


@given(st.sampled_from(["items.parquet", "clients.parquet", "public.parquet"]), st.data())
@fixed(66)
def test_damaged_parquet(prepared, name, data):
    content = data.draw(damaged((prepared / "games" / name).read_bytes()))
    change(prepared, name, content, lambda: load(prepared))


@given(st.data())
@fixed(50)
def test_other_cards(prepared, data):
    card = json.loads((prepared / "games" / "card.json").read_text())
    text = json.dumps(data.draw(with_other_value(card)))
    change(prepared, "card.json", text.encode(), lambda: load(prepared))


TYPES = {
    "user": ([1, 2, 3], [None, "a", "b"], [b"\xff", b"a", b"b"], [["a"], ["b"], ["c"]], [1.5, 2.5, 3.5]),
    "items": (
        [1, 2, 3],
        [[None, 1, 2]] * 3,
        [["a", "b", "c"]] * 3,
        [None] * 3,
        [[2**40, 1, 2]] * 3,
        [[0.5, 1.5, 2.5]] * 3,
    ),
    "timestamps": ([[None, 1, 2]] * 3, [None, [1, 2, 3], [1, 2, 3]], [["a", "b", "c"]] * 3, [1, 2, 3]),
}


@pytest.mark.parametrize(("column", "number"), [(name, n) for name, given in TYPES.items() for n in range(len(given))])
def test_columns_of_other_types(prepared, column, number, tmp_path):
    good = {"user": ["a", "b", "c"], "items": [[0, 1, 2]] * 3, "timestamps": [[1, 2, 3]] * 3}
    pq.write_table(pa.table({**good, column: TYPES[column][number]}), tmp_path / "x.parquet")

    def refused() -> None:
        with pytest.raises(ValueError, match=r"outside 0|expected"):
            load_domains(prepared, ["games"])

    change(prepared, "clients.parquet", (tmp_path / "x.parquet").read_bytes(), refused)


def test_a_few_bytes_that_stand_for_a_billion_values(prepared, tmp_path):
    users = pa.DictionaryArray.from_arrays(pa.array([0] * 4_000_000, pa.int8()), ["a"])
    pq.write_table(pa.table({"user": users, "items": users, "timestamps": users}), tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_size < 100_000

    def refused() -> None:
        with pytest.raises(ValueError, match=r"has 12,000,000 values, expected at most"):
            load_domains(prepared, ["games"])

    change(prepared, "clients.parquet", (tmp_path / "x.parquet").read_bytes(), refused)


BOMB = """
import resource, sys
sys.path[:0] = [{repository!r}]
from pathlib import Path
from fedecider.data.readers import SOURCES, ReadOptions
resource.setrlimit(resource.RLIMIT_AS, (int(open("/proc/self/statm").read().split()[0]) * 4096 + (1 << 30),) * 2)
try:
    SOURCES["packed"](Path({folder!r}), "games", ReadOptions())
except ValueError as error:
    print(error)
"""


def test_a_line_of_a_gigabyte_in_a_megabyte(tmp_path):
    folder = write_raw(tmp_path / "raw")
    with gzip.open(folder / "interactions.csv.gz", "wb", compresslevel=1) as file:
        for _ in range(1600):
            file.write(b"a" * (1 << 20))
    (folder / "interactions.csv").unlink()
    program = BOMB.format(repository=str(REPOSITORY), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert "line 1 has more than 16,777,216 bytes" in done.stdout, done.stderr[-1000:]


@pytest.mark.parametrize("name", PATHS)
def test_names_that_point_elsewhere_write_nothing(name, tmp_path, monkeypatch):
    raw = write_raw(tmp_path / "inner" / "raw") if (tmp_path / "inner").mkdir() is None else tmp_path
    items = [{**item, "domain": name} for item in ITEMS]
    (raw / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (raw / "interactions.csv").write_bytes(
        RAW["interactions.csv"].replace(b"games", name.encode("utf-8", "surrogatepass").replace(b"\n", b" "))
    )
    before = set(tmp_path.rglob("*"))
    target = tmp_path / "inner" / "out"

    def work() -> None:
        prepare(PrepareConfig(source="packed", raw=str(raw), domains=name, k_core=0, output=str(target)))

    told(work)
    assert all(target in path.parents or path == target for path in set(tmp_path.rglob("*")) - before)


def test_a_domain_that_is_a_link_is_read_and_never_written_through(prepared, tmp_path):
    """Preparing again replaces the link, not what it leads to."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "games").symlink_to(prepared / "games")
    assert load_domains(tmp_path / "out")["games"].titles
    before = {path.name: path.read_bytes() for path in (prepared / "games").iterdir()}
    raw = write_raw(tmp_path / "raw")
    prepare(
        PrepareConfig(source="packed", raw=str(raw), domains="games", k_core=0, seed=1, output=str(tmp_path / "out"))
    )
    assert not (tmp_path / "out" / "games").is_symlink()
    assert {path.name: path.read_bytes() for path in (prepared / "games").iterdir()} == before
