"""What a class declares: fields, with their defaults, and options for their values.

Knows annotations, `dataclasses.field` and values; must not know how a tensor class stores its
fields.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, field
from operator import is_
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    NotRequired,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core import _registry as registry
from kd_core._containers.non_tensor import NonTensorData
from kd_core._errors import InvalidArgument, InvalidValue, a_type, listed
from kd_core._keys import format_key
from kd_core._leaves.arrays import tensor_of_numbers
from kd_core._nodes import Node, is_data, is_node, is_row_data, rows_of_data
from kd_core._torch_private import annotations_of, assume_constant_result

if TYPE_CHECKING:
    from kd_core._descriptor import Descriptor

OWN: Final = "_kd_"
"""How the names begin that containers keep for themselves: no class with fields may define one.

All other names are free. Code of kd never reads a public method through an attribute of such a
class, because a field or a method of the author may have its name: it asks `_kd_engine` for it.
"""

_NO_FIELD: Final = r"(?:\w+\.)*(ClassVar|KW_ONLY|InitVar)\b"
_OPTIONAL: Final = r"(?:\w+\.)*NotRequired\b"
STORED: Final = ("batch_size", "device", "names", "lock")
"""Keywords of the constructor beside the fields."""


class Declaration:
    """What a class with fields declares.

    Attributes:
        taken: what its constructor takes, in order: fields and init-only arguments.
        fields: its fields, those of its bases first.
        init_vars: arguments of the constructor that `__post_init__` gets, and their defaults.
        options: the options that are switched on.
        more_keys: whether an instance may have keys beside its fields.
        by_position: the arguments that the constructor takes by position.
        hidden: keywords of the constructor that are fields of this class.
        converts: whether options change or check the values of fields.
        keeps: whether tensors and containers are stored as they are.
        frozen: whether fields cannot be set after construction.
        by_attribute: whether the constructor sets fields by the `__setattr__` of the author.
        as_dataclass: what `dataclass_fields` made of it.
        hints: the types of fields, as far as they were read; see `hints_of`.
    """

    __slots__ = (
        *(
            "as_dataclass",
            "by_attribute",
            "by_position",
            "converts",
            "fields",
            "frozen",
            "hidden",
            "hints",
            "init_vars",
            "keeps",
        ),
        *("more_keys", "options", "taken"),
    )

    def __init__(
        self,
        taken: Mapping[str, Field[object]],
        init_only: Collection[str] = (),
        options: frozenset[str] = frozenset(),
        more_keys: bool = False,
        by_attribute: bool = False,
    ) -> None:
        fields = {name: spec for name, spec in taken.items() if name not in init_only}
        init_vars = {name: taken[name] for name in init_only}
        self.fields, self.init_vars, self.taken = fields, init_vars, dict(taken)
        self.options, self.more_keys = options, more_keys
        self.converts = not options.isdisjoint(_CONVERTING)
        self.keeps = options <= _KEEPING
        self.frozen = "frozen" in options
        self.by_attribute = by_attribute
        self.as_dataclass: dict[str, Field[object]] | None = None
        self.hints: dict[str, tuple[object, ...]] = {}
        self.hidden = tuple([name for name in STORED[1:] if name in taken])
        self.by_position = () if "kw_only" in options else _positional(taken)

    def takes(self, key: str) -> bool:
        """Return whether an instance may have a key."""
        return self.more_keys or key in self.fields


def _positional(taken: Mapping[str, Field[object]]) -> tuple[str, ...]:
    return tuple([n for n, spec in taken.items() if spec.init and spec.kw_only is not True])


def dataclass_fields(declaration: Declaration) -> dict[str, Field[object]]:
    """Return the fields as the module `dataclasses` keeps them.

    `batch_size`, `device` and `names` are among them as arguments of the constructor alone, so that
    `dataclasses.replace` keeps them and `dataclasses.fields` does not list them.
    """
    if declaration.as_dataclass is None:
        fields = declaration.fields
        specs = [(name, spec.type, copy.copy(spec)) for name, spec in fields.items()]
        kept = [name for name in STORED[:-1] if name not in fields]
        extra = [(name, dataclasses.InitVar[object], field(default=None)) for name in kept]
        for _, _, spec in specs:
            spec.kw_only = True  # an order of defaults that positions would refuse
        made = dataclasses.make_dataclass("Fields", [*specs, *extra], init=False)
        found: dict[str, Field[object]] = getattr(made, "__dataclass_fields__")  # noqa: B009  # of dataclasses alone
        for name, spec in fields.items():
            found[name].kw_only = spec.kw_only
        declaration.as_dataclass = found
    return declaration.as_dataclass


@assume_constant_result
def prepare_dataclass_fields(cls: type) -> None:
    """Make what `dataclass_fields` returns, which dynamo cannot trace, before dynamo reads it."""
    dataclass_fields(_declaration_of(cls))


def _declaration_of(cls: type) -> Declaration:
    """Return what the body of a tensor class declares."""
    found: Declaration = getattr(cls, "_kd_declared")  # noqa: B009  # tensor classes have it
    return found


def signature_of(cls: type) -> inspect.Signature | None:
    """Return the parameters of the constructor; `None` for one that an author wrote."""
    declaration = _declaration_of(cls)
    if hasattr(cls.__init__, "__wrapped__") or not declaration.fields:  # type: ignore[misc]  # of this class
        return None
    taken = declaration.taken
    by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        _parameter(name, taken[name], inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in declaration.by_position
    ]
    parameters += [
        _parameter(name, spec, by_name)
        for name, spec in taken.items()
        if spec.init and name not in declaration.by_position
    ]
    parameters += [
        inspect.Parameter(name, by_name, default=None) for name in STORED if name not in taken
    ]
    given_before = False
    for each in parameters:  # a default before a value that is required: by keyword alone
        if each.kind is not by_name and given_before and each.default is each.empty:
            parameters = [each.replace(kind=by_name) for each in parameters]
            break
        given_before = given_before or each.default is not each.empty
    return inspect.Signature(parameters, return_annotation=None)


def _parameter(name: str, spec: Field[object], kind: inspect._ParameterKind) -> inspect.Parameter:
    default: object = inspect.Parameter.empty
    if spec.default is not MISSING:
        default = spec.default
    elif spec.default_factory is not MISSING:
        default = spec.default_factory
    return inspect.Parameter(name, kind, default=default, annotation=spec.type)


def split_options(
    name: str, options: Mapping[str, object], bases: tuple[type, ...]
) -> tuple[frozenset[str], dict[str, object]]:
    """Return the options of fields that are switched on, and what `__init_subclass__` takes.

    Raises:
        InvalidArgument: if an option is unknown and no base of an author takes any.
    """
    takes_more = any(
        "__init_subclass__" in vars(kind) and kind.__module__.partition(".")[0] not in _OURS
        for base in bases
        for kind in base.__mro__
    )
    known = {k: v for k, v in options.items() if k in OPTIONS or not takes_more}
    return checked_options(name, known), {k: v for k, v in options.items() if k not in known}


_OURS: Final = frozenset({"kd_core", "typing", "builtins"})


def inherited(bases: tuple[type, ...]) -> tuple[dict[str, Field[object]], list[str]]:
    """Return what the constructors of base classes take, and which of it is not a field.

    The order is that of a dataclass. A base may be a plain dataclass.
    """
    taken: dict[str, Field[object]] = {}
    init_only: list[str] = []
    for base in reversed(bases):
        above: Declaration | None = getattr(base, "_kd_declared", None)
        if above is not None:
            taken |= above.taken
            init_only += [name for name in above.init_vars if name not in init_only]
        elif dataclasses.is_dataclass(base):
            taken |= {each.name: copy.copy(each) for each in dataclasses.fields(base)}
    return taken, init_only


def declared(
    cls: type, namespace: Mapping[str, object], open_ended: bool
) -> tuple[dict[str, Field[object]], list[str]]:
    """Return the fields and init-only arguments that a class itself declares, and names of these.

    Args:
        cls: the class.
        namespace: what its body assigns: the defaults.
        open_ended: whether a field may be left out if its type says so: `NotRequired`.

    Raises:
        InvalidValue: if a name or a default is not a valid one.
    """
    taken: dict[str, Field[object]] = {}
    init_only: list[str] = []
    by_keyword = False
    for name, kind in annotations_of(cls).items():
        special = _special(kind)
        if special == "KW_ONLY":
            by_keyword = True
        if special in ("KW_ONLY", "ClassVar"):
            continue
        spec = _default_of(cls, name, namespace.get(name, MISSING))
        spec.name, spec.type = name, kind
        if spec.kw_only is MISSING:
            spec.kw_only = by_keyword
        if open_ended and _may_be_missing(kind):
            spec.metadata = types.MappingProxyType({**spec.metadata, NOT_REQUIRED: True})
        taken[name] = spec
        if special == "InitVar":
            init_only.append(name)
    return taken, init_only


NOT_REQUIRED: Final = "not_required"
"""The mark in the metadata of a field that need not be there."""


def _may_be_missing(kind: object) -> bool:
    return get_origin(kind) is NotRequired or re.match(_OPTIONAL, str(kind)) is not None


def check_names(cls: type, namespace: Mapping[str, object], fields: Iterable[str]) -> None:
    """Refuse fields and methods with the names that containers keep for themselves.

    Raises:
        InvalidValue: if there is one.
    """
    defined = {*namespace, *fields}
    if "batch_size" in fields:
        raise InvalidValue(
            f"a field of `{cls.__name__}` is called `batch_size`, which must not be: it is an "
            "argument of the constructor. Choose another name."
        )
    taken = sorted(name for name in defined if name.startswith(OWN))
    if taken:
        raise InvalidValue(
            f"{listed(taken)} of `{cls.__name__}` must not be the name of a field or a method: "
            f"containers keep the names that begin with `{OWN}`. Choose another name."
        )


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
    if spec.default is MISSING and (not spec.init or NOT_REQUIRED in spec.metadata):
        return None
    return spec.default


CASTS: Final = frozenset({"autocast", "nocast", "tensor_only"})
OPTIONS: Final = frozenset(
    {
        *("autocast", "nocast", "frozen", "shadow", "tensor_only", "kw_only", "checked"),
        *("skip_post_init_on_rebuild", "cast_filter"),
    }
)
_CONVERTING: Final = frozenset({"autocast", "nocast", "tensor_only", "checked"})
_KEEPING: Final = OPTIONS - {"autocast", "checked"}
"""Types of values that a container stores as tensors, if they are numbers or lists of these."""
_PLAIN: Final[tuple[Callable[..., object], ...]] = (int, float, complex, bool, str)
_NOT_CALLED: Final[tuple[object, ...]] = (object, Any, Tensor)


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
    casts = sorted(chosen & CASTS)
    if len(casts) > 1:
        raise InvalidArgument(f"options {listed(casts)} of `{name}` cannot be combined. Pass one.")
    return chosen


def converted(
    cls: type, options: frozenset[str], key: str, value: object, desc: Descriptor
) -> object:
    """Return the value of a field as the options of its class want it.

    Raises:
        InvalidArgument: if it cannot be converted, or is not of the declared type.
    """
    if isinstance(value, Tensor) and options <= _KEEPING:
        return value
    if "checked" in options and "autocast" not in options:
        _check(cls, options, key, value)
    if "nocast" in options:
        rows = isinstance(value, list)
        stored = value is None or rows or (_is_stored(value) and not isinstance(value, dict))
        return value if stored else registry.wrap_data(value, desc)
    if "tensor_only" in options:
        if is_row_data(value) and all(each is None for each in rows_of_data(value)):
            return value  # what instances without a value were stacked to
        if is_data(value):
            value = value._kd_item()
        if value is None or _is_stored(value):
            return value
        return _as_tensor(cls, key, value, "`tensor_only`")
    if "autocast" in options:
        value = _cast(cls, key, value, desc)
        if "checked" in options:
            _check(cls, options, key, value)
    return value


def is_none(value: object) -> bool:
    """Return whether a value is None, as it is or wrapped as data."""
    if value is None or is_row_data(value):
        return value is None
    return is_data(value) and value._kd_item() is None


def _is_stored(value: object) -> bool:
    return isinstance(value, (Tensor, Mapping)) or is_node(value)


def hint_of(cls: type, key: str) -> object:
    """Return the declared type of a field without `None`; `object` if it cannot be resolved."""
    return _alone_in(hints_of(cls, key))


def _alone_in(hints: tuple[object, ...]) -> object:
    rest = [arg for arg in hints if arg is not type(None)]
    return rest[0] if len(rest) == 1 else object


def hints_of(cls: type, key: str) -> tuple[object, ...]:
    """Return the types that a field is declared to have; `object` for a key that is not a field."""
    _read_hints(cls)  # first: compiled code does not see what comes into a dict that it has read
    return _declaration_of(cls).hints.get(key, (object,))


@assume_constant_result  # dynamo traces no annotations; the classes are read from the dict
def _read_hints(cls: type) -> None:
    """Read the types of all fields; one that names what is not defined yet is left for later."""
    declaration = _declaration_of(cls)
    hints = declaration.hints
    if len(hints) == len(declaration.fields):
        return
    for key, spec in declaration.fields.items():
        if key in hints:
            continue
        owner = next((base for base in cls.__mro__ if key in annotations_of(base)), None)
        if owner is None:
            hints[key] = (object,)
            continue
        alone = type(key, (), {"__annotations__": {key: spec.type}})  # whatever others name
        module = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
        try:
            hint = get_type_hints(alone, dict(vars(owner)), module)[key]
        except (NameError, AttributeError, TypeError, SyntaxError):
            continue
        hints[key] = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _cast(cls: type, key: str, value: object, desc: Descriptor) -> object:
    if value is None:
        return value
    hints = hints_of(cls, key)
    hint = _alone_in(hints)
    plain = hint if len(hints) == 1 else object  # a number that may be missing stays a tensor
    if is_data(value):
        return _cast_data(cls, key, value, plain, desc)
    if plain is Tensor:
        if isinstance(value, dict):
            return registry.wrap_data(value, desc)
        return value if _is_stored(value) else _as_tensor(cls, key, value, "`autocast`")
    if _is_array_type(plain) and not is_node(value) and not isinstance(value, dict):
        return registry.wrap_data(_as_array(cls, key, value), desc)
    if plain is NonTensorData and not (isinstance(value, Tensor) or is_node(value)):
        return registry.wrap_data(value, desc)
    called = _class_to_call(plain)
    if (
        called is not None
        and not isinstance(value, dict)
        and (called in _PLAIN or not is_node(value))
    ):
        made = _made(cls, key, value, called)
        is_entry = isinstance(made, Tensor) or is_node(made)
        return made if is_entry else registry.wrap_data(made, desc)
    if isinstance(value, Mapping) and hasattr(hint, "from_dict") and not isinstance(value, type):
        is_of_it = isinstance(hint, type) and isinstance(value, hint)
        optional, fits = len(hints) > 1, _has_fields_for(hint, value)
        if is_of_it or (is_node(value) and (optional or not fits)):
            return value
        if optional and not fits:
            return registry.wrap_data(value, desc)
        build = getattr(hint, "from_dict")  # noqa: B009  # asked above
        return build(value, desc.batch)
    known = hint is not object or len(hints) > 1  # else its annotation may not be readable here
    if isinstance(value, tuple) or (known and _is_whole(value) and not hasattr(hint, "from_dict")):
        return registry.wrap_data(value, desc)
    return value


def _has_fields_for(kind: object, container: Mapping[str, object]) -> bool:
    declaration: Declaration | None = getattr(kind, "_kd_declared", None)
    return declaration is None or all(map(declaration.takes, container.keys()))


def _is_whole(value: object) -> bool:
    """Return whether a field of no cast keeps a value as one, not as one for each row."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")  # of numpy
    return type(value) is list or isinstance(value, dict) or kind not in "biufc"


