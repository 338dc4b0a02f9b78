"""Stacked networks and optimisers, and gradients: by hand, against ``torch``, by rows and by examples."""

import pytest
import torch
from toy_federation import toy_federation

from embedding_fr.examples import ExampleBatch
from embedding_fr.local_training import Objective, dot_logits, plain_gradients
from embedding_fr.methods import fedfast, pfedclr, pfedrec
from embedding_fr.mlp import mlp, mlp_of_catalogue, start_mlp
from embedding_fr.optimisers import Optimiser, apply_step, fresh_state


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_steps_equal_torch_optim_for_clients_with_unequal_numbers_of_steps(kind, decay):
    generator = torch.Generator().manual_seed(5)
    start = {"a": torch.randn(4, 3, 2, generator=generator), "b": torch.randn(4, 5, generator=generator)}
    params = {name: tensor.clone() for name, tensor in start.items()}
    optimiser = Optimiser(kind, {"a": 0.1, "b": 0.02}, decay)
    state = fresh_state(optimiser, params)
    plain = []
    for client in range(4):
        own = {name: tensor[client].clone().requires_grad_() for name, tensor in start.items()}
        groups = [{"params": [own["a"]], "lr": 0.1}, {"params": [own["b"]], "lr": 0.02}]
        chosen = torch.optim.Adam if kind == "adam" else torch.optim.SGD
        plain.append((own, chosen(groups, lr=1.0, weight_decay=decay)))
    for active in (4, 3, 4, 1, 2):  # a prefix takes each step
        gradients = {name: torch.randn(active, *t.shape[1:], generator=generator) for name, t in params.items()}
        apply_step(optimiser, params, gradients, state)
        for client in range(active):
            own, one = plain[client]
            for name in own:
                own[name].grad = gradients[name][client].clone()
            one.step()
    for client, (own, _) in enumerate(plain):
        for name, tensor in own.items():
            assert torch.allclose(params[name][client], tensor, atol=1e-6), (client, name)


def test_untouched_rows_of_a_fresh_table_stay():
    params = {"item_table": torch.ones(2, 4, 3)}
    optimiser = Optimiser("adam", {"item_table": 0.1})
    state = fresh_state(optimiser, params)
    gradient = torch.zeros(2, 4, 3)
    gradient[0, 1] = 2.0
    apply_step(optimiser, params, {"item_table": gradient}, state)
    apply_step(optimiser, params, {"item_table": torch.zeros(2, 4, 3)}, state)
    assert torch.equal(params["item_table"][1], torch.ones(4, 3))
    assert torch.equal(params["item_table"][0, [0, 2, 3]], torch.ones(3, 3))
    # Adam's first step is the rate times the sign; the second still moves by the moments
    assert params["item_table"][0, 1, 0] < 0.9


def toy():
    generator = torch.Generator().manual_seed(1)
    params = {
        "user": torch.randn(3, 2, generator=generator),
        "item_table": torch.randn(3, 4, 2, generator=generator),
    }
    item = torch.tensor([[0, 2, 2], [3, 1, 0]])
    label, weight = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]), torch.tensor([[1 / 3] * 3, [0.5, 0.5, 0.0]])
    return params, ExampleBatch(2, item, label, weight)


