"""Rules for customers who buy again: own frequency, like customers (TIFU-KNN), transitions ranked by texts.

They count baskets: of sequences that are in none, every event is its own. Read are train parts and given public
sequences, and of each user what lies before the held-out basket.

Shape legend: U users whose histories these are, B users of a batch, V all users that may be neighbours, I items,
N baskets of all users.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy

from fedecider.evaluation.sequences import SequenceArray

DECAY = 0.97
"""Of a basket for each later one: of 1, .99, .97 and .95 the best recall@10 of validation baskets of the grocery chains
of The Complete Journey."""
NUM_GROUPS, WITHIN_DECAY, GROUP_DECAY = 7, 0.9, 0.7
NUM_NEIGHBOURS, OWN_SHARE = 300, 0.7
"""m, r_b, r_g, k and alpha of TIFU-KNN: the published ones for Ta-Feng. On validation baskets of The Complete Journey
their recall@10 is .174; with those for Dunnhumby (3, .9, .6, 900, .2) it is .162, for Instacart (3, .9, .7, 900, .9)
.170, for ValuedShopper (7, 1, .6, 300, .7) .170."""
MAX_ASKED = 20_000
"""Users among whom neighbours are sought: of V users every ceil(V / this)-th, as all distances are computed."""
EDGE_WEIGHT = 0.5
"""Of a transition beside a cosine, as published."""


def basket_matrix(rows: SequenceArray, num_items: int) -> scipy.sparse.csr_array:
    """(N, I): 1 for each item of a basket, all baskets of the first user, then the next's, oldest first."""
    start_N = np.append(np.flatnonzero(rows.is_new_basket_E), len(rows.value_E))
    return item_sets(SequenceArray(start_N, rows.value_E), num_items)


def item_sets(rows: SequenceArray, num_items: int) -> scipy.sparse.csr_array:
    """(U, I): 1 for each item that a user has."""
    places, shape = (rows.row_E, rows.value_E), (len(rows), num_items)
    set_UI = scipy.sparse.coo_array((np.ones(len(rows.value_E)), places), shape=shape).tocsr()
    set_UI.data[:] = 1.0
    return set_UI


def basket_pairs(rows: SequenceArray, num_items: int) -> tuple[scipy.sparse.csr_array, scipy.sparse.csr_array]:
    """Pairs within baskets, symmetric, without those of an item with itself; pairs from each basket to the next, with
    these. Both (I, I)."""
    basket_NI = basket_matrix(rows, num_items)
    user_N = rows.row_E[rows.is_new_basket_E]
    first_N = np.flatnonzero(user_N[1:] == user_N[:-1])
    within_II = scipy.sparse.csr_array(basket_NI.T @ basket_NI)
    within_II.setdiag(0.0)
    within_II.eliminate_zeros()
    return within_II, scipy.sparse.csr_array(basket_NI[first_N].T @ basket_NI[first_N + 1])


def own_frequency(rows: SequenceArray, num_items: int, decay: float = DECAY) -> scipy.sparse.csr_array:
    """f(u, i) = sum over the baskets of u with i of ``decay`` ** (baskets of u after it), (U, I)."""
    return _summed(rows, num_items, lambda after_N, _: decay**after_N)


def temporal_frequency(rows: SequenceArray, num_items: int) -> scipy.sparse.csr_array:
    """The user vectors of TIFU-KNN, (U, I).

    The n baskets of a user are min(m, n) groups, the n mod m newest of which have a basket more than the others. A
    basket has the weight r_b ** (baskets after it in its group), a group is the mean of its baskets, the vector the
    mean of the groups with the weights r_g ** (groups after it).
    """

    def weight(after_N: np.ndarray, num_N: np.ndarray) -> np.ndarray:
        size_N, num_larger_N = np.divmod(num_N, NUM_GROUPS)
        num_newest_N = num_larger_N * (size_N + 1)
        is_newest_N = after_N < num_newest_N
        first_N, group_N = np.where(is_newest_N, 0, num_newest_N), np.where(is_newest_N, 0, num_larger_N)
        size_N = np.where(is_newest_N, size_N + 1, size_N)
        further_N, place_N = np.divmod(after_N - first_N, size_N)
        return WITHIN_DECAY**place_N * GROUP_DECAY ** (group_N + further_N) / size_N / np.minimum(num_N, NUM_GROUPS)

    return _summed(rows, num_items, weight)


