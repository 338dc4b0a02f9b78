"""Baselines of other people: functions that stand as rows beside ours in every run of the cross-silo track.

A package brings them by the entry point group ``fedecider.baselines``; in Python they are handed to
``fedecider.federate(baselines={...})``. They see train parts and get histories, so that no held-out item is in reach.

Shape legend: B users of a batch, I items of the catalogue, U users.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedecider.data.domain import Domain
from fedecider.evaluation.protocols import Protocol, rank_held_out, train_parts
from fedecider.evaluation.protocols import histories as known_events
from fedecider.federation.registry import package_of

BASELINES = "fedecider.baselines"
"""The entry point group; the name of an entry point is the label of the row."""
NUM_TRIED = 50
"""Users of a client on whom every baseline is tried before a run begins."""


class TrainData(NamedTuple):
    """What a baseline may know of a client."""

    name: str
    item_keys: Sequence[str]
    titles: Sequence[str]
    texts: Sequence[str]
    """What the item table says of each item; items are numbered in this order."""
    sequences: Sequence[Sequence[int]]
    """Item numbers of the client's users without their held-out items, then of the public users; oldest first."""


Score = Callable[[Sequence[Sequence[int]]], Any]
"""B histories of item numbers, oldest first -> (B, I) scores, tensor or array; a larger one is better."""
OwnBaseline = Callable[[TrainData], Score]

_lent: dict[str, OwnBaseline] = {}


@contextmanager
def lent(baselines: Mapping[str, OwnBaseline]) -> Iterator[None]:
    """Have these among the installed baselines while the block lasts.

    Raises:
        ValueError: no mapping of a name to a function, or a name that is taken.
    """
    if not isinstance(baselines, Mapping) or not all(callable(one) for one in baselines.values()):
        raise ValueError(f"got baselines {baselines!r}, expected functions by name: {{'our rule': our_rule}}")
    taken = [name for name in baselines if name in own_baselines()]
    if taken:
        raise ValueError(f"got the baseline {taken[0]}, which an installed package has too, expected another name")
    _lent.update(baselines)
    try:
        yield
    finally:
        for name in baselines:
            del _lent[name]


def own_baselines() -> dict[str, EntryPoint | OwnBaseline]:
    """By name, the installed ones first; nothing is imported."""
    return {**{one.name: one for one in sorted(entry_points(group=BASELINES))}, **_lent}


def check_own(domains: Mapping[str, Domain], taken: Sequence[str]) -> None:
    """Try every baseline on a few users of every client, so that a run does not fail at its end.

    Raises:
        ValueError: a name that is among ``taken`` or no label; a baseline that cannot be imported, raises, or
            gives no finite (B, I) numbers.
    """
    for label in own_baselines():
        if not isinstance(label, str) or not re.fullmatch(r"\w[\w .,&'-]{0,59}", label) or label in taken:
            why = "which a row of ours has" if label in taken else "which cannot be the label of a row"
            raise ValueError(f"got the baseline {label!r}, {why}, expected up to 60 letters, digits, blanks and _ . -")
        for domain in domains.values():
            users = torch.arange(min(2, len(domain.clients.users)))
            _scores(label, _fitted(label, domain, NUM_TRIED), domain, "valid", users)


def own_positions(
    domain: Domain, splits: Sequence[str], protocol: Protocol, labels: Sequence[str] | None = None
) -> dict[str, dict[str, Tensor]]:
    """Split -> label -> positions (U,), as of `rank_held_out`; None: of every baseline that is installed or lent.

    Raises:
        ValueError: as `check_own`.
    """
    sequences, num_items = domain.clients.sequences, len(domain.item_keys)
    found: dict[str, dict[str, Tensor]] = {split: {} for split in splits}
    for label in own_baselines() if labels is None else labels:
        score = _fitted(label, domain)
        for split in splits:
            asked = partial(_scores, label, score, domain, split)
            found[split][label] = rank_held_out(asked, sequences, num_items, split, protocol)
    return found


def _fitted(label: str, domain: Domain, num_users: int | None = None) -> Score:
    """What the baseline makes of the clients' train parts and the public users, of each the first ``num_users``."""
    sequences = list(train_parts(domain.clients.sequences[:num_users]))
    sequences += [list(one) for one in domain.public.sequences[:num_users]]
    data = TrainData(domain.name, domain.item_keys, domain.titles, domain.item_texts, sequences)
    found = own_baselines()[label]
    with _blamed(label):
        score = (found.load() if isinstance(found, EntryPoint) else found)(data)
    if not callable(score):
        raise ValueError(f"got {score!r} from the {_name(label)}, expected a function from histories to scores")
    return score  # type: ignore[no-any-return]


def _scores(label: str, score: Score, domain: Domain, split: str, user_B: Tensor) -> Tensor:
    histories = list(known_events(domain.clients.arrays().sequences.take(user_B), split))
    with _blamed(label):
        score_BI = torch.as_tensor(score(histories)).detach().double().cpu()
    expected = (len(histories), len(domain.item_keys))
    if tuple(score_BI.shape) != expected or not bool(score_BI.isfinite().all()):
        what = "numbers that are not finite" if tuple(score_BI.shape) == expected else f"{tuple(score_BI.shape)}"
        raise ValueError(f"got {what} from the {_name(label)}, expected {expected} finite scores: users, items")
    return score_BI


@contextmanager
def _blamed(label: str) -> Iterator[None]:
    """Whatever its code raises is told as its fault."""
    try:
        yield
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"got an error from the {_name(label)} ({said}), expected a function of "
            "fedecider.baselines.own.TrainData that gives a function from histories to scores"
        ) from error


def _name(label: str) -> str:
    found = own_baselines()[label]
    return f"baseline {label} of {package_of(found)}" if isinstance(found, EntryPoint) else f"baseline {label}"
