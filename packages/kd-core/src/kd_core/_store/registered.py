"""Classes and types of users, by the names under which files refer to them.

A file holds a name, never code, and nothing is imported because a file names it. A class of
containers is found by its full name among those that the program has defined, or by the name under
which it is registered; a type of data must have been registered.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from kd_core._errors import FormatError, InvalidValue, listed
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from kd_core._batch.descriptor import Descriptor
    from kd_core._nodes.entry import Entry, Node


Build: TypeAlias = "Callable[[dict[str, Entry], Descriptor, object], Node]"
"""Returns a container of entries, a descriptor and its state; checks all three."""


class StoredType:
    """A type of non-tensor data."""

    __slots__ = ("cls", "decode", "encode", "name")

    def __init__(
        self,
        name: str,
        cls: type,
        encode: Callable[[object], object],
        decode: Callable[[object], object],
    ) -> None:
        self.name = name
        self.cls = cls
        self.encode = encode
        self.decode = decode


class StoredClass:
    """A class of containers, and how it is read from files.

    Args:
        name: the name under which files refer to it.
        version: the version that is written.
        cls: the class.
        build: returns a container of entries, a descriptor, and what `state` returned.
        state: returns what a file keeps of a container beside its entries: strings, numbers,
            lists, tuples and dicts; `None`: nothing, and `build` takes `None`.
    """

    __slots__ = ("build", "cls", "name", "state", "version")

    def __init__(
        self,
        name: str,
        version: int,
        cls: type,
        build: Build,
        state: Callable[..., object] | None = None,
    ) -> None:
        self.name, self.version, self.cls = name, version, cls
        self.build, self.state = build, state


TYPES: Final[dict[type, StoredType]] = {}
CLASSES: Final[dict[type, StoredClass]] = {}
_TYPE_NAMES: Final[dict[str, StoredType]] = {}
_CLASS_NAMES: Final[dict[str, StoredClass]] = {}


def add_type(stored: StoredType) -> None:
    """Register a type of non-tensor data; registering the same one again changes nothing."""
    known = _TYPE_NAMES.get(stored.name)
    _check_free(stored.name, known.cls if known else None, stored.cls)
    _TYPE_NAMES[stored.name] = TYPES[stored.cls] = stored


def add_class(stored: StoredClass) -> None:
    """Register a class of containers; registering the same one again changes nothing."""
    known = _CLASS_NAMES.get(stored.name)
    _check_free(stored.name, known.cls if known else None, stored.cls)
    _CLASS_NAMES[stored.name] = CLASSES[stored.cls] = stored


def _check_free(name: str, known: type | None, cls: type) -> None:
    if known is None or (known.__module__, known.__qualname__) == (
        cls.__module__,
        cls.__qualname__,
    ):
        return
    raise InvalidValue(
        f"the name {name!r} is registered for `{known.__qualname__}` already. Choose another one "
        f"for `{cls.__qualname__}`."
    )


def type_named(name: object) -> StoredType:
    """Return a registered type of non-tensor data.

    Raises:
        FormatError: if there is none of this name.
    """
    known = _TYPE_NAMES.get(name) if isinstance(name, str) else None
    if known is None:
        raise FormatError(
            f"the type {name!r} is not registered; registered types: {listed(_TYPE_NAMES)}. "
            "Register it with `kd_core.store.register_type` before loading."
        )
    return known


def class_named(name: object, version: object) -> StoredClass | None:
    """Return a registered class of containers; `None` if there is none of this name.

    Raises:
        FormatError: if the file has a newer version of it.
    """
    known = _CLASS_NAMES.get(name) if isinstance(name, str) else None
    if known is not None and (type(version) is not int or not 1 <= version <= known.version):
        raise FormatError(
            f"version {version!r} of the class {name!r} is not known, expected 1 to "
            f"{known.version}. Load it with the version of the program that saved it."
        )
    return known


BY_FULL_NAME: Final = 0
"""The version of a class that is not registered: a file names it by module and class."""


def full_name(cls: type) -> str:
    """Return the name of a class that is not registered."""
    return f"{cls.__module__}.{cls.__qualname__}"


def class_defined(name: object, version: object) -> type[AbstractContainer] | None:
    """Return the class of containers of a full name, the newest one; `None` if there is none."""
    if version != BY_FULL_NAME:
        return None
    found = None
    seen: set[type] = set()
    rest: list[type[AbstractContainer]] = [AbstractContainer]  # type: ignore[type-abstract]  # its subclasses are asked for
    while rest:
        for cls in rest.pop().__subclasses__():
            if cls not in seen:
                seen.add(cls)
                rest.append(cls)
                if full_name(cls) == name and cls._kd_tensor_class in (None, cls):
                    found = cls
    return found


def warn_unknown(name: object) -> None:
    """Warn that a container is loaded as a plain one, because its class is not known."""
    warnings.warn(
        f"the class {str(name)[:200]!r} of a saved container is not defined here, or has other "
        "fields: a `TensorDict` is loaded. Import the class before loading, or register it with "
        "`kd_core.store.register_class`.",
        UserWarning,
        stacklevel=2,
    )
