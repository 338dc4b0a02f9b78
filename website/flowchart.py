"""Mermaid flowcharts as SVG, so that a page needs no script for its figures.

Read is what our pages use: ``flowchart LR`` and the other directions, ``name``, ``name["text"]``, ``name(["text"])``,
one arrow a line with or without ``|text|``, ``subgraph name ["text"]`` and ``end``. The layout is Sugiyama's (1981):
arrows that close a circle are drawn backwards, nodes stand one layer behind the last of their predecessors, long arrows
pass through places of their own, the order in a layer follows the mean place of the neighbours, and distances are kept
by isotonic regression.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from sklearn.isotonic import isotonic_regression

NODE = r'(?P<{0}>[\w.]+)(?P<{0}_text>\(?\["[^"]*"\]\)?)?'
ARROW = re.compile(NODE.format("tail") + r"\s*-->\s*(?:\|(?P<label>[^|]*)\|\s*)?" + NODE.format("head"))
ALONE = re.compile(NODE.format("node"))
GROUP = re.compile(r'subgraph (?P<name>\w+) \["(?P<text>[^"]*)"\]')
LINE, LETTER = 17.0, 7.1
"""Height of a line and width of a letter, in pixels at 13 pixels a letter."""
GAP, BETWEEN, MARGIN = 46.0, 20.0, 14.0
"""Between layers, between nodes of a layer, around a group."""
TOGETHER = 9.0
"""How much stronger an arrow inside a group pulls its ends onto one line."""
Point = Callable[[float, float], tuple[float, float]]
"""(along, across) -> (x, y)."""
Box = tuple[float, float, float, float]
"""Middle and size: x, y, width, height."""
SWEEPS = 200
WIDEST = 800.0
"""A figure that goes sideways and would be wider is laid from top to bottom, so that its letters stay readable."""


@dataclass
class Node:
    """A box, or where ``lines`` is empty a place that a long arrow passes through."""

    lines: list[str]
    round: bool = False
    group: str = ""
    layer: int = 0
    across: float = 0.0
    """Place of its middle within the layer, in pixels."""
    along: float = 0.0
    """Place of its middle from layer to layer, in pixels."""

    def size(self) -> tuple[float, float]:
        """Width and height."""
        if not self.lines:
            return 1.0, 1.0
        return max(map(len, self.lines)) * LETTER + 22.0, len(self.lines) * LINE + 14.0


@dataclass
class Chart:
    """What is read, and then placed."""

    direction: str
    nodes: dict[str, Node] = field(default_factory=dict)
    arrows: list[tuple[str, str, str]] = field(default_factory=list)
    """Tail, head, label."""
    groups: dict[str, str] = field(default_factory=dict)
    """Name -> text."""

    @property
    def sideways(self) -> bool:
        """Layers follow each other from left to right."""
        return self.direction in ("LR", "RL")


def svg(source: str) -> str:
    """The figure of a mermaid flowchart, as one ``<svg>`` in a ``<figure>``.

    Raises:
        ValueError: a line that is not understood.
    """
    chart = read(source)
    backwards = _layers(chart)
    paths = _split_long_arrows(chart, backwards)
    _place(chart, paths)
    if chart.sideways and _length(chart) > WIDEST:
        chart.direction = "TB"
        _place(chart, paths)
    return _draw(chart, paths, backwards)


def read(source: str) -> Chart:
    first, *lines = [line.strip() for line in source.strip().splitlines()]
    header = re.fullmatch(r"flowchart (LR|RL|TB|TD|BT)", first)
    if not header:
        raise ValueError(f"got the figure {first!r}, expected one that begins with flowchart LR, RL, TB, TD or BT")
    chart, group = Chart(header[1]), ""

    def node(name: str, text: str | None) -> str:
        one = chart.nodes.setdefault(name, Node([name]))
        one.group = group or one.group
        if text:
            one.lines, one.round = text.strip('([")]').split("<br/>"), text.startswith("(")
        return name

    for line in lines:
        if match := GROUP.fullmatch(line):
            group = match["name"]
            chart.groups[group] = match["text"]
        elif line == "end":
            group = ""
        elif match := ARROW.fullmatch(line):
            ends = node(match["tail"], match["tail_text"]), node(match["head"], match["head_text"])
            chart.arrows.append((*ends, match["label"] or ""))
        elif match := ALONE.fullmatch(line):
            node(match["node"], match["node_text"])
        else:
            raise ValueError(f"got the line {line!r} in a figure, expected a node, an arrow, a subgraph or end")
    return chart


def _layers(chart: Chart) -> set[int]:
    """Sets ``layer``; the numbers of the arrows that close a circle."""
    heads: dict[str, list[tuple[int, str]]] = {name: [] for name in chart.nodes}
    for number, (tail, head, _) in enumerate(chart.arrows):
        heads[tail].append((number, head))
    backwards: set[int] = set()
    done: list[str] = []

    def visit(name: str, above: tuple[str, ...]) -> None:
        for number, head in heads[name]:
            if head in above or head == name:
                backwards.add(number)
            elif head not in done:
                visit(head, (*above, name))
        done.append(name)

    for name in chart.nodes:
        if name not in done:
            visit(name, ())
    for name in reversed(done):  # every tail before its heads
        for number, head in heads[name]:
            if number not in backwards:
                chart.nodes[head].layer = max(chart.nodes[head].layer, chart.nodes[name].layer + 1)
    return backwards


def _split_long_arrows(chart: Chart, backwards: set[int]) -> list[list[str]]:
    """The names on the way of each arrow, with a new place in every layer between its ends."""
    paths = []
    for number, (tail, head, _) in enumerate(chart.arrows):
        between = [] if number in backwards else range(chart.nodes[tail].layer + 1, chart.nodes[head].layer)
        names = [f"{number}:{layer}" for layer in between]
        chart.nodes.update({name: Node([], layer=layer) for name, layer in zip(names, between, strict=True)})
        paths.append([tail, *names, head])
    return paths


def _place(chart: Chart, paths: list[list[str]]) -> None:
    """Sets ``across`` and ``along``."""
    near: dict[str, list[tuple[str, float]]] = {name: [] for name in chart.nodes}
    for path in paths:
        for one, other in pairwise(path):
            group = chart.nodes[one].group
            weight = TOGETHER if group and group == chart.nodes[other].group else 1.0
            near[one].append((other, weight))
            near[other].append((one, weight))
    layers: list[list[str]] = [[] for _ in range(1 + max(node.layer for node in chart.nodes.values()))]
    for name, node in chart.nodes.items():
        layers[node.layer].append(name)
    for layer in layers:
        for place, name in enumerate(layer):
            chart.nodes[name].across = 100.0 * place
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else layers[::-1]:
            wanted = {name: _middle(chart, name, near[name]) for name in layer}
            if sweep < SWEEPS // 4:
                layer.sort(key=wanted.__getitem__)
            _keep_apart(chart, layer, wanted, [sum(weight for _, weight in near[name]) or 1.0 for name in layer])
    start = 0.0
    for number, layer in enumerate(layers):
        depth = max(_extent(chart, name)[0] for name in layer)
        for name in layer:
            chart.nodes[name].along = start + depth / 2
        start += depth + _gap(chart, number)


def _length(chart: Chart) -> float:
    ends = [(node.along, _extent(chart, name)[0] / 2) for name, node in chart.nodes.items()]
    return max(along + half for along, half in ends) - min(along - half for along, half in ends)


def _middle(chart: Chart, name: str, near: list[tuple[str, float]]) -> float:
    if not near:
        return chart.nodes[name].across
    return sum(weight * chart.nodes[other].across for other, weight in near) / sum(weight for _, weight in near)


def _keep_apart(chart: Chart, layer: list[str], wanted: dict[str, float], weights: list[float]) -> None:
    """As near to the wanted places as the sizes and the order allow (weighted least squares)."""
    offsets = [0.0]
    for before, name in pairwise(layer):
        apart = BETWEEN + 3 * MARGIN * (chart.nodes[before].group != chart.nodes[name].group)
        offsets.append(offsets[-1] + (_extent(chart, before)[1] + _extent(chart, name)[1]) / 2 + apart)
    free = [wanted[name] - offset for name, offset in zip(layer, offsets, strict=True)]
    for name, place, offset in zip(layer, isotonic_regression(free, sample_weight=weights), offsets, strict=True):
        chart.nodes[name].across = float(place) + offset


def _extent(chart: Chart, name: str) -> tuple[float, float]:
    """Size along and across."""
    width, height = chart.nodes[name].size()
    return (width, height) if chart.sideways else (height, width)


def _gap(chart: Chart, layer: int) -> float:
    """Space behind a layer: labels have to fit in."""
    labels = [
        len(label) * LETTER + 30.0 if chart.sideways else 4.5 * LINE
        for tail, head, label in chart.arrows
        if label and {chart.nodes[tail].layer, chart.nodes[head].layer} == {layer, layer + 1}
    ]
    return max([GAP, *labels])


def _draw(chart: Chart, paths: list[list[str]], backwards: set[int]) -> str:
    flip = -1.0 if chart.direction in ("BT", "RL") else 1.0

    def point(along: float, across: float) -> tuple[float, float]:
        return (flip * along, across) if chart.sideways else (across, flip * along)

    boxes = {name: (*point(node.along, node.across), *node.size()) for name, node in chart.nodes.items()}
    frames = [_frame(chart, name, boxes) for name in chart.groups]
    left, top, right, bottom = _bounds([*boxes.values(), *(box for _, box in frames)], 8.0)
    arrows = [_arrow(chart, number, path, number in backwards, point) for number, path in enumerate(paths)]
    width, height = right - left, bottom - top
    return "\n".join(
        [
            f'<figure class="flowchart"><svg role="img" viewBox="{left:.1f} {top:.1f} {width:.1f} {height:.1f}"'
            f' style="max-width: {width:.0f}px" xmlns="http://www.w3.org/2000/svg"><defs>',
            '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0 8 4 0 8z"/></marker></defs>',
            *(drawn for drawn, _ in frames),
            *arrows,
            *(_box(chart.nodes[name], *boxes[name]) for name in chart.nodes if chart.nodes[name].lines),
            "</svg></figure>",
        ]
    )


def _bounds(boxes: list[Box], margin: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of what holds all boxes."""
    sides = [(x - width / 2, y - height / 2, x + width / 2, y + height / 2) for x, y, width, height in boxes]
    left, top, right, bottom = zip(*sides, strict=True)
    return min(left) - margin, min(top) - margin, max(right) + margin, max(bottom) + margin


