"""The two plans of a keyed module, and the generator that writes both as Python text.

Both are straight-line functions over numbered values: the *eager plan*, and the *dynamo plan* for
what dynamo traces. Plans are never copied or pickled.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType
from typing import ClassVar, Final, Protocol, cast

import torch
import torch.nn.functional as F  # as everywhere
from torch import Tensor, nn

from kd_core import (
    Locked,
    NestedKey,
    NonTensorDataBase,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    unravel_key_to_tuple,
)
from kd_core.extending import assign_levels, is_exporting
from kd_nn._dispatch import (
    MISSING,
    CallNames,
    Inplace,
    add_call_note,
    add_output_note,
    add_step_note,
    anyone_skips,
    destination,
    fitted,
)
from kd_nn._keys import DISCARD, InKeySpec, any_nested, strictly_overlaps
from kd_nn._plan.invalidation import Dependency, Flag, depend_on, lists_in, running_classes
from kd_nn._plan.program import (
    BUSY,
    NO_PLAN,
    STALE,
    Call,
    Path,
    Plan,
    Program,
    inplace_of,
    is_sequence,
    keyed,
    never,
    resolve,
    resolve_first,
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

# Writing the calls of a program as Python text.
#
# A value is a local variable, a call is a line or two. Programs of the same shape have the same
# text, so compiled code is cached by text; what differs is in the namespace of the function. Every
# name in the text begins with an underscore, builtins too, so that an argument may have any other
# name.


_NAMES: dict[str, object] = {
    "_Exception": Exception,
    "_KeyError": KeyError,
    "_MISSING": MISSING,
    "_Tensor": Tensor,
    "_isinstance": isinstance,
    "_len": len,
    "_locals": locals,
    "_tuple": tuple,
    "_type": type,
}


class Text:
    """The lines of a function and what the names in them mean."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, object] = dict(_NAMES)
        self._shared: list[tuple[str, object]] = []

    def add(self, depth: int, *lines: str) -> None:
        """Append lines at an indentation depth."""
        self.lines += ["    " * depth + line for line in lines]

    def name(self, name: str, meaning: object) -> str:
        """Assign a meaning to a name and return the name."""
        self.names[name] = meaning
        return name

    def name_of(self, prefix: str, meaning: object) -> str:
        """Return the name of something that has one name wherever it is used."""
        for name, known in self._shared:
            if known is meaning:
                return name
        name = self.name(f"{prefix}{len(self._shared)}", meaning)
        self._shared.append((name, meaning))
        return name

    def function(self, name: str) -> Callable[..., object]:
        """Define the function whose text this is."""
        scope = dict(self.names)
        exec(_compile("\n".join(self.lines)), scope)
        # Taken out: a function that its own globals hold is freed by a garbage collection only.
        return cast("Callable[..., object]", scope.pop(name))


@functools.lru_cache(maxsize=512)
def _compile(text: str) -> CodeType:
    return compile(text, "<kd_nn plan>", "exec")


