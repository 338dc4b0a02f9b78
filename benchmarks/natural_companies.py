"""Companies as they are, not dealt out at random: by region, price, start, category, for benchmarks/joining.py.

The Complete Journey as `shared/tools/chains.py` writes it, below the data: chains_raw, the tables, and chains, made by
`fedecider import north.csv,south.csv,east.csv,west.csv --items products.csv --output chains`. Of every customer the
last `BASKETS` baskets are there, of the items that `MIN_BUYERS` customers have in them.

Shape legend: E events, U customers, I items, C categories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from fedecider.data.card import make_card
from fedecider.data.domain import NO_EVENTS, Domain, Events
from fedecider.data.silos import share_by
from fedecider.data.store import load_domains
from fedecider.evaluation.protocols import MIN_EVENTS, train_parts
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import derive_seed

JOURNEY = "journey"
CHAINS = ("north", "south", "east", "west")
BASKETS = 6
"""Or the last three of each half of the year; of a chain that joins in July the last four."""
MIN_BUYERS = 10
MOST_CUSTOMERS = 500
"""Of a company."""
JULY_S = pd.Timestamp("2017-07-01").timestamp()
COMPANIES = 4
PRICE_LEVEL = "price_level"
"""In the card of the whole: of every household."""


def with_card(domain: Domain, **facts: object) -> Domain:
    return replace(domain, card={**make_card(domain), **facts})


def journey(data: Path) -> Domain:
    """All customers of the four chains as one domain; the chain stands in front of the customer."""
    chains = load_domains(data / "chains", CHAINS)
    first = next(iter(chains.values()))
    users, starts, items, baskets, times = [], [0], [], [], []
    for domain in chains.values():
        of = domain.clients.arrays()
        assert of.timestamps is not None
        users += of.users
        starts += (starts[-1] + of.sequences.start_U[1:]).tolist()
        items.append(of.sequences.value_E)
        baskets.append(of.sequences.basket_E)
        times.append(of.timestamps.value_E)
    start_U = np.array(starts)
    sequences = SequenceArray(start_U, np.concatenate(items), basket_E=np.concatenate(baskets))
    events = Events(users, sequences, SequenceArray(start_U, np.concatenate(times)))
    whole = sold_often(replace(first, name=JOURNEY, clients=events, public=NO_EVENTS, unsold=(), card={}))
    return with_card(whole, **{PRICE_LEVEL: price_levels(data / "chains_raw")})


def sold_often(domain: Domain) -> Domain:
    """With the items alone that `MIN_BUYERS` customers have in their last baskets."""
    last = domain.clients.arrays().sequences
    last = last.keep(last.num_after_E < BASKETS)
    num_items = len(domain.item_keys)
    buyer_P = np.unique(last.row_E * num_items + last.value_E) % num_items
    sold = np.flatnonzero(np.bincount(buyer_P, minlength=num_items) >= MIN_BUYERS)
    number_I = np.full(num_items, -1)
    number_I[sold] = np.arange(len(sold))
    clients = domain.clients.renumbered(number_I)
    found = replace(domain, catalogue=domain.catalogue.part(JOURNEY, sold.tolist()), clients=clients, card={})
    return with_baskets(found, np.ones(clients.num_events, bool))


def with_baskets(domain: Domain, kept_E: np.ndarray) -> Domain:
    """The clients with these events, of whom `MIN_EVENTS` baskets are left."""
    users, sequences, times = domain.clients.arrays()
    assert times is not None
    events = Events(users, sequences.keep(kept_E), times.keep(kept_E))
    long = np.flatnonzero(events.arrays().sequences.num_baskets_U >= MIN_EVENTS)
    return replace(domain, clients=events.take(long), card={})


def drawn(domain: Domain, owner_U: list[str], seed: int) -> dict[str, Domain]:
    """Companies by name, of `MOST_CUSTOMERS` at most; "" is nobody's."""
    rng = np.random.default_rng(derive_seed(seed, "natural", domain.name))
    left = Counter({name: MOST_CUSTOMERS for name in owner_U if name})
    chosen = []
    for user in rng.permutation(len(owner_U)).tolist():
        if left[owner_U[user]] > 0:
            left[owner_U[user]] -= 1
            chosen.append(user)
    chosen.sort()
    owner = {domain.clients.users[user]: owner_U[user] for user in chosen}
    return share_by({domain.name: with_card(replace(domain, clients=domain.clients.take(chosen), card={}))}, owner.get)


