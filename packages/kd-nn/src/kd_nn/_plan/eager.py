"""The eager plan: a keyed module as one generated function per way of calling it.

A call of a sequence of small modules spends more time around its tensor operations than in them:
`nn.Module.__call__`, the lookup of a parameter, a hop through a container. A plan leaves that out.
It is straight-line code, one local variable per value, that calls `forward` directly.

Each function begins with guards. `BUSY` means that this call must be interpreted: a hook, a tracer,
a subclass of tensor. `STALE` means that something the plan was made from has changed: the call is
interpreted, and a later one makes a new plan. Guards read dicts and lists that the modules change
in place; `invalidation` says what counts as a change. Plans are never copied or pickled.

The rows "tutorial Sequential" of the benchmarks compare it with the same `nn.Sequential`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType
from typing import Final, Protocol, cast

import torch
import torch.nn.functional as F  # as everywhere
from torch import nn

from kd_core import NestedKey, NonTensorDataBase, TensorDict, TensorDictBase, UnbatchedTensor
from kd_core.extending import assign_levels, assume_constant_result, is_exporting
from kd_nn._dispatch import MISSING, CallNames, anyone_skips
from kd_nn._keys import DISCARD, InKeySpec
from kd_nn._plan.codegen import Calls, Text, plain_module
from kd_nn._plan.invalidation import Dependency, Flag, depend_on, lists_in, running_classes
from kd_nn._plan.program import (
    BUSY,
    NO_PLAN,
    STALE,
    Path,
    Plan,
    Program,
    inplace_of,
    is_sequence,
    keyed,
    never,
    resolve,
    runs_on_values,
)
from kd_nn._torch_private import (
    GLOBAL_HOOKS,
    HOOKS,
    calls_of_modules,
    current_jit_trace,
    defines,
    is_called_plainly,
    reads_plainly,
)

# Modules of torch as expressions: what their `forward` does, without the calls around it.
#
# `nn.Module.__call__`, and the look-up of a parameter through `__getattr__`, are left out where
# nobody could tell; "What calls cost" in the benchmarks has both. An `nn.Sequential` becomes its
# members, one after the other. A form is used where the functions that it stands for are torch's
# own, as `_torch_private` tells them, and attributes are read where torch puts them; both are
# tested before each run. See `eager`.

PLACE: Final = "<x>"
"""Stands for the input in a line."""
SECOND: Final = "<y>"
"""Stands for the second input of a module that has two."""
_CLOSED: Final = ("torch.nn.modules.", "kd_nn.")
"""Where modules are defined whose `forward`, if they hold no others, calls nothing but torch."""
_GRU: Final = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


@dataclass(frozen=True, slots=True)
class Form:
    """What `forward` of a class of torch does.

    Attributes:
        line: The expression.
        parameters: The parameters that it reads.
        attributes: The other attributes that it reads.
    """

    line: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()


FORMS: Final[dict[type[nn.Module], Form]] = {
    nn.Linear: Form(
        f"_F.linear({PLACE}, parameters['weight'], parameters['bias'])", ("weight", "bias")
    ),
    nn.ReLU: Form(f"_F.relu({PLACE}, attributes['inplace'])", (), ("inplace",)),
    nn.Tanh: Form(f"_torch.tanh({PLACE})"),
    nn.Sigmoid: Form(f"_torch.sigmoid({PLACE})"),
    nn.Identity: Form(PLACE),
    nn.Flatten: Form(
        f"{PLACE}.flatten(attributes['start_dim'], attributes['end_dim'])",
        (),
        ("start_dim", "end_dim"),
    ),
    nn.GRUCell: Form(
        f"_torch.gru_cell({PLACE}, {SECOND}, {', '.join(f'parameters[{key!r}]' for key in _GRU)}) "
        f"if {PLACE}.dim() == {SECOND}.dim() == 2 else module.forward({PLACE}, {SECOND})",
        _GRU,
    ),
}
"""What `forward` of some of torch's modules does, on its current parameters.

