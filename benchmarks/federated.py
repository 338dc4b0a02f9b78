"""One dated table from several finished runs: methods x seeds, intervals, tests, boundary shock.

Runs are made by scripts/federate.py with --output RUNS/<label>-<seed>; this script trains nothing:

    for seed in 0 1 2; do
      python scripts/federate.py --config benchmarks/configs/amazon_t5.yaml --seed $seed --method local \\
        --output runs/local-$seed
    done
    PYTHONPATH=. python benchmarks/federated.py --runs runs --labels local,fedavg,paper --output FILE.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedecider.baselines.counts import UNTRAINED
from fedecider.evaluation.per_user import read_per_user
from fedecider.evaluation.protocols import get_protocol
from fedecider.evaluation.statistics import compare_table, distinguishable_winners, verdict
from fedecider.experiment.rows import STUDENT, TEACHER
from fedecider.federation.record import read_records
from fedecider.federation.streams import stream
from fedecider.report.tables import CANARY, ResultTable, markdown_table, result_rows
from fedecider.running.options import run

Positions = dict[str, Tensor]
"""domain -> (S, U) positions of the test items."""


def seeds_of(runs: Path, label: str) -> list[Path]:
    """Finished runs ``label-<seed>``, by seed."""
    found = [path for path in runs.glob(f"{label}-*") if (path / "metrics.json").is_file()]
    if not found:
        raise SystemExit(f"no finished run {label}-<seed> in {runs}")
    return sorted(found, key=lambda path: int(path.name.rsplit("-", 1)[1]))


def positions(folders: Sequence[Path], variant: str | None = None) -> Positions:
    """Test positions of the reported model (or of one row of the table), seeds stacked."""
    per_seed = []
    for folder in folders:
        wanted = variant or json.loads((folder / "metrics.json").read_text())["reported"]
        records = [record for record in read_per_user(folder / "per_user.parquet") if record.variant == wanted]
        per_seed.append({record.domain: record.position_U for record in records})
    return {domain: torch.stack([one[domain] for one in per_seed]) for domain in per_seed[0]}


def shock_rows(label: str, folders: Sequence[Path]) -> list[str]:
    """Mean validation ndcg@10 before the upload and after the broadcast, and update norms, per round."""
    records = [read_records(folder / "rounds.jsonl") for folder in folders]
    rows = []
    for number in range(min(map(len, records))):
        variants: dict[str, list[float]] = {}
        norms = []
        for of_seed in records:
            record = of_seed[number]
            for variant, clients in record["valid"].items():
                variants.setdefault(variant, []).append(statistics.mean(client["ndcg@10"] for client in clients))
            norms += [client["norm_geometric_mean"] for client in record["clients"]]
        before, after = (statistics.mean(variants[variant]) for variant in ("pre_upload", "post_broadcast"))
        shock = f"{before:.4f} | {after:.4f} | {after - before:+.4f}"
        rows.append(f"| {label} | {number + 1} | {shock} | {statistics.mean(norms):.2f} |")
    return rows


def timing_row(label: str, folders: Sequence[Path]) -> str:
    """Share of the wall time of local training and aggregation that is not local training."""
    records = [record for folder in folders for record in read_records(folder / "rounds.jsonl")]
    train_s, wall_s = sum(record["train_s"] for record in records), sum(record["wall_s"] for record in records)
    return f"| {label} | {len(records)} | {train_s:.1f} | {100 * (wall_s - train_s) / train_s:.3f} |"


def report(runs: Path, labels: Sequence[str], notes: Mapping[str, str]) -> str:
    folders = {label: seeds_of(runs, label) for label in labels}
    methods = {label: positions(paths) for label, paths in folders.items()}
    common = min(len(paths) for paths in folders.values())
    compared = {label: {domain: value[:common] for domain, value in row.items()} for label, row in methods.items()}
    tests = compare_table(compared, stream(0, "permutations")) if len(labels) > 1 else []
    first = folders[labels[0]]
    rows = result_rows(
        {f"{label} ({len(folders[label])} seeds)": row for label, row in methods.items()},
        {name: positions(first, name) for name in (TEACHER, STUDENT, *UNTRAINED, CANARY)},
    )
    record = json.loads((first[0] / "run.json").read_text())
    header = [
        "# Federated runs compared",
        "",
        f"- Date: {datetime.date.today().isoformat()}",
        f"- Commit of the runs: {record['commit']}",
        f"- Versions: Python {record['python']}, " + ", ".join(f"{k} {v}" for k, v in record["versions"].items()),
        f"- Machine: {record['machine']['system']} {record['machine']['processor']}, one thread a run",
        *(
            f"- `{label}`: {notes.get(label, '')} best rounds {[_best(path) for path in folders[label]]}"
            for label in labels
        ),
        "",
    ]
    bold = {
        (domain, metric, f"{label} ({len(folders[label])} seeds)")
        for domain, metric, label in distinguishable_winners(tests)
    }
    table = ResultTable(rows, get_protocol(record["protocol"]), bold=bold)
    parts = ["\n".join(header), markdown_table(table, title="Test")]
    if tests:
        parts.append(f"## Differences (paired permutation test over users, {common} seeds, Holm over the table)\n")
        parts.append("\n".join(f"- {verdict(test)}" for test in tests) + "\n")
    with_alpha = [label for label in labels if (folders[label][0] / "fusion_weights.json").is_file()]
    if with_alpha:
        parts.append("## Boundary shock: validation ndcg@10, mean over domains and seeds\n")
        parts.append("| run | round | before upload | after broadcast | shock | own update, geometric mean norm |")
        parts.append("|---|---:|---:|---:|---:|---:|")
        parts += [row for label in with_alpha for row in shock_rows(label, folders[label])]
    parts.append("\n## The round loop beside local training\n")
    parts.append("| run | rounds | local training, s | overhead of the loop, % |\n|---|---:|---:|---:|")
    parts += [timing_row(label, folders[label]) for label in labels]
    return "\n".join(parts) + "\n"


def _best(folder: Path) -> int:
    return json.loads((folder / "metrics.json").read_text())["best_round"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder with <label>-<seed> run folders")
    parser.add_argument(
        "--labels", required=True, help="labels, separated by commas; the first one brings the baselines"
    )
    parser.add_argument("--notes", default="{}", help="JSON: label -> what it is")
    parser.add_argument("--figures", type=Path, help="copy the figure data (JSON) of every label's first seed here")
    parser.add_argument("--output", type=Path, help="Markdown file; printed when not given")
    words = parser.parse_args()
    labels = words.labels.split(",")
    text = report(words.runs, labels, json.loads(words.notes))
    if words.output:
        words.output.write_text(text)
    else:
        print(text)
    if words.figures:
        words.figures.mkdir(parents=True, exist_ok=True)
        for label in labels:
            for path in sorted((seeds_of(words.runs, label)[0] / "figures").glob("*.json")):
                shutil.copy(path, words.figures / f"{label}-{path.name}")


if __name__ == "__main__":
    sys.exit(run(main))
