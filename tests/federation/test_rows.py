"""Tables held by rows: the compiled code and the one for any device write and add the same."""

import pytest
import torch

from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import RowUpdate, Upload
from fedecider.federation.rows import add_rows, add_stacked, write_rows, write_stacked
from fedecider.federation.state import mapped_like

ROWS = torch.tensor([[1, 3, -1], [0, -1, -1]])
VALUES = torch.arange(12.0).view(2, 3, 2) + 50.0
CLIENTS = torch.tensor([2, 0])


def table():
    return torch.arange(24.0).view(3, 4, 2)


@pytest.mark.parametrize("others", [None, -torch.arange(8.0).view(4, 2)])
@pytest.mark.parametrize("mapped", [False, True])
def test_rows_are_written_and_the_others_stay_or_become_one_table(others, mapped):
    own = mapped_like(table()).copy_(table()) if mapped else table()
    write_rows(own, CLIENTS, RowUpdate(ROWS, VALUES, others))
    expected = table()
    if others is not None:
        expected[CLIENTS] = others
    expected[2, 1], expected[2, 3], expected[0, 0] = VALUES[0, 0], VALUES[0, 1], VALUES[1, 0]
    assert torch.equal(own, expected)
    again, kept = table(), torch.zeros(0, 2) if others is None else others
    write_stacked(again, CLIENTS, ROWS, VALUES, kept)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_rows_are_added_in_double_precision(dtype):
    weight_C, total = torch.tensor([0.5, 3.0], dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64)
    weight_I = add_rows(total, ROWS, VALUES.to(dtype), weight_C)
    assert weight_I.tolist() == [3.0, 0.5, 0.0, 0.5]
    assert total.tolist() == [[1 + 3 * 56, 1 + 3 * 57], [26.0, 26.5], [1.0, 1.0], [27.0, 27.5]]
    again, count = torch.ones(4, 2, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    add_stacked(again, count, ROWS, VALUES.to(dtype), weight_C)
    assert torch.equal(again, total)
    assert torch.equal(count, weight_I)


def test_a_mean_of_rows_is_that_of_whole_tables_however_many_blocks_bring_them(monkeypatch):
    """And the table is made and passed over once, not once a block."""
    draw = torch.Generator().manual_seed(3)
    table_ID = torch.randn(9, 2, generator=draw, dtype=torch.float64)
    uploads, whole = [], []
    for client in range(6):
        row_1R = torch.randperm(9, generator=draw)[None, :3]
        value_1RD = torch.randn(1, 3, 2, generator=draw, dtype=torch.float64)
        sent = {"clients": torch.tensor([client]), "weights": torch.tensor([client + 1.0])}
        uploads.append(Upload(**sent, tensors={"item_table": value_1RD}, rows={"item_table": row_1R}))
        own_1ID = table_ID[None].clone()
        own_1ID[0, row_1R[0]] = value_1RD[0]
        whole.append(Upload(**sent, tensors={"item_table": own_1ID}))
    made, real = [], torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda *words, **options: made.append(1) or real(*words, **options))
    found = weighted_mean(uploads, {"item_table": table_ID})["item_table"]
    tables_made = len(made)
    torch.testing.assert_close(found, weighted_mean(whole, {})["item_table"], rtol=0.0, atol=1e-12)
    assert tables_made == 1
