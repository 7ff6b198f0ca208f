"""Changing a store: one writer at a time, and nothing visible before the last rename.

New files are written under temporary names and renamed when they are on the disk. The manifest is
the last of them, so a writer that is killed leaves the old store and some files that no manifest
names; the next writer removes them. Readers take no lock: the segments of the manifest that was
replaced stay until the next commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOENT
from pathlib import Path
from secrets import token_hex
from typing import Final, TypeVar

from kd_core._errors import FormatError, InvalidValue, listed
from kd_core._store import files
from kd_core._store.canonical import RESTORE
from kd_core._store.manifest import (
    MOST_BYTES,
    SEGMENT,
    Manifest,
    NewerFormat,
    Segment,
    manifest_of,
    text_of,
)

T = TypeVar("T")

MANIFEST: Final = "manifest.json"
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
        if "meta.json" in files.names_in(folder):
            text = "use `kd_core.convert.from_tensordict_directory` for a directory of tensordict"
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
    """A store that is locked for changes."""

    def __init__(self, folder: int, path: Path) -> None:
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
        name = f"seg-{token_hex(16)}.safetensors"
        self._made.append(name)
        return self._put(name, fill)._replace(name=name)

    def add_arena(self, fill: Callable[[int], Segment]) -> Segment:
        """Write a segment that will change, and does not have to be on the disk."""
        name = f"arena-{token_hex(16)}.safetensors"
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
        if sealed:
            if old is None or not old.sealed:
                with files.opened_folder("..", self._folder) as above:
                    files.sync(above)  # the name of the directory
            files.sync(self._folder)  # the names of the segments, before a manifest names them
        self._put(MANIFEST, lambda descriptor: files.write(descriptor, data), durable=sealed)
        if sealed:
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
        temporary = f".tmp-{token_hex(16)}"
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
    names = files.names_in(folder)
    if not create and MANIFEST not in names:
        read_manifest(folder, path)  # which says what is missing
    strange = [name for name in names if not is_own(name)]
    if strange and (MANIFEST not in names or _current(folder, path) is None):
        raise InvalidValue(
            f"`{path}` must be an empty directory or a store, got one with {listed(strange, 3)}. "
            "Choose another path."
        )
