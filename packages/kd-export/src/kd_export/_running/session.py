"""The one runner for every format.

A session takes a nested dict, a flat dict (by wire name or key) or a container, checks it against
the schema, hands contiguous arrays to the format's runtime in the file's order, and gives back
the same kind of thing. What has just the keys of the schema takes a quick way (`Arranged`); what
does not is left to the checks, which tell why.

The state of a recurrent program (`Carried`) starts at zero or with what the schema holds, has the
sizes of the inputs of the first step, and belongs to the session alone: what comes in and goes out
is copied. No gradient flows from one step to the one before.

A session imports neither torch nor kd_core: what an ONNX file needs is numpy and onnxruntime.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import shutil
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from types import ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    BinaryIO,
    Protocol,
    TypeAlias,
    TypeGuard,
    TypeVar,
    overload,
    runtime_checkable,
)

from kd_export._errors import (
    BackendMissing,
    DtypeMismatch,
    ExportError,
    Key,
    KeyMismatch,
    ProgramFailed,
    ShapeMismatch,
    first_line,
    kind_of,
    nearest,
    quoted,
)
from kd_export._schema.files import (
    EXPORT_IT,
    WRITTEN_BY_TORCH,
    Number,
    as_key,
    nest,
    unnest,
    wire_key,
    wire_name,
)
from kd_export._schema.schema import (
    MOST_NUMBERS,
    Drawn,
    Entry,
    Schema,
    check_shape,
    concrete,
    find_entry,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from kd_core import TensorDictBase


# What a format must offer, which format a file name asks for, and what is installed for it.
#
# A backend is one object: it writes a program, reads a schema back, and loads a file into a
# `Runner`. Sessions, verification, trust and error messages are written once, on top of these.
# Backends are found by the file name's suffix, the longest first, among those registered here, by
# `register_backend`, and by the entry point group ``kd_export.backends``. They are imported when
# first needed, so that reading one format never imports the packages of another.

STORE = "manifest.json"
"""What a folder holds that is a store of `kd_core`."""
Direct = Callable[[dict[str, object]], dict[str, object] | None]


class Shaped(Protocol):
    """What each array of a runtime has."""

    @property
    def shape(self) -> Sequence[int]:
        """The sizes of its dimensions."""


class Runner(Protocol):
    """A loaded program: the arrays of its own runtime in, the same out, in the file's order.

    Attributes:
        direct: A quick way from a flat dict by wire name to another. It returns ``None`` whenever
            the input is not exactly what it was made for; the checked way is taken then.

    Example:
        >>> class Doubler:  # arrays are lists here
        ...     direct = None
        ...
        ...     def __call__(self, arrays, names=None):
        ...         return [[2 * number for number in array] for array in arrays]
        >>> Doubler()([[1, 2]])
        [[2, 4]]
    """

    direct: Direct | None

    def __call__(
        self, arrays: Sequence[object], names: Sequence[str] | None = None
    ) -> Sequence[object]:
        """Run on checked, contiguous arrays; ``names`` limits the outputs."""

    def adapt(self, value: object, entry: Entry) -> Shaped:
        """Convert a value to a contiguous array of the runtime; its dtype must be the entry's."""

    def restore(self, array: object, like: object) -> object:
        """Convert an output to the kind of array that was passed in."""

    def build(self, drawn: Drawn) -> object:
        """Build an array of drawn numbers."""

    def numbers(self, array: object, positions: Sequence[int]) -> list[Number]:
        """Read numbers at positions of the flattened array."""


def picked(
    schema: Schema, results: Sequence[object], names: Sequence[str] | None
) -> Sequence[object]:
    """Return the results asked for by name, of all in the order of the schema."""
    if names is None:
        return results
    by_name = {e.name: result for e, result in zip(schema.outputs, results, strict=True)}
    return [by_name[name] for name in names]


