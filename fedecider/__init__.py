"""Federated recommendation with language models.

>>> import fedecider as fd
>>> result = fd.federate(num_rounds=5)
>>> result.recommender("crime").recommend(["A title that was read"], k=10)

Importing the package loads nothing else; what is named below loads torch, transformers and peft when it is first asked
for.
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "from_events": "fedecider.data.frames",
    "FederatedData": "fedecider.data.federated",
    "open_prepared": "fedecider.data.federated",
    "sample": "fedecider.data.federated",
    "match": "fedecider.data.matching",
    "federate": "fedecider.api",
    "compare": "fedecider.api",
    "load": "fedecider.api",
    "Result": "fedecider.api",
    "fedmd": "fedecider.lifecycle.fedmd",
    "EarlyStopping": "fedecider.engine.run",
    "Recommender": "fedecider.models.recommender",
}
"""Public name -> module."""

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fedecider")
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
