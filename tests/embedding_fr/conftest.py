"""Double precision, where only real differences are to be left."""

import pytest
import torch


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