class Backend(Protocol):
    """One format.

    Attributes:
        name: What the format is called.
        suffixes: The file name suffixes it serves.
        executes: Whether opening a file runs code that the file holds.

    Example:
        >>> from kd_export._backends.onnx import backend
        >>> backend.name, backend.suffixes, backend.executes
        ('ONNX', ('.onnx',), False)
    """

    name: str
    suffixes: tuple[str, ...]
    executes: bool

    def read_schema(self, file: BinaryIO) -> Schema:
        """Read the schema of a file without executing anything."""

    def lower(self, program: ExportedProgram, schema: Schema) -> Schema:
        """Return the schema as this format needs it: other names inside the file, say."""

    def write(self, program: ExportedProgram, schema: Schema, path: Path) -> None:
        """Write a program and its schema."""

    def load(self, file: BinaryIO, schema: Schema, path: Path) -> Runner:
        """Build a runner from an open file.

        The file may be a private copy; ``path`` is its place, for a format that keeps a second
        file beside the first.
        """

    def weights(self, file: BinaryIO, runner: Runner) -> str | None:
        """Compute the digest that the schema holds in ``weights`` from what was loaded.

        ``None`` says that the format cannot tell; then verification does not check it.
        """


KERNELS, XNNPACK, PORTABLE = "kernels", "xnnpack", "portable"
"""What runs a ``.pte`` file, and where its schema says so."""
WEIGHTS = "int8-weights"
PRECISIONS = ("fp16", "int8", WEIGHTS)
"""What a file of fewer bits may be made by: all in 16 bits, in 8, or the weights alone in 8."""


class Reducer(Protocol):
    """A float file that can be written with fewer bits.

    Attributes:
        layers: The names of the layers that may stay float, in the order of the program.
    """

    layers: tuple[str, ...]

    def write(self, target: Path, kept: Collection[str]) -> None:
        """Write it without a schema; the layers of these names stay float."""


@runtime_checkable
class Reduces(Protocol):
    """What a backend offers beside the rest if its files can be written with fewer bits."""

    def reducer(
        self, source: Path, precision: str, samples: Sequence[Mapping[str, object]]
    ) -> Reducer:
        """Read a float file.

        Args:
            source: The file.
            precision: One of `PRECISIONS`.
            samples: Inputs to calibrate with, by the names in the file.
        """


class ProgramReducer(Protocol):
    """A program that can be written with fewer bits.

    Attributes:
        layers: The names of the layers that may stay float, in the order of the program.
    """

    layers: tuple[str, ...]

    def program(self, kept: Collection[str]) -> ExportedProgram:
        """Return it; the layers of these names stay float."""


@runtime_checkable
class ReducesPrograms(Protocol):
    """What a backend offers beside the rest if programs of fewer bits can be written.

    Attributes:
        precisions: Those of `PRECISIONS` that there are.
    """

    precisions: tuple[str, ...]


@runtime_checkable
class Seals(Protocol):
    """What a backend offers beside the rest if a schema can be put into a file that exists."""

    def seal(self, source: Path, schema: Schema, target: Path) -> None:
        """Write a file with this schema in place of the one that it has, and with its digest."""


@runtime_checkable
class Configurable(Protocol):
    """What a backend offers beside the rest if its runtime can be set up."""

    def configured(self, threads: int | None, providers: Sequence[str] | None) -> Backend:
        """Return the same format with so many threads a call, and by these devices."""


@runtime_checkable
class Opines(Protocol):
    """What a backend offers beside the rest if other runtimes read its files too.

    Attributes:
        others: Their names.
    """

    others: tuple[str, ...]

    def opinions(self, name: str, file: BinaryIO, schema: Schema) -> Mapping[str, Runner]:
        """Load a file in another runtime; runners by what was set, nothing first."""


_known: dict[str, str | Backend] = {
    ".pt2": "kd_export._backends.pt2:backend",
    ".onnx": "kd_export._backends.onnx:backend",
    ".aoti.pt2": "kd_export._backends.aoti:backend",
    ".xml": "kd_export._backends.openvino:backend",
    ".pte": "kd_export._backends.executorch:backend",
    ".c": "kd_export._backends.c:backend",
    ".tflite": "kd_export._backends.litert:backend",
}


