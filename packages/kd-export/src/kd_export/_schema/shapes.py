"""Whether shapes are those of a schema, and which sizes its axes have there."""

from __future__ import annotations

from collections.abc import Sequence

from kd_export._errors import ShapeMismatch
from kd_export._schema.linear_size import LinearSize
from kd_export._schema.schema import Entry, Schema


def axis_sizes(schema: Schema, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Return the size of each axis, given the shapes of all inputs.

    Raises:
        ShapeMismatch: A shape does not fit, or an axis has two sizes.
    """
    sizes: dict[str, tuple[int, Entry]] = {}
    for entry, shape in zip(schema.inputs, shapes, strict=True):
        check_shape(entry, shape, schema, sizes)
    return {name: size for name, (size, _) in sizes.items()}


def check_shape(
    entry: Entry, shape: tuple[int, ...], schema: Schema, sizes: dict[str, tuple[int, Entry]]
) -> None:
    """Compare a shape with the schema's, each axis having one size throughout."""
    if len(shape) != len(entry.shape):
        raise _misfit(entry, shape, f"It must have {len(entry.shape)} dimensions.")
    for dim, (size, wanted) in enumerate(zip(shape, entry.shape, strict=True)):
        if isinstance(wanted, str):
            reason = _axis_fault(entry, wanted, size, schema, sizes)
        else:
            reason = None if size == wanted else f"Dimension {dim} must be {wanted}."
        if reason is not None:
            raise _misfit(entry, shape, reason)


def _misfit(entry: Entry, shape: tuple[int, ...], hint: str) -> ShapeMismatch:
    return ShapeMismatch(
        f"expected {entry.describe()} for `{entry.wire}`, got shape {shape}.",
        key=entry.key,
        expected=entry.shape,
        got=shape,
        hint=hint,
    )


def _axis_fault(
    entry: Entry, text: str, size: int, schema: Schema, sizes: dict[str, tuple[int, Entry]]
) -> str | None:
    linear = LinearSize.parse(text)
    assert linear is not None  # the schema was checked
    found = linear.axis_at(size)
    if found is None:
        return f"{size} is not a value of `{text}`."
    known, first = sizes.setdefault(linear.axis, (found, entry))
    if known != found:
        follows = "" if text == linear.axis else f", so that `{text}` is {linear.at(known)}"
        return f"The axis `{linear.axis}` has size {known} in `{first.wire}`{follows}."
    axis = schema.axes[linear.axis]
    if not axis.holds(found):
        return f"The axis `{linear.axis}` ranges over {axis}."
    return None


def fixed(shape: Sequence[object]) -> tuple[int | None, ...]:
    """Return the sizes, with ``None`` for those that are dynamic.

    >>> fixed(("batch", 3))
    (None, 3)
    """
    return tuple(size if isinstance(size, int) else None for size in shape)


def described(entry: Entry) -> tuple[object, ...]:
    """Return name, dtype and sizes of an entry, to compare with what a file has."""
    return entry.name, entry.dtype, *fixed(entry.shape)


def completed(name: str, dtype: str, shape: Sequence[object], entry: Entry) -> tuple[object, ...]:
    """Return the same of what a runtime found, which may not know a size that is fixed."""
    found, known = fixed(shape), fixed(entry.shape)
    if len(found) == len(known):
        found = tuple(
            wanted if size is None else size for size, wanted in zip(found, known, strict=True)
        )
    return name, dtype, *found
