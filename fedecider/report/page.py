"""A page in one file: style, glossary, sections."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fedecider.federation.record import write_text
from fedecider.report.figures import PlotFigure

# The words of all pages with their meanings; a text shows them on hover, on focus, and in a list at the end.


class Term(NamedTuple):
    """A technical word."""

    name: str
    """As the list shows it; the README's ten words have the README's names."""
    meaning: str
    forms: tuple[str, ...] = ()
    """How it stands in texts; a plural s may follow. Without any: the parts of ``name`` between commas."""

    @property
    def key(self) -> str:
        """Its part of an HTML id."""
        return re.sub(r"\W+", "-", self.name.lower()).strip("-")


TEN_TERMS = (
    Term("client", "a party with private data: a domain such as crime, or in the cross-device track a single user"),
    Term(
        "public pool",
        "users whose events are disclosed; the backbone is trained on them, and none of them is a client's user",
        ("public pool", "public user"),
    ),
    Term("item ID", "the short unique text that stands for an item; the model writes it word by word"),
    Term(
        "backbone, student",
        "the model trained on the public pool (a decoder or a T5); its copy of half depth, which stays frozen in the "
        "rounds",
    ),
    Term(
        "adapter",
        "small low-rank matrices (LoRA) beside frozen layers: all that a client trains",
        ("adapter", "LoRA", "LoRA rank"),
    ),
    Term("round", "the server sends, clients train, clients send their updates, the server combines them"),
    Term("direction", "a client's update divided by its size"),
    Term(
        "fusion weights",
        "how much of each client's direction a client takes; each client learns its own",
        ("fusion weight", "alpha"),
    ),
    Term(
        "track",
        "one of two families of methods: cross-silo, whose clients are companies with many users, and cross-device, "
        "whose clients are single users",
    ),
    Term(
        "canary",
        "a scorer that learns nothing; where it scores well, the way of measuring leaks",
        ("canary", "memoriser"),
    ),
)
"""The ten words of docs/concepts.md, word for word but for links."""

TERMS = (
    *TEN_TERMS,
    Term("domain", "a catalogue with its users and events, such as crime novels; cross-silo it is a client"),
    Term("catalogue", "all items that can be recommended in a domain"),
    Term("event", "one user taking one item at one time: bought, read, rated", ("event", "train event")),
    Term(
        "held-out item",
        "the item that a user took last; it is in no training data and has to be found",
        ("held-out item", "held out"),
    ),
    Term(
        "validation",
        "the last item but one of every user, by which rounds and settings are chosen",
        ("validation", "validation item"),
    ),
    Term("test items", "the last item of every user, which is read once, at the end", ("test item",)),
    Term(
        "hit@k",
        "share of users whose held-out item is among the first k recommendations: with k = 10, 0.16 is 16 of 100 users",
        ("hit@5", "hit@10", "hit@20"),
    ),
    Term(
        "ndcg@k",
        "as hit@k, but a place further down counts less: 1 for the first, 0.29 for the tenth, 0 beyond k",
        ("ndcg@5", "ndcg@10", "ndcg@20"),
    ),
    Term(
        "95 % interval",
        "where the mean would lie for other users like these (and other seeds, where there are several), found by "
        "drawing users again and again (cluster bootstrap); overlapping intervals settle nothing",
        ("95 % interval", "95 % cluster bootstrap", "95 % bootstrap", "cluster bootstrap", "interval"),
    ),
    Term(
        "paired permutation test",
        "how often a difference at least this large comes out when every user's two results are exchanged by the toss "
        "of a coin; p is that share, and below 0.05 counts as more than chance",
        ("paired permutation test", "paired test", "p-value", "distinguishable", "distinguishably", "more than chance"),
    ),
    Term(
        "Holm's correction",
        "who makes many tests finds something by luck; the correction raises each p so that all of them together are "
        "wrong in 5 % of cases at most",
        ("Holm's correction", "Holm-corrected", "Holm p", "Holm"),
    ),
    Term(
        "simple rule",
        "a row that needs no training: counts of what is often taken, alone or together, or items with near texts",
    ),
    Term("baseline", "a row that is not federated and stands there to be compared with"),
    Term("popularity", "the same items for everybody: those taken most often"),
    Term(
        "co-occurrence",
        "what other users took beside a user's last item, or with decay beside the last few",
        (
            "last-item co-occurrence",
            "decayed co-occurrence",
            "co-occurrence",
            "last_item_cooccurrence",
            "decayed_cooccurrence",
        ),
    ),
    Term(
        "text neighbours",
        "items whose texts are near those of the history; + counts: added to decayed co-occurrence",
        ("text neighbours", "text neighbours + counts"),
    ),
    Term("zero-shot", "the shared model as it is before any client has trained"),
    Term("SASRec", "a small sequence model that a client trains on item numbers, without texts, unless it says so"),
    Term(
        "hybrid",
        "the model mixed with counts and texts that stay with a client",
        ("hybrid", "hybrids"),
    ),
    Term("expert", "one part of a hybrid: counts, texts, where both agree, the model, all items alike"),
    Term("seed", "the number that decides all random draws of a run; other seeds give other results"),
    Term("protocol", "the way of measuring: which items are candidates, and what training may see"),
    Term("strict", "the protocol that ranks the whole catalogue without the items that the user already had"),
    Term(
        "sampled candidates",
        "a few items drawn at random, among which the held-out one is ranked instead of the catalogue; shares are then "
        "far higher",
        ("sampled candidate", "strict/sampled99"),
    ),
    Term("leak", "the way of measuring tells a method which item is held out", ("leak",)),
    Term(
        "planted data",
        "users and items made by a program, with a pattern put in on purpose; they show that the code runs",
        ("planted data", "planted"),
    ),
    Term("mean over domains", "every domain counts once, whatever its size", ("mean over domains", "macro")),
    Term("pre_upload", "a client's model as it was trained in the round, before anything is exchanged"),
    Term("post_broadcast", "a client's model with the directions of all clients after the round"),
    Term(
        "local",
        "a client trains on its own data alone; as a row without any exchange, which a method must beat to be worth it",
        ("local", "local training", "local epoch"),
    ),
    Term(
        "centralised",
        "one model trained on the data of all clients in one place, which nobody would hand over",
        ("centralised", "central"),
    ),
    Term("federated", "trained by clients together, in rounds, while each keeps its data", ("federated", "federation")),
    Term("EASE", "one weight for every pair of items, solved for at once from who took both"),
    Term(
        "item-kNN",
        "items that the same users took are near; the nearest ones are recommended",
        ("item-kNN", "item_knn"),
    ),
    Term("secure sum", "the server learns the sum of what clients send, and no single summand"),
    Term("epsilon", "bound on what one client or user can change in what is sent; small is private"),
    Term("beam search", "the model writes the IDs of several items at once and keeps the likeliest", ("beam",)),
    Term("norm", "the size of an update: the square root of the sum of its squares", ("norm", "Frobenius norm")),
    Term("cosine", "how alike two directions are: 1 the same, 0 unrelated, -1 opposite"),
    Term("Spearman correlation", "how far two orders agree: 1 the same, 0 unrelated, -1 reversed"),
    Term("TF-IDF", "texts as counts of words, rare words counting more; SVD makes them shorter"),
    Term("payload", "the bytes of the numbers in a message, without its header"),
)


class Words:
    """Marks the words of :data:`TERMS` in the texts of one page, each once a part, and keeps which ones it met."""

    def __init__(self) -> None:
        self._by_form = {form.lower(): term for term in TERMS for form in term.forms or term.name.split(", ")}
        longest = sorted(self._by_form, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<![\w@/-])({'|'.join(map(re.escape, longest))})s?(?![\w@/-])", re.IGNORECASE)
        self._met: set[Term] = set()
        self._here: set[Term] = set()

    def new_part(self) -> None:
        """From here on every word is explained again."""
        self._here = set()

    def mark(self, text: str, plain: Callable[[str], str] = escape) -> str:
        """``text`` as HTML; ``plain`` makes HTML of what is no technical word."""
        parts, end = [], 0
        for match in self._pattern.finditer(text):
            term = self._by_form[match[1].lower()]
            if term not in self._here:
                parts += [plain(text[end : match.start()]), _marked(match[0], term)]
                end = match.end()
                self._here.add(term)
        self._met |= self._here
        return "".join([*parts, plain(text[end:])])

    def met(self) -> list[Term]:
        """The words that were marked anywhere on the page, by the alphabet."""
        return sorted(self._met, key=lambda term: term.name.lower())


def term_list(terms: list[Term]) -> str:
    """The list of meanings, to which the marked words point."""
    entries = "".join(
        f'<dt>{escape(term.name)}</dt>\n<dd id="meaning-{term.key}">{escape(term.meaning)}</dd>\n' for term in terms
    )
    return f'<dl class="terms">\n{entries}</dl>'


def _marked(text: str, term: Term) -> str:
    """Can be reached by keyboard and touch; a screen reader reads the entry of the list, the eye sees the tip."""
    tip = f'<span class="tip" aria-hidden="true">{escape(term.meaning)}</span>'
    return f'<dfn tabindex="0" aria-describedby="meaning-{term.key}">{escape(text)}{tip}</dfn>'


# Style sheet and scripts of the report pages: small screens first, dark by preference, print; nothing is loaded.

WORD_STYLE = """
dfn { font-style: inherit; cursor: help; text-decoration: underline dotted; text-underline-offset: 0.2em; }
dfn:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
.tip { position: fixed; z-index: 2; left: 0; right: 0; bottom: 0; padding: 0.75rem 1rem; visibility: hidden;
  background: var(--text); color: var(--ground); font: 400 0.9375rem/1.4 system-ui, sans-serif; text-align: left;
  white-space: normal; overflow-wrap: break-word; cursor: auto; transition: visibility 0s 0.3s; }