def register_backend(backend: Backend) -> None:
    """Add a format, or replace one, for all suffixes that the backend serves.

    An installed package does the same by an entry point of the group ``kd_export.backends``,
    named for the suffix (``".tvm"``) and pointing at the backend object.

    Example:
        >>> from kd_export._backends.onnx import backend
        >>> register_backend(backend)
        >>> backends()[".onnx"]
        'ONNX'
    """
    for suffix in backend.suffixes:
        _known[suffix] = backend


def backends() -> Mapping[str, str]:
    """Return the known suffixes and what serves each.

    >>> backends()[".onnx"]
    'kd_export._backends.onnx:backend'
    """
    found = {point.name: point.value for point in entry_points(group="kd_export.backends")}
    for suffix, entry in _known.items():
        found[suffix] = entry if isinstance(entry, str) else entry.name
    return found


def backend_for(path: Path) -> Backend:
    """Find the backend of a file name.

    Raises:
        BackendMissing: No backend serves the suffix.
    """
    known = backends()
    fitting = sorted((s for s in known if path.name.endswith(s)), key=len)
    if not fitting:
        if (path / STORE).is_file():
            raise BackendMissing(
                f"`{path.name}` is a store of a container, not an exported program.",
                expected=tuple(sorted(known)),
                got=path.suffix,
                hint=f"Read it with `python -m kd_core inspect {path}`.",
            )
        if path.suffix == ".safetensors":
            raise BackendMissing(
                f"`{path.name}` holds tensors, not an exported program.",
                expected=tuple(sorted(known)),
                got=path.suffix,
                hint=f"Read it with `python -m kd_core inspect {path}`.",
            )
        if path.is_dir():
            raise BackendMissing(
                f"expected the file of a program, got the directory `{path}`.",
                expected=tuple(sorted(known)),
                got="a directory",
                hint="Name a file in it.",
            )
        if path.suffix in {".pt", ".pth", ".ckpt", ".bin"}:
            raise BackendMissing(
                f"`{path.name}` is not an exported program; available suffixes: "
                f"{quoted(sorted(known))}.",
                expected=tuple(sorted(known)),
                got=path.suffix,
                hint=f"{WRITTEN_BY_TORCH} {EXPORT_IT}",
            )
        close = nearest("".join(path.suffixes) or path.name, known)
        raise BackendMissing(
            f"no backend found for `{path.name}`; available suffixes: {quoted(sorted(known))}.",
            expected=tuple(sorted(known)),
            got=path.suffix,
            hint="Name the file by its format, or register a backend with `register_backend`."
            if close is None
            else f"Did you mean `{close}`?",
        )
    entry = _known.get(fitting[-1], known[fitting[-1]])
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.partition(":")
    backend: Backend = getattr(importlib.import_module(module), name)
    return backend


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say how to install it.

    Raises:
        BackendMissing: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module  # a package may itself need another
        raise BackendMissing(
            f"this needs `{missing}`, which is not installed.",
            expected=missing,
            hint=f'Install it with `pip install "kd-export[{extra}]"`.',
        ) from error


COMPILERS = ("g++", "clang++", "c++", "cl")
"""The compilers that AOTInductor may use."""
C_COMPILERS = ("cc", "gcc", "clang")
"""The compilers that a ``.c`` file is checked with."""

_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    ".pt2": (("torch",), ""),
    ".onnx": (("numpy", "onnx", "onnxruntime", "onnxscript"), "onnx"),
    ".aoti.pt2": (("torch", "C++ compiler"), ""),
    ".pte": (("torch", "executorch"), "executorch"),
    ".c": (("numpy", "onnx", "onnxruntime", "onnxscript", "C compiler"), "onnx"),
    ".tflite": (("numpy", "litert_torch", "ai_edge_litert"), "litert"),
    ".xml": (("numpy", "onnx", "onnxruntime", "onnxscript", "openvino"), "openvino"),
}
"""The packages of each format of our own, and the extra that installs them."""