def test_gradients_by_hand():
    params = {"user": torch.tensor([[1.0, -2.0]]), "item_table": torch.tensor([[[0.5, 0.25], [3.0, 1.0]]])}
    batch = ExampleBatch(1, torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
    # logits 0 and 1: residuals (0.5 - 1) / 2 = -0.25 and sigmoid(1) / 2 = 0.365529
    gradients, logit = plain_gradients(Objective(dot_logits), params, ["user", "item_table"], batch)
    assert logit.tolist() == [[0.0, 1.0]]
    assert gradients["user"][0].tolist() == pytest.approx([-0.125 + 3 * 0.365529, -0.0625 + 0.365529], abs=1e-5)
    assert gradients["item_table"][0, 0].tolist() == pytest.approx([-0.25, 0.5], abs=1e-6)
    assert gradients["item_table"][0, 1].tolist() == pytest.approx([0.365529, -0.731059], abs=1e-5)


def test_penalty_enters_the_gradient_of_each_client():
    params, batch = toy()
    objective = Objective(dot_logits, lambda seen: 3.0 * seen["user"].square().sum(1))
    with_penalty, _ = plain_gradients(objective, params, ["user"], batch)
    without, _ = plain_gradients(Objective(dot_logits), params, ["user"], batch)
    assert torch.allclose(with_penalty["user"] - without["user"], 6.0 * params["user"][:2], atol=1e-5)


USER, TABLE = {"user": (3, 4)}, {"item_table": (3, 6, 4)}


LINEAR = {"scorer.0.weight": (3, 4, 1), "scorer.0.bias": (3, 1)}


BUFFER = {"buffer_a": (3, 6, 2), "buffer_b": (3, 2, 4)}


CASES = {
    "inner products": (dot_logits, {**USER, **TABLE}, ()),
    "linear": (pfedrec.linear_logits, {**TABLE, **LINEAR}, ()),
    "weighted products": (fedfast.gmf_logits, {**USER, **TABLE, **LINEAR}, ()),
    "low rank": (pfedclr.low_rank_logits, {**USER, **BUFFER}, TABLE),
    "full rank": (pfedclr.full_logits, {**USER, **TABLE, "buffer": (3, 6, 4)}, ()),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("logits", "trained", "frozen"), CASES.values(), ids=CASES)
def test_scoring_every_row_once_has_the_gradients_of_scoring_examples(logits, trained, frozen):
    generator = torch.Generator().manual_seed(3)
    params = {name: torch.randn(shape, generator=generator) for name, shape in {**trained, **dict(frozen)}.items()}
    item = torch.tensor([[0, 2, 2, 5], [1, 4, 4, 0]])  # two active clients of three, items twice, one example padded
    weight = torch.tensor([[0.25] * 4, [0.5, 0.25, 0.25, 0.0]])
    batch = ExampleBatch(2, item, torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]]), weight)
    expected, logit = plain_gradients(Objective(logits), params, list(trained), batch)
    gradients, same = plain_gradients(Objective(logits, by_row=True), params, list(trained), batch)
    torch.testing.assert_close(same, logit)
    assert gradients.keys() == expected.keys()
    for name in trained:
        torch.testing.assert_close(gradients[name], expected[name])
        assert gradients[name].abs().max() > 0.0


def test_forward_by_hand():
    """Two clients with networks 2 -> 2 -> 1; every hidden unit is cut off by ReLU for one of the rows."""
    params = {
        "f.0.weight": torch.tensor([[[1.0, -1.0], [2.0, 0.5]], [[0.0, 1.0], [1.0, 0.0]]]),
        "f.0.bias": torch.tensor([[0.5, 0.0], [-1.0, 0.0]]),
        "f.1.weight": torch.tensor([[[1.0], [10.0]], [[2.0], [-3.0]]]),
        "f.1.bias": torch.tensor([[-0.25], [1.0]]),
    }
    row_CBF = torch.tensor([[[1.0, 1.0], [-3.0, 1.0]], [[2.0, 4.0], [-1.0, 0.5]]])
    # client 0: (1 + 2 + .5, -1 + .5) -> (3.5, 0) -> 3.25; (-3 + 2 + .5, 3 + .5) -> (0, 3.5) -> 34.75
    # client 1: (4 - 1, 2) -> (3, 2) -> 6 - 6 + 1; (.5 - 1, -1) -> (0, 0) -> 1
    expected = torch.tensor([[[3.25], [34.75]], [[1.0], [1.0]]])
    assert torch.allclose(mlp(params, "f", row_CBF), expected)


@pytest.mark.parametrize("sizes", [(5, 1), (5, 4, 1), (5, 6, 3, 2)])
def test_a_shared_network_on_shared_rows_equals_the_stacked_one_and_each_client_alone(sizes):
    params = start_mlp(toy_federation(), "f", sizes)
    row_IF, client_CK = torch.randn(9, 3), torch.randn(4, 2)
    stacked = {name: tensor.expand(4, *tensor.shape) for name, tensor in params.items()}
    found = mlp_of_catalogue(params, "f", row_IF, client_CK)
    assert torch.allclose(found, mlp(stacked, "f", row_IF.expand(4, 9, 3), client_CK).mT, atol=1e-6)
    assert torch.allclose(found[2:3], mlp_of_catalogue(params, "f", row_IF, client_CK[2:3]), atol=1e-6)
