"""`export`, `save` and `diagnose`: the calls that take a module.

Knows their options; must not know how a module is captured, a file written or compared. torch is
imported when a module is captured, so that files are read and run without it.
"""

from __future__ import annotations

import html
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import (
    TYPE_CHECKING,
    Generic,
    NamedTuple,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    runtime_checkable,
)

from kd_export._console import Row, html_table, plain_table, stage, task
from kd_export._errors import (
    BackendMissing,
    ExportError,
    Key,
    VerifyError,
    brief,
    kind_of,
    nearest,
    quoted,
)
from kd_export._program import KeyedProgram
from kd_export._running.loading import open  # noqa: A004  # the package's own
from kd_export._running.session import Backend, Opines, Runner, Session, backend_for
from kd_export._schema.files import Json, contents, open_regular
from kd_export._schema.onnx_file import contradiction
from kd_export._schema.schema import (
    Schema,
    Signal,
    Vector,
    check_limits,
    resolve_signals,
    space_signals,
)
from kd_export._verification.comparison import (
    Comparison,
    Report,
    Tolerance,
    compare_trials,
    compare_vectors,
    inputs_of,
    timed,
)
from kd_export._verification.trials import (
    BATCH_SIZES,
    chosen_vectors,
    pool_of,
    stored_tensors,
    trial_sizes,
    trials,
    trials_at,
)

if TYPE_CHECKING:
    from torch import nn

    from kd_core import NestedKey
    from kd_export._capture.capture import Captured
    from kd_export._capture.flat_module import Example, Word
    from kd_export._capture.sizes import Dynamic

    Oracle = Callable[..., object]


