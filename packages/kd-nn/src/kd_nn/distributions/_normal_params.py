"""From a network's output to the location and scale of a distribution.

Three small modules share one decision: the scale is a positive mapping of a raw tensor (see
`_mappings`), then clamped from below. The order of the operations (split, map, clamp) shows in
exported graphs, so it does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kd_core import InvalidValue
from kd_core.extending import public_in
from kd_nn.distributions._mappings import PositiveMap, mappings


@public_in("kd_nn.distributions")
class NormalParamExtractor(nn.Module):
    """Split a tensor in two along its last dimension: a location, and a positive scale.

    Args:
        scale_mapping: Name of the positive mapping (see `mappings`), or a callable.
        scale_lb: The smallest scale that is returned, non-negative.

    Raises:
        InvalidValue: If the mapping is not known, or `scale_lb` is negative.

    Example:
        >>> loc, scale = NormalParamExtractor()(torch.zeros(3, 4))
        >>> loc.shape, scale
        (torch.Size([3, 2]), tensor([[1., 1.],
                [1., 1.],
                [1., 1.]]))
    """

    def __init__(
        self,
        scale_mapping: str | PositiveMap = "biased_softplus_1.0",
        scale_lb: float = 1e-4,
    ) -> None:
        super().__init__()
        self.scale_mapping = mappings(scale_mapping)
        self.scale_lb = _checked_bound(scale_lb)

    def forward(self, tensor: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Split `tensor`, shape (*batch, 2 n).

        Args:
            tensor: Locations and raw scales, side by side in the last dimension.
            *others: Further tensors, passed through.

        Returns:
            Location and scale, shape (*batch, n) each, then `others`.

        Raises:
            InvalidValue: If the last dimension is odd, or there is none.
        """
        # Not for a proxy or a fake tensor: a branch on its size would be traced.
        if tensor.__class__ is Tensor and (not tensor.ndim or tensor.shape[-1] % 2):
            raise InvalidValue(
                "the last dimension must have an even size, since `NormalParamExtractor` splits it "
                f"into location and scale, got a tensor of shape {tuple(tensor.shape)}. "
                "Give the last layer 2 n outputs."
            )
        loc, raw = tensor.chunk(2, -1)
        return (loc, self.scale_mapping(raw).clamp_min(self.scale_lb), *others)


@public_in("kd_nn.distributions")
class NormalParamWrapper(nn.Module):
    """Run a network and split its (first) output into a location and a positive scale.

    Args:
        operator: The network; its output, or the first of its outputs, has an even last dimension.
        scale_mapping: Name of the positive mapping (see `mappings`), or a callable.
        scale_lb: The smallest scale that is returned, non-negative.

    Raises:
        InvalidValue: If the mapping is not known, or `scale_lb` is negative.

    Example:
        >>> loc, scale = NormalParamWrapper(nn.Linear(3, 8))(torch.randn(5, 3))
        >>> loc.shape, scale.shape, bool((scale > 0).all())
        (torch.Size([5, 4]), torch.Size([5, 4]), True)
    """

    def __init__(
        self,
        operator: nn.Module,
        scale_mapping: str | PositiveMap = "biased_softplus_1.0",
        scale_lb: float = 1e-4,
    ) -> None:
        super().__init__()
        self.operator = operator
        self.extract = NormalParamExtractor(scale_mapping, scale_lb)

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        """Run the network on the arguments.

        Args:
            *args: Positional arguments of the network.
            **kwargs: Keyword arguments of the network.

        Returns:
            Location and scale, then the network's further outputs if there are any.
        """
        output = self.operator(*args, **kwargs)
        if not isinstance(output, (tuple, list)):
            output = (output,)
        parts: tuple[Tensor, ...] = self.extract(*output)
        return parts


@public_in("kd_nn.distributions")
class AddStateIndependentNormalScale(nn.Module):
    """Add a scale that does not depend on the input next to a location; it can be trained.

    Args:
        scale_shape: Shape of the scale, equal to the last dimensions of the location; an int is one
            dimension, and `()` one scale for all elements.
        scale_mapping: Name of the positive mapping (see `mappings`), or a callable.
        scale_lb: The smallest scale that is returned, non-negative.
        device: Where the scale is created; by default torch's default device.
        make_param: Whether the scale is a parameter; otherwise it is a buffer, which is saved with
            the module and not trained.
        init_value: First value of the raw scale, before the mapping.

    Raises:
        InvalidValue: If the mapping is not known, or `scale_lb` is negative.

    Example:
        >>> loc, scale = AddStateIndependentNormalScale(4)(torch.zeros(3, 4))
        >>> scale.shape, scale[0]
        (torch.Size([3, 4]), tensor([1., 1., 1., 1.], grad_fn=<SelectBackward0>))
    """

    def __init__(
        self,
        scale_shape: int | Sequence[int] = (),
        scale_mapping: str | PositiveMap = "exp",
        scale_lb: float = 1e-4,
        *,
        device: torch.device | str | int | None = None,
        make_param: bool = True,
        init_value: float = 0.0,
    ) -> None:
        super().__init__()
        shape = (scale_shape,) if isinstance(scale_shape, int) else tuple(scale_shape)
        raw = torch.full(shape, init_value, device=device)
        self.state_independent_scale: Tensor
        if make_param:
            self.state_independent_scale = nn.Parameter(raw)
        else:
            self.register_buffer("state_independent_scale", raw)
        self.scale_mapping = mappings(scale_mapping)
        self.scale_lb = _checked_bound(scale_lb)

    def forward(self, loc: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Pair `loc` with the scale, expanded to the shape of `loc`.

        Args:
            loc: Location, shape (*batch, *scale_shape).
            *others: Further tensors, passed through.

        Returns:
            `loc`, the scale, then `others`.

        Raises:
            InvalidValue: If the last dimensions of `loc` are not the scale's shape.
        """
        raw = self.state_independent_scale
        # Not for a proxy: a branch on its size would be traced.
        is_tensor = isinstance(cast("object", loc), Tensor)
        if is_tensor and not _ends_with(loc.shape, raw.shape):
            raise InvalidValue(
                f"the last dimensions of the location must be those of the scale, "
                f"{tuple(raw.shape)}, got a location of shape {tuple(loc.shape)}."
            )
        scale = self.scale_mapping(raw).clamp_min(self.scale_lb).expand_as(loc)
        return (loc, scale, *others)


def _checked_bound(scale_lb: float) -> float:
    if not scale_lb >= 0:  # NaN too
        raise InvalidValue(f"`scale_lb` must be non-negative, got {scale_lb!r}.")
    return scale_lb


def _ends_with(shape: torch.Size, tail: torch.Size) -> bool:
    return len(shape) >= len(tail) and shape[len(shape) - len(tail) :] == tail
