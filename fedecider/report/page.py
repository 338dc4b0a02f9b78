"""One self-contained HTML page from sections: headings, paragraphs, tables, plotly figures; no network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fedecider.federation.record import write_text
from fedecider.report.figures import PlotFigure
from fedecider.report.glossary import Words, term_list
from fedecider.report.page_style import PRINT_SCRIPT, STYLE, TERM_SCRIPT


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
    figures: Sequence[PlotFigure] = ()
    downloads: Sequence[Download] = ()


class Opening(NamedTuple):
    """What stands first on a page; see `fedecider.report.verdict`."""

    question: str
    answer: str
    paragraphs: Sequence[str] = ()
    reservations: Sequence[str] = ()


POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'; img-src data: blob:"
"""What a browser may do for this page: run what is in it, and fetch nothing. (Evaluation: plotly's WebGL traces.)"""
CONFIG = {"responsive": True, "displaylogo": False, "displayModeBar": False, "plotlyServerURL": ""}
PANEL_WIDTH, DEFAULT_HEIGHT = 230, 420
"""Least width of one panel and height of a figure without one, in pixels; a wider figure scrolls in its own box."""
NUMBER = re.compile(r"[-+−]?[\d.,]+( ?[%a-zA-Z]{1,3})?( \[.*\])?|-|")
LONG, LONG_NAME = 40, 12
"""Characters from which on a cell or a row's name may break anywhere, so that no long word widens its table."""


def write_page(
    path: Path,
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    warnings: Sequence[str] = (),
    opening: Opening | None = None,
) -> Path:
    """Write one HTML file that needs nothing else: plotly.js is inside once, about 5 MB; returns ``path``.

    ``opening`` stands first, before warnings and contents; a glossary of the words that occur stands last. Every text
    is escaped: titles and names come from foreign data. The same input gives the same bytes. The file is written
    beside its place and renamed.

    Raises:
        ValueError: no section, or a table row whose length is not that of the header.
    """
    if not sections:
        raise ValueError("got no sections, expected at least one: a page needs something to show")
    words = Words()
    above = [_opening(opening, words), _warnings(warnings, words)]
    body = [_section(section, number, words) for number, section in enumerate(sections, 1)]
    titles = [section.title for section in sections]
    if terms := words.met():
        titles.append("Glossary")
        body.append(_part(len(titles), titles[-1], [term_list(terms)]))
    script = (TERM_SCRIPT if terms else "") + (PRINT_SCRIPT if any(section.figures for section in sections) else "")
    drawn = any(section.figures for section in sections)
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
<a class="skip" href="#main">Skip to the content</a>
<header>
<h1>{escape(title)}</h1>
<p class="subtitle">{escape(subtitle)}</p>
</header>
{"".join(above)}
{_contents(titles)}
<main id="main">
{"".join(body)}</main>
<footer><p>One file: it loads nothing, so it can be kept, sent and printed as it is.</p></footer>
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html)
    return path


def _opening(opening: Opening | None, words: Words) -> str:
    if opening is None:
        return ""
    words.new_part()
    parts = [
        f'<h2 id="opening">{escape(opening.question)}</h2>',
        f'<p class="answer">{words.mark(opening.answer)}</p>',
        *(f"<p>{words.mark(paragraph)}</p>" for paragraph in opening.paragraphs),
    ]
    if opening.reservations:
        items = "\n".join(f"<li>{words.mark(text)}</li>" for text in opening.reservations)
        parts.append(f'<h3>Before you believe it</h3>\n<ul class="reservations">\n{items}\n</ul>')
    return "\n".join(['<section class="opening" aria-labelledby="opening">', *parts, "</section>\n"])


def _warnings(warnings: Sequence[str], words: Words) -> str:
    if not warnings:
        return ""
    words.new_part()
    items = "".join(f"<li>{words.mark(warning)}</li>\n" for warning in warnings)
    heading = '<h2 id="warnings">Warnings</h2>'
    return f'<section class="warnings" aria-labelledby="warnings">\n{heading}\n<ul>\n{items}</ul>\n</section>\n'


def _contents(titles: Sequence[str]) -> str:
    items = "".join(
        f'<li><a href="#section-{number}">{escape(title)}</a></li>\n' for number, title in enumerate(titles, 1)
    )
    heading = '<h2 id="contents">Contents</h2>'
    return f'<nav class="contents" aria-labelledby="contents">\n{heading}\n<ol>\n{items}</ol>\n</nav>'


def _section(section: Section, number: int, words: Words) -> str:
    words.new_part()
    parts = [f"<p>{words.mark(paragraph)}</p>" for paragraph in section.paragraphs]
    parts += [_table(table, section.title, place, words) for place, table in enumerate(section.tables, 1)]
    parts += [_figure(drawn.figure, f"figure-{number}-{place}") for place, drawn in enumerate(section.figures, 1)]
    if section.downloads:
        parts.append(f'<p class="downloads">{" ".join(map(_link, section.downloads))}</p>')
    return _part(number, section.title, parts)


def _part(number: int, title: str, parts: Sequence[str]) -> str:
    name = f"section-{number}"
    heading = f'<h2 id="{name}">{escape(title)}</h2>'
    return "\n".join([f'<section aria-labelledby="{name}">', heading, *parts, "</section>\n"])


