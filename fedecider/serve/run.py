"""The recommenders of a run, with one backbone in memory."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedecider.models.lists import pictures_in
from fedecider.models.recommender import Recommender
from fedecider.models.source import find_source
from fedecider.running.progress import log_line
from fedecider.serve.app import create_app
from fedecider.serve.config import Limits, ServeConfig, api_key, is_local, known_hosts
from fedecider.serve.service import Metrics, Service

# The recommenders of a run, with one backbone in memory.


def load_recommenders(config: ServeConfig) -> dict[str, Recommender]:
    """Domain -> its recommender, for all domains of the run.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: it is one of the cross-device track, a file is damaged or was changed, or there is no such device.
    """
    source = find_source(config.run)
    found: dict[str, Recommender] = {}
    for domain in source.domains:
        found[domain] = Recommender.from_pretrained(config.run, domain, device=config.device, hybrid=config.hybrid)
        share_tensors(found[source.domains[0]].model, found[domain].model)
    return found


def share_tensors(model: Any, other: Any) -> None:
    """Let the parameters of ``other`` that are those of ``model`` lie in the same memory: the frozen backbone.

    Adapters differ, and stay where they are. The values of both stay as they are.
    """
    kept = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        own = kept.get(name)
        if own is not None and own.is_floating_point() and _alike(own, parameter):
            parameter.data = own.data


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


# Connections that never send a whole request head: closed after a time, so that they lock nobody out.


def protocol_class(timeout_s: float) -> type[H11Protocol]:
    """uvicorn's HTTP/1.1 protocol, whose connections are closed ``timeout_s`` seconds after they were opened or last
    answered, unless the head of a request is whole by then. uvicorn itself closes only those that are idle after an
    answer and have sent nothing since.
    """

    class Timed(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def handle_events(self) -> None:
            super().handle_events()
            if self._asks():
                self._stop()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._stop()
            if not self._asks():
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _asks(self) -> bool:
            """Whether a request is here that is not answered yet."""
            return self.cycle is not None and not self.cycle.response_complete

        def _wait(self) -> None:
            if not self.transport.is_closing():
                self._deadline = self.loop.call_later(timeout_s, self.transport.abort)

        def _stop(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Timed


# From settings to a server that answers until it is told to stop.


def serve(config: ServeConfig, limits: Limits) -> None:
    """Load every domain, listen, and return after SIGINT or SIGTERM, when what was asked before is answered.

    Everything that can be wrong is told before the first request: the key, the address, and the files of the run.

    Raises:
        ValueError, FileNotFoundError: as `fedecider.serve.config.api_key` and
            `fedecider.serve.run.load_recommenders`.
        OSError: nothing can listen at that address, such as a port that is taken.
    """
    key = api_key(config, os.environ)
    pictures, takes_items = pictures_in(config.pictures), bool(key) or is_local(config.host)
    with bound_socket(config.host, config.port) as listener:
        metrics = Metrics()
        service = Service(load_recommenders(config), limits, metrics, pictures, takes_items)
        app = create_app(service, metrics, key, known_hosts(config))
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,  # paths hold searches
                server_header=False,
                proxy_headers=False,
                http=protocol_class(limits.timeout_s),
                ws="none",
                lifespan="on",
                limit_concurrency=limits.max_connections,
                timeout_graceful_shutdown=math.ceil(limits.timeout_s),
            )
        )
        listener.listen()
        log_line(f"{config.run}: {', '.join(service.recommenders)}; {address(listener)}, {whom(config, key)}")
        with quiet_signals():
            server.run(sockets=[listener])
        log_line("stopped")


@contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A socket at that address, which does not listen yet: nobody is let in while models are loaded."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)  # asyncio sends without delay only where TCP is named
    except OSError as error:
        raise OSError(f"got host {host!r:.60}, expected an address of this machine: {error}") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError as error:
            detail = f"got {host} port {port}, expected an address of this machine and a free port; --port 0 takes one"
            raise OSError(f"{detail} ({error.strerror})") from error
        yield listener


@contextmanager
def quiet_signals() -> Iterator[None]:
    """uvicorn stops at SIGINT and SIGTERM and raises the signal again when it is done: here it then does nothing."""
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda *_: None) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def whom(config: ServeConfig, key: str) -> str:
    """Who may ask, in words."""
    place = "this machine alone" if is_local(config.host) else "whoever reaches it"
    return f"for {place}, {'with the API key' if key else 'without a key'}"
