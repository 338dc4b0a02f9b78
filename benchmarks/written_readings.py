"""What a model with a dense head says of the same customers by what it writes, by its dense head, and by ensembles.

Weights of several features together are those of a conditional logit on validation items
(`fedecider.models.ensemble`, here without a prior).

Shape legend: N customers, B of a block, I items, F features, K beams.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.evaluation.metrics import catalogue_positions, mean_metrics
from fedecider.evaluation.protocols import held_out, histories
from fedecider.evaluation.sequences import SequenceArray
from fedecider.evaluation.statistics import paired_difference
from fedecider.models.ensemble import blocks_of
from fedecider.models.features import NEW, TEXT, Knowledge
from idgen.decode import constrained_beam_search, item_positions
from idgen.item_scores import catalogue_scores, written_log_probs
from idgen.ranking import eval_users
from idgen.samples import encode_histories
from idgen.tasks import Task

NUM_CUSTOMERS = {"valid": 300, "test": 700}
"""Whose items are all scored by what the model writes."""
AT_ONCE = 20
NUM_BEAMS = 20
DENSE, WRITTEN = "dense head", "writing"
BEAMS = f"writing, beams of {NUM_BEAMS}"
BY_TEXT = "dense head, their rows made of their texts"
KNOWN = NEW[1:]
"""Of the ensemble, beside the model."""
READINGS: dict[str, tuple[str, ...]] = {
    "writing, exact": (WRITTEN,),
    "dense head": (DENSE,),
    "dense head and writing": (DENSE, WRITTEN),
    "ensemble, dense head": (DENSE, *KNOWN),
    "ensemble, dense head and writing": (DENSE, WRITTEN, *KNOWN),
}
WITHOUT = {more: more.removesuffix(f" and {WRITTEN}") for more in READINGS if more.endswith(f" and {WRITTEN}")}
"""A reading -> the same without writing."""
ABOUT = (
    f"{NUM_CUSTOMERS['test']} test customers a seed; weights are learned on validation items of "
    f"{NUM_CUSTOMERS['valid']}.\nThe ensemble has counts of everybody's train parts and texts beside the model."
)


class Scored(NamedTuple):
    """Some customers and all features of all items behind their histories."""

    value: dict[str, Tensor]
    """Feature -> (N, I) float32."""
    target_N: Tensor
    seen: list[list[int]]


def scored(
    model: Any, task: Task, rows: SequenceArray, split: str, knowledge: Knowledge, writes: bool = True
) -> tuple[Scored, Tensor, dict]:
    """Features; places of the targets among beams, and CPU seconds of each way to score."""
    past, target_N = list(map(list, histories(rows, split))), held_out(rows, split)
    parts: dict[str, list[Tensor]] = {DENSE: [], WRITTEN: [], BEAMS: []}
    seconds = dict.fromkeys(parts, 0.0)
    for start in range(0, len(past), AT_ONCE):
        part = past[start : start + AT_ONCE]
        prompts = encode_histories(task, part)
        begun = time.process_time()
        blocks = [
            torch.log_softmax(block_BI.float(), 1) for _, block_BI in catalogue_scores(model, *prompts, task.trie)
        ]
        parts[DENSE].append(torch.cat(blocks))
        seconds[DENSE] += (now := time.process_time()) - begun
        if writes and task.trie.max_length > 1:
            parts[WRITTEN].append(written_log_probs(model, *prompts, task.trie).float())
            seconds[WRITTEN] += (later := time.process_time()) - now
            item_BK, _ = constrained_beam_search(model, *prompts, task.trie, NUM_BEAMS)
            parts[BEAMS].append(item_positions(item_BK, target_N[start : start + AT_ONCE], part))
            seconds[BEAMS] += time.process_time() - later
    whole = {name: torch.cat(one) for name, one in parts.items() if one}
    place_N = whole.pop(BEAMS, torch.empty(0))
    values = [block.value for block, _ in blocks_of(knowledge, SequenceArray.of(past))]
    whole |= {name: torch.cat([value[name] for value in values]) for name in KNOWN}
    return Scored(whole, target_N, past), place_N, seconds


def fitted(given: Scored, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Feature -> weight and its standard error: the largest likelihood of the targets among items that are not seen."""
    x_NIF = torch.stack([given.value[name] for name in names], -1).double()
    closed_NI = torch.zeros(x_NIF.shape[:2], dtype=torch.bool)
    for row, items in enumerate(given.seen):
        closed_NI[row, items] = True
    theta_F = torch.zeros(len(names), dtype=torch.float64)
    theta_F[0] = 1.0
    rows_N = torch.arange(len(x_NIF))
    for _ in range(30):
        prob_NI = (x_NIF @ theta_F).masked_fill(closed_NI, -torch.inf).softmax(1)
        mean_NF = torch.einsum("ni,nif->nf", prob_NI, x_NIF)
        slope_F = (x_NIF[rows_N, given.target_N] - mean_NF).sum(0)
        curve_FF = torch.einsum("ni,nif,nig->fg", prob_NI, x_NIF, x_NIF) - mean_NF.T @ mean_NF
        step_F = torch.linalg.solve(curve_FF, slope_F)
        theta_F += step_F * min(1.0, 0.5 / float(step_F.abs().max()))
        if float(step_F.abs().max()) < 1e-6:
            break
    error_F = torch.linalg.inv(curve_FF).diagonal().sqrt()
    return {name: (float(theta_F[place]), float(error_F[place])) for place, name in enumerate(names)}


