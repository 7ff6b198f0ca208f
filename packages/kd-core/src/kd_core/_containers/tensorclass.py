"""`TensorClass`: a container whose keys are declared as typed fields.

A tensor class *is* a container: it uses the dense storage and inherits every method. Its fields are
read from annotations when the class is created. Each field is a descriptor that reads and writes
one entry. A field may have any name, also that of a method: the descriptor then stands before the
method. An instance may lack entries of its fields, which then read as `None`: `select` returns an
instance, too.

The classes need a metaclass for two reasons: instances do not have a `__dict__`, so assigning a
misspelt field is an error, and type checkers derive the signature of the constructor from the
fields. Code of kd asks `_kd_engine`, the class of this module, for the methods of an instance,
because an author's class may have fields and methods of the same names.

The path of a call: `TensorClass.__init__` matches arguments with fields (`_bind`), and `_complete`
stores them by `kd_core._containers.tensordict.fill`.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field
from functools import wraps
from inspect import signature
from types import FunctionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Never,
    TypeGuard,
    TypeVar,
    cast,
    dataclass_transform,
)

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._base import TensorDictBase
from kd_core._containers.dense import Dense
from kd_core._containers.field_declarations import (
    STORED,
    Declaration,
    check_names,
    checked_options,
    converted,
    dataclass_fields,
    declared,
    hint_of,
    hints_of,
    inherited,
    is_none,
    left_out,
    prepare_dataclass_fields,
    signature_of,
    split_options,
)
from kd_core._containers.non_tensor import NonTensorData
from kd_core._containers.tensordict import TensorDict, fill, make_dense
from kd_core._descriptor import describe, describe_on
from kd_core._errors import (
    FROZEN,
    InvalidArgument,
    KeyNotFound,
    KeyThroughLeaf,
    UnknownField,
    listed,
    locked,
    wrong_type,
)
from kd_core._keys import format_key, nearest_key, path_of
from kd_core._leaves.arrays import is_number, is_of_numpy
from kd_core._naming import explain_attribute
from kd_core._nodes import Entry, is_data, is_node, leaf_or_node
from kd_core._ops.conversion import build
from kd_core._ops.description import named as with_names
from kd_core._protocol import AbstractContainer, Composite, absent, lock
from kd_core._shapes import batch_of, checked_names
from kd_core._types import NO_DEFAULT
from kd_core._validation import with_plain_keys

if TYPE_CHECKING:
    from typing import Self

    import torch

    from kd_core._descriptor import Descriptor
    from kd_core._nodes import AnyKey
    from kd_core._types import BatchSize, DeviceLike

    _Nested = Mapping[str, object] | TensorDictBase

    class _BatchSize:
        def __get__(self, owner: object, kind: object = None) -> torch.Size: ...
        def __set__(self, owner: object, value: BatchSize | None) -> None: ...

    class _Device:
        def __get__(self, owner: object, kind: object = None) -> torch.device | None: ...
        def __set__(self, owner: object, value: DeviceLike | None) -> None: ...

    D = TypeVar("D", bound="TensorClass")


T = TypeVar("T")


class _FieldOf(Generic[T]):
    """The descriptor of a field: reads and writes its entry."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: TensorClass | None, owner: type) -> object:
        if instance is None:
            return self
        value = instance._kd_entries.get(self._name)
        if value is None:
            return _absent(instance, self._name)
        return value if isinstance(value, Tensor) else value._kd_item()

    def __set__(self, instance: TensorClass, value: T) -> None:
        kind = type(value)
        if kind is Tensor or kind is TensorDict:
            instance._kd_put(self._name, value)
        else:
            _set_field(instance, self._name, value)

    def __delete__(self, instance: TensorClass) -> None:
        if _declaration_of(instance).frozen:
            raise locked(f"remove {format_key(self._name)}", FROZEN)
        instance._kd_check_unlocked(f"remove {format_key(self._name)}")
        if self._name in instance._kd_entries:
            instance._kd_del_entry(self._name)


def _declaration_of(instance: TensorClass) -> Declaration:
    return type(instance)._kd_declared  # a lazy stack of instances has it, too


def _absent(instance: TensorClass, name: str) -> object:
    """Return the value of a field that has no entry.

    It is `None`, the list of those of the members of a stack of which only some have one, or the
    default where keys are open.
    """
    declaration = _declaration_of(instance)
    if not declaration.more_keys:
        return _of_members(instance, name)
    default = declaration.fields[name].default
    if default is MISSING:
        raise _unknown(instance._kd_tensor_class, name)
    return default


def _of_members(instance: object, name: str) -> list[object] | None:
    """Return the values of a field that only some members of a stack hold, and `None`s."""
    if not isinstance(instance, Composite):
        return None
    values: list[object] = [getattr(member, name) for member in instance._members]
    return None if all(value is None for value in values) else values


def _set_field(instance: TensorClass, name: str, value: object) -> None:
    """Set a field to a value that may be no entry; `None` removes its entry."""
    declaration = _declaration_of(instance)
    if not declaration.more_keys:
        if value is None:
            _clear_field(instance, name)
            return
        if not declaration.converts:
            value = _whole(value, instance._kd_desc)
    instance._kd_put(name, value)


def _clear_field(instance: TensorClass, name: str) -> None:
    """Remove the entry of a field that is set to `None`."""
    instance._kd_check_unlocked(f"set {format_key(name)}")
    _check_none(instance, name)
    _remove(instance, name)


