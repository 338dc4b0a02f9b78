"""The permutation test of benchmarks/fusion_by_catalogue.py: all ways once, and weights that lean on clients with one
catalogue are found."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        return runpy.run_path(str(REPOSITORY / "benchmarks" / "fusion_by_catalogue.py"))


@pytest.mark.parametrize(("sizes", "ways"), [([4, 4, 4], 5775), ([2, 2], 3), ([1, 2, 3], 60), ([2, 1, 1], 6), ([5], 1)])
def test_every_way_to_share_the_clients_out_comes_once(script, sizes, ways):
    found = [frozenset(map(frozenset, way)) for way in script["groupings"](range(sum(sizes)), sizes)]
    assert len(found) == len(set(found)) == ways
    assert all(sorted(map(len, way)) == sorted(sizes) for way in found)


def test_weights_that_lean_on_one_catalogue_are_found_whatever_the_size_of_a_row(script):
    groups = [(0, 2), (1, 3)]
    weight_KK = torch.ones(4, 4, dtype=torch.float64)
    weight_KK[0, 2] = weight_KK[2, 0] = weight_KK[1, 3] = weight_KK[3, 1] = 1.3
    assert script["gap"](weight_KK, groups) == pytest.approx(0.3 / 1.1)
    scaled_KK = weight_KK * torch.tensor([[1.0], [5.0], [10.0], [0.1]], dtype=torch.float64)
    scaled_KK.fill_diagonal_(99.0)  # the own weight is no peer's
    assert script["gap"](scaled_KK, groups) == pytest.approx(0.3 / 1.1)
    gaps = [script["gap"](scaled_KK, way) for way in script["groupings"](range(4), [2, 2])]
    assert sum(value >= script["gap"](scaled_KK, groups) - 1e-12 for value in gaps) == 1


def test_a_run_has_learned_weights_or_those_of_its_server(script, tmp_path):
    alpha = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]
    server_KK = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    with pytest.raises(ValueError, match="expected a run of a method with weights"):
        script["weights_of"](tmp_path, 2)
    for round, tree in ((4, {"weights": torch.eye(2)}), (5, {"weights": server_KK})):
        (tmp_path / "checkpoints" / f"round_{round:05d}").mkdir(parents=True)
        save_file(tree, tmp_path / "checkpoints" / f"round_{round:05d}" / "best_server.safetensors")
    assert torch.equal(script["weights_of"](tmp_path, 2), server_KK)
    (tmp_path / "checkpoints" / "round_00006").mkdir()  # the round that was best: its state is not written twice
    save_file({"weights": 2 * server_KK}, tmp_path / "checkpoints" / "round_00006" / "server.safetensors")
    assert torch.equal(script["weights_of"](tmp_path, 6), 2 * server_KK)
    (tmp_path / "fusion_weights.json").write_text(json.dumps({"rounds": [1, 2], "alpha": alpha}))
    assert script["weights_of"](tmp_path, 2).tolist() == alpha[1]
