"""Writing the calls of a program as Python text.

A value is a local variable, a call is a line or two. Programs of the same shape have the same text,
so compiled code is cached by text; what differs is in the namespace of the function. Every name in
the text begins with an underscore, builtins too, so that an argument may have any other name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType
from typing import cast

from torch import Tensor, nn

from kd_core import NestedKey, TensorDict, TensorDictBase
from kd_nn._dispatch import (
    MISSING,
    CallNames,
    Inplace,
    add_call_note,
    add_output_note,
    add_step_note,
    destination,
    fitted,
)
from kd_nn._keys import InKeySpec, strictly_overlaps
from kd_nn._plan.program import Call, Path, Program, keyed

_NAMES: dict[str, object] = {
    "_Exception": Exception,
    "_KeyError": KeyError,
    "_MISSING": MISSING,
    "_Tensor": Tensor,
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
    """

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
        default = ", _MISSING" if program.tolerant else ""  # `get` without one is the fastest read
        for key, slot in program.inputs:
            text.add(1, f"_v{slot} = _td.get({key!r}{default})")
        self._write_body("_td")
        if inplace not in (True, None):
            text.name("_destination", destination)
            text.add(1, "_source = _td", f"_td = _destination(_td, {inplace!r}, None)")
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
        text.add(1, "return _td")
        return text.function("_call")

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
        text, outputs = self.text, self.program.outputs
        if self.program.tolerant:
            text.add(depth, "_out = {}")
            for key, slot in outputs:
                text.add(depth, f"if _v{slot} is not _MISSING:")
                text.add(depth + 1, f"_out[{key!r}] = _v{slot}")
            text.add(depth, "_td.assign(_out)")
        elif len(outputs) == 1:
            ((key, slot),) = outputs
            text.add(depth, f"_td.set({key!r}, _v{slot})")
        else:
            self.write_assignment(depth)

    def write_assignment(self, depth: int) -> None:
        """Write that all outputs are stored at once."""
        pairs = ", ".join(f"{key!r}: _v{slot}" for key, slot in self.program.outputs)
        self.text.add(depth, f"_td.assign({{{pairs}}})")

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
            text.add(1, "_device = _like.device")
        made = {(slot, idx) for idx, call in enumerate(self.program.calls) for slot in call.writes}
        self.checks_batch = any(slot is not None for slot, _ in made - self._stored)
        if self.checks_batch:
            text.add(1, "_batch = _like.batch_size", "_rank = _len(_batch)")

    def write_call(self, depth: int, idx: int) -> None:
        """Write call `idx`, skipped where the program tolerates missing inputs."""
        call, text = self.program.calls[idx], self.text
        if self.program.tolerant and call.reads:
            there = " and ".join(f"_v{slot} is not _MISSING" for slot in call.reads)
            text.add(depth, f"if {there}:")
            depth += 1
        text.add(depth, f"_step = {idx}")
        targets = ["_o" if w is None else f"_v{w}" for w in call.writes]
        discards = "_o" in targets
        if plain_module(call.step):
            self._write_plain(depth, idx, targets)
        else:
            left = "".join(f"{target}, " for target in targets)
            values = ", ".join(f"_v{slot}" for slot in call.reads)
            right = f"{self.step(idx)}._kd_forward_values({values})"
            text.add(depth, f"{left}= {right}" if left else right)
        if self.program.is_sequence:
            self._write_fits(depth, idx)
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
        slots = dict(zip(cast("list[NestedKey]", call.step.in_keys), call.reads, strict=True))
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
    spec = cast("InKeySpec", call.step._kd_in_spec)
    slots: dict[NestedKey, int] = dict(zip(spec.keys, call.reads, strict=True))
    values = [f"_v{slots[key]}" for key in spec.reads]
    if spec.names is None:
        return values
    named = (f"{name!r}: {value}" for name, value in zip(spec.names, values, strict=True))
    return [f"**{{{', '.join(named)}}}"]


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
    keys = cast("list[NestedKey]", call.step.in_keys)
    given = {key: values.get(f"_v{slot}") for key, slot in zip(keys, call.reads, strict=True)}
    add_step_note(error, call.place, call.step, given)


def _note_alone(
    slots: Mapping[NestedKey, int], error: Exception, module: nn.Module, values: dict[str, object]
) -> None:
    add_call_note(error, module, {key: values.get(f"_v{slot}") for key, slot in slots.items()})


def _note_output(
    program: Program, error: Exception, target: TensorDictBase, values: dict[str, object]
) -> None:
    """Add to an exception which call made the output that `target` refused."""
    for key, slot in program.outputs:
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
