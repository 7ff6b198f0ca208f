"""Operations that read and write rows by an index."""

from __future__ import annotations

import math
from random import Random
from typing import cast

import numpy
import torch
from tests.fuzz.checking import ITSELF, Call, Refusal, has_stack
from tests.fuzz.data import Batch, Data, Unknown
from tests.fuzz.operands import operand_node
from tests.fuzz.rearranging import cannot, moved, rows_call
from tests.fuzz.registry import odd, operation
from tests.fuzz.subjects import DTYPES, Node, Plain, Subject, build, plain, some_rows, values
from torch import Tensor

from kd_core import TensorDictBase


@operation("__getitems__")
def pick_rows(rng: Random, s: Subject, name: str) -> Call:
    size = s.batch[0] if s.batch else 1
    chosen = [rng.randrange(size) for _ in range(rng.randint(0, 3))] if size else []

    def rows_of(rows: Tensor) -> Tensor:
        return rows[torch.tensor(chosen, dtype=torch.int64)]

    text = f"td.__getitems__({chosen})"
    return Call(name, text, lambda td: td.__getitems__(chosen), lambda t: moved(t, rows_of))


@operation("masked_select")
def pick_by_mask(rng: Random, s: Subject, name: str) -> Call:
    mask = some_mask(rng, s.batch)
    return Call(
        name,
        f"td.masked_select({mask})",
        lambda td: td.masked_select(mask),
        lambda plain: moved(plain, lambda rows: rows[boolean(mask)]),
        may_refuse=cannot(lambda rows: rows[boolean(mask)]),
        shares=False,
    )


def row_numbers(rng: Random, size: int, shape: Batch) -> Tensor:
    """Return numbers of rows, now and then one that is out of range or of an odd dtype."""
    if not size:
        return torch.zeros((0, *shape[1:]), dtype=torch.int64)
    low = -1 if rng.random() < 0.1 else 0
    high = size + (rng.random() < 0.05)
    found = torch.tensor([rng.randint(low, high - 1) for _ in range(math.prod(shape))])
    dtypes = [torch.int64] * 3 + [torch.int32, torch.int8, torch.float32]
    # Torch looks at no dtype where there is nothing to do.
    return found.reshape(shape).to(rng.choice(dtypes) if math.prod(shape) else torch.int64)


@operation("index_select", "gather")
def pick(rng: Random, s: Subject, name: str) -> Call:
    ndim = len(s.batch)
    where = rng.randrange(ndim) if ndim else 0
    size = s.batch[where] if ndim else 1
    at = odd(rng, where - ndim * rng.randrange(2))
    shape = tuple(rng.randint(0, n) if rng.random() < 0.3 else n for n in s.batch)
    if name == "index_select":
        shape = rng.choice([(2,), (3,), (0,), (), (1, 2)])
    elif rng.random() < 0.6 and ndim:
        shape = (*shape[:where], rng.randint(0, 4), *shape[where + 1 :])
    index = row_numbers(rng, size, shape)
    return rows_call(rng, name, (at, index if math.prod(s.batch) else index.long()), {})