def by_region(domain: Domain, seed: int, *_: object) -> dict[str, Domain]:
    """The four chains."""
    last = domain.clients.arrays().sequences.num_after_E < BASKETS
    some = with_baskets(domain, last)
    return drawn(some, [chain_of(user) for user in some.clients.users], seed)


def by_start(domain: Domain, seed: int, *_: object) -> dict[str, Domain]:
    """The four chains, of which the first one, north, joins in July: three chains have three baskets of each half of
    the year, north has the last four of the second half, since two of them are held out."""
    users, sequences, times = domain.clients.arrays()
    assert times is not None
    is_late_E, after_E = times.value_E >= JULY_S, sequences.num_after_E
    late_U = np.bincount(sequences.row_E[is_late_E & sequences.is_new_basket_E], minlength=len(users))
    before_E = after_E - late_U[sequences.row_E]
    is_north_E = np.array([chain_of(user) == CHAINS[0] for user in users])[sequences.row_E]
    half = BASKETS // 2
    kept_E = np.where(is_late_E, after_E < half + is_north_E, (before_E < half) & ~is_north_E)
    some = with_baskets(domain, kept_E)
    return drawn(some, [chain_of(user) for user in some.clients.users], seed)


def by_price(domain: Domain, seed: int, load: Callable[[str], Domain]) -> dict[str, Domain]:
    """Four companies by price level: a household's mean, over what it bought, of the logarithm of the price over the
    median price of products of this type. A household is one customer, of the chain where it comes first."""
    level = load(JOURNEY).card[PRICE_LEVEL]
    some = with_baskets(domain, domain.clients.arrays().sequences.num_after_E < BASKETS)
    households = [user.partition(":")[2] for user in some.clients.users]
    first = {household: user for user, household in reversed(list(zip(some.clients.users, households, strict=True)))}
    is_first = [first[one] == user for user, one in zip(some.clients.users, households, strict=True)]
    cuts = np.quantile([level[one] for one in first], [0.25, 0.5, 0.75])
    names = [f"price{1 + int(np.searchsorted(cuts, level[one]))}" for one in households]
    return drawn(some, [name if own else "" for name, own in zip(names, is_first, strict=True)], seed)


def price_levels(tables: Path) -> dict[str, float]:
    types = pd.read_csv(tables / "products.csv", dtype=str).set_index("product_id")["product_type"]
    rows = pd.concat([pd.read_csv(tables / f"{chain}.csv", dtype={"product_id": str}) for chain in CHAINS])
    rows = rows[(rows["quantity"] > 0) & (rows["sales_value"] > 0)]
    price = np.log(rows["sales_value"] / rows["quantity"])
    above = price - price.groupby(rows["product_id"].map(types).fillna("")).transform("median")
    return {str(household): float(value) for household, value in above.groupby(rows["household_id"]).mean().items()}


def chain_of(user: str) -> str:
    return user.partition(":")[0]


def by_category(domain: Domain, seed: int, alpha: float) -> dict[str, Domain]:
    """Four companies of `MOST_CUSTOMERS`, each with a mixture of categories from a symmetric Dirichlet distribution
    (Hsu, Qi and Brown, 2019); a customer's category is the most frequent one of its train part, the second word of
    ``categories`` in the items' texts."""
    rng = np.random.default_rng(derive_seed(seed, f"dirichlet {alpha:g}", domain.name))
    name_I = [text.rpartition("categories: ")[2].split(", ")[1:2] for text in domain.item_texts]
    main = [
        Counter(name for item in row for name in name_I[item]).most_common(1)
        for row in train_parts(domain.clients.sequences)
    ]
    free: dict[str, list[int]] = {}
    for user in rng.permutation(len(main)).tolist():
        if main[user]:
            free.setdefault(main[user][0][0], []).append(user)
    names = sorted(name for name, users in free.items() if len(users) >= MOST_CUSTOMERS)
    owner: dict[str, str] = {}
    for company in range(COMPANIES):
        share_C = rng.dirichlet([alpha] * len(names))
        for _ in range(MOST_CUSTOMERS):
            left_C = share_C * [bool(free[name]) for name in names]
            left_C = left_C if left_C.sum() > 0 else np.array([len(free[name]) for name in names])
            user = free[names[rng.choice(len(names), p=left_C / left_C.sum())]].pop()
            owner[domain.clients.users[user]] = f"{domain.name}.{company + 1}"
    chosen = [place for place, user in enumerate(domain.clients.users) if user in owner]
    some = with_card(replace(domain, clients=domain.clients.take(chosen), card={}))
    return share_by({domain.name: some}, owner.__getitem__)
