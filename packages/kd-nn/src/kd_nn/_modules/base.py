"""`TensorDictModuleBase`: what every keyed module has.

Keys are declared in the class or assigned in `__init__`; either way they are parsed once and read
back as lists whose changes are assignments. Assigning to anything that decides how a module runs
(its keys, what it wraps, a patched `forward`) raises a flag that the fast call of every enclosing
module looks at.
"""

from __future__ import annotations

import keyword
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
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
    overload,
)

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from kd_core import (
    InvalidArgument,
    InvalidKey,
    NestedKey,
    TensorClass,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    unravel_key,
    unravel_key_to_tuple,
)
from kd_core.extending import assume_constant_result, plain_str
from kd_nn._dispatch import (
    Inplace,
    ModuleSignature,
    Named,
    Outputs,
    Value,
    add_call_note,
    anyone_skips,
    describe,
    entry,
    has_entry,
    keys_not_declared,
    keys_of,
    optional_keys,
    parts_of,
    write_entries,
)
from kd_nn._errors import DispatchError, out_key_unknown
from kd_nn._keys import (
    DISCARD,
    InKeySpec,
    KeyGraph,
    KeyNode,
    Keys,
    overlaps,
    parse_in_keys,
    parse_keys,
    parse_out_keys,
    unique,
)
from kd_nn._plan.invalidation import Flagged, lists_in, raise_if_written
from kd_nn._plan.program import (
    BUSY,
    FREE_PLANS,
    NO_PLAN,
    STALE,
    UNPLANNED,
    WAIT,
    Outcome,
    Plan,
    is_observed,
    is_sequence,
    keyed,
    runs_on_values,
)
from kd_nn._torch_private import calls_are_own, fake_tensors

if TYPE_CHECKING:
    from typing import TypeVar

    H = TypeVar("H", bound=Callable[..., object])


# Calls that are observed: hidden outputs, and hooks that see tensors.


# Calls of modules whose `forward` writes all of its outputs, whatever is selected.
#
# The classes of this library write what is selected. A class of the user need not know of
# `select_out_keys`: what its `forward` wrote to hidden keys is taken back after the call.

Before: TypeAlias = list[tuple[TensorDictBase, dict[NestedKey, object]]]