def readings(model: Any, task: Task, knowledge: Knowledge) -> dict[str, Any]:
    """Reading -> metrics of the same test customers, seen items dropped, and its weights; CPU seconds a customer."""
    rows = SequenceArray.of(task.sequences)
    found: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    given: dict[str, Scored] = {}
    for split, number in NUM_CUSTOMERS.items():
        users = eval_users(task, "valid", number, torch.Generator().manual_seed(0))
        given[split], beams_N, seconds = scored(model, task, rows.take(users), split, knowledge)
    test = given["test"]
    if len(beams_N):
        found[BEAMS] = {**mean_metrics(beams_N, (10,)), "weights": {}}
    for reading, names in READINGS.items():
        if set(names) - set(test.value):
            continue
        weights = fitted(given["valid"], names) if len(names) > 1 else {names[0]: (1.0, 0.0)}
        score_NI = sum(weights[name][0] * test.value[name] for name in names)
        assert isinstance(score_NI, Tensor)
        place_N = catalogue_positions(score_NI, test.target_N, test.seen)
        found[reading] = {**mean_metrics(place_N, (10,)), "weights": weights, "places": place_N.clamp(max=10).tolist()}
    return {"readings": found, "seconds": {name: one / NUM_CUSTOMERS["test"] for name, one in seconds.items() if one}}


def cold_places(
    model: Any, tasks: Mapping[str, Task], knowledge: Knowledge, is_cold_I: Tensor, row_ID: Tensor
) -> dict[str, Any]:
    """Reading -> metrics of customers whose next item was never met (task "cold") and of others (task "warm"), among
    all items, and of the former among those never met. ``row_ID``: rows of the table by the items' texts."""
    found: dict[str, Any] = {"customers": len(tasks["cold"].sequences), "items": int(is_cold_I.sum())}

    def add(reading: str, group: str, score_NI: Tensor, given: Scored) -> None:
        places = {group: catalogue_positions(score_NI, given.target_N, given.seen)}
        if group == "cold":
            among_NI = score_NI.masked_fill(~is_cold_I, -torch.inf)
            places["among"] = catalogue_positions(among_NI, given.target_N, None)
        found.setdefault(reading, {}).update({name: mean_metrics(place_N, (10,)) for name, place_N in places.items()})

    rows = {group: SequenceArray.of(task.sequences) for group, task in tasks.items()}
    for group, names in (("cold", (WRITTEN, DENSE, TEXT)), ("warm", (DENSE, TEXT))):
        given, _, _ = scored(model, tasks[group], rows[group], "test", knowledge, WRITTEN in names)
        for name in names:
            add(name, group, given.value[name], given)
    with torch.no_grad():
        token_I = tasks["cold"].trie.last_token_I
        model.get_input_embeddings().weight[token_I[is_cold_I]] = row_ID[is_cold_I]
    for group in tasks:
        given, _, _ = scored(model, tasks[group], rows[group], "test", knowledge, False)
        add(BY_TEXT, group, given.value[DENSE], given)
    return found


def readings_table(runs: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Of all seeds together, whose customers are others; weights of the first one."""
    first, *_ = runs.values()
    lines = ["| reading | R@10 | N@10 | weights, +- 2 standard errors (first seed) |", "|---|---:|---:|---|"]
    ndcg: dict[str, Tensor] = {}
    for reading, of_first in first["readings"].items():
        each = [one["readings"][reading] for one in runs.values()]
        parts = [f"{name} {weight:.2f} +- {2 * error:.2f}" for name, (weight, error) in of_first["weights"].items()]
        means = " | ".join(f"{fmean(one[name] for one in each):.4f}"[1:] for name in ("hit@10", "ndcg@10"))
        lines.append(f"| {reading} | {means} | {', '.join(parts) if len(parts) > 1 else ''} |")
        if "places" in of_first:
            place_N = torch.cat([torch.tensor(one["places"]) for one in each]).double()
            ndcg[reading] = (1.0 / torch.log2(place_N + 2.0)).masked_fill(place_N >= 10, 0.0)
    lines.append("")
    for more, less in WITHOUT.items():
        if more in ndcg:
            (mean, low, high), p_value, _ = paired_difference(ndcg[more], ndcg[less])
            lines.append(f"- What writing adds to the {less}: {mean:+.4f} [{low:+.4f}, {high:+.4f}], p {p_value:.2g}")
    seconds = {name: fmean(one["seconds"][name] for one in runs.values()) for name in first["seconds"]}
    cost = ", ".join(f"{name} {one:.3f}" for name, one in seconds.items())
    return [
        *lines,
        f"- {len(runs)} seeds, {len(next(iter(ndcg.values()))):,} customers; CPU seconds a customer: {cost}",
    ]
