"""Figures as self-contained HTML (plotly.js inside, no network) with the drawn data beside them as compact JSON.

Shape legend: R rounds, K clients (domains); alpha_RKK[r, i, j] is the weight of client i for the direction of client
j, K clients (domains), M adapted modules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from fedecider.federation.record import plain, write_text

# Figures as self-contained HTML (plotly.js inside, no network) with the drawn data beside them as compact JSON.

DASHES = ("solid", "dash", "dot", "dashdot")
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#888888")
COLOURS = (*OKABE_ITO, "#8c6d31", "#66a61e", "#9467bd")
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
    """Heat map of the weights of a hybrid's experts: row i is the client, each sums to 1."""
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
        figure.add_vline(x=selected_round, line={"color": "#888", "width": 1}, row=1, col=i + 1)  # pyright: ignore[reportArgumentType]
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
    """Validation ``metric`` over the rounds: one panel per domain with equal axes, one curve per variant (or method).

    ``scores``: variant -> domain -> one value per round. ``selected_round`` is marked when given. ``colours``: of the
    variants, where the page has given them one.
    """
    domains = list(next(iter(scores.values()), {}))
    if not domains:
        raise ValueError("got no scores, expected at least one variant with one domain")
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
            figure.add_vline(x=selected_round, line={"color": "#888", "width": 1}, row=1, col=column + 1)  # pyright: ignore[reportArgumentType]
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


# Figures of the analyses: distances, groups, norms, cosines, the round boundary, fusion weights with a round
# slider.

Row = Sequence[float | None] | None
"""One client's values; None for a client that logged none."""


def alpha_slider(alpha_RKK: Tensor, rounds: Sequence[int], domains: Sequence[str], selected_round: int) -> PlotFigure:
    """Heat map of the fusion weights with a slider over the rounds; it opens at ``selected_round``.

    One trace whose numbers a step replaces: neither frames nor a server are needed, so any page that hands data and
    layout to plotly shows it. The colour scale is one for all rounds and symmetric about zero.
    """
    check_alpha(alpha_RKK, rounds, domains)
    value_RKK = alpha_RKK.double().tolist()
    figure = alpha_heat_map(alpha_RKK, rounds, domains, selected_round).figure
    bound = alpha_bound(alpha_RKK)
    figure.update_traces(zmin=-bound, zmax=bound)
    steps = [
        {"label": str(round), "method": "restyle", "args": [{"z": [value_KK], "text": [_texts(value_KK, 3)]}]}
        for round, value_KK in zip(rounds, value_RKK, strict=True)
    ]
    active = list(rounds).index(selected_round)
    figure.update_layout(
        sliders=[{"active": active, "steps": steps, "currentvalue": {"prefix": "round "}, "pad": {"t": 60}}],
        title={"text": "Fusion weights by round (row: client, column: direction)"},
    )
    data = {"rounds": list(rounds), "selected_round": selected_round, "domains": list(domains), "alpha": value_RKK}
    return PlotFigure(figure, data)


def client_bars(
    values: Mapping[str, Mapping[str, Mapping[str, float] | None]], title: str, colours: Mapping[str, str]
) -> PlotFigure:
    """Bars with 95 % intervals of a few rows, client by client. ``values``: row -> client -> mean, low, high."""
    figure = go.Figure()
    for label, clients in values.items():
        bars = _bars(clients)
        figure.add_trace(bars.update(name=label, marker={"color": colours[label]}))
    style(figure, title)
    figure.update_layout(barmode="group", height=320, margin={"l": 10, "r": 10})
    figure.update_xaxes(type="category")
    figure.update_yaxes(rangemode="tozero")
    return PlotFigure(figure, {"rows": {label: dict(clients) for label, clients in values.items()}})