DIAGNOSIS_HEADER = ("format", "verdict", "what there is to say")


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a module works in one format.

    Attributes:
        target: The suffix of the format, or ``"export"`` if no format was reached.
        message: The largest difference from the module, or what stands in the way.
        error: The error, whose ``key`` and ``hint`` a program may read; ``None`` if all is well.

    Example:
        >>> Finding(".onnx", "largest difference 1e-07").ok
        True
    """

    target: str
    message: str
    error: ExportError | None = None

    @property
    def ok(self) -> bool:
        """Whether the module was written in this format and verified."""
        return self.error is None


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """Whether a module works in each format; it prints as a table.

    Attributes:
        rows: The findings, one for each format.
        notes: What was mended on the way, a sentence each.

    Example:
        >>> print(Diagnosis((Finding(".pt2", "largest difference 0"),)))
        format  verdict  what there is to say
        .pt2    ok       largest difference 0
    """

    rows: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every format was written and verified."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def cells(self) -> list[Row]:
        """Return the rows as text; of a message its first line."""
        return [
            (row.target, "ok" if row.ok else "REFUSED", row.message.partition("\n")[0])
            for row in self.rows
        ]

    def to_data(self) -> dict[str, Json]:
        """Return the findings as plain data, fit for JSON."""
        rows: list[Json] = [
            {"target": row.target, "ok": row.ok, "message": row.message} for row in self.rows
        ]
        return {"ok": self.ok, "rows": rows, "notes": list(self.notes)}

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>note: {html.escape(note)}</p>" for note in self.notes)
        return html_table(DIAGNOSIS_HEADER, self.cells()) + notes

    def __repr__(self) -> str:
        table = plain_table(DIAGNOSIS_HEADER, self.cells())
        return "\n".join([table, *(f"note: {note}" for note in self.notes)])


# What names an entry: of an example, a vector, in `dynamic`, `state`, `initial` and `signals`.
W = TypeVar("W")
V = TypeVar("V")
N = TypeVar("N")
S = TypeVar("S")
F = TypeVar("F")
G = TypeVar("G")


@runtime_checkable
class Whole(Protocol):
    """A policy with all that its export needs, such as `kd_export.policies.Policy`."""

    @property
    def module(self) -> nn.Module:
        """The keyed module: raw observations in, environment actions out."""
        ...

    @property
    def example(self) -> Mapping[NestedKey, object]:
        """Observations, and a state."""
        ...

    @property
    def state(self) -> Mapping[NestedKey, NestedKey]:
        """The key of each next state, by that of the state."""
        ...

    @property
    def initial(self) -> Mapping[NestedKey, object]:
        """What the state starts with."""
        ...

    @property
    def metadata(self) -> Mapping[str, object]:
        """What the file says of the policy."""
        ...

    @property
    def oracle(self) -> Oracle:
        """What was trained: observations in, actions out."""
        ...


class CaptureOptions(TypedDict, Generic[N, S, F], total=False):
    """The options of a capture, which `export`, `save` and `diagnose` share; see `export`."""

    inputs: Sequence[object] | None
    outputs: Sequence[object] | None
    dynamic: Dynamic[N]
    state: Mapping[S, object] | None
    initial: Mapping[F, object] | None
    mode: str | None
    sizes: str | None
    strict: bool
    metadata: Mapping[str, object] | None


class ExportOptions(CaptureOptions[N, S, F], Generic[N, S, F, G], total=False):
    """The options of `export`: those of a capture, and what the numbers of entries mean."""

    signals: Mapping[G, Signal] | None


class WriteOptions(TypedDict, Generic[V], total=False):
    """The options of a file that is written and verified; see `KeyedProgram.save`."""

    batch_sizes: Sequence[int]
    rtol: float | None
    atol: float | None
    vectors: Sequence[Example[V]] | None
    oracle: Oracle | None
    rollouts: int
    steps: int
    opset: int | None
    kernels: str | None
    precision: str | None
    calibration: object
    budget: Mapping[str, float] | None
    keep_float: str | Iterable[str] | None
    exist_ok: bool


class SaveOptions(ExportOptions[N, S, F, G], WriteOptions[V], Generic[N, S, F, G, V], total=False):
    """The options of `save`: those of `export`, and those of a file."""


def export(
    module: nn.Module | Whole,
    example: Example[W] | None = None,
    **options: Unpack[ExportOptions[N, S, F, G]],
) -> KeyedProgram:
    """Export a keyed module.

    The module is copied to the CPU and set to eval mode; the original is not touched. Steps that
    no output needs are left out, dropout is removed, and an output that shares memory with an
    input is copied.

    Args:
        module: Any module with ``in_keys`` and ``out_keys`` that takes a container. Or a policy of
            `kd_export.policies`, which brings example, state, initial values, metadata and oracle;
            what is passed beside it takes their place.
        example: A container, a nested dict, or a flat dict by wire name or key. Give it the values
            that the module meets: integers and masks of the tests are taken from its rows. Or the
            `Schema` of a program: its axes are the default of ``dynamic``, and values are drawn.
        inputs: The keys to be inputs, in order; by default the module's ``in_keys``.
        outputs: The keys to be outputs, in order; by default the module's ``out_keys``.
        dynamic: ``"batch"``: the leading dimension of all inputs is one axis of this name, of any
            size from 1. ``{"batch": (1, 1024)}``: the same with a range. ``{key: {dim: name}}``:
            named dimensions by input; ``"2*batch + 1"`` is a size that follows from one.
            ``None``: all shapes are fixed.
        state: What a recurrent module carries from one step to the next: by the key of each input,
            the key of the output that is its next value. `Session.step` carries it.
        initial: What that state starts with, and is reset to, by the key of the input: a number,
            or a tensor that broadcasts to one row of it. By default zero.
        mode: What probabilistic parts give: ``"deterministic"``, ``"mode"``, ``"mean"``,
            ``"median"``, or ``"random"``, which also allows random operators.
        sizes: ``"as allowed"``: of the sizes that ``dynamic`` asks for, those are taken that the
            module serves: ranges, multiples, or one size. By default a module that does not
            serve all of them is refused with the argument that it does serve.
        strict: Passed on to `torch.export.export`.
        metadata: Anything that JSON holds exactly, kept in the file.
        signals: What the numbers of inputs and outputs mean, by key, such as
            ``{"obs": Signal(names=["hip", "knee"], unit="rad")}``: kept in the file, and shown. A
            policy's own limits hold where none are given. `open` compares the names with those of
            a robot.

    Returns:
        The program, to call or to save.

    Raises:
        NotExportable: The module cannot be captured, draws random numbers or keeps state.
        Specialized: A dimension that should be dynamic was frozen.
        KeyMismatch: The example, ``inputs``, ``outputs``, ``state`` or ``initial`` do not fit the
            module.
        ShapeMismatch: A next state, or an initial one, has another shape than the state, or a
            signal another number of elements than the entry.

    Example:
        >>> import torch
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> program = export(module, {"x": torch.zeros(1, 3)})
        >>> program.schema.input("x").describe()
        'float32 (batch, 3)'
        >>> program({"x": torch.zeros(5, 3)})["y"].shape
        torch.Size([5, 2])
    """
    from kd_export._capture.capture import capture

    asked = _asked("export", module, example, options)
    parts = capture(asked.module, asked.example, **asked.capturing)
    return KeyedProgram(*_meaning(parts, asked), oracle=asked.oracle)


def save(
    module: nn.Module | Whole,
    path: str | Path,
    example: Example[W] | None = None,
    **options: Unpack[SaveOptions[N, S, F, G, V]],
) -> Report:
    """Export a keyed module or a policy and write it, verified, in one call.

    Parameters are not copied, so large models need less memory than by `export`.

    Args:
        module: As for `export`.
        path: The target; its suffix names the format.
        example: As for `export`.
        options: ``inputs``, ``outputs``, ``dynamic``, ``state``, ``initial``, ``mode``, ``sizes``,
            ``strict``, ``metadata`` and ``signals`` as for `export`; ``batch_sizes``, ``rtol``,
            ``atol``, ``vectors``, ``oracle``, ``rollouts``, ``steps``, ``opset``, ``kernels``,
            ``precision``, ``calibration``, ``budget``, ``keep_float`` and ``exist_ok``
            as for `KeyedProgram.save`.

    Returns:
        What was compared. Its notes say what was mended on the way, too, as
        `KeyedProgram.diagnostics` does.

    Raises:
        NotExportable: As for `export`, as are further errors.
        VerifyError: As for `KeyedProgram.save`.

    Example:
        >>> import torch
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> save(module, "policy.pt2", {"x": torch.zeros(1, 3)}).ok
        True
    """
    from kd_core.extending import refuse_existing
    from kd_export._capture.capture import capture

    _check_path(path)
    asked = _asked("save", module, example, options)
    refuse_existing(path, options.get("exist_ok", True))  # before minutes of work
    writing: dict[str, object] = {"oracle": asked.oracle}
    writing |= {n: x for n, x in options.items() if n in WriteOptions.__optional_keys__}
    with task(f"save `{Path(path).name}`", stages=5):
        parts = capture(asked.module, asked.example, shared=True, **asked.capturing)
        program = KeyedProgram(*_meaning(parts, asked))
        report = program.save(path, **cast("WriteOptions[V]", writing))
    return replace(report, notes=(*program.diagnostics, *report.notes))


def _check_path(path: object) -> None:
    """Refuse a second argument of `save` that is not a path: `save(path, module)`, say.

    Raises:
        ExportError: The path is not the second one.
    """
    if not isinstance(path, str | os.PathLike):
        raise ExportError(
            f"expected a path as the second argument of `save`, got {kind_of(path)}.",
            expected="a path",
            got=type(path).__name__,
            hint="Write `save(module, 'policy.onnx', example)`.",
        )


class _Asked(NamedTuple, Generic[W, N, S, F, G]):
    """What is exported, whether a module was passed or a policy."""

    module: nn.Module
    example: Example[W]
    oracle: Oracle | None
    capturing: CaptureOptions[N, S, F]
    signals: Mapping[G, Signal] | None
    known: Mapping[Key, Signal]
    notes: tuple[str, ...] = ()


def _meaning(parts: Captured, asked: _Asked[W, N, S, F, G]) -> Captured:
    """Return what was captured with what its numbers mean."""
    schema = resolve_signals(parts.schema, asked.signals, asked.known)
    if asked.oracle is not None:
        check_limits(schema, asked.known)
    return parts._replace(schema=schema, diagnostics=(*parts.diagnostics, *asked.notes))


def _asked(
    call: str,
    module: nn.Module | Whole,
    example: Example[W] | None,
    options: ExportOptions[N, S, F, G],
) -> _Asked[W, N, S, F, G]:
    """Take from a policy what was not passed, the options included.

    Raises:
        TypeError: An option is not one of the call.
    """
    from torch import nn

    known = (SaveOptions if call == "save" else ExportOptions).__optional_keys__
    for name in options:
        if name not in known:
            close = nearest(name, known)
            hint = "" if close is None else f". Did you mean `{close}`?"
            raise TypeError(f"{call}() got an unexpected keyword argument '{name}'{hint}")
    signals = options.get("signals")
    if isinstance(module, nn.Module) or not isinstance(module, Whole):
        # Without an example, the module's keys say what to pass: it is refused by `read_example`.
        given = cast("Example[W]", example)
        limits = space_signals(example.metadata) if isinstance(example, Schema) else {}
        return _Asked(module, given, None, _capturing(options), signals, limits)
    if example is None:
        example = cast("Example[W]", module.example)
    if options.get("state") is None:
        options["state"] = cast("Mapping[S, object]", module.state)
    if options.get("initial") is None:
        options["initial"] = cast("Mapping[F, object]", module.initial)
    metadata = {**module.metadata, **(options.get("metadata") or {})}
    options["metadata"] = metadata
    capturing = _capturing(options)
    limits = space_signals(metadata)
    notes = tuple(getattr(module, "notes", ()))
    return _Asked(module.module, example, module.oracle, capturing, signals, limits, notes)


def _capturing(options: ExportOptions[N, S, F, G]) -> CaptureOptions[N, S, F]:
    """Return those of the options that a capture takes."""
    chosen = {n: x for n, x in options.items() if n in CaptureOptions.__optional_keys__}
    return cast("CaptureOptions[N, S, F]", chosen)


def diagnose(
    module: nn.Module | Whole,
    example: Example[W] | None = None,
    *,
    targets: Sequence[str] = (".pt2", ".onnx"),
    **options: Unpack[ExportOptions[N, S, F, G]],
) -> Diagnosis:
    """Try to export a keyed module in several formats, and report what prevents each.

    Nothing is kept: the files are written to a temporary folder, verified and removed.

    Args:
        module: As for `export`, like the other options.
        example: As for `export`.
        targets: The suffixes of the formats to try; ``".aoti.pt2"`` takes a minute.

    Returns:
        The findings, which print as a table; ``ok`` says whether all formats work.

    Example:
        >>> import torch
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.fft.rfft, in_keys=["x"], out_keys=["y"])
        >>> found = diagnose(module, {"x": torch.zeros(2, 8)})
        >>> [(row.target, row.ok) for row in found.rows]
        [('.pt2', True), ('.onnx', False)]
    """
    from kd_export._capture.capture import capture

    asked = _asked("diagnose", module, example, options)
    try:
        parts = capture(asked.module, asked.example, shared=True, **asked.capturing)
        parts = _meaning(parts, asked)
    except ExportError as error:
        return Diagnosis((Finding("export", str(error), error),))
    program = KeyedProgram(*parts, oracle=asked.oracle)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            _tried(program, Path(folder) / f"model{suffix}", suffix)
            for suffix in _suffixes(targets)
        ]
    return Diagnosis(tuple(rows), program.diagnostics)


def _suffixes(targets: Sequence[str]) -> list[str]:
    """Return targets with their dot, which may be left out; one need not be in a list."""
    listed = [targets] if isinstance(targets, str) else targets
    return [f".{target.removeprefix('.')}" for target in listed]


def _tried(program: KeyedProgram, path: Path, suffix: str) -> Finding:
    try:
        report = program.save(path)
    except ExportError as error:
        return Finding(suffix, str(error), error)
    return Finding(suffix, f"largest difference {report.largest:.3g}")


# `verify` and `benchmark`: open a file as `open` does, compare what it gives, or time it.
#
# Knows where the expected numbers are, in the file or from a module; must not know how to load, to
# run or to compare.


def verify(
    path: str | Path,
    reference: nn.Module | None = None,
    batch_sizes: Sequence[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    *,
    vectors: Sequence[Example[Word]] | None = None,
    also: Sequence[str] = (),
    trusted: bool = False,
    sha256: str | None = None,
) -> Report:
    """Run an artefact in its own runtime and compare its results.

    Args:
        path: The file.
        reference: The keyed module to compare with. Without one, the file is compared with the
            numbers stored in it when it was exported.
        batch_sizes: The sizes of the dynamic axes to try, as far as their range allows; by
            default all at which the file was compared when it was written.
        rtol: The relative tolerance. Without it and ``atol``, that which the file was saved with,
            its budget if it is of fewer bits, or one that suits the dtype; where one is given, the
            other is 0. The report says what applied.
        atol: The absolute tolerance.
        vectors: Inputs to compare on in place of made ones, each in any form of an example; they
            need a reference.
        also: Further runtimes for an ``.onnx`` file: ``"reference"``, the evaluator of the package
            onnx, ``"openvino"`` or ``"tract"``. Each is compared as the file's own, in rows of its
            own. Where one needs a setting to agree, a note names it.
        trusted: As for `open`.
        sha256: As for `open`.

    Returns:
        The report: one row for every output at every size. Look at ``report.ok``, or print it.
        Of a program that draws random numbers only shapes and dtypes are compared.

    Raises:
        VerifyError: A size has no stored test, the weights or the graph in the file are not those
            that it was exported with, a plain property of an ``.onnx`` file contradicts its schema,
            the file fails when it runs, or kd_export did not write it.
        BackendMissing: A runtime of ``also`` is not installed.

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
    session = open(path, trusted=trusted, sha256=sha256)
    if Path(path).name.endswith(".onnx"):
        _check_properties(Path(path))
    with stage(f"run `{Path(path).name}`"):
        if rtol is None and atol is None:
            rtol, atol = (session.schema.tolerance.get(name) for name in ("rtol", "atol"))
        precision = session.schema.precision
        budget = None if precision is None else precision.budget
        allowed = Tolerance(rtol, atol, budget)
        rows = _compared(session, reference, batch_sizes, allowed, vectors)
    notes: list[str] = []
    for name in _runtimes(also, backend_for(Path(path))):
        with stage(f"run `{Path(path).name}` by {name}"):
            others = _second_opinions(Path(path), name, session.schema)

            def compared(runner: Runner) -> tuple[Comparison, ...]:
                other = Session(session.schema, runner)
                return _compared(other, reference, batch_sizes, allowed, vectors)

            rows += _agreed(name, others, compared, notes)
    return Report(str(path), rows, tuple(notes))


