"""The known traps of an exported graph, each mended or explained.

`torch.export` accepts what then goes wrong at run time without a word: dropout that is still
random, a result that shares memory with an input, an input that is overwritten, a buffer that
changes. `mend` finds each such trap in a captured program and mends it, leaving a sentence for
`KeyedProgram.diagnostics`, or raises `NotExportable` with the remedy. Others are found while a
module is called: parameters, which are the user's own, must not change, buffers that are replaced
are noted, and hooks of torch are removed.

Knows graphs and the memory of parameters; must not know keys or files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputSpec, TensorArgument
from torch.nn.modules.module import register_module_buffer_registration_hook

from kd_export._errors import NotExportable, place_of
from kd_export._torch_private import (
    BUFFER_HOOKS,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    schema_of,
    tree_leaves,
)


class Unwritten(TorchDispatchMode):
    """Refuse, in a block, the operators that write into the parameters of a module.

    Raises:
        NotExportable: An operator would have written into one; it was not run.
    """

    def __init__(self, module: nn.Module) -> None:
        TorchDispatchMode.__init__(self)
        self._names = {_memory(one): name for name, one in module.named_parameters()}
        self._names.pop(0, None)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator, if it writes into other memory."""
        given = dict(kwargs or {})
        for position, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else given.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                name = self._names.get(_memory(tensor))
                if name is not None:
                    raise changed(name, f"`{func}`")
        return func(*args, **given)


@contextlib.contextmanager
def replaced_buffers(module: nn.Module) -> Iterator[list[str]]:
    """Collect the names of the buffers to which a call in the block assigns another tensor."""
    names = {
        (owner, key): f"{path}.{key}" if path else key
        for path, owner in module.named_modules()
        for key in owner._buffers
    }
    found: list[str] = []

    def note(owner: nn.Module, key: str, _: Tensor) -> None:
        name = names.get((owner, key))
        if name is not None and name not in found:
            found.append(name)

    handle = register_module_buffer_registration_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@contextlib.contextmanager
def hooks_of_torch_removed() -> Iterator[None]:
    """Remove the hooks of torch that a failed export in the block leaves at buffers.

    Up to 2.12, torch removes its own only after an export that succeeds. A hook that stays sees
    every module of the process: it keeps the exported one alive, and breaks compiled graphs.
    """
    before = set(BUFFER_HOOKS)
    try:
        yield
    finally:
        for number in BUFFER_HOOKS.keys() - before:
            hook = BUFFER_HOOKS[number]
            if getattr(hook, "__qualname__", "").startswith("register_buffer_assignment_hook."):
                del BUFFER_HOOKS[number]


def changed(name: str, where: str) -> NotExportable:
    """Build the error of a module whose call changes a part of it."""
    return NotExportable(
        f"the call changes `{name}` of the module ({where}).",
        expected="a module without state",
        got=name,
        hint="Give the state as an input key and the new state as an output key.",
    )


def _memory(value: object) -> int:
    """Return where the numbers of a plain tensor are; 0 for what has none in one place."""
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return 0
    if value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()


_DROPOUTS = (
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.feature_alpha_dropout.default,
)
_SHARERS = "an input, a weight or another output"
_SWITCHES = ("train", "training")
_RATES = ("p", "dropout_p", "dropout")


def restore_users(program: ExportedProgram) -> None:
    """Register every node as a user of its inputs.

    torch loses users of the result of a gradient scope when it moves the scope's nodes into the
    graph around it; nodes with lost users cannot be erased, and a replacement passes over them.
    """
    for part in _parts(program):
        for node in part.graph.nodes:
            for given in node.all_input_nodes:
                given.users.setdefault(node)


def _parts(program: ExportedProgram) -> list[fx.GraphModule]:
    """List the program's own graph, and those of branches and loop bodies."""
    return [part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]


