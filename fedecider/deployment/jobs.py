"""FLARE's side of a project: jobs, its simulator, and startup kits with certificates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from nvflare.job_config.api import FedJob

from fedecider.deployment.flare import PARTY, SERVER, PartyFile, RoundsController, SiteExecutor
from fedecider.deployment.project import site_names
from fedecider.federation.record import write_json
from fedecider.running.run_folder import RunFolder, check_output

JOB = "fedecider"
INSTALLED = ("fedecider", "idgen", "distill", "embedding_fr")
"""What every party has installed: FLARE would send it along."""
ORGANISATION = "fedecider"
ADMIN = "admin@fedecider.org"
"""Name of the one administrator in FLARE's terms, who starts and watches jobs; no mail is sent anywhere."""
PORTS = (8002, 8003)
"""What sites (first) and the administrator reach the server by."""


def make_job(clients: Sequence[str], resume: bool = False, min_clients: int | None = None) -> FedJob:
    """The job that runs a project: the controller at the server, the executor at every site."""
    sites = site_names(clients)
    job = FedJob(name=JOB, min_clients=min_clients or len(sites))
    job.set_app_packages(list(INSTALLED))
    job.to_server(RoundsController(sites, resume))
    for site in sites.values():
        job.to(SiteExecutor(), site)
    return job


def simulate(clients: Sequence[str], parties: Path, workspace: Path) -> None:
    """Run a project in FLARE's simulator: every party a process of this machine, without certificates.

    ``parties`` holds a file for the server and one for every site.
    """
    os.environ[PARTY] = str(parties)
    (workspace / "local").mkdir(parents=True)
    _allow_own(workspace / "local", {"format_version": 2})
    sites = list(site_names(clients).values())
    make_job(clients).simulator_run(str(workspace), clients=sites, threads=len(sites))


def free_output(given: str) -> Path:
    """Where a simulation may write.

    Raises:
        ValueError: no folder was given, or one that holds something.
    """
    if not given:
        raise ValueError("got no output, expected the run folder: --output runs/<name>")
    output = Path(given)
    check_output(output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"got the folder {output}, which is not empty, expected a free place for the run")
    return output


def simulate_parties(clients: Sequence[str], files: Mapping[str, PartyFile], output: Path) -> None:
    """Run every party with its file as a process of this machine; the server's files end in ``output`` itself.

    Raises:
        ValueError: the server came to no result.
    """
    parties, server = output / "parties", output / SERVER
    parties.mkdir()
    for name, file in files.items():
        (parties / f"{name}.yaml").write_text(yaml.safe_dump(asdict(file)))
    simulate(clients, parties.absolute(), (output / "flare").absolute())
    if not RunFolder(server).metrics.is_file():
        raise ValueError(f"got no result of the server, expected one: see {output / 'flare'} for what FLARE logged")
    for path in server.iterdir():
        path.rename(output / path.name)
    server.rmdir()


def provision(clients: Sequence[str], host: str, ports: tuple[int, int], output: Path) -> list[Path]:
    """Write startup kits with certificates of a new authority: the server's, one for every site, the administrator's.

    ``output/state`` holds the authority's private key, with which more sites can be added: it stays with whoever
    provisions. A kit holds its party's private key and belongs to that party alone.

    Raises:
        ValueError: FLARE could not make them.
    """
    people: list[dict[str, Any]] = [
        {"name": host, "type": "server", "org": ORGANISATION, "fed_learn_port": ports[0], "admin_port": ports[1]},
        *({"name": site, "type": "client", "org": ORGANISATION} for site in site_names(clients).values()),
        {"name": ADMIN, "type": "admin", "org": ORGANISATION, "role": "project_admin"},
    ]
    builders = "nvflare.lighter.impl"
    content = {
        "api_version": 3,
        "name": JOB,
        "description": "FeDecider",
        "participants": people,
        "builders": [
            {"path": f"{builders}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{builders}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": f"{builders}.cert.CertBuilder"},
            {"path": f"{builders}.signature.SignatureBuilder"},
        ],
    }
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "project.yml"
        file.write_text(yaml.safe_dump(content))
        words = [sys.executable, "-m", "nvflare.lighter.provision", "-p", str(file), "-w", scratch, "--force"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        made = Path(scratch) / JOB / "prod_00"
        if done.returncode != 0 or not made.is_dir():
            said = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise ValueError(f"got no startup kits for {host}, expected them; FLARE says: {' '.join(said)}")
        shutil.copytree(made, output, dirs_exist_ok=True)
        shutil.copytree(Path(scratch) / JOB / "state", output / "state")
        (output / "state").chmod(0o700)
    kits = sorted(path for path in output.iterdir() if (path / "startup").is_dir())
    for kit in kits:
        default = kit / "local" / "resources.json.default"
        if default.is_file():
            _allow_own(kit / "local", json.loads(default.read_text()))
    return kits


def _allow_own(local: Path, resources: dict[str, Any]) -> None:
    """Let a party load the two classes of a run and no other: whatever else a job asks for fails.

    And keep its logs where they are: FLARE would send those of sites to the server while they run.
    """
    allowed = [f"{one.__module__}.{one.__qualname__}" for one in (RoundsController, SiteExecutor)]
    own = {"class_allow_list": allowed, "allow_log_streaming": False}
    write_json(local / "resources.json", {**resources, **own})


def kind_of(kit: Path) -> str:
    """``server``, ``site`` or ``admin``, whose startup kit ``kit`` is.

    Raises:
        ValueError: it is none.
    """
    names = {"fed_server.json": "server", "fed_client.json": "site", "fed_admin.json": "admin"}
    found = [kind for file, kind in names.items() if (kit / "startup" / file).is_file()]
    if len(found) != 1:
        raise ValueError(f"got {kit}, which is no startup kit, expected one of those that deploy.py provision wrote")
    return found[0]


def start_party(kit: Path, party: Path) -> None:
    """Become the server or site of ``kit``; returns when it is shut down.

    FLARE's own start script restarts a party that was killed, within the same process.
    """
    if kind_of(kit) == "server":
        _store_in(kit)
    environment = {**os.environ, PARTY: str(party.absolute()), "PYTHONUNBUFFERED": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    os.execve("/bin/bash", ["bash", str((kit / "startup" / "sub_start.sh").absolute())], environment)


def _store_in(kit: Path) -> None:
    """Let a server keep its jobs in its kit, wherever that was put.

    FLARE keeps them below ``/tmp/nvflare``, which two servers of a machine share and a restart of it may empty.
    """
    file = kit / "local" / "resources.json"
    resources = json.loads(file.read_text())
    jobs = next(one for one in resources["components"] if one["id"] == "job_manager")
    jobs["args"]["uri_root"] = str(kit.absolute() / "jobs")
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(kit.absolute() / "snapshots")
    write_json(file, resources)


@contextmanager
def session(kit: Path) -> Iterator[Session]:
    """An administrator's session with the server."""
    if kind_of(kit) != "admin":
        raise ValueError(f"got {kit}, expected the administrator's startup kit")
    opened = new_secure_session(ADMIN, str(kit.absolute()))
    try:
        yield opened
    finally:
        opened.close()


def submit(kit: Path, clients: Sequence[str], resume: bool, min_clients: int | None = None) -> str:
    """Start a run, or go on with the one that the server's folder holds; returns FLARE's number of the job."""
    with tempfile.TemporaryDirectory() as scratch, session(kit) as admin:
        make_job(clients, resume, min_clients).export_job(scratch)
        return str(admin.submit_job(str(Path(scratch) / JOB)))
