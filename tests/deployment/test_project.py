"""A deployed run on prepared data: each site reads its own folder, and the figures are those of the simulation."""

import dataclasses
import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import fedecider as fd
from fedecider.cli.main import main
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.conclusion import sites_answer
from fedecider.cross_silo.prepare import without_users
from fedecider.cross_silo.track import TRACK
from fedecider.data.card import make_card, overlaps
from fedecider.data.domain import Domain, Events
from fedecider.data.sample import sample_domains
from fedecider.data.silos import share_out
from fedecider.data.store import load_domains, save_domains
from fedecider.deployment.commands import collect
from fedecider.deployment.llm import public
from fedecider.deployment.messages import DeploymentConfig
from fedecider.deployment.project import PartyFile, make_project, read_project
from fedecider.deployment.run import make_site, serve
from fedecider.federation.record import read_records
from fedecider.report.joining import DIFFERENCE
from fedecider.running.launch import start

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = ("crime", "comics")
CPU = torch.device("cpu")
CONFIG = DeploymentConfig(max_megabytes=64)
SEVERAL_TOKENS = ("--pretrain.ids", "keywords", "--pretrain.train.table_lr_multiplier", "1")


def few(domain: Domain, first: int = 0) -> Domain:
    clients, public = (
        Events(*(column[begin : begin + count] for column in events))
        for events, begin, count in ((domain.clients, first, 30), (domain.public, 0, 20))
    )
    small = dataclasses.replace(domain, clients=clients, public=public, card={})
    small.card.update(make_card(small))
    return small


def federate(*words: str) -> None:
    assert runpy.run_path(str(REPOSITORY / "scripts" / "federate.py"))["main"](list(words)) == 0


def toy_settings(names, **more) -> str:
    """The demo, made small, with ``more`` options."""
    content = yaml.safe_load((REPOSITORY / "configs" / "demo_causal.yaml").read_text())
    content |= {"domains": ",".join(names), "data": "public", "num_rounds": 2, "local_epochs": 1, "lora_rank": 2}
    content |= {"num_eval_users": 0, "lora_targets": "attention,table", "num_threads": 1}
    content["pretrain"] |= {"text_encoder": "tfidf"}
    content["pretrain"]["backbone"] |= {"d_model": 16}
    content["pretrain"]["train"] |= {"max_steps": 4}
    content["distill"] |= {"epochs": 1}
    return yaml.safe_dump(content | more)


def project_of(folder, *words):
    return make_project(TRACK, public(parse_settings(list(words))), folder, CPU, quiet=True)


def place(folder, project, name, data=""):
    """Where the site ``name`` finds its things; the server where there is no name."""
    output = str(folder / "out" / (name or "server"))
    return PartyFile(str(project.root), output, str(data), name, deployment=CONFIG)


def write_playground(folder, domains, simulates=True, **more) -> None:
    """``all/`` as a simulation reads it, ``site-<name>/`` with one company's users each, ``public/`` with nobody's; the
    simulated run, if there is one, and the project."""
    save_domains(domains, folder / "all")
    save_domains({name: without_users(domain) for name, domain in domains.items()}, folder / "public")
    for name, domain in domains.items():
        save_domains({name: domain}, folder / f"site-{name}")
    (folder / "toy.yaml").write_text(toy_settings(domains, **more))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if simulates:
            federate("--config", "toy.yaml", "--data", "all", "--output", "runs/simulated", "--cache", "cache")
        project_of(folder / "project", "--config", "toy.yaml")


def deploy_playground(folder) -> None:
    project = read_project(folder / "project")
    with start(1) as launch:
        sites = [
            make_site(project, place(folder, project, name, folder / f"site-{name}"), launch) for name in project.names
        ]
        serve(project, place(folder, project, ""), exchange_with(sites), CPU)


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    write_playground(folder, {name: few(domain) for name, domain in sample_domains(list(NAMES)).items()})
    return folder


def exchange_with(sites):
    return lambda sent, deadline_s: {client: sites[client].answer(blob) for client, blob in sent.items()}


@pytest.fixture(scope="module")
def deployed(playground):
    deploy_playground(playground)
    return playground / "out"


def read(path):
    return json.loads(path.read_text())


