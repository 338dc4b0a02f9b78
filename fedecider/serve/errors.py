"""What goes wrong with a request, as a status and one sentence."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from fedecider.bounds import is_out_of_memory
from fedecider.serve.batching import Busy, Closed
from fedecider.serve.config import Limits
from fedecider.serve.messages import TAGS
from fedecider.serve.service import BadRequest, UnknownDomain

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
    place = ".".join(str(part) for part in first["loc"][1:] if part not in TAGS)  # the first one is "body" or "query"
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
