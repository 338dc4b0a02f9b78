"""A finished run as an HTTP service with a page: fedecider serve --run runs/x --port 8000."""

from __future__ import annotations

from collections.abc import Sequence

from fedecider.running.command import run
from fedecider.running.options import parse
from fedecider.serve.config import Limits, ServeConfig

DESCRIPTION = "Answer requests for recommendations from a finished run, over HTTP and on a page (extra serve)."
COMMON = ("run", "host", "port", "device", "ensemble", "api_key_file")


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        config, limits = parse(DESCRIPTION, argv, ServeConfig, Limits, common=COMMON)
        try:
            from fedecider.serve.run import serve
        except ImportError as error:
            lacking = (error.name or "").partition(".")[0]
            if lacking not in ("fastapi", "uvicorn", "prometheus_client", "pydantic", "starlette"):
                raise
            raise ImportError(f"serving needs {lacking}, which is not installed: pip install '.[serve]'") from error
        serve(config, limits)

    return run(work)
