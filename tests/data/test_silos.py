"""Silos: disjoint shares of a domain's client users, uniform or by taste, with one catalogue."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fedecider.data.card import make_card
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events, clients_of
from fedecider.data.prepare import PrepareConfig, prepare, prepare_domains
from fedecider.data.sellers import by_catalogue, with_shared_catalogues
from fedecider.data.silos import share_out, taste_clusters
from fedecider.data.store import load_domains, save_domains

TASTES = ("rocket planet comet orbit", "garden flower seed spade", "violin opera sonata choir")
NUM_SHARED = 15


def domain(name: str, num_users: int = 90, first: int = 0) -> Domain:
    """Users of one taste each, ten items a taste; the first ``NUM_SHARED`` have the same keys in all domains."""
    keys = [f"{name}-{item:02d}" for item in range(30)]
    texts = [f"title: {TASTES[item // 10]} {'abcdefghij'[item % 10] * 3}" for item in range(30)]
    users = sorted(
        [f"both{user:02d}" for user in range(NUM_SHARED)] + [f"{name}{user:02d}" for user in range(num_users)]
    )
    sequences = [[10 * ((user + first) % 3) + (user * step) % 10 for step in range(1, 6)] for user in range(len(users))]
    times = [[100 * user + step for step in range(5)] for user in range(len(users))]
    public = Events([f"{name}-public"], [[0, 11, 22]], [[1, 2, 3]])
    made = Domain(name, Catalogue(name, keys, keys, texts), Events(users, sequences, times), public, {})
    made.card.update(make_card(made, catalogue_records={"repeated_same": 7, "repeated_different": 0}))
    return made


DOMAINS = {"shop": domain("shop"), "attic": domain("attic", 40, first=1)}


def rows(events: Events) -> dict[str, tuple[list[int], list[int]]]:
    assert events.timestamps is not None
    return dict(zip(events.users, zip(events.sequences, events.timestamps, strict=True), strict=True))


def numbers(silos: dict[str, Domain], name: str) -> dict[str, str]:
    """User -> number of the silo, for one catalogue."""
    return {
        user: silo.name[-1] for silo in silos.values() if silo.catalogue.name == name for user in silo.clients.users
    }


@pytest.mark.parametrize("skew", [None, 0.3])
def test_silos_are_a_partition_of_the_clients_with_one_catalogue(skew):
    silos = share_out(DOMAINS, 3, skew, 0)
    assert list(silos) == ["shop.1", "shop.2", "shop.3", "attic.1", "attic.2", "attic.3"]
    for name, whole in DOMAINS.items():
        own = [silo for silo in silos.values() if silo.catalogue.name == name]
        found = [rows(silo.clients) for silo in own]
        assert sum(map(len, found)) == len(whole.clients.users)
        assert {user: row for part in found for user, row in part.items()} == rows(whole.clients)
        for silo in own:
            assert silo.clients.users == sorted(silo.clients.users)
            assert (silo.item_keys, silo.item_texts, silo.public) == (whole.item_keys, whole.item_texts, whole.public)
        if skew is None and name == "attic":  # the first by name: nobody has a number yet
            assert [len(part) for part in found] == [19, 18, 18]
    with_shared_catalogues(silos)
    assert list(by_catalogue(silos)) == ["shop", "attic"]


@pytest.mark.parametrize("skew", [None, 0.3])
def test_who_is_where_follows_seed_and_data_alone(skew):
    silos = share_out(DOMAINS, 3, skew, 0)
    other_order = share_out(dict(reversed(DOMAINS.items())), 3, skew, 0)
    assert {name: silo.clients for name, silo in silos.items()} == {n: silo.clients for n, silo in other_order.items()}
    assert numbers(share_out(DOMAINS, 3, skew, 1), "shop") != numbers(silos, "shop")


@pytest.mark.parametrize("skew", [None, 0.3])
def test_a_user_of_two_domains_is_in_one_company(skew):
    silos = share_out(DOMAINS, 3, skew, 0)
    shop, attic = numbers(silos, "shop"), numbers(silos, "attic")
    both = shop.keys() & attic.keys()
    assert len(both) == NUM_SHARED
    assert all(shop[user] == attic[user] for user in both)
    assert len({shop[user] for user in both}) > 1


def test_clusters_are_tastes_and_do_not_see_held_out_items():
    whole = domain("shop")
    taste_U = np.array([items[0] // 10 for items in whole.clients.sequences])
    cluster_U = taste_clusters(whole, 0)
    assert all(len(set(taste_U[cluster_U == cluster])) == 1 for cluster in set(cluster_U.tolist()))
    assert len(set(cluster_U.tolist())) > 3  # NUM_CLUSTERS, not the number of tastes
    changed = [[*items[:-2], 29 - items[-2], 29 - items[-1]] for items in whole.clients.sequences]
    other = replace(whole, clients=whole.clients._replace(sequences=changed))
    assert taste_clusters(other, 0).tolist() == cluster_U.tolist()


def taste_spread(silos: dict[str, Domain]) -> float:
    """Mean over tastes of the largest share of its users that one silo of the shop has."""
    own = [silo for silo in silos.values() if silo.catalogue.name == "shop"]
    count_ST = np.array([np.bincount([items[0] // 10 for items in s.clients.sequences], minlength=3) for s in own])
    return float((count_ST.max(0) / count_ST.sum(0)).mean())


def test_the_smaller_the_concentration_the_more_a_silo_has_one_taste():
    shop = {"shop": domain("shop")}
    spreads = {
        skew: np.mean([taste_spread(share_out(shop, 3, skew, seed)) for seed in range(3)])
        for skew in (None, 100.0, 0.5)
    }
    assert spreads[None] < 0.45
    assert spreads[100.0] < 0.5
    assert spreads[0.5] > spreads[100.0] + 0.1


def test_a_silo_has_two_users_or_there_is_one_error():
    few = {"shop": domain("shop", num_users=0)}
    with pytest.raises(
        ValueError, match=r"got 1 client users in the silo shop\.8 of 15 .* fewer silos or another seed"
    ):
        share_out(few, 8, None, 0)
    with pytest.raises(
        ValueError, match=r"of 15 in 'shop', expected at least 2\. .* a larger silo_skew or another seed"
    ):
        share_out(few, 5, 0.01, 0)


def test_round_trip_and_names_with_a_star(tmp_path):
    silos = share_out(DOMAINS, 12, None, 0)
    save_domains({**silos, **DOMAINS}, tmp_path)
    names = [f"shop.{number}" for number in range(1, 13)]
    back = load_domains(tmp_path, ["shop.*", "attic.2"])
    assert list(back) == [*names, "attic.2"]  # by number: 10 behind 9
    for name, one in back.items():
        assert one.catalogue.name == silos[name].catalogue.name
        assert one.clients == silos[name].clients
        assert one.content_hash() == silos[name].content_hash() == one.card["content_hash"]
    assert load_domains(tmp_path, ["shop"])["shop"].catalogue.name == "shop"
    assert "catalogue" not in json.loads((tmp_path / "shop" / "card.json").read_text())
    with pytest.raises(ValueError, match=r"no prepared data for \['films\.\*'\]"):
        load_domains(tmp_path, ["films.*"])
    with pytest.raises(ValueError, match=r"expected each once"):
        load_domains(tmp_path, ["shop.*", "shop.3"])
    with pytest.raises(ValueError, match=r"a client of both 'shop' and 'shop\.3', expected one of them"):
        load_domains(tmp_path, ["shop", "shop.3"])


def test_the_catalogue_is_part_of_the_hash_where_it_is_another_name():
    whole = domain("shop")
    assert replace(whole, catalogue=replace(whole.catalogue, name="shop")).content_hash() == whole.content_hash()
    assert replace(whole, catalogue=replace(whole.catalogue, name="mall")).content_hash() != whole.content_hash()


def test_silos_that_do_not_belong_together_are_refused(tmp_path):
    first, second = (share_out({"shop": DOMAINS["shop"]}, 2, None, 0)[f"shop.{number}"] for number in (1, 2))
    items = second.catalogue
    others = {
        "keys": replace(second, catalogue=replace(items, keys=[*items.keys[:-1], "shop-99"])),
        "titles": replace(second, catalogue=replace(items, titles=["another", *items.titles[1:]])),
        "texts": replace(second, catalogue=replace(items, texts=["title: another", *items.texts[1:]])),
        "public users": replace(second, public=second.public._replace(sequences=[[0, 11, 23]])),
    }
    for what, other in others.items():
        save_domains({"shop.1": first, "shop.2": other}, tmp_path)
        with pytest.raises(ValueError, match=f"got other {what if what == 'public users' else 'items'} in 'shop"):
            load_domains(tmp_path)


def config(folder, **given) -> PrepareConfig:
    first = {"source": "packed", "raw": str(folder), "domains": "games", "k_core": 0, "output": str(folder / "out")}
    return PrepareConfig(**{**first, **given})


@pytest.fixture
def raw(packed):
    def users(domain, count, shared):
        names = [f"shared{u}" if u < shared else f"{domain}{u}" for u in range(count)]
        return {name: [((3 * u + i) % 11, 10 * i + u) for i in range(4)] for u, name in enumerate(names)}

    return packed({"games": users("games", 30, 10), "films": users("films", 25, 10)})


def test_prepared_silos(raw, capsys):
    whole = prepare_domains(config(raw, users_per_domain=12))
    assert not {"silos", "silo_skew", "public_domains"} & set(whole["games"].card["settings"])
    silos = prepare(config(raw, users_per_domain=12, silos=3))
    out = capsys.readouterr().out
    assert out.count("left out") == 1
    assert [line.split()[:3] for line in out.splitlines()[1:4]] == [[f"games.{n}", "11", "4"] for n in (1, 2, 3)]
    assert silos["games.1"].card["settings"]["silos"] == 3
    back = load_domains(raw / "out", ["games.*"])
    users = [user for silo in back.values() for user in silo.clients.users]
    assert sorted(users) == whole["games"].clients.users
    assert all(silo.public == whole["games"].public for silo in back.values())


def test_domains_of_a_foreign_pool_have_no_clients(raw):
    alone = prepare_domains(config(raw, users_per_domain=12, public_users_per_domain=5))["games"]
    found = prepare_domains(
        config(raw, users_per_domain=12, public_users_per_domain=5, public_domains="films", silos=2)
    )
    assert list(found) == ["games.1", "games.2", "films"]
    assert list(clients_of(found)) == ["games.1", "games.2"]
    assert sorted(found["games.1"].clients.users + found["games.2"].clients.users) == alone.clients.users
    assert found["games.1"].public == alone.public
    named = prepare_domains(config(raw, users_per_domain=12, public_domains="films", catalogue="ean"))
    assert {name: one.catalogue.name for name, one in named.items()} == {"games": "ean", "films": "films"}
    everybody = {f"shared{u}" for u in range(10)} | {f"films{u}" for u in range(10, 25)}
    assert set(found["films"].public.users) == everybody - set(alone.clients.users)
    assert everybody & set(alone.clients.users)
    assert found["films"].card["settings"]["public_domains"] == "films"
    with pytest.raises(ValueError, match="different names"):
        config(raw, public_domains="games")
