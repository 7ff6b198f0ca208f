"""One function on all leaves: foreach kernels, and 0-dim tensors in place of numbers.

Only this package calls foreach kernels. They and the 0-dim tensors make arithmetic on many leaves
faster ("math" in the benchmarks); neither may change a single bit of a result:

- A foreach kernel computes for each leaf what the loop computes, type promotion included, so lists
  of mixed dtypes are allowed. The loop is the fallback for subclasses of tensors, for leaves of
  which only some require gradients (all results of a foreach kernel would), and under vmap, for
  which foreach has no rule. With fewer than `FOREACH_FROM` leaves a foreach call is hardly faster.
- A 0-dim tensor replaces a number only where torch casts both to the dtype of the leaf before it
  computes: + - * / on float32 and float64 leaves. It is not used while compiling, under a dispatch
  mode (fake tensors), or for zeros and NaN, which do not compare by their bits.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from operator import add, attrgetter, le
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn import Parameter

from kd_core._torch_private import (
    clone_all,
    dispatch_modes,
    is_traceable_wrapper_subclass,
    maybe_current_level,
    no_torch_function,
)

if TYPE_CHECKING:
    from typing import Self

Kernel: TypeAlias = Callable[..., Any]
"""A foreach function: lists of tensors and more, to a sequence of tensors (or nothing)."""

FOREACH_FROM: Final = 4
CONSTANT_FROM: Final = 4
"""The fewest leaves for which a foreach kernel is faster with a 0-dim tensor than a loop."""
PLAIN: Final[frozenset[type]] = frozenset({Tensor, Parameter})
_EXACT: Final = frozenset({torch.float32, torch.float64})
_LARGEST_EXACT: Final = 2**24
_CONSTANTS_LIMIT: Final = 1024
_constants: Final[dict[tuple[torch.dtype, float, type], Tensor]] = {}
dtype_of: Final = attrgetter("dtype")
needs_grad: Final = attrgetter("requires_grad")
is_meta: Final = attrgetter("is_meta")
is_cpu: Final = attrgetter("is_cpu")
is_complex: Final = Tensor.is_complex
is_inference: Final = Tensor.is_inference
_bytes_of: Final = attrgetter("nbytes")


def is_eager() -> bool:
    """Return whether torch computes right now: no tracing, no vmap, no dispatch mode."""
    return not is_compiling() and maybe_current_level() is None and not dispatch_modes()


def is_ragged(leaf: Tensor) -> bool:
    """Return whether a leaf has rows of different lengths, which are reduced one by one."""
    if type(leaf) is Tensor:  # most leaves: "math" in the benchmarks
        return False
    return leaf.is_nested and leaf.layout is torch.jagged and not is_dynamo_compiling()


def use_foreach(leaves: Sequence[Tensor], alike: bool = False) -> bool:
    """Return whether a foreach kernel may, and is worth to, take these leaves at once.

    Args:
        leaves: all leaves.
        alike: whether they are known to be plain tensors without recorded gradients, not traced.
    """
    if alike:  # asking for the class of each again shows in "zero_, 16" in the benchmarks
        return _are_enough(leaves) and maybe_current_level() is None
    return _are_many(leaves) and not are_mixed(leaves)


def _are_enough(leaves: Sequence[Tensor]) -> bool:
    count = len(leaves)
    return count >= FOREACH_FROM or (count >= 2 and leaves[0].is_cuda)


def _are_many(leaves: Sequence[Tensor]) -> bool:
    """Return whether there are enough leaves for foreach, all plain tensors, and no tracing."""
    if not _are_enough(leaves) or is_compiling() or maybe_current_level() is not None:
        return False
    return PLAIN.issuperset(map(type, leaves))


def are_mixed(leaves: Sequence[Tensor]) -> bool:
    """Return whether some leaves require gradients and some do not.

    All results of a foreach kernel would then require gradients; with integer leaves it fails.
    """
    if not torch.is_grad_enabled() or not any(map(needs_grad, leaves)):
        return False
    return not all(map(needs_grad, leaves))


def _made(kernel: Kernel, leaves: list[Tensor], operand: object = None) -> list[Tensor] | None:
    """Return the results of a foreach kernel, or `None` where the loop is needed.

    Whether only some results should require gradients is checked after the call, on the first
    result: checking all leaves before the call is slower.
    """
    try:
        made: list[Tensor] = kernel(leaves) if operand is None else kernel(leaves, operand)
    except RuntimeError:  # integers beside leaves with gradients, or an error of the loop too
        return None
    if not made[0].requires_grad:
        return made
    if isinstance(operand, list):
        pairs = zip(leaves, operand, strict=True)
        alike = all(mine.requires_grad or theirs.requires_grad for mine, theirs in pairs)
    else:
        alike = all(map(needs_grad, leaves))
    return made if alike else None


def run(leaves: list[Tensor], fn: Callable[..., Tensor], kernel: Kernel | None) -> list[Tensor]:
    """Apply a function of one tensor to all leaves."""
    made = None if kernel is None or not _are_many(leaves) else _made(kernel, leaves)
    return [fn(leaf) for leaf in leaves] if made is None else made


def run_with(
    leaves: list[Tensor], operand: object, fn: Callable[..., Tensor], kernel: Kernel | None
) -> list[Tensor]:
    """Apply a function of two to all leaves and one number or 0-dim tensor."""
    made = None
    if kernel is not None and not isinstance(operand, Tensor) and _are_many(leaves):
        made = _made(kernel, leaves, operand)
    return [fn(leaf, operand) for leaf in leaves] if made is None else made


def run_pairs(
    mine: list[Tensor], theirs: list[Tensor], fn: Callable[..., Tensor], kernel: Kernel | None
) -> list[Tensor]:
    """Apply a function of two tensors to pairs of leaves."""
    made = None
    if kernel is not None and _are_many(mine) and _are_many(theirs):
        made = _made(kernel, mine, theirs)
    return list(map(fn, mine, theirs)) if made is None else made


def wraps_tensors(leaf: object) -> bool:
    """Return whether a leaf is made of other tensors and has no storage, as a `DTensor`."""
    return is_traceable_wrapper_subclass(leaf)


def are_unwrapped(*values: object) -> bool:
    """Return whether no value is made of other tensors."""
    found = [value for value in values if isinstance(value, Tensor)]
    return PLAIN.issuperset(map(type, found)) or not any(map(wraps_tensors, found))


class StandIn(Tensor):
    """A tensor that stands for values that are not tensors: a write into it stores them.

    Storing never fails once it is prepared. What torch makes of it is a plain tensor; `of` makes
    that a stand-in.

    Attributes:
        plain: the same tensor, plain.
    """

    __torch_function__ = no_torch_function
    plain: Tensor

    def prepare(self, source: Tensor) -> None:
        """Do what may fail of the copy of a source, which follows."""

    def store(self, numbers: Tensor, source: Tensor) -> None:
        """Store the values that a source stands for, where the given elements stand for them."""
        raise NotImplementedError

    def of(self, part: Tensor) -> Self:
        """Return a stand-in for a view of this one."""
        found = part.as_subclass(type(self))
        found.__dict__.update(self.__dict__)
        found.plain = part
        return found

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Self:
        """Store the values that a source stands for."""
        self.store(self.plain, source)
        return self

    def __setitem__(self, index: object, source: object) -> None:
        """Store the values that a source stands for at an index."""
        numbers = self.plain[index]  # type: ignore[index]  # torch checks it
        self.store(numbers, cast("Tensor", source))


def is_stand_in(leaf: Tensor) -> TypeGuard[StandIn]:
    """Return whether a tensor stands for values that are not tensors."""
    return isinstance(leaf, StandIn)


def prepare(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Do what may fail of copies into stand-ins, of a target and a source each, which follow."""
    for target, source in copies:
        if isinstance(target, StandIn):
            target.prepare(source)


