"""Tensor classes that are made of other classes: by a decorator, or of a dataclass."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from types import CellType
from typing import TYPE_CHECKING, TypeVar, cast, dataclass_transform, overload

from kd_core import _registry as registry
from kd_core._containers.field_declarations import CASTS, Declaration, checked_options
from kd_core._containers.tensorclass import (
    TensorClass,
    TensorClassMeta,
    from_mapping,
    is_tensor_class,
    set_unless_field,
)
from kd_core._containers.tensordict import TensorDict
from kd_core._errors import InvalidArgument, wrong_type

if TYPE_CHECKING:
    from kd_core._types import BatchSize, DeviceLike

T = TypeVar("T")


@overload
@dataclass_transform(eq_default=False, field_specifiers=(field,))
def tensorclass(cls: type[T], /) -> type[T]: ...
@overload
@dataclass_transform(eq_default=False, field_specifiers=(field,))
def tensorclass(
    *,
    autocast: bool = False,
    frozen: bool = False,
    nocast: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    kw_only: bool = False,
    checked: bool = False,
    skip_post_init_on_rebuild: bool = False,
    cast_filter: Callable[..., bool] | None = None,
) -> Callable[[type[T]], type[T]]: ...
def tensorclass(
    cls: type[T] | None = None,
    /,
    *,
    autocast: bool = False,
    frozen: bool = False,
    nocast: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    kw_only: bool = False,
    checked: bool = False,
    skip_post_init_on_rebuild: bool = False,
    cast_filter: Callable[..., bool] | None = None,
) -> type[T] | Callable[[type[T]], type[T]]:
    """Convert a class with annotated fields to a `TensorClass`.

    Prefer the base class, `class Sample(TensorClass)`: type checkers then know the methods of
    containers.

    Args:
        cls: the class; its annotations become fields, its methods stay.
        autocast: see `TensorClass` for this option and the others.
        frozen: fields cannot be set after construction.
        nocast: numbers and lists are kept as they are.
        shadow: accepted: fields may have the names of methods in any case.
        tensor_only: every value becomes a tensor.
        kw_only: the constructor takes keywords only.
        checked: values must be of the declared types.
        skip_post_init_on_rebuild: accepted: operations never run `__post_init__`.
        cast_filter: accepted: annotations say what `autocast` casts.

    Example:
        >>> import torch
        >>> from torch import Tensor
        >>> from kd_core import tensorclass
        >>> @tensorclass
        ... class Point:
        ...     x: Tensor
        ...     y: Tensor
        >>> Point(x=torch.zeros(3), y=torch.ones(3), batch_size=[3])[0].y
        tensor(1.)
    """
    options = {
        "autocast": autocast,
        "frozen": frozen,
        "nocast": nocast,
        "shadow": shadow,
        "tensor_only": tensor_only,
        "kw_only": kw_only,
        "checked": checked,
    }

    def convert(plain: type[T]) -> type[T]:
        return cast("type[T]", _made_of(plain, options))

    return convert if cls is None else convert(cls)


def _made_of(plain: type, options: Mapping[str, bool]) -> type[TensorClass]:
    if is_tensor_class(plain):
        _set_options(plain, options)
        return plain
    if not isinstance(plain, type):
        raise wrong_type("the argument of `tensorclass`", "a class", plain)
    hidden = {"__dict__", "__weakref__", "__dataclass_fields__", "__dataclass_params__"}
    of_dataclass = "__dataclass_params__" in vars(plain)
    if of_dataclass:
        hidden |= {"__init__", "__repr__", "__eq__", "__hash__", "__match_args__", "__replace__"}
    namespace = {key: value for key, value in vars(plain).items() if key not in hidden}
    bases = tuple(base for base in plain.__bases__ if base is not object)
    if of_dataclass:
        fields = dataclasses.fields(plain)
        namespace |= {each.name: copy.copy(each) for each in fields}  # with defaults and options
        namespace["__annotations__"] = {each.name: each.type for each in fields}
        bases = ()
    made = TensorClassMeta(plain.__name__, (*bases, TensorClass), namespace, **options)
    made.__qualname__ = plain.__qualname__
    _hand_over(plain, made, namespace.values())
    if not of_dataclass:  # a class derived from the plain one inherits the fields, too
        with contextlib.suppress(AttributeError, TypeError):  # of a class that refuses it
            name = "__dataclass_fields__"
            setattr(plain, name, getattr(made, name))
    return cast("type[TensorClass]", made)


def _set_options(cls: type[TensorClass], options: Mapping[str, bool]) -> None:
    """Let the options of a decorator hold for a class whose base is a tensor class already.

    As with dataclasses, how the base casts is not inherited then; what it forbids is.
    """
    now = cls._kd_declared
    kept = dict.fromkeys(now.options - CASTS, True)
    chosen = checked_options(cls.__name__, {**options, **kept})
    if chosen != now.options:
        cls._kd_declared = Declaration(
            now.taken, now.init_vars, chosen, now.more_keys, now.by_attribute
        )
        if cls._kd_declared.frozen and cls.__setattr__ is object.__setattr__:
            setattr(cls, "__setattr__", set_unless_field)  # noqa: B010  # not an attribute for checkers


def _hand_over(plain: type, made: type, members: Iterable[object]) -> None:
    """Let `super()` and `__class__` in the methods of a class mean the class made of it.

    They read one cell, which all methods of a class body share.
    """
    for member in members:
        parts = (member.fget, member.fset, member.fdel) if isinstance(member, property) else ()
        for part in parts or (member,):
            function = inspect.unwrap(getattr(part, "__func__", part))  # type: ignore[arg-type]  # any member
            for cell in getattr(function, "__closure__", None) or ():
                if _content(cell) is plain:
                    cell.cell_contents = made


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


_MADE: dict[tuple[type, frozenset[str]], type[TensorClass]] = {}


def from_dataclass(
    obj: object,
    *,
    dest_cls: type[TensorClass] | None = None,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: BatchSize | None = None,
    device: DeviceLike | None = None,
    frozen: bool = False,
    autocast: bool = False,
    nocast: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    inplace: bool = False,
) -> TensorClass | type[TensorClass]:
    """Convert a dataclass to a `TensorClass`, or an instance of one to an instance.

    Args:
        obj: a dataclass, or an instance of one; nested instances are converted too.
        dest_cls: the tensor class of the result; `None`: it is made of the dataclass, once.
        auto_batch_size: infer the batch size of an instance.
        batch_dims: the largest number of batch dimensions to infer.
        batch_size: the batch size of an instance.
        device: the device of an instance.
        frozen: see `TensorClass` for this option and the following.
        autocast: cast values to the declared types.
        nocast: keep numbers and lists as they are.
        shadow: accepted: fields may have the names of methods in any case.
        tensor_only: every value becomes a tensor.
        inplace: nothing for an instance. A class is not changed: instances that exist would break.

    Raises:
        InvalidArgument: if it is neither, or a class with `inplace`.

    Example:
        >>> import dataclasses, torch
        >>> from kd_core import from_dataclass
        >>> @dataclasses.dataclass
        ... class Point:
        ...     x: torch.Tensor
        ...     name: str
        >>> point = from_dataclass(Point(torch.zeros(2), "a"), batch_size=[2])
        >>> point.x, point.name
        (tensor([0., 0.]), 'a')
    """
    if not dataclasses.is_dataclass(obj):
        raise wrong_type("the argument of `from_dataclass`", "a dataclass or its instance", obj)
    if inplace and inspect.isclass(obj):
        raise InvalidArgument(
            f"`inplace=True` cannot change the class `{obj.__name__}`: its instances would break. "
            f"Write `{obj.__name__} = from_dataclass({obj.__name__})`."
        )
    options = {
        "frozen": frozen,
        "autocast": autocast,
        "nocast": nocast,
        "shadow": shadow,
        "tensor_only": tensor_only,
    }
    plain = obj if inspect.isclass(obj) else type(obj)
    key = plain, frozenset(name for name, value in options.items() if value)
    cls = dest_cls or _MADE.get(key)
    if cls is None:
        cls = _MADE[key] = _made_of(plain, options)
        if cls is not plain:  # the name tells it from the dataclass, as in tensordict
            cls.__name__ = cls.__qualname__ = f"{plain.__name__}_tc"
    if inspect.isclass(obj):
        return cls
    values = {each.name: _plain_value(getattr(obj, each.name)) for each in dataclasses.fields(obj)}
    if auto_batch_size and batch_size is None:
        batch_size = TensorDict.from_dict(
            values, auto_batch_size=True, batch_dims=batch_dims
        ).batch_size
    return from_mapping(cls, values, batch_size, device)


def _plain_value(value: object) -> object:
    """Return the value of a field; an instance of a dataclass becomes a mapping."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            each.name: _plain_value(getattr(value, each.name)) for each in dataclasses.fields(value)
        }
    return value


registry.register("from_dataclass", from_dataclass)
