"""Writing into leaves: all of them, or none.

torch raises an error when it writes into an expanded tensor, into a parameter while gradients are
recorded, or from a dtype that it cannot convert. Other leaves may have been written by then, so all
writes are checked before the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    KeySetMismatch,
    ShapeMismatch,
    cannot_broadcast,
    one_value_for_all,
    unknown_keys,
)
from kd_core._keys import format_key
from kd_core._leaves.arrays import tensor_of_array, tensor_of_list, tensor_of_numbers
from kd_core._leaves.foreach import (
    PLAIN,
    are_unwrapped,
    dtype_of,
    is_cpu,
    is_inference,
    is_meta,
    needs_grad,
    run_copies,
    shares_storage,
)
from kd_core._leaves.loops import (
    explain_shapeless,
    finder,
    first_refused,
    have_same_rows,
    is_shapeless,
    kept,
    unwrapped,
)
from kd_core._nodes import Encodes, encodes, is_any_data, is_unbatched
from kd_core._shapes import broadcasts_to
from kd_core._torch_private import (
    base_of,
    dispatch_modes,
    get_unwrapped,
    has_internal_overlap,
    is_functorch_wrapped_tensor,
    is_usual_view,
)

if TYPE_CHECKING:
    from kd_core._leaves.loops import Refused
    from kd_core._nodes import Entries, Node


Where: TypeAlias = tuple[str, ...] | Callable[[], tuple[str, ...]]
"""The path of a leaf, or a function that finds it; called for messages only."""

INCOMPLETE: Final = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Dtypes that torch writes at some indices only."""

_CONVERTED: Final = frozenset(
    {
        torch.bool,
        torch.uint8,
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *INCOMPLETE,
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    }
)
"""Dtypes that torch converts into each other without an error or a warning."""

_SPARSE: Final = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)

Values: TypeAlias = "tuple[Node | Encodes, object, tuple[str, ...]]"
"""An entry that holds values of rows, what is written to it, and its path."""


class Written(list[Tensor]):
    """The leaves of a container that are written, one after the other.

    It has no `__init__`, which every write in place would pay for: "update_" in the benchmarks.
    """


class Targets(Written):
    """The leaves of a container that is written, and its entries that hold values of rows.

    Attributes:
        values: the entries that hold values of rows.
        rows: how many of the tensors, the last ones, stand for such values.
    """

    values: Sequence[Values] = ()
    rows = 0

    def add_values(self, entry: Node, value: object, path: tuple[str, ...]) -> None:
        """Append an entry that holds values of rows, what is written to it, and its path."""
        self.values = [*self.values, (entry, value, path)]


def collect_writes(target: Node, source: Node) -> tuple[Targets, list[Tensor]]:
    """Return what is written where a container takes the values of another, and the sources.

    Tensors that stand for values of rows come last.

    Raises:
        KeySetMismatch: if the keys differ.
        InvalidArgument: if one value of a whole batch would be written by another one.
    """
    targets = Targets()
    sources: list[Tensor] = []
    target._kd_collect_pair(source, targets, sources, ())
    for entry, value, path in targets.values:
        if not encodes(entry):
            check_same_data(entry, value, path)
            continue
        stand_in, rows = entry._encode(value, path)
        targets.append(stand_in)
        sources.append(rows.expand(stand_in.shape))
        targets.rows += 1
    return targets, sources


def read_first(
    targets: Sequence[Tensor], sources: list[Tensor], start: int, ends: Iterable[int]
) -> None:
    """Clone the sources that are in the storage of a row of a stack which is written before.

    The rows of a stack are one tensor to its users: `stack[1:] = stack[:-1]` reads all of them
    before it writes one.

    Args:
        targets: the leaves that are written, row by row.
        sources: what is written there; clones replace some.
        start: the position of the first.
        ends: for each row, the position behind its last one.
    """
    if is_compiling():  # which asks no address, and clones nothing in the end
        sources[start:] = [source.clone() for source in sources[start:]]
        return
    mine, theirs = _homes(targets[start:]), _homes(sources[start:])
    if set(mine).isdisjoint(theirs):
        return
    written: set[int] = set()
    row = 0
    for end in ends:
        for position in range(row, end - start):
            source, home = sources[start + position], theirs[position]
            if source is targets[start + position]:
                continue
            if home in written or home == mine[position]:
                sources[start + position] = source.clone()
        written.update(mine[row : end - start])
        row = end - start


