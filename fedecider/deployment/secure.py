"""Secure sums between machines: the steps of `fedecider.federation.secure_sum` as messages of a deployment.

A round then has four exchanges: ``keys`` and ``shares`` before the training, ``train`` whose answer is masked, and
``unmask`` when uploads are in. A site keeps its secrets in memory alone, drawn by the operating system: one that is
started again within a round has dropped out of it. Shares travel to their holders with the message that asks to train.

Shape legend: C clients of a cohort, L numbers of an upload.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedecider.deployment.messages import Channel, Message
from fedecider.federation import secure_rounds, secure_sum
from fedecider.federation.channel import AggregationBackend, Sent
from fedecider.federation.method import Download, Tree, Upload
from fedecider.federation.secure_rounds import sends
from fedecider.federation.secure_sum import announce, masked, reveal, share
from fedecider.federation.wire import dense

KEYS, SHARES, UNMASK = "keys", "shares", "unmask"


@dataclass
class SiteSums:
    """A site's part of the sum of the present round."""

    sums: secure_rounds.SecureSums
    client: int
    purpose: str = secure_rounds.PURPOSE
    round: int = 0
    member: secure_sum.Member | None = None
    rules: secure_sum.Rules | None = None
    keys: Mapping[int, secure_sum.PublicKeys] = field(default_factory=dict)
    sent_L: Tensor | None = None
    """What it has sent, before the masks."""
    senders: frozenset[int] | None = None
    """Whose shares came with the first question to mask: the difference between two sets of them would be a mask."""

    def announce(self, asked: Message) -> Message:
        """Step 1, with new secrets whenever it is asked for."""
        self.round, self.rules, self.sent_L, self.senders = asked.round, None, None, None
        self.member = secure_sum.join(self.client, secrets.token_bytes)
        return Message(asked.kind, asked.round, {"keys": _bytes(b"".join(announce(self.member)))})

    def share(self, asked: Message) -> Message:
        """Step 2, for all who have announced keys."""
        member = self._member(asked)
        clients = client_numbers(asked.facts.get("clients"))
        rows = asked.tensors.get("keys")
        if rows is None or rows.dtype != torch.uint8 or rows.shape != (len(clients), 3 * secure_sum.KEY_BYTES):
            raise ValueError("got no public keys of the clients, expected 96 bytes of each")
        self.sums.check_all(asked.round, clients)
        keys = {client: _public_keys(row) for client, row in zip(clients, rows, strict=True)}
        if keys.get(self.client) != announce(member):
            raise ValueError("got other keys for this site than it has announced, refused")
        if self.rules is not None:
            raise ValueError("got a second list of keys for one round, expected one: secrets are shared once")
        self.keys = keys
        self.rules = secure_sum.rules_for(
            clients, self.sums.seed, self.purpose, asked.round, threshold=self.sums.threshold
        )
        sealed, self.member = share(self.rules, member, self.keys, secrets.token_bytes)
        return Message(asked.kind, asked.round, {str(client): _bytes(one) for client, one in sealed.items()})

    def check(self, asked: Message) -> None:
        """``ValueError`` where this site cannot mask: before it trains."""
        self._member(asked)
        if self.rules is None:
            raise ValueError(f"got no keys of the others for round {asked.round}, expected them before {asked.kind}")

    def mask(self, asked: Message, upload: Upload, download: Download) -> Upload:
        """Step 3: what leaves the site; the client weight is in it, and no longer beside it."""
        self.check(asked)
        assert self.rules is not None
        numbers = secure_rounds.fixed_point(dense(upload, download), len(self.rules.cohort))
        number_L, which = secure_rounds.flat(numbers), sends(self.sums.own_rows, numbers)
        if self.sent_L is not None and not torch.equal(self.sent_L, number_L):
            raise ValueError(
                "got a second training of one round with another result, refused: the same masks hide one upload alone"
            )
        tensors = secure_rounds.unflat(self.masked(asked, number_L, sends=which), numbers)
        self.sent_L = number_L
        told = {name: self.sums.own_rows[name][upload.clients] for name in upload.sent_rows}
        marks = told | {secure_rounds.ROW_WEIGHTS + name: mark for name, mark in told.items()}
        sent = {name: tensor[None] for name, tensor in tensors.items()}
        return Upload(upload.clients, torch.ones(1), sent, sent_rows=marks)

    def masked(self, asked: Message, number_L: Tensor, part: int = 0, sends: secure_sum.Sends | None = None) -> Tensor:
        """``number_L`` under the masks of one ``part``, which hide these numbers and never others."""
        self.check(asked)
        assert self.rules is not None
        sealed = _sealed(asked.facts.get("sealed"))
        if self.senders not in (None, sealed.keys()):
            raise ValueError(
                f"got shares of the clients {sorted(sealed)} after those of {sorted(self.senders or ())}, expected the "
                "same of one sum: the difference would be a mask"
            )
        member = secure_sum.receive(self.rules, self._member(asked), self.keys, sealed)
        sent_L = masked(self.rules, member, self.keys, number_L, part, sends)
        self.member, self.senders = member, frozenset(sealed)
        return sent_L

    def reveal(self, asked: Message) -> Message:
        """Step 4."""
        member, survivors = self._member(asked), client_numbers(asked.facts.get("survivors"))
        if self.rules is None:
            raise ValueError("got a list of survivors before there were keys, refused")
        self.sums.check_all(asked.round, survivors)
        told, self.member = reveal(self.rules, member, survivors)
        shares = {"seeds": told.seeds, "keys": told.keys}
        return Message(
            asked.kind,
            asked.round,
            {name: _share_rows(found.values()) for name, found in shares.items()},
            {name: list(found) for name, found in shares.items()},
        )

    def _member(self, asked: Message) -> secure_sum.Member:
        if self.member is None or self.round != asked.round:
            raise ValueError(
                f"got {asked.kind} of round {asked.round} without keys for it: this site was started after they were "
                "announced, and is left out of this sum"
            )
        return self.member


