"""Directories of the layout of tensordict, which both libraries read: written under the drop-in.

A container that this layout cannot hold exactly, such as one with bytes or tuples as data, is
written as a store. New files get their names when all are written, those that describe a level
last; files that are mapped keep their content, as under any name that is replaced.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from errno import EISDIR
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor

from kd_core import _registry as registry
from kd_core._errors import FormatError, InvalidValue, KeyCollision, batch_does_not_fit
from kd_core._keys import format_key
from kd_core._leaves.loops import leaf_fits
from kd_core._protocol import AbstractContainer, lowest_level
from kd_core._store import files, foreign
from kd_core._store.codec import Encoder, dense_kind
from kd_core._store.commit import META
from kd_core._store.foreign import INSIDE, LEAF, SIZES, Meta, name_of
from kd_core._store.manifest import BY_FULL_NAME, class_defined, parsed
from kd_core._store.mapped_tensor import sweep
from kd_core._store.segments import Spec, data_of, layout_of

if TYPE_CHECKING:
    from kd_core._nodes import Entry
    from kd_core._store.codec import Json

_RESERVED: Final = frozenset(
    {"shape", "device", "_type", "_format_version", "_class", "_names", "_metadata"}
)
"""Keys that `meta.json` has for something else."""

_MOST_FILES: Final = 10_000
"""Leaves in one container: each is mapped on its own, and a process may have 65 530 maps."""


class Folder(NamedTuple):
    """A directory that is to be written."""

    meta: Meta
    leaves: dict[str, Tensor]
    """The tensors by the names of their files."""
    folders: dict[str, Folder]


class _Unfit(Exception):
    """This layout cannot hold a value exactly."""


def folder_of(td: AbstractContainer) -> Folder | None:
    """Return the directory that holds a container; `None`: the layout cannot hold it exactly."""
    encoder = Encoder()
    tree = encoder.node_of(td)
    if len(encoder.tensors) > _MOST_FILES:
        return None
    try:
        return _Planner(encoder.tensors).folder(tree)
    except _Unfit:
        return None


def _type_of(name: str) -> Meta:
    short = name.rpartition(".")[2]
    return {
        "_type": f"<class '{name}'>",
        "_format_version": 1,
        "_class": f"tensordict:{short}",
    }


_DENSE: Final = _type_of("tensordict._td.TensorDict")
_LAZY: Final = _type_of("tensordict._lazy.LazyStackedTensorDict")
_ROWS: Final = _type_of("tensordict.tensorclass.NonTensorStack")


class _Planner:
    """Makes directories of the nodes of a container.

    Args:
        tensors: those that the nodes name.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def folder(self, node: Json) -> Folder:
        """Return the directory of a level.

        Raises:
            _Unfit: if the layout cannot hold it exactly.
        """
        [(kind, value)] = node.items()
        if kind == "lazy":
            members, class_name = value["members"], None
            kinds = {member["class"][0] if "class" in member else None for member in members}
            if len(kinds) == 1 and kinds != {None}:
                [class_name] = kinds
                members = [_level_of_class(member["class"]) for member in members]
            stack = {**_LAZY, "stack_dim": value["dim"], "stack_dim_name": value["name"]}
            made = {str(place): self.folder(each) for place, each in enumerate(members)}
            return _of_class(class_name, Folder(stack, {}, made))
        if kind == "class":
            return _of_class(value[0], self.folder(_level_of_class(value)))
        if kind != "td":
            raise _Unfit
        return self._level(value)

    def _level(self, level: Json) -> Folder:
        made = Folder({}, {}, {})
        batch = level["batch"]
        for key, node in level["entries"]:
            if key in _RESERVED:
                raise _Unfit
            name = _name_of(key)
            [(kind, value)] = node.items()
            if kind == "tensor":
                _put(made, f"{name}{LEAF}", self._leaf(made, key, value))
            elif kind == "strided":
                values, sizes = (self._tensors[each["tensor"][1]] for each in value)
                if not values.numel():
                    raise _Unfit
                made.meta[key] = _about(values, tuple(sizes.shape), is_nested=True)
                _put(made, f"{name}{LEAF}", values)
                _put(made, f"{name}{SIZES}{LEAF}", sizes)
            else:
                inner = self._data(kind, value, batch) or self.folder(node)
                _put(made, name, inner)
                short = str(inner.meta["_type"]).removesuffix("'>").rpartition(".")[2]
                made.meta[key] = {"type": short}
        made.meta.update({"shape": batch, "device": "cpu", **_DENSE})
        if "names" in level:
            made.meta["_names"] = level["names"]
        return made

    def _leaf(self, made: Folder, key: str, value: list[Any]) -> Tensor:
        leaf = self._tensors[value[1]]
        made.meta[key] = _about(leaf, tuple(value[3]), is_nested=False)
        return leaf

    def _data(self, kind: str, value: Json, batch: list[int]) -> Folder | None:
        """Return the directory of data that is not a tensor; `None`: it is something else."""
        if kind == "rows" and "batch" not in value:
            blob = self._tensors[value["values"]["tensor"][1]]
            rows = [_plain(row) for row in parsed(bytes(blob.tolist()), "the rows")]
            if any(isinstance(row, list) for row in rows):  # which would be more dimensions
                raise _Unfit
            return Folder(
                {**_ROWS, "stack_dim": 0, "device": None, "data": _nested(rows, batch)}, {}, {}
            )
        if kind == "data" and "batch" not in value and value["of_batch"] == bool(batch):
            short = "MetaData" if value["constant"] else "NonTensorData"
            data = _plain(value["value"])
            name = f"<class 'tensordict.tensorclass.{short}'>"
            about = {"_type": name, "data": data, "_metadata": None, "_is_non_tensor": True}
            return Folder(about, {}, {})
        if kind in ("rows", "data"):
            raise _Unfit
        return None


