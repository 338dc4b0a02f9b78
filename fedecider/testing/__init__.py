"""Tests for methods that live outside this package: does a method keep what the runner asks of every method?

    from fedecider.testing import check_method
    check_method("interpolated")

Nothing is needed but the package itself: models and data are tiny and invented, and a check takes seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from embedding_fr.methods import METHODS as EMBEDDING_METHODS
from embedding_fr.methods import Method as EmbeddingMethod
from embedding_fr.testing.contract import EMBEDDING_CONTRACT, EmbeddingBench, check_reference
from fedecider.id_based import METHODS as ID_METHODS
from fedecider.id_based import Method as IdMethod
from fedecider.methods import METHODS, Method
from fedecider.testing.bench import Bench
from fedecider.testing.id_contract import ID_CONTRACT, IdBench
from fedecider.testing.llm_contract import LLM_CONTRACT, LlmBench

__all__ = [
    "EMBEDDING_CONTRACT",
    "ID_CONTRACT",
    "LLM_CONTRACT",
    "EmbeddingBench",
    "IdBench",
    "LlmBench",
    "check_method",
    "check_reference",
]
AnyMethod = Method | EmbeddingMethod | IdMethod


def check_method(method: AnyMethod | str, config: Any = None) -> None:
    """Hold a method to the contract of its kind (`LLM_CONTRACT`, `EMBEDDING_CONTRACT`, `ID_CONTRACT`).

    Args:
        method: The entry of a method, or the name of a built-in or an installed one.
        config: Its settings, an instance of the entry's ``config``; None takes the defaults.

    Raises:
        AssertionError: what it breaks, in one sentence that begins with the name of the contract.
        ValueError: no method has that name, or the method federates nothing (``pooled``).
    """
    for contract, error in broken(method, config):
        title = (contract.__doc__ or "").split("\n\n")[0].strip()
        what = str(error) if isinstance(error, AssertionError) else f"it raises {type(error).__name__}: {error}"
        raise AssertionError(f"{contract.__name__}: {what}. The contract: {title}") from error


def broken(method: AnyMethod | str, config: Any = None) -> Iterator[tuple[Callable, Exception]]:
    """Each part of the contract that a method breaks, and how; for those who want to see all of them."""
    bench, contract = bench_of(method, config)
    for part in contract:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
                part(bench)
        except Exception as error:
            yield part, error


def bench_of(method: AnyMethod | str, config: Any = None) -> tuple[Bench, Sequence[Callable[[Any], None]]]:
    """The method in the tiny setting of its kind, and the contract of that kind."""
    entry = _entry(method)
    if isinstance(entry, EmbeddingMethod):
        return EmbeddingBench(entry, config), EMBEDDING_CONTRACT
    if isinstance(entry, IdMethod):
        return IdBench(entry, config), ID_CONTRACT
    if entry.pooled:
        raise ValueError("got a method that pools the data of all clients, expected one that federates")
    return LlmBench(entry, config), LLM_CONTRACT


def _entry(method: AnyMethod | str) -> AnyMethod:
    if isinstance(method, AnyMethod):
        return method
    if isinstance(method, str) and method in METHODS:
        return METHODS[method]
    if isinstance(method, str) and method in EMBEDDING_METHODS:
        return EMBEDDING_METHODS[method]
    if isinstance(method, str) and method in ID_METHODS:
        return ID_METHODS[method]
    names = ", ".join([*METHODS, *EMBEDDING_METHODS, *ID_METHODS])
    raise ValueError(
        f"got {method!r}, expected the name of a method ({names}), or the Method that the entry point of a package "
        "leads to"
    )