Used only for these very classes, while their `forward` is torch's and no instance was patched or
parametrised.
"""


class Watch:
    """What must hold for modules to be run in line.

    Attributes:
        text: The function that is written.
        hooks: Expressions that are true if a module has a hook.
        checks: Expressions that are true if a module is not what it was.
        runs_others: Whether code of others runs, which may change what comes after it.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self.hooks: list[str] = []
        self.checks: list[str] = []
        self.runs_others = False
        self._seen: set[str] = set()
        text.names.update(_F=F, _torch=torch)  # what the forms use

    def opens(self, module: nn.Module, name: str) -> bool:
        """Return whether `forward` may be called directly, and write the test that it stays so."""
        if not is_called_plainly(module, *calls_of_modules()):
            return False
        own = self._class(type(module))
        attributes = self.text.name(f"{name}_attributes", module.__dict__)
        # Looked up anew: an empty dict may be assigned to drop hooks, and only keyed modules tell.
        self.hooks += [f"{attributes}[{kind!r}]" for kind in HOOKS]
        self._check(f"_type({name}) is not {own} or {name}.__dict__ is not {attributes}")
        self._check(f"{name}._compiled_call_impl is not None or '_call_impl' in {attributes}")
        return True

    def _check(self, expression: str) -> None:
        """Write a test, once."""
        if expression not in self._seen:
            self._seen.add(expression)
            self.checks.append(expression)

    def _class(self, kind: type[nn.Module]) -> str:
        """Name a class of wrapped modules, and test that they are called as torch calls them."""
        own = self.text.name_of("_K", kind)
        self._check(
            f"{own}.__call__ is not _call_of_modules or {own}._call_impl is not _impl_of_modules"
        )
        return own

    def holds(self, holder: nn.Module, name: str) -> None:
        """Name the members of a module, and test that they stay the same, in order."""
        members = self.text.name(f"{name}_members", list(holder._modules.values()))
        state = self.text.name(f"{name}_state", holder.__dict__)
        self._check(f"[*{state}['_modules'].values()] != {members}")

    def lines(self, module: nn.Module, name: str, inputs: int = 1) -> list[str] | None:
        """Return the expressions that do what `forward` does, one after the other.

        Args:
            module: A module that `opens`.
            name: Its name in the text.
            inputs: How many inputs it is given.

        Returns:
            Each takes the value of the one before; None if the module has no form.
        """
        if type(module) is nn.Sequential:
            return self._members(module, name) if inputs == 1 else None
        form = FORMS.get(type(module))
        if form is None or inputs != (2 if SECOND in form.line else 1):
            return None
        if not self._reads(module, name, form) or not self._stays(module, name):
            return None
        values = f"{name}_parameters"
        line = form.line.replace("parameters", values).replace("module.forward", f"{name}.forward")
        return [line.replace("attributes", f"{name}_attributes")]

    def _reads(self, module: nn.Module, name: str, form: Form) -> bool:
        """Return whether what a form reads is where torch puts it, and write the test of that."""
        kind, state = type(module), module.__dict__
        names = (*form.parameters, *form.attributes)
        if not names:
            return True
        if any(key not in module._parameters or key in state for key in form.parameters):
            return False
        if any(key not in state for key in form.attributes) or not reads_plainly(kind, names):
            return False
        own = self._class(kind)
        self.text.names["_getattribute"] = object.__getattribute__
        getter = self.text.name(f"{own}_getattr", kind.__getattr__)
        self._check(f"{own}.__getattr__ is not {getter}")
        self._check(f"{own}.__getattribute__ is not _getattribute")
        for base in kind.__mro__[: kind.__mro__.index(nn.Module) + 1]:
            known = f"{self.text.name_of('_B', base)}_dict"
            self.text.names[known] = base.__dict__
            for key in names:
                self._check(f"{key!r} in {known}")
        if form.parameters:
            values = self.text.name(f"{name}_parameters", module._parameters)
            self._check(f"{name}_attributes['_parameters'] is not {values}")
            for key in form.parameters:
                self._check(f"{key!r} not in {values} or {key!r} in {name}_attributes")
        return True

    def _members(self, module: nn.Sequential, name: str) -> list[str] | None:
        members = module._modules
        if None in members.values() or not defines(nn.Sequential, "__iter__"):
            return None
        if not self._stays(module, name):
            return None
        self.holds(module, name)
        self.text.names["_iterate"] = nn.Sequential.__iter__
        self._check(f"{self._class(nn.Sequential)}.__iter__ is not _iterate")
        lines: list[str] = []
        for place, (key, member) in enumerate(members.items()):
            inner = self.text.name(f"{name}_{place}", member)
            if self.runs_others:  # which may have added a hook, or replaced the member
                lines.append(f"{name}_state['_modules'][{key!r}]({PLACE})")
                continue
            opens = self.opens(member, inner)
            found = self.lines(member, inner) if opens else None
            if found is None:
                self.runs_others = not opens or not self.is_closed(member, inner)
                found = [f"{inner}.forward({PLACE})" if opens else f"{inner}({PLACE})"]
            lines += found
        return lines

    def is_closed(self, module: nn.Module, name: str) -> bool:
        """Return whether `forward` runs no code of others, and test that it stays so."""
        known = type(module).__module__.startswith(_CLOSED)
        return known and not module._modules and self._stays(module, name)

    def _stays(self, module: nn.Module, name: str) -> bool:
        """Return whether a module runs torch's `forward`, and write the test that it stays so."""
        kind = type(module)
        if not defines(kind, "forward") or "forward" in module.__dict__:
            return False
        self._check(f"'forward' in {name}_attributes")
        own = self._class(kind)
        self._check(f"{own}.forward is not {self.text.name(f'{own}_forward', kind.forward)}")
        return True


