"""A few users of every domain: what they bought, what was held out and what was recommended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedecider.data.domain import Domain
from fedecider.evaluation.metrics import NO_ITEM, NOT_RANKED
from fedecider.evaluation.protocols import held_out, histories, with_target
from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.streams import stream
from fedecider.models.client_model import ClientModel
from fedecider.models.ensemble import Places
from idgen.decode import item_positions, top_items
from idgen.precision import autocast
from idgen.samples import eval_batches

NUM_USERS, NUM_TITLES, NUM_RECOMMENDED = 3, 10, 10


def example_users(num_users: int, seed: int, domain: str) -> Tensor:
    """Up to three user numbers, ascending: the same for every method and round of one seed."""
    return torch.randperm(num_users, generator=stream(seed, "examples", domain))[:NUM_USERS].sort().values


def examples_of(model: ClientModel, domain: Domain, listed: Places | None = None) -> list[dict[str, Any]]:
    """Examples of one domain: what its ensemble recommended in the test, ``listed``; without one, what the model does.

    Each: ``history`` (the newest titles, oldest first), ``num_history``, ``held_out`` (title, or those of a basket),
    ``position`` (0-based, of the first of them; None when none was returned) and ``recommended`` (the best titles, each
    with ``held_out``: true for a held-out item). Titles and nothing else: no user key.
    """
    task, (ranking, drop_seen, *_) = model.client.task, model.base.context
    sequences = SequenceArray.of(task.sequences)
    tested, ranked = with_target(task.sequences, "test"), model.client.ranked_users("test", ranking)
    row_of = {user: row for row, user in enumerate(range(len(sequences)) if ranked is None else ranked.tolist())}
    users = torch.from_numpy(tested)
    if listed is not None:
        users = users[[user in row_of for user in users.tolist()]]
    users = users[example_users(len(users), model.client.seed, task.name)]
    past = [list(items) for items in histories(sequences.take(users.numpy()), "test")]
    target_B = held_out(sequences.take(users.numpy()), "test")
    if listed is None:
        item_BK = _decoded(model, users)
        position_B = item_positions(item_BK, target_B, past if drop_seen else None)
    else:
        rows = [row_of[user] for user in users.tolist()]
        item_BK, position_B = listed.ten[rows], listed.whole[rows]
    first_B = position_B if position_B.ndim == 1 else position_B.nan_to_num(NOT_RANKED).amin(1)
    examples = []
    for row, items in enumerate(item_BK.tolist()):
        kept = [item for item in items if item >= 0 and not (drop_seen and item in past[row])]
        wanted = [item for item in target_B[row].reshape(-1).tolist() if item != NO_ITEM]
        examples.append(_example(domain, past[row], wanted, kept[:NUM_RECOMMENDED], int(first_B[row])))
    return examples


def _decoded(model: ClientModel, users: Tensor) -> Tensor:
    """(B, K) items of the users' test lists under the model without an ensemble, decoded as for the test metrics."""
    task, (ranking, _, precision, device) = model.client.task, model.base.context
    num_beams = len(task.trie) if task.trie.has_own_tokens else ranking.num_beams
    held, item_BK = model.base.holding(model.adapters), torch.full((len(users), num_beams), -1)
    row_of = {user: row for row, user in enumerate(users.tolist())}
    for user_R, input_ids, attention_mask, _ in eval_batches(task, "test", ranking.eval_batch_size, users):
        with autocast(device, precision):
            asked = (input_ids.to(device), attention_mask.to(device), task.trie.to(device))
            item_RK, _ = top_items(held, *asked, num_beams=num_beams)
        item_BK[[row_of[user] for user in user_R.tolist()]] = item_RK.cpu()
    return item_BK


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