def distance_heat_maps(item_KK: Tensor, user_KK: Tensor, domains: Sequence[str], encoder: str) -> PlotFigure:
    """Distances between the domains' items and users by the vectors of ``encoder``, side by side."""
    maps = {"item distance": item_KK, "user distance": user_KK}
    figure = make_subplots(rows=1, cols=len(maps), subplot_titles=list(maps), horizontal_spacing=0.09)
    values = {name: matrix.double().tolist() for name, matrix in maps.items()}
    for column, (name, value_KK) in enumerate(values.items(), start=1):
        heat = _heat(value_KK, domains, domains, name, diverging=False, digits=3)
        figure.add_trace(heat, row=1, col=column)
        figure.update_yaxes(autorange="reversed", showticklabels=column == 1, row=1, col=column)
    figure.update_traces(showscale=False)
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category")
    style(figure, f"Distances (1 - cosine of mean vectors; {encoder})")
    return PlotFigure(figure, {"domains": list(domains), "encoder": encoder, "maps": values})


def group_bars(
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]],
    title: str,
    metrics: Sequence[str] = ("hit@5", "ndcg@5"),
    colours: Mapping[str, str] | None = None,
) -> PlotFigure:
    """Bars with 95 % intervals: one panel per domain and metric, one colour per row.

    ``groups``: domain -> label of a group -> row -> metric -> interval (or None where the group is empty).
    ``colours``: of the rows, where the page has given them one.
    """
    domains = list(groups)
    if not domains or not any(groups.values()):
        raise ValueError("got no groups, expected at least one domain with one group")
    rows = list(dict.fromkeys(label for table in groups.values() for group in table.values() for label in group))
    colours = {**colours_of(rows), **(colours or {})}
    titles = [f"{domain}, {metric}" for metric in metrics for domain in domains]
    figure = make_subplots(rows=len(metrics), cols=len(domains), subplot_titles=titles)
    for row, metric in enumerate(metrics, start=1):
        for column, table in enumerate(groups.values(), start=1):
            for label in rows:
                bars = _bars({name: group.get(label, {}).get(metric) for name, group in table.items()})
                marker = {"color": colours[label]}
                bars.update(name=label, legendgroup=label, showlegend=row == column == 1, marker=marker)
                figure.add_trace(bars, row=row, col=column)
    figure.update_xaxes(type="category")
    figure.update_yaxes(rangemode="tozero")
    style(figure, title)
    figure.update_layout(height=300 * len(metrics) + 80, barmode="group")
    plain = {
        domain: {name: {label: dict(group[label]) for label in group} for name, group in table.items()}
        for domain, table in groups.items()
    }
    return PlotFigure(figure, {"metrics": list(metrics), "groups": plain})


def norm_heat_map(
    norm_KM: Sequence[Row], modules: Sequence[str], domains: Sequence[str], selected_round: int
) -> PlotFigure:
    """Frobenius norms of the clients' updates ``B A`` before normalisation: row = client, column = module."""
    value_KM = _full(norm_KM, len(modules), domains)
    figure = go.Figure(_heat(value_KM, modules, domains, "norm", diverging=False, digits=None))
    figure.update_xaxes(type="category", tickangle=-90, automargin=True)
    figure.update_yaxes(title_text="client", type="category", autorange="reversed")
    style(figure, f"Norms of the updates before normalisation, round {selected_round}")
    figure.update_layout(height=320 + 60 * len(domains))
    data = {"round": selected_round, "domains": list(domains), "modules": list(modules), "norm": value_KM}
    return PlotFigure(figure, data)


def cosine_heat_map(cosine_KK: Sequence[Row], domains: Sequence[str], selected_round: int) -> PlotFigure:
    """Mean cosine over modules of each client's new update (row) with the directions it had received (column)."""
    value_KK = _full(cosine_KK, len(domains), domains)
    heat = _heat(value_KK, domains, domains, "cosine", diverging=True, digits=3)
    figure = go.Figure(heat.update(zmin=-1.0, zmax=1.0))
    figure.update_xaxes(title_text="received direction of client", type="category")
    figure.update_yaxes(title_text="new update of client", type="category", autorange="reversed")
    style(figure, f"Cosines of new updates with last round's directions, round {selected_round}")
    return PlotFigure(figure, {"round": selected_round, "domains": list(domains), "cosine": value_KK})


