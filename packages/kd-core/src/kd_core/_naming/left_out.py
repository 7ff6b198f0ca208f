"""Errors for names that are left out on purpose: the reason, and what to write instead.

The texts are those of `left_out.toml` beside this file, which also makes the page "Coming from
tensordict". It is read when the first name is not found, never by an import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from inspect import getattr_static
from pathlib import Path
from typing import TYPE_CHECKING, Final, Never, TypeAlias

from torch.compiler import is_dynamo_compiling

from kd_core._errors import NotOffered, NotOfferedImport

if TYPE_CHECKING:
    from typing import TypeVar

    C = TypeVar("C", bound=type)


Rows: TypeAlias = dict[str, dict[str, str]]

MODULES: Final = (
    "tensordict",
    "tensordict.utils",
    "tensordict.nn",
    "tensordict.nn.distributions",
)


@cache
def decided() -> dict[str, Rows]:
    """Return all rows: for each area, names and their `reason` and `instead`."""
    import tomllib

    text = Path(__file__).with_name("left_out.toml").read_text(encoding="utf-8")
    areas: dict[str, Rows] = tomllib.loads(text)
    return areas


def find_reason(name: str, areas: Iterable[str]) -> str | None:
    """Return why a name of one of these areas is left out and what to write; `None` if it is not.

    Args:
        name: the name that was not found.
        areas: the modules and classes of tensordict in which it may be.
    """
    for area in areas:
        row = decided().get(area, {}).get(name)
        if row is not None:
            return f"`{name}` is left out on purpose. {row['reason']} {row['instead']}"
    return None


def attribute_lookup(package: str) -> Callable[[str], Never]:
    """Return what the `__getattr__` of a package calls, which explains names that are left out."""

    def explain(name: str) -> Never:
        reason = None if name.startswith("_") else find_reason(name, MODULES)
        if reason is None:
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[package])
        # `from package import name` hides an `AttributeError` behind a message of its own.
        if sys._getframe(2).f_code.co_name == "_handle_fromlist":
            raise NotOfferedImport(reason)
        raise NotOffered(reason)

    return explain


def explain_attribute(cls: type, name: str) -> NotOffered | None:
    """Return the error for an attribute of a container that is left out; `None` for others."""
    areas = ["TensorDict", *(kind.__name__ for kind in cls.__mro__)]
    reason = find_reason(name, areas)
    return None if reason is None else NotOffered(reason)


class LeftOut:
    """An attribute that is left out on purpose: reading it raises the error that says why.

    A `__getattr__` of the class would do the same for all names at once, and make every attribute
    that exists slower to read: "td['a']" in the benchmarks.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> Never:
        # dynamo cannot trace how a reason is found
        error = None if is_dynamo_compiling() else explain_attribute(owner, self.name)
        raise error or AttributeError(self.name)


def leaves_out(*names: str) -> Callable[[C], C]:
    """Add to a class an explanation for each of some attributes that it does not have."""

    def decorate(cls: C) -> C:
        for name in names:
            setattr(cls, name, LeftOut(name))
        return cls

    return decorate


def offered_names(self: object) -> list[str]:
    """Return the names of an object without those that its class leaves out."""
    kind = type(self)
    return [
        name
        for name in object.__dir__(self)
        if not isinstance(getattr_static(kind, name, None), LeftOut)
    ]
