"""What a sequence knows about its steps, and whether it still holds.

Resolving a sequence costs as much as hundreds of calls, so it is done once and kept until a key, a
step or the way a step runs has changed.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from kd_core import NestedKey
from kd_nn._dispatch.call_names import CallNames
from kd_nn._dispatch.skip_existing import anyone_skips
from kd_nn._keys.graph import KeyGraph
from kd_nn._keys.specs import Keys
from kd_nn._modules.base import TensorDictModuleBase, key_node
from kd_nn._modules.steps import StepList
from kd_nn._plan.codegen import ValuesFunction, values_function
from kd_nn._plan.dynamo import Traced, traced_functions, watch_function
from kd_nn._plan.invalidation import flags_of
from kd_nn._plan.program import Program, resolve


def _never(_: nn.Module) -> bool:
    return False


@dataclass(slots=True)
class Resolved:
    """The graph, the program and the function of a sequence, as of one moment.

    Attributes:
        graph: Which step reads and writes what.
        in_keys: What the sequence reads from outside.
        out_keys: All that its steps write.
        live: The steps that the visible outputs need, and which of their keys.
        program: The calls between numbered values, if every step can be called on values.
        run: The function that makes these calls; None if a container must be passed.
        reads: The keys of the values that `run` takes.
        writes: The keys of the values that `run` returns.
        traced: The functions that dynamo inlines, if there is a program.
        optional: Those of `in_keys` that no step insists on, once somebody asked.
    """

    graph: KeyGraph
    in_keys: Keys
    out_keys: Keys
    live: dict[int, Keys]
    program: Program | None = None
    run: ValuesFunction | None = None
    reads: Keys = ()
    writes: Keys = ()
    traced: Traced | None = None
    optional: Keys | None = None
    _paths: list[tuple[str, ...]] = field(default_factory=list)
    _watched: Callable[[nn.Module], bool] = _never
    _flags: list[list[bool]] = field(default_factory=list)
    _members: list[tuple[nn.Module, list[nn.Module]]] = field(default_factory=list)
    _foreign: list[tuple[nn.Module, list[NestedKey], list[NestedKey]]] = field(default_factory=list)

    @classmethod
    def of(cls, sequence: StepList) -> "Resolved":
        """Resolve a sequence."""
        nodes = tuple(key_node(name, step) for name, step in sequence.named_steps())
        graph = KeyGraph(nodes)
        selected = sequence.__dict__.get("_selected")
        if selected is not None:
            graph = KeyGraph(nodes, selected).restrict(graph.needed_for(selected))
        live = graph.live_writes(graph.outputs)
        found = cls(graph, graph.inputs, graph.writes, live)
        found._watch(sequence, ())
        # The function is made of text, which dynamo cannot trace; a container is passed instead.
        if not torch.compiler.is_dynamo_compiling():
            found._make_function(sequence)
        return found

    def is_current(self) -> bool:
        """Return whether nothing has changed that this was made from."""
        if any(self._flags):
            return False
        if torch.compiler.is_dynamo_compiling():
            return True
        for holder, members in self._members:
            if list(holder._modules.values()) != members:
                return False
        for step, reads, writes in self._foreign:
            if list(step.in_keys) != reads or list(step.out_keys) != writes:  # type: ignore[arg-type]  # keyed
                return False
        return True

    def is_watched(self, sequence: nn.Module) -> bool:
        """Return whether hooks on steps, or the skipping of steps, ask for calls one by one."""
        return bool(anyone_skips) or self._watched(sequence)

    def _make_function(self, sequence: StepList) -> None:
        self.program = resolve(sequence, self.in_keys, self.graph.outputs)
        if self.program is not None:
            self._watched = watch_function(self._paths)
            self.run = values_function(self.program)
            names = CallNames(self.in_keys, "_")
            inplace = sequence.__dict__.get("inplace") in (None, True)
            hooks = watch_function([(), *self._paths])
            owner = weakref.ref(sequence)

            def watched() -> bool:
                root = owner()
                return root is None or hooks(root)

            self.traced = traced_functions(self.program, names, watched, self._flags, inplace)
            self.reads = tuple(key for key, _ in self.program.inputs)
            self.writes = tuple(key for key, _ in self.program.outputs)

    def _watch(self, step: nn.Module, path: tuple[str, ...]) -> None:
        if isinstance(step, StepList):
            self._flags.append(step.change_flag())
        else:
            self._flags += flags_of(step)
        if not isinstance(step, TensorDictModuleBase):
            self._foreign.append((step, list(step.in_keys), list(step.out_keys)))  # type: ignore[arg-type]  # keyed
        if isinstance(step, StepList):
            members = step.named_steps()
            self._members.append((step.module, [member for _, member in members]))
            for name, member in members:
                self._paths.append((*path, name))
                self._watch(member, (*path, name))
