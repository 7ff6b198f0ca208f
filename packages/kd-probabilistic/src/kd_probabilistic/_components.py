"""Distributions by key: the mapping that a joint distribution is, and what is done with each.

The checks of the keys are here, too, and the messages that name one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, overload

import torch
from torch import Size, Tensor
from torch.distributions import Distribution

from kd_core import (
    InvalidArgument,
    KeyNotFound,
    NestedKey,
    TensorDict,
    TensorDictBase,
    format_key,
    is_tensor_collection,
    nearest_key,
    unravel_key,
)
from kd_core.extending import is_prefix
from kd_probabilistic._estimators import EstimateNotOffered, estimate
from kd_probabilistic._interaction import InteractionType
from kd_probabilistic._log_prob import with_suffix
from kd_probabilistic._reading import can_read, must_not_look, unchecked

if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")


class Components:
    """A read-only mapping from the key of a value to its distribution.

    Args:
        parts: The distributions by key; taken, not copied.
        batch_shape: What their batch shapes start with.
        device: The device of containers of values, None for any.
    """

    def __init__(
        self, parts: dict[NestedKey, Distribution], batch_shape: Size, device: torch.device | None
    ) -> None:
        self._parts, self._batch_shape, self._device = parts, batch_shape, device

    def __getitem__(self, item: NestedKey) -> Distribution:
        found = self.get(item)
        if found is None:
            raise key_not_found("component", item, self._parts)
        return found

    def __iter__(self) -> Iterator[NestedKey]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, tuple)) and unravel_key(key) in self._parts

    def keys(self) -> Iterable[NestedKey]:
        """Return the keys of the values."""
        return self._parts.keys()

    def values(self) -> Iterable[Distribution]:
        """Return the distributions."""
        return self._parts.values()

    def items(self) -> Iterable[tuple[NestedKey, Distribution]]:
        """Return pairs of key and distribution."""
        return self._parts.items()

    @overload
    def get(self, key: NestedKey) -> Distribution | None: ...
    @overload
    def get(self, key: NestedKey, default: T) -> Distribution | T: ...
    def get(self, key: NestedKey, default: object = None) -> object:
        """Return the distribution of a key, or `default` if there is none."""
        return self._parts.get(unravel_key(key), default)

    @property
    def mean(self) -> TensorDict:
        """The means."""
        return self._estimates(InteractionType.MEAN)

    @property
    def mode(self) -> TensorDict:
        """The modes."""
        return self._estimates(InteractionType.MODE)

    @property
    def median(self) -> TensorDict:
        """The medians."""
        return self._estimates(InteractionType.MEDIAN)

    @property
    def deterministic_sample(self) -> TensorDict:
        """The deterministic values; see `InteractionType`."""
        return self._estimates(InteractionType.DETERMINISTIC)

    @property
    def variance(self) -> TensorDict:
        """The variances."""
        return self._container((), _variance)

    @property
    def stddev(self) -> TensorDict:
        """The standard deviations."""
        return self.variance.sqrt()

    def summed(self, parts: Mapping[NestedKey, Tensor]) -> Tensor:
        """Return the sum of a quantity over all components, for each element of the batch.

        Args:
            parts: The quantity by key of the component, shape (*sample_shape, *its batch_shape).
        """
        total: Tensor | None = None
        for key, value in parts.items():
            extra = len(self[key].batch_shape) - len(self._batch_shape)
            part = value.flatten(value.ndim - extra).sum(-1) if extra else value
            total = part if total is None else total + part
        if total is None:
            raise InvalidArgument("a `CompositeDistribution` without components has no sum.")
        return total

    def _each(
        self,
        what: str,
        of: Callable[[NestedKey, Distribution], Tensor],
        value: TensorDictBase | None = None,
    ) -> dict[NestedKey, Tensor]:
        """Compute a quantity of each component, checked by the value that it is of if it can be."""
        if value is not None and must_not_look([value]):
            with unchecked(type(self).__name__):
                return self._computed(what, of)
        return self._computed(what, of)

    def _computed(
        self, what: str, of: Callable[[NestedKey, Distribution], Tensor]
    ) -> dict[NestedKey, Tensor]:
        """Compute a quantity of each component; name the one that does not have it."""
        made: dict[NestedKey, Tensor] = {}
        for key, part in self.items():
            try:
                made[key] = of(key, part)
            except NotImplementedError as error:
                note = f"It is the component {format_key(key)} of a composite distribution."
                if isinstance(error, EstimateNotOffered):
                    error.add_note(note)
                    raise
                raise EstimateNotOffered(
                    f"`{type(part).__name__}` has no {what}. {note} Leave it out, or use a "
                    "distribution that has one."
                ) from error
        return made

    def _estimates(self, interaction: InteractionType) -> TensorDict:
        return self._container((), lambda part: estimate(part, interaction))

    def _container(
        self, sample_shape: Sequence[int], of: Callable[[Distribution], Tensor]
    ) -> TensorDict:
        """Collect a value of each component."""
        made = TensorDict(batch_size=(*sample_shape, *self._batch_shape), device=self._device)
        for key, value in self._each("such value", lambda _, part: of(part)).items():
            made.set(key, value)
        return made

    def _named(
        self, parts: Mapping[NestedKey, Tensor], suffix: str, events: bool = False
    ) -> TensorDict:
        """Collect quantities of the components at their keys with a suffix; see `collected`."""
        return self.collected(parts, {key: with_suffix(key, suffix) for key in parts}, events)

    def collected(
        self,
        parts: Mapping[NestedKey, Tensor],
        keys: Mapping[NestedKey, NestedKey],
        events: bool = False,
    ) -> TensorDict:
        """Collect tensors of shape (*sample_shape, *batch_shape of each component).

        Args:
            parts: The tensors by key of the component.
            keys: Where each is written.
            events: Whether the shapes end with those of the events.
        """
        batch = self._batch_shape
        for key, value in parts.items():
            own = len(self[key].batch_shape) + (len(self[key].event_shape) if events else 0)
            batch = value.shape[: value.ndim - own + len(self._batch_shape)]
            break
        made = TensorDict(batch_size=batch, device=self._device)
        for key, value in parts.items():
            made.set(keys[key], value)
        return made


def _variance(distribution: Distribution) -> Tensor:
    value: Tensor = distribution.variance
    if can_read(value) and bool(value.isnan().any()):
        raise EstimateNotOffered(f"`{type(distribution).__name__}` has no variance.")
    return value


def value_at(container: TensorDictBase, key: NestedKey) -> Tensor:
    """Return the value of a component, or raise that it is missing."""
    if not is_tensor_collection(container):
        raise InvalidArgument(
            "the value of a `CompositeDistribution` must be a container that holds one of each "
            f"component, got {type(container).__name__}. Give it at {format_key(key)}."
        )
    found = container.get(key)
    if found is None:
        raise key_not_found("value", key, container.keys(True, True))
    return found


def key_not_found(what: str, key: NestedKey, known: Iterable[NestedKey]) -> KeyNotFound:
    """Build the error for a key that is not there, with the nearest that is.

    Args:
        what: What the key would name.
        key: The key.
        known: The keys that are there.
    """
    return KeyNotFound(f"{what} {format_key(key)} not found; {available(key, list(known))}")


def available(key: NestedKey, known: Sequence[NestedKey]) -> str:
    """Return the keys that are there, and which of them is nearest to one that is not."""
    near = nearest_key(key, known)
    hint = "" if near is None else f" Did you mean {format_key(near)}?"
    return f"available keys: {list_keys(known)}.{hint}"


def list_keys(keys: Iterable[NestedKey]) -> str:
    """Return keys in backticks, separated by commas, or `none`."""
    return ", ".join(map(format_key, keys)) or "none"


def only_key(owner: str, keys: Sequence[NestedKey]) -> NestedKey:
    """Return the one key of the log-probability.

    Raises:
        InvalidArgument: If there are several.
    """
    if len(keys) != 1:
        raise InvalidArgument(
            f"{owner} has {len(keys)} keys of log-probabilities, {list_keys(keys)}. Read "
            "`log_prob_keys`."
        )
    return keys[0]


def check_keys(owner: str, keys: Sequence[NestedKey], components: Components) -> None:
    """Raise unless `keys` are those of the components, in any order."""
    if len(keys) != len(components) or any(key not in components for key in keys):
        raise InvalidArgument(
            f"the out_keys of {owner} must be the keys of the values of the distribution, "
            f"{list_keys(components)}, got {list_keys(keys)}. Give these as `out_keys`."
        )


def check_apart(what: str, keys: Iterable[NestedKey]) -> None:
    """Raise unless no two keys are equal or hold one another.

    Args:
        what: What the keys are, for the message.
        keys: Normalised keys.

    Raises:
        InvalidArgument: With the two keys.
    """
    for one, other in combinations(keys, 2):
        if one == other:
            raise InvalidArgument(
                f"{what} must differ, got {format_key(one)} twice. Rename one with `name_map`."
            )
        if is_prefix(one, other) or is_prefix(other, one):
            raise InvalidArgument(
                f"{what} must not hold one another, got {format_key(one)} and "
                f"{format_key(other)}. Rename one with `name_map`."
            )


def renamed(
    names: Iterable[NestedKey], name_map: Mapping[NestedKey, NestedKey] | None
) -> dict[NestedKey, NestedKey]:
    """Return the key of the value for the name of each distribution.

    Raises:
        KeyNotFound: If `name_map` renames what is not there.
        InvalidArgument: If two values would have one key.
    """
    found = {unravel_key(name): unravel_key(name) for name in names}
    for name, key in (name_map or {}).items():
        if unravel_key(name) not in found:
            raise key_not_found("`name_map` renames a distribution that is missing:", name, found)
        found[unravel_key(name)] = unravel_key(key)
    check_apart("the keys of the values of a `CompositeDistribution`", found.values())
    return found