_OTHERS = ("kd-export", "kd-core", "kd-nn", "safetensors", "rich")


@dataclass(frozen=True, slots=True)
class Format:
    """Whether files of a suffix can be written and run.

    Attributes:
        suffix: The suffix.
        name: What the format is called.
        missing: What is not installed.
        remedy: What to do about it.
    """

    suffix: str
    name: str
    missing: tuple[str, ...]
    remedy: str


def formats() -> list[Format]:
    """Check each known format."""
    return [_format(suffix) for suffix in sorted(backends())]


def _format(suffix: str) -> Format:
    try:
        name = backend_for(Path(f"model{suffix}")).name
    except (ImportError, AttributeError, ExportError) as error:
        return Format(suffix, backends()[suffix], (first_line(error),), "Install its package again")
    packages, extra = _NEEDS.get(suffix, ((), ""))
    missing = tuple(package for package in packages if found_version(package) is None)
    remedy = f'pip install "kd-export[{extra}]"' if extra else f"install {', '.join(missing)}"
    return Format(suffix, name, missing, remedy if missing else "")


def packages() -> list[tuple[str, str]]:
    """List the packages that matter, with the version of those that are installed."""
    named = (package for needs, _ in _NEEDS.values() for package in needs)
    known = dict.fromkeys((*_OTHERS, *named))
    return [(package, found_version(package) or "missing") for package in known]


def found_version(package: str) -> str | None:
    """Return the version of a package, or the path of a compiler; ``None`` if there is none."""
    if package in ("C++ compiler", "C compiler"):
        known = COMPILERS if package == "C++ compiler" else C_COMPILERS
        return next((path for path in map(shutil.which, known) if path), None)
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def unusable(found: Sequence[Format], suffixes: Sequence[str]) -> list[str]:
    """List those of the suffixes that no format serves, or one that lacks something."""
    usable = {row.suffix for row in found if not row.missing}
    return [suffix for suffix in suffixes if suffix not in usable]


class Arranged:
    """A program that takes nested dicts and containers as quickly as it takes a flat dict.

    Beside a network of two layers, a call then takes half of what the checks make of it.
    """

    def __init__(self, schema: Schema, direct: Direct) -> None:
        self._direct = direct
        self._inputs = [(entry.key, entry.wire) for entry in schema.inputs]
        self._outputs = [(entry.key, entry.wire) for entry in schema.outputs]
        # Top-level keys alone are a flat dict, whose words are wire names.
        is_nested = any(len(key) > 1 for key, _ in self._inputs)
        self._tree = nest(dict(self._inputs)) if is_nested else None

    def run(self, x: object) -> object | None:
        """Run the program; ``None`` if the inputs are not what the quick way takes."""
        if type(x) is dict:
            flat: dict[str, object] = {}
            if self._tree is None or not _take(self._tree, x, flat):
                return None
            found = self._found(flat)
            return None if found is None else nest(found)
        if not is_container(x):
            return None
        found = self._found({wire: x.get(key) for key, wire in self._inputs})
        return None if found is None else written_like(x, found)

    def _found(self, flat: dict[str, object]) -> dict[Key, object] | None:
        results = self._direct(flat)
        return None if results is None else {key: results[wire] for key, wire in self._outputs}


def _take(tree: Mapping[str, object], x: object, flat: dict[str, object]) -> bool:
    """Read the values of a nested dict that has just the keys of a tree of wire names."""
    if not isinstance(x, dict) or len(x) != len(tree):
        return False
    for part, below in tree.items():
        if part not in x:
            return False
        if isinstance(below, str):
            flat[below] = x[part]
        elif not isinstance(below, Mapping) or not _take(below, x[part], flat):
            return False
    return True


