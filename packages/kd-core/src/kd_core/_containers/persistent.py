"""A container whose entries stay in a file of HDF5: `PersistentTensorDict`.

A container is a group, a leaf a data set, under names in which odd characters are escaped. A data
set that lies in one piece is mapped into memory, so that a write in place to the leaf, to a part of
it or to a row of the container goes to the file. One in chunks is read when it is asked for, and
refuses writes in place; when rows of it are set, it is written as a whole. Attributes say what the
values do not: batch sizes, dtypes, data as JSON. Rows are a container of their own, which writes
what is set in it to the file, too.

Knows how HDF5 lays data out; must not know operations.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._base import TensorDictBase
from kd_core._containers.dense import GeneralMethods
from kd_core._containers.tensordict import TensorDict
from kd_core._convert.plain import (
    LENGTHS,
    VALUES,
    checked,
    escaped,
    jagged_of,
    load,
    ragged_as_jagged,
    rows_of_jagged,
    stored,
    unescaped,
)
from kd_core._descriptor import describe
from kd_core._errors import InvalidArgument, InvalidValue, KdError
from kd_core._keys import format_key, is_path, path_of
from kd_core._leaves.arrays import values_of_rows
from kd_core._leaves.loops import common_batch, version_of
from kd_core._naming import public_in
from kd_core._nodes import as_read, is_data, is_row_data, is_unbatched, kept_value
from kd_core._protocol import AbstractContainer, lock
from kd_core._shapes import checked_names, names_of, with_names, without_names
from kd_core._store.manifest import read, written

if TYPE_CHECKING:
    from typing import Self

    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry
    from kd_core._types import BatchSize, DeviceLike, Index, NestedKey

Group: TypeAlias = Any
PathLike: TypeAlias = "str | Path"
M = TypeVar("M", bound="Callable[..., object]")

BATCH: Final = "kd_batch"
NAMES: Final = "kd_names"
DTYPE: Final = "kd_dtype"
DATA: Final = "kd_data"
ENCODED: Final = "kd_encoded"
"""The attribute of data that says whether JSON holds it in the forms of a store, as tuples."""
RAGGED: Final = "kd_ragged"
"""The attribute of a group that is a jagged tensor."""

REPLACED: Final = "%replaced"
"""The group of data sets that were replaced: tensors that map them stay as they are."""
MODES: Final = ("r", "r+", "w", "a", "x", "w-")


class _Entries(Mapping[str, "Entry"]):
    """The entries of one group, which are read when they are asked for.

    They know their container's descriptor, not the container, which would otherwise keep the file
    open until Python looks for cycles.
    """

    __slots__ = ("_filename", "_group", "_known", "_options", "desc")

    def __init__(
        self, group: Group, options: dict[str, object], filename: str, desc: Descriptor
    ) -> None:
        self._group, self._options, self._filename, self.desc = group, options, filename, desc
        self._known: dict[str, Entry] = {}
        """What is mapped or nested: the same object each time."""

    def __getitem__(self, key: str) -> Entry:
        group = self._opened()
        known = self._known.get(key)
        if known is not None:
            return known
        name = escaped(key)
        if name not in group:
            raise KeyError(key)
        made, keep = self._read(self._group[name])
        if keep:
            self._known[key] = made
        return made

    def __iter__(self) -> Iterator[str]:
        # In the order of HDF5, also where a file says in which order its entries were made.
        return iter([unescaped(name) for name in sorted(self._opened()) if name != REPLACED])

    def __len__(self) -> int:
        group = self._opened()
        return len(group) - (REPLACED in group)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and escaped(key) in self._opened()

    def _opened(self) -> Group:
        if not self._group:
            raise InvalidValue(
                f"the file `{self._filename}` is closed. Open it again with "
                "`PersistentTensorDict.from_h5`."
            )
        return self._group

    def write_back(self) -> None:
        """Write data with one value per row that was changed in place."""
        for key, value in self._known.items():
            if isinstance(value, PersistentTensorDict):
                value._kd_entries.write_back()
            elif not isinstance(value, Tensor):
                found = self._group[escaped(key)]
                data, found.attrs[ENCODED] = _text_of((key,), kept_value(value))
                if found.asstr()[()] != data:
                    found[()] = data

    def forget(self, key: str) -> None:
        """Read an entry anew when it is asked for."""
        self._known.pop(key, None)

    def _read(self, found: Group) -> tuple[Entry, bool]:
        """Return an entry, and whether it stays the same object."""
        desc = self.desc
        if RAGGED in found.attrs:
            lengths = torch.from_numpy(found[LENGTHS][...]).long()
            rows = jagged_of(self._leaf(found[VALUES]).as_subclass(Tensor).clone(), lengths)
            return rows if desc.device is None else rows.to(desc.device), False
        if not hasattr(found, "dtype"):
            return self.below_at(found), True
        if DATA in found.attrs:
            value: Any = json.loads(found.asstr()[()])
            value = read(value) if found.attrs.get(ENCODED) else value
            if found.attrs[DATA] == "rows":  # the same object, which rows are written to
                values = values_of_rows(value, desc.batch, "the data")
                return registry.wrap_rows(values, None, desc), True
            return registry.wrap_data(value, desc), False
        if found.dtype.kind not in "biufc":
            value = _values_in(found)
            if desc.ndim and found.shape[: desc.ndim] == desc.batch:
                return registry.wrap_rows(
                    values_of_rows(value, desc.batch, "the data"), None, desc
                ), False
            return registry.wrap_data(value, desc), False
        leaf = self._leaf(found)
        mapped = found.chunks is None
        return leaf if desc.device is None else leaf.to(desc.device), mapped

    def _leaf(self, found: Group) -> Tensor:
        from kd_core._store.mapped_tensor import DTYPES, SealedTensor  # requires POSIX

        name = found.attrs.get(DTYPE)
        native = found.dtype.isnative
        dtype = DTYPES[found.dtype.name] if name is None else getattr(torch, name)
        shape = tuple(found.shape)
        if name is not None and dtype.is_complex:
            shape = shape[:-1]
        offset = found.id.get_offset() if native else None
        if offset is None or not math.prod(shape):
            values = torch.from_numpy(found[...].astype(found.dtype.newbyteorder("=")))
            if not values.numel():
                return torch.empty(shape, dtype=dtype)
            whole = values.contiguous()
            whole = whole if whole.dtype is dtype else whole.view(-1).view(dtype)
            return whole.reshape(shape).as_subclass(SealedTensor)
        return self._mapped(offset, shape, dtype)

    def below_at(self, group: Group) -> PersistentTensorDict:
        """Return the container in a nested group."""
        batch, above = _batch_in(group), self.desc
        fits = batch[: above.ndim] == above.batch
        desc = describe(batch if fits else above.batch, above.device)
        return PersistentTensorDict._of(group, self._options, self._filename, desc)

    def _mapped(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the file; a file that is only read is mapped copy on write."""
        self._group.file.flush()
        reading = self._group.file.mode == "r"
        descriptor = os.open(self._filename, os.O_RDONLY if reading else os.O_RDWR)
        try:
            start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            size = offset - start + math.prod(shape) * dtype.itemsize
            access = mmap.ACCESS_COPY if reading else mmap.ACCESS_WRITE
            memory = mmap.mmap(descriptor, size, access=access, offset=start)
        finally:
            os.close(descriptor)
        flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset - start)
        if not reading:
            return flat.view(shape)
        from kd_core._store.mapped_tensor import SealedTensor

        return flat.view(shape).as_subclass(SealedTensor)


