"""The torch functions that take containers: a table from function to ours, and to method names.

A line here makes `torch.f(td)` work. Functions of several containers stand in `FUNCTIONS`; all
others name the method that does the work, so that a subclass which overrides the method is heard.
"""

from __future__ import annotations

import torch

from kd_core import _dispatch

_dispatch.METHODS.update(
    {
        torch.clone: ("clone", None),
    }
)


def torch_functions() -> list[str]:
    """List the torch functions that take containers.

    Any other one raises `UnsupportedFunction`, and names the nearest of these.

    Returns:
        Names as they are called, sorted.

    Example:
        >>> from kd_core import torch_functions
        >>> "torch.clone" in torch_functions()
        True
    """
    return sorted({_dispatch.name_of(func) for func in (*_dispatch.FUNCTIONS, *_dispatch.METHODS)})
