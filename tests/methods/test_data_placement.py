"""What processes that share a client compute of a batch, added up by hand."""

import pytest
import torch
from toy_recommender import on, toy_recommender

from fedecider.federation.processes import Processes
from fedecider.methods.local_training import _gradients
from fedecider.models.adapters import named_factors
from idgen.losses import sequence_loss


class Told(Processes):
    """One of several processes; what it would add is kept."""

    def add_up(self, value):
        object.__setattr__(self, "given", value.clone())


@pytest.mark.parametrize(("num_rows", "count"), [(4, 2), (3, 2), (1, 2), (4, 3), (1, 3)])
def test_gradients_of_all_shares_add_up_to_those_of_the_batch(num_rows, count):
    recommender = toy_recommender()
    recommender.base.model.eval()
    trained = list(named_factors(recommender.base.model).values())
    torch.manual_seed(0)
    with torch.no_grad():
        for factor in trained:
            factor.add_(0.1 * torch.randn_like(factor))
    batch = next(iter(recommender.clients[0].batches(torch.Generator().manual_seed(1))))
    batch = {key: tensor[:num_rows] for key, tensor in batch.items()}
    loss = sequence_loss(recommender.base.model, batch)
    whole = torch.cat([loss.detach().view(1), *(one.flatten() for one in torch.autograd.grad(loss, trained))])
    parts = []
    for index in range(count):
        for factor in trained:
            factor.grad = None
        one = Told(index, count, "data")
        _gradients(on(recommender, processes=one), trained, batch)
        parts.append(one.given)
    assert sum(bool(part.any()) for part in parts) == min(num_rows, count)  # who has no row has nothing to add
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)


def test_models_by_themselves_ask_nobody():
    class Away(Processes):
        def gather(self, value):
            raise AssertionError("the others are not there")

    shared = on(toy_recommender(), processes=Away(0, 2, "data"))
    alone = shared.by_itself()
    assert alone.base.processes == Processes()
    assert len(alone.student("crime").positions("valid"))
    with pytest.raises(AssertionError, match="not there"):
        shared.student("crime").positions("valid")
