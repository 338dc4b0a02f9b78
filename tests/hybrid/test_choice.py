"""A client takes the mixture's weights unless one side of it ranks its validation items clearly better."""

import numpy as np
import pytest
import torch
from hybrid_toys import toy_model
from test_hybrid import ASKED, HYBRID, UNIT, USERS, all_of, fitted

from fedecider.models.counts import held_out_contexts
from fedecider.models.hybrid import choose_weights, load_hybrid, positions, rank, save_hybrid, sides_of

FIRST, FAR = 0.0, 9.0


def ranked(hits: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Places of ten users' items by the weights: ``hits`` are the users whose item stands first."""
    return {name: torch.tensor([FIRST if user in found else FAR for user in range(10)]) for name, found in hits.items()}


def one_sided(hybrid, name):
    return hybrid._replace(beside_model=sides_of(hybrid)[name])


def test_sides_rank_as_they_do_alone():
    model = toy_model()
    hybrid_alone = all_of(rank(one_sided(HYBRID, "counts and texts"), ASKED, model))
    assert torch.allclose(hybrid_alone, all_of(rank(HYBRID, ASKED, None)))
    model_alone = one_sided(HYBRID, "model")
    assert model_alone.beside_model.weight_QE[:, HYBRID.beside_model.experts.index("model")].tolist() == [1.0] * 3
    assert not torch.allclose(all_of(rank(model_alone, ASKED, model)), hybrid_alone)
    assert sides_of(HYBRID)["mixture"] is HYBRID.beside_model


@pytest.mark.parametrize(
    ("hits", "taken"),
    [
        ({"mixture": [0, 1], "model": [0, 1, 2, 3, 4, 5], "counts and texts": [0, 1]}, "model"),
        ({"mixture": [0, 1], "model": [0, 1], "counts and texts": [0, 1, 2, 3, 4, 5]}, "counts and texts"),
        (
            {"mixture": [0, 1], "model": [0, 1, 2, 3, 4], "counts and texts": [0, 1, 2, 3, 4, 5]},
            "counts and texts",
        ),  # the better of two
        (
            {"mixture": [0, 1, 2, 3], "model": [2, 3, 4, 5, 6], "counts and texts": []},
            "mixture",
        ),  # better, but within noise
        ({"mixture": [0, 1, 2], "model": [0, 1, 2], "counts and texts": [0, 1, 2]}, "mixture"),
        ({"mixture": [0, 1, 2, 3], "model": [], "counts and texts": []}, "mixture"),
    ],
)
def test_a_side_is_taken_where_it_is_clearly_better(hits, taken):
    hybrid, choice = choose_weights(HYBRID, ranked(hits))
    assert choice.weights == taken
    assert np.array_equal(hybrid.beside_model.weight_QE, one_sided(HYBRID, taken).beside_model.weight_QE)
    assert hybrid.alone is HYBRID.alone
    assert choice.valid["mixture"] == pytest.approx(
        sum(1.0 if user in hits["mixture"] else 1 / np.log2(FAR + 2) for user in range(10)) / 10
    )


def test_the_chosen_weights_are_kept(tmp_path):
    """Also those of a side: a saved hybrid ranks as the one that was chosen."""
    keys = [f"item{number:02d}" for number in range(len(UNIT))]
    for side in ("model", "counts and texts"):
        hybrid = one_sided(HYBRID, side)
        again = load_hybrid(save_hybrid(hybrid, keys, tmp_path / side), keys)
        assert torch.equal(all_of(rank(again, ASKED, toy_model())), all_of(rank(hybrid, ASKED, toy_model())))


def test_ids_of_several_tokens_have_sides_too(monkeypatch):
    monkeypatch.setattr("fedecider.models.hybrid.NUM_BEST", 2)
    hybrid = fitted(model=toy_model(num_beams=3))
    valid = held_out_contexts(USERS, "valid")
    model = toy_model(num_beams=3)
    places = {
        name: positions(hybrid._replace(beside_model=one), valid, model) for name, one in sides_of(hybrid).items()
    }
    found, choice = choose_weights(hybrid, places)
    assert set(choice.valid) == {"mixture", "model", "counts and texts"}
    assert choice.weights in choice.valid
    assert found.beside_model.experts == hybrid.beside_model.experts


def test_the_model_alone_ranks_its_beams_and_nothing_else():
    """No item of the hybrid is better than another there; some of them would take places of beams."""
    model = toy_model(num_beams=3)
    hybrid = one_sided(fitted(model=model), "model")
    found = list(rank(hybrid, ASKED, model))
    beam_BK = model.beams(ASKED.histories, 0)
    item_BM = torch.cat([batch.item_BM for batch in found])
    assert [sorted(row) for row in item_BM.tolist()] == [sorted(row) for row in beam_BK.tolist()]
