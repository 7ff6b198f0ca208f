"""Changing a store: one writer at a time, and nothing visible before the last rename.

New files are written under temporary names and renamed when they are on the disk. The manifest is
the last of them, so a writer that is killed leaves the old store and some files that no manifest
names; the next writer removes them. Readers take no lock: the segments of the manifest that was
replaced stay until the next commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from kd_core._errors import FormatError, InvalidValue, KdError, listed
from kd_core._keys import KeyPath, format_key
from kd_core._store import files
from kd_core._store.codec import Decoder, Encoder, Json, blob_of, specs_of
from kd_core._store.manifest import (
    MOST_BYTES,
    RESTORE,
    SEGMENT,
    VERSION,
    Manifest,
    NewerFormat,
    Segment,
    manifest_of,
    parsed,
    text_of,
)

T = TypeVar("T")

MANIFEST: Final = "manifest.json"
META: Final = "meta.json"
"""What a directory of tensordict has in place of a manifest."""

LOCK: Final = ".lock"
TEMPORARY: Final = re.compile(r"\.tmp-[0-9a-f]{32}")


def is_own(name: str) -> bool:
    """Return whether a store may have a file of this name."""
    return name in (MANIFEST, LOCK) or bool(SEGMENT.fullmatch(name) or TEMPORARY.fullmatch(name))


def read_manifest(folder: int, path: Path | str) -> Manifest:
    """Return the manifest in a directory.

    Raises:
        FormatError: if it is not valid.
        FileNotFoundError: if there is none.
    """
    try:
        with files.opened(MANIFEST, folder) as file:
            # One byte more, so that a manifest beyond the limit is refused and not cut.
            data = files.read(file, 0, min(file.size, MOST_BYTES + 1))
    except FileNotFoundError:
        text = f"there is not a store: no container was saved here, which writes `{MANIFEST}`"
        if META in files.names_in(folder):
            text = "not a store. `TensorDict.load` reads a directory of tensordict; save the result"
        raise FileNotFoundError(ENOENT, text, str(path)) from None
    return manifest_of(data, f"`{path}/{MANIFEST}`")


def reading(folder: int, path: Path | str, opened: Callable[[Manifest], T]) -> T:
    """Return what a function makes of the current manifest, however often that is replaced.

    While writers commit, a file of the manifest that was read may be gone: then the new manifest
    is read.

    Args:
        folder: the open directory.
        path: its path, for messages.
        opened: opens the files that a manifest names.
    """
    seen = ""
    while True:
        manifest = read_manifest(folder, path)
        try:
            return opened(manifest)
        except FileNotFoundError as error:
            if manifest.digest == seen:
                raise FormatError(
                    f"the manifest of `{path}` names `{error.filename}`, which does not exist. "
                    f"{RESTORE}"
                ) from None
            seen = manifest.digest


class Writer:
    """A store that is locked for changes.

    Attributes:
        durable: whether a commit waits until it is on the disk.
    """

    def __init__(self, folder: int, path: Path) -> None:
        self.durable = True
        self._folder = folder
        self._made: list[str] = []
        self._path = path
        self.found = files.names_in(folder)
        self.current: Manifest | None = None
        if MANIFEST in self.found:
            self.current = _current(folder, path)

    def check_readable(self) -> None:
        """Raise `FormatError` if there is a manifest, and it is damaged."""
        if MANIFEST in self.found:
            self.checked()

    def checked(self) -> Manifest:
        """Return the manifest.

        Raises:
            FormatError: if it is damaged.
            FileNotFoundError: if there is none.
        """
        return self.current or read_manifest(self._folder, self._path)

    def add_segment(self, fill: Callable[[int], Segment]) -> Segment:
        """Write a segment, which no manifest names yet.

        Args:
            fill: writes the content to a descriptor and returns what a manifest says of it.
        """
        name = f"seg-{os.urandom(16).hex()}.safetensors"
        self._made.append(name)
        return self._put(name, fill, durable=self.durable)._replace(name=name)

    def add_arena(self, fill: Callable[[int], Segment]) -> Segment:
        """Write a segment that will change, and does not have to be on the disk."""
        name = f"arena-{os.urandom(16).hex()}.safetensors"
        self._made.append(name)
        return self._put(name, fill, durable=False)._replace(name=name)

    def commit(self, segments: list[Segment], tree: object, *, sealed: bool = True) -> Manifest:
        """Replace the manifest: from here on readers see the new content.

        Args:
            segments: the files of the new content.
            tree: its node.
            sealed: whether they will not change; then they must be on the disk first.
        """
        old = self.current
        generation, parent = (1, None) if old is None else (old.generation + 1, old.digest)
        new = Manifest(generation, parent, segments, tree, sealed)
        data = text_of(new)
        waits = sealed and self.durable
        if waits:
            if old is None or not old.sealed:
                with files.opened_folder("..", self._folder) as above:
                    files.sync(above)  # the name of the directory
            files.sync(self._folder)  # the names of the segments, before a manifest names them
        self._put(MANIFEST, lambda descriptor: files.write(descriptor, data), durable=waits)
        if waits:
            files.sync(self._folder)
        self.current = new
        kept = {MANIFEST, LOCK} | {segment.name for segment in segments}
        kept |= {segment.name for segment in old.segments} if old else set()
        self._remove(name for name in self.found if name not in kept)
        return new

    def drop(self, segments: Iterable[Segment]) -> None:
        """Remove files that the manifest does not name any more, before the next commit does."""
        self._remove(segment.name for segment in segments)

    def sweep(self) -> None:
        """Remove the temporary files of writers that were killed."""
        self._remove(name for name in self.found if TEMPORARY.fullmatch(name))

    def undo(self) -> None:
        """Remove the files of a commit that failed, unless it failed after the last rename."""
        found = MANIFEST in files.names_in(self._folder)
        current = _current(self._folder, self._path) if found else None
        named = {segment.name for segment in current.segments} if current else set()
        self._remove(name for name in self._made if name not in named)

    def _put(self, name: str, fill: Callable[[int], T], *, durable: bool = True) -> T:
        temporary = f".tmp-{os.urandom(16).hex()}"
        descriptor = files.create(temporary, self._folder)
        self._made.append(temporary)
        try:
            result = fill(descriptor)
            if durable:
                files.sync(descriptor)
        finally:
            files.close(descriptor)
        files.rename(temporary, name, self._folder)
        return result

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            if is_own(name):
                with suppress(OSError):  # the next writer tries again
                    files.remove(name, self._folder)


def _current(folder: int, path: Path) -> Manifest | None:
    """Return the manifest that is to be replaced; a damaged one is replaced as if it were none."""
    try:
        return read_manifest(folder, path)
    except NewerFormat:
        raise
    except FormatError:
        return None


@contextmanager
def writing(path: Path, *, create: bool = True) -> Iterator[Writer]:
    """Open a store for changes.

    Args:
        path: its directory.
        create: create the directory if there is none; else there must be a store.

    Raises:
        InvalidValue: if there is something else at the path.
        FileNotFoundError: if there must be a store, and there is none.
    """
    if not path.exists():
        if not create:
            raise FileNotFoundError(ENOENT, "there is not a store", str(path))
        files.make_folder(path)
    elif not path.is_dir():
        raise InvalidValue(
            f"`{path}` must be the directory of a store or a new name, got a file. Choose another "
            "path, or one that ends in `.safetensors` for a single file."
        )
    with files.opened_folder(path) as folder:
        _check_is_store(folder, path, create)
        with files.locked(LOCK, folder):
            writer = Writer(folder, path)
            writer.sweep()
            try:
                yield writer
            except BaseException:
                writer.undo()
                raise


def _check_is_store(folder: int, path: Path, create: bool) -> None:
    """Raise unless a store may be here: beside other files it may, in place of them not."""
    names = files.names_in(folder)
    if not create and MANIFEST not in names:
        read_manifest(folder, path)  # which says what is missing
    strange = [name for name in names if not is_own(name)]
    if strange and MANIFEST in names and _current(folder, path) is None:
        raise InvalidValue(
            f"`{path}` must not have a `{MANIFEST}` of something else, got one beside "
            f"{listed(strange, 3)}. Choose another path."
        )


# The parts of a store as one, on its nodes: classes and types need not be registered.


class Joiner:
    """Joins nodes whose rows fit, as `check_fits` says.

    Args:
        decoder: reads the tensors of the nodes.
        encoder: takes the tensors of the result.
    """

    def __init__(self, decoder: Decoder, encoder: Encoder) -> None:
        self._decoder = decoder
        self._encoder = encoder
        self._joined: dict[tuple[object, ...], Tensor] = {}

    def node_of(self, nodes: list[Json], path: KeyPath = ()) -> Json:
        """Return the node of rows, joined along their first dimension; of one node a copy."""
        [kind] = nodes[0]
        values: list[Any] = [node[kind] for node in nodes]
        match kind:
            case "td":
                return {kind: self._level(values, path)}
            case "class":
                name, version, _ = values[0]
                return {kind: [name, version, self._level([level for *_, level in values], path)]}
            case "lazy":
                members = [self.node_of([member], path) for v in values for member in v["members"]]
                return {kind: {**values[0], "members": members}}
            case "tensor":
                return self._encoder.add(self._tensor(nodes), path)
            case "jagged":
                return {kind: self._jagged(values, path)}
            case "strided":
                parts = [[value[at] for value in values] for at in range(2)]
                return {kind: [self.node_of(part, path) for part in parts]}
            case "rows":
                return {kind: {**_batch_of(values), "values": self._rows(values, path)}}
            case "unbatched":  # of one part, as those below: no rows are appended to such
                return {kind: self.node_of(values[:1], path)}
            case "object":
                tensors = [self.node_of([each], path) for each in values[0]["tensors"]]
                return {kind: {**values[0], "tensors": tensors}}
            case _:
                return {kind: {**values[0], **_batch_of(values)}}

    def _level(self, levels: list[Any], path: KeyPath) -> Json:
        others = [dict(level["entries"]) for level in levels]
        entries = [
            [key, self.node_of([entries[key] for entries in others], (*path, key))]
            for key, _ in levels[0]["entries"]
        ]
        return {**levels[0], **_batch_of(levels), "entries": entries}

    def _tensor(self, nodes: list[Json]) -> Tensor:
        leaves = [self._decoder.leaf_of(node) for node in nodes]
        if len(leaves) == 1:
            return leaves[0]
        return self._once(("tensor", *map(id, leaves)), lambda: _cat(leaves))

    def _once(self, what: tuple[object, ...], join: Callable[[], Tensor]) -> Tensor:
        """Return what is joined; what is under two keys stays one."""
        if what not in self._joined:
            self._joined[what] = join()
        return self._joined[what]

    def _rows(self, values: list[Any], path: KeyPath) -> Json:
        blobs = [self._decoder.leaf_of(value["values"]) for value in values]
        if len(blobs) == 1:
            return self._encoder.add(blobs[0], path)
        rows: list[object] = []
        for blob in blobs:
            rows += parsed(blob.numpy().tobytes(), "non-tensor data")
        return self._encoder.add(blob_of(rows), path)

    def _jagged(self, values: list[Any], path: KeyPath) -> list[object]:
        *parts, dim = values[0]
        if len(values) == 1:
            return [None if part is None else self.node_of([part], path) for part in parts] + [dim]
        data, offsets = ([self._decoder.leaf_of(value[at]) for value in values] for at in (0, 1))
        bounds = tuple(map(id, offsets))
        joined = [
            self._once((dim, *map(id, data), *bounds), lambda: _cat_filled(data, offsets, dim - 1)),
            self._once(("offsets", *bounds), lambda: _cat_offsets(offsets)),
        ]
        return [*(self._encoder.add(part, path) for part in joined), None, dim]


def _batch_of(values: list[Any]) -> Json:
    if "batch" not in values[0] or len(values) == 1:
        return {key: values[0][key] for key in ("batch", "names", "device") if key in values[0]}
    rest = values[0]["batch"][1:]
    return {**_batch_of(values[:1]), "batch": [sum(v["batch"][0] for v in values), *rest]}


def _cat_filled(data: list[Tensor], offsets: list[Tensor], dim: int) -> Tensor:
    """Return the values of the rows of jagged tensors, without those in front and behind."""
    parts = zip(data, offsets, strict=True)
    return torch.cat(
        [part.narrow(dim, int(ends[0]), int(ends[-1] - ends[0])) for part, ends in parts], dim
    )


def _cat_offsets(offsets: list[Tensor]) -> Tensor:
    joined, end = [offsets[0][:1] * 0], 0
    for ends in offsets:
        joined.append(ends[1:] - ends[0] + end)
        end += int(ends[-1] - ends[0])
    return torch.cat(joined)


def _cat(leaves: list[Tensor]) -> Tensor:
    """Return rows of contiguous tensors of one dtype as one tensor, also where torch cannot."""
    octets = torch.cat([leaf.view(-1).view(torch.uint8) for leaf in leaves])
    rows = sum(len(leaf) for leaf in leaves)
    return octets.view(leaves[0].dtype).view(rows, *leaves[0].shape[1:])


# What a store holds, read from its manifest alone.


@dataclass(frozen=True)
class StoreInfo:
    """What a store holds.

    Attributes:
        path: where it is.
        form: `"directory"`, `"file"`, or `"safetensors"` for a file of another origin.
        version: the version of the format; 0 for a file of another origin.
        generation: how often the store was saved to.
        files: the files that hold tensors.
        nbytes: the bytes of these files.
        parts: how many containers were saved and appended.
        leaves: the number of tensors.
        lines: one line for each entry, indented by its depth.

    Example:
        >>> from kd_core import TensorDict, store
        >>> _ = TensorDict({"a": [1, 2], "n": {"w": "word"}}, [2]).save("info.kd")
        >>> print(store.inspect("info.kd"))
        info.kd: directory, format 1, generation 1, 1 file, 80 bytes, 1 part, 1 tensor
        td [2]
          a: int64 [2]
          n: td [2]
            w: data
    """

    path: str
    form: str
    version: int
    generation: int
    files: tuple[str, ...]
    nbytes: int
    parts: int
    leaves: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        counts = [
            _counted(len(self.files), "file"),
            _counted(self.nbytes, "byte"),
            _counted(self.parts, "part"),
            _counted(self.leaves, "tensor"),
        ]
        head = f"{self.path}: {self.form}, format {self.version}, generation {self.generation}"
        return "\n".join([f"{head}, {', '.join(counts)}", *self.lines])


def info_of(path: str, form: str, manifest: Manifest, names: tuple[str, ...]) -> StoreInfo:
    """Return what the manifest of a store says.

    Args:
        path: where the store is.
        form: its form.
        manifest: its manifest.
        names: the files that hold tensors.

    Raises:
        FormatError: if the tree of the manifest is not valid.
    """
    tree: Json = manifest.tree
    try:
        specs = specs_of(tree, max(len(manifest.segments), 1))
        lines = tuple(_lines(tree, "", 0))
        parts = len(tree["cat"]) if "cat" in tree else 1
    except KdError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"the tree of `{path}` is not valid: {error}. {RESTORE}") from error
    return StoreInfo(
        path,
        form,
        VERSION,
        manifest.generation,
        names,
        sum(segment.size for segment in manifest.segments),
        parts,
        sum(map(len, specs)),
        lines,
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _lines(node: Json, name: str, depth: int) -> Iterator[str]:
    """Yield one line for a node, and one for each below it."""
    [(kind, value)] = node.items()
    start = f"{'  ' * depth}{name}: " if name else "  " * depth
    match kind:
        case "tensor":
            yield f"{start}{value[2]} {value[3]}"
        case "jagged":
            yield f"{start}jagged {value[0]['tensor'][2]}, {value[1]['tensor'][3][0] - 1} rows"
        case "strided":
            yield f"{start}nested {value[0]['tensor'][2]}, {value[1]['tensor'][3][0]} rows"
        case "unbatched":
            for line in _lines(value, "", 0):
                yield f"{start}unbatched {line}"
        case "data" | "object" | "rows":
            yield f"{start}{kind}"
        case "lazy":
            yield f"{start}stack of {len(value['members'])} along dimension {value['dim']}"
            for member in value["members"]:
                yield from _lines(member, "", depth + 1)
        case "cat":
            yield f"{start}{len(value)} parts, of which the first is"
            yield from _lines(value[0], name, depth + 1)
        case _:
            level = value[2] if kind == "class" else value
            title = f"{value[0]} (version {value[1]})" if kind == "class" else kind
            yield f"{start}{title} {level['batch']}"
            for key, inner in level["entries"]:
                yield from _lines(inner, format_key(key).strip("`") or '""', depth + 1)
