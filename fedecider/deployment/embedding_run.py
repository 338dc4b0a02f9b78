"""One deployed run of the embedding track: what the server does with a project and a line, what a site does at its end.

Shape legend: U users of a site.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embedding_fr.blocks import Population, block_packer, build_population
from embedding_fr.results import privacy_text
from embedding_fr.setup import (
    block_bytes,
    check_server_memory,
    check_settings,
    eval_users,
    keep_freed_memory,
    working_set,
)
from fedecider.deployment.embedding_project import EmbeddingProject, deployable, own_interactions
from fedecider.deployment.faults import Answer
from fedecider.deployment.hosted import Hosted
from fedecider.deployment.run import write_wire
from fedecider.deployment.server import STARTED, DeploymentConfig, Exchange, Line, run_deployed, scored_together
from fedecider.deployment.site import Site
from fedecider.evaluation.metrics import mean_metrics, user_metrics
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.federation.method import Block, Download, FederatedMethod
from fedecider.federation.privacy import protector
from fedecider.federation.record import Recorder, read_records, write_json, write_text
from fedecider.federation.rounds import RoundSettings
from fedecider.federation.state import RunState
from fedecider.report.analyses import median_seconds, total_bytes
from fedecider.report.tables import ResultTable, markdown_table, result_rows, rows_data, view_labels
from fedecider.running.launch import Launch
from fedecider.running.run_folder import RunFolder, as_plain, opened_run, provenance, read_run

SCORES = tuple(user_metrics(torch.zeros(1)))
"""Means over the own validation users that a site tells after every round."""


def serve(
    project: EmbeddingProject,
    exchange: Exchange,
    config: DeploymentConfig,
    output: Path,
    device: torch.device,
    resume: bool = False,
    on_round: Callable[[dict], None] = lambda record: None,
) -> Path:
    """Run all rounds of a project with the sites at the other end of ``exchange``; returns the server's run folder.

    It holds ``run.json``, ``rounds.jsonl``, ``checkpoints/`` (of every round, since sites keep two), ``metrics.json``
    and ``wire.json``, as one of the LLM track does.
    """
    run = project.settings.run
    check_server_memory(run.method, project.settings.method, len(project.item_keys))
    record = {
        "config": as_plain(project.settings.as_record()),
        "protocol": run.protocol,
        "data": {"project": project.run},
        "deployment": as_plain(config),
        STARTED: secrets.token_hex(8),
        **provenance(),
    }
    with opened_run(output, record, resume) as folder:
        hosts, started = list(project.hosts.values()), read_run(output).get(STARTED, "")
        line = Line(exchange, config, project.run, project.names, hosts=hosts, started=started)
        method = deployable(project, device)
        state, told = run_deployed(
            method,
            line,
            RoundSettings(
                run.num_rounds,
                run.seed,
                run.participation,
                fingerprint=project.run,
                patience=run.patience,
                eval_every=run.eval_every,
            ),
            SCORES,
            recorder=Recorder(folder.rounds),
            checkpoints=folder.checkpoints,
            resume=resume,
            on_round=on_round,
            summarise=scored_together,
            summarise_logs=lambda logs: [{"clients": len(logs)}],
            validated=eval_users(run, project.num_clients) or None,
        )
        write_wire(line, output)
        write_json(folder.metrics, _server_metrics(project, method, state, told, read_records(folder.rounds)))
    return output


def make_site(
    project: EmbeddingProject, data: str, name: str, output: Path, launch: Launch, config: DeploymentConfig
) -> Site:
    """The site ``name``, whose users' interactions lie in ``data``; everything it writes is in ``output``.

    Its local state holds its own users only, in memory: of methods with personal tables a table for each. Everything is
    on the CPU, as messages and states are, whatever ``launch`` has found.

    Raises:
        ValueError: what `own_interactions` refuses.
    """
    settings, run = project.settings, project.settings.run
    keep_freed_memory()
    users, sequences = own_interactions(project, data, name)
    device = torch.device("cpu")
    num_items = len(project.item_keys)
    population = build_population(sequences, num_items, get_protocol(run.protocol), run.seed, device)
    check_settings(settings, population)
    hosted = hosted_users(project, population, name, device)
    method = deployable(project, device)
    output.mkdir(parents=True, exist_ok=True)
    return Site(
        method=method,
        hosted=hosted,
        run=project.run,
        folder=output,
        scores=mean_metrics,
        finish=lambda state, download: _finish(project, method, hosted, users, RunFolder(output), state, download),
        most_bytes=config.max_bytes,
        protect=protector(method, settings.privacy, seed=None),
        spends=run.num_rounds if settings.privacy.clips else 0,
    )


def answer_of(project: EmbeddingProject, site: Site, faults: str, config: DeploymentConfig) -> Answer:
    """What answers for ``site``.

    Raises:
        ValueError: a scenario is asked for.
    """
    if faults:
        raise ValueError(f"got faults {faults}, expected none at a site of the embedding track: simulate them")
    return site.answer


def hosted_users(project: EmbeddingProject, population: Population, name: str, device: torch.device) -> Hosted:
    """The users of a site, packed by their places among them, known by their numbers in the run."""
    clients, settings = project.hosts[name], project.settings
    client_U, place_of = torch.tensor(clients), {client: place for place, client in enumerate(clients)}
    client_bytes = working_set(settings, population.num_items, device)
    pack = block_packer(population, client_bytes, block_bytes(settings.run, device))

    def packed(asked: Sequence[int]) -> list[Block]:
        blocks = pack([place_of[client] for client in asked])
        return [block._replace(clients=client_U[block.clients]) for block in blocks]

    scored = set(eval_users(settings.run, project.num_clients) or clients)
    return Hosted(clients, packed, [client for client in clients if client in scored])


def _finish(
    project: EmbeddingProject,
    method: FederatedMethod,
    hosted: Hosted,
    users: list[str],
    folder: RunFolder,
    state: RunState,
    download: Download,
) -> Mapping[str, Any]:
    """Test and validation of the own users in the selected round, into the site's folder; returns the test means."""
    name, protocol = project.dataset, get_protocol(project.settings.run.protocol)

    def found(split: str) -> dict[str, Tensor]:
        return {
            label: hosted.positions(method, view, download, state.best_local, hosted.clients, split)
            for view, label in view_labels(method.name, method.views).items()
        }

    test, valid = found("test"), found("valid")
    rows, valid_rows = (result_rows({label: {name: one} for label, one in part.items()}) for part in (test, valid))
    content = {
        **_head(project, method, state),
        "num_users": len(users),
        "test": rows_data(rows, name),
        "valid": rows_data(valid_rows, name),
    }
    write_json(folder.metrics, content)
    records = (UserPositions(name, users, "test", label, state.best_round, one) for label, one in test.items())
    write_per_user(folder.per_user, records)
    note = f"{len(users)} of {project.num_clients} users: those of this site; round {state.best_round}"
    title = f"Test of {method.name} on {name}"
    write_text(folder.results, markdown_table(ResultTable(rows, protocol, [note]), title=title))
    return {
        row: {metric: {"mean": value["mean"]} for metric, value in metrics.items()}
        for row, metrics in content["test"].items()
    }  # an interval over few users is made of their own figures


