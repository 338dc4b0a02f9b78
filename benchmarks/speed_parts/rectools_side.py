"""One side of the comparison with RecTools: its SASRec, as it comes; run by a Python that has RecTools, without ours.

Shape legend: E events, U users, B users of a batch, L positions, V items and the padding, K items of a list.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Callback, Trainer, seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel

LIST, AT_ONCE = 10, 256


class Clock(Callback):
    """CPU seconds of training alone; at each of ``looks`` minutes the lists of all users, and the end at the last."""

    def __init__(self, rows: list[np.ndarray], looks: list[float], folder: Path) -> None:
        self.rows, self.looks, self.folder = rows, looks, folder
        self.spent, self.steps, self.began = 0.0, 0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.began = time.process_time()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *others: Any) -> None:
        self.steps += 1
        now = time.process_time()
        self.spent, self.began = self.spent + now - self.began, now
        if self.spent >= 60 * self.looks[0]:
            lists = lists_of(pl_module, self.rows)
            found = {"minutes": self.spent / 60, "epochs": self.steps / trainer.num_training_batches, **lists}
            np.savez(self.folder / f"look-{self.steps:06d}.npz", **found)
            self.looks = [look for look in self.looks if 60 * look > self.spent]
            trainer.should_stop = not self.looks
            self.began = time.process_time()


@torch.no_grad()
def lists_of(pl_module: Any, rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The best unseen items of every user, (U, K) in our numbers, before the validation and before the test item."""
    model, known = pl_module.torch_model.eval(), pl_module.data_preparator.item_id_map
    extra = pl_module.data_preparator.n_item_extra_tokens
    item_V = np.concatenate([np.full(extra, -1), known.external_ids[extra:]]).astype(np.int64)
    place_I = np.zeros(max(item_V.max(), max(row.max() for row in rows)) + 1, np.int64)  # 0 where it was not trained
    place_I[item_V[extra:]] = np.arange(extra, len(item_V))
    length, lists = pl_module.data_preparator.session_max_len, {}
    vector_VD = model.item_model.get_all_embeddings()
    for split, held_out in (("valid", 2), ("test", 1)):
        parts = []
        for first in range(0, len(rows), AT_ONCE):
            seen = [place_I[row[:-held_out]] for row in rows[first : first + AT_ONCE]]
            x_BL = torch.zeros(len(seen), length, dtype=torch.long)
            for number, row in enumerate(seen):
                last = row[row > 0][-length:]
                x_BL[number, length - len(last) :] = torch.from_numpy(last)
            user_BD = model.similarity_module.session_tower_forward(
                model.encode_sessions({"x": x_BL}, vector_VD)[:, -1, :]
            )
            score_BV = user_BD @ model.similarity_module.item_tower_forward(vector_VD).T
            score_BV[:, :extra] = -torch.inf
            for number, row in enumerate(seen):
                score_BV[number, row] = -torch.inf
            parts.append(item_V[score_BV.topk(LIST).indices.numpy()])
        lists[split] = np.concatenate(parts)
    model.train()
    return lists


def data_of(rows: list[np.ndarray], held_out: int) -> Dataset:
    """All but the last events of every user."""
    parts = [row[:-held_out] for row in rows]
    columns = {
        Columns.User: np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
        Columns.Item: np.concatenate(parts),
        Columns.Weight: 1,
        Columns.Datetime: np.concatenate([np.arange(len(part)) for part in parts]),
    }
    return Dataset.construct(pd.DataFrame(columns))


def check_lists(rows: list[np.ndarray], settings: dict[str, Any]) -> None:
    """Our lists are those of RecTools' own ``recommend``."""
    model = SASRecModel(**{**settings, "n_factors": 16, "epochs": 1, "deterministic": False})
    model.fit(data_of(rows, 2))
    ours_UK = lists_of(model.lightning_model, rows)["test"]
    model.lightning_model.eval()
    told = model.recommend(np.arange(len(rows)), data_of(rows, 1), LIST, filter_viewed=True)
    theirs_UK = told[Columns.Item].to_numpy().reshape(len(rows), LIST)
    assert (ours_UK == theirs_UK).mean() > 0.999, (ours_UK[:2], theirs_UK[:2])


def main() -> None:
    """The one word: a JSON object of data, folder, looks in CPU minutes, seed, and settings of the model."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    data = np.load(asked["data"])
    rows = np.split(data["item_E"], data["start_U"][1:-1])
    check_lists(rows[:300], asked["model"])
    seed_everything(asked["seed"])
    model = SASRecModel(**asked["model"])
    model._trainer = Trainer(
        max_epochs=model.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        devices=1,
        callbacks=[Clock(rows, asked["looks"], Path(asked["folder"]))],
    )
    model.fit(data_of(rows, 2))


if __name__ == "__main__":
    main()
