"""Settings of the service, and what they may not be together; no library of servers or models."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedecider.bounds import Float, Int, OneOrMore, Positive, ZeroOrMore, dataclass
from fedecider.serve.keys import NAMELESS, Keys, checked_key, read_keys

KEY_VARIABLE = "FEDECIDER_API_KEY"
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServeConfig:
    """The service: which run, where, and for whom.

    Args:
        run: The output directory that scripts/federate.py printed.
        host: The address to listen at; another one than this machine's own needs an API key.
        port: The port to listen at; 0 takes a free one and prints it.
        device: The device, cpu or cuda.
        ensemble: If true, rank with the ensembles of the run where there are some; else with the models alone.
        pictures: A table of item keys and addresses of pictures (https://...), which the page shows.
        api_key_file: A file of API keys, a name and a key a line, or a key alone; a line that goes is a key that no
            longer counts. Else the key is the environment variable FEDECIDER_API_KEY, and without either there is none.
        without_key: If true, listen at any address without a key: whoever reaches the port can ask.
        allowed_hosts: The names by which requests may call the server beside localhost and 127.0.0.1, separated by
            commas. Empty: none where it listens to this machine alone, else any.
        log_requests: If true, print a line for every request: time, name of the key, route, status, milliseconds.
    """

    run: str
    host: str = "127.0.0.1"
    port: Annotated[Int, Field(ge=0, le=65535)] = 8000
    device: str = "cpu"
    ensemble: bool = True
    pictures: str = ""
    api_key_file: str = ""
    without_key: bool = False
    allowed_hosts: str = ""
    log_requests: bool = False


@dataclass(frozen=True)
class Limits:
    """The limits of requests, and of how many are answered at once.

    Args:
        max_history: The most titles of a history.
        max_k: The most recommendations of a request.
        max_title: The most characters of a title or key.
        max_query: The most characters of a search.
        max_matches: The most items that a search returns.
        max_body: The most bytes of a request's body.
        max_beams: The most beams of one model call, over all its requests; a request needs k plus the length of its
            history.
        max_batch: The most requests of one model call.
        max_waiting: The most requests that wait for the model; further ones are sent away with 503.
        max_connections: The most connections that are open at once; further ones are sent away with 503.
        window_ms: The milliseconds that the first request of a batch waits for others.
        max_per_minute: The most requests of one API key in a minute, or of all without keys together; further ones are
            sent away with 429. 0: as many as come.
        timeout_s: The seconds after which a request is given up: to send its head, to send its body, and to wait for
            the model.
    """

    max_history: OneOrMore = 100
    max_k: OneOrMore = 100
    max_title: OneOrMore = 300
    max_query: OneOrMore = 200
    max_matches: OneOrMore = 50
    max_body: Annotated[Int, Field(ge=64)] = 65_536
    max_beams: OneOrMore = 1024
    max_batch: OneOrMore = 32
    max_waiting: OneOrMore = 256
    max_connections: OneOrMore = 1024
    window_ms: Annotated[Float, Field(ge=0, le=1000)] = 5.0
    max_per_minute: ZeroOrMore = 0
    timeout_s: Positive = 30.0


def is_local(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return False


def api_keys(config: ServeConfig, environment: Mapping[str, str]) -> Keys:
    """The keys of which requests must name one; none where there are none.

    Raises:
        ValueError: a key cannot be read or be one, or there is none and ``config`` lets other machines in without being
            told to.
    """
    if config.api_key_file:
        path = Path(config.api_key_file)
        return Keys(read_keys(path), path)
    if (key := environment.get(KEY_VARIABLE)) is not None:
        return Keys({NAMELESS: checked_key(key, KEY_VARIABLE)})
    if not is_local(config.host) and not config.without_key:
        raise ValueError(
            f"got host {config.host} without an API key, expected one in --api_key_file or {KEY_VARIABLE}, or "
            "--without_key true where everybody who reaches the port may ask"
        )
    return Keys({})


def known_hosts(config: ServeConfig) -> list[str]:
    """Host names that requests may call the server by; ``*`` is any.

    A page of another site that leads its own name to this machine (DNS rebinding) is refused by them.
    """
    named = [name.strip().strip("[]").lower() for name in config.allowed_hosts.split(",") if name.strip()]
    if not named and not is_local(config.host):
        return ["*"]
    return list(dict.fromkeys([*LOCAL_NAMES, *([config.host] if is_local(config.host) else []), *named]))
