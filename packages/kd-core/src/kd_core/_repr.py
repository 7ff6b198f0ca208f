"""Printing a container: the nested `repr` that readers of the field know."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kd_core._batch.names import names_of
from kd_core._errors import KdError, ShapeMismatch
from kd_core._leaves.loops import entries_of

if TYPE_CHECKING:
    from kd_core._entry import Entries, Entry, Node

INDENT = "    "
MOST_KEYS = 200


def describe_leaf(value: Tensor) -> str:
    """Return a leaf as text: class, shape, device, dtype, and whether processes share it."""
    kind = "Parameter" if isinstance(value, torch.nn.Parameter) else type(value).__name__
    shared = value.is_cuda or (value.device.type == "cpu" and _is_shared(value))
    return (
        f"{kind}(shape={torch.Size(value.shape)}, device={value.device}, dtype={value.dtype}, "
        f"is_shared={shared})"
    )


def _is_shared(value: Tensor) -> bool:
    try:
        return bool(value.is_shared())  # type: ignore[no-untyped-call]  # torch does not type it
    except (RuntimeError, NotImplementedError):  # fake and functional tensors have no storage
        return False


def describe_node(node: Node) -> str:
    """Return a container and what it holds as text; other nodes describe themselves."""
    entries = entries_of(node)
    if entries is None:
        return repr(node)
    partial: dict[str, str] = getattr(entries, "_partial", dict)()
    keys = sorted([*entries, *partial])
    shown = {key: _entry(entries, key) for key in keys[:MOST_KEYS] if key not in partial}
    ragged = {
        key: cast("str", getattr(entries, "_ragged")(key))  # noqa: B009  # a stack has it
        for key, value in shown.items()
        if isinstance(value, ShapeMismatch)
    }
    texts = {key: _describe(value) for key, value in shown.items()} | partial | ragged
    lines = [f"{key}: {texts[key]}" for key in keys[:MOST_KEYS]]
    if len(keys) > MOST_KEYS:
        lines.append(f"... ({len(keys) - MOST_KEYS} more)")
    inner = _indent(",\n".join(lines), 2)
    fields = f"{INDENT}fields={{\n{inner}}}" if lines else f"{INDENT}fields={{\n{INDENT}}}"
    desc = node._desc
    leaves = [value for value in shown.values() if isinstance(value, Tensor)]
    shared = bool(leaves) and all(_is_shared_anywhere(leaf) for leaf in leaves)
    return (
        f"{type(node).__name__}(\n{fields},\n"
        f"{INDENT}batch_size={torch.Size(desc.batch)},\n"
        f"{INDENT}device={desc.device},\n"
        f"{INDENT}is_shared={shared}{_names(node)}{_stack_dim(node)})"
    )


def _names(node: Node) -> str:
    names = names_of(node._desc.batch)
    return f",\n{INDENT}names={list(names)}" if any(names) else ""


def _stack_dim(node: Node) -> str:
    dim = getattr(node, "stack_dim", None)
    return "" if dim is None else f",\n{INDENT}stack_dim={dim}"


def _is_shared_anywhere(leaf: Tensor) -> bool:
    return leaf.is_cuda or (leaf.device.type == "cpu" and _is_shared(leaf))


def _entry(entries: Entries, key: str) -> Entry | KdError:
    """Return an entry, or why it cannot be read: printing does not fail."""
    try:
        return entries[key]
    except KdError as error:
        return error


def _describe(value: Entry | KdError) -> str:
    if isinstance(value, KdError):
        return "differs among the members"
    return describe_leaf(value) if isinstance(value, Tensor) else describe_node(value)


def _indent(text: str, levels: int) -> str:
    return "\n".join(INDENT * levels + line for line in text.split("\n"))
