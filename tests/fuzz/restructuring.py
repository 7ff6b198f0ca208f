"""Operations on keys: the same done to nested dicts."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import cast

import torch
from tests.fuzz.checking import ITSELF, Call, Refusal
from tests.fuzz.data import Data, Unknown, stored
from tests.fuzz.indexing import some_path
from tests.fuzz.registry import operation
from tests.fuzz.subjects import Plain, Subject, values
from tests.fuzz.trees import (
    Entry,
    Path,
    copied,
    emptied,
    find,
    flattened,
    level_of,
    pruned,
    put,
    renamed,
    renamed_all,
    selected,
    split,
    take_out,
    unflattened,
    walk,
    without_data,
)

from kd_core import TensorDict, TensorDictBase


def key_of(rng: Random, path: Path) -> object:
    """Return one of the ways to spell a path."""
    if len(path) == 1:
        return rng.choice([path[0], path[0], path, (path,)])
    return rng.choice([path, path, (path[0], path[1:])])


def some_value(rng: Random, s: Subject) -> tuple[object, Entry]:
    """Return what may be stored, and what it is once it is stored."""
    draw = rng.random()
    if draw < 0.5:
        shape = s.batch if rng.random() < 0.93 else (7,)
        leaf = values(rng, (*shape, *rng.choice([(), (2,)])), torch.float32)
        return leaf, leaf
    if draw < 0.6:
        return "word", stored("word", s.batch)
    leaf = values(rng, s.batch, torch.int64)
    inner = Plain(s.batch, {"q": leaf})
    if draw < 0.8:
        return {"q": leaf}, inner
    return TensorDict({"q": leaf}, s.batch), inner


def changes(
    name: str,
    text: str,
    ours: Callable[[TensorDictBase], object],
    change: Callable[[Plain], object],
    s: Subject,
) -> Call:
    """Return a call that changes keys; `change` does it to a copy of the tree."""

    def theirs(tree: Plain) -> object:
        new = copied(tree)
        result = change(new)
        if s.td.is_locked and [*walk(tree, True, False, ())] != [*walk(new, True, False, ())]:
            raise Refusal("locked")
        return new, result

    declared = s.node.declared
    locked = s.td.is_locked
    return Call(
        name, text, ours, theirs, restructures=True, may_refuse=lambda tree: declared or locked
    )


def makes(
    name: str,
    text: str,
    ours: Callable[[TensorDictBase], object],
    change: Callable[[Plain], object],
    s: Subject,
    **flags: bool,
) -> Call:
    """Return a call that gives a container of other keys."""

    def theirs(tree: Plain) -> object:
        return change(copied(tree))

    return Call(name, text, ours, theirs, may_refuse=lambda tree: s.node.declared, **flags)


@operation("set", "__setitem__ key", "setdefault", "assign", "create_nested", "set_non_tensor")
def store(rng: Random, s: Subject, name: str) -> Call:
    path = some_path(rng, s)
    path = (*path[:-1], rng.choice([path[-1], "new"])) if rng.random() < 0.8 else (*path, "new")
    key = key_of(rng, path)
    value, entry = some_value(rng, s)
    if name == "create_nested":
        value, entry = None, Plain(s.batch)
    if name == "set_non_tensor":
        value = [1, 2]

    def change(tree: Plain) -> object:
        if name == "setdefault":
            found = find(tree, path)
            if found is not None:
                return found
        if s.node.declared and isinstance(value, dict) and len(path) == 1:
            raise Unknown("a field that keeps a dict")
        level = level_of(tree, path, make=True)
        if name == "create_nested":
            level.entries[path[-1]] = Plain(level.batch)
            return ITSELF
        # What is not a tensor belongs to the rows of its level.
        new = stored(value, level.batch) if isinstance(value, (str, list)) else entry
        put(tree, path, new)
        if name == "setdefault":
            return new
        return None if name.startswith("__") else ITSELF

    def ours(td: TensorDictBase) -> object:
        if name == "assign":
            return td.assign({cast("str", key): value})
        if name == "create_nested":
            return td.create_nested(cast("str", key))
        if name.startswith("__"):
            td[key] = value
            return None
        return getattr(td, name)(key, value)

    return changes(name, f"td.{name}({key!r}, {type(value).__name__})", ours, change, s)


@operation("pop", "popitem", "del_", "__delitem__")
def remove(rng: Random, s: Subject, name: str) -> Call:
    path = some_path(rng, s)
    key = key_of(rng, path)
    default = rng.random() < 0.3

    def change(tree: Plain) -> object:
        if name == "pop" and default and find(tree, path) is None:
            return 7
        if name == "popitem" and not tree.entries:
            raise Refusal("empty")
        if name == "popitem":
            last, value = tree.entries.popitem()
            return (last, value)
        found = take_out(tree, path)
        if name == "pop":
            return found
        return ITSELF if name == "del_" else None

    def ours(td: TensorDictBase) -> object:
        if name == "__delitem__":
            del td[key]  # type: ignore[arg-type]  # any spelling
            return None
        if name == "popitem":
            return td.popitem()
        if name == "pop":
            return td.pop(cast("str", key), *([7] if default else []))
        return getattr(td, name)(key)

    return changes(name, f"td.{name}({key!r}, default={default})", ours, change, s)


@operation("clear", "filter_empty_")
def empty(rng: Random, s: Subject, name: str) -> Call:
    def change(tree: Plain) -> object:
        if name == "clear":
            tree.entries.clear()
        else:
            pruned(tree)
        return ITSELF

    return changes(name, f"td.{name}()", lambda td: getattr(td, name)(), change, s)


@operation("rename_key_")
def rename(rng: Random, s: Subject, name: str) -> Call:
    path, target = some_path(rng, s), some_path(rng, s)
    key = key_of(rng, path)
    target = (*target[:-1], "new") if rng.random() < 0.6 else target
    safe = rng.random() < 0.3

    def change(tree: Plain) -> object:
        if s.kind != "dense" and path[:-1] != target[:-1] and isinstance(find(tree, path), Data):
            raise Unknown("each member moves its own value, which fits where that of all does not")
        return renamed(tree, path, target, safe)

    return changes(
        name,
        f"td.rename_key_({key!r}, {target}, {safe})",
        lambda td: td.rename_key_(cast("str", key), target, safe=safe),
        change,
        s,
    )


def into(
    call: str,
    ours: Callable[[TensorDictBase], object],
    change: Callable[[Plain], Plain],
    s: Subject,
    inplace: bool,
    memberwise: bool = True,
) -> Call:
    """Return a call that gives a container of other keys, or changes this one to it."""
    name = call.partition("(")[0].removeprefix("td.")
    if not inplace:
        return makes(name, call, ours, change, s, memberwise=memberwise)

    def replace(tree: Plain) -> object:
        tree.entries = change(copied(tree)).entries
        return ITSELF

    return changes(name, call, ours, replace, s)


@operation("select", "exclude", "empty", "split_keys")
def narrow(rng: Random, s: Subject, name: str) -> Call:
    paths = [some_path(rng, s) for _ in range(rng.randint(0, 3))]
    keys = [key_of(rng, path) for path in paths]
    strict, inplace, recurse = rng.random() < 0.6, rng.random() < 0.3, rng.random() < 0.5
    options: dict[str, object] = {"inplace": inplace}
    if name == "select":
        options["strict"] = strict

    def without(tree: Plain) -> Plain:
        for path in paths:
            if find(tree, path) is not None:
                take_out(tree, path)
        return tree

    text = f"td.{name}({keys}, {strict}, {inplace}, {recurse})"
    if name == "empty":
        hollow = lambda tree: emptied(tree, True) if recurse else Plain(tree.batch)  # noqa: E731  # one of two
        return makes(name, text, lambda td: td.empty(recurse), hollow, s)
    if name == "split_keys":
        return split_off(rng, s, keys, paths, strict)
    change = without if name == "exclude" else lambda tree: selected(tree, paths, strict)
    ours = lambda td: getattr(td, name)(*keys, **options)  # noqa: E731  # one of several
    return into(text, ours, change, s, inplace, memberwise=name == "exclude")


def split_off(rng: Random, s: Subject, keys: list[object], paths: list[Path], strict: bool) -> Call:
    reproduce = rng.random() < 0.3
    default = values(rng, s.batch, torch.float32) if rng.random() < 0.2 else None
    options: dict[str, object] = {"strict": strict, "reproduce_struct": reproduce}
    options |= {} if default is None else {"default": default}
    inplace = rng.random() < 0.3

    def take(tree: Plain) -> object:
        part = emptied(tree, False) if reproduce else None
        return split(tree, paths, strict, default, not reproduce, part)

    text = f"td.split_keys({keys}, inplace={inplace}, {options})"
    if not inplace:
        ours = lambda td: td.split_keys(keys, **options)  # noqa: E731  # one of several
        return makes("split_keys", text, ours, take, s)

    def ours_in_place(td: TensorDictBase) -> object:
        part, rest = td.split_keys(cast("list[str]", keys), inplace=True, **options)  # type: ignore[arg-type]  # options
        assert rest is td
        return part

    def take_in_place(tree: Plain) -> object:
        return cast("tuple[object, object]", take(tree))[0]

    return changes("split_keys", text, ours_in_place, take_in_place, s)


@operation("separates")
def separate(rng: Random, s: Subject, name: str) -> Call:
    paths = [some_path(rng, s) for _ in range(rng.randint(0, 3))]
    keys = [key_of(rng, path) for path in paths]
    strict, drop = rng.random() < 0.6, rng.random() < 0.6

    def change(tree: Plain) -> object:
        part, _ = cast("tuple[object, object]", split(tree, paths, strict, None, drop))
        return part

    return changes(
        name,
        f"td.separates({keys}, {strict}, {drop})",
        lambda td: td.separates(*cast("list[str]", keys), strict=strict, filter_empty=drop),
        change,
        s,
    )


@operation("rename_keys", "filter_non_tensor_data", "select as_tensordict")
def make_other_keys(rng: Random, s: Subject, name: str) -> Call:
    if name == "filter_non_tensor_data":
        return makes(name, name, lambda td: td.filter_non_tensor_data(), without_data, s)
    if name.startswith("select"):
        path = some_path(rng, s)
        return makes(
            name,
            f"td.select({path}, as_tensordict=True)",
            lambda td: td.select(path, as_tensordict=True),
            lambda tree: selected(tree, [path], True),
            s,
        )
    strict = rng.random() < 0.6
    found = {some_path(rng, s): some_path(rng, s) for _ in range(rng.randint(0, 2))}
    pairs = [(old, (*new[:-1], rng.choice([new[-1], "new", "a"]))) for old, new in found.items()]
    return makes(
        name,
        f"td.rename_keys({pairs}, {strict})",
        lambda td: td.rename_keys(dict(pairs), strict),
        lambda tree: renamed_all(tree, pairs, strict),
        s,
    )


@operation("flatten_keys", "unflatten_keys")
def level_keys(rng: Random, s: Subject, name: str) -> Call:
    separator, inplace = rng.choice([".", "/", "", "a"]), rng.random() < 0.3

    def change(tree: Plain) -> Plain:
        if name == "flatten_keys":
            flat = flattened(tree, separator)
            if inplace:  # keys that stay come first
                order = sorted(flat.entries, key=lambda key: key not in tree.entries)
                flat.entries = {key: flat.entries[key] for key in order}
            return flat
        if not separator:
            raise Refusal("empty separator")
        return unflattened(tree, separator)

    text = f"td.{name}({separator!r}, {inplace})"
    return into(text, lambda td: getattr(td, name)(separator, inplace), change, s, inplace)
