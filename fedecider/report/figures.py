"""The figures of report pages, by plotly.

Shape legend: K clients (domains), E experts, M adapted modules, R rounds; alpha_RKK[r, i, j] is the weight of client i
for the direction of client j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, Literal

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

DASHES = ("solid", "dash", "dot", "dashdot")
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#888888")
COLOURS = (*OKABE_ITO, "#8c6d31", "#66a61e", "#9467bd")
"""Of entries of a table (models, baselines), in the order of their table."""
MARK = {"color": "#888", "width": 1}
"""The line at a selected round."""

NAME_WIDTH = 16
"""Letters of a company's name in a line beside its bars."""

Matrix = Sequence[Sequence[float | None]]
"""Rows of a heat map; None leaves a cell empty."""


def colours_of(labels: Sequence[str]) -> dict[str, str]:
    """The colour of every entry, in the order of the table."""
    return {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}


def alpha_slider(alpha_RKK: Tensor, rounds: Sequence[int], domains: Sequence[str], selected_round: int) -> go.Figure:
    """Heat map of the fusion weights with a slider over the rounds; it opens at ``selected_round``.

    Row i is the client, column j whose direction it weights. One trace whose numbers a step replaces: any page that
    hands data and layout to plotly shows it. The colour scale is one for all rounds, and symmetric about zero.
    """
    active, value_RKK = list(rounds).index(selected_round), alpha_RKK.double().tolist()
    finite = alpha_RKK[alpha_RKK.isfinite()].abs()
    bound = float(finite.max()) if bool((finite > 0).any()) else 1.0
    figure = go.Figure(_heat(value_RKK[active], domains, domains, "alpha", (-bound, bound)))
    steps = [
        {"label": str(round), "method": "restyle", "args": [{"z": [value_KK]}]}
        for round, value_KK in zip(rounds, value_RKK, strict=True)
    ]
    figure.update_layout(
        sliders=[{"active": active, "steps": steps, "currentvalue": {"prefix": "round "}, "pad": {"t": 60}}]
    )
    return _matrix(figure, "Fusion weights by round", "whose direction", "company")


def validation_curves(
    scores: Mapping[str, Mapping[str, Sequence[float]]],
    rounds: Sequence[int],
    metric: str = "ndcg@10",
    selected_round: int | None = None,
    colours: Mapping[str, str] = {},
) -> go.Figure:
    """Validation ``metric`` over the rounds: one panel per domain with equal axes, one curve per variant.

    ``scores``: variant -> domain -> one value per round. ``selected_round`` is marked when given. ``colours``: of the
    variants, where the page has given them one.
    """
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for variant, per_domain in scores.items():
        for domain, values in per_domain.items():
            panels.setdefault(domain, {})[variant] = list(zip(rounds, values, strict=True))
    lines = {label: {"color": colour} for label, colour in {**colours_of(list(scores)), **colours}.items()}
    figure = _curves(panels, lines, metric, f"Validation {metric}")
    figure.update_traces(mode="lines+markers")
    if selected_round is not None:
        figure.add_vline(x=selected_round, line=MARK)
    return figure


def convergence_curves(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], metric: str = "validation ndcg@10"
) -> go.Figure:
    """One panel per protocol, with equal axes, and one curve per method, over rounds that need not be the same for all.

    ``curves``: panel -> method -> [[round, value], ...].
    """
    methods = dict.fromkeys(method for panel in curves.values() for method in panel)
    dashes = [DASHES[number // len(COLOURS) % len(DASHES)] for number in range(len(methods))]  # no two look alike
    lines = {
        method: {"color": colour, "dash": dash}
        for (method, colour), dash in zip(colours_of(list(methods)).items(), dashes, strict=True)
    }
    return _curves(curves, lines, metric, "Convergence")


def client_bars(
    values: Mapping[str, Mapping[str, Mapping[str, float] | None]], title: str, colours: Mapping[str, str]
) -> go.Figure:
    """Bars with 95 % intervals of a few entries, one client below the other, so that a phone shows all of them with
    their names. ``values``: entry -> client -> mean, low, high."""
    figure = go.Figure([_bars(label, clients, colours[label], "h") for label, clients in values.items()])
    names = list(dict.fromkeys(name for clients in values.values() for name in clients))
    broken = ["<br>".join(wrap(name.replace("_", "_ "), NAME_WIDTH)).replace("_ ", "_") for name in names]
    figure.update_layout(barmode="group", height=130 + len(names) * (14 * len(values) + 14))
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(type="category", tickvals=names, ticktext=broken, autorange="reversed")
    _style(figure, title)
    return figure.update_layout(margin={"l": 10, "r": 10})


def group_bars(
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]],
    title: str,
    metrics: Sequence[str] = ("hit@5", "ndcg@5"),
    colours: Mapping[str, str] = {},
) -> go.Figure:
    """Bars with 95 % intervals, of 100: one panel per domain and metric, one colour per entry.

    ``groups``: domain -> label of a group -> entry -> metric -> interval (or None where the group is empty).
    ``colours``: of the entries, where the page has given them one.
    """
    entries = dict.fromkeys(label for table in groups.values() for group in table.values() for label in group)
    colours = {**colours_of(list(entries)), **colours}
    titles = [f"{domain}, {metric}" for metric in metrics for domain in groups]
    figure = make_subplots(rows=len(metrics), cols=len(groups), subplot_titles=titles)
    for row, metric in enumerate(metrics, start=1):
        for column, table in enumerate(groups.values(), start=1):
            for label in entries:
                intervals = {name: _of_100(group.get(label, {}).get(metric)) for name, group in table.items()}
                bars = _bars(label, intervals, colours[label]).update(showlegend=row == column == 1)
                figure.add_trace(bars, row=row, col=column)
    figure.update_xaxes(type="category")
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(height=300 * len(metrics) + 80, barmode="group")
    return _style(figure, title)


