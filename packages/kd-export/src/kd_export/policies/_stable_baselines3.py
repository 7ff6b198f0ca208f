"""Policies of stable-baselines3 and sb3-contrib.

Knows what their `predict` does around the networks: `VecNormalize`, images, one-hot codes, clips
and scales. The library is never imported: models are known by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from kd_core import NestedKey, unravel_key
from kd_export._errors import ExportError, Key, NotExportable
from kd_export.policies import _policy as spaces
from kd_export.policies._policy import (
    ACTION,
    OBSERVATION,
    Above,
    ArgMax,
    ChannelsFirst,
    Clip,
    Normalise,
    OneHot,
    Policy,
    Recurrent,
    ScaleImage,
    Shaped,
    ToFloat,
    Unscale,
    copied,
    in_place,
    of_steps,
)
from kd_nn import TensorDictModule

_ALL: Key = (OBSERVATION,)


class Model(Protocol):
    """What is used of an algorithm of stable-baselines3."""

    policy: nn.Module
    observation_space: object
    action_space: spaces.Space

    def predict(
        self, observation: object, state: object, episode_start: object, deterministic: bool
    ) -> tuple[spaces.Array, object]:
        """Return actions and states."""
        ...


class Statistics(Protocol):
    """The running mean and variance of `VecNormalize`."""

    mean: object
    var: object


class VecNormalize(Protocol):
    """What is used of `VecNormalize`."""

    obs_rms: Statistics | dict[str, Statistics]
    norm_obs: bool
    norm_obs_keys: list[str] | None
    epsilon: float
    clip_obs: float
    venv: object

    def normalize_obs(self, obs: object) -> object:
        """Return normalised observations."""
        ...


class Predict:
    """The model's own `predict`, behind `VecNormalize`: observations in, actions out.

    Attributes:
        module: The whole sequence of steps, of which a module may lack one.
    """

    def __init__(self, model: Model, vec_normalize: VecNormalize | None, first: bool) -> None:
        self._model = model
        self._normalize = vec_normalize
        self._first = first
        self._state: object = None
        self._starts: Tensor | None = None
        self.module: nn.Module | None = None

    def __call__(self, observations: object) -> object:
        """Return the actions."""
        arrays = _arrays(observations)
        if self._normalize is not None:
            if self._first:
                arrays = _moved(arrays)
            arrays = self._normalize.normalize_obs(arrays)
        rows = len(
            next(iter(arrays.values()))
            if isinstance(arrays, dict)
            else cast("list[object]", arrays)
        )
        starts = torch.ones(rows, dtype=torch.bool) if self._starts is None else self._starts
        action, self._state = self._model.predict(
            arrays, state=self._state, episode_start=starts.numpy(), deterministic=True
        )
        self._starts = torch.zeros(rows, dtype=torch.bool)
        return action

    def reset(self, mask: Tensor | None = None) -> None:
        """Begin a new episode in these rows, or in all."""
        if mask is None:
            self._state = self._starts = None
        elif self._starts is not None:
            self._starts = self._starts | mask


def _arrays(observations: object) -> object:
    if isinstance(observations, Mapping):
        return {name: _arrays(value) for name, value in observations.items()}
    return cast("Tensor", observations).numpy()


def _moved(arrays: object) -> object:
    """Move the channels of images first, before they are normalised."""
    if isinstance(arrays, dict):
        return {name: _moved(value) for name, value in arrays.items()}
    tensor = torch.as_tensor(arrays)
    return tensor.movedim(-1, -3).numpy() if tensor.ndim == 4 else arrays


class Features(nn.Module):
    """Run a features extractor on one observation, or on a dict of several."""

    def __init__(self, extractor: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.extractor = extractor
        self.names = names

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the features."""
        given = dict(zip(self.names, observations, strict=True)) if self.names else observations[0]
        features: Tensor = self.extractor(given)
        return features


