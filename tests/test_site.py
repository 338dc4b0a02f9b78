"""The site of the documents: it builds strictly, every link leads somewhere, and nothing is loaded from elsewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

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


def test_the_navigation_names_every_page_once():
    def names(entry):
        if isinstance(entry, str):
            return [entry]
        return [name for part in (entry.values() if isinstance(entry, dict) else entry) for name in names(part)]

    found = names(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])
    assert len(found) == len(set(found))
    assert set(found) >= {path.name for path in (REPOSITORY / "docs").glob("*.md")} - {"README.md"}
