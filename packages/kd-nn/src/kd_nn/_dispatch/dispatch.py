"""`dispatch`: make a method that takes a container callable with tensors.

The decorated method is a descriptor. Looked up on an instance it is a bound method whose signature
binds the real arguments, made from the keys of that instance: `torch.export` may pass `(x, y)`
although the function takes a container. The keys belong to the instance, so only a descriptor can
give this signature. It lists what the function takes; for modules of this library, the keys.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar, cast, overload

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from kd_core import InvalidArgument, NestedKey, TensorDict, TensorDictBase
from kd_core.extending import signature_of
from kd_nn._dispatch.call_names import CallNames, is_plain_mapping
from kd_nn._dispatch.entries import container_of, entry, read_optional
from kd_nn._errors import DispatchError, InputMissing, KeysNotDeclared, not_a_container
from kd_nn._keys.specs import DISCARD, Keys, parse_keys

KEPT = 256
"""How many functions a decorated method keeps, one per list of keys."""

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T", bound=TensorDictBase)
Value: TypeAlias = "Tensor | Mapping[str, Value] | None"
"""What an argument of a call with tensors may be: a mapping stands for the keys below its name."""
Named: TypeAlias = "Value | TensorDictBase"
"""What an argument by keyword may be; by position a container is the input itself."""


class Forward(Protocol):
    """What a decorated method is on an instance: called with a container or with tensors."""

    @overload
    def __call__(self, tensordict: T, /, *args: object, **kwargs: object) -> T: ...
    @overload
    def __call__(self, /, *args: Value, **kwargs: Named) -> Tensor | tuple[Tensor, ...]: ...


class ForwardSignature:
    """The signature of a module: that of its `forward`, which names the real arguments."""

    def __get__(
        self, module: nn.Module | None, owner: type[nn.Module] | None = None
    ) -> inspect.Signature | None:
        """Return the signature of an instance; None leaves that of the class to `__init__`."""
        return None if module is None else signature_of(module.forward)


class KeyedSignature(inspect.Signature):
    """The signature of a keyed module, one argument per key; it binds a container as well.

    `torch.export` binds the arguments of a call to the signature before it makes the call, and also
    what it derives from a container of the same structure, which need not be a container.
    """

    __slots__ = ()

    def bind(self, *args: object, **kwargs: object) -> inspect.BoundArguments:
        """Bind tensors to the keys, or a container to the first of them or to its own name."""
        first = next(iter(self.parameters.values()), None)
        if first is None or first.kind is first.VAR_POSITIONAL or self.parameters.keys() & kwargs:
            return super().bind(*args, **kwargs)
        if args and (len(args) > 1 or isinstance(args[0], Tensor)):
            return super().bind(*args, **kwargs)
        if not args and "tensordict" not in kwargs:
            return super().bind(*args, **kwargs)
        # torch calls what is given by position as the first parameter is called.
        given = dict(zip([first.name], args, strict=False)) | kwargs
        named = [inspect.Parameter(name, first.POSITIONAL_OR_KEYWORD) for name in given]
        return inspect.BoundArguments(inspect.Signature(named), given)


class WrittenSignature(KeyedSignature):
    """The signature of a `forward` that a user wrote: his parameters; it binds tensors by key."""

    __slots__ = ("keyed",)

    keyed: KeyedSignature

    def replace(self, **changes: Any) -> WrittenSignature:
        """Return a changed copy: `inspect` removes `self` from that of a bound method."""
        copy = super().replace(**changes)
        keyed = [*self.keyed.parameters.values()]
        dropped = len(self.parameters) - len(copy.parameters)
        copy.keyed = KeyedSignature(keyed[dropped:])
        return copy

    def bind(self, *args: object, **kwargs: object) -> inspect.BoundArguments:
        """Bind tensors to the keys, or a container."""
        return self.keyed.bind(*args, **kwargs)


class Dispatched(Generic[M]):
    """A method that takes a container, callable with tensors too; made by `dispatch`."""

    def __init__(
        self,
        function: Callable[..., TensorDictBase],
        separator: str,
        source: str | Keys,
        dest: str | Keys,
        auto_batch_size: bool,
        parameters: Sequence[inspect.Parameter],
    ) -> None:
        self.function = function
        self.separator, self.source, self.dest = separator, source, dest
        self.auto_batch_size = auto_batch_size
        further = parameters[2:]
        self.extras = tuple(parameter.name for parameter in further)
        self.takes_any = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in further)
        self.written: list[inspect.Parameter] | None = [_optional(p) for p in parameters[1:]]
        self.places = sum(p.kind is not p.KEYWORD_ONLY for p in further)
        # Bounded: a program may create modules with new keys again and again.
        self._function_of = functools.lru_cache(KEPT)(self._make_function)
        self._names_of = functools.lru_cache(KEPT)(self._make_names)
        functools.update_wrapper(self, function)

    def __set_name__(self, owner: type, name: str) -> None:
        """Define the signature of the class's instances, if this is their `forward`."""
        # That of a class of this library names the keys, as does what `torch.export` captures.
        if owner.__dict__.get("_kd_changes_by_assignment"):
            self.written = None
        if name == "forward" and not hasattr(owner, "__signature__"):
            owner.__signature__ = ForwardSignature()  # type: ignore[attr-defined]  # of any class

    @overload
    def __get__(self, module: None, owner: type[nn.Module] | None = None) -> Self: ...
    @overload
    def __get__(self, module: nn.Module, owner: type[nn.Module] | None = None) -> Forward: ...
    def __get__(
        self, module: nn.Module | None, owner: type[nn.Module] | None = None
    ) -> Self | Forward:
        """Return the method bound to `module`, with the argument names of its keys."""
        if module is None:
            return self
        if is_dynamo_compiling():
            return cast("Forward", functools.partial(self._enter, module))
        try:
            return MethodType(self._function_for(module), module)
        except KeysNotDeclared:  # an AttributeError here would hide the method itself
            return cast("Forward", functools.partial(self._enter, module))

    def __call__(self, module: M, *args: object, **kwargs: object) -> object:
        """Call the method on `module`, as `Class.method(module, ...)` does."""
        return self._enter(module, *args, **kwargs)

    def _enter(self, module: nn.Module, /, *args: object, **kwargs: object) -> object:
        if args and isinstance(args[0], TensorDictBase):
            if kwargs or len(args) > 1:
                self._refuse_tensors(module, args[1:], kwargs)
            return self.function(module, *args, **kwargs)
        if len(args) == 1 and args[0].__class__ is not Tensor and is_plain_mapping(args[0]):
            return self._enter(module, TensorDict(args[0]), **kwargs)
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
        odd = [arg for arg in args if arg is not None and not isinstance(arg, TensorDictBase)]
        if self.takes_any and not (args and "tensordict_out" in self.extras):
            return
        if (
            not unknown
            and len(args) <= self.places
            and not (odd and "tensordict_out" in self.extras)
        ):
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
        extras: dict[str, object] = {}
        if self.extras:
            extras = {k: v for k, v in kwargs.items() if k in self.extras and k not in names.names}
            kwargs = {k: v for k, v in kwargs.items() if k not in extras}
        if self.takes_any and hasattr(type(module), "_kd_takes"):
            takes = cast("Callable[[str], bool]", module._kd_takes)
            further = {k: v for k, v in kwargs.items() if k not in names.names and takes(k)}
            extras |= further
            kwargs = {k: v for k, v in kwargs.items() if k not in further}

        def who() -> str:
            return describe(module)

        bound = names.bind(args, kwargs, who)
        try:
            if not extras:
                run = getattr(type(module), "_kd_run_on_values", None)
                if run is not None and type(module).forward is self:
                    return _bare(run(module, bound))
            batch_size = common_batch_size(bound.values()) if self.auto_batch_size else ()
            result = self.function(module, container_of(bound, batch_size), **extras)
        except InputMissing as error:  # what a step made of this call's arguments is there
            missing = names.missing_from(bound, optional_keys(module), who)
            if missing is None or self.written is not None:
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

    def _function_for(self, module: nn.Module) -> Callable[..., object]:
        ask = getattr(type(module), "_kd_keys_of_call", None)
        known = None if ask is None or self.source != "in_keys" else ask(module)
        if known is not None:  # at once: each question looks whether the steps have changed
            return self._function_of(*known)
        optional = optional_keys(module) if hasattr(type(module), "_kd_optional_in_keys") else ()
        return self._function_of(keys_of(module, self.source), optional)

    def _make_function(self, keys: Keys, optional: Keys) -> Callable[..., object]:
        function, enter = self.function, self._enter

        def forward(self_: nn.Module, /, *args: object, **kwargs: object) -> object:
            if len(args) == 1 and not kwargs and isinstance(args[0], TensorDictBase):
                return function(self_, args[0])  # what `_enter` does, without its frame
            return enter(self_, *args, **kwargs)

        signature = self._make_names(keys).signature(optional)
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        named = KeyedSignature([first, *signature.parameters.values()])
        if self.written is not None:
            written = WrittenSignature([first, *self.written])
            written.keyed, named = named, written
        forward.__signature__ = named  # type: ignore[attr-defined]  # inspect reads it
        forward.__module__ = self.function.__module__
        forward.__name__ = getattr(self.function, "__name__", "forward")
        forward.__qualname__ = getattr(self.function, "__qualname__", "forward")
        forward.__doc__ = self.function.__doc__
        return forward


