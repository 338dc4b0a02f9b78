"""What goes in and out, as OpenAPI shows it."""

import asyncio
import json
import logging
import re
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedecider.bounds import is_out_of_memory
from fedecider.report.page import TERM_SCRIPT, WORD_STYLE, Words, term_list
from fedecider.serve.config import Limits
from fedecider.serve.service import BadRequest, Busy, Closed, Kind, Metrics, Service, UnknownDomain

# What goes in and out, as OpenAPI shows it.

TITLE = "Burning Moon Investigations, Book 1: The Frozen Alibi"
DEFAULT_K = 10


class Failure(BaseModel):
    """Why a request was not answered."""

    detail: Annotated[str, Field(description="One sentence: what was got, what was expected.")]


class Health(BaseModel):
    status: Annotated[str, Field(examples=["ok"])]
    needs_key: Annotated[bool, Field(description="Whether all else but the page asks for the API key.")]


class DomainInfo(BaseModel):
    name: Annotated[str, Field(examples=["crime"])]
    num_items: Annotated[int, Field(examples=[90])]
    hybrid: Annotated[bool, Field(description="Whether the private part of a hybrid ranks beside the model.")]


class Domains(BaseModel):
    domains: list[DomainInfo]
    max_history: Annotated[int, Field(description="The most titles of a history.", examples=[100])]
    max_k: Annotated[int, Field(description="The most recommendations of a request.", examples=[100])]


class Item(BaseModel):
    key: Annotated[str, Field(examples=["crime-0016"])]
    title: Annotated[str, Field(examples=[TITLE])]

    picture: Annotated[str | None, Field(description="Address of its picture, where the service has one.")] = None


class Items(BaseModel):
    items: Annotated[list[Item], Field(description="Best match first.")]


class SimilarItem(Item):
    score: Annotated[float, Field(description="Cosine of the vectors of both texts.", examples=[0.83])]


class SimilarItems(BaseModel):
    item: Annotated[Item, Field(description="The one that was asked about.")]
    items: Annotated[list[SimilarItem], Field(description="Nearest first.")]
    notes: list[str]


class AddedItems(BaseModel):
    num_added: Annotated[int, Field(examples=[1])]
    num_items: Annotated[int, Field(description="Of the domain, from now on until the service ends.", examples=[91])]


class RecommendedItem(Item):
    score: Annotated[
        float,
        Field(
            description="Log-probability: of the item's ID; with a hybrid, of the item.",
            examples=[-1.692],
        ),
    ]
    expert_shares: Annotated[
        dict[str, float],
        Field(
            description="Of the item's probability, the share from each expert; empty without a hybrid.",
            examples=[{"counts": 0.41, "text": 0.32, "model": 0.27}],
        ),
    ]


class Recommendations(BaseModel):
    domain: Annotated[str, Field(examples=["crime"])]
    history: Annotated[list[Item], Field(description="The items that the request named, oldest first.")]
    items: Annotated[list[RecommendedItem], Field(description="Best first.")]
    alpha_shares: Annotated[
        dict[str, float],
        Field(
            description="Each client's share of the absolute fusion weights; empty for methods without.",
            examples=[{"crime": 0.5, "comics": 0.3, "children": 0.2}],
        ),
    ]
    notes: Annotated[list[str], Field(description="What somebody who reads the answer should know.", examples=[[]])]


def request_class(limits: Limits) -> type[BaseModel]:
    """The body of POST /recommend, with the bounds of this service."""
    title = Annotated[str, Field(min_length=1, max_length=limits.max_title)]
    history = Field(
        max_length=limits.max_history,
        description="Titles or item keys of the domain, oldest first; none asks for what is popular.",
        examples=[[TITLE, "crime-0017"]],
    )
    k = Field(default=min(DEFAULT_K, limits.max_k), ge=1, le=limits.max_k, description="The number of recommendations.")
    return create_model(
        "RecommendRequest",
        __config__=ConfigDict(extra="forbid", strict=True),
        domain=(str, Field(max_length=limits.max_title, examples=["crime"])),
        history=(list[title], history),  # type: ignore[valid-type]
        k=(int, k),
        exclude_seen=(bool, Field(default=True, description="Whether the history's items are left out.")),
        exclude=(
            list[title] | None,  # type: ignore[valid-type]
            Field(default=None, description="Keys of items that are not recommended."),
        ),
        candidates=(
            list[title] | None,  # type: ignore[valid-type]
            Field(default=None, description="Keys of the items that alone may be recommended."),
        ),
        stock=(
            dict[title, float] | None,  # type: ignore[valid-type]
            Field(
                default=None,
                description="Key -> how many are left; items with none, or not named, are not recommended.",
            ),
        ),
    )


