"""Adding entries to an arena, and seeing those that other processes added.

An entry is a file of its own, which the next manifest of the arena names beside the others: what
is mapped already stays where it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor

from kd_core._errors import InvalidValue, KeyCollision, batch_does_not_fit
from kd_core._keys import format_key
from kd_core._nodes import registry
from kd_core._protocol.composite import unchanged_on_error
from kd_core._protocol.primitives import AbstractContainer, leaves_of, lowest_level, relock, unlock
from kd_core._store import files
from kd_core._store.arena import check_open, fill, load_open, map_segment
from kd_core._store.commit import writing
from kd_core._store.encoding import Encoder, Json
from kd_core._store.places import place_of, root_of
from kd_core._store.segments import layout_of

if TYPE_CHECKING:
    from kd_core._store.manifest import Manifest

Keys = tuple[str, ...]


def add_entry(td: AbstractContainer, keys: Keys, leaf: Tensor, *, filled: bool) -> Tensor:
    """Add a tensor to the arena of a container and to the container; return it.

    Args:
        td: what `memmap`, `memmap_`, `memmap_like` or `load_memmap` returned.
        keys: where it is; levels that do not exist are created.
        leaf: its values, shape and dtype.
        filled: whether its values are written; else the entry is zeros.

    Raises:
        InvalidValue: if the container is not that of an arena, or a level is of a declared class.
        KeyCollision: if there is such an entry.
        ShapeMismatch: if the shape does not start with the batch size.
    """
    path = _path_of(td)
    level, depth = lowest_level(td, keys)
    if depth == len(keys) - 1 and keys[-1] in level._kd_entries:
        raise _exists(keys, path)
    desc = level._kd_desc
    if tuple(leaf.shape[: desc.ndim]) != desc.batch:
        raise batch_does_not_fit(format_key(keys), desc.batch, leaf.shape)
    encoder = Encoder()
    node = encoder.add(leaf, keys)
    layout = layout_of(encoder.specs)
    with writing(path, create=False) as writer:
        manifest = writer.checked()
        check_open(manifest, path)
        _check_same_arena(td, manifest, path)
        encoder.move_to(len(manifest.segments))
        _insert(cast("Json", manifest.tree), keys, node, path)
        segment = writer.add_arena(lambda fd: fill(fd, encoder, layout, filled))
        with files.opened_folder(path) as folder:
            opened = map_segment(folder, f"{path}", segment.name, layout)
        [made] = opened.tensors(encoder.specs).values()
        with unchanged_on_error(td):
            _set(td, keys, made)
            writer.commit([*manifest.segments, segment], manifest.tree, sealed=False)
    return made


def refresh(td: AbstractContainer) -> None:
    """Add the entries to a container that its arena has by now.

    Raises:
        InvalidValue: if the container is not that of an arena.
    """
    _take_new(td, load_open(_path_of(td)), ())


def _take_new(td: AbstractContainer, made: AbstractContainer, above: Keys) -> None:
    for key, value in made._kd_entries.items():
        mine = td._kd_entries.get(key)
        if mine is None:
            _set(td, (key,), value)
        elif isinstance(mine, AbstractContainer) and isinstance(value, AbstractContainer):
            _take_new(mine, value, (*above, key))


def _path_of(td: AbstractContainer) -> Path:
    path = root_of(td)
    if path is None:
        raise InvalidValue(
            "only the container that `memmap`, `memmap_`, `memmap_like` or `load_memmap` returned "
            "has an arena to which entries are added, got another one. Keys may be nested: call "
            "the method on the outer container."
        )
    return Path(path)


def _exists(keys: Keys, path: Path) -> KeyCollision:
    return KeyCollision(
        f"key {format_key(keys)} exists in the arena `{path}`. Write to the entry in place, call "
        "`memmap_refresh_` if another process added it, or choose another key."
    )


def _check_same_arena(td: AbstractContainer, manifest: Manifest, path: Path) -> None:
    names = {segment.name for segment in manifest.segments}
    for leaf in leaves_of(td):
        place = place_of(leaf)
        if place is not None and place.file not in names:
            raise InvalidValue(
                f"the arena `{path}` was replaced by another one, so that this container does not "
                "belong to it. Call `TensorDict.load_memmap` on the path."
            )


def _insert(node: Json, keys: Keys, leaf: Json, path: Path) -> None:
    """Add a node at some keys, and the nodes of levels that do not exist."""
    for depth, key in enumerate(keys):
        level = node.get("td")
        if not isinstance(level, dict):
            raise InvalidValue(
                f"an entry {format_key(keys)} cannot be added to the arena `{path}`: only a "
                f"`TensorDict` gains entries, and {format_key(keys[:depth]) if depth else 'it'} is "
                "something else. Write another arena with `memmap`."
            )
        entries = dict(level["entries"])
        if depth == len(keys) - 1:
            if key in entries:
                raise _exists(keys, path)
            entries[key] = leaf
        elif key not in entries:
            entries[key] = {"td": {**level, "entries": []}}
        level["entries"] = [list(pair) for pair in entries.items()]
        node = entries[key]


def _set(td: AbstractContainer, keys: Keys, value: object) -> None:
    """Set an entry of a container whose own lock, if any, is kept."""
    reason = td._kd_desc.lock
    if reason is not None:
        unlock(td)
    try:
        level = td
        for key in keys[:-1]:
            if key not in level._kd_entries:
                level._kd_set_entry(key, registry.make_dense({}, level._kd_desc))
            level = cast("AbstractContainer", level._kd_entries[key])
        level._kd_set_entry(keys[-1], cast("Tensor", value))
    finally:
        relock(td, reason)
