"""Rows of finished runs against each other, user by user: macro difference, interval and t test with Holm.

    python benchmarks/paired_rows.py --runs runs/a0+runs/a1[,runs/b0+runs/b1,...] [--runs runs/c0+runs/c1[,...] ...] \
        --rows "fedecider + ensemble" [--against "ensemble without a model,text neighbours"] \
        [--sasrec data/...[,data/...] --tune 3] [--output FILE]

Runs that are joined by + are seeds of one setting; intervals and tests are over users and seeds. Every row named by
--rows is compared with all other rows of all settings, or with those that --against names, on hit@10 and ndcg@10 of the
test items (macro over the domains; a user of several domains is one person). Holm's correction is over the lines shown:
name --against before the figures are known, as for a question of headroom (student < local < pooled). Runs must have
ranked the same users: of the further settings rows keep their names with the folder before them, but for baselines,
which are alike in all of them and are read from the first. --runs given again is the same settings on other data, as
many seeds: their domains count as further domains, and rows that all data have are shown. --sasrec adds SASRec, also
with text start, on the events of prepared data (one folder for all, or one for each --runs), the best of its grid on
validation. What is printed is Markdown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from provenance import heading

from fedecider.comparison.compare import Shared, fill, positions_of
from fedecider.cross_silo.sasrec_entries import SASREC, SASREC_TEXT, sasrec
from fedecider.data.store import load_domains
from fedecider.evaluation.metrics import MACRO
from fedecider.evaluation.per_user import read_per_user
from fedecider.evaluation.statistics import compare_table, table_intervals
from fedecider.running.command import run

METRICS = ("hit@10", "ndcg@10")
PER_USER = "per_user.parquet"
Positions = dict[str, dict[str, torch.Tensor]]
"""row -> domain -> (S, U) places."""
Names = dict[str, str]
"""Domain of a run -> its name in the table."""


def rows_of(settings: list[list[Path]], called: list[str]) -> tuple[Positions, dict[str, list[str]]]:
    """Test rows of all settings, seeds stacked, and the users of every domain. ``called`` names the settings.

    Raises:
        ValueError: the runs ranked other domains or users, or one is not there.
    """
    rows: Positions = {}
    persons: dict[str, list[str]] = {}
    for number, runs in enumerate(settings):
        found: dict[str, dict[str, list[torch.Tensor]]] = {}
        for folder in runs:
            if not (folder / PER_USER).is_file():
                raise ValueError(
                    f"got {folder} without {PER_USER}, expected the folder of a finished run of federate.py"
                )
            for record in read_per_user(folder / PER_USER):
                if record.split != "test":
                    continue
                if persons.setdefault(record.domain, list(record.users)) != list(record.users):
                    raise ValueError(
                        f"got other users of {record.domain} in {folder}, expected those of {settings[0][0]}"
                    )
                found.setdefault(record.variant, {}).setdefault(record.domain, []).append(record.position_U)
        for row, seeds in found.items():
            positions = {domain: torch.stack(position_SU) for domain, position_SU in seeds.items()}
            known = number > 0 and row in rows and all(torch.equal(rows[row][d], positions[d]) for d in positions)
            if not known:
                rows[row if number == 0 else f"{called[number]}: {row}"] = positions
    return rows, persons


def rows_of_all(data: list[list[list[Path]]]) -> tuple[Positions, dict[str, list[str]], list[Names]]:
    """Rows that the settings have on every data set, over the domains of all, the users of these, and for each data set
    the names of its domains: its own in the first, then with the folder of the run.

    Raises:
        ValueError: a data set has not as many settings as the first, or as `rows_of`.
    """
    called = [runs[0].name for runs in data[0]]
    rows, persons = rows_of(data[0], called)
    names: list[Names] = [{domain: domain for domain in persons}]
    for settings in data[1:]:
        if len(settings) != len(called):
            raise ValueError(
                f"got {len(settings)} settings with {settings[0][0]}, expected {len(called)} as in the first --runs"
            )
        further, users = rows_of(settings, called)
        rows = {row: domains for row, domains in rows.items() if row in further}
        names.append({domain: f"{domain} of {settings[0][0].name}" for domain in users})
        for domain, name in names[-1].items():
            persons[name] = users[domain]
            for row, domains in rows.items():
                domains[name] = further[row][domain]
    return rows, persons, names


def sasrec_rows(data: list[str], names: list[Names], seeds: int, tune: int, cache: str, encoder: str) -> Positions:
    """Both rows of SASRec over the domains of all data sets, trained and chosen for each of them.

    Raises:
        ValueError: ``data`` is neither one folder for all data sets nor one for each.
    """
    if len(data) not in (1, len(names)):
        raise ValueError(
            f"got {len(data)} folders of data for SASRec, expected 1, or {len(names)}: one for each data set"
        )
    rows: Positions = {SASREC: {}, SASREC_TEXT: {}}
    for folder, shown in zip(data * len(names) if len(data) == 1 else data, names, strict=True):
        shared = Shared(load_domains(folder, list(shown)), "strict", tune, Path(cache), "cpu")
        for row in fill([sasrec(shared), sasrec(shared, encoder)], seeds):
            positions = positions_of(row, shared.protocol)[row.entry.label]
            rows[row.entry.label] |= {shown[domain]: position_SU for domain, position_SU in positions.items()}
    return rows


def table(
    rows: Positions, persons: dict[str, list[str]], chosen: list[str], against: list[str] | None = None
) -> list[str]:
    """Markdown: all rows, and each of ``chosen`` against each of ``against``, or against all rows that are not chosen.

    Raises:
        ValueError: a name is no row.
    """
    missing = sorted({*chosen, *(against or ())} - set(rows))
    if missing:
        raise ValueError(f"got rows {missing}, expected some of {list(rows)}")
    others = [row for row in rows if row not in chosen] if against is None else against
    pairs = [(row, other) for row in chosen for other in others if other != row]
    found = compare_table(rows, METRICS, pairs, persons=persons, each_domain=False)
    scope = MACRO if len(persons) > 1 else next(iter(persons))
    lines = ["| row | hit@10 | ndcg@10 |", "|---|---:|---:|"]
    intervals = table_intervals(rows, (10,), persons=persons)
    for row in rows:
        shown = [intervals[row][scope][metric] for metric in METRICS]
        lines.append(f"| {row} | " + " | ".join(f"{i.mean:.4f} [{i.low:.4f}, {i.high:.4f}]" for i in shown) + " |")
    lines += ["", "| row | against | metric | difference | 95 % interval | Holm p |", "|---|---|---|---:|---|---:|"]
    for c in found:
        gap = c.difference
        interval = f"[{gap.low:+.4f}, {gap.high:+.4f}]"
        lines.append(f"| {c.first} | {c.second} | {c.metric} | {gap.mean:+.4f} | {interval} | {c.p_holm:.2g} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--runs", required=True, action="append", help="settings by commas, their seeds by +; again for other data"
    )
    parser.add_argument("--rows", required=True)
    parser.add_argument("--against", default="", help="rows by commas; all others without it")
    parser.add_argument("--sasrec", default="", help="prepared data on which SASRec is trained, by commas")
    parser.add_argument("--tune", type=int, default=3, help="settings of SASRec's grid")
    parser.add_argument("--encoder", default="auto")
    parser.add_argument("--cache", default=".cache")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    data = [[[Path(run) for run in runs.split("+")] for runs in settings.split(",")] for settings in args.runs]
    rows, persons, names = rows_of_all(data)
    if args.sasrec:
        rows |= sasrec_rows(args.sasrec.split(","), names, len(data[0][0]), args.tune, args.cache, args.encoder)
    lines = table(rows, persons, args.rows.split(","), args.against.split(",") if args.against else None)
    text = "\n".join(["# Rows against each other", "", *heading("paired_rows.py", 1), "", *lines]) + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text)


if __name__ == "__main__":
    sys.exit(run(main))
