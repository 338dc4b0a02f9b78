"""What the service counts, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

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
