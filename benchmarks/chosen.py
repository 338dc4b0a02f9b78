"""What `fedecider federate` chooses for own tables, why, and how long it takes against its estimate.

    python benchmarks/chosen.py --raw <amazon2018-d3> --work <folder> [--stages S1,S2] [--output FILE]

Two tables, without any setting: 3 x 1,500 customers of video games, dealt to three companies with one catalogue; and
three departments of 500 customers each without a common item. CPU seconds, since other programs may be at work.
``--stages``: seconds of stages that an interrupted run left in the cache of each case, which are added.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from provenance import heading, write_lines

import fedecider as fd
from fedecider.running.command import run

COMPANIES = ("north", "south", "east")
DEPARTMENTS = ("movies_tv", "cds_vinyl", "video_games")
KEYS = {"user": "customer", "item": "sku"}


def dealt(events: pd.DataFrame, domain: str, num_users: int, num_parts: int) -> Iterator[pd.DataFrame]:
    """Tables of equal parts of customers of a domain."""
    own = events[events["domain"] == domain]
    users = pd.Series(sorted(own["user"].unique())).sample(num_users, random_state=0).tolist()
    size = num_users // num_parts
    for part in range(num_parts):
        rows = own[own["user"].isin(users[part * size : (part + 1) * size])]
        yield rows[["user", "item"]].rename(columns=KEYS)


def make_tables(raw: Path, work: Path) -> dict[str, list[str]]:
    """Case -> options that name its tables."""
    events = pd.read_csv(raw / "interactions.csv.gz", dtype={"user": str})
    with gzip.open(raw / "items.jsonl.gz", "rt", encoding="utf-8") as lines:
        items = pd.DataFrame(map(json.loads, lines)).rename(columns=KEYS)

    def goods(domain: str) -> pd.DataFrame:
        return items.loc[items["domain"] == domain, ["sku", "title"]]

    work.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(COMPANIES, dealt(events, "video_games", 4500, 3), strict=True):
        rows.to_csv(work / f"{name}.csv", index=False)
    goods("video_games").to_csv(work / "products.csv", index=False)
    for name in DEPARTMENTS:
        rows = next(dealt(events, name, 500, 1))
        rows.merge(goods(name), on="sku", how="left", validate="many_to_one").to_csv(work / f"{name}.csv", index=False)
    return {
        "companies": ["--events", ",".join(f"{name}.csv" for name in COMPANIES), "--items", "products.csv"],
        "departments": ["--events", ",".join(f"{name}.csv" for name in DEPARTMENTS)],
    }


def measured(case: str, words: list[str], work: Path, stages_s: float) -> list[str]:
    """A section: the command, what it chose, estimate and time, verdict."""
    command = ["federate", *words, "--output", f"run_{case}", "--cache", f"cache_{case}"]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "fedecider.cli.main", *command],
        cwd=work,
        env={**os.environ, "COLUMNS": "1000"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    wall_s, used = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    (work / f"{case}.log").write_text(done.stdout)
    if done.returncode:
        raise ValueError(f"got exit code {done.returncode} from {case}, expected 0: {done.stdout[-1000:]}")
    lines = done.stdout.splitlines()
    cpu_s = used.ru_utime + used.ru_stime + stages_s
    result = fd.load(work / f"run_{case}")
    kept = [line for line in lines if line.startswith(("chosen: ", "estimate: "))]
    kept += [line for line in lines if re.match(r"round \d+/\d+:", line)]
    before = f", of which {stages_s:.0f} for stages that a run before had left in the cache" if stages_s else ""
    return [
        f"## {case}",
        "",
        f"`fedecider federate {' '.join(words)}`",
        "",
        "```text",
        *kept,
        "```",
        "",
        f"**Measured: {cpu_s / 60:.1f} CPU minutes** ({cpu_s:.0f} s{before}); {wall_s / 60:.0f} minutes of wall clock "
        f"beside other programs; {used.ru_maxrss / 1e6:.1f} GB at most.",
        "",
        "```text",
        result.verdict,
        "",
        result.table.round(4).to_string(),
        "```",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--raw", type=Path, required=True, help="the folder amazon2018-d3")
    parser.add_argument("--work", type=Path, required=True, help="where tables and runs go")
    parser.add_argument("--cases", default="companies,departments")
    parser.add_argument("--stages", default="0,0", help="CPU seconds of stages that are in the cache already")
    parser.add_argument("--output", type=Path, help="Markdown file; lines are appended as they come")
    args = parser.parse_args()
    foot = heading("chosen.py", 1)
    cases = make_tables(args.raw, args.work)
    write_lines(["# Chosen for own tables", ""], args.output)
    for case, seconds in zip(args.cases.split(","), args.stages.split(","), strict=True):
        write_lines(measured(case, cases[case], args.work, float(seconds)), args.output)
    write_lines([*foot, ""], args.output)


if __name__ == "__main__":
    sys.exit(run(main))
