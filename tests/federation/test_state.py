"""Copies of the local state: independent of what comes after, in memory or in files."""

import torch

from fedecider.federation.state import is_mapped, mapped_like, snapshot


def trees():
    table = torch.arange(6.0).view(3, 2)
    return {"plain": table.clone(), "mapped": mapped_like(table).copy_(table)}


def test_a_snapshot_does_not_follow_its_tree():
    tree = trees()
    copy = snapshot(tree)
    for tensor in tree.values():
        tensor.zero_()
    for name, tensor in copy.items():
        assert tensor.tolist() == [[0, 1], [2, 3], [4, 5]]
        assert is_mapped(tensor) == (name == "mapped")


def test_an_older_snapshot_lends_its_memory_and_its_files():
    tree = trees()
    older = snapshot(tree)
    places = {name: tensor.data_ptr() for name, tensor in older.items()}
    for tensor in tree.values():
        tensor += 1.0
    newer = snapshot(tree, older)
    assert {name: tensor.data_ptr() for name, tensor in newer.items()} == places
    for name in tree:
        assert torch.equal(newer[name], tree[name])
        assert newer[name].data_ptr() != tree[name].data_ptr()
