"""Looking into stores, checking and rewriting them; names of classes and types in files.

`td.save(path)` writes a store and `TensorDict.load(path)` reads it. A file refers to a class of
containers, or to a type of non-tensor data, by a name that the program registers here, because
loading never imports anything that a file names.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from kd_core import _registry as registry
from kd_core._base import TensorDictBase
from kd_core._errors import FormatError, InvalidArgument, InvalidValue, listed, wrong_type
from kd_core._naming import publish
from kd_core._progress import progress as progress
from kd_core._store import forms
from kd_core._store.commit import StoreInfo as StoreInfo

if TYPE_CHECKING:
    from kd_core._descriptor import Descriptor
    from kd_core._nodes import Entry, Node

C = TypeVar("C", bound=type[TensorDictBase])
T = TypeVar("T")


def inspect(path: str | Path) -> StoreInfo:
    """Return what a store holds, from its manifest alone; tensors are not read.

    Args:
        path: a directory or a file that `save` wrote, or another file of safetensors.

    Raises:
        FormatError: if the manifest is damaged, or is not of this format.
        OSError: if there is nothing at the path.

    Example:
        >>> from kd_core import TensorDict, store
        >>> _ = TensorDict({"a": [1, 2]}, [2]).save("inspect.kd")
        >>> store.inspect("inspect.kd").leaves
        1
    """
    return forms.info(path)


def check(path: str | Path) -> StoreInfo:
    """Read all of a store, compare it with its checksums, and return what it holds.

    Classes and types that it names need not be registered.

    Raises:
        FormatError: if anything is damaged; the message names the file.
        OSError: if there is nothing at the path, or reading fails.

    Example:
        >>> from kd_core import TensorDict, store
        >>> _ = TensorDict({"a": [1, 2]}, [2]).save("check.kd")
        >>> store.check("check.kd").generation
        1
    """
    forms.check(path)
    return forms.info(path)


def compact(path: str | Path) -> None:
    """Rewrite a store in one segment: what was appended is joined with the rest.

    Readers see the old segments or the new one; the content is the same.

    Args:
        path: a directory that `save` or `append_to` wrote.

    Raises:
        FormatError: if the store is damaged; it is left as it is.
        InvalidValue: if it is a single file.

    Example:
        >>> from kd_core import TensorDict, store
        >>> for value in (1, 2):
        ...     TensorDict({"a": [value]}, [1]).append_to("compact.kd")
        >>> store.compact("compact.kd")
        >>> store.inspect("compact.kd").parts, TensorDict.load("compact.kd")["a"].tolist()
        (1, [1, 2])
    """
    forms.compact(path)


def seal(path: str | Path) -> None:
    """Write an arena to the disk and record its checksums: it becomes a store like a saved one.

    Tensors that were loaded from it before must not be written to any more: that would be damage.

    Args:
        path: the directory that `memmap` or `memmap_like` wrote.

    Raises:
        FormatError: if it is not an arena, or it is sealed.

    Example:
        >>> from kd_core import TensorDict, store
        >>> data = TensorDict({"a": [1, 2]}, [2]).memmap("seal.kd")
        >>> store.seal("seal.kd")
        >>> TensorDict.load("seal.kd", verify="full")["a"]
        tensor([1, 2])
    """
    forms.seal(path)


def resize(path: str | Path, rows: int) -> None:
    """Change the number of rows of an arena; new rows are zeros.

    What it holds is copied, so resize in large steps. Readers see the old rows or all new ones. A
    container that was loaded before keeps the old rows, and refuses to write in this process, since
    the write would be lost: load it again. Let other processes do so, too, before they write.

    Args:
        path: the directory that `memmap` or `memmap_like` wrote.
        rows: the size of the first batch dimension; if it is smaller, the last rows are dropped.

    Raises:
        FormatError: if it is not an arena, or it is sealed.
        InvalidValue: if it has no batch, holds other rows than those of tensors, or `rows` is
            negative.

    Example:
        >>> from kd_core import TensorDict, store
        >>> td = TensorDict({"a": [1, 2]}, [2]).memmap("resize.kd")
        >>> store.resize("resize.kd", 3)
        >>> TensorDict.load_memmap("resize.kd")["a"]
        tensor([1, 2, 0])
    """
    if rows < 0:
        raise InvalidValue(f"`rows` must be non-negative, got {rows}.")
    forms.resize(path, rows)


def register_class(
    cls: C,
    name: str,
    *,
    version: int = 1,
    build: Callable[[TensorDictBase], TensorDictBase] | None = None,
) -> C:
    """Register the name under which files refer to a class of containers; return the class.

    Args:
        cls: the class, for example a tensor class.
        name: the name; it must stay the same as long as there are files that have it.
        version: the version that is written. Files of this version and of lower ones are read.
        build: returns an instance from a `TensorDict` of the saved entries; `None`: an instance
            that holds these entries, without a call of its constructor.

    Raises:
        InvalidArgument: if `cls` is not a class of containers.
        InvalidValue: if the name is that of another class.

    Example:
        >>> import torch
        >>> from kd_core import TensorClass, TensorDict, store
        >>> class Point(TensorClass):
        ...     x: torch.Tensor
        >>> Point = store.register_class(Point, "example.Point")
        >>> _ = Point(x=torch.ones(2), batch_size=[2]).save("point.kd")
        >>> type(TensorDict.load("point.kd")).__name__
        'Point'
    """
    if not _is_kind(cls):
        raise wrong_type("`cls`", "a class of containers", cls)

    def built(entries: dict[str, Entry], desc: Descriptor, _: object) -> Node:
        if build is None:
            return _instance(cls, entries, desc)
        return build(registry.make_dense(entries, desc))

    registry.add_class(registry.StoredClass(name, version, cls, built))
    return cls


def _is_kind(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, TensorDictBase)


def _instance(
    cls: type[TensorDictBase], entries: dict[str, Entry], desc: Descriptor
) -> TensorDictBase:
    """Return an instance of a class that holds entries; `_kd_like` compares the keys."""
    made = object.__new__(cls)._kd_like(entries, desc)
    if type(made) is not cls:
        raise FormatError(
            f"the entries {listed(entries)} are not those of the class `{cls.__qualname__}`. "
            "Register it with `version` and `build`, which convert files of its old versions."
        )
    return made


def register_type(
    cls: type[T],
    name: str,
    *,
    encode: Callable[[T], object] | None = None,
    decode: Callable[[object], T] | None = None,
) -> type[T]:
    """Register the name under which files refer to a type of non-tensor data; return the type.

    Args:
        cls: the type; a value of a subclass is not of this type.
        name: the name; it must stay the same as long as there are files that have it.
        encode: returns what stands for a value: strings, numbers, bytes, lists, tuples, dicts,
            `None`, or values of registered types. An enumeration is kept by the names of its
            members unless it is given.
        decode: returns the value from that.

    Raises:
        InvalidArgument: if `encode` and `decode` are not given, and `cls` is not an enumeration.
        InvalidValue: if the name is that of another type.

    Example:
        >>> from datetime import date
        >>> from kd_core import TensorDict, store
        >>> store.register_type(date, "date", encode=str, decode=date.fromisoformat)
        <class 'datetime.date'>
        >>> _ = TensorDict({"day": date(2030, 1, 2)}).save("day.kd")
        >>> TensorDict.load("day.kd")["day"]
        datetime.date(2030, 1, 2)
    """
    if encode is None and decode is None and issubclass(cls, Enum):
        members = cls.__members__
        stored = registry.StoredType(name, cls, _name_of, lambda key: members[cast(str, key)])
    elif encode is None or decode is None:
        raise InvalidArgument(
            f"`encode` and `decode` must both be given for `{cls.__qualname__}`, which is not an "
            "enumeration."
        )
    else:
        stored = registry.StoredType(name, cls, cast("Callable[[object], object]", encode), decode)
    registry.add_type(stored)
    return cls


def _name_of(member: object) -> str:
    assert isinstance(member, Enum)
    return member.name


publish(__name__)
