"""Which settings are proposed, what a method may declare, and what every method of the package declares."""

import dataclasses
import math
import sys
from typing import Any, NamedTuple

import pytest

from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS as EMBEDDING
from embedding_fr.setup import EmbeddingRunConfig
from fedecider.baselines import BASELINES
from fedecider.comparison.compare import Cell, Entry, fill
from fedecider.comparison.search import Search, Tried, best_of, check_budget, search_of, value_of, with_setting
from fedecider.cross_silo.settings import RunConfig
from fedecider.methods import METHODS as LLM
from fedecider.methods import RATES, TRAINING_SPACE
from fedecider.methods.config import LocalTraining
from fedecider.models.config import EnsembleConfig
from fedecider.running.options import from_plain
from fedecider.running.plain import as_plain
from fedecider.search_space import OneOf, Real, Whole

pytestmark = pytest.mark.whole


@dataclasses.dataclass(frozen=True)
class Inner:
    width: int = 4

    def __post_init__(self):
        if self.width > 9:
            raise ValueError(f"got width {self.width}, expected at most 9")


@dataclasses.dataclass(frozen=True)
class Training:
    rate: float = 0.1
    inner: Inner = Inner()


@dataclasses.dataclass(frozen=True)
class Own:
    kind: str | None = "a"
    depth: int = 2


@dataclasses.dataclass(frozen=True)
class Layers:
    layers: tuple = (2,)


class Blocks(NamedTuple):
    training: Any = Training()
    method: Any = Own()


SPACE = {"rate": Real(0.001, 1.0, log=True), "kind": OneOf(("a", "b", None)), "depth": Whole(1, 6)}
GRID = ({}, {"kind": "b"}, {"rate": 0.1, "kind": "b"}, {"rate": 0.3, "inner.width": 8})


def score(setting: dict) -> float:
    """Best at rate 0.02 and depth 5."""
    rate, depth = setting.get("rate", 0.1), setting.get("depth", 2)
    return 1.0 - 0.2 * abs(math.log10(rate / 0.02)) - 0.05 * abs(depth - 5)


def tune(search: Search, num: int, score, label: str) -> list[Tried]:
    """The trials of a table's row."""

    def run(setting: dict, seed: int) -> Cell:
        return Cell({label: score(setting)}, dict)

    (row,) = fill([Entry(label, label, "federated", ["strict"], run, search, num)], 1)
    return list(row.tried)


def play(num: int, seed: int = 0, grid=GRID) -> list[Tried]:
    return tune(search_of(Blocks(), SPACE, grid, seed), num, score, "toy")


def test_the_start_comes_first_then_the_candidates_then_draws():
    settings = [one.setting for one in play(6)]
    assert settings[:3] == [{}, {"kind": "b"}, {"rate": 0.3, "inner.width": 8}]  # the third candidate is the second one
    assert [one.setting for one in play(6, grid=GRID[1:])] == settings
    for setting in settings[3:]:
        assert set(setting) <= set(SPACE)
        assert all(SPACE[name].holds(value) for name, value in setting.items())
        assert all(value != value_of(Blocks(), name) for name, value in setting.items())


def test_a_setting_that_fails_with_another_seed_gives_way_to_the_next_best():
    asked = []

    def run(setting, seed):
        asked.append((setting.get("depth", 0), seed))
        if setting.get("depth", 0) in (5, 4) and seed:
            raise ValueError("diverged")
        return Cell({"toy": setting.get("depth", 0) / 10}, dict)

    search = Search({}, {}, ({}, {"depth": 5}, {"depth": 4}, {"depth": 1}))
    (row,) = fill([Entry("toy", "toy", "federated", ["strict"], run, search, 4)], 2)
    assert row.setting == {"depth": 1}
    assert asked == [(0, 0), (5, 0), (4, 0), (1, 0), (5, 1), (4, 1), (1, 1)]
    only = Search({}, {}, ({"depth": 5},))
    assert fill([Entry("toy", "toy", "federated", ["strict"], run, only, 1)], 2) == [], "none is left"


