"""Where in the user's module a node of a graph, or an error, comes from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx


def place_of(node: fx.Node) -> str:
    """Name the sub-module that an operator was called in, and nothing if it is not known."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    path = path.removeprefix("module").lstrip(".")
    name = kind if isinstance(kind, str) else kind.__qualname__
    return f" in `{path or name.rsplit('.', 1)[-1]}`"


def line_of(text: str) -> str:
    """Name the innermost line of source that a stack trace shows, and nothing if it shows none."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\n\s+(\S.*)', text)
    if not found:
        return ""
    file, line, function, code = found[-1]
    return f" at `{code.strip()}` (`{function}`, {Path(file).name}:{line})"
