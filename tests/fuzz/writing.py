"""Operations that read entries, and write them one by one or many at once."""

from __future__ import annotations

from random import Random
from typing import TypeAlias, cast

import torch
from tests.fuzz.checking import ITSELF, Call, Refusal
from tests.fuzz.data import Data, stored
from tests.fuzz.indexing import some_path
from tests.fuzz.registry import operation
from tests.fuzz.restructuring import changes, key_of, makes
from tests.fuzz.subjects import Plain, Subject, plain, values
from tests.fuzz.trees import (
    Entry,
    Path,
    as_dict,
    find,
    level_of,
    merged_in,
    put,
    spelled,
    unwrapped,
    walk,
)
from torch import Tensor

from kd_core import MetaData, NestedKey, TensorDict, TensorDictBase

Items: TypeAlias = list[tuple[Path, object, Entry]]


def some_items(rng: Random, s: Subject, fresh: bool, most: int = 3) -> Items:
    """Return paths with what is written there, none of them inside another."""
    items: Items = []
    for _ in range(rng.randint(0, most)):
        path = some_path(rng, s)
        if fresh and rng.random() < 0.3:
            path = (*path[:-1], "new")
        if not any(path[: len(p)] == p or p[: len(path)] == path for p, _, _ in items):
            items.append((path, *value_for(rng, s, path)))
    return items


def source_of(items: Items) -> dict[NestedKey, object]:
    return {(path[0] if len(path) == 1 else path): value for path, value, _ in items}


@operation("update", "replace")
def merge(rng: Random, s: Subject, name: str) -> Call:
    items = some_items(rng, s, fresh=True)
    source, clone = source_of(items), rng.random() < 0.3
    options: dict[str, object] = {"non_blocking": True} if rng.random() < 0.2 else {}

    def change(tree: Plain) -> object:
        for path, _, entry in items:
            merged_in(tree, path, entry)
        return ITSELF if name == "update" else tree

    if name == "replace":
        text = f"td.replace({list(source)})"
        return makes(name, text, lambda td: td.replace(source), change, s)
    text = f"td.update({list(source)}, clone={clone}, {options})"
    return changes(name, text, lambda td: td.update(source, clone, **options), change, s)  # type: ignore[arg-type]  # options


@operation("update_", "set_", "set inplace")
def overwrite(rng: Random, s: Subject, name: str) -> Call:
    items = some_items(rng, s, fresh=False)
    if name != "update_":
        items = items[:1] or [(("none",), *value_for(rng, s, ("none",)))]
    source = source_of(items)

    def write(tree: Plain) -> object:
        for path, _, entry in items:
            current = find(tree, path)
            if current is None:
                level_of(tree, path)
                raise Refusal("no such key")
            written(current, entry)
        return ITSELF

    def ours(td: TensorDictBase) -> object:
        if name == "update_":
            return td.update_(source)
        ((path, value, _),) = items
        return td.set_(path, value) if name == "set_" else td.set(path, value, inplace=True)

    shown = [
        (path, entry.dtype, tuple(entry.shape)) if isinstance(entry, Tensor) else (path, entry)
        for path, _, entry in items
    ]
    call = Call(name, f"td.{name} {shown}", ours, write, writes=True)
    # A missing one is added by `set`; whether equal data may be "written" is no promise.
    added = name == "set inplace" and not there(s.node, items[0][0])
    call.unchecked = added or any(isinstance(entry, Data) for _, _, entry in items[:1])
    return call


def there(node: object, path: Path) -> bool:
    for part in path:
        while getattr(node, "members", None):
            node = node.members[0]  # type: ignore[attr-defined]  # a node
        node = getattr(node, "entries", {}).get(part)
    return node is not None


def value_for(rng: Random, s: Subject, path: Path) -> tuple[object, Entry]:
    node: object = s.node
    for part in path:
        while getattr(node, "members", None):
            node = node.members[0]  # type: ignore[attr-defined]  # a node
        node = getattr(node, "entries", {}).get(part)
    if isinstance(node, Tensor) and rng.random() < 0.8 and not s.node.members:
        dtype = node.dtype if rng.random() < 0.7 else torch.float32
        leaf = held_by(node.dtype, values(rng, tuple(node.shape), dtype))
        return leaf, leaf
    if isinstance(node, Data) and rng.random() < 0.7:
        return some_data(rng, s, path)
    leaf = values(rng, (*s.batch, *rng.choice([(), (2,)])), torch.float32)
    leaf = held_by(node.dtype, leaf) if isinstance(node, Tensor) else leaf
    return leaf, leaf


def held_by(dtype: torch.dtype, leaf: Tensor) -> Tensor:
    """Return a tensor that may be copied into a dtype: no integer is made of a negative float.

    What torch makes of one that the dtype does not hold depends on its place in the tensor.
    """
    if dtype.is_floating_point or dtype.is_complex or not leaf.is_floating_point():
        return leaf
    return leaf.nan_to_num(0.0, 1.0, 1.0).abs()


def some_data(rng: Random, s: Subject, path: Path) -> tuple[object, Entry]:
    """Return data that may be written over other data, bare or in its wrapper."""
    if s.ragged:
        return MetaData("reach", s.batch), Data("reach")
    tree = plain(s.node)
    batch, found = wrapper_batch(tree, path), cast("Data", find(tree, path))
    if is_bare(found.read()) and rng.random() < 0.5:
        return found.read(), found if found.rows is not None else stored(found.value, batch)
    return found.wrapper(batch), found


def is_bare(value: object) -> bool:
    """Return whether a value is stored as it is without a wrapper: numbers become tensors."""
    return value is None or isinstance(value, str) or (isinstance(value, list) and has_text(value))


