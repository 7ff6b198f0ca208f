"""Errors for names that are left out on purpose: the reason, and what to write instead.

The texts are those of `left_out.toml` beside this file, which also makes the page "Coming from
tensordict". It is read when the first name is not found, never by an import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

from torch.compiler import is_dynamo_compiling

from kd_core._errors import NotOffered, NotOfferedImport

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


def attribute_lookup(package: str) -> Callable[[str], object]:
    """Return the `__getattr__` of a package, which explains names that are left out."""

    def module_getattr(name: str) -> object:
        reason = None if name.startswith("_") else find_reason(name, MODULES)
        if reason is None:
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[package])
        # `from package import name` hides an `AttributeError` behind a message of its own.
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":
            raise NotOfferedImport(reason)
        raise NotOffered(reason)

    return module_getattr


def explain_attribute(cls: type, name: str) -> NotOffered | None:
    """Return the error for an attribute of a container that is left out; `None` for others."""
    if name.startswith("_"):
        return None
    areas = ["TensorDict", *(kind.__name__ for kind in cls.__mro__)]
    reason = find_reason(name, areas)
    return None if reason is None else NotOffered(reason)


def instance_getattr(self: object, name: str) -> object:
    """Raise the error for an attribute that a container, or data, does not have."""
    if is_dynamo_compiling():  # it cannot trace the lookup below
        raise AttributeError(name)
    error = explain_attribute(type(self), name)
    if error is not None:
        raise error
    return object.__getattribute__(self, name)  # raises, with the message of Python