def _frame(chart: Chart, group: str, boxes: dict[str, Box]) -> tuple[str, Box]:
    """The rectangle around a group, drawn, and where it is."""
    inside = [boxes[name] for name, node in chart.nodes.items() if node.group == group]
    left, top, right, bottom = _bounds(inside, MARGIN)
    top -= LINE
    width, height = right - left, bottom - top
    drawn = (
        f'<rect class="group" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6"/>'
        f'<text class="label" x="{left + 8:.1f}" y="{top + LINE:.1f}" style="text-anchor: start">'
        f"{escape(chart.groups[group])}</text>"
    )
    return drawn, ((left + right) / 2, (top + bottom) / 2, width, height)


def _arrow(chart: Chart, number: int, path: list[str], backwards: bool, point: Point) -> str:
    """The line from the rim of the first box to that of the last one, and its label."""
    places = [[chart.nodes[name].along, chart.nodes[name].across] for name in path]
    side = -1.0 if backwards else 1.0
    places[0][0] += side * _extent(chart, path[0])[0] / 2
    places[-1][0] -= side * _extent(chart, path[-1])[0] / 2
    pair = (path[-1], path[0]) in [(tail, head) for tail, head, _ in chart.arrows]
    shift = side * LINE / 2 if pair or backwards else 0.0
    for place in places:
        place[1] += shift
    line = "M{:.1f} {:.1f}".format(*point(*places[0]))
    for (along, across), (next_along, next_across) in pairwise(places):
        half = (along + next_along) / 2
        bends = point(half, across), point(half, next_across), point(next_along, next_across)
        line += " C" + ", ".join(f"{x:.1f} {y:.1f}" for x, y in bends)
    drawn = f'<path class="arrow" d="{line}" marker-end="url(#tip)"/>'
    label = chart.arrows[number][2]
    if not label:
        return drawn
    first, second = places[len(places) // 2 - 1], places[len(places) // 2]
    share = 0.35 if pair or chart.sideways else 0.65
    x, y = point(first[0] + share * (second[0] - first[0]), first[1] + share * (second[1] - first[1]))
    anchor = "middle"
    if chart.sideways:
        y += LINE if backwards else -6.0
    elif pair:  # one label on each side
        x, anchor = x + 6.0 * (1.0 if shift > 0 else -1.0), "start" if shift > 0 else "end"
    return (
        drawn
        + f'<text class="label" x="{x:.1f}" y="{y + 4.0:.1f}" style="text-anchor: {anchor}">{escape(label)}</text>'
    )


def _box(node: Node, x: float, y: float, width: float, height: float) -> str:
    radius = height / 2 if node.round else 4.0
    start = y - (len(node.lines) - 1) * LINE / 2 + 4.5
    lines = "".join(
        f'<tspan x="{x:.1f}" y="{start + number * LINE:.1f}">{escape(line)}</tspan>'
        for number, line in enumerate(node.lines)
    )
    corner = f'x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="node" {corner} rx="{radius:.1f}"/><text>{lines}</text>'
