"""The commands of scripts/deploy.py."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from fedecider.data.store import save_domains
from fedecider.deployment import jobs
from fedecider.deployment.flare import SERVER, PartyFile, party_file
from fedecider.deployment.project import make_project, read_project
from fedecider.deployment.run import WIRE_FILE
from fedecider.deployment.server import DeploymentConfig
from fedecider.federation.faults import MESSAGE_KINDS, UPLOAD_KINDS, read_faults
from fedecider.llm.commands import parse_settings
from fedecider.llm.setup import Settings, load_data, without_users
from fedecider.running.damage import damage_names, read_object
from fedecider.running.launch import start as launched
from fedecider.running.progress import console, say
from fedecider.running.run_folder import RunFolder, check_output
from fedecider.running.yaml_file import load_yaml, settings_file

PROJECT, KITS, SITES = "project", "kits", "sites"


def provision(words: Sequence[str]) -> None:
    """Options of federate.py for the run, and --host, --port, --admin_port, --output of the deployment."""
    parser = _parser(
        "provision",
        "All other options are those of federate.py: --config and so on say what is run, --data names the folder with "
        "what is public of every domain.",
    )
    parser.add_argument("--host", required=True, help="name by which sites reach the server")
    parser.add_argument("--port", type=int, default=jobs.PORTS[0], help="port for sites")
    parser.add_argument("--admin_port", type=int, default=jobs.PORTS[1], help="port for the administrator")
    parser.add_argument("--output", required=True, help="folder for project/ and kits/")
    own, rest = parser.parse_known_args(words)
    settings, output = parse_settings("", rest), Path(own.output)
    check_output(output)
    with launched(settings.run.num_threads) as launch:
        project = make_project(settings, output / PROJECT, launch.device)
    say(f"project {project.run}: {project.root}")
    for kit in jobs.provision(project.names, own.host, (own.port, own.admin_port), output / KITS):
        say(f"startup kit of {jobs.kind_of(kit)} {kit.name}: {kit}")
    say("send every party its kit and a copy of the project; next: docs/deploy.md")


def simulate(words: Sequence[str]) -> None:
    """Options of federate.py, and --deadline_s: the run folder holds the server's files, and sites/ those of each."""
    parser = _parser("simulate", "Run every party as a process of this machine. All other options: federate.py.")
    parser.add_argument("--deadline_s", type=float, default=0.0, help="seconds that sites have for an answer; 0: all")
    own, rest = parser.parse_known_args(words)
    settings, config = parse_settings("", rest), DeploymentConfig(deadline_s=own.deadline_s)
    if not settings.run.output:
        raise ValueError("got no output, expected the run folder: --output runs/<name>")
    output = Path(settings.run.output)
    check_output(output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"got the folder {output}, which is not empty, expected a free place for the run")
    _simulate(settings, output, config)
    collect(["--run", str(output)])


def _simulate(settings: Settings, output: Path, config: DeploymentConfig) -> None:
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
    parties = output / "parties"
    parties.mkdir()
    sites = jobs.site_names(project.names)
    files = {SERVER: PartyFile(str(project.root.absolute()), str((output / SERVER).absolute()), deployment=config)}
    for name, site in sites.items():
        home = (output / SITES / name).absolute()
        save_domains({name: domains[name]}, home / "data")
        files[site] = PartyFile(
            str(project.root.absolute()), str(home / "run"), str(home / "data"), name, run.num_threads, faults, config
        )
    for name, file in files.items():
        (parties / f"{name}.yaml").write_text(yaml.safe_dump(asdict(file)))
    jobs.simulate(project.names, parties.absolute(), (output / "flare").absolute())
    finished = RunFolder(output / SERVER)
    if not finished.metrics.is_file():
        raise ValueError(f"got no result of the server, expected one: see {output / 'flare'} for what FLARE logged")
    for path in (output / SERVER).iterdir():
        path.rename(output / path.name)
    (output / SERVER).rmdir()