def mend(program: ExportedProgram, outputs: tuple[str, ...], mode: str | None) -> list[str]:
    """Find and mend every trap; list what was done.

    Args:
        program: A freshly captured program; its graph is changed in place.
        outputs: The wire names of the outputs, in order.
        mode: The interaction type asked for; ``"random"`` allows random operators.
    """
    parts = _parts(program)
    graphs = [part.graph for part in parts]
    _refuse_inner_writes(program.graph_module)
    done = [*_drop_idle_dropout(graphs)]
    _refuse_state(program)
    done += [*_keep_inputs(program), *_separate_outputs(program, outputs)]
    program.graph.eliminate_dead_code(_has_effect)
    if mode != "random":
        for graph in graphs:
            _refuse_random(graph, mode)
    for part in parts:
        part.recompile()
    return done


def _calls(graph: fx.Graph) -> Iterator[tuple[fx.Node, OpOverload]]:
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            yield node, node.target


def _has_effect(node: fx.Node) -> bool:
    """Keep what writes or asserts; a random draw that is not read may be removed."""
    target = node.target
    if isinstance(target, OpOverload):
        return schema_of(target).is_mutable or "assert" in schema_of(target).name
    if node.op == "call_function":
        return getattr(target, "__module__", None) not in ("_operator", "math", "torch")
    return node.op != "get_attr"


def _drop_idle_dropout(graphs: Sequence[fx.Graph]) -> Iterator[str]:
    """Remove dropout in eval mode: it gives its input."""
    count = 0
    for node, target in (call for graph in graphs for call in _calls(graph)):
        if target in _DROPOUTS and _argument(node, "train") is False:
            node.replace_all_uses_with(node.all_input_nodes[0])
            node.graph.erase_node(node)
            count += 1
    if count:
        yield f"dropout is removed ({count} in all): in eval mode it gives its input."


def _argument(node: fx.Node, name: str) -> object:
    """Return an argument of an operator's call, its default if it was not given."""
    target = node.target
    assert isinstance(target, OpOverload)
    for position, argument in enumerate(schema_of(target).arguments):
        if argument.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            if position < len(node.args):
                return node.args[position]
            return argument.default_value if argument.has_default_value() else None
    return None


def _refuse_random(graph: fx.Graph, mode: str | None) -> None:
    """Refuse a draw of random numbers that the caller did not ask for."""
    for node, target in _calls(graph):
        if torch.Tag.nondeterministic_seeded not in target.tags:
            continue
        idle = any(_argument(node, name) is False for name in _SWITCHES)
        idle = idle or any(_argument(node, name) == 0.0 for name in _RATES)
        if not idle:
            raise NotExportable(
                f"the module draws random numbers (`{target}`{place_of(node)})"
                + (f", which `mode={mode!r}` does not change." if mode is not None else "."),
                expected="a deterministic module",
                got=str(target),
                hint="Export a deterministic result with `mode='deterministic'`, or declare the "
                "draw with `mode='random'`."
                if mode is None
                else "A mode is for the distributions of probabilistic modules. Take the draw out "
                "of the module, or declare it with `mode='random'`.",
            )


def _refuse_state(program: ExportedProgram) -> None:
    """Refuse a module whose call changes one of its buffers."""
    kept = {s.arg.name: s for s in program.graph_signature.input_specs if s.target is not None}
    for node, written in _writes(program.graph):
        spec = kept.get(written.name)
        if spec is None:
            continue
        where = f"`{node.target}`{place_of(node)}"
        name = str(spec.target)
        if "lifted_tensor" in name:  # torch's name of a tensor that belongs to no module
            raise NotExportable(
                f"the call writes to a tensor that is a constant of the program ({where}).",
                expected="a write to an input or to a tensor that the call made",
                got=str(node.target),
                hint="What `.data` returns is such a constant: write to a clone instead.",
            )
        raise changed(name, where)


