"""Containers as tables and files of other libraries: JSON, CSV, pandas, Arrow, Parquet, HDF5, Zarr.

Reading a file that a container wrote as JSON, Arrow, Parquet, HDF5 or Zarr returns an equal one:
keys, batch sizes, dtypes and non-tensor data. Tables of CSV, JSON Lines and pandas hold rows only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TypeAlias, cast

from kd_core._errors import InvalidValue, refuse_existing, refuse_pickles
from kd_core._ops.conversion import build
from kd_core._ops.placement import early
from kd_core._protocol import AbstractContainer, leaves_of, refuse_partial

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor
    from typing_extensions import Buffer

    from kd_core._convert.tables import DtypeOf, Writer
    from kd_core._progress import Task
    from kd_core._types import BatchSize, DeviceLike, NestedKey


LARGE: Final = 32 << 20
"""Bytes from which on a conversion may take so long that it is watched."""


def writing(
    td: AbstractContainer,
    path: PathLike | None,
    purpose: str,
    exist_ok: bool = True,
    by_row: bool = False,
) -> Task:
    """Return the task of a conversion of a container, to a file if there is a path.

    Args:
        td: the container.
        path: the file, or `None`.
        purpose: the name of the method.
        exist_ok: whether a file at the path is replaced.
        by_row: each row is written with its own entries.

    Raises:
        AlreadyExists: if there is something at the path that is not to be replaced.
        KeySetMismatch: if only some members of a lazy stack hold an entry, which would be lost.
    """
    if not by_row:
        refuse_partial(td, purpose)
    if path is not None:
        refuse_existing(path, exist_ok)
    from kd_core._progress import Task

    size = sum(leaf.numel() * leaf.itemsize for leaf in leaves_of(td))
    name = purpose if path is None else f"write `{Path(path).name}`"
    return Task(name, watched=size > LARGE)


def reading(path: PathLike) -> Task:
    """Return the task of reading a file or a directory; of that it is not known how large it is."""
    from kd_core._progress import Task

    place = Path(path)
    large = place.is_dir() or (place.is_file() and place.stat().st_size > LARGE)
    return Task(f"read `{place.name}`", watched=large)


# Containers in files and directories, and as one header and few flat buffers.

PathLike: TypeAlias = "str | Path"
DOT: Final = "."
"""What joins nested keys in the names of columns."""


class Saving(AbstractContainer):
    """Saving and loading, and conversion to flat buffers and back."""

    __slots__ = ()

    def save(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: str | int | None = None,
        atomic: bool = False,
        exist_ok: bool = True,
        durable: bool = True,
    ) -> Self:
        """Write the container to a directory, or to one file; return self.

        It is a file if the name ends in `.safetensors`, or in another suffix that stands for a
        file: `.pt`, `.pth`, `.ckpt`, `.bin`, `.st`, `.tdz`, `.zip`. What is there is replaced:
        other processes, and this one after a crash, read either the old content or the new one.
        Keys may be any strings. Data that is not a tensor is kept if it is made of strings,
        numbers, bytes, lists, tuples, dicts and `None`, or of types that are registered with
        `kd_core.store`; one value for the whole batch may hold tensors too, as
        `NonTensorData(optimizer.state_dict())` does. Gradients, and whether they are required, are
        not kept.

        Args:
            prefix: the directory or the file; directories above it are created. `None`: a temporary
                directory, which is removed when the process ends.
            copy_existing: nothing: leaves are written, wherever they are.
            num_threads: nothing: one file is written in one piece.
            return_early: return a `TensorDictFuture`, if `num_threads` is above 1.
            share_non_tensor: nothing: data that is not a tensor does not change in a store.
            robust_key: nothing: any string is a key.
            archive: whether it is a single file; `None`: the name says so.
            compression: nothing: what is mapped is not compressed.
            atomic: nothing: every save is seen whole or not at all.
            exist_ok: whether what is at the path is replaced; else that is an error.
            durable: wait until the content is on the disk. Without, a machine that stops may lose
                it, which `load` notices; a process that is killed loses nothing.

        Raises:
            AlreadyExists: if something is at the path, and `exist_ok` is false.
            InvalidArgument: if the type of an entry cannot be saved; nothing is written.
            InvalidValue: if the value of an entry cannot be saved, or the path is something else.
            OSError: if writing fails; the old content stays.

        Warns:
            UserWarning: if a new name ends in the suffix of another format, such as `.pt`, `.h5` or
                `.parquet`: the content is written in the format of kd all the same.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.arange(3), "n": {"b/c": "word"}}, [3])
            >>> saved = td.save("model.kd")
            >>> TensorDict.load("model.kd")["n", "b/c"]
            'word'
        """
        from kd_core._store import files, forms

        if prefix is None and archive:
            raise InvalidValue("`archive=True` writes a single file: pass its path as `prefix`.")
        if prefix is None:
            prefix = files.make_temporary_folder()
        single = forms.is_single(prefix) if archive is None else archive
        forms.check_compression(compression, single)
        refuse_existing(prefix, exist_ok)
        forms.note_suffix(prefix, single)
        forms.save(self, prefix, single, durable=durable)
        return early(self, return_early, num_threads)

    dumps = save

    @classmethod
    def load(
        cls,
        prefix: PathLike,
        device: DeviceLike | None = None,
        non_blocking: bool = False,
        *,
        verify: str = "fast",
        keys: Iterable[NestedKey] | None = None,
        out: AbstractContainer | None = None,
        robust_key: bool | None = True,
        subpath: NestedKey | None = None,
        mode: str | None = None,
        num_threads: int = 0,
        allow_pickle: bool | None = None,
    ) -> Self:
        """Return the container that `save` wrote, or `memmap`.

        Tensors are read when they are used: they are views of the file in memory, and writes to
        them stay in this process. With `mode="r+"` they go to the file: see `load_memmap`.

        Args:
            prefix: the directory or the file.
            device: where the tensors are moved; `None`: the CPU.
            non_blocking: return before the copy to `device` has finished.
            verify: `"fast"`: compare sizes, headers and the digest of the manifest; `"full"`: read
                everything and compare the checksums too.
            keys: the keys to load; `None`: all.
            out: a container that takes the values, and is returned.
            robust_key: nothing: any string is a key.
            subpath: the key of a nested container, which is returned.
            mode: `"r"` and `None`: writes stay in this process; `"r+"`: they go to the file.
            num_threads: nothing: a file is mapped in one piece.
            allow_pickle: `False` or `None`; no file can run code when it is read.

        Raises:
            FormatError: if the file is damaged, or is not of this format.
            KeyNotFound: if one of `keys` does not exist.
            InvalidValue: if there is no such mode or `subpath`, or `allow_pickle` is `True`.
            OSError: if there is nothing at the path, or reading fails.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}).save("td.safetensors")
            >>> TensorDict.load("td.safetensors", keys=["a"], verify="full")["a"]
            tensor([1., 1.])
        """
        from kd_core._store import forms

        refuse_pickles(allow_pickle)
        if mode is not None:
            from kd_core._store.mapped_tensor import is_private

            if not is_private(mode):
                found = forms.part_at(forms.load_arena(prefix), subpath, prefix)
                return cast("Self", forms.taken(found, device, non_blocking, out))
        found = forms.part_at(forms.load(prefix, verify, keys), subpath, prefix)
        return cast("Self", forms.taken(found, device, non_blocking, out))

    @classmethod
    def from_consolidated(cls, filename: PathLike) -> Self:
        """Return the container in one file of safetensors, whatever its name is; see `load`.

        Example:
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": [1, 2]}).save("one.safetensors")
            >>> TensorDict.from_consolidated("one.safetensors")["a"]
            tensor([1, 2])
        """
        return cls.load(filename)

    def load_(
        self,
        prefix: PathLike,
        *,
        verify: str = "fast",
        robust_key: bool | None = True,
        allow_pickle: bool | None = None,
        mode: str | None = None,
    ) -> Self:
        """Write the values of a store into entries that exist, and add the others; return self.

        Allowed on a locked container that has all keys. All or nothing.

        Args:
            prefix: the directory or the file that `save` wrote.
            verify: as that of `load`.
            robust_key: nothing: any string is a key.
            allow_pickle: `False` or `None`; no file can run code when it is read.
            mode: nothing: the values are read.

        Raises:
            FormatError: if the file is damaged, or is not of this format.
            Locked: if the store has a key that a locked container does not have.
            ShapeMismatch: if a value cannot be broadcast to its entry.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> saved = TensorDict({"a": torch.ones(2)}).save("filled.kd")
            >>> TensorDict({"a": torch.zeros(2)}).load_("filled.kd")["a"]
            tensor([1., 1.])
        """
        from kd_core._store.forms import load

        refuse_pickles(allow_pickle)
        return self._kd_engine.update(self, load(prefix, verify), inplace=True)

    def append_to(self, path: PathLike) -> None:
        """Add the rows of the container, along its first batch dimension, to those of a store.

        They are written as a further segment: the rows that are there are not touched, and a reader
        sees all new rows or none. `kd_core.store.compact` joins the segments. To a path where
        nothing is, the container is saved. An arena is copied, with the new rows behind the others:
        `kd_core.store.resize` makes room for many, which are then written in place.

        Args:
            path: the directory that `save`, `append_to`, `memmap` or `memmap_like` wrote.

        Raises:
            FormatError: if the manifest of the store is damaged.
            InvalidValue: if a batch size, dtype or shape does not fit the rows of the store, or a
                value of the whole batch differs.
            KeySetMismatch: if the keys differ.
            OSError: if writing fails; the rows of the store stay as they are.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> for part in (torch.zeros(2), torch.ones(1)):
            ...     TensorDict({"a": part}, [len(part)]).append_to("rows.kd")
            >>> TensorDict.load("rows.kd")["a"]
            tensor([0., 0., 1.])
        """
        from kd_core._store.forms import append

        append(self, path)

    def to_buffers(self) -> tuple[bytes, list[Tensor]]:
        """Return the container as a header and one flat tensor for each dtype and device.

        For sockets, shared memory, object stores and other engines that move tensors or bytes. The
        header is JSON, never a pickle; it holds keys, shapes, names of dimensions and data that is
        not a tensor, of the types that `save` keeps. A flat tensor shares the memory of its leaves
        where they follow one another already: a single leaf, or those that `consolidate` placed.
        Gradients, whether they are required, and locks are not kept.

        Returns:
            The header, and the flat tensors.

        Raises:
            InvalidArgument: if the type of an entry cannot be kept, as for `save`.
            InvalidValue: if the value of an entry cannot be kept.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.arange(2), "b": {"c": torch.ones(2, 3)}}, [2])
            >>> header, buffers = td.to_buffers()
            >>> [(flat.dtype, flat.shape) for flat in buffers]
            [(torch.int64, torch.Size([2])), (torch.float32, torch.Size([6]))]
            >>> (TensorDict.from_buffers(header, buffers) == td).all()
            True
        """
        from kd_core._wire import form_of

        header, buffers = form_of(self)
        return header, buffers

    @classmethod
    def from_buffers(cls, header: bytes, buffers: Sequence[Tensor | Buffer]) -> Self:
        """Return the container that `to_buffers` described; its leaves are views of the buffers.

        Header and buffers may come from anywhere: nothing in them is run, and what does not fit is
        refused without further memory.

        Args:
            header: the header.
            buffers: the flat tensors in their order, or their bytes: as flat tensors of
                `torch.uint8`, on any device, or as objects that have a buffer, like `bytearray` and
                arrays of numpy. What is read-only, like `bytes`, is copied.

        Raises:
            FormatError: if the header is not valid, or does not fit the buffers, or names a class
                that is not registered with `kd_core.store`.
            InvalidArgument: if an argument has the wrong type.
            InvalidValue: if only some buffers of one device were moved.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> header, buffers = TensorDict({"a": torch.arange(2), "s": "word"}).to_buffers()
            >>> octets = [bytes(flat.numpy()) for flat in buffers]
            >>> TensorDict.from_buffers(header, octets)["a"]
            tensor([0, 1])
        """
        from kd_core._wire import container_of

        return cast("Self", container_of(header, buffers))


class Formats(AbstractContainer):
    """Reading and writing formats of other libraries."""

    __slots__ = ()

    def to_json(
        self,
        path: PathLike | None = None,
        *,
        separator: str | None = None,
        lines: bool = False,
        exist_ok: bool = True,
        **options: object,
    ) -> str | None:
        """Write the entries as JSON: an object of nested lists, or with `lines` one object a row.

        Numbers are written in full. Values that are not finite are written as `NaN` and `Infinity`,
        as the `json` module of Python does.

        Args:
            path: the file to write; `None`: return the text.
            separator: join nested keys by it, instead of nesting objects.
            lines: write one line for each item of the first batch dimension.
            exist_ok: whether a file at the path is replaced; else that is an error.
            **options: what `pandas.DataFrame.to_json` takes, as `orient="records"`; with them
                pandas writes the file, and other programs read it as a table.

        Raises:
            AlreadyExists: if something is at the path, and `exist_ok` is false.
            InvalidValue: if non-tensor data cannot be written as JSON.
            KeySetMismatch: if only some members of a lazy stack hold an entry,
                unless each line is the object of a row.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.arange(2), "b": {"c": torch.ones(2)}}, [2])
            >>> print(td.to_json(lines=True), end="")
            {"a": 0, "b": {"c": 1.0}}
            {"a": 1, "b": {"c": 1.0}}
            >>> td.to_json("td.json")
            >>> bool((TensorDict.from_json("td.json") == td).all())
            True
        """
        from kd_core._convert import tables

        with writing(self, path, "to_json", exist_ok, lines and separator is None):
            if options:
                text = tables.json_by_pandas(self, separator, {"lines": lines, **options})
            else:
                write = tables.lines_of if lines else tables.text_of
                text = write(self, separator)
            if path is None:
                return text
            tables.write_text(path, text)
            return None

    @classmethod
    def from_json(
        cls,
        path: PathLike | IO[str],
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceLike | None = None,
        batch_size: BatchSize | None = None,
        separator: str | None = None,
        dtype: DtypeOf = None,
        lines: bool = False,
        **options: object,
    ) -> Self:
        """Build a container from a file of JSON, as `to_json` writes it or of another origin.

        Args:
            path: the file, which may be open; or a text of JSON itself, in brackets as `{...}` and
                `[...]`, or with `lines` one object a line. A list of objects has one for each row.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            device: the device to which every entry is moved.
            batch_size: the leading dimensions of every entry; `None`: those of the container that
                was written, or the number of rows or lines.
            separator: split keys at it; as in `to_json`.
            dtype: the dtype of all tensors, or of some by their keys; see `from_csv`.
            lines: the file has one object a line.
            **options: what `pandas.read_json` takes, as `orient`; with them pandas reads the file.

        Raises:
            InvalidValue: if the file is not JSON of this form.
        """
        from kd_core._convert import tables

        batch: BatchSize | None
        if options:
            frame = tables.frame_in(path, "read_json", {"lines": lines, **options})
            tree, batch = tables.tree_of_frame(frame, separator, dtype)
            return build(cls, tree, batch_size, device, auto_batch_size, batch_dims, found=batch)
        with reading(path if isinstance(path, (str, Path)) else "JSON"):
            text = tables.json_text(path)
            if lines:
                tree, batch = tables.tree_of_lines(text, separator, dtype)
            else:
                tree, batch = tables.tree_of_text(text, separator, dtype)
        return build(cls, tree, batch_size, device, auto_batch_size, batch_dims, found=batch)

    def to_csv(
        self,
        path: PathLike | None = None,
        *,
        separator: str | None = None,
        exist_ok: bool = True,
        **options: object,
    ) -> str | None:
        """Write one line for each item of the first batch dimension, under a line of names.

        Nested keys are joined by the separator; a leaf with more dimensions takes a column for each
        element of a row, such as `a[0,1]`.

        Args:
            path: the file to write; `None`: return the text.
            separator: what joins nested keys.
            exist_ok: whether a file at the path is replaced; else that is an error.
            **options: what `pandas.DataFrame.to_csv` takes; with them pandas writes the file.

        Raises:
            AlreadyExists: if something is at the path, and `exist_ok` is false.
            KeyCollision: if a nested key holds the separator, or two become the same name.
            InvalidValue: if the container does not have a batch.
            KeySetMismatch: if only some members of a lazy stack hold an entry.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"a": torch.eye(2), "b": {"c": torch.arange(2)}}, [2])
            >>> print(td.to_csv(), end="")
            a[0],a[1],b.c
            1.0,0.0,0
            0.0,1.0,1
        """
        from kd_core._convert import tables

        with writing(self, path, "to_csv", exist_ok):
            text = tables.csv_of(self, separator or DOT, options)
            if path is None:
                return text
            tables.write_text(path, text)
            return None

    @classmethod
    def from_csv(
        cls,
        path: PathLike | IO[str],
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceLike | None = None,
        batch_size: BatchSize | None = None,
        separator: str | None = None,
        dtype: DtypeOf = None,
        **options: object,
    ) -> Self:
        """Build a container from comma-separated values.

        Columns of integers become `int64`, of other numbers `float64`, of `True` and `False`
        `bool`; all others hold one string a row. Columns `a[0]`, `a[1]`, ... become one leaf. A
        value that is empty in a column of numbers is `NaN`.

        Args:
            path: the file; its first line has the names. pandas reads what is already open.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            device: the device to which every entry is moved.
            batch_size: the leading dimensions of every entry; `None`: the number of rows.
            separator: split names at it into nested keys, as `"."` those that `to_csv` writes;
                `None`: do not.
            dtype: the dtype of all tensors, or of some by their keys; the name of a dtype is one.
                Empty values of a column with a floating-point dtype are `NaN`.
            **options: what `pandas.read_csv` takes, as `sep=";"`; with them pandas reads the file.

        Raises:
            KeyNotFound: if there is no column of a key of `dtype`.
            InvalidValue: if a value cannot be read as the dtype that is asked for.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> TensorDict({"x": torch.arange(2), "y": torch.ones(2)}, [2]).to_csv("rows.csv")
            >>> TensorDict.from_csv("rows.csv", dtype={"y": torch.float32})["y"]
            tensor([1., 1.])
        """
        from kd_core._convert import tables

        if options or not isinstance(path, (str, Path)):
            frame = tables.frame_in(path, "read_csv", options)
            tree, rows = tables.tree_of_frame(frame, separator, dtype)
        else:
            with reading(path):
                tree, rows = tables.tree_of_csv(tables.read_text(path), separator, dtype)
        return build(cls, tree, batch_size, device, auto_batch_size, batch_dims, found=rows)

    def to_pandas(self, *, separator: str | None = None) -> object:
        """Return a pandas data frame; names of columns as in `to_csv`.

        Args:
            separator: what joins nested keys.

        Raises:
            MissingDependency: if pandas is not installed.
            KeyCollision: if a nested key holds the separator, or two become the same name.
            InvalidValue: if the container does not have a batch, or numpy not the dtype of a leaf.
            KeySetMismatch: if only some members of a lazy stack hold an entry.
        """
        from kd_core._convert.tables import frame_of

        with writing(self, None, "to_pandas"):
            return frame_of(self, separator or DOT)

    @classmethod
    def from_pandas(
        cls,
        dataframe: object,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceLike | None = None,
        batch_size: BatchSize | None = None,
        separator: str | None = None,
        dtype: DtypeOf = None,
    ) -> Self:
        """Build a container from a pandas data frame, whose columns are copied.

        Columns of strings and objects hold one value a row, of times nanoseconds, of categories
        their numbers. Names that are not strings are converted.

        Args:
            dataframe: the data frame; its index is left out.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            device: the device to which every entry is moved.
            batch_size: the leading dimensions of every entry; `None`: the number of rows.
            separator: split names at it into nested keys; `None`: do not.
            dtype: the dtype of all tensors, or of some by their keys; see `from_csv`.

        Raises:
            MissingDependency: if pandas is not installed.
        """
        from kd_core._convert.tables import tree_of_frame

        tree, rows = tree_of_frame(dataframe, separator, dtype)
        return build(cls, tree, batch_size, device, auto_batch_size, batch_dims, found=rows)

    def to_arrow(self, *, separator: str | None = None) -> object:
        """Return an Arrow table with one row for each item of the first batch dimension.

        A leaf with more dimensions is a column of lists of fixed size. The metadata of the table
        holds batch sizes, dtypes and shapes for `from_arrow`.

        Args:
            separator: what joins nested keys in the names of the columns.

        Raises:
            MissingDependency: if pyarrow is not installed.
            KeyCollision: if two keys become the same name.
            InvalidValue: if the container does not have a batch.
            KeySetMismatch: if only some members of a lazy stack hold an entry.
        """
        from kd_core._convert.tables import table_of

        with writing(self, None, "to_arrow"):
            return table_of(self, separator or DOT, "to_arrow")

    @classmethod
    def from_arrow(
        cls,
        table: object,
        *,
        copy: bool | None = None,
        nulls: str = "raise",
        mask_key: NestedKey = "mask",
        device: DeviceLike | None = None,
        separator: str | None = None,
    ) -> Self:
        """Build a container from an Arrow table, whose columns are copied.

        Structs become nested containers, lists of one size become tensors of more dimensions, and
        columns of anything but numbers hold one value a row.

        Args:
            table: the table, or one batch of records.
            copy: nothing: columns are copied, because the memory of Arrow must not be written to.
            nulls: `"raise"`: an error for numbers that are null; `"mask"`: set them to zero;
                `"nan"`: read them as NaN, integers as `float64`.
            mask_key: where the mask of rows without null is put, if there are nulls.
            device: the device to which every entry is moved.
            separator: split names at it into nested keys, in a table of another origin.

        Raises:
            MissingDependency: if pyarrow is not installed.
            InvalidValue: if numbers are null and `nulls` is `"raise"`.
        """
        from kd_core._convert.tables import tree_of_table

        tree, batch = tree_of_table(table, separator, nulls, mask_key)
        return build(cls, tree, batch, device)

    def to_parquet(
        self, path: PathLike, *, separator: str | None = None, exist_ok: bool = True
    ) -> None:
        """Write a file of Parquet, with the table that `to_arrow` returns.

        Args:
            path: the file.
            separator: what joins nested keys in the names of the columns.
            exist_ok: whether a file at the path is replaced; else that is an error.

        Raises:
            AlreadyExists: if something is at the path, and `exist_ok` is false.
            MissingDependency: if pyarrow is not installed.
            KeySetMismatch: if only some members of a lazy stack hold an entry.
        """
        from kd_core._convert.tables import write_parquet

        with writing(self, path, "to_parquet", exist_ok):
            write_parquet(self, path, separator or DOT)

    @classmethod
    def from_parquet(
        cls,
        path: PathLike,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        device: DeviceLike | None = None,
        batch_size: BatchSize | None = None,
        separator: str | None = None,
        dtype: DtypeOf = None,
        columns: Sequence[str] | None = None,
    ) -> Self:
        """Build a container from a file of Parquet, as `from_arrow` does; nulls are read as NaN.

        Args:
            path: the file.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            device: the device to which every entry is moved.
            batch_size: the leading dimensions of every entry; `None`: those of the container that
                was written, or the number of rows.
            separator: split names at it into nested keys, in a file of another origin.
            dtype: the dtype of all tensors, or of some by their keys; see `from_csv`.
            columns: the names of the columns to read; `None`: all.

        Raises:
            MissingDependency: if pyarrow is not installed.
        """
        from kd_core._convert.tables import Dtypes, cast_tree, read_parquet, tree_of_table

        with reading(path):
            tree, batch = tree_of_table(read_parquet(path, columns), separator, "nan")
            tree = cast_tree(tree, Dtypes(dtype))
        return build(cls, tree, batch_size, device, auto_batch_size, batch_dims, found=batch)

    def to_mds(
        self,
        *,
        columns: Mapping[str, str] | None = None,
        out: str | tuple[str, str] | None = None,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: list[str] | None = None,
        size_limit: int | str | None = 1 << 26,
        writer: Writer | None = None,
        finish_writer: bool | None = None,
        exist_ok: bool = False,
        **options: object,
    ) -> None:
        """Write the rows as shards of MosaicML Streaming, for `streaming.StreamingDataset`.

        Each row along the first batch dimension is a sample: tensors are arrays, those of one
        number are numbers, nested keys are joined by dots. No value is pickled.

        Args:
            columns: the encoding of each column; `None`: that of the entries.
            out: the directory of the shards, or a local and a remote one.
            keep_local: keep the local files where `out` is remote.
            compression: the compression of shards, as `streaming` names it.
            hashes: the hashes of shards, as `streaming` names them.
            size_limit: the bytes of a shard before it is compressed.
            writer: an open `streaming.MDSWriter`, in place of `out`.
            finish_writer: close the writer; `None`: only one that was made here.
            exist_ok: whether what is in the directory is replaced; else that is an error.
            **options: what else `streaming.MDSWriter` takes.

        Raises:
            MissingDependency: if `streaming` (`pip install mosaicml-streaming`) is not installed.
            InvalidArgument: if not exactly one of `out` and `writer` is given.
            InvalidValue: if a value has no encoding; nothing is written.
            KeySetMismatch: if only some members of a lazy stack hold an entry.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> td = TensorDict({"obs": torch.zeros(8, 3), "name": ["a"] * 8}, [8])
            >>> td.to_mds(out="shards")  # doctest: +SKIP
        """
        from kd_core._convert.tables import write_shards

        asked: dict[str, object] = {
            "keep_local": keep_local,
            "compression": compression,
            "hashes": hashes,
            "size_limit": size_limit,
        }
        finish = writer is None if finish_writer is None else finish_writer
        local = out if out is None or isinstance(out, str) else out[0]
        with writing(self, local, "to_mds", exist_ok):
            if exist_ok:
                asked["exist_ok"] = True  # the writer refuses itself, otherwise
            write_shards(self, out, columns, writer, finish, {**asked, **options})

    def to_zarr(
        self, filename: PathLike, *, allow_pickle: bool | None = None, exist_ok: bool = True
    ) -> Self:
        """Write a store of Zarr: a group for each container, an array for each leaf; return self.

        Args:
            filename: the store.
            allow_pickle: `False` or `None`; data is written as JSON.
            exist_ok: whether what is at the path is replaced; else that is an error.

        Raises:
            AlreadyExists: if something is at the path, and `exist_ok` is false.
            MissingDependency: if zarr is not installed.
            InvalidValue: if non-tensor data cannot be written as JSON.
            KeySetMismatch: if only some members of a lazy stack hold an entry.
        """
        from kd_core._convert.plain import write_zarr

        refuse_pickles(allow_pickle)
        with writing(self, filename, "to_zarr", exist_ok):
            write_zarr(self, filename)
        return self

    @classmethod
    def from_zarr(
        cls,
        filename: PathLike,
        *,
        mode: str = "r",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: BatchSize | None = None,
        non_tensor_as_stack: bool = False,
        allow_pickle: bool | None = None,
    ) -> Self:
        """Build a container from a store of Zarr, which is read into memory.

        Args:
            filename: the store, written by `to_zarr` or of another origin.
            mode: `"r"`: a store is read, and written by `to_zarr`.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: the largest number of batch dimensions to infer.
            batch_size: the leading dimensions of every entry; `None`: those of the container that
                was written, or in a store of another origin all that its leaves share.
            non_tensor_as_stack: nothing: the store says which data has one value per row.
            allow_pickle: `False` or `None`; no file can run code when it is read.

        Raises:
            MissingDependency: if zarr is not installed.
            InvalidValue: if another mode, or `allow_pickle`, is asked for.
        """
        from kd_core._convert.plain import read_zarr

        refuse_pickles(allow_pickle)
        if mode != "r":
            raise InvalidValue(
                f'`mode` must be "r" for a store of Zarr, which is read into memory, got {mode!r}. '
                "Write it with `to_zarr`, or keep entries on disk with `to_h5`."
            )

        with reading(filename):
            tree, batch = read_zarr(filename)
        inferred = auto_batch_size or batch is None  # of another origin
        return build(cls, tree, batch_size, None, inferred, batch_dims, found=batch)
