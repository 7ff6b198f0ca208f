"""`ProbabilisticTensorDictModule`: a distribution that reads and writes keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, TypeAlias, cast, overload

import torch
from torch import Size, Tensor
from torch.distributions import Distribution

from kd_core import (
    InvalidArgument,
    NestedKey,
    TensorDict,
    TensorDictBase,
    format_key,
    is_non_tensor,
    unravel_key_to_tuple,
)
from kd_nn import Delta, InputMissing, TensorDictModuleBase, dispatch, skip_existing
from kd_probabilistic._components import available, check_keys
from kd_probabilistic._composite import CompositeDistribution
from kd_probabilistic._construction import log_prob_of_draw
from kd_probabilistic._estimators import draw, estimate, mean_or_empirical, scored_draw
from kd_probabilistic._generator import advance, as_generator, drawing_from, generator_at
from kd_probabilistic._interaction import InteractionType, interaction_type, set_interaction_type
from kd_probabilistic._log_prob import log_prob_key_of, log_prob_of
from kd_probabilistic._reading import must_not_look, unchecked
from kd_probabilistic._settings import DISCARD, ConfiguredModule, Generator, InKeys, Settings

LogProb: TypeAlias = Tensor | TensorDict
Scores: TypeAlias = dict[NestedKey, Tensor]


class ProbabilisticTensorDictModule(ConfiguredModule):
    """Build a distribution from entries of a container and write a value of it.

    The module's `default_interaction_type` decides which value is written (a draw, the mean, ...),
    unless the call is inside `set_interaction_type`.

    Args:
        in_keys: The parameters: keys whose last part names the distribution's argument, or a
            mapping `{argument: key}`.
        out_keys: The key of the value; None discards it, which leaves its log-probability. For a
            `CompositeDistribution` the keys of all values, which None stands for.
        default_interaction_type: Which value to take outside `set_interaction_type`.
        distribution_class: A distribution class, or a callable that returns a distribution.
        distribution_kwargs: Further arguments of the distribution. Unless `validate_args` is given,
            values are checked as torch does by default; never while compiling or exporting.
        return_log_prob: Whether to write the log-probability of the value too.
        log_prob_key: Where to; by default the key of the value with `_log_prob` at its end. For a
            `CompositeDistribution` it asks for the sum over all values.
        log_prob_keys: The same for several values: one key for each.
        cache_dist: Accepted, and changes nothing: each call builds its distribution, since nothing
            tells that the memory of the parameters was written.
        n_empirical_estimate: Number of draws to average for a mean without a formula.
        num_samples: Number of values, in a new first dimension; or the sizes of several such
            dimensions. The result is then a new container with these in front of its batch size.
        generator: The source of random draws: a generator, a seed for a generator of this module,
            or the key of an entry that holds a generator or a seed. This entry is read too, and
            may be missing if nothing is drawn. By default torch's global generator.

    Raises:
        InvalidArgument: If the distribution is not callable or takes other arguments, an argument
            is given twice, the out keys are not those of its values, or a setting has a wrong type.
            Settings that are assigned later are checked in the same way.
        InvalidValue: If a number of samples is negative.

    Example:
        >>> module = ProbabilisticTensorDictModule(
        ...     in_keys=["loc", "scale"],
        ...     out_keys=["action"],
        ...     distribution_class=torch.distributions.Normal,
        ... )
        >>> module(loc=torch.zeros(2), scale=torch.ones(2))
        tensor([0., 0.])
        >>> with set_interaction_type("random"):
        ...     module(loc=torch.zeros(2), scale=torch.ones(2)).shape
        torch.Size([2])
    """

    _kd_changes_by_assignment = True

    def __init__(
        self,
        in_keys: InKeys,
        out_keys: NestedKey | Sequence[NestedKey] | None = None,
        *,
        default_interaction_type: InteractionType | str = InteractionType.DETERMINISTIC,
        distribution_class: Callable[..., Distribution] = Delta,
        distribution_kwargs: Mapping[str, object] | None = None,
        return_log_prob: bool = False,
        log_prob_key: NestedKey | None = None,
        log_prob_keys: Sequence[NestedKey] | None = None,
        cache_dist: bool = False,
        n_empirical_estimate: int = 1000,
        num_samples: int | Sequence[int] | None = None,
        generator: Generator = None,
    ) -> None:
        super().__init__()
        self._kd_take_settings(
            Settings(
                {
                    "in_keys": in_keys,
                    "out_keys": out_keys,
                    "default_interaction_type": default_interaction_type,
                    "distribution_class": distribution_class,
                    "distribution_kwargs": distribution_kwargs,
                    "return_log_prob": return_log_prob,
                    "log_prob_key": log_prob_key,
                    "log_prob_keys": log_prob_keys,
                    "cache_dist": cache_dist,
                    "n_empirical_estimate": n_empirical_estimate,
                    "num_samples": num_samples,
                    "generator": generator,
                }
            )
        )

    def interaction(self, mode: str) -> AbstractContextManager[None]:
        """Set which value is taken inside the context, for exporters; see the protocol."""
        return set_interaction_type(mode)

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Build the distribution of a container's parameters.

        Raises:
            InputMissing: If a parameter is missing.

        Example:
            >>> from kd_core import TensorDict
            >>> module = ProbabilisticTensorDictModule(["param"], ["x"])
            >>> module.get_dist(TensorDict(param=torch.zeros(3))).event_shape
            torch.Size([3])
        """
        return self._kd_dist_of_values(self._kd_read(tensordict))

    def _kd_dist_of_values(self, values: Sequence[object]) -> Distribution:
        """Build the distribution of bare parameters, one per key of `dist_params_keys`."""
        fed = [values[idx] for idx in self._kd_settings.feeds]
        try:
            if must_not_look(fed):
                with unchecked(self._kd_described_as):
                    return self._kd_settings.build(fed)
            return self._kd_settings.build(fed)
        except Exception as error:
            self._kd_add_call_note(error, dict(zip(self._kd_settings.params, values, strict=False)))
            raise

    build_dist_from_params = get_dist

    @overload
    def log_prob(
        self,
        tensordict: TensorDictBase,
        dist: Distribution | None = None,
        *,
        aggregate: Literal[True],
    ) -> Tensor: ...
    @overload
    def log_prob(
        self,
        tensordict: TensorDictBase,
        dist: Distribution | None = None,
        *,
        aggregate: bool | None = None,
    ) -> LogProb: ...
    def log_prob(
        self,
        tensordict: TensorDictBase,
        dist: Distribution | None = None,
        *,
        aggregate: bool | None = None,
    ) -> LogProb:
        """Return the log-probability of the value that the container holds.

        Args:
            tensordict: Holds the value, and the parameters unless `dist` is given.
            dist: The distribution, if it has been built.
            aggregate: Whether those of several values are summed; None follows `log_prob_keys`.

        Returns:
            A tensor; for several values that are not summed a container, at `log_prob_keys`.

        Raises:
            InputMissing: If a value or a parameter is missing.
        """
        dist = self.get_dist(tensordict) if dist is None else dist
        values: dict[NestedKey, Tensor] = {}
        for key in self._kd_settings.sample_keys:
            values[key] = cast("Tensor", _read(self, key, tensordict))
        try:
            if must_not_look([*values.values()]):
                with unchecked(self._kd_described_as):
                    return self._kd_log_prob_of_values(dist, values, aggregate)
            return self._kd_log_prob_of_values(dist, values, aggregate)
        except Exception as error:
            self._kd_add_call_note(error, values)
            raise

    def _kd_log_prob_of_values(
        self,
        dist: Distribution,
        values: Mapping[NestedKey, Tensor],
        aggregate: bool | None = None,
    ) -> LogProb:
        """Return the log-probability of bare values, by key; see `log_prob`."""
        if not isinstance(dist, CompositeDistribution):
            return log_prob_of(dist, values[self._kd_settings.sample_keys[0]])
        parts = {key: log_prob_of(dist[key], value) for key, value in values.items()}
        return self._joined(dist, parts, aggregate)

    def _joined(
        self,
        dist: CompositeDistribution,
        parts: dict[NestedKey, Tensor],
        aggregate: bool | None = None,
    ) -> LogProb:
        settings = self._kd_settings
        if settings.aggregates if aggregate is None else aggregate:
            return dist.summed(parts)
        keys = settings.log_prob_keys
        if settings.aggregates:
            keys = tuple(log_prob_key_of(key) for key in settings.sample_keys)
        return dist.collected(parts, dict(zip(settings.sample_keys, keys, strict=True)))

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        _requires_sample: bool = True,
    ) -> TensorDictBase:
        """Write the value, and its log-probability if asked for.

        Args:
            tensordict: The container to read.
            tensordict_out: The container to write, instead of `tensordict`.
            _requires_sample: Whether to write a value; classes that draw themselves say no.

        Returns:
            The container that was written.

        Raises:
            InputMissing: If a parameter is missing.
        """
        if not _requires_sample:
            return tensordict if tensordict_out is None else tensordict_out
        if skip_existing() and is_done(self, tensordict):
            return tensordict
        values = self._kd_read(tensordict)
        generator = self.generator
        if isinstance(generator, (str, tuple)):
            drawn = (interaction_type() or self.default_interaction_type) is InteractionType.RANDOM
            if drawn and generator not in tensordict.keys(True):
                raise _missing(self, generator, tensordict)
            generator = generator_at(tensordict, generator)
            if drawn and isinstance(generator, int):  # the seed of the next call is another one
                generator = self._kd_own_generator(generator, values)
                outputs = self._kd_outputs(values, generator)
                advance(tensordict, cast("NestedKey", self.generator), generator)
            else:
                outputs = self._kd_outputs(values, generator)
        else:
            outputs = self._kd_outputs(values, generator)
        target = tensordict if tensordict_out is None else tensordict_out
        if self.num_samples is not None and tensordict_out is None:
            target = tensordict.expand(*_shape_of(self), *tensordict.batch_size)
        visible = self.out_keys
        made = zip(self.out_keys_source, outputs, strict=True)
        written = {key: value for key, value in made if key != DISCARD and key in visible}
        if len(written) == 1:
            ((key, value),) = written.items()
            return target.set(key, value)
        return target.update(written)

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Compute a value of the distribution of bare parameters; see `forward`."""
        generator = self.generator
        if isinstance(generator, (str, tuple)):
            generator = as_generator(values[self.in_keys.index(generator)], generator)
        return self._kd_outputs(values, generator)

    def extra_repr(self) -> str:
        """Return keys and distribution, for printing."""
        return f"{super().extra_repr()}, distribution_class={self._kd_node_label}"

    def _kd_outputs(
        self, values: Sequence[object], generator: torch.Generator | int | None
    ) -> tuple[object, ...]:
        fed = [values[idx] for idx in self._kd_settings.feeds]
        try:
            if must_not_look(fed):
                with unchecked(self._kd_described_as):
                    return self._kd_taken(fed, generator)
            return self._kd_taken(fed, generator)
        except Exception as error:
            self._kd_add_call_note(error, dict(zip(self._kd_settings.params, values, strict=False)))
            raise

    def _kd_taken(
        self, values: Sequence[object], generator: torch.Generator | int | None
    ) -> tuple[object, ...]:
        dist = self._kd_settings.build(values)
        kind = interaction_type() or self.default_interaction_type
        scores: Scores | None = {} if self.return_log_prob else None
        if generator is None:
            made = self._kd_values(dist, kind, scores)
        else:
            with drawing_from(self._kd_own_generator(generator, values)):
                made = self._kd_values(dist, kind, scores)
        settings = self._kd_settings
        if isinstance(made, Tensor):
            outputs: tuple[object, ...] = (made,)
        else:
            outputs = tuple(made[key] for key in settings.sample_keys)
        if scores is None:
            return outputs
        selected = self.__dict__["_kd_selected"]
        if selected is not None and not any(key in selected for key in settings.log_prob_keys):
            return outputs + (None,) * len(settings.log_prob_keys)
        if isinstance(made, Tensor):
            if scores:
                return made, *scores.values()
            drawn = kind is InteractionType.RANDOM
            return made, (log_prob_of_draw if drawn else log_prob_of)(dist, made)
        parts = cast("CompositeDistribution", dist)
        for key, value in made.items():
            if key not in scores:
                scores[key] = log_prob_of(parts[key], value)
        found = self._joined(parts, {key: scores[key] for key in made})
        if isinstance(found, Tensor):
            return (*outputs, found)
        return (*outputs, *(found[unravel_key_to_tuple(key)] for key in settings.log_prob_keys))

    def _kd_values(
        self, dist: Distribution, kind: InteractionType, scores: Scores | None
    ) -> Tensor | dict[NestedKey, Tensor]:
        """Return the value of a distribution, or those of the components of a composite one.

        Log-probabilities that a distribution returns with a draw are added to `scores`.
        """
        keys = self._kd_settings.sample_keys
        if isinstance(dist, CompositeDistribution):
            check_keys(self._kd_described_as, keys, dist)
            return {key: self._kd_take(dist[key], kind, key, scores) for key in keys}
        if len(keys) != 1:
            raise InvalidArgument(
                f"{self._kd_described_as} has {len(keys)} out_keys, but `{self._kd_node_label}` "
                f"returned a {type(dist).__name__}, which has one value. Give one key."
            )
        return self._kd_take(dist, kind, keys[0], scores)

    def _kd_take(
        self, dist: Distribution, kind: InteractionType, key: NestedKey, scores: Scores | None
    ) -> Tensor:
        shape = _shape_of(self)
        if kind is InteractionType.RANDOM:
            scored = None if scores is None else scored_draw(dist)
            if scores is None or scored is None:
                return draw(dist, shape)
            value, scores[key] = scored(shape)
            return value
        if kind is InteractionType.MEAN:
            value = mean_or_empirical(dist, self.n_empirical_estimate)
        else:
            value = estimate(dist, kind)
        return value.expand(*shape, *value.shape) if shape else value

    def _kd_own_generator(
        self, generator: torch.Generator | int, values: Sequence[object]
    ) -> torch.Generator:
        if isinstance(generator, torch.Generator):
            return generator
        device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
        made = torch.Generator(device).manual_seed(generator)
        if self.generator is generator:
            self.generator = made
        return made

    def _kd_needs_key(self, key: NestedKey) -> bool:
        kind = interaction_type() or self.default_interaction_type
        return kind is InteractionType.RANDOM or super()._kd_needs_key(key)

    def _kd_read(self, tensordict: TensorDictBase) -> list[object]:
        return [_read(self, key, tensordict) for key in self._kd_settings.params]


_ONE = Size()


def _shape_of(module: ProbabilisticTensorDictModule) -> Size:
    """Return the shape of the values that a module takes at once."""
    number = module.num_samples
    if isinstance(number, int):
        return Size((number,))
    return _ONE if number is None else number


def _read(
    module: ProbabilisticTensorDictModule, key: NestedKey, tensordict: TensorDictBase
) -> object:
    """Return an entry, or raise that it is missing, as a field that is not set is."""
    value: object = tensordict.get(key)
    if value is None or (is_non_tensor(value) and tensordict[unravel_key_to_tuple(key)] is None):
        raise _missing(module, key, tensordict)
    return value


def _missing(
    module: ProbabilisticTensorDictModule, key: NestedKey, tensordict: TensorDictBase
) -> InputMissing:
    known = [have for have in tensordict.keys(True) if have != key]  # a field may not be set
    return InputMissing(
        f"the distribution `{module._kd_node_label}` reads {format_key(key)}, which was not found "
        f"in the container; {available(key, known)} Write the entry before the call, or change "
        "`in_keys`."
    )


def is_done(module: TensorDictModuleBase, tensordict: TensorDictBase) -> bool:
    """Return whether a module would only write entries that exist, and reads none of them."""
    present = tensordict.keys(True)
    keys = [key for key in module.out_keys if key != DISCARD]
    reads = module.in_keys
    mode = skip_existing()
    if not isinstance(mode, bool) and not any(key in mode for key in keys):
        return False
    return bool(keys) and all(key in present and key not in reads for key in keys)
