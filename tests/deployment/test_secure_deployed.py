"""Secure sums between machines: the bits of the simulation, from masked uploads, also when a site is killed."""

import base64
import re

import pytest
import torch
from test_deployed import MOST, NAMES, build, catalogue_recommender, deployed, run, same, site_of, toy_recommender
from toy_recommender import toy_data

from fedecider.deployment.messages import Message, pack, unpack
from fedecider.federation.secure_rounds import SecureSums, securely_summed_rounds
from fedecider.methods.rows import TABLE, secure_sums, travelling_rows
from fedecider.testing import llm_contract
from fedecider.testing.faults import Fault, faulty_channel

pytestmark = pytest.mark.whole

SUMS = SecureSums(5, 0.6)


def simulated(name, rounds, *faults, recommender=None, sums=SUMS, clients=3):
    method = build(name, recommender or toy_recommender())
    plan = faulty_channel(faults)
    aggregation = securely_summed_rounds(method, sums)
    return run(method, clients, rounds, channel=plan._replace(aggregation=aggregation))


def secure_sites(name, folder, count=3, sums=SUMS, **options):
    return [site_of(name, client, folder, sums=sums, **options) for client in range(count)]


@pytest.mark.parametrize("name", ["fedavg", "rolora"])
def test_same_bits_and_bytes_as_the_simulated_run(name, tmp_path):
    expected, records_expected = simulated(name, 2)
    state, records, line, _ = deployed(name, secure_sites(name, tmp_path), 2, sums=SUMS)
    assert same(state.server, expected.server)
    assert [record["valid"] for record in records] == [record["valid"] for record in records_expected]
    assert [record["traffic"] for record in records] == [record["traffic"] for record in records_expected]
    kinds = [one["kind"] for one in line.carried if (one["round"], one["client"]) == (1, 0)]
    assert kinds == ["keys", "shares", "train", "unmask", "validate"]


def test_no_message_of_a_site_holds_its_upload(tmp_path):
    """What is sent for the same training is unlike it, and unlike itself in another run: secrets are drawn anew."""
    seen = []

    def watch(client, asked, blob):
        if (client, asked.kind) == (0, "train"):
            seen.append(unpack(blob, MOST))
        return blob

    for part in ("a", "b"):
        deployed("fedavg", secure_sites("fedavg", tmp_path / part), 1, sums=SUMS, damage=watch)
    first, second = seen
    assert first.facts["weights"] == [1.0]
    assert all(tensor.dtype == torch.int64 for tensor in first.tensors.values())
    for name, tensor in first.tensors.items():
        assert (tensor != second.tensors[name]).all()
    numbers_L = torch.cat([tensor.double().flatten() for tensor in first.tensors.values()])
    assert float(numbers_L.abs().mean()) > 2**61  # of numbers all of whose 64 bits are uniform it is 2^62


@pytest.mark.parametrize("kind", ["keys", "shares", "train"])
def test_a_killed_site_drops_out_and_its_masks_are_taken_off(kind, tmp_path):
    """Killed before it answers and started again at once, without its secrets; the round goes on without it."""
    sites = secure_sites("fedavg", tmp_path)

    def away(client, asked):
        if (client, asked.round, asked.kind) == (1, 1, kind):
            sites[1] = site_of("fedavg", 1, tmp_path, sums=SUMS)
            return kind != "train"
        return False

    state, records, _, _ = deployed("fedavg", sites, 2, sums=SUMS, away=away)
    expected, _ = simulated("fedavg", 2, Fault(1, "away" if kind == "keys" else "late", 1, 1))
    assert same(state.server, expected.server)
    (refused,) = records[0]["refused_uploads"]
    assert refused["client"] == 1
    reason = "without keys for it: this site was started after" if kind == "train" else f"no answer to {kind}"
    assert re.search(reason, refused["reason"])
    assert records[1]["refused_uploads"] == []


