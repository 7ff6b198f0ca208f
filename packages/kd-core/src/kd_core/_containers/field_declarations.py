"""What the annotations of a class declare: fields, with their defaults.

Knows annotations and `dataclasses.field`; must not know how a tensor class stores its fields.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field
from typing import ClassVar, Final, cast

from kd_core._errors import InvalidValue
from kd_core._keys import format_key

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
    for name, kind in inspect.get_annotations(cls).items():
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
