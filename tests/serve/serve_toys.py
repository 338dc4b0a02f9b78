"""A recommender that computes nothing, and counts how often it is asked."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import NamedTuple

import uvicorn
from fastapi.testclient import TestClient

from fedecider.models.item_search import Items
from fedecider.serve.app import create_app
from fedecider.serve.config import Limits
from fedecider.serve.keys import Keys
from fedecider.serve.metrics import Metrics
from fedecider.serve.run import address, bound_socket
from fedecider.serve.service import Service

MARKUP = '<img src=x onerror="window.hacked = 1"> & "quoted"'
LONG = "A Very Long Title " + "Without End " * 12
TITLES = [
    "The Silent Harbour",
    "The Last Ledger",
    "The Silent Witness",
    MARKUP,
    LONG,
    "Ünïcode Straße",
    "Harbour Lights",
]


class ToyItem(NamedTuple):
    key: str
    title: str
    score: float
    features: dict[str, float]


class ToyAnswer(NamedTuple):
    items: list[ToyItem]
    alpha: dict[str, float]
    history: list[ToyItem]
    notes: list[str]


class ToyRecommender:
    """Recommends the items behind the newest one of the history, in their order."""

    def __init__(self, domain: str, titles: list[str] = TITLES, has_ensemble: bool = True):
        keys = [f"{domain}-{place:04d}" for place in range(len(titles))]
        self.domain, self.items, self.has_ensemble = domain, Items(keys, titles), has_ensemble
        self.num_beams = 4
        self.calls: list[int] = []
        """Histories of every call."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = threading.Event()
        self.error: Exception | None = None
        self.features = {"counts": 0.625, "model": -1.25, "text": 0.004}

    def add_items(self, new_items):
        taken = [one["key"] for one in new_items if one["key"] in self.items.keys]
        if taken:
            raise ValueError(f"got the key {taken[0]}, which is there already")
        keys, titles = ([one[name] for one in new_items] for name in ("key", "title"))
        self.items = Items([*self.items.keys, *keys], [*self.items.titles, *titles])

    def similar(self, item, k=10):
        if not self.has_ensemble:
            raise ValueError("got similar items of a recommender without an ensemble")
        found = self.items.resolve(item)
        (answer,) = self.recommend([[self.items.keys[found.number]]], k, "drop")
        return answer._replace(alpha={}, notes=[])

    def recommend(self, histories, k=10, repeats="learned"):
        self.calls.append(len(histories))
        self.asked.set()
        assert self.may_answer.wait(20)
        if self.error is not None:
            raise self.error
        return [self._answer(history, k, repeats) for history in histories]

    def _answer(self, history, k, repeats):
        keys = self.items.keys
        history = [key for entry in history for key in ([entry] if isinstance(entry, str) else entry)]
        start = keys.index(history[-1]) if history else 0
        order = [(start + step) % len(keys) for step in range(len(keys))]
        features = self.features if self.has_ensemble else {}
        found = [
            ToyItem(keys[place], self.items.titles[place], -float(step), features)
            for step, place in enumerate(order)
            if repeats == "learned" or (keys[place] in history) == (repeats == "only")
        ]
        known = [ToyItem(key, self.items.titles[keys.index(key)], 0.0, {}) for key in history]
        return ToyAnswer(found[:k], {"crime": 0.75, "comics": 0.25}, known, ["a note"])


class World(NamedTuple):
    client: TestClient
    service: Service
    crime: ToyRecommender
    comics: ToyRecommender
    metrics: Metrics


def world(limits: Limits = Limits(), key: str = "", hosts=("127.0.0.1",), **more) -> World:  # noqa: B008
    """A service of two domains in this process; use its client in a ``with`` block, which ends the service."""
    crime, comics = ToyRecommender("crime"), ToyRecommender("comics", TITLES[:3], has_ensemble=False)
    metrics = Metrics()
    service = Service({"crime": crime, "comics": comics}, limits, metrics, **more)
    app = create_app(service, metrics, Keys({"default": key} if key else {}), hosts)
    return World(TestClient(app, base_url="http://127.0.0.1"), service, crime, comics, metrics)


def question(*history: str, domain: str = "crime", **more) -> dict:
    return {"domain": domain, "history": list(history), **more}


@contextmanager
def listening(made: World):
    """The address of a real server in a thread of this process."""
    config = uvicorn.Config(made.client.app, log_config=None, log_level="warning", lifespan="on")
    with bound_socket("127.0.0.1", 0) as listener:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            for _ in range(400):
                if server.started:
                    break
                threading.Event().wait(0.05)
            yield address(listener)
        finally:
            server.should_exit = True
            thread.join(30)
