"""How sparse a table is, and what it weighs on the wire when its zeros are not sent.

Shape legend: C clients of a block, I items, D dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

TAG_BYTES = 1
"""Says which of the three layouts of :func:`sparse_bytes` follows."""


def sparse_bytes(table_CID: Tensor) -> Tensor:
    """(C,) int64 bytes of each client's table in the smallest of three layouts, plus one byte that names the layout.

    With n entries (row by row), k of them not zero, and s bytes a value: plain, n values; bitmap, ceil(n / 8) bytes of
    one bit an entry (the first entry in the highest bit), then k values; index, k int32 entry numbers, then k values.
    The shape is known to both sides.
    """
    num_entries, size = table_CID[0].numel(), table_CID.element_size()
    filled_C = torch.count_nonzero(table_CID, dim=(1, 2)).cpu()
    bitmap_C = (num_entries + 7) // 8 + filled_C * size
    index_C = filled_C * (4 + size)
    return TAG_BYTES + torch.minimum(bitmap_C, index_C).clamp(max=num_entries * size)


def share_above(table_CID: Tensor, limit: float) -> Tensor:
    """(C,) share of entries with ``|x| > limit``; what FedRAP's paper reports of its common table at 1e-1 and 1e-2."""
    return (table_CID.abs() > limit).sum((1, 2)) / table_CID[0].numel()
