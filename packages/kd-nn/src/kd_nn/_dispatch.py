"""How a keyed module is called: signatures, binding, reading and writing entries.

Knows keys and containers; must not know plans or sequences.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from itertools import chain
from typing import (
    Any,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
    cast,
    overload,
)

from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from kd_core import (
    InvalidArgument,
    KdError,
    LazyStackedTensorDict,
    NestedKey,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    format_key,
    is_tensor_collection,
    is_tensorclass,
    nearest_key,
    unravel_key_to_tuple,
)
from kd_core.extending import is_prefix, run_alone_eagerly, signature_of
from kd_nn._errors import (
    ArgumentMissing,
    DispatchError,
    InputMissing,
    KeysNotDeclared,
    input_missing,
    list_keys,
    not_a_container,
)
from kd_nn._keys import DISCARD, Keys, argument_name, parse_keys

# Reading the inputs of a module from a container, and writing its outputs back.
#
# Writing is all or nothing: an output that does not fit leaves the container as it was.

Inplace: TypeAlias = "bool | Literal['empty'] | None"


def entry(tensordict: TensorDictBase, key: NestedKey) -> object:
    """Return the entry at `key`; non-tensor data is unwrapped."""
    return tensordict[key]


def container_of(values: Mapping[NestedKey, object], batch_size: Sequence[int] = ()) -> TensorDict:
    """Return a container of values by (nested) key."""
    tree = _tree_of(values)
    if tree is None:
        return TensorDict({}, batch_size).update(values)
    return TensorDict(tree, batch_size)


def fitted(like: TensorDictBase, key: NestedKey, value: object) -> object:
    """Return what a container like this one holds once a value is stored at a key.

    Raises:
        ShapeMismatch: If the value does not fit the batch size.
    """
    probe = like.empty()
    probe.set(key, value)
    return entry(probe, key)


def _tree_of(values: Mapping[NestedKey, object]) -> dict[str, object] | None:
    """Nest plain tensors by their keys; None for other values, or if one key holds another."""
    tree: dict[str, object] = {}
    for key, value in values.items():
        if type(value) is not Tensor:
            return None
        level = tree
        *above, last = (key,) if isinstance(key, str) else cast("tuple[str, ...]", key)
        for part in above:
            inner = level.setdefault(part, {})
            if type(inner) is not dict:
                return None
            level = inner
        if last in level:
            return None
        level[last] = value
    return tree


def read_entries(
    tensordict: TensorDictBase, keys: Iterable[NestedKey], who: Callable[[], str]
) -> list[object]:
    """Return the entries at `keys`.

    Args:
        tensordict: The container.
        keys: What to read.
        who: Names the reader, for the message.

    Raises:
        InputMissing: With the reader, the key and the available keys.
    """
    values: list[object] = []
    for key in keys:
        try:
            values.append(entry(tensordict, key))
        except KeyError:
            raise input_missing(key, who(), list(tensordict.keys(True))) from None
    return values


def read_optional(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[object]:
    """Return the entries at `keys`, None for missing ones."""
    present = tensordict.keys(True)
    return [entry(tensordict, key) if key in present else None for key in keys]


def write_entries(
    tensordict: TensorDictBase, keys: Sequence[NestedKey], values: Sequence[object]
) -> None:
    """Write values at keys, all or nothing."""
    tensordict.assign(dict(zip(keys, values, strict=True)))


def write_apart(
    target: TensorDictBase,
    source: TensorDictBase,
    values: Mapping[NestedKey, object],
    keys: Iterable[NestedKey],
) -> TensorDictBase:
    """Write values into a container as if they were written into another one and taken from there.

    They are in the order of that one, and a nested container that the target lacks is taken whole.

    Args:
        target: The container to write.
        source: The other one, which stays as it is.
        values: What is written, by key.
        keys: What is taken, if it is there.
    """
    made = source.copy().assign(values)
    return target.update(made, keys_to_update=list(keys))


def destination(
    tensordict: TensorDictBase, inplace: Inplace, tensordict_out: TensorDictBase | None
) -> TensorDictBase:
    """Return the container that receives the outputs.

    Args:
        tensordict: The input.
        inplace: False for a fresh container, `"empty"` for an empty one like the input.
        tensordict_out: Takes precedence over `inplace`.
    """
    if tensordict_out is not None:
        return tensordict_out
    if inplace == "empty":
        return tensordict.empty()
    return TensorDict() if inplace is False else tensordict


def parts_of(tensordict: TensorDictBase) -> list[TensorDictBase]:
    """Return a container in a list, or the members of a stack, which may have different keys."""
    if not isinstance(tensordict, LazyStackedTensorDict):
        return [tensordict]
    members = tensordict.unbind(tensordict.stack_dim)
    return [part for member in members for part in parts_of(member)]


def has_entry(tensordict: TensorDictBase, key: NestedKey) -> bool:
    """Return whether there is an entry at `key`; a field that is not set is none."""
    if isinstance(tensordict, LazyStackedTensorDict):  # to read it would stack its members
        return key in tensordict.keys(True)
    try:
        found: object = tensordict.get(key)
    except KeyError:  # it goes through a tensor
        return False
    return isinstance(found, Tensor) or (found is not None and entry(tensordict, key) is not None)


# The names by which tensors are given to a keyed module, and the binding of a call to its keys.
#
# The parts of a nested key are joined by a separator, since a keyword must be a str, and spelled
# as Python spells a name in source (NFKC). Two keys may then share one name (`("a", "b_c")` and
# `("a_b", "c")`): that is found when the names are made, and such keys are given by position or
# inside nested dicts. Everything here is plain Python on str and tuples, so dynamo traces it
# without a guard on a cache.


class Missing:
    """The type of `MISSING`, which stands for an argument that was not given."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING = Missing()


