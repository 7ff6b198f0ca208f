"""`TensorDictModule`: any callable between keys."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Self,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from kd_core import (
    InvalidArgument,
    NestedKey,
    TensorClass,
    TensorDictBase,
    format_key,
    is_tensor_collection,
    is_tensorclass,
    unravel_key_to_tuple,
)
from kd_core.extending import field_keys, public_in, signature_of
from kd_nn._dispatch import (
    Inplace,
    add_output_note,
    call_of,
    container_of,
    describe,
    destination,
    dispatch,
    has_entry,
    keys_of,
    outputs_exist,
    read_entries,
    read_optional,
    signature_of_call,
    write_entries,
)
from kd_nn._errors import (
    NotKeyed,
    OutputMismatch,
    list_keys,
    output_mismatch,
    several_outputs,
    suggest,
)
from kd_nn._keys import DISCARD, InKeySpec, Keys, parse_in_keys, parse_keys, parse_out_keys
from kd_nn._modules.base import (
    TensorDictModuleBase,
    checked_flag,
    checked_inplace,
    checked_kwargs,
    checked_method,
    checked_module,
    checked_out_keys,
    checked_strictness,
    editable,
    is_special,
)
from kd_nn._plan.invalidation import Check
from kd_nn._plan.program import stored_keys

InKeys: TypeAlias = (
    "NestedKey | Sequence[NestedKey] | Mapping[str, NestedKey] | Mapping[NestedKey, str]"
)
OutKeys: TypeAlias = "NestedKey | Sequence[NestedKey] | Mapping[str, NestedKey]"


class TensorDictModule(TensorDictModuleBase):
    """Run a callable on entries of a container, and write its outputs back.

    Called with a container, it reads `in_keys`, writes `out_keys` and returns the container. Called
    with tensors, by position or by keyword, it returns the outputs: one, or a tuple.

    Args:
        module: An `nn.Module` or any other callable. It returns one tensor, a tuple or list of as
            many as there are `out_keys` (nested ones are flattened), or outputs by name that hold
            all of them: a mapping, a dataclass or a named tuple.
        in_keys: What it reads: one key (a str or tuple), a list of keys, or a mapping
            `{argument: key}`.
        out_keys: What it writes, one key per output; `"_"` discards an output. A mapping
            `{name: key}` takes outputs by name, whatever else there is, and renames them.
        out_to_in_map: Whether a mapping of `in_keys` is `{argument: key}`, as it is for None; else
            `{key: argument}`.
        inplace: True, or None, writes into the input, False into a fresh container, `"empty"` into
            an empty one of the input's batch size and device. `tensordict_out=` in a call takes
            precedence.
        method: The name of the method to call, instead of the module itself.
        method_kwargs: Further keyword arguments of each call.
        strict: Whether a missing input is an error (True), or None is passed for it, which a call
            with tensors may leave out (False). Without it a missing input is None, too, and an
            error if the callable cannot take that; one with a default is left out.
        get_kwargs: How entries are read: further arguments of `tensordict.get`.

    Attributes:
        _kd_plain_functions: The functions of this class that a plan writes in line; a subclass that
            overrides one of them is called instead.
        _kd_writes_by_inplace: Set in a class whose `forward` writes where `inplace` says.

    Raises:
        InvalidKey: If a key is not a nested key, or an output is named twice.
        InvalidArgument: If `module` is not callable, has no such method, or `inplace` is unknown.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> module = TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=[("out", "y")])
        >>> module(TensorDict(x=torch.ones(2, 3)))["out", "y"].shape
        torch.Size([2, 4])
        >>> module(x=torch.ones(2, 3)).shape
        torch.Size([2, 4])
        >>> stats = lambda x: {"mean": x.mean(-1), "std": x.std(-1), "n": x.shape[-1]}
        >>> TensorDictModule(stats, ["x"], {"mean": "loc", "std": "scale"})(torch.ones(2, 3))
        (tensor([1., 1.]), tensor([0., 0.]))
    """

    _kd_changes_by_assignment = True

    inplace: Inplace
    method: str | None
    method_kwargs: Mapping[str, object]
    strict: bool | None
    _kd_in_spec: InKeySpec
    _kd_writes_by_inplace: ClassVar[bool] = True
    _kd_checks: ClassVar[Mapping[str, Check]] = {
        "inplace": checked_inplace,
        "method": checked_method,
        "method_kwargs": checked_kwargs,
        "module": checked_module,
        "out_keys": checked_out_keys,
        "strict": checked_strictness,
    }

    def __init__(
        self,
        module: Callable[..., object],
        in_keys: InKeys,
        out_keys: OutKeys,
        *,
        out_to_in_map: bool | None = True,
        inplace: Inplace = True,
        method: str | None = None,
        method_kwargs: Mapping[str, object] | None = None,
        strict: bool | None = None,
        get_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        self._kd_wrap(module, in_keys, out_keys, inplace, out_to_in_map)
        kwargs = {} if method_kwargs is None else method_kwargs
        self._kd_settle(method=method, method_kwargs=kwargs, strict=strict)
        if get_kwargs:
            self._kd_settle(get_kwargs=dict(get_kwargs))

    def _kd_wrap(
        self,
        module: Callable[..., object],
        in_keys: InKeys,
        out_keys: OutKeys,
        inplace: Inplace,
        out_to_in_map: bool | None,
    ) -> None:
        """Take what the constructor was given; a sequence takes its steps."""
        self._kd_set_in_spec(parse_in_keys(in_keys, out_to_in_map))
        self.out_keys = out_keys  # type: ignore[assignment]  # parsed by the property
        self._kd_settle(inplace=False if inplace is None else inplace)
        self.module = module

    def _kd_set_out_keys_source(self, keys: Keys) -> None:
        super()._kd_set_out_keys_source(parse_out_keys([*keys]))  # one for each output

    if not TYPE_CHECKING:  # without a look into `__dict__`, as they are read often

        @TensorDictModuleBase.in_keys.getter
        def in_keys(self) -> list[NestedKey]:
            """Return the keys that are read; a change of the list changes the module."""
            spec = self._kd_in_spec
            if is_dynamo_compiling() or not spec.is_plain:
                return [*spec.keys]
            return editable(spec.keys, self, "in_keys")

    @property
    def _kd_replaces_container(self) -> bool | None:
        """Whether the result is another container than the input."""
        return self.inplace not in (True, None) and any(k != DISCARD for k in self.out_keys)

    @property
    def _kd_optional_in_keys(self) -> list[NestedKey]:
        """The `in_keys` that a call with tensors may leave out."""
        return self.in_keys if self.strict is False else []

    @property
    def _kd_described_as(self) -> str:
        """How messages name this module."""
        return f"{type(self).__name__}({self._kd_node_label})"

    @property
    def _kd_node_label(self) -> str:
        """The name of what is wrapped, for tables and pictures."""
        name = getattr(self.module, "__name__", None)
        label = name if isinstance(name, str) else type(self.module).__name__
        return label if self.method is None else f"{label}.{self.method}"

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        **kwargs: object,
    ) -> TensorDictBase:
        """Read, run and write.

        Args:
            tensordict: The container to read; an entry may be missing if the callable has a default
                for it.
            tensordict_out: The container to write, instead of what `inplace` says.
            **kwargs: Further keyword arguments of the callable.

        Returns:
            The container that was written.

        Raises:
            InputMissing: If an entry of `in_keys` is missing.
            OutputMismatch: If the number of outputs is not that of `out_keys`.
        """
        if outputs_exist(self, tensordict):
            return tensordict
        keys = self._kd_in_spec.keys
        if kwargs or self.__dict__.get("get_kwargs") is not None:
            made = self._kd_run_by_name(tensordict, kwargs)
        elif self.strict is not False:
            try:
                values = read_entries(tensordict, keys, lambda: describe(self))
            except KeyError:
                missing = [k for k in keys if not has_entry(tensordict, k)]
                if self.strict and not self._kd_has_defaults(missing):
                    raise
                made = self._kd_run_by_name(tensordict, {})
            else:
                made = self._kd_forward_values(*values)
        else:
            made = self._kd_forward_values(*read_optional(tensordict, keys))
        outputs = dict(zip(self._kd_own_out_keys(), made, strict=True))
        if DISCARD in outputs or self.__dict__.get("_kd_selected") is not None:
            outputs = {key: outputs[key] for key in self._kd_stored_keys()}
        target = destination(tensordict, self.inplace, tensordict_out)
        try:
            write_entries(target, tuple(outputs), tuple(outputs.values()))
        except Exception as error:
            add_output_note(error, self, {key: tensordict.get(key, None) for key in keys})
            raise
        return target

    def _kd_has_defaults(self, missing: Collection[NestedKey]) -> bool:
        """Return whether the callable has a default for each of some inputs."""
        if self.__dict__.get("_kd_in_spec") is None:  # a sequence
            return False
        names = self._kd_argument_names()
        parameters = self._kd_signature().parameters if names else {}
        return bool(names) and all(
            name in parameters and parameters[name].default is not inspect.Parameter.empty
            for name, key in zip(names, self._kd_in_spec.reads, strict=True)
            if key in missing
        )

    def _kd_takes(self, name: str) -> bool:
        """Return whether the callable has a parameter of a name that is not an input."""
        if self.__dict__.get("_kd_in_spec") is None:
            return False
        try:
            parameters = self._kd_signature().parameters
        except (TypeError, ValueError):
            return False
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return name not in self._kd_argument_names() and (name in parameters or takes_any)

    def _kd_function(self) -> Callable[..., object]:
        wrapped: Callable[..., object] = self.module
        if self.method is not None:
            method: Callable[..., object] = getattr(wrapped, self.method)
            return method
        return wrapped.forward if isinstance(wrapped, nn.Module) else wrapped

    def _kd_signature(self) -> inspect.Signature:
        """Return what the callable takes.

        Raises:
            TypeError: If nobody knows, as of some functions of C.
            ValueError: Likewise.
        """
        if self.method is None and isinstance(self.module, nn.Module):
            return signature_of_call(self.module)
        return signature_of(self._kd_function())

    def _kd_argument_names(self) -> tuple[str, ...]:
        """Return the name of the argument of each input; none where they are not known."""
        if self._kd_in_spec.names is not None:
            return self._kd_in_spec.names
        try:
            parameters = self._kd_signature().parameters.values()
        except (TypeError, ValueError):  # a function of C
            return ()
        names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        count = len(self._kd_in_spec.reads)
        return names[:count] if len(names) >= count else ()

    def _kd_run_by_name(
        self, tensordict: TensorDictBase, further: Mapping[str, object]
    ) -> tuple[object, ...]:
        """Run the callable without inputs that are missing, and with further arguments."""
        reads, names = self._kd_in_spec.reads, self._kd_argument_names()
        missing = [key for key in reads if not has_entry(tensordict, key)]
        lenient = self.strict is False
        left_out = () if lenient else [key for key in missing if self._kd_has_defaults([key])]
        without = [key for key in missing if key not in left_out]
        if without and self.strict:
            read_entries(tensordict, reads, lambda: describe(self))
        how: Mapping[str, object] = self.__dict__.get("get_kwargs") or {}
        found = [tensordict.get(key, **how) for key in reads] if how else None
        values = dict(zip(reads, found or read_optional(tensordict, reads), strict=True))
        options = {**further, **self.method_kwargs}
        function = self.module if self.method is None else self._kd_function()
        by_name = self._kd_in_spec.names is not None or bool(left_out)
        given = zip(names, reads, strict=True) if by_name else ()
        named = {n: values[key] for n, key in given if key not in left_out}
        placed = () if by_name else tuple(values[key] for key in reads)
        try:
            return self._kd_split_outputs(function(*placed, **named, **options))
        except Exception as error:
            self._kd_add_call_note(error, values)
            if without and not lenient:  # it cannot take `None`
                try:
                    read_entries(tensordict, reads, lambda: describe(self))
                except KeyError as lacking:
                    raise lacking from error
            raise

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Run the callable on one value per key of `in_keys`; return one per out key."""
        try:
            return self._kd_split_outputs(self._kd_call_wrapped(*values))
        except Exception as error:
            self._kd_add_call_note(error, dict(zip(self._kd_in_spec.keys, values, strict=False)))
            raise

    def _kd_call_wrapped(self, *values: object) -> object:
        """Run the callable on one value per key of `in_keys`; return what it returns."""
        spec = self._kd_in_spec
        # Not `self.module`, which torch looks up in Python.
        wrapped = self._modules.get("module")
        function = self.module if wrapped is None else wrapped
        if self.method is not None:
            function = getattr(function, self.method)
        if spec.names is None and len(spec.keys) == len(spec.reads):
            return function(*values, **self.method_kwargs)
        by_key = dict(zip(spec.keys, values, strict=True))
        fed = [by_key[key] for key in spec.reads]
        if spec.names is None:
            return function(*fed, **self.method_kwargs)
        return function(**dict(zip(spec.names, fed, strict=True)), **self.method_kwargs)

    def _kd_split_outputs(self, result: object) -> tuple[object, ...]:
        """Match what the callable returned to the out keys.

        Args:
            result: One value, a tuple or list, or outputs by name that hold all out keys; None
                where all outputs are discarded.

        Returns:
            One value per key of `out_keys_source`.

        Raises:
            OutputMismatch: If the numbers differ, a name was not found, or one key would get
                several tensors.
        """
        keys = self._kd_own_out_keys()
        names = self.__dict__.get("_kd_out_names")
        found = None if isinstance(result, Tensor) else _by_name(result)
        if names is not None:
            values: tuple[object, ...] = self._kd_named(names, result, found)
        elif isinstance(result, Tensor):
            values = (result,)
        elif isinstance(result, (tuple, list)) and not self._kd_names_fields(found):
            values = tuple(result)
        elif found is not None:
            values = self._kd_from_mapping(result, found)
        elif result is None:
            values = self._kd_from_nothing()
        else:
            values = (result,)
        if len(values) != len(keys):
            flat = tuple(_flattened(values))
            if len(flat) != len(keys):
                raise output_mismatch(
                    describe(self), keys, f"{len(values)} output{'s' * (len(values) != 1)}"
                )
            values = flat
        for key, value in zip(keys, values, strict=True):
            several = None if key == DISCARD else _several_tensors(value)
            if several is not None:
                raise several_outputs(describe(self), key, several)
        return values

    def _kd_run_on_values(self, values: Mapping[NestedKey, object]) -> tuple[object, ...]:
        """Compute the visible outputs of a call with tensors, without a container.

        Args:
            values: The inputs by key; without `strict` some may be absent.

        Returns:
            One value per key of `out_keys` that is not discarded.
        """
        if self.strict is not False and len(values) < len(self._kd_in_spec.keys):
            outputs = self._kd_run_by_name(container_of(values), {})
        else:
            outputs = self._kd_forward_values(*[values.get(key) for key in self._kd_in_spec.keys])
        by_key = dict(zip(self._kd_own_out_keys(), outputs, strict=True))
        return tuple(by_key[key] for key in self.out_keys if key != DISCARD)

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Return an attribute of the module, else of what it wraps."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module", self.__dict__.get("module"))
            if module is None or name in {"in_keys", "out_keys", "module"} or is_special(name):
                raise
            try:
                found: Tensor | nn.Module = getattr(module, name)
            except AttributeError:
                raise AttributeError(
                    f"attribute `{name}` not found in {describe(self)} or in what it wraps."
                ) from None
            return found

    def _kd_from_nothing(self) -> tuple[object, ...]:
        keys = self._kd_own_out_keys()
        if all(key == DISCARD for key in keys):
            return tuple(None for _ in keys)
        raise output_mismatch(describe(self), keys, "None (is a `return` missing?)")

    _kd_plain_functions: ClassVar[Mapping[str, object]] = {
        "_kd_call_wrapped": _kd_call_wrapped,
        "_kd_forward_values": _kd_forward_values,
        "_kd_split_outputs": _kd_split_outputs,
    }

    def _kd_names_fields(self, found: Mapping[NestedKey, object] | None) -> bool:
        """Return whether the out keys are fields of a named tuple, in whatever order."""
        keys = self._kd_own_out_keys()
        if found is None or all(key == DISCARD or key in found for key in keys):
            return found is not None
        moved = [
            key for key, name in zip(keys, found, strict=False) if key in found and key != name
        ]
        if moved:
            raise output_mismatch(
                describe(self),
                keys,
                f"a named tuple of {list_keys(found)}, where {format_key(moved[0])} would be "
                f"another field. Name all outputs in `out_keys={{field: key}}`",
            )
        return False

    def _kd_from_mapping(
        self, result: object, found: Mapping[NestedKey, object]
    ) -> tuple[object, ...]:
        keys = self._kd_own_out_keys()
        values = [None if key == DISCARD else _look_up(found, key) for key in keys]
        missing = [key for key, value in zip(keys, values, strict=True) if value is _ABSENT]
        if not missing:
            return tuple(values)
        if len(keys) == 1:
            return (_as_entry(result),)
        raise output_mismatch(
            describe(self),
            keys,
            f"a mapping of {list_keys(found)}, without {list_keys(missing)}",
        )

    def _kd_named(
        self, names: tuple[str, ...], result: object, found: Mapping[NestedKey, object] | None
    ) -> tuple[object, ...]:
        """Return the outputs that `out_keys` takes by name."""
        missing = [name for name in names if found is None or found.get(name) is None]
        if found is not None and not missing:
            return tuple(_as_entry(found[name]) for name in names)
        got = f"`{type(result).__name__}`."
        if found is not None:
            present = [name for name, value in found.items() if value is not None]
            got = f"{got[:-1]} with {list_keys(present)}.{suggest(missing[0], present)}"
        raise OutputMismatch(
            f"{describe(self)} must return outputs by name (a mapping, a dataclass or a named "
            f"tuple) that hold {list_keys(missing)}, got {got} Name what it returns in "
            "`out_keys={name: key}`, or list the keys of a tuple."
        )


