"""Modules of torch as expressions: what their `forward` does, without the calls around it.

`nn.Module.__call__`, and the look-up of a parameter through `__getattr__`, are left out where
nobody could tell; "What calls cost" in the benchmarks has both. An `nn.Sequential` becomes its
members, one after the other. What the text assumes is tested before each run; see `eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F  # as everywhere
from torch import Tensor, nn

from kd_nn._keys.specs import Keys
from kd_nn._plan.codegen import Text

CALL: Final = nn.Module.__call__
IMPL: Final = nn.Module._call_impl
CHAIN: Final = nn.Sequential.forward
ITERATE: Final = nn.Sequential.__iter__
HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLACE: Final = "<x>"
"""Stands for the input in a line."""
SECOND: Final = "<y>"
"""Stands for the second input of a module that has two."""
_GRU: Final = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

FORMS: Final[dict[type[nn.Module], tuple[Callable[..., Tensor], str, Keys]]] = {
    nn.Linear: (
        nn.Linear.forward,
        f"_F.linear({PLACE}, parameters['weight'], parameters['bias'])",
        ("weight", "bias"),
    ),
    nn.ReLU: (nn.ReLU.forward, f"_F.relu({PLACE}, attributes['inplace'])", ()),
    nn.Tanh: (nn.Tanh.forward, f"_torch.tanh({PLACE})", ()),
    nn.Sigmoid: (nn.Sigmoid.forward, f"_torch.sigmoid({PLACE})", ()),
    nn.Identity: (nn.Identity.forward, PLACE, ()),
    nn.Flatten: (
        nn.Flatten.forward,
        f"{PLACE}.flatten(attributes['start_dim'], attributes['end_dim'])",
        (),
    ),
    nn.GRUCell: (
        nn.GRUCell.forward,
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
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self.hooks: list[str] = []
        self.checks: list[str] = []
        self.classes: dict[type[nn.Module], str] = {}
        text.names.update(_F=F, _torch=torch)  # what the forms use

    def opens(self, module: nn.Module, name: str) -> bool:
        """Return whether `forward` may be called directly, and write the test that it stays so."""
        kind = type(module)
        if kind.__call__ is not CALL or kind._call_impl is not IMPL:
            return False
        if module._compiled_call_impl is not None or "_call_impl" in module.__dict__:
            return False
        own = self._class(kind)
        attributes = self.text.name(f"{name}_attributes", module.__dict__)
        # Looked up anew: an empty dict may be assigned to drop hooks, and only keyed modules tell.
        self.hooks += [f"{attributes}[{kind!r}]" for kind in HOOKS]
        self.checks.append(f"_type({name}) is not {own} or {name}.__dict__ is not {attributes}")
        self.checks.append(f"_len({attributes}) != {len(module.__dict__)}")
        return True

    def _class(self, kind: type[nn.Module]) -> str:
        """Name a class of wrapped modules, and test that they are called as torch calls them."""
        if kind not in self.classes:
            own = self.classes[kind] = self.text.name(f"_K{len(self.classes)}", kind)
            # It got `__call__` and `_call_impl` from `nn.Module`, and so did all between them.
            for place, base in enumerate(kind.__mro__[: kind.__mro__.index(nn.Module)]):
                state = self.text.name(f"{own}_dict{place}", base.__dict__)
                self.checks.append(f"_len({state}) != {len(base.__dict__)}")
        return self.classes[kind]

    def holds(self, holder: nn.Module, name: str) -> None:
        """Name the members of a module, and test that they stay the same, in order."""
        members = self.text.name(f"{name}_members", list(holder._modules.values()))
        state = self.text.name(f"{name}_state", holder.__dict__)
        self.checks.append(f"[*{state}['_modules'].values()] != {members}")

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
        if form is None:
            return None
        forward, line, parameters = form
        changed = any(key not in module._parameters for key in parameters)
        fits = inputs == (2 if SECOND in line else 1)
        if changed or not fits or not self._stays(module, name, forward):
            return None
        values = self.text.name(f"{name}_parameters", module._parameters)
        if parameters:
            self.checks.append(f"{name}_attributes['_parameters'] is not {values}")
            self.checks += [f"{key!r} not in {values}" for key in parameters]
        line = line.replace("parameters", values).replace("module.forward", f"{name}.forward")
        return [line.replace("attributes", f"{name}_attributes")]

    def _members(self, module: nn.Sequential, name: str) -> list[str] | None:
        members = module._modules
        if None in members.values() or not self._stays(module, name, CHAIN):
            return None
        self.holds(module, name)
        iterate = f"{self._class(nn.Sequential)}.__iter__ is not _iterate"
        if iterate not in self.checks:
            self.text.names["_iterate"] = ITERATE
            self.checks.append(iterate)
        lines: list[str] = []
        for place, member in enumerate(members.values()):
            inner = self.text.name(f"{name}_{place}", member)
            opens = self.opens(member, inner)
            found = self.lines(member, inner) if opens else None
            call = f"{inner}.forward" if opens else inner
            lines += [f"{call}({PLACE})"] if found is None else found
        return lines

    def _stays(self, module: nn.Module, name: str, forward: Callable[..., object]) -> bool:
        """Return whether a module runs this `forward`, and write the test that it stays so."""
        kind = type(module)
        if kind.forward is not forward or "forward" in module.__dict__:
            return False
        self.checks.append(f"'forward' in {name}_attributes")
        own = self._class(kind)
        latest = f"{own}.forward is not {self.text.name(f'{own}_forward', forward)}"
        if latest not in self.checks:
            self.checks.append(latest)
        return True
