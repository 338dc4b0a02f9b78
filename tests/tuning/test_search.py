"""Which settings are proposed, what a method may declare, and what every method of the package declares."""

import dataclasses
import math
import sys
from typing import Any, NamedTuple

import pytest
from slow import slow

from embedding_fr.config import EmbeddingTraining
from embedding_fr.methods import METHODS as EMBEDDING
from embedding_fr.setup import EmbeddingRunConfig
from fedecider.baselines import BASELINES
from fedecider.comparison import tuning as search_module
from fedecider.comparison.compare import Cell, Entry, fill
from fedecider.comparison.tuning import (
    Search,
    Tried,
    best_of,
    check_budget,
    is_used_up,
    proposal,
    search_of,
    shortfall,
    value_of,
    with_setting,
)
from fedecider.cross_silo.settings import RunConfig
from fedecider.methods import METHODS as LLM
from fedecider.methods import RATES, TRAINING_SPACE
from fedecider.methods.recommender import LocalTraining
from fedecider.running.options import from_plain
from fedecider.running.run_folder import as_plain
from fedecider.search_space import OneOf, Real, Whole, points

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


def test_where_trials_are_shorter_known_settings_and_the_best_three_drawn_run_in_full():
    asked = []

    def cell(kind: str, setting: dict, seed: int) -> Cell:
        asked.append((kind, setting, seed))
        if kind == "run" and setting == {"kind": "b"}:
            raise ValueError("diverged")
        valid = score(setting)
        return Cell({"toy": 1.0 - valid if kind == "run" else valid}, dict)  # in full the order turns round

    def row(short: bool):
        asked.clear()
        run, trial = ((lambda setting, seed, kind=kind: cell(kind, setting, seed)) for kind in ("run", "trial"))
        given = trial if short else None
        search = search_of(Blocks(), SPACE, GRID, 0)
        return fill([Entry("toy", "toy", "federated", ["strict"], run, search, 9, trial=given)], 2)[0]

    found = row(True)
    trials = [setting for kind, setting, _ in asked if kind == "trial"]
    runs = [(setting, seed) for kind, setting, seed in asked if kind == "run"]
    known, drawn = trials[:3], trials[3:]
    assert len(trials) == 9
    best = sorted(drawn, key=score, reverse=True)[:3]
    assert [one for one, _ in runs[:6]] == [*known, *(one for one in drawn if one in best)]
    taken = min((one for one, _ in runs[:6] if one != {"kind": "b"}), key=score)
    assert found.setting == taken, "by the run in full; what failed there is not taken"
    assert runs[6:] == [(taken, 1)], "seed 0 is there"
    assert [one.setting for one in found.trials] == trials
    assert [one.valid for one in found.trials] == [score(one) for one in trials]
    shown = {str(one.setting): one.valid for one in found.tried}
    assert shown == {str(one): None if one == {"kind": "b"} else 1.0 - score(one) for one, _ in runs[:6]}
    assert len(found.cells) == 2
    row(False)
    runs = [(str(setting), seed) for _, setting, seed in asked]
    assert len(runs) == len(set(runs)) == 10, "a trial is the run of seed 0"


def test_a_setting_that_fails_with_another_seed_gives_way_to_the_next_best():
    asked = []

    def run(setting, seed):
        asked.append((setting.get("depth", 0), seed))
        if setting.get("depth", 0) in (5, 4) and seed:
            raise ValueError("diverged")
        return Cell({"toy": setting.get("depth", 0) / 10}, dict)

    search = Search({}, {}, ({}, {"depth": 5}, {"depth": 4}, {"depth": 1}), 0)
    (row,) = fill([Entry("toy", "toy", "federated", ["strict"], run, search, 4)], 2)
    assert row.setting == {"depth": 1}
    assert asked == [(0, 0), (5, 0), (4, 0), (1, 0), (5, 1), (4, 1), (1, 1)]
    only = Search({}, {}, ({"depth": 5},), 0)
    assert fill([Entry("toy", "toy", "federated", ["strict"], run, only, 1)], 2) == [], "none is left"


