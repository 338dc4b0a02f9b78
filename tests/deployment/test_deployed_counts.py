"""Sites with one catalogue add up their counts: what each gets, whom the sum leaves out, and what nobody is told."""

import json
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from test_deployed import MOST, exchange_with, site_of
from test_project import deploy_playground, few, read, write_playground

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "memory"))
from memory_toys import NUM_ITEMS
from test_sources import SHOPS, own, same, shop

from fedecider.data.sample import sample_domains
from fedecider.data.silos import share_out
from fedecider.deployment.counts import SiteCounts, share_counts, what_siblings_learn
from fedecider.deployment.messages import Message, pack, unpack
from fedecider.deployment.secure import SiteSums
from fedecider.deployment.server import DeploymentConfig, Line
from fedecider.federation.secure_rounds import SecureSums
from fedecider.llm.config import RunConfig
from fedecider.memory import others
from fedecider.memory.config import MemoryConfig
from fedecider.memory.counts import no_counts

RUN = RunConfig(seed=5, memory=MemoryConfig(kind="mixture"))
NAMES = list(SHOPS)
BOOKS = NAMES[:3]
ROUND = 4


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    monkeypatch.setattr(others, "NUMBERS_AT_ONCE", 6 * NUM_ITEMS)
    assert others.num_parts(NUM_ITEMS) == 4


def sites_in(folder, shops=SHOPS):
    return [site_in(folder, client, domain) for client, domain in enumerate(shops.values())]


def site_in(folder, client, domain):
    site = site_of("fedavg", 0, folder / domain.name)
    sums = SiteSums(SecureSums(RUN.seed, RUN.secure_threshold), client, f"counts of {domain.catalogue} in round")
    return site._replace(counts=SiteCounts(sums, domain, site.folder))


def shared(sites, folder, run=RUN, shops=SHOPS, **faults):
    folder.mkdir(exist_ok=True)
    line = Line(exchange_with(sites, **faults), DeploymentConfig(max_megabytes=16), "abc", list(shops))
    share_counts(line, run, shops, ROUND, folder)
    return line


def rest(*names):
    total = no_counts(NUM_ITEMS)
    for name in names:
        total = total.plus(own(name))
    return total


def asked_for(kind, client=1, **facts):
    return lambda one, asked: (
        (one, asked.kind) == (client, kind) and all(asked.facts.get(k) == v for k, v in facts.items())
    )


def test_every_sibling_gets_the_counts_of_the_others(tmp_path):
    sites = sites_in(tmp_path)
    line = shared(sites, tmp_path / "server")
    for client, name in enumerate(BOOKS):
        (counts,) = sites[client].counts.found().values()
        assert same(counts, rest(*(other for other in BOOKS if other != name)))
    assert {one["client"] for one in line.carried} == {0, 1, 2}  # games.1 has no siblings
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
    sites = sites_in(tmp_path)
    line = shared(sites, tmp_path / "server", away=asked_for(kind, **facts))
    found = [sites[client].counts.found()[name] for client, name in enumerate(BOOKS)]
    assert same(found[0], rest("books.3"))
    assert same(found[1], rest("books.1", "books.3"))  # it is back when the sum is told
    assert same(found[2], rest("books.1"))
    assert {one["client"] for one in line.refused} == {1}
    assert any(f"no answer to {kind}" in one["reason"] for one in line.refused)


def test_a_site_killed_after_its_counts_are_in_takes_its_own_away(tmp_path):
    sites = sites_in(tmp_path)

    def away(client, asked):
        if (client, asked.kind) == (1, "count_unmask"):
            sites[1] = site_in(tmp_path, 1, SHOPS["books.2"])
        return False

    shared(sites, tmp_path / "server", away=away)
    for client, name in enumerate(BOOKS):
        found = sites[client].counts.found()[name]
        assert same(found, rest(*(other for other in BOOKS if other != name)))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("count_keys", "keys of 1 of 3 sites"), ("counts", "1 of 3 uploads for the secure sum of counts of books in")],
)
def test_too_few_siblings_go_on_without_each_other(kind, reason, tmp_path, caplog):
    sites = sites_in(tmp_path)
    with caplog.at_level(logging.WARNING):
        line = shared(sites, tmp_path / "server", away=lambda client, asked: client > 0 and asked.kind == kind)
        assert all(sites[client].counts.found() == {} for client in range(3))
    assert re.search(
        f"memories of books.1, books.2, books.3 count without each other's events: got {reason}", caplog.text
    )
    assert "the memory of books.2 counts without its siblings" in caplog.text
    told = [one["reason"] for one in line.refused if "counts without its siblings" in one["reason"]]
    assert len(told) == 3
    assert not any(one["kind"] == "count_sum" for one in line.carried)
    assert list((tmp_path / "server").iterdir()) == []


def test_two_of_five_are_no_sum_of_five(tmp_path):
    """The threshold is one of all siblings, also of those who have not even announced keys."""
    shops = {f"books.{number}": shop(f"books.{number}", number) for number in range(1, 6)}
    gone = lambda client, asked: client > 1 and asked.kind == "count_keys"  # noqa: E731
    line = shared(sites_in(tmp_path, shops), tmp_path / "server", shops=shops, away=gone)
    assert any("got 2 of 5 uploads" in one["reason"] for one in line.refused)


