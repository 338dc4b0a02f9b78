"""The site of the documents: it builds strictly, every link leads somewhere, and nothing is loaded from elsewhere."""

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from markdown_it import MarkdownIt

from website import flowchart

if sys.version_info < (3, 11):
    pytest.skip("the site needs Python 3.11 or newer", allow_module_level=True)
hooks = import_module("website.hooks")
REPOSITORY = Path(__file__).resolve().parents[1]
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
}
NOT_LOADED = {"canonical", "prev", "next", "alternate", "edit"}
"""Relations of <link> that a browser does not follow by itself."""


class Page(HTMLParser):
    """What a page links to, what it loads, and the names of its places."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.classes: set[str] = set()
        self.components: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        self.classes |= set(given.get("class", "").split())
        self.components.add(given.get("data-md-component", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and not NOT_LOADED & set(given.get("rel", "").split()):
            self.loads.append(given["href"])
        if given.get(LOADED.get(tag, "")):
            self.loads.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in site.rglob("*.html")}


@pytest.mark.slow
def test_every_document_and_every_result_is_a_page(site):
    documents = [*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "benchmarks" / "results").glob("*.md")]
    names = {f"results/{path.stem}" if path.parent.name == "results" else path.stem for path in documents}
    built = {str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html")}
    assert names - {"README"} <= built
    assert {"index", "documents", "contributing", "security", "changelog"} <= built


@pytest.mark.slow
def test_every_link_and_anchor_of_the_site_leads_somewhere(site, pages):
    lost = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if path.name == "404.html":  # its links start at the root
                there = site / unquote(parts.path).lstrip("/") if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            named = not parts.fragment or there not in pages or unquote(parts.fragment) in pages[there].names
            if not (there.is_file() and named):
                lost.append((path.name, link))
    assert not lost


@pytest.mark.slow
def test_links_to_the_repository_name_files_that_are_there(pages):
    targets = {link for page in pages.values() for link in page.links if link.startswith((hooks.FILES, hooks.FOLDERS))}
    assert f"{hooks.FILES}fedecider/evaluation/canary.py" in targets
    for target in targets:
        root = hooks.FILES if target.startswith(hooks.FILES) else hooks.FOLDERS
        path = REPOSITORY / urlsplit(target.removeprefix(root)).path
        assert path.is_file() if root == hooks.FILES else path.is_dir(), target


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site, pages):
    for path, page in pages.items():
        assert not [target for target in page.loads if urlsplit(target).scheme or urlsplit(target).netloc], path.name
        assert "mermaid" not in page.classes, f"{path.name}: the theme would load mermaid from another host"
        assert "source" not in page.components, f"{path.name}: the theme would ask the repository's host for its stars"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", text), sheet.name


@pytest.mark.slow
def test_the_pages_hold_the_lists_and_tables_that_the_repository_shows(site):
    github = MarkdownIt("gfm-like", {"linkify": False})
    sources = {source: page for source, page in hooks.pages().items() if page != "documents.md"}
    sources |= {f"docs/{path.name}": path.name for path in (REPOSITORY / "docs").glob("*.md") if path.stem != "README"}
    del sources["docs/api.md"]  # docstrings come in there
    for source, page in sources.items():
        html = (site / page).with_suffix(".html").read_text(encoding="utf-8")
        article = html[html.index("<article") : html.index("</article>")]
        expected = github.render((REPOSITORY / source).read_text(encoding="utf-8"))
        assert parts(article) == parts(expected), source


def parts(html: str) -> Counter:
    return Counter(re.findall(r"<(li|ul|ol|tr|th|td|h[1-6]|strong|em|blockquote)\b", html))


def test_the_navigation_names_every_page_once():
    def names(entry):
        if isinstance(entry, str):
            return [entry]
        return [name for part in (entry.values() if isinstance(entry, dict) else entry) for name in names(part)]

    found = names(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])
    assert len(found) == len(set(found))
    assert set(found) >= {path.name for path in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}


FIGURES = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```mermaid\n(.*?)^```$", FIGURES, re.S | re.M)


@pytest.mark.parametrize("source", BLOCKS)
def test_a_figure_has_every_node_and_arrow_and_no_two_boxes_overlap(source):
    drawn = flowchart.svg(source)
    chart = flowchart.read(source)
    assert drawn.count('class="arrow"') == source.count("-->") > 5
    boxes = re.findall(r'class="node" x="([-\d.]+)" y="([-\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawn)
    assert len(boxes) == len(chart.nodes)
    rectangles = [tuple(map(float, box)) for box in boxes]
    for place, (x, y, width, height) in enumerate(rectangles):
        for left, top, wide, high in rectangles[place + 1 :]:
            apart = x + width <= left or left + wide <= x or y + height <= top or top + high <= y
            assert apart, (x, y, left, top)
    for label in re.findall(r"\|([^|]+)\|", source):
        assert f">{label}</text>" in drawn


def test_a_figure_follows_its_arrows():
    drawn = flowchart.svg("flowchart TB\n  a --> b\n  b --> c\n  a --> c\n  c -->|again| a")
    top = dict(zip("abc", map(float, re.findall(r'class="node" x="[-\d.]+" y="([-\d.]+)"', drawn)), strict=True))
    assert top["a"] < top["b"] < top["c"]
    turned = flowchart.svg("flowchart BT\n  a --> b")
    first, second = map(float, re.findall(r'class="node" x="[-\d.]+" y="([-\d.]+)"', turned))
    assert first > second


@pytest.mark.parametrize(
    ("source", "said"),
    [("sequenceDiagram\n a", "expected one that begins with flowchart"), ("flowchart LR\n a -.-> b", "'a -.-> b'")],
)
def test_a_figure_that_is_not_understood_is_an_error(source, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        flowchart.svg(source)
