"""Who gains from whom: a finished run again without one company at a time, from its own stages and settings.

Draws are named after companies (`fedecider.federation.streams`), so that the others train on the same batches as in the
run, and what differs is who is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedecider.audit.attacks import finished
from fedecider.cross_silo.command_line import recorded_settings
from fedecider.cross_silo.entries import Fitting, Positions, item_texts_of, with_hybrid
from fedecider.cross_silo.federate import prepare_rounds, rounds_of
from fedecider.cross_silo.joining import system_of
from fedecider.cross_silo.prepare import (
    BaseArtifacts,
    build_base_artifacts,
    check_same_student,
    chosen_scales,
    data_of_run,
    reported_model,
)
from fedecider.cross_silo.settings import Settings
from fedecider.engine.run import train
from fedecider.evaluation.per_user import read_per_user
from fedecider.evaluation.statistics import compare_table, shared_persons
from fedecider.federation.record import write_json
from fedecider.federation.streams import stream
from fedecider.methods import METHODS
from fedecider.models.client_model import ClientModel
from fedecider.report.tables import COMPARED, comparisons_data
from fedecider.running.launch import Launch
from fedecider.running.progress import log_line
from fedecider.running.run_folder import RunFolder, locked, read_metrics

WITHOUT = "without"
"""Its place in ``metrics.json``, and in a test the name of what others have without a company."""
FEWEST = 3
"""Without one of two companies the other is alone, which every run shows already."""


def leave_out(run: str | Path, companies: Sequence[str], launch: Launch, data: str = "") -> dict[str, Any]:
    """``without`` of ``metrics.json``, which is written after every company: who is in it already is not trained again.

    Args:
        run: The run folder.
        companies: Those that are left out, one after the other; if empty, each.
        launch: Where it is trained.
        data: The folder of prepared data, when it is not where the run found it.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it did not finish, has fewer than three companies or other data now, or nobody joins in it.
    """
    root = Path(run)
    folder, record, metrics = finished(root)
    settings = recorded_settings(root, data)
    names = list(metrics["domains"])
    wanted = list(companies) or names
    _check(settings, names, wanted, root)
    data_of_run(settings.run, record, root)
    with locked(folder.lock, f"got the run {root}, which another command writes, expected it to be free. Wait for it"):
        metrics = read_metrics(folder)  # of those who had the lock before
        found: dict[str, Any] = dict(metrics.get(WITHOUT, {}))
        missing = [name for name in wanted if name not in found]
        artifacts = build_base_artifacts(settings.run, launch)
        check_same_student(folder, artifacts, root)
        for number, name in enumerate(missing, 1):
            log_line(f"without {name} ({number} of {len(missing)}): {len(names) - 1} companies, as in the run")
            found[name] = _compared(settings, artifacts, folder, metrics, name, launch)
            write_json(folder.metrics, {**metrics, WITHOUT: {one: found[one] for one in names if one in found}})
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
    folder: RunFolder,
    metrics: Mapping[str, Any],
    name: str,
    launch: Launch,
) -> dict[str, Any]:
    """Every other company without ``name``, less what it has in the run: paired tests over its customers.

    Holm's correction is over the companies and metrics of one that is left out; where it is told, over all that are.
    """
    label = with_hybrid(metrics["method"]) if settings.run.hybrid.kind != "none" else metrics["reported"]
    others = {one: domain for one, domain in artifacts.domains.items() if one != name}
    without = joint_positions(settings, artifacts._replace(domains=others), launch)
    rows = {
        one.domain: one.position_U
        for one in read_per_user(folder.per_user)
        if (one.split, one.variant) == ("test", label) and one.domain in others
    }
    users = {one: domain.clients.users for one, domain in others.items()}
    tests = compare_table(
        {WITHOUT: without, label: {one: rows[one] for one in others}},
        stream(0, "without", name),
        COMPARED,
        [(WITHOUT, label)],
        persons=shared_persons(users),
    )
    return {"tests": comparisons_data(tests)}


def joint_positions(settings: Settings, artifacts: BaseArtifacts, launch: Launch) -> Positions:
    """Test positions of the joint models of the companies in ``artifacts.domains``, trained from the student on."""
    candidates = dataclasses.replace(settings.run, hyperparameter_candidates=())
    settings = settings._replace(run=candidates)
    prepared = prepare_rounds(settings, artifacts, launch)
    state = train(rounds_of(settings, prepared, launch))
    method, models = prepared.method, prepared.models.by_itself()
    names = list(artifacts.domains)
    scales = chosen_scales(settings, method, models, state, names)

    def model_of(name: str) -> ClientModel:
        return reported_model(settings, method, models, state, models.names.index(name)).scaled(scales[name])

    texts = item_texts_of(settings, artifacts, launch.device)
    return system_of(Fitting(settings, artifacts, texts), method.name, model_of, names).whole["test"]