def _homes(leaves: Sequence[Tensor]) -> list[int]:
    """Return the address of the storage of each leaf; a number of its own for those without one."""
    try:
        if not any(map(Tensor.storage_offset, leaves)):  # "lazy stacks" in the benchmarks
            return list(map(Tensor.data_ptr, leaves))
        return [leaf.untyped_storage().data_ptr() for leaf in leaves]
    except RuntimeError:  # sparse tensors, those of vmap
        if len(leaves) == 1:
            return [-id(leaves[0])]
        return [home for leaf in leaves for home in _homes([leaf])]


Write: TypeAlias = tuple[Tensor, Tensor, Where]
"""The target (a leaf or rows of it), the source, and the path of the leaf."""


def write_all(writes: Sequence[Write], non_blocking: bool = False) -> None:
    """Copy each source into its target: all of them, or none.

    Args:
        writes: the targets and sources.
        non_blocking: do not wait for copies between pinned memory and a GPU.

    Raises:
        InvalidValue: if one of them cannot be written to.
    """
    if len(writes) > 1 and not non_blocking:
        targets, sources = [each[0] for each in writes], [each[1] for each in writes]
        if _are_common(targets, sources):
            run_copies(targets, sources, False)
            return
    commit(writes, _copy_later if non_blocking else _copy)


def commit(writes: Sequence[Write], write: Callable[[Tensor, Tensor], object]) -> None:
    """Write with a function of target and source: all of them, or none."""
    if is_compiling():
        for target, source, _ in writes:
            write(target, source)
        return
    plain = True
    if len(writes) > 1 or write is not _copy:  # `index_put_` writes where elements overlap
        recording = torch.is_grad_enabled()
        for each in writes:
            if _is_doubtful(each[0], each[1], recording):
                check_write(*each)
        plain = _check_wrapped(writes, write)
    elif writes:
        plain = type(writes[0][0]) in PLAIN and type(writes[0][1]) in PLAIN
    if plain or write not in (_copy, _copy_later):  # a write at an index may be of a large leaf
        _write_each(writes, write)
        return
    with putting_back([each[0] for each in writes], [each[1] for each in writes]):
        _write_each(writes, write)


