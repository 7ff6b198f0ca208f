"""What a format must offer, which format a file name asks for, and what is installed for it.

A backend is one object: it writes a program, reads a schema back, and loads a file into a
`Runner`. Sessions, verification, trust and error messages are written once, on top of these.
Backends are found by the file name's suffix, the longest first, among those registered here, by
`register_backend`, and by the entry point group ``kd_export.backends``. They are imported when
first needed, so that reading one format never imports the packages of another.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from kd_export._errors import BackendMissing, ExportError, first_line, nearest, quoted
from kd_export._schema.schema import Entry, Schema
from kd_export._schema.vectors import Drawn
from kd_export._schema.wire import Number

if TYPE_CHECKING:
    from torch.export import ExportedProgram


STORE = "manifest.json"
"""What a folder holds that is a store of `kd_core`."""
Direct = Callable[[dict[str, object]], dict[str, object] | None]


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

    def adapt(self, value: object, entry: Entry) -> object:
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


_known: dict[str, str | Backend] = {
    ".pt2": "kd_export._backends.pt2:backend",
    ".onnx": "kd_export._backends.onnx:backend",
    ".aoti.pt2": "kd_export._backends.aoti:backend",
    ".xml": "kd_export._backends.openvino:backend",
    ".pte": "kd_export._backends.executorch:backend",
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


def require(module: str, extra: str) -> object:
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

_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    ".pt2": (("torch",), ""),
    ".onnx": (("numpy", "onnx", "onnxruntime", "onnxscript"), "onnx"),
    ".aoti.pt2": (("torch", "C++ compiler"), ""),
    ".pte": (("torch", "executorch"), "executorch"),
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
    if package == "C++ compiler":
        return next((path for path in map(shutil.which, COMPILERS) if path), None)
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