def _style(figure: go.Figure, title: str) -> go.Figure:
    margin = {"l": 60, "r": 20, "t": 80, "b": 60}
    return figure.update_layout(title={"text": title}, template="plotly_white", margin=margin)


def _heat(
    value: Matrix,
    columns: Sequence[str],
    rows: Sequence[str],
    name: str,
    bounds: tuple[float, float],
    digits: int | None = 3,
) -> go.Heatmap:
    """Cells with their numbers where ``digits`` are given; the scale is of two colours where it has two signs."""
    return go.Heatmap(
        z=value,
        x=list(columns),
        y=list(rows),
        zmin=bounds[0],
        zmax=bounds[1],
        colorscale="RdBu" if bounds[0] < 0.0 else "Blues",
        texttemplate=None if digits is None else f"%{{z:.{digits}f}}",
        hovertemplate=f"%{{y}}, %{{x}}<br>{name} %{{z:.4f}}<extra></extra>",
        colorbar={"title": {"text": name}},
    )


def _matrix(figure: go.Figure, title: str, columns: str = "", rows: str = "") -> go.Figure:
    """Heat maps are read as matrices are: the first row on top."""
    figure.update_xaxes(title_text=columns, type="category")
    figure.update_yaxes(title_text=rows, type="category", autorange="reversed")
    return _style(figure, title)


def _curves(
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]],
    lines: Mapping[str, Mapping[str, str]],
    metric: str,
    title: str,
) -> go.Figure:
    """panel -> label -> [[round, value], ...]; every label is in the legend once."""
    figure = make_subplots(rows=1, cols=len(panels), shared_yaxes=True, subplot_titles=list(panels))
    shown: set[str] = set()
    for column, panel in enumerate(panels.values(), start=1):
        for label, points in panel.items():
            x, y = ([point[axis] for point in points] for axis in (0, 1))
            curve = go.Scatter(x=x, y=y, name=label, legendgroup=label, mode="lines", line=dict(lines[label]))
            figure.add_trace(curve.update(showlegend=label not in shown), row=1, col=column)
            shown.add(label)
    figure.update_xaxes(title_text="round")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text=metric, col=1)
    return _style(figure, title)


def _of_100(interval: Mapping[str, Any] | None) -> dict[str, float] | None:
    return None if interval is None else {end: 100 * interval[end] for end in ("mean", "low", "high")}


def _bars(
    label: str,
    intervals: Mapping[str, Mapping[str, float] | None],
    colour: str,
    direction: Literal["v", "h"] = "v",
) -> go.Bar:
    """Bars of means; whiskers end at 0 and 1, so that they need not be symmetric."""
    drawn = {name: interval for name, interval in intervals.items() if interval is not None}
    whiskers = {
        "type": "data",
        "symmetric": False,
        "array": [max(interval["high"] - interval["mean"], 0.0) for interval in drawn.values()],
        "arrayminus": [max(interval["mean"] - interval["low"], 0.0) for interval in drawn.values()],
        "thickness": 1,
    }
    mean = [interval["mean"] for interval in drawn.values()]
    along, across = ("y", "x") if direction == "v" else ("x", "y")
    bar = go.Bar({across: list(drawn), along: mean, f"error_{along}": whiskers}, orientation=direction)
    return bar.update(name=label, legendgroup=label, marker={"color": colour})