dfn:hover > .tip, dfn:focus > .tip { visibility: visible; z-index: 3; transition-delay: 0s; }
.untipped .tip { visibility: hidden !important; transition-delay: 0s !important; }
@media (min-width: 70rem) {
  p > dfn, .conclusion li > dfn { position: relative; }
  p > dfn > .tip, .conclusion li > dfn > .tip { position: absolute; left: 0; right: auto; bottom: auto; top: 100%;
    width: 20rem; border-radius: 0.4rem; }
}
.terms dt { font-weight: 600; margin-top: 0.75rem; }
.terms dd { margin: 0; max-width: 46rem; }
"""
"""Of marked words, their tips and their list (`fedecider.report.page`)."""

STYLE = (
    WORD_STYLE
    + """
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
  .tip, .downloads, .bar { display: none; }
  details::details-content { content-visibility: visible; block-size: auto; }
  dfn { text-decoration: none; }
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
)

PRINT_WIDTH = 660
"""Pixels between the margins of a printed page, A4 or Letter; drawings do not shrink by themselves."""

TERM_SCRIPT = """
(function () {
  var root = document.documentElement;
  function again() { root.classList.remove("untipped"); }
  document.addEventListener("keydown", function (event) {
    if (event.key === "Escape") { root.classList.add("untipped"); }
  });
  document.addEventListener("focusin", again);
  document.addEventListener("pointerover", again);
})();
"""
"""Escape puts the explanation of a word away; all else about them works without a script."""

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


