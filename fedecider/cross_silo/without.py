"""Who gains from whom: a finished run again without one company at a time, from its own stages and settings.

Draws are named after companies (`fedecider.federation.streams`), so that the others train on the same batches as in the
run, and what differs is who is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedecider.audit.attacks import finished
from fedecider.cross_silo.command_line import recorded_settings
from fedecider.cross_silo.ended import ended
from fedecider.cross_silo.ensembles import Fitting, with_ensemble
from fedecider.cross_silo.entries import Positions, item_texts_of
from fedecider.cross_silo.federate import prepare_rounds
from fedecider.cross_silo.joining import system_of
from fedecider.cross_silo.prepare import BaseArtifacts, build_base_artifacts, check_same_student, data_of_run
from fedecider.cross_silo.reported import chosen_scale
from fedecider.cross_silo.settings import Settings
from fedecider.data.protocol import customers_tested
from fedecider.engine.result import RunResult
from fedecider.engine.run import train
from fedecider.evaluation.statistics import compare_table, of_one_run, shared_persons
from fedecider.federation.record import write_json
from fedecider.methods import METHODS
from fedecider.models.client_model import ClientModel
from fedecider.report.tables import compared_by, comparisons_data
from fedecider.running.launch import Launch
from fedecider.running.manifest import note_changed
from fedecider.running.progress import log_line
from fedecider.running.run_folder import locked

WITHOUT = "without"
"""Its place in ``metrics.json``, and in a test the name of what others have without a company."""
FEWEST = 3
"""Without one of two companies the other is alone, which every run shows already."""


def leave_out(run: str | Path, companies: Sequence[str], launch: Launch, data: str = "") -> dict[str, Any]:
    """``without`` of ``metrics.json``, which is written after every company: who is in it already is not trained again.

    Args:
        run: The output directory.
        companies: Those that are left out, one after the other; if empty, each.
        launch: Where it is trained.
        data: The folder of prepared data, when it is not where the run found it.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it did not finish, has fewer than three companies or other data now, or nobody joins in it.
    """
    root = Path(run)
    folder, result = finished(root)
    settings, names = recorded_settings(root, data), result.clients
    wanted = list(companies) or names
    _check(settings, names, wanted, root)
    data_of_run(settings.run, result.record, root)
    with locked(folder.lock, f"got the run {root}, which another command writes, expected it to be free. Wait for it"):
        result = RunResult.read(root)  # of those who had the lock before
        found: dict[str, Any] = dict(result.metrics.get(WITHOUT, {}))
        missing = [name for name in wanted if name not in found]
        artifacts = build_base_artifacts(settings.run, launch)
        check_same_student(folder, artifacts, root)
        for number, name in enumerate(missing, 1):
            log_line(f"without {name} ({number} of {len(missing)}): {len(names) - 1} companies, as in the run")
            found[name] = _compared(settings, artifacts, result, name, launch)
            write_json(folder.metrics, {**result.metrics, WITHOUT: {one: found[one] for one in names if one in found}})
            note_changed(root, [folder.metrics])
    return found


def _check(settings: Settings, names: list[str], wanted: list[str], root: Path) -> None:
    if settings.run.start_from:
        raise ValueError(
            f"got {root}, which started from the adapters of {settings.run.start_from}, expected a run that started "
            "anew: its rounds are made again from the student"
        )
    entry = METHODS[settings.run.method]
    if entry.pooled or settings.run.method == "local":
        raise ValueError(f"got a run of {settings.run.method}, expected a method with which companies join")
    if len(names) < FEWEST:
        raise ValueError(
            f"got a run of {len(names)} companies, expected {FEWEST} at least: without one of two the other is alone, "
            "which What joining brought is about"
        )
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise ValueError(f"got the company {unknown[0]}, expected some of {', '.join(names)}")


def _compared(
    settings: Settings,
    artifacts: BaseArtifacts,
    result: RunResult,
    name: str,
    launch: Launch,
) -> dict[str, Any]:
    """Every other company without ``name``, less what it has in the run: paired tests over its customers.

    Holm's correction is over the companies and metrics of one that is left out; where it is told, over all that are.
    """
    label = with_ensemble(result.method) if settings.run.ensemble.kind != "none" else result.reported
    others = {company: domain for company, domain in artifacts.domains.items() if company != name}
    without = joint_positions(settings, artifacts._replace(domains=others), launch)
    users = {company: customers_tested(domain) for company, domain in others.items()}
    positions = {WITHOUT: without, label: {company: result.positions[label][company] for company in others}}
    tests = compare_table(
        of_one_run(positions),
        compared_by(of_one_run(positions)),
        [(WITHOUT, label)],
        persons=shared_persons(users),
    )
    return {"tests": comparisons_data(tests)}


def joint_positions(settings: Settings, artifacts: BaseArtifacts, launch: Launch) -> Positions:
    """Test positions of the joint models of the companies in ``artifacts.domains``, trained from the student on."""
    settings = settings._replace(run=dataclasses.replace(settings.run, hyperparameter_candidates=(), local_row="off"))
    models, rounds = prepare_rounds(settings, artifacts, launch)
    run = ended(settings, models, rounds, artifacts, train(rounds))
    scales = {name: chosen_scale(settings, run.joined(name)) for name in artifacts.domains}

    def model_of(name: str) -> ClientModel:
        return run.joined(name).scaled(scales[name])

    texts = item_texts_of(settings, artifacts, launch.device)
    return system_of(Fitting(settings, artifacts, texts), run.method.name, model_of, list(scales)).whole["test"]
