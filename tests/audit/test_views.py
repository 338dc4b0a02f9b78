"""What a party can put together from what it sees, by hand."""

import pytest
import torch

from fedecider.llm.audit_views import another, scaled, without_own
from fedecider.lora.directions import update_norms


def test_silos_that_stand_side_by_side_look_at_each_other():
    assert [another(client, 4) for client in range(4)] == [1, 0, 3, 2]
    assert [another(client, 3) for client in range(3)] == [1, 0, 1]


def test_with_two_clients_a_mean_is_the_other_ones_upload():
    first, second = torch.tensor([[1.0, -2.0]]), torch.tensor([[5.0, 7.0]])
    rest = without_own({"x": (first + second) / 2}, {"x": first}, [{}, {}], 0)
    assert torch.equal(rest["x"], second)


def test_rows_count_those_who_sent_them():
    marks = [
        {"t": torch.tensor([True, True, False])},
        {"t": torch.tensor([True, False, True])},
        {"t": torch.ones(3) > 0},
    ]
    sent = [
        torch.tensor([[2.0], [4.0], [0.0]]),
        torch.tensor([[6.0], [0.0], [1.0]]),
        torch.tensor([[7.0], [8.0], [9.0]]),
    ]
    mean = {"t": torch.tensor([[5.0], [6.0], [5.0]])}
    rest = without_own(mean, {"t": sent[0]}, marks, 0)
    assert rest["t"][:, 0].tolist() == [6.5, 8.0, 5.0]  # the last row is not the observer's: the mean as it is
    alone = without_own({"t": sent[0]}, {"t": sent[0]}, [marks[0], {"t": torch.zeros(3) > 0}], 0)
    assert not alone["t"].any()


def test_a_scale_is_that_of_the_update():
    generator = torch.Generator().manual_seed(0)
    pair = {"m.lora_a": torch.randn(2, 5, generator=generator), "m.lora_b": torch.randn(4, 2, generator=generator)}
    before, after = (
        update_norms({name: tensor[None] for name, tensor in one.items()}) for one in (pair, scaled(pair, [2.5]))
    )
    assert float(after / before) == pytest.approx(2.5)
