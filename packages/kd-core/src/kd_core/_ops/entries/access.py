"""Reading and writing entries by key."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Literal, cast, overload

import torch
from torch import Tensor

from kd_core._errors import (
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyNotFound,
    with_article,
    wrong_type,
)
from kd_core._keys import format_key, is_key, path_of
from kd_core._leaves.loops import all_fit, find_entry, has_entry, kinds_by_key, refuse_leaf
from kd_core._leaves.views import (
    ALL_LEAVES,
    LeafItems,
    LeafKeys,
    LeafValues,
    NestedItems,
    NestedKeys,
    NestedValues,
)
from kd_core._leaves.writes import write_all
from kd_core._nodes import registry
from kd_core._nodes.entry import is_data
from kd_core._protocol.composite import absent, read_as, reading
from kd_core._protocol.primitives import (
    AbstractContainer,
    check_has,
    level_at,
    lowest_level,
    writes_at,
)
from kd_core._types import NO_DEFAULT, NoDefault

if TYPE_CHECKING:
    from typing import Self, TypeVar

    from kd_core._nodes.entry import Entry
    from kd_core._protocol.composite import Side
    from kd_core._types import NestedKey

    D = TypeVar("D")
    N = TypeVar("N", bound=AbstractContainer)
    IsLeaf = Callable[[type], bool] | None


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
        default: object = NO_DEFAULT,
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
            default: what is returned for a missing key, `None` if it is not given.
            as_list: how an entry of a lazy stack is read, whose shapes may differ among the
                members: as a list. What is not in a lazy stack is returned as it is.
            as_padded_tensor: the same, padded to one shape and stacked.
            as_nested_tensor: the same, as a nested tensor.
            padding_value: the value of the elements that are added.
            padding_side: where they are added: `"left"` or `"right"`.
            layout: the layout of a nested tensor.

        Raises:
            KeyThroughLeaf: if the key goes on below a tensor, and no default is given.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.ones(2)}}, [2])
            >>> td.get(("b", "c"))
            tensor([1., 1.])
            >>> td.get("x") is None
            True
        """
        if key.__class__ is str:
            return self._kd_entries.get(key, None if default is NO_DEFAULT else default)
        found: Entry | None = None
        if as_list or as_padded_tensor or as_nested_tensor:
            options = padding_value, padding_side, layout
            how = reading(as_list, as_padded_tensor, as_nested_tensor, *options)
            path = path_of(key)
            shown = read_as(self, path, None, how)
            return absent(self, path, default) if shown is None else shown
        if key.__class__ is tuple and key:
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
        if key.__class__ is str:
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
        if key.__class__ is str and self._kd_owns_leaves and not non_blocking:
            entry = self._kd_entries.get(key)
            if entry.__class__ is Tensor and value.__class__ is Tensor:
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
        """
        path = path_of(key)
        entries = kinds_by_key(self._kd_entries) if len(path) > 1 else self._kd_entries
        if find_entry(entries, path) is None:
            refuse_leaf(entries, path)  # of a stack it may be one that cannot be read
            self._kd_store(path, default)
        return cast(Tensor, self._kd_read(path))

    def pop(self, key: NestedKey, default: object = NO_DEFAULT) -> Tensor:
        """Remove the entry at `key` and return it as `get` does: non-tensor data in its wrapper.

        Raises:
            KeyNotFound: if it is missing and no default was given.
            Locked: if the container is locked.
        """
        if key.__class__ is str and not self._kd_desc.frozen:
            entry = self._kd_entries.get(key)
            if entry is not None:
                self._kd_del_entry(key)
                return cast(Tensor, entry)
        path = path_of(key)
        if not isinstance(default, NoDefault) and find_entry(self._kd_entries, path) is None:
            return cast(Tensor, default)
        entry = self._kd_read(path)
        _remove(self, path)
        return cast(Tensor, entry)

    def popitem(self) -> tuple[str, Tensor]:
        """Remove the entry that was added last; return its key and the entry."""
        keys = list(self._kd_entries)
        if not keys:
            raise KeyNotFound("`popitem` found no entry: the container is empty.")
        entry = self._kd_read((keys[-1],))
        _remove(self, (keys[-1],))
        return keys[-1], cast(Tensor, entry)

    def del_(self, key: NestedKey) -> Self:
        """Remove the entry at `key`.

        Raises:
            KeyNotFound: if it is missing.
            Locked: if the container is locked.
        """
        path = path_of(key)
        if self._kd_desc.frozen:
            self._kd_check_unlocked(f"remove {format_key(path)}")
        check_has(self, path)
        _remove(self, path)
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
        entry: object = self._kd_read(path_of(key))
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
        return self._kd_entries.values()  # type: ignore[return-value]  # typed as `td[key]` is

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
        return self._kd_entries.items()  # type: ignore[return-value]  # typed as `td[key]` is

    def __contains__(self, key: object) -> bool:
        if key.__class__ is str:
            return key in self._kd_entries
        if not is_key(key):
            raise InvalidKey(
                f"`in` asks for keys, expected a string or a tuple of strings, got {key!r} of type "
                f"`{type(key).__name__}`. To find a tensor, compare it with each of `values()`."
            )
        return has_entry(self._kd_entries, path_of(cast("NestedKey", key)))

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