def make_plan(module: nn.Module) -> Plan:
    """Return the plan of a keyed module, `NO_PLAN` if it must be interpreted."""
    if not runs_on_values(module):
        return NO_PLAN
    # Before anything is read: what another thread changes meanwhile makes the plan stale.
    dependency = depend_on(module)
    plan = _plan_of(module, dependency)
    return NO_PLAN if dependency.changed else plan


def _plan_of(module: nn.Module, dependency: Dependency) -> Plan:
    keys = keyed(module)
    in_keys, out_keys = tuple(keys.in_keys), tuple(k for k in keys.out_keys if k != DISCARD)
    program = resolve(module, in_keys, out_keys)
    if program is None:
        return NO_PLAN
    names = CallNames(in_keys, "_")
    plan = functions_of(lambda: FastCalls(module, program, dependency.changed), names, module)
    plan.dependency = dependency
    return plan


def functions_of(calls: Callable[[], Calls], names: CallNames, module: nn.Module) -> Plan:
    """Return the functions of a module, each written by new `calls`."""
    container = calls().container_function(inplace_of(module))
    return Plan(container, calls().tensors_function(names) or never, names.names)


class FastCalls(Calls):
    """Calls of the very modules that were there when the plan was made, `forward` looked up late.

    `forward` is called without `nn.Module.__call__` around it, after a test that no hook, no
    tracer and no compiled form would have made a difference.

    Attributes:
        empty: Dicts and lists that change in place: whatever is in them must not be left out.
        checks: Expressions that are true if something is not what it was.
        again: By the call before which they are tested: what modules must be from there on. What
            runs before is code of others, which may add a hook, or replace a step.
    """

    def __init__(self, root: nn.Module, program: Program, changed: Flag) -> None:
        super().__init__(program)
        text = self.text
        self.root = root
        self._first = self.watch = Watch(text)
        self.empty: list[object] = [anyone_skips, *GLOBAL_HOOKS]
        self.checks = self.watch.checks
        self.checks.append(text.name("_changed", changed))
        self.again: dict[int, Watch] = {}
        self._members: list[str] = []
        self.classes: set[type] = set()
        self.opened: set[int] = set()
        self.forms: dict[int, list[str]] = {}
        self.runs_others: list[bool] = []
        text.names.update(_BUSY=BUSY, _STALE=STALE, _True=True)
        self._watch(root, "_root")
        self._watch_containers()
        for idx, call in enumerate(program.calls):
            if call.path:
                text.name(f"_S{idx}", call.step)
            if idx and self.watch.runs_others:
                self.watch = self.again[idx] = Watch(text)
            if plain_module(call.step):
                self._prepare(idx)
            else:
                self.watch.runs_others = True
            self.runs_others.append(self.watch.runs_others)

    def step(self, idx: int) -> str:
        """Return the name of the keyed module of call `idx`."""
        return f"_S{idx}" if self.program.calls[idx].path else "_root"

    def result(self, depth: int, idx: int, arguments: list[str]) -> str:
        """Return the expression that computes what call `idx` wraps; write what comes before it."""
        lines = self.forms.get(idx)
        if lines is None:
            return super().result(depth, idx, arguments)
        value, *others = arguments
        if others:  # the form of a module with two inputs
            return lines[0].replace(PLACE, value).replace(SECOND, others[0])
        for line in lines[:-1]:
            self.text.add(depth, f"_x = {line.replace(PLACE, value)}")
            value = "_x"
        return lines[-1].replace(PLACE, value) if lines else value

    def wrapped(self, idx: int) -> str:
        """Return the name of what call `idx` wraps, or of its `forward`."""
        module = self.program.calls[idx].step.__dict__.get("module")
        if module is not None:
            return self.text.name(f"_M{idx}", module)
        method = self.program.calls[idx].step.__dict__["method"]
        direct = method is None and idx in self.opened
        return f"_M{idx}.forward" if direct else f"_M{idx}"

    def write_guard(self) -> None:
        """Write the tests that nothing watches and nothing has changed."""
        text = self.text
        call, impl = calls_of_modules()
        text.names.update(
            _compiler=torch.compiler,
            _tracing=current_jit_trace,
            _Module=nn.Module,
            _call_of_modules=call,
            _impl_of_modules=impl,
            _owner=weakref.ref(self.root),
            _any=any,
            _empty=tuple(self.empty),
        )
        busy = ["_any(_empty)", *self._first.hooks, "_compiler._is_compiling_flag"]
        busy += ["_Module.__call__ is not _call_of_modules"]
        busy += ["_Module._call_impl is not _impl_of_modules", "_tracing()"]
        text.add(1, f"if {' or '.join(busy)}:")
        text.add(2, "return _BUSY")
        text.add(1, "try:")
        text.add(2, f"if _owner() is not _root or {' or '.join(self.checks)}:")
        text.add(3, "return _STALE")
        text.add(1, "except _KeyError:")
        text.add(2, "return _STALE")

    def write_input_test(self) -> None:
        """Write the test that every input is a plain tensor."""
        there = " and _v{} is not _MISSING" if self.program.tolerant else ""
        strange = [
            f"_v{slot}.__class__ is not _Tensor{there.format(slot)}"
            for _, slot in self.program.inputs
        ]
        if strange:
            self.text.add(1, f"if {' or '.join(strange)}:")
            self.text.add(2, "return _BUSY")

    def write_test_again(self, depth: int, idx: int) -> None:
        """Write the test before call `idx` that what has run has changed nothing that follows."""
        watch, text = self.again.get(idx), self.text
        if watch is None or not self.program.is_sequence:
            return
        end = next((start for start in self.again if start > idx), len(self.program.calls))
        steps = [*self.program.containers, *(c.step for c in self.program.calls[idx:end])]
        hooks = [getattr(step, kind) for step in steps for kind in HOOKS]
        empty = text.name(f"_empty{idx}", (anyone_skips, *GLOBAL_HOOKS, *hooks))
        text.names["_continued"] = partial(continued, self.program)
        tests = [f"_any({empty})", "_changed", *self._members, *watch.hooks, *watch.checks]
        tests += ["_Module.__call__ is not _call_of_modules"]
        tests += ["_Module._call_impl is not _impl_of_modules"]
        text.add(depth, "try:", f"    _other = {' or '.join(tests)}")
        text.add(depth, "except _KeyError:", "    _other = _True")
        text.add(depth, "if _other:", "    _step = -1")
        container = "_td" if self.in_container else "None"
        if self.in_scope:
            text.add(depth + 1, "if _leave is not None:", "    _leave()", "    _leave = None")
        text.add(depth + 1, f"return _continued(_root, {container}, _locals(), {idx})")

    def sees_scope(self, calls: range) -> bool:
        """Return whether some of the calls run code of others."""
        return any(self.runs_others[idx] for idx in calls)

    def write_assignment(self, depth: int) -> None:
        """Write that all outputs are stored at once, sorted by level here and not on each call."""
        levels = by_level(self.program.outputs)
        if levels is None:
            super().write_assignment(depth)
            return
        pairs = []
        for key, value in levels.items():
            if isinstance(value, int):
                pairs.append(f"{key!r}: _v{value}")
            else:
                below = ", ".join(f"{name!r}: _v{slot}" for name, slot in value.items())
                pairs.append(f"{key!r}: {{{below}}}")
        heads = tuple(key for key, value in levels.items() if not isinstance(value, int))
        self.text.names.update(_assign_levels=assign_levels)
        self.text.add(depth, f"_assign_levels(_td, {{{', '.join(pairs)}}}, {heads!r})")

    def _watch_containers(self) -> None:
        sequences = [self.root] if self.program.is_sequence else []
        for place, container in enumerate([*sequences, *self.program.containers]):
            holder = container._modules["module"]
            members = {} if holder is None else holder._modules
            name = f"_L{place}"
            if holder is not None:
                self.watch.holds(holder, name)
                self._members.append(self.checks[-1])
            for idx, member in enumerate(members.values()):
                if member is not None:
                    self._watch(member, f"{name}_{idx}")

    def _watch(self, module: nn.Module, name: str) -> None:
        """Write the tests of the hooks of a keyed module, and of what it does not announce."""
        self._watch_class(type(module))
        self._watch_properties(module, name)
        # These dicts stay the same: a keyed module tells when another one is assigned.
        self.empty += [getattr(module, kind) for kind in HOOKS]

    def _watch_class(self, kind: type) -> None:
        """Write the tests that nothing was assigned on a class that changes how it runs."""
        for base in running_classes(kind):
            if base in self.classes:
                continue
            own = self.text.name(f"_C{len(self.classes)}", base.__dict__)
            self.classes.add(base)
            self.checks.append(f"_len({own}) != {len(base.__dict__)}")
            for name, function in base._kd_defined.items():
                this = self.text.name(f"{own}_{name}", function)
                self.checks.append(f"{own}[{name!r}] is not {this}")

    def _watch_properties(self, module: nn.Module, name: str) -> None:
        """Write the tests of what a class of the user computes, without an assignment."""
        if getattr(type(module), "_kd_changes_by_assignment", False):
            return
        keys = keyed(module)
        if module is not self.root:
            self.text.name(name, module)
        if not is_sequence(module):  # it may read the public keys of what is inside
            for place, holder in enumerate(lists_in(module)):
                self.watch.holds(holder, f"{name}_list{place}")
        for what in ("in_keys", "out_keys", "out_keys_source"):
            now = self.text.name(f"{name}_{what}", list(getattr(keys, what)))
            self.checks.append(f"{name}.{what} != {now}")
        self.checks.append(f"{name}._kd_has_value_form is not _True")

    def _prepare(self, idx: int) -> None:
        """Name what a step wraps, and find out whether its `forward` can be called directly."""
        step, watch = self.program.calls[idx].step, self.watch
        kwargs = step.__dict__["method_kwargs"]
        if not kwargs:  # others are passed as they are at the time of the call
            watch.checks.append(self.text.name(f"_A{idx}", kwargs))
        module = step._modules.get("module")
        if module is None:
            watch.runs_others = not isinstance(step.__dict__.get("module"), BuiltinFunctionType)
            return
        name = self.text.name(f"_M{idx}", module)
        holder = self.text.name(f"_H{idx}", step._modules)
        watch.checks.append(f"{holder}['module'] is not {name}")
        if not watch.opens(module, name):
            watch.runs_others = True
            return
        self.opened.add(idx)
        spec = cast("InKeySpec", step._kd_in_spec)
        if spec.names is None and step.__dict__["method"] is None and not kwargs:
            lines = watch.lines(module, name, len(spec.reads))
            if lines is not None:
                self.forms[idx] = lines
                return
        watch.runs_others = not watch.is_closed(module, name)


