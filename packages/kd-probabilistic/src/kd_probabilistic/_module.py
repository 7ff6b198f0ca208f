"""`ProbabilisticTensorDictModule`: a distribution that reads and writes keys.

Its settings are checked together, in one place, whether they are given to the constructor or
assigned later: an assignment builds a new set of settings, which the module takes as a whole or not
at all. So nothing that is derived from a setting can be stale.

The distributions of torch draw from the global generator of a device and cannot use another one.
During a draw from a generator of its own, the global generator has the state of that one;
afterwards its own state is restored, and the given generator has advanced.

Knows one module and its distribution; must not know sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, Literal, Self, TypeAlias, cast, overload

import torch
from torch import Size, Tensor
from torch.distributions import Distribution

from kd_core import (
    InvalidArgument,
    InvalidValue,
    NestedKey,
    TensorDict,
    TensorDictBase,
    format_key,
    is_non_tensor,
    unravel_key,
    unravel_key_to_tuple,
)
from kd_core.extending import public_in
from kd_nn import Delta, InputMissing, TensorDictModuleBase, dispatch, skip_existing
from kd_probabilistic._composite import (
    CompositeDistribution,
    available,
    check_keys,
    list_keys,
    log_prob_key_of,
    only_key,
    value_keys,
)
from kd_probabilistic._distribution import (
    Construction,
    draw,
    estimate,
    log_prob_of,
    log_prob_of_draw,
    mean_or_empirical,
    name_of,
    scored_draw,
)
from kd_probabilistic._interaction import (
    InteractionType,
    as_interaction_type,
    composite_lp_aggregate,
    interaction_type,
    must_not_look,
    set_interaction_type,
    unchecked,
)

_SEEDS = 1 << 62
"""How many seeds there are to draw: as many as for tensordict, so that both draw the same."""


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Redirect all draws inside the context to `generator`.

    Args:
        generator: A generator on the device of the draws.
    """
    shared = _shared(generator.device)
    before = shared.get_state()
    shared.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(shared.get_state())
        shared.set_state(before)