class Calls:
    """How a program is written: a guard, the inputs, the calls, and what becomes of the outputs.

    Steps are looked up in `_root`, and called. A plan says what its guard and its inputs must
    fulfil; it is used for one function.

    Attributes:
        device: How the device of a container is read.
        batch: How its batch size is read.
        runs: Whether it runs as it is written: it clears what no later call reads, and keeps the
            number of the call for notes on errors.
    """

    device: ClassVar[str] = "device"
    batch: ClassVar[str] = "batch_size"
    runs: ClassVar[bool] = True

    def __init__(self, program: Program) -> None:
        self.program = program
        self.text = Text()
        self.absent = "_MISSING" if program.tolerant else "None"
        self.checks_batch = False
        self.in_container = False
        self._like = "_like"
        self._holders: dict[Path, str] = {}
        self._dying = last_reads(program)
        self._stored = last_writes(program)
        self._moved: set[int] = set()
        self.in_scope = False

    def container_function(self, inplace: Inplace) -> Callable[..., object]:
        """Return the function that runs on a container and returns the one that was written.

        Args:
            inplace: Which container is written; see `destination`.
        """
        text, program = self.text, self.program
        self.in_container = True
        text.add(0, "def _call(_root, _td):")
        self.write_guard()
        self.write_reads()
        self._write_body("_td")
        if inplace not in (True, None):
            text.name("_destination", destination)
            made = f"_destination(_source, {inplace!r}, None)"
            # Of a sequence it gets what the input would get: see `write_apart`.
            text.add(1, "_source = _td", f"_fresh = {self.is_fresh()}")
            text.add(1, f"_td = {made} if _fresh else {self.apart()}")
        self.write_results(inplace)
        if inplace not in (True, None) and program.is_sequence:
            text.names.update(_dict=dict, _TensorDict=TensorDict)
            apart = "_td" if inplace == "empty" else "_TensorDict(_dict(_td.items()))"
            text.add(1, f"return _td if _fresh else {apart}")
        else:
            text.add(1, "return _td")
        return text.function("_call")

    def is_fresh(self) -> str:
        """Return the expression for whether nothing that the input holds matters to the result."""
        return str(not self.program.is_sequence)

    def apart(self) -> str:
        """Return the expression of what is written: a part of the input, in its order."""
        heads = {unravel_key_to_tuple(key)[0] for key, _ in self.program.stored}
        self.text.name("_heads", frozenset(heads))
        return "_td.select(*[_key for _key in _td.keys() if _key in _heads]).copy()"

    def write_results(self, inplace: Inplace) -> None:
        """Write the outputs into the container, with a note on what it refuses."""
        text, program = self.text, self.program
        if program.is_sequence:  # the plan of one module must not hold its program, which holds it
            text.name("_note_output", partial(_note_output, program))
            text.add(1, "try:")
            self._write_outputs(2)
            text.add(1, "except _Exception as _error:", "    _note_output(_error, _td, _locals())")
            text.add(2, "raise")
        else:
            text.name("_note_own", add_output_note)
            text.add(1, "try:")
            self._write_outputs(2)
            source = "_td" if inplace in (True, None) else "_source"
            given = ", ".join(f"{key!r}: {source}.get({key!r}, None)" for key, _ in program.inputs)
            text.add(1, "except _Exception as _error:")
            text.add(2, f"_note_own(_error, _root, {{{given}}})", "raise")

    def tensors_function(self, names: CallNames) -> Callable[..., object] | None:
        """Return the function of tensors by position or keyword, which returns the outputs.

        Args:
            names: The names of the arguments; None is returned where a function cannot have them,
                or an input is only a part of an argument.
        """
        if not names.are_parameters or any(name.startswith("_") for name in names.names):
            return None
        given = dict(zip(names.keys, names.names, strict=True))
        if any(strictly_overlaps(key, given) for key, _ in self.program.inputs):
            return None
        text = self.text
        parameters = "".join(f", {name}={self.absent}" for name in names.names)
        text.add(0, f"def _call(_root, /{parameters}):")
        self.write_guard()
        for key, slot in self.program.inputs:
            text.add(1, f"_v{slot} = {given.get(key, self.absent)}")
        self._write_body(None)
        outputs = [f"_v{slot}" for _, slot in self.program.outputs]
        if self.program.tolerant:
            outputs = [f"(None if {value} is _MISSING else {value})" for value in outputs]
        text.add(1, f"return {outputs[0] if len(outputs) == 1 else '(' + ', '.join(outputs) + ')'}")
        return text.function("_call")

    def write_guard(self) -> None:
        """Write the tests that the function may run at all."""
        raise NotImplementedError

    def write_test_again(self, depth: int, idx: int) -> None:
        """Write a test before call `idx` that what has run has changed nothing that follows."""

    def write_reads(self) -> None:
        """Write that the inputs are read from the container."""
        default = ", _MISSING" if self.program.tolerant else ""  # without one, `get` is fastest
        for key, slot in self.program.inputs:
            self.text.add(1, f"_v{slot} = _td.get({key!r}{default})")

    def write_store(self, depth: int, key: NestedKey, value: str) -> None:
        """Write that the only output is stored."""
        if isinstance(key, str):
            self.text.add(depth, f"_td[{key!r}] = {value}")
        else:
            self.text.add(depth, f"_td.set({key!r}, {value})")

    def write_input_test(self) -> None:
        """Write the tests that the inputs are what the calls can work with."""
        raise NotImplementedError

    def unbatched(self) -> str:
        """Return the expression for a container without a batch size."""
        return self.text.name("_like", TensorDict())

    def _write_body(self, container: str | None) -> None:
        self.write_input_test()
        self._write_like(container)
        self.write_all()

    def _write_outputs(self, depth: int) -> None:
        """Write that the outputs are stored, all or nothing."""
        text, outputs = self.text, self.program.stored
        if self.program.tolerant:
            text.add(depth, "_out = {}")
            for key, slot in outputs:
                text.add(depth, f"if _v{slot} is not _td.get({key!r}, _MISSING):")
                text.add(depth + 1, f"_out[{key!r}] = _v{slot}")
            text.add(depth, "_td.assign(_out)")
        elif len(outputs) == 1:
            ((key, slot),) = outputs
            self.write_store(depth, key, f"_v{slot}")
        else:
            self._write_assignment(depth)

    def _write_assignment(self, depth: int) -> None:
        """Write that all outputs are stored at once, by level."""
        levels = by_level(self.program.stored)
        if levels is None:
            pairs = [f"{key!r}: _v{slot}" for key, slot in self.program.stored]
            self.text.add(depth, f"_td.assign({{{', '.join(pairs)}}})")
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

    def write_holders(self) -> None:
        """Write that the dicts in which the steps are found get names: each is looked up once."""
        for call in self.program.calls:
            for end in range(len(call.path)):
                head = call.path[:end]
                if head not in self._holders:
                    above = f"{self._holders[head[:-1]]}[{head[-1]!r}]" if head else "_root"
                    name = self._holders[head] = f"_s{len(self._holders)}"
                    self.text.add(1, f"{name} = {above}._modules['module']._modules")

    def step(self, idx: int) -> str:
        """Return the expression for the keyed module of call `idx`."""
        path = self.program.calls[idx].path
        return f"{self._holders[path[:-1]]}[{path[-1]!r}]" if path else "_root"

    def wrapped(self, idx: int) -> str:
        """Return the expression for what the keyed module of call `idx` wraps."""
        inner = self.program.calls[idx].step._modules.get("module")
        holder = "__dict__" if inner is None else "_modules"
        return f"{self.step(idx)}.{holder}['module']"

    def result(self, depth: int, idx: int, arguments: list[str]) -> str:
        """Return the expression that calls what call `idx` wraps."""
        step = self.program.calls[idx].step
        method = step.__dict__["method"]
        if step.__dict__["method_kwargs"]:
            arguments = [*arguments, f"**{self.step(idx)}.__dict__['method_kwargs']"]
        callee = self.wrapped(idx) + ("" if method is None else f".{method}")
        return f"{callee}({', '.join(arguments)})"

    def _write_like(self, container: str | None) -> None:
        """Write which container the outputs of the calls must fit: none has no batch size."""
        text = self.text
        text.names.update(_fitted=fitted)
        if container is None:
            self._like = self.unbatched()
            return
        text.add(1, f"_like = {container}")
        read = {slot for call in self.program.calls for slot in call.reads}
        self._moved = read.difference(slot for _, slot in self.program.inputs)
        if self._moved:
            text.add(1, f"_device = _like.{self.device}")
        made = {(slot, idx) for idx, call in enumerate(self.program.calls) for slot in call.writes}
        self.checks_batch = any(slot is not None for slot, _ in made - self._stored)
        if self.checks_batch:
            text.add(1, f"_batch = _like.{self.batch}", "_rank = _len(_batch)")

    def write_call(self, depth: int, idx: int) -> None:
        """Write call `idx`, skipped where the program tolerates missing inputs."""
        call, text = self.program.calls[idx], self.text
        if self.program.tolerant and call.reads:
            there = " and ".join(f"_v{slot} is not _MISSING" for slot in call.reads)
            text.add(depth, f"if {there}:")
            depth += 1
        if self.runs:
            text.add(depth, f"_step = {idx}")
        targets = ["_o" if w is None else f"_v{w}" for w in call.writes]
        discards = "_o" in targets
        if plain_module(call.step):
            self._write_plain(depth, idx, targets)
        else:
            left = "".join(f"{target}, " for target in targets)
            values = ", ".join(f"_v{slot}" for slot in call.reads)
            form = "_kd_forward_fed" if call.is_fed else "_kd_forward_values"
            right = f"{self.step(idx)}.{form}({values})"
            text.add(depth, f"{left}= {right}" if left else right)
        if self.program.is_sequence:
            self._write_fits(depth, idx)
        if not self.runs:
            return
        for slot in self._dying[idx]:
            text.add(depth, f"_v{slot} = None")
        if discards:
            text.add(depth, "_o = None")

    def _write_fits(self, depth: int, idx: int) -> None:
        """Write that outputs are what a container would hold, as when steps are interpreted.

        Plain tensors that become visible are checked when they are stored; those that do not, or
        that a later step may replace, here. Those that a later step reads are moved here to the
        device of the container.
        """
        call = self.program.calls[idx]
        for key, slot in zip(keyed(call.step).out_keys_source, call.writes, strict=True):
            if slot is None:
                continue
            test = f"_v{slot}.__class__ is not _Tensor"
            if (slot, idx) not in self._stored and self.checks_batch:
                test += f" or _v{slot}.shape[:_rank] != _batch"
            if slot in self._moved:
                test += f" or _device is not None and _v{slot}.device != _device"
            self.text.add(depth, f"if {test}:")
            self.text.add(depth + 1, f"_v{slot} = _fitted({self._like}, {key!r}, _v{slot})")

    def _write_plain(self, depth: int, idx: int, targets: list[str]) -> None:
        text = self.text
        result = self.result(depth, idx, arguments(self.program.calls[idx]))
        split = f"{self.step(idx)}._kd_split_outputs(_r)"
        by_name = self.program.calls[idx].step.__dict__.get("_kd_out_names") is not None
        if len(targets) == 1 and not by_name:
            text.add(depth, f"{targets[0]} = _r = {result}", "if _r.__class__ is not _Tensor:")
            text.add(depth + 1, f"{targets[0]}, = {split}")
            return
        left = "".join(f"{target}, " for target in targets)
        text.add(depth, f"_r = {result}")
        if not targets or by_name:
            text.add(depth, f"{left}= {split}" if targets else split, "_r = None")
            return
        text.add(depth, f"if _r.__class__ is _tuple and _len(_r) == {len(targets)}:")
        text.add(depth + 1, f"{left}= _r")
        named = [target for target in targets if target != "_o"]
        if named:  # a tuple in a tuple is refused
            tests = " or ".join(f"{target}.__class__ is not _Tensor" for target in named)
            text.add(depth + 1, f"if {tests}:")
            text.add(depth + 2, f"{left}= {split}")
        text.add(depth, "else:")
        text.add(depth + 1, f"{left}= {split}")
        text.add(depth, "_r = None")

    def write_all(self) -> None:
        """Write all calls, with a note on what they raise."""
        text = self.text
        if not self.program.is_sequence:
            self._write_alone()
            return
        text.name("_note", partial(_note_call, self.program))
        text.add(1, "_step = -1", "try:")
        self.write_calls(2)
        text.add(2, "pass")
        text.add(1, "except _Exception as _error:")
        text.add(2, "_note(_error, _step, _locals())", "raise")

    def write_calls(self, depth: int) -> None:
        """Write the calls one after the other, those of a scope between entering and leaving it."""
        text, end, count = self.text, 0, len(self.program.calls)
        for idx in range(count):
            scope = self.program.scopes.get(idx)
            if scope is not None and self.sees_scope(range(idx, scope[0])):
                end, enter = scope
                entered = self.entered(f"{text.name(f'_enter{idx}', enter)}()", range(idx, end))
                text.add(depth, f"_leave = {entered}", "try:")
                self.in_scope = True
            self.write_test_again(depth + self.in_scope, idx)
            self.write_call(depth + self.in_scope, idx)
            if self.in_scope and idx + 1 == end:
                text.add(depth, "finally:", "    if _leave is not None:", "        _leave()")
                self.in_scope = False

    def entered(self, entering: str, calls: range) -> str:
        """Return the expression that enters the scope of some calls."""
        return entering

    def sees_scope(self, calls: range) -> bool:
        """Return whether some of the calls may ask for the scope that they are in."""
        raise NotImplementedError

    def _write_alone(self) -> None:
        """Write the only call; a module that has a function of its own adds the note itself."""
        text, (call,) = self.text, self.program.calls
        if not plain_module(call.step):
            self.write_call(1, 0)
            return
        slots = dict(zip(call.keys, call.reads, strict=True))
        text.name("_note", partial(_note_alone, slots))  # which must not hold the module
        text.add(1, "try:")
        self.write_call(2, 0)
        text.add(1, "except _Exception as _error:")
        text.add(2, "_note(_error, _root, _locals())", "raise")


