"""The key graph as text: a plain table, and a flowchart in Mermaid."""

from __future__ import annotations

from kd_core import NestedKey
from kd_core.extending import Table, is_prefix
from kd_nn._keys.flow import KeyFlow

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
            lines.append(f"    {_edge(graph, idx, key, inputs)} s{idx}")
    for number, key in enumerate(graph.outputs):
        source = graph.producer(len(graph.nodes), key)
        if source is not None:
            lines.append(f'    s{source} --> out{number}(["{_escaped(dotted(key))}"]):::output')
    return "\n".join([*lines, *_CLASSES])


def _edge(graph: KeyFlow, idx: int, key: NestedKey, inputs: list[NestedKey]) -> str:
    source = graph.producer(idx, key)
    if source is None:
        holder = next(place for place, known in enumerate(inputs) if is_prefix(known, key))
        label = "" if inputs[holder] == key else f'|"{_escaped(dotted(key))}"|'
        return f"in{holder} -->{label}"
    dashed = not (graph.nodes[idx].needed and graph.nodes[source].needed)
    return f's{source} {"-.->" if dashed else "-->"}|"{_escaped(dotted(key))}"|'


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