def test_an_auditor_of_a_site_sees_all_that_left_and_who_may_read_what(deployed, capsys):
    wire = read(deployed / "server" / "wire.json")["messages"]
    for client, name in enumerate(NAMES):
        left = read_records(deployed / name / "left.jsonl")
        assert sum(one["bytes"] for one in left) == sum(one["bytes_up"] for one in wire if one["client"] == client)
        assert {one["kind"] for one in left} >= {"upload", "scores", "results"}
        trained = [one for one in left if one["kind"] == "upload"]
        assert [one["round"] for one in trained] == [1, 2]
        assert trained[0]["tensors"]
        assert trained[0]["sha256"] != trained[1]["sha256"]
    (deployed / "crime" / "per_user.parquet").chmod(0o600)
    assert main(["audit", "--run", str(deployed / "crime")]) == 0
    said = capsys.readouterr().out
    assert "upload: 2 in rounds 1 to 2, " in said
    assert "holds customers' data: private/crime/ensemble.json, its owner alone reads it" in said
    assert "holds customers' data: per_user.parquet, its owner alone reads it" in said
    assert "holds customers' data: report.html, others may read it: chmod 600" in said
    assert "holds customers' data: sent.safetensors, " in said


def attacked(folder, capsys, **more):
    """What the auditor of one of three companies of a catalogue reads of attacks: what is seen -> AUC, low, high; and
    the whole page."""
    write_playground(folder, share_out(sample_domains(["crime"]), 3, None, 0), False, **more)
    deploy_playground(folder)
    capsys.readouterr()
    assert main(["audit", "--run", str(folder / "out" / "crime.1"), "--num_users", "60"]) == 0
    said = capsys.readouterr().out
    print(said)
    found = re.findall(r"^(.+), from (.+): AUC ([0-9.]+) \[([0-9.]+), ([0-9.]+)\]", said, re.M)
    return {f"{party}: {sees}": tuple(map(float, figures)) for party, sees, *figures in found}, said


STUDENT, MEAN = "nobody: the shared student alone", "server and all sites: the mean of all sites, which came last"
MEMORISING = {"method": "fedavg", "learning_rate": 0.01, "local_epochs": 20, "lora_rank": 16, "lora_targets": "table"}


def test_a_server_reads_purchases_off_a_plain_upload_and_the_auditor_of_the_site_sees_how_well(tmp_path, capsys):
    figures, said = attacked(tmp_path, capsys, **MEMORISING)
    last = [one for one in read_records(tmp_path / "out" / "crime.1" / "left.jsonl") if one["kind"] == "upload"][-1]
    upload = f"server: the upload of round 2 (SHA-256 {last['sha256'][:16]})"
    assert list(figures) == [STUDENT, upload, MEAN]
    assert figures[upload][1] > 0.75
    assert figures[STUDENT][2] < 0.6
    assert figures[STUDENT][0] < figures[MEAN][0] < figures[upload][0]
    assert "60 newest train purchases of its customers against 60 held-out ones" in said


def test_under_secure_sums_the_auditor_of_a_site_sees_that_no_upload_can_be_attacked(tmp_path, capsys):
    figures, said = attacked(tmp_path, capsys, secure_sum=True, **MEMORISING)
    assert list(figures) == [STUDENT, MEAN]
    assert "uploads of crime.1 left masked: the server reads none of them, only the sum over 3 sites" in said
    assert not (tmp_path / "out" / "crime.1" / "sent.safetensors").exists()


def test_a_site_whose_project_is_gone_is_listed_but_not_attacked(playground, deployed, tmp_path, capsys):
    record = read(deployed / "crime" / "run.json")
    record["config"]["run"]["cache"] = str(tmp_path / "elsewhere" / "cache")
    shutil.copytree(deployed / "crime", tmp_path / "site")
    (tmp_path / "site" / "run.json").write_text(json.dumps(record))
    assert main(["audit", "--run", str(tmp_path / "site")]) == 2
    seen = capsys.readouterr()
    assert "upload: 2 in rounds 1 to 2, " in seen.out
    assert f"got {tmp_path / 'elsewhere'} without project.json" in seen.err


