"""What all parties share before the first round of the embedding track, where a site hosts a block of users.

Project folder: ``project.json`` (format, track, settings, data set, item keys, which client numbers each site hosts,
fingerprint). It holds nobody's interactions. A site's own folder has ``interactions.json``: its users with the keys of
their items, oldest first; they are its clients in ascending order.

Shape legend: N clients of the run.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from embedding_fr.blocks import Federation
from embedding_fr.commands import recorded_settings
from embedding_fr.methods import METHODS
from embedding_fr.setup import EmbeddingSettings, build_method, eval_users
from fedecider.deployment.project import PROJECT_FILE, site_names
from fedecider.evaluation.protocols import MIN_EVENTS, get_protocol
from fedecider.federation.method import FederatedMethod
from fedecider.federation.record import write_json
from fedecider.federation.state import check_sums, write_sums
from fedecider.federation.streams import stream
from fedecider.running.options import load_yaml
from fedecider.running.run_folder import check_output, content_key, identity, read_object, recorded

FORMAT = 1
TRACK = "embedding"
INTERACTIONS_FILE = "interactions.json"
USERS, COUNT = "a list of keys of users", "a number of users"
"""What a file of sites says of each."""


class EmbeddingProject(NamedTuple):
    """A project folder of the embedding track that has been read and checked."""

    root: Path
    settings: EmbeddingSettings
    dataset: str
    item_keys: list[str]
    hosts: dict[str, list[int]]
    """Site -> the numbers of its clients, ascending."""
    run: str
    """Fingerprint of all of this: parties with another one refuse each other."""

    @property
    def names(self) -> list[str]:
        """The sites, in their order."""
        return list(self.hosts)

    @property
    def num_clients(self) -> int:
        return sum(map(len, self.hosts.values()))

    def federation(self, device: torch.device) -> Federation:
        """What every party may know of the run."""
        run = self.settings.run
        return Federation(self.num_clients, len(self.item_keys), run.seed, get_protocol(run.protocol), device)


def share_out(users: Sequence[str], sites: str, seed: int) -> dict[str, list[int]]:
    """Site -> numbers of its users.

    ``sites``: how many share the users evenly, drawn from the seed; or a YAML file with the keys of each site's users.

    Raises:
        ValueError: a site without users, or a user who has no site, or two.
    """
    if sites.isdecimal():
        if not 1 <= int(sites) <= len(users):
            raise ValueError(f"got {sites} sites, expected 1 to {len(users)}, as many as there are users")
        order = torch.randperm(len(users), generator=stream(seed, "sites"))
        return {str(number): sorted(part.tolist()) for number, part in enumerate(order.tensor_split(int(sites)), 1)}
    number_of = {user: number for number, user in enumerate(users)}
    listed = {name: [str(user) for user in own] for name, own in _listing(sites, USERS).items()}
    unknown = [user for own in listed.values() for user in own if user not in number_of]
    if unknown:
        raise ValueError(f"got the user {unknown[0]!r} in {sites}, expected users of the data set only")
    hosts = {name: sorted(number_of[user] for user in own) for name, own in listed.items()}
    if sorted(number for own in hosts.values() for number in own) != list(range(len(users))):
        raise ValueError(f"got sites in {sites} that leave users out or share some, expected every user at one site")
    return hosts


def counted_out(sites: str) -> dict[str, list[int]]:
    """Site -> numbers of its users, from a YAML file that says how many each site has.

    Raises:
        ValueError: it says something else.
    """
    hosts: dict[str, list[int]] = {}
    first = 0
    for name, count in _listing(sites, COUNT).items():
        hosts[name] = list(range(first, first + count))
        first += count
    return hosts


def _listing(path: str, what: str) -> dict[str, Any]:
    """The entries of a file of sites, which are ``what``."""
    content = load_yaml(Path(path)) if Path(path).is_file() else None
    if not isinstance(content, dict) or not content:
        raise ValueError(f"got sites {path!r}, expected a YAML file with {what} for each site, or how many share all")
    for name, own in content.items():
        good = isinstance(own, list) and own if what == USERS else type(own) is int and own > 0
        if not good:
            raise ValueError(f"got {str(own)[:40]!r} for the site {name!r} in {path}, expected {what}")
    return {str(name): own for name, own in content.items()}


def make_embedding_project(
    settings: EmbeddingSettings, item_keys: Sequence[str], hosts: Mapping[str, Sequence[int]], output: Path
) -> EmbeddingProject:
    """Write a project folder.

    Raises:
        ValueError: these settings cannot be deployed, or ``output`` is taken.
    """
    check_embedding_deployable(settings)
    check_hosts(settings, hosts)
    check_output(output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"got the folder {output}, which is not empty, expected a free place for the project")
    site_names(list(hosts))  # names that certificates take
    plain = recorded(_placed(settings).as_record())
    shared = {"settings": plain, "dataset": settings.data.dataset, "items": list(item_keys)}
    shared["hosts"] = {name: list(own) for name, own in hosts.items()}
    run = content_key({**shared, "settings": identity(plain)})
    scratch = output.parent / f".{output.name}-{uuid.uuid4().hex[:8]}"
    scratch.mkdir(parents=True)
    try:
        write_json(scratch / PROJECT_FILE, {"format": FORMAT, "track": TRACK, "run": run, **shared})
        write_sums(scratch)
        read_embedding_project(scratch)  # what cannot be deployed is not left behind
        if output.exists():
            output.rmdir()
        os.replace(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return read_embedding_project(output)


def read_embedding_project(root: Path) -> EmbeddingProject:
    """The project in ``root``; every file is compared with its checksum.

    Raises:
        ValueError: ``root`` holds no project of this track, or a damaged one.
    """
    path = root / PROJECT_FILE
    check_sums(root)
    kinds = {"format": int, "track": str, "run": str, "settings": dict, "dataset": str, "items": list, "hosts": dict}
    content = read_object(path, kinds)
    if (content["format"], content["track"]) != (FORMAT, TRACK):
        raise ValueError(f"got format {content['format']} in {path}, expected {FORMAT}: another version wrote it")
    METHODS.check_recorded(content["settings"], str(path), exact=True)
    settings = recorded_settings(content["settings"], str(path))
    check_embedding_deployable(settings)
    check_hosts(settings, content["hosts"])
    project = EmbeddingProject(root, settings, content["dataset"], content["items"], content["hosts"], content["run"])
    deployable(project, torch.device("cpu"))
    return project


def deployable(project: EmbeddingProject, device: torch.device) -> FederatedMethod:
    """The method of a project.

    Raises:
        ValueError: it cannot be deployed.
    """
    method = build_method(project.settings, project.federation(device))
    if method.upload_like is None:
        raise ValueError(
            f"got method {method.name}, expected one whose uploads have one shape for all clients: a server refuses "
            "what it cannot compare, so this one runs in simulation only"
        )
    return method


def check_embedding_deployable(settings: EmbeddingSettings) -> None:
    """``ValueError`` where a deployed run would not be the simulated one, or would promise what it does not keep."""
    run, entry = settings.run, METHODS[settings.run.method]
    if not run.federation:
        raise ValueError("got federation false, expected true in a deployment: nothing would leave a site")
    if run.secure_sum or entry.needs_everyone(settings.method):
        name = "secure_sum" if run.secure_sum else "secure"
        raise ValueError(
            f"got {name} true, expected false in a deployment of the embedding track: a site sees the uploads of the "
            "users it hosts, and the server sees each of them"
        )
    noise = settings.privacy.noise_scale if entry.guarantee is None else settings.method.noise_scale
    if noise and (entry.guarantee is not None or settings.privacy.noise_on == "sum"):
        raise ValueError(
            "got noise on the sum, expected noise on each upload in a deployment, or none: its server sees every "
            "single upload, and knows the seed"
        )
    if get_protocol(run.protocol).num_sampled is not None:
        raise ValueError(
            f"got protocol {run.protocol}, expected one that ranks the whole catalogue in a deployment, such as "
            "strict: candidates are drawn for all users together, whom no site knows"
        )
    for name, value in (("faults", run.faults), ("tracker", run.tracker)):
        if value:
            raise ValueError(f"got {name} {value}, expected none in a deployment of the embedding track")


def check_hosts(settings: EmbeddingSettings, hosts: Mapping[str, Sequence[int]]) -> None:
    """``ValueError`` where a mean that a site tells would be over one user: it is that user's own."""
    scored = set(eval_users(settings.run, sum(map(len, hosts.values()))))
    for name, own in hosts.items():
        if len(own) == 1:
            raise ValueError(f"got one user at the site {name}, expected two at least: a mean over one is its own")
        if len(scored & set(own)) == 1:
            raise ValueError(
                f"got num_eval_users {settings.run.num_eval_users}, by which one user of the site {name} is scored, "
                "expected two at least, or none: a mean over one is its own. Take more users, all (0) or another seed"
            )


