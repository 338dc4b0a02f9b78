"""FLARE as the line: names, kits with certificates, and (slow) rounds in its simulator."""

import json
import re
import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

pytest.importorskip("nvflare", reason="needs nvflare: pip install '.[deploy]'")

from test_project import few

from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domains
from fedecider.deployment import commands, flare
from fedecider.deployment.flare import PARTY, of_blob, read_party, to_blob
from fedecider.deployment.project import party_file
from fedecider.report.joining import DIFFERENCE

REPOSITORY = Path(__file__).resolve().parents[2]


def deploy(*words: str) -> int:
    return runpy.run_path(str(REPOSITORY / "scripts" / "deploy.py"))["main"](list(words))


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits")
    return {path.name: path for path in flare.provision(["crime", "movies_tv.1"], "localhost", (18102, 18103), folder)}


def test_every_party_has_a_kit_of_its_own(kits):
    assert {name: flare.kind_of(kit) for name, kit in kits.items()} == {
        "localhost": "server",
        "site-crime": "site",
        "site-movies-tv-1": "site",
        "admin@fedecider.org": "admin",
    }
    keys = [next(kit.rglob("*.key")).read_bytes() for kit in kits.values()]
    assert len(set(keys)) == len(keys)
    roots = {(kit / "startup" / "rootCA.pem").read_bytes() for kit in kits.values()}
    assert len(roots) == 1
    state = kits["localhost"].parent / "state"
    assert state.stat().st_mode & 0o077 == 0  # the authority's key
    server = json.loads((kits["localhost"] / "startup" / "fed_server.json").read_text())
    assert "18102" in json.dumps(server)


def test_another_project_has_another_authority(kits, tmp_path):
    (stranger,) = [
        path for path in flare.provision(["crime"], "localhost", (18102, 18103), tmp_path) if path.name == "site-crime"
    ]
    own = kits["site-crime"]
    assert (stranger / "startup" / "rootCA.pem").read_bytes() != (own / "startup" / "rootCA.pem").read_bytes()


def test_a_job_brings_no_code(tmp_path):
    flare.make_job(["crime", "comics"]).export_job(str(tmp_path))
    assert not list(tmp_path.rglob("*.py"))
    clients = [json.loads(path.read_text()) for path in tmp_path.rglob("config_fed_client.json")]
    assert len(clients) == 2
    assert all("fedecider.deployment.flare.SiteExecutor" in json.dumps(config) for config in clients)
    (server,) = tmp_path.rglob("config_fed_server.json")
    assert "fedecider.deployment.flare.RoundsController" in server.read_text()


def test_a_party_loads_no_other_class(kits):
    for name in ("localhost", "site-crime"):
        resources = json.loads((kits[name] / "local" / "resources.json").read_text())
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert resources["class_allow_list"] == [
            "fedecider.deployment.flare.RoundsController",
            "fedecider.deployment.flare.SiteExecutor",
        ]


def test_a_server_keeps_its_jobs_in_its_kit(kits, tmp_path, monkeypatch):
    """And not where the next server of this machine finds them."""
    moved = shutil.copytree(kits["localhost"], tmp_path / "elsewhere")
    begun = []
    monkeypatch.setattr(flare.os, "execve", lambda *words: begun.append(words))
    flare.start_party(moved, tmp_path / "server.yaml")
    assert begun[0][1][1] == str(moved / "startup" / "sub_start.sh")
    before = json.loads((kits["localhost"] / "local" / "resources.json").read_text())
    assert "/tmp/nvflare" in json.dumps(before)
    resources = json.loads((moved / "local" / "resources.json").read_text())
    assert "/tmp/nvflare" not in json.dumps(resources)
    assert json.dumps(resources).count(str(moved)) == 2
    assert resources["class_allow_list"] == before["class_allow_list"]


def test_a_blob_keeps_every_byte_in_flares_wrapping():
    blob = bytes(range(256))
    assert to_blob(of_blob(blob)) == blob
    wrapped = of_blob(blob)
    wrapped.params = {"message": "text"}
    assert to_blob(wrapped) == b""
    wrapped.params = None
    assert to_blob(wrapped) == b""


