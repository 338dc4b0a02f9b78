"""Benchmarks of growth, of public codes, of simulation engines and of validation, at sizes that say nothing."""

import evaluation_speed
import growth
import numpy as np
import peers
import pytest
import torch


@pytest.mark.parametrize("measured", [("measure_embedding", "fedmf", 12, 60), ("measure_silos", "fedecider", 2, 40)])
def test_a_point_has_all_four_figures(measured):
    name, *size = measured
    point = getattr(growth, name)(*size)
    assert point.clients_s > 0
    assert point.server_s > 0
    assert point.bytes_each > 0
    assert point.megabytes >= 0


def test_the_plain_loop_of_the_engines_is_federated_averaging(tmp_path):
    for user, size in enumerate((3, 9)):
        items, labels = np.arange(size), (np.arange(size) % 2).astype(np.float32)
        np.savez(tmp_path / f"user-{user}.npz", items=items, labels=labels, sequence=items)
    case = peers.Case("loop", 2, 1, str(tmp_path), 12)
    start = peers.start_table(12)
    torch.manual_seed(0)
    first, count = peers.train_user(case, 0, start)
    assert count == 3
    assert np.array_equal(first[3:], start[3:])  # items that it has not
    assert not np.array_equal(first[:3], start[:3])
    own = np.load(tmp_path / "vector-0.npy")
    peers.train_user(case, 0, start)
    assert not np.array_equal(np.load(tmp_path / "vector-0.npy"), own)  # it goes on from where it was
    peers.loop(case)
    assert (tmp_path / "vector-1.npy").exists()


def test_the_parts_of_a_validation_are_compared_in_their_places_before_they_are_timed(tmp_path, monkeypatch):
    sizes = {"users": 60, "items": 90, "events": 9, "timed_users": 40, "eval_users": 20, "turns": 1}
    sizes |= {"views_users": 30, "views_items": 40}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["evaluation_speed.py", *words, "--output", str(tmp_path / "found.md")])
    evaluation_speed.main()
    text = (tmp_path / "found.md").read_text()
    assert "| every user | 60 |" in text
    assert "| `--num_eval_users 20` | 20 |" in text
    assert [f"| {name} |" in text for name in ("fedmf", "fedncf", "fedrecgel")] == [True] * 3
    assert text.count("of 40 |") == 3
    assert "| perfedrec | personal, cluster, global |" in text
    federation = evaluation_speed.drawn_setup("fedncf", evaluation_speed.synthetic(60, 90, 9), 40)
    _, plain, now = evaluation_speed.pair("fedncf", federation)
    for block in federation.validated:
        assert (plain(block) - now(block)).abs().max() <= 1.0
