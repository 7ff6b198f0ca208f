"""The calls of a sequence as dynamo should see them: straight-line, and little of it.

Everything that dynamo traces costs compile time and leaves a guard to test on each call. These
functions reach every module from the root, as `parameters()` does, so that an exported graph names
its parameters after the sequence and not after whatever else holds them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from kd_core.extending import assume_constant_result
from kd_nn._dispatch.call_names import CallNames
from kd_nn._dispatch.entries import Inplace
from kd_nn._plan.codegen import Calls, Text, plain_module
from kd_nn._plan.eager import BUSY, write_container_call, write_tensor_outputs
from kd_nn._plan.program import Path, Program


@dataclass(frozen=True, slots=True)
class Traced:
    """The functions that dynamo inlines for a call of a sequence.

    Attributes:
        names: The argument names, in order.
        container: Runs on a plain `TensorDict`; `BUSY` if the long way must be taken.
        tensors: Runs on tensors by position or keyword; `BUSY` likewise. None where the keys are
            no parameter names.
    """

    names: tuple[str, ...]
    container: Callable[..., object]
    tensors: Callable[..., object] | None


def watch_function(paths: list[Path]) -> Callable[[nn.Module], bool]:
    """Return a function that tells from the root whether hooks on one of the steps would see it.

    Args:
        paths: The names that lead from the root to each step.
    """
    text = Text()
    text.names["_module"] = nn.modules.module
    tests = ["_module._global_forward_hooks", "_module._global_forward_pre_hooks"]
    tests += _hook_tests(paths)
    text.add(0, "def _watched(_root):", f"    return bool({' or '.join(tests)})")
    text.names["bool"] = bool
    return text.function("_watched")  # type: ignore[return-value]  # a test, as written above


def traced_functions(
    program: Program,
    names: CallNames,
    watched: Callable[[], bool],
    flags: list[list[bool]],
    inplace: Inplace,
) -> Traced:
    """Return the functions for dynamo.

    Args:
        program: The calls to make.
        names: The argument names of the sequence.
        watched: Tells whether a hook asks for the steps one by one.
        flags: What the steps raise when they change.
        inplace: Which container is written; see `destination`.
    """
    # dynamo calls it while it traces, and leaves no guard: it does not guard hooks of modules
    # either. To trace one look-up per step and kind of hook took a seventh of a first call.
    watched = assume_constant_result(watched)
    tensors = None
    # A step may make None, but where all inputs must be there it marks a missing one: no guard.
    absent = "_MISSING" if program.tolerant else "None"
    if names.are_parameters and not any(name.startswith("_") for name in names.names):
        text = Text()
        given = "".join(f", {name}={absent}" for name in names.names)
        text.add(0, f"def _call(_root, /{given}):")
        _write_guard(text, watched, flags)
        by_key = dict(zip(names.keys, names.names, strict=True))
        for key, slot in program.inputs:
            text.add(1, f"_v{slot} = {by_key.get(key, absent)}")
        _write_calls(program, text, absent, None)
        write_tensor_outputs(program, text)
        tensors = text.function("_call")
    text = Text()
    text.add(0, "def _call(_root, _td):")
    _write_guard(text, watched, flags)
    for key, slot in program.inputs:
        text.add(1, f"_v{slot} = _td.get({key!r}, {absent})")
    _write_calls(program, text, absent, "_td")
    write_container_call(program, text, inplace)
    container = text.function("_call")
    return Traced(names.names, container, tensors)


def _write_guard(text: Text, watched: Callable[[], bool], flags: list[list[bool]]) -> None:
    text.names.update(_BUSY=BUSY, _watched=watched)
    tests = [text.name(f"_flag{idx}", flag) for idx, flag in enumerate(flags)]
    text.add(1, f"if {' or '.join([*tests, '_watched()'])}:", "    return _BUSY")


def _write_calls(program: Program, text: Text, absent: str, container: str | None) -> None:
    if not program.tolerant and program.inputs:
        tests = (f"_v{slot} is {absent}" for _, slot in program.inputs)
        text.add(1, f"if {' or '.join(tests)}:", "    return _BUSY")
    calls = Calls(program, text)
    calls.write_like(1, container)
    calls.write_holders(1)
    for idx, call in enumerate(program.calls):
        if plain_module(call.step) and not call.step.__dict__["method_kwargs"]:
            given = f"{calls.step(idx)}.__dict__['method_kwargs']"
            text.add(1, f"if {given}:", "    return _BUSY")
    for idx in range(len(program.calls)):
        calls.write_call(1, idx)


def _hook_tests(paths: list[Path]) -> list[str]:
    tests = []
    for path in paths:
        step = "_root" + "".join(f"._modules['module']._modules[{name!r}]" for name in path)
        kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
        tests += [f"{step}._{kind}" for kind in kinds]
    return tests
