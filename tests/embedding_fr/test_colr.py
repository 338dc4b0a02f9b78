"""CoLR: its random basis, one step by hand, FedMF at full rank, ranks, means, bytes, federation off."""

import pytest
import torch
from toy_federation import NUM_ITEMS, run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.blocks import make_block
from embedding_fr.examples import ExampleBatch
from embedding_fr.local_only import KEPT, local_only
from embedding_fr.local_training import Objective, dot_logits
from embedding_fr.methods.colr import low_rank_gradients, mark_bytes, random_basis
from embedding_fr.testing.loop import Reference, bce, parameters, run_reference
from fedecider.federation.channel import Channel
from fedecider.federation.secure_rounds import WEIGHT, SecureSums, securely_summed_rounds


def trained(rounds=3, participation=1.0, training=None, **config):
    method = toy_method("colr", training=training, **config)
    return run(method, rounds=rounds, participation=participation)[0]


def test_rows_of_the_basis_are_orthogonal_and_drawn_anew_for_each_round():
    for rank, size in ((1, 4), (3, 8), (8, 8)):
        basis_KD = random_basis(5, 2, rank, size)
        torch.testing.assert_close(basis_KD @ basis_KD.T, size / rank * torch.eye(rank))
        assert torch.equal(basis_KD, random_basis(5, 2, rank, size))
        for other in (random_basis(5, 3, rank, size), random_basis(6, 2, rank, size)):
            assert not torch.allclose(basis_KD, other)


