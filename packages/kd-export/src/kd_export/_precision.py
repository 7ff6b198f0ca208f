"""Files of fewer bits, judged within a budget beside the float file that they are made of.

Knows sessions, rows of inputs and budgets; must not know modules, or what a format does to layers.
All is numpy: the file that was verified against the module stands for it.

A program without state is judged on held-out rows. One with a state is judged by rollouts, in which
each file carries its own: an error may grow from step to step.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, BinaryIO, Final, Self

from kd_export._backends.onnx import ArrayRunner
from kd_export._console import plain_table, stage
from kd_export._errors import ExportError, Key, KeyMismatch, VerifyError, kind_of, nearest, quoted
from kd_export._running.loading import (
    check_weights,
    load,
    model_bytes,
    open,  # noqa: A004  # the package's own
)
from kd_export._running.session import (
    PRECISIONS,
    Backend,
    Carried,
    Configurable,
    ProgramReducer,
    Reducer,
    Reduces,
    ReducesPrograms,
    Runner,
    Seals,
    Session,
    backend_for,
    is_container,
    read_inputs,
)
from kd_export._schema.files import Number, open_regular, replacing
from kd_export._schema.schema import (
    ADOPTED,
    MOST_STORED,
    RANDOM,
    WIDE,
    Budget,
    Entry,
    Precision,
    Schema,
    Vector,
    check_shape,
    draw,
    positions,
)
from kd_export._verification.comparison import (
    REDUCTION_HEADER,
    Deviation,
    Latency,
    Reduction,
    Report,
    Tolerance,
    compare_vectors,
    deviation_row,
    inputs_of,
    is_float,
    timed,
)
from kd_export._verification.trials import BATCH_SIZES, trial_sizes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.export import ExportedProgram

    Array = NDArray[np.generic]
    Batch = dict[str, Array]
    Run = list[Batch]

CHUNK = 64
"""How many rows are computed at once."""
MOST_CALIBRATING = 1024
"""How many rows calibrate at most: the values of all layers are held meanwhile."""
TRAJECTORIES, STEPS, ROLLOUTS = 16, 50, 4
"""How rows become rollouts: so many side by side, so many steps, so often."""
SEARCHED = 512
"""How many held-out rows tell which layers matter most."""
SECONDS = 0.05
"""How long each file is timed at each size."""
FEW = 256
"""Fewer held-out rows say little of the largest difference."""


@dataclass(slots=True)
class Rows:
    """Inputs to calibrate with and others to judge on, by wire name.

    A run is a list of steps, each of some rows side by side; without a state it has one step.
    """

    calibrating: list[Run] = field(default_factory=list)
    held: list[Run] = field(default_factory=list)


def check_precision(precision: object, backend: Backend, calibration: object) -> None:
    """Check the argument ``precision``, before anything is captured or written.

    Raises:
        ExportError: It is not known, the format has no such files, or ``int8`` lacks calibration.
    """
    if precision not in PRECISIONS:
        close = nearest(str(precision), PRECISIONS)
        raise ExportError(
            f"expected one of {quoted(PRECISIONS)} for `precision`, got {precision!r}.",
            expected=PRECISIONS,
            got=precision,
            hint=None if close is None else f"Did you mean `{close}`?",
        )
    known: tuple[str, ...] = PRECISIONS if isinstance(backend, Reduces) else ()
    known = backend.precisions if isinstance(backend, ReducesPrograms) else known
    if precision not in known:
        named = f"`precision={precision!r}`" if known else "`precision`"
        raise ExportError(
            f"{named} cannot be combined with {backend.name}.",
            expected=known or "an `.onnx`, `.xml`, `.pte`, `.tflite` or `.pt2` file",
            got=precision if known else backend.suffixes[0],
            hint=f"Pass one of {quoted(known)}, or save it as `.onnx`, which has it."
            if known
            else "Save it as `.onnx`, `.xml`, `.pte` or `.tflite`, which hold numbers of fewer "
            "bits.",
        )
    if precision == "int8" and calibration is None:
        raise ExportError(
            "`int8` needs `calibration`: rows that the program meets, which tell between which "
            "numbers its values lie.",
            expected="a container of rows, or several",
            hint="Pass some hundred observations, such as `calibration=batch`, or save with "
            "`precision='int8-weights'`, which needs none.",
        )


def read_budget(
    value: Mapping[str, float] | None, schema: Schema, found: Sequence[Deviation] = ()
) -> Budget:
    """Read the argument ``budget``.

    Args:
        value: What was passed.
        schema: What the program gives.
        found: What was measured without one.

    Raises:
        ExportError: It is not a budget, or limits nothing that the program gives.
    """
    names = ("max", "rms", "agreement")
    if value is not None and not isinstance(value, Mapping):
        raise ExportError(
            f"expected a dict for `budget`, got {value!r}.",
            expected=names,
            got=value,
            hint=_PASS,
        )
    for name, limit in (value or {}).items():
        number: object = limit
        wrong = isinstance(number, bool) or not isinstance(number, int | float)
        if name not in names or wrong or not 0 <= limit < math.inf:
            close = nearest(str(name), names) if name not in names else None
            raise ExportError(
                f"expected limits {quoted(names)} in `budget`, got {name!r}: {limit!r}.",
                expected=names,
                got={name: limit},
                hint=_PASS if close is None else f"Did you mean `{close}`?",
            )
    given = value or {}
    floats = [entry.wire for entry in schema.outputs if is_float(entry)]
    if floats and not {"max", "rms"} & given.keys():
        raise ExportError(
            f"a file of fewer bits needs a `budget`: how far {quoted(floats)} may be off."
            f"{_suggested(found)}",
            expected=names,
            got=value,
            hint=_PASS,
        )
    return Budget(given.get("max"), given.get("rms"), given.get("agreement", 0.99))


_PASS = "Pass the limits in the units of the outputs, such as `budget={'max': 0.02, 'rms': 0.005}`."


def _suggested(found: Sequence[Deviation]) -> str:
    floats = [one for one in found if one.agreement is None]
    if not floats:
        return ""
    most, rms = max(one.max for one in floats), max(one.rms for one in floats)
    return f" Without one it was off by {most:.3g} at most, with an rms of {rms:.3g}."


def save_reduced(
    source: Path,
    target: Path,
    backend: Backend,
    program: ExportedProgram | None = None,
    *,
    precision: str,
    calibration: object,
    drawn: Mapping[str, object] | None,
    budget: Mapping[str, float] | None,
    keep_float: str | Iterable[str] | None,
) -> Report:
    """Write a float file with fewer bits, if it stays within a budget.

    Args:
        source: The float file, verified.
        target: The file to write.
        backend: The format of both.
        program: What the float file was written of, for formats that are written of programs.
        precision: One of `PRECISIONS`.
        calibration: A container or dict of rows, or an iterable of such; ``None``: not calibrated.
        drawn: Rows to judge on where there is no calibration.
        budget: The limits ``max``, ``rms`` and ``agreement``.
        keep_float: ``"auto"``: as few layers stay float as the budget needs. Or their names.

    Raises:
        VerifyError: The budget cannot be met.
        ExportError: An argument is wrong.
    """
    before = _loaded(backend, source)
    if before.schema.mode == RANDOM:
        raise ExportError(
            "a program that draws random numbers cannot be judged within a budget.",
            got=RANDOM,
            hint="Export it with another `mode`, such as `'deterministic'`.",
        )
    if budget is not None:
        read_budget(budget, before.schema)
    with stage("read the calibration"):
        rows = (
            Rows(held=_runs(before, [drawn], split=False).held)
            if calibration is None
            else _runs(before, _items(calibration), split=True)
        )
    samples = [
        {before.schema.input(wire).name: array for wire, array in inputs.items()}
        for run in rows.calibrating
        for inputs, _ in _walk(before, run)
    ]
    with stage(f"calibrate `{target.name}`"):
        maker = _maker(backend, source, program, before.schema, precision, samples)
    if not maker.layers:
        raise ExportError(
            f"the program has no layer that can be written in {precision}.",
            hint="Leave `precision` out.",
        )
    judge = _Judge(before, rows.held)
    with maker, stage(f"write `{target.name}` in {precision}"):
        if budget is None:
            read_budget(None, before.schema, judge.deviations(maker.made(()), Budget()))
        limits = read_budget(budget, before.schema)
        kept = _kept(keep_float, judge, maker, limits)
        found = judge.deviations(maker.made(kept), limits)
        _check_budget(target, precision, found, limits, kept)
        schema = replace(
            before.schema,
            vectors=_vectors(before, rows.held),
            tolerance={},
            precision=Precision(precision, limits, kept, judge.rows),
        )
        return _sealed(
            maker.seal,
            source,
            target,
            backend,
            schema,
            before,
            _told(judge, found, kept, maker.layers, limits, precision),
            _notes(judge, calibration),
        )


DRAWN = 1024
"""How many rows a file of another tool is judged on."""


def adopt(
    path: str | Path,
    like: str | Path,
    *,
    budget: Mapping[str, float] | None = None,
    calibration: object = None,
) -> Report:
    """Seal a file that another tool made of one of ours, once it was compared with it.

    Optimisers and quantizers (onnxslim, those of onnxruntime) drop or break the schema of a file.
    The file is run beside the one that it was made of; if it gives the same, it gets its schema,
    in place, and `open` and `verify` take it again. Neither torch nor a module is needed.

    Args:
        path: The ``.onnx`` file that another tool wrote, with the same inputs and outputs.
        like: The file that it was made of, by `save`.
        budget: How far its results may be off, as for `KeyedProgram.save`; the file then holds
            it. Without one, by no more than rounding in the dtype of each output, also on the
            same rows spread to four times the range, where clips and limits are met.
        calibration: Rows to judge on, as for `KeyedProgram.save`. Without it they are drawn
            between the bounds of the example; integers and masks are those of the stored tests.

    Returns:
        What was compared.

    Raises:
        VerifyError: The results are further off; the file stays as it was.
        ExportError: It has other inputs or outputs, or it is of another format.

    Example:
        >>> import onnx, torch, kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> report = kd_export.save(module, "policy.onnx", {"x": torch.zeros(1, 3)})
        >>> model = onnx.load("policy.onnx")
        >>> del model.metadata_props[:]  # as many tools do
        >>> onnx.save(model, "slim.onnx")
        >>> kd_export.adopt("slim.onnx", like="policy.onnx").ok
        True
        >>> kd_export.verify("slim.onnx").ok
        True
    """
    path, like = Path(path), Path(like)
    backend = backend_for(path)
    if not isinstance(backend, Seals) or backend is not backend_for(like):
        raise ExportError(
            f"`{path.name}` cannot be adopted as `{like.name}`.",
            expected="two `.onnx` files",
            got=(path.suffix, like.suffix),
            hint="Save the module in the format of the file that was made.",
        )
    before = open(like)
    if before.schema.derived or before.schema.mode == RANDOM or not before.schema.vectors:
        raise ExportError(
            f"`{like.name}` holds nothing that another file could be compared with.",
            hint="Pass the file of a module that does not draw random numbers.",
        )
    limits = None if budget is None else read_budget(budget, before.schema)
    items = [_drawn_rows(before)] if calibration is None else _items(calibration)
    held = _runs(before, items, split=False).held
    judge = _Judge(before, held)
    # What must be equal, must be so where clips and limits are met; a budget is for rows as given.
    far = None if limits is not None else _far_judge(before, held)
    with tempfile.TemporaryDirectory() as folder:
        sealed = Path(folder) / path.name
        backend.seal(path, before.schema, sealed)
        with open_regular(sealed) as file:
            session = _of_other_tool(backend, file, sealed, like)
        found = judge.deviations(session, limits or Budget(agreement=1.0))
        if far is not None:
            beyond = far.deviations(session, Budget(agreement=1.0))
            pairs = zip(map(judge.rounded, found), map(far.rounded, beyond), strict=True)
            found = tuple(one if other.ok else other for one, other in pairs)
        reduction = Reduction(ADOPTED, found, judge.rows, 1, 1, (), (), (), limits)
        if not all(one.ok for one in found):
            table = plain_table(REDUCTION_HEADER, reduction.cells())
            raise VerifyError(
                f"`{path.name}` was not sealed: it gives other results than `{like.name}`.\n"
                f"{table}\n",
                expected="the same results" if limits is None else str(limits),
                got=max(one.max for one in found),
                hint="If that is what was meant, pass `budget={'max': ..., 'rms': ...}`.",
            )
        schema = before.schema
        if limits is not None:
            schema = replace(
                schema,
                vectors=_vectors(before, held),
                tolerance={},
                precision=Precision(ADOPTED, limits, (), judge.rows),
            )
        seal = partial(backend.seal, path)
        notes = () if far is not None else (_NEAR,)
        return _sealed(seal, like, path, backend, schema, before, reduction, notes)


def _of_other_tool(backend: Backend, file: BinaryIO, path: Path, like: Path) -> Session:
    try:
        return load(backend, file, path)
    except ExportError as error:
        raise ExportError(
            f"`{path.name}` cannot take the place of `{like.name}`: {error}",
            expected=error.expected,
            got=error.got,
            hint="It must have the same inputs and outputs, by name, dtype, shape and order.",
        ) from error


def _drawn_rows(before: Session) -> Mapping[Key, object]:
    """Draw rows between the bounds of the example; what the file stores is taken from there."""
    import numpy as np

    schema = before.schema
    tests = [inputs_of(before, vector) for vector in schema.vectors]
    stored = [{wire: np.asarray(x) for wire, x in inputs.items()} for inputs in tests]
    rows = _joined(schema, stored)
    if rows is None or len(schema.axes) > 1:
        largest = max(stored, key=_rows_of)
        return {schema.input(wire).key: array for wire, array in largest.items()}
    sizes = dict.fromkeys(schema.axes, DRAWN)
    numbers = {
        drawn.key: draw(schema, Vector(sizes, 0, {}))[place]
        for place, drawn in enumerate(schema.inputs)
    }
    chosen = np.random.default_rng(0).integers(0, _rows_of(rows), DRAWN)
    held = {wire for vector in schema.vectors for wire in vector.inputs}
    return {
        entry.key: rows[entry.wire][chosen]
        if entry.wire in held or not schema.axes
        else before.runner.build(numbers[entry.key])
        for entry in schema.inputs
    }


_NEAR: Final = (
    "not judged far outside of the range of the rows: a clip or a limit that these do not meet may "
    "be missing."
)


def _far_judge(before: Session, held: Sequence[Run]) -> _Judge | None:
    """Judge on rows of a wider range; ``None`` if the program does not take such."""
    try:
        return _Judge(before, [_far(before.schema, run) for run in held])
    except Exception:  # such as an index that follows from a number
        return None


def _far(schema: Schema, run: Run) -> Run:
    """Return a run whose observations are from a range that is `WIDE` times the example's.

    Masks and what else the file stores in place of drawing it stay.
    """
    import numpy as np

    stored = {wire for vector in schema.vectors for wire in vector.inputs}
    if schema.precision is not None:  # its tests store all inputs
        stored = {entry.wire for entry in schema.inputs if "mask" in entry.key[-1].lower()}

    def widened(wire: str, array: Array) -> Array:
        entry = schema.input(wire)
        if wire in stored or not is_float(entry):
            return array
        middle = ((entry.low or 0.0) + (1.0 if entry.high is None else entry.high)) / 2
        return np.add(middle, np.subtract(array, middle) * WIDE).astype(array.dtype)

    return [{wire: widened(wire, array) for wire, array in step.items()} for step in run]


def _told(
    judge: _Judge,
    found: tuple[Deviation, ...],
    kept: tuple[str, ...],
    layers: tuple[str, ...],
    budget: Budget,
    name: str,
) -> Reduction:
    return Reduction(name, found, judge.rows, 1, 1, (), kept, layers, budget)


def _notes(judge: _Judge, calibration: object) -> tuple[str, ...]:
    notes = []
    if calibration is None:
        notes.append(
            "judged on rows that were drawn like the example: pass `calibration=` to judge it on "
            "rows that the program meets."
        )
    elif judge.rows < FEW:
        notes.append(
            f"judged on {judge.rows} rows, which says little of the largest difference: pass "
            "more as `calibration=`, of which half is held out."
        )
    return tuple(notes)


def _sealed(
    seal: Callable[[Schema, Path], None],
    source: Path,
    target: Path,
    backend: Backend,
    schema: Schema,
    before: Session,
    reduction: Reduction,
    notes: tuple[str, ...],
) -> Report:
    """Write the schema into a file and move it, once it passes its stored tests and is timed."""
    precision = schema.precision
    rtol, atol = (schema.tolerance.get(name) for name in ("rtol", "atol"))
    allowed = Tolerance(rtol, atol, None if precision is None else precision.budget)
    with replacing(target) as temporary:
        seal(schema, temporary)
        with open_regular(temporary) as file:
            session = load(backend, file, temporary)
            check_weights(session, backend, file, temporary)
        rows = tuple(compare_vectors(session, session.schema.vectors, allowed))
        latencies = tuple(_latencies(_timed(backend, temporary), _timed(backend, source)))
        done = replace(
            reduction,
            bytes=model_bytes(temporary, session.schema),
            other_bytes=model_bytes(source, before.schema),
            latencies=latencies,
        )
        if all(one.slower for one in latencies):
            notes += (
                "it is slower here than the file that it was made of, in which nothing has to be "
                "rounded on the way.",
            )
        report = Report(str(target), rows, notes, done)
        if not report.ok:
            raise VerifyError(
                f"`{target.name}` was not written: it is within the budget on all held-out rows, "
                f"but not on those that the file would hold as tests.\n{report}",
                expected=str(reduction.budget or "the same results"),
                got=report.largest,
                hint="Widen the budget a little, or pass more rows as `calibration=`.",
            )
    return report


def _loaded(backend: Backend, path: Path) -> Session:
    """Open a file; its arrays are those of numpy, whatever its runtime takes."""
    with open_regular(path) as file:
        session = load(backend, file, path)
    if isinstance(session.runner, ArrayRunner):
        return session
    return Session(session.schema, _OnArrays(session.runner))


class _OnArrays(ArrayRunner):
    """Run a program of a runtime that takes tensors on numpy arrays."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        import torch

        results = self._runner([torch.from_numpy(array) for array in arrays], names)
        return [torch.as_tensor(result).numpy() for result in results]