def shares_storage(target: Tensor, source: Tensor) -> bool:
    """Return whether two tensors are in one storage; sparse and wrapping ones are not asked."""
    if target.layout is not torch.strided or source.layout is not torch.strided:
        return False
    if wraps_tensors(target) or wraps_tensors(source):
        return False
    return target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


# The same for functions that write into the leaves: what is asked, is asked before. `alike` is what
# `check_in_place` returned.


def run_(
    leaves: list[Tensor], fn: Callable[..., Tensor], kernel: Kernel | None, alike: bool
) -> None:
    """Apply a function that writes into each leaf."""
    if kernel is not None and use_foreach(leaves, alike) and wrote(kernel, leaves):
        return
    for leaf in leaves:
        fn(leaf)


def wrote(kernel: Kernel, leaves: list[Tensor], *operands: object) -> bool:
    """Call a kernel that writes into leaves; return `False`, with nothing written, if it cannot.

    torch refuses tensors that are conjugated or negated when they are read, before it writes.
    """
    lists = [leaves, *[each for each in operands if isinstance(each, list)]]
    if leaves[0].is_cuda and not are_apart(*lists):
        return False
    try:
        kernel(leaves, *operands)
    except RuntimeError:
        if not any(map(_has_lazy_bits, lists)):
            raise
        return False
    return True


