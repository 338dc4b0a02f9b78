"""The commands of scripts/deploy.py."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fedecider.data.store import save_domains
from fedecider.deployment import jobs
from fedecider.deployment.embedding_commands import DEADLINE, PARTIES, of_embedding_track, simulate_users, users_project
from fedecider.deployment.flare import SERVER, PartyFile, party_file
from fedecider.deployment.options import parser_of
from fedecider.deployment.project import make_project
from fedecider.deployment.run import WIRE_FILE
from fedecider.deployment.server import DeploymentConfig
from fedecider.deployment.tracks import track_of
from fedecider.experiment.command_line import parse_settings
from fedecider.experiment.prepare import load_data, without_users
from fedecider.federation.faults import MESSAGE_KINDS, UPLOAD_KINDS, read_faults
from fedecider.running.launch import start as launched
from fedecider.running.options import load_yaml, settings_file
from fedecider.running.progress import console, say
from fedecider.running.run_folder import RunFolder, check_output, damage_names, read_object

PROJECT, KITS, SITES = "project", "kits", "sites"


def provision(words: Sequence[str]) -> None:
    """Options of federate.py for the run, and --host, --port, --admin_port, --output of the deployment."""
    parser = parser_of(
        "provision",
        "All other options are those of federate.py: --config and so on say what is run, --data names the folder with "
        "what is public of every domain. With a method of the embedding track, --raw names prepared data, of which the "
        "catalogue is taken, and --sites a YAML file with the number of users of each site.",
    )
    parser.add_argument("--host", required=True, help="name by which sites reach the server")
    parser.add_argument("--port", type=int, default=jobs.PORTS[0], help="port for sites")
    parser.add_argument("--admin_port", type=int, default=jobs.PORTS[1], help="port for the administrator")
    parser.add_argument("--output", required=True, help="folder for project/ and kits/")
    own, rest = parser.parse_known_args(words)
    output = Path(own.output)
    check_output(output)
    run, root, names = users_project(rest, output) if of_embedding_track(rest) else _llm_project(rest, output)
    say(f"project {run}: {root}")
    for kit in jobs.provision(names, own.host, (own.port, own.admin_port), output / KITS):
        say(f"startup kit of {jobs.kind_of(kit)} {kit.name}: {kit}")
    say("send every party its kit and a copy of the project; next: docs/deploy.md")


def _llm_project(words: Sequence[str], output: Path) -> tuple[str, Path, list[str]]:
    """Fingerprint, folder and sites of a project whose sites are domains."""
    settings = parse_settings("", words)
    with launched(settings.run.num_threads) as launch:
        project = make_project(settings, output / PROJECT, launch.device)
    return project.run, project.root, project.names


def simulate(words: Sequence[str]) -> None:
    """Options of federate.py, and --deadline_s: the run folder holds the server's files, and sites/ those of each."""
    parser = parser_of("simulate", "", add_help=False)
    parser.add_argument("--deadline_s", type=float, default=0.0)
    own, rest = parser.parse_known_args(words)
    simulated = simulate_users if of_embedding_track(rest) else _simulate_domains
    collect(["--run", str(simulated(rest, DeploymentConfig(deadline_s=own.deadline_s)))])


def _simulate_domains(words: Sequence[str], config: DeploymentConfig) -> Path:
    settings = parse_settings(f"{PARTIES} Options are those of federate.py, and {DEADLINE}.", words)
    output = jobs.free_output(settings.run.output)
    domains = load_data(settings.run)
    faults = str(settings_file(settings.run.faults).absolute()) if settings.run.faults else ""
    if faults:
        read_faults(load_yaml(Path(faults)), list(domains), faults, (*UPLOAD_KINDS, *MESSAGE_KINDS))
    public = output / "public"
    save_domains({name: without_users(domain) for name, domain in domains.items()}, public)
    run = settings.run
    with launched(run.num_threads) as launch:
        placed = settings._replace(run=type(run)(**{**vars(run), "data": str(public), "faults": ""}))
        project = make_project(placed, output / PROJECT, launch.device)
    sites = jobs.site_names(project.names)
    files = {SERVER: PartyFile(str(project.root.absolute()), str((output / SERVER).absolute()), deployment=config)}
    for name, site in sites.items():
        home = (output / SITES / name).absolute()
        save_domains({name: domains[name]}, home / "data")
        files[site] = PartyFile(
            str(project.root.absolute()), str(home / "run"), str(home / "data"), name, run.num_threads, faults, config
        )
    jobs.simulate_parties(project.names, files, output)
    return output


