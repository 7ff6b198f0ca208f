"""A program with its schema, captured or from a file: call it, or save it verified.

Knows what a program, a session and a comparison are; must not know modules or formats. It imports
torch only when a function is called, so that ``import kd_export`` works where torch is not
installed.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from kd_export._console import stage
from kd_export._errors import ExportError, NotExportable, VerifyError
from kd_export._precision import check_precision, save_reduced
from kd_export._running.loading import check_weights, load, open  # noqa: A004  # the package's own
from kd_export._running.session import (
    KERNELS,
    PORTABLE,
    XNNPACK,
    Backend,
    Session,
    backend_for,
)
from kd_export._schema.files import open_regular, replacing
from kd_export._schema.schema import Schema
from kd_export._verification.comparison import Comparison, Report, Tolerance, compare_trials
from kd_export._verification.trials import (
    BATCH_SIZES,
    Trial,
    pool_of,
    telling_sizes,
    trials,
    trials_at,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from kd_export._capture.flat_module import Example, Word
    from kd_export._running.torch_runner import TorchRunner

Inputs = TypeVar("Inputs")
MANY = 1024
"""How many rows a file of fewer bits is judged on where none are given."""
CONVERTED = "torch.export"
"""The format that holds a whole program, which other formats are made from."""


@dataclass(frozen=True, repr=False)
class KeyedProgram:
    """An exported module with its keys.

    Attributes:
        schema: What it takes and gives.
        exported_program: torch's own form of it.
        diagnostics: What was mended on the way, a sentence each.
        reference: What to compare with: the module as it was exported, run eagerly, or the file
            that the program is from.
        example: The inputs of the example, in the order of the schema; ``None`` if the program is
            from a file that stores no test.
        doubtful: Sizes at which the module may do something else than what was captured, since it
            asks for a relation of several axes. They are tried too.
        thresholds: Numbers in the program that sizes of an axis may be compared with. Sizes around
            them are tried too.
        oracle: What was trained, if `save` compares with it too: called with observations, it
            returns actions.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> program = kd_export.export(module, {"x": torch.zeros(1, 3)})
        >>> program({"x": torch.zeros(5, 3)})["y"].shape
        torch.Size([5, 2])
    """

    schema: Schema
    exported_program: ExportedProgram
    diagnostics: tuple[str, ...]
    reference: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
    example: tuple[Tensor, ...] | None
    doubtful: tuple[Mapping[str, int], ...] = ()
    thresholds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    oracle: Callable[..., object] | None = None

    def __repr__(self) -> str:
        table = repr(self.schema).replace(type(self.schema).__name__, type(self).__name__, 1)
        return "\n".join([table, *(f"note: {sentence}" for sentence in self.diagnostics)])

    def _repr_html_(self) -> str:
        return self.schema._repr_html_()

    def __call__(self, inputs: Inputs) -> Inputs:
        """Run the program: a nested or flat dict or a container in, the same kind out."""
        return self._session().run(inputs)

    def _session(self) -> Session:
        session: Session | None = self.__dict__.get("_opened")
        if session is None:
            from kd_export._running.torch_runner import run_program

            session = Session(self.schema, run_program(self.exported_program, self.schema))
            if self.doubtful:
                tried = trials_at(self.schema, self.reference, self.doubtful, pool=self.example)
                rows = tuple(compare_trials(session, tried.made, Tolerance(), self.reference))
                if rows:  # else the module itself refuses such sizes
                    self._check("the program", Report("the program", rows))
            self.__dict__["_opened"] = session
        return session

    def save(
        self,
        path: str | Path,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        rtol: float | None = None,
        atol: float | None = None,
        vectors: Sequence[Example[Word]] | None = None,
        oracle: Callable[..., object] | None = None,
        rollouts: int = 8,
        steps: int = 50,
        opset: int | None = None,
        kernels: str | None = None,
        precision: str | None = None,
        calibration: object = None,
        budget: Mapping[str, float] | None = None,
        keep_float: str | Iterable[str] | None = "auto",
        exist_ok: bool = True,
    ) -> Report:
        """Write the program in the format of the file name, and verify it first.

        The file is written beside the target, loaded in the format's own runtime, run on the
        example and on inputs of several sizes, and compared with the module. Only then does it take
        the target's place; after a mismatch nothing is there that was not there before.

        Beside ``batch_sizes``, sizes are tried that follow from the program and the ranges: around
        each number that a size or a position is compared with or computed by, well above the
        example, and at the end of a range. The report lists all of them.

        The inputs are drawn between the bounds of the example's numbers, but integers, booleans
        and masks are taken from its rows, and so is the rest where the module refuses other
        numbers. The file holds those integers and masks, for `verify`; pass ``vectors`` where it
        must not, or where the module needs other inputs.

        Args:
            path: The target; its suffix names the format.
            batch_sizes: The sizes of the dynamic axes to try, as far as their range allows.
            rtol: The relative tolerance. Without it and ``atol``, both suit the dtype; where one
                is given, the other is 0. The report says what applied. The file holds both, and
                `verify` applies them.
            atol: The absolute tolerance.
            vectors: Inputs to compare on in place of made ones, each in any form of an example.
                The file holds them, up to 65,536 numbers each.
            oracle: What was trained: a callable that takes raw observations, a tensor or a dict of
                several, and returns the environment's actions. The file is stepped beside it, at
                batches of 1, 3 and 64, with random rows reset on the way; an oracle that remembers
                something has a method ``reset(mask)``, which takes a bool for each row, or ``None``
                for all. Values, dtype and shape must agree.
            rollouts: How many rollouts beside the oracle.
            steps: How many steps each has.
            opset: The version of ONNX's operators in an ``.onnx`` file, for a runtime that knows
                an older one; by default that of torch.
            kernels: What runs a ``.pte`` file: ``"xnnpack"``, by default where ExecuTorch has it,
                or ``"portable"``, for a board whose runtime is built without it.
            precision: Write a file with fewer bits: ``"int8"``, where the layers compute on
                integers, ``"int8-weights"``, where the weights alone are rounded, or ``"fp16"``.
                All in an ``.onnx``, ``.xml``, ``.pte`` or ``.tflite`` file; in a ``.pt2`` file
                the last two. The float file is verified first, and this one then judged
                beside it.
            calibration: Rows that the program meets: a container or dict, or an iterable of such.
                Half of them calibrate, the others judge. A program with a state takes (rows, time)
                or an item for each step, and is calibrated and judged by rollouts; of rows alone,
                rollouts are drawn.
            budget: How far results may be from those of the float file: ``max``, the largest
                difference, and ``rms``, the root mean square, in the units of the outputs, and
                ``agreement``, the least share of equal integers, by default 0.99. The file holds
                it, and `verify` applies it.
            keep_float: ``"auto"``: as few layers stay float as the budget needs. Or the names of
                those that stay, or ``None`` for none.
            exist_ok: Whether a file at the path is replaced; else that is an error.

        Raises:
            kd_core.AlreadyExists: Something is at the path, and ``exist_ok`` is false.
            VerifyError: The file gives other results than the module, or other actions than the
                oracle; the message names the step that is missing, if a known one mends it. Or
                the budget cannot be met, and the message says how near it came.
        """
        path = Path(path)
        backend = backend_for(path)
        from kd_core.extending import refuse_existing

        refuse_existing(path, exist_ok)
        if precision is not None:
            check_precision(precision, backend, calibration)
            floating = partial(
                self.save,
                batch_sizes=batch_sizes,
                rtol=rtol,
                atol=atol,
                vectors=vectors,
                oracle=oracle,
                rollouts=rollouts,
                steps=steps,
                opset=opset,
                kernels=kernels,
            )
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / path.name
                floating(source)
                return save_reduced(
                    source,
                    path,
                    backend,
                    self.exported_program,
                    precision=precision,
                    calibration=calibration,
                    drawn=self._many_rows() if calibration is None else None,
                    budget=budget,
                    keep_float=keep_float,
                )
        if rtol is None and atol is None:
            rtol, atol = (self.schema.tolerance.get(name) for name in ("rtol", "atol"))
        given = {"rtol": rtol, "atol": atol}
        allowed = Tolerance(rtol, atol)
        own = replace(
            self.schema,
            # An infinite one is for this call: JSON has no such number, and a file must be checked.
            tolerance={n: float(x) for n, x in given.items() if x is not None and x < math.inf},
            versions={
                **self.schema.versions,
                **_opset(opset, backend),
                **_kernels(kernels, backend),
            },
        )
        schema = backend.lower(self.exported_program, own)
        with stage("run the module"):
            tried, notes = self._trials(schema, batch_sizes, vectors)
        notes = (*_fixed(own, schema, path), *notes)
        kept = (trial.vector(schema) for trial in tried)
        schema = replace(schema, vectors=tuple(v for v in kept if v is not None))
        with replacing(path) as temporary:
            with stage(f"write `{path.name}`"):
                backend.write(self.exported_program, schema, temporary)
            with open_regular(temporary) as file:
                with stage(f"load `{path.name}`"):
                    session = load(backend, file, temporary)
                with stage(f"run `{path.name}`", len(tried)):
                    rows = compare_trials(session, tried, allowed, self.reference)
                    report = Report(str(path), tuple(rows), notes)
                if not report.ok:
                    self._check_same(path, tried)
                self._check(f"`{path.name}` was not written: it", report)
                check_weights(session, backend, file, path)
                oracle = oracle or self.oracle
                if oracle is not None:
                    with stage(f"step `{path.name}` beside the oracle"):
                        beside = self._beside(session, oracle, rollouts, steps, allowed)
                    report = replace(report, rows=(*report.rows, *beside))
        return report

    def _many_rows(self) -> Mapping[str, Tensor]:
        """Draw many rows like the example, by wire name; the example itself if none are taken."""
        schema = self.schema
        largest = [
            min(MANY, MANY if axis.max is None else axis.max) for axis in schema.axes.values()
        ]
        sizes = dict(zip(schema.axes, largest, strict=True)) if len(largest) == 1 else {}
        made = trials_at(schema, self.reference, [sizes], pool=self.example).made
        return dict(made[0].inputs)

    def _beside(
        self,
        session: Session,
        oracle: Callable[..., object],
        rollouts: int,
        steps: int,
        allowed: Tolerance,
    ) -> list[Comparison]:
        """Compare a session with an oracle; name the step that is missing."""
        from kd_export._verification.rollouts import Rerun, compare_rollouts, missing_step

        rows, trace = compare_rollouts(
            session,
            oracle,
            pool=self._sample(session.schema),
            reference=self.reference,
            rollouts=rollouts,
            steps=steps,
            allowed=allowed,
        )
        report = Report("beside the oracle", tuple(rows))
        if report.ok:
            return rows
        whole = getattr(oracle, "module", None)
        found = None
        if isinstance(self.reference, Rerun):
            found = missing_step(trace, session.schema, self.reference, whole)
        raise VerifyError(
            "the file was not written: it is the module, but the module gives other actions than "
            f"the oracle.\n{report}",
            expected="the actions of the oracle",
            got=report.largest,
            hint=f"\nThe module lacks {found}."
            if found is not None
            else "\nNo single step that kd_export knows mends it. Compare what the framework does "
            "to observations before its network, and to actions after it.",
        )

    def _check_same(self, path: Path, tried: Sequence[Trial]) -> None:
        """Refuse a module that gives other results when it is called with the same inputs again."""
        for trial in tried[:1]:
            again = self.reference(list(trial.inputs.values()))
            for name, value in trial.expected.items():
                if not value.equal(again[name]) and not bool(value.isnan().any()):
                    notes = "".join(f"\nnote: {sentence}" for sentence in self.diagnostics)
                    raise VerifyError(
                        f"`{path.name}` was not written: the module gives other values of "
                        f"`{name}` each time it is called with the same inputs, so no file can be "
                        f"compared with it.{notes}",
                        expected="a module whose results follow from its inputs",
                        got=name,
                        hint="It draws random numbers, counts its calls or keeps something from "
                        "one to the next. Carry what it keeps as `state=`, or take it out.",
                    )

    def _check(self, subject: str, report: Report) -> None:
        if not report.ok:
            notes = "".join(f"\nnote: {sentence}" for sentence in self.diagnostics)
            raise VerifyError(
                f"{subject} gives other results than the module.\n{report}{notes}",
                expected="equal results",
                got=report.largest,
                hint="If that is rounding, pass `rtol=` or `atol=`; if the module does not meet "
                "such inputs, pass some that it meets as `vectors=`.",
            )

    def _sample(self, schema: Schema) -> tuple[Tensor, ...] | None:
        """Return the example, cut to the sizes that a format has fixed."""
        if self.example is None:
            return None
        found = []
        for tensor, entry in zip(self.example, schema.inputs, strict=True):
            cut = tensor
            for dim, size in enumerate(entry.shape):
                if isinstance(size, int) and cut.shape[dim] > size:
                    cut = cut.narrow(dim, 0, size)
            found.append(cut)
        return tuple(found)

    def _trials(
        self, schema: Schema, batch_sizes: Sequence[int], vectors: Sequence[Example[Word]] | None
    ) -> tuple[list[Trial], tuple[str, ...]]:
        """Run the module on all inputs to try; return what there is to say of the sizes, too."""
        from kd_export._capture.example import read_vectors

        given = None if vectors is None else read_vectors(vectors, schema)
        sample = self._sample(schema)
        made = trials(schema, self.reference, batch_sizes, pool=sample, example=sample, given=given)
        chosen = list(made)
        known = [trial.sizes for trial in chosen]
        sizes = [] if given is not None else telling_sizes(schema, self.thresholds, known)
        doubtful = [one for one in self.doubtful if one.keys() <= schema.axes.keys()]
        further = trials_at(schema, self.reference, [*doubtful, *sizes], pool=sample)
        return [*chosen, *further.made], further.notes


def _fixed(asked: Schema, lowered: Schema, path: Path) -> Iterator[str]:
    """Yield a note for each axis that has one size in a file of this format."""
    for name, axis in asked.axes.items():
        if name not in lowered.axes:
            yield (
                f"`{name}` is fixed at {axis.min} in `{path.name}`. For another size begin its "
                f"range there: `'{name}': (8, None)` in `dynamic`."
            )


def _opset(opset: int | None, backend: Backend) -> dict[str, str]:
    """Return what the schema says of the operators' version, if one is asked for."""
    if opset is None:
        return {}
    _check_format("opset", opset, backend, "ONNX", ".onnx")
    number: object = opset
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ExportError(
            f"`opset` must be a positive int, got {opset!r}.", expected="an int", got=opset
        )
    return {"opset": str(opset)}