def has_text(value: object) -> bool:
    return any(map(has_text, value)) if isinstance(value, list) else isinstance(value, str)


def written(current: Entry, entry: Entry) -> None:
    if isinstance(current, Data):
        if isinstance(entry, Data) and entry.value == current.value:
            return
        raise Refusal("data is not written")
    if not isinstance(current, Tensor) or not isinstance(entry, Tensor):
        raise Refusal("only tensors are written")
    current.copy_(entry)


@operation("nested")
def look_at_container(rng: Random, s: Subject, name: str) -> Call:
    path = some_path(rng, s)

    def theirs(tree: Plain) -> object:
        found = find(tree, path)
        if not isinstance(found, Plain):
            raise Refusal("no container")
        return found

    return Call(name, f"td.nested({path})", lambda td: td.nested(path, TensorDictBase), theirs)  # type: ignore[type-abstract]  # of any kind


@operation("get", "__getitem__ key", "__contains__", "get_non_tensor")
def look(rng: Random, s: Subject, name: str) -> Call:
    path = some_path(rng, s)
    key = key_of(rng, path)

    def theirs(tree: Plain) -> object:
        found = find(tree, path)
        if name == "__contains__":
            return found is not None
        if name == "get" and found is None and s.kind != "declared":
            levels = [find(tree, path[:depth]) for depth in range(1, len(path))]
            if any(isinstance(level, Tensor) for level in levels):
                raise Refusal("the key goes on below a tensor")
        if name == "get" and s.kind == "declared" and isinstance(found, Data) and len(path) == 1:
            return found.read()  # a field is its value
        if name == "get":
            return None if found is None else wrapped(tree, path, found)
        if found is None:
            raise Refusal("no such key")
        return unwrapped(found)

    def ours(td: TensorDictBase) -> object:
        if name == "__getitem__ key":
            return td[key]  # type: ignore[call-overload]  # any spelling
        return key in td if name == "__contains__" else getattr(td, name)(key)

    return Call(name, f"td.{name} {key!r}", ours, theirs)


@operation("keys", "values", "items")
def view(rng: Random, s: Subject, name: str) -> Call:
    nested, leaves = rng.random() < 0.5, rng.random() < 0.5

    def theirs(tree: Plain) -> object:
        listed = [
            (spelled(path), wrapped(tree, path, entry))
            for path, entry in walk(tree, nested, leaves, ())
            if not (leaves and isinstance(entry, Data))  # only tensors are leaves
        ]
        return listed if name == "items" else [pair[name == "values"] for pair in listed]

    text = f"td.{name}({nested}, {leaves})"
    return Call(name, text, lambda td: list(getattr(td, name)(nested, leaves)), theirs)


@operation("entry_class", "get_item_shape", "is_non_tensor")
def ask_entry(rng: Random, s: Subject, name: str) -> Call:
    path = some_path(rng, s)

    def theirs(tree: Plain) -> object:
        found = find(tree, path)
        if found is None and name == "entry_class":
            return False  # `NoneType`
        if found is None:
            raise Refusal("no such key")
        if name == "is_non_tensor":
            return isinstance(found, Data)
        if name == "entry_class":
            return isinstance(found, Tensor)
        if isinstance(found, Data):
            return torch.Size(wrapper_batch(tree, path))
        return found.shape if isinstance(found, Tensor) else torch.Size(found.batch)

    def ours(td: TensorDictBase) -> object:
        found = getattr(td, name)(path)
        return issubclass(found, Tensor) if name == "entry_class" else found

    return Call(name, f"td.{name}({path})", ours, theirs)


@operation("fill_ key")
def fill_entry(rng: Random, s: Subject, name: str) -> Call:
    path, value = some_path(rng, s), rng.choice([0, 1, 2.5, True, 1 + 2j])

    def theirs(tree: Plain) -> object:
        found = find(tree, path)
        if isinstance(found, Data):
            return ITSELF  # it stays
        if found is None:
            raise Refusal("no such leaf")
        for leaf in found.tensors() if isinstance(found, Plain) else [found]:
            leaf.fill_(value)
        return ITSELF

    return Call(
        name,
        f"td.fill_({path}, {value})",
        lambda td: td.fill_(path, value),
        theirs,
        writes=True,
    )


@operation("fromkeys")
def from_keys(rng: Random, s: Subject, name: str) -> Call:
    paths = [path for path, _, _ in some_items(rng, s, True)]

    def theirs(tree: Plain) -> object:
        made = Plain(())
        for path in paths:
            put(made, path, torch.tensor(1.5))
        return made

    def ours(td: TensorDictBase) -> object:
        return TensorDict.fromkeys(paths, 1.5)

    return Call(name, f"TensorDict.fromkeys({paths}, 1.5)", ours, theirs, memberwise=False)


@operation("to_dict", "non_tensor_items")
def as_python(rng: Random, s: Subject, name: str) -> Call:
    nested = rng.random() < 0.5

    def theirs(tree: Plain) -> object:
        if name == "to_dict":
            return as_dict(tree)
        data = walk(tree, nested, True, ())
        return [
            (spelled(path), unwrapped(value)) for path, value in data if isinstance(value, Data)
        ]

    def ours(td: TensorDictBase) -> object:
        if name == "to_dict":
            return td.to_dict()
        return [(key, td.get_non_tensor(key)) for key, _ in td.non_tensor_items(nested)]

    return Call(name, f"td.{name}({nested})", ours, theirs)


def wrapper_batch(tree: Plain, path: Path) -> tuple[int, ...]:
    return cast("Plain", find(tree, path[:-1])).batch


def wrapped(tree: Plain, path: Path, entry: Entry) -> object:
    return entry.wrapper(wrapper_batch(tree, path)) if isinstance(entry, Data) else entry
