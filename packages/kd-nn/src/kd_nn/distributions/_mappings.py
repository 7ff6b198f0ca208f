"""Maps from the real line to the positive numbers, by name.

A network that predicts a scale needs one, and configuration files want to name it. The registry
below has the usual ones, and the user's own from `add_custom_mapping`; mappings named
`biased_softplus_<bias>_<min>` are built on demand.

The biased softplus is the default of every parameter extractor and therefore on the hot path. To
add a Python number to a tensor costs twice as much as to add a 0-dim tensor, so eager float32 calls
add cached constants (the sum has the same bits: both round the number to float32). A tracer sees
plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from typing import TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from kd_core import InvalidArgument, InvalidValue
from kd_core.extending import public_in

PositiveMap: TypeAlias = Callable[[Tensor], Tensor]


@overload
def inv_softplus(bias: float) -> float: ...
@overload
def inv_softplus(bias: Tensor) -> Tensor: ...
@public_in("kd_nn")
def inv_softplus(bias: float | Tensor) -> float | Tensor:
    """Invert the softplus: return `x` such that `log(1 + exp(x))` is `bias`.

    The form `x = bias + log(1 - exp(-bias))` neither overflows for a large bias nor loses digits
    for a small one. A number is computed in float32, the precision of a model's constants.

    Args:
        bias: The wanted value of the softplus: a positive number, or a tensor of them.

    Returns:
        A number for a number, a tensor of the same shape and dtype for a tensor.

    Raises:
        InvalidValue: If a number is not positive. The values of a tensor are not checked.

    Example:
        >>> round(inv_softplus(1.0), 4)
        0.5413
        >>> torch.nn.functional.softplus(inv_softplus(torch.tensor([0.5, 2.0])))
        tensor([0.5000, 2.0000])
    """
    if isinstance(bias, Tensor):
        return bias + torch.log(-torch.expm1(-bias))
    if not bias > 0:
        raise InvalidValue(
            f"`bias` must be positive to lie in the range of softplus, got {bias!r}."
        )
    if bias < 20:
        return torch.tensor(bias, dtype=torch.float32, device="cpu").expm1().log().item()
    return bias + math.log(-math.expm1(-bias))


@public_in("kd_nn._pickled")
def expln(x: Tensor) -> Tensor:
    """Map to positive numbers: `exp(x)` below zero, `log(1 + x) + 1` above, smooth at zero.

    It grows slowly, so that a large network output does not give a huge scale (Raffin et al. 2021,
    https://arxiv.org/abs/2005.05719).

    Args:
        x: Any real tensor.

    Returns:
        A positive tensor of the same shape.

    Example:
        >>> expln(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 1.6931])
    """
    # The unused branch is evaluated at 0, so that neither its value nor its gradient overflows.
    return torch.where(x > 0, x.clamp_min(0).log1p() + 1, x.clamp_max(0).exp())


class _BiasedSoftplus:
    """`softplus(x + shift) + min_val`, with cached constants for eager float32."""

    __slots__ = ("_min", "_shift", "bias", "min_val", "shift")

    def __init__(self, bias: float, min_val: float) -> None:
        if not 0 <= min_val < bias:
            raise InvalidValue(
                "a biased softplus must have 0 <= min_val < bias, "
                f"got bias={bias!r} and min_val={min_val!r}."
            )
        self.bias, self.min_val = bias, min_val
        self.shift = inv_softplus(bias - min_val)
        self._shift, self._min = _constant(self.shift), _constant(min_val)

    def __call__(self, x: Tensor) -> Tensor:
        # Tested first: dynamo would guard everything that is read before.
        if not is_compiling():
            shift, low = self._shift, self._min
            if (
                shift is not None
                and low is not None
                and x.__class__ is Tensor
                and x.dtype is torch.float32
            ):
                return functional.softplus(x + shift).add_(low)
        return functional.softplus(x + self.shift) + self.min_val

    def __repr__(self) -> str:
        return f"biased_softplus(bias={self.bias}, min_val={self.min_val})"

    def __reduce__(self) -> tuple[object, ...]:
        return mappings, (f"biased_softplus_{self.bias}_{self.min_val}",)  # both are public


def _constant(value: float) -> Tensor | None:
    """Return a number as a 0-dim float32 tensor; None while a mode makes fake tensors."""
    tensor = torch.tensor(value, dtype=torch.float32, device="cpu")
    return tensor if tensor.__class__ is Tensor else None


@public_in("kd_nn")
class biased_softplus(nn.Module):  # noqa: N801 - the usual name
    """Map to positive numbers with a softplus that is `bias` at zero and never below `min_val`.

    Computes `softplus(x + inv_softplus(bias - min_val)) + min_val`.

    Args:
        bias: The value at zero.
        min_val: The infimum of the values.

    Raises:
        InvalidValue: If not `0 <= min_val < bias`.

    Example:
        >>> biased_softplus(1.0)(torch.zeros(2))
        tensor([1., 1.])
    """

    def __init__(self, bias: float, min_val: float = 0.01) -> None:
        super().__init__()
        self._map = _BiasedSoftplus(bias, min_val)
        self.bias = self._map.shift
        self.min_val = min_val

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, shape kept."""
        return self._map(x)

    def extra_repr(self) -> str:
        """Name the two settings for the module's printed form."""
        return f"bias={self._map.bias}, min_val={self.min_val}"


