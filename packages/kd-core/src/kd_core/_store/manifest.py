"""The manifest of a store: generation, segments and tree, and the limits of all three.

A manifest is two lines of bytes: `{"sha256": "<digest of the second line>"}`, and one canonical
value of JSON. Its rename is the only commit of a store.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, NamedTuple

from kd_core._errors import FormatError
from kd_core._store.canonical import RESTORE, canonical, parsed

FORMAT: Final = "kd"
VERSION: Final = 1
"""The version of the format that is written, and the newest one that is read."""

MOST_BYTES: Final = 64 << 20
"""The largest manifest."""

_FIRST_LINE: Final = re.compile(rb'\{"sha256": "([0-9a-f]{64})"\}\n')
SEGMENT: Final = re.compile(r"(seg|arena)-[0-9a-f]{32}\.safetensors")
_FIELDS: Final = {
    "format",
    "generation",
    "min_reader",
    "parent",
    "sealed",
    "segments",
    "tree",
    "version",
}


class NewerFormat(FormatError):
    """A manifest that only a newer version can read."""


class Segment(NamedTuple):
    """A file of tensors."""

    name: str
    size: int
    checksums: list[int]
    """The CRC-32 of each block of 4 MiB; none while an arena is not sealed."""


class Manifest(NamedTuple):
    """What a manifest says."""

    generation: int
    parent: str | None
    """The digest of the manifest that this one replaced."""
    segments: list[Segment]
    tree: object
    sealed: bool = True
    """Whether the segments will not change any more; `False` for an arena."""
    digest: str = ""


def text_of(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        FormatError: if they are more than the limit.
    """
    body = canonical(
        {
            "format": FORMAT,
            "generation": manifest.generation,
            "min_reader": 1,
            "parent": manifest.parent,
            "sealed": manifest.sealed,
            "segments": [list(segment) for segment in manifest.segments],
            "tree": manifest.tree,
            "version": VERSION,
        }
    )
    data = b'{"sha256": "%s"}\n%s' % (hashlib.sha256(body).hexdigest().encode(), body)
    if len(data) > MOST_BYTES:
        raise FormatError(
            f"a manifest must have at most {MOST_BYTES} bytes, got {len(data)}: it holds keys and "
            "non-tensor data that is one value for the whole batch. Save large values as tensors."
        )
    return data


def is_manifest(value: object) -> bool:
    """Return whether a text starts as a manifest does."""
    return (
        isinstance(value, str) and _FIRST_LINE.match(value.encode("utf-8", "replace")) is not None
    )


def manifest_of(data: bytes, what: str) -> Manifest:
    """Return what the bytes of a manifest say.

    Args:
        data: the bytes.
        what: where they are from, for messages.

    Raises:
        FormatError: if they are not a manifest that this version can read.
    """
    line = _FIRST_LINE.match(data)
    if line is None or len(data) > MOST_BYTES:
        raise FormatError(f"{what} is not a manifest of kd. Check the path. {RESTORE}")
    body = data[line.end() :]
    digest = hashlib.sha256(body).hexdigest()
    if digest.encode() != line[1]:
        raise FormatError(f"{what} has been changed: its digest does not match. {RESTORE}")
    fields = parsed(body, what)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise FormatError(f"{what} is not a manifest of kd. Check the path.")
    least = fields.get("min_reader")
    if type(least) is int and least > VERSION:
        raise NewerFormat(
            f"{what} has format version {fields.get('version')!r}, which needs a reader of version "
            f"{least} or newer; this one reads version {VERSION}. Upgrade kd-core."
        )
    # Without patterns, which are slow: "io" in the benchmarks.
    if fields.keys() == _FIELDS:
        generation, parent, sealed = fields["generation"], fields["parent"], fields["sealed"]
        rows, version = fields["segments"], fields["version"]
        counted = _is_count(generation) and _is_count(least) and _is_count(version)
        if counted and type(sealed) is bool and type(rows) is list and _is_digest(parent):
            segments = _segments_of(rows, what)
            return Manifest(generation, parent, segments, fields["tree"], sealed, digest)
    raise FormatError(f"{what} does not have the fields of a manifest. {RESTORE}")


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_digest(parent: object) -> bool:
    return parent is None or isinstance(parent, str)


def _segments_of(rows: list[object], what: str) -> list[Segment]:
    segments = [_segment_of(row, what) for row in rows]
    if len({segment.name for segment in segments}) < len(segments):
        # Joined, the tensors of one file could become any number of bytes.
        raise FormatError(f"{what} names a file of tensors twice. {RESTORE}")
    return segments


def _segment_of(row: object, what: str) -> Segment:
    if isinstance(row, list) and len(row) == 3:
        name, size, sums = row
        named = isinstance(name, str) and (not name or SEGMENT.fullmatch(name))
        if named and type(size) is int and size >= 0 and _are_checksums(sums):
            return Segment(name, size, sums)
    raise FormatError(f"{what} has a segment that is not valid: {str(row)[:80]!r}. {RESTORE}")


def _are_checksums(sums: object) -> bool:
    return isinstance(sums, list) and {*map(type, sums)} <= {int}