def save_interactions(users: Mapping[str, Sequence[str]], folder: Path) -> None:
    """Write a site's own folder: user -> keys of the items, oldest first."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / INTERACTIONS_FILE, {"users": {user: list(items) for user, items in users.items()}})


def own_interactions(project: EmbeddingProject, data: str, name: str) -> tuple[list[str], list[list[int]]]:
    """The users of the site ``name`` and their item numbers, oldest first, from its own folder.

    Raises:
        ValueError: the project has no such site; the file is missing or damaged, has another number of users than the
            project, or a user with too few items, with one twice, or with one that is not in the project's catalogue.
    """
    if name not in project.hosts:
        raise ValueError(f"got the site {name}, expected one of the project's: {', '.join(project.names)}")
    path = Path(data) / INTERACTIONS_FILE
    if not path.is_file():
        raise ValueError(f"got no {path}, expected the users of {name} with their items: docs/deploy.md")
    number_of = {key: number for number, key in enumerate(project.item_keys)}
    users = read_object(path, {"users": dict})["users"]
    if len(users) != len(project.hosts[name]):
        raise ValueError(f"got {len(users)} users in {path}, expected the {len(project.hosts[name])} of {name}")
    sequences = []
    for user, items in users.items():
        if not isinstance(items, list) or len(set(map(json.dumps, items))) != len(items) or len(items) < MIN_EVENTS:
            raise ValueError(f"got user {user!r} in {path}, expected {MIN_EVENTS} items at least, each once")
        unknown = [item for item in items if not isinstance(item, str) or item not in number_of]
        if unknown:
            raise ValueError(f"got the item {unknown[0]!r} in {path}, expected items of the project's catalogue")
        sequences.append([number_of[item] for item in items])
    return list(users), sequences


def _placed(settings: EmbeddingSettings) -> EmbeddingSettings:
    """The settings without the places of whoever makes the project."""
    run, data = settings.run, settings.data
    return settings._replace(
        run=replace(run, output="", resume=False), data=replace(data, raw="elsewhere" if data.raw else "")
    )
