"""FedCIA without and with parameters: hand numbers, the fit, bytes, and what one upload holds."""

import pytest
import torch
from toy_federation import NUM_ITEMS, run, toy_federation, toy_method, toy_population

from embedding_fr.blocks import block_packer
from embedding_fr.examples import ExampleBatch
from embedding_fr.local_only import local_only
from embedding_fr.methods.fedcia import own_similarity, with_low_pass
from embedding_fr.methods.fedcia_fitted import (
    code_gradients,
    eigenpairs,
    fitted_tables,
    with_decay,
)
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


def tables(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_of(state):
    return whole(state.server)


def whole(mean):
    return mean["axes"] @ torch.diag(mean["value"].sign()) @ mean["axes"].T


def fit(table_CID, similarity_II, steps, rate=0.1, loss="square"):
    mean = eigenpairs(similarity_II, len(similarity_II))
    return fitted_tables(table_CID, mean["value"], mean["axes"], steps, rate, loss)


@pytest.mark.parametrize("num_vectors", [1, 2])
def test_one_step_by_hand(num_vectors):
    # S = ones, Q = (2, 1): G = 5, Q G = (10, 5), S Q = (3, 3), Q Q^T - S = [[3, 1], [1, 0]]
    mean = eigenpairs(torch.ones(2, 2, dtype=torch.float64), num_vectors)
    torch.testing.assert_close(mean["value"][0], torch.tensor(2.0, dtype=torch.float64))
    start_CID = torch.tensor([[[2.0], [1.0]]], dtype=torch.float64)
    pull_CID = torch.tensor([[[7.0], [2.0]]], dtype=torch.float64)
    squared = fitted_tables(start_CID, mean["value"], mean["axes"], 1, 0.1)
    torch.testing.assert_close(squared, start_CID - 0.1 / 5.0 * pull_CID)
    normed = fitted_tables(start_CID, mean["value"], mean["axes"], 1, 0.1, "norm")
    torch.testing.assert_close(normed, start_CID - 0.2 / 11.0**0.5 * pull_CID)


@pytest.mark.parametrize("loss", ["square", "norm"])
@pytest.mark.parametrize("num_vectors", [9, 4])
def test_many_steps_are_those_of_autograd_on_whole_matrices(loss, num_vectors):
    start_CID, others_CID = tables(2, 9, 3), tables(5, 9, 3, seed=1)
    mean = eigenpairs((others_CID @ others_CID.mT).mean(0), num_vectors)
    similarity_II = whole(mean)
    found = fitted_tables(start_CID, mean["value"], mean["axes"], 12, 0.05, loss)
    for row in range(2):
        table_ID = start_CID[row].clone().requires_grad_()
        for _ in range(12):
            distance = torch.linalg.norm(table_ID @ table_ID.T - similarity_II)
            (gradient,) = torch.autograd.grad(distance if loss == "norm" else distance.square() / 4.0, table_ID)
            sizes = float((table_ID.T @ table_ID).detach().norm()), float(mean["value"][0])
            size = max(sizes) if loss == "square" else 1.0
            table_ID = (table_ID - 0.05 / size * gradient).detach().requires_grad_()
        torch.testing.assert_close(found[row], table_ID.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("loss", ["square", "norm"])
def test_a_table_whose_similarities_are_the_mean_stays(loss):
    table_CID = tables(1, 9, 3)
    found = fit(table_CID, table_CID[0] @ table_CID[0].T, 100, loss=loss)
    torch.testing.assert_close(found, table_CID, rtol=0, atol=1e-12)


def test_steps_along_the_square_arrive_and_those_along_the_norm_circle():
    goal_ID = tables(9, 3)
    similarity_II = goal_ID @ goal_ID.T
    near_CID = (goal_ID + 0.05 * tables(9, 3, seed=1))[None]
    left = {}
    for loss in ("square", "norm"):
        table_ID = fit(near_CID, similarity_II, 300, loss=loss)[0]
        left[loss] = float((table_ID @ table_ID.T - similarity_II).norm() / similarity_II.norm())
    assert left["square"] < 1e-3
    assert left["norm"] > 0.05  # the step of 0.1 along a gradient that does not shrink


@pytest.mark.usefixtures("double")
def test_the_server_holds_the_mean_of_the_clients_similarities():
    state, _ = run(toy_method("fedcia_fitted"), rounds=1)
    table_NID = state.local["item_table"]
    torch.testing.assert_close(mean_of(state), (table_NID @ table_NID.mT).mean(0))
    cut, _ = run(toy_method("fedcia_fitted", num_vectors=3), rounds=1)
    assert cut.server["axes"].shape == (NUM_ITEMS, 3)
    torch.testing.assert_close(cut.server["value"], state.server["value"][:3])
    torch.testing.assert_close(cut.server["axes"], state.server["axes"][:, :3])


@pytest.mark.usefixtures("double")
def test_without_steps_of_the_fit_everybody_trains_alone():
    method = toy_method("fedcia_fitted", fit_steps=0)
    together, _ = run(method)
    alone, _ = run(local_only(toy_method("fedcia_fitted"), toy_federation()))
    for key, tensor in together.local.items():
        assert torch.equal(alone.local[key], tensor), key
    fitted, _ = run(toy_method("fedcia_fitted"))
    assert not torch.allclose(fitted.local["user"], together.local["user"])


def test_the_code_s_loss_is_on_single_products():
    """One client, one dim after the other: d/dp_j of mean (p_j q_ij - y)^2 over 2 examples and 2 dims."""
    params = {"user": torch.tensor([[2.0, -1.0]]), "item_table": torch.tensor([[[1.0, 3.0], [0.5, 0.0], [7.0, 7.0]]])}
    batch = ExampleBatch(1, torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
    found, logit_AB = code_gradients(None, params, ["user", "item_table"], batch)
    # errors: item 0 (2 - 1, -3 - 1), item 1 (1 - 0, 0 - 0); each counts 2 / (2 x 2)
    torch.testing.assert_close(found["user"], 0.5 * torch.tensor([[1.0 * 1 + 1.0 * 0.5, -4.0 * 3 + 0.0]]))
    torch.testing.assert_close(
        found["item_table"], 0.5 * torch.tensor([[[1.0 * 2, -4.0 * -1], [1.0 * 2, 0.0], [0.0, 0.0]]])
    )
    assert logit_AB.tolist() == [[-1.0, 1.0]]
    decayed, _ = with_decay(code_gradients, 0.2)(None, params, ["user", "item_table"], batch)
    torch.testing.assert_close(decayed["user"] - found["user"], 0.2 * params["user"])
    added = decayed["item_table"] - found["item_table"]
    torch.testing.assert_close(added, 0.2 * params["item_table"] * torch.tensor([0.5, 0.5, 0.0])[None, :, None])
