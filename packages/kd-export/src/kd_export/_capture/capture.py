"""From a keyed module and an example to a program, with its schema and its steps.

The module is copied first, so that eval mode, the mode of its probabilistic parts and whatever
tracing does to a module never reach the user's own.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import math
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.metadata import version
from types import FrameType
from typing import NamedTuple

import sympy
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from kd_core import KdError, NestedKey, TensorDictBase, unravel_key_to_tuple
from kd_export._capture.example import bounds, read_example, resolve_initial
from kd_export._capture.fixups import (
    Unwritten,
    hooks_of_torch_removed,
    mend,
    replaced_buffers,
    restore_users,
)
from kd_export._capture.flat_module import (
    Example,
    FlatModule,
    Reference,
    Word,
    checked_mode,
    frozen_modes,
    prepare,
)
from kd_export._capture.sizes import (
    AS_ALLOWED,
    BATCH,
    Dynamic,
    DynamicShapes,
    Name,
    axes_of_schema,
    doubts,
    narrowed_axes,
    resolve,
    settle,
    thresholds,
    widen,
)
from kd_export._console import silenced, stage
from kd_export._errors import (
    Allowed,
    ExportError,
    Key,
    NotExportable,
    Specialized,
    is_own,
    line_of,
    told,
)
from kd_export._running.recurrent import CapturedLayers
from kd_export._running.torch_runner import digest_of, held_by
from kd_export._schema.files import check_metadata, wire_key, wire_name
from kd_export._schema.schema import Axis, Entry, First, LinearSize, Schema, Step, resolve_state
from kd_export._schema.schema import Name as Next
from kd_export._torch_private import CAPTURE_LOGGERS
from kd_nn import TensorDictModuleBase, TensorDictSequential

# Errors of a capture, in the words of keys, axes and the user's own modules.


def explained(
    error: Exception,
    flat: FlatModule,
    shapes: DynamicShapes,
    narrower: Mapping[str, Axis] | None = None,
) -> ExportError:
    text = str(error)
    frozen = re.search(r"specialized it to be a constant \((\d+)\)", text)
    unequal = frozen is not None or UNEQUAL in text or SOLVED.search(text) is not None
    if shapes.axes and unequal:
        size = None if frozen is None else int(frozen[1])
        return specialized(text, flat, shapes, size, narrower)
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
    if any(sign in f"{text} {place}" for sign in DERIVATIVE):
        return NotExportable(
            f"{name} computes a derivative{place}, which `torch.export` does not capture.",
            got=_reason(error),
            hint="Write the derivative as tensor operations, or let the network predict it.",
        )
    return NotExportable(
        f"{name} cannot be captured{place}: {_reason(error).rstrip('.')}.",
        got=type(error).__name__,
        hint="The error above this one says more.",
    )


UNEQUAL = "Constraints violated"
"""What torch says where sizes do not fit."""
SOLVED = re.compile(r"^(?:Expected op to be '==', got \S+ for )?(\S+) <= (\S+)$")
"""What its solver says where it fails on a `min` or `max`; torch 2.10 the last part alone."""
DERIVATIVE = ("autograd.grad", ".backward()", "functorch tensor", "does not require grad and")
"""What torch says, or the line that it names, where a module differentiates."""


def _reason(error: Exception) -> str:
    """Return the line of an error that says what is wrong: dynamo puts others around it."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith("Got graph break/error:"):
        return lines[1]
    inside = re.search(r"failed to run .*: got \w+\((['\"])(.*?)\1\)", text)
    return inside[2] if inside is not None else next(iter(lines), type(error).__name__)


def specialized(
    text: str,
    flat: FlatModule,
    shapes: DynamicShapes,
    size: int | None,
    narrower: Mapping[str, Axis] | None = None,
) -> Specialized:
    """Name the key, dimension and axis of a dimension that did not stay dynamic.

    Args:
        text: What torch says.
        flat: What was captured.
        shapes: The sizes that were asked for.
        size: The size that the dimension was frozen to, if it was.
        narrower: Ranges that the module is shown to serve, where torch names none.
    """
    key, dim = _place_of(text, flat, shapes)
    dims = shapes.names.get(key, {})
    axis = str(dims[dim]) if dim in dims else ""
    where = f"dimension {dim} of `{wire_name(key)}` (axis `{axis}`)"
    fixed = "only some sizes" if size is None else f"the size {size}"
    needed = _relations(text).get(axis)
    allowed = _allowed(text, flat, shapes)
    if allowed is None and narrower is not None:
        allowed = _argument(narrower, shapes.names)
    error = Specialized(
        f"the module allows {fixed} of {where}{_guard(text, flat, shapes)}."
        if needed is None
        else f"{where} must be {_told(axis, needed)}.",
        key=key,
        expected=str(shapes.axes.get(axis, "dynamic")),
        got=size if needed is None else str(needed),
        hint=_UNKNOWN if allowed is None else _remedy(allowed),
    )
    if allowed is None and size is not None and dim in dims:  # a fixed size is not a remedy
        fixed_axis = dims[dim].axis
        kept = {other: _renamed(named, fixed_axis, None) for other, named in shapes.names.items()}
        allowed = _argument(shapes.axes, kept)
    error.allowed = allowed
    return error