def test_a_site_with_other_data_does_not_join(monkeypatch, tmp_path):
    def other(project, data, client):
        raise ValueError(f"got another catalogue of {client} in {data}")

    project = SimpleNamespace(names=["crime"], parts=SimpleNamespace(own_data=other))
    monkeypatch.setattr(commands, "read_project", lambda root: project)
    monkeypatch.setattr(flare, "kind_of", lambda kit: "site")
    monkeypatch.setattr(flare, "start_party", lambda kit, file: pytest.fail("it joined"))
    file = tmp_path / "party.yaml"
    file.write_text(yaml.safe_dump({"project": "p", "output": "o", "data": "d", "client": "crime"}))
    with pytest.raises(ValueError, match="catalogue of crime"):
        commands.start(["--kit", str(tmp_path / "site-crime"), "--party", str(file)])


def test_a_party_reads_its_own_file(monkeypatch, tmp_path):
    file = tmp_path / "site-crime.yaml"
    file.write_text(yaml.safe_dump({"project": "p", "output": "o", "data": "d", "client": "crime"}))
    monkeypatch.setenv(PARTY, str(file))
    assert read_party("whoever").client == "crime"
    monkeypatch.setenv(PARTY, str(tmp_path))
    assert read_party("site-crime").data == "d"
    with pytest.raises(ValueError, match="site-comics"):
        read_party("site-comics")
    monkeypatch.delenv(PARTY)
    with pytest.raises(ValueError, match=re.escape("deploy.py start")):
        read_party("site-crime")
    file.write_text("project: p\noutput: o\nport: 1\n")
    with pytest.raises(ValueError, match="port"):
        party_file(file)


@pytest.mark.slow
def test_flares_simulator_has_the_figures_of_the_simulated_run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    save_domains({name: few(one) for name, one in sample_domains(["crime", "comics"]).items()}, tmp_path / "all")
    content = yaml.safe_load((REPOSITORY / "configs" / "demo_causal.yaml").read_text())
    content |= {"domains": "crime,comics", "data": "all", "num_rounds": 2, "local_epochs": 1, "lora_rank": 2}
    content |= {"num_threads": 1}
    content["pretrain"] |= {"text_encoder": "tfidf"}
    content["pretrain"]["backbone"] |= {"d_model": 16}
    content["pretrain"]["train"] |= {"max_steps": 4}
    content["distill"] |= {"epochs": 1}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(content))
    federate = runpy.run_path(str(REPOSITORY / "scripts" / "federate.py"))["main"]
    assert federate(["--config", "toy.yaml", "--output", "runs/simulated"]) == 0
    assert deploy("simulate", "--config", "toy.yaml", "--deadline_s", "500", "--output", "runs/flare") == 0
    simulated, found = (json.loads(Path(f"runs/{run}/metrics.json").read_text()) for run in ("simulated", "flare"))
    assert found["best_valid_ndcg@10"] == pytest.approx(simulated["best_valid_ndcg@10"], abs=1e-12)
    for name, domain in simulated["domains"].items():
        for row, metrics in domain["test"].items():
            for metric, value in metrics.items():
                assert found["domains"][name]["test"][row][metric]["mean"] == pytest.approx(value["mean"], abs=1e-6)
    pair = (simulated["joining"]["joined"], simulated["joining"]["alone"])
    for one in simulated["comparisons"]:
        if (one["first"], one["second"]) == pair and one["domain"] != "macro":  # a site knows its own customers alone
            told = found["domains"][one["domain"]]["test"][DIFFERENCE][one["metric"]]
            assert told["mean"] == pytest.approx(one["difference"]["mean"], abs=1e-12)
    capsys.readouterr()
    assert deploy("collect", "--run", "runs/flare") == 0
    said = capsys.readouterr().out
    assert "points of hit@10" in said
    assert all(name in said.splitlines()[-1] for name in simulated["domains"])


def test_the_administrator_speaks_with_certificates(kits, monkeypatch):
    """With the kit's own, that is mTLS: never one of FLARE's sessions without."""
    opened = []

    def secure(user, folder):
        opened.append((user, folder))
        return SimpleNamespace(close=lambda: opened.append("closed"))

    monkeypatch.setattr(flare, "new_secure_session", secure)
    kit = kits["admin@fedecider.org"]
    with flare.session(kit) as admin:
        assert admin is not None
    assert opened == [("admin@fedecider.org", str(kit.absolute())), "closed"]
