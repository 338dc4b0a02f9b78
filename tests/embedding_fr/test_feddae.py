"""FedDAE: its loss by torch's own distributions, what noise does, what it keeps from whom."""

import pytest
import torch
from torch.nn.functional import softmax

from embedding_fr.methods.feddae import draw_noise, logits_of, loss_of

pytestmark = pytest.mark.usefixtures("double")


def random_params(num_clients=2, num_rows=3, size=2, num_items=5):
    """One layer each; clients with three and two of five items."""
    shapes = {
        "encoder.0.weight": (num_rows, 2 * size),
        "encoder.0.bias": (2 * size,),
        "own_encoder.0.weight": (num_rows, 2 * size),
        "own_encoder.0.bias": (2 * size,),
        "gate.0.weight": (num_rows, size),
        "gate.0.bias": (size,),
        "gate.1.weight": (size, 2),
        "gate.1.bias": (2,),
        "decoder.0.weight": (size, num_items),
        "decoder.0.bias": (num_items,),
    }
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(num_clients, *shape, generator=generator) for name, shape in shapes.items()}


ITEMS, REAL, NUM = (
    torch.tensor([[4, 0, 2], [1, 3, 5]]),
    torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(),
    torch.tensor([3, 2]),
)


def test_a_gate_that_takes_one_encoder_leaves_the_other_out():
    params = random_params()
    for side, name, other in ((1e3, "encoder", "own_encoder"), (-1e3, "own_encoder", "encoder")):
        params["gate.1.bias"] = torch.tensor([side, 0.0]).expand(2, 2)
        logits, mean, variance = logits_of(params, REAL, NUM)
        hidden = (params[f"{name}.0.weight"] * REAL[:, :, None]).sum(1) / NUM.sqrt()[:, None] + params[f"{name}.0.bias"]
        assert torch.allclose(mean, hidden[:, :2])
        assert torch.allclose(variance, hidden[:, 2:].exp())
        assert torch.allclose(logits, (mean[:, None] @ params["decoder.0.weight"])[:, 0] + params["decoder.0.bias"])
        changed = {**params, f"{other}.0.weight": params[f"{other}.0.weight"] + 5.0}
        assert torch.allclose(logits_of(changed, REAL, NUM)[0], logits)


def test_the_loss_is_the_likelihood_of_a_client_s_items_and_the_divergence():
    params = random_params()
    logits, mean, variance = logits_of(params, REAL, NUM)
    for client, items in enumerate(([4, 0, 2], [1, 3])):
        likelihood = softmax(logits[client], 0)[items].log().sum()
        here = torch.distributions.Normal(mean[client], variance[client].sqrt())
        apart = torch.distributions.kl_divergence(here, torch.distributions.Normal(0.0, 1.0)).sum()
        for beta in (0.0, 0.7):
            assert float(loss_of(params, ITEMS, REAL, NUM, None, beta)[client]) == pytest.approx(
                float(beta * apart - likelihood)
            )


def test_draws_are_a_client_s_own_and_have_the_moments_they_should():
    some = draw_noise(1, 2, 0, torch.arange(500), 40, 8, 0.25)
    alone = draw_noise(1, 2, 0, torch.tensor([7]), 10, 8, 0.25)
    for one, all_ in zip(alone, some, strict=True):
        assert torch.equal(one[0], all_[7, : one.shape[1]])
    for mask in some[:3]:
        assert set(mask.unique().tolist()) == {0.0, 1 / 0.75}
        assert float((mask == 0).double().mean()) == pytest.approx(0.25, abs=0.03)
    for normal in some[3:]:
        assert float(normal.mean()) == pytest.approx(0.0, abs=0.05)
        assert float(normal.var()) == pytest.approx(1.0, abs=0.08)
    assert not torch.equal(some.shared_CD, some.own_CD)
    assert not torch.equal(some.shared_CD, draw_noise(1, 2, 1, torch.arange(500), 40, 8, 0.25).shared_CD)
    assert bool((draw_noise(1, 2, 0, torch.arange(9), 4, 2, 0.0).own_CT == 1.0).all())
