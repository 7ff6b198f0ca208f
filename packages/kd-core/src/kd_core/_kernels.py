"""Running one function over all leaves: the foreach kernels, and constants in place of numbers.

Together with `_leaves` the only place that knows foreach. What it buys, measured on 128 leaves of
(10, 4) on one thread: `x + 1` costs 2.2 us a leaf in a loop over a dict, 1.0 with the number made a
0-dim tensor once, 0.9 when a foreach kernel then takes all leaves.

Nothing here may change a result by a bit:

- A foreach kernel does per leaf what the loop does, promotion included, so lists of mixed dtypes
  are fine. Subclasses with functions of their own are looped over, as are leaves of which some need
  gradients and some do not (of a foreach kernel all results would), and so is everything under
  vmap, for which foreach has no rule. Below eight leaves a foreach call gains nothing.
- A 0-dim tensor stands for a number only where torch casts both to the dtype of the leaf before it
  computes: + - * / on float32 and float64 leaves. It is never used under compile, under a dispatch
  mode (fake tensors), nor for zeros and NaN, whose equality hides a sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

Kernel: TypeAlias = Callable[..., object]
"""A foreach function: lists of tensors and more, to a sequence of tensors (or nothing)."""

FOREACH_FROM: Final = 8
_PLAIN: Final[frozenset[type]] = frozenset({Tensor, Parameter})
_EXACT: Final = frozenset({torch.float32, torch.float64})
_LARGEST_EXACT: Final = 2**24
_CONSTANTS_LIMIT: Final = 1024
_constants: Final[dict[tuple[torch.dtype, float], Tensor]] = {}
_dtype_of: Final = attrgetter("dtype")
_requires_grad: Final = attrgetter("requires_grad")
_is_cpu: Final = attrgetter("is_cpu")
_vmap_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def is_eager() -> bool:
    """Tell whether torch computes right now: no tracing, no vmap, no dispatch mode."""
    return not is_compiling() and _vmap_level() is None and not _modes()


def use_foreach(leaves: Sequence[Tensor]) -> bool:
    """Tell whether a foreach kernel may, and is worth to, take these leaves at once."""
    return _are_many(leaves) and not are_mixed(leaves)


def _are_many(leaves: Sequence[Tensor]) -> bool:
    """Tell whether foreach is worth it, and the leaves and what is going on leave the choice."""
    count = len(leaves)
    if count < FOREACH_FROM and (count < 2 or not leaves[0].is_cuda):
        return False
    if is_compiling() or _vmap_level() is not None:
        return False
    return _PLAIN.issuperset(map(type, leaves))


def are_mixed(leaves: Sequence[Tensor]) -> bool:
    """Tell whether some leaves need gradients and some do not.

    Of a foreach kernel all results then need gradients, or it fails if there are integers.
    """
    if not torch.is_grad_enabled() or not any(map(_requires_grad, leaves)):
        return False
    return not all(map(_requires_grad, leaves))


def _mix(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Tell whether some results of pairs would need gradients and some would not."""
    if not torch.is_grad_enabled():
        return False
    if not any(map(_requires_grad, mine)) and not any(map(_requires_grad, theirs)):
        return False
    return not all(map(_requires_grad, mine)) and not all(map(_requires_grad, theirs))


def run(leaves: list[Tensor], fn: Callable[..., Tensor], kernel: Kernel | None) -> list[Tensor]:
    """Apply a function of one tensor to all leaves."""
    if kernel is not None and use_foreach(leaves):
        return kernel(leaves)  # type: ignore[return-value]  # a foreach kernel gives the leaves
    return [fn(leaf) for leaf in leaves]


def run_with(
    leaves: list[Tensor], operand: object, fn: Callable[..., Tensor], kernel: Kernel | None
) -> list[Tensor]:
    """Apply a function of two to all leaves and one number or 0-dim tensor."""
    if kernel is not None and not isinstance(operand, Tensor) and use_foreach(leaves):
        return kernel(leaves, operand)  # type: ignore[return-value]  # as above
    return [fn(leaf, operand) for leaf in leaves]


def run_pairs(
    mine: list[Tensor], theirs: list[Tensor], fn: Callable[..., Tensor], kernel: Kernel | None
) -> list[Tensor]:
    """Apply a function of two tensors to pairs of leaves."""
    if kernel is not None and _are_many(mine) and _are_many(theirs) and not _mix(mine, theirs):
        return kernel(mine, theirs)  # type: ignore[return-value]  # as above
    return list(map(fn, mine, theirs))


