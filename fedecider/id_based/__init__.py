"""Federated methods without a language model over domains and silos: item IDs, or in pfcr codes of texts.

One file for each.

``BUILT_IN`` has one line for each method, of the form of an entry point; the file is imported when the method is first
asked for.
"""

from typing import Any

from fedecider.federation.registry import ID_METHODS, Registry

BUILT_IN = {
    "fedsasrec": "fedecider.id_based.fedsasrec:METHOD",
    "feddcsr": "fedecider.id_based.feddcsr:METHOD",
    "fedgcdr": "fedecider.id_based.fedgcdr:METHOD",
    "fedhcdr": "fedecider.id_based.fedhcdr:METHOD",
    "pfcr": "fedecider.id_based.pfcr:METHOD",
}
"""Name -> where its entry is."""
METHODS: Registry[Any] = Registry(ID_METHODS, "fedecider.id_based.methods:Method", BUILT_IN)
"""Built-in methods, and those of installed packages."""
