"""What the cross-device track gives a deployment: every user is a client, and a site hosts a block of users.

``project.json`` then also has the data set and the item keys; it holds nobody's interactions. A site's own folder has
``interactions.json``: its users with the keys of their items, oldest first; they are its clients in ascending order.
All parties work on the CPU, as messages and states are.

Shape legend: U users of a site.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedding_fr import setup
from embedding_fr.blocks import Federation, Population, block_packer, build_population
from embedding_fr.commands import recorded_settings
from embedding_fr.methods import METHODS
from embedding_fr.results import privacy_text
from embedding_fr.server_memory import check_server_memory
from fedecider.data.interactions import PREPARED, load_interactions
from fedecider.data.readers.reading import to_stderr
from fedecider.data.store import load_domains
from fedecider.deployment.project import Parts, PartyFile, Project, Shared, check_run
from fedecider.deployment.server import Plan
from fedecider.deployment.site import Hosted, Site
from fedecider.evaluation.per_user import UserPositions, write_per_user
from fedecider.evaluation.protocols import MIN_EVENTS, get_protocol
from fedecider.federation.method import Block, Download, FederatedMethod
from fedecider.federation.privacy import protector
from fedecider.federation.record import write_json, write_text
from fedecider.federation.rounds import RoundSettings
from fedecider.federation.state import RunState
from fedecider.federation.streams import stream
from fedecider.report.costs import median_seconds, total_bytes
from fedecider.report.tables import ResultTable, markdown_table, result_rows, rows_data, variant_labels
from fedecider.running.damage import read_object
from fedecider.running.launch import Launch
from fedecider.running.run_folder import RunFolder
from fedecider.running.settings_files import load_yaml

INTERACTIONS_FILE = "interactions.json"
USERS, COUNT = "a list of keys of users", "a number of users"
"""What a file of sites says of each."""
CPU = torch.device("cpu")


def public(settings: setup.EmbeddingSettings, sites: str) -> Shared:
    """A project of the catalogue of prepared data, and of how many users each site will have.

    Interactions in the data are used for nothing, and nobody's are copied.
    """
    _check_sites(sites)
    if settings.data.source != PREPARED:
        raise ValueError(
            f"got source {settings.data.source!r}, expected prepared: a project takes the catalogue of prepared data, "
            "and sites keep their users"
        )
    catalogue = load_domains(settings.data.raw, [settings.data.dataset])[settings.data.dataset].item_keys
    return shared(settings, catalogue, counted_out(sites))


def simulated(settings: setup.EmbeddingSettings, sites: str) -> Shared:
    """A project, and the interactions of all users; what a site would refuse is told before the first one starts."""
    _check_sites(sites)
    check_deployable(settings)
    interactions = load_interactions(settings.data, log=to_stderr)
    hosts, keys = share_out(interactions.users, sites, settings.run.seed), interactions.item_keys
    _population(settings, interactions.sequences, len(keys))

    def write_own(name: str, folder: Path) -> None:
        users = {interactions.users[user]: interactions.sequences[user] for user in hosts[name]}
        save_interactions({user: [keys[item] for item in items] for user, items in users.items()}, folder)

    return shared(settings, keys, hosts)._replace(write_own=write_own)


def shared(settings: setup.EmbeddingSettings, item_keys: Sequence[str], hosts: Mapping[str, Sequence[int]]) -> Shared:
    """What the parties of a project share.

    Raises:
        ValueError: these settings cannot be deployed.
    """
    check_deployable(settings)
    run, data = settings.run, settings.data
    placed = settings._replace(
        run=replace(run, output="", resume=False), data=replace(data, raw="elsewhere" if data.raw else "")
    )
    return Shared(placed, hosts, {"dataset": data.dataset, "items": list(item_keys)})


def _check_sites(sites: str) -> None:
    if not sites:
        raise ValueError("got no sites, expected them for users as clients: --sites 3")


def _population(settings: setup.EmbeddingSettings, sequences: Sequence[Sequence[int]], num_items: int) -> Population:
    run = settings.run
    population = build_population(sequences, num_items, get_protocol(run.protocol), run.seed, CPU)
    setup.check_settings(settings, population)
    return population


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
    """Site -> numbers of its users, from a YAML file that says how many each site has; else ``ValueError``."""
    hosts: dict[str, list[int]] = {}
    for name, count in _listing(sites, COUNT).items():
        first = sum(map(len, hosts.values()))
        hosts[name] = list(range(first, first + count))
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


def deployable(project: Project) -> FederatedMethod:
    """The method of a project.

    Raises:
        ValueError: it cannot be deployed.
    """
    run = project.settings.run
    federation = Federation(project.num_clients, len(project.more["items"]), run.seed, get_protocol(run.protocol), CPU)
    method = setup.build_method(project.settings, federation)
    if method.upload_like is None:
        raise ValueError(
            f"got method {method.name}, expected one whose uploads have one shape for all clients: a server refuses "
            "what it cannot compare, so this one runs in simulation only"
        )
    return method


def check_deployable(settings: setup.EmbeddingSettings) -> None:
    """``ValueError`` where a deployed run would not be the simulated one, or would promise what it does not keep."""
    run, entry = settings.run, METHODS[settings.run.method]
    check_run(run)
    if not run.federation:
        raise ValueError("got federation false, expected true in a deployment: nothing would leave a site")
    if entry.attributes:
        raise ValueError(
            f"got method {run.method}, expected one without attributes of items in a deployment: a project is shared "
            "with the sites, who must not see them, so this one runs in simulation only"
        )
    if run.secure_sum or entry.needs_everyone(settings.method):
        name = "secure_sum" if run.secure_sum else "secure"
        raise ValueError(
            f"got {name} true, expected false in a deployment of the cross-device track: a site sees the uploads of "
            "the users it hosts, and the server sees each of them"
        )
    noise = settings.privacy.noise_scale if entry.guarantee is None else settings.method.noise_scale
    if noise and (entry.guarantee is not None or settings.privacy.noise_on == "sum"):
        raise ValueError(
            "got noise on the sum, expected noise on each upload in a deployment, or none: its server sees every "
            "single upload, and knows the seed"
        )
    if settings.privacy.noise_without_clip:
        raise ValueError(
            f"got noise_without_clip with noise_scale {noise} in a deployment, expected a bound: noise without "
            "one guarantees nothing; set clip instead"
        )
    if get_protocol(run.protocol).num_sampled is not None:
        raise ValueError(
            f"got protocol {run.protocol}, expected one that ranks the whole catalogue in a deployment, such as "
            "strict: candidates are drawn for all users together, whom no site knows"
        )


def check_hosts(settings: setup.EmbeddingSettings, hosts: Mapping[str, Sequence[int]]) -> None:
    """``ValueError`` where a mean that a site tells would be over one user: it is that user's own."""
    scored = set(setup.eval_users(settings.run, sum(map(len, hosts.values()))))
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