def putting_back(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> AbstractContextManager[None]:
    """Return a context that writes the old values back if one of several copies fails in it."""
    return kept(targets, sources)


def _write_each(writes: Sequence[Write], write: Callable[[Tensor, Tensor], object]) -> None:
    for each in writes:
        target, source, _ = each
        try:
            write(target, source)
        except RuntimeError:
            check_write(*each)
            if not shares_storage(target, source):
                raise
            write(target, source.clone())  # they share memory: copy the source first


def _check_wrapped(writes: Sequence[Write], write: Callable[[Tensor, Tensor], object]) -> bool:
    """Check the writes that a leaf made of other tensors refuses; return whether all are plain."""
    targets, sources = [each[0] for each in writes], [each[1] for each in writes]
    if PLAIN.issuperset(map(type, targets)) and PLAIN.issuperset(map(type, sources)):
        return True
    refused = refused_write(write, targets, sources)
    if refused is not None:
        name = _name(writes[refused.position][2])
        raise InvalidValue(f"entry {name} cannot be written in place: {refused.reason}.")
    return False


def refused_write(
    write: Callable[..., object], targets: Sequence[Tensor], *columns: Sequence[object]
) -> Refused | None:
    """Return the first write that a leaf or operand made of other tensors refuses."""
    if are_unwrapped(*targets) and all(are_unwrapped(*column) for column in columns):
        return None
    return first_refused(write, targets, *columns)


def _copy(target: Tensor, source: Tensor) -> object:
    return target.copy_(source)


def _copy_later(target: Tensor, source: Tensor) -> object:
    return target.copy_(source, non_blocking=True)


def copy_over(target: Tensor, source: Tensor) -> Tensor:
    """Copy a source into a target; if they overlap, the source is cloned first."""
    try:
        return target.copy_(source)
    except RuntimeError:
        if is_compiling() or not shares_storage(target, source):
            raise
        return target.copy_(source.clone())


def check_write(target: Tensor, source: Tensor, where: Where) -> None:
    """Check that torch can copy a source into a target.

    Raises:
        InvalidValue: if it cannot; the message names the entry and the remedy.
    """
    reason = _copy_refusal(target, source)
    if reason is None and not are_unwrapped(target, source):
        reason = _tried_refusal(target, source)
    if reason is not None:
        raise InvalidValue(f"entry {_name(where)} cannot be written in place: {reason}")


def _copy_refusal(target: Tensor, source: Tensor) -> str | None:
    """Return why torch refuses to copy a source into a tensor, or `None`."""
    if target.layout is not source.layout:
        return f"the value must have the layout {target.layout}, got {source.layout}."
    reason = refusal(target, source) or overlap_refusal(target)
    if reason is None and not is_converted(target, source):
        return _tried_refusal(target, source)
    return reason


def is_converted(target: Tensor, source: Tensor) -> bool:
    """Return whether torch surely writes a source into a tensor as far as layout and dtype go."""
    if target.layout is not source.layout or target.layout in _SPARSE:
        return False
    return (target.dtype in _CONVERTED and source.dtype in _CONVERTED) or (
        target.dtype is source.dtype and target.dtype.is_complex
    )


def _tried_refusal(target: Tensor, source: Tensor) -> str | None:
    """Return why torch refuses to copy one tensor into another, by a try on a copy.

    Sparse and quantized tensors, and those that are made of others (`DTensor`), tell it only then.
    """
    try:
        target.detach().clone().copy_(source.detach())
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        return f"{reason}. Use `set` to replace the entry."
    return None


def _name(where: Where) -> str:
    return format_key(where() if callable(where) else where)


def _is_doubtful(target: Tensor, source: Tensor, recording: bool) -> bool:
    """Return whether torch might refuse the write: the fast check before `refusal`."""
    if source.is_meta or target.is_inference() or not is_converted(target, source):
        return True
    if recording and (target.requires_grad or source.requires_grad):
        return True
    return not is_whole(target)


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is dense and no two of its elements share memory."""
    try:
        return tensor.is_contiguous()
    except RuntimeError:  # compressed sparse tensors
        return False


def refusal(target: Tensor, *sources: object) -> str | None:
    """Return why torch refuses any write of these sources into a tensor, or `None`."""
    tensors = [source for source in sources if isinstance(source, Tensor)]
    if torch.is_grad_enabled() and (target.requires_grad or any(map(needs_grad, tensors))):
        reason = _graph_refusal(target)
        if reason is not None:
            return reason
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return (
            "it is an inference tensor. Write under `torch.inference_mode()`, or `set` a clone of "
            "it first."
        )
    if not target.is_meta and any(source.is_meta for source in tensors):
        return "the value is on the device `meta`, which holds no data."
    return None


def overlap_refusal(target: Tensor) -> str | None:
    """Return why torch refuses to write several values into a tensor, or `None`."""
    if not _may_overlap(target):
        return None
    while is_functorch_wrapped_tensor(target):  # `vmap` has no rule for the question
        target = get_unwrapped(target)
    if has_internal_overlap(target):
        return (
            "some of its elements share memory, as in an expanded tensor. `set` a clone of it "
            "first."
        )
    return None


def _graph_refusal(target: Tensor) -> str | None:
    """Return why autograd refuses to record a write into a tensor, or `None`."""
    base = base_of(target)
    if target.requires_grad and (target.is_leaf or (base is not None and base.is_leaf)):
        return (
            "it requires grad and is a leaf of the graph. Write under `torch.no_grad()`, or "
            "`set` a new tensor."
        )
    if base is None or is_usual_view(target):
        return None
    return (
        "it is a view created in no_grad mode, or by `unbind`, `split` or `chunk`, and gradients "
        "do not flow through such a write. `set` a clone of it first."
    )


def _may_overlap(target: Tensor) -> bool:
    return target.layout is torch.strided and not target.is_contiguous()


def copy_pairs(targets: list[Tensor], sources: list[Tensor]) -> bool:
    """Copy each source into its target; return `False`, with nothing written, if unsure.

    The caller then takes the slow path, which checks each write.
    """
    singly = own = False
    if not _are_common(targets, sources):
        recording, compiling = torch.is_grad_enabled(), is_compiling()
        for target, source in zip(targets, sources, strict=True):
            if not compiling and (is_shapeless(target) or is_shapeless(source)):
                return False
            if target.shape != source.shape:
                return False
            if compiling or (recording and (target.requires_grad or source.requires_grad)):
                singly = True
            if not compiling and _copy_refusal(target, source) is not None:
                return False
        own = not (compiling or PLAIN.issuperset(map(type, (*targets, *sources))))
        singly = singly or own
        if singly and not compiling and refused_write(_copy, targets, sources) is not None:
            return False
    try:
        if own:
            with putting_back(targets, sources):
                run_copies(targets, sources, singly)
        else:
            run_copies(targets, sources, singly)
    except RuntimeError:  # they share memory: the slow path writes all again
        return False
    return True


def _are_common(targets: list[Tensor], sources: list[Tensor]) -> bool:
    """Return whether torch surely copies all: the usual tensors, each looked at once.

    Each attribute that is read shows in the benchmarks, "update_": the dtypes in one loop
    of C; only inference tensors have no version, and only tensors with data of their own, which
    are dense, have an address.
    """
    if is_compiling() or has_torch_function(sources) or not PLAIN.issuperset(map(type, targets)):
        return False
    known = _CONVERTED.issuperset(map(dtype_of, [*targets, *sources]))
    if not known and not all(map(is_converted, targets, sources)):  # complex ones pass here
        return False
    recording = torch.is_grad_enabled()
    try:
        for target, source in zip(targets, sources):  # noqa: B905  # asking for `strict` costs
            if target.shape != source.shape or not source.data_ptr():
                return False
            if recording and (target.requires_grad or source.requires_grad):
                return False
            if not target.is_contiguous() or target._version < 0:
                return False
    except RuntimeError:  # inference tensors, sparse ones, those of vmap
        return False
    return True


def are_rows_of(leaves: list[Tensor], sources: list[Tensor], count: int) -> bool:
    """Return whether torch surely writes each source into that many rows of a leaf on the CPU.

    The attributes of all are read in loops of C, as in `_are_common`.
    """
    both = [*leaves, *sources]
    dtypes = list(map(dtype_of, both))
    if dtypes[: len(leaves)] != dtypes[len(leaves) :] or not _CONVERTED.issuperset(dtypes):
        return False
    if not all(map(is_cpu, both)) or (torch.is_grad_enabled() and any(map(needs_grad, both))):
        return False
    try:
        for leaf, source in zip(leaves, sources):  # noqa: B905  # asking for `strict` costs
            shape = list(leaf.shape)
            shape[0] = count
            if list(source.shape) != shape or source.layout is not torch.strided:
                return False
            if leaf._version < 0 or not leaf.is_contiguous():
                return False
    except RuntimeError:  # inference tensors, nested and sparse ones
        return False
    return True


def put_rows(leaves: list[Tensor], sources: list[Tensor], rows: Tensor) -> None:
    """Write sources into rows of leaves; `are_rows_of` has passed them, and the rows exist."""
    for leaf, source in zip(leaves, sources):  # noqa: B905  # as above
        try:
            leaf[rows] = source
        except RuntimeError:
            if not (shares_storage(leaf, source) or shares_storage(leaf, rows)):
                raise
            rows = rows.clone()  # which the leaf may hold
            leaf[rows] = source.clone()


def writable_source(where: Where, entry: Tensor, value: object) -> Tensor:
    """Return the tensor to copy into a leaf, checked.

    Raises:
        ShapeMismatch: if the value cannot be broadcast to the leaf.
        InvalidArgument: if the value cannot be converted to a tensor.
    """
    if isinstance(value, Tensor):
        source = value
    else:
        is_large = isinstance(value, int) and not -(2**63) <= value < 2**63
        source = as_source(where, value, entry.dtype if is_large else None)
    try:
        fits = broadcasts_to(source.shape, entry.shape)
    except RuntimeError as error:
        fits = have_same_rows(source, entry)
        if not fits:
            what = f"entry {_name(where)} and what is written there"
            explain_shapeless(error, what, source, entry)
            raise
    if not fits:
        raise cannot_broadcast(
            source.shape, _name(where), entry.shape, "Use `set` to replace the entry."
        )
    return source


def not_written(where: Where, entry: Node, value: object) -> InvalidArgument:
    """Build the error for a write in place to an entry that is not a tensor."""
    if is_any_data(entry):
        return one_value_for_all(
            _name(where), unwrapped(entry), unwrapped(value), entry._kd_desc.ndim
        )
    return InvalidArgument(
        f"entry {_name(where)} must be a tensor to be written in place, got a "
        f"`{type(entry).__name__}`. Use `update_` for a nested container, or `set` to replace the "
        "entry."
    )


def without_ones(source: Tensor, ndim: int) -> Tensor:
    """Return what torch writes to rows of `ndim` dimensions: leading ones of size 1 are dropped."""
    while source.ndim > ndim and source.shape[0] == 1:
        source = source[0]
    return source


def check_same_data(entry: Node, value: object, path: tuple[str, ...]) -> None:
    """Refuse to write rows of data that is one value, or one tensor, for the whole batch.

    Raises:
        InvalidArgument: if the value differs from that of the entry.
    """
    if is_any_data(entry) and entry._agrees(value):
        return
    if is_unbatched(entry):
        raise InvalidArgument(
            f"entry {format_key(path)} is an `UnbatchedTensor`, one tensor for all rows, and "
            "cannot be written at some of them with values that are not known to be equal. Use "
            "`set_` to write it for all rows, or leave it out with `exclude`."
        )
    raise one_value_for_all(
        format_key(path), unwrapped(entry), unwrapped(value), entry._kd_desc.ndim
    )


def unknown_below(
    source: Mapping[str, object], entries: Entries, path: tuple[str, ...]
) -> KeySetMismatch:
    """Build the error for a source that has keys which the container at a path lacks."""
    unknown = [str(key) for key in source if key not in entries]
    where = f" below {format_key(path)}" if path else ""
    return unknown_keys(unknown, entries, where)


def as_source(where: Where, value: object, dtype: torch.dtype | None = None) -> Tensor:
    """Return a number, list or array as a tensor to write.

    Raises:
        InvalidArgument: if it is something else, or the dtype cannot hold it.
    """
    try:
        if dtype is not None and isinstance(value, (int, float, complex)):
            return torch.zeros((), dtype=dtype).fill_(value)  # converts as torch does in place
        array = tensor_of_array(value)
        if array is None:
            array = tensor_of_list(value)
        return tensor_of_numbers(value if array is None else array, dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        into = "" if dtype is None else f", whose dtype is {dtype}"
        raise InvalidArgument(
            f"cannot write {value!r} of type `{type(value).__name__}` to {_name(where)}{into}: "
            f"{error}. Pass a tensor, a number, or a list of numbers or of tensors of one shape."
        ) from None


# In-place functions of all leaves: checked before the first write.
#
# The state of each leaf is checked, and the function is tried on an element or two of each kind of
# leaf and operand, to find out whether torch accepts their dtypes. Leaves of one floating point
# dtype that record no gradients need neither (the fast path).

Column: TypeAlias = Sequence[object]
"""The values of one operand, one for each leaf: all tensors, or the same number repeated."""

_USUAL: Final = frozenset({torch.float32, torch.float64})
"""The dtypes whose in-place functions accept numbers and tensors of the same dtype."""

_LARGEST: Final = 1e30
"""The largest number that is taken to fit each of these dtypes."""

_DIVIDES: Final = (Tensor.div_, Tensor.floor_divide_, Tensor.remainder_, Tensor.fmod_)
"""Functions that raise where an integer is divided by zero."""

_UNRECORDED: Final = frozenset(
    {Tensor.logical_and_, Tensor.logical_or_, Tensor.logical_xor_, Tensor.logical_not_}
)
"""Functions without a derivative that torch runs on any tensor, those that need gradients too."""


def writing(fn: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the in-place form of a function of two for which torch has none."""

    def write(leaf: Tensor, other: Tensor) -> Tensor:
        # A leaf that is kept by the history of its own new value would never be freed.
        mine = leaf.clone() if leaf.requires_grad and torch.is_grad_enabled() else leaf
        result = fn(mine, mine if other is leaf else other)
        if _rank(result.dtype) > _rank(leaf.dtype):
            raise InvalidValue(
                f"result type {result.dtype} cannot be cast to the dtype {leaf.dtype} of the leaf"
            )
        if result.shape != leaf.shape:
            raise ShapeMismatch(
                f"the result of shape {tuple(result.shape)} does not fit the leaf of shape "
                f"{tuple(leaf.shape)}"
            )
        return leaf.copy_(result)

    return write


def _rank(dtype: torch.dtype) -> int:
    """Return the category of a dtype; as `torch.can_cast`, which dynamo does not trace."""
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype is not torch.bool)


