"""Put the model of a client, or the shared student, into a recommender."""

from __future__ import annotations

import torch

from fedecider.federation.method import FederatedMethod, Tree
from fedecider.federation.state import RunState
from fedecider.federation.wire import received, take_row
from fedecider.llm.setup import Settings
from fedecider.lora.adapters import adapter_shapes, initial_adapters
from fedecider.lora.fusion import load_plain
from fedecider.methods import METHODS
from fedecider.methods.recommender import Recommender


def load_student(recommender: Recommender) -> None:
    """The shared student without any adapter."""
    load_plain(recommender.model, initial_adapters(adapter_shapes(recommender.model), recommender.seed))


def load_reported(
    settings: Settings, method: FederatedMethod, recommender: Recommender, state: RunState, client: int
) -> Tree:
    """The reported model of ``client`` at the selected round; returns the client's own row."""
    download = received(method.broadcast(state.best_round + 1, state.best_server, torch.tensor([client])), 0)
    own = take_row(state.best_local, client)
    entry = METHODS[settings.run.method]
    entry.load_view(recommender, settings.method, method.views[0], download, own, client)
    return own
