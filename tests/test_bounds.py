"""Settings say what they may be in their annotations."""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from fedecider import bounds
from fedecider.running.options import Schema, build_parser, from_plain, nested, parse, typed


@bounds.dataclass(frozen=True)
class Inner:
    depth: bounds.OneOrMore = 1


@bounds.dataclass(frozen=True)
class Toy:
    """A toy.

    Args:
        rounds: How often.
    """

    rounds: bounds.OneOrMore = 1
    patience: bounds.ZeroOrMore = 0
    width: bounds.Width = 8
    rank: Annotated[bounds.Int, Field(ge=2)] = 2
    seed: bounds.Seed = 0
    rate: bounds.Positive = 0.1
    decay: bounds.NotNegative = 0.0
    share: bounds.Share = 0.5
    cohort: bounds.ShareAbove0 = 1.0
    dropout: bounds.ShareBelow1 = 0.0
    clip: bounds.PositiveOrInfinite | None = None
    start: bounds.Float | Literal["auto"] = "auto"
    kind: Literal["word", "phrase"] = "word"
    sizes: tuple[bounds.OneOrMore, ...] = (4, 2)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    name: str = ""
    on: bool = False
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.name == "odd":
            raise ValueError("got name odd, expected an even one")


@pytest.mark.parametrize(
    "right",
    [
        {"rate": 1, "decay": 0, "share": 1},  # whole numbers where a number is meant
        {"share": 0.0, "cohort": 1.0, "dropout": 0.999},
        {"clip": math.inf, "start": -1.5},
        {"clip": 1e-9, "sizes": (1,), "rows": {"a": {"b": [1]}}},
        {"seed": 2**63 - 1, "start": "auto"},
        {"sizes": (), "inner": Inner(3)},
    ],
    ids=str,
)
def test_what_is_within_the_bounds_is_taken_as_it_is(right):
    toy = Toy(**right)
    assert {name: getattr(toy, name) for name in right} == right


WRONG = [
    *(("rounds", value) for value in (0, 10**12, None, True, 2.5, math.nan, "few", "9" * 10_000)),
    *(("patience", -1), ("width", 10**9), ("width", 0), ("rank", 1), ("seed", 2**64)),
    *(("rate", value) for value in (0.0, math.inf, "fast", False)),
    *(("decay", math.nan), ("decay", -1e-9), ("share", 1.01), ("share", math.nan), ("cohort", 0.0), ("dropout", 1.0)),
    *(("clip", 0.0), ("clip", math.nan), ("start", math.nan), ("start", "atuo"), ("start", True)),
    *(("kind", "words"), ("kind", None), ("sizes", (3, 0)), ("sizes", 3), ("rows", [1]), ("rows", {"a": 1})),
    *(("name", 3), ("on", 2), ("inner", 5), ("inner.depth", 0), ("inner.dept", 1)),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: f"{value!r:.20}")
def test_what_is_not_is_refused_in_one_sentence_with_its_name(name, value):
    for make in (lambda values: Toy(**values), lambda values: replace(Toy(), **values), lambda v: from_plain(Toy, v)):
        with pytest.raises(ValueError, match=f"^got {name}[ ,]") as caught:
            make(nested({name: value}))
        assert type(caught.value) is ValueError
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 250


def test_what_does_not_go_together_is_refused_in_its_own_words():
    for make in (lambda: Toy(name="odd"), lambda: replace(Toy(), name="odd"), lambda: from_plain(Toy, {"name": "odd"})):
        with pytest.raises(ValueError, match=r"^got name odd, expected an even one$"):
            make()


def test_values_and_names_that_are_not_there_are_errors():
    with pytest.raises(ValueError, match="surplus"):
        Toy(surplus=1)
    with pytest.raises(ValueError, match="did you mean rounds"):
        from_plain(Toy, {"round": 3})
    with pytest.raises(ValueError, match=r"did you mean inner\.depth"):
        from_plain(Toy, {"inner": {"dept": 3}})


def test_a_command_line_gives_the_types_and_the_bounds_hold():
    words = ["--rounds", "7", "--clip=inf", "--inner.depth", "3", "--sizes", "[5, 1]", "--rate=-0", "--on", "true"]
    with pytest.raises(ValueError, match="got rate -0,"):
        parse("", words, Toy)
    (toy,) = parse("", [*words, "--rate", "1e-3"], Toy)
    assert (toy.rounds, toy.clip, toy.inner, toy.sizes, toy.rate) == (7, math.inf, Inner(3), (5, 1), 1e-3)
    assert toy.on is True
    (toy,) = parse("", ["--clip", "null", "--inner", "{depth: 2}", "--inner.depth=4", "--name", "null"], Toy)
    assert (toy.clip, toy.inner, toy.name) == (None, Inner(4), "null")
    assert "--rounds INT          How often. (default: 1)" in build_parser("", Schema({"toy": Toy})).format_help()


def test_texts_of_a_command_line_become_numbers_where_they_can():
    found = typed(Toy, {"rounds": "7", "inner": {"depth": "2"}, "rate": "fast", "kind": "word", "other": "5"})
    assert found == {"rounds": 7, "inner": {"depth": 2}, "rate": "fast", "kind": "word", "other": "5"}
