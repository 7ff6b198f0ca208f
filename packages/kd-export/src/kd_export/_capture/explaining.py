"""Errors of a capture, in the words of keys, axes and the user's own modules."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from kd_export._capture.flat_module import FlatModule
from kd_export._capture.sizes import DynamicShapes
from kd_export._errors import ExportError, Key, NotExportable, Specialized, is_own, line_of, told
from kd_export._schema.schema import Axis, LinearSize
from kd_export._schema.wire import wire_name


def explained(error: Exception, flat: FlatModule, shapes: DynamicShapes) -> ExportError:
    text = str(error)
    frozen = re.search(r"specialized it to be a constant \((\d+)\)", text)
    unequal = "Constraints violated" in text or frozen is not None
    if shapes.axes and unequal:
        return specialized(text, flat, shapes, None if frozen is None else int(frozen[1]))
    name, place = _origin(error, flat)
    place = line_of(text) or place
    if "data-dependent" in text.lower():
        return NotExportable(
            f"{name} decides by the values of a tensor{place}, which a "
            "program of one graph cannot do.",
            got=_reason(error),
            hint="Compute both ways and choose with `torch.where`, or use `torch.cond`.",
        )
    if "Encountered input mutation during" in text:  # as torch 2.10 says it
        return NotExportable(
            f"{name} has a function inside an operator{place} that writes to what it is given.",
            got="an operation in place",
            hint="Compute a new tensor, such as `x + 1` in place of `x.add_(1)`.",
        )
    return NotExportable(
        f"{name} cannot be captured{place}: {_reason(error).rstrip('.')}.",
        got=type(error).__name__,
        hint="The error above this one says more.",
    )


def _reason(error: Exception) -> str:
    """Return the line of an error that says what is wrong: dynamo puts others around it."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith("Got graph break/error:"):
        return lines[1]
    inside = re.search(r"failed to run .*: got \w+\((['\"])(.*?)\1\)", text)
    return inside[2] if inside is not None else next(iter(lines), type(error).__name__)


def specialized(
    text: str, flat: FlatModule, shapes: DynamicShapes, size: int | None
) -> Specialized:
    """Name the key, dimension and axis of a dimension that did not stay dynamic."""
    key, dim = _place_of(text, flat, shapes)
    dims = shapes.names.get(key, {})
    axis = str(dims[dim]) if dim in dims else ""
    where = f"dimension {dim} of `{wire_name(key)}` (axis `{axis}`)"
    fixed = "only some sizes" if size is None else f"the size {size}"
    needed = _relations(text).get(axis)
    return Specialized(
        f"the module allows {fixed} of {where}{_guard(text, flat, shapes)}."
        if needed is None
        else f"{where} must be {_told(axis, needed)}.",
        key=key,
        expected=str(shapes.axes.get(axis, "dynamic")),
        got=size if needed is None else str(needed),
        hint=_remedy(text, shapes),
    )


def _guard(text: str, flat: FlatModule, shapes: DynamicShapes) -> str:
    """Return the relation between axes that torch could not show, if it says one."""
    found = re.search(r"satisfy the generated guard (.+?)\.?$", text, re.MULTILINE)
    if found is None:
        return ""
    said = found[1].replace("torch.sym_", "")  # as torch 2.15 writes them
    for key, dims in shapes.names.items():
        for dim, size in dims.items():
            said = said.replace(f"L['{flat.arguments[key]}'].size()[{dim}]", str(size))
    for name, axis in shapes.axes.items():
        if axis.min < 2:  # torch traces with 2 rows and more, whatever a module does with one
            said = re.sub(rf"\b2 <= {name}( and |$)|( and |^){name} >= 2$", "", said)
    return f": those where `{said}`" if said else ""


def _place_of(text: str, flat: FlatModule, shapes: DynamicShapes) -> tuple[Key, int]:
    """Find the dimension that torch names: by its axis, or else by the argument."""
    places = [(str(s), key, d) for key, dims in shapes.names.items() for d, s in dims.items()]
    named = re.search(r"Constraints violated \(([^)]+)\)", text)
    listed = [] if named is None else named[1].split(", ")
    for wanted in (*_relations(text), *listed):
        for name, key, dim in places:
            if name == wanted:
                return key, dim
    for key in flat.inputs:
        pattern = rf"\b{re.escape(flat.arguments[key])}'?\]?\.(?:size\(\)|shape)\[(\d+)\]"
        if (found := re.search(pattern, text)) is not None:
            return key, int(found[1])
    _, key, dim = places[0]
    return key, dim


def _relations(text: str) -> dict[str, LinearSize]:
    """Return what torch says that axes must be, if they follow from another or are multiples."""
    lines = re.findall(r"^\s*(\w+) = (?!Dim)(.*[-+*/].*?)\s*$", text, re.MULTILINE)
    parsed = ((name, LinearSize.parse(fix)) for name, fix in lines)
    return {name: size for name, size in parsed if size is not None}


def _told(axis: str, needed: LinearSize) -> str:
    return f"a multiple of {needed.factor}" if needed.axis == f"_{axis}" else f"`{needed}`"


