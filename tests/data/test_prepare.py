"""Who is a client, who is public, how items are numbered, and what the data card says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedecider.data.card import describe, overlaps
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.data.prepare import PrepareConfig, prepare_domains
from fedecider.evaluation.protocols import history, target, train_part


def config(folder, **given):
    first = {
        "source": "packed",
        "raw": str(folder),
        "domains": "games,films",
        "k_core": 0,
        "output": str(folder / "out"),
    }
    return PrepareConfig(**{**first, **given})


def users(count, shared, domain, length=5, start=0):
    """``shared`` users named alike in all domains, the others not; u and their time differ for each."""
    names = [f"shared{u}" if u < shared else f"{domain}{u}" for u in range(count)]
    return {name: [(u % 7 + i + start, 1000 * i + u) for i in range(length + u % 3)] for u, name in enumerate(names)}


@pytest.fixture
def two_domains(packed):
    return packed({"games": users(40, 20, "games"), "films": users(25, 20, "films", length=4)})


def test_shared_users_become_clients_first(two_domains):
    plain = prepare_domains(config(two_domains, users_per_domain=10))
    first = prepare_domains(config(two_domains, users_per_domain=15, shared_users_first=True))
    assert not all(user.startswith("shared") for user in plain["games"].clients.users)
    assert all(user.startswith("shared") for user in first["games"].clients.users)
    assert first["games"].clients.users == first["films"].clients.users
    more = prepare_domains(config(two_domains, users_per_domain=22, shared_users_first=True))
    assert sum(user.startswith("shared") for user in more["films"].clients.users) == 20
    with pytest.raises(ValueError, match="shared_users_first without users_per_domain"):
        config(two_domains, shared_users_first=True)


@pytest.mark.parametrize(
    "choice",
    [
        {"users_per_domain": 10},
        {"users_per_domain": 25},
        {"public_share": 0.4},
        {"users_per_domain": 5, "public_users_per_domain": 3},
        {"users_per_domain": 5, "public_interactions_per_domain": 20},
    ],
)
def test_public_users_are_clients_nowhere(two_domains, choice):
    domains = prepare_domains(config(two_domains, **choice))
    clients = [set(domain.clients.users) for domain in domains.values()]
    for domain in domains.values():
        assert not set(domain.public.users) & (clients[0] | clients[1])
        if "users_per_domain" in choice:
            assert len(domain.clients.users) == choice["users_per_domain"]
        if choice.get("public_users_per_domain"):
            assert len(domain.public.users) == 3
        if choice.get("public_interactions_per_domain"):
            # The last user added takes the sum over the limit, and only the last one.
            assert 20 <= domain.public.num_events < 20 + 7
    if "public_share" in choice:
        assert all(domain.public.users for domain in domains.values())


def test_all_others_are_public(two_domains):
    domains = prepare_domains(config(two_domains, users_per_domain=10))
    everyone = {f"games{u}" for u in range(20, 40)} | {f"shared{u}" for u in range(20)}
    clients_anywhere = {user for domain in domains.values() for user in domain.clients.users}
    assert set(domains["games"].public.users) == everyone - clients_anywhere


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.tuples(st.integers(8, 20), st.integers(8, 20)),
    shared=st.integers(0, 8),
    num_clients=st.integers(2, 8),
    seed=st.integers(0, 99),
)
def test_groups_are_disjoint_and_splits_do_not_leak(packed, counts, shared, num_clients, seed):
    raw = {name: users(n, shared, name) for name, n in zip(("games", "films"), counts, strict=True)}
    domains = prepare_domains(config(packed(raw), users_per_domain=num_clients, seed=seed))
    clients = {user for domain in domains.values() for user in domain.clients.users}
    for name, domain in domains.items():
        assert not clients & set(domain.public.users)
        for group in (domain.clients, domain.public):
            for user, sequence, times in zip(group.users, group.sequences, group.timestamps or [], strict=True):
                # Numbers lead back to the raw events, in order, nothing lost or added.
                assert [domain.item_keys[item] for item in sequence] == [f"{name}:{i}" for i, _ in raw[name][user]]
                assert times == [time for _, time in raw[name][user]]
                # The three parts are the sequence, and no history holds its target's place.
                assert [*train_part(sequence), target(sequence, "valid"), target(sequence, "test")] == sequence
                assert history(sequence, "valid") == train_part(sequence)
                assert history(sequence, "test") == [*train_part(sequence), target(sequence, "valid")]


def test_seed_and_order_of_domains(two_domains):
    a = prepare_domains(config(two_domains, users_per_domain=10))
    b = prepare_domains(config(two_domains, users_per_domain=10, domains=["films", "games"]))
    c = prepare_domains(config(two_domains, users_per_domain=10, seed=1))
    assert list(b) == ["films", "games"]
    assert {n: d.content_hash() for n, d in a.items()} == {n: d.content_hash() for n, d in b.items()}
    assert a["games"].clients.users != c["games"].clients.users


def test_only_used_items_are_numbered(packed):
    raw = {f"u{u}": [(10 * u + i, i) for i in range(3)] for u in range(9)}
    domain = prepare_domains(
        config(packed({"games": raw}), domains="games", users_per_domain=2, public_users_per_domain=1)
    )["games"]
    assert len(domain.item_keys) == 9
    assert domain.item_keys == sorted(domain.item_keys)
    assert all(
        title == f"Title {key.replace(':', ' ')}" for key, title in zip(domain.item_keys, domain.titles, strict=True)
    )
    assert domain.item_texts[0] == f"title: {domain.titles[0].lower()}"


def test_max_length_keeps_the_newest(packed):
    raw = {f"u{u}": [(i, 50 + i) for i in range(4 + u)] for u in range(3)}
    domain = prepare_domains(config(packed({"games": raw}), domains="games", max_length=4, public_share=0))["games"]
    assert domain.clients.timestamps == [[50, 51, 52, 53], [51, 52, 53, 54], [52, 53, 54, 55]]


def test_repeats_first(packed):
    raw = {f"u{u}": [(0, 1), (1, 2), (0, 3), (2, 4), (2, 4)] for u in range(3)}
    folder = packed({"games": raw})
    kept = prepare_domains(config(folder, domains="games", public_share=0))["games"]
    once = prepare_domains(config(folder, domains="games", public_share=0, repeats="first"))["games"]
    assert kept.clients.sequences == [[0, 1, 0, 2, 2]] * 3
    assert once.clients.sequences == [[0, 1, 2]] * 3
    card = kept.card["clients"]
    assert card["repeated_event_share"] == pytest.approx(2 / 5)
    assert card["repeated_test_item_share"] == 1.0
    assert kept.card["raw"]["exact_duplicate_events"] == 3


def test_card_by_hand():
    events = Events(
        ["a", "b", "c", "d"],
        [[0, 1, 2], [1, 1, 1, 0], [2, 0, 1], [0, 1, 2]],
        [[10, 20, 20], [5, 40, 41, 42], [1, -1, 60], [1, 2, 3]],
    )
    card = describe(events)
    assert card["events"] == 13
    assert card["length"] == {"min": 3, "mean": 3.25, "median": 3.0, "max": 4}
    assert card["repeated_event_share"] == pytest.approx(2 / 13)
    assert card["repeated_test_item_share"] == 0
    assert card["timestamps"] == "partly unknown"
    assert card["known_time_share"] == pytest.approx(12 / 13)
    # c's last two are not both known; of a, b, d only a is tied.
    assert card["users_with_known_last_two"] == 3
    assert card["tied_last_two_share"] == pytest.approx(1 / 3)
    # The newest training event is b's, at 40: the tests of a (20) and d (3) are older, those of b and c are not.
    assert card["test_before_last_train_share"] == pytest.approx(2 / 4)

    unknown = describe(events._replace(timestamps=None))
    assert unknown["timestamps"] == "unknown"
    assert unknown["tied_last_two_share"] is None
    assert describe(Events([], [], None))["users"] == 0


def test_overlaps_by_hand():
    def domain(name, keys, clients, public):
        def events(names):
            return Events(names, [[0, 1, 2]] * len(names), None)

        return Domain(name, Catalogue(name, keys, keys, keys), events(clients), events(public), {})

    found = overlaps(
        {
            "p": domain("p", ["i1", "i2", "i3"], ["a", "b"], ["c"]),
            "q": domain("q", ["i2", "i3", "i4", "i5"], ["b", "d"], ["c", "e"]),
            "r": domain("r", ["i6", "i7", "i8"], ["f", "g"], []),
        }
    )
    assert found["p"] == {"q": {"users": 2, "items": 2}, "r": {"users": 0, "items": 0}}
    assert found["q"]["p"] == {"users": 2, "items": 2}


def test_domain_checks(two_domains):
    domain = prepare_domains(config(two_domains, users_per_domain=10))["games"]
    with pytest.raises(ValueError, match="both clients and public"):
        replace(domain, public=domain.clients)
    with pytest.raises(ValueError, match="not sorted"):
        replace(domain.catalogue, keys=domain.item_keys[::-1])
    with pytest.raises(ValueError, match="duplicate item key"):
        replace(domain.catalogue, keys=[domain.item_keys[0], *domain.item_keys[:-1]])
    with pytest.raises(ValueError, match="item number outside"):
        replace(domain, clients=domain.clients._replace(sequences=[[99, 1, 2], *domain.clients.sequences[1:]]))
    with pytest.raises(ValueError, match="2 events; expected at least 3"):
        replace(domain, clients=domain.clients._replace(sequences=[[1, 2], *domain.clients.sequences[1:]]))
    with pytest.raises(ValueError, match=r"1 user\(s\); expected at least 2"):
        replace(domain, clients=Events(["a"], [[0, 1, 2]], None))
    with pytest.raises(ValueError, match="without text"):
        replace(domain.catalogue, texts=["", *domain.item_texts[1:]])
