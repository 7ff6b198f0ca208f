"""The key graph as users hold it: the flow of keys, and the ways to show it."""

from __future__ import annotations

from pathlib import Path

from kd_core.extending import Table
from kd_nn._keys.flow import KeyFlow


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
        from kd_nn._keys.drawing import mermaid

        return mermaid(self)

    def to_svg(self, path: str | Path | None = None) -> str:
        """Return the graph as an SVG picture; steps that are not needed are grey.

        Args:
            path: Where to write the picture too.

        Returns:
            The SVG document.
        """
        from kd_nn._keys.svg import svg  # the `html` of Python loads all entities

        text = svg(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def summary(self) -> Table:
        """Return a table: step, module, keys, parameters, and shapes if they are known.

        It is a string, which a prompt shows as lines and a notebook as a table.
        """
        from kd_nn._keys.drawing import table

        return table(self)

    def __repr__(self) -> str:
        """Return a short table; `summary` gives all of it."""
        from kd_nn._keys.drawing import table

        return table(self, short=True)

    def _repr_svg_(self) -> str:
        """Return the picture that a notebook shows."""
        return self.to_svg()