def _check_properties(path: Path) -> None:
    """Refuse a model whose plain properties say other things than its schema.

    Raises:
        VerifyError: One does.
    """
    with open_regular(path) as file:
        found = contradiction(contents(file))
    if found is not None:
        name, given, wanted = found
        raise VerifyError(
            f"the property `{name}` of `{path.name}` is {brief(given)}, but the schema in the file "
            f"says {brief(wanted)}.",
            expected=wanted,
            got=given,
            hint="The property was changed after the export: export again.",
        )


def _runtimes(also: Sequence[str], backend: Backend) -> Sequence[str]:
    """Check the argument ``also``.

    Raises:
        ExportError: A name is not that of a runtime, or the format has no other.
    """
    names = [also] if isinstance(also, str) else [*also]
    if names and not isinstance(backend, Opines):
        raise ExportError(
            f"`also` cannot be combined with {backend.name}, which no other runtime reads.",
            expected="an `.onnx` file",
            got=names,
            hint="Leave it out.",
        )
    for name in names:
        known = backend.others if isinstance(backend, Opines) else ()
        if name not in known:
            close = nearest(str(name), known)
            raise ExportError(
                f"expected runtimes for `also`, got {name!r}; available: {quoted(known)}.",
                expected=known,
                got=name,
                hint=None if close is None else f"Did you mean `{close}`?",
            )
    return names


