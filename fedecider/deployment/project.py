"""What all parties of a deployment share before the first round: settings, catalogues, public pools, stages 1 and 2.

Project folder: ``project.json`` (format, settings, the clients in order, fingerprint), ``public/<domain>/`` (prepared
domains without client users) and ``cache/`` (the stages, and vectors of the published item texts). It is made once, by
whoever holds the public pool, and holds nothing of any client; sites get a copy and compare its checksums.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedecider.data.domain import Domain
from fedecider.data.encoders import chosen_encoder
from fedecider.data.store import load_domains, save_domains
from fedecider.deployment.counts import what_siblings_learn
from fedecider.experiment.alternatives import check_sizes, check_uploads
from fedecider.experiment.command_line import settings_from_plain
from fedecider.experiment.prepare import (
    Foundation,
    Settings,
    check_targets,
    distill_stage,
    load_ids,
    make_recommender,
    pretrain_stage,
    without_users,
)
from fedecider.experiment.results import check_privacy
from fedecider.federation.aggregate import with_robust_mean
from fedecider.federation.method import FederatedMethod
from fedecider.federation.record import write_json
from fedecider.federation.state import SUMS_FILE, check_sums, file_sha256, write_sums
from fedecider.methods import METHODS
from fedecider.methods.recommender import ClientModels
from fedecider.models.item_texts import encoded_texts
from fedecider.running.progress import say
from fedecider.running.run_folder import Stage, check_output, content_key, damage_names, identity, read_object, recorded

FORMAT = 1
PROJECT_FILE = "project.json"
_TELLING = ("report.json", "inputs.json", SUMS_FILE)


class Project(NamedTuple):
    """A project folder that has been read and checked."""

    root: Path
    settings: Settings
    """With ``data`` and ``cache`` of this folder."""
    names: list[str]
    """The clients, in client order."""
    run: str
    """Fingerprint of settings, public data and stages: parties with another one refuse each other."""


class Party(NamedTuple):
    """A server or a site, ready for the first round."""

    recommender: ClientModels
    method: FederatedMethod
    foundation: Foundation
    """``domains`` are those whose users this party has: none at the server."""


def make_project(settings: Settings, output: Path, device: torch.device, quiet: bool = False) -> Project:
    """Write a project folder: public parts of the prepared domains, and the stages built from them.

    Client users in the data, if there are any, are left out before anything is built: the folder is the same with and
    without them.

    Raises:
        ValueError: these settings cannot be deployed; ``output`` is taken; or the data are missing or damaged.
    """
    check_deployable(settings)
    config = settings.run
    if not config.data:
        raise ValueError("got no data, expected the folder of prepared domains whose public users all parties may see")
    check_output(output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"got the folder {output}, which is not empty, expected a free place for the project")
    public = {name: without_users(one) for name, one in load_domains(config.data, config.domain_names).items()}
    check_targets(config)
    check_sizes(settings, public)
    check_uploads(settings, len(public))
    scratch = output.parent / f".{output.name}-{uuid.uuid4().hex[:8]}"
    scratch.mkdir(parents=True)
    try:
        save_domains(public, scratch / "public")
        placed = _placed(settings, scratch)
        distill_stage(placed.run, pretrain_stage(placed.run, public, device, quiet), public, device, quiet)
        encoded_texts(public, placed.run.pretrain.text_encoder, placed.run.cache)
        plain = recorded(_placed(settings, Path()).as_record())
        run = _fingerprint(identity(plain), public, scratch / "cache")
        write_json(scratch / PROJECT_FILE, {"format": FORMAT, "run": run, "clients": list(public), "settings": plain})
        write_sums(scratch)
        if output.exists():
            output.rmdir()
        os.replace(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for sentence in () if quiet else what_siblings_learn(public, config.hybrid):
        say(sentence)
    return read_project(output)


def read_project(root: Path) -> Project:
    """The project in ``root``; every file is compared with its checksum.

    Raises:
        ValueError: ``root`` holds no project, or a damaged one.
    """
    path = root / PROJECT_FILE
    if not path.is_file():
        raise ValueError(f"got {root} without {PROJECT_FILE}, expected a folder that scripts/deploy.py provision wrote")
    check_sums(root)
    content = read_object(path, {"format": int, "run": str, "clients": list, "settings": dict})
    if content["format"] != FORMAT:
        raise ValueError(f"got format {content['format']} in {path}, expected {FORMAT}: another version wrote it")
    METHODS.check_recorded(content["settings"], str(path), exact=True)
    with damage_names(path):
        settings = _placed(settings_from_plain(content["settings"], str(path)), root)
    check_deployable(settings)
    return Project(root, settings, [str(name) for name in content["clients"]], content["run"])


def site_names(clients: Sequence[str]) -> dict[str, str]:
    """Client -> a name that FLARE, a certificate and a file take: letters, digits and hyphens, 60 at most."""
    found = {client: "site-" + re.sub(r"[^a-z0-9]+", "-", client.lower()).strip("-") for client in clients}
    if len(set(found.values())) != len(clients) or not all(5 < len(site) <= 60 for site in found.values()):
        names = ", ".join(repr(client)[:60] for client in clients)
        raise ValueError(f"got clients {names}, expected names that differ in letters and digits, of 55 at most")
    return found


def check_deployable(settings: Settings) -> None:
    """``ValueError`` where a deployed run would not be the simulated one, or would need what sites do not have."""
    config, entry = settings.run, METHODS[settings.run.method]
    if entry.pooled:
        raise ValueError(f"got method {config.method}, expected one that federates: pooling is what silos cannot do")
    if config.pretrain.samples.user_wording != "none":
        raise ValueError(
            f"got user_wording {config.pretrain.samples.user_wording}, expected none in a deployment: texts of client "
            "users are made in stage 1, which sites do not run"
        )
    if config.alternatives:
        raise ValueError(
            "got alternatives, expected none in a deployment, whose adapters have one shape from the start: give "
            "--alternatives '[]' and, where the data are dense, what one of them has (--lora_targets, --learning_rate)"
        )
    if config.faults:
        raise ValueError(
            f"got the scenario {config.faults}, expected none in a project: a site that plays one names it itself"
        )
    if config.tracker:
        raise ValueError(f"got tracker {config.tracker}, expected none in a deployment, which tells none: simulate it")
    if config.privacy.noise_on == "sum" and config.privacy.noise_scale > 0.0:
        raise ValueError(
            "got privacy.noise_on sum, expected upload in a deployment: its server sees every single upload"
        )
    check_privacy(settings)
    if config.public_names:
        raise ValueError("got public_domains, expected none in a deployment: prepare public users of the own domains")


def party(project: Project, own: Mapping[str, Domain], device: torch.device) -> Party:
    """A server (``own`` empty) or the site whose domain is in ``own`` (`own_domain`)."""
    settings = project.settings
    public = load_domains(settings.run.data, project.names)
    everyone = {name: own.get(name, domain) for name, domain in public.items()}
    pretrained, distilled = (_stage(project.root / "cache", name) for name in ("pretrain", "distill"))
    ids = load_ids(pretrained.folder, public, settings.run.pretrain, walks_of=own)
    foundation = Foundation(dict(own), ids, pretrained, distilled, everyone)
    recommender = make_recommender(settings, foundation, device, names=project.names)._replace(secret=True)
    method = METHODS[settings.run.method].build(recommender, settings.method)
    return Party(recommender, with_robust_mean(method, settings.run.robust_mean), foundation)


def own_domain(project: Project, data: str, name: str) -> Domain:
    """The site's prepared domain.

    Raises:
        ValueError: the project has no such client, or other public data than the site; or there are no client users.
    """
    if name not in project.names:
        raise ValueError(f"got the client {name}, expected one of the project's: {', '.join(project.names)}")
    domain = load_domains(data, [name])[name]
    if not domain.clients.users:
        raise ValueError(f"got no client users of {name} in {data}, expected the site's own ones")
    public = project.settings.run.data
    if without_users(domain).content_hash() != load_domains(public, [name])[name].content_hash():
        raise ValueError(
            f"got another catalogue or other public users of {name} than the project has, expected the same: prepare "
            f"the site's data with the items and public users in {public}"
        )
    return domain


def _placed(settings: Settings, root: Path) -> Settings:
    """The settings with the places of a project, and the encoder by its name, so that sites need not have it."""
    config = settings.run
    places: dict[str, Any] = {"data": str(root / "public"), "cache": str(root / "cache"), "output": "", "resume": False}
    encoder = chosen_encoder(config.pretrain.text_encoder)
    pretrain = replace(config.pretrain, text_encoder=encoder)
    return settings._replace(run=replace(config, pretrain=pretrain, **places))


def _fingerprint(settings: dict[str, Any], public: Mapping[str, Domain], cache: Path) -> str:
    """Alike for whoever makes the project: of the stages all but reports, which tell seconds, and places."""
    files = [path for path in cache.rglob("*") if path.is_file() and path.name not in _TELLING]
    sums = {path.relative_to(cache).parts[1:]: file_sha256(path) for path in sorted(files)}
    data = {name: domain.content_hash() for name, domain in public.items()}
    return content_key({"settings": settings, "data": data, "files": [[list(k), v] for k, v in sums.items()]})


def _stage(cache: Path, name: str) -> Stage:
    """The one stage ``name`` in a project's cache: its key may name folders that this machine does not have."""
    found = sorted(cache.glob(f"{name}-*"))
    if len(found) != 1:
        raise ValueError(f"got {len(found)} stages {name} in {cache}, expected one: make the project again")
    return Stage(found[0], True)
