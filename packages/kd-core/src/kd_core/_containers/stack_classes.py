"""The class of a lazy stack of tensor classes, which is made of the tensor class.

It is a lazy stack with the fields, methods and class variables of the tensor class. Each base class
of a tensor class has its own, so that `super()` in a method finds the next one. Private names of
lazy stacks are kept.

Knows what the body of a class holds; must not know how fields are read or stacks stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import CellType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import TYPE_CHECKING, Final, TypeVar, cast

from kd_core._nodes.entry import is_data
from kd_core._torch_private import assume_constant_result

if TYPE_CHECKING:
    from kd_core._protocol.primitives import AbstractContainer

    K = TypeVar("K", bound=AbstractContainer)

_CLASS_METHODS: Final = ("fields", "from_dict", "from_tensordict")
_OWN: Final = frozenset(
    {
        *("__init__", "__new__", "__init_subclass__", "_stack_classes"),
        *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
        *("__copy__", "__deepcopy__"),
    }
)
"""Names of a tensor class that its lazy stacks do not take: how they are built and pickled."""


def plain_class(kind: type[K]) -> type[K]:
    """Return the class of lazy stacks without the fields of a tensor class."""
    if kind._kd_tensor_class is None:
        return kind
    return cast("type[K]", getattr(kind, "_plain_class"))  # noqa: B009  # of stacks alone


def stack_class(kind: type[K], members: Sequence[AbstractContainer]) -> type[K]:
    """Return the class of a lazy stack with the fields that all of its members declare.

    Members of several tensor classes have those of their first common base class that has any.

    Args:
        kind: a class of lazy stacks, with fields or without.
        members: what is stacked.
    """
    cls = members[0].__class__
    classes = [member.__class__ for member in members]
    if all([each is cls for each in classes]):  # noqa: C419  # a generator is slow to trace
        classes = classes[:1]
    depth = _depth(kind, *classes)
    if depth < 0:
        return plain_class(kind)
    base = cast("type[AbstractContainer]", members[0]._kd_tensor_class).__mro__[depth]
    known: dict[type[K], type[K]] = getattr(base, "_stack_classes")  # noqa: B009  # of tensor classes
    return known[plain_class(kind)]


@assume_constant_result  # dynamo traces no making of classes, and uses none that it is given
def _depth(kind: type[K], *classes: type[AbstractContainer]) -> int:
    """Return the place of the shared tensor class among the bases of the first, -1 for none."""
    first = classes[0]._kd_tensor_class
    for depth, base in enumerate(() if first is None else first.__mro__):
        if _has_fields(base) and all(
            issubclass(each._kd_tensor_class or each, base) for each in classes
        ):
            _made(base, plain_class(kind))
            return depth
    return -1


def _has_fields(cls: type) -> bool:
    return getattr(cls, "_kd_tensor_class", None) is cls and bool(cls._kd_declared.fields)


def _made(cls: type, plain: type[K]) -> type[K]:
    """Return the class of lazy stacks of a tensor class; it is made at the first call."""
    known: dict[type[K], type[K]] | None = vars(cls).get("_stack_classes")
    if known is None:
        known = {}
        type.__setattr__(cls, "_stack_classes", known)
    if plain not in known:
        bases = tuple([_base(base, plain) for base in cls.__bases__])
        cell = CellType()
        made = type(f"LazyStacked{cls.__name__}", bases, _body(cls, plain, cell))
        setattr(made, "_kd_engine", plain)  # noqa: B010  # of containers
        cell.cell_contents = known[plain] = made
    return known[plain]


def _base(base: type, plain: type[K]) -> type:
    if not hasattr(base, "_kd_tensor_class"):
        return base
    return plain if base._kd_tensor_class is None else _made(base, plain)


def _body(cls: type, plain: type, cell: CellType) -> dict[str, object]:
    """Return what the class of lazy stacks defines itself; `cell` will hold that class."""
    body: dict[str, object] = {}
    for name, value in vars(cls).items():
        if is_taken(name, value, plain):
            body[name] = rebound(value, cell)

    def build(made: type, *values: object, **named: object) -> object:
        return cls(*values, **named)

    body.update({name: getattr(cls, name) for name in _CLASS_METHODS})
    body["__new__"] = build  # `type(self)(...)` in a method builds a dense instance
    body["__getattr__"] = rebound(getattr(cls, "__getattr__"), cell)  # noqa: B009  # hidden from checkers
    body["__qualname__"] = f"LazyStacked{cls.__name__}"
    body["__replace__"] = getattr(plain, "_replaced")  # noqa: B009  # of stacks alone
    body["_plain_class"] = plain
    declaration = cls._kd_declared  # type: ignore[attr-defined]  # of a tensor class
    if not declaration.more_keys and "get" not in body:
        body["get"] = _unwrapping(plain.get)  # type: ignore[attr-defined]  # of containers
    return body


def _unwrapping(get: Callable[..., object]) -> Callable[..., object]:
    """Return `get` as instances have it: data that is not a tensor is read as its values."""

    @wraps(get)
    def unwrapped(self: object, *args: object, **named: object) -> object:
        found = get(self, *args, **named)
        return found._kd_item() if is_data(found) else found

    return unwrapped


def is_taken(name: str, value: object, plain: type) -> bool:
    """Return whether lazy stacks have an attribute of a tensor class."""
    if name in _OWN or isinstance(value, (GetSetDescriptorType, MemberDescriptorType)):
        return False
    private = name.startswith("_") and not name.startswith("__")
    return not private or name in _DECLARED or not hasattr(plain, name)


_DECLARED: Final = frozenset({"_kd_tensor_class", "_kd_declared"})


def rebound(value: object, cell: CellType) -> object:
    """Return a member of a class whose `super()` looks in another class, that of a cell."""
    if isinstance(value, (classmethod, staticmethod)):
        wrap: Callable[..., object] = type(value)
        return wrap(rebound(value.__func__, cell))
    if isinstance(value, property):
        parts = [rebound(part, cell) for part in (value.fget, value.fset, value.fdel)]
        make: Callable[..., object] = type(value)
        return make(*parts, value.__doc__)
    if not isinstance(value, FunctionType):
        return value
    names, old = value.__code__.co_freevars, value.__closure__ or ()
    inner = getattr(value, "__wrapped__", None)
    cells = tuple(
        cell
        if name == "__class__"
        else CellType(rebound(inner, cell))
        if inner is not None and was.cell_contents is inner
        else was
        for name, was in zip(names, old, strict=True)
    )
    if cells == old:
        return value
    new = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    new.__kwdefaults__, new.__doc__ = value.__kwdefaults__, value.__doc__
    new.__qualname__ = value.__qualname__
    new.__dict__.update(value.__dict__)
    return new
