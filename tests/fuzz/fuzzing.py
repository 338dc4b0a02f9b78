"""What all fuzzing shares: a fixed budget of examples, the same ones in every run, and values that nobody expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def fixed(examples: int) -> settings:
    """A budget of ``examples``, drawn alike in every run."""
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)


HUGE = [0, -1, 2**31, 2**62, 2**63 - 1, 2**64, 10**400, 1e308, -0.0, float("nan"), float("inf")]
PATHS = ["../x", "/etc/passwd", "a/b", "", ".", "..", "~", "x\0y", "\ud800", "x" * 5000, "$HOME", "con\n"]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(HUGE), st.sampled_from(PATHS), st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abx", max_size=2), inner, max_size=3),
    max_leaves=6,
)
"""Plain values of any kind, as JSON or YAML may hold them."""


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """``content`` with a few bytes changed, cut out or put in, or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(data) - 1)))
        what = draw(st.sampled_from(["flip", "cut", "put", "end", "length"]))
        if what == "flip" and data:
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del data[place : place + draw(st.integers(1, 16))]
        elif what == "put":
            data[place:place] = draw(st.binary(max_size=8))
        elif what == "end":
            del data[place:]
        else:
            data[:8] = draw(st.sampled_from([0, 1, len(data), 2**31, 2**63, 2**64 - 1])).to_bytes(8, "little")
    return bytes(data)


@st.composite
def with_other_value(draw: st.DrawFn, content: Any) -> Any:
    """``content`` (blocks and lists) in which one value, somewhere, is another one, missing, or one too many."""
    if isinstance(content, dict) and content and draw(st.integers(0, 9)):
        name = draw(st.sampled_from(sorted(content, key=str)))
        how = draw(st.integers(0, 11))
        if how == 0:
            return {key: value for key, value in content.items() if key != name}
        if how == 1:
            return {**content, draw(st.sampled_from(PATHS[:4])): draw(VALUES)}
        return {**content, name: draw(with_other_value(content[name]))}
    if isinstance(content, list) and content and draw(st.booleans()):
        place = draw(st.integers(0, len(content) - 1))
        return [*content[:place], draw(with_other_value(content[place])), *content[place + 1 :]]
    return draw(VALUES)


def told(work: Callable[[], Any]) -> Any:
    """What ``work`` gives, or None where it refuses with a sentence; every other exception is a defect.

    The system's own refusals count (a name that is too long): commands end with a sentence and code 2 for them too.
    """
    try:
        return work()
    except (ValueError, OSError) as error:
        sentence = str(error)
    assert len(sentence.split()) > 2, f"a refusal without a sentence: {sentence!r}"
    return None
