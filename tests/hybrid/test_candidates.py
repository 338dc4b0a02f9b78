"""Lists as long as they are asked for, where item IDs have several tokens and the hybrid is asked about candidates."""

from types import SimpleNamespace

import pytest
import torch
from hybrid_toys import NUM_ITEMS, sequences, toy_model, vectors

from fedecider.data.encoders import unit_vectors
from fedecider.evaluation.protocols import train_part
from fedecider.federation.streams import stream
from fedecider.models import client_model as asking
from fedecider.models.counts import count_events, training_contexts
from fedecider.models.hybrid import HybridConfig, fit_hybrid
from fedecider.models.loaded import mix
from idgen.ranking import RankingContext
from idgen.ranking_config import RankingConfig

HISTORIES = [[1, 2], [3, 4, 5, 3]]


@pytest.mark.parametrize("k", [1, 6, NUM_ITEMS])
def test_a_list_has_as_many_items_as_were_asked_for(k, monkeypatch):
    monkeypatch.setattr("fedecider.models.hybrid.NUM_BEST", 1)
    users, model = sequences(12), toy_model(num_beams=2)
    counts = count_events([train_part(sequence) for sequence in users], NUM_ITEMS)
    unit = unit_vectors(vectors())
    hybrid = fit_hybrid(counts, unit, training_contexts(users, stream(0, "toy")), model, HybridConfig("mixture"))
    for history, found in zip(HISTORIES, mix(hybrid, model, HISTORIES, k), strict=True):
        items = [one.item for one in found]
        assert len(items) == len(set(items)) == min(k, NUM_ITEMS - len(set(history)))
        assert not set(items) & set(history)


def test_beams_have_room_for_the_list_and_the_history(monkeypatch):
    """Four beams are enough for one item behind two; nobody's beams depend on those of others."""
    searched = []

    def search(model, input_ids_BS, mask_BS, trie, *, num_beams):
        searched.append((input_ids_BS[:, 0].tolist(), num_beams))
        return torch.arange(num_beams).expand(len(input_ids_BS), -1), None

    class Catalogue:
        max_length = 2

        def to(self, device):
            return self

        def __len__(self):
            return NUM_ITEMS

    def first_items(task, histories):
        return torch.tensor([[items[0]] for items in histories]), torch.ones(1)

    monkeypatch.setattr(asking, "constrained_beam_search", search)
    monkeypatch.setattr(asking, "encode_histories", first_items)
    task, cpu = SimpleNamespace(trie=Catalogue()), torch.device("cpu")
    beams = asking.model_scores(None, task, RankingContext(RankingConfig(num_beams=4), device=cpu)).beams
    found = beams([*HISTORIES, [6, 7]], 2)
    assert searched == [([1, 6], 4), ([3], 5)]
    assert found.tolist() == [[0, 1, 2, 3, -1], [0, 1, 2, 3, 4], [0, 1, 2, 3, -1]]
    searched.clear()
    assert beams(HISTORIES, 0).shape == (2, 4)
    assert beams(HISTORIES, 100).shape == (2, NUM_ITEMS)
    assert [num_beams for _, num_beams in searched] == [4, NUM_ITEMS]
