"""What all parties of a deployment share before the first round, and what a track gives of its own.

Project folder: ``project.json`` (format, settings, the sites with the numbers of their clients, fingerprint, what the
track adds) and what else the track puts there. It is made once, by whoever holds what is public, and holds nothing of
any client; sites get a copy and compare its checksums.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedecider.bounds import dataclass
from fedecider.deployment.messages import DeploymentConfig
from fedecider.deployment.server import Plan
from fedecider.deployment.site import Site
from fedecider.engine.track import Track, track_of_config
from fedecider.evaluation.protocols import get_protocol, stamp
from fedecider.federation.checksums import check_sums, write_sums
from fedecider.federation.record import write_json
from fedecider.federation.state import RunState
from fedecider.running.damage import damage_names, read_object
from fedecider.running.launch import Launch
from fedecider.running.options import from_plain
from fedecider.running.plain import content_key
from fedecider.running.progress import log_line
from fedecider.running.run_folder import check_output, identity, recorded
from fedecider.running.settings_files import load_yaml
from fedecider.scratch import aside

FORMAT = 2
PROJECT_FILE = "project.json"


class Project(NamedTuple):
    """A project folder that has been read and checked."""

    root: Path
    track: Track
    settings: Any
    """Of the track: ``as_record()`` gives its blocks; ``run`` has method, protocol, seed, num_rounds, num_threads."""
    hosts: Mapping[str, Sequence[int]]
    """Site -> the numbers of its clients, ascending."""
    run: str
    """Fingerprint of all that is shared: parties with another one refuse each other."""
    more: Mapping[str, Any] = {}
    """What the track adds to the file."""

    @property
    def names(self) -> list[str]:
        """The sites, in their order."""
        return list(self.hosts)

    @property
    def client_names(self) -> list[str]:
        """The site that each client is; empty where sites host several."""
        of_client = {client: name for name, own in self.hosts.items() for client in own}
        return [of_client[client] for client in sorted(of_client)] if len(of_client) == len(self.hosts) else []

    @property
    def num_clients(self) -> int:
        return sum(map(len, self.hosts.values()))

    @property
    def parts(self) -> Parts:
        """What the track gives.

        Raises:
            ValueError: it gives nothing: its methods are not deployed.
        """
        found: Parts = self.track.part("deployment")
        return found

    def head(self, state: RunState) -> dict[str, Any]:
        """What every ``metrics.json`` of a run begins with."""
        protocol = get_protocol(self.settings.run.protocol)
        facts = {"protocol": protocol.name, "stamp": stamp(protocol), "method": self.settings.run.method}
        return {**facts, "best_round": state.best_round}


@dataclass(frozen=True)
class PartyFile:
    """Where the things of one party lie, on its own machine.

    Args:
        project: The project folder, a copy of what provision wrote.
        output: The folder of everything this party writes.
        data: The folder of the site's own prepared domain, or of its users' interactions; empty at the server.
        client: The client whose users this site has, or its own name where it hosts several; empty at the server.
        num_threads: The number of CPU threads; 0 leaves the choice to torch.
        deployment: What the server waits for and takes, and a site's largest message.
    """

    project: str
    output: str
    data: str = ""
    client: str = ""
    num_threads: int = 1
    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)


class Shared(NamedTuple):
    """What a project is made of."""

    settings: Any
    """Without the places of whoever makes it."""
    hosts: Mapping[str, Sequence[int]]
    more: Mapping[str, Any] = {}
    """Further entries of ``project.json``."""
    build: Callable[[Path, torch.device, bool], Mapping[str, Any]] = lambda folder, device, quiet: {}
    """Writes the rest of the folder, quietly or not; gives what the fingerprint is over, beside the file's content."""
    notes: Sequence[str] = ()
    """Sentences for whoever makes it."""
    write_own: Callable[[str, Path], None] = lambda name, folder: None
    """Writes the data of a site, where all of them are on one machine."""


