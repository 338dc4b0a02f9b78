"""Secure sums that survive dropouts: the server learns the sum over those who delivered, and of one client nothing.

Secrets are shared so that any t holders together have them and t - 1 know nothing (Shamir, CACM 1979).
A secret is a number of the field of ``prime``, the value at 0 of a random polynomial of degree t - 1; a share is its
value at the place of a holder. Differs from the paper: nothing.

X25519 (RFC 7748) and HKDF with SHA-256 (RFC 5869) agree on a secret, ChaCha20 (RFC 8439) makes the masks of it, and
ChaCha20-Poly1305 seals what the server carries from client to client; all of them as the package cryptography has them.

The protocol of Bonawitz et al. (CCS 2017), every step a function of one party whose arguments and results are what
travels. In the order of the steps:

1. `join`, `announce`: a client draws two key pairs and a seed, for this sum alone, and tells the public keys.
2. `share`, `receive`: it shares the private key of its masks and its seed among its neighbours and itself, such that a
   threshold of them can put either together; the server carries the shares, sealed.
3. `masked`: it sends ``x_c + n(seed_c) + sum_{d > c} n(k_cd) - sum_{d < c} n(k_cd)`` modulo 2^32 or 2^64, n the numbers
   that ChaCha20 makes of a secret, k_cd what c and its neighbour d agree on.
4. `reveal`: told who delivered, it gives its shares of the seeds of those, and of the keys of the others. Never both of
   one client: only with both would an upload be open. It answers one list of survivors, once.
5. `recovered`, `unmask`: the server takes off the seeds' masks, and the pair masks that the dropouts left behind.

With ``num_neighbours`` k a client shares masks and secrets with k others on a random circle of each sum (Bell et al.,
CCS 2020), which takes time N k instead of N^2; an upload is then open to a server that colludes with a threshold of
those k + 1. Differs from the papers: the honest-but-curious variant, without signatures and without the round in which
survivors agree on who they are. An active server could put its own keys in the place of a client's, or tell clients
different lists of survivors; a threshold above one half alone keeps disjoint groups from opening both secrets of a
client. A client also announces a hash of its seed, so that wrong shares are seen and named instead of giving a wrong
sum. The server still learns what two sums over different cohorts tell by their difference.

Shape legend: L numbers of an upload.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Literal, NamedTuple

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from fedecider.federation.streams import stream

PRIME = 2**256 + 297
"""The smallest prime above 2^256: 32 bytes are a number of its field."""
SHARE_BYTES = 33
"""A number of the field can be 2^256 or more: one bit beyond 32 bytes."""

Source = Callable[[int], bytes]
"""How many random bytes -> as many of them: ``secrets.token_bytes``, or a stream of a run's seed in a simulation."""


