"""Questions about users and what their answers tell, with planted answers."""

import pytest
import torch

from fedecider.audit.membership import questions_about, user_scores
from fedecider.audit.separation import Scored, auc


def test_questions_are_of_the_newest_events_but_the_first():
    asked = questions_about([[1, 2, 3, 4], [7], [5, 6]], 2)
    assert asked.histories == [[1, 2], [1, 2, 3], [5]]
    assert asked.targets.tolist() == [3, 4, 6]
    assert asked.user_Q.tolist() == [0, 0, 1]  # the user with one train event is not asked about


def test_others_stand_behind_members():
    members, others = [[1, 2, 3]], [[4, 5], [6, 7]]
    both = questions_about([*members, *others], 5)
    assert questions_about(members, 5).num_users == 1
    assert both.num_users == 3
    assert both.user_Q.tolist() == [0, 0, 1, 2]
    assert both.targets.tolist() == [2, 3, 5, 7]


def test_scores_by_hand():
    log_prob_Q, reference_Q = torch.tensor([-1.0, -3.0, -2.0]), torch.tensor([-2.0, -3.5, -1.0])
    mean, largest, raw = user_scores(log_prob_Q, reference_Q, torch.tensor([0, 0, 1])).values()
    assert mean.tolist() == pytest.approx([0.75, -1.0])
    assert largest.tolist() == pytest.approx([1.0, -1.0])
    assert raw.tolist() == pytest.approx([-2.0, -2.0])


@pytest.mark.parametrize(("gain", "low", "high"), [(3.0, 0.97, 1.0), (0.0, 0.4, 0.6)])
def test_a_planted_gain_is_found_whatever_is_hard_and_none_is_not(gain, low, high):
    generator = torch.Generator().manual_seed(1)
    user_Q = torch.arange(300).repeat_interleave(3)
    reference_Q = -10.0 * torch.rand(900, generator=generator)  # some users are hard, member or not
    answer_Q = reference_Q + torch.randn(900, generator=generator) + gain * (user_Q < 150)
    mean, _, raw = user_scores(answer_Q, reference_Q, user_Q).values()
    assert low <= auc(Scored(mean[:150], mean[150:])) <= high
    assert auc(Scored(raw[:150], raw[150:])) < 0.97
