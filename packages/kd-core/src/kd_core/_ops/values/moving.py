"""Moving a container to a device: the arguments of `to`, `cpu` and `cuda`, and the move itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kd_core._batch.descriptor import describe, device_of
from kd_core._errors import InvalidArgument, listed, wrong_type
from kd_core._nodes.entry import is_unbatched
from kd_core._protocol.composite import Composite
from kd_core._protocol.primitives import AbstractContainer

if TYPE_CHECKING:
    from typing import TypedDict, TypeVar

    import torch

    from kd_core._nodes.entry import Entry
    from kd_core._ops.math.binary import CastFilter
    from kd_core._types import BatchSize, DeviceLike, LeafFn

    W = TypeVar("W", bound=AbstractContainer)

    class Further(TypedDict, total=False):
        """The keyword arguments that `to`, `cpu` and `cuda` share."""

        dtype: torch.dtype | None
        other: Tensor | AbstractContainer | None
        tensor: Tensor | None
        non_blocking_pin: bool
        cast_filter: CastFilter | None
        memory_format: torch.memory_format | None
        batch_size: BatchSize | None
        inplace: bool
        num_threads: int

    class Options(Further, total=False):
        """The keyword arguments of `to`."""

        device: DeviceLike | None
        non_blocking: bool


def moved(td: W, device: torch.device, non_blocking: bool, stated: bool = True) -> W:
    """Return a new container of the leaves on a device; those that are there already are shared.

    Args:
        td: the container.
        device: where to.
        non_blocking: copy without waiting.
        stated: each level states the device; else those alone that state one.
    """
    there = stated or td._kd_desc.device is not None
    desc = describe(td._kd_desc.batch, device if there else None)
    if isinstance(td, Composite):
        return td._by_member(lambda member: moved(member, device, non_blocking, stated))
    entries: dict[str, Entry] = {}
    for key, value in td._kd_entries.items():
        if isinstance(value, Tensor):
            # Asked first: `to` takes long to find out that there is nothing to do.
            is_there = value.device == device
            entries[key] = value if is_there else value.to(device, non_blocking=non_blocking)
        elif isinstance(value, AbstractContainer):
            entries[key] = moved(value, device, non_blocking, stated)
        elif is_unbatched(value):
            entries[key] = value._kd_map_each(
                lambda leaf: leaf.to(device, non_blocking=non_blocking)
            )._kd_with_descriptor(desc)
        else:
            entries[key] = value._kd_with_descriptor(describe(value._kd_desc.batch, desc.device))
    return td._kd_like(entries, desc)


_OPTIONS: Final = frozenset({"device", "dtype", "other", "tensor", "batch_size", "inplace"}) | {
    *("non_blocking", "non_blocking_pin", "cast_filter", "memory_format", "num_threads"),
}
_DIMS: Final = {torch.channels_last: 4, torch.channels_last_3d: 5}
"""How many dimensions a leaf must have for a memory format; the others suit all leaves."""


class Target:
    """What the arguments ask for."""

    __slots__ = ("device", "dtype", "memory_format", "non_blocking", "pin")

    def __init__(self, options: Options) -> None:
        self.device: torch.device | None = None
        self.dtype: torch.dtype | None = None
        self.non_blocking = bool(options.get("non_blocking"))
        self.pin = bool(options.get("non_blocking_pin"))
        self.memory_format = options.get("memory_format")


def read_target(where: Sequence[object], options: Options) -> Target:
    """Return what the arguments of `to` ask for.

    Raises:
        InvalidArgument: if one is unknown or of the wrong type, or two are of a kind.
    """
    given = [*where]
    if options:
        _check_names(options)
        given += [options.get(name) for name in ("device", "dtype", "other", "tensor")]
    target = Target(options)
    for position, each in enumerate(given):
        if each is None:
            continue
        if each.__class__ is bool and 0 < position == len(where) - 1:
            target.non_blocking = bool(each)
            continue
        device, dtype = read_argument(each)
        if (device and target.device is not None) or (dtype and target.dtype is not None):
            raise InvalidArgument(
                "`to` expected at most one device and one dtype, got two of a kind. Pass each once."
            )
        target.device, target.dtype = device or target.device, dtype or target.dtype
    if target.dtype is None and options.get("cast_filter") is not None:
        raise InvalidArgument("`cast_filter` chooses what is cast to a dtype. Pass `dtype`, too.")
    return target


def with_format(memory_format: torch.memory_format) -> LeafFn:
    """Return a function that gives a leaf a memory format, if it has as many dimensions."""
    if not isinstance(memory_format, torch.memory_format):
        raise wrong_type("`memory_format`", "a `torch.memory_format`", memory_format)
    if memory_format is torch.preserve_format:
        return lambda leaf: leaf
    ndim = _DIMS.get(memory_format)
    return lambda leaf: (
        leaf.contiguous(memory_format=memory_format) if ndim in (None, leaf.ndim) else leaf
    )


def _check_names(options: Options) -> None:
    unknown = [name for name in options if name not in _OPTIONS]
    if not unknown:
        return
    raise InvalidArgument(
        f"`to` got unexpected keyword arguments: {listed(unknown)}; it takes "
        f"{listed(sorted(_OPTIONS))}."
    )


def read_argument(where: object) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype that an argument of `to` stands for."""
    if isinstance(where, torch.dtype):
        return None, where
    if isinstance(where, Tensor):
        return where.device, where.dtype
    if isinstance(where, AbstractContainer):
        if where._kd_desc.device is None:
            raise InvalidArgument("`to` got a container without a device: give the device itself.")
        return where._kd_desc.device, None
    if isinstance(where, (torch.device, str, int)):
        return device_of(where), None
    raise wrong_type("an argument of `to`", "a device, a dtype, a tensor or a container", where)