def own_interactions(project: Project, data: str, name: str) -> tuple[list[str], list[list[int]]]:
    """The users of the site ``name`` and their item numbers, oldest first, from its own folder.

    Raises:
        ValueError: the file is missing or damaged, has another number of users than the
            project, or a user with too few items, with one twice, or with one that is not in the project's catalogue.
    """
    path = Path(data) / INTERACTIONS_FILE
    if not path.is_file():
        raise ValueError(f"got no {path}, expected the users of {name} with their items: docs/deploy.md")
    number_of = {key: number for number, key in enumerate(project.more["items"])}
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


def check(project: Project) -> None:
    """``ValueError`` where a project cannot be deployed."""
    check_deployable(project.settings)
    check_hosts(project.settings, project.hosts)
    deployable(project)


def server(project: Project, output: Path, device: torch.device) -> Plan:
    """All rounds, with the metrics of all users."""
    run = project.settings.run
    check_server_memory(run.method, project.settings.method, len(project.more["items"]))
    method, users = deployable(project), setup.eval_users(run, project.num_clients)

    def facts(state: RunState, records: list[dict]) -> dict[str, Any]:
        costs = {"round_seconds": median_seconds(records), "bytes": total_bytes(records)}
        sizes = {"num_users": project.num_clients, "num_eval_users": len(users) or project.num_clients}
        return {**_head(project, method, state), **sizes, **costs}

    return Plan(
        method,
        RoundSettings(run.num_rounds, run.seed, run.participation, patience=run.patience, eval_every=run.eval_every),
        validated=users or None,
        facts=facts,
    )


