"""One self-contained HTML page from sections: headings, paragraphs, tables, plotly figures; no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fedecider.federation.record import write_text
from fedecider.report.answer import Answer

STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --soft: #5a6270; --ground: #fff; --card: #f6f7f9; --line: #d5d9e0;
  --link: #0b5cad; --warn: #fff4e0; --edge: #c96f00; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --soft: #a3abb8; --ground: #15181c; --card: #1e2227; --line: #3a4049; --link: #7db8f2;
    --warn: #33270f; --edge: #e59a2f; }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; color: var(--text); background: var(--ground);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0.5rem 0 0; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 2.5rem 0 0.5rem; padding-top: 0.5rem;
  border-top: 1px solid var(--line); }
p, li { max-width: 46rem; }
a { color: var(--link); }
.subtitle { color: var(--soft); margin: 0.25rem 0 1rem; }
.conclusion h2 { margin: 0; padding: 0; border: 0; font-size: 1rem; color: var(--soft); }
.conclusion p { margin: 0 0 0.75rem; }
.conclusion .answer { font-size: 1.3rem; line-height: 1.35; font-weight: 600; margin: 0.25rem 0 0.75rem; }
details { border-top: 1px solid var(--line); }
summary { padding: 0.6rem 0; cursor: pointer; }
summary h2 { display: inline; margin: 0; padding: 0; border: 0; }
.downloads a { display: inline-block; margin: 0 0.75rem 0.5rem 0; padding: 0.25rem 0.75rem; font-size: 0.875rem;
  border: 1px solid var(--link); border-radius: 0.4rem; text-decoration: none; }
.warnings { background: var(--warn); border: 0; border-left: 0.3rem solid var(--edge); padding: 0 1rem;
  margin: 1rem 0; }
.warnings h2 { font-size: 1rem; }
.warnings li { max-width: none; }
.warnings ul { margin: 0; padding: 0 0 0.75rem 1.25rem; }
.table { overflow-x: auto; margin: 1rem 0; }
.table:focus-visible, .plot:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: 0.875rem; min-width: min(100%, 20rem); }
caption { text-align: left; color: var(--soft); padding: 0.25rem 0; }
caption span { position: sticky; left: 0; display: block; max-width: min(100%, 100vw - 2rem); }
th, td { padding: 0.3rem 0.75rem 0.3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: normal; max-width: 30rem; }
thead th { border-bottom-width: 2px; white-space: nowrap; }
tbody th { font-weight: 600; }
tbody th.long { overflow-wrap: anywhere; min-width: 6.5rem; }
td.long { overflow-wrap: anywhere; min-width: 11rem; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums;
  padding-left: 0.75rem; }
.bar { display: block; width: 100%; min-width: 3.5rem; height: 0.3rem; background: linear-gradient(to right,
  var(--line) var(--low), var(--link) var(--low) var(--high), var(--line) var(--high)); border-radius: 0.15rem; }
.bar::before { content: ""; display: block; width: 1px; height: 100%; margin-left: var(--zero);
  background: var(--text); }
.interval { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.table { position: relative; }
figure { margin: 1rem 0; padding: 0.75rem; border: 1px solid var(--line); border-radius: 0.5rem; }
.js-plotly-plot :not(.heatmap-label):not(.hovertext) > text { fill: var(--text) !important; }
figcaption { font-weight: 600; font-size: 0.9375rem; margin-bottom: 0.25rem; }
.plot { overflow-x: auto; }
footer { margin-top: 3rem; color: var(--soft); font-size: 0.875rem; border-top: 1px solid var(--line); }
@media (max-width: 30rem) {
  td:last-child:not(.number) { min-width: 11rem; } /* words in a column out of sight would make the rows high */
}
@media print {
  :root { color-scheme: light; --text: #000; --soft: #333; --ground: #fff; --card: #fff; --line: #999; --link: #000;
    --warn: #fff; --edge: #000; }
  @page { margin: 15mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .downloads, .bar { display: none; }
  details::details-content { content-visibility: visible; block-size: auto; }
  .table, .plot { overflow: visible; }
  .plot > div { min-width: 0 !important; }
  .warnings { border: 1px solid #999; }
  table { font-size: 8.5pt; max-width: 100%; }
  th, td, td.number, thead th { white-space: normal; overflow-wrap: anywhere; }
  .interval { display: block; position: static; width: auto; height: auto; clip-path: none; }
  thead { display: table-header-group; }
  tr, figure, figcaption { break-inside: avoid; }
  h2, caption { break-after: avoid; }
}
"""
"""Small screens first, dark by preference, print; nothing is loaded."""

