"""What server and sites say to each other, and the server's channel to them: one safetensors blob a message.

A blob holds the tensors, whose bytes `fedecider.federation.wire` counts, and a head in the metadata: kind, round and a
few facts as JSON. One message serves all clients of a site that take part in a round, in ascending order. Shared
tensors travel once, those of single clients are stacked. Where only marked rows of a tensor travel, the marks do too,
one bit each. So a message can be read, and checked, without any other.

Shape legend: C clients of a message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedecider.bounds import NotNegative, OneOrMore, dataclass
from fedecider.federation.method import Download, Tree, Upload
from fedecider.federation.record import plain
from fedecider.federation.wire import download_at

FORMAT = 2
"""Raise it when messages are laid out in another way, so that sites of another version are refused."""
MARKS = "marks:"
"""What the names of packed marks start with."""
MOST_EXAMPLES = 2**31
"""No client has more: a weight beyond it would be the only one that counts in a mean, or infinite."""
MOST_HEADER_BYTES = 4 << 20
"""The header of the largest adapters has some 100 kB. Read as JSON it takes up to thirty times its size in memory."""
STARTED = "started"
"""Name of the stamp by which two starts of one project differ, in messages and in the server's ``run.json``."""
Read = TypeVar("Read")
Transport = Callable[[Mapping[int, bytes], float], Mapping[int, bytes]]
"""(site -> message, seconds to wait) -> site -> answer, of the sites that answered in time."""
MOST_REASON = 500
"""Characters of a reason that are kept."""
RESEND = "resend"
"""Kind of the answer of a site that lacks the download which the server believes it has."""
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


def of_download(kind: str, round: int, download: Download, rows: Sequence[int], facts: Mapping[str, Any]) -> Message:
    """The message that sends the clients at ``rows`` of a block their download.

    Of a shared tensor with marks the rows travel that any of them may have.
    """
    own = download_at(download, torch.tensor(rows))
    marks = {name: mark if name in own.per_client else mark.any(0) for name, mark in own.sent_rows.items()}
    sent, shapes = _marked({**own.shared, **own.per_client}, marks)
    return Message(kind, round, sent, {**facts, "marks": shapes, "per_client": sorted(own.per_client)})


def to_download(one: Message, most_bytes: int) -> Download:
    """What the clients know then: rows that they were not sent are zero (`fedecider.federation.wire.received`).

    Raises:
        ValueError: marks and rows do not belong together, or a tensor would have more than ``most_bytes`` in full.
    """
    tensors = _unmarked(one, None, most_bytes)
    names = one.facts.get("per_client")
    if not (isinstance(names, list) and all(isinstance(name, str) and name in tensors for name in names)):
        raise ValueError(f"got the names {names!r} of what is each client's alone, expected names of tensors")
    shared = {name: tensor for name, tensor in tensors.items() if name not in names}
    return Download(shared, {name: tensor for name, tensor in tensors.items() if name in names})


def of_upload(round: int, upload: Upload, facts: Mapping[str, Any]) -> Message:
    """The message that sends an upload, whose tables are held in full (`fedecider.federation.wire.dense`)."""
    assert not upload.rows, "whole tables travel"
    sent, shapes = _marked(upload.tensors, upload.sent_rows)
    own = {"clients": upload.clients.tolist(), "weights": upload.weights.tolist(), "marks": shapes}
    return Message("upload", round, sent, {**facts, **own})


def to_upload(one: Message, clients: Sequence[int], round: int, like: Tree) -> Upload:
    """The upload of a site's clients, if it is what is expected of these ``clients`` in ``round``.

    ``like``: an upload of one client as it must look (`FederatedMethod.upload_like`). Numbers that are not finite are
    left to the method, which knows what to use instead.

    Raises:
        ValueError: it is that of other clients, of another round, or has other names, shapes or kinds of number.
    """
    facts, expected = one.facts, list(clients)
    if (one.kind, one.round) != ("upload", round) or not _is_list_of(facts.get("clients"), expected):
        raise ValueError(
            f"got {one.kind!r} of {_clients_text(facts.get('clients'))} for round {one.round}, expected the upload of "
            f"{_clients_text(expected)} for round {round}"
        )
    weights = facts.get("weights")
    if not isinstance(weights, list) or len(weights) != len(expected):
        raise ValueError(f"got the weights {str(weights)[:40]!r}, expected one of each client")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST_EXAMPLES:
            raise ValueError(f"got the weight {str(weight)[:40]!r}, expected a number from 0 to {MOST_EXAMPLES:,}")
    like = {name: tensor.expand(len(expected), *tensor.shape) for name, tensor in like.items()}
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
    marks = {name: _mark(one, name) for name in facts["marks"]}
    return Upload(torch.tensor(expected), torch.tensor([float(weight) for weight in weights]), tensors, sent_rows=marks)


def own_upload(one: Message, most_bytes: int) -> Upload:
    """The upload in a message that this party has made itself."""
    like = {name: tensor[0] for name, tensor in _unmarked(one, None, most_bytes).items()}
    return to_upload(one, one.facts["clients"], one.round, like)


def download_digest(one: Message) -> str:
    """SHA-256 over the tensors of a message, and how they are laid out: what a site keeps between two tasks."""
    parts = {name: one.facts[name] for name in ("marks", "per_client")}
    return hashlib.sha256(pack(Message("download", 0, one.tensors, parts))).hexdigest()


@dataclass(frozen=True)
class DeploymentConfig:
    """What a server waits for and takes.

    Args:
        deadline_s: The number of seconds that sites have for an answer; 0 waits for all of them, however long.
        min_clients: The smallest number of uploads that a round goes on with.
        max_megabytes: The size of the largest message that is looked at.
    """

    deadline_s: NotNegative = 0.0
    min_clients: OneOrMore = 1
    max_megabytes: OneOrMore = 2048

    @property
    def max_bytes(self) -> int:
        return self.max_megabytes << 20


