"""Policies of the trainers of Isaac Lab: rl_games, rsl_rl and skrl.

Knows what their players, models and agents do around networks: normalisers, states, clips, scales
and the choice of actions. None of the libraries is ever imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from kd_core import NestedKey
from kd_export._errors import ExportError, NotExportable
from kd_export._schema.files import as_key, unnest
from kd_export.policies import _policy as spaces
from kd_export.policies._policy import (
    ACTION,
    OBSERVATION,
    ArgMax,
    Clip,
    Draft,
    Policy,
    ScaleImage,
    Unscale,
    copied,
    unknown_kind,
    wrong_kind,
)
from kd_export.policies._torchrl import Concatenate

_LIMIT = 5.0
"""What rl_games clips normalised observations to."""


# rl_games. Its normalisers are compiled by TorchScript.


class RunningMeanStd(Protocol):
    """What normalises observations, whether it was compiled or not."""

    running_mean: Tensor
    running_var: Tensor
    epsilon: float


class PlayerModel(Protocol):
    """What is used of the model of a player.

    Attributes:
        a2c_network: The network.
        running_mean_std: What normalises its observations, if something does.
    """

    a2c_network: nn.Module
    running_mean_std: RunningMeanStd

    def get_default_rnn_state(self) -> Sequence[Tensor]:
        """Return what the states start with."""
        ...


class Player(Protocol):
    """What is used of a player."""

    model: PlayerModel
    observation_space: object
    action_space: spaces.Space
    device: torch.device
    states: list[Tensor] | tuple[Tensor, ...] | None
    has_batch_dimension: bool

    def get_action(self, obs: Tensor, is_deterministic: bool) -> Tensor:
        """Return actions."""
        ...


class RlGamesOracle(spaces.Oracle):
    """The player's own `get_action`, deterministic."""

    def __init__(self, player: Player, states: Sequence[Tensor], shape: tuple[int, ...]) -> None:
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
    if not _is_player(player):
        raise wrong_kind(
            "a player of rl_games",
            player,
            "PpoPlayerContinuous or PpoPlayerDiscrete",
            "Make it with `runner.create_player()`, and call `player.restore(path)`.",
        )
    if spaces.kind(player.observation_space) != "Box":
        raise NotExportable(
            "players with several observations are not converted.",
            got=spaces.kind(player.observation_space),
            hint="Write the policy as a keyed module, and pass `oracle=` to `kd_export.save`.",
        )
    ((_, space),) = spaces.leaves(player.observation_space, (OBSERVATION,))
    source = torch.Generator().manual_seed(0)
    values = spaces.draw(space, source)
    draft = Draft()
    if values.dtype is torch.uint8:
        draft.change(OBSERVATION, ScaleImage())
    if bool(getattr(player.model, "normalize_input", False)):
        mean, deviation = _rl_games_scale(player.model.running_mean_std, values.ndim)
        if values.is_floating_point():
            drawn = spaces.around(mean, deviation, _LIMIT, values.shape, source)
            values = drawn.to(values.dtype)
        draft.normalise(OBSERVATION, mean, deviation, _LIMIT)
    draft.example[OBSERVATION] = values
    recurrent = bool(getattr(player, "is_rnn", False))
    states = list(player.model.get_default_rnn_state()) if recurrent else []
    network = Network(copied(player.model.a2c_network), len(states))
    starts = _starts(len(values), [(state.shape[0], state.shape[2]) for state in states])
    draft.add_with_state(network, [OBSERVATION], [ACTION], starts)
    shape, after = _rl_games_choice(player)
    draft.change(ACTION, *after)
    oracle = RlGamesOracle(player, states, shape)
    said = spaces.told("rl_games", player, player.observation_space, player.action_space)
    return draft.finish(oracle, said | dict(metadata or {}))


def _is_player(given: object) -> TypeGuard[Player]:
    network = getattr(getattr(given, "model", None), "a2c_network", None)
    return isinstance(network, nn.Module) and hasattr(given, "get_action")


