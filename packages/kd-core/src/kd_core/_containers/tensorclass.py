"""`TensorClass`: a container whose keys are declared as typed fields.

A tensor class *is* a container: it uses the dense storage and inherits every method. Its fields are
read from annotations when the class is created. Each field is a property-like descriptor that reads
and writes one entry, and the set of keys is fixed. Methods whose result has other keys (`select`,
`flatten_keys`, ...) return a `TensorDict`.

The classes need a metaclass for two reasons: instances do not have a `__dict__`, so assigning a
misspelt field is an error, and type checkers derive the signature of the constructor from the
fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar, cast, dataclass_transform

from torch import Tensor

from kd_core._base import TensorDictBase
from kd_core._batch.descriptor import describe_on
from kd_core._batch.shapes import batch_of
from kd_core._containers.dense import Dense
from kd_core._containers.field_declarations import (
    KEPT,
    checked_options,
    converted,
    converts,
    declared,
    hint_of,
    inherited,
    is_none,
    left_out,
)
from kd_core._containers.tensordict import fill
from kd_core._errors import FROZEN, InvalidArgument, Locked, UnknownField, listed
from kd_core._keys import format_key, nearest_key
from kd_core._naming import explain_attribute, explains_parameters
from kd_core._nodes import registry
from kd_core._ops.formats.building import build
from kd_core._protocol.primitives import lock

if TYPE_CHECKING:
    from typing import Self

    import torch

    from kd_core._batch.descriptor import Descriptor
    from kd_core._nodes.entry import Entry
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
        value = instance._entries[self._name]
        return value if isinstance(value, Tensor) else value._item()

    def __set__(self, instance: TensorClass, value: T) -> None:
        instance._put(self._name, value)

    def __delete__(self, instance: TensorClass) -> None:
        instance._check_unlocked(f"remove {format_key(self._name)}")
        instance._del_entry(self._name)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class TensorClassMeta(type):
    """The metaclass of tensor classes, which converts annotations to fields."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, object], **options: object
    ) -> TensorClassMeta:
        """Create the class without a `__dict__`; move defaults from the namespace to the fields."""
        chosen = checked_options(name, options)
        namespace.setdefault("__slots__", ())
        made = super().__new__(cls, name, bases, namespace)
        if any(isinstance(base, TensorClassMeta) for base in bases):
            own = cast("type[TensorClass]", made)
            for base in bases:
                chosen |= getattr(base, "_options", frozenset())
            own._options = checked_options(name, dict.fromkeys(chosen, True))
            own._tensor_class = own
            _declare(own, namespace)
        return made

    def __init__(cls, name: str, bases: tuple[type, ...], body: object, **options: object) -> None:
        super().__init__(name, bases, cast("dict[str, object]", body))

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether an object is an instance, or a lazy stack of instances."""
        of = getattr(type(instance), "_tensor_class", None) or object
        return super().__instancecheck__(instance) or issubclass(of, cls)

    def __setattr__(cls, name: str, value: object) -> None:
        """Set a class variable or method, for lazy stacks of instances, too."""
        super().__setattr__(name, value)
        for stacked in vars(cls).get("_stack_classes", {}).values():
            setattr(stacked, name, value)

    if not TYPE_CHECKING:  # checkers read brackets as the types of a generic class

        def __getitem__(cls, options):
            """Return a base class with options: `TensorClass["frozen", "autocast"]`.

            A generic class takes the types of its variables: `Box[str]`.
            """
            if getattr(cls, "__parameters__", ()):
                return cls.__class_getitem__(options)
            names = (options,) if isinstance(options, str) else options
            key = cls, frozenset(names)
            made = _WITH_OPTIONS.get(key)
            if made is None:
                named = dict.fromkeys(names, True)
                made = TensorClassMeta(
                    cls.__name__, (cls,), {"__module__": cls.__module__}, **named
                )
                _WITH_OPTIONS[key] = made
            return made


_WITH_OPTIONS: dict[tuple[TensorClassMeta, frozenset[str]], TensorClassMeta] = {}


def _declare(cls: type[TensorClass], namespace: Mapping[str, object]) -> None:
    before = inherited(cls.__bases__)
    shadows = "shadow" in cls._options

    def refuses(name: str) -> bool:
        taken = name not in before and hasattr(TensorClass, name)
        return taken and (name in KEPT or not shadows)

    own = declared(cls, namespace, refuses)
    cls._fields = fields = before | own
    given: dict[str, object] = {name: _FieldOf[object](name) for name in own}
    cls._by_position = _positional(cls, fields)
    given["__match_args__"] = namespace.get("__match_args__", cls._by_position)
    for name, value in given.items():
        setattr(cls, name, value)


def _positional(cls: type[TensorClass], fields: Mapping[str, Field[object]]) -> tuple[str, ...]:
    """Return the names of the fields that the constructor takes by position."""
    if "kw_only" in cls._options:
        return ()
    return tuple(n for n, spec in fields.items() if spec.init and spec.kw_only is not True)


class TensorClass(Dense, metaclass=TensorClassMeta):
    """A container with declared fields: subclass it and annotate the fields.

    Fields are entries: `data.image` is `data["image"]`. Every method of a container works and
    returns an instance of the class. A method `__post_init__` runs after construction, as in a
    dataclass. The keys are fixed: a method whose result has other keys returns a `TensorDict`, and
    one that would change the keys in place raises an error.

    Options are keywords of the class, `class Sample(TensorClass, frozen=True)`, or names in
    brackets, `class Sample(TensorClass["frozen"])`, which type checkers do not understand:

    - `autocast`: cast values to the declared types: `Tensor`, numbers, strings, tensor classes.
    - `nocast`: keep numbers and lists as they are, as non-tensor data.
    - `tensor_only`: convert every value to a tensor, and refuse those that cannot be.
    - `checked`: refuse values that are not of the declared type.
    - `frozen`: refuse to set a field after construction; tensors can be written in place.
    - `shadow`: allow fields with the names of methods.
    - `kw_only`: take fields by keyword only.

    Args:
        *values: values of the fields, in the order of their declaration or by keyword.
        batch_size: the leading dimensions of every field; `None` means `()`.
        device: the device to which every field is moved; `None` does not move them.

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

    _fields: ClassVar[dict[str, Field[object]]] = {}
    _by_position: ClassVar[tuple[str, ...]] = ()
    _options: ClassVar[frozenset[str]] = frozenset()
    _more_keys: ClassVar[bool] = False
    """Whether a container may have other keys beside its fields."""

    if TYPE_CHECKING:
        # Keywords of the constructor that checkers write; at run time they are properties.
        batch_size: _BatchSize = field(default=..., kw_only=True)  # type: ignore[assignment, override]  # for checkers: a keyword, not a property
        device: _Device = field(default=..., kw_only=True)  # type: ignore[assignment]  # for checkers: a keyword, not a property
    else:

        def __init__(self, *values, batch_size=None, device=None, **named):
            cls = type(self)
            given = _bind(cls, values, named)
            self._desc = describe_on(() if batch_size is None else batch_of(batch_size), device)
            if converts(cls._options):
                for key, value in given.items():
                    given[key] = self._as_declared(key, value)
            fill(self, given, self._desc)
            after = getattr(cls, "__post_init__", None)
            if after is not None:
                after(self)
            if "frozen" in cls._options:
                lock(self, FROZEN)

        # Hidden from type checkers, so that they report a misspelt field.
        def __getattr__(self, name):
            raise explain_attribute(type(self), name) or _unknown(type(self), name)

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[str, object] | TensorDictBase,
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        names: Sequence[str | None] | None = None,
    ) -> Self:
        """Build an instance from a mapping or container that has its fields as keys.

        A mapping or container in a field that is declared as a tensor class becomes one.

        Args:
            input_dict: a mapping from field names to values; fields with a default may be missing.
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
            batch_size = input_dict.batch_size if batch_size is None else batch_size
            input_dict = input_dict._entries

        def nested(kind: type[TensorClass], value: _Nested) -> TensorClass:
            own = isinstance(value, TensorDictBase)
            return kind.from_dict(value, None if own else batch_size, device)

        return cls(**_as_classes(cls, input_dict, nested), batch_size=batch_size, device=device)

    @classmethod
    @explains_parameters
    def from_tensordict(
        cls,
        tensordict: TensorDictBase,
        non_tensordict: Mapping[str, object] | None = None,
        *,
        check: bool = True,
    ) -> Self:
        """Build an instance of a container that has its fields as keys; tensors are shared.

        A container in a field that is declared as a tensor class becomes one.

        Args:
            tensordict: the container; its batch size and device are kept.
            non_tensordict: more values of fields.
            check: refuse keys that are not fields; else they are left out.

        Raises:
            UnknownField: if a key is not a field.
            InvalidArgument: if a field without default is missing.

        Example:
            >>> import torch
            >>> from kd_core import TensorClass, TensorDict
            >>> class Point(TensorClass):
            ...     x: torch.Tensor
            >>> Point.from_tensordict(TensorDict({"x": torch.zeros(2)}, [2])).batch_size
            torch.Size([2])
        """
        given: dict[str, object] = {**tensordict._entries, **(non_tensordict or {})}
        if not (check or cls._more_keys):
            given = {key: value for key, value in given.items() if key in cls._fields}

        def nested(kind: type[TensorClass], value: _Nested) -> TensorClass:
            if isinstance(value, TensorDictBase):
                return kind.from_tensordict(value, check=check)
            return kind.from_dict(value, tensordict.batch_size)

        return _built(cls, _as_classes(cls, given, nested), tensordict._desc)

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
        return tuple(cls._fields.values())

    def __replace__(self, **changes: object) -> Self:
        """Return a new instance with some fields changed; called by `copy.replace` too."""
        return _built(type(self), {**self._entries, **changes}, self._desc)

    def _as_declared(self, key: str, value: object) -> object:
        cls = type(self)
        if key not in cls._fields or (not cls._fields[key].init and is_none(value)):
            return value
        return converted(cls, cls._options, key, value, self._desc.unlocked())

    def _as_entry(self, key: str, value: object, path: tuple[str, ...] = ()) -> Entry:
        self._check_field(key)
        if converts(type(self)._options):
            value = self._as_declared(key, value)
        return super()._as_entry(key, value, path)

    def _check_field(self, key: str) -> None:
        cls = type(self)
        if key not in cls._fields and not cls._more_keys:
            raise _unknown(cls, key)
        if "frozen" in cls._options:
            raise Locked(
                f"field {format_key(key)} of `{cls.__name__}` cannot be set: the class is frozen. "
                f"Make a new instance: `data.__replace__({key}=...)`."
            )

    def _set_entry(self, key: str, value: Entry) -> None:
        self._check_field(key)
        super()._set_entry(key, value)

    def _set_leaves(self, leaves: Mapping[str, Tensor]) -> None:
        if converts(type(self)._options):
            for key, leaf in leaves.items():
                self._set_entry(key, self._as_entry(key, leaf))
            return
        for key in leaves:
            self._check_field(key)
        super()._set_leaves(leaves)

    def _keeps(self, key: str) -> bool:
        cls = type(self)
        return not cls._more_keys or key in cls._fields or "frozen" in cls._options

    def _del_entry(self, key: str) -> None:
        if self._keeps(key):
            raise InvalidArgument(
                f"field {format_key(key)} of `{type(self).__name__}` cannot be removed: its fields "
                "are fixed. Use `select` or `exclude`, which return a `TensorDict`."
            )
        super()._del_entry(key)

    def _like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        cls = type(self)
        if entries.keys() == cls._fields.keys() or (
            cls._more_keys and entries.keys() >= cls._fields.keys()
        ):
            return super()._like(entries, desc)
        return cast("Self", registry.make_dense(entries, desc))  # fewer fields: another kind


def _as_classes(
    cls: type[TensorClass],
    given: Mapping[str, object],
    build: Callable[[type[TensorClass], _Nested], TensorClass],
) -> dict[str, object]:
    """Return values of fields, nested ones as instances of the tensor classes that are declared."""
    values = dict(given)
    for key, value in given.items():
        if isinstance(value, (Mapping, Dense)) and not isinstance(value, TensorClass):
            kind = hint_of(cls, key)
            if isinstance(kind, type) and issubclass(kind, TensorClass):
                values[key] = build(kind, value)
    return values


def _built(cls: type[D], given: dict[str, object], desc: Descriptor) -> D:
    build: Callable[..., D] = cls  # the options of the constructor are hidden from type checkers
    return build(**given, batch_size=desc.batch, device=desc.device)


def _bind(
    cls: type[TensorClass], values: tuple[object, ...], named: dict[str, object]
) -> dict[str, object]:
    """Match arguments with fields, as the signature of the constructor does."""
    fields = cls._fields
    names = cls._by_position
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
    given: dict[str, object] = dict(zip(names, values, strict=False))
    for name, value in named.items():
        if name not in fields and not cls._more_keys:
            raise _unknown(cls, name)
        if name in given:
            raise InvalidArgument(f"field {format_key(name)} is given twice. Pass each field once.")
        given[name] = value
    given |= {name: left_out(spec) for name, spec in fields.items() if name not in given}
    missing = [name for name in fields if given[name] is MISSING]
    if missing:
        raise InvalidArgument(
            f"`{cls.__name__}` expected a value for {listed(missing)}, got none. Pass a value for "
            "each field that does not have a default."
        )
    more = {name: value for name, value in given.items() if name not in fields}
    return {name: given[name] for name in fields} | more


def _unknown(cls: type[TensorClass], name: str) -> UnknownField:
    text = f"{format_key(name)} is not a field of `{cls.__name__}`; available fields: "
    text += f"{listed(cls._fields)}."
    near = nearest_key(name, cls._fields)
    return UnknownField(text if near is None else f"{text} Did you mean {format_key(near)}?")


class TypedTensorDict(TensorClass):
    """A container with declared fields that may have other keys too.

    Unlike a `TensorClass` it takes keys beyond its fields, in the constructor and later; the fields
    must be there, and cannot be removed.

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

    _more_keys = True


def is_tensorclass(obj: object) -> bool:
    """Return whether a class, or the class of an instance, is a tensor class.

    That of a lazy stack of instances counts as one, as it has their fields.

    Example:
        >>> from torch import Tensor
        >>> from kd_core import TensorClass, TensorDict, is_tensorclass
        >>> class Point(TensorClass):
        ...     x: Tensor
        >>> is_tensorclass(Point), is_tensorclass(TensorDict())
        (True, False)
    """
    kind = obj if isinstance(obj, type) else type(obj)
    return isinstance(kind, TensorClassMeta) or getattr(kind, "_tensor_class", None) is not None
