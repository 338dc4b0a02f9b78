"""Figures: what is drawn is what was given, and plotly accepts it."""

import json

import plotly.graph_objects as go
import pytest
import torch

from fedecider.report import figures

DOMAINS = ["crime", "comics", "children"]
ALPHA_RKK = torch.linspace(-4.0, 3.0, 36, dtype=torch.float64).view(4, 3, 3)


def valid(figure):
    """The figure after a trip through JSON, which checks every property."""
    return go.Figure(json.loads(figure.to_json()))


def test_the_slider_opens_at_the_selected_round_and_has_a_step_for_each():
    figure = figures.alpha_slider(ALPHA_RKK, [1, 2, 3, 4], DOMAINS, 3)
    (heat,) = valid(figure).data
    assert torch.allclose(torch.tensor(figure.data[0].z, dtype=torch.float64), ALPHA_RKK[2])
    assert list(heat.y) == DOMAINS
    assert figure.layout.yaxis.autorange == "reversed"  # rows are clients, the first on top
    assert (heat.zmin, heat.zmax) == (-4.0, 4.0)  # of all rounds, white is zero: colours of two rounds can be compared
    (slider,) = figure.layout.sliders
    assert slider.active == 2
    assert [step.label for step in slider.steps] == ["1", "2", "3", "4"]
    for step, alpha_KK in zip(slider.steps, ALPHA_RKK.tolist(), strict=True):
        assert (step.method, step.args[0]["z"]) == ("restyle", [alpha_KK])
    gap_RKK = torch.full((1, 2, 2), float("nan"))
    assert figures.alpha_slider(gap_RKK, [1], ["a", "b"], 1).data[0].zmax == 1.0


def test_bars_have_whiskers_of_unequal_arms_and_gaps_for_empty_groups():
    both = {"hit@5": {"mean": 0.3, "low": 0.1, "high": 0.4}, "ndcg@5": {"mean": 0.2, "low": 0.2, "high": 0.2}}
    none = {"hit@5": None, "ndcg@5": None}
    groups = {"crime": {"rare": {"own": both, "other": none}, "often": {"own": both, "other": both}}, "comics": {}}
    figure = figures.group_bars(groups, "by popularity")
    assert len(valid(figure).data) == 2 * 2 * 2  # metrics, domains, entries
    own, other = figure.data[:2]
    assert (list(own.x), list(own.y)) == (["rare", "often"], [30.0, 30.0])
    assert own.error_y.array[0] == pytest.approx(10)
    assert own.error_y.arrayminus[0] == pytest.approx(20)
    assert (list(other.x), list(other.y)) == (["often"], [30.0])
    assert list(figure.data[4].y) == [20.0, 20.0]  # second row of panels: ndcg@5
    assert sum(bool(trace.showlegend) for trace in figure.data) == 2


def test_bars_of_companies_stand_one_below_the_other_the_first_on_top():
    value = {"mean": 3.0, "low": 1.0, "high": 4.0}
    names = ["mean", "a" * 20 + "_north"]
    values = {"joined": dict.fromkeys(names, value), "alone": {names[0]: value, names[1]: None}}
    figure = figures.client_bars(values, "a title", {"joined": "#111", "alone": "#222"})
    joined, alone = valid(figure).data
    assert (joined.orientation, list(joined.y), list(joined.x)) == ("h", names, [3.0, 3.0])
    assert (joined.error_x.array[0], joined.error_x.arrayminus[0]) == (1.0, 2.0)
    assert list(alone.y) == ["mean"]
    assert list(figure.layout.yaxis.tickvals) == names
    assert "".join(figure.layout.yaxis.ticktext).replace("<br>", "") == "".join(names)
    assert max(len(line) for text in figure.layout.yaxis.ticktext for line in text.split("<br>")) <= 17
    assert figure.layout.yaxis.autorange == "reversed"
    assert figures.client_bars({"joined": {"mean": value}}, "", {"joined": "#111"}).layout.height < figure.layout.height
