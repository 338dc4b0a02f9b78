"""FedRecGEL: as in the paper, and as in its public code."""

import pytest
import torch
from toy_federation import run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.blocks import make_block
from embedding_fr.examples import RoundExamples, draw_examples
from embedding_fr.local_training import Objective
from embedding_fr.methods.fedrecgel import neumf_logits, neumf_model, whole_batch

SERVER_RATE = 0.5


def close(left, right, tolerance):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=tolerance, atol=tolerance)


def code(**changes):
    return toy_method("fedrecgel", variant="code", server_learning_rate=SERVER_RATE, **changes)


def test_radius_zero_is_fedncf_bit_for_bit():
    federation, training = toy_federation(), toy_training("fedrecgel")
    plain, _ = run(toy_method("fedncf", federation, training, hidden_sizes="6,3"))
    off = {"private_radius": 0.0, "shared_radius": 0.0}
    sharp, _ = run(toy_method("fedrecgel", federation, training, hidden_sizes="6,3", **off))
    for left, right in ((plain.server, sharp.server), (plain.local, sharp.local)):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_each_radius_acts_on_its_own_side():
    """After one step of one client, a perturbed side changes that side only."""
    training = toy_training("fedrecgel", local_epochs=1, batch_size=1000)
    states = {}
    for private in (0.0, 0.4):
        for shared in (0.0, 0.4):
            method = toy_method(
                "fedrecgel", training=training, variant="code", private_radius=private, shared_radius=shared
            )
            server, local = method.init()
            block = make_block(toy_population(), [2])
            own = {name: tensor[block.clients] for name, tensor in local.items()}
            upload, mine, _ = method.client_update(1, method.broadcast(1, server, block.clients), own, block)
            states[private, shared] = upload.tensors, mine
    for private, shared in states:
        gradients, mine = states[private, shared]
        for name, gradient in gradients.items():
            assert torch.equal(gradient, states[0.0, shared][0][name])
        assert torch.equal(mine["user.mean"], states[private, 0.0][1]["user.mean"])
    assert not torch.equal(states[0.4, 0.4][1]["user.mean"], states[0.0, 0.0][1]["user.mean"])
    name = "item_table_mlp.gradient"
    assert not torch.equal(states[0.4, 0.4][0][name], states[0.0, 0.0][0][name])


def test_neumf_by_hand():
    federation, training = toy_federation(), toy_training("fedrecgel", embedding_size=1)
    model = neumf_model(federation, training)
    assert {name: tuple(tensor.shape) for name, tensor in model.shared.items()} == {
        "item_table": (14, 1),
        "item_table_mlp": (14, 4),
        "tower.0.weight": (8, 4),
        "tower.0.bias": (4,),
        "tower.1.weight": (4, 2),
        "tower.1.bias": (2,),
        "tower.2.weight": (2, 1),
        "tower.2.bias": (1,),
        "output.0.weight": (2, 1),
        "output.0.bias": (1,),
    }
    params = {name: torch.ones(1, *tensor.shape) for name, tensor in model.shared.items()}
    params |= {"user": torch.tensor([[3.0]]), "user_mlp": torch.tensor([[1.0, 0.0, -1.0, 0.5]])}
    params["item_table"][:] = -2.0
    params["tower.1.bias"][0, 1] = -100.0  # one dead unit
    # tower: 4 + 0.5 + 1 = 5.5 in each of 4 units; 4 * 5.5 + 1 = 23 and relu(22 - 100); 23 + 1; output 24 - 6 + 1
    assert neumf_logits(params, torch.tensor([[0]])).tolist() == [[19.0]]
    params["tower.2.bias"][:] = -30.0
    assert neumf_logits(params, torch.tensor([[0]])).tolist() == [[-5.0]]  # the tower's own output is cut at 0


def test_clients_upload_gradients_by_rows_and_the_server_takes_the_step():
    method = code(private_radius=0.0, shared_radius=0.0)
    server, local = method.init()
    block = make_block(toy_population(), [3, 1])  # 2 and 1 train items
    own = {name: tensor[block.clients] for name, tensor in local.items()}
    download = method.broadcast(1, server, block.clients)
    assert not [name for name in download.shared if name.endswith((".mean", ".square", ".steps"))]
    upload, mine, logs = method.client_update(1, download, own, block)
    assert upload.tensors["item_table.gradient"].shape[1] == upload.rows["item_table.gradient"].shape[1] < 14
    assert [set(log) for log in logs] == [{"loss"}, {"loss"}]
    assert mine["user.steps"].tolist() == [1.0, 1.0]
    new = method.server_aggregate(1, server, iter([upload]))
    touched = torch.zeros(14, dtype=torch.bool)
    touched[upload.rows["item_table.gradient"][upload.rows["item_table.gradient"] >= 0]] = True
    moved = (new["item_table"] - server["item_table"]).abs()
    assert torch.allclose(moved[touched], torch.full_like(moved[touched], SERVER_RATE), rtol=1e-2)
    assert not moved[~touched].any()
    assert bool((~touched).any())
    mean = upload.tensors["output.0.weight.gradient"].mean(0)  # client weights play no part
    assert torch.equal((new["output.0.weight"] < server["output.0.weight"]), mean > 0.0)
    # without any gradient the server moves on along its moments
    nothing = upload._replace(tensors={name: torch.zeros_like(tensor) for name, tensor in upload.tensors.items()})
    later = method.server_aggregate(2, new, iter([nothing]))
    assert bool((later["item_table"] != new["item_table"])[touched].all())
    assert new["item_table.steps"].tolist() == [1.0]


def test_the_gradient_is_that_of_the_sum_of_batch_means():
    federation, training = toy_federation(), toy_training("fedrecgel", batch_size=5)
    model = neumf_model(federation, training)
    method = toy_method("fedrecgel", federation, training, variant="code", private_radius=0.0, shared_radius=0.0)
    server, local = method.init()
    block = make_block(toy_population(), [2])
    own = {name: tensor[block.clients] for name, tensor in local.items()}
    upload, _, logs = method.client_update(1, method.broadcast(1, server, block.clients), own, block)
    examples = draw_examples(block.data, block.clients, 14, training.num_negatives, 0, 1)
    batch = whole_batch(RoundExamples(examples, torch.arange(14)[None], examples.item_CB), 5)
    params = {name: tensor[None].clone().requires_grad_() for name, tensor in model.shared.items()}
    params |= {name: tensor[block.clients] for name, tensor in model.private.items()}
    logit = Objective(model.logits).logits(params, batch.item_AB)[0]
    label = batch.label_AB[0]
    error = torch.nn.functional.binary_cross_entropy_with_logits(logit, label, reduction="none")
    parts = [error[start : start + 5].mean() for start in range(0, len(error), 5)]
    assert len(error) == 21  # seven positives: four full batches and one of a single example
    torch.stack(parts).sum().backward()
    rows = upload.rows["item_table.gradient"][0]
    assert torch.allclose(upload.tensors["item_table.gradient"][0], params["item_table"].grad[0, rows], atol=1e-6)
    assert torch.allclose(upload.tensors["tower.1.bias.gradient"], params["tower.1.bias"].grad, atol=1e-6)
    assert logs[0]["loss"] == pytest.approx(torch.stack(parts).mean().item(), rel=1e-5)
