"""Figures: what is drawn is what was given; files stand alone."""

import json
import re

import pytest
import torch

from fedecider.report.figures import (
    COLOURS,
    alpha_curves,
    alpha_heat_map,
    convergence_curves,
    save_figure,
    validation_curves,
)

DOMAINS = ["crime", "comics", "children"]


def alphas():
    return torch.linspace(-1.5, 3.0, 36).view(4, 3, 3)


def test_heat_map_shows_the_selected_round_with_rows_as_clients():
    drawn = alpha_heat_map(alphas(), [1, 2, 3, 4], DOMAINS, 3)
    heat = drawn.figure.data[0]
    assert torch.allclose(torch.tensor(heat.z), alphas()[2])
    assert heat.zmin == -heat.zmax  # white means zero, also with negative weights
    assert list(heat.y) == DOMAINS
    assert drawn.figure.layout.yaxis.autorange == "reversed"
    assert drawn.data["alpha"][0][2] == pytest.approx(alphas()[2, 0, 2].item())


def test_curves_draw_what_was_logged_and_mark_the_selected_round():
    drawn = alpha_curves(alphas(), [1, 2, 3, 4], DOMAINS, 2)
    traces = drawn.figure.data
    assert len(traces) == 9
    assert list(traces[5].x) == [1, 2, 3, 4]
    assert list(traces[5].y) == pytest.approx(alphas()[:, 1, 2].tolist())  # client comics, direction of children
    assert traces[5].name == "children"
    assert [t.line.dash for t in traces[3:6]] == ["dash", "solid", "dash"]
    marks = [shape for shape in drawn.figure.layout.shapes if shape.x0 == shape.x1 == 2]
    assert len(marks) == 3
    assert sum(trace.showlegend for trace in traces) == 3


def test_validation_curves_draw_every_variant():
    scores = {"own": {"crime": [0.1, 0.2], "comics": [0.3, 0.1]}, "before": {"crime": [0.0, 0.1], "comics": [0.2, 0.2]}}
    drawn = validation_curves(scores, [1, 2], selected_round=2)
    assert [(t.name, list(t.y)) for t in drawn.figure.data] == [
        ("own", [0.1, 0.2]),
        ("own", [0.3, 0.1]),
        ("before", [0.0, 0.1]),
        ("before", [0.2, 0.2]),
    ]
    axes = list(drawn.figure.select_yaxes())
    assert [axis.rangemode for axis in axes] == ["tozero"] * 2
    assert axes[1].matches == "y"  # equal axes: a curve that is higher is better
    assert drawn.figure.data[2].line.color == COLOURS[1]
    named = validation_curves(scores, [1, 2], colours={"before": COLOURS[0]})
    assert named.figure.data[2].line.color == COLOURS[0]
    with pytest.raises(ValueError, match="2 values of own in crime"):
        validation_curves(scores, [1, 2, 3])


def test_files_stand_alone(tmp_path):
    drawn = alpha_curves(torch.full((2, 3, 3), float("nan")), [1, 2], DOMAINS, 2)
    html, data = save_figure(drawn, tmp_path / "figures" / "alpha_curves")
    text = html.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link)[^>]+(src|href)=", text)
    assert "Plotly.newPlot" in text
    assert len(text) > 1_000_000  # plotly.js is inside
    assert json.loads(data.read_text())["alpha"][0][0] == [None, None, None]
    assert sorted(p.name for p in html.parent.iterdir()) == ["alpha_curves.html", "alpha_curves.json"]


def test_bad_shapes_and_rounds_are_refused():
    with pytest.raises(ValueError, match="expected \\(rounds, clients, clients\\)"):
        alpha_curves(alphas(), [1, 2], DOMAINS, 1)
    with pytest.raises(ValueError, match="selected round 9"):
        alpha_heat_map(alphas(), [1, 2, 3, 4], DOMAINS, 9)


def test_no_two_of_many_lines_look_alike():
    curves = {"panel": {f"method {number}": [[1, 0.1], [2, 0.2]] for number in range(20)}}
    looks = [(trace.line.color, trace.line.dash) for trace in convergence_curves(curves).figure.data]
    assert len(set(looks)) == 20
    both = convergence_curves({"strict": {"a": [[1, 0.1]]}, "paper": {"a": [[1, 0.9]]}}).figure
    assert [axis.rangemode for axis in both.select_yaxes()] == ["tozero"] * 2
    assert both.layout.yaxis2.matches == "y"