def new_items_class(limits: Limits) -> type[BaseModel]:
    """The body of POST /items."""
    strict = ConfigDict(extra="forbid", strict=True)
    word = (str, Field(min_length=1, max_length=limits.max_title))
    text = (str, Field(min_length=1, description="As the item table of the training says it."))
    one = create_model("NewItem", __config__=strict, key=word, title=word, text=text)
    items = (list[one], Field(min_length=1, max_length=limits.max_history))  # type: ignore[valid-type]
    return create_model("NewItems", __config__=strict, domain=word, items=items)


# What goes wrong, as a status and one sentence.

SHOWN = 60
"""Characters of a bad value that the answer repeats."""


def add_errors(app: FastAPI, limits: Limits) -> None:
    """Handlers of everything that a request can be refused for once the guard let it in."""
    paths = ", ".join(sorted(route_paths(app)))

    async def bad_request(_: Request, error: Any) -> JSONResponse:
        return answer(422, wrong_field(error.errors()))

    async def bad_value(_: Request, error: Exception) -> JSONResponse:
        return answer(422, " ".join(str(error).split()))

    async def unknown_domain(_: Request, error: Exception) -> JSONResponse:
        return answer(404, str(error))

    async def busy(_: Request, error: Exception) -> JSONResponse:
        return answer(503, f"{limits.max_waiting} requests wait already; ask again in a second", {"retry-after": "1"})

    async def closed(_: Request, error: Exception) -> JSONResponse:
        return answer(503, "the service is stopping; ask again when it is back", {"retry-after": "10"})

    async def late(_: Request, error: Exception) -> JSONResponse:
        return answer(503, f"the model did not answer within {limits.timeout_s:g} seconds; ask again later")

    async def no_room(_: Request, error: Exception) -> JSONResponse:
        if not is_out_of_memory(error):
            raise error
        return answer(503, "the model call did not fit into the memory; ask for fewer items or start with less beams")

    async def refused(request: Request, error: Any) -> JSONResponse:
        detail = {
            404: f"got the path {request.url.path!r:.{SHOWN}}, expected one of {paths}",
            405: f"got the method {request.method!r:.{SHOWN}}, which this path does not have; /openapi.json says which",
            400: "got a body that is no JSON, expected an object such as /openapi.json shows",
        }.get(error.status_code, str(error.detail))
        return answer(error.status_code, detail, error.headers)

    for kind, handler in {
        RequestValidationError: bad_request,
        BadRequest: bad_value,
        UnknownDomain: unknown_domain,
        Busy: busy,
        Closed: closed,
        asyncio.TimeoutError: late,
        MemoryError: no_room,
        RuntimeError: no_room,
        HTTPException: refused,
    }.items():
        app.add_exception_handler(kind, handler)  # type: ignore[arg-type]


def route_paths(app: FastAPI) -> set[str]:
    return {getattr(route, "path", "") for route in app.routes} - {""}


def answer(status: int, detail: str, headers: Any = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, headers)


def wrong_field(errors: Sequence[Any]) -> str:
    """The first of pydantic's errors as one sentence."""
    first = errors[0]
    kind, given = first["type"], repr(first.get("input"))
    place = ".".join(str(part) for part in first["loc"][1:])  # the first one is "body" or "query"
    if kind == "json_invalid":
        return "got a body that is no JSON, expected an object such as /openapi.json shows"
    if kind == "missing":
        return f"got no {place or 'body'}, expected one"
    if kind == "extra_forbidden":
        return f"got the unknown field {place!r:.{SHOWN}}, expected those that /openapi.json shows"
    _, should, wish = first["msg"].partition(" should ")
    shown = given if len(given) <= SHOWN else f"{given[:SHOWN]}..."
    reason = f"which should {wish}" if should else f"expected another one: {first['msg']}"
    return f"got {place or 'the body'} {shown}, {reason}"