def _cast_data(cls: type, key: str, value: Node, hint: object, desc: Descriptor) -> object:
    """Cast what is wrapped already: one value, or one for each row."""
    kind = _class_to_call(hint)
    if kind is None or (is_row_data(value) and (kind not in _PLAIN or is_compiling())):
        return value  # an object for all rows is no object for each; compiled code reads none
    given = rows_of_data(value) if is_row_data(value) else [value._kd_item()]
    made = [None if each is None else _made(cls, key, each, kind) for each in given]
    if all(map(is_, made, given)):
        return value
    if not is_row_data(value):
        return registry.wrap_data(made[0], desc)
    positions = torch.arange(len(made), device="cpu").reshape(value._kd_desc.batch)
    return registry.wrap_rows(made, positions, value._kd_desc)


def _class_to_call(hint: object) -> type | None:
    """Return the class of which a field is to be, made by calling it; `None`: it is not called."""
    if not isinstance(hint, type) or hasattr(hint, "from_dict"):
        return None
    of_ours = hint in _NOT_CALLED or issubclass(hint, Node) or _is_array_type(hint)
    return None if of_ours or getattr(hint, "__abstractmethods__", None) else hint


def _made(cls: type, key: str, value: object, kind: type) -> object:
    """Return what a class makes of a value, unless that is an instance of it."""
    if type(value) is kind or (isinstance(value, kind) and kind not in _PLAIN):
        return value
    if issubclass(kind, Tensor) and not isinstance(value, Tensor):  # as a parameter
        return value
    as_number = kind in _PLAIN and kind is not str
    try:
        return kind(value.item() if as_number and isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_a(cls, key, kind.__name__, value) from error


def _is_array_type(hint: object) -> bool:
    return isinstance(hint, type) and (hint.__module__, hint.__name__) == ("numpy", "ndarray")


def _as_array(cls: type, key: str, value: object) -> object:
    import numpy

    try:
        return value.numpy(force=True) if isinstance(value, Tensor) else numpy.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_a(cls, key, "ndarray", value) from error


def _as_tensor(cls: type, key: str, value: object, option: str) -> Tensor:
    try:
        return tensor_of_numbers(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(
            f"field {format_key(key)} of `{cls.__name__}` must be a tensor, as the option {option} "
            f"wants, got {a_type(value)}: {error}. Pass a tensor."
        ) from None


def _check(cls: type, options: frozenset[str], key: str, value: object) -> None:
    plain = value._kd_item() if is_node(value) else value
    hints = [
        type(None) if hint is None else get_origin(hint) or hint for hint in hints_of(cls, key)
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
        if not numbers:
            return list in kinds
        return any(k.__module__ == "numpy" or _holds(value, k) for k in kinds)
    if isinstance(value, Mapping):
        return dict in kinds
    if not is_row_data(value):
        return False
    return tuple in kinds or all(_is_one(row, kinds) for row in rows_of_data(value))


def _holds(value: Tensor, kind: type) -> bool:
    """Return whether a tensor is one or more numbers of a type, as type checkers compare them."""
    if kind is bool:
        return value.dtype is torch.bool
    if kind is int:
        return not value.is_floating_point() and not value.is_complex()
    if kind is float:
        return not value.is_complex()
    return kind in (complex, list, tuple)


def _not_a(cls: type, key: str, name: str, value: object) -> InvalidArgument:
    return InvalidArgument(
        f"field {format_key(key)} of `{cls.__name__}` must be of type `{name}`, got {value!r} of "
        f"type `{type(value).__name__}`."
    )


def _name_of(kind: type) -> str:
    return "None" if kind is type(None) else kind.__name__
