"""Messages of a deployment: whatever arrives is refused with a sentence, or is what was expected."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fuzzing import VALUES, damaged, fixed, told, with_other_value
from hypothesis import given
from hypothesis import strategies as st

from fedecider.deployment.messages import (
    Channel,
    DeploymentConfig,
    Message,
    of_upload,
    pack,
    to_download,
    to_upload,
    unpack,
)
from fedecider.deployment.server import _read_results, _read_scores
from fedecider.federation.method import Upload

REPOSITORY = Path(__file__).resolve().parents[2]
MOST = 1 << 20
LIKE = {"x.lora_a": torch.zeros(2, 3), "table": torch.zeros(4, 2), "flags": torch.zeros(3, dtype=torch.uint8)}
MARK = torch.tensor([[True, False, True, False]])
UPLOAD = Upload(
    torch.tensor([1]),
    torch.tensor([2.0]),
    {name: tensor[None].clone() for name, tensor in LIKE.items()},
    sent_rows={"table": MARK},
)
SENT = pack(of_upload(3, UPLOAD, {"per_client": ["table"]}))
DTYPES = ["F32", "F64", "U8", "BOOL", "I64", "F8_E5M2", "F4", "C64", "U64", "BF16", "X", "", None, 3]
SIZES = st.sampled_from([0, 1, 2, 3, 4, 6, -1, 2**31, 2**62, 2**63, 2**64, 1.5, None, True])
ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(DTYPES), "shape": st.lists(SIZES, max_size=4)},
    optional={"data_offsets": st.lists(SIZES, min_size=1, max_size=3)},
)


def blob_of(header, data: bytes = b"", head=None) -> bytes:
    """A blob with any header and head."""
    head = head or {"format": 2, "kind": "upload", "round": 3, "facts": {"clients": [1], "weights": [1.0], "marks": {}}}
    text = json.dumps({"__metadata__": {"fedecider": json.dumps(head)}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def read_all(blob: bytes) -> None:
    """What a server and a site do with it."""
    one = told(lambda: unpack(blob, MOST))
    if one is None:
        return
    upload = told(lambda: to_upload(one, [1], 3, LIKE))
    if upload is not None:
        assert upload.clients.tolist() == [1]
        assert float(upload.weights[0]) < float("inf")
        for name, tensor in upload.tensors.items():
            assert (tensor[0].shape, tensor.dtype) == (LIKE[name].shape, LIKE[name].dtype)
    download = told(lambda: to_download(one, MOST))
    if download is not None:
        assert sum(tensor.nbytes for tensor in {**download.shared, **download.per_client}.values()) <= 8 * MOST


@given(damaged(SENT))
@fixed(400)
def test_damaged_bytes(blob):
    read_all(blob)


@given(st.dictionaries(st.sampled_from(["x.lora_a", "table", "flags", "marks:table"]), ENTRY), st.binary(max_size=40))
@fixed(400)
def test_other_headers(header, data):
    read_all(blob_of(header, data))


@given(with_other_value({"format": 2, "kind": "upload", "round": 3, "facts": dict(unpack(SENT, MOST).facts)}))
@fixed(400)
def test_other_heads(head):
    header = json.loads(SENT[8 : 8 + int.from_bytes(SENT[:8], "little")])
    data = SENT[8 + int.from_bytes(SENT[:8], "little") :]
    header.pop("__metadata__")
    read_all(blob_of(header, data, head))


@given(st.sampled_from(["marks", "per_client", "clients", "weights", "digest", "held"]), VALUES)
@fixed(300)
def test_other_facts(name, value):
    one = unpack(SENT, MOST)
    changed = one._replace(facts={**one.facts, name: {"table": value} if name == "marks" else value})
    told(lambda: to_upload(changed, [1], 3, LIKE))
    told(lambda: to_download(changed, MOST))


ROWS = st.dictionaries(st.text(max_size=2), VALUES, max_size=2)
TOLD = VALUES | st.fixed_dictionaries({"global": VALUES}) | st.fixed_dictionaries({"row": ROWS})


@given(TOLD)
@fixed(300)
def test_scores_and_results_that_a_site_tells(value):
    scores = told(
        lambda: _read_scores(
            Message("scores", 3, {}, {"scores": value, "num_clients": 1}), 3, ["global"], ["ndcg@10"], 1
        )
    )
    results = told(lambda: _read_results(Message("results", 3, {}, {"results": value})))
    for found in (scores or {}, results or {}):
        assert all(-1e-9 <= one <= 1.0 + 1e-9 for row in found.values() for one in figures(row))


def figures(row):
    return row if isinstance(row, list) else [one for metric in row.values() for one in metric.values()]


KNOWN = {
    "no numbers, of overflowing strides": blob_of(
        {"x.lora_a": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}
    ),
    "a kind of number that torch lacks": blob_of(
        {"x.lora_a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, bytes(4)
    ),
    "overlapping tensors": blob_of(
        {
            "table": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "flags": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
        },
        bytes(6),
    ),
    "a round of 400 digits": blob_of({}, head={"format": 2, "kind": "upload", "round": 10**400, "facts": {}}),
    "nested lists": (100_000).to_bytes(8, "little") + b"[" * 100_000,
}


@pytest.mark.parametrize("what", KNOWN)
def test_blobs_that_were_no_refusals(what):
    with pytest.raises(ValueError, match="no message"):
        unpack(KNOWN[what], MOST)


@pytest.mark.parametrize("marks", [3, None, [], "ab", [2.0], [True], [-1], {"x": 1}])
def test_marks_that_were_no_refusals(marks):
    one = Message(
        "upload",
        3,
        {"table": torch.zeros(0, 2), "marks:table": torch.zeros(1, dtype=torch.uint8)},
        {"clients": [1], "weights": [1.0], "marks": {"table": marks}, "per_client": []},
    )
    for read in (lambda: to_upload(one, [1], 3, LIKE), lambda: to_download(one, MOST)):
        with pytest.raises(ValueError, match="got marks"):
            read()


@pytest.mark.parametrize("weight", [1e308, 10**400, float("nan"), float("inf"), True, "1", 2.0**31 + 1])
def test_weights_that_would_be_the_only_one_that_counts(weight):
    one = unpack(SENT, MOST)
    with pytest.raises(ValueError, match="got the weight"):
        to_upload(one._replace(facts={**one.facts, "weights": [weight]}), [1], 3, LIKE)


def test_a_site_cannot_fill_the_records():
    line = Channel(lambda sent, deadline: {0: pack(Message("x" * 10_000, 1))}, DeploymentConfig(), "abc", ["crime"])
    one = line.ask(1, {0: Message("train", 1)})[0]
    with pytest.raises(ValueError, match="expected the scores") as error:
        _read_scores(one, 1, ["global"], ["ndcg@10"], 1)
    line.refuse(0, str(error.value))
    assert len(line.refused[0]["reason"]) == 500


MEMORY = """
import json, resource, sys
sys.path[:0] = {paths!r}
import test_fuzz_messages as fuzz
resource.setrlimit(resource.RLIMIT_AS, (int(open("/proc/self/statm").read().split()[0]) * 4096 + (256 << 20),) * 2)
MOST = 64 << 20
def wide(shape, marks):
    head = {{"format": 2, "kind": "train", "round": 3,
            "facts": {{"clients": [1], "weights": [1.0], "marks": {{"x": marks}}, "per_client": []}}}}
    entry = {{"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
    bits = {{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    return fuzz.blob_of({{"x": entry, "marks:x": bits}}, b"\\0", head)
cases = {{
    "a header as long as the largest number": (2**64 - 1).to_bytes(8, "little") + b"{{}}",
    "a list of thirty million in the header": (60_000_003).to_bytes(8, "little") + b"[" + b"0," * 30_000_000 + b"0]",
    "a tensor of a terabyte": fuzz.blob_of({{"x": {{"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}}}),
    "rows of a terabyte": wide([0, 2**38], [8]),
    "marks of a terabyte": wide([0, 2], [2**43]),
}}
for name, blob in cases.items():
    one = fuzz.told(lambda: fuzz.unpack(blob, MOST))
    if one is not None:
        assert fuzz.told(lambda: fuzz.to_download(one, MOST)) is None, name
        assert fuzz.told(lambda: fuzz.to_upload(one, [1], 3, fuzz.LIKE)) is None, name
print("all refused")
"""


@pytest.mark.slow
def test_lengths_do_not_decide_over_memory():
    """In a process that may take 256 MiB more than it has after its imports."""
    paths = [str(REPOSITORY), str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.format(paths=paths)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.strip() == "all refused", done.stderr[-2000:]