_UNKNOWN = (
    "Keep the module from turning it into a number (`int(x.shape[0])`, a fixed `view`), "
    "give the axis a range it can serve, or fix the shape with `dynamic=None`."
)


def _guard(text: str, flat: FlatModule, shapes: DynamicShapes) -> str:
    """Return the relation between axes that torch could not show, if it says one."""
    found = re.search(r"satisfy the generated guard (.+?)\.?$", text, re.MULTILINE)
    if found is None:
        return ""
    said = _in_axes(found[1], flat, shapes)
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


def _allowed(text: str, flat: FlatModule, shapes: DynamicShapes) -> Allowed | None:
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
    for name, bound in _limits(text):
        if name in axes:
            axes[name] = _within(axes[name], LinearSize(name), bound)
    for name, guard in _guards(text, flat, shapes):
        if name in axes and name not in _relations(text):
            axes[name] = _longest(axes[name], guard)
    for name, needed in _relations(text).items():
        if name not in axes:
            continue
        axis = axes.pop(name)
        if needed.axis == f"_{name}":
            needed = LinearSize(name, needed.factor)
        axes[needed.axis] = _within(axes.get(needed.axis, Axis(0)), needed, axis)
        names = {k: _renamed(dims, name, needed) for k, dims in names.items()}
    if axes == dict(shapes.axes) and names == shapes.names:
        return None
    return _argument(axes, names)


def _argument(axes: Mapping[str, Axis], names: Mapping[Key, Mapping[int, LinearSize]]) -> Allowed:
    """Write axes as the argument ``dynamic``, without those that no dimension has."""
    found: dict[object, tuple[int, int | None] | Mapping[int, str]] = {
        key[0] if len(key) == 1 else key: {dim: str(size) for dim, size in dims.items()}
        for key, dims in names.items()
        if dims
    }
    used = {size.axis for dims in names.values() for size in dims.values()}
    return found | {name: (axis.min, axis.max) for name, axis in axes.items() if name in used}


def _remedy(allowed: Allowed) -> str:
    return f"Pass `dynamic={dict(allowed)}`." if allowed else "Pass `dynamic=None`."


def _limits(text: str) -> Iterator[tuple[str, Axis]]:
    """Iterate over the limits of axes that torch's solver failed on."""
    found = SOLVED.search(text)
    if found is None:
        return
    low, high = (Fraction(part) if part[0].isdigit() else None for part in found.groups())
    if low is not None:
        yield found[2], Axis(math.ceil(low))
    elif high is not None:
        yield found[1], Axis(0, math.floor(high))


def _longest(axis: Axis, guard: ast.expr) -> Axis:
    """Return the longest part of a range in which a guard on the axis holds."""
    end = axis.min + _SEARCHED if axis.max is None else min(axis.max, axis.min + _SEARCHED)
    runs, start = [], None
    for size in range(axis.min, end + 1):
        if not _computed(guard, size):
            start = None
        elif start is None:
            start = size
            runs.append((start, size))
        else:
            runs[-1] = (start, size)
    low, high = max(runs, key=lambda run: run[1] - run[0], default=(axis.min, axis.min))
    if low == high:  # several sizes, which are not side by side
        return axis
    return Axis(low, axis.max if high == end else high)


