"""NVIDIA FLARE between a server and its sites: a model controller there, an executor here; jobs and startup kits.

FLARE authenticates, encrypts and carries; every message is a blob of `fedecider.deployment.messages`. Each party
reads where its own things lie from a YAML file of its own (`PartyFile`), which the environment variable
``FEDECIDER_PARTY`` names: nothing that another party sends decides what is read or written on a machine. No code
travels either: a job has the names of two classes below, which every party has installed, so that sites can forbid
jobs with code. A script of the Client API would have to travel.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from nvflare.job_config.api import FedJob

from fedecider.deployment.messages import Message, pack
from fedecider.deployment.project import PartyFile, party_file, read_project, site_names
from fedecider.deployment.run import make_site, serve
from fedecider.deployment.site import Answer
from fedecider.engine.track import GROUP
from fedecider.federation.record import upload_notes, write_json
from fedecider.running.damage import damage_names
from fedecider.running.launch import start
from fedecider.running.rounds import round_text
from fedecider.running.run_folder import RunFolder

logger = logging.getLogger(__name__)

PARTY = "FEDECIDER_PARTY"
"""Environment variable: a party's file, or a folder that holds ``<name>.yaml`` for every party (simulation)."""
SERVER = "server"
MESSAGE = "message"
JOB = "fedecider"
ORGANISATION = "fedecider"
ADMIN = "admin@fedecider.org"
"""Name of the one administrator in FLARE's terms, who starts and watches jobs; no mail is sent anywhere."""


def read_party(name: str) -> PartyFile:
    """The file of the party ``name``, by the environment variable.

    Raises:
        ValueError: the variable is not set, or there is no such file, or it is damaged.
    """
    given = os.environ.get(PARTY, "")
    path = Path(given) / f"{name}.yaml" if Path(given).is_dir() else Path(given)
    if not given or not path.is_file():
        raise ValueError(f"got {PARTY}={given!r}, expected the file of {name}: start with scripts/deploy.py start")
    return party_file(path)


