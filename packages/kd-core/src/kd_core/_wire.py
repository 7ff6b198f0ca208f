"""Containers as a header and flat buffers.

Knows bytes and tensors; must not know processes or operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from kd_core._errors import FormatError, InvalidValue, shape_text, wrong_type
from kd_core._leaves.packing import octets_of
from kd_core._store.codec import Decoder, Encoder, Reader, specs_of
from kd_core._store.manifest import RESTORE, canonical, parsed
from kd_core._store.mapped_tensor import DTYPES
from kd_core._torch_private import flatten

if TYPE_CHECKING:
    from kd_core._protocol import AbstractContainer
    from kd_core._store.segments import Spec


# Tensors of one dtype and device as one flat tensor.


def flat_of(leaves: list[Tensor]) -> Tensor:
    """Return all elements of tensors of one dtype and device, one behind the other.

    The result is a view where the elements are in that order already: of one contiguous tensor, and
    of the leaves of a consolidated container.
    """
    with torch.no_grad():
        flat = view_of(leaves)
        if flat is None:
            flat = flatten(leaves)
        flat = flat.resolve_conj().resolve_neg().detach()
        # One element or none may have any stride, with which torch does not view it as bytes.
        return flat.as_strided(flat.shape, (1,))


def view_of(leaves: list[Tensor]) -> Tensor | None:
    """Return a flat view of leaves that follow one another in one storage, else `None`."""
    storage = leaves[0].untyped_storage().data_ptr()
    end, count = leaves[0].data_ptr(), 0
    for leaf in leaves:
        beside = leaf.data_ptr() == end and leaf.untyped_storage().data_ptr() == storage
        if not beside or not leaf.is_contiguous() or leaf.is_conj() or leaf.is_neg():
            return None
        end += leaf.nbytes
        count += leaf.numel()
    return leaves[0].as_strided((count,), (1,)) if count else None


# What precedes the buffers of a container: canonical JSON, and nothing of Python.
#
# | field | value |
# | --- | --- |
# | `format`, `version` | `"kd-wire"`, and the version of the format |
# | `devices` | the type of each device, in the order in which the container has them |
# | `buffers` | dtype, position among the devices, and number of elements of each buffer |
# | `tree` | the container as nodes of `_store.codec` |
#
# In the tree, the segment of a tensor is its buffer, and a device its position among `devices`.
# The elements of a tensor follow those of the tensors of the same buffer that come before it in
# the tree.

FORMAT: Final = "kd-wire"
VERSION: Final = 1
"""The version that is written, and the newest one that is read."""

MOST_BYTES: Final = 64 << 20
"""The largest header."""

_FIELDS: Final = {"buffers", "devices", "format", "tree", "version"}
_MOST_DEVICES: Final = 1 << 10


class BufferSpec(NamedTuple):
    """What a header says of one buffer."""

    dtype: torch.dtype
    device: int
    """The position of its device among `devices`."""
    numel: int


class Header(NamedTuple):
    """What precedes the buffers."""

    devices: list[str]
    buffers: list[BufferSpec]
    tree: object


def text_of(header: Header) -> bytes:
    """Return the bytes of a header.

    Raises:
        FormatError: if they are more than the limit.
    """
    rows = [[str(dtype).removeprefix("torch."), *rest] for dtype, *rest in header.buffers]
    text = canonical(
        {
            "buffers": rows,
            "devices": header.devices,
            "format": FORMAT,
            "tree": header.tree,
            "version": VERSION,
        }
    )
    if len(text) > MOST_BYTES:
        raise FormatError(
            f"a header must have at most {MOST_BYTES} bytes, got {len(text)}: it holds keys and "
            "non-tensor data that is one value for the whole batch. Send large values as tensors."
        )
    return text


def header_of(text: bytes) -> Header:
    """Return what the bytes of a header say.

    Raises:
        FormatError: if they are not a header that this version can read.
    """
    if len(text) > MOST_BYTES:
        raise FormatError(f"a header must have at most {MOST_BYTES} bytes, got {len(text)}.")
    fields = parsed(text, "a header")
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise FormatError("the bytes are not a header of kd. Pass what `to_buffers` returned.")
    if fields.get("version") != VERSION or type(fields["version"]) is not int:
        raise FormatError(
            f"the header has version {str(fields.get('version'))[:80]}, expected {VERSION}. Use "
            "the same version of kd-core in all processes."
        )
    match fields:
        case {"devices": list(devices), "buffers": list(rows), "tree": tree} if (
            fields.keys() == _FIELDS
            and len(devices) <= _MOST_DEVICES
            and all(isinstance(device, str) for device in devices)
        ):
            return Header(devices, [_buffer_of(row, len(devices)) for row in rows], tree)
    raise FormatError("the header does not have the fields of a header.")


def _buffer_of(row: object, devices: int) -> BufferSpec:
    match row:
        case [str(dtype), int(device), int(numel)] if (
            dtype in DTYPES
            and type(device) is int
            and type(numel) is int
            and 0 <= device < devices
            and numel >= 0
        ):
            return BufferSpec(DTYPES[dtype], device, numel)
    raise FormatError(f"{str(row)[:80]!r} is not a valid buffer of a header.")


# A container as a header and buffers, and back, in the form that is told above.


class Form(NamedTuple):
    """A container as a header and buffers."""

    header: bytes
    buffers: list[Tensor]


def form_of(td: AbstractContainer) -> Form:
    """Return a container as a header and one buffer for each dtype and device.

    Raises:
        InvalidArgument: if the type of an entry has no form.
        InvalidValue: if the value of an entry has none.
        FormatError: if the header would be too large.
    """
    encoder = _Encoder()
    tree = encoder.node_of(td)
    members: list[list[Tensor]] = [[] for _ in encoder.segments]
    for leaf in encoder.tensors.values():
        members[encoder.segments[leaf.dtype, leaf.device]].append(leaf)
    buffers = [flat_of(leaves) for leaves in members]
    places = list(encoder.devices)
    specs = [
        BufferSpec(dtype, places.index(device), flat.numel())
        for (dtype, device), flat in zip(encoder.segments, buffers, strict=True)
    ]
    return Form(text_of(Header([place.type for place in places], specs, tree)), buffers)


class _Encoder(Encoder):
    """The nodes of one container, whose tensors are in one buffer for each dtype and device."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: dict[tuple[torch.dtype, torch.device], int] = {}
        self.devices: dict[torch.device, int] = {}

    def _segment_of(self, leaf: Tensor) -> int:
        self._place(leaf.device)
        return self.segments.setdefault((leaf.dtype, leaf.device), len(self.segments))

    def _place(self, device: torch.device) -> int:
        return self.devices.setdefault(device, len(self.devices))


