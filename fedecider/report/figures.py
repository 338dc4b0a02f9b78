"""Figures as self-contained HTML (plotly.js inside, no network) with the drawn data beside them as compact JSON.

Shape legend: R rounds, K clients (domains); alpha_RKK[r, i, j] is the weight of client i for the direction of client j.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from fedecider.federation.record import plain, write_text

DASHES = ("solid", "dash", "dot", "dashdot")
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLOURS = (*OKABE_ITO, "#8c6d31", "#7f7f7f", "#9467bd")
"""Of rows of a table (models, baselines), in the order of their table."""
DOMAIN_COLOURS = ("#332288", "#CC6677", "#117733", "#999933", "#AA4499", "#44AA99", "#882255", "#88CCEE")  # Paul Tol
"""Of domains, in client order: other ones, since a colour means one thing on a page."""


class PlotFigure(NamedTuple):
    """A plotly figure and the numbers it draws."""

    figure: go.Figure
    data: dict[str, Any]


def colours_of(labels: Sequence[str]) -> dict[str, str]:
    """The colour of every row, in the order of the table."""
    return {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}


def alpha_heat_map(alpha_RKK: Tensor, rounds: Sequence[int], domains: Sequence[str], selected_round: int) -> PlotFigure:
    """Heat map of the fusion weights at ``selected_round``: row i is the client, column j whose direction it weights.

    The colour scale is symmetric about zero, since weights may be negative.
    """
    check_alpha(alpha_RKK, rounds, domains)
    check_round(rounds, selected_round)
    value_KK = alpha_RKK[list(rounds).index(selected_round)].double().tolist()
    bound = alpha_bound(alpha_RKK[list(rounds).index(selected_round)])
    heat = go.Heatmap(
        z=value_KK,
        x=list(domains),
        y=list(domains),
        colorscale="RdBu",
        zmin=-bound,
        zmax=bound,
        text=[[f"{value:.3f}" for value in row] for row in value_KK],
        texttemplate="%{text}",
        hovertemplate="client %{y}<br>direction of %{x}<br>alpha %{z:.4f}<extra></extra>",
        colorbar={"title": {"text": "alpha"}},
    )
    figure = go.Figure(heat)
    figure.update_xaxes(title_text="direction of client", type="category")
    figure.update_yaxes(title_text="client", type="category", autorange="reversed")
    style(figure, f"Fusion weights, round {selected_round}")
    return PlotFigure(figure, {"round": selected_round, "domains": list(domains), "alpha": value_KK})


def expert_heat_map(weight_KE: Tensor, domains: Sequence[str], experts: Sequence[str]) -> PlotFigure:
    """Heat map of the weights of a memory's experts: row i is the client, each sums to 1."""
    value_KE = weight_KE.double().tolist()
    heat = go.Heatmap(
        z=value_KE,
        x=list(experts),
        y=list(domains),
        colorscale="Blues",
        zmin=0.0,
        zmax=1.0,
        text=[[f"{value:.2f}" for value in row] for row in value_KE],
        texttemplate="%{text}",
        hovertemplate="client %{y}<br>%{x}<br>weight %{z:.4f}<extra></extra>",
        colorbar={"title": {"text": "weight"}},
    )
    figure = go.Figure(heat)
    figure.update_xaxes(title_text="expert", type="category")
    figure.update_yaxes(title_text="client", type="category", autorange="reversed")
    style(figure, "Weights of the experts, all histories")
    return PlotFigure(figure, {"domains": list(domains), "experts": list(experts), "weights": value_KE})


def alpha_curves(alpha_RKK: Tensor, rounds: Sequence[int], domains: Sequence[str], selected_round: int) -> PlotFigure:
    """One panel per client: its K fusion weights over the rounds, selected round marked.

    Round 1 trains no fusion weights, so its point is where they start.
    """
    check_alpha(alpha_RKK, rounds, domains)
    check_round(rounds, selected_round)
    value_RKK = alpha_RKK.double()
    figure = make_subplots(rows=1, cols=len(domains), shared_yaxes=True, subplot_titles=list(domains))
    for i in range(len(domains)):
        for j, direction in enumerate(domains):
            values = value_RKK[:, i, j].tolist()
            line = {"color": DOMAIN_COLOURS[j % len(DOMAIN_COLOURS)], "dash": "solid" if i == j else "dash"}
            trace = go.Scatter(
                x=list(rounds), y=values, name=direction, legendgroup=direction, showlegend=i == 0, line=line
            )
            figure.add_trace(trace, row=1, col=i + 1)
        figure.add_vline(x=selected_round, line={"color": "#444", "width": 1}, row=1, col=i + 1)  # pyright: ignore[reportArgumentType]
    figure.update_xaxes(title_text="round")
    figure.update_yaxes(title_text="alpha", col=1)
    style(figure, f"Fusion weights over the rounds (line: selected round {selected_round}; solid: own direction)")
    data = {"rounds": list(rounds), "selected_round": selected_round, "domains": list(domains)}
    return PlotFigure(figure, {**data, "alpha": value_RKK.tolist()})


