"""`TensorDict`: the dense container."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, cast, overload

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from kd_core import _registry as registry
from kd_core._containers.dense import Dense, GeneralMethods, holds_nodes, overlay
from kd_core._descriptor import Descriptor, describe, describe_on, device_of
from kd_core._errors import InvalidArgument, given_twice, wrong_type
from kd_core._keys import format_key
from kd_core._leaves.loops import MANY, all_fit, common_batch, leaf_fits, shapes_of
from kd_core._naming import ELSEWHERE, USUAL_KEYS, KeyAsAttribute, NamedElsewhere, leaves_out
from kd_core._ops.conversion import build
from kd_core._ops.description import check_names, named
from kd_core._ops.modules import Scope
from kd_core._ops.placement import moved
from kd_core._protocol import AbstractContainer, take_names
from kd_core._shapes import batch_of
from kd_core._torch_private import traced_as
from kd_core._types import NO_DEFAULT
from kd_core._validation import MAX_DEPTH, as_entry, is_foreign, with_plain_keys

if TYPE_CHECKING:
    from typing import Self, TypeAlias, TypeVar

    from kd_core._base import TensorDictBase
    from kd_core._nodes import AnyKey, Entry, Node, Source
    from kd_core._types import Batch, BatchSize, DeviceLike, NestedKey, NoDefault

    S = TypeVar("S")
    Merge: TypeAlias = tuple["TensorDict", Mapping[str, Any], bool]


@leaves_out(*USUAL_KEYS.split(), kind=KeyAsAttribute)
@leaves_out(*ELSEWHERE, kind=NamedElsewhere)
class TensorDict(Dense):
    """A mapping of (nested) string keys to tensors that share their leading dimensions.

    Args:
        source: a mapping, whose keys may be nested tuples, or a container. Nested mappings become
            nested containers; numbers, lists of numbers and arrays become tensors; anything else
            is kept as non-tensor data, one value for the whole batch.
        batch_size: the leading dimensions of every entry; `None` means `()`, it is never inferred.
        device: where every entry is moved; `None` leaves them where they are.
        names: the name of each batch dimension, or `None` for one without; see `names`.
        non_blocking: do not wait for copies between pinned memory and a GPU.
        lock: lock the container once it is built.
        **entries: more entries, by keyword.

    Raises:
        ShapeMismatch: if a value's shape does not start with the batch size.
        InvalidKey: if a key is neither a string nor a tuple of strings.
        KeyCollision: if a keyword repeats a key of the source.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"obs": torch.zeros(3, 4), "next": {"obs": torch.ones(3, 4)}}, [3])
        >>> td["next", "obs"].shape, td[0].batch_size
        (torch.Size([3, 4]), torch.Size([]))
    """

    __slots__ = ("__dict__",)  # attributes of a program, which no other container gets

    def __init__(
        self,
        source: Source[AnyKey] | None = None,
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        names: Sequence[str | None] | None = None,
        non_blocking: bool | None = None,
        lock: bool = False,
        **entries: object,
    ) -> None:
        later = None if device is None or not non_blocking else device_of(device)
        if later is not None:
            device = None
        if batch_size is None:
            batch: Batch = ()
        elif type(batch_size) is list:
            batch = tuple(batch_size)
            for size in batch:  # `batch_of`, inlined: "construct" in the benchmarks
                if type(size) is not int:
                    batch = batch_of(batch)
        else:
            batch = batch_of(batch_size)
        desc = self._kd_desc = describe(batch) if device is None else describe_on(batch, device)
        if entries:
            if "batchsize" in entries and isinstance(entries["batchsize"], (list, tuple)):
                raise _misspelt(entries["batchsize"])
            if source is not None:
                raise _given_both(next(iter(entries)))
            given: object = entries
        else:
            given = source
        if given is None or (type(given) is dict and not given):
            self._kd_entries = {}
            self._kd_nested = False
        else:
            fill(self, given, desc)
        if names is not None and any(check_names(names, desc.batch)):
            other = named(self, names)  # nested containers of the caller keep their names
            self._kd_entries, self._kd_desc = other._kd_entries, other._kd_desc
        if later is not None:
            there = moved(self, later, True)
            self._kd_entries, self._kd_desc = there._kd_entries, there._kd_desc
        if lock:
            self.lock_()

    def _kd_put(self, key: str, value: object) -> None:
        # Overridden for speed: "td['a'] = x" in the benchmarks.
        if type(value) is Tensor:
            desc = self._kd_desc
            try:
                shape: tuple[int, ...] = value.shape
            except RuntimeError:  # a tensor without a shape
                shape = ()
            if (shape and shape[0] == desc.rows) or (
                (desc.plain or (desc.plain_on_cpu and value.is_cpu))
                and (desc.ndim == 0 or leaf_fits(value, desc))
            ):
                if is_dynamo_compiling():
                    overlay(self, {key: value})
                else:
                    self._kd_entries[key] = value
                return
        elif type(value) is TensorDict and not is_dynamo_compiling():
            # Without nodes below it, only the container itself would make a cycle.
            desc = self._kd_desc
            same = value._kd_desc is desc and not desc.frozen
            if same and not value._kd_nested and value is not self:
                self._kd_nested = True
                self._kd_entries[key] = value
                return
        super()._kd_put(key, value)

    def _kd_store(self, path: tuple[str, ...], value: object) -> None:
        # Overridden for speed: "set(('b', 'c'), x)" in the benchmarks.
        if len(path) == 2 and type(value) is Tensor:
            child = self._kd_entries.get(path[0])
            try:
                shape: tuple[int, ...] = value.shape
            except RuntimeError:  # a tensor without a shape
                shape = ()
            if type(child) is TensorDict:
                desc = child._kd_desc
                if (shape and shape[0] == desc.rows) or (
                    (desc.plain or (desc.plain_on_cpu and value.is_cpu))
                    and (desc.ndim == 0 or leaf_fits(value, desc))
                ):
                    if is_dynamo_compiling():
                        overlay(child, {path[1]: value})
                    else:
                        child._kd_entries[path[1]] = value
                    return
        super()._kd_store(path, value)

    def update(
        self,
        input_dict_or_td: Source[AnyKey] | NoDefault | None = NO_DEFAULT,
        clone: bool = False,
        inplace: bool = False,
        non_blocking: bool = False,
        keys_to_update: Iterable[NestedKey] | None = None,
        is_leaf: Callable[[type], bool] | None = None,
        update_batch_size: bool = False,
        **entries: object,
    ) -> Self:
        # Overridden for speed: "update(2 leaves)" and "update(td), nested" in the benchmarks.
        alone = keys_to_update is None and is_leaf is None and not entries
        if not (clone or inplace) and alone and not self._kd_desc.frozen:
            source = input_dict_or_td
            if type(source) is dict and not update_batch_size:
                if all_fit(source, self._kd_desc):
                    put = self._kd_set_leaves if is_dynamo_compiling() else self._kd_entries.update
                    put(source)
                    return self
                if _merge(self, source, _stage_dict):
                    return self
            elif isinstance(source, TensorDict) and _merge(self, source, _stage_merge):
                return self
        return super().update(
            input_dict_or_td,
            clone,
            inplace,
            non_blocking=non_blocking,
            keys_to_update=keys_to_update,
            is_leaf=is_leaf,
            update_batch_size=update_batch_size,
            **entries,
        )

    @traced_as(Dense.rename_key_)
    def rename_key_(self, old_key: NestedKey, new_key: NestedKey, safe: bool = False) -> Self:
        # Overridden for speed: "rename_key_ there and back" in the benchmarks.
        if type(old_key) is str and type(new_key) is str and old_key != new_key:
            entries = self._kd_entries
            if not safe and old_key in entries and not self._kd_desc.frozen:
                entries[new_key] = entries.pop(old_key)
                return self
        return super().rename_key_(old_key, new_key, safe)

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: BatchSize | None = None,
        device: DeviceLike | NoDefault | None = NO_DEFAULT,
        names: Sequence[str | None] | NoDefault | None = NO_DEFAULT,
    ) -> Self:
        # Overridden for speed: "empty()" in the benchmarks.
        if recurse or batch_size is not None or device is not NO_DEFAULT or names is not NO_DEFAULT:
            return super().empty(recurse, batch_size=batch_size, device=device, names=names)
        new = object.__new__(type(self))
        new._kd_entries = {}
        new._kd_desc = self._kd_desc._unlocked
        new._kd_nested = False
        return new

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
        """Build a container from nested dicts.

        Args:
            input_dict: nested dicts of values, which are converted as by `from_any`; a container
                is returned as it is.
            batch_size: the leading dimensions of every entry; a number has one value for all rows.
            device: the device to which every entry is moved.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share;
                nested containers get what their own leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            names: the name of each batch dimension; `None`: no names.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> source = {"a": torch.zeros(3, 4), "b": {"c": torch.zeros(3)}}
            >>> TensorDict.from_dict(source, auto_batch_size=True).batch_size
            torch.Size([3])
        """
        inferred = batch_size is None and (auto_batch_size or batch_dims is not None)
        direct = names is None and not inferred
        if direct and _holds_tensors(input_dict):
            return cls(input_dict, batch_size, device)  # type: ignore[arg-type]  # mypy infers no key
        plain = names is None and device is None and (batch_dims is None or batch_dims >= 0)
        if inferred and plain and cls is TensorDict:
            # The fast path for a source of tensors only: "from_dict, nested" in the benchmarks.
            levels: list[TensorDict] = []
            leaves: list[Tensor] = []
            shapes = None
            if _undescribed(input_dict, levels, leaves, 0) is not None:
                shapes = shapes_of(leaves)
            if shapes is not None:
                desc = describe(common_batch(shapes, batch_dims))
                for level in levels:
                    level._kd_desc = desc
                if len(levels) > 1 and desc.ndim != batch_dims:
                    _share_more(levels, desc.ndim, batch_dims)
                return levels[0]  # type: ignore[return-value]  # `Self` is `TensorDict` here
        if isinstance(input_dict, AbstractContainer):
            if names is None:
                return cls.from_any(
                    input_dict, batch_dims=batch_dims, device=device, batch_size=batch_size
                )
        else:
            from kd_core._convert.plain import with_branches

            given = () if batch_size is None else batch_of(batch_size)
            input_dict = cast("Mapping[AnyKey, object]", with_branches(input_dict, given))
        if direct:
            return cls(input_dict, batch_size, device)  # type: ignore[arg-type]  # as above
        return build(cls, input_dict, batch_size, device, auto_batch_size, batch_dims, None, names)

    @overload
    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: Literal[False] = False,
        lock: bool = False,
        use_state_dict: bool = False,
        filter_empty: bool = True,
    ) -> Self: ...
    @overload
    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: bool,
        lock: bool = False,
        use_state_dict: bool = False,
        filter_empty: bool = True,
    ) -> TensorDictBase: ...
    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        as_module: bool = False,
        lock: bool = False,
        use_state_dict: bool = False,
        filter_empty: bool = True,
    ) -> TensorDictBase:
        """Collect the parameters and buffers of a module, nested like its sub-modules.

        The entries are the tensors of the module itself, parameters included. A sub-module with two
        names is one container under two keys.

        Args:
            module: the module; it is not changed.
            as_module: return a `kd_nn.TensorDictParams`, which is an `nn.Module`; needs kd-nn.
            lock: lock the container.
            use_state_dict: take the entries of `module.state_dict()`: its hooks run, buffers that
                are not persistent are left out, and tensors are detached: they share memory with
                the parameters and have no gradients.
            filter_empty: leave out modules without state; else they are empty containers.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh())
            >>> params = TensorDict.from_module(net)
            >>> params["0", "weight"] is net[0].weight
            True
            >>> with params.clone().to_module(net):
            ...     out = net(torch.ones(1, 2))
        """
        from kd_core._ops import modules

        modules.check_module(module)
        td = cls.__new__(cls)
        if use_state_dict:
            td._kd_entries = modules.state_entries(module)
        else:
            td._kd_entries = modules.module_entries(module, None, not filter_empty)
        td._kd_desc = describe(())
        td._kd_nested = True
        made: TensorDictBase = td
        if as_module:
            source = None if use_state_dict else module
            made = cast("TensorDictBase", modules.as_module(td, source))
        return made.lock_() if lock else made


def _merge(
    target: TensorDict, source: S, stage: Callable[[TensorDict, S, list[Merge]], bool]
) -> bool:
    """Merge all entries of a source if they need no check; else return `False`, nothing changed."""
    merges: list[Merge] = []
    if not stage(target, source, merges):
        return False
    for level, entries, nested in merges:
        level._kd_set_leaves(entries)
        if nested and not level._kd_nested:
            level._kd_nested = True
    return True


def _stage_merge(target: TensorDict, source: TensorDict, merges: list[Merge]) -> bool:
    """Record the dicts to merge, and whether nodes are in them.

    Returns `False` if an entry must be checked first.
    """
    desc = target._kd_desc
    if desc is not source._kd_desc or desc.frozen:
        return False
    if not source._kd_nested:
        merges.append((target, source._kd_entries, False))
        return True
    rest: dict[str, Entry] = {}
    for key, value in source._kd_entries.items():
        if type(value) is Tensor:
            rest[key] = value
        elif type(value) is not TensorDict:
            if not isinstance(value, Tensor):
                return False
            rest[key] = value
        else:
            current = target._kd_entries.get(key)
            if type(current) is TensorDict:
                if not _stage_merge(current, value, merges):
                    return False
            elif current is not None or value._kd_desc is not desc or value._kd_nested:
                return False
            else:
                if value is target:  # only that would make a cycle
                    return False
                rest[key] = value
    merges.append((target, rest, True))
    return True


def _stage_dict(target: TensorDict, source: dict[str, Any], merges: list[Merge]) -> bool:
    """Do what `_stage_merge` does for nested dicts of tensors, below containers that are there."""
    desc = target._kd_desc
    if desc.frozen:
        return False
    if all_fit(source, desc):
        merges.append((target, source, False))
        return True
    leaves: dict[str, Any] = {}
    for key, value in source.items():
        if type(value) is not dict:
            leaves[key] = value
            continue
        current = target._kd_entries.get(key) if type(key) is str else None
        if type(current) is not TensorDict or not _stage_dict(current, value, merges):
            return False
    merges.append((target, leaves, False))
    return len(leaves) < len(source) and all_fit(leaves, desc)


def make_dense(
    entries: dict[str, Entry], desc: Descriptor, nested: bool | None = None
) -> TensorDict:
    """Build a `TensorDict` of checked entries, which takes ownership of the dict.

    Args:
        entries: its entries.
        desc: its batch size, device and lock.
        nested: whether an entry may be something other than a tensor; `None`: check it.
    """
    td = object.__new__(TensorDict)
    td._kd_entries = entries
    td._kd_desc = desc
    td._kd_nested = holds_nodes(entries) if nested is None else nested
    return td


def fill(td: Dense, source: object, desc: Descriptor, path: tuple[str, ...] = ()) -> None:
    """Fill a new container with the entries of a mapping, checked and converted."""
    items: dict[str, Any] = source if type(source) is dict else dict(_mapping_of(source))
    td._kd_entries = entries = items.copy()  # other values are replaced below
    td._kd_nested = False
    on_cpu = desc.on_cpu
    rows = desc.size[0] if desc.ndim == 1 and (on_cpu or desc.device is None) else -1
    if (desc.ndim != 1 or len(items) >= MANY) and all_fit(items, desc):
        return
    first: Node | None = None  # with names
    for key, value in items.items():
        if type(value) is not Tensor or type(key) is not str:
            if type(key) is not str:
                fill(td, with_plain_keys(items, path), desc, path)
                return
            if type(value) is dict and len(path) < MAX_DEPTH:
                inner = entries[key] = _nest_mapping(value, desc, (*path, key))
                td._kd_nested = True
                if first is None and inner._kd_desc.named:
                    first = inner
                continue
            entry = entries[key] = as_entry(key, value, desc, path)
            td._kd_nested = td._kd_nested or holds_nodes({key: entry})
            if first is None and not isinstance(entry, Tensor) and entry._kd_desc.named:
                first = entry
            continue
        if rows >= 0:  # else it is not the fast path
            try:
                shape = value.shape  # dynamo catches no `IndexError` of one without dimensions
                if shape and shape[0] == rows and (not on_cpu or value.is_cpu):
                    continue  # the fast path
            except RuntimeError:  # a tensor without a shape
                pass
        entries[key] = as_entry(key, value, desc, path)
    if first is not None and not desc.named:
        take_names(td, first)


def _holds_tensors(source: object) -> bool:
    """Return whether nested dicts hold tensors alone."""
    if type(source) is not dict:
        return False
    for value in source.values():
        if type(value) is not Tensor and not _holds_tensors(value):
            return False
    return True


def _share_more(levels: list[TensorDict], ndim: int, most: int | None) -> None:
    """Give nested levels the dimensions after `ndim` that their entries share, from below."""
    for level in levels[:0:-1]:
        size = None
        entries: list[Any] = [*level._kd_entries.values()]
        for entry in entries:
            shape = entry.shape
            if len(shape) <= ndim or (size is not None and shape[ndim] != size):
                break
            size = shape[ndim]
        else:
            if size is not None:
                shared = common_batch([each.shape for each in entries], most)
                level._kd_desc = describe(shared)


def _undescribed(
    source: object, levels: list[TensorDict], leaves: list[Tensor], depth: int
) -> TensorDict | None:
    """Build a container without descriptor from nested dicts that hold only tensors.

    Returns `None` if they hold anything else. The container and all nested ones are appended to
    `levels`.
    """
    if type(source) is not dict or depth > MAX_DEPTH:
        return None
    td = object.__new__(TensorDict)
    levels.append(td)
    td._kd_entries = entries = source.copy()
    td._kd_nested = False
    for key, value in source.items():
        if type(key) is not str:
            return None
        if type(value) is Tensor:
            leaves.append(value)
            continue
        inner = _undescribed(value, levels, leaves, depth + 1)
        if inner is None:
            return None
        entries[key] = inner
        td._kd_nested = True
    return td


def _mapping_of(source: object) -> Mapping[str, object]:
    if isinstance(source, AbstractContainer):
        return source._kd_entries
    if is_foreign(source):
        return cast("AbstractContainer", registry.foreign_node(source))._kd_entries
    if isinstance(source, Mapping):
        return source
    remedy = "Wrap a single tensor as `{'key': tensor}`."
    raise wrong_type("the source of a container", "a mapping or a container", source, remedy)


def _nest_mapping(source: Mapping[str, object], desc: Descriptor, path: tuple[str, ...]) -> Node:
    # Like `__init__`, but in one frame, so that deep mappings stay within the recursion limit.
    td = object.__new__(TensorDict)
    td._kd_desc = desc = desc._unlocked
    fill(td, source, desc, path)
    return td


def _misspelt(sizes: object) -> InvalidArgument:
    return InvalidArgument(
        f"`batchsize={sizes}` would store an entry; the batch size is `batch_size={sizes}`. Put an "
        "entry of that name into the mapping."
    )


def _merged(source: Mapping[str, object], entries: dict[str, object]) -> dict[str, object]:
    twice = [key for key in entries if key in source]
    if twice:
        raise given_twice(format_key(twice[0]), " (in the source and by keyword)")
    return {**source, **entries}


_MEANT = {
    "bs": "`batch_size=`",
    "batch": "`batch_size=`",
    "batch_dims": "`batch_size=`",
    "shape": "`batch_size=`",
    "size": "`batch_size=`",
    "devices": "`device=`",
    "dtype": "`.to(dtype)` of the container",
    "requires_grad": "`.requires_grad_()` of the container",
    "name": "`names=`",
    "locked": "`lock=`",
}


def _given_both(name: str) -> InvalidArgument:
    """Build the error for a keyword beside a source: a misspelt option, or an entry."""
    meant = f" Did you mean {_MEANT[name]}?" if name in _MEANT else ""
    return InvalidArgument(
        f"`{name}` is not a valid option of the constructor, and entries by keyword cannot be "
        f"combined with a source.{meant} Put an entry of that name into the source."
    )


registry.register("make_dense", make_dense)
registry.register("nest_mapping", _nest_mapping)


class _Swap(GeneralMethods, TensorDict):
    """What `to_module` returns: the tensors that were in the module, and the context.

    It is filled when it is read first: a `with` statement needs no container.
    """

    __slots__ = ("_exchange", "_replaced")

    _exchange: Scope
    _replaced: dict[str, Entry] | None

    @property
    def _kd_entries(self) -> dict[str, Entry]:
        if self._replaced is None:
            made = TensorDict(self._exchange.replaced())
            self._exchange.settle()
            self._replaced, self._kd_nested = made._kd_entries, made._kd_nested
        return self._replaced

    @_kd_entries.setter
    def _kd_entries(self, entries: dict[str, Entry]) -> None:
        self._replaced = entries

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        return registry.make_dense(entries, desc)

    def _kd_shallow(self) -> Self:
        return registry.make_dense(dict(self._kd_entries), self._kd_desc)

    def __enter__(self) -> Self:
        self._exchange.enter()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exchange.leave()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return make_dense(dict(self._kd_entries), self._kd_desc).__reduce_ex__(protocol)


def _swap_of(exchange: Scope) -> Node:
    made = object.__new__(_Swap)
    made._kd_desc, made._kd_nested = describe(()), False
    made._exchange, made._replaced = exchange, None
    return made


registry.register("swap_of", _swap_of)


# Functions that create a `TensorDict` from keywords or from a module.


def make_tensordict(
    source: Mapping[str, object] | None = None,
    batch_size: BatchSize | None = None,
    device: DeviceLike | None = None,
    auto_batch_size: bool = False,
    **entries: object,
) -> TensorDict:
    """Create a `TensorDict` from a mapping, from keywords, or from both.

    Args:
        source: nested mappings of values.
        batch_size: the leading dimensions of every entry.
        device: the device to which every entry is moved.
        auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
        **entries: more values.

    Example:
        >>> import torch
        >>> from kd_core import make_tensordict
        >>> make_tensordict(a=torch.zeros(3, 4), b=torch.ones(3), auto_batch_size=True).batch_size
        torch.Size([3])
    """
    named = entries
    if batch_size is None and auto_batch_size:
        return TensorDict.from_dict({**(source or {}), **named}, None, device, auto_batch_size=True)
    merged = _merged(source, named) if source and named else source or named
    return TensorDict(merged, batch_size, device)


def from_module(
    module: nn.Module,
    as_module: bool = False,
    lock: bool = False,
    use_state_dict: bool = False,
    filter_empty: bool = True,
) -> TensorDictBase:
    """Collect the parameters and buffers of a module: `TensorDict.from_module` as a function.

    Args:
        module: the module; it is not changed.
        as_module: return a `kd_nn.TensorDictParams`, which is an `nn.Module`; needs kd-nn.
        lock: lock the container.
        use_state_dict: take the entries of `module.state_dict()`.
        filter_empty: leave out modules without state.

    Example:
        >>> import torch
        >>> from kd_core import from_module
        >>> sorted(from_module(torch.nn.Linear(2, 3)).keys())
        ['bias', 'weight']
    """
    return TensorDict.from_module(
        module, as_module, lock=lock, use_state_dict=use_state_dict, filter_empty=filter_empty
    )


# Storing what a plan makes, in a container and one level below it: all or none.
#
# What a step writes below `next` was a twentieth of the program "world_model" of the benchmarks,
# as long as its keys were sorted by level on each call. A plan knows them beforehand.


def _traced_assign_levels(
    td: TensorDictBase, entries: dict[str, object], levels: tuple[str, ...]
) -> None:
    """Check and store in one loop: dynamo pays for each line and function that it traces."""
    desc = td._kd_desc
    if type(td) is TensorDict and not desc.frozen:
        own, fits, makes = td._kd_entries, True, False
        checked: dict[str, Any] = entries
        stored: dict[str, Any] = {}
        leaves: dict[str, object] = {}
        below: list[tuple[TensorDict, dict[str, Any]]] = []
        for key, value in checked.items():
            if key not in levels:
                stored[key] = leaves[key] = value
                continue
            level = own.get(key)
            if level is None:
                stored[key] = made = object.__new__(TensorDict)
                made._kd_entries, made._kd_desc, made._kd_nested = value, desc, False
                makes, fits = True, fits and all_fit(value, desc)
            elif type(level) is TensorDict and not level._kd_desc.frozen:
                below.append((level, value))
                fits = fits and all_fit(value, level._kd_desc)
            else:
                fits = False
        if fits and (not leaves or all_fit(leaves, desc)):
            for level, value in below:
                overlay(level, value)
            if makes:
                td._kd_nested = True
            if stored:
                overlay(td, stored)
            return
    td.assign(_by_path(entries, levels))


@traced_as(_traced_assign_levels)
def assign_levels(td: TensorDictBase, entries: dict[str, object], levels: tuple[str, ...]) -> None:
    """Store a value at each key, as `assign` does, some of them below containers that stay.

    Args:
        td: the container that is written.
        entries: values by key.
        levels: the keys whose value is a dict of what is stored below that key.

    Raises:
        ShapeMismatch: if a value does not fit the batch size; nothing is stored then.
        Locked: if the container is locked.

    Example:
        >>> from kd_core import TensorDict
        >>> from kd_core.extending import assign_levels
        >>> td = TensorDict({"a": {"b": 0.0}})
        >>> assign_levels(td, {"a": {"c": 1.0}, "d": 2.0}, ("a",))
        >>> td.to_dict()
        {'a': {'b': tensor(0.), 'c': tensor(1.)}, 'd': tensor(2.)}
    """
    if type(td) is not TensorDict or not _fit(td, entries, levels):
        td.assign(_by_path(entries, levels))
        return
    own, desc = td._kd_entries, td._kd_desc
    checked: dict[str, Any] = entries
    for key, value in checked.items():
        if key not in levels:
            own[key] = value
            continue
        below = own.get(key)
        if not isinstance(below, TensorDict):
            own[key] = make_dense(value, desc, False)
            td._kd_nested = True
        else:
            below._kd_entries.update(value)


def _fit(td: TensorDict, entries: dict[str, Any], levels: tuple[str, ...]) -> bool:
    """Return whether nothing has to be checked any more: locks, keys, shapes, what is there."""
    own, desc = td._kd_entries, td._kd_desc
    if desc.frozen:
        return False
    for key, value in entries.items():
        if key not in levels:
            if type(value) is not Tensor or not leaf_fits(value, desc):
                return False
            if not desc.plain and value.device != desc.device:
                return False
            continue
        level, inner = own.get(key), desc
        if level is not None:
            if type(level) is not TensorDict or level._kd_desc.frozen:
                return False
            inner = level._kd_desc
        if not all_fit(value, inner):
            return False
    return True


def _by_path(entries: dict[str, Any], levels: tuple[str, ...]) -> dict[NestedKey, object]:
    flat: dict[NestedKey, object] = {}
    for key, value in entries.items():
        if key in levels:
            flat.update({(key, name): leaf for name, leaf in value.items()})
        else:
            flat[key] = value
    return flat
