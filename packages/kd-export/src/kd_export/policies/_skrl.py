"""Policies of skrl.

Knows what its agents do around the models that users write: preprocessors, clips and the choice of
actions. The library is never imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from kd_core import NestedKey
from kd_export._errors import NotExportable
from kd_export.policies import _policy as spaces
from kd_export.policies._policy import (
    ACTION,
    OBSERVATION,
    ArgMax,
    Clip,
    Normalise,
    Policy,
    copied,
    in_place,
    of_steps,
)
from kd_nn import TensorDictModule

_REACH = 3.0


class Model(Protocol):
    """What is used of a model of skrl."""

    observation_space: object
    action_space: spaces.Space

    def act(
        self, inputs: Mapping[str, object], *, role: str
    ) -> tuple[Tensor, Mapping[str, object]]:
        """Return actions and what else the model computes."""
        ...

    def compute(
        self, inputs: Mapping[str, object], role: str
    ) -> tuple[Tensor, Mapping[str, object]]:
        """Return what the network computes."""
        ...

    def get_specification(self) -> Mapping[str, Mapping[str, object]]:
        """Return what the model keeps from step to step."""
        ...


class Predict:
    """The preprocessor and the model of an agent, evaluated as skrl's trainers do.

    Attributes:
        module: The whole sequence of steps, of which a module may lack one.
    """

    def __init__(
        self, model: Model, scaler: nn.Module | None, sizes: Sequence[Sequence[int]]
    ) -> None:
        self.module: nn.Module | None = None
        self._model, self._scaler, self._sizes = model, scaler, sizes
        self._held: list[Tensor] = []

    def __call__(self, observations: Tensor) -> Tensor:
        """Return the actions."""
        with torch.no_grad():
            x = observations if self._scaler is None else self._scaler(observations)
            inputs: dict[str, object] = {"observations": x, "states": None}
            if self._sizes:
                if not self._held:
                    self._held = [torch.zeros(s[0], len(x), s[2]) for s in self._sizes]
                inputs["rnn"] = [state.clone() for state in self._held]
            actions, others = self._model.act(inputs, role="policy")
            if self._sizes:
                self._held = [s.clone() for s in cast("Sequence[Tensor]", others["rnn"])]
        if "net_output" in others:  # categorical: skrl samples, and its logits tell the best
            logits = cast("Tensor", others["net_output"])
            best: Tensor = ArgMax(_counts(self._model.action_space))(logits)
            return best
        return cast("Tensor", others.get("mean_actions", actions))

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin a new episode in these rows, or in all."""
        if mask is None:
            self._held = []
        for state in self._held:
            state[:, mask] = 0


