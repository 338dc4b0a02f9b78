"""Sites with one catalogue add up their counts: what each gets, whom the sum leaves out, and what nobody is told."""

import dataclasses
import json
import logging
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from test_deployed import MOST, exchange_with, site_of
from test_project import deploy_playground, few, read, write_playground

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ensemble"))
from ensemble_toys import NUM_ITEMS
from test_sources import SHOPS, same, shop

from fedecider.cross_silo.ensembles import client_counts, own_counts
from fedecider.cross_silo.settings import RunConfig
from fedecider.data.sample import sample_domains
from fedecider.data.sellers import with_shared_catalogues
from fedecider.data.silos import share_out
from fedecider.deployment.counts import SiteCounts, share_counts
from fedecider.deployment.messages import Channel, DeploymentConfig, Message, pack, unpack
from fedecider.deployment.secure import SiteSums
from fedecider.evaluation.protocols import train_parts
from fedecider.federation.secure_rounds import SecureSums
from fedecider.methods.config import NOT_HIDDEN, UserPrivacy
from fedecider.models import counts as others
from fedecider.models.config import EnsembleConfig
from fedecider.models.counts import UNIT, no_counts, shared_items
from fedecider.models.noised_events import EVENTS_NORM, bounded_events, others_events

pytestmark = pytest.mark.whole

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RUN = RunConfig(seed=5, ensemble=EnsembleConfig(kind="logit"))
NAMES = list(SHOPS)
BOOKS = NAMES[:3]
FOUR = with_shared_catalogues({f"books.{number}": shop(f"books.{number}", number - 1) for number in range(1, 5)})
"""Of whom one may be lost."""
ROUND = 4


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    monkeypatch.setattr(others, "NUMBERS_AT_ONCE", 6 * NUM_ITEMS)
    assert others.num_parts(NUM_ITEMS) == 4


def sites_in(folder, shops=SHOPS, users=NOT_HIDDEN):
    return [site_in(folder, client, shops, users) for client in range(len(shops))]


def site_in(folder, client, shops=SHOPS, users=NOT_HIDDEN):
    domain = list(shops.values())[client]
    site = site_of("fedavg", 0, folder / domain.name)
    sums = SiteSums(SecureSums(RUN.seed), client, f"counts of {domain.catalogue.name} in round")
    group = [place for place, one in enumerate(shops.values()) if one.catalogue is domain.catalogue]
    items = shared_items([list(shops.values())[place].item_keys for place in group])
    return site._replace(counts=SiteCounts(sums, domain, site.folder, "abc", group, items, users))


def shared(sites, folder, run=RUN, shops=SHOPS, hides=False, **faults):
    folder.mkdir(exist_ok=True)
    line = Channel(exchange_with(sites, **faults), DeploymentConfig(max_megabytes=16), "abc", list(shops))
    share_counts(line, run.ensemble, run.seed, shops, ROUND, folder, hides)
    return line


def rest(*names):
    total = no_counts(NUM_ITEMS)
    for name in names:
        total = total.plus(own_counts(FOUR[name]))
    return total


def told_by(site, kind, tensors=None, **facts):
    return unpack(site.answer(pack(Message(kind, ROUND, tensors or {}, {"run": "abc", **facts}))), MOST)


class Killed(Exception):
    """What no part of a server catches."""


def asked_for(kind, client=1, **facts):
    return lambda one, asked: (
        (one, asked.kind) == (client, kind) and all(asked.facts.get(k) == v for k, v in facts.items())
    )