def start(words: Sequence[str]) -> None:
    """Become the party of a startup kit, until it is shut down."""
    parser = _parser("start", "Become the server or the site of a startup kit.")
    parser.add_argument("--kit", required=True, help="startup kit of this party")
    parser.add_argument("--party", required=True, help="YAML file with project, output and, at a site, data and client")
    own = parser.parse_args(words)
    kit, file = Path(own.kit), Path(own.party)
    kind, party = jobs.kind_of(kit), party_file(file)
    project = read_project(Path(party.project))
    if kind == "admin":
        raise ValueError(f"got the administrator's kit {kit}, expected the server's or a site's: the admin submits")
    if kind == "site":
        expected = jobs.site_names(project.names).get(party.client)
        if expected != kit.name:
            raise ValueError(f"got client {party.client!r} in {file} with the kit of {kit.name}, expected its own kit")
    jobs.start_party(kit, file)


def submit(words: Sequence[str]) -> None:
    """Start or resume the run of a project."""
    parser = _parser("submit", "Start the rounds; the server and the sites must be up.")
    parser.add_argument("--kit", required=True, help="the administrator's startup kit")
    parser.add_argument("--project", required=True, help="project folder")
    parser.add_argument("--min_sites", type=int, default=None, help="sites without which FLARE does not start; all")
    parser.add_argument("--resume", choices=("true", "false"), default="false", help="go on with the server's run")
    own = parser.parse_args(words)
    names = read_project(Path(own.project)).names
    say(f"job {jobs.submit(Path(own.kit), names, own.resume == 'true', own.min_sites)}")


def status(words: Sequence[str]) -> None:
    """Who is connected, and the jobs."""
    parser = _parser("status", "Show who is connected and what runs.")
    parser.add_argument("--kit", required=True, help="the administrator's startup kit")
    own = parser.parse_args(words)
    with jobs.session(Path(own.kit)) as admin:
        system = admin.get_system_info()
        say(f"server: {system.server_info.status}")
        for client in system.client_info:
            say(f"site {client.name}: last heard of {client.last_connect_time}")
        for job in admin.list_jobs():
            say(f"job {job['job_id']}: {job['status']}, submitted {job['submit_time']}")


def collect(words: Sequence[str]) -> None:
    """The table of a deployed run, and what travelled."""
    parser = _parser("collect", "Print the table and the bytes of a finished run.")
    parser.add_argument("--run", required=True, help="the server's run folder")
    folder = RunFolder(Path(parser.parse_args(words).run))
    metrics, wire = read_object(folder.metrics), read_object(folder.root / WIRE_FILE)
    with damage_names(folder.metrics):
        scopes = {**metrics["domains"], **({"macro": metrics["macro"]} if "macro" in metrics else {})}
        table = Table(title=f"Test, round {metrics['best_round']}, as the sites tell it", show_edge=False)
        for column in ("row", *(f"{scope} {metric}" for scope in scopes for metric in ("hit@10", "ndcg@10"))):
            table.add_column(column)
        for row in next(iter(scopes.values()))["test"]:
            values = (
                scope["test"][row][metric]["mean"] for scope in scopes.values() for metric in ("hit@10", "ndcg@10")
            )
            table.add_row(row, *(f"{value:.4f}" for value in values))
    console.print(table)
    with damage_names(folder.root / WIRE_FILE):
        down, up = (sum(one[way] for one in wire["messages"]) for way in ("bytes_down", "bytes_up"))
    say(f"messages: {len(wire['messages'])}, {down:,} bytes to the sites, {up:,} bytes from them")


def _parser(command: str, text: str) -> ArgumentParser:
    return _Parser(prog=f"deploy.py {command}", description=text, allow_abbrev=False)


class _Parser(ArgumentParser):
    """Wrong options are told as every other bad input."""

    def error(self, message: str) -> Any:
        raise ValueError(f"{message}. All options: deploy.py {self.prog.split()[-1]} --help")
