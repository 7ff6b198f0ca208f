"""Dispatch of `__torch_function__`: what is called when a torch function gets a container.

There are three tables. `METHODS` maps a torch function to the *name* of a method, so that
subclasses can override it; its second name is the method to call when the container is the second
operand (`tensor - td` is `td.__rsub__(tensor)`). `FUNCTIONS` maps a torch function of several
containers (`torch.stack`) to its implementation, `ELEMENTWISE` one that treats each leaf, or each
element, alone. While dynamo traces, names are constants, and a table of few functions adds few
guards: "ops" in the benchmarks. Knows tables; must not know a container.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

from kd_core._errors import UnsupportedFunction
from kd_core._keys import nearest_key
from kd_core._nodes.entry import is_node
from kd_core._torch_private import (
    HigherOrderOperator,
    assume_constant_result,
    without_torch_function,
)

TorchFunction: TypeAlias = Callable[..., object]

FUNCTIONS: Final[dict[TorchFunction, Callable[..., object]]] = {}
ELEMENTWISE: Final[dict[TorchFunction, Callable[..., object]]] = {}
METHODS: Final[dict[TorchFunction, tuple[str, str | None]]] = {}
_INSTEAD: Final[dict[TorchFunction, str]] = {
    torch.equal: "Write `(a == b).all()`, which compares the leaves of equal keys.",
    torch.allclose: "Write `torch.testing.assert_close(a, b)`, or `((a - b).abs() < atol).all()`.",
}
"""What to write for functions that give one answer for two containers."""


def call(
    cls: type,
    func: TorchFunction,
    types: Sequence[type],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> object:
    """Call the implementation of a torch function for containers: their `__torch_function__`.

    Raises:
        UnsupportedFunction: if the function is in no table; the message names a similar one.
    """
    own = FUNCTIONS.get(func)
    if own is None:
        names = _method_of(func)
        if names is not None:
            return _call_method(func, names, args, {} if kwargs is None else dict(kwargs))
        own = ELEMENTWISE.get(func)
    if own is None:
        if is_dynamo_compiling() and (func is checkpoint or isinstance(func, HigherOrderOperator)):
            with without_torch_function():  # it calls a function of the user
                return func(*args, **kwargs) if kwargs else func(*args)
        raise UnsupportedFunction(_unsupported(func))
    return own(*args, **kwargs) if kwargs else own(*args)


def _call_method(
    func: TorchFunction,
    names: tuple[str, str | None],
    args: Sequence[object],
    kwargs: dict[str, object],
) -> object:
    if not args and "input" in kwargs:
        args = (kwargs.pop("input"),)
    if is_node(args[0]) and hasattr(args[0], names[0]):
        if getattr(args[0], "_kd_tensor_class", None) is not None:
            return getattr(args[0]._kd_engine, names[0])(*args, **kwargs)  # type: ignore[attr-defined]  # a container
        return getattr(args[0], names[0])(*args[1:], **kwargs)
    if names[1] is None or len(args) < 2 or not is_node(args[1]):
        raise UnsupportedFunction(
            f"the first argument of `{name_of(func)}` must be a container, got a "
            f"`{type(args[0]).__name__}`. Exchange the operands, or use `apply`."
        )
    if getattr(args[1], "_kd_tensor_class", None) is not None:
        return getattr(args[1]._kd_engine, names[1])(args[1], args[0], *args[2:], **kwargs)  # type: ignore[attr-defined]  # as above
    return getattr(args[1], names[1])(args[0], *args[2:], **kwargs)


@assume_constant_result
def _method_of(func: TorchFunction) -> tuple[str, str | None] | None:
    return METHODS.get(func)


def functions() -> list[TorchFunction]:
    """List the functions of all tables."""
    return [*FUNCTIONS, *ELEMENTWISE, *METHODS]


def name_of(func: TorchFunction) -> str:
    """Return the public name of a torch function."""
    name = getattr(func, "__name__", repr(func))
    for space, prefix in ((torch, "torch"), (Tensor, "torch.Tensor")):
        if getattr(space, name, None) is func:
            return f"{prefix}.{name}"
    public = torch.overrides.resolve_name(func)
    return name if public is None else public


def _alike(name: str, other: str) -> bool:
    """Return whether two names are similar; strict, because names of functions are short."""
    return difflib.SequenceMatcher(None, name, other).ratio() > 0.75 or other.strip("_") in name


@assume_constant_result
def _unsupported(func: TorchFunction) -> str:
    """Return the text of the error for a function that is in no table."""
    name = name_of(func)
    bare = {name_of(each).rpartition(".")[2]: name_of(each) for each in functions()}
    last = name.rpartition(".")[2]
    near = nearest_key(last, bare)
    text = f"`{name}` is not supported for containers."
    if near is not None and _alike(last, str(near)):
        text += f" The most similar supported function is `{bare[str(near)]}`."
    remedy = _INSTEAD.get(func, f"Use `td.apply({name})` to apply it to each leaf.")
    return f"{text} {remedy}"
