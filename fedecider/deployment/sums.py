"""One secure sum after the rounds, of whole numbers that sites give once: a site's part and the server's.

The exchanges are those of `fedecider.deployment.secure`, under names of their own; masked numbers travel in parts, and
the sum goes to all sites that it is for. A site lost before all of its parts have come is left out. With too few sites
(`Summing.fewest`, or below the threshold) there is no sum, and they go on without it.

Shape legend: L numbers of one part.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedecider.deployment.messages import Channel, Message, pack, unpack
from fedecider.deployment.secure import ServerSums, SiteSums, client_numbers
from fedecider.federation.method import Tree
from fedecider.federation.record import write_bytes, write_json
from fedecider.federation.secure_rounds import SecureSums
from fedecider.federation.secure_sum import check_survivors
from fedecider.running.damage import read_object

SCRATCH = "sum_parts"
"""Folder of the server, while parts come in."""

logger = logging.getLogger(__name__)


class Kinds(NamedTuple):
    """Of the messages of one sum, in their order."""

    keys: str
    shares: str
    part: str
    unmask: str
    sum: str


def kinds_of(what: str) -> Kinds:
    """Those of the sum of every ``what``."""
    return Kinds(f"{what}_keys", f"{what}_shares", f"{what}s", f"{what}_unmask", f"{what}_sum")


class Numbers(NamedTuple):
    """What a site gives to a sum, and what it makes of it."""

    num_parts: int
    part_of: Callable[[int], Tensor]
    """1, 2, ... -> int64 (L,), the same whenever it is called: masks hide one value alone."""
    read: Callable[[Message, Sequence[int]], Any]
    """The sum in a message, over these clients; ``ValueError`` where it is none."""
    use: Callable[[Any, Sequence[int]], None]
    """What it read and who is in it. It raises nothing: the answer would tell of the own numbers."""


@dataclass
class SiteSum:
    """A site's part in one sum."""

    sums: SiteSums
    kinds: Kinds
    folder: Path
    """Where a file says with whom this site is in a sum, and its SHA-256: sums over different sites would tell single
    numbers by their difference, and answers to many sums the own ones, so it takes part in one alone."""
    run: str
    """Whose sum this is."""
    group: Sequence[int]
    """The clients that it may be over."""
    fewest: int
    """Of them that it must be over."""
    numbers: Numbers

    @property
    def file(self) -> Path:
        return self.folder / f"summed_{self.kinds.part}.json"

    def answer(self, asked: Message) -> Message:
        """The answer to one message of its kinds."""
        calls = (self.sums.announce, self.sums.share, self._send, self._reveal, self._keep)
        return dict(zip(self.kinds, calls, strict=True))[asked.kind](asked)

    def _send(self, asked: Message) -> Message:
        part, last = asked.facts.get("part"), self.numbers.num_parts
        if type(part) is not int or not 1 <= part <= last:
            raise ValueError(f"got part {part!r} of the {self.kinds.part}, expected a number from 1 to {last}")
        masked_L = self.sums.masked(asked, self.numbers.part_of(part), part)
        return Message(asked.kind, asked.round, {"masked": masked_L})

    def _reveal(self, asked: Message) -> Message:
        survivors, known = self._in_one_sum(asked.facts.get("survivors"))
        told = self.sums.reveal(asked)
        self._note(survivors, known or "")
        return told

    def _keep(self, asked: Message) -> Message:
        """The answer is the same whether the sum can be used or not: it would tell of the own numbers."""
        clients, known = self._in_one_sum(asked.facts.get("clients"))
        total, digest = self.numbers.read(asked, clients), _digest(asked, clients)
        if self.sums.client in clients and known is None:
            raise ValueError(
                f"got a sum with the {self.kinds.part} of this site, expected one that it has helped to open: it was "
                "started again before that, and goes on without the others"
            )
        if known not in (None, "", digest):
            raise ValueError(
                f"got a second sum of {self.kinds.part}, expected the first one again: a site takes one alone"
            )
        self._note(clients, digest)
        self.numbers.use(total, clients)
        return Message(asked.kind, asked.round)

    def _in_one_sum(self, given: object) -> tuple[list[int], str | None]:
        """The clients of a sum, and its SHA-256: empty before it has come, None if this site is in no sum yet."""
        clients, before = sorted(set(client_numbers(given))), self._noted()
        if not set(clients) <= set(self.group) or len(clients) < self.fewest:
            raise ValueError(
                f"got a sum of {self.kinds.part} over the clients {clients}, expected {self.fewest} at least of "
                f"{list(self.group)}: over fewer each would hold another's as they are"
            )
        if before and before["clients"] != clients:
            raise ValueError(
                f"got a sum of {self.kinds.part} over the clients {clients} after one over {before['clients']}, "
                "expected the same: two sums would tell single numbers by their difference"
            )
        return clients, before["sum"] if before else None

    def _noted(self) -> dict[str, Any] | None:
        found = read_object(self.file, {"run": str, "clients": list, "sum": str}) if self.file.is_file() else None
        if found and found["run"] != self.run:
            raise ValueError(
                f"got a {self.file.name} of another run, expected one of run {self.run}: start with another output"
            )
        return found

    def _note(self, clients: Sequence[int], digest: str) -> None:
        write_json(self.file, {"run": self.run, "clients": clients, "sum": digest})