def _maker(
    backend: Backend,
    source: Path,
    program: ExportedProgram | None,
    schema: Schema,
    precision: str,
    samples: Sequence[Mapping[str, object]],
) -> _Maker:
    if isinstance(backend, Reduces):
        return _FileMaker(backend, backend.reducer(source, precision, samples), schema, precision)
    assert program is not None
    from kd_export._backends.program_precision import ProgramReducer

    reducer = ProgramReducer(program, schema, precision, samples)
    return _ProgramMaker(backend, reducer, schema, precision)


class _Maker:
    """Writes a program again and again, with other layers kept float."""

    layers: tuple[str, ...]

    def __init__(self, backend: Backend, schema: Schema, precision: str) -> None:
        self._backend = backend
        self._schema = replace(schema, vectors=(), precision=Precision(precision, Budget()))
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / f"model{backend.suffixes[0]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def made(self, kept: Iterable[str]) -> Session:
        """Return a session of the file in which these layers are float."""
        self._make(frozenset(kept))
        self.seal(self._schema, self.path)
        return _loaded(self._backend, self.path)

    def _make(self, kept: frozenset[str]) -> None:
        raise NotImplementedError

    def seal(self, schema: Schema, target: Path) -> None:
        """Write what was made last with a schema."""
        raise NotImplementedError