def test_proposals_depend_on_seed_and_trials_alone():
    whole = play(16)
    search = search_of(Blocks(), SPACE, GRID, 0)
    for number in (0, 3, 8, 15):
        assert proposal(search, whole[:number]) == whole[number].setting
    assert [one.setting for one in play(8, seed=1)][3:] != [one.setting for one in whole[:8]][3:]
    values = [search.values(one.setting) for one in whole]
    assert all(first not in values[:number] for number, first in enumerate(values))


def test_the_sampler_learns_from_scores():
    best = max(one.valid for one in play(40)[20:])
    assert best > max(one.valid for one in play(3))
    search = search_of(Blocks(), SPACE, ({},), 0)
    past = [one for one in play(16) if "inner.width" not in one.setting]
    opposite = [Tried(one.setting, 1.0 - one.valid) for one in past]
    assert proposal(search, past) != proposal(search, opposite)
    beyond = [*past, Tried({"rate": 5.0}, 1.0), Tried({"inner.width": 7}, 1.0)]  # what lies outside the space
    assert proposal(search, beyond) is not None


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
    grid = search._replace(space={}, firsts=({}, {"kind": "b"}))
    assert len(tune(grid, 3, score, "toy")) == 2
    assert "toy: every setting of the search was tried: 2 trials instead of 3\n" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_every_point_of_a_finite_space_is_tried_once(seed, capsys):
    """TPE alone repeats the best ones: with 50 draws for each trial it finds 12 of these 30 points, or 25."""
    space = {"kind": OneOf(("a", "b", None)), "depth": Whole(1, 10)}
    search = search_of(Blocks(), space, ({}, {"kind": "b"}, {"rate": 0.3}), seed)
    tried = tune(search, 40, score, "toy")
    values = [search.values(one.setting) for one in tried]
    assert len(values) == 31  # one candidate is beyond the space
    assert all(one not in values[:number] for number, one in enumerate(values))
    assert is_used_up(search, tried)
    assert not is_used_up(search, tried[:-1])
    assert not is_used_up(search, [one for one in tried if one.setting != {"rate": 0.3}])
    assert proposal(search, tried[:28]) == tried[28].setting, "a function of the trials before"
    assert "31 trials instead of 40" in capsys.readouterr().out


def test_a_space_that_cannot_be_listed_is_not_said_to_be_used_up(monkeypatch):
    search = search_of(Blocks(), {"rate": Real(0.1, 0.101)}, ({},), 0)
    tried = [Tried({}, 0.1), Tried({"rate": 0.101}, 0.2)]
    assert proposal(search, tried) is None, "drawn numbers have three digits"
    assert shortfall(search, tried, 5) == "no other setting was found: 2 trials instead of 5"
    assert points({"depth": Whole(1, 10_000)}) is not None
    wide = {"depth": Whole(1, 10_001)}
    assert points(wide) is None
    large = search_of(Blocks(), wide, ({},), 0)
    stuck = search_module._drawn
    monkeypatch.setattr(
        search_module, "_drawn", lambda *words: stuck(*words) if words[-1] else {}
    )  # TPE that repeats itself
    found = proposal(large, [Tried({}, 0.1)])
    assert 1 <= found["depth"] <= 10_001


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
        blocks = (RunConfig(method=name), LocalTraining(), entry.config())
        yield pytest.param(blocks, {**TRAINING_SPACE, **entry.space}, (*entry.grid, *RATES), id=f"llm-{name}")
    for name, entry in BASELINES.items():
        yield pytest.param((entry.config(),), entry.space, entry.grid, id=f"baseline-{name}")


@pytest.mark.parametrize(("blocks", "space", "grid"), declared())
def test_what_a_method_declares_can_be_run(blocks, space, grid):
    """Candidates and ends of ranges pass the checks of the settings; the start is the first candidate, and can be
    learnt from unless it stands for another setting's value."""
    assert grid[0] == {}
    search = search_of(blocks, space, grid, 0)
    for name, one in space.items():
        start = search.start[name]  # 0 and None take another setting's rate: such a trial tells the sampler nothing
        assert one.holds(start) or not start, name
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
        found = [one.setting for one in tune(search, len(search.firsts) + 2, lambda setting: 0.1, "toy")]
        assert len(found) == len(search.firsts) + 2
        for setting in found:
            with_setting(blocks, setting)


def test_what_is_drawn_has_three_digits():
    drawn = [one.setting.get("rate") for one in play(12)[3:]]
    assert all(value is None or float(f"{value:.3g}") == value for value in drawn)
