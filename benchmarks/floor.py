"""The floor: the shortest correct code one can write for a row whose goal is missed.

`Floor` is a container that keeps the promises that a row relies on, and no other: keys are strings,
shapes start with the batch size, results have their batch size, a locked container keeps its keys,
and a write in place changes all leaves or none. `with` takes a lock back: what can stand in `with`
is traced in another way, so rows that compile rely on it. What it does not know, it refuses. It has
no lazy stacks, no data but tensors, no names, no subclasses, no tracing, and its errors say
nothing. `floor_store` adds what rows of io need.

A row with a floor has the goal of 1.1 times its floor. Knows torch; must not know kd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

Leaf = Callable[[Tensor], Tensor]


class View:
    """A live view of all leaves: of keys (part 0), of leaves (part 1), or of both (`None`)."""

    __slots__ = ("floor", "part")

    def __init__(self, floor: Floor, part: int | None) -> None:
        self.floor, self.part = floor, part

    def __len__(self) -> int:
        return self.floor._count()

    def __iter__(self) -> Iterator[object]:
        part = self.part
        return self.floor._walk() if part is None else iter([i[part] for i in self.floor._walk()])


class Floor:
    """A dict of tensors and of other floors, all of one batch size.

    `locked` is twice the number of locked floors that enclose it, and one more if it is locked
    itself: a floor inside a locked one cannot be unlocked alone. `with` restores `was_locked`.
    """

    __slots__ = ("batch_size", "device", "entries", "locked", "was_locked")

    def __init__(
        self,
        source: Mapping[str, object] | None = None,
        batch_size: object = (),
        device: object = None,
        lock: bool = False,
        *,
        names: object = None,
        **entries: object,
    ) -> None:
        # containers.md, "Containers": the constructor has `names` and `lock`; a size is a number
        # of rows, so it is not negative.
        self.batch_size = batch = tuple(batch_size)
        for size in batch:
            if type(size) is not int or size < 0:
                raise TypeError
        self.device = None if device is None else torch.device(device)
        self.locked = 0
        self.entries: dict[str, Tensor | Floor] = {}
        if entries:
            if source and not source.keys().isdisjoint(entries):
                raise KeyError
            source = {**source, **entries} if source else entries
        for key, value in source.items() if source else ():
            self.entries[key] = self._checked(key, value)
        if names is not None:
            raise TypeError
        if lock:
            self.lock_()

    @classmethod
    def from_dict(cls, source: Mapping[str, object], *, auto_batch_size: bool) -> Floor:
        return cls(source, _common(source, None) or () if auto_batch_size else ())

    def _checked(self, key: str, value: object) -> Tensor | Floor:
        if type(key) is not str:
            raise TypeError
        if type(value) is dict:
            return Floor(value, self.batch_size, self.device)
        shape = value.shape if isinstance(value, Tensor) else value.batch_size
        if shape[: len(self.batch_size)] != self.batch_size:
            raise ValueError
        if self.device is not None and value.device != self.device:
            if type(value) is not Tensor:
                raise ValueError
            return value.to(self.device)
        return value

    def _kd_like(self, entries: dict[str, Tensor | Floor], batch: tuple[int, ...]) -> Floor:
        new = object.__new__(Floor)
        new.entries, new.batch_size, new.device, new.locked = entries, batch, self.device, 0
        return new

    def _map(self, fn: Leaf, batch: tuple[int, ...]) -> Floor:
        return self._kd_like(
            {
                key: fn(value) if type(value) is Tensor else value._map(fn, batch)
                for key, value in self.entries.items()
            },
            batch,
        )

    def _zip(self, other: Floor, fn: Callable[[Tensor, Tensor], Tensor]) -> Floor:
        if self.entries.keys() != other.entries.keys() or self.batch_size != other.batch_size:
            raise ValueError
        theirs = other.entries
        return self._kd_like(
            {
                key: fn(value, theirs[key])
                if type(value) is Tensor
                else value._zip(theirs[key], fn)
                for key, value in self.entries.items()
            },
            self.batch_size,
        )

    # access

    def get(
        self,
        key: object,
        default: object = None,
        as_list: bool = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
    ) -> object:
        # containers.md, "Containers": how `get` reads an entry of a lazy stack.
        if type(key) is str:
            return self.entries.get(key, default)
        if as_list or as_padded_tensor or as_nested_tensor:
            raise TypeError
        found: object = self
        for part in key:
            if not isinstance(found, Floor) or part not in found.entries:
                return default
            found = found.entries[part]
        return found

    def __getitem__(self, index: object) -> object:
        if type(index) is str:
            return self.entries[index]
        if type(index) is tuple and type(index[0]) is str:
            found: object = self
            for part in index:
                found = found.entries[part]
            return found
        return self._map(lambda leaf: leaf[index], self._batch_at(index))

    def _batch_at(self, index: object) -> tuple[int, ...]:
        batch = self.batch_size
        if type(index) is int and -batch[0] <= index < batch[0]:
            return batch[1:]
        if type(index) is slice:
            return (len(range(*index.indices(batch[0]))), *batch[1:])
        if isinstance(index, Tensor) and index.dtype is torch.int64:
            return (*index.shape, *batch[1:])
        raise IndexError

    def __contains__(self, key: str) -> bool:
        if type(key) is not str:
            raise TypeError
        return key in self.entries

    def __setitem__(self, index: object, value: object) -> None:
        if type(index) is str:
            self.set(index, value)
        else:
            mine, theirs = self._pairs(value)
            self._copied([leaf[index] for leaf in mine], theirs)

    def set(self, key: object, value: object) -> Floor:
        if self.locked:
            raise RuntimeError
        if type(key) is str:
            self.entries[key] = self._checked(key, value)
        else:
            first, last = key
            self.entries[first].set(last, value)
        return self

    def update(self, source: Mapping[str, object]) -> Floor:
        if self.locked:
            raise RuntimeError
        self.entries.update({key: self._checked(key, value) for key, value in source.items()})
        return self

    def pop(self, key: str) -> Tensor | Floor:
        if self.locked:
            raise RuntimeError
        return self.entries.pop(key)

    def _walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[object, Tensor]]:
        for key, value in self.entries.items():
            if type(value) is Floor:
                yield from value._walk((*path, key))
            else:
                yield (*path, key) if path else key, value

    def _count(self) -> int:
        count = len(self.entries)
        for value in self.entries.values():
            if type(value) is Floor:
                count += value._count() - 1
        return count

    def keys(self, nested: bool = False, leaves: bool = False) -> object:
        if nested is not leaves:
            raise ValueError
        return View(self, 0) if nested else self.entries.keys()

    def values(self, nested: bool = False, leaves: bool = False) -> object:
        if nested is not leaves:
            raise ValueError
        return View(self, 1) if nested else self.entries.values()

    def items(self, nested: bool = False, leaves: bool = False) -> object:
        if nested is not leaves:
            raise ValueError
        return View(self, None) if nested else self.entries.items()

    # keys

    def select(self, *keys: object, strict: bool = True, inplace: bool = False) -> Floor:
        # containers.md, "Keys": `select(*keys, strict=True, inplace=False)`.
        if inplace or not strict:
            raise TypeError
        kept: dict[str, Tensor | Floor | None] = {}
        parts: dict[str, list[object]] = {}
        for key in keys:
            if type(key) is str:
                kept[key] = self.entries[key]
            else:
                first, below = key
                kept.setdefault(first, None)
                parts.setdefault(first, []).append(below)
        for first, rest in parts.items():
            part = self.entries[first].select(*rest)
            if kept[first] is None:
                kept[first] = part
        return self._kd_like(self._released(kept), self.batch_size)

    def exclude(self, *keys: object) -> Floor:
        kept = self.entries.copy()
        parts: dict[str, list[object]] = {}
        for key in keys:
            if type(key) is str:
                kept.pop(key, None)
            else:
                first, below = key
                parts.setdefault(first, []).append(below)
        for first, rest in parts.items():
            if type(kept.get(first)) is Floor:
                kept[first] = kept[first].exclude(*rest)
        return self._kd_like(self._released(kept), self.batch_size)

    def _released(self, kept: dict[str, Tensor | Floor]) -> dict[str, Tensor | Floor]:
        if not self.locked:
            return kept
        return self._kd_like(kept, ())._map(lambda leaf: leaf, self.batch_size).entries

    def flatten_keys(self, separator: str) -> Floor:
        flat: dict[str, Tensor | Floor] = {}
        for key, value in self._walk():
            name = key if type(key) is str else separator.join(key)
            if name in flat:
                raise KeyError
            flat[name] = value
        return self._kd_like(flat, self.batch_size)

    def unflatten_keys(self, separator: str) -> Floor:
        new = self._kd_like({}, self.batch_size)
        for key, value in self.entries.items():
            level = new
            *above, last = key.split(separator)
            for part in above:
                level = level.entries.setdefault(part, self._kd_like({}, self.batch_size))
                if type(level) is not Floor:
                    raise KeyError
            if last in level.entries:
                raise KeyError
            level.entries[last] = value
        return new

    def rename_key_(self, old: str, new: str) -> Floor:
        if self.locked or type(old) is not str or type(new) is not str:
            raise RuntimeError
        value = self.entries[old]
        if old != new:
            del self.entries[old]
            self.entries[new] = value
        return self

    def to_dict(self) -> dict[str, object]:
        return {
            key: value if type(value) is Tensor else value.to_dict()
            for key, value in self.entries.items()
        }

    def reshape(self, *shape: int) -> Floor:
        old = len(self.batch_size)
        if min(shape) < 0 or math.prod(shape) != math.prod(self.batch_size):
            raise ValueError
        return self._map(lambda leaf: leaf.reshape(*shape, *leaf.shape[old:]), shape)

    def empty(
        self,
        recurse: bool = False,
        *,
        batch_size: object = None,
        device: object = None,
        names: object = None,
    ) -> Floor:
        # containers.md, "Keys": `empty(recurse)`; kd documents the other options.
        if recurse or batch_size is not None or device is not None or names is not None:
            raise TypeError
        return self._kd_like({}, self.batch_size)

    def replace(self, source: Mapping[str, object]) -> Floor:
        return self._map(lambda leaf: leaf, self.batch_size).update(source)

    # math

    def apply(self, fn: Leaf) -> Floor:
        new = self._map(fn, self.batch_size)
        for _, leaf in new._walk():
            if leaf.shape[: len(self.batch_size)] != self.batch_size:
                raise ValueError
        return new

    def __add__(self, other: object) -> Floor:
        if isinstance(other, Floor):
            return self._zip(other, torch.add)
        return self._map(lambda leaf: leaf + other, self.batch_size)

    def __mul__(self, other: float) -> Floor:
        return self._map(lambda leaf: leaf * other, self.batch_size)

    def __eq__(self, other: Floor) -> Floor:
        return self._zip(other, torch.eq)

    def exp(self) -> Floor:
        return self._map(torch.exp, self.batch_size)

    def sum(
        self, dim: int, keepdim: bool = False, *, dtype: object = None, reduce: bool = False
    ) -> Floor:
        batch = self.batch_size
        # containers.md, "Values": `reduce=True`; kd documents `keepdim` and `dtype`, as torch.
        if keepdim or dtype is not None or reduce:
            raise TypeError
        if not 0 <= dim < len(batch):
            raise IndexError
        return self._map(lambda leaf: torch.sum(leaf, dim), batch[:dim] + batch[dim + 1 :])

    def _pairs(self, other: Floor) -> tuple[list[Tensor], list[Tensor]]:
        mine, theirs = list(self._walk()), list(other._walk())
        if [key for key, _ in mine] != [key for key, _ in theirs]:
            raise KeyError
        return [leaf for _, leaf in mine], [leaf for _, leaf in theirs]

    def _copied(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy all or none: `_foreach_copy_` writes pairs before it finds one that it refuses."""
        for target, source in zip(targets, sources, strict=True):
            if target.shape != source.shape or source.is_meta:
                raise ValueError
            if source.layout is not torch.strided or source.requires_grad:
                raise ValueError
        self._check_written(targets)
        torch._foreach_copy_(targets, sources)

    def _check_written(self, targets: list[Tensor]) -> None:
        for target in targets:
            if not target.is_contiguous() or target.is_inference() or target.requires_grad:
                raise ValueError

    def copy_(self, other: Floor) -> Floor:
        self._copied(*self._pairs(other))
        return self

    update_ = copy_

    def zero_(self) -> Floor:
        leaves = [leaf for _, leaf in self._walk()]
        self._check_written(leaves)
        torch._foreach_zero_(leaves)
        return self

    # lock

    def lock_(self) -> Floor:
        self.was_locked = self.locked & 1
        if not self.locked & 1:
            self.locked += 1
            self._kd_hold_below(2)
        return self

    def unlock_(self) -> Floor:
        if self.locked > 1:
            raise RuntimeError
        self.was_locked = self.locked & 1
        if self.locked:
            self.locked = 0
            self._kd_hold_below(-2)
        return self

    def __enter__(self) -> Floor:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.was_locked:
            self.lock_()
        else:
            self.unlock_()

    def _kd_hold_below(self, count: int) -> None:
        for value in self.entries.values():
            if type(value) is Floor:
                value.locked += count
                value._kd_hold_below(count)

    # combine

    @classmethod
    def __torch_function__(
        cls, fn: object, types: object, args: tuple[object, ...], kwargs: object = None
    ) -> object:
        floors, dim = args
        if kwargs or fn not in {torch.stack, torch.cat}:
            return NotImplemented
        size = len(floors) if fn is torch.stack else sum(each.batch_size[dim] for each in floors)
        return floors[0]._joined(floors, fn, dim, size)

    def _joined(self, floors: list[Floor], fn: object, dim: int, size: int) -> Floor:
        old = self.batch_size
        behind = dim + (fn is torch.cat)
        if not 0 <= dim <= len(old) or type(dim) is not int:
            raise IndexError
        for each in floors:
            batch = each.batch_size
            if each.entries.keys() != self.entries.keys() or each.device != self.device:
                raise KeyError
            if batch[:dim] != old[:dim] or batch[behind:] != old[behind:]:
                raise ValueError
        joined = {}
        for key, value in self.entries.items():
            column = [each.entries[key] for each in floors]
            if type(value) is Tensor:
                joined[key] = fn(column, dim)
            else:
                joined[key] = value._joined(column, fn, dim, size)
        return self._kd_like(joined, (*old[:dim], size, *old[behind:]))