class _FileMaker(_Maker):
    """Makes files of a file, which get their schema afterwards."""

    def __init__(self, backend: Backend, reducer: Reducer, schema: Schema, precision: str) -> None:
        super().__init__(backend, schema, precision)
        self.layers = reducer.layers
        self._reducer = reducer
        self._plain = self.path.parent / "plain" / self.path.name
        self._plain.parent.mkdir()

    def _make(self, kept: frozenset[str]) -> None:
        self._reducer.write(self._plain, kept)

    def seal(self, schema: Schema, target: Path) -> None:
        """Write what was made last with a schema."""
        assert isinstance(self._backend, Seals)
        self._backend.seal(self._plain, schema, target)


class _ProgramMaker(_Maker):
    """Makes files of a program, which are written with their schema."""

    def __init__(
        self, backend: Backend, reducer: ProgramReducer, schema: Schema, precision: str
    ) -> None:
        super().__init__(backend, schema, precision)
        self.layers = reducer.layers
        self._reducer = reducer
        self._program: ExportedProgram | None = None

    def _make(self, kept: frozenset[str]) -> None:
        self._program = self._reducer.program(kept)

    def seal(self, schema: Schema, target: Path) -> None:
        """Write what was made last with a schema."""
        from kd_export._running.torch_runner import digest_of, held_by

        assert self._program is not None
        known = digest_of(held_by(self._program))
        self._backend.write(self._program, replace(schema, weights=known), target)