@public_in("kd_core")
class PersistentTensorDict(TensorDictBase):
    """A container whose entries stay in a file of HDF5, and are read when they are used.

    A write goes to the file: of an entry, of a row, in place to a leaf. A tensor that was read is
    the entry in the file, and sees later writes. Keys are in alphabetical order, as in HDF5. Data
    of the same shape that is assigned to a leaf is cast to its dtype, if it is not of a lesser
    kind. Results of operations are `TensorDict`s.
    `data[index]`, and a batch of a `DataLoader` over `data`, are rows of the file: an entry that is
    set there is written; one that is deleted there stays in the file. Data that is not a tensor is
    kept as JSON; rows of it that are changed in place are written by `close`.
    A leaf that is compressed is read when it is asked for and refuses writes in place: set it or
    its rows.

    Args:
        filename: the file.
        batch_size: the leading dimensions of every entry; `None`: what the file says, or all that
            its leaves share.
        group: an open group of `h5py` instead of a file.
        mode: as that of `h5py.File`: `"r"` reads, `"r+"` writes too, `"w"` makes a new file.
        device: where entries are moved when they are read; writes in place do not reach the file.
        options: what `h5py` takes for a new data set, such as `compression="gzip"`.

    Raises:
        MissingDependency: if h5py is not installed.
        OSError: if the file cannot be opened.

    Example:
        >>> import torch
        >>> from importlib.util import find_spec
        >>> from kd_core import PersistentTensorDict
        >>> if find_spec("h5py"):
        ...     data = PersistentTensorDict(filename="rows.h5", batch_size=[3], mode="w")
        ...     data["x"] = torch.zeros(3)
        ...     data[1] = {"x": torch.tensor(5.0)}
        ...     data[[0, 2]]["x"] = torch.tensor([3.0, 4.0])
        ...     data.close()
        ...     assert PersistentTensorDict.from_h5("rows.h5")["x"].tolist() == [3, 5, 4]
    """

    __slots__ = (
        "__weakref__",
        "_file",
        "_group",
        "_kd_entries",
        "_kd_holders",
        "_options",
        "filename",
    )

    _kd_entries: _Entries
    filename: str

    def __init__(
        self,
        *,
        batch_size: BatchSize | None = None,
        filename: PathLike | None = None,
        group: object = None,
        mode: str = "r",
        backend: str = "h5",
        device: DeviceLike | None = None,
        validate_batch_size: bool = True,
        non_tensor_as_stack: bool = False,
        allow_pickle: bool | None = None,
        **options: object,
    ) -> None:
        if backend != "h5" or allow_pickle:
            raise InvalidValue(
                f"expected `backend='h5'` without `allow_pickle=True`, got {backend!r}. Read a "
                "store of Zarr with `TensorDict.from_zarr`."
            )
        if (filename is None) is (group is None):
            raise InvalidArgument("expected one of `filename` and `group`.")
        h5py = load("h5py", "PersistentTensorDict")
        if filename is None:
            root = cast("Group", group)
        else:
            if mode not in MODES:
                raise InvalidValue(f"`mode` must be one of {MODES}, got {mode!r}.")
            path = os.path.realpath(filename)
            root = h5py.File(path, mode)
        found = _batch_in(root)
        batch = found if batch_size is None else torch.Size(_sizes(batch_size))
        desc = describe(tuple(batch), None if device is None else torch.device(device))
        self._open(root, options, str(root.file.filename), desc)
        if validate_batch_size:
            self._check_batch()
        self._keep_batch()

    def _open(
        self, group: Group, options: dict[str, object], filename: str, desc: Descriptor
    ) -> None:
        self._group, self._file, self._options = group, group.file, options
        self.filename = filename
        self._kd_entries = _Entries(group, options, filename, desc)

    @property
    def _kd_desc(self) -> Descriptor:
        return self._kd_entries.desc

    @_kd_desc.setter
    def _kd_desc(self, desc: Descriptor) -> None:
        self._kd_entries.desc = desc

    @classmethod
    def _of(
        cls, group: Group, options: dict[str, object], filename: str, desc: Descriptor
    ) -> PersistentTensorDict:
        made = object.__new__(PersistentTensorDict)
        made._open(group, options, filename, desc)
        return made

    def _check_batch(self) -> None:
        batch = self._kd_desc.batch
        for name, sizes in _sizes_below(self._group):
            if sizes[: len(batch)] != batch:
                raise InvalidValue(
                    f"entry {format_key((unescaped(name),))} of `{self.filename}` must start with "
                    f"the batch size {tuple(batch)}, got {sizes}."
                )

    def _keep_batch(self) -> None:
        if self._file.mode != "r":
            batch = self._kd_desc.batch
            self._group.attrs[BATCH] = json.dumps(list(without_names(batch)))
            if self._kd_desc.named:
                self._group.attrs[NAMES] = json.dumps(list(names_of(batch)))

    @classmethod
    def from_h5(
        cls,
        filename: PathLike,
        *,
        mode: str = "r",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: BatchSize | None = None,
        non_tensor_as_stack: bool = False,
    ) -> PersistentTensorDict:
        """Open a file of HDF5.

        Args:
            filename: the file, written by this class or of another origin.
            mode: as that of `h5py.File`.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            batch_size: the leading dimensions of every entry; `None`: what the file says, or all
                that its leaves share.
            non_tensor_as_stack: nothing: the file says which data has one value per row.
        """
        made = PersistentTensorDict(filename=filename, mode=mode, batch_size=batch_size)
        if batch_size is None and (auto_batch_size or batch_dims is not None):
            shapes = [sizes for _, sizes in _sizes_below(made._group)]
            made._kd_desc = made._kd_desc.with_batch(common_batch(shapes, batch_dims))
            made._keep_batch()
        return made

    @classmethod
    def from_dict(
        cls,
        input_dict: Mapping[str, object] | TensorDictBase,
        filename: PathLike,
        *,
        auto_batch_size: bool = False,
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        backend: str = "h5",
        batch_dims: int | None = None,
        allow_pickle: bool | None = None,
        **options: object,
    ) -> PersistentTensorDict:
        """Write a mapping or a container to a new file, and return the container in it.

        Args:
            input_dict: the entries.
            filename: the file; one that is there is replaced.
            auto_batch_size: nothing: it is inferred where `batch_size` is `None`.
            batch_size: the leading dimensions of every entry; `None`: all that the leaves share, or
                those of the container.
            device: where entries are moved when they are read.
            backend: `"h5"`.
            batch_dims: the largest number of batch dimensions to infer.
            allow_pickle: `False` or `None`; no file can run code when it is read.
            options: what `h5py` takes for a new data set.
        """
        if isinstance(input_dict, TensorDictBase):
            source = input_dict
        else:
            source = TensorDict.from_dict(
                input_dict,
                auto_batch_size=batch_size is None,
                batch_size=batch_size,
                batch_dims=batch_dims,
            )
        path = os.path.realpath(filename)
        new = f"{path}.tmp-{os.urandom(8).hex()}"
        made = PersistentTensorDict(
            filename=new,
            batch_size=source._kd_desc.batch,
            mode="w",
            backend=backend,
            device=device,
            allow_pickle=allow_pickle,
            **options,  # type: ignore[arg-type]  # of data sets
        )
        made._kd_desc = made._kd_desc.with_batch(source._kd_desc.batch)
        made._keep_batch()
        try:
            from kd_core._progress import advance, begin

            begin("write", len(source._kd_entries), "entries")
            source = ragged_as_jagged(source)
            for key, value in source._kd_entries.items():
                made._kd_set_entry(key, value)
                advance()
            made._file.flush()
            Path(new).replace(path)
        except BaseException:
            made.close()
            Path(new).unlink()
            raise
        return PersistentTensorDict._of(made._group, options, path, made._kd_desc)

    @overload
    def __getitem__(self, index: NestedKey) -> Tensor: ...
    @overload
    def __getitem__(self, index: Index) -> Self: ...
    def __getitem__(self, index: object) -> object:
        """Return the entry at a key, or the rows at an index, which write to the file."""
        if type(index) is str or is_path(index):
            return super().__getitem__(cast("str", index))
        return self._rows(index)

    def __getitems__(self, index: Sequence[int]) -> Self:
        """Return several rows, which write to the file; called by `DataLoader`."""
        return self._rows(index)

    def __iter__(self) -> Iterator[Self]:
        return iter(registry.make_dense(dict(self._kd_entries), self._kd_desc))

    def __setitem__(self, index: object, value: object) -> None:
        """Store a value at a key, or write values at an index of the batch dimensions."""
        if isinstance(index, (str, tuple)) and is_path(index):
            old: object = self.get(path_of(index), None)
            if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape:
                value = _cast_to(old, value)
        elif _has_chunks(self._group, self._options):
            keys = value.keys() if isinstance(value, (Mapping, TensorDictBase)) else self.keys()
            held = self.select(*keys, strict=False).to_tensordict()
            held = lock(held, self._kd_desc.lock) if self._kd_desc.lock else held
            held[cast("Index", index)] = value
            self._keep(held)
            return
        super().__setitem__(index, value)

    def _keep(self, held: TensorDictBase) -> None:
        """Store entries of which rows were changed in memory."""
        for key, value in held._kd_entries.items():
            below = self._kd_entries.get(key)
            if isinstance(below, PersistentTensorDict) and isinstance(value, TensorDictBase):
                below._keep(value)
            else:
                self._kd_set_entry(key, value)

    def _rows(self, index: object) -> Self:
        index = _as_slice(index)
        made = self._kd_rows_at(cast("Index", index))
        if self._file.mode == "r" or made is self or _adds(index):
            return made
        return cast("Self", LinkedRows.of(self, index, made))

    @property
    def file(self) -> Group:
        """The open file of `h5py`."""
        return self._file

    @property
    def mode(self) -> str:
        """How the file was opened: `"r"` to read, `"r+"` to write too."""
        return str(self._file.mode)

    @property
    def kwargs(self) -> dict[str, object]:
        """What `h5py` is given for a new data set."""
        return self._options

    def close(self) -> None:
        """Close the file; tensors that were read stay in memory."""
        if self._file:
            self._write_back()
            if self._file.mode != "r" and REPLACED in self._file:
                del self._file[REPLACED]
            self._file.flush()
            self._file.close()

    def _write_back(self) -> None:
        if self._file.mode != "r":
            self._kd_entries.write_back()
            self._file.flush()

    def _check_writable(self) -> None:
        if self._file.mode == "r":
            raise InvalidValue(
                f"`{self.filename}` was opened for reading. Open it with `mode='r+'` to write."
            )

    def _kd_set_entry(self, key: str, value: Entry) -> None:
        self._check_writable()
        name = escaped(key)
        if isinstance(value, Tensor) and self._fits_in_place(name, value):
            as_read(self._kd_entries[key]).copy_(value.detach())
            return
        found = self._group.get(name)
        if isinstance(value, Tensor) and _is_chunked(found) and _is_dense(value):
            kind = str(value.dtype).removeprefix("torch.")
            values = stored(value.as_subclass(Tensor)).numpy()
            if found.attrs.get(DTYPE) == kind and found.shape == values.shape:
                found[...] = values
                return
        below = dict(value._kd_entries) if isinstance(value, AbstractContainer) else {}
        if name in self._group:
            self._kd_del_entry(key)
        if isinstance(value, AbstractContainer):
            made = self._kd_entries.below_at(self._group.create_group(name))
            made._kd_desc = made._kd_desc.with_batch(value._kd_desc.batch)
            made._keep_batch()
            for inner, each in below.items():
                made._kd_set_entry(inner, each)
        elif isinstance(value, Tensor) and value.is_nested and value.layout is torch.jagged:
            rows = rows_of_jagged(value, (key,))
            made = self._group.create_group(name)
            made.attrs[RAGGED] = True
            self._create(VALUES, rows.values, made)
            self._create(LENGTHS, rows.lengths, made)
        elif isinstance(value, Tensor):
            self._create(name, value, self._group)
        elif is_unbatched(value):
            raise InvalidValue(
                f"entry {format_key((key,))} is an `UnbatchedTensor`, which a file of HDF5 does "
                "not hold. Give it the batch dimensions with `expand`."
            )
        else:
            data, encoded = _text_of((key,), kept_value(value))
            made = self._group.create_dataset(name, data=data)
            made.attrs[ENCODED] = encoded
            made.attrs[DATA] = "rows" if is_row_data(value) else "data"

    def _fits_in_place(self, name: str, value: Tensor) -> bool:
        if name not in self._group or self._kd_desc.device is not None:
            return False
        found = self._kd_entries._known.get(unescaped(name))
        return type(found) is Tensor and found.shape == value.shape and found.dtype is value.dtype

    def _create(self, name: str, value: Tensor, group: Group) -> None:
        if not _is_dense(value):
            raise InvalidValue(
                f"entry {format_key((unescaped(name),))} must be a dense tensor, got layout "
                f"`{value.layout}`. Convert it with `to_dense` or `to_padded_tensor`."
            )
        values = stored(value.as_subclass(Tensor)).numpy()
        options = self._options if value.ndim and value.numel() else {}
        made = group.create_dataset(name, data=values, **options)
        made.attrs[DTYPE] = str(value.dtype).removeprefix("torch.")

    def _kd_del_entry(self, key: str) -> None:
        self._check_writable()
        self._kd_entries.forget(key)
        # Not deleted: HDF5 would use its place again, which tensors that were read still map.
        replaced = self._file.require_group(REPLACED)
        self._file.move(f"{self._group.name}/{escaped(key)}", f"/{REPLACED}/{len(replaced)}")

    def _kd_describe(self, desc: Descriptor) -> None:
        old, self._kd_desc = self._kd_desc, desc
        if old.batch != desc.batch or old.named != desc.named:
            self._keep_batch()

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        return registry.make_dense(entries, desc)

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        dense: Self = registry.make_dense(dict(self._kd_entries), self._kd_desc)
        return dense._kd_with_descriptor(desc)

    def clone(self, recurse: bool = True, *, newfile: PathLike | None = None) -> Self:
        """Return a copy in another file.

        Args:
            recurse: copy the entries; else the copy is a `TensorDict` with the tensors of this one.
            newfile: the file; `None`: one that is removed when this process ends.
        """
        if not recurse:
            return super().clone(recurse=False)
        if newfile is None:
            from kd_core._store.files import make_temporary_folder

            newfile = make_temporary_folder() / "clone.h5"
        self._write_back()
        made = PersistentTensorDict.from_dict(self, newfile, **self._options)  # type: ignore[arg-type]  # as above
        return cast("Self", made)

    def __deepcopy__(self, memo: object) -> Self:
        return self.clone()

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        self._write_back()
        mode = "r" if self._file.mode == "r" else "r+"
        desc = self._kd_desc
        place = self.filename, self._group.name, mode
        return restore_persistent, (*place, tuple(desc.batch), self._options, desc.lock)


