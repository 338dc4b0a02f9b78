"""FedEM: elastic merging at the clients, similarity-based aggregation at the server (Chen et al., *Breaking the
Aggregation Bottleneck in Federated Recommendation: A Personalized Model Merging Approach*).

Shape legend: N clients of the run, V clients of a cohort, C clients of a block, I items, D dims.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from embedding_fr import merging as merges
from embedding_fr.averaged import averaged, mean_over_clients, score_all, send_server
from embedding_fr.blocks import Federation, rank_users
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import RoundExamples, epoch_batches, round_examples
from embedding_fr.local_training import Objective, dot_logits, train_batches
from embedding_fr.methods.entry import Method
from embedding_fr.methods.fedem_code import code_method
from embedding_fr.methods.fedmf import fedmf_optimiser, mf_model
from embedding_fr.mixing import Cohort, Mix, collect, mixed_server, send_personal, squared_distances, start_server
from embedding_fr.mlp import layer_sizes
from embedding_fr.optimisers import fresh_state
from embedding_fr.similarity import similarity_weights
from embedding_fr.stacked import check_finite, received, received_rows
from fedecider.bounds import NotNegative, Share, ShareAbove0, dataclass
from fedecider.federation.method import Block, Download, FederatedMethod, Tree, Upload
from fedecider.search_space import OneOf, Real, Space

TABLE = "item_table"


@dataclass(frozen=True)
class FedemConfig:
    """Settings of FedEM and its ablations (Table 2).

    Args:
        merging: How the received table and the own one are merged: EM with a weight for each item, DM with one weight
            for the client, SM with the same fixed weight for all; SR, static replacement, takes the received table.
        rho: The fixed weight of SM; 1 takes the received table, 0 keeps the own one.
        adapter_layers: The widths of the adapter's hidden layers, with commas.
        adapter_learning_rate: The learning rate of the adapter. If not given, learning_rate is taken; 0 keeps the
            adapter as it started.
        aggregation: What the server makes of the tables: similarity makes one mix for each client (FedSim), mean makes
            one weighted mean for all (FedMF).
        similarity_weight: The weight alpha of similarity against the clients' sizes; the paper has 1.1 on ML-100K.
        variant: The variant: paper, or code, which does what the public code does and has merging EM and aggregation
            similarity only.
        mixed_share: The share of a cohort whose tables the server mixes, in variant code.
    """

    merging: Literal["EM", "DM", "SM", "SR"] = "EM"
    rho: Share = 0.5
    adapter_layers: str = "16,8"
    adapter_learning_rate: NotNegative | None = None
    aggregation: Literal["similarity", "mean"] = "similarity"
    similarity_weight: NotNegative = 0.9
    variant: Literal["paper", "code"] = "paper"
    mixed_share: ShareAbove0 = 0.1

    def __post_init__(self) -> None:
        if self.variant == "code" and (self.merging, self.aggregation) != ("EM", "similarity"):
            raise ValueError(
                f"got variant code with merging {self.merging} and aggregation {self.aggregation}, expected EM and "
                "similarity: the public code has no other"
            )
        layer_sizes(self.adapter_layers)

    @property
    def local_merging(self) -> merges.Merging | None:
        """None: the received table replaces the own one."""
        if self.merging == "SR":
            return None
        return merges.Merging(self.merging, self.rho, self.adapter_layers, self.adapter_learning_rate)


DEFAULTS: dict[str, Any] = {"learning_rate": 0.1}
CODE: dict[str, Any] = {"variant": "code", "init_std": 1.0}
GRID: tuple[dict[str, Any], ...] = (
    {},
    {"local_epochs": 2, "learning_rate": 0.03, "init_std": 0.1},
    {"local_epochs": 1, "init_std": 0.1},
    {"local_epochs": 1, "init_std": 0.1, "adapter_learning_rate": 0.0},
    {"local_epochs": 1, "init_std": 0.1, "merging": "SM"},
    {"local_epochs": 2, "learning_rate": 0.03, "init_std": 0.1, "similarity_weight": 0.0},
)
SPACE: Space = {
    **TRAINING_SPACE,
    "similarity_weight": Real(0.0, 2.0),
    "adapter_learning_rate": OneOf((None, 0.0, 0.001, 0.01)),
}


def fedem(federation: Federation, training: EmbeddingTraining, config: FedemConfig) -> FederatedMethod:
    """Score ``p_u . q_i``. Each round a client merges the table that it receives with its own last one, and trains p_u
    and the merged table; on every local epoch the adapter takes its pass first. The server makes one table per client
    (:func:`with_similarity`).

    **Later epochs.** Algorithm 1 prints the merge inside the loop over local epochs, always from the frozen Q_l and Q_g
    of the round's start, and local training behind it. To the letter, each epoch would throw away what the one before
    did to the table; the text has the merged table "initialise" local training. Here each epoch moves the merged start,
    since rho has changed, and keeps what local training added to it: ``Q_m = Q_l + rho (Q_g - Q_l) + (sum of the local
    steps)``. The adapter sees the loss at this Q_m; its input stays that of the round's start. So rho = 1 is FedMF and
    rho = 0 is training alone.

    Variants: ``merged`` is the paper's (its output is p_u, Q_l and the adapter): the own last table merged with what
    the server would send next, by the last adapter; ``local`` is Q_l. With SR the only variant is ``global``.

    Differs from the paper: Q_l starts as the common table, so that the first round merges nothing; adapter and
    embeddings take Adam with fresh moments in every round (equations 11 and 12 print SGD, Appendix D says Adam); both
    passes of an epoch go through the same mini-batches. Noise on uploads (equation 36) is that of
    :mod:`fedecider.federation.privacy`, and Q_l stays without it. The sensitivity of Lemma 5, 2 p_u eta Z, is that of
    one SGD step with clipped gradients; after ten epochs of Adam it bounds nothing, so the upload is clipped instead.
    Tables 4 and 7 name a noise strength and no bound: ``noise_without_clip``, laplace, which guarantees nothing.
    """
    merging = config.local_merging
    if merging and config.variant == "code":
        return code_method(federation, training, merging, config.similarity_weight, config.mixed_share)
    method = (
        merged_method(federation, training, merging)
        if merging
        else averaged(
            "fedem", mf_model(federation, training), federation, training, optimiser=fedmf_optimiser(training)
        )
    )
    if config.aggregation == "mean":
        return method
    return with_similarity(method, federation, config.similarity_weight)


def merged_method(federation: Federation, training: EmbeddingTraining, merging: merges.Merging) -> FederatedMethod:
    """FedMF with elastic merging: the server averages."""
    model = mf_model(federation, training)

    def init() -> tuple[Tree, Tree]:
        return dict(model.shared), {**model.private, **merges.start_merging(merging, model.shared[TABLE], federation)}

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, Tree, list[dict]]:
        drawn = round_examples(federation, training, block, round)
        sent_CID, sent_CRD = received(download, TABLE, len(block.clients)), received_rows(download, TABLE, drawn.row_CR)
        merge, start_CRD = merges.open_merge(merging, training, own, sent_CID, sent_CRD, drawn.row_CR)
        params = {"user": own["user"].clone(), TABLE: start_CRD}
        merge, loss_C = _train(merge, params, drawn, training)
        check_finite({**params, **merge.adapter}, loss_C, block.clients, round)
        table_CID, kept, rho_C = merges.close_merge(merge, drawn.row_CR, params[TABLE])
        upload = Upload(block.clients, block.data.num_train_C.to(loss_C.dtype), {TABLE: table_CID})
        logs = [{"loss": loss, "rho": rho} for loss, rho in zip(loss_C.tolist(), rho_C.tolist(), strict=True)]
        return upload, {"user": params["user"], **kept}, logs

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        sent_CID = received(download, TABLE, len(block.clients))
        last_CID = own[merges.LAST].to(sent_CID.device)
        table_CID = last_CID if variant == "local" else merges.merged_table(merging, own, sent_CID)[0]
        scores_CI = score_all(model, Download({}, {TABLE: table_CID}), {"user": own["user"]})
        return rank_users(scores_CI, block.data, split, federation.protocol)

    return FederatedMethod(
        "fedem",
        init,
        send_server,
        client_update,
        mean_over_clients(),
        positions,
        ("merged", "local"),
        upload_like=lambda round, server: dict(server),
        takes_mean=True,
    )


def _train(
    merge: merges.Merge, params: Tree, drawn: RoundExamples, training: EmbeddingTraining
) -> tuple[merges.Merge, Tensor]:
    """Local epochs in place -> the merge with its trained adapter, and (C,) the mean loss of the last epoch."""
    optimiser, objective = fedmf_optimiser(training), Objective(dot_logits, by_row=True)
    state, loss_C = fresh_state(optimiser, params), params["user"].new_zeros(len(params["user"]))
    for epoch in range(training.local_epochs):
        batches = list(epoch_batches(drawn.examples, drawn.place_CB, training.batch_size, range(epoch, epoch + 1)))
        merge = merges.merge_epochs(merge, merges.Scorer(dot_logits), params, batches)
        last = epoch == training.local_epochs - 1
        loss_C = train_batches(objective, params, batches, optimiser, state, measure=last)
    return merge, loss_C


def with_similarity(method: FederatedMethod, federation: Federation, alpha: float) -> FederatedMethod:
    """``method``, which averages one item table, with a server that mixes one for each client:
    ``Q_g,u = sum_v w_uv Q_v`` (equation 13, :func:`embedding_fr.similarity.similarity_weights`).

    Absent clients keep their older mix, those that never took part get the plain mean of the last round. With alpha 0
    it is the plain mean for the whole cohort, and no distances are computed.
    """

    def init() -> tuple[Tree, Tree]:
        server, local = method.init()
        assert list(server) == [TABLE], "the server mixes item tables and nothing else"
        return start_server(server[TABLE], federation.num_clients), local

    def broadcast(round: int, server: Tree, clients: Tensor) -> Download:
        return send_personal(server, clients)

    def mix(cohort: Cohort) -> Mix:
        if not alpha:  # all rows of the weights are p
            return Mix(cohort.share_V[None], torch.zeros_like(cohort.client_V))
        return Mix(similarity_weights(cohort.share_V, squared_distances(cohort.table_VF), alpha))

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        cohort = collect(server, uploads)
        return mixed_server(server, cohort, mix(cohort)) if cohort else server

    return method._replace(
        init=init,
        broadcast=broadcast,
        server_aggregate=server_aggregate,
        upload_like=lambda round, server: {TABLE: server[TABLE][0]},
        takes_mean=False,
    )


METHOD = Method(
    FedemConfig,
    fedem,
    DEFAULTS,
    GRID,
    SPACE,
    passing_tables=3,
    server_tables=lambda config: 2 if config.aggregation == "similarity" else 0,
    code=CODE,
)
