"""`TensorDict`: the dense container."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core import _registry
from kd_core._admission import admit, check_key
from kd_core._dense import Dense
from kd_core._descriptor import Descriptor, describe
from kd_core._errors import InvalidArgument, KeyCollision, listed
from kd_core._leaves import all_fit
from kd_core._shapes import batch_of
from kd_core._waist import Waist

if TYPE_CHECKING:
    from typing import Self

    from kd_core._types import BatchSize, DeviceLike, Entry, Node


class TensorDict(Dense):
    """A mapping of (nested) string keys to tensors that share their leading dimensions.

    Args:
        source: a mapping or a container. Nested mappings become nested containers; numbers, lists
            of numbers and numpy arrays become tensors; anything else is kept as data that is no
            tensor, one value for the whole batch.
        batch_size: the leading dimensions of every entry; `None` means `()`, it is never inferred.
        device: where every entry is moved; `None` leaves them where they are.
        lock: lock the container once it is built.
        **entries: more entries, by keyword.

    Raises:
        ShapeMismatch: if a value's shape does not start with the batch size.
        InvalidKey: if a key is no string.
        KeyCollision: if a keyword repeats a key of the source.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> td = TensorDict({"obs": torch.zeros(3, 4), "next": {"obs": torch.ones(3, 4)}}, [3])
        >>> td["next", "obs"].shape, td[0].batch_size
        (torch.Size([3, 4]), torch.Size([]))
    """

    __slots__ = ()

    def __init__(
        self,
        source: Mapping[str, object] | Waist | None = None,
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        lock: bool = False,
        **entries: object,
    ) -> None:
        if batch_size is None:
            batch = source._desc.batch if isinstance(source, Waist) else ()
        else:
            batch = batch_of(batch_size)
        desc = describe(batch, None if device is None else device_of(device))
        if source is None:
            source = entries
        elif entries:
            source = _merged(source, entries)
        self._desc = desc
        if source.__class__ is dict and all_fit(cast("dict[str, object]", source), desc):
            self._entries = cast("dict[str, Entry]", source).copy()
            self._nested = False
        else:
            self._entries = admit_all(source, desc)
            self._nested = True
        if lock:
            self.lock_()

    @classmethod
    def from_dict(
        cls,
        source: Mapping[str, object],
        batch_size: BatchSize | None = None,
        device: DeviceLike | None = None,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
    ) -> Self:
        """Build a container from nested dicts.

        Args:
            source: nested dicts of values.
            batch_size: the leading dimensions of every entry.
            device: where every entry is moved.
            auto_batch_size: infer the batch size: all leading dimensions that the leaves share.
            batch_dims: infer at most so many.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> source = {"a": torch.zeros(3, 4), "b": {"c": torch.zeros(3)}}
            >>> TensorDict.from_dict(source, auto_batch_size=True).batch_size
            torch.Size([3])
        """
        td = cls(source, batch_size, device)
        if batch_size is None and (auto_batch_size or batch_dims is not None):
            td.auto_batch_size_(batch_dims)
        return td

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (self.__class__, self._entries, self._desc)


def _restore(cls: type[TensorDict], entries: dict[str, Entry], desc: Descriptor) -> TensorDict:
    td = object.__new__(cls)
    td._entries = entries
    td._desc = desc
    td._nested = True
    return td


def make_dense(entries: dict[str, Entry], desc: Descriptor) -> TensorDict:
    """Wrap checked entries; the dict is handed over."""
    td = object.__new__(TensorDict)
    td._entries = entries
    td._desc = desc
    td._nested = any(not isinstance(value, Tensor) for value in entries.values())
    return td


def admit_all(source: object, desc: Descriptor, path: tuple[str, ...] = ()) -> dict[str, Entry]:
    """Check and convert all values of a mapping."""
    if isinstance(source, Waist):
        source = source._entries
    elif not isinstance(source, Mapping):
        raise InvalidArgument(
            f"a container is built from a mapping, but a `{type(source).__name__}` came. Wrap a "
            "single tensor as `{'key': tensor}`."
        )
    return {check_key(key): admit(key, value, desc, path) for key, value in source.items()}


def _nest_mapping(source: Mapping[str, object], desc: Descriptor, path: tuple[str, ...]) -> Node:
    desc = desc.unlocked()
    if source.__class__ is dict and all_fit(cast("dict[str, object]", source), desc):
        td = object.__new__(TensorDict)
        td._entries = cast("dict[str, Entry]", source).copy()
        td._desc = desc
        td._nested = False
        return td
    return make_dense(admit_all(source, desc, path), desc)


def _merged(source: Mapping[str, object] | Waist, entries: dict[str, object]) -> dict[str, object]:
    old: Mapping[str, object] = source._entries if isinstance(source, Waist) else source
    twice = [key for key in entries if key in old]
    if twice:
        raise KeyCollision(
            f"{listed(twice)} given in the source and by keyword: give each key once."
        )
    return {**old, **entries}


def device_of(device: DeviceLike) -> torch.device:
    """A device with its index, so that equal devices compare equal."""
    found = _DEVICES.get(device) if isinstance(device, str) else None
    if found is None:
        found = torch.device(device)
        if str(found) == "cuda" and torch.cuda.is_available():
            found = torch.device("cuda", torch.cuda.current_device())
    return found


_DEVICES = {"cpu": torch.device("cpu")}

_registry.register("make_dense", make_dense)
_registry.register("nest_mapping", _nest_mapping)