def _writing(method: M) -> M:
    """Return a method of rows that may write in place, and stores what it wrote in the file."""

    def write(self: LinkedRows, *given: object, **named: object) -> object:
        made = method(self, *given, **named)
        return self._kd_written() if made is self else made

    return cast("M", write)


class LinkedRows(GeneralMethods, TensorDict):
    """Rows of a `PersistentTensorDict`: what is set in them is written to the file."""

    _kd_is_linked: ClassVar[bool] = True

    _whole: TensorDictBase
    _at: Index
    _versions: dict[str, int]
    """The versions of the leaves that the file has."""

    @classmethod
    def of(cls, whole: TensorDictBase, index: object, read: TensorDictBase) -> LinkedRows:
        made = object.__new__(cls)
        made._whole, made._at = whole, cast("Index", index)
        made._kd_desc = read._kd_desc
        made._kd_entries = {
            key: cls.of(below, index, value)
            if isinstance(below := whole._kd_entries[key], (PersistentTensorDict, LinkedRows))
            and isinstance(value, TensorDictBase)
            else value
            for key, value in read._kd_entries.items()
        }
        made._kd_nested = read._kd_nested
        made._versions = {}
        made._note()
        return made

    def _note(self) -> None:
        for key, leaf in self._kd_entries.items():
            if isinstance(leaf, Tensor):
                self._versions[key] = version_of(leaf)

    def _kd_set_entry(self, key: str, value: Entry) -> None:
        old = self._kd_entries.get(key)
        if isinstance(old, Tensor) and isinstance(value, Tensor):
            value = _cast_to(old, value)
        self._whole[self._at] = {key: value}
        super()._kd_set_entry(key, self._whole.select(key)[self._at]._kd_entries[key])
        self._note()

    def _kd_like(self, entries: dict[str, Entry], desc: Descriptor) -> Self:
        return registry.make_dense(entries, desc)

    def _kd_with_descriptor(self, desc: Descriptor) -> Self:
        return self._kd_shallow()._kd_with_descriptor(desc)

    @overload
    def __getitem__(self, index: NestedKey) -> Tensor: ...
    @overload
    def __getitem__(self, index: Index) -> Self: ...
    def __getitem__(self, index: object) -> object:
        made = super().__getitem__(cast("Index", index))
        if type(index) is str or is_path(index) or made is self or _adds(index):
            return made
        return LinkedRows.of(self, index, cast("TensorDictBase", made))

    # What is at rows that are not a range is a copy: what is written in place is written once more,
    # by arithmetic in `_kd_written`, and by what follows.

    def __setitem__(self, index: object, value: object) -> None:
        super().__setitem__(index, value)
        if not (type(index) is str or is_path(index)):
            self._kd_written()

    set = _writing(TensorDict.set)
    update = _writing(TensorDictBase.update)
    apply = _writing(TensorDict.apply)
    named_apply = _writing(TensorDict.named_apply)
    set_ = _writing(TensorDict.set_)
    set_at_ = _writing(TensorDict.set_at_)
    update_ = _writing(TensorDict.update_)
    update_at_ = _writing(TensorDict.update_at_)
    copy_ = _writing(TensorDict.copy_)
    copy_at_ = _writing(TensorDict.copy_at_)
    fill_ = _writing(TensorDict.fill_)
    apply_ = _writing(TensorDict.apply_)

    def _kd_written(self) -> Self:
        """Write what changed since: other entries may have other values in the file."""
        changed: dict[str, Entry] = {}
        for key, entry in self._kd_entries.items():
            if isinstance(entry, LinkedRows):
                entry._kd_written()
            elif not isinstance(entry, Tensor):
                changed |= {} if is_data(entry) else {key: entry}
            elif (version := version_of(entry)) < 0 or version != self._versions[key]:
                changed[key] = entry
        if changed:
            self._whole[self._at] = changed
            self._note()
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return cast("Self", self.to_tensordict())

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return self._kd_shallow().__reduce_ex__(protocol)


