"""What half depth costs, and what local training brings on top of the student: ndcg@10 of teacher and student.

    python benchmarks/student_and_teacher.py [--seeds 0,1,2] [--output FILE] --set --config FILE
    python benchmarks/student_and_teacher.py --set --domains crime,comics,children
    python benchmarks/student_and_teacher.py --local --set --config FILE --data FOLDER --domains '*' --num_rounds 3

--set takes the options of ``scripts/federate.py``; stages that were built are found again. All client users, macro over
the domains, validation items. --local: every client trains alone as the options say, and test items are ranked by its
whole update and by the share of it that its validation items chose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from provenance import heading, write_lines
from torch import Tensor

from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.entries import STUDENT, TEACHER, zero_shot
from fedecider.cross_silo.federate import prepare_rounds
from fedecider.cross_silo.prepare import build_base_artifacts, make_recommender
from fedecider.cross_silo.reported import chosen_scale, reported_model
from fedecider.cross_silo.settings import Settings
from fedecider.engine.run import train
from fedecider.evaluation.metrics import mean_metrics, user_metrics
from fedecider.running.command import run
from fedecider.running.launch import start

BEYOND_NOISE = 1.645
"""Standard errors: a difference is told at 95 %, one-sided."""


def settings_of(words: Sequence[str], seed: int) -> Settings:
    return parse_settings([*words, "--seed", str(seed), "--teacher_row", "true"])


def scores(words: Sequence[str], seed: int) -> dict[str, float]:
    """Row -> macro ndcg@10 of the validation items."""
    settings = settings_of(words, seed)
    launch = start(settings.run.num_threads)
    artifacts = build_base_artifacts(settings.run, launch)
    recommender = make_recommender(settings, artifacts, launch.device)
    rows = zero_shot(settings, artifacts, recommender, "valid")
    return {
        row: sum(mean_metrics(position_U, (10,))["ndcg@10"] for position_U in domains.values()) / len(domains)
        for row, domains in rows.items()
    }


def line(label: str, teacher: float, student: float) -> str:
    return f"| {label} | {teacher:.4f} | {student:.4f} | {100 * student / teacher:.1f} % |"


def depth_lines(args: argparse.Namespace) -> None:
    write_lines(["| seed | teacher | student | of the teacher |", "|---|---:|---:|---:|"], args.output)
    teachers, students = [], []
    for seed in args.seeds:
        found = scores(args.set, seed)
        teachers.append(found[TEACHER])
        students.append(found[STUDENT])
        write_lines([line(str(seed), teachers[-1], students[-1])], args.output)
    write_lines([line("mean", sum(teachers) / len(teachers), sum(students) / len(students))], args.output)


WHOLE, TAKEN = "whole update", "share taken"


def local_rows(settings: Settings) -> tuple[dict[str, dict[str, Tensor]], Mapping[str, float]]:
    """Row -> client -> places of its test items, and the share that each client takes."""
    launch = start(settings.run.num_threads)
    settings = settings._replace(run=replace(settings.run, local_row="off"))
    artifacts = build_base_artifacts(settings.run, launch)
    models, rounds = prepare_rounds(settings, artifacts, launch)
    state, shares = train(rounds), {}
    rows: dict[str, dict[str, Tensor]] = {WHOLE: {}, TAKEN: {}}
    for client, name in enumerate(models.names):
        model = reported_model(settings, rounds.method, models, state, client)
        shares[name] = chosen_scale(settings, model)
        for row, scale in ((WHOLE, 1.0), (TAKEN, shares[name])):
            rows[row][name] = model.scaled(scale).positions("test")
    return zero_shot(settings, artifacts, models) | rows, shares


def local_lines(args: argparse.Namespace) -> None:
    """A table for every seed, a line for every client."""
    for seed in args.seeds:
        settings = settings_of(args.set, seed)
        rows, shares = local_rows(settings)
        gain = {row: {name: _ndcg(places) for name, places in of_row.items()} for row, of_row in rows.items()}
        num_users = sum(map(len, gain[STUDENT].values()))
        head = ["client", TEACHER, STUDENT, WHOLE, "minus student", "share", TAKEN, "minus student"]
        lines = [f"{settings.run.method}, seed {seed}, {num_users} users", ""]
        lines += [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
        lines += [_line(name, gain, [name], f"{share:g}") for name, share in shares.items()]
        lines += [_line("mean", gain, list(shares), f"{np.mean(list(shares.values())):.2f}")]
        below = [name for name in shares if _difference(gain, TAKEN, [name])[1] < -BEYOND_NOISE]
        told = f"Below the student at one-sided 95 %, of {len(shares)} comparisons: {', '.join(below) or 'nobody'}."
        write_lines([*lines, "", told, ""], args.output)


def _line(label: str, gain: Mapping[str, Mapping[str, np.ndarray]], names: Sequence[str], share: str) -> str:
    mean = {row: np.mean([of_row[name].mean() for name in names]) for row, of_row in gain.items()}
    minus = {row: "{:+.4f} ({:+.1f})".format(*_difference(gain, row, names)) for row in (WHOLE, TAKEN)}
    cells = [*(f"{mean[row]:.4f}" for row in (TEACHER, STUDENT, WHOLE)), minus[WHOLE], share]
    return f"| {label} | {' | '.join(cells)} | {mean[TAKEN]:.4f} | {minus[TAKEN]} |"


def _difference(gain: Mapping[str, Mapping[str, np.ndarray]], row: str, names: Sequence[str]) -> tuple[float, float]:
    """The mean over clients of the mean over their users of ``row`` minus the student, and how many standard errors
    that is; 0 where nothing differs."""
    difference_KU = [gain[row][name] - gain[STUDENT][name] for name in names]
    mean = float(np.mean([one_U.mean() for one_U in difference_KU]))
    variance = sum(one_U.var(ddof=1) / len(one_U) for one_U in difference_KU) / len(names) ** 2
    return mean, mean / float(np.sqrt(variance)) if variance > 0.0 else 0.0


def _ndcg(places: Tensor) -> np.ndarray:
    """(U,)"""
    return user_metrics(places)["ndcg@10"].numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--output", type=Path, help="Markdown file; lines are appended as they come")
    parser.add_argument("--local", action="store_true", help="what local training brings, client by client")
    parser.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="options of federate.py")
    args = parser.parse_args()
    title = "Teacher, student and local training" if args.local else "Student and teacher"
    write_lines([f"# {title}", "", *heading("student_and_teacher.py", 1), ""], args.output)
    local_lines(args) if args.local else depth_lines(args)


if __name__ == "__main__":
    sys.exit(run(main))
