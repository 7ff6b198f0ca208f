"""What commands compute that no other part of kd_export needs.

The user's own module, from the ``package.module:attribute`` of a command line; scripts by which
shells complete a command line; a header for C and C++; a file without what only its makers should
know: source paths, stack traces, sample inputs.

Must not know how a command prints.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kd_export._backends.aoti import copy_without_sources
from kd_export._errors import ExportError, NotExportable, brief, kind_of, nearest, quoted
from kd_export._export import CaptureOptions
from kd_export._running.backend import backend_for
from kd_export._schema.files import copy_member, open_regular, open_zip, read_regular, replacing
from kd_export._schema.onnx_file import stripped
from kd_export._schema.schema import Axis, Entry, LinearSize, Schema
from kd_export._schema.trust import disarm
from kd_export._schema.wire import unused_name

if TYPE_CHECKING:
    from torch import nn

    from kd_core import TensorDictBase


SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_kd_export() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    COMPREPLY=()
    if [[ $COMP_CWORD == 1 ]]; then
        words='{commands}'
    elif [[ $word != -* ]]; then
        return
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _kd_export kd-export
"""
_ZSH = """\
#compdef kd-export
autoload -U +X bashcompinit && bashcompinit
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, as far as a shell completes it.

    Attributes:
        help: What it does.
        options: Its options, such as ``--json``.
    """

    help: str
    options: Sequence[str]


def script(shell: str, commands: Mapping[str, Command]) -> str:
    """Write the script of a shell: it completes commands, options and names of files."""
    if shell == "fish":
        return _fish(commands)
    cases = "\n".join(
        f"        {name}) words='{' '.join(command.options)}' ;;"
        for name, command in commands.items()
    )
    found = _BASH.format(cases=cases, commands=" ".join(commands))
    return _ZSH + found if shell == "zsh" else found


def _fish(commands: Mapping[str, Command]) -> str:
    lines = []
    for name, command in commands.items():
        about = command.help.replace("'", "\\'")
        lines.append(f"complete -c kd-export -n __fish_use_subcommand -f -a {name} -d '{about}'")
        seen = f"complete -c kd-export -n '__fish_seen_subcommand_from {name}'"
        for option in command.options:
            dashes, word = ("-l", option[2:]) if option.startswith("--") else ("-s", option[1:])
            lines.append(f"{seen} {dashes} {word}")
    return "\n".join([*lines, ""])


_FORM = "`(module, example)` or `(module, example, options)`"
OPTIONS = tuple(CaptureOptions.__annotations__)
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


_TOP = """\
/* Written by `kd-export header`: what a program takes and gives. Do not edit. */
#ifndef {upper}_H
#define {upper}_H

#include <stdint.h>

/* An axis: the sizes that it may have; a max of -1 stands for none. */
typedef struct {{ const char *name; int64_t min; int64_t max; }} {lower}_axis;

/* A dimension: of a fixed size where axis is -1, else factor * axis + offset; where axis is -2,
 * the size is known when the program has run. */
typedef struct {{ int64_t size; int axis; int64_t factor; int64_t offset; }} {lower}_dim;

/* An input or output. `next` is the output that is the next value of a state, else -1. */
typedef struct {{
  const char *name;
  const char *wire;
  const char *dtype;
  int dims;
  const {lower}_dim *shape;
  int next;
}} {lower}_tensor;
"""


def header(schema: Schema, name: str) -> str:
    """Write a header that C99 and C++ compilers take.

    Args:
        schema: What the program takes and gives.
        name: What all names in the header start with; other characters than letters, digits and
            underscores are replaced.
    """
    lower = _identifier(name).lower()
    upper, axes = lower.upper(), list(schema.axes)
    lines = [_TOP.format(lower=lower, upper=upper)]
    lines += _array(f"{lower}_axis", f"{lower}_axes", [_axis(n, schema.axes[n]) for n in axes])
    wires = [entry.wire for entry in schema.outputs]
    for what, entries in (("input", schema.inputs), ("output", schema.outputs)):
        names = _identifiers([entry.wire for entry in entries])
        if entries:
            lines.append(f"enum {lower}_{what} {{")
            lines += [f"  {upper}_{what.upper()}_{n.upper()} = {i}," for i, n in enumerate(names)]
            lines += [f"  {upper}_{what.upper()}_COUNT = {len(names)}", "};", ""]
        tensors = []
        for entry, label in zip(entries, names, strict=True):
            shape = f"{lower}_{what}_{label}_shape"
            lines += _array(f"{lower}_dim", shape, [_dim(size, axes) for size in entry.shape])
            after = schema.state.get(entry.wire) if what == "input" else None
            tensors.append(_tensor(entry, shape, -1 if after is None else wires.index(after)))
        lines += _array(f"{lower}_tensor", f"{lower}_{what}s", tensors)
    return "\n".join([*lines, "#endif", ""])


