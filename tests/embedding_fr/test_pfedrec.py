"""PFedRec: one step by hand, the two kinds of tables, uniform averaging."""

import math

import pytest
import torch
from toy_federation import own_after, run, toy_federation, toy_method, toy_population, toy_training

from embedding_fr.blocks import make_block, rank_users
from embedding_fr.methods.pfedrec import linear_logits
from fedecider.federation.method import Download
from fedecider.federation.wire import dense

POSITIVE, NEGATIVE = (1.0, -2.0), (0.5, 1.0)


def one_client(variant, **changes):
    """A client with one train item, 0, among 4; the three items that may be negatives have the same embedding."""
    federation = toy_federation(num_clients=1, num_items=4)
    small = {"embedding_size": 2, "local_epochs": 1, "num_negatives": 1, **changes}
    method = toy_method("pfedrec", federation, toy_training("pfedrec", **small), variant=variant)
    block = make_block(toy_population(sequences=[[0, 1, 2]], num_items=4), [0])
    own = {
        "scorer.0.weight": torch.tensor([[[0.3], [-0.1]]]),
        "scorer.0.bias": torch.tensor([[0.2]]),
        "personal_table": torch.zeros(1, 4, 2),
    }
    download = Download({"item_table": torch.tensor([POSITIVE, NEGATIVE, NEGATIVE, NEGATIVE])})
    return method, download, own, block


def test_one_step_of_the_public_code_by_hand():
    """Logits 0.7 and 0.25. The score function moves first, by 0.1 times its gradient; the table then moves by
    0.1 x 4 items x 80 = 32 times the gradient at the new score function."""
    method, download, own, block = one_client("code")
    upload, new, logs = method.client_update(1, download, own, block)
    new = own_after(own, new)
    error_p, error_n = -0.3318122278, 0.5621765009  # sigmoid(0.7) - 1, sigmoid(0.25)
    weight = (0.3 - 0.1 * (error_p * 1.0 + error_n * 0.5) / 2, -0.1 - 0.1 * (error_p * -2.0 + error_n * 1.0) / 2)
    bias = 0.2 - 0.1 * (error_p + error_n) / 2
    assert new["scorer.0.weight"][0, :, 0].tolist() == pytest.approx(weight, abs=1e-6)
    assert weight == pytest.approx((0.3025362, -0.1612900), abs=1e-6)
    assert new["scorer.0.bias"][0].tolist() == pytest.approx([bias], abs=1e-6)
    assert bias == pytest.approx(0.1884818, abs=1e-6)
    sigmoid = lambda z: 1.0 / (1.0 + math.exp(-z))  # noqa: E731
    step_p = -16.0 * (sigmoid(weight[0] * 1.0 - weight[1] * 2.0 + bias) - 1.0)
    step_n = -16.0 * sigmoid(weight[0] * 0.5 + weight[1] * 1.0 + bias)
    table = new["personal_table"][0]
    assert table[0].tolist() == pytest.approx([1.0 + step_p * weight[0], -2.0 + step_p * weight[1]], abs=1e-5)
    moved = (table[1:] != torch.tensor(NEGATIVE)).any(1)
    assert int(moved.sum()) == 1
    drawn = table[1:][moved][0].tolist()
    assert drawn == pytest.approx([0.5 + step_n * weight[0], 1.0 + step_n * weight[1]], abs=1e-5)
    assert (table[1:][~moved] == torch.tensor(NEGATIVE)).all()
    assert torch.equal(dense(upload, download).tensors["item_table"], new["personal_table"])
    assert logs[0]["loss"] == pytest.approx((math.log1p(math.exp(-0.7)) + math.log1p(math.exp(0.25))) / 2, abs=1e-6)


def test_one_step_of_adam_has_the_size_of_the_rate():
    """Gradients (-0.025, 0.613); the positive row moves along the signs of (0.4, -0.2), the negative against them."""
    method, download, own, block = one_client("paper", learning_rate=0.1, item_learning_rate=0.01)
    _, new, _ = method.client_update(1, download, own, block)
    new = own_after(own, new)
    assert new["scorer.0.weight"][0, :, 0].tolist() == pytest.approx([0.4, -0.2], abs=1e-5)
    assert new["scorer.0.bias"][0].tolist() == pytest.approx([0.1], abs=1e-5)
    assert new["personal_table"][0, 0].tolist() == pytest.approx([1.01, -2.01], abs=1e-5)
    drawn = new["personal_table"][0, 1:].sum(0) - 2 * torch.tensor(NEGATIVE)
    assert drawn.tolist() == pytest.approx([0.49, 1.01], abs=1e-5)


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_clients_count_alike_and_keep_the_table_from_before_the_mean(variant):
    state, records = run(toy_method("pfedrec", variant=variant), rounds=2)
    personal = state.local["personal_table"]
    assert torch.allclose(state.server["item_table"], personal.double().mean(0).float(), atol=1e-5)
    assert not torch.allclose(personal[0], personal[1], atol=1e-3)
    (group,) = records[0]["traffic"]
    assert set(group["up"]) == set(group["down"]) == {"item_table"}


def test_variants_use_the_own_and_the_next_table():
    method, population, federation = toy_method("pfedrec"), toy_population(), toy_federation()
    assert method.variants == ("personal", "global")
    state, _ = run(method, population)
    block = make_block(population, [6, 2, 0])
    own = {name: tensor[block.clients] for name, tensor in state.local.items()}
    download = method.broadcast(4, state.server, block.clients)
    tables = {"personal": own["personal_table"], "global": state.server["item_table"].expand(3, -1, -1)}
    found = {variant: torch.cat(method.positions(variant, download, own, block, "test")) for variant in tables}
    for variant, table in tables.items():
        score_CI = linear_logits({**own, "item_table": table}, None)
        expected = torch.cat(rank_users(score_CI, block.data, "test", federation.protocol))
        assert torch.equal(found[variant], expected), variant
    assert not torch.equal(found["personal"], found["global"])
