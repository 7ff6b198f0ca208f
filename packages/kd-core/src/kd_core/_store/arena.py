"""Arenas: stores whose tensors are filled in place, by several processes, until they are sealed.

The file of an arena is allocated in full when it is created, so that writes through a mapping
cannot find the disk full. Until it is sealed it has no checksums, and what is in it after the
machine stopped is what the system had written by then.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from kd_core._errors import FormatError
from kd_core._store import files
from kd_core._store.commit import reading, writing
from kd_core._store.decoding import Decoder, Specs, specs_of
from kd_core._store.encoding import Encoder
from kd_core._store.manifest import Manifest, Segment
from kd_core._store.places import memory_of, place_of, record, record_root
from kd_core._store.segments import (
    MappedFile,
    check_header,
    data_of,
    layout_of,
    mapped,
    stored_checksums,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kd_core._protocol.primitives import AbstractContainer
    from kd_core._store.places import Place
    from kd_core._store.segments import Layout


def create(td: AbstractContainer, path: Path, *, filled: bool) -> AbstractContainer:
    """Write an arena in place of what the store at a path holds, and return it.

    Args:
        td: what it holds.
        path: the directory.
        filled: whether tensors are written; else they are zeros.
    """
    encoder = Encoder()
    tree = encoder.node_of(td)
    layout = layout_of(encoder.specs)
    with writing(path) as writer:
        segments = []
        if encoder.specs:
            segments.append(writer.add_arena(lambda fd: fill(fd, encoder, layout, filled)))
        writer.commit(segments, tree, sealed=False)
        with files.opened_folder(path) as folder:
            place = os.path.realpath(path)
            opened = [map_segment(folder, place, segment.name, layout) for segment in segments]
            return _container(place, [encoder.specs] if segments else [], opened, tree)


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
    """Return the container in an arena; writes to its tensors go to the file.

    Raises:
        FormatError: if it is not an arena, or it is sealed.
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


def check_open(manifest: Manifest, path: Path | str) -> None:
    """Raise `FormatError` unless the tensors of a store may change."""
    if manifest.sealed:
        raise FormatError(
            f"`{path}` is not an arena, or it is sealed: its tensors must not change. Read it with "
            "`load`, whose tensors may be written to in this process."
        )


def _container(
    place: str, specs: Specs, opened: list[MappedFile], tree: object
) -> AbstractContainer:
    made = Decoder(specs, [file.tensors for file in opened]).container_of(tree)
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
    """Write an arena to the disk and record its checksums; from then on it is like a saved store.

    Raises:
        FormatError: if it is not an arena, or it is sealed.
    """
    with writing(path, create=False) as writer:
        manifest = writer.checked()
        if manifest.sealed:
            raise FormatError(f"`{path}` is not an arena, or it is sealed already.")
        with files.opened_folder(path) as folder:
            segments = [_on_disk(folder, segment) for segment in manifest.segments]
        writer.commit(segments, manifest.tree)


def _on_disk(folder: int, segment: Segment) -> Segment:
    """Write a segment to the disk, and return it with its checksums."""
    with files.opened(segment.name, folder, writable=True) as file:
        files.sync(file.descriptor)
        return segment._replace(checksums=stored_checksums(file))


class MappedLeaf:
    """A tensor of an arena, on its way to another process of this program.

    It is rebuilt as a view of the same file.
    """

    def __init__(self, leaf: Tensor) -> None:
        place = cast("Place", place_of(leaf))
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
