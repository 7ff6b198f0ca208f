"""Writing the calls of a program as Python text.

A value is a local variable, a call is a line or two. Programs of the same shape have the same text,
so compiled code is cached by text; what differs is in the namespace of the function.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import cast

from torch import Tensor, nn

from kd_core import NestedKey
from kd_nn._call_names import MISSING
from kd_nn._key_spec import InKeySpec
from kd_nn._notes import add_step_note
from kd_nn._program import Call, Program

ValuesFunction = Callable[..., tuple[object, ...]]


@dataclass(slots=True)
class Text:
    """The lines of a function and what the names in them mean."""

    lines: list[str] = field(default_factory=list)
    names: dict[str, object] = field(default_factory=dict)

    def add(self, depth: int, *lines: str) -> None:
        """Append lines at an indentation depth."""
        self.lines += ["    " * depth + line for line in lines]

    def function(self, name: str) -> Callable[..., object]:
        """Define the function whose text this is."""
        scope = dict(self.names)
        exec(_compile("\n".join(self.lines)), scope)
        return cast("Callable[..., object]", scope[name])


@functools.lru_cache(maxsize=512)
def _compile(text: str) -> CodeType:
    return compile(text, "<kd_nn plan>", "exec")


class Calls:
    """How a call of a program is written: the step and what it wraps are looked up in the root."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names: dict[str, object] = {"Tensor": Tensor, "MISSING": MISSING}

    def step(self, idx: int) -> str:
        """Return the expression for the keyed module of call `idx`."""
        text = "root"
        for name in self.program.calls[idx].path:
            text += f"._modules['module']._modules[{name!r}]"
        return text

    def wrapped(self, idx: int) -> str:
        """Return the expression for what the keyed module of call `idx` wraps."""
        inner = self.program.calls[idx].step._modules.get("module")
        holder = "__dict__" if inner is None else "_modules"
        return f"{self.step(idx)}.{holder}['module']"

    def value(self, idx: int, arguments: str) -> str:
        """Return the expression that calls what call `idx` wraps."""
        method = self.program.calls[idx].step.__dict__.get("method")
        return f"{self.wrapped(idx)}{'' if method is None else '.' + method}({arguments})"

    def write(self, text: Text, depth: int, idx: int) -> None:
        """Write call `idx`."""
        call = self.program.calls[idx]
        if self.program.tolerant and call.reads:
            there = " and ".join(f"v{slot} is not MISSING" for slot in call.reads)
            text.add(depth, f"if {there}:")
            depth += 1
        text.add(depth, f"step = {idx}")
        targets = [f"_{place}" if w is None else f"v{w}" for place, w in enumerate(call.writes)]
        left = "".join(f"{target}, " for target in targets)
        if not plain_module(call.step):
            values = ", ".join(f"v{slot}" for slot in call.reads)
            right = f"{self.step(idx)}.forward_values({values})"
            text.add(depth, f"{left}= {right}" if left else right)
            return
        given = arguments(call)
        if call.step.__dict__["method_kwargs"]:
            given += f", **{self.step(idx)}.__dict__['method_kwargs']"
        result = self.value(idx, given)
        split = f"{self.step(idx)}.split_outputs(r)"
        if len(targets) == 1:
            text.add(depth, f"{targets[0]} = r = {result}", "if r.__class__ is not Tensor:")
            text.add(depth + 1, f"{left}= {split}")
            return
        if not targets:
            text.add(depth, f"r = {result}", split)
            return
        text.add(depth, f"r = {result}", f"if r.__class__ is tuple and len(r) == {len(targets)}:")
        text.add(depth + 1, f"{left}= r")
        text.add(depth, "else:")
        text.add(depth + 1, f"{left}= {split}")

    def body(self, text: Text, depth: int) -> None:
        """Write all calls, with a note on what they raise."""
        text.add(depth, "step = -1", "try:")
        for idx in range(len(self.program.calls)):
            self.write(text, depth + 1, idx)
        text.add(depth + 1, "pass")
        text.add(depth, "except Exception as error:")
        text.add(depth + 1, "note(error, step, locals())", "raise")
        self.names["note"] = Note(self.program)


def arguments(call: Call) -> str:
    """Return the arguments of what a plain module wraps, as text."""
    spec = cast("InKeySpec", call.step.spec)
    slots: dict[NestedKey, int] = dict(zip(spec.keys, call.reads, strict=True))
    parts = [f"v{slots[key]}" for key in spec.reads]
    if spec.names is not None:
        named = zip(spec.names, parts, strict=True)
        parts = ["**{" + ", ".join(f"{name!r}: {part}" for name, part in named) + "}"]
    return ", ".join(parts)


def plain_module(step: nn.Module) -> bool:
    """Return whether the step calls what it wraps exactly as `TensorDictModule` does."""
    plain = getattr(type(step), "plain_forward_values", None)
    return plain is not None and getattr(type(step), "forward_values", None) is plain


class Note:
    """Adds to an exception which call of a program raised it."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, error: Exception, idx: int, values: dict[str, object]) -> None:
        """Annotate `error`, raised by call `idx`, from the local variables of the function."""
        if not 0 <= idx < len(self.program.calls) or not self.program.containers:
            return
        call = self.program.calls[idx]
        keys = cast("list[NestedKey]", call.step.in_keys)
        given = {key: values.get(f"v{slot}") for key, slot in zip(keys, call.reads, strict=True)}
        add_step_note(error, call.place, call.step, given)


def values_function(program: Program) -> ValuesFunction:
    """Return the function that makes the calls: from the root and the inputs to the outputs.

    Steps are called through their modules, so hooks on what they wrap run, and tracers see calls.
    """
    text, calls = Text(), Calls(program)
    inputs = "".join(f", v{slot}" for _, slot in program.inputs)
    text.add(0, f"def run(root{inputs}, /):")
    calls.body(text, 1)
    text.add(1, f"return ({''.join(f'v{slot}, ' for _, slot in program.outputs)})")
    text.names.update(calls.names)
    return cast("ValuesFunction", text.function("run"))