@pytest.mark.parametrize("kind", ["keys", "shares", "train"])
def test_two_of_five_are_no_sum_of_five(kind, tmp_path):
    """The threshold is one of all who were asked, also of those who have not even announced keys."""
    names = tuple("abcde")
    data = [toy_data(domain) for domain in (*NAMES, *NAMES[:2])]
    sites = []
    for client in range(5):
        own = [one if client == other else {"labels": torch.zeros(0, 2)} for other, one in enumerate(data)]
        sites.append(site_of("fedavg", client, tmp_path, toy_recommender(names, data=own), sums=SUMS))
    gone = lambda client, asked: client > 1 and asked.kind == kind  # noqa: E731
    with pytest.raises(ValueError, match="2 of 5 uploads"):
        deployed("fedavg", sites, 1, names=names, sums=SUMS, away=gone)


def test_an_upload_in_the_clear_and_wrong_shares_are_refused(tmp_path):
    sites = secure_sites("fedavg", tmp_path / "a")
    sites[1] = site_of("fedavg", 1, tmp_path / "b")  # knows nothing of sums
    _, records, _, _ = deployed("fedavg", sites, 1, sums=SUMS)
    assert [one["client"] for one in records[0]["refused_uploads"]] == [1]
    assert "this run has secure_sum false" in records[0]["refused_uploads"][0]["reason"]

    def lie(client, asked, blob):
        if (client, asked.kind) == (0, "unmask"):
            one = unpack(blob, MOST)
            return pack(one._replace(tensors={**one.tensors, "seeds": one.tensors["seeds"] ^ 1}))
        return blob

    def short(client, asked, blob):
        one = unpack(blob, MOST)
        cut = {name: tensor[:-1] for name, tensor in one.tensors.items()}
        return pack(one._replace(tensors=cut)) if (client, asked.kind) == (0, "shares") else blob

    state, records, _, _ = deployed("fedavg", secure_sites("fedavg", tmp_path / "d"), 1, sums=SUMS, damage=short)
    assert "expected 82 bytes of 1" in records[0]["refused_uploads"][0]["reason"]
    assert same(state.server, simulated("fedavg", 1, Fault(0, "late"))[0].server)

    with pytest.raises(ValueError, match="announced"):
        deployed("fedavg", secure_sites("fedavg", tmp_path / "c"), 1, sums=SUMS, damage=lie)


def lonely(folder):
    """What a site says that is asked to mask with the shares of nobody else."""
    site, heard = site_of("fedavg", 0, folder, sums=SUMS), []

    def away(client, asked):
        if (client, asked.kind) == (0, "train"):
            bare = asked._replace(facts={**asked.facts, "sealed": {}})
            heard.append(unpack(site.answer(pack(bare)), MOST).facts["reason"])
        return False

    deployed("fedavg", [site, *secure_sites("fedavg", folder)[1:]], 1, sums=SUMS, away=away)
    return heard[0]


def test_a_site_refuses_a_server_that_asks_for_too_much(tmp_path):
    sites, asked_before = secure_sites("fedavg", tmp_path), {}

    def keep(client, asked):
        if client == 0:
            asked_before[asked.kind] = asked
        return False

    deployed("fedavg", sites, 1, sums=SUMS, away=keep)

    def answer(asked, **facts):
        return unpack(sites[0].answer(pack(asked._replace(facts={**asked.facts, **facts}))), MOST).facts["reason"]

    assert "never gives both secrets" in answer(asked_before["unmask"], survivors=[0, 1])
    assert "expected 2 at least" in answer(asked_before["unmask"], survivors=[0])
    assert "expected a list of their numbers" in answer(asked_before["unmask"], survivors="all")
    assert "no sealed shares" in answer(asked_before["train"], sealed=[])
    sealed = asked_before["train"].facts["sealed"]
    tampered = {**sealed, "1": base64.b64encode(bytes(82)).decode()}
    assert "shares of client 1 for client 0" in answer(asked_before["train"], sealed=tampered)
    fewer = answer(asked_before["train"], sealed={"1": sealed["1"]})
    assert "got shares of the clients [1] after those of [1, 2], expected the same of one sum" in fewer
    assert "other keys for this site" in answer(asked_before["shares"], clients=[1, 0, 2])
    assert "96 bytes of each" in answer(asked_before["shares"], clients=[0, 1])
    assert "second list of keys" in answer(asked_before["shares"])
    again = asked_before["train"]._replace(tensors={name: 2 * t for name, t in asked_before["train"].tensors.items()})
    assert "second training of one round with another result" in answer(again)
    assert "shares of 0 neighbours of client 0, expected 1 at least" in lonely(folder=tmp_path / "b")
    strange = pack(Message("unmask", 7, {}, {"run": "abc", "survivors": [0, 1]}))
    assert "got unmask of round 7 without keys" in unpack(sites[0].answer(strange), MOST).facts["reason"]


