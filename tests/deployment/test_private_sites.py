"""A site under a guarantee: noise that nobody can repeat, and every round told once."""

from types import SimpleNamespace

import pytest
import torch
from test_deployed import MOST, NAMES, build, deployed, own_recommender, same, site_of
from toy_recommender import run, toy_recommender

from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.track import TRACK
from fedecider.deployment import llm
from fedecider.deployment import site as site_module
from fedecider.deployment.messages import pack, unpack
from fedecider.deployment.project import PartyFile, Project
from fedecider.deployment.run import make_site
from fedecider.federation.channel import Channel
from fedecider.federation.privacy import PrivacyConfig, protector

pytestmark = pytest.mark.whole

CONFIG = PrivacyConfig(clip=0.5, noise_scale=1.0)


def private_site(client, folder, name="fedavg", spends=2):
    site = site_of(name, client, folder, own_recommender(client)._replace(secret=True, protected=True))
    return site._replace(protect=protector(site.method, CONFIG, None), spends=spends)


def test_a_site_draws_noise_that_does_not_follow_from_the_seed(tmp_path):
    protect = protector(build("fedavg", toy_recommender()), CONFIG, 0)
    simulated, _ = run(build("fedavg", toy_recommender()), 3, 1, channel=Channel(protect))
    states = []
    for number in range(2):
        torch.manual_seed(0)
        sites = [private_site(client, tmp_path / str(number)) for client in range(3)]
        states.append(deployed("fedavg", sites, 1)[0])
    for key, tensor in states[0].server.items():
        assert not torch.equal(tensor, states[1].server[key])
        assert not torch.equal(tensor, simulated.server[key])
    names = sorted(states[0].server)  # messages do not keep their order
    flat = [torch.cat([state.server[name].flatten() for name in names]) for state in states]
    # a mean of three, twice; nothing is seeded here, and 0.2 are six standard errors of 528 numbers
    assert (flat[0] - flat[1]).std().item() == pytest.approx(0.5 * (2 / 3) ** 0.5, rel=0.2)


def asked_in(tmp_path, sites):
    """The server's messages of a run, by client, round and kind."""
    seen = {}

    def away(client, asked):
        seen[client, asked.round, asked.kind] = pack(asked)
        return False

    deployed("fedavg", sites, 2, away=away)
    return seen


def test_a_round_that_is_asked_again_gets_the_same_upload_and_an_earlier_one_none(tmp_path):
    sites = [private_site(client, tmp_path) for client in range(3)]
    seen = asked_in(tmp_path, sites)
    first = sites[0].answer(seen[0, 2, "train"])
    again = private_site(0, tmp_path).answer(seen[0, 2, "train"])  # another process of the site
    assert first == again
    assert unpack(first, MOST).kind == "upload"
    changed = unpack(seen[0, 2, "train"], MOST)._replace(tensors={})
    assert sites[0].answer(pack(changed)) == first  # whatever it is asked with
    earlier = unpack(sites[0].answer(seen[0, 1, "train"]), MOST)
    assert "got round 1 again after round 2" in earlier.facts["reason"]
    third = unpack(sites[0].answer(pack(unpack(seen[0, 2, "train"], MOST)._replace(round=3))), MOST)
    assert "got round 3, expected at most 2" in third.facts["reason"]


def test_a_site_that_has_spent_rounds_takes_part_in_no_other_start(tmp_path):
    sites = [private_site(client, tmp_path) for client in range(3)]
    deployed("fedavg", sites, 1, started="a")
    again = [sites[0], *(private_site(client, tmp_path / "b") for client in (1, 2))]
    _, records, _, _ = deployed("fedavg", again, 1, started="b")
    (refused,) = records[0]["refused_uploads"]
    assert "this site has spent rounds of its guarantee on it. Resume it on the server" in refused["reason"]
    _, records, _, _ = deployed("fedavg", sites, 1, started="a")
    assert records[0]["refused_uploads"] == []


def test_the_upload_is_kept_before_it_leaves_and_after_the_state(tmp_path, monkeypatch):
    site = private_site(0, tmp_path)
    seen = asked_in(tmp_path / "other", [private_site(client, tmp_path / "other") for client in range(3)])
    order = []
    save, write = site_module.save_state, site_module.write_bytes
    monkeypatch.setattr(site_module, "save_state", lambda *given: (order.append("state"), save(*given)))
    monkeypatch.setattr(site_module, "write_bytes", lambda path, blob: (order.append(path.name), write(path, blob)))
    site.answer(seen[0, 1, "train"])
    assert order == ["download.safetensors", "state", "sent.safetensors"]


def settings(*words):
    return parse_settings(["--method", "fedavg", "--ensemble.kind", "none", *words])


def test_parties_of_a_deployment_draw_from_the_operating_system(monkeypatch, tmp_path):
    """`make_site` as it wires a project of two clients, over a party that is a toy."""
    chosen = settings("--privacy.clip", "0.5", "--privacy.noise_scale", "1", "--num_rounds", "3")
    recommender = toy_recommender(NAMES)
    monkeypatch.setattr(llm, "own_domain", lambda *given: None)
    nothing = SimpleNamespace(everyone={}, domains={})
    monkeypatch.setattr(llm, "party", lambda *given: llm.Party(recommender, build("fedavg", recommender), nothing))
    monkeypatch.setattr(llm, "overlap_data", lambda *given: {"sentences": []})
    monkeypatch.setattr(llm, "encoded_texts", lambda *given: dict.fromkeys(NAMES, torch.ones(1, 1)))
    monkeypatch.setattr(llm, "checked_events", lambda *given: {})
    hosts = {name: [client] for client, name in enumerate(NAMES)}
    project = Project(tmp_path, TRACK, chosen, hosts, "abc")
    launch = type("Launch", (), {"device": torch.device("cpu")})
    site = make_site(project, PartyFile("project", str(tmp_path / "site"), "data", "comics"), launch)
    assert site.spends == 3
    server, local = site.method.init()
    own = {key: tensor[1:2] for key, tensor in local.items()}
    (block,) = site.hosted.pack([1])
    download = site.method.broadcast(1, server, block.clients)
    upload, _, _ = site.method.client_update(1, download, own, block)
    sent = [site.protect(upload, download, 1, 1).tensors for _ in range(2)]
    assert not same(*sent)
    elsewhere = PartyFile("project", str(tmp_path / "plain"), "data", "comics")
    plain = make_site(project._replace(settings=settings()), elsewhere, launch)
    assert plain.spends == 0
    assert same(plain.protect(upload, download, 1, 1).tensors, upload.tensors)


def test_shares_of_noise_are_refused_where_the_server_sees_every_upload():
    words = ("--privacy.clip", "1", "--privacy.noise_scale", "1", "--privacy.noise_on", "sum")
    with pytest.raises(ValueError, match="noise_on"):
        llm.check_deployable(settings(*words))
