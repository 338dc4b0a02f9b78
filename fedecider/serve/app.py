"""The routes of the service. Every answer to a bad request is ``{"detail": one sentence}``."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Response
from fastapi.security import APIKeyHeader
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from fedecider.serve import messages
from fedecider.serve.errors import add_errors, route_paths
from fedecider.serve.guard import Guard, Rules
from fedecider.serve.keys import Keys
from fedecider.serve.metrics import Metrics
from fedecider.serve.page import page_files
from fedecider.serve.service import Kind, Service

# Without "from __future__ import annotations": FastAPI reads the annotation of a body whose class is made here.


NOBODY = Keys({})
DESCRIPTION = "Next items for a history, from the adapters of a finished run."
REFUSALS: dict[int | str, dict[str, Any]] = {
    404: {"model": messages.Failure, "description": "No such domain."},
    422: {"model": messages.Failure, "description": "A bad request; the sentence says what is wrong."},
    429: {"model": messages.Failure, "description": "Too many requests with this key in a minute."},
    503: {"model": messages.Failure, "description": "Too many requests wait, or the model took too long."},
}


def create_app(
    service: Service,
    metrics: Metrics,
    keys: Keys = NOBODY,
    hosts: Sequence[str] = ("*",),
    log_requests: bool = False,
) -> FastAPI:
    """The application; it closes ``service`` when it ends. With ``keys`` requests must name one of them.

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

    @app.get("/health", responses={503: {"model": messages.Failure}})
    async def health() -> messages.Health:
        """Whether requests are answered; needs no key."""
        if not service.alive:
            raise HTTPException(503, "the service is stopping")
        return messages.Health(status="ok", needs_key=keys.needed)

    scheme = APIKeyHeader(name="X-API-Key", auto_error=False, description="Or: Authorization: Bearer KEY.")
    keyed: dict[str, Any] = {}
    if keys.needed:
        keyed = {"dependencies": [Depends(scheme)], "responses": {401: {"model": messages.Failure}}}

    @app.get("/metrics", response_class=Response, **keyed)
    async def prometheus() -> Response:
        """Counts and times in the text format of Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _add_questions(app, service, keyed)
    add_errors(app, service.limits)
    rules = Rules(
        keys=keys,
        open_routes={"/health", *files},
        routes=route_paths(app),
        hosts=hosts,
        max_body=service.limits.max_body,
        timeout_s=service.limits.timeout_s,
        max_per_minute=service.limits.max_per_minute,
        log_requests=log_requests,
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
    Body, NewItems = messages.request_class(limits), messages.new_items_class(limits)
    refusals = {**keyed, "responses": {**keyed.get("responses", {}), **REFUSALS}}

    def named(item: Any) -> dict[str, Any]:
        """Key, title and picture of an item."""
        return {"key": item.key, "title": item.title, "picture": service.pictures.get(item.key)}

    @app.get("/domains", **keyed)
    async def domains() -> messages.Domains:
        """The domains of the run."""
        return messages.Domains(
            domains=[
                messages.DomainInfo(name=name, num_items=len(one.items.keys), ensemble=one.has_ensemble)
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
    ) -> messages.Items:
        """Items whose titles match; without a query the first ones of the catalogue."""
        found = await run_in_threadpool(service.search, domain, query, limit)
        return messages.Items(items=[messages.Item(**named(one)) for one in found])

    @app.post("/items", **refusals)
    async def add_items(body: NewItems) -> messages.AddedItems:  # type: ignore[valid-type]
        """Items that came after the training: recommended and searched from now on, until the service ends."""
        if not service.takes_items:
            raise HTTPException(403, "this service takes no items: whoever reaches it may ask, and it has no API key")
        asked: Any = body
        new_items = [one.model_dump() for one in asked.items]
        return messages.AddedItems(
            num_added=len(new_items), num_items=await run_in_threadpool(service.add_items, asked.domain, new_items)
        )

    @app.get("/similar", response_model_exclude_none=True, **refusals)
    async def similar(
        domain: Annotated[str, Query(max_length=limits.max_title, examples=["crime"])],
        item: Annotated[str, Query(min_length=1, max_length=limits.max_title, examples=[messages.TITLE])],
        k: Annotated[int, Query(ge=1, le=limits.max_k)] = min(messages.DEFAULT_K, limits.max_k),
    ) -> messages.SimilarItems:
        """The k items whose texts are nearest to that of a title or item key."""
        answer = await run_in_threadpool(service.similar, domain, item, k)
        (own,) = answer.history
        return messages.SimilarItems(
            item=messages.Item(**named(own)),
            items=[messages.SimilarItem(**named(one), score=one.score) for one in answer.items],
            notes=list(answer.notes),
        )

    @app.post("/recommend", response_model_exclude_none=True, **refusals)
    async def recommend(body: Body) -> messages.Recommendations:  # type: ignore[valid-type]
        """The k best next items for a history."""
        asked: Any = body
        exclude, candidates = (None if one is None else frozenset(one) for one in (asked.exclude, asked.candidates))
        stock = None if asked.stock is None else frozenset(asked.stock.items())
        kind = Kind(asked.domain, asked.k, asked.repeats, exclude, candidates, stock)
        waiting = await run_in_threadpool(service.submit, kind, asked.history)
        answer = await asyncio.wait_for(asyncio.wrap_future(waiting.answer), limits.timeout_s)
        return messages.Recommendations(
            domain=kind.domain,
            history=[messages.Item(**named(one)) for one in answer.history],
            items=[
                messages.RecommendedItem(**named(one), score=one.score, features=dict(one.features))
                for one in answer.items
            ],
            alpha_shares=dict(answer.alpha),
            notes=[*waiting.notes, *answer.notes],
        )
