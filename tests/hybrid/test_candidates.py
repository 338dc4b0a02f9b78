"""Lists as long as they are asked for, where item IDs have several tokens and the hybrid is asked about candidates."""

from types import SimpleNamespace

import torch
from hybrid_toys import NUM_ITEMS

from fedecider.models import client_model as asking
from idgen.ranking import RankingContext
from idgen.ranking_config import RankingConfig

HISTORIES = [[1, 2], [3, 4, 5, 3]]


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