def split(secret: int, places: Sequence[int], coefficients: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """Place -> share ``secret + c_1 x + ... + c_(t-1) x^(t-1) mod prime``, for t - 1 random ``coefficients``.

    Raises:
        ValueError: places that are not different numbers from 1 to ``prime`` - 1, or fewer than t of them.
    """
    if len(set(places)) != len(places) or not all(0 < place < prime for place in places):
        raise ValueError(f"got the places {list(places)[:10]}, expected different numbers from 1 on: 0 is the secret")
    if len(places) <= len(coefficients):
        raise ValueError(f"got {len(places)} holders, expected the {len(coefficients) + 1} that a secret takes")
    shares = {}
    for place in places:
        value = 0
        for coefficient in reversed((secret, *coefficients)):  # Horner
            value = (value * place + coefficient) % prime
        shares[place] = value
    return shares


def recover(shares: Mapping[int, int], threshold: int, prime: int = PRIME) -> int:
    """The secret, from ``threshold`` or more shares by place; the first ones by place are taken (Lagrange at 0).

    Raises:
        ValueError: fewer shares than ``threshold``.
    """
    if len(shares) < threshold:
        raise ValueError(f"got {len(shares)} shares of a secret, expected {threshold} at least: fewer tell nothing")
    places = sorted(shares)[:threshold]
    secret = 0
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above = above * other % prime
                below = below * (other - place) % prime
        secret += shares[place] * above * pow(below, -1, prime)
    return secret % prime


def random_coefficients(threshold: int, source: Source) -> list[int]:
    """``threshold - 1`` numbers of the field of `PRIME`, uniform up to 2^-128."""
    return [int.from_bytes(source(48), "big") % PRIME for _ in range(threshold - 1)]


KEY_BYTES = 32
SEAL_BYTES = 16
"""What a sealed message is longer."""
_ONCE = bytes(12)
"""The nonce of a key that seals one message."""


class KeyPair(NamedTuple):
    """32 bytes each."""

    private: bytes
    public: bytes


def new_pair(source: Source) -> KeyPair:
    """A key pair of one client for one sum."""
    private = source(KEY_BYTES)
    return KeyPair(private, public_of(private))


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, label: bytes) -> bytes:
    """The 32 bytes that two parties get, each from its private and the other's public key; for one ``label`` alone.

    Raises:
        ValueError: ``public`` is no key, or one of small order, with which the secret would be known to all.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ValueError(f"got {public.hex()[:16]}... as a public key ({error}), expected one of X25519") from error
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=label).derive(shared)


def keystream(key: bytes, count: int, bits: int, part: int = 0) -> Tensor:
    """``count`` uniform numbers of all ``bits`` (32 or 64) bits, int32 or int64; other ones for every ``part``."""
    nonce = bytes(4) + part.to_bytes(12, "little")  # RFC 8439's layout after four bytes of block counter
    drawn = Cipher(algorithms.ChaCha20(key, nonce), None).encryptor().update(bytes(count * bits // 8))
    words = np.frombuffer(bytearray(drawn), "<i4" if bits == 32 else "<i8")
    return torch.from_numpy(words)


def seal(key: bytes, plain: bytes, label: bytes) -> bytes:
    """``plain`` under a key that seals nothing else; 16 bytes longer."""
    return ChaCha20Poly1305(key).encrypt(_ONCE, plain, label)


def unseal(key: bytes, sealed: bytes, label: bytes) -> bytes:
    """What :func:`seal` was given.

    Raises:
        ValueError: it was changed on its way, or is meant for somebody else.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_ONCE, sealed, label)
    except InvalidTag as error:
        raise ValueError("got a sealed message that does not open, expected the one its sender sealed") from error


def seeded(seed: int, *labels: str | int) -> Source:
    """A source for simulations, which repeat: whoever knows the seed knows all that is drawn from it."""
    text = "\x1f".join([str(seed), *(f"{type(label).__name__}:{label}" for label in labels)])
    numbers = count()
    return lambda size: hashlib.shake_256(f"{text}\x1e{next(numbers)}".encode()).digest(size)


Bits = Literal[32, 64]
_DTYPES = {32: torch.int32, 64: torch.int64}

PUBLIC_BYTES = 3 * KEY_BYTES
SEALED_BYTES = 2 * SHARE_BYTES + SEAL_BYTES
THRESHOLD = 0.6
"""The share of clients whose uploads a sum needs."""

Sends = Callable[[int], Tensor]
"""client -> (L,) bool, which of the numbers it sends; all parties know it of all clients."""


class Rules(NamedTuple):
    """What all parties of one sum know before it starts."""

    cohort: tuple[int, ...]
    neighbours: Mapping[int, tuple[int, ...]]
    """Mutual."""
    threshold: float
    name: str
    """Such as "round 3"."""
    label: bytes
    """Different for every sum: keys made for one serve no other."""
    bits: Bits = 64

    @property
    def least(self) -> int:
        """Clients that must deliver."""
        return _least(self.threshold, len(self.cohort))

    def needed(self, client: int) -> int:
        """Holders who must answer before a secret of ``client`` can be put together."""
        return _least(self.threshold, 1 + len(self.neighbours[client]))


class PublicKeys(NamedTuple):
    """What a client announces, 96 bytes."""

    mask: bytes
    channel: bytes
    seed_hash: bytes


class Member(NamedTuple):
    """What a client of a sum keeps to itself."""

    client: int
    mask: KeyPair
    channel: KeyPair
    seed: bytes
    held: Mapping[int, tuple[int, int]] = {}
    """owner -> the shares of its key and of its seed, the own ones among them."""
    answered: frozenset[int] | None = None
    """The survivors for whom it has given shares."""


