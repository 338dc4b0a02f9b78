"""The files of the page of the service, which lie in ``static/``, as routes."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Route -> content and media type; the page itself is at ``/``."""
    return {
        "/" if path.name == "index.html" else f"/{path.name}": (path.read_bytes(), TYPES[path.suffix])
        for path in sorted(FOLDER.iterdir())
        if path.suffix in TYPES
    }
