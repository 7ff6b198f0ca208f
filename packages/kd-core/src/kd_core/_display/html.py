"""Showing a container in a notebook: a table that folds, without scripts or style sheets.

Knows entries; must not know containers. Every key and every value is escaped, because both may come
from a file.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final, cast

from kd_core._errors import KdError
from kd_core._leaves.loops import entries_of
from kd_core._leaves.shapeless import is_shapeless
from kd_core._nodes.entry import tensor_of

if TYPE_CHECKING:
    from kd_core._nodes.entry import Entries, Node

MOST_KEYS: Final = 200
LONGEST_VALUE: Final = 80


def html_of_node(node: Node) -> str:
    """Return the HTML of a container: a line for each leaf, a block that folds for each level."""
    return _level(node, type(node).__name__, is_open=True)


def _level(node: Node, title: str, is_open: bool) -> str:
    entries = entries_of(node) or {}
    facts = f"batch_size={tuple(node._kd_desc.batch)}, device={node._kd_desc.device}"
    keys = list(entries)
    rows = [_row(entries, key) for key in keys[:MOST_KEYS]]
    if len(keys) > MOST_KEYS:
        rows.append(f"<div>... ({len(keys) - MOST_KEYS} more)</div>")
    return (
        f"<details{' open' if is_open else ''}><summary><b>{escape(title)}</b> "
        f"<code>{escape(facts)}</code></summary>"
        f'<div style="margin-left: 1.5em">{"".join(rows)}</div></details>'
    )


def _row(entries: Entries, key: str) -> str:
    try:
        entry = entries[key]
    except KdError:  # members of a stack differ: showing does not fail
        return _line(key, "differs among the members")
    leaf = tensor_of(entry)
    if leaf is not None:
        dtype = str(leaf.dtype).removeprefix("torch.")
        shape = "ragged" if is_shapeless(leaf) else tuple(leaf.shape)
        return _line(key, f"{type(entry).__name__} {shape} {dtype} {leaf.device}")
    node = cast("Node", entry)
    if entries_of(node) is not None:
        return _level(node, key, is_open=False)
    text = repr(node._kd_item())
    return _line(key, text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}...")


def _line(key: str, text: str) -> str:
    return f"<div>{escape(key)}: <code>{escape(text)}</code></div>"
