"""The trials of a search in their file."""

from fedecider.comparison.tuning import Journal, Outcome, Search, Trial, importances, is_used_up, proposal
from fedecider.search_space import Real, Whole

SEARCH = Search({"rate": Real(0.01, 1.0), "depth": Whole(1, 6)}, {"rate": 0.5, "depth": 2, "width": 4}, ({},), 0)


def add(journal, num, **more):
    for number in range(num):
        rate = (number + 1) / 20
        setting = {"rate": rate, "depth": number % 6 + 1, **more}
        journal.add(Trial(setting, Outcome(rate, 1, 1), "", 0.1))


def test_importances_are_those_of_the_trials_within_the_space(tmp_path):
    """The score is the rate."""
    journal = Journal(tmp_path / "journal.jsonl", SEARCH)
    add(journal, 9)
    journal.add(Trial({"rate": 0.3}, None, "failed", 0.1))
    journal.add(Trial({"width": 8}, Outcome(0.9, 1, 1), "", 0.1))
    journal.add(Trial({"rate": 7.0}, Outcome(0.9, 1, 1), "", 0.1))
    assert importances(journal) == {}, "nine finished within the space"
    journal.add(Trial({"rate": 0.85}, Outcome(0.85, 1, 1), "", 0.1))
    shares = importances(journal)
    assert list(shares) == ["rate", "depth"]
    assert shares["rate"] > 0.9
    alone = Journal(tmp_path / "alone.jsonl", SEARCH)
    add(alone, 9)
    alone.add(Trial({"rate": 0.85}, Outcome(0.85, 1, 1), "", 0.1))
    assert importances(alone) == shares, "the others change nothing"
    assert importances(Journal(tmp_path / "journal.jsonl", SEARCH)) == shares


def test_a_candidate_with_a_tuple_is_not_tried_again_after_a_resume(tmp_path):
    grid = ({}, {"layers": (4, 8)}, {"layers": ((1, 2), 3)}, {"layers": None})
    search = Search({}, {"layers": (2,)}, grid, 0)
    for setting in grid:
        journal = Journal(tmp_path / "journal.jsonl", search)  # read anew before every trial
        assert proposal(search, [trial.tried for trial in journal.trials()]) == setting
        journal.add(Trial(setting, Outcome(0.5, 1, 1), "", 0.1))
    read = [trial.tried for trial in Journal(tmp_path / "journal.jsonl", search).trials()]
    assert [one.setting for one in read] == list(grid)  # tuples again, not lists
    assert is_used_up(search, read)
    assert proposal(search, read) is None