def _second_opinions(path: Path, name: str, schema: Schema) -> Mapping[str, Runner] | ExportError:
    """Load a file in another runtime, or return why it cannot be."""
    backend = backend_for(path)
    assert isinstance(backend, Opines)
    try:
        with open_regular(path) as file:
            return backend.opinions(name, file, schema)
    except BackendMissing:
        raise
    except ExportError as error:
        return error


def _agreed(
    name: str,
    others: Mapping[str, Runner] | ExportError,
    compared: Callable[[Runner], tuple[Comparison, ...]],
    notes: list[str],
) -> tuple[Comparison, ...]:
    """Compare what another runtime gives: as it is, and if that is wrong, with its settings."""
    if isinstance(others, ExportError):
        notes.append(str(others))
        return (Comparison("", {}, math.inf, ok=False, note=f"(by {name}, which cannot load it)"),)
    first: tuple[Comparison, ...] = ()
    for setting, runner in others.items():
        try:
            rows = compared(runner)
        except VerifyError as error:
            notes.append(f"{name}: {error}")
            rows = (Comparison("", {}, math.inf, ok=False),)
        by = f"(by {name}{' with ' + setting if setting else ''})"
        rows = tuple(replace(row, note=f"{row.note} {by}".lstrip()) for row in rows)
        if all(row.ok for row in rows):
            if first:
                most = max(row.difference for row in first)
                notes.append(f"{name} is off by {most:.3g} as it is: set {setting}.")
            return rows
        first = first or rows
    return first


