import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from fedecider.federation.aggregate import weighted_mean
from fedecider.federation.method import Download, Upload
from fedecider.federation.streams import derive_seed, stream
from fedecider.federation.wire import (
    check_upload,
    dense,
    header_bytes,
    measure,
    message,
    received,
    tensor_bytes,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@given(
    st.dictionaries(
        st.text("abcdefgh._ä", min_size=1, max_size=12),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=3)),
        max_size=5,
    )
)
def test_counted_bytes_are_those_of_the_serialised_message(spec):
    tree = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in spec.items()}
    counted = header_bytes(tree) + sum(map(tensor_bytes, tree.values()))
    assert counted == (len(save(tree)) if tree else 0)


def test_traffic_of_a_block_is_counted_per_client_and_tensor():
    download = Download({"bank": torch.zeros(7, 3)}, {"table": torch.zeros(2, 5)})
    upload = Upload(torch.tensor([4, 9]), torch.ones(2), {"delta": torch.zeros(2, 11, dtype=torch.float64)})
    first, second = measure(download, upload)
    assert first.down == {"bank": 84, "table": 20}
    assert second.up == {"delta": 88}
    assert first.bytes_up == len(save({"delta": torch.zeros(11, dtype=torch.float64)}))


def test_streams_depend_on_every_label_and_not_on_order():
    draws = {
        torch.rand((), generator=stream(seed, "negatives", round, client)).item()
        for seed in (0, 1)
        for round in (1, 2)
        for client in (1, 2, 12)
    }
    assert len(draws) == 12
    assert derive_seed(0, "a", 1) != derive_seed(0, "a", "1")
    assert derive_seed(0, "a", 12) != derive_seed(0, "a", 1, 2)


def by_rows():
    """Two clients over a table of 4 rows: the first holds rows 1 and 3, the second row 0 (and padding)."""
    base = torch.arange(8.0).view(4, 2)
    rows = torch.tensor([[1, 3], [0, -1]])
    values = torch.tensor([[[10.0, 20.0], [30.0, 40.0]], [[-5.0, -6.0], [99.0, 99.0]]])
    clients = torch.tensor([4, 7])
    upload = Upload(clients, torch.tensor([1.0, 3.0]), {"table": values}, rows={"table": rows})
    return Download({"table": base}), upload


def test_rows_become_the_whole_table():
    download, upload = by_rows()
    whole = dense(upload, download)
    assert whole.rows == {}
    assert whole.tensors["table"][0].tolist() == [[0, 1], [10, 20], [4, 5], [30, 40]]
    assert whole.tensors["table"][1].tolist() == [[-5, -6], [2, 3], [4, 5], [6, 7]]
    assert download.shared["table"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    per_client = Download({}, {"table": torch.stack([download.shared["table"], -download.shared["table"]])})
    assert dense(upload, per_client).tensors["table"][1].tolist() == [[-5, -6], [-2, -3], [-4, -5], [-6, -7]]


def test_the_mean_over_rows_is_the_mean_over_whole_tables():
    download, upload = by_rows()
    by_row = weighted_mean([upload], download.shared)["table"]
    whole = weighted_mean([dense(upload, download)], download.shared)["table"]
    assert torch.allclose(by_row, whole)
    assert by_row[0].tolist() == [0.25 * 0 + 0.75 * -5, 0.25 * 1 + 0.75 * -6]


def test_rows_of_a_table_that_was_not_downloaded_stand_among_zeros():
    _, upload = by_rows()
    gradient = upload._replace(num_rows={"table": 5})
    whole = dense(gradient, Download({"other": torch.ones(3)}))
    assert whole.tensors["table"][0].tolist() == [[0, 0], [10, 20], [0, 0], [30, 40], [0, 0]]
    assert whole.tensors["table"][1].tolist() == [[-5, -6], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert [one.up["table"] for one in measure(Download({}), gradient)] == [40, 40]
    mean = weighted_mean([gradient], {"table": torch.zeros(5, 2)})["table"]
    assert mean.tolist() == [[-3.75, -4.5], [2.5, 5.0], [0, 0], [7.5, 10.0], [0, 0]]


MARKED = torch.tensor([[True, False, True, False], [False, True, True, False]])


def marked_upload(rows=MARKED):
    """Two clients that send some rows of a table of four, and all of another tensor."""
    table = torch.arange(1.0, 17.0).view(2, 4, 2) * rows[..., None]
    rest = torch.tensor([[1.0], [5.0]])
    return Upload(
        torch.tensor([4, 7]), torch.tensor([1.0, 3.0]), {"table": table, "rest": rest}, sent_rows={"table": rows}
    )


def test_marked_rows_are_all_that_is_sent_either_way():
    shared = {"table": torch.ones(4, 2), "stack": torch.ones(3, 4, 2), "rest": torch.ones(2)}
    stack = MARKED[:, None] & torch.tensor([[True], [False], [True]])
    own = torch.arange(16.0).view(2, 4, 2)
    download = Download(shared, {"own": own}, sent_rows={"table": MARKED, "stack": stack, "own": MARKED})
    for row, one in enumerate(measure(download, marked_upload())):
        sent = message(download, row)
        assert {name: len(tensor) for name, tensor in sent.items()} == {"table": 2, "stack": 4, "rest": 2, "own": 2}
        assert one.bytes_down == len(save(sent))
        upload = marked_upload()
        assert one.bytes_up == len(save({"table": upload.tensors["table"][row][MARKED[row]], "rest": torch.ones(1)}))
    second = received(download, 1)
    assert second.sent_rows == {}
    assert second.per_client["own"].tolist() == [[[0, 0], [10, 11], [12, 13], [0, 0]]]
    assert second.shared["table"][:, 0].tolist() == [0, 1, 1, 0]
    assert second.shared["stack"][..., 1].tolist() == [[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]]
    assert second.shared["rest"] is shared["rest"]


def test_the_mean_of_a_marked_row_is_over_those_who_sent_it():
    before = {"table": torch.full((4, 2), -1.0), "rest": torch.zeros(1)}
    mean = weighted_mean([marked_upload()], before)
    assert mean["table"].tolist() == [[1, 2], [11, 12], [(5 + 3 * 13) / 4, (6 + 3 * 14) / 4], [-1, -1]]
    assert mean["rest"].tolist() == [4.0]
    upload = marked_upload()
    parts = [
        Upload(
            upload.clients[row : row + 1],
            upload.weights[row : row + 1],
            {name: tensor[row : row + 1] for name, tensor in upload.tensors.items()},
            sent_rows={"table": MARKED[row : row + 1]},
        )
        for row in range(2)
    ]
    assert torch.equal(weighted_mean(parts, before)["table"], mean["table"])
    upload.tensors["table"][1, 1, 0] = torch.nan  # the whole client is left out
    assert weighted_mean([upload], before)["table"].tolist() == [[1, 2], [-1, -1], [5, 6], [-1, -1]]
    everybody = marked_upload(torch.ones(2, 4, dtype=torch.bool))
    plain = everybody._replace(sent_rows={})
    assert torch.equal(weighted_mean([everybody], before)["table"], weighted_mean([plain], before)["table"])


def test_a_row_without_mark_must_not_leave_a_client():
    upload = marked_upload()
    check_upload(upload, {}, upload.clients)
    upload.tensors["table"][0, 1] = 1.0
    with pytest.raises(AssertionError, match="unmarked rows of table"):
        check_upload(upload, {}, upload.clients)
