"""The whole federation again from the last adapters of a run: next month's data on its stages, IDs and catalogue.

The rounds go on where the reported round of the earlier run stood, and are counted from 1 again. Items that the earlier
run does not have are left out, with a word: they have no ID. The validation and test items are those of the new data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedecider.cross_silo.command_line import recorded_settings
from fedecider.cross_silo.prepare import BaseArtifacts, Settings, build_base_artifacts, data_of_run
from fedecider.cross_silo.settings import RunConfig
from fedecider.data.card import make_card
from fedecider.data.domain import Domain, clients_of
from fedecider.data.protocol import under
from fedecider.evaluation.protocols import MIN_EVENTS
from fedecider.federation.method import FederatedMethod, Tree, Upload
from fedecider.federation.state import RunState, load_state
from fedecider.methods.local import PREFIX
from fedecider.running.launch import Launch
from fedecider.running.plain import as_plain
from fedecider.running.progress import log_line
from fedecider.running.run_folder import RunFolder, changed_settings, fingerprint, read_run, refuse_site

SAME = (
    "method",
    "domains",
    "public_domains",
    "seed",
    "lora_rank",
    "lora_targets",
    "quantize",
    "local_row",
    "pretrain",
    "distill",
)
"""What a run has in common with the one that it starts from: what adapters are, and what they stand on."""


def stage_run(run: RunConfig) -> RunConfig:
    """The run whose data stages 1 and 2 of ``run`` were made from: itself, or the first one of a row of runs."""
    while run.start_from:
        run = recorded_settings(Path(run.start_from)).run
    return run


def continued(
    settings: Settings, now: Mapping[str, Domain]
) -> tuple[dict[str, Domain], Callable[[RunConfig, Launch], BaseArtifacts], RunState]:
    """What the run in ``settings.run.start_from`` gives a new one: the data ``now`` on its catalogues, its stages, and
    its state after the last round.

    Raises:
        ValueError: that run has other settings, clients or a catalogue that has nothing in common, its data or its last
            checkpoint are gone, or guarantees to users would not hold for both together.
        FileNotFoundError: there is no such run.
    """
    root = Path(settings.run.start_from)
    record, earlier = read_run(root), recorded_settings(root)
    refuse_site(root, record)
    old, new = as_plain(earlier.run), as_plain(settings.run)
    changed = changed_settings({name: old[name] for name in SAME}, {name: new[name] for name in SAME})
    if changed:
        raise ValueError(
            f"got start_from {root} with other settings ({changed[0]}), expected those of that run: leave --config out"
        )
    if settings.run.privacy.noise_scale > 0.0 or settings.training.user_privacy.on:
        raise ValueError(
            f"got start_from {root} with noise, expected none: the epsilon of both runs together would not be said"
        )
    before = data_of_run(earlier.run, record, root)
    if list(before) != list(now):
        raise ValueError(f"got the domains {list(now)}, expected those of {root}: {list(before)}")
    state = load_state(RunFolder(root).checkpoints, fingerprint(record))
    if state is None:
        raise ValueError(f"got {root} without its last checkpoint, expected it in checkpoints/: adapters start from it")
    domains = {name: on_catalogue(one, before[name]) for name, one in now.items()}
    domains, lost = under(settings.run.protocol, domains)  # who has lost a basket may have too few now
    for line in lost:
        log_line(line)

    def artifacts(run: RunConfig, launch: Launch) -> BaseArtifacts:
        found = build_base_artifacts(replace(stage_run(earlier.run), cache=run.cache), launch)
        clients = clients_of(domains)
        return found._replace(domains=clients, everyone={**clients, **domains})

    return domains, artifacts, state


def on_catalogue(new: Domain, old: Domain) -> Domain:
    """The users of ``new`` with the items that ``old`` has, by its numbers; who has too few of them is left out.

    Raises:
        ValueError: no client user is left.
    """
    number_of = {key: number for number, key in enumerate(old.own_keys)}
    number_I = np.array([number_of.get(key, -1) for key in new.own_keys], np.int64)

    clients, public = new.clients.renumbered(number_I), new.public.renumbered(number_I)
    if not clients.users and new.clients.users:
        raise ValueError(
            f"got data of {new.name} without a customer of {MIN_EVENTS} items that the earlier run has, expected the "
            "same item keys"
        )
    lost = new.clients.num_events - clients.num_events
    if lost:
        log_line(
            f"{new.name}: {lost:,} of {new.clients.num_events:,} events left out, of items that the earlier run does "
            f"not have, or of customers with fewer than {MIN_EVENTS} others; recommend such items by their texts"
        )
    found = replace(old, clients=clients, public=public, card={})
    found.card.update(old.card | make_card(found))
    return found


def going_on(method: FederatedMethod, state: RunState) -> FederatedMethod:
    """``method`` whose first round is the one behind the last of ``state``, from its reported round.

    Raises:
        ValueError: the state is one of other adapters or other clients.
    """
    local = {**state.best_local, **{name: one for name, one in state.local.items() if name.startswith(f"{PREFIX}.")}}
    first = state.round
    if f"{PREFIX}.score" in local:  # of other validation items
        local[f"{PREFIX}.score"] = local[f"{PREFIX}.score"] * 0.0 - 1.0
        local |= {name: local[name] * 0 + first for name in (f"{PREFIX}.round", f"{PREFIX}.trained")}

    def init() -> tuple[Tree, Tree]:
        for tree, expected in zip((state.best_server, local), method.init(), strict=True):
            shapes, wanted = ({name: tuple(one.shape) for name, one in each.items()} for each in (tree, expected))
            if shapes != wanted:
                odd = sorted(set(shapes.items()) ^ set(wanted.items()))[0][0]
                raise ValueError(
                    f"got a state whose {odd} is not that of {method.name} here, expected the same adapters"
                )
        return dict(state.best_server), dict(local)

    def later(work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda round, *others: work(round + first, *others)

    def server_aggregate(round: int, server: Tree, uploads: Iterable[Upload]) -> Tree:
        return method.server_aggregate(round + first, server, uploads)

    named = ("upload_like", "bounded_from", "alone", "cohort")
    asked: dict[str, Any] = {name: later(work) for name in named if (work := getattr(method, name))}
    return method._replace(
        init=init,
        broadcast=later(method.broadcast),
        client_update=later(method.client_update),
        server_aggregate=server_aggregate,
        **asked,
    )
