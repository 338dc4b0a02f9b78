"""Whether a user was trained on, guessed from how likely models find the user's own events, against a reference.

A model that was trained on a user finds the user's next events likelier than the reference does, which never saw the
user. Taking the reference's log-probability away removes how hard the user is in general (Watson et al., ICLR 2022); it
stands in for the shadow models of LiRA (Carlini et al., 2022), which would have to be trained by the dozen.

Shape legend: Q questions, U users.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

STATISTICS = ("mean gain over the student", "largest gain over the student", "mean log-probability")


class Questions(NamedTuple):
    """Train events with what came before them."""

    histories: list[list[int]]
    targets: Tensor
    """(Q,) item numbers."""
    user_Q: Tensor
    """(Q,) place of the user among those asked about, from 0, every one at least once."""

    @property
    def num_users(self) -> int:
        return int(self.user_Q.max()) + 1 if len(self.user_Q) else 0


def questions_about(parts: Sequence[Sequence[int]], num_events: int) -> Questions:
    """The ``num_events`` newest events of each train part, none of them the first; users without any are left out.
    Members and others are asked alike."""
    asked = [list(part) for part in parts if len(part) > 1]
    places = [
        (user, place) for user, part in enumerate(asked) for place in range(max(1, len(part) - num_events), len(part))
    ]
    return Questions(
        [asked[user][:place] for user, place in places],
        torch.tensor([asked[user][place] for user, place in places], dtype=torch.int64),
        torch.tensor([user for user, _ in places], dtype=torch.int64),
    )


def user_scores(log_prob_Q: Tensor, reference_Q: Tensor, user_Q: Tensor) -> dict[str, Tensor]:
    """Each of `STATISTICS` -> (U,) float64, higher for likelier members."""
    gain_Q, log_prob_Q = (log_prob_Q - reference_Q).double(), log_prob_Q.double()

    def reduced(value_Q: Tensor, how: str) -> Tensor:
        start_U = torch.zeros(int(user_Q.max()) + 1, dtype=torch.float64)
        return start_U.scatter_reduce(0, user_Q, value_Q, how, include_self=False)

    values = reduced(gain_Q, "mean"), reduced(gain_Q, "amax"), reduced(log_prob_Q, "mean")
    return dict(zip(STATISTICS, values, strict=True))