_SEARCHED = 1 << 12
_OPERATIONS: Mapping[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _computed(node: ast.expr, size: int) -> int:
    """Compute a guard of whole numbers at a size of its axis.

    Raises:
        KeyError: It is of another kind.
    """
    match node:
        case ast.Constant(int(number)):
            return number
        case ast.Name():
            return size
        case ast.UnaryOp(op, operand):
            return _OPERATIONS[type(op)](_computed(operand, size))
        case ast.BinOp(left, op, right):
            return _OPERATIONS[type(op)](_computed(left, size), _computed(right, size))
        case ast.Compare(left, [op], [right]):
            return _OPERATIONS[type(op)](_computed(left, size), _computed(right, size))
        case ast.Call(ast.Name("max" | "min" | "Max" | "Min" as name), args):
            values = [_computed(arg, size) for arg in args]
            return max(values) if name.lower() == "max" else min(values)
    raise KeyError(type(node))


def _guards(text: str, flat: FlatModule, shapes: DynamicShapes) -> Iterator[tuple[str, ast.expr]]:
    """Iterate over the guards on one axis that torch names: its fixes may leave in what breaks."""
    for guard in re.findall(r"satisfy the generated guard (.+?)\.?$", text, re.MULTILINE):
        said = _in_axes(guard, flat, shapes)
        try:
            parsed = ast.parse(said, mode="eval").body
            _computed(parsed, 2)
        except (KeyError, SyntaxError, ZeroDivisionError):
            continue
        named = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
        names = named & shapes.axes.keys()
        if len(names) == 1:
            yield names.pop(), parsed


def _in_axes(guard: str, flat: FlatModule, shapes: DynamicShapes) -> str:
    """Write a guard in terms of axes."""
    said = guard.replace("torch.sym_", "")  # as torch 2.15 writes them
    for key, dims in shapes.names.items():
        for dim, size in dims.items():
            shown = str(size) if size == LinearSize(size.axis) else f"({size})"
            said = said.replace(f"L['{flat.arguments[key]}'].size()[{dim}]", shown)
    return said


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


_LONGEST = 200


def steps_of(module: nn.Module) -> Iterator[Step]:
    """List the steps of a keyed module that its outputs need, those of inner sequences too."""
    if isinstance(module, TensorDictModuleBase):
        yield from _needed(module, module.key_graph().outputs, ())


def _needed(
    module: TensorDictModuleBase, wanted: Iterable[NestedKey], path: tuple[str, ...]
) -> Iterator[Step]:
    graph = module.key_graph()
    live = graph.live_writes(wanted)
    inside = (
        module._kd_named_steps() if isinstance(module, TensorDictSequential) else [("", module)]
    )
    for idx, ((name, step), node) in enumerate(zip(inside, graph.nodes, strict=True)):
        if idx not in live:
            continue
        if isinstance(step, TensorDictSequential):
            yield from _needed(step, live[idx], (*path, name))
            continue
        reads, writes = (tuple(map(unravel_key_to_tuple, k)) for k in (node.reads, node.writes))
        yield Step(".".join((*path, name)), _step_label(node.label, step), reads, writes)


def _step_label(label: str, step: nn.Module) -> str:
    """Return the class or function that a step runs, with its settings as it prints them."""
    wrapped = step._modules.get("module")
    said = "" if wrapped is None else " ".join(wrapped.extra_repr().split())
    if not said or " at 0x" in said:  # an address, which differs in each process
        return label
    told = f"{label}({said})"
    return told if len(told) <= _LONGEST else f"{told[: _LONGEST - 3]}..."


_PREFIX = "module."


class Captured(NamedTuple):
    """What a `KeyedProgram` is made of, in its order."""

    schema: Schema
    program: ExportedProgram
    diagnostics: tuple[str, ...]
    reference: Reference
    example: tuple[Tensor, ...]
    doubtful: tuple[Mapping[str, int], ...]
    thresholds: Mapping[str, Sequence[int]]


@stage("capture the module")
def capture(
    module: nn.Module,
    example: Example[Word],
    *,
    inputs: Sequence[object] | None = None,
    outputs: Sequence[object] | None = None,
    dynamic: Dynamic[Name] = BATCH,
    state: Mapping[Next, object] | None = None,
    initial: Mapping[First, object] | None = None,
    mode: str | None = None,
    sizes: str | None = None,
    strict: bool = False,
    metadata: Mapping[str, object] | None = None,
    shared: bool = False,
) -> Captured:
    """Capture a module; ``shared`` is explained by `prepare`."""
    stored, mode, narrowing = check_metadata(metadata), checked_mode(mode), _narrowing(sizes)
    frozen, reads, writes = prepare(module, inputs, outputs, shared=shared)
    tensors = read_example(example, reads)
    in_keys = list(tensors)
    batch_dims = _batch_dims(example)
    if isinstance(example, Schema) and dynamic == BATCH:
        shapes = resolve(axes_of_schema(example), tensors, 0)
    else:
        shapes = resolve(dynamic, tensors, batch_dims)
    given, asked = tensors, shapes
    taken = {size for w in frozen.parameters() for size in w.shape}
    flat = FlatModule(frozen, in_keys, writes, batch_dims=batch_dims)
    with frozen_modes(frozen, mode), replaced_buffers(frozen) as replaced:
        while True:
            tensors = widen(given if shapes.fit(given) else tensors, shapes, taken)
            try:
                program = _trace(flat, tensors, shapes, strict, shared)
                break
            except Specialized as error:
                if not narrowing or error.allowed is None:
                    raise
                narrowed = resolve(error.allowed or None, tensors, 0)
                if narrowed == shapes:
                    raise
                shapes = narrowed
    wires = tuple(program.call_spec.out_spec.context)  # the keys of the dict that `flat` gives
    outside = shapes.outside(given)
    names = _axis_names(program, flat, shapes)
    found = doubts(program, names, shapes.axes)
    notes = [*mend(program, wires, mode), *_notes(replaced, outside), *map(str, found)]
    if shapes != asked:
        served = _argument(shapes.axes, shapes.names) or None
        notes.append(f"the sizes are those that the module serves: `dynamic={served}`.")
    schema = Schema(
        inputs=tuple(_input(flat, key, tensors[key], shapes) for key in in_keys),
        outputs=tuple(_outputs(program, wires, names)),
        axes=shapes.axes,
        batch_dims=batch_dims,
        mode=mode,
        metadata=stored,
        versions={"kd-export": version("kd-export"), "torch": torch.__version__},
        weights=digest_of(held_by(program)),
        steps=tuple(steps_of(frozen)),
    )
    schema = replace(schema, state=resolve_state(schema, state))
    schema = replace(schema, initial=resolve_initial(schema, initial))
    sample = tensors if outside else given
    doubtful = tuple(doubt.broken_at for doubt in found if doubt.broken_at)
    reference = Reference(flat, mode)
    telling = thresholds(program, names, shapes.axes)
    inner = tuple(sample.values())
    return Captured(schema, program, tuple(notes), reference, inner, doubtful, telling)


def _narrowing(sizes: str | None) -> bool:
    """Return whether the module decides which of the sizes asked for there are."""
    if sizes not in (None, AS_ALLOWED):
        raise ExportError(
            f"expected {AS_ALLOWED!r} or `None` for `sizes`, got {sizes!r}.",
            expected=AS_ALLOWED,
            got=sizes,
            hint="Name the sizes in `dynamic`.",
        )
    return sizes is not None


def _batch_dims(example: Example[Word]) -> int:
    if isinstance(example, Schema):
        return example.batch_dims
    # Without a container nothing says that results have a batch size, so they have none.
    return len(example.batch_size) if isinstance(example, TensorDictBase) else 0


def _notes(replaced: Iterable[str], outside: Iterable[str]) -> Iterator[str]:
    for name in replaced:
        yield (
            f"the call replaces the buffer `{name}`: the program starts each time from the value "
            "that it has now. Give it as an input key and an output key to carry it."
        )
    for place in outside:
        yield (
            f"the example is not in the range: {place}. Its rows are repeated or left out to fit."
        )


def _trace(
    flat: FlatModule,
    tensors: Mapping[Key, Tensor],
    shapes: DynamicShapes,
    strict: bool,
    shared: bool,
) -> ExportedProgram:
    """Run `torch.export.export`, and explain its errors in the words of keys."""
    try:
        program = _captured(flat, tensors, shapes, strict, shared)
    except (ExportError, KdError):
        raise
    except Exception as error:
        program = _traced_again(flat, tensors, shapes, strict, shared, error)
    check_dynamic(program, flat, shapes)
    _own_names(program)
    _drop_implied_ranges(program)
    return program


def _traced_again(
    flat: FlatModule,
    tensors: Mapping[Key, Tensor],
    shapes: DynamicShapes,
    strict: bool,
    shared: bool,
    error: Exception,
) -> ExportedProgram:
    """Try a module that torch refused in the ways that may help.

    What python refuses is tried by dynamo, as `torch.onnx.export` does; a size that was frozen,
    with loops for recurrent layers; sizes that torch cannot show to fit, with assertions that are
    shown here.
    """
    failure = explained(error, flat, shapes)
    sizes = isinstance(failure, Specialized)
    if strict and not sizes:
        raise failure from error
    if sizes and any(isinstance(part, nn.RNNBase) for part in flat.modules()):
        with contextlib.suppress(Exception):
            return _captured(flat, tensors, shapes, strict, shared, loops=True)
    try:
        again = strict if sizes else True
        program = _captured(flat, tensors, shapes, again, shared, defer=sizes)
    except ExportError as clearer:
        raise clearer from error
    except Exception:
        raise failure from error
    if sizes:
        names = _axis_names(program, flat, shapes)
        if not settle(program, names, shapes.axes):
            narrower = narrowed_axes(program, names, shapes.axes, shapes.sizes(tensors))
            raise explained(error, flat, shapes, narrower) from error
    return program


def _captured(
    flat: FlatModule,
    tensors: Mapping[Key, Tensor],
    shapes: DynamicShapes,
    strict: bool,
    shared: bool,
    defer: bool = False,
    loops: bool = False,
) -> ExportedProgram:
    arguments = flat.arguments
    kwargs = {arguments[key]: tensor for key, tensor in tensors.items()}
    dims = {arguments[key]: shapes.dims(key) or None for key in tensors}
    with _quiet(), CapturedLayers(loops), hooks_of_torch_removed():
        if strict:  # dynamo cannot follow what a module caches on its first call
            with Unwritten(flat.module) if shared else contextlib.nullcontext():
                flat.run([tensor.clone() for tensor in tensors.values()])
        program = torch.export.export(
            flat,
            (),
            kwargs,
            dynamic_shapes=dims if shapes.axes else None,
            strict=strict,
            prefer_deferred_runtime_asserts_over_guards=defer,
        )
    restore_users(program)
    return program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing graphs and traces of an error that is explained anyway."""
    with silenced(*CAPTURE_LOGGERS), contextlib.redirect_stderr(io.StringIO()) as printed:
        yield
    sys.stderr.write(printed.getvalue())  # by the user's module, as all is well


def _own_names(program: ExportedProgram) -> None:
    """Rename weights to the names in the user's module, without the wrapper around it."""
    for spec in program.graph_signature.input_specs:
        if spec.target is not None:
            spec.target = spec.target.removeprefix(_PREFIX)
    for held in (program.state_dict, program.constants):
        for name in list(held):
            held[name.removeprefix(_PREFIX)] = held.pop(name)


def _drop_implied_ranges(program: ExportedProgram) -> None:
    """Drop the ranges of sizes that follow from others: torch warns of them in each load."""
    ranges = program.range_constraints
    for size in [size for size in ranges if not size.is_Symbol]:
        del ranges[size]


def _axis_names(
    program: ExportedProgram, flat: FlatModule, shapes: DynamicShapes
) -> dict[sympy.Symbol, sympy.Expr]:
    """Map torch's symbols (``s77``) to axes."""
    found = {}
    for key, value in zip(flat.inputs, input_values(program), strict=True):
        for dim, size in shapes.names.get(key, {}).items():
            expression = _expression(value.shape[dim])
            (symbol,) = expression.free_symbols
            axis = sympy.Symbol(size.axis, integer=True, nonnegative=True)
            rest = size.factor * axis + size.offset - expression.subs(symbol, 0)
            found[symbol] = rest / expression.coeff(symbol)
    return found


def _input(flat: FlatModule, key: Key, tensor: Tensor, shapes: DynamicShapes) -> Entry:
    names = shapes.names.get(key, {})
    low, high = bounds(tensor)
    return Entry(
        key=key,
        name=flat.arguments[key],
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(
            str(names[dim]) if dim in names else size for dim, size in enumerate(tensor.shape)
        ),
        low=low,
        high=high,
    )


def _outputs(
    program: ExportedProgram, wires: Sequence[str], names: Mapping[sympy.Symbol, sympy.Expr]
) -> Iterator[Entry]:
    nodes = {node.name: node for node in program.graph.nodes}
    for wire, name in zip(wires, program.graph_signature.user_outputs, strict=True):
        value = nodes[str(name)].meta["val"]
        yield Entry(
            key=wire_key(wire),
            name=wire,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(_size(size, names) for size in value.shape),
        )


def _size(size: int | torch.SymInt, names: Mapping[sympy.Symbol, sympy.Expr]) -> int | str:
    if not isinstance(size, torch.SymInt):
        return size
    return str(_expression(size).subs(names))


def _expression(size: int | torch.SymInt) -> sympy.Expr:
    assert isinstance(size, torch.SymInt)
    return size.node.expr