def _check_none(instance: TensorClass, name: str) -> None:
    """Raise if a field cannot be `None`."""
    declaration = _declaration_of(instance)
    # A field that is not in the constructor has no entry until it is set.
    if not declaration.keeps and declaration.fields[name].init:
        cls = instance._kd_tensor_class
        converted(cls, declaration.options, name, None, instance._kd_desc.unlocked())


def _remove(node: AbstractContainer, name: str) -> None:
    """Remove an entry from a container, or from each member of a stack that holds it."""
    if isinstance(node, Composite):
        for member in node._members:
            _remove(member, name)
    elif name in node._kd_entries:
        node._kd_del_entry(name)


def _whole(value: object, desc: Descriptor) -> object:
    """Wrap a dict or a tuple, which a field keeps as the object that it is."""
    kept = isinstance(value, (dict, tuple))
    return registry.wrap_data(value, desc.unlocked()) if kept else value


def _beside_rows(cls: type[TensorClass], key: str, value: object, desc: Descriptor) -> object:
    """Wrap a number that is not a row, which a field of numbers keeps as it is.

    One of numpy is kept in any case: Python has no number of its type.
    """
    plain = isinstance(value, (int, float))  # one of float64 is a `float`, too
    if not plain and is_of_numpy(value) and is_number(value):
        return value if cls._kd_declared.more_keys else registry.wrap_data(value, desc.unlocked())
    if not plain or not desc.ndim:
        return value
    if cls._kd_declared.more_keys or cls._kd_declared.converts:
        return value
    if not any(hint in _NUMBERS for hint in hints_of(cls, key)):  # 2.15 traces no `isdisjoint`
        return value
    return registry.wrap_data(value, desc.unlocked())


_NUMBERS: Final[frozenset[object]] = frozenset((bool, int, float))


class _DataclassFields:
    """The attribute by which `dataclasses.fields`, `replace` and `is_dataclass` know the fields.

    That of an instance, which `replace` reads, has the batch size, device and names, too. A class
    that takes further keys is not a dataclass: its fields are not all that an instance holds.
    """

    def __get__(
        self, instance: TensorClass | None, owner: type[TensorClass]
    ) -> dict[str, Field[object]]:
        kind = owner if instance is None else type(instance)  # dynamo knows where this one is from
        declared: Declaration = kind._kd_declared
        if declared.more_keys:
            raise AttributeError(f"`{owner.__name__}` is not a dataclass: it takes further keys.")
        if is_dynamo_compiling():
            prepare_dataclass_fields(kind)
        known, fields = dataclass_fields(declared), declared.fields
        return known if instance is not None else {name: known[name] for name in fields}