class _Judge:
    """Compares a session with the one before, on held-out runs."""

    def __init__(self, before: Session, held: Sequence[Run]) -> None:
        self._schema = before.schema
        self._held = held
        self._expected = [[outputs for _, outputs in _walk(before, run)] for run in held]
        self.rows = sum(_rows_of(batch) for run in held for batch in run)

    def rounded(self, one: Deviation) -> Deviation:
        """Judge how far an output is off by what suits its dtype."""
        import numpy as np

        entry = self._schema.output(one.output)
        if one.agreement is not None:
            return one
        steps = [np.abs(step[one.output]) for run in self._expected for step in run]
        finite = [step[np.isfinite(step)] for step in steps]
        largest = max((float(step.max()) for step in finite if step.size), default=0.0)
        rtol, atol = Tolerance().of(entry, largest)
        return replace(one, ok=one.max <= atol + rtol * largest)

    def deviations(
        self, session: Session, budget: Budget, most: int | None = None
    ) -> tuple[Deviation, ...]:
        """Measure how far each output is off, on all held-out rows or on the first ones."""
        import numpy as np

        apart: dict[str, list[NDArray[np.float64]]] = {e.wire: [] for e in self._schema.outputs}
        seen = 0
        for run, expected in zip(self._held, self._expected, strict=True):
            if most is not None and seen >= most:
                break
            for (_, outputs), wanted in zip(_walk(session, run), expected, strict=True):
                for wire, arrays in apart.items():
                    arrays.append(_apart(outputs[wire], wanted[wire]))
            seen += sum(map(_rows_of, run))
        return tuple(
            _deviation(entry, np.concatenate(apart[entry.wire]), budget)
            for entry in self._schema.outputs
        )