def _array(kind: str, name: str, rows: Sequence[str]) -> list[str]:
    """Write an array; one without entries has a zero, because C has no empty arrays."""
    return [f"static const {kind} {name}[] = {{", *(f"  {r}," for r in rows or ["{0}"]), "};", ""]


def _axis(name: str, axis: Axis) -> str:
    return f"{{{_string(name)}, {axis.min}, {-1 if axis.max is None else axis.max}}}"


def _dim(size: int | str, axes: Sequence[str]) -> str:
    if isinstance(size, int):
        return f"{{{size}, -1, 0, 0}}"
    linear = LinearSize.parse(size)
    if linear is None or linear.axis not in axes:
        return "{-1, -2, 0, 0}"
    return f"{{-1, {axes.index(linear.axis)}, {linear.factor}, {linear.offset}}}"


def _tensor(entry: Entry, shape: str, after: int) -> str:
    words = ", ".join(map(_string, (entry.name, entry.wire, entry.dtype)))
    return f"{{{words}, {len(entry.shape)}, {shape}, {after}}}"


def _string(text: str) -> str:
    """Write a literal of the UTF-8 bytes; no byte of it can end the literal or the line."""
    plain = re.compile(rb"[\w .,:;/+*()\[\]-]", re.ASCII)
    content = text.encode("utf-8", "surrogatepass")
    parts = (bytes([b]).decode() if plain.match(bytes([b])) else f"\\{b:03o}" for b in content)
    return f'"{"".join(parts)}"'


def _identifier(text: str) -> str:
    word = re.sub(r"\W", "_", text, flags=re.ASCII) or "_"
    return f"_{word}" if word[0].isdigit() else word


def _identifiers(wires: Sequence[str]) -> list[str]:
    """Return one identifier for each name; they differ also where case does not count."""
    found: list[str] = []
    for wire in wires:
        found.append(unused_name(_identifier(wire).lower(), ["count", *found]))
    return found


_EXTRA = "extra/"


def strip(path: Path) -> None:
    """Write a file anew, in place, without source paths, stack traces and sample inputs.

    Raises:
        UntrustedArtifact: The file holds what is not part of an exported program.
        NotExportable: The format is not one of those that hold such things.
    """
    name = backend_for(path).name
    if name not in _STRIPPED:
        raise NotExportable(
            f"`{path.name}` is {name}, which holds no source paths or sample inputs.",
            expected=tuple(_STRIPPED),
            got=name,
            hint="Strip `.pt2`, `.aoti.pt2` and `.onnx` files.",
        )
    with replacing(path) as temporary:
        _STRIPPED[name](path, temporary)


def _program(path: Path, target: Path) -> None:
    """Write an archive as it is loaded, and the extra files of the one it is from."""
    with open_regular(path) as file:
        archive, _ = disarm(file)
        with archive, target.open("wb") as copy:
            shutil.copyfileobj(archive, copy)
        with open_zip(file) as source, zipfile.ZipFile(target, "a") as written:
            named = [(info, info.filename.partition("/")[2]) for info in source.infolist()]
            for info, name in (one for one in named if one[1].startswith(_EXTRA)):
                copy_member(source, info, written, f"model/{name}")


def _model(path: Path, target: Path) -> None:
    target.write_bytes(stripped(read_regular(path)))


_STRIPPED: dict[str, Callable[[Path, Path], None]] = {
    "torch.export": _program,
    "AOTInductor": copy_without_sources,
    "ONNX": _model,
}