def are_apart(leaves: list[Tensor], *operands: list[Tensor]) -> bool:
    """Return whether each leaf can be written at the same time as all others, as a GPU does.

    A loop writes a leaf that is stored under two keys twice, the second time what the first one
    gave, and reads what it has written in an operand that is another leaf. Leaves whose elements
    lie between those of others count as overlapping.
    """
    if _are_disjoint([*leaves, *chain.from_iterable(operands)]):
        return True
    spans = sorted((*_span(leaf), position) for position, leaf in enumerate(leaves))
    if any(end > start for (_, end, _), (start, _, _) in pairwise(spans)):
        return False
    starts = [start for start, _, _ in spans]
    for position, operand in (each for column in operands for each in enumerate(column)):
        start, end = _span(operand)
        at = bisect_left(starts, end) - 1  # the last leaf that may overlap it
        while at >= 0 and spans[at][1] > start:
            if spans[at][2] != position:
                return False
            at -= 1
    return True


def _are_disjoint(tensors: list[Tensor]) -> bool:
    """Return whether all are contiguous and no two overlap: "mul_" in the benchmarks of a GPU.

    Where two overlap, fewer of them have ended at a point of both than the order of the starts
    tells, so starts and ends may be sorted apart.
    """
    if not all(map(Tensor.is_contiguous, tensors)):
        return False
    starts = list(map(Tensor.data_ptr, tensors))
    ends = sorted(map(add, starts, map(_bytes_of, tensors)))
    starts.sort()
    return all(map(le, ends, starts[1:]))


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses between which the elements of a tensor are."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.itemsize * bool(tensor.numel())


def _has_lazy_bits(leaves: list[Tensor]) -> bool:
    return any(leaf.is_conj() or leaf.is_neg() for leaf in leaves)


def run_with_(
    leaves: list[Tensor],
    operand: object,
    fn: Callable[..., Tensor],
    kernel: Kernel | None,
    alike: bool,
) -> None:
    """Apply a function that writes into each leaf, of it and one number or 0-dim tensor."""
    if (
        kernel is not None
        and not isinstance(operand, Tensor)
        and use_foreach(leaves, alike)
        and not (kernel is torch._foreach_mul_ and any(map(is_complex, leaves)))  # other NaN
        and wrote(kernel, leaves, operand)
    ):
        return
    for leaf in leaves:
        fn(leaf, operand)


