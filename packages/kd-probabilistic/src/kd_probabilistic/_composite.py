"""`CompositeDistribution`: several independent distributions, one per key, as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Self, cast, overload

from torch import Size, Tensor
from torch.distributions import Distribution, kl_divergence, register_kl

from kd_core import (
    InvalidArgument,
    KeySetMismatch,
    NestedKey,
    ShapeMismatch,
    TensorDict,
    TensorDictBase,
    format_key,
    is_tensor_collection,
    unravel_key,
)
from kd_probabilistic._components import (
    Components,
    check_apart,
    key_not_found,
    list_keys,
    renamed,
    value_at,
)
from kd_probabilistic._construction import Construction
from kd_probabilistic._entropy import entropy_of
from kd_probabilistic._estimators import EstimateNotOffered
from kd_probabilistic._interaction import composite_lp_aggregate
from kd_probabilistic._log_prob import log_prob_of, with_suffix

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
            `composite_lp_aggregate`. Each call may say otherwise.

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
        Components.__init__(self, parts, batch, params.device)
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
        empty = TensorDict(batch_size=batch_shape, device=self._device)
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
        fixed = [key for key, part in self.items() if not part.has_rsample]
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
        return self._named(parts, "_log_prob")

    def log_prob_composite(
        self, sample: TensorDictBase, *, include_sum: bool = False
    ) -> TensorDict:
        """Return the log-probability of each component.

        Args:
            sample: Holds the value of each component.
            include_sum: Whether to write the sum as well, at `log_prob_key`.

        Raises:
            InvalidArgument: If the log-probability of a component has that key.
        """
        parts = self._log_probs(sample)
        made = self._named(parts, "_log_prob")
        return self._with_sum(made, parts, self.log_prob_key) if include_sum else made

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
        self, samples_mc: int | None = None, *, include_sum: bool = False
    ) -> TensorDict:
        """Return the entropy of each component; see `entropy`.

        Args:
            samples_mc: From how many draws, if there is no formula.
            include_sum: Whether to write the sum as well, at `entropy_key`.
        """
        parts = self._entropies(samples_mc)
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


register_kl(CompositeDistribution, CompositeDistribution)(_kl_of_components)  # type: ignore[no-untyped-call]  # by torch


def _built(
    params: TensorDictBase,
    name: NestedKey,
    builder: Callable[..., Distribution],
    extra: Mapping[str, object],
) -> Distribution:
    """Build one component from its parameters."""
    given = params.get(name)
    if given is None:
        raise key_not_found("parameters", name, params.keys(True))
    if not is_tensor_collection(given):
        raise InvalidArgument(
            f"the parameters {format_key(name)} must be a container of the arguments of "
            f"a distribution, got {type(given).__name__}."
        )
    fed = dict(given.items())
    try:
        return Construction(builder, tuple(cast("dict[str, object]", fed)), extra)(
            list(fed.values())
        )
    except (TypeError, ValueError) as error:
        error.add_note(f"This is the component {format_key(name)} of a composite.")
        raise


def value_keys(
    distribution: Callable[..., Distribution], settings: Mapping[str, object]
) -> tuple[tuple[NestedKey, ...], bool, NestedKey] | None:
    """Return what a module knows of a composite distribution before it is built.

    Args:
        distribution: What builds the distribution: the class, or a partial call of it.
        settings: Its keyword arguments.

    Returns:
        The keys of the values, whether they are aggregated, and the key of the sum; None if it
        builds something else, or the names are not known.
    """
    while isinstance(distribution, functools.partial):
        settings = {**distribution.keywords, **settings}
        distribution = distribution.func
    names = settings.get("distribution_map")
    composite = isinstance(distribution, type) and issubclass(distribution, CompositeDistribution)
    if not composite or not isinstance(names, Mapping):
        return None
    keys = tuple(renamed(names, cast("Names | None", settings.get("name_map"))).values())
    total = settings.get("log_prob_key")
    key = "sample_log_prob" if total is None else unravel_key(cast(NestedKey, total))
    aggregate = settings.get("aggregate")
    sums = composite_lp_aggregate() if aggregate is None else aggregate is True
    return keys, sums, key