def test_every_site_has_the_figures_of_the_simulated_run(playground, deployed):
    simulated = read(playground / "runs" / "simulated" / "metrics.json")
    server = read(deployed / "server" / "metrics.json")
    assert server["best_round"] == simulated["best_round"]
    assert server["best_valid_ndcg@10"] == pytest.approx(simulated["best_valid_ndcg@10"], abs=1e-12)
    for name in NAMES:
        site = read(deployed / name / "metrics.json")
        assert site["domains"].keys() == {name}
        expected, found = simulated["domains"][name], site["domains"][name]
        assert found["test"].keys() == expected["test"].keys()
        for row, metrics in expected["test"].items():
            for metric, value in metrics.items():
                assert found["test"][row][metric]["mean"] == pytest.approx(value["mean"], abs=1e-6), (row, metric)
        told = dict(server["domains"][name]["test"])
        difference = told.pop(DIFFERENCE)
        assert told == found["test"]
        pair = (simulated["joining"]["joined"], simulated["joining"]["alone"])
        for one in simulated["comparisons"]:
            if (one["domain"], one["first"], one["second"]) == (name, *pair):
                assert difference[one["metric"]]["mean"] == pytest.approx(one["difference"]["mean"], abs=1e-9)
        assert site["ensemble"] == {name: simulated["ensemble"][name]}
        assert (deployed / name / "private" / name).is_dir()
        adapter = deployed / name / "adapters" / name / "adapter_model.safetensors"
        twin = playground / "runs" / "simulated" / "adapters" / name / "adapter_model.safetensors"
        assert adapter.read_bytes() == twin.read_bytes()
    reported = simulated["reported"]
    assert server["macro"]["test"][reported]["ndcg@10"]["mean"] == pytest.approx(
        simulated["macro"]["test"][reported]["ndcg@10"]["mean"], abs=1e-6
    )
    sites = {name: server["domains"][name]["test"] for name in NAMES}
    answer = sites_answer(sites, server, read(playground / "runs" / "simulated" / "run.json"))
    assert answer.recommendation == fd.load(playground / "runs" / "simulated").recommendation
    assert all(name in answer.lines[1] for name in NAMES)


def test_a_sites_folder_is_read_and_changed_by_what_reads_and_changes_runs(playground, deployed, tmp_path, capsys):
    def said(*words):
        assert main([str(word) for word in words]) == 0, capsys.readouterr().err
        return " ".join(capsys.readouterr().out.split())

    site = tmp_path / "site"
    shutil.copytree(deployed / "crime", site)
    record = read(site / "run.json")
    assert record["config"]["run"]["domains"] == "crime"
    assert str(playground / "site-comics") not in (site / "run.json").read_text()
    (site / "report.html").unlink()
    assert "report.html" in said("report", "--run", site)
    assert "Recommendation" in (site / "report.html").read_text()
    assert "crime" in said("evaluate", "--run", site)
    domain = load_domains(playground / "site-crime", ["crime"])["crime"]
    user, keys = domain.clients.users[0], domain.item_keys
    asked = ["recommend", "--run", site, "--customers", user, "--json", "true"]
    before = json.loads(said(*asked))
    new = next(key for key in keys if keys.index(key) not in domain.clients.sequences[0])
    rows = "".join(f"{user},{one},{time}\n" for one, time in ((new, 1_790_000_000), (keys[3], 1_790_000_001)))
    (tmp_path / "new.csv").write_text(f"user,item,timestamp\n{rows}")
    words = ("update", "--run", site, "--events", tmp_path / "new.csv", "--force", "true")
    assert "version 2 of" in said(*words, "--epochs", 1)
    after = json.loads(said(*asked))
    assert [item["key"] for item in after["history"]] == [item["key"] for item in before["history"]] + [new, keys[3]]
    said("update", "--run", site, "--version", 1)
    assert "left this site: 10 messages" in said("audit", "--run", site)
    assert json.loads(said(*asked)) == before
    assert "1 customer and" in said("forget", "--run", site, "--customer", user)
    assert json.loads(said(*asked))["history"] == []


def test_the_server_has_nothing_of_any_user(playground, deployed):
    users = {user for name in NAMES for user in load_domains(playground / "all", [name])[name].clients.users}
    for folder in (playground / "project", deployed / "server"):
        for path in folder.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert not any(user.encode() in content for user in users), path
    assert not (deployed / "server" / "private").exists()
    records = [json.loads(line) for line in (deployed / "server" / "rounds.jsonl").read_text().splitlines()]
    assert all(set(log) == {"client", "examples"} for record in records for log in record["clients"])


def test_a_site_is_warned_of_its_own_events(playground, tmp_path, monkeypatch):
    """Before the first message, and nobody else is told."""
    name, said = NAMES[0], []
    (domain,) = load_domains(playground / f"site-{name}", [name]).values()
    rows = [[row[0]] + [5] * (len(row) - 1) for row in map(list, domain.clients.sequences)]
    wrong = dataclasses.replace(domain, clients=Events(list(domain.clients.users), rows, None), card={})
    wrong.card.update(make_card(wrong))
    save_domains({name: wrong}, tmp_path / "wrong")
    project = read_project(playground / "project")
    monkeypatch.setattr("fedecider.deployment.llm.log_line", said.append)
    with start(1) as launch:
        make_site(project, place(tmp_path, project, name, playground / f"site-{name}"), launch)
        assert not any(line.startswith("Warning: ") for line in said)
        make_site(project, place(tmp_path, project, name, tmp_path / "wrong"), launch)
    assert any(f" % of the events of {name} are of one item" in line for line in said)