def _cast_to(old: Tensor, value: Tensor) -> Tensor:
    """Return a value in the dtype of the entry it takes the place of, unless that is a lesser."""
    fits = old.dtype != value.dtype and torch.can_cast(value.dtype, old.dtype)
    return value.to(old.dtype) if fits else value


def _is_dense(value: Tensor) -> bool:
    return not value.is_nested and value.layout is torch.strided and not value.is_quantized


def _values_in(found: Group) -> object:
    """Return what is not of numbers: text, bytes, records, rows of different lengths."""
    if found.dtype.kind != "O":
        return found[...].tolist()
    text = found.id.get_type().get_class() == load("h5py", "PersistentTensorDict").h5t.STRING
    return (found.asstr() if text else found)[...].tolist()


def _is_chunked(found: Group) -> bool:
    return getattr(found, "chunks", None) is not None


def _has_chunks(group: Group, options: Mapping[str, object]) -> bool:
    """Return whether some entry refuses writes in place, or one that is added would."""
    return bool(options) or any(
        _is_chunked(found) if hasattr(found, "dtype") else _has_chunks(found, options)
        for name, found in group.items()
        if name != REPLACED
    )


def _as_slice(index: object) -> object:
    """Return a slice in the place of numbers that ascend evenly, whose rows are views."""
    if not isinstance(index, (list, range)) or not index or {*map(type, index)} != {int}:
        return index
    step = index[1] - index[0] if len(index) > 1 else 1
    even = step > 0 and index[0] >= 0
    if even and all(later - row == step for row, later in itertools.pairwise(index)):
        return slice(index[0], index[-1] + 1, step)
    return index