# What every request passes: host name, key, size and time of its body; headers, counts and errors of every
# answer.

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

    key: str
    """Empty: everybody."""
    open_routes: Collection[str]
    """Routes that need no key."""
    routes: Collection[str]
    """All routes; what asks for others is counted as "other"."""
    hosts: Sequence[str]
    """Names by which requests may call the server; ``*`` is any."""
    max_body: int
    timeout_s: float
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
        self._app, self._rules, self._metrics = app, rules, metrics
        allowed = " ".join(["img-src 'self'", *([rules.pictures] if rules.pictures else [])])
        self._headers = {**HEADERS, "content-security-policy": POLICY.replace("img-src 'self'", allowed)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
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
            self._check(scope, route)
            await self._app(scope, await self._bounded(receive), sent)
        except Refused as error:
            await _answer(sent, error)
        except Exception as error:
            log.error("%s: %s", route, place_of(error))
            if not status:
                await _answer(sent, Refused(500, "the service failed on this request; its log says where"))
        finally:
            self._metrics.observe_request(route, status, time.perf_counter() - begun)

    def _check(self, scope: Scope, route: str) -> None:
        headers = dict(scope["headers"])
        host = host_name(headers.get(b"host", b"").decode("latin-1"))
        if "*" not in self._rules.hosts and host not in self._rules.hosts:
            names = ", ".join(self._rules.hosts)
            raise Refused(400, f"got the host name {host!r:.60}, expected one of {names}; --allowed_hosts adds others")
        if self._rules.key and route not in self._rules.open_routes and not _has_key(headers, self._rules.key):
            detail = "got no API key or a wrong one, expected it in the header X-API-Key or as a Bearer token"
            raise Refused(401, detail, {"www-authenticate": "Bearer"})
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":  # what a page of another site cannot send
            detail = "got a body that is not sent as JSON, expected the header Content-Type: application/json"
            raise Refused(422, detail)

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


def _has_key(headers: dict[bytes, bytes], key: str) -> bool:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    given = headers.get(b"x-api-key", token.strip() if scheme.lower() == b"bearer" else b"")
    return secrets.compare_digest(given, key.encode())


async def _answer(send: Send, refused: Refused) -> None:
    content = json.dumps({"detail": refused.detail}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content)), **refused.headers}
    start = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": start})
    await send({"type": "http.response.body", "body": content})


# The files of the page, which lie beside this module; its technical words are explained as in the reports.

