"""Policies of rl_games.

Knows what its players do around their networks: normalisers that TorchScript compiled, states,
clips and scales. The library is never imported.
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
    ScaleImage,
    Unscale,
    copied,
    in_place,
    of_steps,
)
from kd_nn import TensorDictModule

_LIMIT = 5.0
_REACH = 3.0


class Player(Protocol):
    """What is used of a player."""

    model: nn.Module
    observation_space: object
    action_space: spaces.Space
    device: torch.device
    states: list[Tensor] | tuple[Tensor, ...] | None
    has_batch_dimension: bool

    def get_action(self, obs: Tensor, is_deterministic: bool) -> Tensor:
        """Return actions."""
        ...


class Predict:
    """The player's own `get_action`, deterministic.

    Attributes:
        module: The whole sequence of steps, of which a module may lack one.
    """

    def __init__(self, player: Player, states: Sequence[Tensor], shape: tuple[int, ...]) -> None:
        self.module: nn.Module | None = None
        self._player, self._states, self._shape = player, states, shape
        self._held: list[Tensor] | None = None

    def __call__(self, observations: Tensor) -> Tensor:
        """Return the actions."""
        player = self._player
        before = player.states, player.has_batch_dimension
        rows = len(observations)
        if self._states:
            player.states = self._held or [
                torch.zeros(s.shape[0], rows, s.shape[2], device=player.device)
                for s in self._states
            ]
        player.has_batch_dimension = True
        try:
            action = player.get_action(observations.to(player.device), is_deterministic=True)
            self._held = [s.clone() for s in player.states or ()]
        finally:
            player.states, player.has_batch_dimension = before
        return action.detach().cpu().reshape(rows, *self._shape)  # it squeezes a single row

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin a new episode in these rows, or in all."""
        if mask is None:
            self._held = None
        for state in self._held or ():
            state[:, mask] = 0


class Network(nn.Module):
    """Run a network of rl_games.

    Args:
        network: The network.
        states: How many recurrent states it has.
    """

    def __init__(self, network: nn.Module, states: int) -> None:
        super().__init__()
        self.network = network
        self.states = states

    def forward(self, x: Tensor, *states: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the mean or the logits, and the next states with their rows first."""
        held = tuple(state.transpose(0, 1).contiguous() for state in states)
        given = {"is_train": False, "prev_actions": None, "obs": x}
        results = self.network({**given, "rnn_states": held if self.states else None})
        first = results[0]
        chosen: Tensor = torch.cat(first, -1) if isinstance(first, list) else first
        if not self.states:
            return chosen
        return chosen, *(state.transpose(0, 1) for state in results[-1])


def from_rl_games(player: object, *, metadata: Mapping[str, object] | None = None) -> Policy:
    """Build a policy of a player of rl_games.

    Supported are the players of PPO, continuous, discrete and multi-discrete, with networks on
    one observation, recurrent or not.

    Args:
        player: A `PpoPlayerContinuous` or a `PpoPlayerDiscrete` that restored its weights.
        metadata: What the file says of the policy.

    Raises:
        NotExportable: It is of another kind.
    """
    network = getattr(getattr(player, "model", None), "a2c_network", None)
    if not isinstance(network, nn.Module) or not hasattr(player, "get_action"):
        raise NotExportable(
            f"expected a player of rl_games, got `{type(player).__name__}`.",
            expected="PpoPlayerContinuous or PpoPlayerDiscrete",
            got=type(player).__name__,
            hint="Make it with `runner.create_player()`, and call `player.restore(path)`.",
        )
    known = cast("Player", player)
    if spaces.kind(known.observation_space) != "Box":
        raise NotExportable(
            "players with several observations are not converted.",
            got=spaces.kind(known.observation_space),
            hint="Write the policy as a keyed module, and pass `oracle=` to `kd_export.save`.",
        )
    source = torch.Generator().manual_seed(0)
    values = spaces.draw(cast("spaces.Space", known.observation_space), source)
    steps: list[TensorDictModule] = []
    if values.dtype is torch.uint8:
        steps.append(in_place(ScaleImage(), OBSERVATION))
    if bool(getattr(known.model, "normalize_input", False)):
        mean, deviation = _scale(cast("nn.Module", known.model.running_mean_std), values.ndim)
        if values.is_floating_point():
            spread = spaces.spread(values.shape, source)
            values = (mean + deviation * _REACH * spread).to(values.dtype)
        steps.append(in_place(Normalise(mean, deviation), OBSERVATION))
        steps.append(in_place(Clip(-_LIMIT, _LIMIT), OBSERVATION))
    example: dict[NestedKey, object] = {OBSERVATION: values}
    state: dict[NestedKey, NestedKey] = {}
    starts: list[Tensor] = []
    if bool(getattr(player, "is_rnn", False)):
        starts = list(known.model.get_default_rnn_state())  # type: ignore[operator]  # a method that torch does not know
    for place, start in enumerate(starts):
        state[("state", str(place))] = ("next", "state", str(place))
        example[("state", str(place))] = torch.zeros(len(values), start.shape[0], start.shape[2])
    steps.append(
        TensorDictModule(
            Network(copied(network), len(starts)),
            in_keys=[OBSERVATION, *state],
            out_keys=[ACTION, *state.values()],
        )
    )
    shape, after = _chosen(player, known)
    steps += [in_place(one, ACTION) for one in after]
    oracle = Predict(known, starts, shape)
    said = spaces.told("rl_games", player, known.observation_space, known.action_space)
    return of_steps(steps, example, oracle, state, said | dict(metadata or {}))


def _scale(normaliser: nn.Module, dims: int) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of a `RunningMeanStd`, whether it was compiled or not."""
    mean = cast("Tensor", normaliser.running_mean).detach().cpu().float()
    variance = cast("Tensor", normaliser.running_var).detach().cpu().float()
    deviation = (variance + float(cast("float", normaliser.epsilon))).sqrt()
    if mean.ndim == 1 and dims > 2:  # one for each channel
        shape = (-1, *[1] * (dims - 2))
        return mean.reshape(shape), deviation.reshape(shape)
    return mean, deviation


def _chosen(player: object, known: Player) -> tuple[tuple[int, ...], list[nn.Module]]:
    """Return the shape of an action, and what `get_action` does to the network's result."""
    what = spaces.kind(known.action_space)
    if what == "Discrete":
        return (), [ArgMax()]
    if what == "Tuple":
        counts = [
            int(spaces.limits(leaf)[1]) + 1 for _, leaf in spaces.leaves(known.action_space, ())
        ]
        return (len(counts),), [ArgMax(counts)]
    low, high = spaces.limits(known.action_space)
    clips = bool(getattr(player, "clip_actions", True))
    steps: list[nn.Module] = [Clip(-1.0, 1.0), Unscale(low.float(), high.float())]
    return tuple(known.action_space.shape), steps if clips else []