def _starts(rows: int, sizes: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Return what states of so many layers and units start with, by their numbers."""
    return {str(place): torch.zeros(rows, *size) for place, size in enumerate(sizes)}


def _rl_games_scale(normaliser: RunningMeanStd, dims: int) -> tuple[Tensor, Tensor]:
    """Return mean and deviation for observations of so many dimensions."""
    mean = normaliser.running_mean.detach().cpu().float()
    variance = normaliser.running_var.detach().cpu().float()
    deviation = (variance + float(normaliser.epsilon)).sqrt()
    if mean.ndim == 1 and dims > 2:  # one for each channel
        shape = (-1, *[1] * (dims - 2))
        return mean.reshape(shape), deviation.reshape(shape)
    return mean, deviation


def _rl_games_choice(player: Player) -> tuple[tuple[int, ...], list[nn.Module]]:
    """Return the shape of an action, and what `get_action` does to the network's result."""
    what = spaces.kind(player.action_space)
    if what == "Discrete":
        return (), [ArgMax()]
    if what == "Tuple":
        parts = spaces.leaves(player.action_space, ())
        counts = [count for _, leaf in parts for count in spaces.counts(leaf)]
        return (len(counts),), [ArgMax(counts)]
    low, high = spaces.limits(player.action_space)
    clips = bool(getattr(player, "clip_actions", True))
    steps: list[nn.Module] = [Clip(-1.0, 1.0), Unscale(low.float(), high.float())]
    return tuple(player.action_space.shape), steps if clips else []


# rsl_rl.


class RslRlModel(Protocol):
    """What is used of a model of rsl_rl.

    Attributes:
        obs_dim: How many numbers it observes, if they are in one group.
        cnns: The networks for images by their group, if there are images.
    """

    obs_dim: int
    cnns: Mapping[str, nn.Module]
    obs_groups: Sequence[str]
    obs_normalizer: nn.Module
    mlp: nn.Module

    def __call__(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Return deterministic actions."""
        ...

    def reset(self, dones: Tensor | None = None) -> None:
        """Forget the state of these rows."""
        ...


class RslRlOracle(spaces.Oracle):
    """The model itself, and the clip behind it."""

    def __init__(self, model: RslRlModel, groups: Sequence[str], clip: float | None) -> None:
        self._model, self._groups, self._clip = model, groups, clip

    def __call__(self, observations: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Return the actions."""
        if isinstance(observations, Tensor):
            observations = {self._groups[0]: observations}
        with torch.no_grad():
            action = self._model(observations)
        return action if self._clip is None else action.clamp(-self._clip, self._clip)

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin a new episode in these rows, or in all."""
        self._model.reset(mask)


def from_rsl_rl(
    model: object,
    example: Mapping[str, Tensor] | None = None,
    *,
    clip_actions: float | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Policy:
    """Build a policy of a model of rsl_rl, or of a runner that trained one.

    Args:
        model: The actor (`MLPModel`, `RNNModel` or `CNNModel`), or an `OnPolicyRunner`.
        example: Raw observations by group, each with rows. Needed where there are several groups,
            or images; by default rows around what the normaliser has seen are drawn.
        clip_actions: What the environment clips actions to, the option of that name in Isaac
            Lab's wrapper.
        metadata: What the file says of the policy: joints, scales, rates.

    Returns:
        The policy. The observation has the key ``"observation"``, several groups are below it.

    Raises:
        NotExportable: The model is of another kind.
    """
    known = _actor(model)
    images = [str(group) for group in getattr(known, "obs_groups_2d", ())]
    vectors = [str(group) for group in known.obs_groups]
    groups = [*vectors, *images]
    if example is None:
        if len(groups) > 1 or images:
            raise ExportError(
                f"the model reads several observations, {', '.join(groups)}, whose sizes it does "
                "not tell.",
                expected=tuple(groups),
                hint="Pass an `example`, such as `env.get_observations()`.",
            )
        rows = {groups[0]: _drawn(known)}
    else:
        rows = {group: _rows(example, group) for group in groups}
    keys: dict[str, NestedKey] = {
        group: OBSERVATION if len(groups) == 1 else (OBSERVATION, group) for group in groups
    }
    draft = Draft()
    draft.example |= {keys[group]: value for group, value in rows.items()}
    if vectors:
        draft.add(Concatenate(), [keys[group] for group in vectors], ["features"])
        if not isinstance(known.obs_normalizer, nn.Identity):
            draft.change("features", copied(known.obs_normalizer))
    for group in images:
        parts: list[NestedKey] = ["features"] if vectors or group != images[0] else []
        draft.add(copied(known.cnns[group]), [keys[group]], [("image", group)])
        draft.add(Concatenate(), [*parts, ("image", group)], ["features"])
    layer = getattr(getattr(known, "rnn", None), "rnn", None)
    if isinstance(layer, nn.RNNBase):
        draft.add_layer(layer, len(next(iter(rows.values()))))
    draft.add(copied(known.mlp), ["features"], [ACTION])
    distribution = getattr(known, "distribution", None)
    if distribution is not None:
        result = distribution.as_deterministic_output_module()
        if "Identity" not in type(result).__name__:
            draft.change(ACTION, copied(result))
    if clip_actions is not None:
        draft.change(ACTION, Clip(-clip_actions, clip_actions))
    said: dict[str, object] = {"framework": "rsl_rl", "algorithm": type(known).__name__}
    said |= {"clip_actions": clip_actions, **(metadata or {})}
    return draft.finish(RslRlOracle(known, groups, clip_actions), said)


def _actor(model: object) -> RslRlModel:
    """Copy the actor of a runner or an algorithm."""
    for path in ("alg.actor", "alg.policy", "actor", "student", ""):
        found = model
        for name in filter(None, path.split(".")):
            found = getattr(found, name, None)
        if _is_model(found):
            return copied(found)
    raise wrong_kind(
        "a model or a runner of rsl_rl 5",
        model,
        "MLPModel, RNNModel, CNNModel or OnPolicyRunner",
        "Pass `runner.alg.actor`. For older versions write the sequence as keyed modules, "
        "and pass `oracle=` to `kd_export.save`.",
    )


def _is_model(model: object) -> TypeGuard[RslRlModel]:
    return all(hasattr(model, name) for name in ("obs_groups", "obs_normalizer", "mlp"))


def _rows(example: Mapping[str, Tensor], group: str) -> Tensor:
    value: object = example.get(group)
    if value is None:
        value = unnest(example).get(as_key((OBSERVATION, group)))
    if not isinstance(value, Tensor):
        raise ExportError(
            f"observation `{group}` not found in the example.",
            expected=group,
            hint="Pass observations by group, such as `env.get_observations()`.",
        )
    return value.detach().cpu().contiguous()


def _drawn(model: RslRlModel) -> Tensor:
    """Draw rows around what a normaliser has seen."""
    source = torch.Generator().manual_seed(0)
    values = spaces.REACH * spaces.spread((spaces.ROWS, model.obs_dim), source).float()
    mean, deviation = (getattr(model.obs_normalizer, name, None) for name in ("_mean", "_std"))
    if isinstance(mean, Tensor) and isinstance(deviation, Tensor):
        values = mean + deviation * values
    return values


# skrl, whose users write the models.


class SkrlModel(Protocol):
    """What is used of a model of skrl."""

    observation_space: object
    action_space: spaces.Space

    def act(self, inputs: Mapping[str, object], *, role: str) -> tuple[Tensor, Mapping[str, Any]]:
        """Return actions and what else the model computes."""
        ...

    def compute(self, inputs: Mapping[str, object], role: str) -> tuple[Tensor, Mapping[str, Any]]:
        """Return what the network computes."""
        ...

    def get_specification(self) -> Mapping[str, Mapping[str, Sequence[Sequence[int]]]]:
        """Return what the model keeps from step to step."""
        ...


class Scaler(Protocol):
    """What is used of a `RunningStandardScaler`."""

    running_mean: Tensor
    running_variance: Tensor
    clip_threshold: float
    epsilon: float

    def __call__(self, observations: Tensor) -> Tensor:
        """Normalise and clip observations."""
        ...


class SkrlOracle(spaces.Oracle):
    """The preprocessor and the model of an agent, evaluated as skrl's trainers do."""

    def __init__(
        self, model: SkrlModel, scaler: Scaler | None, sizes: Sequence[Sequence[int]]
    ) -> None:
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
                self._held = [state.clone() for state in others["rnn"]]
        if "net_output" in others:  # categorical: skrl samples, and its logits tell the best
            best: Tensor = ArgMax(_skrl_counts(self._model.action_space))(others["net_output"])
            return best
        mean: Tensor = others.get("mean_actions", actions)
        return mean

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

    model: SkrlModel

    def __init__(self, model: SkrlModel, states: int) -> None:
        super().__init__()
        self.model = model
        self.states = states

    def forward(self, x: Tensor, *states: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the mean or the logits, and the next states with their rows first."""
        inputs: dict[str, object] = {"observations": x, "states": None}
        if self.states:
            inputs["rnn"] = [state.transpose(0, 1).contiguous() for state in states]
        result, others = self.model.compute(inputs, "policy")
        if not self.states:
            return result
        return result, *(state.transpose(0, 1) for state in others["rnn"])


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
    if not _is_skrl(theirs):
        raise wrong_kind(
            "an agent or a model of skrl",
            agent,
            "an agent with `policy`, or a model with `compute`",
            "Pass `runner.agent`, or `models['policy']`.",
        )
    model = copied(theirs)
    found = observation_preprocessor
    if found is None:
        found = getattr(agent, "_observation_preprocessor", None)
    scaler = _scaler(copied(found)) if isinstance(found, nn.Module) else None
    sizes = model.get_specification().get("rnn", {}).get("sizes", [])
    size = sum(
        int(torch.Size(leaf.shape).numel())
        for _, leaf in spaces.leaves(model.observation_space, (OBSERVATION,))
    )
    source, shape = torch.Generator().manual_seed(0), (spaces.ROWS, size)
    draft = Draft()
    if scaler is None:
        values = spaces.REACH * spaces.spread(shape, source)
    else:
        mean, limit = scaler.running_mean.float(), float(scaler.clip_threshold)
        deviation = scaler.running_variance.float().sqrt() + float(scaler.epsilon)
        values = spaces.around(mean, deviation, limit, shape, source)
        draft.normalise(OBSERVATION, mean, deviation, limit)
    draft.example[OBSERVATION] = values.float()
    starts = _starts(spaces.ROWS, [(layers, width) for layers, _, width in sizes])
    draft.add_with_state(Compute(model, len(sizes)), [OBSERVATION], [ACTION], starts)
    draft.change(ACTION, *_skrl_choice(model))
    said = spaces.told("skrl", agent, model.observation_space, model.action_space)
    return draft.finish(SkrlOracle(model, scaler, sizes), said | dict(metadata or {}))


def _is_skrl(given: object) -> TypeGuard[SkrlModel]:
    return isinstance(given, nn.Module) and hasattr(given, "compute")


def _scaler(preprocessor: object) -> Scaler:
    if not _is_scaler(preprocessor):
        raise unknown_kind("preprocessor", preprocessor, "RunningStandardScaler")
    return preprocessor


def _is_scaler(given: object) -> TypeGuard[Scaler]:
    names = ("running_mean", "running_variance", "clip_threshold", "epsilon")
    return all(hasattr(given, name) for name in names)


def _skrl_counts(space: spaces.Space) -> list[int] | None:
    return spaces.counts(space) if spaces.kind(space) == "MultiDiscrete" else None


def _skrl_choice(model: SkrlModel) -> list[nn.Module]:
    """Return what the mixin of a model does to the result of the network."""
    kinds = {one.__name__ for one in type(model).__mro__}
    if {"CategoricalMixin", "MultiCategoricalMixin"} & kinds:
        return [ArgMax(_skrl_counts(model.action_space))]
    clips = any(
        bool(getattr(model, name, False)) for name in ("_g_clip_mean_actions", "_d_clip_actions")
    )
    return [Clip(*spaces.limits(model.action_space))] if clips else []
