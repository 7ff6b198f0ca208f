"""Conversions as functions: what `TensorDict` has as class methods, and the containers of the peer.

Each `from_` function returns a `TensorDict`; call the method of another class for one of that
class, as in `Sample.from_pandas(frame)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from kd_core._base import TensorDictBase
from kd_core._containers.tensordict import TensorDict
from kd_core._convert.schema import LeafSchema as LeafSchema
from kd_core._convert.schema import container_of_text
from kd_core._errors import InvalidValue, refuse_pickles, wrong_type
from kd_core._naming import also_named
from kd_core._ops.placement import TensorDictFuture as TensorDictFuture

if TYPE_CHECKING:
    from kd_core._types import BatchSize, DeviceLike

C = TypeVar("C", bound=TensorDictBase)

from_any = TensorDict.from_any
from_arrow = TensorDict.from_arrow
from_consolidated = TensorDict.from_consolidated
from_csv = TensorDict.from_csv
from_dataclass = TensorDict.from_dataclass
from_json = TensorDict.from_json
from_list = TensorDict.from_list
from_modules = TensorDict.from_modules
from_namedtuple = TensorDict.from_namedtuple
from_pandas = TensorDict.from_pandas
from_parquet = TensorDict.from_parquet
from_pytree = TensorDict.from_pytree
from_schema = TensorDict.from_schema
from_struct_array = TensorDict.from_struct_array
from_tuple = TensorDict.from_tuple
fromkeys = TensorDict.fromkeys
load = TensorDict.load
load_memmap = TensorDict.load_memmap


@also_named(input_dict="d")
def from_dict(
    d: Mapping[str, object],
    *,
    auto_batch_size: bool | None = None,
    batch_dims: int | None = None,
    device: DeviceLike | None = None,
    batch_size: BatchSize | None = None,
    names: Sequence[str | None] | None = None,
) -> TensorDict:
    """Build a container from nested dicts: `TensorDict.from_dict` as a function.

    Example:
        >>> from kd_core import from_dict
        >>> from_dict({"a": {"b": [1, 2]}})["a", "b"]
        tensor([1, 2])
    """
    return TensorDict.from_dict(
        d,
        auto_batch_size=bool(auto_batch_size),
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        names=names,
    )


@also_named(filename="h5_file")
def from_h5(
    h5_file: str | Path,
    *,
    mode: str = "r",
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: BatchSize | None = None,
    non_tensor_as_stack: bool = False,
) -> TensorDictBase:
    """Open a file of HDF5: `TensorDict.from_h5` as a function.

    Example:
        >>> from kd_core import TensorDict, from_h5
        >>> stored = TensorDict({"a": [1, 2]}, [2]).to_h5("data.h5")  # doctest: +SKIP
        >>> from_h5("data.h5")["a"]  # doctest: +SKIP
        tensor([1, 2])
    """
    return TensorDict.from_h5(
        h5_file,
        mode=mode,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        batch_size=batch_size,
        non_tensor_as_stack=non_tensor_as_stack,
    )


@also_named(filename="zarr_file")
def from_zarr(
    zarr_file: str | Path,
    *,
    mode: str = "r",
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: BatchSize | None = None,
    non_tensor_as_stack: bool = False,
    allow_pickle: bool | None = None,
) -> TensorDict:
    """Read a store of Zarr: `TensorDict.from_zarr` as a function.

    Example:
        >>> from kd_core import TensorDict, from_zarr
        >>> stored = TensorDict({"a": [1, 2]}, [2]).to_zarr("data.zarr")  # doctest: +SKIP
        >>> from_zarr("data.zarr")["a"]  # doctest: +SKIP
        tensor([1, 2])
    """
    return TensorDict.from_zarr(
        zarr_file,
        mode=mode,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        batch_size=batch_size,
        non_tensor_as_stack=non_tensor_as_stack,
        allow_pickle=allow_pickle,
    )


def save(
    data: C,
    prefix: str | Path | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    robust_key: bool | None = True,
    archive: bool | None = None,
    compression: str | int | None = None,
    atomic: bool = False,
) -> C:
    """Write a container to a directory or a file: `TensorDictBase.save` as a function.

    Example:
        >>> from kd_core import TensorDict, load, save
        >>> td = save(TensorDict({"a": [1, 2]}, [2]), "saved.kd")
        >>> load("saved.kd")["a"]
        tensor([1, 2])
    """
    if not isinstance(data, TensorDictBase):
        raise wrong_type("`data`", "a container", data, "Write `save(td, path)`.")
    return data._kd_engine.save(data, prefix, archive=archive, compression=compression)


def memmap(
    data: C,
    prefix: str | Path | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    existsok: bool = True,
    robust_key: bool | None = True,
    archive: bool | None = None,
    compression: str | int | None = None,
    atomic: bool = False,
) -> C:
    """Write a container to an arena: `TensorDictBase.memmap` as a function.

    Example:
        >>> from kd_core import TensorDict, memmap
        >>> memmap(TensorDict({"a": [1, 2]}, [2]), "mapped.kd").is_memmap()
        True
    """
    if not isinstance(data, TensorDictBase):
        raise wrong_type("`data`", "a container", data, "Write `memmap(td, path)`.")
    return data._kd_engine.memmap(
        data,
        prefix,
        num_threads=num_threads,
        return_early=return_early,
        existsok=existsok,
        archive=archive,
        compression=compression,
    )


def append_memmap(
    prefix: str | Path, rows: TensorDictBase, *, allow_pickle: bool | None = None
) -> None:
    """Add rows to a store or an arena, which is sealed then: `rows.append_to(prefix)`.

    Args:
        prefix: what `save` or `memmap` wrote.
        rows: the rows.
        allow_pickle: `False` or `None`; no file can run code when it is read.

    Raises:
        InvalidValue: if there is nothing at the path, or the rows do not fit.

    Example:
        >>> from kd_core import TensorDict, append_memmap, load
        >>> rows = TensorDict({"a": [1, 2]}, [2]).save("appended.kd")
        >>> append_memmap("appended.kd", rows)
        >>> load("appended.kd")["a"]
        tensor([1, 2, 1, 2])
    """
    from kd_core._store import forms  # requires POSIX

    refuse_pickles(allow_pickle)
    if not Path(prefix).is_dir():
        raise InvalidValue(
            f"`prefix` must be a directory that `save` or `memmap` wrote, got `{prefix}`. Unpack a "
            "single file with `unpack_memmap` first."
        )
    forms.seal_if_open(prefix)
    rows.append_to(prefix)


def pack_memmap(
    prefix: str | Path,
    archive_path: str | Path,
    *,
    compression: str | int | None = None,
    compresslevel: int | None = None,
) -> Path:
    """Write what a directory holds to a single file, and return its path.

    Args:
        prefix: what `save` or `memmap` wrote.
        archive_path: the file.
        compression: nothing: what is mapped is not compressed.
        compresslevel: nothing, as above.

    Example:
        >>> from kd_core import TensorDict, load, pack_memmap
        >>> td = TensorDict({"a": [1, 2]}, [2]).save("packed.kd")
        >>> load(pack_memmap("packed.kd", "packed.tdz"))["a"]
        tensor([1, 2])
    """
    from kd_core._store import forms  # requires POSIX

    forms.check_compression(compression, True)
    forms.save(forms.load(prefix), archive_path, archive=True)
    return Path(archive_path)


def unpack_memmap(archive_path: str | Path, prefix: str | Path) -> Path:
    """Write what a single file holds to a directory, and return its path.

    Example:
        >>> from kd_core import TensorDict, load, unpack_memmap
        >>> td = TensorDict({"a": [1, 2]}, [2]).save("unpacked.safetensors")
        >>> load(unpack_memmap("unpacked.safetensors", "unpacked.kd"))["a"]
        tensor([1, 2])
    """
    from kd_core._store import forms  # requires POSIX

    forms.save(forms.load(archive_path), prefix, archive=False)
    return Path(prefix)


def is_memmap_archive(path: str | Path) -> bool:
    """Return whether a container was saved at a path as a single file.

    Example:
        >>> from kd_core import TensorDict, is_memmap_archive
        >>> td = TensorDict({"a": [1, 2]}, [2]).save("single.safetensors")
        >>> is_memmap_archive("single.safetensors"), is_memmap_archive("nothing")
        (True, False)
    """
    from kd_core._store import forms  # requires POSIX

    return forms.is_archive(path)


def refresh_archive_checksums(archive_path: str | Path) -> Path:
    """Write the checksums of a single file whose tensors something else changed; return its path.

    Example:
        >>> from kd_core import TensorDict, load, refresh_archive_checksums
        >>> td = TensorDict({"a": [1, 2]}, [2]).save("fresh.safetensors")
        >>> load(refresh_archive_checksums("fresh.safetensors"), verify="full")["a"]
        tensor([1, 2])
    """
    from kd_core._store import forms  # requires POSIX

    forms.save(forms.load(archive_path), archive_path, archive=True)
    return Path(archive_path)


def to_safetensors(data: TensorDictBase, path: str | Path) -> None:
    """Write a container to one file of safetensors, whatever its name is.

    Names of tensors are keys joined by dots, where that is clear. `load` of a file whose name ends
    in `.safetensors`, and `from_safetensors`, return the same container.

    Example:
        >>> from kd_core import TensorDict, from_safetensors, to_safetensors
        >>> to_safetensors(TensorDict({"n": {"a": [1, 2]}}), "plain.st")
        >>> from_safetensors("plain.st")["n", "a"]
        tensor([1, 2])
    """
    from kd_core._store import single

    single.save(data, Path(path))


def from_safetensors(
    path: str | Path, *, device: DeviceLike | None = None, separator: str | None = None
) -> TensorDict:
    """Return the container in a file of safetensors; one of another origin is flat.

    Args:
        path: the file.
        device: where the tensors are moved; `None`: the CPU.
        separator: split names at it into nested keys, as in `"layer.weight"`; `None`: do not.

    Raises:
        FormatError: if the file is damaged, or is not of this format.
        KeyCollision: if a name is a tensor and the start of another name.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict, from_safetensors
        >>> _ = TensorDict({"layer.bias": torch.zeros(2)}).save("layer.safetensors")
        >>> list(from_safetensors("layer.safetensors", separator=".")["layer"].keys())
        ['bias']
    """
    td = load(path, device=device)
    return td if separator is None else td.unflatten_keys(separator)


def to_arrow(td: TensorDictBase) -> object:
    """Return an Arrow table of a container: `TensorDictBase.to_arrow` as a function.

    Example:
        >>> from kd_core import TensorDict, to_arrow
        >>> from importlib.util import find_spec
        >>> if find_spec("pyarrow"):
        ...     assert to_arrow(TensorDict({"a": [1, 2]}, [2])).num_rows == 2
    """
    return td._kd_engine.to_arrow(td)


def parse_tensor_dict_string(s: str) -> TensorDictBase:
    """Return a container of zeros from what `repr` printed of one, nested ones too.

    Args:
        s: the text, printed with the default options.

    Raises:
        InvalidValue: if the text is not of this form.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> from kd_core.convert import parse_tensor_dict_string
        >>> td = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.arange(3)}}, [3])
        >>> parse_tensor_dict_string(repr(td)).schema() == td.schema()
        True
    """
    return cast("TensorDictBase", container_of_text(s))


def from_tensordict_library(value: object) -> TensorDictBase:
    """Return a container of the package tensordict as one of ours; tensors are shared.

    Nested containers, lazy stacks, batch sizes and non-tensor data are kept; a tensor class becomes
    a `TensorDict`. `TensorDict(value)` takes such a container too, as it takes any mapping: its
    entries without its batch size.

    Args:
        value: the container.

    Raises:
        InvalidArgument: if it is not a container of that package.

    Example:
        >>> from importlib.util import find_spec
        >>> from kd_core import TensorDict
        >>> from kd_core.convert import from_tensordict_library, to_tensordict_library
        >>> td = TensorDict({"a": [1, 2]}, [2])
        >>> if find_spec("tensordict"):
        ...     assert from_tensordict_library(to_tensordict_library(td))["a"] is td["a"]
    """
    from kd_core._convert.plain import node_of

    return cast("TensorDictBase", node_of(value))


def from_tensordict_directory(path: str | Path) -> TensorDictBase:
    """Return the container in a directory that the package tensordict wrote with `memmap`.

    `TensorDict.load` and `load_memmap` read such a directory, too. Tensors stay in its files, and
    writes to them in this process. Pickles are refused: load a directory with pickles with
    tensordict, and convert the container.

    Args:
        path: the directory.

    Raises:
        FormatError: if it is not such a directory, or needs a pickle to be read.
        OSError: if there is nothing at the path.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from kd_core.convert import from_tensordict_directory
        >>> folder = Path("old")
        >>> folder.mkdir()
        >>> leaf = {"device": "cpu", "shape": [2], "dtype": "torch.uint8"}
        >>> kind = "<class 'tensordict._td.TensorDict'>"
        >>> text = json.dumps({"a": leaf, "shape": [2], "device": "cpu", "_type": kind})
        >>> (folder / "meta.json").write_text(text) > 0
        True
        >>> (folder / "a.memmap").write_bytes(bytes([1, 2]))
        2
        >>> from_tensordict_directory(folder)["a"]
        tensor([1, 2], dtype=torch.uint8)
    """
    from kd_core._store.foreign import load

    return cast("TensorDictBase", load(Path(path)))


def to_tensordict_library(td: TensorDictBase) -> object:
    """Return a container of the package tensordict that shares the tensors of `td`.

    Raises:
        MissingDependency: if that package is not installed.
    """
    from kd_core._convert.plain import container_of

    return container_of(td)
