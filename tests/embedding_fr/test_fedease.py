"""FedEASE: equal to centralised EASE, in every form of sum and download; bytes, bounds, noise, guarantee."""

import math

import pytest
import torch
from toy_federation import NUM_ITEMS, SEQUENCES, run, toy_federation, toy_population, toy_training

from embedding_fr import gram
from embedding_fr.blocks import block_packer
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.fedease import METHOD, FedeaseConfig, fedease
from embedding_fr.methods.fednear import client_scales, train_items
from fedecider.baselines import ease
from fedecider.baselines.ease import mirror
from fedecider.baselines.fitting import Pooled, train_matrix
from fedecider.evaluation.protocols import PROTOCOLS, rank_held_out
from fedecider.federation.rounds import evaluate
from fedecider.federation.secure_rounds import KEYS, SHARES, UNMASKING
from fedecider.federation.state import Parameters


def method(federation=None, **settings):
    return fedease(federation or toy_federation(), toy_training("fedmf"), FedeaseConfig(**settings))


def blocks(population=None, size=3):
    population = population or toy_population()
    return block_packer(population, lambda num_train: 1, size)(range(population.num_clients))


def summed(histories, scale_C, num_items):
    """(I, I) symmetric sum of what clients count."""
    square_II = torch.zeros(num_items, num_items, dtype=torch.float64)
    gram.add_histories(square_II, histories, scale_C)
    return mirror(square_II)


def central_gram(sequences=SEQUENCES, num_items=NUM_ITEMS):
    matrix_UI = torch.from_numpy(train_matrix(sequences, num_items).toarray())
    return matrix_UI.T @ matrix_UI


