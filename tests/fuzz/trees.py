"""Nested dicts with batch sizes: what containers do to their keys, done plainly."""

from __future__ import annotations

from typing import TypeAlias, cast

from tests.fuzz.checking import ITSELF, Refusal
from tests.fuzz.data import Batch, Data
from tests.fuzz.subjects import Plain
from torch import Tensor

Path: TypeAlias = tuple[str, ...]


Entry: TypeAlias = "Tensor | Data | Plain"


def copied(tree: Plain) -> Plain:
    """Return a tree of the same tensors whose dicts are its own."""
    return tree.map(lambda leaf: leaf)


def find(tree: Plain, path: Path) -> Entry | None:
    found: Entry | None = tree
    for part in path:
        found = found.entries.get(part) if isinstance(found, Plain) else None
    return found


def level_of(tree: Plain, path: Path, make: bool = False) -> Plain:
    """Return the level that holds a path; with `make`, levels that are missing are made."""
    for part in path[:-1]:
        if make and part not in tree.entries:
            tree.entries[part] = Plain(tree.batch)
        inner = tree.entries.get(part)
        if not isinstance(inner, Plain):
            raise Refusal(f"no container at {part}")
        tree = inner
    return tree


def put(tree: Plain, path: Path, value: Entry) -> None:
    level = level_of(tree, path, make=True)
    level.entries[path[-1]] = fitted(value, level.batch)


def fitted(value: Entry, batch: Batch) -> Entry:
    """Return a value as an entry of a batch; a container with fewer dimensions gets all of them."""
    if isinstance(value, Data) and value.rows is None:
        return value
    if isinstance(value, Plain):
        if value.batch == batch[: len(value.batch)]:
            entries = {key: fitted(entry, batch) for key, entry in value.entries.items()}
            return Plain(batch, entries)
        shape = value.batch
    else:
        shape = tuple((value if isinstance(value, Tensor) else value.of_rows(())).shape)
    if shape[: len(batch)] != batch:
        raise Refusal("the batch size does not fit")
    return value


def take_out(tree: Plain, path: Path) -> Entry:
    level = level_of(tree, path)
    if path[-1] not in level.entries:
        raise Refusal("no such key")
    return level.entries.pop(path[-1])


def unwrapped(entry: Entry) -> object:
    return entry.read() if isinstance(entry, Data) else entry


def pruned(tree: Plain) -> None:
    for key, value in list(tree.entries.items()):
        if isinstance(value, Plain):
            pruned(value)
            if not value.entries:
                del tree.entries[key]


def renamed(tree: Plain, path: Path, target: Path, safe: bool) -> object:
    if find(tree, path) is None:
        raise Refusal("no such key")
    if path == target:
        return ITSELF
    if target[: len(path)] == path:
        raise Refusal("inside of itself")
    if safe and find(tree, target) is not None:
        raise Refusal("taken")
    probe = copied(tree)
    put(probe, target, cast("Entry", find(tree, path)))
    if path[: len(target)] == target:
        value = take_out(tree, path)
        put(tree, target, value)
        return ITSELF
    value = take_out(tree, path)
    put(tree, target, value)
    return ITSELF


def emptied(tree: Plain, data: bool) -> Plain:
    """Keep the levels, and what is no tensor if asked to."""
    kept: dict[str, Entry] = {}
    for key, value in tree.entries.items():
        if isinstance(value, Plain):
            kept[key] = emptied(value, data)
        elif data and isinstance(value, Data):
            kept[key] = value
    return Plain(tree.batch, kept)


def selected(tree: Plain, paths: list[Path], strict: bool) -> Plain:
    """Keep what paths name, in the order in which they first name it."""
    new = Plain(tree.batch)
    below: dict[str, list[Path]] = {}
    for path in paths:
        if find(tree, path) is None:
            if strict:
                raise Refusal("no such key")
            if path[0] not in tree.entries:
                continue
            if not isinstance(tree.entries[path[0]], Plain):
                below.setdefault(path[0], [])  # it holds its place
                continue
        below.setdefault(path[0], []).append(path[1:])
    for key, rests in below.items():
        value = tree.entries[key]
        if not rests:
            continue
        if () in rests or not isinstance(value, Plain):
            new.entries[key] = value
        else:
            new.entries[key] = selected(value, rests, strict)
    return new


