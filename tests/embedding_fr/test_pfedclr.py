"""PFedCLR: step 1 before the upload, step 2 after it, and the variants of its ablation."""

import math

import pytest
import torch
from toy_federation import run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.averaged import averaged
from embedding_fr.blocks import make_block
from embedding_fr.examples import ExampleBatch
from embedding_fr.local_training import Objective, plain_gradients
from embedding_fr.methods.fedmf import mf_model
from embedding_fr.methods.pfedclr import (
    low_rank_logits,
)
from embedding_fr.optimisers import Optimiser

RATE = 0.05


def one_step(variant, **changes):
    """One round of one local step per stage for all seven clients: start and end of server and local state."""
    changes = {"local_epochs": 1, "batch_size": 1000, "learning_rate": RATE, **changes}
    method = toy_method("pfedclr", training=toy_training("pfedclr", **changes), variant=variant)
    server, local = method.init()
    state, _ = run(method, rounds=1)
    return server, local, state


def upload_of(client, **config):
    """Rows, uploaded table and new own tensors of one client in its first round."""
    method = toy_method("pfedclr", training=toy_training("pfedclr", local_epochs=1, batch_size=1000), **config)
    server, local = method.init()
    block = make_block(toy_population(), [client])
    own = {name: tensor[block.clients] for name, tensor in local.items()}
    upload, mine, _ = method.client_update(1, method.broadcast(1, server, block.clients), own, block)
    return upload, own, mine


def test_calibrated_logit_and_gradients_by_hand():
    params = {
        "user": torch.tensor([[1.0, 2.0]]),
        "item_table": torch.tensor([[[9.0, 9.0], [0.5, -1.0]]]),
        "buffer_a": torch.tensor([[[7.0], [2.0]]]),
        "buffer_b": torch.tensor([[[1.0, -1.0]]]),
    }
    batch = ExampleBatch(1, torch.tensor([[1]]), torch.ones(1, 1), torch.ones(1, 1))
    # q + a B = (0.5, -1) + 2 (1, -1) = (2.5, -3), so z = 2.5 - 6
    names = ("user", "buffer_a", "buffer_b")
    gradient, logit = plain_gradients(Objective(low_rank_logits, by_row=True), params, names, batch)
    r = 1.0 / (1.0 + math.exp(3.5)) - 1.0
    assert logit.item() == pytest.approx(-3.5)
    assert gradient["user"].tolist() == [[pytest.approx(2.5 * r), pytest.approx(-3.0 * r)]]
    assert gradient["buffer_a"].tolist() == [[[0.0], [pytest.approx(-1.0 * r)]]]  # B p = 1 - 2
    assert gradient["buffer_b"].tolist() == [[[pytest.approx(2.0 * r), pytest.approx(4.0 * r)]]]  # a p
    assert list(gradient) == list(names)


def test_what_is_uploaded_was_trained_before_the_personal_part():
    """Step 1 knows the user embedding and no buffer: the first upload is the same whatever step 2 does."""
    plain, own, mine = upload_of(0)
    for config in ({"variant": "cf"}, {"rank": 5}, {"buffer_learning_rate": 0.0}):
        assert torch.equal(upload_of(0, **config)[0].tensors["item_table"], plain.tensors["item_table"])
    joint, _, _ = upload_of(0, variant="af")
    assert torch.equal(joint.rows["item_table"], plain.rows["item_table"])
    assert not torch.equal(mine["user"], own["user"])
    assert plain.tensors.keys() == {"item_table"}


def test_the_first_step_of_each_part():
    """Adam's first step has the length of its rate wherever there is a gradient."""
    _, local, state = one_step("clr")
    buffer_a = state.local["buffer_a"]
    touched = buffer_a.abs().sum(2) > 0.0
    assert torch.allclose(buffer_a[touched].abs(), torch.full_like(buffer_a[touched], RATE), rtol=1e-2)
    assert 0.3 < touched.float().mean() < 1.0
    assert torch.equal(state.local["buffer_b"], local["buffer_b"])  # its gradient s p^T is 0 while A is
    assert torch.allclose((state.local["user"] - local["user"]).abs(), torch.full((7, 4), RATE), rtol=1e-2)


def test_af_has_one_gradient_for_table_and_buffer_and_cf_has_not():
    server, _, state = one_step("af", local_epochs=4)
    moved = state.local["personal_table"] - server["item_table"]
    assert torch.allclose(state.local["buffer"], moved, atol=1e-6)
    assert moved.abs().max() > RATE
    server, _, state = one_step("cf", local_epochs=4)
    moved = state.local["personal_table"] - server["item_table"]
    assert not torch.allclose(state.local["buffer"], moved, atol=RATE / 5)
    assert torch.equal(moved.abs().sum(2) > 0.0, state.local["buffer"].abs().sum(2) > 0.0)


def test_without_step_two_it_is_fedmf_with_frozen_users():
    federation, population = toy_federation(), toy_population()
    frozen = toy_training("pfedclr", learning_rate=1e-30, item_learning_rate=0.1)
    state, _ = run(toy_method("pfedclr", federation, frozen, buffer_learning_rate=0.0), population)
    model = mf_model(federation, frozen)
    table_only = Optimiser("adam", {"item_table": 0.1})
    fedmf = averaged("fedmf", model, federation, frozen, optimiser=table_only)
    expected, _ = run(fedmf, population)
    assert torch.allclose(state.server["item_table"], expected.server["item_table"], atol=1e-6)
    assert not torch.allclose(state.server["item_table"], model.shared["item_table"], atol=0.1)
    assert not state.local["buffer_a"].any()


def test_personal_variant_is_the_own_table_global_the_next_download():
    method = toy_method("pfedclr")
    assert method.variants == ("personal", "global")
    _, local = method.init()
    block = make_block(toy_population(), [6, 0])
    own = {name: torch.zeros_like(tensor[block.clients]) for name, tensor in local.items()}
    own["user"][:] = torch.tensor([1.0, 0, 0, 0])
    own["personal_table"][:, :, 0] = torch.arange(14.0)
    own["buffer_a"][0, 8, 0] = 10.0  # the validation item of client 6 is 0, its test item 8
    own["buffer_b"][0, 0, 0] = 2.0
    download = method.broadcast(1, {"item_table": torch.zeros(14, 4)}, block.clients)
    personal = [float(one) for one in method.positions("personal", download, own, block, "test")]
    shared = [float(one) for one in method.positions("global", download, own, block, "test")]
    assert personal == [0.0, 7.0]  # client 0: item 2, above it the eleven of 3 .. 13 but 3, 4, 5 (train) and 9 (valid)
    assert shared[0] == 0.0  # 20 against zeros
    assert shared[1] == 3.5  # eight unseen items tied at zero: the middle of the places 0 .. 7
