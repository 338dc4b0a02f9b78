"""What a client of a run counts: its own events, public ones, and those of clients with the same catalogue."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from ensemble_toys import NUM_ITEMS, sequences, vectors

from fedecider.cross_silo import ensembles
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.data.near_texts import unit_vectors
from fedecider.data.sellers import with_shared_catalogues
from fedecider.evaluation.protocols import train_part, train_parts
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.secure_rounds import protocol_bytes, simulated
from fedecider.models import counts
from fedecider.models.config import EnsembleConfig
from fedecider.models.counts import count_events
from fedecider.models.ensemble import fit_weights
from fedecider.models.features import Knowledge


def shop(name: str, seed: int, silo: bool = True) -> Domain:
    def events(prefix: str, found: list[list[int]]) -> Events:
        return Events([f"{name}-{prefix}{number}" for number in range(len(found))], found, None)

    keys = [f"item{number:02d}" for number in range(NUM_ITEMS)]
    clients, public = events("c", sequences(6, seed)), events("p", sequences(3, seed + 50))
    catalogue = name.partition(".")[0] if silo else name
    return Domain(name, Catalogue(catalogue, keys, keys, keys), clients, public, {})


SHOPS = with_shared_catalogues(
    {name: shop(name, seed) for seed, name in enumerate(("books.1", "books.2", "books.3", "games.1"))}
)


def own(name: str):
    return count_events([train_part(sequence) for sequence in SHOPS[name].clients.sequences], NUM_ITEMS)


def public(name: str):
    return count_events(SHOPS[name].public.sequences, NUM_ITEMS)


def counted(sources: str, shops=SHOPS):
    return ensembles.client_counts(shops, EnsembleConfig(sources=sources), seed=1)


def same(one, other) -> bool:
    return (one.pair_II != other.pair_II).nnz == 0 and np.array_equal(one.event_I, other.event_I)


def test_silos_count_what_others_with_their_catalogue_have():
    found, traffic = counted("own,public,others")
    expected = own("books.1").plus(public("books.1")).plus(own("books.2")).plus(own("books.3"))
    assert same(found["books.1"], expected)
    assert same(found["games.1"], own("games.1").plus(public("games.1")))
    assert set(traffic) == {"books.1", "books.2", "books.3"}
    keys_and_shares = sum(protocol_bytes(simulated((0, 1, 2), 1, "any", 0).rules, 0)[1].values())
    assert traffic["books.1"]["up"] == 8 * (NUM_ITEMS * (NUM_ITEMS + 1) // 2 + NUM_ITEMS) + keys_and_shares


@pytest.mark.parametrize(
    ("sources", "expected"),
    [("own", own("books.2")), ("public", public("books.2")), ("others", own("books.1").plus(own("books.3")))],
)
def test_each_source_alone(sources, expected):
    assert same(counted(sources)[0]["books.2"], expected)


def test_clients_with_catalogues_of_their_own_sum_nothing():
    apart = {name: shop(name, seed, silo=False) for seed, name in enumerate(SHOPS)}
    found, traffic = counted("own,others", apart)
    assert traffic == {}
    assert same(found["books.1"], own("books.1"))


def test_events_held_out_by_other_clients_are_not_in_the_sum():
    before = counted("own,public,others")[0]
    changed = {}
    for name, domain in SHOPS.items():
        users = domain.clients
        cut = [[*train_part(sequence), 0, 1] for sequence in users.sequences]
        changed[name] = replace(domain, clients=users._replace(sequences=cut))
    after = ensembles.client_counts(changed, EnsembleConfig(), seed=1)[0]
    assert all(same(before[name], after[name]) for name in SHOPS)


def test_of_a_large_catalogue_pairs_of_the_items_with_most_events_are_summed(monkeypatch):
    """All events are; own counts have all pairs."""
    whole = counted("others")[0]
    monkeypatch.setattr(counts, "MOST_SUMMED_ITEMS", 5)
    found, traffic = counted("others")
    total_I = own("books.1").plus(own("books.2")).plus(own("books.3")).event_I
    chosen = sorted(range(NUM_ITEMS), key=lambda item: (-total_I[item], item))[:5]
    is_kept_II = np.zeros((NUM_ITEMS, NUM_ITEMS), bool)
    is_kept_II[np.ix_(chosen, chosen)] = True
    for name in ("books.1", "books.2", "books.3"):
        assert np.array_equal(found[name].event_I, whole[name].event_I)
        assert np.array_equal(found[name].pair_II.toarray(), whole[name].pair_II.toarray() * is_kept_II)
        assert 0 < found[name].pair_II.nnz < whole[name].pair_II.nnz
        with_own = counted("own,others")[0][name]
        assert same(with_own, found[name].plus(own(name)))
    protocol = sum(protocol_bytes(simulated((0, 1, 2), 1, "any", 0).rules, 0)[1].values())
    assert traffic["books.1"]["up"] == 8 * (NUM_ITEMS + 5 * 6 // 2 + 5) + 2 * protocol


def test_who_goes_takes_all_counts_along():
    """Also which item follows which, which no sum holds."""
    stay, gone = (train_parts(SequenceArray.of(SHOPS[name].clients.sequences)) for name in ("books.1", "books.2"))
    both = count_events([*stay, *gone], NUM_ITEMS)
    left, expected = counts.without(both, count_events(gone, NUM_ITEMS)), count_events(stay, NUM_ITEMS)
    assert same(left, expected)
    assert (left.next_II != expected.next_II).nnz == 0 < expected.next_II.nnz


def test_weights_are_fitted_on_validation_items_and_no_test_item():
    """On these no model of a run is trained; by those it is measured."""
    unit_ID = unit_vectors(vectors())
    knowledge = Knowledge(own("books.1"), unit_ID)

    def weights(change):
        domain = SHOPS["books.1"]
        changed = [change(list(sequence)) for sequence in domain.clients.sequences]
        domains = {"books.1": replace(domain, clients=domain.clients._replace(sequences=changed))}
        run, texts = SimpleNamespace(seed=1), {"books.1": SimpleNamespace(near=None)}
        fitting = ensembles.Fitting(SimpleNamespace(run=run), SimpleNamespace(domains=domains), texts)
        choices = ensembles.choices_for(fitting, "books.1", SimpleNamespace(scores=lambda: None), knowledge)
        return fit_weights(choices, False)

    def moved(place):
        return lambda items: [*items[:place], (items[place] + 1) % NUM_ITEMS, *items[place:][1:]]

    assert weights(moved(-1)) == weights(list)
    assert weights(moved(-2)) != weights(list)
