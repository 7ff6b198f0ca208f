"""The settings of a probabilistic module: the check of each, and the attributes derived from them.

They are checked together, in one place, whether they are given to the constructor or assigned
later: an assignment builds a new set of settings, which the module takes as a whole or not at all.
So nothing that is derived from a setting can be stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Self, TypeAlias, cast

import torch
from torch.distributions import Distribution

from kd_core import (
    InvalidArgument,
    InvalidValue,
    NestedKey,
    format_key,
    unravel_key,
    unravel_key_to_tuple,
)
from kd_probabilistic._construction import Construction
from kd_probabilistic._interaction import as_interaction_type
from kd_probabilistic._log_prob import log_prob_key_of

InKeys: TypeAlias = "NestedKey | Sequence[NestedKey] | Mapping[str, NestedKey]"
Generator: TypeAlias = "torch.Generator | int | NestedKey | None"

DISCARD: Final = "_"
"""The key of a value that is not written."""


class Settings:
    """The checked settings of a probabilistic module; never changed.

    Args:
        given: Every setting by its name in the constructor.

    Attributes:
        params: The keys of the parameters, each once.
        feeds: Which of them feeds each argument of the distribution.
        build: Calls the distribution class.
        sample_key: The key of the value.
        log_prob_key: The key of its log-probability.
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
        self.sample_key = _only_key(given["out_keys"])
        own = given["log_prob_key"]
        self.log_prob_key = unravel_key(
            log_prob_key_of(self.sample_key) if own is None else cast("NestedKey", own)
        )
        self.return_log_prob = _flag("return_log_prob", given["return_log_prob"])
        self.default_interaction_type = as_interaction_type(given["default_interaction_type"])
        self.n_empirical_estimate = _count("n_empirical_estimate", given, 1)
        number = given["num_samples"]
        self.num_samples = None if number is None else _count("num_samples", given, 0)
        self.generator = _generator(given["generator"])
        asked = [self.generator] if isinstance(self.generator, (str, tuple)) else []
        self.in_keys: list[NestedKey] = list(dict.fromkeys([*self.params, *asked]))
        self.out_keys: list[NestedKey] = [self.sample_key]
        if self.return_log_prob:
            self.out_keys.append(self.log_prob_key)
        if self.sample_key == self.log_prob_key:
            raise InvalidArgument(
                f"the value and its log-probability cannot have one key, "
                f"{format_key(self.sample_key)}. Choose another `log_prob_key`."
            )
        self._given = {
            **given,
            "in_keys": arguments,
            "out_keys": self.sample_key,
            "distribution_kwargs": kwargs,
            "generator": self.generator,
        }

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
        elif name == "out_keys" and keys is not None and self.return_log_prob and len(keys) == 2:
            changes = {"out_keys": keys[:1], "log_prob_key": keys[1]}
        return type(self)({**self._given, **changes})


NAMES: Final = frozenset(
    {
        "default_interaction_type",
        "distribution_class",
        "distribution_kwargs",
        "generator",
        "in_keys",
        "log_prob_key",
        "n_empirical_estimate",
        "num_samples",
        "out_keys",
        "return_log_prob",
    }
)


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
            f"two of the in_keys {', '.join(format_key(key) for key in keys)} name the same "
            "argument, which is the last part of a key. Give a mapping `{argument: key}`."
        )
    return arguments


def _only_key(out_keys: object) -> NestedKey:
    """Return the one key of the value."""
    if out_keys is None:
        return DISCARD
    keys = _listed("out_keys", out_keys)
    if len(keys) != 1:
        raise InvalidArgument(
            f"`out_keys` must be the one key of the value, got {len(keys)} keys. Give the key of "
            "the log-probability as `log_prob_key`."
        )
    return unravel_key(keys[0])


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


def _count(name: str, given: Mapping[str, object], least: int) -> int:
    value = given[name]
    kind = "a non-negative int or None" if least == 0 else "a positive int"
    message = f"`{name}` must be {kind}, got {value!r}."
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(message)
    if value < least:
        raise InvalidValue(message)
    return value


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
