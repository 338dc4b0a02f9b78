"""Ditto on LoRA factors (Li et al., 2021): FedAvg, and beside it a personal adapter that is drawn to the global one."""

from __future__ import annotations

from typing import Any

from fedecider.federation.method import Download, FederatedMethod, Tree
from fedecider.methods.averaged import averaged, global_or_own, scalars_both_ways, train_from_global
from fedecider.methods.client_models import ClientModels, Update
from fedecider.methods.config import DittoConfig
from fedecider.methods.entries import PROXIMAL, Method
from fedecider.methods.local_training import ProximalTerm, train_locally
from fedecider.models.adapters import with_prefix, without_prefix
from fedecider.search_space import Real, Space

GRID: tuple[dict[str, Any], ...] = ({}, {"personal_pull": 0.1}, {"personal_pull": 2.0})
SPACE: Space = {"personal_pull": Real(0.01, 10.0, log=True)}

client_model, scalars = global_or_own, scalars_both_ways


def ditto(models: ClientModels, config: DittoConfig) -> FederatedMethod:
    """``v_i = argmin F_i(v) + lambda / 2 ||v - w||^2``, ``w`` by FedAvg; ``v_i`` stays with its client.

    ``w`` is what the client received at the start of the round (Algorithm 1). ``v`` goes on from the last round and
    never touches ``w``, so that ``w`` is FedAvg's and, with lambda 0, ``v`` is local training's, both bit for bit: the
    two trainings of a round see the same batches and the same dropout, as they would alone. A round costs twice the
    training of the other methods. Variants: ``personal`` (``v``, reported) and ``global``. Logs are those of ``v``,
    with ``global_loss`` for ``w``; ``seconds`` are of both, ``finite`` and ``diverged`` of ``w``, which is sent,
    and ``personal_finite`` of ``v``. Differs from the paper: AdamW, and as many epochs for ``v`` as for ``w``.
    """

    def train(round: int, download: Download, own: Tree, client: int) -> Update:
        proximal = ProximalTerm(download.shared, config.personal_pull)
        personal = train_locally(models, client, round, without_prefix(own, "own"), proximal=proximal)
        sent, _, global_log = train_from_global(models, round, download, own, client)
        kept = with_prefix(personal.pair, "own") if personal.finite else own  # a v that is not finite is not kept
        both = {
            "global_loss": global_log["loss"],
            "seconds": personal.log["seconds"] + global_log["seconds"],
            "personal_finite": personal.finite,
        }
        upload = {key: value for key, value in global_log.items() if key in ("finite", "diverged")}
        own_log = {key: value for key, value in personal.log.items() if key != "diverged"}
        return sent, kept, {**own_log, **both, **upload}

    return averaged(models, "ditto", ("personal", "global"), train, config.weighting)


METHOD = Method(
    DittoConfig,
    ditto,
    client_model,
    scalars,
    GRID,
    SPACE,
    beside_training=PROXIMAL,
)
