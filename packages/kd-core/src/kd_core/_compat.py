"""Differences between the supported versions of torch, by feature test, and of Python.

Also what torch offers only together with its compiler, whose import takes long. Names that torch
does not promise to keep are in `_torch_private`.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, ParamSpec, SupportsIndex, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

if TYPE_CHECKING:
    from typing import TypeVar

    R = TypeVar("R")


P = ParamSpec("P")


def _clone_each(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    return [leaf.clone() for leaf in leaves]


clone_all: Final[Callable[[list[Tensor]], Sequence[Tensor]]] = getattr(
    torch, "_foreach_clone", _clone_each
)
"""Clone all leaves at once, by a kernel that newer versions have."""


_VERSION: Final = tuple(map(int, torch.__version__.split(".")[:2]))
_SINCE_2_13: Final = _VERSION >= (2, 13)

CONSTANT_OBJECTS: Final = _SINCE_2_13
"""Whether dynamo can compare tuples that belong to an object which it treats as a constant.

Older versions raise an internal error. No feature test shows it, so the version decides.
"""

SYMBOLS_ARE_INT: Final = _VERSION >= (2, 14)
"""Whether the class of a symbolic size is `int` to dynamo, as that of a number. As above."""

TRACES_SUBCLASSED_INT: Final = _SINCE_2_13
"""Whether dynamo traces arithmetic of a subclass of `int`. No feature test shows it either."""


def to_index(value: object) -> int:
    """Return `operator.index(value)`; the dynamo of older versions does not trace it on a tensor.

    Raises:
        TypeError: if the value is not an integer.
    """
    if (
        is_dynamo_compiling()
        and isinstance(value, Tensor)
        and value.numel() == 1
        and not (value.is_floating_point() or value.is_complex())
    ):
        return int(value)
    return operator.index(cast("SupportsIndex", value))


def is_constant_size(size: int) -> bool:
    """Return whether a size is a number, not a symbol of a program that is being traced."""
    if not is_compiling():
        return size.__class__ is int
    from torch.fx.experimental.symbolic_shapes import has_static_value  # the compiler has loaded it

    return has_static_value(size)


def is_possible(condition: bool) -> bool:
    """Return whether a condition may hold: a traced program may learn that only when it runs."""
    if not is_dynamo_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # as above

    return guard_or_true(condition)


def is_known_size(size: int) -> bool:
    """Return whether a size is a number, or a symbol whose number dynamo may make a constant.

    Of a size that depends on data, dynamo knows nothing: neither that it is not 0, nor not 1.
    """
    if not is_dynamo_compiling():
        return is_constant_size(size)
    return not (is_possible(size == 0) and is_possible(size == 1))


def larger(one: int, other: int) -> int:
    """Return the larger of two numbers, as a symbol if a traced program does not know which."""
    if not is_possible(one < other):
        return one
    if not is_possible(one > other):
        return other
    return cast("int", torch.sym_max(one, other))  # type: ignore[no-untyped-call]  # torch's


def smaller(one: int, other: int) -> int:
    """Return the smaller of two numbers, as a symbol if a traced program does not know which."""
    if not is_possible(one > other):
        return one
    if not is_possible(one < other):
        return other
    return cast("int", torch.sym_min(one, other))  # type: ignore[no-untyped-call]  # torch's


def signature_of(function: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a callable, whose annotations may name what is not defined.

    From Python 3.14 they are computed when they are asked for.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def annotations_of(cls: type) -> Mapping[str, object]:
    """Return the annotations of a class itself, which may name what is not defined; as above."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(cls, format=Format.FORWARDREF)
    return inspect.get_annotations(cls)
