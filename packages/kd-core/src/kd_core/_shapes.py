"""Arithmetic of batch shapes: validate, normalise, infer, and the shape of an index.

Knows tuples of integers; must not know containers. `as_int` is the one place that decides what an
integer argument may be. Sizes may be symbolic (under `torch.export`) and stay so. `OpenSize` is
the size of a dimension in which the members of a lazy stack differ.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, TypeAlias, cast

import torch
from torch.compiler import is_compiling, is_dynamo_compiling
from typing_extensions import TypeIs

from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    OutOfRange,
    ShapeMismatch,
    listed,
    not_valid,
    restores,
    wrong_type,
)
from kd_core._keys import nearest_key
from kd_core._torch_private import (
    CONSTANT_OBJECTS,
    SYMBOLS_ARE_INT,
    TRACES_SUBCLASSED_INT,
    assume_constant_result,
    is_constant_size,
    is_known_size,
    is_possible,
    larger,
    smaller,
    to_index,
    traced_as,
)
from kd_core._types import Dims

if TYPE_CHECKING:
    from typing import TypeVar

    from torch import Tensor

    from kd_core._types import Batch, BatchFn, BatchSize, LeafFn, Sizes

    R = TypeVar("R")


# Names of batch dimensions: a size that carries the name of its dimension.
#
# A batch size with names is a tuple of `NamedSize`, which is an `int` with another hash.
# Operations that rearrange sizes rearrange the names with them, and the caches of plans and
# descriptors, which are keyed by batch sizes, keep named ones apart. Containers without names pay
# nothing.
#
# Knows sizes; must not know containers.

Names: TypeAlias = tuple[str | None, ...]


class NamedSize(int):
    """The size of a batch dimension that has a name."""

    name: str
    plain: int
    """The size as an `int`. Not every version of dynamo traces `int(size)`."""

    def __new__(cls, size: int, name: str) -> NamedSize:
        """Return a size with a name."""
        new = super().__new__(cls, size)
        new.name = name
        new.plain = int(new)
        return new

    def __hash__(self) -> int:
        return hash((self.plain, self.name))

    def __reduce__(self) -> tuple[object, ...]:
        return NamedSize, (self.plain, self.name)

    def __deepcopy__(self, memo: dict[int, object]) -> NamedSize:
        return self


@restores
def restore_size(size: int, name: str) -> NamedSize:
    """Rebuild a size with a name; what a pickle calls that is read with `weights_only=True`."""
    if type(size) is not int or type(name) is not str:
        raise not_valid(f"{size!r} and {name!r} are not the size and the name of a dimension")
    return NamedSize(size, name)


def _trace_arithmetic() -> None:
    """Write the arithmetic of named sizes in Python, which older versions of dynamo can trace."""

    def unary(name: str) -> Callable[[NamedSize], object]:
        calculate = getattr(operator, name)
        return lambda size: calculate(size.plain)

    def binary(name: str) -> Callable[[NamedSize, int], object]:
        calculate = getattr(operator, name)
        return lambda size, other: calculate(size.plain, plain_size(other))

    def reflected(name: str) -> Callable[[NamedSize, int], object]:
        calculate = getattr(operator, name)
        return lambda size, other: calculate(plain_size(other), size.plain)

    for name in ("add", "sub", "mul", "floordiv", "mod"):
        setattr(NamedSize, f"__{name}__", binary(name))
        setattr(NamedSize, f"__r{name}__", reflected(name))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(NamedSize, f"__{name}__", binary(name))
    for name in ("neg", "pos", "abs"):
        setattr(NamedSize, f"__{name}__", unary(name))


if not TRACES_SUBCLASSED_INT:
    _trace_arithmetic()


def resized(old: int, new: int) -> int:
    """Return a size with the name that another one has."""
    return as_named(new, old.name) if isinstance(old, NamedSize) else new


def as_named(size: int, name: str | None) -> int:
    """Return a size with a name, if there is one; a size that depends on data has no name."""
    if name is None or not is_known_size(size):
        return size
    if isinstance(size, OpenSize):
        return size.with_name(name)
    return _named(operator.index(size), name)  # to dynamo a known symbol is not a constant


@assume_constant_result
def _named(size: int, name: str) -> int:
    """Return a size with a name: a constant while dynamo traces, which cannot build one."""
    return NamedSize(size, name)


def names_of(batch: Batch) -> Names:
    """Return the name of each dimension, or `None`."""
    return tuple([size.name if isinstance(size, (NamedSize, OpenSize)) else None for size in batch])


def _numbers(_: object, sizes: Batch) -> Batch | None:
    for size in sizes:
        if size.__class__ is not int and (size.__class__ is not NamedSize or not size.name):
            return None  # a symbol, which to dynamo is of neither class
    return sizes


def _static_numbers(_: object, sizes: Sequence[object]) -> Batch | None:
    known: list[int] = []
    for size in sizes:
        if not isinstance(size, int) or not is_constant_size(size):
            return None
        # A symbol of known value is not a constant to dynamo.
        named = isinstance(size, NamedSize) and size.name
        known.append(size if named else operator.index(size))
    return tuple(known)


def _unknown(_: object, sizes: Batch) -> Batch | None:
    return None


constants_of: Final = (
    _static_numbers if SYMBOLS_ARE_INT else _numbers if CONSTANT_OBJECTS else _unknown
)
"""Return sizes as numbers from which dynamo can compute while it traces; `None` for symbols.