def _compared(
    session: Session,
    reference: nn.Module | None,
    batch_sizes: Sequence[int] | None,
    allowed: Tolerance,
    vectors: Sequence[Example[Word]] | None,
) -> tuple[Comparison, ...]:
    schema = session.schema
    if schema.derived:
        raise VerifyError(
            "the file was not written by kd-export: it says neither what its keys are nor what "
            "must come out.",
            expected="a schema with stored tests",
            hint="Export the keyed module with `kd_export.save`. To run the file by the names that "
            "are in it, use `kd_export.open`.",
        )
    if reference is None:
        if vectors is not None:
            raise VerifyError(
                "`vectors` cannot be used without a `reference`, which computes what is expected.",
                hint="Pass the module as `reference`.",
            )
        return tuple(compare_vectors(session, chosen_vectors(schema, batch_sizes), allowed))
    from kd_export._capture.example import read_vectors
    from kd_export._capture.flat_module import reference_module

    eager = reference_module(reference, schema)
    given = None if vectors is None else read_vectors(vectors, schema)
    if schema.precision is not None:  # it is good for inputs like those that it was judged on
        stored_inputs = [stored_tensors(schema, one) for one in chosen_vectors(schema, batch_sizes)]
        judged = trials(schema, eager, (), pool=None, given=given or stored_inputs)
        theirs = (trial.vector(schema) for trial in judged)
        return tuple(compare_vectors(session, filter(None, theirs), allowed))
    pool = pool_of(schema)
    tried = list(trials(schema, eager, batch_sizes or BATCH_SIZES, pool=pool, given=given))
    if batch_sizes is None and given is None:  # and where the file was compared when it was written
        known = [trial.sizes for trial in tried]
        stored = [vector.sizes for vector in schema.vectors if vector.sizes not in known]
        tried += trials_at(schema, eager, stored, pool=pool).made
    return tuple(compare_trials(session, tried, allowed, eager))


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one call takes at one set of sizes.

    Attributes:
        path: The file.
        sizes: The size of each axis.
        seconds: The median of the calls, in seconds.
        best: The quickest call.

    Example:
        >>> Timing("policy.onnx", {"batch": 1}, 2e-5, 1e-5).seconds
        2e-05
    """

    path: str
    sizes: Mapping[str, int]
    seconds: float
    best: float


def benchmark(
    path: str | Path,
    batch_sizes: Sequence[int] | None = None,
    *,
    seconds: float = 0.5,
    threads: int | None = None,
    trusted: bool = False,
    sha256: str | None = None,
) -> tuple[Timing, ...]:
    """Measure how long a call of an artefact takes, checks of the inputs included.

    The inputs are those of the stored tests; for a size that none has, they are drawn between the
    bounds of the example. Fix the number of threads and close other programs before you compare.
    With ``threads=1`` it measures what the report on a file of fewer bits measures.

    Args:
        path: The file.
        batch_sizes: The sizes of the dynamic axes, as far as their range allows; by default those
            of the stored tests.
        seconds: How long to measure each set of sizes, at least one call in each of five rounds.
        threads: As for `open`.
        trusted: As for `open`.
        sha256: As for `open`.

    Raises:
        UntrustedArtifact: As for `open`.
        VerifyError: No size was given, and the file holds no stored test.
        ExportError: The program fails on inputs that are drawn, or ``seconds`` is not finite.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> report = kd_export.save(module, "policy.pt2", {"x": torch.zeros(1, 3)})
        >>> found = benchmark("policy.pt2", [1, 64], seconds=0.01, trusted=True)
        >>> [row.sizes["batch"] for row in found]
        [1, 64]
    """
    if not 0 <= seconds < math.inf:
        raise ExportError(
            f"expected a time in seconds to measure each size, got `{seconds}`.",
            got=seconds,
            hint="Pass a finite number, such as `0.5`.",
        )
    session = open(path, threads=threads, trusted=trusted, sha256=sha256)
    with stage(f"time `{Path(path).name}`"):
        return tuple(_timings(session, str(path), batch_sizes, seconds))


def _timings(
    session: Session, path: str, batch_sizes: Sequence[int] | None, seconds: float
) -> Iterator[Timing]:
    for vector in _vectors(session.schema, batch_sizes):
        inputs = inputs_of(session, vector)
        (found,) = timed([partial(session.run, inputs)], seconds)
        yield Timing(path, vector.sizes, median(found), min(found))


def _vectors(schema: Schema, batch_sizes: Sequence[int] | None) -> Sequence[Vector]:
    if batch_sizes is not None:
        stored = {tuple(v.sizes.items()): v for v in reversed(schema.vectors)}
        wanted = trial_sizes(schema, batch_sizes)
        return [stored.get(tuple(sizes.items()), Vector(sizes, 0, {})) for sizes in wanted]
    if schema.vectors:
        return schema.vectors
    raise VerifyError(
        "the file holds no stored test whose sizes could be taken.",
        hint="Pass `batch_sizes`.",
    )
