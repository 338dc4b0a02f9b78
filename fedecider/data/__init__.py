"""Readers, prepared domains and the embedded sample; own tables come in by :func:`from_events`, or where every party
prepares its own, by :func:`publish` and :func:`own_users`; :func:`open_prepared` reads what was saved."""

from importlib import import_module
from typing import Any

_TABLES = {
    "from_events": "frames",
    "FederatedData": "federated",
    "open_prepared": "federated",
    "publish": "sites",
    "own_users": "sites",
}


def __getattr__(name: str) -> Any:
    if name in _TABLES:  # only when it is asked for: the readers do without tables in memory
        return getattr(import_module(f"fedecider.data.{_TABLES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
