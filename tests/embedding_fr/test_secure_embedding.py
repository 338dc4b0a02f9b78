"""Methods of the embedding track over secure sums: what they give without, to the resolution of the numbers."""

import pytest
import torch
from toy_federation import run, toy_method

from fedecider.federation.faults import Fault, scenario
from fedecider.federation.secure_rounds import SecureSums, securely_summed_rounds

AVERAGING = {
    "fedmf": {},
    "fedncf": {},
    "pfedrec": {},
    "fedrap": {},
    "fedrecgel": {},
    "fedrecgel, gradients": {"variant": "code"},
    "fedmf_em": {},
}


@pytest.mark.parametrize("case", AVERAGING)
def test_a_round_is_the_plain_one_also_without_who_drops_out(case):
    method = toy_method(case.split(",")[0], **AVERAGING[case])
    gathering = securely_summed_rounds(method, SecureSums(5, 0.6, num_neighbours=4))
    for gone in ((), (2, 5)):
        late = scenario([Fault(client, "late") for client in gone], 0)
        plain, _ = run(method, rounds=1, deliver=late.deliver)
        secure, records = run(method, rounds=1, deliver=late.deliver, gathering=gathering)
        for name, tensor in plain.server.items():
            torch.testing.assert_close(secure.server[name], tensor, rtol=0, atol=2**-32 + 2e-7)
        assert sum(len(group["clients"]) for group in records[0]["traffic"]) == 7
    by_blocks, _ = run(method, rounds=1, block_clients=1, deliver=late.deliver, gathering=gathering)
    for name, tensor in by_blocks.server.items():
        torch.testing.assert_close(secure.server[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["fedem", "gpfedrec", "pfedclr", "fedease", "fednear"])
def test_methods_that_need_single_uploads_are_refused(name):
    with pytest.raises(ValueError, match=f"got secure_sum with {name}"):
        securely_summed_rounds(toy_method(name), SecureSums(5))
