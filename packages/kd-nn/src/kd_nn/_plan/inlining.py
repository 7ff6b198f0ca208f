"""Modules of torch as expressions: what their `forward` does, without the calls around it.

`nn.Module.__call__`, and the look-up of a parameter through `__getattr__`, are left out where
nobody could tell; "What calls cost" in the benchmarks has both. An `nn.Sequential` becomes its
members, one after the other. A form is used where the functions that it stands for are torch's
own, as `_torch_private` tells them, and attributes are read where torch puts them; both are tested
before each run. See `eager`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # as everywhere
from torch import nn

from kd_nn._plan.codegen import Text
from kd_nn._torch_private import (
    HOOKS,
    calls_of_modules,
    defines,
    is_called_plainly,
    reads_plainly,
)

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
