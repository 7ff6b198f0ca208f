"""Arenas: stores whose tensors are filled in place, by several processes, until they are sealed.

The file of an arena is allocated in full when it is created, so that writes through a mapping
cannot find the disk full. Until it is sealed it has no checksums, and what is in it after the
machine stopped is what the system had written by then.
"""

from __future__ import annotations

import mmap
import os
from errno import EACCES, EPERM, EROFS
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._descriptor import device_of
from kd_core._errors import FormatError, InvalidValue, KeyCollision, batch_does_not_fit
from kd_core._keys import format_key
from kd_core._leaves.loops import leaf_fits
from kd_core._nodes import Entry
from kd_core._protocol import (
    AbstractContainer,
    leaves_of,
    level_at,
    lowest_level,
    relock,
    unchanged_on_error,
    unlock,
)
from kd_core._store import directory, files
from kd_core._store.codec import (
    Decoder,
    Encoder,
    Json,
    Reader,
    Specs,
    check_fits,
    parts_of,
    specs_of,
)
from kd_core._store.commit import Writer, read_manifest, reading, writing
from kd_core._store.files import reported
from kd_core._store.manifest import Manifest, Segment
from kd_core._store.mapped_tensor import (
    freeze,
    memory_of,
    place_of,
    record,
    record_root,
    root_of,
    roots_at,
)
from kd_core._store.segments import (
    BLOCK,
    MappedFile,
    check_header,
    checksums_of,
    data_of,
    layout_of,
    mapped,
    without_collection,
    written,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kd_core._store.segments import Layout


def create(
    td: AbstractContainer, path: Path, *, filled: bool, overwrite: bool
) -> AbstractContainer:
    """Write an arena to a path, and return it.

    Args:
        td: what it holds.
        path: the directory.
        filled: whether tensors are written; else they are zeros.
        overwrite: whether it replaces what the store there holds. Else a store of the same
            structure is opened with all that it holds.

    Raises:
        InvalidValue: if there is a store of another structure, which is not to be replaced.
    """
    encoder = Encoder()
    tree = encoder.node_of(td)
    layout = layout_of(encoder.specs)
    if not overwrite and _is_there(path, tree):
        return load(path)
    with writing(path) as writer:
        if not overwrite and writer.current is not None:  # made since then
            raise holds_another(path)
        segments = []
        if encoder.specs:
            segments.append(writer.add_arena(lambda fd: fill(fd, encoder, layout, filled)))
        writer.commit(segments, tree, sealed=False)
        with files.opened_folder(path) as folder:
            place = os.path.realpath(path)
            opened = [map_segment(folder, place, segment.name, layout) for segment in segments]
            return _container(place, [encoder.specs] if segments else [], opened, tree)


def _is_there(path: Path, tree: object) -> bool:
    """Return whether there is a store of the structure of a tree.

    Raises:
        InvalidValue: if there is one of another structure.
    """
    try:
        with files.opened_folder(path) as folder:
            found = read_manifest(folder, path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if _without_devices(found.tree) != _without_devices(tree):
        raise holds_another(path)
    return True


def _without_device(tree: Json) -> Json:
    """Return a tree without the devices of containers: what an arena holds is on the CPU."""
    return {key: _without_devices(value) for key, value in tree.items() if key != "device"}


def _without_devices(node: object) -> object:
    if isinstance(node, dict):
        return _without_device(node)
    return [_without_devices(each) for each in node] if isinstance(node, list) else node


def holds_another(path: Path) -> InvalidValue:
    """Return the error for a store of another structure that is not to be replaced."""
    return InvalidValue(
        f"`{path}` holds a container of another structure, which would be lost. Open it with "
        "`TensorDict.load_memmap`, pass `overwrite=True` to replace it, or choose another path."
    )


def resize(path: Path, rows: int) -> None:
    """Change the number of rows of an arena: its content is copied, and new rows are zeros."""
    with writing(path, create=False) as writer:
        check_open(writer.checked(), path)
        old = load_open(path)
        _replace_rows(writer, path, old, rows, [(0, old)])


def append(td: AbstractContainer, path: Path) -> None:
    """Add rows to an arena, which is copied."""
    new = _without_device(Encoder().node_of(td))
    with writing(path, create=False) as writer:
        manifest = writer.checked()
        check_open(manifest, path)
        check_fits(new, _without_device(manifest.tree))
        old = load_open(path)
        count = old._kd_desc.batch[0] if old._kd_desc.batch else 0  # it is refused then
        _replace_rows(writer, path, old, count + td._kd_desc.batch[0], [(0, old), (count, td)])


def _replace_rows(
    writer: Writer,
    path: Path,
    old: AbstractContainer,
    rows: int,
    sources: list[tuple[int, AbstractContainer]],
) -> None:
    """Replace an arena by one of another number of rows; nothing is seen before all is there.

    Args:
        writer: the writer of its store.
        path: its directory.
        old: the container in it.
        rows: how many rows it has then.
        sources: what is copied to rows from a number on, as far as there are so many.
    """
    encoder = Encoder()
    tree = encoder.node_of(_with_rows(old, rows, path))
    layout = layout_of(encoder.specs)
    segments = []
    if encoder.specs:
        segments.append(writer.add_arena(lambda fd: fill(fd, encoder, layout, filled=False)))
    place = os.path.realpath(path)
    with files.opened_folder(path) as folder:
        opened = [map_segment(folder, place, segment.name, layout) for segment in segments]
    made = _container(place, [encoder.specs] if segments else [], opened, tree)
    engine = made._kd_engine
    for start, source in sources:
        count = min(source._kd_desc.batch[0], rows - start)
        mine, theirs = slice(start, start + count), slice(count)
        engine.update(
            engine.__getitem__(made, mine), engine.__getitem__(source, theirs), inplace=True
        )
    before = roots_at(place)
    writer.commit(segments, tree, sealed=False)
    freeze(root for root in before if root is not made)


_RESIZED: Final = frozenset(("td", "class", "tensor", "data"))
"""The kinds of nodes whose rows are those of tensors."""


def _with_rows(td: AbstractContainer, rows: int, path: Path) -> AbstractContainer:
    """Return a container of the structure of another with a number of rows, without memory."""
    batch = td._kd_desc.batch
    kinds = set(_kinds_in(Encoder().node_of(td)))
    if not batch or not kinds <= _RESIZED:
        why = "it has no batch" if not batch else "not all values of its rows are in tensors"
        raise InvalidValue(
            f"the rows of the arena `{path}` cannot be resized: {why}. Call `kd_core.store.seal`, "
            "which makes it a store that takes such rows, or write a new arena with `memmap`."
        )
    return td._kd_map_each(
        lambda leaf: leaf.new_zeros(()).expand(rows, *leaf.shape[1:]),
        lambda sizes: (rows, *sizes[1:]),
    )


def _kinds_in(node: Json) -> Iterator[str]:
    """Yield the kind of a node and of those below it."""
    [(kind, value)] = node.items()
    yield kind
    if kind in ("td", "class"):
        level = value[2] if kind == "class" else value
        for _, inner in level["entries"]:
            yield from _kinds_in(inner)


def fill(descriptor: int, encoder: Encoder, layout: Layout, filled: bool) -> Segment:
    """Write the tensors of an encoder to a new file, or allocate it for them."""
    if filled:
        files.write(descriptor, layout.header)
        for piece in data_of(encoder.tensors, layout):
            files.write(descriptor, piece)
    else:
        files.allocate(descriptor, layout.size)
        files.write(descriptor, layout.header, 0)
        for name in encoder.rows:
            alone = layout_of({name: encoder.specs[name]})
            for piece in data_of(encoder.tensors, alone):
                files.write(descriptor, piece, layout.starts[name])
    return Segment("", layout.size, [])


def load(path: Path | str) -> AbstractContainer:
    """Return the container in a store; writes to its tensors go to the file.

    A saved store becomes an arena: its checksums are dropped, since they would be wrong soon.
    What this process must not write to is mapped copy on write.
    """
    try:
        return load_open(path)
    except _Sealed:
        pass
    try:
        _open_for_writing(Path(path))
    except OSError as error:
        if error.errno not in (EACCES, EPERM, EROFS):
            raise
        return directory.load(Path(path))
    return load_open(path)


class _Sealed(FormatError):
    """The tensors of a store must not change."""


@without_collection
def load_open(path: Path | str) -> AbstractContainer:
    """Return the container in an arena; writes to its tensors go to the file.

    Raises:
        FormatError: if it is sealed.
    """
    place = os.path.realpath(path)

    def mapped_segments(manifest: Manifest) -> tuple[Specs, list[MappedFile], object]:
        check_open(manifest, path)
        specs = specs_of(manifest.tree, len(manifest.segments))
        opened = [
            map_segment(folder, place, segment.name, layout_of(tensors))
            for segment, tensors in zip(manifest.segments, specs, strict=True)
        ]
        return specs, opened, manifest.tree

    with files.opened_folder(path) as folder:
        return _container(place, *reading(folder, path, mapped_segments))


def _open_for_writing(path: Path) -> None:
    """Make a saved store an arena, whose tensors may change; its files stay where they are."""
    with writing(path, create=False) as writer:
        manifest = writer.checked()
        if not manifest.sealed:
            return
        if len(parts_of(manifest.tree)) > 1:
            manifest = directory.rewrite(writer, path)  # joined parts are copies
        open_ = [segment._replace(checksums=[]) for segment in manifest.segments]
        writer.commit(open_, manifest.tree, sealed=False)


def check_open(manifest: Manifest, path: Path | str) -> None:
    """Raise `FormatError` unless the tensors of a store may change."""
    if manifest.sealed:
        raise _Sealed(
            f"`{path}` is not an arena, or it is sealed: its tensors must not change. Open it with "
            "`TensorDict.load_memmap`."
        )


def _container(
    place: str, specs: Specs, opened: list[MappedFile], tree: object
) -> AbstractContainer:
    readers: list[Reader] = [file.tensors for file in opened]
    made = Decoder(specs, readers, lambda _: device_of("cpu"), everywhere=True).container_of(tree)
    record_root(made, place)
    return made


def map_segment(folder: int, place: str, name: str, layout: Layout) -> MappedFile:
    """Map one file of an arena, so that writes go to it.

    Args:
        folder: the open directory.
        place: its absolute path.
        name: the file.
        layout: where its tensors are.
    """
    with files.opened(name, folder, writable=True) as file:
        check_header(file, layout, f"{place}/{name}")
        made = mapped(file, layout.starts, shared=True)
    record(made.memory, place, name)
    return made


def seal(path: Path) -> None:
    """Make an arena a store like a saved one, on the disk and with checksums.

    What it holds is copied to files of its own: a process that has mapped the arena, and goes on
    to write to it, damages nothing. Containers of this process refuse such a write.

    Raises:
        FormatError: if it is not an arena, or it is sealed.
    """
    with writing(path, create=False) as writer:
        manifest = writer.checked()
        if manifest.sealed:
            raise FormatError(f"`{path}` is not an arena, or it is sealed already.")
        with files.opened_folder(path) as folder:
            segments = [_sealed(folder, segment, writer) for segment in manifest.segments]
        writer.commit(segments, manifest.tree)
        writer.drop(manifest.segments)
    freeze(roots_at(os.path.realpath(path)))


def _sealed(folder: int, segment: Segment, writer: Writer) -> Segment:
    """Copy a segment of an arena, and return the copy."""
    with files.opened(segment.name, folder) as file:

        def copy(descriptor: int) -> Segment:
            blocks = (files.read(file, place, BLOCK) for place in range(0, file.size, BLOCK))
            pieces = reported(blocks, file.size, "copy", flushed=True)
            return Segment("", file.size, checksums_of(written(descriptor, pieces)))

        return writer.add_segment(copy)


class MappedLeaf:
    """A tensor of an arena, on its way to another process of this program.

    It is rebuilt as a view of the same file.
    """

    def __init__(self, leaf: Tensor) -> None:
        place = place_of(leaf)
        assert place is not None
        start = leaf.data_ptr() - place.address
        shape, stride = tuple(leaf.shape), leaf.stride()
        self._state = (place.path, place.file, start, leaf.dtype, shape, stride)

    def __reduce__(self) -> tuple[object, ...]:
        return restore_mapped, self._state


def restore_mapped(
    path: str,
    file: str,
    start: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """Rebuild a tensor of an arena; called in another process of the same program."""
    memory = memory_of(path, file)
    if memory is None:
        with (
            files.opened_folder(path) as folder,
            files.opened(file, folder, writable=True) as found,
        ):
            memory = mmap.mmap(found.descriptor, found.size, access=mmap.ACCESS_WRITE)
        record(memory, path, file)
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=start)
    return flat.as_strided(tuple(shape), tuple(stride))


# Adding entries to an arena, and seeing those that other processes added.
#
# An entry is a file of its own, which the next manifest of the arena names beside the others: what
# is mapped already stays where it is.

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
        raise _is_in_arena(keys, path)
    desc = level._kd_desc
    if not leaf_fits(leaf, desc):
        shape = (leaf.size(0),) if leaf.is_nested else leaf.shape
        raise batch_does_not_fit(format_key(keys), desc.batch, shape)
    encoder = Encoder()
    node = encoder.leaf_node(leaf, keys)
    layout = layout_of(encoder.specs)
    with writing(path, create=False) as writer:
        manifest = writer.checked()
        check_open(manifest, path)
        _check_same_arena(td, manifest, path)
        count = len(manifest.segments)
        encoder.move_to(count)
        _insert(manifest.tree, keys, node, path)
        segment = writer.add_arena(lambda fd: fill(fd, encoder, layout, filled))
        with files.opened_folder(path) as folder:
            opened = map_segment(folder, f"{path}", segment.name, layout)
        specs: Specs = [*({} for _ in range(count)), encoder.specs]
        made = Decoder(specs, [opened.tensors] * len(specs)).any_leaf(node)
        with unchanged_on_error(td):
            set_entry(td, keys, made)
            writer.commit([*manifest.segments, segment], manifest.tree, sealed=False)
    return made


def refresh(td: AbstractContainer) -> None:
    """Add the entries to a container that its arena has by now.

    Raises:
        InvalidValue: if the container is not that of an arena.
    """
    take_new(td, load_open(_path_of(td)))


def take_new(td: AbstractContainer, made: AbstractContainer) -> None:
    """Add the entries to a container that another one of its structure has besides."""
    for key, value in made._kd_entries.items():
        mine = td._kd_entries.get(key)
        if mine is None:
            set_entry(td, (key,), value)
        elif isinstance(mine, AbstractContainer) and isinstance(value, AbstractContainer):
            take_new(mine, value)


def _path_of(td: AbstractContainer) -> Path:
    path = root_of(td)
    if path is None:
        raise InvalidValue(
            "only the container that `memmap`, `memmap_`, `memmap_like` or `load_memmap` returned "
            "has an arena to which entries are added, got another one. Keys may be nested: call "
            "the method on the outer container."
        )
    return Path(path)


def _is_in_arena(keys: Keys, path: Path) -> KeyCollision:
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
                raise _is_in_arena(keys, path)
            entries[key] = leaf
        elif key not in entries:
            entries[key] = {"td": {**level, "entries": []}}
        level["entries"] = [list(pair) for pair in entries.items()]
        node = entries[key]


def set_entry(td: AbstractContainer, keys: Keys, value: Entry) -> None:
    """Set an entry of a container whose own lock, if any, is kept."""
    reason = td._kd_desc.lock
    if reason is not None:
        unlock(td)
    try:
        level = td
        for key in keys[:-1]:
            if key not in level._kd_entries:
                level._kd_set_entry(key, registry.make_dense({}, level._kd_desc))
            level = level_at(level, (key,))
        level._kd_set_entry(keys[-1], value)
    finally:
        relock(td, reason)
