"""The loops over leaves: check, map, collect, rebuild and pair.

Every operation on the tensors of a container ends in one of these loops, so only they are written
for speed. They know tensors and a few private methods of a node, never a container class: an entry
of `Node` is a node.

- `all_fit` checks the entries of a new container ("construct" in the benchmarks).
- `map_each` maps one leaf at a time ("index", "shape").
- `collect` and `rebuild` make a list of all leaves for a foreach kernel of `foreach` ("math").
- `zip_each` pairs the leaves of two containers. A node that holds one value per row follows a
  `Selection`, which takes each row from one of two leaves. Another function of two leaves, such as
  a sum, has no meaning for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

from torch import Tensor

from kd_core._batch.plans import Padded, Reduced
from kd_core._errors import (
    KeyNotFound,
    KeySetMismatch,
    a_type,
    different_keys,
    listed,
    walks_through_leaf,
)
from kd_core._keys import format_key, nearest_key
from kd_core._leaves.foreach import FOREACH_FROM
from kd_core._leaves.shapeless import is_shapeless
from kd_core._nodes.entry import Node, is_node, tensor_of

if TYPE_CHECKING:
    from kd_core._batch.descriptor import Descriptor
    from kd_core._nodes.entry import Entries, Entry, Memo, Node, PartsMemo
    from kd_core._types import BatchFn, LeafFn, PartsFn

MANY: Final = 24
"""From this number of entries on, separate passes to check and to copy them are faster than one."""


def all_fit(source: dict[str, object], desc: Descriptor) -> bool:
    """Return whether all keys are plain strings and all values plain tensors that fit `desc`.

    `False` means that the slow path must check them: values may be subclasses of tensors, nodes or
    numbers.
    """
    if desc.device is not None and not _all_on_device(source, desc):
        return False
    if desc.ndim != 1:
        return _all_fit_in(source, desc)
    first = desc.size[0]  # dynamo does not compare a named size with a symbolic one
    try:
        for key, value in source.items():
            if value.__class__ is not Tensor or key.__class__ is not str or value.shape[0] != first:
                return False
    except (IndexError, RuntimeError):  # a tensor without dimensions, or without a shape
        return False
    return True


def _all_fit_in(source: dict[str, object], desc: Descriptor) -> bool:
    """Compute `all_fit` for any number of batch dimensions."""
    batch, ndim = desc.size, desc.ndim
    try:
        for key, value in source.items():
            if value.__class__ is not Tensor or key.__class__ is not str:
                return False
            if ndim and value.shape[:ndim] != batch:
                return False
    except RuntimeError:  # a tensor without a shape
        return False
    return True


def _all_on_device(source: dict[str, object], desc: Descriptor) -> bool:
    """Return whether all values of a dict are plain tensors on the device of `desc`."""
    device, on_cpu = desc.device, desc.on_cpu
    for value in source.values():
        if value.__class__ is not Tensor:
            return False
        if not (value.is_cpu if on_cpu else value.device == device):
            return False
    return True


def leaf_fits(value: Tensor, desc: Descriptor) -> bool:
    """Return whether the shape of a tensor starts with the batch size."""
    ndim = desc.ndim
    try:
        if ndim == 1:
            return value.shape[0] == desc.size[0]
        return ndim == 0 or value.shape[:ndim] == desc.size
    except IndexError:  # a tensor without dimensions
        return False
    except RuntimeError:
        if is_shapeless(value):
            return desc.ndim == 1 and value.size(0) == desc.size[0]
        raise


def map_each(
    entries: Entries, fn: LeafFn, batch: BatchFn | None = None, memo: Memo = None
) -> dict[str, Entry]:
    """Apply `fn` to each leaf, those of nodes included."""
    return {
        key: fn(value)
        if value.__class__ is Tensor
        else value._kd_map_each(fn, batch, memo)
        if isinstance(value, Node)
        else mapped(value, fn, batch)
        for key, value in entries.items()
    }


def mapped(leaf: Tensor, fn: LeafFn, batch: BatchFn | None) -> Tensor:
    """Apply `fn` to a leaf that may be a nested tensor, whose rows torch does not move."""
    if batch is None or not leaf.is_nested or isinstance(batch, (Reduced, Padded)):
        return fn(leaf)
    from kd_core._leaves.nested import moved_rows

    return moved_rows(leaf, fn)


def map_to_parts(
    entries: Entries, fn: PartsFn, batches: Sequence[BatchFn], memo: PartsMemo
) -> list[dict[str, Entry]]:
    """Apply `fn`, from a leaf to its parts, and return the entries of each part."""
    parts: list[dict[str, Entry]] = [{} for _ in batches]
    for key, value in entries.items():
        dealt: Sequence[Entry]
        if value.__class__ is Tensor:
            dealt = fn(value)
        elif isinstance(value, Node):
            dealt = value._kd_map_to_parts(fn, batches, memo)
        else:
            dealt = _parts_of(value, fn)
        for part, piece in zip(parts, dealt):  # noqa: B905  # `strict` is slower
            part[key] = piece  # type: ignore[assignment]  # both are entries
    return parts


def _parts_of(leaf: Tensor, fn: PartsFn) -> Sequence[Tensor]:
    if not leaf.is_nested:
        return fn(leaf)
    from kd_core._leaves.nested import moved_parts

    return moved_parts(leaf, fn)


def collect(entries: Entries, leaves: list[Tensor]) -> None:
    """Append all leaves, depth first, in insertion order."""
    for value in entries.values():
        if value.__class__ is Tensor or not isinstance(value, Node):
            leaves.append(value)
        else:
            value._kd_collect(leaves)


def rebuild(entries: Entries, leaves: Iterator[Tensor]) -> dict[str, Entry]:
    """Replace the leaves that `collect` lists by new ones, in the same order."""
    rebuilt: dict[str, Entry] = {}  # a loop, because a comprehension costs a frame
    for key, value in entries.items():
        if value.__class__ is Tensor or not isinstance(value, Node):
            rebuilt[key] = next(leaves)
        else:
            rebuilt[key] = value._kd_rebuild(leaves)
    return rebuilt


def collect_pairs(
    mine: Entries,
    theirs: Mapping[str, Entry],
    left: list[Tensor],
    right: list[Tensor],
    path: tuple[str, ...],
) -> None:
    """Append the leaves of two containers, matched by key.

    Raises:
        KeySetMismatch: if one has a key that the other lacks, or a leaf where the other has none.
    """
    if len(mine) != len(theirs):
        raise key_sets_differ(mine, theirs, path)
    for key, value in mine.items():
        other = theirs.get(key)
        if value.__class__ is Tensor and other.__class__ is Tensor:
            left.append(value)
            right.append(other)
        elif other is None:
            raise key_sets_differ(mine, theirs, path)
        elif isinstance(value, Node):
            value._kd_collect_pair(other, left, right, (*path, key))
        elif isinstance(other, Tensor):
            left.append(value)
            right.append(other)
        else:
            raise _kinds_differ(key, value, other, path)


def zip_each(
    mine: Entries,
    theirs: Mapping[str, Entry],
    fn: Callable[[Tensor, Tensor], Tensor],
    path: tuple[str, ...],
) -> dict[str, Entry]:
    """Apply `fn` to the leaves of two containers, matched by key as `collect_pairs` does.

    Raises:
        KeySetMismatch: if one has a key that the other lacks, or a leaf where the other has none.
    """
    if len(mine) != len(theirs):
        raise key_sets_differ(mine, theirs, path)
    entries: dict[str, Entry] = {}
    for key, value in mine.items():
        other = theirs.get(key)
        if value.__class__ is Tensor and other.__class__ is Tensor:
            entries[key] = fn(value, other)
        elif other is None:
            raise key_sets_differ(mine, theirs, path)
        elif isinstance(value, Node):
            entries[key] = value._kd_zip_each(other, fn, (*path, key))
        elif isinstance(other, Tensor):
            entries[key] = fn(value, other)
        else:
            raise _kinds_differ(key, value, other, path)
    return entries


def all_plain(entries: Entries) -> bool:
    """Return whether a dense tree surely has only plain tensors: it has at most two levels.

    This is checked before the leaves are looked at one by one: "math" in the benchmarks.
    """
    for value in entries.values():
        if value.__class__ is not Tensor and getattr(value, "_kd_nested", True):
            return False
    return True


def few_leaves(entries: Entries) -> bool:
    """Return whether a dense tree has too few leaves for a foreach kernel.

    This is checked before the leaves are collected, which is slow for a few leaves. `False` may
    also mean that the tree was not examined.
    """
    if type(entries) is not dict or len(entries) >= FOREACH_FROM:
        return False
    count = 0
    for value in entries.values():
        if value.__class__ is Tensor:
            if not count and value.is_cuda:
                return False
            count += 1
        elif getattr(value, "_kd_nested", True):  # another kind of leaf, or deeper than one level
            return False
        else:
            count += len(value._kd_entries)
    return count < FOREACH_FROM


def key_sets_differ(mine: Entries, theirs: Entries, path: tuple[str, ...]) -> KeySetMismatch:
    """Build the error for two containers whose keys differ: it lists both differences."""
    where = f" below {format_key(path)}" if path else ""
    return different_keys(mine, theirs, ("the first container", "the second"), where)


def _kinds_differ(key: str, value: Entry, other: Entry, path: tuple[str, ...]) -> KeySetMismatch:
    return KeySetMismatch(
        f"entry {format_key((*path, key))} must be a leaf in both containers or a container in "
        f"both, got {a_type(value)} and {a_type(other)}."
    )


def unwrapped(entry: object) -> object:
    """Return the value of non-tensor data, and anything else as it is."""
    return entry._kd_item() if is_node(entry) else entry


def same_data(one: object, other: object) -> bool:
    """Return whether two non-tensor values are equal; arrays are if all elements are.

    NaN is equal to NaN here, also inside lists, tuples and dicts: it is the same value.
    """
    if one is other:
        return True
    try:
        if getattr(one, "shape", None) != getattr(other, "shape", None):
            return False
        equal = one == other
        equal = bool(equal.all() if hasattr(equal, "all") else equal)
        return equal or _same_but_for_nan(one, other)
    except (TypeError, ValueError, RuntimeError):  # they cannot be compared
        return False


def _same_but_for_nan(one: object, other: object) -> bool:
    """Return whether two values that differ do so only because NaN is not equal to itself."""
    if isinstance(one, float) and isinstance(other, float):
        return one != one and other != other
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_data, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_data(one[key], other[key]) for key in one)
    return False


def find_entry(entries: Entries, path: tuple[str, ...]) -> Entry | None:
    """Return the entry at a path, or `None` if it is missing or the path holds tuples."""
    level: Entries = entries
    try:
        if len(path) == 2:  # the fast path for most nested keys
            first, last = path
            level = level[first]._kd_entries  # type: ignore[union-attr]  # caught below
            return level.get(last)
        for part in path[:-1]:
            level = level[part]._kd_entries  # type: ignore[union-attr]  # caught below
        return level.get(path[-1])
    except (KeyError, AttributeError, TypeError):  # missing, a leaf, or not a key
        return None


def refuse_leaf(entries: Entries, path: tuple[str, ...]) -> None:
    """Raise the error for a path that is missing because it goes on below a tensor."""
    level: Entries | None = entries
    for depth, part in enumerate(path[:-1], 1):
        entry = None if level is None else kinds_by_key(level).get(part)
        if isinstance(entry, Tensor):
            raise walk_error(path, depth, entry)
        level = getattr(entry, "_kd_entries", None)


def has_entry(entries: Entries, path: tuple[str, ...]) -> bool:
    """Return whether there is an entry at a path, without reading it."""
    level: Entries | None = entries
    for part in path[:-1]:
        if level is None or part not in level:
            return False
        level = getattr(level[part], "_kd_entries", None)
    return level is not None and path[-1] in level


def kinds_of(entries: Entries) -> Iterable[tuple[str, Entry]]:
    """Return the keys and, for each, an entry of the same kind: lazy stacks do not stack for it."""
    if type(entries) is dict:  # dynamo cannot guard on the `__class__` of a dict
        return entries.items()
    kinds = getattr(entries, "_kinds", None)
    return entries.items() if kinds is None else cast("Iterable[tuple[str, Entry]]", kinds())


def kinds_by_key(entries: Entries) -> Entries:
    """Return what `kinds_of` returns as a mapping."""
    kinds = getattr(entries, "_kinds", None)
    return entries if kinds is None else dict(kinds())


def entries_of(node: Node) -> Entries | None:
    """Return the entries of a node that is a container, `None` for data."""
    return cast("Entries | None", getattr(node, "_kd_entries", None))


def walk_error(path: tuple[str, ...], depth: int, leaf: object) -> Exception:
    """Build the error for a path that continues below a leaf found at `depth`."""
    kind = "tensor" if isinstance(leaf, Tensor) else "non-tensor value"
    return walks_through_leaf(format_key(path), format_key(path[:depth]), kind)


def missing_key(
    path: tuple[str, ...], depth: int, level: Entries, top: Entries, above: tuple[str, ...] = ()
) -> KeyNotFound:
    """Build the error for a path whose part at `depth` is missing.

    Args:
        path: the whole path.
        depth: the number of parts that were found.
        level: the entries where the next part is missing.
        top: the entries whose paths may have been meant.
        above: the path of `top`.
    """
    where = f" below {format_key(path[:depth])}" if depth else ""
    text = f"key {format_key(path)} not found; available keys{where}: {listed(level)}."
    described: Callable[[], dict[str, str]] | None = getattr(level, "_partial", None)
    partial = None if described is None else described().get(path[depth])
    if partial is not None:
        return KeyNotFound(
            f"{text} A lazy stack shows the keys that all members have, and this one is a "
            f"{partial}. Read it from a member, as in `stack[0]`."
        )
    near = nearest_key(path, _paths(top, above))
    if near is not None:
        text += f" Did you mean {format_key(near)}?"
    return KeyNotFound(text)


def name_of_leaf(entries: Entries, leaf: Tensor) -> tuple[str, ...] | None:
    """Return the path of this tensor, compared by identity, for messages."""
    for key, value in kinds_of(entries):
        if tensor_of(value) is leaf:
            return (key,)
        inner = None if isinstance(value, Tensor) else entries_of(value)
        below = None if inner is None else name_of_leaf(inner, leaf)
        if below is not None:
            return (key, *below)
    return None


def finder(entries: Entries, leaf: Tensor) -> Callable[[], tuple[str, ...]]:
    """Return a function that finds the path of a leaf; it is called for messages only."""
    return lambda: name_of_leaf(entries, leaf) or ("...",)


def _paths(entries: Entries, prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in kinds_of(entries):
        yield (*prefix, key)
        inner = None if isinstance(value, Tensor) else entries_of(value)
        if inner is not None:
            yield from _paths(inner, (*prefix, key))


def common_batch(shapes: list[tuple[int, ...]], most: int | None = None) -> tuple[int, ...]:
    """Return the leading dimensions that all shapes share, at most `most` of them."""
    if not shapes:
        return ()
    shared = tuple(shapes[0])
    if most is not None:
        shared = shared[:most]
    for shape in shapes:
        while shape[: len(shared)] != shared:
            shared = shared[:-1]
    return shared


class Selection:
    """A function of two leaves that takes each row from one of them.

    Attributes:
        of_member: a function from a stacked dimension and a position in it to the selection among
            the rows of that member; `None`: only stacked leaves can be chosen from.
    """

    __slots__ = ("_choose", "of_member")

    def __init__(
        self,
        choose: Callable[[Tensor, Tensor], Tensor],
        of_member: Callable[[int, int], Selection] | None = None,
    ) -> None:
        self._choose = choose
        self.of_member = of_member

    def __call__(self, leaf: Tensor, new: Tensor) -> Tensor:
        return self._choose(leaf, new)