def _link(file: Download) -> str:
    """A link that saves the file; it is in the page, so that this works without a server."""
    kind = "text/csv" if file.name.endswith(".csv") else "text/plain"
    address = f"data:{kind};charset=utf-8,{quote(file.text, safe=',;:@+[]()')}"
    return f'<a download="{escape(file.name)}" href="{escape(address)}">Download {escape(file.name)}</a>'


def _table(table: PageTable, title: str, number: int, words: Words) -> str:
    """A table in a box of its own, which scrolls (also by keyboard) where the page is too narrow."""
    wrong = [len(row) for row in table.rows if len(row) != len(table.header)]
    if wrong:
        raise ValueError(f"got a row of {wrong[0]} cells in {title!r}, expected {len(table.header)} as in the header")
    columns = [all(NUMBER.fullmatch(row[column]) for row in table.rows) for column in range(len(table.header))]
    classes = [' class="number"' if column and right else "" for column, right in enumerate(columns)]
    cells = zip(table.header, classes, strict=True)
    head = "".join(f'<th scope="col"{css}>{words.mark(cell)}</th>' for cell, css in cells)
    caption = f"<caption><span>{escape(table.caption)}</span></caption>" if table.caption else ""
    rows = "".join(_row(row, classes, words) for row in table.rows)
    label = escape(f"{title}, table {number}")  # no two regions of a page may have one name
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{label}">\n<table>{caption}\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>"
    )


def _breakable(name: str) -> str:
    """Escaped; setting names and labels break where a reader would."""
    return re.sub(r"([_.])", r"\1<wbr>", escape(name))


def _row(row: Sequence[str], classes: Sequence[str], words: Words) -> str:
    wide = ' class="long"' if len(row[0]) > LONG_NAME else ""
    name = words.mark(row[0], _breakable)
    cells = [f'<th scope="row"{wide}>{name}</th>' if name else "<td></td>"]  # nothing: the row above goes on
    for cell, css in zip(row[1:], classes[1:], strict=True):
        css = css or (' class="long"' if len(cell) > LONG else "")
        cells.append(f"<td{css}>{_cell(cell)}</td>")
    return f"<tr>{''.join(cells)}</tr>\n"


def _cell(text: str) -> str:
    """Escaped; the interval behind a number may stand under it on a small screen."""
    mean, bracket, interval = text.partition(" [")
    if bracket and interval.endswith("]") and NUMBER.fullmatch(text):
        return f'{escape(mean)} <span class="interval">[{escape(interval)}</span>'
    return escape(text)


def _figure(figure: go.Figure, name: str) -> str:
    """A figure with its title as caption, which can break where a drawn title would be cut off."""
    caption = str(figure.layout.title.text or "")
    fitted = _fitted(figure)
    height = fitted.layout.height or DEFAULT_HEIGHT
    html = fitted.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        config=CONFIG,
        default_width="100%",
        default_height=f"{height}px",
    )
    label = "" if _moves_title(figure) else f'<figcaption id="{name}-caption">{escape(_plain(caption))}</figcaption>'
    named = f' aria-labelledby="{name}-caption"' if label else f' aria-label="{escape(_plain(caption))}"'
    width = PANEL_WIDTH * _num_columns(figure)
    inner = f'<div style="min-width:{width}px">\n{html}\n</div>'
    box = f'<div class="plot" role="group" tabindex="0"{named}>'  # scrolls by keyboard too
    return f"<figure{named}>\n{label}\n{box}\n{inner}\n</div>\n</figure>"


def _fitted(figure: go.Figure) -> go.Figure:
    """A copy for a page of any width: legend below, no drawn title, and no dragging, so that a finger can scroll."""
    fitted = go.Figure(figure)
    fitted.update_layout(dragmode=False, font={"family": "system-ui, sans-serif"}, width=None)
    if not _moves_title(figure):
        titles = 40 if figure.layout.annotations else 20
        fitted.update_layout(title={"text": ""}, margin={"t": titles})
    if not figure.layout.sliders and figure.layout.legend.orientation is None:
        fitted.update_layout(legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0})
    fitted.update_xaxes(automargin=True)
    fitted.update_yaxes(automargin=True)
    return fitted


def _moves_title(figure: go.Figure) -> bool:
    """True when a slider, a button or a frame writes the title, which then has to stay where it is drawn."""
    steps = [step for slider in figure.layout.sliders or () for step in slider.steps or ()]
    steps += [button for menu in figure.layout.updatemenus or () for button in menu.buttons or ()]
    changes: Iterable[Any] = (change for step in steps for change in step.args or () if isinstance(change, dict))
    framed = any(frame.layout.title.text for frame in figure.frames)
    return framed or any(str(key).startswith("title") for change in changes for key in change)


def _num_columns(figure: go.Figure) -> int:
    """Panels that stand side by side: different left edges of x axes."""
    axes = [figure.layout[name] for name in figure.layout if name.startswith("xaxis")]
    return len({round(axis.domain[0], 3) if axis.domain else 0.0 for axis in axes}) or 1


def _plain(text: str) -> str:
    """Plotly's titles know a few tags (bold, line break); a caption is text."""
    return re.sub(r"<br\s*/?>", " ", text)
