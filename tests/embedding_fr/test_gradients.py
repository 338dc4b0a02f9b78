"""Gradients in closed form are those of autograd through the logits, of every client and every tensor."""

import pytest
import torch

from embedding_fr.examples import ExampleBatch
from embedding_fr.local_training import Objective, dot_gradients, dot_logits, plain_gradients
from embedding_fr.methods import fedfast, fedncf, pfedclr, pfedrec

USER, TABLE = {"user": (3, 4)}, {"item_table": (3, 6, 4)}
LINEAR = {"scorer.0.weight": (3, 4, 1), "scorer.0.bias": (3, 1)}
NETWORK = {"scorer.0.weight": (3, 8, 5), "scorer.0.bias": (3, 5), "scorer.1.weight": (3, 5, 1), "scorer.1.bias": (3, 1)}
BUFFER = {"buffer_a": (3, 6, 2), "buffer_b": (3, 2, 4)}
CASES = {
    "inner products": (dot_logits, dot_gradients, {**USER, **TABLE}, ()),
    "linear": (pfedrec.linear_logits, pfedrec.linear_gradients, {**TABLE, **LINEAR}, ()),
    "network": (fedncf.ncf_logits, fedncf.ncf_gradients, {**USER, **TABLE, **NETWORK}, ()),
    "weighted products": (fedfast.gmf_logits, fedfast.gmf_gradients, {**USER, **TABLE, **LINEAR}, ()),
    "low rank": (pfedclr.low_rank_logits, pfedclr.low_rank_gradients, {**USER, **BUFFER}, TABLE),
    "full rank": (pfedclr.full_logits, pfedclr.full_gradients, {**USER, **TABLE, "buffer": (3, 6, 4)}, ()),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("logits", "closed", "trained", "frozen"), CASES.values(), ids=CASES)
def test_closed_forms_are_the_gradients_of_the_logits(logits, closed, trained, frozen):
    generator = torch.Generator().manual_seed(3)
    params = {name: torch.randn(shape, generator=generator) for name, shape in {**trained, **dict(frozen)}.items()}
    item = torch.tensor([[0, 2, 2, 5], [1, 4, 4, 0]])  # two active clients of three, items twice, one example padded
    weight = torch.tensor([[0.25] * 4, [0.5, 0.25, 0.25, 0.0]])
    batch = ExampleBatch(2, item, torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]]), weight)
    expected, logit = plain_gradients(Objective(logits), params, list(trained), batch)
    gradients, same = closed(Objective(logits), params, list(trained), batch)
    torch.testing.assert_close(same, logit)
    assert gradients.keys() == expected.keys()
    for name in trained:
        torch.testing.assert_close(gradients[name], expected[name])
        assert gradients[name].abs().max() > 0.0
