"""What a sequence knows about its steps, and whether it still holds.

Resolving a sequence costs as much as hundreds of calls, so it is done once and kept until a key, a
step or the way a step runs has changed.
"""

from dataclasses import dataclass

import torch
from torch import nn

from kd_core import NestedKey
from kd_nn._emit import ValuesFunction, values_function
from kd_nn._key_graph import KeyGraph
from kd_nn._key_spec import Keys
from kd_nn._module_base import TensorDictModuleBase, key_node
from kd_nn._program import Program, is_watched, resolve
from kd_nn._skip_existing import anyone_skips
from kd_nn._step_list import StepList


@dataclass(slots=True)
class Resolved:
    """The graph, the program and the function of a sequence, as of one moment.

    Attributes:
        graph: Which step reads and writes what.
        program: The calls between numbered values, if every step can be called on values.
        run: The function that makes these calls; None if a container must be passed.
        reads: The keys of the values that `run` takes.
        writes: The keys of the values that `run` returns.
        steps: Every keyed module below the sequence.
    """

    graph: KeyGraph
    program: Program | None
    run: ValuesFunction | None
    reads: Keys
    writes: Keys
    steps: tuple[nn.Module, ...]
    _flags: list[list[bool]]
    _members: list[tuple[nn.Module, list[nn.Module | None]]]
    _foreign: list[tuple[nn.Module, list[NestedKey], list[NestedKey]]]

    @classmethod
    def of(cls, sequence: StepList) -> "Resolved":
        """Resolve a sequence."""
        nodes = tuple(key_node(name, step) for name, step in sequence.named_steps())
        graph = KeyGraph(nodes)
        selected = sequence.__dict__.get("_selected")
        if selected is not None:
            graph = KeyGraph(nodes, selected).restrict(graph.needed_for(selected))
        found = cls(graph, None, None, (), (), (), [], [], [])
        steps: list[nn.Module] = []
        found._watch(sequence, steps)
        found.steps = tuple(steps)
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
        return all(
            list(holder._modules.values()) == members for holder, members in self._members
        ) and all(
            list(step.in_keys) == reads and list(step.out_keys) == writes  # type: ignore[arg-type]
            for step, reads, writes in self._foreign
        )

    def is_watched(self) -> bool:
        """Return whether hooks on steps, or the skipping of steps, ask for calls one by one."""
        return bool(anyone_skips) or any(is_watched(step) for step in self.steps)

    def _make_function(self, sequence: StepList) -> None:
        self.program = resolve(sequence, self.graph.inputs, self.graph.outputs)
        if self.program is not None:
            self.run = values_function(self.program)
            self.reads = tuple(key for key, _ in self.program.inputs)
            self.writes = tuple(key for key, _ in self.program.outputs)

    def _watch(self, step: nn.Module, steps: list[nn.Module]) -> None:
        if isinstance(step, TensorDictModuleBase):
            self._flags.append(step.change_flag())
        else:
            self._foreign.append((step, list(step.in_keys), list(step.out_keys)))  # type: ignore[arg-type]
        if isinstance(step, StepList):
            members = [member for _, member in step.named_steps()]
            self._members.append((step.module, list(members)))
            for member in members:
                steps.append(member)
                self._watch(member, steps)
