"""What half depth costs: ndcg@10 of the teacher and its student, no adapter, on validation items, seed by seed.

    python benchmarks/student_and_teacher.py [--seeds 0,1,2] [--output FILE] --set --config FILE
    python benchmarks/student_and_teacher.py --set --domains crime,comics,children

--set takes the options of ``scripts/federate.py``; stages that were built are found again. All client users, macro over
the domains.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from provenance import heading, write_lines

from fedecider.evaluation.metrics import mean_metrics
from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.prepare import build_base_artifacts, make_recommender
from fedecider.experiment.rows import STUDENT, TEACHER, zero_shot
from fedecider.running.launch import start
from fedecider.running.options import run


def scores(words: list[str], seed: int) -> dict[str, float]:
    """Row -> macro ndcg@10 of the validation items."""
    settings = parse_settings("", [*words, "--seed", str(seed), "--teacher_row", "true"])
    launch = start(settings.run.num_threads)
    artifacts = build_base_artifacts(settings.run, launch)
    recommender = make_recommender(settings, artifacts, launch.device)
    rows = zero_shot(settings, artifacts, recommender, launch.device, "valid")
    return {
        row: sum(mean_metrics(position_U, (10,))["ndcg@10"] for position_U in domains.values()) / len(domains)
        for row, domains in rows.items()
    }


def line(label: str, teacher: float, student: float) -> str:
    return f"| {label} | {teacher:.4f} | {student:.4f} | {100 * student / teacher:.1f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="Markdown file; lines are appended as they come")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="options of federate.py")
    args = parser.parse_args()
    write_lines(["# Student and teacher", "", *heading("student_and_teacher.py", 1), ""], args.output)
    write_lines(["| seed | teacher | student | of the teacher |", "|---|---:|---:|---:|"], args.output)
    teachers, students = [], []
    for seed in args.seeds:
        found = scores(args.set, seed)
        teachers.append(found[TEACHER])
        students.append(found[STUDENT])
        write_lines([line(str(seed), teachers[-1], students[-1])], args.output)
    write_lines([line("mean", sum(teachers) / len(teachers), sum(students) / len(students))], args.output)


if __name__ == "__main__":
    sys.exit(run(main))