def boolean(mask: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        raise Refusal("a mask is of booleans")
    return mask


def some_mask(rng: Random, batch: Batch) -> Tensor:
    """Return a mask over the leading dimensions of a batch, now and then a wrong one."""
    shape = batch[: rng.randint(0, len(batch))]
    if rng.random() < 0.08:
        shape = (*shape, 2)
    mask = torch.tensor([rng.random() < 0.5 for _ in range(math.prod(shape))], dtype=torch.bool)
    return mask.reshape(shape) if rng.random() < 0.97 else mask.reshape(shape).to(torch.int64)


def item(rng: Random, size: int) -> object:
    """Return one part of an index, for a dimension of a size."""
    draw = rng.random()
    bounds = [None, 0, 1, -1, size, size - 1, 2, -2, size + 2, -size - 1]
    if draw < 0.3:
        return (
            rng.randint(-size, size - 1)
            if size and rng.random() < 0.93
            else rng.choice([size, -size - 1, True, numpy.int64(0), 0.0, 1.5])
        )
    if draw < 0.55:
        return slice(
            rng.choice(bounds),
            rng.choice(bounds),
            rng.choice([None, None, 1, 2, 3, rng.choice([-1, 0, 1.0])]),
        )
    rows = [rng.randint(-size, size - 1) for _ in range(rng.choice([0, 1, 2, 3]))] if size else []
    if draw < 0.62:
        return rows
    if draw < 0.67:
        return [rng.random() < 0.5 for _ in range(size)]
    if draw < 0.72:
        return torch.tensor([rng.random() < 0.5 for _ in range(size)], dtype=torch.bool)
    if draw < 0.77:
        return numpy.array(rows, dtype=rng.choice(["int64", "int32"]))
    if draw < 0.80 and size:
        return range(rng.randint(0, size))
    if draw < 0.85 and size:
        return torch.tensor(rng.randint(-size, size - 1))
    if draw < 0.88:
        return torch.tensor([rows, rows], dtype=torch.int64)
    if draw < 0.90:
        return torch.tensor([float(row) for row in rows])
    if draw < 0.92:
        return [[row] for row in rows]
    return torch.tensor(rows, dtype=rng.choice([torch.int64, torch.int64, torch.int32, torch.int8]))


def single(rng: Random, size: int) -> object:
    """Return an index of one part; torch takes a list of lists for a tuple, which we do not."""
    found = item(rng, size)
    nested = isinstance(found, list) and any(isinstance(each, list) for each in found)
    return torch.tensor(found) if nested else found


def some_index(rng: Random, batch: Batch) -> object:
    """Return any index: one part, or a tuple of several."""
    if rng.random() < 0.1:
        return some_mask(rng, batch)
    if rng.random() < 0.35:
        return (
            single(rng, batch[0] if batch else 0)
            if rng.random() < 0.85
            else rng.choice([None, Ellipsis, (), True, False, "none"])
        )
    parts: list[object] = []
    for position, size in enumerate(batch[: rng.randint(0, len(batch))]):
        while rng.random() < 0.12:
            parts.append(rng.choice([None, None, True, False]))
        if rng.random() < 0.12:
            parts.append(Ellipsis)
        elif rng.random() < 0.07 and position + 2 <= len(batch):
            parts.append(some_mask(rng, batch[position : position + 2]))
        parts.append(item(rng, size))
    if rng.random() < 0.25:
        parts.append(rng.choice([Ellipsis, None, True, torch.tensor(True)]))
    if rng.random() < 0.04:
        parts.append(rng.choice([0, slice(None), [0], "x"]))
    return tuple(parts)


def indexed(rows: Tensor, index: object) -> Tensor:
    """Index the numbers of rows as torch does; what is a key for a container is no index."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, str) for part in parts):
        raise Refusal("a string is a key")
    if sum(part is Ellipsis for part in parts) > 1:
        raise Refusal("an index holds at most one ellipsis")
    return rows[index]  # type: ignore[index]  # any of the above


def gives_views(index: object) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


@operation("__getitem__")
def get_rows(rng: Random, s: Subject, name: str) -> Call:
    index = some_index(rng, s.batch)
    return Call(
        name,
        f"td[{index!r}]",
        lambda td: td[index],  # type: ignore[call-overload]  # any of the above
        lambda plain: moved(plain, lambda rows: indexed(rows, index)),
        shares=True if gives_views(index) else None,
        may_refuse=cannot(lambda rows: indexed(rows, index)),
    )


@operation("get_at")
def get_rows_of_one(rng: Random, s: Subject, name: str) -> Call:
    index = some_index(rng, s.batch)
    key = some_path(rng, s)

    def theirs(plain: Plain) -> object:
        found: object = plain
        for each in key:
            if isinstance(found, Plain) and each not in found.entries:
                return None
            if not isinstance(found, (Plain, Tensor)):  # data, which has no keys
                return None
            found = cast("Plain", found).entries[each]
        if isinstance(found, Tensor):
            return indexed(found, index)
        if isinstance(found, Plain):
            return moved(found, lambda rows: indexed(rows, index))
        one = Plain(plain.batch, {"x": cast("Data", found)})
        return cast("Plain", moved(one, lambda rows: indexed(rows, index))).entries["x"]

    return Call(
        name,
        f"td.get_at({key}, {index!r})",
        lambda td: td.get_at(key, index),  # type: ignore[call-overload]  # any of the above
        theirs,
        may_refuse=cannot(lambda rows: indexed(rows, index)),
    )


def some_path(rng: Random, s: Subject) -> tuple[str, ...]:
    """Return the path of an entry, mostly one that is there."""
    found: list[tuple[str, ...]] = [("none",), ("a",), ("a", "b")]
    node: Tensor | Data | Node = s.node
    path: tuple[str, ...] = ()
    while isinstance(node, Node):
        while node.members:
            node = node.members[0]
        if not node.entries or (path and rng.random() < 0.5):
            break
        key = rng.choice(list(node.entries))
        path = (*path, key)
        node = node.entries[key]
    if path and rng.random() < 0.9:
        return path
    return rng.choice(found)


def assigned(leaf: Tensor, index: object, value: object, ndim: int) -> None:
    """Write rows of a leaf as torch does for the batch dimensions."""
    rows = torch.zeros(leaf.shape[:ndim])
    indexed(rows, index)  # refuses what is no index of the batch
    if leaf.dtype is torch.uint64 and isinstance(value, int) and value < 0:
        # torch 2.15 refuses it here as a number, but neither as a tensor nor in `fill_`.
        value = torch.tensor(value)
    leaf[of_batch(index, leaf.ndim - ndim)] = value  # type: ignore[index, assignment]  # any


def of_batch(index: object, extra: int) -> object:
    """Return an index of the batch for what has further dimensions, which `...` does not mean."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is Ellipsis for part in parts):
        return (*parts, *(slice(None),) * extra)
    return index


@operation("__setitem__", "set_at_", "copy_at_", "update_at_")
def assign(rng: Random, s: Subject, name: str) -> Call:
    index = some_index(rng, s.batch)
    if any(isinstance(part, str) for part in (index if isinstance(index, tuple) else (index,))):
        index = 0  # a string is a key, which is not written by rows
    rows = _rows(s.batch, index)
    if name == "set_at_":
        return write_one(s, some_path(rng, s), index, rng.choice([1, 0, 2.5, -1]))
    source, value = some_source(rng, s, rows)

    def theirs(tree: Plain) -> object:
        indexed(torch.zeros(tree.batch), index)
        if name == "update_at_" and not isinstance(value, Plain):
            raise Refusal("no mapping")
        if name == "__setitem__" and _lacks(tree, value):
            raise Unknown("keys that are added")
        write_rows(tree, index, value, len(tree.batch))
        return None if name == "__setitem__" else ITSELF

    def ours(td: TensorDictBase) -> object:
        if name != "__setitem__":
            return getattr(td, name)(source, index)
        td[index] = source
        return None

    text = f"{name} {index!r} = {f'container of {rows}' if isinstance(value, Plain) else value}"
    nothing = rows is not None and not math.prod(rows)  # then torch looks at no value
    return Call(name, text, ours, theirs, writes=True, lax=nothing, wider=has_stack(s.node))


def some_source(rng: Random, s: Subject, rows: Batch | None) -> tuple[object, object]:
    """Return what is written to rows: as it is given, and plainly."""
    draw = rng.random()
    if draw < 0.35 or rows is None or s.ragged:
        number = rng.choice([1, 0, 2.5, True, -1, 2])
        return number, number
    if draw < 0.55:
        tensor = values(rng, rng.choice([(), (1,), rows]), rng.choice(DTYPES))
        return tensor, tensor
    how = rng.choice(["same", "same", "same", "random"])
    node = indexed_node(rng, plain(s.node), len(s.batch), rows, how)
    if rng.random() < 0.1:
        node.entries["none"] = values(rng, rows, torch.float32)
    built = build(node)
    return built if rng.random() < 0.7 else built.to_dict(), plain(node)


def write_rows(tree: Plain, index: object, value: object, ndim: int) -> None:
    """Write rows of all leaves, or of those that a tree of values names."""
    if not isinstance(value, Plain):
        for leaf in tree.tensors():
            assigned(leaf, index, value, ndim)
        return
    for key, each in value.entries.items():
        mine = tree.entries.get(key)
        if mine is None:
            raise Refusal("no such key")
        if isinstance(mine, Plain):
            write_rows(mine, index, each, ndim)
        elif isinstance(mine, Tensor):
            assigned(mine, index, each, ndim)
        else:
            extra = 0 if mine.rows is None else mine.rows.ndim - ndim
            tree.entries[key] = mine.written(of_batch(index, extra), each)


def _lacks(tree: Plain, value: object) -> bool:
    """Return whether a tree of values has keys that a tree lacks."""
    if not isinstance(value, Plain):
        return False
    for key, each in value.entries.items():
        mine = tree.entries.get(key)
        if mine is None or (isinstance(mine, Plain) and _lacks(mine, each)):
            return True
    return False


def write_one(s: Subject, path: tuple[str, ...], index: object, value: object) -> Call:
    """Return a write of rows of one entry."""

    def theirs(tree: Plain) -> object:
        found: object = tree
        level = tree
        for part in path:
            if not isinstance(found, Plain) or part not in found.entries:
                raise Refusal("no such key")
            level, found = found, found.entries[part]
        if isinstance(found, Tensor):
            assigned(found, index, value, found.ndim)
            return ITSELF
        if isinstance(found, Data):
            indexed(torch.zeros(tree.batch), index)
            extra = 0 if found.rows is None else found.rows.ndim - len(tree.batch)
            level.entries[path[-1]] = found.written(of_batch(index, extra), value)
            return ITSELF
        inner = cast("Plain", found)
        indexed(torch.zeros(inner.batch), index)
        for leaf in inner.tensors():
            assigned(leaf, index, value, len(inner.batch))
        return ITSELF

    text = f"td.set_at_({path}, {value}, {index!r})"
    return Call(
        "set_at_", text, lambda td: td.set_at_(path, value, cast("int", index)), theirs, writes=True
    )


def _rows(batch: Batch, index: object) -> Batch | None:
    try:
        return tuple(torch.zeros(batch)[index].shape)  # type: ignore[index]  # any
    except Exception:
        return None


def indexed_node(rng: Random, tree: Plain, ndim: int, rows: Batch, how: str) -> Node:
    """Return values for the rows of some keys."""
    whole = operand_node(rng, tree, True, how, False)

    def shaped(part: Node) -> Node:
        new = Node((*rows, *part.batch[ndim:]))
        for key, value in part.entries.items():
            if isinstance(value, Node):
                new.entries[key] = shaped(value)
            elif isinstance(value, Tensor):
                new.entries[key] = values(rng, (*rows, *value.shape[ndim:]), value.dtype)
            elif value.rows is not None:
                new.entries[key] = value.rearranged(lambda _: some_rows(rng, new.batch))  # at once
            else:
                new.entries[key] = value
        return new

    new = shaped(whole)
    if new.entries and rng.random() < 0.3:
        del new.entries[rng.choice(list(new.entries))]
    return new
