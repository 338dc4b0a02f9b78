"""Requests in batches: limits, metrics, queues."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from fedecider.models.histories import Answer, Match
from fedecider.serve.config import Limits

# What the service counts, in the text format of Prometheus.

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """One registry for each service. Labels are routes and status codes, never anything that a request holds."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._requests = Counter(
            "fedecider_requests", "Requests that were answered.", ("route", "status"), registry=registry
        )
        self._seconds = Histogram(
            "fedecider_request_seconds",
            "Seconds from a request to its answer.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self._batch = Histogram("fedecider_batch_size", "Requests of one model call.", buckets=SIZES, registry=registry)
        self._call = Histogram(
            "fedecider_model_call_seconds", "Seconds of one model call.", buckets=SECONDS, registry=registry
        )
        self._waiting = Gauge("fedecider_waiting_requests", "Requests that wait for the model.", registry=registry)

    def watch_queue(self, num_waiting: Callable[[], int]) -> None:
        self._waiting.set_function(num_waiting)

    def observe_call(self, size: int, seconds: float) -> None:
        self._batch.observe(size)
        self._call.observe(seconds)

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


# Requests that come at the same time, answered by one model call; one thread asks the model.

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


# What the routes ask: domains, items by title, recommendations; knows nothing of HTTP.


class UnknownDomain(Exception):
    """The run has no such domain; the message names those that it has."""


class BadRequest(Exception):
    """What was asked cannot be answered; the message is one sentence for whoever asked."""


class Kind(NamedTuple):
    """Requests of one kind can be one model call: the number of beams follows from k."""

    domain: str
    k: int
    exclude_seen: bool
    exclude: frozenset[str] | None = None
    candidates: frozenset[str] | None = None
    stock: frozenset[tuple[str, float]] | None = None
    """As `fedecider.models.recommender.Recommender.recommend` takes them, of values that can be compared."""

    @property
    def filters(self) -> dict[str, Any]:
        """Those that were asked for."""
        named = {name: getattr(self, name) for name in ("exclude", "candidates")}
        found = {name: sorted(keys) for name, keys in named.items() if keys is not None}
        return found if self.stock is None else {**found, "stock": dict(self.stock)}


class Asked(NamedTuple):
    """A question on its way to the model."""

    answer: Future[Answer]
    notes: list[str]
    """How titles were read that are not written as in the catalogue."""


class Service:
    """Recommenders of all domains behind one queue and one thread that asks the models."""

    def __init__(
        self,
        recommenders: Mapping[str, Any],
        limits: Limits,
        metrics: Metrics,
        pictures: Mapping[str, str] = {},
        takes_items: bool = True,
    ) -> None:
        """``ValueError`` where a run searches with more beams than ``max_beams``.

        ``pictures``: item key -> address. ``takes_items``: whether requests may add items.
        """
        self.pictures, self.takes_items = pictures, takes_items
        most = max(one.num_beams for one in recommenders.values())
        if most > limits.max_beams:
            raise ValueError(f"got max_beams {limits.max_beams}, expected at least {most}, the beams of this run")
        self.recommenders, self.limits = recommenders, limits
        for one in recommenders.values():
            one.items.prepare()  # else the first requests would wait, and work it out side by side
        bounds = BatchLimits(limits.max_batch, limits.max_beams, limits.max_waiting, limits.window_ms / 1000)
        self._batcher: Batcher[Kind, Sequence[str], Answer] = Batcher(self._call, bounds, metrics.observe_call)
        metrics.watch_queue(lambda: self._batcher.num_waiting)

    @property
    def alive(self) -> bool:
        return self._batcher.alive

    def of(self, domain: str) -> Any:
        """The recommender of ``domain``. Raises ``UnknownDomain``."""
        if domain not in self.recommenders:
            names = ", ".join(self.recommenders)
            raise UnknownDomain(f"got the domain {domain!r:.60}, expected one of {names}")
        return self.recommenders[domain]

    def search(self, domain: str, query: str, limit: int) -> Sequence[Match]:
        """Items of ``domain`` whose titles match, best first; without a query the first ``limit``.

        Raises:
            UnknownDomain: there is no such domain.
        """
        items = self.of(domain).items
        if not query.strip():
            return [Match(key, title, 1.0) for key, title in zip(items.keys[:limit], items.titles[:limit], strict=True)]
        return items.search(query, limit)

    def similar(self, domain: str, item: str, k: int) -> Answer:
        """Items whose texts are nearest.

        Raises:
            UnknownDomain: there is no such domain.
            BadRequest: no such item, or no hybrid.
        """
        with _told():
            answer: Answer = self.of(domain).similar(item, k)
            return answer

    def add_items(self, domain: str, new_items: Sequence[Mapping[str, str]]) -> int:
        """Let items be recommended from now on until the service ends; how many the domain has then.

        Raises:
            UnknownDomain: there is no such domain.
            BadRequest: one of them cannot be added; then none is.
        """
        recommender = self.of(domain)
        with _told():
            recommender.add_items(new_items)
        recommender.items.prepare()
        return len(recommender.items)

    def submit(self, kind: Kind, history: Sequence[str]) -> Asked:
        """The answer for a history of titles or item keys, oldest first, once the model has given it.

        Raises:
            UnknownDomain: there is no such domain.
            BadRequest: an unknown title, or a history and a ``k`` that need more beams than ``max_beams``.
            Busy, Closed: as `fedecider.serve.service.Batcher.submit`.
        """
        recommender = self.of(kind.domain)
        beams = max(recommender.num_beams, kind.k + len(history))
        if beams > self.limits.max_beams:
            raise BadRequest(
                f"got k {kind.k} and a history of {len(history)}, expected at most {self.limits.max_beams} together, "
                "the beams of one model call"
            )
        with _told():
            found = [recommender.items.resolve(entry) for entry in history]
        keys = [recommender.items.keys[one.number] for one in found]
        notes = [one.note for one in found if one.note]
        return Asked(self._batcher.submit(kind, keys, beams), notes)

    def close(self) -> None:
        """Answer what waits and end the thread."""
        self._batcher.close()

    def _call(self, kind: Kind, histories: Sequence[Sequence[str]]) -> list[Answer]:
        with _told():
            recommender = self.recommenders[kind.domain]
            answers: list[Answer] = recommender.recommend(histories, kind.k, kind.exclude_seen, **kind.filters)
            return answers


@contextmanager
def _told() -> Iterator[None]:
    """What a recommender refuses is told to whoever asked."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(str(error)) from error