def _adds(index: object) -> bool:
    """Return whether an index adds dimensions, which the file does not have."""
    return any(each is None for each in (index if isinstance(index, tuple) else (index,)))


def restore_persistent(
    filename: str,
    group: str,
    mode: str,
    batch: tuple[int, ...],
    options: dict[str, Any],
    reason: str | None,
) -> PersistentTensorDict:
    """Open the file of a container again; called by pickle."""
    h5py = load("h5py", "PersistentTensorDict")
    root = h5py.File(filename, mode)
    made = PersistentTensorDict(group=root[group], batch_size=batch, **options)
    return made if reason is None else lock(made, reason)


def _sizes(batch_size: BatchSize) -> Sequence[int]:
    return (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)


def _sizes_below(group: Group) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names of entries, and the sizes with which each starts; not of data."""
    for name, found in group.items():
        if name == REPLACED or DATA in found.attrs:
            continue
        if RAGGED in found.attrs:
            yield name, tuple(found[LENGTHS].shape)
        elif not hasattr(found, "dtype"):
            yield name, tuple(_batch_in(found))
        elif found.dtype.kind in "biufc":
            name_of = found.attrs.get(DTYPE)
            halves = name_of is not None and getattr(torch, name_of).is_complex
            yield name, tuple(found.shape[:-1] if halves else found.shape)


def _text_of(path: tuple[str, ...], value: object) -> tuple[str, bool]:
    """Return data as JSON, and whether it is in the forms of a store: JSON has no tuples."""
    try:
        return json.dumps(checked(path, value)), False
    except InvalidValue as error:
        try:
            return json.dumps(written(_plain_lists(value), path)), True
        except KdError:
            raise error from None


def _plain_lists(value: object) -> object:
    """Return the values of rows as lists that are not linked to the rows."""
    return [_plain_lists(each) for each in value] if isinstance(value, list) else value


def _batch_in(group: Group) -> tuple[int, ...]:
    """Return what a group says, or all leading sizes that its entries share."""
    sizes = group.attrs.get(BATCH)
    if sizes is None:
        return common_batch([sizes for _, sizes in _sizes_below(group)])
    batch = tuple(json.loads(sizes))
    names = group.attrs.get(NAMES)
    if names is None:
        return batch
    return tuple(with_names(batch, checked_names(json.loads(names), batch)))


registry.register("persistent", PersistentTensorDict)
