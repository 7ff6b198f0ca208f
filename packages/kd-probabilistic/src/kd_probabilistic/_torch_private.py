"""Private names of torch that this distribution needs, each with what does without it.

They say what a tensor is while a graph is captured. Where a torch lacks them, modules run, and what
reads values of fake tensors fails with torch's message. Those of `vmap` are in kd_core.
"""

from __future__ import annotations

from collections.abc import Callable

from kd_core.extending import private_name

_mode_of: Callable[[object], object] = private_name(
    "torch._C", "_get_dispatch_mode", lambda key: None
)
_FAKE: object = private_name("torch._C", "_TorchDispatchModeKey.FAKE", None)


def computes_shapes_alone() -> bool:
    """Return whether operators give fake tensors, without values. Fallback: they do not."""
    return _mode_of(_FAKE) is not None


READS_VALUES = frozenset({"GuardOnDataDependentSymNode", "DataDependentOutputException"})
"""The errors of torch for a branch on a value, by name: to import them loads the exporter.

Fallback: `unchecked` also knows them by their message.
"""
