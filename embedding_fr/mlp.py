"""Small networks, one per client: linear layers with ReLU between them, as stacked tensors.

Layer l of the network ``name`` is ``name.l.weight`` (C, in, out) and ``name.l.bias`` (C, out); a server tree holds them
without C.

Shape legend: C clients of a block, B rows of a client, F features of a row, K features of a client.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from embedding_fr.blocks import Federation
from fedecider.federation.method import Tree
from fedecider.federation.streams import stream


def start_mlp(federation: Federation, name: str, sizes: tuple[int, ...], num_clients: int = 0) -> Tree:
    """Start values of the layers ``sizes[0] -> sizes[1] -> ...``; ``num_clients`` draws each client its own network.

    Weights and biases are uniform in +-1/sqrt(in), from streams of (seed, name).
    """
    lead = (num_clients,) if num_clients else ()
    tree: Tree = {}
    for layer, (size_in, size_out) in enumerate(pairwise(sizes)):
        for part, shape in (("weight", (size_in, size_out)), ("bias", (size_out,))):
            key = f"{name}.{layer}.{part}"
            draw = torch.rand(*lead, *shape, generator=stream(federation.seed, "init", key), dtype=torch.float64)
            value = (2.0 * draw - 1.0) * size_in**-0.5
            tree[key] = value.to(torch.get_default_dtype()).to(federation.device)
    return tree


def mlp(params: Tree, name: str, row_CBF: Tensor, client_CK: Tensor | None = None) -> Tensor:
    """(C, B, out) outputs of each client's network on its rows; no activation after the last layer.

    ``client_CK``: features that all rows of a client have in common. They stand before those of the row, as if
    concatenated to each of them, but enter the first layer once per client. A shared network is expanded to C first
    (:func:`embedding_fr.local_training.received`).
    """
    num_layers = sum(key.startswith(f"{name}.") and key.endswith(".weight") for key in params)
    hidden = row_CBF
    for layer in range(num_layers):
        weight, offset = params[f"{name}.{layer}.weight"], params[f"{name}.{layer}.bias"][:, None]
        if layer == 0 and client_CK is not None:
            num_common = client_CK.shape[1]
            offset = torch.baddbmm(offset, client_CK[:, None], weight[:, :num_common])
            weight = weight[:, num_common:]
        if layer > 0:
            hidden = torch.relu(hidden)
        hidden = torch.baddbmm(offset, hidden, weight)
    return hidden


def layer_sizes(text: str) -> tuple[int, ...]:
    """Widths of hidden layers from a setting: ``"32,16,8"`` -> (32, 16, 8); an empty text is no hidden layer."""
    try:
        sizes = tuple(int(size) for size in text.split(",")) if text.strip() else ()
    except ValueError:
        sizes = (0,)
    if not all(size >= 1 for size in sizes):
        raise ValueError(f"got the layer sizes {text!r}, expected positive whole numbers and commas, as in 32,16,8")
    return sizes
