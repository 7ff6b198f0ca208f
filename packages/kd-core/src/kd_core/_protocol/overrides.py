"""Mechanism of `__torch_function__`: what happens when torch meets a container.

Two tables decide. `FUNCTIONS` maps a torch function to ours (`torch.stack`), for functions of
several containers. `METHODS` maps a torch function to the *name* of a method, so that the method of
a subclass wins; its second name is the method to call when the container is the second operand
(`tensor - td` is `td.__rsub__(tensor)`). Knows tables; must not know a container. The hop costs
1.7 us, most of it inside torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from kd_core._errors import UnsupportedFunction
from kd_core._keys import nearest_key

TorchFunction: TypeAlias = Callable[..., object]

FUNCTIONS: Final[dict[TorchFunction, Callable[..., object]]] = {}
METHODS: Final[dict[TorchFunction, tuple[str, str | None]]] = {}


def call(
    func: TorchFunction, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
) -> object:
    """Call what stands for a torch function.

    Raises:
        UnsupportedFunction: if the function is in neither table; the message names the nearest.
    """
    own = FUNCTIONS.get(func)
    if own is not None:
        return own(*args, **kwargs) if kwargs else own(*args)
    named = {} if kwargs is None else dict(kwargs)
    names = METHODS.get(func)
    if names is None:
        raise _unsupported(func)
    if not args and "input" in named:
        args = (named.pop("input"),)
    if not isinstance(args[0], Tensor) and hasattr(args[0], names[0]):
        return getattr(args[0], names[0])(*args[1:], **named)
    if names[1] is None or len(args) < 2 or not hasattr(args[1], names[1]):
        raise UnsupportedFunction(
            f"`{name_of(func)}` takes a container as its first argument, but there a "
            f"`{type(args[0]).__name__}` came. Exchange the operands, or use `apply`."
        )
    return getattr(args[1], names[1])(args[0], *args[2:], **named)


def name_of(func: TorchFunction) -> str:
    """The name under which a user calls a torch function."""
    name = getattr(func, "__name__", repr(func))
    for space, prefix in ((torch, "torch"), (Tensor, "torch.Tensor")):
        if getattr(space, name, None) is func:
            return f"{prefix}.{name}"
    public = torch.overrides.resolve_name(func)
    return name if public is None else public


def _alike(name: str, other: str) -> bool:
    """Whether one may be meant by the other: names of functions are short, so little is alike."""
    return difflib.SequenceMatcher(None, name, other).ratio() > 0.75 or other.strip("_") in name


def _unsupported(func: TorchFunction) -> UnsupportedFunction:
    name = name_of(func)
    bare = {name_of(each).rpartition(".")[2]: name_of(each) for each in (*METHODS, *FUNCTIONS)}
    last = name.rpartition(".")[2]
    near = nearest_key(last, bare)
    text = f"`{name}` has no meaning for a container of tensors."
    if near is not None and _alike(last, str(near)):
        text += f" The nearest function that has one is `{bare[str(near)]}`."
    return UnsupportedFunction(f"{text} Apply it to each leaf with `td.apply({name})`.")
