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
    """Name the innermost line of the user's that a stack trace shows, nothing if it shows none."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\n\s+(\S.*)', text)
    own = [place for place in found if is_own(place[0])]
    if not own:
        return ""
    file, line, function, code = own[-1]
    return told(file, int(line), function, code)


def told(file: str, line: int, function: str, code: str) -> str:
    """Write a line of source as part of a sentence."""
    return f" at `{code.strip()}` (`{function}`, {Path(file).name}:{line})"


def is_own(file: str) -> bool:
    """Decide whether source is the user's: no generated code, none of torch's and none of kd's."""
    import torch

    parts = Path(file).parts
    generated = file.startswith("<")
    ours = any(part in ("kd_core", "kd_nn", "kd_probabilistic", "kd_export") for part in parts)
    return not (generated or ours or Path(file).is_relative_to(Path(torch.__file__).parent))
