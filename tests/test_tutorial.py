"""docs/start.md, docs/leak.md and "The whole way" of docs/README.md: their blocks are run, in order, in own folders."""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from fedecider.cli.main import COMMANDS
from fedecider.cli.main import main as command
from fedecider.data.sample import sample_domains

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^## (?P<heading>[^\n]*)$|^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.S | re.M)
SHORT = "--num_rounds 1 --local_epochs 1 --num_threads 1 --num_eval_users 20 --pretrain.train.max_steps 20"
"""What makes a run short; later options win."""


class Block(NamedTuple):
    heading: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """What can be run, in order; ```text blocks are what it prints."""
    found, heading = [], ""
    for match in BLOCK.finditer((REPOSITORY / "docs" / page).read_text(encoding="utf-8")):
        heading = match["heading"] or heading
        if match["language"] not in (None, "text"):
            found.append(Block(heading, match["language"], match["text"]))
    return found


def run(block: Block, scope: dict[str, Any]) -> str:
    """What the block prints; commands have to end with 0."""
    with redirect_stdout(StringIO()) as printed:
        if block.language == "python":
            exec(compile(block.text, block.heading, "exec"), scope)
        else:
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.startswith("#"):
                    continue
                name, *words = shlex.split(line, comments=True)
                assert name == "fedecider", line
                more = shlex.split(SHORT) if words[0] == "federate" else []
                assert command([*words, *more]) == 0, line
    return printed.getvalue()


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    here, words = Path.cwd(), sys.argv
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
        sys.argv = words


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    """The folder in which sections 1 to 6 were run, their names, and what the blocks printed: section -> texts."""
    folder, printed, scope = tmp_path_factory.mktemp("tutorial"), {}, {}
    with inside(folder):
        for block in blocks("start.md"):
            if int(block.heading[0]) <= 6:
                printed.setdefault(block.heading[0], []).append(run(block, scope))
    return folder, scope, printed


def test_the_tutorial_goes_from_tables_to_recommendations(tutorial):
    folder, _, printed = tutorial
    assert sorted(printed) == ["1", "2", "3", "4", "5", "6"]
    shown = outputs("start.md")
    assert "".join((folder / "orders.csv").read_text().splitlines(keepends=True)[:3]) in shown
    assert printed["2"][0] in shown  # the data are not shortened
    assert re.search(r"memoriser +0\.\d{3} \[", printed["4"][0])
    assert printed["4"][1].count("fedecider + ensemble") == 2
    assert "crime-" in printed["6"][0]
    assert (folder / "runs/shop/report.html").is_file()


def test_the_tutorial_recommends_from_python(tutorial):
    folder, scope, printed = tutorial
    with inside(folder):
        (said,) = [run(block, scope) for block in blocks("start.md") if block.heading.startswith("7.")]
    lines = said.splitlines()
    assert len(lines) == 3
    assert all(line.split()[1] in printed["6"][0] for line in lines)


@pytest.mark.skipif("serve" not in COMMANDS, reason="this version has no fedecider serve")
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_the_tutorial_serves(tutorial):
    folder, scope, printed = tutorial
    start, ask = [block for block in blocks("start.md") if block.heading.startswith("8.")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = shlex.split(start.text.replace("8000", port))[1:]
    served = subprocess.Popen([sys.executable, "-m", "fedecider.cli.main", *words], cwd=folder)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", served)
        said = run(ask._replace(text=ask.text.replace("8000", port)), scope)
    finally:
        served.terminate()
        served.wait(30)
    assert len(said.splitlines()) == 3
    assert all(line.split()[1] in printed["6"][0] for line in said.splitlines())


def shops(folder: Path) -> None:
    """Two shops that sell the same items, their products, next month's purchases of one, and the secret of both."""
    domain = sample_domains(["crime"])["crime"]
    lines: dict[str, list[str]] = {"north": [], "south": [], "february": []}
    for number, (user, items) in enumerate(zip(domain.clients.users, domain.clients.sequences, strict=True)):
        shop = ("north", "south")[number % 2]
        for place, item in enumerate(items):
            late = shop == "north" and place == len(items) - 1 and len(items) > 4
            day = f"2026-{2 if late else 1:02}-{place + 1:02}"
            lines["february" if late else shop].append(f"{user},{domain.item_keys[item]},{day}")
    for name, found in lines.items():
        (folder / f"{name}.csv").write_text("\n".join(["customer,sku,bought_at", *found]) + "\n")
    rows = zip(domain.item_keys, domain.titles, domain.item_texts, strict=True)
    products = [f'{key},"{title}","{text}"' for key, title, text in rows]
    (folder / "products.csv").write_text("\n".join(["sku,title,description", *products]) + "\n")
    (folder / "secret.txt").write_text("0123456789abcdef" * 2)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_whole_way_goes_from_own_tables_to_the_next_month(tmp_path):
    shops(tmp_path)
    with inside(tmp_path):
        other = shlex.split("import south.csv --items products.csv --company south --output other")
        marks = shlex.split("overlap --data other --secret_file secret.txt --output south.json")
        assert [command(other), command(marks)] == [0, 0]  # what the other shop does by itself
        (whole,) = [block for block in blocks("README.md") if block.heading == "The whole way"]
        said = run(whole, {})
    assert said.index("100 % of its items") < said.index("Gain: ") < said.index("version 2 of")
    assert (tmp_path / "lists.csv").is_file()


def leaderboard(heading: str, folder: Path) -> str:
    """The table that the blocks of docs/leak.md below this heading write."""
    scope: dict[str, Any] = {}
    with inside(folder):
        for block in blocks("leak.md"):
            if block.heading == heading:
                run(block, scope)
    (table,) = folder.glob("runs/*/leaderboard.md")
    return table.read_text(encoding="utf-8")


def test_the_leak_is_there_under_paper_and_gone_under_strict(tmp_path):
    table = leaderboard("See it", tmp_path)
    strict, paper = table.split("## Protocol ")[1:]
    assert found(strict, "memoriser") < 0.2 < found(strict, "popularity")
    assert found(paper, "memoriser") > 0.95
    shown = table[table.index("## Protocol") : table.index("## What was compared")].strip()
    assert shown in outputs("leak.md")


@pytest.mark.slow
@pytest.mark.data
def test_the_leak_on_movielens_is_what_the_page_says(tmp_path, data_root, monkeypatch):
    monkeypatch.setenv("FEDECIDER_DATA", str(data_root))
    strict, paper = leaderboard("See it on ML-100K", tmp_path).split("## Protocol ")[1:]
    page = (REPOSITORY / "docs" / "leak.md").read_text(encoding="utf-8")
    for row in ("memoriser", "popularity"):
        cells = re.search(rf"^\| {row} \| ([\d.]+) / [\d.]+ \| \**([\d.]+)", page, re.M)
        assert [found(strict, row), found(paper, row)] == [float(cell) for cell in cells.groups()]


def outputs(page: str) -> str:
    """What the page says that its blocks print."""
    return "\n".join(re.findall(r"^```text\n(.*?)^```$", (REPOSITORY / "docs" / page).read_text("utf-8"), re.S | re.M))


def found(table: str, row: str) -> float:
    """hit@10 of a row of the leaderboard."""
    return round(float(re.search(rf"^\| {row} \| \w+ \| [^|]+ \| \**(\d\.\d+)", table, re.M)[1]), 3)


def _wait_for(address: str, process: subprocess.Popen) -> None:
    for _ in range(120):
        assert process.poll() is None, "the service has stopped"
        try:
            urlopen(address).close()
            return
        except URLError:
            time.sleep(0.5)
    raise TimeoutError(address)
