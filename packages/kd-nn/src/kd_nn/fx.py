"""`symbolic_trace`: a keyed module as one graph of `torch.fx`.

The graph reads entries of a container, calls modules and functions, and returns the visible
outputs: no container is written between the steps. A step that is more than a callable between keys
(a probabilistic module, a subclass with its own `forward`, a step with hooks) stays one call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor, fx, nn
from torch.fx.node import Argument, Target

from kd_core import InvalidArgument, NestedKey, TensorDictBase
from kd_nn._dispatch import (
    CallNames,
    Inplace,
    add_step_note,
    describe,
    destination,
    dispatch,
    keys_of,
    write_apart,
    write_entries,
)
from kd_nn._keys import DISCARD
from kd_nn._modules.base import TensorDictModuleBase, is_special
from kd_nn._modules.module import TensorDictModule
from kd_nn._plan.plans import plain_module
from kd_nn._plan.program import (
    Call,
    Program,
    inplace_of,
    is_sequence,
    resolve,
    runs_on_values,
)
from kd_nn._torch_private import is_watched


class TracedModule(TensorDictModuleBase):
    """A keyed module that runs a graph; made by `symbolic_trace`.

    It has the keys of the module that was traced, and is called like it: with a container, or with
    tensors by position or keyword. Attributes are also those of `graph_module`.

    Attributes:
        graph_module: Takes a container and returns the outputs as a tuple.
    """

    _kd_changes_by_assignment = True

    def __init__(self, graph_module: fx.GraphModule, program: Program, inplace: Inplace) -> None:
        super().__init__()
        self.in_keys = [key for key, _ in program.inputs]
        self.out_keys = [key for key, _ in program.outputs]
        self._order = [program.outputs.index(each) for each in program.stored]
        self._is_sequence = program.is_sequence
        self.graph_module = graph_module
        self.inplace: Inplace = inplace

    @property
    def graph(self) -> fx.Graph:
        """The graph."""
        return self.graph_module.graph

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        return self.graph_module.code

    @dispatch(auto_batch_size=False)
    def forward(
        self, tensordict: TensorDictBase, *, tensordict_out: TensorDictBase | None = None
    ) -> TensorDictBase:
        """Run the graph and write its outputs.

        Args:
            tensordict: The container to read.
            tensordict_out: The container to write, instead of what `inplace` says.

        Returns:
            The container that was written.
        """
        made = dict(zip(self.out_keys_source, self.graph_module(tensordict), strict=True))
        target = destination(tensordict, self.inplace, tensordict_out)
        keys = self._kd_stored_keys()
        values = [made[key] for key in keys]
        if self._is_sequence and target is not tensordict:
            return write_apart(target, tensordict, dict(zip(keys, values, strict=True)), keys)
        write_entries(target, keys, values)
        return target

    def _kd_stored_keys(self) -> tuple[NestedKey, ...]:
        source, visible = self.out_keys_source, self.out_keys
        return tuple(source[place] for place in self._order if source[place] in visible)

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Return an attribute of the module, else of its `graph_module`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            held = self.__dict__.get("_modules", {}).get("graph_module")
            if held is None or name in {"in_keys", "out_keys"} or is_special(name):
                raise
            found: Tensor | nn.Module = getattr(held, name)
            return found


def symbolic_trace(module: TensorDictModuleBase) -> TracedModule:
    """Trace a keyed module to one graph of `torch.fx`.

    Sequences inside others become one graph with their steps, and a step that no selected output
    needs is left out. The graph shares parameters with the module.

    Args:
        module: A `TensorDictModule`, a sequence, or another keyed module, which is called as it is.

    Returns:
        A keyed module with the same keys, and the attributes `graph` and `code`.

    Raises:
        InvalidArgument: If there is no such graph: a step takes a container, the keys of two steps
            hold one another, or steps are skipped for want of inputs.

    Example:
        >>> import torch
        >>> net = TensorDictModule(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), ["x"], ["y"])
        >>> traced = symbolic_trace(net)
        >>> print(traced.code.strip())
        def forward(self, tensordict):
            getitem = tensordict['x'];  tensordict = None
            _0 = getattr(self, "0")(getitem);  getitem = None
            _1 = getattr(self, "1")(_0);  _0 = None
            return (_1,)
        >>> torch.equal(traced(x=torch.ones(3)), net(x=torch.ones(3)))
        True
    """
    if not isinstance(module, TensorDictModuleBase):
        raise InvalidArgument(
            f"`module` must be a keyed module, got {type(module).__name__}. Trace other modules "
            "with `torch.fx.symbolic_trace`."
        )
    visible = tuple(key for key in keys_of(module, "out_keys") if key != DISCARD)
    program = resolve(module, keys_of(module, "in_keys"), visible)
    if program is None or program.tolerant:
        raise InvalidArgument(f"{describe(module)} cannot be traced to one graph: {_why(module)}")
    root = _root_of(module)
    made = fx.GraphModule(root, _tracer(program).trace(root), type(module).__name__)
    return TracedModule(made, program, inplace_of(module))


def _why(module: nn.Module) -> str:
    """Return why a graph cannot be made, and what to do."""
    for step in module.modules():
        if is_sequence(step) and step.__dict__.get("partial_tolerant"):
            return f"{describe(step)} skips steps. Set `partial_tolerant` to False."
        if isinstance(step, TensorDictModuleBase) and not runs_on_values(step):
            return (
                f"{describe(step)} must be given a container. Trace the steps before and after it."
            )
    return "the keys of some steps hold one another. Read and write the same keys, or rename them."


def _root_of(module: nn.Module) -> nn.Module:
    """Return the module from which the graph finds what it calls."""
    if is_sequence(module):
        root = nn.Module()  # a new one: the tracer may add constants to it
        for name, step in module._kd_named_steps():
            root.add_module(name, step)
        return root
    wrapped = module._modules.get("module") if plain_module(module) else module
    if wrapped is None:
        return nn.ModuleDict()
    is_leaf = isinstance(wrapped, TensorDictModuleBase) or fx.Tracer().is_leaf_module(wrapped, "")
    return nn.ModuleDict({"module": wrapped}) if is_leaf else wrapped


def _tracer(program: Program) -> fx.Tracer:
    class KeyedTracer(fx.Tracer):  # local: a pickle of the graph is to name torch's tracer
        traced_func_name = "modules"  # any method of a module: it is exchanged below

        def create_args_for_root(
            self,
            root_fn: Callable[..., object],
            is_module: bool,
            concrete_args: Mapping[str, object] | tuple[object, ...] | None = None,
        ) -> tuple[Callable[..., object], list[fx.Proxy]]:
            container = self.create_proxy("placeholder", "tensordict", (), {})
            return lambda given: _run(self, program, given), [container]

        def create_node(
            self,
            kind: str,
            target: Target,
            args: tuple[Argument, ...],
            kwargs: dict[str, Argument],
            name: str | None = None,
            type_expr: object = None,
        ) -> fx.Node:
            if name is None and kind in {"call_module", "get_attr"}:
                parts = [part for part in str(target).split(".") if part != "module"]
                name = ".".join(parts) or None  # `_0_fc1` for `0.module.fc1`
            return super().create_node(kind, target, args, kwargs, name, type_expr)

        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            keyed = isinstance(m, TensorDictModuleBase)
            return keyed or super().is_leaf_module(m, module_qualified_name)

    return KeyedTracer()


def _run(tracer: fx.Tracer, program: Program, container: fx.Proxy) -> tuple[object, ...]:
    """Run the calls on proxies; an entry is read where it is first needed."""
    keys = {slot: key for key, slot in program.inputs}
    values: dict[int, object] = {}
    for call in program.calls:
        for slot in call.reads:
            if slot not in values:
                values[slot] = _item(tracer, container, keys[slot])
        try:
            made = _outputs(tracer, call, [values[slot] for slot in call.reads])
        except Exception as error:
            if program.is_sequence:
                add_step_note(error, call.place, call.step, {})
            if isinstance(error, NameError) and "is not installed as a submodule" in str(error):
                raise InvalidArgument(
                    f"{describe(call.step)} uses a module that it does not hold, which a graph "
                    "cannot call. Wrap that module, or a module that holds it."
                ) from error
            raise
        values.update(
            (slot, v) for slot, v in zip(call.writes, made, strict=True) if slot is not None
        )
    return tuple(values[slot] for _, slot in program.outputs)


class FedStep(nn.Module):
    """Run a step on what earlier ones feed it with; graphs call it.

    Args:
        module: The step.
    """

    def __init__(self, module: TensorDictModuleBase) -> None:
        super().__init__()
        self.module = module

    def forward(self, *values: object) -> tuple[object, ...]:
        """Return the outputs of the step."""
        return self.module._kd_forward_fed(*values)


def _outputs(tracer: fx.Tracer, call: Call, given: list[object]) -> tuple[object, ...]:
    """Return one proxy for each output of a step, None for those that are not used."""
    step = cast("TensorDictModule", call.step)
    sources = step.out_keys_source
    if call.is_fed:
        name = "_".join((*call.path, "fed"))
        tracer.root.add_module(name, FedStep(step))
        made = tracer.create_proxy("call_module", name, tuple(given), {})
        return tuple(
            None if slot is None else _item(tracer, made, place)
            for place, slot in enumerate(call.writes)
        )
    if plain_module(step) and not is_watched(step):
        result = step._kd_call_wrapped(*given)
        names = step.__dict__.get("_kd_out_names")
        if not isinstance(result, fx.Proxy) or (len(sources) == 1 and names is None):
            return step._kd_split_outputs(result)
        places: list[object] = list(range(len(sources)) if names is None else names)
        return tuple(
            None if slot is None else _item(tracer, result, place)
            for slot, place in zip(call.writes, places, strict=True)
        )
    names = CallNames(tuple(step.in_keys), "_")
    by_name = dict(zip(names.names, given, strict=True)) if names.are_parameters else {}
    args = () if by_name else tuple(given)
    result = tracer.create_proxy("call_module", tracer.path_of_module(step), args, by_name)
    visible = [key for key in step.out_keys if key != DISCARD]
    parts = (
        [result] if len(visible) == 1 else [_item(tracer, result, i) for i in range(len(visible))]
    )
    found = dict(zip(visible, parts, strict=True))
    return tuple(found.get(key) for key in sources)


def _item(tracer: fx.Tracer, whole: fx.Proxy, place: object) -> fx.Proxy:
    return tracer.create_proxy("call_function", operator.getitem, (whole, place), {})
