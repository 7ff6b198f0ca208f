"""A program in C, C++, Python, JavaScript or Rust that loads one file and steps it.

Each is written for the keys, dtypes and shapes of its file, checks that the file has them, carries
the state, and prints the same numbers as the others, for inputs that every language can compute.
The text that does not depend on the file is in the folder ``_templates``. Here, too, is the
header that lists what a program takes and gives.

Knows schemas; must not know modules or how a program was captured.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from kd_export._errors import ExportError, NotExportable, nearest, quoted
from kd_export._schema.files import Json, Number, identifier, unused_name
from kd_export._schema.schema import (
    Axis,
    Entry,
    LinearSize,
    Schema,
    comment_lines,
    concrete,
    elements_of,
)

STEPS, RESET = 50, 25
"""How many steps a client makes, and before which it resets."""
SUFFIXES = {"c": ".c", "cpp": ".cpp", "python": ".py", "js": ".mjs", "rust": ".rs"}
"""The languages, and the suffix of a program in each."""
_LANGUAGES = {
    ".onnx": ("c", "cpp", "python", "js", "rust"),
    ".xml": ("cpp", "python"),
    ".c": ("c", "cpp"),
}
_MOST_DIMS = 8
_KEYWORDS = re.compile(
    r"(?:alignas|alignof|and|asm|auto|bool|break|case|catch|char|class|compl|const|"
    r"continue|default|delete|do|double|else|enum|explicit|export|extern|false|"
    r"float|for|friend|goto|if|inline|int|long|mutable|namespace|new|not|none|"
    r"nullptr|operator|or|private|protected|public|register|return|short|signed|"
    r"sizeof|static|struct|switch|template|this|throw|true|try|typedef|union|"
    r"unsigned|using|virtual|void|volatile|while|xor|concept|requires)"
)
"""Words that C and C++ do not take as a name."""


@dataclass(frozen=True, slots=True)
class _Dtype:
    """A dtype in the languages: its number in ONNX, its bytes, its words."""

    number: int
    size: int
    c: str
    openvino: str


_DTYPES = {
    "float32": _Dtype(1, 4, "float", "f32"),
    "uint8": _Dtype(2, 1, "uint8_t", "u8"),
    "int8": _Dtype(3, 1, "int8_t", "i8"),
    "int16": _Dtype(5, 2, "int16_t", "i16"),
    "int32": _Dtype(6, 4, "int32_t", "i32"),
    "int64": _Dtype(7, 8, "int64_t", "i64"),
    "bool": _Dtype(9, 1, "uint8_t", "boolean"),
    "float64": _Dtype(11, 8, "double", "f64"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """An input or output of a client.

    Attributes:
        entry: The entry of the file.
        label: Its identifier in the program.
        shape: Its sizes in the program.
        place: Its place among the inputs or outputs of the file.
        state: Whether it is a state, or the next value of one.
        start: What the state starts with; empty for zeros.
    """

    entry: Entry
    label: str
    shape: tuple[int, ...]
    place: int
    state: bool
    start: tuple[Number, ...] = ()

    @property
    def count(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> _Dtype:
        """Its dtype in the languages."""
        return _DTYPES[self.entry.dtype]

    @property
    def bounds(self) -> tuple[Number, Number]:
        """The least and the greatest number that a client fills in."""
        low = 0 if self.entry.low is None else self.entry.low
        return low, 1 if self.entry.high is None else self.entry.high


@dataclass(frozen=True, slots=True)
class Interface:
    """What a client takes and gives, all sizes known."""

    schema: Schema
    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]

    @classmethod
    def of(cls, schema: Schema, rows: int = 1) -> Interface:
        """Fix the sizes of a schema.

        Args:
            schema: What the program takes and gives.
            rows: The size of the first axis; others are as in the first stored test.

        Raises:
            ExportError: The axis does not have this size.
            NotExportable: A dtype or a shape is one that clients do not support.
        """
        sizes = _sizes(schema, rows)
        both = (*schema.inputs, *schema.outputs)
        words = _identifiers([entry.wire for entry in both])
        labels = [f"{word}_" if _KEYWORDS.fullmatch(word) else word for word in words]
        after = set(schema.state.values())
        parts = []
        for place, (entry, label) in enumerate(zip(both, labels, strict=True)):
            if entry.dtype not in _DTYPES or len(entry.shape) > _MOST_DIMS:
                raise NotExportable(
                    f"clients do not support `{entry.wire}`, {entry.describe()}.",
                    key=entry.key,
                    expected=tuple(_DTYPES),
                    got=entry.dtype,
                    hint="Convert it in the module, or use `kd_export.open` in Python.",
                )
            shape = concrete(entry.shape, sizes)
            is_input = place < len(schema.inputs)
            parts.append(
                Part(
                    entry,
                    label,
                    shape,
                    place if is_input else place - len(schema.inputs),
                    entry.wire in (schema.state if is_input else after),
                    _start(entry, shape, schema) if is_input else (),
                )
            )
        count = len(schema.inputs)
        return cls(schema, tuple(parts[:count]), tuple(parts[count:]))

    def takes(self) -> list[Part]:
        """Return the inputs that are not a state."""
        return [part for part in self.inputs if not part.state]

    def gives(self) -> list[Part]:
        """Return the outputs that are not a state."""
        return [part for part in self.outputs if not part.state]

    def states(self) -> list[tuple[Part, Part]]:
        """Return each state with its next value."""
        after = {part.entry.wire: part for part in self.outputs}
        return [(p, after[self.schema.state[p.entry.wire]]) for p in self.inputs if p.state]


def _sizes(schema: Schema, rows: int) -> dict[str, int]:
    stored = schema.vectors[0].sizes if schema.vectors else {}
    sizes = {name: stored.get(name, axis.min) for name, axis in schema.axes.items()}
    named = (size for entry in schema.inputs for size in entry.shape if isinstance(size, str))
    first = next((linear.axis for size in named if (linear := LinearSize.parse(size))), None)
    if first is None:
        fixed = next((e.shape[0] for e in schema.inputs if e.shape), rows)
        if rows not in (1, fixed):
            raise ExportError(
                f"expected {fixed} rows, got {rows}: the file has fixed sizes.",
                expected=fixed,
                got=rows,
                hint="Leave `--rows` out, or export with a dynamic batch.",
            )
        return sizes
    if not schema.axes[first].holds(rows):
        raise ExportError(
            f"the axis `{first}` ranges over {schema.axes[first]}, got {rows} rows.",
            expected=str(schema.axes[first]),
            got=rows,
            hint="Pass a number of rows that the file takes: `--rows N`.",
        )
    sizes[first] = rows
    return sizes


def _start(entry: Entry, shape: Sequence[int], schema: Schema) -> tuple[Number, ...]:
    """Return what a state starts with, repeated along its axes."""
    given = schema.initial.get(entry.wire)
    if given is None:
        return ()
    held = [size if isinstance(size, int) else 1 for size in entry.shape]
    steps = [math.prod(held[dim + 1 :]) for dim in range(len(held))]
    return tuple(
        given[sum(i * step for i, step, own in zip(index, steps, held, strict=True) if own > 1)]
        for index in itertools.product(*map(range, shape))
    )


def drawn(part: Part, step: int) -> list[Number]:
    """Return the numbers that clients fill in at a step: the same in every language.

    >>> entry = Entry(("x",), "x", "float32", (2,), 0.0, 1.0)
    >>> [round(number, 3) for number in drawn(Part(entry, "x", (2,), 0, False), 0)]
    [0.234, 0.114]
    """
    low, high = part.bounds
    found: list[Number] = []
    for i in range(part.count):
        share = ((step * 7919 + part.place * 104729 + i * 1299709 + 12345) % 10007) / 10007.0
        if part.entry.dtype == "bool":
            found.append(share < 0.5)
        elif part.entry.dtype.startswith("float"):
            found.append(low + (high - low) * share)
        else:
            found.append(low + math.floor((high - low + 1) * share))
    return found


def _loses_nan(schema: Schema, suffix: str) -> bool:
    """Decide whether a program takes NaN for a number; OpenVINO does so whatever the file."""
    return suffix == ".xml" or (schema.precision is not None and schema.precision.loses_nan)


def client(schema: Schema, file: str, language: str, *, rows: int = 1) -> str:
    """Write a program that loads a file and steps it.

    Args:
        schema: The schema of the file.
        file: The name of the file.
        language: One of `SUFFIXES`.
        rows: How many rows it takes at once.

    Raises:
        ExportError: The language is not one of them, or the file does not take so many rows.
        NotExportable: The file's format has no runtime for the language, or a dtype no word in it.
    """
    suffix = next((one for one in _LANGUAGES if file.endswith(one)), None)
    if language not in SUFFIXES:
        close = nearest(language, SUFFIXES)
        raise ExportError(
            f"`{language}` is not a language of clients; available: {quoted(SUFFIXES)}.",
            expected=tuple(SUFFIXES),
            got=language,
            hint=None if close is None else f"Did you mean `{close}`?",
        )
    if suffix is None or language not in _LANGUAGES[suffix]:
        able = [one for one, known in _LANGUAGES.items() if language in known]
        raise NotExportable(
            f"clients in {language} load {quoted(able)} files, got `{file}`.",
            expected=tuple(able),
            got=file,
            hint="Save the module, or convert its `.pt2` file, to one of these formats.",
        )
    name = identifier(file.removesuffix(suffix))
    plain = re.sub(r"[^\w .,+~=()-]", "?", file)
    known = {
        # It stands in comments and literals of five languages, and must not end them.
        "file": plain,
        "client": f"{name}_client",
        "stem": plain.removesuffix(suffix),
        "lower": name.lower(),
        "upper": name.upper(),
        "steps": str(STEPS),
        "reset": str(RESET),
        "loses_nan": str(_loses_nan(schema, suffix)).lower(),
    }
    interface = Interface.of(schema, rows)
    write = _WRITERS[suffix, language]
    return write(interface, known)


def languages(file: str) -> tuple[str, ...]:
    """Return the languages that have clients for a file of this name.

    >>> languages("policy.xml")
    ('cpp', 'python')
    """
    return next((known for suffix, known in _LANGUAGES.items() if file.endswith(suffix)), ())


def template(name: str) -> str:
    """Return the text of a template."""
    return files("kd_export").joinpath("_templates", name).read_text(encoding="utf-8")


def filled(name: str, values: Mapping[str, str]) -> str:
    """Return a template with its marks, such as ``@file@``, replaced by values."""
    return re.sub(r"@([a-z_]+)@", lambda mark: values[mark[1]], template(name))


def _fields(parts: Sequence[Part], indent: str = "  ") -> str:
    rows = []
    for part in parts:
        rows += _block(part.entry, indent)
        rows.append(f"{indent}{part.dtype.c} {part.label}[{max(part.count, 1)}];")
    return "\n".join(rows or [f"{indent}char none;"])


def _block(entry: Entry, indent: str) -> list[str]:
    """Write what an entry is as a comment of C."""
    first, *others = comment_lines(entry)
    lines = [f"{indent}/* {first}", *(f"{indent} * {line}" for line in others)]
    return [*lines[:-1], f"{lines[-1]} */"]


def _told(parts: Sequence[Part], mark: str) -> str:
    """Write what entries are as comments that end with the line."""
    return "\n".join(f"{mark} {line}" for part in parts for line in comment_lines(part.entry))


def _list(parts: Sequence[object], before: str = "{", after: str = "}") -> str:
    return f"{before}{', '.join(map(str, parts))}{after}"


def _number(number: Number) -> str:
    """Write a number as C, Rust and JavaScript read it."""
    if isinstance(number, bool):
        return str(int(number))
    if isinstance(number, float) and not math.isfinite(number):
        raise NotExportable(f"clients cannot write the number {number} of a state.", got=number)
    return repr(number)


def _filling(parts: Sequence[Part], draw: str, step: str, indent: str, target: str) -> str:
    lines = []
    for part in parts:
        low, high = map(_number, part.bounds)
        share = f"{draw}({step}, {part.place}, i)"
        value = f"({part.dtype.c})({low} + ({high} - {low}) * {share})"
        if part.entry.dtype == "bool":
            value = f"{share} < 0.5"
        elif not part.entry.dtype.startswith("float"):
            value = f"({part.dtype.c})({low} + (int64_t)(({high} - {low} + 1) * {share}))"
        lines.append(
            f"{indent}for (int i = 0; i < {part.count}; ++i) {target.format(part.label)}[i] = "
            f"{value};"
        )
    return "\n".join(lines)


def _printing(parts: Sequence[Part], indent: str, source: str) -> str:
    return "\n".join(
        f"{indent}for (int i = 0; i < {part.count}; ++i)\n"
        f'{indent}  printf("%d {c_string(part.entry.wire)[1:-1].replace("%", "%%")} %d %.9g\\n", '
        f"step, i, (double){source.format(part.label)}[i]);"
        for part in parts
    )


def _rows_c(parts: Sequence[Part], lower: str, kind: str, targets: Mapping[int, Part]) -> str:
    rows = []
    for part in parts:
        owner = f"{lower}_state" if part.state else f"{lower}_{kind}"
        label = targets.get(part.place, part).label
        rows.append(
            f"  {{{c_string(part.entry.name)}, {part.dtype.number}, {len(part.shape)}, "
            f"{_list(part.shape or (0,))}, {part.count}, {part.count * part.dtype.size}, "
            f"offsetof({owner}, {label}), {int(part.state)}}},"
        )
    return "\n".join(rows)


def _native(interface: Interface, known: Mapping[str, str], name: str) -> str:
    lower, states = known["lower"], interface.states()
    starts = [_list([*map(_number, before.start or (0,))]) for before, _ in states]
    core = filled(
        "onnx_core.c",
        {
            **known,
            "loses_nan": str(int(known["loses_nan"] == "true")),
            "input_fields": _fields(interface.takes()),
            "output_fields": _fields(interface.gives()),
            "state_fields": _fields([before for before, _ in states]),
            "input_count": str(len(interface.inputs)),
            "output_count": str(len(interface.outputs)),
            "takes": _rows_c(interface.inputs, lower, "inputs", {}),
            "gives": _rows_c(
                interface.outputs, lower, "outputs", {after.place: one for one, after in states}
            ),
            "start": "\n".join(f"  {row}," for row in starts or ["0"]),
            "fill": _filling(interface.takes(), f"{lower}_drawn", "step", "  ", "in->{}"),
            "print": _printing(interface.gives(), "  ", "out->{}"),
        },
    )
    return filled(name, {**known, "core": core})


def _c(interface: Interface, known: Mapping[str, str]) -> str:
    return _native(interface, known, "onnx.c")


def _cpp(interface: Interface, known: Mapping[str, str]) -> str:
    return _native(interface, known, "onnx.cpp")


def _source(interface: Interface, known: Mapping[str, str], compiler: str, suffix: str) -> str:
    """Write a client of a ``.c`` file, whose header has its functions."""
    stem = identifier(known["stem"])
    takes, gives = interface.takes(), interface.gives()
    declared = []
    for part in (*takes, *gives):
        declared += _block(part.entry, "  ")
        declared.append(f"  static {part.dtype.c} {part.entry.name}[{part.count}];")
    arguments = [part.entry.name for part in (*takes, *gives)]
    name = "run"
    if interface.states():
        declared += [f"  static {stem}_state state;", f"  {stem}_reset(&state);"]
        arguments, name = ["&state", *arguments], "step"
    reset = f"    if (step == {RESET}) {stem}_reset(&state); /* where an episode begins */"
    named = [replace(part, label=part.entry.name) for part in (*takes, *gives)]
    return filled(
        "source.c",
        {
            **known,
            "compiler": compiler,
            "suffix": suffix,
            "declare": "\n".join(declared),
            "reset_call": reset if interface.states() else "    /* it has no state */",
            "fill": _filling(named[: len(takes)], "drawn", "step", "    ", "{}"),
            "call": f"{stem}_{name}({', '.join(arguments)}); /* put your observation in before */",
            "print": _printing(named[len(takes) :], "    ", "{}"),
        },
    )


def _source_c(interface: Interface, known: Mapping[str, str]) -> str:
    return _source(interface, known, "gcc -std=c99", "c")


def _source_cpp(interface: Interface, known: Mapping[str, str]) -> str:
    return _source(interface, known, "g++ -std=c++17", "cpp")


def _openvino(interface: Interface, known: Mapping[str, str]) -> str:
    states = interface.states()

    def form(part: Part) -> str:
        return f"ov::element::{part.dtype.openvino}, {{{', '.join(map(str, part.shape))}}}"

    def set_from(part: Part, source: str) -> str:
        return (
            f"    set({c_string(part.entry.name)}, {form(part)}, {source}.{part.label}, "
            f"sizeof {source}.{part.label});"
        )

    checks = [
        f"    check(model.{word}({c_string(part.entry.name)}), {form(part)});"
        for word, parts in (("input", interface.inputs), ("output", interface.outputs))
        for part in parts
    ]
    resets = ["    state_ = {};"] if states else ["    // it has no state"]
    for before, _ in states:
        if before.start:
            start = _list([*map(_number, before.start)])
            resets.append(
                f"    const {before.dtype.c} {before.label}[] = {start};\n"
                f"    std::memcpy(state_.{before.label}, {before.label}, "
                f"sizeof {before.label});"
            )
    gets = [
        f"    get({c_string(part.entry.name)}, {target}, sizeof {target});"
        for part, target in [
            *((part, f"out.{part.label}") for part in interface.gives()),
            *((after, f"state_.{before.label}") for before, after in states),
        ]
    ]
    return filled(
        "openvino.cpp",
        {
            **known,
            "input_fields": _fields(interface.takes()),
            "output_fields": _fields(interface.gives()),
            "state_fields": _fields([before for before, _ in states], "    "),
            "checks": "\n".join(checks),
            "resets": "\n".join(resets),
            "sets": "\n".join(
                [
                    *(set_from(part, "in") for part in interface.takes()),
                    *(set_from(before, "state_") for before, _ in states),
                ]
            ),
            "gets": "\n".join(gets),
            "fill": _filling(interface.takes(), "drawn", "step", "    ", "in->{}"),
            "print": _printing(interface.gives(), "    ", "out->{}"),
        },
    )


def tables(interface: Interface) -> dict[str, dict[str, Json]]:
    """Return what a client in a language without types reads, by names inside the file."""

    def forms(parts: Sequence[Part]) -> dict[str, Json]:
        return {part.entry.name: [part.entry.dtype, [*part.shape]] for part in parts}

    states = interface.states()
    return {
        "inputs": forms(interface.inputs),
        "outputs": forms(interface.outputs),
        "state": {before.entry.name: after.entry.name for before, after in states},
        "start": {before.entry.name: [*before.start] for before, _ in states if before.start},
        "ranges": {part.entry.name: [*map(_plain, part.bounds)] for part in interface.inputs},
        "names": {part.entry.name: part.entry.wire for part in interface.gives()},
    }


def _plain(number: Number) -> Json:
    return int(number) if isinstance(number, bool) else number


def _python(interface: Interface, known: Mapping[str, str]) -> str:
    table = {name: repr(value) for name, value in tables(interface).items()}
    for name, parts in (("inputs", interface.inputs), ("outputs", interface.outputs)):
        table[name] = repr({p.entry.name: (p.entry.dtype, p.shape) for p in parts})
        table[f"{name}_told"] = _told(parts, "#")
    name = "openvino.py.txt" if known["file"].endswith(".xml") else "onnx.py.txt"
    return filled(name, {**known, **table, "loses_nan": known["loses_nan"].title()})


def _javascript(interface: Interface, known: Mapping[str, str]) -> str:
    found = tables(interface)
    if any("__proto__" in names for names in found.values()):
        raise NotExportable(
            "clients in JavaScript cannot have an entry `__proto__`: its objects take that word.",
            got="__proto__",
            hint="Give the key another name.",
        )
    pairs = {name: json.dumps([*map(list, values.items())]) for name, values in found.items()}
    pairs["inputs_told"] = _told(interface.inputs, "//")
    pairs["outputs_told"] = _told(interface.outputs, "//")
    # The text may stand in a page, where a tag would end it.
    table = {name: text.replace("<", r"\u003c") for name, text in pairs.items()}
    return filled("onnx.js", {**known, **table})


def _rust(interface: Interface, known: Mapping[str, str]) -> str:
    def rows(parts: Sequence[Part]) -> str:
        return "\n".join(
            f"{_told([part], '    //')}\n"
            f"    Tensor {{ name: {_rust_string(part.entry.name)}, dtype: {part.dtype.number}, "
            f"shape: &{[*part.shape]}, bytes: {part.count * part.dtype.size}, "
            f"next: {str(part.state).lower()}, "
            f"start: &[{', '.join(repr(float(x)) for x in part.start)}] }},"
            for part in parts
        )

    ranges = [tuple(map(float, part.bounds)) for part in interface.inputs]
    return filled(
        "onnx.rs",
        {
            **known,
            "takes": rows(interface.inputs),
            "gives": rows(interface.outputs),
            "next": ", ".join(str(after.place) for _, after in interface.states()),
            "ranges": ", ".join(map(str, ranges)),
            "names": ", ".join(_rust_string(part.entry.wire) for part in interface.gives()),
        },
    )


def _rust_string(text: str) -> str:
    """Write a literal in letters of ASCII: the compiler refuses some that cannot be seen."""
    plain = re.compile(r"[ !#-\[\]-~]")
    letters = (c if plain.match(c) else rf"\u{{{ord(c):x}}}" for c in text)
    return f'"{"".join(letters)}"'


_WRITERS: Mapping[tuple[str, str], Callable[[Interface, Mapping[str, str]], str]] = {
    (".onnx", "c"): _c,
    (".onnx", "cpp"): _cpp,
    (".onnx", "python"): _python,
    (".onnx", "js"): _javascript,
    (".onnx", "rust"): _rust,
    (".xml", "cpp"): _openvino,
    (".xml", "python"): _python,
    (".c", "c"): _source_c,
    (".c", "cpp"): _source_cpp,
}


_TOP = """\
/* Written by `kd-export header`: what a program takes and gives. Do not edit. */
#ifndef {upper}_H
#define {upper}_H

