"""Federated recommendation with language models.

>>> import fedecider
>>> rec = fedecider.Recommender.from_pretrained("runs/demo", "crime")

Importing the package loads nothing else; `Recommender` loads torch, transformers and peft when it is first named.
"""

from typing import Any

__all__ = ["Recommender", "__version__", "from_events", "sample"]


def __getattr__(name: str) -> Any:
    if name == "Recommender":
        from fedecider.models.recommender import Recommender

        return Recommender
    if name == "from_events":
        from fedecider.data.frames import from_events

        return from_events
    if name == "sample":
        from fedecider.data.federated import sample

        return sample
    if name == "__version__":
        from importlib.metadata import version

        return version("fedecider")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
