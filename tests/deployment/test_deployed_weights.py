"""Sites learn the mean of all sites' weights: what each gets, whom the sum leaves out, and what nobody is told."""

import logging

import pytest
import torch
from test_deployed import MOST, exchange_with, site_of

from fedecider.deployment.messages import Channel, DeploymentConfig, Message, of_download, pack, unpack
from fedecider.deployment.weights import share_weights, site_weights
from fedecider.federation.method import Download
from fedecider.models.config import EnsembleConfig
from fedecider.models.ensemble import Weights
from fedecider.models.features import FEATURES
from fedecider.models.weight_sums import NUM_NUMBERS, securely_meaned

pytestmark = pytest.mark.whole

CONFIG = EnsembleConfig(kind="logit")
SEED, ROUND = 5, 4
NAMES = ["north", "south", "east", "west"]
WEIGHTS = [
    Weights({"model": 0.5 + client, "text": 0.3 * client - 1.0}, {}, num_customers=100 * client + 70)
    for client in range(len(NAMES))
]
DOWNLOAD = Download({"table": torch.arange(6.0)})


def site_in(folder, client, names=NAMES):
    """Its weights come with the download of the selected round, and from no other."""
    site = site_of("fedavg", 0, folder / names[client])

    def fit(state, download):
        assert torch.equal(download.shared["table"], DOWNLOAD.shared["table"])
        fitted.append(client)
        return WEIGHTS[client]

    fitted: list[int] = []
    return site._replace(weights=site_weights(CONFIG, SEED, names, client, site.folder, "abc"), fit=fit), fitted


def shared(sites, folder, config=CONFIG, names=NAMES, **faults):
    folder.mkdir(exist_ok=True)
    line = Channel(exchange_with(sites, **faults), DeploymentConfig(max_megabytes=16), "abc", names)
    facts = {"run": "abc", "best_round": 0}
    requests = {
        client: of_download("finish", ROUND, DOWNLOAD, [0], {**facts, "clients": [client]})
        for client in range(len(names))
    }
    share_weights(line, config, SEED, requests, folder)
    return line


def away_for(kind, *clients):
    return lambda client, asked: client in clients and asked.kind == kind


def test_every_site_gets_the_mean_that_a_simulation_has(tmp_path):
    sites, fitted = zip(*(site_in(tmp_path, client) for client in range(4)), strict=True)
    line = shared(sites, tmp_path / "server")
    expected, _ = securely_meaned(WEIGHTS, SEED)
    assert [site.weights.prior for site in sites] == [expected] * 4
    assert list(map(len, fitted)) == [1] * 4
    kinds = [one["kind"] for one in line.carried if one["client"] == 0]
    assert kinds == ["weight_keys", "weight_shares", "weights", "weight_unmask", "weight_sum"]
    assert line.refused == []
    again = shared(sites, tmp_path / "server")
    assert {one["kind"] for one in again.carried} == {"weight_sum"}


def test_the_server_sees_the_sum_alone(tmp_path):
    """Masked weights have all their bits, and other ones in every run."""
    seen = []

    def watch(client, asked, blob):
        if (client, asked.kind) == (0, "weights"):
            seen.append(unpack(blob, MOST).tensors["masked"])
        return blob

    for part in ("a", "b"):
        shared([site_in(tmp_path / part, client)[0] for client in range(4)], tmp_path / part, damage=watch)
    first_L, second_L = seen
    assert first_L.shape == (NUM_NUMBERS,) == (2 * len(FEATURES),)
    assert (first_L != second_L).all()
    assert float(first_L.double().abs().mean()) > 2**60


@pytest.mark.parametrize("kind", ["weight_keys", "weights"])
def test_a_site_that_is_lost_is_left_out_and_told_the_mean_of_the_others(kind, tmp_path):
    sites = [site_in(tmp_path, client)[0] for client in range(4)]
    line = shared(sites, tmp_path / "server", away=away_for(kind, 1))
    expected, _ = securely_meaned([WEIGHTS[client] for client in (0, 2, 3)], SEED)
    assert [site.weights.prior for site in sites] == [expected] * 4
    assert {one["client"] for one in line.refused} == {1}


def test_two_of_four_are_too_few(tmp_path, caplog):
    """Each would have the other's weights as they are: all go on with their own."""
    sites = [site_in(tmp_path, client)[0] for client in range(4)]
    with caplog.at_level(logging.WARNING):
        line = shared(sites, tmp_path / "server", away=away_for("weights", 1, 2))
    assert "ensembles of north, south, east, west are fitted without each other's weights: got 2 of 4" in caplog.text
    assert not any(one["kind"] in ("weight_unmask", "weight_sum") for one in line.carried)
    assert all(site.weights.prior is None for site in sites)
    assert list((tmp_path / "server").iterdir()) == []


def test_a_site_takes_one_sum_of_weights_and_no_numbers_that_are_none(tmp_path):
    sites, told = [site_in(tmp_path, client)[0] for client in range(4)], {}

    def away(client, asked):
        told[asked.kind] = asked
        return client == 0 and asked.kind == "weight_sum"

    shared(sites, tmp_path / "server", away=away)
    good = told["weight_sum"]

    def answer(asked, client=0):
        return unpack(sites[client].answer(pack(asked)), MOST)

    total_L = good.tensors["weights"]
    for wrong_L in (total_L[:-1], total_L.float(), total_L + 2**60):
        assert "got no sum of" in answer(good._replace(tensors={"weights": wrong_L})).facts["reason"]
    other_L = total_L.index_add(0, torch.tensor([0]), torch.tensor([1]))
    assert "got a second sum of weights" in answer(good._replace(tensors={"weights": other_L}), 1).facts["reason"]
    two = good._replace(facts={**good.facts, "clients": [0, 1]})
    assert "expected 3 at least of [0, 1, 2, 3]" in answer(two).facts["reason"]
    assert sites[0].weights.prior is None
    assert answer(good) == Message("weight_sum", ROUND)
    assert sites[0].weights.prior == sites[1].weights.prior


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (EnsembleConfig(kind="none"), NAMES),
        (EnsembleConfig(kind="logit", sources="own,public"), NAMES),
        (CONFIG, NAMES[:1]),
    ],
)
def test_nothing_is_asked_where_sites_tell_each_other_nothing(config, names, tmp_path):
    site = site_of("fedavg", 0, tmp_path)
    assert site_weights(config, SEED, names, 0, site.folder, "abc") is None
    assert shared([site] * len(names), tmp_path / "server", config, names).carried == []
    asked = pack(Message("weights", ROUND, {}, {"run": "abc"}))
    assert "got a step of a sum of weights, expected none" in unpack(site.answer(asked), MOST).facts["reason"]
