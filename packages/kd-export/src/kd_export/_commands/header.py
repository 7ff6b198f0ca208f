"""A header for C and C++: names, dtypes and shapes of what a program takes and gives."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kd_export._schema.linear_size import LinearSize
from kd_export._schema.schema import Axis, Entry, Schema
from kd_export._schema.wire import unused_name

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
