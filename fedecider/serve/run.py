"""From settings to a server that answers until it is told to stop."""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from fedecider.models.lists import pictures_in
from fedecider.running.progress import log_line
from fedecider.serve.app import create_app
from fedecider.serve.config import Limits, ServeConfig, api_key, is_local, known_hosts
from fedecider.serve.connections import protocol_class
from fedecider.serve.metrics import Metrics
from fedecider.serve.recommenders import load_recommenders
from fedecider.serve.service import Service


def serve(config: ServeConfig, limits: Limits) -> None:
    """Load every domain, listen, and return after SIGINT or SIGTERM, when what was asked before is answered.

    Everything that can be wrong is told before the first request: the key, the address, and the files of the run.

    Raises:
        ValueError, FileNotFoundError: as `fedecider.serve.config.api_key` and
            `fedecider.serve.recommenders.load_recommenders`.
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
