"""The exceptions of kd_export, and the words that their messages are made of.

They form a tree of their own, apart from ``kd_core``'s, so that a process that only runs an ONNX
file needs neither torch nor kd_core to catch them::

    ExportError             (Exception)
    |-- KeyMismatch         (KeyError, ValueError)
    |-- ShapeMismatch       (ValueError, RuntimeError)
    |-- DtypeMismatch       (TypeError, ValueError, RuntimeError)
    |-- Specialized         (ValueError, RuntimeError)
    |-- NotExportable       (RuntimeError)
    |-- BackendMissing      (ImportError)
    |-- ProgramFailed       (RuntimeError): not offered by name, catch `ExportError`
    |-- VerifyError         (ValueError)
    |-- UntrustedArtifact   (PermissionError)
    `-- SchemaVersion       (ValueError)

Beside each stand the builtins that catch it too. They are those that catch the same mistake where
``kd_core`` finds it, so `except ValueError` and `except RuntimeError` catch a wrong shape of both.
Each carries ``key``, ``expected``, ``got`` and ``hint``, so that a program can act on what the
message tells a person.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import fx


Key = tuple[str, ...]
Allowed: TypeAlias = "Mapping[object, tuple[int, int | None] | Mapping[int, str]]"

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 76


class ExportError(Exception):
    """Report that an export, a file or a call of an exported program is not as it should be.

    Attributes:
        key: The key of the entry concerned, as a tuple of its parts, or ``None``.
        expected: What was expected, or ``None``.
        got: What was found instead, or ``None``.
        hint: What to do about it, or ``None``.
    """

    def __init__(
        self,
        message: str,
        *,
        key: Key | None = None,
        expected: object = None,
        got: object = None,
        hint: str | None = None,
    ) -> None:
        text = message if hint is None else f"{message} {hint}"
        # What a file says must not reach a terminal as commands.
        super().__init__("\n".join(map(printable, text.split("\n"))))
        self.key = key
        self.expected = expected
        self.got = got
        self.hint = hint

    def __str__(self) -> str:
        # KeyError would print the repr of its message, and OSError its own form.
        return str(self.args[0])


class KeyMismatch(ExportError, KeyError, ValueError):
    """Report keys that are missing, unknown, given twice or not usable."""


class ShapeMismatch(ExportError, ValueError, RuntimeError):
    """Report a tensor whose shape is not the one of the schema."""


class DtypeMismatch(ExportError, TypeError, ValueError, RuntimeError):
    """Report a tensor whose dtype, or a value whose type, is not the one of the schema."""


class Specialized(ExportError, ValueError, RuntimeError):
    """Report a dimension that was to be dynamic and that the module froze to one size.

    Attributes:
        allowed: The argument ``dynamic`` of the sizes that the module serves, as plain data;
            ``{}`` if it serves those of the example only, ``None`` if that is not known.
    """

    allowed: Allowed | None = None


class NotExportable(ExportError, RuntimeError):
    """Report a module that cannot be exported as it is."""


class BackendMissing(ExportError, ImportError):
    """Report a format that no backend serves, or a backend whose packages are not installed."""


class ProgramFailed(ExportError, RuntimeError):
    """Report a program that fails on inputs that fit its schema, such as an index out of range."""


class VerifyError(ExportError, ValueError):
    """Report an artefact whose results are not those of the module it was made from."""


class UntrustedArtifact(ExportError, PermissionError):
    """Report a file that would execute code, and is not trusted."""


class SchemaVersion(ExportError, ValueError):
    """Report a file whose schema is of a version that this release cannot read."""


def printable(text: str) -> str:
    r"""Escape what a terminal would obey and not show, or cannot encode.

    >>> print(printable("obs\x1b[2J"))
    obs\x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def quoted(names: Iterable[object]) -> str:
    """List names in backticks, separated by commas.

    >>> quoted(["a", "b"])
    '`a`, `b`'
    """
    return ", ".join(f"`{name}`" for name in names) or "none"


def brief(value: object) -> str:
    """Represent a value from a file in a few words, whatever its size and depth.

    >>> len(brief("x" * 100_000)), brief([1] * 100_000)
    (76, '[1, 1, 1, 1, 1, 1, ...]')
    """
    return _BRIEF.repr(value)


def kind_of(value: object) -> str:
    """Name the type of a value, with the article that fits.

    >>> kind_of(3), kind_of([]), kind_of(None)
    ('an int', 'a list', 'None')
    """
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def first_line(error: BaseException) -> str:
    r"""Return the first line of what an error says, or its class.

    >>> first_line(ValueError("size 3\nat line 1")), first_line(ValueError())
    ('size 3', 'ValueError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def raised_as(
    kind: type[ExportError],
    message: str,
    hint: str,
    reason_of: Callable[[BaseException], str] = first_line,
) -> Iterator[None]:
    """Raise what another library raises in a block as an error of ours; ours pass.

    >>> with raised_as(NotExportable, "ONNX cannot express it", "Save it as `.pt2`."):
    ...     raise ValueError("no such operator")
    Traceback (most recent call last):
    kd_export.NotExportable: ONNX cannot express it: no such operator. Save it as `.pt2`.
    """
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        reason = reason_of(error).rstrip(".")
        raise kind(f"{message}: {reason}.", got=type(error).__name__, hint=hint) from error


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Find the candidate that a misspelt name most likely stood for.

    >>> nearest("imgae", ["image", "label"])
    'image'
    """
    found = difflib.get_close_matches(name, list(candidates), n=1)
    return found[0] if found else None


def place_of(node: fx.Node) -> str:
    """Name the sub-module that an operator was called in, and nothing if it is not known."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    path = path.removeprefix("module").lstrip(".")
    name = kind if isinstance(kind, str) else kind.__qualname__
    return f" in `{path or name.rsplit('.', 1)[-1]}`"


def line_of(text: str) -> str:
    """Name the innermost line of the user's that a stack trace shows, nothing if it shows none."""
    # A frame of generated code shows no line: the frame behind it follows.
    found = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\n\s+(?!File ")(\S.*)', text)
    own = [place for place in found if is_own(place[0])]
    if not own:
        return ""
    file, line, function, code = own[-1]
    return told(file, int(line), function, code)


def told(file: str, line: int, function: str, code: str) -> str:
    """Write a line of source as part of a sentence."""
    return f" at `{code.strip()}` (`{function}`, {Path(file).name}:{line})"


def is_own(file: str) -> bool:
    """Decide whether source is the user's: no generated code, none of torch's and none of kd's."""
    import torch

    parts = Path(file).parts
    generated = file.startswith("<")
    ours = any(part in ("kd_core", "kd_nn", "kd_probabilistic", "kd_export") for part in parts)
    return not (generated or ours or Path(file).is_relative_to(Path(torch.__file__).parent))


# Where public names say that they are defined: the package that users import them from.


def publish(package: str) -> None:
    """Set `__module__` of what a package exports; call it last in the `__init__`.

    `kd_core.extending` has the same for packages that need torch anyway.
    """
    for name, value in vars(sys.modules[package]).items():
        if not name.startswith("_") and f"{value.__module__}.".startswith(f"{package}._"):
            value.__module__ = package
