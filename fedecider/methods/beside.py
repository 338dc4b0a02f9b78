"""Every client trained alone beside a method: what each would have after as many rounds of as many epochs."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor

from fedecider.federation.method import Block, Download, FederatedMethod, NewRows, Tree, Upload
from fedecider.federation.wire import take_row
from fedecider.methods.client_models import ClientModels
from fedecider.methods.local import PREFIX, own_start, train_alone
from fedecider.models.adapters import stack_trees


def beside(method: FederatedMethod, models: ClientModels) -> FederatedMethod:
    """``method``, each of whose clients also trains adapters of its own (`fedecider.methods.local`), which has the
    state and the rounds of it.

    What ``method`` does is the same to the last bit; nothing of the own training is sent. Logs have ``cpu_s``, seconds
    of CPU of what ``method`` did for the client, and ``local``: ``loss``, ``score``, ``cpu_s``.
    """

    def init() -> tuple[Tree, Tree]:
        server, local = method.init()
        return server, {**local, **own_start(models)}

    def client_update(round: int, download: Download, own: Tree, block: Block) -> tuple[Upload, NewRows, list[dict]]:
        started = time.process_time()
        upload, rows, logs = method.client_update(round, download, _of_method(own), block)
        cpu_s = (time.process_time() - started) / len(upload.clients)
        clients, trained = block.clients.tolist(), []
        for client, log in zip(upload.clients.tolist(), logs, strict=True):
            started = time.process_time()
            row, mine = train_alone(models, round, take_row(own, clients.index(client)), client)
            of_row = {"loss": mine["loss"], "score": mine["score"], "cpu_s": time.process_time() - started}
            trained.append((row, {**log, "cpu_s": cpu_s, PREFIX: of_row}))
        return upload, {**rows, **stack_trees([row for row, _ in trained])}, [log for _, log in trained]

    def positions(variant: str, download: Download, own: Tree, block: Block, split: str) -> list[Tensor]:
        return method.positions(variant, download, _of_method(own), block, split)

    return method._replace(init=init, client_update=client_update, positions=positions)


def has_local(local: Mapping[str, Tensor]) -> bool:
    """Whether clients whose state this is have trained alone too."""
    return f"{PREFIX}.score" in local


def _of_method(own: Tree) -> Tree:
    return {name: tensor for name, tensor in own.items() if not name.startswith(f"{PREFIX}.")}
