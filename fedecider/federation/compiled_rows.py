"""The loops of :mod:`fedecider.federation.rows`, compiled for the CPU; imported when they are needed.

Shape legend: N clients of the run, C clients of a block, I rows of a table, R rows that a client holds, F numbers of a
row.
"""

from __future__ import annotations

from fedecider.federation.compiling import compiled


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