def _kernels(kernels: str | None, backend: Backend) -> dict[str, str]:
    """Return what the schema says of what runs the program, if that is asked for."""
    if kernels is None:
        return {}
    _check_format("kernels", kernels, backend, "ExecuTorch", ".pte")
    if kernels not in (XNNPACK, PORTABLE):
        raise ExportError(
            f"expected `{XNNPACK}` or `{PORTABLE}` for `kernels`, got {kernels!r}.",
            expected=(XNNPACK, PORTABLE),
            got=kernels,
        )
    return {KERNELS: kernels}


def _check_format(name: str, value: object, backend: Backend, wanted: str, suffix: str) -> None:
    """Refuse an option that another format has."""
    if backend.name != wanted:
        raise ExportError(
            f"`{name}` cannot be combined with {backend.name}, which does not have this choice.",
            expected=f"a file with the suffix `{suffix}`",
            got=value,
            hint="Leave it out.",
        )


def convert(
    source: str | Path,
    target: str | Path,
    *,
    trusted: bool = False,
    sha256: str | None = None,
    exist_ok: bool = True,
) -> Report:
    """Write the program of a ``.pt2`` file in another format, without the module it was made from.

    Keys, axes, state and metadata are kept. The target is verified against the source as
    `KeyedProgram.save` verifies against the module, on inputs like those of the stored tests. A
    source that kd_export did not write stores none: its inputs are drawn, and keep their names.

    Args:
        source: A ``.pt2`` file; other formats cannot be turned back into a program.
        target: The file to write; its suffix names the format.
        trusted: As for `open`, of the source.
        sha256: As for `open`, of the source.
        exist_ok: Whether a file at the target is replaced; else that is an error.

    Raises:
        kd_core.AlreadyExists: Something is at the target, and ``exist_ok`` is false.
        UntrustedArtifact: As for `open`.
        NotExportable: The source is of another format, or the target's cannot express the program.
        VerifyError: The target gives other results than the source.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> report = kd_export.save(module, "policy.pt2", {"x": torch.zeros(1, 3)})
        >>> kd_export.convert("policy.pt2", "policy.onnx", trusted=True).ok
        True
    """
    source, backend = Path(source), backend_for(Path(source))
    backend_for(Path(target))  # an unknown format is refused before anything runs
    from kd_core.extending import refuse_existing

    refuse_existing(target, exist_ok)
    if backend.name != CONVERTED:
        raise NotExportable(
            f"`{source.name}` is {backend.name}, which cannot be turned back into a program.",
            expected="a `.pt2` file",
            got=backend.name,
            hint="Convert the `.pt2` file, or export the module again.",
        )
    session = open(source, trusted=trusted, sha256=sha256)
    runner = cast("TorchRunner", session.runner)
    schema = session.schema
    if schema.derived:
        schema = _owned(schema, runner, Path(target))
    wires = [entry.wire for entry in session.schema.inputs]
    stored = pool_of(schema)

    def reference(tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return session.run(dict(zip(wires, tensors, strict=True)))

    tried = tuple(vector.sizes for vector in schema.vectors)
    if stored is None:
        return KeyedProgram(schema, runner.program, (), reference, None).save(target)
    # A file keeps no example, and AOTInductor compiles for the sizes of one.
    program = runner.program
    program.example_inputs = program.call_spec.in_spec.unflatten(stored)
    return KeyedProgram(schema, program, (), reference, tuple(stored), tried).save(target)


def _owned(schema: Schema, runner: TorchRunner, target: Path) -> Schema:
    """Return the schema of a file that kd_export did not write as that of one it writes."""
    from kd_export._running.torch_runner import digest_of

    if backend_for(target).name == CONVERTED:
        raise NotExportable(
            "the source was not written by kd-export, and its arguments have no keys.",
            expected="another format than `.pt2`",
            got=str(target),
            hint="Export the keyed module with `kd_export.save`.",
        )
    versions = {"kd-export": version("kd-export"), **schema.versions}
    return replace(schema, versions=versions, weights=digest_of(runner.held), derived=False)