def test_sites_that_sell_parts_of_a_catalogue_keep_their_own_rows(tmp_path, monkeypatch):
    """As in the simulation, bit for bit; downloads and uploads have the same rows for everybody."""
    monkeypatch.setattr(llm_contract, "CATALOGUES", {"north": (3, 12), "south": (8, 17), "east": (10, 21)})
    monkeypatch.setattr(llm_contract, "SILO_SIZES", {"north": 12, "south": 10, "east": 11})
    names = ["north", "south", "east"]

    def made():
        recommender = catalogue_recommender(names)
        own_KV = recommender.rows.own[TABLE]
        home = {TABLE: own_KV & (own_KV.sum(0) == 1)}
        return recommender._replace(rows=recommender.rows._replace(home=home, hidden=True))

    sums = SUMS._replace(own_rows=travelling_rows(made().rows, True).in_messages)
    expected, records_expected = simulated("fedavg", 2, recommender=made(), sums=sums)
    seen = []

    def watch(client, asked, blob):
        if asked.kind == "train" and asked.round == 2:
            seen.append(({key: one.shape for key, one in asked.tensors.items()}, asked.facts["marks"]))
            seen[-1] += ({key: one.shape for key, one in unpack(blob, MOST).tensors.items()},)
        return blob

    sites = [site_of("fedavg", client, tmp_path, made(), sums=sums) for client in range(3)]
    state, records, _, _ = deployed("fedavg", sites, 2, names=names, recommender=made(), sums=sums, damage=watch)
    assert same(state.server, expected.server)
    assert [record["valid"] for record in records] == [record["valid"] for record in records_expected]
    assert [record["traffic"] for record in records] == [record["traffic"] for record in records_expected]
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    assert not state.server[TABLE][3:8].any()  # sold in the north alone


def test_a_site_that_is_late_ends_a_round_of_companies_that_sell_parts(tmp_path, monkeypatch):
    """Neither server nor sites open a sum of the others: its row weights would tell what who is away sells."""
    names = list("abcde")
    ranges = {"a": (3, 9), "b": (5, 12), "c": (8, 15), "d": (4, 16), "e": (6, 21)}
    monkeypatch.setattr(llm_contract, "CATALOGUES", ranges)
    monkeypatch.setattr(llm_contract, "SILO_SIZES", dict.fromkeys(ranges, 8))

    def made():
        recommender = catalogue_recommender(names)
        own_KV = recommender.rows.own[TABLE]
        home = {TABLE: own_KV & (own_KV.sum(0) == 1)}
        return recommender._replace(rows=recommender.rows._replace(home=home, hidden=True))

    sums, opened = secure_sums(made().rows, True, 1.0, 5), []

    def watch(client, asked, blob):
        opened.append(asked.round) if asked.kind == "unmask" else None
        return blob

    for kind in ("keys", "shares", "train"):
        opened.clear()
        sites = [site_of("fedavg", client, tmp_path / kind, made(), sums=sums) for client in range(5)]
        late = lambda client, asked: (client, asked.round, asked.kind) == (2, 2, kind)  # noqa: E731, B023
        with pytest.raises(ValueError, match=r"got 4 of 5 clients .* of round 2, expected all.* --resume true"):
            deployed("fedavg", sites, 3, names=names, recommender=made(), sums=sums, damage=watch, away=late)
        assert set(opened) == {1}
    keys = {client: Message("keys", 2, {}, {"run": "abc"}) for client in range(4)}
    rows = [unpack(sites[client].answer(pack(one)), MOST).tensors["keys"] for client, one in keys.items()]
    asked = Message("shares", 2, {"keys": torch.stack(rows)}, {"run": "abc", "clients": list(range(4))})
    assert "got 4 of 5 clients" in unpack(sites[0].answer(pack(asked)), MOST).facts["reason"]
