"""The same code on a GPU: every method gives there what it gives on the CPU, up to rounding."""

import pytest
import torch
from toy_federation import NUM_ITEMS, SEQUENCES, run, toy_federation, toy_method, toy_training

from embedding_fr.blocks import build_population
from embedding_fr.methods import METHODS
from fedecider.evaluation.protocols import STRICT


@pytest.mark.gpu
@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_gives_what_the_cpu_gives(name):
    states = []
    for device in ("cpu", "cuda"):
        federation = toy_federation()._replace(device=torch.device(device))
        population = build_population(SEQUENCES, NUM_ITEMS, STRICT, 0, device)
        states.append(run(toy_method(name, federation, toy_training(name)), population, 2)[0])
    for left, right in ((states[0].server, states[1].server), (states[0].local, states[1].local)):
        for key in left:
            assert torch.allclose(left[key], right[key].cpu(), atol=1e-3, rtol=1e-3), key
