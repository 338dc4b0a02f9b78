"""What every request passes: host name, key, size and time of its body; headers, counts and errors of every answer."""

import asyncio
import json
import logging
import math
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedecider.running.progress import log_line
from fedecider.serve.keys import EVERYBODY, Keys, Rate
from fedecider.serve.service import Metrics

log = logging.getLogger("fedecider.serve")

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
DRAINED = 64
"""Of a body that is too large so many times the limit is read and dropped: a client that still sends may not hear."""


class Rules(NamedTuple):
    """Whom the guard lets in."""

    keys: Keys
    open_routes: Collection[str]
    """Routes that need no key, and are not counted against its rate."""
    routes: Collection[str]
    """All routes; what asks for others is counted as "other"."""
    hosts: Sequence[str]
    """Names by which requests may call the server; ``*`` is any."""
    max_body: int
    timeout_s: float
    max_per_minute: int = 0
    log_requests: bool = False
    pictures: str = ""
    """Where the page's pictures come from: origins with blanks between them."""


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers or {}


class Guard:
    """The outermost ASGI layer.

    An error that nothing else handles becomes 500 with one sentence, and a log line with its type and place: not its
    message, which could hold what the request held.
    """

    def __init__(self, app: ASGIApp, rules: Rules, metrics: Metrics) -> None:
        self._app, self._rules, self._metrics, self._rate = app, rules, metrics, Rate(rules.max_per_minute)
        allowed = " ".join(["img-src 'self'", *([rules.pictures] if rules.pictures else [])])
        self._headers = {**HEADERS, "content-security-policy": POLICY.replace("img-src 'self'", allowed)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status, name = time.perf_counter(), 0, "-"
        route = scope["path"] if scope["path"] in self._rules.routes else "other"

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message["headers"]}
                added = [(name.encode(), value.encode()) for name, value in self._headers.items()]
                message["headers"] = [*message["headers"], *(one for one in added if one[0] not in own)]
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._check(scope["method"], headers)
            if route not in self._rules.open_routes:
                name = self._name_of(headers)
                self._take(name)
            await self._app(scope, await self._bounded(receive), sent)
        except Refused as error:
            await _answer(sent, error)
        except Exception as error:
            log.error("%s: %s", route, place_of(error))
            if not status:
                await _answer(sent, Refused(500, "the service failed on this request; its log says where"))
        finally:
            seconds = time.perf_counter() - begun
            self._metrics.observe_request(route, status, seconds)
            if self._rules.log_requests:
                log_line(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {name} {route} {status} {1000 * seconds:.0f} ms")

    def _check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        host = host_name(headers.get(b"host", b"").decode("latin-1"))
        if "*" not in self._rules.hosts and host not in self._rules.hosts:
            names = ", ".join(self._rules.hosts)
            raise Refused(400, f"got the host name {host!r:.60}, expected one of {names}; --allowed_hosts adds others")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if method == "POST" and kind != b"application/json":  # what a page of another site cannot send
            detail = "got a body that is not sent as JSON, expected the header Content-Type: application/json"
            raise Refused(422, detail)

    def _name_of(self, headers: Mapping[bytes, bytes]) -> str:
        name = self._rules.keys.name_of(headers) if self._rules.keys.needed else EVERYBODY
        if name is None:
            detail = "got no API key or a wrong one, expected it in the header X-API-Key or as a Bearer token"
            raise Refused(401, detail, {"www-authenticate": "Bearer"})
        return name

    def _take(self, name: str) -> None:
        if wait_s := self._rate.wait_s(name):
            detail = f"got more than {self._rules.max_per_minute} requests in a minute, expected fewer"
            raise Refused(429, detail, {"retry-after": str(math.ceil(wait_s))})

    async def _bounded(self, receive: Receive) -> Receive:
        """``receive`` with the whole body, once it is here and not too large."""
        try:
            body = await asyncio.wait_for(self._body(receive), self._rules.timeout_s)
        except asyncio.TimeoutError:
            detail = f"got no whole body within {self._rules.timeout_s:g} seconds, expected one"
            raise Refused(408, detail, {"connection": "close"}) from None
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return waiting.pop() if waiting else await receive()

        return again

    async def _body(self, receive: Receive) -> bytes:
        body, size, more = b"", 0, True
        most = self._rules.max_body
        while more and size <= DRAINED * most:
            message = await receive()
            part = message.get("body", b"")
            size += len(part)
            body = body + part if size <= most else b""
            more = message.get("more_body", False)  # a client that is gone sends no more either
        if size > most:
            detail = f"got a body of more than {most} bytes, expected at most as many"
            raise Refused(413, detail, {"connection": "close"})
        return body


def host_name(host: str) -> str:
    """The name in a Host header: without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def place_of(error: BaseException) -> str:
    """Type of an error, and the lines that led to it, innermost first; no value of any variable."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " < ".join([type(error).__name__, *(f"{Path(one.filename).name}:{one.lineno}" for one in reversed(frames))])


async def _answer(send: Send, refused: Refused) -> None:
    content = json.dumps({"detail": refused.detail}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **refused.headers}
    start = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": start})
    await send({"type": "http.response.body", "body": content})