@dataclass
class ServerSums:
    """The server's part, over ``channel``."""

    sums: secure_rounds.SecureSums
    channel: Channel
    purpose: str = secure_rounds.PURPOSE
    kinds: tuple[str, str, str] = (KEYS, SHARES, UNMASK)
    """Of the messages of steps 1, 2 and 4."""
    rules: secure_sum.Rules | None = None
    keys: dict[int, secure_sum.PublicKeys] = field(default_factory=dict)

    def begin(self, round: int, clients: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Steps 1 and 2: what the message that asks to train adds for each client; the others have dropped out.

        Raises:
            ValueError: fewer than the threshold of all ``clients`` are left, however few the sum would then be over.
        """
        self.rules, facts = None, {"run": self.channel.run}
        keys_kind, shares_kind, _ = self.kinds
        self.keys = self.channel.read(
            self.channel.ask(round, {client: Message(keys_kind, round, {}, facts) for client in clients}),
            lambda client, answer: _public_keys(_tensor(answer, keys_kind, "keys", 3 * secure_sum.KEY_BYTES)),
        )
        self.sums.check_all(round, self.keys)
        if len(self.keys) < 2:
            raise ValueError(
                f"got keys of {len(self.keys)} of {len(clients)} sites in round {round}, expected two at least. Start "
                "the run again with --resume true when the sites are back"
            )
        there, rules = sorted(self.keys), partial(self.rules_of, round)
        secure_sum.check_survivors(rules(clients), there)
        self.rules = rules(there)
        rows = torch.stack([_bytes(b"".join(self.keys[client])) for client in there])
        one = Message(shares_kind, round, {"keys": rows}, {**facts, "clients": there})

        def sealed_by(client: int, answer: Message) -> dict[int, str]:
            others = (other for other in there if other != client)
            messages = {other: _tensor(answer, shares_kind, str(other), secure_sum.SEALED_BYTES) for other in others}
            return {other: base64.b64encode(one.numpy().tobytes()).decode() for other, one in messages.items()}

        sealed = self.channel.read(self.channel.ask(round, dict.fromkeys(there, one)), sealed_by)
        self.sums.check_all(round, sealed)
        secure_sum.check_survivors(rules(clients), list(sealed))
        self.keys = {client: self.keys[client] for client in sealed}
        return {
            client: {"sealed": {str(other): own[client] for other, own in sealed.items() if other != client}}
            for client in sealed
        }

    def rules_of(self, round: int, clients: Sequence[int]) -> secure_sum.Rules:
        """The rules of a sum over ``clients``."""
        return secure_sum.rules_for(clients, self.sums.seed, self.purpose, round, threshold=self.sums.threshold)

    def like(self, expected: Tree) -> Tree:
        """An upload as it must look when it is masked."""
        return secure_rounds.masked_like(expected, self.sums.own_rows)

    def opened(self, round: int, survivors: Sequence[int]) -> Callable[..., Tensor]:
        """Steps 4 and 5: what takes the masks off a part of what ``survivors`` have sent, as `unmask` does."""
        rules, kind = self.rules, self.kinds[2]
        assert rules is not None
        self.sums.check_all(round, survivors)
        secure_sum.check_survivors(rules, survivors)
        asked = Message(kind, round, {}, {"run": self.channel.run, "survivors": list(survivors)})
        answers = self.channel.read(
            self.channel.ask(round, dict.fromkeys(survivors, asked)),
            lambda client, answer: _revealed(client, kind, answer),
        )
        return partial(
            secure_sum.unmask,
            rules,
            self.keys,
            secure_sum.recovered(rules, self.keys, survivors, list(answers.values())),
        )

    def aggregation(self) -> AggregationBackend:
        """Where the loop reads uploads."""

        def send(round: int, cohort: Sequence[int], sent_to: Callable[[], Download], left: Sent, heard: Upload) -> Sent:
            assert self.rules is not None
            sizes = zip(left.upload.clients.tolist(), left.traffic, strict=True)
            return Sent(
                heard, [secure_rounds.with_protocol(self.rules, one, client, delivers=True) for client, one in sizes]
            )

        def read(round: int, cohort: Sequence[int], server: Tree, uploads: Iterator[Upload]) -> Iterator[Upload]:
            survivors: list[int] = []
            total: Tree = {}
            for upload in uploads:
                survivors += upload.clients.tolist()
                for name, tensor in upload.tensors.items():
                    total[name] = tensor.sum(0) + total[name] if name in total else tensor.sum(0)  # modulo 2^64
            sum_L = self.opened(round, survivors)(secure_rounds.flat(total), sends=sends(self.sums.own_rows, total))
            yield secure_rounds.mean_upload(secure_rounds.unflat(sum_L, total), server, survivors)

        return AggregationBackend(send, read)


def _bytes(value: bytes) -> Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _public_keys(row: Tensor) -> secure_sum.PublicKeys:
    raw = row.numpy().tobytes()
    return secure_sum.PublicKeys(
        *(
            raw[start : start + secure_sum.KEY_BYTES]
            for start in range(0, 3 * secure_sum.KEY_BYTES, secure_sum.KEY_BYTES)
        )
    )


def _tensor(answer: Message, kind: str, name: str, size: int) -> Tensor:
    found = answer.tensors.get(name)
    if answer.kind != kind or found is None or found.dtype != torch.uint8 or found.shape != (size,):
        raise ValueError(f"got {answer.kind!r}, expected {size} bytes of {name}")
    return found


def client_numbers(given: Any) -> list[int]:
    """``given`` as a message has it, if it is a list of clients."""
    if not (isinstance(given, list) and all(type(one) is int and one >= 0 for one in given)):
        raise ValueError(f"got the clients {str(given)[:60]}, expected a list of their numbers")
    return given


def _sealed(given: Any) -> dict[int, bytes]:
    try:
        return {int(client): base64.b64decode(one, validate=True) for client, one in given.items()}
    except (AttributeError, TypeError, ValueError, binascii.Error) as error:
        raise ValueError("got no sealed shares of the others, expected them with the question to train") from error


def _share_rows(shares: Any) -> Tensor:
    rows = [_bytes(one.to_bytes(secure_sum.SHARE_BYTES, "big")) for one in shares]
    return torch.stack(rows) if rows else torch.zeros(0, secure_sum.SHARE_BYTES, dtype=torch.uint8)


def _revealed(client: int, kind: str, answer: Message) -> secure_sum.Revealed:
    found = {}
    for name in ("seeds", "keys"):
        owners, rows = client_numbers(answer.facts.get(name)), answer.tensors.get(name)
        shape = (len(owners), secure_sum.SHARE_BYTES)
        if answer.kind != kind or rows is None or rows.dtype != torch.uint8 or rows.shape != shape:
            raise ValueError(
                f"got {answer.kind!r} without shares, expected {secure_sum.SHARE_BYTES} bytes for each owner"
            )
        values = (int.from_bytes(row.numpy().tobytes(), "big") for row in rows)
        found[name] = dict(zip(owners, values, strict=True))
    return secure_sum.Revealed(client, found["seeds"], found["keys"])
