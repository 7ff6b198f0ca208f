"""Spaces of gymnasium: examples drawn from them, what a file says of them, schemas.

A space is known by the name of its class, so that gymnasium, gym and their kin need not be
installed. Must not know policies or frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from kd_export._errors import ExportError, Key
from kd_export._schema.schema import Axis, Entry, Schema
from kd_export._schema.wire import Json, Number, argument_names

ROWS = 64
"""How many rows an example has."""
SEVERAL = ("Dict", "Tuple")
_FREE, _FAR = 3.0, 1e6
_MOST_LISTED = 256


class Array(Protocol):
    """The part of a numpy array that is read here."""

    def tolist(self) -> object:
        """Return nested lists."""
        ...


class Space(Protocol):
    """What all spaces share."""

    shape: tuple[int, ...]
    dtype: object


def kind(space: object) -> str:
    """Return the name of the class that says what a space is.

    Raises:
        ExportError: It is none that is known.
    """
    known = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", *SEVERAL)
    for one in type(space).__mro__:
        if one.__name__ in known:
            return one.__name__
    raise ExportError(
        f"`{type(space).__name__}` is not a space that kd_export knows.",
        expected=known,
        got=type(space).__name__,
        hint="Flatten it, or write the keyed module yourself and pass `oracle=` to `save`.",
    )


def leaves(space: object, key: Key) -> Iterator[tuple[Key, Space]]:
    """List the spaces in a space by key; those of a tuple by their number."""
    inner = getattr(space, "spaces", None)
    if kind(space) not in SEVERAL:
        yield key, cast("Space", space)
    elif isinstance(inner, Mapping):
        for name, one in inner.items():
            yield from leaves(one, (*key, str(name)))
    else:
        for place, one in enumerate(cast("tuple[object, ...]", inner)):
            yield from leaves(one, (*key, str(place)))


def dtype_of(space: Space) -> torch.dtype:
    """Return the dtype of the elements of a space."""
    name = "int64" if kind(space) == "Discrete" else str(getattr(space.dtype, "name", space.dtype))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def limits(space: Space) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest value of each element."""
    what = kind(space)
    if what == "Box":
        low, high = (torch.as_tensor(getattr(space, name)) for name in ("low", "high"))
        return low, high
    start = torch.as_tensor(getattr(space, "start", 0))
    if what == "Discrete":
        count = torch.as_tensor(int(cast("int", getattr(space, "n"))))  # noqa: B009  # not typed
    elif what == "MultiDiscrete":
        count = torch.as_tensor(getattr(space, "nvec"))  # noqa: B009  # as above
    else:
        count = torch.full(tuple(space.shape), 2)
    start = start.expand(count.shape)
    return start, start + count - 1


def draw(space: Space, source: torch.Generator, rows: int = ROWS) -> Tensor:
    """Draw elements of a space; a side without a limit ends at 3."""
    low, high = (limit.double() for limit in limits(space))
    free_below, free_above = low < -_FAR, high > _FAR
    least = torch.where(free_below, torch.where(free_above, -_FREE, high - 2 * _FREE), low)
    most = torch.where(free_above, torch.where(free_below, _FREE, low + 2 * _FREE), high)
    dtype = dtype_of(space)
    shape = (rows, *least.shape)
    values = torch.rand(shape, generator=source, dtype=torch.float64)
    if dtype.is_floating_point:
        return (least + (most - least) * values).to(dtype)
    return (least + ((most - least + 1) * values).floor()).to(dtype)


def spread(shape: Sequence[int], source: torch.Generator) -> Tensor:
    """Draw numbers from -1 to 1, as float64."""
    return 2 * torch.rand(tuple(shape), generator=source, dtype=torch.float64) - 1


def described(space: object) -> dict[str, Json]:
    """Return what a file says of a space, as plain data: numbers without a limit are ``None``."""
    if kind(space) in SEVERAL:
        inside = [(key[-1], described(one)) for key, one in _directly(space)]
        return {"space": kind(space), "entries": dict(inside)}
    leaf = cast("Space", space)
    low, high = limits(leaf)
    found: dict[str, Json] = {
        "space": kind(space),
        "shape": list(map(int, leaf.shape or ())),
        "dtype": str(dtype_of(leaf)).removeprefix("torch."),
    }
    for name, values in (("low", low), ("high", high)):
        found[name] = _numbers(values)
    return found


def _directly(space: object) -> Iterator[tuple[Key, object]]:
    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping):
        yield from (((str(name),), one) for name, one in inner.items())
    else:
        yield from (((str(n),), one) for n, one in enumerate(cast("tuple[object, ...]", inner)))


def _numbers(values: Tensor) -> Json:
    numbers = [_number(float(value)) for value in values.flatten().tolist()]
    if len(set(numbers)) == 1:
        return numbers[0]
    return list(numbers) if len(numbers) <= _MOST_LISTED else None


def _number(value: float) -> Number | None:
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value


def from_gymnasium(space: object, key: str = "observation") -> Schema:
    """Return the schema of observations of a space, which `kd_export.export` takes as an example.

    Args:
        space: A space of gymnasium or gym: `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, or a
            `Dict` or `Tuple` of them.
        key: The key of the observation; those inside a `Dict` are below it.

    Returns:
        A schema with one axis, ``batch``, whose metadata hold the limits.
    """
    found = list(leaves(space, (key,)))
    names = argument_names([path for path, _ in found])
    entries = []
    for path, leaf in found:
        values = draw(leaf, torch.Generator().manual_seed(0))
        low, high = values.min().item(), values.max().item()
        dtype = str(values.dtype).removeprefix("torch.")
        shape = ("batch", *values.shape[1:])
        entries.append(Entry(path, names[path], dtype, shape, low, high))
    metadata: dict[str, Json] = {key: described(space)}
    return Schema(tuple(entries), (), {"batch": Axis(1, None)}, batch_dims=1, metadata=metadata)
