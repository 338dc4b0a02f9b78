"""Settings say what they may be in their annotations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from fedecider.bounds import (
    NotNegative,
    OneOrMore,
    Positive,
    PositiveOrInfinite,
    Precision,
    Seed,
    Share,
    ShareAbove0,
    ShareBelow1,
    Width,
    ZeroOrMore,
    at_least,
    check,
)
from fedecider.running.options import build_parser, from_plain, parse


@dataclass(frozen=True)
class Inner:
    depth: OneOrMore = 1

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Toy:
    """A toy.

    Args:
        rounds: How often.
    """

    rounds: OneOrMore = 1
    patience: ZeroOrMore = 0
    width: Width = 8
    rank: Annotated[int, at_least(2, hint="1 is no rank here")] = 2
    seed: Seed = 0
    free: int = -3
    rate: Positive = 0.1
    decay: NotNegative = 0.0
    share: Share = 0.5
    cohort: ShareAbove0 = 1.0
    dropout: ShareBelow1 = 0.0
    start: float = -1.0
    clip: PositiveOrInfinite | None = None
    precision: Precision = "fp32"
    kind: Literal["word", "phrase", "unigram"] = "word"
    order: Literal["up", "down"] | None = None
    sizes: tuple[OneOrMore, ...] = (4, 2)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    name: str = ""
    on: bool = False
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    "right",
    [
        {"rate": 1, "decay": 0, "share": 1},  # whole numbers where a number is meant
        {"share": 0.0, "cohort": 1.0, "dropout": 0.999},
        {"clip": math.inf},
        {"clip": 1e-9, "order": "up", "sizes": [1], "rows": {"a": {"b": [1]}}},
        {"seed": 2**63 - 1, "free": -7, "start": -1e300},
        {"sizes": ()},
    ],
    ids=str,
)
def test_what_is_within_the_bounds_is_taken_as_it_is(right):
    toy = Toy(**right)
    assert {name: getattr(toy, name) for name in right} == right


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rounds", 0, "got rounds 0, expected at least 1"),
        ("rounds", 10**12, "got rounds 1000000000000, expected 1 to 2000000000"),
        ("rounds", "3", "got rounds '3', expected a whole number"),
        ("rounds", None, "got rounds None, expected a whole number"),
        ("rounds", True, "got rounds True, expected a whole number"),
        ("rounds", 2.0, "got rounds 2.0, expected a whole number"),
        ("rounds", math.nan, "got rounds nan, expected a whole number"),
        ("patience", -1, "got patience -1, expected 0 or more"),
        ("width", 10**9, "got width 1000000000, expected 1 to 65536"),
        ("width", 0, "got width 0, expected 1 to 65536"),
        ("rank", 1, "got rank 1, expected at least 2: 1 is no rank here"),
        ("seed", 2**64, "got seed 18446744073709551616, expected -9223372036854775808 to 9223372036854775807"),
        ("free", 10**12, "got free 1000000000000, expected -2000000000 to 2000000000"),
        ("rate", 0.0, "got rate 0.0, expected above 0"),
        ("rate", math.inf, "got rate inf, expected above 0"),
        ("rate", "fast", "got rate 'fast', expected a number"),
        ("rate", False, "got rate False, expected a number"),
        ("decay", math.nan, "got decay nan, expected 0 or more"),
        ("decay", -1e-9, "got decay -1e-09, expected 0 or more"),
        ("share", 1.01, "got share 1.01, expected 0 to 1"),
        ("share", math.nan, "got share nan, expected 0 to 1"),
        ("cohort", 0.0, "got cohort 0.0, expected above 0 and at most 1"),
        ("dropout", 1.0, "got dropout 1.0, expected at least 0 and below 1"),
        ("start", math.nan, "got start nan, expected"),
        ("start", -math.inf, "got start -inf, expected"),
        ("clip", 0.0, "got clip 0.0, expected above 0 or null"),
        ("clip", "1", "got clip '1', expected a number or null"),
        ("precision", "fp16", "got precision 'fp16', expected fp32, bf16 or auto: fp16 overflows in T5"),
        ("kind", "words", "got kind 'words', expected word, phrase or unigram"),
        ("kind", None, "got kind None, expected word, phrase or unigram"),
        ("order", "left", "got order 'left', expected up or down or null"),
        ("sizes", (3, 0), "got sizes (3, 0), expected each entry to be at least 1"),
        ("sizes", 3, "got sizes 3, expected a list"),
        ("sizes", "16,8", "got sizes '16,8', expected a list"),
        ("rows", [1], "got rows [1], expected names with values"),
        ("rows", {"a": 1}, "got rows {'a': 1}, expected each entry to be names with values"),
        ("name", 3, "got name 3, expected a text"),
        ("on", 1, "got on 1, expected true or false"),
        ("inner", {"depth": 1}, "got inner {'depth': 1}, expected settings (Inner)"),
    ],
)
def test_what_is_not_is_refused_in_one_message(name, value, expected):
    with pytest.raises(ValueError, match=r"^got ") as caught:
        Toy(**{name: value})
    assert str(caught.value).startswith(expected)


def test_a_command_line_reads_the_type_and_the_bound_holds():
    parser = build_parser("", Toy)
    (toy,) = parse(parser, ["--rounds", "7", "--clip", "2", "--inner.depth", "3"], Toy)
    assert (toy.rounds, toy.clip, toy.inner) == (7, 2.0, Inner(3))
    with pytest.raises(ValueError, match="got rounds 0, expected at least 1"):
        parse(parser, ["--rounds", "0"], Toy)
    with pytest.raises(ValueError, match="got depth 0, expected at least 1"):
        parse(parser, ["--inner.depth", "0"], Toy)
    assert "--rounds INT          How often. (default: 1)" in parser.format_help()


def test_settings_come_back_from_plain_values():
    with pytest.raises(ValueError, match=r"got share 2\.0, expected 0 to 1"):
        from_plain(Toy, {"share": 2})


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ValueError, match="got rounds") as caught:
        Toy(rounds="9" * 10_000)
    assert len(str(caught.value)) < 200
