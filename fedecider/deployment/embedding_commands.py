"""What scripts/deploy.py does for the embedding track, where it differs: users are shared out over sites."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embedding_fr.blocks import build_population
from embedding_fr.commands import parse_embedding_settings
from embedding_fr.methods import METHODS
from embedding_fr.setup import EmbeddingSettings, check_settings
from fedecider.data.interactions import PREPARED, Interactions, load_interactions
from fedecider.data.readers.raw import to_stderr
from fedecider.data.store import load_domains
from fedecider.deployment import jobs
from fedecider.deployment.embedding_project import (
    check_embedding_deployable,
    counted_out,
    make_embedding_project,
    save_interactions,
    share_out,
)
from fedecider.deployment.flare import SERVER, PartyFile
from fedecider.deployment.options import parser_of
from fedecider.deployment.server import DeploymentConfig
from fedecider.evaluation.protocols import get_protocol
from fedecider.running.launch import start
from fedecider.running.options import peek

PROJECT, SITES = "project", "sites"
SITES_HELP = "how many sites share the users evenly, or a YAML file with the keys of the users of each site"
COUNTS_HELP = "a YAML file with the number of users of each site"
PARTIES = "Run every party as a process of this machine."
DEADLINE = "--deadline_s: the seconds that sites have for an answer, 0 waits for all of them"
SIMULATE = f"{PARTIES} Options are those of federate.py, --sites: {SITES_HELP}, and {DEADLINE}."
PROVISION = f"Make a project. Options are those of federate.py, and --sites: {COUNTS_HELP}."


def of_embedding_track(words: Sequence[str]) -> bool:
    """Whether the chosen method has users for clients."""
    return peek(words, "method", "fedecider") in METHODS


def simulate_users(words: Sequence[str], config: DeploymentConfig) -> Path:
    """Every site is a process with its users' interactions in a folder of its own; returns the run folder."""
    settings, sites = _settings(words, SIMULATE)
    check_embedding_deployable(settings)
    output = jobs.free_output(settings.run.output)
    interactions = load_interactions(settings.data, tell=to_stderr)
    hosts = share_out(interactions.users, sites, settings.run.seed)
    _check_data(settings, interactions)
    project = make_embedding_project(settings, interactions.item_keys, hosts, output / PROJECT)
    root, num_threads = str(project.root.absolute()), settings.run.num_threads
    files = {SERVER: PartyFile(root, str((output / SERVER).absolute()), num_threads=num_threads, deployment=config)}
    for name, site in jobs.site_names(project.names).items():
        home = (output / SITES / name).absolute()
        save_interactions(_keyed(interactions, hosts[name]), home / "data")
        files[site] = PartyFile(root, str(home / "run"), str(home / "data"), name, num_threads, deployment=config)
    jobs.simulate_parties(project.names, files, output)
    return output


def users_project(words: Sequence[str], output: Path) -> tuple[str, Path, list[str]]:
    """Write the project of a deployment: the catalogue of prepared data, and how many users each site will have.

    Returns its fingerprint, its folder and the names of the sites. Interactions in the data are used for nothing, and
    nobody's are copied.
    """
    settings, sites = _settings(words, PROVISION)
    if settings.data.source != PREPARED:
        raise ValueError(
            f"got source {settings.data.source!r}, expected prepared: a project takes the catalogue of prepared data, "
            "and sites keep their users"
        )
    catalogue = load_domains(settings.data.raw, [settings.data.dataset])[settings.data.dataset].item_keys
    project = make_embedding_project(settings, catalogue, counted_out(sites), output / PROJECT)
    return project.run, project.root, project.names


def _settings(words: Sequence[str], text: str) -> tuple[EmbeddingSettings, str]:
    own = parser_of("simulate", "", add_help=False)
    own.add_argument("--sites", default="")
    known, rest = own.parse_known_args(words)
    settings = parse_embedding_settings(text, rest, peek(rest, "method"))
    if not known.sites:
        raise ValueError("got no sites, expected them for users as clients: --sites 3")
    return settings, known.sites


def _check_data(settings: EmbeddingSettings, interactions: Interactions) -> None:
    """What a site would refuse is told before the first process is started."""
    protocol = get_protocol(settings.run.protocol)
    with start(settings.run.num_threads) as launch:
        sequences, num_items = interactions.sequences, interactions.num_items
        check_settings(settings, build_population(sequences, num_items, protocol, settings.run.seed, launch.device))


def _keyed(interactions: Interactions, users: Sequence[int]) -> dict[str, list[str]]:
    """Users and the keys of their items, in the order of their numbers."""
    keys = interactions.item_keys
    return {interactions.users[user]: [keys[item] for item in interactions.sequences[user]] for user in users}
