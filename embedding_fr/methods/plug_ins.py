"""Elastic merging as a plug-in for any method that sends one item table (FedEM, Table 3).

Shape legend: N clients of the run, C clients of a block, I items, R touched rows, D dims.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from embedding_fr import merging as merges
from embedding_fr.blocks import Federation
from embedding_fr.config import TRAINING_SPACE, EmbeddingTraining
from embedding_fr.examples import epoch_batches, round_examples
from embedding_fr.local_training import dot_logits
from embedding_fr.methods import fedmf, fedncf, fedrap, gpfedrec, pfedrec
from embedding_fr.methods.entry import Method
from embedding_fr.stacked import check_finite, received, received_rows, take
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, Tree, Upload
from fedecider.federation.wire import dense
from fedecider.search_space import OneOf, Real, Space


def elastic(
    method: FederatedMethod,
    scorer: merges.Scorer,
    federation: Federation,
    training: EmbeddingTraining,
    merging: merges.Merging,
    offsets: tuple[str, ...] = (),
) -> FederatedMethod:
    """``method`` whose clients merge the table that they receive with their own last one, and then train as before.

    ``offsets`` names tensors of the download that are differences from the table; they are changed so that the sums
    stay what the server meant. Uploads are whole tables. Variants: ``merged``, with the last adapter; ``local``, the
    client's own last table. What the wrapped method keeps for variants of its own and does not train on (``unread``) is
    left out.

    Differs from Algorithm 1: the adapter has all of its epochs before the method's own training, which is not taken
    apart (the text on Table 3 has merging follow the download). :func:`embedding_fr.methods.fedem.fedem` alternates.
    """
    assert "global" in method.variants, "the wrapped method must be able to score with the table it would receive"

    def init() -> tuple[Tree, Tree]:
        server, local = method.init()
        read = {name: tensor for name, tensor in local.items() if name not in method.unread}
        return server, {**read, **merges.start_merging(merging, server[scorer.table], federation)}

    def trained_adapters(round: int, download: Download, own: Tree, block: Block) -> merges.Merge:
        """The merge after ``local_epochs`` passes over the adapters, on the examples that training will see."""
        drawn = round_examples(federation, training, block, round)
        received_CID = received(download, scorer.table, len(block.clients))
        received_CRD = received_rows(download, scorer.table, drawn.row_CR)
        merge, start_CRD = merges.open_merge(merging, training, own, received_CID, received_CRD, drawn.row_CR)
        params = {name: tensor.to(federation.device) for name, tensor in without_merging(own).items()}
        for name in scorer.local_tables:
            params[name] = take(params[name], drawn.row_CR.clamp(min=0))
        for name in {**download.shared, **download.per_client}:
            params[name] = received(download, name, len(block.clients))
        params[scorer.table] = start_CRD
        epochs = range(training.local_epochs)
        batches = epoch_batches(drawn.examples, drawn.place_CB, training.batch_size, epochs)
        return merges.merge_epochs(merge, scorer, params, batches)

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        merge = trained_adapters(round, download, own, block)
        added = {merges.LAST: own[merges.LAST], **merge.adapter}
        merged_CID, rho_C = merges.merged_table(merging, added, merge.received_CID)
        check_finite(merge.adapter, rho_C, block.clients, round)
        merged = replaced(download, scorer.table, merged_CID, offsets)
        upload, mine, logs = method.client_update(round, merged, without_merging(own), block)
        upload = dense(upload, merged)
        logs = [{**log, "rho": rho} for log, rho in zip(logs, rho_C.tolist(), strict=True)]
        read = {name: new for name, new in mine.items() if name not in method.unread}
        return upload, {**read, **added, merges.LAST: upload.tensors[scorer.table]}, logs

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        received_CID = received(download, scorer.table, len(block.clients))
        local_CID = own[merges.LAST].to(received_CID.device)
        scored_CID = local_CID if variant == "local" else merges.merged_table(merging, own, received_CID)[0]
        chosen = replaced(download, scorer.table, scored_CID, offsets)
        return method.positions("global", chosen, without_merging(own), block, split)

    return method._replace(
        name=f"{method.name}_em",
        init=init,
        client_update=client_update,
        positions=positions,
        variants=("merged", "local"),
        unread=(),
    )


def replaced(download: Download, table: str, table_CID: Tensor, offsets: tuple[str, ...]) -> Download:
    """``download`` with these tables, one per client, in the place of the one that was sent."""
    sent_CID = received(download, table, len(table_CID))
    moved = {name: download.per_client[name] + (sent_CID - table_CID) for name in offsets}
    shared = {name: tensor for name, tensor in download.shared.items() if name != table}
    return Download(shared, {**download.per_client, **moved, table: table_CID})


def without_merging(own: Tree) -> Tree:
    """The wrapped method's own local tensors."""
    return {name: tensor for name, tensor in own.items() if name not in (merges.LAST, merges.ADAPTER)}


