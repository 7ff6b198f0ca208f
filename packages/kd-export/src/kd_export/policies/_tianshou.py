"""Policies of tianshou.

Knows what its policies do to the result of their actors, and `map_action`. The library is never
imported: what is needed of it is there already where a policy of it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
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
    Unscale,
    copied,
    in_place,
    of_steps,
)
from kd_nn import TensorDictModule


class Theirs(Protocol):
    """What is used of a policy of tianshou."""

    action_space: spaces.Space
    observation_space: object
    action_scaling: bool
    action_bound_method: str | None

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


class _Result(Protocol):
    act: object
    state: object


class Predict:
    """The policy itself, with `map_action`: observations in, actions out.

    Attributes:
        module: The whole sequence of steps, of which a module may lack one.
    """

    def __init__(self, policy: nn.Module, statistics: Statistics | None) -> None:
        self.module: nn.Module | None = None
        self._policy, self._statistics = policy, statistics
        self._held: dict[str, Tensor] = {}

    def __call__(self, observations: Tensor) -> object:
        """Return the actions."""
        batch = cast("Callable[..., object]", sys.modules["tianshou.data"].Batch)
        arrays: object = observations.numpy()
        if self._statistics is not None:
            arrays = self._statistics.norm(arrays)
        held = {name: state.clone() for name, state in self._held.items()} or None
        with torch.no_grad():
            result = cast("_Result", self._policy(batch(obs=arrays, info={}), state=held))
        if isinstance(result.state, Mapping) or hasattr(result.state, "items"):
            states = cast("Mapping[str, Tensor]", result.state)
            self._held = {name: state.detach().clone() for name, state in states.items()}
        return cast("Theirs", self._policy).map_action(result.act)

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
    found = getattr(policy, "policy", policy)
    if not isinstance(found, nn.Module) or not hasattr(found, "map_action"):
        raise NotExportable(
            f"expected an algorithm or a policy of tianshou, got `{type(policy).__name__}`.",
            expected="an algorithm with `policy`",
            got=type(policy).__name__,
            hint="Build the policy, and load its weights with `load_state_dict`.",
        )
    own = copied(found)
    if hasattr(own, "deterministic_eval"):
        setattr(own, "deterministic_eval", True)  # noqa: B010  # not typed
    known = cast("Theirs", own)
    get = getattr(obs_rms, "get_obs_rms", None)
    statistics = cast("Statistics | None", get() if get is not None else obs_rms)
    ((_, space),) = spaces.leaves(known.observation_space, (OBSERVATION,))
    source = torch.Generator().manual_seed(0)
    values = spaces.draw(space, source)
    steps: list[TensorDictModule] = []
    if statistics is not None:
        mean, var = (
            torch.as_tensor(x, dtype=torch.float64) for x in (statistics.mean, statistics.var)
        )
        deviation = (var + statistics.eps).sqrt()
        limit = statistics.clip_max or 0.0
        spread = spaces.spread(values.shape, source)
        values = (mean + deviation * max(3.0, limit / 3) * spread).to(values.dtype)
        steps.append(in_place(Normalise(mean, deviation), OBSERVATION))
        if limit:
            steps.append(in_place(Clip(-limit, limit), OBSERVATION))
    state: dict[NestedKey, NestedKey] = {}
    example: dict[NestedKey, object] = {OBSERVATION: values}
    actor, after = _parts(own)
    with torch.no_grad():
        _, kept = actor(values.float(), state=None, info={})
    names = list(kept) if hasattr(kept, "items") else []
    for name in names:
        state[("state", name)] = ("next", "state", name)
        example[("state", name)] = torch.zeros_like(kept[name])
    steps.append(
        TensorDictModule(
            Actor(actor, names),
            in_keys=[OBSERVATION, *state],
            out_keys=[ACTION, *state.values()],
        )
    )
    steps += [in_place(one, ACTION) for one in (*after, *_mapped(known))]
    oracle = Predict(own, statistics)
    said = spaces.told("tianshou", policy, known.observation_space, known.action_space)
    return of_steps(steps, example, oracle, state, said | dict(metadata or {}))


def _parts(policy: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Return the network of a policy, and what the policy does to its result."""
    kinds = [one.__name__ for one in type(policy).__mro__]
    if "SACPolicy" in kinds:
        return cast("nn.Module", policy.actor), [nn.Tanh()]
    if "ContinuousDeterministicPolicy" in kinds:
        return cast("nn.Module", policy.actor), []
    if "ProbabilisticActorPolicy" in kinds or "DiscreteSACPolicy" in kinds:
        discrete = spaces.kind(policy.action_space) == "Discrete"
        return cast("nn.Module", policy.actor), [ArgMax()] if discrete else []
    if "DiscreteQLearningPolicy" in kinds:
        network = cast("nn.Module", policy.model)
        if "QRDQNPolicy" in kinds:
            return network, [Values(None), ArgMax()]
        if "C51Policy" in kinds:
            return network, [Values(cast("Tensor", policy.support)), ArgMax()]
        return network, [ArgMax()]
    raise NotExportable(
        f"the policy `{type(policy).__name__}` is of a kind that kd_export does not know.",
        got=type(policy).__name__,
        hint="Write it as a keyed module, and pass `oracle=` to `kd_export.save`.",
    )


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