def _head(project: EmbeddingProject, method: FederatedMethod, state: RunState) -> dict[str, Any]:
    protocol = get_protocol(project.settings.run.protocol)
    return {
        "protocol": protocol.name,
        "stamp": stamp(protocol),
        "method": method.name,
        "dataset": project.dataset,
        "num_items": len(project.item_keys),
        "reported": view_labels(method.name, method.views)[method.views[0]],
        "best_round": state.best_round,
        "last_round": state.round,
        "privacy": privacy_text(project.settings, project.num_clients),
    }


def _server_metrics(
    project: EmbeddingProject,
    method: FederatedMethod,
    state: RunState,
    told: Mapping[int, Mapping[str, Any]],
    records: list[dict],
) -> dict[str, Any]:
    """Test means of every site that told them, and over all users where all did."""
    users = {name: len(own) for name, own in project.hosts.items()}
    tests = {project.names[site]: dict(rows) for site, rows in told.items()}
    content = {
        **_head(project, method, state),
        "num_users": project.num_clients,
        "best_valid_ndcg@10": state.best_score,
        "num_eval_users": len(eval_users(project.settings.run, project.num_clients)) or project.num_clients,
        "seconds": median_seconds(records),
        "bytes": total_bytes(records),
        "sites": {name: {"num_users": users[name], "test": test} for name, test in tests.items()},
    }
    labels = list(view_labels(method.name, method.views).values())
    if tests.keys() == users.keys() and all(_has_all(test, labels) for test in tests.values()):
        content["test"] = {label: _means(users, tests, label) for label in labels}
    return content


def _has_all(test: Mapping[str, Any], labels: list[str]) -> bool:
    return all(metric in test.get(label, {}) for label in labels for metric in SCORES)


def _means(users: Mapping[str, int], tests: Mapping[str, Any], label: str) -> dict[str, dict[str, float]]:
    """Over all users, from those of the sites."""
    total = sum(users.values())
    return {
        metric: {"mean": math.fsum(users[name] * test[label][metric]["mean"] for name, test in tests.items()) / total}
        for metric in SCORES
    }
