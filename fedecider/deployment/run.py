"""One deployed run of the LLM track: what the server does with a project and a line, what a site does at its end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedecider.deployment.counts import SiteCounts, share_counts, site_counts
from fedecider.deployment.faults import Answer, faulty
from fedecider.deployment.hosted import one_client
from fedecider.deployment.project import Party, Project, own_domain, party
from fedecider.deployment.secure import SiteSums, masking
from fedecider.deployment.server import STARTED, DeploymentConfig, Exchange, Line, run_deployed
from fedecider.deployment.site import Site
from fedecider.evaluation.metrics import CUTOFFS, MACRO, mean_metrics
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.experiment.federate import carries_update
from fedecider.experiment.results import privacy_data, say_results, write_models, write_table
from fedecider.federation.faults import MESSAGE_KINDS, UPLOAD_KINDS, read_faults
from fedecider.federation.method import Block, Download
from fedecider.federation.privacy import protector
from fedecider.federation.record import Recorder, write_json
from fedecider.federation.rounds import RoundSettings
from fedecider.federation.secure_rounds import SecureSums, check_takes_mean
from fedecider.federation.state import RunState
from fedecider.report.tables import rows_data
from fedecider.running.launch import Launch
from fedecider.running.options import load_yaml
from fedecider.running.run_folder import RunFolder, as_plain, opened_run, provenance, read_run

SCORES = tuple(f"{metric}@{cutoff}" for metric in ("hit", "ndcg") for cutoff in CUTOFFS)
"""Means over the own validation users that a site tells after every round."""
WIRE_FILE = "wire.json"


def serve(
    project: Project,
    exchange: Exchange,
    config: DeploymentConfig,
    output: Path,
    device: torch.device,
    resume: bool = False,
    on_round: Callable[[dict], None] = lambda record: None,
) -> Path:
    """Run all rounds of a project with the sites at the other end of ``exchange``; returns the server's run folder.

    It holds ``run.json``, ``rounds.jsonl``, ``checkpoints/``, ``metrics.json`` (what sites tell of their test items)
    and ``wire.json`` (bytes of every message since the run was last started or resumed).
    """
    settings = project.settings
    run = settings.run
    record = {
        "config": as_plain(settings.as_record()),
        "protocol": run.protocol,
        "data": {"project": project.run},
        "deployment": as_plain(config),
        STARTED: secrets.token_hex(8),
        **provenance(),
    }
    with opened_run(output, record, resume) as folder:
        served = party(project, {}, device)
        line = Line(exchange, config, project.run, project.names, started=read_run(output).get(STARTED, ""))
        state, told = run_deployed(
            served.method,
            line,
            RoundSettings(run.num_rounds, run.seed, run.participation, fingerprint=project.run, patience=run.patience),
            SCORES,
            recorder=Recorder(folder.rounds),
            checkpoints=folder.checkpoints,
            resume=resume,
            on_round=on_round,
            masking=masking(sums_of(project, served), line) if run.secure_sum else None,
            after_rounds=lambda round: share_counts(
                line, run.hybrid, run.seed, served.foundation.everyone, round, output
            ),
        )
        write_wire(line, output)
        write_json(folder.metrics, _server_metrics(project, state, told))
    return output


def write_wire(line: Line, output: Path) -> None:
    """What a run's messages weighed, and whom it refused at its end."""
    unit = "bytes of one message, since the run was last started or resumed"
    write_json(output / WIRE_FILE, {"unit": unit, "messages": line.carried, "refused_after_rounds": line.refused})


