"""The torch functions that accept containers: tables of implementations and of method names.

An entry here makes `torch.f(td)` work. Functions of several containers are in `FUNCTIONS`; all
others are mapped to the name of a method, so that subclasses can override it.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kd_core._base import is_tensor_collection
from kd_core._combine.concatenating import cat
from kd_core._combine.stacking import stack
from kd_core._errors import wrong_type
from kd_core._ops.math.pointwise import OPERATORS, Arithmetic, Comparisons, Logic, Unary
from kd_core._ops.math.reduction import Reductions
from kd_core._ops.values.filling import fill_like
from kd_core._protocol import overrides
from kd_core._protocol.primitives import AbstractContainer

_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _list_rows() -> None:
    """Register the functions and operators that are generated as methods."""
    for name in (*_methods_of(Unary), *_methods_of(Reductions)):
        overrides.METHODS[getattr(torch, name)] = (name, None)
    for name in (*_methods_of(Arithmetic), *_methods_of(Logic), *_methods_of(Comparisons)):
        operator = OPERATORS.get(name)
        method = (name, _MIRRORED.get(name) or (f"__r{operator}__" if operator else None))
        overrides.METHODS[getattr(torch, name)] = method
        overrides.METHODS[getattr(Tensor, name)] = method
        if operator is not None:
            overrides.METHODS[getattr(Tensor, f"__{operator}__")] = method


def _methods_of(concern: type) -> list[str]:
    return [name for name in vars(concern) if not name.startswith("_")]


def _list_methods(names: str) -> None:
    """Register methods that have the name of a torch function."""
    for name in names.split():
        overrides.METHODS[getattr(torch, name)] = (name, None)


_list_rows()
_list_methods(
    "reshape flatten unflatten squeeze unsqueeze permute transpose swapaxes swapdims movedim "
    "moveaxis tile repeat_interleave roll flip fliplr flipud rot90 atleast_1d atleast_2d "
    "atleast_3d broadcast_to"
)
_list_methods("split chunk tensor_split unbind narrow index_select gather scatter")
_list_methods(
    "rsub is_floating_point all any clone cummax cummin cumprod cumsum quantile softmax "
    "log_softmax max min clamp clamp_min clamp_max lerp addcmul addcdiv "
    "masked_fill masked_select detach"
)


def _where(condition: Tensor, input: object, other: object) -> object:
    if is_tensor_collection(input):
        return input.where(condition, cast("AbstractContainer | Tensor | float", other))
    if not is_tensor_collection(other):
        remedy = "Pass a tensor as `condition`."
        raise wrong_type("`input` or `other` of `torch.where`", "a container", other, remedy)
    return other.where(~condition, cast("Tensor | float", input))


_FUNCTIONAL = dict(overrides.FUNCTIONS)
overrides.FUNCTIONS.clear()  # each compiled call walks the table up to the function that it guards
overrides.FUNCTIONS.update(
    {
        torch.stack: stack,
        torch.cat: cat,
        torch.concat: cat,
        torch.concatenate: cat,
        torch.where: _where,
    }
)
overrides.FUNCTIONS.update(_FUNCTIONAL)
for _like in (
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.empty_like,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
):
    overrides.FUNCTIONS[_like] = fill_like(_like)


def torch_functions() -> list[str]:
    """List the torch functions that accept containers.

    Any other function raises `UnsupportedFunction`; the message names a similar one.

    Returns:
        The public names, sorted.

    Example:
        >>> from kd_core import torch_functions
        >>> "torch.clone" in torch_functions()
        True
    """
    return sorted({overrides.name_of(func) for func in (*overrides.FUNCTIONS, *overrides.METHODS)})