The first argument lets a class take the function as a method, which dynamo does not guard. Names of
sizes are read for the sake of the guards: what is computed from the sizes has the names.
"""


def has_names(batch: Batch) -> bool:
    """Return whether a dimension has a name."""
    for size in batch:  # older versions of dynamo do not trace a generator
        if isinstance(size, NamedSize) or (isinstance(size, OpenSize) and size.name is not None):
            return True
    return False


def with_names(batch: Batch, names: Names) -> Batch:
    """Return a batch size whose first dimensions have these names; the others keep theirs."""
    pairs = zip(without_names(batch), names, strict=False)
    named = [
        size.with_name(name)
        if isinstance(size, OpenSize)
        else size
        if name is None
        else _named(operator.index(size), name)
        for size, name in pairs
    ]
    return (*named, *batch[len(named) :])


def plain_size(size: int) -> int:
    """Return a size without its name."""
    return size.plain if isinstance(size, NamedSize) else size


def without_names(batch: Batch) -> Batch:
    """Return a batch size of plain integers, but for sizes that differ among members."""
    return tuple([plain_size(size) for size in batch])


def checked_names(names: Sequence[str | None], batch: Batch) -> Names:
    """Return names as a tuple.

    Raises:
        InvalidArgument: if they are not a sequence, or one is neither a string nor `None`.
        InvalidValue: if there is not one for each dimension, or one is given twice.
    """
    what: object = names
    if isinstance(what, str) or not isinstance(what, Sequence):
        remedy = f"Write `[{what!r}]`." if isinstance(what, str) else ""
        raise wrong_type("names", "a list of strings or `None`", what, remedy)
    given = tuple(names)
    if not all(name is None or isinstance(name, str) for name in given):
        raise InvalidArgument(f"names must be strings or `None`, got {names!r}.")
    if len(given) != len(batch):
        raise InvalidValue(
            f"names must hold one name or `None` for each of the {len(batch)} batch dimensions, "
            f"got {len(given)}: {given}."
        )
    real = [name for name in given if name is not None]
    if len(set(real)) < len(real):
        raise InvalidValue(f"names must differ, got {given}. Use `None` for no name.")
    return given


def named_dim(name: str, batch: Batch) -> int:
    """Return the position of the dimension with a name.

    Raises:
        OutOfRange: if there is none.
    """
    names = names_of(batch)
    if name in names:
        return names.index(name)
    real = [each for each in names if each is not None]
    text = f"no batch dimension is named `{name}`; "
    text += f"the names are {listed(real)}." if real else "the container has no names."
    near = nearest_key(name, real)
    raise OutOfRange(text if near is None else f"{text} Did you mean `{near}`?")


# A batch dimension of a lazy stack in which its members have different sizes.


class OpenSize(int):
    """The size of a batch dimension that differs among the members of a lazy stack: -1.

    It knows its place in the batch size, and has no number to calculate with: arithmetic and order
    raise an error, so that no operation takes the -1 for a number of rows. Two are equal if they
    are of the same members at the same place.

    Attributes:
        sizes: the size in each member.
        place: the position in the batch size of the stack, and the number of its dimensions.
        name: the name that the dimension has in all members, or `None`.
    """

    sizes: Batch
    place: tuple[int, int]
    name: str | None

    def __new__(cls, sizes: Batch, place: tuple[int, int]) -> OpenSize:
        """Return the size of members."""
        new = super().__new__(cls, -1)
        new.sizes, new.place = sizes, place
        names = set(names_of(sizes))
        new.name = names.pop() if len(names) == 1 else None
        return new

    def with_name(self, name: str | None) -> OpenSize:
        """Return the same with another name, or without one."""
        return OpenSize(with_names(self.sizes, (name,) * len(self.sizes)), self.place)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpenSize):
            return False
        return self.place == other.place and self.sizes == other.sizes

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.sizes, self.place))

    def refused(self) -> ShapeMismatch:
        """Build the error of an operation that needs one size."""
        known = list(dict.fromkeys(_sizes_of_members(self)))
        shown = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
        dim, ndim = self.place
        return ShapeMismatch(
            f"the members of the lazy stack have different sizes in batch dimension {dim} of "
            f"{ndim}: {shown}; the operation needs one. `pad` the members to one size, "
            "work on one at a time, as `stack[i]`, or read an entry with "
            "`get(key, as_nested_tensor=True)`."
        )

    def _refuse(self, *_: object) -> NoReturn:
        raise self.refused()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __truediv__ = __rtruediv__ = _refuse
    __divmod__ = __rdivmod__ = __neg__ = __pos__ = __abs__ = __int__ = __bool__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


def _sizes_of_members(size: int) -> Iterator[int]:
    if not isinstance(size, OpenSize):
        yield plain_size(size)
        return
    for each in size.sizes:
        yield from _sizes_of_members(each)


def has_open(batch: Batch) -> bool:
    """Return whether a size differs among the members of a stack."""
    for size in batch:  # older versions of dynamo do not trace a generator
        if isinstance(size, OpenSize):
            return True
    return False


def refuse_open(batch: Batch) -> None:
    """Refuse a batch size with a size that differs among the members of a stack.

    Raises:
        ShapeMismatch: if there is one.
    """
    for size in batch:
        if isinstance(size, OpenSize):
            raise size.refused()


def definite(batch: Batch) -> Batch:
    """Return the leading sizes of a batch before one that differs among the members of a stack."""
    for dim, size in enumerate(batch):
        if isinstance(size, OpenSize):
            return batch[:dim]
    return batch


def stacked_batch(batches: Sequence[Batch], dim: int, count: int) -> Batch:
    """Return the batch size of a stack of members of as many dimensions, whose sizes may differ.

    Args:
        batches: the batch size of each member.
        dim: the stacked dimension.
        count: the number of members, which may carry the name of the dimension.
    """
    ndim = len(batches[0]) + 1
    sizes: list[int] = []
    for column in zip(*batches, strict=True):
        size, place = column[0], len(sizes) + (len(sizes) >= dim)
        if isinstance(size, OpenSize) or any(other != size for other in column):
            size = OpenSize(column, (place, ndim))
        sizes.append(size)
    return (*sizes[:dim], count, *sizes[dim:])


def batch_of_member(batch: Batch, dim: int, number: int) -> Batch:
    """Return the batch size of one member of a stack along a dimension.

    Raises:
        ShapeMismatch: if a size that differs among members is not of this stack: it was moved.
    """
    sizes: list[int] = []
    for at, size in enumerate(batch):
        if isinstance(size, OpenSize):
            if size.place != (at, len(batch)) or number >= len(size.sizes):
                raise size.refused()
            sizes.append(size.sizes[number])
        elif at != dim:
            sizes.append(size)
    return tuple(sizes)


def closed(batch: Batch, size: int) -> Batch:
    """Return a batch size with a number in place of each size that differs among members."""
    return tuple([size if isinstance(each, OpenSize) else each for each in batch])


def shown_sizes(batch: Batch) -> Batch:
    """Return a batch size as users see it: plain integers, -1 for a size that differs."""
    return tuple([-1 if isinstance(size, OpenSize) else plain_size(size) for size in batch])


Simple: TypeAlias = "int | slice | None"


def as_int(value: object) -> int:
    """Return an integer argument as an `int`.

    As in torch, integers, numpy integers and tensors with one integer are accepted, bools are not.

    Raises:
        InvalidArgument: if it is something else.
    """
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return cast("int", value)
    if not isinstance(value, bool) and getattr(value, "dtype", None) is not torch.bool:
        try:
            return to_index(value)
        except TypeError:
            pass
    raise InvalidArgument(f"expected an integer, got {value!r} of type `{type(value).__name__}`.")


def as_ints(values: Iterable[object]) -> Batch:
    """Return integer arguments as a tuple; see `as_int`."""
    ints = tuple(values)
    for value in ints:
        # dynamo can guard neither `type` nor `__class__` of a size of a container that it made.
        if not isinstance(value, int) or isinstance(value, bool):
            return tuple([as_int(each) for each in ints])
    return cast("Batch", ints)


def int_or_ints(value: object) -> int | Batch:
    """Return an argument that may be one integer, or a sequence of them."""
    if isinstance(value, int):
        return as_int(value)
    return as_ints(value) if _is_sequence(value) else as_int(value)


def _is_sequence(value: object) -> TypeIs[Iterable[object]]:
    """Return whether a value is iterable; a 0-d tensor is not."""
    if isinstance(value, int):  # dynamo cannot ask a symbolic size for attributes
        return False
    return hasattr(value, "__iter__") and getattr(value, "ndim", 1) > 0


def batch_of(batch_size: BatchSize) -> Batch:
    """Return a batch size as a tuple of integers.

    Raises:
        InvalidArgument: if it is not an integer or a sequence of integers.
    """
    if not isinstance(batch_size, (tuple, list)) and not _is_sequence(batch_size):
        batch_size = (batch_size,)
    try:
        return as_ints(batch_size)
    except InvalidArgument:
        raise InvalidArgument(f"batch_size must hold integers, got {batch_size!r}.") from None


def wrap_dim(dim: int | str, shape: int | Batch) -> int:
    """Return a dimension counted from the front.

    Args:
        dim: a dimension, or its name.
        shape: the number of dimensions, or the batch size, which may have names.

    Raises:
        OutOfRange: if the dimension does not exist.
        InvalidArgument: if it is not an integer.
    """
    ndim = shape if isinstance(shape, int) else len(shape)
    if type(dim) is not int:
        if isinstance(dim, str) and not isinstance(shape, int):
            return named_dim(dim, shape)
        dim = as_int(dim)
    if not -ndim <= dim < ndim:
        allowed = f"must be between {-ndim} and {ndim - 1}" if ndim else "batch_size is ()"
        raise OutOfRange(
            f"batch dimension {dim} is out of range: {allowed}. Use `apply` for trailing "
            "dimensions of entries."
        )
    return dim + ndim if dim < 0 else dim


def new_dim(dim: int | str, batch: Batch) -> int:
    """Return where a dimension is inserted: a position of the result, or in front of a name."""
    return wrap_dim(dim, batch if isinstance(dim, str) else len(batch) + 1)


def index_int(batch: Batch, index: int) -> Batch:
    """Return the batch shape after `td[index]`."""
    if not batch:
        raise too_many_indices((index,), batch)
    size = batch[0]
    plain = size.__class__ is int and index.__class__ is int
    if plain and not (SYMBOLS_ARE_INT and is_dynamo_compiling()):
        inside = -size <= index < size
    else:  # a size with a name, or symbols: torch checks what is known later
        size = plain_size(size)
        inside = is_possible(-size <= index) and is_possible(index < size)
    if not inside:
        raise OutOfRange(
            f"index {index} is out of range for batch_size {batch}: it must be between "
            f"{-size} and {size - 1}."
        )
    return batch[1:]


def index_slice(batch: Batch, index: slice) -> Batch:
    """Return the batch shape after `td[a:b:c]`."""
    if not batch:
        raise too_many_indices((index,), batch)
    return (resized(batch[0], slice_length(index, batch[0])), *batch[1:])


def slice_length(index: slice, size: int) -> int:
    """Return the number of rows that a slice takes of `size`."""
    # `index.indices(size)` would specialise a symbolic size; dynamo cannot compare a named one.
    size = plain_size(size)
    start, stop, step = index.start, index.stop, index.step
    traced = is_dynamo_compiling()  # it may not know which of two sizes is larger
    if start is None:
        start = 0
    elif traced or not isinstance(start, int) or not 0 <= start <= size:
        start = _position(start, size)
    if stop is None:
        stop = size
    elif traced or not isinstance(stop, int) or not 0 <= stop <= size:
        stop = _position(stop, size)
    length = stop - start
    if step is not None:
        if as_int(step) <= 0:
            raise InvalidValue(
                f"slices must have a positive step, got {step}. Use `flip` to reverse a dimension."
            )
        if step != 1:
            length = (length + step - 1) // step
    return length if not traced and length > 0 else larger(length, 0)


def _position(bound: object, size: int) -> int:
    """Return a bound of a slice, counted from the front and clamped to the size."""
    bound = as_int(bound)
    return larger(bound + size, 0) if bound < 0 else smaller(bound, size)


def index_simple(
    batch: Batch, index: tuple[object, ...]
) -> tuple[tuple[Simple, ...], Batch] | None:
    """Resolve an index of integers, slices, `None` and one `...`.

    Returns:
        The index without the ellipsis and the batch shape after it, or `None` if the index has
        other items.
    """
    items: list[Simple] = []
    out: list[int] = []
    position, ndim = 0, len(batch)
    for item in index:
        if item.__class__ is slice or item.__class__ is int:
            if position >= ndim:
                raise too_many_indices(index, batch)
            if isinstance(item, slice):
                size = batch[position]
                out.append(resized(size, slice_length(item, size)))
            elif not -batch[position] <= item < batch[position]:
                raise _no_such_row(item, position, batch)
            position += 1
            items.append(item)
        elif item is None:
            out.append(1)
            items.append(None)
        elif item is not Ellipsis or not all(_is_simple(other) for other in index):
            return None  # a mask may index several dimensions, so the rest is unknown
        else:
            check_ellipsis(index)
            rest = ndim - sum(other is not None and other is not Ellipsis for other in index)
            if rest > 0:
                items.extend([slice(None)] * rest)
                out.extend(batch[position : position + rest])
                position += rest
    return tuple(items), (*out, *batch[position:])


def check_ellipsis(items: Sequence[object]) -> None:
    """Refuse more than one `...`.

    Raises:
        OutOfRange: if there are two.
    """
    if sum(item is Ellipsis for item in items) > 1:
        raise OutOfRange("an index must hold at most one `...`, got several.")


def _is_simple(item: object) -> bool:
    return item is None or item is Ellipsis or item.__class__ is slice or item.__class__ is int


def _no_such_row(row: int, dim: int, batch: Batch) -> OutOfRange:
    return OutOfRange(f"index {row} is out of range for dimension {dim} of batch_size {batch}.")


def too_many_indices(items: Sequence[object], batch: Batch) -> OutOfRange:
    """Build the error of more indices than batch dimensions."""
    if not batch:
        return OutOfRange(
            "too many indices for batch_size (): the container has no batch dimension. Pass "
            "`batch_size=` when you build it, or call `auto_batch_size_()`."
        )
    shown = ", ".join(
        f"a {type(item).__name__}" if hasattr(item, "shape") else repr(item) for item in items
    )
    return OutOfRange(
        f"too many indices ({shown}) for batch_size {batch}: only batch dimensions are indexed. "
        "Index an entry for its trailing dimensions, as in `td['key'][..., 0]`."
    )


def sizes_of(sizes: Sequence[int | Sequence[int]]) -> Batch:
    """Return sizes or dimensions that are given as separate arguments or as one sequence."""
    if len(sizes) == 1 and _is_sequence(sizes[0]):
        return as_ints(sizes[0])
    return as_ints(sizes)


def one_per_dim(numbers: Sequence[int | Sequence[int]], batch: Batch, name: str) -> Batch:
    """Return dimensions, or counts of dimensions, as `sizes_of` does; refuse a call without any.

    A batch of () is the exception: `td.permute(*range(td.ndim))` is a call without argument there.
    """
    if not numbers and batch:
        raise InvalidArgument(
            f"`{name}` expected a number for each batch dimension, got no argument. Pass `()` to "
            "give none."
        )
    return sizes_of(numbers)


def numel(batch: Batch) -> int:
    """Return the product of the sizes."""
    count = 1
    for size in batch:
        count = size * count  # dynamo does not trace `count *= size` with a named one
    return count


def infer_sizes(sizes: Batch, count: int, what: str) -> Batch:
    """Return sizes whose product is `count`, with -1 replaced by the inferred size.

    Raises:
        InvalidValue: if -1 is given twice, or a size is below -1.
        ShapeMismatch: if the product of the sizes is not `count`.
    """
    known, is_open = 1, False
    for size in sizes:
        if size >= 0:
            known *= size
        elif size == -1 and not is_open:
            is_open = True
        else:
            raise InvalidValue(f"sizes must be non-negative, with at most one -1, got {sizes}.")
    if not is_open:
        if known != count:
            raise _sizes_do_not_fit(sizes, what)
        return sizes
    if known == 0 or count % known:
        raise _sizes_do_not_fit(sizes, what)
    return tuple(count // known if size == -1 else size for size in sizes)


def fitted(batch: Batch, shape: Sizes) -> Batch:
    """Return the batch size that the sizes of a reshape mean; see `infer_sizes`."""
    return infer_sizes(sizes_of(shape), numel(batch), f"batch_size {batch}")


def _sizes_do_not_fit(sizes: Batch, what: str) -> ShapeMismatch:
    return ShapeMismatch(
        f"sizes {sizes} do not fit {what}: their products must be equal. Use `apply` for trailing "
        "dimensions of entries."
    )


def numbered(dims: Dims, batch: Batch) -> int | Sequence[int]:
    """Return dimensions with numbers in place of names, in tuples and lists too.

    Raises:
        OutOfRange: if no dimension has a name.
    """
    if isinstance(dims, str):
        return named_dim(dims, batch)
    if isinstance(dims, (tuple, list)):
        return tuple([named_dim(dim, batch) if isinstance(dim, str) else dim for dim in dims])
    return cast("int | Sequence[int]", dims)  # no other sequence holds names


def numbers_of(dims: Dims, batch: Batch) -> Batch:
    """Return dimensions, one or a sequence, by number or by name, as a tuple of numbers.

    Raises:
        OutOfRange: if no dimension has a name.
    """
    return sizes_of([numbered(dims, batch)])


def wrap_dims(dims: Sequence[int], ndim: int) -> Batch:
    """Return dimensions counted from the front, each at most once.

    Raises:
        OutOfRange: if a dimension does not exist.
        InvalidValue: if one is given twice.
    """
    wrapped = tuple(wrap_dim(dim, ndim) for dim in dims)
    if len(set(wrapped)) < len(wrapped):
        raise InvalidValue(f"dimensions must be distinct, got {tuple(dims)}.")
    return wrapped


def expanded(batch: Batch, sizes: Batch) -> Batch:
    """Return the batch shape after `expand(*sizes)`; -1 keeps a size.

    Raises:
        ShapeMismatch: if a dimension larger than 1 would change, or dimensions would be lost.
    """
    lead = len(sizes) - len(batch)
    new = tuple(
        batch[i - lead] if size == -1 and i >= lead else size for i, size in enumerate(sizes)
    )
    pairs = zip(map(plain_size, batch), new[lead:], strict=True)
    if (
        lead < 0
        or any(size < 0 for size in new)
        or any(old != got and old != 1 for old, got in pairs)  # a symbol is equal to itself
    ):
        refuse_open(batch)
        raise ShapeMismatch(
            f"batch_size {batch} cannot be expanded to {sizes}: only dimensions of size 1 can be "
            "expanded. Pass -1 to keep a size, and put new dimensions in front."
        )
    return new


def check_lines_up(shape: Sequence[int], batch: Batch, what: str) -> None:
    """Check that the dimensions of a tensor are the first batch dimensions, of equal size or 1.

    This is the rule for masks and operands. It does not depend on how many batch dimensions follow,
    so it holds for nested containers with more batch dimensions too.

    Raises:
        ShapeMismatch: if the shape does not fit.
    """
    if len(shape) <= len(batch) and broadcasts_to(shape, batch[: len(shape)]):
        return
    raise ShapeMismatch(
        f"{what} of shape {tuple(shape)} does not line up with batch_size {batch}: its dimensions "
        "must be the first batch dimensions, each of the same size or 1. Insert dimensions of size "
        "1, as in `x[None]`, or use `apply` to combine it with whole entries."
    )


def broadcasts_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Return whether a shape can be broadcast to exactly the target."""
    if shape == target:  # most are: "math" in the benchmarks
        return True
    offset = len(target) - len(shape)
    pairs = zip(shape, map(plain_size, target[offset:]), strict=True)
    return offset >= 0 and all(got == expected or got == 1 for got, expected in pairs)


