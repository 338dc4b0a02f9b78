"""Adapters of tables of companies that sell parts of one catalogue: whose mean a row is, and what stays at home."""

from types import SimpleNamespace

import pytest
import torch
import toy_recommender as toys
from slow import fast_where
from test_flora import products, updates_of
from toy_recommender import WORDING, catalogue_recommender, run

from fedecider.federation.channel import Channel
from fedecider.federation.secure_rounds import ROW_WEIGHTS, SecureSums, mean_upload, securely_summed_rounds
from fedecider.federation.secure_sum import THRESHOLD
from fedecider.federation.wire import received, take_row
from fedecider.methods import METHODS
from fedecider.methods.rows import HOME, TABLE, as_known, rows_at_home, secure_sums, travelling_rows
from fedecider.models.adapters import without_prefix
from fedecider.testing import llm_contract
from fedecider.testing.faults import Fault, faulty_channel

pytestmark = pytest.mark.whole

RANGES = {"north": (3, 12), "south": (8, 17), "east": (10, 21)}
"""Items, a token each: 8 and 9 are sold by two, 10 and 11 by all three, 12 to 16 by two, the others by one."""
APART = {"north": (3, 9), "south": (9, 17), "east": (17, 22)}
AVERAGING = ["fedavg", "pfedavg", "fedprox", "ditto", "ffa_lora", "rolora", "fdlora"]
SETTINGS = {"fdlora": {"sync_every": 2, "num_evaluations": 5}}
FACTOR_A = "lm_head.lora_a"


@pytest.fixture(autouse=True)
def _sizes(monkeypatch):
    monkeypatch.setattr(toys, "BACKBONE", "llama")
    monkeypatch.setattr(llm_contract, "SILO_SIZES", {"north": 12, "south": 10, "east": 11})


@pytest.fixture
def companies(monkeypatch):
    """(ranges, names, targets) -> models of these companies, as `client_models` makes them."""

    def made(ranges=RANGES, names=None, **options):
        monkeypatch.setattr(llm_contract, "CATALOGUES", ranges)
        recommender = catalogue_recommender(list(names or ranges), **options)
        home = rows_at_home(recommender.shapes, tasks(ranges, names))
        return recommender._replace(rows=recommender.rows._replace(home=home))

    return made


def tasks(ranges, names=None):
    def task(low, high):
        items, words = torch.arange(low, high), torch.tensor(sorted(WORDING))
        return SimpleNamespace(item_tokens=lambda: items, id_tokens=lambda: items, template_tokens=lambda: words)

    return [task(*ranges[name]) for name in names or ranges]


def build(name, recommender, **config):
    return METHODS[name].build(recommender, METHODS[name].config(**{**SETTINGS.get(name, {}), **config}))


def with_rows(recommender, **changes):
    return recommender._replace(rows=recommender.rows._replace(**changes))


def known_tables(recommender, method, state):
    """What each client makes of what it is sent next."""
    sent = travelling_rows(recommender.rows, method.takes_mean).sent
    found = []
    for client in range(recommender.num_clients):
        download = received(method.broadcast(state.round + 1, state.server, torch.tensor([client])), 0)
        found.append(as_known(download, take_row(state.local, client), sent, client).shared)
    return found


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_a_row_is_the_mean_over_those_who_sell_it_and_others_stay_at_home(companies, weighting):
    recommender = companies()
    method = build("fedavg", recommender, weighting=weighting)
    state, records = run(method, 3, 1)
    own_KVR = without_prefix(state.local, "own")[TABLE]
    weight_K = [1.0, 1.0, 1.0] if weighting == "uniform" else [12.0, 10.0, 11.0]
    known = known_tables(recommender, method, state)
    for row in range(3, 21):
        sellers = [client for client, (low, high) in enumerate(RANGES.values()) if low <= row < high]
        total = sum(weight_K[client] for client in sellers)
        expected = sum(weight_K[client] / total * own_KVR[client, row] for client in sellers)
        assert expected.any()
        for client in range(3):
            found = known[client][TABLE][row]
            if client in sellers:
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
            else:
                assert not found.any(), "nothing of what it does not sell"
        if len(sellers) == 1:
            assert not state.server[TABLE][row].any(), "the server never sees it"
            assert torch.equal(state.local[HOME + TABLE][sellers[0], row], own_KVR[sellers[0], row])
    up = {client: group["up"][TABLE] for group in records[0]["traffic"] for client in group["clients"]}
    sold_twice = {"north": 4, "south": 9, "east": 7}
    assert [up[client] for client in range(3)] == [4 * 2 * (rows + len(WORDING)) for rows in sold_twice.values()]


