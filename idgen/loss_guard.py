"""Ends a training whose loss is no number or stays above its start."""

from __future__ import annotations

import math
from collections import deque

import torch
from torch import Tensor

from fedecider.bounds import Diverged

WINDOW, FAR_ABOVE, LONG_ABOVE = 20, 1.2, 10
"""Steps of a window, factor, windows. A training has diverged when the mean loss of a window is above the factor times
that of the first window, in so many windows in a row or at the end."""
EXPLODED = 30.0
"""A training that explodes within the first window spoils its own measure. If that window's mean is above so many times
the loss of the first step, the step is the measure. And at so many times the measure no full window is waited for."""
SMALL = 1.0
"""Least value of the measure: the loss of a student's pairs may start near 0 and rise a little before it falls."""


class LossGuard:
    """Ends a training whose loss is no number or stays above its start."""

    def __init__(self, first: float | None = None, advice: str = "Lower the learning rate") -> None:
        """``first``: the mean loss of the first window, or what is known of it before. ``advice``: of the error."""
        self.first, self.advice = first, advice
        self._is_own = False
        self._start: Tensor | None = None
        self._recent: deque[Tensor] = deque(maxlen=WINDOW)
        self._num_seen = self._num_above = 0

    def step(self, loss: Tensor, step: int, is_last: bool, learning_rate: float) -> None:
        """The loss of one step; it is read at the end of a window alone, which makes an accelerator wait.

        Raises:
            Diverged: the loss is no number, or far above its start for long or in the end.
        """
        self._start = loss if self._start is None else self._start
        self._recent.append(loss)
        self._num_seen += 1
        if self._num_seen % WINDOW and not is_last:
            return
        mean = float(torch.stack(list(self._recent)).float().mean())
        told = f"diverged at step {step}, learning_rate {learning_rate:g}: the loss is {mean:.4g}"
        if not math.isfinite(mean):
            raise Diverged(f"{told}, expected a number. {self.advice}")
        if self.first is None:
            start = float(self._start)
            self.first = start if mean > EXPLODED * start else mean
            self._is_own = True
        # a few steps say little, but where there are no others and their start is known
        is_whole = len(self._recent) == (WINDOW if self._is_own else min(WINDOW, step))
        far = mean > (FAR_ABOVE if is_whole else EXPLODED) * max(self.first, SMALL)
        if is_whole or far:
            self._num_above = self._num_above + 1 if far else 0
        if self._num_above and (is_last or self._num_above >= LONG_ABOVE):
            raise Diverged(f"{told}, it was {self.first:.4g} at first; expected less. {self.advice}")
