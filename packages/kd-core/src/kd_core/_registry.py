"""Container kinds by role, for lower modules that build a container they cannot import; by name.

Knows names and constructors; must not know what a container does. Roles are first, then the names
of classes in pickles, and those of classes and types in the files of stores.

Operations and files make dense containers, lazy stacks and data that is not a tensor, and these
kinds inherit the operations: `make_dense`, `nest_mapping`, `swap_of`, `wrap_data`, `wrap_rows`,
`lazy_stack` cannot be imported there. Methods that every container has make a kind that few
programs need: `attributes_of`, `from_dataclass`, `persistent`, `to_store`; values of the package
tensordict are converted wherever a value is stored: `foreign_node`. `params_of` belongs to another
distribution. What acts on a container that is at hand is a method of its class instead,
`td._kd_engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

from kd_core._errors import FormatError, InvalidValue, listed, not_valid

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry, Node, RowData, Values

    class WrapsData(Protocol):
        """Wraps a value that is not a tensor."""

        def __call__(
            self, data: object, desc: Descriptor, state: tuple[bool, bool] | None = None
        ) -> Values: ...

    class Maker(Protocol):
        """Makes a container, of the class that the caller expects: none can be named here."""

        def __call__(self, *args: object, **options: object) -> C: ...  # type: ignore[type-var]  # its caller says which

    class Persistent(Protocol):
        """A class of containers that lie in a file."""

        from_dict: Maker
        from_h5: Maker


T = TypeVar("T")
C = TypeVar("C", bound="Node", covariant=True)


make_dense: Maker
"""Wrap checked entries in the dense container; set by `_containers.tensordict`."""

nest_mapping: Maker
"""Build a nested dense container from a mapping; set by `_containers.tensordict`."""

wrap_data: WrapsData
"""Wrap non-tensor data, in the state that `_kd_state` told if there is one; set by
`_containers.non_tensor`."""

wrap_rows: Callable[[list[object], Tensor | None, Descriptor], RowData]
"""Wrap values and the position of each row's value, `None` if there is one a row, in order; set by
`_containers.non_tensor_stack`."""

whole: Callable[[object, Descriptor], object]
"""Return the value of an entry, which rows that are made of it share; set by
`_containers.non_tensor_stack`."""

tree_of_frame: Callable[[object, str | None, None], tuple[dict[str, object], int]]
"""Return the columns of a data frame, and the number of its rows; set by `_convert.tables`."""

foreign_node: Callable[[object], Node]
"""Convert a container of the package tensordict, or a tensor without batch dimensions of it; set by
`_convert.plain`."""

from_dataclass: Callable[..., object]
"""Convert an instance of a dataclass to one of a tensor class; set by `_containers.declaring`."""

attributes_of: Maker
"""Make a container of what each leaf is; set by `_containers.tensorclass`."""

lazy_stack: Maker
"""Stack containers lazily along a dimension; set by `_containers.lazy_stack`."""

swap_of: Maker
"""Make a container of what an exchange took out of a module; set by `_containers.tensordict`."""

persistent: Persistent
"""The class that writes a container to a file of HDF5, and opens one; set by
`_containers.persistent`."""

to_store: Maker
"""Send a container to a server of Redis; set by `_containers.redis_store`."""

params_of: Callable[[Node, nn.Module | None], Node]
"""Make a container of parameters that is a module itself; set by a sibling package."""


class NamedKind:
    """What a class of entries is in a pickle that `torch.load(weights_only=True)` reads.

    The pickle may name the class and hand it to what restores containers. It can neither call it,
    which would run code of its author, nor make an instance past what restores them.

    Args:
        cls: the class.
        restore: what a call of the class is instead, which pickles of some entries hold.
    """

    def __init__(self, cls: type, restore: Callable[..., object] | None = None) -> None:
        self.cls, self.restore = cls, restore

    def __getattribute__(self, name: str) -> object:
        if name in ("__module__", "__qualname__"):  # a class gets its names after it is created
            return getattr(object.__getattribute__(self, "cls"), name)
        return object.__getattribute__(self, "_refuse" if name == "__new__" else name)

    def __call__(self, *args: object) -> object:
        """Restore an entry, or refuse to."""
        return (self.restore or self._refuse)(*args)

    def _refuse(self, *args: object) -> object:
        raise not_valid(f"`{self.cls.__name__}` is restored by a function, and not called")


def kind_named(kind: object, base: type[T]) -> type[T]:
    """Return the class of containers that a pickle names, which must be one of a base class."""
    cls = kind.cls if isinstance(kind, NamedKind) else kind
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise not_valid(f"it builds {cls!r} as a `{base.__name__}`, which it is not")
    return cls


LATER: Final = {
    "foreign_node": "kd_core._convert.plain",
    "from_dataclass": "kd_core._containers.declaring",
    "persistent": "kd_core._containers.persistent",
    "to_store": "kd_core._containers.redis_store",
    "tree_of_frame": "kd_core._convert.tables",
}
"""Modules that few programs need, by the roles that they fill: imported at the first use of one."""


if not TYPE_CHECKING:  # which knows the roles

    def __getattr__(role: str) -> object:
        if role not in LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {role!r}", name=role)
        import_module(LATER[role])
        return globals()[role]


def register(role: str, factory: Callable[..., object]) -> None:
    """Fill one of the roles above; the first one stays, if a module is executed again."""
    globals().setdefault(role, factory)


_kinds: list[type] = []
_listeners: list[Callable[[type], None]] = []


def new_kind(cls: type) -> None:
    """Register a class of containers; called when the class is created."""
    _kinds.append(cls)
    for listener in _listeners:
        listener(cls)


def on_new_kind(listener: Callable[[type], None]) -> None:
    """Call `listener` with each class of containers, those that exist and those to come."""
    _listeners.append(listener)
    for cls in _kinds:
        listener(cls)


# Classes and types of users, by the names under which files refer to them.
#
# A file holds a name, never code, and nothing is imported because a file names it. A class of
# containers is found by its full name among those that the program has defined, or by the name
# under which it is registered; a type of data must have been registered.

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


def is_type(name: object) -> bool:
    """Return whether a type of non-tensor data is registered by a name."""
    return name in _TYPE_NAMES


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
