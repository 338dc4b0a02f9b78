"""FedCIA without parameters: hand numbers, its low-pass term, bytes, sums under masks, what one upload holds."""

import pytest
import torch
from references import graph_filter
from toy_federation import NUM_ITEMS, SEQUENCES, run, toy_federation, toy_method, toy_population

from embedding_fr.blocks import block_packer
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods.fedcia import FedciaConfig, client_bytes, own_similarity, with_low_pass
from fedecider.baselines.fitting import train_matrix
from fedecider.federation.channel import Channel
from fedecider.federation.method import Download
from fedecider.federation.privacy import PrivacyConfig, protect_upload
from fedecider.federation.rounds import evaluate
from fedecider.federation.secure_rounds import WEIGHT, SecureSums, securely_summed_rounds


def blocks(population=None, size=7):
    population = population or toy_population()
    return block_packer(population, lambda num_train: 1, size)(range(population.num_clients))


def places(method, state, split="test", population=None):
    found = evaluate(method, state.last, "global", split, blocks(population))
    return torch.cat(found)


def test_hand_numbers():
    # x_1 = (1, 1, 0), x_2 = (0, 1, 1): F = mean of x x^T / 2
    population = toy_population(sequences=[[0, 1, 3, 4], [1, 2, 3, 4]], num_items=5)
    federation = toy_federation(num_clients=2, num_items=5)
    expected = torch.zeros(5, 5)
    expected[:3, :3] = torch.tensor([[0.25, 0.25, 0.0], [0.25, 0.5, 0.25], [0.0, 0.25, 0.25]])
    state, _ = run(toy_method("fedcia", federation, low_pass_weight=0.0), population, 1)
    assert torch.equal(state.server["similarity"], expected)
    assert (torch.tensor([1.0, 1, 0, 0, 0]) @ state.server["similarity"])[2] == 0.25  # client 1 scores item 2
    state, _ = run(toy_method("fedcia", federation, low_pass_weight=0.6), population, 1)
    torch.testing.assert_close(state.server["similarity"], 1.6 * expected)


def test_the_published_low_pass_term_changes_no_place_with_one_user_per_client():
    plain, loud = (toy_method("fedcia", low_pass_weight=weight) for weight in (0.0, 5.0))
    states = [run(method, rounds=2)[0] for method in (plain, loud)]
    assert not torch.allclose(states[0].server["similarity"], states[1].server["similarity"])
    assert torch.equal(places(plain, states[0]), places(loud, states[1]))
    ours = toy_method("fedcia", low_pass="server", low_pass_weight=5.0)
    state, _ = run(ours, rounds=2)
    assert not torch.equal(places(ours, state), places(plain, states[0]))
    without = toy_method("fedcia", low_pass="server", low_pass_weight=0.0)
    assert torch.equal(run(without)[0].server["similarity"], states[0].server["similarity"])


def test_the_public_code_s_further_vectors_are_arbitrary():
    """It asks for s vectors where one user's matrix has one: others of the null space change F_k, and none is right."""
    history_I = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    filtered_II = graph_filter(history_I[None], 0.3, num_vectors=3)
    torch.testing.assert_close(filtered_II, 1.3 * torch.outer(history_I, history_I) / 4)
    first, second = torch.tensor([[1.0, -1, 0, 0, 0], [0, 0, 1, -1, 0]], dtype=torch.float64) / 2**0.5
    padded = [filtered_II + 0.3 * torch.outer(null_I, null_I) for null_I in (first, second)]
    for null_I in (first, second):
        assert abs(float(history_I @ null_I)) < 1e-12  # both belong to the singular value 0
    assert not torch.allclose(*padded)


def test_a_client_s_own_matrix_ranks_no_item_that_it_does_not_have():
    block = blocks()[0]
    own_CTI = own_similarity(block.data, NUM_ITEMS, 1.3)
    history_CI = own_CTI[:, 0] > 0
    assert history_CI.sum(1).tolist() == [8, 7, 5, 4, 3, 2, 1]
    score_CI = own_CTI.sum(1)
    assert not score_CI[~history_CI].any()  # federation off has nothing left: needs_server
    torch.testing.assert_close(score_CI[history_CI], torch.full_like(score_CI[history_CI], 1.3))


