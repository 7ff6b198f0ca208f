"""What a sequence knows about its steps, and whether it still holds.

Resolving a sequence costs as much as hundreds of calls, so it is done once and kept until a key, a
step or the way a step runs has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core.extending import is_prefix
from kd_nn._dispatch.call_names import CallNames
from kd_nn._keys.graph import KeyGraph
from kd_nn._keys.specs import Keys
from kd_nn._modules.nodes import key_node
from kd_nn._modules.steps import StepList
from kd_nn._plan.invalidation import Flag, Flagged, depend_on, lists_in
from kd_nn._plan.outcome import Plan
from kd_nn._plan.program import is_watched, keyed, resolve

_ALWAYS: Final[Flag] = [True]
_TRIES: Final = 1000
"""How often an edit of another thread may come in between."""
_TRIES_COMPUTED: Final = 10
"""The same where a class of the user computes keys: it may give others each time it is asked."""


class Resolved:
    """The graph of a sequence, and the functions for dynamo, at one moment.

    Attributes:
        graph: Which step reads and writes what.
        in_keys: What the sequence reads from outside.
        out_keys: All that its steps write.
        visible: Those of them that are selected, or all.
        optional: Those of `in_keys` that no step requires.
        traced: The functions that dynamo inlines, if every step can be called on values.
        unsure: Empty while no edit was announced, and every edit is announced.
    """

    __slots__ = (
        "__weakref__",
        "_changed",
        "_computed",
        "_dependency",
        "_members",
        "graph",
        "in_keys",
        "optional",
        "out_keys",
        "traced",
        "unsure",
        "visible",
    )

    def __init__(self, sequence: StepList) -> None:
        self._changed: Flag = []
        self._members: list[tuple[nn.Module, list[nn.Module | None]]] = []
        self._computed: list[tuple[nn.Module, tuple[object, ...]]] = []
        # One that is made while tracing is not kept; and dynamo enters no lock.
        if not is_dynamo_compiling():
            # Before anything else is read: what another thread changes meanwhile is then seen.
            self._dependency = depend_on(sequence)
            self._changed = self._dependency.changed
            self._compare_steps(sequence)
        tolerant = sequence.partial_tolerant
        nodes = tuple(key_node(name, step, tolerant) for name, step in sequence._kd_named_steps())
        selected: Keys | None = sequence.__dict__.get("_kd_selected")
        graph = KeyGraph(nodes, selected)
        self.in_keys, self.out_keys = graph.inputs, graph.writes
        self.visible = self.out_keys if selected is None else selected
        self.graph, required = graph, graph.required
        self.optional = tuple(
            key for key in self.in_keys if not any(is_prefix(key, r) for r in required)
        )
        announced = all(_announces(holder) for holder, _ in self._members)
        self.unsure = self._changed if announced and not self._computed else _ALWAYS
        self.traced: Plan | None = None

    @property
    def is_computed(self) -> bool:
        """Whether classes of the user compute some of the keys."""
        return bool(self._computed)

    def is_current(self) -> bool:
        """Return whether nothing that it was made from has changed."""
        if is_dynamo_compiling():
            # dynamo of torch 2.10 compares no modules; `unsure` has a guard already.
            return not (self.unsure and self._changed)
        if self._changed:
            return False
        for holder, members in self._members:  # loops: a generator costs more than what it tests
            if [*holder._modules.values()] != members:
                return False
        return not self._computed or all(_asked(step) == was for step, was in self._computed)

    def _compare_steps(self, sequence: StepList) -> None:
        self._compare(self._compare_members(sequence.module))

    def _compare_members(self, holder: nn.Module) -> list[nn.Module | None]:
        members: list[nn.Module | None] = [*holder._modules.values()]
        self._members.append((holder, members))
        return members

    def _compare(self, steps: Iterable[nn.Module | None]) -> None:
        """Record what must be compared in steps: what may change without raising a flag."""
        for step in steps:
            if step is None:
                continue
            if getattr(type(step), "_kd_computes_keys", True):
                for holder in lists_in(step):  # it may read the public keys of what is inside
                    self._compare_members(holder)
                self._computed.append((step, _asked(step)))
            if isinstance(step, StepList):
                self._compare_steps(step)
            elif "_kd_in_spec" not in step.__dict__:  # it may say the keys of what is inside
                self._compare(each for each in step._modules.values() if hasattr(each, "in_keys"))

    def prepare(self, root: StepList) -> bool:
        """Return whether dynamo may inline the calls of a sequence; `traced` is made once."""
        if self.traced is None and self.is_current():
            program = resolve(root, self.in_keys, self.visible)
            if program is not None:
                from kd_nn._plan.dynamo import traced_plan  # what is not compiled needs none

                names, watched = CallNames(self.in_keys, "_"), _watch(root, self)
                self.traced = traced_plan(program, names, watched, self._changed, root)
        return self.traced is not None


def _watch(sequence: StepList, resolved: Resolved) -> Callable[[], bool]:
    """Return a function that tells whether a hook asks for the steps one by one."""
    owner, made = weakref.ref(sequence), weakref.ref(resolved)

    def watched() -> bool:
        root, resolved = owner(), made()
        if root is None or resolved is None or not resolved.is_current():
            return True
        return any(map(is_watched, _members(root)))

    return watched


def resolve_sequence(sequence: StepList) -> Resolved:
    """Return the graph of a sequence, all of one moment even if another thread changes steps."""
    for tries in range(_TRIES):
        resolved = Resolved(sequence)
        if resolved.is_current() or (tries >= _TRIES_COMPUTED and resolved.is_computed):
            break
        if is_compiling():  # the modules of an export are other objects whenever they are read
            break
    return resolved


def _announces(holder: nn.Module) -> bool:
    return isinstance(holder, Flagged) and holder._kd_announces_members


def _asked(step: nn.Module) -> tuple[object, ...]:
    """Return what a step answers that no assignment needs to announce."""
    keys = keyed(step)
    return list(keys.in_keys), list(keys.out_keys), getattr(step, "_kd_has_value_form", False)


def _members(sequence: StepList) -> Iterator[nn.Module]:
    """Yield a sequence, and all steps in it and in the sequences inside."""
    yield sequence
    for _, step in sequence._kd_named_steps():
        yield from _members(step) if isinstance(step, StepList) else (step,)