# Plans and their cache: what the arguments of an operation mean for one batch size.
#
# What `td.reshape(-1, 3)` does to the leaves depends on its arguments and the batch size alone, so
# it is computed once and cached ("shape" in the benchmarks). A plan holds functions without state
# and never a tensor, so threads may share it. Under `torch.compile` and `torch.export` sizes may
# be symbolic, and nothing is cached.
#
# A node that holds one value per row follows every operation that moves rows. An operation that
# computes values, such as a sum, has no meaning for it; its batch function says so by being a
# `Reduced`, `Padded` or `Fresh`.

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


def unchanged(leaf: Tensor) -> Tensor:
    """Return a leaf itself: the function of a plan that changes nothing."""
    return leaf


def kept(batch: Batch) -> Plan:
    """Return the plan that changes nothing: the container itself is the result."""
    return unchanged, batch, lambda inner: inner


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


def _is_exact(arg: Any) -> bool:
    """Return whether an argument can be a key of the cache."""
    kind = arg.__class__
    if kind is not tuple:
        return arg is None or kind is int or kind is str or kind is FunctionType
    for each in arg:
        if each.__class__ is not int and not _is_exact(each):
            return False
    return True


class Reduced:
    """The batch shape after a reduction.

    Args:
        dims: the batch dimensions that are reduced, counted from the front.
        keepdim: whether they stay, with size 1.
        first: the number of leading dimensions that may stay; all beyond are reduced.
        lead: dimensions that the results have in front, as those of several quantiles.
    """

    __slots__ = ("dims", "first", "keepdim", "lead")

    def __init__(
        self,
        dims: tuple[int, ...] = (),
        keepdim: bool = False,
        first: int | None = None,
        lead: Batch = (),
    ) -> None:
        self.dims, self.keepdim, self.first, self.lead = dims, keepdim, first, lead

    def gone(self, ndim: int) -> tuple[int, ...]:
        """Return the dimensions of a batch that are reduced."""
        if self.first is None:
            return tuple(sorted(dim for dim in self.dims if dim < ndim))
        return tuple(range(self.first, ndim))

    def along(self, stacked: int) -> Reduced:
        """Return the same for one member of a stack along a dimension that is not reduced."""
        dims = tuple([dim - (dim > stacked) for dim in self.dims])
        first = None if self.first is None else self.first - 1
        return Reduced(dims, self.keepdim, first, self.lead)

    def __call__(self, batch: Batch) -> Batch:
        dims = self.dims
        if self.first is not None:
            left = batch[: self.first]
        elif self.keepdim:
            left = tuple([resized(size, 1) if i in dims else size for i, size in enumerate(batch)])
        elif len(dims) == 1:  # "sum(0)" in the benchmarks
            left = batch[: dims[0]] + batch[dims[0] + 1 :]
        else:
            left = tuple([size for i, size in enumerate(batch) if i not in dims])
        return (*self.lead, *left) if self.lead else left


