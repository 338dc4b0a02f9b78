"""FedNear: hand numbers, its objective, its sums, what order and recency buy, bounds, bytes, and nothing held out."""

import math

import pytest
import torch
from toy_federation import NUM_ITEMS, SEQUENCES, run, toy_federation, toy_population, toy_training

from embedding_fr import gram
from embedding_fr.blocks import block_packer
from embedding_fr.config import EmbeddingTraining
from embedding_fr.gram import denoise
from embedding_fr.methods import fednear as module
from embedding_fr.methods.fedease import FedeaseConfig, fedease
from embedding_fr.methods.fednear import (
    FednearConfig,
    client_bytes,
    client_entries,
    contribution_norm,
    fednear,
    plain_sum_of,
    weighted_history,
)
from fedecider.evaluation.protocols import PROTOCOLS
from fedecider.federation.method import Download
from fedecider.federation.rounds import evaluate
from fedecider.federation.secure_rounds import KEYS, SHARES, UNMASKING
from fedecider.federation.state import Parameters

AS_EASE = {"pair_reach": math.inf, "history_reach": math.inf, "direction": 0.0}


def method(federation=None, **changes):
    return fednear(federation or toy_federation(), toy_training("fedmf"), FednearConfig(**changes))


def blocks(population=None, size=3):
    population = population or toy_population()
    return block_packer(population, lambda num_train: 1, size)(range(population.num_clients))


def summed(sequences, num_items, **changes):
    """(I, I) plain sum over the train parts: pairs in the lower triangle, order in the upper one."""
    federation = toy_federation(num_clients=len(sequences), num_items=num_items)
    federated = method(federation, **changes)
    uploads = [federated.client_update(1, Download({}), {}, b)[0] for b in blocks(toy_population(sequences=sequences))]
    return plain_sum_of(1, uploads, federation, FednearConfig(**changes))


def brute_force(sequences, num_items, reach):
    """D (I, I): pairs of different items, the earlier one is the row; and events per item (I,)."""
    before_II, count_I = torch.zeros(num_items, num_items, dtype=torch.float64), torch.zeros(num_items)
    for sequence in sequences:
        for late, item in enumerate(sequence[:-2]):
            count_I[item] += 1
            for early in range(late):
                near = math.floor(2**16 / (1 + (late - early) / reach)) / 2**16
                before_II[sequence[early], item] += near
    return before_II, count_I.double()


def weights(sequences, num_items, rounds=1, **changes):
    federated = method(toy_federation(num_clients=len(sequences), num_items=num_items), **changes)
    return run(federated, toy_population(sequences=sequences, num_items=num_items), rounds)[0].server["weights"]


