"""The commands of scripts/deploy.py, for every track; FLARE is imported by those that need it."""

from __future__ import annotations

import time
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.table import Table

from fedecider.bounds import Diverged
from fedecider.cross_silo.conclusion import sites_answer
from fedecider.cross_silo.prepare import without_users
from fedecider.data.card import baskets_in_words, summary
from fedecider.data.domain import Domain
from fedecider.data.dropped import Dropped
from fedecider.data.frames import HOW
from fedecider.data.mapping import TableOptions
from fedecider.data.sites import own_users, prepared_users
from fedecider.data.sites import publish as publish_tables
from fedecider.data.store import load_domains, save_domains
from fedecider.deployment.messages import DeploymentConfig
from fedecider.deployment.project import (
    PartyFile,
    Project,
    free_folder,
    make_project,
    party_file,
    read_project,
    site_names,
)
from fedecider.deployment.run import WIRE_FILE
from fedecider.engine.command_line import read_command
from fedecider.evaluation.protocols import MIN_EVENTS
from fedecider.running.damage import damage_names, read_object
from fedecider.running.launch import start as launched
from fedecider.running.options import HELP_ALL, options_of, pairs_of
from fedecider.running.progress import console, log_line
from fedecider.running.run_folder import RunFolder, check_output, read_run

PROJECT, KITS, SITES = "project", "kits", "sites"
OF_EVENTS = [name for name in HOW if name not in ("rating", "domain", "company", "items_key")]
"""How the table of one company's events is read, as `fedecider import` takes it."""
OF_ITEMS = ["items_key", "items_header"]
PORTS = (8002, 8003)
"""What sites (first) and the administrator reach the server by."""
OF_FEDERATE = "Options are those of federate.py; where a site hosts several clients, --sites says which of them"
SIMULATE = (
    f"Run every party as a process of this machine. {OF_FEDERATE}: how many sites share them evenly, or a YAML file "
    "with the keys of each site's; --deadline_s: the seconds that sites have for an answer, 0 waits for all of them."
)
PROVISION = f"Make a project. {OF_FEDERATE}: a YAML file with the number of users of each site."


class _Parser(ArgumentParser):
    """For the options of a command that are no settings of a run; wrong ones are told as every other bad input."""

    def __init__(self, command: str, text: str = "", **more: Any) -> None:
        super().__init__(prog=f"deploy.py {command}", description=text, allow_abbrev=False, **more)
        if self.add_help:  # there is no shorter help, but every other command knows the word
            self.add_argument(HELP_ALL, action="help", help=SUPPRESS)

    def error(self, message: str) -> Any:
        raise ValueError(f"{message}. All options: {self.prog} --help")


def _flare() -> ModuleType:
    """`fedecider.deployment.flare`.

    Raises:
        ValueError: its extra is not installed.
    """
    try:
        from fedecider.deployment import flare
    except ImportError as error:
        if error.name is None or not error.name.startswith("nvflare"):
            raise
        raise ValueError("got no nvflare, expected it to be installed. Run: pip install '.[deploy]'") from error
    return flare


def provision(words: Sequence[str]) -> None:
    """Options of federate.py for the run, and --host, --port, --admin_port, --output, --sites of the deployment."""
    parser = _Parser(
        "provision",
        "All other options are those of federate.py: --config and so on say what is run, --data names the folder with "
        "what is public of every domain. With a method whose clients are users, --raw names prepared data, of which "
        "the catalogue is taken.",
    )
    parser.add_argument("--host", required=True, help="name by which sites reach the server")
    parser.add_argument("--port", type=int, default=PORTS[0], help="port for sites")
    parser.add_argument("--admin_port", type=int, default=PORTS[1], help="port for the administrator")
    parser.add_argument("--output", required=True, help="folder for project/ and kits/")
    parser.add_argument("--sites", default="", help="where clients are users: a YAML file, site: number of its users")
    own, rest = parser.parse_known_args(words)
    output = Path(own.output)
    check_output(output)
    flare, project = _flare(), public_project(rest, own.sites, output)
    log_line(f"project {project.run}: {project.root}")
    for kit in flare.provision(project.names, own.host, (own.port, own.admin_port), output / KITS):
        log_line(f"startup kit of {flare.kind_of(kit)} {kit.name}: {kit}")
    log_line("send every party its kit and a copy of the project; next: docs/deploy.md")


def public_project(words: Sequence[str], sites: str, output: Path) -> Project:
    """The project below ``output`` that the options of a run describe, of what is public alone."""
    asked = read_command(words, PROVISION)
    if asked.config is None and asked.options.get("data"):
        raise ValueError(
            "got data without a config, expected the settings that a pilot chose: --config runs/pilot/chosen.yaml. "
            "Sites with other settings than the pilot's would come to another recommendation"
        )
    track, parts, settings = asked.track, asked.track.part("deployment"), asked.settings(words)
    shared = parts.public(settings, sites)
    with launched(settings.run.num_threads) as launch:
        return make_project(track, shared, output / PROJECT, launch.device)


