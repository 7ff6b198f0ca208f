"""A keyed module as one node of a key graph: its keys, and what people read beside them."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import UninitializedParameter

from kd_core import NestedKey
from kd_nn._dispatch.dispatch import keys_of, optional_keys
from kd_nn._keys.flow import KeyNode
from kd_nn._keys.specs import DISCARD, Keys, parse_keys
from kd_nn._plan.program import is_sequence, keyed, runs_on_values


def key_node(name: str, step: nn.Module, may_skip: bool = False) -> KeyNode:
    """Return a keyed module as a node of a key graph; `described` adds what people read.

    Args:
        name: The name of the step.
        step: The keyed module.
        may_skip: Whether the sequence that holds it leaves it out for want of inputs.
    """
    reads, writes = keys_as_parsed(step)
    opens = is_sequence(step) and runs_on_values(step)
    inner = keyed(step)._kd_graph() if opens else None
    optional = optional_keys(step) if inner is None else ()
    # Asked of the class: the guard of dynamo for a default would compute the property again.
    has_parts = hasattr(type(step), "_kd_partly_read")
    partly = cast("list[NestedKey]", step._kd_partly_read) if has_parts else []
    may_skip = may_skip or (inner is None and getattr(step, "_kd_may_skip", False) is True)
    plain = inner is None and not optional and not partly
    make = _make_node if is_dynamo_compiling() or not plain else _equal_node
    node = make(name, type(step).__name__, reads, writes, may_skip)
    if plain:
        return node
    parts = parse_keys(partly, "_kd_partly_read")
    return node._replace(partly=parts, optional=optional, inner=inner)


def _make_node(name: str, kind: str, reads: Keys, writes: Keys, may_skip: bool) -> KeyNode:
    visible = tuple([key for key in writes if key != DISCARD])
    return KeyNode(name, kind, reads, visible, may_skip=may_skip)


_equal_node = lru_cache(maxsize=1024)(_make_node)
"""Nodes are immutable, so sequences with equal steps, as copies of a network, share them."""


def keys_as_parsed(step: nn.Module) -> tuple[Keys, Keys]:
    """Return `in_keys` and visible `out_keys` of a step.

    A class of this library parses its keys when they are assigned, and building a sequence asks
    twice for those of each step: they are taken as they are.

    Raises:
        KeysNotDeclared: If the step has none.
        InvalidKey: If one is not a nested key.
    """
    state = step.__dict__
    spec, writes = state.get("_kd_in_spec"), state.get("_kd_out_keys")
    if (
        spec is None
        or writes is None
        or not getattr(type(step), "_kd_changes_by_assignment", False)
    ):
        return keys_of(step, "in_keys"), keys_of(step, "out_keys")
    selected = state.get("_kd_selected")
    return spec.keys, writes if selected is None else selected


def label_of(step: nn.Module) -> str:
    """Return the class of what runs in a step."""
    label = getattr(step, "_kd_node_label", None)
    return label if isinstance(label, str) else type(step).__name__


def described(node: KeyNode, step: nn.Module) -> KeyNode:
    """Return a node with what a step says at this moment: its label, and how much it holds."""
    made = [p for p in step.parameters() if not isinstance(p, UninitializedParameter)]
    return node._replace(label=label_of(step), parameters=sum(p.numel() for p in made))
