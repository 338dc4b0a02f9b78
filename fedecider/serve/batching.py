"""Requests that come at the same time, answered by one model call; one thread asks the model."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

KindT = TypeVar("KindT")
Job = TypeVar("Job")
AnswerT = TypeVar("AnswerT")


class Busy(Exception):
    """As many requests wait as may."""


class Closed(Exception):
    """The batcher takes no requests any more."""


class BatchLimits(NamedTuple):
    """What bounds a batch and the queue."""

    max_jobs: int
    max_cost: int
    """Of a batch: its jobs times the cost of its most expensive one, since a batch is as wide as that."""
    max_waiting: int
    window_s: float
    """How long the first job of a batch waits for others."""


class _Waiting(NamedTuple, Generic[KindT, Job, AnswerT]):
    kind: KindT
    job: Job
    cost: int
    since: float
    future: Future[AnswerT]


class Batcher(Generic[KindT, Job, AnswerT]):
    """Calls ``work(kind, jobs)`` in a thread of its own, with jobs of one kind that came within a short time.

    ``work`` returns one answer for every job. Where it raises, every job of the batch is tried alone, so that no job
    fails for another one. Batches are made in the order of their first jobs. A job whose future was cancelled before
    its batch began is left out.
    """

    def __init__(
        self,
        work: Callable[[KindT, Sequence[Job]], Sequence[AnswerT]],
        limits: BatchLimits,
        observe: Callable[[int, float], None] = lambda size, seconds: None,
    ) -> None:
        """``observe`` is told the number of jobs and the seconds of every call of ``work``."""
        self._work, self._limits, self._observe = work, limits, observe
        self._waiting: deque[_Waiting[KindT, Job, AnswerT]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether jobs are still answered."""
        return self._thread.is_alive() and not self._closed

    def submit(self, kind: KindT, job: Job, cost: int = 1) -> Future[AnswerT]:
        """The answer to come.

        Raises:
            Busy: as many jobs wait as may.
            Closed: after ``close``.
        """
        future: Future[AnswerT] = Future()
        with self._changed:
            if self._closed:
                raise Closed
            if len(self._waiting) >= self._limits.max_waiting:
                raise Busy
            self._waiting.append(_Waiting(kind, job, cost, time.monotonic(), future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Take no more jobs, answer those that wait, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next():
            running = [one for one in batch if one.future.set_running_or_notify_cancel()]
            if running:
                self._answer(running)

    def _answer(self, batch: Sequence[_Waiting[KindT, Job, AnswerT]]) -> None:
        begun = time.perf_counter()
        found: list[tuple[_Waiting[KindT, Job, AnswerT], AnswerT]] | None = None
        try:
            answers = self._work(batch[0].kind, [one.job for one in batch])
            found = list(zip(batch, answers, strict=True))
        except BaseException as error:  # whatever it is, somebody waits for it
            if len(batch) == 1:
                batch[0].future.set_exception(error)
        self._observe(len(batch), time.perf_counter() - begun)
        if found is None:  # the error is gone here, and what its frames held, such as a batch that was too large
            for one in batch if len(batch) > 1 else ():
                self._answer([one])
            return
        for one, answer in found:
            one.future.set_result(answer)

    def _next(self) -> list[_Waiting[KindT, Job, AnswerT]]:
        """The next batch, once it is full or its window is over; empty after the last one."""
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait()
            end = self._waiting[0].since + self._limits.window_s
            while not self._closed and not self._full() and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._take()

    def _full(self) -> bool:
        return len(self._fitting()) >= self._limits.max_jobs

    def _fitting(self) -> list[int]:
        """Places in the queue of the first job and of those that fit beside it."""
        first, widest = self._waiting[0], 0
        places: list[int] = []
        for place, one in enumerate(self._waiting):
            if one.kind == first.kind and len(places) < self._limits.max_jobs:
                cost = max(widest, one.cost)
                if not places or cost * (len(places) + 1) <= self._limits.max_cost:
                    places.append(place)
                    widest = cost
        return places

    def _take(self) -> list[_Waiting[KindT, Job, AnswerT]]:
        places = set(self._fitting())
        batch = [one for place, one in enumerate(self._waiting) if place in places]
        self._waiting = deque(one for place, one in enumerate(self._waiting) if place not in places)
        return batch
