"""A run of the cross-silo track whose rounds are over, and what came of it, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedecider.cross_silo.ensembles import System
from fedecider.cross_silo.entries import ModelOf, Positions
from fedecider.cross_silo.joining import AloneOf, Keeps, has_local_row
from fedecider.cross_silo.prepare import BaseArtifacts
from fedecider.cross_silo.reported import Scales, reported_model, trained_alone
from fedecider.cross_silo.settings import Settings
from fedecider.engine.result import RunResult
from fedecider.engine.run import Rounds
from fedecider.federation.method import FederatedMethod
from fedecider.federation.rounds import evaluate
from fedecider.federation.state import RunState
from fedecider.federation.wire import take_row
from fedecider.methods.client_models import ClientModels
from fedecider.methods.local import PREFIX
from fedecider.models.client_model import ClientModel
from fedecider.models.counts import Counts


class Ended(NamedTuple):
    """A run whose rounds are over: the models that its clients have, and how the variants of the method rank."""

    settings: Settings
    method: FederatedMethod
    models: ClientModels
    artifacts: BaseArtifacts
    """``domains`` are those of the clients whose models are here."""
    rounds: RunState
    """How many there were, and which was best."""
    joined: ModelOf
    """The reported model of a client."""
    alone: AloneOf | None
    """What a client has trained alone; None where nobody did."""
    variant: Callable[[str, str], Positions]
    """variant, split -> positions; with several processes all of them ask."""
    others: Mapping[str, Counts] | None = None
    """See `fedecider.cross_silo.ensembles.client_counts`."""
    prior: Mapping[str, float] | None = None
    """See `fedecider.cross_silo.ensembles.Fitting`."""


class Outcome(NamedTuple):
    """What came of a run, and what of it is exported."""

    result: RunResult
    kept: System
    """What every client keeps."""
    keeps: Mapping[str, Keeps]
    scales: Scales
    """Of the updates in joint models."""
    added: Mapping[str, Mapping[str, float]]
    """See `fedecider.cross_silo.exchange.added_by`; empty for a method without fusion weights."""


def ended(settings: Settings, models: ClientModels, rounds: Rounds, artifacts: BaseArtifacts, state: RunState) -> Ended:
    """A simulated run, all of whose clients are here."""
    method, single, names = rounds.method, models.by_itself(), models.names

    def joined(name: str) -> ClientModel:
        return reported_model(settings, method, single, state, names.index(name))

    def alone(name: str) -> tuple[ClientModel, float]:
        client = names.index(name)
        return trained_alone(single, num_rounds, take_row(state.local, client), client)

    def variant(name: str, split: str) -> Positions:
        places = evaluate(method, state.best, name, split, rounds.clients.blocks, rounds.processes)
        return dict(zip(artifacts.domains, places, strict=True))

    has_alone = has_local_row(settings, state.local)
    num_rounds = int(state.local[f"{PREFIX}.trained"].max()) + settings.run.num_rounds - state.round if has_alone else 0
    return Ended(settings, method, single, artifacts, state, joined, alone if has_alone else None, variant)