def split(
    tree: Plain,
    paths: list[Path],
    strict: bool,
    default: Tensor | None = None,
    drop_empty: bool = True,
    part: Plain | None = None,
) -> object:
    part = Plain(tree.batch) if part is None else part
    for path in paths:
        if find(tree, path) is None:
            if default is not None:
                put(part, path, default)
            elif strict:
                raise Refusal("no such key")
            continue
        level, new = tree, part
        for name in path[:-1]:
            level = cast("Plain", level.entries[name])
            new = cast("Plain", new.entries.setdefault(name, Plain(new.batch)))
        put(part, path, take_out(tree, path))
        for depth in range(len(path) - 1, 0, -1) if drop_empty else ():
            holder = find(tree, path[:depth])
            if isinstance(holder, Plain) and not holder.entries:
                take_out(tree, path[:depth])
    return (part, tree)


def renamed_all(tree: Plain, pairs: list[tuple[Path, Path]], strict: bool) -> Plain:
    """Rename several keys at once."""
    moved: list[tuple[Path, Entry]] = []
    for old, new in pairs:
        if find(tree, old) is not None:
            moved.append((new, take_out(tree, old)))
        elif strict:
            raise Refusal("no such key")
    for new, value in moved:
        if find(tree, new) is not None:
            raise Refusal("taken")
        put(tree, new, value)
    return tree


def without_data(tree: Plain) -> Plain:
    """Return a tree without values that are not tensors."""
    new = Plain(tree.batch)
    for key, value in tree.entries.items():
        if isinstance(value, Plain):
            new.entries[key] = without_data(value)
        elif isinstance(value, Tensor):
            new.entries[key] = value
    return new


def flattened(tree: Plain, separator: str) -> Plain:
    new = Plain(tree.batch)

    def walk(level: Plain, prefix: str) -> None:
        for key, value in level.entries.items():
            if isinstance(value, Plain):
                walk(value, prefix + key + separator)
            elif prefix + key in new.entries:
                raise Refusal("two entries of one name")
            else:
                new.entries[prefix + key] = value

    walk(tree, "")
    return new


def unflattened(tree: Plain, separator: str) -> Plain:
    new = Plain(tree.batch)
    made: set[int] = set()
    # Keys that are not split come first.
    for key, value in sorted(tree.entries.items(), key=lambda pair: separator in pair[0]):
        level = new
        *above, last = key.split(separator)
        for part in above:
            inner = level.entries.get(part)
            if inner is None:
                inner = level.entries[part] = Plain(new.batch)
                made.add(id(inner))
            if not isinstance(inner, Plain) or id(inner) not in made:
                raise Refusal("a value and a container")
            level = inner
        if last in level.entries:
            raise Refusal("a value and a container")
        level.entries[last] = value
    return new


def merged_in(tree: Plain, path: Path, entry: Entry) -> None:
    """Store an entry at a nested key, which does not go through a leaf."""
    level = tree
    for part in path[:-1]:
        below = level.entries.setdefault(part, Plain(level.batch))
        if not isinstance(below, Plain):
            raise Refusal("it goes through a leaf")
        level = below
    put(tree, path, entry)


def spelled(path: Path) -> object:
    return path[0] if len(path) == 1 else path


def walk(tree: Plain, nested: bool, leaves: bool, prefix: Path) -> list[tuple[Path, Entry]]:
    found: list[tuple[Path, Entry]] = []
    for key, value in tree.entries.items():
        if not (leaves and isinstance(value, Plain)):
            found.append(((*prefix, key), value))
        if nested and isinstance(value, Plain):
            found += walk(value, nested, leaves, (*prefix, key))
    return found


def as_dict(tree: Plain) -> dict[str, object]:
    return {
        key: as_dict(value) if isinstance(value, Plain) else unwrapped(value)
        for key, value in tree.entries.items()
    }