def like_users(
    vector_BI: scipy.sparse.csr_array, vector_VI: scipy.sparse.csr_array, self_B: np.ndarray
) -> scipy.sparse.csr_array:
    """TIFU-KNN: alpha v_u + (1 - alpha) mean of the k users whose vectors are nearest by Euclidean distance. (B, I).

    ``vector_BI``, ``vector_VI``: of :func:`temporal_frequency`. ``self_B``: which of the V each user is, -1 for
    none; no user is its own neighbour, and where there are fewer than k others all are.
    Source: Hu et al., Modeling Personalized Item Frequency Information for Next-basket Recommendation, SIGIR 2020.
    Differs from the paper: neighbours are known by their train parts alone.
    """
    num_users, num_others = len(self_B), vector_VI.shape[0] - 1
    num_near = min(NUM_NEIGHBOURS, num_others)
    if num_near == 0:
        return OWN_SHARE * vector_BI
    square_V = vector_VI.multiply(vector_VI).sum(1)
    distance_BV = square_V[None, :] - 2.0 * (vector_BI @ vector_VI.T).toarray()  # and |v_u|^2, alike in a row
    distance_BV[np.flatnonzero(self_B >= 0), self_B[self_B >= 0]] = np.inf
    near_BK = np.argpartition(distance_BV, num_near - 1, axis=1)[:, :num_near]
    start_B1 = np.arange(num_users + 1) * num_near
    mean_BV = scipy.sparse.csr_array(
        (np.full(near_BK.size, 1.0 / num_near), near_BK.ravel(), start_B1), (num_users, num_others + 1)
    )
    return scipy.sparse.csr_array(OWN_SHARE * vector_BI + (1.0 - OWN_SHARE) * (mean_BV @ vector_VI))


def transition_edges(next_II: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """log(1 + c(a, b)) over the largest of its row, (I, I): the weights of the transition graph."""
    edge_II = next_II.log1p()
    largest_I = edge_II.max(axis=1).toarray().ravel()
    return scipy.sparse.csr_array(scipy.sparse.diags_array(1.0 / np.where(largest_I > 0.0, largest_I, 1.0)) @ edge_II)


def transitions_by_text(
    newest_BI: scipy.sparse.csr_array, edge_II: scipy.sparse.csr_array, cosine_II: scipy.sparse.csr_array
) -> scipy.sparse.csr_array:
    """Scores of a training-free rule: what followed the newest items, by likeness of texts. (B, I).

    s(i) = [i followed] + cos(text of the newest, text of i) + .5 log(1 + c) / max log(1 + c), c the times that i
    directly followed; means over the items of the newest basket. So items that followed stand before all others.
    ``cosine_II``: of near texts.
    Source: the heuristic TGH-1 of GraphRec, arXiv 2605.07125. Differs from the paper: no places are kept for items two
    and three transitions away (there 7, 2 and 1 of ten), far texts have the cosine 0, and a basket has several newest
    items.
    """
    num_B = np.maximum(newest_BI.sum(1), 1.0)
    mean_BI = scipy.sparse.csr_array(scipy.sparse.diags_array(1.0 / num_B) @ newest_BI)
    edge_BI = scipy.sparse.csr_array(mean_BI @ edge_II)
    followed_BI = edge_BI.copy()
    followed_BI.data = 1.0 + EDGE_WEIGHT * edge_BI.data
    return scipy.sparse.csr_array(followed_BI + mean_BI @ cosine_II)


def _summed(
    rows: SequenceArray, num_items: int, weight: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> scipy.sparse.csr_array:
    """Baskets of each user, each with its weight: of the baskets after it and of all, (N,)."""
    is_new_E = rows.is_new_basket_E
    user_N, after_N = rows.row_E[is_new_E], rows.num_after_E[is_new_E]
    weight_N = weight(after_N, rows.num_baskets_U[user_N])
    place = (user_N, np.arange(len(user_N)))
    weight_UN = scipy.sparse.coo_array((weight_N, place), shape=(len(rows), len(user_N))).tocsr()
    return scipy.sparse.csr_array(weight_UN @ basket_matrix(rows, num_items))