PRINT_WIDTH = 660
"""Pixels between the margins of a printed page, A4 or Letter; drawings do not shrink by themselves."""

PARTS_SCRIPT = f"""
(function () {{
  var folded = [], printing = false;
  function plots(part) {{ return part.querySelectorAll(".js-plotly-plot"); }}
  function all(change) {{ plots(document).forEach(function (plot) {{ Plotly.relayout(plot, change); }}); }}
  document.querySelectorAll("details").forEach(function (part) {{
    part.addEventListener("toggle", function () {{
      if (part.open && !printing) {{ plots(part).forEach(function (plot) {{ Plotly.Plots.resize(plot); }}); }}
    }});
  }});
  window.addEventListener("beforeprint", function () {{
    printing = true;
    folded = document.querySelectorAll("details:not([open])");
    folded.forEach(function (part) {{ part.open = true; }});
    all({{autosize: false, width: {PRINT_WIDTH}}});
  }});
  window.addEventListener("afterprint", function () {{
    all({{autosize: true, width: null}});
    folded.forEach(function (part) {{ part.open = false; }});
    printing = false;
  }});
}})();
"""
"""A drawing that was folded away has no width until its part is opened; paper gets every part."""


class PageTable(NamedTuple):
    """A small table of finished texts."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


class Download(NamedTuple):
    """A file that the page holds, such as a table as CSV."""

    name: str
    text: str


class Section(NamedTuple):
    """One part of the page: a heading, the paragraphs, the tables, the figures, the files."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[PageTable] = ()
    figures: Sequence[go.Figure] = ()
    downloads: Sequence[Download] = ()


class Conclusion(NamedTuple):
    """What stands first on a page; see `fedecider.report.conclusion`."""

    answer: Answer
    paragraphs: Sequence[str] = ()
    """Folded away."""
    table: PageTable | None = None
    figure: go.Figure | None = None


POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data: blob:"
"""What a browser may do for this page: run what is in it, and fetch nothing. (Evaluation: plotly's WebGL traces.)"""
CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False, "plotlyServerURL": ""}
CLEAR, GRID = "rgba(0,0,0,0)", "rgba(128,128,128,0.3)"
PANEL_WIDTH, DEFAULT_HEIGHT = 230, 420
"""Least width of one panel and height of a figure without one, in pixels; a wider figure scrolls in its own box."""
NUMBER = re.compile(r"[-+−]?[\d.,]+( ?[%a-zA-Z]{1,3})?( \[.*\])?|-|")
INTERVAL = re.compile(r"(N) \[(N), (N)\]".replace("N", r"[-+]?\d+(?:\.\d+)?"), re.ASCII)
LONG, LONG_NAME = 40, 12
"""Characters from which on a cell or a row's name may break anywhere, so that no long word widens its table."""


