"""The loops of :mod:`fedecider.federation.rows`, compiled for the CPU by Numba; imported when they are needed.

Shape legend: N clients of the run, C clients of a block, I rows of a table, R rows that a client holds, F numbers of a
row.
"""

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


@compiled
def write_compiled(table_NIF, client_C, row_CR, value_CRF, other_IF):
    for c in range(len(client_C)):
        own = table_NIF[client_C[c]]
        if len(other_IF):
            own[:] = other_IF
        for r in range(row_CR.shape[1]):
            if row_CR[c, r] >= 0:
                for f in range(own.shape[1]):
                    own[row_CR[c, r], f] = value_CRF[c, r, f]


@compiled
def add_compiled(total_IF, weight_I, row_CR, value_CRF, weight_C):
    for c in range(len(row_CR)):
        for r in range(row_CR.shape[1]):
            row = row_CR[c, r]
            if row >= 0:
                weight_I[row] += weight_C[c]
                for f in range(total_IF.shape[1]):
                    total_IF[row, f] += weight_C[c] * value_CRF[c, r, f]