EVERYTHING = Reduced(first=0)
"""The batch shape after a reduction of whole leaves: ()."""

EVERYTHING_KEPT = Reduced(tuple(range(64)), keepdim=True)  # torch has no more dimensions
"""The batch shape after a reduction of whole leaves that keeps dimensions: (1, 1, ...)."""

SAME_SHAPE = Reduced()
"""The batch shape of an operation along rows that keeps their number, such as `cumsum`."""


class Replaced:
    """The batch shape after its leading dimensions were replaced.

    Args:
        batch: the new batch size.
        ndim: the number of dimensions that it replaces; a nested container may have more.
    """

    __slots__ = ("batch", "ndim")

    def __init__(self, batch: Batch, ndim: int) -> None:
        self.batch, self.ndim = batch, ndim

    def __call__(self, batch: Batch) -> Batch:
        return self.batch + batch[self.ndim :]


class Padded(Replaced):
    """The batch shape after rows were added."""

    __slots__ = ()


class Resized(Replaced):
    """The batch shape after rows were counted through, and dimensions made of them anew."""

    __slots__ = ()


class Viewed(Resized):
    """The batch shape after a `view`, whose result always shares storage."""

    __slots__ = ()


class Grown(Replaced):
    """The batch shape after dimensions were inserted: one value for all rows is one per row."""

    __slots__ = ()


class Expanded(Replaced):
    """The batch shape after rows of size 1 were repeated, and dimensions put in front."""

    __slots__ = ()


class Spread(Expanded):
    """The same where one value for all rows becomes one per row."""

    __slots__ = ()


class Fresh(Padded):
    """The batch shape of new rows: none of those that were there stays.

    Args:
        batch: the new batch size.
        ndim: the number of its dimensions.
        make: makes new values for an entry that has no rows; `None`: it stays.
    """

    __slots__ = ("make",)

    def __init__(self, batch: Batch, ndim: int, make: LeafFn | None = None) -> None:
        super().__init__(batch, ndim)
        self.make = make