def container_of(text: bytes, buffers: Sequence[object]) -> AbstractContainer:
    """Return the container of a header and buffers; its leaves are views of them.

    Raises:
        FormatError: if the header is not valid, or does not fit the buffers.
        InvalidArgument: if the header is not bytes, or a buffer neither a tensor nor bytes.
        InvalidValue: if buffers of one device are on several ones.
    """
    if not isinstance(text, (bytes, bytearray, memoryview)):
        raise wrong_type("`header`", "bytes", text)
    header = header_of(bytes(text))
    try:
        return _decoded(header, _checked(buffers, header))
    except FormatError as error:
        reason = str(error).replace(RESTORE, "").rstrip()
        raise FormatError(f"the header is not valid: {reason}") from None


def _decoded(header: Header, buffers: list[Tensor]) -> AbstractContainer:
    places: dict[object, torch.device] = {}
    for spec, buffer in zip(header.buffers, buffers, strict=True):
        if places.setdefault(spec.device, buffer.device) != buffer.device:
            raise InvalidValue(
                f"buffers of one device must stay together, got one on {buffer.device} after one "
                f"on {places[spec.device]}. Move them all."
            )
    specs = specs_of(header.tree, len(buffers))
    readers = [_reader_of(*row) for row in zip(specs, header.buffers, buffers, strict=True)]

    def place_of(position: object) -> torch.device:
        if type(position) is not int or not 0 <= position < len(header.devices):
            raise FormatError(f"{str(position)[:80]!r} is not a valid device of a header.")
        return places.get(position, torch.device("cpu"))

    return Decoder(specs, readers, place_of).container_of(header.tree)


def _checked(buffers: Sequence[object], header: Header) -> list[Tensor]:
    """Return the buffers, those that were given as bytes as their dtype."""
    if len(buffers) != len(header.buffers):
        raise FormatError(f"it has {len(header.buffers)} buffers, got {len(buffers)}.")
    made = []
    for position, (given, spec) in enumerate(zip(buffers, header.buffers, strict=True)):
        try:
            buffer = given if isinstance(given, Tensor) else octets_of(given)
        except TypeError:
            raise wrong_type(f"buffer {position}", "a tensor or bytes", given) from None
        numel = spec.numel
        if buffer.dtype is torch.uint8 and spec.dtype is not torch.uint8:
            numel *= spec.dtype.itemsize
        elif buffer.dtype is not spec.dtype:
            raise FormatError(f"buffer {position} must be of {spec.dtype}, got {buffer.dtype}.")
        if buffer.shape != (numel,):
            raise FormatError(
                f"buffer {position} must have the shape {(numel,)}, got {shape_text(buffer.shape)}."
            )
        made.append(buffer if buffer.dtype is spec.dtype else _as_dtype(buffer, spec.dtype))
    return made


def _as_dtype(octets: Tensor, dtype: torch.dtype) -> Tensor:
    if not octets.is_contiguous() or octets.data_ptr() % dtype.itemsize:
        octets = octets.clone(memory_format=torch.contiguous_format)
    return octets.view(dtype)


def _reader_of(specs: Mapping[str, Spec], expected: BufferSpec, flat: Tensor) -> Reader:
    """Return what returns the tensors of one buffer."""
    sizes = [math.prod(spec.shape) for spec in specs.values()]
    if sum(sizes) != flat.numel() or any(spec.dtype is not flat.dtype for spec in specs.values()):
        raise FormatError(
            f"its tensors do not fill a buffer of {expected.numel} elements of {flat.dtype}."
        )
    starts = dict(zip(specs, accumulate(sizes, initial=0), strict=False))

    def read(some: Mapping[str, Spec]) -> dict[str, Tensor]:
        made = {}
        for name, (_, shape) in some.items():
            start = starts[name]
            made[name] = flat[start : start + math.prod(shape)].view(shape)
        return made

    return read