def is_container(x: object) -> TypeGuard[TensorDictBase]:
    """Decide whether a value is a container."""
    # It can only be one of kd_core's if kd_core has been imported.
    core = sys.modules.get("kd_core")
    return core is not None and core.is_tensor_collection(x)


def written_like(container: TensorDictBase, found: Mapping[Key, object]) -> TensorDictBase:
    """Write results into an empty container like another one.

    Raises:
        ShapeMismatch: If a result does not have the batch dimensions of the container.
    """
    result = container.empty()
    batch = tuple(container.batch_size)
    for key, value in found.items():
        try:
            result.set(key, value)
        except ValueError:
            shape = tuple(getattr(value, "shape", ()))
            if shape[: len(batch)] == batch:
                raise
            raise ShapeMismatch(
                f"the shape of output `{wire_name(key)}` must start with the batch size {batch} of "
                f"the container, got {shape}.",
                key=key,
                expected=batch,
                got=shape,
                hint="Pass a dict of the inputs, or a container of `batch_size=[]`.",
            ) from None
    return result


class _Array(Protocol):
    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[object, ...]) -> object: ...
    def __setitem__(self, index: object, value: object) -> None: ...


class Carried:
    """Hold the arrays of a state, by the wire names of the inputs that they are for."""

    def __init__(self, schema: Schema, runner: Runner) -> None:
        self._schema = schema
        self._runner = runner
        self._entries = [entry for entry in schema.inputs if entry.wire in schema.state]
        self._first = {
            entry.wire: _copied(runner.build(_drawn(entry, schema.initial[entry.wire])))
            for entry in self._entries
            if entry.wire in schema.initial
        }
        self.arrays: dict[str, _Array] = {}

    def copies(self) -> dict[str, _Array]:
        """Return copies of the arrays."""
        return {wire: _copied(array) for wire, array in self.arrays.items()}

    def inputs(self, sizes: dict[str, tuple[int, Entry]]) -> dict[str, _Array]:
        """Return the arrays to run on: those to start with before the first step.

        Raises:
            ShapeMismatch: The inputs of this step have other sizes than those before.
        """
        found = {}
        for entry in self._entries:
            held = self.arrays.get(entry.wire)
            if held is None:
                known = {name: size for name, (size, _) in sizes.items()}
                held = self._start(entry, concrete(entry.shape, known))
            else:
                self._check(entry, held, sizes)
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
        start = _copied(self._runner.build(zeros))
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
        for entry in self._entries:
            if entry.wire not in changed:
                continue
            rows_of, dim = changed[entry.wire], self._row_dim(entry)
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
        shared = [axis for axis in axes if all(axis in one.shape for one in self._entries)]
        return entry.shape.index(shared[0]) if shared else 0


def _drawn(entry: Entry, numbers: Sequence[Number]) -> Drawn:
    """Return the numbers that a state starts with; every axis has size 1."""
    shape = tuple(size if isinstance(size, int) else 1 for size in entry.shape)
    return Drawn(numbers, shape, entry.dtype)


def _copied(array: Any) -> _Array:  # of the runtime
    """Copy a tensor or an array; a tensor without what it was computed from."""
    detach = getattr(array, "detach", None)
    copy: _Array = array.copy() if detach is None else detach().clone()
    return copy


def _flags(mask: object) -> list[bool]:
    values = mask.tolist() if hasattr(mask, "tolist") else mask
    listed = list(values) if isinstance(values, Iterable) else [values]
    flags = [value for value in listed if isinstance(value, bool)]
    if not isinstance(values, Iterable) or len(flags) < len(listed):
        raise DtypeMismatch(
            f"expected a mask of one bool for each row, got {kind_of(mask)} of other values.",
            expected="bool (rows,)",
            got=type(mask).__name__,
            hint="Pass a one-dimensional bool array or tensor, such as `done.squeeze(-1)`.",
        )
    return flags


Inputs = TypeVar("Inputs")
Word = TypeVar("Word", str, tuple[str, ...])
Array = TypeVar("Array")