_ABSENT: Final = object()


def _by_name(result: object) -> Mapping[NestedKey, object] | None:
    """Return outputs by name; None where a module returned something else."""
    if isinstance(result, TensorDictBase):
        return {str(key): value for key, value in result.items()}
    if isinstance(result, Mapping):
        return result
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return dict(zip(result._fields, result, strict=True))
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return None


def _several_tensors(output: object) -> Sequence[object] | None:
    """Return the tuple or list of tensors that an output is or holds; None if there is none."""
    if isinstance(output, (tuple, list)):
        if any(isinstance(item, Tensor) for item in output):
            return output
        inside: Iterable[object] = output
    elif isinstance(output, Mapping) and not is_tensor_collection(output):
        inside = output.values()
    else:
        return None
    return next(filter(None, map(_several_tensors, inside)), None)


def _flattened(outputs: Sequence[object]) -> Iterator[object]:
    """Yield outputs, with those in nested tuples and lists of tensors in their place."""
    for output in outputs:
        if isinstance(output, (tuple, list)) and _several_tensors(output) is not None:
            yield from _flattened(output)
        else:
            yield output


def _look_up(found: Mapping[NestedKey, object], key: NestedKey) -> object:
    """Return the value at a nested key, `_ABSENT` if there is none; a dict may have whole keys."""
    head, *rest = unravel_key_to_tuple(key)
    if rest and key in found:
        return _as_entry(found[key])
    value = found.get(head, _ABSENT)
    if not rest or value is _ABSENT:
        return _as_entry(value)
    inner = _by_name(value)
    return _ABSENT if inner is None else _look_up(inner, tuple(rest))