class _Continues(Protocol):
    def _kd_continue_from(
        self,
        container: TensorDictBase | None,
        given: dict[NestedKey, object],
        made: dict[Path, tuple[object, ...]],
    ) -> object: ...


def continued(
    program: Program,
    root: _Continues,
    container: TensorDictBase | None,
    values: dict[str, object],
    idx: int,
) -> object:
    """Run the rest of a call step by step, since code that ran has changed what follows.

    Args:
        program: The program.
        root: The sequence.
        container: The container of the call, None for a call with tensors.
        values: The local variables of the function; None for those that nobody reads any more.
        idx: The first call that was not made.
    """
    named = {key: values[f"_v{slot}"] for key, slot in program.inputs}
    given = {key: v for key, v in named.items() if v is not None and v is not MISSING}
    made = {
        call.path: tuple(None if slot is None else values[f"_v{slot}"] for slot in call.writes)
        for call in program.calls[:idx]
    }
    return root._kd_continue_from(container, given, made)


def by_level(outputs: Sequence[tuple[NestedKey, int]]) -> dict[str, int | dict[str, int]] | None:
    """Return slots by key, those one level below a key in a dict.

    Returns:
        None where no key has two parts, or one has more, or the order of the keys would differ.
    """
    levels: dict[str, int | dict[str, int]] = {}
    for key, slot in outputs:
        head, *rest = cast("tuple[str, ...]", (key,) if isinstance(key, str) else key)
        last = next(reversed(levels), None)
        if len(rest) > 1 or (head in levels and (not rest or head != last)):
            return None
        if not rest:
            levels[head] = slot
            continue
        level = levels.setdefault(head, {})
        if isinstance(level, int):
            return None
        level[rest[0]] = slot
    return levels if any(isinstance(level, dict) for level in levels.values()) else None


