"""Policies of the trainers of Isaac Lab: rl_games, rsl_rl and skrl.

Knows what their players, models and agents do around networks: normalisers, states, clips, scales
and the choice of actions. None of the libraries is ever imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

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
    Normalise,
    Policy,
    Recurrent,
    ScaleImage,
    Unscale,
    copied,
    in_place,
    of_steps,
)
from kd_export.policies._torchrl import Concatenate
from kd_nn import TensorDictModule

_REACH = 3.0
"""How many deviations the rows of an example go from the mean."""
_LIMIT = 5.0
"""What rl_games clips normalised observations to."""


# rl_games. Its normalisers are compiled by TorchScript.


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


class RlGamesOracle:
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
        mean, deviation = _rl_games_scale(
            cast("nn.Module", known.model.running_mean_std), values.ndim
        )
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
    shape, after = _rl_games_choice(player, known)
    steps += [in_place(one, ACTION) for one in after]
    oracle = RlGamesOracle(known, starts, shape)
    said = spaces.told("rl_games", player, known.observation_space, known.action_space)
    return of_steps(steps, example, oracle, state, said | dict(metadata or {}))


def _rl_games_scale(normaliser: nn.Module, dims: int) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of a `RunningMeanStd`, whether it was compiled or not."""
    mean = cast("Tensor", normaliser.running_mean).detach().cpu().float()
    variance = cast("Tensor", normaliser.running_var).detach().cpu().float()
    deviation = (variance + float(cast("float", normaliser.epsilon))).sqrt()
    if mean.ndim == 1 and dims > 2:  # one for each channel
        shape = (-1, *[1] * (dims - 2))
        return mean.reshape(shape), deviation.reshape(shape)
    return mean, deviation


def _rl_games_choice(player: object, known: Player) -> tuple[tuple[int, ...], list[nn.Module]]:
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


# rsl_rl.