def last_writes(program: Program) -> set[tuple[int | None, int]]:
    """Return each slot that becomes visible, with the last call that writes it."""
    last = {slot: idx for idx, call in enumerate(program.calls) for slot in call.writes}
    return {(slot, last[slot]) for _, slot in program.outputs if slot in last}


def last_reads(program: Program) -> list[list[int]]:
    """Return, for each call, the slots that it reads or writes and that nothing reads later.

    They are cleared after the call, so that a value lives no longer than in an `nn.Sequential`.
    """
    later = {slot for _, slot in program.outputs}
    dying: list[list[int]] = []
    for call in reversed(program.calls):
        used = {*call.reads, *(slot for slot in call.writes if slot is not None)}
        dying.append(sorted(used - later))
        later |= used
    return dying[::-1]


def arguments(call: Call) -> list[str]:
    """Return the arguments of what a plain module wraps, as text."""
    spec = in_spec_of(call.step)
    slots: dict[NestedKey, int] = dict(zip(spec.keys, call.reads, strict=True))
    values = [f"_v{slots[key]}" for key in spec.reads]
    if spec.names is None:
        return values
    named = (f"{name!r}: {value}" for name, value in zip(spec.names, values, strict=True))
    return [f"**{{{', '.join(named)}}}"]


def in_spec_of(step: nn.Module) -> InKeySpec:
    """Return how a plain module passes its inputs to what it wraps."""
    return cast("InKeySpec", step._kd_in_spec)