@pytest.mark.parametrize("name", fast_where(("fedavg", "rolora"), AVERAGING))
def test_what_stays_at_home_is_what_the_server_would_have_sent_back(companies, name):
    """One seller's row is its own mean; with momentum (fdlora) the server would move it, home does not."""
    recommender = companies()
    here, there = build(name, recommender), build(name, with_rows(recommender, home={}))
    kept, kept_records = run(here, 3, 3)
    sent, sent_records = run(there, 3, 3)
    if name != "fdlora":
        for one, other in zip(known_tables(recommender, here, kept), sent_tables(there, sent), strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())
        assert [record["valid"] for record in kept_records] == [record["valid"] for record in sent_records]
    for key, tensor in sent.local.items():
        if name != "fdlora":
            assert torch.equal(tensor, kept.local[key]), key
    assert kept.local[HOME + TABLE].any()


def sent_tables(method, state):
    downloads = (method.broadcast(state.round + 1, state.server, torch.tensor([client])) for client in range(3))
    return [received(download, 0).shared for download in downloads]


@pytest.mark.parametrize("name", fast_where(("fedavg",), AVERAGING))
def test_without_a_common_item_a_table_is_trained_as_alone_bit_for_bit(companies, name):
    together, records = run(build(name, companies(APART, targets=("table",))), 3, 2)
    for client, company in enumerate(APART):
        alone, alone_records = run(build(name, companies(APART, [company], targets=("table",))), 1, 2)
        for key, tensor in alone.local.items():
            assert torch.equal(together.local[key][client], tensor[0]), key
        for record, other in zip(records, alone_records, strict=True):
            for variant, scores in other["valid"].items():
                assert record["valid"][variant][client] == scores[0] or name == "fdlora"  # a server has momentum
    assert not any(tensor.any() for key, tensor in together.server.items() if key.endswith(TABLE))
    assert all(group["up"].get(TABLE, 0) == 0 for record in records for group in record["traffic"])


def test_who_has_nothing_in_common_keeps_its_adapter_and_the_others_average(companies):
    """The first two share items; the third one's factor A does not enter their mean either."""
    ranges = {"north": (3, 12), "south": (8, 17), "east": (17, 22)}
    recommender = companies(ranges, targets=("table",))
    together, _ = run(build("fedavg", recommender), 3, 2)
    pair, _ = run(build("fedavg", companies(ranges, ["north", "south"], targets=("table",))), 2, 2)
    for key, tensor in pair.server.items():
        assert torch.equal(together.server[key], tensor), key
    assert recommender.rows.home[FACTOR_A].tolist() == [[False, False], [False, False], [True, True]]
    alone, _ = run(build("fedavg", companies(ranges, ["east"], targets=("table",))), 1, 2)
    for key, tensor in alone.local.items():
        assert torch.equal(together.local[key][2], tensor[0]), key


def test_equal_catalogues_have_nothing_at_home(companies):
    same = dict.fromkeys(RANGES, (3, 12))
    recommender = companies(same)
    assert recommender.rows.home == {}
    rows = travelling_rows(recommender.rows._replace(hidden=True), True)
    assert torch.equal(rows.in_messages[TABLE], recommender.rows.own[TABLE])
    assert rows_at_home(recommender.shapes, tasks(same, ["north"])) == {}


