"""Comparing the outputs of a session with the expected ones, and the report of it.

Expected are whole tensors, or the numbers that a file stores. Knows sessions and tolerances; must
not know files or formats.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kd_export._console import Row, advance, html_table, plain_table
from kd_export._errors import ExportError, VerifyError, quoted
from kd_export._running.session import Session
from kd_export._schema.files import Json, Number
from kd_export._schema.schema import (
    RANDOM,
    Budget,
    Entry,
    Vector,
    distance,
    draw,
    known_size,
    magnitude,
    positions,
    stored_count,
    tolerance,
)
from kd_export._verification.trials import Trial, shown

if TYPE_CHECKING:
    from torch import Tensor

    Outputs = Mapping[str, Tensor]
    Others = tuple[Outputs | None, Sequence[Outputs]]


REPORT_HEADER = ("output", "sizes", "largest difference", "tolerance", "verdict")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output at one set of sizes.

    Attributes:
        output: The wire name.
        sizes: The size of each axis.
        difference: The largest absolute difference.
        ok: Whether every number is within the tolerance.
        note: What else there is to say, or an empty string.
        rtol: The relative tolerance; ``None`` if no numbers were compared, as for ``atol``.
        atol: The absolute tolerance. A number may differ by ``atol + rtol * abs(expected)``.

    Example:
        >>> Comparison("y", {"batch": 2}, difference=0.0, ok=True).ok
        True
    """

    output: str
    sizes: Mapping[str, int]
    difference: float
    ok: bool
    note: str = ""
    rtol: float | None = None
    atol: float | None = None


