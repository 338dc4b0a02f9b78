"""Readers, prepared domains and the embedded sample; own tables come in by :func:`from_events`."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "from_events":  # only when it is asked for: the readers do without tables in memory
        from fedecider.data.frames import from_events

        return from_events
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