def plain_module(step: nn.Module) -> bool:
    """Return whether the step calls what it wraps exactly as `TensorDictModule` does."""
    kind = type(step)
    plain = getattr(kind, "_kd_plain_functions", None)
    if plain is None or not plain.keys().isdisjoint(step.__dict__):
        return False
    return all(getattr(kind, name) is function for name, function in plain.items())


def _note_call(program: Program, error: Exception, idx: int, values: dict[str, object]) -> None:
    """Add to an exception which call raised it, from the local variables of the function."""
    if idx < 0:
        return
    call = program.calls[idx]
    pairs = zip(call.keys, call.reads, strict=True)
    given = {key: values.get(f"_v{slot}") for key, slot in pairs}
    add_step_note(error, call.place, call.step, given)


def _note_alone(
    slots: Mapping[NestedKey, int], error: Exception, module: nn.Module, values: dict[str, object]
) -> None:
    add_call_note(error, module, {key: values.get(f"_v{slot}") for key, slot in slots.items()})


def _note_output(
    program: Program, error: Exception, target: TensorDictBase, values: dict[str, object]
) -> None:
    """Add to an exception which call made the output that `target` refused."""
    if isinstance(error, Locked):  # as if the first step that writes were refused at once
        first = next(
            call for call in program.calls if any(slot is not None for slot in call.writes)
        )
        keys = keyed(first.step).in_keys
        given = {key: target.get(key, None) for key in keys}
        add_step_note(error, first.place, first.step, given)
        return
    for key, slot in program.stored:
        value = values.get(f"_v{slot}")
        calls = [call for call in program.calls if slot in call.writes]
        if value is MISSING or not calls:
            continue
        try:
            fitted(target, key, value)
        except type(error):
            add_output_note(error, calls[-1].step, {})
            add_step_note(error, calls[-1].place, calls[-1].step, {})
            return


