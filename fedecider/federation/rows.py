"""Tables held by the rows that changed: written into the local state, added up on the server.

On a CPU both are compiled (Numba), one client after the other while its table is in the cache.

Shape legend: N clients of the run, C clients of a block, I rows of a table, R rows that a client holds, F numbers of a
row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedecider.federation.method import RowUpdate


def write_rows(table: Tensor, clients: Tensor, update: RowUpdate) -> None:
    """The new rows of the block's clients in a table (N, I, ...) of the local state, in place."""
    table_NIF, value_CRF = _flat(table, 2), _flat(update.values.to(table), 2)
    row_CR = update.rows.to(table.device)
    other_IF = table_NIF[0, :0] if update.others is None else _flat(update.others.to(table), 1)
    if _is_compiled(table):
        from fedecider.federation.compiled_rows import write_compiled  # Numba: half a second that only training needs

        write_compiled(table_NIF.numpy(), clients.numpy(), row_CR.numpy(), value_CRF.numpy(), other_IF.numpy())
    else:
        write_stacked(table_NIF, clients.to(table.device), row_CR, value_CRF, other_IF)


def add_rows(total: Tensor, row_CR: Tensor, value: Tensor, weight_C: Tensor) -> Tensor:
    """``total[r] += w_c x`` (I, ...), float64, for every row r and its value x that client c holds (-1 pads), in place.
    -> (I,) sum of the weights of each row.
    """
    total_IF, value_CRF = _flat(total, 1), _flat(value, 2)
    weight_I = torch.zeros(len(total), dtype=torch.float64, device=total.device)
    if _is_compiled(value):
        from fedecider.federation.compiled_rows import add_compiled

        add_compiled(total_IF.numpy(), weight_I.numpy(), row_CR.numpy(), value_CRF.numpy(), weight_C.numpy())
    else:
        add_stacked(total_IF, weight_I, row_CR, value_CRF, weight_C)
    return weight_I


def _flat(tensor: Tensor, lead: int) -> Tensor:
    """The same numbers with one dimension after the ``lead`` first ones: (N, I) becomes (N, I, 1)."""
    return tensor.view(*tensor.shape[:lead], math.prod(tensor.shape[lead:]))  # -1 would not do for no clients


def _is_compiled(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def write_stacked(table_NIF: Tensor, client_C: Tensor, row_CR: Tensor, value_CRF: Tensor, other_IF: Tensor) -> None:
    """What :func:`fedecider.federation.compiled_rows.write_compiled` does, on any device."""
    if len(other_IF):
        table_NIF[client_C] = other_IF
    real_CR, flat_CR = row_CR >= 0, row_CR + client_C[:, None] * table_NIF.shape[1]
    table_NIF.view(-1, table_NIF.shape[2]).index_copy_(0, flat_CR[real_CR], value_CRF[real_CR])


def add_stacked(total_IF: Tensor, weight_I: Tensor, row_CR: Tensor, value_CRF: Tensor, weight_C: Tensor) -> None:
    """What :func:`fedecider.federation.compiled_rows.add_compiled` does, on any device."""
    row, weight = row_CR.clamp(min=0).reshape(-1), (weight_C[:, None] * (row_CR >= 0)).reshape(-1)
    total_IF.index_add_(0, row, value_CRF.flatten(0, 1) * weight[:, None])
    weight_I.index_add_(0, row, weight)
