"""What every framework's test asks: that no step can be left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import nn

import kd_export
from kd_export.policies import Policy
from kd_nn import TensorDictModule, TensorDictSequential


def steps_of(policy: Policy) -> list[TensorDictModule]:
    if not isinstance(policy.module, TensorDictSequential):
        return []
    return [step for step in policy.module if isinstance(step, TensorDictModule)]


def each_step_counts(policy: Policy, folder: Path, idle: Sequence[str] = ()) -> list[str]:
    """Leave out each step that has the same keys before and after it: `save` must name it."""
    named = []
    for place, left in enumerate(steps_of(policy)):
        rest = [step for other, step in enumerate(steps_of(policy)) if other != place]
        name = type(left.module).__name__
        if left.in_keys != left.out_keys or name in idle or isinstance(left.module, nn.Identity):
            continue
        named.append(name)
        module = TensorDictSequential(*rest)
        actions = [key for key in policy.module.out_keys if key in module.out_keys]  # type: ignore[union-attr]  # a keyed module
        module.select_out_keys(*actions)
        other = Policy(module, policy.example, oracle=policy.oracle, state=policy.state)
        with pytest.raises(kd_export.ExportError) as caught:
            kd_export.save(other, folder / "lacking.pt2", batch_sizes=(2,), rollouts=3, steps=20)
        message = str(caught.value)
        # Where it does not even run without, or gives another shape, nothing has to be named.
        assert name in message or "lacks" not in message, message
    return named