def from_sb3(
    model: object, vec_normalize: object = None, *, observation_space: object = None
) -> Policy:
    """Build a policy of a model of stable-baselines3 or sb3-contrib.

    The steps are those of ``model.predict(observation, deterministic=True)`` and of `VecNormalize`
    before it. Supported are PPO, A2C, TRPO, MaskablePPO (without masks), RecurrentPPO, SAC, TQC,
    CrossQ, TD3, DDPG, DQN and QR-DQN.

    Args:
        model: A trained or loaded model.
        vec_normalize: The `VecNormalize` that the model was trained in, or ``False`` for none. By
            default that of the model's own environment, if it has one. A model that was saved has
            no environment, but mostly a trace of it.
        observation_space: The space of raw observations, where the model has no environment and
            its images have their channels last. By default that of the model's environment.

    Returns:
        The policy. Observations have the key ``"observation"``, or ``("observation", name)`` where
        there is a dict of them; the action has the key ``"action"``.

    Raises:
        NotExportable: The model is of another kind, or has an unknown distribution.
        ExportError: The model was trained in a `VecNormalize`, and none is given.
    """
    for name in ("policy", "observation_space", "action_space", "predict"):
        if not hasattr(model, name):
            raise NotExportable(
                f"expected a model of stable-baselines3, got `{type(model).__name__}`.",
                expected="an algorithm, such as PPO",
                got=type(model).__name__,
                hint="Load it with the class of its algorithm: `PPO.load('policy.zip')`.",
            )
    known = cast("Model", model)
    normalize = _normalize(known, vec_normalize)
    raw = _raw_space(known, normalize) if observation_space is None else observation_space
    seen = {key[1:]: leaf for key, leaf in spaces.leaves(known.observation_space, _ALL)}
    source = torch.Generator().manual_seed(0)
    steps: list[TensorDictModule] = []
    example: dict[NestedKey, object] = {}
    first = False
    for key, leaf in spaces.leaves(raw, _ALL):
        values = spaces.draw(leaf, source)
        target = seen[key[1:]]
        statistics = _statistics(normalize, key)
        moves = tuple(values.shape[1:]) != tuple(target.shape) and values.ndim == 4
        if statistics is not None and normalize is not None:
            mean, deviation = statistics
            first = moves and tuple(mean.shape) != tuple(values.shape[1:])
            if moves and first:
                steps.append(in_place(ChannelsFirst(), key))
                moves = False
            steps.append(in_place(Normalise(mean, deviation), key))
            steps.append(in_place(Clip(-normalize.clip_obs, normalize.clip_obs), key))
            values = _like(mean, deviation, values, normalize.clip_obs, source)
            if first:
                values = values.movedim(-3, -1)
        if moves:
            steps.append(in_place(ChannelsFirst(), key))
        encoding = _encoding(target, known.policy)
        if statistics is not None or values.dtype is not torch.float32:
            steps.append(in_place(encoding, key))
        example[unravel_key(key)] = values.contiguous()
    keys = [unravel_key(key) for key, _ in spaces.leaves(raw, _ALL)]
    names = [key[-1] for key in seen if key]
    network, state = _network(known, keys, names, example)
    steps += network
    oracle = Predict(known, normalize, first)
    said = spaces.told("stable-baselines3", model, raw, known.action_space)
    result = of_steps(steps, example, oracle, state, said)
    if vec_normalize is None and normalize is None and _may_have_been_normalised(known):
        result.notes = (_UNKNOWN_NORMALISER,)
    return result


def _normalize(model: Model, given: object) -> VecNormalize | None:
    if given is None:
        find = getattr(model, "get_vec_normalize_env", None)
        given = find() if find is not None else None
        if given is None and _was_normalised(model):
            raise ExportError(
                "the model was trained in a `VecNormalize`, and none is given: without it the "
                "file would act on observations that the policy has never seen.",
                expected="the VecNormalize that was saved beside the model",
                hint="Pass `from_sb3(model, VecNormalize.load(path, venv))`, or `False` as the "
                "second argument where it does not normalise observations.",
            )
    if given is None or given is False:
        return None
    if not hasattr(given, "obs_rms"):
        raise ExportError(
            f"expected a `VecNormalize`, got `{type(given).__name__}`.",
            expected="VecNormalize",
            got=type(given).__name__,
            hint="Load it with `VecNormalize.load(path, venv)`, or pass `False` for none.",
        )
    found = cast("VecNormalize", given)
    return found if getattr(found, "norm_obs", True) else None


_UNKNOWN_NORMALISER = (
    "the model has no environment, and its file does not tell whether it was trained in a "
    "`VecNormalize`: pass that, or `False` for none."
)


def _may_have_been_normalised(model: Model) -> bool:
    """Decide whether a model comes from a file that does not tell of a `VecNormalize`.

    Those of on-policy algorithms do; those of the others keep the last observations alone.
    """
    return hasattr(model, "replay_buffer_class") and getattr(model, "env", None) is None