def _optional(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter that a call with tensors leaves out."""
    free = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    if free or parameter.default is not parameter.empty:
        return parameter
    return parameter.replace(default=None)


Decorator = Callable[[Callable[..., TensorDictBase]], Dispatched[nn.Module]]


@overload
def dispatch(function: Callable[..., TensorDictBase], /) -> Dispatched[nn.Module]: ...
@overload
def dispatch(
    *,
    separator: str = "_",
    source: str | list[NestedKey] = "in_keys",
    dest: str | list[NestedKey] = "out_keys",
    auto_batch_size: bool = True,
) -> Decorator: ...
def dispatch(
    function: Callable[..., TensorDictBase] | None = None,
    /,
    *,
    separator: str = "_",
    source: str | list[NestedKey] = "in_keys",
    dest: str | list[NestedKey] = "out_keys",
    auto_batch_size: bool = True,
) -> Dispatched[nn.Module] | Decorator:
    """Decorate a method that takes a container so that it can be called with tensors.

    A container as first argument, or as `tensordict=`, is passed through. Otherwise positional
    tensors fill the source keys in order, keywords name them (the parts of a nested key joined by
    `separator`), and the destination entries are returned: one value, or a tuple.

    Args:
        function: The method, where the decorator is used without parentheses.
        separator: What joins the parts of a nested key into an argument name.
        source: The attribute that lists the keys to read, or the keys.
        dest: The attribute that lists the keys to return, or the keys; `"_"` is left out.
        auto_batch_size: Whether the container made from the tensors has the largest batch size
            that fits all of them, that of a lone tensor being its shape; else it is `()`.

    Returns:
        The method, whose signature on an instance names the real arguments.

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
        >>> inspect.signature(Scale().forward)
        <WrittenSignature (tensordict=None)>
    """

    def decorate(function: Callable[..., TensorDictBase]) -> Dispatched[nn.Module]:
        parameters = _parameters_of_method(function)
        reads = source if isinstance(source, str) else parse_keys(source, "source")
        writes = dest if isinstance(dest, str) else parse_keys(dest, "dest")
        return Dispatched(function, separator, reads, writes, auto_batch_size, parameters)

    return decorate if function is None else decorate(function)


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
