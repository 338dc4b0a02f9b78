"""Server-side reductions that never hold the cohort: weighted means over a stream of uploads.

Shape legend: C clients of a block.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedecider.federation.method import Tree, Upload


def weighted_mean(uploads: Iterable[Upload], fallback: Tree, uniform: bool = False) -> Tree:
    """``sum_i w_i x_i / sum_i w_i`` per tensor, accumulated in float64, in client order (McMahan et al., 2017).

    ``uniform`` gives every client weight 1. A client with any non-finite tensor is left out as a whole; when no
    client is left, ``fallback`` (the previous server tree) is returned. Output dtypes are those of the uploads.
    """
    total = 0.0
    sums: Tree = {}
    dtypes = {}
    for upload in uploads:
        finite_C = finite_clients(upload)
        weight_C = torch.where(finite_C, torch.ones_like(upload.weights) if uniform else upload.weights, 0.0).double()
        total += float(weight_C.sum())
        for name, tensor in upload.tensors.items():
            kept = torch.nan_to_num(tensor.double()) * weight_C.view(-1, *[1] * (tensor.dim() - 1))
            sums[name] = sums[name] + kept.sum(0) if name in sums else kept.sum(0)
            dtypes[name] = tensor.dtype
    if total == 0.0:
        return fallback
    return {name: (value / total).to(dtypes[name]) for name, value in sums.items()}


def finite_clients(upload: Upload) -> torch.Tensor:
    """(C,) bool: clients all of whose tensors are finite."""
    finite_C = torch.ones(len(upload.clients), dtype=torch.bool)
    for tensor in upload.tensors.values():
        finite_C &= torch.isfinite(tensor).reshape(len(tensor), -1).all(1).cpu()
    return finite_C
