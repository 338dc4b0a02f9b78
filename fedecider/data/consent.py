"""Who is public: nobody, unless somebody says so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from fedecider.data.store import load_domains


def user_order(seed: int, user: str) -> int:
    """A number below 2^64 that depends on seed and key alone: the same in every domain, whatever other users there are.

    It is the BLAKE2b hash of both, so a share of it is stable: rows in another order, new users or new months move
    nobody.
    """
    return int.from_bytes(hashlib.blake2b(f"users\x1f{seed}\x1f{user}".encode(), digest_size=8).digest(), "big")


def _as_given(key: str) -> str:
    return key


class Consent(NamedTuple):
    """Which users everybody may see."""

    share: float = 0.0
    """Users whose hash is among this share of all hashes are public."""
    seed: int = 0
    """What the hash is keyed with."""
    named: frozenset[str] | None = None
    """The public users by key; the share counts no more then. None: nobody is named."""
    kept_public: frozenset[str] = frozenset()
    """Who was public before, and stays so unless others are named."""
    kept_private: frozenset[str] = frozenset()
    """Who was private before, and stays so."""
    plain_key: Callable[[str], str] = _as_given
    """A user's key in a domain -> the key as it was given, which is hashed."""

    def is_public(self, user: str) -> bool:
        """Whether everybody may see the events of ``user``."""
        if user in self.kept_private:
            return False
        if self.named is not None:
            return user in self.named
        if user in self.kept_public:
            return True
        return user_order(self.seed, self.plain_key(user)) >= int((1 - self.share) * 2**64)

    def keeping(self, folder: str | Path) -> Consent:
        """The same with the split of the prepared domains in ``folder``.

        Where public users are named, one of before who is named no more has withdrawn, and is private.

        Raises:
            ValueError: there are no prepared domains, or a user who was private there is named.
        """
        earlier = load_domains(folder).values()
        private = frozenset(user for domain in earlier for user in domain.clients.users)
        public = frozenset(user for domain in earlier for user in domain.public.users)
        both = private & (self.named or frozenset())
        if both:
            raise ValueError(
                f"got the customer {min(both)!r} as public, who is private in {folder}, expected only customers who "
                "were public there or are new: leave them out, or prepare without keep_split"
            )
        return self._replace(kept_public=public, kept_private=private)

    def check_known(self, users: Iterable[str], folder: str | Path) -> None:
        """``ValueError`` where nobody of before is among ``users``: with other keys nobody's split would be kept."""
        if (self.kept_public | self.kept_private).isdisjoint(users):
            known = self.kept_private or self.kept_public
            raise ValueError(
                f"got none of the {len(self.kept_public | self.kept_private)} customers of {folder} again, expected "
                f"some: are keys written as they are there, such as {min(known)!r}?"
            )