# The calls of a sequence as dynamo should see them: straight-line, and little of it.
#
# Everything that dynamo traces costs compile time and leaves a guard to test on each call. These
# functions reach every module from the root, as `parameters()` does, so that an exported graph
# names its parameters after the sequence and not after whatever else holds them.


def traced_plan(
    program: Program,
    names: CallNames,
    watched: Callable[[], bool],
    changed: Flag,
    sequence: nn.Module,
) -> Plan:
    """Return the functions that dynamo inlines for a call of a sequence.

    Args:
        program: The calls to make.
        names: The argument names of the sequence.
        watched: Tells whether a hook asks for the steps one by one.
        changed: The flag that is raised when a step changes.
        sequence: The sequence; it is not kept.
    """
    # dynamo calls it while it traces, and leaves no guard: it does not guard hooks of modules
    # either. To trace one look-up per step and kind of hook took a seventh of a first call.
    watched = assume_constant_result(watched)
    return functions_of(lambda: TracedCalls(program, watched, changed), names, sequence)


class TracedCalls(Calls):
    """Calls of modules that are reached from the root, by `__call__`."""

    def __init__(self, program: Program, watched: Callable[[], bool], changed: Flag) -> None:
        super().__init__(program)
        self.text.names.update(_BUSY=BUSY, _changed=changed, _watched=watched)

    def write_guard(self) -> None:
        """Write the tests that nothing watches and nothing has changed."""
        self.text.add(1, "if _changed or _watched():", "    return _BUSY")

    def write_input_test(self) -> None:
        """Write the test that every input is there, and is what a step receives.

        What a container wraps reaches a step without its wrapper, which the long way opens. A
        step may make None, but where all inputs must be there it marks a missing one: no guard.
        """
        self.text.names["_wrappers"] = NonTensorDataBase, UnbatchedTensor
        for _, slot in self.program.inputs:
            absent = "" if self.program.tolerant else f"_v{slot} is None or "
            wrapped = f"isinstance(_v{slot}, _wrappers)"
            self.text.add(1, f"if {absent}{wrapped}:", "    return _BUSY")

    def unbatched(self) -> str:
        """Return the expression for a container that the compiled code makes.

        dynamo cannot guard that one of the function has the batch size of one that was traced.
        """
        return f"{self.text.name('_TensorDict', TensorDict)}()"

    def write_all(self) -> None:
        """Write all calls; what they raise has no note in compiled code."""
        self.write_holders()
        for idx, call in enumerate(self.program.calls):
            if plain_module(call.step) and not call.step.__dict__["method_kwargs"]:
                given = f"{self.step(idx)}.__dict__['method_kwargs']"
                self.text.add(1, f"if {given}:", "    return _BUSY")
        self.write_calls(1)

    def entered(self, entering: str, calls: range) -> str:
        """Return the expression that enters a scope.

        An export warns of what is written outside of its graph, so functions of a user find no
        scope there but one that the exporter has entered.
        """
        if not all(plain_module(self.program.calls[idx].step) for idx in calls):
            return entering
        self.text.names["_exporting"] = is_exporting
        return f"None if _exporting() else {entering}"

    def sees_scope(self, calls: range) -> bool:
        """Return whether some of the calls run code that is not torch's: a scope costs guards."""
        wrapped = [self.program.calls[idx].step.__dict__.get("module", "") for idx in calls]
        inside = [part for idx in calls for part in self.program.calls[idx].step.modules()]
        return any(map(callable, wrapped)) or not all(
            type(part).__module__.startswith(("torch.nn.modules.", "kd_nn.")) for part in inside
        )
