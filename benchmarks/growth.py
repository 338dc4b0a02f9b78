"""How a round of every method of both tracks grows with clients and with items: exponents of seconds, memory, bytes.

    python benchmarks/growth.py [--methods fedmf,fedecider] [--output FILE.md] [--figure FILE.svg]

Three sizes of each axis, the other one fixed, each in a process of its own with one thread. Embedding methods: users of
geometric activity (20 events) over items of Zipf popularity, whole rounds at the settings of the paper. LLM methods:
silos of 64 histories each over one catalogue, a small decoder with adapters of rank 4 on its attention and its table.
Nothing is read from a file, and nobody is ranked. Seconds are CPU seconds: of embedding methods the mean of a run's
first two rounds after a tiny federation, which compiles; where that is less than `ENOUGH_S`, the median of as many
further runs as fit (20 at most). Of LLM methods those of the second round.
An exponent is the slope of a line through the logarithms: 1 is linear; what a size does not touch pulls it towards 0,
caches that become too small push it above. Times below `SHORT_S` say nothing of growth and get none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedecider.running.command import run

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from provenance import heading

CLIENTS, ITEMS = (500, 1_000, 2_000), (600, 1_200, 2_400)
SILOS, CATALOGUE = (6, 12, 24), (500, 1_000, 2_000)
ENOUGH_S, SHORT_S = 1.0, 0.005
STEEP = 1.15
"""Exponents in clients up to this are called linear."""
PAIRS = "the server compares every pair of clients"
REASONS = {
    "fedem": PAIRS,
    "gpfedrec": PAIRS,
    "pfedgraph": PAIRS,
    "fedca": PAIRS,
    "fedecider": "every client trains over the directions of all",
    "lora_sim": PAIRS,
    "fellrec": PAIRS,
}
"""Methods whose papers ask for more than linear work in the number of clients."""


class Point(NamedTuple):
    """One round of one method at one size."""

    clients_s: float
    server_s: float
    megabytes: float
    """Peak resident memory above that before the data were made."""
    bytes_each: float
    """Down and up, mean of the clients."""


def measure_embedding(method: str, clients: int, items: int) -> Point:
    from embedding import Run, synthetic

    Run(method, synthetic(50, 60)).round(1)  # compiles
    before = _resident()
    side = Run(method, synthetic(clients, items))
    runs: list[tuple[float, float]] = []
    while len(runs) < 21 and 2 * sum(map(sum, runs)) < ENOUGH_S:
        side.start()
        first, second = side.round(1), side.round(2)
        runs.append(((first[0] + second[0]) / 2, (first[1] + second[1]) / 2))
    train_s, server_s = (statistics.median(part) for part in zip(*(runs[1:] or runs), strict=True))
    sent = _bytes(side.setup.method, side.setup.blocks, side.server, side.local)
    return Point(train_s, server_s, max(0.0, _peak() - before), sent)


def measure_silos(method: str, silos: int, items: int) -> Point:
    from fedecider.methods import METHODS
    from fedecider.testing.llm_contract import blocks

    before = _resident()
    entry = METHODS[method]
    made = entry.build(_silos(silos, items), entry.config())
    server, local = made.init()
    groups = blocks(silos)
    found = (0.0, 0.0)
    for number in (1, 2):
        uploads, train_s = [], 0.0
        for block in groups:
            started = time.process_time()
            download = made.broadcast(number, server, block.clients)
            own = {name: tensor[block.clients] for name, tensor in local.items() if name not in made.unread}
            upload, new, _ = made.client_update(number, download, own, block)
            for name, rows in new.items():
                local[name][block.clients] = rows
            train_s += time.process_time() - started
            uploads.append(upload)
        started = time.process_time()
        server = made.server_aggregate(number, server, iter(uploads))
        found = (train_s, time.process_time() - started)
    return Point(*found, max(0.0, _peak() - before), _bytes(made, groups, server, local))


def _silos(count: int, items: int) -> Any:
    from fedecider.models.adapters import LoraSettings, attach_lora
    from fedecider.testing.llm_contract import tiny_models
    from idgen.backbones.small_decoder import build_small_decoder
    from idgen.trie import IGNORED_LABEL

    generator = torch.Generator().manual_seed(0)
    table_VD = torch.randn(items + 3, 64, generator=generator)
    model = build_small_decoder(table_VD, num_layers=2, num_heads=2, d_ff=128, max_tokens=16, padding=0)
    data = []
    for _ in range(count):
        item_BS = torch.randint(3, items + 3, (64, 12), generator=generator)
        labels_BS = torch.cat([torch.full((64, 1), IGNORED_LABEL), item_BS[:, 1:]], 1)
        data.append({"input_ids": item_BS, "attention_mask": torch.ones_like(item_BS), "row_labels": labels_BS})
    names = [f"silo{number}" for number in range(count)]
    models = tiny_models(names, data=[{"labels": one["input_ids"]} for one in data])
    adapted: Any = attach_lora(model, LoraSettings(4, ("attention", "table")))
    clients = [
        client._replace(task=own, num_examples=64, batches=partial(_batches, own))
        for client, own in zip(models.clients, data, strict=True)
    ]
    return models._replace(base=models.base._replace(model=adapted), clients=clients)


def _batches(data: dict[str, torch.Tensor], generator: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    order = torch.randperm(64, generator=generator)
    return ({key: tensor[rows] for key, tensor in data.items()} for rows in order.split(32))


def _bytes(method: Any, groups: Any, server: Any, local: Any) -> float:
    """Of the first client: all have the same tensors."""
    from fedecider.federation.wire import measure

    block = groups[0]
    download = method.broadcast(3, server, block.clients)
    own = {name: tensor[block.clients] for name, tensor in local.items() if name not in method.unread}
    upload, _, _ = method.client_update(3, download, own, block)
    traffic = measure(download, upload)[0]
    return float(traffic.bytes_down + traffic.bytes_up)


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def exponent(sizes: tuple[int, ...], values: list[float], least: float = 0.0) -> float:
    """Slope of a line through the logarithms; NaN where a value is not above ``least``."""
    if min(values) <= least:
        return math.nan
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


class Row(NamedTuple):
    """A method with its exponents."""

    method: str
    silos: bool
    base: Point
    by_clients: Point
    by_items: Point


def measured(method: str, silos: bool) -> Row:
    """All sizes of a method, each in a process of its own; the middle of both axes is measured once."""
    clients, items = (SILOS, CATALOGUE) if silos else (CLIENTS, ITEMS)
    points = {pair: _in_process(method, silos, *pair) for pair in [(n, items[1]) for n in clients]}
    points |= {(clients[1], m): _in_process(method, silos, clients[1], m) for m in items if m != items[1]}

    def exponents(axis: tuple[int, ...], pairs: list[tuple[int, int]]) -> Point:
        least = (SHORT_S, SHORT_S, 0.0, 0.0)
        return Point(*(exponent(axis, [points[pair][field] for pair in pairs], least[field]) for field in range(4)))

    by_clients = exponents(clients, [(n, items[1]) for n in clients])
    by_items = exponents(items, [(clients[1], m) for m in items])
    return Row(method, silos, points[clients[1], items[1]], by_clients, by_items)


def _in_process(method: str, silos: bool, clients: int, items: int) -> Point:
    case = json.dumps([method, silos, clients, items])
    done = subprocess.run([sys.executable, __file__, "--case", case], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{method} with {clients} clients and {items} items ended with {done.stderr[-2000:]}")
    return Point(*json.loads(done.stdout.splitlines()[-1]))


def table(rows: list[Row]) -> list[str]:
    """Markdown."""
    lines = [
        "| method | clients s | server s | MB | kB each | clients: training, server, MB, bytes | items: the same | |",
        "|---|---:|---:|---:|---:|---|---|---|",
    ]
    for row in rows:
        steep = max((x for x in row.by_clients[:2] if not math.isnan(x)), default=0.0) > STEEP
        said = REASONS.get(row.method, "**not explained**") if steep else ""
        base = row.base
        lines.append(
            f"| {row.method} | {base.clients_s:.3g} | {base.server_s:.3g} | {base.megabytes:.0f} "
            f"| {base.bytes_each / 1e3:.0f} | {_exponents(row.by_clients)} | {_exponents(row.by_items)} | {said} |"
        )
    return lines


def _exponents(point: Point) -> str:
    return ", ".join("-" if math.isnan(x) else f"{x:.2f}" for x in point)


def figure(rows: list[Row]) -> str:
    """An SVG: a line for each method, a mark for the exponent in clients of its round and one for its memory."""
    left, width, line = 110, 420, 16
    place = lambda x: left + width * min(max(x, 0.0), 2.2) / 2.2  # noqa: E731
    height = line * (len(rows) + 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {height}" font-family="sans-serif" '
        'font-size="11"><title>Growth of a round with the number of clients</title>',
        f'<rect width="100%" height="{height}" fill="white"/>',
    ]
    for tick in (0, 0.5, 1, 1.5, 2):
        dash = "" if tick == 1 else ' stroke-dasharray="2 3"'
        parts.append(
            f'<line x1="{place(tick)}" x2="{place(tick)}" y1="{line}" y2="{height - 2 * line}" stroke="#999"{dash}/>'
            f'<text x="{place(tick)}" y="{height - line}" text-anchor="middle">{tick}</text>'
        )
    for number, row in enumerate(rows):
        y = line * (number + 1.5)
        seconds, server = (0.0 if math.isnan(x) else x for x in row.by_clients[:2])
        box = place(max(seconds, server)) - 4
        parts.append(
            f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{row.method}</text>'
            f'<circle cx="{place(seconds)}" cy="{y}" r="4" fill="#0b5d9e"/>'
            f'<rect x="{box}" y="{y - 4}" width="8" height="8" fill="none" stroke="#b3440b"/>'
        )
    said = "exponent in clients: ● training, □ the larger of training and server"
    parts.append(f'<text x="{left}" y="{height - 2}">{said}</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="all", help="separated by commas")
    parser.add_argument("--output", default="")
    parser.add_argument("--figure", default="")
    parser.add_argument("--case", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case:
        method, silos, clients, items = json.loads(args.case)
        print(json.dumps((measure_silos if silos else measure_embedding)(method, clients, items)))
        return
    from embedding_fr.methods import METHODS as EMBEDDING
    from fedecider.methods import METHODS as LANGUAGE

    asked = [*(name for name in EMBEDDING if not EMBEDDING[name].plug_in)]
    asked += [name for name in LANGUAGE if not LANGUAGE[name].pooled]
    asked = asked if args.methods == "all" else args.methods.split(",")
    rows = []
    for method in asked:
        rows.append(measured(method, method in LANGUAGE))
        print(table(rows)[-1], file=sys.stderr, flush=True)
    lines = ["# How a round grows", "", *heading("growth.py", 1), ""]
    lines += [f"- Embedding methods: {CLIENTS} clients at {ITEMS[1]:,} items, {ITEMS} items at {CLIENTS[1]:,} clients"]
    lines += [f"- LLM methods: {SILOS} silos at {CATALOGUE[1]:,} items, {CATALOGUE} items at {SILOS[1]} silos", ""]
    lines += ["Figures at the middle of both axes, then exponents along each axis; `-`: nothing to measure.", ""]
    lines += table(rows)
    print("\n".join(lines))
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")
    if args.figure:
        Path(args.figure).write_text(figure(rows))


if __name__ == "__main__":
    sys.exit(run(main))
