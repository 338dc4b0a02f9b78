"""What one common value for far texts costs: places with as many near texts as a run keeps, and with all."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedecider.baselines.counts import TEXT, TEXT_AND_COUNTS, heuristic_positions, text_votes
from fedecider.cross_silo.ensembles import ENSEMBLE_ROW, own_counts
from fedecider.data.near_texts import nearest_texts, unit_vectors
from fedecider.data.store import load_domains
from fedecider.evaluation.metrics import mean_metrics
from fedecider.evaluation.protocols import NUM_HELD_OUT, held_out, histories, targets
from fedecider.federation.streams import stream
from fedecider.models.counts import count_events
from fedecider.models.ensemble import choices_of, fit_weights, positions
from fedecider.models.features import Knowledge
from fedecider.models.item_texts import encoded_texts

DATA_SETS = ("toys", "beauty", "sports")
EVERY = 4
"""Of the customers every fourth is ranked; all are counted."""
FITTED = 2000
"""Customers on whose validation items the weights are fitted."""


def measure(data: Path, name: str, cache: str, every_one: bool = False) -> dict[str, float]:
    """ndcg@10 of the rows that read texts, and how many near ones an item has at most."""
    domains = load_domains(data, [name])
    domain = domains[name]
    unit_ID = unit_vectors(encoded_texts(domains, "auto", cache)[name].numpy())
    near = nearest_texts(unit_ID, num_nearest=len(unit_ID) if every_one else None)
    counts = own_counts(domain).plus(count_events(domain.public.sequences, len(unit_ID)))
    knowledge, sequences = Knowledge(counts, unit_ID), domain.clients.arrays().sequences
    some = sequences[:FITTED]
    fitted_on = (histories(some, "valid"), targets(some, "valid"))
    weights = fit_weights(choices_of(knowledge, *fitted_on, None, stream(0, "texts", name), near), False)
    is_asked_U = [user % EVERY == 0 for user in range(len(sequences))]
    asked = [list(sequence) for sequence, is_asked in zip(sequences, is_asked_U, strict=True) if is_asked]
    others = [list(sequence) for sequence, is_asked in zip(sequences, is_asked_U, strict=True) if not is_asked]
    extra = [sequence[:-NUM_HELD_OUT] for sequence in others] + [list(part) for part in domain.public.sequences]
    found = heuristic_positions(asked, len(unit_ID), ["test"], text_votes(near), extra=extra)["test"]
    ranked = (histories(asked, "test"), held_out(asked, "test"))
    found[ENSEMBLE_ROW] = positions(knowledge, *ranked, None, [weights], True, near)[0].whole
    ndcg = {row: mean_metrics(found[row])["ndcg@10"] for row in (TEXT, TEXT_AND_COUNTS, ENSEMBLE_ROW)}
    return {"items": len(unit_ID), "near": int((near.cube_II.indptr[1:] - near.cube_II.indptr[:-1]).max()), **ndcg}


def part_texts(args: argparse.Namespace) -> str:
    """A table of three data sets."""
    lines = ["| data set | row | all texts one by one | far ones by their mean | change |", "|---|---|---:|---:|---:|"]
    sizes = []
    for name in DATA_SETS:
        path = Path(args.work) / "texts" / f"{name}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            cache = args.vectors or str(path.parent / "cache")
            data = Path(args.data) / name
            sides = {"all": measure(data, name, cache, every_one=True), "kept": measure(data, name, cache)}
            path.write_text(json.dumps(sides, indent=1))
        found = json.loads(path.read_text())
        sizes.append(f"{name}: {found['kept']['items']:,.0f} items, {found['kept']['near']:,.0f} near ones at most")
        for row in (TEXT, TEXT_AND_COUNTS, ENSEMBLE_ROW):
            one, other = found["all"][row], found["kept"][row]
            lines.append(f"| {name} | {row} | {one:.5f} | {other:.5f} | {other / one - 1:+.1%} |")
    said = f"ndcg@10 of the test items of every {EVERY}th customer; {'; '.join(sizes)}."
    return "\n".join([said, "", *lines])
