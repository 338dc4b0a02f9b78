"""Server-side reductions that never hold the cohort: weighted means over a stream of uploads.

Shape legend: C clients of a block, I rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedecider.federation.method import Tree, Upload
from fedecider.federation.rows import add_rows
from fedecider.federation.wire import with_finite


def weighted_mean(uploads: Iterable[Upload], fallback: Tree, uniform: bool = False) -> Tree:
    """``sum_i w_i x_i / sum_i w_i`` per tensor, accumulated in float64, in client order (McMahan et al., 2017).

    ``uniform`` gives every client weight 1. A client with any non-finite tensor is left out as a whole; when no
    client is left, ``fallback`` (the previous server tree) is returned. Output dtypes are those of the uploads.
    Tables held by rows are differences from ``fallback``, which must be what these clients downloaded: the cost grows
    with the rows that changed. Of a tensor with ``sent_rows`` every row has a mean of its own, over the clients that
    sent it, ``sum_i w_i m_ir x_ir / sum_i w_i m_ir`` with marks m: who knows nothing of a row does not thin it out. A
    row that nobody sent stays as it is in ``fallback``.
    """
    total = 0.0
    sums: Tree = {}
    totals_I: Tree = {}
    dtypes = {}
    by_rows = set()
    for upload in uploads:
        finite_C = finite_clients(upload)
        given_C = upload.weights.cpu()
        weight_C = torch.where(finite_C, torch.ones_like(given_C) if uniform else given_C, 0.0).double()
        total += float(weight_C.sum())
        for name, tensor in upload.tensors.items():
            dtypes[name] = tensor.dtype
            if not bool(finite_C.all()):
                tensor = torch.nan_to_num(tensor)  # what has no weight must not turn the sum into NaN
            own_C = weight_C.to(tensor.device)
            if name in upload.rows:
                by_rows.add(name)
                changed = sums.setdefault(name, torch.zeros_like(fallback[name], dtype=torch.float64))
                weight_I = add_rows(changed, upload.rows[name], tensor, own_C)
                changed -= weight_I.view(-1, *[1] * (changed.dim() - 1)) * fallback[name]
                continue
            if name in upload.sent_rows:
                sent_I = (own_C[:, None] * upload.sent_rows[name].to(own_C)).sum(0)
                totals_I[name] = totals_I[name] + sent_I if name in totals_I else sent_I
            kept = tensor.double() * own_C.view(-1, *[1] * (tensor.dim() - 1))
            sums[name] = sums[name] + kept.sum(0) if name in sums else kept.sum(0)
    if total == 0.0:
        return fallback
    means = {
        name: _row_means(value, totals_I[name], fallback[name]) if name in totals_I else value / total
        for name, value in sums.items()
    }
    return {name: (mean + fallback[name] if name in by_rows else mean).to(dtypes[name]) for name, mean in means.items()}


def _row_means(total: torch.Tensor, weight_I: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """Sums (I, ...) over their weights; rows without weight from ``fallback``."""
    weight = weight_I.view(-1, *[1] * (total.dim() - 1))
    return torch.where(weight > 0.0, total / weight, fallback.double())


def finite_clients(upload: Upload) -> torch.Tensor:
    """(C,) bool: clients all of whose tensors are finite."""
    checked = upload if upload.finite is not None else with_finite(upload)[0]
    assert checked.finite is not None
    return checked.finite