# The eager plan: a keyed module as one generated function per way of calling it.
#
# A call of a sequence of small modules spends more time around its tensor operations than in them:
# `nn.Module.__call__`, the lookup of a parameter, a hop through a container. A plan leaves that
# out. It is straight-line code, one local variable per value, that calls `forward` directly.
#
# Each function begins with guards. `BUSY` means that this call must be interpreted: a hook, a
# tracer, a subclass of tensor. `STALE` means that something the plan was made from has changed: the
# call is interpreted, and a later one makes a new plan. Guards read dicts and lists that the
# modules change in place; `invalidation` says what counts as a change.
#
# The rows "tutorial Sequential" of the benchmarks compare it with the same `nn.Sequential`.

# Modules of torch as expressions: what their `forward` does, without the calls around it.
#
# `nn.Module.__call__`, and the look-up of a parameter through `__getattr__`, are left out where
# nobody could tell; "What calls cost" in the benchmarks has both. An `nn.Sequential` becomes its
# members, one after the other. A form is used where the functions that it stands for are torch's
# own, as `_torch_private` tells them, and attributes are read where torch puts them; both are
# tested before each run.

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


def make_plan(module: nn.Module, traced: bool = False) -> Plan:
    """Return the plan of a keyed module, `NO_PLAN` if it must be interpreted.

    Args:
        module: A keyed module.
        traced: Whether dynamo is to inline the functions of the plan.
    """
    if not runs_on_values(module):
        return NO_PLAN
    # Before anything is read: what another thread changes meanwhile makes the plan stale.
    dependency = depend_on(module)
    plan = _plan_of(module, dependency, traced)
    return NO_PLAN if dependency.changed else plan


