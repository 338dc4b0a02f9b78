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


def test_validation_curves_draw_every_variant_on_equal_axes():
    scores = {"own": {"crime": [0.1, 0.2], "comics": [0.3, 0.1]}, "before": {"crime": [0.0, 0.1], "comics": [0.2, 0.2]}}
    figure = figures.validation_curves(scores, [1, 2], selected_round=2, colours={"before": "#123456"})
    drawn = {(trace.xaxis, trace.name): (list(trace.y), trace.line.color) for trace in figure.data}
    assert drawn == {
        ("x", "own"): ([0.1, 0.2], figures.COLOURS[0]),
        ("x", "before"): ([0.0, 0.1], "#123456"),
        ("x2", "own"): ([0.3, 0.1], figures.COLOURS[0]),
        ("x2", "before"): ([0.2, 0.2], "#123456"),
    }
    axes = list(figure.select_yaxes())
    assert [axis.rangemode for axis in axes] == ["tozero"] * 2
    assert axes[1].matches == "y"  # a curve that is higher is better
    assert [shape.x0 for shape in figure.layout.shapes] == [2, 2]
    assert sum(trace.showlegend for trace in figure.data) == 2
    with pytest.raises(ValueError, match="zip"):
        figures.validation_curves(scores, [1, 2, 3])


def test_no_two_of_many_lines_look_alike():
    curves = {"panel": {f"method {number}": [[1, 0.1], [2, 0.2]] for number in range(20)}}
    looks = [(trace.line.color, trace.line.dash) for trace in figures.convergence_curves(curves).data]
    assert len(set(looks)) == 20


def test_distances_of_items_and_users_stand_side_by_side():
    item_KK = torch.tensor([[0.0, 0.1, 0.2], [0.1, 0.0, 0.3], [0.2, 0.3, 0.0]])
    figure = figures.distance_heat_maps(item_KK, 2 * item_KK, DOMAINS, "TF-IDF + SVD")
    assert len(valid(figure).data) == 2
    assert torch.allclose(torch.tensor(figure.data[1].z), 2 * item_KK)
    assert all(axis.autorange == "reversed" for axis in figure.select_yaxes())
    assert "TF-IDF + SVD" in figure.layout.title.text


def test_bars_have_whiskers_of_unequal_arms_and_gaps_for_empty_groups():
    both = {"hit@5": {"mean": 0.3, "low": 0.1, "high": 0.4}, "ndcg@5": {"mean": 0.2, "low": 0.2, "high": 0.2}}
    none = {"hit@5": None, "ndcg@5": None}
    groups = {"crime": {"rare": {"own": both, "other": none}, "often": {"own": both, "other": both}}, "comics": {}}
    figure = figures.group_bars(groups, "by popularity")
    assert len(valid(figure).data) == 2 * 2 * 2  # metrics, domains, entries
    own, other = figure.data[:2]
    assert (list(own.x), list(own.y)) == (["rare", "often"], [0.3, 0.3])
    assert own.error_y.array[0] == pytest.approx(0.1)
    assert own.error_y.arrayminus[0] == pytest.approx(0.2)
    assert (list(other.x), list(other.y)) == (["often"], [0.3])
    assert list(figure.data[4].y) == [0.2, 0.2]  # second row of panels: ndcg@5
    assert sum(bool(trace.showlegend) for trace in figure.data) == 2


def test_norms_and_cosines_leave_gaps_for_absent_clients():
    heat = valid(figures.norm_heat_map([[0.5, 1.5], None, [2.0, 4.0]], ["enc.q", "enc.v"], DOMAINS, 2)).data[0]
    assert [list(row) for row in heat.z] == [[0.5, 1.5], [None, None], [2.0, 4.0]]
    assert (list(heat.x), list(heat.y)) == (["enc.q", "enc.v"], DOMAINS)
    assert (heat.zmin, heat.zmax) == (0.0, 4.0)
    heat = valid(figures.cosine_heat_map([[0.9, -0.1, 0.0], [0.2, 0.8, 0.1], None], DOMAINS, 2)).data[0]
    assert (heat.zmin, heat.zmax) == (-1.0, 1.0)
    assert list(heat.z[2]) == [None] * 3


def test_shock_draws_both_sides_of_the_boundary():
    scores = {"pre_upload": {"crime": [0.2, 0.3]}, "post_broadcast": {"crime": [0.1, 0.35]}}
    figure = valid(figures.shock_curves({"metric": "ndcg@10", "rounds": [1, 2], "scores": scores}, 2))
    assert {trace.name: list(trace.y) for trace in figure.data} == {
        "pre_upload": [0.2, 0.3],
        "post_broadcast": [0.1, 0.35],
    }


def test_convergence_against_the_seconds_spent():
    seconds, scores = [2.0, 3.0, 5.0], [0.1, 0.4, 0.3]
    records = [
        {"round": number, "train_s": train_s, "score": score}
        for number, (train_s, score) in enumerate(zip(seconds, scores, strict=True), 1)
    ]
    figure = valid(figures.convergence_time(records, 2))
    assert list(figure.data[0].x) == [2.0, 5.0, 10.0]
    assert list(figure.data[0].y) == scores
    assert figure.layout.shapes[0].x0 == 5.0