class Session:
    """A program ready to run.

    Attributes:
        schema: What it takes and gives.
        runner: The loaded program in its own runtime, which checks nothing.
        source: What opens the file again, with which arguments; ``None`` if there is no file.

    Example:
        >>> import torch
        >>> import kd_export
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["x"], out_keys=["y"])
        >>> report = kd_export.save(module, "policy.pt2", {"x": torch.zeros(1, 3)})
        >>> session = kd_export.open("policy.pt2", trusted=True)
        >>> session.run({"x": torch.zeros(5, 3)})["y"].shape
        torch.Size([5, 2])
    """

    def __init__(self, schema: Schema, runner: Runner) -> None:
        self.schema = schema
        self.runner = runner
        self._direct = None if _has_dots(schema) else runner.direct
        self._arranged = None if runner.direct is None else Arranged(schema, runner.direct)
        self._carried = Carried(schema, runner)
        self.source: tuple[Callable[..., Session], tuple[object, ...]] | None = None

    @overload
    def __call__(
        self, x: dict[Word, Array], outputs: Iterable[object] | None = None
    ) -> dict[Word, Any]: ...
    @overload
    def __call__(self, x: Inputs, outputs: Iterable[object] | None = None) -> Inputs: ...
    def __call__(self, x: object, outputs: Iterable[object] | None = None) -> object:
        """Run the program once, as `run` does."""
        return self.run(x, outputs)

    def __reduce__(self) -> tuple[Callable[..., Session], tuple[object, ...]]:
        """Pickle the path: the file is opened again, with the same options and a new state.

        Raises:
            ExportError: The session is not of a file.
        """
        if self.source is None:
            raise ExportError(
                "the session is not of a file, so it cannot be pickled.",
                expected="a session that `kd_export.open` gave",
                hint="Save the program, and open the file.",
            )
        return self.source

    def __repr__(self) -> str:
        return repr(self.schema).replace(type(self.schema).__name__, type(self).__name__, 1)

    def _repr_html_(self) -> str:
        return self.schema._repr_html_()

    # An output may be nested where no input is, which a checker cannot know.
    @overload
    def run(
        self, x: dict[Word, Array], outputs: Iterable[object] | None = None
    ) -> dict[Word, Any]: ...
    @overload
    def run(self, x: Inputs, outputs: Iterable[object] | None = None) -> Inputs: ...
    def run(self, x: object, outputs: Iterable[object] | None = None) -> object:
        """Run the program once.

        Args:
            x: The inputs: a nested dict, a flat dict by wire name (``"out.image"``) or by key
                (``("out", "image")``), or a container. A dict holds exactly the inputs, a
                container may hold more. Values are tensors, or for ONNX also numpy arrays.
            outputs: The keys or wire names wanted, by default all.

        Returns:
            The outputs, arranged as the inputs were: a flat dict for a flat dict, and so on. A
            key with a dot in it keeps its name, unless an input was given by a wire name, in which
            the dot is ``%2E``.

        Raises:
            KeyMismatch: An input is missing or unknown.
            DtypeMismatch: An input is not of the dtype of the schema.
            ShapeMismatch: An input's shape does not fit, or axes of one name differ.
            ExportError: The program fails, also as a `RuntimeError`; an index may be out of range.
        """
        direct = self._direct
        if direct is not None and outputs is None:
            result: object | None = None
            try:
                if type(x) is dict:
                    result = direct(x)
                if result is None and self._arranged is not None:
                    result = self._arranged.run(x)
            except Exception:  # the checks tell why, or the program fails once more
                result = None
            if result is not None:
                return result
        try:
            return self._checked(x, outputs)
        except ExportError:
            raise
        except Exception as error:
            raise _failed(error) from error

    def _checked(self, x: object, outputs: Iterable[object] | None) -> object:
        values, arrange = _read(x, self.schema.inputs)
        arrays = self._arrays(self.schema.inputs, values, {})
        wanted = self._wanted(outputs)
        results = self.runner(arrays, None if outputs is None else [e.name for e in wanted])
        return arrange(self._restored(wanted, results, values))

    @overload
    def step(self, x: dict[Word, Array]) -> dict[Word, Any]: ...
    @overload
    def step(self, x: Inputs) -> Inputs: ...
    def step(self, x: object) -> object:
        """Run the program on its own state, and carry the state to the next step.

        The state is what the program was exported with as ``state=``. It starts at zero, or with
        what was given as ``initial=``, and no gradient flows through it. A program without state
        runs as by `run`.

        Args:
            x: The inputs as for `run`, but for the state; what a container holds of it is ignored.

        Returns:
            All outputs, the next state among them, arranged as the inputs were.

        Raises:
            ShapeMismatch: The batch has another size than in the step before, or as for `run`.
            ExportError: As for `run`. The state is then as it was.

        Example:
            >>> import torch
            >>> import kd_export
            >>> from kd_nn import TensorDictModule
            >>> cell = TensorDictModule(
            ...     torch.nn.GRUCell(3, 4), in_keys=["x", "h"], out_keys=["new"]
            ... )
            >>> example = {"x": torch.zeros(2, 3), "h": torch.zeros(2, 4)}
            >>> report = kd_export.save(cell, "policy.pt2", example, state={"h": "new"})
            >>> session = kd_export.open("policy.pt2", trusted=True)
            >>> first = session.step({"x": torch.ones(5, 3)})
            >>> second = session.step({"x": torch.ones(5, 3)})
            >>> torch.equal(first["new"], second["new"])
            False
            >>> session.reset()
            >>> torch.equal(session.step({"x": torch.ones(5, 3)})["new"], first["new"])
            True
        """
        try:
            return self._stepped(x)
        except ExportError:
            raise
        except Exception as error:
            raise _failed(error) from error

    def _stepped(self, x: object) -> object:
        schema, sizes = self.schema, dict[str, tuple[int, Entry]]()
        given = tuple(entry for entry in schema.inputs if entry.wire not in schema.state)
        values, arrange = _read(x, given)
        arrays = {e.wire: a for e, a in zip(given, self._arrays(given, values, sizes), strict=True)}
        arrays |= self._carried.inputs(sizes)
        results = self.runner([arrays[entry.wire] for entry in schema.inputs])
        found = arrange(self._restored(schema.outputs, results, values))
        self._carried.keep(results)
        return found

    def reset(self, mask: object = None) -> None:
        """Set the state back to what it starts with: zero, or ``initial=`` of the export.

        Args:
            mask: One bool for each row of the batch: which rows to set back. By default all, and
                the next step may have a batch of another size.

        Raises:
            ShapeMismatch: The mask has not one value for each row.
            DtypeMismatch: The mask holds other values than bools.
        """
        self._carried.reset(mask)

    @property
    def state(self) -> dict[str, object]:
        """Copies of the state by wire name, in the arrays of the runtime; empty before a step."""
        return {**self._carried.copies()}

    def _restored(
        self, entries: Sequence[Entry], results: Sequence[object], values: Sequence[object]
    ) -> dict[Key, object]:
        """Return results by key, as the kind of array that was passed in."""
        like = values[0] if values else None
        return {
            entry.key: self.runner.restore(result, like)
            for entry, result in zip(entries, results, strict=True)
        }

    def _wanted(self, outputs: Iterable[object] | None) -> Sequence[Entry]:
        if outputs is None:
            return self.schema.outputs
        return [find_entry(self.schema.outputs, key, "output") for key in outputs]

    def _arrays(
        self,
        entries: Sequence[Entry],
        values: Sequence[object],
        sizes: dict[str, tuple[int, Entry]],
    ) -> list[object]:
        """Check the values against the schema and bring them to the runtime's arrays."""
        arrays: list[object] = []
        for entry, value in zip(entries, values, strict=True):
            array = self.runner.adapt(value, entry)
            check_shape(entry, tuple(array.shape), self.schema, sizes)
            arrays.append(array)
        return arrays


