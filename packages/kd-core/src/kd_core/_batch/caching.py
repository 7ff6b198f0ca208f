"""How the arguments of an operation resolve against a batch size, worked out once and remembered.

What `td.reshape(-1, 3)` does to the leaves follows from its arguments and the batch size alone:
checking them takes 2 us, looking up what came of it 0.1. A plan holds functions without state, so
threads may share it; it never holds a tensor. Under `torch.compile` and `torch.export` sizes may be
symbolic, and nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
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
    """A plan that replaces the leading dimensions `old` by `new`."""
    ndim = len(old)
    return leaf, new, lambda batch: new + batch[ndim:]


def remembered(resolve: Callable[P, R]) -> Callable[P, R]:
    """Call a function of hashable arguments once for each of them."""
    known = lru_cache(maxsize=1024)(resolve)

    @wraps(resolve)
    def look_up(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return resolve(*args, **kwargs)
        try:
            return known(*args)
        except TypeError:  # a list, or a symbolic size: it has no hash
            pass
        return resolve(*args, **kwargs)

    return look_up
