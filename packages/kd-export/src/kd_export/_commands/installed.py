"""What is installed, which formats that serves, and what to install for the others."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kd_export._backends.aoti import COMPILERS
from kd_export._errors import ExportError, first_line
from kd_export._running.backend import backend_for, backends

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
