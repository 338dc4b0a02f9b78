"""A large Goodreads file in little memory: `pytest -m slow tests/data/test_streaming.py -s` prints the figures."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

NUM_EVENTS = 5_760_000
"""Three times as many as in the small file: DuckDB's peak varies by some tens of MiB."""
EVENTS_A_USER = 32
NUM_BOOKS = 12_000

READ = """
import json, re, sys, time
from fedecider.data.prepare import PrepareConfig, prepare_domains
def peak():  # not ru_maxrss, which starts from that of the parent process
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) / 1024
before, started = peak(), time.process_time()
config = PrepareConfig("goodreads", sys.argv[1], "comics", k_core=5, users_per_domain=5000,
                       public_interactions_per_domain=3000)
domain = prepare_domains(config)["comics"]
print(json.dumps({"seconds": time.process_time() - started, "before": before, "peak": peak(),
                  "clients": len(domain.clients.users), "raw": domain.card["raw"]["events"]}))
"""


def write_goodreads(folder, num_events):
    rng = random.Random(5)
    num_users = num_events // EVENTS_A_USER
    users = [f"{rng.getrandbits(128):032x}" for _ in range(num_users)]
    folder.mkdir()
    with gzip.open(folder / "goodreads_interactions_comics_graphic.json.gz", "wt", compresslevel=1) as file:
        for number in range(num_events):
            # The review id is what makes the real files hard to compress.
            file.write(
                f'{{"user_id": "{users[int(rng.random() ** 2 * num_users)]}", '
                f'"book_id": "{int(rng.random() ** 3 * NUM_BOOKS)}", "review_id": "{rng.getrandbits(128):032x}", '
                f'"is_read": {"false" if number % 2 else "true"}, "rating": {0 if number % 2 else 4}, '
                '"review_text_incomplete": "", '
                f'"date_added": "Sat Nov {1 + number % 30:02d} {number % 24:02d}:18:37 -0800 2013", '
                '"date_updated": "Tue Dec 10 12:01:07 -0800 2013", "read_at": "", "started_at": ""}\n'
            )
    with gzip.open(folder / "goodreads_books_comics_graphic.json.gz", "wt") as file:
        for book in range(NUM_BOOKS):
            file.write(json.dumps({"book_id": str(book), "title": f"Book {book}", "description": "words " * 40}) + "\n")
    return (folder / "goodreads_interactions_comics_graphic.json.gz").stat().st_size / 2**20


def measure(folder):
    done = subprocess.run([sys.executable, "-c", READ, str(folder)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_two_gigabytes_fit_in_one(tmp_path):
    sizes = [write_goodreads(tmp_path / name, n) for name, n in (("small", NUM_EVENTS // 3), ("large", NUM_EVENTS))]
    small, large = (measure(tmp_path / name) for name in ("small", "large"))
    assert large["clients"] == 5000
    assert large["raw"] == NUM_EVENTS // 2
    per_mebibyte = (large["peak"] - small["peak"]) / (sizes[1] - sizes[0])
    at_two_gibibytes = large["peak"] + (2048 - sizes[1]) * per_mebibyte
    print(
        f"\n{sizes[1]:.0f} MiB gzip, {NUM_EVENTS:,} lines: {NUM_EVENTS / large['seconds']:,.0f} lines per CPU second, "
        f"peak {large['peak']:.0f} MiB of which {large['before']:.0f} are imports, {per_mebibyte:.2f} MiB more a MiB "
        f"of gzip: {at_two_gibibytes:.0f} MiB for 2 GiB"
    )
    assert per_mebibyte > 0.05  # else nothing was measured
    assert at_two_gibibytes < 1024
