"""The single file form: a file of safetensors with a manifest in its metadata.

The names of the tensors are the keys joined by dots, where that is clear, so that other tools show
them. A file of another origin is read as a flat container.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kd_core._errors import FormatError, InvalidValue
from kd_core._store import files
from kd_core._store.codec import Decoder, Encoder, Specs, place_of, specs_of, wanted_of
from kd_core._store.commit import StoreInfo, info_of
from kd_core._store.manifest import (
    RESTORE,
    Manifest,
    Segment,
    is_manifest,
    manifest_of,
    parsed,
    text_of,
)
from kd_core._store.mapped_tensor import FOREIGN, sweep, temporary
from kd_core._store.segments import (
    BLOCK,
    Layout,
    Spec,
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
    from kd_core._types import NestedKey


METADATA: Final = "kd"
_LARGEST_HEADER: Final = 100_000_000
"""Bytes; the limit of safetensors."""


def save(td: AbstractContainer, path: Path, durable: bool = True) -> None:
    """Write a container to one file, in place of what is there.

    Args:
        td: the container.
        path: the file.
        durable: wait until it is on the disk.
    """
    if path.is_dir():
        raise InvalidValue(f"`{path}` must be a file, got a directory. Choose another path.")
    writing = _Writing(td, path)
    with files.opened_folder(path.parent) as folder:
        sweep(folder, path.name)
        with temporary(path.name, folder) as (name, descriptor):
            writing.fill(descriptor)
            if durable:
                files.sync(descriptor)
            files.rename(name, path.name, folder)
        if durable:
            files.sync(folder)


class _Writing:
    """Writes a file in one pass, although its header holds the checksums of what follows it.

    Only the number of their digits matters for where the data starts, and it is mostly as expected:
    the header grows in steps of 64 bytes. If it is not, the data is written once more.
    """

    def __init__(self, td: AbstractContainer, path: Path) -> None:
        self._encoder = Encoder(_Names())
        self._tree = self._encoder.node_of(td)
        self._path = path
        self._size = sum(spec.nbytes for spec in self._encoder.specs.values())
        self._layout = self._layout_with(_likely_checksums(self._size))

    def fill(self, descriptor: int) -> None:
        """Write header and data to a new file."""
        while True:
            start = len(self._layout.header)
            files.write(descriptor, bytes(start), 0)
            pieces = data_of(self._encoder.tensors, self._layout)
            self._layout = self._layout_with(checksums_of(written(descriptor, pieces)))
            if len(self._layout.header) == start:
                break
            files.truncate(descriptor, 0)
        files.write(descriptor, self._layout.header, 0)

    def _layout_with(self, checksums: list[int]) -> Layout:
        specs = self._encoder.specs
        segments = [Segment("", self._size, checksums)] if specs else []
        text = text_of(Manifest(1, None, segments, self._tree))
        layout = layout_of(specs, {METADATA: text.decode("ascii")})
        _check_header_size(len(layout.header), self._path)
        return layout


def _likely_checksums(size: int) -> list[int]:
    """Return checksums with as many digits as those of random data have on average."""
    return [10**8 if block % 4 == 3 else 10**9 for block in range(-(-size // BLOCK))]


class _Names:
    """The names of tensors in a single file: keys joined by dots, where that is clear."""

    def __init__(self) -> None:
        self._taken = {"__metadata__"}

    def __call__(self, path: tuple[str, ...], number: int) -> str:
        """Return a name that no other tensor has."""
        name = ".".join(path)
        if not name.isprintable() or not name or name in self._taken:
            name = f"t{number}"
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


@without_collection
def load(
    path: Path, *, full: bool = False, keys: Iterable[NestedKey] | None = None
) -> AbstractContainer:
    """Return the container that a file holds; its tensors are mapped, copy on write."""
    wanted = None if keys is None else wanted_of(keys)
    with files.opened(path, None) as file:
        _, manifest, specs, starts = _content_of(file, path, full)
        data = mapped(file, starts)
    return Decoder(specs, [data.tensors]).container_of(manifest.tree, wanted)


def is_saved(path: Path) -> bool:
    """Return whether a file is one that `save` wrote."""
    with files.opened(path, None) as file:
        try:
            metadata = _header_of(file, path).get("__metadata__")
        except FormatError:
            return False
    return isinstance(metadata, dict) and METADATA in metadata


def check(path: Path) -> None:
    """Read all of a file and compare it with its checksums; classes need not be registered."""
    with files.opened(path, None) as file:
        _content_of(file, path, full=True)


def info(path: Path) -> StoreInfo:
    """Return what the metadata or the header of a file says."""
    with files.opened(path, None) as file:
        form, manifest, *_ = _content_of(file, path, full=False)
    return info_of(str(path), form, manifest, (path.name,))


class _Content(NamedTuple):
    """What a file holds."""

    form: str
    manifest: Manifest
    specs: Specs
    starts: Mapping[str, int]
    """The first byte of each tensor."""


def _content_of(file: files.OpenFile, path: Path, full: bool) -> _Content:
    """Check a file, and return what it holds."""
    header = _header_of(file, path)
    metadata = header.get("__metadata__")
    text = metadata.get(METADATA) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        if isinstance(metadata, dict) and any(map(is_manifest, metadata.values())):
            raise FormatError(f"the metadata of `{path}` is damaged. {RESTORE}")
        return _foreign(file, header, path)
    if not text.isascii():
        raise FormatError(f"the metadata of `{path}` must be ASCII. {RESTORE}")
    manifest = manifest_of(text.encode("ascii"), f"the metadata of `{path}`")
    specs = specs_of(manifest.tree, 1)
    layout = layout_of(specs[0], {METADATA: text})
    check_header(file, layout, str(path))
    start = len(layout.header)
    _check_segment(manifest, file.size - start, path, there=bool(specs[0]))
    if full and manifest.segments:
        [segment] = manifest.segments
        if stored_checksums(file, start) != segment.checksums:
            raise FormatError(f"`{path}` is damaged: a checksum does not match. {RESTORE}")
    return _Content("file", manifest, specs, layout.starts)


def _check_segment(manifest: Manifest, size: int, path: Path, *, there: bool) -> None:
    """Check that a manifest describes the data of a file as one segment, if there are tensors."""
    found = [(segment.name, segment.size) for segment in manifest.segments]
    if found != [("", size)] * there or not manifest.sealed:
        raise FormatError(f"the metadata of `{path}` does not describe its data. {RESTORE}")


def _check_header_size(size: int, path: Path) -> None:
    if size > _LARGEST_HEADER:
        raise InvalidValue(
            f"the header of `{path}` must have at most {_LARGEST_HEADER} bytes, got {size}. Save "
            "to a directory, whose name does not end in `.safetensors`."
        )


_READERS: Final = {
    **dict.fromkeys((".onnx", ".pt2", ".pte", ".tflite"), "`kd_export.open`"),
    **dict.fromkeys((".h5", ".hdf5"), "`TensorDict.from_h5`"),
    **dict.fromkeys((".pkl", ".pickle"), "`pickle.load`, if you trust it"),
    **dict.fromkeys((".npz", ".npy"), "`numpy.load`"),
    ".parquet": "`TensorDict.from_parquet`",
    ".csv": "`TensorDict.from_csv`",
    ".json": "`TensorDict.from_json`",
}
"""By suffix: what reads files of other formats."""


def _header_of(file: files.OpenFile, path: Path) -> dict[str, object]:
    start = files.read(file, 0, 8)
    length = int.from_bytes(start, "little")
    if start.startswith(b"PK\x03\x04"):
        raise FormatError(
            f"`{path}` is an archive, as `torch.save` writes it, not a file of safetensors. Read "
            "it with `torch.load`, and write it with `save`."
        )
    if file.size < 8 or not 2 <= length <= min(_LARGEST_HEADER, file.size - 8):
        reader = _READERS.get(path.suffix)
        hint = f"Check the path. {RESTORE}" if reader is None else f"Read it with {reader}."
        raise FormatError(f"`{path}` is not a file of safetensors. {hint}")
    header = parsed(files.read(file, 8, length), f"the header of `{path}`", "utf-8")
    if not isinstance(header, dict):
        raise FormatError(f"the header of `{path}` must be an object of JSON. {RESTORE}")
    return header


def _foreign(file: files.OpenFile, header: dict[str, object], path: Path) -> _Content:
    """Return a file of another origin as a flat container."""
    start = 8 + int.from_bytes(files.read(file, 0, 8), "little")
    header.pop("__metadata__", None)
    rows = {name: _row_of(row, name) for name, row in header.items()}
    end = 0
    for name, (_, first, last) in sorted(rows.items(), key=lambda item: item[1][1:]):
        if first != end:
            raise FormatError(
                f"tensor {name!r} of `{path}` does not start at byte {end}. {RESTORE}"
            )
        end = last
    if start + end != file.size:
        raise FormatError(f"`{path}` must have {start + end} bytes, got {file.size}. {RESTORE}")
    entries = [[name, {"tensor": place_of(0, name, spec)}] for name, (spec, _, _) in rows.items()]
    tree = {"td": {"batch": [], "entries": entries}}
    starts = {name: start + first for name, (_, first, _) in rows.items()}
    manifest = Manifest(0, None, [Segment("", end, [])], tree)
    return _Content("safetensors", manifest, specs_of(tree, 1), starts)


def _row_of(row: object, name: str) -> tuple[Spec, int, int]:
    match row:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [first, last],
        } if dtype in FOREIGN and all(map(_is_size, (first, last, *shape))):
            spec = Spec(FOREIGN[dtype], tuple(shape))
            if last - first == spec.nbytes:
                return spec, first, last
    raise FormatError(f"tensor {name!r} has {str(row)[:80]!r}, which is not valid. {RESTORE}")


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0
