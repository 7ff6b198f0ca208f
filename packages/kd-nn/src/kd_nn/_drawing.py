"""The key graph as text: a plain table, and a flowchart in Mermaid."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from kd_core import NestedKey
from kd_core.extending import Table, is_prefix
from kd_nn._keys import KeyFlow, KeyNode

ROWS, CELL = 30, 40
"""How many rows a short table has, and how many characters a cell."""


def dotted(key: NestedKey) -> str:
    """Return a key as text, its parts joined by dots."""
    return key if isinstance(key, str) else ".".join(dotted(part) for part in key)


def table(graph: KeyFlow, short: bool = False) -> Table:
    """Return the steps of a key graph as an aligned table.

    Args:
        graph: The graph.
        short: Whether long cells, and steps in the middle of many, are left out.
    """
    with_shapes = any(node.shapes for node in graph.nodes)
    rows = [["step", "module", "in_keys", "out_keys", "parameters"]]
    if with_shapes:
        rows[0].append("shapes")
    for node in graph.nodes:
        label = node.label if node.needed else f"({node.label})"
        row = [node.name, label, _keys(node.reads), _keys(node.writes), f"{node.parameters:,}"]
        if with_shapes:
            row.append(", ".join(str(shape) for _, shape in node.shapes))
        rows.append(row)
    if short:
        rows = _shortened(rows)
    return Table.of(rows, right=4)


def _shortened(rows: list[list[str]]) -> list[list[str]]:
    if len(rows) > ROWS:
        half = ROWS // 2
        rows = [*rows[:half], ["..."] * len(rows[0]), *rows[-half:]]
    return [
        [text if len(text) <= CELL else f"{text[: CELL - 3]}..." for text in row] for row in rows
    ]


def _keys(keys: tuple[NestedKey, ...]) -> str:
    return ", ".join(dotted(key) for key in keys)


def mermaid(graph: KeyFlow) -> str:
    """Return a key graph as a Mermaid flowchart."""
    lines = ["flowchart LR"]
    inputs = list(graph.inputs)
    for idx, key in enumerate(inputs):
        lines.append(f'    in{idx}(["{_escaped(dotted(key))}"]):::input')
    for idx, node in enumerate(graph.nodes):
        text = _escaped(node.label)
        name = "" if node.name == str(idx) else f"{_escaped(node.name)}: "
        count = f"<br/>{node.parameters:,} parameters" if node.parameters else ""
        kind = "step" if node.needed else "dead"
        lines.append(f'    s{idx}["{name}{text}{count}"]:::{kind}')
    for idx, node in enumerate(graph.nodes):
        for key in node.reads:
            lines += [f"    {edge} s{idx}" for edge in _edges(graph, idx, key, inputs)]
    for number, key in enumerate(graph.outputs):
        source = graph.producer(len(graph.nodes), key)
        if source is not None:
            lines.append(f'    s{source} --> out{number}(["{_escaped(dotted(key))}"]):::output')
    return "\n".join([*lines, *_CLASSES])


def _edges(graph: KeyFlow, idx: int, key: NestedKey, inputs: list[NestedKey]) -> list[str]:
    sources = graph.producers(idx, key)
    if not sources:
        holder = next(place for place, known in enumerate(inputs) if is_prefix(known, key))
        label = "" if inputs[holder] == key else f'|"{_escaped(dotted(key))}"|'
        return [f"in{holder} -->{label}"]
    edges = []
    for source in sources:
        dashed = not (graph.nodes[idx].needed and graph.nodes[source].needed)
        edges.append(f's{source} {"-.->" if dashed else "-->"}|"{_escaped(dotted(key))}"|')
    return edges


def _escaped(text: str) -> str:
    """Return text with the markup characters of Mermaid escaped."""
    for sign, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(sign, entity)
    return text


_CLASSES = (
    "    classDef input fill:#ecfdf5,stroke:#059669,color:#064e3b",
    "    classDef step fill:#f8fafc,stroke:#475569,color:#0f172a",
    "    classDef output fill:#eff6ff,stroke:#2563eb,color:#1e3a8a",
    "    classDef dead fill:#f8fafc,stroke:#cbd5e1,color:#94a3b8,stroke-dasharray:4 3",
)


# The key graph as an SVG picture, written here without graphviz.
#
# Steps are boxes with a port per key: what they read on the left, what they write on the right.
# Boxes stand in columns, each one column behind the last step it depends on; within a column they
# are ordered by the positions of their inputs. A key graph is short and mostly a chain, so this is
# enough, and the picture can be drawn without another program.

HEAD, ROW, PAD, GAP_X, GAP_Y, MARGIN, LEGEND = 44, 22, 14, 76, 26, 28, 34
CHARACTER, WIDE_CHARACTER = 7.3, 8.6
LANE, BEND = 14, 30

STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #334155 }
.title { font: 600 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #0f172a }
.note { font: 11px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #64748b }
.box { fill: #ffffff; stroke: #94a3b8; stroke-width: 1.2 }
.head { fill: #f1f5f9 }
.edge { fill: none; stroke: #64748b; stroke-width: 1.6 }
.port { fill: #ffffff; stroke: #64748b; stroke-width: 1.6 }
.output { fill: #2563eb; stroke: #2563eb }
.output-key { fill: #1d4ed8; font-weight: 600 }
.input { fill: #ecfdf5; stroke: #059669; stroke-width: 1.4 }
.input-key { fill: #065f46; font-weight: 600 }
.dead .box, .dead .head { fill: #fafafa; stroke-dasharray: 4 3; stroke: #cbd5e1 }
.dead .head { stroke: none }
.dead text { fill: #a8b3c2 }
.dead .port { stroke: #cbd5e1 }
.edge.dead { stroke: #cbd5e1; stroke-dasharray: 4 3 }
""".strip()


