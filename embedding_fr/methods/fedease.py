"""FedEASE: the closed-form item-item model EASE (Steck, WWW 2019) from one sum over clients.

EASE needs the data only through the Gram matrix G = sum_u x_u x_u^T, with x_u in {0, 1}^I the train items of client u.
It is a sum, so it can be federated exactly, in one round, with secure aggregation, and with a privacy budget.
"""

from __future__ import annotations

import math
from typing import Literal

from embedding_fr import gram
from embedding_fr.blocks import Federation
from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import fednear
from embedding_fr.methods.entry import Method, always
from embedding_fr.methods.fednear import FednearConfig
from fedecider.baselines.ease import GRID, SPACE
from fedecider.bounds import NotNegative, Positive, ZeroOrMore, dataclass
from fedecider.federation.method import FederatedMethod


@dataclass(frozen=True)
class FedeaseConfig:
    """Settings of FedEASE.

    Args:
        regularisation: The regularisation lambda, the L2 weight of EASE; it scales with the number of users.
        secure: If true, uploads are masked, so that the server sees the sum only, of three fifths of the clients at
            least; they are then whole triangles.
        clip: The largest L2 norm of a client's contribution (upper triangle); x_u is scaled down to it. 0 bounds
            nothing.
        noise_scale: The size of the Gaussian noise on the sum, divided by clip; 0 adds none. It needs clip.
        delta: The probability that (epsilon, delta) leaves open.
        top_k: The number of entries of each column of B that clients get, by size; 0 sends all.
        precision: The number format of the sum and of the solution at the server, float32 or float64; float32 takes
            half the memory and half the time.
    """

    regularisation: Positive = 200.0
    secure: bool = False
    clip: NotNegative = 0.0
    noise_scale: NotNegative = 0.0
    delta: float = 1e-5
    top_k: ZeroOrMore = 0
    precision: Literal["float32", "float64"] = "float64"

    def __post_init__(self) -> None:
        _ = self.pairs  # its own checks

    @property
    def pairs(self) -> FednearConfig:
        """The same with all pairs and all items of a history alike."""
        return FednearConfig(
            self.regularisation,
            pair_reach=math.inf,
            history_reach=math.inf,
            direction=0.0,
            secure=self.secure,
            clip=self.clip,
            noise_scale=self.noise_scale,
            delta=self.delta,
            top_k=self.top_k,
            precision=self.precision,
        )


def fedease(federation: Federation, training: EmbeddingTraining, config: FedeaseConfig) -> FederatedMethod:
    """``G = sum_u s_u x_u x_u^T + noise``, ``P = (G + lambda I)^-1``, ``B = I - P diag(1 / diag P)``, score ``x_u B``.

    It is :func:`embedding_fr.methods.fednear.fednear` with all pairs and all items of a history alike; rounds, ways of
    summing, memory and time stand there. What is sent tells no order. A contribution is scaled by s_u = min(1, clip /
    ||triangle of x_u x_u^T||_2).
    Differs from the paper: nothing in G, B and the score; secure and private sums and short downloads are ours.
    """
    return fednear.pair_sums("fedease", federation, config.pairs)


METHOD = Method(
    FedeaseConfig,
    fedease,
    {"num_rounds": 2},
    GRID,
    SPACE,
    item_tables=(),
    client_bytes=lambda items, rows, training, config: fednear.client_bytes(items, rows, training, config.pairs),
    server_bytes=lambda items, config: fednear.server_bytes(items, config.pairs),
    smaller_server=gram.SMALLER_SERVER,
    negatives=False,
    guarantee=lambda config: fednear.guarantee(config.pairs),
    upload_rounds=1,
    needs_server=always,
    needs_everyone=lambda config: config.secure,
    published=False,
)