def test_one_step_by_hand():
    # B = sqrt(2) (0.6, 0.8); the gradient by the row is g = r p, r = sigmoid(0) - 1 = -0.5
    basis_KD = 2**0.5 * torch.tensor([[0.6, 0.8]])
    params = {
        "user": torch.tensor([[-2.0, 0.0]]),
        "item_table": torch.tensor([[[0.0, 3.0], [0.0, -1.0], [7.0, 7.0]]]),
        "factor": torch.zeros(1, 3, 1),
    }
    batch = ExampleBatch(1, torch.tensor([[0, 0, 1]]), torch.tensor([[1.0, 1.0, 1.0]]), torch.full((1, 3), 1 / 3))
    gradient, logit = low_rank_gradients(basis_KD, 0.0)(Objective(dot_logits), params, ("user", "factor"), batch)
    assert logit.tolist() == [[0.0, 0.0, 0.0]]
    # g = (1, 0) for both rows, however often the batch has them; the step of a row is -(D / K)^1/2 x its projection
    moved = -(gradient["factor"][0] @ basis_KD)
    torch.testing.assert_close(moved[:2], torch.tensor([[-0.50912, -0.67882]]).expand(2, 2), atol=1e-5, rtol=0)
    assert moved[2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(gradient["user"], torch.tensor([[0.0, -0.5 * (3 + 3 - 1) / 3]]))
    decayed, _ = low_rank_gradients(basis_KD, 0.1)(Objective(dot_logits), params, ("user", "factor"), batch)
    torch.testing.assert_close(decayed["user"] - gradient["user"], 0.1 * params["user"])
    change = (decayed["factor"] - gradient["factor"])[0, :, 0]
    torch.testing.assert_close(change, torch.tensor([0.1 * 3 * 0.8, -0.1 * 0.8, 0.0]))  # the last has no example


def test_on_average_a_step_is_that_of_fedmf_times_the_root_of_rank_over_size():
    moved = torch.zeros(8)
    for round in range(2000):
        basis_KD = random_basis(0, round, 2, 8)
        moved += 0.5 * basis_KD.T @ basis_KD[:, 0]  # shrink B^T B e_1, shrink = (2 / 8)^1/2
    moved /= 2000
    assert moved[0].item() == pytest.approx(0.5, abs=0.03)
    assert moved[1:].abs().max() < 0.05


def fedmf_with_sgd(federation, training):
    """FedMF, every row at the mean gradient of its examples, and a mean over those who touched the row."""

    def client(user, received, own):
        theta = parameters({**received, **own})
        touched_I = torch.zeros(federation.num_items)
        for epoch in range(training.local_epochs):
            for item_B, label_B in user.batches(epoch):
                loss = bce(theta["item_table"][item_B] @ theta["user"], label_B)
                table_ID, user_D = torch.autograd.grad(loss, (theta["item_table"], theta["user"]))
                share_I = torch.bincount(item_B, minlength=federation.num_items).clamp(min=1) / len(item_B)
                with torch.no_grad():
                    theta["item_table"] -= training.item_rate * table_ID / share_I[:, None]
                    theta["user"] -= training.learning_rate * user_D
                touched_I[item_B] = 1.0
        change = theta["item_table"].detach() - received["item_table"]
        return {"change": change, "touched": touched_I}, {"user": theta["user"]}

    def server(round, server, clients, uploads, weights):
        touched_I = sum(upload["touched"] for upload in uploads).clamp(min=1.0)
        return {"item_table": server["item_table"] + sum(one["change"] for one in uploads) / touched_I[:, None]}

    return Reference(client, server)


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.usefixtures("double")
def test_at_full_rank_it_is_fedmf_with_sgd(participation):
    federation, training = toy_federation(), toy_training("colr", weight_decay=0.0, local_epochs=3)
    loop = fedmf_with_sgd(federation, training)
    method = toy_method("colr", federation, training, rank=4)
    server, local = run_reference(method, loop, federation, training, toy_population(), 4, participation)
    state, _ = run(method, rounds=4, participation=participation)
    torch.testing.assert_close(state.server["item_table"], server["item_table"], rtol=0, atol=1e-10)
    torch.testing.assert_close(state.local["user"], local["user"], rtol=0, atol=1e-10)
    low = trained(4, participation, training, rank=2)
    assert not torch.allclose(low.server["item_table"], server["item_table"], atol=1e-3)


@pytest.mark.usefixtures("double")
def test_a_mean_over_touchers_and_one_over_clients():
    method, state = toy_method("colr", rank=2), trained(1, rank=2)
    start, local = method.init()
    factor_IK, touched_I = torch.zeros(NUM_ITEMS, 2), torch.zeros(NUM_ITEMS)
    for client in range(7):
        block = make_block(toy_population(), [client])
        upload, _, _ = method.client_update(
            1, method.broadcast(1, start, block.clients), {"user": local["user"][[client]]}, block
        )
        factor_IK[upload.rows["factor"][0]] += upload.tensors["factor"][0]
        touched_I[upload.rows["touched"][0]] += upload.tensors["touched"][0]
    basis_KD = random_basis(0, 1, 2, 4)
    assert 1 < touched_I.max() <= 7
    expected = start["item_table"] + factor_IK / touched_I.clamp(min=1)[:, None] @ basis_KD
    torch.testing.assert_close(state.server["item_table"], expected)
    expected = start["item_table"] + factor_IK / 7 @ basis_KD
    torch.testing.assert_close(trained(1, rank=2, mean="clients").server["item_table"], expected)
    alone = trained(1, participation=0.15, rank=2)  # one client: rows that it does not touch stay
    moved_I = (alone.server["item_table"] != start["item_table"]).any(1)
    assert 0 < moved_I.sum() < NUM_ITEMS


def test_bytes_are_those_of_what_travels():
    training = toy_training("colr", embedding_size=8)
    for rank in (1, 2, 8):
        _, records = run(toy_method("colr", training=training, rank=rank), rounds=1)
        (group,) = records[0]["traffic"]
        assert group["up"] == {"factor": 4 * NUM_ITEMS * rank, "touched": mark_bytes(NUM_ITEMS)}
        assert group["down"] == {"item_table": 4 * NUM_ITEMS * 8}
    assert [mark_bytes(count) for count in (1, 8, 9, 1682)] == [1, 1, 2, 211]
    _, records = run(toy_method("colr", training=training, rank=2, mean="clients"), rounds=1)
    assert records[0]["traffic"][0]["up"] == {"factor": 4 * NUM_ITEMS * 2}
    method = toy_method("colr", training=training, rank=2)
    aggregation = securely_summed_rounds(method, SecureSums(5, 0.6, num_neighbours=4))
    _, records = run(method, rounds=1, channel=Channel(aggregation=aggregation))
    up = records[0]["traffic"][0]["up"]  # masked numbers have 8 bytes, marks too
    assert (up["factor"], up["touched"], up[WEIGHT]) == (8 * NUM_ITEMS * 2, 8 * NUM_ITEMS, 8)


@pytest.mark.usefixtures("double")
def test_with_federation_off_corrections_add_up_at_each_client():
    method = toy_method("colr", rank=2)
    start = method.init()[0]["item_table"]
    state, _ = run(local_only(method, toy_federation()), rounds=3)
    kept = state.local[KEPT + "item_table"]
    assert torch.equal(state.server["item_table"], start)
    ranks = [int(torch.linalg.matrix_rank(one - start, atol=1e-9)) for one in kept]
    assert max(ranks) == 4  # three corrections of rank 2 fill the four dims; one alone has rank 2
    assert (kept[1] == start).all(1).any()  # a row that client 1 never drew
    assert not torch.equal(kept[0], kept[1])