def make_plan_of_first(sequence: nn.Module, count: int) -> Plan:
    """Return the plan of the first steps of a sequence for dynamo, `NO_PLAN` if it has none.

    It writes all that these steps show into the container that it is given.

    Args:
        sequence: A sequence.
        count: How many steps: less than all.
    """
    dependency = depend_on(sequence)
    program = resolve_first(sequence, count)
    if program is None or dependency.changed:
        return NO_PLAN
    calls = TracedCalls(program, dependency.changed)
    plan = Plan(calls.container_function(True))
    plan.dependency = dependency
    return plan


def _plan_of(module: nn.Module, dependency: Dependency, traced: bool) -> Plan:
    keys, changed = keyed(module), dependency.changed
    in_keys, out_keys = tuple(keys.in_keys), tuple(k for k in keys.out_keys if k != DISCARD)
    program = resolve(module, in_keys, out_keys)
    if program is None:
        return NO_PLAN

    def calls() -> Calls:
        return TracedCalls(program, changed) if traced else FastCalls(module, program, changed)

    plan = functions_of(calls, CallNames(in_keys, "_"), module)
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

    def is_fresh(self) -> str:
        """Return the expression for it: the input holds no output, and no container of outputs."""
        keys = [key for key, _ in self.program.stored]
        if not self.program.is_sequence or any_nested(keys):
            return super().is_fresh()
        return " and ".join(f"_source.get({key!r}, None) is None" for key in keys) or "True"

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
        spec = in_spec_of(step)
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
        values: The local variables of the function; None for those that are not read any more.
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


# The calls of a keyed module as dynamo should see them: straight-line, and little of it.
#
# Everything that dynamo traces costs compile time and leaves a guard to test on each call. These
# functions reach every module from the root, as `parameters()` does, so that an exported graph
# names its parameters after the sequence and not after whatever else holds them.