def _refuse_inner_writes(module: fx.GraphModule) -> None:
    """Refuse a branch or loop body that writes to what it is given.

    The body of a gradient or autocast scope is part of the code around it: it may write to what
    that code made.
    """
    for node, part in _inner(module):
        _refuse_inner_writes(part)
        leaves = [arg for arg in tree_leaves(node.args) if isinstance(arg, fx.Node)]
        given = [arg for arg in leaves if arg.op != "get_attr"]
        free = str(node.target).startswith("wrap_with_")
        for call, written in _writes(part.graph):
            if not free or _is_given(written, given):
                raise _writes_inside(node, call)


def _inner(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """List the graphs that higher-order operators call, with the call."""
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            names = (arg for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr")
            parts = (getattr(module, str(name.target)) for name in names)
            yield from ((node, part) for part in parts if isinstance(part, fx.GraphModule))


def _is_given(placeholder: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """Decide whether a placeholder of an inner graph stands for memory of one of the outer."""
    placeholders = placeholder.graph.find_nodes(op="placeholder")
    return _root(operands[placeholders.index(placeholder)]).op == "placeholder"


def _writes_inside(node: fx.Node, call: fx.Node) -> NotExportable:
    return NotExportable(
        f"a function inside `{node.target}` writes to what it is given "
        f"(`{call.target}`{place_of(call) or place_of(node)}).",
        expected="a function that computes new tensors",
        got=str(call.target),
        hint="Compute a new tensor, such as `x + 1` in place of `x.add_(1)`.",
    )


def _keep_inputs(program: ExportedProgram) -> Iterator[str]:
    """Redirect an operator that overwrites an input to a copy of it."""
    inputs = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    }
    for written in {root for _, root in _writes(program.graph)}:
        if written.name in inputs:
            first = next(node for node in program.graph.nodes if node.op != "placeholder")
            copy = _clone(program.graph, written, before=first)
            _redirect(written, copy)
            yield f"the input `{written.name}` is overwritten by the module: it works on a copy."


def _redirect(node: fx.Node, copy: fx.Node) -> None:
    """Redirect every reader of a node but its copy to the copy."""
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _writes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """List each operator that writes into a placeholder's memory, with the placeholder."""
    for node, target in _calls(graph):
        for argument in schema_of(target).arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = _argument(node, argument.name)
            root = _root(value) if isinstance(value, fx.Node) else None
            if root is not None and root.op == "placeholder":
                yield node, root


def _root(node: fx.Node) -> fx.Node:
    """Trace views back to the value whose memory they share."""
    while node.op == "call_function":
        target = node.target
        if isinstance(target, OpOverload):
            aliased = [i for i, a in enumerate(schema_of(target).arguments) if a.alias_info]
            source = node.args[aliased[0]] if aliased and aliased[0] < len(node.args) else None
            if not any(r.alias_info for r in schema_of(target).returns):
                return node
        else:
            source = node.args[0] if node.args and "getitem" in str(target) else None
        if not isinstance(source, fx.Node):
            return node
        node = source
    return node


def _separate_outputs(program: ExportedProgram, outputs: tuple[str, ...]) -> Iterator[str]:
    """Copy an output that shares memory with an input, a weight, or another output."""
    graph = program.graph
    end = next(node for node in reversed(graph.nodes) if node.op == "output")
    results = list(end.args[0])
    seen: set[fx.Node] = set()
    for position, result in enumerate(results):
        assert isinstance(result, fx.Node)  # `FlatModule` gives tensors alone
        if _root(result).op == "placeholder" or result in seen:
            copy = _clone(graph, result, before=end)
            results[position] = copy
            name = outputs[position]
            yield f"the output `{name}` shares memory with {_SHARERS}: it is copied."
        seen.add(result)
    end.args = (tuple(results),)
    program.graph_signature.output_specs = [
        OutputSpec(spec.kind, TensorArgument(name=result.name), spec.target)
        for spec, result in zip(program.graph_signature.output_specs, results, strict=True)
    ]


def _clone(graph: fx.Graph, node: fx.Node, *, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta["val"] = node.meta["val"]
    return copy
