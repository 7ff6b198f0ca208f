"""`CompositeDistribution`: several independent distributions, one per key, as one.

`Components` is the mapping from keys to distributions that it is, with the checks of the keys and
the messages that name one; the keys of log-probabilities and entropies follow from those of values.
An entropy without a formula is estimated from draws. Must not know modules.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Literal, Self, cast, overload

import torch
from torch import Size, Tensor
from torch.distributions import Distribution, Independent, kl_divergence, register_kl

from kd_core import (
    InvalidArgument,
    InvalidValue,
    KeyNotFound,
    KeySetMismatch,
    NestedKey,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    format_key,
    nearest_key,
    unravel_key,
    unravel_key_to_tuple,
)
from kd_core.extending import is_prefix
from kd_probabilistic._distribution import (
    Construction,
    EstimateNotOffered,
    estimate,
    log_prob_of,
    sum_last,
)
from kd_probabilistic._interaction import (
    InteractionType,
    can_read,
    composite_lp_aggregate,
    must_not_look,
    unchecked,
)

if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")


DRAWS = 100
"""How many draws an entropy is estimated from by default."""


class EntropyEstimateWarning(UserWarning):
    """An entropy has no formula and is estimated from a default number of draws."""


def entropy_of(distribution: Distribution, name: str, draws: int | None) -> Tensor:
    """Compute an entropy by its formula, or else estimate it.

    The estimate is the mean of `-log_prob` over draws. Its gradients are estimated, too, with or
    without `rsample`: they are those of the score function, `-log_prob` times the gradient of
    `log_prob`, since the derivative of a draw that cannot be differentiated is missing.

    Args:
        distribution: The distribution.
        name: How a warning names it.
        draws: From how many draws; None warns and takes `DRAWS`.

    Returns:
        The entropy, shape (*batch_shape).
    """
    if draws is not None and (isinstance(draws, bool) or draws < 1):
        raise InvalidValue(f"`samples_mc` must be a positive int or None, got {draws!r}.")
    try:
        return _formula(distribution)
    except NotImplementedError:
        pass
    if draws is None:
        draws = DRAWS
        if not torch.compiler.is_compiling():
            warnings.warn(
                f"the entropy of {name} (`{type(distribution).__name__}`) has no formula and is "
                f"estimated from {draws} draws. Pass `samples_mc` to say from how many.",
                EntropyEstimateWarning,
                stacklevel=4,
            )
    score = log_prob_of(distribution, distribution.sample(Size((draws,))))
    value = score.detach()
    return -(value + value * (score - value)).mean(0)


def _formula(distribution: Distribution) -> Tensor:
    if isinstance(distribution, Independent) and not torch.compiler.is_compiling():
        return sum_last(_formula(distribution.base_dist), distribution.reinterpreted_batch_ndims)
    found: Tensor = distribution.entropy()
    return found


def _has_rsample(distribution: Distribution) -> bool:
    """Return whether `rsample` works: some that have it draw without where nobody asks for it."""
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    return distribution.has_rsample or type(distribution).rsample is not Distribution.rsample


class Components:
    """A read-only mapping from the key of a value to its distribution.

    Args:
        parts: The distributions by key; taken, not copied.
        batch_shape: What their batch shapes start with.
    """

    def __init__(self, parts: dict[NestedKey, Distribution], batch_shape: Size) -> None:
        self._parts, self._batch_shape = parts, batch_shape

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
                    if not torch.compiler.is_compiling():
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
        made = TensorDict(batch_size=(*sample_shape, *self._batch_shape))
        for key, value in self._each("such value", lambda _, part: of(part)).items():
            made.set(key, value)
        return made

    def _named(
        self,
        parts: Mapping[NestedKey, Tensor],
        suffix: str,
        device: torch.device | None = None,
        events: bool = False,
    ) -> TensorDict:
        """Collect quantities of the components at their keys with a suffix; see `collected`."""
        keys = {key: with_suffix(key, suffix) for key in parts}
        return self.collected(parts, keys, device, events)

    def collected(
        self,
        parts: Mapping[NestedKey, Tensor],
        keys: Mapping[NestedKey, NestedKey],
        device: torch.device | None = None,
        events: bool = False,
    ) -> TensorDict:
        """Collect tensors of shape (*sample_shape, *batch_shape of each component).

        Args:
            parts: The tensors by key of the component.
            keys: Where each is written.
            device: The device of the container, None for any.
            events: Whether the shapes end with those of the events.
        """
        batch = self._batch_shape
        for key, value in parts.items():
            own = len(self[key].batch_shape) + (len(self[key].event_shape) if events else 0)
            batch = value.shape[: value.ndim - own + len(self._batch_shape)]
            break
        made = TensorDict(batch_size=batch, device=device)
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
    if not isinstance(container, TensorDictBase):
        raise InvalidArgument(
            "the value of a `CompositeDistribution` must be a container that holds one of each "
            f"component, got {type(container).__name__}. Give it at {format_key(key)}."
        )
    found = container.get(key)
    if found is None:
        raise key_not_found("value", key, container.keys(True, True))
    return found


def key_not_found(what: str, key: NestedKey, known: Iterable[NestedKey]) -> KeyNotFound:
    """Build the error for a missing key, with the nearest that exists.

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
        KeyNotFound: If `name_map` renames a key that does not exist.
        InvalidArgument: If two values would have one key.
    """
    found = {unravel_key(name): unravel_key(name) for name in names}
    for name, key in (name_map or {}).items():
        if unravel_key(name) not in found:
            raise key_not_found("`name_map` renames a distribution that is missing:", name, found)
        found[unravel_key(name)] = unravel_key(key)
    check_apart("the keys of the values of a `CompositeDistribution`", found.values())
    return found


def log_prob_key_of(sample_key: NestedKey) -> NestedKey:
    """Return the key of the log-probability of a sample: `_log_prob` added to the last part.

    Example:
        >>> log_prob_key_of(("agent", "action"))
        ('agent', 'action_log_prob')
    """
    return with_suffix(sample_key, "_log_prob")


def with_suffix(key: NestedKey, suffix: str) -> NestedKey:
    """Return a key with a suffix added to its last part.

    Example:
        >>> with_suffix(("agent", "action"), "_entropy")
        ('agent', 'action_entropy')
    """
    *holder, last = unravel_key_to_tuple(key)
    return (*holder, f"{last}{suffix}") if holder else f"{last}{suffix}"


Builders = Mapping[NestedKey, Callable[..., Distribution]]
Names = Mapping[NestedKey, NestedKey]
Options = Mapping[NestedKey, Mapping[str, object]]


class CompositeDistribution(Components, Distribution):  # type: ignore[misc]  # values are containers
    """Several independent distributions, one per key, as one joint distribution.

    Values are containers. A quantity of each component (log-probability, entropy, ...) is a
    container too, at the key of the value with a suffix; log-probability and entropy can be summed
    to those of the joint distribution. It is also a mapping from the key of a value to its
    distribution. `torch.distributions.kl_divergence` of two is the sum over all components.

    Args:
        params: A container that holds, at the name of each distribution, a container of its
            arguments. Its batch size is the batch shape.
        distribution_map: The class of each distribution, by (nested) name.
        name_map: The keys of the values, by name of the distribution; by default the names.
        extra_kwargs: Further arguments of the distributions, by name.
        log_prob_key: The key of the summed log-probability; by default `"sample_log_prob"`.
        entropy_key: The key of the summed entropy; by default `"entropy"`.
        aggregate: Whether `log_prob` and `entropy` return the sum over all components, as a
            tensor of the batch shape, instead of a container; None follows
            `composite_lp_aggregate`. Each call may choose otherwise.

    Raises:
        KeyNotFound: If parameters are missing, or a name is not that of a distribution.
        InvalidArgument: If a distribution does not take its parameters, or two keys clash.
        kd_core.ShapeMismatch: If the batch shape of a component does not start with that of
            `params`.

    Example:
        >>> import torch
        >>> params = TensorDict(
        ...     {
        ...         "move": {"loc": torch.zeros(3, 2), "scale": torch.ones(3, 2)},
        ...         ("hand", "grip"): {"logits": torch.zeros(3, 4)},
        ...     },
        ...     [3],
        ... )
        >>> dist = CompositeDistribution(
        ...     params,
        ...     {
        ...         "move": torch.distributions.Normal,
        ...         ("hand", "grip"): torch.distributions.Categorical,
        ...     },
        ... )
        >>> sample = dist.sample()
        >>> sample["move"].shape, sample["hand", "grip"].shape
        (torch.Size([3, 2]), torch.Size([3]))
        >>> list(dist.log_prob(sample).keys(True, True))
        ['move_log_prob', ('hand', 'grip_log_prob')]
        >>> dist.log_prob(sample, aggregate=True).shape
        torch.Size([3])
    """

    arg_constraints = {}  # noqa: RUF012 - as torch declares it

    def __init__(
        self,
        params: TensorDictBase,
        distribution_map: Builders,
        *,
        name_map: Names | None = None,
        extra_kwargs: Options | None = None,
        log_prob_key: NestedKey | None = None,
        entropy_key: NestedKey | None = None,
        aggregate: bool | None = None,
    ) -> None:
        keys = renamed(distribution_map, name_map)
        check_apart("the names of the distributions", keys)
        options = {unravel_key(name): kwargs for name, kwargs in (extra_kwargs or {}).items()}
        for name in options:
            if name not in keys:
                raise key_not_found(
                    "`extra_kwargs` names a distribution that is missing:", name, keys
                )
        made: dict[NestedKey, Distribution] = {}
        for name, builder in distribution_map.items():
            name = unravel_key(name)
            made[keys[name]] = _built(params, name, builder, options.get(name, {}))
        self._assemble(params, made, log_prob_key, entropy_key, aggregate)

    @classmethod
    def from_distributions(
        cls,
        params: TensorDictBase,
        distributions: Mapping[NestedKey, Distribution],
        *,
        name_map: Names | None = None,
        log_prob_key: NestedKey | None = None,
        entropy_key: NestedKey | None = None,
        aggregate: bool | None = None,
    ) -> Self:
        """Build a joint distribution of distributions that exist.

        Args:
            params: A container of the batch size that all distributions share.
            distributions: The distributions, by (nested) name.
            name_map: As for the class, as are the other arguments.

        Example:
            >>> import torch
            >>> coins = {"a": torch.distributions.Bernoulli(torch.tensor(0.25))}
            >>> CompositeDistribution.from_distributions(TensorDict(), coins)["a"].mean
            tensor(0.2500)
        """
        keys = renamed(distributions, name_map)
        for name, part in distributions.items():
            if not isinstance(part, Distribution):
                raise InvalidArgument(
                    f"{format_key(name)} must be a `torch.distributions.Distribution`, got "
                    f"{type(part).__name__}. Give classes to `CompositeDistribution` itself."
                )
        new = cls.__new__(cls)
        made = {keys[unravel_key(name)]: part for name, part in distributions.items()}
        new._assemble(params, made, log_prob_key, entropy_key, aggregate)
        return new

    def _assemble(
        self,
        params: TensorDictBase,
        parts: dict[NestedKey, Distribution],
        log_prob_key: NestedKey | None,
        entropy_key: NestedKey | None,
        aggregate: bool | None,
    ) -> None:
        batch = Size(params.batch_size)
        for key, part in parts.items():
            if part.batch_shape[: len(batch)] != batch:
                raise ShapeMismatch(
                    f"the batch shape of {format_key(key)} must start with the batch size of the "
                    f"parameters, {tuple(batch)}, got {tuple(part.batch_shape)} for "
                    f"{type(part).__name__} with events of shape {tuple(part.event_shape)}. Give "
                    "parameters with these dimensions in front, or a container with a smaller "
                    "batch size."
                )
        Components.__init__(self, parts, batch)
        self._log_prob_key = (
            "sample_log_prob" if log_prob_key is None else unravel_key(log_prob_key)
        )
        self._entropy_key = "entropy" if entropy_key is None else unravel_key(entropy_key)
        self.aggregate = aggregate
        Distribution.__init__(self, batch, validate_args=False)

    @property
    def log_prob_key(self) -> NestedKey:
        """The key of the summed log-probability."""
        return self._log_prob_key

    @property
    def entropy_key(self) -> NestedKey:
        """The key of the summed entropy."""
        return self._entropy_key

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]  # torch declares a class attribute
        """Whether all components can draw with gradients."""
        return all(part.has_rsample for part in self.values())

    def expand(self, batch_shape: Sequence[int], _instance: None = None) -> Self:
        """Return the distribution with its batch shape expanded, without copying."""
        own = len(self.batch_shape)
        parts = {
            key: part.expand(Size((*batch_shape, *part.batch_shape[own:])))
            for key, part in self.items()
        }
        new = type(self).__new__(type(self))
        empty = TensorDict(batch_size=batch_shape)
        new._assemble(empty, parts, self.log_prob_key, self.entropy_key, self.aggregate)
        return new

    def sample(self, shape: Sequence[int] | None = None) -> TensorDict:  # type: ignore[override]  # values are containers
        """Draw without gradients: batch size (*shape, *batch_shape)."""
        size = Size(() if shape is None else shape)
        return self._container(size, lambda part: part.sample(size))

    def rsample(self, shape: Sequence[int] | None = None) -> TensorDict:  # type: ignore[override]  # values are containers
        """Draw with gradients: batch size (*shape, *batch_shape).

        Raises:
            EstimateNotOffered: If a component cannot.
        """
        fixed = [key for key, part in self.items() if not _has_rsample(part)]
        if fixed:
            raise EstimateNotOffered(
                f"the components {list_keys(fixed)} cannot draw with gradients. Use `sample`, or "
                "distributions that have `rsample`."
            )
        size = Size(() if shape is None else shape)
        return self._container(size, lambda part: part.rsample(size))

    def sample_and_log_prob(
        self, shape: Sequence[int] = ()
    ) -> tuple[TensorDict, Tensor | TensorDict]:
        """Draw without gradients, and return the draw with its `log_prob`."""
        value = self.sample(shape)
        return value, self.log_prob(value)

    def rsample_and_log_prob(
        self, shape: Sequence[int] = ()
    ) -> tuple[TensorDict, Tensor | TensorDict]:
        """Draw with gradients, and return the draw with its `log_prob`."""
        value = self.rsample(shape)
        return value, self.log_prob(value)

    @overload  # type: ignore[override]  # values are containers
    def log_prob(self, sample: TensorDictBase, *, aggregate: Literal[True]) -> Tensor: ...
    @overload
    def log_prob(self, sample: TensorDictBase, *, aggregate: Literal[False]) -> TensorDict: ...
    @overload
    def log_prob(
        self, sample: TensorDictBase, *, aggregate: bool | None = None
    ) -> Tensor | TensorDict: ...
    def log_prob(
        self, sample: TensorDictBase, *, aggregate: bool | None = None
    ) -> Tensor | TensorDict:
        """Return the log-probability of a value.

        Args:
            sample: Holds the value of each component; other entries do not matter.
            aggregate: Whether to return the sum, shape (*sample_shape, *batch_shape), instead of
                a container; None stands for the `aggregate` of the distribution.

        Raises:
            KeyNotFound: If a value is missing.
        """
        parts = self._log_probs(sample)
        if self._sums(aggregate):
            return self.summed(parts)
        return self._named(parts, "_log_prob", sample.device)

    def log_prob_composite(
        self, sample: TensorDictBase, *, include_sum: bool | None = None
    ) -> TensorDictBase:
        """Return the log-probability of each component.

        Where `log_prob` sums, they are written into `sample`, which is returned.

        Args:
            sample: Holds the value of each component.
            include_sum: Whether to write the sum as well, at `log_prob_key`. None: where
                `log_prob` sums.

        Raises:
            InvalidArgument: If the log-probability of a component has that key.
        """
        parts, sums = self._log_probs(sample), self._sums(None)
        made = self._named(parts, "_log_prob", sample.device)
        if sums if include_sum is None else include_sum:
            made = self._with_sum(made, parts, self.log_prob_key)
        return sample.update(made) if sums else made

    @overload  # type: ignore[override]  # one value per component
    def entropy(
        self, samples_mc: int | None = ..., *, aggregate_probabilities: Literal[True]
    ) -> Tensor: ...
    @overload
    def entropy(
        self, samples_mc: int | None = ..., *, aggregate_probabilities: Literal[False]
    ) -> TensorDict: ...
    @overload
    def entropy(
        self, samples_mc: int | None = None, *, aggregate_probabilities: bool | None = None
    ) -> Tensor | TensorDict: ...
    def entropy(
        self,
        samples_mc: int | None = None,
        *,
        aggregate_probabilities: bool | None = None,
        include_sum: bool | None = None,
    ) -> Tensor | TensorDict:
        """Return the entropy.

        A component without a formula is estimated from draws, gradients included.

        Args:
            samples_mc: From how many draws. None takes 100 and warns.
            aggregate_probabilities: Whether to return the sum, as `aggregate` of `log_prob`.
            include_sum: Whether a container holds the sum as well, at `entropy_key`.

        Warns:
            EntropyEstimateWarning: If an entropy is estimated and `samples_mc` is None.
        """
        parts = self._entropies(samples_mc)
        if self._sums(aggregate_probabilities):
            return self.summed(parts)
        made = self._named(parts, "_entropy")
        return self._with_sum(made, parts, self.entropy_key) if include_sum else made

    def entropy_composite(
        self, samples_mc: int | None = None, *, include_sum: bool | None = None
    ) -> TensorDict:
        """Return the entropy of each component; see `entropy`.

        Args:
            samples_mc: From how many draws, if there is no formula.
            include_sum: Whether to write the sum as well, at `entropy_key`. None: where `entropy`
                sums.
        """
        parts = self._entropies(samples_mc)
        include_sum = self._sums(None) if include_sum is None else include_sum
        made = self._named(parts, "_entropy")
        return self._with_sum(made, parts, self.entropy_key) if include_sum else made

    def cdf(self, sample: TensorDictBase) -> TensorDictBase:  # type: ignore[override]  # values are containers
        """Write the probability of a smaller value, at the key of each value with `_cdf`.

        Returns:
            `sample`.
        """
        found = self._each("cdf", lambda key, part: part.cdf(value_at(sample, key)), sample)
        return sample.update(self._named(found, "_cdf"))

    def icdf(self, sample: TensorDictBase) -> TensorDictBase:  # type: ignore[override]  # values are containers
        """Write the values at which `cdf` is as given, at the key of each value with `_icdf`.

        Args:
            sample: Probabilities, at the key of each value with `_cdf`, as `cdf` writes them; else
                at the key of the value.

        Returns:
            `sample`.
        """
        present = sample.keys(True)

        def found(key: NestedKey, part: Distribution) -> Tensor:
            given = with_suffix(key, "_cdf")
            return part.icdf(value_at(sample, given if given in present else key))

        made = self._named(self._each("inverse cdf", found, sample), "_icdf", events=True)
        return sample.update(made)

    @property
    def dists(self) -> dict[NestedKey, Distribution]:
        """The distributions by the key of their value, in a new dict."""
        return dict(self.items())

    def _sums(self, aggregate: bool | None) -> bool:
        """Return whether a call sums: what it says, else the distribution, else the switch."""
        said = self.aggregate if aggregate is None else aggregate
        return composite_lp_aggregate() if said is None else said

    def _with_sum(
        self, made: TensorDict, parts: dict[NestedKey, Tensor], key: NestedKey
    ) -> TensorDict:
        if key in made.keys(True):
            raise InvalidArgument(
                f"the sum cannot be written to {format_key(key)}, which holds the value of a "
                "component. Choose another `log_prob_key` or `entropy_key`."
            )
        return made.set(key, self.summed(parts))

    def __repr__(self) -> str:
        parts = ", ".join(f"{key!r}: {part}" for key, part in self.items())
        return f"{type(self).__name__}({{{parts}}})"

    def _log_probs(self, value: TensorDictBase) -> dict[NestedKey, Tensor]:
        return self._each(
            "log_prob", lambda key, part: log_prob_of(part, value_at(value, key)), value
        )

    def _entropies(self, samples_mc: int | None) -> dict[NestedKey, Tensor]:
        made: dict[NestedKey, Tensor] = {}
        for key, part in self.items():
            made[key] = entropy_of(part, format_key(key), samples_mc)
        return made


def _kl_of_components(p: CompositeDistribution, q: CompositeDistribution) -> Tensor:
    """Return the sum of the divergences of all components, shape (*batch_shape).

    Raises:
        KeySetMismatch: If they do not have the same components.
        EstimateNotOffered: If there is no formula for a component.
    """
    if p.keys() != q.keys():
        raise KeySetMismatch(
            "the divergence of two composite distributions needs the same components, got "
            f"{list_keys(p)} and {list_keys(q)}."
        )

    def found(key: NestedKey, part: Distribution) -> Tensor:
        divergence: Tensor = kl_divergence(part, q[key])
        return divergence

    return p.summed(p._each("divergence from the other component", found))


register_kl(CompositeDistribution, CompositeDistribution)(_kl_of_components)


def _built(
    params: TensorDictBase,
    name: NestedKey,
    builder: Callable[..., Distribution],
    extra: Mapping[str, object],
) -> Distribution:
    """Build one component from its parameters."""
    given: object = params.get(name)
    if given is None:
        raise key_not_found("parameters", name, params.keys(True))
    if not isinstance(given, TensorDictBase):
        raise InvalidArgument(
            f"the parameters {format_key(name)} must be a container of the arguments of "
            f"a distribution, got {type(given).__name__}."
        )
    fed = dict(given.items())
    try:
        return Construction(builder, tuple(fed), extra)(list(fed.values()))
    except (TypeError, ValueError) as error:
        if not torch.compiler.is_compiling():
            error.add_note(f"This is the component {format_key(name)} of a composite.")
        raise


def value_keys(
    distribution: Callable[..., Distribution], settings: Mapping[str, object]
) -> tuple[tuple[NestedKey, ...], bool, NestedKey, bool] | None:
    """Return what a module knows of a composite distribution before it is built.

    Args:
        distribution: What builds the distribution: the class, or a partial call of it.
        settings: Its keyword arguments.

    Returns:
        The keys of the values, whether they are aggregated, the key of the sum, and whether the
        switch says so; None if it builds something else, or the names are not known.
    """
    while isinstance(distribution, functools.partial):
        settings = {**distribution.keywords, **settings}
        distribution = distribution.func
    names = settings.get("distribution_map")
    composite = isinstance(distribution, type) and issubclass(distribution, CompositeDistribution)
    if not composite or not isinstance(names, Mapping):
        return None
    keys = tuple(renamed(names, cast("Names | None", settings.get("name_map"))).values())
    total, aggregate = settings.get("log_prob_key"), settings.get("aggregate")
    sums = composite_lp_aggregate() if aggregate is None else aggregate is True
    switched = sums and aggregate is None
    named = total is not None and not switched  # as in tensordict, whose switch it is
    key = unravel_key(cast(NestedKey, total)) if named else "sample_log_prob"
    return keys, sums, key, switched