def _rows_of(batch: Batch) -> int:
    first = next(iter(batch.values()))
    return first.shape[0] if first.shape else 1


def _apart(got: Array, expected: Array) -> NDArray[np.float64]:
    """Return how far numbers are apart; two that are not numbers are equal."""
    import numpy as np

    kind = np.complex128 if expected.dtype.kind == "c" else np.float64
    one, other = got.astype(kind).reshape(-1), expected.astype(kind).reshape(-1)
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = np.abs(one - other)
    found[(one == other) | (np.isnan(one) & np.isnan(other))] = 0
    found[np.isnan(found)] = np.inf
    return found


def _deviation(entry: Entry, apart: NDArray[np.float64], budget: Budget) -> Deviation:
    import numpy as np

    if not apart.size:
        return Deviation(entry.wire, 0.0, 0.0, 0.0, None, ok=True)
    most, p999 = float(apart.max()), float(np.quantile(apart, 0.999))
    rms = float(np.sqrt(np.mean(np.square(apart))))
    agreement = None if is_float(entry) else float(np.mean(apart == 0))
    return Deviation(entry.wire, most, p999, rms, agreement, budget.allows(most, rms, agreement))


def _excess(found: Iterable[Deviation], budget: Budget) -> float:
    return max((budget.excess(one.max, one.rms, one.agreement) for one in found), default=0.0)


