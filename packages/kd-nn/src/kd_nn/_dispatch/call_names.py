"""The names by which tensors are given to a keyed module, and the binding of a call to its keys.

The parts of a nested key are joined by a separator, since a keyword must be a str, and spelled as
Python spells a name in source (NFKC). Two keys may then share one name (`("a", "b_c")` and
`("a_b", "c")`): that is found when the names are made, and such keys are given by position or
inside nested dicts. Everything here is plain Python on str and tuples, so dynamo traces it without
a guard on a cache.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

from torch import Tensor

from kd_core import (
    NestedKey,
    TensorDict,
    format_key,
    is_tensor_collection,
    is_tensorclass,
    nearest_key,
    unravel_key_to_tuple,
)
from kd_core.extending import is_prefix
from kd_nn._dispatch.entries import entry, has_entry
from kd_nn._errors import ArgumentMissing, DispatchError
from kd_nn._keys.specs import Keys, argument_name


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
            if value.__class__ is not Tensor and is_plain_mapping(value):
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
            if value.__class__ is not Tensor:
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
