"""Sites that play faults: what a simulation of the same scenario does, and damage that only messages have."""

import time
from types import SimpleNamespace

import pytest
import torch
from faulty_site import faulty
from slow import fast_where
from test_deployed import MOST, NAMES, build, changed, deployed, exchange_with, same, site_of
from toy_recommender import run, toy_recommender

from fedecider.deployment.messages import Channel, DeploymentConfig
from fedecider.deployment.server import Plan, run_deployed
from fedecider.federation.rounds import RoundSettings
from fedecider.federation.secure_rounds import SecureSums, securely_summed_rounds
from fedecider.testing.faults import Fault, faulty_channel

pytestmark = pytest.mark.whole


def played(name, folder, *faults, rounds=2, deadline_s=0.0, sums=None):
    sites = [site_of(name, client, folder, sums=sums) for client in range(3)]
    answers = [faulty(site.answer, client, faults, 0, MOST, deadline_s) for client, site in enumerate(sites)]
    config = DeploymentConfig(deadline_s=deadline_s, max_megabytes=1)
    line = Channel(in_time(exchange_with([SimpleNamespace(answer=one) for one in answers])), config, "abc", NAMES)
    records = []
    method = build(name, toy_recommender(NAMES, data=[{"labels": torch.zeros(0, 2)}] * 3))
    settings = RoundSettings(num_rounds=rounds, seed=0)
    state, _ = run_deployed(Plan(method, settings, ("ndcg@10",), sums), line, on_round=records.append)
    return state, records


def in_time(exchange):
    """The answers that come within the deadline, site by site."""

    def timed(sent, deadline_s):
        found = {}
        for client, blob in sent.items():
            start = time.monotonic()
            answers = exchange({client: blob}, deadline_s)
            if not deadline_s or time.monotonic() - start < deadline_s:
                found |= answers
        return found

    return timed


KINDS = ("sign_flip", "scale", "random", "nan", "replay")
FAST = [("fedavg", "random"), *(("fedecider", kind) for kind in KINDS if kind != "random")]


@pytest.mark.parametrize(
    ("name", "kind"), fast_where(FAST, [(name, kind) for name in ("fedecider", "fedavg") for kind in KINDS])
)
def test_a_site_plays_what_a_simulation_plays(name, kind, tmp_path):
    fault = Fault(1, kind, 2, factor=7.0)
    plan = faulty_channel([fault])
    simulated, _ = run(build(name, toy_recommender()), 3, 2, channel=plan)
    state, _ = played(name, tmp_path, fault)
    assert same(state.server, simulated.server)


def test_a_client_that_is_refused_keeps_its_last_good_contribution(tmp_path):
    """FeDecider's directions, and the tables of methods that weigh uploads: in the next round it is back."""
    for name in ("fedecider", "lora_sim"):
        state, records = played(name, tmp_path / name, Fault(1, "wrong_shape", 2), rounds=2)
        before, _ = run(build(name, toy_recommender()), 3, 1)
        key = next(key for key in state.server if key.endswith("lora_b"))
        assert torch.equal(state.server[key][1], before.server[key][1])
        assert not torch.equal(state.server[key][0], before.server[key][0])
        assert [len(record["clients"]) for record in records] == [3, 2]


def test_an_away_site_does_not_train(tmp_path):
    _, records = played("fedavg", tmp_path, Fault(1, "away", 2))
    assert records[1]["refused_uploads"] == [{"client": 1, "reason": "the site says: away"}]
    assert len((tmp_path / "site1" / "training.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_late_site_is_silent_until_the_round_is_closed(tmp_path):
    """It has given keys and shares: the others open its masks, and the sum is theirs alone."""
    sums, fault = SecureSums(5, 0.6), Fault(1, "late", 1, 1)
    plan, method = faulty_channel([fault]), build("fedavg", toy_recommender())
    simulated, _ = run(method, 3, 2, channel=plan._replace(aggregation=securely_summed_rounds(method, sums)))
    state, records = played("fedavg", tmp_path, fault, deadline_s=1.5, sums=sums)
    assert records[0]["refused_uploads"] == [{"client": 1, "reason": "no answer to train within 1.5 s"}]
    assert records[1]["refused_uploads"] == []
    assert same(state.server, simulated.server)


LIES = {
    "a list": [1],
    "a list of scores": {"global": [1], "local": [1]},
    "1000": {"global": {"ndcg@10": 1000.0}, "local": {"ndcg@10": 0.5}},
    "-5": {"global": {"ndcg@10": 0.5}, "local": {"ndcg@10": -5.0}},
    "true": {"global": {"ndcg@10": True}, "local": {"ndcg@10": True}},
    "400 digits": {"global": {"ndcg@10": 10**400}, "local": {"ndcg@10": 10**400}},
}


@pytest.mark.parametrize("lie", fast_where(("a list of scores", "400 digits", "1000", "-5"), LIES))
def test_scores_that_crashed_a_server_are_not_believed(lie, tmp_path):
    def lies(client, asked, blob):
        wrong = client == 1 and (asked.kind, asked.round) == ("validate", 2)
        return changed(blob, facts={"scores": LIES[lie]}) if wrong else blob

    sites = [site_of("fedavg", client, tmp_path) for client in range(3)]
    _, records, _, _ = deployed("fedavg", sites, 3, damage=lies)
    assert records[1]["valid"]["global"][1] == records[0]["valid"]["global"][1]
    assert any("expected numbers from 0 to 1" in one["reason"] for one in records[2]["refused_uploads"])