def test_the_sampler_learns_from_scores():
    best = max(one.valid for one in play(40)[20:])
    assert best > max(one.valid for one in play(3))
    opposite = tune(search_of(Blocks(), SPACE, GRID), 16, lambda setting: 1.0 - score(setting), "toy")
    assert [one.setting for one in opposite] != [one.setting for one in play(16)]


def test_a_failed_trial_is_told_counts_as_a_trial_and_is_not_chosen(capsys):
    def fails(setting):
        if setting.get("kind") == "b":
            raise ValueError("got b, expected no b")
        return score(setting)

    tried = tune(search_of(Blocks(), SPACE, GRID, 0), 9, fails, "toy")
    assert len(tried) == 9
    assert tried[1] == Tried({"kind": "b"}, None)
    assert "toy, kind b, seed 0: failed: got b, expected no b" in capsys.readouterr().out
    assert tried[best_of(tried)].valid == max(one.valid for one in tried if one.valid is not None)
    assert best_of([Tried({}, None)]) is None
    assert best_of([Tried({}, 0.5), Tried({"a": 1}, 0.5)]) == 0, "the earlier one on ties"


def test_a_space_that_is_used_up_ends_the_search_and_says_so(capsys):
    search = search_of(Blocks(), {"kind": OneOf(("a", "b"))}, ({},), 0)
    assert [one.setting for one in tune(search, 9, score, "toy")] == [{}, {"kind": "b"}]
    assert "toy: every setting of the search was tried: 2 trials instead of 9\n" in capsys.readouterr().out
    assert [one.setting for one in tune(search._replace(space={}), 9, score, "toy")] == [{}]
    assert capsys.readouterr().out == "", "there was nothing to tune"
    grid = search._replace(space={}, candidates=({}, {"kind": "b"}))
    assert len(tune(grid, 3, score, "toy")) == 2
    assert "toy: every setting of the search was tried: 2 trials instead of 3\n" in capsys.readouterr().out


def test_every_point_of_a_finite_space_is_tried_once(capsys):
    """TPE alone would repeat the best ones."""
    space = {"kind": OneOf(("a", "b", None)), "depth": Whole(1, 10)}
    search = search_of(Blocks(), space, ({}, {"kind": "b"}, {"rate": 0.3}))
    tried = tune(search, 40, score, "toy")
    values = [search.values(one.setting) for one in tried]
    assert len(values) == 31  # one candidate is beyond the space
    assert all(one not in values[:number] for number, one in enumerate(values))
    assert "31 trials instead of 40" in capsys.readouterr().out


def test_the_sampler_knows_named_trials_whose_rates_are_multiples_of_others():
    start = {"rate": 0.02, "item": 0.0, "own": None, "kind": "a", "code": True}
    space = {
        "rate": Real(0.001, 1.0, log=True),
        "item": Real(0.01, 100.0, log=True, of="rate"),
        "own": Real(1e-4, 10.0, of="item"),
    }
    search = Search(space, start, ({},))
    assert search.params({}) == {"rate": 0.02, "item": 1.0, "own": 1.0}
    assert search.values({"rate": 0.5}) == {**start, "rate": 0.5, "item": 0.5, "own": 0.5}
    assert search.params({"item": 0.5, "own": 0.1, "code": True}) == {"rate": 0.02, "item": 25.0, "own": 0.2}
    assert search.params({"own": 0.0}) == {}, "0 is no other rate where None is"
    assert search.params({"code": False}) == {}, "beyond the space"
    assert search.from_start({"rate": 0.3, "item": 12.3456, "own": 0.5}) == {"rate": 0.3, "item": 3.7, "own": 1.85}
    assert search.from_start({"rate": 0.02, "item": 1.0, "own": 0.1}) == {"item": 0.02, "own": 0.002}


def test_the_sampler_knows_every_named_trial_of_fedrap_but_the_bounded_distance():
    entry = EMBEDDING["fedrap"]
    for code, num_unknown in ((False, 1), (True, 0)):
        own = {**entry.defaults, **(entry.code if code else {})}
        own = {key: value for key, value in own.items() if key in EmbeddingTraining.__dataclass_fields__}
        method = entry.config(variant="code" if code else "paper")
        grid = [one for one in entry.grid if (one.get("variant") == "code") == code]
        search = search_of((EmbeddingTraining(**own), method), entry.code_space if code else entry.space, grid)
        assert [search.params(one) for one in search.candidates].count({}) == num_unknown
    assert search.params({"personal_learning_rate": 4.0})["personal_learning_rate"] == 0.02  # of the tables' 200