def _as_entry(value: object) -> object:
    """Return a value as a container holds it: a nested dict is a container."""
    if isinstance(value, Mapping) and not is_tensor_collection(value):
        return container_of(value)
    return value


# Keyed modules around another keyed module, a function of a container, or a function.


@public_in("kd_nn")
class TensorDictModuleWrapper(TensorDictModuleBase):
    """Wrap a keyed module and forward everything to it.

    Subclasses add behaviour around `forward`; keys, selection and attributes are those of the
    wrapped module.

    Args:
        td_module: The keyed module.

    Raises:
        NotKeyed: If it has no keys.

    Example:
        >>> import torch
        >>> class Logged(TensorDictModuleWrapper):
        ...     def forward(self, tensordict):
        ...         print("running", self.out_keys)
        ...         return self.td_module(tensordict)
        >>> from kd_core import TensorDict
        >>> _ = Logged(TensorDictModule(torch.neg, ["x"], ["y"]))(TensorDict(x=torch.ones(2)))
        running ['y']
    """

    _kd_changes_by_assignment = True

    def __init__(self, td_module: nn.Module) -> None:
        super().__init__()
        if not self.is_tdmodule_compatible(td_module):
            name = type(td_module).__name__
            raise NotKeyed(
                f"`td_module` must be a keyed module, got `{name}` without in_keys and out_keys. "
                f"Wrap it first: `TensorDictModule({name}(...), in_keys=[...], out_keys=[...])`."
            )
        self.td_module = td_module

    @dispatch(auto_batch_size=False)
    def forward(
        self, tensordict: TensorDictBase, *args: object, **kwargs: object
    ) -> TensorDictBase:
        """Call the wrapped module."""
        result: TensorDictBase = self.td_module(tensordict, *args, **kwargs)
        return result

    @property
    def _kd_places(self) -> Sequence[str]:
        """The names of arguments that the wrapped module takes by position after its inputs."""
        inner = self.td_module
        call = call_of(type(inner).forward)
        if call is not None and "tensordict_out" not in call.by_place:
            return call.by_place
        return getattr(inner, "_kd_places", ())

    def _kd_takes(self, name: str) -> bool:
        """Return whether the wrapped module takes an argument of a name that is not an input."""
        inner = self.td_module
        call = call_of(type(inner).forward)
        if call is not None and name in call.extras:
            return True
        takes = getattr(inner, "_kd_takes", None)
        return takes is not None and bool(takes(name))

    def select_out_keys(self, *out_keys: NestedKey) -> Self:
        """Keep only some outputs of the wrapped module, in place."""
        _keyed(self).select_out_keys(*out_keys)
        self._kd_flag_change()
        return self

    def reset_out_keys(self) -> Self:
        """Reset the selection of the wrapped module, in place: all outputs are visible again."""
        _keyed(self).reset_out_keys()
        self._kd_flag_change()
        return self

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """All keys that the wrapped module writes, whatever is selected."""
        source = getattr(self.td_module, "out_keys_source", None)
        return list(self.out_keys if source is None else source)

    def _kd_stored_keys(self) -> Keys:
        return stored_keys(self.td_module)

    @property
    def _kd_may_skip(self) -> bool:
        """Whether the wrapped module may leave out some of the outputs, for want of inputs."""
        return getattr(self.td_module, "_kd_may_skip", False) is True

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Return an attribute of the wrapper, else of the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules: dict[str, nn.Module] = self.__dict__.get("_modules", {})
            if "td_module" not in modules or is_special(name):
                raise
            found: Tensor | nn.Module = getattr(modules["td_module"], name)
            return found

    def _kd_own_in_keys(self) -> Keys:
        return keys_of(self.td_module, "in_keys")

    def _kd_own_out_keys(self) -> Keys:
        return keys_of(self.td_module, "out_keys")

    def _kd_set_in_spec(self, spec: InKeySpec) -> None:
        _keyed(self).in_keys = list(spec.keys)

    def _kd_set_out_keys_source(self, keys: Keys) -> None:
        _keyed(self).out_keys = list(keys)


