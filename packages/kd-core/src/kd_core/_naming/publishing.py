"""Where public names say that they are defined: the package that users import them from.

Tracebacks, pickles and `help` show that place. A file of saved containers then survives a move of
private modules. The price is that `inspect.getsource` of a class fails, because it reads the file
of the module that `__module__` names, as for numpy and JAX; of functions and methods it succeeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

from kd_core._naming.left_out import attribute_lookup

if TYPE_CHECKING:
    from typing import TypeVar

    C = TypeVar("C", bound=Callable[..., object])


def publish(package: str, later: Mapping[str, str] | None = None) -> None:
    """Set `__module__` of what a package exports, and of the methods of its classes.

    Call it last in the `__init__` of the package. Names that another public package exports already
    keep their place. A name that is left out on purpose gets an error that says why.

    Args:
        package: the name of the package.
        later: modules that are imported when one of their names is first used, and these names. For
            type checkers, import them under `TYPE_CHECKING`, too. If such a class can be met before
            its name is used, as the result of a method, `public_in` decorates it. Container kinds
            must not be among them: `torch.load(weights_only=True)` takes the kinds that exist.
    """
    names = vars(sys.modules[package])
    _move([value for name, value in names.items() if not name.startswith("_")], package)
    homes = {name: home for home, held in (later or {}).items() for name in held.split()}
    if "__getattr__" not in names:
        names["__getattr__"] = _lookup(sys.modules[package], homes)
    if homes:
        names["__dir__"] = lambda: sorted({*names, *homes})


def public_in(package: str) -> Callable[[C], C]:
    """Set `__module__` of one function or class, and of its methods, before it is exported."""

    def decorate(exported: C) -> C:
        _move([exported], package)
        return exported

    return decorate


def _lookup(package: ModuleType, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package, called for names that are not imported yet."""
    name = package.__name__
    explain = attribute_lookup(name)
    modules = {home.rpartition(".")[2]: home for home in homes.values() if "._" not in home}

    def module_getattr(attribute: str) -> object:
        if attribute == "__all__" and homes:  # for `from package import *`
            return [each for each in dir(package) if not each.startswith("_")]
        if attribute in modules:
            return import_module(modules[attribute])
        if attribute not in homes:
            explain(attribute)
        value: object = getattr(import_module(homes[attribute]), attribute)
        _move([value], name)
        setattr(package, attribute, value)
        return value

    return module_getattr


def _move(exported: Iterable[object], package: str) -> None:
    """Set `__module__` of private things, and of the methods of private classes."""
    for thing in exported:
        if isinstance(thing, MethodType) or not callable(thing) or not _is_private(thing, package):
            continue
        for member in vars(thing).values() if isinstance(thing, type) else ():
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType) and _is_private(function, package):
                function.__module__ = package
        thing.__module__ = package


def _is_private(thing: object, package: str) -> bool:
    return _is_within(getattr(thing, "__module__", None) or "", package)


@cache
def _is_within(home: str, package: str) -> bool:
    """Return whether a module is a private one of the distribution of a package."""
    return home.startswith(f"{package.partition('.')[0]}.") and "._" in home
