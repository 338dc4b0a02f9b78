"""Lists of what is bought again and what is new: who has none of a kind is named, and does not take it from others."""

from types import SimpleNamespace

import torch

from fedecider.cross_silo.lists import lists_data
from fedecider.cross_silo.page import lists_section

NONE = float("nan")


def test_a_company_without_such_items_is_named_and_left_out_of_the_mean():
    some, nobody = torch.tensor([[0.0, NONE], [12.0, 3.0], [1.0, NONE]]), torch.tensor([[NONE, NONE]] * 2)
    again, new = ({"north": of_north, "south": nobody} for of_north in (some, nobody))
    lists = {"repeats": {"ours": again, "own frequency": again}, "new items": {"ours": new, "popularity": new}}
    data = lists_data(lists, ["ours"])
    assert data["repeats"]["num_customers"] == {"north": 3}
    assert data["repeats"]["values"]["ours"]["macro"]["hit@10"] == 1.0
    (section,) = lists_section(SimpleNamespace(metrics={"lists": data}, clients=["north", "south"]))
    assert "Repeats: no test customer of south has such an item." in section.paragraphs
    assert "New items: no test customer of north, south has such an item." in section.paragraphs
    assert len(section.tables) == 1
    assert lists_section(SimpleNamespace(metrics={}, clients=["north"])) == []
