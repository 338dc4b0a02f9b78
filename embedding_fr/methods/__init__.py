"""Federated methods of the cross-device track; one file for each.

``BUILT_IN`` has one line for each method, of the form of an entry point; the file is imported when the method is first
asked for.
"""

from importlib import import_module
from typing import Any

from fedecider.federation.registry import EMBEDDING_METHODS, Registry

BUILT_IN = {
    "fedease": "embedding_fr.methods.fedease:METHOD",
    "fednear": "embedding_fr.methods.fednear:METHOD",
    "colr": "embedding_fr.methods.colr:METHOD",
    "fedcia": "embedding_fr.methods.fedcia:METHOD",
    "fedmf": "embedding_fr.methods.fedmf:METHOD",
    "pfedclr": "embedding_fr.methods.pfedclr:METHOD",
    "fedrap": "embedding_fr.methods.fedrap:METHOD",
    "fedncf": "embedding_fr.methods.fedncf:METHOD",
    "pfedrec": "embedding_fr.methods.pfedrec:METHOD",
    "gpfedrec": "embedding_fr.methods.gpfedrec:METHOD",
    "fedem": "embedding_fr.methods.fedem:METHOD",
    "fedca": "embedding_fr.methods.fedca:METHOD",
    "pfedgraph": "embedding_fr.methods.pfedgraph:METHOD",
    "fedrecgel": "embedding_fr.methods.fedrecgel:METHOD",
    "fedfast": "embedding_fr.methods.fedfast:METHOD",
    "cofedrec": "embedding_fr.methods.cofedrec:METHOD",
    "perfedrec": "embedding_fr.methods.perfedrec:METHOD",
    "feddae": "embedding_fr.methods.feddae:METHOD",
    "ifedrec": "embedding_fr.methods.ifedrec:METHOD",
    "fedmf_em": "embedding_fr.methods.plug_ins:FEDMF_EM",
    "fedncf_em": "embedding_fr.methods.plug_ins:FEDNCF_EM",
    "pfedrec_em": "embedding_fr.methods.plug_ins:PFEDREC_EM",
    "gpfedrec_em": "embedding_fr.methods.plug_ins:GPFEDREC_EM",
    "fedrap_em": "embedding_fr.methods.plug_ins:FEDRAP_EM",
}
"""Name -> where its entry is."""
METHODS: Registry[Any] = Registry(EMBEDDING_METHODS, "embedding_fr.methods.entry:Method", BUILT_IN)
"""Built-in methods, and those of installed packages."""

__all__ = ["BUILT_IN", "METHODS", "Method"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("embedding_fr.methods.entry"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
