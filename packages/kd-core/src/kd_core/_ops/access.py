"""Reading and writing entries by key."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex, TypeAlias, cast, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kd_core import _registry as registry
from kd_core._errors import (
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyCollision,
    KeyNotFound,
    batch_does_not_fit,
    with_article,
    wrong_type,
)
from kd_core._keys import KeyPath, format_key, is_key, path_of, plain_str, several
from kd_core._leaves.loops import (
    all_fit,
    find_entry,
    has_entry,
    kinds_by_key,
    missing_key,
    refuse_leaf,
    walk_error,
)
from kd_core._leaves.views import (
    ALL_LEAVES,
    LeafItems,
    LeafKeys,
    LeafValues,
    NestedItems,
    NestedKeys,
    NestedValues,
)
from kd_core._leaves.writes import Write, write_all
from kd_core._nodes import as_read, is_any_data, is_data, is_row_data, is_unbatched, tensor_of
from kd_core._ops.description import check_has_keys
from kd_core._protocol import (
    AbstractContainer,
    Composite,
    absent,
    are_alike,
    level_at,
    lowest_level,
    read_as,
    reading,
    remove_entry,
    rows_or_stacked,
    unchanged_on_error,
    writes_at,
)
from kd_core._types import NO_DEFAULT, OR_NONE, NoDefault
from kd_core._validation import Branch, spread_keys

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._nodes import Entry, Node
    from kd_core._protocol import Side
    from kd_core._types import NestedKey

    D = TypeVar("D")
    N = TypeVar("N", bound=AbstractContainer)
    IsLeaf = Callable[[type], bool] | None
    WriteRow: TypeAlias = Callable[[SupportsIndex | slice, object], None]
    W = TypeVar("W", bound=AbstractContainer)


class Access(AbstractContainer):
    """Reading and writing by key."""

    __slots__ = ()

    @overload
    def get(self, key: NestedKey) -> Tensor | None: ...
    @overload
    def get(self, key: NestedKey, default: D) -> Tensor | D: ...
    @overload
    def get(
        self,
        key: NestedKey,
        default: D | None = None,
        *,
        as_list: Literal[False] = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float = 0.0,
        padding_side: Side = "right",
        layout: torch.layout = torch.jagged,
    ) -> Tensor | D | None: ...
    @overload
    def get(
        self, key: NestedKey, default: D | None = None, *, as_list: Literal[True]
    ) -> Tensor | list[Tensor] | D | None: ...
    def get(  # only the overloads have a `*`, which takes a tenth of the call: "get" in benchmarks
        self,
        key: NestedKey,
        default: object = OR_NONE,
        as_list: bool = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_value: float = 0.0,
        padding_side: Side = "right",
        layout: torch.layout = torch.jagged,
    ) -> object:
        """Read the entry at `key`, or `default` where there is none.

        Non-tensor data is returned in its wrapper; `td[key]` returns the value itself. A nested
        container is typed as a tensor too, since a key does not show its kind to a type checker.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            default: what is returned for a missing key, `None` if it is not given; with
                `NO_DEFAULT`, a missing key raises.
            as_list: how an entry of a lazy stack is read, whose shapes may differ among the
                members: as a list. What is not in a lazy stack is returned as it is.
            as_padded_tensor: the same, padded to one shape and stacked.
            as_nested_tensor: the same, as a nested tensor.
            padding_value: the value of the elements that are added.
            padding_side: where they are added: `"left"` or `"right"`.
            layout: the layout of a nested tensor.

        Raises:
            KeyThroughLeaf: if the key goes on below a tensor, and no default is given.
            KeyNotFound: if the key is missing, and the default is `NO_DEFAULT`.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(2)}}, [2])
            >>> td.get(("b", "c"))
            tensor([1., 1.])
            >>> td.get("x") is None
            True
        """
        if type(key) is str:
            found = self._kd_entries.get(key)
            if found is not None or default is OR_NONE:
                return found
            return default if default is not NO_DEFAULT else self._kd_read((key,))  # which raises
        found = None
        if as_list or as_padded_tensor or as_nested_tensor:
            options = padding_value, padding_side, layout
            how = reading(as_list, as_padded_tensor, as_nested_tensor, *options)
            path = path_of(key)
            shown = read_as(self, path, None, how)
            return absent(self, path, default) if shown is None else shown
        if type(key) is tuple and key:
            found = find_entry(self._kd_entries, key)  # type: ignore[arg-type]  # mostly of strings
        if found is None:  # not there, or a tuple that holds tuples
            path = path_of(key)
            found = find_entry(self._kd_entries, path)
            if found is None:
                return absent(self, path, default)
        return found

    @overload
    def set(
        self, key: NestedKey, value: object, inplace: bool = False, *, non_blocking: bool = False
    ) -> Self: ...
    @overload
    def set(
        self, key: NestedKey, *, item: object, inplace: bool = False, non_blocking: bool = False
    ) -> Self: ...
    def set(  # only the overloads have a `*`, as for `get`
        self,
        key: NestedKey,
        value: object = NO_DEFAULT,
        inplace: bool = False,
        non_blocking: bool = False,
        item: object = NO_DEFAULT,
    ) -> Self:
        """Store a value at `key`, and create the nested containers that are missing.

        Args:
            key: a string, or a tuple of strings for a nested entry.
            value: a tensor whose shape starts with the batch size, a (nested) mapping, a container,
                a number or array, or any other object (non-tensor data).
            inplace: write into the storage of an entry that exists, instead of replacing it.
            non_blocking: do not wait for a copy between pinned memory and a GPU.
            item: the value, by the name that it has in tensordict.

        Raises:
            ShapeMismatch: if the value does not fit the batch size.
            Locked: if the container is locked (writing `inplace` into an existing entry passes).

        Example:
            >>> from kd_core import TensorDict
            >>> TensorDict().set(("a", "b"), 1.0)["a", "b"]
            tensor(1.)
        """
        if value is NO_DEFAULT or item is not NO_DEFAULT:
            value = _one_value("set", value, item)
        if inplace:
            path = path_of(key)
            if has_entry(self._kd_entries, path):
                write_all(writes_at(self, path, value), non_blocking)
                return self
        if non_blocking and isinstance(value, Tensor):
            value = value.to(self._kd_desc.device, non_blocking=True)
        if type(key) is str:
            self._kd_put(key, value)
        else:
            self._kd_store(path_of(key), value)
        return self

    def assign(self, entries: Mapping[NestedKey, object]) -> Self:
        """Store a value at each key, replacing what is there. All or nothing.

        What `set` does for one key. Unlike `update`, a container takes the place of the one that
        was there instead of merging into it.

        Args:
            entries: values by (nested) key; no key may be the start of another one.

        Raises:
            ShapeMismatch: if a value does not fit the batch size.
            Locked: if the container is locked.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": {"b": 0.0}, "c": 1.0})
            >>> td.assign({"a": {"d": 2.0}, ("e", "f"): 3.0}).to_dict()
            {'a': {'d': tensor(2.)}, 'c': tensor(1.), 'e': {'f': tensor(3.)}}
        """
        desc = self._kd_desc
        if not desc.frozen and type(entries) is dict and all_fit(entries, desc):
            self._kd_set_leaves(entries)
            return self
        staged = [_stage(self, path_of(key), value) for key, value in entries.items()]
        for level, path, entry in staged:
            if len(path) == 1 and isinstance(entry, Tensor):  # nothing is left to check
                level._kd_set_entry(path[0], entry)
            else:
                level._kd_store(path, entry)
        return self

    def _kd_set_leaves(self, leaves: Mapping[str, Tensor]) -> None:
        """Store checked tensors; locks were checked by the caller."""
        for key, value in leaves.items():
            self._kd_set_entry(key, value)

    @overload
    def set_(self, key: NestedKey, value: object, *, non_blocking: bool = False) -> Self: ...
    @overload
    def set_(self, key: NestedKey, *, item: object, non_blocking: bool = False) -> Self: ...
    def set_(  # only the overloads have a `*`, as for `get`
        self,
        key: NestedKey,
        value: object = NO_DEFAULT,
        non_blocking: bool = False,
        item: object = NO_DEFAULT,
    ) -> Self:
        """Write a value into the storage of the entry at `key`, which must exist.

        Allowed on a locked container.

        Args:
            key: a key that is there.
            value: a value that can be broadcast to the entry.
            non_blocking: do not wait for a copy between pinned memory and a GPU.
            item: the value, by the name that it has in tensordict.

        Raises:
            KeyNotFound: if there is no such entry.
            ShapeMismatch: if the value cannot be broadcast to the entry.
        """
        if value is NO_DEFAULT or item is not NO_DEFAULT:
            value = _one_value("set_", value, item)
        if type(key) is str and self._kd_owns_leaves and not non_blocking:
            entry = self._kd_entries.get(key)
            if type(entry) is Tensor and type(value) is Tensor:
                try:  # comparing the shapes first would cost half of the copy
                    entry.copy_(value)
                except RuntimeError:
                    pass  # the slow path finds what is wrong
                else:
                    return self
        write_all(writes_at(self, path_of(key), value), non_blocking)
        return self

    def setdefault(self, key: NestedKey, default: object, inplace: bool = False) -> Tensor:
        """Return the entry at `key` as `get` does, after storing `default` if it is missing.

        `inplace` is that of `set`: an entry that is missing is stored in any case.

        Raises:
            InvalidArgument: if the entry is missing and the default is `NO_DEFAULT`.
        """
        path = path_of(key)
        entries = kinds_by_key(self._kd_entries) if len(path) > 1 else self._kd_entries
        if find_entry(entries, path) is None:
            refuse_leaf(entries, path)  # of a stack it may be one that cannot be read
            if default is NO_DEFAULT:
                raise InvalidArgument(
                    f"key {format_key(path)} not found, and `NO_DEFAULT` cannot be stored. Pass "
                    "the value that `setdefault` is to store."
                )
            self._kd_store(path, default)
        return as_read(self._kd_read(path))

    def pop(self, key: NestedKey, default: object = NO_DEFAULT) -> Tensor:
        """Remove the entry at `key` and return it as `get` does: non-tensor data in its wrapper.

        Raises:
            KeyNotFound: if it is missing and no default was given.
            Locked: if the container is locked.
        """
        if type(key) is str and not self._kd_desc.frozen:
            entry = self._kd_entries.get(key)
            if entry is not None:
                self._kd_del_entry(key)
                return as_read(entry)
        path = path_of(key)
        if not isinstance(default, NoDefault) and find_entry(self._kd_entries, path) is None:
            return as_read(default)
        entry = self._kd_read(path)
        _remove(self, path)
        return as_read(entry)

    def popitem(self) -> tuple[str, Tensor]:
        """Remove the entry that was added last; return its key and the entry."""
        self._kd_check_unlocked("remove an entry")
        keys = list(self._kd_entries)
        if not keys:
            raise KeyNotFound("`popitem` found no entry: the container is empty.")
        entry = self._kd_read((keys[-1],))
        _remove(self, (keys[-1],))
        return keys[-1], as_read(entry)

    def del_(self, key: NestedKey) -> Self:
        """Remove the entry at `key`; from a lazy stack, also one that only some members have.

        Raises:
            KeyNotFound: if it is missing.
            Locked: if the container is locked.
        """
        remove_entry(self, path_of(key))
        return self

    def nested(self, key: NestedKey, kind: type[N]) -> N:
        """Return the nested container at a key, typed as the kind that it is.

        `td[key]` returns it too, but a type checker takes what it returns for a tensor.

        Args:
            key: the key of the nested container.
            kind: the class that it has to be of, such as `TensorDict` or a tensor class.

        Raises:
            KeyNotFound: if it is missing.
            InvalidArgument: if the entry is of another class.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"next": {"obs": 1.0, "done": False}})
            >>> td.nested("next", TensorDict).select("obs")["obs"]
            tensor(1.)
        """
        entry: object = self._kd_entries.get(key) if type(key) is str else None
        if entry is None:
            entry = self._kd_read(path_of(key))
        if not isinstance(entry, kind):
            raise wrong_type(
                f"entry {format_key(path_of(key))}", with_article(kind.__name__), entry
            )
        return entry

    def set_non_tensor(self, key: NestedKey, value: object) -> Self:
        """Store a value as non-tensor data, one for the whole batch, even if it could be a tensor.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict(batch_size=[3]).set_non_tensor("sizes", [1, 2])
            >>> td["sizes"], td[0]["sizes"]
            ([1, 2], [1, 2])
        """
        if self._kd_desc.frozen:  # before the key is looked at
            self._kd_check_unlocked(f"set {format_key(key)}")
        if is_data(value):  # a wrapper
            self._kd_store(path_of(key), value)
        else:
            self._kd_store(path_of(key), registry.wrap_data(value, self._kd_desc.unlocked()))
        return self

    def get_non_tensor(self, key: NestedKey, default: object = NO_DEFAULT) -> object:
        """Return the value of non-tensor data; of a tensor, the tensor itself.

        Raises:
            KeyNotFound: if it is missing and no default was given.
        """
        path = path_of(key)
        if not isinstance(default, NoDefault) and find_entry(self._kd_entries, path) is None:
            return default
        entry = self._kd_read(path)
        return entry if isinstance(entry, Tensor) else entry._kd_item()

    @overload
    def keys(
        self,
        include_nested: Literal[False] = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf = None,
        *,
        sort: bool = False,
    ) -> KeysView[str]: ...
    @overload
    def keys(
        self,
        include_nested: bool,
        leaves_only: bool = False,
        is_leaf: IsLeaf = None,
        *,
        sort: bool = False,
    ) -> KeysView[NestedKey]: ...
    def keys(  # only the overloads have a `*`, as for `get`
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf = None,
        sort: bool = False,
    ) -> KeysView[str] | KeysView[NestedKey]:
        """Return a live view of the keys.

        Args:
            include_nested: also the keys of nested containers, as tuples.
            leaves_only: only tensors: neither nested containers nor non-tensor data.
            is_leaf: returns for the type of an entry that is not a tensor whether it counts as a
                leaf; nested containers that do are not entered.
            sort: in alphabetical order instead of insertion order; those of one level alone come
                in a list, and are not live.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"b": {"c": 1.0}, "a": 0.0})
            >>> list(td.keys(True, True))
            [('b', 'c'), 'a']
            >>> ("b", "c") in td.keys(True)
            True
        """
        if include_nested or leaves_only or sort:
            if include_nested and leaves_only and is_leaf is None and not sort:
                return LeafKeys(self._kd_entries, ALL_LEAVES)
            if sort and not (include_nested or leaves_only):
                return cast("KeysView[str]", sorted(self._kd_entries))
            return NestedKeys(self._kd_entries, (include_nested, leaves_only, is_leaf, sort))
        return self._kd_entries.keys()

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf = None,
        *,
        sort: bool = False,
    ) -> ValuesView[Tensor]:
        """Return a live view of the entries; arguments as for `keys`."""
        if include_nested or leaves_only or sort:
            if include_nested and leaves_only and is_leaf is None and not sort:
                return LeafValues(self._kd_entries, ALL_LEAVES)
            if sort and not (include_nested or leaves_only):
                values = tuple([value for _, value in sorted(self._kd_entries.items(), key=_key)])
                return cast("ValuesView[Tensor]", values)
            return NestedValues(self._kd_entries, (include_nested, leaves_only, is_leaf, sort))
        entries: Mapping[str, Any] = self._kd_entries
        return entries.values()  # typed as `td[key]` is

    @overload
    def items(
        self,
        include_nested: Literal[False] = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf = None,
        *,
        sort: bool = False,
    ) -> ItemsView[str, Tensor]: ...
    @overload
    def items(
        self,
        include_nested: bool,
        leaves_only: bool = False,
        is_leaf: IsLeaf = None,
        *,
        sort: bool = False,
    ) -> ItemsView[NestedKey, Tensor]: ...
    def items(  # only the overloads have a `*`, as for `get`
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf = None,
        sort: bool = False,
    ) -> ItemsView[str, Tensor] | ItemsView[NestedKey, Tensor]:
        """Return a live view of keys and entries; arguments as for `keys`."""
        if include_nested or leaves_only or sort:
            if include_nested and leaves_only and is_leaf is None and not sort:
                return LeafItems(self._kd_entries, ALL_LEAVES)
            if sort and not (include_nested or leaves_only):
                items = sorted(self._kd_entries.items(), key=_key)
                return cast("ItemsView[str, Tensor]", items)
            return NestedItems(self._kd_entries, (include_nested, leaves_only, is_leaf, sort))
        entries: Mapping[str, Any] = self._kd_entries
        return entries.items()  # typed as `td[key]` is

    def __contains__(self, key: object) -> bool:
        if type(key) is str:
            return key in self._kd_entries
        if not is_key(key):
            raise InvalidKey(
                f"`in` asks for keys, expected a string or a tuple of strings, got {key!r} of type "
                f"`{type(key).__name__}`. To find a tensor, compare it with each of `values()`."
            )
        return has_entry(self._kd_entries, path_of(key))

    def __len__(self) -> int:
        desc = self._kd_desc
        return desc.batch[0] if desc.ndim else 0

    def __bool__(self) -> bool:
        raise InvalidValue(
            "the truth value of a container is ambiguous: use `is_empty()` for its keys, `len(td)` "
            "for its batch, or `.any()` / `.all()` for its values."
        )

    __hash__ = None  # type: ignore[assignment]  # mutable, like a dict


def _key(item: tuple[str, object]) -> str:
    return item[0]


def _one_value(method: str, value: object, item: object) -> object:
    """Return the value that `set` or `set_` is given under one of its two names."""
    if (value is NO_DEFAULT) == (item is NO_DEFAULT):
        got = "neither" if item is NO_DEFAULT else "both"
        raise InvalidArgument(f"`{method}` expected one of `value` and `item`, got {got}.")
    return item if value is NO_DEFAULT else value


def _stage(
    container: AbstractContainer, path: tuple[str, ...], value: object
) -> tuple[AbstractContainer, tuple[str, ...], object]:
    """Check a value for a path, and raise whatever storing it would raise.

    Returns the lowest container that is there, the rest of the path, and the entry.
    """
    level, depth = lowest_level(container, path)
    if level._kd_desc.frozen:
        level._kd_check_unlocked(f"set {format_key(path)}")
    return level, path[depth:], level._kd_as_entry(path[-1], value, path[:-1])


def _remove(container: AbstractContainer, path: tuple[str, ...]) -> None:
    level = level_at(container, path[:-1])
    level._kd_check_unlocked(f"remove {format_key(path)}")
    level._kd_del_entry(path[-1])


# Containers as nested dicts and lists of plain values, and lists that write to the rows.


class LinkedList(list[object]):
    """The rows of a container, or the values of rows; an item that is assigned is written there.

    Items are read as they were when the list was made. What changes the length of the list
    (`append`, `pop`) changes the list alone.

    Example:
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"word": ["to", "be"]}, [2])
        >>> td["word"][0] = "or"
        >>> td["word"]
        ['or', 'be']
    """

    __slots__ = ("_write",)

    def __init__(self, values: Iterable[object] = (), write: WriteRow | None = None):
        # What writes is optional: `dataclasses.asdict` and others copy lists by their type.
        super().__init__(values)
        self._write = write

    def __setitem__(self, index: SupportsIndex | slice, value: object) -> None:
        if self._write is not None:
            self._write(index, value)
        super().__setitem__(index, value)  # type: ignore[index]  # as a list takes it

    def __reduce__(self) -> tuple[object, ...]:
        return list, (list(self),)


def with_own_data(copy: W) -> W:
    """Return a shallow copy whose data other than tensors is not written with that of the other."""
    if not copy._kd_owns_leaves and isinstance(copy, Composite):
        for member in copy._members:
            with_own_data(member)
    elif copy._kd_nested:  # a fast path ("clone(False)" in the benchmarks)
        for key, value in copy._kd_entries.items():
            if type(value) is Tensor:
                continue
            if isinstance(value, AbstractContainer):
                if value._kd_nested:
                    with_own_data(value)
            elif is_data(value) and not is_compiling():
                copy._kd_set_entry(key, value._kd_rebuild(iter(())))
    return copy


def dict_of(
    td: AbstractContainer,
    retain_none: bool,
    convert_tensors: bool | Literal["numpy"],
    tolist_first: bool,
    unset: bool = True,
) -> dict[str, object]:
    """Return a container as nested dicts.

    Args:
        td: the container.
        retain_none: keep entries whose value is `None`.
        convert_tensors: return tensors as numbers or nested lists of numbers, or as arrays.
        tolist_first: return a nested container that has a batch as a list of its rows.
        unset: list fields without an entry as `None`.
    """
    plain: dict[str, object] = {}
    for key, value in td._kd_entries.items():
        if type(value) is Tensor:
            plain[key] = _plain_leaf(value, convert_tensors) if convert_tensors else value
        elif isinstance(value, AbstractContainer):
            if tolist_first and value._kd_desc.batch:
                plain[key] = list_of(value, True, convert_tensors, tolist_first)
            else:
                plain[key] = dict_of(value, retain_none, convert_tensors, tolist_first, unset)
        elif not is_data(value):
            leaf = tensor_of(value)
            if leaf is None or not convert_tensors:
                plain[key] = value
            else:
                plain[key] = _plain_leaf(leaf, convert_tensors)
        elif tolist_first and td._kd_desc.batch and not is_row_data(value):
            plain[key] = value.tolist()
        else:
            item = plain_item(value)
            if retain_none or item is not None:
                plain[key] = item
    if retain_none and unset:
        for key in td._kd_unset():
            plain[key] = None
    return plain


def plain_item(data: Node) -> object:
    """Return what an entry holds that is not a tensor, values of rows as a list of its own."""
    return _unlinked(data._kd_item())


def _unlinked(value: object) -> object:
    return list(map(_unlinked, value)) if isinstance(value, LinkedList) else value


def _plain_leaf(leaf: Tensor, convert: bool | Literal["numpy"]) -> object:
    return leaf.cpu().numpy() if convert == "numpy" else leaf.tolist()


def list_of(
    td: AbstractContainer,
    convert_nodes: bool,
    convert_tensors: bool | Literal["numpy"],
    tolist_first: bool,
) -> object:
    """Return the rows of a container as nested lists of the shape of its batch.

    Args:
        td: the container.
        convert_nodes: return a row as a dict, else as a container.
        convert_tensors: return tensors as numbers or nested lists of numbers.
        tolist_first: return a nested container that has a batch as a list of its rows.
    """
    if not td._kd_desc.batch:
        options = True, convert_tensors, tolist_first, False
        return dict_of(td, *options) if convert_nodes else td
    rows = td._kd_engine.unbind(td, 0)
    return [list_of(row, convert_nodes, convert_tensors, tolist_first) for row in rows]


# What an update does to each entry: checked and noted first, then done.
#
# The functions append to a stage: writes, and calls that store entries, which the caller makes when
# everything is checked. New names for keys, and entries that move between levels, stand here, too.

Staged: TypeAlias = "list[Callable[[], None] | list[Write]]"
LeafTest: TypeAlias = Callable[[type], bool]
Only: TypeAlias = "dict[str, Only | None]"
"""The keys that alone are updated, by level; `None` for all that is below a key."""
_LEVELS: Final = (AbstractContainer, Mapping)
_TENSORS: Final = (AbstractContainer, Tensor)


class Update:
    """How an update treats each entry."""

    __slots__ = ("clone", "inplace", "is_leaf", "non_blocking", "only", "resizes")

    def __init__(
        self,
        clone: bool = False,
        inplace: bool = False,
        only: Only | None = None,
        non_blocking: bool = False,
        is_leaf: LeafTest | None = None,
        resizes: bool = False,
    ) -> None:
        self.clone, self.inplace, self.only = clone, inplace, only
        self.non_blocking, self.is_leaf, self.resizes = non_blocking, is_leaf, resizes

    def below(self, only: Only | None) -> Update:
        """Return the same rules for a nested container."""
        if only is self.only:
            return self
        flags = (self.non_blocking, self.is_leaf, self.resizes)
        return Update(self.clone, self.inplace, only, *flags)

    def merges(self, value: object) -> bool:
        """Return whether a container or mapping is merged into the container that is there."""
        return self.is_leaf is None or not self.is_leaf(type(value))


def source_items(source: object, method: str) -> Mapping[str, object]:
    if isinstance(source, AbstractContainer):
        return source._kd_entries
    if not isinstance(source, Mapping):
        raise wrong_type(f"the source of `{method}`", "a mapping or a container", source)
    for key in source:
        if type(key) is not str:
            return spread_keys(source)
    return source


def sources_of(source: object, entries: dict[str, object]) -> list[object]:
    """Return the sources of an update: the one that is given, and the entries by keyword.

    The keyword `ignore_lock` of tensordict is not an entry and does nothing; `None` is not a
    source.
    """
    entries.pop("ignore_lock", None)
    sources = [] if source is None or isinstance(source, NoDefault) else [source]
    return [*sources, entries] if entries else sources


def keys_to_take(keys: Iterable[NestedKey]) -> Only:
    """Return the keys that alone are updated, by level."""
    only: Only = {}
    for key in several(keys, "`keys_to_update`"):
        *heads, last = path_of(key)
        level = only
        for part in heads:
            below = level.setdefault(part, {})
            if below is None:  # all below that part is taken
                break
            level = below
        else:
            level[last] = None
    return only


def _narrowed(only: Only | None, key: str, value: object) -> tuple[bool, Only | None]:
    """Return whether an update takes the value at `key`, and which keys below it."""
    if only is None:
        return True, None
    if key not in only:
        return False, None
    below = only[key]
    return below is None or isinstance(value, _LEVELS), below  # nothing is below a tensor


def narrowed_items(items: Mapping[str, object], only: Only) -> dict[str, object]:
    """Return the part of a source that some keys name, nested levels as plain dicts."""
    found: dict[str, object] = {}
    for key, value in items.items():
        taken, below = _narrowed(only, key, value)
        if taken and below is not None:
            found[key] = narrowed_items(source_items(value, "update_at_"), below)
        elif taken:
            found[key] = value
    return found


def merge(td: AbstractContainer, sources: Iterable[object], how: Update) -> None:
    """Store the entries of some sources, merging nested ones. All or nothing."""
    stage: Staged = []
    in_stack = [stage_merge(td, each, (), how, stage) for each in sources]
    if any(in_stack):
        with unchanged_on_error(td):
            _commit_all(stage, how.non_blocking)
    else:
        _commit_all(stage, how.non_blocking)


def stage_merge(
    level: AbstractContainer, source: object, path: KeyPath, how: Update, stage: Staged
) -> bool:
    """Stage an update from a source; a stack takes the entries of one like it member by member.

    One that holds a member twice takes them as any other source, which compares the rows.

    Returns:
        Whether a stack is among the levels, which splits an entry when it is stored.
    """
    if (
        isinstance(level, Composite)
        and isinstance(source, Composite)
        and are_alike(level, source)
        and len(set(map(id, level._members))) == len(level._members)
    ):
        for member, part in zip(level._members, source._members, strict=True):
            stage_merge(member, part, path, how, stage)
        return True
    return _stage_update(level, _entries_for(level, source, "update"), path, how, stage)


def _entries_for(
    level: AbstractContainer, source: object, method: str
) -> Iterable[tuple[str, object]]:
    """Iterate over the entries of a source; a stack takes the rows of one like it as they are."""
    items = source_items(source, method)
    if isinstance(level, Composite) and isinstance(source, Composite) and are_alike(level, source):
        return [(key, rows_or_stacked(source, key)) for key in items]
    return items.items()


def _stage_update(
    level: AbstractContainer,
    items: Iterable[tuple[str, object]],
    path: KeyPath,
    how: Update,
    stage: Staged,
) -> bool:
    """Check each entry and append what to do to the stage; nothing is changed here."""
    kinds = kinds_by_key(level._kd_entries)
    in_stack = isinstance(level, Composite)
    may_be_locked = in_stack or level._kd_desc.frozen
    for key, value in items:
        taken, only = _narrowed(how.only, key, value)
        if not taken:
            continue
        current = kinds.get(key)
        # Most values are tensors, and to ask whether one is a `Mapping` is slow.
        merged = type(value) is not Tensor and isinstance(value, _LEVELS) and how.merges(value)
        if (
            (merged and how.resizes and only is None)
            and (isinstance(value, AbstractContainer) and isinstance(current, AbstractContainer))
            and value._kd_desc.batch != current._kd_desc.batch
        ):
            check_has_keys(current, value, (*path, key))
            value, merged = value._kd_shallow(), False
        if merged and isinstance(current, AbstractContainer):
            in_stack |= stage_merge(current, value, (*path, key), how.below(only), stage)
            continue
        if type(value) is Branch and key in kinds:  # as `set` does; a mapping replaces a leaf
            raise walk_error((*path, key, next(iter(value))), len(path) + 1, current)
        if how.inplace and value is not None and _can_be_written(current, value):
            stage.append(level._kd_writes(key, value, (*path, key)))
            continue
        if may_be_locked:
            level._kd_check_unlocked(f"update {format_key((*path, key))}")
        if how.non_blocking and isinstance(value, Tensor):
            value = value.to(level._kd_desc.device, non_blocking=True)
        if value is None and level._kd_is_cleared(key):
            stage.append(_staged_removal(level, key))
            continue
        entry = level._kd_as_entry(key, value, path)
        if how.clone:
            entry = entry.clone() if isinstance(entry, Tensor) else entry._kd_map_each(Tensor.clone)
        stage.append(_staged_set(level, key, entry))
    return in_stack


def _commit_all(stage: Staged, non_blocking: bool) -> None:
    """Write what was staged, all or none; then store the rest, which does not fail."""
    writes = [each for staged in stage if isinstance(staged, list) for each in staged]
    write_all(writes, non_blocking)
    for store in stage:
        if not isinstance(store, list):
            store()


def _staged_set(level: AbstractContainer, key: str, entry: Entry) -> Callable[[], None]:
    return lambda: level._kd_set_entry(key, entry)


def _staged_removal(level: AbstractContainer, key: str) -> Callable[[], None]:
    def remove() -> None:
        if key in level._kd_entries:
            level._kd_del_entry(key)

    return remove


def _can_be_written(current: Entry | None, value: object) -> bool:
    """Return whether an entry is a tensor, or data that a value can be written to."""
    if current is None or isinstance(current, AbstractContainer):
        return False
    if isinstance(current, Tensor) or is_row_data(current) or is_unbatched(current):
        return True
    if not is_data(current) or isinstance(value, _TENSORS):
        return False
    always, of_batch = current._kd_state()
    return always or not of_batch or current._kd_desc.ndim > 0


def _is_same_data(current: Entry, value: object) -> bool:
    """Return whether an entry is non-tensor data equal to the value: nothing is to be written."""
    if isinstance(current, _TENSORS) or isinstance(value, _TENSORS):
        return False
    return is_data(current) and current._agrees(value)


def add_writes(
    writes: list[Write],
    level: AbstractContainer,
    source: object,
    only: Only | None = None,
    path: KeyPath = (),
) -> None:
    """Append the writes of a source into entries that exist, of some keys alone."""
    kinds = kinds_by_key(level._kd_entries)
    for key, value in _entries_for(level, source, "update_"):
        taken, below = _narrowed(only, key, value)
        if not taken:
            continue
        if key not in kinds:
            level._kd_check_key(key)
            entries = level._kd_entries
            raise missing_key((*path, key), len(path), entries, entries, path)
        current = kinds[key]
        if isinstance(current, AbstractContainer) and isinstance(value, _LEVELS):
            add_writes(writes, current, value, below, (*path, key))
        elif not _is_same_data(current, value):
            writes += level._kd_writes(key, value, (*path, key))


KeyFn: TypeAlias = Callable[[str], str]
"""A function from a key of one level to its new name."""


def renamed(td: W, name: KeyFn, path: tuple[str, ...] = ()) -> W:
    """Return a container whose keys have new names at every level; tensors are shared.

    Raises:
        KeyCollision: if two keys of a level get the same name.
        InvalidArgument: if a name is not a string.
    """
    if isinstance(td, Composite):
        return td._by_member(lambda member: renamed(member, name, path))
    entries: dict[str, Entry] = {}
    for key, value in td._kd_entries.items():
        new: object = name(key)
        if not isinstance(new, str):
            raise wrong_type(f"the new name of {format_key((*path, key))}", "a string", new)
        new = plain_str(new)
        if new in entries:
            raise KeyCollision(
                f"two keys would be renamed to {format_key((*path, new))}. Return a name of its "
                "own for each key."
            )
        if isinstance(value, AbstractContainer):
            value = renamed(value, name, (*path, key))
        entries[new] = value
    return td._kd_like(entries, td._kd_desc.unlocked())


def store_moved(td: AbstractContainer, path: tuple[str, ...], entry: Entry) -> None:
    """Store an entry that was removed elsewhere in a container.

    Raises:
        ShapeMismatch: if it does not fit the batch size of its new level; the value of one row does
            not become one of a batch.
    """
    level, _ = lowest_level(td, path)
    if level._kd_desc.ndim and not isinstance(entry, (Tensor, AbstractContainer)):
        batch = entry._kd_desc.batch
        if not batch and is_any_data(entry) and not entry._of_batch:
            raise batch_does_not_fit(format_key(path), level._kd_desc.batch, batch)
    td._kd_store(path, entry)