def test_a_run_that_goes_on_tells_the_sum_it_has(tmp_path):
    """A second sum over other siblings would tell the difference: nobody is asked for it, and a site refuses it."""
    sites = sites_in(tmp_path)
    shared(sites, tmp_path / "server", away=asked_for("counts"))
    again = sites_in(tmp_path)  # all of them start again
    line = shared(again, tmp_path / "server")
    assert {one["kind"] for one in line.carried} == {"count_sum"}
    assert same(again[1].counts.found()["books.2"], rest("books.1", "books.3"))
    (tmp_path / "server" / "counts_books.safetensors").unlink()
    third = sites_in(tmp_path)
    line = shared(third, tmp_path / "server")
    assert any("two sums would tell single counts by their difference" in one["reason"] for one in line.refused)
    assert all(third[client].counts.found() == {} for client in range(3))


def test_a_sum_that_is_none_is_not_used(tmp_path):
    site = sites_in(tmp_path)[0]
    total = {"places": torch.tensor([0, 5]), "pairs": torch.tensor([1, 2]), "events": torch.ones(NUM_ITEMS).long()}

    def answer(**changed):
        facts = {"run": "abc", "clients": [0, 1], **changed.pop("facts", {})}
        one = Message("count_sum", ROUND, {**total, **changed}, facts)
        return unpack(site.answer(pack(one)), MOST).facts["reason"]

    assert "below this site's own counts" in answer()
    for wrong in (
        {"places": torch.tensor([5, 0])},
        {"places": torch.tensor([5, 5])},
        {"places": torch.tensor([0, NUM_ITEMS**2])},
        {"places": torch.tensor([-1, 0])},
        {"places": torch.tensor([0, NUM_ITEMS])},  # below the diagonal
        {"pairs": torch.tensor([1])},
        {"pairs": torch.tensor([1.0, 2.0])},
        {"pairs": torch.tensor([1, -2])},
        {"events": torch.ones(3).long()},
    ):
        assert f"got no sum of counts of {NUM_ITEMS} items" in answer(**wrong)
    assert "expected a list of their numbers" in answer(facts={"clients": "all"})
    assert site.counts.found() == {}


def test_a_site_sends_its_parts_alone_and_the_server_takes_no_others(tmp_path):
    sites, asked_before = sites_in(tmp_path), {}

    def keep(client, asked):
        if client == 0:
            asked_before[asked.kind] = asked
        return False

    def short(client, asked, blob):
        one = unpack(blob, MOST)
        cut = {name: tensor[:-1] for name, tensor in one.tensors.items()}
        return pack(one._replace(tensors=cut)) if (client, asked.kind) == (1, "counts") else blob

    line = shared(sites, tmp_path / "server", away=keep, damage=short)
    assert any("masked counts" in one["reason"] for one in line.refused)
    assert same(sites[0].counts.found()["books.1"], rest("books.3"))
    for part in (0, 5, "1", None):
        asked = asked_before["counts"]
        answer = unpack(sites[0].answer(pack(asked._replace(facts={**asked.facts, "part": part}))), MOST)
        assert "expected a number from 1 to 4" in answer.facts["reason"]
    alone = sites[0]._replace(counts=None)
    assert "has no siblings" in unpack(alone.answer(pack(asked_before["counts"])), MOST).facts["reason"]
    assert json.loads((sites[0].folder / "counted.json").read_text()) == {"clients": [0, 2]}


def test_whoever_makes_a_project_is_told_what_siblings_learn():
    pair = {name: SHOPS[name] for name in ("books.1", "books.2", "games.1")}
    (two,) = what_siblings_learn(pair, RUN.memory)
    assert "memories of books.1, books.2 add up" in two
    assert "the other's counts as they are" in two
    (three,) = what_siblings_learn(SHOPS, RUN.memory)
    assert "a sum over the others" in three
    assert what_siblings_learn(SHOPS, MemoryConfig(kind="none")) == []
    assert what_siblings_learn(SHOPS, MemoryConfig(kind="mixture", sources="own,public")) == []


def test_memories_of_silos_are_those_of_the_simulated_run(tmp_path):
    sample = {name: few(domain) for name, domain in sample_domains(["crime", "comics"]).items()}
    silos = share_out({"crime": sample["crime"]}, 2, None, 0)
    write_playground(tmp_path, {**silos, "comics": sample["comics"]})
    deploy_playground(tmp_path)
    simulated = read(tmp_path / "runs" / "simulated" / "metrics.json")
    for name in (*silos, "comics"):
        site = read(tmp_path / "out" / name / "metrics.json")
        assert site["memory"] == {name: simulated["memory"][name]}
        expected, found = simulated["domains"][name]["test"], site["domains"][name]["test"]
        for row in ("fedecider + memory", "memory"):
            assert found[row]["ndcg@10"]["mean"] == pytest.approx(expected[row]["ndcg@10"]["mean"], abs=1e-12)
        assert (tmp_path / "out" / name / "counted.json").is_file() == (name in silos)
    wire = read(tmp_path / "out" / "server" / "wire.json")
    assert {one["client"] for one in wire["messages"] if one["kind"] == "count_sum"} == {0, 1}
    assert wire["refused_after_rounds"] == []