class RoundsController(ModelController):
    """Runs the rounds of a project in FLARE's server job; ``sites`` are the project's names -> FLARE's."""

    def __init__(self, sites: dict[str, str], resume: bool = False) -> None:
        super().__init__()
        self.sites = sites
        self.resume = resume

    def run(self) -> None:
        """Called by FLARE when the job starts."""
        party = read_party(SERVER)
        project = read_project(Path(party.project))
        if party.num_threads:
            torch.set_num_threads(party.num_threads)
        names = [self.sites[name] for name in project.names]
        resume = self.resume and (Path(party.output) / "run.json").is_file()

        def exchange(sent: Mapping[int, bytes], deadline_s: float) -> dict[int, bytes]:
            return self._exchange({names[site]: (site, blob) for site, blob in sent.items()}, deadline_s)

        num_rounds = project.settings.run.num_rounds

        def log(record: dict) -> None:
            for text in [round_text(record, num_rounds), *upload_notes([record], project.client_names)]:
                self.info(text)

        serve(project, party, exchange, torch.device("cpu"), resume=resume, on_round=log)

    def _exchange(self, sent: Mapping[str, tuple[int, bytes]], deadline_s: float) -> dict[int, bytes]:
        answers: dict[int, bytes] = {}
        for name, (site, blob) in sent.items():

            def heard(sender: str, answer: bytes, site: int = site, name: str = name) -> None:
                if sender == name:
                    answers[site] = answer

            self.send_model(data=of_blob(blob), targets=[name], timeout=int(deadline_s), callback=heard)
        ends = time.monotonic() + deadline_s if deadline_s else float("inf")
        while len(answers) < len(sent) and time.monotonic() < ends and not self.abort_signal.triggered:
            time.sleep(0.02)
        if self.abort_signal.triggered:
            raise RuntimeError("the job was aborted")
        return dict(answers)

    def _process_result(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Called by FLARE for every answer, in place of its own: that ends the job of all for one site's failure."""
        heard = client_task.task.get_prop(AppConstants.TASK_PROP_CALLBACK)
        heard(client_task.client.name, to_blob(client_task.result))  # the name by which FLARE knows who sent it
        client_task.result = None


class SiteExecutor(Executor):
    """Answers the controller's messages in FLARE's job of a site, which is made ready at the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self._answer: Answer | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Called by FLARE for every message."""
        blob = to_blob(shareable)
        try:
            self._answer = self._answer or _made_ready(fl_ctx.get_identity_name())
            answer = self._answer(blob)
        except Exception:  # raised, nobody would know why there is no answer; its text may name what is private
            logger.exception("this site could not be made ready")
            answer = pack(Message("error", 0, {}, {"reason": "the site could not be made ready, see its log"}))
        return FLModelUtils.to_shareable(of_blob(answer))


def _made_ready(name: str) -> Answer:
    party = read_party(name)
    launch = start(party.num_threads)
    project = read_project(Path(party.project))
    return make_site(project, party, launch).answer


def of_blob(blob: bytes) -> FLModel:
    """FLARE's wrapping of a message: one array of bytes."""
    return FLModel(params_type=ParamsType.FULL, params={MESSAGE: np.frombuffer(blob, np.uint8)})


def to_blob(shareable: Shareable) -> bytes:
    """The message in FLARE's wrapping; empty where there is none, which nobody takes for one."""
    try:
        given: Any = FLModelUtils.from_shareable(shareable).params[MESSAGE]
    except Exception:  # FLARE has no one kind for what a hostile party may put there
        return b""
    return given.tobytes() if isinstance(given, np.ndarray) and given.dtype == np.uint8 else b""


def installed() -> list[str]:
    """What every party has installed, which FLARE would send along: ours, and the packages of tracks."""
    return sorted(
        {"fedecider", "idgen", "distill", *(point.module.partition(".")[0] for point in entry_points(group=GROUP))}
    )


def make_job(clients: Sequence[str], resume: bool = False, min_clients: int | None = None) -> FedJob:
    """The job that runs a project: the controller at the server, the executor at every site."""
    sites = site_names(clients)
    job = FedJob(name=JOB, min_clients=min_clients or len(sites))
    job.set_app_packages(installed())
    job.to_server(RoundsController(sites, resume))
    for site in sites.values():
        job.to(SiteExecutor(), site)
    return job


def simulate_parties(clients: Sequence[str], files: Mapping[str, PartyFile], output: Path) -> None:
    """Run every party with its file as a process of this machine, without certificates, in FLARE's simulator; the
    server's files end in ``output`` itself.

    Raises:
        ValueError: the server came to no result.
    """
    parties, server, workspace = output / "parties", output / SERVER, (output / "flare").absolute()
    parties.mkdir()
    for name, file in files.items():
        (parties / f"{name}.yaml").write_text(yaml.safe_dump(asdict(file)))
    os.environ[PARTY] = str(parties.absolute())
    (workspace / "local").mkdir(parents=True)
    _allow_own(workspace / "local", {"format_version": 2})
    sites = list(site_names(clients).values())
    make_job(clients).simulator_run(str(workspace), clients=sites, threads=len(sites))
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


def check_certificate(kit: Path, name: str = "") -> None:
    """See that a kit has the certificate of ``name`` (empty: of anybody) by its own authority, and that it is valid
    today: the other side refuses any other one, without a word that this side could show.

    Raises:
        ValueError: it has not.
    """
    file = kit / "startup" / ("server.crt" if kind_of(kit) == "server" else "client.crt")
    with damage_names(file):
        own, root = (x509.load_pem_x509_certificate(one.read_bytes()) for one in (file, file.with_name("rootCA.pem")))
        owner = str(own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    issued, begins, ends = False, own.not_valid_before_utc, own.not_valid_after_utc
    with suppress(InvalidSignature, ValueError):
        own.verify_directly_issued_by(root)
        issued = True
    for wrong, got, expected in (
        (name not in ("", owner), f"the certificate of {owner}", f"that of {name}"),
        (not issued, "a certificate of another authority", "one of the kit's rootCA.pem"),
        (not begins <= datetime.now(timezone.utc) <= ends, f"a certificate from {begins} to {ends}", "a valid one"),
    ):
        if wrong:
            raise ValueError(f"got {got} in {kit}, expected {expected}. Take the party's own kit, or provision again")


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
    """An administrator's session with the server.

    Raises:
        ValueError: it is another kit, one that `check_certificate` refuses, or the server does not answer it.
    """
    if kind_of(kit) != "admin":
        raise ValueError(f"got {kit}, expected the administrator's startup kit")
    check_certificate(kit, ADMIN)
    try:
        opened = new_secure_session(ADMIN, str(kit.absolute()))
    except Exception as error:  # FLARE has a dozen kinds, of which few are errors of the system
        raise ValueError(
            f"got no session with the server of {kit} ({error}), expected one. Start the server, with its kit of the "
            "same provision"
        ) from error
    try:
        yield opened
    finally:
        opened.close()


def submit(kit: Path, clients: Sequence[str], resume: bool, min_clients: int | None = None) -> str:
    """Start a run, or go on with the one that the server's folder holds; returns FLARE's number of the job."""
    with tempfile.TemporaryDirectory() as scratch, session(kit) as admin:
        make_job(clients, resume, min_clients).export_job(scratch)
        return str(admin.submit_job(str(Path(scratch) / JOB)))
