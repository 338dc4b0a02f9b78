"""What crosses the wire: checked and counted in one place, for every method.

Sizes are those of the message a deployment would send: one safetensors blob per client and direction
(8 bytes header length, JSON header padded to 8 bytes, raw tensors), without transport framing.

Shape legend: C clients of a block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.federation.method import Download, Tree, Upload

_DTYPE_NAMES = {  # in the order of the format's dtype ranks: a blob holds higher ranks first
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
_DTYPE_RANK = {dtype: rank for rank, dtype in enumerate(_DTYPE_NAMES)}


class Traffic(NamedTuple):
    """Bytes of one client in one round, per direction; payload per tensor and the header of the message."""

    down: dict[str, int]
    up: dict[str, int]
    header_down: int
    header_up: int

    @property
    def bytes_down(self) -> int:
        return sum(self.down.values()) + self.header_down

    @property
    def bytes_up(self) -> int:
        return sum(self.up.values()) + self.header_up


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def header_bytes(tree: Tree) -> int:
    """Size of the safetensors header for ``tree`` in bytes, without building the blob.

    Tensors are laid out by descending dtype rank, then by name, as the format's writer does.
    """
    if not tree:
        return 0
    offset, header = 0, {}
    for name, tensor in sorted(tree.items(), key=lambda entry: (-_DTYPE_RANK[entry[1].dtype], entry[0])):
        end = offset + tensor_bytes(tensor)
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    length = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + (length + 7) // 8 * 8


def take_row(tree: Tree, row: int) -> Tree:
    """Row ``row`` of every tensor: what belongs to one client of a block."""
    return {name: tensor[row] for name, tensor in tree.items()}


def download_of(download: Download, row: int) -> Download:
    """The download of client ``row`` alone."""
    return download_at(download, slice(row, row + 1))


def download_to(download: Download, kept_C: Tensor) -> Download:
    """The download of a block as some of its clients got it; ``kept_C`` (C,) bool."""
    return download if kept_C.all() else download_at(download, kept_C.nonzero()[:, 0])


def download_at(download: Download, place: slice | Tensor) -> Download:
    """The download of the clients that stand at these rows of a block, in this order."""
    own = partial(_at, place=place)
    return download._replace(per_client=own(download.per_client), sent_rows=own(download.sent_rows))


def upload_of(upload: Upload, row: int) -> Upload:
    """The upload of client ``row`` alone: a block of one."""
    return upload_at(upload, slice(row, row + 1))


def upload_at(upload: Upload, place: slice | Tensor) -> Upload:
    """The upload of the clients at ``place`` of a block: rows, or (C,) bool."""
    own = partial(_at, place=place)
    known = {} if upload.finite is None else {"finite": upload.finite}
    heads: dict[str, Any] = dict(own({"clients": upload.clients, "weights": upload.weights, **known}))
    return upload._replace(
        **heads,
        tensors=own(upload.tensors),
        rows=own(upload.rows),
        payload=own(upload.payload),
        sent_rows=own(upload.sent_rows),
    )


def _at(tree: Tree, place: slice | Tensor) -> Tree:
    return {name: one[place if isinstance(place, slice) else place.to(one.device)] for name, one in tree.items()}


def joined(uploads: Sequence[Upload]) -> Upload:
    """Uploads of several blocks as that of one, in client order; tables are held in full (:func:`dense`).

    Who has no marks of a tensor that others mark has sent all of its rows.
    """
    if not uploads:
        return Upload(torch.zeros(0, dtype=torch.long), torch.zeros(0), {})
    assert not any(upload.rows for upload in uploads), "tables by rows are those of one block"
    client_C = torch.cat([upload.clients for upload in uploads])
    order_C = client_C.argsort()
    marked = sorted({name for upload in uploads for name in upload.sent_rows})
    in_order = torch.equal(order_C, torch.arange(len(order_C)))

    def whole(parts: Sequence[Tensor]) -> Tensor:
        tensor = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return tensor if in_order else tensor[order_C.to(tensor.device)]

    return Upload(
        client_C[order_C],
        whole([upload.weights for upload in uploads]),
        {name: whole([upload.tensors[name] for upload in uploads]) for name in uploads[0].tensors},
        sent_rows={name: whole([_marks(upload, name) for upload in uploads]) for name in marked},
    )


def _marks(upload: Upload, name: str) -> Tensor:
    given = upload.sent_rows.get(name)
    return torch.ones(upload.tensors[name].shape[:2], dtype=torch.bool) if given is None else given


def message(download: Download, row: int) -> Tree:
    """What client ``row`` of the block is sent: shared tensors and its own ones, marked rows only where marked."""
    one = download_of(download, row)
    return _marked({**one.shared, **take_row(one.per_client, 0)}, take_row(one.sent_rows, 0))


def received(download: Download, row: int) -> Download:
    """What client ``row`` of the block knows: a download of its own in which rows that it was not sent are zero."""
    one = download_of(download, row)
    marks = take_row(one.sent_rows, 0)
    return one._replace(
        shared={name: only_rows(tensor, marks.get(name)) for name, tensor in one.shared.items()},
        per_client={name: only_rows(tensor[0], marks.get(name))[None] for name, tensor in one.per_client.items()},
        sent_rows={},
    )


def only_rows(tensor: Tensor, mark: Tensor | None) -> Tensor:
    """``tensor`` with zeros where its leading dimensions are not marked; all of it without marks."""
    if mark is None:
        return tensor
    found, mark = torch.zeros_like(tensor), mark.to(tensor.device)
    found[mark] = tensor[mark]
    return found


def rows_with_anything(stacked: Tensor) -> Tensor:
    """(C,) bool on CPU: which of ``stacked[c]`` hold a number that is not 0. NaN is one.

    By the least and the largest: over floating-point numbers ``any`` takes four times as long.
    """
    ends = [torch.stack(torch.aminmax(part)) for part in stacked]
    return (torch.stack(ends) != 0).any(1).cpu() if ends else torch.zeros(0, dtype=torch.bool)


def measure(download: Download, upload: Upload) -> list[Traffic]:
    """Exact traffic of each client of a block, in the order of ``upload.clients``.

    A table that an upload holds by rows counts as a whole, since that is what travels; tensors with a ``payload`` count
    with it, and tensors with ``sent_rows`` with those. Every other tensor of a block has one size for all clients.
    """
    num_clients = len(upload.clients)
    down = [_down(download, row) for row in range(num_clients if download.sent_rows else 1)]
    down = down if download.sent_rows else down * num_clients
    up = [_up(download, upload, row) for row in range(num_clients if upload.sent_rows else 1)]
    up = up if upload.sent_rows else up * num_clients
    payload = {name: size_C.tolist() for name, size_C in upload.payload.items()}
    if not payload and not download.sent_rows and not upload.sent_rows:
        return [Traffic(down[0][0], up[0][0], down[0][1], up[0][1])] * num_clients
    return [
        Traffic(sizes_down, sizes_up | {name: sizes[row] for name, sizes in payload.items()}, header_down, header_up)
        for row, ((sizes_down, header_down), (sizes_up, header_up)) in enumerate(zip(down, up, strict=True))
    ]


def _down(download: Download, row: int) -> tuple[dict[str, int], int]:
    """Bytes per tensor and of the header of what client ``row`` of the block receives."""
    sent = message(download, row)
    return _sizes(sent) | download.payload, header_bytes(sent)


def _up(download: Download, upload: Upload, row: int) -> tuple[dict[str, int], int]:
    """Bytes per tensor, payloads apart, and of the header of what client ``row`` of the block sends."""
    whole = take_row(upload.tensors, row) | {name: _base(upload, download, name) for name in upload.rows}
    sent = _marked(whole, take_row(upload.sent_rows, row))
    return _sizes(sent), header_bytes(sent)


def _sizes(tree: Tree) -> dict[str, int]:
    return {name: tensor_bytes(tensor) for name, tensor in tree.items()}


def _marked(tree: Tree, marks: Tree) -> Tree:
    """The marked rows of the tensors that have marks, all others as they are."""
    return {name: tensor[marks[name].to(tensor.device)] if name in marks else tensor for name, tensor in tree.items()}


def dense(upload: Upload, download: Download) -> Upload:
    """The same upload with every table in full: (C, I, ...) where it was held by rows (C, R, ...)."""
    tensors = dict(upload.tensors)
    for name, row_CR in upload.rows.items():
        one = _base(upload, download, name)
        own = download.per_client.get(name)
        table = one.expand(len(row_CR), *one.shape).clone() if own is None else own.clone()
        client, place = (row_CR >= 0).nonzero(as_tuple=True)
        table[client, row_CR[client, place]] = upload.tensors[name][client, place]
        tensors[name] = table
    return upload._replace(tensors=tensors, rows={}, num_rows={})


def _base(upload: Upload, download: Download, name: str) -> Tensor:
    """The whole table (I, ...) in which the rows of an upload stand; of tables per client the first one."""
    if name in upload.num_rows:
        return upload.tensors[name].new_zeros(upload.num_rows[name], *upload.tensors[name].shape[2:])
    return download.shared[name] if name in download.shared else download.per_client[name][0]


def group_traffic(traffic: list[tuple[int, Traffic]]) -> list[dict]:
    """Records of ``{clients, down, up, header_down, header_up}``; clients with equal traffic share one record."""
    groups: dict[tuple, tuple[Traffic, list[int]]] = {}
    for client, one in traffic:
        key = (*one.down.items(), "up", *one.up.items(), one.header_down, one.header_up)
        groups.setdefault(key, (one, []))[1].append(client)
    return [{"clients": members, **one._asdict()} for one, members in groups.values()]


def check_upload(upload: Upload, local: Tree, block_clients: Tensor) -> None:
    """Assert what every upload must satisfy: clients of the block, a client axis, nothing that is local state.

    A non-finite upload is reported (:func:`with_finite`) and the method's to refuse, since it knows what to use
    instead; a malformed one is a bug.
    """
    present_C = torch.isin(block_clients, upload.clients)
    assert torch.equal(upload.clients, block_clients[present_C]), "an upload names other clients than its block"
    assert upload.weights.shape == upload.clients.shape, "one client weight per client"
    leaked = sorted(set(upload.tensors) & set(local))
    assert not leaked, f"local state in an upload: {leaked}"
    for name, tensor in upload.tensors.items():
        assert tensor.shape[:1] == upload.clients.shape, f"upload tensor {name} has no client axis"
    for name, row_CR in upload.rows.items():
        assert row_CR.shape == upload.tensors[name].shape[:2], f"one row number per row of {name}"
    for name, sent_CI in upload.sent_rows.items():
        assert sent_CI.shape == upload.tensors[name].shape[:2], f"one mark per row of {name}"
        assert not upload.tensors[name][~sent_CI.to(upload.tensors[name].device)].any(), f"unmarked rows of {name}"


def with_finite(upload: Upload) -> tuple[Upload, list[dict[str, Any]]]:
    """The upload with ``finite`` filled in, and ``client`` and ``tensors`` of every client with a non-finite one."""
    finite = {name: finite_rows(tensor) for name, tensor in upload.tensors.items()}
    all_C = torch.ones(len(upload.clients), dtype=torch.bool)
    for finite_C in finite.values():
        all_C &= finite_C
    bad = [
        {"client": int(upload.clients[row]), "tensors": [name for name in finite if not finite[name][row]]}
        for row in (~all_C).nonzero()[:, 0].tolist()
    ]
    return upload._replace(finite=all_C), bad


LARGEST_NORM = 1e18
"""Of a tensor of an upload: beyond it the square leaves float32, and no model could be run with it."""


def finite_rows(tensor: Tensor) -> Tensor:
    """(C,) bool, on the CPU: clients whose part of ``tensor`` (C, ...) is finite, with a norm up to `LARGEST_NORM`."""
    if not tensor.is_floating_point():
        return torch.ones(len(tensor), dtype=torch.bool)
    flat_CF = tensor.reshape(len(tensor), math.prod(tensor.shape[1:]))
    return (norms(flat_CF) <= LARGEST_NORM).cpu()  # what is not a number is not below either


def norms(value_CF: Tensor) -> Tensor:
    """(C,) the norms of rows, in float32 or better: infinite where a square leaves it."""
    dtype = torch.float32 if value_CF.dtype in (torch.float16, torch.bfloat16) else value_CF.dtype
    return torch.linalg.vector_norm(value_CF, dim=1, dtype=dtype)


def reference_of(tensor: Tensor, reference: Tensor | None, row_CR: Tensor | None) -> Tensor:
    """What a client started from, in the shape of its upload; zero where nothing was downloaded.

    ``reference`` (...) is shared or (C, ...) per client; ``row_CR`` (C, R) the rows of it that the upload holds.
    """
    if reference is None:
        return torch.zeros_like(tensor)
    base = reference.expand(len(tensor), *reference.shape) if reference.dim() < tensor.dim() else reference
    if row_CR is not None:
        base = base[torch.arange(len(row_CR), device=row_CR.device)[:, None], row_CR.clamp(min=0)]
    return base.to(tensor)