def validation_curves(
    scores: Mapping[str, Mapping[str, Sequence[float]]],
    rounds: Sequence[int],
    metric: str = "ndcg@10",
    selected_round: int | None = None,
    colours: Mapping[str, str] | None = None,
) -> PlotFigure:
    """Validation ``metric`` over the rounds: one panel per domain with equal axes, one curve per view (or method).

    ``scores``: view -> domain -> one value per round. ``selected_round`` is marked when given. ``colours``: of the
    views, where the page has given them one.
    """
    domains = list(next(iter(scores.values()), {}))
    if not domains:
        raise ValueError("got no scores, expected at least one view with one domain")
    figure = make_subplots(rows=1, cols=len(domains), shared_yaxes=True, subplot_titles=domains)
    colours = {**colours_of(list(scores)), **(colours or {})}
    for label, per_domain in scores.items():
        for column, domain in enumerate(domains):
            values = list(per_domain.get(domain, ()))
            if len(values) != len(rounds):
                raise ValueError(
                    f"got {len(values)} values of {label} in {domain}, expected one for each of {len(rounds)} rounds"
                )
            trace = go.Scatter(
                x=list(rounds),
                y=values,
                name=label,
                legendgroup=label,
                showlegend=column == 0,
                line={"color": colours[label]},
                mode="lines+markers",
            )
            figure.add_trace(trace, row=1, col=column + 1)
    if selected_round is not None:
        check_round(rounds, selected_round)
        for column in range(len(domains)):
            figure.add_vline(x=selected_round, line={"color": "#444", "width": 1}, row=1, col=column + 1)  # pyright: ignore[reportArgumentType]
    figure.update_xaxes(title_text="round")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text=metric, col=1)
    style(figure, f"Validation {metric}")
    plain = {label: {d: list(v) for d, v in per_domain.items()} for label, per_domain in scores.items()}
    data = {"metric": metric, "rounds": list(rounds), "selected_round": selected_round, "scores": plain}
    return PlotFigure(figure, data)


def convergence_curves(
    curves: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], metric: str = "validation ndcg@10"
) -> PlotFigure:
    """One panel per protocol, with equal axes, and one curve per method, over rounds that need not be the same for all.

    ``curves``: panel -> method -> [[round, value], ...].
    """
    if not curves:
        raise ValueError("got no curves, expected at least one method")
    figure = make_subplots(rows=1, cols=len(curves), shared_yaxes=True, subplot_titles=list(curves))
    methods = list(dict.fromkeys(method for panel in curves.values() for method in panel))
    for column, panel in enumerate(curves.values()):
        for method, points in panel.items():
            trace = go.Scatter(
                x=[point[0] for point in points],
                y=[point[1] for point in points],
                name=method,
                legendgroup=method,
                showlegend=column == next(c for c, other in enumerate(curves.values()) if method in other),
                line=_line_style(methods.index(method)),
                mode="lines",
            )
            figure.add_trace(trace, row=1, col=column + 1)
    figure.update_xaxes(title_text="round")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text=metric, col=1)
    style(figure, "Convergence")
    plain = {
        panel: {method: [list(point) for point in points] for method, points in m.items()}
        for panel, m in curves.items()
    }
    return PlotFigure(figure, {"metric": metric, "curves": plain})


def _line_style(number: int) -> dict[str, str]:
    """Another dash once the colours are used up, so that no two of 32 lines look alike."""
    return {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number // len(COLOURS) % len(DASHES)]}


def save_figure(figure: PlotFigure, path: Path) -> list[Path]:
    """Write ``path`` with suffix .html (about 5 MB: plotly.js is inside) and .json (the data); returns both paths."""
    html, data = path.with_suffix(".html"), path.with_suffix(".json")
    text = figure.figure.to_html(
        include_plotlyjs=True, full_html=True, config={"responsive": True, "displaylogo": False}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(html, text)
    write_text(data, json.dumps(plain(figure.data), allow_nan=False, separators=(",", ":")) + "\n")
    return [html, data]


def check_alpha(alpha_RKK: Tensor, rounds: Sequence[int], domains: Sequence[str]) -> None:
    expected = (len(rounds), len(domains), len(domains))
    if tuple(alpha_RKK.shape) != expected or 0 in expected:
        raise ValueError(
            f"got alpha of shape {tuple(alpha_RKK.shape)}, expected (rounds, clients, clients) = {expected}"
        )


def alpha_bound(alpha: Tensor) -> float:
    """The largest absolute weight, for a colour scale that is symmetric about zero; 1 where there is none."""
    found = alpha[alpha.isfinite()].double().abs()
    return float(found.max()) if bool((found > 0).any()) else 1.0


def check_round(rounds: Sequence[int], selected_round: int) -> None:
    if selected_round not in rounds:
        raise ValueError(f"got selected round {selected_round}, expected one of {list(rounds)}")


def style(figure: go.Figure, title: str) -> None:
    figure.update_layout(title={"text": title}, template="plotly_white", margin={"l": 60, "r": 20, "t": 80, "b": 60})
