"""300 seeded inputs of people in a hurry: recommend, import and the service answer or say in a line why not."""

from __future__ import annotations

import itertools
import json
import random
import shutil

import pytest
from fastapi.testclient import TestClient

import fedecider
from fedecider.cli.main import main
from fedecider.serve.app import create_app
from fedecider.serve.config import Limits, ServeConfig
from fedecider.serve.metrics import Metrics
from fedecider.serve.run import load_recommenders
from fedecider.serve.service import Service

pytestmark = [pytest.mark.whole, pytest.mark.slow]

ODD = [
    "",
    " ",
    "nan",
    "NaN",
    "-1",
    "0",
    "1e400",
    "9" * 30,
    "x\0y",
    "\ud800",
    "🦊",
    "a | b",
    "../..",
    "{}",
    "null",
    "a" * 4000,
]
KEYS = ["crime-0001", "crime-0007", "comics-0001", "nobody", "CRIME-0001", "crime-1"]
VALUES = [
    None,
    True,
    -1,
    0,
    3,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "crime-0001",
    "x",
    [],
    {},
    [[1]],
    ["", 7],
    {"a": 1},
]


@pytest.fixture(scope="module")
def run(two_clients_run):
    return two_clients_run / "runs" / "whole"


def told(capsys, words):
    """The exit code of a command is 0 or 2, and what it says in the second case is a line."""
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert code in (0, 2), (words, code, said.err)
    assert "Traceback" not in said.err + said.out, words
    assert code == 0 or len(said.err.strip()) > 10, words
    return code, said


