"""Tests for methods that live outside this package: does a method keep what the runner asks of every method?

    from fedecider.testing import check_method
    check_method("interpolated")

Nothing is needed but the package itself: models and data are tiny and invented, and a check takes seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedecider.engine.track import Track, all_method_names, track_of, tracks
from fedecider.testing.bench import Bench, Entry
from fedecider.testing.shared_contract import QUICK

__all__ = ["bench_of", "broken", "check_method"]


def check_method(method: Entry | str, config: Any = None, *, quick: bool = False) -> None:
    """Hold a method to the contract of its track.

    Args:
        method: The entry of a method, or the name of a built-in or an installed one.
        config: Its settings, an instance of the entry's ``config``; None takes the defaults.
        quick: If true, a first look in seconds: the parts of the contract that need no run of several rounds.

    Raises:
        AssertionError: what it breaks, in one sentence that begins with the name of the contract.
        ValueError: no method has that name, or the method federates nothing (``pooled``).
    """
    for contract, error in broken(method, config, quick=quick):
        title = (contract.__doc__ or "").split("\n\n")[0].strip()
        what = str(error) if isinstance(error, AssertionError) else f"it raises {type(error).__name__}: {error}"
        raise AssertionError(f"{contract.__name__}: {what}. The contract: {title}") from error


def broken(method: Entry | str, config: Any = None, *, quick: bool = False) -> Iterator[tuple[Callable, Exception]]:
    """Each part of the contract that a method breaks, and how; for those who want to see all of them."""
    bench, contract = bench_of(method, config)
    for part in (one for one in contract if one in QUICK or not quick):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
                part(bench)
        except Exception as error:
            yield part, error


def bench_of(method: Entry | str, config: Any = None) -> tuple[Bench, Sequence[Callable[[Any], None]]]:
    """The method in the tiny setting of its track, and the contract of that track."""
    track, entry = _found(method)
    bench, contract = track.part("contract")(entry, config)
    return bench, contract


def _found(method: Entry | str) -> tuple[Track, Entry]:
    names = list(all_method_names())
    if isinstance(method, str):
        if method in names:
            track = track_of(method)
            return track, track.methods[method]
    else:
        for track in tracks():
            if isinstance(method, track.methods.kind):
                return track, method
    raise ValueError(
        f"got {method!r}, expected the name of a method ({', '.join(names)}), or the Method that the entry point of a "
        "package leads to"
    )