class Compute(nn.Module):
    """Run the network that a user of skrl wrote.

    Args:
        model: The model.
        states: How many recurrent states it has.
    """

    def __init__(self, model: nn.Module, states: int) -> None:
        super().__init__()
        self.model = model
        self.states = states

    def forward(self, x: Tensor, *states: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the mean or the logits, and the next states with their rows first."""
        inputs: dict[str, object] = {"observations": x, "states": None}
        if self.states:
            inputs["rnn"] = [state.transpose(0, 1).contiguous() for state in states]
        compute = cast("Model", self.model).compute
        result, others = compute(inputs, "policy")
        if not self.states:
            return result
        kept = cast("Sequence[Tensor]", others["rnn"])
        return result, *(state.transpose(0, 1) for state in kept)


def from_skrl(
    agent: object,
    *,
    observation_preprocessor: object = None,
    metadata: Mapping[str, object] | None = None,
) -> Policy:
    """Build a policy of an agent of skrl, or of a model of one.

    The actions are those of a deterministic evaluation: the mean of a Gaussian, the result of a
    deterministic model, the most likely of a categorical one.

    Args:
        agent: A trained agent, such as PPO or SAC, or its policy.
        observation_preprocessor: The scaler of observations, where a model is passed. By default
            that of the agent.
        metadata: What the file says of the policy.

    Raises:
        NotExportable: It is of another kind.
    """
    theirs = getattr(agent, "policy", agent)
    if not isinstance(theirs, nn.Module) or not hasattr(theirs, "compute"):
        raise NotExportable(
            f"expected an agent or a model of skrl, got `{type(agent).__name__}`.",
            expected="an agent with `policy`, or a model with `compute`",
            got=type(agent).__name__,
            hint="Pass `runner.agent`, or `models['policy']`.",
        )
    own = copied(theirs)
    model = cast("Model", own)
    found = observation_preprocessor
    if found is None:
        found = getattr(agent, "_observation_preprocessor", None)
    scaler = copied(found) if isinstance(found, nn.Module) else None
    specification = model.get_specification().get("rnn", {})
    sizes = cast("Sequence[Sequence[int]]", specification.get("sizes", []))
    size = sum(
        int(torch.Size(leaf.shape).numel())
        for _, leaf in spaces.leaves(model.observation_space, (OBSERVATION,))
    )
    source = torch.Generator().manual_seed(0)
    values = _REACH * spaces.spread((spaces.ROWS, size), source).float()
    steps: list[TensorDictModule] = []
    if scaler is not None:
        mean, deviation, limit = _scale(scaler)
        values = mean + deviation * values * max(1.0, limit / 9)
        steps.append(in_place(Normalise(mean, deviation), OBSERVATION))
        steps.append(in_place(Clip(-limit, limit), OBSERVATION))
    state: dict[NestedKey, NestedKey] = {}
    example: dict[NestedKey, object] = {OBSERVATION: values}
    for place, (layers, _, width) in enumerate(sizes):
        state[("state", str(place))] = ("next", "state", str(place))
        example[("state", str(place))] = torch.zeros(spaces.ROWS, layers, width)
    network = Compute(own, len(sizes))
    steps.append(
        TensorDictModule(network, in_keys=[OBSERVATION, *state], out_keys=[ACTION, *state.values()])
    )
    steps += _chosen(model)
    oracle = Predict(model, scaler, sizes)
    said = spaces.told("skrl", agent, model.observation_space, model.action_space)
    return of_steps(steps, example, oracle, state, said | dict(metadata or {}))


def _scale(scaler: nn.Module) -> tuple[Tensor, Tensor, float]:
    """Return mean, deviation and limit of a `RunningStandardScaler`."""
    names = ("running_mean", "running_variance", "clip_threshold", "epsilon")
    if not all(hasattr(scaler, name) for name in names):
        raise NotExportable(
            f"the preprocessor `{type(scaler).__name__}` is not one that kd_export knows.",
            expected="RunningStandardScaler",
            got=type(scaler).__name__,
            hint="Write it as a keyed module, and pass `oracle=` to `kd_export.save`.",
        )
    mean, variance = cast("Tensor", scaler.running_mean), cast("Tensor", scaler.running_variance)
    deviation = variance.float().sqrt() + float(cast("float", scaler.epsilon))
    return mean.float(), deviation, float(cast("float", scaler.clip_threshold))


def _counts(space: spaces.Space) -> list[int] | None:
    if spaces.kind(space) != "MultiDiscrete":
        return None
    low, high = spaces.limits(space)
    counts: list[int] = (high - low + 1).flatten().tolist()
    return counts


def _chosen(model: Model) -> list[TensorDictModule]:
    """Return what the mixin of a model does to the result of the network."""
    kinds = {one.__name__ for one in type(model).__mro__}
    if {"CategoricalMixin", "MultiCategoricalMixin"} & kinds:
        return [in_place(ArgMax(_counts(model.action_space)), ACTION)]
    clips = any(
        bool(getattr(model, name, False)) for name in ("_g_clip_mean_actions", "_d_clip_actions")
    )
    if not clips:
        return []
    low, high = spaces.limits(model.action_space)
    return [in_place(Clip(low, high), ACTION)]