def recommend_words(draw, run, tmp_path):
    """A right command with one or two things in it that are not."""
    options = {"run": str(run), "domain": "crime", "history": " | ".join(draw.sample(KEYS[:2], 2)), "k": "3"}
    for _ in range(draw.choice([1, 1, 1, 2])):
        name = draw.choice(["run", "domain", "company", "history", "k", "similar", "customers", "exclude", "stock"])
        name = draw.choice(
            [name, "candidates", "new_items", "unknown", "device", "data", "events", "output", "all", "json"]
        )
        options[name] = draw.choice([*ODD, *KEYS, str(tmp_path), str(run), str(tmp_path / "orders.csv"), "true"])
        if draw.random() < 0.3:  # what may be right there
            right = {"exclude": "crime-0003", "k": "999999", "customers": "u", "similar": KEYS[0], "json": "true"}
            name = draw.choice(sorted(right))
            options[name] = right[name]
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def test_a_hundred_commands_of_recommend(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orders.csv").write_text("user,item\nu,crime-0001\nu,crime-0002\nv,zzz\n")
    draw, codes = random.Random(1), []
    for _ in range(100):
        words = recommend_words(draw, run, tmp_path)
        code, said = told(capsys, ["recommend", *words])
        codes.append(code)
        if code == 0 and "--json" in words and words[words.index("--json") + 1] == "true" and "--output" not in words:
            for line in said.out.splitlines():
                json.loads(line)
    assert 5 <= codes.count(0) <= 95


GOOD = "user,item,time\n" + "".join(
    f"u{u},i{(u + n) % 7},{1600000000 + 86400 * n}\n" for u in range(8) for n in range(5)
)
ITEMS = "item,title\n" + "".join(f"i{n},Thing {n}\n" for n in range(7))


def damaged_table(draw, text):
    """A table as files arrive: cut off, of another encoding, with other fields, without a header, empty, no text."""
    lines = text.splitlines()
    how = draw.randrange(14)
    if how < 5:
        place = draw.randrange(len(lines))
        field = draw.choice([*ODD, '"', "a,b,c,d,e,f", "2020-13-45", "i1", "\r", "\x1a"])
        lines[place] = ",".join(draw.sample([*lines[place].split(","), field], len(lines[place].split(","))))
    elif how == 5:
        lines = lines[1:]
    elif how == 6:
        lines[0] = draw.choice(["", "user", "user,user,item", "a,b,c", ",,", lines[0].upper(), "\ufeff" + lines[0]])
    elif how == 7:
        lines = [line.replace(",", draw.choice([";", "\t", "|", " "])) for line in lines]
    elif how == 8:
        lines = [line for one in lines for line in (one, "")]
    joined = "\n".join(lines) + "\n"
    if how == 9:
        return joined.encode("utf-16")
    if how == 10:
        return joined.encode()[: draw.randrange(1, len(joined))] + bytes([draw.randrange(256) for _ in range(3)])
    if how == 11:
        return b""
    if how == 12:
        return draw.randbytes(200)
    return joined.encode("utf-8", "surrogatepass")


def test_a_hundred_imports(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw, codes = random.Random(2), []
    for number in range(100):
        events, items = (
            f"orders{number}.{draw.choice([*['csv'] * 7, 'tsv', 'jsonl', 'parquet', 'csv.gz'])}",
            "items.csv",
        )
        (tmp_path / events).write_bytes(damaged_table(draw, GOOD) if draw.random() < 0.5 else GOOD.encode())
        (tmp_path / items).write_bytes(damaged_table(draw, ITEMS) if draw.random() < 0.2 else ITEMS.encode())
        company = draw.choice([*["shop"] * 12, "../x", "", "a,b", "🦊"])
        words = [events, "--items", items, "--company", company]
        for _ in range(draw.choice([0, 0, 1, 2])):
            name = draw.choice(["user", "time", "delimiter", "encoding", "time_format", "header", "public", "k_core"])
            name = draw.choice([name, "min_length", "bad_rows", "texts", "min_rating", "keep_split", "seed", "quoting"])
            words += [
                f"--{name}",
                draw.choice([*ODD, "user", "latin-1", "0.2", "3", "skip", "title=title", "%d/%m/%Y"]),
            ]
        code, _ = told(capsys, ["import", *words, "--output", f"data{number}"])
        codes.append(code)
        written = tmp_path / f"data{number}"
        assert written.exists() == (code == 0) or "--dry_run" in words, words
        if code == 0:
            fedecider.open_prepared(written)
            shutil.rmtree(written)
    assert 10 < codes.count(0) < 90


def requests(draw):
    """Method, path and content of a request that is nearly right."""
    right = {
        "k": 7,
        "repeats": "only",
        "exclude": KEYS[:1],
        "candidates": KEYS,
        "stock": {KEYS[1]: 1.5, KEYS[3]: -2},
    }
    body = {"domain": "crime", "history": [draw.choice(KEYS[:2])], "k": 3}
    for _ in range(draw.choice([1, 1, 2])):
        name = draw.choice(["domain", "history", "k", "repeats", "exclude", "candidates", "stock", "more"])
        if name in right and draw.random() < 0.6:
            body[name] = right[name]
        else:
            wrong = [draw.choice(KEYS), {"crime-0001": draw.choice(VALUES)}, [draw.choice(KEYS)] * 3]
            body[name] = draw.choice([*VALUES, *wrong])
    kind = draw.randrange(6)
    if kind == 0:
        content = draw.choice([b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"k": NaN}', json.dumps(body).encode()[:-5]])
        return "POST", draw.choice(["/recommend", "/items"]), content
    if kind == 1:
        new = {name: draw.choice(VALUES) for name in draw.sample(["key", "title", "text", "price"], 3)}
        return "POST", "/items", json.dumps({"domain": "crime", "items": draw.choice([[new], new, [], None])}).encode()
    if kind == 2:
        asked = "&".join(
            f"{name}={draw.choice(['crime', 'x', '-1', '', '%00', 'crime-0001', '1e9'])}"
            for name in ("domain", "item", "k")
        )
        return "GET", f"/similar?{asked}", b""
    if kind == 3:
        return (
            draw.choice(["GET", "PUT", "DELETE"]),
            draw.choice(["/items?limit=x", "/items", "/recommend", "/%2e%2e/x", "/nothing"]),
            b"",
        )
    return "POST", "/recommend", json.dumps(body).encode()


ROOM = {
    "update": {"events": "new.csv", "company": "crime", "force": "true"},
    "forget": {"customer": "u"},
    "overlap": {"files": "a.json,b.json"},
    "without": {"company": "crime"},
}
MORE = ["version", "new_items", "output", "data", "device", "company", "events", "customer", "files", "secret_file"]


def test_a_hundred_commands_that_change_or_compare(run, tmp_path, capsys, monkeypatch):
    """A run that a command refused is as it was, but for the lock."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "orders.csv").write_text("user,item\nu,crime-0001\nu,crime-0002\nv,zzz\n")
    own = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "figures"))
    draw, codes = random.Random(3), []

    def content():
        return {str(path): path.stat().st_mtime_ns for path in own.rglob("*") if path.name != ".lock"}

    for _ in range(100):
        name = draw.choice(sorted(ROOM))
        (tmp_path / "new.csv").write_bytes(damaged_table(draw, GOOD.replace(",i", ",crime-000")))
        options = {"run": str(own), **ROOM[name]} if name != "overlap" else dict(ROOM[name])
        for _ in range(draw.choice([1, 2])):
            options[draw.choice([*MORE, *options])] = draw.choice([*ODD, *KEYS, str(tmp_path), "orders.csv", "2", "u"])
        before = content()
        code, _ = told(capsys, [name, *(word for pair in options.items() for word in (f"--{pair[0]}", pair[1]))])
        codes.append(code)
        assert code == 0 or content() == before, (name, options)
    assert codes.count(2) >= 50


def test_a_hundred_requests(run):
    service = Service(load_recommenders(ServeConfig(run=str(run))), Limits(), Metrics())
    draw, statuses = random.Random(3), []
    with TestClient(create_app(service, Metrics()), base_url="http://127.0.0.1") as client:
        for _ in range(100):
            method, path, content = requests(draw)
            answer = client.request(method, path, content=content, headers={"content-type": "application/json"})
            statuses.append(answer.status_code)
            assert answer.status_code in (200, 404, 405, 422), (path, content, answer.text)
            assert "Traceback" not in answer.text
            if answer.status_code != 200:
                (detail,) = answer.json().values()
                assert 10 < len(detail) < 700, (path, content, detail)
                assert "\n" not in detail
        assert client.get("/health").status_code == 200
    assert 10 < statuses.count(200) < 90


def test_whatever_python_hands_over_is_an_answer_or_a_value_error(run):
    rec, codes = fedecider.Recommender.from_pretrained(run, "crime"), []
    odd = [*VALUES, *KEYS, b"crime-0001", ["crime-0001", None], ("crime-0001",), {"crime-0001"}]
    for history, k in itertools.product(odd, (3, 0, True, None, 10**9)):
        try:
            rec.recommend(history, k)
            codes.append(0)
        except ValueError:
            codes.append(2)
    for value in odd:
        for name in ("exclude", "candidates", "stock"):
            try:
                rec.recommend(["crime-0001"], 2, **{name: value})
            except ValueError:
                codes.append(2)
        try:
            rec.similar(value, 2)
        except ValueError:
            codes.append(2)
    assert codes.count(0) >= 3
