"""What a run costs: each part asserts equal results first, then times. One page, one section a part.

    python benchmarks/speed.py --parts start,processes,tests --base CHECKOUT
    python benchmarks/speed.py --parts results --base CHECKOUT --data data/toys --base_data data/old_toys
    python benchmarks/speed.py --parts texts,sampled --data data --work runs/speed
    python benchmarks/speed.py --parts two_shops,million --work runs/speed
    python benchmarks/speed.py --parts batch --run RUN --data data --work runs/speed
    python benchmarks/speed.py --parts rectools --data data --work runs/speed --peer PYTHON_WITH_RECTOOLS

``CHECKOUT`` is one of 29f5bd6, run as a process of its own. Data are prepared by the tree that reads them
(``scripts/prepare_data.py``), 300 public users, all others clients.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from provenance import heading

from fedecider.running.command import run

PAGE = Path(__file__).with_name("results") / "speed.md"
TITLE = "# Speed"
PARTS = {
    "results": "Full Toys against 29f5bd6",
    "texts": "Far texts by their mean",
    "sampled": "Sampled softmax",
    "two_shops": "Two shops of 98,000 customers",
    "million": "A million customers on one machine",
    "batch": "A million lists",
    "rectools": "Beside RecTools' SASRec",
    "decode": "Decoding with a trie",
    "start": "Start, and the stages of the demo",
    "processes": "Several processes",
    "tests": "Tests",
}
MODULES = {"two_shops": "sampled", "processes": "start"}
"""Where a part is not in a module of its own name."""


def part_of(name: str) -> Callable[[argparse.Namespace], str]:
    """What makes the section of a part."""
    found: Callable[[argparse.Namespace], str] = getattr(
        import_module(f"speed_parts.{MODULES.get(name, name)}"), f"part_{name}"
    )
    return found


def put_section(page: Path, title: str, body: str) -> None:
    """Replace the section of this heading, or add it behind the others."""
    text = page.read_text() if page.is_file() else f"{TITLE}\n"
    section = f"## {title}\n\n{body}\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    found = pattern.search(text)
    text = text[: found.start()] + section + "\n" + text[found.end() :] if found else f"{text.rstrip()}\n\n{section}"
    page.write_text(text.rstrip() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help=f"separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--base", default="", help="a checkout of the commit that is compared with")
    parser.add_argument("--data", default="data", help="results, sampled, batch, rectools, decode: prepared data")
    parser.add_argument("--base_data", default="", help="results: the same data, prepared by the checkout")
    parser.add_argument("--domain", default="toys", help="results")
    parser.add_argument("--turns", type=int, default=1, help="results: of both sides")
    parser.add_argument("--work", default="runs/speed", help="what was found is kept there, and not run again")
    parser.add_argument("--jobs", type=int, default=1, help="sampled: trainings at a time")
    parser.add_argument("--sizes", default="", help="million, batch: numbers of customers")
    parser.add_argument("--run", default="", help="batch: the run folder that is asked")
    parser.add_argument("--stage", default="", help="million: run this stage of one size here")
    parser.add_argument("--local_epochs", type=int, default=10, help="processes: of every round")
    parser.add_argument("--peer", default="", help="rectools: a Python that has rectools[torch]")
    parser.add_argument("--sides", default="ours,sampled,full", help="rectools: those that are not there yet are run")
    parser.add_argument("--vectors", default="", help="rectools: a cache with text vectors of Beauty")
    parser.add_argument("--text_seconds", type=float, default=170, help="rectools: CPU seconds of these vectors")
    parser.add_argument("--suites", default="fast,test", help="tests: fast, test, ci")
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    if args.stage:
        run_stage = import_module("speed_parts.million").run_stage
        run_stage(Path(args.work), int(args.sizes), args.stage)
        return
    parts = [part for part in args.parts.split(",") if part]
    if not parts or not set(parts) <= set(PARTS):
        raise ValueError(f"got parts {args.parts!r}, expected some of {', '.join(PARTS)}")
    for part in parts:
        body = part_of(part)(args)
        put_section(args.output, PARTS[part], "\n".join([*heading("speed.py", 1), "", body]))
        print(body)


if __name__ == "__main__":
    sys.exit(run(main))