class Summing(NamedTuple):
    """What a server knows of one sum."""

    kinds: Kinds
    purpose: str
    clients: Sequence[int]
    """Those that it is told, and over."""
    fewest: int
    sizes: Sequence[int]
    """L of each part."""
    tensors_of: Callable[[Iterator[Tensor]], Tree]
    """The opened parts, in their order -> what is told."""
    without: str
    """What ensembles do that get no sum."""
    among: Sequence[int] = ()
    """The clients that it is over where those are not all."""
    requests: Mapping[int, Message] = {}
    """What the messages that ask for parts say besides, such as a download."""


def site_sums(seed: int, client: int, purpose: str) -> SiteSums:
    """A site's secrets of one sum."""
    return SiteSums(SecureSums(seed), client, purpose)


def shared_sum(channel: Channel, seed: int, one: Summing, round: int, file: Path) -> Message | None:
    """The sum that the clients of ``one`` were told, kept in ``file`` for a run that goes on; None if there is none."""
    begun = file.with_suffix(".json")
    try:
        if not file.is_file():
            kinds = (one.kinds.keys, one.kinds.shares, one.kinds.unmask)
            server = ServerSums(SecureSums(seed), channel, one.purpose, kinds)
            write_bytes(file, pack(_summed(server, one, round, file.parent / SCRATCH, begun)))
        begun.unlink(missing_ok=True)
        told = unpack(file.read_bytes(), channel.config.max_bytes)._replace(round=round)
    except ValueError as error:
        names = ", ".join(channel.names[client] for client in one.clients)
        reason = f"ensembles of {names} {one.without}: {error}"
        logger.warning(reason)
        for client in one.clients:
            channel.refuse(client, reason)
        return None
    for client, answer in channel.ask(round, dict.fromkeys(one.clients, told)).items():
        if answer.kind != one.kinds.sum:
            channel.refuse(client, f"got {answer.kind!r}, expected the sum of {one.kinds.part} to be kept")
    return told


def _summed(server: ServerSums, one: Summing, round: int, scratch: Path, begun: Path) -> Message:
    """The sum over those whose parts have all come, as the message that tells it.

    Parts wait on disk until it is known whose they are: masks of those who are lost are taken off for good. Before they
    are, ``begun`` says who is in the sum: sites open no other one, so a server that is killed asks the same again.

    Raises:
        ValueError: too few are left, of all clients, or do not answer when masks are opened.
    """
    before = read_object(begun, {"clients": list})["clients"] if begun.is_file() else None
    with _emptied(scratch):
        facts = server.begin(round, before or one.among or one.clients)
        there = list(facts)
        place = f"{scratch}/{{}}.{{}}.npy".format
        parts = range(1, len(one.sizes) + 1)
        for part in parts:
            for client, masked_L in _received(server.channel, one, facts, there, part, round).items():
                np.save(place(client, part), masked_L.numpy())
            there = [client for client in there if Path(place(client, part)).is_file()]
        check_survivors(server.rules_of(round, one.among or one.clients), there)
        _check_there(there, one, before)
        write_json(begun, {"clients": there})
        opened = server.opened(round, there)

        def total_of(part: int) -> Tensor:
            return opened(reduce(torch.add, (torch.from_numpy(np.load(place(client, part))) for client in there)), part)

        tensors = one.tensors_of(map(total_of, parts))
    return Message(one.kinds.sum, round, tensors, {"run": server.channel.run, "clients": there})


def _check_there(there: Sequence[int], one: Summing, before: Sequence[int] | None) -> None:
    """``ValueError`` for a sum that sites would not open."""
    if len(there) < one.fewest:
        raise ValueError(
            f"got the {one.kinds.part} of {len(there)} of {len(one.clients)} sites, expected {one.fewest} at least: of "
            "fewer, each would hold another's as they are"
        )
    if before is not None and list(there) != list(before):
        raise ValueError(
            f"got the {one.kinds.part} of the clients {list(there)}, expected all of {list(before)}, whose sum was "
            "begun before the server stopped: sites open no other one"
        )


@contextmanager
def _emptied(scratch: Path) -> Iterator[None]:
    """An empty folder for a while; what a killed server has left there goes too."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _received(
    channel: Channel,
    one: Summing,
    facts: Mapping[int, Mapping[str, object]],
    clients: Sequence[int],
    part: int,
    round: int,
) -> dict[int, Tensor]:
    """One part of the masked numbers of those who send it."""
    size, plain = one.sizes[part - 1], Message(one.kinds.part, round)
    requests = {}
    for client in clients:
        base = one.requests.get(client, plain)
        added = {"run": channel.run, "part": part, **facts[client]}
        requests[client] = base._replace(kind=one.kinds.part, facts={**base.facts, **added})

    def masked(client: int, answer: Message) -> Tensor:
        masked_L = answer.tensors.get("masked")
        if answer.kind != one.kinds.part or masked_L is None or not is_whole(masked_L) or masked_L.shape != (size,):
            raise ValueError(f"got {answer.kind!r}, expected {size:,} masked {one.kinds.part}")
        return masked_L

    asked = channel.ask_with_download if one.requests else channel.ask
    return channel.read(asked(round, requests), masked)


def _digest(asked: Message, clients: Sequence[int]) -> str:
    """SHA-256 of a sum and of who is in it."""
    return hashlib.sha256(pack(Message("sum", 0, asked.tensors, {"clients": clients}))).hexdigest()


def is_whole(tensor: Tensor) -> bool:
    """Whether these are numbers of a sum."""
    return tensor.dtype == torch.int64