def _shared(device: torch.device) -> torch.Generator:
    """Return the global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    generator: torch.Generator = torch.cuda.default_generators[device.index]
    return generator


def generator_at(tensordict: TensorDictBase, key: NestedKey) -> torch.Generator | int | None:
    """Return the generator or seed that an entry holds, None if there is none."""
    if key not in tensordict.keys(True):
        return None
    return as_generator(tensordict[unravel_key_to_tuple(key)], key)


def as_generator(found: object, key: NestedKey) -> torch.Generator | int:
    """Return the generator or seed that the entry at `key` is."""
    if isinstance(found, torch.Generator):
        return found
    if isinstance(found, Tensor) and found.numel() == 1 and not found.is_floating_point():
        return int(found.item())
    if isinstance(found, int):
        return found
    raise InvalidArgument(
        f"the entry {format_key(key)} must hold a `torch.Generator` or one integer seed, got "
        f"{type(found).__name__}."
    )


def advance(tensordict: TensorDictBase, key: NestedKey, generator: torch.Generator) -> None:
    """Replace the seed that an entry holds by one that a generator draws."""
    made = torch.empty((), dtype=torch.int64, device=generator.device)
    seed = int(made.random_(_SEEDS, generator=generator))
    before: object = tensordict[unravel_key_to_tuple(key)]
    if isinstance(before, Tensor):
        limit = torch.iinfo(before.dtype).max
        tensordict.set(key, torch.full_like(before, seed % (limit + 1)))
    else:
        tensordict.set_non_tensor(key, seed)


InKeys: TypeAlias = "NestedKey | Sequence[NestedKey] | Mapping[str, NestedKey]"
Generator: TypeAlias = "torch.Generator | int | NestedKey | None"

DISCARD: Final = "_"
"""The key of a value that is not written."""


@public_in("kd_probabilistic._pickled")
class Settings:
    """The checked settings of a probabilistic module; never changed.

    Args:
        given: Every setting by its name in the constructor.

    Attributes:
        params: The keys of the parameters, each once.
        feeds: Which of them feeds each argument of the distribution.
        build: Calls the distribution class.
        sample_keys: The key of each value.
        num_samples: How many values, None for one without a new dimension.
        log_prob_keys: The key of the log-probability of each value, or the one of their sum.
        aggregates: Whether the log-probabilities of several values are summed.
        shown: The keys at which `log_prob` writes those too; none unless the switch says to sum.
        parts: The same for `forward`.
        in_keys: All keys that are read.
        out_keys: All keys that are written.
    """

    def __init__(self, given: Mapping[str, object]) -> None:
        arguments = _arguments(given["in_keys"])
        self.params = tuple(dict.fromkeys(arguments.values()))
        self.feeds = tuple(self.params.index(key) for key in arguments.values())
        kwargs = _keywords(given["distribution_kwargs"])
        distribution = cast("Callable[..., Distribution]", given["distribution_class"])
        self.build = Construction(distribution, tuple(arguments), kwargs)
        known = value_keys(distribution, kwargs)
        several = known is not None or not _is_plain(distribution)
        self.sample_keys = _value_keys(given["out_keys"], several, known)
        self.log_prob_keys, self.aggregates = _log_prob_keys(given, self.sample_keys, known)
        self.return_log_prob = _flag("return_log_prob", given["return_log_prob"])
        shows = self.aggregates and known is not None and known[3]
        self.shown = tuple(map(log_prob_key_of, self.sample_keys)) if shows else ()
        self.parts = self.shown if self.return_log_prob else ()
        self.default_interaction_type = as_interaction_type(given["default_interaction_type"])
        self.cache_dist = _flag("cache_dist", given["cache_dist"])
        self.n_empirical_estimate = _estimates(given["n_empirical_estimate"])
        self.num_samples = _samples(given["num_samples"])
        self.generator = _generator(given["generator"])
        asked = [self.generator] if isinstance(self.generator, (str, tuple)) else []
        self.in_keys: list[NestedKey] = list(dict.fromkeys([*self.params, *asked]))
        self.out_keys: list[NestedKey] = [*self.sample_keys]
        if self.return_log_prob:
            self.out_keys += self.log_prob_keys
        _check_distinct(self.sample_keys, self.log_prob_keys)
        self._given = {
            **given,
            "in_keys": arguments,
            "out_keys": given["out_keys"] if given["out_keys"] is None else [*self.sample_keys],
            "distribution_kwargs": kwargs,
            "generator": self.generator,
        }

    def __getstate__(self) -> dict[str, object]:
        return {"_given": self._given}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        # Derived anew, so that settings which an earlier version pickled load too.
        added = {"cache_dist": False, "log_prob_keys": None}
        given = {**added, **cast("Mapping[str, object]", state["_given"])}
        self.__dict__.update(vars(type(self)(given)))

    def changed(self, name: str, value: object) -> Self:
        """Return the settings with one of them changed.

        Args:
            name: A name of `NAMES`.
            value: What the constructor takes for it; for `in_keys` and `out_keys` also what the
                attribute gives, with the key of the generator or of the log-probability.
        """
        changes = {name: value}
        keys = list(value) if isinstance(value, list) else None
        if name == "in_keys" and keys is not None and self.in_keys != list(self.params):
            changes[name] = [key for key in keys if key != self.generator]
        elif name == "out_keys" and keys is not None and len(keys) == len(self.out_keys):
            count = len(self.sample_keys)
            changes = {"out_keys": keys[:count]}
            if self.return_log_prob:
                changes |= {"log_prob_key": None, "log_prob_keys": keys[count:]}
        elif name in _OTHER and value is not None:
            changes[_OTHER[name]] = None
        return type(self)({**self._given, **changes})


NAMES: Final = frozenset(
    {
        "default_interaction_type",
        "distribution_class",
        "distribution_kwargs",
        "generator",
        "in_keys",
        "cache_dist",
        "log_prob_key",
        "log_prob_keys",
        "n_empirical_estimate",
        "num_samples",
        "out_keys",
        "return_log_prob",
    }
)


_OTHER: Final = {"log_prob_key": "log_prob_keys", "log_prob_keys": "log_prob_key"}
"""The setting that another one replaces."""

Known: TypeAlias = "tuple[tuple[NestedKey, ...], bool, NestedKey, bool] | None"
"""What is known of a composite distribution before it is built; see `value_keys`."""


def _arguments(in_keys: object) -> dict[str, NestedKey]:
    """Return which key feeds which argument of the distribution."""
    if isinstance(in_keys, Mapping):
        for name in in_keys:
            if not isinstance(name, str):
                raise InvalidArgument(
                    f"a mapping of `in_keys` names each argument by a str, got {name!r}. Write "
                    "`{argument: key}`."
                )
        return {unravel_key_to_tuple(name)[0]: unravel_key(key) for name, key in in_keys.items()}
    keys = _listed("in_keys", in_keys)
    arguments = {unravel_key_to_tuple(key)[-1]: unravel_key(key) for key in keys}
    if len(arguments) != len(keys):
        raise InvalidArgument(
            f"two of the in_keys {list_keys(keys)} name the same "
            "argument, which is the last part of a key. Give a mapping `{argument: key}`."
        )
    return arguments


def _is_plain(distribution: object) -> bool:
    """Return whether the values are single tensors, because a class of torch is built."""
    return (
        isinstance(distribution, type)
        and issubclass(distribution, Distribution)
        and not issubclass(distribution, CompositeDistribution)
    )


def _value_keys(out_keys: object, several: bool, known: Known) -> tuple[NestedKey, ...]:
    """Return the keys of the values: more than one for a composite distribution alone."""
    if out_keys is None:
        return (DISCARD,) if known is None else known[0]
    keys = _listed("out_keys", out_keys)
    if len(keys) != 1 and not several:
        raise InvalidArgument(
            f"`out_keys` must be the one key of the value, got {len(keys)} keys. Give the key of "
            "the log-probability as `log_prob_key`."
        )
    if not keys:
        raise InvalidArgument("`out_keys` must name at least one value, got none.")
    if known is not None and set(keys) != set(known[0]):
        return known[0]  # such a distribution writes its values where its `name_map` says
    return tuple(keys)


def _log_prob_keys(
    given: Mapping[str, object], values: tuple[NestedKey, ...], known: Known
) -> tuple[tuple[NestedKey, ...], bool]:
    """Return the keys of the log-probabilities, and whether they are one sum."""
    one, several = given["log_prob_key"], given["log_prob_keys"]
    if one is not None and several is None:
        return (unravel_key(cast("NestedKey", one)),), known is not None or len(values) > 1
    if several is not None:
        keys = tuple(_listed("log_prob_keys", several))
        if len(keys) not in (1, len(values)):
            raise InvalidArgument(
                f"`log_prob_keys` must be one key for a sum, or one for each of the {len(values)} "
                f"values, got {list_keys(keys)}."
            )
        return keys, len(keys) != len(values)
    if known is not None and known[1]:
        return (known[2],), True
    if composite_lp_aggregate() and len(values) == 1:
        return ("sample_log_prob",), False
    return tuple(log_prob_key_of(key) for key in values), False


def _check_not_summed(log_prob_keys: object, kwargs: Mapping[str, object]) -> None:
    """Raise if log-probabilities get a key each while the switch says to sum them."""
    if log_prob_keys is None or "aggregate" in kwargs or not composite_lp_aggregate():
        return
    keys = _listed("log_prob_keys", log_prob_keys)
    if len(keys) > 1:
        raise InvalidArgument(
            f"`log_prob_keys` cannot be combined with `set_composite_lp_aggregate(True)`, which "
            f"asks for one sum, got {list_keys(keys)}. Give `log_prob_key` for the sum, or call "
            "`set_composite_lp_aggregate(False).set()` for one entry for each value."
        )


def _check_distinct(values: Sequence[NestedKey], log_probs: Sequence[NestedKey]) -> None:
    keys = [*values, *log_probs]
    twice = [key for place, key in enumerate(keys) if key in keys[:place]]
    if twice and twice[0] in values:
        raise InvalidArgument(
            f"the value and its log-probability cannot have one key, {format_key(twice[0])}. "
            "Choose another `log_prob_key`."
        )
    if twice:
        raise InvalidArgument(f"`log_prob_keys` must differ, got {format_key(twice[0])} twice.")


def _listed(name: str, keys: object) -> list[NestedKey]:
    if isinstance(keys, (str, tuple)):
        return [keys]
    if not isinstance(keys, Iterable):
        raise InvalidArgument(
            f"`{name}` must be a key or a list of keys, got {type(keys).__name__}: {keys!r}."
        )
    return [unravel_key(key) for key in keys]


def _keywords(kwargs: object) -> dict[str, object]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidArgument(
            "`distribution_kwargs` must be a dict of arguments by name, got "
            f"{type(kwargs).__name__}: {kwargs!r}."
        )
    return {unravel_key_to_tuple(name)[0]: value for name, value in kwargs.items()}


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidArgument(f"`{name}` must be True or False, got {value!r}.")


def _estimates(value: object) -> int:
    message = f"`n_empirical_estimate` must be a positive int, got {value!r}."
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(message)
    if value < 1:
        raise InvalidValue(message)
    return value


def _samples(value: object) -> int | Size | None:
    """Return a number of values or a shape of them, which may have no dimensions."""
    sizes = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
    message = f"`num_samples` must be a non-negative int, a tuple of them or None, got {value!r}."
    if any(not isinstance(size, int) or isinstance(size, bool) for size in sizes):
        raise InvalidArgument(message)
    if any(size < 0 for size in sizes):
        raise InvalidValue(message)
    if isinstance(value, int):
        return value
    return None if value is None else Size(sizes)


def _generator(value: object) -> Generator:
    if value is None or isinstance(value, torch.Generator):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, (str, tuple)):
        return unravel_key(value)
    raise InvalidArgument(
        "`generator` must be a `torch.Generator`, an integer seed, the key of an entry or None, "
        f"got {type(value).__name__}: {value!r}."
    )


class ConfiguredModule(TensorDictModuleBase):
    """The settings of a probabilistic module, as attributes that are checked when assigned."""

    _kd_changes_by_assignment = True

    _kd_settings: Settings
    cache_dist: bool
    default_interaction_type: InteractionType
    generator: Generator
    n_empirical_estimate: int
    num_samples: int | Size | None
    return_log_prob: bool

    def __setattr__(self, name: str, value: object) -> None:
        """Assign; a setting is checked first, and all that depends on it is updated."""
        if name in NAMES:
            self._kd_take_settings(self._kd_settings.changed(name, value))
        else:
            super().__setattr__(name, value)

    def _kd_take_settings(self, settings: Settings) -> None:
        before: Settings | None = self.__dict__.get("_kd_settings")
        assign = super().__setattr__
        assign("_kd_settings", settings)
        for name in _READ:
            assign(name, getattr(settings, name))
        for name in ("in_keys", "out_keys"):  # only if new: assigning them resets a selection
            keys = getattr(settings, name)
            if before is None or getattr(before, name) != keys:
                assign(name, keys)
        self._kd_flag_change()

    @property
    def distribution_class(self) -> Callable[..., Distribution]:
        """What builds the distribution."""
        return self._kd_settings.build.distribution

    @property
    def distribution_kwargs(self) -> dict[str, object]:
        """Further arguments of the distribution; what is written into the dict counts."""
        return self._kd_settings.build.settings

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """The keys of the parameters."""
        return list(self._kd_settings.params)

    @property
    def _kd_optional_in_keys(self) -> list[NestedKey]:
        """The key of the generator, if there is one: only draws need it."""
        return [key for key in self.in_keys if key not in self._kd_settings.params]

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """The key of each value."""
        return list(self._kd_settings.sample_keys)

    @property
    def log_prob_key(self) -> NestedKey:
        """The key of the log-probability, if there is one."""
        return only_key(self._kd_described_as, self._kd_settings.log_prob_keys)

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """The keys of the log-probabilities."""
        return list(self._kd_settings.log_prob_keys)

    @property
    def _kd_replaces_container(self) -> bool:
        """Whether the result is another container than the input."""
        return self.num_samples is not None

    @property
    def _kd_has_value_form(self) -> bool:
        """Whether bare parameters are enough: not for `num_samples` or a generator in an entry.

        Nor for a class of the user with a `forward` of its own. Nor without a key for the value: it
        is written at `"_"`, which plans leave out. Nor where `forward` writes the parts of a sum,
        which are not among the outputs.
        """
        settings = self._kd_settings
        if self.num_samples is not None or settings.parts or DISCARD in settings.sample_keys:
            return False
        return self._kd_value_form and not isinstance(self.generator, (str, tuple))

    def _kd_stored_keys(self) -> tuple[NestedKey, ...]:
        """Return the visible keys in the order in which a container gets them, with `_`."""
        visible = set(self.out_keys)
        return tuple([key for key in self.out_keys_source if key in visible])

    @property
    def _kd_node_label(self) -> str:
        """The name of the distribution, for tables and pictures."""
        return name_of(self._kd_settings.build.distribution)

    @property
    def _kd_described_as(self) -> str:
        """How messages name this module."""
        return f"{type(self).__name__}({self._kd_node_label})"


_READ = (
    "cache_dist",
    "default_interaction_type",
    "generator",
    "n_empirical_estimate",
    "num_samples",
    "return_log_prob",
)
"""The settings that are attributes of the module."""


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
        log_prob_keys: The same for several values: one key for each. They come before
            `log_prob_key`.
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
            Settings that are assigned later are checked in the same way. If there are several
            `log_prob_keys`, while `set_composite_lp_aggregate` says to sum.
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
        _check_not_summed(log_prob_keys, _keywords(distribution_kwargs))
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
            aggregate: Whether those of several values are summed; None follows `log_prob_keys`,
                and writes each of them to the container where `composite_lp_aggregate` says to
                sum.

        Returns:
            A tensor; for several values that are not summed a container, at `log_prob_keys`.

        Raises:
            InputMissing: If a value or a parameter is missing.
        """
        dist = self.get_dist(tensordict) if dist is None else dist
        values: dict[NestedKey, Tensor] = {}
        for key in self._kd_settings.sample_keys:
            values[key] = cast("Tensor", _read(self, key, tensordict))
        scores: Scores = {}
        try:
            if must_not_look([*values.values()]):
                with unchecked(self._kd_described_as):
                    found = self._kd_log_prob_of_values(dist, values, aggregate, scores)
            else:
                found = self._kd_log_prob_of_values(dist, values, aggregate, scores)
        except Exception as error:
            self._kd_add_call_note(error, values)
            raise
        if aggregate is None and self._kd_settings.shown:
            tensordict.update({log_prob_key_of(key): score for key, score in scores.items()})
        return found

    def _kd_log_prob_of_values(
        self,
        dist: Distribution,
        values: Mapping[NestedKey, Tensor],
        aggregate: bool | None = None,
        scores: Scores | None = None,
    ) -> LogProb:
        """Return the log-probability of bare values, by key; see `log_prob`.

        Those of the components of a composite distribution are added to `scores`.
        """
        if not isinstance(dist, CompositeDistribution):
            return log_prob_of(dist, values[self._kd_settings.sample_keys[0]])
        parts = {key: log_prob_of(dist[key], value) for key, value in values.items()}
        if scores is not None:
            scores.update(parts)
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
            _requires_sample: Whether to write a value. A sequence says no where an earlier step
                writes it: then its log-probability is written, if asked for.

        Returns:
            The container that was written.

        Raises:
            InputMissing: If a parameter is missing, or a value that is scored.
        """
        target = tensordict if tensordict_out is None else tensordict_out
        if not (_requires_sample or self._kd_scores):
            return target
        if skip_existing() and is_done(self, tensordict):
            return tensordict
        values = self._kd_read(tensordict)
        if not _requires_sample:
            given = self._kd_read_values(tensordict)
            return self._kd_write(target, (*given, *self._kd_scored(values, given)), len(given))
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
        if self.num_samples is not None and tensordict_out is None:
            target = tensordict.expand(*_shape_of(self), *tensordict.batch_size)
        return self._kd_write(target, outputs)

    def _kd_write(
        self, target: TensorDictBase, outputs: tuple[object, ...], start: int = 0
    ) -> TensorDictBase:
        """Write the outputs that are visible, and the parts of a sum behind them."""
        visible, keys = self.out_keys, self.out_keys_source
        made = [*zip(keys, outputs[: len(keys)], strict=True)][start:]
        written = {key: value for key, value in made if key in visible}
        if len(outputs) > len(keys):  # the parts of a sum, before it
            sums = {key: written.pop(key) for key in self._kd_settings.log_prob_keys}
            written.update(zip(self._kd_settings.parts, outputs[len(keys) :], strict=True))
            written.update(sums)
        if len(written) == 1:
            ((key, value),) = written.items()
            return target.set(key, value)
        return target.update(written)

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Compute a value of the distribution of bare parameters; see `forward`."""
        generator = self.generator
        if isinstance(generator, (str, tuple)):
            generator = as_generator(values[self.in_keys.index(generator)], generator)
        outputs = self._kd_outputs(values, generator)
        return outputs[: len(self.out_keys_source)] if self._kd_settings.parts else outputs

    @property
    def _kd_scores(self) -> bool:
        """Whether a log-probability is written."""
        if not self.return_log_prob:
            return False
        selected = self.__dict__["_kd_selected"]
        return selected is None or any(key in selected for key in self._kd_settings.log_prob_keys)

    def _kd_fed_keys(self) -> tuple[NestedKey, ...]:
        return self._kd_settings.sample_keys

    def _kd_forward_fed(self, *values: object) -> tuple[object, ...]:
        """Return values that earlier steps wrote, with their log-probabilities."""
        count = len(self._kd_settings.params)
        given = values[count:]
        if self._kd_scores:
            return (*given, *self._kd_scored(values[:count], given))
        return (*given, *[None] * (len(self.out_keys_source) - len(given)))

    def _kd_scored(self, values: Sequence[object], given: Sequence[object]) -> tuple[Tensor, ...]:
        """Return the log-probabilities of values under the distribution of bare parameters.

        Args:
            values: One per key of `dist_params_keys`.
            given: The values, one per key of `dist_sample_keys`.

        Returns:
            One for each of `log_prob_keys`, then the parts of a sum that `forward` writes.
        """
        settings = self._kd_settings
        dist = self._kd_dist_of_values(values)
        by_key = dict(zip(settings.sample_keys, cast("Sequence[Tensor]", given), strict=True))
        scores: Scores = {}
        try:
            if must_not_look(given):
                with unchecked(self._kd_described_as):
                    found = self._kd_log_prob_of_values(dist, by_key, None, scores)
            else:
                found = self._kd_log_prob_of_values(dist, by_key, None, scores)
        except Exception as error:
            self._kd_add_call_note(error, by_key)
            raise
        if isinstance(found, Tensor):
            return (found, *(scores[key] for key in settings.sample_keys if settings.parts))
        return tuple(found[unravel_key_to_tuple(key)] for key in settings.log_prob_keys)

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
            apart = [scores[key] for key in settings.sample_keys] if settings.parts else ()
            return (*outputs, found, *apart)
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

    def _kd_read_values(self, tensordict: TensorDictBase) -> list[object]:
        return [_read(self, key, tensordict) for key in self._kd_settings.sample_keys]


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