class Parts(NamedTuple):
    """What a track does in its own way; all else of a deployment is the same for all of them."""

    public: Callable[[Any, str], Shared]
    """settings of a run, ``--sites`` -> a project of what is public."""
    simulated: Callable[[Any, str], Shared]
    """The same with the data of every site, which are all on this machine."""
    settings: Callable[[Mapping[str, Any], str, Path], Any]
    """Settings in ``project.json``, its path for messages, project folder -> settings of every party."""
    check: Callable[[Project], None]
    """``ValueError`` where a deployed run would not be the simulated one, or would promise what it does not keep."""
    own_data: Callable[[Project, str, str], Any]
    """Project, a site's data folder and its name -> what is there; ``ValueError`` where it does not fit."""
    server: Callable[[Project, Path, torch.device], Plan]
    """The server's part; it writes into the folder."""
    site: Callable[[Project, PartyFile, Launch], Site]
    more: Mapping[str, type] = {}
    """What it adds to ``project.json``, and of which type."""


def make_project(track: Track, shared: Shared, output: Path, device: torch.device, quiet: bool = False) -> Project:
    """Write a project folder.

    Raises:
        ValueError: ``output`` is taken, or what is shared cannot be deployed.
    """
    free_folder(output, "the project")
    site_names(list(shared.hosts))  # names that certificates take
    plain = recorded(shared.settings.as_record())
    content = {"settings": plain, "hosts": {name: list(own) for name, own in shared.hosts.items()}, **shared.more}
    with aside(output) as scratch:
        scratch.mkdir(parents=True)
        beside = shared.build(scratch, device, quiet)
        run = content_key({**content, "settings": identity(plain), **beside})
        write_json(scratch / PROJECT_FILE, {"format": FORMAT, "run": run, **content})
        write_sums(scratch)
        read_project(scratch)  # what cannot be deployed is not left behind
        if output.exists():
            output.rmdir()
    for sentence in () if quiet else shared.notes:
        log_line(sentence)
    return read_project(output)


def read_project(root: Path) -> Project:
    """The project in ``root``; every file is compared with its checksum.

    Raises:
        ValueError: ``root`` holds no project, or a damaged one, or one of a track that is not installed.
    """
    path = root / PROJECT_FILE
    if not path.is_file():
        raise ValueError(f"got {root} without {PROJECT_FILE}, expected a folder that scripts/deploy.py provision wrote")
    check_sums(root)
    content = read_object(path, {"format": int, "run": str, "settings": dict, "hosts": dict})
    if content["format"] != FORMAT:
        raise ValueError(f"got format {content['format']} in {path}, expected {FORMAT}: another version wrote it")
    track = track_of_config(content["settings"])
    track.methods.check_recorded(content["settings"], str(path), exact=True)
    parts: Parts = track.part("deployment")
    with damage_names(path):
        hosts = content["hosts"]
        numbers = sorted(number for own in hosts.values() for number in own)
        if numbers != list(range(len(numbers))) or not all(hosts.values()):
            raise ValueError("hosts do not have every client once")
        settings = parts.settings(content["settings"], str(path), root)
    more = {name: read_object(path, parts.more)[name] for name in parts.more}
    project = Project(root, track, settings, hosts, content["run"], more)
    parts.check(project)
    return project


def check_run(run: Any) -> None:
    """``ValueError`` for what a simulation alone does."""
    if run.tracker:
        raise ValueError(f"got tracker {run.tracker}, expected none in a deployment: simulate it")


def party_file(path: Path) -> PartyFile:
    """The checked content of one party's file."""
    if not path.is_file():
        raise ValueError(f"got {path}, which is no file, expected one that says where the party's things lie")
    return from_plain(PartyFile, load_yaml(path), str(path))


def site_names(names: Sequence[str]) -> dict[str, str]:
    """Site -> a name that FLARE, a certificate and a file take: letters, digits and hyphens, 60 at most."""
    found = {name: "site-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names}
    if len(set(found.values())) != len(names) or not all(5 < len(site) <= 60 for site in found.values()):
        shown = ", ".join(repr(name)[:60] for name in names)
        raise ValueError(f"got clients {shown}, expected names that differ in letters and digits, of 55 at most")
    return found


def free_folder(folder: Path, what: str) -> Path:
    """``folder``, if it is empty or can be made.

    Raises:
        ValueError: it holds something, or cannot be one.
    """
    check_output(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"got the folder {folder}, which is not empty, expected a free place for {what}")
    return folder
