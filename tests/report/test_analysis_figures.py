"""Figures of the analyses: what is drawn is what was given, and plotly accepts it."""

import json

import plotly.graph_objects as go
import pytest
import torch

from fedecider.report.figures import (
    alpha_slider,
    convergence_time,
    cosine_heat_map,
    distance_heat_maps,
    group_bars,
    norm_heat_map,
    save_figure,
    shock_curves,
)

DOMAINS = ["crime", "comics", "children"]


def alphas():
    return torch.linspace(-4.0, 3.0, 36, dtype=torch.float64).view(4, 3, 3)


def valid(drawn):
    """The figure after a trip through JSON, which checks every property; the data must be strict JSON."""
    json.dumps(drawn.data, allow_nan=False)
    return go.Figure(json.loads(drawn.figure.to_json()))


def test_the_slider_opens_at_the_selected_round_and_has_a_step_for_each():
    drawn = alpha_slider(alphas(), [1, 2, 3, 4], DOMAINS, 3)
    figure = valid(drawn)
    assert len(figure.data) == 1
    assert torch.allclose(torch.tensor(drawn.figure.data[0].z, dtype=torch.float64), alphas()[2])
    (slider,) = drawn.figure.layout.sliders
    assert slider.active == 2
    assert [step.label for step in slider.steps] == ["1", "2", "3", "4"]
    for step, alpha_KK in zip(slider.steps, alphas().tolist(), strict=True):
        assert step.method == "restyle"
        (change,) = step.args
        assert change["z"] == [alpha_KK]  # a list for each of the one traces
        assert change["text"][0][0][0] == f"{alpha_KK[0][0]:.3f}"
    heat = drawn.figure.data[0]
    assert (heat.zmin, heat.zmax) == (-4.0, 4.0)  # of all rounds: colours of two rounds can be compared
    assert not drawn.figure.frames
    assert drawn.figure.layout.width is None  # it fills what it is given
    assert drawn.data["alpha"] == alphas().tolist()
    with pytest.raises(ValueError, match="selected round 7"):
        alpha_slider(alphas(), [1, 2, 3, 4], DOMAINS, 7)


def test_the_slider_works_without_network(tmp_path):
    html, _ = save_figure(alpha_slider(alphas(), [1, 2, 3, 4], DOMAINS, 3), tmp_path / "slider")
    text = html.read_text(encoding="utf-8")
    assert '"method":"restyle"' in text
    assert 'src="http' not in text


def test_distances_of_items_and_users_stand_side_by_side():
    item_KK = torch.tensor([[0.0, 0.1, 0.2], [0.1, 0.0, 0.3], [0.2, 0.3, 0.0]])
    drawn = distance_heat_maps(item_KK, 2 * item_KK, DOMAINS, "TF-IDF + SVD")
    figure = valid(drawn)
    assert len(figure.data) == 2
    assert torch.allclose(torch.tensor(drawn.figure.data[1].z), 2 * item_KK)
    assert drawn.figure.data[0].zmin == 0.0
    assert drawn.figure.data[0].text[0][1] == "0.100"
    assert all(axis.autorange == "reversed" for axis in drawn.figure.select_yaxes())
    assert "TF-IDF + SVD" in drawn.figure.layout.title.text


def interval(mean, low, high):
    return {"mean": mean, "low": low, "high": high}


def test_bars_have_whiskers_of_unequal_arms_and_gaps_for_empty_groups():
    one = {"hit@5": interval(0.3, 0.1, 0.4), "ndcg@5": interval(0.2, 0.2, 0.2)}
    none = {"hit@5": None, "ndcg@5": None}
    groups = {"crime": {"rare": {"own": one, "other": none}, "often": {"own": one, "other": one}}, "comics": {}}
    drawn = group_bars(groups, "by popularity")
    figure = valid(drawn)
    assert len(figure.data) == 2 * 2 * 2  # metrics, domains, rows
    own, other = drawn.figure.data[:2]
    assert list(own.x) == ["rare", "often"]
    assert list(own.y) == [0.3, 0.3]
    assert own.error_y.array[0] == pytest.approx(0.1)
    assert own.error_y.arrayminus[0] == pytest.approx(0.2)
    assert list(other.y) == [None, 0.3]
    assert list(drawn.figure.data[4].y) == [0.2, 0.2]  # second row: ndcg@5
    assert sum(bool(trace.showlegend) for trace in figure.data) == 2
    with pytest.raises(ValueError, match="got no groups"):
        group_bars({"crime": {}}, "empty")


def test_norms_and_cosines_leave_gaps_for_absent_clients():
    drawn = norm_heat_map([[0.5, 1.5], None, [2.0, 4.0]], ["enc.q", "enc.v"], DOMAINS, 2)
    valid(drawn)
    heat = drawn.figure.data[0]
    assert [list(row) for row in heat.z] == [[0.5, 1.5], [None, None], [2.0, 4.0]]
    assert (list(heat.x), list(heat.y)) == (["enc.q", "enc.v"], DOMAINS)
    assert (heat.zmin, heat.zmax) == (0.0, 4.0)
    cosine = cosine_heat_map([[0.9, -0.1, 0.0], [0.2, 0.8, 0.1], None], DOMAINS, 2)
    valid(cosine)
    heat = cosine.figure.data[0]
    assert (heat.zmin, heat.zmax) == (-1.0, 1.0)
    assert heat.text[0][1] == "-0.100"
    assert list(heat.z[2]) == [None] * 3
    with pytest.raises(ValueError, match="expected 3 rows of 2"):
        norm_heat_map([[0.5, 1.5, 1.0], None, [2.0, 4.0]], ["enc.q", "enc.v"], DOMAINS, 2)


def test_shock_draws_both_sides_of_the_boundary():
    scores = {"pre_upload": {"crime": [0.2, 0.3]}, "post_broadcast": {"crime": [0.1, 0.35]}}
    shock = {"metric": "ndcg@10", "rounds": [1, 2], "scores": scores, "change": {"crime": [-0.1, 0.05]}}
    drawn = shock_curves(shock, 2)
    figure = valid(drawn)
    assert [(trace.name, list(trace.y)) for trace in drawn.figure.data] == [
        ("pre_upload", [0.2, 0.3]),
        ("post_broadcast", [0.1, 0.35]),
    ]
    assert "before the upload" in figure.layout.title.text
    assert drawn.data["change"] == {"crime": [-0.1, 0.05]}


def test_convergence_against_the_seconds_spent():
    drawn = convergence_time([2.0, 3.0, 5.0], [0.1, 0.4, 0.3], 2, [1, 2, 3])
    valid(drawn)
    (line,) = drawn.figure.data
    assert list(line.x) == [2.0, 5.0, 10.0]
    assert list(line.y) == [0.1, 0.4, 0.3]
    assert drawn.figure.layout.shapes[0].x0 == 5.0
    with pytest.raises(ValueError, match="selected round 9"):
        convergence_time([2.0], [0.1], 9, [1])
