"""The program of a keyed module: its steps as calls between numbered values.

A sequence is resolved once. Nested sequences are flattened, every value gets a slot (so a key that
is overwritten has two). What may run that way is decided here: steps that can be called on bare
values, with keys that do not hold one another.
For anything else `resolve` returns None, and the sequence passes a container from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

from torch import nn

from kd_core import NestedKey
from kd_nn._dispatch import Inplace, keys_of
from kd_nn._keys import DISCARD, KeyFlow, Keys, in_order_of_entry, strictly_overlaps
from kd_nn._plan.invalidation import CHANGED_IN_TRACE, Dependency, is_patched, running_classes
from kd_nn._torch_private import is_watched, runs_as_its_class

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class Keyed(Protocol):
    """What every module with a form on values has."""

    in_keys: list[NestedKey]
    out_keys: list[NestedKey]
    out_keys_source: list[NestedKey]

    def _kd_fed_keys(self) -> Keys:
        """Return what the module is fed with, where it is."""

    def _kd_graph(self) -> KeyFlow:
        """Return which step reads and writes which keys."""

    def _kd_stored_keys(self) -> Keys:
        """Return the visible keys in the order in which a container gets them."""


def keyed(step: nn.Module) -> Keyed:
    """Return the same module, typed as one with keys."""
    return cast("Keyed", step)


class HoldsSteps(Protocol):
    """A sequence of keyed modules."""

    def _kd_named_steps(self) -> list[tuple[str, nn.Module]]: ...

    def _kd_scope(self) -> Scope | None: ...

    @property
    def _kd_fed(self) -> bool: ...


Path = tuple[str, ...]
Scope: TypeAlias = "tuple[int, Callable[[], Callable[[], None] | None]]"
"""How many steps run in it, and what enters it and returns what leaves it; None if in one."""
Values = dict[NestedKey, int]


class Call:
    """One step: which values it takes and makes.

    Attributes:
        step: The keyed module.
        path: The names of the step and of the sequences that hold it, outermost first.
        place: Index and name of the step, as messages say it.
        keys: Its `in_keys`; where it is fed, those of what it is fed with too.
        reads: The slot of each of these keys.
        writes: The slot of each of its outputs, None for one that is discarded.
        is_fed: Whether earlier steps write the values that it would draw; see `_kd_fed_keys`.
    """

    __slots__ = ("is_fed", "keys", "path", "place", "reads", "step", "writes")

    def __init__(
        self,
        step: nn.Module,
        path: Path,
        place: tuple[str, str],
        keys: Keys,
        reads: tuple[int, ...],
        writes: tuple[int | None, ...],
        is_fed: bool = False,
    ) -> None:
        self.step = step
        self.path = path
        self.place = place
        self.keys = keys
        self.reads = reads
        self.writes = writes
        self.is_fed = is_fed


class Program:
    """Calls in order, with the keys of the values that enter and leave.

    Attributes:
        inputs: Key and slot of each value that is read from outside.
        calls: The calls, in order.
        outputs: Key and slot of each value that is visible outside, in order.
        stored: The same in the order in which a container gets them.
        scopes: By its first call, where a scope ends, and what enters it; see `StepList._kd_scope`.
        tolerant: Whether a call whose input is missing is skipped; a slot is then a key.
        is_sequence: Whether the root is a sequence; it is not kept, since it keeps the program.
        containers: Every sequence inside the root whose steps the calls are.
    """

    __slots__ = (
        "calls",
        "containers",
        "inputs",
        "is_sequence",
        "outputs",
        "scopes",
        "stored",
        "tolerant",
    )

    def __init__(
        self,
        inputs: tuple[tuple[NestedKey, int], ...],
        calls: tuple[Call, ...],
        outputs: tuple[tuple[NestedKey, int], ...],
        stored: tuple[tuple[NestedKey, int], ...],
        tolerant: bool,
        is_sequence: bool,
        containers: tuple[nn.Module, ...],
        scopes: Mapping[int, Scope],
    ) -> None:
        self.scopes = scopes
        self.inputs = inputs
        self.calls = calls
        self.outputs = outputs
        self.stored = stored
        self.tolerant = tolerant
        self.is_sequence = is_sequence
        self.containers = containers


class Unresolvable(Exception):
    """A module has no program; never leaves this package."""


class _Resolver:
    def __init__(self, tolerant: bool) -> None:
        self.tolerant = tolerant
        self.inputs: dict[NestedKey, int] = {}
        self.calls: list[Call] = []
        self.containers: list[nn.Module] = []
        self.scopes: dict[int, Scope] = {}
        self.in_scope = False
        self.is_sequence = False
        self.count = 0

    def slot(self) -> int:
        self.count += 1
        return self.count - 1

    def read(self, key: NestedKey, scope: Values) -> int:
        if key not in scope:
            if strictly_overlaps(key, scope):
                raise Unresolvable
            if key not in self.inputs:
                if strictly_overlaps(key, self.inputs):
                    raise Unresolvable
                self.inputs[key] = self.slot()
            scope[key] = self.inputs[key]
        return scope[key]

    def write(self, key: NestedKey, scope: Values) -> int | None:
        if key == DISCARD:
            return None
        if strictly_overlaps(key, scope):
            raise Unresolvable
        if self.tolerant:
            return self.read(key, scope)
        scope[key] = self.slot()
        return scope[key]

    def enter(self, root: nn.Module, scope: Values, count: int | None = None) -> None:
        """Visit the root, or so many of its steps.

        Its own keys are not asked for, since they follow from this.
        """
        if not runs_on_values(root):
            raise Unresolvable
        if not is_sequence(root):
            self._call(root, (), (), scope)
            return
        self.is_sequence = True
        self._visit_steps(root, (), (), scope, count)

    def _visit_steps(
        self,
        root: nn.Module,
        path: Path,
        index: Path,
        values: Values,
        count: int | None = None,
        is_fed: bool = False,
    ) -> None:
        """Visit the steps of a sequence, also those whose outputs are not returned.

        The last step is fed where the sequence is.
        """
        if "_kd_listed" in root.__dict__:  # its keys are not those that it reads and writes
            raise Unresolvable
        sequence = cast("HoldsSteps", root)
        scope = None if self.in_scope else sequence._kd_scope()
        start, outer = len(self.calls), self.in_scope
        steps = sequence._kd_named_steps()
        is_fed = is_fed or sequence._kd_fed
        for idx, (name, step) in enumerate(steps):
            if scope is not None and idx in (0, scope[0]):
                self.in_scope = idx < scope[0]
                self.scopes[start] = (len(self.calls), scope[1])
            if idx == count:
                break
            if not runs_on_values(step) or inplace_of(step) not in (True, None):
                raise Unresolvable
            place = (*path, name), (*index, str(idx))
            fed = is_fed and idx == len(steps) - 1 and takes_values(step)
            if is_sequence(step):
                if self.tolerant or step.__dict__.get("partial_tolerant"):
                    raise Unresolvable
                self._visit_inside(step, *place, values, fed)
            else:
                self._call(step, *place, values, fed)
        self.in_scope = outer

    def _visit_inside(
        self, step: nn.Module, path: Path, index: Path, scope: Values, is_fed: bool
    ) -> None:
        self.containers.append(step)
        inner = dict(scope)
        self._visit_steps(step, path, index, inner, is_fed=is_fed)
        for key in keyed(step).out_keys:
            if key not in inner or strictly_overlaps(key, scope):
                raise Unresolvable
            scope[key] = inner[key]

    def _call(
        self, step: nn.Module, path: Path, index: Path, scope: Values, is_fed: bool = False
    ) -> None:
        keys = keyed(step)
        fed = keys._kd_fed_keys() if is_fed else ()
        read = (*keys.in_keys, *fed)
        reads = tuple(self.read(key, scope) for key in read)
        visible = set(keys.out_keys).difference(fed)
        writes = tuple(
            self.write(key, scope) if key in visible else None for key in keys.out_keys_source
        )
        place = ".".join(index), ".".join(path)
        self.calls.append(Call(step, path, place, read, reads, writes, is_fed))


def resolve_first(root: nn.Module, count: int) -> Program | None:
    """Return the program of the first steps of a sequence, or None if they have none.

    Its outputs are all that these steps show, whatever is selected.

    Args:
        root: A sequence.
        count: How many steps: less than all.
    """
    if root.__dict__.get("partial_tolerant") is True:
        return None
    resolver = _Resolver(tolerant=False)
    scope: Values = {}
    try:
        resolver.enter(root, scope, count)
    except Unresolvable:
        return None
    written = {slot for call in resolver.calls for slot in call.writes}
    outputs = tuple((key, slot) for key, slot in scope.items() if slot in written)
    inputs = tuple(resolver.inputs.items())
    return _program(resolver, inputs, outputs, outputs)


def resolve(root: nn.Module, in_keys: Keys, out_keys: Keys) -> Program | None:
    """Return the program of a keyed module, or None if it has none.

    Args:
        root: A keyed module, alone or a sequence.
        in_keys: Its keys, in the order in which values are to be given.
        out_keys: Its visible keys, in the order in which values are to be returned.

    Returns:
        The calls of all its steps.
    """
    resolver = _Resolver(root.__dict__.get("partial_tolerant") is True)
    scope: Values = {}
    try:
        resolver.enter(root, scope)
    except Unresolvable:
        return None
    written = {slot for call in resolver.calls for slot in call.writes}
    if any(scope.get(key) not in written for key in out_keys):
        return None
    outputs = tuple((key, scope[key]) for key in out_keys)
    stored = in_order_of_entry(stored_keys(root), out_keys)
    used = {slot for call in resolver.calls for slot in call.reads}
    ordered = [*in_keys, *(key for key in resolver.inputs if key not in in_keys)]
    inputs = ((key, resolver.inputs[key]) for key in ordered if key in resolver.inputs)
    return _program(
        resolver,
        tuple((key, slot) for key, slot in inputs if slot in used or resolver.tolerant),
        outputs,
        tuple((key, scope[key]) for key in stored),
    )


def _program(
    resolver: _Resolver,
    inputs: tuple[tuple[NestedKey, int], ...],
    outputs: tuple[tuple[NestedKey, int], ...],
    stored: tuple[tuple[NestedKey, int], ...],
) -> Program:
    """Return the calls that a resolver has found, with what enters and leaves."""
    return Program(
        inputs,
        tuple(resolver.calls),
        outputs,
        stored,
        resolver.tolerant,
        resolver.is_sequence,
        tuple(resolver.containers),
        {start: scope for start, scope in resolver.scopes.items() if scope[0] > start},
    )


def stored_keys(step: nn.Module) -> Keys:
    """Return the visible keys of a module in the order in which a container gets them.

    That is the order of the first write: a later one replaces the value in its place.
    """
    if hasattr(type(step), "_kd_stored_keys"):
        return keyed(step)._kd_stored_keys()
    return tuple([key for key in keys_of(step, "out_keys") if key != DISCARD])


def runs_on_values(step: object) -> bool:
    """Return whether a step can be called on bare values instead of a container.

    True for modules whose class gives `_kd_forward_values` no further from itself than `forward`,
    and whose instance was not patched, compiled on its own, or told to read missing entries as
    None.
    """
    return (
        isinstance(step, nn.Module)
        and getattr(step, "_kd_has_value_form", False) is True
        and not is_patched(type(step))
        and runs_as_its_class(step)
        and step.__dict__.get("strict") is not False
        and step.__dict__.get("get_kwargs") is None
    )


def takes_values(step: nn.Module) -> bool:
    """Return whether a step can be fed; see `_kd_fed_keys`."""
    return hasattr(type(step), "_kd_fed_keys") and bool(keyed(step)._kd_fed_keys())


def is_sequence(step: object) -> TypeIs[HoldsSteps]:
    """Return whether a module holds steps that run one after the other."""
    return hasattr(type(step), "_kd_named_steps")


def opens(step: nn.Module) -> bool:
    """Return whether a step is a sequence whose steps may run as those of the one around it."""
    return is_sequence(step) and runs_on_values(step) and inplace_of(step) in (True, None)


def is_observed(module: nn.Module) -> bool:
    """Return whether a hook sees the calls of a keyed module or of a step in it.

    Or whether what is compiled changes one of them.
    """
    if is_watched(module) or CHANGED_IN_TRACE in module.__dict__:
        return True
    steps = module._kd_named_steps() if is_sequence(module) else []
    return any(is_observed(step) for _, step in steps)


def inplace_of(module: nn.Module) -> Inplace:
    """Return where a module writes: what `inplace` says, if its class has the `forward` that asks.

    Another class may call something else `inplace`. A wrapper of torch has no such class, and hands
    on the attribute of what it wraps.
    """
    classes = running_classes(type(module))
    asks = "_kd_writes_by_inplace" in vars(classes[-1]) if classes else hasattr(module, "inplace")
    return cast("Inplace", module.inplace) if asks else True


# What a plan is, and why it did not run.
#
# Plans are written by other modules of this folder, which are loaded when the first one is made.


class Outcome:
    """Why a plan did not run."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


BUSY: Final = Outcome("this call must be interpreted")
STALE: Final = Outcome("something has changed")
UNPLANNED: Final = 8
"""How many calls take the general path before the first plan, which costs what it saves in these.

A module that is called less often, as in a test or in a search for settings, needs no plan.
"""
FREE_PLANS: Final = 20
WAIT: Final = 1000
"""After so many plans a module takes the general path for so many calls before the next one."""


def never(*_: object, **__: object) -> Outcome:
    return BUSY


class Plan:
    """The generated functions of one module.

    Attributes:
        container: Runs on a plain `TensorDict`; returns it, or why it did not run.
        tensors: Runs on tensors by position or keyword; returns the outputs, or why not.
        names: The names of its arguments, in order.
        dependency: What the functions depend on, if they look at a flag of their own.
    """

    __slots__ = ("container", "dependency", "names", "tensors")

    def __init__(
        self,
        container: Callable[..., object] = never,
        tensors: Callable[..., object] = never,
        names: tuple[str, ...] = (),
    ) -> None:
        self.container = container
        self.tensors = tensors
        self.names = names
        self.dependency: Dependency | None = None


NO_PLAN: Final = Plan()
