"""The tiny setting of `embedding_fr.testing.tiny_users`, with built-in methods by their names."""

from contextlib import contextmanager

import pytest
import torch

from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS
from embedding_fr.testing.tiny_users import NUM_ITEMS, SEQUENCES, run, tiny_training  # noqa: F401
from embedding_fr.testing.tiny_users import tiny_federation as toy_federation
from embedding_fr.testing.tiny_users import tiny_population as toy_population  # noqa: F401
from fedecider.federation.method import RowUpdate
from fedecider.federation.rows import write_rows


def toy_training(name: str, **changes) -> EmbeddingTraining:
    return tiny_training(METHODS[name], **changes)


def toy_method(name: str, federation=None, training=None, **config):
    method = METHODS[name]
    return method.build(federation or toy_federation(), training or toy_training(name), method.config(**config))


@contextmanager
def stacked():
    """On a CPU as on any other device: no compiled function trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embedding_fr.compiled.takes", lambda tensor: False)
        yield


def own_after(own, update):
    """A client's own rows after an update, tables in full."""
    after = {name: tensor.clone() for name, tensor in own.items()}
    for name, new in update.items():
        if isinstance(new, RowUpdate):
            write_rows(after[name], torch.arange(len(new.rows)), new)
        else:
            after[name] = new
    return after
