"""What the routes ask: domains, items by title, recommendations; knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from fedecider.llm.answers import Answer
from fedecider.llm.recommender import Recommender
from fedecider.llm.titles import Match
from fedecider.serve.batching import Batcher, BatchLimits
from fedecider.serve.config import Limits
from fedecider.serve.metrics import Metrics


class UnknownDomain(Exception):
    """The run has no such domain; the message names those that it has."""


class BadRequest(Exception):
    """What was asked cannot be answered; the message is one sentence for whoever asked."""


class Kind(NamedTuple):
    """Requests of one kind can be one model call: the number of beams follows from k."""

    domain: str
    k: int
    exclude_seen: bool


class Asked(NamedTuple):
    """A question on its way to the model."""

    answer: Future[Answer]
    notes: list[str]
    """How titles were read that are not written as in the catalogue."""


class Service:
    """Recommenders of all domains behind one queue and one thread that asks the models."""

    def __init__(self, recommenders: Mapping[str, Recommender], limits: Limits, metrics: Metrics) -> None:
        """``ValueError`` where a run searches with more beams than ``max_beams``."""
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

    def of(self, domain: str) -> Recommender:
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

    def submit(self, kind: Kind, history: Sequence[str]) -> Asked:
        """The answer for a history of titles or item keys, oldest first, once the model has given it.

        Raises:
            UnknownDomain: there is no such domain.
            BadRequest: an unknown title, or a history and a ``k`` that need more beams than ``max_beams``.
            Busy, Closed: as `fedecider.serve.batching.Batcher.submit`.
        """
        recommender = self.of(kind.domain)
        beams = max(recommender.num_beams, kind.k + len(history))
        if beams > self.limits.max_beams:
            raise BadRequest(
                f"got k {kind.k} and a history of {len(history)}, expected at most {self.limits.max_beams} together, "
                "the beams of one model call"
            )
        try:
            found = [recommender.items.resolve(entry) for entry in history]
        except ValueError as error:
            raise BadRequest(str(error)) from error
        keys = [recommender.items.keys[one.number] for one in found]
        notes = [one.note for one in found if one.note]
        return Asked(self._batcher.submit(kind, keys, beams), notes)

    def close(self) -> None:
        """Answer what waits and end the thread."""
        self._batcher.close()

    def _call(self, kind: Kind, histories: Sequence[Sequence[str]]) -> list[Answer]:
        try:
            return self.recommenders[kind.domain].recommend(histories, kind.k, kind.exclude_seen)
        except ValueError as error:
            raise BadRequest(str(error)) from error
