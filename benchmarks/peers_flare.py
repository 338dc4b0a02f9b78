"""The client of `peers.py` as an executor of NVIDIA FLARE: a file of its own, which a job carries to its sites."""

from __future__ import annotations

from typing import Any

import torch
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils


class FedmfExecutor(Executor):  # type: ignore[misc]
    """Trains the user whose number is in the name of the site."""

    def __init__(self, case: list[Any]):
        super().__init__()
        self.case = case

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        from peers import Case, train_user

        torch.set_num_threads(1)
        user = int(fl_ctx.get_identity_name().rpartition("-")[2]) - 1
        model = FLModelUtils.from_shareable(shareable, fl_ctx)
        ((name, table_ID),) = model.params.items()
        trained, count = train_user(Case(*self.case), user, table_ID)
        answer = FLModel(ParamsType.FULL, {name: trained}, meta={"NUM_STEPS_CURRENT_ROUND": count})
        return FLModelUtils.to_shareable(answer)