def run_pairs_(
    mine: list[Tensor],
    theirs: list[Tensor],
    fn: Callable[..., Tensor],
    kernel: Kernel | None,
    alike: bool,
) -> None:
    """Apply a function that writes into the first of each pair of leaves."""
    start = 0
    if kernel is not None and use_foreach(mine, alike) and use_foreach(theirs, alike):
        start = run_up_to_overlap(kernel, mine, theirs)
    for position in range(start, len(mine)):
        leaf, operand = mine[position], theirs[position]
        try:
            fn(leaf, operand)
        except RuntimeError:
            write_apart(fn, leaf, operand)


def run_up_to_overlap(
    kernel: Kernel, mine: list[Tensor], theirs: list[Tensor], *others: object
) -> int:
    """Call a kernel that writes into leaves one by one; return how many it wrote."""
    if mine[0].is_cuda and not are_apart(mine, theirs):
        return 0
    try:
        kernel(mine, theirs, *others)
    except RuntimeError:
        if _has_lazy_bits(mine) or _has_lazy_bits(theirs):
            return 0
        for position, (leaf, operand) in enumerate(zip(mine, theirs, strict=True)):
            if overlaps_in_part(leaf, operand):
                return position
        raise
    return len(mine)


def write_apart(fn: Callable[..., Tensor], leaf: Tensor, *operands: object) -> None:
    """Write into a leaf after torch refused, if it did for operands that overlap the leaf.

    They are read with the values that they had before. Called while the error of torch is handled.
    """
    if is_compiling() or not any(overlaps_in_part(leaf, each) for each in operands):
        raise  # the error that is being handled
    fn(leaf, *[each.clone() if isinstance(each, Tensor) else each for each in operands])


def as_it_was(operand: Tensor, leaves: list[Tensor]) -> Tensor:
    """Return one operand of several leaves, cloned where it is in the storage of one of them.

    It is read before that leaf is written, also for the leaves behind it.
    """
    if len(leaves) < 2 or not is_eager():
        return operand
    try:
        storage = operand.untyped_storage()
        start = storage.data_ptr()
        end = start + storage.nbytes()
        apart = not any(start <= place < end for place in map(Tensor.data_ptr, leaves))
    except RuntimeError:  # sparse tensors
        apart = False
    return operand if apart else operand.clone()


def overlaps_in_part(leaf: Tensor, operand: object) -> bool:
    """Return whether torch refuses to write into a leaf because an operand overlaps it.

    The rule of torch: both are dense, and their parts of one storage cross without being equal.
    """
    if not isinstance(operand, Tensor) or not shares_storage(leaf, operand):
        return False
    if not (leaf.numel() and operand.numel() and _is_dense(leaf) and _is_dense(operand)):
        return False
    start, other = leaf.data_ptr(), operand.data_ptr()
    if start == other and leaf.nbytes == operand.nbytes:
        return leaf.stride() != operand.stride()
    return start < other + operand.nbytes and other < start + leaf.nbytes


def _is_dense(tensor: Tensor) -> bool:
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def run_copies(targets: list[Tensor], sources: list[Tensor], singly: bool) -> None:
    """Copy each source into its target, with one foreach call where that is allowed.

    Each is read when its turn comes, as in a loop; one that overlaps its own target is cloned.

    Args:
        targets: the tensors that are written.
        sources: tensors of the same shapes.
        singly: copy one by one, as gradients and tensor subclasses require: `_foreach_copy_` has
            no derivative.
    """
    singly = singly or len(targets) < 2 or is_compiling() or maybe_current_level() is not None
    start = 0
    if not singly:
        try:  # not `suppress`, which costs as much as a copy: "update_" in the benchmarks
            start = run_up_to_overlap(torch._foreach_copy_, targets, sources)
        except NotImplementedError:  # on a GPU for uint16, uint32 and uint64
            start = 0
        if start == len(targets):
            return
    for target, source in zip(targets[start:], sources[start:], strict=True):
        try:
            target.copy_(source)
        except RuntimeError:
            write_apart(Tensor.copy_, target, source)


