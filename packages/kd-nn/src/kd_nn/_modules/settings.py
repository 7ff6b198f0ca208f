"""Settings of keyed modules: each is checked when it is assigned, in a constructor or later.

A check takes the module, the name of the setting and the value, and returns the value to keep.
Beside its settings a module tells its device, and what kind it is.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from itertools import chain
from typing import ClassVar, Generic, Self, TypeAlias, TypeVar, cast, overload

import torch
from torch import nn

from kd_core import InvalidArgument, InvalidKey, NestedKey
from kd_core.extending import plain_str
from kd_nn._dispatch.entries import Inplace
from kd_nn._keys.specs import parse_out_keys
from kd_nn._plan.invalidation import Flagged

Check: TypeAlias = "Callable[[nn.Module, str, object], object]"


class CheckedSettings(Flagged):
    """A module whose settings are checked.

    Attributes:
        checks: The check of each setting, by name.
    """

    _kd_checks: ClassVar[Mapping[str, Check]] = {}

    def __setattr__(self, name: str, value: object) -> None:
        """Assign; a setting is checked first, and nothing changes if it is refused."""
        check = self._kd_checks.get(name)
        super().__setattr__(name, value if check is None else check(self, name, value))

    def _kd_settle(self, **settings: object) -> None:
        """Assign settings in a constructor: each is checked; nothing depends on the module yet.

        A class of the user may define `__setattr__` or a property, so it is asked. For values
        that are not modules: torch registers those.
        """
        if not self._kd_changes_by_assignment:
            for name, value in settings.items():
                setattr(self, name, value)
            return
        state = self.__dict__
        for name, value in settings.items():
            check = self._kd_checks.get(name)
            state[name] = value if check is None else check(self, name, value)


def checked_out_keys(owner: nn.Module, _: str, keys: object) -> object:
    """Record the names by which outputs are taken, and return the keys."""
    names = None
    if isinstance(keys, Mapping):
        names, keys = tuple(keys), list(keys.values())
        if not all(isinstance(name, str) for name in names):
            raise InvalidKey(
                f"a mapping of `out_keys` is `{{name: key}}`, where each name is a str, "
                f"got the names {list(names)}."
            )
    parsed = parse_out_keys(keys)
    owner.__dict__["_kd_out_names"] = names
    return list(parsed)


def checked_module(owner: nn.Module, _: str, module: object) -> object:
    """Return what is wrapped: a callable that is not a class of modules."""
    if not callable(module):
        raise InvalidArgument(
            f"`module` must be callable, got {type(module).__name__}: {module!r}. "
            "Pass an `nn.Module` or a function."
        )
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise InvalidArgument(
            f"`module` is the class `{module.__name__}`. Pass an instance: "
            f"`{module.__name__}(...)`."
        )
    _check_method(module, owner.__dict__.get("method"))
    return module


def checked_method(owner: nn.Module, _: str, method: object) -> str | None:
    """Return the name of a method of what is wrapped, as a plain `str`, or None."""
    _check_method(owner.module, method)
    return plain_str(method) if isinstance(method, str) else None


def _check_method(module: object, method: object) -> None:
    if method is None:
        return
    # Generated code calls it by name, so it must be one.
    named = isinstance(method, str) and method.isidentifier() and not keyword.iskeyword(method)
    if not named or not callable(getattr(module, cast("str", method), None)):
        raise InvalidArgument(
            f"`method` must be the name of a method of `{type(module).__name__}`, got {method!r}."
        )


def checked_inplace(_: nn.Module, name: str, inplace: object) -> Inplace:
    """Return what says where outputs are written."""
    if isinstance(inplace, bool) or inplace is None:
        return inplace
    if inplace == "empty":
        return "empty"
    raise InvalidArgument(f'`{name}` must be True, False, None or "empty", got {inplace!r}.')


def checked_kwargs(_: nn.Module, name: str, kwargs: object) -> dict[str, object]:
    """Return keyword arguments by name, as a dict."""
    if isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs):
        return {plain_str(name): value for name, value in kwargs.items()}
    raise InvalidArgument(
        f"`{name}` must be a dict of arguments by name, got {type(kwargs).__name__}: {kwargs!r}."
    )


def checked_flag(_: nn.Module, name: str, value: object) -> bool:
    """Return the value of a setting that is True or False."""
    if isinstance(value, bool):
        return value
    raise InvalidArgument(f"`{name}` must be True or False, got {value!r}.")


def checked_strictness(owner: nn.Module, name: str, value: object) -> bool | None:
    """Return what says whether a missing input is an error."""
    return None if value is None else checked_flag(owner, name, value)


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

    def _kd_needs_key(self, key: NestedKey) -> bool:
        """Return whether a call of now cannot run without an entry that it reads."""
        return key not in getattr(self, "_kd_optional_in_keys", ())

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
