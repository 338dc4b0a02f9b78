"""A part of every client's customers, drawn by their keys: for an answer that comes soon."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedecider.data.card import describe
from fedecider.data.consent import user_order
from fedecider.data.domain import Domain
from fedecider.federation.streams import derive_seed

LEAST = 100
"""Customers that a client keeps, if it has them: with fewer its own figures say nothing."""


def num_drawn(num_users: int, share: float) -> int:
    """Customers that stay of ``num_users``."""
    return min(num_users, max(LEAST, math.ceil(share * num_users)))


def drawn_customers(domains: Mapping[str, Domain], share: float) -> dict[str, Domain]:
    """The domains with `num_drawn` of their client users; catalogues and public users stay whole.

    Who is drawn depends on the key alone, so a customer of two clients is drawn, or not, at both of them alike, and
    every training run has the same customers.
    """
    if share >= 1.0:
        return dict(domains)
    drawn, stream_seed = {}, derive_seed(0, "drawn customers")
    for name, domain in domains.items():
        users = domain.clients.users
        order_U = np.array([user_order(stream_seed, user) for user in users], np.uint64)
        clients = domain.clients.take(np.sort(order_U.argsort()[: num_drawn(len(users), share)]))
        drawn[name] = replace(domain, clients=clients, card={**domain.card, "clients": describe(clients)})
    return drawn
