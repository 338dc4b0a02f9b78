"""Table 3 of FedEM: methods with elastic merging as a plug-in, each with its own settings as they are by default."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.elastic import elastic
from embedding_fr.local_training import dot_logits
from embedding_fr.merging import Merging, Scorer
from embedding_fr.methods import fedmf, fedncf, fedrap, gpfedrec, pfedrec
from fedecider.federation.method import FederatedMethod, Tree
from fedecider.tuning.space import OneOf, Real, Space

GRID: tuple[dict[str, Any], ...] = ({}, {"scheme": "SM", "rho": 0.9})
SPACE: Space = {**TRAINING_SPACE, "scheme": OneOf(("EM", "DM", "SM")), "rho": Real(0.0, 1.0)}


def fedmf_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> FederatedMethod:
    """FedMF with elastic merging."""
    method = fedmf.fedmf(federation, training, fedmf.FedmfConfig())
    return elastic(method, Scorer(dot_logits), federation, training, config)


def fedncf_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> FederatedMethod:
    """FedNCF with elastic merging of the item table; the network is replaced by the received one, as before."""
    method = fedncf.fedncf(federation, training, fedncf.FedncfConfig())
    return elastic(method, Scorer(fedncf.ncf_logits), federation, training, config)


def pfedrec_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> FederatedMethod:
    """PFedRec with elastic merging."""
    method = pfedrec.pfedrec(federation, training, pfedrec.PfedrecConfig())
    return elastic(method, Scorer(pfedrec.linear_logits), federation, training, config)


def gpfedrec_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> FederatedMethod:
    """GPFedRec with elastic merging of the table that all start from; the regulariser pulls to where it did before."""
    method = gpfedrec.gpfedrec(federation, training, gpfedrec.GpfedrecConfig())
    return elastic(method, Scorer(fedncf.ncf_logits), federation, training, config, offsets=("graph_offset",))


def fedrap_em(federation: Federation, training: EmbeddingTraining, config: Merging) -> FederatedMethod:
    """FedRAP with elastic merging of the common table."""
    method = fedrap.fedrap(federation, training, fedrap.FedrapConfig())
    scorer = Scorer(_fedrap_logits, fedrap.COMMON, (fedrap.PERSONAL,))
    return elastic(method, scorer, federation, training, config)


def _fedrap_logits(params: Tree, item: Tensor | None) -> Tensor:
    return fedrap.logits(params, item)[0]
