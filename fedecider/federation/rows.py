"""Tables held by the rows that changed: written into the local state, added up on the server.

On a CPU both are compiled (Numba), one client after the other while its table is in the cache; the numbers are those
of the PyTorch code for other devices.

Shape legend: N clients of the run, C clients of a block, I rows of a table, R rows that a client holds, F numbers of a
row.
"""

from __future__ import annotations

import numba
import torch
from torch import Tensor

from fedecider.federation.method import RowUpdate


def write_rows(table: Tensor, clients: Tensor, update: RowUpdate) -> None:
    """The new rows of the block's clients in a table (N, I, ...) of the local state, in place."""
    table_NIF = table.view(*table.shape[:2], -1)
    value_CRF = update.values.to(table).flatten(2)
    others = update.others
    if table.device.type == "cpu":
        other_IF = table_NIF[0, :0] if others is None else others.to(table).flatten(1)
        row_CR = update.rows.cpu()
        _write(table_NIF.numpy(), clients.numpy(), row_CR.numpy(), value_CRF.numpy(), other_IF.numpy())
        return
    if others is not None:
        table[clients] = others.to(table)
    flat_CR = update.rows + clients.to(update.rows)[:, None] * table.shape[1]
    real = update.rows >= 0
    table_NIF.view(-1, table_NIF.shape[2]).index_copy_(0, flat_CR[real], value_CRF[real])


def add_rows(total: Tensor, row_CR: Tensor, value: Tensor, weight_C: Tensor) -> Tensor:
    """``total[r] += w_c x`` (I, ...), float64, for every row r and its value x that client c holds (-1 pads), in place.
    -> (I,) sum of the weights of each row.
    """
    total_IF, value_CRF = total.view(len(total), -1), value.flatten(2)
    weight_I = torch.zeros(len(total), dtype=torch.float64, device=total.device)
    if total.device.type == "cpu":
        _add(total_IF.numpy(), weight_I.numpy(), row_CR.numpy(), value_CRF.numpy(), weight_C.numpy())
        return weight_I
    row, weight = row_CR.clamp(min=0).reshape(-1), (weight_C[:, None] * (row_CR >= 0)).reshape(-1)
    total_IF.index_add_(0, row, value_CRF.flatten(0, 1) * weight[:, None])
    return weight_I.index_add_(0, row, weight)


_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def _write(table_NIF, client_C, row_CR, value_CRF, other_IF):
    for c in range(len(client_C)):
        own = table_NIF[client_C[c]]
        if len(other_IF):
            own[:] = other_IF
        for r in range(row_CR.shape[1]):
            if row_CR[c, r] >= 0:
                for f in range(own.shape[1]):
                    own[row_CR[c, r], f] = value_CRF[c, r, f]


@_compiled
def _add(total_IF, weight_I, row_CR, value_CRF, weight_C):
    for c in range(len(row_CR)):
        if weight_C[c] == 0.0:
            continue
        for r in range(row_CR.shape[1]):
            row = row_CR[c, r]
            if row >= 0:
                weight_I[row] += weight_C[c]
                for f in range(total_IF.shape[1]):
                    total_IF[row, f] += weight_C[c] * value_CRF[c, r, f]
