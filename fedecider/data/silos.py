"""Silos: the client users of a domain split among companies that sell from the same catalogue, or parts of it.

Shape legend: I items, U client users of a domain, D dimensions, S silos.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedecider.data.card import make_card
from fedecider.data.domain import Domain
from fedecider.data.encoders import tfidf_vectors
from fedecider.evaluation.protocols import MIN_EVENTS, train_parts
from fedecider.federation.streams import derive_seed

NUM_CLUSTERS = 8
"""Taste clusters of a domain's users, where silos are skewed."""
BY_COMPANY = "by company"


def share_out(
    domains: Mapping[str, Domain], num_silos: int, skew: float | None, seed: int, overlap: float = 1.0
) -> dict[str, Domain]:
    """``movies`` -> ``movies.1``, ``movies.2``, ...: disjoint client users, everything else alike.

    Uniform (``skew`` None): users are dealt in random order, each to the smallest silo. Skewed: users are clustered by
    taste and each cluster is cut into silos by shares from a symmetric Dirichlet distribution with concentration
    ``skew``, as Hsu, Qi and Brown (2019, arXiv:1909.06335) cut classes; differs: clusters stand for classes, and each
    cluster is cut apart, so sizes of silos differ too. A user of several domains is in the silo of the same number in
    all of them: the first domain by name decides. Only training parts are read. Below an ``overlap`` of 1 all silos
    sell that share of the items alone, drawn at random; each other item is sold by one, and others' events of it are
    dropped, with users of fewer than `MIN_EVENTS` that are left.

    Raises:
        ValueError: a silo would have fewer than two users.
    """
    number_of: dict[str, int] = {}
    silos: dict[str, list[Domain]] = {}
    for name in sorted(domains):
        domain, rng = domains[name], np.random.default_rng(derive_seed(seed, "silos", name))
        cluster_U = np.zeros(len(domain.clients.users), np.int64) if skew is None else taste_clusters(domain, seed)
        if skew is None:
            _deal(domain.clients.users, number_of, num_silos, rng)
        else:
            _deal_clusters(domain.clients.users, cluster_U, number_of, num_silos, skew, rng)
        silo_U = np.array([number_of[user] for user in domain.clients.users])
        names = [f"{name}.{number + 1}" for number in range(num_silos)]
        how = "uniformly" if skew is None else f"by taste clusters, Dirichlet({skew:g})"
        silos[name] = _split(domain, silo_U, names, how, None if skew is None else cluster_U)
        if overlap < 1.0:
            silos[name] = _with_parts(domain, silos[name], overlap, seed)
    return {silo.name: silo for name in domains for silo in silos[name]}


def _with_parts(domain: Domain, silos: list[Domain], overlap: float, seed: int) -> list[Domain]:
    """The silos with the items that each of them sells."""
    num_items = len(domain.item_keys)
    order_I = np.random.default_rng(derive_seed(seed, "silo items", domain.name)).permutation(num_items)
    owner_I = np.full(num_items, -1)
    apart = order_I[round(overlap * num_items) :]
    owner_I[apart] = np.arange(len(apart)) % len(silos)
    found = []
    for number, silo in enumerate(silos):
        sold = np.flatnonzero((owner_I == -1) | (owner_I == number))
        number_I = np.full(num_items, -1)
        number_I[sold] = np.arange(len(sold))
        clients = silo.clients.renumbered(number_I)
        if len(clients.users) < 2:
            raise ValueError(
                f"got {len(clients.users)} client users of {silo.name} who keep {MIN_EVENTS} events of its "
                f"{len(sold)} items, expected at least 2. Give more users, fewer silos or a larger silo_overlap."
            )
        part = replace(
            silo,
            own_items=silo.items.part(silo.name, sold),
            clients=clients,
            public=silo.public.renumbered(number_I),
            card={},
        )
        facts = {name: value for name, value in silo.card["silo"].items() if name != "same_catalogue"}
        facts |= {
            "users": len(part.clients.users),
            "items_of_all": int((owner_I == -1).sum()),
            "events_of_others_items": silo.clients.num_events - part.clients.num_events,
        }
        part.card.update(silo.card | make_card(part) | {"silo": facts})
        found.append(part)
    return found


