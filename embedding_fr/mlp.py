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
from fedecider.bounds import WIDEST
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
    (:func:`embedding_fr.local_training.received`). Rows stand side by side in the layers, since these are a few units
    wide: products of that form take a fraction of the time.
    """
    hidden = row_CBF.mT
    num_layers = _num_layers(params, name)
    for layer in range(num_layers):
        weight, offset = params[f"{name}.{layer}.weight"], params[f"{name}.{layer}.bias"][:, :, None]
        if layer == 0 and client_CK is not None:
            num_common = client_CK.shape[1]
            offset = torch.baddbmm(offset, weight[:, :num_common].mT, client_CK[:, :, None])
            weight = weight[:, num_common:]
        out = torch.baddbmm(offset, weight.mT, hidden)
        hidden = torch.relu(out) if layer < num_layers - 1 else out
    return hidden.mT


def mlp_of_catalogue(params: Tree, name: str, row_IF: Tensor, client_CK: Tensor) -> Tensor:
    """(C, out, I) outputs of one network that all clients share, on rows I that all of them share.

    ``params`` lack C, as in a server tree. The first layer's product with the rows is then the same for every client
    and computed once; each client adds its own part. Numbers are those of :func:`mlp` up to rounding.
    """
    num_layers, num_common = _num_layers(params, name), client_CK.shape[1]
    weights = [params[f"{name}.{layer}.weight"].T[None] for layer in range(num_layers)]
    biases = [params[f"{name}.{layer}.bias"][None, :, None] for layer in range(num_layers)]
    row_1UI = weights[0][:, :, num_common:] @ row_IF.T
    hidden = row_1UI + (weights[0][:, :, :num_common] @ client_CK[:, :, None] + biases[0])
    for weight, bias in zip(weights[1:], biases[1:], strict=True):
        hidden = torch.baddbmm(bias, weight.expand(len(hidden), -1, -1), hidden.relu_())
    return hidden


def _num_layers(params: Tree, name: str) -> int:
    return sum(key.startswith(f"{name}.") and key.endswith(".weight") for key in params)


def layer_sizes(text: str) -> tuple[int, ...]:
    """Widths of hidden layers from a setting: ``"32,16,8"`` -> (32, 16, 8); an empty text is no hidden layer."""
    try:
        sizes = tuple(int(size) for size in text.split(",")) if text.strip() else ()
    except ValueError:
        sizes = (0,)
    if not all(1 <= size <= WIDEST for size in sizes):
        raise ValueError(
            f"got the layer sizes {text!r}, expected positive whole numbers up to {WIDEST} and commas, as in 32,16,8"
        )
    return sizes
