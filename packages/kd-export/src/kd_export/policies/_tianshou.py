"""Policies of tianshou.

Knows what its policies do to the result of their actors, and `map_action`. The library is never
imported: what is needed of it is there already where a policy of it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from kd_export.policies import _policy as spaces
from kd_export.policies._policy import (
    ACTION,
    OBSERVATION,
    ArgMax,
    Clip,
    Draft,
    Policy,
    Unscale,
    copied,
    unknown_kind,
    wrong_kind,
)


class Theirs(Protocol):
    """What is used of a policy of tianshou.

    Attributes:
        actor: The network, of policies that have an actor.
        model: The network, of those that learn values.
        support: The values of C51.
    """

    action_space: spaces.Space
    observation_space: object
    action_scaling: bool
    action_bound_method: str | None
    actor: nn.Module
    model: nn.Module
    support: Tensor

    def __call__(self, batch: object, state: object) -> Any:  # a batch of tianshou
        """Return actions and states."""
        ...

    def map_action(self, act: object) -> object:
        """Return the environment's actions."""
        ...


class Statistics(Protocol):
    """What `VectorEnvNormObs` measures."""

    mean: object
    var: object
    eps: float
    clip_max: float | None

    def norm(self, array: object) -> object:
        """Return normalised observations."""
        ...


class Predict(spaces.Oracle):
    """The policy itself, with `map_action`."""

    def __init__(self, policy: Theirs, statistics: Statistics | None) -> None:
        self._policy, self._statistics = policy, statistics
        self._held: dict[str, Tensor] = {}

    def __call__(self, observations: Tensor) -> object:
        """Return the actions."""
        batch = sys.modules["tianshou.data"].Batch
        arrays: object = observations.numpy()
        if self._statistics is not None:
            arrays = self._statistics.norm(arrays)
        held = {name: state.clone() for name, state in self._held.items()} or None
        with torch.no_grad():
            result = self._policy(batch(obs=arrays, info={}), state=held)
        if hasattr(result.state, "items"):
            self._held = {name: state.detach().clone() for name, state in result.state.items()}
        return self._policy.map_action(result.act)

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin a new episode in these rows, or in all."""
        if mask is None:
            self._held = {}
        for state in self._held.values():
            state[mask] = 0


class Actor(nn.Module):
    """Run an actor of tianshou.

    Args:
        actor: The network.
        names: What its recurrent states are called.
    """

    def __init__(self, actor: nn.Module, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.actor = actor
        self.names = tuple(names)

    def forward(self, x: Tensor, *states: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the action, its mean or its logits, and the next states."""
        held = dict(zip(self.names, states, strict=True)) or None
        result, kept = self.actor(x, state=held, info={})
        first: Tensor = result[0] if isinstance(result, tuple) else result
        if not self.names:
            return first
        return first, *(kept[name] for name in self.names)


class Values(nn.Module):
    """Reduce what a distributional network gives to one value for each action."""

    support: Tensor

    def __init__(self, support: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("support", torch.ones(()) if support is None else support.clone())
        self.mean = support is None

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the quantiles, or the expectation over the support."""
        return x.mean(2) if self.mean else (x * self.support).sum(2)


def from_tianshou(
    policy: object, obs_rms: object = None, *, metadata: Mapping[str, object] | None = None
) -> Policy:
    """Build a policy of an algorithm of tianshou 2, or of its policy.

    The actions are deterministic, and mapped to the environment as the collector does it
    (`map_action`). Supported are PPO, A2C, Reinforce, TRPO, NPG, SAC, discrete SAC, DDPG, TD3, DQN,
    C51 and QR-DQN, with recurrent actors too.

    Args:
        policy: The algorithm or the policy.
        obs_rms: The statistics of `VectorEnvNormObs`, or that environment.
        metadata: What the file says of the policy.

    Raises:
        NotExportable: The policy is of another kind.
    """
    own = getattr(policy, "policy", policy)
    if not _is_policy(own):
        raise wrong_kind(
            "an algorithm or a policy of tianshou",
            policy,
            "an algorithm with `policy`",
            "Build the policy, and load its weights with `load_state_dict`.",
        )
    own = copied(own)
    if hasattr(own, "deterministic_eval"):
        own.deterministic_eval = True
    statistics = _statistics(obs_rms)
    ((_, space),) = spaces.leaves(own.observation_space, (OBSERVATION,))
    source = torch.Generator().manual_seed(0)
    values = spaces.draw(space, source)
    draft = Draft()
    if statistics is not None:
        mean, var = (
            torch.as_tensor(x, dtype=torch.float64) for x in (statistics.mean, statistics.var)
        )
        deviation, limit = (var + statistics.eps).sqrt(), statistics.clip_max or 0.0
        values = spaces.around(mean, deviation, limit, values.shape, source).to(values.dtype)
        draft.normalise(OBSERVATION, mean, deviation, limit)
    draft.example[OBSERVATION] = values
    actor, after = _parts(own)
    with torch.no_grad():
        _, kept = actor(values.float(), state=None, info={})
    starts = {name: torch.zeros_like(kept[name]) for name in kept} if hasattr(kept, "items") else {}
    draft.add_with_state(Actor(actor, list(starts)), [OBSERVATION], [ACTION], starts)
    draft.change(ACTION, *after, *_mapped(own))
    oracle = Predict(own, statistics)
    said = spaces.told("tianshou", policy, own.observation_space, own.action_space)
    return draft.finish(oracle, said | dict(metadata or {}))


def _is_policy(given: object) -> TypeGuard[Theirs]:
    return isinstance(given, nn.Module) and hasattr(given, "map_action")


def _statistics(given: object) -> Statistics | None:
    if hasattr(given, "get_obs_rms"):
        given = given.get_obs_rms()
    if given is not None and not _is_statistics(given):
        raise wrong_kind(
            "the statistics of observations",
            given,
            "the `obs_rms` of `VectorEnvNormObs`, or that environment",
            "Pass `env.get_obs_rms()`.",
        )
    return given


def _is_statistics(given: object) -> TypeGuard[Statistics]:
    return all(hasattr(given, name) for name in ("mean", "var", "eps", "norm"))


def _parts(policy: Theirs) -> tuple[nn.Module, list[nn.Module]]:
    """Return the network of a policy, and what the policy does to its result."""
    kinds = [one.__name__ for one in type(policy).__mro__]
    if "SACPolicy" in kinds:
        return policy.actor, [nn.Tanh()]
    if "ContinuousDeterministicPolicy" in kinds:
        return policy.actor, []
    if "ProbabilisticActorPolicy" in kinds or "DiscreteSACPolicy" in kinds:
        discrete = spaces.kind(policy.action_space) == "Discrete"
        return policy.actor, [ArgMax()] if discrete else []
    if "DiscreteQLearningPolicy" in kinds:
        if "QRDQNPolicy" in kinds:
            return policy.model, [Values(None), ArgMax()]
        if "C51Policy" in kinds:
            return policy.model, [Values(policy.support), ArgMax()]
        return policy.model, [ArgMax()]
    raise unknown_kind("policy", policy)


def _mapped(policy: Theirs) -> list[nn.Module]:
    """Return what `map_action` does."""
    if spaces.kind(policy.action_space) != "Box":
        return []
    steps: list[nn.Module] = []
    if policy.action_bound_method == "clip":
        steps.append(Clip(-1.0, 1.0))
    elif policy.action_bound_method == "tanh":
        steps.append(nn.Tanh())
    if policy.action_scaling:
        steps.append(Unscale(*spaces.limits(policy.action_space)))
    return steps
