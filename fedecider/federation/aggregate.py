"""Server-side reductions that never hold the cohort: weighted means over a stream of uploads.

Shape legend: C clients of a block, I rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import torch

from fedecider.federation.method import FederatedMethod, Tree, Upload
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


RobustMean = Literal["mean", "median", "trimmed_mean", "norm_clip"]


def with_robust_mean(method: FederatedMethod, kind: RobustMean) -> FederatedMethod:
    """``method`` whose server takes its mean over uploads that :func:`robust` has made harmless.

    Raises:
        ValueError: the server of ``method`` takes no mean over clients.
    """
    if kind == "mean":
        return method
    if not method.takes_mean:
        raise ValueError(
            f"got robust_mean {kind} with {method.name}, whose server takes no mean over clients, expected mean"
        )

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return method.server_aggregate(round, server, robust(uploads, kind, server))

    return method._replace(server_aggregate=server_aggregate)


def robust(uploads: Iterable[Upload], kind: RobustMean, server: Tree) -> Iterator[Upload]:
    """The uploads of a round, in one block, such that their mean is a robust one; all of them are held at once.

    ``median`` and ``trimmed_mean`` (Yin et al., 2018): every client's numbers become that of all clients, coordinate by
    coordinate; of a tensor with ``sent_rows`` over those who sent the row. Trimming leaves out the largest and the
    smallest, of fewer than three clients none. ``norm_clip``: a client's change of what the ``server`` holds, over all
    its tensors, is scaled down to the median of the clients' norms. Clients that are not finite are left out.
    """
    finite = [_finite_rows(upload) for upload in uploads]
    finite = [upload for upload in finite if len(upload.clients)]
    if not finite:
        return
    names = finite[0].tensors
    whole = Upload(
        torch.cat([upload.clients for upload in finite]),
        torch.cat([upload.weights for upload in finite]),
        {name: torch.cat([upload.tensors[name] for upload in finite]) for name in names},
        sent_rows={name: torch.cat([upload.sent_rows[name] for upload in finite]) for name in finite[0].sent_rows},
        finite=torch.ones(sum(len(upload.clients) for upload in finite), dtype=torch.bool),
    )
    if kind == "norm_clip":
        change = {name: tensor.double() - server.get(name, torch.zeros(())) for name, tensor in whole.tensors.items()}
        for name, mark_CI in whole.sent_rows.items():
            change[name] = change[name].masked_fill(~mark_CI[..., None], 0.0)
        norm_C = torch.stack([value.flatten(1).square().sum(1) for value in change.values()]).sum(0).sqrt()
        factor_C = (norm_C.quantile(0.5) / norm_C.clamp(min=1e-300)).clamp(max=1.0)
        tensors = {}
        for name, tensor in whole.tensors.items():
            scale = factor_C.view(-1, *[1] * (tensor.dim() - 1))
            kept = tensor.double() - (1.0 - scale) * change[name]
            tensors[name] = torch.where(scale == 1.0, tensor, kept.to(tensor.dtype))
        yield whole._replace(tensors=tensors)
        return
    yield whole._replace(tensors={name: _one_for_all(whole, name, kind) for name in whole.tensors})


def _one_for_all(whole: Upload, name: str, kind: RobustMean) -> torch.Tensor:
    tensor = whole.tensors[name]
    value = tensor.double()
    mark = whole.sent_rows.get(name)
    if mark is not None:
        value = value.masked_fill(~mark.to(value.device)[..., None], torch.nan)
    if kind == "median":
        one = value.nanquantile(0.5, dim=0)
    else:
        total, count = value.nansum(0), (~value.isnan()).sum(0)
        largest = value.nan_to_num(nan=-torch.inf).amax(0)
        smallest = value.nan_to_num(nan=torch.inf).amin(0)
        trims = count >= 3
        one = torch.where(trims, total - largest - smallest, total) / (count - 2 * trims).clamp(min=1)
    every = one.nan_to_num(nan=0.0).to(tensor.dtype).expand_as(tensor)
    return every if mark is None else every.masked_fill(~mark.to(tensor.device)[..., None], 0.0)


def _finite_rows(upload: Upload) -> Upload:
    kept_C = finite_clients(upload)
    if upload.rows:
        raise ValueError("got tables by rows, expected whole ones: a robust mean looks at every number of every client")
    return upload._replace(
        clients=upload.clients[kept_C],
        weights=upload.weights[kept_C],
        tensors={name: tensor[kept_C.to(tensor.device)] for name, tensor in upload.tensors.items()},
        sent_rows={name: mark[kept_C.to(mark.device)] for name, mark in upload.sent_rows.items()},
    )


def _row_means(total: torch.Tensor, weight_I: torch.Tensor, fallback: torch.Tensor) -> torch.Tensor:
    """Sums (I, ...) over their weights; rows without weight from ``fallback``."""
    weight = weight_I.view(-1, *[1] * (total.dim() - 1))
    return torch.where(weight > 0.0, total / weight, fallback.double())


def finite_clients(upload: Upload) -> torch.Tensor:
    """(C,) bool: clients all of whose tensors are finite."""
    checked = upload if upload.finite is not None else with_finite(upload)[0]
    assert checked.finite is not None
    return checked.finite


def heard_clients(upload: Upload) -> torch.Tensor:
    """Numbers of the clients whose usable uploads are in ``upload``, each by itself or in a mean."""
    return upload.clients[finite_clients(upload)] if upload.mean_of is None else upload.mean_of
