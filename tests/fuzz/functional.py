"""Activations and losses of `torch.nn.functional`, beside the same on each leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import cast

import torch
from tests.fuzz.checking import Call
from tests.fuzz.operands import each, paired, some_operand
from tests.fuzz.reducing import reduced
from tests.fuzz.registry import operation
from tests.fuzz.subjects import Plain, Subject
from torch import Tensor
from torch.nn import functional

from kd_core._torch_functions import ACTIVATIONS, LOSSES


def depends_on_place(name: str, leaves: Iterable[Tensor]) -> bool:
    """Return whether torch gives other values for one element than for many side by side."""
    if name == "gelu":
        return any(leaf.isinf().any() for leaf in leaves)
    kinked = name in ("celu", "elu", "hardswish", "hardtanh", "relu6", "selu")
    return kinked and any(leaf.requires_grad and leaf.isnan().any() for leaf in leaves)


@operation(*(name for name in ACTIVATIONS.split() if name != "dropout"))
def activation(rng: Random, s: Subject, name: str) -> Call:
    fn: Callable[..., Tensor] = getattr(functional, name)
    args = (0.1, 0.2) if name == "threshold" else ()
    return Call(
        name,
        f"functional.{name}(td)",
        lambda td: fn(td, *args),
        lambda plain: each(plain, lambda leaf: fn(leaf, *args)),
        exact=False,
        memberwise=True,
        unchecked=depends_on_place(name, s.node.tensors()),
    )


@operation(*LOSSES.split())
def loss(rng: Random, s: Subject, name: str) -> Call:
    fn: Callable[..., Tensor] = getattr(functional, name)
    reduction, operand = rng.choice(["none", "mean", "sum"]), some_operand(rng, s)
    var = (0.5,) if name == "gaussian_nll_loss" else ()

    def leafwise(leaf: Tensor, other: object) -> Tensor:
        if isinstance(other, Tensor):
            other = torch.broadcast_to(other, leaf.shape) if other.ndim <= leaf.ndim else other
        else:
            other = torch.full_like(leaf, cast("float", other))
        return fn(leaf, other, *[torch.full_like(leaf, each) for each in var], reduction="none")

    def theirs(plain: Plain) -> object:
        found = paired(plain, [operand], leafwise)
        if reduction == "none":
            return found
        return reduced(cast("Plain", found), reduction, None, False, {})

    return Call(
        name,
        f"functional.{name}(td, {operand.text}, reduction={reduction!r})",
        lambda td: fn(td, operand.ours, *var, reduction=reduction),
        theirs,
        exact=False,
    )
