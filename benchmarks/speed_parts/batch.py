"""Lists for many customers by ``fedecider recommend --all``: rate, memory, and whether `recommend` answers the same.

Customers are drawn: each has a stretch of the history of a real customer of ``--data``.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

SIZES = "10000,100000,1000000"
K, COMPARED = 20, 100


class Cost(NamedTuple):
    cpu_s: float
    peak: float
    """Bytes of the process at most."""


def draw(histories: list[list[str]], size: int, path: Path) -> None:
    """A table of events of ``size`` customers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    schema = pa.schema({"user": pa.string(), "item": pa.string(), "time": pa.int64()})
    with pq.ParquetWriter(path, schema) as file:
        for first in range(0, size, 100_000):
            users, items = [], []
            for user in range(first, min(first + 100_000, size)):
                whole = histories[rng.integers(len(histories))]
                own = whole[: rng.integers(1, len(whole) + 1)]
                users += [f"c{user:07d}"] * len(own)
                items += own
            file.write_table(pa.table([users, items, np.arange(len(users))], schema=schema))


def make_lists(run: str, events: Path, output: Path) -> Cost:
    """The command in a process of its own, and what it cost."""
    words = ["--run", run, "--all", "--events", str(events), "--k", str(K), "--output", str(output)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = (
        "import resource, sys; from fedecider.cli.main import main; code = main(sys.argv[1:]); "
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "recommend", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(cpu_s, 1024.0 * int(done.stdout.split()[-1]))


def check(run: str, events: Path, lists: Path, size: int) -> None:
    """Some of the lists are what `Recommender.recommend` answers."""
    import pyarrow.parquet as pq

    from fedecider.models.lists import histories_of
    from fedecider.models.recommender import Recommender

    rec = Recommender.from_pretrained(run)
    asked = [f"c{user:07d}" for user in np.linspace(0, size - 1, COMPARED).astype(int)]
    found = {row["customer"]: row for row in pq.read_table(lists, filters=[("customer", "in", asked)]).to_pylist()}
    assert pq.read_metadata(lists).num_rows == size
    for customer, history in histories_of(run, rec.domain, events=str(events)).of(asked, rec.domain):
        answer = rec.recommend(history, K)
        assert found[customer]["items"] == [item.key for item in answer], customer
        assert np.allclose(found[customer]["scores"], [item.score for item in answer], atol=1e-4), customer


def part_batch(args: argparse.Namespace) -> str:
    from fedecider.models.lists import histories_of
    from fedecider.models.source import find_source

    source, work = find_source(args.run), Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    company = source.choose(None)
    known = histories_of(args.run, company, args.data)
    histories, lines, costs = [items for _, items in known.of(None, company) if items], [], {}
    for size in map(int, (args.sizes or SIZES).split(",")):
        events, output = work / f"events-{size}.parquet", work / f"lists-{size}.parquet"
        draw(histories, size, events)
        cost = costs[size] = make_lists(args.run, events, output)
        check(args.run, events, output, size)
        lines.append(f"| {size:,} | {cost.cpu_s:.1f} | {cost.peak / 1e9:.2f} | {output.stat().st_size / 1e6:.1f} |")
        print(lines[-1], flush=True)
    (few, first), (many, last) = min(costs.items()), max(costs.items())
    rate = (many - few) / max(last.cpu_s - first.cpu_s, 1e-9)
    return "\n".join(
        [
            f"Lists of {K} out of {len(known.item_keys):,} items to parquet by `fedecider recommend --all`, customers "
            f"drawn from {len(histories):,} histories; model and ensemble, one thread. {COMPARED} lists of each size",
            "were asserted equal to those of `recommend`.",
            "",
            "| lists | CPU s, start and events included | GB at most | MB of lists |",
            "|---:|---:|---:|---:|",
            *lines,
            "",
            *(
                [f"Between the sizes: {rate:,.0f} lists a CPU second, a million in {1e6 / rate / 60:,.0f} CPU minutes."]
                if many > few
                else []
            ),
        ]
    )