class CallNames:
    """The argument names of a list of keys.

    Attributes:
        keys: The keys, in the order in which positional arguments fill them.
        names: One name per key; keys that collide share one.
        shared: The names that more than one key has.
    """

    __slots__ = ("keys", "names", "shared")

    def __init__(self, keys: Keys, separator: str) -> None:
        self.keys = keys
        self.names = tuple(argument_name(separator.join(unravel_key_to_tuple(k))) for k in keys)
        self.shared = tuple(name for name in self.names if self.names.count(name) > 1)

    @property
    def are_parameters(self) -> bool:
        """Whether every name is a valid parameter name of a Python function."""
        return not self.shared and all(
            name.isidentifier() and not keyword.iskeyword(name) and name != "self"
            for name in self.names
        )

    def signature(self, optional: Sequence[NestedKey]) -> inspect.Signature:
        """Return the signature of a call with tensors, without `self`.

        Args:
            optional: The keys that may be left out.

        Returns:
            One parameter per key, or `(*args, **kwargs)` if a name is not a valid parameter name.
        """
        parameter = inspect.Parameter
        if not self.are_parameters:
            return inspect.Signature(
                [
                    parameter("args", parameter.VAR_POSITIONAL),
                    parameter("kwargs", parameter.VAR_KEYWORD),
                ]
            )
        kind = inspect._ParameterKind.POSITIONAL_OR_KEYWORD
        parameters: list[inspect.Parameter] = []
        for name, key in zip(self.names, self.keys, strict=True):
            needed = key not in optional
            if parameters and parameters[-1].default is None and needed:
                kind = inspect._ParameterKind.KEYWORD_ONLY
            default = parameter.empty if needed else None
            parameters.append(parameter(name, kind, default=default, annotation=Tensor))
        return inspect.Signature(parameters)

    def bind(
        self, args: Sequence[object], kwargs: Mapping[str, object], who: Callable[[], str]
    ) -> dict[NestedKey, object]:
        """Match arguments to keys.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments; a mapping may stand for all keys below its name. Names that
                Python takes for each other (NFKC) are the same.
            who: Names the module, for messages.

        Returns:
            The given values by key; keys that were not given are absent.

        Raises:
            DispatchError: If there are too many positional arguments or one is a plain dict, or
                a name is unknown, shared by two keys, or given twice.
        """
        if len(args) > len(self.keys):
            many = "1 tensor" if len(self.keys) == 1 else f"{len(self.keys)} tensors"
            raise DispatchError(
                f"{who()} expected at most {many} ({self.accepted()}), got {len(args)}."
            )
        for value in args:
            if type(value) is not Tensor and is_plain_mapping(value):
                raise DispatchError(
                    f"{who()} expected a container or tensors ({self.accepted()}), got a plain "
                    f"`{type(value).__name__}`. Wrap it in a `TensorDict`: `TensorDict(...)`."
                )
        bound: dict[NestedKey, object] = dict(zip(self.keys, args, strict=False))
        for name, value in kwargs.items():
            for key, part in self._expand(argument_name(name), value, who).items():
                if key in bound:
                    raise DispatchError(
                        f"{who()} got {format_key(key)} twice. Give it once, by position or as "
                        f"`{name}`. Accepted: {self.accepted()}."
                    )
                bound[key] = part
        for key, value in bound.items():
            if type(value) is not Tensor:
                bound[key] = _as_entry(value)
        return bound

    def missing_from(
        self,
        bound: Mapping[NestedKey, object],
        optional: Sequence[NestedKey],
        who: Callable[[], str],
    ) -> ArgumentMissing | None:
        """Return the error that some keys have no value; None if all have that must have one."""
        missing = [key for key in self.keys if key not in bound and key not in optional]
        if not missing:
            return None
        return ArgumentMissing(
            f"{who()} is missing {self._listed(missing)}. Accepted: {self.accepted()}, by name "
            "or in this order; or one container that holds them."
        )

    def accepted(self) -> str:
        """Return the accepted names, for messages; keys where a name stands for more than one."""
        return self._listed(self.keys) or "none"

    def _listed(self, keys: Sequence[NestedKey]) -> str:
        names = dict(zip(self.keys, self.names, strict=True))
        return ", ".join(
            format_key(key) if names[key] in self.shared else f"`{names[key]}`" for key in keys
        )

    def _expand(self, name: str, value: object, who: Callable[[], str]) -> dict[NestedKey, object]:
        if name in self.names and name not in self.shared:
            return {self.keys[self.names.index(name)]: value}
        heads = {unravel_key_to_tuple(k)[0] for k in self.keys if not isinstance(k, str)}
        heads = {head for head in heads if argument_name(head) == name}
        if len(heads) == 1 and (is_plain_mapping(value) or is_tensor_collection(value)):
            return self._open(heads.pop(), value, who)
        raise self._refusal(name, value, who)

    def _open(self, name: str, value: object, who: Callable[[], str]) -> dict[NestedKey, object]:
        nested = TensorDict({name: value})
        found: dict[NestedKey, object] = {
            key: entry(nested, key) for key in self.keys if has_entry(nested, key)
        }
        # A typed container may hold more than is read: its fields are those of its class.
        further = () if is_tensorclass(value) else nested.items(True)
        for leaf in [k for k, part in further if not is_tensor_collection(part)]:
            if not any(is_prefix(key, leaf) for key in found):
                raise DispatchError(
                    f"{who()} does not read {format_key(leaf)}, given inside `{name}`. "
                    f"Accepted: {self.accepted()}."
                )
        return found

    def _refusal(self, name: str, value: object, who: Callable[[], str]) -> DispatchError:
        if name in self.shared:
            keys = [k for n, k in zip(self.names, self.keys, strict=True) if n == name]
            nested = next((k for k in keys if not isinstance(k, str)), None)
            remedy = "Give them by position"
            if nested is not None:
                head = unravel_key_to_tuple(nested)[0]
                remedy += f", or as nested dicts, such as `{head}={{...}}`"
            return DispatchError(
                f"{who()} cannot tell which key `{name}` means: "
                f"{' and '.join(format_key(key) for key in keys)} share that name. {remedy}."
            )
        near = nearest_key(name, self.names)
        hint = "" if near is None else f" Did you mean `{near}`?"
        if name == "tensordict" and is_plain_mapping(value):
            hint = " Wrap the dict in a `TensorDict`."
        return DispatchError(
            f"{who()} has no argument `{name}`. Accepted: {self.accepted()}.{hint}"
        )