def test_without_optuna_candidates_are_tried_and_draws_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert len(play(3)) == 3
    search = search_of(Blocks(), SPACE, GRID, 0)
    check_budget(search, 3)
    for call in (lambda: check_budget(search, 4), lambda: play(4)):
        with pytest.raises(ValueError, match=r"pip install 'fedecider\[tune\]'"):
            call()
    check_budget(search_of(Blocks(), {"kind": OneOf(("a", "b"))}, ({}, {"kind": "b"}), 0), 9)  # nothing to draw


def test_settings_by_name_in_blocks():
    blocks = with_setting(Blocks(), {"rate": 0.5, "inner.width": 7, "kind": None})
    assert blocks == Blocks(Training(0.5, Inner(7)), Own(None))
    assert [value_of(blocks, name) for name in ("rate", "inner.width", "depth")] == [0.5, 7, 2]
    assert with_setting((Own(),), {"depth": 3}) == (Own(depth=3),)
    with pytest.raises(ValueError, match="expected at most 9"):
        with_setting(Blocks(), {"inner.width": 10})
    for call in (lambda: value_of(Blocks(), "nothing"), lambda: with_setting(Blocks(), {"nothing": 1})):
        with pytest.raises(ValueError, match="got the setting nothing in a search"):
            call()


def test_ranges():
    assert Real(0.1, 1.0).holds(1)
    assert not any(Real(0.1, 1.0).holds(value) for value in (True, "auto", None, 1.1, math.nan))
    assert not Whole(1, 3).holds(2.0)
    assert OneOf((None, "auto", 1)).holds(None)
    assert not OneOf((1,)).holds(True)
    assert [str(one) for one in (Real(1e-4, 1.0, log=True), Whole(1, 3), OneOf((None, 2)))] == [
        "0.0001 to 1, log",
        "1 to 3",
        "None, 2",
    ]


def declared():
    """(name, blocks of settings, space, grid) of all methods and baselines."""
    for name, entry in EMBEDDING.items():
        own = {key: value for key, value in entry.defaults.items() if key in EmbeddingTraining.__dataclass_fields__}
        blocks = (EmbeddingRunConfig(method=name), EmbeddingTraining(**own), entry.config())
        yield pytest.param(blocks, entry.space, entry.grid, id=f"embedding-{name}")
    for name, entry in LLM.items():
        own = {"ensemble": EnsembleConfig(kind="logit")} if name == "counts" else {}
        blocks = (RunConfig(method=name, **own), LocalTraining(), entry.config())
        yield pytest.param(blocks, {**TRAINING_SPACE, **entry.space}, (*entry.grid, *RATES), id=f"llm-{name}")
    for name, entry in BASELINES.items():
        yield pytest.param((entry.config(),), entry.space, entry.grid, id=f"baseline-{name}")


@pytest.mark.parametrize(("blocks", "space", "grid"), declared())
def test_what_a_method_declares_can_be_run(blocks, space, grid):
    """Candidates and ends of ranges pass the checks of the settings; the start is the first candidate, and can be
    learnt from."""
    assert grid[0] == {}
    search = search_of(blocks, space, grid, 0)
    for name, one in space.items():
        assert name in search.params({}), "the start is in the space"
        for value in one.values if isinstance(one, OneOf) else (one.least, one.most):
            changed = with_setting(blocks, {name: value})
            assert value_of(changed, name) == value
            for block in changed:  # the types of the options too
                from_plain(type(block), as_plain(block))
        if isinstance(one, Real):
            assert all(float(f"{end:.3g}") == end for end in (one.least, one.most))
    for setting in grid:
        with_setting(blocks, setting)
    if space:
        found = [one.setting for one in tune(search, len(search.candidates) + 2, lambda setting: 0.1, "toy")]
        assert len(found) == len(search.candidates) + 2
        for setting in found:
            with_setting(blocks, setting)
