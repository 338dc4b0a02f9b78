"""One client's model as a value: the frozen base that all share, the client's side of it, its adapters, its ensemble.

Shape legend: U users of a client, B users or histories of a batch, M items of each, K beams, I items, S input tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor

from fedecider.federation.processes import Processes
from fedecider.federation.streams import stream
from fedecider.models.adapters import Adapters, put
from fedecider.models.directions import mean_update, of_factors
from fedecider.models.ensemble import Ensemble, Histories, ModelScores
from fedecider.models.export import Card, SavedBase, export_adapter
from fedecider.models.item_table import ItemTable
from idgen.backbones.family import TokenBatch
from idgen.candidates import candidates_of, with_candidates
from idgen.decode import top_items
from idgen.item_scores import catalogue_rows, catalogue_scores, trie_log_probs
from idgen.precision import autocast
from idgen.ranking import RankingContext, eval_users, rank_task
from idgen.ranking_config import RankingConfig
from idgen.samples import encode_histories, num_samples, train_batches
from idgen.tasks import Split, Task
from idgen.user_batches import samples_by_user, user_batches


class Base(NamedTuple):
    """The frozen backbone with its PEFT layers, and how a run computes with it."""

    model: PeftModel
    """What its layers hold between two uses means nothing: `holding` fills them for each."""
    tokenizer: Any
    context: RankingContext = RankingContext()
    processes: Processes = Processes()
    """Those that share the data of every client: all of them train and rank it together."""
    deepspeed: Accelerator | None = None
    """Trains through DeepSpeed (`fedecider.methods.deepspeed`), where it was launched so."""
    checkpointing: bool = False
    """Whether layers keep their inputs alone in training (`idgen.training.checkpointed`)."""

    @property
    def device(self) -> torch.device:
        return self.context.device

    def holding(self, adapters: Adapters | None) -> PeftModel:
        """The model with these adapters; None: those that plain PEFT has loaded."""
        if adapters is not None:
            put(self.model, adapters)
        return self.model


class Users(NamedTuple):
    """The users of one client who have something to train on."""

    num_users: int
    batches: Callable[[Sequence[int], torch.Generator], Iterator[TokenBatch]]
    """numbers of users (ascending, below ``num_users``), generator -> one batch a user: all of its training samples."""


class Client(NamedTuple):
    """One client's side: its catalogue, and functions that know its private data."""

    name: str
    """Random streams are keyed by it, so that client order does not matter."""
    task: Any
    """`idgen.samples.Task`."""
    seed: int
    """Of the run."""
    num_examples: int
    """Training samples, the client weight of sample-weighted means."""
    batches: Callable[[torch.Generator], Iterator[TokenBatch]]
    """generator -> one epoch."""
    positions: Callable[[PeftModel, str, tuple[int, int]], Tensor]
    """model, split, (p, P) -> (U,) places of the held-out items, of every P-th batch from p on alone."""
    users: Callable[[], Users] | None = None
    """Its training users, for training that goes user by user."""
    sample: Callable[[TokenBatch, torch.Generator], TokenBatch] | None = None
    """The batch with a sample in the place of a large catalogue (`idgen.samples.with_candidates`); None where every
    catalogue is compared with as a whole."""

    def ranked_users(self, split: str, ranking: RankingConfig) -> Tensor | None:
        """The users that are ranked; None: all."""
        return _ranked_users(self.task, split, ranking, self.seed)


def _ranked_users(task: Task, split: str, ranking: RankingConfig, seed: int) -> Tensor | None:
    return eval_users(task, split, ranking.num_eval_users, stream(seed, "eval_users", task.name))


def client_of(base: Base, task: Task, seed: int, batch_size: int, dense: bool = False) -> Client:
    """The client of a task. ``dense``: whether every ID of every client ends with a token of its own."""
    # a target among its own catalogue's items where these have own tokens, for adapters of the output that change no
    # other catalogue's rows; else among all tokens
    token_C = task.item_tokens().to(base.device) if dense else None
    candidates = None if token_C is None else candidates_of(task, token_C.cpu())

    def of_catalogue(batches: Iterator[TokenBatch]) -> Iterator[TokenBatch]:
        for batch in batches:
            yield batch if token_C is None else {**batch, "catalogue": token_C}

    def users() -> Users:
        samples = samples_by_user(task)

        def batches(numbers: Sequence[int], generator: torch.Generator) -> Iterator[TokenBatch]:
            return of_catalogue(user_batches(task, [samples[number] for number in numbers], generator))

        return Users(len(samples), batches)

    def positions(model: PeftModel, split: str, share: tuple[int, int]) -> Tensor:
        users = _ranked_users(task, split, base.context.ranking, seed)
        return rank_task(model, task, cast(Split, split), users, base.context, share)

    return Client(
        name=task.name,
        task=task,
        seed=seed,
        num_examples=num_samples(task),
        batches=lambda generator: of_catalogue(train_batches(task, batch_size, generator)),
        positions=positions,
        users=users,
        sample=None if candidates is None else lambda batch, generator: with_candidates(batch, candidates, generator),
    )


