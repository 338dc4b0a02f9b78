"""Functions of plain loops over arrays, compiled for the CPU by Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable | None = None, **options: Any) -> Callable:
    """``numba.njit`` with what all our functions need; further options as keywords.

    The result of a compilation is kept in ``__pycache__``, the user's cache folder or ``NUMBA_CACHE_DIR``; where none
    can be written every process compiles anew. Numba does not see that a function or a constant in another file has
    changed, so what belongs together stands in one file, and whoever changes these options empties the caches.
    """
    if function is None:
        return lambda function: compiled(function, **options)
    options = {
        "nogil": True,  # threads may share the work out
        "error_model": "numpy",  # a division by zero is not an exception: with one, loops are not vectorised
        **options,
    }
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # nowhere to keep it
        return numba.njit(function, **options)