FOLDER = Path(__file__).resolve().parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Route -> content and media type; the page itself is at ``/``."""
    files = {
        "/" if path.name == "index.html" else f"/{path.name}": (path.read_bytes(), TYPES[path.suffix])
        for path in sorted(FOLDER.iterdir())
        if path.suffix in TYPES
    }
    page, style = files["/"][0].decode(), files["/page.css"][0].decode()
    return {
        **files,
        "/": (_explained(page).encode(), TYPES[".html"]),
        "/page.css": (f"{style}{WORD_STYLE}".encode(), TYPES[".css"]),
        "/words.js": (TERM_SCRIPT.encode(), TYPES[".js"]),
    }


def _explained(page: str) -> str:
    """``page`` with its ``{{words}}`` marked, and their meanings in place of ``{{}}``."""
    words = Words()

    def marked(match: re.Match[str]) -> str:
        words.new_part()
        return words.mark(match[1])

    page = re.sub(r"\{\{([^{}]+)\}\}", marked, page)
    return page.replace("{{}}", term_list(words.met()))


# The routes. Every answer to a bad request is ``{"detail": one sentence}``.

# Without "from __future__ import annotations": FastAPI reads the annotation of a body whose class is made here.


DESCRIPTION = "Next items for a history, from the adapters of a finished run."
REFUSALS: dict[int | str, dict[str, Any]] = {
    404: {"model": Failure, "description": "No such domain."},
    422: {"model": Failure, "description": "A bad request; the sentence says what is wrong."},
    503: {"model": Failure, "description": "Too many requests wait, or the model took too long."},
}


def create_app(service: Service, metrics: Metrics, key: str = "", hosts: Sequence[str] = ("*",)) -> FastAPI:
    """The application; it closes ``service`` when it ends. With a ``key`` requests must name it.

    There is no page of Swagger or ReDoc, since both load scripts from elsewhere: only ``/openapi.json``.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.close)

    app = FastAPI(title="FeDecider", description=DESCRIPTION, docs_url=None, redoc_url=None, lifespan=lifespan)
    files = page_files()
    for path, (content, kind) in files.items():
        app.get(path, include_in_schema=False)(_file(content, kind))

    @app.get("/health", responses={503: {"model": Failure}})
    async def health() -> Health:
        """Whether requests are answered; needs no key."""
        if not service.alive:
            raise HTTPException(503, "the service is stopping")
        return Health(status="ok", needs_key=bool(key))

    scheme = APIKeyHeader(name="X-API-Key", auto_error=False, description="Or: Authorization: Bearer KEY.")
    keyed: dict[str, Any] = {}
    if key:
        keyed = {"dependencies": [Depends(scheme)], "responses": {401: {"model": Failure}}}

    @app.get("/metrics", response_class=Response, **keyed)
    async def prometheus() -> Response:
        """Counts and times in the text format of Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_questions(app, service, keyed)
    add_errors(app, service.limits)
    rules = Rules(
        key=key,
        open_routes={"/health", *files},
        routes=route_paths(app),
        hosts=hosts,
        max_body=service.limits.max_body,
        timeout_s=service.limits.timeout_s,
        pictures=" ".join(sorted({"/".join(one.split("/")[:3]) for one in service.pictures.values()})),
    )
    app.add_middleware(Guard, rules=rules, metrics=metrics)
    return app


def _file(content: bytes, kind: str) -> Any:
    async def send() -> Response:
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    return send


def _add_questions(app: FastAPI, service: Service, keyed: dict[str, Any]) -> None:
    limits = service.limits
    Body, NewItems = request_class(limits), new_items_class(limits)
    refusals = {**keyed, "responses": {**keyed.get("responses", {}), **REFUSALS}}

    def named(item: Any) -> dict[str, Any]:
        """Key, title and picture of an item."""
        return {"key": item.key, "title": item.title, "picture": service.pictures.get(item.key)}

    @app.get("/domains", **keyed)
    async def domains() -> Domains:
        """The domains of the run."""
        return Domains(
            domains=[
                DomainInfo(name=name, num_items=len(one.items.keys), hybrid=one.has_hybrid)
                for name, one in service.recommenders.items()
            ],
            max_history=limits.max_history,
            max_k=limits.max_k,
        )

    @app.get("/items", response_model_exclude_none=True, **refusals)
    async def items(
        domain: Annotated[str, Query(max_length=limits.max_title, examples=["crime"])],
        query: Annotated[str, Query(max_length=limits.max_query, examples=["moon"])] = "",
        limit: Annotated[int, Query(ge=1, le=limits.max_matches)] = min(10, limits.max_matches),
    ) -> Items:
        """Items whose titles match; without a query the first ones of the catalogue."""
        found = await run_in_threadpool(service.search, domain, query, limit)
        return Items(items=[Item(**named(one)) for one in found])

    @app.post("/items", **refusals)
    async def add_items(body: NewItems) -> AddedItems:  # type: ignore[valid-type]
        """Items that came after the training: recommended and searched from now on, until the service ends."""
        if not service.takes_items:
            raise HTTPException(403, "this service takes no items: whoever reaches it may ask, and it has no API key")
        asked: Any = body
        new_items = [one.model_dump() for one in asked.items]
        return AddedItems(
            num_added=len(new_items), num_items=await run_in_threadpool(service.add_items, asked.domain, new_items)
        )

    @app.get("/similar", response_model_exclude_none=True, **refusals)
    async def similar(
        domain: Annotated[str, Query(max_length=limits.max_title, examples=["crime"])],
        item: Annotated[str, Query(min_length=1, max_length=limits.max_title, examples=[TITLE])],
        k: Annotated[int, Query(ge=1, le=limits.max_k)] = min(DEFAULT_K, limits.max_k),
    ) -> SimilarItems:
        """The k items whose texts are nearest to that of a title or item key."""
        answer = await run_in_threadpool(service.similar, domain, item, k)
        (own,) = answer.history
        return SimilarItems(
            item=Item(**named(own)),
            items=[SimilarItem(**named(one), score=one.score) for one in answer.items],
            notes=list(answer.notes),
        )

    @app.post("/recommend", response_model_exclude_none=True, **refusals)
    async def recommend(body: Body) -> Recommendations:  # type: ignore[valid-type]
        """The k best next items for a history."""
        asked: Any = body
        exclude, candidates = (None if one is None else frozenset(one) for one in (asked.exclude, asked.candidates))
        stock = None if asked.stock is None else frozenset(asked.stock.items())
        kind = Kind(asked.domain, asked.k, asked.exclude_seen, exclude, candidates, stock)
        waiting = await run_in_threadpool(service.submit, kind, asked.history)
        answer = await asyncio.wait_for(asyncio.wrap_future(waiting.answer), limits.timeout_s)
        return Recommendations(
            domain=kind.domain,
            history=[Item(**named(one)) for one in answer.history],
            items=[
                RecommendedItem(**named(one), score=one.score, expert_shares=dict(one.experts)) for one in answer.items
            ],
            alpha_shares=dict(answer.alpha),
            notes=[*waiting.notes, *answer.notes],
        )
