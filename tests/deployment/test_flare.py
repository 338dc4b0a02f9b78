"""FLARE as the line: names, kits with certificates, and (slow) rounds in its simulator."""

import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

pytest.importorskip("nvflare", reason="needs nvflare: pip install '.[deploy]'")

from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.flare_api import flare_api
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
    assert to_blob(FLModelUtils.to_shareable(of_blob(blob))) == blob


def test_a_site_with_other_data_does_not_join(monkeypatch, tmp_path):
    def other(project, data, client):
        raise ValueError(f"got another catalogue of {client} in {data}")

    project = SimpleNamespace(names=["crime"], parts=SimpleNamespace(own_data=other))
    monkeypatch.setattr(commands, "read_project", lambda root: project)
    monkeypatch.setattr(flare, "kind_of", lambda kit: "site")
    monkeypatch.setattr(flare, "check_certificate", lambda kit, name: None)
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
    assert all(name in said.splitlines()[-1] for name in simulated["domains"])


def test_the_administrator_speaks_with_certificates(kits, monkeypatch):
    """With the kit's own, that is mTLS: never one of FLARE's sessions without."""
    opened = []

    def new_session(username, startup_kit_location, secure_mode, *words, **more):
        opened.append((username, startup_kit_location, secure_mode))
        return SimpleNamespace(close=lambda: opened.append("closed"))

    monkeypatch.setattr(flare_api, "new_session", new_session)
    kit = kits["admin@fedecider.org"]
    with flare.session(kit) as admin:
        assert admin is not None
    assert opened == [("admin@fedecider.org", str(kit.absolute()), True), "closed"]


def with_certificate(kit, folder, owner="", days=(0, 300), key=None):
    """A copy of a kit whose certificate is of another owner, of other days from now, or signed with another key."""
    moved = shutil.copytree(kit, folder / kit.name)
    file = moved / "startup" / "client.crt"
    old = x509.load_pem_x509_certificate(file.read_bytes())
    authority = json.loads((kit.parent / "state" / "cert.json").read_text())["root_pri_key"].encode()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, owner)]) if owner else old.subject
    begins, ends = (datetime.now(timezone.utc) + timedelta(day) for day in days)
    new = (
        x509.CertificateBuilder(old.issuer, subject, old.public_key(), 7)
        .not_valid_before(begins)
        .not_valid_after(ends)
        .sign(load_pem_private_key(key or authority, None), hashes.SHA256())
    )
    file.write_bytes(new.public_bytes(Encoding.PEM))
    return moved


WRONG = {
    "over": ({"days": (-9, -2)}, "got a certificate from .* expected a valid one"),
    "not yet valid": ({"days": (2, 9)}, "got a certificate from .* expected a valid one"),
    "another site's": ({"owner": "site-movies-tv-1"}, "got the certificate of site-movies-tv-1 .* expected that of "),
    "another authority's": ({"key": "localhost/startup/server.key"}, "of another authority .* expected one of the kit"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_party_with_a_wrong_certificate_does_not_join(what, kits, monkeypatch, tmp_path, capsys):
    """The server would refuse it too, but this side would see no reason."""
    change, reason = WRONG[what]
    if "key" in change:
        change = {"key": (kits["localhost"].parent / change["key"]).read_bytes()}
    project = SimpleNamespace(names=["crime"], parts=SimpleNamespace(own_data=lambda project, data, client: None))
    monkeypatch.setattr(commands, "read_project", lambda root: project)
    monkeypatch.setattr(flare, "start_party", lambda kit, file: pytest.fail("it joined"))
    monkeypatch.setattr(flare_api, "new_session", lambda *words, **more: pytest.fail("it has a session"))
    (tmp_path / "party.yaml").write_text(yaml.safe_dump({"project": "p", "output": "o", "client": "crime"}))
    site = with_certificate(kits["site-crime"], tmp_path, **change)
    admin = with_certificate(kits["admin@fedecider.org"], tmp_path, **change)
    for words in (("start", "--kit", site, "--party", tmp_path / "party.yaml"), ("status", "--kit", admin)):
        assert deploy(*map(str, words)) == 2
        said = capsys.readouterr().err
        assert re.search(reason, said)
        assert said.count("\n") == 1


def test_a_site_joins_as_itself(kits, monkeypatch, tmp_path):
    """Whatever the folder of its kit is called; a site that the project does not have joins nothing."""
    moved, joined = shutil.copytree(kits["site-crime"], tmp_path / "kit"), []
    project = SimpleNamespace(names=["crime"], parts=SimpleNamespace(own_data=lambda project, data, client: None))
    monkeypatch.setattr(commands, "read_project", lambda root: project)
    monkeypatch.setattr(flare, "start_party", lambda kit, file: joined.append(kit))
    words = ["--kit", str(moved), "--party", str(tmp_path / "party.yaml")]
    for client in ("crime", "comics", ""):
        (tmp_path / "party.yaml").write_text(yaml.safe_dump({"project": "p", "output": "o", "client": client}))
        if client == "crime":
            commands.start(words)
            continue
        with pytest.raises(ValueError, match=f"certificate of site-crime .* expected that of a site '{client}'"):
            commands.start(words)
    assert joined == [moved]


@pytest.mark.parametrize("kind", [FLCommunicationError, flare_api.AuthenticationError, flare_api.NoConnection])
def test_a_session_that_the_server_refuses_is_one_sentence(kind, kits, monkeypatch, capsys):
    def refused(*words, **more):
        raise kind("not within 7 s")

    monkeypatch.setattr(flare_api, "new_session", refused)
    assert deploy("status", "--kit", str(kits["admin@fedecider.org"])) == 2
    assert re.fullmatch(r"error: got no session .*\(not within 7 s\), expected one.*\n", capsys.readouterr().err)


@pytest.mark.slow
def test_a_server_takes_no_session_without_the_certificates_of_its_administrator(monkeypatch, tmp_path):
    """A real one, whatever the other side leaves out: no mTLS, another authority, a site's certificate, an old one."""
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("localhost", 0))
        ports = (first.getsockname()[1], second.getsockname()[1])
    own, others = (
        {path.name: path for path in flare.provision(["crime", "comics"], "localhost", ports, tmp_path / name)}
        for name in ("own", "others")
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), PARTY: str(tmp_path)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    command = ["bash", str(own["localhost"] / "startup" / "sub_start.sh"), "--once"]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    monkeypatch.setattr(flare, "new_secure_session", partial(flare.new_secure_session, timeout=3.0))
    admin = own["admin@fedecider.org"]

    def is_up(kit):
        try:
            with flare.session(kit) as opened:
                return opened.get_system_info().server_info.status == "stopped"
        except ValueError as error:
            if "got no session with the server" not in str(error):
                raise
            return False

    try:
        assert any(is_up(admin) for _ in range(30)), (tmp_path / "server.log").read_text()[-2000:]
        monkeypatch.setattr(flare, "check_certificate", lambda kit, name: None)
        for security in ("clear", "tls"):
            weak = shutil.copytree(admin, tmp_path / security)
            file = weak / "startup" / "fed_admin.json"
            file.write_text(file.read_text().replace('"mtls"', f'"{security}"'))
            assert not is_up(weak), security
        assert not is_up(others["admin@fedecider.org"])
        assert not is_up(with_certificate(admin, tmp_path / "old", days=(-9, -2)))
        sites = shutil.copytree(admin, tmp_path / "sites")
        for file in ("client.crt", "client.key"):
            shutil.copy(own["site-crime"] / "startup" / file, sites / "startup" / file)
        assert not is_up(sites)
        assert is_up(admin)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
