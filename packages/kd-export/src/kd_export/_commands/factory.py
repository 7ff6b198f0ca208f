"""The user's own module, from the ``package.module:attribute`` of a command line."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd_export._errors import ExportError, brief, kind_of, nearest, quoted

if TYPE_CHECKING:
    from torch import nn

    from kd_core import TensorDictBase

_FORM = "`(module, example)` or `(module, example, options)`"
OPTIONS = ("inputs", "outputs", "dynamic", "state", "initial", "mode", "strict", "metadata")
"""The options of `export` that a factory may give."""

Made = tuple["nn.Module", "TensorDictBase | Mapping[object, object]", dict[str, Any]]


def made(place: str) -> Made:
    """Import an attribute and call it: module, example, and the options of `export`.

    The folder of the process is searched first, as ``python -m`` does. This runs the user's code.

    Raises:
        ExportError: The module or attribute is not found, fails, or gives something else.
    """
    path, colon, name = place.partition(":")
    if not (path and colon and name):
        raise ExportError(
            f"expected `package.module:attribute`, got `{place}`.",
            got=place,
            hint="Name a function that returns (module, example), as in `train:policy`.",
        )
    found = _attribute(path, name)
    try:
        parts = found() if callable(found) else found
    except Exception as error:
        raise ExportError(
            f"`{place}` fails: {_told(error)}", got=type(error).__name__, hint=_place(error)
        ) from error
    return _checked(place, parts)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}."


def _place(error: Exception) -> str | None:
    """Name the line of the user's that raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"It is raised at `{last.line}` ({Path(last.filename).name}:{last.lineno})."


def _meant(unknown: Iterable[object]) -> str:
    close = [nearest(str(name), OPTIONS) for name in unknown]
    return "".join(f" Did you mean `{name}`?" for name in close if name is not None)


def _attribute(path: str, name: str) -> object:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: object = importlib.import_module(path)
    except Exception as error:
        raise ExportError(
            f"`{path}` cannot be imported: {_told(error)}",
            got=path,
            hint="Run the command in the folder that holds it, or install its package.",
        ) from error
    for part in name.split("."):
        known, found = dir(found), getattr(found, part, None)
        if found is None:
            close = nearest(part, known)
            raise ExportError(
                f"`{path}` has no `{name}`.",
                got=name,
                hint=None if close is None else f"Did you mean `{close}`?",
            )
    return found


def _checked(place: str, parts: object) -> Made:
    if not isinstance(parts, tuple | list) or len(parts) not in (2, 3):
        raise ExportError(
            f"expected `{place}` to return {_FORM}, got {kind_of(parts)}.",
            expected=_FORM,
            got=brief(parts),
            hint="Let it return both, as in `return policy, {'obs': obs}`.",
        )
    module, example, *rest = parts
    options = dict(rest[0]) if rest and isinstance(rest[0], Mapping) else {}
    unknown = [name for name in options if name not in OPTIONS]
    if unknown or (rest and not isinstance(rest[0], Mapping)):
        raise ExportError(
            f"`{place}` returns options that `export` does not take: {brief(rest[0])}.",
            expected=OPTIONS,
            got=brief(rest[0]),
            hint=f"It takes {quoted(OPTIONS)}.{_meant(unknown)}",
        )
    return module, example, options