def _failed(error: Exception) -> ProgramFailed:
    return ProgramFailed(f"the program fails on these inputs: {error}")


_Arrange: TypeAlias = Callable[[Mapping[Key, object]], object]
"""Arranges results by key as the inputs were."""


def _has_dots(schema: Schema) -> bool:
    """Return whether some key has another wire name than its own, because a dot is in it."""
    entries = (*schema.inputs, *schema.outputs)
    return any(len(entry.key) == 1 and entry.key[0] != entry.wire for entry in entries)


def _by_wire(found: Mapping[Key, object]) -> dict[str, object]:
    return {wire_name(key): value for key, value in found.items()}


def _by_word(found: Mapping[Key, object]) -> dict[str, object]:
    """Arrange results by wire name, but keys of one part by that part, where both are unlike."""
    wires = {wire_name(key) for key in found if len(key) > 1}
    return {
        key[0] if len(key) == 1 and key[0] not in wires else wire_name(key): value
        for key, value in found.items()
    }


def _flat(
    x: Mapping[object, object], inputs: Sequence[Entry]
) -> tuple[dict[Key, object], _Arrange]:
    """Read a flat dict, by wire names or by keys that may have dots in them."""
    known = {entry.key for entry in inputs}
    entries: dict[Key, object] = {}
    escaped = False
    for word, value in x.items():
        key = wire_key(str(word))
        if key not in known and (word,) in known:
            key = (str(word),)
        elif key != (word,) and len(key) == 1:
            escaped = True
        entries[key] = value
    return entries, _by_wire if escaped else _by_word


