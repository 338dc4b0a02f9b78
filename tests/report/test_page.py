"""The page writer: structure, escaping, one library, nothing loaded, equal bytes."""

import re
from html.parser import HTMLParser
from urllib.parse import unquote

import plotly.graph_objects as go
import pytest

from fedecider.report.answer import Answer
from fedecider.report.figures import validation_curves
from fedecider.report.page import Conclusion, Download, PageTable, Section, write_page

HOSTILE = "<script>alert(1)</script> & \"quoted\" 'x' </td>"


class Outline(HTMLParser):
    """Tags with attributes, and the text of some of them; plotly's own script is one text and not parsed."""

    def __init__(self):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:  # void elements such as meta have no end
            pass

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def outline(path) -> Outline:
    parser = Outline()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


def curves() -> go.Figure:
    return validation_curves({"after": {"crime": [0.1, 0.3], "comics": [0.2, 0.1]}}, [1, 2], selected_round=2)


def example(path, title="Run toy"):
    rows = [["fedecider", "0.1000 [0.0500, 0.1500]", "x"], [HOSTILE, "-", HOSTILE]]
    sections = [
        Section("Results", ["First.", HOSTILE], [PageTable(["row", "hit@10", "note"], rows, "crime")], [curves()]),
        Section(HOSTILE, figures=[curves(), go.Figure(go.Scatter(x=[HOSTILE], y=[-2]))]),
    ]
    sections[0] = sections[0]._replace(downloads=[Download('a"b.csv', "row,x\n<&>#%,0.1\n")])
    rule = PageTable(["row", "of 100"], [["ours", "-1.0 [-3.0, 2.0]"], ["rule", "2.0 [1.0, 5.0]"]])
    answer = Answer("ours", "join", [f"Join: {HOSTILE}", "A canary."], [HOSTILE])
    conclusion = Conclusion(answer, ["hit@10"], rule, curves())
    return write_page(path / "page.html", title, "two <domains>", sections, ["a leak", HOSTILE], conclusion)


def test_structure_that_a_screen_reader_can_follow(tmp_path):
    page = outline(example(tmp_path))
    assert page.of("html") == [{"lang": "en"}]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")
    assert len(page.of("h1")) == 1
    headings = [attrs["id"] for attrs in page.of("h2")]
    assert headings == ["conclusion", "warnings", *(f"section-{number}" for number in (1, 2, 3))]
    assert [text for tag, text in page.texts if tag == "h2"] == [
        *("Recommendation", "Caveats (3)", "Summary", "Results", HOSTILE)
    ]
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)
    assert [attrs.get("scope") for attrs in page.of("th")] == ["col"] * 2 + ["row"] * 2 + ["col"] * 3 + ["row"] * 2
    assert [attrs.get("class") for attrs in page.of("td")] == ["number", "number", "number", None, "number", "long"]
    assert len(page.of("figcaption")) == len(page.of("figure")) == 4
    assert all(
        attrs.get("aria-labelledby", attrs.get("aria-label", "missing"))
        in [*ids, "Answer, table 1", "Results, table 1"]
        for tag, attrs in page.tags
        if tag in ("section", "nav", "figure") or attrs.get("role") == "region"
    )


def test_an_interval_is_a_bar_on_the_axis_of_its_column(tmp_path):
    text = example(tmp_path).read_text(encoding="utf-8")
    bars = re.findall(r'title="([^"]*)" style="([^"]*)"', text)
    assert bars == [  # from -3 to 5, zero in between
        ("[-3.0, 2.0]", "--low:0.0%;--high:62.5%;--zero:37.5%"),
        ("[1.0, 5.0]", "--low:50.0%;--high:100.0%;--zero:37.5%"),
        ("[0.0500, 0.1500]", "--low:33.3%;--high:100.0%;--zero:0.0%"),
    ]
    assert '2.0 <span class="interval">[1.0, 5.0]</span>' in text  # on paper and for a screen reader
    table = PageTable(["row", "x"], [["1.2.3 [4, 5]", "0.0 [0.0, 0.0]"], ["b", "-"], ["c", "1.0.1 [2, ²]"]])
    flat = write_page(tmp_path / "p.html", "t", "s", [Section("s", tables=[table])]).read_text(encoding="utf-8")
    assert '<td class="number">0.0 [0.0, 0.0]</td>' in flat  # no axis, no bar


def test_foreign_texts_are_text(tmp_path):
    path = example(tmp_path, title=HOSTILE)
    page, text = outline(path), path.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    shown = [tag for tag, data in page.texts if data == HOSTILE]
    assert shown == ["title", "h1", "li", "li", "p", "th", "td", "h2"]
    assert next(data for tag, data in page.texts if tag == "p") == "two <domains>"
    assert len(page.of("script")) == 1 + 4 + 1  # plotly.js, one per figure, ours


def test_a_title_in_a_figure_can_not_end_its_script(tmp_path):
    text = example(tmp_path).read_text(encoding="utf-8")
    assert r"\u003cscript\u003ealert(1)\u003c\u002fscript\u003e" in text


def test_files_can_be_saved_from_the_page(tmp_path):
    (link,) = [attrs for attrs in outline(example(tmp_path)).of("a") if "download" in attrs]
    assert link["download"] == 'a"b.csv'
    kind, _, data = link["href"].partition(",")
    assert kind == "data:text/csv;charset=utf-8"
    assert not set(data) & set('\n <>#&"')
    assert unquote(data) == "row,x\n<&>#%,0.1\n"


def test_nothing_is_loaded(tmp_path):
    page = outline(example(tmp_path))
    policy = [attrs["content"] for attrs in page.of("meta") if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy[0].startswith("default-src 'none';")
    assert "http" not in policy[0]
    assert not [attrs for _, attrs in page.tags if {"src", "srcset", "data", "poster"} & set(attrs)]
    assert all(attrs["href"].startswith(("#", "data:text/csv;")) for _, attrs in page.tags if "href" in attrs)
    assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    style = "".join(data for tag, data in page.texts if tag == "style")
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style
    assert not re.search(r"url\(|@import|https?:", style)


def test_the_same_input_gives_the_same_bytes_and_no_leftovers(tmp_path):
    (tmp_path / "a").mkdir()
    first = example(tmp_path / "a").read_bytes()
    assert example(tmp_path / "b").read_bytes() == first
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["page.html"]


def test_torn_rows_and_empty_pages_are_refused(tmp_path):
    with pytest.raises(ValueError, match="row of 1 cells in 'torn', expected 2"):
        write_page(tmp_path / "p.html", "t", "s", [Section("torn", tables=[PageTable(["a", "b"], [["1"]])])])
    with pytest.raises(ValueError, match="no sections"):
        write_page(tmp_path / "p.html", "t", "s", [])
    assert list(tmp_path.iterdir()) == []