def _about(leaf: Tensor, shape: tuple[int, ...], *, is_nested: bool) -> Meta:
    return {
        "device": "cpu",
        "shape": list(shape),
        "dtype": str(leaf.dtype),
        "is_nested": is_nested,
    }


def _put(made: Folder, name: str, what: Tensor | Folder) -> None:
    if name in made.leaves or name in made.folders or name in (META, INSIDE):
        raise _Unfit
    if isinstance(what, Tensor):
        if what.numel():  # else there is nothing to be mapped
            made.leaves[name] = what
    else:
        made.folders[name] = what


def _level_of_class(value: list[Any]) -> Json:
    name, version, level = value
    found = class_defined(name, version) if version == BY_FULL_NAME else None
    if found is None or issubclass(found, dense_kind()):
        raise _Unfit
    return {"td": level}


def _of_class(name: str | None, inside: Folder) -> Folder:
    """Return the directory of a tensor class, whose entries are in one of their own."""
    if name is None:
        return inside
    return Folder({"_type": f"<class '{name}'>"}, {}, {INSIDE: inside})


def _plain(value: object) -> object:
    """Return a value of which `written` made something, if JSON says the same without a tag.

    Raises:
        _Unfit: if it does not.
    """
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    pairs = value.get("d")
    if pairs is None or not all(isinstance(key, str) for key, _ in pairs):
        raise _Unfit
    return {key: _plain(each) for key, each in pairs}


def _nested(rows: list[Any], batch: list[int]) -> list[Any]:
    """Return the values of rows as lists in lists."""
    for size in reversed(batch[1:]):
        if not size:
            raise _Unfit  # how many empty lists there are says the size before
        rows = [rows[start : start + size] for start in range(0, len(rows), size)]
    return rows


def _name_of(key: str) -> str:
    """Return the name of the file or directory of a key.

    Raises:
        _Unfit: if there is none that the system takes.
    """
    name = name_of(key)
    try:
        if len(f"{name}{SIZES}{LEAF}".encode()) <= 255:
            return name
    except UnicodeEncodeError:
        pass
    raise _Unfit


