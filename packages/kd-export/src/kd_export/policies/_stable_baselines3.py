"""Policies of stable-baselines3 and sb3-contrib.

Knows what their `predict` does around the networks: `VecNormalize`, images, one-hot codes, clips
and scales. The library is never imported: models are known by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from kd_core import unravel_key
from kd_export._errors import ExportError, Key, NotExportable
from kd_export.policies import _policy as spaces
from kd_export.policies._policy import (
    ACTION,
    OBSERVATION,
    Above,
    ArgMax,
    ChannelsFirst,
    Clip,
    Draft,
    OneHot,
    Policy,
    ScaleImage,
    Shaped,
    ToFloat,
    Unscale,
    copied,
    unknown_kind,
    wrong_kind,
)

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


class Predict(spaces.Oracle):
    """The model's own `predict`, behind `VecNormalize`."""

    def __init__(self, model: Model, vec_normalize: VecNormalize | None, first: bool) -> None:
        self._model = model
        self._normalize = vec_normalize
        self._first = first
        self._state: object = None
        self._starts: Tensor | None = None

    def __call__(self, observations: Tensor | Mapping[str, Tensor]) -> object:
        """Return the actions."""
        rows = len(
            next(iter(observations.values())) if isinstance(observations, Mapping) else observations
        )
        arrays = _arrays(observations)
        if self._normalize is not None:
            if self._first:
                arrays = _moved(arrays)
            arrays = self._normalize.normalize_obs(arrays)
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


def _arrays(observations: Tensor | Mapping[str, Tensor]) -> object:
    if isinstance(observations, Tensor):
        return observations.numpy()
    return {name: value.numpy() for name, value in observations.items()}


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
    if not _is_model(model):
        raise wrong_kind(
            "a model of stable-baselines3",
            model,
            "an algorithm, such as PPO",
            "Load it with the class of its algorithm: `PPO.load('policy.zip')`.",
        )
    normalize = _normalize(model, vec_normalize)
    raw = _raw_space(model, normalize) if observation_space is None else observation_space
    seen = {key[1:]: leaf for key, leaf in spaces.leaves(model.observation_space, _ALL)}
    source = torch.Generator().manual_seed(0)
    draft = Draft()
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
                draft.change(key, ChannelsFirst())
                moves = False
            limit, shape = normalize.clip_obs, (len(values), *mean.shape)
            draft.normalise(key, mean, deviation, limit)
            values = spaces.around(mean, deviation, limit, shape, source).to(values.dtype)
            if first:
                values = values.movedim(-3, -1)
        if moves:
            draft.change(key, ChannelsFirst())
        encoding = _encoding(target, model.policy)
        if statistics is not None or values.dtype is not torch.float32:
            draft.change(key, encoding)
        draft.example[unravel_key(key)] = values.contiguous()
    _add_network(draft, model, [key[-1] for key in seen if key])
    said = spaces.told("stable-baselines3", model, raw, model.action_space)
    result = draft.finish(Predict(model, normalize, first), said)
    if vec_normalize is None and normalize is None and _may_have_been_normalised(model):
        result.notes = (_UNKNOWN_NORMALISER,)
    return result


def _is_model(given: object) -> TypeGuard[Model]:
    names = ("policy", "observation_space", "action_space", "predict")
    return all(hasattr(given, name) for name in names)


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
    if not _is_normalizer(given):
        raise ExportError(
            f"expected a `VecNormalize`, got `{type(given).__name__}`.",
            expected="VecNormalize",
            got=type(given).__name__,
            hint="Load it with `VecNormalize.load(path, venv)`, or pass `False` for none.",
        )
    return given if getattr(given, "norm_obs", True) else None


def _is_normalizer(given: object) -> TypeGuard[VecNormalize]:
    return hasattr(given, "obs_rms")


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


def _encoding(space: spaces.Space, policy: nn.Module) -> nn.Module:
    """Return what `preprocess_obs` does to an observation."""
    what = spaces.kind(space)
    if what in ("Discrete", "MultiDiscrete"):
        return OneHot(spaces.counts(space))
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


def _add_network(draft: Draft, model: Model, names: list[str]) -> None:
    """Add the steps from encoded observations to the environment's actions."""
    policy, keys = model.policy, list(draft.example)
    actor = getattr(policy, "actor", None)
    q_net = getattr(policy, "q_net", None) or getattr(policy, "quantile_net", None)

    def add_features(owner: nn.Module, name: str = "features_extractor") -> None:
        draft.add(Features(copied(_inner(owner, name)), names), keys, ["features"])

    def add_head(*layers: nn.Module) -> None:
        draft.add(Actor(*map(copied, layers)), ["features"], [ACTION])

    if hasattr(policy, "action_net") and hasattr(policy, "mlp_extractor"):
        own = getattr(policy, "pi_features_extractor", None) is not None
        add_features(policy, "pi_features_extractor" if own else "features_extractor")
        layer = getattr(policy, "lstm_actor", None)
        if isinstance(layer, nn.LSTM):
            draft.add_layer(layer, spaces.ROWS)
        add_head(
            _inner(_inner(policy, "mlp_extractor"), "policy_net"), _inner(policy, "action_net")
        )
        squashed = bool(getattr(policy, "squash_output", False))
        if squashed:
            draft.change(ACTION, nn.Tanh())
        draft.change(ACTION, *_to_environment(model, squashed))
    elif isinstance(actor, nn.Module):
        add_features(actor)
        if isinstance(getattr(actor, "latent_pi", None), nn.Module):
            # SAC, TQC, CrossQ: a squashed normal distribution
            add_head(_inner(actor, "latent_pi"), _inner(actor, "mu"))
            draft.change(ACTION, nn.Tanh())
        else:
            add_head(_inner(actor, "mu"))
        draft.change(ACTION, *_to_environment(model, squashed=True))
    elif isinstance(q_net, nn.Module):
        add_features(q_net)
        if hasattr(q_net, "q_net"):
            add_head(_inner(q_net, "q_net"))
        else:
            add_head(_inner(q_net, "quantile_net"))
            draft.change(ACTION, MeanOfQuantiles(getattr(q_net, "n_quantiles", 1)))
        draft.change(ACTION, ArgMax())
    else:
        expected = "an actor-critic policy, an actor, or a q-network"
        raise unknown_kind("policy", policy, expected)


class Actor(nn.Sequential):
    """The layers from features to the numbers that an action is made of."""


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


def _to_environment(model: Model, squashed: bool) -> list[nn.Module]:
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
        step = [ArgMax(spaces.counts(space))]
    else:
        step = [Above(0.0)]
        if len(space.shape) != 1:
            step.append(Shaped(space.shape))
    return step
