"""The state of a recurrent program between its steps.

It starts at zero or with what the schema holds, has the sizes of the inputs of the first step, and
belongs to the session alone: what comes in and goes out is copied. No gradient flows from one step
to the one before.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

from kd_export._errors import DtypeMismatch, ShapeMismatch, kind_of
from kd_export._running.backend import Runner
from kd_export._schema.json_values import Number
from kd_export._schema.schema import Entry, Schema
from kd_export._schema.shapes import check_shape
from kd_export._schema.vectors import MOST_NUMBERS, Drawn, concrete


class _Array(Protocol):
    shape: tuple[int, ...]

    def copy(self) -> object: ...
    def __getitem__(self, index: tuple[object, ...]) -> object: ...
    def __setitem__(self, index: object, value: object) -> None: ...


class Carried:
    """Hold the arrays of a state, by the wire names of the inputs that they are for."""

    def __init__(self, schema: Schema, runner: Runner) -> None:
        self._schema = schema
        self._runner = runner
        self._kd_entries = [entry for entry in schema.inputs if entry.wire in schema.state]
        self._first = {
            entry.wire: cast("_Array", runner.build(_drawn(entry, schema.initial[entry.wire])))
            for entry in self._kd_entries
            if entry.wire in schema.initial
        }
        self.arrays: dict[str, object] = {}

    def copies(self) -> dict[str, object]:
        """Return copies of the arrays."""
        return {wire: _copied(array) for wire, array in self.arrays.items()}

    def inputs(self, sizes: dict[str, tuple[int, Entry]]) -> dict[str, object]:
        """Return the arrays to run on: those to start with before the first step.

        Raises:
            ShapeMismatch: The inputs of this step have other sizes than those before.
        """
        found = {}
        for entry in self._kd_entries:
            held = self.arrays.get(entry.wire)
            if held is None:
                known = {name: size for name, (size, _) in sizes.items()}
                held = self._start(entry, concrete(entry.shape, known))
            else:
                self._check(entry, cast("_Array", held), sizes)
            found[entry.wire] = held
        return found

    def _start(self, entry: Entry, shape: tuple[int, ...]) -> _Array:
        count = math.prod(shape)
        if count > MOST_NUMBERS:
            raise ShapeMismatch(
                f"the state `{entry.wire}` would have {count:,} numbers, more than "
                f"{MOST_NUMBERS:,}.",
                key=entry.key,
                expected=MOST_NUMBERS,
                got=count,
                hint="Give smaller batches, or carry the state yourself and call `run`.",
            )
        zeros = Drawn(array("b", bytes(count)), shape, entry.dtype)
        start = cast("_Array", self._runner.build(zeros))
        if entry.wire in self._first:
            start[...] = self._first[entry.wire]
        return start

    def _check(self, entry: Entry, held: _Array, sizes: dict[str, tuple[int, Entry]]) -> None:
        try:
            check_shape(entry, tuple(held.shape), self._schema, sizes)
        except ShapeMismatch as error:
            raise ShapeMismatch(
                f"the state `{entry.wire}` has shape {tuple(held.shape)} from the step before. "
                f"{error.hint}",
                key=entry.key,
                expected=entry.shape,
                got=tuple(held.shape),
                hint="Call `reset()` before a batch of another size.",
            ) from error

    def keep(self, results: Sequence[object]) -> None:
        """Keep copies of the next state, which is among the outputs in their order."""
        written = {e.wire: r for e, r in zip(self._schema.outputs, results, strict=True)}
        self.arrays = {read: _copied(written[w]) for read, w in self._schema.state.items()}

    def reset(self, mask: object = None) -> None:
        """Set the state, or the rows of it that a mask selects, back to what it starts with."""
        if mask is None:
            self.arrays = {}
            return
        rows = _flags(mask)
        changed = self.copies()
        for entry in self._kd_entries:
            if entry.wire not in changed:
                continue
            rows_of, dim = cast("_Array", changed[entry.wire]), self._row_dim(entry)
            count = rows_of.shape[dim] if rows_of.shape else 0
            if len(rows) != count:
                raise ShapeMismatch(
                    f"expected a mask of {count} rows for the state `{entry.wire}`, "
                    f"got {len(rows)}.",
                    key=entry.key,
                    expected=count,
                    got=len(rows),
                    hint="Give a value for each row of the batch, or none to reset all.",
                )
            chosen = [row for row, flag in enumerate(rows) if flag]
            index = (*[slice(None)] * dim, chosen)
            rows_of[index] = self._first_rows(entry, index)
        self.arrays = changed

    def _first_rows(self, entry: Entry, index: tuple[object, ...]) -> object:
        """Return what the rows at an index start with; those of an axis start alike."""
        first = self._first.get(entry.wire)
        if first is None:
            return 0
        return first if isinstance(entry.shape[len(index) - 1], str) else first[index]

    def _row_dim(self, entry: Entry) -> int:
        """Return the dimension of the batch: of the first axis that the first input has."""
        axes = [size for one in self._schema.inputs for size in one.shape if isinstance(size, str)]
        shared = [axis for axis in axes if all(axis in one.shape for one in self._kd_entries)]
        return entry.shape.index(shared[0]) if shared else 0


def _drawn(entry: Entry, numbers: Sequence[Number]) -> Drawn:
    """Return the numbers that a state starts with; every axis has size 1."""
    shape = tuple(size if isinstance(size, int) else 1 for size in entry.shape)
    return Drawn(numbers, shape, entry.dtype)


def _copied(array: object) -> object:
    """Copy a tensor or an array; a tensor without what it was computed from."""
    detach = getattr(array, "detach", None)
    return cast("_Array", array).copy() if detach is None else detach().clone()


def _flags(mask: object) -> list[bool]:
    values = mask.tolist() if hasattr(mask, "tolist") else mask
    listed = list(values) if isinstance(values, Iterable) else [values]
    flags = [value for value in listed if isinstance(value, bool)]
    if not isinstance(values, Iterable) or len(flags) < len(listed):
        raise DtypeMismatch(
            f"expected a mask of one bool for each row, got {kind_of(mask)} of others.",
            expected="bool (rows,)",
            got=type(mask).__name__,
            hint="Pass a one-dimensional bool array or tensor, such as `done.squeeze(-1)`.",
        )
    return flags
