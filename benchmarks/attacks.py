"""What one hostile client costs the honest ones, with every recommended method on a small set-up like companies.yaml.

    python benchmarks/attacks.py --work WORK [--cells N]

Companies: four with one catalogue (crime of the embedded sample, its users dealt out), a small decoder set up as in
configs/companies.yaml; users: Amazon gift cards ($FEDECIDER_DATA). The first client attacks in every round, or from
the second on where it sends its last upload again. Figures are the honest companies' mean test ndcg@10 without the
ensemble, of users that of all. A cell is that figure over the one under `away`, where the attacker is not there at
all: what the honest ones have without it is the most that any defence can keep. One JSON a cell in WORK: what is there
is not run again; `--cells` ends after so many. The page benchmarks/results/attacks.md is written after every row.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from provenance import heading

import fedecider
from fedecider.bounds import Diverged
from fedecider.data.sample import sample_domains
from fedecider.data.silos import share_out
from fedecider.federation.record import write_json
from fedecider.running.command import run
from fedecider.testing.faults import Fault, faulty_runs

PAGE = Path(__file__).parent / "results" / "attacks.md"
KEPT = 0.95
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "flora": {"method": "flora"},
    "fedecider": {"method": "fedecider"},
    "fedmf, weighting examples (users)": {"method": "fedmf", "dataset": "amazon-gift-cards"},
    "fedavg, norm_clip": {"method": "fedavg", "robust_mean": "norm_clip"},
    "fedavg, median": {"method": "fedavg", "robust_mean": "median"},
    "fedavg, trimmed_mean": {"method": "fedavg", "robust_mean": "trimmed_mean"},
    "fedavg, weighting examples": {"method": "fedavg", "fedavg": {"weighting": "examples"}},
}
"""Row of the table -> what sets it apart."""
ATTACKS: dict[str, tuple[Fault, ...]] = {
    "none": (),
    "away": (Fault(0, "away"),),
    "x1e3": (Fault(0, "scale", factor=1e3),),
    "x1e30": (Fault(0, "scale", factor=1e30),),
    "sign flip": (Fault(0, "sign_flip"),),
    "random": (Fault(0, "random"),),
    "replay": (Fault(0, "replay", 2),),
    "NaN": (Fault(0, "nan"),),
    "1e6 examples": (Fault(0, "weight", factor=1e6),),
}
COMPANIES: dict[str, Any] = {
    "num_rounds": 5,
    "local_epochs": 3,
    "batch_size": 32,
    "learning_rate": 1e-3,
    "schedule": "cosine",
    "output_lr_multiplier": 20.0,
    "lora_rank": 32,
    "lora_targets": "table",
    "num_eval_users": 0,
    "teacher_row": False,
    "ensemble": {"kind": "none"},
    "pretrain": {
        "ids": "item",
        "text_encoder": "tfidf",
        "samples": {"templates": "history", "max_history": 20, "max_source_tokens": 24},
        "backbone": {"kind": "decoder", "embedding_init": "text", "d_model": 32, "num_layers": 2},
        "train": {"learning_rate": 1e-4, "table_lr_multiplier": 20.0, "batch_size": 64, "epochs": 5},
    },
    "distill": {"epochs": 1},
}
USERS: dict[str, Any] = {"num_rounds": 30, "local_epochs": 1, "init_std": 0.1, "protocol": "strict"}


def cell(row: str, attack: str, work: Path) -> dict[str, Any]:
    """One run: honest clients' ndcg@10, or that it diverged; and whose uploads were left out or bounded."""
    chosen, users = METHODS[row], "dataset" in METHODS[row]
    settings = {**(USERS if users else COMPANIES), **chosen, "num_threads": 1}
    settings |= {} if users else {"cache": str(work / "cache")}
    names = [] if users else sorted(companies())
    output = work / "run"
    shutil.rmtree(output, ignore_errors=True)
    method = settings.pop("method")
    data = settings.pop("dataset") if users else companies()
    try:
        with faulty_runs(ATTACKS[attack]):
            fedecider.federate(data, method, config=settings, output=output, progress=False)
    except Diverged as error:
        return {"ndcg@10": 0.0, "ended": str(error)}
    metrics = json.loads((output / "metrics.json").read_text())
    told = {name: metrics[name] for name in ("non_finite_uploads", "capped_clients")}
    tables = [metrics["test"]] if users else [metrics["domains"][name]["test"] for name in names[1:]]
    return {"ndcg@10": fmean(one[metrics["reported"]]["ndcg@10"]["mean"] for one in tables), **told}


def companies() -> dict[str, Any]:
    """Four of one catalogue."""
    return share_out(sample_domains(["crime"]), 4, None, 0)


def page(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [
        "| configuration | ndcg@10, nobody attacks | attacker away | " + " | ".join(list(ATTACKS)[2:]) + " |",
        "|---|---|---|" + "---|" * (len(ATTACKS) - 2),
    ]
    below = []
    for row, cells in found.items():
        away, texts = cells["away"]["ndcg@10"], []
        for attack in list(ATTACKS)[2:]:
            kept = cells[attack]["ndcg@10"] / away
            mark = "" if kept >= KEPT else "**"
            texts.append(f"{mark}{100 * kept:.0f} %{mark}")
            if mark:
                below.append(f"{row} under {attack} ({100 * kept:.1f} %)")
        lines.append(f"| {row} | {cells['none']['ndcg@10']:.4f} | {away:.4f} | {' | '.join(texts)} |")
    told = f"Below {100 * KEPT:.0f} %: {'; '.join(below)}." if below else f"Every cell keeps {100 * KEPT:.0f} %."
    return "\n".join([*lines, "", told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cells", type=int, default=sys.maxsize)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    left = options.cells
    for row in METHODS:
        for attack in ATTACKS:
            file = options.work / f"{row}, {attack}.json".replace(" ", "_")
            if not file.is_file():
                if not left:
                    return
                left -= 1
                write_json(file, cell(row, attack, options.work))
            found.setdefault(row, {})[attack] = json.loads(file.read_text())
            print(row, attack, found[row][attack]["ndcg@10"], flush=True)
        text = __doc__.split("\n\n")[2]
        PAGE.write_text("\n".join(["# Attacks", "", text, "", page(found), "", *heading(Path(__file__).name, 1), ""]))


if __name__ == "__main__":
    sys.exit(run(main))
