"""The settings of a probabilistic module: the check of each, and the attributes that they are.

They are checked together, in one place, whether they are given to the constructor or assigned
later: an assignment builds a new set of settings, which the module takes as a whole or not at all.
So nothing that is derived from a setting can be stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Self, TypeAlias, cast

import torch
from torch import Size
from torch.distributions import Distribution

from kd_core import (
    InvalidArgument,
    InvalidValue,
    NestedKey,
    format_key,
    unravel_key,
    unravel_key_to_tuple,
)
from kd_core.extending import public_in
from kd_nn import TensorDictModuleBase
from kd_probabilistic._components import list_keys, only_key
from kd_probabilistic._composite import CompositeDistribution, value_keys
from kd_probabilistic._construction import Construction, name_of
from kd_probabilistic._interaction import InteractionType, as_interaction_type
from kd_probabilistic._log_prob import log_prob_key_of

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

Known: TypeAlias = "tuple[tuple[NestedKey, ...], bool, NestedKey] | None"
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
        raise InvalidArgument(
            f"`out_keys` must be the keys of the values of the distribution, "
            f"{list_keys(known[0])}, got {list_keys(keys)}. Rename values with `name_map`; to "
            "write some of them alone use `select_out_keys`."
        )
    return tuple(keys)


def _log_prob_keys(
    given: Mapping[str, object], values: tuple[NestedKey, ...], known: Known
) -> tuple[tuple[NestedKey, ...], bool]:
    """Return the keys of the log-probabilities, and whether they are one sum."""
    one, several = given["log_prob_key"], given["log_prob_keys"]
    if one is not None and several is not None:
        raise InvalidArgument(
            "`log_prob_key` cannot be combined with `log_prob_keys`. Give the first for a sum, the "
            "second for one log-probability of each value."
        )
    if one is not None:
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
    return tuple(log_prob_key_of(key) for key in values), False


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
        return [cast("NestedKey", keys)]
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
    """Return a number of values or a shape of them; no dimensions are as None."""
    sizes = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
    message = f"`num_samples` must be a non-negative int, a tuple of them or None, got {value!r}."
    if any(not isinstance(size, int) or isinstance(size, bool) for size in sizes):
        raise InvalidArgument(message)
    if any(size < 0 for size in sizes):
        raise InvalidValue(message)
    if isinstance(value, int):
        return value
    return Size(sizes) if sizes else None


def _generator(value: object) -> Generator:
    if value is None or isinstance(value, torch.Generator):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, (str, tuple)):
        return unravel_key(cast("NestedKey", value))
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
        """Whether bare parameters are enough: not for `num_samples` or a generator in an entry."""
        return self.num_samples is None and not isinstance(self.generator, (str, tuple))

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
