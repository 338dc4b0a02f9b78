"""FLARE's side of a project: jobs, its simulator, and startup kits with certificates."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

from fedecider.deployment import site_script
from fedecider.deployment.flare import PARTY, RoundsController

JOB = "fedecider"


def site_names(clients: Sequence[str]) -> dict[str, str]:
    """Client -> a name that FLARE and a certificate take: letters, digits and hyphens."""
    found = {client: "site-" + re.sub(r"[^a-z0-9]+", "-", client.lower()).strip("-") for client in clients}
    if len(set(found.values())) != len(found):
        raise ValueError(f"got clients {list(clients)}, expected names that differ in letters and digits")
    return found


def make_job(clients: Sequence[str], resume: bool = False, min_clients: int | None = None) -> FedJob:
    """The job that runs a project: the controller at the server, the script at every site."""
    sites = site_names(clients)
    job = FedJob(name=JOB, min_clients=min_clients or len(sites))
    job.to_server(RoundsController(sites, resume))
    for site in sites.values():
        runner = ScriptRunner(script=str(Path(site_script.__file__)), framework=FrameworkType.RAW)
        job.to(runner, site)
    return job


def simulate(clients: Sequence[str], parties: Path, workspace: Path) -> None:
    """Run a project in FLARE's simulator: every party a process of this machine, without certificates.

    ``parties`` holds a file for the server and one for every site.
    """
    os.environ[PARTY] = str(parties)
    sites = list(site_names(clients).values())
    make_job(clients).simulator_run(str(workspace), clients=sites, threads=len(sites))
