"""Printed containers, read back as containers of zeros: from a log to something that runs."""

from __future__ import annotations

import ast
import re
from typing import Final

import torch
from torch import Tensor

from kd_core._batch.descriptor import describe
from kd_core._errors import InvalidValue
from kd_core._nodes import registry
from kd_core._nodes.entry import Entry, Node

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
    made, end = _container(text, 0)
    if text[end:].strip():
        raise _unreadable(text, end)
    return made


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
        f"position {at}. Print it with the default options."
    )