def run_copies(targets: list[Tensor], sources: list[Tensor], tracked: bool) -> None:
    """Copy each source into its target; one of (10, 4) costs 0.6 us, of several at once each 0.3.

    Args:
        targets: what is written.
        sources: of the same shapes.
        tracked: whether gradients flow through any; of all foreach kernels this one has none.
    """
    if (
        not tracked
        and len(targets) > 1
        and not is_compiling()
        and _vmap_level() is None
        and _PLAIN.issuperset(map(type, targets))
        and _PLAIN.issuperset(map(type, sources))
    ):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def run_exact(
    leaves: list[Tensor], number: object, fn: Callable[..., Tensor], kernel: Kernel
) -> list[Tensor] | None:
    """Apply + - * or / of a number to all leaves, the number made a tensor once.

    Args:
        leaves: all leaves.
        number: the second operand.
        fn: for one leaf.
        kernel: for all leaves and one 0-dim tensor.

    Returns:
        The results, or `None` where a tensor in place of the number might change them.
    """
    constant = exact_constant(leaves, number)
    if constant is None:
        return None
    if len(leaves) >= FOREACH_FROM:
        results = cast("list[Tensor]", kernel(leaves, constant))
        if not results[0].requires_grad or not are_mixed(leaves):  # asked afterwards, it costs less
            return results
    return [fn(leaf, constant) for leaf in leaves]


def exact_constant(leaves: list[Tensor], number: object) -> Tensor | None:
    """The 0-dim tensor that does in + - * / exactly what this number does, or `None`."""
    if is_compiling() or (number.__class__ is not float and number.__class__ is not int):
        return None
    if not leaves or _vmap_level() is not None or _modes():
        return None
    dtype = leaves[0].dtype
    if dtype not in _EXACT:
        return None
    if len(leaves) < FOREACH_FROM:
        for leaf in leaves:
            if leaf.dtype is not dtype or leaf.__class__ not in _PLAIN or not leaf.is_cpu:
                return None
    elif (
        len(set(map(_dtype_of, leaves))) > 1
        or not all(map(_is_cpu, leaves))
        or not _PLAIN.issuperset(map(type, leaves))
    ):
        return None
    known = _constants.get((dtype, cast(float, number)))
    return _new_constant(dtype, cast(float, number)) if known is None else known


def _new_constant(dtype: torch.dtype, number: float | int) -> Tensor | None:
    if number == 0 or math.isnan(number):
        return None
    if isinstance(number, int) and abs(number) > _LARGEST_EXACT:
        return None
    if len(_constants) >= _CONSTANTS_LIMIT:
        _constants.clear()
    with torch.inference_mode(False):  # an inference tensor could not be saved for backward
        constant = torch.tensor(number, dtype=dtype, device="cpu")
    _constants[dtype, number] = constant
    return constant


# The kernels for one 0-dim tensor. By its name `other` it is taken as the tensor that it is; by
# position torch reads the number out of it, and wraps that anew for each leaf.


def add_tensor(leaves: list[Tensor], constant: Tensor) -> object:
    """Add one 0-dim tensor to all leaves."""
    return torch._foreach_add(leaves, other=constant)


def add_tensor_(leaves: list[Tensor], constant: Tensor) -> object:
    """Add one 0-dim tensor to all leaves in place."""
    return torch._foreach_add_(leaves, other=constant)


def sub_tensor(leaves: list[Tensor], constant: Tensor) -> object:
    """Subtract one 0-dim tensor from all leaves."""
    return torch._foreach_add(leaves, other=constant, alpha=-1)


def sub_tensor_(leaves: list[Tensor], constant: Tensor) -> object:
    """Subtract one 0-dim tensor from all leaves in place."""
    return torch._foreach_add_(leaves, other=constant, alpha=-1)


def mul_tensor(leaves: list[Tensor], constant: Tensor) -> object:
    """Multiply all leaves with one 0-dim tensor."""
    return torch._foreach_mul(leaves, other=constant)


def mul_tensor_(leaves: list[Tensor], constant: Tensor) -> object:
    """Multiply all leaves with one 0-dim tensor in place."""
    return torch._foreach_mul_(leaves, other=constant)


def div_tensor(leaves: list[Tensor], constant: Tensor) -> object:
    """Divide all leaves by one 0-dim tensor."""
    return torch._foreach_div(leaves, other=constant)


def div_tensor_(leaves: list[Tensor], constant: Tensor) -> object:
    """Divide all leaves by one 0-dim tensor in place."""
    return torch._foreach_div_(leaves, other=constant)
