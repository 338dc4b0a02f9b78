"""From settings to a server that answers until it is told to stop."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from fedecider.models.lists import pictures_in
from fedecider.running.progress import log_line
from fedecider.serve.app import create_app
from fedecider.serve.config import Limits, ServeConfig, api_keys, is_local, known_hosts
from fedecider.serve.connections import protocol_class
from fedecider.serve.keys import Keys
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
    keys = api_keys(config, os.environ)
    pictures, takes_items = pictures_in(config.pictures), keys.needed or is_local(config.host)
    with bound_socket(config.host, config.port) as listener:
        metrics = Metrics()
        service = Service(load_recommenders(config), limits, metrics, pictures, takes_items)
        app = create_app(service, metrics, keys, known_hosts(config), config.log_requests)
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
        log_line(f"{config.run}: {', '.join(service.recommenders)}; {address(listener)}, {whom(config, keys)}")
        with quiet_signals(), reloading(service, config):
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


@contextmanager
def reloading(service: Service, config: ServeConfig) -> Iterator[None]:
    """At SIGHUP the run is read again, and answers from then on; where it cannot be read, the old one goes on."""
    lock = threading.Lock()

    def reload() -> None:
        try:
            with lock:
                service.replace(load_recommenders(config))
        except (ValueError, OSError) as error:
            log_line(f"not read again, what was loaded before goes on: {error}")
        else:
            log_line(f"{config.run}: read again")

    before = signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=reload).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def whom(config: ServeConfig, keys: Keys) -> str:
    """Who may ask, in words."""
    place = "this machine alone" if is_local(config.host) else "whoever reaches it"
    return f"for {place}, {'with the API key' if keys.needed else 'without a key'}"
