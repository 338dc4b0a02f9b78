"""All parties of a secure sum in one process: what a simulated run sums with, repeatable from its seed.

The steps and the messages are those of a deployment (:mod:`fedecider.federation.secure_sum`); secrets come from the
run's seed instead of the operating system, so nothing is hidden from who knows it.

Shape legend: L numbers of an upload.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedecider.federation.method import Tree, Upload
from fedecider.federation.secure_keys import seeded
from fedecider.federation.secure_sum import (
    PUBLIC_BYTES,
    SEALED_BYTES,
    THRESHOLD,
    Bits,
    Member,
    PublicKeys,
    Rules,
    Secrets,
    Sends,
    announce,
    check_survivors,
    join,
    masked,
    receive,
    recovered,
    reveal,
    rules_for,
    share,
    unmask,
)
from fedecider.federation.shamir import SHARE_BYTES

KEYS, SHARES, UNMASKING = "secure:keys", "secure:shares", "secure:unmasking"
"""Names of the protocol's own messages in the counts of bytes."""


class Simulated(NamedTuple):
    """A sum whose clients have exchanged keys and shares."""

    rules: Rules
    keys: Mapping[int, PublicKeys]
    members: Mapping[int, Member]

    def send(self, client: int, value_L: Tensor, part: int = 0, sends: Sends | None = None) -> Tensor:
        """What ``client`` sends for ``value_L``."""
        return masked(self.rules, self.members[client], self.keys, value_L, part, sends)

    def secrets(self, survivors: Sequence[int]) -> Secrets:
        """What the server puts together of the answers of all ``survivors``."""
        answers = [reveal(self.rules, self.members[client], survivors)[0] for client in survivors]
        return recovered(self.rules, self.keys, survivors, answers)

    def open(self, total_L: Tensor, survivors: Sequence[int], sends: Sends | None = None) -> Tensor:
        """The exact sum of the values of ``survivors``, from that of what they sent, in one part."""
        return unmask(self.rules, self.keys, self.secrets(survivors), total_L, sends=sends)

    def open_uploads(self, uploads: Iterable[Upload], name: str) -> Tensor:
        """The exact sum over the clients whose masked tensor ``name`` (C, ...) arrives, int64 (...)."""
        survivors: list[int] = []
        total: Tensor | None = None
        for upload in uploads:
            survivors += upload.clients.tolist()
            part = upload.tensors[name].sum(0, dtype=upload.tensors[name].dtype)  # wraps: that is the modulus
            total = part if total is None else total + part
        check_survivors(self.rules, survivors)
        assert total is not None
        return self.open(total.reshape(-1).cpu(), survivors).view(total.shape)

    def payload_down(self) -> dict[str, int]:
        """What `Download.payload` says of the protocol's messages, alike for all."""
        return protocol_bytes(self.rules, self.rules.cohort[0])[0]

    def payload_up(self, clients: Tensor) -> Tree:
        """What `Upload.payload` says of them."""
        sizes = [protocol_bytes(self.rules, client)[1] for client in clients.tolist()]
        return {name: torch.tensor([one[name] for one in sizes]) for name in (KEYS, SHARES, UNMASKING)}


def protocol_bytes(rules: Rules, client: int, delivers: bool = True) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes down and up of a client's keys, shares and unmasking; who does not deliver is not asked to unmask."""
    others = len(rules.neighbours[client])
    down = {KEYS: PUBLIC_BYTES * others, SHARES: SEALED_BYTES * others}
    up = {KEYS: PUBLIC_BYTES, SHARES: SEALED_BYTES * others}
    if delivers:
        down[UNMASKING] = -(-len(rules.cohort) // 8)  # a bit for every client: whether it delivered
        up[UNMASKING] = SHARE_BYTES * (1 + others)
    return down, up


@lru_cache(maxsize=2)  # one for the sum that blocks are working at
def simulated(
    cohort: tuple[int, ...],
    seed: int,
    purpose: str,
    round: int,
    threshold: float = THRESHOLD,
    num_neighbours: int | None = None,
    bits: Bits = 64,
) -> Simulated:
    """A sum after steps 1 and 2, in which everybody in ``cohort`` took part."""
    rules = rules_for(cohort, seed, purpose, round, threshold=threshold, num_neighbours=num_neighbours, bits=bits)
    sources = {client: seeded(seed, "secure", purpose, round, client) for client in rules.cohort}
    members = {client: join(client, source) for client, source in sources.items()}
    keys = {client: announce(member) for client, member in members.items()}
    arrived: dict[int, dict[int, bytes]] = {client: {} for client in members}
    for client, member in members.items():
        near = {other: keys[other] for other in rules.neighbours[client]}
        sealed, members[client] = share(rules, member, near, sources[client])
        for receiver, message in sealed.items():
            arrived[receiver][client] = message
    members = {client: receive(rules, member, keys, arrived[client]) for client, member in members.items()}
    return Simulated(rules, keys, members)
