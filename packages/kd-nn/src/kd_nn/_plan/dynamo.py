"""The calls of a sequence as dynamo should see them: straight-line, and little of it.

Everything that dynamo traces costs compile time and leaves a guard to test on each call. These
functions reach every module from the root, as `parameters()` does, so that an exported graph names
its parameters after the sequence and not after whatever else holds them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from kd_core import NonTensorDataBase, TensorDict, UnbatchedTensor
from kd_core.extending import assume_constant_result, is_exporting
from kd_nn._dispatch import CallNames
from kd_nn._plan.codegen import Calls, plain_module
from kd_nn._plan.eager import functions_of
from kd_nn._plan.invalidation import Flag
from kd_nn._plan.program import BUSY, Plan, Program


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
