"""The figure of the README: what a company gains by joining, drawn from its page of results.

    python benchmarks/joining_figure.py

Reads benchmarks/results/joining.md and writes docs/figures/joining.svg. Nothing is measured here.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from fedecider.running.command import run

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "joining.md"
FIGURE = ROOT / "docs" / "figures" / "joining.svg"
BARS = {
    "*text neighbours + counts*, the best rule": ("baseline, no model", "#b8c4c9"),
    "**alone: own model + own hybrid**": ("each company alone", "#5f8ea0"),
    "**joined + hybrid with summed counts**": ("joined", "#00796b"),
}
"""First cell of a row of the page -> what the figure calls it, and its colour."""
GROUPS = {"twelve": "films, CDs, games", "eight": "office, industrial", "four": "games on Steam"}
WIDTH, TOP, HEIGHT, BAR, GAP = 640, 70, 190, 46, 8


def figures(text: str) -> dict[str, dict[str, float]]:
    """Group -> row -> ndcg@10, of the first table of the page: hit@10 and ndcg@10 of every group in turn."""
    found: dict[str, dict[str, float]] = {group: {} for group in GROUPS}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in BARS and len(cells) == 2 + 2 * len(GROUPS):
            for place, group in enumerate(GROUPS):
                found[group][cells[0]] = float(cells[3 + 2 * place].strip("*"))
    if any(row.keys() != BARS.keys() for row in found.values()):
        raise ValueError(f"got {found} in {PAGE}, expected the rows {list(BARS)}")
    return found


def svg(found: dict[str, dict[str, float]]) -> str:
    """Bars in groups, each with its figure above it."""
    most = max(value for row in found.values() for value in row.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 50}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Joined and alone: ndcg@10 of companies that sell the same items</title>",
        f'<rect width="{WIDTH}" height="{TOP + HEIGHT + 50}" rx="8" fill="#ffffff"/>',
        '<text x="20" y="28" fill="#102027" font-weight="600">How well the next purchase is ranked (ndcg@10), four '
        "companies per catalogue</text>",
    ]
    for place, (name, colour) in enumerate(BARS.values()):
        left = 20 + 150 * place
        parts.append(f'<rect x="{left}" y="42" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18}" y="53" fill="#37474f">{escape(name)}</text>')
    wide = len(BARS) * (BAR + GAP) - GAP
    for number, (group, title) in enumerate(GROUPS.items()):
        left = (WIDTH * (2 * number + 1)) // (2 * len(GROUPS)) - wide // 2
        for place, (row, (_, colour)) in enumerate(BARS.items()):
            value = found[group][row]
            tall = round((HEIGHT - 24) * value / most)
            x, y = left + place * (BAR + GAP), TOP + HEIGHT - tall
            parts.append(f'<rect x="{x}" y="{y}" width="{BAR}" height="{tall}" rx="3" fill="{colour}"/>')
            parts.append(f'<text x="{x + BAR // 2}" y="{y - 6}" text-anchor="middle" fill="#102027">{value:.4f}</text>')
        middle = left + wide // 2
        parts.append(
            f'<text x="{middle}" y="{TOP + HEIGHT + 24}" text-anchor="middle" fill="#102027">{escape(title)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    FIGURE.write_text(svg(figures(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")
    print(FIGURE)


if __name__ == "__main__":
    sys.exit(run(main))
