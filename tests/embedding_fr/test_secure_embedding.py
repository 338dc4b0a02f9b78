"""Methods of the cross-device track over secure sums: what they give without, to the resolution of the numbers."""

import pytest
import torch
from toy_federation import run, toy_method

from fedecider.federation.secure_rounds import SecureSums, securely_summed_rounds
from fedecider.testing.faults import Fault, faulty_channel


@pytest.mark.parametrize(
    "name",
    ["colr", "fedcia", "fedmf", "fedncf", "pfedrec", "fedrap", "fedrecgel", "pfedclr", "fedmf_em", "feddae", "ifedrec"],
)
def test_a_round_is_the_plain_one_also_without_who_drops_out(name):
    method = toy_method(name)
    aggregation = securely_summed_rounds(method, SecureSums(5, 0.6, num_neighbours=4))
    for gone in ((), (2, 5)):
        late = faulty_channel([Fault(client, "late") for client in gone])
        plain, _ = run(method, rounds=1, channel=late)
        secure, records = run(method, rounds=1, channel=late._replace(aggregation=aggregation))
        for key, tensor in plain.server.items():
            torch.testing.assert_close(secure.server[key], tensor, rtol=0, atol=2**-32 + 2e-7)
        assert sum(len(group["clients"]) for group in records[0]["traffic"]) == 7
    by_blocks, _ = run(method, rounds=1, block_clients=1, channel=late._replace(aggregation=aggregation))
    for key, tensor in by_blocks.server.items():
        torch.testing.assert_close(secure.server[key], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["fedem", "gpfedrec", "fedca", "pfedgraph", "fedease", "fednear", "fedfast", "cofedrec", "perfedrec"]
)
def test_methods_that_need_single_uploads_are_refused(name):
    with pytest.raises(ValueError, match=f"got secure_sum with {name}"):
        securely_summed_rounds(toy_method(name), SecureSums(5))


def test_gradients_that_the_server_divides_by_their_size_are_refused():
    """Those below the resolution would move the model as much as any."""
    with pytest.raises(ValueError, match="got secure_sum with fedrecgel"):
        securely_summed_rounds(toy_method("fedrecgel", variant="code"), SecureSums(5))
