"""From a keyed module and an example to a program, with its schema and its steps.

The module is copied first, so that eval mode, the mode of its probabilistic parts and whatever
tracing does to a module never reach the user's own.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import NamedTuple

import sympy  # type: ignore[import-untyped]  # it has no types, and torch needs it
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from kd_core import KdError, NestedKey, TensorDictBase, unravel_key_to_tuple
from kd_export._capture.example import bounds, read_example, resolve_initial
from kd_export._capture.explaining import check_dynamic, explained, input_values
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
    BATCH,
    Dynamic,
    DynamicShapes,
    Name,
    axes_of_schema,
    doubts,
    resolve,
    settle,
    thresholds,
    widen,
)
from kd_export._console import silenced, stage
from kd_export._errors import ExportError, Key, Specialized
from kd_export._running.recurrent import CapturedLayers
from kd_export._running.torch_runner import digest_of, held_by
from kd_export._schema.schema import Entry, First, Schema, Step, resolve_state
from kd_export._schema.schema import Name as Next
from kd_export._schema.wire import check_metadata, wire_key
from kd_nn import TensorDictModuleBase, TensorDictSequential

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
_NOISY = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
    "torch._dynamo",
    "torch._guards",
    "torch.export._trace",
)


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
    strict: bool = False,
    metadata: Mapping[str, object] | None = None,
    shared: bool = False,
) -> Captured:
    """Capture a module; ``shared`` is explained by `prepare`."""
    stored, mode = check_metadata(metadata), checked_mode(mode)
    frozen, reads, writes = prepare(module, inputs, outputs, shared=shared)
    tensors = read_example(example, reads)
    in_keys = list(tensors)
    batch_dims = _batch_dims(example)
    if isinstance(example, Schema) and dynamic == BATCH:
        shapes = resolve(axes_of_schema(example), tensors, 0)
    else:
        shapes = resolve(dynamic, tensors, batch_dims)
    given = tensors
    tensors = widen(tensors, shapes, {size for w in frozen.parameters() for size in w.shape})
    flat = FlatModule(frozen, in_keys, writes, batch_dims=batch_dims)
    with frozen_modes(frozen, mode), replaced_buffers(frozen) as replaced:
        program = _trace(flat, tensors, shapes, strict, shared)
    wires = tuple(program.call_spec.out_spec.context)  # the keys of the dict that `flat` gives
    outside = shapes.outside(given)
    names = _axis_names(program, flat, shapes)
    found = doubts(program, names, shapes.axes)
    notes = [*mend(program, wires, mode), *_notes(replaced, outside), *map(str, found)]
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


def _batch_dims(example: Example[Word]) -> int:
    if isinstance(example, Schema):
        return example.batch_dims
    # Without a container nobody said that results have a batch size too: then there is none.
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
    if sizes and not settle(program, _axis_names(program, flat, shapes), shapes.axes):
        raise failure from error
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
    with silenced(*_NOISY), contextlib.redirect_stderr(io.StringIO()) as printed:
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