def _keyed(wrapper: TensorDictModuleWrapper) -> Any:
    """Return the wrapped module, which has keys, whatever its class."""
    return wrapper.td_module


@public_in("kd_nn")
class WrapModule(TensorDictModuleBase):
    """Build a keyed module from a function of a container that returns a container.

    Args:
        func: The function. It may return a different container, of another batch size: later steps
            of a sequence continue with it.
        inplace: Whether the entries of the result are written into the input, which is returned.
        in_keys: The keys it reads, if known.
        out_keys: The keys it writes, if known.

    Raises:
        InvalidArgument: If `func` is not callable; in a call, if it does not return a container.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> first = WrapModule(lambda td: td[0])
        >>> first(TensorDict(x=torch.ones(2, 3), batch_size=[2, 3])).batch_size
        torch.Size([3])
    """

    _kd_changes_by_assignment = True
    _kd_checks: ClassVar[Mapping[str, Check]] = {"inplace": checked_flag}

    def __init__(
        self,
        func: Callable[[TensorDictBase], TensorDictBase],
        inplace: bool = False,
        in_keys: NestedKey | Sequence[NestedKey] = (),
        out_keys: NestedKey | Sequence[NestedKey] = (),
    ) -> None:
        super().__init__()
        if not callable(func):
            raise InvalidArgument(
                f"`func` must be a function of a container, got {type(func).__name__}: {func!r}."
            )
        self.in_keys = list(parse_keys(in_keys, "in_keys"))
        self.out_keys = list(parse_keys(out_keys, "out_keys"))
        self.inplace: Inplace = inplace
        self.func = func

    @property
    def _kd_replaces_container(self) -> bool:
        """Whether a sequence goes on with the container that this returns."""
        return not self.inplace

    @property
    def _kd_node_label(self) -> str:
        """The name of the function, for tables and pictures."""
        return str(getattr(self.func, "__name__", type(self.func).__name__))

    def _kd_call_bare(self, value: object) -> object:
        """Call the function with a bare value: without keys it is not put into a container."""
        func: Callable[..., object] = self.func
        return func(value)

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call the function."""
        result = self.func(tensordict)
        if not is_tensor_collection(result):
            raise InvalidArgument(
                f"`{self._kd_node_label}` must return a container, got {type(result).__name__}. "
                "Wrap a function of tensors in a `TensorDictModule`."
            )
        if self.inplace and result is not tensordict:
            return tensordict.update(result)
        return result


Input = TypeVar("Input")
Output = TypeVar("Output")


@public_in("kd_nn")
class TensorClassModuleBase(nn.Module, ABC, Generic[Input, Output]):
    """Base class of modules that take an instance of one tensor class and return one of another.

    A subclass names both in brackets and defines `forward`. Either may be a tensor: such a module
    has no form for containers.

    Attributes:
        input_type: What `forward` takes.
        output_type: What it returns.

    Example:
        >>> import torch
        >>> from kd_core import TensorClass, TensorDict
        >>> class Pair(TensorClass):
        ...     a: torch.Tensor
        ...     b: torch.Tensor
        >>> class Sum(TensorClass):
        ...     total: torch.Tensor
        >>> class Add(TensorClassModuleBase[Pair, Sum]):
        ...     def forward(self, x: Pair) -> Sum:
        ...         return Sum(total=x.a + x.b, batch_size=x.batch_size)
        >>> Add()(Pair(a=torch.ones(2), b=torch.ones(2), batch_size=[2])).total
        tensor([2., 2.])
        >>> Add().as_td_module()(TensorDict(a=torch.ones(2), b=torch.ones(2)))["total"]
        tensor([2., 2.])
    """

    input_type: type[Input]
    output_type: type[Output]

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Take the types from the brackets behind the base class."""
        super().__init_subclass__(**kwargs)
        for base in vars(cls).get("__orig_bases__", ()):
            origin, kinds = get_origin(base), get_args(base)
            if not isinstance(origin, type) or not issubclass(origin, TensorClassModuleBase):
                continue
            if origin is TensorClassModuleBase:
                cls.input_type, cls.output_type = kinds
                continue
            given = dict(zip(getattr(origin, "__parameters__", ()), kinds, strict=False))
            for name in ("input_type", "output_type"):
                kind = getattr(origin, name, None)
                setattr(cls, name, given.get(kind, kind))

    @abstractmethod
    def forward(self, x: Input, /) -> Output:
        """Return the output for one input."""

    def __call__(self, x: Input, /) -> Output:
        """Run the module."""
        result: Output = super().__call__(x)
        return result

    def as_td_module(self) -> TensorClassModuleWrapper:
        """Return the keyed module that reads and writes the fields.

        Raises:
            InvalidArgument: If the class did not name two tensor classes.
        """
        return TensorClassModuleWrapper(self)