class ClientModel(NamedTuple):
    """What one client recommends with. Whatever ranks, scores or saves does it with these adapters."""

    base: Base
    client: Client
    adapters: Adapters | None
    """None: those that plain PEFT has loaded from a folder."""
    ensemble: Ensemble | None = None

    def scaled(self, scale: float) -> ClientModel:
        """The update times ``scale``."""
        if scale == 1.0:
            return self
        assert self.adapters is not None
        return self._replace(adapters=self.adapters.scaled(scale))

    def positions(self, split: str) -> Tensor:
        """(U,) places of the held-out items under the model without its ensemble; processes share the users."""
        model, processes = self.base.holding(self.adapters), self.base.processes
        if processes.count == 1:
            return self.client.positions(model, split, (0, 1))
        parts = processes.gather(self.client.positions(model, split, (processes.index, processes.count)))
        return torch.stack(parts).amin(0)  # whom another process ranks is not ranked here, which is the largest place

    def scores(self) -> ModelScores:
        """The model as an ensemble asks it: log-probabilities of items for histories, and its beams."""
        base = self.base
        asked = model_scores(base.model, self.client.task, base.context)

        def held(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def call(*given: Any) -> Tensor:
                base.holding(self.adapters)
                return function(*given)

            return call

        return ModelScores(held(asked.log_probs), None if asked.beams is None else held(asked.beams))

    def save(self, folder: Path, base: SavedBase, items: ItemTable, card: Card) -> float:
        """Write the adapters as a PEFT folder and return the largest logit difference after a reload
        (`fedecider.models.export.export_adapter`)."""
        assert self.adapters is not None
        prompts = next(train_batches(self.client.task, 8, stream(0, "export prompts", self.client.name)))
        held = self.base.holding(self.adapters)
        return export_adapter(held, self.adapters.factors(), folder, base, items, card, prompts)


def mean_of(models: Sequence[ClientModel]) -> ClientModel:
    """The mean of the updates of a client's models as one: no second one has to be kept, exported or asked."""
    factors, rank = [], 0
    for one in models:
        assert one.adapters is not None
        factors.append(one.adapters.factors())
        rank = len(next(tensor for key, tensor in one.adapters.pair.items() if key.endswith(".lora_a")))
    return models[0]._replace(adapters=of_factors(mean_update(factors), rank), ensemble=None)


def model_scores(model: Any, task: Task, context: RankingContext) -> ModelScores:
    """``model`` as it is loaded when it is asked. Where every ID is one token the whole catalogue costs one step."""
    ranking, _, precision, device = context
    trie = task.trie.to(device)

    def batches(histories: Histories) -> list[np.ndarray]:
        """Histories of similar length together, so that prompts need little padding."""
        order = np.argsort([len(items) for items in histories], kind="stable")
        size = ranking.eval_batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def prompts(histories: Histories, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        input_ids_BS, attention_mask_BS = encode_histories(task, [histories[row] for row in rows])
        return input_ids_BS.to(device), attention_mask_BS.to(device)

    rows_ID: list[Tensor] = []  # of all items: worked out once, as the model stays what it is

    def log_probs(histories: Histories, item_BM: Tensor | None) -> Tensor:
        if item_BM is None:
            if not rows_ID:
                rows_ID.append(catalogue_rows(model, trie))
            score_BI = torch.empty(len(histories), len(trie), dtype=torch.float32, device=device)
            for rows in batches(histories):
                for part, score_RI in catalogue_scores(model, *prompts(histories, rows), trie, precision, rows_ID[0]):
                    score_BI[rows[part]] = score_RI
            return score_BI
        score_BM = torch.empty(item_BM.shape, dtype=torch.float64)
        if trie.has_own_tokens:
            place_BM = item_BM.clamp(min=0)
            for row in range(0, len(histories), ranking.eval_batch_size):
                part = slice(row, row + ranking.eval_batch_size)
                log_prob_RI = torch.log_softmax(log_probs(histories[part], None).double(), 1).cpu()
                score_BM[part] = log_prob_RI.gather(1, place_BM[part])
            return score_BM.masked_fill_(item_BM < 0, -torch.inf)
        for rows in batches(histories):
            with autocast(device, precision):
                asked = (*prompts(histories, rows), trie, item_BM[rows].to(device))
                score_BM[rows] = trie_log_probs(model, *asked).cpu()
        return score_BM

    def search(histories: Histories, k: int) -> tuple[Tensor, Tensor]:
        room = [ranking.beams_for(k, len(set(items)), len(trie)) if k else ranking.num_beams for items in histories]
        item_BK = torch.full((len(histories), max(room)), -1)
        score_BK = torch.full(item_BK.shape, -torch.inf)
        for num_beams in sorted(set(room)):  # apart: nobody's answer depends on who else is asked for
            alike = np.flatnonzero(np.array(room) == num_beams)
            for part in batches([histories[row] for row in alike.tolist()]):
                rows = alike[part]
                with autocast(device, precision):
                    asked = (*prompts(histories, rows), trie)
                    found = top_items(model, *asked, num_beams=num_beams)
                item_BK[rows, :num_beams], score_BK[rows, :num_beams] = (part_RK.cpu() for part_RK in found)
        return item_BK, score_BK

    beams = None if trie.has_own_tokens else (lambda histories, k: search(histories, k)[0])
    return ModelScores(log_probs, beams, search)