def shock_curves(shock: Mapping[str, Any], selected_round: int, colours: Mapping[str, str] | None = None) -> PlotFigure:
    """Validation score before the upload and after the broadcast over the rounds; ``shock`` from ``boundary_shock``."""
    drawn = validation_curves(shock["scores"], shock["rounds"], shock["metric"], selected_round, colours)
    title = f"Round boundary: validation {shock['metric']} before the upload and after the broadcast"
    drawn.figure.update_layout(title={"text": title})
    return drawn._replace(data={**drawn.data, "change": shock["change"]})


def convergence_time(
    train_s: Sequence[float],
    scores: Sequence[float],
    near_round: int,
    rounds: Sequence[int],
    colour: str = COLOURS[0],
) -> PlotFigure:
    """Validation score against the local training seconds spent so far; the first round near the best is marked.

    ``train_s`` and ``scores``: one per round, all clients together. ``colour``: of the reported model on its page.
    """
    check_round(rounds, near_round)
    spent, total = [], 0.0
    for seconds in train_s:
        total += seconds
        spent.append(total)
    texts, line = [f"round {number}" for number in rounds], {"color": colour}
    figure = go.Figure(go.Scatter(x=spent, y=list(scores), mode="lines+markers", text=texts, line=line))
    figure.add_vline(x=spent[list(rounds).index(near_round)], line={"color": "#888", "width": 1})
    figure.update_xaxes(title_text="local training so far, all clients (s)")
    figure.update_yaxes(title_text="validation ndcg@10", rangemode="tozero")
    style(figure, f"Validation against training time (line: round {near_round}, the first near the best)")
    return PlotFigure(
        figure, {"rounds": list(rounds), "seconds": spent, "scores": list(scores), "near_round": near_round}
    )


def _heat(
    value: Sequence[Sequence[float | None]],
    columns: Sequence[str],
    rows: Sequence[str],
    name: str,
    diverging: bool,
    digits: int | None,
) -> go.Heatmap:
    """A heat map that writes its numbers into the cells when ``digits`` is given."""
    finite = [abs(entry) for row in value for entry in row if entry is not None and math.isfinite(entry)]
    bound = max(finite, default=0.0) or 1.0
    heat = go.Heatmap(
        z=value,
        x=list(columns),
        y=list(rows),
        colorscale="RdBu" if diverging else "Blues",
        zmin=-bound if diverging else 0.0,
        zmax=bound,
        hovertemplate=f"%{{y}}, %{{x}}<br>{name} %{{z:.4f}}<extra></extra>",
        colorbar={"title": {"text": name}},
    )
    return heat if digits is None else heat.update(text=_texts(value, digits), texttemplate="%{text}")


def _bars(intervals: Mapping[str, Mapping[str, float] | None]) -> go.Bar:
    """Bars of means; the whiskers of a percentile interval are not symmetric."""
    mean = [None if one is None else one["mean"] for one in intervals.values()]
    above = [None if one is None else max(one["high"] - one["mean"], 0.0) for one in intervals.values()]
    below = [None if one is None else max(one["mean"] - one["low"], 0.0) for one in intervals.values()]
    whiskers = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
    return go.Bar(x=list(intervals), y=mean, error_y=whiskers)


def _full(rows: Sequence[Row], width: int, domains: Sequence[str]) -> list[list[float | None]]:
    """Every row with ``width`` entries, None for clients without."""
    if len(rows) != len(domains) or any(row is not None and len(row) != width for row in rows):
        sizes = [None if row is None else len(row) for row in rows]
        raise ValueError(f"got rows of sizes {sizes}, expected {len(domains)} rows of {width}: one for each client")
    return [[None] * width if row is None else list(row) for row in rows]


def _texts(value: Sequence[Sequence[float | None]], digits: int) -> list[list[str]]:
    return [["" if entry is None else f"{entry:.{digits}f}" for entry in row] for row in value]