def create(
    folder: Folder, path: Path, *, filled: bool, overwrite: bool
) -> AbstractContainer | None:
    """Write a directory, and return the container whose leaves are mapped from it.

    Args:
        folder: what it holds.
        path: the directory.
        filled: whether tensors are written; else they are zeros.
        overwrite: whether it replaces what is there. Else one of the same structure is opened with
            all that it holds, and `None` is returned for another one.
    """
    if not overwrite and foreign.is_foreign(path):
        return foreign.load(path, shared=True) if _is_there(folder, path) else None
    write(folder, path, filled=filled, durable=False)
    return foreign.load(path, shared=True)


def _is_there(folder: Folder, path: Path) -> bool:
    with files.opened_folder(path) as place:
        if _meta_in(place) != folder.meta:
            return False
        for name, leaf in folder.leaves.items():
            with files.opened(name, place) as file:
                if file.size != leaf.nbytes:
                    return False
    return all(_is_there(inner, path / name) for name, inner in folder.folders.items())


def _meta_in(place: int) -> Meta:
    """Return what describes an open directory; nothing: it is not one of this layout."""
    try:
        return foreign.meta_in(place, META)
    except (FormatError, OSError):
        return {}


def write(folder: Folder, path: Path, *, filled: bool, durable: bool) -> None:
    """Write a directory in place of what the container there holds; other files stay.

    The layout has no one file that says which the others are: a process that is killed while files
    get their names leaves some of the old ones beside some of the new ones.

    Args:
        folder: what it holds.
        path: the directory.
        filled: whether tensors are written; else they are zeros.
        durable: wait until it is on the disk.

    Raises:
        OSError: if writing fails; nothing is changed unless that was by a rename.
    """
    with _Writing(path, filled, durable) as writing:
        writing.prepare(folder, path)
        writing.finish()