@dataclass(slots=True)
class Box:
    """A step or an input on the page.

    Attributes:
        node: The step; None for an input.
        title: The first line of text.
        reads: Keys on the left.
        writes: Keys on the right.
        column: How many columns from the left.
    """

    node: KeyNode | None
    title: str
    reads: tuple[NestedKey, ...]
    writes: tuple[NestedKey, ...]
    column: int = 0
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    sources: list[Box] = field(default_factory=list)

    def port(self, key: NestedKey, left: bool) -> tuple[float, float]:
        """Return the position of the port of a key."""
        if self.node is None:
            return self.x + self.width, self.y + self.height / 2
        row = (self.reads if left else self.writes).index(key)
        return self.x + (0 if left else self.width), self.y + HEAD + ROW * (row + 0.5) + 4


def svg(graph: KeyFlow) -> str:
    """Return a key graph as an SVG document."""
    boxes = _boxes(graph)
    wires = _wires(graph, boxes)
    _place(boxes)
    paths, lowest = _paths(wires, boxes)
    width = max((box.x + box.width for box in boxes), default=0) + MARGIN
    height = lowest + LEGEND + MARGIN
    width = max(width, 470)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="#ffffff"/>',
        *paths,
        *(_box(graph, box, idx - len(graph.inputs)) for idx, box in enumerate(boxes)),
        _legend(graph, height - MARGIN + 4),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _boxes(graph: KeyFlow) -> list[Box]:
    boxes = [Box(None, dotted(key), (), (key,)) for key in graph.inputs]
    for idx, node in enumerate(graph.nodes):
        title = node.label if node.name == str(idx) else f"{node.name}: {node.label}"
        boxes.append(Box(node, title, node.reads, node.writes))
    for box in boxes:
        if box.node is None:
            box.width, box.height = len(box.title) * CHARACTER + 2 * PAD, 30.0
            continue
        left = max((len(dotted(key)) for key in box.reads), default=0)
        right = max((len(dotted(key)) for key in box.writes), default=0)
        keys = (left + right + 3) * CHARACTER
        box.width = max(len(box.title) * WIDE_CHARACTER, keys, len(_note(box.node)) * 6.5) + 2 * PAD
        box.height = HEAD + ROW * max(len(box.reads), len(box.writes), 1) + 10
    return boxes


Wire = tuple[Box, NestedKey, Box, NestedKey, bool]


