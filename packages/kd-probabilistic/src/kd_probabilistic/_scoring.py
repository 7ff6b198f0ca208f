"""Scoring: the log-probability of a value that another module has produced."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from torch.distributions import Distribution

from kd_core import InvalidArgument, NestedKey, TensorDictBase, unravel_key_to_tuple
from kd_nn import TensorDictModuleBase, dispatch, skip_existing
from kd_probabilistic._module import LogProb, ProbabilisticTensorDictModule, is_done
from kd_probabilistic._reading import must_not_look, unchecked


class ScoringModule(TensorDictModuleBase):
    """Write the log-probability of an entry under the distribution of a probabilistic module.

    It reads the parameters and the value, and writes `log_prob_keys`.

    Args:
        module: The probabilistic module whose distribution scores.

    Example:
        >>> import torch
        >>> from torch.distributions import Bernoulli
        >>> coin = ProbabilisticTensorDictModule(["probs"], ["toss"], distribution_class=Bernoulli)
        >>> ScoringModule(coin)(probs=torch.tensor(0.25), toss=torch.tensor(1.0)).exp()
        tensor(0.2500)
    """

    _kd_changes_by_assignment = True

    def __init__(self, module: ProbabilisticTensorDictModule) -> None:
        super().__init__()
        self.module = module

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """The keys of the parameters."""
        return self.module.dist_params_keys

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """The key of each value that is scored."""
        return self.module.dist_sample_keys

    @property
    def log_prob_keys(self) -> list[NestedKey]:
        """The keys of the log-probabilities."""
        return self.module.log_prob_keys

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Build the distribution of a container's parameters."""
        return self.module.get_dist(tensordict)

    build_dist_from_params = get_dist

    def log_prob(
        self,
        tensordict: TensorDictBase,
        dist: Distribution | None = None,
        *,
        aggregate: bool | None = None,
    ) -> LogProb:
        """Return the log-probability of the value that the container holds."""
        return self.module.log_prob(tensordict, dist, aggregate=aggregate)

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the log-probability of the value.

        Raises:
            InputMissing: If the value or a parameter is missing.
        """
        if skip_existing() and is_done(self, tensordict):
            return tensordict
        found = self._kd_outputs(self.module.log_prob(tensordict))
        made = dict(zip(self._kd_own_out_keys(), found, strict=True))
        return tensordict.update({key: made[key] for key in self.out_keys})

    def _kd_forward_values(self, *values: object) -> tuple[object, ...]:
        """Score a bare value; see `forward`."""
        by_key = dict(zip(self.in_keys, values, strict=True))
        params = [by_key[key] for key in self.module.dist_params_keys]
        scored = {key: cast(Tensor, by_key[key]) for key in self.module.dist_sample_keys}
        if must_not_look(values):
            with unchecked(self.module._kd_described_as):
                return self._kd_scores(params, scored)
        return self._kd_scores(params, scored)

    def _kd_scores(
        self, params: list[object], values: dict[NestedKey, Tensor]
    ) -> tuple[Tensor, ...]:
        dist = self.module._kd_dist_of_values(params)
        return self._kd_outputs(self.module._kd_log_prob_of_values(dist, values))

    def _kd_outputs(self, found: LogProb) -> tuple[Tensor, ...]:
        if isinstance(found, Tensor):
            return (found,)
        return tuple(found[unravel_key_to_tuple(key)] for key in self.module.log_prob_keys)

    def _kd_own_in_keys(self) -> tuple[NestedKey, ...]:
        module = self.module
        return tuple(dict.fromkeys([*module.dist_params_keys, *module.dist_sample_keys]))

    def _kd_own_out_keys(self) -> tuple[NestedKey, ...]:
        return tuple(self.module.log_prob_keys)

    def _kd_set_in_spec(self, spec: object) -> None:
        raise self._kd_refusal("in_keys")

    def _kd_set_out_keys_source(self, keys: object) -> None:
        raise self._kd_refusal("out_keys")

    def _kd_refusal(self, name: str) -> InvalidArgument:
        return InvalidArgument(
            f"the {name} of a `ScoringModule` follow from the module whose distribution scores and "
            "cannot be assigned. Change the settings of that module."
        )
