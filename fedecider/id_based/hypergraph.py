"""The graph and the filters of FedHCDR: a domain is a hypergraph, and what neighbours share passes or not.

An item is the hyperedge of all its users, and a user that of all its items.

Shape legend: R nodes, S hyperedges, E distinct (node, hyperedge) pairs, D dims, K steps of a walk, C nodes of a chunk.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedecider.federation.method import Tree

CHUNK = 512
"""Nodes whose walks are followed at once."""


class Graph(NamedTuple):
    """``A = G G^T - diag``, R x R, never formed; ``G = D^-1/2 H sqrt(P / D_S)`` with ``P_s = 1 - D_s / sum D``."""

    gain_RS: Tensor
    """Sparse, as its transpose is."""
    gain_SR: Tensor
    diagonal_R: Tensor

    def spread(self, value_RD: Tensor) -> Tensor:
        """``A value``."""
        spread_RD: Tensor = self.gain_RS @ (self.gain_SR @ value_RD)
        return spread_RD - self.diagonal_R[:, None] * value_RD


def hypergraph(node_E: Tensor, edge_E: Tensor, shape: tuple[int, int], device: torch.device) -> Graph:
    """The graph of R nodes and S hyperedges whose entries of H are given, with a diagonal of zero."""
    degree_R, degree_S = (torch.bincount(one_E, minlength=n) for one_E, n in zip((node_E, edge_E), shape, strict=True))
    share_S = 1.0 - degree_S / max(1, len(edge_E))
    square_E = (share_S[edge_E] / degree_S[edge_E] / degree_R[node_E]).to(device)
    entry_2E = torch.stack([node_E, edge_E]).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "beta state": products with a dense matrix are tested here
        gain_RS = torch.sparse_coo_tensor(entry_2E, square_E.sqrt(), shape).to_sparse_csr()
        gain_SR = torch.sparse_coo_tensor(entry_2E.flip(0), square_E.sqrt(), shape[::-1]).to_sparse_csr()
    diagonal_R = torch.zeros(shape[0], device=device).index_add(0, entry_2E[0], square_E)
    return Graph(gain_RS, gain_SR, diagonal_R)


def as_in_the_code(graph: Graph, node_E: Tensor) -> Graph:
    """The diagonal of the public code: ``K_uu / D_u^2`` is taken away where ``K_uu / D_u`` stands."""
    degree_R = torch.bincount(node_E, minlength=len(graph.diagonal_R)).clamp(min=1)
    return graph._replace(diagonal_R=graph.diagonal_R / degree_R.to(graph.diagonal_R))


def return_probabilities(graph: Graph, steps: int) -> Tensor:
    """``diag(M^k)`` for k = 1 to ``steps`` (R, K), with ``M = D^-1 (K - diag K)``, that is of ``A^k``.

    A is symmetric: ``(A^(i + j))_uu = (A^i e_u) . (A^j e_u)``, so half the steps are taken.
    """
    num = len(graph.diagonal_R)
    found_RK = graph.diagonal_R.new_zeros(num, steps + 1)
    for node_C in torch.arange(num, device=found_RK.device).split(CHUNK):
        state_RC = functional.one_hot(node_C, num).T.to(found_RK)
        for step in range(1, steps + 1, 2):
            before_RC, state_RC = state_RC, graph.spread(state_RC)
            found_RK[node_C, step - 1] = (before_RC * state_RC).sum(0)
            found_RK[node_C, step] = state_RC.square().sum(0)
    return found_RK[:, :steps]


def filtered(part: Tree, graph: Graph, start_RD: Tensor, sign: float, dropout: Tensor | None = None) -> Tensor:
    """``(X + sign (A Y + beta Y) + Y + b) / 2`` with ``Y = X W``; sign 1 passes what neighbours share, -1 the rest."""
    mixed_RD = (start_RD if dropout is None else start_RD * dropout) @ part["weight"]
    passed_RD = sign * (graph.spread(mixed_RD) + part["beta"] * mixed_RD) + mixed_RD + part["bias"]
    return (start_RD + passed_RD) / 2.0
