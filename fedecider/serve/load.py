"""The recommenders of a run."""

from __future__ import annotations

from typing import Any

from fedecider.serve.config import ServeConfig


def load_recommenders(config: ServeConfig) -> dict[str, Any]:
    raise NotImplementedError
