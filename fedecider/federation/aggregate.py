"""Server-side reductions that never hold the cohort: weighted means over a stream of uploads.

Shape legend: C clients of a block, I rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedecider.federation.config import RobustMean
from fedecider.federation.method import FederatedMethod, Tree, Upload
from fedecider.federation.rows import add_rows
from fedecider.federation.wire import only_rows, reference_of, upload_at, with_finite


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
    held_I: Tree = {}
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
                if name not in sums:
                    sums[name] = torch.zeros_like(fallback[name], dtype=torch.float64)
                weight_I = add_rows(sums[name], upload.rows[name], tensor, own_C)
                held_I[name] = held_I[name] + weight_I if name in held_I else weight_I
                continue
            if name in upload.sent_rows:
                sent_I = (own_C[:, None] * upload.sent_rows[name].to(own_C)).sum(0)
                totals_I[name] = totals_I[name] + sent_I if name in totals_I else sent_I
            kept = tensor.double() * own_C.view(-1, *[1] * (tensor.dim() - 1))
            sums[name] = sums[name] + kept.sum(0) if name in sums else kept.sum(0)
    if total == 0.0:
        return fallback
    for name, weight_I in held_I.items():
        sums[name] -= weight_I.view(-1, *[1] * (sums[name].dim() - 1)) * fallback[name]
    means = {
        name: _row_means(value, totals_I[name], fallback[name]) if name in totals_I else value / total
        for name, value in sums.items()
    }
    return {name: (mean + fallback[name] if name in held_I else mean).to(dtypes[name]) for name, mean in means.items()}


LARGEST_UPDATE = 3.0
"""Times the median norm, where companies are the clients."""
LARGEST_OF_USERS = 10.0
"""Where users are: one among many does little, and honest ones differ more."""
LARGEST_CLAIM = 10.0
"""Times the median client weight."""
NUM_PEERS = 256
"""Clients over whom medians are taken, and whose uploads are held for it."""
LEAST_PEERS = 3
"""Of fewer clients one can move the median at will."""
FAR = 30.0
"""Times the norm of everybody else: what is told of an upload where there is no median to bound it by."""


class Arrived(NamedTuple):
    """The uploads of a block as the server has them."""

    upload: Upload
    received: Callable[[], Tree]
    """What tells with what these are compared: tensors of the same names, shared (...) or per client (C, ...)."""


def bounded(
    arrived: Iterable[Arrived], largest: float | None, note: Callable[[dict[str, Any]], None]
) -> Iterator[Upload]:
    """The uploads of a round, bounded so that no client counts for many.

    An upload ``x`` becomes ``r + min(1, c / ||x - r||) (x - r)``: ``r`` is what the client had received, ``c`` is
    ``largest`` times the median norm of the round, norms over all tensors of a client. None bounds no norms. Client
    weights are capped at their median times `LARGEST_CLAIM`. Within the bounds no bit changes. ``note`` is called with
    ``client``, ``cap`` and ``norm`` or ``weight`` for each that is capped.

    Medians are over the first `NUM_PEERS` clients that arrive; their uploads wait in memory, all others stream. Since a
    simulation of users brings the largest ones first, its bounds in rounds of more clients are those of large users.
    Zeros do not enter a median, nor do clients that are not finite; these are passed on as they are. Below
    `LEAST_PEERS` clients one of them could move the median at will, so nothing is bounded: ``note`` is called with
    ``client``, ``norm`` and ``others``, their largest norm, for an upload that is `FAR` from the others.
    """

    def measured(one: Arrived) -> tuple[Upload, Tree, Tensor]:
        reference = None if largest is None else one.received()
        return one.upload, reference or {}, update_norms(one.upload, reference)

    stream = map(measured, arrived)
    waiting: list[tuple[Upload, Tree, Tensor]] = []
    while sum(len(norm_C) for _, _, norm_C in waiting) < NUM_PEERS and (one := next(stream, None)):
        waiting.append(one)
    # numbers that are not finite become 0, which does not count: so many clients, however blocks are cut
    if largest is not None:
        _tell_far([(upload, norm_C.where(finite_clients(upload), 0.0)) for upload, _, norm_C in waiting], note)
    norm_cap = _cap([norm_C.where(finite_clients(upload), 0.0) for upload, _, norm_C in waiting], largest or math.inf)
    claims = [upload.weights.cpu().double().where(finite_clients(upload), 0.0) for upload, _, _ in waiting]
    claim_cap = _cap(claims, LARGEST_CLAIM)
    waiting.reverse()
    while waiting:
        yield _within(*waiting.pop(), norm_cap, claim_cap, note)
    for one in stream:
        yield _within(*one, norm_cap, claim_cap, note)


def _tell_far(found: Sequence[tuple[Upload, Tensor]], note: Callable[[dict[str, Any]], None]) -> None:
    """The largest of too few norms for a median, where it is far from the others."""
    norms = [
        (norm, client)
        for upload, norm_C in found
        for client, norm in zip(upload.clients.tolist(), norm_C.tolist(), strict=True)
        if norm > 0.0
    ]
    if 1 < len(norms) < LEAST_PEERS:
        (others, _), (norm, client) = sorted(norms)[-2:]
        if norm > FAR * others:
            note({"client": client, "norm": norm, "others": others})


def update_norms(upload: Upload, reference: Tree | None) -> Tensor:
    """(C,) float64, the norm of what every client changed of ``reference``; zero without one."""
    total_C = torch.zeros(len(upload.clients), dtype=torch.float64)
    for change in _changes(upload, reference).values() if reference is not None else ():
        total_C += torch.linalg.vector_norm(_flat(change), dim=1, dtype=torch.float64).square().cpu()
    return total_C.sqrt()


def _flat(value: Tensor) -> Tensor:
    """(C, ...) as (C, numbers of a client)."""
    return value.flatten(1) if value.dim() > 1 else value[:, None]


def _changes(upload: Upload, reference: Tree) -> Tree:
    """What every client changed of the tensors in ``reference``; of others, which it did not receive, all. Whole
    numbers have no size, nor has one number of a client beside what it received: a report, such as its loss."""
    changes = {}
    for name, tensor in upload.tensors.items():
        is_report = bool(reference) and name not in reference and tensor.dim() == 1
        if tensor.is_floating_point() and not is_report:
            base = reference_of(tensor, _known(upload, name, reference), upload.rows.get(name))
            change = tensor - only_rows(base, upload.sent_rows.get(name))
            if name in upload.rows:
                pad_CR = (upload.rows[name] < 0).to(change.device)
                change = change.masked_fill(pad_CR.view(*pad_CR.shape, *[1] * (change.dim() - 2)), 0.0)
            changes[name] = change
    return changes


def _known(upload: Upload, name: str, reference: Tree) -> Tensor | None:
    return None if name in upload.num_rows else reference.get(name)


def _cap(values: Sequence[Tensor], factor: float) -> float:
    value_P = torch.cat([torch.zeros(0, dtype=torch.float64), *values])[:NUM_PEERS]
    value_P = value_P[value_P > 0.0]
    return factor * float(_middle(value_P, "median")) if len(value_P) >= LEAST_PEERS else math.inf


def _within(
    upload: Upload,
    reference: Tree,
    norm_C: Tensor,
    norm_cap: float,
    claim_cap: float,
    note: Callable[[dict[str, Any]], None],
) -> Upload:
    """One block within both caps."""
    weight_C = upload.weights.cpu().double()
    finite_C = finite_clients(upload)
    large_C, greedy_C = finite_C & (norm_C > norm_cap), finite_C & (weight_C > claim_cap)
    for what, over_C, value_C, cap in (
        ("norm", large_C, norm_C, norm_cap),
        ("weight", greedy_C, weight_C, claim_cap),
    ):
        for row in over_C.nonzero()[:, 0].tolist():
            note({"client": int(upload.clients[row]), what: float(value_C[row]), "cap": cap})
    if greedy_C.any():
        upload = upload._replace(weights=upload.weights.clamp(max=claim_cap))
    if not large_C.any():
        return upload
    factor_C = torch.where(large_C, norm_cap / norm_C, 1.0)
    tensors = dict(upload.tensors)
    for name, change in _changes(upload, reference).items():
        scale = factor_C.to(change.device).view(-1, *[1] * (change.dim() - 1))
        less = (upload.tensors[name].double() - (1.0 - scale) * change.double()).to(change.dtype)
        tensors[name] = torch.where(scale < 1.0, less, upload.tensors[name])
    return upload._replace(tensors=tensors, payload={})  # what is bounded is no longer what was encoded


PART_NUMBERS = 1 << 23
"""64 MiB of float64."""


def check_one_mean(secure_sum: bool, robust_mean: RobustMean) -> None:
    """``ValueError`` for a robust mean of uploads that secure aggregation hides."""
    if secure_sum and robust_mean != "mean":
        raise ValueError(
            f"got secure_sum with robust_mean {robust_mean}, expected one of the two: a robust mean looks at every "
            "upload, secure aggregation shows none"
        )


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
    """The uploads of a round such that their mean is a robust one; all of them are held at once.

    ``median`` and ``trimmed_mean`` (Yin et al., 2018): every client's numbers become that of all clients, coordinate by
    coordinate; of a tensor with ``sent_rows`` over those who sent the row. Trimming leaves out the largest and the
    smallest, of fewer than three clients none. ``norm_clip``: a client's change of what the ``server`` holds, over all
    its tensors, is scaled down to the median of the clients' norms. Clients that are not finite are left out, and all
    others weigh alike: who may lie about an upload may lie about its number of examples.

    Of a table held by rows a client's other rows are those of the ``server``, and count: where fewer than half of the
    clients move a row, its median is the row as it was. Such a table is gone over in parts of at most `PART_NUMBERS`
    numbers of all clients together.
    """
    finite = (upload for upload in map(finite_only, uploads) if len(upload.clients))
    held = [upload._replace(weights=(upload.weights > 0.0).to(upload.weights)) for upload in finite]
    if not held:
        return
    if kind == "norm_clip":
        yield from _clipped(held, server)
        return
    num_clients = sum(len(upload.clients) for upload in held)
    tensors, rows = {}, {}
    for name in held[0].tensors:
        if name in held[0].rows:
            row_R, value = _rows_for_all(held, name, kind, server)
            tensors[name], rows[name] = (one.expand(num_clients, *one.shape) for one in (value, row_R))
        else:
            tensors[name] = _one_for_all(held, name, kind)
    yield Upload(
        torch.cat([upload.clients for upload in held]),
        torch.cat([upload.weights for upload in held]),
        tensors,
        rows=rows,
        num_rows=held[0].num_rows,
        sent_rows={name: _stacked(held, "sent_rows", name) for name in held[0].sent_rows},
        finite=torch.ones(num_clients, dtype=torch.bool),
    )


def _stacked(held: Sequence[Upload], what: Literal["tensors", "sent_rows"], name: str) -> Tensor:
    return torch.cat([getattr(upload, what)[name] for upload in held])


def _one_for_all(held: Sequence[Upload], name: str, kind: RobustMean) -> Tensor:
    tensor = _stacked(held, "tensors", name)
    value = tensor.double()
    mark = _stacked(held, "sent_rows", name) if name in held[0].sent_rows else None
    if mark is not None:
        value = value.masked_fill(~mark.to(value.device)[..., None], torch.nan)
    every = _middle(value, kind).nan_to_num(nan=0.0).to(tensor.dtype).expand_as(tensor)
    return every if mark is None else every.masked_fill(~mark.to(tensor.device)[..., None], 0.0)


def _rows_for_all(held: Sequence[Upload], name: str, kind: RobustMean, server: Tree) -> tuple[Tensor, Tensor]:
    """(R,) the rows that anybody holds, and what they become."""
    base = _server_table(held[0], name, server)
    touched_I = torch.zeros(len(base), dtype=torch.bool, device=base.device)
    for upload in held:
        touched_I[upload.rows[name][upload.rows[name] >= 0]] = True
    row_R = touched_I.nonzero()[:, 0]
    num_clients = sum(len(upload.clients) for upload in held)
    part = max(1, PART_NUMBERS // (num_clients * max(1, base[0].numel())))
    found = [base[:0]]
    for row_P in row_R.split(part):
        value = base[row_P].double().expand(num_clients, len(row_P), *base.shape[1:]).clone()
        place_I = torch.full((len(base),), -1, device=base.device)
        place_I[row_P] = torch.arange(len(row_P), device=base.device)
        first = 0
        for upload in held:
            row_CR = upload.rows[name]
            place_CR = torch.where(row_CR >= 0, place_I[row_CR.clamp(min=0)], -1)
            client, at = (place_CR >= 0).nonzero(as_tuple=True)
            value[first + client, place_CR[client, at]] = upload.tensors[name][client, at].double()
            first += len(upload.clients)
        found.append(_middle(value, kind).to(base.dtype))
    return row_R, torch.cat(found)


def _middle(value: Tensor, kind: RobustMean) -> Tensor:
    """Median or trimmed mean over the first dimension, NaN left out."""
    ascending, count = value.sort(0).values, (~value.isnan()).sum(0, keepdim=True)  # NaN comes last
    if kind == "median":
        low, high = (ascending.gather(0, (place // 2).clamp(min=0))[0] for place in (count - 1, count))
        return low + 0.5 * (high - low)
    trimmed = (count >= 3).long()
    place = torch.arange(len(value), device=value.device).view(-1, *[1] * (value.dim() - 1))
    kept = (place >= trimmed) & (place < count - trimmed)  # left out, not taken off a sum in which the others drown
    return ascending.where(kept, 0.0).sum(0) / (count - 2 * trimmed)[0].clamp(min=1)


def _clipped(held: Sequence[Upload], server: Tree) -> Iterator[Upload]:
    changes = [_change(upload, server) for upload in held]
    norms = [
        torch.stack([_flat(value).square().sum(1).cpu() for value in change.values()]).sum(0).sqrt()
        for change in changes
    ]
    middle = _middle(torch.cat(norms), "median")
    for upload, change, norm_C in zip(held, changes, norms, strict=True):
        factor_C = (middle / norm_C.clamp(min=1e-300)).clamp(max=1.0)
        tensors = {}
        for name, tensor in upload.tensors.items():
            scale = factor_C.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
            kept = _base(upload, name, server).double() + scale * change[name]
            same = (scale == 1.0) | (change[name] == 0.0)
            tensors[name] = torch.where(same, tensor, kept.to(tensor.dtype))
        yield upload._replace(tensors=tensors, finite=torch.ones(len(upload.clients), dtype=torch.bool))


def _change(upload: Upload, server: Tree) -> Tree:
    """What each client changed of what the server holds, float64."""
    change = {}
    for name, tensor in upload.tensors.items():
        one = tensor.double() - _base(upload, name, server)
        for mark in (upload.sent_rows.get(name), upload.rows[name] >= 0 if name in upload.rows else None):
            if mark is not None:
                one = one.masked_fill(~mark.to(one.device).view(*mark.shape, *[1] * (one.dim() - mark.dim())), 0.0)
        change[name] = one
    return change


def _base(upload: Upload, name: str, server: Tree) -> Tensor:
    """What the server holds of a tensor, or of its rows that a client holds."""
    if name in upload.rows:
        return _server_table(upload, name, server)[upload.rows[name].clamp(min=0)]
    return server.get(name, upload.tensors[name].new_zeros(()))


def _server_table(upload: Upload, name: str, server: Tree) -> Tensor:
    """The whole table from which the rows of an upload differ: what was downloaded, or zeros."""
    if name in upload.num_rows:
        return upload.tensors[name].new_zeros(upload.num_rows[name], *upload.tensors[name].shape[2:])
    return server[name]


def finite_only(upload: Upload) -> Upload:
    """Of the clients whose tensors are finite."""
    kept_C = finite_clients(upload)
    return upload if kept_C.all() else upload_at(upload, kept_C)


def _row_means(total: Tensor, weight_I: Tensor, fallback: Tensor) -> Tensor:
    """Sums (I, ...) over their weights; rows without weight from ``fallback``."""
    weight = weight_I.view(-1, *[1] * (total.dim() - 1))
    return torch.where(weight > 0.0, total / weight, fallback.double())


def finite_clients(upload: Upload) -> Tensor:
    """(C,) bool: clients all of whose tensors are finite."""
    checked = upload if upload.finite is not None else with_finite(upload)[0]
    assert checked.finite is not None
    return checked.finite


def heard_clients(upload: Upload) -> torch.Tensor:
    """Numbers of the clients whose usable uploads are in ``upload``, each by itself or in a mean."""
    return upload.clients[finite_clients(upload)] if upload.mean_of is None else upload.mean_of
