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

import weakref
from collections.abc import Callable
from typing import Final, TypeGuard, cast

import torch
from torch import nn

from kd_nn._dispatch.call_names import CallNames
from kd_nn._dispatch.entries import Inplace, destination
from kd_nn._dispatch.skip_existing import anyone_skips
from kd_nn._keys.specs import InKeySpec
from kd_nn._plan.codegen import Calls, OutputNote, Text, plain_module
from kd_nn._plan.inlining import CALL, HOOKS, IMPL, PLACE, Watch
from kd_nn._plan.invalidation import Flagged, flags_of, running_classes
from kd_nn._plan.program import Program, is_sequence, keyed, resolve, runs_on_values


class Outcome:
    """Why a plan did not run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


BUSY: Final = Outcome("busy")
STALE: Final = Outcome("stale")
FREE_PLANS: Final = 20
WRITTEN: Final = (True, None, False, "empty")
"""The values of `inplace` that a plan knows."""
WAIT: Final = 1000
"""After so many plans a module goes the long way for so many calls before it gets another one."""


class Plan:
    """The generated functions of one module.

    Attributes:
        container: Runs on a plain `TensorDict`; returns it, or why it did not run.
        tensors: Runs on tensors by position or keyword; returns the outputs, or why not.
    """

    __slots__ = ("container", "tensors")

    def __init__(self, container: Callable[..., object], tensors: Callable[..., object]) -> None:
        self.container, self.tensors = container, tensors


def _never(*_: object, **__: object) -> Outcome:
    return BUSY


NO_PLAN: Final = Plan(_never, _never)


def make_plan(module: nn.Module) -> Plan:
    """Return the plan of a keyed module, `NO_PLAN` if it must be interpreted."""
    if not runs_on_values(module):
        return NO_PLAN
    # Taken before anything is read: what another thread changes meanwhile makes the plan stale.
    flags = {member: member.change_flag() for member in module.modules() if _has_flag(member)}
    plan = _plan_of(module)
    return NO_PLAN if any(m.change_flag() is not flag for m, flag in flags.items()) else plan


def _has_flag(module: nn.Module) -> TypeGuard[Flagged]:
    return isinstance(module, Flagged)


def _plan_of(module: nn.Module) -> Plan:
    keys = keyed(module)
    in_keys, out_keys = tuple(keys.in_keys), tuple(k for k in keys.out_keys if k != "_")
    program = resolve(module, keys.key_graph(), in_keys, out_keys)
    if program is None:
        return NO_PLAN
    inplace = module.__dict__.get("inplace", True)
    container: Callable[..., object] = _never
    if inplace in WRITTEN:
        container = _container_function(module, program, inplace)
    names = CallNames(in_keys, "_")
    if not names.are_parameters or any(name.startswith("_") for name in names.names):
        return Plan(container, _never)
    return Plan(container, _tensors_function(module, program, names))


def _container_function(
    module: nn.Module, program: Program, inplace: Inplace
) -> Callable[..., object]:
    text = Text()
    text.add(0, "def _call(_root, _td):")
    calls = FastCalls(module, program, text)
    calls.write_guard()
    for key, slot in program.inputs:
        # A missing entry is not a tensor: the test below finds it. `get` is the fastest read.
        default = ", _MISSING" if program.tolerant else ""
        text.add(1, f"_v{slot} = _td.get({key!r}{default})")
    calls.write_input_test()
    calls.write_like(1, "_td")
    calls.write_all(1)
    write_container_call(program, text, inplace)
    return text.function("_call")


def _tensors_function(
    module: nn.Module, program: Program, names: CallNames
) -> Callable[..., object]:
    text = Text()
    parameters = "".join(f", {name}=_MISSING" for name in names.names)
    text.add(0, f"def _call(_root, /{parameters}):")
    calls = FastCalls(module, program, text)
    calls.write_guard()
    given = dict(zip(names.keys, names.names, strict=True))
    for key, slot in program.inputs:
        text.add(1, f"_v{slot} = {given.get(key, '_MISSING')}")
    calls.write_input_test()
    calls.write_like(1, None)
    calls.write_all(1)
    write_tensor_outputs(program, text)
    return text.function("_call")


def write_container_call(program: Program, text: Text, inplace: Inplace) -> None:
    """Write that the outputs are stored, all or nothing, and that their container is returned.

    Args:
        program: The calls that made the outputs.
        text: The function that is written; `_td` is the container of the inputs.
        inplace: Which container is written; see `destination`.
    """
    if inplace not in (True, None):
        text.name("_destination", destination)
        text.add(1, f"_td = _destination(_td, {inplace!r}, None)")
    depth = 1
    if program.is_sequence:  # the plan of one module must not hold its program, which holds it
        text.name("_note_output", OutputNote(program))
        text.add(1, "try:")
        depth = 2
    if program.tolerant:
        text.add(depth, "_out = {}")
        for key, slot in program.outputs:
            text.add(depth, f"if _v{slot} is not _MISSING:")
            text.add(depth + 1, f"_out[{key!r}] = _v{slot}")
        text.add(depth, "_td.assign(_out)")
    elif len(program.outputs) == 1:
        ((key, slot),) = program.outputs
        text.add(depth, f"_td.set({key!r}, _v{slot})")
    else:
        pairs = ", ".join(f"{key!r}: _v{slot}" for key, slot in program.outputs)
        text.add(depth, f"_td.assign({{{pairs}}})")
    if program.is_sequence:
        text.add(1, "except _Exception as _error:", "    _note_output(_error, _td, _locals())")
        text.add(2, "raise")
    text.add(1, "return _td")


def write_tensor_outputs(program: Program, text: Text) -> None:
    """Write that the outputs are returned: one value, or a tuple."""
    outputs = [f"_v{slot}" for _, slot in program.outputs]
    if program.tolerant:
        outputs = [f"(None if {value} is _MISSING else {value})" for value in outputs]
    text.add(1, f"return {outputs[0] if len(outputs) == 1 else '(' + ', '.join(outputs) + ')'}")


class FastCalls(Calls):
    """Calls of the very modules that were there when the plan was made, `forward` looked up late.

    `forward` is called without `nn.Module.__call__` around it, after a test that no hook, no
    tracer and no compiled form would have made a difference.

    Attributes:
        empty: Dicts and lists that change in place: whatever is in them must not be left out.
        checks: Expressions that are true if something is not what it was.
    """

    def __init__(self, root: nn.Module, program: Program, text: Text) -> None:
        super().__init__(program, text)
        self.root = root
        self.watch = Watch(text)
        self.empty: list[object] = [anyone_skips, *_global_hooks()]
        self.checks = self.watch.checks
        self.classes: set[type] = set()
        self.opened: set[int] = set()
        self.forms: dict[int, list[str]] = {}
        text.names.update(_BUSY=BUSY, _STALE=STALE, _True=True)
        self._watch(root, "_root")
        self._watch_containers()
        for idx, call in enumerate(program.calls):
            if call.path:
                text.name(f"_S{idx}", call.step)
            if plain_module(call.step):
                self._prepare(idx)

    def step(self, idx: int) -> str:
        """Return the name of the keyed module of call `idx`."""
        return f"_S{idx}" if self.program.calls[idx].path else "_root"

    def result(self, depth: int, idx: int, arguments: list[str]) -> str:
        """Return the expression that computes what call `idx` wraps; write what comes before it."""
        lines = self.forms.get(idx)
        if lines is None:
            return super().result(depth, idx, arguments)
        value = arguments[0]
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
        text.names.update(
            _compiler=torch.compiler,
            _tracing=torch._C._get_tracing_state,
            _Module=nn.Module,
            _call_of_modules=CALL,
            _impl_of_modules=IMPL,
            _owner=weakref.ref(self.root),
            _any=any,
            _empty=tuple(self.empty),
        )
        busy = ["_any(_empty)", *self.watch.hooks, "_compiler._is_compiling_flag"]
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
        strange = [f"_v{slot}.__class__ is not _Tensor" for _, slot in self.program.inputs]
        if self.program.tolerant:
            slots = [slot for _, slot in self.program.inputs]
            strange = [
                f"{test} and _v{slot} is not _MISSING"
                for test, slot in zip(strange, slots, strict=True)
            ]
        if strange:
            self.text.add(1, f"if {' or '.join(strange)}:")
            self.text.add(2, "return _BUSY")

    def _watch_containers(self) -> None:
        sequences = [self.root] if self.program.is_sequence else []
        for place, container in enumerate([*sequences, *self.program.containers]):
            holder = container._modules["module"]
            members = {} if holder is None else holder._modules
            name = f"_L{place}"
            if holder is not None:
                self.watch.holds(holder, name)
            for idx, member in enumerate(members.values()):
                if member is not None:
                    self._watch(member, f"{name}_{idx}")

    def _watch(self, module: nn.Module, name: str) -> None:
        """Write the tests of the hooks of a keyed module, and of the change flags inside it."""
        inside = flags_of(module)
        flags = inside[:1] if is_sequence(module) else inside
        for idx, flag in enumerate(flags):
            self.checks.append(self.text.name(f"{name}_changed{idx}", flag))
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
            for name, function in base.defined.items():
                this = self.text.name(f"{own}_{name}", function)
                self.checks.append(f"{own}[{name!r}] is not {this}")

    def _watch_properties(self, module: nn.Module, name: str) -> None:
        """Write the tests of what a class of the user computes, without an assignment."""
        if getattr(type(module), "changes_by_assignment", False):
            return
        keys = keyed(module)
        if module is not self.root:
            self.text.name(name, module)
        for what in ("in_keys", "out_keys", "out_keys_source"):
            now = self.text.name(f"{name}_{what}", list(getattr(keys, what)))
            self.checks.append(f"{name}.{what} != {now}")
        self.checks.append(f"{name}.has_value_form is not _True")

    def _prepare(self, idx: int) -> None:
        """Name what a step wraps, and find out whether its `forward` can be called directly."""
        step = self.program.calls[idx].step
        kwargs = step.__dict__["method_kwargs"]
        if not kwargs:  # others are passed as they are at the time of the call
            self.checks.append(self.text.name(f"_A{idx}", kwargs))
        module = step._modules.get("module")
        if module is None:
            return
        name = self.text.name(f"_M{idx}", module)
        holder = self.text.name(f"_H{idx}", step._modules)
        self.checks.append(f"{holder}['module'] is not {name}")
        if not self.watch.opens(module, name):
            return
        self.opened.add(idx)
        spec = cast("InKeySpec", step.spec)
        one = spec.names is None and len(spec.reads) == 1
        if one and step.__dict__["method"] is None and not kwargs:
            lines = self.watch.lines(module, name)
            if lines is not None:
                self.forms[idx] = lines


def _global_hooks() -> list[object]:
    return [getattr(nn.modules.module, f"_global{kind}") for kind in HOOKS]