class TracedCalls(Calls):
    """Calls of modules that are reached from the root, by `__call__`."""

    device = "_kd_desc.device"  # each property costs seven guards
    batch = "_kd_desc.batch"
    runs = False  # dynamo traces it

    def __init__(self, program: Program, changed: Flag) -> None:
        super().__init__(program)
        self.text.names.update(_BUSY=BUSY, _changed=changed)

    def write_guard(self) -> None:
        """Write the test that nothing has changed."""
        self.text.add(1, "if _changed:", "    return _BUSY")

    def write_reads(self) -> None:
        """Write that the inputs are read level by level, without methods of the container."""
        if self.program.tolerant:
            super().write_reads()
            return
        text = self.text
        text.names["_Container"] = TensorDictBase
        levels: dict[tuple[str, ...], str] = {(): "_e0"}
        text.add(1, "_e0 = _td._kd_entries")
        for key, slot in self.program.inputs:
            *heads, last = unravel_key_to_tuple(key)
            path: tuple[str, ...] = ()
            for head in heads:
                above, path = levels[path], (*path, head)
                if path not in levels:
                    level = levels[path] = f"_e{len(levels)}"
                    text.add(1, f"{level} = {above}.get({head!r})")
                    text.add(1, f"if not _isinstance({level}, _Container):", "    return _BUSY")
                    text.add(1, f"{level} = {level}._kd_entries")
            text.add(1, f"_v{slot} = {levels[path]}.get({last!r})")

    def write_store(self, depth: int, key: NestedKey, value: str) -> None:
        """Write that the only output is stored, without the defaults of `set`: each is a guard."""
        put = "_kd_put" if isinstance(key, str) else "_kd_store"
        self.text.add(depth, f"_td.{put}({key!r}, {value})")

    def write_input_test(self) -> None:
        """Write the test that every input is there, and is what a step receives.

        What a container wraps reaches a step without its wrapper, which the general path opens. A
        step may make None, but where all inputs must be there it marks a missing one: no guard.
        """
        self.text.names["_wrappers"] = NonTensorDataBase, UnbatchedTensor
        for _, slot in self.program.inputs:
            absent = "" if self.program.tolerant else f"_v{slot} is None or "
            wrapped = f"{absent}_isinstance(_v{slot}, _wrappers)"
            # What `_wrappers` are is not read for a tensor: three guards less.
            self.text.add(1, f"if _v{slot}.__class__ is not _Tensor and ({wrapped}):")
            self.text.add(2, "return _BUSY")

    def unbatched(self) -> str:
        """Return the expression for a container that the compiled code makes.

        dynamo cannot guard that one of the function has the batch size of one that was traced.
        """
        return f"{self.text.name('_TensorDict', TensorDict)}()"

    def apart(self) -> str:
        """Return the expression of what is written; entries that are not written have no guards."""
        keys = {unravel_key_to_tuple(key)[0]: None for key, _ in self.program.stored}
        return f"_td.select(*{list(keys)!r}, strict=False).copy()"

    def write_results(self, inplace: Inplace) -> None:
        """Write the outputs into the container; dynamo traces no notes."""
        self._write_outputs(1)

    def write_all(self) -> None:
        """Write all calls; what they raise has no note in compiled code."""
        self.write_holders()
        for idx, call in enumerate(self.program.calls):
            if call.path:
                self.text.add(1, f"_m{idx} = {super().step(idx)}")
            if plain_module(call.step) and not call.step.__dict__["method_kwargs"]:
                given = f"{self.step(idx)}.method_kwargs"
                self.text.add(1, f"if {given}:", "    return _BUSY")
        self.write_calls(1)

    def step(self, idx: int) -> str:
        """Return the name of the keyed module of call `idx`: each is looked up once."""
        return f"_m{idx}" if self.program.calls[idx].path else "_root"

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
        for idx in calls:
            for part in self.program.calls[idx].step.modules():
                known = f"{type(part).__module__}.".startswith(_CLOSED)
                if not known or callable(part.__dict__.get("module")):
                    return True
        return False