def _wires(graph: KeyFlow, boxes: list[Box]) -> list[Wire]:
    """Return the wires between ports, and set the columns of the boxes."""
    inputs, steps = boxes[: len(graph.inputs)], boxes[len(graph.inputs) :]
    wires: list[Wire] = []
    for idx, box in enumerate(steps):
        box.column = 1 if inputs else 0
        for key in box.reads:
            for origin in [steps[source] for source in graph.producers(idx, key)] or [
                next(b for b in inputs if is_prefix(b.writes[0], key))
            ]:
                written = next(w for w in origin.writes if is_prefix(w, key) or is_prefix(key, w))
                alive = all(b.node is None or b.node.needed for b in (origin, box))
                wires.append((origin, written, box, key, alive))
                box.sources.append(origin)
                box.column = max(box.column, origin.column + 1)
    return wires


def _place(boxes: list[Box]) -> None:
    columns: dict[int, list[Box]] = {}
    for box in boxes:
        columns.setdefault(box.column, []).append(box)
    tallest = max((_height(column) for column in columns.values()), default=0.0)
    x = float(MARGIN)
    for number in sorted(columns):
        column = columns[number]
        column.sort(key=_middle_of_sources)
        y = MARGIN + (tallest - _height(column)) / 2
        wide = max(box.width for box in column)
        for box in column:
            box.x = x + (wide - box.width) * (1 if box.node is None else 0)
            box.y = y
            if box.node is not None:
                box.width = wide
            y += box.height + GAP_Y
        x += wide + GAP_X


def _height(column: list[Box]) -> float:
    return sum(box.height for box in column) + GAP_Y * (len(column) - 1)


def _middle_of_sources(box: Box) -> float:
    middles = [source.y + source.height / 2 for source in box.sources]
    return sum(middles) / len(middles) if middles else 0.0


def _paths(wires: list[Wire], boxes: list[Box]) -> tuple[list[str], float]:
    """Return the wires as SVG, and the lowest position that is used.

    A wire that would cross a box is routed below the boxes in between, each in its own lane.
    """
    lowest = max((box.y + box.height for box in boxes), default=0.0)
    lanes: dict[tuple[int, NestedKey], float] = {}
    paths = []
    for origin, written, box, key, alive in wires:
        start, end = origin.port(written, left=False), box.port(key, left=True)
        between = [b for b in boxes if origin.column < b.column < box.column]
        span = (min(start[1], end[1]) - 8, max(start[1], end[1]) + 8)
        blocked = [b for b in between if b.y < span[1] and b.y + b.height > span[0]]
        if not blocked:
            paths.append(_curve(start, end, alive))
            continue
        lane = lanes.setdefault((id(origin), written), lowest + LANE)
        lowest = max(lowest, lane)
        paths.append(_detour(start, end, lane, alive))
    return paths, lowest


def _curve(start: tuple[float, float], end: tuple[float, float], alive: bool) -> str:
    (x0, y0), (x1, y1) = start, end
    bend = max((x1 - x0) / 2, BEND)
    return _path(
        f"M{x0:.1f} {y0:.1f} C{x0 + bend:.1f} {y0:.1f} {x1 - bend:.1f} {y1:.1f} {x1:.1f} {y1:.1f}",
        alive,
    )


def _detour(start: tuple[float, float], end: tuple[float, float], lane: float, alive: bool) -> str:
    (x0, y0), (x1, y1) = start, end
    return _path(
        f"M{x0:.1f} {y0:.1f} "
        f"C{x0 + BEND:.1f} {y0:.1f} {x0 + BEND:.1f} {lane:.1f} {x0 + 2 * BEND:.1f} {lane:.1f} "
        f"H{x1 - 2 * BEND:.1f} "
        f"C{x1 - BEND:.1f} {lane:.1f} {x1 - BEND:.1f} {y1:.1f} {x1:.1f} {y1:.1f}",
        alive,
    )


def _path(data: str, alive: bool) -> str:
    return f'<path class="{"edge" if alive else "edge dead"}" d="{data}"/>'


