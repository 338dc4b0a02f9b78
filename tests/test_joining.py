"""What joining brought: clients alone beside the rounds, whom joining hurts, and clients with nothing in common."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "methods"))
from toy_recommender import NAMES, toy_recommender, with_clients

from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.ensembles import Fitting, System
from fedecider.cross_silo.joining import (
    as_trained,
    check_common,
    checked_events,
    chosen_systems,
    leaving,
    may_choose,
    only_items,
    overlap_data,
    system_of,
    trains_alone,
)
from fedecider.cross_silo.results import paired_tests
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.sellers import with_shared_catalogues
from fedecider.models.fused_linear import fused_layers
from fedecider.report.costs import cost_of_joining
from fedecider.report.joining import odd_sentences, of_one_item, unlike_ones

COMPANIES = ("--config", "configs/companies.yaml", "--data", "x", "--domains", "north,south,east")
ROWS = (*COMPANIES, "--hyperparameter_candidates", "[]")


def settings(*words):
    return parse_settings([*ROWS, *words])


def company(name, keys, catalogue=None):
    users = [f"{name}-{number}" for number in range(2)]
    events = Events(users, [[0, 1, 2], [2, 1, 0]], None)
    items = Catalogue(catalogue or name, keys, keys, [f"title: {key}" for key in keys])
    return Domain(name, items, events, NO_EVENTS, {})


def in_one_catalogue(companies):
    return with_shared_catalogues({name: company(name, one.item_keys, "ean") for name, one in companies.items()})


APART = {name: company(name, [f"{name}-{item}" for item in "abc"]) for name in ("north", "south", "east")}
UNMATCHED = {**APART, "south": company("south", ["north-a", "north-c", "south-b"])}
TOGETHER = in_one_catalogue(UNMATCHED)


def test_rows_of_items_are_all_that_such_adapters_change():
    assert only_items(settings())
    assert only_items(settings("--lora_targets", "output"))
    assert not only_items(settings("--lora_targets", "table,attention"))
    assert not only_items(settings("--pretrain.ids", "semantic"))
    assert not only_items(parse_settings(["--method", "fedavg"]))


def test_clients_without_a_common_item_are_trained_alone_and_told_so():
    asked = settings("--secure_sum", "true", "--privacy.clip", "1")
    apart, together = overlap_data(asked, APART), overlap_data(asked, TOGETHER)
    assert (apart["nothing"], together["nothing"]) == (True, False)
    assert apart["sentences"] == ["north, south and east have no common items: joining cannot help."]
    assert together["sentences"][0].startswith("north shares 67 % of its items (100 % of its sales) with south, south")
    assert together["sentences"][1] == "east shares none: joining cannot help."
    assert as_trained(asked, together["nothing"]) == asked
    unmatched = overlap_data(asked, UNMATCHED)  # keys may be of one kind, but nobody says so
    assert unmatched["nothing"]
    assert unmatched["sentences"][:2] == together["sentences"]
    assert "are not matched, and nothing is learnt of them together: north and south." in unmatched["sentences"][2]
    zeros = {name: company(name, keys) for name, keys in (("north", ["07", "08", "x"]), ("south", ["7", "8", "y"]))}
    assert "different items: 2 of north and south (07 and 7)." in overlap_data(asked, zeros)["sentences"][1]
    alone = as_trained(asked, apart["nothing"])
    assert (alone.run.method, alone.run.secure_sum, alone.run.privacy.clip) == ("local", False, None)
    assert as_trained(alone, True) == alone
    assert alone == asked._replace(run=alone.run, method=alone.method)
    for words in (("--local_row", "show"), ("--lora_targets", "table,attention"), ("--method", "centralised")):
        told = settings(*words)
        assert as_trained(told, True) == told
    assert not together["nothing"]
    assert overlap_data(asked, in_one_catalogue(APART))["nothing"]
    with_layers = parse_settings(list(COMPANIES))  # one of the candidates adapts layers
    assert overlap_data(with_layers, APART)["sentences"] == [
        "north, south and east have no common items: joining rarely helps, and only through shared model layers."
    ]


def test_a_deployment_knows_items_alone_and_refuses_rounds_that_would_change_nothing():
    asked, public = settings(), {name: replace(one, clients=NO_EVENTS) for name, one in TOGETHER.items()}
    told = overlap_data(asked, public, public)
    assert told["sentences"][0] == (
        "north shares 67 % of its items with south, south 67 % of its items: joining can help."
    )
    check_common(asked, told)
    at_home = {**public, "north": TOGETHER["north"]}
    assert overlap_data(asked, at_home, at_home, "north")["sentences"] == [
        "north shares 67 % of its items (100 % of its sales) with south; none with east: joining can help."
    ]
    none = {name: replace(one, clients=NO_EVENTS) for name, one in APART.items()}
    apart = overlap_data(asked, none, none)
    with pytest.raises(ValueError, match=r"rounds would change nothing.* north, south and east have no common items"):
        check_common(asked, apart)
    check_common(settings("--local_row", "show"), apart)


def test_who_trains_alone():
    assert trains_alone(settings(), 3)
    assert not trains_alone(settings(), 1)
    assert not trains_alone(settings("--local_row", "off"), 3)
    assert not trains_alone(settings("--method", "local"), 3)
    assert not trains_alone(settings("--method", "counts", "--ensemble.kind", "logit"), 3), "it has done so"


def test_who_trains_alone_counts_alone_and_is_never_away():
    alone = settings("--method", "local", "--participation", "0.5")
    assert (alone.run.ensemble.sources, alone.run.participation) == ("own,public", 1.0)
    assert settings("--method", "local", "--ensemble.sources", "others").run.ensemble.sources == "own"
    assert as_trained(settings("--participation", "0.5"), True).run.ensemble.sources == "own,public"
    with pytest.raises(ValueError, match="counts are all that it exchanges"):
        settings("--method", "counts", "--ensemble.kind", "logit", "--ensemble.sources", "own")


def system(places, test_places=None):
    """Of validation places; the test places are one further down where they are not given."""
    valid, test = (
        {name: torch.tensor(place_U, dtype=torch.float64) for name, place_U in (of_split or {}).items()}
        for of_split in (places, test_places)
    )
    both = {"valid": valid, "test": test or {name: place_U + 1.0 for name, place_U in valid.items()}}
    return System(None, both, both, None)


def test_a_client_leaves_only_where_its_own_model_is_clearly_better():
    random = np.random.default_rng(0)
    same_U = random.integers(0, 30, 400).astype(float)
    joined = system({"hurt": same_U + 3.0, "level": same_U, "helped": same_U, "few": same_U[:1] + 9.0})
    noise_U = np.where(np.arange(400) % 2 == 0, 1.0, -1.0)
    own = system(
        {"hurt": same_U, "level": np.maximum(same_U + noise_U, 0.0), "helped": same_U + 3.0, "few": np.zeros(1)}
    )
    assert leaving(joined, own) == ["hurt"]


FIRST, NOWHERE = 0.0, 50.0
"""Places with ndcg@10 1 and 0."""


def test_a_client_leaves_by_more_than_1645_standard_errors_of_its_validation_customers():
    """Two customers have the item first by their own model, nowhere by the joint one, of the others nobody by both: of
    4 customers .5 / sqrt(1 / 3 / 4) = 1.73 errors, of 5 .4 / sqrt(.3 / 5) = 1.63 (with 5 for 4 in the variance 1.83),
    of 8 .25 / sqrt(1.5 / 7 / 8) = 1.53; one of 8 is 1 error. Test customers would all leave, or none."""
    gains = {"of four": (4, 2), "of five": (5, 2), "of eight": (8, 2), "one": (8, 1), "none": (6, 0)}
    sized = {name: [NOWHERE] * size for name, (size, _) in gains.items()}
    better = {name: [FIRST] * num + [NOWHERE] * (size - num) for name, (size, num) in gains.items()}
    all_first = {name: [FIRST] * size for name, (size, _) in gains.items()}
    for joined, own in ((sized, all_first), (all_first, sized)):
        assert leaving(system(sized, joined), system(better, own)) == ["of four"]
        assert leaving(system(better, joined), system(sized, own)) == []


CHOICE = {
    # validation places of the joint model, the mean of both updates and the own model; then the test places of these,
    # which would choose otherwise
    "crime": ("local", (20.0, 5.0, 2.0), (0.0, 1.0, 30.0)),
    "comics": ("half", (20.0, 2.0, 5.0), (0.0, 30.0, 1.0)),
    "children": ("joined", (2.0, 0.0, 20.0), (30.0, 1.0, 0.0)),
}


def test_a_client_keeps_what_its_validation_customers_like_best_and_that_model_is_shown():
    models = toy_recommender()
    joint, own = (
        {name: size * torch.ones_like(factor) for name, factor in models.start.items()} for size in (1.0, 3.0**0.5)
    )

    def positions_of(client):
        _, valid, test = CHOICE[NAMES[client]]

        def positions(model, split, share):
            sizes = [layer.get_delta_weight("default")[0, 0] for layer in fused_layers(model).values()]
            times = round(float(sizes[0] / 2.0))  # of the joint update: it, the mean of both, the own one
            return torch.full((40,), {"valid": valid, "test": test}[split][times - 1])

        return positions

    models = with_clients(models, positions=positions_of)
    run = SimpleNamespace(run=SimpleNamespace(ensemble=SimpleNamespace(kind="none")))
    fitting = Fitting(run, None, {})
    joined, local = (
        system_of(fitting, label, lambda name, pair=pair: models.model(NAMES.index(name), pair), NAMES)
        for label, pair in (("fedavg", joint), ("local", own))
    )
    keeps, kept = chosen_systems(fitting, joined, local)
    assert keeps == {name: expected for name, (expected, _, _) in CHOICE.items()}
    for name, (expected, *of_splits) in CHOICE.items():
        for split, places in zip(("valid", "test"), of_splits, strict=True):
            place = places[["joined", "half", "local"].index(expected)]
            shown_U = kept.model_of(name).positions(split)
            assert set(shown_U.tolist()) == {place}
            assert torch.equal(kept.model[split][name], shown_U)
            assert torch.equal(kept.whole[split][name], shown_U)


def test_figures_by_hand():
    rows = {
        "fedavg": {"a": torch.tensor([0.0, 3.0, 50.0, 2.0]), "b": torch.tensor([30.0, 30.0])},
        "local": {"a": torch.tensor([0.0, 30.0, 50.0, 40.0]), "b": torch.tensor([30.0, 1.0])},
    }
    users = {"a": ["u1", "u2", "u3", "u4"], "b": ["v1", "v2"]}
    group = {"header_up": 10, "header_down": 20, "up": {"x": 90}, "down": {"x": 180}}
    records = [
        {
            "round": number,
            "clients": [{"client": one, "cpu_s": 1.0 + one, "local": {"cpu_s": 0.5, "score": 0.1}} for one in clients],
            "traffic": [{"clients": clients, **group}],
        }
        for number, clients in ((1, [0, 1]), (2, [0]))
    ]
    tests = paired_tests("fedavg", "fedavg", rows, users)
    means = {one["domain"]: one["difference"]["mean"] for one in tests if one["metric"] == "hit@10"}
    assert means == pytest.approx({"a": 0.5, "b": -0.5, "macro": 0.0})
    assert cost_of_joining(records, ["a", "b"], ["a", "b"]) == {
        "num_rounds": 2,
        "joined_cpu_s": 2.0,
        "local_cpu_s": 0.75,
        "down": 300.0,
        "up": 150.0,
    }
    assert cost_of_joining(records, ["a", "b"], ["a"])["up"] == 200.0
    assert cost_of_joining([], ["a"], ["a"])["joined_cpu_s"] is None


def test_hidden_users_have_no_choice_since_own_training_has_no_noise():
    assert may_choose(settings())
    assert not may_choose(settings("--user_privacy.clip", "1", "--user_privacy.noise_scale", "2"))
    assert not may_choose(settings("--local_row", "show"))


def test_mixed_up_item_numbers_are_seen_in_texts():
    """Customers stay with one of five kinds of items, whose texts are alike; west calls items by others' numbers."""
    draw, unit = np.random.default_rng(0), np.eye(5)
    number_I = draw.permutation(40)
    kinds = unit[np.arange(40) // 8]
    goods = Catalogue("shop", *([f"k{item:02}" for item in range(40)] for _ in range(3)))

    def shop(name, count, numbers=None):
        rows = [(8 * draw.integers(5) + draw.permutation(8)[:6]).tolist() for _ in range(count)]
        rows = rows if numbers is None else [[int(numbers[item]) for item in row] for row in rows]
        events = Events([f"{name}-{user}" for user in range(count)], rows, None)
        return Domain(name, goods, events, NO_EVENTS, {})

    domains = {name: shop(name, 200) for name in ("north", "south")} | {"east": shop("east", 30)}
    unit_of = dict.fromkeys(("north", "south", "east", "west"), kinds)
    fine = checked_events({**domains, "west": shop("west", 30)}, unit_of)
    assert fine["north"]["likeness"] == pytest.approx(0.8, abs=0.05)  # 1 less the fifth that chance gives
    assert unlike_ones(fine) == of_one_item(fine) == odd_sentences(fine) == []
    mixed = shop("west", 200, number_I)
    wrong = checked_events({**domains, "west": mixed}, unit_of)
    assert unlike_ones(wrong) == ["west"]
    assert abs(wrong["west"]["likeness"]) < 0.1
    apart = {name: replace(one, catalogue=replace(goods, name=name)) for name, one in domains.items()}
    other = checked_events(apart, unit_of)
    assert all(one.keys() == {"most_sold"} for one in other.values()), "other goods have other texts"
    alone = checked_events({"west": replace(mixed, public=domains["north"].clients)}, unit_of)
    assert unlike_ones(alone) == ["west"], "a site by itself looks at the public users"
    *_, warned = odd_sentences(wrong)
    assert warned.startswith("Warning: texts of items that customers of west buy in a row are similar")

    same = replace(domains["east"], name="west", clients=Events(["a", "b", "c"], [[7, 7, 7, 7]] * 3, None))
    found = checked_events({**domains, "west": same}, unit_of)
    assert unlike_ones(found) == [], "of one item there are no pairs"
    assert odd_sentences(found) == [
        "Warning: 100 % of the events of west are of one item. Its number may stand for many items."
    ]
    nearly = [[8, 7, 7, 7, 7, 7, 9, 7, 7], [7, 7, 7, 30, 7, 7, 20, 7]] * 9
    same = replace(same, clients=Events([str(one) for one in range(18)], nearly, None))
    (said,) = odd_sentences(checked_events({**domains, "west": same}, unit_of))
    assert "are of one item" in said, "one cause, one warning"