@pytest.mark.parametrize(
    ("direction", "forward", "backward"), [(0.0, 0.25, 0.25), (0.5, 0.375, 0.125), (1.0, 0.5, 0.0)]
)
def test_hand_numbers(direction, forward, backward):
    # One pair, 0 then 1, k(1) = 1/2. G + I = [[2, .5], [.5, 2]], P = [[2, -.5], [-.5, 2]] / 3.75: EASE gives .25 twice.
    # D - D^T = [[0, .5], [-.5, 0]], P (D - D^T) = [[.25, 1], [-1, -.25]] / 3.75, and Z of it is [[0, .25], [-.25, 0]].
    expected = torch.tensor([[0.0, forward, 0.0, 0.0], [backward, 0.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4])
    found = weights([[0, 1, 2, 3], [2, 3, 0]], 4, regularisation=1.0, pair_reach=1.0, direction=direction)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("direction", [0.0, 0.3, 1.0])
def test_each_column_solves_its_least_squares_without_itself(direction):
    reach, regularisation = 2.5, 0.7
    before_II, count_I = brute_force(SEQUENCES, NUM_ITEMS, reach)
    shifted_II = before_II + before_II.T + torch.diag(count_I + regularisation)
    target_II = (1 + direction) * before_II + (1 - direction) * before_II.T
    expected = torch.zeros_like(shifted_II)
    for column in range(NUM_ITEMS):
        others = [item for item in range(NUM_ITEMS) if item != column]
        expected[others, column] = torch.linalg.solve(shifted_II[others][:, others], target_II[others, column])
    found = weights(SEQUENCES, NUM_ITEMS, regularisation=regularisation, pair_reach=reach, direction=direction)
    torch.testing.assert_close(found, expected.float())


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("protocol", ["strict", "strict/sampled99"])
def test_with_all_pairs_alike_it_is_fedease_to_the_last_bit(protocol, secure):
    num_items = 14 if protocol == "strict" else 120
    federation = toy_federation(PROTOCOLS[protocol], num_items=num_items)
    population = toy_population(PROTOCOLS[protocol], num_items=num_items)
    ease = fedease(federation, toy_training("fedmf"), FedeaseConfig(regularisation=3.0, secure=secure))
    near = method(federation, regularisation=3.0, secure=secure, **AS_EASE)
    one, other = (run(m, population, 2)[0].server for m in (ease, near))
    assert torch.equal(one["weights"], other["weights"])
    for split in ("valid", "test"):
        left, right = (evaluate(m, Parameters(2, one, {}), "global", split, blocks(population)) for m in (ease, near))
        assert torch.equal(torch.cat(left), torch.cat(right))


@pytest.mark.parametrize("reach", [1.0, 3.7, math.inf])
def test_the_federated_sum_is_the_centralised_statistic(reach):
    before_II, count_I = brute_force(SEQUENCES, NUM_ITEMS, reach)
    square_II = summed(SEQUENCES, NUM_ITEMS, pair_reach=reach)
    assert torch.equal(square_II.tril(), (before_II + before_II.T + torch.diag(count_I)).tril())
    assert torch.equal(square_II.triu(1), (before_II - before_II.T).triu(1))
    assert not summed(SEQUENCES, NUM_ITEMS, pair_reach=reach, direction=0.0).triu(1).any()


def test_order_decides_between_what_came_before_and_after():
    """On a ring of items everyone goes upwards; with one item known, only the direction tells 6 from 4."""
    walks = [[(start + step) % 10 for step in range(7)] for start in range(10)]
    short = [[start, (start + 1) % 10, (start + 2) % 10] for start in range(10)]
    sequences = [*walks, *short]
    population = toy_population(sequences=sequences, num_items=10)
    for direction in (0.0, 0.3, 1.0):
        federated = method(toy_federation(num_clients=20, num_items=10), regularisation=1.0, direction=direction)
        server = run(federated, population, 1)[0].server
        after, before = server["weights"][5, 6].item(), server["weights"][5, 4].item()
        if direction == 0.0:
            assert after == pytest.approx(before, abs=1e-6)
        else:
            assert after > before + 0.1
            positions = torch.cat(evaluate(federated, Parameters(1, server, {}), "global", "valid", blocks(population)))
            assert positions[-10:].tolist() == [0.0] * 10


def test_what_the_newest_items_go_with_comes_first():
    """Clients move from one group to another: the held-out items are of the group that they are in now."""
    low, high = [0, 1, 2, 3, 4], [5, 6, 7, 8, 9]
    sequences = []
    for turn in range(10):
        first, second = (low, high) if turn % 2 else (high, low)
        one, two = (group[turn // 2 :] + group[: turn // 2] for group in (first, second))
        sequences.append(one[:3] + two)  # two items of the first group stay unseen, and two of the second
    population = toy_population(sequences=sequences, num_items=10)
    found = {}
    for name, changes in (("near", {"pair_reach": 2.0}), ("ease", AS_EASE)):
        federated = method(toy_federation(num_clients=10, num_items=10), regularisation=1.0, **changes)
        state, _ = run(federated, population, 1)
        parameters = Parameters(1, state.server, {})
        found[name] = torch.cat(evaluate(federated, parameters, "global", "valid", blocks(population)))
    assert found["near"].max() <= 1.0  # only the other held-out item may stand before it
    assert found["ease"].mean() > 1.0


def test_weighted_history_by_hand():
    block = blocks(toy_population(sequences=[[3, 1, 0, 4, 2], [2, 0, 1]], num_items=5), 2)[0]
    found = weighted_history(block.data, 5, 2.0)
    torch.testing.assert_close(found, torch.tensor([[1.0, 2 / 3, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]]))
    assert weighted_history(block.data, 5, math.inf).tolist() == [[1, 1, 0, 1, 0], [0, 0, 1, 0, 0]]


def test_a_contribution_has_the_norm_that_its_length_says_and_stays_inside_its_bound():
    item_T = torch.tensor([7, 2, 9, 0, 4])
    for direction in (0.0, 0.5):
        config = FednearConfig(pair_reach=3.0, direction=direction)
        place_E, value_PE = client_entries(item_T, 10, config)
        assert place_E.unique().numel() == 15
        planes = config.num_planes
        # 5 items; 4, 3, 2, 1 pairs at distance 1, 2, 3, 4
        expected = math.sqrt(5 + planes * (4 * 9 / 16 + 3 * 9 / 25 + 2 / 4 + 9 / 49))
        assert contribution_norm(5, config) == pytest.approx(expected)
        assert value_PE.norm().item() == pytest.approx(expected, rel=1e-4)
        clipped = FednearConfig(pair_reach=3.0, direction=direction, clip=1.2)
        norm = client_entries(item_T, 10, clipped)[1].norm().item()
        assert 1.1998 < norm <= 1.2
    place_E, value_PE = client_entries(torch.tensor([7, 2]), 10, FednearConfig(pair_reach=1.0))
    entry = dict(zip(place_E.tolist(), value_PE.T.tolist(), strict=True))
    assert entry == {2 * 10 - 1: [1, 0], 7 * 10 - 21: [1, 0], 2 * 10 - 1 + 5: [0.5, -0.5]}  # 7 came first: sign -


def test_bytes_are_those_of_what_travels():
    _, plain = run(method(), rounds=2)
    up = {client: group["up"] for group in plain[0]["traffic"] for client in group["clients"]}
    assert up == {client: {"items": 4 * (len(sequence) - 2)} for client, sequence in enumerate(SEQUENCES)}
    assert plain[0]["traffic"][0]["down"] == {}
    assert plain[1]["traffic"][0]["down"] == {"weights": 4 * NUM_ITEMS**2}
    triangle = NUM_ITEMS * (NUM_ITEMS + 1) // 2
    for direction, planes in ((0.2, 2), (0.0, 1)):
        _, secure = run(method(secure=True, direction=direction), rounds=2)
        up = secure[0]["traffic"][0]["up"]
        assert up.pop("masked_gram") == 4 * planes * triangle
        assert set(up) == {KEYS, SHARES, UNMASKING}
        assert (
            client_bytes(NUM_ITEMS, 5, EmbeddingTraining(), FednearConfig(secure=True, direction=direction))
            == 8 * planes * triangle
        )
    _, noised = run(method(secure=True, clip=900.0, noise_scale=100.0, direction=0.0), rounds=1)
    assert noised[0]["traffic"][0]["up"]["masked_gram"] == 8 * triangle  # 32 bits have no room for such noise
    _, few = run(method(top_k=3), rounds=2)
    assert few[1]["traffic"][0]["down"] == {"index": 4 * 3 * NUM_ITEMS, "value": 4 * 3 * NUM_ITEMS}
    assert client_bytes(NUM_ITEMS, 5, EmbeddingTraining(), FednearConfig()) == 8 * NUM_ITEMS


@pytest.mark.parametrize("secure", [False, True])
def test_noise_of_the_sum_has_the_stated_size(secure, monkeypatch):
    seen = []

    def watched(gram_II, std):
        seen.append((gram_II.clone(), std))
        return denoise(gram_II, std)

    monkeypatch.setattr(gram, "denoise", watched)
    num_items, changes = 120, {"clip": 2.0, "direction": 0.0}
    federation = toy_federation(num_items=num_items)
    state, _ = run(
        method(federation, secure=secure, noise_scale=0.5, **changes), toy_population(num_items=num_items), 1
    )
    noisy_II, std = seen[0]
    clean_II = module.plain_sum_of(
        1,
        [method(federation, **changes).client_update(1, Download({}), {}, b)[0] for b in blocks()],
        federation,
        FednearConfig(**changes),
    )
    assert std == 1.0
    lower = (noisy_II - clean_II)[torch.tril_indices(num_items, num_items).unbind()]
    assert lower.std().item() == pytest.approx(1.0, rel=0.04)  # 7260 entries: one standard error is 0.8 %
    assert lower.mean().abs() < 4 / 7260**0.5
    assert torch.isfinite(state.server["weights"]).all()


@pytest.mark.slow
@pytest.mark.data
def test_ml_100k_beats_ease_on_validation(data_root):
    from fedecider.data.prepare import PrepareConfig, prepare_domains
    from fedecider.evaluation.metrics import mean_metrics

    config = PrepareConfig("movielens", str(data_root / "movielens" / "ml-100k"), "films", k_core=0, public_share=0)
    domain = prepare_domains(config)["films"]
    sequences, num_items = domain.clients.sequences, len(domain.item_keys)
    population = toy_population(sequences=sequences, num_items=num_items)
    federation = toy_federation(num_clients=943, num_items=num_items)
    found = {}
    for name, federated in (
        ("near", method(federation)),
        ("ease", fedease(federation, toy_training("fedmf"), FedeaseConfig())),
    ):
        state, _ = run(federated, population, 1, block_clients=128)
        positions = evaluate(federated, Parameters(1, state.server, {}), "global", "valid", blocks(population, 128))
        found[name] = mean_metrics(torch.cat(positions))
    assert found["near"]["ndcg@10"] == pytest.approx(0.140, abs=0.002)
    assert found["near"]["ndcg@10"] > 1.5 * found["ease"]["ndcg@10"]