class Revealed(NamedTuple):
    """What one survivor tells when uploads are in: shares by owner."""

    client: int
    seeds: Mapping[int, int]
    """Of those who delivered."""
    keys: Mapping[int, int]
    """Of those who did not."""


class Secrets(NamedTuple):
    """What the server knows then."""

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]


def rules_for(
    cohort: Sequence[int],
    seed: int,
    purpose: str,
    round: int,
    *,
    threshold: float = THRESHOLD,
    num_neighbours: int | None = None,
    bits: Bits = 64,
) -> Rules:
    """The rules of the sum of ``round`` for one ``purpose``; ``seed`` draws the circle of neighbours and is no secret.

    ``num_neighbours`` None makes all clients neighbours of each other, k even k of them.

    Raises:
        ValueError: a cohort of fewer than two different clients, a threshold outside (0.5, 1], an odd k.
    """
    members = sorted(set(cohort))
    if len(members) != len(cohort) or len(members) < 2:
        raise ValueError(f"got the cohort {list(cohort)[:10]}, expected two different clients at least: one is no sum")
    if not 0.5 < threshold <= 1.0:
        raise ValueError(
            f"got threshold {threshold:g}, expected above 0.5 and at most 1: two halves of a cohort could be asked for "
            "both secrets of a client"
        )
    if bits not in _DTYPES:
        raise ValueError(f"got bits {bits}, expected 32 or 64")
    neighbours = _neighbours(members, seed, purpose, round, num_neighbours)
    label = f"fedecider\x1f{seed}\x1f{purpose}\x1f{round}".encode()
    return Rules(tuple(members), neighbours, threshold, f"{purpose} {round}", label, bits)


def join(client: int, source: Source) -> Member:
    """Step 1: keys and seed of a client for one sum."""
    return Member(client, new_pair(source), new_pair(source), source(KEY_BYTES))


def announce(member: Member) -> PublicKeys:
    """What the server tells all neighbours."""
    return PublicKeys(member.mask.public, member.channel.public, _hash(member.seed))


def share(
    rules: Rules, member: Member, keys: Mapping[int, PublicKeys], source: Source
) -> tuple[dict[int, bytes], Member]:
    """Step 2: receiver -> sealed shares of the own key and seed; ``keys`` are those of who has announced any.

    Raises:
        ValueError: fewer neighbours than the threshold asks for have announced keys.
    """
    present = [other for other in rules.neighbours[member.client] if other in keys]
    needed = rules.needed(member.client)
    if 1 + len(present) < needed:
        raise ValueError(f"got keys of {len(present)} neighbours of client {member.client}, expected {needed - 1}")
    places = [_place(one) for one in (member.client, *present)]
    key, seed = (
        split(int.from_bytes(secret, "big"), places, random_coefficients(needed, source))
        for secret in (member.mask.private, member.seed)
    )
    sealed = {}
    for other in present:
        pair = (key[_place(other)], seed[_place(other)])
        plain = b"".join(value.to_bytes(SHARE_BYTES, "big") for value in pair)
        label = _label(rules, "shares", member.client, other)
        sealed[other] = seal(agree(member.channel.private, keys[other].channel, label), plain, label)
    own = (key[_place(member.client)], seed[_place(member.client)])
    return sealed, member._replace(held={**member.held, member.client: own})


def receive(rules: Rules, member: Member, keys: Mapping[int, PublicKeys], sealed: Mapping[int, bytes]) -> Member:
    """Step 2, the other end: sender -> its sealed message. Who sent none takes no part in the sum.

    Raises:
        ValueError: a message was changed on its way, or its sender is no neighbour.
    """
    held = dict(member.held)
    for sender, message in sealed.items():
        if sender not in rules.neighbours[member.client]:
            raise ValueError(f"got shares of client {sender} at client {member.client}, expected those of neighbours")
        label = _label(rules, "shares", sender, member.client)
        try:
            plain = unseal(agree(member.channel.private, keys[sender].channel, label), message, label)
        except ValueError as error:
            raise ValueError(f"{error}: shares of client {sender} for client {member.client}") from error
        key, seed = plain[:SHARE_BYTES], plain[SHARE_BYTES:]
        held[sender] = (int.from_bytes(key, "big"), int.from_bytes(seed, "big"))
    return member._replace(held=held)