# One self-contained HTML page from sections: headings, paragraphs, tables, plotly figures; no network.


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


class Conclusion(NamedTuple):
    """What stands first on a page; see `fedecider.report.conclusion`."""

    question: str
    answer: str
    paragraphs: Sequence[str] = ()
    """The first stands under the answer, the others are folded away."""
    reservations: Sequence[str] = ()
    table: PageTable | None = None
    figure: PlotFigure | None = None


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
    reservations and warnings first, a glossary of the words that occur last; a page with one section and no conclusion
    shows it. Every text is escaped: titles and names come from foreign data. The same input gives the same bytes. The
    file is written beside its place and renamed.

    Raises:
        ValueError: no section, or a table row whose length is not that of the header.
    """
    if not sections:
        raise ValueError("got no sections, expected at least one: a page needs something to show")
    words, above, doubts = Words(), "", [*warnings]
    if conclusion is not None:
        above, doubts = _conclusion(conclusion), [*conclusion.reservations, *warnings]
        if rest := conclusion.paragraphs[1:]:
            sections = [Section("In words", rest), *sections]
    whole = conclusion is None and len(sections) == 1
    body = [_doubts(doubts, words, whole or conclusion is None)]
    body += [_section(section, number, words, whole) for number, section in enumerate(sections, 1)]
    if terms := words.met():
        body.append(_part(len(sections) + 1, "Glossary", [term_list(terms)]))
    drawn = any(section.figures for section in sections) or (conclusion is not None and conclusion.figure is not None)
    script = (TERM_SCRIPT if terms else "") + ("" if whole and not drawn else PARTS_SCRIPT)
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
<footer><p>One file: it loads nothing, so it can be kept, sent and printed as it is.</p></footer>
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html)
    return path


def _conclusion(conclusion: Conclusion) -> str:
    """The first screen. No word is marked: it has to be read without a glossary."""
    parts = [
        f'<h2 id="conclusion">{escape(conclusion.question)}</h2>',
        f'<p class="answer">{escape(conclusion.answer)}</p>',
        *(f"<p>{escape(paragraph)}</p>" for paragraph in conclusion.paragraphs[:1]),
    ]
    if conclusion.figure is not None:
        parts.append(_figure(conclusion.figure.figure, "figure-0-1"))
    if conclusion.table is not None:
        parts.append(_table(conclusion.table, "Answer", 1, escape))
    return "\n".join(['<section class="conclusion" aria-labelledby="conclusion">', *parts, "</section>\n"])


def _doubts(doubts: Sequence[str], words: Words, shown: bool) -> str:
    if not doubts:
        return ""
    words.new_part()
    items = "\n".join(f"<li>{words.mark(text)}</li>" for text in doubts)
    title = f"Before you believe it ({len(doubts)})"
    return _folded("warnings", title, [f"<ul>\n{items}\n</ul>"], shown, ' class="warnings"')


def _section(section: Section, number: int, words: Words, shown: bool) -> str:
    words.new_part()
    parts = [f"<p>{words.mark(paragraph)}</p>" for paragraph in section.paragraphs]
    parts += [_table(table, section.title, place, words.mark) for place, table in enumerate(section.tables, 1)]
    parts += [_figure(drawn.figure, f"figure-{number}-{place}") for place, drawn in enumerate(section.figures, 1)]
    if section.downloads:
        parts.append(f'<p class="downloads">{" ".join(map(_link, section.downloads))}</p>')
    return _part(number, section.title, parts, shown)


def _part(number: int, title: str, parts: Sequence[str], shown: bool = False) -> str:
    return _folded(f"section-{number}", title, parts, shown)


def _folded(name: str, title: str, parts: Sequence[str], shown: bool, css: str = "") -> str:
    heading = f'<summary><h2 id="{name}">{escape(title)}</h2></summary>'
    return "\n".join([f"<details{css}{' open' if shown else ''}>", heading, *parts, "</details>\n"])


def _link(file: Download) -> str:
    """A link that saves the file; it is in the page, so that this works without a server."""
    kind = "text/csv" if file.name.endswith(".csv") else "text/plain"
    address = f"data:{kind};charset=utf-8,{quote(file.text, safe=',;:@+[]()')}"
    return f'<a download="{escape(file.name)}" href="{escape(address)}">Download {escape(file.name)}</a>'


def _table(table: PageTable, title: str, number: int, mark: Callable[..., str]) -> str:
    """A table in a box of its own, which scrolls (also by keyboard) where the page is too narrow."""
    wrong = [len(row) for row in table.rows if len(row) != len(table.header)]
    if wrong:
        raise ValueError(f"got a row of {wrong[0]} cells in {title!r}, expected {len(table.header)} as in the header")
    columns = [[row[column] for row in table.rows] for column in range(len(table.header))]
    right = [all(map(NUMBER.fullmatch, cells)) for cells in columns]
    classes = [' class="number"' if column and one else "" for column, one in enumerate(right)]
    scales = [_scale(cells) for cells in columns]
    head = "".join(f'<th scope="col"{css}>{mark(cell)}</th>' for cell, css in zip(table.header, classes, strict=True))
    caption = f"<caption><span>{escape(table.caption)}</span></caption>" if table.caption else ""
    rows = "".join(_row(row, classes, scales, mark) for row in table.rows)
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


def _row(
    row: Sequence[str], classes: Sequence[str], scales: Sequence[tuple[float, float]], mark: Callable[..., str]
) -> str:
    wide = ' class="long"' if len(row[0]) > LONG_NAME else ""
    name = _breakable(row[0]) if mark is escape else mark(row[0], _breakable)
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
    fitted.update_layout(paper_bgcolor=CLEAR, plot_bgcolor=CLEAR)  # the page's own ground, light or dark
    if not _moves_title(figure):
        titles = 40 if figure.layout.annotations else 20
        fitted.update_layout(title={"text": ""}, margin={"t": titles})
    if not figure.layout.sliders and figure.layout.legend.orientation is None:
        fitted.update_layout(legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0})
    fitted.update_xaxes(automargin=True, gridcolor=GRID, zerolinecolor=GRID)
    fitted.update_yaxes(automargin=True, gridcolor=GRID, zerolinecolor=GRID)
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
