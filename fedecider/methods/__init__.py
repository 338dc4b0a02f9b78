"""Federated methods of the cross-silo track; one file and one entry for each, and those of installed packages.

What is named below comes from `fedecider.methods.entries`, which imports the language models, when it is first asked
for; the settings of methods, in `fedecider.methods.config`, do without.
"""

from importlib import import_module
from typing import Any

__all__ = ["BUILT_IN", "METHODS", "RATES", "TRAINING_SPACE", "Method"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("fedecider.methods.entries"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