def make_site(project: Project, data: str, name: str, output: Path, launch: Launch, config: DeploymentConfig) -> Site:
    """The site of the client ``name``, whose prepared domain lies in ``data``; everything it writes is in ``output``.

    Raises:
        ValueError: what `own_domain` refuses.
    """
    domain = own_domain(project, data, name)
    own = party(project, {name: domain}, launch.device)
    client, settings = project.names.index(name), project.settings
    output.mkdir(parents=True, exist_ok=True)
    counts = site_counts(
        settings.run.hybrid, settings.run.seed, own.foundation, project.names, client, output, project.run
    )
    return Site(
        method=own.method,
        hosted=one_client(client),
        run=project.run,
        folder=output,
        scores=mean_metrics,
        finish=lambda state, download: _finish(project, own, client, output, launch, state, download, counts),
        most_bytes=config.max_bytes,
        protect=protector(own.method, settings.run.privacy, seed=None),
        spends=settings.run.num_rounds if privacy_data(settings, len(project.names)) else 0,
        sums=SiteSums(sums_of(project, own), client) if project.settings.run.secure_sum else None,
        counts=counts,
    )


def answer_of(project: Project, site: Site, faults: str, config: DeploymentConfig) -> Answer:
    """What answers for ``site``; with the file of a scenario in ``faults`` it plays what that says of its client."""
    if not faults:
        return site.answer
    listed = read_faults(load_yaml(Path(faults)), project.names, faults, (*UPLOAD_KINDS, *MESSAGE_KINDS))
    client, seed = site.hosted.clients[0], project.settings.run.seed
    return faulty(site.answer, client, listed, seed, carries_update, config.max_bytes, config.deadline_s)


def sums_of(project: Project, own: Party) -> SecureSums:
    """How a project's uploads are summed.

    Raises:
        ValueError: its method needs single uploads.
    """
    run = project.settings.run
    check_takes_mean(own.method)
    return SecureSums(run.seed, own_rows=own.recommender.own_rows)


def _finish(
    project: Project,
    own: Party,
    client: int,
    output: Path,
    launch: Launch,
    state: RunState,
    download: Download,
    counts: SiteCounts | None,
) -> Mapping[str, Any]:
    """Test, tables, memory and adapter of one site, as a simulated run writes them; returns the means it tells."""
    num_clients, settings = len(project.names), project.settings
    everywhere = {  # one row that is read under the client's number
        name: rows.expand(num_clients, *rows.shape[1:]) for name, rows in state.best_local.items()
    }
    method = own.method._replace(broadcast=lambda round, server, clients: download)
    asked = (settings, method, [Block(torch.tensor([client]), None)], own.recommender, own.foundation)
    own_positions = own.method.positions(own.method.views[0], download, state.best_local, asked[2][0], "valid")
    own_score = mean_metrics(own_positions[0])["ndcg@10"]
    ended = state._replace(best_local=everywhere, best_score=own_score)
    folder = RunFolder(output)
    models = write_models(*asked, ended, folder, launch, others=counts.found() if counts else {})
    assert models is not None, "a site is one process"
    say_results(settings, method, own.foundation, ended, folder, models)
    write_table(settings, method, ended, folder, models)
    return rows_data(models.rows, project.names[client])


def _server_metrics(project: Project, state: RunState, told: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Test figures of the sites that told them, and the macro means where all did."""
    protocol = get_protocol(project.settings.run.protocol)
    by_site = {project.names[client]: {"test": dict(rows)} for client, rows in told.items()}
    content: dict[str, Any] = {
        "protocol": protocol.name,
        "stamp": stamp(protocol),
        "method": project.settings.run.method,
        "best_round": state.best_round,
        "best_valid_ndcg@10": state.best_score,
        "domains": by_site,
    }
    if promised := privacy_data(project.settings, len(project.names)):
        content["privacy"] = promised
    if len(by_site) == len(project.names) > 1:
        first, *others = (site["test"] for site in by_site.values())
        content[MACRO] = {
            "test": {
                row: {metric: {"mean": _mean(by_site, row, metric)} for metric in metrics}
                for row, metrics in first.items()
                if all(other.get(row, {}).keys() == metrics.keys() for other in others)
            }
        }
    return content


def _mean(by_site: Mapping[str, Any], row: str, metric: str) -> float:
    return sum(site["test"][row][metric]["mean"] for site in by_site.values()) / len(by_site)
