"""A keyed module with the settings of a distribution: reading them, and assigning them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Size
from torch.distributions import Distribution

from kd_core import NestedKey
from kd_nn import TensorDictModuleBase
from kd_probabilistic._components import only_key
from kd_probabilistic._construction import name_of
from kd_probabilistic._interaction import InteractionType
from kd_probabilistic._settings import NAMES, Generator, Settings


class ConfiguredModule(TensorDictModuleBase):
    """The settings of a probabilistic module, as attributes that are checked when assigned."""

    changes_by_assignment = True

    _settings: Settings
    cache_dist: bool
    default_interaction_type: InteractionType
    generator: Generator
    n_empirical_estimate: int
    num_samples: int | Size | None
    return_log_prob: bool

    def __setattr__(self, name: str, value: object) -> None:
        """Assign; a setting is checked first, and all that depends on it is updated."""
        if name in NAMES:
            self._take_settings(self._settings.changed(name, value))
        else:
            super().__setattr__(name, value)

    def _take_settings(self, settings: Settings) -> None:
        before: Settings | None = self.__dict__.get("_settings")
        assign = super().__setattr__
        assign("_settings", settings)
        for name in _READ:
            assign(name, getattr(settings, name))
        for name in ("in_keys", "out_keys"):  # only if new: assigning them resets a selection
            keys = getattr(settings, name)
            if before is None or getattr(before, name) != keys:
                assign(name, keys)
        self._flag_change()

    @property
    def distribution_class(self) -> Callable[..., Distribution]:
        """What builds the distribution."""
        return self._settings.build.distribution

    @property
    def distribution_kwargs(self) -> dict[str, object]:
        """Further arguments of the distribution, as a copy."""
        return dict(self._settings.build.settings)

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """The keys of the parameters."""
        return list(self._settings.params)

    @property
    def optional_in_keys(self) -> list[NestedKey]:
        """The key of the generator, if there is one: only draws need it."""
        return [key for key in self.in_keys if key not in self._settings.params]

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """The key of each value."""
        return list(self._settings.sample_keys)

    @property
    def log_prob_key(self) -> NestedKey:
        """The key of the log-probability, if there is one."""
        return only_key(self.described_as, self._settings.log_prob_keys)

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """The keys of the log-probabilities."""
        return list(self._settings.log_prob_keys)

    @property
    def replaces_container(self) -> bool:
        """Whether the result is another container than the input."""
        return self.num_samples is not None

    @property
    def has_value_form(self) -> bool:
        """Whether bare parameters are enough: not for `num_samples` or a generator in an entry."""
        return self.num_samples is None and not isinstance(self.generator, (str, tuple))

    @property
    def node_label(self) -> str:
        """The name of the distribution, for tables and pictures."""
        return name_of(self._settings.build.distribution)

    @property
    def described_as(self) -> str:
        """How messages name this module."""
        return f"{type(self).__name__}({self.node_label})"


_READ = (
    "cache_dist",
    "default_interaction_type",
    "generator",
    "n_empirical_estimate",
    "num_samples",
    "return_log_prob",
)
"""The settings that are attributes of the module."""