maximum_ = writing(torch.maximum)
minimum_ = writing(torch.minimum)
fmax_ = writing(torch.fmax)
fmin_ = writing(torch.fmin)
logaddexp_ = writing(torch.logaddexp)


def check_in_place(
    entries: Entries,
    leaves: list[Tensor],
    fn: Callable[..., object],
    *columns: Column,
    refuse_overlap: bool = True,
) -> bool:
    """Refuse what torch would refuse for one leaf after others were written.

    Args:
        entries: the entries that hold the leaves, to name one in a message.
        leaves: the tensors that are written.
        fn: the function, called with a leaf and the value of each operand there.
        *columns: for each operand, its value at each leaf.
        refuse_overlap: whether torch refuses leaves whose elements overlap in memory.

    Returns:
        Whether all leaves are of one float dtype and no gradient is recorded for any of them.

    Raises:
        InvalidValue: if torch refuses to write into a leaf.
        ShapeMismatch: if an operand would enlarge a leaf.
    """
    if not leaves or is_compiling():  # tracing writes nothing
        return False
    if _are_written_often(leaves, columns):
        return True
    tensors = [each for each in columns if _is_of_tensors(each)]
    for column in tensors:
        for leaf, operand in zip(leaves, column, strict=True):
            if operand.shape != leaf.shape and not broadcasts_to(operand.shape, leaf.shape):
                raise _enlarges(entries, leaf, operand)
    doubtful = _is_doubtful_write(leaves, tensors)
    if doubtful:
        with torch.set_grad_enabled(torch.is_grad_enabled() and fn not in _UNRECORDED):
            _check_states(entries, leaves, columns, refuse_overlap)
    if not _are_usual(leaves, columns) or (doubtful and not all(map(_is_strided, leaves))):
        _rehearse(entries, leaves, fn, columns)
    refused = refused_write(fn, leaves, *columns)
    if refused is not None:
        raise _cannot_write(entries, leaves[refused.position], f"{refused.reason}.")
    return False