def simulate(words: Sequence[str]) -> None:
    """Options of federate.py, --sites and --deadline_s: the output directory holds the server's files, and sites/ those
    of each."""
    parser = _Parser("simulate", add_help=False)
    parser.add_argument("--deadline_s", type=float, default=0.0)
    parser.add_argument("--sites", default="")
    own, rest = parser.parse_known_args(words)
    config = DeploymentConfig(deadline_s=own.deadline_s)
    asked = read_command(rest, SIMULATE)
    track, parts, settings = asked.track, asked.track.part("deployment"), asked.settings(rest)
    flare, run = _flare(), settings.run
    if not run.output:
        raise ValueError("got no output, expected the output directory: --output runs/<name>")
    output = free_folder(Path(run.output), "the run")
    shared = parts.simulated(settings, own.sites)
    with launched(run.num_threads) as launch:
        project = make_project(track, shared, output / PROJECT, launch.device)
    root = str(project.root.absolute())
    server = PartyFile(root, str((output / flare.SERVER).absolute()), num_threads=run.num_threads, deployment=config)
    files = {flare.SERVER: server}
    for name, site in site_names(project.names).items():
        home = (output / SITES / name).absolute()
        shared.write_own(name, home / "data")
        files[site] = PartyFile(root, str(home / "run"), str(home / "data"), name, run.num_threads, config)
    flare.simulate_parties(project.names, files, output)
    collect(["--run", str(output)])


def start(words: Sequence[str]) -> None:
    """Become the party of a startup kit, until it is shut down."""
    parser = _Parser("start", "Become the server or the site of a startup kit.")
    parser.add_argument("--kit", required=True, help="startup kit of this party")
    parser.add_argument("--party", required=True, help="YAML file with project, output and, at a site, data and client")
    own = parser.parse_args(words)
    flare, kit, file = _flare(), Path(own.kit), Path(own.party)
    kind, party = flare.kind_of(kit), party_file(file)
    project = read_project(Path(party.project))
    if kind == "admin":
        raise ValueError(f"got the administrator's kit {kit}, expected the server's or a site's: the admin submits")
    of_site = site_names(project.names).get(party.client, f"a site {party.client!r} of this project")
    flare.check_certificate(kit, of_site if kind == "site" else "")
    if kind == "site":  # before it joins: nobody waits for a site that cannot answer
        project.parts.own_data(project, party.data, party.client)
    flare.start_party(kit, file)


def submit(words: Sequence[str]) -> None:
    """Start or resume the run of a project."""
    parser = _Parser("submit", "Start the rounds; the server and the sites must be up.")
    parser.add_argument("--kit", required=True, help="the administrator's startup kit")
    parser.add_argument("--project", required=True, help="project folder")
    parser.add_argument("--min_sites", type=int, default=None, help="sites without which FLARE does not start; all")
    parser.add_argument("--resume", choices=("true", "false"), default="false", help="go on with the server's run")
    own = parser.parse_args(words)
    flare, names = _flare(), read_project(Path(own.project)).names
    log_line(f"job {flare.submit(Path(own.kit), names, own.resume == 'true', own.min_sites)}")


def status(words: Sequence[str]) -> None:
    """Who is connected, and the jobs."""
    parser = _Parser("status", "Show who is connected and what runs.")
    parser.add_argument("--kit", required=True, help="the administrator's startup kit")
    own = parser.parse_args(words)
    with _flare().session(Path(own.kit)) as admin:
        system = admin.get_system_info()
        log_line("server: up, no run" if system.server_info.status == "stopped" else "server: up, a run goes on")
        for client in system.client_info:
            log_line(f"site {client.name}: last heard of {max(0.0, time.time() - client.last_connect_time):.0f} s ago")
        for job in admin.list_jobs():
            log_line(f"job {job['job_id']}: {job['status']}, submitted {job['submit_time']}")


def collect(words: Sequence[str]) -> None:
    """The table of a deployed run, and what travelled; `Diverged` where it ended so."""
    parser = _Parser("collect", "Print the table and the bytes of a finished run.")
    parser.add_argument("--run", required=True, help="the server's output directory")
    folder = RunFolder(Path(parser.parse_args(words).run))
    metrics = read_object(folder.metrics)
    if "diverged" in metrics:
        raise Diverged(metrics["diverged"])
    wire = read_object(folder.root / WIRE_FILE)
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
        for row in dict.fromkeys(row for test in tests for row in test):  # a site with a catalogue of its own has fewer
            shown = (
                f"{test[row][metric]['mean']:.4f}" if row in test else "-"
                for test in tests
                for metric in ("hit@10", "ndcg@10")
            )
            table.add_row(row, *shown)
    console.print(table)
    with damage_names(folder.root / WIRE_FILE):
        down, up = (sum(one[way] for one in wire["messages"]) for way in ("bytes_down", "bytes_up"))
    log_line(f"messages: {len(wire['messages'])}, {down:,} bytes to the sites, {up:,} bytes from them")
    with damage_names(folder.metrics):
        sites = {name: one["test"] for name, one in metrics.get("domains", {}).items()}
        record = read_run(folder.root) if folder.record.is_file() else {}  # older servers kept none
        for sentence in record.get("overlap", {}).get("sentences", []):
            log_line(sentence)
        if (answer := sites_answer(sites, metrics, record)) is not None:
            log_line(answer.text)


