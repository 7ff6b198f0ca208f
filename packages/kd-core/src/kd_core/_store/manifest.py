"""The manifest of a store: generation, segments and tree, and the limits of all three.

A manifest is two lines of bytes: `{"sha256": "<digest of the second line>"}`, and one canonical
value of JSON. Its rename is the only commit of a store.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Never

import torch
from torch import Tensor

from kd_core._errors import FormatError, InvalidArgument, InvalidValue, with_article
from kd_core._keys import format_key
from kd_core._protocol import AbstractContainer
from kd_core._registry import TYPES, StoredType, is_type, type_named
from kd_core._validation import MAX_DEPTH

if TYPE_CHECKING:
    pass


# The one way to write a value of JSON as bytes, and reading such bytes without surprises.
#
# Keys are sorted, nothing stands between tokens, and all characters are ASCII, so that equal
# values are equal bytes. Keys that are given twice, numbers that are not finite, and nesting so
# deep that a parser would fail are refused.

RESTORE: Final = "Restore the file from a copy."


def canonical(value: object) -> bytes:
    """Return the bytes of a value of JSON."""
    return _ENCODER.encode(value).encode("ascii")


def parsed(data: bytes, what: str, encoding: str = "ascii") -> Any:
    """Return the value that bytes of JSON stand for.

    Args:
        data: the bytes.
        what: what they are, for messages.
        encoding: `"utf-8"` for files of other origins.

    Raises:
        FormatError: if they are not JSON, or a key is given twice, or a number is not finite.
    """
    try:
        return _DECODER.decode(data.decode(encoding))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} must be JSON: {error}. {RESTORE}") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has a key twice")
    return made


def _not_finite(name: str) -> Never:
    raise ValueError(f"`{name}` is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"`{text}` is not a finite number")
    return value


_ENCODER: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_constant=_not_finite
)


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
    tree: Any
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


BY_FULL_NAME: Final = 0
"""The version of a class that is not registered: a file names it by module and class."""


def full_name(cls: type) -> str:
    """Return the name of a class that is not registered."""
    return f"{cls.__module__}.{cls.__qualname__}"


def class_defined(name: object, version: object) -> type[AbstractContainer] | None:
    """Return the class of containers of a full name, the newest one; `None` if there is none."""
    if version != BY_FULL_NAME:
        return None
    found = None
    seen: set[type] = set()
    rest: list[type[AbstractContainer]] = [AbstractContainer]  # type: ignore[type-abstract]  # its subclasses are asked for
    while rest:
        for cls in rest.pop().__subclasses__():
            if cls not in seen:
                seen.add(cls)
                rest.append(cls)
                if full_name(cls) == name and cls._kd_tensor_class in (None, cls):
                    found = cls
    return found


def warn_unknown(name: object) -> None:
    """Warn that a container is loaded as a plain one, because its class is not known."""
    warnings.warn(
        f"the class {str(name)[:200]!r} of a saved container is not defined here, or has other "
        "fields: a `TensorDict` is loaded. Import the class before loading, or register it with "
        "`kd_core.store.register_class`.",
        UserWarning,
        stacklevel=2,
    )


# Which data that is not a tensor is kept, and how it is written as JSON.
#
# `None`, `bool`, `int`, `str`, finite floats and lists stand for themselves. Everything else is an
# object with one key:
#
# | object | value |
# | --- | --- |
# | `{"f": "nan"}` | a float that is not finite: `nan`, `inf` or `-inf` |
# | `{"d": [[key, value], ...]}` | a dict with strings and integers as keys, in its order |
# | `{"t": [...]}` | a tuple |
# | `{"b": "..."}` | bytes, in base 64 |
# | `{"r": [name, value]}` | a value of a registered type, enumerations among them |
# | `{"n": number}` | a tensor, by its place among those of the node: in an `object` only |
#
# A value comes back with its own type. Other values are refused when they are saved.

_PLAIN: Final = frozenset({type(None), bool, str})
_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MOST_DIGITS: Final = 4000
"""Python refuses to write and read integers of more than 4300."""


def written(
    value: object,
    path: tuple[str, ...],
    depth: int = 0,
    number_of: Callable[[Tensor], int] | None = None,
) -> object:
    """Return what stands for a value in JSON.

    Args:
        value: the value.
        path: the entry that holds it, for messages.
        depth: how many lists and dicts enclose it.
        number_of: keeps a tensor beside the value, and returns its number; `None`: tensors are
            refused.

    Raises:
        InvalidArgument: if its type is not kept.
        InvalidValue: if it is nested too deeply, or an integer has too many digits.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, int) and kind is int:
        if abs(value) >= 10**_MOST_DIGITS:
            raise InvalidValue(
                f"entry {format_key(path)} must hold integers of at most {_MOST_DIGITS} digits. "
                "Save it as a string or as bytes."
            )
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if depth >= MAX_DEPTH:
        raise InvalidValue(
            f"entry {format_key(path)} must be nested at most {MAX_DEPTH} levels deep. Check it "
            "for a cycle."
        )
    if isinstance(value, (list, tuple)) and kind in (list, tuple):
        items = [written(item, path, depth + 1, number_of) for item in value]
        return items if kind is list else {"t": items}
    if isinstance(value, dict) and kind is dict:
        return {
            "d": [
                [
                    written(key, path, depth + 1, number_of),
                    written(item, path, depth + 1, number_of),
                ]
                for key, item in value.items()
            ]
        }
    if isinstance(value, bytes) and kind is bytes:
        return {"b": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Tensor) and number_of is not None:
        return {"n": number_of(value)}
    stored = TYPES.get(kind) or _KNOWN.get(kind) or _of_numpy(value)
    if stored is None:
        raise InvalidArgument(
            f"entry {format_key(path)} holds {with_article(kind.__qualname__)}, which cannot be "
            "saved: non-tensor data must be strings, numbers, booleans, `None`, bytes, lists, "
            "tuples, sets, dicts, arrays of numpy, or sizes, dtypes and devices of torch. Register "
            "the type with `kd_core.store.register_type`, or `exclude` the entry."
        )
    return {"r": [stored.name, written(stored.encode(value), path, depth + 1, number_of)]}


