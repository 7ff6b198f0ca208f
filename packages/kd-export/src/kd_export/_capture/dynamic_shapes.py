"""From one word to the dynamic shapes of `torch.export`.

`Dim.AUTO` freezes a dimension without a word, and an example with one row makes a named dimension
an error. So every dynamic dimension is named here, and every example is brought to at least two
rows (and to a number of rows that no weight or other dimension has, lest the two be confused).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.export import Dim

from kd_export._errors import ExportError, Key, KeyMismatch, ShapeMismatch, nearest, quoted
from kd_export._schema.linear_size import LinearSize
from kd_export._schema.schema import Axis, Schema
from kd_export._schema.wire import as_key, wire_key, wire_name

BATCH = "batch"
Range = tuple[int, int | None]
Name = TypeVar("Name")
Dynamic = None | str | Mapping[Name, Range | Mapping[int, str]]

_ROWS = (2, 3, 5, 7, 11, 13, 17, 19, 23)


@dataclass(frozen=True, slots=True)
class DynamicShapes:
    """Which dimensions of which inputs are dynamic, and within which range.

    Attributes:
        names: The axis of each dynamic dimension, or how it follows from one, by input.
        axes: The range of each axis.
    """

    names: Mapping[Key, Mapping[int, LinearSize]]
    axes: Mapping[str, Axis]

    def dims(self, key: Key) -> dict[int, Dim]:
        """Return the torch dimensions of one input."""
        return {dim: self._dim(size) for dim, size in self.names.get(key, {}).items()}

    def _dim(self, size: LinearSize) -> Dim:
        axis = self.axes[size.axis]
        dim = Dim(size.axis, min=axis.min, max=axis.max)
        dim = dim if size.factor == 1 else size.factor * dim
        return dim + size.offset if size.offset else dim

    def outside(self, tensors: Mapping[Key, Tensor]) -> list[str]:
        """List the inputs whose size is not in the range of its axis, a few words each."""
        return [
            f"dimension {dim} of `{wire_name(key)}` is {tensors[key].shape[dim]}, and "
            f"`{size.axis}` is {self.axes[size.axis]}"
            for key, dims in self.names.items()
            for dim, size in dims.items()
            if (found := size.axis_at(tensors[key].shape[dim])) is None
            or not self.axes[size.axis].holds(found)
        ]


def resolve(
    dynamic: Dynamic[Name], tensors: Mapping[Key, Tensor], batch_dims: int
) -> DynamicShapes:
    """Resolve the argument ``dynamic``.

    Args:
        dynamic: ``"batch"``, ``None``, or a mapping from axis names to ranges, from keys to the
            named dimensions of an input, or both.
        tensors: The example, by key.
        batch_dims: The number of batch dimensions of the example container; 0 if there is none.
    """
    if dynamic is None:
        return DynamicShapes({}, {})
    if isinstance(dynamic, str):
        ranges, named = _sort_out({dynamic: (1, None)}, tensors)
    elif isinstance(dynamic, Mapping):
        ranges, named = _sort_out(dynamic, tensors)
    else:
        raise ExportError(
            f"expected a name, a dict or `None` for `dynamic`, got {dynamic!r}.",
            got=dynamic,
            hint="Pass `'batch'`, `{'batch': (1, 64)}` or `{'obs': {0: 'batch'}}`.",
        )
    if not named:
        if len(ranges) != 1:
            raise ExportError(
                f"ranges are given for {quoted(ranges)}, but no dimension is named so.",
                got=tuple(ranges),
                hint="Name the dimensions by key: `{'obs': {0: 'batch'}}`.",
            )
        (axis,) = ranges
        named = _leading(axis, tensors, batch_dims)
    used = {size.axis for dims in named.values() for size in dims.values()}
    if not set(ranges) <= used:
        raise ExportError(
            f"a range is given for {quoted(sorted(set(ranges) - used))}, which names no dimension.",
            expected=tuple(sorted(used)),
            got=tuple(ranges),
        )
    shapes = DynamicShapes(named, {name: ranges.get(name, Axis()) for name in sorted(used)})
    _check_least(shapes)
    return shapes


def axes_of_schema(schema: Schema) -> Dynamic[object]:
    """Return the argument ``dynamic`` that gives a program the axes of a schema."""
    found: dict[object, Range | Mapping[int, str]] = {}
    for entry in schema.inputs:
        names = {dim: size for dim, size in enumerate(entry.shape) if isinstance(size, str)}
        if names:
            found[entry.key] = names
    found |= {name: (axis.min, axis.max) for name, axis in schema.axes.items()}
    return found or None


def _check_least(shapes: DynamicShapes) -> None:
    """Check that no size that follows from an axis is negative."""
    for key, dims in shapes.names.items():
        for dim, size in dims.items():
            if size.at(shapes.axes[size.axis].min) < 0:
                least = -(size.offset // size.factor)
                raise ExportError(
                    f"dimension {dim} of `{wire_name(key)}` is `{size}`, which is negative where "
                    f"`{size.axis}` is {shapes.axes[size.axis].min}.",
                    key=key,
                    expected=f"{least}..",
                    got=str(shapes.axes[size.axis]),
                    hint=f"Pass a range for it: `{size.axis!r}: ({least}, None)`.",
                )


def _sort_out(
    dynamic: Mapping[Name, Range | Mapping[int, str]], tensors: Mapping[Key, Tensor]
) -> tuple[dict[str, Axis], dict[Key, dict[int, LinearSize]]]:
    """Split the ranges of axes from the named dimensions of inputs."""
    ranges: dict[str, Axis] = {}
    named: dict[Key, dict[int, LinearSize]] = {}
    for word, value in dynamic.items():
        if isinstance(value, Mapping):
            key = _input_key(word, tensors)
            named[key] = {
                _dim(key, dim, tensors[key]): _size(key, dim, name) for dim, name in value.items()
            }
        else:
            ranges[_axis(word)] = _range(word, value)
    return ranges, named


def _range(word: object, value: object) -> Axis:
    match value:
        case int(low), None | int() as high if low >= 0 and (high is None or high >= max(low, 2)):
            return Axis(low, high)
    shown = f"{value[0]}..{value[1]}" if _is_pair(value) else repr(value)
    raise ExportError(
        f"`{word}` cannot range over {shown}.",
        expected="(min, max)",
        got=value,
        hint="Give `(min, max)` with a max of at least 2, or `None` for no limit. Dimensions of "
        "an input are named by a dict: `{'obs': {0: 'batch'}}`.",
    )


def _is_pair(value: object) -> TypeGuard[Range]:
    return isinstance(value, tuple) and len(value) == 2


def _leading(
    axis: str, tensors: Mapping[Key, Tensor], batch_dims: int
) -> dict[Key, dict[int, LinearSize]]:
    """Name the leading dimension of all inputs, which must then be of one size."""
    sizes = {key: tensor.shape[0] for key, tensor in tensors.items() if tensor.dim()}
    if not batch_dims and len(set(sizes.values())) != 1:
        found = ", ".join(f"`{wire_name(key)}`: {size}" for key, size in sizes.items())
        raise ShapeMismatch(
            f"the inputs have no common leading size ({found or 'none has a dimension'}).",
            expected="one leading size",
            got=tuple(sizes.values()),
            hint="Name the dimensions by key, as in `dynamic={'obs': {0: 'batch'}}`, or pass "
            "`dynamic=None` for fixed shapes.",
        )
    return {key: {0: LinearSize(axis)} for key in sizes}


def _input_key(word: object, tensors: Mapping[Key, Tensor]) -> Key:
    candidates = {as_key(word)} if not isinstance(word, str) else {(word,), wire_key(word)}
    for key in tensors:
        if key in candidates:
            return key
    names = tuple(map(wire_name, tensors))
    close = nearest(wire_name(as_key(word)), names)
    raise KeyMismatch(
        f"input `{word}` of `dynamic` not found; available inputs: {quoted(names)}.",
        key=as_key(word),
        expected=names,
        got=word,
        hint=None if close is None else f"Did you mean `{close}`?",
    )


def _dim(key: Key, dim: object, tensor: Tensor) -> int:
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ShapeMismatch(
            f"`dynamic` must name dimensions from {-tensor.dim()} to {tensor.dim() - 1} of "
            f"`{wire_name(key)}`, whose shape is {tuple(tensor.shape)}, got {dim!r}.",
            key=key,
            expected=f"a dimension below {tensor.dim()}",
            got=dim,
        )
    return dim % tensor.dim()


def _axis(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ExportError(
            f"{name!r} cannot name an axis.",
            got=name,
            hint="Use a word, such as `batch`.",
        )
    return name


def _size(key: Key, dim: int, name: object) -> LinearSize:
    size = LinearSize.parse(name) if isinstance(name, str) else None
    if size is None:
        raise ExportError(
            f"{name!r} cannot name dimension {dim} of `{wire_name(key)}`.",
            key=key,
            expected="a name",
            got=name,
            hint="Use a word, such as `batch`, or a size that follows from one, such as "
            "`2*batch + 1`. Leave out dimensions that are fixed.",
        )
    _axis(size.axis)
    return size


def widen(
    tensors: Mapping[Key, Tensor], shapes: DynamicShapes, fixed_sizes: Iterable[int]
) -> dict[Key, Tensor]:
    """Extend every dynamic axis of the example to at least two entries, by repeating rows.

    Args:
        tensors: The example, by key.
        shapes: Which dimensions are dynamic.
        fixed_sizes: Sizes that a widened axis had better not take: those of the weights.
    """
    wide = dict(tensors)
    avoid = {*fixed_sizes, *(size for tensor in tensors.values() for size in tensor.shape)}
    for name, axis in shapes.axes.items():
        places = [
            (key, dim, size)
            for key, dims in shapes.names.items()
            for dim, size in dims.items()
            if size.axis == name
        ]
        sizes = {size.axis_at(wide[key].shape[dim]) for key, dim, size in places}
        (rows,) = sizes if len(sizes) == 1 else (None,)
        if rows is None:
            raise _unequal(name, wide, places)
        followers = [LinearSize(name), *(size for _, _, size in places)]
        if axis.holds(rows) and all(size.at(rows) >= 2 for size in followers):
            continue
        rows = _rows(axis, followers, avoid)
        for key, dim, size in places:
            avoid.add(size.at(rows))
            wide[key] = repeat_rows(wide[key], dim, size.at(rows))
    return wide


def _rows(axis: Axis, sizes: Sequence[LinearSize], avoid: Iterable[int]) -> int:
    """Choose a size of an axis: no dimension of it may have fewer than two entries."""
    taken = set(avoid)
    least = next(rows for rows in itertools.count(axis.min) if all(s.at(rows) >= 2 for s in sizes))
    candidates = [rows for rows in _ROWS if axis.holds(rows) and rows >= least] or [least]
    return next((r for r in candidates if not taken & {s.at(r) for s in sizes}), candidates[0])


def _unequal(
    name: str, tensors: Mapping[Key, Tensor], places: Sequence[tuple[Key, int, LinearSize]]
) -> ShapeMismatch:
    found = ", ".join(
        f"`{wire_name(key)}`[{dim}] = {tensors[key].shape[dim]}"
        + ("" if str(size) == name else f" for `{size}`")
        for key, dim, size in places
    )
    return ShapeMismatch(
        f"the axis `{name}` has different sizes in the example: {found}.",
        key=places[0][0],
        got=tuple(tensors[key].shape[dim] for key, dim, _ in places),
        hint="Give dimensions that differ different names, or say how one follows from the other, "
        f"as in `2*{name} + 1`.",
    )


def repeat_rows(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """Expand one dimension to a size by repeating what is there, or with zeros if nothing is."""
    size = tensor.shape[dim]
    if size == rows:
        return tensor
    if size == 0:
        return tensor.new_zeros(*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :])
    return tensor.index_select(dim, torch.arange(rows, device=tensor.device) % size)
