"""Does the whole pipeline do something: the command of the README over ten seeds, each of which draws its own sample.

    python benchmarks/sample.py --work WORK [--seeds 10]

Test ndcg@10, macro mean of three domains: ID generator, T5 of two layers, student of one, LoRA in attention and
feed-forward, directions and fusion weights (configs/demo.yaml; 160 public and 240 private users a domain; the teacher
is ranked too), beside every client alone (row `local` of the same run), FedAvg, and the best simple rule. The sample
is planted: texts tell which theme follows which, so this shows that the mechanism works, and nothing about real data.
One JSON a cell in WORK: what is there is not run again. The page benchmarks/results/sample.md is written at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from provenance import heading
from scipy.stats import t as student_t

import fedecider
from fedecider.federation.record import write_json
from fedecider.running.command import run

PAGE = Path(__file__).parent / "results" / "sample.md"
CONFIG = Path(__file__).parents[1] / "configs" / "demo.yaml"
METHODS = ("fedecider", "fedavg")
RULES = (
    "popularity",
    "last-item co-occurrence",
    "decayed co-occurrence",
    "text neighbours",
    "text neighbours + counts",
)


def cell(method: str, seed: int, work: Path) -> dict[str, Any]:
    """ndcg@10 of every row of one run, its CPU seconds, and what its item IDs are like."""
    output, begun = work / "run", time.process_time()
    shutil.rmtree(output, ignore_errors=True)
    first = method == METHODS[0]  # whose run has the rows that all share
    options = {"cache": str(work / "cache"), "seed": seed, "teacher_row": first}
    options |= {} if first else {"local_row": "off"}
    fedecider.federate(None, method, config=str(CONFIG), output=output, progress=False, **options)
    metrics = json.loads((output / "metrics.json").read_text())
    rows = {name: one["ndcg@10"]["mean"] for name, one in metrics["macro"]["test"].items()}
    ids = [domain["item_ids"] for domain in metrics["domains"].values()]
    return {"rows": rows, "cpu_s": time.process_time() - begun, "item_ids": ids}


def page(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Tables of all seeds."""
    full = [one["rows"] for one in found["fedecider"]]
    joined = next(name for name in full[0] if name.startswith("fedecider") and "ensemble" not in name)
    columns: dict[str, list[float]] = {
        "teacher": [_of(rows, "teacher") for rows in full],
        "student": [_of(rows, "student") for rows in full],
        "best simple rule": [max(rows[rule] for rule in RULES) for rows in full],
        "alone": [rows["local"] for rows in full],
        "FedAvg": [_reported(one["rows"], "fedavg") for one in found["fedavg"]],
        "FeDecider": [rows[joined] for rows in full],
        "FeDecider + ensemble": [_of(rows, "fedecider + ensemble") for rows in full],
    }
    lines = ["| seed | " + " | ".join(columns) + " | CPU s |", "|---" * (len(columns) + 2) + "|"]
    for seed in range(len(full)):
        values = " | ".join(f"{values[seed]:.4f}" for values in columns.values())
        lines.append(f"| {seed} | {values} | {found['fedecider'][seed]['cpu_s']:.0f} |")
    means = " | ".join(f"**{fmean(values):.4f}**" for values in columns.values())
    lines.append(f"| mean | {means} | {fmean(one['cpu_s'] for one in found['fedecider']):.0f} |")
    lines += ["", "Differences, mean of the seeds with its 95 % interval (t):", ""]
    pairs = [("FeDecider", name) for name in ("student", "best simple rule", "alone", "FedAvg")]
    for first, second in [*pairs, ("FedAvg", "alone")]:
        change = [one - other for one, other in zip(columns[first], columns[second], strict=True)]
        half = student_t.ppf(0.975, len(change) - 1) * stdev(change) / len(change) ** 0.5
        ends = f"[{fmean(change) - half:+.4f}, {fmean(change) + half:+.4f}]"
        lines.append(f"- {first} - {second}: {fmean(change):+.4f} {ends}")
    reports = [report for one in found["fedecider"] for report in one["item_ids"]]
    own, twice = (fmean(report[key] for report in reports) for key in ("own_word_share", "repeat_share"))
    told = f"Item IDs: {100 * own:.1f} % of the words from the item's own text, {100 * twice:.1f} % with a word twice."
    lines += ["", told]
    return lines


def _of(rows: dict[str, float], end: str) -> float:
    return next(value for name, value in rows.items() if name.endswith(end) or name == end)


def _reported(rows: dict[str, float], method: str) -> float:
    return next(value for name, value in rows.items() if name.startswith(method) and "ensemble" not in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    lines = heading(Path(__file__).name, 1)
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in range(options.seeds):
        for method in METHODS:
            file = options.work / f"{method}-{seed}.json"
            if not file.is_file():
                write_json(file, cell(method, seed, options.work))
            found.setdefault(method, []).append(json.loads(file.read_text()))
            print(seed, method, found[method][-1]["rows"], flush=True)
    text = __doc__.split("\n\n")[2]
    PAGE.write_text("\n".join(["# The embedded sample", "", text, "", *page(found), "", *lines, ""]))


if __name__ == "__main__":
    sys.exit(run(main))