REDUCTION_HEADER = ("output", "max", "99.9 %", "rms", "equal", "budget")


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far an output of one file is from that of another, over many rows.

    Attributes:
        output: The wire name.
        max: The largest absolute difference, in the output's unit.
        p999: What 99.9 % of the differences are at most.
        rms: The root mean square of the differences.
        agreement: The share of numbers that are equal, of integers and booleans; else ``None``.
        ok: Whether all is within the budget.

    Example:
        >>> Deviation("y", 0.01, 0.008, 0.002, None, ok=True).rms
        0.002
    """

    output: str
    max: float
    p999: float
    rms: float
    agreement: float | None
    ok: bool


@dataclass(frozen=True, slots=True)
class Latency:
    """How long a call takes beside one of the other file, in seconds, each by one thread.

    Attributes:
        sizes: The size of each axis.
        seconds: The median of a call of this file.
        other: That of the file that it was made of, measured in turns.

    Example:
        >>> Latency({"batch": 1}, 4e-5, 2e-5).slower
        True
    """

    sizes: Mapping[str, int]
    seconds: float
    other: float

    @property
    def slower(self) -> bool:
        """Whether it is slower, by more than such a measurement scatters."""
        return self.seconds > 1.1 * self.other


ROUNDS = 5
"""In how many rounds calls are timed."""


def timed(calls: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """Measure how long calls take, one by one, so that few of them are interrupted.

    Args:
        calls: What is called, in turns.
        seconds: How long each is measured in all, at least one call in each of `ROUNDS` rounds.

    Returns:
        The seconds of each call, for each of ``calls``.
    """
    found: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()  # the first calls of a runtime prepare it
    for _ in range(ROUNDS):
        for call, times in zip(calls, found, strict=True):
            spent = 0.0
            while spent == 0 or spent < seconds / ROUNDS:
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
                spent += times[-1]
    return found


@dataclass(frozen=True, slots=True)
class Reduction:
    """What it costs, and what it brings, that a file was made of another one.

    Attributes:
        name: ``"fp16"``, ``"int8"``, ``"int8-weights"`` or ``"adopted"``.
        outputs: How far each output is from that of the other file, on rows that nothing was
            calibrated with.
        rows: How many rows that were, steps of rollouts included.
        bytes: What the file holds, its schema and stored tests left out.
        other_bytes: What the other file holds.
        latencies: How long calls take.
        kept: The layers that stayed float.
        layers: All layers that could have less.
        budget: How far the outputs may be; ``None`` is by rounding.

    Example:
        >>> found = Deviation("y", 0.01, 0.008, 0.002, None, ok=True)
        >>> Reduction("int8", (found,), 512, 100, 400, (), (), ("0",), Budget(0.02)).smaller
        4.0
    """

    name: str
    outputs: tuple[Deviation, ...]
    rows: int
    bytes: int
    other_bytes: int
    latencies: tuple[Latency, ...]
    kept: tuple[str, ...]
    layers: tuple[str, ...]
    budget: Budget | None

    @property
    def smaller(self) -> float:
        """How many times smaller the file is than the one that it was made of."""
        return self.other_bytes / self.bytes

    def cells(self) -> list[Row]:
        """Return the outputs as rows of a table under `REDUCTION_HEADER`."""
        return [deviation_row(one, self.budget) for one in self.outputs]

    def lines(self) -> list[str]:
        """Return what stands below the table."""
        found = [f"{self.name}: judged on {self.rows:,} rows"]
        found.append(f"size: {self.bytes:,} bytes, before {self.other_bytes:,}")
        found += [
            f"latency at {shown(one.sizes)}, one thread: {one.seconds * 1e6:,.0f} us, "
            f"before {one.other * 1e6:,.0f} us{' (slower)' if one.slower else ''}"
            for one in self.latencies
        ]
        if self.layers:
            kept = quoted(self.kept)
            found.append(f"float: {kept} ({len(self.kept)} of {len(self.layers)} layers)")
        return found

    def to_data(self) -> dict[str, Json]:
        """Return it as plain data, fit for JSON; times are in seconds."""
        outputs: list[Json] = [
            {
                "output": one.output,
                "max": _finite(one.max),
                "p999": _finite(one.p999),
                "rms": _finite(one.rms),
                "agreement": one.agreement,
                "ok": one.ok,
            }
            for one in self.outputs
        ]
        latencies: list[Json] = [
            {"sizes": dict(one.sizes), "seconds": one.seconds, "other": one.other}
            for one in self.latencies
        ]
        return {
            "name": self.name,
            "outputs": outputs,
            "rows": self.rows,
            "bytes": self.bytes,
            "other_bytes": self.other_bytes,
            "latencies": latencies,
            "kept": list(self.kept),
            "layers": list(self.layers),
            "budget": None if self.budget is None else self.budget.to_data(),
        }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def deviation_row(one: Deviation, budget: Budget | None) -> Row:
    """Return how far an output is as a row of a table under `REDUCTION_HEADER`.

    Args:
        one: How far it is.
        budget: How far it may be; ``None`` is by rounding.
    """
    allowed = "rounding" if budget is None else budget.told(integers=one.agreement is not None)
    verdict = f"{'ok' if one.ok else 'EXCEEDED'}: {allowed}"
    if one.agreement is not None:
        return one.output, "", "", "", f"{one.agreement:.2%}", verdict
    return one.output, f"{one.max:.3g}", f"{one.p999:.3g}", f"{one.rms:.3g}", "", verdict


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What a verification found; it prints as a table.

    Attributes:
        path: The file.
        rows: The comparisons made.
        notes: What else there is to say, a sentence each.
        reduction: Of a file that was just made of another one, what that costs and brings.

    Example:
        >>> row = Comparison("y", {"batch": 2}, 1e-7, ok=True, rtol=1e-4, atol=1e-5)
        >>> print(Report("policy.onnx", (row,)))
        policy.onnx
        output  sizes    largest difference  tolerance                       verdict
        y       batch=2  1e-07               1e-05 + 0.0001 * abs(expected)  ok
        tried batch: 2
    """

    path: str
    rows: tuple[Comparison, ...]
    notes: tuple[str, ...] = ()
    reduction: Reduction | None = None

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The sizes of each axis that were tried."""
        found: dict[str, set[int]] = {}
        for row in self.rows:
            for name, size in row.sizes.items():
                found.setdefault(name, set()).add(size)
        return {name: tuple(sorted(sizes)) for name, sizes in found.items()}

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
                "rtol": row.rtol,
                "atol": row.atol,
                "ok": row.ok,
                "note": row.note,
            }
            for row in self.rows
        ]
        sizes: Json = {name: list(tried) for name, tried in self.sizes.items()}
        notes: Json = list(self.notes)
        made: dict[str, Json] = (
            {} if self.reduction is None else {"reduction": self.reduction.to_data()}
        )
        return {
            "path": self.path,
            "ok": self.ok,
            "rows": rows,
            "sizes": sizes,
            "notes": notes,
            **made,
        }

    def lines(self) -> list[str]:
        """Return what stands below the table: the sizes that were tried, and the notes."""
        sizes = [
            f"tried {name}: {', '.join(map(str, tried))}" for name, tried in self.sizes.items()
        ]
        made = [] if self.reduction is None else self.reduction.lines()
        return [*sizes, *made, *(f"note: {note}" for note in self.notes)]

    def cells(self) -> list[Row]:
        """Return the rows as text, one row for each comparison."""
        return [_cells(row) for row in self.rows]

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{html.escape(line)}</p>" for line in self.lines())
        table = html_table(REPORT_HEADER, self.cells())
        if self.reduction is not None:
            table += html_table(REDUCTION_HEADER, self.reduction.cells())
        return f"<p>{html.escape(self.path)}</p>{table}{lines}"

    def __repr__(self) -> str:
        tables = [plain_table(REPORT_HEADER, self.cells())]
        if self.reduction is not None:
            tables.append(plain_table(REDUCTION_HEADER, self.reduction.cells()))
        return "\n".join([self.path, *tables, *self.lines()])


def _cells(row: Comparison) -> Row:
    sizes = ", ".join(f"{name}={size}" for name, size in row.sizes.items()) or "fixed"
    verdict = "ok" if row.ok else "MISMATCH"
    allowed = "" if row.rtol is None else f"{row.atol:.3g} + {row.rtol:.3g} * abs(expected)"
    return row.output, sizes, f"{row.difference:.3g}", allowed, f"{verdict} {row.note}".rstrip()


MOST_OWN_ERRORS = 4.0
"""How many times the module's own rounding error a file may differ by."""
MOST_OF_ALL = 0.01
"""What share of the largest number is no longer a rounding error."""
OWN_ROUNDING = "the module's own rounding error is"
COMPARED_SHAPES = "(random: shapes compared)"
MOST_SCALE = 10.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far numbers may differ: by ``atol + rtol * abs(expected)``.

    Without either, both suit the dtype, and the absolute tolerance grows with the largest number
    of an output, since rounding errors do: up to `MOST_SCALE` times, however large a mask or an
    outlier is. Where one is given, the other is 0: no hidden tolerance applies.

    A budget stands above both: it limits single numbers and, of all stored tests together, the
    root mean square, and of integers how many differ.
    """

    rtol: float | None = None
    atol: float | None = None
    budget: Budget | None = None

    def __post_init__(self) -> None:
        """Check that both are numbers."""
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not isinstance(value, int | float):
                raise ExportError(
                    f"expected a number for `{name}`, got {value!r}.",
                    expected="a number",
                    got=value,
                    hint="Pass a number, such as `1e-5`, or leave it out for one by dtype.",
                )

    def of(self, entry: Entry, largest: float) -> tuple[float, float]:
        """Return the relative and the absolute tolerance of an output.

        Args:
            entry: The output.
            largest: The largest magnitude of the numbers that are expected.
        """
        if self.rtol is not None or self.atol is not None:
            return self.rtol or 0.0, self.atol or 0.0
        if self.budget is not None:
            limit = self.budget.max
            return 0.0, math.inf if limit is None or not is_float(entry) else limit
        relative, absolute = tolerance(entry.dtype)
        return relative, absolute * min(max(largest, 1.0), MOST_SCALE)


def compare_trials(
    session: Session,
    trials: Iterable[Trial],
    allowed: Tolerance,
    reference: object = None,
) -> Iterator[Comparison]:
    """Run a session on each trial and compare all outputs whole.

    Args:
        session: The program.
        trials: What it is tried on.
        allowed: How far numbers may differ.
        reference: The module, if it `HasError`. Where numbers differ further, its own error counts:
            what it gives in float64 and, for integers, on inputs that differ in their last bits.
    """
    for trial in trials:
        results = _results(session, trial.inputs, trial.sizes)
        rows = [
            _compare_whole(session, entry, results[entry.wire], trial, allowed)
            for entry in session.schema.outputs
        ]
        if not all(row.ok for row in rows) and isinstance(reference, HasError):
            others = reference.others(list(trial.inputs.values()), trial.expected)
            if others is not None:
                rows = [
                    row if row.ok else _excused(row, results[row.output], trial.expected, others)
                    for row in rows
                ]
        advance()
        yield from rows


@runtime_checkable
class HasError(Protocol):
    """A reference that can tell how exact it is itself."""

    def others(self, tensors: Sequence[Tensor], expected: Outputs) -> Others | None:
        """Return what it gives in float64, and on inputs that differ in their last bits.

        ``None`` if it does not give what is expected again: what it computes is not determined by
        its inputs.
        """
        ...

    def in_float64(self) -> Callable[[Sequence[Tensor]], Outputs]:
        """Return a copy that computes in float64, on the same tensors."""
        ...


def _excused(
    row: Comparison, result: Tensor, expected: Mapping[str, Tensor], others: Others
) -> Comparison:
    """Return a comparison that a mismatch fails, unless the module itself is as inexact."""
    got, truth = _widened(result), _widened(expected[row.output])
    if got.shape != truth.shape or row.rtol is None or row.atol is None:
        return row
    exact, nudged = others
    distance = (got - truth).abs().nan_to_num(math.inf)
    outputs = expected[row.output]
    if outputs.is_floating_point() or outputs.is_complex():
        largest = 0.0 if exact is None else own_rounding(truth, _widened(exact[row.output]))
        spared = MOST_OWN_ERRORS * largest
        ok = bool((distance <= truth.abs() * row.rtol + row.atol + spared).all())
        note = f"({OWN_ROUNDING} {largest:.2g})"
    else:
        made = [one for one in (exact, *nudged) if one is not None]
        own = [(_widened(one[row.output]) - truth).abs() for one in made]
        share = max((float((error > 0).double().mean()) for error in own), default=0.0)
        ok = float((distance > 0).double().mean()) <= MOST_OWN_ERRORS * share
        ok = ok and _largest(distance) <= max(map(_largest, own), default=0.0)
        note = f"(of the module's own integers {share:.2g} differ where an input does by a bit)"
    return replace(row, ok=True, note=note) if ok else row


def own_rounding(given: Tensor, exact: Tensor) -> float:
    """Return the largest rounding error of a module: how far it is from itself in float64.

    Where it is so far that it is another program, no difference is rounding: this gives 0.
    """
    largest = _largest((exact - given).abs())
    return 0.0 if largest > MOST_OF_ALL * _largest(given.abs()) else largest


def _largest(errors: Tensor) -> float:
    return float(errors.nan_to_num(0.0, 0.0).max()) if errors.numel() else 0.0


def compare_vectors(
    session: Session, vectors: Iterable[Vector], allowed: Tolerance
) -> Iterator[Comparison]:
    """Run a session on each stored test and compare the numbers stored; this needs no torch."""
    pairs: dict[str, list[tuple[Number, Number]]] = {e.wire: [] for e in session.schema.outputs}
    for vector in vectors:
        results = _results(session, inputs_of(session, vector), vector.sizes)
        for entry in session.schema.outputs:
            row, found = _compare_stored(session, entry, results[entry.wire], vector, allowed)
            pairs[entry.wire] += found
            yield row
        advance()
    if allowed.rtol is None and allowed.atol is None and allowed.budget is not None:
        for entry in session.schema.outputs:
            yield _compare_together(entry, pairs[entry.wire], allowed.budget)


def is_float(entry: Entry) -> bool:
    """Decide whether an output holds numbers that are rounded, and not integers or booleans."""
    return "float" in entry.dtype or "complex" in entry.dtype


def _compare_together(
    entry: Entry, pairs: Sequence[tuple[Number, Number]], budget: Budget
) -> Comparison:
    """Compare the numbers of all stored tests with what a budget says of them together."""
    apart = [distance(got, expected) for got, expected in pairs]
    count = max(len(apart), 1)
    sample = budget.sampled(len(apart))
    most = max(apart, default=0.0)
    if is_float(entry):
        rms = math.sqrt(sum(one * one for one in apart) / count)
        note = f"(rms {rms:.3g} of all stored tests" + (
            ")" if sample.rms is None else f", at most {sample.rms:.3g})"
        )
        return Comparison(entry.wire, {}, most, sample.allows(most, rms, None), note)
    equal = sum(one == 0 for one in apart) / count
    note = f"({equal:.2%} of all stored tests equal, at least {sample.agreement:.2%})"
    return Comparison(entry.wire, {}, most, sample.allows(most, 0.0, equal), note)


def inputs_of(session: Session, vector: Vector) -> dict[str, object]:
    """Build the inputs of a stored test, by wire name, in the arrays of the runtime."""
    drawn = zip(session.schema.inputs, draw(session.schema, vector), strict=True)
    return {entry.wire: session.runner.build(numbers) for entry, numbers in drawn}


def _results(
    session: Session, inputs: Mapping[str, object], sizes: Mapping[str, int]
) -> Mapping[str, Tensor]:
    try:
        return session.run(dict(inputs))
    except ExportError as error:  # the program failed, or would not take what its schema says
        raise VerifyError(
            f"the file fails at {shown(sizes)}: {error}",
            got=dict(sizes),
            hint="The file is damaged, or its runtime does not serve it: export again.",
        ) from error


def _compare_whole(
    session: Session, entry: Entry, result: Tensor, trial: Trial, tolerated: Tolerance
) -> Comparison:
    got, expected, sizes = result, trial.expected[entry.wire], trial.sizes
    if got.shape != expected.shape or got.dtype != expected.dtype:
        note = f"{got.dtype} {tuple(got.shape)} for {expected.dtype} {tuple(expected.shape)}"
        return Comparison(entry.wire, sizes, math.inf, ok=False, note=note)
    if session.schema.mode == RANDOM:
        return Comparison(entry.wire, sizes, 0.0, ok=True, note=COMPARED_SHAPES)
    wide, truth = _widened(got), _widened(expected)
    magnitudes = truth.abs().nan_to_num(0.0, 0.0)
    rtol, atol = tolerated.of(entry, float(magnitudes.max()) if magnitudes.numel() else 0.0)
    same = (wide == truth) | (wide.isnan() & truth.isnan())
    distance = (wide - truth).abs().masked_fill(same, 0.0).nan_to_num(math.inf)
    largest = float(distance.max()) if distance.numel() else 0.0
    ok = bool((distance <= magnitudes * rtol + atol).all())
    note = trial.note
    if not ok:
        share = float((distance / magnitudes.clamp(min=1e-300)).max())
        note = f"({share:.2g} of the expected number) {note}".rstrip()
    return Comparison(entry.wire, sizes, largest, ok, note, rtol, atol)


def _widened(tensor: Tensor) -> Tensor:
    import torch

    dense = tensor.detach().cpu()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).double()


def _compare_stored(
    session: Session, entry: Entry, result: Tensor, vector: Vector, tolerated: Tolerance
) -> tuple[Comparison, list[tuple[Number, Number]]]:
    """Return the comparison, and the numbers: the outputs, and the expected ones."""
    shape = tuple(getattr(result, "shape", ()))
    dtype = str(getattr(result, "dtype", entry.dtype)).removeprefix("torch.")
    known = [known_size(size, vector.sizes) for size in entry.shape]
    fits = len(shape) == len(known) and all(
        wanted in (None, size) for size, wanted in zip(shape, known, strict=True)
    )
    count = math.prod(shape)
    random = session.schema.mode == RANDOM
    expected = vector.outputs.get(entry.wire, ())
    if not fits or dtype != entry.dtype or (not random and len(expected) != stored_count(count)):
        note = f"{dtype} {shape} for {entry.describe()}"
        return Comparison(entry.wire, vector.sizes, math.inf, ok=False, note=note), []
    if random:
        return Comparison(entry.wire, vector.sizes, 0.0, ok=True, note=COMPARED_SHAPES), []
    relative, absolute = tolerated.of(entry, max(map(magnitude, expected), default=0.0))
    pairs = list(zip(session.runner.numbers(result, positions(count)), expected, strict=True))
    largest = max((distance(a, b) for a, b in pairs), default=0.0)
    if math.isinf(absolute) and tolerated.budget is not None:  # judged together
        return Comparison(entry.wire, vector.sizes, largest, ok=True), pairs
    ok = all(distance(a, b) <= absolute + relative * magnitude(b) for a, b in pairs)
    row = Comparison(entry.wire, vector.sizes, largest, ok, rtol=relative, atol=absolute)
    return row, pairs
