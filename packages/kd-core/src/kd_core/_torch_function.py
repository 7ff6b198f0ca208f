"""The torch functions that take containers: a table from function to ours, and to method names.

A line here makes `torch.f(td)` work. Functions of several containers stand in `FUNCTIONS`; all
others name the method that does the work, so that a subclass which overrides the method is heard.
"""

from __future__ import annotations

import torch

from kd_core import _dispatch
from kd_core._ops.table import ARITHMETIC, COMPARISONS, LOGIC, UNARY

_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _list_rows() -> None:
    """Enter the rows of the pointwise table: the functions, and what operators of tensors call."""
    for unary in UNARY:
        _dispatch.METHODS[getattr(torch, unary.name)] = (unary.name, None)
    for row in (*ARITHMETIC, *LOGIC, *COMPARISONS):
        mirrored = _MIRRORED.get(row.name) or (f"__r{row.operator}__" if row.operator else None)
        spellings = [row.name] if row.operator is None else [row.name, f"__{row.operator}__"]
        _dispatch.METHODS[getattr(torch, row.name)] = (row.name, mirrored)
        for name in spellings:
            _dispatch.METHODS[getattr(torch.Tensor, name)] = (row.name, mirrored)


_list_rows()
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
