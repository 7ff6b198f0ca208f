"""How the arguments of an operation resolve against a batch size, worked out once and remembered.

What `td.reshape(-1, 3)` does to the leaves follows from its arguments and the batch size alone:
checking them takes 2 us, looking up the result 0.1. A plan holds functions without state, so
threads may share it; it never holds a tensor. Under `torch.compile` and `torch.export` sizes may be
symbolic, and nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from types import FunctionType
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from torch.compiler import is_compiling

if TYPE_CHECKING:
    from kd_core._types import Batch, BatchFn, LeafFn

P = ParamSpec("P")
R = TypeVar("R")


Plan: TypeAlias = "tuple[LeafFn, Batch, BatchFn]"
"""What an operation does to a container of one batch size.

What it does to a leaf; the batch size that comes out; the same for nested containers, which may
have more batch dimensions. A plain tuple, since dynamo traces the making of any other for 2 ms.
"""


def plan(old: Batch, leaf: LeafFn, new: Batch) -> Plan:
    """Return a plan that replaces the leading dimensions `old` by `new`."""
    ndim = len(old)
    return leaf, new, lambda batch: new + batch[ndim:]


def remembered(resolve: Callable[P, R]) -> Callable[P, R]:
    """Call a function once for each of its arguments, where these are exactly integers.

    Python takes 2, 2.0 and True for the same key, so what is not a plain integer, string, `None`,
    function or tuple of these is never looked up: it reaches the function, which validates it.
    """
    known = lru_cache(maxsize=1024)(resolve)

    @wraps(resolve)
    def look_up(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return resolve(*args, **kwargs)
        for arg in args:
            if arg.__class__ is not int and not _is_exact(arg):
                return resolve(*args, **kwargs)
        return known(*args)

    return look_up


def _is_exact(arg: object) -> bool:
    """Return whether an argument is equal only to what means the same."""
    kind = arg.__class__
    if kind is not tuple:
        return arg is None or kind is int or kind is str or kind is FunctionType
    for each in arg:  # type: ignore[attr-defined]  # a tuple
        if each.__class__ is not int and not _is_exact(each):
            return False
    return True