def start(words: Sequence[str]) -> None:
    """Become the party of a startup kit, until it is shut down."""
    parser = parser_of("start", "Become the server or the site of a startup kit.")
    parser.add_argument("--kit", required=True, help="startup kit of this party")
    parser.add_argument("--party", required=True, help="YAML file with project, output and, at a site, data and client")
    own = parser.parse_args(words)
    kit, file = Path(own.kit), Path(own.party)
    kind, party = jobs.kind_of(kit), party_file(file)
    track = track_of(Path(party.project))
    project = track.read_project(Path(party.project))
    if kind == "admin":
        raise ValueError(f"got the administrator's kit {kit}, expected the server's or a site's: the admin submits")
    if kind == "site":
        expected = jobs.site_names(project.names).get(party.client)
        if expected != kit.name:
            raise ValueError(f"got client {party.client!r} in {file} with the kit of {kit.name}, expected its own kit")
        track.own_data(project, party.data, party.client)  # before it joins: FLARE ends a job whose site cannot answer
    jobs.start_party(kit, file)


def submit(words: Sequence[str]) -> None:
    """Start or resume the run of a project."""
    parser = parser_of("submit", "Start the rounds; the server and the sites must be up.")
    parser.add_argument("--kit", required=True, help="the administrator's startup kit")
    parser.add_argument("--project", required=True, help="project folder")
    parser.add_argument("--min_sites", type=int, default=None, help="sites without which FLARE does not start; all")
    parser.add_argument("--resume", choices=("true", "false"), default="false", help="go on with the server's run")
    own = parser.parse_args(words)
    names = track_of(Path(own.project)).read_project(Path(own.project)).names
    say(f"job {jobs.submit(Path(own.kit), names, own.resume == 'true', own.min_sites)}")


def status(words: Sequence[str]) -> None:
    """Who is connected, and the jobs."""
    parser = parser_of("status", "Show who is connected and what runs.")
    parser.add_argument("--kit", required=True, help="the administrator's startup kit")
    own = parser.parse_args(words)
    with jobs.session(Path(own.kit)) as admin:
        system = admin.get_system_info()
        say("server: up, no run" if system.server_info.status == "stopped" else "server: up, a run goes on")
        for client in system.client_info:
            say(f"site {client.name}: last heard of {max(0.0, time.time() - client.last_connect_time):.0f} s ago")
        for job in admin.list_jobs():
            say(f"job {job['job_id']}: {job['status']}, submitted {job['submit_time']}")


def collect(words: Sequence[str]) -> None:
    """The table of a deployed run, and what travelled."""
    parser = parser_of("collect", "Print the table and the bytes of a finished run.")
    parser.add_argument("--run", required=True, help="the server's run folder")
    folder = RunFolder(Path(parser.parse_args(words).run))
    metrics, wire = read_object(folder.metrics), read_object(folder.root / WIRE_FILE)
    with damage_names(folder.metrics):
        scopes = _scopes(metrics)
    if not scopes:
        raise ValueError(
            f"got no test of any site in {folder.metrics}, expected one at least: refused_after_rounds in {WIRE_FILE} "
            "says what became of them"
        )
    with damage_names(folder.metrics):
        table = Table(title=f"Test, round {metrics['best_round']}, as the sites tell it", show_edge=False)
        for column in ("row", *(f"{scope} {metric}" for scope in scopes for metric in ("hit@10", "ndcg@10"))):
            table.add_column(column)
        tests = [scope["test"] for scope in scopes.values()]
        for row in dict.fromkeys(row for test in tests for row in test):  # a site without siblings has fewer
            shown = (
                f"{test[row][metric]['mean']:.4f}" if row in test else "-"
                for test in tests
                for metric in ("hit@10", "ndcg@10")
            )
            table.add_row(row, *shown)
    console.print(table)
    with damage_names(folder.root / WIRE_FILE):
        down, up = (sum(one[way] for one in wire["messages"]) for way in ("bytes_down", "bytes_up"))
    say(f"messages: {len(wire['messages'])}, {down:,} bytes to the sites, {up:,} bytes from them")


def _scopes(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What the columns of the table are over: domains and their mean, or all users of a data set."""
    if "dataset" in metrics:
        return {metrics["dataset"]: metrics} if "test" in metrics else dict(metrics["sites"])
    return {**metrics["domains"], **({"macro": metrics["macro"]} if "macro" in metrics else {})}
