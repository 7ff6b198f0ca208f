"""Policies of rsl_rl, the trainer of Isaac Lab.

Knows the parts of its models and the clip of its environments. The library is never imported.
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
    Clip,
    Policy,
    Recurrent,
    copied,
    in_place,
    of_steps,
)
from kd_export.policies._torchrl import Concatenate
from kd_nn import TensorDictModule

_REACH = 3.0


class Model(Protocol):
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


class Predict:
    """The model itself: observations in, clipped actions out.

    Attributes:
        module: The whole sequence of steps, of which a module may lack one.
    """

    def __init__(self, model: Model, groups: Sequence[str], clip: float | None) -> None:
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
    oracle = Predict(known, groups, clip_actions)
    said: dict[str, object] = {"framework": "rsl_rl", "algorithm": type(known).__name__}
    said |= {"clip_actions": clip_actions, **(metadata or {})}
    return of_steps(steps, inputs, oracle, state, said)


def _step(
    step: nn.Module, in_keys: Sequence[NestedKey], out_keys: Sequence[NestedKey]
) -> TensorDictModule:
    return TensorDictModule(step, in_keys=list(in_keys), out_keys=list(out_keys))


def _actor(model: object) -> Model:
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
    return cast("Model", copied(cast("nn.Module", model)))


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


def _drawn(model: Model) -> Tensor:
    """Draw rows around what a normaliser has seen."""
    size = int(cast("int", getattr(model, "obs_dim")))  # noqa: B009  # not typed
    source = torch.Generator().manual_seed(0)
    values = _REACH * spaces.spread((spaces.ROWS, size), source).float()
    mean, deviation = (getattr(model.obs_normalizer, name, None) for name in ("_mean", "_std"))
    if isinstance(mean, Tensor) and isinstance(deviation, Tensor):
        values = mean + deviation * values
    return values