#include <math.h>
#include <stdint.h>

/* An axis: the sizes that it may have; a max of -1 stands for none. */
typedef struct {{ const char *name; int64_t min; int64_t max; }} {lower}_axis;

/* A dimension: of a fixed size where axis is -1, else factor * axis + offset; where axis is -2,
 * the size is known when the program has run. */
typedef struct {{ int64_t size; int axis; int64_t factor; int64_t offset; }} {lower}_dim;

/* An element of an input or output, one of its last dimension: words are empty, and limits
 * infinite, where the file says nothing. */
typedef struct {{
  const char *name;
  const char *unit;
  const char *kind;
  double low;
  double high;
}} {lower}_element;

/* An input or output. `next` is the output that is the next value of a state, else -1; `elements`
 * is null where the file says nothing of them, and `rate` in hertz then 0. */
typedef struct {{
  const char *name;
  const char *wire;
  const char *dtype;
  int dims;
  const {lower}_dim *shape;
  int next;
  const {lower}_element *elements;
  double rate;
}} {lower}_tensor;
"""


def header(schema: Schema, name: str) -> str:
    """Write a header that C99 and C++ compilers take.

    Args:
        schema: What the program takes and gives.
        name: What all names in the header start with; other characters than letters, digits and
            underscores are replaced.
    """
    lower = identifier(name).lower()
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
            elements = "0"
            if entry.signal is not None:
                elements = f"{lower}_{what}_{label}_elements"
                lines += _array(f"{lower}_element", elements, _elements(entry))
            place = -1 if after is None else wires.index(after)
            tensors.append(_tensor(entry, shape, place, elements))
        lines += _array(f"{lower}_tensor", f"{lower}_{what}s", tensors)
    return "\n".join([*lines, "#endif", ""])


def _array(kind: str, name: str, rows: Sequence[str]) -> list[str]:
    """Write an array; one without entries has a zero, because C has no empty arrays."""
    return [f"static const {kind} {name}[] = {{", *(f"  {r}," for r in rows or ["{0}"]), "};", ""]


def _axis(name: str, axis: Axis) -> str:
    return f"{{{c_string(name)}, {axis.min}, {-1 if axis.max is None else axis.max}}}"


def _dim(size: int | str, axes: Sequence[str]) -> str:
    if isinstance(size, int):
        return f"{{{size}, -1, 0, 0}}"
    linear = LinearSize.parse(size)
    if linear is None or linear.axis not in axes:
        return "{-1, -2, 0, 0}"
    return f"{{-1, {axes.index(linear.axis)}, {linear.factor}, {linear.offset}}}"


def _elements(entry: Entry) -> list[str]:
    signal = entry.signal
    assert signal is not None
    rows = []
    for place in range(elements_of(entry) or 1):
        words = (signal.name_of(place), signal.unit_of(place), signal.kind_of(place))
        low, high = signal.limits_of(place)
        least = "-INFINITY" if low is None else repr(float(low))
        most = "INFINITY" if high is None else repr(float(high))
        rows.append(f"{{{', '.join(map(c_string, words))}, {least}, {most}}}")
    return rows


def _tensor(entry: Entry, shape: str, after: int, elements: str) -> str:
    words = ", ".join(map(c_string, (entry.name, entry.wire, entry.dtype)))
    rate = 0.0 if entry.signal is None else entry.signal.rate or 0.0
    return f"{{{words}, {len(entry.shape)}, {shape}, {after}, {elements}, {rate!r}}}"


def c_string(text: str) -> str:
    """Write a literal of the UTF-8 bytes; no byte of it can end the literal or the line."""
    plain = re.compile(rb"[\w .,:;/+*()\[\]-]", re.ASCII)
    content = text.encode("utf-8", "surrogatepass")
    parts = (bytes([b]).decode() if plain.match(bytes([b])) else f"\\{b:03o}" for b in content)
    return f'"{"".join(parts)}"'


def _identifiers(wires: Sequence[str]) -> list[str]:
    """Return one identifier for each name; they differ also where case does not count."""
    found: list[str] = []
    for wire in wires:
        found.append(unused_name(identifier(wire).lower(), ["count", *found]))
    return found
