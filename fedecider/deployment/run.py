"""One deployed run: how the server runs a project over a channel, and how a site is built."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedecider.bounds import Diverged
from fedecider.deployment.messages import STARTED, Channel, Transport
from fedecider.deployment.project import PartyFile, Project
from fedecider.deployment.server import run_deployed
from fedecider.deployment.site import Site
from fedecider.evaluation.metrics import MACRO
from fedecider.federation.callbacks import Checkpoints
from fedecider.federation.record import Recorder, read_records, write_json
from fedecider.running.launch import Launch
from fedecider.running.manifest import write_manifest
from fedecider.running.plain import as_plain
from fedecider.running.run_folder import opened_run, provenance, read_run

WIRE_FILE = "wire.json"


def serve(
    project: Project,
    party: PartyFile,
    transport: Transport,
    device: torch.device,
    resume: bool = False,
    on_round: Callable[[dict], None] = lambda record: None,
) -> Path:
    """Run all rounds of a project with the sites at the other end of ``transport``; returns the server's output
    directory.

    It holds ``run.json``, ``rounds.jsonl``, ``metrics.json`` (means of test items as sites tell them), ``wire.json``
    (bytes of every message since the last start) and ``checkpoints/``, one a round: a site keeps its last two, and the
    server must be able to go back as far.

    Raises:
        Diverged: no client's numbers could be used any more; ``metrics.json`` and ``report.html`` say so.
    """
    run, output, config = project.settings.run, Path(party.output), party.deployment
    plan = project.parts.server(project, output, device)
    record = {
        "config": as_plain(project.settings.as_record()),
        "protocol": run.protocol,
        "data": {"project": project.run},
        "deployment": as_plain(config),
        STARTED: secrets.token_hex(8),
        **plan.about,
        **provenance(),
    }
    with opened_run(output, record, resume) as folder:
        hosts, started = list(project.hosts.values()), read_run(output).get(STARTED, "")
        channel = Channel(transport, config, project.run, project.names, hosts=hosts, started=started)
        try:
            state, told = run_deployed(
                plan,
                channel,
                checkpoints=Checkpoints(folder.checkpoints, project.run, Recorder(folder.rounds)),
                resume=resume,
                on_round=on_round,
                names=project.client_names,
            )
        except Diverged as error:
            from fedecider.engine.page import write_diverged  # pages are for the end of a run

            write_diverged(folder, plan.method.name, str(error), project.client_names)
            raise
        unit = "bytes of one message, since the run was last started or resumed"
        wire = {"unit": unit, "messages": channel.carried, "refused_after_rounds": channel.refused}
        write_json(output / WIRE_FILE, wire)
        facts = plan.facts(state, read_records(folder.rounds))
        tests = _tests(project, {project.names[site]: dict(rows) for site, rows in told.items()})
        write_json(folder.metrics, {**project.head(state), "best_valid_ndcg@10": state.best_score, **facts, **tests})
        write_manifest(output)
    return output


def _tests(project: Project, tests: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Test figures of the sites that told them; and where all did, the means over all clients, of the rows that every
    site has: the macro mean where a site is a domain."""
    sizes = {name: len(own) for name, own in project.hosts.items()}

    def mean(row: str, metric: str) -> dict[str, float]:
        return {"mean": math.fsum(size * tests[name][row][metric]["mean"] for name, size in sizes.items()) / total}

    total, means = sum(sizes.values()), {}
    several = total > len(sizes)
    if tests.keys() == sizes.keys() and (several or total > 1):
        first, *others = tests.values()
        means = {
            row: {metric: mean(row, metric) for metric in metrics}
            for row, metrics in first.items()
            if all(other.get(row, {}).keys() == metrics.keys() for other in others)
        }
    over_all: dict[str, Any] = {"test": means} if means else {}
    if several:
        return {"sites": {name: {"num_users": sizes[name], "test": test} for name, test in tests.items()}, **over_all}
    return {"domains": {name: {"test": test} for name, test in tests.items()}, **({MACRO: over_all} if means else {})}


def make_site(project: Project, party: PartyFile, launch: Launch) -> Site:
    """The site that ``party`` describes; everything it writes is in its output.

    Raises:
        ValueError: the project has no such site, or it has other data than the project expects.
    """
    if party.client not in project.hosts:
        raise ValueError(f"got the site {party.client}, expected one of the project's: {', '.join(project.names)}")
    site = project.parts.site(project, party, launch)
    Path(party.output).mkdir(parents=True, exist_ok=True)
    return site
