"""What a run with a small decoder takes: operations of its parts over what the machine does in a second.

Beside its products each part has a time of its own, as users, events or steps; both were fitted to runs of ours
(benchmarks/results/chosen.md). Shape legend: D width, F width of feed-forward layers, I items of a catalogue, V items
of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from fedecider.cross_silo.hyperparameter_selection import ROUNDS
from fedecider.cross_silo.joining import trains_alone
from fedecider.cross_silo.settings import Settings
from fedecider.data.domain import Domain, clients_of
from fedecider.data.drawn import num_drawn
from fedecider.data.encoders import chosen_encoder
from fedecider.data.sellers import by_catalogue
from idgen.candidates import NUM_UNIFORM, SAMPLED_ABOVE

FACTOR = 2.0
"""Within which the estimate was in the runs of benchmarks/results/chosen.md."""
START_S = 15.0
"""Libraries, data, tables and page."""
ENCODED = 0.6e9
"""Operations of MiniLM for a text, mostly a title."""
COMPARED = 600.0
"""Operations a pair of different texts, beside their product: the nearest are looked for."""
STEP_S = 0.02
"""Of a training step beside its products."""
TRAINED, RANKED = 1.2, 1.0
"""Time of training and ranking over that of the products."""
SORTED = 2_000.0
"""Operations an item and user, beside the product, until an entry of the table is ranked."""
NUM_VARIANTS = 2
"""How often a user is ranked in the validation of a round."""
NUM_TEST_ROWS = 12
"""How often after the last one: rows of the table, shares of the update, both splits."""
BASE_GB = 1.5
"""Libraries and MiniLM."""
NUM_TABLES = 10
"""Of the item vectors that a client needs at a time or has in the state: its own, sent and best ones."""
SOON = 3
"""Rounds after which small data were learned (configs/domains.yaml)."""
SYNTHETIC = 4.0
"""Items of a synthetic history."""


class DataFacts(NamedTuple):
    """What is counted in prepared domains."""

    names: tuple[str, ...]
    """Of the clients."""
    num_catalogues: int
    users: tuple[int, ...]
    """Of each client."""
    num_events: int
    """Of all clients."""
    events_per_user: float
    """The median."""
    num_items: int
    """Of the largest catalogue."""
    num_all_items: int
    num_texts: int
    """Different texts of items that have words, of all catalogues."""
    num_public: int
    """Users."""
    has_parts: bool = False
    """Whether clients of one catalogue sell parts of it."""
    spread: float = 1.0
    """Events of the largest client over those of the smallest one."""
    num_unsold: int = 0
    """Items that nobody has bought yet."""

    @property
    def num_users(self) -> int:
        """Of all clients."""
        return sum(self.users)

    def drawn(self, share: float) -> DataFacts:
        """With a part of the customers, as many as `num_drawn` says, and of the events."""
        users = tuple(num_drawn(number, share) for number in self.users)
        return self._replace(users=users, num_events=round(self.num_events * sum(users) / max(self.num_users, 1)))

    @property
    def is_shared(self) -> bool:
        """Whether any two clients have one catalogue."""
        return self.num_catalogues < len(self.names)


def facts_of(domains: Mapping[str, Domain]) -> DataFacts:
    """Counts of prepared domains, those of an out-of-domain pool among them."""
    clients, sellers = clients_of(domains), by_catalogue(domains).values()
    lengths = [length for domain in clients.values() for length in domain.clients.arrays().sequences.length_U.tolist()]
    sizes = [domain.clients.num_events for domain in clients.values()]
    num_items = [len(one.catalogue.keys) for one in sellers]
    worded = [one.catalogue for one in sellers if one.catalogue.has_texts]
    texts = {text for catalogue in worded for text in catalogue.texts if any(map(str.isalpha, text))}
    return DataFacts(
        names=tuple(clients),
        num_catalogues=len({domain.catalogue for domain in clients.values()}),
        users=tuple(len(domain.clients.users) for domain in clients.values()),
        num_events=sum(lengths),
        events_per_user=float(median(lengths)) if lengths else 0.0,
        num_items=max(num_items),
        num_all_items=sum(num_items),
        num_texts=len(texts),
        num_public=len({user for domain in domains.values() for user in domain.public.users}),
        spread=max(sizes) / min(sizes) if sizes else 1.0,
        num_unsold=len({item for domain in domains.values() for item in domain.unsold}),
        has_parts=any(domain.is_part for domain in clients.values()),
    )


class Estimate(NamedTuple):
    """Seconds of one process where nothing else runs."""

    once: float
    """What does not depend on customers and rounds."""
    round: float
    """Of each round."""
    results: float
    """Ranking everything at the end."""
    num_rounds: float
    """Of rounds that may end early the mean of all and of the fewest."""
    gigabytes: float

    @property
    def expected(self) -> float:
        return self.once + self.round * self.num_rounds + self.results


def estimate(facts: DataFacts, settings: Settings, flops: float) -> Estimate:
    """Seconds and gigabytes; ``flops``: operations a second of a product.

    A target costs 2 (D C + L (4 D^2 + 3 D F)) operations forward and three times as many in training, C being what it
    is compared with: the catalogue, or where that is large a sample and the targets of its batch (`idgen.candidates`).
    """
    run, training = settings.run, settings.training
    backbone, train, samples = run.pretrain.backbone, run.pretrain.train, run.pretrain.samples
    width, layers = backbone.d_model, (backbone.num_layers + 1) // 2
    layer = 2 * (4 * width**2 + 3 * width * 4 * width)
    length = min(facts.num_events / max(facts.num_users, 1), samples.max_history)

    def training_s(rows: float, targets: float, num_items: int, batch_size: int, depth: int) -> float:
        """``rows`` of as many ``targets`` among ``num_items``."""
        compared = min(num_items, NUM_UNIFORM + batch_size * targets) if num_items > SAMPLED_ABOVE else num_items
        operations = 3 * rows * (2 * width * compared * targets + max(targets, SYNTHETIC) * depth * layer)
        return TRAINED * operations / flops + STEP_S * rows / batch_size

    def ranking_s(num: float, num_items: int, depth: int) -> float:
        return RANKED * num * (length * depth * layer + (2 * width + SORTED) * num_items) / flops

    encodes = chosen_encoder(run.pretrain.text_encoder) != "tfidf"
    texts = ENCODED * (facts.num_texts + facts.num_unsold) * encodes + (COMPARED + 6 * width) * facts.num_texts**2
    epoch = facts.num_public / (1.0 - samples.synthetic_share) if facts.num_public else facts.num_all_items
    targets = length if facts.num_public else 1.0  # of synthetic histories the last item alone is a target
    rows = (train.max_steps or train.epochs * epoch / train.batch_size) * train.batch_size
    once = START_S + texts / flops
    once += training_s(rows, targets, facts.num_all_items, train.batch_size, backbone.num_layers)
    once += training_s(run.distill.epochs * epoch, targets, 0, run.distill.batch_size, layers + 1)

    trained = max(facts.num_events - 3 * facts.num_users, facts.num_users) / length
    local = training_s(training.local_epochs * trained, length, facts.num_items, training.batch_size, layers)
    in_round = min(facts.num_users, settings.ranking.num_eval_users * len(facts.names) or facts.num_users)
    alone = trains_alone(settings, len(facts.names))
    tried = ROUNDS * (1 + len(run.hyperparameter_candidates)) if run.hyperparameter_candidates else 0
    one_round = (1 + alone) * local + ranking_s(in_round * (NUM_VARIANTS + alone), facts.num_items, layers)
    once += tried * (local + ranking_s(in_round, facts.num_items, layers))
    results = ranking_s(facts.num_users * NUM_TEST_ROWS, facts.num_items, layers)
    rounds = float(run.num_rounds)
    if run.patience:
        rounds = (rounds + min(rounds, SOON + run.patience / run.participation)) / 2
    table = 4 * width * facts.num_all_items / 1e9
    return Estimate(once, one_round, results, rounds, BASE_GB + (2 + NUM_TABLES * len(facts.names)) * table)


class Draw(NamedTuple):
    """Customers and rounds that fit into a time."""

    settings: dict[str, Any]
    """In place of those of the whole run; no hyper-parameters are tried."""
    text: str
    estimate: Estimate


LEAST_ROUNDS = 3
ROOM = 1.25
"""Times the estimate that the time must leave."""


def draw(facts: DataFacts, settings: Settings, flops: float, minutes: float) -> Draw | None:
    """As many customers as `LEAST_ROUNDS` leave the time for, then as many rounds; None where all of both fit.

    No hyper-parameters are tried where something is drawn.

    Raises:
        ValueError: there is no time for the fewest customers and rounds.
    """
    whole = estimate(facts, settings, flops)
    room_s, rounds = minutes * 60 / ROOM, settings.run.num_rounds
    if whole.expected <= room_s:
        return None

    def part(share: float, num_rounds: int) -> Estimate:
        run = replace(settings.run, hyperparameter_candidates=(), patience=0, num_rounds=num_rounds)
        return estimate(facts.drawn(share), settings._replace(run=run), flops)

    fewest = min(rounds, LEAST_ROUNDS)
    share = next((percent / 100 for percent in range(100, 0, -1) if part(percent / 100, fewest).expected <= room_s), 0)
    if not share:
        least_s = part(0.01, fewest).expected * ROOM
        raise ValueError(
            f"got minutes {minutes:g}, expected at least {math.ceil(least_s / 60)} for these data on this machine: so "
            f"long take {facts.drawn(0.01).num_users:,} customers and {_number(fewest, 'round')}"
        )
    most = max([fewest, *(num for num in range(fewest, rounds + 1) if part(share, num).expected <= room_s)])
    text = (
        f"drawn: {facts.drawn(share).num_users:,} of {facts.num_users:,} customers, {most} of "
        f"{_number(rounds, 'round')}; the whole run would take about {time_text(whole.expected)}"
    )
    changes: dict[str, Any] = {
        "customer_share": share,
        "num_rounds": most,
        "hyperparameter_candidates": [],
        "drawn": text,
    }
    return Draw(changes, text, part(share, most))


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def time_text(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 90 * 60 else f"{seconds / 3600:.1f} hours"