class RslRlModel(Protocol):
    """What is used of a model of rsl_rl."""

    obs_groups: Sequence[str]
    obs_normalizer: nn.Module
    mlp: nn.Module

    def __call__(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Return deterministic actions."""
        ...

    def reset(self, dones: Tensor | None = None) -> None:
        """Forget the state of these rows."""
        ...


class RslRlOracle:
    """The model itself: observations in, clipped actions out.

    Attributes:
        module: The whole sequence of steps, of which a module may lack one.
    """

    def __init__(self, model: RslRlModel, groups: Sequence[str], clip: float | None) -> None:
        self.module: nn.Module | None = None
        self._model, self._groups, self._clip = model, groups, clip

    def __call__(self, observations: object) -> Tensor:
        """Return the actions."""
        if isinstance(observations, Tensor):
            given = {self._groups[0]: observations}
        else:
            given = dict(cast("Mapping[str, Tensor]", observations))
        with torch.no_grad():
            action = self._model(given)
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
    inputs: dict[NestedKey, object] = {keys[group]: value for group, value in rows.items()}
    state: dict[NestedKey, NestedKey] = {}
    steps: list[TensorDictModule] = []
    if vectors:
        steps.append(_step(Concatenate(), [keys[group] for group in vectors], ["features"]))
        normaliser = known.obs_normalizer
        if not isinstance(normaliser, nn.Identity):
            steps.append(in_place(copied(normaliser), "features"))
    for group in images:
        network = copied(cast("Mapping[str, nn.Module]", getattr(known, "cnns"))[group])  # noqa: B009  # not typed
        parts: list[NestedKey] = ["features"] if vectors or group != images[0] else []
        steps.append(_step(network, [keys[group]], [("image", group)]))
        steps.append(_step(Concatenate(), [*parts, ("image", group)], ["features"]))
    layer = getattr(getattr(known, "rnn", None), "rnn", None)
    if isinstance(layer, nn.RNNBase):
        names = ["h", "c"] if isinstance(layer, nn.LSTM) else ["h"]
        state = {("state", name): ("next", "state", name) for name in names}
        count = len(next(iter(rows.values())))
        for key in state:
            inputs[key] = torch.zeros(count, layer.num_layers, layer.hidden_size)
        recurrent = Recurrent(cast("nn.RNNBase", copied(layer)))
        steps.append(_step(recurrent, ["features", *state], ["features", *state.values()]))
    steps.append(_step(copied(known.mlp), ["features"], [ACTION]))
    distribution = getattr(known, "distribution", None)
    if distribution is not None:
        result = distribution.as_deterministic_output_module()
        if "Identity" not in type(result).__name__:
            steps.append(in_place(copied(result), ACTION))
    if clip_actions is not None:
        steps.append(in_place(Clip(-clip_actions, clip_actions), ACTION))
    oracle = RslRlOracle(known, groups, clip_actions)
    said: dict[str, object] = {"framework": "rsl_rl", "algorithm": type(known).__name__}
    said |= {"clip_actions": clip_actions, **(metadata or {})}
    return of_steps(steps, inputs, oracle, state, said)


def _step(
    step: nn.Module, in_keys: Sequence[NestedKey], out_keys: Sequence[NestedKey]
) -> TensorDictModule:
    return TensorDictModule(step, in_keys=list(in_keys), out_keys=list(out_keys))


def _actor(model: object) -> RslRlModel:
    """Find the actor in a runner or an algorithm."""
    for path in ("alg.actor", "alg.policy", "actor", "student"):
        found = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if _is_model(found):
            model = found
            break
    if not _is_model(model):
        raise NotExportable(
            f"expected a model or a runner of rsl_rl 5, got `{type(model).__name__}`.",
            expected="MLPModel, RNNModel, CNNModel or OnPolicyRunner",
            got=type(model).__name__,
            hint="Pass `runner.alg.actor`. For older versions write the sequence as keyed modules, "
            "and pass `oracle=` to `kd_export.save`.",
        )
    return cast("RslRlModel", copied(cast("nn.Module", model)))


def _is_model(model: object) -> bool:
    return all(hasattr(model, name) for name in ("obs_groups", "obs_normalizer", "mlp"))


def _rows(example: object, group: str) -> Tensor:
    get = cast("Callable[[str], object]", getattr(example, "get"))  # noqa: B009  # dict or container
    value = get(group)
    if value is None:
        value = unnest(cast("Mapping[str, object]", example)).get(as_key((OBSERVATION, group)))
    if not isinstance(value, Tensor):
        raise ExportError(
            f"observation `{group}` not found in the example.",
            expected=group,
            hint="Pass observations by group, such as `env.get_observations()`.",
        )
    return value.detach().cpu().contiguous()


def _drawn(model: RslRlModel) -> Tensor:
    """Draw rows around what a normaliser has seen."""
    size = int(cast("int", getattr(model, "obs_dim")))  # noqa: B009  # not typed
    source = torch.Generator().manual_seed(0)
    values = _REACH * spaces.spread((spaces.ROWS, size), source).float()
    mean, deviation = (getattr(model.obs_normalizer, name, None) for name in ("_mean", "_std"))
    if isinstance(mean, Tensor) and isinstance(deviation, Tensor):
        values = mean + deviation * values
    return values


# skrl, whose users write the models.


class SkrlModel(Protocol):
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


class SkrlOracle:
    """The preprocessor and the model of an agent, evaluated as skrl's trainers do.

    Attributes:
        module: The whole sequence of steps, of which a module may lack one.
    """

    def __init__(
        self, model: SkrlModel, scaler: nn.Module | None, sizes: Sequence[Sequence[int]]
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
            best: Tensor = ArgMax(_skrl_counts(self._model.action_space))(logits)
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
        compute = cast("SkrlModel", self.model).compute
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
    model = cast("SkrlModel", own)
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
        mean, deviation, limit = _skrl_scale(scaler)
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
    steps += _skrl_choice(model)
    oracle = SkrlOracle(model, scaler, sizes)
    said = spaces.told("skrl", agent, model.observation_space, model.action_space)
    return of_steps(steps, example, oracle, state, said | dict(metadata or {}))


def _skrl_scale(scaler: nn.Module) -> tuple[Tensor, Tensor, float]:
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


def _skrl_counts(space: spaces.Space) -> list[int] | None:
    if spaces.kind(space) != "MultiDiscrete":
        return None
    low, high = spaces.limits(space)
    counts: list[int] = (high - low + 1).flatten().tolist()
    return counts


def _skrl_choice(model: SkrlModel) -> list[TensorDictModule]:
    """Return what the mixin of a model does to the result of the network."""
    kinds = {one.__name__ for one in type(model).__mro__}
    if {"CategoricalMixin", "MultiCategoricalMixin"} & kinds:
        return [in_place(ArgMax(_skrl_counts(model.action_space)), ACTION)]
    clips = any(
        bool(getattr(model, name, False)) for name in ("_g_clip_mean_actions", "_d_clip_actions")
    )
    if not clips:
        return []
    low, high = spaces.limits(model.action_space)
    return [in_place(Clip(low, high), ACTION)]
