"""A large Goodreads file in little memory: `pytest -m slow tests/data/test_streaming.py -s` prints the figures."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys

import pytest

NUM_EVENTS = 1_300_000
NUM_USERS = 40_000
NUM_BOOKS = 12_000

READ = """
import json, resource, sys, time
from fedecider.data.prepare import PrepareConfig, prepare_domains
def mebibytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, started = mebibytes(), time.perf_counter()
config = PrepareConfig("goodreads", sys.argv[1], "comics", k_core=5, users_per_domain=5000,
                       public_interactions_per_domain=3000)
domain = prepare_domains(config)["comics"]
print(json.dumps({"seconds": time.perf_counter() - started, "before": before, "peak": mebibytes(),
                  "clients": len(domain.clients.users), "raw": domain.card["raw"]["events"]}))
"""


def write_goodreads(folder):
    rng = random.Random(5)
    users = [f"{rng.getrandbits(128):032x}" for _ in range(NUM_USERS)]
    with gzip.open(folder / "goodreads_interactions_comics_graphic.json.gz", "wt", compresslevel=1) as file:
        for number in range(NUM_EVENTS):
            # The review id is what makes the real files hard to compress.
            file.write(
                f'{{"user_id": "{users[int(rng.random() ** 2 * NUM_USERS)]}", '
                f'"book_id": "{int(rng.random() ** 3 * NUM_BOOKS)}", "review_id": "{rng.getrandbits(128):032x}", '
                f'"is_read": {"false" if number % 2 else "true"}, "rating": {0 if number % 2 else 4}, '
                '"review_text_incomplete": "", '
                f'"date_added": "Sat Nov {1 + number % 30:02d} {number % 24:02d}:18:37 -0800 2013", '
                '"date_updated": "Tue Dec 10 12:01:07 -0800 2013", "read_at": "", "started_at": ""}\n'
            )
    with gzip.open(folder / "goodreads_books_comics_graphic.json.gz", "wt") as file:
        for book in range(NUM_BOOKS):
            file.write(json.dumps({"book_id": str(book), "title": f"Book {book}", "description": "words " * 40}) + "\n")


@pytest.mark.slow
def test_two_gigabytes_would_fit_in_one(tmp_path):
    write_goodreads(tmp_path)
    size = (tmp_path / "goodreads_interactions_comics_graphic.json.gz").stat().st_size / 2**20
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert figures["clients"] == 5000
    assert figures["raw"] == NUM_EVENTS // 2
    grown = figures["peak"] - figures["before"]
    per_megabyte = grown / size
    print(
        f"\n{size:.0f} MiB gzip, {NUM_EVENTS:,} lines: {NUM_EVENTS / figures['seconds']:,.0f} lines/s, "
        f"peak {figures['peak']:.0f} MiB, grown by {grown:.0f} MiB ({per_megabyte:.2f} MiB a MiB of gzip)"
    )
    # Linear in the file: 2 GiB of gzip stay under 1 GiB, imports included.
    assert figures["before"] + 2048 * per_megabyte < 1024
