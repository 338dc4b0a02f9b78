"""FedEM as its public code has it, where that differs from the paper.

Shape legend: N clients of the run, V clients of a cohort, C clients of a block, I items, D dims, B examples, R touched
rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from embedding_fr import compiled
from embedding_fr.averaged import score_all
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import EmbeddingTraining
from embedding_fr.examples import round_examples
from embedding_fr.kernels import Kernel
from embedding_fr.local_training import Logits, Objective, train_epochs
from embedding_fr.merging import ADAPTER, LAST, Merging, features, merged_table, start_merging, weights_of
from embedding_fr.methods.fedmf import mf_model
from embedding_fr.mixing import PERSONAL, Cohort, collect, mixed_columns, squared_distances, start_server
from embedding_fr.optimisers import Optimiser
from embedding_fr.similarity import code_weights, first_components
from embedding_fr.stacked import check_finite, inner_products, set_rows, take
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.federation.streams import stream

TABLE = "item_table"


def code_method(
    federation: Federation, training: EmbeddingTraining, merging: Merging, alpha: float, mixed_share: float
) -> FederatedMethod:
    """A client that has a mix first replaces its table by the merge, with its last adapter. Its logits then merge that
    table with the mix once more; on every mini-batch the adapter takes a step, then the user embedding and the table,
    whose gradient runs through the merge and through the adapter's input. Uploads are without the second merge.

    In each round the server mixes the tables of a random ``mixed_share`` of the cohort among themselves
    (:func:`embedding_fr.similarity.code_weights` on the distances of first principal components). Only these clients
    have a mix in the next round: all others, and everybody in the first round, train on alone. Variant ``merged`` is
    the code's.

    Differs from the public code: clients do not stop early when their loss stalls (relative change below 1e-4);
    everybody draws an own user embedding and adapter, where the code starts all alike; start values are N(0, 1) with
    ``init_std`` 1 only. The traffic counts a table for every client, mixed or not.
    """
    model = mf_model(federation, training)
    rates = {"user": training.learning_rate, TABLE: training.item_rate}
    rates[ADAPTER] = merging.adapter_rate(training)
    optimiser = Optimiser("adam", rates, training.weight_decay, groups=((ADAPTER,), ("user", TABLE)))

    def init() -> tuple[Tree, Tree]:
        local = {**model.private, **start_merging(merging, model.shared[TABLE], federation)}
        return start_server(model.shared[TABLE], federation.num_clients), local

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return Download({}, {TABLE: server[TABLE][clients], PERSONAL: server[PERSONAL][clients]})

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        drawn = round_examples(federation, training, block, round)
        start_CID, rho_C = current_table(merging, download, own)
        row = drawn.row_CR.clamp(min=0)
        frozen = {"sent": take(download.per_client[TABLE], row), "has_mix": download.per_client[PERSONAL]}
        trained = {"user": own["user"].clone(), ADAPTER: own[ADAPTER].clone(), TABLE: take(start_CID, row)}
        kernel = merging_kernel(merging, frozen) if compiled.takes(frozen["sent"]) else None
        objective = Objective(merging_logits(merging), kernel=kernel)
        loss_C = train_epochs(objective, {**trained, **frozen}, drawn, training, optimiser)
        check_finite(trained, loss_C, block.clients, round)
        table_CID = set_rows(start_CID, drawn.row_CR, trained[TABLE])
        upload = Upload(block.clients, block.data.num_train_C.to(loss_C.dtype), {TABLE: table_CID})
        logs = [{"loss": loss, "rho": rho} for loss, rho in zip(loss_C.tolist(), rho_C.tolist(), strict=True)]
        return upload, {"user": trained["user"], ADAPTER: trained[ADAPTER], LAST: table_CID}, logs

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        cohort = collect(server, uploads)
        if cohort is None:
            return server
        few = few_of(cohort, mixed_share, federation.seed, round)
        component_VI = first_components((few.table_VF + few.mean_F).view(-1, *server[TABLE].shape[1:]))
        weight_VV = code_weights(few.share_V, squared_distances(component_VI), alpha)
        return mixed_few(server, cohort, few, weight_VV)

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        last_CID = own[LAST].to(federation.device)
        table_CID = last_CID if variant == "local" else current_table(merging, download, own)[0]
        scores_CI = score_all(model, Download({}, {TABLE: table_CID}), {"user": own["user"]})
        return rank_users(scores_CI, block.data, split, federation.protocol)

    return FederatedMethod(
        "fedem",
        init,
        broadcast,
        client_update,
        server_aggregate,
        positions,
        ("merged", "local"),
        upload_like=lambda round, server: {TABLE: server[TABLE][0]},
    )


def current_table(merging: Merging, download: Download, own: Tree) -> tuple[Tensor, Tensor]:
    """(C, I, D) the last table, merged with the mix where there is one; (C,) the mean of rho, 0 where there is none."""
    sent_CID, mixed = download.per_client[TABLE], download.per_client[PERSONAL].nonzero()[:, 0]
    table_CID = own[LAST].to(sent_CID.device, copy=True)
    rho_C = table_CID.new_zeros(len(table_CID))
    few = {LAST: table_CID[mixed], ADAPTER: own[ADAPTER][mixed]}
    table_CID[mixed], rho_C[mixed] = merged_table(merging, few, sent_CID[mixed])
    return table_CID, rho_C


def merging_kernel(merging: Merging, frozen: Tree) -> Kernel:
    """The compiled local training under :func:`merging_logits`, with the ``sent`` rows and ``has_mix``."""
    from embedding_fr.compiled.merging import train_merging  # Numba: half a second

    sent_CRD = frozen["sent"]
    return Kernel(
        train=train_merging,
        tables=(TABLE,),
        vectors=(("user",), (ADAPTER,)),
        constants=(sent_CRD.numpy(), frozen["has_mix"].numpy(), np.array(merging.sizes(sent_CRD.shape[2]))),
        alternates=True,
    )


def merging_logits(merging: Merging) -> Logits:
    """Inner products with rows ``q + rho (sent - q)``, rho from the row q as it is now; q alone without a mix."""

    def logits(params: Tree, item: Tensor | None) -> Tensor:
        row_CBD, sent_CBD = take(params[TABLE], item), take(params["sent"], item)
        rho = weights_of(merging, params[ADAPTER], features(merging, row_CBD, sent_CBD))
        row_CBD = row_CBD + rho * params["has_mix"][:, None, None] * (sent_CBD - row_CBD)
        return inner_products(row_CBD, params["user"])

    return logits


def few_of(cohort: Cohort, share: float, seed: int, round: int) -> Cohort:
    """Copies of a random share of the cohort, rounded down, one client at least."""
    return part_of(cohort, few_places(cohort, share, seed, round))


def few_places(cohort: Cohort, share: float, seed: int, round: int) -> Tensor:
    """Where these clients stand in the cohort."""
    count = max(1, int(len(cohort.client_V) * share))
    order = torch.randperm(len(cohort.client_V), generator=stream(seed, "mixed", round))
    return cohort.client_V.argsort()[order[:count]]


def part_of(cohort: Cohort, chosen: Tensor) -> Cohort:
    """Copies of the clients at these places."""
    weight_V = cohort.share_V[chosen]
    table_VF = cohort.table_VF[chosen.to(cohort.table_VF.device)]
    return Cohort(cohort.client_V[chosen], weight_V / weight_V.sum(), table_VF, cohort.mean_F)


def mixed_few(server: Tree, cohort: Cohort, few: Cohort, weight_VV: Tensor) -> Tree:
    """``Q_u <- sum_v w_uv Q_v`` for these few, who alone have a mix then; made in the room of the cohort."""
    tables_NF, has_mix_N = cohort.room_NF.copy_(server[TABLE].flatten(1)), torch.zeros_like(server[PERSONAL])
    for columns, mixed_VF in mixed_columns(few, weight_VV):
        tables_NF[few.client_V, columns] = mixed_VF
    has_mix_N[few.client_V] = True
    return {TABLE: tables_NF.view(server[TABLE].shape), PERSONAL: has_mix_N}
