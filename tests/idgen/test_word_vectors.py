import numpy as np
import pytest
import scipy.sparse as sparse
import torch
from sklearn.utils.extmath import randomized_svd
from transformers import T5Config, T5ForConditionalGeneration

from idgen.word_vectors import _near_items, leading_singular, start_from_word_vectors, word_vectors

# catalogue 0: items 0 and 1 are taken together, and items 2 and 3; catalogue 1 has tokens of its own
TOKENS = [[[3, 4], [5, 4], [6, 7], [8, 7]], [[9], [10], [11]]]
SEQUENCES = [[[0, 1], [1, 0, 1], [2, 3], [3, 2]], [[0, 1], [0, 1, 2]]]


def test_tokens_of_items_that_go_together_point_the_same_way():
    vector_VD = word_vectors(SEQUENCES, TOKENS, 14, 4)
    cosine_VV = vector_VD @ vector_VD.T
    assert cosine_VV[3, 5] > 0.5 > abs(cosine_VV[3, 6])
    assert cosine_VV[6, 8] > 0.5 > abs(cosine_VV[6, 9])
    assert vector_VD.norm(dim=1).tolist() == pytest.approx([0.0] * 3 + [1.0] * 9 + [0.0] * 2, abs=1e-6)
    assert torch.equal(vector_VD, word_vectors(SEQUENCES, TOKENS, 14, 4))


def test_near_items_by_hand():
    first = [0, 2, 2, 1]  # items 0 and 1 are three apart
    got = _near_items([first, [1, 0]], 3, 2).toarray()
    assert got.tolist() == [[0.0, 1.0, 1.5], [1.0, 0.0, 1.5], [1.5, 1.5, 2.0]]
    assert _near_items([first], 3, 3).toarray()[0, 1] == pytest.approx(1 / 3)


def test_a_pool_without_enough_pairs_is_refused():
    with pytest.raises(ValueError, match="larger public pool"):
        word_vectors([[[0, 1]]], [[[3], [4]]], 8, 4)


def test_only_rows_with_a_vector_are_overwritten_and_the_output_layer_stays_tied():
    config = T5Config(vocab_size=14, d_model=4, d_kv=2, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    before = model.shared.weight.detach().clone()
    assert start_from_word_vectors(model, word_vectors(SEQUENCES, TOKENS, 14, 4)) == 9
    assert torch.equal(model.shared.weight[[0, 1, 2, 12, 13]], before[[0, 1, 2, 12, 13]])
    assert torch.allclose(model.shared.weight[3:12].norm(dim=1), torch.full((9,), 2.0))  # sqrt(4)
    assert model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()


@pytest.mark.parametrize(("seed", "width"), [(0, 4), (7, 16), (3, 30)])
def test_singular_vectors_are_those_of_scikit_learn_bit_for_bit(seed, width):
    generator = np.random.default_rng(seed)
    dense = np.where(generator.random((60, 60)) < 0.2, generator.random((60, 60)), 0.0)
    matrix = sparse.csr_matrix(dense + dense.T)
    left, values, _ = randomized_svd(matrix, n_components=width, n_iter=4, random_state=seed)
    got_left, got_values = leading_singular(matrix, width, seed)
    assert np.array_equal(got_left, left)
    assert np.array_equal(got_values, values)
    assert values[0] > values[-1] > 0.0