def test_every_site_gets_the_counts_of_the_others(tmp_path):
    sites = sites_in(tmp_path)
    line = shared(sites, tmp_path / "server")
    for client, name in enumerate(BOOKS):
        (counts,) = sites[client].counts.found().values()
        assert same(counts, rest(*(other for other in BOOKS if other != name)))
    assert {one["client"] for one in line.carried} == {0, 1, 2}  # games.1 has no others of its catalogue
    kinds = [one["kind"] for one in line.carried if one["client"] == 0]
    assert kinds == ["count_keys", "count_shares", *["counts"] * 4, "count_unmask", "count_sum"]
    up = sum(one["bytes_up"] for one in line.carried if (one["client"], one["kind"]) == (0, "counts"))
    assert 0 < up - 8 * (NUM_ITEMS * (NUM_ITEMS + 1) // 2 + NUM_ITEMS) < 4 * 250  # four heads
    assert line.refused == []
    assert [path.name for path in (tmp_path / "server").iterdir()] == ["counts_books.safetensors"]


def test_the_server_sees_the_sum_alone(tmp_path):
    """Masked counts have all their bits, and other ones in every run."""
    seen = []

    def watch(client, asked, blob):
        if (client, asked.kind) == (0, "counts"):
            seen.append(unpack(blob, MOST).tensors["masked"])
        return blob

    for part in ("a", "b"):
        shared(sites_in(tmp_path / part), tmp_path / part, damage=watch)
    first_L, second_L = torch.cat(seen[:4]), torch.cat(seen[4:])
    assert (first_L != second_L).all()
    assert float(first_L.double().abs().mean()) > 2**60  # of uniform numbers 2^62


@pytest.mark.parametrize(
    ("kind", "facts"), [("count_keys", {}), ("count_shares", {}), ("counts", {"part": 1}), ("counts", {"part": 3})]
)
def test_a_site_lost_before_its_counts_are_in_is_left_out_and_takes_nothing_away(kind, facts, tmp_path):
    sites = sites_in(tmp_path, FOUR)
    line = shared(sites, tmp_path / "server", shops=FOUR, away=asked_for(kind, **facts))
    found = [sites[client].counts.found()[name] for client, name in enumerate(FOUR)]
    assert same(found[0], rest("books.3", "books.4"))
    assert same(found[1], rest("books.1", "books.3", "books.4"))  # it is back when the sum is told
    assert same(found[2], rest("books.1", "books.4"))
    assert same(found[3], rest("books.1", "books.3"))
    assert {one["client"] for one in line.refused} == {1}
    assert any(f"no answer to {kind}" in one["reason"] for one in line.refused)


@pytest.mark.parametrize("kind", ["count_unmask", "count_sum"])
def test_a_site_killed_after_its_counts_are_in_takes_its_own_away(kind, tmp_path):
    """If it has helped to open the sum: it takes no other one that is said to have its counts."""
    sites = sites_in(tmp_path)

    def away(client, asked):
        if (client, asked.kind) == (1, kind):
            sites[1] = site_in(tmp_path, 1)
        return False

    line = shared(sites, tmp_path / "server", away=away)
    for client, name in enumerate(BOOKS):
        if (client, kind) != (1, "count_unmask"):
            found = sites[client].counts.found()[name]
            assert same(found, rest(*(other for other in BOOKS if other != name)))
    if kind == "count_unmask":
        assert sites[1].counts.found() == {}
        assert "expected one that it has helped to open" in line.refused[-1]["reason"]


def test_two_of_three_are_no_sum_of_three(tmp_path, caplog):
    """Each of them would hold the other's counts as they are, which three sites were not told."""
    sites = sites_in(tmp_path)
    with caplog.at_level(logging.WARNING):
        line = shared(sites, tmp_path / "server", away=asked_for("counts"))
    assert "got the counts of 2 of 3 sites, expected 3 at least" in caplog.text
    assert {one["kind"] for one in line.carried} == {"count_keys", "count_shares", "counts"}
    assert list((tmp_path / "server").iterdir()) == []
    assert all(sites[client].counts.found() == {} for client in range(3))


def test_a_site_opens_and_takes_no_sum_over_two_of_three(tmp_path):
    sites, heard = sites_in(tmp_path), []

    def away(client, asked):
        if client == 0 and asked.kind in ("count_unmask", "count_sum"):
            fact = {"count_unmask": "survivors", "count_sum": "clients"}[asked.kind]
            for clients in ([0, 1], [0, 0, 1], [0, 1, 3]):
                heard.append(told_by(sites[0], asked.kind, asked.tensors, **{fact: clients}))
        return False

    shared(sites, tmp_path / "server", away=away)
    assert len(heard) == 6
    assert all(re.search(r"expected 3 at least of \[0, 1, 2\]", one.facts["reason"]) for one in heard)
    assert same(sites[0].counts.found()["books.1"], rest("books.2", "books.3"))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("count_keys", "keys of 1 of 3 sites"),
        ("counts", "1 of 3 uploads for the secure aggregation of counts of books in"),
    ],
)
def test_too_few_sites_go_on_without_each_other(kind, reason, tmp_path, caplog):
    sites = sites_in(tmp_path)
    with caplog.at_level(logging.WARNING):
        line = shared(sites, tmp_path / "server", away=lambda client, asked: client > 0 and asked.kind == kind)
        assert all(sites[client].counts.found() == {} for client in range(3))
    assert re.search(
        f"ensembles of books.1, books.2, books.3 count without each other's events: got {reason}", caplog.text
    )
    assert "the ensemble of books.2 counts without the others of its catalogue" in caplog.text
    told = [one["reason"] for one in line.refused if "count without each other's events" in one["reason"]]
    assert len(told) == 3
    assert not any(one["kind"] == "count_sum" for one in line.carried)
    assert list((tmp_path / "server").iterdir()) == []


