"""A keyed module as one node of a key graph: its keys, and what people read beside them."""

from dataclasses import replace

from torch import nn
from torch.nn.parameter import UninitializedParameter

from kd_nn._dispatch.dispatch import keys_of, optional_keys
from kd_nn._keys.flow import KeyNode
from kd_nn._keys.specs import DISCARD, parse_keys
from kd_nn._plan.program import keyed, runs_in_part


def key_node(name: str, step: nn.Module, may_skip: bool = False) -> KeyNode:
    """Return a keyed module as a node of a key graph; `described` adds what people read.

    Args:
        name: The name of the step.
        step: The keyed module.
        may_skip: Whether the sequence that holds it leaves it out for want of inputs.
    """
    inner = keyed(step)._graph() if runs_in_part(step) else None
    return KeyNode(
        name,
        type(step).__name__,
        keys_of(step, "in_keys"),
        tuple([key for key in keys_of(step, "out_keys") if key != DISCARD]),
        partly=parse_keys(list(getattr(step, "partly_read", ())), "partly_read"),
        optional=optional_keys(step) if inner is None else (),
        inner=inner,
        may_skip=may_skip or (inner is None and getattr(step, "may_skip", False) is True),
    )


def label_of(step: nn.Module) -> str:
    """Return the class of what runs in a step."""
    label = getattr(step, "node_label", None)
    return label if isinstance(label, str) else type(step).__name__


def described(node: KeyNode, step: nn.Module) -> KeyNode:
    """Return a node with what a step says at this moment: its label, and how much it holds."""
    made = [p for p in step.parameters() if not isinstance(p, UninitializedParameter)]
    return replace(node, label=label_of(step), parameters=sum(p.numel() for p in made))
