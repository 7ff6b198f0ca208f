"""Comparing an artefact, in its own runtime, with the module it was made from.

Two ways: against a module at hand, on fresh inputs; or, where there is none, against the numbers
that the file carries (see `_vectors`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kd_export._errors import ExportError, VerifyError
from kd_export._running.loading import Loaded, load_file
from kd_export._schema.schema import RANDOM, Entry, Json, Number, Schema, Vector
from kd_export._schema.vectors import concrete, draw, positions, stored_count, tolerance
from kd_export._tables import Row, html_table, plain_table

if TYPE_CHECKING:
    from torch import Tensor, nn

    Reference = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]

BATCH_SIZES = (1, 2, 3, 7)
HEADER = ("output", "sizes", "largest difference", "verdict")
COMPARED_SHAPES = "(random: shapes compared)"


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


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What a verification found; it prints as a table.

    Attributes:
        path: The file.
        rows: The comparisons made.

    Example:
        >>> print(Report("policy.onnx", (Comparison("y", {"batch": 2}, 1e-7, ok=True),)))
        policy.onnx
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
        """Return the report as plain data, fit for JSON."""
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
        """Return the rows as text, one row for each comparison."""
        return [_cells(row) for row in self.rows]

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.path)}</p>{html_table(HEADER, self.cells())}"

    def __repr__(self) -> str:
        return f"{self.path}\n{plain_table(HEADER, self.cells())}"


def _cells(row: Comparison) -> Row:
    sizes = ", ".join(f"{name}={size}" for name, size in row.sizes.items()) or "fixed"
    verdict = "ok" if row.ok else "MISMATCH"
    return row.output, sizes, f"{row.difference:.3g}", f"{verdict} {row.note}".rstrip()


def verify(
    path: str | Path,
    reference: nn.Module | None = None,
    batch_sizes: Sequence[int] | None = None,
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
        batch_sizes: The sizes of the dynamic axes to try, as far as their range allows; by
            default (1, 2, 3, 7), and without a reference all sizes that are stored.
        rtol: The relative tolerance, by default one that suits the dtype.
        atol: The absolute tolerance, by default one that suits the dtype.
        trusted: As for `open`.
        sha256: As for `open`.

    Returns:
        The report: one row for every output at every size. Look at ``report.ok``, or print it.
        Of a program that draws random numbers only shapes and dtypes are compared.

    Raises:
        VerifyError: A size has no stored test, the weights in the file are not those that it was
            exported with, or the file fails when it runs.

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
    loaded = load_file(path, trusted=trusted, sha256=sha256)
    if reference is None:
        return _check_stored(loaded, batch_sizes, rtol, atol, path)
    from kd_export._capture.reference import reference_module

    eager = reference_module(reference, loaded.schema)
    sizes = BATCH_SIZES if batch_sizes is None else batch_sizes
    return check_runner(loaded, eager, sizes, rtol, atol, path)


def trials(schema: Schema, batch_sizes: Sequence[int]) -> Iterator[dict[str, int]]:
    """Choose sizes for the axes: each axis runs through all batch sizes, out of step.

    >>> from kd_export._schema.schema import Axis
    >>> list(trials(Schema((), (), {"a": Axis(), "b": Axis()}), (1, 2, 7)))
    [{'a': 1, 'b': 2}, {'a': 2, 'b': 7}, {'a': 7, 'b': 1}]
    """
    if not schema.axes:
        yield {}
        return
    distinct = dict.fromkeys(batch_sizes)
    allowed = {
        name: [size for size in distinct if axis.holds(size)] or [axis.min]
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
        raise VerifyError(
            f"the module itself fails at {_shown(sizes)}: {error}",
            got=dict(sizes),
            hint="Give the axis the range that the module can serve, as in "
            "`dynamic={'batch': (2, None)}`, or an example whose values it accepts.",
        ) from error


def _shown(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "the example's size"


def _run(
    loaded: Loaded, sizes: Mapping[str, int], seed: int, path: Path
) -> list[tuple[Entry, object]]:
    """Run a loaded file on drawn inputs; return each output with its entry."""
    runner, schema = loaded.runner, loaded.schema
    try:
        arrays = [runner.build(drawn) for drawn in draw(schema, sizes, seed)]
        return list(zip(schema.outputs, runner(arrays), strict=True))
    except ExportError:
        raise
    except Exception as error:
        raise VerifyError(
            f"`{path.name}` fails at {_shown(sizes)}: {error}",
            got=dict(sizes),
            hint="The file is damaged, or its runtime does not serve it: export again.",
        ) from error


def check_runner(
    loaded: Loaded,
    reference: Reference,
    batch_sizes: Sequence[int],
    rtol: float | None,
    atol: float | None,
    path: Path,
) -> Report:
    """Compare a loaded file with a reference on new inputs at each size."""
    schema = loaded.schema
    rows: list[Comparison] = []
    for seed, sizes in enumerate(trials(schema, batch_sizes)):
        expected = _run_reference(reference, schema, sizes, seed)
        for entry, result in _run(loaded, sizes, seed, path):
            got = cast("Tensor", loaded.runner.restore(result, expected[entry.wire]))
            tolerances = tolerance(entry.dtype, rtol, atol)
            row = _compare_whole(entry, got, expected[entry.wire], sizes, schema.mode, tolerances)
            rows.append(row)
    return Report(str(path), tuple(rows))


def _compare_whole(
    entry: Entry,
    got: Tensor,
    expected: Tensor,
    sizes: Mapping[str, int],
    mode: str | None,
    tolerances: tuple[float, float],
) -> Comparison:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        note = f"{got.dtype} {tuple(got.shape)} for {expected.dtype} {tuple(expected.shape)}"
        return Comparison(entry.wire, sizes, math.inf, ok=False, note=note)
    if mode == RANDOM:
        return Comparison(entry.wire, sizes, 0.0, ok=True, note=COMPARED_SHAPES)
    rtol, atol = tolerances
    wide, truth = got.detach().cpu().double(), expected.detach().cpu().double()
    same = (wide == truth) | (wide.isnan() & truth.isnan())
    distance = (wide - truth).abs().masked_fill(same, 0.0).nan_to_num(math.inf)
    allowed = (truth.abs() * rtol + atol).nan_to_num(0.0, 0.0)
    largest = float(distance.max()) if distance.numel() else 0.0
    return Comparison(entry.wire, sizes, largest, ok=bool((distance <= allowed).all()))


def _check_stored(
    loaded: Loaded,
    batch_sizes: Sequence[int] | None,
    rtol: float | None,
    atol: float | None,
    path: Path,
) -> Report:
    """Compare a loaded file with the numbers stored in it."""
    rows = [
        _compare_stored(loaded, entry, result, vector, tolerance(entry.dtype, rtol, atol))
        for vector in _chosen(loaded.schema, batch_sizes, path)
        for entry, result in _run(loaded, vector.sizes, vector.seed, path)
    ]
    return Report(str(path), tuple(rows))


def _chosen(schema: Schema, batch_sizes: Sequence[int] | None, path: Path) -> Sequence[Vector]:
    """Choose the stored tests of all sizes asked for; without sizes, all tests."""
    stored = {tuple(sorted(vector.sizes.items())): vector for vector in schema.vectors}
    if batch_sizes is None:
        wanted = list(stored)
    else:
        wanted = [tuple(sorted(sizes.items())) for sizes in trials(schema, batch_sizes)]
    missing = [dict(sizes) for sizes in wanted if sizes not in stored]
    if missing or not wanted or not schema.outputs:
        known = "; ".join(_shown(vector.sizes) for vector in schema.vectors) or "none"
        raise VerifyError(
            f"`{path.name}` holds no stored test for "
            f"{_shown(missing[0]) if missing else 'any output'}; stored are: {known}.",
            expected=missing,
            got=tuple(dict(vector.sizes) for vector in schema.vectors),
            hint="Pass the module as `reference`, or sizes that are stored.",
        )
    return [stored[sizes] for sizes in wanted]


def _compare_stored(
    loaded: Loaded,
    entry: Entry,
    result: object,
    vector: Vector,
    tolerances: tuple[float, float],
) -> Comparison:
    shape = tuple(getattr(result, "shape", ()))
    dtype = str(getattr(result, "dtype", entry.dtype)).removeprefix("torch.")
    known = all(isinstance(size, int) or size in vector.sizes for size in entry.shape)
    fits = shape == concrete(entry.shape, vector.sizes) if known else len(shape) == len(entry.shape)
    count = math.prod(shape)
    random = loaded.schema.mode == RANDOM
    expected = vector.outputs.get(entry.wire, ())
    if not fits or dtype != entry.dtype or (not random and len(expected) != stored_count(count)):
        note = f"{dtype} {shape} for {entry.describe()}"
        return Comparison(entry.wire, vector.sizes, math.inf, ok=False, note=note)
    if random:
        return Comparison(entry.wire, vector.sizes, 0.0, ok=True, note=COMPARED_SHAPES)
    relative, absolute = tolerances
    pairs = list(zip(loaded.runner.numbers(result, positions(count)), expected, strict=True))
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
