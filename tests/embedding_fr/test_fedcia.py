"""FedCIA without parameters: hand numbers, and what one upload holds."""

import torch
from toy_federation import NUM_ITEMS, run, toy_federation, toy_method, toy_population

from embedding_fr.blocks import block_packer
from embedding_fr.methods.fedcia import own_similarity, with_low_pass
from fedecider.federation.rounds import evaluate


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


def test_a_client_s_own_matrix_ranks_no_item_that_it_does_not_have():
    block = blocks()[0]
    own_CTI = own_similarity(block.data, NUM_ITEMS, 1.3)
    history_CI = own_CTI[:, 0] > 0
    assert history_CI.sum(1).tolist() == [8, 7, 5, 4, 3, 2, 1]
    score_CI = own_CTI.sum(1)
    assert not score_CI[~history_CI].any()  # federation off has nothing left: needs_server
    torch.testing.assert_close(score_CI[history_CI], torch.full_like(score_CI[history_CI], 1.3))


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
