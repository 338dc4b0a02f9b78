"""The queue before the model: fewer calls than jobs, the same answers, and what happens to jobs that fail or wait."""

import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from fedecider.serve.batching import Batcher, BatchLimits, Busy, Closed
from fedecider.serve.config import Limits
from fedecider.serve.metrics import Metrics
from fedecider.serve.service import Kind, Service

LIMITS = BatchLimits(max_jobs=8, max_cost=100, max_waiting=50, window_s=0.2)


class Work:
    """Doubles numbers, notes every call, and waits at a gate."""

    def __init__(self):
        self.calls, self.gate, self.begun = [], threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self, kind, jobs):
        self.calls.append((kind, list(jobs)))
        self.begun.set()
        assert self.gate.wait(20)
        if any(job < 0 for job in jobs):
            raise ValueError("got a negative number")
        return [2 * job for job in jobs]


@pytest.fixture
def work():
    return Work()


@pytest.fixture
def made():
    """Makes batchers, and closes them at the end."""
    batchers = []

    def make(*arguments):
        batchers.append(Batcher(*arguments))
        return batchers[-1]

    yield make
    for one in batchers:
        one.close()


def test_jobs_that_come_together_are_one_call(work, made):
    seen = []
    batcher = made(work, LIMITS, lambda size, seconds: seen.append((size, seconds >= 0)))
    futures = [batcher.submit("a", job) for job in range(8)]
    assert [future.result(10) for future in futures] == [2 * job for job in range(8)]
    assert work.calls == [("a", list(range(8)))]
    assert seen == [(8, True)]


def test_a_full_batch_does_not_wait_for_its_window(work, made):
    batcher = made(work, LIMITS._replace(max_jobs=2, window_s=60.0))
    begun = time.monotonic()
    futures = [batcher.submit("a", job) for job in (1, 2)]
    assert [future.result(10) for future in futures] == [2, 4]
    assert time.monotonic() - begun < 30


def test_a_lonely_job_is_answered_when_its_window_is_over(work, made):
    batcher = made(work, LIMITS)
    begun = time.monotonic()
    assert batcher.submit("a", 3).result(10) == 6
    assert time.monotonic() - begun >= 0.2


def test_kinds_are_not_mixed_and_keep_their_order(work, made):
    batcher = made(work, LIMITS)
    futures = [batcher.submit("ab"[job % 2], job) for job in range(6)]
    assert [future.result(10) for future in futures] == [2 * job for job in range(6)]
    assert work.calls == [("a", [0, 2, 4]), ("b", [1, 3, 5])]


def test_a_batch_costs_at_most_what_it_may(work, made):
    batcher = made(work, LIMITS._replace(max_cost=10))
    work.gate.clear()
    first = batcher.submit("a", 0, cost=10)
    assert work.begun.wait(10)
    futures = [batcher.submit("a", job, cost) for job, cost in ((1, 3), (2, 6), (3, 3), (4, 3), (5, 20))]
    work.gate.set()
    assert [future.result(10) for future in (first, *futures)] == [0, 2, 4, 6, 8, 10]
    # (1, 3) and (2, 6) would be 2 x 6; three of cost 3 are 9; one that costs too much by itself goes alone
    assert [jobs for _, jobs in work.calls] == [[0], [1, 3, 4], [2], [5]]


def test_no_job_fails_for_another_one(work, made):
    batcher = made(work, LIMITS)
    good, bad, also_good = (batcher.submit("a", job) for job in (1, -1, 2))
    assert (good.result(10), also_good.result(10)) == (2, 4)
    with pytest.raises(ValueError, match="negative"):
        bad.result(10)
    assert batcher.alive


def test_what_a_failed_batch_held_is_freed_before_its_jobs_are_tried_alone(made):
    class Tensor:
        pass

    held, alive = [], []

    def work(kind, jobs):
        alive.extend(one() is not None for one in held)
        if len(jobs) > 1:
            large = Tensor()
            held.append(weakref.ref(large))
            raise MemoryError("too large")
        return jobs

    batcher = made(work, LIMITS)
    assert [future.result(10) for future in [batcher.submit("a", job) for job in (1, 2, 3)]] == [1, 2, 3]
    assert alive == [False] * 3


def test_too_many_jobs_are_sent_away(work, made):
    batcher = made(work, LIMITS._replace(max_waiting=2, window_s=0.0))
    work.gate.clear()
    running = batcher.submit("a", 1)
    assert work.begun.wait(10)
    waiting = [batcher.submit("a", job) for job in (2, 3)]
    assert batcher.num_waiting == 2
    with pytest.raises(Busy):
        batcher.submit("a", 4)
    work.gate.set()
    assert [future.result(10) for future in (running, *waiting)] == [2, 4, 6]
    assert batcher.submit("a", 5).result(10) == 10


def test_closing_answers_what_waits_and_takes_no_more(work):
    batcher = Batcher(work, LIMITS._replace(window_s=60.0))
    futures = [batcher.submit("a", job) for job in (1, 2)]
    begun = time.monotonic()
    batcher.close()
    assert time.monotonic() - begun < 30
    assert [future.result(0) for future in futures] == [2, 4]
    assert not batcher.alive
    with pytest.raises(Closed):
        batcher.submit("a", 3)


def test_filters_are_asked_of_the_recommender_and_never_mixed():
    asked = []

    class Shop:
        num_beams = 1

        class items:
            keys = ("a", "b")

            @staticmethod
            def prepare(others=()):
                pass

            @staticmethod
            def resolve(entry):
                return SimpleNamespace(number=("a", "b").index(entry), note="")

        def recommend(self, histories, k, repeats, **filters):
            asked.append((len(histories), filters))
            return ["answer"] * len(histories)

    service = Service({"shop": Shop()}, Limits(window_ms=50), Metrics())
    plain, filtered = Kind("shop", 3, True), Kind("shop", 3, True, frozenset("a"), None, frozenset({("b", 2.0)}))
    found = [service.submit(kind, ["a"]) for kind in (plain, filtered, plain)]
    assert [one.answer.result(10) for one in found] == ["answer"] * 3
    service.close()
    assert asked == [(2, {}), (1, {"exclude": ["a"], "stock": {"b": 2.0}})]
