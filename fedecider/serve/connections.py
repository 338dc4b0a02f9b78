"""Connections that never send a whole request head: closed after a time, so that they lock nobody out."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


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