def test_two_of_five_are_no_sum_of_five(tmp_path):
    """The threshold is one of all sites, also of those who have not even announced keys."""
    shops = with_shared_catalogues({f"books.{number}": shop(f"books.{number}", number) for number in range(1, 6)})
    gone = lambda client, asked: client > 1 and asked.kind == "count_keys"  # noqa: E731
    line = shared(sites_in(tmp_path, shops), tmp_path / "server", shops=shops, away=gone)
    assert any("got 2 of 5 uploads" in one["reason"] for one in line.refused)


def test_a_run_that_goes_on_tells_the_sum_it_has(tmp_path):
    """A second sum over other sites would tell the difference: nobody is asked for it, and a site refuses it."""
    sites = sites_in(tmp_path, FOUR)
    shared(sites, tmp_path / "server", shops=FOUR, away=asked_for("counts"))
    again = sites_in(tmp_path, FOUR)  # all of them start again
    line = shared(again, tmp_path / "server", shops=FOUR)
    assert {one["kind"] for one in line.carried} == {"count_sum"}
    assert line.refused == []
    assert same(again[1].counts.found()["books.2"], rest("books.1", "books.3", "books.4"))
    (tmp_path / "server" / "counts_books.safetensors").unlink()
    third = sites_in(tmp_path, FOUR)
    line = shared(third, tmp_path / "server", shops=FOUR)
    assert any("two sums would tell single numbers by their difference" in one["reason"] for one in line.refused)
    assert all(third[client].counts.found() == {} for client in range(4))


@pytest.mark.parametrize("kind", ["count_unmask", "count_sum"])
def test_a_server_that_is_killed_opens_the_same_sum_again(kind, tmp_path):
    """Sites have opened it, and would open no other: one that was late is not asked, though it is back."""
    sites, output = sites_in(tmp_path, FOUR), tmp_path / "server"

    def damage(client, asked, blob):
        if (client, asked.kind) == (3, kind):
            raise Killed
        return blob

    with pytest.raises(Killed):
        shared(sites, output, shops=FOUR, away=asked_for("counts"), damage=damage)
    assert (output / "counts_books.json").is_file() == (kind == "count_unmask")
    again = sites_in(tmp_path, FOUR)
    line = shared(again, output, shops=FOUR)
    assert line.refused == []
    for client, name in enumerate(FOUR):
        found = again[client].counts.found()[name]
        assert same(found, rest(*(other for other in FOUR if other not in (name, "books.2"))))
    assert {one["kind"] for one in line.carried if one["client"] == 1} == {"count_sum"}
    assert [path.name for path in output.iterdir()] == ["counts_books.safetensors"]


