"""What a company or domain may be called: it names a folder, and stands in tables beside rows and means."""

from __future__ import annotations

import re

NAME = re.compile(r"\w[\w.-]{0,99}")
TAKEN = {
    *("macro", "mean", "average", "total", "local", "joined", "half", "kept", "ensemble", "teacher", "student"),
    *("canary", "memoriser", "popularity", "tifu-knn", "item-knn", "ease", "als", "bpr", "sasrec", "pooled"),
    *("fedsasrec", "feddcsr", "fedhcdr", "pfcr"),
    *("fedgcdr", "fedecider", "counts", "fedavg", "flora", "ditto", "fdlora", "fedprox", "pfedavg", "ffa_lora"),
    *("rolora", "fellrec", "lora_sim", "centralised"),
}
"""Rows and means of tables, in small letters: beside them a company of that name could not be told apart."""


def check_name(name: object, what: str = "company", rename: str = "") -> None:
    """``ValueError`` for what cannot be the name of a ``what``; ``rename``: how it is given another one."""
    said = f": {rename}" if rename else ""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"got the {what} {name!r}, expected up to 100 letters, digits, '_', '-' and '.' (it names a folder){said}"
        )
    if name.casefold() in TAKEN:
        raise ValueError(
            f"got the {what} {name!r}, expected another name, such as {name}-shop: tables have a row or a mean that is "
            f"called so{said}"
        )
