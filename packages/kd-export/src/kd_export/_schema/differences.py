"""What two schemas do not have in common."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kd_export._console import Row, html_table, plain_table
from kd_export._schema.files import Json, Number
from kd_export._schema.schema import Entry, Schema, Step, Vector, distance, magnitude, tolerance

_HEADER = ("differs", "name")
_ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two artefacts say differently.

    Attributes:
        what: What it is a part of: ``"input"``, ``"output"``, ``"axis"``, ``"metadata"``, ...
        name: Its wire name, or the name it has there; empty if there is only one.
        one: What the first file says, or ``None`` if it says nothing.
        other: What the second file says, or ``None`` if it says nothing.

    Example:
        >>> Difference("axis", "batch", "1..", "1..8").other
        '1..8'
    """

    what: str
    name: str
    one: str | None
    other: str | None


@dataclass(frozen=True, slots=True, repr=False)
class Differences:
    """What two artefacts say differently; it prints as a table.

    Attributes:
        one: The path of the first file.
        other: The path of the second file.
        rows: The differences.

    Example:
        >>> row = Difference("axis", "batch", "1..", "1..8")
        >>> print(Differences("a.pt2", "b.pt2", (row,)))
        differs  name   a.pt2  b.pt2
        axis     batch  1..    1..8
    """

    one: str
    other: str
    rows: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether there is no difference."""
        return not self.rows

    def header(self) -> Row:
        """Return the header of the table."""
        return (*_HEADER, self.one, self.other)

    def cells(self) -> list[Row]:
        """Return the rows as text."""
        return [(r.what, r.name, _shown(r.one), _shown(r.other)) for r in self.rows]

    def to_data(self) -> dict[str, Json]:
        """Return the differences as plain data, fit for JSON."""
        rows: list[Json] = [
            {"what": row.what, "name": row.name, "one": row.one, "other": row.other}
            for row in self.rows
        ]
        return {"one": self.one, "other": self.other, "same": self.same, "rows": rows}

    def _repr_html_(self) -> str:
        return html_table(self.header(), self.cells()) if self.rows else html.escape(repr(self))

    def __repr__(self) -> str:
        if self.same:
            return f"{self.one} and {self.other} do not differ"
        return plain_table(self.header(), self.cells())


def _shown(value: str | None) -> str:
    if value is None:
        return _ABSENT
    return value if len(value) <= 60 else f"{value[:57]}..."


def interface_differences(one: Schema, other: Schema) -> Iterator[Difference]:
    """Compare what two programs take and give."""
    for what, entries, others in (
        ("input", one.inputs, other.inputs),
        ("output", one.outputs, other.outputs),
    ):
        first, second = ({e.wire: e.describe() for e in part} for part in (entries, others))
        yield from _in_mappings(what, first, second)
        if list(first) != list(second) and set(first) == set(second):
            yield Difference(f"order of {what}s", "", ", ".join(first), ", ".join(second))
        known, others_known = ({e.wire: e for e in part} for part in (entries, others))
        for wire in first:
            if wire in second:
                yield from _signal_differences(known[wire], others_known[wire], what)
    axes, other_axes = ({n: str(axis) for n, axis in s.axes.items()} for s in (one, other))
    yield from _in_mappings("axis", axes, other_axes)
    yield from _in_mappings("batch dimensions", {"": one.batch_dims}, {"": other.batch_dims})
    yield from _in_mappings("next of state", one.state, other.state)
    yield from _in_mappings("start of state", one.initial, other.initial)
    yield from _in_mappings("mode", {"": one.mode}, {"": other.mode})


def _signal_differences(one: Entry, other: Entry, what: str) -> Iterator[Difference]:
    """Compare what the numbers of an entry mean: part by part, names by their place."""
    first, second = ({} if e.signal is None else e.signal.to_data() for e in (one, other))
    for part in dict.fromkeys((*first, *second)):
        told = f"{part} of {what}"
        mine, theirs = first.get(part), second.get(part)
        if mine == theirs:
            continue
        if not (isinstance(mine, list) and isinstance(theirs, list)):
            yield Difference(told, one.wire, _part(mine), _part(theirs))
            continue
        for place in range(max(len(mine), len(theirs))):
            pair = [items[place] if place < len(items) else None for items in (mine, theirs)]
            if pair[0] != pair[1]:
                yield Difference(told, f"{one.wire}[{place}]", *map(_part, pair))


def _part(value: Json) -> str | None:
    return ", ".join(map(str, value)) if isinstance(value, list) else _text(value)


def content_differences(one: Schema, other: Schema, *, digests: bool) -> Iterator[Difference]:
    """Compare all else but what follows from the example that a program was exported with.

    Args:
        one: A schema.
        other: Another one.
        digests: Whether the digests of the weights are of one kind, so that they can be compared.
    """
    metadata, other_metadata = (
        {name: json.dumps(value, sort_keys=True) for name, value in schema.metadata.items()}
        for schema in (one, other)
    )
    yield from _in_mappings("metadata", metadata, other_metadata)
    steps, others = (
        {name: f"{runs}: {reads} -> {writes}" for name, runs, reads, writes in map(Step.row, found)}
        for found in (one.steps, other.steps)
    )
    yield from _in_mappings("step", steps, others)
    made, other_made = (
        {} if s.precision is None else {"": s.precision.describe()} for s in (one, other)
    )
    yield from _in_mappings("precision", made, other_made)
    yield from _in_mappings("version", one.versions, other.versions)
    if digests:
        yield from _in_mappings("weights", {"": one.weights}, {"": other.weights})
    yield from _results(one, other)


def property_differences(
    one: Mapping[str, str] | None, other: Mapping[str, str] | None
) -> Iterator[Difference]:
    """Compare plain properties that do not follow from schemas, where both formats have some."""
    if one is not None and other is not None:
        yield from _in_mappings("property", one, other)


def _in_mappings(
    what: str, one: Mapping[str, object], other: Mapping[str, object]
) -> Iterator[Difference]:
    for name in dict.fromkeys((*one, *other)):
        first, second = one.get(name), other.get(name)
        if first != second:
            yield Difference(what, name, _text(first), _text(second))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _results(one: Schema, other: Schema) -> Iterator[Difference]:
    """Compare the numbers that must come out of the same stored test."""
    if [_drawn(entry) for entry in one.inputs] != [_drawn(entry) for entry in other.inputs]:
        return
    theirs = {_test(vector): vector for vector in other.vectors}
    for vector in one.vectors:
        second = theirs.get(_test(vector))
        if second is not None:
            yield from _in_results(one, vector, second)


def _in_results(schema: Schema, one: Vector, other: Vector) -> Iterator[Difference]:
    sizes = ", ".join(f"{name}={size}" for name, size in one.sizes.items())
    for entry in schema.outputs:
        first, second = (v.outputs.get(entry.wire, ()) for v in (one, other))
        if len(first) != len(second):
            continue  # the shapes differ, which is told of the output
        far = [pair for pair in zip(first, second, strict=True) if _is_far(entry, *pair)]
        if far:
            number, theirs = max(far, key=lambda pair: distance(*pair))
            name = f"{entry.wire} at {sizes}" if sizes else entry.wire
            yield Difference("result", name, str(number), str(theirs))


def _is_far(entry: Entry, one: Number, other: Number) -> bool:
    relative, absolute = tolerance(entry.dtype)
    return distance(one, other) > absolute + relative * magnitude(other)


def _drawn(entry: Entry) -> object:
    return entry.wire, entry.dtype, entry.shape, entry.low, entry.high


def _test(vector: Vector) -> object:
    return vector.seed, *sorted(vector.sizes.items()), *sorted(vector.inputs.items())
