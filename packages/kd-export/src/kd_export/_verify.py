"""Comparing an artefact, in its own runtime, with the module it was made from.

Two ways: against a module at hand, on fresh inputs; or, where there is none, against the numbers
that the file carries (see `_vectors`).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kd_export._errors import VerifyError
from kd_export._running.backend import Runner, backend_for
from kd_export._running.session import read_file
from kd_export._schema.archive import check_trust
from kd_export._schema.schema import Entry, Json, Number, Schema, Vector
from kd_export._schema.vectors import concrete, draw, positions, tolerance
from kd_export._tables import Row, plain_table

if TYPE_CHECKING:
    from torch import Tensor, nn

    Reference = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]

BATCH_SIZES = (1, 2, 3, 7)
HEADER = ("output", "sizes", "largest difference", "verdict")
RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output at one set of sizes.

    Attributes:
        output: The wire name.
        sizes: The size of each axis.
        difference: The largest absolute difference.
        ok: Whether every number is within the tolerance.
        note: What else there is to say, or an empty string.

    Example:
        >>> Comparison("y", {"batch": 2}, difference=0.0, ok=True).ok
        True
    """

    output: str
    sizes: Mapping[str, int]
    difference: float
    ok: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification found; its string form is a table.

    Attributes:
        path: The file.
        rows: The comparisons made.

    Example:
        >>> print(Report("policy.onnx", (Comparison("y", {"batch": 2}, 1e-7, ok=True),)))
        output  sizes    largest difference  verdict
        y       batch=2  1e-07               ok
    """

    path: str
    rows: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether something was compared, and all of it agreed."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def largest(self) -> float:
        """The largest difference of any output."""
        return max((row.difference for row in self.rows), default=math.nan)

    def to_data(self) -> dict[str, Json]:
        """Give the report as plain data, fit for JSON."""
        rows: list[Json] = [
            {
                "output": row.output,
                "sizes": dict(row.sizes),
                "difference": row.difference if math.isfinite(row.difference) else None,
                "ok": row.ok,
                "note": row.note,
            }
            for row in self.rows
        ]
        return {"path": self.path, "ok": self.ok, "rows": rows}

    def cells(self) -> list[Row]:
        """Give the rows as text, one row for each comparison."""
        return [_cells(row) for row in self.rows]

    def __str__(self) -> str:
        return plain_table(HEADER, self.cells())


def _cells(row: Comparison) -> Row:
    sizes = ", ".join(f"{name}={size}" for name, size in row.sizes.items()) or "fixed"
    verdict = "ok" if row.ok else "MISMATCH"
    return row.output, sizes, f"{row.difference:.3g}", f"{verdict} {row.note}".rstrip()


def verify(
    path: str | Path,
    reference: nn.Module | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    rtol: float | None = None,
    atol: float | None = None,
    *,
    trusted: bool = False,
    sha256: str | None = None,
) -> Report:
    """Run an artefact in its own runtime and compare its results.

    Args:
        path: The file.
        reference: The keyed module to compare with. Without one, the file is compared with the
            numbers stored in it when it was exported.
        batch_sizes: The sizes of the dynamic axes to try, as far as their range allows.
        rtol: The relative tolerance, by default one that suits the dtype.
        atol: The absolute tolerance, by default one that suits the dtype.
        trusted: As for `open`.
        sha256: As for `open`.

    Returns:
        The report; look at ``report.ok``, or print it.

    Raises:
        VerifyError: There is nothing to compare with.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> report = kd_export.save(module, "policy.pt2", {"x": torch.zeros(1, 3)})
        >>> kd_export.verify("policy.pt2", trusted=True).ok
        True
        >>> kd_export.verify("policy.pt2", module, batch_sizes=[4], trusted=True).ok
        True
    """
    path = Path(path)
    backend = backend_for(path)
    data = read_file(path)
    if backend.executes or sha256 is not None:
        check_trust(data, path, trusted=trusted, sha256=sha256)
    schema = backend.read_schema(io.BytesIO(data))
    runner = backend.load(data, schema)
    if reference is not None:
        from kd_export._capture.reference import reference_module

        eager = reference_module(reference, schema)
        return check_runner(runner, schema, eager, batch_sizes, rtol=rtol, atol=atol, path=path)
    rows = tuple(_check_stored(runner, schema, batch_sizes, rtol, atol))
    if not rows:
        raise VerifyError(
            f"`{path.name}` holds no stored test for the batch sizes {tuple(batch_sizes)}.",
            expected=tuple(batch_sizes),
            got=tuple(tuple(vector.sizes.values()) for vector in schema.vectors),
            hint="Pass the module as `reference`, or sizes that are stored.",
        )
    return Report(str(path), rows)


def trials(schema: Schema, batch_sizes: Sequence[int]) -> Iterator[dict[str, int]]:
    """Choose sizes for the axes: each axis runs through all batch sizes, out of step.

    >>> from kd_export._schema.schema import Axis
    >>> list(trials(Schema((), (), {"a": Axis(), "b": Axis()}), (1, 2, 7)))
    [{'a': 1, 'b': 2}, {'a': 2, 'b': 7}, {'a': 7, 'b': 1}]
    """
    if not schema.axes:
        yield {}
        return
    allowed = {
        name: [s for s in batch_sizes if axis.holds(s)] or [axis.min]
        for name, axis in schema.axes.items()
    }
    count = max(map(len, allowed.values()))
    for turn in range(count):
        yield {
            name: sizes[(turn + shift) % len(sizes)]
            for shift, (name, sizes) in enumerate(allowed.items())
        }


def stored_vectors(
    schema: Schema, reference: Reference, batch_sizes: Sequence[int]
) -> tuple[Vector, ...]:
    """Run the reference on drawn inputs and keep some of its numbers."""
    from kd_export._running.torch_runner import numbers_of

    vectors = []
    for seed, sizes in enumerate(trials(schema, batch_sizes)):
        outputs: dict[str, tuple[Number, ...]] = {}
        if schema.mode != RANDOM:
            results = _run_reference(reference, schema, sizes, seed)
            outputs = {
                name: tuple(numbers_of(value, positions(value.numel())))
                for name, value in results.items()
            }
        vectors.append(Vector(sizes, seed, outputs))
    return tuple(vectors)


def _run_reference(
    reference: Reference, schema: Schema, sizes: Mapping[str, int], seed: int
) -> Mapping[str, Tensor]:
    from kd_export._running.torch_runner import build_tensor

    tensors = [build_tensor(drawn) for drawn in draw(schema, sizes, seed)]
    try:
        return reference(tensors)
    except Exception as error:
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "the example's size"
        raise VerifyError(
            f"the module itself fails at {shown}: {error}",
            got=dict(sizes),
            hint="Give the axis the range that the module can serve, as in "
            "`dynamic={'batch': (2, None)}`, or an example whose values it accepts.",
        ) from error


def check_runner(
    runner: Runner,
    schema: Schema,
    reference: Reference,
    batch_sizes: Sequence[int],
    *,
    rtol: float | None,
    atol: float | None,
    path: Path,
) -> Report:
    """Compare a loaded file with a reference on inputs drawn afresh at each size."""
    rows: list[Comparison] = []
    for seed, sizes in enumerate(trials(schema, batch_sizes)):
        expected = _run_reference(reference, schema, sizes, seed)
        results = runner([runner.build(drawn) for drawn in draw(schema, sizes, seed)])
        for entry, result in zip(schema.outputs, results, strict=True):
            rows.append(
                _compare_whole(
                    runner,
                    entry,
                    result,
                    expected[entry.wire],
                    sizes,
                    schema.mode,
                    tolerance(entry.dtype, rtol, atol),
                )
            )
    return Report(str(path), tuple(rows))


def _compare_whole(
    runner: Runner,
    entry: Entry,
    result: object,
    expected: Tensor,
    sizes: Mapping[str, int],
    mode: str | None,
    tolerances: tuple[float, float],
) -> Comparison:
    got = cast("Tensor", runner.restore(result, expected))
    if got.shape != expected.shape or got.dtype != expected.dtype:
        note = f"{got.dtype} {tuple(got.shape)} for {expected.dtype} {tuple(expected.shape)}"
        return Comparison(entry.wire, sizes, math.inf, ok=False, note=note)
    if mode == RANDOM:
        return Comparison(entry.wire, sizes, 0.0, ok=True, note="(random: shapes compared)")
    rtol, atol = tolerances
    wide, truth = got.detach().cpu().double(), expected.detach().cpu().double()
    same = (wide == truth) | (wide.isnan() & truth.isnan())
    distance = (wide - truth).abs().masked_fill(same, 0.0).nan_to_num(math.inf)
    allowed = (truth.abs() * rtol + atol).nan_to_num(0.0, 0.0)
    largest = float(distance.max()) if distance.numel() else 0.0
    return Comparison(entry.wire, sizes, largest, ok=bool((distance <= allowed).all()))


def _check_stored(
    runner: Runner,
    schema: Schema,
    batch_sizes: Sequence[int],
    rtol: float | None,
    atol: float | None,
) -> Iterator[Comparison]:
    for vector in schema.vectors:
        if vector.sizes and not set(vector.sizes.values()) <= set(batch_sizes):
            continue
        arrays = [runner.build(drawn) for drawn in draw(schema, vector.sizes, vector.seed)]
        for entry, result in zip(schema.outputs, runner(arrays), strict=True):
            if entry.wire not in vector.outputs:
                yield Comparison(entry.wire, vector.sizes, 0.0, ok=True, note="(random: ran)")
                continue
            expected = vector.outputs[entry.wire]
            yield _compare_stored(runner, entry, result, expected, vector, rtol, atol)


def _compare_stored(
    runner: Runner,
    entry: Entry,
    result: object,
    expected: Sequence[Number],
    vector: Vector,
    rtol: float | None,
    atol: float | None,
) -> Comparison:
    relative, absolute = tolerance(entry.dtype, rtol, atol)
    shape = tuple(getattr(result, "shape", ()))
    plain = all(isinstance(s, int) or s in vector.sizes for s in entry.shape)
    if plain and shape != concrete(entry.shape, vector.sizes):
        return Comparison(entry.wire, vector.sizes, math.inf, ok=False, note=f"shape {shape}")
    places = positions(math.prod(shape))
    got = runner.numbers(result, places) if len(places) == len(expected) else []
    if len(got) != len(expected):
        return Comparison(entry.wire, vector.sizes, math.inf, ok=False, note=f"shape {shape}")
    pairs = list(zip(got, expected, strict=True))
    largest = max((_distance(a, b) for a, b in pairs), default=0.0)
    ok = all(_distance(a, b) <= absolute + relative * _size(b) for a, b in pairs)
    return Comparison(entry.wire, vector.sizes, largest, ok=ok)


def _distance(got: Number, expected: Number) -> float:
    if got == expected or (math.isnan(got) and math.isnan(expected)):
        return 0.0
    distance = abs(float(got) - float(expected))
    return math.inf if math.isnan(distance) else distance


def _size(number: Number) -> float:
    return abs(float(number)) if math.isfinite(number) else 0.0
