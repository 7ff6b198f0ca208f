"""What precedes the buffers of a container: canonical JSON, and nothing of Python.

| field | value |
| --- | --- |
| `format`, `version` | `"kd-wire"`, and the version of the format |
| `devices` | the type of each device, in the order in which the container has them |
| `buffers` | dtype, position among the devices, and number of elements of each buffer |
| `tree` | the container as nodes of `_store.encoding` |

In the tree, the segment of a tensor is its buffer, and a device its position among `devices`. The
elements of a tensor follow those of the tensors of the same buffer that come before it in the tree.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from kd_core._errors import FormatError
from kd_core._store.canonical import canonical, parsed
from kd_core._store.dtypes import DTYPES

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
