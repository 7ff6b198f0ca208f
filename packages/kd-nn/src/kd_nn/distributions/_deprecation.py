"""Names of a module that go away: they work, and warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping


def deprecated_attributes(
    module: str, attributes: Mapping[str, tuple[object, str | None]], *, removal: str
) -> Callable[[str], object]:
    """Return a `__getattr__` for a module, which serves names that go away with a warning.

    Args:
        module: The name of the module.
        attributes: By name, what it means, and what to write instead, if there is something.
        removal: The version without these names.

    Example:
        >>> lookup = deprecated_attributes("m", {"old": (1, "new")}, removal="2.0")
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     lookup("old")
        1
    """

    def lookup(name: str) -> object:
        if name not in attributes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        value, instead = attributes[name]
        advice = "" if instead is None else f" Write `{instead}`."
        text = f"`{module}.{name}` is deprecated and goes away in {removal}.{advice}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return value

    return lookup
