"""Keys of secure sums: a secret that two clients share, numbers made of it, and what only a receiver can read.

X25519 (RFC 7748) and HKDF with SHA-256 (RFC 5869) agree on a secret, ChaCha20 (RFC 8439) makes the masks of it, and
ChaCha20-Poly1305 seals what the server carries from client to client; all of them as the package cryptography has them.
"""

from __future__ import annotations

import hashlib
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from fedecider.federation.shamir import Source

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
