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
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Final, TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributions import Distribution
from torch.nn import functional

from kd_core import InvalidArgument, InvalidValue
from kd_core.extending import public_in
from kd_nn._torch_private import is_watched

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


def _constant(value: float) -> Tensor | None:
    """Return a number as a 0-dim float32 tensor; None while a mode makes fake tensors."""
    tensor = torch.tensor(value, dtype=torch.float32, device="cpu")
    return tensor if type(tensor) is Tensor else None


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
        if not 0 <= min_val < bias:
            raise InvalidValue(
                "a biased softplus must have 0 <= min_val < bias, "
                f"got bias={bias!r} and min_val={min_val!r}."
            )
        self._at_zero, self.min_val = bias, min_val
        self.bias = inv_softplus(bias - min_val)
        self._constants = _constant(self.bias), _constant(min_val)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, shape kept."""
        # Tested first: dynamo would guard everything that is read before.
        if not is_compiling():
            shift, low = self._constants
            if (
                shift is not None
                and low is not None
                and type(x) is Tensor
                and x.dtype is torch.float32
            ):
                return functional.softplus(x + shift).add_(low)
        return functional.softplus(x + self.bias) + self.min_val

    def extra_repr(self) -> str:
        """Name the two settings for the module's printed form."""
        return f"bias={self._at_zero}, min_val={self.min_val}"


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
"""Mappings by name; `None` is a module, of which every extractor has its own."""
_OWN: Final = tuple(filter(None, _REGISTRY.values()))
"""The functions that are known by name from the start."""


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
    return _parametrised(key) if found is None else found


def _parametrised(key: str) -> PositiveMap:
    """Build `biased_softplus_<bias>[_<min>]`, or raise that the name is unknown."""
    prefix = "biased_softplus_"
    if key == "biased_softplus":
        return biased_softplus(1.0)
    if key.startswith(prefix):
        try:
            numbers = [float(part) for part in key.removeprefix(prefix).split("_")]
        except ValueError:
            numbers = []
        if len(numbers) in (1, 2):
            return biased_softplus(*numbers)
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
    if name in _REGISTRY and _REGISTRY[name] is not mapping:
        raise InvalidValue(
            f"the name `{name}` is taken by {mappings(name)!r}. Choose another name."
        )
    _REGISTRY[name] = mapping


# From a network's output to the location and scale of a distribution.
#
# Three small modules share one decision: the scale is a positive mapping of a raw tensor (see
# `_mappings`), then clamped from below. The order of the operations (split, map, clamp) shows in
# exported graphs, so it does not change.


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
        self.scale_mapping: PositiveMap = mappings(scale_mapping)
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
        if type(tensor) is Tensor and (not tensor.ndim or tensor.shape[-1] % 2):
            raise InvalidValue(
                "the last dimension must have an even size, since `NormalParamExtractor` splits it "
                f"into location and scale, got a tensor of shape {tuple(tensor.shape)}. "
                "Give the last layer 2 n outputs."
            )
        loc, raw = tensor.chunk(2, -1)
        mapping = self._modules.get("scale_mapping")
        if type(mapping) is biased_softplus and not is_compiling() and not is_watched(mapping):
            # The default, not called as a module: on the hot path.
            return (loc, mapping.forward(raw).clamp_min(self.scale_lb), *others)
        return (loc, self.scale_mapping(raw).clamp_min(self.scale_lb), *others)

    def _kd_maps_rows(self) -> bool:
        """Return whether each row is mapped by itself, as the mappings that are named here do."""
        mapping = self.scale_mapping  # of a user, it may have no hash
        known = type(mapping) is biased_softplus or any(mapping is own for own in _OWN)
        return known and type(self).forward is _SPLIT


_SPLIT: Final = NormalParamExtractor.forward
"""What splits a tensor, unless a program assigns another function."""


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
        self.scale_mapping: PositiveMap = mappings(scale_mapping)
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
        is_tensor = isinstance(loc, Tensor)
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


# Distributions that do not check their values, in one thread alone.
#
# torch keeps the default on a class, for all threads: a thread that computes shapes, or captures a
# graph, must not disable the checks of the others.


class _Depth(threading.local):
    """How many `values_unchecked` a thread is in."""

    def __init__(self) -> None:
        self.depth = 0


class _CheckedElsewhere:
    """Torch's default while a thread is inside: false there, as before in other threads.

    torch asks for its truth only.
    """

    __slots__ = ("before",)

    def __init__(self, before: bool) -> None:
        self.before = before

    def __bool__(self) -> bool:
        return self.before and not _here.depth

    def __eq__(self, other: object) -> bool:
        """Return whether the truth is `other`: `set_default_validate_args` compares."""
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(self.before)

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        """Copy and pickle as what it was before: an expanded distribution keeps the default."""
        return bool, (self.before,)


class _Threads:
    """How many threads are inside, and what torch's default is meanwhile."""

    def __init__(self) -> None:
        self.count = 0
        self.default = _CheckedElsewhere(True)


_here: Final = _Depth()
_threads: Final = _Threads()
_lock: Final = threading.Lock()


@contextmanager
def values_unchecked() -> Iterator[None]:
    """Disable torch's default of checking the values of distributions in this thread.

    Distributions built inside do not read their parameters, so they can be built where values
    cannot be read: in an export, under `vmap`, of fake tensors. Other threads keep the default, as
    does a distribution that was given ``validate_args=True``.

    Example:
        >>> import torch
        >>> with values_unchecked():
        ...     wrong = torch.distributions.Normal(0.0, -1.0)
        >>> wrong.scale
        tensor(-1.)
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    with _lock:
        if not _threads.count:
            _threads.default = _CheckedElsewhere(bool(Distribution._validate_args))
            Distribution._validate_args = _threads.default  # type: ignore[assignment]  # a truth
        _threads.count += 1
    _here.depth += 1


def _leave() -> None:
    """Undo `_enter`: the last one that leaves restores torch's default, unless it was set anew."""
    _here.depth -= 1
    with _lock:
        _threads.count -= 1
        if not _threads.count and vars(Distribution)["_validate_args"] is _threads.default:
            Distribution._validate_args = _threads.default.before


# Names of a module that go away: they work, and warn.


def deprecated_attributes(
    module: str, attributes: Mapping[str, tuple[object, str | None]], *, removal: str
) -> Callable[[str], object]:
    """Return a `__getattr__` for a module, which serves names that go away with a warning.

    Args:
        module: The name of the module.
        attributes: By name, what it means, and what to write instead, if there is something.
        removal: The version without these names.

    Example:
        >>> lookup = deprecated_attributes("m", {"old": (1, "new")}, removal="2.0")
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     lookup("old")
        1
    """

    def lookup(name: str) -> object:
        if name not in attributes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        value, instead = attributes[name]
        advice = "" if instead is None else f" Write `{instead}`."
        text = f"`{module}.{name}` is deprecated and goes away in {removal}.{advice}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return value

    return lookup
