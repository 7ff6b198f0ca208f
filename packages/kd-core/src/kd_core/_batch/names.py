"""Names of batch dimensions: a size that carries the name of its dimension.

A batch size with names is a tuple of `NamedSize`, which is an `int` with another hash. Operations
that rearrange sizes rearrange the names with them, and the caches of plans and descriptors, which
are keyed by batch sizes, keep named ones apart. Containers without names pay nothing.

Knows sizes; must not know containers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from kd_core._compat import (
    CONSTANT_OBJECTS,
    SYMBOLS_ARE_INT,
    TRACES_SUBCLASSED_INT,
    is_constant_size,
    is_known_size,
)
from kd_core._errors import (
    InvalidArgument,
    InvalidValue,
    OutOfRange,
    listed,
    not_valid,
    restores,
    wrong_type,
)
from kd_core._keys import nearest_key
from kd_core._torch_private import assume_constant_result

if TYPE_CHECKING:
    from kd_core._types import Batch

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
    return _named(operator.index(size), name)  # to dynamo a known symbol is not a constant


@assume_constant_result
def _named(size: int, name: str) -> int:
    """Return a size with a name: a constant while dynamo traces, which cannot build one."""
    return NamedSize(size, name)


def names_of(batch: Batch) -> Names:
    """Return the name of each dimension, or `None`."""
    return tuple([size.name if isinstance(size, NamedSize) else None for size in batch])


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
        if isinstance(size, NamedSize):
            return True
    return False


def with_names(batch: Batch, names: Names) -> Batch:
    """Return a batch size whose first dimensions have these names; the others keep theirs."""
    pairs = zip(without_names(batch), names, strict=False)
    named = [size if name is None else _named(operator.index(size), name) for size, name in pairs]
    return (*named, *batch[len(named) :])


def plain_size(size: int) -> int:
    """Return a size without its name."""
    return size.plain if isinstance(size, NamedSize) else size


def without_names(batch: Batch) -> Batch:
    """Return a batch size of plain integers."""
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