def _common(source: Mapping[str, object], shared: tuple[int, ...] | None) -> object:
    """Return the first dimensions that all tensors share; `None` if there is no tensor."""
    for value in source.values():
        if isinstance(value, dict):
            shared = _common(value, shared)
        elif shared is None:
            shared = tuple(value.shape)
        else:
            while value.shape[: len(shared)] != shared:
                shared = shared[:-1]
    return shared


ROWS: Final = {
    "construct": (
        "empty",
        "empty, no batch size",
        "1 leaf",
        "3 leaves",
        "16 leaves",
        "128 leaves",
        "nested, 3 leaves",
        "3 leaves, device=",
        "keyword leaves",
        "from_dict, nested, auto batch",
    ),
    "access": (
        "td['a']",
        "get('a')",
        "get(missing, None)",
        "td['b', 'c']",
        "get(('b', 'c'))",
        "'a' in td",
        "td['a'] = x",
        "set('a', x)",
        "set(('b', 'c'), x)",
        "update(2 leaves)",
        "list(keys())",
        "list(keys(True, True))",
        "list(items(True, True))",
        "list(values(True, True))",
        "pop + set",
    ),
    "keys": (
        "select",
        "exclude",
        "flatten_keys",
        "unflatten_keys",
        "rename_key_ there and back",
        "to_dict",
        "empty()",
        "replace",
    ),
    "index": (
        "td[0]",
        "td[2:7]",
        "td[0], 128 leaves",
        "td[tensor]",
        "td[0] = row",
        "td[:5] = rows",
    ),
    "combine": ("stack 8", "cat 8", "stack 8 x 128 leaves"),
    "math": (
        "apply(v + 1), 3",
        "td + 1, 3",
        "td + td, 3",
        "apply(v + 1), 16",
        "td + td, 16",
        "td * 2",
        "exp",
        "sum(0)",
        "td == td",
        "zero_, 16",
        "update_, 16",
        "copy_, 16",
    ),
    "lock": (
        "lock_ + unlock_",
        "locked td['b', 'c']",
        "locked list(items(True, True))",
        "locked td + 1, 16",
        "locked apply, 16",
    ),
    "scale": ("get(key): us per level", "apply(identity): us per level"),
    "io": (
        "memmap write, 16 x 256 KB",
        "memmap load, 16 x 256 KB",
        "memmap write, 256 small",
        "memmap load, 256 small",
        "safetensors round trip, 16 x 256 KB",
    ),
}
"""The rows that have a floor: those of areas whose goals are missed that `Floor` can run."""
