"""What a client sends in place of counts where its customers are hidden: how often each item was bought, with noise.

x_u (I,) is how often customer u bought each item in the train part. A client sends

    y = sum_u min(1, B / ||x_u||) x_u + n,    n ~ N(0, (z B)^2) for every item, bought or not,

with B `EVENTS_NORM` and z ``user_privacy.noise_scale``. One customer there or not moves the sum by a vector of norm B
at most, however many events they have: a Gaussian mechanism of noise multiplier z, whose Renyi divergences a / (2 z^2)
(Mironov 2017, Prop. 7) `fedecider.methods.private_training.user_epsilon` adds to those of training. Each client adds
the whole noise by itself, before the secure sum: what it promises its customers hangs on no other client, and costs a
standard deviation that grows with the root of their number. Rounding, the sum and what becomes of it are
post-processing. Pairs of items are not sent: nearly all are of one or two customers, and noise that hides one drowns
them. (Of four companies of 500, pairs of near texts alone, whose list is public, brought nothing beside the events.)

Shape legend: I items, U customers, E events of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedecider.evaluation.sequences import SequenceArray
from fedecider.federation.privacy import normal_draws
from fedecider.models.counts import UNIT, Counts, no_counts

EVENTS_NORM = 2.0
"""B: of a customer with four items, each once."""
NUM_DEVIATIONS = 2.0
"""Of the noise, above which a sum counts as it is: below, it says little of its item."""


def bounded_events(parts: Sequence[Sequence[int]], num_items: int) -> np.ndarray:
    """float64 (I,): the sum over customers, whose events are ``parts``, without noise."""
    rows = SequenceArray.of(parts)
    pair_P, number_P = np.unique(rows.row_E * num_items + rows.value_E, return_counts=True)
    row_P, item_P = np.divmod(pair_P, num_items)
    norm_U = np.sqrt(np.bincount(row_P, weights=number_P.astype(np.float64) ** 2, minlength=len(rows)))
    scale_U = np.minimum(1.0, EVENTS_NORM / np.maximum(norm_U, 1.0))
    return np.bincount(item_P, weights=number_P * scale_U[row_P], minlength=num_items)


def noised_events(
    parts: Sequence[Sequence[int]], num_items: int, noise_scale: float, generator: torch.Generator | None
) -> Counts:
    """What a client sends, events in units of ``UNIT``; without a ``generator`` noise is the operating system's."""
    noise_I = normal_draws((num_items,), generator, torch.float64).numpy()
    value_I = bounded_events(parts, num_items) + noise_scale * EVENTS_NORM * noise_I
    return no_counts(num_items)._replace(event_I=np.rint(value_I / UNIT).astype(np.int64))


def others_events(sum_I: np.ndarray, num_others: int, noise_scale: float, own: Sequence[Sequence[int]]) -> Counts:
    """Counts, without pairs, from a sum over so many others.

    Items within `NUM_DEVIATIONS` of 0 share what they have together, or 0. ``own``: the train parts of the client that
    reads the sum; all is scaled by how much the bound took of them, so that others' events count as its own do.
    """
    value_I, num_items = sum_I * UNIT, len(sum_I)
    is_faint_I = value_I <= NUM_DEVIATIONS * noise_scale * EVENTS_NORM * num_others**0.5
    value_I[is_faint_I] = max(0.0, value_I[is_faint_I].sum() / max(1, is_faint_I.sum()))
    rows = SequenceArray.of(own)
    if num_events := len(rows.value_E):
        value_I *= num_events / bounded_events(rows, 1 + int(rows.value_E.max())).sum()
    return no_counts(num_items)._replace(event_I=np.rint(value_I).astype(np.int64))
