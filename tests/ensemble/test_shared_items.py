"""Counts of companies that sell parts of a catalogue: what is summed, and what each makes of the sum."""

import numpy as np
import scipy

from fedecider.cross_silo.ensembles import catalogue_groups, client_counts, own_counts
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.sellers import with_shared_catalogues
from fedecider.deployment.counts import what_sites_learn
from fedecider.models.config import EnsembleConfig
from fedecider.models.counts import Counts, counts_of, shared_items, without

SOLD = {"north": "abcde", "south": "bcdef", "east": "cdefg", "west": "xyz"}
OTHERS = EnsembleConfig(kind="logit", sources="others")


def shop(name, keys, catalogue="ean") -> Domain:
    rng = np.random.default_rng(len(name) + ord(name[0]))
    users = [f"{name}:{user}" for user in range(5)]
    sequences = [rng.integers(len(keys), size=7).tolist() for _ in users]
    items = Catalogue(catalogue, list(keys), list(keys), list(keys))
    return Domain(name, items, Events(users, sequences, None), NO_EVENTS, {})


SHOPS = with_shared_catalogues({name: shop(name, keys) for name, keys in SOLD.items()})


def by_key(counts: Counts, keys: str) -> tuple[dict, dict]:
    pairs = counts.pair_II.tocoo()
    return (
        {(keys[r], keys[c]): int(v) for r, c, v in zip(pairs.row, pairs.col, pairs.data, strict=True) if v},
        {key: int(number) for key, number in zip(keys, counts.event_I, strict=True) if number},
    )


def test_others_counts_are_those_of_items_and_pairs_that_three_sell():
    """a, b, f and g have fewer sellers of three; c, d and e have three; west has nothing in common with anybody."""
    three = {name: SHOPS[name] for name in ("north", "south", "east")}
    found, traffic = client_counts(SHOPS, OTHERS, 0)
    own = {name: by_key(own_counts(one), SOLD[name]) for name, one in SHOPS.items()}
    for name in three:
        pairs, events = by_key(found[name], SOLD[name])
        others = [own[one] for one in three if one != name]
        assert pairs == {
            pair: total
            for pair in {(one, other) for one in "cde" for other in "cde"}
            if (total := sum(one.get(pair, 0) for one, _ in others))
        }
        assert events == {key: total for key in "cde" if (total := sum(one.get(key, 0) for _, one in others))}
        assert pairs
        assert traffic[name]["up"] > 0
    assert by_key(found["west"], SOLD["west"]) == ({}, {})
    assert set(traffic) == set(three)
    assert catalogue_groups(SHOPS, OTHERS) == {"ean-north": list(three)}
    (sentence,) = what_sites_learn(SHOPS, OTHERS)
    assert "add up their counts of the 3 items that 3 or more of them sell after the rounds" in sentence
    (sentence,) = what_sites_learn(SHOPS, OTHERS, hides=True)
    assert sentence.startswith("ensembles of north, south, east add up with noise how often items were bought")


def test_a_pair_that_fewer_sell_is_left_out_though_both_items_are_sold_by_three():
    """b is sold by 0, 1, 2 and c by 1, 2, 3: both are summed, the pair would be that of two companies alone."""
    shared = shared_items([list("ab"), list("bc"), list("bcz"), list("c")])
    assert shared.number_S.tolist() == [1, 2]
    pair_II = scipy.sparse.csr_array(np.array([[4, 7], [7, 6]]))
    sent = shared.sent(1, counts_of(pair_II, np.array([3, 5])))
    assert sent.pair_II.toarray().tolist() == [[4, 0], [0, 6]]
    assert sent.event_I.tolist() == [3, 5]
    got = shared.received(2, sent)
    assert got.pair_II.toarray().tolist() == [[4, 0, 0], [0, 6, 0], [0, 0, 0]]
    assert got.event_I.tolist() == [3, 5, 0]
    assert shared.received(0, sent).event_I.tolist() == [0, 3]


def test_two_companies_sum_what_both_sell():
    two = {name: SHOPS[name] for name in ("north", "south")}
    found, _ = client_counts(two, OTHERS, 0)
    _, of_north = by_key(own_counts(two["north"]), SOLD["north"])
    assert by_key(found["south"], SOLD["south"])[1] == {key: of_north[key] for key in "bcde" if key in of_north}
    # far has f with south alone: of three nobody's item has three sellers
    chain = with_shared_catalogues({**two, "far": shop("far", "fgh")})
    assert catalogue_groups(chain, OTHERS) == {}
    assert what_sites_learn(chain, OTHERS) == []


def test_equal_catalogues_send_what_they_always_did():
    counts = [own_counts(shop(name, "abcde")) for name in ("north", "south")]
    shared = shared_items([list("abcde"), list("abcde")])
    for client, one in enumerate(counts):
        sent = shared.sent(client, one)
        assert (sent.pair_II is one.pair_II, sent.event_I is one.event_I, one.next_II.nnz > 0) == (True, True, True)
        assert sent.next_II.nnz == 0  # who follows whom is not sent
    assert shared.received(0, counts[1]) is counts[1]
    assert without(counts[0].plus(counts[1]), counts[0]).event_I.tolist() == counts[1].event_I.tolist()