@dataclasses.dataclass
class Channel:
    """The channel to the sites: what it told of the present round, and what it has carried so far."""

    transport: Transport
    config: DeploymentConfig
    run: str
    """Fingerprint of the configuration: sites of another run refuse."""
    names: Sequence[str]
    """Of the sites."""
    refused: list[dict] = field(default_factory=list)
    """Of the present round: who (:meth:`who`) and ``reason``."""
    carried: list[dict[str, Any]] = field(default_factory=list)
    """``round``, ``kind``, who, ``bytes_down``, ``bytes_up`` of every message, in the order of the answers."""
    holds: dict[int, str] = field(default_factory=dict)
    """site -> digest of the download that it says it has."""
    hosts: Sequence[Sequence[int]] = ()
    """The clients of each site, ascending; empty where each site is the client of its number."""
    started: str = ""
    """Drawn when the run was started, kept when it is resumed: what sites hold of another start is not gone on with."""

    def __post_init__(self) -> None:
        self.hosts = self.hosts or [[site] for site in range(len(self.names))]
        self.site_of = {client: site for site, hosted in enumerate(self.hosts) for client in hosted}

    @property
    def hosts_several(self) -> bool:
        """Whether a site has more than one client."""
        return any(len(hosted) > 1 for hosted in self.hosts)

    def ask(self, round: int, requests: Mapping[int, Message]) -> dict[int, Message]:
        """The readable answers, by site in ascending order; all others are refused."""
        start = {STARTED: self.started} if self.started else {}
        sent = {
            site: pack(request._replace(facts={**request.facts, **start})) for site, request in sorted(requests.items())
        }
        answers = self.transport(sent, self.config.deadline_s)
        found = {}
        for site, blob in sent.items():
            kind, answer = requests[site].kind, answers.get(site)
            size = len(answer) if answer is not None else 0
            self.carried.append(
                {"round": round, "kind": kind, **self.who(site), "bytes_down": len(blob), "bytes_up": size}
            )
            try:
                if answer is None:
                    wait_s = self.config.deadline_s
                    raise ValueError(f"no answer to {kind}" + (f" within {wait_s:g} s" if wait_s else ""))
                one = unpack(answer, self.config.max_bytes)
                if one.kind == "error":
                    raise ValueError(f"the site says: {str(one.facts.get('reason'))[:300]}")
                found[site] = one
            except ValueError as error:
                self.refuse(site, str(error))
        return found

    def ask_with_download(self, round: int, requests: Mapping[int, Message]) -> dict[int, Message]:
        """The same for messages of `of_download`, which go to those who do not hold it already, or no longer do."""
        short, whole = {}, {}
        for site, one in requests.items():
            digest = download_digest(one)
            whole[site] = one._replace(facts={**one.facts, "digest": digest})
            held = self.holds.get(site) == digest
            short[site] = Message(one.kind, round, {}, {**whole[site].facts, "held": True}) if held else whole[site]
            self.holds[site] = digest
        answers = self.ask(round, short)
        again = {site: whole[site] for site, answer in answers.items() if answer.kind == RESEND}
        return dict(sorted({**answers, **self.ask(round, again)}.items())) if again else answers

    def read(self, answers: Mapping[int, Message], what: Callable[[int, Message], Read]) -> dict[int, Read]:
        """``what`` (site, answer) makes of answers; those of which it raises ``ValueError`` are refused."""
        found = {}
        for site, answer in answers.items():
            try:
                found[site] = what(site, answer)
            except ValueError as error:
                self.refuse(site, str(error))
        return found

    def refuse(self, site: int, reason: str) -> None:
        seen = "".join(one if one.isprintable() else " " for one in reason)  # a site may have written parts of it
        self.refused.append({**self.who(site), "reason": " ".join(seen.split())[:MOST_REASON]})
        self.holds.pop(site, None)  # who knows what it has now

    def who(self, site: int) -> dict[str, Any]:
        """How records name a site: its client, or its first one and its own name where it hosts several."""
        first, *others = self.hosts[site]
        return {"client": first, **({"site": self.names[site]} if others else {})}

    def rows_by_site(self, clients: Sequence[int]) -> dict[int, list[int]]:
        """site -> places of its clients among these."""
        found: dict[int, list[int]] = {}
        for row, client in enumerate(clients):
            found.setdefault(self.site_of[client], []).append(row)
        return found


def _marked(tensors: Tree, marks: Tree) -> tuple[Tree, dict[str, list[int]]]:
    """Tensors as they travel, with the bits of their marks; and the shapes of these."""
    sent = {
        name: tensor[marks[name].to(tensor.device)] if name in marks else tensor for name, tensor in tensors.items()
    }
    sent |= {MARKS + name: _bits(mark) for name, mark in marks.items()}
    return sent, {name: list(mark.shape) for name, mark in marks.items()}


def _is_list_of(given: Any, expected: Sequence[int]) -> bool:
    """Whether these very numbers were told; ``[True]`` and ``[1.0]`` are not ``[1]``."""
    return isinstance(given, list) and given == list(expected) and all(type(one) is int for one in given)


def _clients_text(clients: Any) -> str:
    if isinstance(clients, list) and len(clients) == 1:
        return f"client {str(clients[0])[:40]}"
    count = f" ({len(clients)} of them)" if isinstance(clients, list) else ""
    return f"clients {str(clients)[:40]}{count}"


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
        if like is not None and (name not in like or list(like[name].shape[:2]) != shape):  # clients, rows
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