def _is_of_tensors(column: Column) -> TypeGuard[list[Tensor]]:
    """Return whether an operand is a tensor at each leaf; else it is a number at each."""
    return isinstance(column[0], Tensor)


def _are_written_often(leaves: list[Tensor], columns: Sequence[Column]) -> bool:
    """Return whether torch surely writes: the usual leaves and operands, looked at once.

    Each attribute that is read shows in the benchmarks: a leaf on the CPU is not on `meta`, and
    only inference tensors have no version.
    """
    dtype = leaves[0].dtype
    if dtype not in _USUAL or dispatch_modes():  # a mode would see the questions as operations
        return False
    if not PLAIN.issuperset(map(type, leaves)):
        return False
    recording = torch.is_grad_enabled()
    try:
        for leaf in leaves:
            if leaf.dtype is not dtype or (recording and leaf.requires_grad):
                return False
            if not leaf.is_contiguous() or leaf._version < 0:
                return False
        for column in columns:
            if not _are_common_operands(leaves, column, dtype, recording):
                return False
    except RuntimeError:  # compressed sparse tensors, inference tensors
        return False
    return True


def _are_common_operands(
    leaves: list[Tensor], column: Column, dtype: torch.dtype, recording: bool
) -> bool:
    """Return whether an operand is a number that all dtypes hold, or tensors like the leaves."""
    if not _is_of_tensors(column):
        return _is_usual_number(column[0])
    operands = column
    if not PLAIN.issuperset(map(type, operands)):
        return False
    for leaf, operand in zip(leaves, operands):  # noqa: B905  # asking for `strict` costs
        if operand.dtype is not dtype or (recording and operand.requires_grad):
            return False
        if not operand.is_same_size(leaf):
            return False
        if not (operand.is_cpu and leaf.is_cpu) and operand.device != leaf.device:
            return False
    return True