def write_page(
    path: Path,
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    warnings: Sequence[str] = (),
    conclusion: Conclusion | None = None,
) -> Path:
    """Write one HTML file that needs nothing else: plotly.js is inside once, about 5 MB; returns ``path``.

    ``conclusion`` is the first screen: its answer, its figure, its table. All else is folded away under its title,
    doubts and warnings first; a page with one section and no conclusion
    shows it. Every text is escaped: titles and names come from foreign data. The same input gives the same bytes. The
    file is written beside its place and renamed.

    Raises:
        ValueError: no section, or a table row whose length is not that of the header.
    """
    if not sections:
        raise ValueError("got no sections, expected at least one: a page needs something to show")
    above, doubts = "", [*warnings]
    if conclusion is not None:
        above, doubts = _conclusion(conclusion), [*conclusion.answer.doubts, *warnings]
        if conclusion.paragraphs:
            sections = [Section("Summary", conclusion.paragraphs), *sections]
    whole = conclusion is None and len(sections) == 1
    body = [_doubts(doubts, whole or conclusion is None)]
    body += [_section(section, number, whole) for number, section in enumerate(sections, 1)]
    drawn = any(section.figures for section in sections) or (conclusion is not None and conclusion.figure is not None)
    script = "" if whole and not drawn else PARTS_SCRIPT
    html = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
{f"<script>{get_plotlyjs()}</script>" if drawn else ""}
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="subtitle">{escape(subtitle)}</p>
</header>
<main>
{above}{"".join(body)}</main>
<footer><p>This file is self-contained. It may show histories of customers: look before you send it.</p></footer>
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html)
    return path


def _conclusion(conclusion: Conclusion) -> str:
    """The first screen."""
    parts = [
        '<h2 id="conclusion">Recommendation</h2>',
        f'<p class="answer">{escape(conclusion.answer.lines[0])}</p>',
        *(f"<p>{escape(line)}</p>" for line in conclusion.answer.lines[1:]),
    ]
    if conclusion.figure is not None:
        parts.append(_figure(conclusion.figure, "figure-0-1"))
    if conclusion.table is not None:
        parts.append(_table(conclusion.table, "Answer", 1))
    return "\n".join(['<section class="conclusion" aria-labelledby="conclusion">', *parts, "</section>\n"])


def _doubts(doubts: Sequence[str], shown: bool) -> str:
    if not doubts:
        return ""
    items = "\n".join(f"<li>{escape(text)}</li>" for text in doubts)
    title = f"Caveats ({len(doubts)})"
    return _folded("warnings", title, [f"<ul>\n{items}\n</ul>"], shown, ' class="warnings"')


def _section(section: Section, number: int, shown: bool) -> str:
    parts = [f"<p>{escape(paragraph)}</p>" for paragraph in section.paragraphs]
    parts += [_table(table, section.title, place) for place, table in enumerate(section.tables, 1)]
    parts += [_figure(figure, f"figure-{number}-{place}") for place, figure in enumerate(section.figures, 1)]
    if section.downloads:
        parts.append(f'<p class="downloads">{" ".join(map(_link, section.downloads))}</p>')
    return _folded(f"section-{number}", section.title, parts, shown)


def _folded(name: str, title: str, parts: Sequence[str], shown: bool, css: str = "") -> str:
    heading = f'<summary><h2 id="{name}">{escape(title)}</h2></summary>'
    return "\n".join([f"<details{css}{' open' if shown else ''}>", heading, *parts, "</details>\n"])


def _link(file: Download) -> str:
    """A link that saves the file; it is in the page, so that this works without a server."""
    kind = "text/csv" if file.name.endswith(".csv") else "text/plain"
    address = f"data:{kind};charset=utf-8,{quote(file.text, safe=',;:@+[]()')}"
    return f'<a download="{escape(file.name)}" href="{escape(address)}">Download {escape(file.name)}</a>'


def _table(table: PageTable, title: str, number: int) -> str:
    """A table in a box of its own, which scrolls (also by keyboard) where the page is too narrow."""
    wrong = [len(row) for row in table.rows if len(row) != len(table.header)]
    if wrong:
        raise ValueError(f"got a row of {wrong[0]} cells in {title!r}, expected {len(table.header)} as in the header")
    columns = [[row[column] for row in table.rows] for column in range(len(table.header))]
    right = [all(map(NUMBER.fullmatch, cells)) for cells in columns]
    classes = [' class="number"' if column and one else "" for column, one in enumerate(right)]
    scales = [_scale(cells) for cells in columns]
    head = "".join(f'<th scope="col"{css}>{escape(cell)}</th>' for cell, css in zip(table.header, classes, strict=True))
    caption = f"<caption><span>{escape(table.caption)}</span></caption>" if table.caption else ""
    rows = "".join(_row(row, classes, scales) for row in table.rows)
    label = escape(f"{title}, table {number}")  # no two regions of a page may have one name
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{label}">\n<table>{caption}\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>"
    )