def _read(x: object, inputs: Sequence[Entry]) -> tuple[list[object], _Arrange]:
    """Read the inputs in order, and how to arrange results as they were."""
    if is_container(x):
        held = {e.key: x.get(e.key) for e in inputs if e.key in x.keys(True)}
        given = (wire_name(as_key(key)) for key in x.keys(True, True))
        return _in_order(held, inputs, given), partial(written_like, x)
    if not isinstance(x, Mapping):
        raise DtypeMismatch(
            f"expected a mapping or a container of inputs, got {kind_of(x)}.",
            expected="a mapping or a container",
            got=type(x).__name__,
            hint=f"Pass a dict with {quoted(entry.wire for entry in inputs)}.",
        )
    arrange: _Arrange
    if any(isinstance(value, Mapping) for value in x.values()):
        entries, arrange = unnest(x), nest
    elif any(isinstance(word, tuple) for word in x):
        entries, arrange = {as_key(word): value for word, value in x.items()}, dict
    else:
        entries, arrange = _flat(x, inputs)
    known = {entry.key for entry in inputs}
    values = _in_order(entries, inputs, map(wire_name, entries))
    for key in entries:
        if key not in known:
            raise KeyMismatch(
                f"`{wire_name(key)}` is not an input of the program; available inputs: "
                f"{quoted(entry.wire for entry in inputs)}.",
                key=key,
                got=wire_name(key),
                hint="Leave it out.",
            )
    return values, arrange


def read_inputs(x: object, inputs: Sequence[Entry]) -> list[object]:
    """Read the values of inputs, in their order, from what `Session.run` takes."""
    return _read(x, inputs)[0]


def _in_order(
    entries: Mapping[Key, object], inputs: Sequence[Entry], given: Iterable[str]
) -> list[object]:
    for entry in inputs:
        if entry.key not in entries:
            names = list(given)
            close = nearest(entry.wire, names)
            raise KeyMismatch(
                f"input `{entry.wire}` not found; got {quoted(names)}.",
                key=entry.key,
                expected=entry.wire,
                got=tuple(names),
                hint=f"Pass a tensor {entry.describe()}."
                if close is None
                else f"Did you mean `{entry.wire}` by `{close}`?",
            )
    return [entries[entry.key] for entry in inputs]