def test_the_project_is_the_same_whoever_makes_it(playground, monkeypatch, tmp_path):
    """Whatever client users are in the data, and whatever their cards tell of them."""
    monkeypatch.chdir(playground)
    others = {name: few(domain, first=60) for name, domain in sample_domains(list(NAMES)).items()}
    for name, shared in overlaps(others).items():
        told = {"overlap": shared, "raw": {"users": 50}, "silo": {"users": 30, "users_by_cluster": [10, 20]}}
        others[name].card.update(told, settings={"users_per_domain": 30})
    save_domains(others, tmp_path / "others")
    again = project_of(tmp_path / "project", "--config", "toy.yaml", "--data", str(tmp_path / "others"))
    assert again.run == read_project(playground / "project").run
    public, same = (folder / "project" / "public" for folder in (playground, tmp_path))
    files = sorted(path.relative_to(public) for path in public.rglob("*.*"))
    assert [str(path) for path in files if path.suffix in (".json", ".md")] == [
        "README.md",
        *(f"{name}/{file}" for name in sorted(NAMES) for file in ("README.md", "card.json")),
    ]
    for path in files:
        assert (same / path).read_bytes() == (public / path).read_bytes(), path


def test_what_sites_are_sent_is_what_the_wire_counts(deployed):
    messages = read(deployed / "server" / "wire.json")["messages"]
    records = [json.loads(line) for line in (deployed / "server" / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        counted = sum(
            (sum(group["up"].values()) + group["header_up"]) * len(group["clients"]) for group in record["traffic"]
        )
        up = [one["bytes_up"] for one in messages if (one["round"], one["kind"]) == (record["round"], "train")]
        assert 0 < sum(up) - counted < 2000 * len(NAMES)


NOTHING = (
    "crime and comics have no common items: joining rarely helps, and only through shared model layers and "
    "public users."
)


def test_server_sites_and_the_report_say_what_companies_have_in_common(playground, deployed, capsys):
    record = read(deployed / "server" / "run.json")["overlap"]
    assert record["sentences"] == [NOTHING]
    assert record["pairs"][0]["event_share"] == [None, None], "the server has nobody's events"
    collect(["--run", str(deployed / "server")])
    assert NOTHING in capsys.readouterr().out
    project = read_project(playground / "project")
    with start(1) as launch:
        make_site(project, place(playground / "again", project, "crime", playground / "site-crime"), launch)
    own = (
        "crime shares no item with comics: joining rarely helps, and only through shared model layers and public users."
    )
    assert own in capsys.readouterr().out


def test_a_site_with_another_catalogue_is_refused(playground, tmp_path):
    project = read_project(playground / "project")
    domain = load_domains(playground / "site-crime", ["crime"])["crime"]
    other = dataclasses.replace(domain.catalogue, titles=[*domain.titles[:-1], "Other"])
    save_domains({"crime": dataclasses.replace(domain, catalogue=other)}, tmp_path)
    with start(1) as launch:
        with pytest.raises(ValueError, match="crime"):
            make_site(project, place(tmp_path, project, "crime", tmp_path), launch)
        with pytest.raises(ValueError, match="sports"):
            make_site(project, place(tmp_path, project, "sports", tmp_path), launch)
        with pytest.raises(ValueError, match="comics"):
            make_site(project, place(tmp_path, project, "comics", playground / "public"), launch)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "centralised"), "expected one that federates"),
        (("--method", "local"), "expected one that exchanges something: let each train alone, where its data are"),
        (("--public_domains", "children"), "got public_domains"),
        (("--data", ""), "got no data"),
        (("--secure_sum", "true"), "got secure_sum with fedecider, whose server takes no mean over clients"),
        (("--robust_mean", "median"), "got robust_mean median with fedecider, whose server takes no mean"),
        (("--lora_targets", "nonsense"), "nonsense"),
        (("--num_beams", "3", *SEVERAL_TOKENS), "got num_beams 3, expected at least 20"),
        (("--lora_rank", "4000"), "got lora_rank 4000, expected at most 16"),
        (("--tracker", "tensorboard"), "got tracker tensorboard, expected none in a deployment"),
    ],
)
def test_what_cannot_be_deployed_is_told_before_any_work(words, message, playground, monkeypatch, tmp_path):
    monkeypatch.chdir(playground)
    with pytest.raises(ValueError, match=message):
        project_of(tmp_path / "project", "--config", "toy.yaml", *words)
    assert not list(tmp_path.iterdir())
