"""What server and sites say to each other: one safetensors blob a message, looked at before anything is believed.

A blob is what `fedecider.federation.wire` counts, and a head: kind, round and a few facts as JSON in the metadata. Of
tensors whose marked rows alone travel the marks travel too, a bit each, so that a message can be read by itself.

Shape legend: C clients of a block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedecider.federation.method import Download, Tree, Upload
from fedecider.federation.record import plain
from fedecider.federation.wire import dense, message, take_row

FORMAT = 1
"""Raise it when messages are laid out in another way, so that sites of another version are refused."""
MARKS = "marks:"
"""What the names of packed marks start with."""
MOST_EXAMPLES = 2**31
"""No client has more: a weight beyond it would be the only one that counts in a mean, or infinite."""
MOST_HEADER_BYTES = 4 << 20
"""Of the largest adapters it has some 100 kB; as JSON that is read it takes up to thirty times its size."""
RESEND = "resend"
"""Kind of the answer of a site that does not hold the download which the server thinks it has."""
_HEAD = "fedecider"


class Message(NamedTuple):
    """One message: ``kind`` says what is asked or answered, ``facts`` is all of it that is no tensor."""

    kind: str
    round: int
    tensors: Tree = {}  # noqa: RUF012 (never written to)
    facts: Mapping[str, Any] = {}


def pack(one: Message) -> bytes:
    """The blob that travels."""
    head = {"format": FORMAT, "kind": one.kind, "round": one.round, "facts": plain(dict(one.facts))}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in one.tensors.items()}
    return save(tensors, metadata={_HEAD: json.dumps(head, allow_nan=False)})


def unpack(blob: bytes, most_bytes: int) -> Message:
    """What :func:`pack` made; tensors are allocated only when sizes and places add up to the blob's length.

    Raises:
        ValueError: the blob is larger than ``most_bytes``, or no message of this version.
    """
    if len(blob) > most_bytes:
        raise ValueError(f"got a message of {len(blob):,} bytes, expected at most {most_bytes:,}")
    try:
        length = int.from_bytes(blob[:8], "little")
        if length > min(len(blob) - 8, MOST_HEADER_BYTES):
            raise ValueError(f"its header is cut off, or larger than {MOST_HEADER_BYTES:,} bytes")
        head = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"][_HEAD])
        if head["format"] != FORMAT:
            raise ValueError(f"it has format {head['format']}, expected {FORMAT}: install one version everywhere")
        kind, round, facts = head["kind"], head["round"], head["facts"]
        if not (isinstance(kind, str) and type(round) is int and 0 <= round <= 2**31 and isinstance(facts, dict)):
            raise ValueError("its head has other kinds of values")
        return Message(kind, round, load(blob), facts)
    except (KeyError, TypeError, ValueError, RecursionError, RuntimeError, OverflowError, SafetensorError) as error:
        raise ValueError(f"got a blob that is no message ({type(error).__name__}: {error}), expected one") from error


def of_download(kind: str, round: int, download: Download, row: int, facts: Mapping[str, Any]) -> Message:
    """The message that sends client ``row`` of a block its download."""
    marks = take_row(download.sent_rows, row)
    sent = {**message(download, row), **{MARKS + name: _bits(mark) for name, mark in marks.items()}}
    shapes = {name: list(mark.shape) for name, mark in marks.items()}
    return Message(kind, round, sent, {**facts, "marks": shapes, "per_client": sorted(download.per_client)})


def to_download(one: Message, most_bytes: int) -> Download:
    """What the client knows then: rows that it was not sent are zero (`fedecider.federation.wire.received`).

    Raises:
        ValueError: marks and rows do not belong together, or a tensor would have more than ``most_bytes`` in full.
    """
    tensors = _unmarked(one, None, most_bytes)
    names = one.facts.get("per_client")
    if not (isinstance(names, list) and all(isinstance(name, str) and name in tensors for name in names)):
        raise ValueError(f"got the names {names!r} of what is this client's alone, expected names of tensors")
    shared = {name: tensor for name, tensor in tensors.items() if name not in names}
    return Download(shared, {name: tensor[None] for name, tensor in tensors.items() if name in names})


def of_upload(round: int, upload: Upload, download: Download, facts: Mapping[str, Any]) -> Message:
    """The message that sends the upload of a block of one client; tables that it holds by rows travel whole."""
    whole = dense(upload, download)
    assert len(whole.clients) == 1, "a message is one client's"
    marks = take_row(whole.sent_rows, 0)
    tensors = take_row(whole.tensors, 0)
    sent = {name: tensor[marks[name]] if name in marks else tensor for name, tensor in tensors.items()}
    sent |= {MARKS + name: _bits(mark) for name, mark in marks.items()}
    shapes = {name: list(mark.shape) for name, mark in marks.items()}
    own = {"client": int(whole.clients[0]), "weight": float(whole.weights[0]), "marks": shapes}
    return Message("upload", round, sent, {**facts, **own})


def to_upload(one: Message, client: int, round: int, like: Tree) -> Upload:
    """The upload of one client, if it is what is expected of ``client`` in ``round``.

    ``like``: an upload as it must look (`FederatedMethod.upload_like`). Numbers that are not finite are left to the
    method, which knows what to use instead.

    Raises:
        ValueError: it is another client's, of another round, or has other names, shapes or kinds of number.
    """
    facts = one.facts
    if (one.kind, one.round, facts.get("client")) != ("upload", round, client):
        raise ValueError(
            f"got {one.kind!r} of client {facts.get('client')!r} for round {one.round}, expected the upload of client "
            f"{client} for round {round}"
        )
    weight = facts.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_EXAMPLES:
        raise ValueError(f"got the weight {str(weight)[:40]!r}, expected a number from 0 to {MOST_EXAMPLES:,}")
    tensors = _unmarked(one, like, max((tensor.nbytes for tensor in like.values()), default=0))
    if tensors.keys() != like.keys():
        more, missing = sorted(tensors.keys() - like.keys())[:3], sorted(like.keys() - tensors.keys())[:3]
        raise ValueError(f"got tensors that nobody asked for {more} and none for {missing}, expected all and no others")
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise ValueError(
                f"got {tensor.dtype} {tuple(tensor.shape)} for {name}, expected {like[name].dtype} "
                f"{tuple(like[name].shape)}"
            )
    marks = {name: _mark(one, name)[None] for name in facts["marks"]}
    stacked = {name: tensor[None] for name, tensor in tensors.items()}
    return Upload(torch.tensor([client]), torch.tensor([float(weight)]), stacked, sent_rows=marks)


def own_upload(one: Message, most_bytes: int) -> Upload:
    """The upload in a message that this party has made itself."""
    return to_upload(one, one.facts["client"], one.round, _unmarked(one, None, most_bytes))


def _unmarked(one: Message, like: Tree | None, most_bytes: int) -> Tree:
    """All tensors in full, zeros where rows were not sent; with ``like`` no marks but of those tensors' rows."""
    shapes = one.facts.get("marks")
    if not isinstance(shapes, dict):
        raise ValueError("got no marks, expected them, if none then {}")
    for name, shape in shapes.items():
        if not (isinstance(shape, list) and shape and all(type(size) is int and size >= 0 for size in shape)):
            raise ValueError(f"got marks of {name} of shape {str(shape)[:40]!r}, expected sizes")
        if name not in one.tensors or MARKS + name not in one.tensors:
            raise ValueError(f"got marks of {name} without its rows, expected both")
        if like is not None and (name not in like or list(like[name].shape[: len(shape)]) != shape):
            raise ValueError(f"got marks of shape {shape} for {name}, expected those of its rows")
    full = {}
    for name, tensor in one.tensors.items():
        if name.startswith(MARKS):
            continue
        if name in shapes:
            mark = _mark(one, name)
            if tensor.dim() == 0 or len(tensor) != int(mark.sum()):
                raise ValueError(f"got {tuple(tensor.shape)} for {name}, expected its {int(mark.sum())} marked rows")
            size = math.prod((*mark.shape, *tensor.shape[1:])) * tensor.element_size()
            if size > most_bytes:  # no rows at all may be of any width
                raise ValueError(f"got {name}, which would have {size:,} bytes, expected at most {most_bytes:,}")
            full[name] = torch.zeros(*mark.shape, *tensor.shape[1:], dtype=tensor.dtype)
            full[name][mark] = tensor
        else:
            full[name] = tensor
    return full


def _bits(mark: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mark.cpu().numpy().reshape(-1)))


def _mark(one: Message, name: str) -> Tensor:
    shape, bits = one.facts["marks"][name], one.tensors[MARKS + name]
    if bits.dtype != torch.uint8 or bits.dim() != 1:
        raise ValueError(f"got marks of {name} that are none, expected bits")
    size = math.prod(shape)
    if len(bits) != -(-size // 8):
        raise ValueError(f"got {len(bits)} bytes of marks for {name}, expected {-(-size // 8)}")
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=size).astype(bool)).view(*shape)