def _was_normalised(model: Model) -> bool:
    """Decide whether a saved model tells that it was trained in a `VecNormalize`.

    On-policy algorithms keep the last observation before it was normalised only there. The others
    always keep one: they tell only where the last one seen has another dtype, or is outside of its
    space.
    """
    before = getattr(model, "_last_original_obs", None)
    if before is None or not hasattr(model, "replay_buffer_class"):
        return before is not None
    seen = getattr(model, "_last_obs", None)
    if seen is None:
        return False
    for key, space in spaces.leaves(model.observation_space, ()):
        old, new = (torch.as_tensor(_part(part, key)) for part in (before, seen))
        if old.dtype != new.dtype:
            return True
        low, high = spaces.limits(space)
        if old.shape == new.shape and old.shape[1:] == low.shape:
            inside = [bool(((part >= low) & (part <= high)).all()) for part in (old, new)]
            if inside == [True, False]:
                return True
    return False


def _part(observations: object, key: Key) -> object:
    return observations[key[-1]] if key and isinstance(observations, Mapping) else observations


def _raw_space(model: Model, normalize: VecNormalize | None) -> object:
    """Return the space of the environment below what stable-baselines3 wraps around it."""
    env: object = getattr(model, "env", None) or normalize
    space = model.observation_space if env is None else getattr(env, "observation_space", None)
    while env is not None and type(env).__name__ in (
        "VecTransposeImage",
        "VecNormalize",
        "VecMonitor",
        "VecCheckNan",
    ):
        env = getattr(env, "venv", None)
        space = getattr(env, "observation_space", space)
    return model.observation_space if space is None else space


def _statistics(normalize: VecNormalize | None, key: Key) -> tuple[Tensor, Tensor] | None:
    """Return mean and deviation in float64, if an observation is normalised."""
    if normalize is None:
        return None
    held = normalize.obs_rms
    if isinstance(held, dict):
        if len(key) < 2 or key[-1] not in (normalize.norm_obs_keys or held):
            return None
        held = held[key[-1]]
    mean, var = (torch.as_tensor(x, dtype=torch.float64) for x in (held.mean, held.var))
    return mean, (var + normalize.epsilon).sqrt()


def _like(
    mean: Tensor, deviation: Tensor, like: Tensor, clip: float, source: torch.Generator
) -> Tensor:
    """Draw observations around a mean, so far away that a few are clipped."""
    reach = max(3.0, clip / 3)
    shape = (len(like), *mean.shape)
    return (mean + deviation * reach * spaces.spread(shape, source)).to(like.dtype)


def _encoding(space: spaces.Space, policy: nn.Module) -> nn.Module:
    """Return what `preprocess_obs` does to an observation."""
    what = spaces.kind(space)
    if what == "Discrete":
        return OneHot([int(spaces.limits(space)[1]) - int(spaces.limits(space)[0]) + 1])
    if what == "MultiDiscrete":
        low, high = spaces.limits(space)
        return OneHot((high - low + 1).flatten().tolist())
    if what == "Box" and _is_image(space) and getattr(policy, "normalize_images", True):
        return ScaleImage()
    return ToFloat()


def _is_image(space: spaces.Space) -> bool:
    """Decide as `is_image_space` does."""
    if len(space.shape) != 3 or spaces.dtype_of(space) is not torch.uint8:
        return False
    low, high = spaces.limits(space)
    if not (bool((low == 0).all()) and bool((high == 255).all())):
        return False
    smallest = min(space.shape)
    return (space.shape[0] if space.shape[0] == smallest else space.shape[-1]) in (1, 3, 4)