class _NoDataclassParams:
    """The attribute by which `dataclasses.dataclass` knows how a base was decorated: there is none.

    It is read where `@dataclass` decorates a tensor class.
    """

    def __get__(self, instance: object, owner: type[TensorClass]) -> Never:
        raise AttributeError(
            f"`{owner.__name__}` is a tensor class, whose annotations are fields already. Leave "
            "out `@dataclass`; its options are keywords of the class, as in "
            "`class Sample(TensorClass, frozen=True)`."
        )


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class TensorClassMeta(ABCMeta):
    """The metaclass of tensor classes, which converts annotations to fields."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, object], **options: object
    ) -> TensorClassMeta:
        """Create the class without a `__dict__`; move defaults from the namespace to the fields."""
        above = [base for base in bases if is_tensor_class(base)]
        own_options, rest = split_options(name, options, bases)
        namespace.setdefault("__slots__", ())
        made = super().__new__(cls, name, bases, namespace, **rest)
        if above:
            own = cast("type[TensorClass]", made)
            chosen = own_options.union(*[base._kd_declared.options for base in above])
            own._kd_engine = above[0]._kd_engine
            own._kd_tensor_class = own
            _declare(own, namespace, checked_options(name, dict.fromkeys(chosen, True)))
        return made

    def __init__(
        cls, name: str, bases: tuple[type, ...], body: dict[str, object], **options: object
    ) -> None:
        super().__init__(name, bases, body)

    def __setattr__(cls, name: str, value: object) -> None:
        """Set a class variable or method, for lazy stacks of instances, too."""
        super().__setattr__(name, value)
        for stacked in vars(cls).get("_stack_classes", {}).values():
            setattr(stacked, name, value)

    if not TYPE_CHECKING:  # checkers read brackets as the types of a generic class

        def __getitem__(cls, options):
            """Return a base class with options: `TensorClass["frozen", "autocast"]`.

            A class that defines `__class_getitem__` answers itself, and a generic class takes the
            types of its variables: `Box[str]`.
            """
            bases = (base for base in cls.__mro__ if base is not TensorDictBase)
            if any("__class_getitem__" in vars(base) for base in bases):
                return cls.__class_getitem__(options)
            names = options if isinstance(options, (tuple, list, set, frozenset)) else (options,)
            for name in names:
                if not isinstance(name, str):
                    raise InvalidArgument(
                        f"`{cls.__name__}[...]` takes names of options, got {name!r}. A class of "
                        "other types is generic: `class Box(TensorClass, Generic[T])`."
                    )
            key = cls, frozenset(names)
            made = _WITH_OPTIONS.get(key)
            if made is None:
                named = dict.fromkeys(names, True)
                made = TensorClassMeta(
                    cls.__name__, (cls,), {"__module__": cls.__module__}, **named
                )
                _WITH_OPTIONS[key] = made
            return made

        @property
        def __signature__(cls):
            """The parameters of the constructor: for `inspect.signature` and editors."""
            return signature_of(cls)


def is_tensor_class(value: object) -> TypeGuard[type[TensorClass]]:
    """Return whether a value is a tensor class: its metaclass answers."""
    return isinstance(value, TensorClassMeta)


_WITH_OPTIONS: dict[tuple[TensorClassMeta, frozenset[str]], TensorClassMeta] = {}


def _declare(
    cls: type[TensorClass], namespace: Mapping[str, object], options: frozenset[str]
) -> None:
    above, above_init_only = inherited(cls.__bases__)
    more_keys = cls._kd_declared.more_keys
    taken, init_only = declared(cls, namespace, more_keys)
    check_names(cls, namespace, taken)
    all_init_only = dict.fromkeys([*above_init_only, *init_only])
    own_setter = cls.__setattr__ not in {object.__setattr__, set_unless_field}
    cls._kd_declared = Declaration(above | taken, all_init_only, options, more_keys, own_setter)
    own = [name for name in taken if name not in init_only]
    given: dict[str, object] = {name: _FieldOf[object](name) for name in own}
    given |= {
        name: _FieldOf[object](name)
        for name in cls._kd_declared.fields
        if not isinstance(getattr(cls, name, None), _FieldOf) and name not in namespace
    }
    for name in init_only:
        if isinstance(namespace.get(name), Field) and taken[name].default is not MISSING:
            given[name] = taken[name].default
    owner = next(base for base in cls.__mro__ if "__dataclass_fields__" in vars(base))
    if not is_tensor_class(owner):
        given["__dataclass_fields__"] = vars(TensorClass)["__dataclass_fields__"]
    given["__match_args__"] = namespace.get("__match_args__", cls._kd_declared.by_position)
    for name in ("__init__", "__repr__", "__eq__"):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        by_dataclass = "__dataclass_params__" in vars(owner)  # else a class that was decorated
        not_of_fields = name == "__init__" and "__dataclass_fields__" not in vars(owner)
        if not is_tensor_class(owner) and (by_dataclass or not_of_fields):
            given[name] = getattr(TensorClass, name)  # as a dataclass has it, whatever its bases do
    start = given.get("__init__", cls.__init__)
    if isinstance(start, FunctionType) and not hasattr(start, "__wrapped__"):
        given["__init__"] = start if start is TensorClass.__init__ else _started(start)
    assign = namespace.get("__setattr__")
    if isinstance(assign, FunctionType):
        given["__setattr__"] = _past_storage(assign)
    elif cls._kd_declared.frozen:
        given["__setattr__"] = set_unless_field
    hashes = any(base.__dict__.get("__hash__") for base in _own_classes(cls))
    if cls._kd_declared.frozen and not hashes:
        given["__hash__"] = object.__hash__  # by identity, as that of a tensor
    for name, value in given.items():
        setattr(cls, name, value)


def set_unless_field(self: TensorClass, name: str, value: object) -> None:
    """Assign to an attribute of an instance of a frozen class, as `dataclasses` has it.

    Its `__post_init__` may set a field by key, or by `object.__setattr__`.
    """
    if name in type(self)._kd_declared.fields:
        raise locked(f"set {format_key(name)}", FROZEN)
    object.__setattr__(self, name, value)


_STORAGE: Final = frozenset({"_kd_desc", "_kd_entries", "_kd_holders", "_kd_nested", "_kd_scope"})


def _past_storage(setter: FunctionType) -> Callable[[TensorClass, str, object], None]:
    """Return a `__setattr__` of an author that does not see how a container is stored."""

    @wraps(setter)
    def set_attribute(self: TensorClass, name: str, value: object) -> None:
        if name in _STORAGE:
            object.__setattr__(self, name, value)
        else:
            setter(self, name, value)

    return set_attribute


def _started(author: FunctionType) -> Callable[..., None]:
    """Return an `__init__` of an author for an instance that exists already, without entries.

    `batch_size`, `device`, `names` and `lock` are taken by the container where the author's
    function does not take them.
    """
    parameters = signature(author).parameters
    open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    taken = () if open_ended else tuple(name for name in STORED if name not in parameters)

    @wraps(author)
    def start(self: TensorClass, *values: object, **named: object) -> None:
        own: dict[str, Any] = {name: named.pop(name) for name in taken if name in named}
        lock_after = own.pop("lock", None)
        if not hasattr(self, "_kd_desc"):
            taken_too: dict[str, object] = {
                name: named[name] for name in _AT_START if name in named
            }
            _start(self, **(own | taken_too))
        elif own:
            _start(self, **own)
        author(self, *values, **named)
        if lock_after:
            lock(self)

    return start


_AT_START: Final = ("batch_size", "device", "names")


def _start(
    self: TensorClass,
    batch_size: BatchSize | None = None,
    device: DeviceLike | None = None,
    names: Sequence[str | None] | None = None,
) -> None:
    """Set up a new instance, without entries."""
    self._kd_desc = describe_on(() if batch_size is None else batch_of(batch_size), device)
    self._kd_entries = {}
    self._kd_nested = False
    if names is not None:
        self._kd_desc = with_names(self, names)._kd_desc


class TensorClass(Dense, metaclass=TensorClassMeta):
    """A container with declared fields: subclass it and annotate the fields.

    Fields are entries: `data.image` is `data["image"]`. Every method of a container works and
    returns an instance of the class. A method `__post_init__` runs after construction, as in a
    dataclass; a class may have an `__init__` of its own. A field without an entry reads as `None`,
    and one that is set to `None` has none. A dict or a tuple is kept as the object that it is. A
    method whose result has keys that are not fields returns a `TensorDict`.

    Options are keywords of the class, `class Sample(TensorClass, frozen=True)`, or names in
    brackets, `class Sample(TensorClass["frozen"])`, which type checkers do not understand:

    - `autocast`: cast values to the declared types: `Tensor`, numbers, strings, arrays, tensor
      classes; lists in fields of other types are one value.
    - `nocast`: keep numbers and arrays as they are, as non-tensor data.
    - `tensor_only`: convert every value but `None` to a tensor, and refuse those that cannot be.
    - `checked`: refuse values that are not of the declared type.
    - `frozen`: refuse to set a field by its attribute, and lock what the constructor makes;
      tensors can be written in place.
    - `kw_only`: take fields by keyword only.
    - `shadow`, `skip_post_init_on_rebuild`, `cast_filter`: accepted, and change nothing: a field
      may have the name of a method, operations never run `__post_init__`, and annotations say what
      is cast.

    Args:
        *values: values of the fields, in the order of their declaration or by keyword.
        batch_size: the leading dimensions of every field; `None` means `()`.
        device: the device to which every field is moved; `None` does not move them.
        names: the name of each batch dimension; `None`: no names.
        lock: whether the instance is locked.

    Raises:
        UnknownField: if a keyword is not a field.
        InvalidArgument: if a field without default is missing.
        ShapeMismatch: if a field's shape does not start with the batch size.

    Example:
        >>> import torch
        >>> from torch import Tensor
        >>> from kd_core import TensorClass
        >>> class Sample(TensorClass):
        ...     image: Tensor
        ...     label: Tensor
        ...     source: str = "camera"
        >>> data = Sample(torch.zeros(4, 3), torch.arange(4), batch_size=4)
        >>> data[:2].label, data.source
        (tensor([0, 1]), 'camera')
        >>> data.lable
        Traceback (most recent call last):
        ...
        kd_core.UnknownField: `lable` ... Did you mean `label`?
    """

    _kd_declared: ClassVar[Declaration] = Declaration({})
    __dataclass_fields__: ClassVar[_DataclassFields] = _DataclassFields()
    __dataclass_params__: ClassVar[_NoDataclassParams] = _NoDataclassParams()

    if TYPE_CHECKING:
        # Keywords of the constructor that checkers write; at run time they are properties.
        batch_size: _BatchSize = field(default=..., kw_only=True)  # type: ignore[assignment, override]  # for checkers: a keyword, not a property
        device: _Device = field(default=..., kw_only=True)  # type: ignore[assignment]  # for checkers: a keyword, not a property
        _kd_tensor_class: ClassVar[type[TensorClass]]
    else:

        def __init__(
            self,
            *values,
            batch_size=None,
            device=NO_DEFAULT,
            names=NO_DEFAULT,
            lock=NO_DEFAULT,
            **named,
        ):
            cls = type(self)
            declaration = cls._kd_declared
            if declaration.hidden:  # fields with the names of these keywords
                given = {"device": device, "names": names, "lock": lock}
                for name in declaration.hidden:
                    value = given.pop(name)
                    if value is not NO_DEFAULT:
                        named[name] = value
                device, names, lock = [given.get(name, NO_DEFAULT) for name in STORED[1:]]
            device = None if device is NO_DEFAULT else device
            names = None if names is NO_DEFAULT else names
            lock = None if lock is NO_DEFAULT else lock or None
            bound = _bind(cls, values, named)
            self._kd_desc = describe_on(() if batch_size is None else batch_of(batch_size), device)
            if declaration.converts:
                bound = _all_as_declared(self, bound)
            if not declaration.more_keys:
                for value in bound.values():
                    if type(value) is not Tensor:
                        bound = _plain(type(self), bound, self._kd_desc)
                        break
            _complete(self, bound, names, lock, declaration.by_attribute)

        # Hidden from type checkers, so that they report a misspelt field.
        def __getattr__(self, name):
            if name in _STORAGE:  # of an instance that is being made: no user reads the error
                raise AttributeError(name)
            raise explain_attribute(type(self), name) or _unknown(type(self), name)

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[AnyKey, object] | TensorDictBase,
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Self:
        """Build an instance from a mapping or container that has its fields as keys.

        A missing field has no entry, also if it has a default: it reads as `None`; that of a
        `TypedTensorDict` cannot be read until it is set. A mapping or container in a field that is
        declared as a tensor class becomes one.

        Args:
            input_dict: a mapping from field names to values; a nested key is a field and a key in
                it.
            batch_size: the leading dimensions of every field.
            device: the device to which every field is moved.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            names: the name of each batch dimension; `None`: no names.
        """
        if auto_batch_size or batch_dims is not None or names is not None:
            return build(
                cls, input_dict, batch_size, device, auto_batch_size, batch_dims, None, names
            )
        if isinstance(input_dict, TensorDictBase):
            batch_size = input_dict._kd_desc.batch if batch_size is None else batch_size
            return from_mapping(cls, input_dict._kd_entries, batch_size, device)
        from kd_core._convert.plain import with_branches

        given = () if batch_size is None else batch_of(batch_size)
        source = cast("Mapping[AnyKey, object]", with_branches(input_dict, given))
        return from_mapping(cls, source, batch_size, device)

    @classmethod
    def from_tensordict(
        cls,
        tensordict: TensorDictBase,
        non_tensordict: Mapping[str, object] | None = None,
        safe: bool | None = None,
        *,
        check: bool = True,
    ) -> Self:
        """Build an instance of a container that has its fields as keys; tensors are shared.

        A missing field has no entry, also if it has a default: it reads as `None`. A container in
        a field that is declared as a tensor class becomes one. A lazy stack becomes one of
        instances, and what is locked stays so.

        Args:
            tensordict: the container; its batch size and device are kept.
            non_tensordict: more values of fields.
            safe: refuse keys that are not fields, as by default; else they are left out.
            check: for a `TypedTensorDict`: refuse a container that lacks a field without default.

        Raises:
            UnknownField: if a key is not a field.
            InvalidArgument: if such a field is missing.

        Example:
            >>> import torch
            >>> from kd_core import TensorClass, TensorDict
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            >>> Point.from_tensordict(TensorDict({"x": torch.zeros(2)}, [2])).batch_size
            torch.Size([2])
        """
        if isinstance(tensordict, Composite) and tensordict._members:
            members = [
                cls.from_tensordict(cast("TensorDictBase", member), None, safe, check=check)
                for member in tensordict._members
            ]
            made: Self = registry.lazy_stack(members, tensordict._dim)
            if non_tensordict:
                made.update(non_tensordict)
        else:
            made = _from_container(cls, tensordict, non_tensordict, safe is not False)
            if check and cls._kd_declared.more_keys:
                _check_none_lacks(cls, made._kd_entries)
        return made.lock_() if made is not tensordict and tensordict.is_locked else made

    @classmethod
    def fields(cls) -> tuple[Field[object], ...]:
        """Return the declared fields, with their names, types and defaults.

        Example:
            >>> import torch
            >>> from kd_core import TensorClass
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            >>> [each.name for each in Point.fields()]
            ['x']
        """
        return tuple(cls._kd_declared.fields.values())

    if not TYPE_CHECKING:  # the types are those of any container

        def get(self, key, default=None, *how, **named):
            """Read the entry at a key; data that is not a tensor, in a field, as its value."""
            if type(key) is str and not how and not named:
                found = self._kd_entries.get(key)
                if found is None:
                    return absent(self, (key,), default)
            else:
                found = super().get(key, default, *how, **named)
            if type(found) is Tensor or not is_data(found) or self._kd_declared.more_keys:
                return found
            above = () if type(key) is str or found is default else path_of(key)[:-1]
            if above and self._kd_read(above)._kd_tensor_class is None:  # of a plain container
                return found
            return found._kd_item()

        def set(self, key, value=NO_DEFAULT, inplace=False, *how, **named):
            """Store a value at `key`; a dict or a tuple is kept as it is, as by an attribute."""
            kept = isinstance(value, (dict, tuple))
            if kept and type(key) is str and not inplace:
                declaration = self._kd_declared
                if not declaration.more_keys and not declaration.converts:
                    value = _whole(value, self._kd_desc)
            return super().set(key, value, inplace, *how, **named)

        def update_(self, *source, **entries):
            """Write values in place; `inplace`, as `update` has it, does nothing."""
            if "inplace" in entries and not self._kd_declared.takes("inplace"):
                del entries["inplace"]
            return super().update_(*source, **entries)

        def select(self, *keys, as_tensordict=False, **how):
            """Keep only some keys; one that takes further keys is a `TensorDict` already."""
            plain = as_tensordict and not self._kd_declared.more_keys
            return super().select(*keys, as_tensordict=plain, **how)

    def _kd_read(self, path: tuple[str, ...]) -> Entry:
        try:
            return super()._kd_read(path)
        except KeyNotFound as error:
            if type(self)._kd_declared.more_keys or isinstance(error, KeyThroughLeaf):
                raise
            raise UnknownField(*error.args) from None

    def __replace__(self, **changes: object) -> Self:
        """Return a new instance with some fields changed; called by `copy.replace` too."""
        cls, desc = type(self), self._kd_desc
        if cls._kd_declared.converts:  # `None` too: it is not a value where fields are gathered
            changes = _all_as_declared(self, changes)
        new = {key: _beside_rows(cls, key, value, desc) for key, value in changes.items()}
        return _built(cls, {**self._kd_entries, **new}, desc.batch, desc.device)

    def _kd_put(self, key: str, value: object) -> None:
        if value is None and not type(self)._kd_declared.more_keys:
            self._kd_check_key(key)
            _clear_field(self, key)
            return
        if self._kd_desc.frozen:  # as in the base, without a call of it: a field is set so
            self._kd_check_unlocked(f"set {format_key(key)}")
        self._kd_set_entry(key, self._kd_as_entry(key, value))

    def _kd_as_entry(self, key: str, value: object, path: tuple[str, ...] = ()) -> Entry:
        declaration = type(self)._kd_declared
        if key not in declaration.fields:
            self._kd_check_key(key)
        kind = type(value)
        if not declaration.keeps or (kind is not Tensor and kind is not TensorDict):
            if declaration.converts:
                value = _as_declared(self, key, value)
            value = _beside_rows(type(self), key, value, self._kd_desc)
        return super()._kd_as_entry(key, value, path)

    def _kd_set_entry(self, key: str, value: Entry) -> None:
        if key not in type(self)._kd_declared.fields:
            self._kd_check_key(key)
        super()._kd_set_entry(key, value)

    def _kd_set_leaves(self, leaves: Mapping[str, Tensor]) -> None:
        if type(self)._kd_declared.converts:
            for key, leaf in leaves.items():
                self._kd_set_entry(key, self._kd_as_entry(key, leaf))
            return
        for key in leaves:
            self._kd_check_key(key)
        super()._kd_set_leaves(leaves)

    def _kd_unset(self) -> Sequence[str]:
        declaration = type(self)._kd_declared
        if declaration.more_keys:
            return ()
        return [name for name in declaration.fields if name not in self._kd_entries]

    def _kd_is_cleared(self, key: str) -> bool:
        if type(self)._kd_declared.more_keys:
            return False
        self._kd_check_key(key)
        _check_none(self, key)
        return True

    @classmethod
    def _kd_of_other_keys(cls) -> type[Self]:
        return cast("type[Self]", TensorDict) if cls._kd_declared.more_keys else cls

    def _kd_check_key(self, key: str) -> None:
        cls = type(self)
        if not cls._kd_declared.takes(key):
            raise _unknown(cls, key)

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        declaration = type(self)._kd_declared
        if declaration.more_keys or entries.keys() <= declaration.fields.keys():
            return super()._kd_like(entries, desc)
        return registry.make_dense(entries, desc)  # other keys: another kind


TensorClass._kd_engine = TensorClass


def _as_declared(self: TensorClass, key: str, value: object) -> object:
    cls = type(self)
    declaration = cls._kd_declared
    if key not in declaration.fields or (not declaration.fields[key].init and is_none(value)):
        return value
    return converted(cls, declaration.options, key, value, self._kd_desc.unlocked())


def _all_as_declared(self: TensorClass, given: dict[str, object]) -> dict[str, object]:
    return {key: _as_declared(self, key, value) for key, value in given.items()}


def _plain(cls: type[TensorClass], given: dict[str, object], desc: Descriptor) -> dict[str, object]:
    """Return the values of a constructor without `None`, and with objects as they are."""
    return {
        key: _whole(_beside_rows(cls, key, value, desc), desc)
        for key, value in given.items()
        if value is not None
    }


def _complete(
    self: TensorClass,
    given: dict[str, object],
    names: Sequence[str | None] | None = None,
    locked: bool | None = None,
    by_attribute: bool = False,
) -> None:
    """Store the values of a new instance that has a descriptor; run what follows construction.

    Args:
        self: the instance.
        given: the values by name.
        names: the name of each batch dimension.
        locked: whether the instance is locked; `False` leaves one of a frozen class unlocked, too.
        by_attribute: whether values are set by the `__setattr__` of the author.
    """
    cls = type(self)
    declaration = cls._kd_declared
    arguments: list[object] = []
    if declaration.init_vars:
        arguments = [given.pop(name, MISSING) for name in declaration.init_vars]
    fill(self, {} if by_attribute else given, self._kd_desc)
    if by_attribute:
        for name, value in given.items():
            setattr(self, name, value)
    if names is not None and any(checked_names(names, self._kd_desc.batch)):
        other = with_names(self, names)  # nested containers of the caller keep their names
        self._kd_entries, self._kd_desc = other._kd_entries, other._kd_desc
    after = getattr(cls, "__post_init__", None)
    if after is not None and MISSING not in arguments:
        after(self, *arguments)
    if declaration.frozen and locked is not False:
        lock(self, FROZEN)
    elif locked:
        lock(self)


def from_mapping(
    cls: type[D],
    source: Mapping[AnyKey, object],
    batch_size: BatchSize | None = None,
    device: DeviceLike | None = None,
) -> D:
    """Build an instance of values of fields; see `TensorClass.from_dict`."""

    def nested(kind: type[TensorClass], value: _Nested) -> TensorClass:
        if isinstance(value, TensorDictBase):
            return from_mapping(kind, value._kd_entries, value._kd_desc.batch, device)
        return from_mapping(kind, value, batch_size, device)

    given = cast("Mapping[str, object]", source)
    if not all(type(key) is str for key in given):  # a source of paths, such as a table
        given = with_plain_keys(given)
    return _built(cls, _as_classes(cls, given, nested, batch_size), batch_size, device)


def _from_container(
    cls: type[D],
    tensordict: AbstractContainer,
    non_tensordict: Mapping[str, object] | None = None,
    check: bool = True,
) -> D:
    if not isinstance(tensordict, AbstractContainer):
        raise wrong_type("`tensordict`", "a container", tensordict)
    if non_tensordict is not None and not isinstance(non_tensordict, Mapping):
        raise wrong_type("`non_tensordict`", "a mapping", non_tensordict)
    desc = tensordict._kd_desc
    given: dict[str, object] = {**tensordict._kd_entries, **(non_tensordict or {})}
    if not check:
        given = {key: value for key, value in given.items() if cls._kd_declared.takes(key)}

    def nested(kind: type[TensorClass], value: _Nested) -> TensorClass:
        if isinstance(value, AbstractContainer):
            return _from_container(kind, value, check=check)
        return from_mapping(kind, value, desc.batch)

    return _built(cls, _as_classes(cls, given, nested, desc.batch), desc.batch, desc.device)


def _as_classes(
    cls: type[TensorClass],
    given: Mapping[str, object],
    build: Callable[[type[TensorClass], _Nested], TensorClass],
    batch: BatchSize | None,
) -> dict[str, object]:
    """Return values of fields, nested ones as instances of the tensor classes that are declared."""
    values = dict(given)
    for key, value in given.items():
        if isinstance(value, (Mapping, Dense)) and not isinstance(value, TensorClass):
            kind = hint_of(cls, key)
            if is_tensor_class(kind):
                values[key] = build(kind, value)
            elif cls._kd_declared.converts and not is_node(value):  # else options keep it as a dict
                values[key] = TensorDict(value, batch)
    return values


def _built(
    cls: type[D],
    given: dict[str, object],
    batch_size: BatchSize | None,
    device: DeviceLike | None,
) -> D:
    """Build an instance of values of fields, without the `__init__` of its author."""
    for name in given:
        if not cls._kd_declared.takes(name):
            TensorDict(given, batch_size, device)  # what does not fit is told first
            raise _unknown(cls, name)
    if cls._kd_declared.more_keys:
        values = given
    else:
        values = {name: value for name, value in given.items() if not is_none(value)}
    new = object.__new__(cls)
    new._kd_desc = describe_on(() if batch_size is None else batch_of(batch_size), device)
    if cls._kd_declared.converts:
        values = _all_as_declared(new, values)
    for name, spec in cls._kd_declared.init_vars.items():
        values[name] = left_out(spec)
    given = {name: value for name, value in values.items() if value is not MISSING}
    _complete(new, given, locked=False)
    return new


def _bind(
    cls: type[TensorClass], values: tuple[object, ...], named: dict[str, object]
) -> dict[str, object]:
    """Match arguments with fields, as the signature of the constructor does."""
    declaration = cls._kd_declared
    fields = declaration.fields
    names = declaration.by_position
    if declaration.more_keys and len(values) == 1 and isinstance(values[0], Mapping):
        return _with_source(cls, values[0], named)
    if values and not names:
        raise InvalidArgument(
            f"`{cls.__name__}` takes keywords only, got {len(values)} positional values. Pass each "
            "field by name."
        )
    if len(values) > len(names):
        rest = listed([*(name for name in fields if name not in names), "batch_size", "device"])
        raise InvalidArgument(
            f"`{cls.__name__}` expected at most {len(names)} values ({listed(names)}), got "
            f"{len(values)}. Pass {rest} by keyword."
        )
    for name in named:
        if not declaration.takes(name) and name not in declaration.init_vars:
            raise _unknown(cls, name)
    bound = named  # in this order: keywords, then values by position, then defaults
    for name, value in zip(names, values, strict=False):
        if name in bound:
            raise InvalidArgument(f"field {format_key(name)} is given twice. Pass each field once.")
        bound[name] = value
    if declaration.more_keys:
        _check_none_lacks(cls, bound)
        return bound
    for name, spec in (*fields.items(), *declaration.init_vars.items()):
        if name not in bound:
            bound[name] = left_out(spec)
    missing = [name for name, value in bound.items() if value is MISSING]
    if missing:
        raise _lacks(cls, missing)
    return bound


def _with_source(
    cls: type[TensorClass], source: Mapping[str, object], named: Mapping[str, object]
) -> dict[str, object]:
    """Return the entries of a mapping that stands first, as in the constructor of `TensorDict`.

    It need not have all fields, as in `from_dict`.
    """
    given = dict(source._kd_entries if isinstance(source, AbstractContainer) else source)
    twice = [name for name in named if name in given]
    if twice:
        raise InvalidArgument(f"{listed(twice)} is given twice. Pass each entry once.")
    return {**given, **named}


def _check_none_lacks(cls: type[TensorClass], given: Mapping[str, object]) -> None:
    """Refuse what has no value for a field without default, where a class takes other keys, too."""
    fields = cls._kd_declared.fields
    missing = [name for name in fields if name not in given and left_out(fields[name]) is MISSING]
    if missing:
        raise _lacks(cls, missing)


def _lacks(cls: type, missing: list[str]) -> InvalidArgument:
    return InvalidArgument(
        f"`{cls.__name__}` expected a value for {listed(missing)}, got none. Pass a value for "
        "each field that does not have a default."
    )


def _own_classes(cls: type[TensorClass]) -> list[type]:
    """Return a class and its bases that a program defined, without those of kd."""
    return [base for base in cls.__mro__ if is_tensor_class(base) and base.__module__ != "kd_core"]


def _unknown(cls: type[TensorClass], name: str) -> UnknownField:
    fields = cls._kd_declared.fields
    if name in fields:
        return UnknownField(
            f"field {format_key(name)} of `{cls.__name__}` is declared, and has no entry. Set it "
            "first."
        )
    text = f"{format_key(name)} is not a field of `{cls.__name__}`; available fields: "
    text += f"{listed(fields)}."
    if name.isidentifier() and any(name in vars(base) for base in _own_classes(cls)):
        return UnknownField(f"{text} Declare it with its type, as in `{name}: Tensor`.")
    near = nearest_key(name, fields)
    return UnknownField(text if near is None else f"{text} Did you mean {format_key(near)}?")


def _plainly(name: str, unless: str = "") -> Callable[..., object]:
    """Return a method of containers that computes with the entries alone, whatever the class.

    Args:
        name: the method.
        unless: the parameter by which the container itself is changed.
    """
    method = getattr(TensorClass, name)
    names = list(signature(method).parameters) if unless else []

    @wraps(method)
    def computed(self: TensorClass, *args: object, **named: object) -> object:
        engine = self._kd_engine
        if engine is not TypedTensorDict:  # a lazy stack is one of containers
            return getattr(engine, name)(self, *args, **named)
        if unless and {**dict(zip(names[1:], args, strict=False)), **named}.get(unless):
            return method(self, *args, **named)
        desc = self._kd_desc.unlocked()
        entries: AbstractContainer = registry.make_dense(dict(self._kd_entries), desc)
        return getattr(entries._kd_engine, name)(entries, *args, **named)

    return computed


TensorClass.register(NonTensorData)  # as it is one in tensordict


class TypedTensorDict(TensorClass):
    """A container with declared fields that may have other keys too.

    Unlike a `TensorClass` it takes keys beyond its fields, in the constructor and later. The
    constructor requires the fields that have no default and are not `NotRequired`. A field that is
    left out has no entry, and reads as its default. A mapping or container that is passed alone
    by position is where the entries come from, as for a `TensorDict`. Comparisons, `pad` and
    reductions such as `sum` and `max` return a `TensorDict`: what they compute is not what the
    fields declare.

    Example:
        >>> import torch
        >>> from kd_core import TypedTensorDict
        >>> class Batch(TypedTensorDict):
        ...     obs: torch.Tensor
        >>> batch = Batch(obs=torch.zeros(3, 2), batch_size=[3])
        >>> batch["extra"] = torch.ones(3)
        >>> sorted(batch[:2].keys()), batch[:2].obs.shape
        (['extra', 'obs'], torch.Size([2, 2]))
    """

    __slots__ = ("__dict__",)  # attributes of a program, as those of a `TensorDict`

    if TYPE_CHECKING:  # what is built of other keys than fields: see `_kd_of_other_keys`
        from_tuple = TensorDict.from_tuple  # type: ignore[assignment]  # of another class
        from_pytree = TensorDict.from_pytree  # type: ignore[assignment]  # of another class
        fromkeys = TensorDict.fromkeys  # type: ignore[assignment]  # of another class
    else:  # what they compute is not what the fields declare
        sum = _plainly("sum")
        nansum = _plainly("nansum")
        mean = _plainly("mean")
        nanmean = _plainly("nanmean")
        prod = _plainly("prod")
        std = _plainly("std")
        var = _plainly("var")
        quantile = _plainly("quantile")
        pad = _plainly("pad", unless="inplace")
        any = _plainly("any")
        all = _plainly("all")
        max = _plainly("max")
        min = _plainly("min")
        amax = _plainly("amax")
        amin = _plainly("amin")
        cummax = _plainly("cummax")
        cummin = _plainly("cummin")
        __eq__ = _plainly("__eq__")
        __ne__ = _plainly("__ne__")
        __lt__ = _plainly("__lt__")
        __le__ = _plainly("__le__")
        __gt__ = _plainly("__gt__")
        __ge__ = _plainly("__ge__")
        __or__ = _plainly("__or__")
        __xor__ = _plainly("__xor__")


TypedTensorDict._kd_declared = Declaration({}, more_keys=True)
TypedTensorDict._kd_engine = TypedTensorDict  # functions of torch find its methods


def field_keys(cls: type[TensorClass]) -> list[str | tuple[str, ...]]:
    """Return the keys of the fields of a tensor class, those of nested classes as paths.

    A field that may be `None` has one key, whatever it is else.

    Example:
        >>> import torch
        >>> from kd_core import TensorClass
        >>> from kd_core.extending import field_keys
        >>> class Point(TensorClass):
        ...     x: torch.Tensor
        ...     name: str
        >>> field_keys(Point)
        ['x', 'name']
    """
    keys: list[str | tuple[str, ...]] = []
    for name in cls._kd_declared.fields:
        kinds = hints_of(cls, name)
        kind = kinds[0]
        if len(kinds) > 1 or not is_tensor_class(kind):
            keys.append(name)
            continue
        inside = field_keys(kind)
        keys += [(name, *((key,) if isinstance(key, str) else key)) for key in inside]
    return keys


def is_tensorclass(obj: object) -> bool:
    """Return whether a class, or the class of an instance, is a tensor class.

    That of a lazy stack of instances counts as one, as it has their fields, and `NonTensorData`
    does, whose field is `data`. A `TypedTensorDict` is not one: it is a container that may have any
    key.

    Example:
        >>> from torch import Tensor
        >>> from kd_core import TensorClass, TensorDict, is_tensorclass
        >>> class Point(TensorClass):
        ...     x: Tensor
        >>> is_tensorclass(Point), is_tensorclass(TensorDict())
        (True, False)
    """
    kind = obj if isinstance(obj, type) else type(obj)
    if issubclass(kind, NonTensorData):
        return True
    fields_of = getattr(kind, "_kd_tensor_class", None)
    return fields_of is not None and not issubclass(fields_of, TypedTensorDict)


# What each leaf of a container is, as a container of typed records.

_READ: Final[dict[str, Callable[[Tensor], object]]] = {
    "device": lambda leaf: leaf.device,
    "dtype": lambda leaf: leaf.dtype,
    "shape": lambda leaf: NonTensorData(leaf.shape),  # it would become a tensor of numbers
}


class TensorAttrs(TensorClass):
    """The device, dtype and shape of one tensor, as `TensorDict.attrs` returns them.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> TensorDict({"a": torch.ones(3, 2)}, [3]).attrs()["a"].tgt_shape
        torch.Size([3, 2])
    """

    tgt_device: object = None
    tgt_dtype: object = None
    tgt_shape: object = None


def attributes_of(td: AbstractContainer, fields: tuple[str, ...]) -> AbstractContainer:
    """Return a container without batch that has these attributes of each leaf."""
    unknown = [field for field in fields if field not in _READ]
    if unknown:
        raise InvalidArgument(f"`fields` may hold {listed(_READ)}, got `{unknown[0]}`.")
    entries: dict[str, Entry] = {}
    for key, entry in td._kd_entries.items():
        leaf = leaf_or_node(entry)
        if isinstance(leaf, Tensor):
            entries[key] = _attributes(leaf, fields)
        elif isinstance(leaf, AbstractContainer):
            entries[key] = attributes_of(leaf, fields)
        else:
            entries[key] = leaf._kd_with_descriptor(describe(()))
    return make_dense(entries, describe(()))


def _attributes(leaf: Tensor, fields: tuple[str, ...]) -> TensorAttrs:
    device, dtype, shape = (read(leaf) if name in fields else None for name, read in _READ.items())
    return TensorAttrs(tgt_device=device, tgt_dtype=dtype, tgt_shape=shape, batch_size=[])


registry.register("attributes_of", attributes_of)
