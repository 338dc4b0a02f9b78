import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from fedecider.federation.method import Download, Upload
from fedecider.federation.streams import derive_seed, stream
from fedecider.federation.wire import header_bytes, measure, tensor_bytes

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
