"""Which cases of a test are slow: `make test` holds the promise by another case, `make slow` runs all."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A case that `make slow` alone runs."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def fast_where(fast: Callable[[Any], bool] | Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases of a ``parametrize``; those of which ``fast`` does not hold, or that it does not list, are slow."""
    is_fast = fast if callable(fast) else list(fast).__contains__
    return [case if is_fast(case) else slow(*(case if isinstance(case, tuple) else (case,))) for case in cases]