def is_plain_mapping(value: object) -> TypeGuard[Mapping[str, object]]:
    """Return whether a value is a mapping that is not a container."""
    return isinstance(value, Mapping) and not is_tensor_collection(value)


def _as_entry(value: object) -> object:
    return TensorDict(value) if is_plain_mapping(value) else value


# `dispatch`: make a method that takes a container callable with tensors.
#
# The decorated method is a plain function, so `super().forward(...)` works as for any method, in
# code that dynamo traces too. It belongs to the class, while the keys belong to the instance:
# `inspect.signature(module)` names them, `inspect.signature(module.forward)` lists what the method
# declares, and names what is given by keyword as it is given. So `torch.export` binds the arguments
# of a call by key although the function takes a container.

KEPT = 256
"""How many lists of argument names a decorated method keeps, one per list of keys."""

T = TypeVar("T", bound=TensorDictBase)
Value: TypeAlias = "Tensor | Mapping[str, Value] | None"
"""What an argument of a call with tensors may be: a mapping stands for the keys below its name."""
Named: TypeAlias = "Value | TensorDictBase"
"""What an argument by keyword may be; by position a container is the input itself."""
Outputs: TypeAlias = "Tensor | Any"
"""What a call with tensors returns: one tensor, or a tuple of several, which a checker cannot know.

A union with a tuple would make `model(x) + 1` an error.
"""


class Forward(Protocol):
    """What a decorated method is on an instance: called with a container or with tensors."""

    @overload
    def __call__(self, tensordict: T, /, *args: object, **kwargs: object) -> T: ...
    @overload
    def __call__(self, /, *args: Value, **kwargs: Named) -> Outputs: ...


class Dispatched(Protocol):
    """What `dispatch` makes of a method: a function, which tensors may be given to."""

    @overload
    def __get__(self, module: None, owner: type[nn.Module] | None = None) -> Self: ...
    @overload
    def __get__(self, module: nn.Module, owner: type[nn.Module] | None = None) -> Forward: ...
    def __call__(self, module: nn.Module, /, *args: object, **kwargs: object) -> object: ...


class ModuleSignature:
    """The signature of a keyed module: an argument per key, if its `forward` takes tensors."""

    def __get__(
        self, module: nn.Module | None, owner: type[nn.Module] | None = None
    ) -> inspect.Signature | None:
        """Return the signature of an instance; None leaves that of the class to `__init__`."""
        return None if module is None else signature_of_call(module)


