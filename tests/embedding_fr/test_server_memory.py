"""What the server's step of FedEASE and FedNear takes: the forms give one model, and the memory is what is said."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embedding_fr import gram
from embedding_fr.gram import item_weights
from embedding_fr.methods import METHODS
from embedding_fr.server_memory import check_server_memory
from fedecider.baselines.ease import BLOCK
from fedecider.running import machine as memory

REPOSITORY = Path(__file__).resolve().parents[2]
SQUARES = ("fedease", "fednear")
SIZE = BLOCK + 88


def sums(dtype=torch.float64):
    """A Gram matrix below and order above the diagonal, and both as whole matrices."""
    generator = torch.Generator().manual_seed(3)
    chance_I = 0.9 / (1.0 + torch.arange(SIZE)).sqrt()
    counts_UI = (torch.rand(500, SIZE, generator=generator) < chance_I).double()
    gram_II = counts_UI.T @ counts_UI
    order_II = (torch.rand(SIZE, SIZE, generator=generator, dtype=torch.float64) * gram_II).triu(1)
    return (gram_II.tril() + order_II).to(dtype), gram_II, order_II - order_II.T


def by_definition(gram_II, order_II, regularisation, direction):
    """Z(I) + direction * Z(P O), with whole matrices."""
    inverse_II = torch.linalg.inv(gram_II + regularisation * torch.eye(SIZE, dtype=torch.float64))
    product_II = torch.eye(SIZE, dtype=torch.float64) + direction * inverse_II @ order_II
    return product_II - inverse_II * (product_II.diagonal() / inverse_II.diagonal())


@pytest.mark.parametrize("direction", [0.0, 0.4])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_every_form_is_one_model(direction, dtype, error, monkeypatch):
    factorisations = []
    invert = gram.invert
    monkeypatch.setattr(gram, "invert", lambda *args: factorisations.append(1) or invert(*args))
    square_II, gram_II, order_II = sums(dtype)
    expected_II = by_definition(gram_II, order_II, 20.0, direction)
    whole_II = item_weights(square_II.clone(), 20.0, 0, torch.float64, direction)["weights"]
    most = expected_II.abs().max()
    assert (whole_II - expected_II).abs().max() < error * most
    assert not whole_II.diagonal().any()
    assert len(factorisations) <= 1
    short = item_weights(square_II.clone(), 20.0, 40, torch.float64, direction)
    assert short["index"].shape == (SIZE, 40)
    assert torch.equal(short["value"], whole_II.T.gather(1, short["index"].long()))
    left_II = whole_II.T.scatter(1, short["index"].long(), 0.0)
    assert (left_II.abs().max(1).values <= short["value"].abs().min(1).values).all()
    narrow_II = item_weights(square_II.clone(), 20.0, 0, torch.float32, direction)["weights"]
    assert torch.equal(narrow_II, whole_II.float())


@pytest.mark.parametrize("name", SQUARES)
def test_the_smallest_change_that_fits_is_named(name, monkeypatch):
    config = METHODS[name].config()
    wide, told, short = {
        "fedease": ("31.5", "--precision float32 takes 10.8 GB", "--precision float32 takes 10.8 GB"),
        "fednear": ("32.5", "--precision float32 takes 21.2 GB", "--precision float32 --top_k 1000 takes 12.5 GB"),
    }[name]
    for gigabytes, text in [
        (32.6, None),
        (
            25.0,
            f"as it is set, which takes {wide} GB, expected at most the 25.0 GB of memory that are available: {told}",
        ),
        (12.6, f": {short}"),
        (3.0, "so take fewer items (--min_item_events)"),
    ]:
        monkeypatch.setattr(memory, "available_bytes", lambda size=gigabytes: int(size * 1e9))
        said = []
        if text is None:
            check_server_memory(name, config, 49_900, said.append)
            assert said[0].startswith(f"{name} with 49,900 items as it is set takes {wide} GB of the 32.6 GB")
            continue
        with pytest.raises(ValueError, match=re.escape(text) + "$"):
            check_server_memory(name, config, 49_900, said.append)
        assert said == []


MEASURED = """
import sys
from pathlib import Path
import torch
from toy_federation import run, toy_federation, toy_population, toy_training
from embedding_fr.blocks import make_block
from embedding_fr.methods import METHODS
from fedecider.federation.method import Download

def peak(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def step(name, num_items, **changes):
    entry, sequences = METHODS[name], [[7 * u % 90 + n for n in range(9)] for u in range(6)]
    federation = toy_federation(num_clients=6, num_items=num_items)
    method = entry.build(federation, toy_training(name), entry.config(**changes))
    block = make_block(toy_population(sequences=sequences, num_items=num_items), range(6))
    uploads = (method.client_update(1, Download({}), {}, one)[0] for one in [block])
    Path("/proc/self/clear_refs").write_text("5")
    before = peak("VmRSS")
    method.server_aggregate(1, {}, uploads)
    print(entry.server_bytes(num_items, entry.config(**changes)), peak("VmHWM") - before)

torch.set_num_threads(1)
changes = dict(eval(sys.argv[2]))
step(sys.argv[1], 99, **changes)  # libraries, compiled code
step(sys.argv[1], 2600, **changes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of a process is read on Linux")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fedease", {}),
        ("fedease", {"precision": "float32"}),
        ("fedease", {"precision": "float32", "top_k": 50}),
        ("fedease", {"secure": True}),
        ("fedease", {"clip": 2.0, "noise_scale": 0.1}),
        ("fednear", {}),
        ("fednear", {"precision": "float32", "top_k": 50}),
        ("fednear", {"secure": True}),
    ],
    ids=str,
)
def test_the_peak_is_what_is_said(name, changes):
    words = [sys.executable, "-c", MEASURED, name, repr(list(changes.items()))]
    path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    said, measured = map(int, done.stdout.splitlines()[-1].split())
    assert measured < 1.05 * said
    assert measured > 0.4 * said