class _Writing:
    """New files of a directory, which have temporary names until all are there.

    Args:
        path: the directory.
        filled: whether tensors are written; else they are zeros.
        durable: wait until they are on the disk.
    """

    def __init__(self, path: Path, filled: bool, durable: bool) -> None:
        self._path = path
        self._filled = filled
        self._durable = durable
        self._new: list[tuple[Path, str, str]] = []
        self._folders: list[Path] = []
        self._old: list[tuple[Path, Meta, Folder]] = []

    def __enter__(self) -> _Writing:
        self._make(self._path)
        self._lock = files.opened_folder(self._path)
        files.lock(self._lock.__enter__(), wait=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(None, None, None)
        for path, temporary, _ in self._new:
            with suppress(OSError), files.opened_folder(path) as place:
                files.remove(temporary, place)
        if error[0] is not None:
            for path in reversed(self._folders):
                with suppress(OSError):
                    files.remove_empty_folder(path)

    def _make(self, path: Path) -> None:
        if not path.is_dir():
            files.make_folder(path)
            self._folders.append(path)

    def prepare(self, folder: Folder, path: Path, *, added: bool = False) -> None:
        """Write all files of a directory, and of those below it, under temporary names.

        Args:
            folder: what they hold.
            path: the directory.
            added: whether what else is there stays.
        """
        self._make(path)
        for name, inner in folder.folders.items():
            self.prepare(inner, path / name)
        with files.opened_folder(path) as place:
            sweep(place)
            if not added:
                self._old.append((path, _meta_in(place), folder))
            for name, leaf in folder.leaves.items():
                self._add(path, place, name, leaf)
            self._add(path, place, META, json.dumps(folder.meta).encode())

    def _add(self, path: Path, place: int, name: str, content: Tensor | bytes) -> None:
        if (path / name).is_dir():
            raise IsADirectoryError(EISDIR, "expected a file or nothing", str(path / name))
        temporary = f".{name[:100]}.tmp-{os.urandom(16).hex()}"
        descriptor = files.create(temporary, place)
        self._new.append((path, temporary, name))
        try:
            if isinstance(content, bytes):
                files.write(descriptor, content)
            elif not self._filled:
                files.allocate(descriptor, content.nbytes)
            else:
                layout = layout_of({"leaf": Spec(content.dtype, tuple(content.shape))})
                for piece in data_of({"leaf": content}, layout):
                    files.write(descriptor, piece)
            if self._durable:
                files.sync(descriptor)
        finally:
            files.close(descriptor)

    def finish(self) -> None:
        """Give all files their names: in each level what describes it last, the outer one last."""
        while self._new:
            path, temporary, name = self._new[0]
            with files.opened_folder(path) as place:
                files.rename(temporary, name, place)
                self._new.pop(0)
        for path, *_ in self._old if self._durable else ():
            with files.opened_folder(path) as place:
                files.sync(place)
        for path, old, folder in self._old:
            _remove(path, old, folder)


def _remove(path: Path, old: Meta, new: Folder | None) -> None:
    """Remove what a directory held that was replaced, as far as its `meta.json` named it."""
    lazy = str(old.get("_type")).endswith("LazyStackedTensorDict'>")
    kept = {META, *new.leaves, *new.folders} if new is not None else set()
    try:
        with files.opened_folder(path) as place:
            names = set(files.names_in(place)) - kept
            for key, value in old.items():
                if isinstance(value, dict) and "type" not in value:
                    for each in (f"{name_of(key)}{LEAF}", f"{name_of(key)}{SIZES}{LEAF}"):
                        if each in names:
                            files.remove(each, place)
                elif isinstance(value, dict) and name_of(key) in names:
                    _remove_folder(path / name_of(key))
            for name in names:
                if name == INSIDE or (lazy and name.isdecimal()):
                    _remove_folder(path / name)
            if new is None and META in names:
                files.remove(META, place)
    except OSError:  # it is not read any more
        pass


def _remove_folder(path: Path) -> None:
    with files.opened_folder(path) as place:
        old = _meta_in(place)
    if old:
        _remove(path, old, None)
        files.remove_empty_folder(path)


def add_entry(
    td: AbstractContainer, path: Path, keys: tuple[str, ...], leaf: Tensor, *, filled: bool
) -> Tensor:
    """Add a tensor to the directory that a container is mapped from; return it, mapped.

    Args:
        td: the container.
        path: the directory.
        keys: where the tensor is; levels that do not exist are created.
        leaf: its values, shape and dtype.
        filled: whether its values are written; else it is zeros.

    Raises:
        InvalidValue: if the layout cannot hold such an entry there.
        KeyCollision: if there is such an entry.
        ShapeMismatch: if the shape does not start with the batch size.
    """
    level, depth = lowest_level(td, keys)
    desc = level._kd_desc
    if not leaf_fits(leaf, desc):
        shape = (leaf.size(0),) if leaf.is_nested else leaf.shape
        raise batch_does_not_fit(format_key(keys), desc.batch, shape)
    value: Entry = leaf
    for key in reversed(keys[depth + 1 :]):
        value = registry.make_dense({key: value}, desc.unlocked())
    new = folder_of(registry.make_dense({keys[depth]: value}, desc.unlocked()))
    place = _place_of(path, keys[:depth])
    if new is None or place is None:
        raise InvalidValue(
            f"an entry {format_key(keys)} cannot be added to `{path}`, a directory of tensordict: "
            "only a `TensorDict` gains entries there, and only strided ones with keys of their own."
        )
    with _Writing(path, filled, durable=False) as writing:
        with files.opened_folder(place) as folder:
            meta = foreign.meta_in(folder, str(place))
        if keys[depth] in meta:
            raise KeyCollision(
                f"key {format_key(keys)} exists in `{path}`. Write to the entry in place, call "
                "`memmap_refresh_` if another process added it, or choose another key."
            )
        meta[keys[depth]] = new.meta[keys[depth]]
        writing.prepare(new._replace(meta=meta), place, added=True)
        writing.finish()
    found: Entry = foreign.load(path, shared=True)
    for key in keys:
        assert isinstance(found, AbstractContainer)
        found = found._kd_entries[key]
    assert isinstance(found, Tensor)
    return found


def _place_of(path: Path, keys: tuple[str, ...]) -> Path | None:
    """Return the directory of a plain level; `None`: a tensor class or a stack is above it."""
    place = path
    for name in (".", *map(name_of, keys)):
        place = place / name
        with files.opened_folder(place) as folder:
            if _meta_in(folder).get("_type") != _DENSE["_type"]:
                return None
    return place
