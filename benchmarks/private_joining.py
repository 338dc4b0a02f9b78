"""What joining leaves where customers are hidden: customers a company by epsilon, and where joining begins to gain.

    python benchmarks/private_joining.py --data data --work runs/private_joining [--seeds 3] [--only video_games-500]

Data, companies, settings and backbones: those of benchmarks/joining.py. A cell is one size of companies with one seed,
as JSON in --work: what is there is not run again.

- alone: each company's own model, counts and texts. Nothing is sent.
- joined: federated averaging, with exact sums of counts. Nobody is hidden.
- own model, counts: the own model; counts that are added up (`--method counts`).
- epsilon e, counts: the same where customers are hidden, so that events with noise are added up and no pairs
  (`fedecider.models.noised_events`). All of epsilon is spent on them.
- epsilon e, model and counts: federated averaging with the same noise in training and on events.

Epsilon is of one customer over all that is sent, delta 1e-4.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import joining as J
import provenance

from fedecider.cross_silo.ended import Ended
from fedecider.cross_silo.ensembles import Fitting, System
from fedecider.cross_silo.joining import local_system, system_of
from fedecider.cross_silo.reported import chosen_scale
from fedecider.data.domain import Domain
from fedecider.federation.record import read_json, write_json
from fedecider.methods.config import UserPrivacy
from fedecider.methods.private_training import user_epsilon
from fedecider.running.command import run

PAGE = J.HERE / "results" / "private_joining.md"
SIZES = {"video_games": (500, 1000, 2000), "beauty": (500, 2000, 5000)}
EPSILONS = (8.0, 2.0)
TRAINED = {"video_games": (500,)}
"""Sizes at which models are trained with noise: a step takes one backward pass a customer."""
CLIP, DELTA = 0.1, 1e-4
ALONE, JOINED, COUNTS = "alone", "joined", "own model, counts"


class Cell(NamedTuple):
    data: str
    size: int
    seed: int
    epsilon: float = 0.0
    """Of a model that is trained with noise; 0: of one without."""

    @property
    def key(self) -> str:
        hidden = f"-epsilon{self.epsilon:g}" if self.epsilon else ""
        return f"{self.data}-{self.size}-{self.seed}{hidden}"


def cells_of(num_seeds: int) -> list[Cell]:
    """In the order in which they are worth their time."""
    found = [Cell(data, size, 0) for data, sizes in SIZES.items() for size in sizes]
    found += [Cell(data, size, 0, epsilon) for data, sizes in TRAINED.items() for size in sizes for epsilon in EPSILONS]
    return found + [Cell("video_games", size, seed) for seed in range(1, num_seeds) for size in SIZES["video_games"]]


def hidden(epsilon: float, num_epochs: int) -> UserPrivacy:
    """The least noise under which a customer has this epsilon over so many epochs and the sum of events."""
    low, high = 0.1, 100.0
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        above = user_epsilon(UserPrivacy(CLIP, middle), num_epochs, DELTA, 1) > epsilon
        low, high = (middle, high) if above else (low, middle)
    return UserPrivacy(CLIP, round(high, 3))


def companies(domain: Domain, seed: int, load: J.Load, size: int) -> dict[str, Domain]:
    return J.dealt(domain, seed, load, {f"{domain.name}.{number}": size for number in range(1, J.COMPANIES + 1)})


def with_noise(ended: Ended, texts: Mapping[str, Any]) -> dict[str, System]:
    """Row -> what companies have of their own models and of what others count."""
    assert ended.alone is not None
    settings, names, own = ended.settings, list(ended.artifacts.domains), {}
    for name in names:
        model, score = ended.alone(name)
        own[name] = model.scaled(chosen_scale(settings, model, {1.0: score}))
    found = {}
    for row, users in {COUNTS: UserPrivacy(), **{counts(one): hidden(one, 0) for one in EPSILONS}}.items():
        private = settings._replace(training=replace(settings.training, user_privacy=users))
        fitting = Fitting(private, ended.artifacts, texts)
        found[row] = system_of(fitting, "own", own.__getitem__, names)
    return found


def counts(epsilon: float) -> str:
    return f"epsilon {epsilon:g}, counts"


def model_and_counts(epsilon: float) -> str:
    return f"epsilon {epsilon:g}, model and counts"


def measured(cell: Cell, shared: J.Shared, load: J.Load, work: Path) -> dict[str, Any]:
    """Row -> company -> places of its customers' last events."""
    started = time.process_time()
    clients = companies(shared.whole, cell.seed, load, cell.size)
    options: dict[str, Any] = {}
    if cell.epsilon:
        users = hidden(cell.epsilon, J.SETTINGS["num_rounds"] * J.SETTINGS["local_epochs"])
        options = {"user_privacy.clip": CLIP, "user_privacy.noise_scale": users.noise_scale, "privacy.delta": DELTA}
        options |= {"local_row": "off"}
    of_run = J.Cell("private", cell.key, cell.data, cell.seed, companies, "fedavg", options)
    ended = J.trained(of_run, shared, clients, work)
    texts = J.texts_of(shared, ended)
    scales = {name: chosen_scale(ended.settings, ended.joined(name)) for name in clients}
    fitting = Fitting(ended.settings, ended.artifacts, texts)
    joined = system_of(fitting, JOINED, lambda name: ended.joined(name).scaled(scales[name]), list(clients))
    systems = {model_and_counts(cell.epsilon) if cell.epsilon else JOINED: joined}
    if not cell.epsilon:
        assert ended.alone is not None
        systems |= {ALONE: local_system(fitting, ended.alone), **with_noise(ended, texts)}
    both = {row: {"": system.model["test"], J.ENSEMBLE: system.whole["test"]} for row, system in systems.items()}
    return {
        "places": {
            f"{row}{after}": {name: J.capped(position_U) for name, position_U in places.items()}
            for row, of in both.items()
            for after, places in of.items()
        },
        "users": {name: list(domain.clients.users) for name, domain in clients.items()},
        "noise_scale": options.get("user_privacy.noise_scale"),
        "settings": J.SETTINGS,
        "minutes": (time.process_time() - started) / 60,
        "machine": provenance.processor(),
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
    found = {}
    for cell in cells_of(args.seeds):
        path = args.work / f"{cell.key}.json"
        if not path.is_file() and cell.key.startswith(tuple(args.only.split(","))):
            print(cell.key, flush=True)
            if cell.data not in shared:
                base = J.Cell("private", "", cell.data, 0, companies)
                shared[cell.data] = J.shared_of(base, load, args.work / "cache")
            write_json(path, {**measured(cell, shared[cell.data], load, args.work), "commit": provenance.git_commit()})
        if path.is_file():
            found[cell] = read_json(path)


if __name__ == "__main__":
    sys.exit(run(main))