def share_by(domains: Mapping[str, Domain], company_of: Callable[[str], str]) -> dict[str, Domain]:
    """``movies`` -> ``north``, ``south``, ...: the client users of each company, everything else alike.

    Of several domains: ``movies.north``, ``books.north``, ... A company without client users of a domain has no silo
    of it.

    Raises:
        ValueError: a company has one client user in a domain.
    """
    silos: list[Domain] = []
    for domain in domains.values():
        owners = [company_of(user) for user in domain.clients.users]
        companies = sorted(set(owners))
        names = [one if len(domains) == 1 else f"{domain.name}.{one}" for one in companies]
        silos += _split(domain, np.array([companies.index(one) for one in owners]), names, BY_COMPANY)
    return {silo.name: silo for silo in silos}


def taste_clusters(domain: Domain, seed: int) -> np.ndarray:
    """(U,) cluster of every client user: k-means on the directions of mean text vectors of training items.

    Vectors are those of :func:`fedecider.data.encoders.tfidf_vectors`, centred over the catalogue: they need no model,
    so they are the same on every machine.
    """
    from sklearn.cluster import KMeans  # only where silos are skewed: --help does without
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # several threads add up in any order
        vector_ID = tfidf_vectors(domain.item_texts).numpy()
        vector_ID -= vector_ID.mean(0)
        taste_UD = np.stack([vector_ID[items].mean(0) for items in train_parts(domain.clients.sequences)])
        taste_UD /= np.maximum(np.linalg.norm(taste_UD, axis=1, keepdims=True), 1e-12)
        num_clusters = min(NUM_CLUSTERS, len(np.unique(taste_UD, axis=0)))
        random_state = derive_seed(seed, "taste clusters", domain.name) % 2**32
        return KMeans(num_clusters, n_init=10, random_state=random_state).fit_predict(taste_UD)


def _deal(users: list[str], number_of: dict[str, int], num_silos: int, rng: np.random.Generator) -> None:
    sizes = np.bincount([number_of[user] for user in users if user in number_of], minlength=num_silos)
    for place in rng.permutation(len(users)).tolist():
        if users[place] not in number_of:
            number_of[users[place]] = smallest = int(sizes.argmin())
            sizes[smallest] += 1


def _deal_clusters(
    users: list[str],
    cluster_U: np.ndarray,
    number_of: dict[str, int],
    num_silos: int,
    skew: float,
    rng: np.random.Generator,
) -> None:
    for cluster in range(int(cluster_U.max()) + 1):
        members = [users[place] for place in rng.permutation(np.flatnonzero(cluster_U == cluster))]
        free = [user for user in members if user not in number_of]
        end_S = np.round(rng.dirichlet([skew] * num_silos).cumsum() * len(free)).astype(np.int64)
        number_of.update(zip(free, np.searchsorted(end_S, np.arange(len(free)), side="right").tolist(), strict=True))


def _split(
    domain: Domain, silo_U: np.ndarray, names: list[str], how: str, cluster_U: np.ndarray | None = None
) -> list[Domain]:
    """Silo s, ``names[s]``, has the client users u with ``silo_U[u] == s``."""
    count_S = np.bincount(silo_U, minlength=len(names)).tolist()
    small = [(name, count) for name, count in zip(names, count_S, strict=True) if count < 2]
    if small:
        dealt = how != BY_COMPANY
        raise ValueError(
            f"got {small[0][1]} client users in the silo {small[0][0]} of {len(silo_U)} in {domain.name!r}, expected "
            f"at least 2. Give more users{', fewer silos' if dealt else ' of this company, or leave it out'}"
            f"{'' if cluster_U is None else ', a larger silo_skew'}{' or another seed' if dealt else ''}."
        )
    return [
        _silo(domain, names, number, np.flatnonzero(silo_U == number), how, cluster_U) for number in range(len(names))
    ]


def _silo(
    domain: Domain, names: list[str], number: int, place_U: np.ndarray, how: str, cluster_U: np.ndarray | None
) -> Domain:
    clients = domain.clients.take(place_U)
    silo = replace(domain, name=names[number], clients=clients, card={})
    facts: dict[str, Any] = {
        "number": number + 1,
        "same_catalogue": [name for name in names if name != silo.name],
        "users": len(place_U),
        "users_of_catalogue": len(domain.clients.users),
        "shared_out": how,
    }
    if cluster_U is not None:
        facts["users_by_cluster"] = np.bincount(cluster_U[place_U], minlength=int(cluster_U.max()) + 1).tolist()
    card = make_card(silo)
    silo.card.update(domain.card | card | {"items": domain.card["items"] | card["items"], "silo": facts})
    return silo