def call_as_selected(
    module: Flagged,
    call: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Call a module; entries at keys that are not selected are afterwards as they were before.

    Args:
        module: A keyed module.
        call: Calls it.
        args: What the module is called with: a container first, or tensors.
        kwargs: The keyword arguments.

    Returns:
        What the call returned; a container that the module made has no entry at a hidden key that
        was not in the input.
    """
    selected = module.__dict__.get("_kd_selected")
    if selected is None or module._kd_changes_by_assignment:
        return call(*args, **kwargs)
    given = args[0] if args else kwargs.get("tensordict")
    if not isinstance(given, TensorDictBase):
        return call(*args, **kwargs)
    hidden = _hidden(module, selected)
    before: Before = [(part, _present(part, hidden)) for part in parts_of(given)]
    result = call(*args, **kwargs)
    if result is given or result is None:
        for part, entries in before:
            _restore(part, hidden, entries)
    elif isinstance(result, TensorDictBase) and not any(
        result is value for value in kwargs.values()
    ):
        kept = {key for _, entries in before for key in entries}
        for part in parts_of(result):
            _take_back(part, hidden, kept)
    return result


def without_hidden(
    module: nn.Module, made: TensorDictBase, given: TensorDictBase
) -> TensorDictBase:
    """Return a container without entries at hidden keys that were not in the one given.

    Args:
        module: The keyed module that made it of the one given.
        made: The container; it is not changed.
        given: The input of the module.
    """
    selected = module.__dict__.get("_kd_selected")
    if selected is None:
        return made
    hidden, result = _hidden(module, selected), made.copy()
    kept = {key for part in parts_of(given) for key in _present(part, hidden)}
    for part in parts_of(result):
        _take_back(part, hidden, kept)
    return result


def _hidden(module: nn.Module, selected: Keys) -> Keys:
    """Return the keys that are not selected, less those that a selected one holds or is in."""
    source = keys_of(module, "out_keys_source")
    return tuple(key for key in source if key != DISCARD and not overlaps(key, selected))


def _present(tensordict: TensorDictBase, keys: Keys) -> dict[NestedKey, object]:
    """Return the entries at those of the keys, and of the levels above them, that are there."""
    levels = {level for key in keys for level in _levels(key)}
    return {key: tensordict.get(key) for key in levels if has_entry(tensordict, key)}


def _restore(tensordict: TensorDictBase, keys: Keys, before: dict[NestedKey, object]) -> None:
    for key in keys:
        if key in before and tensordict.get(key) is not before[key]:
            tensordict.set(key, before[key])
    _take_back(tensordict, keys, before)


def _take_back(tensordict: TensorDictBase, keys: Keys, before: Container[NestedKey]) -> None:
    """Remove the entries at keys that were not there, and the levels that were made for them."""
    for key in keys:
        for level in _levels(key):  # a level that the module made goes with its last entry
            if level in before or not _is_left(tensordict, level, key):
                break
            _remove(tensordict, level)


def _levels(key: NestedKey) -> list[NestedKey]:
    """Return a key and the keys of the containers that it is in, innermost first."""
    parts = unravel_key_to_tuple(key)
    return [unravel_key(parts[:end]) for end in range(len(parts), 0, -1)]


def _is_left(tensordict: TensorDictBase, level: NestedKey, key: NestedKey) -> bool:
    """Return whether there is something to remove: the entry itself, or an empty level above."""
    if not has_entry(tensordict, level):
        return False
    found: object = tensordict.get(level)
    return level == key or (isinstance(found, TensorDictBase) and not list(found.keys()))


def _remove(tensordict: TensorDictBase, key: NestedKey) -> None:
    *above, name = unravel_key_to_tuple(key)
    holder = cast("TensorDictBase", tensordict.get(tuple(above)) if above else tensordict)
    if isinstance(holder, TensorClass):
        holder.set(name, None)
    else:
        del holder[name]


# Calls of the hooks of FSDP with the tensors that a call with a container reads and writes.
#
# Knows keys and the protocol of these hooks; must not know how a hook is registered.

Place: TypeAlias = tuple[TensorDictBase, NestedKey, Tensor]
"""A container without members, a key, and the tensor at it."""


class _Replaced:
    """A container that takes the place of the caller's, because a hook changed tensors.

    Attributes:
        given: the container of the caller.
        work: the one in its place.
        before: the entries of `work` before the call.
    """

    __slots__ = ("before", "given", "work")

    def __init__(self, given: TensorDictBase, work: TensorDictBase) -> None:
        self.given, self.work, self.before = given, work, work.copy()


class _Calls(threading.local):
    """The calls in this thread whose container was replaced, innermost last."""

    def __init__(self) -> None:
        self.running: list[_Replaced] = []


_CALLS: Final = _Calls()


def call_before(
    hook: Callable[..., object],
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Call a hook before `forward` with the tensors that a call with a container reads."""
    if not args and isinstance(kwargs.get("tensordict"), TensorDictBase):
        kwargs = dict(kwargs)
        args = (kwargs.pop("tensordict"),)
    if not args or not isinstance(args[0], TensorDictBase):
        return hook(module, args, kwargs)
    given, keys = args[0], keys_of(module, "in_keys")
    tensors = [tensor for _, _, tensor in _places(given, keys)]
    (changed,), _ = cast("tuple[tuple[list[Tensor]], object]", hook(module, (tensors,), {}))
    if _same(tensors, changed):
        return args, kwargs
    work = given.copy()
    _put(_places(work, keys), changed)
    _CALLS.running.append(_Replaced(given, work))
    return (work, *args[1:]), kwargs


def call_after(
    hook: Callable[..., object], module: nn.Module, args: tuple[object, ...], output: object
) -> object:
    """Call a hook after `forward` with the tensors that a call with a container has written."""
    replaced = _ended(args[0]) if args else None
    if not isinstance(output, TensorDictBase):
        return hook(module, args, output)
    places = _places(output, keys_of(module, "out_keys"))
    tensors = [tensor for _, _, tensor in places]
    changed = cast("list[Tensor]", hook(module, (tensors,), tensors))
    if not _same(tensors, changed):
        _put(places, changed)
    if replaced is None or output is not replaced.work:
        return output
    parts = map(parts_of, (replaced.given, replaced.work, replaced.before))
    for given, work, before in zip(*parts, strict=True):
        old = dict(before.items(True, True))
        new = {key: value for key, value in work.items(True, True) if value is not old.get(key)}
        write_entries(given, list(new), list(new.values()))
    return replaced.given


def _ended(work: object) -> _Replaced | None:
    """Return the call whose container this is; forget it and those inside that have failed."""
    running = _CALLS.running
    for position in reversed(range(len(running))):
        if running[position].work is work:
            found = running[position]
            del running[position:]
            return found
    return None


def _places(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[Place]:
    """Return where the tensors at keys are; a key that is absent has none."""
    found: list[Place] = []
    for part in parts_of(tensordict):
        for key in keys:
            value: object = part.get(key, None)
            if isinstance(value, Tensor):
                found.append((part, key, value))
            elif isinstance(value, TensorDictBase):
                found += _places(value, list(value.keys()))
    return found


def _put(places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
    for (part, key, _), tensor in zip(places, tensors, strict=True):
        part.set(key, tensor)


def _same(old: Sequence[Tensor], new: Sequence[Tensor]) -> bool:
    return all(before is after for before, after in zip(old, new, strict=True))


# Hooks of FSDP on keyed modules: they see the tensors that a module reads and writes.
#
# FSDP2 casts what a module is called with, and learns from inputs and outputs when the gradients
# of its parameters are needed. It finds tensors in lists, tuples and dicts alone. So in a call
# with a container, its hooks get the tensors at `in_keys` and `out_keys`, as if the module took
# those.

_FSDP: Final = "torch.distributed.fsdp."

MOST_TRACED: Final = 3
"""So many plans are made of one module for compiled code."""

MAY_BE_MISSING: Final = ("_kd_in_spec", "_kd_out_keys", "_kd_selected", "get_kwargs")
"""What a module need not have; None means the same.

dynamo has no guard of a name that is missing in a `__dict__`: compiled code would not see one that
is assigned later.
"""


def is_of_fsdp(hook: object) -> bool:
    """Return whether FSDP registers a hook."""
    return str(getattr(hook, "__module__", None)).startswith(_FSDP)


# Settings of keyed modules: each is checked when it is assigned, in a constructor or later.
#
# A check takes the module, the name of the setting and the value, and returns the value to keep.
# Beside its settings a module tells its device, and what kind it is.


def checked_out_keys(owner: nn.Module, _: str, keys: object) -> object:
    """Record the names by which outputs are taken, and return the keys."""
    names = None
    if isinstance(keys, Mapping):
        names, keys = tuple(keys), list(keys.values())
        if not all(isinstance(name, str) for name in names):
            raise InvalidKey(
                f"a mapping of `out_keys` is `{{name: key}}`, where each name is a str, "
                f"got the names {list(names)}."
            )
    parsed = parse_out_keys(keys)
    owner.__dict__["_kd_out_names"] = names
    return list(parsed)


def checked_module(owner: nn.Module, _: str, module: object) -> object:
    """Return what is wrapped: a callable that is not a class of modules."""
    if not callable(module):
        raise InvalidArgument(
            f"`module` must be callable, got {type(module).__name__}: {module!r}. "
            "Pass an `nn.Module` or a function."
        )
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise InvalidArgument(
            f"`module` is the class `{module.__name__}`. Pass an instance: "
            f"`{module.__name__}(...)`."
        )
    _check_method(module, owner.__dict__.get("method"))
    return module


def checked_method(owner: nn.Module, _: str, method: object) -> str | None:
    """Return the name of a method of what is wrapped, as a plain `str`, or None."""
    _check_method(owner.module, method)
    return plain_str(method) if isinstance(method, str) else None


def _check_method(module: object, method: object) -> None:
    if method is None:
        return
    # Generated code calls it by name, so it must be one.
    if not (
        isinstance(method, str)
        and method.isidentifier()
        and not keyword.iskeyword(method)
        and callable(getattr(module, method, None))
    ):
        raise InvalidArgument(
            f"`method` must be the name of a method of `{type(module).__name__}`, got {method!r}."
        )


def checked_inplace(_: nn.Module, name: str, inplace: object) -> Inplace:
    """Return what says where outputs are written."""
    if isinstance(inplace, bool) or inplace is None:
        return inplace
    if inplace == "empty":
        return "empty"
    raise InvalidArgument(f'`{name}` must be True, False, None or "empty", got {inplace!r}.')


def checked_kwargs(_: nn.Module, name: str, kwargs: object) -> dict[str, object]:
    """Return keyword arguments by name, as a dict."""
    if isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs):
        return {plain_str(name): value for name, value in kwargs.items()}
    raise InvalidArgument(
        f"`{name}` must be a dict of arguments by name, got {type(kwargs).__name__}: {kwargs!r}."
    )


def checked_flag(_: nn.Module, name: str, value: object) -> bool:
    """Return the value of a setting that is True or False."""
    if isinstance(value, bool):
        return value
    raise InvalidArgument(f"`{name}` must be True or False, got {value!r}.")


def checked_strictness(owner: nn.Module, name: str, value: object) -> bool | None:
    """Return what says whether a missing input is an error."""
    return None if value is None else checked_flag(owner, name, value)


R = TypeVar("R")


class Derived(Generic[R]):
    """A property that a subclass or an instance may replace by assigning an attribute."""

    def __init__(self, function: Callable[..., R]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, module: None, owner: type) -> Self: ...
    @overload
    def __get__(self, module: nn.Module, owner: type | None = None) -> R: ...
    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Self | R:
        """Return the value for the instance; on the class this object."""
        return self if module is None else self.function(module)


def reset_members(module: nn.Module) -> None:
    """Draw new values in a module and all its sub-modules, as `reset_parameters` of each does."""
    for member in module.modules():
        # Of the class: a wrapper passes the method of what it wraps on, which has its own turn.
        reset = getattr(type(member), "reset_parameters", None)
        if callable(reset):
            reset(member)


# Shapes of what a keyed module writes, without data and without computing.
#
# The module runs under torch's fake tensor mode, on tensors that know shape, dtype and device and
# hold no data. Parameters and buffers are exchanged for fake ones (batch norm counts its batches
# in place), and the mode converts captured constants, so the module does not change.


def infer_shapes(module: nn.Module, sample: TensorDictBase) -> TensorDict:
    """Run a keyed module on shapes alone.

    Args:
        module: The keyed module.
        sample: What it reads; the tensors may be on the meta device, their values are not read.

    Returns:
        A container of the sample and all outputs, as tensors on the meta device.
    """
    mode = fake_tensors()
    held = next(module.parameters(), None)
    device = torch.device("cpu") if held is None else held.device

    def pretend(value: Tensor) -> Tensor:
        target = device if value.is_meta else value.device
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=target)

    with torch.no_grad(), mode:
        given = TensorDict(_mapped(sample, pretend), sample.batch_size)
        state: dict[str, Tensor] = {
            name: mode.from_tensor(value) for name, value in _state(module).items()
        }
        result = torch.func.functional_call(module, state, (given,))
    return TensorDict(_mapped(result, _to_meta), result.batch_size)


def with_shapes(graph: KeyGraph, made: TensorDictBase) -> KeyGraph:
    """Return the graph with the shapes of the entries that its steps write."""
    nodes = []
    for node in graph.nodes:
        known = [key for key in node.writes if has_entry(made, key)]
        values = {key: entry(made, key) for key in known}
        shapes = tuple((k, tuple(v.shape)) for k, v in values.items() if isinstance(v, Tensor))
        nodes.append(node._replace(shapes=shapes))
    return KeyGraph(tuple(nodes), graph.out_keys)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _mapped(container: TensorDictBase, function: Callable[[Tensor], Tensor]) -> dict[str, object]:
    mapped: dict[str, object] = {}
    for key in list(container.keys()):
        value = entry(container, key)
        if isinstance(value, TensorDictBase):
            value = TensorDict(_mapped(value, function), value.batch_size)
        mapped[str(key)] = function(value) if isinstance(value, Tensor) else value
    return mapped


def _to_meta(value: Tensor) -> Tensor:
    return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")


# A keyed module as one node of a key graph: its keys, and what people read beside them.


def key_node(
    name: str, step: nn.Module, may_skip: bool = False, keys: tuple[Keys, Keys] | None = None
) -> KeyNode:
    """Return a keyed module as a node of a key graph; `described` adds what people read.

    Args:
        name: The name of the step.
        step: The keyed module.
        may_skip: Whether the sequence that holds it leaves it out for want of inputs.
        keys: What `keys_as_parsed` returned, if it was asked already.
    """
    reads, writes = keys_as_parsed(step) if keys is None else keys
    opens = is_sequence(step) and runs_on_values(step)
    inner = keyed(step)._kd_graph() if opens else None
    optional = optional_keys(step) if inner is None else ()
    # Asked of the class: the guard of dynamo for a default would compute the property again.
    has_parts = hasattr(type(step), "_kd_partly_read")
    partly = cast("list[NestedKey]", step._kd_partly_read) if has_parts else []
    may_skip = may_skip or (inner is None and getattr(step, "_kd_may_skip", False) is True)
    plain = inner is None and not optional and not partly
    make = _make_node if is_dynamo_compiling() or not plain else _equal_node
    node = make(name, type(step).__name__, reads, writes, may_skip)
    if plain:
        return node
    parts = parse_keys(partly, "_kd_partly_read")
    return node._replace(partly=parts, optional=optional, inner=inner)


def _make_node(name: str, kind: str, reads: Keys, writes: Keys, may_skip: bool) -> KeyNode:
    visible = tuple([key for key in writes if key != DISCARD])
    return KeyNode(name, kind, reads, visible, may_skip=may_skip)


_equal_node = lru_cache(maxsize=1024)(_make_node)
"""Nodes are immutable, so sequences with equal steps, as copies of a network, share them."""


def keys_as_parsed(step: nn.Module) -> tuple[Keys, Keys]:
    """Return `in_keys` and visible `out_keys` of a step.

    Where a class does not compute them, they were parsed when they were assigned, and are taken as
    they are.

    Raises:
        KeysNotDeclared: If the step has none.
        InvalidKey: If one is not a nested key.
    """
    state = step.__dict__
    spec, writes = state.get("_kd_in_spec"), state.get("_kd_out_keys")
    if "_kd_listed" in state and is_sequence(step):  # what it lists need not be what it does
        graph = keyed(step)._kd_graph()
        return graph.inputs, graph.outputs
    if spec is None or writes is None or getattr(type(step), "_kd_computes_keys", True):
        return keys_of(step, "in_keys"), keys_of(step, "out_keys")
    selected = state.get("_kd_selected")
    return spec.keys, writes if selected is None else selected


def label_of(step: nn.Module) -> str:
    """Return the class of what runs in a step."""
    label = getattr(step, "_kd_node_label", None)
    return label if isinstance(label, str) else type(step).__name__


def described(node: KeyNode, step: nn.Module) -> KeyNode:
    """Return a node with what a step says at this moment: its label, and how much it holds."""
    made = [p for p in step.parameters() if not isinstance(p, UninitializedParameter)]
    return node._replace(label=label_of(step), parameters=sum(p.numel() for p in made))


T = TypeVar("T", bound=TensorDictBase)


class DeclaredKeys(property):
    """The property of keys in a class that declares them: the class has the keys, too."""

    def __get__(self, module: object, owner: type | None = None) -> object:  # type: ignore[override]  # the class has keys too
        """Return the keys of the instance, or of the class."""
        read = self.fget
        assert read is not None
        return (
            read(module)
            if module is not None
            else list(getattr(owner, f"_kd_class_{read.__name__}"))
        )


class KeyList(list[NestedKey]):
    """The keys of a module as it reads them back: a change of the list is one of the module."""

    __slots__ = ("_module", "_name")

    _module: object
    _name: str

    def __reduce__(self) -> tuple[object, ...]:
        return list, ([*self],)  # a copy is a list alone


def editable(keys: Keys, module: object, name: str) -> KeyList:
    """Return keys of a module as a list that the user may change.

    Args:
        keys: what the list holds.
        module: the module, to which the changed list is assigned, if that is valid.
        name: the attribute.
    """
    found = KeyList(keys)  # set from here: an `__init__` of its own doubles the time
    found._module, found._name = module, name
    return found


def _changing(name: str) -> Callable[..., object]:
    """Return a method of lists that assigns what it made of the keys."""
    change = getattr(list, name)

    def changed(self: KeyList, *values: object, **named: object) -> object:
        keys = [*self]
        found = change(keys, *values, **named)
        setattr(self._module, self._name, keys)
        list.__setitem__(self, slice(None), keys)
        return self if found is keys else found

    changed.__name__, changed.__doc__ = name, change.__doc__
    return changed


for _name in ("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"):
    setattr(KeyList, _name, _changing(_name))
for _name in ("__delitem__", "__iadd__", "__imul__", "__setitem__"):
    setattr(KeyList, _name, _changing(_name))


class TensorDictModuleBase(Flagged):
    """Base class of modules that read and write entries of a container.

    A subclass declares `in_keys` and `out_keys`, in the class or in `__init__`, and a `forward`
    that takes a container, writes into it and returns it. With `dispatch` around `forward` it is
    called with tensors as well.

    A subclass that computes its outputs from bare values alone may define `_kd_forward_values` next
    to `forward`: sequences then run it without a container.

    Attributes:
        in_keys: The keys that are read.
        out_keys: The keys that are written and visible; see `select_out_keys`.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> from kd_nn import dispatch
        >>> class Double(TensorDictModuleBase):
        ...     in_keys = ["x"]
        ...     out_keys = ["y"]
        ...
        ...     @dispatch
        ...     def forward(self, tensordict):
        ...         return tensordict.set("y", 2 * tensordict["x"])
        >>> Double()(x=torch.ones(3))
        tensor([2., 2., 2.])
        >>> Double()(TensorDict(x=torch.ones(3)))["y"]
        tensor([2., 2., 2.])
    """

    _kd_changes_by_assignment = True
    _kd_class_in_keys: ClassVar[Keys | None] = None
    _kd_class_out_keys: ClassVar[Keys | None] = None
    _kd_computes_keys: ClassVar[bool] = False
    _kd_value_form: ClassVar[bool] = False
    __signature__ = ModuleSignature()
    _kd_traced: Plan

    if TYPE_CHECKING:
        # Of any type, so that a decorated method may take its place for pyright too.
        forward: Any
        in_keys: list[NestedKey]
        out_keys: list[NestedKey]
    else:

        def in_keys(self) -> list[NestedKey]:
            """Return the keys that are read; a change of the list changes the module."""
            spec = self.__dict__.get("_kd_in_spec")
            keys = self._kd_own_in_keys() if spec is None else spec.keys
            if is_dynamo_compiling() or not (spec is None or spec.is_plain):
                return [*keys]
            return editable(keys, self, "in_keys")

        def _kd_assign_in_keys(self, keys: object) -> None:
            self._kd_set_in_spec(parse_in_keys(keys))

        def out_keys(self) -> list[NestedKey]:
            """Return the keys that are written and visible.

            A change of the list changes the module, unless some of the keys are selected.
            """
            state = self.__dict__
            selected = state.get("_kd_selected")
            keys = state.get("_kd_out_keys") if selected is None else selected
            if keys is None:
                keys = self._kd_own_out_keys()
            if is_dynamo_compiling() or selected is not None:
                return [*keys]
            return editable(keys, self, "out_keys")

        def _kd_assign_out_keys(self, keys: object) -> None:
            self._kd_set_out_keys_source(parse_keys(keys, "out_keys"))

        in_keys = property(in_keys, _kd_assign_in_keys)
        out_keys = property(out_keys, _kd_assign_out_keys)

    def _kd_settle(self, **settings: object) -> None:
        """Assign settings in a constructor: each is checked; nothing depends on the module yet.

        A class of the user may define `__setattr__` or a property, so it is asked. For values
        that are not modules: torch registers those.
        """
        if not self._kd_changes_by_assignment:
            for name, value in settings.items():
                setattr(self, name, value)
            return
        state = self.__dict__
        for name, value in settings.items():
            check = self._kd_checks.get(name)
            state[name] = value if check is None else check(self, name, value)

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Parse the keys that the class declares, and see whether it runs on bare values."""
        super().__init_subclass__(**kwargs)
        for name in ("in_keys", "out_keys"):
            declared = cls.__dict__.get(name)
            if isinstance(declared, (str, tuple, list)):
                keys = parse_keys(declared, name)
                setattr(cls, f"_kd_class_{name}", keys)
                plain = TensorDictModuleBase.__dict__[name]
                setattr(cls, name, DeclaredKeys(plain.fget, plain.fset))
        cls._kd_computes_keys = any(_is_computed(cls, name) for name in ("in_keys", "out_keys"))
        cls._kd_value_form = _values_first(cls)

    @overload
    def __call__(self, tensordict: T, /, *args: object, **kwargs: object) -> T: ...
    @overload
    def __call__(self, /, *args: Value, **kwargs: Named) -> Outputs: ...
    def __call__(self, /, *args: object, **kwargs: object) -> object:
        """Run on a container, which comes back, or on tensors, which give the `out_keys`."""
        if is_dynamo_compiling():
            result = self._kd_call_traced(args, kwargs)
            if result is not BUSY:
                return result
            return call_as_selected(self, super().__call__, args, kwargs)
        state = self.__dict__
        try:
            plan: Plan = state["_kd_plan"]
        except KeyError:
            plan = self._kd_plan_again()
        if args and type(args[0]) is TensorDict:
            alone = not kwargs and len(args) == 1
            result = plan.container(self, args[0]) if alone else BUSY
        else:
            try:
                result = plan.tensors(self, *args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise
                result = BUSY  # the arguments do not fit: the general path says why
        if type(result) is not Outcome:
            return result
        if result is STALE:
            state.pop("_kd_plan", None)
        if "self" in kwargs:
            raise DispatchError(
                f"{describe(self)} cannot take `self` by keyword, since torch calls the module so. "
                "Give that key by position, or in a container."
            )
        if state.get("_kd_selected") is None:
            return super().__call__(*args, **kwargs)
        return call_as_selected(self, super().__call__, args, kwargs)

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Return a parameter, buffer or sub-module; raise an error that names what is missing."""
        if name in {"in_keys", "out_keys"}:
            raise keys_not_declared(self, name)
        return super().__getattr__(name)

    if not TYPE_CHECKING:  # type checkers take it for the name of the class itself

        @property
        def __name__(self) -> str:
            """The name of the class, where programs name functions and modules alike."""
            return type(self).__name__

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """All keys that are written, whatever is selected."""
        return list(self._kd_own_out_keys())

    def _kd_stored_keys(self) -> Keys:
        """Return the visible keys in the order in which a container gets them."""
        keys = self.out_keys_source
        if self._kd_computes_keys or self.__dict__.get("_kd_selected") is not None:
            visible = set(self.out_keys)
            keys = [key for key in keys if key in visible]
        return tuple([key for key in keys if key != DISCARD])

    @property
    def _kd_may_skip(self) -> bool:
        """Whether a call may leave out some of the outputs, for want of inputs."""
        return False

    @property
    def _kd_optional_in_keys(self) -> list[NestedKey]:
        """The `in_keys` that a call with tensors may leave out."""
        return []

    @property
    def _kd_partly_read(self) -> list[NestedKey]:
        """The containers of which the module makes a part, and may read the rest from outside."""
        return []

    def _kd_fed_keys(self) -> Keys:
        """Return the keys that the module reads, and does not draw, where it is fed.

        It is fed as the last step of a sequence whose earlier steps write them: it is called with
        `_requires_sample=False`.
        """
        return ()

    def _kd_forward_fed(self, *values: object) -> tuple[object, ...]:
        """Do what `_kd_forward_values` does where the module is fed.

        Args:
            *values: One value per key of `in_keys`, then one per key of `_kd_fed_keys`.
        """
        raise NotImplementedError(f"{describe(self)} is not fed.")

    def select_out_keys(self, *out_keys: NestedKey) -> Self:
        """Keep only some outputs, in place.

        A call with tensors returns the selected ones in this order. A call with a container writes
        them alone, and never removes an entry that was there. All is computed as before. Each
        selection is made among all outputs.

        Args:
            *out_keys: Keys among `out_keys_source`.

        Returns:
            The module itself.

        Raises:
            OutKeyUnknown: If a key is not among the outputs; nothing changes.

        Example:
            >>> import torch
            >>> from kd_nn import NormalParamExtractor, TensorDictModule
            >>> module = TensorDictModule(NormalParamExtractor(), ["p"], ["loc", "scale"])
            >>> module.select_out_keys("scale")(p=torch.zeros(2))
            tensor([1.])
            >>> module.reset_out_keys().out_keys
            ['loc', 'scale']
        """
        keys = parse_keys(list(out_keys), "out_keys")
        known = self.out_keys_source
        for key in keys:
            if key not in known:
                raise out_key_unknown(key, describe(self), [k for k in known if k != DISCARD])
        self.__dict__["_kd_selected"] = unique(keys)
        self._kd_flag_change()
        self._kd_refresh_keys()
        return self

    def reset_out_keys(self) -> Self:
        """Reset the selection, in place: all outputs are visible again.

        Returns:
            The module itself.
        """
        self.__dict__["_kd_selected"] = None
        self._kd_flag_change()
        self._kd_refresh_keys()
        return self

    @property
    def _kd_has_value_form(self) -> bool:
        """Whether the module can be run by `_kd_forward_values`; some settings may forbid it."""
        return self._kd_value_form

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Compute the outputs from bare values, without a container.

        Optional: sequences use it where a class defines it. It must give what `forward` writes.

        Args:
            *values: One value per key of `in_keys`.

        Returns:
            One value per key of `out_keys_source`.
        """
        raise NotImplementedError(f"{describe(self)} has no form on bare values.")

    def reset_parameters_recursive(
        self, parameters: TensorDictBase | None = None
    ) -> TensorDictBase | None:
        """Draw new values for all parameters, as each sub-module's `reset_parameters` does.

        Args:
            parameters: A container of parameters shaped like the module: its values are reset, and
                the module's own stay as they are.

        Returns:
            The container, if one was given.

        Example:
            >>> from kd_nn import TensorDictModule
            >>> module = TensorDictModule(nn.Linear(2, 2), ["x"], ["y"])
            >>> before = module.module.weight.clone()
            >>> module.reset_parameters_recursive()
            >>> bool((module.module.weight == before).all())
            False
        """
        if parameters is not None:
            with parameters.to_module(self):
                self.reset_parameters_recursive()
            return parameters
        reset_members(self)
        return None

    def key_graph(self, sample: TensorDictBase | None = None) -> KeyGraph:
        """Return which step reads and writes which keys; see `KeyGraph`.

        Args:
            sample: What the module reads: the graph then knows the shapes; see `infer`.
        """
        graph = self._kd_graph()
        nodes = tuple(map(described, graph.nodes, self._kd_steps()))
        graph = KeyGraph(nodes, graph.out_keys)
        if graph.out_keys is not None:
            graph = graph.restrict(graph.needed_for(graph.out_keys))
        if sample is None:
            return graph

        return with_shapes(graph, self.infer(sample))

    def infer(self, sample: TensorDictBase) -> TensorDict:
        """Find the shapes of all outputs without computing them.

        Args:
            sample: What the module reads; tensors on the meta device will do.

        Returns:
            A container of the sample and the outputs, as tensors on the meta device.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> from kd_nn import TensorDictModule
            >>> module = TensorDictModule(nn.Linear(3, 4), ["x"], ["y"])
            >>> module.infer(TensorDict(x=torch.empty(10, 3, device="meta")))["y"].shape
            torch.Size([10, 4])
        """
        return infer_shapes(self, sample)

    def _kd_steps(self) -> list[nn.Module]:
        """Return what each node of the key graph stands for."""
        return [self]

    def _kd_graph(self) -> KeyGraph:
        """Return the key graph without what only people read: labels, counts of parameters."""
        return KeyGraph((key_node("0", self),), self.__dict__.get("_kd_selected"))

    def __repr__(self) -> str:
        if (
            is_dynamo_compiling()
        ):  # `vmap` asks for the name of what it calls; torch's is not traced
            return type(self).__name__
        return super().__repr__()

    def extra_repr(self) -> str:
        """Return the keys, for printing."""
        keys = (getattr(self, name, None) for name in ("in_keys", "out_keys"))
        return "in_keys={}, out_keys={}".format(*keys)

    def _kd_add_call_note(self, error: Exception, values: Mapping[NestedKey, object]) -> None:
        """Add to an exception of torch what this module was given, by key."""
        add_call_note(error, self, values)

    def _kd_own_in_keys(self) -> Keys:
        spec: InKeySpec | None = self.__dict__.get("_kd_in_spec")
        keys = type(self)._kd_class_in_keys if spec is None else spec.keys
        if keys is None:
            raise AttributeError("in_keys")
        return keys

    def _kd_own_out_keys(self) -> Keys:
        keys: Keys | None = self.__dict__.get("_kd_out_keys")
        if keys is None:
            keys = type(self)._kd_class_out_keys
        if keys is None and _is_computed(type(self), "out_keys"):
            keys = parse_keys(self.out_keys, "out_keys")
        if keys is None:
            raise AttributeError("out_keys")
        return keys

    def _kd_set_in_spec(self, spec: InKeySpec) -> None:
        self.__dict__["_kd_in_spec"] = spec

    def _kd_set_out_keys_source(self, keys: Keys) -> None:
        self.__dict__["_kd_out_keys"] = keys
        self.__dict__["_kd_selected"] = None

    def _kd_call_traced(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run in the form that is cheap to compile; `BUSY` if there is none."""
        if not self._kd_prepare() or anyone_skips:
            return BUSY
        traced = self._kd_traced
        if args and type(args[0]) is TensorDict:
            if kwargs or len(args) > 1:  # dynamo has no guard of what is kept as `not kwargs`
                return BUSY
            return traced.container(self, args[0])
        if len(args) > len(traced.names):
            return BUSY
        # Loops, since a generator costs dynamo a frame for each element.
        for arg in args:
            if is_tensor_collection(arg) or isinstance(arg, dict):  # which stands for a container
                return BUSY
        for name in kwargs:
            if name not in traced.names[len(args) :]:
                return BUSY
        return traced.tensors(self, *args, **kwargs)

    @assume_constant_result
    def _kd_prepare(self) -> bool:
        """Make what dynamo inlines for a call, and tell whether there is any.

        dynamo runs it as it is, before it reads what was made: a function made of text cannot be
        traced, and what is out of date would be replaced while the guards are made. It leaves no
        guard of hooks, as dynamo leaves none itself.

        Each change of a module makes a new plan, and so a new graph. One that changes between its
        calls, as by a counter, is traced without a plan in the end.
        """
        from kd_nn._plan.plans import make_plan  # what is not compiled needs none

        return self._kd_prepare_as("_kd_traced", lambda: make_plan(self, traced=True))

    @assume_constant_result
    def _kd_fill_missing(self) -> bool:
        """Give this module and all inside what they may lack, before dynamo reads a `__dict__`.

        Returns:
            Always `True`; dynamo takes it as a constant.
        """
        for part in self.modules():
            if isinstance(part, TensorDictModuleBase):
                for missing in MAY_BE_MISSING:
                    if not hasattr(type(part), missing):  # else it is a method of the user's class
                        part.__dict__.setdefault(missing, None)
        return True

    def _kd_prepare_as(self, name: str, make: Callable[[], Plan]) -> bool:
        """Make a plan for dynamo where there is none of the module as it is.

        Args:
            name: The attribute that keeps it.
            make: What makes it.
        """
        self._kd_fill_missing()
        if self._kd_computes_keys or is_observed(self):
            return False
        self._kd_refresh_keys()
        state = self.__dict__
        plan: Plan | None = state.get(name)
        if plan is None or plan.dependency is None or plan.dependency.changed:
            made = state[f"{name}_made"] = state.get(f"{name}_made", 0) + 1
            if made > MOST_TRACED:
                return False
            plan = state[name] = make()
        return plan is not NO_PLAN

    def _kd_plan_again(self) -> Plan:
        # An export takes the general path, and must not find attributes that were made in between.
        if is_compiling() or not calls_are_own():
            return NO_PLAN
        made, wait = self.__dict__.get("_kd_plans_made", (0, UNPLANNED))
        if wait:
            self.__dict__["_kd_plans_made"] = (made, wait - 1)
            return NO_PLAN
        self.__dict__["_kd_plans_made"] = (made + 1, WAIT if made > FREE_PLANS else 0)
        from kd_nn._plan.plans import make_plan  # a module called rarely needs none

        plan = self.__dict__["_kd_plan"] = make_plan(self)
        return plan

    def _kd_refresh_keys(self) -> None:
        """Refresh what is kept of the keys: a list of steps may be written directly."""
        if self._kd_computes_keys:
            for holder in lists_in(self):
                raise_if_written(holder)

    @staticmethod
    def is_tdmodule_compatible(module: object) -> bool:
        """Return whether a module has `in_keys` and `out_keys`, so that a sequence takes it.

        Example:
            >>> from kd_nn import TensorDictModuleBase
            >>> TensorDictModuleBase.is_tdmodule_compatible(nn.ReLU())
            False
        """
        return hasattr(module, "in_keys") and hasattr(module, "out_keys")

    def _kd_needs_key(self, key: NestedKey) -> bool:
        """Return whether the module, as it is now, cannot run without an entry that it reads."""
        return key not in getattr(self, "_kd_optional_in_keys", ())

    @Derived
    def is_functional(self) -> bool:
        """Return whether it takes its parameters as an argument; see `kd_nn.make_functional`."""
        return getattr(self.__dict__.get("forward"), "takes_parameters", False)

    @Derived
    def device(self) -> torch.device:
        """Return the device of the first parameter or buffer; the CPU if there is none."""
        held = next(chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if held is None else held.device

    # The signatures are those of torch.
    def register_forward_pre_hook(
        self, hook: H, *, prepend: bool = False, with_kwargs: bool = False
    ) -> RemovableHandle:
        """Register a hook that runs before `forward`; see `nn.Module`."""
        before: Callable[..., object] = hook
        if with_kwargs and is_of_fsdp(hook):
            before = partial(call_before, hook)
        return super().register_forward_pre_hook(before, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(
        self,
        hook: H,
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> RemovableHandle:
        """Register a hook that runs after `forward`; see `nn.Module`."""
        after: Callable[..., object] = hook
        if not with_kwargs and is_of_fsdp(hook):
            after = partial(call_after, hook)
        return super().register_forward_hook(
            after, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
        )


def is_special(name: str) -> bool:
    """Return whether a name is one of Python's own, such as `__deepcopy__`.

    A module never passes these on to what it wraps: they say how to treat the object itself.
    """
    return name.startswith("__") and name.endswith("__")


def _is_computed(cls: type, name: str) -> bool:
    """Return whether a class of the user says how keys are read."""
    owner = next(base for base in cls.__mro__ if name in base.__dict__)
    found = owner.__dict__[name]
    if getattr(owner, "_kd_changes_by_assignment", False) or isinstance(found, DeclaredKeys):
        return False
    read = getattr(found, "fget", None)  # of ours where only the setter is another one
    return read is None or all(
        read is not getattr(base.__dict__.get(name), "fget", None)
        for base in cls.__mro__
        if getattr(base, "_kd_changes_by_assignment", False)
    )


def _values_first(cls: type) -> bool:
    """Return whether the first class that says how to run gives `_kd_forward_values`."""
    for base in cls.__mro__[: cls.__mro__.index(TensorDictModuleBase)]:
        if "_kd_forward_values" in base.__dict__:
            return True
        if "forward" in base.__dict__ or "__call__" in base.__dict__:
            return False
    return False
