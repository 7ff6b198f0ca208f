"""Where public names say that they are defined: the package that users import them from.

Tracebacks, pickles and `help` show that place. A file of saved containers then survives a move of
private modules. The price is that `inspect.getsource` of a class fails, because it reads the file
of the module that `__module__` names, as for numpy and JAX; of functions and methods it succeeds.
"""

from __future__ import annotations

import sys
from types import FunctionType, MethodType

from kd_core._naming.left_out import attribute_lookup


def publish(package: str) -> None:
    """Set `__module__` of what a package exports, and of the methods of its classes.

    Call it last in the `__init__` of the package. Names that another public package exports already
    keep their place. A name that is left out on purpose gets an error that says why.
    """
    vars(sys.modules[package]).setdefault("__getattr__", attribute_lookup(package))
    exported = [
        value
        for name, value in vars(sys.modules[package]).items()
        if callable(value) and not name.startswith("_")
    ]
    methods = [
        function
        for cls in exported
        if isinstance(cls, type) and _is_private(cls, package)
        for member in vars(cls).values()
        if isinstance(function := getattr(member, "__func__", member), FunctionType)
    ]
    for thing in [*exported, *methods]:
        if _is_private(thing, package) and not isinstance(thing, MethodType):
            thing.__module__ = package


def _is_private(thing: object, package: str) -> bool:
    home = getattr(thing, "__module__", None) or ""
    return home.startswith(f"{package.partition('.')[0]}.") and "._" in home
