"""The directory form of a store: saving and loading."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kd_core._descriptor import device_of
from kd_core._errors import FormatError, KdError
from kd_core._store import files
from kd_core._store.codec import (
    LEVELS,
    MISSHAPEN,
    Decoder,
    Encoder,
    Specs,
    check_fits,
    check_parts,
    on_device_of,
    parts_of,
    specs_of,
    wanted_of,
)
from kd_core._store.commit import (
    Joiner,
    StoreInfo,
    Writer,
    info_of,
    read_manifest,
    reading,
    writing,
)
from kd_core._store.manifest import RESTORE, Manifest, Segment
from kd_core._store.segments import (
    MappedFile,
    check_header,
    checksums_of,
    data_of,
    layout_of,
    mapped,
    stored_checksums,
    without_collection,
    written,
)

if TYPE_CHECKING:
    from kd_core._protocol import AbstractContainer
    from kd_core._store.codec import Json
    from kd_core._types import NestedKey


def save(td: AbstractContainer, path: Path, durable: bool = True) -> None:
    """Write a container to a directory, in place of what the store there holds.

    Args:
        td: the container.
        path: the directory.
        durable: wait until it is on the disk.
    """
    encoder = Encoder()
    tree = encoder.node_of(td)
    with writing(path) as writer:
        writer.durable = durable
        filled = encoder.specs
        segments = [writer.add_segment(lambda fd: _fill(fd, encoder))] if filled else []
        writer.commit(segments, tree)


def append(td: AbstractContainer, path: Path) -> None:
    """Add rows to a store; to an empty directory the container is saved.

    Raises:
        FormatError: if the manifest of the store is damaged.
        InvalidValue: if the rows do not fit those of the store.
    """
    encoder = Encoder()
    tree = encoder.node_of(td)
    with writing(path) as writer:
        writer.check_readable()  # else the rows that it names would be removed
        current = writer.current
        segments: list[Segment] = []
        if current is not None:
            check_sealed(current, path)
            encoder.move_to(len(current.segments))
            parts = parts_of(current.tree)
            _check_fits(tree, parts[0], path)
            on_device_of(tree, parts[0])
            tree = {"cat": [*parts, tree]}
            segments = current.segments
        if encoder.specs:
            segments = [*segments, writer.add_segment(lambda fd: _fill(fd, encoder))]
        writer.commit(segments, tree)


def _check_fits(new: Json, old: Json, path: Path) -> None:
    try:
        check_fits(new, old)
    except KdError:
        raise
    except MISSHAPEN as error:
        raise _invalid_tree(path, error) from error


def _invalid_tree(path: Path, error: BaseException) -> FormatError:
    return FormatError(f"the tree of `{path}` is not valid: {error}. {RESTORE}")


def compact(path: Path) -> None:
    """Rewrite a store in one segment."""
    with writing(path, create=False) as writer:
        rewrite(writer, path)


def rewrite(writer: Writer, path: Path) -> Manifest:
    """Rewrite the store of a writer in one segment; return its new manifest."""
    manifest = writer.checked()
    with files.opened_folder(path) as folder:
        opened = _opened_segments(folder, path, manifest, full=True)
    encoder = Encoder()
    tree = _joined(opened.decoder(), encoder, manifest.tree, path)
    segments = [writer.add_segment(lambda fd: _fill(fd, encoder))] if encoder.specs else []
    return writer.commit(segments, tree)


def _joined(decoder: Decoder, encoder: Encoder, tree: object, path: Path) -> Json:
    parts = parts_of(tree)
    check_parts(parts)
    try:
        if not all(part.keys() <= LEVELS for part in parts):
            raise ValueError("a part is not a container")
        return Joiner(decoder, encoder).node_of(parts)
    except FormatError:
        raise
    except (KdError, *MISSHAPEN) as error:
        raise _invalid_tree(path, error) from error


def _fill(descriptor: int, encoder: Encoder) -> Segment:
    layout = layout_of(encoder.specs)
    pieces = chain([layout.header], data_of(encoder.tensors, layout))
    return Segment("", layout.size, checksums_of(written(descriptor, pieces)))


@without_collection
def load(
    path: Path, *, full: bool = False, keys: Iterable[NestedKey] | None = None
) -> AbstractContainer:
    """Return the container that a directory holds, on the CPU.

    Its tensors are mapped, copy on write.
    """
    wanted = None if keys is None else wanted_of(keys)
    with files.opened_folder(path) as folder:
        tree, segments = _current(folder, path, full)
        return segments.decoder().container_of(tree, wanted)


def _current(folder: int, path: Path, full: bool) -> tuple[object, _Segments]:
    """Return the tree of the current manifest and its segments."""
    return reading(
        folder, path, lambda found: (found.tree, _opened_segments(folder, path, found, full))
    )


class _Segments(NamedTuple):
    """The mapped segments of one manifest."""

    specs: Specs
    opened: list[MappedFile]

    def decoder(self) -> Decoder:
        """Return what builds containers from them."""
        cpu = device_of("cpu")
        return Decoder(
            self.specs, [file.tensors for file in self.opened], lambda _: cpu, everywhere=True
        )


def _opened_segments(folder: int, path: Path, manifest: Manifest, full: bool) -> _Segments:
    """Check and map all segments of a manifest."""
    if full:
        check_sealed(manifest, path)
    specs = specs_of(manifest.tree, len(manifest.segments))
    opened = []
    for segment, tensors in zip(manifest.segments, specs, strict=True):
        layout = layout_of(tensors)
        where = f"{path}/{segment.name}"
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
    return _Segments(specs, opened)


def check(path: Path) -> None:
    """Read all of a store and compare it with its checksums; classes need not be registered."""
    with files.opened_folder(path) as folder:
        _current(folder, path, full=True)


def info(path: Path) -> StoreInfo:
    """Return what the manifest in a directory says."""
    with files.opened_folder(path) as folder:
        manifest = read_manifest(folder, path)
    names = tuple(segment.name for segment in manifest.segments)
    return info_of(str(path), "directory", manifest, names)


def check_sealed(manifest: Manifest, path: Path) -> None:
    """Raise `FormatError` for an arena whose tensors may change."""
    if not manifest.sealed:
        raise FormatError(
            f"`{path}` is an arena that is not sealed: its tensors may change while they are read. "
            "Call `kd_core.store.seal` first."
        )
