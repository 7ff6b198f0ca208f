"""What a sequence knows about its steps, and whether it still holds.

Resolving a sequence costs as much as hundreds of calls, so it is done once and kept until a key, a
step or the way a step runs has changed.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from kd_core.extending import assume_constant_result, is_prefix
from kd_nn._dispatch.call_names import CallNames
from kd_nn._keys.graph import KeyGraph
from kd_nn._keys.specs import Keys
from kd_nn._modules.base import key_node
from kd_nn._modules.steps import StepList
from kd_nn._plan.dynamo import traced_plan
from kd_nn._plan.eager import Plan
from kd_nn._plan.invalidation import flags_of
from kd_nn._plan.program import is_watched, keyed, resolve


@dataclass(slots=True)
class Dependencies:
    """What the keys of a sequence were made from, and whether it is still the same.

    Made before anything else is read: what another thread changes meanwhile is then seen later.
    """

    flags: list[list[bool]] = field(default_factory=list)
    _members: list[tuple[nn.Module, list[nn.Module]]] = field(default_factory=list)
    _computed: list[tuple[nn.Module, tuple[object, ...]]] = field(default_factory=list)

    @classmethod
    def of(cls, sequence: StepList) -> "Dependencies":
        """Collect what a sequence depends on."""
        found = cls()
        found._add(sequence)
        return found

    def are_current(self) -> bool:
        """Return whether nothing has changed."""
        if any(self.flags):
            return False
        if torch.compiler.is_dynamo_compiling():
            return True
        for holder, members in self._members:
            if list(holder._modules.values()) != members:
                return False
        return all(_asked(step) == answers for step, answers in self._computed)

    def _add(self, step: nn.Module) -> None:
        if not isinstance(step, StepList):
            self.flags += flags_of(step)
            if not getattr(type(step), "changes_by_assignment", False):
                self._computed.append((step, _asked(step)))
            return
        self.flags.append(step.change_flag())
        members = [member for _, member in step.named_steps()]
        self._members.append((step.module, members))
        for member in members:
            self._add(member)


def _asked(step: nn.Module) -> tuple[object, ...]:
    """Return what a step answers that no assignment needs to announce."""
    keys = keyed(step)
    return list(keys.in_keys), list(keys.out_keys), getattr(step, "has_value_form", False)


@dataclass(slots=True, weakref_slot=True)
class Resolved:
    """The graph of a sequence, and the functions for dynamo, at one moment.

    Attributes:
        graph: Which step reads and writes what.
        in_keys: What the sequence reads from outside.
        out_keys: All that its steps write.
        live: The steps that the visible outputs need, and which of their keys.
        dependencies: What all this was made from.
        prepare: Makes `traced`, once; returns whether dynamo may use it. dynamo runs it as it is,
            since a function made of text cannot be traced.
        traced: The functions that dynamo inlines, if every step can be called on values.
        optional: Those of `in_keys` that no live step requires.
    """

    graph: KeyGraph
    in_keys: Keys
    out_keys: Keys
    live: dict[int, Keys]
    dependencies: Dependencies
    optional: Keys
    prepare: Callable[[], bool] = field(init=False)
    traced: Plan | None = None

    @classmethod
    def of(cls, sequence: StepList) -> "Resolved":
        """Resolve a sequence."""
        dependencies = Dependencies.of(sequence)
        tolerant = sequence.__dict__.get("partial_tolerant") is True
        nodes = tuple(key_node(name, step, tolerant) for name, step in sequence.named_steps())
        graph = KeyGraph(nodes, sequence.__dict__.get("_selected"))
        live, needs = graph.trace_back(graph.outputs)
        if graph.out_keys is not None:
            graph = graph.restrict(tuple(live))
        required = [key for key, must in needs.items() if must]
        inputs = graph.inputs
        optional = tuple(key for key in inputs if not any(is_prefix(key, r) for r in required))
        found = cls(graph, inputs, graph.writes, live, dependencies, optional)
        found._prepare_later(sequence)
        return found

    def _prepare_later(self, sequence: StepList) -> None:
        owner, made = weakref.ref(sequence), weakref.ref(self)

        def prepare() -> bool:
            root, resolved = owner(), made()
            if root is None or resolved is None:
                return False
            if resolved.traced is None and resolved.dependencies.are_current():
                resolved._make_traced(root)
            return resolved.traced is not None

        self.prepare = assume_constant_result(prepare)

    def _make_traced(self, sequence: StepList) -> None:
        program = resolve(sequence, self.graph, self.in_keys, self.graph.outputs)
        if program is None:
            return
        owner = weakref.ref(sequence)
        current = self.dependencies.are_current

        def watched() -> bool:
            root = owner()
            return root is None or any(map(is_watched, _members(root))) or not current()

        names, flags = CallNames(self.in_keys, "_"), self.dependencies.flags
        self.traced = traced_plan(program, names, watched, flags, sequence)


def _members(sequence: StepList) -> Iterator[nn.Module]:
    """Yield a sequence, and all steps in it and in the sequences inside."""
    yield sequence
    for _, step in sequence.named_steps():
        yield from _members(step) if isinstance(step, StepList) else (step,)
