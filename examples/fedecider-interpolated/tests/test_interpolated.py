import pytest
import torch
from fedecider_interpolated.interpolated import METHOD, InterpolatedConfig, interpolated

from fedecider.methods.fedavg import WeightingConfig, fedavg
from fedecider.methods.local import LocalConfig, local
from fedecider.testing import check_method
from fedecider.testing.llm_contract import run, tiny_models


def test_it_keeps_the_contract():
    check_method(METHOD)


def test_share_0_is_local_training_and_share_1_is_fedavg():
    alone, _ = run(interpolated(tiny_models(), InterpolatedConfig(share=0.0)), 3, 3)
    expected, _ = run(local(tiny_models(), LocalConfig()), 3, 3)
    assert all(torch.equal(alone.local[key], expected.local[key]) for key in expected.local)
    together, _ = run(interpolated(tiny_models(), InterpolatedConfig(share=1.0)), 3, 3)
    expected, _ = run(fedavg(tiny_models(), WeightingConfig()), 3, 3)
    assert all(torch.equal(together.server[key], expected.server[key]) for key in expected.server)
    assert any(not torch.equal(together.local[key], alone.local[key]) for key in alone.local)


def test_a_share_above_1_is_an_error():
    with pytest.raises(ValueError, match=r"got share 1\.5, expected 0 to 1"):
        InterpolatedConfig(share=1.5)
