"""What a class declares: fields, with their defaults, and options for their values.

Knows annotations, `dataclasses.field` and values; must not know how a tensor class stores its
fields.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field
from typing import TYPE_CHECKING, ClassVar, Final, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core._compat import annotations_of
from kd_core._errors import InvalidArgument, InvalidValue, a_type, listed
from kd_core._keys import format_key
from kd_core._nodes import registry
from kd_core._nodes.entry import is_data, is_node, is_row_data

if TYPE_CHECKING:
    from kd_core._batch.descriptor import Descriptor
    from kd_core._nodes.entry import Node

KEPT: Final = frozenset({"batch_size", "device", "from_dict", "fields"})
"""Names that fields may not have: the constructor and conversions need them."""

_NO_FIELD: Final = r"(?:\w+\.)*(ClassVar|KW_ONLY|InitVar)\b"


def inherited(bases: tuple[type, ...]) -> dict[str, Field[object]]:
    """Return the fields of base classes, in the order in which a dataclass has them."""
    fields: dict[str, Field[object]] = {}
    for base in reversed(bases):
        fields |= getattr(base, "_fields", {})
    return fields


def declared(
    cls: type, namespace: Mapping[str, object], refuses: Callable[[str], bool]
) -> dict[str, Field[object]]:
    """Return the fields that the annotations of a class itself declare.

    Args:
        cls: the class.
        namespace: what its body assigns: the defaults.
        refuses: whether a name is one of a method that the class does not shadow.

    Raises:
        InvalidValue: if a name or a default is not a valid one.
    """
    fields: dict[str, Field[object]] = {}
    by_keyword = False
    for name, kind in annotations_of(cls).items():
        special = _special(kind)
        if special == "KW_ONLY":
            by_keyword = True
        if special == "InitVar":
            raise InvalidValue(
                f"{format_key(name)} of `{cls.__name__}` must not be an `InitVar`: the constructor "
                "takes fields alone. Write a classmethod that takes it and returns an instance."
            )
        if special is not None:
            continue
        _check_name(cls, name, refuses(name))
        spec = fields[name] = _default_of(cls, name, namespace.get(name, MISSING))
        spec.name, spec.type = name, cast("type", kind)
        if spec.kw_only is MISSING:
            spec.kw_only = by_keyword
    return fields


def _special(kind: object) -> str | None:
    """Return what an annotation is called that does not declare a field."""
    if kind is ClassVar:
        return "ClassVar"
    if kind is dataclasses.KW_ONLY:
        return "KW_ONLY"
    if kind is dataclasses.InitVar or isinstance(kind, dataclasses.InitVar):
        return "InitVar"
    found = re.match(_NO_FIELD, str(kind))
    return None if found is None else found[1]


def _check_name(cls: type, name: str, refused: bool) -> None:
    if refused or name.startswith("_"):
        raise InvalidValue(
            f"field name {format_key(name)} of `{cls.__name__}` must not be the name of a "
            "method or property of containers or start with an underscore. Choose another "
            "name, or pass the option `shadow=True`."
        )


def _default_of(cls: type, name: str, default: object) -> Field[object]:
    if isinstance(default, Field):
        return default
    if isinstance(default, (list, dict, set)):
        raise InvalidValue(
            f"the default of field {format_key(name)} of `{cls.__name__}` must be immutable, got a "
            f"`{type(default).__name__}`, which all instances would share. Use "
            "`field(default_factory=...)`."
        )
    return cast("Field[object]", field() if default is MISSING else field(default=default))


def left_out(spec: Field[object]) -> object:
    """Return the value of a field that the constructor is not given; `MISSING` if it needs one.

    A field with `init=False` and no default is None until `__post_init__` sets it.
    """
    if spec.default_factory is not MISSING:
        return spec.default_factory()
    return None if spec.default is MISSING and not spec.init else spec.default


OPTIONS: Final = frozenset(
    {"autocast", "nocast", "frozen", "shadow", "tensor_only", "kw_only", "checked"}
)
_CONVERTING: Final = frozenset({"autocast", "nocast", "tensor_only", "checked"})
_NUMBERS: Final = frozenset({int, float, complex, bool, list, tuple})
"""Types of values that a container stores as tensors, if they are numbers or lists of these."""
_PLAIN: Final = cast("tuple[Callable[[object], object], ...]", (int, float, complex, bool, str))


def checked_options(name: str, options: Mapping[str, object]) -> frozenset[str]:
    """Return the options that are switched on.

    Raises:
        InvalidArgument: if one is unknown, or two cannot be combined.
    """
    unknown = [key for key in options if key not in OPTIONS]
    if unknown:
        raise InvalidArgument(
            f"{listed(unknown)} is not a valid option of `{name}`; available options: "
            f"{listed(sorted(OPTIONS))}."
        )
    chosen = frozenset(key for key, value in options.items() if value)
    casts = sorted(chosen & {"autocast", "nocast", "tensor_only"})
    if len(casts) > 1:
        raise InvalidArgument(f"options {listed(casts)} of `{name}` cannot be combined. Pass one.")
    return chosen


def converts(options: frozenset[str]) -> bool:
    """Return whether options change or check the values of fields."""
    return not options.isdisjoint(_CONVERTING)


def converted(
    cls: type, options: frozenset[str], key: str, value: object, desc: Descriptor
) -> object:
    """Return the value of a field as the options of its class want it.

    Raises:
        InvalidValue: if it cannot be converted, or is not of the declared type.
    """
    if isinstance(value, Tensor) and options <= {"tensor_only", "nocast", "frozen", "shadow"}:
        return value
    if "checked" in options and "autocast" not in options:
        _check(cls, options, key, value)
    if "nocast" in options:
        return value if _is_stored(value) else registry.wrap_data(value, desc)
    if "tensor_only" in options:
        if is_data(value):
            value = value._item()
        return value if _is_stored(value) else _as_tensor(cls, key, value, "`tensor_only`")
    if "autocast" in options:
        value = _cast(cls, key, value, hint_of(cls, key), desc)
        if "checked" in options:
            _check(cls, options, key, value)
    return value


def is_none(value: object) -> bool:
    """Return whether a value is None, as it is or wrapped as data."""
    if value is None or is_row_data(value):
        return value is None
    return is_data(value) and value._item() is None


def _is_stored(value: object) -> bool:
    return isinstance(value, (Tensor, Mapping)) or is_node(value)


def hint_of(cls: type, key: str) -> object:
    """Return the declared type of a field without `None`; `object` if it cannot be resolved."""
    rest = [arg for arg in _hints_of(cls, key) if arg is not type(None)]
    return rest[0] if len(rest) == 1 else object


def _hints_of(cls: type, key: str) -> tuple[object, ...]:
    """Return the types that a field is declared to have; `object` for a key that is not a field."""
    owner = next((base for base in cls.__mro__ if key in annotations_of(base)), None)
    fields: Mapping[str, Field[object]] = getattr(cls, "_fields")  # noqa: B009  # it has them
    if owner is None or key not in fields:
        return (object,)
    alone = type(key, (), {"__annotations__": {key: fields[key].type}})  # whatever others name
    module = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
    try:
        hint = get_type_hints(alone, dict(vars(owner)), module)[key]
    except NameError:  # of a name that is local to a function
        return (object,)
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _cast(cls: type, key: str, value: object, hint: object, desc: Descriptor) -> object:
    if value is None:
        return value
    if is_data(value):
        return _cast_data(cls, key, value, hint, desc)
    if hint is Tensor:
        return value if _is_stored(value) else _as_tensor(cls, key, value, "`autocast`")
    for kind in _PLAIN:
        if hint is kind:
            return registry.wrap_data(_plain(cls, key, value, kind), desc)
    if isinstance(value, Mapping) and hasattr(hint, "from_dict") and not isinstance(value, type):
        build = getattr(hint, "from_dict")  # noqa: B009  # asked above
        return (
            value
            if isinstance(hint, type) and isinstance(value, hint)
            else build(value, desc.batch)
        )
    return value


def _cast_data(cls: type, key: str, value: Node, hint: object, desc: Descriptor) -> object:
    """Cast what is wrapped already: one value, or one for each row."""
    kind = next((kind for kind in _PLAIN if kind is hint), None)
    by_row = is_row_data(value)
    if kind is None or (by_row and is_compiling()):  # compiled code reads no rows
        return value
    given = _rows_of(value) if by_row else [value._item()]
    if all(each is None or type(each) is kind for each in given):
        return value
    made = [None if each is None else _plain(cls, key, each, kind) for each in given]
    if not by_row:
        return registry.wrap_data(made[0], desc)
    positions = torch.arange(len(made)).reshape(value._desc.batch)
    return registry.wrap_rows(made, positions, value._desc)


def _rows_of(value: object) -> list[object]:
    """Return the value of each row of data that has one for each."""
    rows: list[object] = [value.tolist()]  # type: ignore[attr-defined]  # such data has it
    for _ in value.batch_size:  # type: ignore[attr-defined]  # as above
        rows = [row for level in rows for row in cast("list[object]", level)]
    return rows


def _plain(cls: type, key: str, value: object, kind: Callable[[object], object]) -> object:
    name = cast("type", kind).__name__
    try:
        plain = value.item() if isinstance(value, Tensor) else value
        return plain if type(plain) is kind else kind(plain)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_a(cls, key, name, value) from error


def _as_tensor(cls: type, key: str, value: object, option: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidValue(
            f"field {format_key(key)} of `{cls.__name__}` must be a tensor, as the option {option} "
            f"wants, got {a_type(value)}: {error}. Pass a tensor."
        ) from None


def _check(cls: type, options: frozenset[str], key: str, value: object) -> None:
    plain = value._item() if is_node(value) else value
    hints = [
        type(None) if hint is None else get_origin(hint) or hint for hint in _hints_of(cls, key)
    ]
    kinds = [kind for kind in hints if isinstance(kind, type)]
    if len(kinds) < len(hints) or _is_one(plain, kinds):
        return  # a type that Python cannot check, or the right one
    if not _is_form_of(value, kinds, "nocast" not in options):
        raise _not_a(cls, key, " | ".join(map(_name_of, kinds)), plain)


def _is_one(value: object, kinds: list[type]) -> bool:
    """Return whether a value is of a type, or of one that Python cannot check."""
    if float in kinds and isinstance(value, int):
        return True  # as type checkers do
    try:
        return isinstance(value, tuple(kinds))
    except TypeError:  # of `Any`, a protocol, a typed dict
        return True


def _is_form_of(value: object, kinds: list[type], numbers: bool) -> bool:
    """Return whether a value is what a container stores of one of these types.

    Args:
        value: the value.
        kinds: the types.
        numbers: whether numbers become tensors.
    """
    if isinstance(value, Tensor):
        return numbers and any(k in _NUMBERS or k.__module__ == "numpy" for k in kinds)
    if isinstance(value, Mapping):
        return dict in kinds
    if not is_row_data(value):
        return False
    return tuple in kinds or all(_is_one(row, kinds) for row in _rows_of(value))


def _not_a(cls: type, key: str, name: str, value: object) -> InvalidValue:
    return InvalidValue(
        f"field {format_key(key)} of `{cls.__name__}` must be of type `{name}`, got {value!r} of "
        f"type `{type(value).__name__}`."
    )


def _name_of(kind: type) -> str:
    return "None" if kind is type(None) else kind.__name__
