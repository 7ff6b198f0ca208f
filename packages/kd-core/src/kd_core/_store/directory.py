"""The directory form of a store: saving and loading."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kd_core._errors import FormatError, listed
from kd_core._store import files
from kd_core._store.canonical import RESTORE
from kd_core._store.commit import is_own, read_manifest, writing
from kd_core._store.decoding import Decoder, specs_of, wanted_of
from kd_core._store.encoding import Encoder
from kd_core._store.manifest import Manifest, Segment
from kd_core._store.segments import (
    MappedFile,
    check_header,
    checksums_of,
    data_of,
    layout_of,
    mapped,
    stored_checksums,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kd_core._protocol.primitives import AbstractContainer
    from kd_core._store.segments import Spec
    from kd_core._types import NestedKey


def save(td: AbstractContainer, path: Path) -> None:
    """Write a container to a directory, in place of what the store there holds."""
    encoder = Encoder()
    tree = encoder.node_of(td)
    with writing(path) as writer:
        filled = encoder.specs
        segments = [writer.add_segment(lambda fd: _fill(fd, encoder))] if filled else []
        writer.commit(segments, tree)


def _fill(descriptor: int, encoder: Encoder) -> Segment:
    layout = layout_of(encoder.specs)

    def pieces() -> Iterable[bytes | memoryview]:
        yield layout.header
        for piece in data_of(encoder.tensors, layout):
            files.write(descriptor, piece)
            yield piece

    files.write(descriptor, layout.header)
    return Segment("", layout.size, checksums_of(pieces()))


def load(
    path: Path, *, full: bool = False, keys: Iterable[NestedKey] | None = None
) -> AbstractContainer:
    """Return the container that a directory holds; its tensors are mapped, copy on write.

    While writers commit, a segment of the manifest that was read may be gone: then the new manifest
    is read.
    """
    wanted = None if keys is None else wanted_of(keys)
    with files.opened_folder(path) as folder:
        tree, segments = _current(folder, path, full)
        if full:
            _check_names(folder, path)
        return Decoder(segments).container_of(tree, wanted)


def _current(folder: int, path: Path, full: bool) -> tuple[object, _Segments]:
    """Return the tree of the current manifest and its segments, however often it is replaced."""
    seen = ""
    while True:
        manifest = read_manifest(folder, path)
        try:
            return manifest.tree, _opened_segments(folder, path, manifest, full)
        except FileNotFoundError as error:
            if manifest.digest == seen:
                raise FormatError(
                    f"the manifest of `{path}` names `{error.filename}`, which does not exist. "
                    f"{RESTORE}"
                ) from None
            seen = manifest.digest


class _Segments:
    """The mapped segments of one manifest."""

    def __init__(self, opened: list[MappedFile]) -> None:
        self._opened = opened

    def __call__(self, segment: int, name: str, spec: Spec) -> Tensor:
        """Return a tensor."""
        return self._opened[segment].tensor(name, spec)


def _opened_segments(folder: int, path: Path, manifest: Manifest, full: bool) -> _Segments:
    """Check and map all segments of a manifest."""
    specs = specs_of(manifest.tree, len(manifest.segments))
    opened = []
    for segment, tensors in zip(manifest.segments, specs, strict=True):
        layout = layout_of(tensors)
        where = f"{path / segment.name}"
        if layout.size != segment.size:
            raise FormatError(
                f"the manifest of `{path}` must give `{segment.name}` {layout.size} bytes, got "
                f"{segment.size}. {RESTORE}"
            )
        with files.opened(segment.name, folder) as file:
            check_header(file, layout, where)
            if full and stored_checksums(file) != segment.checksums:
                raise FormatError(f"`{where}` is damaged: a checksum does not match. {RESTORE}")
            opened.append(mapped(file, layout.starts))
    return _Segments(opened)


def _check_names(folder: int, path: Path) -> None:
    strange = [name for name in files.names_in(folder) if not is_own(name)]
    if strange:
        raise FormatError(
            f"`{path}` has files that are not of a store: {listed(strange)}. Move them away."
        )
