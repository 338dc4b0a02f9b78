"""A client takes the mixture's weights unless one side of it ranks its validation items clearly better."""

import numpy as np
import pytest
import torch
from memory_toys import toy_model
from test_memory import ASKED, MEMORY, UNIT, USERS, all_of, fitted

from fedecider.models.counts import held_out_contexts
from fedecider.models.hybrid import choose_weights, load_memory, one_sided, positions, rank, save_memory

FIRST, FAR = 0.0, 9.0


def ranked(hits: dict[str, list[int]]):
    """Places of ten users' items by the weights: ``hits`` are the users whose item stands first."""
    known = {name: one_sided(MEMORY, name).beside_model.weight_QE for name in ("mixture", "model", "memory")}

    def places(memory) -> torch.Tensor:
        weight_QE = memory.beside_model.weight_QE
        (name,) = (name for name, one in known.items() if np.array_equal(one, weight_QE))
        return torch.tensor([FIRST if user in hits[name] else FAR for user in range(10)])

    return places


def test_sides_rank_as_they_do_alone():
    model = toy_model()
    memory_alone = all_of(rank(one_sided(MEMORY, "memory"), ASKED, model))
    assert torch.allclose(memory_alone, all_of(rank(MEMORY, ASKED, None)))
    model_alone = one_sided(MEMORY, "model")
    assert model_alone.beside_model.weight_QE[:, MEMORY.beside_model.experts.index("model")].tolist() == [1.0] * 3
    assert not torch.allclose(all_of(rank(model_alone, ASKED, model)), memory_alone)
    assert one_sided(MEMORY, "mixture") is MEMORY


@pytest.mark.parametrize(
    ("hits", "taken"),
    [
        ({"mixture": [0, 1], "model": [0, 1, 2, 3, 4, 5], "memory": [0, 1]}, "model"),
        ({"mixture": [0, 1], "model": [0, 1], "memory": [0, 1, 2, 3, 4, 5]}, "memory"),
        ({"mixture": [0, 1], "model": [0, 1, 2, 3, 4], "memory": [0, 1, 2, 3, 4, 5]}, "memory"),  # the better of two
        ({"mixture": [0, 1, 2, 3], "model": [2, 3, 4, 5, 6], "memory": []}, "mixture"),  # better, but within noise
        ({"mixture": [0, 1, 2], "model": [0, 1, 2], "memory": [0, 1, 2]}, "mixture"),
        ({"mixture": [0, 1, 2, 3], "model": [], "memory": []}, "mixture"),
    ],
)
def test_a_side_is_taken_where_it_is_clearly_better(hits, taken):
    memory, choice = choose_weights(MEMORY, ranked(hits))
    assert choice.weights == taken
    assert np.array_equal(memory.beside_model.weight_QE, one_sided(MEMORY, taken).beside_model.weight_QE)
    assert memory.alone is MEMORY.alone
    assert choice.valid["mixture"] == pytest.approx(
        sum(1.0 if user in hits["mixture"] else 1 / np.log2(FAR + 2) for user in range(10)) / 10
    )


def test_one_user_decides_nothing():
    places = ranked({"mixture": [], "model": [0], "memory": []})
    assert choose_weights(MEMORY, lambda memory: places(memory)[:1])[1].weights == "mixture"


def test_the_chosen_weights_are_kept(tmp_path):
    """Also those of a side: a saved memory ranks as the one that was chosen."""
    keys = [f"item{number:02d}" for number in range(len(UNIT))]
    for side in ("model", "memory"):
        memory = one_sided(MEMORY, side)
        again = load_memory(save_memory(memory, keys, tmp_path / side), keys)
        assert torch.equal(all_of(rank(again, ASKED, toy_model())), all_of(rank(memory, ASKED, toy_model())))


def test_ids_of_several_tokens_have_sides_too(monkeypatch):
    monkeypatch.setattr("fedecider.models.hybrid.NUM_BEST", 2)
    memory = fitted(model=toy_model(num_beams=3))
    valid = held_out_contexts(USERS, "valid")
    found, choice = choose_weights(memory, lambda one: positions(one, valid, toy_model(num_beams=3)))
    assert set(choice.valid) == {"mixture", "model", "memory"}
    assert choice.weights in choice.valid
    assert found.beside_model.experts == memory.beside_model.experts


def test_the_model_alone_ranks_its_beams_and_nothing_else():
    """No item of the memory is better than another there; some of them would take places of beams."""
    model = toy_model(num_beams=3)
    memory = one_sided(fitted(model=model), "model")
    found = list(rank(memory, ASKED, model))
    beam_BK = model.beams(ASKED.histories, 0)
    item_BM = torch.cat([batch.item_BM for batch in found])
    assert [sorted(row) for row in item_BM.tolist()] == [sorted(row) for row in beam_BK.tolist()]


def test_a_model_that_has_diverged_is_told():
    model = toy_model()
    broken = model._replace(log_probs=lambda *asked: torch.full_like(model.log_probs(*asked), torch.nan))
    with pytest.raises(ValueError, match="scores are not numbers"):
        positions(MEMORY, ASKED, broken)