def test_half_a_sum_is_none(tmp_path, monkeypatch):
    """A server whose disk is full while it writes leaves nothing that the next one takes for the sum."""
    sites, output, whole = sites_in(tmp_path), tmp_path / "server", Path.write_bytes

    def half(path, content):
        if "safetensors" not in path.name:
            return whole(path, content)
        whole(path, content[: len(content) // 2])
        raise Killed

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(Killed):
        shared(sites, output)
    monkeypatch.setattr(Path, "write_bytes", whole)
    assert not (output / "counts_books.safetensors").exists()
    shared(sites, output)
    assert same(sites[0].counts.found()["books.1"], rest("books.2", "books.3"))


SUM = {"places": torch.tensor([0, 5]), "pairs": torch.tensor([1, 2]), "events": torch.ones(NUM_ITEMS).long()}


def test_a_site_takes_one_sum_and_does_not_tell_whether_it_can_be_one(tmp_path, caplog):
    """The answers to many sums would tell its own counts by halving."""
    sites, told = sites_in(tmp_path), {}

    def away(client, asked):
        told[asked.kind] = asked
        return asked.kind == "count_sum"

    shared(sites, tmp_path / "server", away=away)
    above = {**SUM, "events": torch.full((NUM_ITEMS,), 1000)}
    with caplog.at_level(logging.WARNING):
        low = told_by(sites[0], "count_sum", SUM, clients=[0, 1, 2])
    assert "below this site's own counts" in caplog.text
    assert low == unpack(sites[1].answer(pack(told["count_sum"])), MOST) == Message("count_sum", ROUND)
    assert same(sites[1].counts.found()["books.2"], rest("books.1", "books.3"))
    assert sites[0].counts.found() == {}
    for one in (sites[0], site_in(tmp_path, 0)):
        again = told_by(one, "count_sum", above, clients=[0, 1, 2])
        assert "got a second sum of counts, expected the first one again" in again.facts["reason"]
        assert told_by(one, "count_sum", SUM, clients=[0, 1, 2]) == low


def test_a_site_sends_its_parts_alone_and_the_server_takes_no_others(tmp_path):
    sites, asked_before = sites_in(tmp_path, FOUR), {}

    def keep(client, asked):
        if client == 0:
            asked_before[asked.kind] = asked
        return False

    def short(client, asked, blob):
        one = unpack(blob, MOST)
        cut = {name: tensor[:-1] for name, tensor in one.tensors.items()}
        return pack(one._replace(tensors=cut)) if (client, asked.kind) == (1, "counts") else blob

    line = shared(sites, tmp_path / "server", shops=FOUR, away=keep, damage=short)
    assert any("masked counts" in one["reason"] for one in line.refused)
    assert same(sites[0].counts.found()["books.1"], rest("books.3", "books.4"))
    for part in (0, 5, "1", None):
        asked = asked_before["counts"]
        answer = unpack(sites[0].answer(pack(asked._replace(facts={**asked.facts, "part": part}))), MOST)
        assert "expected a number from 1 to 4" in answer.facts["reason"]
    alone = sites[0]._replace(counts=None)
    assert "has no others of its catalogue" in unpack(alone.answer(pack(asked_before["counts"])), MOST).facts["reason"]
    kept = json.loads((sites[0].folder / "summed_counts.json").read_text())
    assert (kept["run"], kept["clients"], len(kept["sum"])) == ("abc", [0, 2, 3], 64)


def test_one_part_is_masked_with_the_same_sites(tmp_path):
    """The difference between two sets of them would be the mask that two sites share."""
    sites, heard = sites_in(tmp_path, FOUR), []

    def away(client, asked):
        if (client, asked.kind) == (0, "counts") and asked.facts["part"] == 2:
            sealed = {one: asked.facts["sealed"][one] for one in ("1", "2")}
            for part in (1, 2):
                facts = {**asked.facts, "sealed": sealed, "part": part}
                heard.append(unpack(sites[0].answer(pack(asked._replace(facts=facts))), MOST).facts["reason"])
        return False

    line = shared(sites, tmp_path / "server", shops=FOUR, away=away)
    assert len(heard) == 2
    assert all("got shares of the clients [1, 2] after those of [1, 2, 3]" in one for one in heard)
    assert line.refused == []


@pytest.mark.slow
def test_silos_with_their_settings_are_those_of_the_simulated_run(tmp_path):
    """Adapters that stay in the model and ensembles with counts of other clients, as the configuration of silos has
    them."""
    silo_settings = yaml.safe_load((CONFIGS / "companies.yaml").read_text())
    sample = {name: few(domain) for name, domain in sample_domains(["crime", "comics"]).items()}
    silos = share_out({"crime": sample["crime"]}, 2, None, 0)
    more = {name: silo_settings[name] for name in ("patience", "ensemble")}
    more |= {"num_rounds": 3, "learning_rate": 0.01}  # so that few steps change something
    write_playground(tmp_path, {**silos, "comics": sample["comics"]}, **more)
    deploy_playground(tmp_path)
    simulated = read(tmp_path / "runs" / "simulated" / "metrics.json")
    assert simulated["ensemble"]
    for name in (*silos, "comics"):
        adapter = Path("adapters") / name / "adapter_model.safetensors"
        twin = tmp_path / "runs" / "simulated" / adapter
        assert (tmp_path / "out" / name / adapter).read_bytes() == twin.read_bytes()
        site = read(tmp_path / "out" / name / "metrics.json")
        assert site["ensemble"] == {name: simulated["ensemble"][name]}
        for file in ("ensemble.json", "ensemble.safetensors"):
            own = Path("private") / name / file
            assert (tmp_path / "out" / name / own).read_bytes() == (tmp_path / "runs" / "simulated" / own).read_bytes()
        expected, found = simulated["domains"][name]["test"], site["domains"][name]["test"]
        own = ("fedecider + own ensemble", "own ensemble without a model") if name in silos else ()
        for row in ("fedecider + ensemble", "ensemble without a model", *own):
            assert found[row]["ndcg@10"]["mean"] == pytest.approx(expected[row]["ndcg@10"]["mean"], abs=1e-12)
        assert (tmp_path / "out" / name / "summed_counts.json").is_file() == (name in silos)
    wire = read(tmp_path / "out" / "server" / "wire.json")
    assert {one["client"] for one in wire["messages"] if one["kind"] == "count_sum"} == {0, 1}
    assert wire["refused_after_rounds"] == []


def part(domain, first):
    keys = [f"{number + first:02d}" for number in range(NUM_ITEMS)]
    return dataclasses.replace(domain, catalogue=dataclasses.replace(domain.catalogue, name="books", keys=keys))


PARTS = with_shared_catalogues({name: part(one, first) for first, (name, one) in enumerate(FOUR.items())})
"""Each sells an item that the one before does not have, and lacks its first one."""


def test_sites_that_sell_parts_get_the_counts_of_items_that_three_sell(tmp_path):
    expected, _ = client_counts(PARTS, EnsembleConfig(kind="logit", sources="others"), RUN.seed)
    sites = sites_in(tmp_path, PARTS)
    line = shared(sites, tmp_path / "server", shops=PARTS)
    assert line.refused == []
    for site, (name, counts) in zip(sites, expected.items(), strict=True):
        assert same(site.counts.found()[name], counts)
        assert counts.num_items == NUM_ITEMS
        sold = sorted(number for number in range(NUM_ITEMS) if counts.event_I[number])
        first = list(PARTS).index(name)
        assert all(2 <= number + first <= NUM_ITEMS for number in sold)  # those of three sellers or four
        assert sold


@pytest.fixture
def large(monkeypatch):
    monkeypatch.setattr(others, "MOST_SUMMED_ITEMS", 6)


@pytest.mark.parametrize("shops", [FOUR, PARTS], ids=["whole", "parts"])
def test_sites_with_a_large_catalogue_sum_events_and_then_what_is_bought_most(shops, large, tmp_path):
    expected, _ = client_counts(shops, EnsembleConfig(kind="logit", sources="others"), RUN.seed)
    sites = sites_in(tmp_path, shops)
    line = shared(sites, tmp_path / "server", shops=shops)
    assert line.refused == []
    for site, (name, counts) in zip(sites, expected.items(), strict=True):
        assert same(site.counts.found()[name], counts)
        assert counts.pair_II.nnz
    kinds = [one["kind"] for one in line.carried if one["client"] == 0]
    assert kinds[:5] == ["event_keys", "event_shares", "events", "event_unmask", "event_sum"]
    assert kinds[5:7] + kinds[-2:] == ["count_keys", "count_shares", "count_unmask", "count_sum"]
    assert {path.name for path in (tmp_path / "server").iterdir()} == {
        "events_books.safetensors",
        "counts_books.safetensors",
    }


HIDDEN = UserPrivacy(0.1, 0.5)


def test_sites_that_hide_customers_sum_events_with_noise_and_no_pairs(tmp_path):
    sites = sites_in(tmp_path, users=HIDDEN)
    line = shared(sites, tmp_path / "server", hides=True)
    assert line.refused == []
    kinds = [one["kind"] for one in line.carried if one["client"] == 0]
    assert kinds == ["event_keys", "event_shares", "events", "event_unmask", "event_sum"]
    noise = []
    for client, name in enumerate(BOOKS):
        parts = train_parts(SHOPS[name].clients.sequences)
        noise.append(sites[client].counts.own.event_I * UNIT - bounded_events(parts, NUM_ITEMS))
        rest_I = sum(sites[other].counts.own.event_I for other in range(3) if other != client)
        (found,) = sites[client].counts.found().values()
        assert same(found, others_events(rest_I, 2, HIDDEN.noise_scale, parts))
    assert np.std(noise) == pytest.approx(HIDDEN.noise_scale * EVENTS_NORM, rel=0.5)
    assert len(np.unique(np.round(noise, 3))) > 0.9 * 3 * NUM_ITEMS


def test_a_site_that_starts_again_sends_the_same_noise_and_never_exact_counts(tmp_path):
    """Two draws would be less noise than is promised."""
    first, again = (site_in(tmp_path, 0, users=HIDDEN).counts for _ in range(2))
    assert first.own.event_I.tolist() == again.own.event_I.tolist()
    other = site_in(tmp_path / "elsewhere", 0, users=HIDDEN).counts
    assert first.own.event_I.tolist() != other.own.event_I.tolist()
    asked = told_by(site_in(tmp_path, 0, users=HIDDEN), "count_keys")
    assert "of events alone where customers are hidden" in asked.facts["reason"]


def test_a_site_lost_before_its_events_are_in_is_in_neither_sum(large, tmp_path):
    sites = sites_in(tmp_path, FOUR)
    line = shared(sites, tmp_path / "server", shops=FOUR, away=asked_for("events"))
    assert {one["kind"] for one in line.carried if one["client"] == 1} == {
        "event_keys",
        "event_shares",
        "events",
        "event_sum",
        "count_sum",
    }
    left = {name: domain for name, domain in FOUR.items() if name != "books.2"}
    expected, _ = client_counts(left, EnsembleConfig(kind="logit", sources="others"), RUN.seed)
    for client, (name, site) in enumerate(zip(FOUR, sites, strict=True)):
        if client != 1:
            assert same(site.counts.found()[name], expected[name])
    late = sites[1].counts.found()["books.2"]  # it takes nothing away
    assert late.event_I.tolist() == rest(*left).event_I.tolist()
    assert 0 < late.pair_II.nnz <= 36


def test_a_site_lost_between_the_sums_leaves_events_alone(large, tmp_path):
    """Sums over other sites would tell its counts by their difference."""
    sites = sites_in(tmp_path, FOUR)
    line = shared(sites, tmp_path / "server", shops=FOUR, away=asked_for("counts"))
    reasons = [one["reason"] for one in line.refused]
    assert any("count without each other's pairs of items: got the counts of 3 of 4" in one for one in reasons)
    for client, name in enumerate(FOUR):
        found = sites[client].counts.found()[name]
        assert found.event_I.tolist() == rest(*(one for one in FOUR if one != name)).event_I.tolist()
        assert found.pair_II.nnz == 0


def test_a_site_gives_events_alone_where_its_catalogue_is_large_and_before_its_counts(tmp_path, monkeypatch):
    small = site_in(tmp_path, 0)
    assert "expected sums of events and then of counts in a catalogue of more than 12,288" in told_by(
        small, "event_keys"
    ).facts.get("reason", "")
    monkeypatch.setattr(others, "MOST_SUMMED_ITEMS", 6)
    large = site_in(tmp_path, 1)
    assert "expected sums of events and then of counts" in told_by(large, "count_keys").facts["reason"]
    assert told_by(large, "event_keys").kind == "event_keys"


@pytest.mark.slow
def test_companies_with_parts_of_a_catalogue_end_as_the_simulation_does(tmp_path):
    """FedAvg with adapters of the table and secure sums: rows at home, ensembles and adapters, bit for bit."""
    sample = {"crime": few(sample_domains(["crime"])["crime"])}
    parts = share_out(sample, 3, None, 0, 0.5)
    more = {"ensemble": {"kind": "logit"}, "num_rounds": 2, "learning_rate": 0.01}
    more |= {"method": "fedavg", "secure_sum": True}
    write_playground(tmp_path, parts, **more)
    deploy_playground(tmp_path)
    for name in parts:
        adapter = Path("adapters") / name / "adapter_model.safetensors"
        twin = tmp_path / "runs" / "simulated" / adapter
        assert (tmp_path / "out" / name / adapter).read_bytes() == twin.read_bytes()
        site, simulated = (
            read(tmp_path / place / "metrics.json") for place in (Path("out") / name, Path("runs/simulated"))
        )
        assert site["ensemble"] == {name: simulated["ensemble"][name]}