def read(value: object, depth: int = 0, tensors: Sequence[Tensor] = ()) -> object:
    """Return the value that stands behind what `written` returned.

    Args:
        value: what stands for it.
        depth: how many lists and dicts enclose it.
        tensors: those that it holds, by their numbers.

    Raises:
        FormatError: if it is none of the forms.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > MAX_DEPTH:
        raise FormatError(f"non-tensor data is nested more than {MAX_DEPTH} levels deep. {RESTORE}")
    if isinstance(value, list):
        return [read(item, depth + 1, tensors) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        [(tag, inner)] = value.items()
        reader = _READERS.get(tag)
        if reader is not None:
            return reader(inner, depth + 1, tensors)
    raise _unknown(value)


def _float(inner: object, depth: int, tensors: Sequence[Tensor]) -> object:
    if not isinstance(inner, str) or inner not in _FLOATS:
        raise _unknown(inner)
    return _FLOATS[inner]


def _dict(inner: object, depth: int, tensors: Sequence[Tensor]) -> object:
    made: dict[object, object] = {}
    for pair in _list(inner):
        match pair:
            case [named, item]:
                key = read(named, depth)
                try:
                    known = key in made
                except TypeError:  # a list, or a tuple with one
                    known = True
                if known:
                    raise _unknown(pair)
                made[key] = read(item, depth, tensors)
            case _:
                raise _unknown(pair)
    return made


def _tuple(inner: object, depth: int, tensors: Sequence[Tensor]) -> object:
    return tuple([read(item, depth, tensors) for item in _list(inner)])


def _bytes(inner: object, depth: int, tensors: Sequence[Tensor]) -> object:
    if not isinstance(inner, str):
        raise _unknown(inner)
    try:
        return base64.b64decode(inner, validate=True)
    except ValueError:
        raise _unknown(inner) from None


def _registered(inner: object, depth: int, tensors: Sequence[Tensor]) -> object:
    match inner:
        case [name, item]:
            stored = _BY_NAME.get(name) if isinstance(name, str) else None
            stored = stored if stored is not None and not is_type(name) else type_named(name)
            value = read(item, depth, tensors)
            try:
                return stored.decode(value)
            except Exception as error:
                raise FormatError(
                    f"{value!r} is not a valid value of the registered type {name!r}: {error}."
                ) from error
    raise _unknown(inner)


def _numbered(inner: object, depth: int, tensors: Sequence[Tensor]) -> object:
    if type(inner) is int and 0 <= inner < len(tensors):
        return tensors[inner]
    raise _unknown(inner)


def _list(inner: object) -> list[Any]:
    if not isinstance(inner, list):
        raise _unknown(inner)
    return inner


_READERS: Final[dict[str, Callable[[object, int, Sequence[Tensor]], object]]] = {
    "f": _float,
    "d": _dict,
    "t": _tuple,
    "b": _bytes,
    "r": _registered,
    "n": _numbered,
}


# Types of Python, torch and numpy that are plain data, unless a program registers them itself.


def _built(cls: type, encode: Callable[[Any], object], decode: Callable[[Any], object]) -> None:
    stored = StoredType(f"{cls.__module__}.{cls.__qualname__}", cls, encode, decode)
    _KNOWN[cls] = _BY_NAME[stored.name] = stored


def _dtype_of(name: str) -> torch.dtype:
    found: object = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"`torch.{name}` is not a dtype")
    return found


_KNOWN: Final[dict[type, StoredType]] = {}
_BY_NAME: Final[dict[str, StoredType]] = {}
# Each reader asks for a list or bytes: a `range` in a forged file would fill the memory.
_built(torch.Size, list, lambda items: torch.Size(_list(items)))
_built(torch.dtype, lambda value: str(value).removeprefix("torch."), _dtype_of)
_built(torch.device, str, torch.device)
_built(complex, lambda value: [value.real, value.imag], lambda items: complex(*_list(items)))
_built(set, lambda value: sorted(value, key=repr), lambda items: set(_list(items)))
_built(frozenset, lambda value: sorted(value, key=repr), lambda items: frozenset(_list(items)))
_built(bytearray, bytes, lambda octets: bytearray(memoryview(octets)))
_built(range, lambda it: [it.start, it.stop, it.step], lambda items: range(*_list(items)))
_built(slice, lambda it: [it.start, it.stop, it.step], lambda items: slice(*_list(items)))
_built(OrderedDict, dict, lambda items: OrderedDict({**items}))
_built(type(Path()), str, Path)
_built(date, date.isoformat, date.fromisoformat)
_built(datetime, datetime.isoformat, datetime.fromisoformat)
_built(
    timedelta,
    lambda it: [it.days, it.seconds, it.microseconds],
    lambda items: timedelta(*_list(items)),
)


def _tensor_written(tensor: Tensor) -> object:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    octets = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return [str(plain.dtype).removeprefix("torch."), list(plain.shape), octets]


def _tensor_read(parts: object) -> Tensor:
    name, shape, octets = _list(parts)
    dtype, memory = _dtype_of(name), bytearray(memoryview(octets))
    flat = torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)
    return flat.reshape(_list(shape))


_built(Tensor, _tensor_written, _tensor_read)

_ARRAY: Final = "numpy.ndarray"
_SCALAR: Final = "numpy.generic"


def _of_numpy(value: object) -> StoredType | None:
    """Return how an array or a scalar of numpy is written; `None` if it is something else."""
    if type(value).__module__ != "numpy":
        return None
    import numpy as np

    if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in _PLAIN_KINDS:
        return None
    return _BY_NAME[_ARRAY if isinstance(value, np.ndarray) else _SCALAR]


def _array_written(array: Any) -> object:
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _array_read(parts: Any) -> Any:
    import numpy as np

    name, shape, octets = _list(parts)
    dtype = np.dtype(str(name))
    if dtype.kind not in _PLAIN_KINDS:
        raise TypeError(f"dtype {name!r}")
    return np.frombuffer(bytearray(memoryview(octets)), dtype).reshape(_list(shape))


_PLAIN_KINDS: Final = "biufcSUmM"
"""Numbers, strings and times."""
_BY_NAME[_ARRAY] = StoredType(_ARRAY, object, _array_written, _array_read)
_BY_NAME[_SCALAR] = StoredType(
    _SCALAR, object, _array_written, lambda parts: _array_read(parts)[()]
)


def _unknown(found: object) -> FormatError:
    return FormatError(f"expected non-tensor data, got {str(found)[:80]!r}. {RESTORE}")