def _remedy(text: str, shapes: DynamicShapes) -> str:
    """Return the argument that works, if torch names the sizes that the module serves."""
    axes, names = dict(shapes.axes), {key: dict(dims) for key, dims in shapes.names.items()}
    for name, fix in re.findall(r"^\s*(\w+) = (\w+|Dim\(.*\))\s*$", text, re.MULTILINE):
        if name not in axes:
            continue
        if fix.startswith("Dim("):
            limits = {word: int(size) for word, size in re.findall(r"(min|max)=(\d+)", fix)}
            axes[name] = Axis(limits.get("min", axes[name].min), limits.get("max", axes[name].max))
            continue
        del axes[name]  # it is another axis, or one size
        other = None if fix.isdecimal() else LinearSize(fix)
        names = {k: _renamed(dims, name, other) for k, dims in names.items()}
    for name, size in _excluded(text):
        if name in axes:
            axes[name] = _without(axes[name], size)
    for name, needed in _relations(text).items():
        if name not in axes:
            continue
        axis = axes.pop(name)
        if needed.axis == f"_{name}":
            needed = LinearSize(name, needed.factor)
        axes[needed.axis] = _within(axes.get(needed.axis, Axis(0)), needed, axis)
        names = {k: _renamed(dims, name, needed) for k, dims in names.items()}
    if axes == dict(shapes.axes) and names == shapes.names:
        return (
            "Keep the module from turning it into a number (`int(x.shape[0])`, a fixed `view`), "
            "give the axis a range it can serve, or fix the shape with `dynamic=None`."
        )
    dims = {key: {d: str(size) for d, size in dims.items()} for key, dims in names.items() if dims}
    words = [f"{key[0]!r}" if len(key) == 1 else f"{key!r}" for key in dims]
    pairs = [f"{word}: {dims}" for word, dims in zip(words, dims.values(), strict=True)]
    pairs += [f"{name!r}: {(axis.min, axis.max)}" for name, axis in axes.items()]
    return f"Pass `dynamic={{{', '.join(pairs)}}}`." if dims else "Pass `dynamic=None`."


def _excluded(text: str) -> list[tuple[str, int]]:
    """Return the sizes that torch says an axis must not have; its fixes leave them in."""
    guard = r"values of (\w+) = \S+ in the .* generated guard \S+ != (\d+)\.?$"
    return [(name, int(size)) for name, size in re.findall(guard, text, re.MULTILINE)]


def _without(axis: Axis, size: int) -> Axis:
    """Remove a size from a range: the larger part is kept."""
    if not axis.holds(size):
        return axis
    if axis.max is not None and axis.max - size < size - axis.min:
        return Axis(axis.min, size - 1)
    return Axis(size + 1, axis.max)


def _within(axis: Axis, size: LinearSize, limits: Axis) -> Axis:
    """Restrict the range of an axis to where a size that follows from it is within limits."""
    low = -((size.offset - limits.min) // size.factor)
    high = None if limits.max is None else (limits.max - size.offset) // size.factor
    known = [most for most in (axis.max, high) if most is not None]
    return Axis(max(axis.min, low), min(known, default=None))


def _renamed(
    dims: Mapping[int, LinearSize], name: str, other: LinearSize | None
) -> dict[int, LinearSize]:
    """Write an axis in terms of another one; dimensions of one size have no name any more."""
    found = {}
    for dim, size in dims.items():
        if size.axis != name:
            found[dim] = size
        elif other is not None:
            found[dim] = LinearSize(
                other.axis, size.factor * other.factor, size.factor * other.offset + size.offset
            )
    return found


def _origin(error: BaseException, flat: FlatModule) -> tuple[str, str]:
    """Name the innermost module of the user in which an error was raised, and the line."""
    # What traces a module may put a proxy with the same attributes in its place.
    names = {id(vars(part)): path for path, part in flat.module.named_modules()}
    found, place = flat.module, ""
    for frame, line in _frames(error):
        owner, code = frame.f_locals.get("self"), frame.f_code
        if isinstance(owner, nn.Module) and id(vars(owner)) in names:
            found = owner
        if is_own(code.co_filename) and (source := linecache.getline(code.co_filename, line)):
            place = told(code.co_filename, line, code.co_name, source)
    path = names[id(vars(found))]
    return f"`{type(found).__name__}`" + (f" (`{path}`)" if path else ""), place


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """List the frames of an error and of those that led to it, the first one's last."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for one in chain:
        yield from traceback.walk_tb(one.__traceback__)


def check_dynamic(program: ExportedProgram, flat: FlatModule, shapes: DynamicShapes) -> None:
    """Check that each dimension asked to be dynamic is."""
    for key, value in zip(flat.inputs, input_values(program), strict=True):
        for dim in shapes.names.get(key, {}):
            if not isinstance(value.shape[dim], torch.SymInt):
                raise specialized("", flat, shapes, int(value.shape[dim]))


def input_values(program: ExportedProgram) -> list[Tensor]:
    users = set(program.graph_signature.user_inputs)
    return [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in users
    ]