def masked(
    rules: Rules,
    member: Member,
    keys: Mapping[int, PublicKeys],
    value_L: Tensor,
    part: int = 0,
    sends: Sends | None = None,
) -> Tensor:
    """Step 3: what a client sends for ``value_L`` int64 (L,), int32 or int64, ``bits / 8`` bytes a number.

    A sum too long to be held may be made of several ``part`` s under one set of keys. With ``sends`` two clients share
    masks of those numbers that both of them send, and the others are zero.

    Raises:
        ValueError: shares of fewer clients than the threshold asks for, so that too few masks would hide the value; or
            the sum could leave the range of signed ``bits``.
    """
    if len(member.held) < rules.needed(member.client):
        raise ValueError(
            f"got shares of {len(member.held) - 1} neighbours of client {member.client}, expected "
            f"{rules.needed(member.client) - 1} at least: an upload under fewer masks stays here"
        )
    if value_L.dtype != torch.int64:
        raise ValueError(f"got values of {value_L.dtype}, expected int64: see encode")
    largest = max(-int(value_L.min()), int(value_L.max())) if value_L.numel() else 0
    if largest * len(rules.cohort) >= 2 ** (rules.bits - 1):
        raise ValueError(
            f"got values up to {largest} of {len(rules.cohort)} clients, expected a sum below 2^{rules.bits - 1}: "
            "use bits=64 or fewer fraction bits"
        )
    sent_L = value_L.to(_DTYPES[rules.bits], copy=True)
    sent_L += keystream(member.seed, len(sent_L), rules.bits, part)
    if sends is not None:
        sent_L.masked_fill_(~sends(member.client), 0)
    for other in sorted(member.held.keys() - {member.client}):
        pair = _pair_key(rules, member.mask.private, keys[other].mask, member.client, other)
        _add_pair(rules, sent_L, pair, member.client, other, part, sends)
    return sent_L


def reveal(rules: Rules, member: Member, survivors: Sequence[int]) -> tuple[Revealed, Member]:
    """Step 4: shares of the seeds of those who delivered, and of the keys of the others whose shares it holds.

    Raises:
        ValueError: too few survivors, strangers or itself not among them; or it has answered for others already, so
            that it would give both secrets of a client away.
    """
    delivered = frozenset(survivors)
    check_survivors(rules, delivered)
    if not delivered <= set(rules.cohort) or member.client not in delivered:
        raise ValueError(f"got a list of survivors without client {member.client} or with strangers, refused")
    if member.answered not in (None, delivered):
        raise ValueError(
            f"got a second list of survivors, other than the first one, expected one: client {member.client} never "
            "gives both secrets of one client away"
        )
    seeds = {owner: seed for owner, (_, seed) in member.held.items() if owner in delivered}
    keys = {owner: key for owner, (key, _) in member.held.items() if owner not in delivered}
    return Revealed(member.client, seeds, keys), member._replace(answered=delivered)


def check_survivors(rules: Rules, survivors: Collection[int]) -> None:
    """``ValueError`` for fewer than a sum takes."""
    if len(survivors) < rules.least:
        raise ValueError(
            f"got {len(survivors)} of {len(rules.cohort)} uploads for the secure aggregation of {rules.name}, expected "
            f"{rules.least} at least: fewer shares cannot open it. Lower secure_threshold, or see to it that more "
            "clients deliver"
        )


def recovered(
    rules: Rules, keys: Mapping[int, PublicKeys], survivors: Sequence[int], answers: Iterable[Revealed]
) -> Secrets:
    """Step 5 at the server: seeds of the survivors, private keys of the others in ``keys``, who had sent shares.

    Raises:
        ValueError: fewer shares than needed, or shares that do not give what a client has announced.
    """
    seed_shares: dict[int, dict[int, int]] = {client: {} for client in survivors}
    key_shares: dict[int, dict[int, int]] = {client: {} for client in keys.keys() - set(survivors)}
    for answer in answers:
        for found, told in ((seed_shares, answer.seeds), (key_shares, answer.keys)):
            for owner, value in told.items():
                if owner in found:
                    found[owner][_place(answer.client)] = value
    seeds = {client: _secret(rules, client, shares) for client, shares in sorted(seed_shares.items())}
    lost = {client: _secret(rules, client, shares) for client, shares in sorted(key_shares.items())}
    wrong = [client for client, seed in seeds.items() if _hash(seed) != keys[client].seed_hash]
    wrong += [client for client, private in lost.items() if public_of(private) != keys[client].mask]
    if wrong:
        raise ValueError(
            f"got shares of the secrets of the clients {wrong[:10]} that do not give what these have announced, "
            "expected the shares they had sent: the sum stays closed"
        )
    return Secrets(seeds, lost)


