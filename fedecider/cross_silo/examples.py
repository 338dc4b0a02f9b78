"""A few users of every domain with what they read, what was held out and what was recommended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import NO_ITEM, NOT_RANKED
from fedecider.evaluation.protocols import histories, with_target
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import stream
from fedecider.models.client_model import ClientModel
from idgen.decode import item_positions, top_items
from idgen.precision import autocast
from idgen.samples import eval_batches

NUM_USERS, NUM_TITLES, NUM_RECOMMENDED = 3, 5, 5


def example_users(num_users: int, seed: int, domain: str) -> Tensor:
    """Up to three user numbers, ascending: the same for every method and round of one seed."""
    return torch.randperm(num_users, generator=stream(seed, "examples", domain))[:NUM_USERS].sort().values


def decode_examples(model: ClientModel, domain: Domain) -> list[dict[str, Any]]:
    """Examples of one domain under the client's model, decoded as for the test metrics.

    Each: ``history`` (the newest titles, oldest first), ``num_history``, ``held_out`` (title, or those of a basket),
    ``position`` (0-based, of the first of them; None when none was returned) and ``recommended`` (the best titles, each
    with ``held_out``: true for a held-out item). Titles and nothing else: no user key.
    """
    task, (ranking, drop_seen, precision, device) = model.client.task, model.base.context
    tested = torch.from_numpy(with_target(task.sequences, "test"))
    users = tested[example_users(len(tested), model.client.seed, task.name)]
    num_beams = len(task.trie) if task.trie.has_own_tokens else ranking.num_beams
    held, examples = model.base.holding(model.adapters), {}
    for user_B, input_ids, attention_mask, target_B in eval_batches(task, "test", ranking.eval_batch_size, users):
        with autocast(device, precision):
            item_BK, _ = top_items(
                held,
                input_ids.to(device),
                attention_mask.to(device),
                task.trie.to(device),
                num_beams=num_beams,
            )
        seen = list(histories(SequenceArray.of(task.sequences).take(user_B), "test"))
        position_B = item_positions(item_BK.cpu(), target_B.cpu(), seen if drop_seen else None)
        first_B = position_B if position_B.ndim == 1 else position_B.nan_to_num(NOT_RANKED).amin(1).long()
        targets = target_B.reshape(len(target_B), -1).tolist()
        for user, items, position, past, basket in zip(
            user_B.tolist(), item_BK.tolist(), first_B.tolist(), seen, targets, strict=True
        ):
            kept = [item for item in items if item >= 0 and not (drop_seen and item in past)]
            wanted = [item for item in basket if item != NO_ITEM]
            examples[user] = _example(domain, past, wanted, kept[:NUM_RECOMMENDED], position)
    return [examples[user] for user in users.tolist()]


def _example(
    domain: Domain, past: list[int], basket: list[int], recommended: list[int], position: int
) -> dict[str, Any]:
    return {
        "history": [domain.titles[item] for item in past[-NUM_TITLES:]],
        "num_history": len(past),
        "held_out": ", ".join(domain.titles[item] for item in basket),
        "position": None if position == NOT_RANKED else position,
        "recommended": [{"title": domain.titles[item], "held_out": item in basket} for item in recommended],
    }
