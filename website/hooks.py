"""Hooks of the site (mkdocs.yml): pages from outside docs/, links, figures.

The pages stay as GitHub shows them. Here README.md, the other pages of the root and the results become pages of
the site; a relative link to one of them leads to its page, any other one to the file in the repository; a mermaid
flowchart becomes an SVG, since mermaid itself would be loaded from another host.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

sys.path.insert(0, str(Path(__file__).parent))
from flowchart import svg

ROOT = Path(__file__).resolve().parents[1]
FILES = "https://github.com/fedecider/fedecider/blob/main/"
FOLDERS = "https://github.com/fedecider/fedecider/tree/main/"
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "documents.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELEASING.md": "releasing.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "SECURITY.md": "security.md",
}
"""File of the repository -> page of the site; all of ``benchmarks/results`` besides."""
CODE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]+`)", re.S | re.M)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.S | re.M)
ROLE = re.compile(r":\w+:(?=<code>)")
CELL = re.compile(r"<td.*?</td>", re.S)
log = get_plugin_logger("website")


def on_config(config: Any) -> Any:
    """Headings get GitHub's names; the results stand in the navigation."""
    config.mdx_configs.setdefault("toc", {}).update(slugify=slugify(case="lower"), permalink=True)
    measured = [{_title(path): f"results/{path.name}"} for path in sorted(_results())]
    config.nav.append({"Measurements": measured})
    return config


def on_files(files: Files, config: Any) -> Files:
    """The pages from outside docs/ and the style sheet."""
    files.remove(files.src_uris["README.md"])
    for source, page in pages().items():
        if page not in files.src_uris:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "assets/site.css", abs_src_path=str(ROOT / "website" / "site.css")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links and figures; a link that leads nowhere is a warning, which ends a strict build."""
    others = pages()
    source = {there: here for here, there in others.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(match: re.Match[str]) -> str:
        target = match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        here = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        mark = f"#{anchor}" if anchor else ""
        if here in others or here.startswith("docs/"):
            there = others.get(here, here.removeprefix("docs/"))
            return f"{match[1]}{posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or '.')}{mark}{match[3]}"
        if not (ROOT / here).exists():
            log.warning(f"{source}: the link {target} leads nowhere")
        return f"{match[1]}{FOLDERS if (ROOT / here).is_dir() else FILES}{here}{mark}{match[3]}"

    try:
        markdown = MERMAID.sub(lambda match: svg(match[1]), markdown)
    except ValueError as error:
        raise PluginError(f"{source}: {error}") from error
    return "".join(part if place % 2 else LINK.sub(moved, part) for place, part in enumerate(CODE.split(markdown)))


def on_page_content(html: str, **_: Any) -> str:
    """Roles of docstrings such as :func: are left out, and backslashes before a bar in a table, as GitHub does."""
    return CELL.sub(lambda match: match[0].replace("\\|", "|"), ROLE.sub("", html))


def _results() -> list[Path]:
    return list((ROOT / "benchmarks" / "results").glob("*.md"))


def _title(path: Path) -> str:
    heading = re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.M)
    return heading[1] if heading else path.stem


def pages() -> dict[str, str]:
    """File of the repository -> page of the site, of those that lie outside docs/."""
    return OUTSIDE | {f"benchmarks/results/{path.name}": f"results/{path.name}" for path in _results()}
