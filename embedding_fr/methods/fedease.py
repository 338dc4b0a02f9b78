"""FedEASE: the closed-form item-item model EASE (Steck, WWW 2019) from one sum over clients.

EASE needs the data only through the Gram matrix G = sum_u x_u x_u^T, with x_u in {0, 1}^I the train items of client u.
It is a sum, so it can be federated exactly, in one round, with secure aggregation, and with a privacy budget.
"""

from __future__ import annotations

from embedding_fr import gram
from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import fednear
from embedding_fr.methods.entry import Method, always
from embedding_fr.methods.fednear import PairSumsConfig
from fedecider.baselines.ease import GRID, SPACE
from fedecider.bounds import dataclass
from fedecider.federation.method import FederatedMethod


@dataclass(frozen=True)
class FedeaseConfig(PairSumsConfig):
    """Settings of FedEASE: those of every sum over pairs."""


def fedease(federation: Federation, training: EmbeddingTraining, config: FedeaseConfig) -> FederatedMethod:
    """``G = sum_u s_u x_u x_u^T + noise``, ``P = (G + lambda I)^-1``, ``B = I - P diag(1 / diag P)``, score ``x_u B``.

    It is :func:`embedding_fr.methods.fednear.fednear` with all pairs and all items of a history alike; rounds, ways of
    summing, memory and time stand there. What is sent tells no order. A contribution is scaled by s_u = min(1, clip /
    ||triangle of x_u x_u^T||_2).
    Differs from the paper: nothing in G, B and the score; secure and private sums and short downloads are ours.
    """
    return fednear.pair_sums("fedease", federation, config)


METHOD = Method(
    FedeaseConfig,
    fedease,
    {"num_rounds": 2},
    GRID,
    SPACE,
    item_tables=(),
    client_bytes=fednear.client_bytes,
    server_bytes=fednear.server_bytes,
    smaller_server=gram.SMALLER_SERVER,
    negatives=False,
    guarantee=fednear.guarantee,
    upload_rounds=1,
    needs_server=always,
    needs_everyone=fednear.needs_everyone,
    published=False,
)