def site(project: Project, place: PartyFile, launch: Launch) -> Site:
    """The site of a block of users. Its local state holds its own users only, in memory: of methods with personal
    tables a table for each.

    Raises:
        ValueError: what `own_interactions` refuses.
    """
    settings = project.settings
    setup.keep_freed_memory()
    users, sequences = own_interactions(project, place.data, place.client)
    population = _population(settings, sequences, len(project.more["items"]))
    method, hosted = deployable(project), hosted_users(project, population, place.client)
    return Site(
        method=method,
        hosted=hosted,
        run=project.run,
        folder=Path(place.output),
        finish=_End(project, method, hosted, users, RunFolder(Path(place.output))).write,
        most_bytes=place.deployment.max_bytes,
        protect=protector(method, settings.privacy, seed=None),
        spends=settings.run.num_rounds if settings.privacy.clips else 0,
    )


def hosted_users(project: Project, population: Population, name: str) -> Hosted:
    """The users of a site, packed by their places among them, known by their numbers in the run."""
    clients, settings = project.hosts[name], project.settings
    client_U, place_of = torch.tensor(clients), {client: place for place, client in enumerate(clients)}
    client_bytes = setup.working_set(settings, population.num_items, CPU)
    pack = block_packer(population, client_bytes, setup.block_bytes(settings.run, CPU))

    def packed(cohort: Sequence[int]) -> list[Block]:
        blocks = pack([place_of[client] for client in cohort])
        return [block._replace(clients=client_U[block.clients]) for block in blocks]

    scored = set(setup.eval_users(settings.run, project.num_clients) or clients)
    return Hosted(clients, packed, [client for client in clients if client in scored])


class _End(NamedTuple):
    """What a site writes when the rounds are over."""

    project: Project
    method: FederatedMethod
    hosted: Hosted
    users: list[str]
    folder: RunFolder

    def write(self, state: RunState, download: Download) -> Mapping[str, Any]:
        """Test and validation of the own users in the selected round, into the site's folder; the means it tells."""
        name, protocol = self.project.more["dataset"], get_protocol(self.project.settings.run.protocol)

        def positions_of(split: str) -> dict[str, Tensor]:
            return {
                label: self.hosted.positions(
                    self.method, variant, download, state.best_local, self.hosted.clients, split
                )
                for variant, label in variant_labels(self.method.name, self.method.variants).items()
            }

        test, valid = positions_of("test"), positions_of("valid")
        rows, valid_rows = (
            result_rows({label: {name: at_U} for label, at_U in part.items()}) for part in (test, valid)
        )
        content = {
            **_head(self.project, self.method, state),
            "num_users": len(self.users),
            "test": rows_data(rows, name),
            "valid": rows_data(valid_rows, name),
        }
        write_json(self.folder.metrics, content)
        records = (
            UserPositions(name, self.users, "test", label, state.best_round, at_U) for label, at_U in test.items()
        )
        write_per_user(self.folder.per_user, records)
        note = f"{len(self.users)} of {self.project.num_clients} users: those of this site; round {state.best_round}"
        title = f"Test of {self.method.name} on {name}"
        write_text(self.folder.results, markdown_table(ResultTable(rows, protocol, [note]), title=title))
        return {
            row: {metric: {"mean": value["mean"]} for metric, value in metrics.items()}
            for row, metrics in content["test"].items()
        }  # an interval over few users is made of their own figures


def _head(project: Project, method: FederatedMethod, state: RunState) -> dict[str, Any]:
    return {
        **project.head(state),
        "dataset": project.more["dataset"],
        "num_items": len(project.more["items"]),
        "reported": variant_labels(method.name, method.variants)[method.variants[0]],
        "last_round": state.round,
        "privacy": privacy_text(project.settings, project.num_clients),
    }


PARTS = Parts(
    public=public,
    simulated=simulated,
    settings=lambda plain, source, root: recorded_settings(plain, source),
    check=check,
    own_data=own_interactions,
    server=server,
    site=site,
    more={"dataset": str, "items": list},
)