def clone_leaves(leaves: list[Tensor]) -> Sequence[Tensor]:
    """Clone all leaves: on a GPU by one kernel, where torch has one for each."""
    if not leaves[0].is_cuda or (torch.is_grad_enabled() and any(map(needs_grad, leaves))):
        return clone_all(leaves)
    copies = [torch.empty_like(leaf) for leaf in leaves]
    try:
        torch._foreach_copy_(copies, leaves)
    except RuntimeError:  # lazy bits, and dtypes for which torch has no kernel
        return clone_all(leaves)
    return copies


def run_exact(
    leaves: list[Tensor], number: object, fn: Callable[..., Tensor], kernel: Kernel
) -> list[Tensor] | None:
    """Apply + - * or / with a number to all leaves, the number converted to a 0-dim tensor.

    Args:
        leaves: all leaves.
        number: the second operand.
        fn: the function of one leaf and the operand.
        kernel: the foreach kernel for all leaves and one 0-dim tensor.

    Returns:
        The results, or `None` where a tensor in place of the number might change them.
    """
    constant = exact_constant(leaves, number)
    if constant is None:
        return None
    made = _made(kernel, leaves, constant) if len(leaves) >= CONSTANT_FROM else None
    return [fn(leaf, constant) for leaf in leaves] if made is None else made


def exact_constant(leaves: list[Tensor], number: object, alike: bool = False) -> Tensor | None:
    """Return the 0-dim tensor that does in + - * / exactly what this number does, or `None`.

    Args:
        leaves: the first operands.
        number: the second operand.
        alike: whether all leaves are known to be of one dtype.
    """
    if is_compiling() or (type(number) is not float and type(number) is not int):
        return None
    if not leaves or maybe_current_level() is not None or dispatch_modes():
        return None
    dtype = leaves[0].dtype
    if dtype not in _EXACT:
        return None
    if len(leaves) < CONSTANT_FROM:
        for leaf in leaves:
            if type(leaf) not in PLAIN or not (alike or leaf.dtype is dtype) or not leaf.is_cpu:
                return None
    elif (
        not (alike or len(set(map(dtype_of, leaves))) == 1)
        or not all(map(is_cpu, leaves))
        or not PLAIN.issuperset(map(type, leaves))
    ):
        return None
    # The type is part of the key: 2**24 + 1 as int and as float are equal, but rounded differently.
    known = _constants.get((dtype, number, type(number)))
    return _new_constant(dtype, number) if known is None else known


def _new_constant(dtype: torch.dtype, number: float | int) -> Tensor | None:
    if number == 0 or math.isnan(number):
        return None
    if isinstance(number, int) and abs(number) > _LARGEST_EXACT:
        return None
    if len(_constants) >= _CONSTANTS_LIMIT:
        _constants.clear()
    with torch.inference_mode(False):  # an inference tensor could not be saved for backward
        constant = torch.tensor(number, dtype=dtype, device="cpu")
    _constants[dtype, number, type(number)] = constant
    return constant


# The kernels for one 0-dim tensor. Passed by the keyword `other` it is used as a tensor; passed by
# position, torch reads its number and wraps it again for each leaf.


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
    """Multiply all leaves by one 0-dim tensor."""
    return torch._foreach_mul(leaves, other=constant)


def mul_tensor_(leaves: list[Tensor], constant: Tensor) -> object:
    """Multiply all leaves by one 0-dim tensor in place."""
    return torch._foreach_mul_(leaves, other=constant)


def div_tensor(leaves: list[Tensor], constant: Tensor) -> object:
    """Divide all leaves by one 0-dim tensor."""
    return torch._foreach_div(leaves, other=constant)


def div_tensor_(leaves: list[Tensor], constant: Tensor) -> object:
    """Divide all leaves by one 0-dim tensor in place."""
    return torch._foreach_div_(leaves, other=constant)
