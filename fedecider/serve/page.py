"""The files of the page, which lie beside this module; its technical words are explained as in the reports."""

from __future__ import annotations

import re
from pathlib import Path

from fedecider.report.glossary import Words, term_list
from fedecider.report.page_style import TERM_SCRIPT, WORD_STYLE

FOLDER = Path(__file__).resolve().parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Route -> content and media type; the page itself is at ``/``."""
    files = {
        "/" if path.name == "index.html" else f"/{path.name}": (path.read_bytes(), TYPES[path.suffix])
        for path in sorted(FOLDER.iterdir())
        if path.suffix in TYPES
    }
    page, style = files["/"][0].decode(), files["/page.css"][0].decode()
    return {
        **files,
        "/": (_explained(page).encode(), TYPES[".html"]),
        "/page.css": (f"{style}{WORD_STYLE}".encode(), TYPES[".css"]),
        "/words.js": (TERM_SCRIPT.encode(), TYPES[".js"]),
    }


def _explained(page: str) -> str:
    """``page`` with its ``{{words}}`` marked, and their meanings in place of ``{{}}``."""
    words = Words()

    def marked(match: re.Match[str]) -> str:
        words.new_part()
        return words.mark(match[1])

    page = re.sub(r"\{\{([^{}]+)\}\}", marked, page)
    return page.replace("{{}}", term_list(words.met()))