def test_bytes_are_those_of_what_travels():
    _, records = run(toy_method("fedcia"), rounds=2)
    assert [group["up"] for group in records[0]["traffic"]] == [{"similarity": 4 * NUM_ITEMS**2}]
    assert [group["down"] for record in records for group in record["traffic"]] == [
        {},
        {"similarity": 4 * NUM_ITEMS**2},
    ]
    assert [group["up"] for group in records[1]["traffic"]] == [{}]
    _, short = run(toy_method("fedcia", encoding="items"), rounds=1)
    up = {client: group["up"] for group in short[0]["traffic"] for client in group["clients"]}
    assert up == {client: {"similarity": 4 * (len(items) - 2)} for client, items in enumerate(SEQUENCES)}
    aggregation = securely_summed_rounds(toy_method("fedcia"), SecureSums(5, 0.6, num_neighbours=4))
    _, secure = run(toy_method("fedcia", encoding="items"), rounds=1, channel=Channel(aggregation=aggregation))
    assert secure[0]["traffic"][0]["up"]["similarity"] == 8 * NUM_ITEMS**2
    assert secure[0]["traffic"][0]["up"][WEIGHT] == 8
    assert client_bytes(NUM_ITEMS, 5, EmbeddingTraining(), FedciaConfig()) == 4 * NUM_ITEMS * 7


def test_items_and_matrix_give_the_same_bits():
    states = [run(toy_method("fedcia", encoding=encoding), rounds=2)[0] for encoding in ("matrix", "items")]
    assert torch.equal(states[0].server["similarity"], states[1].server["similarity"])


def test_sums_under_masks_are_the_plain_ones_to_their_resolution():
    method = toy_method("fedcia")
    aggregation = securely_summed_rounds(method, SecureSums(5, 0.6, num_neighbours=4))
    plain, secure = run(method, rounds=2)[0], run(method, rounds=2, channel=Channel(aggregation=aggregation))[0]
    torch.testing.assert_close(secure.server["similarity"], plain.server["similarity"], rtol=0, atol=2**-32 + 1e-7)


def test_clip_bounds_a_contribution_and_keeps_its_shape():
    method, block = toy_method("fedcia", encoding="items"), blocks()[0]
    upload, _, _ = method.client_update(1, Download({}), {}, block)
    norm_C = upload.tensors["similarity"].flatten(1).norm(dim=1)
    torch.testing.assert_close(norm_C, torch.full_like(norm_C, 1.3))  # ||x x^T|| = |x|: all histories weigh alike
    bounded = protect_upload(upload, Download({}), PrivacyConfig(clip=0.5), 0, 1, 7)
    bounded_C = bounded.tensors["similarity"].flatten(1).norm(dim=1)
    torch.testing.assert_close(bounded_C, torch.full_like(bounded_C, 0.5))
    assert bounded.payload == {}  # the matrix travels now


def test_the_low_pass_term_stops_at_the_numerical_rank():
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    similarity_II = half @ half.T
    projector_II = half @ torch.linalg.inv(half.T @ half) @ half.T
    for num_vectors in (2, 5, 8, 9, 30):
        found_II = with_low_pass(similarity_II, 0.5, num_vectors)
        torch.testing.assert_close(found_II, similarity_II + 0.5 * projector_II)
    zeros = torch.zeros(5, 5)
    assert torch.equal(with_low_pass(zeros, 0.5, 9), zeros)


@pytest.mark.slow
@pytest.mark.data
def test_ml_100k(data_root):
    """As published it is a weighted co-occurrence; the low-pass term of the mean brings it to the level of EASE."""
    from fedecider.data.prepare import PrepareConfig, prepare_domains
    from fedecider.evaluation.metrics import mean_metrics

    config = PrepareConfig("movielens", str(data_root / "movielens" / "ml-100k"), "films", k_core=0, public_share=0)
    domain = prepare_domains(config)["films"]
    sequences, num_items = domain.clients.sequences, len(domain.item_keys)
    population = toy_population(sequences=sequences, num_items=num_items)
    matrix_UI = torch.from_numpy(train_matrix(sequences, num_items).toarray()).double()
    weighted_II = (matrix_UI / matrix_UI.sum(1, keepdim=True)).T @ matrix_UI
    hits = {}
    for low_pass in ("client", "server"):
        method = toy_method("fedcia", toy_federation(num_clients=943, num_items=num_items), low_pass=low_pass)
        state, _ = run(method, population, 2, block_clients=16)
        hits[low_pass] = mean_metrics(places(method, state, population=population))["hit@10"]
        if low_pass == "client":
            expected_II = (1.3 * weighted_II / 943).float()
            torch.testing.assert_close(state.server["similarity"], expected_II, rtol=1e-5, atol=1e-9)
    assert hits["client"] == pytest.approx(0.108, abs=0.003)
    assert hits["server"] == pytest.approx(0.135, abs=0.003)
