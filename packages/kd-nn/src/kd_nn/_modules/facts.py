"""What a keyed module tells about itself beside its keys: its device, and what kind it is."""

from collections.abc import Callable
from itertools import chain
from typing import Generic, Self, TypeVar, overload

import torch
from torch import nn

from kd_nn._modules.settings import CheckedSettings

R = TypeVar("R")


class Derived(Generic[R]):
    """A property that a subclass or an instance may replace by assigning an attribute."""

    def __init__(self, function: Callable[..., R]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, module: None, owner: type) -> Self: ...
    @overload
    def __get__(self, module: nn.Module, owner: type | None = None) -> R: ...
    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Self | R:
        """Return the value for the instance; on the class this object."""
        return self if module is None else self.function(module)


class ModuleFacts(CheckedSettings):
    """What can be asked of every keyed module."""

    @staticmethod
    def is_tdmodule_compatible(module: object) -> bool:
        """Return whether a module has `in_keys` and `out_keys`, so that a sequence takes it.

        Example:
            >>> from kd_nn import TensorDictModuleBase
            >>> TensorDictModuleBase.is_tdmodule_compatible(nn.ReLU())
            False
        """
        return hasattr(module, "in_keys") and hasattr(module, "out_keys")

    @Derived
    def is_functional(self) -> bool:
        """Return whether it takes its parameters as an argument; see `kd_nn.make_functional`."""
        return getattr(self.__dict__.get("forward"), "takes_parameters", False)

    @Derived
    def device(self) -> torch.device:
        """Return the device of the first parameter or buffer; the CPU if there is none."""
        held = next(chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if held is None else held.device


def reset_members(module: nn.Module) -> None:
    """Draw new values in a module and all its sub-modules, as `reset_parameters` of each does."""
    for member in module.modules():
        # Of the class: a wrapper passes the method of what it wraps on, which has its own turn.
        reset = getattr(type(member), "reset_parameters", None)
        if callable(reset):
            reset(member)
