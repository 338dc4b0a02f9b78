"""Who may ask: API keys with names, and how often each of them may."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

log = logging.getLogger("fedecider.serve")

SHORTEST_KEY = 16
"""A shorter one could be found by trying."""
LONGEST_KEY = 512
NAMELESS = "default"
EVERYBODY = "everybody"


class Keys:
    """Name -> key. The keys of a file are read again when it changes: a line that is gone is a key that is revoked."""

    def __init__(self, key_of: Mapping[str, str], path: Path | None = None) -> None:
        self.needed = bool(key_of)
        self._key_of, self._path, self._lock = dict(key_of), path, threading.Lock()
        self._state = self._file_state()

    def name_of(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Whose key a request has, in constant time; None without a known one."""
        self._read_again()
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = headers.get(b"x-api-key", token.strip() if scheme.lower() == b"bearer" else b"")
        names = [name for name, key in self._key_of.items() if secrets.compare_digest(given, key.encode())]
        return names[0] if names else None

    def _file_state(self) -> tuple[int, ...]:
        try:
            stat = self._path.stat() if self._path else None
        except OSError:
            return ()
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else ()

    def _read_again(self) -> None:
        state = self._file_state()
        if self._path is None or state == self._state:
            return
        with self._lock:
            self._state = state
            try:
                self._key_of = read_keys(self._path)
            except ValueError as error:
                log.error("the keys stay as they were: %s", error)


def read_keys(path: Path) -> dict[str, str]:
    """Name -> key of a file with a key a line, ``NAME KEY``; the name of a key that stands alone is `NAMELESS`.

    Empty lines, and lines that begin with #, say nothing.

    Raises:
        ValueError: the file cannot be read, has no key, a name or key twice, or what cannot be one.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}), expected a file with the API key") from error
    rows = [words for line in lines if (words := line.split()) and not words[0].startswith("#")]
    key_of: dict[str, str] = {}
    for words in rows or [[""]]:
        name, key = words if len(words) == 2 else (NAMELESS, " ".join(words))
        if name in key_of or key in key_of.values():
            raise ValueError(f"got the name {name!r:.60} or its key twice in {path}, expected each once")
        key_of[name] = checked_key(key, str(path))
    return key_of


def checked_key(key: str, source: str) -> str:
    """``ValueError`` for what could be guessed, or not be sent."""
    if SHORTEST_KEY <= len(key) <= LONGEST_KEY and key.isascii() and key.isprintable() and " " not in key:
        return key
    raise ValueError(
        f"got an API key of {len(key)} characters in {source}, expected {SHORTEST_KEY} to {LONGEST_KEY} printable "
        "ASCII characters without blanks, such as those of: openssl rand -hex 32"
    )


class Rate:
    """A token bucket for each name: ``per_minute`` requests at once, and as many again in a minute; 0 is no limit."""

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self._per_minute, self._now = per_minute, now
        self._left: dict[str, tuple[float, float]] = {}

    def wait_s(self, name: str) -> float:
        """Takes one request of ``name``; else the seconds until there is one."""
        if not self._per_minute:
            return 0.0
        now, each_s = self._now(), 60.0 / self._per_minute
        left, before = self._left.get(name, (float(self._per_minute), now))
        left = min(float(self._per_minute), left + (now - before) / each_s)
        taken = left >= 1.0
        self._left[name] = (left - taken, now)
        return 0.0 if taken else (1.0 - left) * each_s