def _scale(cells: Sequence[str]) -> tuple[float, float]:
    """Ends of the axis that the bars of a column share; zero is on it."""
    ends = [float(end) for cell in cells if (found := INTERVAL.fullmatch(cell)) for end in found.groups()]
    return min(0.0, *ends, 0.0), max(0.0, *ends, 0.0)


def _breakable(name: str) -> str:
    """Escaped; setting names and labels break where a reader would."""
    return re.sub(r"([_.])", r"\1<wbr>", escape(name))


def _row(row: Sequence[str], classes: Sequence[str], scales: Sequence[tuple[float, float]]) -> str:
    wide, name = ' class="long"' if len(row[0]) > LONG_NAME else "", _breakable(row[0])
    cells = [f'<th scope="row"{wide}>{name}</th>' if name else "<td></td>"]  # nothing: the row above goes on
    for cell, css, scale in zip(row[1:], classes[1:], scales[1:], strict=True):
        css = css or (' class="long"' if len(cell) > LONG else "")
        cells.append(f"<td{css}>{_cell(cell, scale)}</td>")
    return f"<tr>{''.join(cells)}</tr>\n"


def _cell(text: str, scale: tuple[float, float]) -> str:
    """Escaped; an interval behind a number is a bar under it, and in figures for print and for screen readers."""
    found, (first, last) = INTERVAL.fullmatch(text), scale
    if found is None or first == last:
        return escape(text)
    low, high, zero = (100 * (float(end) - first) / (last - first) for end in (found[2], found[3], 0.0))
    interval = f"[{found[2]}, {found[3]}]"
    style = f"--low:{low:.1f}%;--high:{high:.1f}%;--zero:{zero:.1f}%"
    bar = f'<span class="bar" title="{interval}" style="{style}"></span>'
    return f'{found[1]} <span class="interval">{interval}</span>{bar}'


def _figure(figure: go.Figure, name: str) -> str:
    """A figure with its title as caption, which can break where a drawn title would be cut off."""
    caption, fitted = escape(str(figure.layout.title.text or "")), _fitted(figure)
    html = fitted.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        config=CONFIG,
        default_width="100%",
        default_height=f"{fitted.layout.height or DEFAULT_HEIGHT}px",
    )
    labelled = f' aria-labelledby="{name}-caption"'
    inner = f'<div style="min-width:{PANEL_WIDTH * _num_columns(figure)}px">\n{html}\n</div>'
    box = f'<div class="plot" role="group" tabindex="0"{labelled}>'  # scrolls by keyboard too
    head = f'<figcaption id="{name}-caption">{caption}</figcaption>'
    return f"<figure{labelled}>\n{head}\n{box}\n{inner}\n</div>\n</figure>"


def _fitted(figure: go.Figure) -> go.Figure:
    """A copy for a page of any width: legend below, no drawn title, and no dragging, so that a finger can scroll."""
    fitted = go.Figure(figure)
    fitted.update_layout(dragmode=False, font={"family": "system-ui, sans-serif"}, width=None)
    fitted.update_layout(paper_bgcolor=CLEAR, plot_bgcolor=CLEAR)  # the page's own ground, light or dark
    fitted.update_layout(title={"text": ""}, margin={"t": 40 if figure.layout.annotations else 20})
    if not figure.layout.sliders and figure.layout.legend.orientation is None:
        fitted.update_layout(
            legend={"orientation": "h", "xref": "container", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom"}
        )
    fitted.update_xaxes(automargin=True, gridcolor=GRID, zerolinecolor=GRID)
    fitted.update_yaxes(automargin=True, gridcolor=GRID, zerolinecolor=GRID)
    return fitted


def _num_columns(figure: go.Figure) -> int:
    """Panels that stand side by side: different left edges of x axes."""
    axes = [figure.layout[name] for name in figure.layout if name.startswith("xaxis")]
    return len({round(axis.domain[0], 3) if axis.domain else 0.0 for axis in axes}) or 1