GRID: tuple[dict[str, Any], ...] = ({}, {"scheme": "SM", "rho": 0.9})
SPACE: Space = {**TRAINING_SPACE, "scheme": OneOf(("EM", "DM", "SM")), "rho": Real(0.0, 1.0)}


def fedmf_em(federation: Federation, training: EmbeddingTraining, config: merges.Merging) -> FederatedMethod:
    """FedMF with elastic merging."""
    method = fedmf.fedmf(federation, training, fedmf.FedmfConfig())
    return elastic(method, merges.Scorer(dot_logits), federation, training, config)


def fedncf_em(federation: Federation, training: EmbeddingTraining, config: merges.Merging) -> FederatedMethod:
    """FedNCF with elastic merging of the item table; the network is replaced by the received one, as before."""
    method = fedncf.fedncf(federation, training, fedncf.FedncfConfig())
    return elastic(method, merges.Scorer(fedncf.ncf_logits), federation, training, config)


def pfedrec_em(federation: Federation, training: EmbeddingTraining, config: merges.Merging) -> FederatedMethod:
    """PFedRec with elastic merging."""
    method = pfedrec.pfedrec(federation, training, pfedrec.PfedrecConfig())
    return elastic(method, merges.Scorer(pfedrec.linear_logits), federation, training, config)


def gpfedrec_em(federation: Federation, training: EmbeddingTraining, config: merges.Merging) -> FederatedMethod:
    """GPFedRec with elastic merging of the table that all start from; the regulariser draws to where it did before."""
    method = gpfedrec.gpfedrec(federation, training, gpfedrec.GpfedrecConfig())
    return elastic(method, merges.Scorer(fedncf.ncf_logits), federation, training, config, offsets=("graph_offset",))


def fedrap_em(federation: Federation, training: EmbeddingTraining, config: merges.Merging) -> FederatedMethod:
    """FedRAP with elastic merging of the common table."""
    method = fedrap.fedrap(federation, training, fedrap.FedrapConfig())
    scorer = merges.Scorer(_fedrap_logits, fedrap.COMMON, (fedrap.PERSONAL,))
    return elastic(method, scorer, federation, training, config)


def _fedrap_logits(params: Tree, item: Tensor | None) -> Tensor:
    return fedrap.logits(params, item)[0]


FEDMF_EM = Method(merges.Merging, fedmf_em, fedmf.DEFAULTS, GRID, SPACE, passing_tables=3, plug_in=True)
FEDNCF_EM = Method(merges.Merging, fedncf_em, fedncf.DEFAULTS, GRID, SPACE, passing_tables=3, plug_in=True)
PFEDREC_EM = Method(merges.Merging, pfedrec_em, pfedrec.DEFAULTS, GRID, SPACE, passing_tables=3, plug_in=True)
GPFEDREC_EM = Method(merges.Merging, gpfedrec_em, gpfedrec.DEFAULTS, GRID, SPACE, passing_tables=6, plug_in=True)
FEDRAP_EM = Method(
    merges.Merging,
    fedrap_em,
    fedrap.DEFAULTS,
    GRID,
    SPACE,
    whole_tables=2,
    passing_tables=3,
    item_tables=(fedrap.COMMON,),
    plug_in=True,
)
