"""Federated methods of the cross-silo track; one file for each.

``BUILT_IN`` has one line for each method, of the form of an entry point; the file is imported when the method is first
asked for.
The names below are light; ``Method``, ``RATES`` and ``TRAINING_SPACE`` import the language models.
"""

from importlib import import_module
from typing import Any

from fedecider.federation.registry import LLM_METHODS, Registry

BUILT_IN = {
    "fedecider": "fedecider.methods.fedecider:METHOD",
    "local": "fedecider.methods.local:METHOD",
    "counts": "fedecider.methods.counts:METHOD",
    "fedavg": "fedecider.methods.fedavg:METHOD",
    "flora": "fedecider.methods.flora:METHOD",
    "ditto": "fedecider.methods.ditto:METHOD",
    "fdlora": "fedecider.methods.fdlora:METHOD",
    "fedprox": "fedecider.methods.fedprox:METHOD",
    "pfedavg": "fedecider.methods.pfedavg:METHOD",
    "ffa_lora": "fedecider.methods.ffa_lora:METHOD",
    "rolora": "fedecider.methods.rolora:METHOD",
    "fellrec": "fedecider.methods.fellrec:METHOD",
    "lora_sim": "fedecider.methods.lora_sim:METHOD",
    "centralised": "fedecider.methods.centralised:METHOD",
}
"""Name -> where its entry is."""
METHODS: Registry[Any] = Registry(LLM_METHODS, "fedecider.methods.entries:Method", BUILT_IN)
"""Built-in methods, and those of installed packages."""

__all__ = ["BUILT_IN", "METHODS", "RATES", "TRAINING_SPACE", "Method"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("fedecider.methods.entries"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
