"""The schema of a container: what its entries are, without their values."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from kd_core import _registry as registry
from kd_core._descriptor import describe
from kd_core._display import short_name
from kd_core._errors import InvalidValue, wrong_type
from kd_core._keys import format_key, path_of
from kd_core._leaves.loops import kinds_of
from kd_core._naming import public_in
from kd_core._nodes import Entry, Node, as_read, is_unbatched
from kd_core._protocol import AbstractContainer, level_at
from kd_core._unbatched import wrap_tensor

if TYPE_CHECKING:
    from kd_core._types import NestedKey


@public_in("kd_core.convert")
class LeafSchema(NamedTuple):
    """What one entry of a container is.

    Attributes:
        kind: `"tensor"`, `"jagged"` (a nested tensor), `"ragged"` (members of different shapes),
            `"unbatched"` (an `UnbatchedTensor`) or `"data"` (not a tensor).
        shape: the dimensions after the batch size, or all of an unbatched tensor; empty for data
            and for what has no one shape.
        dtype: the dtype; `None` for data.

    Example:
        >>> import torch
        >>> from kd_core import TensorDict
        >>> TensorDict({"a": torch.zeros(3, 4)}, [3]).schema()["a"].shape
        torch.Size([4])
    """

    kind: str
    shape: torch.Size
    dtype: torch.dtype | None


def schema_of(td: AbstractContainer) -> dict[NestedKey, LeafSchema]:
    """Return the schema of all leaves; keys of nested ones are tuples."""
    found: dict[NestedKey, LeafSchema] = {}
    _describe(td, td._kd_desc.ndim, (), found)
    return found


def _describe(
    td: AbstractContainer,
    ndim: int,
    path: tuple[str, ...],
    found: dict[NestedKey, LeafSchema],
) -> None:
    for key, kind in kinds_of(td._kd_entries):
        where = (*path, key)
        if isinstance(kind, AbstractContainer):
            _describe(level_at(td, (key,)), ndim, where, found)
        elif is_unbatched(kind):
            tensor = kind._tensor
            found[where if path else key] = LeafSchema("unbatched", tensor.shape, tensor.dtype)
        elif isinstance(kind, Tensor):
            found[where if path else key] = _leaf_schema(td, key, kind, ndim)
        else:
            found[where if path else key] = LeafSchema("data", torch.Size(()), None)


def _leaf_schema(td: AbstractContainer, key: str, kind: Tensor, ndim: int) -> LeafSchema:
    try:
        leaf = as_read(td._kd_entries[key])
    except RuntimeError:  # its members have different shapes
        return LeafSchema("ragged", torch.Size(()), kind.dtype)
    if leaf.is_nested:
        return LeafSchema("jagged", torch.Size(()), leaf.dtype)
    return LeafSchema("tensor", torch.Size(leaf.shape[ndim:]), leaf.dtype)


def entries_of_schema(
    schema: Mapping[NestedKey, object],
    batch: tuple[int, ...],
    device: object,
    path: tuple[str, ...] = (),
) -> dict[tuple[str, ...], object]:
    """Return zeros for each leaf of a schema.

    Args:
        schema: for each key a `LeafSchema`, a pair of shape and dtype in any order, or a mapping.
        batch: the batch size.
        device: where the tensors are made.
        path: the key of the mapping, for messages.
    """
    made: dict[tuple[str, ...], object] = {}
    zeros: Callable[..., Tensor] = torch.zeros
    for key, row in schema.items():
        where = (*path, *path_of(key))
        if isinstance(row, Mapping):
            made.update(entries_of_schema(row, batch, device, where))
            continue
        shape, dtype, kind = _shape_and_dtype(where, row)
        if kind == "data":
            made[where] = None
            continue
        if kind == "unbatched":
            made[where] = wrap_tensor(zeros(shape, dtype=dtype, device=device), describe(()))
            continue
        made[where] = zeros((*batch, *shape), dtype=dtype, device=device)
    return made


def _shape_and_dtype(
    key: tuple[str, ...], row: object
) -> tuple[tuple[int, ...], torch.dtype | None, str]:
    if isinstance(row, LeafSchema):
        if row.kind in ("ragged", "jagged"):
            remedy = "Replace it by a shape and a dtype."
            raise wrong_type(f"the schema of {format_key(key)}", "one shape", row.kind, remedy)
        return tuple(row.shape), row.dtype, row.kind
    if isinstance(row, torch.dtype):
        return (), row, "tensor"
    pair = tuple(row) if isinstance(row, (tuple, list)) else ()
    dtypes = [part for part in pair if isinstance(part, torch.dtype)]
    shapes = [part for part in pair if isinstance(part, (tuple, list))]
    if len(pair) != 2 or len(dtypes) != 1 or len(shapes) != 1:
        raise wrong_type(
            f"the schema of {format_key(key)}",
            "a `LeafSchema`, a shape and a dtype, or a mapping",
            row,
            "Write for example `((84, 84), torch.float32)`.",
        )
    return tuple(shapes[0]), dtypes[0], "tensor"


# Printed containers, read back as containers of zeros: from a log to something that runs.

_HEAD: Final = re.compile(r"\s*\w+\(batch_size=\[([\d, ]*)\][^{}]*, fields=\{")
_BLANK: Final = re.compile(r"\s*")
_INNER: Final = re.compile(r"(?:\w+ )?(?:batch_size=\[([\d, ]*)\] )?\{")
_SHORT_LEAF: Final = re.compile(r"(unbatched )?(\w+)\[([\d,]*)\](?: [\w:]+)?(?=[,}])")
_SHORT_KEY: Final = re.compile(
    r"(.*?): (?=(?:unbatched )?\w+\[[\d,]*\]|(?:\w+ )?(?:batch_size=\S.*?\] )?\{|['\"\[({\d-]"
    r"|None|True|False|b['\"])",
    re.DOTALL,
)
_ENDS: Final = re.compile(r"(?=,\s|\})")
_DTYPES: Final = {
    short_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
_OPEN: Final = re.compile(r"\s*(\w+)\(\s*fields=\{\s*")
_KEY: Final = re.compile(r"\s*(.*?): (?=\w+\()", re.DOTALL)
_LEAF: Final = re.compile(
    r"\w+\(shape=torch\.Size\(\[([\d, ]*)\]\)[^()]*dtype=torch\.(\w+)[^()]*\)"
)
_DATA: Final = re.compile(
    r"\w+\(data=(.*?), batch_size=torch\.Size\(\[[\d, ]*\]\)[^()\n]*\)", re.DOTALL
)
_SIZE: Final = re.compile(r"\s*\},?\s*batch_size=torch\.Size\(\[([\d, ]*)\]\)[^()]*\)")


def container_of_text(text: str) -> Node:
    """Return a container of zeros from what `repr` of a container says.

    Raises:
        InvalidValue: if the text is not of this form; the message shows the place.
    """
    head = _HEAD.match(text)
    made, end = _container(text, 0) if head is None else _compact(text, head)
    if text[end:].strip():
        raise _unreadable(text, end)
    return made


def _compact(text: str, head: re.Match[str]) -> tuple[Node, int]:
    """Read a container that was printed with a short line for each leaf."""
    made, end = _level(text, head.end(), _sizes(head[1]))
    if text[end : end + 1] != ")":
        raise _unreadable(text, end)
    return made, end + 1


def _after_blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return at if found is None else found.end()


def _level(text: str, at: int, batch: tuple[int, ...]) -> tuple[Node, int]:
    """Read the entries between braces; `at` is behind the first one."""
    entries: dict[str, Entry] = {}
    at = _after_blank(text, at)
    while text[at : at + 1] != "}":
        key = _SHORT_KEY.match(text, at)
        if key is None:
            raise _unreadable(text, at)
        entries[key[1]], at = _short(text, key.end(), batch)
        if text[at : at + 1] == ",":
            at = _after_blank(text, at + 1)
        elif text[at : at + 1] != "}":
            raise _unreadable(text, at)
    return registry.nest_mapping(entries, describe(batch), ()), at + 1


def _short(text: str, at: int, batch: tuple[int, ...]) -> tuple[Entry, int]:
    """Read the value of one key."""
    inner = _INNER.match(text, at)
    if inner is not None:
        return _level(text, inner.end(), batch if inner[1] is None else _sizes(inner[1]))
    leaf = _SHORT_LEAF.match(text, at)
    if leaf is not None:
        dtype = _DTYPES.get(leaf[2])
        if dtype is None:
            raise _unreadable(text, at)
        zeros = torch.zeros((*(() if leaf[1] else batch), *_sizes(leaf[3])), dtype=dtype)
        return (wrap_tensor(zeros, describe(())) if leaf[1] else zeros), leaf.end()
    for end in _ENDS.finditer(text, at):
        try:
            value = ast.literal_eval(text[at : end.start()])
        except (ValueError, SyntaxError):
            continue
        return registry.wrap_data(value, describe(())), end.start()
    raise _unreadable(text, at)


def _container(text: str, at: int) -> tuple[Node, int]:
    opened = _OPEN.match(text, at)
    if opened is None:
        raise _unreadable(text, at)
    at = opened.end()
    entries: dict[str, Entry] = {}
    closed = _SIZE.match(text, at)
    while closed is None:
        key = _KEY.match(text, at)
        if key is None:
            raise _unreadable(text, at)
        entries[key[1]], at = _entry(text, key.end())
        closed = _SIZE.match(text, at)
        if closed is None:
            if text[at : at + 1] != ",":
                raise _unreadable(text, at)
            at += 1
    desc = describe(_sizes(closed[1]))
    return registry.nest_mapping(entries, desc, ()), closed.end()


def _entry(text: str, at: int) -> tuple[Entry, int]:
    if _OPEN.match(text, at):
        return _container(text, at)
    leaf = _LEAF.match(text, at)
    if leaf is not None:
        return _zeros(leaf[1], leaf[2], text, at), leaf.end()
    data = _DATA.match(text, at)
    if data is None:
        raise _unreadable(text, at)
    try:
        value = ast.literal_eval(data[1])
    except (ValueError, SyntaxError):
        raise _unreadable(text, at) from None
    return registry.wrap_data(value, describe(())), data.end()


def _zeros(sizes: str, dtype: str, text: str, at: int) -> Tensor:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise _unreadable(text, at)
    return torch.zeros(_sizes(sizes), dtype=found)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.replace(",", " ").split())


def _unreadable(text: str, at: int) -> InvalidValue:
    return InvalidValue(
        f"expected a printed container with shapes and dtypes, got {text[at : at + 60]!r} at "
        f"position {at}. Print it with `set_printoptions(compact=False)`, which does not cut long "
        "data."
    )
