"""What a search leaves behind: a table for the terminal, a page in Markdown, and the best settings as YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from fedecider.federation.record import write_text
from fedecider.report.tables import markdown_grid
from fedecider.running.stages import as_plain
from fedecider.tuning.journal import Trial
from fedecider.tuning.search import Search, best_of
from fedecider.tuning.space import Setting

HEADER = ("trial", "validation ndcg@10", "best / last round", "seconds", "setting")


def setting_text(setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items()) or "default"


def trial_cells(trials: Sequence[Trial]) -> list[list[str]]:
    """Cells below ``HEADER``, the best trial in bold."""
    best = best_of([trial.tried for trial in trials])
    cells = []
    for number, trial in enumerate(trials, 1):
        if trial.outcome is None:
            result = ["failed", "-"]
        else:
            mark = "**" if number - 1 == best else ""
            result = [
                f"{mark}{trial.outcome.valid:.4f}{mark}",
                f"{trial.outcome.best_round}/{trial.outcome.last_round}",
            ]
        problem = f" ({trial.problem})" if trial.problem else ""
        cells.append([str(number), *result, f"{trial.seconds:.1f}", setting_text(trial.setting) + problem])
    return cells


def trial_table(trials: Sequence[Trial], title: str) -> Table:
    """For a terminal."""
    table = Table(title=title)
    for name in HEADER:
        table.add_column(name, justify="left" if name == "setting" else "right", overflow="fold")
    for cells in trial_cells(trials):
        is_best = cells[1].startswith("**")
        table.add_row(*(cell.strip("*") for cell in cells), style="bold" if is_best else None)
    return table


def trial_page(
    title: str,
    heading: Sequence[str],
    trials: Sequence[Trial],
    search: Search,
    shares: Mapping[str, float],
    notes: Sequence[str],
) -> str:
    """Markdown: what was searched, all trials, what decided, and what the numbers are not."""
    space = [[name, str(one), str(search.start[name])] for name, one in search.space.items()]
    parts = [f"# {title}", "", *(f"- {line}" for line in heading), "", "## Trials", ""]
    parts += [*markdown_grid(HEADER, trial_cells(trials), HEADER[:4]), ""]
    if space:
        parts += ["## Space", "", *markdown_grid(("setting", "drawn from", "start"), space), ""]
    if shares:
        grid = [[name, f"{share:.2f}"] for name, share in shares.items()]
        parts += ["## What the differences come from (fANOVA, rough)", ""]
        parts += [*markdown_grid(("setting", "share"), grid, ("share",)), ""]
    return "\n".join([*parts, *(f"{note}\n" for note in notes)])


def write_settings(path: Path, values: Mapping[str, Any], comments: Sequence[str]) -> None:
    """A file that ``--config`` takes, with ``comments`` at its top."""
    text = yaml.safe_dump(as_plain(dict(values)), sort_keys=False, allow_unicode=True)
    write_text(path, "".join(f"# {line}\n" for line in comments) + text)
