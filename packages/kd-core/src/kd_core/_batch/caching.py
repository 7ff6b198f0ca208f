"""The cache of plans: what the arguments of an operation mean for one batch size.

What `td.reshape(-1, 3)` does to the leaves depends on its arguments and the batch size alone, so it
is computed once and cached ("shape" in the benchmarks). A plan holds functions without state and
never a tensor, so threads may share it. Under `torch.compile` and `torch.export` sizes may be
symbolic, and nothing is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from types import FunctionType
from typing import TYPE_CHECKING, ParamSpec, TypeAlias

from torch.compiler import is_compiling

from kd_core._compat import traced_as

if TYPE_CHECKING:
    from typing import TypeVar

    from kd_core._types import Batch, BatchFn, LeafFn

    R = TypeVar("R")

P = ParamSpec("P")


Plan: TypeAlias = "tuple[LeafFn, Batch, BatchFn]"
"""What an operation does to a container of one batch size.

Its parts: a function from a leaf to the new leaf; the new batch size; a function from the batch
size of a nested container, which may have more dimensions, to the new one. A plain tuple is the
fastest to build while dynamo traces.
"""


def plan(old: Batch, leaf: LeafFn, new: Batch) -> Plan:
    """Return a plan that replaces the leading dimensions `old` by `new`."""
    ndim = len(old)
    return leaf, new, lambda batch: new + batch[ndim:]


def cached(resolve: Callable[P, R]) -> Callable[P, R]:
    """Cache the results of a function by its arguments.

    To a Python dict 2, 2.0 and True are the same key. So only plain integers, strings, `None`,
    functions and tuples of these are looked up; other arguments reach the function, which checks
    them.
    """
    known = lru_cache(maxsize=1024)(resolve)

    @traced_as(resolve)
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
    """Return whether an argument can be a key of the cache."""
    kind = arg.__class__
    if kind is not tuple:
        return arg is None or kind is int or kind is str or kind is FunctionType
    for each in arg:  # type: ignore[attr-defined]  # a tuple
        if each.__class__ is not int and not _is_exact(each):
            return False
    return True
