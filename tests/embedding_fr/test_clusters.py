"""k-means: by hand, against an independent library, ties, empty clusters, and the draw it starts from."""

import pytest
import torch
from sklearn.cluster import KMeans

from embedding_fr import clusters
from embedding_fr.clusters import k_means
from fedecider.federation.streams import stream


def blobs(num_each=30, spread=0.1):
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]], dtype=torch.float64)
    noise = torch.randn(4, num_each, 2, generator=stream(1, "blobs"), dtype=torch.float64)
    return (centres[:, None] + spread * noise).flatten(0, 1), torch.arange(4).repeat_interleave(num_each)


def test_two_pairs_by_hand():
    found = k_means(torch.tensor([[0.0], [1.0], [10.0], [13.0]]), 2, stream(0, "x"))
    low = int(found.label_N[0])
    assert found.label_N.tolist() == [low, low, 1 - low, 1 - low]
    assert found.label_N.dtype == torch.int64
    assert found.centroid_KD[[low, 1 - low], 0].tolist() == [0.5, 11.5]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("distances", [8, 1 << 22])
def test_far_groups_are_found_from_any_start(monkeypatch, seed, distances):
    monkeypatch.setattr(clusters, "DISTANCES", distances)  # also a few points at a time
    point, true = blobs()
    found = k_means(point, 4, stream(seed, "x"))
    for group in range(4):
        (label,) = found.label_N[true == group].unique().tolist()
        torch.testing.assert_close(found.centroid_KD[label], point[true == group].mean(0))


def test_it_ends_where_the_steps_of_another_library_end():
    """Without structure the end depends on the start; that of scikit-learn begins at the same points."""
    point = torch.randn(200, 3, generator=stream(2, "points"), dtype=torch.float64)
    start = k_means(point, 6, stream(3, "x"), num_steps=0).centroid_KD
    found = k_means(point, 6, stream(3, "x"), num_steps=300)
    other = KMeans(6, init=start.numpy(), n_init=1, max_iter=300, tol=0.0).fit(point.numpy())
    assert found.label_N.tolist() == other.labels_.tolist()
    torch.testing.assert_close(found.centroid_KD, torch.from_numpy(other.cluster_centers_))


def test_a_centroid_without_points_goes_to_the_farthest_one():
    """Three points at 0 draw at most two different starts of four; the third centroid must go to the one left."""
    point = torch.tensor([[0.0], [0.0], [0.0], [4.0], [5.0], [9.0]])
    for seed in range(20):
        found = k_means(point, 4, stream(seed, "x"))
        assert torch.bincount(found.label_N, minlength=4).min() > 0, seed
        assert len({found.label_N[place].item() for place in (0, 3, 4, 5)}) == 4


def test_the_start_is_drawn_by_squared_distance():
    """From 0 the next start is 1 with probability 1 / (1 + 9) and 3 with 9 / 10."""
    point, firsts = torch.tensor([[0.0], [1.0], [3.0]]), []
    for seed in range(3000):
        first, second = k_means(point, 2, stream(seed, "x"), num_steps=0).centroid_KD[:, 0].tolist()
        assert first != second
        if first == 0.0:
            firsts.append(second == 3.0)
    assert 0.86 < sum(firsts) / len(firsts) < 0.94  # about 1,000 draws: four standard errors
    assert 900 < len(firsts) < 1100
