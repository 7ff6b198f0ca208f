"""A schema for a file that kd_export did not write, from what its program takes and gives.

Names are those of the file, so nothing of the schema can be wrong but the sizes of the axes, which
the file may not tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kd_export._errors import Key
from kd_export._schema.linear_size import LinearSize
from kd_export._schema.schema import Axis, Entry, Schema
from kd_export._schema.wire import unused_name, wire_key, wire_name

UNKNOWN = "?"
"""A size that the file does not tell, or that no axis name stands for."""


@dataclass(frozen=True, slots=True)
class Value:
    """An input or output as the file tells it.

    Attributes:
        name: What the file calls it.
        dtype: The dtype's name.
        shape: Numbers, names of axes, what follows from one, or ``UNKNOWN``.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


def derived_schema(
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    ranges: Mapping[str, Axis],
    versions: Mapping[str, str],
) -> Schema:
    """Build the schema; each unknown size of an input is an axis of its own, of any size.

    >>> value = Value("input.1", "float32", ("n", UNKNOWN, 3))
    >>> schema = derived_schema([value], [], {"n": Axis(1, 8)}, {})
    >>> schema.input("input.1").describe(), {n: str(axis) for n, axis in schema.axes.items()}
    ('float32 (n, size, 3)', {'n': '1..8', 'size': '0..'})
    """
    keys = _keys([value.name for value in (*inputs, *outputs)])
    known = [LinearSize.parse(size) for v in inputs for size in v.shape if isinstance(size, str)]
    axes = {size.axis: ranges.get(size.axis, Axis(0)) for size in known if size is not None}
    entries = []
    for value in inputs:
        shape = list(value.shape)
        for dim, size in enumerate(shape):
            if isinstance(size, str) and LinearSize.parse(size) is None:
                shape[dim] = unused_name("size", axes)
                axes[str(shape[dim])] = Axis(0)
        entries.append(Entry(keys[value.name], value.name, value.dtype, tuple(shape)))
    results = [Entry(keys[one.name], one.name, one.dtype, one.shape) for one in outputs]
    return Schema(tuple(entries), tuple(results), axes, versions=versions, derived=True)


def _keys(names: Sequence[str]) -> dict[str, Key]:
    """Read names as wire names, so that they are used as they are; else as keys of one part.

    >>> _keys(["input.1", "y"]), _keys(["a", "a.b"])
    ({'input.1': ('input', '1'), 'y': ('y',)}, {'a': ('a',), 'a.b': ('a.b',)})
    """
    keys = {name: wire_key(name) for name in names}
    above = {key[:length] for key in keys.values() for length in range(1, len(key))}
    fit = all(wire_name(key) == name and key not in above for name, key in keys.items())
    return keys if fit else {name: (name,) for name in names}