@public_in("kd_nn")
class TensorClassModuleWrapper(TensorDictModuleBase):
    """A keyed module made of one that takes and returns tensor classes.

    Its keys are the fields of the classes. It returns a new container, which holds the outputs
    alone: later steps of a sequence read these. A field that is missing in the input is `None`.

    Args:
        module: The module; its `input_type` and `output_type` are tensor classes.

    Raises:
        InvalidArgument: If they are not.

    Example:
        >>> import torch
        >>> from kd_core import TensorClass, TensorDict
        >>> class Point(TensorClass):
        ...     x: torch.Tensor
        >>> class Move(TensorClassModuleBase[Point, Point]):
        ...     def forward(self, x: Point) -> Point:
        ...         return Point(x=x.x + 1, batch_size=x.batch_size)
        >>> TensorClassModuleWrapper(Move())(TensorDict(x=torch.ones(2)))["x"]
        tensor([2., 2.])
    """

    _kd_changes_by_assignment = True
    _kd_replaces_container = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        kinds = [getattr(type(module), name, None) for name in ("input_type", "output_type")]
        if not isinstance(module, TensorClassModuleBase) or not all(map(is_tensorclass, kinds)):
            raise InvalidArgument(
                f"the input and output of `{type(module).__name__}` must be tensor classes, got "
                f"{' and '.join(getattr(kind, '__name__', repr(kind)) for kind in kinds)}. Name "
                "them: `class Mine(TensorClassModuleBase[InputClass, OutputClass])`."
            )
        self.in_keys = list(field_keys(cast("type[TensorClass]", kinds[0])))
        self.out_keys = list(field_keys(cast("type[TensorClass]", kinds[1])))
        self.tc_module = module

    @property
    def _kd_optional_in_keys(self) -> list[NestedKey]:
        """The `in_keys` that a call with tensors may leave out: all, as fields may be `None`."""
        return self.in_keys

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Build the input, run the module, and return what is visible of the output."""
        kind = self.tc_module.input_type
        given = tensordict
        if not isinstance(given, kind):
            given = TensorClass.from_tensordict.__func__(kind, tensordict, safe=False)  # type: ignore[attr-defined]  # a field may have its name
        made = self.tc_module(given)
        if not isinstance(made, TensorDictBase):
            raise InvalidArgument(
                f"`{type(self.tc_module).__name__}` must return a tensor class, got "
                f"{type(made).__name__}."
            )
        result = TensorDictBase.to_tensordict(made)
        if self.__dict__.get("_kd_selected") is None:
            return result
        return result.select(*self.out_keys, strict=False)


def as_tensordict_module(
    in_keys: InKeys, out_keys: OutKeys
) -> Callable[[Callable[..., object]], TensorDictModule]:
    """Convert the decorated function to a keyed module.

    Args:
        in_keys: What it reads; see `TensorDictModule`.
        out_keys: What it writes.

    Returns:
        A decorator.

    Example:
        >>> import torch
        >>> @as_tensordict_module(["x", "y"], ["sum"])
        ... def add(x, y):
        ...     return x + y
        >>> add(x=torch.ones(2), y=torch.ones(2))
        tensor([2., 2.])
    """

    def decorate(function: Callable[..., object]) -> TensorDictModule:
        return TensorDictModule(function, in_keys, out_keys)

    return decorate