def _kept(
    keep_float: str | Iterable[str] | None,
    judge: _Judge,
    maker: _Maker,
    budget: Budget,
) -> tuple[str, ...]:
    """Choose the layers that stay float: those named, or as few as the budget needs."""
    if keep_float is None:
        return ()
    if keep_float != "auto":
        named = [keep_float] if isinstance(keep_float, str) else [*keep_float]
        for name in named:
            if name not in maker.layers:
                close = nearest(str(name), maker.layers)
                raise KeyMismatch(
                    f"layer `{name}` of `keep_float` not found; available layers: "
                    f"{quoted(maker.layers)}.",
                    expected=maker.layers,
                    got=name,
                    hint=None if close is None else f"Did you mean `{close}`?",
                )
        return tuple(layer for layer in maker.layers if layer in named)
    if _excess(judge.deviations(maker.made(()), budget), budget) <= 1:
        return ()
    return _fewest(maker.layers, judge, maker, budget)


def _fewest(
    layers: tuple[str, ...], judge: _Judge, maker: _Maker, budget: Budget
) -> tuple[str, ...]:
    """Keep the layers float that cost most by themselves, as many as needed but not all."""
    costs: dict[str, float] = {}
    for layer in layers:
        session = maker.made(other for other in layers if other != layer)
        costs[layer] = _excess(judge.deviations(session, budget, SEARCHED), budget)
    ranked = sorted(layers, key=lambda layer: -costs[layer])

    def meets(count: int) -> bool:
        return _excess(judge.deviations(maker.made(ranked[:count]), budget), budget) <= 1

    # The least number for which it holds, if more layers in float never make it worse.
    low, high = 1, len(layers) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle + 1, high)
    return tuple(layer for layer in layers if layer in ranked[: min(low, len(layers) - 1)])


def _check_budget(
    target: Path,
    precision: str,
    found: Sequence[Deviation],
    budget: Budget,
    kept: Sequence[str],
) -> None:
    if all(one.ok for one in found):
        return
    times = _excess(found, budget)
    table = plain_table(REDUCTION_HEADER, [deviation_row(one, budget) for one in found])
    layers = f"with {quoted(kept)} in float" if kept else "with no layer in float"
    raise VerifyError(
        f"`{target.name}` was not written: {precision} cannot meet the budget. The nearest was "
        f"{layers}, {times:.3g} times the budget.\n{table}\n",
        expected=str(budget),
        got=times,
        hint="Widen the budget, or take "
        + (
            "`precision='int8-weights'` or `'fp16'`, which round less."
            if precision == "int8"
            else "a precision that rounds less."
        ),
    )


def _timed(backend: Backend, path: Path) -> Session:
    """Load a file for one thread: those of two sessions would wait for each other's processors."""
    return _loaded(
        backend.configured(1, None) if isinstance(backend, Configurable) else backend, path
    )


def _latencies(session: Session, before: Session) -> Iterator[Latency]:
    """Time calls of both on inputs of stored tests, in turns: the smallest and the largest."""
    vectors = session.schema.vectors
    chosen = {tuple(v.sizes.items()): v for v in (*vectors[:1], *vectors[-1:])}
    for vector in chosen.values():
        inputs = inputs_of(session, vector)
        found = timed([partial(one.run, inputs) for one in (session, before)], SECONDS)
        yield Latency(vector.sizes, *map(median, found))


# Rows: from what people pass to runs.


def _items(calibration: object) -> list[object]:
    """List what was passed as ``calibration``: one container or dict, or several."""
    if isinstance(calibration, Mapping) or is_container(calibration):
        return [calibration]
    if isinstance(calibration, Iterable) and not isinstance(calibration, str):
        found = list(calibration)
        if found and all(isinstance(x, Mapping) or is_container(x) for x in found):
            return found
    raise ExportError(
        f"expected a container or dict of rows for `calibration`, or several, got "
        f"{kind_of(calibration)}.",
        expected="a container or dict of rows",
        got=type(calibration).__name__,
        hint="Pass what the module takes, such as `calibration={'observation': observations}`.",
    )