def _is_usual_number(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST


def _check_states(
    entries: Entries, leaves: list[Tensor], columns: Sequence[Column], refuse_overlap: bool
) -> None:
    for leaf, *operands in zip(leaves, *columns, strict=True):
        reason = refusal(leaf, *operands) or (overlap_refusal(leaf) if refuse_overlap else None)
        if reason is not None:
            raise _cannot_write(entries, leaf, reason)


def _is_strided(leaf: Tensor) -> bool:
    return leaf.layout is torch.strided


def _is_doubtful_write(leaves: list[Tensor], tensors: list[list[Tensor]]) -> bool:
    """Return whether torch may refuse a write because of the state of a leaf or operand."""
    try:
        if not all(map(Tensor.is_contiguous, leaves)) or any(map(is_inference, leaves)):
            return True
    except RuntimeError:  # compressed sparse tensors
        return True
    recording = torch.is_grad_enabled()
    if recording and any(map(needs_grad, leaves)):
        return True
    return any(
        any(map(is_meta, column)) or (recording and any(map(needs_grad, column)))
        for column in tensors
    )


def _are_usual(leaves: list[Tensor], columns: Sequence[Column]) -> bool:
    """Return whether all leaves and operands have the same of the usual dtypes."""
    dtype = leaves[0].dtype
    if dtype not in _USUAL or len(set(map(dtype_of, leaves))) > 1:
        return False
    for column in columns:
        first = column[0]
        if isinstance(first, Tensor):
            operands = column
            if set(map(dtype_of, operands)) != {dtype}:
                return False
            if len({*map(is_cpu, leaves), *map(is_cpu, operands)}) > 1:
                return False
        elif not _is_usual_number(first):
            return False
    return True


def _rehearse(
    entries: Entries, leaves: list[Tensor], fn: Callable[..., object], columns: Sequence[Column]
) -> None:
    """Call a function with one or two elements in place of each kind of leaf and operand."""
    divides = getattr(fn, "func", fn) in _DIVIDES
    seen: set[tuple[object, ...]] = set()
    for leaf, *operands in zip(leaves, *columns, strict=True):
        integers = divides and not (leaf.is_floating_point() or leaf.is_complex())
        single = leaf.numel() == 1  # only then does `fill_` take a number out of range
        kind = (leaf.layout, single, *[_kind(value, integers) for value in (leaf, *operands)])
        if kind in seen:
            continue
        seen.add(kind)
        if _is_strided(leaf):
            one = _one_of(leaf, False)
            target = one if single else one.repeat(2)
            values = [target, *[_stand_in(operand, integers) for operand in operands]]
        else:  # one element cannot represent it
            values = [leaf.detach().clone(), *operands]
        try:
            fn(*values)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            remedy = "Use the form without `_`, or cast the entry first."
            raise _cannot_write(entries, leaf, f"{reason}. {remedy}") from None


def _kind(value: object, divisor: bool = False) -> object:
    """Return what decides whether a function accepts a value: dtype, device, rank of tensors."""
    if not isinstance(value, Tensor):
        return None  # the same number at each leaf
    return value.dtype, value.device, not value.ndim, divisor and bool(value.all())


def _stand_in(value: object, divisor: bool = False) -> object:
    """Return one element with the dtype and device of a tensor; zero if a divisor has a zero."""
    return _one_of(value, divisor) if isinstance(value, Tensor) else value


def _one_of(value: Tensor, divisor: bool) -> Tensor:
    one = torch.ones((1,) if value.ndim else (), dtype=value.dtype, device=value.device)
    # Not `logical_and_`, which does not promote a bool beside torch.uint16.
    return one.mul_(value.all().to(value.dtype)) if divisor else one


def _enlarges(entries: Entries, leaf: Tensor, operand: Tensor) -> ShapeMismatch:
    name = format_key(finder(entries, leaf)())
    return cannot_broadcast(operand.shape, name, leaf.shape, "Use the form without `_`.")


def _cannot_write(entries: Entries, leaf: Tensor, reason: str) -> InvalidValue:
    name = format_key(finder(entries, leaf)())
    return InvalidValue(f"entry {name} of {leaf.dtype} cannot be written in place: {reason}")
