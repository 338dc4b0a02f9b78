"""What joining leaves where customers are hidden: customers a company by epsilon, and where joining begins to gain.

    python benchmarks/private_joining.py --data data --work runs/private_joining [--seeds 3] [--only counts-]

Data, companies, settings and backbones: those of benchmarks/joining.py. A cell is one size of companies with one seed,
as JSON in --work: what is there is not run again. The section of benchmarks/results/privacy.md is written at the end.

Counts, which train nothing: ensembles without a model, of own counts and texts; with exact sums of the others' counts;
and with customers hidden, so that events with noise are added up and no pairs (`fedecider.models.noised_events`).

Models: own ones with own counts, beside which nothing is sent (alone); federated averaging with exact sums, where
nobody is hidden (joined); own models with what others count, exact or with noise, on which all of epsilon is spent.

Epsilon is of one customer over all that is sent, delta 1e-4.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import joining as J
import provenance
import torch

from fedecider.cross_silo.ended import Ended
from fedecider.cross_silo.ensembles import Fitting, client_counts
from fedecider.cross_silo.entries import ItemTexts
from fedecider.cross_silo.joining import local_system, system_of
from fedecider.cross_silo.reported import chosen_scale
from fedecider.data.domain import Domain
from fedecider.data.near_texts import nearest_texts, unit_vectors
from fedecider.evaluation.metrics import user_metrics
from fedecider.evaluation.protocols import held_out, histories, targets
from fedecider.evaluation.sequences import SequenceArray
from fedecider.evaluation.statistics import Interval, paired_difference
from fedecider.federation.record import read_json, write_json
from fedecider.federation.streams import stream
from fedecider.methods.config import NOT_HIDDEN, UserPrivacy
from fedecider.methods.private_training import user_epsilon
from fedecider.models import ensemble
from fedecider.models.client_model import ClientModel
from fedecider.models.config import EnsembleConfig
from fedecider.models.features import Knowledge
from fedecider.models.item_texts import encoded_texts
from fedecider.running.command import run

PAGE = J.HERE / "results" / "privacy.md"
HEADING = "## What joining leaves where customers are hidden (cross-silo)"
SIZES = {"video_games": (500, 1000, 2000), "beauty": (500, 1000, 2000, 5000)}
TRAINED = {"video_games": (500, 1000, 2000)}
"""Sizes at which models are trained, with seed 0."""
NOISED = {"video_games": (500,)}
"""Sizes at which they are trained with noise: a step takes one backward pass for each of its customers."""
NOISED_ROUNDS = 3
"""Of half as many steps, each with less noise."""
EPSILONS = (8.0, 2.0)
Positions = dict[str, torch.Tensor]
CLIP, DELTA = 0.1, 1e-4
ALONE, JOINED, EXACT = "alone", "joined", "exact counts"
WITH_MODEL = [f"model and counts at epsilon {epsilon:g}" for epsilon in EPSILONS]
HIDDEN = {f"counts at epsilon {epsilon:g}": epsilon for epsilon in EPSILONS}


class Cell(NamedTuple):
    data: str
    size: int
    seed: int
    kind: str
    """counts; models; or noised, of models that are trained with noise."""

    @property
    def key(self) -> str:
        return f"{self.kind}-{self.data}-{self.size}-{self.seed}"


def cells_of(num_seeds: int) -> list[Cell]:
    """In the order in which they are worth their time."""
    seeds = range(num_seeds)
    found = [Cell(data, size, seed, "counts") for seed in seeds for data, sizes in SIZES.items() for size in sizes]
    found += [Cell(data, size, 0, "models") for data, sizes in TRAINED.items() for size in sizes]
    return found + [Cell(data, size, 0, "noised") for data, sizes in NOISED.items() for size in sizes]


def hidden(epsilon: float, num_epochs: int = 0) -> UserPrivacy:
    """The least noise under which a customer has this epsilon over so many epochs and the sum of events."""
    low, high = 0.1, 100.0
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if user_epsilon(UserPrivacy(CLIP, middle), num_epochs, DELTA, 1) > epsilon else (low, middle)
        )
    return UserPrivacy(CLIP, round(high, 3))


def companies(domain: Domain, seed: int, load: J.Load, size: int) -> dict[str, Domain]:
    return J.dealt(domain, seed, load, {f"{domain.name}.{number}": size for number in range(1, J.COMPANIES + 1)})


def counted(cell: Cell, clients: Mapping[str, Domain], texts: ItemTexts) -> dict[str, Positions]:
    """Row -> company -> places under ensembles without a model."""
    everyone = {ALONE: None, EXACT: NOT_HIDDEN, **{row: hidden(epsilon) for row, epsilon in HIDDEN.items()}}
    found: dict[str, Positions] = {}
    for row, users in everyone.items():
        config = EnsembleConfig(kind="logit", sources="own,public" if users is None else "own,public,others")
        counts, _ = client_counts(clients, config, cell.seed, users=users or NOT_HIDDEN)
        found[row] = {}
        for name, domain in clients.items():
            knowledge, whole = Knowledge(counts[name], texts.unit_ID), SequenceArray.of(domain.clients.sequences)
            draws = stream(cell.seed, "ensemble", name)
            few = whole.take(
                torch.randperm(len(whole), generator=draws)[: ensemble.MAX_CUSTOMERS].sort().values.numpy()
            )
            of_few = (histories(few, "valid"), targets(few, "valid"))
            choices = ensemble.choices_of(knowledge, *of_few, None, draws, texts.near)
            weights = [ensemble.fit_weights(choices, False)]
            asked = (histories(whole, "test"), held_out(whole, "test"))
            found[row][name] = ensemble.positions(knowledge, *asked, None, weights, True, texts.near)[0].whole
    return found


def with_models(cell: Cell, shared: J.Shared, clients: Mapping[str, Domain], work: Path) -> dict[str, Positions]:
    """Row -> company -> places under models with their ensembles."""
    ended = J.trained(J.Cell("private", cell.key, cell.data, cell.seed, NO_COMPANIES), shared, clients, work)
    assert ended.alone is not None
    settings, names, texts, own = ended.settings, list(clients), J.texts_of(shared, ended), {}
    for name in names:
        model, score = ended.alone(name)
        own[name] = model.scaled(chosen_scale(settings, model, {1.0: score}))
    scales = {name: chosen_scale(settings, ended.joined(name)) for name in names}
    fitting = Fitting(settings, ended.artifacts, texts)
    joined = system_of(fitting, JOINED, partial(scaled, ended, scales), names)
    found = {ALONE: local_system(fitting, ended.alone), JOINED: joined}
    for row, users in {EXACT: NOT_HIDDEN, **{row: hidden(epsilon) for row, epsilon in HIDDEN.items()}}.items():
        private = settings._replace(training=replace(settings.training, user_privacy=users))
        found[row] = system_of(fitting._replace(settings=private), "own", own.__getitem__, names)
    return {row: dict(system.whole["test"]) for row, system in found.items()}


def noised(cell: Cell, shared: J.Shared, clients: Mapping[str, Domain], work: Path) -> dict[str, Positions]:
    """The same under models that are trained with noise, beside events with the same noise."""
    found = {}
    for row, epsilon in zip(WITH_MODEL, EPSILONS, strict=True):
        users = hidden(epsilon, NOISED_ROUNDS * J.SETTINGS["local_epochs"])
        options = {"num_rounds": NOISED_ROUNDS, "local_row": "off", "privacy.delta": DELTA}
        options |= {"user_privacy.clip": CLIP, "user_privacy.noise_scale": users.noise_scale}
        of_run = J.Cell("private", cell.key, cell.data, cell.seed, NO_COMPANIES, "fedavg", options)
        ended = J.trained(of_run, shared, clients, work)
        scales = {name: chosen_scale(ended.settings, ended.joined(name)) for name in clients}
        fitting = Fitting(ended.settings, ended.artifacts, J.texts_of(shared, ended))
        model_of = partial(scaled, ended, scales)
        system = system_of(fitting, JOINED, model_of, list(clients))
        found[row] = dict(system.whole["test"])
    return found


def scaled(ended: Ended, scales: Mapping[str, float], name: str) -> ClientModel:
    return ended.joined(name).scaled(scales[name])


def measured(cell: Cell, shared: J.Shared, load: J.Load, work: Path) -> dict[str, Any]:
    started = time.process_time()
    clients = companies(shared.whole, cell.seed, load, cell.size)
    if cell.kind != "counts":
        rows = {"models": with_models, "noised": noised}[cell.kind](cell, shared, clients, work)
    else:
        if cell.data not in shared.texts:
            cache, settings = work / "cache", J.settings_of(clients, OF_TEXTS, work / "cache", work)
            vector_ID = encoded_texts({cell.data: shared.whole}, settings.run.pretrain.text_encoder, str(cache))[
                cell.data
            ]
            unit_ID = unit_vectors(vector_ID.numpy())
            shared.texts[cell.data] = ItemTexts(unit_ID, nearest_texts(unit_ID))
        rows = counted(cell, clients, shared.texts[cell.data])
    return {
        "places": {row: {name: J.capped(one) for name, one in of.items()} for row, of in rows.items()},
        "minutes": (time.process_time() - started) / 60,
        "machine": provenance.processor(),
    }


NO_COMPANIES = partial(companies, size=0)
OF_TEXTS = J.Cell("private", "", "", 0, NO_COMPANIES)


def section(found: Mapping[Cell, Mapping[str, Any]]) -> list[str]:
    """A row a size, less alone; models that were trained with noise stand beside those without."""
    lines = [HEADING, "", *begins(found), "", "\n\n".join(__doc__.split("\n\n")[3:6]), ""]
    of_models = [JOINED, EXACT, *HIDDEN, *(WITH_MODEL if any(cell.kind == "noised" for cell in found) else [])]
    for kind, rows in {"counts": [EXACT, *HIDDEN], "models": of_models}.items():
        lines += [f"| {kind}: four companies of | seeds | alone ndcg@10 | {' | '.join(rows)} |"]
        lines += [f"|---|---:|---:|{'---|' * len(rows)}"]
        for data, size in dict.fromkeys((cell.data, cell.size) for cell in found if cell.kind == kind):
            of_size = [cell for cell in found if (cell.data, cell.size, cell.kind) == (data, size, kind)]
            cells = [dict(found[cell]["places"]) for cell in of_size]
            for cell, places in zip(of_size, cells, strict=True):
                places |= found.get(cell._replace(kind="noised"), {"places": {}})["places"] if kind == "models" else {}
            alone = row_of(cells, ALONE)
            mean = sum(float(value_SU.mean()) for value_SU in alone.values()) / len(alone)
            shown = [less_alone(cells, row, alone) if row in cells[0] else "" for row in rows]
            lines.append(f"| {size:,} {data} | {len(cells)} | {mean:.4f} | {' | '.join(shown)} |")
        lines.append("")
    minutes = sum(cell["minutes"] for cell in found.values())
    return [*lines, *provenance.heading("private_joining.py", 1), f"- {minutes:.0f} CPU minutes", ""]


def begins(found: Mapping[Cell, Mapping[str, Any]]) -> list[str]:
    """A sentence for each epsilon: the least sizes at which counts alone are above chance."""
    lines = []
    for row in HIDDEN:
        least: dict[str, int] = {}
        for data, size in sorted({(cell.data, cell.size) for cell in found if cell.kind == "counts"}):
            kind = (data, size, "counts")
            cells = [one["places"] for cell, one in found.items() if (cell.data, cell.size, cell.kind) == kind]
            if data not in least and difference(cells, row, row_of(cells, ALONE)).low > 0.0:
                least[data] = size
        words = ", ".join(f"{size:,} {data}" for data, size in least.items()) or "no size that was measured"
        lines.append(f"**{row.capitalize()}: above alone by more than chance from four companies of {words}.**")
    return lines


def less_alone(cells: Sequence[Mapping[str, Any]], row: str, alone: dict[str, torch.Tensor]) -> str:
    one = difference(cells, row, alone)
    return f"{one.mean:+.4f} [{one.low:+.4f}, {one.high:+.4f}]"


def difference(cells: Sequence[Mapping[str, Any]], row: str, alone: dict[str, torch.Tensor]) -> Interval:
    return paired_difference(row_of(cells, row), alone).interval


def row_of(cells: Sequence[Mapping[str, Any]], row: str) -> dict[str, torch.Tensor]:
    """Company -> (S, U) ndcg@10."""
    return {
        name: torch.stack([user_metrics(torch.tensor(cell[row][name]).double())["ndcg@10"].double() for cell in cells])
        for name in cells[0][row]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--work", type=Path, default=Path("runs/private_joining"), help="cells and cache")
    parser.add_argument("--seeds", type=int, default=3, help="of video_games; other data have seed 0")
    parser.add_argument("--only", default="", help="beginnings of the cells to run, separated by ',' (default: all)")
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    load, shared = cache(partial(J.whole_domain, data=args.data)), dict[str, J.Shared]()
    found: dict[Cell, dict[str, Any]] = {}
    for cell in cells_of(args.seeds):
        path = args.work / f"{cell.key}.json"
        if not path.is_file() and cell.key.startswith(tuple(args.only.split(","))):
            print(cell.key, flush=True)
            if cell.data not in shared:
                base = OF_TEXTS._replace(data=cell.data)
                shared[cell.data] = J.shared_of(base, load, args.work / "cache")
            write_json(path, {**measured(cell, shared[cell.data], load, args.work), "commit": provenance.git_commit()})
        if path.is_file():
            found[cell] = read_json(path)
    before, _, rest = args.output.read_text(encoding="utf-8").partition(HEADING)
    after = rest.partition("\n## ")[2]
    args.output.write_text("\n".join([before + "\n".join(section(found)), f"## {after}"]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run(main))