def _runs(session: Session, items: Sequence[object], *, split: bool) -> Rows:
    """Make runs of rows: half of them to calibrate with if they are split, all to judge on else."""
    schema = session.schema
    if schema.state:
        return _rollouts(session, [_observed(session, item) for item in items], split)
    batches = [_read(session, item, schema.inputs) for item in items]
    for batch in batches:
        sizes: dict[str, tuple[int, Entry]] = {}
        for entry in schema.inputs:
            check_shape(entry, batch[entry.wire].shape, _free(schema), sizes)
    rows = _joined(schema, batches)
    if rows is None:  # rows cannot be taken apart: each item stays whole
        if not split:
            return Rows(held=[[batch] for batch in batches])
        _check_count(len(batches), 2, "items")
        return Rows([[b] for b in batches[::2]], [[b] for b in batches[1::2]])
    order = _permutation(_rows_of(rows))
    least = _least(schema)
    if not split:
        return Rows(held=[[b] for b in _chunks(schema, rows, order)])
    _check_count(len(order), 2 * least, "rows")
    half = max(len(order) // 2, least)
    first, rest = order[:half][: max(MOST_CALIBRATING, least)], order[half:]
    return Rows(
        [[b] for b in _chunks(schema, rows, first)], [[b] for b in _chunks(schema, rows, rest)]
    )


def _check_count(count: int, least: int, what: str) -> None:
    if count < least:
        raise ExportError(
            f"expected at least {least} {what} of `calibration`, got {count}: half of them "
            "calibrate, the others judge.",
            expected=least,
            got=count,
            hint="Pass some hundred or more.",
        )


def _read(session: Session, item: object, entries: Sequence[Entry]) -> Batch:
    import numpy as np

    values = read_inputs(item, tuple(entries))
    return {
        entry.wire: np.asarray(session.runner.adapt(value, entry))
        for entry, value in zip(entries, values, strict=True)
    }


def _free(schema: Schema) -> Schema:
    """Return a schema whose axes have any size: rows are taken apart, whatever range one has."""
    return replace(
        schema, axes={name: replace(a, min=0, max=None) for name, a in schema.axes.items()}
    )


def _leading(schema: Schema) -> int | str | None:
    """Return the size or axis that every input starts with; ``None`` if there is none."""
    first = {entry.shape[0] if entry.shape else None for entry in schema.inputs}
    return first.pop() if len(first) == 1 else None


def _joined(schema: Schema, batches: Sequence[Batch]) -> Batch | None:
    """Join rows, if all inputs have them first and they are alike; ``None`` if not."""
    import numpy as np

    alike = all(
        len({batch[entry.wire].shape[1:] for batch in batches}) == 1 for entry in schema.inputs
    )
    if _leading(schema) is None or not alike:
        return None
    return {e.wire: np.concatenate([batch[e.wire] for batch in batches]) for e in schema.inputs}


def _permutation(count: int) -> NDArray[np.int64]:
    import numpy as np

    return np.random.default_rng(0).permutation(count)


def _least(schema: Schema) -> int:
    leading = _leading(schema)
    return leading if isinstance(leading, int) else schema.axes[leading].min if leading else 1


def _width(schema: Schema) -> int:
    """Return how many rows a call takes."""
    leading = _leading(schema)
    if isinstance(leading, int):
        return leading
    axis = schema.axes.get(leading or "")
    most = CHUNK if axis is None or axis.max is None else min(axis.max, CHUNK)
    return most if axis is None else max(most, axis.min)


def _chunks(schema: Schema, rows: Batch, order: NDArray[np.int64]) -> Iterator[Batch]:
    width, least = _width(schema), _least(schema)
    cuts = [*range(0, len(order), width), len(order)]
    for start, stop in pairwise(cuts):
        if stop - start >= least:
            chosen = order[start:stop]
            yield {wire: array[chosen] for wire, array in rows.items()}


# Rollouts: of a program that carries a state.


def _observed(session: Session, item: object) -> Batch:
    """Read observations; a state that stands beside them is left to the program."""
    schema = session.schema
    entries = [entry for entry in schema.inputs if entry.wire not in schema.state]
    if isinstance(item, Mapping) and not is_container(item):
        item = _without_state(item, schema)
    return _read(session, item, entries)


def _without_state(item: Mapping[object, object], schema: Schema) -> Mapping[object, object]:
    states = {schema.input(wire).key for wire in schema.state}
    names = states | {key[0] for key in states if len(key) == 1} | set(schema.state)
    return {word: value for word, value in item.items() if word not in names}


def _rollouts(session: Session, items: Sequence[Batch], split: bool) -> Rows:
    """Make rollouts: of (rows, time), of a step for each item, or of rows in any order."""
    import numpy as np

    schema = session.schema
    entries = [entry for entry in schema.inputs if entry.wire not in schema.state]
    ranks = {batch[e.wire].ndim - len(e.shape) for batch in items for e in entries}
    shapes = {tuple(batch[e.wire].shape for e in entries) for batch in items}
    if ranks == {1}:
        runs = [_steps(batch) for batch in items]
    elif ranks == {0} and len(items) > 1 and len(shapes) == 1:
        runs = [list(items)]
    elif ranks == {0} and len(items) == 1:
        (rows,) = items
        order = _permutation(_rows_of(rows))
        parts = (order[::2], order[1::2]) if split and len(order) > 1 else (order[:0], order)
        source = np.random.default_rng(1)
        count = _width(schema) if isinstance(_leading(schema), int) else TRAJECTORIES
        made = [
            [
                [
                    {w: array[source.choice(part, count)] for w, array in rows.items()}
                    for _ in range(STEPS)
                ]
                for _ in range(ROLLOUTS if len(part) else 0)
            ]
            for part in parts
        ]
        return Rows(*made)
    else:
        found = [batch[entry.wire].shape for batch in items for entry in entries][:3]
        raise ExportError(
            "the program carries a state, so `calibration` is a container of (rows, time, ...), "
            f"one of each step in order, or one of rows in any order; got shapes {found}.",
            expected=[(*entry.shape[:1], "time", *entry.shape[1:]) for entry in entries],
            got=found,
            hint="Give all steps the same number of rows.",
        )
    if not split:
        return Rows(held=runs)
    halves = [_halved(run, _least(schema)) for run in runs]
    return Rows([one for one, _ in halves], [other for _, other in halves])


def _steps(batch: Batch) -> Run:
    count = min(array.shape[1] for array in batch.values())
    return [{w: array[:, step] for w, array in batch.items()} for step in range(count)]


def _halved(run: Run, least: int) -> tuple[Run, Run]:
    """Divide trajectories among two runs, or the time of them if there are too few."""
    rows = _rows_of(run[0])
    if rows >= 2 * least and least <= 1:
        return (
            [{w: array[::2] for w, array in step.items()} for step in run],
            [{w: array[1::2] for w, array in step.items()} for step in run],
        )
    _check_count(len(run), 2, "steps")
    return run[: len(run) // 2], run[len(run) // 2 :]


def _walk(session: Session, run: Run) -> Iterator[tuple[Batch, Batch]]:
    """Run a program on each step, carrying its state; give all inputs and outputs by wire name."""
    import numpy as np

    schema = session.schema
    carried = Carried(schema, session.runner)
    for step in run:
        inputs: dict[str, object] = dict(step)
        sizes: dict[str, tuple[int, Entry]] = {}
        for entry in schema.inputs:
            if entry.wire not in schema.state:
                check_shape(entry, step[entry.wire].shape, schema, sizes)
        inputs |= carried.inputs(sizes)
        results = session.runner([inputs[entry.wire] for entry in schema.inputs])
        carried.keep(results)
        outputs = {e.wire: np.asarray(r) for e, r in zip(schema.outputs, results, strict=True)}
        yield {wire: np.asarray(array) for wire, array in inputs.items()}, outputs


# Stored tests: held-out rows, and what the file before gives for them.


def _vectors(before: Session, held: Sequence[Run]) -> tuple[Vector, ...]:
    """Choose held-out inputs to store, and compute what the file before gives for them."""
    schema = before.schema
    whole = [inputs for run in held for inputs, _ in _walk(before, run)]
    rows = _joined(schema, whole)
    chosen: list[Batch] = []
    if rows is None:
        places = sorted({round(i * (len(whole) - 1) / 4) for i in range(5)})
        chosen = [whole[place] for place in places]
    else:
        order = _permutation(_rows_of(rows))
        most = max(1, MOST_STORED // max(array[0].size for array in rows.values()))
        leading = _leading(schema)
        assert leading is not None  # rows are joined by it
        start = 0
        for sizes in trial_sizes(schema, (*BATCH_SIZES, 33)):
            wanted = leading if isinstance(leading, int) else sizes[leading]
            count = min(wanted, len(order), max(most, _least(schema)))
            picked = [order[(start + row) % len(order)] for row in range(count)]
            start += count
            chosen.append({wire: array[picked] for wire, array in rows.items()})
    unique = {tuple(array.shape for array in batch.values()): batch for batch in chosen}
    found = chosen if rows is None else list(unique.values())
    return tuple(_vector(before, inputs) for inputs in found)


def _vector(before: Session, inputs: Batch) -> Vector:
    import numpy as np

    schema = before.schema
    sizes: dict[str, tuple[int, Entry]] = {}
    for entry in schema.inputs:
        check_shape(entry, inputs[entry.wire].shape, schema, sizes)
    results = before.runner([inputs[entry.wire] for entry in schema.inputs])
    outputs = {
        entry.wire: tuple(before.runner.numbers(array, positions(np.asarray(array).size)))
        for entry, array in zip(schema.outputs, results, strict=True)
    }
    kept = {wire: _numbers(array) for wire, array in inputs.items()}
    return Vector({name: size for name, (size, _) in sizes.items()}, 0, outputs, kept)


def _numbers(array: Array) -> tuple[Number, ...]:
    """Return all numbers, floats as the shortest that are read back as the same."""
    flat = array.reshape(-1)
    if flat.dtype.kind == "f":
        return tuple(float(str(number)) for number in flat)
    numbers: list[Number] = flat.tolist()
    return tuple(numbers)
