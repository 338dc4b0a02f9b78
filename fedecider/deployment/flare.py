"""NVIDIA FLARE as the line between a server and its sites: a model controller there, an executor here.

FLARE authenticates, encrypts and carries; every message is a blob of `fedecider.deployment.messages`. Each party
reads where its own things lie from a YAML file of its own (`PartyFile`), which the environment variable
``FEDECIDER_PARTY`` names: nothing that another party sends decides what is read or written on a machine. No code
travels either: a job has the names of two classes below, which every party has installed, so that sites can forbid
jobs with code. A script of the Client API would have to travel.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.model_controller import ModelController

from fedecider.bounds import check
from fedecider.deployment.faults import Answer
from fedecider.deployment.messages import Message, pack
from fedecider.deployment.server import DeploymentConfig
from fedecider.deployment.tracks import track_of
from fedecider.running.launch import round_text, start
from fedecider.running.options import from_plain, load_yaml

logger = logging.getLogger(__name__)

PARTY = "FEDECIDER_PARTY"
"""Environment variable: a party's file, or a folder that holds ``<name>.yaml`` for every party (simulation)."""
SERVER = "server"
MESSAGE = "message"


@dataclass(frozen=True)
class PartyFile:
    """Where the things of one party lie, on its own machine.

    Args:
        project: The project folder, a copy of what provision wrote.
        output: The folder of everything this party writes.
        data: The folder of the site's own prepared domain, or of its users' interactions; empty at the server.
        client: The client whose users this site has, or its own name where it hosts several; empty at the server.
        num_threads: The number of CPU threads; 0 leaves the choice to torch.
        faults: The file of a scenario that a site plays, to try what the others do then; if empty, none.
        deployment: What the server waits for and takes, and a site's largest message.
    """

    project: str
    output: str
    data: str = ""
    client: str = ""
    num_threads: int = 1
    faults: str = ""
    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)

    def __post_init__(self) -> None:
        check(self)


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


def party_file(path: Path) -> PartyFile:
    """The checked content of one party's file."""
    if not path.is_file():
        raise ValueError(f"got {path}, which is no file, expected one that says where the party's things lie")
    return from_plain(PartyFile, load_yaml(path), str(path))


class RoundsController(ModelController):
    """Runs the rounds of a project in FLARE's server job; ``sites`` are the project's names -> FLARE's."""

    def __init__(self, sites: dict[str, str], resume: bool = False) -> None:
        super().__init__()
        self.sites = sites
        self.resume = resume

    def run(self) -> None:
        """Called by FLARE when the job starts."""
        party = read_party(SERVER)
        track = track_of(Path(party.project))
        project = track.read_project(Path(party.project))
        if party.num_threads:
            torch.set_num_threads(party.num_threads)
        names = [self.sites[name] for name in project.names]
        resume = self.resume and (Path(party.output) / "run.json").is_file()

        def exchange(sent: Mapping[int, bytes], deadline_s: float) -> dict[int, bytes]:
            return self._exchange({names[site]: (site, blob) for site, blob in sent.items()}, deadline_s)

        track.serve(
            project,
            exchange,
            party.deployment,
            Path(party.output),
            torch.device("cpu"),
            resume=resume,
            on_round=lambda record: self.info(round_text(record, project.settings.run.num_rounds)),
        )

    def _exchange(self, sent: Mapping[str, tuple[int, bytes]], deadline_s: float) -> dict[int, bytes]:
        answers: dict[int, bytes] = {}
        for name, (site, blob) in sent.items():

            def heard(model: FLModel, site: int = site, name: str = name) -> bool:
                if model.meta.get("client_name") != name:  # who FLARE says has sent it
                    return False
                answers[site] = to_blob(model)
                return True

            self.send_model(data=of_blob(blob), targets=[name], timeout=int(deadline_s), callback=heard)
        ends = time.monotonic() + deadline_s if deadline_s else float("inf")
        while len(answers) < len(sent) and time.monotonic() < ends and not self.abort_signal.triggered:
            time.sleep(0.02)
        if self.abort_signal.triggered:
            raise RuntimeError("the job was aborted")
        return dict(answers)


class SiteExecutor(Executor):
    """Answers the controller's messages in FLARE's job of a site, which is made ready at the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self._answer: Answer | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Called by FLARE for every message."""
        blob = to_blob(FLModelUtils.from_shareable(shareable))
        try:
            self._answer = self._answer or _made_ready(fl_ctx.get_identity_name())
            answer = self._answer(blob)
        except (OSError, ValueError):  # raised, it would end the job of all; its text may name what is private
            logger.exception("this site could not be made ready")
            answer = pack(Message("error", 0, {}, {"reason": "the site could not be made ready, see its log"}))
        return FLModelUtils.to_shareable(of_blob(answer))


def _made_ready(name: str) -> Answer:
    party = read_party(name)
    launch = start(party.num_threads)
    track = track_of(Path(party.project))
    project = track.read_project(Path(party.project))
    site = track.make_site(project, party.data, party.client, Path(party.output), launch, party.deployment)
    return track.answer_of(project, site, party.faults, party.deployment)


def of_blob(blob: bytes) -> FLModel:
    """FLARE's wrapping of a message: one array of bytes."""
    return FLModel(params_type=ParamsType.FULL, params={MESSAGE: np.frombuffer(blob, np.uint8)})


def to_blob(model: FLModel) -> bytes:
    """The message in FLARE's wrapping; empty where there is none, which nobody takes for one."""
    given: Any = (model.params or {}).get(MESSAGE)
    return given.tobytes() if isinstance(given, np.ndarray) and given.dtype == np.uint8 else b""
