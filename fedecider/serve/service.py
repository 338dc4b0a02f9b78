"""What the routes ask: domains, items by title, recommendations; knows nothing of HTTP."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from fedecider.models.answers import Answer, Repeats
from fedecider.models.histories import Entry
from fedecider.models.item_search import Match
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
    repeats: Repeats = "learned"
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
        """``ValueError`` as of `replace`.

        ``pictures``: item key -> address. ``takes_items``: whether requests may add items.
        """
        self.pictures, self.takes_items = pictures, takes_items
        self.limits = limits
        self.recommenders: Mapping[str, Any] = {}
        self.replace(recommenders)
        bounds = BatchLimits(limits.max_batch, limits.max_beams, limits.max_waiting, limits.window_ms / 1000)
        self._batcher: Batcher[Kind, Sequence[Entry], Answer] = Batcher(self._call, bounds, metrics.observe_call)
        metrics.watch_queue(lambda: self._batcher.num_waiting)

    def replace(self, recommenders: Mapping[str, Any]) -> None:
        """Answer from these from now on, requests that wait for the model too.

        Raises:
            ValueError: the run searches with more beams than ``max_beams``; then nothing changes.
        """
        most = max(one.num_beams for one in recommenders.values())
        if most > self.limits.max_beams:
            raise ValueError(f"got max_beams {self.limits.max_beams}, expected at least {most}, the beams of this run")
        prepared = [one.items for one in self.recommenders.values()]
        for one in recommenders.values():
            one.items.prepare(prepared)  # else the first requests would wait, and do it side by side
            prepared.append(one.items)
        self.recommenders = recommenders
        gc.unfreeze()
        gc.collect()  # the recommenders of before
        gc.freeze()  # else every answer could wait half a second while Python looks through all titles

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
            BadRequest: no such item, or no ensemble.
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

    def submit(self, kind: Kind, history: Sequence[Entry]) -> Asked:
        """The answer for a history, oldest first, once the model has given it.

        Raises:
            UnknownDomain: there is no such domain.
            BadRequest: an unknown title, or a history and a ``k`` that need more beams than ``max_beams``.
            Busy, Closed: as `fedecider.serve.batching.Batcher.submit`.
        """
        recommender = self.of(kind.domain)
        length = sum(1 if isinstance(entry, str) else len(entry) for entry in history)
        beams = max(recommender.num_beams, kind.k + length)
        if beams > self.limits.max_beams:
            raise BadRequest(
                f"got k {kind.k} and a history of {length}, expected at most {self.limits.max_beams} together, "
                "the beams of one model call"
            )
        notes: list[str] = []

        def key(entry: str) -> str:
            found = recommender.items.resolve(entry)
            notes.extend([found.note] if found.note else [])
            return str(recommender.items.keys[found.number])

        with _told():
            keys = [key(entry) if isinstance(entry, str) else [key(one) for one in entry] for entry in history]
        return Asked(self._batcher.submit(kind, keys, beams), notes)

    def close(self) -> None:
        """Answer what waits and end the thread."""
        self._batcher.close()

    def _call(self, kind: Kind, histories: Sequence[Sequence[Entry]]) -> list[Answer]:
        with _told():
            recommender = self.of(kind.domain)
            answers: list[Answer] = recommender.recommend(histories, kind.k, kind.repeats, **kind.filters)
            return answers


@contextmanager
def _told() -> Iterator[None]:
    """What a recommender refuses is told to whoever asked."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(str(error)) from error
