"""A few users of every domain with what they read, what was held out and what was recommended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import NOT_RANKED
from fedecider.evaluation.protocols import history
from fedecider.evaluation.protocols import target as held_out
from fedecider.federation.streams import stream
from fedecider.models.client_model import ClientModel
from idgen.decode import constrained_beam_search, item_positions
from idgen.item_scores import ranks_all
from idgen.precision import autocast
from idgen.samples import eval_batches

NUM_USERS, NUM_TITLES, NUM_RECOMMENDED = 3, 5, 5


def example_users(num_users: int, seed: int, domain: str) -> Tensor:
    """Up to three user numbers, ascending: the same for every method and round of one seed."""
    return torch.randperm(num_users, generator=stream(seed, "examples", domain))[:NUM_USERS].sort().values


def decode_examples(model: ClientModel, domain: Domain) -> list[dict[str, Any]]:
    """Examples of one domain under the client's model, decoded as for the test metrics.

    Each: ``history`` (the newest titles, oldest first), ``num_history``, ``held_out`` (title), ``position`` (0-based;
    None when it was not returned) and ``recommended`` (the best titles, each with ``held_out``: true for the held-out
    item). Titles and nothing else: no user key.
    """
    task, (ranking, drop_seen, precision, device) = model.client.task, model.base.context
    users = example_users(len(task.sequences), model.client.seed, task.name)
    num_beams = len(task.trie) if ranks_all(task.trie) else ranking.num_beams
    held, examples = model.base.holding(model.adapters), {}
    for user_B, input_ids, attention_mask, target_B in eval_batches(task, "test", ranking.eval_batch_size, users):
        with autocast(device, precision):
            item_BK, _ = constrained_beam_search(
                held,
                input_ids.to(device),
                attention_mask.to(device),
                task.trie.to(device),
                num_beams=num_beams,
            )
        seen = [history(task.sequences[user], "test") for user in user_B.tolist()]
        position_B = item_positions(item_BK.cpu(), target_B.cpu(), seen if drop_seen else None)
        for user, items, position, past in zip(
            user_B.tolist(), item_BK.tolist(), position_B.tolist(), seen, strict=True
        ):
            kept = [item for item in items if item >= 0 and not (drop_seen and item in past)]
            examples[user] = _example(domain, task.sequences[user], kept[:NUM_RECOMMENDED], position)
    return [examples[user] for user in users.tolist()]


def _example(domain: Domain, sequence: list[int], recommended: list[int], position: int) -> dict[str, Any]:
    past, target = history(sequence, "test"), held_out(sequence, "test")
    return {
        "history": [domain.titles[item] for item in past[-NUM_TITLES:]],
        "num_history": len(past),
        "held_out": domain.titles[target],
        "position": None if position == NOT_RANKED else position,
        "recommended": [{"title": domain.titles[item], "held_out": item == target} for item in recommended],
    }
