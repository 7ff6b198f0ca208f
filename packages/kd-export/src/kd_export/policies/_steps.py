"""The steps between an environment and a network: what turns observations into numbers, and back.

Each is a small module that prints its settings. Knows tensors; must not know frameworks, keys or
spaces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kd_export._capture.foreign import Recurrent as Recurrent


class Normalise(nn.Module):
    """Subtract a mean and divide by a deviation, in the dtype of both.

    Args:
        mean: The mean.
        deviation: The deviation, with what keeps it from zero.
        dtype: The dtype of the result, if it is not that of the computation.

    Example:
        >>> step = Normalise(torch.tensor([1.0]), torch.tensor([2.0]))
        >>> step(torch.tensor([[5.0]]))
        tensor([[2.]])
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Tensor, deviation: Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("deviation", deviation.detach().clone())
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Normalise observations."""
        result = (x - self.mean) / self.deviation
        return result if self.dtype is None else result.to(self.dtype)

    def extra_repr(self) -> str:
        """Print what is normalised."""
        return f"{self.mean.numel()} numbers, {str(self.mean.dtype).removeprefix('torch.')}"


class Clip(nn.Module):
    """Clip numbers to limits, one for all or one for each element.

    Example:
        >>> Clip(-1.0, 1.0)(torch.tensor([-2.0, 0.5]))
        tensor([-1.0000,  0.5000])
    """

    low: Tensor
    high: Tensor

    def __init__(self, low: Tensor | float, high: Tensor | float) -> None:
        super().__init__()
        self.numbers = None if isinstance(low, Tensor) else (float(low), float(high))
        if isinstance(low, Tensor):
            self.register_buffer("low", low.detach().clone())
            self.register_buffer("high", torch.as_tensor(high).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Clip numbers."""
        if self.numbers is not None:
            return x.clamp(*self.numbers)
        return torch.minimum(torch.maximum(x, self.low), self.high)

    def extra_repr(self) -> str:
        """Print the limits."""
        if self.numbers is not None:
            return f"{self.numbers[0]:g}, {self.numbers[1]:g}"
        return f"{_brief(self.low)}, {_brief(self.high)}"


class Unscale(nn.Module):
    """Bring actions from -1 to 1 to the limits of the environment.

    Example:
        >>> Unscale(torch.tensor([0.0]), torch.tensor([4.0]))(torch.tensor([[0.5]]))
        tensor([[3.]])
    """

    low: Tensor
    high: Tensor

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.register_buffer("low", low.detach().clone())
        self.register_buffer("high", high.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Scale actions."""
        return self.low + 0.5 * (x + 1.0) * (self.high - self.low)

    def extra_repr(self) -> str:
        """Print the limits."""
        return f"{_brief(self.low)}, {_brief(self.high)}"


class Affine(nn.Module):
    """Multiply by a scale and add a shift.

    Example:
        >>> Affine(2.0, 1.0)(torch.tensor([3.0]))
        tensor([7.])
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor | float, shift: Tensor | float = 0.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.as_tensor(scale).detach().clone())
        self.register_buffer("shift", torch.as_tensor(shift).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Scale and shift numbers."""
        return x * self.scale + self.shift

    def extra_repr(self) -> str:
        """Print scale and shift."""
        return f"{_brief(self.scale)}, {_brief(self.shift)}"


class ScaleImage(nn.Module):
    """Convert pixels from 0 to 255 to floats from 0 to 1.

    Example:
        >>> ScaleImage()(torch.tensor([255], dtype=torch.uint8))
        tensor([1.])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Scale pixels."""
        return x.float() / 255.0


class ChannelsFirst(nn.Module):
    """Move the last dimension of images, their channels, before the others.

    Example:
        >>> ChannelsFirst()(torch.zeros(2, 8, 9, 3)).shape
        torch.Size([2, 3, 8, 9])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Reorder images."""
        return x.movedim(-1, -3)


class ToFloat(nn.Module):
    """Convert numbers to float32.

    Example:
        >>> ToFloat()(torch.tensor([1])).dtype
        torch.float32
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convert numbers."""
        return x.float()


class OneHot(nn.Module):
    """Encode integers as rows with a single one; several integers, one behind the other.

    Args:
        counts: How many values each integer has.
        start: The smallest of them.

    Example:
        >>> OneHot([2, 3])(torch.tensor([[1, 2]]))
        tensor([[0., 1., 0., 0., 1.]])
    """

    def __init__(self, counts: Sequence[int], start: int = 0) -> None:
        super().__init__()
        self.counts = tuple(int(count) for count in counts)
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        """Encode integers."""
        columns = x.long() - self.start
        if columns.ndim == 1:
            columns = columns[:, None]
        parts = [
            (columns[:, place, None] == torch.arange(count)).float()
            for place, count in enumerate(self.counts)
        ]
        return torch.cat(parts, -1)

    def extra_repr(self) -> str:
        """Print the counts."""
        return f"{list(self.counts)}"


class ArgMax(nn.Module):
    """Choose the most likely action, or one from each group of logits.

    Args:
        counts: How many logits each group has; without it there is one group.
        start: What the smallest action is called.

    Example:
        >>> ArgMax()(torch.tensor([[0.1, 0.9]])), ArgMax([1, 2])(torch.tensor([[5.0, 0.1, 0.9]]))
        (tensor([1]), tensor([[0, 1]]))
    """

    def __init__(self, counts: Sequence[int] | None = None, start: int = 0) -> None:
        super().__init__()
        self.counts = None if counts is None else [int(count) for count in counts]
        self.start = start

    def forward(self, logits: Tensor) -> Tensor:
        """Choose actions."""
        if self.counts is None:
            chosen = logits.argmax(-1)
        else:
            groups = torch.split(logits, self.counts, -1)
            chosen = torch.stack([group.argmax(-1) for group in groups], -1)
        return chosen + self.start if self.start else chosen

    def extra_repr(self) -> str:
        """Print the groups."""
        return "" if self.counts is None else f"{self.counts}"


class Above(nn.Module):
    """Convert numbers to 1 above a threshold, and to 0 below it.

    Example:
        >>> Above(0.0)(torch.tensor([-1.0, 2.0]))
        tensor([0., 1.])
    """

    def __init__(self, threshold: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.threshold = threshold
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Compare numbers."""
        return (x > self.threshold).to(self.dtype)

    def extra_repr(self) -> str:
        """Print the threshold."""
        return f"{self.threshold:g}"


class Shaped(nn.Module):
    """Reshape each row.

    Example:
        >>> Shaped([2, 3])(torch.zeros(5, 6)).shape
        torch.Size([5, 2, 3])
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(int(size) for size in shape)

    def forward(self, x: Tensor) -> Tensor:
        """Reshape rows."""
        return x.reshape(x.shape[0], *self.shape)

    def extra_repr(self) -> str:
        """Print the shape."""
        return f"{self.shape}"


def _brief(values: Tensor) -> str:
    numbers = values.flatten().tolist()
    if len(set(numbers)) == 1:
        return f"{numbers[0]:g}"
    listed = [f"{value:g}" for value in numbers[:4]]
    return f"[{', '.join(listed)}{', ...' if len(numbers) > 4 else ''}]"