def test_secure_sums_of_parts_take_everybody(companies):
    parts = with_rows(companies(), hidden=True)
    with pytest.raises(ValueError, match="clients that sell parts of a catalogue"):
        secure_sums(parts.rows, True, 0.5, 5)
    sums = secure_sums(parts.rows, True, 1.0, 5)
    assert TABLE in sums.own_rows
    assert sums.threshold == 1.0
    for ranges in (APART, dict.fromkeys(RANGES, (3, 12))):  # nothing in common, or all: cohorts tell nothing more
        other = with_rows(companies(ranges, targets=("output",)), hidden=True)
        sums = secure_sums(other.rows, True, 0.5, 5)
        assert TABLE in sums.own_rows
        assert sums.threshold == THRESHOLD


def test_the_exact_mean_of_products_is_over_sellers_too(companies):
    recommender = companies()
    method = build("flora", recommender)
    state, _ = run(method, 3, 1)
    product_K = [products(take_row(without_prefix(state.local, "own"), client))["lm_head"] for client in range(3)]
    own_KV = recommender.rows.own[TABLE]
    for client in range(3):
        expected = torch.zeros_like(product_K[0])
        for row in own_KV[client].nonzero()[:, 0].tolist():
            having = [one for one in range(3) if own_KV[one, row]]
            expected[row] = sum(product_K[one][row] for one in having) / len(having)
        found = updates_of(recommender, state, "global", client, method)["lm_head"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", fast_where(("fedavg",), AVERAGING))
def test_secure_sums_give_the_plain_rows_and_do_not_tell_whose_they_are(companies, name):
    plain, _ = run(build(name, companies()), 3, 2)
    recommender = with_rows(companies(), hidden=True)
    method, told = build(name, recommender), travelling_rows(recommender.rows, True).in_messages
    aggregation = securely_summed_rounds(method, SecureSums(5, own_rows=told))
    secure, records = run(method, 3, 2, channel=Channel(aggregation=aggregation))
    for key, tensor in (plain.server | plain.local).items():
        torch.testing.assert_close((secure.server | secure.local)[key], tensor, rtol=0, atol=1e-5)
    sizes = {
        tuple(sorted((way, key, size) for way in ("up", "down") for key, size in group[way].items()))
        for record in records[:1]
        for group in record["traffic"]
    }
    assert len(sizes) == 1, "all send and get as many bytes of everything"
    # 8 to 16 are sold by two or more
    assert told[TABLE][0].nonzero()[:, 0].tolist() == sorted({*WORDING, *range(8, 17)})
    if name == "fedavg":
        assert records[0]["traffic"][0]["up"][ROW_WEIGHTS + TABLE] == 8 * (9 + len(WORDING))


FIVE = {"a": (3, 9), "b": (5, 12), "c": (8, 15), "d": (4, 16), "e": (6, 21)}


def test_a_dropout_does_not_tell_what_who_is_away_sells(companies, monkeypatch):
    """The attack: the difference of the opened row weights of two rounds. With a threshold of 60 % it is all that the
    late company sells and others too; where all or none are opened there is no second sum."""
    monkeypatch.setattr(llm_contract, "SILO_SIZES", dict.fromkeys(FIVE, 8))
    seen = []

    def spy(sums, server, survivors):
        seen.append(sums)
        return mean_upload(sums, server, survivors)

    monkeypatch.setattr("fedecider.federation.secure_rounds.mean_upload", spy)
    recommender = with_rows(companies(FIVE), hidden=True)
    late_c, rules = faulty_channel([Fault(2, "late", 2, 2)]), secure_sums(recommender.rows, True, 1.0, 5)

    def opened(sums):
        seen.clear()
        method = build("fedavg", recommender)
        run(method, 5, 3, channel=late_c._replace(aggregation=securely_summed_rounds(method, sums)))

    opened(rules._replace(threshold=THRESHOLD))
    weights = [one[ROW_WEIGHTS + TABLE] for one in seen]
    assert (weights[0] - weights[1]).nonzero()[:, 0].tolist() == sorted({*range(8, 15), *WORDING})
    assert torch.equal(weights[0], weights[2])
    with pytest.raises(ValueError, match="got 4 of 5 clients in the secure aggregation of round 2, expected all"):
        opened(rules)
    assert len(seen) == 1, "of round 1 alone"
