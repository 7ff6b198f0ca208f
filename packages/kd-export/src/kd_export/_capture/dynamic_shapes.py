"""From one word to the dynamic shapes of `torch.export`.

`Dim.AUTO` freezes a dimension without a word, and an example with one row makes a named dimension
an error. So every dynamic dimension is named here, and every example is brought to at least two
rows (and to a number of rows that no weight or other dimension has, lest the two be confused).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.export import Dim

from kd_export._errors import ExportError, Key, KeyMismatch, ShapeMismatch, quoted
from kd_export._schema.schema import Axis
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
        names: The axis name of each dynamic dimension, by input.
        axes: The range of each axis.
    """

    names: Mapping[Key, Mapping[int, str]]
    axes: Mapping[str, Axis]

    def dims(self, key: Key) -> dict[int, Dim]:
        """Return the torch dimensions of one input."""
        return {
            dim: Dim(name, min=self.axes[name].min, max=self.axes[name].max)
            for dim, name in self.names.get(key, {}).items()
        }

    def hold(self, tensors: Mapping[Key, Tensor]) -> bool:
        """Decide whether inputs have sizes within the ranges."""
        return all(
            self.axes[name].holds(tensors[key].shape[dim])
            for key, dims in self.names.items()
            for dim, name in dims.items()
        )


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
    else:
        ranges, named = _sort_out(dynamic, tensors)
    if not named:
        if len(ranges) != 1:
            raise ExportError(
                f"ranges are given for {quoted(ranges)}, but no dimension is named so.",
                got=tuple(ranges),
                hint="Name the dimensions by key: `{'obs': {0: 'batch'}}`.",
            )
        (axis,) = ranges
        named = _leading(axis, tensors, batch_dims)
    used = {name for dims in named.values() for name in dims.values()}
    if not set(ranges) <= used:
        raise ExportError(
            f"a range is given for {quoted(sorted(set(ranges) - used))}, which names no dimension.",
            expected=tuple(sorted(used)),
            got=tuple(ranges),
        )
    return DynamicShapes(named, {name: ranges.get(name, Axis()) for name in sorted(used)})


def _sort_out(
    dynamic: Mapping[Name, Range | Mapping[int, str]], tensors: Mapping[Key, Tensor]
) -> tuple[dict[str, Axis], dict[Key, dict[int, str]]]:
    """Split the ranges of axes from the named dimensions of inputs."""
    ranges: dict[str, Axis] = {}
    named: dict[Key, dict[int, str]] = {}
    for word, value in dynamic.items():
        if isinstance(value, Mapping):
            key = _input_key(word, tensors)
            named[key] = {_dim(key, dim, tensors[key]): _axis(name) for dim, name in value.items()}
        else:
            low, high = value
            ranges[_axis(word)] = Axis(low, high)
            if low < 0 or (high is not None and high < max(low, 2)):
                raise ExportError(
                    f"`{word}` cannot range over {low}..{high}.",
                    got=value,
                    hint="Give `(min, max)` with a max of at least 2, or `None` for no limit.",
                )
    return ranges, named


def _leading(
    axis: str, tensors: Mapping[Key, Tensor], batch_dims: int
) -> dict[Key, dict[int, str]]:
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
    return {key: {0: axis} for key in sizes}


def _input_key(word: object, tensors: Mapping[Key, Tensor]) -> Key:
    candidates = {as_key(word)} if not isinstance(word, str) else {(word,), wire_key(word)}
    for key in tensors:
        if key in candidates:
            return key
    raise KeyMismatch(
        f"`dynamic` names the input {word!r}; the inputs are {quoted(map(wire_name, tensors))}.",
        key=as_key(word),
        expected=tuple(map(wire_name, tensors)),
        got=word,
    )


def _dim(key: Key, dim: int, tensor: Tensor) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ShapeMismatch(
            f"`dynamic` names dimension {dim} of `{wire_name(key)}`, "
            f"whose shape is {tuple(tensor.shape)}.",
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
            hint="Use a word, such as `batch`; an axis cannot follow from another one.",
        )
    return name


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
        places = [(k, d) for k, dims in shapes.names.items() for d, n in dims.items() if n == name]
        sizes = {wide[key].shape[dim] for key, dim in places}
        if len(sizes) == 1 and min(sizes) >= 2 and axis.holds(min(sizes)):
            continue
        if len(sizes) > 1:
            raise _unequal(name, wide, places)
        rows = _rows(axis, avoid)
        avoid.add(rows)
        for key, dim in places:
            wide[key] = repeat_rows(wide[key], dim, rows)
    return wide


def _rows(axis: Axis, avoid: Iterable[int]) -> int:
    taken = set(avoid)
    candidates = [rows for rows in _ROWS if axis.holds(rows)] or [max(axis.min, 2)]
    return next((rows for rows in candidates if rows not in taken), candidates[0])


def _unequal(
    name: str, tensors: Mapping[Key, Tensor], places: Sequence[tuple[Key, int]]
) -> ShapeMismatch:
    found = ", ".join(f"`{wire_name(k)}`[{d}] = {tensors[k].shape[d]}" for k, d in places)
    return ShapeMismatch(
        f"the axis `{name}` has different sizes in the example: {found}.",
        key=places[0][0],
        got=tuple(tensors[key].shape[dim] for key, dim in places),
        hint="Give dimensions that differ different names.",
    )


def repeat_rows(tensor: Tensor, dim: int, rows: int) -> Tensor:
    """Expand one dimension to a size by repeating what is there, or with zeros if nothing is."""
    size = tensor.shape[dim]
    if size == rows:
        return tensor
    if size == 0:
        return tensor.new_zeros(*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :])
    return tensor.index_select(dim, torch.arange(rows, device=tensor.device) % size)
