"""Evaluation with the item table that a client trained last, beside the one that it would download next.

Shape legend: N clients of the run, C clients of a block, I items, D dims.
"""

from __future__ import annotations

from torch import Tensor

from embedding_fr.blocks import Federation
from embedding_fr.tables import personal_table
from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, RowUpdate, Tree, Upload
from fedecider.federation.wire import dense

PERSONAL_TABLE = "personal_table"
"""Local state (N, I, D): the table as the client uploaded it, or the start table while it has not taken part."""


def with_personal_variant(method: FederatedMethod, federation: Federation) -> FederatedMethod:
    """``method`` with the variant ``personal`` before its own: its client scores with its ``item_table`` as it was
    before the averaging.

    The table is kept in full, N I D numbers: rows that the client did not touch are those of the download it started
    from, which the server has replaced since then.
    """

    def init() -> tuple[Tree, Tree]:
        server, local = method.init()
        table_NID = personal_table(server["item_table"], federation.num_clients, federation.table_bytes)
        return server, {**local, PERSONAL_TABLE: table_NID}

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        upload, mine, logs = method.client_update(round, download, _without_table(own), block)
        if "item_table" in upload.rows and "item_table" in download.shared:
            rows, values = upload.rows["item_table"], upload.tensors["item_table"]
            return upload, {**mine, PERSONAL_TABLE: RowUpdate(rows, values, download.shared["item_table"])}, logs
        return upload, {**mine, PERSONAL_TABLE: dense(upload, download).tensors["item_table"]}, logs

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        if variant == "personal":
            table_CID = own[PERSONAL_TABLE].to(federation.device)  # a table in a file is read into memory
            download = download._replace(per_client={**download.per_client, "item_table": table_CID})
            variant = method.variants[0]
        return method.positions(variant, download, _without_table(own), block, split)

    variants = ("personal", *method.variants)
    unread = (*method.unread, PERSONAL_TABLE)
    return method._replace(
        init=init, client_update=client_update, positions=positions, variants=variants, unread=unread
    )


def _without_table(own: Tree) -> Tree:
    return {name: tensor for name, tensor in own.items() if name != PERSONAL_TABLE}
