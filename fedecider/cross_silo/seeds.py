"""Several training runs of one set-up, each with a seed of its own: their test figures as those of one run.

The first run is what is exported, and everything but the test figures is its own. Shape legend: S runs, U users.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedecider.cross_silo.conclusion import subject_of
from fedecider.cross_silo.ensembles import KEPT, with_ensemble
from fedecider.cross_silo.results import figures_of_entries, paired_tests, write_answer
from fedecider.engine.result import RunResult
from fedecider.evaluation.statistics import shared_persons
from fedecider.federation.record import write_json
from fedecider.report.tables import seed_gains
from fedecider.running.manifest import note_changed
from fedecider.running.run_folder import RunFolder

Stacked = dict[str, dict[str, Tensor]]
"""Entry -> client -> (S, U) test positions, of baskets (S, U, T)."""


def merge_runs(root: Path, others: Sequence[Path]) -> None:
    """Put the mean over all runs into ``metrics.json`` of the first one, ``root``, and make its page and table again;
    of the others the models are deleted."""
    folder = RunFolder(root)
    write_json(folder.metrics, over_runs([RunResult.read(one) for one in (root, *others)]).metrics)
    note_changed(root, [folder.metrics])
    for one in map(RunFolder, others):
        for models in (one.adapters, one.backbone, one.private, one.checkpoints):
            shutil.rmtree(models, ignore_errors=True)
    write_answer(RunResult.read(root), folder)


def over_runs(results: Sequence[RunResult]) -> RunResult:
    """The first result with the test figures of all: intervals and tests are of customers and training runs.

    Raises:
        ValueError: the runs have other customers.
    """
    first = results[0]
    if any((one.users, one.record["data"]) != (first.users, first.record["data"]) for one in results):
        raise ValueError("got training runs of other data, expected the same in all of them")
    positions, persons = stacked(results), shared_persons(first.users)
    figures = figures_of_entries(positions, first.metrics.get("baselines", ()), persons)
    joining = first.metrics.get("joining", {})
    subject = subject_of(first.method, first.reported, positions)
    tests = paired_tests(first.method, first.reported, positions, first.users)
    metrics: dict[str, Any] = {**first.metrics, "comparisons": tests}
    metrics["domains"] = {name: {**one, "test": figures[name]} for name, one in metrics["domains"].items()}
    if len(first.clients) > 1:
        metrics["macro"] = {"test": figures["macro"]}
    if joining:
        kept = with_ensemble(KEPT) if with_ensemble(KEPT) in positions else KEPT
        metrics["joining"] = {**joining, "kept": kept if kept in positions else joining["joined"]}
        gains, share = seed_gains(positions, subject, joining["alone"], first.users)
        metrics |= {"seed_gains": gains, "seed_share": share}
    return replace(first, metrics={**metrics, "seeds": [one.settings["run"]["seed"] for one in results]})


def stacked(results: Sequence[RunResult]) -> Stacked:
    """Positions of every entry that all runs have; where in some of them every client keeps the joint model, that is
    what they keep."""
    labels = dict.fromkeys(label for one in results for label in one.positions)
    found: Stacked = {}
    for label in labels:
        own = [one.positions.get(_stands_for(label, one)) for one in results]
        if None not in own:
            found[label] = {
                client: _stack([of[client] for of in own if of is not None]) for client in results[0].clients
            }
    return found


def _stands_for(label: str, result: RunResult) -> str:
    kept = {KEPT: result.reported, with_ensemble(KEPT): with_ensemble(result.method)}
    return label if label in result.positions else kept.get(label, label)


def _stack(positions: Sequence[Tensor]) -> Tensor:
    """(S, U), of baskets (S, U, T)."""
    return torch.stack(list(positions))
