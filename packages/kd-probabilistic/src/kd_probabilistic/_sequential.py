"""`ProbabilisticTensorDictSequential`: a sequence with probabilistic modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self, TypeVar

from torch import Tensor, nn
from torch.distributions import Distribution

from kd_core import InvalidArgument, NestedKey, TensorDictBase
from kd_nn import TensorDictSequential
from kd_probabilistic._module import ProbabilisticTensorDictModule
from kd_probabilistic._scoring import ScoringModule

T = TypeVar("T")
Modules = nn.Module | list[nn.Module] | dict[str, nn.Module]


class ProbabilisticTensorDictSequential(TensorDictSequential):
    """Run keyed modules in order; at least one of them is probabilistic.

    It offers everything of `TensorDictSequential`, and access to the distribution of the last
    probabilistic module. If an earlier step writes the value of that module, the module scores: it
    writes the log-probability of that value instead of a value of its own.

    Args:
        *modules: Keyed modules; or one list of them; or one dict, which names the steps.
        partial_tolerant: Whether steps whose inputs are missing are skipped.
        selected_out_keys: The outputs to keep; see `select_out_keys`.
        inplace: As for `TensorDictSequential`.

    Raises:
        InvalidArgument: If no module is probabilistic.

    Example:
        >>> import torch
        >>> from kd_nn import NormalParamExtractor, TensorDictModule
        >>> actor = ProbabilisticTensorDictSequential(
        ...     TensorDictModule(NormalParamExtractor(), ["hidden"], ["loc", "scale"]),
        ...     ProbabilisticTensorDictModule(
        ...         ["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal
        ...     ),
        ... )
        >>> actor.select_out_keys("action")(hidden=torch.zeros(3, 4)).shape
        torch.Size([3, 2])
        >>> actor.dist_params_keys, actor.dist_sample_keys
        (['loc', 'scale'], ['action'])
    """

    changes_by_assignment = True

    def __init__(
        self,
        *modules: Modules,
        partial_tolerant: bool = False,
        selected_out_keys: NestedKey | Sequence[NestedKey] | None = None,
        inplace: bool | Literal["empty"] | None = None,
    ) -> None:
        super().__init__(
            *_with_scoring(modules),
            partial_tolerant=partial_tolerant,
            selected_out_keys=selected_out_keys,
            inplace=inplace,
        )
        self._last_probabilistic()

    @property
    def dist_params_keys(self) -> list[NestedKey]:
        """The keys of the parameters of the last distribution."""
        return self._last_probabilistic()[1].dist_params_keys

    @property
    def dist_sample_keys(self) -> list[NestedKey]:
        """The key of the value of the last distribution."""
        return self._last_probabilistic()[1].dist_sample_keys

    def get_dist_params(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Run the steps before the last probabilistic module, on a copy.

        Args:
            tensordict: Holds what these steps read; it is not changed.

        Returns:
            A container of the input's entries and what the steps wrote, parameters included.
        """
        index, last = self._last_probabilistic()
        made = tensordict.copy()
        for _, step in self.named_steps()[:index]:
            made = step(made)
        if isinstance(last, ProbabilisticTensorDictSequential):
            return last.get_dist_params(made)
        return made

    def build_dist_from_params(self, tensordict: TensorDictBase) -> Distribution:
        """Build the last distribution from a container that holds its parameters.

        Raises:
            InputMissing: If a parameter is missing.
        """
        return self._last_probabilistic()[1].build_dist_from_params(tensordict)

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Run the steps before the last probabilistic module, and build its distribution.

        Args:
            tensordict: Holds what the sequence reads; it is not changed.

        Example:
            >>> import torch
            >>> from kd_core import TensorDict
            >>> coin = ProbabilisticTensorDictModule(
            ...     ["probs"], ["toss"], distribution_class=torch.distributions.Bernoulli
            ... )
            >>> model = ProbabilisticTensorDictSequential(coin)
            >>> model.get_dist(TensorDict(probs=torch.tensor(0.25))).mean
            tensor(0.2500)
        """
        return self.build_dist_from_params(self.get_dist_params(tensordict))

    def log_prob(self, tensordict: TensorDictBase, dist: Distribution | None = None) -> Tensor:
        """Return the log-probability of the value that the container holds.

        Args:
            tensordict: Holds the value, and what the sequence reads unless `dist` is given.
            dist: The distribution, if it has been built.

        Raises:
            InputMissing: If the value is missing.
        """
        _, last = self._last_probabilistic()
        if dist is not None:
            return last.log_prob(tensordict, dist)
        made = self.get_dist_params(tensordict)
        dist = last.build_dist_from_params(made)
        return last.log_prob(made if isinstance(last, ScoringModule) else tensordict, dist)

    def _replace_steps(self, steps: Sequence[tuple[str, nn.Module]], named: bool = False) -> Self:
        scored = _scored([step for _, step in steps])
        names = [name for name, _ in steps]
        return super()._replace_steps(list(zip(names, scored, strict=True)), named)

    def _last_probabilistic(self) -> tuple[int, Probabilistic]:
        steps = self.named_steps()
        for index in reversed(range(len(steps))):
            step = steps[index][1]
            if isinstance(step, _PROBABILISTIC):
                return index, step
        raise InvalidArgument(
            "a `ProbabilisticTensorDictSequential` must have a `ProbabilisticTensorDictModule` "
            f"among its {len(steps)} steps. Use `TensorDictSequential` for steps without one."
        )


Probabilistic = ProbabilisticTensorDictModule | ScoringModule | ProbabilisticTensorDictSequential
_PROBABILISTIC = (ProbabilisticTensorDictModule, ScoringModule, ProbabilisticTensorDictSequential)


def _with_scoring(modules: tuple[Modules, ...]) -> tuple[Modules, ...]:
    """Replace the last probabilistic module by a scoring one, if its value is written earlier."""
    first = modules[0] if len(modules) == 1 else None
    if isinstance(first, (dict, nn.ModuleDict)):
        return (dict(zip(first, _scored(list(first.values())), strict=True)),)
    if isinstance(first, (list, tuple, nn.ModuleList)):
        return (_scored(list(first)),)
    return tuple(_scored(list(modules)))


def _scored(steps: list[T]) -> list[T | ScoringModule]:
    places = [i for i, step in enumerate(steps) if isinstance(step, _PROBABILISTIC)]
    last = steps[places[-1]] if places else None
    if not isinstance(last, ProbabilisticTensorDictModule):
        return [*steps]
    before = steps[: places[-1]]
    produced = {key for step in before for key in getattr(step, "out_keys", ())}
    if last.dist_sample_keys[0] not in produced:
        return [*steps]
    return [*before, ScoringModule(last), *steps[places[-1] + 1 :]]