def _scopes(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What the columns of the table are over: domains and their mean, or all users of a data set."""
    if "dataset" in metrics:
        return {metrics["dataset"]: metrics} if "test" in metrics else dict(metrics["sites"])
    return {**metrics["domains"], **({"macro": metrics["macro"]} if "macro" in metrics else {})}


def publish(words: Sequence[str]) -> None:
    """Prepared domains of all companies from the catalogue and the events that everybody may see."""
    parser = _Parser("publish", "Prepare what companies of one catalogue share: items and public users, no clients.")
    parser.add_argument("--data", default="", help="one company's prepared data, of which its clients are left out")
    parser.add_argument("--items", default="", help="table of all items: .parquet, .csv or .tsv")
    parser.add_argument("--companies", default="", help="names of the companies, separated by commas")
    parser.add_argument("--name", default="shop", help="name of the catalogue; domains are called NAME.COMPANY")
    parser.add_argument("--texts", default="", help="columns of texts: title=label,brand=maker; else by their names")
    parser.add_argument("--missing_text", choices=("error", "drop"), default="error", help="items without any text")
    _add_events(parser, "users whose events everybody may see; without it nobody is public", OF_ITEMS)
    own = parser.parse_args(words)
    if bool(own.data) == bool(own.items):
        raise ValueError("got neither or both of --data and --items, expected one company's prepared data, or a table")
    if own.data:
        domains = {name: without_users(one) for name, one in load_domains(own.data).items()}
        save_domains(domains, own.output)
        log_line(f"{summary(domains)}\nwritten to {own.output}: no customer of a company is in it")
        return
    domains = publish_tables(
        own.events or None,
        own.items,
        own.output,
        companies=[name.strip() for name in own.companies.split(",") if name.strip()],
        name=own.name,
        texts=pairs_of(own.texts, "texts", "title=label,brand=maker") or None,
        missing_text=own.missing_text,
        **_columns(own),
    )
    _log(domains, own.output)


def prepare(words: Sequence[str]) -> None:
    """A site's own users, with the catalogue and the public users of the project."""
    parser = _Parser("prepare", "Prepare a company's own users with the items and public users of the project.")
    parser.add_argument("--project", required=True, help="project folder")
    parser.add_argument("--client", required=True, help="name of this company in the project")
    parser.add_argument("--data", default="", help="this company's prepared data, as fedecider import wrote them")
    _add_events(parser, "this company's users")
    own = parser.parse_args(words)
    if bool(own.data) == bool(own.events):
        raise ValueError("got neither or both of --data and --events, expected prepared data, or a table of events")
    public = f"{own.project}/public"
    if own.data:
        domain = prepared_users(own.data, public, own.client, own.output)
        log_line(f"{summary({own.client: domain})}\nwritten to {own.output}")
        return
    domain = own_users(own.events, public, own.client, own.output, **_columns(own))
    _log({own.client: domain}, own.output)


def _add_events(parser: ArgumentParser, whose: str, of_items: Sequence[str] = ()) -> None:
    table = "table (.parquet, .csv or .tsv), or mapping file of import,"
    parser.add_argument("--events", default="", help=f"{table} of the events of {whose}")
    parser.add_argument("--output", required=True, help="folder for the prepared domains")
    for option in options_of(TableOptions):
        if option.name in (*OF_EVENTS, *of_items):
            parser.add_argument(f"--{option.name}", help=option.text.replace("``", "").replace("%", "%%"))
    parser.add_argument("--min_length", type=int, default=MIN_EVENTS, help="users with fewer events are left out")
    parser.add_argument("--max_length", type=int, default=None, help="so many newest events of a user are kept; all")


def _columns(own: Any) -> dict[str, Any]:
    names = (*OF_EVENTS, *OF_ITEMS, "min_length", "max_length")
    return {name: value for name, value in vars(own).items() if name in names and value not in (None, "")}


def _log(domains: dict[str, Domain], output: str) -> None:
    log_line(summary(domains))
    first = next(iter(domains.values()))
    log_line(f"{first.catalogue.name}: {Dropped(first.card['dropped'])}")
    for line in (*first.card["notes"], *baskets_in_words(first)):
        log_line(line)
    log_line(f"written to {output}")
