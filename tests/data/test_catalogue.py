"""A catalogue is told by the object that domains hold, whatever stands in it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.ensembles import catalogue_groups
from fedecider.cross_silo.estimate import facts_of
from fedecider.cross_silo.item_ids import neighbours_of
from fedecider.cross_silo.joining import overlap_data
from fedecider.data.catalogue import Catalogue, union
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.sellers import by_catalogue, once_each, with_shared_catalogues
from fedecider.data.store import load_domains, save_domains
from fedecider.evaluation.protocols import PROTOCOLS
from fedecider.id_based.clients import id_clients
from fedecider.models.config import EnsembleConfig

NAMES = ("north", "south", "east")


def items(name: str, keys="abcd", words="") -> Catalogue:
    return Catalogue(name, list(keys), list(keys), [f"title: {key}{words}" for key in keys])


def company(name: str, catalogue: Catalogue) -> Domain:
    users = Events([f"{name}:{user}" for user in range(2)], [[0, 1, 2, 0], [1, 2, 0, 1]], None)
    return Domain(name, catalogue, users, NO_EVENTS, {})


def num_catalogues(domains) -> dict[str, int]:
    """As each part of the package counts them."""
    vectors = {name: torch.eye(len(sellers.catalogue.keys)) for name, sellers in by_catalogue(domains).items()}
    near = neighbours_of(vectors, domains)
    asked = parse_settings("", ["--config", "configs/companies.yaml", "--data", "x", "--domains", ",".join(domains)])
    unmatched = [one for one in overlap_data(asked, domains)["sentences"] if "are not matched" in one]
    grouped = catalogue_groups(domains, EnsembleConfig(kind="logit", sources="others"))
    return {
        "groups": len(by_catalogue(domains)),
        "facts": facts_of(domains).num_catalogues,
        "item IDs": len({id(near[name]) for name in domains}),
        "overlap": len(domains) if unmatched else 1,
        "counts": 1 if list(grouped.values()) == [list(domains)] else len(domains),
        "ID-based": id_clients(domains, 0, PROTOCOLS["strict"], torch.device("cpu")).num_catalogues,
    }


def test_equal_lists_are_two_catalogues_and_one_object_is_one():
    shared = items("shop")
    apart = {name: company(name, items(name)) for name in NAMES}
    together = {name: company(name, shared) for name in NAMES}
    assert set(num_catalogues(apart).values()) == {3}
    assert set(num_catalogues(together).values()) == {1}


def test_two_catalogues_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two catalogues called 'shop'"):
        by_catalogue({name: company(name, items("shop")) for name in NAMES})


@settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sets(st.sampled_from("abcdefg"), min_size=3), min_size=2, max_size=3))
def test_domains_that_name_one_catalogue_come_to_share_it(assortments):
    """Each keeps its keys, and finds them in the catalogue under its numbers; equal assortments are one object."""
    apart = {name: company(name, items("ean", sorted(keys))) for name, keys in zip(NAMES, assortments, strict=False)}
    shared = with_shared_catalogues(apart)
    assert len({id(one.catalogue) for one in shared.values()}) == 1
    for name, keys in zip(NAMES, assortments, strict=False):
        one = shared[name]
        assert one.item_keys == sorted(keys)
        assert [one.catalogue.keys[number] for number in one.catalogue_number_I] == one.item_keys
        assert one.is_part == (set(keys) != set.union(*assortments))
        assert one.content_hash() == apart[name].content_hash()
    assert len(once_each(shared)) == len({frozenset(keys) for keys in assortments})


def test_folders_give_one_object_and_a_company_keeps_its_words(tmp_path):
    sold = {"north": items("ean"), "south": items("ean"), "west": items("ean", "bcd", " again")}
    save_domains({name: company(name, one) for name, one in sold.items()}, tmp_path)
    back = load_domains(tmp_path)
    assert back["north"].items is back["south"].items is back["west"].catalogue
    assert back["west"].item_texts == sold["west"].texts
    assert load_domains(tmp_path, ["west"])["west"].catalogue.keys == list("bcd")  # alone it sells all there is


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"keys": list("badc")}, "not sorted"),
        ({"keys": list("aabc")}, "duplicate"),
        ({"titles": ["a"]}, "titles"),
        ({"texts": ["", "b", "c", "d"]}, "without text"),
        ({"texts": ["a\nb", "b", "c", "d"]}, "line breaks"),
    ],
)
def test_items_that_cannot_be(changes, what):
    with pytest.raises(ValueError, match=what):
        replace(items("shop"), **changes)
    with pytest.raises(ValueError, match="at least 2"):
        items("shop").part("few", [1])


def test_a_union_has_the_words_of_the_first():
    whole = union("ean", [items("one", "bc", " 1"), items("two", "acd", " 2")])
    assert (whole.keys, whole.texts) == (list("abcd"), ["title: a 2", "title: b 1", "title: c 1", "title: d 2"])


def test_keys_stand_for_texts_where_no_item_has_one():
    bare = Catalogue("shop", ["b1", "b2"], ["", "Two"], ["", ""])
    assert (bare.titles, bare.texts, bare.has_texts) == (["b1", "Two"], ["b1", "b2"], False)
    named = Catalogue("other", ["b2", "b3"], ["Second", "Third"], ["title: second", "title: third"])
    assert named.has_texts
    assert union("ean", [bare, named]).texts == ["b1", "title: second", "title: third"]