def signature_of_call(module: nn.Module) -> inspect.Signature:
    """Return the arguments of a call of a module, which may be a plain one."""
    forward: Callable[..., object] = module.forward
    call = call_of(getattr(forward, "__func__", forward))
    if call is None:
        return signature_of(forward)
    optional = optional_keys(module) if hasattr(type(module), "_kd_optional_in_keys") else ()
    return call.names_of(module).signature(optional)


class MethodSignature(inspect.Signature):
    """The signature of a decorated method; it binds tensors by keyword, under their own names.

    `torch.export` binds the arguments of a call to the signature before it makes the call.
    """

    __slots__ = ()

    def bind(self, *args: object, **kwargs: object) -> inspect.BoundArguments:
        """Bind what is given by position in the order of the parameters, and the rest by name."""
        by_place = self.bind_partial(*args).arguments
        given: dict[str, object] = {}
        for name, value in by_place.items():
            if self.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                given |= {f"{name}_{i}": each for i, each in enumerate(value)}
            else:
                given[name] = value
        given |= kwargs
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        named = [inspect.Parameter(name, kind) for name in given]
        return inspect.BoundArguments(inspect.Signature(named), given)


class TensorCall:
    """How a method that takes a container is called, with tensors too; made by `dispatch`.

    Attributes:
        method: The function that stands in the class.
    """

    def __init__(
        self,
        function: Callable[..., TensorDictBase],
        separator: str,
        source: str | Keys,
        dest: str | Keys,
        auto_batch_size: bool,
    ) -> None:
        self.function = function
        self.separator, self.source, self.dest = separator, source, dest
        self.auto_batch_size = auto_batch_size
        parameters = _parameters_of_method(function)
        further = parameters[2:]
        self.extras = tuple(parameter.name for parameter in further)
        self.by_place = tuple(p.name for p in further if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.takes_any = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in further)
        self.places = sum(p.kind is not p.KEYWORD_ONLY for p in further)
        # Bounded: a program may create modules with new keys again and again.
        self._names_of = functools.lru_cache(KEPT)(self._make_names)
        self.method = self._make_method(parameters)

    def _make_method(self, parameters: Sequence[inspect.Parameter]) -> Callable[..., object]:
        call, function = self, self.function

        @functools.wraps(function)
        def method(module: nn.Module, /, *args: object, **kwargs: object) -> object:
            if len(args) == 1 and not kwargs and isinstance(args[0], TensorDictBase):
                return function(module, args[0])  # what `enter` does, without its frame
            return call.enter(module, *args, **kwargs)

        signature = MethodSignature(_taking_tensors(parameters))
        method.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it
        method._kd_call = self  # type: ignore[attr-defined]  # `call_of` reads it
        return method

    def enter(self, module: nn.Module, /, *args: object, **kwargs: object) -> object:
        if args and isinstance(args[0], TensorDictBase):
            if kwargs or len(args) > 1:
                self._refuse_tensors(module, args[1:], kwargs)
            return self.function(module, *args, **kwargs)
        if len(args) == 1 and type(args[0]) is not Tensor and is_plain_mapping(args[0]):
            return self.enter(module, TensorDict(args[0]), **kwargs)
        if "tensordict" in kwargs and is_plain_mapping(kwargs["tensordict"]):
            kwargs["tensordict"] = TensorDict(kwargs["tensordict"])
        if isinstance(kwargs.get("tensordict"), TensorDictBase):
            container = kwargs.pop("tensordict")
            self._refuse_tensors(module, args, kwargs)
            return self.function(module, container, *args, **kwargs)
        return self._with_tensors(module, args, kwargs)

    def _refuse_tensors(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Raise if anything is given next to a container that the method does not take."""
        unknown = [f"`{name}`" for name in kwargs if name not in self.extras]
        placed = dict(zip(self.by_place, args, strict=False)).get("tensordict_out")
        odd = placed is not None and not isinstance(placed, TensorDictBase)
        if self.takes_any and not (args and "tensordict_out" in self.extras):
            return
        if not unknown and len(args) <= self.places and not odd:
            return
        given = [f"{len(args)} more by position"] if args else []
        further = ", ".join(f"`{name}`" for name in self.extras) or "nothing"
        raise DispatchError(
            f"{describe(module)} got {', '.join([*given, *unknown])} next to a container. With a "
            f"container it takes {further}. Put the tensors into it, or give tensors alone."
        )

    def _with_tensors(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        names = self.names_of(module)
        if len(args) == 1 and not kwargs:
            call = getattr(type(module), "_kd_call_bare", None)
            if call is not None:
                return call(module, args[0])
        extras: dict[str, object] = {}
        if self.extras:
            count = len(names.names)
            if count < len(args) <= count + len(self.by_place):
                placed = dict(zip(self.by_place, args[count:], strict=False))
                if not isinstance(placed.get("tensordict_out"), Tensor):
                    extras, args = placed, args[:count]
            extras |= {k: v for k, v in kwargs.items() if k in self.extras and k not in names.names}
            kwargs = {k: v for k, v in kwargs.items() if k not in extras}
        if self.takes_any and hasattr(type(module), "_kd_takes"):
            takes = cast("Callable[[str], bool]", module._kd_takes)
            count = len(names.names)
            places: Sequence[str] = ()
            if hasattr(type(module), "_kd_places"):
                places = cast("Sequence[str]", module._kd_places)
            if count < len(args) <= count + len(places):
                extras |= dict(zip(places, args[count:], strict=False))
                args = args[:count]
            further = {k: v for k, v in kwargs.items() if k not in names.names and takes(k)}
            extras |= further
            kwargs = {k: v for k, v in kwargs.items() if k not in further}

        def who() -> str:
            return describe(module)

        bound = names.bind(args, kwargs, who)
        dest = self.dest  # asked for at once: a method that may do things for good runs after it
        if isinstance(dest, str) and not hasattr(type(module), dest):
            keys_of(module, dest)
        try:
            if not extras:
                run = getattr(type(module), "_kd_run_on_values", None)
                if run is not None and type(module).forward is self.method:
                    return _bare(run(module, bound))
            batch_size = common_batch_size(bound.values()) if self.auto_batch_size else ()
            result = self.function(module, container_of(bound, batch_size), **extras)
        except InputMissing as error:  # what a step made of this call's arguments is there
            missing = names.missing_from(bound, optional_keys(module), who)
            if missing is None:
                raise
            raise missing from error
        return self._pick(module, result)

    def _pick(self, module: nn.Module, result: object) -> object:
        if not isinstance(result, TensorDictBase):
            raise not_a_container(describe(module), result)
        keys = [key for key in keys_of(module, self.dest) if key != DISCARD]
        selected: Keys | None = module.__dict__.get("_kd_selected")
        if selected is not None and self.dest == "out_keys":  # a class may say all of its keys
            keys = [key for key in selected if key in keys]
        # On the class: a module looks for a missing attribute among its parameters, which is slow.
        if hasattr(type(module), "_kd_may_skip") and getattr(module, "_kd_may_skip", False) is True:
            return _bare(read_optional(result, keys))
        return _bare([entry(result, key) for key in keys])

    def names_of(self, module: nn.Module) -> CallNames:
        """Return the argument names of `module`."""
        keys = keys_of(module, self.source)
        if is_dynamo_compiling():  # a look into a cache would leave guards
            return self._make_names(keys)
        return self._names_of(keys)

    def _make_names(self, keys: Keys) -> CallNames:
        return CallNames(keys, self.separator)


def call_of(function: object) -> TensorCall | None:
    """Return how a method that `dispatch` has decorated is called; None for any other function."""
    call: TensorCall | None = getattr(function, "_kd_call", None)
    # `functools.wraps` copies attributes to what another decorator makes.
    return call if call is not None and call.method is function else None


def _taking_tensors(parameters: Sequence[inspect.Parameter]) -> Sequence[inspect.Parameter]:
    """Return the parameters of a method that takes tensors in place of a container, too."""
    found = [parameters[0]]
    for parameter in parameters[1:]:
        free = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        given = free or parameter.default is not parameter.empty
        found.append(parameter if given else parameter.replace(default=None))
    kinds = [parameter.kind for parameter in found]
    for name, kind in ("args", _VAR_POSITIONAL), ("kwargs", _VAR_KEYWORD):
        if kind not in kinds:
            found.append(inspect.Parameter(name, kind))
    return sorted(found, key=lambda parameter: parameter.kind)


_VAR_POSITIONAL, _VAR_KEYWORD = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


Decorator = Callable[[Callable[..., TensorDictBase]], Dispatched]


@overload
def dispatch(function: Callable[..., TensorDictBase], /) -> Dispatched: ...
@overload
def dispatch(
    separator: str = "_",
    source: str | list[NestedKey] = "in_keys",
    dest: str | list[NestedKey] = "out_keys",
    auto_batch_size: bool = True,
) -> Decorator: ...
def dispatch(
    separator: str | Callable[..., TensorDictBase] = "_",
    source: str | list[NestedKey] = "in_keys",
    dest: str | list[NestedKey] = "out_keys",
    auto_batch_size: bool = True,
) -> Dispatched | Decorator:
    """Decorate a method that takes a container so that it can be called with tensors.

    A container as first argument, or as `tensordict=`, is passed through. Otherwise positional
    tensors fill the source keys in order, keywords name them (the parts of a nested key joined by
    `separator`), and the destination entries are returned: one value, or a tuple.

    Args:
        separator: What joins the parts of a nested key into an argument name; the method, where
            the decorator is used without parentheses.
        source: The attribute that lists the keys to read, or the keys.
        dest: The attribute that lists the keys to return, or the keys; `"_"` is left out.
        auto_batch_size: Whether the container made from the tensors has the largest batch size
            that fits all of them, that of a lone tensor being its shape; else it is `()`.

    A function, whose first argument is called `tensordict`, is given the keys themselves.

    Returns:
        The method, a plain function: `super().forward(...)` calls it.

    Raises:
        InvalidArgument: If it is not a method that takes a container.
        DispatchError: In a call, if an argument is missing, unknown, doubled or ambiguous.

    Example:
        >>> import torch
        >>> class Scale(nn.Module):
        ...     in_keys = ["x", ("limits", "high")]
        ...     out_keys = ["y"]
        ...
        ...     @dispatch
        ...     def forward(self, tensordict):
        ...         tensordict["y"] = tensordict["x"] / tensordict["limits", "high"]
        ...         return tensordict
        >>> Scale()(torch.ones(2, 3), limits_high=torch.full((2, 3), 4.0))
        tensor([[0.2500, 0.2500, 0.2500],
                [0.2500, 0.2500, 0.2500]])
    """
    if not isinstance(separator, str):
        return dispatch()(separator)
    joined = separator

    def decorate(function: Callable[..., TensorDictBase]) -> Dispatched:
        if _takes_container_first(function):
            made = _dispatched_function(function, joined, source, dest, auto_batch_size)
            return cast("Dispatched", made)  # what an instance has of a method
        reads = source if isinstance(source, str) else parse_keys(source, "source")
        writes = dest if isinstance(dest, str) else parse_keys(dest, "dest")
        return cast(
            "Dispatched", TensorCall(function, joined, reads, writes, auto_batch_size).method
        )

    return decorate


def _takes_container_first(function: object) -> bool:
    """Return whether something is a function of a container, and not a method."""
    return callable(function) and [*signature_of(function).parameters][:1] == ["tensordict"]


class _Function:
    """Stands where the module of a method is, for a function."""

    def __init__(self, name: str) -> None:
        self._kd_described_as = name


def _dispatched_function(
    function: Callable[..., TensorDictBase],
    separator: str,
    source: str | list[NestedKey],
    dest: str | list[NestedKey],
    auto_batch_size: bool,
) -> Callable[..., object]:
    """Return a function of a container, called with tensors too."""
    name = getattr(function, "__name__", repr(function))
    if isinstance(source, str) or isinstance(dest, str):
        raise InvalidArgument(
            f"`{name}` is a function, and has no attributes that list its keys. Give them: "
            '`@dispatch(source=["x"], dest=["y"])`.'
        )

    @functools.wraps(function)
    def method(_: object, *args: object, **kwargs: object) -> TensorDictBase:
        return function(*args, **kwargs)

    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = signature_of(function).parameters.values()
    signature = inspect.Signature([owner, *parameters])
    method.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it
    reads, writes = parse_keys(source, "source"), parse_keys(dest, "dest")
    call = TensorCall(method, separator, reads, writes, auto_batch_size)
    module = cast("nn.Module", _Function(name))

    @functools.wraps(function)
    def called(*args: object, **kwargs: object) -> object:
        return call.method(module, *args, **kwargs)

    return called


def _parameters_of_method(function: object) -> Sequence[inspect.Parameter]:
    """Return the parameters of a method; refuse what does not take `self` and a container."""
    if not callable(function):
        raise InvalidArgument(f"`dispatch` decorates a method, got {function!r}.")
    signature = signature_of(function)
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and all(p.kind is not p.VAR_POSITIONAL for p in parameters):
        name = getattr(function, "__name__", repr(function))
        raise InvalidArgument(
            "`dispatch` decorates a method, which takes `self` and a container, got "
            f"`{name}{signature}`. For a function of tensors write "
            f"`TensorDictModule({name}, in_keys=[...], out_keys=[...])`."
        )
    return parameters


def keys_of(module: nn.Module, source: str | Keys) -> Keys:
    """Return the keys that `source` names: an attribute of the module, or the keys themselves.

    Raises:
        KeysNotDeclared: If the module has no such attribute.
    """
    if not isinstance(source, str):
        return source
    if not is_dynamo_compiling() and hasattr(type(module), "_kd_refresh_keys"):
        module._kd_refresh_keys()  # type: ignore[operator]  # a method
    # A default where the class has the attribute would leave a guard, for which dynamo reads it.
    on_class = hasattr(type(module), source)
    declared = getattr(module, source) if on_class else getattr(module, source, None)
    if declared is None:
        raise keys_not_declared(module, source)
    return parse_keys(declared, source)


def keys_not_declared(module: nn.Module, name: str) -> KeysNotDeclared:
    """Build the error for a module without `in_keys`, or whatever the attribute is called."""
    return KeysNotDeclared(
        f"{describe(module)} has no `{name}`. Declare it in the class "
        f'(`{name} = ["x"]`) or set it in `__init__`.'
    )


def common_batch_size(values: Iterable[object]) -> tuple[int, ...]:
    """Return the leading sizes that all tensors share."""
    common: tuple[int, ...] | None = None
    for value in values:
        if isinstance(value, Tensor):
            sizes = value.shape
        elif isinstance(value, TensorDictBase):
            sizes = value.batch_size
        else:
            continue
        if common is None:
            common = tuple(sizes)
            continue
        shared = 0
        for mine, other in zip(common, sizes, strict=False):
            if mine != other:
                break
            shared += 1
        common = common[:shared]
    return common or ()


def describe(module: object) -> str:
    """Return how messages name a module: its class, and the class it wraps if it says so."""
    inner = getattr(module, "_kd_described_as", None)
    return f"`{inner if isinstance(inner, str) else type(module).__name__}`"


def optional_keys(module: nn.Module) -> Keys:
    """Return those of its `in_keys` that a call of the module may leave out."""
    if isinstance(getattr(type(module), "_kd_optional_in_keys", None), property):
        return tuple(cast("list[NestedKey]", module._kd_optional_in_keys))
    return ()


def _bare(outputs: list[object] | tuple[object, ...]) -> object:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


# The note that is added to the exception of a failing module: its keys, shapes and dtypes.
#
# dynamo, which shows the frames of a failing call itself, traces no notes: there is none.


def add_step_note(
    error: BaseException,
    place: tuple[str, str],
    step: nn.Module,
    inputs: Mapping[NestedKey, object],
) -> None:
    """Add to an exception which step raised it, its keys, and shape and dtype of what it was given.

    Args:
        error: What the step raised.
        place: Index and name of the step.
        step: The keyed module.
        inputs: The values it was given, by key.
    """
    if is_dynamo_compiling():
        return
    index, name = place
    named = "" if name == index else f" `{name}`"
    note = _note_of(step, inputs)
    notes = getattr(error, "__notes__", None)
    remedy = notes.pop() if notes and notes[-1].startswith(_OTHER_BATCH) else None
    if notes and notes[-1] in (note, _note_of(step, {})):  # the step has added it
        notes.pop()
    error.add_note(f"In step {index}{named}, {note}")
    if remedy is not None:
        error.add_note(remedy)


def add_call_note(
    error: BaseException, module: nn.Module, inputs: Mapping[NestedKey, object]
) -> None:
    """Add to an exception of torch, or of a user's function, which module raised it, as above."""
    if not (is_dynamo_compiling() or isinstance(error, KdError)):  # whose messages name the module
        error.add_note(_note_of(module, inputs))


_OTHER_BATCH = "A step that changes the batch returns a container, as"


def add_output_note(
    error: BaseException, module: nn.Module, inputs: Mapping[NestedKey, object]
) -> None:
    """Add to an exception which module made the output that a container refused, from what."""
    if is_dynamo_compiling():
        return
    error.add_note(_note_of(module, inputs))
    reads, writes = keys_of(module, "in_keys"), keys_of(module, "out_keys")
    if isinstance(error, ShapeMismatch) and reads and writes:
        error.add_note(
            f"{_OTHER_BATCH} `WrapModule(lambda td: TensorDict({{{writes[0]!r}: "
            f"td[{reads[0]!r}].mean(0)}}, td.batch_size[1:]), in_keys=[{reads[0]!r}], "
            f"out_keys=[{writes[0]!r}])`."
        )


def _note_of(module: nn.Module, inputs: Mapping[NestedKey, object]) -> str:
    given = ", ".join(f"{format_key(key)} {_shape(value)}" for key, value in inputs.items())
    writes = keys_of(module, "out_keys")
    reads = f"reads {given}; " if given else ""
    used = {value.device for value in inputs.values() if isinstance(value, Tensor)}
    held = next(chain(module.parameters(), module.buffers()), None)
    elsewhere = held is not None and used and held.device not in used
    place = f" Its parameters are on {held.device}." if held is not None and elsewhere else ""
    return f"{describe(module)}: {reads}writes {list_keys(writes)}.{place}"


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{place}"
    if isinstance(value, TensorDictBase):
        return f"{type(value).__name__} {tuple(value.batch_size)}"
    return "missing" if value is None else type(value).__name__


# The switch that skips modules whose outputs already exist.
#
# The switch is a context variable, so it holds for the current thread or task only. dynamo cannot
# read one; compiled code reads what its thread entered last, from a `threading.local`.
# `anyone_skips` is a cheap test for the fast path: not empty while the switch is on in any
# context.

P = ParamSpec("P")
R = TypeVar("R")


class _Mirror(threading.local):
    """The switch of this thread, for compiled code."""

    def __init__(self) -> None:
        # Set on the instance: dynamo does not guard that an attribute hides a class default later.
        self.on: Mode = False


Mode: TypeAlias = "bool | list[NestedKey]"

_SWITCH: ContextVar[Mode] = ContextVar("skip_existing", default=False)
_MIRROR = _Mirror()

anyone_skips: list[object] = []
"""Holds one element per active `set_skip_existing`; empty means that no module is skipped."""


def skip_existing() -> Mode:
    """Return whether modules whose outputs exist are skipped in the current context.

    A list holds the keys of which a module must write one to be skipped.

    Example:
        >>> skip_existing()
        False
        >>> with set_skip_existing(True):
        ...     skip_existing()
        True
    """
    if not anyone_skips:
        return False
    return _MIRROR.on if is_compiling() else _SWITCH.get()


class set_skip_existing:  # noqa: N801  # used like a function, as a context manager and a decorator
    """Skip keyed modules whose outputs all exist, unless they read one of them.

    As a context manager it switches skipping on (or off) for every keyed module that is called
    inside. As a decorator of a module's `forward(self, tensordict)` it does so for each call of
    that module, which skips itself, too. `set_skip_existing(None)` decorates a module that skips
    itself where the caller has switched it on. Compiled code follows the switch that its thread
    entered last, of whatever task.

    Args:
        mode: Whether to skip; a list of keys skips modules that write one of them alone; None, for
            a decorator alone, leaves the switch as it is.
        in_key_attr: The attribute that lists what a decorated method's module reads.
        out_key_attr: The attribute that lists what it writes.
        thread_local: Has no effect: the switch is always that of its thread or task.

    Raises:
        InvalidArgument: If `mode` is none of these, or None in a `with` statement.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> from kd_nn import TensorDictModule
        >>> module = TensorDictModule(torch.neg, in_keys=["x"], out_keys=["y"])
        >>> td = TensorDict(x=torch.ones(2), y=torch.zeros(2))
        >>> with set_skip_existing(True):
        ...     module(td)["y"]
        tensor([0., 0.])
        >>> module(td)["y"]
        tensor([-1., -1.])
    """

    def __init__(
        self,
        mode: Mode | None = True,
        in_key_attr: str = "in_keys",
        out_key_attr: str = "out_keys",
        *,
        thread_local: bool = False,
    ) -> None:
        if isinstance(mode, (list, tuple)):
            mode = list(parse_keys(list(mode), "mode"))
        elif not isinstance(mode, bool) and mode is not None:
            raise InvalidArgument(
                f"`mode` must be True, False, None or a list of keys, got {mode!r}."
            )
        self.mode: Mode | None = mode
        self.in_key_attr, self.out_key_attr = in_key_attr, out_key_attr
        self._outer: list[tuple[Token[Mode] | None, Mode]] = []

    def clone(self) -> Self:
        """Return the same setting, which was not entered."""
        return type(self)(self.mode, self.in_key_attr, self.out_key_attr)

    def __enter__(self) -> Self:
        if self.mode is None:
            raise InvalidArgument(
                "`set_skip_existing(None)` decorates a method. In a `with` statement `mode` must "
                "be True or False."
            )
        token = None if is_compiling() else _SWITCH.set(self.mode)
        self._outer.append((token, _MIRROR.on))
        _MIRROR.on = self.mode
        anyone_skips.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        anyone_skips.remove(self)
        token, outer = self._outer.pop()
        if token is None:
            _MIRROR.on = outer
        else:
            _SWITCH.reset(token)
            _MIRROR.on = _SWITCH.get()  # another task may have left since

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate the `forward` of a module."""

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            module = args[0] if args else None
            tensordict = args[1] if len(args) > 1 else kwargs.get("tensordict")
            if (
                isinstance(module, nn.Module)
                and isinstance(tensordict, TensorDictBase)
                and outputs_exist(module, tensordict, self.in_key_attr, self.out_key_attr)
            ):
                return cast("R", tensordict)
            return function(*args, **kwargs)

        @functools.wraps(function)
        def switched(*args: P.args, **kwargs: P.kwargs) -> R:
            with set_skip_existing(self.mode):
                return guarded(*args, **kwargs)

        return guarded if self.mode is None else switched


run_alone_eagerly(skip_existing, set_skip_existing.__enter__, set_skip_existing.__exit__)


def outputs_exist(
    module: nn.Module,
    tensordict: TensorDictBase,
    in_key_attr: str = "in_keys",
    out_key_attr: str = "out_keys",
) -> bool:
    """Return whether skipping is on and `module` would only write entries that exist.

    What it discards exists nowhere.
    """
    mode = skip_existing()
    if not mode:
        return False
    writes = keys_of(module, out_key_attr)
    if mode is not True and not any(key in mode for key in writes):
        return False
    reads = keys_of(module, in_key_attr)
    return bool(writes) and all(has_entry(tensordict, key) and key not in reads for key in writes)
