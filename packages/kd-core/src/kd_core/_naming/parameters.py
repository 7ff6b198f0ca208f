"""Parameters of tensordict that a function here does not have: renamed, or left out on purpose.

A call that names one works as before where the parameter only has another name here, and else
raises the error that says why it is left out. The texts and names are those of `left_out.toml`,
which is read when such a call is made, never by an import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Never, TypeVar, cast

from kd_core._compat import traced_as
from kd_core._errors import InvalidArgument
from kd_core._naming.left_out import MODULES, decided

F = TypeVar("F", bound=Callable[..., object])


def explains_parameters(function: F) -> F:
    """Decorate a function so that it knows the parameters of tensordict which it does not have.

    Not for what is called in a fraction of a microsecond, such as `get` and `set`: the call through
    the decorator would show in the benchmarks.
    """
    code = function.__code__
    names = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])

    @traced_as(cast("Callable[..., object]", function))
    @wraps(function)
    def call(*args: object, **given: object) -> object:
        if given and not names.issuperset(given):
            given = known_parameters(function.__qualname__, given, names)
        return function(*args, **given)

    # dynamo, which traces the function itself, guards the defaults that it finds here
    call.__defaults__, call.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return cast("F", call)


def known_parameters(
    function: str, given: Mapping[str, object], names: frozenset[str]
) -> dict[str, object]:
    """Return keyword arguments under the names that a function has for them.

    Args:
        function: the qualified name of the function.
        given: the keyword arguments; unknown names are kept, so that Python refuses them.
        names: the parameters of the function.

    Raises:
        InvalidArgument: if one of them is left out on purpose, or given under both names.
    """
    known: dict[str, object] = {}
    for name, value in given.items():
        row = None if name in names else _row(function, name)
        if row is not None and "renamed" not in row:
            refuse_parameter(function, name)
        new = name if row is None else row["renamed"]
        if new != name and new in given:
            raise InvalidArgument(f"expected `{new}` once, got it as `{name}`, too.")
        known[new] = value
    return known


def refuse_parameter(function: str, name: str) -> Never:
    """Raise the error that says why a parameter is left out, and what to write instead."""
    row = _row(function, name) or {"reason": "", "instead": ""}
    raise InvalidArgument(
        f"`{_called(function)}({name}=...)` is left out on purpose. {row['reason']} "
        f"{row['instead']}"
    )


def _called(function: str) -> str:
    """Return how users call a function: a class by its own name."""
    owner, _, name = function.rpartition(".")
    return owner if name in ("__init__", "__new__") else name


def _row(function: str, parameter: str) -> Mapping[str, str] | None:
    """Return the row of a parameter of a function or a method; `None` if there is none."""
    owner, _, name = function.rpartition(".")
    areas = decided()
    if name in ("__init__", "__new__"):
        places = [(owner, "()"), *((area, owner) for area in MODULES)]
    else:
        places = [(area, name) for area in ((owner, "TensorDict", *areas) if owner else MODULES)]
    for area, called in places:
        row = areas.get(area, {}).get(f"{called}({parameter})")
        if row is not None:
            return row
    return None