def unmask(
    rules: Rules,
    keys: Mapping[int, PublicKeys],
    secrets: Secrets,
    total_L: Tensor,
    part: int = 0,
    sends: Sends | None = None,
) -> Tensor:
    """Step 5: the exact sum of the survivors' values, int64 (L,), from ``total_L``, that of what they sent."""
    open_L = total_L.clone()
    for client, seed in secrets.seeds.items():
        own_L = keystream(seed, len(open_L), rules.bits, part)
        open_L -= own_L if sends is None else own_L * sends(client)
    for lost, private in secrets.keys.items():
        for client in rules.neighbours[lost]:
            if client in secrets.seeds:
                pair = _pair_key(rules, private, keys[client].mask, lost, client)
                _add_pair(rules, open_L, pair, lost, client, part, sends)  # with its sign: what is missing
    return open_L.to(torch.int64)


def encode(value: Tensor, fraction_bits: int) -> Tensor:
    """Fixed point: ``round(value * 2^fraction_bits)`` as int64, off by at most 2^-(fraction_bits + 1)."""
    return (value.double() * 2.0**fraction_bits).round().to(torch.int64)


def decode(value: Tensor, fraction_bits: int) -> Tensor:
    """Float64 of a fixed-point number or of a sum of them."""
    return value.double() / 2.0**fraction_bits


def _neighbours(
    members: Sequence[int], seed: int, purpose: str, round: int, num_neighbours: int | None
) -> dict[int, tuple[int, ...]]:
    if num_neighbours is None or num_neighbours >= len(members) - 1:
        return {client: tuple(other for other in members if other != client) for client in members}
    if num_neighbours < 2 or num_neighbours % 2:
        raise ValueError(f"got num_neighbours {num_neighbours}, expected an even number from 2 up, or None for all")
    order = torch.randperm(len(members), generator=stream(seed, "mask_circle", purpose, round)).tolist()
    circle = [members[position] for position in order]
    steps = [step for half in range(1, num_neighbours // 2 + 1) for step in (half, -half)]
    return {
        client: tuple(circle[(place + step) % len(circle)] for step in steps) for place, client in enumerate(circle)
    }


def _least(threshold: float, count: int) -> int:
    return math.ceil(threshold * count - 1e-9)


def _place(client: int) -> int:
    return client + 1


def _hash(seed: bytes) -> bytes:
    return hashlib.sha256(b"seed of masks" + seed).digest()


def _label(rules: Rules, what: str, first: int, second: int) -> bytes:
    return rules.label + f"\x1f{what}\x1f{first}\x1f{second}".encode()


def _pair_key(rules: Rules, private: bytes, public: bytes, first: int, second: int) -> bytes:
    return agree(private, public, _label(rules, "mask", min(first, second), max(first, second)))


def _add_pair(
    rules: Rules, sum_L: Tensor, pair: bytes, client: int, other: int, part: int, sends: Sends | None
) -> None:
    """What ``client`` adds to its upload for the mask that it shares with ``other``, in place."""
    drawn_L = keystream(pair, len(sum_L), rules.bits, part)
    if sends is not None:
        drawn_L = drawn_L * (sends(client) & sends(other))
    if client < other:
        sum_L += drawn_L
    else:
        sum_L -= drawn_L


def _secret(rules: Rules, client: int, shares: Mapping[int, int]) -> bytes:
    needed = rules.needed(client)
    if len(shares) < needed:
        raise ValueError(
            f"got {len(shares)} shares of client {client}, expected {needed} at least: too many of its neighbours "
            "have dropped out"
        )
    secret = recover(shares, needed)
    return secret.to_bytes(SHARE_BYTES, "big")[-KEY_BYTES:]