def many_sequences(num_clients=40, num_items=25, seed=1):
    """Histories of unequal length with a preference for items near the user's own number."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for user in range(num_clients):
        near = torch.exp(-((torch.arange(num_items) - user % num_items).abs() / 6.0))
        sequences.append(torch.multinomial(near, 3 + user % 15, generator=generator).tolist())
    return sequences


def test_hand_numbers():
    # train items {0, 1}, {0}: G = [[2, 1], [1, 1]]; lambda 1: P = [[2, -1], [-1, 3]] / 5; B_01 = 1/3, B_10 = 1/2
    population = toy_population(sequences=[[0, 1, 2, 3], [0, 2, 3]], num_items=4)
    state, _ = run(method(toy_federation(num_clients=2, num_items=4), regularisation=1.0), population, 1)
    expected = torch.zeros(4, 4)
    expected[0, 1], expected[1, 0] = 1 / 3, 1 / 2
    torch.testing.assert_close(state.server["weights"], expected)


@pytest.mark.parametrize("protocol", ["strict", "strict/sampled99"])
@pytest.mark.parametrize("secure", [False, True])
def test_it_equals_centralised_ease(protocol, secure):
    num_items = 25 if protocol == "strict" else 130
    sequences = many_sequences(num_items=num_items)
    federation = toy_federation(PROTOCOLS[protocol], 40, num_items)
    population = toy_population(PROTOCOLS[protocol], sequences, num_items)
    federated = method(federation, regularisation=7.0, secure=secure)
    state, _ = run(federated, population, 2, block_clients=6)
    assert torch.equal(state.server["weights"], ease.ease_weights(central_gram(sequences, num_items), 7.0).float())
    score = ease.fit(Pooled(sequences, num_items), ease.EaseConfig(7.0))
    for split in ("valid", "test"):
        found = torch.cat(evaluate(federated, state.last, "global", split, blocks(population)))
        shared = PROTOCOLS[protocol]
        # centralised EASE scores from train items in both splits
        expected = rank_held_out(score, sequences, num_items, split, shared, candidates=population.candidates)
        assert (found != expected).sum() <= 2  # float32 in the download


def bytes_of(traffic, direction):
    return {client: group[direction] for group in traffic for client in group["clients"]}


def test_bytes_are_those_of_what_travels():
    _, plain = run(method(), rounds=2)
    assert bytes_of(plain[0]["traffic"], "up") == {
        client: {"items": 4 * (len(sequence) - 2)} for client, sequence in enumerate(SEQUENCES)
    }
    assert bytes_of(plain[0]["traffic"], "down") == {client: {} for client in range(7)}
    triangle = NUM_ITEMS * (NUM_ITEMS + 1) // 2
    _, secure = run(method(secure=True), rounds=2)
    protocol = {KEYS: 96, SHARES: 6 * 82, UNMASKING: 7 * 33}  # seven clients, all of them neighbours
    assert secure[0]["traffic"][0]["up"] == {"masked_gram": 4 * triangle, **protocol}
    assert secure[0]["traffic"][0]["down"] == {KEYS: 6 * 96, SHARES: 6 * 82, UNMASKING: 1}
    _, noised = run(method(secure=True, clip=100.0, noise_scale=100.0), rounds=1)
    assert noised[0]["traffic"][0]["up"] == {
        "masked_gram": 8 * triangle,
        **protocol,
    }  # 32 bits have no room for such noise
    _, few = run(method(top_k=3), rounds=2)
    assert few[1]["traffic"][0]["down"] == {"index": 4 * 3 * NUM_ITEMS, "value": 4 * 3 * NUM_ITEMS}
    for secure, size in ((True, triangle), (False, NUM_ITEMS)):
        assert METHOD.client_bytes(NUM_ITEMS, 5, EmbeddingTraining(), FedeaseConfig(secure=secure)) == 8 * size


def test_top_k_keeps_the_largest_of_each_column():
    weight_II = torch.tensor([[0.0, -5.0, 1.0], [2.0, 0.0, -3.0], [-1.0, 4.0, 0.0]])
    index_IK, value_IK = gram.largest_entries(weight_II.T, 1)
    assert index_IK.tolist() == [[1], [0], [1]]
    assert value_IK.tolist() == [[2.0], [-5.0], [-3.0]]
    history_CI = torch.tensor([[True, True, False]])
    assert gram.sparse_scores(history_CI, index_IK, value_IK).tolist() == [[2.0, -5.0, -3.0]]
    all_but_one, full = (run(method(**s), rounds=1)[0].server for s in ({"top_k": NUM_ITEMS - 1}, {}))
    scores = gram.sparse_scores(train_items(blocks(size=7)[0].data, NUM_ITEMS), **_short(all_but_one))
    torch.testing.assert_close(scores, train_items(blocks(size=7)[0].data, NUM_ITEMS).float() @ full["weights"])


def _short(model):
    return {"index_IK": model["index"], "value_IK": model["value"]}


@pytest.mark.parametrize("secure", [False, True])
def test_noise_of_the_sum_has_the_stated_size(secure, monkeypatch):
    seen, denoise = [], gram.denoise

    def watched(gram_II, std):
        seen.append((gram_II.clone(), std))
        return denoise(gram_II, std)

    monkeypatch.setattr(gram, "denoise", watched)
    num_items = 120
    sequences = many_sequences(num_items=num_items)
    federation = toy_federation(num_clients=40, num_items=num_items)
    population = toy_population(sequences=sequences, num_items=num_items)
    state, _ = run(method(federation, secure=secure, clip=4.0, noise_scale=0.5), population, 1)
    noisy_II, std = seen[0]
    history_CI = torch.cat([train_items(block.data, num_items) for block in blocks(population)])
    histories = [history_I.nonzero()[:, 0] for history_I in history_CI]
    clean_II = summed(histories, client_scales(histories, FedeaseConfig(clip=4.0)), num_items)
    assert std == 2.0
    assert torch.equal(noisy_II, noisy_II.T)
    noise_II = noisy_II - clean_II
    upper = noise_II[torch.triu_indices(num_items, num_items).unbind()]
    assert upper.std().item() == pytest.approx(2.0, rel=0.04)  # 7260 entries: one standard error is 0.8 %
    assert upper.mean().abs() < 4 * 2.0 / 7260**0.5
    assert noise_II.diagonal().std().item() == pytest.approx(2.0, rel=0.3)
    assert torch.isfinite(state.server["weights"]).all()


def test_clip_bounds_what_one_client_adds():
    histories = [history_I.nonzero()[:, 0] for history_I in train_items(blocks(size=7)[0].data, NUM_ITEMS)]
    scale_C = client_scales(histories, FedeaseConfig(clip=2.5))
    assert [len(item_T) for item_T in histories] == [8, 7, 5, 4, 3, 2, 1]
    assert scale_C[4:].tolist() == [1.0, 1.0, 1.0]  # root(3 * 4 / 2) = 2.449 for the one with three items is inside
    assert scale_C[0].item() == pytest.approx(2.5 / math.sqrt(36))
    gram_II = summed(histories, scale_C, NUM_ITEMS)
    rounded_C = (scale_C * 2**16).floor() / 2**16
    history_CI = train_items(blocks(size=7)[0].data, NUM_ITEMS).double()
    assert torch.equal(gram_II, history_CI.T @ (history_CI * rounded_C[:, None]))


def test_denoise_keeps_what_stands_out_and_makes_the_solve_sane():
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(80, dtype=torch.float64, generator=generator)
    signal_II = 500.0 * torch.outer(direction, direction) / direction.square().sum()
    noise_II = torch.randn(80, 80, dtype=torch.float64, generator=generator).triu()
    noisy_II = signal_II + 3.0 * (noise_II + noise_II.T - noise_II.diag().diag())
    clean_II, spread = gram.denoise(noisy_II, 3.0)
    assert spread == pytest.approx(3.0 * 80**0.5)
    assert torch.linalg.eigvalsh(clean_II)[0] > -1e-9
    assert torch.linalg.eigvalsh(clean_II)[-1].item() == pytest.approx(500 - spread, rel=0.03)
    assert (clean_II - signal_II).norm() < 0.6 * (noisy_II - signal_II).norm()
    with pytest.raises(ValueError, match="not positive definite"):
        ease.ease_weights(noisy_II, 1.0)
    ease.ease_weights(clean_II, 1.0)
    gram_II = central_gram()
    torch.testing.assert_close(gram.denoise(gram_II, 0.0)[0], gram_II)


@pytest.mark.slow
@pytest.mark.data
def test_ml_100k(data_root):
    """Centralised EASE on the leak-free split scores hit@10 0.14 in the whole catalogue; the federated one the same."""
    from fedecider.data.prepare import PrepareConfig, prepare_domains
    from fedecider.evaluation.metrics import mean_metrics

    config = PrepareConfig("movielens", str(data_root / "movielens" / "ml-100k"), "films", k_core=0, public_share=0)
    domain = prepare_domains(config)["films"]
    sequences, num_items = domain.clients.sequences, len(domain.item_keys)
    population = toy_population(sequences=sequences, num_items=num_items)
    federated = method(toy_federation(num_clients=943, num_items=num_items))
    state, records = run(federated, population, 2, block_clients=64)
    found = torch.cat(evaluate(federated, Parameters(2, state.server, {}), "global", "test", blocks(population, 64)))
    expected = rank_held_out(ease.fit(Pooled(sequences, num_items), ease.EaseConfig()), sequences, num_items, "test")
    assert (found != expected).sum() <= 2  # float32 in the download
    metrics = mean_metrics(found)
    assert metrics["hit@10"] == pytest.approx(0.140, abs=0.002)
    assert metrics["ndcg@10"] == pytest.approx(0.0717, abs=0.001)
    up = sum(len(group["clients"]) * sum(group["up"].values()) for group in records[0]["traffic"])
    assert up == 4 * (100_000 - 2 * 943)