@public_in("kd_nn._pickled")
def identity(x: Tensor) -> Tensor:
    """Return `x`: the mapping `"none"`."""
    return x


_REGISTRY: dict[str, PositiveMap | None] = {
    "softplus": functional.softplus,
    "exp": torch.exp,
    "relu": torch.relu,
    "expln": expln,
    "biased_softplus": None,
    "none": identity,
}
"""Mappings by name; `None` is one that holds tensors, which is built when it is asked for."""


@public_in("kd_nn.distributions")
def mappings(key: str | PositiveMap) -> PositiveMap:
    """Return the positive mapping of a name.

    Args:
        key: `"softplus"`, `"exp"`, `"relu"`, `"expln"`, `"none"` (the identity),
            `"biased_softplus"` (bias 1.0, minimum 0.01), `"biased_softplus_<bias>"`,
            `"biased_softplus_<bias>_<min>"`, or a name given to `add_custom_mapping`. A callable is
            returned as it is.

    Returns:
        A function from a tensor to a tensor of the same shape.

    Raises:
        InvalidValue: If the name is not known; the message lists the names.

    Example:
        >>> mappings("biased_softplus_1.0")(torch.zeros(1))
        tensor([1.])
    """
    if callable(key):
        return key
    found = _REGISTRY.get(key)
    if found is None and key in _REGISTRY:
        found = _REGISTRY[key] = _BiasedSoftplus(1.0, 0.01)
    return _parametrised(key) if found is None else found


def _parametrised(key: str) -> PositiveMap:
    """Build `biased_softplus_<bias>[_<min>]`, or raise that the name is unknown."""
    prefix = "biased_softplus_"
    if key.startswith(prefix):
        try:
            numbers = [float(part) for part in key.removeprefix(prefix).split("_")]
        except ValueError:
            numbers = []
        if len(numbers) in (1, 2):
            return _BiasedSoftplus(numbers[0], numbers[1] if len(numbers) == 2 else 0.01)
    nearest = get_close_matches(key, _REGISTRY, n=1)
    hint = f" Did you mean `{nearest[0]}`?" if nearest else ""
    known = ", ".join(f"`{name}`" for name in _REGISTRY)
    raise InvalidValue(
        f"`{key}` is not a valid mapping; available mappings: {known}, `{prefix}<bias>` and "
        f"`{prefix}<bias>_<min>`.{hint} Pass a callable, or register one with "
        "`add_custom_mapping`."
    )


@public_in("kd_nn.distributions")
def add_custom_mapping(name: str, mapping: PositiveMap) -> None:
    """Register a mapping under a name, for this process.

    Args:
        name: The name for `mappings` and the parameter extractors.
        mapping: A function from a tensor to a tensor of the same shape.

    Raises:
        InvalidArgument: If `mapping` is not callable.
        InvalidValue: If the name is taken by another mapping.

    Example:
        >>> add_custom_mapping("square", torch.square)
        >>> mappings("square")(torch.tensor([-3.0]))
        tensor([9.])
    """
    if not callable(mapping):
        raise InvalidArgument(f"mapping `{name}` must be callable, got {type(mapping).__name__}.")
    if _REGISTRY.get(name, mapping) is not mapping:
        raise InvalidValue(
            f"the name `{name}` is taken by {mappings(name)!r}. Choose another name."
        )
    _REGISTRY[name] = mapping