def _box(graph: KeyFlow, box: Box, idx: int) -> str:
    x, y, node = box.x, box.y, box.node
    if node is None:
        return (
            f'<g><rect class="input" x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" '
            f'height="{box.height:.1f}" rx="15"/>'
            f'<text class="input-key" x="{x + box.width / 2:.1f}" y="{y + 19.5:.1f}" '
            f'text-anchor="middle">{escape(box.title)}</text></g>'
        )
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}"'
    parts = [
        f'<g class="{"step" if node.needed else "dead"}">',
        f"<title>{escape(node.name)}</title>",
        f'<rect class="box" {shape} height="{box.height:.1f}" rx="8"/>',
        f'<path class="head" d="M{x + 1:.1f} {y + HEAD - 2:.1f} v{-HEAD + 11} q0 -8 8 -8 '
        f'h{box.width - 18:.1f} q8 0 8 8 v{HEAD - 11} z"/>',
        f'<text class="title" x="{x + PAD:.1f}" y="{y + 18:.1f}">{escape(box.title)}</text>',
        f'<text class="note" x="{x + PAD:.1f}" y="{y + 33:.1f}">{escape(_note(node))}</text>',
    ]
    for key in box.reads:
        px, py = box.port(key, left=True)
        parts.append(f'<circle class="port" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>')
        parts.append(f'<text x="{px + 11:.1f}" y="{py + 4:.1f}">{escape(dotted(key))}</text>')
    for key in box.writes:
        px, py = box.port(key, left=False)
        shown = graph.is_output_of(idx, key) and node.needed
        port, text = ("port output", "output-key") if shown else ("port", "")
        parts.append(f'<circle class="{port}" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>')
        parts.append(
            f'<text class="{text}" x="{px - 11:.1f}" y="{py + 4:.1f}" text-anchor="end">'
            f"{escape(dotted(key))}</text>"
        )
    return "\n".join([*parts, "</g>"])


def _note(node: KeyNode) -> str:
    count = f"{node.parameters:,} parameters" if node.parameters else "no parameters"
    return count if node.needed else "not needed"


def _legend(graph: KeyFlow, y: float) -> str:
    entries = [
        ('<rect class="input" x="0" y="-9" width="18" height="12" rx="6"/>', "input", 66),
        ('<circle class="port output" cx="9" cy="-3" r="4.5"/>', "output", 72),
        ('<circle class="port" cx="9" cy="-3" r="4.5"/>', "used inside", 98),
    ]
    if any(not node.needed for node in graph.nodes):
        dead = '<g class="dead"><rect class="box" x="0" y="-9" width="18" height="12" rx="3"/></g>'
        entries.append((dead, "not needed", 100))
    parts, x = [], MARGIN
    for sign, text, width in entries:
        label = f'<text class="note" x="25">{text}</text>'
        parts.append(f'<g transform="translate({x} {y:.1f})">{sign}{label}</g>')
        x += width
    return "\n".join(parts)


# The key graph as users hold it: the flow of keys, and the ways to show it.


class KeyGraph(KeyFlow):
    """The steps of a keyed module in order, and the keys between them.

    Attributes:
        nodes: The steps, in order.
        out_keys: The outputs that are visible; None stands for all that is written.

    Example:
        >>> from torch import nn
        >>> from kd_nn import TensorDictModule, TensorDictSequential
        >>> graph = TensorDictSequential(
        ...     TensorDictModule(nn.Linear(3, 4), ["x"], ["hidden"]),
        ...     TensorDictModule(nn.ReLU(), ["hidden"], [("out", "y")]),
        ... ).key_graph()
        >>> graph.inputs, graph.writes
        (('x',), ('hidden', ('out', 'y')))
        >>> graph.summary()
        step  module  in_keys   out_keys    parameters
        0     Linear  x         hidden              16
        1     ReLU    hidden    out.y                0
    """

    __slots__ = ()

    def to_mermaid(self) -> str:
        """Return the graph as Mermaid text; steps that are not needed are grey.

        Returns:
            A `flowchart`, which many Markdown viewers draw.
        """
        return mermaid(self)

    def to_svg(self, path: str | Path | None = None) -> str:
        """Return the graph as an SVG picture; steps that are not needed are grey.

        Args:
            path: Where to write the picture too.

        Returns:
            The SVG document.
        """
        text = svg(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def summary(self) -> Table:
        """Return a table: step, module, keys, parameters, and shapes if they are known.

        It is a string, which a prompt shows as lines and a notebook as a table.
        """
        return table(self)

    def __repr__(self) -> str:
        """Return a short table; `summary` gives all of it."""
        return table(self, short=True)

    def _repr_svg_(self) -> str:
        """Return the picture that a notebook shows."""
        return self.to_svg()