def _network(
    model: Model, keys: list[NestedKey], names: list[str], example: dict[NestedKey, object]
) -> tuple[list[TensorDictModule], dict[NestedKey, NestedKey]]:
    """Return the steps from encoded observations to the environment's actions, and the state."""
    policy = model.policy
    actor = getattr(policy, "actor", None)
    q_net = getattr(policy, "q_net", None) or getattr(policy, "quantile_net", None)
    state: dict[NestedKey, NestedKey] = {}
    steps: list[TensorDictModule] = []
    if hasattr(policy, "action_net") and hasattr(policy, "mlp_extractor"):
        extractor = getattr(policy, "pi_features_extractor", None) or policy.features_extractor
        steps.append(_features(extractor, keys, names))
        layer = getattr(policy, "lstm_actor", None)
        if isinstance(layer, nn.LSTM):
            steps.append(_recurrent(layer, state, example))
        latent = _inner(_inner(policy, "mlp_extractor"), "policy_net")
        steps.append(_head(latent, _inner(policy, "action_net")))
        squashed = bool(getattr(policy, "squash_output", False))
        if squashed:
            steps.append(in_place(nn.Tanh(), ACTION))
        return steps + _to_environment(model, squashed), state
    if isinstance(actor, nn.Module):
        steps.append(_features(_inner(actor, "features_extractor"), keys, names))
        hidden = getattr(actor, "latent_pi", None)
        mean = _inner(actor, "mu")
        if isinstance(hidden, nn.Module):  # SAC, TQC, CrossQ: a squashed normal distribution
            steps.append(_head(hidden, mean))
            steps.append(in_place(nn.Tanh(), ACTION))
        else:
            steps.append(_head(mean))
        return steps + _to_environment(model, squashed=True), state
    if isinstance(q_net, nn.Module):
        steps.append(_features(_inner(q_net, "features_extractor"), keys, names))
        values = getattr(q_net, "q_net", None)
        steps.append(_head(_inner(q_net, "quantile_net" if values is None else "q_net")))
        if values is None:
            steps.append(in_place(MeanOfQuantiles(int(getattr(q_net, "n_quantiles"))), ACTION))  # noqa: B009  # not typed
        steps.append(in_place(ArgMax(), ACTION))
        return steps, state
    raise NotExportable(
        f"the policy `{type(policy).__name__}` is of a kind that kd_export does not know.",
        expected="an actor-critic policy, an actor, or a q-network",
        got=type(policy).__name__,
        hint="Write it as a keyed module, and pass `oracle=` to `kd_export.save`.",
    )


class Actor(nn.Sequential):
    """The layers from features to the numbers that an action is made of."""


def _head(*layers: nn.Module) -> TensorDictModule:
    return TensorDictModule(Actor(*map(copied, layers)), in_keys=["features"], out_keys=[ACTION])


class MeanOfQuantiles(nn.Module):
    """Average the quantiles of each action, as QR-DQN does."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, quantiles: Tensor) -> Tensor:
        """Return a value for each action."""
        return quantiles.reshape(quantiles.shape[0], self.count, -1).mean(1)


def _inner(module: nn.Module, name: str) -> nn.Module:
    found = getattr(module, name)
    if not isinstance(found, nn.Module):
        raise NotExportable(f"`{type(module).__name__}.{name}` is not a module.")
    return found


def _features(extractor: object, keys: list[NestedKey], names: list[str]) -> TensorDictModule:
    step = Features(copied(cast("nn.Module", extractor)), names)
    return TensorDictModule(step, in_keys=keys, out_keys=["features"])


def _recurrent(
    layer: nn.LSTM, state: dict[NestedKey, NestedKey], example: dict[NestedKey, object]
) -> TensorDictModule:
    state[("state", "h")] = ("next", "state", "h")
    state[("state", "c")] = ("next", "state", "c")
    rows = len(cast("Tensor", next(iter(example.values()))))
    for key in state:
        example[key] = torch.zeros(rows, layer.num_layers, layer.hidden_size)
    return TensorDictModule(
        Recurrent(cast("nn.LSTM", copied(layer))),
        in_keys=["features", *state],
        out_keys=["features", *state.values()],
    )


def _to_environment(model: Model, squashed: bool) -> list[TensorDictModule]:
    """Return what `predict` does to the result of the network."""
    space = model.action_space
    what = spaces.kind(space)
    step: list[nn.Module]
    if what == "Box":
        low, high = spaces.limits(space)
        wide = bool((low > -torch.inf).any()) or bool((high < torch.inf).any())
        step = [Shaped(space.shape)] if len(space.shape) != 1 else []
        if squashed:
            step.append(Unscale(low, high))
        elif wide:
            step.append(Clip(low, high))
    elif what == "Discrete":
        step = [ArgMax()]
    elif what == "MultiDiscrete":
        low, high = spaces.limits(space)
        step = [ArgMax((high - low + 1).flatten().tolist())]
    else:
        step = [Above(0.0)]
        if len(space.shape) != 1:
            step.append(Shaped(space.shape))
    return [in_place(one, ACTION) for one in step]
